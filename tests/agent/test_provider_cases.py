"""What providers do to whole runs: cut arguments, repeats, nothing, silence, cut streams, waits."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from agent_world import (
    MODEL,
    World,
    ask,
    calls,
    messages,
    odd_tool,
    results,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable.agent._models import AssistantMessage
from pidurable.agent._script import Cut, ScriptedCall, ScriptedError, Stall, Step
from pidurable.agent._services import AgentChange
from pidurable.records._limits import Settings
from pidurable.records._messages import TextBlock, ToolCallBlock
from pidurable.registry import ToolCall, ToolResult, tool

SILENCE = 120.0


async def answers(world: World) -> list[AssistantMessage]:
    """The answers of the root, in order, whatever became of them."""
    async with world.open() as harness:
        root = await harness.root()
        return messages(await root.history(limit=1000), AssistantMessage)


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["length", "tool_use"])
async def test_arguments_cut_at_any_byte_run_nothing(autojump_clock: MockClock, stop: Any) -> None:
    """Each cut call gets an error with the schema; only the whole one runs, with what it says."""
    whole = '{"what": "a \\"b\\" \u00e9"}'
    cut = [whole[:length] for length in range(1, len(whole))]
    asked = tuple(ScriptedCall(name="safe", arguments=text) for text in (*cut, whole))
    world = World(Step(calls=asked, stop=stop), "I see")

    # C064
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)
        found = sorted(await results(harness), key=lambda result: result.call)

    assert outcome.text == "I see"
    assert [result.code for result in found] == ["invalid_arguments"] * len(cut) + [None]
    assert all('"properties"' in text_of(result) for result in found[:-1])
    assert text_of(found[-1]) == 'saw a "b" \u00e9'
    assert len(world.ledger) == 1


async def test_a_missing_field_and_no_arguments_at_all(autojump_clock: MockClock) -> None:
    """A required field is not made up; an empty text is right for a tool that takes nothing."""

    @tool(replay="safe")
    async def needs(call: ToolCall, what: str) -> str:
        """Need something.

        Args:
            what: Which.
        """
        world.ledger.append("ran")
        return what

    asked = [
        ScriptedCall(name="needs", arguments='{"other": 1}'),
        ScriptedCall(name="needs", arguments=""),
        ScriptedCall(name="odd", arguments=""),
    ]

    async def body(call: ToolCall) -> str:
        return "no arguments needed"

    world = World(Step(calls=tuple(asked)), "ok", tools=[needs, odd_tool(body)])

    # C064
    async with world.open() as harness:
        await ask(harness, "go")
        await verify(world, harness)
        found = sorted(await results(harness), key=lambda result: result.call)

    assert [result.code for result in found] == ["invalid_arguments", "invalid_arguments", None]
    assert "what" in text_of(found[0])
    assert world.ledger == []


async def test_cut_arguments_for_ever_end_with_the_turns(autojump_clock: MockClock) -> None:
    """A model that repeats its mistake is told of it each time, and stopped by `turns_max`."""
    call = ScriptedCall(name="once", arguments='{"what": "x')
    world = World(Step(calls=(call,)), repeat_last=True)

    # C064
    async with world.open(agent=AgentChange(model=MODEL, turns_max=5)) as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)
        found = await results(harness)

    assert outcome.reason == "turn_limit"
    assert [result.code for result in found] == ["invalid_arguments"] * 5
    assert world.ledger == []


async def test_the_same_call_in_every_turn_and_after_a_restart_is_a_new_call(
    autojump_clock: MockClock,
) -> None:
    """Ids are ours: what looks the same has its own effect, its own result, and its own id."""
    same = calls("safe", "safe", what="same")
    world = World(same, same, "one", same, "two")

    # C065
    async with world.open() as harness:
        first = await ask(harness, "go", "r1")
    async with world.open() as harness:
        second = await ask(harness, "go", "r2")
        await verify(world, harness)
        found = await results(harness)

    assert (first.text, second.text) == ("one", "two")
    assert len(set(world.ledger)) == 6
    assert len({result.call for result in found}) == 6


# --- nothing ------------------------------------------------------------------------------------

NOTHING = {
    "empty": Step(),
    "blank": Step(text=" \n"),
    "thinking": Step(thinking="hm"),
    "promised": Step(stop="tool_use"),
}


@pytest.mark.parametrize("kind", NOTHING)
@pytest.mark.parametrize("times", [1, 3])
async def test_nothing_for_an_answer_is_asked_for_again(
    autojump_clock: MockClock, kind: str, times: int
) -> None:
    """Once or three times, the answer comes; a follow-up is answered after it, not by nothing."""
    world = World(
        Step(
            text=NOTHING[kind].text,
            thinking=NOTHING[kind].thinking,
            stop=NOTHING[kind].stop,
            when=lambda view: len(world.model.requests) <= times,
        ),
        "first",
        "second",
    )

    # C066
    async with world.open() as harness:
        root = await harness.root()
        asked = [await root.submit("one"), await root.submit("two")]
        found = [(await each.wait()).text for each in asked]
        await verify(world, harness)

    assert found == ["first", "second"]
    assert len(world.model.requests) == times + 2


@pytest.mark.parametrize("kind", NOTHING)
async def test_nothing_for_ever_ends_the_run_and_leaves_the_follow_up(
    autojump_clock: MockClock, kind: str
) -> None:
    """After a few tries there is a clear reason, and what was queued is still in the inbox."""
    world = World(NOTHING[kind], repeat_last=True)

    # C066
    async with world.open() as harness:
        root = await harness.root()
        first, second = await root.submit("one"), await root.submit("two")
        outcome = await first.wait()
        waiting = [item["submission"] for item in root.inbox()]
        await verify(world, harness)

    assert (outcome.status, outcome.reason) == ("unanswered", "model_error")
    assert "empty answer" in outcome.detail
    assert waiting == [second.id]
    assert len(world.model.requests) == 1 + Settings().request_tries


# --- silence and cut streams --------------------------------------------------------------------

TALK = Step(text=("so ", "far"), calls=(ScriptedCall(name="once", arguments={"what": "abc"}),))
PLACES = {"before": -1, "headers": 0, "text": 1, "arguments": 4}
"""After how many pieces; the fourth is within the arguments."""


def talk(**faults: Any) -> Step:
    """The same answer, with a fault before it."""
    return Step(text=TALK.text, calls=TALK.calls, piece_chars=4, **faults)


@pytest.mark.parametrize("place", PLACES)
async def test_silence_ends_the_request_in_time_and_it_is_sent_again(
    autojump_clock: MockClock, place: str
) -> None:
    """Wherever a stream falls silent, nothing of it runs, and the next try is answered."""
    world = World(talk(stall=Stall(after=PLACES[place])), "done")

    # C067
    async with world.open() as harness:
        began = trio.current_time()
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "done"
    assert SILENCE <= trio.current_time() - began < SILENCE + 5
    assert len(world.model.requests) == 3
    assert len(world.ledger) == 1


@pytest.mark.parametrize("place", PLACES)
async def test_an_abort_does_not_wait_for_a_silent_stream(
    autojump_clock: MockClock, place: str
) -> None:
    """Whoever gives up is obeyed at once; what was shown is kept as an aborted entry."""
    world = World(talk(stall=Stall(after=PLACES[place])), "never")

    # C067
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await trio.sleep(30)
        began = trio.current_time()
        await root.abort()
        outcome = await submission.wait()
        await harness.wait_for_idle()
        took = trio.current_time() - began
        await verify(world, harness)
    kept = await answers(world)

    assert outcome.reason == "aborted"
    assert took < 1
    assert [each.text for each in kept] == {
        "before": [],
        "headers": [],
        "text": ["so "],
        "arguments": ["so far"],
    }[place]
    assert all(each.status == "aborted" for each in kept)
    assert world.ledger == []


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("after", range(6))
async def test_a_stream_that_is_cut_anywhere_is_no_answer(
    autojump_clock: MockClock, after: int, raises: bool
) -> None:
    """Half a sentence or half a call is kept as a failed attempt, and asked for again."""
    world = World(talk(cut=Cut(after=after, raises=raises)), "done")

    # C068
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)
    first, second, third = await answers(world)

    assert outcome.text == "done"
    assert [first.status, second.status, third.status] == ["failed", "complete", "complete"]
    assert not first.tool_calls
    assert "so far".startswith(first.text)
    assert len(world.ledger) == 1


# --- failures within a run ----------------------------------------------------------------------


async def test_a_provider_that_is_gone_for_a_minute_loses_no_call(
    autojump_clock: MockClock,
) -> None:
    """The calls of the round finish, the request is sent again, and it holds every result."""
    down = [False]

    @tool(replay="safe")
    async def work(call: ToolCall, seconds: int) -> str:
        """Work for some time.

        Args:
            seconds: How long.
        """
        await call.sleep(seconds)
        if seconds == 2:
            down[0] = True
        return f"worked {seconds}"

    def unreachable(_: Any) -> bool:
        if down[0] and trio.current_time() - began > 64:
            down[0] = False
        return down[0]

    asked = tuple(ScriptedCall(name="work", arguments={"seconds": n}) for n in (1, 2, 3, 4))
    refused = ScriptedError(detail="connection refused")
    world = World(
        Step(error=refused, times=1000, text="-", when=unreachable),
        Step(calls=asked),
        "all done",
        tools=[work],
    )

    # C008
    async with world.open() as harness:
        began = trio.current_time()
        outcome = await ask(harness, "go")
        await verify(world, harness)
        found = await results(harness)
    kept = await answers(world)

    assert (outcome.status, outcome.text) == ("done", "all done")
    assert [each.status for each in kept][1:-1] == ["failed"] * (len(kept) - 2)
    assert len(kept) > 3
    assert [text_of(result) for result in found] == [f"worked {n}" for n in (1, 2, 3, 4)]
    last = [text_of(item.message) for item in world.model.requests[-1].messages]
    assert last == ["go", "", *(f"worked {n}" for n in (1, 2, 3, 4))]


async def test_a_run_that_a_provider_ended_is_continued_with_all_its_results(
    autojump_clock: MockClock,
) -> None:
    """A failure for good after a round leaves a valid history, and the run is taken up there."""
    broken = [True]
    world = World(
        Step(
            error=ScriptedError(kind="auth", detail="key"),
            when=lambda view: broken[0] and view.answers == 1,
        ),
        calls("safe", "once"),
        "done",
    )

    # C008
    async with world.open() as harness:
        root = await harness.root()
        failed = await ask(harness, "go")
        broken[0] = False
        outcome = await (await root.continue_run()).wait()
        await verify(world, harness)

    assert failed.reason == "model_error"
    assert outcome.text == "done"
    assert len(world.ledger) == 2


# --- blank outputs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned",
    ["", " ", "\r\n", None, [], [TextBlock(text="")], [TextBlock(text=""), TextBlock(text="\n")]],
)
async def test_a_tool_that_says_nothing_bricks_no_conversation(
    autojump_clock: MockClock, returned: Any
) -> None:
    """Blank output is sent as a marker, each time, also beside an answer without text."""

    async def body(call: ToolCall) -> Any:
        return ToolResult(returned)

    world = World(calls("odd"), "ok", "still ok", tools=[odd_tool(body)])

    # C070
    async with world.open() as harness:
        first, second = await ask(harness, "go", "r1"), await ask(harness, "more", "r2")
        await verify(world, harness)
        (stored,) = await results(harness)

    assert (first.text, second.text) == ("ok", "still ok")
    assert not text_of(stored).strip()
    for request in world.model.requests[1:]:
        answer, result = request.messages[1].message, request.messages[2].message
        assert isinstance(answer, AssistantMessage)
        assert [type(block) for block in answer.blocks] == [ToolCallBlock]
        assert text_of(result) == "(no output)"
