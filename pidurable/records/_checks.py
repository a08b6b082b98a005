"""Checks of names, texts and ids where they come in, before anything stands on them.

What is not refused here goes to the storage as it is: a lone surrogate would fail there, in
another's commit, and a NUL would cut the text for whoever looks with other tools.
"""

from __future__ import annotations

from collections.abc import Iterable

from pidurable.errors import InvalidArgumentError, show
from pidurable.records._ids import TaskId
from pidurable.records._json import check_json

__all__ = [
    "check_is_list",
    "check_name",
    "check_reason",
    "check_seconds",
    "check_text",
    "check_timeout",
    "is_id",
]

NAME_CHARACTERS_MAX = 512
REASON_CHARACTERS_MAX = 1000


def check_name(value: object, argument: str, *, characters_max: int = NAME_CHARACTERS_MAX) -> str:
    """Return a key, kind or other name as a plain str.

    Raises:
        InvalidArgumentError: It is no str, empty, or too long.
        NotJsonError: It holds a NUL or a lone surrogate.
    """
    if not isinstance(value, str) or not 0 < len(value) <= characters_max:
        problem = f"expected a str of 1 to {characters_max} characters"
        raise InvalidArgumentError(argument, problem, show(value))
    return _plain(value, argument)


def check_text(value: object, argument: str, *, characters_max: int) -> str:
    """Return a text that may be empty, as a plain str; otherwise like `check_name`."""
    if not isinstance(value, str) or len(value) > characters_max:
        problem = f"expected a str of at most {characters_max} characters"
        raise InvalidArgumentError(argument, problem, show(value))
    return _plain(value, argument)


def check_reason(value: object) -> str:
    """Return the reason of an abort: one that can be stored, and that somebody can read."""
    return check_name(value, "reason", characters_max=REASON_CHARACTERS_MAX)


def is_id(value: object) -> bool:
    """Tell whether a value can be the id of anything. Booleans and other numbers cannot."""
    return type(value) in (int, TaskId) and 0 < value < 2**63  # type: ignore[operator]


def check_seconds(value: object, argument: str) -> float:
    """Return a number of seconds from now, which may be 0 or infinite.

    Raises:
        InvalidArgumentError: It is no number, negative, or not a number at all (NaN).
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidArgumentError(argument, "expected seconds, at least 0", show(value))
    return float(value) if value < 2**63 else float("inf")


def check_timeout(value: object) -> float:
    """Return the most seconds to wait: infinite for None.

    Raises:
        InvalidArgumentError: It is no number, negative, or not a number at all (NaN).
    """
    return float("inf") if value is None else check_seconds(value, "timeout")


def check_is_list(ids: object, argument: str) -> None:
    """Refuse a lone id where a list of them is taken.

    Raises:
        InvalidArgumentError: It cannot be iterated, or is a text.
    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        problem = f"expected a list of ids, as in {argument}=[task_id]"
        raise InvalidArgumentError(argument, problem, show(ids))


def _plain(value: str, argument: str) -> str:
    if type(value) is str and value.isascii() and "\0" not in value:
        return value
    plain = check_json(value, f"$.{argument}")
    assert isinstance(plain, str)
    return plain
