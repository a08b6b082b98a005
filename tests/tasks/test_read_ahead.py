"""What many tasks begin with after a restart is read at once, and nothing is different for that."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from worlds import Next, Start, World

from pidurable.errors import SessionPoisonedError
from pidurable.testing import Fault

TASKS = 40


def world_of_many(ended: list[str]) -> World:
    """Tasks that note something, go on once, and then stay until their process dies."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.memo("first", ctx.input)
            await ctx.goto(Next(int(ctx.input)))
        elif ended:
            memo = await ctx.memo("first", "another")
            await ctx.complete(f"{ctx.input} {at.n} {memo}")
        else:
            await trio.sleep_forever()

    world.scripts.update({str(number): script for number in range(TASKS)})
    return world


async def crash(world: World) -> list[int]:
    """Run all of them to their second phase, and kill the process there."""
    async with world.crashing():
        ids = [await world.create(str(number)) for number in range(TASKS)]
        await world.quiet()
    return ids


@pytest.mark.parametrize("broken", [False, True])
async def test_many_tasks_go_on_where_they_were(autojump_clock: Any, broken: bool) -> None:
    """Each with its own checkpoint, input and memos; also if reading them at once fails."""
    ended: list[str] = []
    world = world_of_many(ended)
    ids = await crash(world)
    ended.append("from now on")
    faults = [Fault.fail("task_starts", times=9)] if broken else []
    async with world.open(faults=faults):
        results = [(await world.end(id)).result for id in ids]
        one_by_one = world.storage.count("task_checkpoint")
    assert results == [f"{number} {number} {number}" for number in range(TASKS)]
    assert one_by_one == (TASKS if broken else 0)


async def test_a_task_that_cannot_be_read_is_named_alone(autojump_clock: Any) -> None:
    """One without its checkpoint is blocked; the others, read in the same go, run."""
    ended: list[str] = []
    world = world_of_many(ended)
    ids = await crash(world)
    ended.append("from now on")
    del world.base.reopen()._data.checkpoints[ids[3]]
    async with world.open():
        for id in ids[:3] + ids[4:]:
            assert (await world.end(id)).status == "completed"
        assert world.row(ids[3]).blocked == "checkpoint_unreadable"


async def test_nothing_begins_if_the_session_is_poisoned_while_it_is_read(
    autojump_clock: Any,
) -> None:
    """What was reserved is left to whoever opens the session next."""
    ended: list[str] = []
    world = world_of_many(ended)
    await crash(world)
    world.log.clear()
    read = world.blocking.run
    at_once = 0

    async def poisoned_meanwhile(fn: Any, *args: Any) -> Any:
        nonlocal at_once
        if fn == world.rt.session.storage.task_starts:
            at_once = len(args[0])
            poison = SessionPoisonedError("world", "another holder has it")
            world.rt.session.line.set_poison(poison)
        return await read(fn, *args)

    world.blocking.run = poisoned_meanwhile  # type: ignore[method-assign]
    async with world.crashing():
        await world.quiet()
    assert at_once == TASKS
    assert world.log == []
