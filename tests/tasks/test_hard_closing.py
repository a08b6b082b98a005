"""Hard scenarios of commits around the deciding step, and of closing at the wrong moment."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from histories import Histories
from worlds import ROOT, Next, Start, World, done, forever

from pidurable.errors import InvocationEndedError
from pidurable.testing import Fault


async def release_at_rest(world: World) -> None:
    """Release the storage once everybody else is blocked on it."""
    await world.quiet()
    world.blocking.release()


def notes(world: World) -> list[str]:
    """What was appended to the root conversation."""
    return [str(entry.data) for entry in world.base.reopen()._data.entries.values()]


@pytest.mark.parametrize("way", ["complete", "fail", "wait"])
async def test_a_commit_before_the_decision_is_durable_and_one_after_it_is_refused(
    way: str,
) -> None:
    """Both outlive their phase; the line decides, and the decision stays what it was."""
    # Hard scenario: two commits of an invocation around the deciding step.
    world = World()
    told: list[str] = []
    contexts: list[Any] = []
    over = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        contexts.append(ctx)
        if isinstance(at, Next):
            await ctx.complete("woken")
            return
        await over.wait()

    async def note(text: str) -> None:
        try:
            async with contexts[0].commit() as tx:
                tx.append(ROOT, text, kind="note")
            told.append(f"{text} stored")
        except InvocationEndedError:
            told.append(f"{text} refused")

    async def decide() -> None:
        if way == "complete":
            await contexts[0].complete("whole")
        elif way == "fail":
            await contexts[0].fail("whole")
        else:
            await contexts[0].wait(then=Next(1), signals=True)

    async with world.open() as rt:
        task = await world.create("a", script)
        await world.quiet()
        async with trio.open_nursery() as nursery:
            world.blocking.hold()
            nursery.start_soon(rt.commit, lambda tx: tx.append(ROOT, "host", kind="note"))
            await world.quiet()
            for queued in (lambda: note("before"), decide, lambda: note("after")):
                nursery.start_soon(queued)
                await world.quiet()
            # The phase returns now: its step waits for the three of them.
            over.set()
            await world.quiet()
            assert told == []
            world.blocking.release()
        await world.quiet()
        assert rt.session.line.poison is None
        if way == "wait":
            assert world.status(task) == "waiting"
            await world.signal(task)
        outcome = await world.end(task)
    assert sorted(told) == ["after refused", "before stored"]
    assert notes(world) == ['"host"', '"before"']
    assert outcome.status == ("failed" if way == "fail" else "completed")
    if way == "complete":
        assert outcome.result == "whole"


async def test_a_commit_that_comes_when_the_step_has_been_taken_up_is_refused_at_once() -> None:
    """From the moment the phase returned, nothing new of it gets into the line."""
    # Hard scenario: two commits of an invocation around the deciding step.
    world = World()
    contexts: list[Any] = []
    over = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        contexts.append(ctx)
        if isinstance(at, Start):
            await over.wait()
        else:
            await ctx.complete("undisturbed")

    async with world.open():
        task = await world.create("a", script)
        await world.quiet()
        async with trio.open_nursery() as nursery:
            world.blocking.hold()
            nursery.start_soon(contexts[0].goto, Next(1))
            await world.quiet()
            over.set()
            await world.quiet()
            # The step is waiting for that goto.
            with pytest.raises(InvocationEndedError, match="its phase had returned"):
                await contexts[0].goto(Next(2))
            world.blocking.release()
        assert (await world.end(task)).result == "undisturbed"
    assert world.log == ["a start", "a next 1"]


async def test_closing_while_a_step_lands_writes_nothing_but_the_closing_mark() -> None:
    """The goto in flight is the last commit; the reopening resumes at its checkpoint."""
    # Hard scenario: close while a step decides to continue.
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            world.blocking.hold()
            await ctx.goto(Next(1))
        else:
            await ctx.complete("later")

    async with trio.open_nursery() as nursery, world.open():
        histories = Histories.watch(world)
        task = await world.create("a", script)
        await world.quiet()
        applied = world.storage.count("apply")
        assert world.base.reopen()._data.checkpoints[task][0] == "start"
        nursery.start_soon(release_at_rest, world)
    # The goto was on its way at the close; after it comes the closing batch alone.
    assert world.storage.count("apply") == applied + 2
    assert histories.by_task == {task: ["pending", "running", "running"]}
    assert world.log == ["a start"]
    assert world.status(task) == "pending"
    assert world.base.reopen()._data.checkpoints[task][0] == "next"
    async with world.open():
        assert (await world.end(task)).result == "later"
    assert world.log == ["a start", "a next 1"]


async def test_closing_seals_before_a_fault_that_is_queued_behind_a_held_commit() -> None:
    """The fault was on its way when the close came: it is not written, and the phase runs again."""
    # Hard scenario: close before a fault is written.
    world = World()
    go = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.goto(Next(1))
            return
        await go.wait()
        raise ValueError("late")

    async with trio.open_nursery() as nursery, world.open() as rt:
        task = await world.create("a", script)
        await world.quiet()
        world.blocking.hold()
        nursery.start_soon(rt.commit, lambda tx: tx.append(ROOT, "held", kind="note"))
        await world.quiet()
        go.set()
        await world.quiet()  # the fault is in the line
        nursery.start_soon(release_at_rest, world)
    assert notes(world) == ['"held"']
    assert (world.status(task), world.outcome(task)) == ("pending", None)
    assert not world.base.reopen()._data.outcomes
    assert world.row(task).recoveries == 0
    world.scripts["a"] = done
    async with world.open():
        assert (await world.end(task)).status == "completed"
    assert world.log == ["a start", "a next 1", "a next 1"]


@pytest.mark.parametrize("dies", [False, True])
async def test_an_abort_reservation_that_lands_in_a_closing_session_keeps_its_mark(
    dies: bool,
) -> None:
    """Pending after a clean close, running after a death in it: the handler runs once, later."""
    # Hard scenario: close while an abort reservation settles.
    world = World()
    async with trio.open_nursery() as nursery, world.open():
        task = await world.create("a", forever)
        await world.quiet()
        # The mark is one batch; the reservation of its handler is the next, and is held.
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        nursery.start_soon(world.abort, task)
        await world.quiet()
        assert world.status(task) == "running"
        if dies:
            # What is in the storage lands; the closing batch behind it does not.
            world.storage.add(Fault.call(world.storage.freeze, "apply", after=True))
        nursery.start_soon(release_at_rest, world)
    assert world.log == ["a start"]
    assert world.row(task).invocations == 2
    assert world.marked(task) == [True]
    assert world.status(task) == ("running" if dies else "pending")
    async with world.open():
        assert (await world.end(task)).status == "aborted"
    assert world.log == ["a start", "a abort"]
