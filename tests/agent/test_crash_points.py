"""The agent loop, killed before and after every commit, ends as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from agent_world import (
    MODEL,
    DieAt,
    World,
    ask,
    calls,
    crash_everywhere,
    messages,
    results,
    run_killed,
    verify,
)
from trio.testing import MockClock

from pidurable.agent._script import ScriptedCall, ScriptedError, Step, When
from pidurable.harness._open import Harness
from pidurable.records._messages import AssistantMessage

pytestmark = pytest.mark.slow


async def one_input(harness: Harness, world: World) -> Any:
    """The plainest host: it asks, and waits."""
    return await ask(harness, "go")


async def test_a_plain_answer_survives_a_kill_at_every_commit(autojump_clock: MockClock) -> None:
    """One input has one answer, whatever commit the process dies at."""
    kills = await crash_everywhere(
        lambda: World("the answer"), one_input, lambda world, settled: answered(settled)
    )

    assert kills >= 3


def answered(settled: Any, text: str = "the answer") -> None:
    """The submission is done, with this text."""
    assert (settled.status, settled.text) == ("done", text)


async def test_a_streamed_answer_survives_a_kill_at_every_commit(autojump_clock: MockClock) -> None:
    """What was shown of a killed answer is kept apart and charged; then it is asked for again."""
    step = Step(text=("one ", "two ", "three ", "four"), delay=0.15)
    whole = "one two three four"
    kept: list[str] = []

    async def program(harness: Harness, world: World) -> Any:
        settled = await ask(harness, "go")
        root = await harness.root()
        found = messages(await root.history(), AssistantMessage)
        return settled, found, root.usage()["models"][MODEL]["requests"]

    def check(world: World, result: Any) -> None:
        settled, found, requests = result
        answered(settled, whole)
        assert [each.status for each in found] == ["aborted"] * (len(found) - 1) + ["complete"]
        assert requests == len(found) <= 2
        kept.extend(each.text for each in found[:-1])

    # C032
    kills = await crash_everywhere(lambda: World(step), program, check)

    assert kills >= 6
    assert len(kept) >= 2
    assert all(text and whole.startswith(text) for text in kept)


async def test_a_safe_tool_runs_at_least_once(autojump_clock: MockClock) -> None:
    """A safe call that was killed runs again with its arguments, and the model gets its result."""

    def check(world: World, settled: Any) -> None:
        answered(settled)
        assert len(set(world.ledger)) == 1

    # C001
    kills = await crash_everywhere(
        lambda: World(calls("safe", what="it"), Step(text="the answer")), one_input, check
    )

    assert kills >= 8


async def test_an_effect_that_may_not_repeat_happens_at_most_once(
    autojump_clock: MockClock,
) -> None:
    """A killed call of such a tool is closed as interrupted, and the model goes on."""

    def check(world: World, settled: Any) -> None:
        answered(settled)
        assert len(world.ledger) <= 1

    # C001, C005
    await crash_everywhere(
        lambda: World(calls("once", what="it"), Step(text="the answer")), one_input, check
    )


async def test_twenty_parallel_results_are_all_there_in_call_order(
    autojump_clock: MockClock,
) -> None:
    """However often it dies, the model sees the result of every call, in the order of its calls."""
    names = ["safe", "once"] * 10

    def make() -> World:
        parallel = tuple(
            ScriptedCall(name=name, arguments={"what": f"n{index}"})
            for index, name in enumerate(names)
        )
        return World(Step(calls=parallel), Step(text="the answer"))

    def check(world: World, settled: Any) -> None:
        answered(settled)
        last = world.model.requests[-1].messages[-20:]
        for index, item in enumerate(last):
            text = str(item.message)
            assert f"n{index}" in text or "unknown" in text
            assert names[index] in text

    # C002, C003
    await crash_everywhere(make, one_input, check)


async def test_a_queued_follow_up_is_answered_after_its_run(autojump_clock: MockClock) -> None:
    """A follow-up that waits while the process dies is answered once, after the first answer."""

    async def program(harness: Harness, world: World) -> Any:
        root = await harness.root()
        first = await root.submit("first", request_id="r1")
        second = await root.submit("second", request_id="r2")
        return await first.wait(), await second.wait()

    def check(world: World, settled: Any) -> None:
        assert [each.status for each in settled] == ["done", "done"]
        assert settled[0].answer < settled[1].answer

    # C032
    await crash_everywhere(
        lambda: World(calls("safe"), "answer one", "answer two", "answer three"), program, check
    )


async def test_an_abort_in_the_middle_ends_the_run(autojump_clock: MockClock) -> None:
    """An abort, with a kill at any commit before, in or after it, ends the run and its call."""

    async def program(harness: Harness, world: World) -> Any:
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        with trio.move_on_after(5):
            await world.reached.wait()
        await root.abort()
        return await submission.wait()

    def check(world: World, settled: Any) -> None:
        assert (settled.status, settled.reason) == ("unanswered", "aborted")

    # C001
    await crash_everywhere(lambda: World(calls("slow"), "never"), program, check)


async def test_a_retryable_error_is_tried_again_after_its_wait(autojump_clock: MockClock) -> None:
    """A request that fails once is sent again, also if the process dies while it waits."""
    step = Step(text="the answer", error=ScriptedError(detail="overloaded", retry_after=3.0))

    # C008, C069
    await crash_everywhere(
        lambda: World(calls("safe"), step), one_input, lambda world, settled: answered(settled)
    )


async def test_a_sub_agent_is_found_again_after_every_kill(autojump_clock: MockClock) -> None:
    """A tool that starts a sub-agent finds its child, and the child's answer, however it dies."""

    def make() -> World:
        return World(
            Step(text="the child's answer", when=When(user="the task")),
            calls("subagent", task="do the task"),
            Step(text="the answer"),
        )

    def check(world: World, settled: Any) -> None:
        answered(settled)
        assert len(set(world.ledger)) == 1
        assert "the child's answer" in str(world.model.requests[-1].messages[-1].message)

    await crash_everywhere(make, one_input, check)


async def test_an_aborted_parent_takes_its_sub_agent_with_it(autojump_clock: MockClock) -> None:
    """An abort of the parent reaches the child's own call, and all of it ends, at every kill."""

    async def program(harness: Harness, world: World) -> Any:
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        with trio.move_on_after(5):
            await world.reached.wait()
        await root.abort()
        settled = await submission.wait()
        await harness.wait_for_idle()
        return settled

    def make() -> World:
        return World(
            Step(calls=(ScriptedCall(name="slow"),), when=When(user="the task")),
            calls("subagent", task="do the task"),
            Step(text="never"),
        )

    def check(world: World, settled: Any) -> None:
        assert (settled.status, settled.reason) == ("unanswered", "aborted")

    # C045
    await crash_everywhere(make, program, check)


@pytest.mark.parametrize("point", ["CP1", "CP2", "CP3", "CP4", "CP5", "CP7"])
@pytest.mark.parametrize("name", ["safe", "once"])
async def test_each_crash_point_of_the_loop_is_survived(
    autojump_clock: MockClock, point: str, name: str
) -> None:
    """A process that dies at a crash point goes on from it: effects are kept, the answer comes."""
    world = World(calls(name), Step(text="the answer"))
    died = DieAt(world, point)

    # C001
    await run_killed(world, died, one_input)
    before = list(world.ledger)
    async with world.open() as harness:
        settled = await one_input(harness, world)
        await harness.wait_for_idle()
        await verify(world, harness)
        (result,) = await results(harness)

    assert died.struck
    answered(settled)
    effects = {"CP1": 0, "CP2": None, "CP3": 1, "CP4": 1, "CP5": 0, "CP7": 0}[point]
    if effects is not None:
        assert len(before) == effects
    if name == "once":
        assert len(world.ledger) <= 1
        assert result.code == ("interrupted" if point in ("CP2", "CP3") else None)
    else:
        assert 1 <= len(world.ledger) <= 2
        assert result.code is None
