"""One invocation of a task at a time: what follows a handler waits until it has returned."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import trio
from recount import check_at_rest
from worlds import Actor, Next, Start, World

from pidurable.tasks._retry import Retry


class Insistent(Actor):
    """An actor whose phases are tried again at once when the machine is at fault."""

    name = "test.insistent"
    retry = Retry(on=(OSError,), tries=5, base=0.0, jitter=0.0)


async def test_a_handler_that_goes_on_after_its_wait_is_joined_first(autojump_clock: Any) -> None:
    """A wait whose condition is there does not begin the next phase beside the last handler."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), on=[])
            await trio.sleep(5)
            world.log.append("returned")
            return
        await ctx.complete("")

    async with world.open() as rt:
        assert (await world.end(await world.create("a", script))).status == "completed"
        check_at_rest(rt)
    assert world.log == ["a start", "returned", "a next 1"]


async def test_an_abort_joins_a_handler_that_goes_on_after_its_wait(autojump_clock: Any) -> None:
    """The abort handler begins when the code that waited has returned, and not beside it."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        await ctx.wait(then=Next(1), signals=True)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(3)
            world.log.append("returned")

    async with world.open():
        task = await world.create("a", script)
        await world.quiet()
        await world.signal(task)
        await world.quiet()
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
    assert world.log == ["a start", "returned", "a abort"]


async def test_a_task_woken_before_its_handler_returned_is_not_forgotten(
    autojump_clock: Any,
) -> None:
    """Its turn comes when the handler has returned, also while others of its kind are queued."""
    world = World(limits={"test.actor": 2})

    async def lingers(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), deadline=ctx.now() + timedelta(seconds=1))
            await trio.sleep(5)
            return
        await ctx.complete("")

    async def short(at: Any, ctx: Any) -> None:
        await trio.sleep(1)
        await ctx.complete("")

    async with world.open() as rt:
        tasks = [await world.create("lingers", lingers)]
        tasks += [await world.create(f"short {n}", short) for n in range(3)]
        with trio.fail_after(100):
            outcomes = [await world.end(task) for task in tasks]
        check_at_rest(rt)
    assert {outcome.status for outcome in outcomes} == {"completed"}


async def test_retries_of_many_tasks_at_once_are_all_made(autojump_clock: Any) -> None:
    """A retry that is due before the failed handler has been joined is not dropped."""
    world = World(Insistent)
    tries: dict[str, int] = {}

    async def script(at: Any, ctx: Any) -> None:
        tries[ctx.input] = tries.get(ctx.input, 0) + 1
        if tries[ctx.input] < 4:
            raise OSError("not yet")
        await ctx.complete("")

    async with world.open() as rt:
        tasks = [await world.create(f"t{n}", script, kind=Insistent) for n in range(60)]
        with trio.fail_after(100):
            outcomes = [await world.end(task) for task in tasks]
        check_at_rest(rt)
    assert {outcome.status for outcome in outcomes} == {"completed"}
    assert set(tries.values()) == {4}


async def test_a_cancellation_that_nobody_sent_is_a_fault(autojump_clock: Any) -> None:
    """A handler that raises a kept trio.Cancelled is faulted, not left running."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        kept: trio.Cancelled | None = None
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.sleep(1)
            except trio.Cancelled as cancelled:  # noqa: ASYNC103 - the mistake that is tested
                kept = cancelled
        assert kept is not None
        raise kept

    async with world.open():  # C052
        task = await world.create("a", script)
        with trio.fail_after(100):
            outcome = await world.end(task)
    assert outcome.status == "faulted"
    assert outcome.error is not None
    assert "must not be raised outside of its own cancel scope" in outcome.error.message
