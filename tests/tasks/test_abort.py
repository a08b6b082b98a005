"""The abort protocol: marks flow down, handlers run bottom-up, and nothing races past a mark."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import trio
from worlds import (
    ROOT,
    Actor,
    Harmless,
    Next,
    Start,
    World,
    child_of,
    done,
    end_aborted,
    forever,
    parent_of,
)

from pidurable.errors import AbortRequestedError, InvalidArgumentError
from pidurable.testing import Fault


async def test_a_mark_during_the_reservation_runs_only_the_handler() -> None:
    """Aborted while its first reservation is inside the storage, a task never runs a phase."""
    # Hard scenario: mark during reservation.
    world = World()
    async with world.open(), trio.open_nursery() as nursery:
        # The creation passes; the next batch, which reserves, stays in the storage.
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        task = await world.create("a", done)
        await world.quiet()
        assert world.status(task) == "pending"
        nursery.start_soon(world.abort, task)
        await world.quiet()
        world.blocking.release()
        outcome = await world.end(task)
    assert outcome.status == "aborted"
    assert world.log == ["a abort"]


async def test_a_mark_before_a_fault_in_line_wins() -> None:
    """A phase that raises behind a durable mark is not faulted: its handler decides."""
    # Hard scenario: mark against fault.
    world = World()
    raised = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raised.set()
            raise ValueError("in the way")

    async with world.open():
        task = await world.create("a", script)
        await world.quiet()
        await world.abort(task)
        outcome = await world.end(task)
    assert raised.is_set()
    assert outcome.status == "aborted"
    assert outcome.reason == "undone"


async def test_a_mark_that_is_staged_before_the_fault_wins() -> None:
    """The fault's body finds the mark of the same batch and writes nothing."""
    world = World()
    go = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        await go.wait()
        raise ValueError("too late")

    async with world.open() as rt, trio.open_nursery() as nursery:
        task = await world.create("a", script)
        await world.quiet()
        world.blocking.hold()
        nursery.start_soon(rt.commit, lambda tx: tx.append(ROOT, {}, kind="note"))
        await world.quiet()
        nursery.start_soon(world.abort, task)
        await world.quiet()
        go.set()
        await world.quiet()
        world.blocking.release()
        outcome = await world.end(task)
    assert outcome.status == "aborted"


async def test_a_mark_racing_a_handover_runs_the_new_handler() -> None:
    """A task that moves to newer code when the abort lands is aborted by the newer code, once."""
    # Hard scenario: mark racing handover.
    world = World()
    step = trio.Event()

    class Newer(Actor):
        async def abort(self, at: Any, ctx: Any) -> None:
            self.world.log.append("newer abort")
            await ctx.end_aborted("by the newer")

    Newer.name = Actor.name

    async def script(at: Any, ctx: Any) -> None:
        await ctx.goto(Next(1))
        await step.wait()

    async with world.open() as rt, trio.open_nursery() as nursery:
        task = await world.create("a", script)
        await world.quiet()
        world.install(Newer)
        world.blocking.hold()
        step.set()
        await world.quiet()
        nursery.start_soon(world.abort, task)
        await world.quiet()
        world.blocking.release()
        outcome = await world.end(task)
        await rt.wait_for_idle()
    assert outcome.reason == "by the newer"
    assert world.log == ["a start", "newer abort"]
    assert world.row(task).invocations == 2


async def test_closing_while_a_step_lands_begins_no_phase() -> None:
    """A goto in flight when the session closes is kept; its phase waits for the reopening."""
    # Hard scenario: close while a step decides to continue.
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            world.blocking.hold()
            await ctx.goto(Next(1))
        else:
            await ctx.complete("later")

    async with trio.open_nursery() as nursery, world.open():
        task = await world.create("a", script)
        await world.quiet()
        nursery.start_soon(self_release, world)
    assert world.log == ["a start"]
    assert world.status(task) == "pending"
    async with world.open():
        assert (await world.end(task)).result == "later"
    assert world.log == ["a start", "a next 1"]


async def self_release(world: World) -> None:
    """Release the storage once everybody else is blocked on it."""
    await world.quiet()
    world.blocking.release()


async def test_closing_before_a_fault_is_written_writes_none() -> None:
    """A raise whose fault is queued at the close leaves a pending task that runs again."""
    # Hard scenario: close before a fault is written.
    world = World()
    go = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        await go.wait()
        raise ValueError("late")

    async with trio.open_nursery() as nursery, world.open() as rt:
        task = await world.create("a", script)
        await world.quiet()
        world.blocking.hold()
        nursery.start_soon(rt.commit, lambda tx: tx.append(ROOT, {}, kind="note"))
        await world.quiet()
        go.set()
        await world.quiet()
        nursery.start_soon(self_release, world)
    assert world.status(task) == "pending"
    assert world.outcome(task) is None
    world.scripts["a"] = done
    async with world.open():
        assert (await world.end(task)).status == "completed"


async def test_closing_while_an_abort_is_reserved_runs_no_handler() -> None:
    """A reservation that lands in a closing session has its handler run by the reopening."""
    # Hard scenario: close while an abort reservation settles.
    world = World()
    async with trio.open_nursery() as nursery, world.open():
        task = await world.create("a", forever)
        await world.quiet()
        applied = world.storage.count("apply")
        # The mark is one batch; the reservation of its handler is the next, and is held.
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        nursery.start_soon(world.abort, task)
        await world.quiet()
        assert world.storage.count("apply") == applied + 1
        nursery.start_soon(self_release, world)
    assert world.log == ["a start"]
    assert world.status(task) == "pending"
    assert world.marked(task) == [True]
    async with world.open():
        assert (await world.end(task)).status == "aborted"
    assert world.log == ["a start", "a abort"]


@pytest.mark.parametrize("durable", [False, True])
async def test_a_crash_around_the_mark_decides_by_what_is_durable(durable: bool) -> None:
    """A mark that died with the process never was; one that is stored lets only the handler run."""
    # Hard scenario: crash around the mark.
    world = World()
    async with world.crashing():
        task = await world.create("a", forever)
        await world.quiet()
        world.storage.add(Fault.call(world.storage.freeze, "apply", after=durable))
        with pytest.raises(Exception, match="frozen"):
            await world.abort(task)
    world.log.clear()
    world.scripts["a"] = done
    async with world.open():
        outcome = await world.end(task)
    assert outcome.status == ("aborted" if durable else "completed")
    assert world.log == (["a abort"] if durable else ["a start"])


async def test_a_lost_abort_outcome_is_decided_again_and_stored_once() -> None:
    """A handler whose outcome died in the storage runs again; its entry exists once."""
    # Hard scenario: crash while the abort outcome is in storage.
    world = World()

    async def undo(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.append(ROOT, {"refunded": True}, kind="note")
            tx.end_aborted("refunded")

    world.aborts["a"] = undo
    async with world.crashing():
        task = await world.create("a", forever)
        await world.quiet()
        world.storage.add(Fault.call(world.storage.freeze, "apply", at=3))
        await world.abort(task)
        await world.quiet()
        assert world.log == ["a start", "a abort"]
    async with world.open() as rt:
        outcome = await world.end(task)
        assert len(rt.session.storage.entries(ROOT)) == 1
    assert outcome.reason == "refunded"
    assert world.log == ["a start", "a abort", "a abort"]


async def test_a_child_between_phases_stops_below_an_intent_that_has_not_reached_it() -> None:
    """Below an owner that is marked, no next phase begins, although the cascade is not written."""
    # Hard scenario: cascade barrier.
    world = World()
    step = trio.Event()

    async def child(at: Any, ctx: Any) -> None:
        await ctx.goto(Next(1))
        await step.wait()

    world.scripts["child"] = child
    async with world.open() as rt, trio.open_nursery() as nursery:
        parent = await world.create("parent", parent_of("child"))
        await world.quiet()
        # The mark on the owner passes; the pass that would mark the child stays in the storage.
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        nursery.start_soon(world.abort, parent)
        await world.quiet()
        id = child_of(world, parent, "child")
        assert world.marked(parent, id) == [True, False]
        step.set()
        await world.quiet()
        assert "child next 1" not in world.log
        world.blocking.release()
        outcome = await world.end(parent)
        await rt.wait_for_idle()
    assert outcome.status == "aborted"
    assert world.outcome(id) == "aborted"
    assert world.log == ["parent start", "child start", "child abort", "parent abort"]


async def test_a_newer_intent_stops_a_child_that_was_clear_of_an_older_one() -> None:
    """What was found clear of one abort is looked at again when there is another one."""
    world = World()
    steps = trio.Semaphore(0)
    undone = trio.Event()

    async def child(at: Any, ctx: Any) -> None:
        await ctx.goto(Next(getattr(at, "n", 0) + 1))
        with trio.CancelScope(shield=True):
            await steps.acquire()

    async def slow_undo(at: Any, ctx: Any) -> None:
        await undone.wait()
        await ctx.end_aborted("slowly")

    world.scripts["child"] = child
    world.aborts["other"] = slow_undo
    async with world.open(), trio.open_nursery() as nursery:
        other = await world.create("other", forever)
        parent = await world.create("parent", parent_of("child"))
        await world.quiet()
        await world.abort(other)
        await world.quiet()
        steps.release()
        await world.quiet()
        assert world.log[-1] == "child next 1"
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        nursery.start_soon(world.abort, parent)
        await world.quiet()
        steps.release()
        await world.quiet()
        assert world.marked(child_of(world, parent, "child")) == [False]
        assert "child next 2" not in world.log
        world.blocking.release()
        undone.set()
        assert (await world.end(parent)).status == "aborted"
    assert "child next 2" not in world.log


async def test_an_abort_runs_bottom_up_over_three_levels() -> None:
    """Every handler runs after those below it, and nothing starts once the root has ended."""
    # C045
    world = World()
    world.scripts["mid 1"] = parent_of("leaf 1", "leaf 2")
    world.scripts["mid 2"] = parent_of("leaf 3", "leaf 4")
    world.scripts.update({f"leaf {n}": forever for n in range(1, 5)})
    async with world.open() as rt:
        root = await world.create("root", parent_of("mid 1", "mid 2"))
        await world.quiet()
        await world.abort(root)
        assert (await world.end(root)).status == "aborted"
        aborts = [line for line in world.log if line.endswith("abort")]
        await world.quiet()
        assert aborts == [line for line in world.log if line.endswith("abort")]
        await rt.wait_for_idle()
    order = {line.removesuffix(" abort"): n for n, line in enumerate(aborts)}
    assert len(order) == 7
    assert max(order["leaf 1"], order["leaf 2"]) < order["mid 1"] < order["root"]
    assert max(order["leaf 3"], order["leaf 4"]) < order["mid 2"] < order["root"]


async def test_a_child_created_while_its_owner_is_aborted_is_refused() -> None:
    """The creating commit behind the mark stores nothing, and tells the handler why."""
    # C045: cancel while a child is being created.
    world = World()
    told: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        with trio.CancelScope(shield=True):
            await go.wait()
            try:
                await ctx.create_task(Actor, "child")
            except AbortRequestedError as error:
                told.append(error.reason)

    go = trio.Event()
    async with world.open() as rt:
        task = await world.create("a", script)
        await world.quiet()
        await world.abort(task, "enough")
        go.set()
        assert (await world.end(task)).status == "aborted"
        assert [row.id for row in rt.session.storage.tasks()] == [task]
    assert told == ["enough"]


async def test_an_abort_waits_for_a_handler_that_cleans_up() -> None:
    """The abort handler starts after the phase has returned, however long its clean-up takes."""
    # C046: told "aborted" only after the work is over.
    world = World()
    cleaned = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await cleaned.wait()
            world.log.append("cleaned")

    async with world.open():
        task = await world.create("a", script)
        await world.quiet()
        await world.abort(task)
        await world.quiet()
        assert world.log == ["a start"]
        cleaned.set()
        await world.end(task)
    assert world.log == ["a start", "cleaned", "a abort"]


async def test_an_abort_at_any_moment_arrives() -> None:
    """An abort that meets a phase at its end is durable state, looked at before the next one."""
    # C051
    world = World()

    async def loop(at: Any, ctx: Any) -> None:
        for _ in range(ctx.task_id % 7):
            await trio.lowlevel.checkpoint()
        await ctx.goto(Next(getattr(at, "n", 0) + 1))

    async with world.open():
        ids = [await world.create("a", loop) for _ in range(50)]
        for id in ids:
            await trio.lowlevel.checkpoint()
            await world.abort(id)
        for id in ids:
            assert (await world.end(id)).status == "aborted"


async def test_a_task_that_never_ran_is_aborted_without_an_invocation() -> None:
    """No code runs for a task that was never reserved."""
    world = World()
    async with world.open(start=False) as rt:
        world.settings.limits["test.actor"] = 1
        first = await world.create("a", forever)
        task = await world.create("b", forever)
        await world.quiet()
        await world.abort(task)
        assert (await rt.wait_for_task(task)).status == "aborted"
        await world.abort(first)
        await world.end(first)
    assert world.row(task).invocations == 0
    assert "b abort" not in world.log


async def test_nothing_to_undo_is_settled_without_an_invocation() -> None:
    """A definition with nothing to undo is aborted by the scheduler, its phase joined."""
    world = World()
    async with world.open():
        task = await world.create("a", forever, kind=Harmless)
        await world.quiet()
        await world.abort(task, "enough")
        outcome = await world.end(task)
    assert outcome.status == "aborted"
    assert outcome.reason == "enough"
    assert world.row(task).invocations == 1


async def test_a_second_abort_does_not_disturb_a_running_handler() -> None:
    """The handler runs once, whatever is asked meanwhile; an ended task keeps its outcome."""
    world = World()
    go = trio.Event()

    async def undo(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.end_aborted("slowly")

    world.aborts["a"] = undo
    async with world.open():
        task = await world.create("a", forever)
        await world.quiet()
        await world.abort(task, "first")
        await world.quiet()
        await world.abort(task, "second")
        await world.quiet()
        go.set()
        assert (await world.end(task)).reason == "slowly"
        await world.abort(task, "third")
        assert (await world.end(task)).reason == "slowly"
    assert world.log.count("a abort") == 1
    assert world.row(task).abort_reason == "first"


async def test_an_abort_handler_may_complete_and_may_take_several_steps() -> None:
    """It may use goto, memo and any outcome; it is called again with its checkpoint."""
    world = World()

    async def undo(at: Any, ctx: Any) -> None:
        assert ctx.abort_reason == "user"
        if isinstance(at, Start):
            await ctx.memo("began", True)
            await ctx.goto(Next(5))
        else:
            await ctx.complete(f"at {at.n}")

    world.aborts["a"] = undo
    async with world.open():
        task = await world.create("a", forever)
        await world.quiet()
        await world.abort(task)
        outcome = await world.end(task)
    assert outcome.result == "at 5"
    assert world.log == ["a start", "a abort", "a abort"]


async def test_an_abort_handler_may_not_wait_or_create() -> None:
    """Waiting and creating owned work are refused there; returning without an outcome faults."""
    world = World()
    refused: list[str] = []

    async def undo(at: Any, ctx: Any) -> None:
        for name, call in (
            ("wait", lambda: ctx.wait(then=Next(1), signals=True)),
            ("create", lambda: ctx.create_task(Actor, "child")),
        ):
            try:
                await call()
            except InvalidArgumentError:
                refused.append(name)

    world.aborts["a"] = undo
    async with world.open():
        task = await world.create("a", forever)
        await world.quiet()
        await world.abort(task)
        outcome = await world.end(task)
    assert refused == ["wait", "create"]
    assert outcome.status == "faulted"
    assert outcome.error is not None
    assert "`abort` of Actor (test.actor)" in outcome.error.message


async def test_aborting_a_waiting_task_leaves_what_it_awaits() -> None:
    """The task goes to its handler; a task of somebody else that it waited for goes on."""
    world = World()
    async with world.open():
        other = await world.create("other", forever)

        async def script(at: Any, ctx: Any) -> None:
            await ctx.wait(then=Next(1), on=[other])

        task = await world.create("a", script)
        await world.quiet()
        assert world.status(task) == "waiting"
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
        await world.quiet()
        assert world.status(other) == "running"
        assert world.marked(other) == [False]
    assert "a next 1" not in world.log


async def test_a_dependency_that_ends_with_the_mark_does_not_wake_the_waiter() -> None:
    """One commit ends what a task waits for and marks its owner: the waiter only aborts."""
    # Hard scenario: dependency completes in the commit that aborts the waiter's owner.
    world = World()
    holder: dict[str, int] = {}

    async def dependency(at: Any, ctx: Any) -> None:
        await go.wait()
        async with ctx.commit() as tx:
            tx.abort_task(holder["owner"])
            tx.complete("there")

    async def waiter(at: Any, ctx: Any) -> None:
        await ctx.wait(then=Next(1), on=[holder["dependency"]])

    go = trio.Event()
    world.scripts["waiter"] = waiter
    async with world.open():
        holder["dependency"] = await world.create("dependency", dependency)
        holder["owner"] = await world.create("owner", parent_of("waiter"))
        await world.quiet()
        go.set()
        assert (await world.end(holder["owner"])).status == "aborted"
    assert world.outcome(holder["dependency"]) == "completed"
    assert "waiter next 1" not in world.log
    assert "waiter abort" in world.log


async def test_an_abort_handler_past_its_timeout_is_faulted(autojump_clock: Any) -> None:
    """It is cancelled after abort_timeout, so that its owners can finish."""

    class Bounded(Actor):
        name = "test.bounded"
        abort_timeout = 30.0

    world = World(Bounded, Actor)

    async def undo(at: Any, ctx: Any) -> None:
        await trio.sleep_forever()

    world.aborts["a"] = undo
    async with world.open():
        task = await world.create("a", forever, kind=Bounded)
        await world.quiet()
        await world.abort(task)
        outcome = await world.end(task)
    assert outcome.status == "faulted"
    assert outcome.error is not None
    assert outcome.error.type == "abort_timeout"
    assert "longer than 30 s" in outcome.error.message


async def test_a_handler_that_does_not_stop_is_reported_with_its_stack(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named with kind, id and stack every 10 s, and never left behind."""
    world = World()

    async def stubborn(at: Any, ctx: Any) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(32)

    async with world.open():
        task = await world.create("a", stubborn)
        await trio.sleep(1)
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
    reports = [r.getMessage() for r in caplog.records if "has been stopping" in r.getMessage()]
    assert [report.split(" for ")[1].split(",")[0] for report in reports] == [
        "10 s",
        "20 s",
        "30 s",
    ]
    assert f"task {task} (test.actor)" in reports[0]
    assert "in stubborn" in reports[0]


async def test_a_failed_owner_aborts_what_it_owns_and_keeps_its_outcome() -> None:
    """A held outcome other than completed marks the work below; an abort of the holder keeps it."""
    world = World()
    world.scripts["child"] = forever
    undo = trio.Event()

    async def slow_undo(at: Any, ctx: Any) -> None:
        await undo.wait()
        await end_aborted(at, ctx)

    world.aborts["child"] = slow_undo

    async def owner(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "child", key="child")
        await go.wait()
        await ctx.fail("no more")

    go = trio.Event()
    async with world.open():
        task = await world.create("owner", owner)
        await world.quiet()
        go.set()
        await world.quiet()
        child = child_of(world, task, "child")
        assert world.status(task) == "completing"
        assert world.marked(task, child) == [False, True]
        assert world.row(child).abort_reason == "owner"
        await world.abort(task)
        undo.set()
        outcome = await world.end(task)
    assert outcome.status == "failed"
    assert world.outcome(child) == "aborted"
    assert "owner abort" not in world.log


async def test_a_pass_that_a_close_overtakes_reserves_nothing(mock_clock: Any) -> None:
    """A pass queued behind a held commit starts no handler that the close has just stopped."""
    world = World()
    world.aborts["a"] = forever
    async with trio.open_nursery() as nursery, world.open():
        task = await world.create("a", forever)
        await world.create("timed", forever, deadline=at_seconds(world, 5))
        await world.abort(task)
        await world.quiet()
        assert world.row(task).invocations == 2
        world.blocking.hold()
        nursery.start_soon(world.signal, task)
        await world.quiet()
        # The deadline lets a pass queue behind the commit that is inside the storage.
        mock_clock.jump(6)
        await world.quiet()
        nursery.start_soon(self_release, world)
    row = world.row(task)
    assert (world.status(task), row.invocations, row.recoveries) == ("pending", 2, 0)


def at_seconds(world: World, seconds: float) -> datetime:
    return datetime.fromtimestamp(world.clock.now_us() / 1e6 + seconds, UTC)
