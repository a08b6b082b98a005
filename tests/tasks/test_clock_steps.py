"""A wall clock that is set back delays nothing but what waits for a moment (C092)."""

from __future__ import annotations

from typing import Any

import trio
from recount import check_at_rest
from worlds import Actor, World, done, forever

from pidurable.tasks._retry import Retry

_HOUR_US = 3_600 * 1_000_000


class Patient(Actor):
    """An actor whose phases are tried again after ten seconds."""

    name = "test.patient"
    retry = Retry(on=(OSError,), tries=3, base=10.0, jitter=0.0)


async def test_queued_tasks_run_although_the_clock_was_set_back(autojump_clock: Any) -> None:
    """Tasks that were ready before the step, behind a full kind, are taken when it has a slot."""
    world = World(limits={"test.actor": 1})

    async def short(at: Any, ctx: Any) -> None:
        await trio.sleep(10)
        await ctx.complete("")

    async with world.open() as rt:  # C092
        tasks = [await world.create(f"t{n}", short) for n in range(5)]
        await trio.sleep(1)
        world.clock.step_us = -_HOUR_US
        with trio.fail_after(100):
            outcomes = [await world.end(task) for task in tasks]
        check_at_rest(rt)
    assert {outcome.status for outcome in outcomes} == {"completed"}


async def test_a_clock_set_back_over_a_restart_keeps_nothing_waiting(autojump_clock: Any) -> None:
    """Pending tasks of a store whose times lie in the future run at once."""
    world = World(limits={"test.actor": 1})
    async with world.crashing():  # C092
        tasks = [await world.create(f"t{n}", forever) for n in range(3)]
        await world.quiet()
    world.clock.step_us = -_HOUR_US
    world.scripts.update({f"t{n}": done for n in range(3)})
    async with world.open():
        with trio.fail_after(100):
            outcomes = [await world.end(task) for task in tasks]
    assert {outcome.status for outcome in outcomes} == {"completed"}


async def test_a_retry_that_was_queued_waits_again_after_a_step_back(autojump_clock: Any) -> None:
    """Its moment is stored, so a clock that was set back brings it later, and never loses it."""
    world = World(Patient, Actor, limits={"test.patient": 1})
    failed: set[str] = set()

    async def fails_once(at: Any, ctx: Any) -> None:
        if ctx.input not in failed:
            failed.add(ctx.input)
            raise OSError("not yet")
        await ctx.complete("")

    async def long(at: Any, ctx: Any) -> None:
        await trio.sleep(60)
        await ctx.complete("")

    async with world.open() as rt:  # C092
        retries = await world.create("a", fails_once, kind=Patient)
        await world.quiet()
        occupies = await world.create("b", long, kind=Patient)
        await trio.sleep(30)  # the retry is due, and its kind is full
        world.clock.step_us = -_HOUR_US
        assert (await world.end(occupies)).status == "completed"
        assert world.status(retries) == "pending"
        with trio.fail_after(2 * 3_600):
            assert (await world.end(retries)).status == "completed"
        check_at_rest(rt)
