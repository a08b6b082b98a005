"""What tasks go on with after a short wait is at hand, and is never anything but what is stored."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import Actor, Next, Start, World, done, parent_of

from pidurable.tasks import _at_hand

READS = ("task", "task_input", "task_checkpoint", "task_memos", "task_outcome", "task_starts")


def reads(world: World) -> dict[str, int]:
    return {name: world.storage.count(name) for name in READS if world.storage.count(name)}


async def test_a_wait_within_one_process_reads_nothing_of_the_tasks() -> None:
    """Neither to be woken with its memos, nor for the outcome that it waited for."""
    world = World()
    world.scripts["a"] = done

    async def waits(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.memo("chosen", "first")
            kid = await ctx.create_task(Actor, "a", key="a")
            await ctx.wait(then=Next(kid), on=[kid])
            return
        (outcome,) = await ctx.outcomes([at.n])
        await ctx.complete(f"{outcome.result} {await ctx.memo('chosen', 'second')}")

    async with world.open():
        task = await world.create("waits", waits)
        assert (await world.end(task)).result == "a first"
        assert reads(world) == {}


@pytest.mark.parametrize("kept", [0, 1, 1_000])
async def test_what_is_not_at_hand_any_more_is_read(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Many wait at once, more than are kept: each goes on with its own, either way."""
    monkeypatch.setattr(_at_hand, "_TASKS_KEPT", kept)
    world = World()
    world.scripts |= {"a": done, "b": done}

    async def waits(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(int(ctx.input)), signals=True)
            return
        await ctx.complete(f"{ctx.input} {at.n}")

    async with world.open():
        tasks = [await world.create(str(number), waits) for number in range(5)]
        await world.quiet()
        for task in tasks:
            await world.signal(task)
        results = [(await world.end(task)).result for task in tasks]
        parent = await world.create("parent", parent_of("a", "b"))
        assert (await world.end(parent)).result == "completed,completed"
        were_read = world.storage.count("task_checkpoint")
    assert results == [f"{number} {number}" for number in range(5)]
    assert (were_read == 0) is (kept == 1_000)


async def test_long_texts_are_read() -> None:
    """A large input, checkpoint or result is not kept in memory while its task waits."""
    world = World()
    long = "x" * _at_hand._CHARACTERS_KEPT

    async def says_much(at: Any, ctx: Any) -> None:
        await ctx.complete(long)

    world.scripts["kid"] = says_much

    async def waits(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.memo("long", long)
            kid = await ctx.create_task(Actor, "kid", key="kid")
            await ctx.wait(then=Next(kid), on=[kid])
            return
        (outcome,) = await ctx.outcomes([at.n])
        same = outcome.result == await ctx.memo("long", "") == long
        await ctx.complete(str(same))

    async with world.open():
        task = await world.create("waits", waits)
        assert (await world.end(task)).result == "True"
        assert world.storage.count("task_memos") == 1
        assert world.storage.count("task_outcome") == 1


class Newer(Actor):
    """The next version, which moves every task ten steps on."""

    version = 2

    def migrate(self, input: Any, checkpoint: Any, from_version: int) -> Any:
        return input, {"phase": "next", "value": {"n": checkpoint["value"]["n"] + 10}}


async def test_a_task_that_was_migrated_goes_on_with_what_the_migration_made() -> None:
    """And not with what it had parked at under the old version."""
    world = World(Actor)

    async def waits(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), signals=True)
            return
        await ctx.complete(str(at.n))

    async with world.open() as rt:
        task = await world.create("waits", waits)
        await world.quiet()
        world.install(Newer)
        await rt.definitions_changed()
        await world.signal(task)
        assert (await world.end(task)).result == "11"
