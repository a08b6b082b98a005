"""Collections one after the other beside trees that grow, wait for each other and are forked."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import trio
from gc_stores import UNSHRUNK, check_owners, everything
from hypothesis import given, settings, strategies as st
from recount import check_tree
from trio.testing import MockClock
from worlds import ROOT, Actor, Next, Other, Start, World

from pidurable.errors import NotFoundError, UnknownTaskError, WaitCycleError
from pidurable.storage import RecordKind
from pidurable.tasks import _gc
from pidurable.tasks._gc import Collector

ROOTS = 12


class Forest:
    """What the scripts do, drawn from a seed; what they count on has to be there."""

    def __init__(self, world: World, seed: int) -> None:
        self.draw = random.Random(seed)
        self.world = world
        self.tasks: list[int] = []
        self.conversations: list[int] = [ROOT]
        self.met = dict.fromkeys(("waited", "gone", "forked", "fork gone"), 0)
        self.errors: list[BaseException] = []
        for script in (self.leaf, self.grow, self.watch, self.fork):
            world.scripts[script.__name__] = self.noting(script)

    def noting(self, script: Any) -> Any:
        """A script whose errors are kept: its task may be gone when somebody looks."""

        async def noted(at: Any, ctx: Any) -> None:
            try:
                await script(at, ctx)
            except Exception as error:
                self.errors.append(error)
                raise

        return noted

    async def leaf(self, at: Any, ctx: Any) -> None:
        await trio.sleep(self.draw.random())
        async with ctx.commit() as tx:
            tx.append(ctx.conversation_id, {"by": int(ctx.task_id)}, kind="note")
            tx.complete("leaf")

    async def grow(self, at: Any, ctx: Any) -> None:
        draw = self.draw
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                place = tx.create_conversation(key="inner")
                ids = [tx.create_task(Actor, "leaf") for _ in range(draw.randint(0, 2))]
                for _ in range(draw.randint(0, 2)):
                    name = draw.choice(("leaf", "leaf", "leaf", "grow", "fork"))
                    ids.append(tx.create_task(Actor, name, conversation=place))
                tx.wait(on=ids, then=Next(1))
            self.tasks += map(int, ids)
            self.conversations.append(place)
            return
        # What was created is below this task, so it is there as long as this task is.
        owned = await ctx.outcomes(list(ctx.snapshot.keyed_tasks().values()))
        assert all(outcome.status == "completed" for outcome in owned)
        await ctx.complete("grown")

    async def watch(self, at: Any, ctx: Any) -> None:
        """Wait for something of another tree, and look at it when it is there."""
        if isinstance(at, Start):
            await trio.sleep(self.draw.random() * 3)
            wanted = self.draw.choice(self.tasks or [int(ctx.task_id) + 10**6])
            try:
                async with ctx.commit() as tx:
                    tx.wait(on=[wanted], then=Next(wanted))
            except WaitCycleError:
                await ctx.complete("waits for this")
                return
            except UnknownTaskError:
                self.met["gone"] += 1
                await ctx.complete("gone")
            return
        self.met["waited"] += 1
        (outcome,) = await ctx.outcomes([at.n])
        assert outcome.status == "completed"
        await ctx.complete("seen")

    async def fork(self, at: Any, ctx: Any) -> None:
        """Fork a conversation of another tree, and read its history while it lasts."""
        await trio.sleep(self.draw.random() * 3)
        parent = self.draw.choice(self.conversations)
        try:
            async with ctx.commit() as tx:
                made = tx.fork(parent, key="fork")
        except NotFoundError:
            self.met["fork gone"] += 1
            await ctx.complete("gone")
            return
        self.met["forked"] += 1
        await trio.sleep(1)
        history = await ctx.snapshot.history(made)
        async with ctx.commit() as tx:
            tx.append(made, {"after": len(history)}, kind="note")
        assert len(await ctx.snapshot.history(made)) == len(history) + 1
        await ctx.complete("forked")


async def play(seed: int) -> dict[str, int]:
    world = World()
    forest = Forest(world, seed)
    draw = forest.draw
    trees = 0
    async with world.open() as rt:
        collector = Collector(rt)
        over = False

        async def collect() -> None:
            nonlocal trees
            while not over:
                report = await collector.collect(timedelta(0), keep=False, dry_run=False)
                trees += report.trees
                check_owners(world.base.reopen())
                await trio.sleep(draw.random() / 2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            for number in range(ROOTS):
                name = draw.choice(("grow", "grow", "watch", "fork"))
                key = f"root {number}" if draw.random() < 0.5 else None
                forest.tasks.append(int(await world.create(name, key=key)))
                await trio.sleep(draw.random())
            await rt.wait_for_idle()
            await trio.sleep(2)
            over = True
        assert forest.errors == []
        await trio.sleep(1)
        trees += (await collector.collect(timedelta(0), keep=False, dry_run=False)).trees
        check_tree(rt, world.base)
        assert trees == ROOTS
        assert not rt.session.removals.any
    left = everything(world.base.reopen())
    assert [row[0] for row in left[RecordKind.CONVERSATION]] == [ROOT]
    for kind in (RecordKind.TASK, RecordKind.INPUT, RecordKind.OUTCOME, RecordKind.CHECKPOINT):
        assert left[kind] == []
    return {**forest.met, "trees": trees}


@given(st.integers(0, 2**32), st.sampled_from([5, 500]))
@settings(max_examples=3, phases=UNSHRUNK)
def test_work_beside_collections_finds_what_it_counts_on(seed: int, records_max: int) -> None:
    """What somebody waits for, or has forked, is there; in the end all that has ended is gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gc, "PASS_RECORDS_MAX", records_max)
        trio.run(play, seed, clock=MockClock(autojump_threshold=0))


async def test_what_a_task_was_woken_for_stays_until_it_has_gone_on(
    autojump_clock: MockClock,
) -> None:
    """A woken task may have to wait for a free slot, or for its process: what it comes to is there.

    Its wait is over, so nothing but its own checkpoint says what it will look at.
    """
    world = World(limits={"test.other": 1})
    free = trio.Event()

    async def leaf(at: Any, ctx: Any) -> None:
        await trio.sleep(1)
        await ctx.complete("leaf")

    async def hog(at: Any, ctx: Any) -> None:
        await free.wait()
        await ctx.complete("hog")

    async def watch(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                tx.wait(on=[first], then=Next(first))
        else:
            (outcome,) = await ctx.outcomes([at.n])
            await ctx.complete(outcome.status)

    async with world.open() as rt:
        first = int(await world.create("leaf", leaf))
        second = await world.create("watch", watch, kind=Other)
        await trio.sleep(0.5)
        await world.create("hog", hog, kind=Other)
        await trio.sleep(1)
        looked = [
            await Collector(rt).collect(timedelta(0), keep=False, dry_run=dry_run)
            for dry_run in (True, False)
        ]
        free.set()
        outcome = await rt.wait_for_task(second)
        await trio.sleep(1)
        at_last = await Collector(rt).collect(timedelta(0), keep=False, dry_run=False)

    assert [(report.trees, report.kept["awaited"]) for report in looked] == [(0, 1), (0, 1)]
    assert outcome.result == "completed"
    assert at_last.trees == 3
