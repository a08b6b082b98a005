"""Limits: how many tasks run at once, in all and of one kind; and a tree that needs more than that.

Teaches: `running_max` and `limits` bound what runs, not what exists: the rest gets its turn. A task
whose owned work is live lends its slot to it, so that a tree of any depth never starves itself.

Run it with: python examples/10_limits.py
"""

from __future__ import annotations

from collections import Counter

import attrs
import trio

import pidurable
from pidurable import Extension, Registry, Settings, Task, TaskContext, open_harness, phase

RUNNING, MOST = Counter[str](), Counter[str]()


@attrs.frozen
class Begin:
    pass


class Download(Task[None, Begin, None]):
    name = "site.download"
    abort = pidurable.nothing_to_undo

    def initial(self, input: None) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[None, Begin, None]) -> None:
        RUNNING.update([self.name, "all kinds"])
        for what in RUNNING:
            MOST[what] = max(MOST[what], RUNNING[what])
        await trio.sleep(0.01)
        RUNNING.subtract([self.name, "all kinds"])
        await ctx.complete(None)


class Parse(Download):
    name = "site.parse"


class Folder(Task[int, Begin, int]):
    name = "site.folder"
    abort = pidurable.nothing_to_undo

    def initial(self, depth: int) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[int, Begin, int]) -> None:
        below = ["left", "right"] if ctx.input else []
        ids = [await ctx.create_task(Folder, ctx.input - 1, key=name) for name in below]
        await ctx.complete(1 + sum([(await ctx.wait_for_task(id)).result for id in ids]))


async def main() -> None:
    registry = Registry()
    registry.install(Extension("site", tasks=[Download(), Parse(), Folder()]))
    settings = Settings(running_max=5, limits={"site.download": 2})
    async with open_harness(":memory:", registry=registry, settings=settings) as harness:
        async with harness.commit() as tx:
            site = tx.create_conversation()
            for kind in [Download, Parse, Parse] * 20:
                tx.create_task(kind, None, conversation=site)
        await harness.wait_for_idle()
        print("at most at once:", dict(MOST))
    async with open_harness(":memory:", registry=registry, settings=Settings(running_max=1)) as one:
        task_id = await (await one.root()).create_task(Folder, 5)
        print("folders through one slot:", (await one.wait_for_task(task_id)).result)


if __name__ == "__main__":
    trio.run(main)
