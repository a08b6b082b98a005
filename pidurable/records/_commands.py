"""Commands from outside, and the answers to them, as text.

A command names itself: its id counts once, whoever hands it in and however often. It names its
session too, so that one that was left lying beside another store is never applied there. The
answer is what the holder stored in the very commit that applied the command: what it gave, or the
error, with the fields that make it the same error in another process.

An answer is not kept for ever. A key that was drawn here begins with its moment, so that a command
that comes when its answer may be gone is known by its key; any other key is remembered.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import attrs

import pidurable.errors as errors
from pidurable.errors import AnswerGoneError, CommandFailedError, NotJsonError, PidurableError, show
from pidurable.records import _json
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX

FORMAT = 1
HORIZON = ""
"""No command's key. Under it stands, as `at_us`, the moment before which answers may be gone."""
GONE = '{"gone":true}'
"""What stands for an answer that is not kept any more."""

_DRAWN = re.compile("([0-9]{17})-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def drawn_key(at_us: int, uuid: str) -> str:
    """A key for a command that is given none: the moment, and a uuid."""
    return f"{at_us:017d}-{uuid}"


def drawn_at_us(key: str) -> int | None:
    """When a key was drawn; None for one that somebody chose."""
    found = _DRAWN.fullmatch(key)
    return None if found is None else int(found[1])


@attrs.frozen(kw_only=True)
class Command:
    """What a process that does not hold a session wants done in it."""

    id: str
    kind: str
    content: dict[str, Any]
    session: str
    """The uuid of the session it is meant for."""
    at_us: int

    @property
    def digest(self) -> str:
        """SHA-256 of what is asked for, so that an id used twice can be told from a conflict."""
        text = _json.dumps([self.kind, self.content], bytes_max=2 * _json.VALUE_BYTES_MAX)
        return hashlib.sha256(text.encode()).hexdigest()


def encode_command(command: Command, *, bytes_max: int) -> str:
    """Return a command as it is handed in.

    Args:
        command: The command.
        bytes_max: Most bytes of its content.

    Raises:
        NotJsonError: The content is not strict JSON, too deep or too large.
    """
    _json.dumps(command.content, path=f"$<command {command.kind}>", bytes_max=bytes_max)
    value = {
        "format": FORMAT,
        "id": command.id,
        "kind": command.kind,
        "session": command.session,
        "at_us": command.at_us,
        "content": command.content,
    }
    return _json.dumps(value, bytes_max=2 * _json.VALUE_BYTES_MAX)


def decode_command(text: str) -> Command:
    """Read a command as it was handed in.

    Raises:
        NotJsonError: It is none: cut, garbled, or of a format that this program does not know.
    """
    value = _json.loads(text)
    if not isinstance(value, dict):
        raise NotJsonError("$", "a command is an object", show(value))
    if value.get("format") != FORMAT:
        problem = f"this program knows commands of format {FORMAT}"
        raise NotJsonError("$.format", problem, show(value.get("format")))
    types = {"id": str, "kind": str, "session": str, "at_us": int, "content": dict}
    for name, expected in types.items():
        if type(value.get(name)) is not expected:
            problem = f"expected {expected.__name__}"
            raise NotJsonError(f"$.{name}", problem, show(value.get(name)))
    return Command(**{name: value[name] for name in types})


# --- answers ----------------------------------------------------------------------------------


def value_answer(value: Any) -> str:
    """The stored answer to a command that was applied."""
    return _json.dumps({"value": value}, path="$<answer>")


def error_answer(error: Exception) -> str:
    """The stored answer to a command that was refused; nothing but the answer was stored."""
    problem = str(error).encode(errors="backslashreplace")[:ERROR_MESSAGE_BYTES_MAX]
    told = {
        "type": type(error).__name__,
        "message": problem.decode(errors="ignore").replace("\0", ""),
        "fields": None,
    }
    cls: type = type(error)
    if isinstance(error, PidurableError) and attrs.has(cls):
        fields = {
            field.name: getattr(error, field.name) for field in attrs.fields(cls) if field.init
        }
        try:
            return _json.dumps({"error": {**told, "fields": fields}})
        except NotJsonError:
            # What cannot be told in full is told in words.
            return _json.dumps({"error": told})
    return _json.dumps({"error": told})


def read_answer(key: str, text: str) -> Any:
    """What a command gave; raises what it was refused with.

    Raises:
        AnswerGoneError: It was answered, and the answer is not kept any more.
        CommandFailedError: It was refused with an error that this program cannot make again.
        PidurableError: It was refused; the error is as the holder met it.
    """
    answer: Any = _json.loads_stored(text)
    if "gone" in answer:
        raise AnswerGoneError(key, True)
    if "error" in answer:
        raise _told_error(key, answer["error"])
    return answer["value"]


def _told_error(key: str, told: Any) -> PidurableError:
    name, fields = told["type"], told["fields"]
    unknown = CommandFailedError(key, name, told["message"])
    found = getattr(errors, name, None) if name in errors.__all__ else None
    if not isinstance(found, type) or not issubclass(found, PidurableError) or fields is None:
        return unknown
    try:
        return found(**fields)
    except (TypeError, ValueError):
        return unknown  # of another version, with other fields
