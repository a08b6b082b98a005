"""The conformance suite as a list of cases, and what runs it over factories and counts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import final

import attrs

from pidurable.storage import MemoryStorage, SqliteStorage, Storage
from pidurable.testing import (
    _conformance_commands as _conformance_commands,
    _conformance_holding as _conformance_holding,
    _conformance_reads as _conformance_reads,
    _conformance_retention as _conformance_retention,
    _conformance_writes as _conformance_writes,
)
from pidurable.testing._conformance_base import CASES, ConformanceCase, StorageFactory
from pidurable.testing._faulty import ReopeningStorage


def conformance_cases() -> list[ConformanceCase]:
    """Return all cases, in a fixed order. Each one opens a store of its own and closes it."""
    return list(CASES)


@final
class ReopeningFactory:
    """A factory whose stores are closed and opened again after every batch."""

    def __init__(self, factory: StorageFactory) -> None:
        self._factory = factory

    def open(self) -> Storage:
        """Open a new, empty store that reopens after every batch."""
        return ReopeningStorage(self._factory.open(), self._factory.reopen)

    def reopen(self, storage: Storage) -> Storage:
        """Open what a handle of `open` had stored, reopening as before."""
        inner = storage.inner if isinstance(storage, ReopeningStorage) else storage
        return ReopeningStorage(self._factory.reopen(inner), self._factory.reopen)


@attrs.frozen
class FailedCase:
    """A case that a backend does not meet."""

    case: ConformanceCase
    error: Exception


def run_conformance(
    make_factory: Callable[[], StorageFactory], *, reopen: bool = False
) -> list[FailedCase]:
    """Run every case on a backend and return those that fail; none when it conforms.

    Args:
        make_factory: Called once for each case: cases share nothing.
        reopen: Close the store and open it again after every batch.
    """
    failed: list[FailedCase] = []
    for case in conformance_cases():
        factory = make_factory()
        try:
            case.run(ReopeningFactory(factory) if reopen else factory)
        except Exception as error:  # a backend may raise anything: that is what is reported
            failed.append(FailedCase(case, error))
    return failed


# --- the backends that come with the package ----------------------------------------------------


class MemoryFactory:
    """Stores in memory."""

    def open(self) -> MemoryStorage:
        return MemoryStorage()

    def reopen(self, storage: Storage) -> Storage:
        assert isinstance(storage, MemoryStorage)
        return storage.reopen()


class SqliteFactory:
    """Stores in files of a folder that is removed with the factory."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="conformance-", ignore_cleanup_errors=True
        )
        self._stores = 0

    def open(self) -> SqliteStorage:
        self._stores += 1
        return SqliteStorage(Path(self._folder.name) / f"{self._stores}.sqlite")

    def reopen(self, storage: Storage) -> Storage:
        assert isinstance(storage, SqliteStorage)
        return storage.reopen()


BACKENDS: dict[str, Callable[[], StorageFactory]] = {
    "memory": MemoryFactory,
    "sqlite": SqliteFactory,
}
