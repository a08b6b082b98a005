"""What a commit or an invocation held is freed when it is over, not by the garbage collector.

A transaction that refers to itself is collected only with everything that it refers to, in pauses
that grow with the tree: at 100,000 tasks they took a third of the time.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from worlds import ROOT, Next, Script, Start, World, done, parent_of

from pidurable.errors import AbortRequestedError


@contextmanager
def kept_garbage() -> Iterator[list[Any]]:
    """Everything that only the garbage collector would have freed, kept for looking at."""
    enabled = gc.isenabled()
    gc.disable()
    # What is there already is none of this test's business, and looking through it takes long. It
    # stays frozen: to unfreeze gave back all that conftest.py keeps from every later collection.
    gc.collect()
    gc.freeze()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if enabled:
            gc.enable()


async def walk(at: Any, ctx: Any) -> None:
    if isinstance(at, Start):
        await ctx.memo("m", [1])
        await ctx.goto(Next(1))
    elif at.n == 1:
        await ctx.wait(then=Next(2), signals=True)
    else:
        async with ctx.commit() as tx:
            tx.receive()
            tx.append(ROOT, "note", kind="note")
            tx.complete("walked")


async def fail(at: Any, ctx: Any) -> None:
    await ctx.fail("on purpose", result="partly")


async def raising(at: Any, ctx: Any) -> None:
    raise ValueError("on purpose")


async def refused(at: Any, ctx: Any) -> None:
    try:
        async with ctx.commit() as tx:
            tx.abort_task(ctx.task_id)
            tx.complete("never")
    except AbortRequestedError:
        await ctx.complete("refused")


async def run(world: World, script: Script) -> None:
    """One life of a task, with signals for what waits, aborted if it does not end by itself."""
    task = await world.create("a", script)
    await world.quiet()
    for row in world.rows():
        if row.status < 4 and row.id != task:
            await world.signal(row.id)
    await world.quiet()
    if world.row(task).status < 4:
        await world.abort(task)
    await world.end(task)
    await world.quiet()


@pytest.mark.parametrize("script", [done, walk, fail, parent_of("one", "two"), raising, refused])
async def test_a_task_leaves_nothing_to_the_garbage_collector(script: Script) -> None:
    """Whatever it does, and also when it is aborted, no object of the kernel is in a cycle."""
    world = World()
    world.scripts.update(one=done, two=walk)
    async with world.open() as rt:
        # What checks every commit makes an index each time, which refers to itself.
        *_, watcher = rt.session.participants
        rt.session.participants.remove(watcher)
        await run(world, script)
        with kept_garbage() as garbage:
            await run(world, script)
            gc.collect()
            kinds = Counter(
                type(each).__qualname__
                for each in garbage
                if type(each).__module__.startswith("pidurable")
            )
        assert kinds == {}
