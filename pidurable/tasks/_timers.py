"""Moments at which a task is to be looked at: a heap, with what has become void left in it.

A task that is woken before its deadline leaves its entry behind, and whoever takes an entry looks
whether it still counts. So that a task which sleeps and is woken a million times does not leave a
million entries, the void ones are thrown out whenever the heap has doubled.

An entry is one integer, the moment above the id: two thirds of the memory of a pair.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

_ID_BITS = 64
_ID = (1 << _ID_BITS) - 1
_SWEEP_MIN = 10_000


def entry_of(moment_us: int, task: int) -> int:
    """The entry of a task at a moment."""
    return moment_us << _ID_BITS | task


def moment_of(entry: int) -> int:
    """The moment of an entry."""
    return entry >> _ID_BITS


class Timers:
    """Entries of (moment in microseconds, task), the earliest first."""

    __slots__ = ("_counts", "_heap", "_sweep_at")

    def __init__(self, counts: Callable[[int, int], bool]) -> None:
        """Begin without entries.

        Args:
            counts: Whether an entry, moment and task, is still what the task waits for.
        """
        self._counts = counts
        self._heap: list[int] = []
        self._sweep_at = _SWEEP_MIN

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Every entry, in no order; one that is void as well."""
        for entry in self._heap:
            yield entry >> _ID_BITS, entry & _ID

    @property
    def first_us(self) -> int | None:
        """The earliest moment."""
        return moment_of(self._heap[0]) if self._heap else None

    def push(self, moment_us: int, task: int) -> None:
        """Have a task looked at, at a moment."""
        self.push_entry(entry_of(moment_us, task))

    def push_entry(self, entry: int) -> None:
        """`push` of an entry that is kept elsewhere as well, so that it is in memory once."""
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        heapq.heappush(self._heap, entry)

    def expect(self, entries: int) -> None:
        """So many that all count are about to be put in: do not look for void ones meanwhile."""
        self._sweep_at = max(self._sweep_at, 2 * (len(self._heap) + entries))

    def take_due(self, now_us: int) -> tuple[int, int] | None:
        """Take the earliest entry if its moment has come."""
        if not self._heap or self._heap[0] >> _ID_BITS > now_us:
            return None
        entry = heapq.heappop(self._heap)
        return entry >> _ID_BITS, entry & _ID

    def _sweep(self) -> None:
        counts = self._counts
        # A set: a clock that was set back leaves the same entry more than once.
        entries = {entry for entry in self._heap if counts(entry >> _ID_BITS, entry & _ID)}
        self._heap = list(entries)
        heapq.heapify(self._heap)
        self._sweep_at = max(_SWEEP_MIN, 2 * len(self._heap))
