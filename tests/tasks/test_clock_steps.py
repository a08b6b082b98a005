"""Wall clocks: one that is set back delays nothing (C092), a virtual one runs years in seconds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from recount import check_at_rest
from trio.testing import MockClock
from worlds import Actor, Next, World, done, forever

from pidurable.errors import StorageHeldError
from pidurable.tasks._open import open_runtime
from pidurable.tasks._retry import Retry
from pidurable.testing import Fault

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


async def test_a_deadline_that_was_queued_waits_again_after_a_step_back(mock_clock: Any) -> None:
    """A task is not marked before its deadline by a pass that the step of the clock overtook."""
    world = World()
    async with world.open(), trio.open_nursery() as nursery:
        moment = datetime.fromtimestamp(world.clock.now_us() / 1e6, UTC) + timedelta(seconds=10)
        task = await world.create("a", forever, deadline=moment)
        await world.quiet()
        world.blocking.hold()
        nursery.start_soon(world.signal, task)
        await world.quiet()
        # The pass that is to mark it queues behind the commit that is inside the storage.
        mock_clock.jump(11)
        await world.quiet()
        world.clock.step_us = -5_000_000
        world.blocking.release()
        await world.quiet()
        assert world.marked(task) == [False]
        mock_clock.jump(5)
        assert (await world.end(task)).reason == "undone"
        assert world.row(task).abort_reason == "deadline"


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


async def test_years_pass_without_a_poll_or_a_heartbeat(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a virtual clock the loop wakes only for what is due, with every default setting."""
    world = World()

    async def sleeps(at: Any, ctx: Any) -> None:
        n = getattr(at, "n", 0)
        if n == 10:
            await ctx.complete("")
        else:
            await ctx.wait(then=Next(n + 1), deadline=ctx.now() + timedelta(days=365))

    jumps: list[float] = []
    jump = MockClock.jump

    def counted(self: MockClock, seconds: float) -> None:
        jumps.append(seconds)
        jump(self, seconds)

    monkeypatch.setattr(MockClock, "jump", counted)
    async with world.open():
        assert (await world.end(await world.create("a", sleeps))).status == "completed"
        assert world.storage.count("heartbeat") == 1
    assert sum(jumps) >= 10 * 365 * 86_400
    assert len(jumps) < 100


async def test_a_holder_under_a_virtual_clock_never_falls_silent(autojump_clock: Any) -> None:
    """After a year without a commit nobody may take the store over unasked, and it still works."""
    world = World()
    async with world.open():
        await trio.sleep(365 * 86_400)
        with pytest.raises(StorageHeldError):
            async with open_runtime(
                world.base.reopen(), snapshot=lambda: world.definitions, clock=world.clock
            ):
                pass
        assert (await world.end(await world.create("a", done))).status == "completed"


async def test_a_closed_session_hears_no_steps() -> None:
    """A virtual clock that outlives its sessions keeps none of them."""
    world = World()
    for _ in range(3):
        async with world.open():
            await world.quiet()
            world.clock.step_us += 1
            assert len(world.clock._told) == 1
    assert world.clock._told == []


async def test_a_try_that_the_storage_refused_runs_again_although_the_clock_was_set_back(
    autojump_clock: Any,
) -> None:
    """It had begun, so its moment had come; that it lies ahead again by the clock holds nobody."""
    world = World(Patient, storage_retry_seconds=1.0)
    go = trio.Event()
    tries: list[float] = []

    async def script(at: Any, ctx: Any) -> None:
        tries.append(trio.current_time())
        if len(tries) == 1:
            raise OSError("not yet")
        await go.wait()
        await ctx.complete("second try")

    async with world.open() as rt:  # C092
        task = await world.create("a", script, kind=Patient)
        await trio.sleep(20)
        assert len(tries) == 2
        world.clock.step_us = -_HOUR_US
        world.storage.add(Fault.refuse(times=20))
        go.set()
        with trio.fail_after(60):
            assert (await world.end(task)).result == "second try"
        check_at_rest(rt)
