"""Tasks that wait for a submission without an invocation: a sub-agent's answer, over restarts."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import pytest
import trio
from agent_world import KILL_STEP, MODEL, World, calls, crash_everywhere, odd_tool
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.agent._inbox import submit
from pidurable.agent._script import Step, When
from pidurable.agent._services import AgentChange
from pidurable.errors import NotFoundError, PidurableError, WaitCycleError, WaitTimeoutError
from pidurable.harness._open import Harness
from pidurable.registry import ToolCall
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase


@attrs.frozen
class Ask:
    """Nothing has been asked yet."""


@attrs.frozen
class Asked:
    """The sub-agent has the question."""

    submission: int


Ctx = TaskContext[str, Ask | Asked, str]


class Delegate(Task[str, Ask | Asked, str]):
    """Asks a sub-agent and completes with its answer, or with why there is none."""

    name = "test.delegate"
    abort = nothing_to_undo

    def initial(self, question: str) -> Ask:
        return Ask()

    @phase
    async def ask(self, at: Ask, ctx: Ctx) -> None:
        child = await ctx.conversation().child_of(ctx, key="child", agent=None)
        submission = await child.submit(ctx.input, request_id=ctx.key("question"))
        await ctx.wait(then=Asked(submission.id), on=[submission.id])

    @phase
    async def answered(self, at: Asked, ctx: Ctx) -> None:
        settled = await ctx.submission(at.submission).wait(timeout=0)
        assert ctx.snapshot.submission(at.submission).status == settled.status
        await ctx.complete(settled.reason or settled.text)


def delegating(*steps: Any) -> World:
    world = World(*steps)
    world.install(tasks=[Delegate()])
    return world


async def delegate(harness: Harness, question: str = "why?") -> Any:
    root = await harness.root()
    return await root.create_task(Delegate, question, key="delegate")


async def test_a_task_wakes_with_the_answer_of_its_sub_agent(autojump_clock: MockClock) -> None:
    """Meanwhile it holds no invocation; the answer is read through the submission's handle."""
    world = delegating(Step(text="because", delay=60.0))

    async with world.open() as harness:
        task = await delegate(harness)
        await wait_all_tasks_blocked()
        waiting = harness.task(task)
        assert waiting.status.word == "waiting"
        assert task not in harness._runtime.invocations
        assert waiting.wait is not None
        assert waiting.wait.on == waiting.wait.others
        explained = harness.explain(task)
        assert "waits for 1 of 1 (all_settled): " in explained.text
        assert [harness.task(id).kind for id in explained.path] == ["pi.generation"]
        outcome = await harness.wait_for_task(task)

    assert outcome.result == "because"
    world.model.check()


async def test_the_answer_is_found_wherever_the_process_dies(autojump_clock: MockClock) -> None:
    """Killed before and after every commit and resumed, the task gets the answer exactly once."""

    async def program(harness: Harness, world: World) -> Any:
        return (await harness.wait_for_task(await delegate(harness))).result

    def check(world: World, result: Any) -> None:
        assert result == "because"

    kills = await crash_everywhere(lambda: delegating(*["because"] * 3), program, check)

    assert kills * KILL_STEP > 10


async def test_a_submission_that_will_not_be_answered_wakes_as_well(
    autojump_clock: MockClock,
) -> None:
    """Withdrawn or aborted, it has settled; the reason is in the record."""
    world = delegating(Step(text="never", delay=60.0))

    async with world.open() as harness:
        task = await delegate(harness)
        await wait_all_tasks_blocked()
        (submission,) = (harness.task(task).wait or pytest.fail("it does not wait")).others
        record = await harness.submission(submission).status()
        await harness.conversation(record.conversation_id).abort()
        outcome = await harness.wait_for_task(task)

    assert outcome.result == "aborted"


async def test_settled_submissions_and_idle_conversations_are_waited_for_together(
    autojump_clock: MockClock,
) -> None:
    """What has settled is fine; the conversation is idle only after its successor run."""
    world = World("one", Step(text="two", delay=60.0))
    seen: list[str] = []

    class Both(Task[list[int], Ask | Asked, str]):
        name = "test.both"
        abort = nothing_to_undo

        def initial(self, ids: list[int]) -> Ask:
            return Ask()

        @phase
        async def ask(self, at: Ask, ctx: TaskContext[list[int], Ask | Asked, str]) -> None:
            await ctx.wait(then=Asked(0), on=ctx.input)

        @phase
        async def done(self, at: Asked, ctx: TaskContext[list[int], Ask | Asked, str]) -> None:
            entries = await ctx.snapshot.history(ctx.input[0])
            seen.extend(entry.kind for entry in entries)
            await ctx.complete(str(ctx.woken_by))

    world.install(tasks=[Both()])
    async with world.open() as harness:
        root, other = await harness.root(), await harness.create_conversation()
        first = await root.submit("a")
        await first.wait()
        await root.submit("b")
        ids = [root.id, first.id]
        task = await other.create_task(Both, ids)
        await wait_all_tasks_blocked()
        assert harness.task(task).status.word == "waiting"
        assert (await harness.wait_for_task(task)).result == "tasks"

    assert seen.count("pi.assistant") == 2


async def test_a_call_cannot_wait_for_a_follow_up_of_its_own_run(
    autojump_clock: MockClock,
) -> None:
    """Parked below the call or in its own memory, the wait is refused with the path."""
    refusals: list[str] = []

    async def body(call: ToolCall) -> str:
        own = harness.conversation(call.conversation_id)
        submission = await own.submit("and then?", request_id=call.key("more"))
        with pytest.raises(WaitTimeoutError):
            await submission.wait(timeout=5)
        with pytest.raises(WaitCycleError) as caught:
            await submission.wait()
        refusals.append(caught.value.path)
        await call.create_task(Follow, submission.id)
        return "asked"

    class Follow(Task[int, Ask, str]):
        name = "test.follow"
        abort = nothing_to_undo

        def initial(self, submission: int) -> Ask:
            return Ask()

        @phase
        async def ask(self, at: Ask, ctx: TaskContext[int, Ask, str]) -> None:
            with pytest.raises(WaitCycleError) as caught:
                await ctx.wait(then=Ask(), on=[ctx.input])
            refusals.append(caught.value.path)
            await ctx.complete("refused")

    world = World(calls("odd"), "done", "followed", tools=[odd_tool(body)])
    world.install(odd_tool(body), tasks=[Follow()])
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        assert (await submission.wait()).text == "done"
        (more,) = [each.id for each in await root.open_submissions()]
        assert (await harness.submission(more).wait()).text == "followed"
        kinds = {task.kind: task.id for task in reversed(harness.tasks())}

    call, follow, run = kinds["pi.tool"], kinds["test.follow"], kinds["pi.generation"]
    assert refusals == [
        f"{call} pi.tool -> {more} submission -> {run} pi.generation -> {call}",
        f"{follow} test.follow -> {more} submission -> {run} pi.generation -> {call} pi.tool "
        f"-> {follow}",
    ]


async def test_a_handle_needs_a_submission(autojump_clock: MockClock) -> None:
    """An id of something else, or of nothing, is refused before anybody waits for it."""
    world = World("ok")

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        assert (await harness.submission(submission.id).wait()).text == "ok"
        for id in (root.id, 10**6, "1", True):
            with pytest.raises(NotFoundError, match="no submission"):
                harness.submission(id)  # type: ignore[arg-type]


async def test_a_call_that_waits_in_memory_is_explained(autojump_clock: MockClock) -> None:
    """It runs, and waits there for a submission; the way leads to what answers that."""
    child = Step(text="because", delay=60.0, when=When(user="why?"))
    world = World(child, calls("subagent", task="why?"), "it is so")

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await wait_all_tasks_blocked()
        (call,) = [task.id for task in harness.tasks(kind="pi.tool")]
        explained = harness.explain(call)
        assert (await submission.wait()).text == "it is so"

    assert "waits there for 1 submission: " in explained.text
    assert len(explained.path) == 1


async def test_what_a_submission_needs_is_the_same_from_both_ends(
    autojump_clock: MockClock,
) -> None:
    """Placed, queued or staged in the asking commit, it needs the generation that is at work."""
    world = World(Step(text="one", delay=60.0), "two", "three")

    async with world.open() as harness:
        root, other = await harness.root(), await harness.create_conversation()
        placed, queued = await root.submit("a"), await root.submit("b")
        await wait_all_tasks_blocked()
        runtime = harness._runtime
        kinds = runtime.kinds
        (run,) = [task.id for task in harness.tasks() if task.outcome is None]
        node = runtime.published.task(run)
        assert node is not None
        assert list(kinds.needed_by(node, None)) == [placed.id, queued.id]
        async with harness.commit() as tx:
            session = runtime.session
            more = submit(session, tx, root.id, "c", when_busy="follow_up", request_id=None)
            apart = submit(session, tx, other.id, "d", when_busy="follow_up", request_id=None)
            assert list(kinds.needed_by(node, tx)) == [placed.id, queued.id, more]
            for id in (placed.id, queued.id, more):
                assert list(kinds.needs(id, tx)) == [run]
            assert list(kinds.needs(apart, tx)) not in ([], [run])
        assert list(kinds.needs(queued.id, None)) == [run]
        await harness.wait_for_idle()
        assert list(kinds.needs(placed.id, None)) == []
        assert list(kinds.needs(run, None)) == []
        assert list(kinds.needed_by(node, None)) == []


@attrs.frozen
class Begin:
    """It has no conversation yet."""


@attrs.frozen
class Open:
    """Its conversation is there."""


class Desk(Task[str, Begin | Open, None]):
    """Owns a conversation for as long as it lives."""

    name = "test.desk"
    abort = nothing_to_undo

    def initial(self, input: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[str, Begin | Open, None]) -> None:
        async with ctx.commit() as tx:
            tx.create_conversation(key="desk")
            tx.goto(Open())

    @phase
    async def open(self, at: Open, ctx: TaskContext[str, Begin | Open, None]) -> None:
        await trio.sleep_forever()


class Reader(Task[int, Ask | Asked, str]):
    """Waits for a submission that somebody else made."""

    name = "test.reader"
    abort = nothing_to_undo

    def initial(self, submission: int) -> Ask:
        return Ask()

    @phase
    async def ask(self, at: Ask, ctx: TaskContext[int, Ask | Asked, str]) -> None:
        await ctx.wait(then=Asked(ctx.input), on=[ctx.input])

    @phase
    async def answered(self, at: Asked, ctx: TaskContext[int, Ask | Asked, str]) -> None:
        await ctx.complete(str(ctx.snapshot.submission(at.submission).reason))


async def test_a_restart_that_aborts_takes_back_what_is_queued_below(
    autojump_clock: MockClock,
) -> None:
    """In the commit of the opening that marks the owner; and who waits for the answer wakes."""
    world = World(calls("slow"))
    world.install(tasks=[Desk(), Reader()])
    ids: list[int] = []

    async def leave(harness: Harness, world: World) -> None:
        root = await harness.root()
        async with harness.commit() as tx:
            owner = tx.create_task(Desk, "", conversation=root.id, on_restart="abort")
        await wait_all_tasks_blocked()
        row = harness.session.storage.conversation_by_key(owner, "desk")
        assert row is not None
        desk = harness.conversation(row.id)
        await desk.configure(AgentChange(model=MODEL))
        await desk.submit("begin")
        await world.reached.wait()
        queued = await desk.submit("and then")
        async with harness.commit() as tx:
            reader = tx.create_task(Reader, queued.id, conversation=root.id)
        await wait_all_tasks_blocked()
        ids.extend((owner, queued.id, reader))
        world.storage.freeze()
        await root.submit("never stored")

    with contextlib.suppress(PidurableError):
        async with world.open() as harness:
            with trio.fail_after(60):
                await leave(harness, world)
    owner, queued, reader = ids
    async with world.open() as harness:
        storage = harness.session.storage
        marked, taken = storage.task(owner), storage.submission(queued)
        assert marked is not None
        assert taken is not None
        assert marked.abort_reason == "restart"
        assert (taken.status, taken.reason) == ("unanswered", "aborted")
        assert (await harness.wait_for_task(reader)).result == "aborted"  # type: ignore[arg-type]
        await harness.wait_for_idle()
