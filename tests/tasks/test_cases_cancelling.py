"""Cases of cancelling: an abort reaches everything, at any moment, and nothing outlives it."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import trio
from recount import check_at_rest
from seeded import unwatched
from worlds import (
    ROOT,
    Actor,
    Next,
    Start,
    World,
    child_of,
    done,
    end_aborted,
    forever,
    parent_of,
)

from pidurable.errors import OwnedTooDeepError
from pidurable.tasks._definition import Retry
from pidurable.testing import Fault


class Beacon:
    """A script that says every 0.2 s that it is still there."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, str]] = []

    async def __call__(self, at: Any, ctx: Any) -> None:
        while True:
            self.seen.append((trio.current_time(), ctx.input))
            await trio.sleep(0.2)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.2, 1.0])
async def test_no_descendant_does_anything_once_the_root_has_ended(
    autojump_clock: Any, seconds: float
) -> None:
    """Three levels of two each, aborted at any moment, also while they are being created."""
    # C045
    world = World()
    beacon = Beacon()
    for name in ("", "0", "1"):
        world.scripts[f"t{name}"] = parent_of(f"t{name}0", f"t{name}1")
    leaves = [f"t{n:02b}" for n in range(4)]
    world.scripts.update(dict.fromkeys(leaves, beacon))
    async with world.open() as rt:
        top = await world.create("t")
        await trio.sleep(seconds)
        await world.abort(top)
        with trio.fail_after(10):
            assert (await world.end(top)).status == "aborted"
        ended_at, lines, log = trio.current_time(), len(beacon.seen), len(world.log)
        await trio.sleep(60)
        await rt.wait_for_idle()
        check_at_rest(rt)
    assert (len(beacon.seen), len(world.log)) == (lines, log)
    assert all(at <= ended_at for at, _ in beacon.seen)
    assert {row.outcome_status for row in world.rows()} == {"aborted"}


@pytest.mark.parametrize("moment", range(1, 8))
async def test_an_abort_beside_the_creation_of_a_child_leaves_nobody(moment: int) -> None:
    """Whichever of the two commits comes first, and whatever is held, nothing is left running."""
    # C045
    world = World()
    go = trio.Event()

    async def parent(at: Any, ctx: Any) -> None:
        await go.wait()
        for n in range(3):
            await ctx.create_task(Actor, f"c{n}", key=f"c{n}")
        await trio.sleep_forever()

    world.scripts.update({f"c{n}": forever for n in range(3)})
    async with world.open() as rt, trio.open_nursery() as nursery:
        task = await world.create("parent", parent)
        await world.quiet()
        # The moment-th commit from here is held, and the abort comes while it is.
        world.storage.add(Fault.call(world.blocking.hold, "apply", at=moment, after=True))
        go.set()
        await world.quiet()
        nursery.start_soon(world.abort, task)
        await world.quiet()
        world.blocking.release()
        assert (await world.end(task)).status == "aborted"
        await rt.wait_for_idle()
        await world.quiet()
        assert not rt.invocations
        check_at_rest(rt)
    assert {row.outcome_status for row in world.rows()} == {"aborted"}
    assert world.log[-1] == "parent abort"


@pytest.mark.slow
async def test_hundreds_of_random_aborts_all_stop_within_one_step(
    autojump_clock: Any, slow_run: bool
) -> None:
    """A loop of short phases begins no further one once its abort is durable: 500 of 500.

    They are 200 by default.
    """
    # C051
    aborts = 500 if slow_run else 200
    world = World()
    draw = random.Random(51)
    began_after = 0

    async def loop(at: Any, ctx: Any) -> None:
        nonlocal began_after
        node = world.rt.published.task(ctx.task_id)
        began_after += node is None or node.marked
        await trio.sleep(0.02)
        await ctx.goto(Next(getattr(at, "n", 0) + 1))

    stopped: list[float] = []

    async def cancel_one(task: int, delay: float) -> None:
        await trio.sleep(delay)
        await world.abort(task)
        durable_at = trio.current_time()
        assert (await world.end(task)).status == "aborted"
        stopped.append(trio.current_time() - durable_at)

    async with world.open() as rt:
        unwatched(world)
        world.scripts["loop"] = loop

        def make(tx: Any) -> list[int]:
            return [tx.create_task(Actor, "loop", conversation=ROOT) for _ in range(aborts)]

        ids = await rt.commit(make)
        async with trio.open_nursery() as nursery:
            for task in ids:
                # Often exactly at the end of a phase, when its commit is on its way.
                steps = draw.randrange(1, 6)
                delay = 0.02 * steps if draw.random() < 0.5 else draw.uniform(0, 0.1)
                nursery.start_soon(cancel_one, task, delay)
        await rt.wait_for_idle()
    assert len(stopped) == aborts
    assert max(stopped) <= 0.02
    assert began_after == 0


class Insisting(Actor):
    """Would run anything again that raised an OSError."""

    name = "test.insisting"
    retry = Retry(on=(OSError,), tries=5, base=0.0, jitter=0.0)


async def sleeps_in_cleanup(at: Any, ctx: Any) -> None:
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(30)


async def raises_in_cleanup(at: Any, ctx: Any) -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise OSError("cleaning up failed")


async def catches_everything(at: Any, ctx: Any) -> None:
    with contextlib.suppress(BaseException):  # the mistake that is tested
        await trio.sleep_forever()


async def catches_and_goes_on(at: Any, ctx: Any) -> None:
    for _ in range(5):
        with contextlib.suppress(BaseException):  # the mistake that is tested
            await trio.sleep_forever()
        with contextlib.suppress(BaseException):
            await ctx.goto(Next(1))


async def shields_the_inner_scope(at: Any, ctx: Any) -> None:
    """Turning a shield on while cleaning up must not absorb the cancellation from outside."""
    with trio.CancelScope() as inner:
        try:
            await trio.sleep_forever()
        finally:
            inner.shield = True
            await trio.sleep(1)
    await trio.sleep_forever()


CLEANUPS = (
    sleeps_in_cleanup,
    raises_in_cleanup,
    catches_everything,
    catches_and_goes_on,
    shields_the_inner_scope,
)


@pytest.mark.parametrize("script", CLEANUPS)
@pytest.mark.parametrize("ends_by", ["abort", "close"])
async def test_however_a_handler_cleans_up_it_is_over_and_decides_nothing(
    autojump_clock: Any, script: Any, ends_by: str
) -> None:
    """Waiting, raising, catching all or shielding: an abort is an abort, and a close a close."""
    # C052
    world = World(Insisting)
    began = trio.current_time()
    async with world.open():
        task = await world.create("a", script, kind=Insisting)
        await trio.sleep(1)
        if ends_by == "abort":
            await world.abort(task)
            assert (await world.end(task)).reason == "undone"
    assert trio.current_time() - began <= 32
    if ends_by == "abort":
        assert world.log == ["a start", "a abort"]
    else:
        assert world.log == ["a start"]
        assert (world.status(task), world.outcome(task)) == ("pending", None)
        assert (world.row(task).recoveries, world.row(task).tries) == (0, 0)
        world.scripts["a"] = done
        async with world.open():
            assert (await world.end(task)).status == "completed"


async def test_a_child_whose_result_cannot_be_stored_stops_its_siblings_first() -> None:
    """Storing fails, not the work: the sibling has stopped before the parent goes on."""
    # C050
    world = World()
    alive: set[str] = set()

    async def beacon(at: Any, ctx: Any) -> None:
        alive.add(ctx.input)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                for _ in range(5):
                    await trio.lowlevel.checkpoint()
            alive.discard(ctx.input)

    async def unstorable(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.complete(float("nan"))

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                ids = [tx.create_task(Actor, name, key=name) for name in ("bad", "sibling")]
                tx.wait(then=Next(1), on=ids, policy="fail_fast")
            return
        world.log.append(f"alive: {sorted(alive)}")
        await ctx.complete("")

    go = trio.Event()
    world.scripts.update(bad=unstorable, sibling=beacon)
    async with world.open():
        task = await world.create("parent", parent)
        await world.quiet()
        assert alive == {"sibling"}
        go.set()
        assert (await world.end(task)).status == "completed"
    assert world.outcome(child_of(world, task, "bad")) == "faulted"
    assert world.outcome(child_of(world, task, "sibling")) == "aborted"
    assert world.log[-1] == "alive: []"


async def test_siblings_keep_their_own_outcomes_whatever_one_of_them_does() -> None:
    """Done, raising, raising a cancellation of its own, aborted and late: five results."""
    # C049
    world = World()
    late = trio.Event()

    async def cancels_itself(at: Any, ctx: Any) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await trio.sleep_forever()
        await ctx.complete("after its own cancellation")

    async def raises(at: Any, ctx: Any) -> None:
        raise ValueError("mine")

    async def comes_late(at: Any, ctx: Any) -> None:
        await late.wait()
        await ctx.complete("late")

    names = ("done", "raises", "cancels", "hangs", "late")
    world.scripts.update(
        done=done, raises=raises, cancels=cancels_itself, hangs=forever, late=comes_late
    )
    async with world.open():
        task = await world.create("parent", parent_of(*names))
        await world.quiet()
        ids = [child_of(world, task, name) for name in names]
        assert [world.outcome(id) for id in ids] == [
            "completed",
            "faulted",
            "completed",
            None,
            None,
        ]
        assert world.marked(*ids) == [False] * 5
        await world.abort(ids[3])
        late.set()
        outcome = await world.end(task)
    assert outcome.result == "completed,faulted,completed,aborted,completed"


async def test_agents_that_breed_agents_stop_at_the_stated_depth() -> None:
    """The conversation below the deepest one is refused to its creator, who can read why."""
    # C053
    world = World(owned_depth_max=4)
    deepest: list[str] = []

    async def breeds(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("")
            return
        try:
            async with ctx.commit() as tx:
                made = []
                for n in range(3):
                    own = tx.create_conversation(key=f"own {n}")
                    made.append(tx.create_task(Actor, "breeds", conversation=own))
                tx.wait(then=Next(1), on=made)
        except OwnedTooDeepError as error:
            deepest.append(str(error))
            await ctx.complete("refused")

    async with world.open() as rt:
        unwatched(world)
        await world.end(await world.create("breeds", breeds))
        await rt.wait_for_idle()
    rows = world.rows()
    # A root, and three below each down to the depth; none of the refused commits left a trace.
    assert len(rows) == sum(3**level for level in range(5))
    assert len(deepest) == 3**4
    assert {row.outcome_status for row in rows} == {"completed"}
    assert len(set(deepest)) <= len(deepest)
    assert "4" in deepest[0]


async def test_an_abort_that_meets_a_commit_of_the_phase_never_loses_either() -> None:
    """A completion that is in line first stands, and one behind the mark is refused."""
    # C051
    for first in ("complete", "abort"):
        world = World()
        go = trio.Event()

        async def script(at: Any, ctx: Any, go: trio.Event = go) -> None:
            with trio.CancelScope(shield=True):
                await go.wait()
            await ctx.complete("just in time")

        async with world.open() as rt, trio.open_nursery() as nursery:
            task = await world.create("a", script)
            await world.quiet()
            world.blocking.hold()
            nursery.start_soon(rt.commit, lambda tx: tx.append(ROOT, {}, kind="note"))
            await world.quiet()
            for what in (first, "abort" if first == "complete" else "complete"):
                if what == "complete":
                    go.set()
                else:
                    nursery.start_soon(world.abort, task)
                await world.quiet()
            world.blocking.release()
            outcome = await world.end(task)
        if first == "complete":
            assert outcome.result == "just in time"
            assert "a abort" not in world.log
        else:
            assert outcome.status == "aborted"
            assert world.log == ["a start", "a abort"]


async def test_an_end_of_the_host_while_an_abort_runs_lets_the_next_one_finish_it() -> None:
    """Leaving in the middle of an abort handler undoes nothing twice that was stored once."""
    # C052
    world = World()

    async def undo(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                tx.append(ROOT, "refund", kind="note")
                tx.goto(Next(1))
            await trio.sleep_forever()
        await end_aborted(at, ctx)

    world.aborts["a"] = undo
    async with world.open():
        task = await world.create("a", forever)
        await world.quiet()
        await world.abort(task)
        await world.quiet()
    assert (world.status(task), world.marked(task)) == ("pending", [True])
    async with world.open() as rt:
        assert (await world.end(task)).status == "aborted"
        assert len(rt.session.storage.entries(ROOT)) == 1
    assert world.log == ["a start", "a abort", "a abort"]
