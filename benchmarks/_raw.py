"""Shared measuring: raw SQLite as the reference, interleaved rounds, medians, and the last line.

The reference does what the product must do at least: the same statements with the same values,
encoded by the same codec, in transactions of its own, in the same process. Rounds of product and
reference alternate, so that a busy machine disturbs both alike: trust the ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import apsw

from pidurable.storage import Op, SqliteStorage
from pidurable.storage._sqlite_statements import HEAD_UPDATE, WRITES

Rows = Sequence[tuple[Op, tuple[Any, ...]]]


class RawStore:
    """A store of the product's schema, written by plain statements."""

    def __init__(self, path: Path, *, full: bool) -> None:
        SqliteStorage(path).close()
        self._connection = apsw.Connection(str(path))
        self._connection.execute("pragma journal_mode = wal")
        self._connection.execute(f"pragma synchronous = {'full' if full else 'normal'}")
        self._connection.execute("pragma foreign_keys = on")
        self._epoch = self._connection.execute("select epoch from session").get
        self.seq = 0

    def commit(self, commits: Iterable[Callable[[], Rows]]) -> None:
        """One transaction of several commits; each callable encodes and gives its rows."""
        execute = self._connection.execute
        execute("begin immediate")
        for make in commits:
            self.seq += 1
            for op, row in make():
                execute(WRITES[op], row)
        execute(HEAD_UPDATE, (self.seq, self.seq * 10, 0, self._epoch))
        execute("commit")

    def close(self) -> None:
        self._connection.close()


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._started


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class Table:
    """Rounds of several measures, printed as medians with their spread."""

    def __init__(self) -> None:
        self._rounds: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self._rounds.setdefault(name, []).append(value)

    def has(self, name: str) -> bool:
        return name in self._rounds

    def median(self, name: str) -> float:
        return statistics.median(self._rounds[name])

    def mean(self, name: str) -> float:
        return statistics.fmean(self._rounds[name])

    def ratio(self, name: str, reference: str) -> float:
        """The median of the ratios of the rounds, which is steadier than the ratio of medians."""
        pairs = zip(self._rounds[name], self._rounds[reference], strict=True)
        return statistics.median(value / other for value, other in pairs)

    def difference(self, name: str, reference: str) -> float:
        pairs = zip(self._rounds[name], self._rounds[reference], strict=True)
        return statistics.median(value - other for value, other in pairs)

    def show(self) -> None:
        width = max(map(len, self._rounds))
        print(f"{'measure':<{width}}  {'median':>12}  {'least':>12}  {'most':>12}  rounds")
        for name, values in self._rounds.items():
            median = statistics.median(values)
            print(
                f"{name:<{width}}  {median:>12,.2f}  {min(values):>12,.2f}  {max(values):>12,.2f}"
                f"  {len(values):>6}"
            )


async def interleave(rounds: int, *parts: Callable[[int], Awaitable[None]]) -> None:
    """Run the parts in turn, `rounds` times; every other round backwards."""
    for number in range(rounds):
        for part in parts if number % 2 == 0 else reversed(parts):
            await part(number)
