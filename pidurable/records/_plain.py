"""The stored shape of our own records: messages, edits, outcomes, waits, errors, usage.

Written by hand, as this shape outlives every class: it is public (exports, views and other programs
read it) and what is stored today must be read in years. Fields at their default are left out.
Reading refuses what it does not know, with the place, since dropping a field or guessing a role
would change a transcript without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar, cast, get_args

from pidurable.errors import NotJsonError, show
from pidurable.records._entries import Edit, own_messages
from pidurable.records._forms import nearest
from pidurable.records._json import INTEGER_MAX, INTEGER_MIN, is_plain, join_path
from pidurable.records._messages import (
    AssistantMessage,
    AssistantStatus,
    Block,
    ImageBlock,
    JsonValue,
    Message,
    StopReason,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolDeclaration,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from pidurable.records._tasks import ErrorInfo, JoinPolicy, OutcomeRecord, OutcomeStatus, Wait

ItemT = TypeVar("ItemT")

# --- reading one object -----------------------------------------------------------------------


class _Object:
    """A JSON object being read: every field is asked for by name and type, and none is left."""

    __slots__ = ("fields", "path")

    def __init__(self, json: JsonValue, path: str, known: frozenset[str]) -> None:
        if type(json) is not dict:
            raise NotJsonError(path, "expected an object", show(json))
        if not json.keys() <= known:
            name = next(key for key in json if key not in known)
            raise NotJsonError(path, f"no field {name!r} is known here{nearest(name, known)}")
        self.fields: dict[str, JsonValue] = json
        self.path = path

    def get(self, name: str, *kinds: type, default: Any = ...) -> Any:
        """Return a field that must be of exactly one of the types, or its default if absent."""
        if name not in self.fields:
            if default is ...:
                raise NotJsonError(self.path, f"the field {name!r} is missing")
            return default
        value = self.fields[name]
        if type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise NotJsonError(join_path(self.path, name), f"expected {expected}", show(value))
        return value

    def word(self, name: str, words: tuple[str, ...], default: Any = ...) -> Any:
        """Return a field that must be one of the words."""
        value = self.get(name, str, default=default)
        if value not in words:
            hint = f"expected one of {', '.join(words)}{nearest(value, words)}"
            raise NotJsonError(join_path(self.path, name), hint, show(value))
        return value

    def amount(self, name: str, *kinds: type, default: Any = ...) -> Any:
        """Return a number that must be finite and not negative."""
        value = self.get(name, *kinds, default=default)
        if not (math.isfinite(value) and value >= 0):
            problem = "expected a finite number that is not negative"
            raise NotJsonError(join_path(self.path, name), problem, show(value))
        return value

    def items(
        self, name: str, read: Callable[[JsonValue, str], ItemT], default: Any = ...
    ) -> tuple[ItemT, ...]:
        """Return a list, each item read by `read(json, path)`."""
        value = self.get(name, list, default=default)
        if not value:
            return ()
        path = join_path(self.path, name)
        return tuple([read(item, f"{path}[{index}]") for index, item in enumerate(value)])


def _text(json: JsonValue, path: str) -> str:
    if type(json) is not str:
        raise NotJsonError(path, "expected str", show(json))
    return json


def _integer(json: JsonValue, path: str) -> int:
    if type(json) is not int:
        raise NotJsonError(path, "expected int", show(json))
    return json


def _list(json: JsonValue, path: str) -> list[JsonValue]:
    if type(json) is not list:
        raise NotJsonError(path, "expected a list", show(json))
    return json


_ITERABLES = (tuple, list, Iterable)
"""An abstract class alone is slow to ask."""
_ANY = (dict, list, str, int, float, bool, type(None))
_STATUSES = get_args(AssistantStatus)
_STOP_REASONS = get_args(StopReason)
_TEXT_FIELDS = frozenset(["type", "text", "opaque"])
_IMAGE_FIELDS = frozenset(["type", "blob", "media_type", "opaque"])
_CALL_FIELDS = frozenset(["type", "name", "arguments", "opaque"])
_USER_FIELDS = frozenset(["role", "blocks", "at_us"])
_OUTCOME_FIELDS = frozenset(["status", "result", "error", "reason"])
_OUTCOMES = get_args(OutcomeStatus)

# --- blocks -----------------------------------------------------------------------------------


def _encode_block(block: Block, path: str) -> JsonValue:
    json: dict[str, JsonValue]
    if isinstance(block, TextBlock):
        json = {"type": "text", "text": block.text}
    elif isinstance(block, ThinkingBlock):
        json = {"type": "thinking", "text": block.text}
    elif isinstance(block, ImageBlock):
        json = {"type": "image", "blob": block.blob, "media_type": block.media_type}
    elif isinstance(block, ToolCallBlock):
        json = {"type": "tool_call", "name": block.name, "arguments": block.arguments}
    else:
        raise NotJsonError(path, "expected a block of a message", show(block))
    if block.opaque is not None:
        json["opaque"] = block.opaque
    return json


def _read_text_block(json: JsonValue, path: str) -> Block:
    known = _Object(json, path, _TEXT_FIELDS)
    return TextBlock(text=known.get("text", str), opaque=known.fields.get("opaque"))


def _read_thinking_block(json: JsonValue, path: str) -> Block:
    known = _Object(json, path, _TEXT_FIELDS)
    return ThinkingBlock(text=known.get("text", str), opaque=known.fields.get("opaque"))


def _read_image_block(json: JsonValue, path: str) -> Block:
    known = _Object(json, path, _IMAGE_FIELDS)
    return ImageBlock(
        blob=known.get("blob", str),
        media_type=known.get("media_type", str),
        opaque=known.fields.get("opaque"),
    )


def _read_tool_call_block(json: JsonValue, path: str) -> Block:
    known = _Object(json, path, _CALL_FIELDS)
    return ToolCallBlock(
        name=known.get("name", str),
        arguments=known.get("arguments", *_ANY),
        opaque=known.fields.get("opaque"),
    )


_BLOCKS: Mapping[str, Callable[[JsonValue, str], Block]] = {
    "text": _read_text_block,
    "thinking": _read_thinking_block,
    "image": _read_image_block,
    "tool_call": _read_tool_call_block,
}


def _read_block(json: JsonValue, path: str) -> Block:
    return _choose(json, path, "type", _BLOCKS)(json, path)


def _choose(
    json: JsonValue, path: str, name: str, readers: Mapping[str, Callable[[JsonValue, str], ItemT]]
) -> Callable[[JsonValue, str], ItemT]:
    if type(json) is not dict:
        raise NotJsonError(path, "expected an object", show(json))
    value = json.get(name)
    reader = readers.get(value) if type(value) is str else None
    if reader is None:
        hint = f"expected one of {', '.join(readers)}{nearest(value, readers)}"
        raise NotJsonError(join_path(path, name), hint, show(value))
    return reader


def encode_blocks(blocks: Sequence[Block], *, path: str = "$") -> list[JsonValue]:
    """Return the stored shape of blocks, as it is within a message.

    Raises:
        NotJsonError: One is no block; see its path.
    """
    return _encode_each(blocks, path, _encode_block)


def decode_blocks(json: JsonValue, *, path: str = "$") -> tuple[Block, ...]:
    """Read blocks from their stored shape.

    Raises:
        NotJsonError: An unknown block or field, or a value of another type; see its path.
    """
    return tuple(
        _read_block(item, join_path(path, index)) for index, item in enumerate(_list(json, path))
    )


# --- messages ---------------------------------------------------------------------------------


def encode_messages(messages: Sequence[Message], *, path: str = "$") -> list[JsonValue]:
    """Return the stored shape of messages: `{"role": ..., ...}` each.

    Raises:
        NotJsonError: One is no message, or has what is no block; see its path.
    """
    return _encode_each(messages, path, _encode_message)


def _encode_each(
    values: Iterable[Any], path: str, encode: Callable[[Any, str], JsonValue]
) -> list[JsonValue]:
    if not isinstance(values, _ITERABLES):
        raise NotJsonError(path, "expected a list", show(values))
    return [encode(value, f"{path}[{index}]") for index, value in enumerate(values)]


def _encode_blocks(message: Any, path: str) -> list[JsonValue]:
    return _encode_each(message.blocks, f"{path}.blocks", _encode_block)


def decode_messages(json: JsonValue, *, path: str = "$") -> tuple[Message, ...]:
    """Read messages from their stored shape.

    Raises:
        NotJsonError: An unknown role, block or field, or a value of another type; see its path.
    """
    read: list[Message] = []
    for index, item in enumerate(_list(json, path)):
        place = f"{path}[{index}]"
        read.append(_choose(item, place, "role", _MESSAGES)(item, place))
    return tuple(read)


def as_read(messages: Sequence[Message], size_max: int) -> tuple[Message, ...] | None:
    """The messages, where reading what is stored of them gives the same; None where it may not.

    Where it does, what they are encoded as is plain by its making, since all of them is exact to
    the last field; JSON within them is walked here, and copied: what is kept shares no container
    with its writer. Any other one is checked as it is written, and read again.

    Args:
        messages: What is to be stored.
        size_max: None where there is surely more in them than so many bytes.
    """
    size = 0
    own: list[JsonValue] = []
    for message in messages:
        kind = type(message)
        if type(message.at_us) is not int or not INTEGER_MIN <= message.at_us <= INTEGER_MAX:
            return None
        if kind is AssistantMessage:
            if not _is_exact_answer(cast("AssistantMessage", message)):
                return None
        elif kind is ToolResultMessage:
            if not _is_exact_result(cast("ToolResultMessage", message)):
                return None
        elif kind is not UserMessage:
            return None
        blocks = cast("UserMessage", message).blocks
        if type(blocks) is not tuple:
            return None
        for block in blocks:
            if type(block) is TextBlock or type(block) is ThinkingBlock:
                text = block.text
            elif type(block) is ToolCallBlock:
                text = block.name
                own.append(block.arguments)
            else:
                return None
            if type(text) is not str:
                return None
            size += len(text)
            if block.opaque is not None:
                own.append(block.opaque)
    if size > size_max:
        return None
    if not own:
        return tuple(messages)
    try:
        return own_messages(tuple(messages)) if is_plain(own, size_max) else None
    except RecursionError:
        return None  # the call stack is almost full: to read it again takes none of it


def _is_exact_answer(message: AssistantMessage) -> bool:
    usage = message.usage
    if type(usage) is not Usage or type(usage.cost) is not float:
        return False
    counts = _counts_of(usage)
    return (
        set(map(type, counts)) == _INTEGERS
        and min(counts) >= 0
        and max(counts) <= INTEGER_MAX
        and 0.0 <= usage.cost < math.inf
        and message.status in _STATUSES
        and message.stop_reason in _STOP_REASONS
        and type(message.status) is type(message.stop_reason) is str
        and type(message.model) is str
        and (message.error is None or type(message.error) is str)
    )


def _is_exact_result(message: ToolResultMessage) -> bool:
    call = message.call
    return (
        type(call) is tuple
        and len(call) == 2
        and type(call[0]) is type(call[1]) is int
        and min(call) >= INTEGER_MIN
        and max(call) <= INTEGER_MAX
        and type(message.name) is str
        and type(message.is_error) is bool
        and (message.code is None or type(message.code) is str)
    )


def _encode_message(message: Message, path: str) -> JsonValue:
    json: dict[str, JsonValue]
    if isinstance(message, UserMessage):
        json = {"role": "user", "blocks": _encode_blocks(message, path)}
    elif isinstance(message, AssistantMessage):
        json = {
            "role": "assistant",
            "blocks": _encode_blocks(message, path),
            "status": message.status,
            "stop_reason": message.stop_reason,
            "model": message.model,
            "usage": encode_usage(message.usage),
        }
        if message.error is not None:
            json["error"] = message.error
    elif isinstance(message, ToolResultMessage):
        json = {
            "role": "tool_result",
            "call": list(message.call),
            "name": message.name,
            "blocks": _encode_blocks(message, path),
            "is_error": message.is_error,
        }
        if message.code is not None:
            json["code"] = message.code
    elif isinstance(message, SystemMessage):
        json = {"role": "system", "sections": dict(message.sections)}
        if message.tools_added:
            json["tools_added"] = [
                {"name": tool.name, "description": tool.description, "schema": tool.schema}
                for tool in message.tools_added
            ]
        if message.tools_removed:
            json["tools_removed"] = list(message.tools_removed)
    else:
        raise NotJsonError(path, "expected a message", show(message))
    json["at_us"] = message.at_us
    return json


def _read_user(json: JsonValue, path: str) -> Message:
    known = _Object(json, path, _USER_FIELDS)
    return UserMessage(blocks=known.items("blocks", _read_block), at_us=known.get("at_us", int))


_ASSISTANT_FIELDS = frozenset(
    ["role", "blocks", "status", "stop_reason", "model", "usage", "at_us", "error"]
)


def _read_assistant(json: JsonValue, path: str) -> Message:
    known = _Object(json, path, _ASSISTANT_FIELDS)
    return AssistantMessage(
        blocks=known.items("blocks", _read_block),
        status=known.word("status", _STATUSES),
        stop_reason=known.word("stop_reason", _STOP_REASONS),
        model=known.get("model", str),
        usage=decode_usage(known.get("usage", dict), path=f"{path}.usage"),
        at_us=known.get("at_us", int),
        error=known.get("error", str, default=None),
    )


_RESULT_FIELDS = frozenset(["role", "call", "name", "blocks", "is_error", "at_us", "code"])


def _read_tool_result(json: JsonValue, path: str) -> Message:
    known = _Object(json, path, _RESULT_FIELDS)
    call = known.items("call", _integer)
    if len(call) != 2:
        place = join_path(path, "call")
        raise NotJsonError(place, "expected [assistant entry, index of the call]", show(call))
    return ToolResultMessage(
        call=(call[0], call[1]),
        name=known.get("name", str),
        blocks=known.items("blocks", _read_block),
        is_error=known.get("is_error", bool),
        at_us=known.get("at_us", int),
        code=known.get("code", str, default=None),
    )


_SYSTEM_FIELDS = frozenset(["role", "sections", "tools_added", "tools_removed", "at_us"])


def _read_system(json: JsonValue, path: str) -> Message:
    known = _Object(json, path, _SYSTEM_FIELDS)
    sections = known.get("sections", dict)
    for name, text in sections.items():
        if text is not None:
            _text(text, join_path(join_path(path, "sections"), name))
    return SystemMessage(
        sections=dict(sections),
        tools_added=known.items("tools_added", _read_declaration, default=()),
        tools_removed=known.items("tools_removed", _text, default=()),
        at_us=known.get("at_us", int),
    )


def _read_declaration(json: JsonValue, path: str) -> ToolDeclaration:
    known = _Object(json, path, frozenset(["name", "description", "schema"]))
    return ToolDeclaration(
        name=known.get("name", str),
        description=known.get("description", str),
        schema=known.get("schema", *_ANY),
    )


_MESSAGES: Mapping[str, Callable[[JsonValue, str], Message]] = {
    "user": _read_user,
    "assistant": _read_assistant,
    "tool_result": _read_tool_result,
    "system": _read_system,
}

# --- usage ------------------------------------------------------------------------------------

_USAGE_COUNTS = (
    "requests",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
)
_counts_of: Callable[[Usage], tuple[int, ...]] = attrgetter(*_USAGE_COUNTS)
_INTEGERS = {int}
_COUNTED = frozenset(_USAGE_COUNTS)
_USAGE_FIELDS = _COUNTED | {"cost"}


def encode_usage(usage: Usage) -> dict[str, JsonValue]:
    """Return the stored shape of a usage; numbers that are zero are left out."""
    json: dict[str, JsonValue] = {
        name: count for name, count in zip(_USAGE_COUNTS, _counts_of(usage), strict=True) if count
    }
    if usage.cost:
        json["cost"] = usage.cost
    return json


def decode_usage(json: JsonValue, *, path: str = "$") -> Usage:
    """Read a usage from its stored shape.

    Raises:
        NotJsonError: A number is negative or not finite, or the shape is unknown.
    """
    if type(json) is dict and json.keys() <= _COUNTED:
        # As nearly all of them are: counts, and no cost.
        for value in json.values():
            if type(value) is not int or value < 0:
                break
        else:
            return Usage(**cast("dict[str, int]", json))
    known = _Object(json, path, _USAGE_FIELDS)
    counts = {name: known.amount(name, int, default=0) for name in _USAGE_COUNTS}
    return Usage(**counts, cost=float(known.amount("cost", float, int, default=0.0)))


# --- edits ------------------------------------------------------------------------------------


def encode_edits(edits: Sequence[Edit], *, path: str = "$") -> list[JsonValue]:
    """Return the stored shape of edits; one without messages leaves its target out.

    Raises:
        NotJsonError: As of the messages that it puts there.
    """
    return _encode_each(edits, path, _encode_edit)


def _encode_edit(edit: Edit, path: str) -> JsonValue:
    if edit.messages is None:
        return {"target": edit.target}
    messages = encode_messages(edit.messages, path=f"{path}.messages")
    return {"target": edit.target, "messages": messages}


def decode_edits(json: JsonValue, *, path: str = "$") -> tuple[Edit, ...]:
    """Read edits from their stored shape.

    Raises:
        NotJsonError: The shape is unknown.
    """
    return tuple(
        _read_edit(item, join_path(path, index)) for index, item in enumerate(_list(json, path))
    )


def _read_edit(json: JsonValue, path: str) -> Edit:
    known = _Object(json, path, frozenset(["target", "messages"]))
    messages = known.get("messages", list, default=None)
    if messages is not None:
        messages = decode_messages(messages, path=join_path(path, "messages"))
    return Edit(target=known.get("target", int), messages=messages)


# --- outcomes and waits -----------------------------------------------------------------------


def encode_error(error: ErrorInfo) -> dict[str, JsonValue]:
    """Return the stored shape of an error."""
    json: dict[str, JsonValue] = {"type": error.type, "message": error.message}
    if error.detail is not None:
        json["detail"] = error.detail
    if error.traceback is not None:
        json["traceback"] = error.traceback
    return json


def decode_error(json: JsonValue, *, path: str = "$") -> ErrorInfo:
    """Read an error from its stored shape.

    Raises:
        NotJsonError: The shape is unknown.
    """
    known = _Object(json, path, frozenset(["type", "message", "detail", "traceback"]))
    return ErrorInfo(
        type=known.get("type", str),
        message=known.get("message", str),
        detail=known.fields.get("detail"),
        traceback=known.get("traceback", str, default=None),
    )


def encode_outcome(outcome: OutcomeRecord) -> dict[str, JsonValue]:
    """Return the stored shape of an outcome; it has a `result` where there is one, even null."""
    json: dict[str, JsonValue] = {"status": outcome.status}
    if outcome.has_result:
        json["result"] = outcome.result
    if outcome.error is not None:
        json["error"] = encode_error(outcome.error)
    if outcome.reason is not None:
        json["reason"] = outcome.reason
    return json


def completed_text(result_text: str) -> str:
    """Return the stored text of a completed outcome whose result is encoded already."""
    return f'{{"status":"completed","result":{result_text}}}'


def decode_outcome(json: JsonValue, *, path: str = "$") -> OutcomeRecord:
    """Read an outcome from its stored shape.

    Raises:
        NotJsonError: The shape is unknown.
    """
    known = _Object(json, path, _OUTCOME_FIELDS)
    error = known.get("error", dict, default=None)
    if error is not None:
        error = decode_error(error, path=join_path(path, "error"))
    return OutcomeRecord(
        status=known.word("status", _OUTCOMES),
        result=known.fields.get("result"),
        has_result="result" in known.fields,
        error=error,
        reason=known.get("reason", str, default=None),
    )


_WAIT_FIELDS = frozenset(["on", "conversations", "others", "policy", "deadline_us", "signals"])
_JOIN_POLICIES = get_args(JoinPolicy)


def encode_wait(wait: Wait) -> dict[str, JsonValue]:
    """Return the stored shape of a wait."""
    json: dict[str, JsonValue] = {}
    if wait.on is not None:
        json["on"] = list(wait.on)
    if wait.conversations:
        json["conversations"] = list(wait.conversations)
    if wait.others:
        json["others"] = list(wait.others)
    if wait.policy != "all_settled":
        json["policy"] = wait.policy
    if wait.deadline_us is not None:
        json["deadline_us"] = wait.deadline_us
    if wait.signals:
        json["signals"] = True
    return json


def decode_wait(json: JsonValue, *, path: str = "$") -> Wait:
    """Read a wait from its stored shape.

    Raises:
        NotJsonError: The shape is unknown.
    """
    known = _Object(json, path, _WAIT_FIELDS)
    return Wait(
        on=known.items("on", _integer) if "on" in known.fields else None,
        conversations=known.items("conversations", _integer, default=()),
        others=known.items("others", _integer, default=()),
        policy=known.word("policy", _JOIN_POLICIES, default="all_settled"),
        deadline_us=known.get("deadline_us", int, default=None),
        signals=known.get("signals", bool, default=False),
    )
