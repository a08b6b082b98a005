"""Who runs when: limits by kind and in all, lent slots, and turns between conversations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio
from worlds import ROOT, Actor, Next, Other, Start, World, done, forever, parent_of

from pidurable.testing import Fault


class Meter:
    """A script that counts how many of its kind run at once, and ends when it is let go."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.order: list[str] = []
        self.ticket = trio.Semaphore(0)

    async def __call__(self, at: Any, ctx: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        self.order.append(ctx.input)
        try:
            await self.ticket.acquire()
        finally:
            self.now -= 1
        await ctx.complete("")


async def test_a_kind_runs_at_most_as_many_as_its_limit_and_others_are_free() -> None:
    """The limit holds for its kind alone, and every ready task gets its turn."""
    world = World(limits={"test.actor": 2})
    meter = Meter()
    other = Meter()
    async with world.open():
        ids = [await world.create(f"a{n}", meter) for n in range(6)]
        more = [await world.create(f"o{n}", other, kind=Other) for n in range(3)]
        await world.quiet()
        assert (meter.now, other.now) == (2, 3)
        for _ in range(9):
            meter.ticket.release()
            other.ticket.release()
            await world.quiet()
        for id in ids + more:
            assert (await world.end(id)).status == "completed"
    assert meter.most == 2
    # The first two start together, in an order that is nobody's business.
    assert sorted(meter.order[:2]) + meter.order[2:] == [f"a{n}" for n in range(6)]


async def test_kinds_share_the_total_and_none_is_forgotten() -> None:
    """With running_max used up, a slot of one kind that becomes free serves another kind too."""
    world = World(running_max=1)
    meter = Meter()
    async with world.open():
        ids = [
            await world.create(f"{kind.name} {n}", meter, kind=kind)
            for n in range(3)
            for kind in (Actor, Other)
        ]
        for _ in ids:
            await world.quiet()
            assert meter.now == 1
            meter.ticket.release()
        for id in ids:
            await world.end(id)
    assert meter.most == 1


@pytest.mark.parametrize("limit", [{"running_max": 1}, {"limits": {"test.actor": 1}}])
async def test_a_tree_never_starves_itself(limit: Any) -> None:
    """A running task with live owned work holds no slot, so one slot serves a tree of any depth."""
    # C026
    world = World(**limit)
    running = 0
    most = 0

    async def leaf(at: Any, ctx: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.lowlevel.checkpoint()
        running -= 1
        await ctx.complete("")

    def holding(*children: str) -> Any:
        async def script(at: Any, ctx: Any) -> None:
            ids = [await ctx.create_task(Actor, name, key=name) for name in children]
            for id in ids:
                await ctx.wait_for_task(id)
            await ctx.complete("")

        return script

    world.scripts.update(
        {"leaf 1": leaf, "leaf 2": leaf, "leaf 3": leaf, "mid": holding("leaf 1", "leaf 2")}
    )
    async with world.open() as rt:
        top = await world.create("top", holding("mid", "leaf 3"))
        assert (await world.end(top)).status == "completed"
        await world.quiet()
        assert not rt.scheduler._held_slots
        assert not +rt.scheduler._slots
        assert rt.scheduler._promised.taken == 0
    assert most == 1


async def test_a_parked_parent_holds_no_slot() -> None:
    """With one slot, a parent that waits durably lets its children run."""
    world = World(running_max=1)
    world.scripts.update(one=done, two=done)
    async with world.open():
        assert (await world.end(await world.create("p", parent_of("one", "two")))).result == (
            "completed,completed"
        )


async def test_an_abort_handler_needs_no_slot() -> None:
    """A full kind does not keep the abort of one of its tasks from running."""
    world = World(limits={"test.actor": 1})
    async with world.open():
        runs = await world.create("runs", forever)
        await world.quiet()
        waits = await world.create("waits", forever)
        await world.quiet()
        await world.abort(runs)
        assert (await world.end(runs)).status == "aborted"
        await world.quiet()
        assert sorted(world.log) == ["runs abort", "runs start", "waits start"]
        await world.abort(waits)


async def test_a_slot_that_was_planned_and_not_used_serves_the_next() -> None:
    """A reservation that a mark overtakes gives its slot to who is ready behind it."""
    world = World(limits={"test.actor": 1})
    world.scripts.update(first=forever, second=done)
    async with world.open() as rt, trio.open_nursery() as nursery:
        # The creation passes; the next batch, which reserves the first, stays in the storage.
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        first, second = await rt.commit(
            lambda tx: [
                tx.create_task(Actor, name, conversation=ROOT) for name in ("first", "second")
            ]
        )
        await world.quiet()
        nursery.start_soon(world.abort, first)
        await world.quiet()
        world.blocking.release()
        assert (await world.end(second)).status == "completed"
        assert (await world.end(first)).status == "aborted"
    assert "first start" not in world.log


async def test_a_slot_that_was_planned_and_is_not_needed_any_more_serves_the_next() -> None:
    """Work that comes to be below a task while it is being reserved has its slot serve others."""
    world, over = World(limits={"test.actor": 1}), trio.Event()
    world.scripts.update(other=done, below=done)

    async def waits(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                tx.create_conversation(key="its own")
                tx.wait(then=Next(1), signals=True)
        else:
            await trio.sleep_forever()

    async def first(at: Any, ctx: Any) -> None:
        await over.wait()
        await ctx.complete("")

    async with world.open() as rt, trio.open_nursery() as nursery:
        top = await world.create("top", waits)
        await world.quiet()
        (own,) = rt.session.storage.conversations_by_owner(top)
        await world.create("first", first)
        await world.quiet()
        await world.signal(top)
        await world.quiet()
        await world.create("other")
        await world.quiet()
        # The end of the first passes; the next batch, which reserves, stays in the storage.
        world.storage.add(Fault.call(world.blocking.hold, "apply", after=True))
        over.set()
        await world.quiet()
        nursery.start_soon(
            rt.commit, lambda tx: tx.create_task(Actor, "below", conversation=own.id)
        )
        await world.quiet()
        world.blocking.release()
        await world.quiet()

        assert world.log[2:] == ["top next 1", "other start", "below start"]
        assert rt.scheduler._promised.taken == 0
        await world.abort(top)


async def test_one_fan_out_does_not_starve_its_neighbours() -> None:
    """Within a kind, ready tasks rotate by top-level conversation, first ready first in each."""
    world = World(limits={"test.actor": 1})
    meter = Meter()
    async with world.open() as rt:
        world.scripts.update({f"a{n}": meter for n in range(5)} | {"b0": meter, "b1": meter})

        def crowd(tx: Any) -> None:
            other = tx.create_conversation()
            for n in range(5):
                tx.create_task(Actor, f"a{n}", conversation=ROOT)
            for n in range(2):
                tx.create_task(Actor, f"b{n}", conversation=other)

        await rt.commit(crowd)
        for _ in range(7):
            await world.quiet()
            meter.ticket.release()
        await rt.wait_for_idle()
    assert meter.order == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


async def test_a_thousand_kicks_cost_one_pass() -> None:
    """Kicking sets a flag; nothing is written for a kick that finds nothing."""
    world = World()
    async with world.open() as rt:
        await world.quiet()
        before = world.storage.count("apply")
        for _ in range(1_000):
            rt.scheduler.kick()
        await world.quiet()
        assert world.storage.count("apply") == before


async def test_a_commit_of_one_task_touches_only_what_changed() -> None:
    """With many tasks live, one more costs the same rows as the first one did."""
    world = World()
    rows: Counter[str] = Counter()
    async with world.open() as rt:

        async def cost(name: str) -> int:
            writes: list[int] = []
            original = world.storage._inner.apply

            def counting(batch: Any) -> None:
                writes.append(len(batch.writes))
                original(batch)

            world.storage._inner.apply = counting  # type: ignore[method-assign]
            await world.end(await world.create(name, done))
            world.storage._inner.apply = original  # type: ignore[method-assign]
            return sum(writes)

        rows["few"] = await cost("first")
        for n in range(100):
            await world.create(f"f{n}", forever)
        await world.quiet()
        rows["many"] = await cost("last")
        await rt.commit(lambda tx: None)
    assert rows["few"] == rows["many"]
