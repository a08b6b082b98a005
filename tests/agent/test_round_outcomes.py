"""What the results of a round ask for: the end of the run, a fresh context, more tools."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from agent_world import (
    MODEL,
    World,
    ask,
    calls,
    crash_everywhere,
    messages,
    results,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable.agent._script import RequestView, ScriptedCall, ScriptedError, Step
from pidurable.agent._services import AgentChange
from pidurable.agent._tool_call import ToolTask
from pidurable.harness._open import Harness
from pidurable.records._messages import UserMessage
from pidurable.registry import Tool, ToolCall, ToolResult, tool


def ending(name: str, **fields: Any) -> Tool[..., Any]:
    """A tool whose result asks for something."""

    @tool(name=name, replay="safe")
    async def ending(call: ToolCall) -> ToolResult:
        """Ask for something."""
        return ToolResult(f"{name} was called", **fields)

    return ending


def sent(world: World, number: int = -1) -> list[str]:
    """The texts of the messages of a request."""
    return [text_of(item.message) for item in world.model.requests[number].messages]


def fresh(view: RequestView) -> bool:
    """Whether a request begins with a note, and nothing was answered since."""
    return view.answers == 0 and "note" in view.text


END = ending("finish", terminate=True)


# --- terminate ----------------------------------------------------------------------------------


async def test_a_round_whose_results_all_terminate_ends_the_run(autojump_clock: MockClock) -> None:
    """The input is done, with the answer that made the calls; nobody asks the model again."""
    world = World(calls("finish", "finish", text="I am done."), "later", tools=[END])

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        second = await root.submit("more")
        outcome, later = await first.wait(), await second.wait()
        entries = await root.history()
        await verify(world, harness)

    assert (outcome.status, outcome.text) == ("done", "I am done.")
    assert outcome.answer == next(e.id for e in entries if e.kind == "pi.assistant")
    assert later.text == "later"
    assert len(world.model.requests) == 2
    assert sent(world) == ["go", "I am done.", *["finish was called"] * 2, "more"]


@pytest.mark.parametrize("other", ["safe", "nope", "raises"])
async def test_one_result_that_does_not_terminate_lets_the_run_go_on(
    autojump_clock: MockClock, other: str
) -> None:
    """Also where it is the result of an unknown tool, or of one that raised."""

    @tool
    async def raises(call: ToolCall) -> str:
        """Raise."""
        raise LookupError("no")

    world = World(calls("finish", other), "done", tools=[END, raises])

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "done"
    assert len(world.model.requests) == 2


async def test_a_call_that_faulted_does_not_terminate(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call without an outcome of its own has asked for nothing."""
    store = ToolTask._store

    async def faulty(self: ToolTask, ctx: Any, *args: Any, **named: Any) -> Any:
        if ctx.input.name == "once":
            raise RuntimeError("a bug of ours")
        return await store(self, ctx, *args, **named)

    monkeypatch.setattr(ToolTask, "_store", faulty)
    world = World(calls("finish", "once"), "done", tools=[END])

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "done"


@pytest.mark.parametrize("fields", [{"error": "no"}, {"terminate": "yes"}, {"error": None}])
async def test_what_is_neither_true_nor_false_is_refused(
    autojump_clock: MockClock, fields: dict[str, Any]
) -> None:
    """A word is not taken for a yes: the model is told what is wrong, and the run goes on."""
    world = World(calls("odd"), "done", tools=[ending("odd", **fields)])

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        (result,) = await results(harness)
        await verify(world, harness)

    ((name, value),) = fields.items()
    assert outcome.text == "done"
    assert (result.is_error, result.code) == (True, "tool_error")
    assert f"{name} of a result is True or False, not {value!r}" in text_of(result)


# --- handoff ------------------------------------------------------------------------------------


async def test_a_handoff_goes_on_in_a_fresh_context(autojump_clock: MockClock) -> None:
    """The model sees the last note in call order and the input; the submission stays the same."""
    world = World(
        calls("first", "second"),
        Step(
            text="in a fresh context", when=lambda view: view.answers == 0 and "note" in view.text
        ),
        "after",
        tools=[ending("first", handoff="note one"), ending("second", handoff="note two")],
    )

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        later = await ask(harness, "more", "r2")
        await verify(world, harness)

    assert (outcome.status, outcome.text) == ("done", "in a fresh context")
    assert sent(world, 1) == ["note two", "go"]
    assert world.model.requests[1].system == world.model.requests[0].system
    assert world.model.requests[1].tools == world.model.requests[0].tools
    assert sent(world, 2) == ["note two", "go", "in a fresh context", "more"]
    assert later.status == "done"


async def test_a_continued_run_that_hands_off_takes_along_what_it_answers(
    autojump_clock: MockClock,
) -> None:
    """A run without inputs of its own says again what the one before it had not answered."""
    leave = (ScriptedCall(name="leave", arguments={}),)
    world = World(
        "hello yourself",
        Step(calls=leave, error=ScriptedError(kind="other"), times=1),
        Step(text="in a fresh context", when=fresh),
        tools=[ending("leave", handoff="note")],
    )

    async with world.open() as harness:
        root = await harness.root()
        await ask(harness, "hello", "r0")
        outcome = await ask(harness, "do three steps")
        continued = await (await root.continue_run()).wait()
        await verify(world, harness)

    assert outcome.reason == "model_error"
    assert continued.text == "in a fresh context"
    assert sent(world) == ["note", "do three steps"]


async def test_a_continued_run_that_hands_off_leaves_what_was_done_behind(
    autojump_clock: MockClock,
) -> None:
    """What a run has answered that ended with its calls is not asked once more."""
    leave = (ScriptedCall(name="leave", arguments={}),)
    world = World(
        calls("finish"),
        Step(calls=leave, error=ScriptedError(kind="other"), times=1),
        Step(text="in a fresh context", when=fresh),
        tools=[ending("leave", handoff="note"), END],
    )

    async with world.open() as harness:
        root = await harness.root()
        await ask(harness, "pay the bill", "r0")
        await ask(harness, "do three steps")
        await (await root.continue_run()).wait()
        await verify(world, harness)

    assert sent(world) == ["note", "do three steps"]


async def test_what_joins_the_run_at_a_handoff_is_not_left_behind(
    autojump_clock: MockClock,
) -> None:
    """A steer that waited for the end of the round is said in the fresh context, once."""
    reached = trio.Event()

    @tool(replay="safe")
    async def leave(call: ToolCall) -> ToolResult:
        """Leave a note."""
        reached.set()
        await call.sleep(5)
        return ToolResult("left", handoff="note", terminate=True)

    world = World(
        calls("leave"),
        Step(text="done", when=fresh),
        tools=[leave],
    )

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await reached.wait()
        steer = await root.submit("hurry", when_busy="steer")
        outcome, steered = await submission.wait(), await steer.wait()
        await verify(world, harness)

    # A handoff counts for more than an end that is asked for beside it.
    assert (outcome.text, steered.text) == ("done", "done")
    assert sent(world) == ["note", "go", "hurry"]


async def test_handoffs_in_a_row_are_limited(autojump_clock: MockClock) -> None:
    """Five in a row are taken; the sixth ends the run, `handoff_limit`."""
    world = World(calls("leave"), repeat_last=True, tools=[ending("leave", handoff="again")])

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert (outcome.status, outcome.reason) == ("unanswered", "handoff_limit")
    assert len(world.model.requests) == 6


async def test_a_round_between_two_handoffs_begins_the_count_anew(
    autojump_clock: MockClock,
) -> None:
    """Only handoffs that follow each other count."""
    asked = 0

    def due(view: Any) -> bool:
        nonlocal asked
        asked += 1
        return asked % 3 != 0 and asked < 20

    world = World(
        Step(calls=(ScriptedCall(name="leave"),), when=due),
        Step(calls=(ScriptedCall(name="safe"),), when=lambda view: asked < 20),
        Step(text="done", when=lambda view: True),
        tools=[ending("leave", handoff="again")],
    )

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "done"
    assert asked >= 20


async def test_a_handoff_survives_a_kill_at_every_commit(autojump_clock: MockClock) -> None:
    """However it dies, the input is said once in the fresh context, and answered once."""

    def make() -> World:
        return World(
            calls("leave"),
            Step(text="done", when=fresh),
            tools=[ending("leave", handoff="note")],
        )

    async def program(harness: Harness, world: World) -> Any:
        outcome = await ask(harness, "go")
        root = await harness.root()
        users = messages(await root.history(), UserMessage)
        return outcome, [text_of(message) for message in users]

    def check(world: World, result: Any) -> None:
        outcome, users = result
        assert outcome.text == "done"
        assert users == ["go", "note", "go"]
        assert sent(world) == ["note", "go"]

    kills = await crash_everywhere(make, program, check)

    assert kills > 5


# --- add_tools ----------------------------------------------------------------------------------


async def test_a_result_adds_tools_to_those_that_were_chosen(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The next request offers them; what is not installed yet is kept, and reported."""
    more = ending("more", add_tools=("safe", "once", "missing", "more"))
    world = World(calls("more"), calls("once"), "done", tools=[more])

    async with world.open(agent=AgentChange(model=MODEL, tools=["more"])) as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "done"
    offered = [sorted(tool.name for tool in request.tools) for request in world.model.requests]
    assert offered == [["more"], ["more", "once", "safe"], ["more", "once", "safe"]]
    assert len(world.ledger) == 1
    assert "'missing' is to be added" in caplog.text


async def test_where_no_tools_were_chosen_all_are_offered_as_before(
    autojump_clock: MockClock,
) -> None:
    """Adding a tool to all of them makes no list of them."""
    world = World(calls("more"), "done", tools=[ending("more", add_tools=("safe",))])

    async with world.open() as harness:
        await ask(harness, "go")
        root = await harness.root()
        later = [tool.name for tool in world.model.requests[-1].tools]
        chosen = root.agent()["tools"]
        await verify(world, harness)

    assert later == [tool.name for tool in world.model.requests[0].tools]
    assert chosen is None
