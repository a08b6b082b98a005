"""Runs that are continued: from the last valid point, without input, once."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from agent_world import (
    MODEL,
    DieAt,
    FreezeAt,
    World,
    ask,
    calls,
    messages,
    run_killed,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable.agent._script import ScriptedError, Step
from pidurable.agent._services import AgentChange
from pidurable.errors import (
    ConversationBusyError,
    InvalidArgumentError,
    NothingToContinueError,
    UnansweredError,
)
from pidurable.records._limits import Settings
from pidurable.records._messages import TextBlock, UserMessage

NO_KEY = ScriptedError(kind="auth", detail="no key")


async def test_a_failed_run_is_continued_from_what_was_asked(autojump_clock: MockClock) -> None:
    """The model is asked the same again; nothing is said twice, and the failure stays on record."""
    broken = [True]
    world = World(Step(when=lambda _: broken[0], error=NO_KEY), "better now")

    # C004
    async with world.open() as harness:
        root = await harness.root()
        first = await ask(harness, "go")
        broken[0] = False
        again = await root.continue_run()
        record = await again.status()
        outcome = await again.wait()
        await verify(world, harness)
        users = messages(await root.history(), UserMessage)

    assert first.reason == "model_error"
    assert (record.kind, record.content, record.entry) == ("continue", None, None)
    assert outcome.text == "better now"
    assert outcome.run != first.run
    assert [text_of(each) for each in users] == ["go"]
    assert [text_of(m.message) for m in world.model.requests[-1].messages] == ["go"]


async def test_an_aborted_round_is_continued_with_its_results(autojump_clock: MockClock) -> None:
    """Every call has a result that says what became of it, and no call is made again."""
    world = World(calls("once", "slow"), "seen")

    # C004
    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        await trio.sleep(1)
        await root.abort()
        await first.wait()
        await harness.wait_for_idle()
        outcome = await (await root.continue_run()).wait()
        await verify(world, harness)

    assert outcome.text == "seen"
    sent = world.model.requests[-1].messages
    assert len(sent) == 4
    assert "it has begun" in text_of(sent[-1].message)


async def test_a_cut_answer_is_asked_for_again(autojump_clock: MockClock) -> None:
    """What an aborted answer had said stays in the record and is not sent."""
    world = World(Step(text=("half", "way"), delay=1.0), repeat_last=True)

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await trio.sleep(1.5)
        await root.abort()
        await first.wait()
        outcome = await (await root.continue_run()).wait()
        await verify(world, harness)
        kinds = [each.kind for each in await root.history() if each.kind != "pi.system"]

    assert outcome.text == "halfway"
    assert kinds == ["pi.user", "pi.assistant", "pi.assistant"]
    assert len(world.model.requests[-1].messages) == 1


async def test_a_run_at_its_turn_limit_is_continued_with_new_turns(
    autojump_clock: MockClock,
) -> None:
    """At the limit the run ends unanswered; the continued one counts its turns anew."""
    limited = Settings(turns_max=2)
    world = World(*[calls("safe")] * 3, "done", settings=limited)

    async with world.open() as harness:
        root = await harness.root()
        first = await ask(harness, "go")
        outcome = await (await root.continue_run()).wait()
        await verify(world, harness)

    assert (first.status, first.reason) == ("unanswered", "turn_limit")
    assert outcome.text == "done"
    assert len(world.model.requests) == 4


async def test_there_is_nothing_to_continue_where_nothing_is_asked(
    autojump_clock: MockClock,
) -> None:
    """Empty, answered and reset conversations are refused by code, and nothing is stored."""
    world = World("ok", "continued")

    async with world.open() as harness:
        root = await harness.root()
        empty = await harness.create_conversation(agent=AgentChange(model=MODEL))
        await ask(harness, "go")
        before = harness.session.line.published_seq
        for conversation in (root, empty):
            with pytest.raises(NothingToContinueError, match="terminal") as refused:
                await conversation.continue_run()
            assert (refused.value.conversation, refused.value.code) == (conversation.id, "terminal")
        assert harness.session.line.published_seq == before
        said = UserMessage(blocks=(TextBlock(text="more"),), at_us=0)
        await root.write(kind="test.note", messages=[said])
        outcome = await (await root.continue_run()).wait()
        await root.write(kind="test.note", messages=[said])
        await root.reset()
        with pytest.raises(NothingToContinueError):
            await root.continue_run()
        await verify(world, harness)

    assert outcome.text == "continued"


async def test_a_busy_conversation_is_not_continued(autojump_clock: MockClock) -> None:
    """While a run is active, also a continued one, another is refused."""
    world = World(Step(text="one", delay=5.0))

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        with pytest.raises(ConversationBusyError):
            await root.continue_run()
        await root.abort()
        outcome = await first.wait()
        second = await root.continue_run()
        with pytest.raises(ConversationBusyError):
            await root.continue_run()
        for request_id in ("", 7, "\ud800"):
            with pytest.raises(ValueError, match="request_id"):
                await root.continue_run(request_id=request_id)  # type: ignore[arg-type]
        last = await second.wait()
        await verify(world, harness)

    with pytest.raises(UnansweredError):
        _ = outcome.text
    assert last.text == "one"
    assert issubclass(InvalidArgumentError, ValueError)


async def test_what_is_queued_stays_queued_while_a_run_is_continued(
    autojump_clock: MockClock,
) -> None:
    """Behind a failed run it waits on; the success of the continued one places it."""
    broken = [True]
    overloaded = ScriptedError(kind="retryable", retry_after=5.0)
    world = World(
        Step(when=lambda _: broken[0], error=overloaded),
        "one",
        "two",
        settings=Settings(request_tries=1),
    )

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("first")
        await trio.sleep(1)
        follow = await root.submit("follow")
        await first.wait()
        broken[0] = False
        continued = await root.continue_run()
        waiting = (await follow.status()).status
        outcomes = [await each.wait() for each in (continued, follow)]
        await verify(world, harness)

    assert waiting == "queued"
    assert [each.text for each in outcomes] == ["one", "two"]


async def test_a_run_is_continued_once_per_request_id(autojump_clock: MockClock) -> None:
    """Killed before, after or in between: sent again, the same run is meant, and it is answered."""
    broken = True

    def is_broken(_: Any) -> bool:
        return broken

    for place in range(3):
        world = World(Step(when=is_broken, error=NO_KEY), "ok")
        broken = True
        async with world.open() as harness:
            await ask(harness, "go")
        broken = False

        async def program(harness: Any, _: Any) -> Any:
            root = await harness.root()
            return await (await root.continue_run(request_id="c1")).wait()

        # C033
        point = (FreezeAt(world, "before", 1), FreezeAt(world, "after", 1), DieAt(world, "CP5"))[
            place
        ]
        await run_killed(world, point, program)
        async with world.open() as harness:
            outcome = await program(harness, world)
            again = await program(harness, world)
            await verify(world, harness)
        assert point.struck
        assert outcome.text == "ok"
        assert again == outcome
