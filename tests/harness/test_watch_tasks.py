"""Watching the task graph of an open harness."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio

from pidurable import (
    Extension,
    Frame,
    Harness,
    Registry,
    Task,
    TaskContext,
    TaskGraph,
    nothing_to_undo,
    open_harness,
    phase,
)
from pidurable.errors import NotFoundError
from pidurable.records import _patch


@attrs.frozen
class Begin:
    """Nothing has happened."""


@attrs.frozen
class Told:
    """Somebody has sent a signal."""


class Job(Task[str, Begin | Told, str]):
    """Waits for a signal and completes."""

    name = "graph.job"
    abort = nothing_to_undo

    def initial(self, input: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[str, Begin | Told, str]) -> None:
        await ctx.wait(then=Told(), signals=True)

    @phase
    async def told(self, at: Told, ctx: TaskContext[str, Begin | Told, str]) -> None:
        await ctx.complete("done")


def registry() -> Registry:
    made = Registry()
    made.install(Extension("graph", tasks=[Job()]))
    return made


async def job(harness: Harness) -> int:
    root = await harness.root()
    async with harness.commit() as tx:
        return tx.create_task(Job, "x", conversation=root.id)


async def test_a_task_is_followed_to_its_end(tmp_path: Path) -> None:
    """From its creation over its wait to its end, over a reopening; then the iteration stops."""
    store = tmp_path / "s.sqlite"
    async with open_harness(store, registry=registry()) as harness:
        id = await job(harness)
        async with harness.watch_tasks() as watch:
            with trio.fail_after(60):
                async for frame in watch:
                    if frame.value.tasks[id].waits_for_signals:
                        break
            assert frame.value.tasks[id].phase == "told"
        closed = watch.json()
    async with open_harness(store, registry=registry()) as harness:
        async with harness.watch_tasks() as again:
            assert again.json() == closed
        frames: list[Frame[TaskGraph]] = []
        async with harness.watch_tasks(id, limit=5) as watch:
            value = watch.json()
            harness.start()
            await harness.signal(id, "go")
            with trio.fail_after(60):
                frames.extend([frame async for frame in watch])
        for frame in frames:
            value = _patch.apply(value, frame.patch)
        assert value == {"root": id, "tasks": {}, "conversations": {}, "left_out": 0}


async def test_a_close_ends_a_watch_that_outlives_the_harness() -> None:
    """Who still iterates is let go, with what was committed until then."""
    ended = trio.Event()

    async def follow(harness: Harness, ready: trio.Event) -> None:
        async with harness.watch_tasks(limit=1) as watch:
            ready.set()
            assert len([frame async for frame in watch]) >= 1
        ended.set()

    async with trio.open_nursery() as nursery:
        async with open_harness(":memory:", registry=registry()) as harness:
            ready = trio.Event()
            nursery.start_soon(follow, harness, ready)
            await ready.wait()
            with pytest.raises(NotFoundError, match="no task or conversation 99"):
                async with harness.watch_tasks(99):
                    pass
            await job(harness)
        with trio.fail_after(60):
            await ended.wait()
