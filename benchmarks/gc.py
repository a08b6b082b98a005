"""What does removing 100,000 ended trees cost those who commit beside it?

One process commits an entry every few milliseconds. A collection runs beside it in turns of two
seconds, cancelled at the end of each and gone on with in the next, until nothing is left; so the
latencies with and without it come from one run on one machine. A second store is collected alone.
Every tree is a root with one task below it; every tenth owns a conversation with five entries and a
document too. Half of a thousand blobs are referred to by something that stays.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import trio
from _raw import Rows, Stopwatch, Table, percentile
from _runtimes import CONVERSATION, Seed, task_row

from pidurable.harness._open import Harness, open_harness
from pidurable.records import _codec, _json
from pidurable.records._tasks import OutcomeRecord, Status
from pidurable.storage import ConversationRow, DocumentRow, EntryRow, Op, RevisionRow, SqliteStorage

TREES = 100_000
SHORT_TREES = 2_000
BLOBS = 1_000
EVERY = 10
"""One tree of so many owns a conversation."""
PERIOD_SECONDS = 0.005
TURN_SECONDS = 2.0
SECONDS_MAX = 600.0
AGE = timedelta(days=30)
OUTCOME = _json.dumps(_codec.encode_outcome(OutcomeRecord(status="completed", result={"ok": 1})))
INPUT = _json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 4})
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def fill(path: Path, trees: int) -> None:
    """A store whose trees ended a year ago."""
    seed = Seed(path)
    old = seed.now_us - 365 * 86_400_000_000
    values: dict[str, Any] = {"status": int(Status.TERMINAL), "outcome_status": "completed"}
    values |= {"created_us": old, "started_us": old, "ended_us": old, "ready_us": old}

    def task(id: int, **given: Any) -> Rows:
        return [
            (Op.TASK, task_row(id, "bench.old", **values, **given)),
            (Op.TASK_INPUT, (id, INPUT)),
            (Op.OUTCOME, (id, OUTCOME)),
        ]

    def rows(number: int, id: int) -> Rows:
        below = seed.draw_id()
        made = [*task(id), *task(below, owner=id)]
        if number % EVERY == 0:
            inner, document = seed.draw_id(), seed.draw_id()
            record = ConversationRow(inner, f"u{inner}", None, None, below, None, "", old)
            made.append((Op.CONVERSATION, record))
            terms = ("latest", "initial", 1, None)
            made.append((Op.DOCUMENT, DocumentRow(document, "bench.doc", 1, inner, "", *terms)))
            made.append((Op.REVISION, RevisionRow(document, 1, 1, 1, INPUT)))
            for _ in range(5):
                entry = (seed.draw_id(), inner, 1, "note", None, None, None, None, INPUT, old)
                made.append((Op.ENTRY, EntryRow(*entry)))
        return made

    seed.fill(trees, rows)
    blobs = [os.urandom(1_000) for _ in range(BLOBS)]
    writes: list[tuple[Op, tuple[Any, ...]]] = []
    for number, data in enumerate(blobs):
        name = hashlib.sha256(data).hexdigest()
        writes.append((Op.BLOB, (name, data)))
        if number % 2:
            entry = (seed.draw_id(), CONVERSATION, 1, "note", None, None, None, None)
            writes.append((Op.ENTRY, EntryRow(*entry, _json.dumps({"blob": name}), old)))
    seed.apply(writes)
    seed.close()


def memory_mib() -> float:
    """What the process has in memory now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * PAGE_BYTES / 2**20


class Writer:
    """Commits steadily, and notes how long each commit takes."""

    def __init__(self, harness: Harness) -> None:
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.collecting = False
        self._harness = harness

    async def run(self) -> None:
        while True:
            collecting, watch = self.collecting, Stopwatch()
            async with self._harness.commit() as tx:
                tx.append(CONVERSATION, {"n": 1}, kind="note")
            took = watch.seconds()
            if collecting == self.collecting:
                self.seconds[collecting].append(took)
            await trio.sleep(max(0.0, PERIOD_SECONDS - took))


class Memory:
    """The most that the process has in memory."""

    def __init__(self) -> None:
        self.most = self.first = memory_mib()

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, memory_mib())
            await trio.sleep(0.05)


@asynccontextmanager
async def background(*services: Any) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for service in services:
            nursery.start_soon(service)
        yield
        nursery.cancel_scope.cancel()


async def collect_alone(path: Path, table: Table) -> tuple[float, int]:
    """Trees a second where nobody else commits; also what the process needs besides."""
    async with open_harness(path) as harness:
        memory = Memory()
        async with background(memory.watch):
            watch = Stopwatch()
            report = await harness.gc(older_than=AGE)
            seconds = watch.seconds()
    table.add("alone: s", seconds)
    table.add("alone: more memory, MiB", memory.most - memory.first)
    table.add("alone: pages given back", report.pages_freed or 0)
    return report.trees / seconds, report.blobs


async def collect_beside(path: Path, table: Table, trees: int) -> tuple[float, float, float]:
    """Collect in turns beside a writer; ratios of its latencies, and trees a second."""
    seconds, removed = 0.0, 0
    async with open_harness(path) as harness:
        writer = Writer(harness)
        async with background(writer.run):
            for _ in range(int(SECONDS_MAX / TURN_SECONDS / 2)):
                await trio.sleep(TURN_SECONDS)
                writer.collecting, watch = True, Stopwatch()
                with trio.move_on_after(TURN_SECONDS) as scope:
                    await harness.gc(older_than=AGE)
                writer.collecting = False
                seconds += watch.seconds()
                if not scope.cancelled_caught:
                    break
            else:
                print("not finished; what is told is of what went")
    storage = SqliteStorage(path, create=False, read_only=True)
    removed = trees - sum(1 for row in storage.tasks(limit=10**9) if row.owner is None)
    storage.close()
    without, beside = writer.seconds[False], writer.seconds[True]
    for name, values in (("without", without), ("beside", beside)):
        table.add(f"{name}: p50, ms", percentile(values, 0.5) * 1e3)
        table.add(f"{name}: p99, ms", percentile(values, 0.99) * 1e3)
        table.add(f"{name}: commits", len(values))
    table.add("beside: s", seconds)
    ratios = [percentile(beside, share) / percentile(without, share) for share in (0.5, 0.99)]
    return removed / seconds, ratios[0], ratios[1]


def measure(folder: Path, trees: int) -> None:
    table = Table()
    for name in ("alone", "beside"):
        fill(folder / f"{name}.sqlite", trees)
    alone, blobs = trio.run(collect_alone, folder / "alone.sqlite", table)
    assert blobs == BLOBS // 2, blobs
    beside, p50, p99 = trio.run(collect_beside, folder / "beside.sqlite", table, trees)
    table.show()
    print(
        f"gc: alone_trees_s={alone:,.0f} beside_trees_s={beside:,.0f} p50_ratio={p50:.2f}"
        f" p99_ratio={p99:.2f} mib={table.median('alone: more memory, MiB'):.0f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help=f"{SHORT_TREES:,} trees")
    parser.add_argument("--trees", type=int, default=None)
    given = parser.parse_args()
    count = given.trees or (SHORT_TREES if given.short else TREES)
    with tempfile.TemporaryDirectory() as place:
        measure(Path(place), count)
