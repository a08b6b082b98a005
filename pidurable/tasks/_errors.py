"""Errors as plain data: bounded, and read back without running foreign code."""

from __future__ import annotations

import math
import traceback
from typing import Any

import trio

from pidurable.errors import (
    SessionClosedError,
    SessionPoisonedError,
    StorageAccessError,
    StorageCorruptError,
    StorageRefusedError,
)
from pidurable.records import _json
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX, TRACEBACK_BYTES_MAX
from pidurable.records._tasks import ErrorInfo

_CUT = " [cut]"


def bounded(text: str, bytes_max: int) -> str:
    """A text that can be stored: valid Unicode, no NUL, at most `bytes_max` bytes, cut marked."""
    clean = text.replace("\0", "\\0").encode("utf-8", errors="backslashreplace")
    if len(clean) <= bytes_max:
        return clean.decode()
    return clean[: bytes_max - len(_CUT)].decode(errors="ignore") + _CUT


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # the text of a foreign exception may raise anything
        return f"<its text raised {type(second).__name__}>"


def _type_of(error: BaseException) -> str:
    cls = type(error)
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def leaves(error: BaseException) -> list[BaseException]:
    """Every leaf of an exception group, in order; the error itself if it is none."""
    found: list[BaseException] = []
    pending = [error]
    while pending:
        current = pending.pop()
        if isinstance(current, BaseExceptionGroup):
            pending.extend(reversed(current.exceptions))
        else:
            found.append(current)
    return found


def stops_code(error: BaseException) -> bool:
    """Whether what left foreign code is no error of its own, but what stops it from outside.

    Ctrl-C, the end of the process, a cancellation. What is below BaseException alone need not be
    that: another library's own cancellation is its user's error like any other.
    """
    if isinstance(error, Exception):
        return False
    outside = (KeyboardInterrupt, SystemExit, GeneratorExit)
    if any(isinstance(leaf, outside) for leaf in leaves(error)):
        return True
    # A cancellation that nobody asked for stops nothing.
    return trio.current_effective_deadline() == -math.inf


StorageTrouble = (
    StorageRefusedError
    | SessionPoisonedError
    | SessionClosedError
    | StorageAccessError
    | StorageCorruptError
)


def storage_trouble(error: BaseException, store: str) -> StorageTrouble | None:
    """What the session's own storage did, if that is why a handler raised, else None.

    A refused or uncertain commit, or a read that failed, is never the task's fault, also not as
    the cause of other errors. Another store that the handler opened is its own business.
    """
    found: list[StorageTrouble] = []
    for leaf in leaves(error):
        cause: BaseException | None = leaf
        seen: set[int] = set()
        while cause is not None and id(cause) not in seen:
            if isinstance(cause, StorageTrouble) and cause.store == store:
                found.append(cause)
                break
            seen.add(id(cause))
            cause = cause.__cause__
        else:
            return None
    damage = [each for each in found if isinstance(each, StorageCorruptError)]
    return (damage or found)[0]


def error_info(
    error: BaseException | str, *, detail: Any = None, with_traceback: bool = False
) -> ErrorInfo:
    """Describe an error for the record."""
    if detail is not None:
        detail = _json.check_json(detail, "$.detail")
    if isinstance(error, str):
        return ErrorInfo(
            type="error", message=bounded(error, ERROR_MESSAGE_BYTES_MAX), detail=detail
        )
    message = _text_of(error)
    every = leaves(error)
    if isinstance(error, BaseExceptionGroup):
        listed = "; ".join(f"{_type_of(leaf)}: {_text_of(leaf)}" for leaf in every)
        message = f"{message}: {listed}"
    trace = None
    if with_traceback:
        # The leaves first: they say what happened, and cutting starts at the end.
        parts: list[str] = []
        for leaf in every:
            try:
                parts += traceback.format_exception(leaf)
            except Exception as second:  # formatting asks foreign __str__ and __repr__
                parts.append(f"{_type_of(leaf)}: <its traceback raised {type(second).__name__}>\n")
        trace = bounded("".join(parts), TRACEBACK_BYTES_MAX)
    return ErrorInfo(
        type=bounded(_type_of(error), 256),
        message=bounded(message, ERROR_MESSAGE_BYTES_MAX),
        detail=detail,
        traceback=trace,
    )
