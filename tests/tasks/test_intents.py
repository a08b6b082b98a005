"""Where an abort comes from, what it finds, and where it ends: deadlines, owners, oneself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from recount import check_at_rest
from worlds import (
    ROOT,
    Actor,
    Next,
    Other,
    Start,
    World,
    child_of,
    done,
    end_aborted,
    forever,
    parent_of,
)

from pidurable.errors import InvalidArgumentError


def soon(world: World, seconds: float = 60.0) -> datetime:
    return datetime.fromtimestamp(world.clock.now_us() / 1e6, UTC) + timedelta(seconds=seconds)


class Parking(Actor):
    """Keeps its checkpoint where its code raises."""

    name = "test.parking"
    on_fault = "park"


class Lost(Actor):
    """Is not installed when it counts."""

    name = "test.lost"


# --- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", ["queued", "running", "waiting", "completing", "parked", "lost", "undoing"]
)
async def test_a_deadline_is_an_abort_of_a_task_in_any_state(
    autojump_clock: Any, state: str
) -> None:
    """Never reserved, parked, holding or blocked: it is marked, and ends as by any abort."""
    world = World(Actor, Other, Parking, Lost, limits={Other.name: 0})
    kinds: dict[str, type[Actor]] = {"queued": Other, "parked": Parking, "lost": Lost}

    async def script(at: Any, ctx: Any) -> None:
        if state == "waiting":
            await ctx.wait(then=Next(1), signals=True)
        elif state == "completing":
            await ctx.create_task(Actor, "child", key="child")
            await ctx.complete("held")
        elif state == "parked":
            raise ValueError("parked")
        else:
            await trio.sleep_forever()

    async def slow_undo(at: Any, ctx: Any) -> None:
        await trio.sleep(100)
        await ctx.end_aborted(f"because of {ctx.abort_reason}")

    if state == "undoing":
        world.aborts["a"] = slow_undo
    world.scripts["child"] = forever
    async with world.open():
        deadline = soon(world)
        task = await world.create("a", script, kind=kinds.get(state, Actor), deadline=deadline)
        await trio.sleep(1)
        if state == "undoing":
            await world.abort(task, "impatience")
    if state == "lost":
        world.install(Actor, Other, Parking)
    async with world.open() as rt:
        await trio.sleep(1)
        if state in ("parked", "lost"):
            assert world.row(task).blocked is not None
        outcome = await world.end(task)
        check_at_rest(rt)
    expected = {"completing": "completed", "lost": "orphaned"}.get(state, "aborted")
    assert outcome.status == expected
    # A mark that is there stays what it was.
    assert world.row(task).abort_reason == ("impatience" if state == "undoing" else "deadline")
    if state == "completing":
        child = world.row(child_of(world, task, "child"))
        assert (child.outcome_status, child.abort_reason) == ("aborted", "owner")
    if state == "queued":
        assert world.row(task).invocations == 0


async def test_a_deadline_that_has_passed_aborts_at_once_and_runs_nothing(
    autojump_clock: Any,
) -> None:
    """A task whose time was over when it was made may have been reserved; it ends all the same."""
    world = World()
    async with world.open():
        task = await world.create("a", forever, deadline=soon(world, -60))
        with trio.fail_after(1):
            assert (await world.end(task)).status == "aborted"
        assert world.row(task).abort_reason == "deadline"

        async def late(at: Any, ctx: Any) -> None:
            if isinstance(at, Start):
                await ctx.wait(then=Next(1), deadline=ctx.now() - timedelta(days=1))
            else:
                await ctx.complete(str(ctx.woken_by))

        with trio.fail_after(1):
            assert (await world.end(await world.create("b", late))).result == "deadline"


async def test_a_deadline_of_a_child_is_no_deadline_of_its_owner(autojump_clock: Any) -> None:
    """It aborts what it was given to and what is below; the owner hears of it as of any end."""
    world = World()

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            deadline = ctx.now() + timedelta(seconds=30)
            async with ctx.commit() as tx:
                child = tx.create_task(Actor, "child", key="child", deadline=deadline)
                tx.wait(then=Next(1), on=[child])
            return
        (outcome,) = await ctx.outcomes([child_of(world, ctx.task_id, "child")])
        await ctx.complete(outcome.status)

    world.scripts["child"] = parent_of("grandchild")
    world.scripts["grandchild"] = forever
    async with world.open():
        task = await world.create("parent", parent)
        await trio.sleep(1)
        assert (await world.end(task)).result == "aborted"
        assert trio.current_time() < 31
    child = child_of(world, task, "child")
    below = world.row(child_of(world, child, "grandchild"))
    assert (world.marked(task), below.abort_reason) == ([False], "owner")


# --- oneself, and what was just made ------------------------------------------------------------


@pytest.mark.parametrize("and_then", ["goes on", "completes", "waits"])
async def test_a_task_may_abort_itself(and_then: str) -> None:
    """Its mark is part of its commit: what that decides stands, else its handler runs."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.abort_task(ctx.task_id, "my own")
            if and_then == "completes":
                tx.complete("nevertheless")
            elif and_then == "waits":
                tx.wait(then=Next(1), signals=True)
            else:
                tx.goto(Next(1))

    async with world.open() as rt:
        task = await world.create("a", script)
        outcome = await world.end(task)
        check_at_rest(rt)
    assert world.row(task).abort_reason == "my own"
    if and_then == "completes":
        assert (outcome.result, world.log) == ("nevertheless", ["a start"])
    else:
        assert (outcome.status, world.log) == ("aborted", ["a start", "a abort"])


async def test_what_is_aborted_in_the_commit_that_makes_it_never_runs() -> None:
    """Its owner, which waits for it, is woken by its end."""
    world = World()

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                child = tx.create_task(Actor, "child", key="child")
                tx.abort_task(child, "changed my mind")
                tx.wait(then=Next(1), on=[child])
            return
        (outcome,) = await ctx.outcomes([child_of(world, ctx.task_id, "child")])
        await ctx.complete(f"{outcome.status}: {outcome.reason}")

    world.scripts["child"] = done
    async with world.open():
        task = await world.create("parent", parent)
        assert (await world.end(task)).result == "aborted: changed my mind"
    assert "child start" not in world.log
    assert world.row(child_of(world, task, "child")).invocations == 0


async def test_an_abort_of_what_has_ended_changes_nothing_and_answers_with_its_outcome() -> None:
    """Also where work below a background boundary is live; and nothing is written for it."""
    world = World()
    world.scripts["behind"] = forever

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            own = tx.create_conversation(key="own")
            tx.create_task(Actor, "behind", conversation=own, background=True)
        await ctx.complete("ended")

    async with world.open():
        task = await world.create("a", script)
        await world.end(task)
        await world.quiet()
        applied = world.storage.count("apply")
        await world.abort(task)
        await world.quiet()
        assert (await world.end(task)).result == "ended"
        assert world.storage.count("apply") == applied
        assert [row.abort_us for row in world.rows()] == [None, None]


# --- terminal owners ----------------------------------------------------------------------------


@pytest.mark.parametrize("ended", ["failed", "aborted"])
async def test_an_owner_that_has_ended_cascades_to_nothing_new(ended: str) -> None:
    """Mark and outcome were for what was below it then: new work in its conversation runs."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.create_conversation(key="own")
        if ended == "failed":
            await ctx.fail("enough")
        else:
            await trio.sleep_forever()

    async with world.open() as rt:
        task = await world.create("a", script)
        await world.quiet()
        if ended == "aborted":
            await world.abort(task)
        assert (await world.end(task)).status == ended
        own = world.base.reopen()._data.conversations_by_key[(task, "own")]
        for _ in range(2):
            new = await world.create("new", done, conversation=own)
            assert (await world.end(new)).status == "completed"
            assert world.marked(new) == [False]
        check_at_rest(rt)
    # Over a restart, too: the ended owner is read in again for what is below it.
    async with world.crashing():
        new = await world.create("new", forever, conversation=own)
        await world.quiet()
    world.scripts["new"] = done
    async with world.open():
        assert (await world.end(new)).status == "completed"
    assert world.marked(new) == [False]


async def test_work_that_comes_while_an_owner_undoes_is_marked_and_holds_it() -> None:
    """It is stored in the owned conversation; the handler is not disturbed, its outcome waits."""
    world = World()
    go, drained = trio.Event(), trio.Event()

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.create_conversation(key="own")
        await trio.sleep_forever()

    async def undo(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.end_aborted("undone")

    async def slow(at: Any, ctx: Any) -> None:
        with trio.CancelScope(shield=True):
            await drained.wait()
        await trio.sleep_forever()

    world.aborts["owner"] = undo
    async with world.open(), trio.open_nursery() as nursery:
        task = await world.create("owner", owner)
        await world.quiet()
        own = world.base.reopen()._data.conversations_by_key[(task, "own")]
        await world.abort(task)
        await world.quiet()
        assert world.log[-1] == "owner abort"
        # Two of them: one never runs; one is in the middle of its first phase before its mark.
        world.blocking.hold()
        nursery.start_soon(lambda: world.create("new", slow, conversation=own))
        await world.quiet()
        world.blocking.release()
        await world.quiet()
        go.set()
        await world.quiet()
        new = max(row.id for row in world.rows())
        assert world.marked(new) == [True]
        drained.set()
        assert (await world.end(task)).reason == "undone"
    assert world.outcome(new) == "aborted"
    assert world.log.count("owner abort") == 1
    ended = [world.row(id).ended_us or 0 for id in (new, task)]
    assert ended == sorted(ended)


# --- bottom-up ----------------------------------------------------------------------------------


async def test_each_handler_sees_the_final_outcomes_below_it() -> None:
    """What was completed, failed or undone below is an outcome by the time its owner undoes."""
    world = World()
    seen: dict[str, list[str]] = {}

    def looks(name: str, *children: str) -> Any:
        async def undo(at: Any, ctx: Any) -> None:
            ids = [child_of(world, ctx.task_id, child) for child in children]
            seen[name] = [outcome.status for outcome in await ctx.outcomes(ids)]
            await end_aborted(at, ctx)

        return undo

    async def fails(at: Any, ctx: Any) -> None:
        await ctx.fail("below")

    async def completes_anyway(at: Any, ctx: Any) -> None:
        await ctx.complete("could not be undone")

    async def raises(at: Any, ctx: Any) -> None:
        raise ValueError("undo failed")

    world.scripts.update(
        mid=parent_of("ok", "bad", "slow"), ok=done, bad=fails, slow=forever, odd=forever
    )
    world.aborts.update(
        slow=completes_anyway,
        odd=raises,
        mid=looks("mid", "ok", "bad", "slow"),
        top=looks("top", "mid", "odd"),
    )
    async with world.open():
        task = await world.create("top", parent_of("mid", "odd"))
        await world.quiet()
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
    assert seen == {"mid": ["completed", "failed", "completed"], "top": ["aborted", "faulted"]}


async def test_an_abort_of_a_waiting_owner_waits_for_children_that_take_their_time() -> None:
    """Its handler is not begun, and it is not woken, although all that it waits for has ended."""
    world = World()
    drained = trio.Event()

    async def slow_undo(at: Any, ctx: Any) -> None:
        await drained.wait()
        await end_aborted(at, ctx)

    world.scripts.update(quick=forever, slow=forever)
    world.aborts["slow"] = slow_undo
    async with world.open() as rt:
        task = await world.create("parent", parent_of("quick", "slow"))
        await world.quiet()
        await world.abort(task)
        await world.quiet()
        assert world.status(task) == "waiting"
        assert world.outcome(child_of(world, task, "quick")) == "aborted"
        assert "parent abort" not in world.log
        drained.set()
        await world.end(task)
        check_at_rest(rt)
    assert "parent next 1" not in world.log
    assert world.log[-1] == "parent abort"


async def test_an_abort_handler_reads_outcomes_and_waits_for_nobody() -> None:
    """A wait in memory is a wait as well: the abort of an owner would hang on a stranger."""
    world = World()
    told: list[str] = []
    world.scripts["child"] = forever

    async def undo(at: Any, ctx: Any) -> None:
        child = child_of(world, ctx.task_id, "child")
        told.extend(outcome.status for outcome in await ctx.outcomes([child]))
        for id in (other, child):
            try:
                await ctx.wait_for_task(id)
            except InvalidArgumentError as error:
                told.append(str(error))
        await end_aborted(at, ctx)

    world.aborts["parent"] = undo
    async with world.open():
        other = await world.create("other", forever)
        task = await world.create("parent", parent_of("child"))
        await world.quiet()
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
        assert world.status(other) == "running"
    status, *refused = told
    assert status == "aborted"
    assert len(refused) == 2
    assert "an abort handler may not wait" in refused[0]


@pytest.mark.parametrize("whose", ["root", "own"])
async def test_what_an_abort_handler_gives_to_a_conversation_is_work_of_that_conversation(
    whose: str,
) -> None:
    """In another one it goes its own way; in one of its own it is marked, and holds the outcome."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.create_conversation(key="own")
        await trio.sleep_forever()

    async def undo(at: Any, ctx: Any) -> None:
        own = world.base.reopen()._data.conversations_by_key[(ctx.task_id, "own")]
        async with ctx.commit() as tx:
            with pytest.raises(InvalidArgumentError, match="may not create owned work"):
                tx.create_task(Actor, "follow-up")
            made.append(
                tx.create_task(
                    Actor, "follow-up", conversation=ROOT if whose == "root" else own, key="after"
                )
            )
            tx.end_aborted("undone")

    made: list[int] = []
    world.scripts["follow-up"] = done
    world.aborts["a"] = undo
    async with world.open() as rt:
        task = await world.create("a", script)
        await world.quiet()
        await world.abort(task)
        assert (await world.end(task)).reason == "undone"
        await rt.wait_for_idle()
        check_at_rest(rt)
    (follow_up,) = made
    assert world.outcome(follow_up) == ("completed" if whose == "root" else "aborted")
    assert world.marked(follow_up) == [whose == "own"]
    assert ("follow-up start" in world.log) is (whose == "root")


@pytest.mark.parametrize("order", ["mark first", "create first"])
async def test_work_made_in_the_commit_that_marks_its_owner_is_marked_but_behind_a_boundary(
    order: str,
) -> None:
    """Ordinary work is marked and background work is not, in whichever order the commit says it."""
    world = World()
    world.scripts.update(ordinary=done, background=done)

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.create_conversation(key="own")
        await trio.sleep_forever()

    async with world.open() as rt:
        task = await world.create("owner", owner)
        await world.quiet()
        own = world.base.reopen()._data.conversations_by_key[(task, "own")]

        def both(tx: Any) -> tuple[int, int]:
            if order == "mark first":
                tx.abort_task(task)
            ids = (
                tx.create_task(Actor, "ordinary", conversation=own),
                tx.create_task(Actor, "background", conversation=own, background=True),
            )
            if order == "create first":
                tx.abort_task(task)
            return ids

        ids = await rt.commit(both)
        assert (await world.end(task)).status == "aborted"
        await world.end(ids[1])
        check_at_rest(rt)
    assert world.marked(*ids) == [True, False]
    assert [world.outcome(id) for id in ids] == ["aborted", "completed"]


async def test_a_mark_finds_every_conversation_that_its_own_commit_made_busy_below() -> None:
    """Also one that is below ended tasks and other idle conversations, however deep."""
    world = World()

    async def opens(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                tx.create_conversation(key="below")
                tx.goto(Next(1))
        elif ctx.input == "top":
            await forever(at, ctx)
        else:
            await ctx.complete("opened")

    world.scripts.update(dict.fromkeys(("top", "a", "b", "c"), opens), new=forever)

    async def open_in(conversation: int, name: str) -> tuple[int, int]:
        task = await world.create(name, conversation=conversation)
        await world.quiet()
        made = world.rt.session.storage.conversation_by_key(task, "below")
        assert made is not None
        return task, made.id

    async with world.open() as rt:
        owner, first = await open_in(ROOT, "top")
        conversations = [first]
        for name in ("a", "b", "c"):
            conversations.append((await open_in(conversations[-1], name))[1])
        told: dict[int, set[int]] = {}
        rt.on_intent.append(
            lambda tx, node: told.setdefault(node.id, set(rt.conversations_below(tx.view, node.id)))
        )

        def work_and_abort(tx: Any) -> None:
            tx.create_task(Actor, "new", conversation=conversations[-1])
            tx.create_task(Actor, "new", conversation=ROOT)
            tx.create_task(Actor, "new", conversation=conversations[1], background=True)
            tx.abort_task(owner)

        await rt.commit(work_and_abort)
        assert told[owner] == set(conversations)
        assert (await world.end(owner)).status == "aborted"
