"""Hard scenarios of ownership: old chains revived, boundaries, ends that create, ends refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from histories import Histories
from worlds import ROOT, Actor, Next, World, child_of, done, end_aborted, forever, parent_of


def gated() -> tuple[Any, Callable[[], None]]:
    """A script that waits for the test and completes, and what lets it go."""
    event = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        await event.wait()
        await ctx.complete("opened")

    return script, event.set


def holding(name: str) -> Any:
    """A script that puts a task into a conversation of its own, and decides its outcome."""

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            owned = tx.create_conversation(key="own")
            tx.create_task(Actor, name, conversation=owned, key="in it")
        await ctx.complete(f"over {name}")

    return script


def conversation_of(world: World, owner: int) -> int:
    """The conversation that a task made for itself."""
    return world.base.reopen()._data.conversations_by_key[(owner, "own")]


def task_of(world: World, name: str) -> int:
    """The task with this input."""
    inputs = world.base.reopen()._data.inputs
    return next(id for id, text in inputs.items() if text == f'"{name}"')


@pytest.mark.parametrize("by", ["host", "last task", "stranger"])
@pytest.mark.parametrize("then", ["complete", "abort"])
async def test_a_live_root_holds_what_is_revived_under_ended_agents(by: str, then: str) -> None:
    """New work below two ended levels holds the live root, and is reached by its abort."""
    # Hard scenario: old chain revived.
    world = World()
    ids: dict[str, int] = {}
    last_goes, root_goes = trio.Event(), trio.Event()
    revived, release = gated()

    async def last(at: Any, ctx: Any) -> None:
        """The last live task of the inner conversation."""
        await last_goes.wait()
        async with ctx.commit() as tx:
            if by == "last task":
                tx.create_task(Actor, "revived", conversation=ctx.conversation_id)
            tx.complete("last")

    async def stranger(at: Any, ctx: Any) -> None:
        """A task of the root conversation that adds to a conversation of somebody else."""
        await last_goes.wait()
        while world.status(ids["agent"]) != "terminal":
            await trio.lowlevel.checkpoint()
        async with ctx.commit() as tx:
            tx.create_task(Actor, "revived", conversation=ids["inner"])
            tx.complete("")

    async def root(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "agent", key="agent")
        await root_goes.wait()
        await ctx.complete("root")

    world.scripts.update(
        agent=holding("sub-agent"), last=last, stranger=stranger, revived=revived, root=root
    )
    world.scripts["sub-agent"] = holding("last")
    async with world.open() as rt:
        top = await world.create("root")
        await world.quiet()
        ids["agent"] = child_of(world, top, "agent")
        sub_agent = task_of(world, "sub-agent")
        ids["inner"] = conversation_of(world, sub_agent)
        if by == "stranger":
            await world.create("stranger")
        last_goes.set()
        await world.quiet()
        if by == "host":
            # Nothing of the chain is in memory any more.
            assert rt.published.find(ids["agent"]) is None
            assert rt.published.find(ids["inner"]) is None
            await world.create("revived", conversation=ids["inner"])
            await world.quiet()
        new = task_of(world, "revived")
        ended = by != "last task"
        assert world.status(sub_agent) == ("terminal" if ended else "completing")
        root_goes.set()
        await world.quiet()
        assert world.status(top) == "completing"
        if then == "complete":
            release()
        else:
            await world.abort(top)
        assert (await world.end(top)).result == "root"
        assert world.outcome(new) == ("completed" if then == "complete" else "aborted")
        assert world.row(top).ended_us >= world.row(new).ended_us  # type: ignore[operator]
    assert world.row(new).abort_reason == (None if then == "complete" else "owner")


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("last_ends", ["completes", "is aborted"])
async def test_the_last_foreground_task_ends_an_owner_over_a_background_task(
    last_ends: str, holds: bool
) -> None:
    """The owner, waiting for it or holding its outcome, ends; what is behind the boundary runs."""
    # Hard scenario: background boundary under ended tasks.
    world = World()
    last, release = gated()

    async def between(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            owned = tx.create_conversation(key="own")
            tx.create_task(Actor, "behind", conversation=owned, background=True)
        await ctx.complete("ended over it")

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.create_task(Actor, "between", key="between")
            tx.create_task(Actor, "last", key="last")
        await ctx.complete("held")

    world.scripts.update(between=between, last=last, behind=forever, owner=owner)
    async with world.open() as rt:
        task = await world.create(
            "owner" if holds else "waits", None if holds else parent_of("between", "last")
        )
        await world.quiet()
        behind = task_of(world, "behind")
        assert world.status(child_of(world, task, "between")) == "terminal"
        assert world.status(task) == ("completing" if holds else "waiting")
        if last_ends == "completes":
            release()
        else:
            await world.abort(child_of(world, task, "last"))
        assert (await world.end(task)).status == "completed"
        await rt.wait_for_idle()
        assert world.status(behind) == "running"
        assert world.marked(behind) == [False]
        # The ended tasks above it are transparent: it counts in the conversation at the top.
        assert not {task, child_of(world, task, "between")} & set(rt.published.nodes)
        root = rt.published.nodes[ROOT]
        assert (root.below, root.below_all) == (0, 1)


async def test_an_abort_of_the_owner_stops_at_the_boundary_under_an_ended_task() -> None:
    """Also when the owner is aborted while its last foreground task runs."""
    # Hard scenario: background boundary under ended tasks.
    world = World()

    async def between(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            owned = tx.create_conversation(key="own")
            tx.create_task(Actor, "behind", conversation=owned, background=True)
            tx.create_task(Actor, "before", conversation=owned)
        await ctx.complete("held over one of them")

    world.scripts.update(between=between, last=forever, behind=forever, before=forever)
    async with world.open():
        task = await world.create("owner", parent_of("between", "last"))
        await world.quiet()
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
        await world.quiet()
    assert [line for line in world.log if line.endswith("abort")][-1] == "owner abort"
    assert world.outcome(task_of(world, "before")) == "aborted"
    assert world.marked(task_of(world, "behind")) == [False]
    assert world.status(task_of(world, "behind")) == "pending"  # the session is closed


@pytest.mark.parametrize("ended", [False, True])
async def test_ending_the_leaf_and_creating_below_it_lets_no_ancestor_end_between(
    ended: bool,
) -> None:
    """A chain of held tasks, or of ended ones below a held root, stays through that commit."""
    # Hard scenario: end and create in one commit.
    world = World()
    first_goes, leaf_goes = trio.Event(), trio.Event()
    new, release = gated()
    depth = 4

    async def leaf(at: Any, ctx: Any) -> None:
        await leaf_goes.wait()
        async with ctx.commit() as tx:
            tx.create_task(Actor, "new", conversation=ctx.conversation_id)
            tx.complete("handed on")

    async def first(at: Any, ctx: Any) -> None:
        await first_goes.wait()
        await ctx.complete("gone")

    async def root(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "level 1", key="chain")
        await root_goes.wait()
        await ctx.complete("held")

    root_goes = trio.Event()
    world.scripts.update(leaf=leaf, first=first, new=new, root=root)
    for level in range(1, depth):
        world.scripts[f"level {level}"] = holding(f"level {level + 1}")
    world.scripts[f"level {depth}"] = holding("first")
    async with world.open():
        top = await world.create("root")
        await world.quiet()
        chain = [top, *(task_of(world, f"level {level}") for level in range(1, depth + 1))]
        inner = conversation_of(world, chain[-1])
        if ended:
            first_goes.set()
            await world.quiet()
        await world.create("leaf", conversation=inner)
        first_goes.set()
        root_goes.set()
        await world.quiet()
        between = ["completing", *(["terminal" if ended else "completing"] * depth)]
        assert [world.status(id) for id in chain] == between
        histories = Histories.watch(world)
        for id in chain:
            histories.by_task[id] = [world.status(id)]
        leaf_goes.set()
        await world.quiet()
        # The commit that ended the leaf has been published, and nothing above it has ended.
        leaf_id, new_id = task_of(world, "leaf"), task_of(world, "new")
        assert {leaf_id: "terminal", new_id: "pending"} in histories.commits
        assert [world.status(id) for id in chain] == between
        release()
        await world.end(top)
        await world.quiet()
    live = [id for id, was in zip(chain, between, strict=True) if was == "completing"]
    # The new task ends first, then the owners from the bottom upwards.
    ends = [id for commit in histories.commits for id, word in commit.items() if word == "terminal"]
    assert ends == [leaf_id, new_id, *reversed(live)]


async def orphaning(world: World, kind: type[Actor]) -> tuple[int, int, trio.Event]:
    """A parent of a kind that is gone, over a live child with a slow undo."""
    undone = trio.Event()

    async def slow_undo(at: Any, ctx: Any) -> None:
        await undone.wait()
        await end_aborted(at, ctx)

    async def hold(at: Any, ctx: Any) -> None:
        await ctx.create_task(Actor, "child", key="child")
        await trio.sleep_forever()

    world.scripts["child"] = forever
    world.aborts["child"] = slow_undo
    world.install(Actor, kind)
    async with world.open():
        task = await world.create("parent", hold, kind=kind)
        await world.quiet()
    world.install(Actor)
    return task, child_of(world, task, "child"), undone


@pytest.mark.parametrize("crash", [False, True])
async def test_a_task_without_code_is_orphaned_after_its_child_has_drained(crash: bool) -> None:
    """The mark goes down first; the parent waits blocked or not, also over a death in between."""
    # Hard scenario: missing definition over live work.

    class Gone(Actor):
        name = "test.gone"

    world = World()
    task, child, undone = await orphaning(world, Gone)
    async with world.crashing() if crash else world.open():
        histories = Histories.watch(world)
        await world.quiet()
        assert world.row(task).blocked == "missing_definition"
        await world.abort(task)
        await world.quiet()
        assert world.marked(task, child) == [True, True]
        assert (world.outcome(task), world.outcome(child)) == (None, None)
        if not crash:
            undone.set()
            outcome = await world.end(task)
    if crash:
        async with world.open():
            histories = Histories.watch(world)
            await world.quiet()
            assert (world.outcome(task), world.outcome(child)) == (None, None)
            undone.set()
            outcome = await world.end(task)
    assert (outcome.status, outcome.reason) == ("orphaned", "missing_definition")
    assert world.outcome(child) == "aborted"
    ends = [id for commit in histories.commits for id, w in commit.items() if "terminal" in w]
    assert ends == [child, task]
    assert "parent abort" not in world.log


@pytest.mark.parametrize("settles", ["complete", "fail"])
@pytest.mark.parametrize("first", ["create", "settle"])
async def test_a_commit_that_settles_and_creates_owned_work_is_refused_whole(
    settles: str, first: str
) -> None:
    """In whichever order it says so: the task is faulted, and nothing of the commit exists."""
    # Hard scenario: child created in the finishing commit.
    world = World()
    world.scripts["child"] = done

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.append(ROOT, "written", kind="note")
            tx.memo("written", 1)
            if first == "create":
                tx.create_task(Actor, "child", key="child")
            if settles == "complete":
                tx.complete("never")
            else:
                tx.fail("never")
            if first == "settle":
                tx.create_task(Actor, "child", key="child")

    async with world.open():
        task = await world.create("a", script)
        outcome = await world.end(task)
        await world.quiet()
    assert outcome.status == "faulted"
    assert outcome.error is not None
    assert "OwnerEndedError" in outcome.error.type
    data = world.base.reopen()._data
    assert (len(data.tasks), len(data.entries), data.tasks_by_key) == (1, 0, {})
    assert world.log == ["a start"]


@pytest.mark.parametrize("settles", ["complete", "fail"])
async def test_under_a_marked_owner_a_commit_that_settles_and_creates_leaves_nothing(
    settles: str,
) -> None:
    """The mark is on its way down: the commit is refused whole, and the mark decides the rest."""
    # Hard scenario: child created in the finishing commit.
    world = World()
    go = trio.Event()
    told: list[str] = []

    async def middle(at: Any, ctx: Any) -> None:
        with trio.CancelScope(shield=True):
            await go.wait()
        try:
            async with ctx.commit() as tx:
                tx.append(ROOT, "written", kind="note")
                tx.create_task(Actor, "child")
                if settles == "complete":
                    tx.complete("never")
                else:
                    tx.fail("never")
        except Exception as error:
            told.append(type(error).__name__)
            raise

    world.scripts.update(middle=middle, child=done)
    async with world.open(), trio.open_nursery() as nursery:
        top = await world.create("top", parent_of("middle"))
        await world.quiet()
        middle_id = child_of(world, top, "middle")
        world.blocking.hold()
        nursery.start_soon(world.abort, top)
        await world.quiet()
        # The mark on the owner is in the storage, and the one on the task is not thought of yet.
        go.set()
        await world.quiet()
        world.blocking.release()
        assert (await world.end(top)).status == "aborted"
    assert told == ["OwnerEndedError"]
    assert world.outcome(middle_id) == "aborted"
    data = world.base.reopen()._data
    assert (len(data.tasks), len(data.entries)) == (2, 0)
    assert "child start" not in world.log


@pytest.mark.parametrize("marked", [False, True])
async def test_a_commit_that_settles_may_create_in_an_owned_conversation(marked: bool) -> None:
    """That is legal and holds the task; below a mark the new work is stored and marked."""
    # Hard scenario: child created in the finishing commit.
    world = World()
    go = trio.Event()
    new, release = gated()

    async def middle(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            owned = tx.create_conversation(key="own")
        with trio.CancelScope(shield=True):
            await go.wait()
        async with ctx.commit() as tx:
            tx.append(ROOT, "written", kind="note")
            tx.create_task(Actor, "new", conversation=owned)
            tx.complete("held")

    world.scripts.update(middle=middle, new=new)
    async with world.open(), trio.open_nursery() as nursery:
        top = await world.create("top", parent_of("middle"))
        await world.quiet()
        middle_id = child_of(world, top, "middle")
        if marked:
            world.blocking.hold()
            nursery.start_soon(world.abort, top)
            await world.quiet()
        go.set()
        await world.quiet()
        if marked:
            world.blocking.release()
        else:
            assert world.status(middle_id) == "completing"
            release()
        outcome = await world.end(top)
    assert outcome.status == ("aborted" if marked else "completed")
    assert world.outcome(middle_id) == "completed"
    new_id = task_of(world, "new")
    assert world.marked(new_id) == [marked]
    assert world.outcome(new_id) == ("aborted" if marked else "completed")
    assert len(world.base.reopen()._data.entries) == 1
    assert ("new start" in world.log) is not marked


async def test_a_child_in_the_commit_that_waits_is_legal() -> None:
    """A wait does not settle: what its commit creates is owned and waited for."""
    world = World()
    world.scripts["child"] = done

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete(str(ctx.woken_by))
            return
        async with ctx.commit() as tx:
            child = tx.create_task(Actor, "child")
            tx.wait(then=Next(1), on=[child])

    async with world.open():
        assert (await world.end(await world.create("a", script))).result == "tasks"
