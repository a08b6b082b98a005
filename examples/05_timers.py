"""Reminders in a week, in ten weeks and in three months; on the way the process is killed.

Teaches: a wait with a deadline is a stored moment, not a sleeping process. It takes no invocation,
outlives kills, and what comes due while nothing runs is late, never lost. Under trio's mock clock,
with a wall clock that follows it, the three months pass at once.

Run it with: python examples/05_timers.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta

import attrs
import trio
from trio.testing import MockClock

from pidurable import Extension, Registry, Task, TaskContext, nothing_to_undo, open_harness, phase
from pidurable.testing import InlineBlocking, TrioClock

NEW_YEAR = datetime(2027, 1, 1, 9, tzinfo=UTC)
NOTES = {7: "water the plants", 70: "pay the rent", 90: "renew the passport"}


@attrs.frozen
class Wait:
    """The moment has not come."""


@attrs.frozen
class Ring:
    """It has."""


class Reminder(Task[int, Wait | Ring, None]):
    name = "desk.reminder"
    abort = nothing_to_undo

    def initial(self, day: int) -> Wait:
        return Wait()

    @phase
    async def wait(self, at: Wait, ctx: TaskContext[int, Wait | Ring, None]) -> None:
        await ctx.wait(then=Ring(), deadline=NEW_YEAR + timedelta(days=ctx.input))

    @phase
    async def ring(self, at: Ring, ctx: TaskContext[int, Wait | Ring, None]) -> None:
        print(f"  {ctx.now():%d %B}: {NOTES[ctx.input]}", flush=True)
        await ctx.complete(None)


async def live(store: str, first_day: int, days: int) -> None:
    """One process: create the reminders, or find them again, and be there for some days."""
    begin = NEW_YEAR + timedelta(days=first_day)
    print(f"a process begins on {begin:%d %B}", flush=True)
    registry = Registry()
    registry.install(Extension("desk", tasks=[Reminder()]))
    clock, inline = TrioClock(int(begin.timestamp() * 1e6)), InlineBlocking()
    async with open_harness(store, registry=registry, clock=clock, blocking=inline) as harness:
        for day, note in NOTES.items():
            await (await harness.root()).create_task(Reminder, day, key=note)
        with trio.move_on_after(days * 86_400):
            await harness.wait_for_idle()
            return
        os.kill(os.getpid(), signal.SIGKILL)  # nothing of it can clean up


if __name__ == "__main__":
    if len(sys.argv) == 2:  # the process that is killed after 45 days
        trio.run(live, sys.argv[1], 0, 45, clock=MockClock(autojump_threshold=0))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, f"{folder}/desk.sqlite"], check=False)
        print("  it was killed on 15 February")
        trio.run(live, f"{folder}/desk.sqlite", 80, 45, clock=MockClock(autojump_threshold=0))
