"""The context of a busy conversation, kept and grown entry by entry.

`_transcript.exchange` says what a context is, from scratch. Here the same is kept in a form that
one more entry changes in O(that entry), also while older contexts are still in use. Three facts
make that possible without a copy:

* messages are only ever added at the end: a call gets the places of its results when it comes, so a
  result that comes later fills a place and moves nothing;
* a place is filled once, since the first result of a call counts, and it knows the entry that did
  it: who looks as of an earlier entry still sees that there was none;
* the one message that may move, a system message to the front, is the first that is not a user's,
  so it is known by its place.

So a context is a window on one growing list: how much of it, and as of which entry. What does not
grow is derived again, from the range of entries that is kept beside it: after a head, and after an
edit of something in range. Either begins a new list, and the windows on the old one stay as they
are. An edit therefore costs O(range), once, when somebody next asks for the context.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, final, overload

from pidurable.errors import InternalError
from pidurable.records._entries import Entry, kept_edits, kept_messages, own_message
from pidurable.records._messages import (
    AssistantMessage,
    ImageBlock,
    Message,
    SystemMessage,
    ToolCallBlock,
    ToolResultMessage,
    UserMessage,
)
from pidurable.session import _transcript
from pidurable.session._transcript import ContextMessage

T = TypeVar("T")


class _Place:
    """Where the result of one call stands, or what stands there as long as it has none."""

    __slots__ = ("_missing", "found", "since")

    def __init__(self, entry: int, index: int, call: ToolCallBlock, at_us: int, text: str) -> None:
        # Made when it is looked at: nearly every call has its result by then.
        self._missing = (entry, index, call, at_us, text)
        self.found: ContextMessage | None = None
        self.since = 0
        """The entry that brought the result."""

    def fill(self, found: ContextMessage, since: int) -> None:
        _, _, call, _, _ = self._missing
        # In this order: a large context is looked at in a thread too.
        self.since = since
        self.found = _transcript.sendable_result(found, call.name)

    def as_of(self, entry: int) -> ContextMessage:
        if self.found is not None and self.since <= entry:
            return self.found
        return _transcript.missing_result(*self._missing)


@final
class ModelContext(Sequence[ContextMessage]):
    """The context of a conversation as of one entry: a valid exchange, as a model is given it.

    Immutable: entries that come later do not change it, nor does what is done to a message of it,
    whose JSON is the reader's own. Taking one costs the same however long the transcript is; a
    message is looked up when it is asked for.
    """

    __slots__ = ("_cutoff", "_exchange", "_lead", "_length")

    def __init__(self, exchange: Exchange, cutoff: int) -> None:
        self._exchange = exchange
        self._cutoff = cutoff
        length = self._length = bisect_right(exchange.owners, cutoff)
        lead = exchange.lead
        self._lead = lead if lead is not None and lead < length else 0
        """Where the system message stands in the list that comes first here; 0 where none does."""

    @property
    def cutoff(self) -> int:
        """As of which entry this is: what came later is not in it. 0 where nothing is in range."""
        return self._cutoff

    @property
    def head(self) -> int | None:
        """The entry whose head began this context, and which comes first in it; None for none."""
        return self._exchange.head

    @property
    def changed(self) -> int:
        """The newest entry that changed what earlier ones contribute, by a head or an edit; or 0.

        What a provider counted before it says nothing about what is in this context.
        """
        return self._exchange.changed

    @property
    def asks_something(self) -> bool:
        """Whether a model would have something to answer: what a user said, or results of calls.

        Not where nothing but the system prompt is in it, nor where an answer is the last of it.
        """
        for place in range(self._length - 1, -1, -1):
            item = self._exchange.items[place]
            # A place is that of a result.
            if isinstance(item, _Place) or not isinstance(item.message, SystemMessage):
                return isinstance(item, _Place) or not isinstance(item.message, AssistantMessage)
        return False

    def systems(self) -> Iterator[SystemMessage]:
        """The system messages in order, in O(their number)."""
        for place in self._exchange.systems:
            if place >= self._length:
                return
            item = self._exchange.items[place]
            assert isinstance(item, ContextMessage)
            assert isinstance(item.message, SystemMessage)
            yield item.message

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> ContextMessage: ...

    @overload
    def __getitem__(self, index: slice) -> list[ContextMessage]: ...

    def __getitem__(self, index: int | slice) -> ContextMessage | list[ContextMessage]:
        if isinstance(index, slice):
            return [self._at(place) for place in range(*index.indices(self._length))]
        place = index + self._length if index < 0 else index
        if not 0 <= place < self._length:
            raise IndexError(f"message {index} of a context of {self._length}")
        return self._at(place)

    def __iter__(self) -> Iterator[ContextMessage]:
        # Every request looks at all of it, so this is written for speed: the places in order, and
        # nothing is called for a message that has no JSON of its own.
        lead, length = self._lead, self._length
        if lead:
            yield self._at(0)
        for place, item in enumerate(self._exchange.items):
            if place >= length:
                return
            if lead and place == lead:
                continue
            found = item.as_of(self._cutoff) if isinstance(item, _Place) else item
            message = found.message
            own = own_message(message)
            yield found if own is message else ContextMessage(own, found.entry)

    def __repr__(self) -> str:
        return f"<ModelContext of {self._length} messages as of entry {self._cutoff}>"

    def _at(self, index: int) -> ContextMessage:
        if index <= self._lead:
            index = self._lead if index == 0 else index - 1
        item = self._exchange.items[index]
        return _owned(item.as_of(self._cutoff) if isinstance(item, _Place) else item)


def system_places(context: ModelContext) -> list[int]:
    """Where the system messages of a context stand, in order, in O(their number)."""
    places = [place for place in context._exchange.systems if place < len(context)]
    if context._lead:
        # The one that stands in front is the first of them; those behind it have moved nowhere.
        places[0] = 0
    return places


def of_systems(context: ModelContext, derive: Callable[[ModelContext], T]) -> T:
    """What `derive` makes of the system messages and of nothing else. Not to be changed.

    Kept until there is another one: every request asks for the same.
    """
    exchange = context._exchange
    count = bisect_left(exchange.systems, context._length)
    # Where each of them stands does not change; the one that moves to the front is the first.
    kept = exchange.derived.get(derive)
    if kept is None or kept[0] != count:
        kept = exchange.derived[derive] = count, derive(context)
    found: T = kept[1]
    return found


def images_of(context: ModelContext) -> set[str]:
    """The SHA-256 of every image that a context shows, in O(their number)."""
    found: set[str] = set()
    for since, names in context._exchange.images:
        if since > context.cutoff:
            break
        found.update(names)
    return found


def _owned(item: ContextMessage) -> ContextMessage:
    """The message with JSON of the reader's own."""
    own = own_message(item.message)
    return item if own is item.message else ContextMessage(own, item.entry)


class Exchange:
    """The messages of one range, as far as it has grown."""

    def __init__(self, entries: Iterable[Entry], conversation: int | None = None) -> None:
        """Derive from scratch.

        Args:
            entries: The range, in order.
            conversation: Whose context it is, as in `_transcript.exchange`.
        """
        ordered = list(entries)
        self._conversation = conversation
        self.newest = max((entry.id for entry in ordered), default=0)
        self.floor = self.newest
        """The first entry as of which one may look: what was before it was derived as one."""
        headed = (entry.id for entry in ordered if entry.head is not None)
        self.head: int | None = next(headed, None)
        self.changed = max(
            (entry.id for entry in ordered if entry.head is not None or kept_edits(entry)),
            default=0,
        )
        self.items: list[ContextMessage | _Place] = []
        self.owners: list[int] = []
        """By place, the entry that put it there, or the floor: ascending."""
        self.systems: list[int] = []
        self.lead: int | None = None
        """The place of the system message that moves to the front; None while none does."""
        self.derived: dict[object, tuple[int, Any]] = {}
        """What was made of the system messages alone, by whom, and of how many of them."""
        self.images: list[tuple[int, list[str]]] = []
        """Those of the messages that show any, with the entry that put them there: ascending."""
        self._users_only = True
        self._answered = True
        """Whether an answer would have nothing to answer: at the beginning, and after an answer."""
        self._targets = {entry.id for entry in ordered}
        self._places: dict[tuple[int, int], _Place] = {}
        self._early: dict[tuple[int, int], ContextMessage] = {}
        """Results whose call has not come, or never will."""
        edits = _transcript.newest_edits(ordered)
        for entry in ordered:
            edited = edits.get(entry.id)
            self._put(entry, kept_messages(entry) if edited is None else edited)

    def add(self, entry: Entry) -> bool:
        """Grow by one entry in O(that entry), if that is possible.

        Returns:
            Whether it was: not for a head, and not for an edit of something in range.
        """
        if entry.head is not None:
            return False
        edits = kept_edits(entry)
        if edits and any(e.target in self._targets or e.target == entry.id for e in edits):
            return False
        if entry.id <= self.newest:
            raise InternalError(f"entry {entry.id} came after entry {self.newest}")
        self.newest = entry.id
        self._targets.add(entry.id)
        self._put(entry, kept_messages(entry))
        return True

    def as_of(self, cutoff: int | None = None) -> ModelContext | None:
        """The context as of an entry, in O(log n); None for one before the floor."""
        if cutoff is None or cutoff >= self.newest:
            return ModelContext(self, self.newest)
        return ModelContext(self, cutoff) if cutoff >= self.floor else None

    def _put(self, entry: Entry, messages: Sequence[Message]) -> None:
        inherited = self._conversation not in (None, entry.conversation_id)
        called = False
        for message in messages:
            if isinstance(message, ToolResultMessage):
                self._put_result(ContextMessage(message, entry.id))
            elif isinstance(message, AssistantMessage):
                # A call is known by its entry, which has one answer; a second one only speaks.
                said = _transcript.without_calls(message) if called else message
                called = self._put_answer(said, entry.id, inherited) or called
            elif isinstance(message, UserMessage):
                shown = _transcript.sendable_user(message)
                if shown is not None:
                    self._push(ContextMessage(shown, entry.id))
                    self._answered = False
            else:
                self._put_system(ContextMessage(message, entry.id))

    def _put_answer(self, message: AssistantMessage, entry: int, inherited: bool) -> bool:
        """Put an answer and the places of its results; True if it has any."""
        shown = _transcript.sendable_answer(message) if message.status == "complete" else None
        if shown is None:
            return False
        if self._answered:
            self._push(_transcript.stand_in(message, entry))
        self._push(ContextMessage(shown, entry))
        self._users_only = False
        text = _transcript.NOT_KNOWN if inherited else _transcript.INTERRUPTED
        calls = message.tool_calls
        for index, call in enumerate(calls):
            place = _Place(entry, index, call, message.at_us, text)
            early = self._early.pop((entry, index), None)
            if early is not None:
                place.fill(early, early.entry)
                self._note_images(early.message)
            self._places[entry, index] = place
            self._push(place)
        self._answered = not calls
        return bool(calls)

    def _put_result(self, item: ContextMessage) -> None:
        assert isinstance(item.message, ToolResultMessage)
        place = self._places.get(item.message.call)
        if place is None:
            self._early.setdefault(item.message.call, item)
        elif place.found is None:
            place.fill(item, max(item.entry, self.floor))
            self._note_images(item.message)

    def _put_system(self, item: ContextMessage) -> None:
        if self._users_only and self.items:
            self.lead = len(self.items)
        self._users_only = False
        self.systems.append(len(self.items))
        self.items.append(item)
        self.owners.append(self.newest)

    def _push(self, item: ContextMessage | _Place) -> None:
        self.items.append(item)
        self.owners.append(self.newest)
        if isinstance(item, ContextMessage):
            self._note_images(item.message)

    def _note_images(self, message: Message) -> None:
        assert not isinstance(message, SystemMessage)
        names = [block.blob for block in message.blocks if type(block) is ImageBlock]
        if names:
            self.images.append((self.newest, names))


class KeptRange:
    """The range of a busy conversation, and the exchange of it once somebody has asked."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        """Only ever added to; a head begins a new list."""
        self.exchange: Exchange | None = None

    def publish(self, entry: Entry) -> bool:
        """One more entry is committed; False if the range must be read from the history."""
        longer = _transcript.extend_range(self.entries, entry)
        if longer is None:
            return False
        if longer is not self.entries:
            self.entries, self.exchange = longer, None
        elif self.exchange is not None and not self.exchange.add(entry):
            self.exchange = None
        return True

    def adopt(self, exchange: Exchange, base: list[Entry], count: int) -> bool:
        """Keep an exchange that was derived of `base[:count]` meanwhile, unless it is too old."""
        if base is not self.entries:
            return False
        if all(exchange.add(base[place]) for place in range(count, len(base))):
            self.exchange = exchange
            return True
        return False

    def covers(self, cutoff: int) -> bool:
        """Whether the range as of an entry can be told from this one: not from before its head."""
        head = self.entries[0] if self.entries and self.entries[0].head is not None else None
        return head is None or cutoff >= head.id


def context_of(entries: Iterable[Entry], *, conversation: int | None = None) -> ModelContext:
    """The context of a range, from scratch. `Session.context` keeps it instead."""
    context = Exchange(entries, conversation).as_of()
    assert context is not None
    return context
