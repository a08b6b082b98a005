"""The conformance suite: what every storage backend has to do, as cases to run.

With pytest::

    class Factory:
        def open(self): ...             # a new, empty store
        def reopen(self, storage): ...  # another handle on the store of that one

    @pytest.mark.parametrize("case", conformance_cases(), ids=lambda case: case.name)
    def test_my_backend(case):
        case.run(Factory())

Run them again with `ReopeningFactory(Factory())`: then what a case sees is what the store holds.
"""

from __future__ import annotations

from typing import final

from pidurable.storage import Storage
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
