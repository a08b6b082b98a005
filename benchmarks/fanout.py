"""How long do many children take, created in one commit, run and joined? How long a deep chain?

A parent creates n children in one commit, waits for them all, and adds up their results. The
reference writes the rows of the same tasks by hand, in transactions of as many commits as a batch
may have. The chain is 20,000 tasks, each owned by the one before and each holding its outcome until
the one below it has ended: they end bottom-up, 500 a commit.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import trio
from _raw import RawStore, Rows, Stopwatch, Table
from _runtimes import CONVERSATION, Seed, open_tasks, task_row, until

from pidurable.records import _codec, _json
from pidurable.records._codec import Codec
from pidurable.records._ids import TaskId
from pidurable.records._limits import BATCH_BODIES_MAX, PASS_RECORDS_MAX
from pidurable.records._tasks import OutcomeRecord, Status
from pidurable.session._seams import SystemClock
from pidurable.storage import Op, TaskStateRow
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase
from pidurable.tasks._runtime import Runtime

SIZES = {1_000: 5, 10_000: 3, 100_000: 2}
"""Children, and rounds."""
SHORT_SIZES = {100: 5, 1_000: 3, 10_000: 2}
CHAIN = 20_000
SHORT_CHAIN = 2_000
_READ_AT_ONCE = 1_000


@attrs.frozen
class Count:
    number: int


@attrs.frozen
class Work:
    number: int


@attrs.frozen
class Begin:
    """Nothing is created yet."""


@attrs.frozen
class Collect:
    """All children have ended."""

    ids: list[int]


class Child(Task[Count, Work, Count]):
    """One piece of work."""

    name = "bench.child"
    abort = nothing_to_undo

    def initial(self, input: Count) -> Work:
        return Work(input.number)

    @phase
    async def work(self, at: Work, ctx: TaskContext[Count, Work, Count]) -> None:
        await ctx.complete(Count(at.number))


class Parent(Task[Count, Begin | Collect, Count]):
    """Creates its children in one commit and adds up what they give."""

    name = "bench.parent"
    abort = nothing_to_undo

    def initial(self, input: Count) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[Count, Begin | Collect, Count]) -> None:
        async with ctx.commit() as tx:
            ids = [tx.create_task(Child, Count(number)) for number in range(ctx.input.number)]
            tx.wait(then=Collect([*ids]), on=ids)

    @phase
    async def collect(self, at: Collect, ctx: TaskContext[Count, Begin | Collect, Count]) -> None:
        total = 0
        for first in range(0, len(at.ids), _READ_AT_ONCE):
            ids = [TaskId[Count](id) for id in at.ids[first : first + _READ_AT_ONCE]]
            outcomes = await ctx.outcomes(ids)
            total += sum(outcome.result.number for outcome in outcomes)
            await trio.lowlevel.checkpoint()
        await ctx.complete(Count(total))


async def fan_out(runtime: Runtime, conversation: int, count: int) -> float:
    """Seconds from the parent's creation to its result."""
    watch = Stopwatch()
    parent = await runtime.commit(
        lambda tx: tx.create_task(Parent, Count(count), conversation=conversation)
    )
    outcome = await runtime.wait_for_task(parent)
    seconds = watch.seconds()
    if outcome.result != Count(count * (count - 1) // 2):
        raise RuntimeError(f"the children gave {outcome.result}")
    return seconds


class RawTasks:
    """The rows of the same tasks, written by hand."""

    def __init__(self, path: Path) -> None:
        self._store = RawStore(path, full=True)
        self._codec = Codec()
        self._next_id = CONVERSATION + 1
        self._now = SystemClock().now_us

    def fan_out(self, count: int) -> float:
        """Seconds for creating, reserving and ending `count` tasks."""
        watch = Stopwatch()
        first, self._next_id = self._next_id, self._next_id + count
        self._store.commit([lambda: list(self._create(first, count))])
        for start in range(first, first + count, PASS_RECORDS_MAX):
            most = min(PASS_RECORDS_MAX, first + count - start)
            self._store.commit([lambda start=start, most=most: self._reserve(start, most)])  # type: ignore[misc]
        for start in range(first, first + count, BATCH_BODIES_MAX):
            ends = range(start, min(start + BATCH_BODIES_MAX, first + count))
            self._store.commit((lambda id=id: self._end(id)) for id in ends)  # type: ignore[misc]
        return watch.seconds()

    def _create(self, first: int, count: int) -> Iterator[tuple[Op, tuple[object, ...]]]:
        for id in range(first, first + count):
            row = task_row(id, "bench.child")
            yield Op.TASK, row
            yield Op.TASK_INPUT, (id, self._codec.encode_text(Count(id - first)))
            text = self._codec.encode_text(Work(id - first))
            yield Op.CHECKPOINT, (id, "work", text, row.created_us)

    def _state(self, id: int, status: Status, outcome: str | None = None) -> TaskStateRow:
        now = self._now()
        ended = None if outcome is None else now
        return TaskStateRow(
            1, int(status), now, ended, None, None, 1, 0, 0, now, None, None, outcome, id
        )

    def _reserve(self, first: int, count: int) -> Rows:
        return [
            (Op.TASK_STATE, self._state(id, Status.RUNNING)) for id in range(first, first + count)
        ]

    def _end(self, id: int) -> Rows:
        result = self._codec.encode(Count(id))
        record = OutcomeRecord(status="completed", result=result, has_result=True)
        return [
            (Op.OUTCOME, (id, _json.dumps(_codec.encode_outcome(record)))),
            (Op.TASK_STATE, self._state(id, Status.TERMINAL, "completed")),
            (Op.CHECKPOINT_DELETE, (id,)),
        ]

    def close(self) -> None:
        self._store.close()


# --- the chain ----------------------------------------------------------------------------------


class Link(Task[Count, Work, Count]):
    """A task of the chain; only the last one has anything to do: it ends when told."""

    name = "bench.link"
    abort = nothing_to_undo

    def __init__(self) -> None:
        self.running = trio.Event()
        self.end = trio.Event()

    def initial(self, input: Count) -> Work:
        return Work(input.number)

    @phase
    async def work(self, at: Work, ctx: TaskContext[Count, Work, Count]) -> None:
        self.running.set()
        await self.end.wait()
        await ctx.complete(Count(at.number))


def seed_chain(path: Path, length: int) -> int:
    """A chain of tasks that hold their outcomes, above one that is to run; gives the top's id."""
    seed = Seed(path)
    codec = Codec()
    held = OutcomeRecord(status="completed", result=codec.encode(Count(0)), has_result=True)
    outcome = _json.dumps(_codec.encode_outcome(held))
    top = CONVERSATION + 1

    def rows(number: int, id: int) -> list[tuple[Op, tuple[object, ...]]]:
        owner = None if number == 0 else id - 1
        written: list[tuple[Op, tuple[object, ...]]] = [
            (Op.TASK_INPUT, (id, codec.encode_text(Count(number)))),
            (Op.CHECKPOINT, (id, "work", codec.encode_text(Work(number)), seed.now_us)),
        ]
        if number == length:
            return [(Op.TASK, task_row(id, "bench.link", owner=owner)), *written]
        row = task_row(
            id,
            "bench.link",
            owner=owner,
            status=int(Status.COMPLETING),
            started_us=seed.now_us,
            invocations=1,
            outcome_status="completed",
        )
        return [(Op.TASK, row), *written, (Op.OUTCOME, (id, outcome))]

    seed.fill(length + 1, rows)
    seed.close()
    return top


async def end_chain(path: Path, length: int) -> tuple[int, float]:
    """Commits and seconds from the end of the leaf to the end of the top."""
    top = seed_chain(path, length)
    link = Link()
    async with open_tasks(path, link) as runtime:
        runtime.start()
        await link.running.wait()
        await until(runtime.session.line.is_quiet)
        before = runtime.session.line.published_seq
        watch = Stopwatch()
        link.end.set()
        await runtime.wait_for_task(top)
        seconds = watch.seconds()
        # The first one is the leaf's own.
        return runtime.session.line.published_seq - before - 1, seconds


async def measure(folder: Path, sizes: dict[int, int], chain: int) -> None:
    table = Table()
    raw = RawTasks(folder / "raw.sqlite")
    async with open_tasks(folder / "full.sqlite", Parent(), Child()) as runtime:
        runtime.start()
        conversation = await runtime.commit(lambda tx: tx.create_conversation())
        await fan_out(runtime, conversation, 100)
        for count, rounds in sizes.items():
            for _ in range(rounds):
                table.add(f"{count:,} children, s", await fan_out(runtime, conversation, count))
                table.add(f"{count:,} raw, s", raw.fan_out(count))
    raw.close()
    commits, seconds = await end_chain(folder / "chain.sqlite", chain)
    table.add(f"chain of {chain:,}, s", seconds)
    table.add(f"chain of {chain:,}, commits", commits)
    table.show()
    medians = [table.median(f"{count:,} children, s") for count in sizes]
    growth = max(after / before for before, after in itertools.pairwise(medians))
    if commits != math.ceil(chain / PASS_RECORDS_MAX):
        raise RuntimeError(f"the chain ended in {commits} commits")
    names = [f"s_{count // 1000}k" if count >= 1_000 else f"s_{count}" for count in sizes]
    figures = " ".join(f"{name}={median:.3g}" for name, median in zip(names, medians, strict=True))
    print(f"fanout: {figures} growth={growth:.1f} chain_commits={commits} chain_s={seconds:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="a tenth of the sizes")
    short = parser.parse_args().short
    with tempfile.TemporaryDirectory() as folder:
        trio.run(
            measure,
            Path(folder),
            SHORT_SIZES if short else SIZES,
            SHORT_CHAIN if short else CHAIN,
        )
