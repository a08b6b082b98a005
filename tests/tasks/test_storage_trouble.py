"""A storage that refuses, breaks, or cannot be reached in time is never the task's fault."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio
from recount import check_at_rest
from worlds import ROOT, Actor, Harmless, Next, Start, World, done, forever, parent_of

from pidurable.errors import SessionPoisonedError, StorageAccessError, StorageRefusedError
from pidurable.testing import Fault, TrioClock


async def test_a_disk_that_is_full_for_a_second_loses_nothing(autojump_clock: Any) -> None:
    """The refused batch is sent again, and nobody notices."""
    world = World()
    async with world.open():
        world.storage.add(Fault.refuse(times=5))
        assert (await world.end(await world.create("a", done))).status == "completed"
    assert world.log == ["a start"]


@pytest.mark.parametrize("at", range(1, 9))
async def test_a_disk_that_is_full_for_long_faults_nothing(autojump_clock: Any, at: int) -> None:
    """Whichever commit is refused for good, everything ends well once the disk has room."""
    world = World(storage_retry_seconds=1.0)
    world.scripts.update(one=done, two=done, p=parent_of("one", "two"))

    async def create_until_stored(key: str) -> None:
        while True:
            try:
                await world.create("p", key=key)
            except StorageRefusedError:
                await trio.sleep(5)
            else:
                return

    async with world.open() as rt:
        world.storage.add(Fault.refuse(at=at, times=40))
        await create_until_stored("first")
        await create_until_stored("second")
        await rt.wait_for_idle()
        check_at_rest(rt)
    assert [row.outcome_status for row in world.rows()] == ["completed"] * 6


async def test_an_invocation_that_met_a_refusal_runs_again_uncharged(autojump_clock: Any) -> None:
    """Its task is at its checkpoint, and its turn comes when the storage accepts."""
    world = World(storage_retry_seconds=1.0)
    go = trio.Event()
    met: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        await go.wait()
        try:
            await ctx.complete("at last")
        except StorageRefusedError as error:
            met.append(type(error).__name__)
            raise RuntimeError("could not store it") from error

    async with world.open() as rt:
        task = await world.create("a", script)
        await trio.sleep(1)
        world.storage.add(Fault.refuse(times=20))
        go.set()
        assert (await world.end(task)).result == "at last"
        assert rt.scheduler._refusing is False
    assert met
    assert world.row(task).recoveries == 0


async def test_what_a_task_has_goes_with_it_although_its_first_end_was_refused(
    autojump_clock: Any,
) -> None:
    """Memos and signals of an ended task are deleted, whichever of its ending commits is stored."""
    world = World(storage_retry_seconds=1.0)
    told = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        await ctx.memo("m", 1)
        await told.wait()
        await ctx.complete("stored")

    async with world.open():
        task = await world.create("a", script)
        await trio.sleep(1)
        await world.signal(task)
        world.storage.add(Fault.refuse(times=10))
        told.set()
        assert (await world.end(task)).result == "stored"
        assert (world.base.reopen().task_memos(task), world.base.reopen().signals(task)) == ([], [])
    assert world.log == ["a start"] * 2


async def test_a_refusal_that_the_handler_caught_is_no_fault(autojump_clock: Any) -> None:
    """A phase that swallowed it and returned is run again, not faulted for want of progress."""
    world = World(storage_retry_seconds=1.0)
    go = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        await go.wait()
        try:
            await ctx.complete("stored")
        except StorageRefusedError:
            return

    async with world.open():
        task = await world.create("a", script)
        await trio.sleep(1)
        world.storage.add(Fault.refuse(times=10))
        go.set()
        assert (await world.end(task)).result == "stored"
    assert world.log.count("a start") >= 2


async def test_a_mark_that_meets_a_refusing_disk_is_kept_to_its_end(autojump_clock: Any) -> None:
    """The cascade goes on where it was when its pass was refused."""
    # C050: storing fails while siblings run.
    world = World(storage_retry_seconds=1.0)
    world.scripts.update({f"c{n}": forever for n in range(4)})
    async with world.open() as rt:
        task = await world.create("p", parent_of(*(f"c{n}" for n in range(4))))
        await trio.sleep(1)
        world.storage.add(Fault.refuse(at=2, times=30))
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
        await rt.wait_for_idle()
    assert {row.outcome_status for row in world.seen.values()} == {"aborted"}


async def test_an_uncertain_write_poisons_and_faults_nothing() -> None:
    """Whether the outcome was stored is decided by the reopening alone."""
    for stored in (False, True):
        world = World()
        go = trio.Event()

        async def script(at: Any, ctx: Any, go: trio.Event = go) -> None:
            await go.wait()
            await ctx.complete("maybe")

        with pytest.raises(SessionPoisonedError):  # noqa: PT012
            async with world.open():
                task = await world.create("a", script)
                await world.quiet()
                world.storage.add(Fault.store_then_raise() if stored else Fault.lose())
                go.set()
                await world.end(task)
        assert world.outcome(task) == ("completed" if stored else None)
        async with world.open():
            assert (await world.end(task)).result == "maybe"
        assert world.log.count("a start") == (1 if stored else 2)


async def test_no_phase_begins_after_the_last_confirmed_lease(autojump_clock: Any) -> None:
    """While heartbeats fail for longer than the lease nothing is started, and then it goes on."""
    # C023
    world = World()
    world.clock = TrioClock(shared=True)
    began: list[float] = []

    async def loop(at: Any, ctx: Any) -> None:
        began.append(trio.current_time())
        await trio.sleep(1)
        await ctx.goto(Next(getattr(at, "n", 0) + 1))

    async with world.open():
        await world.create("loop", loop)
        await trio.sleep(10.5)
        world.storage.add(Fault.fail("heartbeat", times=8))
        await trio.sleep(60)
    during = [at for at in began if 26 < at < 50]
    assert during == []
    assert [at for at in began if at > 55]


async def test_a_bug_in_a_pass_poisons_the_session_and_spares_the_host() -> None:
    """The host gets SessionPoisonedError from its calls; its own tasks are not cancelled."""
    world = World()

    def bug(*args: Any) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(SessionPoisonedError, match="a bug"):  # noqa: PT012
        async with world.open() as rt:
            task = await world.create("a", forever, kind=Harmless)
            await world.quiet()
            rt.settlement.append(bug)
            await world.abort(task)
            await world.quiet()
            await trio.lowlevel.checkpoint()
            await world.end(task)
    async with world.open():
        assert (await world.end(task)).status == "aborted"


async def test_a_retry_counts_no_refusal(autojump_clock: Any) -> None:
    """A refused commit costs a task none of its tries."""
    world = World(storage_retry_seconds=1.0)
    async with world.open() as rt:
        task = await world.create("a", done)
        world.storage.add(Fault.refuse(times=15))
        await world.end(task)
        await rt.commit(lambda tx: tx.append(ROOT, {}, kind="note"))
    assert world.row(task).tries == 0


class Newer(Actor):
    """The actor of the next version."""

    version = 2

    def migrate(self, input: Any, checkpoint: Any, from_version: int) -> Any:
        return input, checkpoint


@pytest.mark.parametrize("point", ["task_checkpoint", "task_input"])
async def test_a_read_of_the_scheduler_that_fails_is_tried_again(
    autojump_clock: Any, point: str
) -> None:
    """The pass that met it changes nothing, and the session goes on."""
    world = World(Actor)
    async with world.crashing():
        tasks = [await world.create(name, forever) for name in ("a", "b")]
        await world.quiet()
    world.install(Newer)
    async with world.open(start=False) as rt:
        world.storage.add(Fault.fail(point, times=3))
        rt.start()
        await trio.sleep(30)
        assert [world.status(task) for task in tasks] == ["running", "running"]
        assert [world.row(task).version for task in tasks] == [2, 2]
        check_at_rest(rt)


@pytest.mark.parametrize("at", range(1, 6))
async def test_a_read_that_fails_while_a_task_is_created_ends_no_session(
    autojump_clock: Any, at: int
) -> None:
    """Below ended tasks that have left memory: it is refused, or it is stored and runs."""
    world = World(Actor)

    async def opens(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                tx.create_conversation(key="below")
                tx.goto(Next(1))
        else:
            await ctx.complete("opened")

    async with world.open() as rt:
        owner = await world.create("owner", opens)
        await world.end(owner)
        below = rt.session.storage.conversation_by_key(owner, "below")
        assert below is not None
    async with world.open() as rt:
        world.storage.add(Fault.fail(at=at))
        with contextlib.suppress(StorageAccessError):
            task = await world.create("a", done, conversation=below.id)
            assert (await world.end(task)).status == "completed"
        world.storage.clear()
        assert rt.session.line.poison is None
        assert (await world.end(await world.create("b", done))).status == "completed"
        check_at_rest(rt)
