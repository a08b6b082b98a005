"""A storage under watch: what its calls told their callers, compared with what is in the file.

The errors that a caller may be shown are those that the contract names for each door; what is
beside them is a problem. A batch that was refused must not be in the file, one that was
acknowledged must be and stay; of one that is uncertain nobody knows, and the next opening tells.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import apsw
import attrs

from pidurable.errors import (
    ExportFileError,
    HolderLostError,
    MigrationError,
    NotAStoreError,
    PidurableError,
    SessionClosedError,
    StorageAccessError,
    StorageCorruptError,
    StorageRefusedError,
)
from pidurable.storage import Batch, Storage
from pidurable.testing._forwarding import ForwardingStorage

ResultT = TypeVar("ResultT")

WRITING = ("apply", "acquire", "heartbeat", "release", "checkpoint")
ALWAYS = (StorageAccessError,)
WRITE_ERRORS = (StorageRefusedError, StorageAccessError)
DAMAGE = (StorageCorruptError, NotAStoreError)
"""What a file that answers with zeros looks like."""


def documented(door: str, *, damaged: bool) -> tuple[type[Exception], ...]:
    """What a door of the storage may raise when the machine fails it."""
    if door == "open":
        # The copy that a migration keeps is part of it.
        known: tuple[type[Exception], ...] = (StorageAccessError, MigrationError)
    elif door == "export":
        known = (ExportFileError, *WRITE_ERRORS)
    elif door in WRITING:
        known = WRITE_ERRORS
    else:
        known = ALWAYS
    return (*known, *DAMAGE) if damaged else known


def healthy(door: str) -> AbstractContextManager[None]:
    """A machine that has all that a call needs."""
    return contextlib.nullcontext()


@attrs.define(eq=False)
class Journal:
    """What the callers of one life were told."""

    path: str
    damaged: bool = False
    """Whether the strikes of this life show a file that is cut, so that it looks damaged."""
    lasting: bool = False
    """Whether calls go on failing, once one has."""
    machine: Callable[[str], AbstractContextManager[None]] = healthy
    """Is put round each call of a door, by its name."""
    life: int = 0
    """How many lives this store has had before."""
    schedule: str = ""
    """What the order is drawn from in which trio runs the tasks of this life."""
    takeover: bool = False
    """Whether the store may be taken from a holder that seems to live."""
    hangs: int = 0
    acked: int = 0
    """The newest batch that was acknowledged."""
    unknown: int | None = None
    """The batch of which nobody knows."""
    refused: int = 0
    errors: Counter[str] = attrs.Factory(Counter)
    undocumented: list[str] = attrs.Factory(list)
    differences: list[str] = attrs.Factory(list)
    found: int = 0
    """The newest batch that was stored when it did."""
    held: bool = False
    """Whether this life became the holder."""
    published: int = 0
    """The newest commit that was published."""

    def met(self, door: str, error: BaseException) -> None:
        """Judge an error that came out of a door of the storage."""
        self.errors[f"{door} {type(error).__name__}"] += 1
        if not isinstance(error, documented(door, damaged=self.damaged)):
            self.undocumented.append(f"{door} raised {error!r}")

    def stored_seq(self) -> int:
        """What the file says, looked at beside everything that is under watch."""
        connection = apsw.Connection(self.path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            return int(connection.execute("select seq from session").get)
        finally:
            connection.close()

    def check_reopened(self, seq: int) -> None:
        """Compare what was told with what an opening without faults has found."""
        if seq < self.acked:
            self.differences.append(f"batch {self.acked} was acknowledged, {seq} is the newest")
        if seq < self.published:
            self.differences.append(f"commit {self.published} was shown, {seq} is the newest")
        if seq > self.acked and seq != self.unknown:
            self.differences.append(
                f"batch {seq} is stored; {self.acked} is the last that was acknowledged, and of "
                f"{self.unknown} it was said that nobody knows"
            )


class WatchedStorage(ForwardingStorage):
    """Any storage on a file, with a journal of what it told."""

    def __init__(self, inner: Storage, journal: Journal) -> None:
        super().__init__(inner)
        self.journal = journal

    def _call(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        try:
            with self.journal.machine(name):
                return call()
        except (HolderLostError, SessionClosedError):
            raise
        except BaseException as error:
            self.journal.met(name, error)
            raise

    def apply(self, batch: Batch) -> None:
        journal = self.journal
        try:
            super().apply(batch)
        except StorageRefusedError as refused:
            journal.refused += 1
            found = journal.stored_seq()
            if found >= batch.seq:
                journal.differences.append(f"batch {batch.seq} is stored, yet: {refused}")
            raise
        except PidurableError:
            journal.unknown = batch.seq
            raise
        journal.acked = batch.seq

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
