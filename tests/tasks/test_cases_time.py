"""Cases of timers: a clock that jumps, and a process that dies while something waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from recount import check_at_rest
from worlds import Actor, Next, Start, World, done, forever

from pidurable.tasks._definition import Retry

HOUR = 3_600.0
POLL = 61.0
"""A stepped wall clock is noticed within a minute."""


class Patient(Actor):
    """Tried again once, four hours later."""

    name = "test.patient"
    retry = Retry(on=(OSError,), tries=2, base=4 * HOUR, maximum=5 * HOUR, jitter=0.0)


class Minute(Actor):
    """Tried again once, a minute later."""

    name = "test.minute"
    retry = Retry(on=(OSError,), tries=2, base=60.0, jitter=0.0)


def in_seconds(world: World, seconds: float) -> datetime:
    return datetime.fromtimestamp(world.clock.now_us() / 1e6 + seconds, UTC)


def timer(seconds: float) -> Any:
    """A script that parks for so long."""

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), deadline=ctx.now() + timedelta(seconds=seconds))
        else:
            await ctx.complete(str(ctx.woken_by))

    return script


def joining(seconds: float) -> Any:
    """A script that waits for a child that never ends, for so long."""

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                child = tx.create_task(Actor, "child", key="child")
                deadline = ctx.now() + timedelta(seconds=seconds)
                tx.wait(then=Next(1), on=[child], deadline=deadline)
        else:
            await ctx.fail(str(ctx.woken_by))

    return script


def signalled(seconds: float) -> Any:
    """A script that waits for an approval, for so long."""

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            deadline = ctx.now() + timedelta(seconds=seconds)
            await ctx.wait(then=Next(1), signals=True, deadline=deadline)
        else:
            await ctx.complete(str(ctx.woken_by))

    return script


def fails_once(world: World) -> Any:
    """A script that raises in its first try, and completes in the next one."""

    async def script(at: Any, ctx: Any) -> None:
        if world.row(ctx.task_id).tries == 0:
            raise OSError("not yet")
        await ctx.complete("retried")

    return script


Make = Callable[[World, float, type[Actor]], Awaitable[int]]


async def _timer(world: World, seconds: float, kind: type[Actor]) -> int:
    return await world.create("timer", timer(seconds))  # type: ignore[no-any-return]


async def _join(world: World, seconds: float, kind: type[Actor]) -> int:
    world.scripts["child"] = forever
    return await world.create("join", joining(seconds))  # type: ignore[no-any-return]


async def _approval(world: World, seconds: float, kind: type[Actor]) -> int:
    return await world.create("approval", signalled(seconds))  # type: ignore[no-any-return]


async def _retry(world: World, seconds: float, kind: type[Actor]) -> int:
    return await world.create("retry", fails_once(world), kind=kind)  # type: ignore[no-any-return]


async def _deadline_running(world: World, seconds: float, kind: type[Actor]) -> int:
    deadline = in_seconds(world, seconds)
    return await world.create("runs", forever, deadline=deadline)  # type: ignore[no-any-return]


async def _deadline_waiting(world: World, seconds: float, kind: type[Actor]) -> int:
    deadline = in_seconds(world, seconds)
    return await world.create(  # type: ignore[no-any-return]
        "waits", signalled(1_000 * HOUR), deadline=deadline
    )


async def _deadline_of_a_retry(world: World, seconds: float, kind: type[Actor]) -> int:
    """Its retry would come later than its deadline."""
    world.scripts["late"] = fails_once(world)
    deadline = in_seconds(world, seconds / 2)
    return await world.create("late", kind=kind, deadline=deadline)  # type: ignore[no-any-return]


WAITS: dict[str, tuple[Make, float, str]] = {
    "timer": (_timer, 1.0, "completed"),
    "join with deadline": (_join, 1.0, "failed"),
    "approval": (_approval, 1.0, "completed"),
    "retry": (_retry, 1.0, "completed"),
    "deadline of a running task": (_deadline_running, 1.0, "aborted"),
    "deadline of a waiting task": (_deadline_waiting, 1.0, "aborted"),
    "deadline before a retry": (_deadline_of_a_retry, 0.5, "aborted"),
}
"""What makes a task that waits, which part of the time it waits for, and how it ends."""


@pytest.mark.parametrize("hours", [-2, 2])
@pytest.mark.parametrize("what", WAITS)
async def test_a_step_of_the_clock_moves_what_waits_and_loses_nothing(
    autojump_clock: Any, what: str, hours: int
) -> None:
    """Due by the wall clock: two hours later or earlier, within one poll, and never forgotten."""
    # C092
    make, part, expected = WAITS[what]
    world = World(Actor, Patient, heartbeat_seconds=HOUR, lease_seconds=4 * HOUR)
    async with world.open() as rt:
        began = trio.current_time()
        task = await make(world, 4 * HOUR, Patient)
        await trio.sleep(600)
        assert world.outcome(task) is None
        world.clock.step_us = int(hours * HOUR * 1e6)
        with trio.fail_after(24 * HOUR):
            outcome = await world.end(task)
        due = max(600.0, (4 * part - hours) * HOUR)
        assert due - 0.001 <= trio.current_time() - began <= due + POLL
        if what == "join with deadline":
            await rt.wait_for_idle()
        check_at_rest(rt)
    assert outcome.status == expected


@pytest.mark.parametrize("what", WAITS)
async def test_a_wait_of_a_minute_killed_every_twenty_seconds_ends_at_its_first_deadline(
    autojump_clock: Any, what: str
) -> None:
    """The stored moment counts: three deaths give nobody the full time again."""
    # C094
    make, part, expected = WAITS[what]
    world = World(Actor, Minute)
    began = ended = 0
    for life in range(6):
        async with world.crashing() as rt:
            if not life:
                began = world.clock.now_us()
                task = await make(world, 60.0, Minute)
            with trio.move_on_after(20 if part == 1.0 else 12):
                await world.end(task)
                ended = world.clock.now_us()
                if what == "join with deadline":
                    await rt.wait_for_idle()
        if ended:
            break
    assert world.outcome(task) == expected
    assert abs((ended - began) / 1e6 - 60 * part) < 1
    assert life == (3 if part == 1.0 else 2)


@pytest.mark.parametrize("what", ["timer", "approval", "retry", "deadline of a running task"])
async def test_what_became_due_while_nobody_ran_is_done_at_the_opening(
    autojump_clock: Any, what: str
) -> None:
    """Opened long after the moment, the wait is over at once, without another full time."""
    # C094
    make, _, expected = WAITS[what]
    world = World(Actor, Minute)
    async with world.crashing():
        task = await make(world, 60.0, Minute)
        await trio.sleep(10)
    await trio.sleep(10_000)
    began = trio.current_time()
    async with world.open():
        assert (await world.end(task)).status == expected
    assert trio.current_time() - began < 1


async def test_a_step_forward_over_many_timers_fires_each_once(autojump_clock: Any) -> None:
    """Whatever the order of their moments, all that are due wake, and none of the others."""
    # C092
    world = World(heartbeat_seconds=HOUR, lease_seconds=4 * HOUR)
    async with world.open() as rt:
        tasks = {
            minutes: await world.create(f"t{minutes}", timer(60.0 * minutes))
            for minutes in (30, 10, 200, 20, 90)
        }
        await trio.sleep(1)
        world.clock.step_us = int(HOUR * 1e6)
        await trio.sleep(POLL)
        ended = sorted(minutes for minutes, id in tasks.items() if world.outcome(id))
        assert ended == [10, 20, 30]
        world.clock.step_us = 0
        await trio.sleep(100 * 60)
        assert sorted(m for m, id in tasks.items() if world.outcome(id)) == [10, 20, 30, 90]
        await world.end(tasks[200])
        check_at_rest(rt)
    assert [line for line in world.log if "next" in line].count("t10 next 1") == 1
    assert len([line for line in world.log if "next" in line]) == 5


async def test_a_clock_that_goes_back_and_forth_starts_nobody_twice(autojump_clock: Any) -> None:
    """A timer that was due, was not, and is due again, wakes its task once."""
    # C092
    world = World(heartbeat_seconds=HOUR, lease_seconds=4 * HOUR)
    async with world.open() as rt:
        task = await world.create("a", timer(600))
        for step in (1, -1, 2, 0, -2):
            await trio.sleep(30)
            world.clock.step_us = int(step * 590 * 1e6)
        await world.end(task)
        assert (await world.end(await world.create("b", done))).status == "completed"
        check_at_rest(rt)
    assert world.log.count("a next 1") == 1
