"""The base of every error, what is a bug of ours, and how a value is shown in a message."""

from __future__ import annotations

import reprlib

import attrs


def show(value: object, *, length: int = 200) -> str:
    """Render a value for a message: its repr, cut at `length` characters, and never an error.

    Of a large value only the beginning is rendered, as its whole repr may not fit into memory.
    """
    try:
        if isinstance(value, str | bytes | bytearray) and len(value) > length:
            text = repr(value[:length]) + "..."
        elif _is_large(value, [_SHOWN_ITEMS]):
            text = _ABRIDGED.repr(value)
        else:
            text = repr(value)
    except Exception as error:  # a repr of foreign code may raise anything
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= length else text[: length - 3] + "..."


_SHOWN_ITEMS = 1_000
_SHOWN_DEPTH = 40
_ABRIDGED = reprlib.Repr()
_ABRIDGED.maxlevel = 4
_ABRIDGED.maxstring = _ABRIDGED.maxother = 200


def _is_large(value: object, budget: list[int], depth: int = 0) -> bool:
    """Whether a container holds more than a message could show, shared parts every time."""
    if isinstance(value, str | bytes | bytearray):
        budget[0] -= len(value) // 200
    elif isinstance(value, dict | list | tuple | set | frozenset):
        budget[0] -= 1 + len(value)
        if budget[0] <= 0 or depth >= _SHOWN_DEPTH:
            return True
        each = value if not isinstance(value, dict) else (*value, *value.values())
        return any(_is_large(item, budget, depth + 1) for item in each)
    return budget[0] <= 0


class PidurableError(Exception):
    """The base of every error that this package raises on purpose."""


@attrs.define(eq=False)
class InternalError(PidurableError):
    """An invariant of pidurable does not hold. This is a bug; the session is poisoned."""

    problem: str

    def __str__(self) -> str:
        return f"internal error, please report it: {self.problem}"


def check(condition: object, problem: str) -> None:
    """Guard stored data: raise `InternalError` unless the condition holds, also under -O."""
    if not condition:
        raise InternalError(problem)
