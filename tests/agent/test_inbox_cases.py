"""What went wrong for others with what people type meanwhile, and with news of what has ended."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel
from agent_world import (
    World,
    ask,
    calls,
    check_transcript,
    crash_everywhere,
    results,
    text_of,
    verify,
)
from approval_world import GuardedWorld, acts, rest, the_open
from compaction_world import GOOD, compacted, heads, long
from trio.testing import MockClock

from pidurable import Once
from pidurable.agent._models import ModelRequest
from pidurable.agent._script import ScriptedCall, Step, When
from pidurable.agent._services import AgentChange
from pidurable.errors import RequestIdConflictError, WaitCycleError
from pidurable.harness._conversation import Conversation
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.records._messages import TextBlock, ToolResultMessage, UserMessage
from pidurable.registry import Extension, ToolCall, tool
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase


def said_in(request: ModelRequest) -> list[str]:
    """What users have said in a request, in order."""
    return [text_of(m.message) for m in request.messages if isinstance(m.message, UserMessage)]


async def said_by_users(conversation: Conversation) -> list[str]:
    """What users have said in a conversation, in order."""
    entries = [each for each in await conversation.history(limit=1_000) if each.kind == "pi.user"]
    return [text_of(message) for each in entries for message in each.messages]


# --- typed meanwhile ----------------------------------------------------------------------------


@pytest.mark.slow
async def test_what_is_typed_during_a_compaction_is_answered_once_and_in_order(
    autojump_clock: MockClock, slow_run: bool
) -> None:
    """At ten moments of a compaction that a run waits for, a steer and follow-ups: no nudge.

    Three of the moments are tried by default.
    """
    for moment in range(10) if slow_run else (0, 4, 9):
        await typed_during_a_compaction(moment * 0.6)


async def typed_during_a_compaction(moment: float) -> None:
    """Hand in at a moment of a compaction that takes five seconds."""
    world = compacted(
        "fine",
        summaries=[Step(text=GOOD, delay=2.5)],
        settings=Settings(reserve_tokens=1_000, background_tokens=0, keep_recent_tokens=1_000),
    )

    # C028
    async with world.open() as harness:
        root = await harness.root()
        number = 0
        submission = await root.submit(long(number), request_id="r0")
        while not root.live()["compactions"]:
            with trio.move_on_after(0.5):
                await submission.wait()
                number += 1
                submission = await root.submit(long(number), request_id=f"r{number}")
            await trio.lowlevel.checkpoint()
        await trio.sleep(moment)
        during = bool(root.live()["compactions"])
        steer = await root.submit("steer", when_busy="steer")
        follow = await root.submit("follow")
        again = await root.submit("follow again")
        outcomes = [await each.wait() for each in (submission, steer, follow, again)]
        await harness.wait_for_idle()
        await verify(world, harness)
        order = await said_by_users(root)
        placed = len(heads(await root.history(limit=1_000)))

    assert during == (moment < 4.5)
    assert placed >= 1
    assert [each.status for each in outcomes] == ["done"] * 4
    assert order[-3:] == ["steer", "follow", "follow again"]
    assert all(text.startswith("marker") for text in order[:-3])
    assert len(order) == number + 4


async def test_a_steer_skips_no_call_that_was_decided(autojump_clock: MockClock) -> None:
    """Between the calls of a sequential round, or before the first: all run, then it is seen."""
    for moment in (0.0, 1.5, 2.5):
        world = World(calls("tick", "tick", "tick"), "ok", settings=Settings(sequential_tools=True))
        ran: list[float] = []

        @tool(replay="safe")
        async def tick(call: ToolCall) -> str:
            """Take a second."""
            ran.append(trio.current_time())  # noqa: B023
            await call.sleep(1.0)
            return "tick"

        world.install(tick)
        # C031
        async with world.open() as harness:
            root = await harness.root()
            first = await root.submit("go")
            await trio.sleep(moment)
            steer = await root.submit("steer", when_busy="steer")
            outcomes = [await each.wait() for each in (first, steer)]
            await verify(world, harness)
            codes = [each.code for each in await results(harness)]
            history = await root.history()

        assert len(ran) == 3
        assert codes == [None] * 3
        assert [each.text for each in outcomes] == ["ok", "ok"]
        assert len({each.run for each in outcomes}) == 1
        seen = [type(message) for each in history for message in each.messages]
        assert seen[-2] is UserMessage
        assert seen[-3] is ToolResultMessage


@pytest.mark.slow
async def test_a_steer_is_in_exactly_one_place_of_every_request_after_a_kill(
    autojump_clock: MockClock,
) -> None:
    """Killed at any commit, between draining and sending too: it is in the next request, once."""

    async def program(harness: Harness, world: World) -> Any:
        root = await harness.root()
        first = await root.submit("go", request_id="r1")
        steer = await root.submit("steer", when_busy="steer", request_id="r2")
        return [await each.wait() for each in (first, steer)]

    def check(world: World, settled: Any) -> None:
        assert [each.status for each in settled] == ["done", "done"]
        counts = [said_in(request).count("steer") for request in world.model.requests]
        assert set(counts) <= {0, 1}
        # From the first request that has it on, each one has it.
        assert counts == sorted(counts)
        assert counts[-1] == 1

    # C032
    kills = await crash_everywhere(
        lambda: World(calls("safe"), "ok", "late"), program, check, sparse=5
    )

    assert kills >= 3


# --- news of what has ended ---------------------------------------------------------------------


@attrs.frozen
class Working:
    """Until the work is done."""


class Work(Task[float, Working, str]):
    """Work in the background, which tells its conversation when it has ended."""

    name = "test.work"
    version = 1
    abort = nothing_to_undo

    def initial(self, input: float) -> Working:
        return Working()

    @phase
    async def working(self, at: Working, ctx: TaskContext[float, Working, str]) -> None:
        await trio.sleep(ctx.input)
        async with ctx.commit() as tx:
            # One commit: that it has ended, and the news of it.
            ctx.conversation().submit_in(
                tx, "the work is done", when_busy="steer", request_id=ctx.key("done")
            )
            tx.complete("done")


async def test_news_of_an_end_reaches_a_conversation_at_rest(autojump_clock: MockClock) -> None:
    """It starts a run of its own, without anybody's nudge."""
    world = World("noted")
    world.install(tasks=[Work()])

    # C035
    async with world.open() as harness:
        root = await harness.root()
        task = await root.create_task(Work, 5.0, background=True)
        await harness.wait_for_task(task)
        await harness.wait_for_idle()
        await verify(world, harness)
        texts = await said_by_users(root)

    assert texts == ["the work is done"]
    assert [said_in(each) for each in world.model.requests] == [["the work is done"]]


async def test_news_of_an_end_reaches_a_run_after_its_round(autojump_clock: MockClock) -> None:
    """In the middle of a call it waits for the result, and joins the run."""

    @tool(replay="safe")
    async def long_call(call: ToolCall) -> str:
        """Take ten seconds."""
        await call.sleep(10.0)
        return "slept"

    world = World(calls("long_call"), "noted")
    world.install(long_call, tasks=[Work()])

    # C035
    async with world.open() as harness:
        root = await harness.root()
        await root.create_task(Work, 5.0, background=True)
        outcome = await ask(harness, "go")
        await verify(world, harness)
        texts = await said_by_users(root)

    assert outcome.text == "noted"
    assert texts == ["go", "the work is done"]
    assert said_in(world.model.requests[-1]) == ["go", "the work is done"]


async def test_news_of_an_end_waits_while_a_person_is_asked(autojump_clock: MockClock) -> None:
    """It is held with the steers, and seen when the call has its result."""
    world = GuardedWorld(acts("ship"), "noted")
    world.registry.install(Extension("work", tasks=[Work()]))

    # C034, C035
    async with world.open() as harness:
        root = await harness.root()
        await root.create_task(Work, 5.0, background=True)
        submission = await root.submit("go")
        await rest()
        await trio.sleep(10.0)
        request = the_open(harness)
        held = [item["mode"] for item in root.inbox()]
        (call,) = root.live()["calls"]
        await harness.decide(request.id, Once())
        outcome = await submission.wait()
        await harness.wait_for_idle()
        await verify(world, harness)
        texts = await said_by_users(root)

    assert held == ["steer"]
    assert call["held_by"] == f"permission {request.id}"
    assert outcome.text == "noted"
    assert texts == ["go", "the work is done"]


async def test_news_of_an_end_during_a_compaction_comes_once(autojump_clock: MockClock) -> None:
    """While a summary is written that somebody asked for, the news starts its run at once."""
    world = compacted(
        "fine", summaries=[Step(text=GOOD, delay=5.0)], settings=Settings(keep_recent_tokens=500)
    )
    world.install(tasks=[Work()])

    # C028, C035
    async with world.open() as harness:
        root = await harness.root()
        for number in range(4):
            await ask(harness, long(number), f"r{number}")
        task = await root.compact()
        work = await root.create_task(Work, 3.0, background=True)
        await harness.wait_for_task(work)
        during = len(root.live()["compactions"])
        placed = (await harness.wait_for_task(task)).result.status
        await harness.wait_for_idle()
        await verify(world, harness)
        texts = await said_by_users(root)

    assert during == 1
    assert placed == "applied"
    assert texts[4:] == ["the work is done"]


@pytest.mark.slow
async def test_news_and_end_are_one_commit(autojump_clock: MockClock) -> None:
    """Killed anywhere, the news comes exactly once, and never before or without the end."""

    def make() -> World:
        world = World("noted", "noted again", repeat_last=True)
        world.install(tasks=[Work()])
        return world

    async def program(harness: Harness, world: World) -> Any:
        root = await harness.root()
        task = await root.create_task(Work, 0.5, background=True, key="work")
        outcome = await harness.wait_for_task(task)
        await harness.wait_for_idle()
        return outcome.status, await said_by_users(root)

    def check(world: World, found: Any) -> None:
        assert found == ("completed", ["the work is done"])

    # C035
    kills = await crash_everywhere(make, program, check, sparse=3)

    assert kills >= 4


async def hand_in(harness: Harness, root: Conversation, *texts: str) -> None:
    """Hand texts in with one commit."""
    async with harness.commit() as tx:
        root.write_in(tx, "lost", kind="test.note", request_id="w1")
        for text in texts:
            root.submit_in(tx, text, request_id="r1")


async def test_what_is_handed_in_with_a_commit_that_fails_is_not_handed_in(
    autojump_clock: MockClock,
) -> None:
    """It is stored with everything else of the commit or not at all, and once per request id."""
    world = World("ok", "more", repeat_last=True)

    async with world.open() as harness:
        root = await harness.root()
        with pytest.raises(RequestIdConflictError):
            await hand_in(harness, root, "lost", "other")
        async with harness.commit() as tx:
            first = root.submit_in(tx, "kept", request_id="r1")
            written = root.write_in(tx, "kept", kind="test.note", request_id="w1")
            assert root.submit_in(tx, "kept", request_id="r1") == first
            with pytest.raises(RequestIdConflictError):
                root.submit_in(tx, "other", request_id="r1")
        outcome = await harness.submission(first).wait()
        noted = await harness.submission(written).wait()
        await verify(world, harness)
        history = [each for each in await root.history() if each.kind != "pi.system"]

    assert (outcome.text, noted.status) == ("ok", "done")
    assert [each.kind for each in history] == ["pi.user", "test.note", "pi.assistant"]


async def test_a_tool_writes_to_its_own_conversation_and_does_not_wait_for_that(
    autojump_clock: MockClock,
) -> None:
    """It is placed after the result of the call; to wait for it would never end, and is refused."""
    waits: list[Any] = []

    @tool(replay="safe")
    async def remark(call: ToolCall) -> str:
        """Remark something beside the result."""
        own = call.conversation(call.conversation_id)
        said = UserMessage(blocks=(TextBlock(text="by the way"),), at_us=0)
        written = await own.write(kind="test.remark", messages=[said], request_id=call.key("w"))
        waits.append(written)
        with pytest.raises(WaitCycleError):
            await written.wait()
        return "remarked"

    world = World(calls("remark"), "ok")
    world.install(remark)

    async with world.open() as harness:
        root = await harness.root()
        outcome = await ask(harness, "go")
        ended = await waits[0].wait()
        await verify(world, harness)
        kinds = [each.kind for each in await root.history()]

    assert (outcome.text, ended.status) == ("ok", "done")
    assert kinds.index("pi.tool_result") < kinds.index("test.remark")
    assert [text_of(m.message) for m in world.model.requests[-1].messages][-2:] == [
        "remarked",
        "by the way",
    ]


# --- who is told --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_child_that_is_woken_again_answers_who_woke_it(autojump_clock: MockClock) -> None:
    """Three levels, and the middle asks its leaf twice; killed anywhere, each answer comes once."""

    def make() -> World:
        @tool(replay="safe")
        async def ask_leaf(what: str, call: ToolCall) -> str:
            """Ask the leaf twice; it sleeps, finished, in between.

            Args:
                what: What to ask.
            """
            leaf = await call.child(key="leaf", agent=AgentChange(tools=[]))
            answers = []
            for n in range(2):
                submission = await leaf.submit(f"{what} {n}", request_id=call.key(f"ask{n}"))
                answers.append((await submission.wait()).text)
            return "+".join(answers)

        world = World(
            Step(when=When(user="leaf it 0"), text="zero"),
            Step(when=When(user="leaf it 1"), text="one"),
            Step(
                when=When(user="middle", turn=0),
                calls=(ScriptedCall(name="ask_leaf", arguments={"what": "leaf it"}),),
            ),
            Step(when=When(user="middle", turn=1), text="middle saw both"),
            Step(
                when=When(user="top", turn=0),
                calls=(ScriptedCall(name="subagent", arguments={"task": "middle"}),),
            ),
            Step(when=When(user="top", turn=1), text="top is told"),
        )
        world.install(ask_leaf)
        return world

    async def program(harness: Harness, world: World) -> Any:
        return await ask(harness, "top")

    def check(world: World, settled: Any) -> None:
        assert settled.text == "top is told"
        middle = [r for r in world.model.requests if said_in(r) == ["middle"]]
        told = [
            text_of(m.message)
            for m in middle[-1].messages
            if isinstance(m.message, ToolResultMessage)
        ]
        assert told == ["zero+one"]
        top = [r for r in world.model.requests if said_in(r) == ["top"]]
        assert "zero" not in str(top[-1].messages)

    # C036
    kills = await crash_everywhere(make, program, check, sparse=17)

    assert kills >= 4


async def test_a_fork_inside_a_round_is_not_busy_and_has_no_queue(
    autojump_clock: MockClock,
) -> None:
    """Calls are said to be unknown there; what is queued, and the request of a person, stay."""
    world = GuardedWorld(acts("ship"), "here", "there", repeat_last=True)

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await rest()
        request = the_open(harness)
        await root.submit("steer", when_busy="steer")
        await root.submit("follow")
        fork = await root.fork()
        state = (fork.live()["run"], fork.inbox(), await fork.open_submissions())
        below = harness.permissions(below=fork.id)
        there = await (await fork.submit("and here?")).wait()
        still = the_open(harness)
        await harness.decide(request.id, Once())
        await submission.wait()
        await harness.wait_for_idle()
        world.model.check()
        check_transcript(await root.history())
        own = [each for each in await fork.history() if each.conversation_id == fork.id]
        check_transcript(own)

    assert state == (None, [], [])
    assert below == []
    assert still == request
    assert there.status == "done"
    asked = [each for each in world.model.requests if said_in(each) == ["go", "and here?"]]
    (result,) = [
        m.message
        for each in asked
        for m in each.messages
        if isinstance(m.message, ToolResultMessage)
    ]
    assert "not known in this branch" in text_of(result)
