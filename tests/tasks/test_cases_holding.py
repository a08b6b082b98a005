"""Cases of ownership, leases and scheduling, as far as the task tree can have them."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from recount import check_at_rest
from seeded import Seed, plant, unwatched
from test_recovering import reopened_after_every_commit
from worlds import (
    ROOT,
    Actor,
    Harmless,
    Next,
    Start,
    Watcher,
    World,
    child_of,
    done,
    forever,
    parent_of,
)

from pidurable.errors import HolderLostError, PidurableError
from pidurable.records._codec import Codec
from pidurable.records._tasks import Status
from pidurable.session._seams import SeededRandomness
from pidurable.storage import Op
from pidurable.tasks._definition import Retry
from pidurable.tasks._open import open_runtime
from pidurable.tasks._runtime import StaticDefinitions
from pidurable.testing import Fault


async def test_tasks_that_begin_while_old_ones_recover_run_once_each() -> None:
    """Recovery looks once, before anything starts: what this process began is not adopted."""
    # C017
    world = World()
    plant(world, [Seed(id=2 + n, name="old") for n in range(1_000)])
    begun: Counter[int] = Counter()

    async def script(at: Any, ctx: Any) -> None:
        begun[ctx.task_id] += 1
        await trio.lowlevel.checkpoint()
        await ctx.complete("")

    world.scripts.update(old=script, new=script)
    async with world.open(start=False) as rt:
        unwatched(world)
        new = [await world.create("new") for _ in range(20)]  # this starts the old ones, too
        await rt.wait_for_idle()
    assert len(begun) == 1_020
    assert set(begun.values()) == {1}
    assert {world.row(id).invocations for id in new} == {1}


async def test_a_holder_that_lost_its_session_takes_no_further_step() -> None:
    """Frozen after it stored its intent and replaced meanwhile, it stops at its next write."""
    # C018, C024
    world = World()
    effects: list[str] = []
    thaw = trio.Event()

    def steps_of(name: str, gate: trio.Event | None) -> Any:
        async def script(at: Any, ctx: Any) -> None:
            step = 0 if isinstance(at, Start) else at.n
            if step == 0:
                await ctx.goto(Next(1))  # the intent of step one
                return
            if gate is not None:
                # Stopped by the machine, not by anybody here.
                with trio.CancelScope(shield=True):
                    await gate.wait()
            effects.append(f"{name} {step}")
            if step == 3:
                await ctx.complete(name)
            else:
                await ctx.goto(Next(step + 1))

        return script

    lost: list[type[BaseException]] = []
    world.scripts["a"] = steps_of("first", thaw)
    try:
        async with world.open():
            task = await world.create("a")
            await world.quiet()
            assert world.base.reopen()._data.checkpoints[task][0] == "next"
            other = World()
            other.base = world.base
            other.scripts["a"] = steps_of("second", None)
            async with open_runtime(
                world.base.reopen(),
                snapshot=lambda: StaticDefinitions([Actor(other)], Codec()),
                clock=world.clock,
                blocking=world.blocking,
                randomness=SeededRandomness(2),
                takeover=True,
            ) as second:
                assert (await second.wait_for_task(task)).result == "second"
            thaw.set()
            await world.end(task)
    except PidurableError as error:
        lost.append(type(error))
    # What was frozen in mid-effect comes out of it once; nobody can prevent that, and it is the
    # last thing that the first holder does.
    assert effects == ["second 1", "second 2", "second 3", "first 1"]
    assert lost == [HolderLostError]
    assert world.outcome(task) == "completed"


@pytest.mark.parametrize("way", ["goto", "child", "signal"])
async def test_a_queue_of_width_one_goes_on_after_a_death_anywhere(way: str) -> None:
    """Whatever a task did last before the death, its next phase starts, and the queue follows."""
    # C019
    effects: list[str] = []

    def setup(world: World) -> None:
        world.settings.limits[Actor.name] = 1
        effects.clear()

        async def first(at: Any, ctx: Any) -> None:
            if isinstance(at, Start):
                if way == "goto":
                    await ctx.goto(Next(1))
                elif way == "child":
                    async with ctx.commit() as tx:
                        child = tx.create_task(Actor, "child", key="child")
                        tx.wait(then=Next(1), on=[child])
                else:
                    async with ctx.commit() as tx:
                        tx.signal(ctx.task_id, "on", key="once")
                        tx.wait(then=Next(1), signals=True)
            else:
                await ctx.complete("first")

        async def queued(at: Any, ctx: Any) -> None:
            effects.append(ctx.input)
            await ctx.complete(ctx.input)

        world.scripts.update(first=first, child=done, **{f"q{n}": queued for n in range(3)})

    async def play(world: World) -> dict[str, Any]:
        def make(tx: Any) -> list[int]:
            names = ("first", "q0", "q1", "q2")
            return [tx.create_task(Actor, name, conversation=ROOT, key=name) for name in names]

        ids = await world.rt.commit(make)
        outcomes = [(await world.end(id)).result for id in ids]
        ended = [world.row(id).ended_us or 0 for id in ids[1:]]
        order = list(dict.fromkeys(effects))
        return {"outcomes": outcomes, "order": order, "in turn": ended == sorted(ended)}

    await reopened_after_every_commit(setup, play)


@pytest.mark.parametrize("stored", [False, True])
async def test_a_death_of_the_rescuer_loses_nobody(stored: bool) -> None:
    """Killed in the commit of its recovery, before or after: the next opening rescues the task."""
    # C021: also with the same host and process id, as every process of this test has.
    world = World()
    async with world.crashing():
        tasks = [await world.create("a", forever), await world.create("b", forever)]
        await world.quiet()
    assert [world.status(id) for id in tasks] == ["running", "running"]
    fault = Fault.call(lambda: world.storage.freeze(), "apply", after=stored)
    with pytest.raises(PidurableError):
        async with world.open(faults=[fault]):
            pytest.fail("the recovery could not be written")
    assert [world.status(id) for id in tasks] == (["pending"] * 2 if stored else ["running"] * 2)
    world.scripts.update(a=done, b=done)
    async with world.open():
        for id in tasks:
            assert (await world.end(id)).status == "completed"
            assert world.row(id).invocations == 2


async def test_a_task_that_runs_for_many_leases_is_handed_out_once(autojump_clock: Any) -> None:
    """Nothing is rescued by its age; a loop that was busy for more than a lease keeps its work."""
    # C022
    world = World()
    ledger: list[float] = []
    lease = world.settings.lease_seconds

    async def long(at: Any, ctx: Any) -> None:
        ledger.append(trio.current_time())
        await trio.sleep(3 * lease)
        # Pure computation: the loop does not turn, and no heartbeat is sent meanwhile.
        autojump_clock.jump(1.5 * lease)
        await trio.sleep(lease)
        await ctx.complete("")

    async with world.open() as rt:
        task = await world.create("a", long)
        assert (await world.end(task)).status == "completed"
        await trio.sleep(2 * lease)
        check_at_rest(rt)
        assert (await world.end(await world.create("b", done))).status == "completed"
    assert len(ledger) == 1
    assert world.row(task).invocations == 1


class Timed(Actor):
    """Tried three times where it took too long."""

    name = "test.timed"
    retry = Retry(on=(trio.TooSlowError,), tries=3, base=1.0, jitter=0.0)


async def test_the_second_try_begins_when_the_first_has_stopped(autojump_clock: Any) -> None:
    """A call of 5 s that ignores its time limit of 2 s is never there twice at a time."""
    # C025
    world = World(Timed)
    times: list[tuple[float, float]] = []

    async def script(at: Any, ctx: Any) -> None:
        began = trio.current_time()
        try:
            with trio.fail_after(2), trio.CancelScope(shield=True):
                await trio.sleep(5)
            await trio.lowlevel.checkpoint()
        finally:
            times.append((began, trio.current_time()))
        if trio.current_time() - began >= 2:
            raise trio.TooSlowError

    async with world.open():
        task = await world.create("a", script, kind=Timed)
        outcome = await world.end(task)
    assert outcome.status == "faulted"
    assert len(times) == 3
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(times))
    # The record shows the tries.
    assert world.row(task).invocations == 3


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_deadline_waits_for_what_ignores_it_before_anything_follows(
    autojump_clock: Any, blocking: bool
) -> None:
    """What undoes a task past its deadline begins after its phase, which commits nothing more."""
    # C025, C046
    world = World()
    order: list[str] = []
    seconds = 5.0

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            order.append("a later phase")
            return
        if blocking:
            # Runs in the loop in this world, as a thread would run beside it: it is joined.
            await ctx.run_blocking(autojump_clock.jump, seconds)
        else:
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
        order.append("the first try is over")
        try:
            await ctx.goto(Next(1))
        except BaseException as error:
            order.append(f"late: {type(error).__name__}")
            raise

    async def undo(at: Any, ctx: Any) -> None:
        order.append(f"undone at {type(at).__name__}: {ctx.abort_reason}")
        await ctx.end_aborted("too late")

    world.aborts["a"] = undo
    async with world.open():
        began = trio.current_time()
        deadline = datetime.fromtimestamp(world.clock.now_us() / 1e6 + 2, UTC)
        task = await world.create("a", script, deadline=deadline)
        assert (await world.end(task)).reason == "too late"
        assert trio.current_time() - began >= seconds
    # A call that blocks the loop itself may come in before the mark; the threads of a real run, and
    # whatever else yields, do not.
    assert order[0] == "the first try is over"
    assert [line.startswith("undone") for line in order].count(True) == 1
    assert order[-1].endswith(": deadline")
    if not blocking:
        assert order[1:] == ["late: Cancelled", "undone at Start: deadline"]


def collecting(how: str, *children: str) -> Any:
    """A script that starts children and waits for all of them in one go."""

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("collected")
            return
        if how == "parked":
            async with ctx.commit() as tx:
                ids = [tx.create_task(Actor, name, key=name) for name in children]
                tx.wait(then=Next(1), on=ids)
            return
        async with ctx.commit() as tx:
            ids = [tx.create_task(Actor, name, key=name) for name in children]
        if how == "held at once":
            async with trio.open_nursery() as nursery:
                for id in ids:
                    nursery.start_soon(ctx.wait_for_task, id)
        else:
            for id in ids:
                await ctx.wait_for_task(id)
        await ctx.complete("collected")

    return script


@pytest.mark.parametrize("how", ["parked", "held at once", "held in turn"])
@pytest.mark.parametrize("limit", [{"running_max": 1}, {"limits": {"test.actor": 1}}])
async def test_three_levels_share_one_slot_and_give_it_back_once(limit: Any, how: str) -> None:
    """Each parent starts two and waits for both: one leaf runs at a time, and everything ends."""
    # C026
    world = World(**limit)
    running = most = 0

    async def leaf(at: Any, ctx: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        running -= 1
        await ctx.complete("")

    for name in ("", "0", "1", "00", "01", "10", "11"):
        world.scripts[f"t{name}"] = collecting(how, f"t{name}0", f"t{name}1")
    world.scripts.update({f"t{n:03b}": leaf for n in range(8)})
    fewest = [0]
    async with world.open() as rt:
        account = rt.scheduler.account

        def watching(task_id: int) -> None:
            account(task_id)
            fewest.append(min(rt.scheduler._slots.values(), default=0))
            fewest.append(rt.scheduler._slots.total() - len(rt.scheduler._held_slots))

        rt.scheduler.account = watching  # type: ignore[method-assign]
        outcome = await world.end(await world.create("t"))
        # A second tree finds the slot as the first one did.
        again = await world.end(await world.create("t"))
        await world.quiet()
        assert not rt.scheduler._held_slots
        assert not +rt.scheduler._slots
    assert (outcome.result, again.result) == ("collected", "collected")
    assert most == 1
    assert min(fewest) == 0


class Parking(Actor):
    """Keeps its checkpoint where its code raises."""

    name = "test.parking"
    on_fault = "park"


async def holds_a_failure(at: Any, ctx: Any) -> None:
    await ctx.create_task(Actor, "below", key="below")
    await ctx.fail("held")


async def fails(at: Any, ctx: Any) -> None:
    await ctx.fail("on purpose")


async def raises(at: Any, ctx: Any) -> None:
    raise ValueError("on purpose")


async def returns(at: Any, ctx: Any) -> None:
    await trio.lowlevel.checkpoint()


ENDS: dict[str, tuple[Any, type[Actor], str]] = {
    "completed": (done, Actor, "completed"),
    "failed": (fails, Actor, "failed"),
    "faulted": (raises, Actor, "faulted"),
    "no progress": (returns, Actor, "faulted"),
    "failure held": (holds_a_failure, Actor, "failed"),
    "aborted": (forever, Actor, "aborted"),
    "aborted, nothing to undo": (forever, Harmless, "aborted"),
    "never reserved": (forever, Actor, "aborted"),
    "undo raises": (forever, Actor, "faulted"),
    "deadline": (forever, Actor, "aborted"),
    "parked, then aborted": (raises, Parking, "aborted"),
    "blocked, then orphaned": (forever, Actor, "orphaned"),
    "crash loop, then aborted": (forever, Actor, "aborted"),
}
"""Ways a child can end: its script, its kind, and the outcome that its parent is to see."""

BLOCKED = {
    "parked, then aborted": "faulted",
    "blocked, then orphaned": "missing_definition",
    "crash loop, then aborted": "crash_loop",
}


class DiesAtTheEnd(Watcher):
    """Lets the process die when the end of a task is durable, before anything follows from it."""

    def __init__(self, world: World, task: int) -> None:
        super().__init__(world)
        self.task = task

    def committed(self, tx: Any) -> None:
        for op, row in tx.writes:
            if op is Op.TASK_STATE and row.id == self.task and row.status == Status.TERMINAL:
                self.world.storage.freeze()


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize(
    ("way", "waits"),
    [(way, waits) for way in ENDS for waits in ("parked", "held") if way[:5] != "crash"]
    # A parent that holds its invocation would be charged for the deaths of its child.
    + [("crash loop, then aborted", "parked")],
)
async def test_a_parent_wakes_whatever_became_of_its_child(
    autojump_clock: Any, way: str, waits: str, dies: bool
) -> None:
    """Every end wakes a parent, parked or holding its invocation, also over a death before that."""
    # C027
    script, kind, expected = ENDS[way]
    world = World(limits={"test.child": 0} if way == "never reserved" else {})

    class Child(kind):  # type: ignore[valid-type, misc]
        name = "test.child"

    go = trio.Event()

    async def child(at: Any, ctx: Any) -> None:
        await go.wait()
        await script(at, ctx)

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            deadline = ctx.now() + timedelta(seconds=60) if way == "deadline" else None
            async with ctx.commit() as tx:
                id = tx.create_task(Child, "child", key="child", deadline=deadline)
                if waits == "parked":
                    tx.wait(then=Next(1), on=[id])
            if waits == "held":
                await ctx.complete((await ctx.wait_for_task(id)).status)
            return
        keyed = ctx.snapshot.keyed_tasks()
        (outcome,) = await ctx.outcomes([keyed["child"]])
        await ctx.complete(outcome.status)

    world.install(Actor, Child)
    world.scripts.update(child=child, below=forever)
    if way == "undo raises":
        world.aborts["child"] = raises
    async with world.crashing():
        task = await world.create("parent", parent)
        await world.quiet()
        id = child_of(world, task, "child")
    for _ in range(4 if "crash" in way else 0):
        async with world.crashing():
            await world.quiet()
    if "blocked" in way:
        world.install(Actor)
    told = world.log.count("parent next 1")
    async with world.crashing() if dies else world.open():
        if dies:
            world.rt.session.participants.append(DiesAtTheEnd(world, id))
        await world.quiet()
        go.set()
        await world.quiet()
        if way == "deadline":
            await trio.sleep(100)
        elif way in BLOCKED:
            assert world.row(id).blocked == BLOCKED[way]
        if "aborted" in way or way in ("never reserved", "undo raises", "blocked, then orphaned"):
            await world.abort(id)
        await world.quiet()
        assert world.outcome(id) == expected
        assert (world.outcome(task) is None) is dies
    assert told == 0
    async with world.open() as rt:
        with trio.fail_after(1_000):
            assert (await world.end(task)).result == expected
        await rt.wait_for_idle()
        check_at_rest(rt)


async def test_the_owners_of_a_blocked_task_wait_and_say_so_until_it_is_aborted() -> None:
    """A task that no code can take is live: it is no end, and its parent is not woken by it."""
    # C027
    world = World()

    class Child(Actor):
        name = "test.child"

    world.install(Actor, Child)
    world.scripts["child"] = forever
    async with world.open():
        task = await world.create("parent", parent_of("child", kind=Child))
        await world.quiet()
    world.install(Actor)
    async with world.open() as rt:
        await world.quiet()
        assert world.status(task) == "waiting"
        await world.abort(child_of(world, task, "child"))
        assert (await world.end(task)).result == "orphaned"
        check_at_rest(rt)
