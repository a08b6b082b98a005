"""Retries of a definition: durable, counted, for phases and for abort handlers."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import trio
from worlds import Actor, Next, Start, World, done, forever

from pidurable.records._moments import LAST_US, moment
from pidurable.tasks._definition import Retry
from pidurable.tasks._explain import explain
from pidurable.tasks._live_facts import LiveFacts
from pidurable.tasks._tree_transaction import to_us


class Retrying(Actor):
    """Runs a phase again after an OSError, three tries in all, without jitter."""

    name = "test.retrying"
    retry = Retry(on=(OSError,), tries=3, base=10.0, factor=2.0, jitter=0.0)


async def down(at: Any, ctx: Any) -> None:
    raise OSError("the bank is down")


async def test_a_raise_that_matches_runs_the_phase_again_after_a_durable_wait(
    autojump_clock: Any,
) -> None:
    """The phase starts over from its checkpoint after 10 s, then 20 s, and progress forgives."""
    world = World(Retrying)
    at: list[float] = []

    async def script(checkpoint: Any, ctx: Any) -> None:
        at.append(trio.current_time())
        if isinstance(checkpoint, Start):
            await ctx.goto(Next(1))
        elif len(at) < 4:
            raise OSError("down")
        else:
            await ctx.complete("up again")

    async with world.open() as rt:
        task = await world.create("a", script, kind=Retrying)
        await trio.sleep(5)
        assert world.status(task) == "pending"
        assert world.row(task).tries == 1
        assert not rt.invocations
        assert (await world.end(task)).result == "up again"
    assert [round(b - a) for a, b in itertools.pairwise(at)] == [0, 10, 20]
    assert world.log == ["a start", "a next 1", "a next 1", "a next 1"]


async def test_tries_are_bounded(autojump_clock: Any) -> None:
    """After the last try the task is faulted with what was raised."""
    world = World(Retrying)
    async with world.open():
        outcome = await world.end(await world.create("a", down, kind=Retrying))
    assert outcome.status == "faulted"
    assert outcome.error is not None
    assert outcome.error.message == "the bank is down"
    assert world.log == ["a start"] * 3


async def test_progress_gives_all_tries_anew(autojump_clock: Any) -> None:
    """Two failures before a goto and two after it do not add up to three."""
    world = World(Retrying)
    failures = [2, 2]

    async def script(at: Any, ctx: Any) -> None:
        n = 0 if isinstance(at, Start) else 1
        if failures[n]:
            failures[n] -= 1
            raise OSError("down")
        if n:
            await ctx.complete("through")
        else:
            await ctx.goto(Next(1))

    async with world.open():
        assert (await world.end(await world.create("a", script, kind=Retrying))).result == "through"


async def test_only_what_matches_is_retried(autojump_clock: Any) -> None:
    """Another error faults at once; a group matches if every leaf does."""
    world = World(Retrying)

    async def other(at: Any, ctx: Any) -> None:
        raise ValueError("no")

    async def mixed(at: Any, ctx: Any) -> None:
        raise ExceptionGroup("mixed", [OSError("down"), ValueError("no")])

    async def both(at: Any, ctx: Any) -> None:
        raise ExceptionGroup("both", [OSError("down"), ConnectionError("gone")])

    async with world.open():
        for name, script, count in (("other", other, 1), ("mixed", mixed, 1), ("both", both, 3)):
            await world.end(await world.create(name, script, kind=Retrying))
            assert world.log.count(f"{name} start") == count


async def test_the_wait_of_a_retry_survives_a_crash(autojump_clock: Any) -> None:
    """A restart in the middle of it waits for the rest only, and the tries stay counted."""
    # C094
    world = World(Retrying)
    async with world.crashing():
        task = await world.create("a", down, kind=Retrying)
        await trio.sleep(4)
    world.scripts["a"] = done
    began = trio.current_time()
    async with world.open():
        assert world.row(task).tries == 1
        assert (await world.end(task)).status == "completed"
    assert 5.9 < trio.current_time() - began < 6.1


async def test_an_abort_handler_is_retried_with_the_mark_in_place(autojump_clock: Any) -> None:
    """A refund whose bank is down is tried again, also over a crash, and then decides."""
    world = World(Retrying)
    world.aborts["a"] = down
    async with world.crashing():
        task = await world.create("a", forever, kind=Retrying)
        await trio.sleep(1)
        await world.abort(task)
        await trio.sleep(1)
        assert world.status(task) == "pending"
        assert world.marked(task) == [True]
    world.aborts.clear()
    async with world.open():
        await trio.sleep(1)
        assert world.outcome(task) is None
        assert (await world.end(task)).status == "aborted"
    assert world.log == ["a start", "a abort", "a abort"]


async def test_an_abort_ends_the_wait_for_a_retry(autojump_clock: Any) -> None:
    """The handler starts at once, and has all its own tries."""
    world = World(Retrying)
    async with world.open():
        task = await world.create("a", down, kind=Retrying)
        await trio.sleep(5)
        began = trio.current_time()
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
        assert trio.current_time() - began < 1
    assert world.row(task).tries == 0


async def test_a_retrying_task_holds_no_slot(autojump_clock: Any) -> None:
    """While it waits, another task of a full kind runs."""
    world = World(Retrying, limits={"test.retrying": 1})
    async with world.open():
        first = await world.create("a", down, kind=Retrying)
        second = await world.create("b", done, kind=Retrying)
        await trio.sleep(5)
        assert world.outcome(second) == "completed"
        assert world.outcome(first) is None
        await world.abort(first)


class Never(Actor):
    """Tries again after a delay that is beyond every calendar."""

    name = "test.never"
    retry = Retry(on=(OSError,), base=1e300, maximum=1e300)


async def test_a_delay_beyond_the_end_of_time_is_stored_as_the_end_of_time(
    autojump_clock: Any,
) -> None:
    """The session goes on, and so does the task after a look at why it does not move."""
    world = World(Never)
    async with world.open() as rt:
        task = await world.create("a", down, kind=Never)
        await trio.sleep(5)
        assert world.row(task).tries == 1
        assert "9999-12-31" in str(explain(LiveFacts(rt), task))
        assert (await world.end(await world.create("b", done, kind=Never))).status == "completed"


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (datetime.max.replace(tzinfo=UTC), LAST_US),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))), LAST_US),
        (datetime.min.replace(tzinfo=UTC), -62_135_596_800_000_000),
        (datetime(9000, 1, 1, microsecond=999_999, tzinfo=UTC), 221_845_392_000_999_999),
        (datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), 0),
    ],
)
def test_a_moment_is_stored_to_the_microsecond_at_both_ends_of_time(
    given: datetime, stored: int
) -> None:
    """A float of seconds is not exact by then, and beyond the last year."""
    assert to_us(given, "deadline") == stored
    named = datetime.max if stored == LAST_US else given.astimezone(UTC)
    assert moment(stored) == f"{named:%Y-%m-%d %H:%M:%SZ}"
