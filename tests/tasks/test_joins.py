"""Join policies, sentence by sentence: what decides, who is marked, and when it wakes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import trio
from recount import check_at_rest
from worlds import (
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

from pidurable.errors import InvalidArgumentError, UnknownTaskError
from pidurable.testing import Fault


async def fails(at: Any, ctx: Any) -> None:
    await ctx.fail("on purpose")


async def raises(at: Any, ctx: Any) -> None:
    raise ValueError("on purpose")


def gated(event: trio.Event, script: Any) -> Any:
    async def waits(at: Any, ctx: Any) -> None:
        await event.wait()
        await script(at, ctx)

    return waits


@pytest.mark.parametrize("way", ["failed", "faulted", "aborted", "orphaned"])
async def test_every_outcome_but_completed_decides_a_fail_fast(way: str) -> None:
    """Also one that a person, or a lack of code, made of a child."""
    world = World()

    class Child(Actor):
        name = "test.child"

    kinds = (Actor, Child)
    world.install(*kinds)
    go = trio.Event()
    scripts = {"failed": gated(go, fails), "faulted": gated(go, raises)}
    world.scripts.update(first=scripts.get(way, forever), ok=done, slow=forever)

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                ids = [
                    tx.create_task(Child if name == "first" else Actor, name, key=name)
                    for name in ("first", "ok", "slow")
                ]
                tx.wait(then=Next(1), on=ids, policy="fail_fast")
            return
        keyed = ctx.snapshot.keyed_tasks()
        outcomes = await ctx.outcomes([keyed[name] for name in ("first", "ok", "slow")])
        await ctx.complete(",".join(outcome.status for outcome in outcomes))

    async with world.open() as rt:
        task = await world.create("parent", parent)
        await world.quiet()
        slow = child_of(world, task, "slow")
        # A completion decides nothing here.
        assert (world.outcome(child_of(world, task, "ok")), world.marked(slow)) == (
            "completed",
            [False],
        )
        if way == "orphaned":
            world.install(Actor)
        if way in ("aborted", "orphaned"):
            await world.abort(child_of(world, task, "first"))
        go.set()
        outcome = await world.end(task)
        check_at_rest(rt)
    assert outcome.result == f"{way},completed,aborted"
    assert world.row(slow).abort_reason == "join"


async def test_the_first_completion_that_is_held_decides_a_first_success() -> None:
    """The others are marked while it drains; its own work below is not, and all are awaited."""
    world = World()
    below = trio.Event()

    async def holds(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "below", key="below")
        await ctx.complete("first")

    world.scripts.update(
        below=gated(below, done), holds=holds, slow=forever, bad=fails, unrelated=forever
    )

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                tx.create_task(Actor, "unrelated", key="unrelated")
                ids = [tx.create_task(Actor, name, key=name) for name in ("bad", "holds", "slow")]
                tx.wait(then=Next(1), on=ids, policy="first_success")
        else:
            await ctx.complete("woken")

    async with world.open() as rt:
        task = await world.create("parent", parent)
        await world.quiet()
        holder, slow = (child_of(world, task, name) for name in ("holds", "slow"))
        held_up = child_of(world, holder, "below")
        assert world.status(holder) == "completing"
        assert world.marked(holder, slow, held_up, task) == [False, True, False, False]
        assert world.outcome(slow) == "aborted"
        assert world.status(task) == "waiting"
        below.set()
        await world.quiet()
        assert world.outcome(holder) == "completed"
        unrelated = child_of(world, task, "unrelated")
        assert (world.status(task), world.marked(unrelated)) == ("completing", [False])
        await world.abort(unrelated)
        assert (await world.end(task)).result == "woken"
        check_at_rest(rt)


@pytest.mark.parametrize("policy", ["fail_fast", "first_success"])
async def test_a_join_that_nobody_decides_wakes_when_all_are_there(policy: str) -> None:
    """All completed under fail_fast, all failed under first_success: nobody was marked."""
    world = World()
    script = done if policy == "fail_fast" else fails
    world.scripts.update({f"c{n}": script for n in range(3)})
    async with world.open():
        task = await world.create("parent", parent_of("c0", "c1", "c2", policy=policy))
        outcome = await world.end(task)
    expected = "completed" if policy == "fail_fast" else "failed"
    assert outcome.result == ",".join([expected] * 3)
    assert all(row.abort_us is None for row in world.rows())


@pytest.mark.parametrize("policy", ["fail_fast", "first_success"])
async def test_a_wait_that_has_ended_otherwise_decides_nothing_any_more(
    autojump_clock: Any, policy: str
) -> None:
    """Woken by its deadline, the join is over: what ends after that marks nobody."""
    world = World()
    late = trio.Event()
    world.scripts.update(late=gated(late, fails if policy == "fail_fast" else done), slow=forever)

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                ids = [tx.create_task(Actor, name, key=name) for name in ("late", "slow")]
                deadline = ctx.now() + timedelta(seconds=60)
                tx.wait(then=Next(1), on=ids, policy=policy, deadline=deadline)
        elif at.n == 1:
            await ctx.goto(Next(2))
            await trio.sleep(60)
        else:
            await trio.sleep_forever()

    async with world.open() as rt:
        task = await world.create("parent", parent)
        await trio.sleep(70)
        assert world.log[-1] == "parent next 1"
        late.set()
        await trio.sleep(100)
        assert world.outcome(child_of(world, task, "late")) is not None
        assert world.marked(child_of(world, task, "slow"), task) == [False, False]
        assert not rt.index.open_joins
        await world.abort(task)
        await world.end(task)
        check_at_rest(rt)


@pytest.mark.parametrize("policy", ["all_settled", "fail_fast", "first_success"])
async def test_duplicates_count_once_under_every_policy(policy: str) -> None:
    """The same task given three times is one task to wait for."""
    world = World()
    go = trio.Event()
    world.scripts["child"] = gated(go, done)

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                child = tx.create_task(Actor, "child", key="child")
                tx.wait(then=Next(1), on=[child, child, child], policy=policy)
        else:
            await ctx.complete(str(ctx.woken_by))

    async with world.open() as rt:
        task = await world.create("parent", parent)
        await world.quiet()
        assert rt.index.open_joins == {task: 1}
        go.set()
        assert (await world.end(task)).result == "tasks"
        assert world.marked(child_of(world, task, "child")) == [False]


@pytest.mark.parametrize("policy", ["fail_fast", "first_success"])
@pytest.mark.parametrize("whose", ["grandchild", "conversation", "stranger"])
async def test_a_policy_that_marks_needs_tasks_of_its_own(policy: str, whose: str) -> None:
    """What is below a child, or in a conversation of one's own, is not owned: it is refused."""
    world = World()
    refused: list[str] = []
    ids: dict[str, int] = {}
    world.scripts.update(grandchild=forever, stranger=forever, conversation=forever)

    async def child(at: Any, ctx: Any) -> None:
        ids["grandchild"] = await ctx.create_task(Actor, "grandchild")
        await trio.sleep_forever()

    async def parent(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            own = tx.create_conversation(key="own")
            ids["conversation"] = tx.create_task(Actor, "conversation", conversation=own)
            mine = tx.create_task(Actor, "child")
        while "grandchild" not in ids:
            await trio.lowlevel.checkpoint()
        try:
            await ctx.wait(then=Next(1), on=[mine, ids[whose]], policy=policy)
        except InvalidArgumentError as error:
            refused.append(str(error))
        await ctx.fail("enough")

    world.scripts["child"] = child
    async with world.open() as rt:
        ids["stranger"] = await world.create("stranger")
        await world.end(await world.create("parent", parent))
        await world.abort(ids["stranger"])
        await rt.wait_for_idle()
    (message,) = refused
    assert f"{policy} needs ownership of all of `on`" in message
    assert str(ids[whose]) in message


async def test_an_unknown_id_among_many_is_refused_and_parks_nobody() -> None:
    """The wait is stored whole or not at all."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            child = tx.create_task(Actor, "child", key="child")
            tx.wait(then=Next(1), on=[child, 10_000])

    world.scripts["child"] = done
    async with world.open() as rt:
        outcome = await world.end(await world.create("a", script))
        assert outcome.status == "faulted"
        assert outcome.error is not None
        assert outcome.error.type.endswith(UnknownTaskError.__name__)
        assert rt.index.waiters == {}
    assert len(world.rows()) == 1


async def test_many_waiters_of_one_task_all_wake_each_once() -> None:
    """Parked in one batch or one after the other, before its end or after it."""
    world = World()
    go = trio.Event()

    async def waiter(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), on=[target])
        else:
            await ctx.complete(str(ctx.woken_by))

    world.scripts["waiter"] = waiter
    async with world.open() as rt:
        target = await world.create("target", gated(go, done))
        early = [await world.create("waiter") for _ in range(30)]
        await world.quiet()
        assert len(rt.index.waiters[target]) == 30
        go.set()
        late = [await world.create("waiter") for _ in range(30)]
        for id in early + late:
            assert (await world.end(id)).result == "tasks"
        assert rt.index.waiters == {}
        assert rt.index.open_joins == {}
    assert world.log.count("waiter next 1") == 60


@pytest.mark.parametrize("at", [1, 2, 3, 4])
async def test_a_decided_join_marks_the_same_ones_after_a_death(at: int) -> None:
    """Two failures in one batch, and a death at any commit after: the rest is marked, once."""
    world = World()
    go = trio.Event()
    world.scripts.update(
        bad=gated(go, fails), worse=gated(go, raises), slow=forever, slower=forever
    )
    names = ("bad", "worse", "slow", "slower")
    async with world.crashing():
        task = await world.create("parent", parent_of(*names, policy="fail_fast"))
        await world.quiet()
        world.storage.add(Fault.call(world.storage.freeze, "apply", at=at, after=True))
        go.set()
        await world.quiet()
    async with world.open() as rt:
        outcome = await world.end(task)
        check_at_rest(rt)
    statuses = outcome.result.split(",")
    assert statuses[2:] == ["aborted", "aborted"]
    # Of the two failures one decided; the other had failed by itself, or was marked for it.
    assert set(statuses[:2]) <= {"failed", "faulted", "aborted"}
    assert statuses[:2] != ["aborted", "aborted"]
    reasons = [world.row(child_of(world, task, name)).abort_reason for name in names]
    assert reasons[2:] == ["join", "join"]
    assert None in reasons[:2]


async def test_an_end_by_the_undoing_of_a_marked_one_is_no_second_decision() -> None:
    """first_success: a marked one that completes in its handler marks nobody, and is not undone."""
    world = World()
    go = trio.Event()

    async def completes(at: Any, ctx: Any) -> None:
        await ctx.complete("after all")

    world.scripts.update(winner=gated(go, done), loser=forever, other=forever)
    world.aborts.update(loser=completes, other=end_aborted)
    async with world.open():
        names = ("winner", "loser", "other")
        task = await world.create("parent", parent_of(*names, policy="first_success"))
        await world.quiet()
        go.set()
        assert (await world.end(task)).result == "completed,completed,aborted"
    assert world.marked(child_of(world, task, "winner")) == [False]
