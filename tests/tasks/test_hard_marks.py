"""Hard scenarios of marks: what races an abort, and who hears of it.

Beside those of `test_abort.py`: the same scenarios one level further down, from the other side, and
with every word of the history.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
from histories import Histories
from worlds import (
    ROOT,
    Actor,
    Harmless,
    Next,
    Other,
    Start,
    World,
    child_of,
    done,
    end_aborted,
    forever,
    parent_of,
)

from pidurable.tasks._definition import Retry
from pidurable.testing import Fault


class Forgiving(Actor):
    """Would run a phase again after a ValueError."""

    name = "test.forgiving"
    retry = Retry(on=(ValueError,), tries=5, base=0.0, jitter=0.0)


class Parking(Actor):
    """Would keep its checkpoint where its code raises."""

    name = "test.parking"
    on_fault = "park"


@pytest.mark.parametrize("kind", [Actor, Harmless])
async def test_a_mark_on_the_owner_during_the_reservation_of_a_child_runs_no_phase(
    kind: type[Actor],
) -> None:
    """The owner is aborted while its child's reservation is held: the child only ever undoes."""
    # Hard scenario: mark during reservation.
    world = World()
    go = trio.Event()

    async def parent(at: Any, ctx: Any) -> None:
        await go.wait()
        async with ctx.commit() as tx:
            child = tx.create_task(kind, "child", key="child")
            tx.wait(then=Next(1), on=[child])

    world.scripts["child"] = done
    async with world.open(), trio.open_nursery() as nursery:
        task = await world.create("parent", parent)
        await world.quiet()
        # The commit that creates the child passes; the one that reserves it stays in the storage.
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        go.set()
        await world.quiet()
        child = child_of(world, task, "child")
        assert world.status(child) == "pending"
        nursery.start_soon(world.abort, task)
        await world.quiet()
        world.blocking.release()
        assert (await world.end(task)).status == "aborted"
    assert world.outcome(child) == "aborted"
    # Reserved once, and once more for its handler.
    assert world.row(child).invocations == (1 if kind is Harmless else 2)
    undone = [] if kind is Harmless else ["child abort"]
    assert world.log == ["parent start", *undone, "parent abort"]


@pytest.mark.parametrize("kind", [Actor, Forgiving, Parking])
@pytest.mark.parametrize("says", ["aborted", "completed", "failed"])
async def test_a_throw_behind_a_durable_mark_leaves_the_outcome_to_the_handler(
    kind: type[Actor], says: str
) -> None:
    """Whatever its definition makes of a raise: behind a mark it is no fault, retry or parking."""
    # Hard scenario: mark against fault.
    world = World(Actor, Forgiving, Parking)
    go = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        # The cancellation of the mark does not reach this code; only its raise is left to judge.
        with trio.CancelScope(shield=True):
            await go.wait()
        raise ValueError("behind the mark")

    async def undo(at: Any, ctx: Any) -> None:
        if says == "completed":
            await ctx.complete("after all")
        elif says == "failed":
            await ctx.fail("not even undone")
        else:
            await ctx.end_aborted("undone")

    world.aborts["a"] = undo
    async with world.open():
        task = await world.create("a", script, kind=kind)
        await world.quiet()
        await world.abort(task)
        assert world.marked(task) == [True]
        go.set()
        outcome = await world.end(task)
    assert outcome.status == says
    assert world.log == ["a start", "a abort"]
    assert (world.row(task).tries, world.row(task).blocked) == (0, None)


async def test_a_mark_behind_a_handover_that_is_held_has_this_very_history() -> None:
    """Pending, running twice, pending, then marked: pending, running, terminal, and no other."""
    # Hard scenario: mark racing handover.
    world = World()
    step = trio.Event()

    class Newer(Actor):
        async def abort(self, at: Any, ctx: Any) -> None:
            self.world.log.append(f"newer abort at {at}")
            await ctx.end_aborted("by the newer")

    Newer.name = Actor.name

    async def script(at: Any, ctx: Any) -> None:
        await ctx.goto(Next(1))
        await step.wait()

    async with world.open(), trio.open_nursery() as nursery:
        histories = Histories.watch(world)
        task = await world.create("a", script)
        await world.quiet()
        world.install(Newer)
        world.blocking.hold()
        step.set()
        await world.quiet()
        assert world.status(task) == "running"  # the handover is in the storage, not stored
        nursery.start_soon(world.abort, task)
        await world.quiet()
        world.blocking.release()
        assert (await world.end(task)).reason == "by the newer"
    assert histories.by_task[task] == [
        "pending",
        "running",
        "running",
        "pending",
        "pending+mark",
        "running+mark",
        "terminal+mark",
    ]
    assert world.log == ["a start", "newer abort at Next(n=1)"]


@pytest.mark.parametrize("state", ["running", "waiting", "between"])
@pytest.mark.parametrize("durable", [False, True])
async def test_a_crash_around_the_mark_in_any_state(durable: bool, state: str) -> None:
    """What is durable decides, for a task that runs, that waits, and that is between two phases."""
    # Hard scenario: crash around the mark.
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start) and state == "waiting":
            await ctx.wait(then=Next(1), signals=True)
        elif isinstance(at, Start) and state == "between":
            await ctx.goto(Next(1))
            await trio.sleep_forever()
        else:
            await trio.sleep_forever()

    async with world.crashing():
        task = await world.create("a", script)
        await world.quiet()
        world.storage.add(Fault.call(world.storage.freeze, "apply", after=durable))
        with pytest.raises(Exception, match="frozen"):
            await world.abort(task)
    assert world.marked(task) == [durable]
    world.log.clear()
    world.scripts["a"] = done
    async with world.open():
        await world.quiet()
        if state == "waiting" and not durable:
            assert world.status(task) == "waiting"
            await world.signal(task)
        outcome = await world.end(task)
    resumed = "a start" if state == "running" else "a next 1"
    assert world.log == (["a abort"] if durable else [resumed])
    assert outcome.status == ("aborted" if durable else "completed")


@pytest.mark.parametrize("stored", [False, True])
async def test_a_crash_in_the_commit_of_an_abort_outcome_leaves_one_outcome(stored: bool) -> None:
    """Lost, the handler runs a second time; stored, it does not: one outcome and entry anyhow."""
    # Hard scenario: crash while the abort outcome is in storage.
    world = World()

    async def undo(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.append(ROOT, {"refund": len(world.log)}, kind="note")
            world.storage.add(Fault.call(world.storage.freeze, "apply", after=stored))
            tx.end_aborted(f"refund {len(world.log)}")

    world.aborts["a"] = undo
    async with world.crashing():
        task = await world.create("a", forever)
        await world.quiet()
        await world.abort(task)
        await world.quiet()
    assert world.log == ["a start", "a abort"]
    assert (world.outcome(task) == "aborted") is stored

    async def again(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.append(ROOT, {"refund": len(world.log)}, kind="note")
            tx.end_aborted(f"refund {len(world.log)}")

    world.aborts["a"] = again
    async with world.open() as rt:
        outcome = await world.end(task)
        entries = rt.session.storage.entries(ROOT)
    runs = 1 if stored else 2
    assert world.log == ["a start", *["a abort"] * runs]
    assert outcome.reason == f"refund {1 + runs}"
    assert [entry.data for entry in entries] == [f'{{"refund":{1 + runs}}}']
    assert len(world.base.reopen()._data.outcomes) == 1


async def test_an_intent_two_levels_up_stops_a_grandchild_between_phases() -> None:
    """The barrier holds below owners that are themselves not marked yet, for every level."""
    # Hard scenario: cascade barrier.
    world = World()
    step = trio.Event()

    async def leaf(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            world.log.append("too far")
            return
        await ctx.goto(Next(1))
        with trio.CancelScope(shield=True):
            await step.wait()

    world.scripts.update(leaf=leaf, mid=parent_of("leaf"))
    async with world.open(), trio.open_nursery() as nursery:
        top = await world.create("top", parent_of("mid"))
        await world.quiet()
        mid = child_of(world, top, "mid")
        grandchild = child_of(world, mid, "leaf")
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        nursery.start_soon(world.abort, top)
        await world.quiet()
        step.set()
        await world.quiet()
        assert world.marked(top, mid, grandchild) == [True, False, False]
        assert "too far" not in world.log
        world.blocking.release()
        assert (await world.end(top)).status == "aborted"
    assert "too far" not in world.log
    assert world.log[-3:] == ["leaf abort", "mid abort", "top abort"]


async def test_a_pending_child_below_an_intent_is_not_reserved_before_its_mark() -> None:
    """A child that is ready when its owner is marked is aborted without an invocation."""
    # Hard scenario: cascade barrier, before the first phase.
    world = World(limits={"test.other": 1})

    async def parent(at: Any, ctx: Any) -> None:
        await ctx.create_task(Other, "child", key="child")
        await trio.sleep_forever()

    async def busy(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.complete("")

    go = trio.Event()
    world.scripts["child"] = done
    async with world.open(), trio.open_nursery() as nursery:
        first = await world.create("busy", busy, kind=Other)
        await world.quiet()
        task = await world.create("parent", parent)
        await world.quiet()
        child = child_of(world, task, "child")
        assert world.status(child) == "pending"
        # The mark passes and the pass that follows is held; meanwhile the slot becomes free.
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        nursery.start_soon(world.abort, task)
        await world.quiet()
        go.set()
        await world.quiet()
        world.blocking.release()
        assert (await world.end(task)).status == "aborted"
        await world.end(first)
    assert world.row(child).invocations == 0
    assert world.outcome(child) == "aborted"


@pytest.mark.parametrize("first", ["A", "B"])
async def test_a_decided_fail_fast_wakes_after_both_have_drained(first: str) -> None:
    """Whichever of the failed one and the marked one drains first, the waiter waits for both."""
    # Hard scenario: fail_fast on a held failure.
    world = World()
    drained = {"A": trio.Event(), "B": trio.Event()}
    go = trio.Event()

    def slowly(name: str) -> Any:
        async def undo(at: Any, ctx: Any) -> None:
            await drained[name].wait()
            await end_aborted(at, ctx)

        return undo

    async def failing(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "below A", key="below A")
        await go.wait()
        await ctx.fail("held")

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                ids = [tx.create_task(Actor, name, key=name) for name in "ABC"]
                tx.wait(then=Next(1), on=ids[:2], policy="fail_fast")
        else:
            world.log.append("waiter woken")
            await trio.sleep_forever()

    world.scripts.update({"A": failing, "B": forever, "C": forever, "below A": forever})
    world.aborts.update({"below A": slowly("A"), "B": slowly("B")})
    async with world.open():
        task = await world.create("parent", parent)
        await world.quiet()
        a, b, c = (child_of(world, task, name) for name in "ABC")
        below = child_of(world, a, "below A")
        go.set()
        await world.quiet()
        assert (world.status(a), world.status(b)) == ("completing", "running")
        assert world.marked(task, a, b, c, below) == [False, False, True, False, True]
        second = "B" if first == "A" else "A"
        drained[first].set()
        await world.quiet()
        assert world.status({"A": a, "B": b}[first]) == "terminal"
        assert world.status(task) == "waiting"
        drained[second].set()
        await world.quiet()
        assert world.log[-1] == "waiter woken"
        assert world.marked(task, a, c) == [False, False, False]
        assert (world.outcome(a), world.outcome(b), world.outcome(c)) == ("failed", "aborted", None)


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("order", ["complete first", "mark first"])
async def test_an_end_in_the_commit_that_marks_the_owner_wakes_no_waiter_below_it(
    order: str, levels: int
) -> None:
    """A waiter any level below the marked owner aborts, in whichever order the commit says it."""
    # Hard scenario: dependency completes in the commit that aborts the waiter's owner.
    world = World()
    ids: dict[str, int] = {}
    go = trio.Event()

    async def dependency(at: Any, ctx: Any) -> None:
        await go.wait()
        async with ctx.commit() as tx:
            if order == "mark first":
                tx.abort_task(ids["owner"])
                tx.complete("there")
            else:
                tx.complete("there")
                tx.abort_task(ids["owner"])

    async def waiter(at: Any, ctx: Any) -> None:
        await ctx.wait(then=Next(1), on=[ids["dependency"]])

    world.scripts["level 0"] = waiter
    for level in range(1, levels):
        world.scripts[f"level {level}"] = parent_of(f"level {level - 1}")
    async with world.open():
        ids["dependency"] = await world.create("dependency", dependency)
        ids["owner"] = await world.create("owner", parent_of(f"level {levels - 1}"))
        await world.quiet()
        go.set()
        assert (await world.end(ids["owner"])).status == "aborted"
    assert world.outcome(ids["dependency"]) == "completed"
    assert "level 0 next 1" not in world.log
    undone = [f"level {level} abort" for level in range(levels)]
    assert [line for line in world.log if line.endswith("abort")] == [*undone, "owner abort"]
