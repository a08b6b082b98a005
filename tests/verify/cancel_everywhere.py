"""R8: wherever its caller is cancelled, a commit is stored whole or not, and nothing is left.

Workload W is run by a task that is cancelled at its k-th checkpoint, for every k. At an odd k only
what W does is cancelled, and W goes on in the same harness; at an even one the harness is left too,
and W goes on in another life. After each run:

* `trio.Cancelled` out of a commit meant that nothing of it was stored;
* no task, no thread and no file of ours is left, and the store can be held at once;
* W has come to the same end.

    python tests/verify/cancel_everywhere.py
    python tests/verify/cancel_everywhere.py --at 117

`--control` plants a bug, and it must then say FAIL.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from outside_ledger import Ledger
from trio.testing import MockClock
from workload import LIFE_SECONDS, _Workload, opened
from workload_scene import EXPECTED_END, dump_workload, ledger_of, play_in_own_folder, quiet

from pidurable import Harness

SHARE = float(os.environ.get("VERIFY_R8_SHARE", "1.0"))
CONTROLS = ("cancelled-after-storing", "leaves-a-task")


class _Canceller(trio.abc.Instrument):
    """Counts the checkpoints of one task, and cancels its scope at one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.task: trio.lowlevel.Task | None = None
        self.scope = trio.CancelScope()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.count += 1
            if self.count == self.at:
                self.scope.cancel()


@attrs.define(eq=False)
class _Witness:
    """A participant that keeps every published commit."""

    stored: list[Any] = attrs.Factory(list)

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None: ...

    def reverted(self) -> None: ...

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...

    def committed(self, tx: Any) -> None:
        self.stored.append(tx)


@attrs.define(eq=False)
class Run:
    """One run of W whose caller is cancelled, and what was found."""

    path: str
    at: int
    control: str | None = None
    cancelled: bool = False
    commits_cut: int = 0
    """How many commits the cancellation came out of."""
    steps: int = 0
    problems: list[str] = attrs.Factory(list)

    @property
    def whole(self) -> bool:
        """Whether the harness is left too."""
        return self.at % 2 == 0

    def play(self) -> None:
        """Run W, cancelled; let it go on; look at what is left."""
        gc.collect()  # what others dropped is closed by now, or else in the middle of this
        threads, files = set(threading.enumerate()), _open_files()
        canceller = _Canceller(self.at)
        with quiet():
            trio.run(
                self._life,
                canceller,
                clock=MockClock(autojump_threshold=0),
                instruments=[canceller],
            )
            self.steps = canceller.count
            self.cancelled = canceller.scope.cancelled_caught
            if self.whole:
                trio.run(self._again, clock=MockClock(autojump_threshold=0))
        gc.collect()
        # Idle ones from before may have ended meanwhile.
        if left := set(threading.enumerate()) - threads:
            self.problems.append(f"threads are left: {left}")
        if _open_files() != files:
            self.problems.append(f"{_open_files() - files} files are left open")
        if (found := dump_workload(self.path)) != EXPECTED_END:
            self.problems.append(f"another end: {found}"[:2_000])

    async def _life(self, canceller: _Canceller) -> None:
        canceller.task = trio.lowlevel.current_task()
        ledger = ledger_of(self.path)
        if self.whole:
            with canceller.scope:
                async with opened(self.path, ledger) as harness:
                    await self._work(harness, ledger)
        else:
            async with opened(self.path, ledger) as harness:
                with canceller.scope:
                    await self._work(harness, ledger)
                if harness.session.line.poison is not None:
                    self.problems.append("the session is poisoned")
                canceller.task = None
                await self._work(harness, ledger)
        # The run itself has two or three tasks, and one of them is this.
        left = _tasks() - self._own_tasks()
        if left:
            self.problems.append(f"tasks are left: {sorted(left)}")

    async def _again(self) -> None:
        ledger = ledger_of(self.path)
        async with opened(self.path, ledger, life=1) as harness:
            await self._work(harness, ledger)

    async def _work(self, harness: Harness, ledger: Ledger) -> None:
        witness = _Witness()
        harness.session.participants.append(witness)
        told: Callable[[], Any] = harness.commit if not hasattr(harness, "told") else harness.told

        @asynccontextmanager
        async def commit() -> AsyncIterator[Any]:
            tx = None
            try:
                async with told() as tx:
                    yield tx
                if self.control == "cancelled-after-storing":
                    await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                self.commits_cut += 1
                if tx is not None and any(each is tx for each in witness.stored):
                    self.problems.append(f"commit {tx.seq} is stored, and was cancelled")
                if self.control == "leaves-a-task":
                    trio.lowlevel.spawn_system_task(trio.sleep, 1e6)
                raise

        harness.told, harness.commit = told, commit  # type: ignore[attr-defined,method-assign]
        with trio.fail_after(LIFE_SECONDS):
            await _Workload(harness, ledger).run()

    def _own_tasks(self) -> set[str]:
        return {"<init>", trio.lowlevel.current_task().name, *_SYSTEM_TASKS}


_SYSTEM_TASKS = ("<TrioToken.run_sync_soon task>",)


def _tasks() -> set[str]:
    """The names of all tasks of this run."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    found, todo = set(), [root]
    while todo:
        task = todo.pop()
        found.add(task.name)
        todo += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return found


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


@attrs.define(eq=False)
class Report:
    """What was played, and what was found."""

    seed: int
    checkpoints: int = 0
    runs: int = 0
    commits_cut: int = 0
    problems: list[str] = attrs.Factory(list)
    seconds: float = 0.0

    def line(self) -> str:
        """The last line: figures, and whether that is enough."""
        passed = self.runs and self.commits_cut and not self.problems
        return (
            f"R8 cancel everywhere: checkpoints={self.checkpoints} runs={self.runs} "
            f"commits-cut={self.commits_cut} differences={len(self.problems)} seed={self.seed} "
            f"{self.seconds:.1f}s {'PASS' if passed else 'FAIL'}"
        )


def run(
    *, share: float = 1.0, runs_max: int | None = None, seed: int = 0, control: str | None = None
) -> Report:
    """Cancel W at a share of its checkpoints, drawn by the seed; 1 is every one of them."""
    report = Report(seed)
    started = time.perf_counter()
    draw = random.Random(seed)
    report.checkpoints = play_at(sys.maxsize).steps
    places = list(range(1, report.checkpoints + 1))
    wanted = min(round(share * len(places)), runs_max or len(places))
    for at in sorted(draw.sample(places, wanted)):
        one = play_at(at, control=control)
        # A run in another order may have fewer checkpoints than the one that was counted.
        report.runs += one.cancelled
        report.commits_cut += one.commits_cut
        report.problems += [f"at {at}: {problem}" for problem in one.problems]
    report.seconds = time.perf_counter() - started
    return report


def play_at(at: int, *, control: str | None = None) -> Run:
    """Play one run in a folder of its own."""
    return play_in_own_folder(lambda store: Run(store, at, control), what=f"at {at}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print what was found and the goal's line; 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at", type=int, help="this checkpoint alone")
    parser.add_argument("--control", choices=CONTROLS, help="plant this bug")
    given = parser.parse_args(arguments)
    if given.at is not None:
        one = play_at(given.at, control=given.control)
        print(
            f"cancelled: {one.cancelled}; commits cut: {one.commits_cut}", *one.problems, sep="\n"
        )
        return int(bool(one.problems))
    report = run(share=given.share, seed=given.seed, control=given.control)
    for problem in report.problems[:20]:
        print(problem[:2_000])
    print(report.line())
    return int(not report.line().endswith("PASS"))


if __name__ == "__main__":
    sys.exit(main())
