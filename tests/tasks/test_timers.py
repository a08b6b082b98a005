"""The heap of moments: in order, and no longer than what still counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, strategies as st
from worlds import Next, World

from pidurable.tasks import _timers
from pidurable.tasks._timers import Timers

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
