"""Partial answers: what was shown of an answer that never came is kept, charged, and never sent."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from agent_world import MODEL, DieAt, World, ask, messages, run_killed, text_of, verify
from trio.testing import MockClock

import pidurable.agent._generation as generation
from pidurable.agent._script import Cut, Step
from pidurable.agent._services import AgentChange
from pidurable.harness._open import Harness
from pidurable.records._messages import AssistantMessage, TextBlock, ThinkingBlock

WORDS = Step(thinking="hmm", text=("one ", "two ", "three ", "four"), delay=1.0)


async def abort(world: World, _: pytest.MonkeyPatch) -> str:
    """Abort the run in the middle of its answer."""
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        await trio.sleep(3.5)
        await root.abort()
        return (await submission.wait()).reason or ""


async def fault(world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the loop itself fail when the answer is there."""

    async def broken(*_: Any) -> Any:
        raise LookupError("a bug of ours")

    with monkeypatch.context() as patched:
        patched.setattr(generation, "observers_of_answer", broken)
        async with world.open() as harness:
            return (await ask(harness, "go")).reason or ""


async def kill(world: World, _: pytest.MonkeyPatch) -> str:
    """Kill the process in the middle of its answer."""
    point = DieAt(world, "CP7", nth=4)

    async def program(harness: Harness, _: World) -> None:
        await ask(harness, "go")

    await run_killed(world, point, program)
    async with world.open() as harness:
        outcome = await ask(harness, "go")
    assert outcome.text == "one two three four"
    return "killed"


async def cut(world: World, _: pytest.MonkeyPatch) -> str:
    """Let the connection end in the middle of the answer."""
    async with world.open() as harness:
        outcome = await ask(harness, "go")
    assert outcome.text == "one two three four"
    return "cut"


@pytest.mark.parametrize(
    ("end", "status", "why"),
    [
        (abort, "aborted", "the run was aborted"),
        (fault, "aborted", "the generation was faulted"),
        (kill, "aborted", "the process died"),
        (cut, "failed", "cut"),
    ],
    ids=["abort", "fault", "kill", "cut"],
)
async def test_a_partial_answer_is_kept_however_it_ended(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, end: Any, status: str, why: str
) -> None:
    """Its blocks are an entry that says why, its usage is charged, and no request shows it."""
    step = (
        WORDS
        if end is not cut
        else Step(thinking="hmm", text=WORDS.text, delay=1.0, cut=Cut(after=3))
    )
    world = World(step, "the next one")

    # C068
    reason = await end(world, monkeypatch)
    async with world.open() as harness:
        later = await ask(harness, "more", "r2")
        root = await harness.root()
        found = messages(await root.history(), AssistantMessage)
        usage = root.usage()["models"][MODEL]
        await verify(world, harness)

    kept = found[0]
    assert reason
    assert later.status == "done"
    assert kept.status == status
    assert why in (kept.error or "")
    assert kept.blocks[0] == ThinkingBlock(text="hmm")
    assert isinstance(kept.blocks[1], TextBlock)
    assert "one two three four".startswith(kept.text)
    assert kept.text
    assert kept.usage.output_tokens > 0
    # Who settles for the loop cannot look at what was sent.
    assert kept.usage.input_tokens > 0 or end is fault
    assert usage["requests"] == len(found)
    assert usage["output_tokens"] == sum(each.usage.output_tokens for each in found)
    for request in world.model.requests[1:]:
        assert kept.text not in [text_of(item.message) for item in request.messages]


async def test_a_fault_charges_the_model_that_was_asked(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the conversation has been given another model while it answered."""

    async def broken(*_: Any) -> Any:
        raise LookupError("a bug of ours")

    monkeypatch.setattr(generation, "observers_of_answer", broken)
    world = World(WORDS)
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await trio.sleep(2.5)
        await root.configure(AgentChange(model="scripted/another"))
        outcome = await submission.wait()
        (kept,) = messages(await root.history(), AssistantMessage)
        usage = root.usage()["models"]

    assert outcome.reason == "faulted"
    assert kept.model == MODEL
    assert list(usage) == [MODEL]
