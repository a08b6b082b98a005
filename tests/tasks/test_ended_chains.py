"""Ended tasks are transparent: long chains of them are walked once, and then cost nothing."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from recount import check_tree
from seeded import Seed, plant, unwatched
from worlds import ROOT, Actor, Next, World, done, forever

from pidurable.tasks._index import Index

FIRST = 2


def chain_of(ended: int) -> list[Seed]:
    """A live task over so many ended ones, each owned by the one before."""
    chain = [Seed(id=FIRST, name="top")]
    for level in range(1, ended + 1):
        owner = FIRST + level - 1
        chain.append(
            Seed(id=FIRST + level, name=f"{level}", owner=owner, held="completed", ended=True)
        )
    return chain


@pytest.mark.slow
async def test_a_long_chain_of_ended_tasks_is_walked_once(slow_run: bool) -> None:
    """New work below an old chain holds the live task above it; only the first costs the walk."""
    # Hard scenario: old chain revived.
    ended = 20_000 if slow_run else 5_000
    below = FIRST + ended + 1
    world = World()
    plant(world, chain_of(ended), owned=[(below, FIRST + ended)])
    world.scripts.update(top=done, first=forever, second=forever)
    async with world.open(start=False) as rt:
        unwatched(world)
        reads = world.storage.count("task")
        first = await world.create("first", conversation=below)
        walked = world.storage.count("task") - reads
        assert ended <= walked <= ended + 10
        second = await world.create("second", conversation=below)
        await world.quiet()
        assert world.storage.count("task") - reads - walked < 10
        # The live task above holds its outcome for them, and its abort reaches them.
        assert world.status(FIRST) == "completing"
        await world.abort(first)
        await world.quiet()
        assert (world.outcome(first), world.status(FIRST)) == ("aborted", "completing")
        check_tree(rt, world.base)
        await world.abort(FIRST)
        await world.end(FIRST)
        assert (world.outcome(FIRST), world.outcome(second)) == ("completed", "aborted")
        assert set(rt.published.nodes) == set()


async def test_ends_above_background_work_hand_it_up_and_move_the_smaller_part() -> None:
    """Owners that end one after the other leave each child moved a logarithmic number of times."""
    owners, each = 64, 8
    world = World()
    moved: list[int] = []
    hand_up = Index._hand_up

    def counted(self: Index, ended: Any) -> None:
        mine = self.children.get(ended.id)
        above = self.published.find_above(ended)
        if mine is not None and above is not None:
            moved.append(min(len(mine), len(self.children.get(above.id, ()))))
        hand_up(self, ended)

    gates = [trio.Event() for _ in range(owners)]

    async def level(at: Any, ctx: Any) -> None:
        number = int(ctx.input)
        async with ctx.commit() as tx:
            for _ in range(each):
                own = tx.create_conversation()
                tx.create_task(Actor, "behind", conversation=own, background=True)
            if number + 1 < owners:
                tx.create_task(Actor, f"{number + 1}")
            tx.goto(Next())
        await gates[number].wait()
        await ctx.complete("")

    world.scripts.update({f"{n}": level for n in range(owners)}, behind=forever)
    Index._hand_up = counted
    try:
        async with world.open() as rt:
            unwatched(world)
            top = await world.create("0")
            await world.quiet()
            for gate in reversed(gates):
                gate.set()
                await world.quiet()
            await world.end(top)
            check_tree(rt, world.base)
            assert rt.published.nodes[ROOT].below_all == owners * each
    finally:
        Index._hand_up = hand_up
    # Each child is moved when its part is the smaller one, which then at least doubles.
    assert sum(moved) <= owners * each * 10
