"""Compactions that a generation waits for: thresholds, overflow, and what fails about a summary."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from agent_world import MODEL, World, ask, messages, text_of, verify
from compaction_world import (
    GOOD,
    asks_for_summary,
    compacted,
    heads,
    last,
    long,
    markers,
    other_requests,
    outcomes,
    request_text,
    said,
    summary_requests,
)
from trio.testing import MockClock

from pidurable.agent._script import RequestView, ScriptedCall, ScriptedError, Step, view_request
from pidurable.agent._services import AgentChange
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.records._messages import AssistantMessage, SystemMessage

BLOCKING = Settings(background_tokens=0, keep_recent_tokens=1_000)
"""Without a threshold for the background."""


async def talk(harness: Harness, count: int, first: int = 0, tokens: int = 300) -> list[Any]:
    """Hand in so many long inputs, one after the other."""
    return [
        await ask(harness, long(number, tokens), f"r{number}")
        for number in range(first, first + count)
    ]


async def test_inputs_that_are_placed_together_are_all_read_before_any_is_summarised(
    autojump_clock: MockClock,
) -> None:
    """Also where they are more than what is kept of a conversation, as long as they fit."""
    settings = attrs.evolve(BLOCKING, follow_ups="all")
    world = compacted("fine", settings=settings)

    async with world.open() as harness:
        root = await harness.root()
        await talk(harness, 4, tokens=400)
        busy = await root.submit(long(4, 100), request_id="r4")
        both = [
            await root.submit(long(number, 700), request_id=f"r{number}", when_busy="follow_up")
            for number in (5, 6)
        ]
        settled = [await each.wait() for each in (busy, *both)]
        ended = outcomes(harness)
        await verify(world, harness)

    assert {each.status for each in settled} == {"done"}
    assert [outcome.result.status for outcome in ended] == ["applied"]
    read = markers(request_text(other_requests(world)[-1]))
    summarised = set().union(*(markers(request_text(each)) for each in summary_requests(world)))
    assert {"marker-005", "marker-006"} <= read
    assert summarised.isdisjoint({"marker-005", "marker-006"})
    assert "marker-000" in summarised


async def test_above_the_threshold_a_request_waits_for_a_compaction(
    autojump_clock: MockClock,
) -> None:
    """The turn is answered after it, with the summary and the newest messages in its request."""
    world = compacted("fine", settings=BLOCKING)

    async with world.open(agent=AgentChange(model=MODEL, instructions="be kind")) as harness:
        root = await harness.root()
        settled = await talk(harness, 11)
        history = await root.history(limit=1_000)
        ended = outcomes(harness)
        usage = root.usage()["models"][MODEL]
        live = root.live()
        doc = await last(harness)
        await verify(world, harness)

    assert {each.status for each in settled} == {"done"}
    (summary,) = heads(history)
    (outcome,) = ended
    assert outcome.status == "completed"
    result = outcome.result
    assert (result.status, result.entry, result.cut) == ("applied", summary.id, summary.head)
    assert result.tokens_after < result.tokens_before
    assert (doc["status"], doc["why"], doc["tokens"]) == (
        "applied",
        "threshold",
        result.tokens_after,
    )
    assert live["compactions"] == []
    # Nothing is deleted, and everything is either in what was summarised or in what is sent.
    assert len(messages(history, AssistantMessage)) == 11
    (asked,) = summary_requests(world)
    after = other_requests(world)[len(other_requests(world)) - 1]
    assert GOOD in request_text(after)
    seen = markers(request_text(asked)) | markers(request_text(after))
    assert seen >= {f"marker-{number:03}" for number in range(11)}
    assert not markers(request_text(asked)) & markers(request_text(after))
    assert usage["requests"] == 12
    assert asked.tools == ()


async def test_after_a_compaction_the_request_carries_one_complete_baseline(
    autojump_clock: MockClock,
) -> None:
    """The prompt stands in front, whole, once; what changed in what is kept is told after it."""
    world = compacted("fine", settings=BLOCKING)

    async with world.open(agent=AgentChange(model=MODEL, instructions="be kind")) as harness:
        root = await harness.root()
        await talk(harness, 8)
        await root.configure(AgentChange(instructions="be strict"))
        await talk(harness, 3, first=8)
        history = await root.history(limit=1_000)
        (summary,) = heads(history)
        context = await root.context()
        await verify(world, harness)

    before, *_, after = other_requests(world)
    (baseline,) = messages([summary], SystemMessage)
    systems = [item for item in context if isinstance(item.message, SystemMessage)]
    assert baseline.sections == {"instructions": "be kind"}
    assert {tool.name for tool in baseline.tools_added} == {tool.name for tool in before.tools}
    assert [item.message.sections for item in systems] == [
        {"instructions": "be kind"},
        {"instructions": "be strict"},
    ]
    assert context[0].message == baseline
    assert after.system == before.system == "be kind"
    assert after.tools == before.tools


async def test_a_request_that_does_not_fit_is_compacted_once_and_sent_again(
    autojump_clock: MockClock,
) -> None:
    """With an unknown window only the provider's refusal tells."""
    too_large = Step(
        when=lambda view: not asks_for_summary(view) and view.input_tokens > 2_500,
        error=ScriptedError(kind="overflow", detail="too many tokens"),
    )
    world = compacted(too_large, "fine", window=None)

    async with world.open() as harness:
        settled = await talk(harness, 18)
        ended = outcomes(harness)
        history = await (await harness.root()).history(limit=1_000)
        await verify(world, harness)

    assert {each.status for each in settled} == {"done"}
    assert {each.result.status for each in ended} == {"applied"}
    failed = [m for m in messages(history, AssistantMessage) if m.status == "failed"]
    assert len(failed) == len(ended) == len(heads(history)) >= 2
    assert all("too many tokens" in message.error for message in failed)
    seen = {marker for each in summary_requests(world) for marker in markers(request_text(each))}
    seen |= markers("".join(text_of(message) for message in last_asked(world)))
    assert seen >= {f"marker-{number:03}" for number in range(18)}


def last_asked(world: World) -> list[Any]:
    """The messages of the last request of a generation."""
    return [item.message for item in other_requests(world)[-1].messages]


async def test_what_a_compaction_cannot_lower_does_not_set_it_off_for_ever(
    autojump_clock: MockClock,
) -> None:
    """A prompt that nearly reaches the threshold: turns are answered, and summaries are few."""
    # C043
    world = compacted("fine", settings=BLOCKING)
    wide = AgentChange(model=MODEL, instructions="d" * 11_200)

    async with world.open(agent=wide) as harness:
        settled = await talk(harness, 30, tokens=60)
        ended = outcomes(harness)
        await verify(world, harness)

    assert {each.status for each in settled} == {"done"}
    assert 1 <= len(ended) <= 8
    assert len(summary_requests(world)) <= 8


async def test_a_prompt_that_leaves_no_room_ends_the_run_naming_it(
    autojump_clock: MockClock,
) -> None:
    """A window just above the prompt: one request, no summary, and the prompt is named."""
    # C043
    world = compacted("fine", settings=BLOCKING)
    wide = AgentChange(model=MODEL, instructions="d" * 15_990)

    async with world.open(agent=wide) as harness:
        first = await ask(harness, long(1, 20), "r1")
        second = await ask(harness, long(2, 20), "r2")
        await verify(world, harness)

    for settled in (first, second):
        assert (settled.status, settled.reason) == ("unanswered", "context_overflow")
        named = "the section 'instructions' of the system prompt, about 3998 tokens"
        assert named in (settled.detail or "")
    assert len(other_requests(world)) <= 3
    assert len(summary_requests(world)) <= 2


async def test_one_message_that_cannot_fit_ends_the_run_naming_it(
    autojump_clock: MockClock,
) -> None:
    """Two requests and at most one summary; then the run ends, and the next input is answered."""
    # C043
    world = compacted("fine", settings=BLOCKING)

    async with world.open() as harness:
        await talk(harness, 2)
        settled = await ask(harness, long(50, 9_000), "big")
        asked = len(other_requests(world))
        tried = len(summary_requests(world))
        after = await ask(harness, "and a small one", "small")
        history = await (await harness.root()).history(limit=1_000)
        await verify(world, harness)

    assert (settled.status, settled.reason) == ("unanswered", "context_overflow")
    assert "the user message of entry" in (settled.detail or "")
    assert "about 9000 tokens" in (settled.detail or "")
    assert asked <= 2 + 2
    assert tried <= 4
    assert after.status == "done"
    assert [m.status for m in messages(history, AssistantMessage)].count("failed") <= 2
    # The large one was read in parts that fit, by the compaction that the next input set off.
    read = [each for each in summary_requests(world) if "the message goes on" in request_text(each)]
    assert len(read) >= 3


async def test_a_request_that_never_fits_is_sent_twice_and_no_more(
    autojump_clock: MockClock,
) -> None:
    """One compaction, one more request; then the run ends with what the provider said."""
    # C043
    never = Step(
        when=lambda view: not asks_for_summary(view) and view.user == "go",
        error=ScriptedError(kind="overflow", detail="too many tokens"),
    )
    world = compacted("fine", settings=BLOCKING, window=None)
    world.model._script = _first(world.model._script, never)

    async with world.open() as harness:
        await talk(harness, 8)
        before = len(other_requests(world))
        settled = await ask(harness, "go", "go")
        (outcome,) = outcomes(harness)
        await verify(world, harness)

    assert outcome.result.status == "applied"
    assert len(other_requests(world)) - before == 2
    assert (settled.status, settled.reason) == ("unanswered", "context_overflow")
    assert "too many tokens. The largest items: the user message" in (settled.detail or "")


BAD: list[Any] = [
    Step(text="## Goal\n(none)\n## Progress\n- none"),
    Step(text="cut in the mid", stop="length"),
    Step(text="I cannot do that", stop="refusal"),
    Step(text="w" * 12_000),
    Step(text="# Summary\n"),
    Step(calls=(ScriptedCall(name="safe"),)),
    Step(text=""),
    Step(text=" \n "),
    Step(thinking="I think"),
    Step(error=ScriptedError(kind="other", detail="the provider refuses")),
    Step(error=ScriptedError(kind="retryable", detail="overloaded")),
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
async def test_what_is_no_summary_changes_nothing_and_is_seen(
    autojump_clock: MockClock, bad: Step
) -> None:
    """The turn is answered with the context as it was; the failure has a reason, and an end."""
    # C040, C041
    world = compacted("fine", summaries=[GOOD, bad], settings=BLOCKING)

    async with world.open() as harness:
        root = await harness.root()
        await talk(harness, 11)
        assert [each.result.status for each in outcomes(harness)] == ["applied"]
        before = len(summary_requests(world))
        number = 11
        while len(outcomes(harness)) == 1:
            context = await said(harness)
            await talk(harness, 1, first=number)
            number += 1
        _, failed = outcomes(harness)
        doc = await last(harness)
        history = await root.history(limit=1_000)
        usage = root.usage()["models"][MODEL]["requests"]
        await verify(world, harness)

    tried = summary_requests(world)[before:]
    assert failed.status == "failed"
    assert failed.error.message
    assert (doc["status"], doc["reason"]) == ("failed", failed.error.message)
    retried = bad.error is not None and bad.error.kind == "retryable"
    assert 1 <= len(tried) <= (6 if retried else 3)
    # The earlier summary was given to be taken over.
    assert all(GOOD in request_text(each) for each in tried)
    assert len(heads(history)) == 1
    assert context == last_asked(world)[: len(context)]
    assert usage == len(world.model.requests)


@pytest.mark.parametrize("bad", [Step(text=""), Step(text="# Summary"), Step(thinking="I think")])
async def test_a_model_that_gives_no_summary_is_not_asked_for_it_twice_in_a_turn(
    autojump_clock: MockClock, bad: Step
) -> None:
    """Three answers for the threshold; what is then refused as too large ends the run at once."""
    # C040, C041, C043
    world = compacted("fine", summaries=[bad], settings=BLOCKING)
    refuses = Step(
        when=lambda view: not asks_for_summary(view) and len(summary_requests(world)) > 0,
        error=ScriptedError(kind="overflow", detail="too many tokens"),
    )
    world.model._script = _first(world.model._script, refuses)

    async with world.open() as harness:
        answered = await talk(harness, 9)
        (refused,) = await talk(harness, 1, first=9)
        (failed,) = outcomes(harness)
        usage = (await harness.root()).usage()["models"][MODEL]["requests"]
        await verify(world, harness)

    assert {each.status for each in answered} == {"done"}
    assert (refused.status, refused.reason) == ("unanswered", "context_overflow")
    detail = refused.detail or ""
    assert detail.startswith("too many tokens; making room failed: ")
    assert failed.error.message in detail
    assert "The largest items: the user message" in detail
    assert len(summary_requests(world)) == 3
    assert usage == len(world.model.requests)


async def test_a_better_answer_after_a_bad_one_is_taken(autojump_clock: MockClock) -> None:
    """The model is told what was wrong, and the summary is applied."""
    world = compacted("fine", summaries=[Step(text="# Summary"), GOOD], settings=BLOCKING)

    async with world.open() as harness:
        await talk(harness, 11)
        (outcome,) = outcomes(harness)
        await verify(world, harness)

    first, second = summary_requests(world)
    assert outcome.result.status == "applied"
    assert "no summary" not in request_text(first)
    assert "Your last answer was no summary: it has headings" in request_text(second)


async def test_a_summary_request_that_is_too_large_is_read_in_parts(
    autojump_clock: MockClock,
) -> None:
    """The summariser's window is half the conversation: each message is read, or still there."""
    # C042
    too_large = Step(
        when=lambda view: asks_for_summary(view) and view.input_tokens > 1_200,
        error=ScriptedError(kind="overflow", detail="too many tokens"),
    )
    world = compacted("fine", settings=BLOCKING, window=4_000)
    world.model._script = _first(world.model._script, too_large)

    async with world.open() as harness:
        await talk(harness, 14)
        ended = outcomes(harness)
        kept = markers("".join(text_of(message) for message in await said(harness)))
        await verify(world, harness)

    assert [each.result.status for each in ended] == ["applied"]
    read = [each for each in summary_requests(world) if _tokens(each) <= 1_200]
    assert len(read) >= 3
    seen = {marker for each in read for marker in markers(request_text(each))}
    assert seen | kept == {f"marker-{number:03}" for number in range(14)}
    # Each further part was given the summary of those before.
    assert all(GOOD in request_text(each) for each in read[1:])


def _first(script: Any, step: Step) -> Any:
    return attrs.evolve(script, steps=(step, *script.steps))


def _tokens(request: Any) -> int:
    return view_request(request).input_tokens


async def test_a_round_of_calls_is_never_parted(autojump_clock: MockClock) -> None:
    """A run of many rounds that is compacted on its way ends, behind a strict provider."""

    # C038
    def turns(view: RequestView) -> bool:
        return not asks_for_summary(view) and len(other_requests(world)) < 20

    rounds = Step(
        when=turns,
        text="w" * 600,
        calls=(ScriptedCall(name="safe", arguments={"what": "w" * 600}),) * 2,
    )
    world = compacted(rounds, "the end", settings=BLOCKING)

    async with world.open() as harness:
        settled = await ask(harness, "go", "r1")
        ended = outcomes(harness)
        await verify(world, harness)

    assert settled.text == "the end"
    assert len(ended) >= 3
    assert {each.result.status for each in ended} == {"applied"}
