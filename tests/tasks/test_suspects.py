"""Tasks that may be what kills the process are tried one at a time, and blamed alone."""

from __future__ import annotations

from typing import Any

import trio
from recount import check_at_rest
from worlds import (
    Actor,
    Harmless,
    Next,
    Other,
    Start,
    World,
    child_of,
    done,
    forever,
)

from pidurable.records._limits import SUSPECT_SECONDS
from pidurable.testing import Fault


async def let_pass(world: World, clock: Any, seconds: float) -> None:
    """Let time pass in steps that keep the heartbeat of the holder alive."""
    while seconds > 0:
        clock.jump(min(5.0, seconds))
        seconds -= 5.0
        await world.quiet()


async def crash_times(world: World, times: int) -> None:
    for _ in range(times):
        async with world.crashing():
            await world.quiet()


async def suspects(world: World, names: str = "abc", **scripts: Any) -> list[int]:
    """Tasks that were running in three deaths of the process."""
    async with world.crashing():
        ids = [await world.create(name, scripts.get(name, forever)) for name in names]
        await world.quiet()
    await crash_times(world, 2)
    world.log.clear()
    return ids


async def test_from_the_third_recovery_on_suspects_start_one_at_a_time(mock_clock: Any) -> None:
    """The next starts once the last has made progress, has ended, or has lived for a minute."""
    world = World()
    await suspects(world)

    async def goes_on(at: Any, ctx: Any) -> None:
        if not isinstance(at, Next):
            await ctx.goto(Next(1))
            return
        await forever(at, ctx)

    world.scripts.update(b=goes_on, c=done)
    async with world.open() as rt:
        other = await world.create("other", done)
        assert (await world.end(other)).status == "completed"
        await world.quiet()
        assert [line for line in world.log if "other" not in line] == ["a start"]
        check_at_rest(rt)
        await let_pass(world, mock_clock, SUSPECT_SECONDS - 1)
        assert "b start" not in world.log
        await let_pass(world, mock_clock, 2)
        assert world.log[-3:] == ["b start", "b next 1", "c start"]
        check_at_rest(rt)
    assert [row.recoveries for row in world.rows()] == [0, 0, 0, 0]


async def test_a_suspect_that_ends_or_is_aborted_makes_room_for_the_next() -> None:
    """The end of a trial starts the next suspect; an abort handler is tried alone as well."""
    world = World()
    ids = await suspects(world)

    async def raises(at: Any, ctx: Any) -> None:
        raise ValueError("no")

    world.scripts.update(a=raises)
    world.aborts["c"] = forever
    async with world.open():
        await world.quiet()
        assert world.log == ["a start", "b start"]
        await world.abort(ids[2])
        await world.quiet()
        assert world.log == ["a start", "b start"]
        await world.abort(ids[1])
        await world.quiet()
        # The mark forgives nothing: only the end of b lets the handler of c begin.
        assert world.log == ["a start", "b start", "b abort", "c abort"]


async def test_only_the_task_on_trial_is_blocked() -> None:
    """One poisonous task is found and blocked; its neighbours go on and are never blamed."""
    # C009
    world = World()
    ids = await suspects(world)
    world.scripts.update(a=done, c=done)
    deaths = 0
    for _ in range(10):
        async with world.crashing():
            await world.quiet()
            deaths += 1
        if world.row(ids[1]).blocked:
            break
    assert deaths == 3
    assert [world.outcome(id) for id in ids] == ["completed", None, "completed"]
    assert [world.row(id).blocked for id in ids] == [None, "crash_loop", None]


async def test_two_suspects_that_ran_together_are_not_blamed_for_one_death(mock_clock: Any) -> None:
    """With two suspects running nobody knows which it was: the next trial decides."""
    world = World()
    ids = await suspects(world, "ab")
    for _ in range(2):
        async with world.crashing():
            await world.quiet()
            await let_pass(world, mock_clock, SUSPECT_SECONDS + 1)
            assert sorted(world.log[-2:]) == ["a start", "b start"]
    async with world.crashing():
        await world.quiet()
        assert [world.row(id).recoveries for id in ids] == [5, 5]
        assert [world.row(id).blocked for id in ids] == [None, None]
        alone = [world.status(id) for id in ids].index("running")
    async with world.crashing():
        await world.quiet()
        assert world.row(ids[alone]).blocked == "crash_loop"
        assert world.row(ids[1 - alone]).blocked is None
        assert world.status(ids[1 - alone]) == "running"


async def test_a_small_limit_blocks_sooner() -> None:
    """With recoveries_max = 1 the first death while it ran blocks a task."""
    world = World(recoveries_max=1)
    async with world.crashing():
        task = await world.create("a", forever)
        await world.quiet()
    async with world.open(start=False):
        assert world.row(task).blocked == "crash_loop"


async def test_an_end_below_a_suspect_that_is_about_to_start_starts_no_other() -> None:
    """Between its reservation and its start a suspect is on trial, whatever ends below it."""
    world = World()
    over, go = trio.Event(), trio.Event()

    async def child(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), signals=True)
            return
        await go.wait()
        await ctx.complete("done")

    async def owner(at: Any, ctx: Any) -> None:
        await ctx.create_task(Other, "child", key="child")
        await trio.sleep_forever()

    async def ends(at: Any, ctx: Any) -> None:
        await over.wait()
        await ctx.complete("done")

    world.scripts.update(child=child)
    _, second, _ = await suspects(world, b=owner)
    world.scripts.update(a=ends)
    async with world.open():
        await world.signal(child_of(world, second, "child"))
        await world.quiet()
        assert "child next 1" in world.log
        # The end of the first lets a pass reserve the second, which is held inside the storage.
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        over.set()
        await world.quiet()
        go.set()
        await world.quiet()
        world.blocking.release()
        await world.quiet()
        assert world.log[-1] == "b start"
        assert "c start" not in world.log


async def test_a_suspect_that_is_settled_without_a_trial_makes_room_for_the_next() -> None:
    """One that is settled without running any code does not keep the others of its kind waiting."""
    world = World()
    async with world.crashing():
        ids = [await world.create(name, forever) for name in "a"]
        ids += [await world.create(name, forever, kind=Harmless) for name in "bcd"]
        await world.quiet()
    await crash_times(world, 2)
    async with world.open():
        await world.quiet()
        for id in ids[1:]:
            await world.abort(id)
        await world.quiet()
        await world.abort(ids[0])
        await world.quiet()
    assert [world.outcome(id) for id in ids] == ["aborted"] * 4


async def test_owners_that_wait_for_what_is_below_keep_no_suspect_waiting() -> None:
    """Let go for their trials, marked owners have to wait for a child, whose trial comes first."""
    world = World()

    def owner_of(name: str) -> Any:
        async def owner(at: Any, ctx: Any) -> None:
            await ctx.create_task(Actor, name, key=name)
            await trio.sleep_forever()

        return owner

    world.scripts.update(middle=owner_of("child"), child=forever)
    first, top = await suspects(world, "ab", b=owner_of("middle"))
    middle = child_of(world, top, "middle")
    child = child_of(world, middle, "child")
    async with world.open():
        await world.quiet()
        assert world.status(first) == "running"
        await world.abort(top)
        await world.quiet()
        await world.abort(first)
        await world.quiet()
        tasks = (first, child, middle, top)
        assert [world.outcome(id) for id in tasks] == ["aborted"] * 4


def caller_of(*names: str) -> Any:
    """A script that asks others, each in a conversation of its own, and waits for them in memory.

    The others are created by name once, and wait to be found by it in every later life.
    """

    async def caller(at: Any, ctx: Any) -> None:
        ids = [await ctx.create_task(Actor, name, key=name) for name in names]
        async with trio.open_nursery() as nursery:
            for id in ids:
                nursery.start_soon(ctx.wait_for_task, id)
        await ctx.complete("done")

    return caller


async def grown(world: World, owners: dict[str, tuple[str, ...]]) -> int:
    """A tree of callers, the first of them at the top, that three deaths have made suspects."""
    for name, below in owners.items():
        world.scripts[name] = caller_of(*below)
    async with world.crashing():
        top = await world.create(next(iter(owners)))
        await world.quiet()
    await crash_times(world, 2)
    world.log.clear()
    return int(top)


def recoveries(world: World) -> dict[str, int]:
    """The charge of every task by its key, and of the first."""
    return {row.key or "first": row.recoveries for row in world.rows()}


# The first is asked first, so that callers run before what they wait for.
TREE = {"r": ("a", "b"), "a": ("c", "d"), "b": ("e", "f")}


async def test_callers_that_wait_for_suspects_below_do_not_keep_them_waiting(
    mock_clock: Any,
) -> None:
    """A tree of callers that all are suspects comes to its end without a second of waiting."""
    world = World()
    world.scripts.update(dict.fromkeys("cdef", forever))
    top = await grown(world, TREE)
    world.scripts.update(dict.fromkeys("cdef", done))
    async with world.open() as rt:
        await world.quiet()
        assert trio.current_time() == 0.0
        assert world.outcome(top) == "completed"
        check_at_rest(rt)
    assert {row.outcome_status for row in world.rows()} == {"completed"}


async def test_a_killer_below_waiting_callers_is_blamed_and_they_are_not() -> None:
    """Whoever waits for what is tried is let off by the trial, so what kills runs alone."""
    # C009
    world = World()
    world.scripts.update(dict.fromkeys("cdef", forever))
    top = await grown(world, TREE)
    killer = child_of(world, child_of(world, top, "b"), "e")
    killed = trio.Event()

    async def kill(at: Any, ctx: Any) -> None:
        killed.set()
        await trio.sleep_forever()

    world.scripts.update({**dict.fromkeys("cdf", done), "e": kill})
    deaths = 0
    while not world.row(killer).blocked and deaths < 5:
        async with world.crashing():
            await world.quiet()
            deaths += killed.is_set()
        killed = trio.Event()
    assert world.row(killer).blocked == "crash_loop"
    assert deaths == 2
    async with world.open() as rt:
        await world.quiet()
        assert {row.blocked for row in world.rows() if row.id != killer} == {None}
        assert world.status(top) == "running"
        assert world.outcome(child_of(world, top, "a")) == "completed"
        check_at_rest(rt)


async def test_a_caller_that_waits_is_let_off_by_the_next_trial_alone() -> None:
    """Its charge goes below suspicion with the start of another suspect, and not by its wait."""
    world = World()
    world.scripts.update(b=forever)
    await grown(world, {"a": ("b",)})
    found: list[dict[str, int]] = []

    async def looks(at: Any, ctx: Any) -> None:
        found.append(recoveries(world))
        await trio.sleep_forever()

    world.scripts.update(b=looks)
    async with world.crashing():
        await world.quiet()
    assert found == [{"first": 2, "b": 3}]
    assert world.log == ["a start", "b start"]
    # Below it nothing is left to try: it waits for what has never been charged.
    new = World()
    new.scripts.update(a=forever)
    await suspects(new, "a")
    new.scripts.update(a=caller_of("b"), b=forever)
    for charge in (3, 4):
        async with new.crashing():
            await new.quiet()
            assert recoveries(new)["first"] == charge
    async with new.open(start=False):
        assert [row.blocked for row in new.rows()] == ["crash_loop", None]


async def test_a_suspect_whose_wait_is_over_is_on_trial_again() -> None:
    """Once what its code waited for has ended it runs, and no other suspect starts before its end.

    The other one may start while it waits, but what is waited for has the slot until then.
    """
    world = World(limits={"test.other": 1})
    async with world.crashing():
        await world.create("a", forever)
        await world.create("b", forever, kind=Other)
        await world.quiet()
    await crash_times(world, 2)
    world.log.clear()
    child_ends, caller_ends = trio.Event(), trio.Event()

    async def caller(at: Any, ctx: Any) -> None:
        await ctx.wait_for_task(await ctx.create_task(Other, "child", key="child"))
        world.log.append("a goes on")
        await caller_ends.wait()
        await ctx.complete("done")

    async def child(at: Any, ctx: Any) -> None:
        await child_ends.wait()
        await ctx.complete("done")

    world.scripts.update(a=caller, child=child)
    async with world.open() as rt:
        await world.quiet()
        child_ends.set()
        await world.quiet()
        assert world.log == ["a start", "child start", "a goes on"]
        check_at_rest(rt)
        caller_ends.set()
        await world.quiet()
        assert world.log[-1] == "b start"
