"""Does a commit cost the same however long the transcript is that is watched, and by whom?

Conversations of 10, 1,000 and 1,000,000 entries grow an entry at a time, with nobody watching, with
one watcher, and with a hundred, who take every frame and its patch. Timed is one commit with all
that it leads to, until the last watcher has its patch; the reference writes the same rows by hand
into a copy of the same store. Besides, what SQLite does for each commit is counted. Then a watcher
stops taking frames: commits with it and without take turns, and what it holds is counted.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from _raw import RawStore, Rows, Stopwatch, Table, percentile
from _transcripts import seed_transcripts
from commit_line import TEXT, Step
from scale import Trace

from pidurable import Conversation, Harness, open_harness
from pidurable.records._codec import Codec
from pidurable.session._seams import SystemClock
from pidurable.session._transaction import Transaction
from pidurable.storage import EntryRow, Op, SqliteStorage

ROUNDS = 11
SIZES = (10, 1_000, 1_000_000)
SHORT_SIZES = (10, 1_000, 20_000)
SEEDED_ANEW_MAX = 1_000
"""Transcripts up to this size are new in each round, so that they stay what they are."""
WATCHERS = (0, 1, 100)
EACH = 100
"""Commits of a round."""
TRACED = 20
STALLED_ROUNDS = 40
STALLED_EACH = 250
STALLED_TOTAL = STALLED_ROUNDS * STALLED_EACH
N_RATIO_MUST, MEDIAN_MUST, P99_MUST, FRAMES_MUST = 1.15, 1.1, 1.5, 100


def body_of(conversation: int, number: int) -> Any:
    """What a commit does: one entry of about 300 B."""

    def body(tx: Transaction) -> int:
        return tx.append(conversation, Step(number, TEXT, number % 2 == 0, number / 7))

    return body


@attrs.define(eq=False)
class Watching:
    """Watchers of one conversation, each of which takes every frame and looks at its patch."""

    number: int
    seen: list[int] = attrs.Factory(list)
    """By watcher, the newest commit that it has seen."""
    _news: trio.Event = attrs.Factory(trio.Event)

    async def watch(
        self, conversation: Conversation, *, task_status: trio.TaskStatus[None]
    ) -> None:
        async with conversation.watch() as watch:
            place = len(self.seen)
            self.seen.append(watch.seq)
            task_status.started()
            async for frame in watch:
                if not frame.patch:
                    raise RuntimeError(f"{frame} has changed nothing")
                self.seen[place] = frame.seq
                self._news.set()

    async def wait_for(self, seq: int) -> None:
        """Wait until all have seen a commit."""
        while any(seen < seq for seen in self.seen):
            self._news = trio.Event()
            await self._news.wait()


@asynccontextmanager
async def watching(conversation: Conversation, number: int) -> AsyncIterator[Watching]:
    """So many watchers, for as long as the block lasts."""
    found = Watching(number)
    async with trio.open_nursery() as nursery:
        for _ in range(number):
            await nursery.start(found.watch, conversation)
        yield found
        nursery.cancel_scope.cancel()


async def append(harness: Harness, conversation: int, watchers: Watching, count: int) -> float:
    """Microseconds of a commit, until everybody has seen it: the median."""
    runtime = harness._runtime
    times: list[float] = []
    for number in range(count):
        stopwatch = Stopwatch()
        await runtime.commit(body_of(conversation, number))
        if watchers.number:
            await watchers.wait_for(runtime.session.line.published_seq)
        times.append(stopwatch.seconds() * 1e6)
    return percentile(times, 0.5)


class RawAppends:
    """The entries by hand, into a copy of the same store."""

    def __init__(self, path: Path) -> None:
        self._store = RawStore(path, full=False)
        self._codec = Codec()
        self._now = SystemClock().now_us
        self._next_id = 2**40

    def append(self, conversation: int, count: int) -> float:
        """Microseconds of a commit: the median."""

        def rows(number: int) -> Rows:
            self._next_id += 1
            data = self._codec.encode_text(Step(number, TEXT, number % 2 == 0, number / 7))
            now, seq = self._now(), self._store.seq
            kind, none = "bench.step", None
            row = EntryRow(
                self._next_id, conversation, seq, kind, none, none, none, none, data, now
            )
            return [(Op.ENTRY, row)]

        times: list[float] = []
        for number in range(count):
            watch = Stopwatch()
            self._store.commit([lambda number=number: rows(number)])  # type: ignore[misc]
            times.append(watch.seconds() * 1e6)
        return percentile(times, 0.5)


@attrs.frozen
class Stores:
    """What was seeded: by size, a conversation for each round and number of watchers."""

    path: Path
    raw: Path
    conversations: dict[int, list[int]]

    @classmethod
    def seed(cls, folder: Path, sizes: tuple[int, ...]) -> Stores:
        path, raw = folder / "watch.sqlite", folder / "raw.sqlite"
        wanted: list[int] = []
        for size in sizes:
            anew = (ROUNDS + 1) * len(WATCHERS) if size <= SEEDED_ANEW_MAX else 1
            wanted += [size] * anew
        conversations: dict[int, list[int]] = {size: [] for size in sizes}
        for size, conversation in zip(wanted, seed_transcripts(path, wanted), strict=True):
            conversations[size].append(conversation)
        shutil.copy(path, raw)
        return cls(path, raw, conversations)

    def take(self, size: int) -> int:
        found = self.conversations[size]
        return found.pop() if len(found) > 1 else found[0]


async def by_size(
    harness: Harness, raw: RawAppends, stores: Stores, sizes: tuple[int, ...], table: Table
) -> None:
    for number in range(ROUNDS):
        for size in sizes if number % 2 == 0 else reversed(sizes):
            table.add(f"{size:,} entries, by hand, us", raw.append(stores.take(size), EACH))
            for watchers in WATCHERS if number % 2 == 0 else reversed(WATCHERS):
                conversation = stores.take(size)
                async with watching(harness.conversation(conversation), watchers) as found:
                    us = await append(harness, conversation, found, EACH)
                table.add(f"{size:,} entries, {watchers} watching, us", us)


async def traced(
    harness: Harness, storage: SqliteStorage, conversation: int
) -> tuple[float, float, float]:
    """Statements, steps of the virtual machine and of full scans of a commit that is watched."""
    async with watching(harness.conversation(conversation), 1) as found:
        await append(harness, conversation, found, 1)
        with Trace(storage) as trace:
            await append(harness, conversation, found, TRACED)
    names = ("statements", "vm_steps", "scan_steps")
    statements, vm_steps, scan_steps = (trace.counts[name] / TRACED for name in names)
    return statements, vm_steps, scan_steps


async def stalled(harness: Harness) -> tuple[float, float, int]:
    """Median and p99 of commits with a stalled watcher over those without; what it holds."""
    runtime = harness._runtime
    times: dict[bool, list[float]] = {True: [], False: []}
    conversations = {with_one: await harness.create_conversation() for with_one in times}

    async def some(with_one: bool) -> None:
        conversation = conversations[with_one].id
        for number in range(STALLED_EACH):
            watch = Stopwatch()
            await runtime.commit(body_of(conversation, number))
            times[with_one].append(watch.seconds())
            held.append(len(stopped._frames))

    held: list[int] = []
    async with conversations[True].watch() as stopped:
        for number in range(STALLED_ROUNDS):
            for with_one in (True, False) if number % 2 == 0 else (False, True):
                await some(with_one)
        frame = await anext(stopped)
        if not frame.whole:
            raise RuntimeError(f"{frame} was given after {STALLED_TOTAL} commits")
    with_it, without = times[True], times[False]
    return (
        percentile(with_it, 0.5) / percentile(without, 0.5),
        percentile(with_it, 0.99) / percentile(without, 0.99),
        max(held),
    )


async def measure(folder: Path, sizes: tuple[int, ...]) -> None:
    table = Table()
    stores = Stores.seed(folder, sizes)
    raw = RawAppends(stores.raw)
    storage = SqliteStorage(stores.path, durability="process")
    counts: dict[int, tuple[float, float, float]] = {}
    async with open_harness(storage, durability="process") as harness:
        for size in sizes:
            counts[size] = await traced(harness, storage, stores.take(size))
        await by_size(harness, raw, stores, sizes, table)
        median, p99, held = await stalled(harness)
    table.show()

    def ratio(size: int, watchers: int) -> float:
        return table.ratio(
            f"{size:,} entries, {watchers} watching, us", f"{size:,} entries, by hand, us"
        )

    print(f"{'entries':>10}", *(f"{number:>4} watching" for number in WATCHERS), end="")
    print("  statements   VM steps  scan steps")
    for size in sizes:
        print(f"{size:>10,}", *(f"{ratio(size, number):>13.2f}" for number in WATCHERS), end="")
        print("".join(f"  {count:>10.2f}" for count in counts[size]))
    print(
        f"a stalled watcher: median {median:.2f} (must {MEDIAN_MUST:g}), p99 {p99:.2f}"
        f" (must {P99_MUST:g}), {held} frames held (must {FRAMES_MUST})"
    )
    equal = "equal" if len(set(counts.values())) == 1 else "differ"
    print(
        f"watch: n_ratio={ratio(sizes[-1], 1) / ratio(sizes[0], 1):.2f}"
        f" unwatched_n={ratio(sizes[-1], 0) / ratio(sizes[0], 0):.2f}"
        f" hundred_n={ratio(sizes[-1], 100) / ratio(sizes[0], 100):.2f}"
        f" statements={equal} scan_steps={sum(each[2] for each in counts.values()):g}"
        f" stalled_p50={median:.2f} stalled_p99={p99:.2f} frames={held}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="up to 20,000 entries")
    short = parser.parse_args().short
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, Path(folder), SHORT_SIZES if short else SIZES)
