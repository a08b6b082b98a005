"""What is logged about tasks: the kind and number of each, and nothing that did not happen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from worlds import Actor, Next, World, done, forever

from pidurable.session._seams import SystemClock
from pidurable.testing import Fault


async def raises(at: Any, ctx: Any) -> None:
    raise ValueError("no stock")


def said(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if what in each.getMessage()]


async def test_a_fault_is_reported_with_the_kind_of_a_task_that_has_left_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By then the task has ended, and nothing of it is in memory any more."""
    world = World()
    async with world.open():
        task = await world.create("a", raises)
        await world.end(task)
        await world.quiet()
    where = "phase `start` of Actor (test.actor)"
    assert said(caplog, "ValueError") == [
        f"task {task} (test.actor): faulted in {where}: ValueError: no stock"
    ]


async def test_a_fault_that_the_storage_refused_is_not_reported_as_one(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The task stays at its checkpoint and is run again: it has not faulted."""
    world = World(storage_retry_seconds=1.0)
    go = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        await go.wait()
        raise ValueError("no stock")

    async with world.open():
        task = await world.create("a", script)
        await trio.sleep(1)
        world.storage.add(Fault.refuse(times=20))
        go.set()
        await trio.sleep(3)
        assert said(caplog, "ValueError") == []
        world.scripts["a"] = done
        assert (await world.end(task)).status == "completed"
    assert said(caplog, "ValueError") == []


async def test_a_crash_loop_is_reported_with_the_kind_of_its_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is found while the store is being opened, when no task is in memory yet."""
    world = World(recoveries_max=1)
    async with world.crashing():
        task = await world.create("a", forever)
        await world.quiet()
    async with world.open():
        assert world.row(task).blocked == "crash_loop"
    (line,) = said(caplog, "crash_loop")
    assert line.startswith(f"task {task} (test.actor): crash_loop: the process died 1 times")


async def test_what_a_phase_raises_while_it_is_aborted_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The abort goes on and decides the outcome; the error of the clean-up is not lost."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("the clean-up failed")

    async with world.open():
        task = await world.create("a", script)
        await world.quiet()
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
    assert said(caplog, "clean-up") == [
        f"task {task} (test.actor): phase `start` of Actor (test.actor) raised when it was "
        "aborted, and its abort goes on: ValueError: the clean-up failed"
    ]


async def test_a_cancelled_phase_that_ends_quietly_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither a cancellation nor a commit that was refused because of the mark is worth a line."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        with trio.CancelScope(shield=True):
            await go.wait()
            await ctx.goto(at)

    go = trio.Event()
    async with world.open():
        quiet = await world.create("quiet", forever)
        refused = await world.create("refused", script)
        await world.quiet()
        await world.abort(quiet)
        await world.abort(refused)
        go.set()
        for task in (quiet, refused):
            assert (await world.end(task)).status == "aborted"
    assert said(caplog, "raised") == []


@pytest.mark.parametrize("way", ["complete", "fail", "wait", "held"])
async def test_a_handler_that_goes_on_after_its_decision_is_reported(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """The task is where its commit says; the code is named with its stack until it has returned."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("woken")
            return
        if way == "held":
            await ctx.create_task(Actor, "child", key="child")
        if way == "wait":
            await ctx.wait(then=Next(1), on=[])
        elif way == "fail":
            await ctx.fail("enough")
        else:
            await ctx.complete("enough")
        await goes_on()
        world.log.append("returned")

    async def goes_on() -> None:
        await trio.sleep(25)

    world.scripts["child"] = done
    async with world.open() as rt:
        task = await world.create("a", script)
        await trio.sleep(5)
        # What is over is over; only a wait is followed by something, which waits for the handler.
        assert world.status(task) == ("waiting" if way == "wait" else "terminal")
        assert said(caplog, "not returned") == []
        await trio.sleep(100)
        assert not rt.invocations
        assert not rt.scheduler._held_slots
    assert world.log.count("returned") == 1
    if way == "wait":
        assert world.log == ["a start", "returned", "a next 1"]
    first, second = said(caplog, "has not returned")
    assert f"task {task} (test.actor): its handler has not returned 10 s after" in first
    assert "has not returned 20 s after" in second
    assert "in goes_on" in first


async def test_what_goes_on_after_a_decision_ends_with_an_abort_and_with_the_session(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An owner that holds its outcome may be aborted; its handler is cancelled, as any other is."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if ctx.input == "holds":
            await ctx.create_task(Actor, "child", key="child")
        await ctx.complete("enough")
        try:
            await trio.sleep_forever()
        finally:
            world.log.append(f"{ctx.input} stopped")

    world.scripts["child"] = forever
    async with world.open():
        holds = await world.create("holds", script)
        ended = await world.create("ended", script)
        await trio.sleep(1)
        assert (world.status(holds), world.status(ended)) == ("completing", "terminal")
        await world.abort(holds)
        assert (await world.end(holds)).result == "enough"
        await trio.sleep(1)
        assert [line for line in world.log if "stopped" in line] == ["holds stopped"]
    assert world.log[-1] == "ended stopped"
    assert said(caplog, "not returned") == []


async def test_handlers_that_return_after_their_decision_are_not_worth_a_word(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Ends without number wake nobody, and leave nothing behind that would."""
    world = World()
    async with world.open() as rt:
        for _ in range(21):
            tasks = [await world.create("a", done) for _ in range(10)]
            for task in tasks:
                await world.end(task)
            await trio.sleep(3)
        assert rt.runner._late == {}
        assert rt.runner._sleeping.deadline == math.inf
    assert said(caplog, "returned") == []


@pytest.mark.parametrize("real", [False, True])
async def test_who_is_late_is_reported_in_time_whoever_was_watched_before(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture, real: bool
) -> None:
    """Ten seconds after its own decision, though others had ended some seconds before."""
    world = World()
    told: list[tuple[int, int]] = []

    async def late(at: Any, ctx: Any) -> None:
        await ctx.complete("")
        mine = f"task {ctx.task_id} "
        await trio.sleep(9.5)
        early = len(said(caplog, mine))
        await trio.sleep(1)
        told.append((early, len(said(caplog, mine))))

    async with world.open(clock=SystemClock() if real else None):
        for name in ("late", "later", "latest"):
            await trio.sleep(1)
            for _ in range(3):
                await world.end(await world.create("a", done))
                await trio.sleep(2)
            await world.end(await world.create(name, late))
            await trio.sleep(30)
    assert told == [(0, 1)] * 3
