"""Work that was interrupted, as people have met it: nothing is lost, doubled or left open by it.

Beside the kills at every commit of `test_crash_points` and the aborts of `test_owned_work`.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import attrs
import pytest
import trio
from agent_world import (
    DieAt,
    FreezeAt,
    World,
    ask,
    calls,
    check_transcript,
    conversations,
    crash_everywhere,
    messages,
    odd_tool,
    results,
    run_killed,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable import AgentChange, Task, TaskContext, ToolCall, ToolResultMessage, phase, tool
from pidurable.agent._script import ScriptedCall, Step
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings

# --- interrupted by a person ----------------------------------------------------------------


@pytest.mark.parametrize("names", [("slow",), ("once", "slow")])
async def test_carry_on_is_answered_wherever_the_interrupt_was_killed(
    autojump_clock: MockClock, names: tuple[str, ...]
) -> None:
    """An abort during a call, killed at any commit, leaves a history that takes the next input."""

    async def program(harness: Harness, world: World) -> Any:
        root = await harness.root()
        first = await root.submit("go", request_id="r1")
        with trio.move_on_after(5):
            await world.reached.wait()
        if (await first.status()).status != "unanswered":
            await root.abort()
        return await first.wait(), await ask(harness, "carry on", "r2")

    def check(world: World, settled: Any) -> None:
        first, second = settled
        assert (first.status, first.reason) == ("unanswered", "aborted")
        assert (second.status, second.text) == ("done", "welcome back")
        assert len([line for line in world.ledger if line.startswith("once")]) <= 1

    # C001, C004
    kills = await crash_everywhere(
        lambda: World(calls(*names), "welcome back", repeat_last=True), program, check
    )

    assert kills >= 6


@pytest.mark.parametrize("how", ["async", "thread"])
async def test_a_call_that_does_not_listen_is_named_and_closed_when_it_ends(
    autojump_clock: MockClock, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its siblings stop at once; after ten seconds it is named with its line, and never left."""
    gate, letting = trio.Event(), threading.Event()

    async def deaf(call: ToolCall) -> str:
        world.reached.set()
        if how == "thread":
            await trio.to_thread.run_sync(letting.wait)
        else:
            with trio.CancelScope(shield=True):
                await gate.wait()
        return "late"

    world = World(calls("odd", "slow"), "welcome back", tools=[odd_tool(deaf)])

    # C007
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        await world.reached.wait()
        await trio.sleep(1)
        odd, slow = (call["task"] for call in root.live()["calls"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(root.abort)
            await trio.sleep(12)
            said = harness.explain(odd)
            listened = harness.task(slow).outcome
            letting.set()
            gate.set()
        outcome = await submission.wait()
        second = await ask(harness, "carry on", "r2")
        await verify(world, harness)
        codes = [each.code for each in await results(harness)]

    assert said.text.startswith("has been told to stop for 12s and still runs, at ")
    assert "test_interrupted_work.py" in said.text
    assert f"task {odd} (pi.tool) has been stopping for 10 s" in caplog.text
    assert listened is not None
    assert listened.status == "aborted"
    assert outcome.reason == "aborted"
    assert codes == ["aborted", "aborted"]
    assert second.text == "welcome back"


# --- results ----------------------------------------------------------------------------------


async def test_what_a_reconcile_puts_out_comes_behind_what_its_call_had(
    autojump_clock: MockClock,
) -> None:
    """An interrupted result has what was committed before, also where `reconcile` reports."""
    begun = trio.Event()

    async def cannot_tell(_: Any, call: ToolCall) -> None:
        await call.diagnostic("info", "the outside says nothing")
        await call.sleep(1)

    @tool(replay="reconcile", reconcile=cannot_tell)
    async def odd(call: ToolCall) -> None:
        """Put something out, and stay."""
        await call.output("line one\n")
        await call.sleep(1)
        begun.set()
        await trio.sleep_forever()

    world = World(calls("odd"), "seen", tools=[odd])
    async with world.open() as harness:
        await (await harness.root()).submit("go", request_id="r1")
        await begun.wait()
        world.storage.freeze()
    async with world.open() as harness:
        assert (await ask(harness, "go")).status == "done"
        (result,) = await results(harness)

    assert result.code == "interrupted"
    told = text_of(result)
    assert told.index("line one") < told.index("info: the outside says nothing")


async def test_parallel_results_are_all_there_after_a_reopening(autojump_clock: MockClock) -> None:
    """Three results that came last first are in call order, also in the next process."""
    draw = random.Random(5)
    tokens = [f"token {draw.getrandbits(40)}" for _ in range(3)]
    asked = trio.Event()

    @tool(replay="safe")
    async def draws(index: int, call: ToolCall) -> str:
        """Draw a number.

        Args:
            index: Which.
        """
        await call.sleep(3.0 - index)
        return tokens[index]

    def hangs(view: Any) -> bool:
        if view.answers == 1 and not asked.is_set():
            asked.set()
            return True
        return False

    step = Step(calls=tuple(ScriptedCall(name="draws", arguments={"index": n}) for n in range(3)))
    world = World(Step(text="never", delay=1e6, when=hangs), step, "done", tools=[draws])

    # C002
    async with world.open() as harness:
        root = await harness.root()
        await root.submit("go", request_id="r1")
        await asked.wait()
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "done"
    sent = world.model.requests[-1].messages
    found = [item.message for item in sent if isinstance(item.message, ToolResultMessage)]
    assert [text_of(message) for message in found] == tokens


def team(rounds: int, agents: int) -> World:
    """A parent that lets sub-agents work at once: so many rounds of five calls each."""
    steps = [Step(calls=calls(*["safe"] * 5).calls, when=_at(n)) for n in range(rounds)]
    return World(
        *steps,
        Step(text="the child's answer", when=_at(rounds)),
        calls(*["subagent"] * agents, task="do the task"),
        "the answer",
        # They die more often than their work would explain.
        settings=Settings(recoveries_max=100),
    )


def _at(answers: int) -> Any:
    return lambda view: view.answers == answers and "the task" in str(view.user)


@pytest.mark.slow
async def test_no_result_is_ever_without_its_call_in_a_team_that_is_killed(
    autojump_clock: MockClock, slow_run: bool
) -> None:
    """Sub-agents that write at once, killed at random: after each restart every result has a call.

    With `-m slow` four agents make 50 calls each and are killed 30 times.
    """
    rounds, agents, kills = (10, 4, 30) if slow_run else (2, 2, 6)
    world = team(rounds, agents)
    draw = random.Random(3)
    struck = 0

    # C003
    for _ in range(kills):
        where = draw.choice(["before", "after"])
        point = FreezeAt(world, where, draw.randint(1, 4))  # type: ignore[arg-type]
        await run_killed(world, point, lambda harness, _: ask(harness, "go"))
        struck += point.struck
        async with world.open() as harness:
            for conversation in conversations(harness):
                _check_pairs(await conversation.history(limit=10_000))
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        await verify(world, harness)
        told = [await each.history(limit=10_000) for each in conversations(harness)]

    assert struck == kills
    assert outcome.text == "the answer"
    found = [message for entries in told for message in messages(entries, ToolResultMessage)]
    assert len(found) == agents * (1 + 5 * rounds)
    assert not any(message.is_error for message in found)


def _check_pairs(entries: Any) -> None:
    """Every result that is stored is behind its call, and no call has two."""
    seen: set[Any] = set()
    called: dict[int, int] = {}
    for entry in entries:
        for message in entry.messages:
            if isinstance(message, ToolResultMessage):
                assert message.call[1] < called[message.call[0]]
                assert message.call not in seen
                seen.add(message.call)
            elif getattr(message, "tool_calls", ()):
                called[entry.id] = len(message.tool_calls)


def test_the_check_of_pairs_sees_a_result_without_its_call() -> None:
    """A control: a history that begins with a result is refused."""
    message = ToolResultMessage(call=(1, 0), name="x", blocks=(), is_error=False, at_us=1)

    with pytest.raises(KeyError):
        _check_pairs([attrs.make_class("E", ["id", "messages"])(2, (message,))])


# --- going on after a restart -----------------------------------------------------------------


@attrs.frozen
class Begin:
    """Nothing happened yet."""


class Delegate(Task[str, Begin, str]):
    """Gives a task to an agent of its own, and waits for the answer."""

    name = "test.delegate"

    def initial(self, input: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[str, Begin, str]) -> None:
        async with ctx.commit() as tx:
            child = tx.create_conversation(key="child")
        talk = ctx.conversation(child)
        await talk.configure(AgentChange(model="scripted/model"))
        submission = await talk.submit(ctx.input, request_id=ctx.key("task"))
        await ctx.complete((await submission.wait()).text)

    async def abort(self, at: Begin, ctx: TaskContext[str, Begin, str]) -> None:
        async with ctx.commit() as tx:
            tx.end_aborted()


async def test_what_waits_after_a_restart_does_nothing_until_it_is_told(
    autojump_clock: MockClock,
) -> None:
    """Reopened and asked, a delegate stands still and says why; "stop" ends it with no effect."""
    six = [Step(calls=calls("once").calls, when=_at(n)) for n in range(6)]
    world = World(*six, Step(text="never", when=_at(6)), "hello")
    world.install(tasks=[Delegate()])

    async def begin(harness: Harness, _: World) -> None:
        root = await harness.root()
        task = await root.create_task(Delegate, "do the task", key="d", on_restart="wait")
        await harness.wait_for_task(task)

    # C006
    died = DieAt(world, "CP3", 3)
    await run_killed(world, died, begin)
    before = list(world.ledger)
    async with world.open() as harness:
        (delegate,) = (task for task in harness.tasks() if task.kind == "test.delegate")
        await trio.sleep(60)
        looked = list(world.ledger)
        # A harmless message starts the harness, and still not this.
        hello = await ask(harness, "hi")
        await trio.sleep(60)
        said = harness.explain(delegate.id)
        blocked = harness.task(delegate.id).blocked
        await harness.abort_task(delegate.id, "stop")
        ended = await harness.wait_for_task(delegate.id)
        await harness.wait_for_idle()

    assert died.struck
    assert len(before) == 3
    assert looked == before
    assert hello.text == "hello"
    assert blocked == "interrupted"
    assert said.code == "interrupted"
    assert ended.status == "aborted"
    assert world.ledger == before


@pytest.mark.parametrize("point", ["CP2", "CP7"])
async def test_a_turn_that_kills_the_process_is_not_tried_for_ever(
    autojump_clock: MockClock, point: str
) -> None:
    """Resumed with a stored reason after each death, and after five parked, named, and let go."""
    world = World(Step(text="so ", calls=calls("safe").calls), "the answer")

    # C009
    for _ in range(5):
        died = DieAt(world, point)
        await run_killed(world, died, lambda harness, _: ask(harness, "go"))
        assert died.struck
    async with world.open() as harness:
        submission = await (await harness.root()).submit("go", request_id="r1")
        await trio.sleep(60)
        (parked,) = [task for task in harness.tasks() if task.blocked is not None]
        said = harness.explain(parked.id)
        before = len(world.model.requests), len(world.ledger)
        await trio.sleep(3_600)
        after = len(world.model.requests), len(world.ledger)
        await harness.retry_task(parked.id)
        outcome = await submission.wait()
        await harness.wait_for_idle()
        for conversation in conversations(harness):
            check_transcript(await conversation.history(limit=10_000))
        world.model.check()

    assert parked.kind == ("pi.tool" if point == "CP2" else "pi.generation")
    assert (parked.blocked, said.code) == ("crash_loop", "crash_loop")
    assert said.remedy is not None
    assert before == after
    assert outcome.text == "the answer"
