"""Conversations and entries: the transcript, immutable once stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from pidurable.errors import InvalidArgumentError
from pidurable.records._checks import check_name
from pidurable.records._json import loads_stored
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    Message,
    SystemMessage,
    ToolCallBlock,
)
from pidurable.records._readonly import copied_json

EntryT = TypeVar("EntryT")


def entry(kind: str) -> Callable[[type[EntryT]], type[EntryT]]:
    """Declare an attrs class as the data of entries of a kind: `@entry("shop.receipt")`.

    `tx.append` stores an instance under that kind, `Entry.read(cls)` gives it back. An entry of a
    kind that is not installed reads as raw JSON.

    Raises:
        InvalidArgumentError: The kind is no str of 1 to 512 characters.
        NotJsonError: It holds a NUL or a lone surrogate.
    """
    # What the storage cannot take would otherwise fail there, in a batch with others' commits.
    kind = check_name(kind, "kind")

    def declare(cls: type[EntryT]) -> type[EntryT]:
        cls.__pidurable_entry__ = kind  # type: ignore[attr-defined]
        return cls

    return declare


def entry_kind(value: object) -> str:
    """The kind that the class of a value declares."""
    kind = getattr(type(value), "__pidurable_entry__", None)
    if not isinstance(kind, str):
        raise InvalidArgumentError(
            "value",
            f"{type(value).__name__} does not say what kind of entry it is; "
            "declare it with @entry(kind), or pass kind=",
        )
    return kind


@attrs.frozen(kw_only=True)
class Conversation:
    """A transcript scope; it may be a fork of another, and may be owned by a task."""

    id: int
    uuid: str
    parent: int | None = None
    """The conversation that this one was forked from."""
    parent_entry: int | None = None
    """The last entry of the parent that belongs to this history."""
    owner: int | None = None
    """The task that owns this conversation."""
    key: str | None = None
    principal: str = ""
    created_us: int = 0


ConversationRecord = Conversation
"""Its public name, since a host's handle is called `Conversation`."""


@attrs.frozen(kw_only=True)
class Edit:
    """A change to what an earlier entry contributes to the model's context.

    `messages` None leaves the target out; a tuple replaces its messages.
    """

    target: int
    messages: tuple[Message, ...] | None = None


class Unread:
    """A part of an entry that lies elsewhere in the store, until somebody looks at it."""

    __slots__ = ("_read", "_value")

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read: Callable[[], Any] | None = read
        self._value: Any = None

    def get(self) -> Any:
        """Read it, or give what was read. Two threads may both read it; they read the same."""
        read = self._read
        if read is not None:
            self._value = read()
            self._read = None
        return self._value

    def __repr__(self) -> str:
        return "<not read>" if self._read is not None else repr(self._value)


class UnreadText(Unread):
    """A part whose stored text is at hand: few look at what was just appended."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text: str | None = text

    def get(self) -> Any:
        """Parse the text, or give what was parsed; as for `Unread`, two threads may both do it."""
        text = self._text
        if text is not None:
            self._value = loads_stored(text)
            self._text = None
        return self._value

    def __repr__(self) -> str:
        return repr(self.get())


def _looked_at(part: Any) -> Any:
    return part.get() if isinstance(part, Unread) else part


@attrs.frozen(kw_only=True, repr=False)
class Entry:
    """One immutable transcript record.

    `head` starts the context at that entry from here on. Messages, data and edits of more than
    64 KiB are read from the store when they are first looked at, so look before it is closed.

    A pickle holds all of it, so making one looks. What comes out of it belongs to no session: its
    `read` knows the types that work out of the box, and none of an extension's own codecs.
    """

    id: int
    conversation_id: int
    seq: int
    kind: str
    _messages: tuple[Message, ...] | Unread = attrs.field(
        default=(), eq=_looked_at, alias="messages"
    )
    _data: Any = attrs.field(default=None, eq=_looked_at, alias="data")
    head: int | None = None
    _edits: tuple[Edit, ...] | Unread = attrs.field(default=(), eq=_looked_at, alias="edits")
    by_task: int | None = None
    at_us: int = 0
    _decode: Callable[[Any, Any], Any] | None = attrs.field(
        default=None, repr=False, eq=False, alias="decode"
    )

    @property
    def messages(self) -> tuple[Message, ...]:
        """What the model sees of it; may be empty. JSON inside a message is a copy of your own.

        Raises:
            StorageCorruptError: It lies apart, and is missing or damaged. Restore a copy.
        """
        return own_messages(kept_messages(self))

    @property
    def data(self) -> Any:
        """JSON, typed by the kind, as a copy of your own; raises like `messages`."""
        return copied_json(_looked_at(self._data))

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Changes to what earlier entries contribute, copied and raising like `messages`."""
        return tuple(
            edit
            if not edit.messages
            else Edit(target=edit.target, messages=own_messages(edit.messages))
            for edit in kept_edits(self)
        )

    def _fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "conversation_id": self.conversation_id,
            "seq": self.seq,
            "kind": self.kind,
            "messages": self._messages,
            "data": self._data,
            "head": self.head,
            "edits": self._edits,
            "by_task": self.by_task,
            "at_us": self.at_us,
        }

    def __copy__(self) -> Entry:
        return self

    def __deepcopy__(self, memo: object) -> Entry:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # What reads the parts that lie apart, and what decodes, belongs to an open store.
        whole = {name: _looked_at(part) for name, part in self._fields().items()}
        return _made_of, (whole,)

    def __repr__(self) -> str:
        shown = self._fields()
        return f"Entry({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def read(self, cls: type[EntryT]) -> EntryT:
        """The data as an instance of `cls`, which declares this entry's kind.

        Raises:
            InvalidArgumentError: The class declares another kind.
            NotJsonError: The stored data does not fit today's class; `data` has the raw JSON.
        """
        declared = getattr(cls, "__pidurable_entry__", None)
        if declared != self.kind:
            raise InvalidArgumentError(
                "cls", f"entry {self.id} is of kind {self.kind!r}, {cls.__name__} of {declared!r}"
            )
        assert self._decode is not None
        return self._decode(_looked_at(self._data), cls)  # type: ignore[no-any-return]


def _made_of(whole: dict[str, Any]) -> Entry:
    """An entry from what its pickle holds."""
    # Here, since it takes long to import and few unpickle anything.
    from pidurable.records._codec import Codec

    return Entry(**whole, decode=Codec().decode)


def kept_messages(entry: Entry) -> tuple[Message, ...]:
    """The messages of an entry as they are kept and shared: for who changes nothing in them."""
    found: tuple[Message, ...] = _looked_at(entry._messages)
    return found


def is_visible(entry: Entry) -> bool:
    """Whether a request can tell that the entry is there; reads nothing that lies apart."""
    return entry.head is not None or bool(entry._messages) or bool(entry._edits)


def kept_edits(entry: Entry) -> tuple[Edit, ...]:
    """The edits of an entry as they are kept and shared: for who changes nothing in them."""
    found: tuple[Edit, ...] = _looked_at(entry._edits)
    return found


def own_messages(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages with JSON of the reader's own; themselves where there is none in them."""
    own = tuple(own_message(each) for each in messages)
    return own if any(a is not b for a, b in zip(own, messages, strict=True)) else messages


def own_message(message: Message) -> Message:
    """A message with JSON of the reader's own: what is kept is what later readers get."""
    if isinstance(message, SystemMessage):
        tools = tuple(
            attrs.evolve(tool, schema=copied_json(tool.schema)) for tool in message.tools_added
        )
        return attrs.evolve(message, sections=dict(message.sections), tools_added=tools)
    for block in message.blocks:
        if block.opaque is not None or type(block) is ToolCallBlock:
            break
    else:
        return message
    blocks = tuple([_own_block(each) for each in message.blocks])
    if isinstance(message, AssistantMessage):
        # As `attrs.evolve` does, in a third of its time: every request copies every call.
        return AssistantMessage(
            blocks=blocks,
            status=message.status,
            stop_reason=message.stop_reason,
            model=message.model,
            usage=message.usage,
            at_us=message.at_us,
            error=message.error,
        )
    return attrs.evolve(message, blocks=blocks)


def _own_block(block: Block) -> Block:
    opaque = None if block.opaque is None else copied_json(block.opaque)
    if type(block) is ToolCallBlock:
        arguments = copied_json(block.arguments)
        return ToolCallBlock(name=block.name, arguments=arguments, opaque=opaque)
    return block if opaque is None else attrs.evolve(block, opaque=opaque)
