"""Tasks that the commits which make them ready reserve: what it saves, and what it may not change.

Every published commit and tree is checked by the world, as in all tests here. `plain` worlds have
no such kinds, so that what is saved is counted against them.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import trio
from worlds import (
    ROOT,
    Actor,
    Next,
    Other,
    Start,
    Watcher,
    World,
    child_of,
    done,
    forever,
    parent_of,
)

from pidurable.errors import SessionPoisonedError, StorageRefusedError
from pidurable.storage import Op, TaskRow
from pidurable.tasks._tree import PENDING, RUNNING
from pidurable.testing import Fault

KINDS = frozenset({"test.actor", "test.other"})


async def commits(world: World, kinds: frozenset[str]) -> int:
    """The commits of a parent that creates two children, waits for them and ends."""
    async with world.open() as rt:
        rt.at_once = kinds
        world.scripts |= {"a": done, "b": done}
        before = rt.session.line.published_seq
        id = await world.create("parent", parent_of("a", "b"))
        outcome = await world.end(id)
        assert outcome.result == "completed,completed"
        await world.quiet()
        return rt.session.line.published_seq - before


async def test_what_a_commit_makes_ready_is_reserved_by_it() -> None:
    """Each creation and each waking that leads to a start saves a commit of the scheduler."""
    plain = await commits(World(), frozenset())
    saved = await commits(World(), KINDS)

    # Create, wait with two children, two ends, and the end.
    assert saved == 5
    assert plain > saved


async def test_it_is_running_in_the_commit_that_creates_it_and_starts_once() -> None:
    """No state between is ever stored, and there is one invocation."""
    world = World()
    async with world.open() as rt:
        rt.at_once = KINDS
        world.blocking.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.create, "a", done)
            await world.quiet()
            assert world.log == []
            assert world.rows() == []
            world.blocking.release()
        await world.quiet()
        [row] = world.rows()
        assert (row.outcome_status, row.invocations) == ("completed", 1)
        assert world.log == ["a start"]


class Rows(Watcher):
    """Keeps what each commit writes of tasks themselves, beside what is stored then."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.of: list[list[tuple[Op, TaskRow]]] = []

    def committed(self, tx: Any) -> None:
        written = [(op, row) for op, row in tx.writes if op in (Op.TASK, Op.TASK_STATE)]
        self.of.append([(op, self.world.row(row.id)) for op, row in written])
        for op, row in written:
            assert op is Op.TASK_STATE or row == self.world.row(row.id)


async def test_a_task_is_stored_once_by_the_commit_that_creates_and_changes_it() -> None:
    """The row that is inserted is that of the end of the commit; later commits update it."""
    world = World()
    world.scripts.update(a=forever, b=forever)
    async with world.open() as rt:
        rt.at_once = KINDS
        rows = Rows(world)
        rt.session.participants.append(rows)

        def body(tx: Any) -> list[int]:
            made = [tx.create_task(Actor, name, conversation=ROOT) for name in "ab"]
            tx.abort_task(made[1], "no need")
            return made

        running, marked = await rt.commit(body)
        [(op, first), (other_op, second)] = rows.of[0]
        assert (op, other_op) == (Op.TASK, Op.TASK)
        assert (first.id, first.status, first.invocations) == (running, RUNNING, 1)
        assert (second.id, second.status, second.abort_reason) == (marked, PENDING, "no need")
        assert first.started_us is not None
        assert second.abort_us is not None
        assert (await world.end(marked)).status == "aborted"
        later = [op for each in rows.of[1:] for op, _ in each]
        assert later
        assert set(later) == {Op.TASK_STATE}


async def test_nobody_who_is_queued_is_overtaken() -> None:
    """While a task waits for a slot, new ones of another kind queue too, though theirs is free."""
    world = World(running_max=2, limits={"test.actor": 1})
    async with world.open() as rt:
        rt.at_once = KINDS
        first = await world.create("first", forever)
        await world.quiet()
        second = await world.create("second", done)
        third = await world.create("third", done, kind=Other)
        await world.quiet()
        assert world.status(second) == "pending"
        assert world.outcome(third) == "completed"
        await world.abort(first)
        assert (await world.end(second)).status == "completed"


async def test_no_slot_is_given_twice_within_a_batch() -> None:
    """Bodies that share a batch see the slots that those before them took."""
    world = World(limits={"test.actor": 2}, running_max=5)
    now = most = 0
    go = trio.Event()

    async def meter(at: Any, ctx: Any) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await go.wait()
        now -= 1
        await ctx.complete("")

    async with world.open() as rt:
        rt.at_once = KINDS
        world.blocking.hold()
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(world.create, f"a{number}", meter)
            await world.quiet()
            world.blocking.release()
        await world.quiet()
        assert now == 2
        go.set()
        await rt.wait_for_idle(ROOT)
    assert most == 2
    assert {row.outcome_status for row in world.rows()} == {"completed"}


async def test_a_refused_commit_gives_its_slots_back() -> None:
    """What it had reserved never starts, and others get the slots."""
    world = World(limits={"test.actor": 1}, storage_retry_seconds=0.0)
    async with world.open() as rt:
        rt.at_once = KINDS
        world.storage.add(Fault.refuse())
        with pytest.raises(StorageRefusedError):
            await world.create("refused", forever)
        id = await world.create("taken", done)
        assert (await world.end(id)).status == "completed"
        assert [line for line in world.log if line.startswith("refused")] == []


async def test_an_abort_that_queued_behind_the_reservation_lets_no_phase_begin() -> None:
    """The fence of the scheduler counts for what commits reserve as well."""
    world = World()
    async with world.open() as rt:
        rt.at_once = KINDS
        world.blocking.hold()
        made: list[int] = []

        async def create() -> None:
            made.append(await world.create("a", forever))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(create)
            await world.quiet()
            next_id = rt.session.line.next_id - 1
            nursery.start_soon(world.abort, next_id)
            await world.quiet()
            world.blocking.release()
        assert (await world.end(made[0])).status == "aborted"
        assert world.log == ["a abort"]


async def test_a_child_created_below_an_abort_is_not_reserved() -> None:
    """Whatever is below an intent to cancel is left to the pass, which marks it."""
    world = World()
    async with world.open() as rt:
        rt.at_once = KINDS

        made: list[int] = []

        async def owner(at: Any, ctx: Any) -> None:
            async with ctx.commit() as tx:
                made.append(tx.create_conversation())
                tx.goto(Next(1))
            await trio.sleep_forever()

        world.scripts |= {"owner": owner, "child": forever}
        id = await world.create("owner")
        await world.quiet()

        def body(tx: Any) -> None:
            tx.abort_task(id)
            tx.create_task(Actor, "child", conversation=made[0])

        await rt.commit(body)
        assert (await world.end(id)).status == "aborted"
        assert [line for line in world.log if line.startswith("child start")] == []
        [child] = [row for row in world.rows() if row.conversation == made[0]]
        assert (child.outcome_status, child.invocations) == ("aborted", 0)


@pytest.mark.parametrize("when", ["created", "woken"])
async def test_a_death_before_the_start_loses_nothing(when: str) -> None:
    """Reserved and never started is recovered like whatever ran, and starts after the restart."""
    world = World()
    world.scripts |= {"a": done, "parent": parent_of("a")}
    async with world.crashing() as rt:
        rt.at_once = KINDS
        wanted = {"created": 1, "woken": 3}[when]
        before = rt.session.line.published_seq
        rt.runner.start = _until(  # type: ignore[method-assign]
            rt, before + wanted, rt.runner.start
        )
        await world.create("parent")
        await world.quiet()
    statuses = {row.kind: row.status for row in world.rows() if row.owner is None}
    assert statuses == {"test.actor": 1}
    async with world.open() as rt:
        rt.at_once = KINDS
        await rt.wait_for_idle(ROOT)
    assert {row.outcome_status for row in world.rows()} == {"completed"}
    assert world.log.count("parent start") == 1


def _until(rt: Any, seq: int, starting: Any) -> Any:
    """Start until a commit is published, and nothing from then on: the process is dying."""

    def start(invocation: Any) -> None:
        if rt.session.line.published_seq < seq:
            starting(invocation)

    return start


async def test_it_is_started_when_its_commit_is_published() -> None:
    """Whoever committed finds the invocation there: the scheduler need not be woken for it."""
    world = World()
    async with world.open() as rt:
        rt.at_once = KINDS
        await world.quiet()
        id = await world.create("a", forever)
        assert id in rt.invocations
        assert world.log == []
        await world.quiet()
        assert world.log == ["a start"]


async def test_nothing_of_who_committed_is_the_tasks_that_starts_by_it() -> None:
    """Its code runs in the context of the runtime, whoever led the batch."""
    world = World()
    said = ContextVar("said", default="nothing")
    heard: list[str] = []

    async def child(at: Any, ctx: Any) -> None:
        heard.append(said.get())
        await ctx.complete("")

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            said.set("by the parent")
            async with ctx.commit() as tx:
                tx.wait(then=Next(1), on=[tx.create_task(Actor, "child")])
            return
        heard.append(said.get())
        await ctx.complete("")

    world.scripts["child"] = child
    said.set("by the host")
    async with world.open() as rt:
        said.set("by the block")
        rt.at_once = KINDS
        assert (await world.end(await world.create("parent", parent))).status == "completed"
    assert heard == ["by the host", "by the host"]


@pytest.mark.parametrize("order", ["queued", "same batch"])
async def test_an_abort_that_comes_before_the_start_lets_no_phase_begin(order: str) -> None:
    """It is queued while the reservation is in the storage, or shares its batch."""
    world = World()
    async with world.open() as rt:
        rt.at_once = KINDS
        await world.quiet()
        made: list[int] = []
        world.blocking.hold()

        def body(tx: Any) -> None:
            made.append(tx.create_task(Actor, "a", conversation=ROOT))

        world.scripts["a"] = forever
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rt.commit, body)
            if order == "queued":
                await world.quiet()
                nursery.start_soon(lambda: world.abort(made[0]))
            else:
                nursery.start_soon(_abort_behind, rt, made)
            await world.quiet()
            world.blocking.release()
        assert (await world.end(made[0])).status == "aborted"
        assert world.log == ["a abort"]


async def _abort_behind(rt: Any, made: list[int]) -> None:
    """Abort what a body of the open batch has made."""
    while not made:
        await trio.lowlevel.checkpoint()
    await rt.commit(lambda tx: tx.abort_task(made[0]))


async def test_nothing_begins_that_was_started_before_the_session_was_poisoned() -> None:
    """Its code is run in another turn, and by then another holder may do the same work."""
    world = World()
    async with world.crashing() as rt:
        rt.at_once = KINDS
        await world.quiet()
        id = await world.create("a", forever)
        assert id in rt.invocations
        rt.session.line.set_poison(SessionPoisonedError("world", "another holder has it"))
        await world.quiet()
        assert not rt.invocations
    assert world.log == []


async def test_a_join_whose_last_two_end_in_one_batch_is_woken_once() -> None:
    """The count looks at what the batch has staged, not at what is published alone."""
    world = World()
    go = trio.Event()

    async def child(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.complete("")

    world.scripts |= {f"c{number}": child for number in range(6)}
    async with world.open() as rt:
        rt.at_once = KINDS
        id = await world.create("parent", parent_of(*(f"c{number}" for number in range(6))))
        await world.quiet()
        before = rt.session.line.published_seq
        world.blocking.hold()
        go.set()
        await world.quiet()
        world.blocking.release()
        assert (await world.end(id)).status == "completed"
        # Six ends, of which the last wakes the parent, and its own end.
        assert rt.session.line.published_seq - before == 7
    assert child_of(world, id, "c0")


async def test_a_waiter_whose_handler_has_not_returned_is_left_to_the_pass() -> None:
    """It is woken when it has, as always."""
    world = World()
    leave = trio.Event()

    async def parent(at: Any, ctx: Any) -> None:
        if not isinstance(at, Start):
            await ctx.complete("")
            return
        async with ctx.commit() as tx:
            child = tx.create_task(Actor, "child")
            tx.wait(then=Next(1), on=[child])
        await leave.wait()

    world.scripts["child"] = done
    async with world.open() as rt:
        rt.at_once = KINDS
        id = await world.create("parent", parent)
        await world.quiet()
        assert world.status(id) == "waiting"
        leave.set()
        assert (await world.end(id)).status == "completed"


async def test_more_than_one_commit_may_reserve_is_left_to_passes() -> None:
    """A large fan-out is started in parts that leave others their turn."""
    world = World()
    names = [f"c{number}" for number in range(100)]
    world.scripts |= dict.fromkeys(names, done)
    async with world.open() as rt:
        rt.at_once = KINDS
        id = await world.create("parent", parent_of(*names))
        world.blocking.hold()
        await world.quiet()
        world.blocking.release()
        assert (await world.end(id)).status == "completed"
    assert {row.invocations for row in world.rows() if row.owner == id} == {1}
