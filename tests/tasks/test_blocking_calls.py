"""Blocking calls of tasks: joined by an abort and a close, but for reads that may be left."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked
from worlds import ROOT, Actor, World

from pidurable.session._seams import InlineBlocking, ThreadBlocking
from pidurable.tasks._open import open_runtime
from pidurable.tasks._runtime import Runtime


class Call:
    """A blocking call that says when it is in, and returns when it is let go."""

    def __init__(self) -> None:
        self.entered = trio.Event()
        self.returned = trio.Event()
        self.go = threading.Event()
        self.left_behind = False
        """Whether the session had closed before it returned."""

    def __call__(self, what: str) -> str:
        trio.from_thread.run_sync(self.entered.set)
        assert self.go.wait(60)
        trio.from_thread.run_sync(self.returned.set)
        return f"read {what}"


@asynccontextmanager
async def calling(call: Call, **how: Any) -> AsyncIterator[tuple[World, Runtime, int]]:
    """A world with real threads, and a task that is in the middle of the call."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        await ctx.complete(await ctx.run_blocking(call, "it", **how))

    world.scripts["a"] = script
    try:
        async with open_runtime(world.base, snapshot=lambda: world.definitions) as runtime:
            world.rt = runtime
            await runtime.commit(lambda tx: tx.create_conversation())
            task = await runtime.commit(lambda tx: tx.create_task(Actor, "a", conversation=ROOT))
            await call.entered.wait()
            try:
                yield world, runtime, task
            finally:
                if not how.get("abandon"):
                    call.go.set()
        call.left_behind = not call.returned.is_set()
    finally:
        call.go.set()


@pytest.mark.parametrize("abandon", [False, True])
async def test_a_call_returns_what_it_read(abandon: bool) -> None:
    """Nobody cancels it: both kinds give their result."""
    call = Call()
    async with calling(call, abandon=abandon) as (_, runtime, task):
        call.go.set()
        assert (await runtime.wait_for_task(task)).result == "read it"


async def test_an_abort_waits_for_the_thread() -> None:
    """The abort handler starts after the call has returned, so nothing happens after the undo."""
    call = Call()
    async with calling(call) as (world, runtime, task):
        await runtime.commit(lambda tx: tx.abort_task(task, "user"))
        await wait_all_tasks_blocked(0.01)
        assert "a abort" not in world.log
        assert task in runtime.invocations
        call.go.set()
        assert (await runtime.wait_for_task(task)).status == "aborted"
        assert call.returned.is_set()


async def test_an_abort_leaves_a_read_behind() -> None:
    """With `abandon` the task is undone while the read goes on unseen to its end."""
    call = Call()
    async with calling(call, abandon=True) as (world, runtime, task):
        await runtime.commit(lambda tx: tx.abort_task(task, "user"))
        assert (await runtime.wait_for_task(task)).status == "aborted"
        assert not call.returned.is_set()
        call.go.set()
        await call.returned.wait()
        assert world.log == ["a start", "a abort"]


async def test_a_close_does_not_wait_for_a_read_that_is_left_behind() -> None:
    """The session closes, with its task pending, while the thread is still in the call."""
    call = Call()
    async with calling(call, abandon=True) as (world, _, task):
        pass
    assert call.left_behind
    assert (world.status(task), world.log) == ("pending", ["a start"])
    await call.returned.wait()


async def test_a_close_waits_for_any_other_call() -> None:
    """The thread has returned before the session is closed."""
    call = Call()
    async with calling(call):
        pass
    assert call.returned.is_set()
    assert not call.left_behind


@pytest.mark.parametrize("blocking", [ThreadBlocking(), InlineBlocking()])
async def test_what_a_call_raises_reaches_who_waits(blocking: Any) -> None:
    """Abandoned only when cancelled: an error before that is an error like any other."""
    for abandon in (False, True):
        with pytest.raises(ZeroDivisionError):
            await blocking.run(divmod, 1, 0, abandon=abandon)
