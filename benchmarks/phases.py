"""How many phase transitions, and how many five-step workflows, a second?

A transition is one `goto`: the next checkpoint (about 600 B) stored before the next phase starts. A
workflow is what the peers were measured with: create, five steps that do nothing, complete.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio
from _raw import RawStore, Rows, Stopwatch, Table, interleave

from pidurable.records._codec import Codec
from pidurable.session._seams import SystemClock
from pidurable.storage import Op, SqliteStorage
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase
from pidurable.tasks._open import open_runtime
from pidurable.tasks._runtime import Runtime, StaticDefinitions
from pidurable.tasks._transaction import TreeTransaction

ROUNDS = 5
TOGETHER = 100
TRANSITIONS_EACH = 60
WORKFLOWS_ALONE = 60
WORKFLOWS = 500
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@attrs.frozen
class Go:
    steps: int


@attrs.frozen
class Odd:
    """Encodes to about 600 B."""

    number: int
    text: str
    parts: list[int]


@attrs.frozen
class Even:
    """The same, in the other phase."""

    number: int
    text: str
    parts: list[int]


@attrs.frozen
class Done:
    steps: int


class Walk(Task[Go, Odd | Even, Done]):
    """Go to and fro between two phases, one commit each, then end."""

    name = "bench.walk"
    abort = nothing_to_undo

    def initial(self, input: Go) -> Even:
        return Even(0, TEXT, [1, 2, 3])

    @phase
    async def even(self, at: Even, ctx: TaskContext[Go, Odd | Even, Done]) -> None:
        if at.number < ctx.input.steps:
            await ctx.goto(Odd(at.number + 1, TEXT, [1, 2, 3]))
        else:
            await ctx.complete(Done(at.number))

    @phase
    async def odd(self, at: Odd, ctx: TaskContext[Go, Odd | Even, Done]) -> None:
        if at.number < ctx.input.steps:
            await ctx.goto(Even(at.number + 1, TEXT, [1, 2, 3]))
        else:
            await ctx.complete(Done(at.number))


@asynccontextmanager
async def open_tasks(path: Path) -> AsyncIterator[tuple[Runtime, int]]:
    definitions = StaticDefinitions([Walk()], Codec())
    async with open_runtime(SqliteStorage(path), snapshot=lambda: definitions) as runtime:
        runtime.start()
        conversation = await runtime.commit(lambda tx: tx.create_conversation())
        yield runtime, conversation


async def workflow(runtime: Runtime, conversation: int, steps: int) -> None:
    def body(tx: TreeTransaction) -> int:
        return tx.create_task(Walk, Go(steps), conversation=conversation)

    outcome = await runtime.wait_for_task(await runtime.commit(body))
    if outcome.result != Done(steps):
        raise RuntimeError(f"the workflow ended with {outcome}")


async def transitions(runtime: Runtime, conversation: int) -> float:
    """Transitions per second of 100 tasks at once."""
    watch = Stopwatch()
    async with trio.open_nursery() as nursery:
        for _ in range(TOGETHER):
            nursery.start_soon(workflow, runtime, conversation, TRANSITIONS_EACH)
    return TOGETHER * TRANSITIONS_EACH / watch.seconds()


async def workflows(runtime: Runtime, conversation: int, *, total: int, together: int) -> float:
    """Five-step workflows per second, started by `together` callers."""

    async def caller(count: int) -> None:
        for _ in range(count):
            await workflow(runtime, conversation, 5)

    watch = Stopwatch()
    async with trio.open_nursery() as nursery:
        for _ in range(together):
            nursery.start_soon(caller, total // together)
    return total / watch.seconds()


class RawTransitions:
    """The same checkpoints by hand: the same codec, the same statement, groups of 32."""

    def __init__(self, path: Path) -> None:
        self.store = RawStore(path, full=True)
        self._codec = Codec()
        self._clock = SystemClock()

    def rows(self, number: int) -> Rows:
        step = number // TOGETHER
        value = (Odd if step % 2 else Even)(step, TEXT, [1, 2, 3])
        text = self._codec.encode_text(value)
        row = (number % TOGETHER + 1, "odd" if step % 2 else "even", text, self._clock.now_us())
        return [(Op.CHECKPOINT, row)]

    def grouped(self, total: int, group: int) -> float:
        def commits(first: int) -> Iterator[object]:
            return (lambda n=n: self.rows(n) for n in range(first, first + group))

        watch = Stopwatch()
        for first in range(0, total, group):
            self.store.commit(commits(first))  # type: ignore[arg-type]
        return total / watch.seconds()


async def measure(folder: Path) -> None:
    table = Table()
    raw = RawTransitions(folder / "raw.sqlite")
    async with open_tasks(folder / "full.sqlite") as (runtime, conversation):

        async def product(_: int) -> None:
            table.add("transitions c100, per s", await transitions(runtime, conversation))
            table.add(
                "workflows c100, per s",
                await workflows(runtime, conversation, total=WORKFLOWS, together=TOGETHER),
            )
            table.add(
                "workflows c1, per s",
                await workflows(runtime, conversation, total=WORKFLOWS_ALONE, together=1),
            )

        async def reference(_: int) -> None:
            table.add(
                "raw transitions, groups of 32, per s",
                raw.grouped(TOGETHER * TRANSITIONS_EACH, 32),
            )

        await interleave(ROUNDS, product, reference)
    raw.store.close()
    table.show()
    ratio = table.ratio("transitions c100, per s", "raw transitions, groups of 32, per s")
    print(
        f"phases: full_c100={ratio:.2f}"
        f" wf_c100={table.median('workflows c100, per s'):.0f}"
        f" wf_c1={table.median('workflows c1, per s'):.0f}"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, Path(folder))
