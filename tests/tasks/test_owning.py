"""Ownership: what holds an owner, what ends with it, and what lies beyond a boundary."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from worlds import ROOT, Actor, Next, Start, World, child_of, done, forever, parent_of

from pidurable.errors import InvalidArgumentError, NotFoundError, WaitCycleError
from pidurable.records._limits import PASS_RECORDS_MAX


class Gate:
    """A script that waits for the test, then completes."""

    def __init__(self) -> None:
        self.event = trio.Event()

    async def __call__(self, at: Any, ctx: Any) -> None:
        await self.event.wait()
        await ctx.complete("opened")

    def open(self) -> None:
        self.event.set()


def owning(*children: str, end: str = "complete") -> Any:
    """A script that creates children and ends at once, while they are live."""

    async def script(at: Any, ctx: Any) -> None:
        for name in children:
            await ctx.create_task(Actor, name, key=name)
        if end == "complete":
            await ctx.complete("early")
        else:
            await ctx.fail("early")

    return script


async def test_an_owner_holds_its_outcome_until_what_it_owns_has_ended() -> None:
    """It is completing meanwhile, runs no code, and becomes terminal after the last of it."""
    world = World()
    gate = world.scripts["child"] = Gate()  # type: ignore[assignment]
    async with world.open() as rt:
        task = await world.create("owner", owning("child"))
        await world.quiet()
        assert world.status(task) == "completing"
        assert not rt.index.running - {child_of(world, task, "child")}
        gate.open()  # type: ignore[attr-defined]
        assert (await world.end(task)).result == "early"


async def test_a_held_outcome_survives_a_crash() -> None:
    """After a restart the owner still only waits for what is below it."""
    world = World()
    world.scripts["child"] = forever
    async with world.crashing():
        task = await world.create("owner", owning("child"))
        await world.quiet()
    world.scripts["child"] = done
    async with world.open():
        assert (await world.end(task)).result == "early"
    assert world.log.count("owner start") == 1


async def test_what_the_deciding_commit_wrote_lands_at_once() -> None:
    """Entries of the commit that decides an outcome are there although the outcome is held."""
    world = World()
    gate = world.scripts["child"] = Gate()  # type: ignore[assignment]

    async def owner(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "child")
        async with ctx.commit() as tx:
            tx.append(ROOT, {"decided": True}, kind="note")
            tx.complete("held")

    async with world.open() as rt:
        task = await world.create("owner", owner)
        await world.quiet()
        assert world.status(task) == "completing"
        assert len(rt.session.storage.entries(ROOT)) == 1
        gate.open()  # type: ignore[attr-defined]
        await world.end(task)


async def test_a_child_created_in_the_finishing_commit_faults_the_task() -> None:
    """The commit is refused whole; the same child in an owned conversation is legal and holds."""
    # Hard scenario: child created in the finishing commit.
    world = World()
    world.scripts["child"] = done

    async def refused(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.append(ROOT, {}, kind="note")
            tx.create_task(Actor, "child")
            tx.complete("never")

    async def legal(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            owned = tx.create_conversation(key="own")
        async with ctx.commit() as tx:
            tx.create_task(Actor, "child", conversation=owned)
            tx.complete("held")
        world.log.append(world.status(ctx.task_id))

    async with world.open() as rt:
        outcome = await world.end(await world.create("refused", refused))
        assert outcome.status == "faulted"
        assert outcome.error is not None
        assert "OwnerEndedError" in outcome.error.type
        assert rt.session.storage.entries(ROOT) == []
        assert len(rt.session.storage.tasks()) == 1
        assert (await world.end(await world.create("legal", legal))).result == "held"
    assert "completing" in world.log


async def test_a_chain_of_holds_ends_in_few_commits_never_an_owner_first() -> None:
    """A chain ends bottom-up, one commit for at most 500 levels; no owner before what is below."""
    # Hard scenario: held chain and wide hold.
    world = World(owned_depth_max=10)
    depth = 30
    gate = Gate()
    world.scripts["n0"] = gate
    for level in range(1, depth):
        world.scripts[f"n{level}"] = owning(f"n{level - 1}")
    async with world.open() as rt:
        top = await world.create(f"n{depth - 1}")
        await world.quiet()
        before = rt.session.line.published_seq
        gate.open()
        await world.end(top)
        # The leaf's own outcome, and one commit for the whole chain.
        assert rt.session.line.published_seq - before <= 1 + -(-depth // PASS_RECORDS_MAX) + 1
    rows = sorted(world.seen.values(), key=lambda row: row.id)
    assert [row.ended_us for row in rows] == sorted(
        (row.ended_us for row in rows), key=lambda at: -(at or 0)
    )


async def test_a_sibling_that_ends_by_the_scheduler_does_not_end_its_owner() -> None:
    """Of two held children one ends; their owner holds until the other has ended too."""
    world = World()
    gates = [Gate(), Gate()]
    world.scripts.update({"leaf 0": gates[0], "leaf 1": gates[1]})
    world.scripts.update({"mid 0": owning("leaf 0"), "mid 1": owning("leaf 1")})
    async with world.open():
        top = await world.create("top", owning("mid 0", "mid 1"))
        await world.quiet()
        gates[0].open()
        await world.quiet()
        assert world.outcome(child_of(world, top, "mid 0")) == "completed"
        assert world.status(child_of(world, top, "mid 0")) == "terminal"
        assert world.status(top) == "completing"
        gates[1].open()
        await world.end(top)


async def test_a_grandchild_may_not_wait_for_the_owner_of_its_owner() -> None:
    """The path of a refused wait names every level that needs the next one."""
    world = World()
    refused: list[str] = []

    async def leaf(at: Any, ctx: Any) -> None:
        try:
            await ctx.wait(then=Next(1), on=[top])
        except WaitCycleError as error:
            refused.append(error.path)
        await ctx.complete("")

    world.scripts.update(leaf=leaf, mid=parent_of("leaf"), low=parent_of("mid"))
    world.scripts["high"] = parent_of("low")
    async with world.open():
        top = await world.create("top", parent_of("high"))
        await world.end(top)
    ids = [row.id for row in sorted(world.rows())]
    there = " -> ".join(f"{id} test.actor" for id in (ids[-1], *ids[:-1]))
    assert refused == [f"{there} -> {ids[-1]}"]


async def test_below_owners_that_only_hold_a_wait_for_the_top_is_refused() -> None:
    """A held owner needs what is below it, although it waits for nobody."""
    # Hard scenario: wait cycles, closed by a held owner.
    world = World()
    refused: list[str] = []
    go = trio.Event()

    async def leaf(at: Any, ctx: Any) -> None:
        await go.wait()
        try:
            await ctx.wait(then=Next(1), on=[top])
        except WaitCycleError as error:
            refused.append(error.path)
        await ctx.complete("")

    world.scripts.update(leaf=leaf, mid=owning("leaf"), low=owning("mid"), high=owning("low"))
    async with world.open():
        top = await world.create("top", owning("high"))
        await world.quiet()
        assert world.status(top) == "completing"
        go.set()
        await world.end(top)
    assert len(refused) == 1


async def test_many_siblings_hold_their_owner_and_end() -> None:
    """An owner of many children ends after the last of them, in linear work."""
    # Hard scenario: held chain and wide hold.
    world = World()
    names = [f"c{n}" for n in range(200)]
    world.scripts.update(dict.fromkeys(names, done))

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            for name in names:
                tx.create_task(Actor, name)
        await ctx.complete("held")

    async with world.open() as rt:
        task = await world.create("owner", owner)
        assert (await world.end(task)).result == "held"
        assert not rt.published.nodes


async def test_ending_and_creating_in_one_commit_finishes_no_owner_in_between() -> None:
    """A commit that ends the last live task and adds another keeps every owner above it."""
    # Hard scenario: end and create in one commit.
    world = World()
    go = trio.Event()
    gate = Gate()
    world.scripts["new"] = gate

    async def leaf(at: Any, ctx: Any) -> None:
        await go.wait()
        async with ctx.commit() as tx:
            tx.create_task(Actor, "new", conversation=ctx.conversation_id)
            tx.complete("handed on")

    async def middle(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            owned = tx.create_conversation(key="own")
            tx.create_task(Actor, "leaf", conversation=owned)
        await ctx.complete("ended over it")

    world.scripts.update(leaf=leaf, middle=middle)
    async with world.open():
        top = await world.create("top", owning("middle"))
        await world.quiet()
        go.set()
        await world.quiet()
        assert world.status(top) == "completing"
        gate.open()
        assert (await world.end(top)).result == "early"
    new = next(
        row for row in world.seen.values() if row.invocations and row.owner is None and row.id > top
    )
    assert world.status(new.id) == "terminal"


async def test_work_in_the_conversation_of_an_ended_owner_holds_the_live_one_above() -> None:
    """New work below an ended owner holds, and is aborted with, the live owner above."""
    # Hard scenario: old chain revived.
    world = World()

    async def sub(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.create_conversation(key="own")
        await ctx.complete("ended")

    go = trio.Event()

    async def top(at: Any, ctx: Any) -> None:
        await ctx.wait_for_task(await ctx.create_task(Actor, "sub", key="sub"))
        await go.wait()
        await ctx.complete("top")

    world.scripts.update(sub=sub, revived=forever)
    async with world.open() as rt:
        task = await world.create("top", top)
        await world.quiet()
        child = child_of(world, task, "sub")
        owned = rt.session.storage.conversation_by_key(child, "own")
        assert owned is not None
        assert rt.published.find(owned.id) is None
        revived = await world.create("revived", conversation=owned.id)
        go.set()
        await world.quiet()
        assert world.status(task) == "completing"
        await world.abort(task)
        assert (await world.end(task)).status == "completed"
        assert world.outcome(revived) == "aborted"
        assert world.row(revived).abort_reason == "owner"


async def test_work_created_in_an_owned_conversation_below_a_mark_is_stored_and_marked() -> None:
    """It is not refused; it is aborted without having run."""
    world = World()

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            made.append(tx.create_conversation(key="own"))
        with trio.CancelScope(shield=True):
            await release.wait()

    made: list[int] = []
    release = trio.Event()
    async with world.open():
        task = await world.create("owner", owner)
        await world.quiet()
        await world.abort(task)
        await world.quiet()
        late = await world.create("late", forever, conversation=made[0])
        await world.quiet()
        assert world.marked(late) == [True]
        release.set()
        assert (await world.end(task)).status == "aborted"
    assert world.outcome(late) == "aborted"
    assert "late start" not in world.log


@pytest.mark.parametrize("aborted", [False, True])
async def test_a_background_task_is_a_boundary(aborted: bool) -> None:
    """Its owner neither waits for it nor marks it, also below an ended task in between."""
    # Hard scenario: background boundary under ended tasks.
    world = World()
    gate = Gate()
    world.scripts.update(background=forever, last=gate)

    async def between(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            owned = tx.create_conversation(key="own")
            tx.create_task(Actor, "background", conversation=owned, background=True, key="b")
        await ctx.complete("ended over it")

    world.scripts["between"] = between
    async with world.open() as rt:
        task = await world.create("owner", parent_of("between", "last"))
        await world.quiet()
        if aborted:
            await world.abort(task)
        else:
            gate.open()
        assert (await world.end(task)).status == ("aborted" if aborted else "completed")
        background = next(row for row in world.seen.values() if row.background)
        assert world.status(background.id) == "running"
        assert world.marked(background.id) == [False]
        await rt.wait_for_idle()
        await world.abort(background.id)
        assert (await world.end(background.id)).status == "aborted"


async def test_background_work_belongs_to_a_conversation() -> None:
    """A background task owned by a task is refused."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="owned by a conversation"):
            async with ctx.commit() as tx:
                tx.create_task(Actor, "b", background=True)
        await ctx.complete("")

    async with world.open():
        assert (await world.end(await world.create("a", script))).status == "completed"


async def test_idle_is_no_live_work_below() -> None:
    """wait_for_idle returns when the conversation, or everything, has no ordinary live work."""
    world = World()
    gate = Gate()
    async with world.open() as rt, trio.open_nursery() as nursery:
        other = await rt.commit(lambda tx: tx.create_conversation())
        await rt.wait_for_idle()
        task = await world.create("a", gate)
        await rt.wait_for_idle(other)
        order: list[str] = []

        async def wait(name: str, conversation: int | None) -> None:
            await rt.wait_for_idle(conversation)
            order.append(name)

        nursery.start_soon(wait, "root", ROOT)
        nursery.start_soon(wait, "all", None)
        await world.quiet()
        assert order == []
        gate.open()
        await world.end(task)
        await world.quiet()
        assert sorted(order) == ["all", "root"]
        with pytest.raises(NotFoundError):
            await rt.wait_for_idle(999)


async def test_a_wait_that_closes_a_cycle_is_refused_with_its_path() -> None:
    """Whichever wait closes it is refused, and says how it comes back to itself."""
    # Hard scenario: wait cycles.
    world = World()
    ids: dict[str, int] = {}
    go = trio.Event()

    async def one(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.wait(then=Next(1), on=[ids["two"]])

    async def two(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("woken")
        else:
            await ctx.wait(then=Next(1), on=[ids["one"]])

    async with world.open():
        ids["one"] = await world.create("one", one)
        ids["two"] = await world.create("two", two)
        await world.quiet()
        assert world.status(ids["two"]) == "waiting"
        go.set()
        outcome = await world.end(ids["one"])
        await world.quiet()
    assert outcome.status == "faulted"
    assert outcome.error is not None
    path = f"{ids['one']} test.actor -> {ids['two']} test.actor -> {ids['one']}:"
    assert path in outcome.error.message


async def test_a_child_may_not_wait_for_its_owner() -> None:
    """A live owner needs what it owns, so that wait is refused, parked or held in memory."""
    # Hard scenario: wait cycles, closed by what is owned.
    world = World()
    refused: list[str] = []

    async def child(at: Any, ctx: Any) -> None:
        owner = ctx.snapshot.task(ctx.task_id).owner
        for wait in (
            lambda: ctx.wait(then=Next(1), on=[owner]),
            lambda: ctx.wait_for_task(owner),
            lambda: ctx.wait(then=Next(1), on=[ctx.task_id]),
        ):
            try:
                await wait()
            except WaitCycleError as error:
                refused.append(error.path)
        await ctx.complete("")

    world.scripts["child"] = child
    async with world.open():
        task = await world.create("owner", parent_of("child"))
        await world.end(task)
    id = child_of(world, task, "child")
    forth = f"{id} test.actor -> {task} test.actor -> {id}"
    assert refused == [forth, forth, f"{id} test.actor -> {id}"]


async def test_a_wait_held_in_memory_is_an_edge_while_it_lasts() -> None:
    """A wait that closes a cycle with one in memory is refused, and fine once that has ended."""
    world = World()
    ids: dict[str, int] = {}

    async def holds(at: Any, ctx: Any) -> None:
        with trio.CancelScope() as scope:
            ids["scope"] = scope  # type: ignore[assignment]
            await ctx.wait_for_task(ids["two"])
        await trio.sleep_forever()

    async def two(at: Any, ctx: Any) -> None:
        await go.wait()
        with pytest.raises(WaitCycleError):
            await ctx.wait(then=Next(1), on=[ids["one"]])
        ids["scope"].cancel()  # type: ignore[attr-defined]
        await trio.testing.wait_all_tasks_blocked()
        await ctx.wait(then=Next(1), on=[ids["one"]])

    go = trio.Event()
    async with world.open():
        ids["two"] = await world.create("two", two)
        ids["one"] = await world.create("one", holds)
        await world.quiet()
        go.set()
        await world.quiet()
        await world.quiet()
        assert world.status(ids["two"]) == "waiting"


async def test_a_background_task_may_wait_for_the_owner_of_its_conversation() -> None:
    """The owner does not need it, so that wait ends; so does one with a deadline or signals."""
    # Hard scenario: wait cycles, what is accepted.
    world = World()

    async def background(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), on=[task])
        else:
            await ctx.complete(str(ctx.woken_by))

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            owned = tx.create_conversation(key="own")
            tx.create_task(Actor, "background", conversation=owned, background=True)
        await gate(at, ctx)

    gate = Gate()
    world.scripts["background"] = background
    async with world.open():
        task = await world.create("owner", owner)
        await world.quiet()
        gate.open()
        await world.end(task)
        found = next(row for row in world.seen.values() if row.background)
        assert (await world.end(found.id)).result == "tasks"


async def test_an_abort_handler_may_own_no_new_conversation() -> None:
    """It is refused, and an outcome without a reason takes that of the abort."""
    world = World()
    told: list[str] = []

    async def undo(at: Any, ctx: Any) -> None:
        try:
            async with ctx.commit() as tx:
                tx.create_conversation(key="own")
        except InvalidArgumentError as error:
            told.append(error.argument)
        await ctx.end_aborted()

    world.aborts["a"] = undo
    async with world.open():
        task = await world.create("a", forever)
        await world.quiet()
        await world.abort(task, "why not")
        assert (await world.end(task)).reason == "why not"
    assert told == ["create_conversation"]


async def test_a_key_is_looked_up_in_the_store_only_where_it_may_be_taken() -> None:
    """A first call with a key asks the store nothing; a second finds the task, after a kill too."""
    world = World()
    go = trio.Event()
    asked: list[int] = []
    made: list[int] = []

    async def owner(at: Any, ctx: Any) -> None:
        for _ in range(2):
            before = world.storage.count("task_by_key")
            made.append(await ctx.create_task(Actor, "child", key="one"))
            asked.append(world.storage.count("task_by_key") - before)
        await go.wait()
        await ctx.complete("")

    world.scripts |= {"owner": owner, "child": done}
    async with world.crashing():
        await world.create("owner")
        await world.quiet()
    async with world.open() as rt:
        go.set()
        await rt.wait_for_idle(ROOT)

    assert asked == [0, 1, 1, 1]
    assert len(set(made)) == 1
