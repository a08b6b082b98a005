"""Grow a tree of tasks, kill the process at its k-th commit, look, grow it on: for every k.

A program of its own, started by the test as `python killed_trees.py RUN FOLDER STEP`: it kills at
each STEPth commit. It imports once and forks for each life. Each line that it prints is the JSON of
one kill; the first one is the undisturbed run. Every life does the same: whatever is there already
is found again by its key.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import trio

from pidurable import (
    Extension,
    Registry,
    Retry,
    Settings,
    Task,
    TaskContext,
    open_harness,
    open_reader,
    phase,
)
from pidurable.errors import TaskEndedError
from pidurable.testing import KillAt

POINT = "commit.after"
"""After each commit, which is before the next one."""
KILLS_MAX = 200
ROUNDS = 5


@attrs.frozen
class At:
    step: int = 0


Ctx = TaskContext[str, At, str]


class Ledger:
    """The outside world: a file with a line for each effect, which knows its keys."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger"

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def book(self, key: str, what: str) -> None:
        if not any(line.startswith(f"{key} ") for line in self.lines()):
            with self.path.open("a") as file:
                file.write(f"{key} {what}\n")


class Grown(Task[str, At, str]):
    """Every task here is an input and a step, and has the ledger."""

    name = "tree.grown"

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def initial(self, input: str) -> At:
        return At()

    @phase
    async def step(self, at: At, ctx: Ctx) -> None:
        raise NotImplementedError

    async def abort(self, at: At, ctx: Ctx) -> None:
        self.ledger.book(ctx.key("undo"), f"undo {ctx.input}")
        async with ctx.commit() as tx:
            tx.append(ctx.conversation_id, {"undone": ctx.input}, kind="note")
            tx.end_aborted("undone")


class Rounds(Grown):
    """An effect, then an approval, five times. C010"""

    name = "tree.rounds"

    @phase
    async def step(self, at: At, ctx: Ctx) -> None:
        number, approving = divmod(at.step, 2)
        if number == ROUNDS:
            await ctx.complete("approved")
        elif not approving:
            self.ledger.book(ctx.key(f"round {number}"), f"round {number}")
            await ctx.wait(then=At(at.step + 1), signals=True)
        else:
            async with ctx.commit() as tx:
                for _, payload in tx.receive(limit=1):
                    tx.append(ctx.conversation_id, {"approved": payload}, kind="note")
                    tx.goto(At(at.step + 1))
                    break
                else:
                    tx.wait(then=at, signals=True)


class Part(Grown):
    """Fails, or is tried until the machine is kind, or just ends. C011"""

    name = "tree.part"
    retry = Retry(on=(OSError,), tries=20, base=0.0, jitter=0.0)

    @phase
    async def step(self, at: At, ctx: Ctx) -> None:
        if ctx.input == "bad":
            await ctx.fail("no stock")
            return
        if ctx.input == "wobbly":
            tries = len([line for line in self.ledger.lines() if "try" in line])
            if tries < 2:
                self.ledger.book(ctx.key(f"try {tries}"), "try")
                raise OSError("not now")
        self.ledger.book(ctx.key("done"), f"done {ctx.input}")
        async with ctx.commit() as tx:
            tx.append(ctx.conversation_id, {"done": ctx.input}, kind="note")
            tx.complete(ctx.input)


class Order(Grown):
    """Parts side by side in a queue of width one, and a refund for what failed. C011, C019, C026"""

    name = "tree.order"

    @phase
    async def step(self, at: At, ctx: Ctx) -> None:
        names = ("bad", "wobbly", "good")
        if at.step == 0:
            async with ctx.commit() as tx:
                parts = [tx.create_task(Part, name, key=name) for name in names]
                tx.wait(then=At(1), on=parts)
        elif at.step == 1:
            async with ctx.commit() as tx:
                refund = tx.create_task(Part, "refund", key="refund")
                tx.wait(then=At(2), on=[refund])
        else:
            keyed = ctx.snapshot.keyed_tasks()
            outcomes = await ctx.outcomes([keyed[name] for name in (*names, "refund")])
            await ctx.complete(", ".join(outcome.status for outcome in outcomes))


class Leaf(Grown):
    """Is there until it is told to go. C045"""

    name = "tree.leaf"

    @phase
    async def step(self, at: At, ctx: Ctx) -> None:
        self.ledger.book(ctx.key("here"), f"here {ctx.input}")
        await trio.sleep_forever()


class Branch(Grown):
    """Owns two branches or leaves and waits for them."""

    name = "tree.branch"

    @phase
    async def step(self, at: At, ctx: Ctx) -> None:
        below = Leaf if len(ctx.input) == 2 else Branch
        async with ctx.commit() as tx:
            on = [tx.create_task(below, f"{ctx.input}{n}", key=str(n)) for n in range(2)]
            tx.wait(then=At(1), on=on)


def opened(folder: Path, **options: Any) -> Any:
    ledger = Ledger(folder)
    registry = Registry()
    tasks = [each(ledger) for each in (Rounds, Part, Order, Leaf, Branch)]
    registry.install(Extension("tree", tasks=tasks))
    # Each of these deaths is planned: nobody is to be blamed for them.
    settings = Settings(limits={"tree.part": 1}, recoveries_max=1_000)
    return open_harness(folder / "tree.sqlite", registry=registry, settings=settings, **options)


async def approve(folder: Path, **options: Any) -> None:
    """Approve round after round; who was not told whether it counted says it again."""
    ledger = Ledger(folder)
    async with opened(folder, **options) as harness:
        task_id = await (await harness.root()).create_task(Rounds, "loop", key="loop")
        for number in range(ROUNDS):
            while not any(line.endswith(f"round {number}") for line in ledger.lines()):  # noqa: ASYNC110
                await trio.sleep(0.001)
            with contextlib.suppress(TaskEndedError):  # it counted, and was the last one
                await harness.signal(task_id, "approve", number, key=f"round {number}")
        await harness.wait_for_task(task_id)


async def order(folder: Path, **options: Any) -> None:
    async with opened(folder, **options) as harness:
        task_id = await (await harness.root()).create_task(Order, "order", key="order")
        await harness.wait_for_task(task_id)


async def cancel(folder: Path, **options: Any) -> None:
    """Abort three levels when all leaves are there."""
    ledger = Ledger(folder)
    async with opened(folder, **options) as harness:
        task_id = await (await harness.root()).create_task(Branch, "r", key="r")
        while len([line for line in ledger.lines() if "here" in line]) < 4:  # noqa: ASYNC110
            await trio.sleep(0.001)
        await harness.abort_task(task_id, "enough")
        await harness.wait_for_task(task_id)


RUNS: dict[str, Callable[..., Any]] = {"approve": approve, "order": order, "cancel": cancel}


def live(run: Callable[..., Any], folder: Path, *, kill: KillAt | None = None) -> int:
    """Live one life in a fork; returns 0, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            options = {} if kill is None else {"failpoints": kill}
            trio.run(lambda: run(folder, **options))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)  # the fork must not run what is below
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"{folder.name}: exit code {code}"
    return code


async def look(folder: Path) -> dict[str, Any]:
    """What the store and the ledger say, without ids, keys and times."""
    async with open_reader(folder / "tree.sqlite") as reader:
        tasks = await reader.tasks()
        entries = [e for c in await reader.conversations() for e in await reader.entries(c.id)]
    lines = Ledger(folder).lines()
    ended_us = {task.id: task.ended_us for task in tasks if task.ended_us is not None}
    ends = {task.id: task.outcome for task in tasks}
    return {
        "live": sorted(task.kind for task in tasks if task.outcome is None),
        "tasks": sorted(
            [task.kind, task.key or "", outcome.status, str(outcome.reason)]
            for task in tasks
            if (outcome := ends[task.id]) is not None
        ),
        "entries": sorted(json.dumps(entry.data, sort_keys=True) for entry in entries),
        "ledger": sorted(line.rpartition(":")[2].partition(" ")[2] for line in lines),
        "keys": [line.rpartition(" ")[0] for line in lines],
        "owners first": [
            task.id
            for task in tasks
            if task.owner is not None and task.owner in ended_us
            if ended_us[task.owner] < ended_us.get(task.id, float("inf"))
        ],
    }


def main(name: str, folder: Path, step: int) -> None:
    run = RUNS[name]
    undisturbed = folder / "undisturbed"
    undisturbed.mkdir()
    assert live(run, undisturbed) == 0
    print(json.dumps({"undisturbed": trio.run(look, undisturbed)}), flush=True)
    for number in range(1, KILLS_MAX, step):
        place = folder / f"kill-{number}"
        place.mkdir()
        if live(run, place, kill=KillAt(POINT, nth=number)) == 0:
            break  # this run has fewer commits: every one was killed at
        again = 0
        if number % 3 == 0:
            again = live(run, place, kill=KillAt(POINT, nth=1 + number % 5))
        if again or number % 3:
            assert live(run, place) == 0
        report = {"number": number, "kills": 2 if again else 1}
        print(json.dumps({**report, "resumed": trio.run(look, place)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
