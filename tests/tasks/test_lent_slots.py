"""Whoever has live work below needs no slot: not to hold, and not to be woken either."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import trio
from recount import check_at_rest
from worlds import ROOT, Actor, Next, Start, World, child_of, done, forever

LIMITS: list[dict[str, Any]] = [{"running_max": 1}, {"limits": {Actor.name: 1}}]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("woken_by", ["deadline", "signal"])
async def test_a_parent_is_woken_while_its_child_has_the_only_slot(
    autojump_clock: Any, limit: Any, woken_by: str
) -> None:
    """It was to end its wait early, and may want to abort the child: it is not queued behind it."""
    # C026
    world = World(**limit)

    async def parent(at: Any, ctx: Any) -> None:
        keyed = ctx.snapshot.keyed_tasks()
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                child = tx.create_task(Actor, "child", key="child")
                deadline = ctx.now() + timedelta(seconds=60)
                tx.wait(then=Next(1), on=[child], deadline=deadline, signals=True)
        elif at.n == 1:
            async with ctx.commit() as tx:
                tx.receive()
                tx.abort_task(keyed["child"])
                tx.goto(Next(2))
        else:
            await ctx.wait_for_task(keyed["child"])
            await ctx.complete("in time")

    world.scripts["child"] = forever
    async with world.open() as rt:
        task = await world.create("parent", parent)
        await trio.sleep(10)
        assert world.status(child_of(world, task, "child")) == "running"
        if woken_by == "signal":
            await world.signal(task)
        with trio.fail_after(100):
            assert (await world.end(task)).result == "in time"
        check_at_rest(rt)


@pytest.mark.parametrize("limit", LIMITS)
async def test_an_interrupted_parent_starts_beside_the_child_that_has_the_only_slot(
    autojump_clock: Any, limit: Any
) -> None:
    """After a restart too, whichever of the two is taken first."""
    world = World(**limit)
    go = trio.Event()

    async def parent(at: Any, ctx: Any) -> None:
        child = await ctx.create_task(Actor, "child", key="child")
        if go.is_set():
            async with ctx.commit() as tx:
                tx.signal(child, "go")
        await ctx.wait_for_task(child)
        await ctx.complete("")

    async def child(at: Any, ctx: Any) -> None:
        """Holds its slot until its parent has told it to go on."""
        while not world.rt.session.storage.signals(ctx.task_id):  # noqa: ASYNC110
            await trio.sleep(1)
        await ctx.complete("")

    world.scripts["child"] = child
    for life in range(2):
        async with world.crashing():
            if not life:
                task = await world.create("parent", parent)
            await trio.sleep(0.5)
    id = child_of(world, task, "child")
    # As if the child had been ready first.
    data = world.base.reopen()._data
    data.tasks[id] = data.tasks[id]._replace(ready_us=1)
    go.set()
    async with world.open() as rt:
        with trio.fail_after(100):
            assert (await world.end(task)).status == "completed"
        await world.quiet()
        check_at_rest(rt)


@pytest.mark.parametrize("limit", LIMITS)
async def test_work_that_comes_below_a_queued_task_lets_it_start(limit: Any) -> None:
    """It was queued for a slot with nothing below; the host gives its conversation work to do."""
    world = World(**limit)
    go = trio.Event()

    async def owner(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                tx.create_conversation(key="own")
                tx.wait(then=Next(1), signals=True)
        else:
            await ctx.complete("woken")

    async def busy(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.complete("")

    async with world.open() as rt:
        task = await world.create("owner", owner)
        await world.quiet()
        own = world.base.reopen()._data.conversations_by_key[(task, "own")]
        other = await world.create("busy", busy)
        await world.quiet()
        await world.signal(task)
        await world.quiet()
        assert world.status(task) == "pending"
        below = await world.create("below", done, conversation=own)
        await world.quiet()
        # It has started, and holds its outcome for what is below; that waits for the slot.
        assert (world.status(task), world.status(below)) == ("completing", "pending")
        go.set()
        await world.end(task)
        await world.end(other)
        check_at_rest(rt)
        assert not rt.scheduler._held_slots


async def test_a_parent_exceeds_the_limit_when_its_child_ends_and_never_queues_again() -> None:
    """Its slot was lent and is taken by another: it goes on beside that one, and nobody else."""
    world = World(limits={Actor.name: 1})
    events = {name: trio.Event() for name in ("first", "second", "third")}
    running: list[str] = []

    async def child(at: Any, ctx: Any) -> None:
        await ctx.wait(then=Next(1), signals=True)

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait_for_task(await ctx.create_task(Actor, "child", key="child"))
        running.append(f"first {type(at).__name__}")
        await events["first"].wait()
        await (ctx.goto(Next(1)) if isinstance(at, Start) else ctx.complete(""))

    async def other(at: Any, ctx: Any) -> None:
        running.append(ctx.input)
        await events[ctx.input].wait()
        await ctx.complete("")

    world.scripts.update(child=child, second=other, third=other)
    async with world.open() as rt:
        first = await world.create("first", parent)
        await world.quiet()
        # The child is parked, and its parent holds no slot for as long as it lives.
        await world.create("second")
        await world.create("third")
        await world.quiet()
        assert running == ["second"]
        await world.abort(child_of(world, first, "child"))
        await world.quiet()
        assert running == ["second", "first Start"]
        assert rt.scheduler._slots[Actor.name] == 2
        events["second"].set()
        await world.quiet()
        assert running == ["second", "first Start"]  # one slot, and the parent has it
        events["first"].set()
        await world.end(first)
        await world.quiet()
        assert running == ["second", "first Start", "first Next", "third"]
        events["third"].set()
        await rt.wait_for_idle()
        assert not rt.scheduler._held_slots
    assert world.row(first).invocations == 1


async def test_a_pending_owner_below_a_mark_is_not_started_for_want_of_no_slot() -> None:
    """The barrier of an abort holds for those that need no slot as for all others."""
    world = World(limits={Actor.name: 1})

    async def owner(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                child = tx.create_task(Actor, "child", key="child")
                tx.wait(then=Next(1), on=[child], signals=True)
        else:
            world.log.append("too far")

    world.scripts.update(child=forever)
    async with world.open() as rt:
        task = await world.create("owner", owner)
        await world.quiet()

        def both(tx: Any) -> None:
            tx.signal(task, "on")
            tx.abort_task(task)

        await rt.commit(both)
        assert (await world.end(task)).status == "aborted"
        check_at_rest(rt)
        await rt.commit(lambda tx: tx.append(ROOT, {}, kind="note"))
    assert "too far" not in world.log


async def test_a_parent_whose_child_ends_before_the_start_is_started() -> None:
    """Queued without a slot, as its child was live, it takes one once that has been aborted."""
    world = World()
    world.scripts["child"] = forever

    async def parent(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "child", key="child")
        await trio.sleep_forever()

    async with world.open():
        task = await world.create("parent", parent)
        await world.quiet()
    world.scripts["parent"] = done
    async with world.open(start=False) as rt:
        await world.abort(child_of(world, task, "child"))
        await world.quiet()
        assert world.outcome(child_of(world, task, "child")) == "aborted"
        rt.start()
        await world.quiet()
        assert world.outcome(task) == "completed"
