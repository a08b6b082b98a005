"""What a task's own code can do: go on, end, remember, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from worlds import ROOT, Actor, Next, Start, World, done, forever

from pidurable.errors import (
    InvalidArgumentError,
    InvocationEndedError,
    MemoTooLargeError,
    NoResultError,
    NotJsonError,
    TooManyMemosError,
    UnknownDefinitionError,
    UnknownTaskError,
    WaitTimeoutError,
)


async def test_phases_follow_each_other_until_the_outcome() -> None:
    """A goto leads to its phase, and completing ends the task with its result."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.goto(Next(1))
        elif at.n < 3:
            await ctx.goto(Next(at.n + 1))
        else:
            await ctx.complete("there")

    async with world.open():
        outcome = await world.end(await world.create("a", script))
    assert outcome.result == "there"
    assert world.log == ["a start", "a next 1", "a next 2", "a next 3"]


async def test_a_goto_does_not_end_the_handler() -> None:
    """The next phase starts when the handler returns, at the last checkpoint that it committed."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.goto(Next(1))
            world.log.append("still here")
            await ctx.goto(Next(2))
            return
        await ctx.complete("")

    async with world.open():
        await world.end(await world.create("a", script))
    assert world.log == ["a start", "still here", "a next 2"]


async def test_a_phase_without_progress_is_faulted() -> None:
    """Returning without a commit that moves the task faults it, and says how to end a phase."""
    world = World()

    async def nothing(at: Any, ctx: Any) -> None:
        return

    async with world.open():
        outcome = await world.end(await world.create("a", nothing))
    assert outcome.status == "faulted"
    assert outcome.error is not None
    assert outcome.error.type == "no_progress"
    assert "phase `start` of Actor (test.actor)" in outcome.error.message


async def test_the_same_checkpoint_is_no_progress() -> None:
    """A goto to the checkpoint at which the phase began faults the task instead of looping."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        await ctx.goto(Next(1))

    async with world.open():
        outcome = await world.end(await world.create("a", script))
    assert outcome.status == "faulted"
    assert world.log == ["a start", "a next 1"]


async def test_a_fault_keeps_every_leaf_of_a_group() -> None:
    """A raise faults the task with type, message and a traceback of each leaf."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        raise ExceptionGroup("both", [ValueError("one"), KeyError("two")])

    async with world.open():
        outcome = await world.end(await world.create("a", script))
    assert outcome.status == "faulted"
    assert outcome.error is not None
    assert "ValueError: one" in outcome.error.message
    assert "KeyError: 'two'" in (outcome.error.traceback or "")


async def test_a_failure_carries_detail_and_what_was_reached() -> None:
    """fail stores error, detail and a partial result; the result itself is refused."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        await ctx.fail(ValueError("x" * 5_000), detail={"tried": 3}, result="half")

    async with world.open():
        outcome = await world.end(await world.create("a", script))
    assert outcome.status == "failed"
    assert outcome.error is not None
    assert outcome.error.detail == {"tried": 3}
    assert len(outcome.error.message.encode()) <= 4 * 1024
    assert outcome.partial == "half"
    with pytest.raises(NoResultError, match="failed"):
        outcome.result  # noqa: B018


async def test_nothing_is_committed_after_an_outcome() -> None:
    """A commit after complete is refused, and refusing it disturbs nothing."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        await ctx.complete("first")
        with pytest.raises(InvocationEndedError):
            await ctx.complete("second")
        with pytest.raises(InvocationEndedError):
            await ctx.memo("late", 1)

    async with world.open():
        outcome = await world.end(await world.create("a", script))
    assert outcome.result == "first"


async def test_nothing_is_committed_after_a_wait() -> None:
    """A commit after a wait is refused, and so is a second decision in the same commit."""
    world = World()
    refused = []

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("woken")
            return
        with pytest.raises(InvocationEndedError):  # noqa: PT012
            async with ctx.commit() as tx:
                tx.complete("both")
                tx.wait(then=Next(1), signals=True)
        await ctx.wait(then=Next(1), signals=True)
        try:
            await ctx.goto(Next(9))
        except InvocationEndedError:
            refused.append("goto")

    async with world.open():
        task = await world.create("a", script)
        await world.quiet()
        await world.signal(task)
        outcome = await world.end(task)
    assert outcome.result == "woken"
    assert refused == ["goto"]


async def test_a_commit_after_its_phase_returned_is_refused() -> None:
    """A context that outlives its phase can commit nothing any more."""
    world = World()
    leaked: list[Any] = []

    async def script(at: Any, ctx: Any) -> None:
        leaked.append(ctx)
        if isinstance(at, Start):
            await ctx.goto(Next(1))
        else:
            await trio.sleep_forever()

    async with world.open():
        await world.create("a", script)
        await world.quiet()
        with pytest.raises(InvocationEndedError, match="its phase had returned"):
            await leaked[0].memo("late", 1)


async def test_commits_around_the_deciding_step_count_by_their_place_in_line() -> None:
    """Of two commits that outlive a phase, the one in line before its outcome counts alone."""
    # Hard scenario: two commits of an invocation around the deciding step.
    world = World()
    results: list[str] = []

    over = trio.Event()
    contexts: list[Any] = []

    async def script(at: Any, ctx: Any) -> None:
        contexts.append(ctx)
        await over.wait()

    async def late(name: str) -> None:
        try:
            await contexts[0].memo(name, name)
            results.append(f"{name} stored")
        except InvocationEndedError:
            results.append(f"{name} refused")

    async with world.open() as rt:
        task = await world.create("a", script)
        await world.quiet()
        async with trio.open_nursery() as nursery:
            world.blocking.hold()
            nursery.start_soon(late, "before")
            await world.quiet()
            nursery.start_soon(contexts[0].complete, "whole")
            await world.quiet()
            nursery.start_soon(late, "after")
            await world.quiet()
            over.set()
            await world.quiet()
            world.blocking.release()
        outcome = await world.end(task)
        assert rt.session.line.poison is None
    assert outcome.result == "whole"
    assert sorted(results) == ["after refused", "before stored"]


async def test_a_refused_body_leaves_no_trace() -> None:
    """A body that raises stores nothing of what it staged, children included."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        with pytest.raises(ValueError, match="changed my mind"):  # noqa: PT012
            async with ctx.commit() as tx:
                tx.create_task(Actor, "child", key="child")
                tx.append(ROOT, {"said": "never"}, kind="note")
                raise ValueError("changed my mind")
        await ctx.complete("clean")

    async with world.open() as rt:
        outcome = await world.end(await world.create("a", script))
        assert rt.session.storage.entries(ROOT) == []
        assert [row.id for row in rt.session.storage.tasks()] == [outcome.task_id]
    assert outcome.result == "clean"


async def test_a_memo_is_won_by_the_first_writer_also_over_a_restart() -> None:
    """The standing value is returned, whoever asks with whatever candidate."""
    # C011: the first stored output stands.
    world = World()
    seen: list[Any] = []

    async def script(at: Any, ctx: Any) -> None:
        seen.append(await ctx.memo("drawn", len(seen)))
        seen.append(await ctx.memo("nothing", None))
        await trio.sleep_forever()

    async with world.crashing():
        await world.create("a", script)
        await world.quiet()
    async with world.open():
        await world.quiet()
    assert seen == [0, None, 0, None]


async def test_memos_are_bounded() -> None:
    """8 KiB and 64 memos are accepted, one byte and one memo more are refused."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        await ctx.memo("large", "x" * (8 * 1024 - 2))
        with pytest.raises(MemoTooLargeError):
            await ctx.memo("larger", "x" * (8 * 1024 - 1))
        for number in range(63):
            await ctx.memo(f"m{number}", number)
        with pytest.raises(TooManyMemosError):
            await ctx.memo("one more", 1)
        await ctx.complete("full")

    async with world.open():
        outcome = await world.end(await world.create("a", script))
    assert outcome.result == "full"


async def test_a_key_is_the_same_after_every_restart() -> None:
    """ctx.key is made of the session, the task and the name, and of nothing else."""
    world = World()
    keys: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        keys.append(ctx.key("charge"))
        await trio.sleep_forever()

    async with world.crashing():
        task = await world.create("a", script)
        await world.quiet()
    async with world.open():
        await world.quiet()
    assert keys == [f"world:{task}:charge"] * 2


async def test_outcomes_come_in_the_order_asked() -> None:
    """ctx.outcomes follows the given ids, and refuses one that has not ended."""
    world = World()
    world.scripts.update(one=done, two=done, never=forever)

    async with world.open() as rt:

        async def script(at: Any, ctx: Any) -> None:
            ids = [await ctx.create_task(Actor, name) for name in ("two", "one", "never")]
            for id in ids[:2]:
                await ctx.wait_for_task(id)
            with pytest.raises(NoResultError):
                await ctx.outcomes(ids)
            found = await ctx.outcomes(ids[:2])
            await ctx.fail("enough", result=",".join(outcome.result for outcome in found))

        outcome = await world.end(await world.create("a", script))
        await rt.wait_for_idle()
    assert outcome.partial == "two,one"


async def test_waiting_for_a_task_is_bounded_and_changes_nothing() -> None:
    """A timeout ends the wait, not the task; an unknown task is refused."""
    world = World()
    async with world.open() as rt:
        task = await world.create("a", forever)
        with pytest.raises(WaitTimeoutError):
            await rt.wait_for_task(task, timeout=0)
        with pytest.raises(UnknownTaskError):
            await rt.wait_for_task(999)
        with trio.move_on_after(0):
            await rt.wait_for_task(task)
        await world.quiet()
        assert world.status(task) == "running"
        assert not rt.waits._tasks


async def test_each_of_those_who_wait_for_one_task_is_told_and_any_may_leave() -> None:
    """Who leaves takes nothing from the others, and nobody is kept when it is over."""
    world = World()
    told: list[tuple[int, str]] = []
    scopes = [trio.CancelScope() for _ in range(4)]
    async with world.open() as rt:
        go = trio.Event()

        async def script(at: Any, ctx: Any) -> None:
            await go.wait()
            await ctx.complete("over")

        task = await world.create("a", script)

        async def wait(number: int) -> None:
            with scopes[number]:
                told.append((number, (await rt.wait_for_task(task)).result))

        async with trio.open_nursery() as nursery:
            for number, leaving in ((0, 0), (1, None), (2, 1), (3, None)):
                nursery.start_soon(wait, number)
                await world.quiet()
                if leaving is not None:
                    # The only one there is at first, then one of several.
                    scopes[leaving].cancel()
                    await world.quiet()
            assert len(rt.waits._tasks) == 1
            go.set()
        assert sorted(told) == [(2, "over"), (3, "over")]
        assert not rt.waits._tasks


async def test_a_task_that_cannot_be_created_is_refused_with_its_commit() -> None:
    """An unknown kind, and an input that does not fit, are refused where they are written."""
    world = World(Actor)

    class Unknown(Actor):
        name = "test.unknown"

    async with world.open() as rt:
        with pytest.raises(UnknownDefinitionError):
            await world.create("a", kind=Unknown)
        with pytest.raises(NotJsonError):
            await rt.commit(lambda tx: tx.create_task(Actor, 5, conversation=ROOT))
        assert rt.session.storage.tasks() == []


async def test_a_key_creates_a_task_once() -> None:
    """The first writer wins, in one batch as over a restart."""
    world = World()
    async with world.open() as rt:
        first = await world.create("a", forever, key="only")
        second = await world.create("a", forever, key="only")
    async with world.open() as rt:
        third = await world.create("a", forever, key="only")
        assert len(rt.session.storage.tasks()) == 1
    assert first == second == third


@pytest.mark.parametrize("fatal", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_out_of_a_handler_closes_and_faults_nothing(
    fatal: type[BaseException],
) -> None:
    """It leaves the block as it is; the task is pending from its checkpoint, uncharged."""
    # C052
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        raise fatal

    with pytest.raises(fatal):  # noqa: PT012
        async with world.open():
            task = await world.create("a", script)
            await trio.sleep_forever()
    assert world.status(task) == "pending"
    assert world.row(task).recoveries == 0
    world.scripts["a"] = done
    async with world.open():
        assert (await world.end(task)).result == "a"


async def test_end_aborted_is_for_abort_handlers() -> None:
    """A phase that tries to end its task as aborted is told to fail instead."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="use fail"):
            await ctx.end_aborted("me")
        await ctx.complete("")

    async with world.open():
        assert (await world.end(await world.create("a", script))).status == "completed"
