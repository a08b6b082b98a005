"""The heap of moments: in order, and no longer than what still counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import trio
from hypothesis import given, strategies as st
from worlds import Next, Start, World

from pidurable.records._tasks import Wait
from pidurable.storage import TaskRow
from pidurable.tasks import _timers
from pidurable.tasks._timers import Timers
from pidurable.tasks._tree import Node

moments = st.integers(min_value=-(2**62), max_value=2**62)
ids = st.integers(min_value=1, max_value=2**63 - 1)


@given(st.lists(st.tuples(moments, ids)))
def test_entries_come_earliest_first_and_as_they_were_put_in(
    entries: list[tuple[int, int]],
) -> None:
    """Also of moments before 1970, and of the largest ids."""
    timers = Timers(lambda moment, id: True)
    for moment, id in entries:
        timers.push(moment, id)
    assert sorted(timers) == sorted(entries)
    assert timers.first_us == (min(entries)[0] if entries else None)
    taken = []
    while due := timers.take_due(2**63):
        taken.append(due)
    assert taken == sorted(entries)


def test_nothing_is_taken_before_its_moment() -> None:
    """An entry is due at its moment, and not a microsecond earlier."""
    timers = Timers(lambda moment, id: True)
    timers.push(100, 7)
    assert timers.take_due(99) is None
    assert timers.take_due(100) == (100, 7)
    assert timers.take_due(100) is None


def test_void_entries_do_not_pile_up(monkeypatch: Any) -> None:
    """However many are pushed, the heap holds no more than twice what counts, and all of that."""
    monkeypatch.setattr(_timers, "_SWEEP_MIN", 8)
    valid = dict.fromkeys(range(1, 21), 0)
    timers = Timers(lambda moment, id: valid[id] == moment)
    for moment in range(1, 2_000):
        id = moment % 20 + 1
        valid[id] = moment
        timers.push(moment, id)
        assert len(timers) <= 41
    assert {(moment, id) for id, moment in valid.items()} <= set(timers)


async def test_a_task_that_is_woken_again_and_again_leaves_no_trail(
    autojump_clock: Any, monkeypatch: Any
) -> None:
    """Its old deadlines are thrown out, and the last one still wakes it."""
    monkeypatch.setattr(_timers, "_SWEEP_MIN", 8)
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        number = getattr(at, "n", 0)
        if ctx.woken_by == "deadline":
            await ctx.complete(str(number))
            return
        async with ctx.commit() as tx:
            tx.receive()
            tx.wait(
                then=Next(number + 1),
                signals=True,
                deadline=datetime(2100, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
            )

    async with world.open() as rt:
        task = await world.create("a", script)
        for _ in range(60):
            await world.quiet()
            await world.signal(task)
        assert len(rt.index.timers) <= 9
        assert (await world.end(task)).result == "61"


async def test_a_task_that_only_sleeps_has_one_entry(autojump_clock: Any) -> None:
    """Going to sleep enters its moment once, and what follows its handler enters it no more."""
    world = World()

    async def sleeps(at: Any, ctx: Any) -> None:
        await ctx.wait(then=Next(1), deadline=datetime(2100, 1, 1, tzinfo=UTC))

    world.scripts["a"] = sleeps
    async with world.open() as rt:
        tasks = [await world.create("a") for _ in range(20)]
        await world.quiet()
        assert sorted(task for _, task in rt.index.timers) == tasks


async def test_a_deadline_that_passed_before_the_handler_returned_is_kept(
    autojump_clock: Any,
) -> None:
    """Also where the clock was set back meanwhile, so that it is still to come."""
    world = World()

    async def lingers(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), deadline=ctx.now() + timedelta(seconds=1))
            await trio.sleep(5)
            return
        await ctx.complete(ctx.woken_by)

    async with world.open() as rt:
        task = await world.create("a", lingers)
        await trio.sleep(3)
        world.clock.step_us = -60_000_000
        await trio.sleep(30)
        assert world.status(task) == "waiting"
        await trio.sleep(40)
        assert (await world.end(task)).result == "deadline"
        assert not rt.index.missed


@given(
    st.builds(
        Wait,
        on=st.none() | st.tuples(ids),
        conversations=st.just(()) | st.tuples(ids),
        others=st.just(()) | st.tuples(ids),
        policy=st.sampled_from(["all_settled", "fail_fast", "first_success"]),
        deadline_us=st.none() | moments,
        signals=st.booleans(),
    )
)
def test_a_node_gives_back_the_wait_that_it_was_given(wait: Wait) -> None:
    """However it keeps it: whole, as one that many share, or as an entry of the timers."""
    node = Node(
        TaskRow(7, 1, "k", 1, None, None, 0, None, None, 0, 2, *[None] * 4, 0, 0, 0, 0, *[None] * 3)
    )
    node.wait = wait
    assert node.wait == wait
    assert node.has_wait
    assert node.waits_until_us == wait.deadline_us
    node.wait = None
    assert not node.has_wait
