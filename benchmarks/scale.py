"""Does a commit cost the same with 10, 10,000 and 1,000,000 live tasks?

Three processes take turns, each with a store of its size that was filled before it was opened: with
tasks that sleep, that wait for signals or for a task they own, that are blocked, and that are ready
in a kind without a free slot. In each, a hundred tasks at a time are created, take ten
steps and end; the reference writes the same rows by hand into a copy of the same store. What is
compared are the ratios of product and reference, without flushes: the disk has no part in it.
Besides, what SQLite does for each commit is counted: statements, steps of its virtual machine, and
steps of full scans.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import attrs
import trio
from _processes import Process, serve
from _raw import RawStore, Rows, Stopwatch, Table
from _runtimes import CONVERSATION, Seed, open_tasks, task_row, until

from pidurable.records import _codec, _json
from pidurable.records._codec import Codec
from pidurable.records._limits import Settings
from pidurable.records._tasks import OutcomeRecord, Status, Wait
from pidurable.session._seams import SystemClock
from pidurable.storage import Op, SqliteStorage, TaskStateRow
from pidurable.storage._sqlite_statements import HEAD_UPDATE
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase
from pidurable.tasks._runtime import Runtime
from pidurable.tasks._transaction import TreeTransaction

ROUNDS = 15
SIZES = (10, 10_000, 1_000_000)
SHORT_SIZES = (10, 1_000, 20_000)
TOGETHER = 100
STEPS = 10
LIVES = 2
"""Times all of them in a round."""
TRACED = 20
_GROUP = 32
TEXT = "The quick brown fox jumps over the lazy dog. " * 12
_YEAR_US = 365 * 24 * 3_600 * 1_000_000
_SETTINGS = Settings(limits={"bench.queued": 1}, heartbeat_seconds=3_600, lease_seconds=7_200)


@attrs.frozen
class Go:
    steps: int


@attrs.frozen
class At:
    """Encodes to about 600 B."""

    number: int
    text: str


@attrs.frozen
class Joined:
    """The owned task has ended."""


@attrs.frozen
class Told:
    """The signal is there."""


class Walk(Task[Go, At, int]):
    """Takes its steps, one commit each, then ends."""

    name = "bench.walk"
    abort = nothing_to_undo

    def initial(self, input: Go) -> At:
        return At(0, TEXT)

    @phase
    async def at(self, at: At, ctx: TaskContext[Go, At, int]) -> None:
        if at.number < ctx.input.steps:
            await ctx.goto(At(at.number + 1, TEXT))
        else:
            await ctx.complete(at.number)


class Life(Task[Go, At | Joined | Told, int]):
    """Takes some steps, waits for a task of its own and then for a signal, and ends."""

    name = "bench.life"

    def initial(self, input: Go) -> At:
        return At(0, TEXT)

    @phase
    async def at(self, at: At, ctx: TaskContext[Go, At | Joined | Told, int]) -> None:
        if at.number < ctx.input.steps:
            await ctx.goto(At(at.number + 1, TEXT))
        else:
            child = await ctx.create_task(Walk, Go(1))
            await ctx.wait(then=Joined(), on=[child])

    @phase
    async def joined(self, at: Joined, ctx: TaskContext[Go, At | Joined | Told, int]) -> None:
        await ctx.wait(then=Told(), signals=True)

    @phase
    async def told(self, at: Told, ctx: TaskContext[Go, At | Joined | Told, int]) -> None:
        async with ctx.commit() as tx:
            tx.receive()
            tx.complete(1)

    async def abort(
        self, at: At | Joined | Told, ctx: TaskContext[Go, At | Joined | Told, int]
    ) -> None:
        await ctx.end_aborted()


class Queued(Task[Go, At, int]):
    """The first one keeps the only slot of its kind for ever."""

    name = "bench.queued"
    abort = nothing_to_undo

    def initial(self, input: Go) -> At:
        return At(0, TEXT)

    @phase
    async def at(self, at: At, ctx: TaskContext[Go, At, int]) -> None:
        await trio.sleep_forever()


# --- the stores ---------------------------------------------------------------------------------


def seed_store(path: Path, count: int) -> None:
    """A store with `count` live tasks of all sorts, none of which ever goes on."""
    seed = Seed(path)
    codec = Codec()
    input_text, checkpoint = codec.encode_text(Go(0)), codec.encode_text(At(0, ""))
    slept = seed.now_us + _YEAR_US

    def wait_row(id: int, wait: Wait) -> tuple[Op, tuple[object, ...]]:
        return Op.WAIT, (id, _json.dumps(_codec.encode_wait(wait)))

    def rows(number: int, id: int) -> Rows:
        given: dict[str, Any] = {"kind": "bench.life"}
        wait = Wait(deadline_us=slept + number * 7_919 % 1_000_003)
        place = number % 16
        if place in (3, 11):
            wait = Wait(signals=True)
        elif place == 4:
            given = {"kind": "bench.gone", "blocked": "missing_definition"}
        elif place in (5, 13):
            # The very first one gets the slot.
            given = {"kind": "bench.queued", "ready_us": seed.now_us + number}
        elif place == 7 and number + 8 < count:
            wait = Wait(on=(id + 8,))
        elif place == 15:
            wait = Wait(signals=True)
            given["owner"] = id - 8
        made: list[tuple[Op, tuple[object, ...]]] = [
            (Op.TASK_INPUT, (id, input_text)),
            (Op.CHECKPOINT, (id, "at", checkpoint, seed.now_us)),
        ]
        if given["kind"] == "bench.life":
            given |= {"status": int(Status.WAITING), "started_us": seed.now_us, "invocations": 1}
            given["ready_us"] = 0
            made.append(wait_row(id, wait))
        return [(Op.TASK, task_row(id, **given)), *made]

    seed.fill(count, rows)
    seed.close()


class RawLives:
    """The rows of the walks by hand, into a copy of the same store."""

    def __init__(self, path: Path) -> None:
        self._store = RawStore(path, full=False)
        self._codec = Codec()
        self._now = SystemClock().now_us
        self._next_id = 2**40

    def walk(self) -> float:
        """Microseconds of one commit."""
        watch = Stopwatch()
        for _ in range(LIVES):
            ids = range(self._next_id, self._next_id + TOGETHER)
            self._next_id += TOGETHER
            self._together(ids, self._create)
            self._together(ids, self._reserve)
            for number in range(1, STEPS + 1):
                self._together(ids, lambda id, number=number: self._step(id, number))
            self._together(ids, self._end)
        return watch.seconds() * 1e6 / (LIVES * TOGETHER * (STEPS + 3))

    def _together(self, ids: range, rows: Any) -> None:
        for first in range(0, len(ids), _GROUP):
            some = ids[first : first + _GROUP]
            self._store.commit((lambda id=id: rows(id)) for id in some)  # type: ignore[misc]

    def _create(self, id: int) -> Rows:
        row = task_row(id, "bench.walk")
        return [
            (Op.TASK, row),
            (Op.TASK_INPUT, (id, self._codec.encode_text(Go(STEPS)))),
            (Op.CHECKPOINT, (id, "at", self._codec.encode_text(At(0, TEXT)), row.created_us)),
        ]

    def _state(self, id: int, status: Status, outcome: str | None = None) -> TaskStateRow:
        now = self._now()
        return TaskStateRow(
            1,
            int(status),
            now,
            None if outcome is None else now,
            None,
            None,
            1,
            0,
            0,
            now,
            None,
            None,
            outcome,
            id,
        )

    def _reserve(self, id: int) -> Rows:
        return [(Op.TASK_STATE, self._state(id, Status.RUNNING))]

    def _step(self, id: int, number: int) -> Rows:
        text = self._codec.encode_text(At(number, TEXT))
        return [(Op.CHECKPOINT, (id, "at", text, self._now()))]

    def _end(self, id: int) -> Rows:
        record = OutcomeRecord(status="completed", result=STEPS, has_result=True)
        return [
            (Op.OUTCOME, (id, _json.dumps(_codec.encode_outcome(record)))),
            (Op.TASK_STATE, self._state(id, Status.TERMINAL, "completed")),
            (Op.CHECKPOINT_DELETE, (id,)),
        ]


# --- what SQLite does ---------------------------------------------------------------------------


class Trace:
    """Counts what the connections of a storage do for commits.

    What frames a batch (begin, the row of the session, commit) is left out: how many commits share
    a batch depends on when they arrive.
    """

    _FRAME = ("begin", "commit", HEAD_UPDATE)

    def __init__(self, storage: SqliteStorage) -> None:
        self.counts: Counter[str] = Counter()
        self._connections = [storage._writer, storage._reader]

    def _note(self, event: dict[str, Any]) -> None:
        if event["sql"].startswith(self._FRAME):
            return
        status = event["stmt_status"]
        self.counts["statements"] += 1
        self.counts["vm_steps"] += status["SQLITE_STMTSTATUS_VM_STEP"]
        self.counts["scan_steps"] += status["SQLITE_STMTSTATUS_FULLSCAN_STEP"]

    def __enter__(self) -> Trace:
        for connection in self._connections:
            connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.trace_v2(0, None)


async def one_life(runtime: Runtime, *, abort: bool) -> None:
    """The life of one task, alone: each of its commits is a batch of its own."""
    quiet = runtime.session.line.is_quiet

    def parked() -> bool:
        node = runtime.published.task(life)
        return quiet() and node is not None and node.wait is not None and node.wait.signals

    life = await runtime.commit(lambda tx: tx.create_task(Life, Go(3), conversation=CONVERSATION))
    await until(parked)
    if abort:
        await runtime.commit(lambda tx: tx.abort_task(life))
    else:
        await runtime.commit(lambda tx: tx.signal(life, "go"))
    await runtime.wait_for_task(life)
    await until(quiet)


async def walk(runtime: Runtime) -> float:
    """Microseconds of one commit of tasks that live together."""

    def create(tx: TreeTransaction) -> int:
        return tx.create_task(Walk, Go(STEPS), conversation=CONVERSATION)

    async def one() -> None:
        await runtime.wait_for_task(await runtime.commit(create))

    watch = Stopwatch()
    for _ in range(LIVES):
        async with trio.open_nursery() as nursery:
            for _ in range(TOGETHER):
                nursery.start_soon(one)
    return watch.seconds() * 1e6 / (LIVES * TOGETHER * (STEPS + 3))


async def work(path: Path) -> None:
    """The role of a process: open a store and its copy, and answer requests."""
    storage = SqliteStorage(path, durability="process")
    raw = RawLives(path.with_suffix(".raw"))
    definitions = (Walk(), Life(), Queued())
    async with open_tasks(
        path, *definitions, durability="process", settings=_SETTINGS, storage=storage
    ) as runtime:
        runtime.start()
        for abort in (False, True):
            await one_life(runtime, abort=abort)
        await walk(runtime)
        raw.walk()

        async def answer(request: str) -> dict[str, Any]:
            if request == "trace":
                before = runtime.session.line.published_seq
                with Trace(storage) as trace:
                    for number in range(TRACED):
                        await one_life(runtime, abort=number % 2 == 1)
                commits = runtime.session.line.published_seq - before
                return {"live": runtime.index.live, "commits": commits, **trace.counts}
            if request == "walk":
                return {"us": await walk(runtime)}
            return {"us": raw.walk()}

        await serve(answer)


def measure(folder: Path, sizes: tuple[int, ...]) -> None:
    table = Table()
    processes: dict[int, Process] = {}
    traces: dict[int, dict[str, Any]] = {}
    try:
        for size in sizes:
            path = folder / f"{size}.sqlite"
            seed_store(path, size)
            shutil.copy(path, path.with_suffix(".raw"))
            processes[size] = Process(__file__, "--work", path)
        for number in range(ROUNDS):
            for size in sizes if number % 2 == 0 else reversed(sizes):
                for request in ("walk", "raw") if number % 2 == 0 else ("raw", "walk"):
                    us = processes[size].ask(request)["us"]
                    table.add(f"{size:,} live, {request}, us", us)
        for size in sizes:
            traces[size] = processes[size].ask("trace")
    finally:
        for process in processes.values():
            process.kill()
    table.show()
    ratios = {
        size: table.ratio(f"{size:,} live, walk, us", f"{size:,} live, raw, us") for size in sizes
    }
    print(f"{'live':>10}  {'ratio':>6}  {'statements':>10}  {'VM steps':>9}  {'scan steps':>10}")
    counts = []
    for size, trace in traces.items():
        commits = trace["commits"]
        each = tuple(trace[name] / commits for name in ("statements", "vm_steps", "scan_steps"))
        counts.append(each)
        print(
            f"{trace['live']:>10,}  {ratios[size]:>6.2f}"
            f"  {each[0]:>10.2f}  {each[1]:>9.2f}  {each[2]:>10.2f}"
        )
    equal = "equal" if len(set(counts)) == 1 else "differ"
    print(
        f"scale: live={ratios[sizes[-1]] / ratios[sizes[0]]:.2f} statements={equal}"
        f" scan_steps={sum(each[2] for each in counts):g}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="10 to 20,000 live tasks")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        trio.run(work, given.work)
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), SHORT_SIZES if given.short else SIZES)
