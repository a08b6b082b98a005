"""R10: a session that has run for long takes no more memory than one that has just warmed up.

Rounds of everyday work at a constant number of live things: tasks that are created, signalled and
end; documents that are changed; entries of a conversation that moves its head; submissions that a
scripted model answers; watches that come and go. Every so many commits the heap is measured; open
files, threads and trio tasks are counted at the first measure and at the last. Meanwhile a foreign
reader keeps the log from being begun again, leaves, and the log has to come back below its bound.

    python tests/verify/flat_memory.py --commits 100000 --warm-up 10000

`--control` plants a leak, and it must then say FAIL.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import attrs
import trio
from cancel_everywhere import _tasks
from workload_scene import quiet

from pidurable import (
    AgentChange,
    Conversation,
    Extension,
    Harness,
    Models,
    Registry,
    Task,
    TaskContext,
    UserMessage,
    document,
    nothing_to_undo,
    open_harness,
    phase,
)
from pidurable.session._seams import InlineBlocking
from pidurable.testing import ScriptedModel, ScriptedProvider

COMMITS = int(os.environ.get("VERIFY_R10_COMMITS", "100000"))
GROWTH_BYTES_MAX = 1024 * 1024
LOG_BYTES_MAX = 64 * 1024 * 1024
KEYS = 8
SUBMIT_EVERY = 25
WATCH_EVERY = 10
HEAD_EVERY = 20


@attrs.frozen
class At:
    """Where a task is."""

    n: int = 0


class Told(Task[str, At, str]):
    """Waits for a signal, keeps a memo and a document, and ends."""

    name = "flat.told"
    abort = nothing_to_undo  # type: ignore[assignment]

    def initial(self, input: str) -> At:
        return At()

    @phase
    async def run(self, at: At, ctx: TaskContext[str, At, str]) -> None:
        if not at.n:
            await ctx.memo("begun", ctx.input)
            await ctx.wait(then=At(1), signals=True)
            return
        async with ctx.commit() as tx:
            tx.receive()
            tx.complete("told")


@document("flat.counts", scope="session", family=True)
@attrs.define
class Counts:
    rounds: int = 0
    text: str = ""


@attrs.define(eq=False)
class Counter:
    """A participant that counts commits; with a leak planted it keeps them."""

    leaks: bool = False
    commits: int = 0
    kept: list[Any] = attrs.Factory(list)

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None: ...

    def reverted(self) -> None: ...

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...

    def committed(self, tx: Any) -> None:
        self.commits += 1
        if self.leaks:
            self.kept.append(tx)


@attrs.define(eq=False)
class Report:
    """What was measured."""

    commits: int = 0
    growth: int = 0
    sqlite_growth: int = 0
    log_held: int = 0
    """The largest size of the log while the foreign reader stayed."""
    log_after: int = 0
    heaps: list[int] = attrs.Factory(list)
    problems: list[str] = attrs.Factory(list)
    seconds: float = 0.0

    def line(self) -> str:
        """The last line: figures, and whether that is enough."""
        verdict = "PASS" if self.commits and not self.problems else "FAIL"
        return (
            f"R10 flat memory: commits={self.commits} measures={len(self.heaps)} "
            f"heap-growth={self.growth / 1024:.0f}KiB sqlite-growth={self.sqlite_growth / 1024:.0f}"
            f"KiB log-held={self.log_held / 2**20:.0f}MiB "
            f"log-after={self.log_after / 2**20:.0f}MiB {self.seconds:.1f}s {verdict}"
        )


@attrs.frozen
class _Counts:
    """What must not grow, beside the heap."""

    files: int
    threads: int
    tasks: int


def _counts() -> _Counts:
    return _Counts(len(os.listdir("/dev/fd")), threading.active_count(), len(_tasks()))


class _Load:
    """Everyday work, in rounds."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.rounds = 0
        self.root: Conversation

    async def begin(self) -> None:
        self.root = await self.harness.root(agent=AgentChange(model="scripted/chief"))

    async def round(self) -> None:
        """One round: about eight commits."""
        self.rounds += 1
        number, harness, root = self.rounds, self.harness, self.root.id
        key = str(number % KEYS)
        async with harness.commit() as tx:
            task = tx.create_task(Told, "work", conversation=root)
        async with harness.commit() as tx:
            counts = await tx.document(Counts, key=key)
            counts.rounds = number
            counts.text = "." * (number % 1_000)
        head = {"head": 0} if number % HEAD_EVERY == 0 else {}
        async with harness.commit() as tx:
            said = UserMessage(blocks=(), at_us=number)
            tx.append(root, {"n": number}, kind="flat.said", messages=[said], **head)
        await harness.signal(task, "news", number)
        await harness.wait_for_task(task)
        if number % WATCH_EVERY == 0:
            await self._watch(key)
        if number % SUBMIT_EVERY == 0:
            await (await self.root.submit("hello", request_id=f"r{number}")).wait()

    async def _watch(self, key: str) -> None:
        async with (
            self.harness.watch(Counts, key=key) as watch,
            self.harness.watch_tasks() as tasks,
            self.root.watch() as view,
        ):
            async with self.harness.commit() as tx:
                (await tx.document(Counts, key=key)).rounds += 1
            await anext(aiter(watch))
            if tasks.value is None or view.value is None:
                raise AssertionError("a watch begins with a value")


def _models() -> Models:
    script = ScriptedModel(["hello to you"], name="chief", position="run", repeat_last=True)
    # It remembers what it was asked, for tests that look at it.
    script.requests = collections.deque(maxlen=1)  # type: ignore[assignment]
    return Models([ScriptedProvider([script])])


async def _play(
    report: Report, path: str, *, commits: int, warm_up: int, every: int, control: bool
) -> None:
    registry = Registry()
    registry.install(Extension("flat", tasks=[Told()]))
    counter = Counter(leaks=control)
    async with open_harness(
        path,
        registry=registry,
        models=_models(),
        durability="process",
        blocking=InlineBlocking(),
    ) as harness:
        harness.session.participants.append(counter)
        load = _Load(harness)
        await load.begin()
        while counter.commits < warm_up:
            await load.round()
        gc.collect()
        tracemalloc.start(8)
        # What was allocated before counts as nothing, so that what replaces it is measured too.
        while counter.commits < warm_up + every:
            await load.round()
        gc.collect()
        before, counts = tracemalloc.take_snapshot(), _counts()
        report.heaps.append(tracemalloc.get_traced_memory()[0])
        sqlite = apsw.memory_used()
        first = counter.commits
        while counter.commits < first + commits:
            goal = counter.commits + every
            while counter.commits < goal:
                await load.round()
            gc.collect()
            report.heaps.append(tracemalloc.get_traced_memory()[0])
        report.commits = counter.commits - first
        report.growth = report.heaps[-1] - report.heaps[0]
        report.sqlite_growth = apsw.memory_used() - sqlite
        if report.growth > GROWTH_BYTES_MAX:
            report.problems.append(f"the heap grew by {report.growth} bytes")
            grown = tracemalloc.take_snapshot().compare_to(before, "traceback")
            for each in grown[:8]:
                where = "\n    ".join(each.traceback.format())
                report.problems.append(
                    f"{each.size_diff} bytes, {each.count_diff} objects\n    {where}"
                )
        tracemalloc.stop()
        if (now := _counts()) != counts:
            report.problems.append(f"{counts} has become {now}")
        await _hold_the_log(report, path, load, counter)


async def _hold_the_log(report: Report, path: str, load: _Load, counter: Counter) -> None:
    """A foreign reader stays, the log grows; it leaves, and the log comes back."""

    def log_bytes() -> int:
        return os.stat(f"{path}-wal").st_size

    reader = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    reader.execute("begin")
    reader.execute("select count(*) from tasks").fetchall()
    first = counter.commits
    while log_bytes() <= 2 * LOG_BYTES_MAX and counter.commits < first + 20_000:
        async with load.harness.commit() as tx:
            tx.put_blob(os.urandom(200_000))
    report.log_held = log_bytes()
    reader.close()
    first = counter.commits
    while log_bytes() > LOG_BYTES_MAX and counter.commits < first + 5_000:
        await load.round()
    report.log_after = log_bytes()
    if report.log_held <= LOG_BYTES_MAX:
        report.problems.append(f"the log grew to {report.log_held} bytes only; nothing was tried")
    if report.log_after > LOG_BYTES_MAX:
        report.problems.append(f"the log still has {report.log_after} bytes after the reader left")


def run(
    *, commits: int, warm_up: int = 10_000, every: int = 10_000, control: bool = False
) -> Report:
    """Work for so many commits after the warm-up, and measure."""
    report = Report()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = str(Path(folder) / "s.sqlite")
        trio.run(
            lambda: _play(
                report, path, commits=commits, warm_up=warm_up, every=every, control=control
            )
        )
    report.seconds = time.perf_counter() - started
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Work, print what grew and the goal's line; 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=COMMITS)
    parser.add_argument("--warm-up", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=10_000)
    parser.add_argument("--control", action="store_true", help="plant a leak")
    given = parser.parse_args(arguments)
    report = run(
        commits=given.commits, warm_up=given.warm_up, every=given.every, control=given.control
    )
    for problem in report.problems:
        print(problem)
    print("  heap in KiB:", *(heap // 1024 for heap in report.heaps))
    print(report.line())
    return int(not report.line().endswith("PASS"))


if __name__ == "__main__":
    sys.exit(main())
