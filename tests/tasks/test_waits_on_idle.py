"""Durable waits for the idleness of conversations, and for what upper layers settle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import trio
from worlds import ROOT, Actor, Next, Start, World, done, end_aborted, forever

from pidurable.errors import InvalidArgumentError, UnknownTaskError, WaitCycleError
from pidurable.tasks._runtime import Runtime
from pidurable.tasks._tree import Node
from pidurable.tasks._tree_transaction import TreeTransaction


def waiting_on(*ids: int, **how: Any) -> Any:
    """A script that parks on these ids, then completes with what woke it."""

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), on=ids, **how)
        else:
            await ctx.complete(str(ctx.woken_by))

    return script


async def conversation(world: World) -> int:
    """Another ownerless conversation."""
    made: int = await world.rt.commit(lambda tx: tx.create_conversation())
    return made


def gated(gate: trio.Event) -> Any:
    async def script(at: Any, ctx: Any) -> None:
        await gate.wait()
        await ctx.complete("")

    return script


async def test_a_waiter_wakes_when_a_conversation_becomes_idle() -> None:
    """It is parked while ordinary work is live there, however deep, and not for background work."""
    world = World()
    gate = trio.Event()

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            inner = tx.create_conversation(key="inner")
            tx.create_task(Actor, "leaf", conversation=inner)
        await ctx.complete("held")

    world.scripts.update(leaf=gated(gate), background=forever)
    async with world.open() as rt:
        place = await conversation(world)
        await world.create("owner", owner, conversation=place)
        await world.create("background", conversation=place, background=True)
        await world.quiet()
        task = await world.create("w", waiting_on(place))
        await world.quiet()
        assert world.status(task) == "waiting"
        assert task not in rt.invocations
        gate.set()
        assert (await world.end(task)).result == "tasks"


async def test_an_idle_conversation_is_fine_and_counts_once() -> None:
    """What is idle already wakes at the next pass, named twice or beside an ended task."""
    world = World()
    async with world.open():
        place = await conversation(world)
        ended = await world.create("done", done, conversation=place)
        await world.end(ended)
        task = await world.create("w", waiting_on(place, ended, place))
        assert (await world.end(task)).result == "tasks"


async def test_work_made_in_the_commit_of_the_wait_counts() -> None:
    """A task that is created in a conversation and awaited through it, in one commit, is seen."""
    world = World()
    gate = trio.Event()
    world.scripts["leaf"] = gated(gate)

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("")
            return
        async with ctx.commit() as tx:
            own = tx.create_conversation(key="own")
            tx.create_task(Actor, "leaf", conversation=own)
            tx.wait(then=Next(1), on=[own])

    async with world.open():
        task = await world.create("w", script)
        await world.quiet()
        assert world.status(task) == "waiting"
        gate.set()
        assert (await world.end(task)).status == "completed"


async def test_a_conversation_that_is_busy_again_is_open_again() -> None:
    """All that is awaited must be there at one moment, with the same answer after a restart."""
    world = World()
    gates = [trio.Event() for _ in range(3)]
    for n, gate in enumerate(gates):
        world.scripts[f"leaf {n}"] = gated(gate)

    async with world.crashing():
        first, second = await conversation(world), await conversation(world)
        await world.create("leaf 0", conversation=first)
        await world.create("leaf 1", conversation=second)
        task = await world.create("w", waiting_on(first, second))
        await world.quiet()
        gates[0].set()
        await world.quiet()
        await world.create("leaf 2", conversation=first)
        gates[1].set()
        await world.quiet()
        assert world.status(task) == "waiting"
    async with world.open():
        await world.quiet()
        assert world.status(task) == "waiting"
        gates[2].set()
        assert (await world.end(task)).result == "tasks"


async def test_work_that_is_staged_before_the_pass_keeps_the_waiter_parked() -> None:
    """Idle as published and busy again by an earlier body of the pass's own batch is busy."""
    world = World()
    gates = [trio.Event(), trio.Event()]
    world.scripts.update({"leaf 0": gated(gates[0]), "leaf 1": gated(gates[1])})
    async with world.open() as rt:
        place = await conversation(world)
        await world.create("leaf 0", conversation=place)
        task = await world.create("w", waiting_on(place, signals=True))
        await world.quiet()
        kick = rt.scheduler.kick
        rt.scheduler.kick = lambda: None  # type: ignore[method-assign]
        gates[0].set()
        await world.quiet()
        assert list(rt.index.wakes) == [task]
        async with rt.open_commit() as tx:
            tx.create_task(Actor, "leaf 1", conversation=place)
            # The pass queues behind this body, and shares its batch.
            rt.scheduler.kick = kick  # type: ignore[method-assign]
            rt.scheduler.kick()
            for _ in range(5):
                await trio.lowlevel.checkpoint()
        await world.quiet()
        seen = (world.status(task), world.row(task).woken_by)
        assert seen == ("waiting", None)
        gates[1].set()
        assert (await world.end(task)).result == "tasks"


async def test_a_waiter_left_for_its_abort_handler_is_no_longer_counted() -> None:
    """An aborted waiter leaves its wait; the conversation's later changes are no matter to it."""
    world = World()
    gate = trio.Event()
    world.scripts["leaf"] = gated(gate)
    async with world.open() as rt:
        place = await conversation(world)
        await world.create("leaf", conversation=place)
        task = await world.create("w", waiting_on(place))
        await world.quiet()
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
        assert rt.index.waiters == {}
        gate.set()
        await world.quiet()
        assert world.log.count("w abort") == 1


async def test_a_policy_that_marks_takes_tasks_only() -> None:
    """fail_fast and first_success would abort the others, which a conversation is not."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("")
            return
        async with ctx.commit() as tx:
            own = tx.create_conversation(key="own")
            child = tx.create_task(Actor, "done", key="child")
            for policy in ("fail_fast", "first_success"):
                with pytest.raises(InvalidArgumentError, match=f"{own} is a conversation. Use all"):
                    tx.wait(then=Next(1), on=[child, own], policy=policy)
            tx.wait(then=Next(1), on=[child, own])

    world.scripts["done"] = done
    async with world.open():
        assert (await world.end(await world.create("w", script))).status == "completed"


async def test_an_id_of_nothing_that_ends_is_refused() -> None:
    """Unknown ids, ids of entries and what is no id at all: refused, and the task goes on."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            entry = tx.append(ROOT, {"a": 1}, kind="test.entry")
        for id in (entry, 10**6, 2**70, -1, "1", True):
            with pytest.raises(UnknownTaskError):
                await ctx.wait(then=Next(1), on=[id])
        with pytest.raises(UnknownTaskError, match="no conversation and no submission either"):
            await ctx.wait(then=Next(1), on=[entry])
        await ctx.complete("")

    async with world.open():
        assert (await world.end(await world.create("w", script))).status == "completed"


# --- cycles -----------------------------------------------------------------------------------


async def test_nobody_waits_for_the_idleness_that_it_keeps_away_itself() -> None:
    """Neither a task of the conversation, nor one of a conversation owned below it."""
    world = World()
    paths: list[str] = []

    async def refused(at: Any, ctx: Any) -> None:
        with pytest.raises(WaitCycleError) as caught:
            await ctx.wait(then=Next(1), on=[ROOT])
        paths.append(caught.value.path)
        await ctx.complete("")

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            inner = tx.create_conversation(key="inner")
            tx.create_task(Actor, "refused", conversation=inner)
        await ctx.complete("")

    world.scripts["refused"] = refused
    async with world.open():
        direct = await world.create("refused")
        await world.end(direct)
        above = await world.create("owner", owner)
        await world.end(above)
        below = max(row.id for row in world.rows())
    assert paths == [
        f"{direct} test.actor -> {ROOT} conversation -> {direct}",
        f"{below} test.actor -> {ROOT} conversation -> {above} test.actor -> {below}",
    ]


async def test_a_background_task_may_wait_for_its_conversation_to_be_idle() -> None:
    """It does not keep it busy; nor does a wait with another way to wake close a cycle."""
    world = World()
    async with world.open():
        task = await world.create("w", waiting_on(ROOT), background=True)
        assert (await world.end(task)).result == "tasks"
        other = await world.create("v", waiting_on(ROOT, signals=True))
        await world.quiet()
        await world.signal(other)
        assert (await world.end(other)).result == "signal"


@pytest.mark.parametrize("last", ["task", "conversation"])
async def test_a_cycle_through_a_conversation_is_refused_whichever_wait_closes_it(
    last: str,
) -> None:
    """A waits for the conversation in which B waits for A: the second of the two is refused."""
    world = World()
    refusals: list[str] = []
    ids: dict[str, int] = {}
    turns = {"A": trio.Event(), "B": trio.Event()}

    def waits(name: str) -> Any:
        async def script(at: Any, ctx: Any) -> None:
            if isinstance(at, Next):
                await ctx.complete("")
                return
            await turns[name].wait()
            try:
                await ctx.wait(then=Next(1), on=[ids["place" if name == "A" else "A"]])
            except WaitCycleError as refused:
                refusals.append(refused.path)
                await ctx.complete("refused")

        return script

    async with world.open():
        ids["place"] = await conversation(world)
        ids["A"] = await world.create("A", waits("A"))
        ids["B"] = await world.create("B", waits("B"), conversation=ids["place"])
        for name in ("A", "B") if last == "task" else ("B", "A"):
            turns[name].set()
            await world.quiet()
        await world.end(ids["A"])
        await world.end(ids["B"])
    a, b, place = ids["A"], ids["B"], ids["place"]
    if last == "task":
        expected = f"{b} test.actor -> {a} test.actor -> {place} conversation -> {b}"
    else:
        expected = f"{a} test.actor -> {place} conversation -> {b} test.actor -> {a}"
    assert refusals == [expected]


async def test_a_wait_for_idle_held_in_memory_is_an_edge_while_it_lasts() -> None:
    """The code of a task that waits for idleness closes, and meets, cycles like a parked one."""
    world = World()
    go = trio.Event()

    async def in_memory(at: Any, ctx: Any) -> None:
        with pytest.raises(WaitCycleError):
            await world.rt.wait_for_idle(ROOT)
        await world.rt.wait_for_idle(place)
        await ctx.complete("")

    async def parked(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("")
            return
        await go.wait()
        with pytest.raises(WaitCycleError, match="conversation"):
            await ctx.wait(then=Next(1), on=[holder])
        await ctx.complete("")

    async with world.open() as rt:
        place = await conversation(world)
        task = await world.create("parked", parked, conversation=place)
        holder = await world.create("holder", in_memory)
        await world.quiet()
        go.set()
        assert (await world.end(task)).status == "completed"
        assert (await world.end(holder)).status == "completed"
        # The host's own wait is held by no task.
        await rt.wait_for_idle(ROOT)


# --- what upper layers settle -----------------------------------------------------------------


class Tickets:
    """Something that an upper layer keeps: settled with an entry that says so."""

    kind = "ticket"

    def __init__(self, runtime: Runtime, settled: set[int]) -> None:
        self.runtime = runtime
        self.settled = settled
        self.needed: dict[int, int] = {}
        runtime.kinds.add(self)
        runtime.session.participants.append(self)

    def is_open(self, id: int, tx: TreeTransaction | None) -> bool | None:
        return id not in self.settled if id >= 10**9 else None

    def was_settled(self, id: int) -> bool:
        return id in self.settled

    def needs(self, id: int, tx: TreeTransaction | None) -> Iterable[int]:
        return (self.needed[id],) if id in self.needed else ()

    def needed_by(self, task: Node, tx: TreeTransaction | None) -> Iterable[int]:
        return [id for id, needed in self.needed.items() if needed == task.id]

    async def settle(self, *ids: int) -> None:
        """Settle some in one commit."""
        await self.runtime.commit(lambda tx: tx.append(ROOT, list(ids), kind="test.settled"))

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None: ...

    def reverted(self) -> None: ...

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...

    def committed(self, tx: Any) -> None:
        for entry in tx.entries:
            if entry.kind == "test.settled":
                self.settled.update(entry.data)
                self.runtime.settled(entry.data)


ONE, TWO, THREE = range(10**9, 10**9 + 3)


async def test_a_waiter_wakes_when_the_last_of_what_others_keep_has_settled() -> None:
    """Each counts once, in whatever order they settle, and those that had settled are fine."""
    world = World()
    async with world.open() as rt:
        tickets = Tickets(rt, {THREE})
        task = await world.create("w", waiting_on(ONE, TWO, ONE, THREE))
        await world.quiet()
        assert world.status(task) == "waiting"
        await tickets.settle(ONE)
        await tickets.settle(ONE)
        await world.quiet()
        assert world.status(task) == "waiting"
        await tickets.settle(TWO)
        assert (await world.end(task)).result == "tasks"
        late = await world.create("late", waiting_on(ONE, TWO))
        assert (await world.end(late)).result == "tasks"


async def test_what_settled_without_being_told_is_found_when_the_session_opens() -> None:
    """The index evaluates anew; what nobody of this process keeps stays open."""
    world = World()
    async with world.crashing() as rt:
        settled: set[int] = set()
        Tickets(rt, settled)
        task = await world.create("w", waiting_on(ONE))
        await world.quiet()
    async with world.crashing():
        await world.quiet()
        assert world.status(task) == "waiting"
    settled.add(ONE)
    async with world.open() as rt:
        # As recovery does for kinds that were added before it.
        Tickets(rt, settled)
        assert rt.kinds.was_settled(ONE)
        rt.settled([ONE])
        assert (await world.end(task)).result == "tasks"


async def test_what_others_keep_may_need_a_task() -> None:
    """A ticket that needs the end of its waiter is refused, parked or in memory, with the path."""
    world = World()
    seen: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        tickets.needed[ONE] = int(ctx.task_id)
        with pytest.raises(WaitCycleError) as caught:
            await ctx.wait(then=Next(1), on=[ONE])
        seen.append(caught.value.path)
        await ctx.complete("")

    async def other(at: Any, ctx: Any) -> None:
        tickets.needed[TWO] = int(ctx.task_id)
        await go.wait()
        with pytest.raises(WaitCycleError) as caught:
            await ctx.wait(then=Next(1), on=[parked])
        seen.append(caught.value.path)
        await ctx.complete("")

    go = trio.Event()
    async with world.open() as rt:
        tickets = Tickets(rt, set())
        first = await world.create("first", script)
        await world.end(first)
        second = await world.create("second", other)
        await world.quiet()
        parked = await world.create("parked", waiting_on(TWO))
        await world.quiet()
        go.set()
        await world.end(second)
        await tickets.settle(TWO)
        await world.end(parked)
    assert seen == [
        f"{first} test.actor -> {ONE} ticket -> {first}",
        f"{second} test.actor -> {parked} test.actor -> {TWO} ticket -> {second}",
    ]


async def test_a_wait_in_memory_for_what_others_keep_is_an_edge_while_it_lasts() -> None:
    """Who parks on a task whose code waits for a ticket is refused where that needs its own end."""
    world = World()
    go, over = trio.Event(), trio.Event()

    async def holder(at: Any, ctx: Any) -> None:
        with world.rt.waits.holding(ONE, others=(ONE,)):
            await over.wait()
        with world.rt.waits.holding(TWO, others=(TWO,), bounded=True):
            assert world.rt.cycles.held_by(ctx.task_id) == ()
        await ctx.complete("")

    async def parking(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("")
            return
        tickets.needed[ONE] = int(ctx.task_id)
        await go.wait()
        with pytest.raises(WaitCycleError) as caught:
            await ctx.wait(then=Next(1), on=[held])
        assert caught.value.path == (
            f"{ctx.task_id} test.actor -> {held} test.actor -> {ONE} ticket -> {ctx.task_id}"
        )
        over.set()
        await world.quiet()
        await ctx.wait(then=Next(1), on=[held])

    async with world.open() as rt:
        tickets = Tickets(rt, set())
        parked = await world.create("parking", parking)
        await world.quiet()
        held = await world.create("holder", holder)
        await world.quiet()
        go.set()
        assert (await world.end(parked)).status == "completed"


async def test_a_damaged_list_of_what_is_awaited_takes_only_that_task_off() -> None:
    """A waiter whose stored wait names no possible id waits; the store opens all the same."""
    world = World()
    async with world.crashing() as rt:
        Tickets(rt, set())
        task = await world.create("w", waiting_on(ONE))
        await world.quiet()
    data = world.base.reopen()._data
    data.waits[task] = data.waits[task].replace(str(ONE), str(2**80))
    world.aborts["w"] = end_aborted
    async with world.open():
        await world.quiet()
        assert world.status(task) == "waiting"
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
