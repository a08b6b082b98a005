"""Reads of the storage that remember, for the commit that made them, that they failed.

A body may catch what a read raised, and decide something without the answer. What it decides then
stands on nothing, so its commit is refused with the error of the read. The guard sits here, in
front of the storage, so that no read of any layer can be forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from pidurable.session._batch import Draft
from pidurable.storage import Storage

_WRITES = frozenset({"acquire", "heartbeat", "release", "close", "apply", "checkpoint"})
_READS = tuple(
    name
    for name, value in vars(Storage).items()
    if not name.startswith("_") and callable(value) and name not in _WRITES
)


class _GuardedReads:
    def __init__(self, storage: Storage, draft_of_caller: Callable[[], Draft | None]) -> None:
        self._storage = storage
        for name in _READS:
            setattr(self, name, _guard(getattr(storage, name), draft_of_caller))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def _guard(
    read: Callable[..., Any], draft_of_caller: Callable[[], Draft | None]
) -> Callable[..., Any]:
    @functools.wraps(read)
    def guarded(*args: Any, **named: Any) -> Any:
        try:
            return read(*args, **named)
        except BaseException as error:
            draft = draft_of_caller()
            if draft is not None and draft.broken is None:
                draft.broken = error
            raise

    return guarded


def guarded_reads(storage: Storage, draft_of_caller: Callable[[], Draft | None]) -> Storage:
    """The same storage, whose failed reads break the commit in which they happen.

    Args:
        storage: The storage that answers.
        draft_of_caller: The draft of the body that the calling code runs in, if any.
    """
    return cast("Storage", _GuardedReads(storage, draft_of_caller))
