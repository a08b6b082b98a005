"""Write the golden store of schema 3, with the code that wrote schema 3 last.

Run it under a checkout of the last commit on schema 3:
`PYTHONPATH=<checkout> python tests/golden/write_schema_3.py`. Besides the public names that schemas
1 and 2 had it uses `open_client` and `harness.gc`: the store has answers to commands, a command
that waits, stubs of trees that were removed, and one tree that is being removed.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import golden_work as work
from golden_tasks import Failing, Second, Start, World
from golden_write import write

from pidurable import Extension, Harness, Task, TaskContext, nothing_to_undo, open_client, phase
from pidurable.errors import WaitTimeoutError
from pidurable.testing import Failpoints, InlineBlocking


class KillInRemoval(Failpoints):
    """Dies at the first commit that leaves a tree half removed, once it is armed."""

    harness: Harness | None = None

    def hit(self, name: str) -> None:
        if self.harness is None or name != "commit.after":
            return
        if self.harness.session.storage.removals():
            os.kill(os.getpid(), signal.SIGKILL)


class Wide(Task[str, Start | Second, str]):
    """Owns so many tasks that removing them takes more than one commit."""

    name = "golden.wide"
    abort = nothing_to_undo

    def initial(self, input: str) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: TaskContext[str, Start | Second, str]) -> None:
        if ctx.input != "wide":
            await ctx.complete(ctx.input)
            return
        async with ctx.commit() as tx:
            ids = [tx.create_task(Wide, f"leaf {number}") for number in range(250)]
            tx.wait(then=Second(), on=ids)

    @phase
    async def second(self, at: Second, ctx: TaskContext[str, Start | Second, str]) -> None:
        await ctx.complete("all leaves fell")


async def tidy(folder: Path) -> None:
    """Life 3: others ask for something, ended trees are removed, and one only half."""
    world = World(folder, hold=True)
    kill = KillInRemoval()
    # A clock of trio's is read in the loop alone, and removing reads it where it works.
    seams = {"failpoints": kill, "blocking": InlineBlocking()}
    async with work.opened(folder, world, "last", life=3, **seams) as harness:
        root = await harness.root()
        harness.start()
        await world.until(("payment", "abort undone", "look second"))
        found = {each.key: each.id for each in harness.tasks(limit=1_000)}
        async with open_client(folder / work.STORE) as client:
            await client.signal(found["listener"], "asked", [1], key="command 1")
            await client.retry_task(found["parking"], key="command 2")
        ended = await root.create_task(Failing, "removed", key="removed")
        await harness.wait_for_task(ended)
        report = await harness.gc(older_than=timedelta(0))
        assert report.trees > 0
        assert harness.session.storage.stub("task", root.id, "removed") is not None
        harness.registry.install(Extension("golden_wide", tasks=[Wide()]))
        ended = await root.create_task(Wide, "wide", key="half removed")
        await harness.wait_for_task(ended)
        kill.harness = harness
        await harness.gc(older_than=timedelta(0))
        raise AssertionError("it was to be killed in the middle of a removal")


async def ask(folder: Path) -> None:
    """Somebody leaves a command while nobody holds the store."""
    async with open_client(folder / work.STORE) as client:
        early = next(each for each in await client.reader.conversations() if each.key == "early")
        try:
            await client.fork(early.id, fork_key="asked for", key="command 3", timeout=0)
        except WaitTimeoutError:
            return
    raise AssertionError("nobody was there to apply it")


if __name__ == "__main__":
    write(3, lives=(work.begin, work.grow, work.cut, tidy), afterwards=ask)
