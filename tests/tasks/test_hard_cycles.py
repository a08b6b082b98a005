"""Hard scenarios of waits that could never end: whichever closes the cycle is refused."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from worlds import Actor, Next, Start, World, child_of, done

from pidurable.errors import WaitCycleError


def waits_on(ids: dict[str, int], name: str, go: trio.Event) -> Any:
    """A script that waits for a task by its name, when it is told to."""

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await go.wait()
            await ctx.wait(then=Next(1), on=[ids[name]])
        else:
            await ctx.complete("woken")

    return script


@pytest.mark.parametrize("closes", ["A", "B"])
@pytest.mark.parametrize("together", [False, True])
async def test_of_two_that_wait_for_each_other_the_second_is_faulted(
    closes: str, together: bool
) -> None:
    """Whichever comes second, also in the same batch: its commit is refused, the first wakes."""
    # Hard scenario: wait cycles.
    world = World()
    ids: dict[str, int] = {}
    go = {"A": trio.Event(), "B": trio.Event()}
    first = "B" if closes == "A" else "A"
    world.scripts.update(A=waits_on(ids, "B", go["A"]), B=waits_on(ids, "A", go["B"]))
    async with world.open() as rt, trio.open_nursery() as nursery:
        for name in "AB":
            ids[name] = await world.create(name)
        await world.quiet()
        if together:
            world.blocking.hold()
            nursery.start_soon(rt.commit, lambda tx: tx.append(1, {}, kind="note"))
            await world.quiet()
        go[first].set()
        await world.quiet()
        go[closes].set()
        await world.quiet()
        world.blocking.release()
        outcome = await world.end(ids[closes])
        assert (await world.end(ids[first])).result == "woken"
        assert rt.session.line.poison is None
    assert outcome.status == "faulted"
    assert outcome.error is not None
    assert "WaitCycleError" in outcome.error.type
    path = f"{ids[closes]} test.actor -> {ids[first]} test.actor -> {ids[closes]}"
    assert path in outcome.error.message
    assert f"{closes} next 1" not in world.log


@pytest.mark.parametrize("closes", ["leaf", "outside"])
@pytest.mark.parametrize("holds", ["completing", "waiting", "running"])
async def test_a_cycle_through_what_is_owned_is_refused_whichever_wait_closes_it(
    closes: str, holds: str
) -> None:
    """A leaf waits for a stranger, who waits for the owner over the leaf: held, parked, running."""
    # Hard scenario: wait cycles.
    world = World()
    ids: dict[str, int] = {}
    go = {"leaf": trio.Event(), "outside": trio.Event()}
    first = "outside" if closes == "leaf" else "leaf"

    async def owner(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("after the leaf")
            return
        leaf = await ctx.create_task(Actor, "leaf", key="leaf")
        if holds == "completing":
            await ctx.complete("held")
        elif holds == "waiting":
            await ctx.wait(then=Next(1), on=[leaf])
        else:
            await ctx.wait_for_task(leaf)
            await ctx.complete("after the leaf")

    world.scripts.update(
        leaf=waits_on(ids, "outside", go["leaf"]), outside=waits_on(ids, "owner", go["outside"])
    )
    async with world.open():
        ids["owner"] = await world.create("owner", owner)
        ids["outside"] = await world.create("outside")
        await world.quiet()
        ids["leaf"] = child_of(world, ids["owner"], "leaf")
        assert world.status(ids["owner"]) == holds
        go[first].set()
        await world.quiet()
        assert world.status(ids[first]) == "waiting"
        go[closes].set()
        outcome = await world.end(ids[closes])
        for name in ids:
            await world.end(ids[name])
    assert outcome.status == "faulted"
    assert outcome.error is not None
    assert "WaitCycleError" in outcome.error.type
    for name in ids:
        assert f"{ids[name]} test.actor" in outcome.error.message


async def test_a_refusal_that_is_caught_faults_nobody_and_leaves_nothing() -> None:
    """The refused commit stores none of its other writes, and the handler may decide otherwise."""
    # Hard scenario: wait cycles.
    world = World()
    ids: dict[str, int] = {}
    go = trio.Event()

    async def other(at: Any, ctx: Any) -> None:
        await go.wait()
        with pytest.raises(WaitCycleError):  # noqa: PT012
            async with ctx.commit() as tx:
                tx.append(1, "never", kind="note")
                tx.wait(then=Next(1), on=[ids["A"]])
        await ctx.complete("without it")

    ready = trio.Event()
    ready.set()
    async with world.open() as rt:
        ids["B"] = await world.create("B", other)
        ids["A"] = await world.create("A", waits_on(ids, "B", ready))
        await world.quiet()
        go.set()
        assert (await world.end(ids["B"])).result == "without it"
        assert (await world.end(ids["A"])).result == "woken"
        assert rt.session.storage.entries(1) == []


async def test_a_background_task_may_wait_for_any_owner_above_its_conversation() -> None:
    """No owner needs it, so neither the nearest nor the topmost one makes a cycle."""
    # Hard scenario: wait cycles.
    world = World()
    ids: dict[str, int] = {}
    go = trio.Event()

    async def background(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), on=[ids["top"], ids["mid"]])
        else:
            await ctx.complete(str(ctx.woken_by))

    async def mid(at: Any, ctx: Any) -> None:
        ids["mid"] = ctx.task_id
        async with ctx.commit() as tx:
            owned = tx.create_conversation(key="own")
            ids["background"] = tx.create_task(
                Actor, "background", conversation=owned, background=True
            )
        await go.wait()
        await ctx.complete("")

    async def top(at: Any, ctx: Any) -> None:
        ids["top"] = ctx.task_id
        await ctx.create_task(Actor, "mid")
        await ctx.complete("held")

    world.scripts.update(background=background, mid=mid)
    async with world.open():
        await world.create("top", top)
        await world.quiet()
        assert world.status(ids["background"]) == "waiting"
        go.set()
        assert (await world.end(ids["background"])).result == "tasks"


async def test_a_wait_that_another_condition_can_end_closes_no_cycle() -> None:
    """With signals (or a deadline) it is no edge, on either side of the cycle."""
    world = World()
    ids: dict[str, int] = {}

    def waiting(name: str, *, signals: bool) -> Any:
        async def script(at: Any, ctx: Any) -> None:
            if isinstance(at, Start):
                while name not in ids:
                    await trio.lowlevel.checkpoint()
                await ctx.wait(then=Next(1), on=[ids[name]], signals=signals)
            else:
                await ctx.complete(str(ctx.woken_by))

        return script

    async with world.open():
        ids["A"] = await world.create("A", waiting("B", signals=True))
        ids["B"] = await world.create("B", waiting("A", signals=False))
        await world.quiet()
        assert [world.status(ids[name]) for name in "AB"] == ["waiting", "waiting"]
        await world.signal(ids["A"])
        assert (await world.end(ids["A"])).result == "signal"
        assert (await world.end(ids["B"])).result == "tasks"
        assert (await world.end(await world.create("C", done))).result == "C"


async def test_of_two_that_wait_for_each_other_in_memory_the_second_is_told() -> None:
    """A wait held by an invocation is an edge on both of its sides, and leaves nothing behind."""
    # Hard scenario: wait cycles.
    world = World()
    ids: dict[str, int] = {}
    told: list[str] = []
    go = {"A": trio.Event(), "B": trio.Event()}

    def waits_for(name: str) -> Any:
        async def script(at: Any, ctx: Any) -> None:
            await go[ctx.input].wait()
            try:
                await ctx.wait_for_task(ids[name])
            except WaitCycleError as error:
                told.append(error.path)
            await ctx.complete("")

        return script

    async with world.open() as rt:
        ids["A"] = await world.create("A", waits_for("B"))
        ids["B"] = await world.create("B", waits_for("A"))
        for event in go.values():
            event.set()
            await world.quiet()
        for id in ids.values():
            assert (await world.end(id)).status == "completed"
        assert not rt.cycles._held_by
        assert not rt.cycles._held_on
    assert told == [f"{ids['B']} test.actor -> {ids['A']} test.actor -> {ids['B']}"]
