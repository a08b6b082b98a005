"""A session that lives for long keeps nothing of what has ended: every table of it is counted."""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from recount import check_at_rest
from seeded import unwatched
from tables import growth, process, sizes
from worlds import ROOT, Actor, Harmless, Next, Start, World, forever

from pidurable.session import _session, _submissions
from pidurable.tasks import _at_hand, _session_tree, _timers
from pidurable.tasks._definition import Retry


class Twice(Actor):
    """Tried twice."""

    name = "test.twice"
    retry = Retry(on=(OSError,), tries=2, base=1.0, jitter=0.0)


async def completes(at: Any, ctx: Any) -> None:
    if isinstance(at, Start):
        await ctx.memo("drawn", 1)
        await ctx.goto(Next(1))
    else:
        await ctx.complete("")


async def fails(at: Any, ctx: Any) -> None:
    await ctx.fail("on purpose", detail={"n": ctx.task_id})


async def raises(at: Any, ctx: Any) -> None:
    raise ValueError("on purpose")


async def again(at: Any, ctx: Any) -> None:
    raise OSError("on purpose")


async def returns(at: Any, ctx: Any) -> None:
    await trio.lowlevel.checkpoint()


async def timer(at: Any, ctx: Any) -> None:
    """Would sleep for a year; it is aborted or signalled long before."""
    if isinstance(at, Start):
        await ctx.wait(then=Next(1), deadline=ctx.now() + timedelta(days=365), signals=True)
        return
    async with ctx.commit() as tx:
        tx.receive()
        tx.complete("")


async def parent(at: Any, ctx: Any) -> None:
    if isinstance(at, Start):
        async with ctx.commit() as tx:
            ids = [tx.create_task(Actor, name, key=name) for name in ("fails", "forever")]
            tx.wait(then=Next(1), on=ids, policy="fail_fast")
        return
    await ctx.complete("")


async def holder(at: Any, ctx: Any) -> None:
    """Ends over work in a conversation of its own, which it waits for in memory first."""
    async with ctx.commit() as tx:
        own = tx.create_conversation(key="own")
        first = tx.create_task(Actor, "completes", conversation=own, key="first")
        tx.create_task(Actor, "completes", conversation=own, background=True)
    await ctx.wait_for_task(first)
    async with ctx.commit() as tx:
        tx.create_task(Actor, "completes", conversation=own)
        tx.complete("")


SCRIPTS = {
    "completes": completes,
    "fails": fails,
    "raises": raises,
    "again": again,
    "returns": returns,
    "timer": timer,
    "parent": parent,
    "holder": holder,
    "forever": forever,
}
ENDLESS = ("timer", "forever")

TASKS = int(os.environ.get("LONG_LIFE_TASKS", "300"))
"""How many tasks live and end. LONG_LIFE_TASKS=20000 takes a quarter of a minute."""


async def live_a_while(world: World, draw: random.Random, tasks: int) -> None:
    """So many short tasks, one after the other and beside each other, of every kind of end."""
    rt = world.rt

    async def one(name: str, kind: type[Actor]) -> None:
        deadline = None
        if draw.random() < 0.3:
            deadline = in_days(world, draw.randrange(1, 300))
        task = await world.create(name, kind=kind, deadline=deadline)
        if name in ENDLESS:
            await trio.sleep(draw.random())
            if name == "timer" and draw.random() < 0.5:
                await world.signal(task, key="once")
            else:
                await world.abort(task)
        elif draw.random() < 0.2:
            await world.abort(task)
        with trio.move_on_after(0.001):
            await world.end(task)  # leaving a wait must leave nothing, either
        await world.end(task)

    for _ in range(tasks // 20):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                name = draw.choice(list(SCRIPTS))
                kind = draw.choice([Actor, Twice, Harmless])
                nursery.start_soon(one, name, kind)
    await rt.wait_for_idle()
    await trio.sleep(5)


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and what is tidied up now and then are full, or due, after a few tasks."""
    monkeypatch.setattr(_session_tree, "_TOPS_CACHED", 20)
    monkeypatch.setattr(_session, "_CONVERSATIONS_CACHED", 20)
    monkeypatch.setattr(_submissions, "_CONVERSATIONS_KEPT", 20)
    monkeypatch.setattr(_at_hand, "_TASKS_KEPT", 20)
    monkeypatch.setattr(_timers, "_SWEEP_MIN", 20)


@pytest.mark.usefixtures("small_caches")
async def test_nothing_grows_with_the_tasks_that_have_ended(autojump_clock: Any) -> None:
    """Errors, aborts, timers, joins, owned conversations: afterwards every table is as before."""
    # C100
    world = World(Actor, Twice, Harmless, heartbeat_seconds=3_600.0, lease_seconds=14_400.0)
    world.scripts.update(SCRIPTS)
    draw = random.Random(100)
    async with world.open() as rt:
        unwatched(world)
        keeper = await world.create("forever", background=True)  # live all the while
        await live_a_while(world, draw, 500)
        before, before_process = sizes(rt, "rt"), process()
        await live_a_while(world, draw, TASKS)
        after, after_process = sizes(rt, "rt"), process()
        check_at_rest(rt)
        await world.abort(keeper)
        await world.end(keeper)
        await trio.sleep(1)
        empty = sizes(rt, "rt")
    ended = [row for row in world.rows() if row.outcome_status is not None]
    assert len(ended) == len(world.rows()) > 500 + TASKS
    assert len({row.outcome_status for row in ended}) == 4
    assert len(before) > 40
    # What is kept for later is bounded, and was full before.
    assert growth(before, after, most=100) == {}
    assert growth(before_process, after_process) == {}
    kept = {name: n for name, n in empty.items() if n > 100}
    assert kept == {}


@pytest.mark.usefixtures("small_caches")
async def test_a_timer_of_next_year_is_forgotten_with_its_task(autojump_clock: Any) -> None:
    """What ended, woke or was aborted before its moment leaves nothing for that moment to find."""
    # C100
    world = World(heartbeat_seconds=3_600.0, lease_seconds=14_400.0)
    world.scripts.update(SCRIPTS)
    async with world.open() as rt:
        unwatched(world)
        sleepers = [await world.create("timer") for _ in range(50)]
        await world.quiet()
        for n in range(30):

            def make(tx: Any) -> list[int]:
                deadline = in_days(world, 300)
                names = ["timer", "completes"] * 25
                return [
                    tx.create_task(Actor, name, conversation=ROOT, deadline=deadline)
                    for name in names
                ]

            tasks = await rt.commit(make)
            await world.quiet()
            for task in tasks[::2]:
                await (world.signal(task) if n % 2 else world.abort(task))
            for task in tasks:
                await world.end(task)
        # Twice what counts, and what one round adds.
        assert len(rt.index.timers) <= 2 * (50 + 75)
        # And those of the others are all there.
        kept = {id for _, id in rt.index.timers}
        assert set(sleepers) <= kept
        await trio.sleep(366 * 86_400)
        assert {world.outcome(id) for id in sleepers} == {"completed"}
        assert list(rt.index.timers) == []


def in_days(world: World, days: float) -> datetime:
    return datetime.fromtimestamp(world.clock.now_us() / 1e6, UTC) + timedelta(days=days)
