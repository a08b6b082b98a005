"""Durable waits: joins with their policies, deadlines, signals, and what wakes first."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from worlds import ROOT, Actor, Next, Start, World, child_of, done, forever, parent_of

from pidurable.errors import (
    InvalidArgumentError,
    SessionPoisonedError,
    SignalRefusedError,
    StorageRefusedError,
    TaskEndedError,
    UnknownTaskError,
)
from pidurable.testing import Fault, TrioClock


async def swallowing(call: Any, *args: Any) -> None:
    """Call in a process that may die meanwhile."""
    with contextlib.suppress(SessionPoisonedError):
        await call(*args)


async def fails(at: Any, ctx: Any) -> None:
    await ctx.fail("on purpose")


async def raises(at: Any, ctx: Any) -> None:
    raise ValueError("on purpose")


def waiting(**how: Any) -> Any:
    """A script that waits as told, then completes with what woke it."""

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            given = {key: value(ctx) if callable(value) else value for key, value in how.items()}
            await ctx.wait(then=Next(1), **given)
        else:
            await ctx.complete(str(ctx.woken_by))

    return script


def after(seconds: float) -> Any:
    return lambda ctx: ctx.now() + timedelta(seconds=seconds)


async def test_all_settled_waits_for_every_end_and_marks_nobody() -> None:
    """A failure among the awaited touches no sibling: each has its own outcome."""
    # C049
    world = World()
    world.scripts.update(ok=done, bad=fails, worse=raises, late=done)
    async with world.open():
        task = await world.create("p", parent_of("ok", "bad", "worse", "late"))
        outcome = await world.end(task)
    assert outcome.result == "completed,failed,faulted,completed"


@pytest.mark.parametrize("way", ["completed", "failed", "aborted", "faulted", "orphaned"])
async def test_a_parent_wakes_whichever_way_a_child_ends(way: str) -> None:
    """No end of a child leaves its parent waiting."""
    # C027
    world = World()
    world.scripts["child"] = {"completed": done, "failed": fails, "faulted": raises}.get(
        way, forever
    )
    async with world.open(start=False):
        task = await world.create("p", parent_of("child"))
        await world.quiet()
        if way in ("aborted", "orphaned"):
            if way == "orphaned":
                world.definitions._by_kind.clear()
            await world.abort(child_of(world, task, "child"))
            await world.quiet()
            world.install(Actor)
            await world.rt.definitions_changed()
        assert (await world.end(task)).result == way


async def test_fail_fast_marks_the_others_when_a_failure_is_held() -> None:
    """The first held failure marks the other awaited ones at once, and nobody else."""
    # Hard scenario: fail_fast on a held failure.
    world = World()
    drained = trio.Event()

    async def slow_undo(at: Any, ctx: Any) -> None:
        await drained.wait()
        await ctx.end_aborted("drained")

    async def failing(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "grandchild", key="grandchild")
        await go.wait()
        await ctx.fail("held")

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                ids = [tx.create_task(Actor, name, key=name) for name in "ABC"]
                tx.wait(then=Next(1), on=ids[:2], policy="fail_fast")
        else:
            await ctx.complete("woken")

    go = trio.Event()
    world.scripts.update(A=failing, B=forever, C=forever, grandchild=forever)
    world.aborts["grandchild"] = slow_undo
    async with world.open():
        task = await world.create("p", parent)
        await world.quiet()
        a, b, c = (child_of(world, task, name) for name in "ABC")
        go.set()
        await world.quiet()
        assert world.status(a) == "completing"
        assert world.marked(a, b, c, task) == [False, True, False, False]
        assert world.row(b).abort_reason == "join"
        assert world.outcome(b) == "aborted"
        assert world.status(task) == "waiting"
        drained.set()
        await world.quiet()
        assert world.outcome(a) == "failed"
        assert "p next 1" in world.log
        assert world.status(task) == "completing"
        await world.abort(c)
        assert (await world.end(task)).result == "woken"


async def test_first_success_marks_the_others_and_wakes_after_all() -> None:
    """The first completion marks the rest; a failure before it marks nobody."""
    world = World()
    go = trio.Event()

    async def wins(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.complete("won")

    world.scripts.update(bad=fails, win=wins, slow=forever)
    async with world.open():
        task = await world.create("p", parent_of("bad", "win", "slow", policy="first_success"))
        await world.quiet()
        assert world.marked(child_of(world, task, "slow")) == [False]
        go.set()
        assert (await world.end(task)).result == "failed,completed,aborted"


@pytest.mark.parametrize(("policy", "first"), [("fail_fast", fails), ("first_success", done)])
async def test_a_join_that_is_decided_when_it_is_parked_marks_the_others(
    policy: str, first: Any
) -> None:
    """An outcome from before the wait, or from before a crash, decides as well."""
    world = World()
    world.scripts.update(first=first, slow=forever)

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("woken")
            return
        one = await ctx.create_task(Actor, "first", key="first")
        await ctx.wait_for_task(one)
        async with ctx.commit() as tx:
            two = tx.create_task(Actor, "slow", key="slow")
            # The pass that would mark the other one dies with the process.
            world.storage.add(Fault.call(world.storage.freeze, "apply", after=True))
            tx.wait(then=Next(1), on=[one, two], policy=policy)

    async with world.crashing():
        task = await world.create("p", parent)
        await world.quiet()
    assert world.status(task) == "waiting"
    async with world.open():
        assert (await world.end(task)).result == "woken"
    assert world.row(child_of(world, task, "slow")).abort_reason == "join"


async def test_a_policy_needs_ownership_of_all() -> None:
    """fail_fast on somebody else's task is refused, all_settled is not."""
    world = World()
    async with world.open():
        other = await world.create("other", done)

        async def script(at: Any, ctx: Any) -> None:
            if isinstance(at, Next):
                await ctx.complete("")
                return
            with pytest.raises(InvalidArgumentError, match="needs ownership"):
                await ctx.wait(then=Next(1), on=[other], policy="fail_fast")
            with pytest.raises(InvalidArgumentError, match="expected all_settled"):
                await ctx.wait(then=Next(1), on=[other], policy="any")
            with pytest.raises(UnknownTaskError):
                await ctx.wait(then=Next(1), on=[other, 999])
            with pytest.raises(InvalidArgumentError, match="it would never end"):
                await ctx.wait(then=Next(1))
            await ctx.wait(then=Next(1), on=[other, other])

        assert (await world.end(await world.create("a", script))).status == "completed"


async def test_an_empty_on_and_an_ended_task_wake_at_the_next_pass() -> None:
    """Nothing to wait for is waited for no longer than a pass."""
    world = World()
    async with world.open():
        ended = await world.create("done", done)
        await world.end(ended)
        for on in ([], [ended]):
            task = await world.create("a", waiting(on=on))
            assert (await world.end(task)).result == "tasks"


async def test_a_deadline_wakes_without_an_invocation_meanwhile(autojump_clock: Any) -> None:
    """A task that sleeps for days holds no invocation, and wakes at its moment."""
    world = World(heartbeat_seconds=100_000.0, lease_seconds=400_000.0)
    async with world.open() as rt:
        task = await world.create("a", waiting(deadline=after(5 * 86_400)))
        await trio.sleep(4 * 86_400)
        assert world.status(task) == "waiting"
        assert not rt.invocations
        assert (await world.end(task)).result == "deadline"
        assert trio.current_time() >= 5 * 86_400


async def test_a_deadline_is_kept_over_crashes(autojump_clock: Any) -> None:
    """The waiting time does not start afresh: the stored moment counts, however often killed."""
    # C094
    world = World()
    ended = None
    began = None
    for _ in range(5):
        async with world.crashing():
            if began is None:
                began = world.clock.now_us()
                task = await world.create("a", waiting(deadline=after(60)))
            with trio.move_on_after(20):
                await world.end(task)
                ended = world.clock.now_us()
        if ended:
            break
    assert began is not None
    assert ended is not None
    assert 60_000_000 <= ended - began < 61_000_000


class MachineClock:
    """A wall clock as a machine has it: it is stepped, and tells nobody."""

    def __init__(self, inner: TrioClock) -> None:
        self.now_us = inner.now_us


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("hours", [-2, 2])
async def test_a_stepped_clock_neither_loses_nor_hastens_a_timer(
    autojump_clock: Any, hours: int, told: bool
) -> None:
    """The wall clock counts; a step is noticed within one poll of a minute, or at once if told."""
    # C092
    world = World(heartbeat_seconds=1_000.0, lease_seconds=4_000.0)
    async with world.open(clock=None if told else MachineClock(world.clock)):
        task = await world.create("a", waiting(deadline=after(3 * 3_600)))
        await trio.sleep(600)
        world.clock.step_us = hours * 3_600_000_000
        await world.end(task)
        due = (3 - hours) * 3_600
        assert due <= trio.current_time() <= due + (0.001 if told else 61)


async def test_a_clock_set_back_after_the_timer_fired_loses_no_wake_up(autojump_clock: Any) -> None:
    """A timer that was due, and is no longer when its pass looks, is kept."""
    world = World()
    async with world.open() as rt:
        task = await world.create("a", waiting(deadline=after(100)))
        await trio.sleep(50)
        rt.index.due_timers(world.clock.now_us() + 60_000_000)
        rt.scheduler.kick()
        await trio.sleep(10)
        assert world.status(task) == "waiting"
        assert (await world.end(task)).result == "deadline"


async def test_a_task_past_its_own_deadline_is_aborted(autojump_clock: Any) -> None:
    """Passing it is an abort with reason deadline, running, waiting or after a crash."""
    world = World()

    def in_a_minute() -> datetime:
        return datetime.fromtimestamp(world.clock.now_us() / 1e6 + 60, UTC)

    async with world.open():
        ids = [
            await world.create("runs", forever, deadline=in_a_minute()),
            await world.create("waits", waiting(signals=True), deadline=in_a_minute()),
            await world.create("done", done, deadline=in_a_minute()),
        ]
        statuses = [(await world.end(id)).status for id in ids]
    assert statuses == ["aborted", "aborted", "completed"]
    assert {world.row(id).abort_reason for id in ids[:2]} == {"deadline"}
    async with world.crashing():
        late = await world.create("runs", forever, deadline=in_a_minute())
        await trio.sleep(1)
    await trio.sleep(100)
    async with world.open():
        assert (await world.end(late)).status == "aborted"


async def test_a_naive_deadline_is_refused() -> None:
    """Only aware moments are accepted."""
    world = World()
    async with world.open():
        with pytest.raises(InvalidArgumentError, match="aware datetime"):
            await world.create("a", forever, deadline=datetime(2030, 1, 1))


async def test_a_signal_that_came_first_wakes_at_once() -> None:
    """A signal from before the wait is unread, so the wait ends with the next pass."""
    # C037
    world = World()
    go = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await go.wait()
            await ctx.wait(then=Next(1), signals=True)
        else:
            async with ctx.commit() as tx:
                tx.complete(f"{ctx.woken_by}: {tx.receive()}")

    async with world.open():
        task = await world.create("a", script)
        await world.quiet()
        await world.signal(task, "hello", {"n": 1})
        go.set()
        assert (await world.end(task)).result == "signal: [('hello', {'n': 1})]"


async def test_signals_keep_their_order_and_survive_a_crash() -> None:
    """They are received oldest first, exactly with the commit that takes them, each key once."""
    # C020
    world = World()
    got: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), signals=True)
            return
        async with ctx.commit() as tx:
            taken = [name for name, _ in tx.receive(limit=2)]
            if at.n == 1:
                # Taken and never stored: the process dies in this commit.
                world.storage.add(Fault.call(world.storage.freeze, "apply"))
                tx.goto(Next(2))
            elif len(taken) == 2:
                tx.goto(Next(at.n + 1))
            else:
                tx.complete("all")
        got.extend(taken)

    async with world.crashing():
        task = await world.create("a", script)
        async with trio.open_nursery() as nursery:
            world.blocking.hold()
            for name in ("one", "two", "one", "three"):
                nursery.start_soon(lambda name=name: world.signal(task, name, key=name))
                await world.quiet()
            world.blocking.release()
        await world.quiet()
    assert got == []

    async def again(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            taken = [name for name, _ in tx.receive(limit=2)]
            if len(taken) == 2:
                tx.goto(Next(at.n + 1))
            else:
                tx.complete("all")
        got.extend(taken)

    world.scripts["a"] = again
    async with world.open() as rt:
        assert (await world.end(task)).result == "all"
        assert got == ["one", "two", "three"]
        assert rt.session.storage.live_signals() == []
        with pytest.raises(TaskEndedError):
            await world.signal(task)


async def test_each_receive_of_a_commit_goes_on_where_the_last_one_ended() -> None:
    """What this commit, or one before it in its batch, has taken hides nothing behind it."""
    world = World()
    got: list[list[Any]] = []
    both: list[Any] = []

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), signals=True)
            return
        async with ctx.commit() as tx:
            got.extend([n for _, n in tx.receive(limit=2)] for _ in range(4))
            tx.complete("taken")

    async def two_commits(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), signals=True)
            return

        async def take() -> None:
            async with ctx.commit() as tx:
                both.append([n for _, n in tx.receive(limit=2)])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            nursery.start_soon(take)
        await ctx.complete("taken")

    async with world.open(start=False) as rt:
        world.scripts.update(a=script, b=two_commits)

        def create(tx: Any) -> None:
            for name in ("a", "b"):
                task = tx.create_task(Actor, name, conversation=ROOT)
                for n in range(5):
                    tx.signal(task, "s", n)

        await rt.commit(create)
        await world.quiet()
        assert got == [[0, 1], [2, 3], [4], []]
        assert sorted(both) == [[0, 1], [2, 3]]


async def test_signals_are_bounded_and_dropped_with_their_task() -> None:
    """1,000 unread signals of 256 KiB are accepted, more are refused; the end drops them."""
    world = World()
    async with world.open() as rt:
        task = await world.create("a", forever)

        def fill(tx: Any) -> None:
            for _ in range(999):
                tx.signal(task, "s")
            tx.signal(task, "large", "x" * (256 * 1024 - 2))

        await rt.commit(fill)
        with pytest.raises(SignalRefusedError, match="unread"):
            await world.signal(task)
        other = await world.create("b", forever)
        with pytest.raises(SignalRefusedError, match="larger than"):
            await world.signal(other, "larger", "x" * (256 * 1024 - 1))
        await world.abort(task)
        await world.end(task)
        assert rt.session.storage.live_signals() == []
        assert not rt._signals


async def test_signals_of_one_batch_are_bounded_together() -> None:
    """What other commits of the batch stored counts: of two with 600 each, one is refused whole."""
    world = World(storage_retry_seconds=0.0)
    refused: list[str] = []

    def fill(tx: Any) -> None:
        for _ in range(600):
            tx.signal(task, "s")

    def fill_up(tx: Any) -> None:
        for _ in range(400):
            tx.signal(task, "s")

    async def send(rt: Any) -> None:
        try:
            await rt.commit(fill)
        except SignalRefusedError as error:
            refused.append(str(error))

    async with world.open() as rt:
        task = await world.create("a", forever)
        await world.quiet()
        world.blocking.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.create, "b", forever)
            await world.quiet()
            for _ in range(2):
                nursery.start_soon(send, rt)
            await world.quiet()
            world.blocking.release()
        assert len(refused) == 1
        assert rt.session.storage.live_signals() == [(task, 600)]
        assert rt.unread(task) == 600
        assert not rt.staged_signals
        # The other task begins; else its commit could be the one that is refused.
        await world.quiet()
        # A batch that failed leaves nothing counted: all of the room is there again.
        world.storage.add(Fault.refuse())
        with pytest.raises(StorageRefusedError):
            await rt.commit(fill_up)
        await rt.commit(fill_up)
        with pytest.raises(SignalRefusedError, match="unread"):
            await world.signal(task)


@pytest.mark.parametrize(
    ("ended", "signalled", "expected"),
    [(True, True, "tasks"), (False, True, "signal"), (False, False, "deadline")],
)
async def test_tasks_come_before_signals_before_the_deadline(
    autojump_clock: Any, ended: bool, signalled: bool, expected: str
) -> None:
    """If several are due at once, the order is fixed; here they became due while nothing ran."""
    world = World()
    go = trio.Event()

    async def child(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.complete("")

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                id = tx.create_task(Actor, "child", key="child")
                tx.wait(
                    then=Next(1),
                    on=[id],
                    deadline=ctx.now() + timedelta(seconds=10),
                    signals=True,
                )
        else:
            await ctx.fail(str(ctx.woken_by))

    world.scripts["child"] = child
    async with world.crashing(), trio.open_nursery() as nursery:
        task = await world.create("p", parent)
        await trio.sleep(1)
        # One batch is held; what queues behind it is stored together, and the process is dead.
        world.blocking.hold()
        nursery.start_soon(world.rt.commit, lambda tx: tx.append(1, {}, kind="note"))
        await world.quiet()
        if signalled:
            nursery.start_soon(swallowing, world.signal, task)
        if ended:
            go.set()
        await world.quiet()
        world.storage.add(Fault.call(world.storage.freeze, "apply", at=2, after=True))
        world.blocking.release()
        await world.quiet()
    await trio.sleep(100)
    async with world.open():
        outcome = await world.end(task)
    assert outcome.error is not None
    assert outcome.error.message == expected


async def test_a_wait_leaves_its_tasks_alone_when_it_ends_early() -> None:
    """Woken by a signal, the parent goes on; the awaited child does too."""
    world = World()

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                id = tx.create_task(Actor, "child", key="child")
                tx.wait(then=Next(1), on=[id], signals=True)
        else:
            world.log.append(f"woken by {ctx.woken_by}")
            await trio.sleep_forever()

    world.scripts["child"] = forever
    async with world.open():
        task = await world.create("p", parent)
        await world.quiet()
        await world.signal(task)
        await world.quiet()
        assert world.log[-1] == "woken by signal"
        assert world.status(child_of(world, task, "child")) == "running"


async def test_a_signal_sent_again_after_it_was_received_is_stored_no_second_time() -> None:
    """The key of a signal stays taken for as long as its task lives, also over a restart."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            world.log.extend(name for name, _ in tx.receive())
            tx.wait(then=Next(1), signals=True)

    async with world.open():  # C033
        task = await world.create("a", script)
        await world.signal(task, "pay", key="order-1")
        await world.quiet()
        await world.signal(task, "pay", key="order-1")
        await world.quiet()
    async with world.open():
        await world.signal(task, "pay", key="order-1")
        await world.signal(task, "other", key="order-2")
        await world.quiet()
        await world.abort(task)
        await world.end(task)
    assert [line for line in world.log if line in ("pay", "other")] == ["pay", "other"]
    assert not world.base.reopen()._data.signals


async def test_a_signal_of_the_creating_commit_goes_with_its_task() -> None:
    """A signal stored in the commit that creates its task wakes it, and is dropped at its end."""
    world = World()
    async with world.open() as rt:
        world.scripts["a"] = waits_for_a_signal

        def body(tx: Any) -> int:
            task: int = tx.create_task(Actor, "a", conversation=ROOT)
            tx.signal(task, "go")
            return task

        task = await rt.commit(body)
        assert (await world.end(task)).result == "signal"
        assert rt.session.storage.signals(task) == []


async def waits_for_a_signal(at: Any, ctx: Any) -> None:
    if isinstance(at, Start):
        await ctx.wait(then=Next(1), signals=True)
    else:
        await ctx.complete(ctx.woken_by)


async def test_all_who_wait_for_a_task_are_given_its_outcome_without_a_read() -> None:
    """Thousands may wait at once; an outcome that was held is read, as its end decides nothing."""
    world = World()
    go = trio.Event()
    reads: list[int] = []
    got: list[tuple[str, str]] = []

    async def plain(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.complete("said")

    async def holds(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "child", key="child")
        await go.wait()
        await ctx.complete("held")

    async with world.open() as rt:
        read = rt.session.storage.task_outcome

        def counted(task: int) -> str | None:
            reads.append(task)
            return read(task)

        rt.session.storage.task_outcome = counted  # type: ignore[method-assign]
        world.scripts["child"] = forever
        first, second = await world.create("a", plain), await world.create("b", holds)

        async def wait(task: int, within: float | None) -> None:
            outcome = await rt.wait_for_task(task, timeout=within)
            got.append((outcome.status, outcome.result))

        async with trio.open_nursery() as nursery:
            # A number of seconds that no float can hold is for ever, as everywhere.
            for within in (None, 60.0, 10**400):
                nursery.start_soon(wait, first, within)
            nursery.start_soon(wait, second, None)
            await world.quiet()
            with trio.move_on_after(0):
                await rt.wait_for_task(first)
            go.set()
            await world.quiet()
            assert (got, reads) == ([("completed", "said")] * 3, [])
            await world.abort(child_of(world, second, "child"))
        assert got[3:] == [("completed", "held")]
        assert reads == [second]
