"""Decisions of people about permission requests, and their form in JSON.

A decision is one of six classes and nothing else: None, "maybe", True or 1 decide nothing, they are
refused and leave the request open. The JSON form is what commands, the command line and the stored
request have in common: `{"kind": "deny", "text": "..."}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, final

import attrs

from pidurable.errors import InvalidArgumentError, NotJsonError, show
from pidurable.records import _codec, _json
from pidurable.records._checks import check_name, check_text
from pidurable.records._limits import KIB
from pidurable.records._messages import Block, ImageBlock, JsonValue, TextBlock, UserMessage
from pidurable.records._moments import LAST_US
from pidurable.registry._tool import ToolResult
from pidurable.tasks._tree_transaction import to_us

PATTERN_CHARACTERS_MAX: Final = 1_000
WORDS_CHARACTERS_MAX: Final = 8_000
"""Of what a person says who denies."""
RESULT_BYTES_MAX: Final = 256 * KIB


def _check_pattern(_: object, __: object, value: Any) -> None:
    pattern = check_name(value, "pattern", characters_max=PATTERN_CHARACTERS_MAX)
    if not pattern.isprintable():
        problem = "expected one line without control characters"
        raise InvalidArgumentError("pattern", problem, show(value))


def _check_expires(_: object, __: object, value: Any) -> None:
    if value is not None:
        to_us(value, "expires")


def _check_words(_: object, __: object, value: Any) -> None:
    check_text(value, "text", characters_max=WORDS_CHARACTERS_MAX)


@final
@attrs.frozen
class Once:
    """Yes, to this call as it was shown and to no other."""


@final
@attrs.frozen
class Pattern:
    """Yes, to this call and to later ones of the same tool whose text the pattern matches.

    `*` stands for any characters, `?` for one, a backslash takes the next character as it is; the
    whole text has to match. A text that chains or substitutes commands matches no pattern.
    """

    pattern: str = attrs.field(validator=_check_pattern)
    expires: datetime | None = attrs.field(default=None, kw_only=True, validator=_check_expires)
    """When it ends, with a zone; None: when it is revoked."""


@final
@attrs.frozen
class Deny:
    """No. The text is what the model is told, and how a person redirects it."""

    text: str = attrs.field(default="", validator=_check_words)


@final
@attrs.frozen
class Rerun:
    """Of an effect found after a crash: run it again, with the stored arguments."""


@final
@attrs.frozen
class Happened:
    """Of an effect found after a crash: it happened, and this is its result.

    The result is checked like one that the tool returns; of a `ToolResult` the content, details,
    error and structured output count.
    """

    result: str | ToolResult

    def as_result(self) -> ToolResult:
        """The result as a tool would return it."""
        return ToolResult(self.result) if isinstance(self.result, str) else self.result


@final
@attrs.frozen
class Interrupted:
    """Of an effect found after a crash: nobody can tell. The model is told so, and decides."""


Decision = Once | Pattern | Deny | Rerun | Happened | Interrupted

DECISIONS: Final[dict[str, tuple[type, ...]]] = {
    "call": (Once, Pattern, Deny),
    "effect": (Rerun, Happened, Interrupted),
}
"""What can be decided about each subject."""

GRANTING: Final = (Once, Pattern, Rerun, Happened)
_KINDS: Final[dict[str, type]] = {
    "once": Once,
    "pattern": Pattern,
    "deny": Deny,
    "rerun": Rerun,
    "happened": Happened,
    "interrupted": Interrupted,
}
_NAMES: Final = {cls: name for name, cls in _KINDS.items()}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EXAMPLES: Final = "Once(), Pattern(pattern), Deny(text), Rerun(), Happened(result), Interrupted()"


def check_decision(value: object) -> Decision:
    """Return a decision, and refuse whatever is none.

    Raises:
        InvalidArgumentError: It is something else, or says something that cannot be stored.
    """
    if type(value) not in _NAMES:
        problem = f"expected one of {_EXAMPLES}"
        raise InvalidArgumentError("decision", problem, show(value))
    if isinstance(value, Happened):
        check_result(value.result, check_structured=lambda _: None)
    return value  # type: ignore[return-value]


def check_fits(decision: Decision, subject: str) -> None:
    """Refuse a decision that says nothing about this subject.

    Raises:
        InvalidArgumentError: It is for another subject.
    """
    allowed = DECISIONS[subject]
    if type(decision) not in allowed:
        names = ", ".join(each.__name__ for each in allowed)
        what = "a call" if subject == "call" else "an effect found after a crash"
        problem = f"the request is about {what}; decide it with one of {names}"
        raise InvalidArgumentError("decision", problem, show(decision))


def check_result(result: object, *, check_structured: Callable[[JsonValue], None]) -> ToolResult:
    """Return what a person says the result was, checked like one that a tool returns.

    Raises:
        InvalidArgumentError: It is no result, too large, or does not fit the declared schema.
    """
    if isinstance(result, str):
        result = ToolResult(result)
    if not isinstance(result, ToolResult):
        raise InvalidArgumentError("result", "expected a text or a ToolResult", show(result))
    if type(result.error) is not bool:
        raise InvalidArgumentError("result.error", "expected True or False", show(result.error))
    try:
        _json.dumps(_encode_result(result), path="$.result", bytes_max=RESULT_BYTES_MAX)
        if result.structured is not None:
            check_structured(result.structured)
    except NotJsonError:
        raise
    except ValueError as problem:
        raise InvalidArgumentError("result", str(problem), show(result.structured)) from problem
    return result


# --- JSON -------------------------------------------------------------------------------------


def encode_decision(decision: Decision) -> dict[str, Any]:
    """The JSON form of a decision."""
    found: dict[str, Any] = {"kind": _NAMES[type(decision)]}
    if isinstance(decision, Pattern):
        found["pattern"] = decision.pattern
        found["expires_us"] = (
            None if decision.expires is None else to_us(decision.expires, "expires")
        )
    elif isinstance(decision, Deny):
        found["text"] = decision.text
    elif isinstance(decision, Happened):
        found["result"] = _encode_result(decision.as_result())
    return found


def decode_decision(value: object) -> Decision:
    """Read the JSON form of a decision. Nothing is guessed: what is missing decides nothing.

    Raises:
        InvalidArgumentError: It is none.
    """
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str) or kind not in _KINDS:
        kinds = ", ".join(_KINDS)
        problem = f"expected an object whose `kind` is one of {kinds}"
        raise InvalidArgumentError("decision", problem, show(value))
    fields = {name: given for name, given in value.items() if name != "kind"}
    cls = _KINDS[kind]
    if cls is Pattern and "expires_us" in fields:
        fields["expires"] = _moment(fields.pop("expires_us"))
    if cls is Happened and "result" in fields:
        fields["result"] = _decode_result(fields["result"])
    known = {each.name for each in attrs.fields(cls)}
    if not fields.keys() <= known:
        problem = f"a decision of this kind has only {', '.join(sorted(known)) or 'its kind'}"
        raise InvalidArgumentError("decision", problem, show(value))
    try:
        return check_decision(cls(**fields))
    except TypeError:
        problem = f"the kind {kind!r} needs {', '.join(sorted(known))}"
        raise InvalidArgumentError("decision", problem, show(value)) from None


def _moment(value: object) -> datetime | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= LAST_US:
        raise InvalidArgumentError("expires_us", "expected UTC microseconds, or null", show(value))
    return _EPOCH + timedelta(microseconds=value)


def _encode_result(result: ToolResult) -> dict[str, Any]:
    content = result.content
    return {
        "content": content if content is None or isinstance(content, str) else _encode(content),
        "details": result.details,
        "error": result.error,
        "structured": result.structured,
    }


def _encode(blocks: object) -> Any:
    if not isinstance(blocks, Sequence) or not all(
        isinstance(each, TextBlock | ImageBlock) for each in blocks
    ):
        problem = "expected text, or a list of text and image blocks"
        raise InvalidArgumentError("result.content", problem, show(blocks))
    (message,) = _codec.encode_messages([UserMessage(blocks=tuple(blocks), at_us=0)])
    return message["blocks"]


def _decode_result(value: object) -> Any:
    if isinstance(value, str | ToolResult):
        return value
    known = {"content", "details", "error", "structured"}
    if not isinstance(value, Mapping) or not value.keys() <= known:
        problem = f"expected a text, or an object with {', '.join(sorted(known))}"
        raise InvalidArgumentError("result", problem, show(value))
    fields = dict(value)
    content = fields.pop("content", None)
    if isinstance(content, list):
        content = _decode(content)
    return ToolResult(content, **fields)


def _decode(blocks: list[Any]) -> tuple[Block, ...]:
    message = {"role": "user", "blocks": blocks, "at_us": 0}
    try:
        (decoded,) = _codec.decode_messages([message], path="$.result.content")
    except NotJsonError as problem:
        raise InvalidArgumentError("result.content", str(problem), show(blocks)) from problem
    return decoded.blocks  # type: ignore[union-attr]
