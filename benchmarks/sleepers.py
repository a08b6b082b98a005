"""What do a million sleeping tasks cost those that work, and how much memory do they take?

Two processes take turns: one has 100 tasks that work and nothing else, the other the same and a
million that sleep until a day far away, put into its store before it was opened. A commit is one
phase transition of a working task. Memory is what the second process holds more than the first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import trio
from _processes import Process, resident_bytes, serve
from _raw import Rows, Stopwatch, Table
from _runtimes import CONVERSATION, Seed, open_tasks, task_row

from pidurable.records import _codec, _json
from pidurable.records._codec import Codec
from pidurable.records._tasks import Status, Wait
from pidurable.storage import Op
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase
from pidurable.tasks._runtime import Runtime
from pidurable.tasks._transaction import TreeTransaction

ROUNDS = 7
SLEEPING = 1_000_000
SHORT_SLEEPING = 50_000
WORKING = 100
TRANSITIONS_EACH = 40
TEXT = "The quick brown fox jumps over the lazy dog. " * 12
_YEAR_US = 365 * 24 * 3_600 * 1_000_000


@attrs.frozen
class Go:
    steps: int


@attrs.frozen
class Odd:
    """Encodes to about 600 B."""

    number: int
    text: str


@attrs.frozen
class Even:
    """The same, in the other phase."""

    number: int
    text: str


class Walk(Task[Go, Odd | Even, int]):
    """Go to and fro between two phases, one commit each, then end."""

    name = "bench.walk"
    abort = nothing_to_undo

    def initial(self, input: Go) -> Even:
        return Even(0, TEXT)

    @phase
    async def even(self, at: Even, ctx: TaskContext[Go, Odd | Even, int]) -> None:
        if at.number < ctx.input.steps:
            await ctx.goto(Odd(at.number + 1, TEXT))
        else:
            await ctx.complete(at.number)

    @phase
    async def odd(self, at: Odd, ctx: TaskContext[Go, Odd | Even, int]) -> None:
        if at.number < ctx.input.steps:
            await ctx.goto(Even(at.number + 1, TEXT))
        else:
            await ctx.complete(at.number)


class Sleeper(Task[Go, Odd, int]):
    """Sleeps for a year or more."""

    name = "bench.sleeper"
    abort = nothing_to_undo

    def initial(self, input: Go) -> Odd:
        return Odd(0, TEXT)

    @phase
    async def odd(self, at: Odd, ctx: TaskContext[Go, Odd, int]) -> None:
        await ctx.complete(at.number)


async def walk(runtime: Runtime, *, together: int, steps: int) -> float:
    """Microseconds of one transition of `together` tasks that walk at once."""

    def create(tx: TreeTransaction) -> int:
        return tx.create_task(Walk, Go(steps), conversation=CONVERSATION)

    async def one() -> None:
        await runtime.wait_for_task(await runtime.commit(create))

    watch = Stopwatch()
    async with trio.open_nursery() as nursery:
        for _ in range(together):
            nursery.start_soon(one)
    return watch.seconds() * 1e6 / (together * steps)


def sleeper_rows(seed: Seed, text: str, until_us: int) -> Callable[[int, int], Rows]:
    """Rows of one sleeping task; the moments differ and are in no order."""
    input_text = Codec().encode_text(Go(0))

    def rows(number: int, id: int) -> Rows:
        deadline = until_us + number * 7_919 % 1_000_003
        wait = _json.dumps(_codec.encode_wait(Wait(deadline_us=deadline)))
        row = task_row(
            id,
            "bench.sleeper",
            status=int(Status.WAITING),
            started_us=seed.now_us,
            invocations=1,
            ready_us=0,
        )
        return [
            (Op.TASK, row),
            (Op.TASK_INPUT, (id, input_text)),
            (Op.CHECKPOINT, (id, "odd", text, seed.now_us)),
            (Op.WAIT, (id, wait)),
        ]

    return rows


def seed_store(path: Path, sleeping: int) -> None:
    seed = Seed(path)
    text = Codec().encode_text(Odd(0, TEXT[:45]))
    seed.fill(sleeping, sleeper_rows(seed, text, seed.now_us + _YEAR_US))
    seed.close()


async def work(path: Path) -> None:
    """The role of a process: open the store, and answer with what a transition costs."""
    watch = Stopwatch()
    async with open_tasks(path, Walk(), Sleeper()) as runtime:
        opened = watch.seconds()
        runtime.start()
        await walk(runtime, together=WORKING, steps=2)

        async def answer(request: str) -> dict[str, Any]:
            if request == "memory":
                return {
                    "bytes": resident_bytes(),
                    "live": runtime.index.live,
                    "timers": len(runtime.index.timers),
                    "open_s": opened,
                }
            return {"us": await walk(runtime, together=WORKING, steps=TRANSITIONS_EACH)}

        await serve(answer)


def measure(folder: Path, sleeping: int) -> None:
    table = Table()
    some, none = folder / "some.sqlite", folder / "none.sqlite"
    seed_store(some, sleeping)
    seed_store(none, 0)
    script = __file__
    with Process(script, "--work", some) as asleep, Process(script, "--work", none) as alone:
        with_them, without = asleep.ask("memory"), alone.ask("memory")
        if with_them["timers"] != sleeping or with_them["live"] != sleeping:
            raise RuntimeError(f"{with_them} with {sleeping} asleep")
        for number in range(ROUNDS):
            pair = [(asleep, "with sleepers, us"), (alone, "none asleep, us")]
            for process, name in pair if number % 2 == 0 else reversed(pair):
                table.add(name, process.ask("walk")["us"])
        asleep.finish()
        alone.finish()
    each = (with_them["bytes"] - without["bytes"]) / sleeping
    table.add("open with sleepers, s", with_them["open_s"])
    table.add("open with none, s", without["open_s"])
    table.add("resident with sleepers, MiB", with_them["bytes"] / 2**20)
    table.add("resident with none, MiB", without["bytes"] / 2**20)
    table.show()
    ratio = table.ratio("with sleepers, us", "none asleep, us")
    print(f"sleepers: us={ratio:.3f} bytes={each:.0f} open_s={with_them['open_s']:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help=f"{SHORT_SLEEPING:,} sleepers")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        trio.run(work, given.work)
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), SHORT_SLEEPING if given.short else SLEEPING)
