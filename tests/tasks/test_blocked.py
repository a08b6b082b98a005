"""Blocked tasks: live, visible, off every path, with a reason, until somebody has cause to look."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from worlds import Actor, Next, Start, World, child_of, done, forever, parent_of

from pidurable.tasks._task_record import task_record


class Versioned(Actor):
    """The second version of a definition whose name the tests give to it."""

    name = "test.actor"
    version = 2


class Migrating(Versioned):
    """The same, able to take over what the first version stored."""

    name = "test.actor"
    version = 2

    def migrate(self, input: Any, checkpoint: Any, from_version: int) -> Any:
        self.world.log.append(f"migrate from {from_version}")
        if input == "broken":
            raise KeyError("cents")
        return f"{input} v2", {"phase": "next", "value": {"n": 7}}


async def blocked_one(world: World, name: str = "a") -> int:
    """A task that a dead process was running."""
    async with world.crashing():
        task = await world.create(name, forever)
        await world.quiet()
    return task  # type: ignore[no-any-return]


async def test_a_task_without_its_definition_is_blocked_until_there_is_one() -> None:
    """It waits with missing_definition, is looked at when its kind is installed, and runs."""
    world = World()
    task = await blocked_one(world)
    world.definitions._by_kind.clear()
    async with world.open() as rt:
        await world.quiet()
        assert world.row(task).blocked == "missing_definition"
        await rt.definitions_changed()
        assert world.row(task).blocked == "missing_definition"
        world.scripts["a"] = done
        world.install(Actor)
        await rt.definitions_changed()
        assert (await world.end(task)).status == "completed"


async def test_a_restart_with_the_definition_looks_again() -> None:
    """What a process without the code had blocked runs in one that has it."""
    world = World()
    task = await blocked_one(world)
    world.definitions._by_kind.clear()
    async with world.open():
        await world.quiet()
        assert world.row(task).blocked == "missing_definition"
    world.scripts["a"] = done
    world.install(Actor)
    async with world.open():
        assert (await world.end(task)).status == "completed"


async def test_an_unrelated_publication_does_not_look_again() -> None:
    """Only a new definition object of the kind is a cause to look."""
    world = World()
    world.install(Versioned)
    async with world.open():
        task = await world.create("a", forever)
        await world.quiet()
    world.install(Actor)
    async with world.open() as rt:
        await world.quiet()
        before = world.storage.count("apply")
        assert world.row(task).blocked == "definition_too_old"
        await rt.definitions_changed()
        await world.quiet()
        assert world.storage.count("apply") == before


async def test_older_code_leaves_a_newer_task_alone() -> None:
    """definition_too_old blocks it, and its checkpoint is untouched."""
    world = World()
    world.install(Versioned)
    async with world.open():
        task = await world.create("a", forever)
        await world.quiet()
    world.install(Actor)
    async with world.open() as rt:
        await world.quiet()
        assert world.row(task).blocked == "definition_too_old"
        world.install(Versioned)
        await rt.definitions_changed()
        await world.quiet()
        assert world.status(task) == "running"
        assert world.row(task).version == 2


async def test_a_task_is_migrated_in_the_commit_that_reserves_it() -> None:
    """Input and checkpoint of the old version become those of the new one, once."""
    world = World()
    task = await blocked_one(world)
    world.install(Migrating)
    world.scripts["a v2"] = done
    async with world.open():
        assert (await world.end(task)).result == "a v2"
    assert world.log == ["a start", "migrate from 1", "a v2 next 7"]
    assert world.row(task).version == 2


async def test_a_failed_migration_blocks_and_changes_nothing() -> None:
    """migration_failed keeps what is stored; an abort finds no code, and orphans the task."""
    world = World()
    task = await blocked_one(world, "broken")
    world.install(Migrating)
    async with world.open() as rt:
        await world.quiet()
        assert world.row(task).blocked == "migration_failed"
        assert world.row(task).version == 1
        assert rt.session.storage.task_input(task) == '"broken"'
        await world.abort(task)
        outcome = await world.end(task)
    assert (outcome.status, outcome.reason) == ("orphaned", "migration_failed")


async def test_an_abort_migrates_before_its_handler_runs() -> None:
    """The handler of the new version sees input and checkpoint of the new version."""
    world = World()
    task = await blocked_one(world)
    world.install(Migrating)
    async with world.open(start=False):
        await world.abort(task)
        await world.quiet()
        assert world.outcome(task) == "aborted"
    assert world.log == ["a start", "migrate from 1", "a v2 abort"]


async def test_a_checkpoint_that_no_class_reads_blocks_and_is_orphaned_by_an_abort() -> None:
    """A renamed phase blocks only its own task; aborting it works without the old code."""
    # C015
    world = World()

    async def to_next(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.goto(Next(1))
        else:
            await trio.sleep_forever()

    async with world.open() as rt:
        lost = await world.create("lost", to_next)
        fine = await world.create("fine", forever)
        await world.quiet()
    row = rt  # the session is closed; its store is edited as an older program left it
    del row
    data = world.base.reopen()._data
    data.checkpoints[lost] = ("renamed", "{}", 0)
    world.scripts["fine"] = done
    async with world.open():
        assert (await world.end(fine)).status == "completed"
        await world.quiet()
        assert world.row(lost).blocked == "checkpoint_unreadable"
        await world.abort(lost)
        outcome = await world.end(lost)
    assert (outcome.status, outcome.reason) == ("orphaned", "checkpoint_unreadable")


async def test_a_blocked_parent_is_orphaned_only_after_what_it_owns() -> None:
    """Aborting a task without code aborts its live child first; nothing is orphaned early."""
    # Hard scenario: missing definition over live work.
    world = World()

    class Parent(Actor):
        name = "test.parent"

    world.install(Actor, Parent)
    undone = trio.Event()

    async def slow_undo(at: Any, ctx: Any) -> None:
        await undone.wait()
        await ctx.end_aborted("undone")

    world.scripts["child"] = forever
    world.aborts["child"] = slow_undo

    async def holding(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "child", key="child")
        await trio.sleep_forever()

    async with world.open():
        task = await world.create("p", holding, kind=Parent)
        await world.quiet()
    world.install(Actor)
    async with world.open():
        await world.quiet()
        child = child_of(world, task, "child")
        assert world.row(task).blocked == "missing_definition"
        assert world.status(child) == "running"
        await world.abort(task)
        await world.quiet()
        assert world.outcome(task) is None
        assert world.log[-1] == "child abort"
        undone.set()
        outcome = await world.end(task)
    assert (outcome.status, outcome.reason) == ("orphaned", "missing_definition")
    assert world.outcome(child) == "aborted"


async def test_a_crash_loop_is_blocked_and_forgiven_by_a_person() -> None:
    """Five deaths while it ran block a task; retry_task lets it run again, an abort its handler."""
    # C009: not for ever.
    world = World()
    async with world.crashing():
        task = await world.create("a", forever)
        await world.quiet()
    for _ in range(4):
        async with world.crashing():
            await world.quiet()
    started = world.log.count("a start")
    assert started == 5
    async with world.open() as rt:
        await world.quiet()
        assert world.row(task).blocked == "crash_loop"
        assert world.log.count("a start") == started
        await rt.retry_task(task)
        await world.quiet()
        assert (world.status(task), world.row(task).recoveries) == ("running", 0)
    async with world.crashing():
        await world.quiet()
    for _ in range(4):
        async with world.crashing():
            await world.quiet()
    async with world.open():
        await world.quiet()
        assert world.row(task).blocked == "crash_loop"
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"


async def test_progress_and_a_clean_close_forgive_a_crash() -> None:
    """recoveries counts deaths since the last progress only."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if go:
            await ctx.goto(Next(getattr(at, "n", 0) + 1))
            go.clear()
        await trio.sleep_forever()

    go: set[int] = set()
    async with world.crashing():
        task = await world.create("a", script)
        await world.quiet()
    async with world.crashing():
        await world.quiet()
        assert world.row(task).recoveries == 1
    async with world.open():
        await world.quiet()
        assert world.row(task).recoveries == 2
    assert world.row(task).recoveries == 0
    async with world.crashing():
        await world.quiet()
    go.add(1)
    async with world.open():
        await world.quiet()
        assert world.row(task).recoveries == 0
        assert world.status(task) == "running"


async def test_a_parked_fault_keeps_its_checkpoint_and_blocks() -> None:
    """on_fault = park blocks the task instead of ending it, in a phase and in its abort handler."""

    class Parking(Actor):
        name = "test.parking"
        on_fault = "park"

    world = World(Parking, Actor)

    async def raises(at: Any, ctx: Any) -> None:
        raise ValueError("no")

    world.aborts["a"] = raises
    async with world.open() as rt:
        task = await world.create("a", raises, kind=Parking)
        await world.quiet()
        assert world.row(task).blocked == "faulted"
        assert world.status(task) == "pending"
        # The error is there for whoever looks, also after a restart.
        parked = task_record(rt.session.storage, world.row(task)).outcome
        assert parked is not None
        assert parked.error is not None
        assert (parked.error.type, parked.error.message) == ("ValueError", "no")
        await world.abort(task)
        await world.quiet()
        assert world.row(task).blocked == "faulted"
        assert world.log == ["a start", "a abort"]
        world.aborts.clear()
        await rt.retry_task(task)
        assert (await world.end(task)).status == "aborted"


async def test_a_reopened_join_lets_nothing_go_that_was_blocked_in_its_abort() -> None:
    """A decided join marks the others again after a restart; a parked handler stays parked."""

    class Parking(Actor):
        name = "test.parking"
        on_fault = "park"

    world = World(Parking, Actor)

    async def raises(at: Any, ctx: Any) -> None:
        raise ValueError("no")

    async def fails(at: Any, ctx: Any) -> None:
        await ctx.fail("no")

    world.scripts.update(a=fails, b=forever)
    world.aborts["b"] = raises
    async with world.open():
        owner = await world.create("p", parent_of("a", "b", policy="fail_fast", kind=Parking))
        await world.quiet()
        other = child_of(world, owner, "b")
        assert (world.row(other).abort_reason, world.row(other).blocked) == ("join", "faulted")
    async with world.open():
        await world.quiet()
        assert world.row(other).blocked == "faulted"
        await world.abort(other)
        await world.quiet()
    assert world.log.count("b abort") == 2


async def test_new_code_lifts_what_the_old_one_blocks_in_a_commit_on_its_way() -> None:
    """A fault that is being parked while the definition is replaced is looked at again."""

    class Parking(Actor):
        name = "test.parking"
        on_fault = "park"

    world = World(Parking)

    async def raises(at: Any, ctx: Any) -> None:
        await go.wait()
        raise ValueError("no")

    go = trio.Event()
    async with world.open() as rt:
        task = await world.create("a", raises, kind=Parking)
        await world.quiet()
        world.blocking.hold()
        go.set()
        await world.quiet()
        world.scripts["a"] = done
        world.install(Parking)
        await rt.definitions_changed()
        world.blocking.release()
        await world.quiet()
        assert world.outcome(task) == "completed"


async def test_the_setting_parks_the_faults_of_definitions_that_do_not_say(
    autojump_clock: Any,
) -> None:
    """on_fault is a setting too; a definition's own wins, and an abort out of time still ends."""

    class Ending(Actor):
        name = "test.ending"
        on_fault = "fault"

    class Timed(Actor):
        name = "test.timed"
        abort_timeout = 5.0

    world = World(Actor, Ending, Timed, on_fault="park")

    async def raises(at: Any, ctx: Any) -> None:
        raise ValueError("no")

    world.aborts["timed"] = forever
    async with world.open():
        parked = await world.create("parked", raises)
        ended = await world.create("ended", raises, kind=Ending)
        timed = await world.create("timed", forever, kind=Timed)
        assert (await world.end(ended)).status == "faulted"
        await world.quiet()
        assert world.row(parked).blocked == "faulted"
        await world.abort(timed)
        outcome = await world.end(timed)
        assert (outcome.status, outcome.error and outcome.error.type) == (
            "faulted",
            "abort_timeout",
        )


@pytest.mark.parametrize("newer", [Actor, Migrating])
async def test_a_running_task_moves_to_newer_code_between_phases(newer: type[Actor]) -> None:
    """At a safe point the replaced definition takes over, migrating what it finds; never before."""
    world = World()
    step = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        await ctx.goto(Next(1))
        await step.wait()

    world.scripts["a v2"] = done
    async with world.open():
        task = await world.create("a", script)
        await world.quiet()
        world.install(newer)
        await world.quiet()
        assert world.status(task) == "running"
        world.scripts["a"] = done
        step.set()
        result = (await world.end(task)).result
    assert result == ("a" if newer is Actor else "a v2")
    assert world.row(task).invocations == 2


async def test_code_that_cannot_take_a_task_leaves_it_to_the_code_it_runs_on() -> None:
    """A newer version without migrate, or no definition at all, does not stop a running task."""
    world = World()
    step = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.goto(Next(1))
            await step.wait()
        else:
            await ctx.complete("as it began")

    async with world.open():
        task = await world.create("a", script)
        await world.quiet()
        world.install(Versioned)
        step.set()
        assert (await world.end(task)).result == "as it began"
    assert world.row(task).invocations == 1


async def test_a_parent_of_a_blocked_child_waits_and_can_be_aborted() -> None:
    """A blocked child is live: its parent keeps waiting, and an abort of the parent reaches it."""
    world = World()
    world.scripts["child"] = forever

    class Child(Actor):
        name = "test.child"

    world.install(Actor, Child)
    async with world.open():
        task = await world.create("p", parent_of("child", kind=Child))
        await world.quiet()
    world.install(Actor)
    async with world.open():
        await world.quiet()
        assert world.row(child_of(world, task, "child")).blocked == "missing_definition"
        assert world.status(task) == "waiting"
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
    assert world.outcome(child_of(world, task, "child")) == "orphaned"
