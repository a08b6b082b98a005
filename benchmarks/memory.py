"""What does a waiting task take in memory: with its invocation, and parked to its row?

One process has tasks whose handlers await something in memory, another has tasks that wait durably
(for a signal). Each is compared with itself before: what it holds more, by the number of tasks. The
checkpoints are about 600 B; a parked one is in the store alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import trio
from _processes import Process, resident_bytes, serve
from _raw import Table
from _runtimes import open_tasks, until

from pidurable.records._limits import Settings
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase
from pidurable.tasks._transaction import TreeTransaction
from pidurable.tasks._tree import RUNNING, WAITING, Node

ROUNDS = 3
LIVE = 10_000
PARKED = 100_000
SHORT_LIVE = 2_000
SHORT_PARKED = 10_000
TEXT = "The quick brown fox jumps over the lazy dog. " * 12
_TOGETHER = 1_000


@attrs.frozen
class Number:
    number: int


@attrs.frozen
class Here:
    """Encodes to about 600 B."""

    number: int
    text: str


class Stay(Task[Number, Here, None]):
    """Waits in its handler, for ever."""

    name = "bench.stay"
    abort = nothing_to_undo

    def initial(self, input: Number) -> Here:
        return Here(input.number, TEXT)

    @phase
    async def here(self, at: Here, ctx: TaskContext[Number, Here, None]) -> None:
        await trio.sleep_forever()


class Park(Task[Number, Here, None]):
    """Waits for a signal, without an invocation."""

    name = "bench.park"
    abort = nothing_to_undo

    def initial(self, input: Number) -> Here:
        return Here(input.number, TEXT)

    @phase
    async def here(self, at: Here, ctx: TaskContext[Number, Here, None]) -> None:
        await ctx.wait(then=Here(-1, at.text), signals=True)


async def hold(path: Path, kind: str) -> None:
    """The role of a process: make as many as it is asked for; answer with what it holds."""
    definition = Stay if kind == "live" else Park
    settings = Settings(running_max=2 * LIVE)
    async with open_tasks(path, Stay(), Park(), settings=settings) as runtime:
        conversation = await runtime.commit(lambda tx: tx.create_conversation())
        runtime.start()
        made = 0

        def create(tx: TreeTransaction) -> None:
            for number in range(_TOGETHER):
                tx.create_task(definition, Number(number), conversation=conversation)

        def settled() -> bool:
            running = len(runtime.invocations)
            return running == (made if kind == "live" else 0)

        async def answer(request: str) -> dict[str, Any]:
            nonlocal made
            for _ in range(0, int(request), _TOGETHER):
                await runtime.commit(create)
                made += _TOGETHER
                await until(lambda: settled() and not runtime.scheduler.has_work())
            wanted = RUNNING if kind == "live" else WAITING
            nodes = runtime.published.nodes.values()
            there = sum(isinstance(node, Node) and node.status is wanted for node in nodes)
            if there != made:
                raise RuntimeError(f"{there} of {made} are {wanted.word}")
            return {"bytes": resident_bytes()}

        await serve(answer)


def measure_one(path: Path, kind: str, count: int) -> float:
    """KiB of one task."""
    with Process(__file__, "--hold", kind, path) as process:
        # The first thousand brings in what is needed once.
        before = process.ask(str(_TOGETHER))["bytes"]
        after = process.ask(str(count))["bytes"]
        # Closing would write all of them; nothing is looked at any more.
        process.kill()
    return float(after - before) / count / 1024


def measure(folder: Path, live: int, parked: int) -> None:
    table = Table()
    for number in range(ROUNDS):
        table.add("live, KiB", measure_one(folder / f"live{number}", "live", live))
        table.add("parked, KiB", measure_one(folder / f"parked{number}", "parked", parked))
    table.show()
    print(
        f"memory: live_kib={table.median('live, KiB'):.2f}"
        f" parked_kib={table.median('parked, KiB'):.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="a tenth of the tasks")
    parser.add_argument("--hold", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold is not None:
        trio.run(hold, Path(given.hold[1]), given.hold[0])
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        if given.short:
            measure(Path(folder), SHORT_LIVE, SHORT_PARKED)
        else:
            measure(Path(folder), LIVE, PARKED)
