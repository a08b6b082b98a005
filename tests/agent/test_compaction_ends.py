"""How compactions end: hooks, aborts, faults, waits that last, and crashes in each phase."""

from __future__ import annotations

from typing import Any

import agent_world
import attrs
import pytest
import trio
from agent_world import MODEL, DieAt, World, ask, crash_everywhere, run_killed, text_of, verify
from compaction_world import (
    GOOD,
    compacted,
    heads,
    last,
    long,
    other_requests,
    outcomes,
    request_text,
    said,
    summary_requests,
)
from trio.testing import MockClock

from pidurable.agent import _compaction
from pidurable.agent._compaction import Compaction
from pidurable.agent._documents import CompactionDocument
from pidurable.agent._hooks import BeforeCompact, Decline, Summary
from pidurable.agent._script import Cut, Defer, ScriptedError, Step
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.registry import Extension, hook

BLOCKING = Settings(background_tokens=0, keep_recent_tokens=1_000)
MANUAL = Settings(keep_recent_tokens=1_000)


async def fill(harness: Harness, count: int = 9, tokens: int = 300) -> None:
    """Hand in as much as is just below the threshold."""
    for number in range(count):
        settled = await ask(harness, long(number, tokens), f"r{number}")
        assert settled.status == "done"


# --- hooks ------------------------------------------------------------------------------------


def hooked(handler: Any, **options: Any) -> World:
    """A world whose compactions ask a handler."""
    world = compacted("fine", settings=BLOCKING, **options)
    world.registry.install(Extension("memory", hooks=[hook(Compaction, before_compact=handler)]))
    return world


async def test_a_hook_may_supply_the_summary(autojump_clock: MockClock) -> None:
    """No model is asked; the hook sees what its text will stand for; what is no text is marked."""
    asked: list[BeforeCompact] = []

    async def supply(range: BeforeCompact) -> Summary:
        asked.append(range)
        return Summary("Written by a hook.\0\ud800")

    world = hooked(supply)

    async with world.open() as harness:
        await fill(harness, 11)
        (outcome,) = outcomes(harness)
        await verify(world, harness)

    (given,) = asked
    assert outcome.result.status == "applied"
    assert summary_requests(world) == []
    assert "Written by a hook.\u2400\ufffd" in request_text(other_requests(world)[-1])
    assert (given.why, given.first_kept) == ("threshold", outcome.result.cut)
    assert given.tokens == outcome.result.tokens_before
    assert "marker-000" in text_of(given.messages[0])


async def test_a_hook_may_decline_and_the_reason_is_kept(autojump_clock: MockClock) -> None:
    """The request is sent as it is, and the next compaction waits until the context has grown."""

    async def decline(range: BeforeCompact) -> Decline:
        return Decline("not on a Monday\0")

    world = hooked(decline)

    async with world.open() as harness:
        await fill(harness, 12)
        ended = [each.result for each in outcomes(harness)]
        doc = await last(harness)
        await verify(world, harness)

    assert {(each.status, each.reason) for each in ended} == {
        ("skipped", "a hook declined: not on a Monday\\0")
    }
    assert doc["reason"] == "a hook declined: not on a Monday\\0"
    assert summary_requests(world) == []


async def test_how_a_compaction_ended_counts_no_more_after_a_reset(
    autojump_clock: MockClock,
) -> None:
    """A context that grows anew is compacted at the threshold, however large it was before."""
    asked: list[int] = []

    async def decline(range: BeforeCompact) -> Decline:
        asked.append(range.tokens)
        return Decline("not now")

    world = hooked(decline)

    async with world.open() as harness:
        await fill(harness, 12)
        before = len(asked)
        root = await harness.root()
        await root.reset()
        for number in range(11):
            await ask(harness, long(number), f"again{number}")
        await verify(world, harness)

    assert asked[before] == asked[0]


@pytest.mark.parametrize("text", ["", "# Summary\n- none", "w" * 20_000])
async def test_what_a_hook_supplies_must_be_a_summary_too(
    autojump_clock: MockClock, text: str
) -> None:
    """The compaction fails with the reason, and the context stays as it was."""

    async def supply(range: BeforeCompact) -> Summary:
        return Summary(text)

    world = hooked(supply)

    async with world.open() as harness:
        await fill(harness, 10)
        (outcome,) = outcomes(harness)
        history = await (await harness.root()).history(limit=1_000)
        await verify(world, harness)

    assert outcome.status == "failed"
    assert outcome.error is not None
    assert "what a hook gave is no summary" in outcome.error.message
    assert heads(history) == []


async def test_a_hook_that_raises_is_skipped(autojump_clock: MockClock) -> None:
    """The model is asked as if there were none."""

    async def broken(range: BeforeCompact) -> None:
        raise RuntimeError("no")

    world = hooked(broken)

    async with world.open() as harness:
        await fill(harness, 11)
        (outcome,) = outcomes(harness)
        await verify(world, harness)

    assert outcome.result.status == "applied"
    assert len(summary_requests(world)) == 1


# --- aborts, faults, waits ----------------------------------------------------------------------


async def test_an_abort_of_the_run_ends_its_compaction(autojump_clock: MockClock) -> None:
    """The input is unanswered, nothing is shown any more, and the next input is answered."""
    slow = Step(text=("one ", "two ", "three"), delay=2.0)
    world = compacted("fine", summaries=[slow, GOOD], settings=BLOCKING)

    async with world.open() as harness:
        root = await harness.root()
        await fill(harness)
        submission = await root.submit(long(9), request_id="r9")
        await trio.sleep(5)
        shown = root.live()["compactions"]
        before = root.usage()["models"][MODEL]
        await root.abort()
        settled = await submission.wait()
        await harness.wait_for_idle()
        after = root.usage()["models"][MODEL]
        live = root.live()
        (outcome,) = outcomes(harness)
        again = await ask(harness, "go on", "r10")
        await verify(world, harness)

    assert [slot["status"] for slot in shown] == ["summarizing"]
    assert shown[0]["received"] == len("one two ")
    assert (settled.status, settled.reason) == ("unanswered", "aborted")
    assert outcome.status == "aborted"
    assert live["compactions"] == []
    assert again.status == "done"
    # What had come was charged, with what was sent for it.
    assert after["requests"] == before["requests"] + 1
    assert after["input_tokens"] > before["input_tokens"] + 1_000
    assert after["output_tokens"] == before["output_tokens"] + 2


async def test_an_abort_of_the_compaction_alone_lets_its_run_go_on(
    autojump_clock: MockClock,
) -> None:
    """The request is sent without a summary: it may fit."""
    world = compacted("fine", summaries=[Step(text=GOOD, delay=50.0)], settings=BLOCKING)

    async with world.open() as harness:
        root = await harness.root()
        await fill(harness)
        submission = await root.submit(long(9), request_id="r9")
        await trio.sleep(5)
        (slot,) = root.live()["compactions"]
        await harness.abort_task(slot["task"])
        settled = await submission.wait()
        history = await root.history(limit=1_000)
        await verify(world, harness)

    assert settled.status == "done"
    assert heads(history) == []


async def test_an_abort_takes_back_a_summary_that_still_waits(autojump_clock: MockClock) -> None:
    """A compaction that somebody asked for, and aborts, places nothing later."""
    world = compacted("fine", Step(text="fine", delay=30.0), settings=MANUAL, window=None)
    world.model._script = attrs.evolve(
        world.model._script,
        steps=(
            Step(text="slow", delay=60.0, when=lambda view: view.user == "go"),
            *world.model._script.steps,
        ),
    )

    async with world.open() as harness:
        root = await harness.root()
        await fill(harness, 6)
        submission = await root.submit("go", request_id="go")
        task = await root.compact()
        await trio.sleep(5)
        assert [slot["status"] for slot in root.live()["compactions"]] == ["waiting"]
        await harness.abort_task(task)
        outcome = await harness.wait_for_task(task)
        inbox = root.inbox()
        settled = await submission.wait()
        history = await root.history(limit=1_000)
        await verify(world, harness)

    assert outcome.status == "aborted"
    assert inbox == []
    assert settled.status == "done"
    assert heads(history) == []


@pytest.mark.parametrize("window", [4_000, None])
async def test_a_fault_of_a_compaction_leaves_the_conversation_usable(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Nothing is shown any more; a run whose request did not fit ends with the reason."""
    overflow = Step(text="fine", error=ScriptedError(kind="overflow", detail="too large"), times=1)
    world = compacted("fine" if window else overflow, settings=BLOCKING, window=window)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    async with world.open() as harness:
        root = await harness.root()
        with monkeypatch.context() as patch:
            patch.setattr(_compaction, "choose_range", broken)
            settled = [await ask(harness, long(number), f"r{number}") for number in range(11)]
        ended = outcomes(harness)
        live = root.live()
        again = await ask(harness, "go on", "again")
        await verify(world, harness)

    assert "faulted" in {each.status for each in ended}
    assert live["compactions"] == []
    assert again.status == "done"
    if window is None:
        assert settled[0].reason == "context_overflow"
        assert "making room ended faulted" in (settled[0].detail or "")
    else:
        assert {each.status for each in settled} == {"done"}


async def test_a_request_that_fails_is_made_again_after_its_wait(
    autojump_clock: MockClock,
) -> None:
    """The wait is the provider's, shown, and lasts over a restart; every attempt is charged."""
    later = Step(text=GOOD, error=ScriptedError(detail="busy", retry_after=40.0))
    world = compacted("fine", summaries=[later], settings=BLOCKING)

    async with world.open() as harness:
        await fill(harness)
        await (await harness.root()).submit(long(9), request_id="r9")
        began = trio.current_time()
        await trio.sleep(5)
        shown = (await harness.root()).live()["compactions"]
    async with world.open() as harness:
        settled = await ask(harness, long(9), "r9")
        waited = trio.current_time() - began
        (outcome,) = outcomes(harness)
        usage = (await harness.root()).usage()["models"][MODEL]["requests"]
        await verify(world, harness)

    assert [slot["status"] for slot in shown] == ["retrying"]
    assert settled.status == "done"
    assert 40 <= waited <= 50
    assert outcome.result.status == "applied"
    assert usage == len(world.model.requests)


async def test_a_stream_that_is_cut_is_charged_and_made_again(autojump_clock: MockClock) -> None:
    """Half a summary is none."""
    cut = Step(text=("half of ", GOOD), cut=Cut(after=1))
    world = compacted("fine", summaries=[cut], settings=BLOCKING)

    async with world.open() as harness:
        await fill(harness, 11)
        (outcome,) = outcomes(harness)
        usage = (await harness.root()).usage()["models"][MODEL]
        await verify(world, harness)

    assert outcome.result.status == "applied"
    assert len(summary_requests(world)) == 2
    assert f"half of {GOOD}" in request_text(other_requests(world)[-1])
    assert usage["requests"] == len(world.model.requests)


async def test_a_summary_may_be_answered_later(autojump_clock: MockClock) -> None:
    """A provider that defers its answer is asked again, also after a restart, and also where each
    time of asking fails at first: only failures in a row are counted.
    """
    deferred = Step(
        text=GOOD, defer=Defer(polls=2, seconds=30.0, error=ScriptedError(detail="busy"))
    )
    once = attrs.evolve(BLOCKING, request_tries=1)
    world = compacted("fine", summaries=[deferred], settings=once)

    async with world.open() as harness:
        await fill(harness)
        await (await harness.root()).submit(long(9), request_id="r9")
        await trio.sleep(5)
    async with world.open() as harness:
        settled = await ask(harness, long(9), "r9")
        (outcome,) = outcomes(harness)
        usage = (await harness.root()).usage()["models"][MODEL]
        await verify(world, harness)

    assert settled.status == "done"
    assert outcome.result.status == "applied"
    assert len(summary_requests(world)) == 1
    assert len(world.model.polls) == 4
    assert usage["requests"] == len(world.model.requests)


async def test_a_deferred_summary_that_nobody_waits_for_is_cancelled(
    autojump_clock: MockClock,
) -> None:
    """An abort tells the provider."""
    deferred = Step(text=GOOD, defer=Defer(polls=2, seconds=30.0))
    world = compacted("fine", summaries=[deferred], settings=BLOCKING)

    async with world.open() as harness:
        root = await harness.root()
        await fill(harness)
        await root.submit(long(9), request_id="r9")
        await trio.sleep(5)
        await root.abort()
        await harness.wait_for_idle()
        await verify(world, harness)

    assert len(world.model.cancelled) == 1


async def test_a_summary_that_is_deferred_for_ever_is_given_up(autojump_clock: MockClock) -> None:
    """The compaction fails when the time for a deferred answer is over; the provider is told."""
    deferred = Step(text=GOOD, defer=Defer(polls=100, seconds=30.0))
    settings = attrs.evolve(BLOCKING, deferred_seconds_max=100.0)
    world = compacted("fine", summaries=[deferred], settings=settings)

    async with world.open() as harness:
        root = await harness.root()
        await fill(harness)
        submission = await root.submit(long(9), request_id="r9")
        await submission.wait()
        await harness.wait_for_idle()
        await verify(world, harness)
        ended = harness.snapshot(CompactionDocument, root.id)

    assert ended is not None
    assert ended.status == "failed"
    assert "deferred its answer for 100 s" in (ended.reason or "")
    assert len(world.model.polls) == 4
    assert len(world.model.cancelled) == 1


async def test_a_reset_that_comes_first_makes_the_summary_stale(
    autojump_clock: MockClock,
) -> None:
    """What a host has cut away is not brought back; the run ends with the reset."""
    world = compacted("fine", summaries=[Step(text=GOOD, delay=20.0)], settings=BLOCKING)

    async with world.open() as harness:
        root = await harness.root()
        await fill(harness)
        submission = await root.submit(long(9), request_id="r9")
        await trio.sleep(5)
        async with harness.commit() as tx:
            tx.append(root.id, kind="pi.reset", head=0)
        settled = await submission.wait()
        (outcome,) = outcomes(harness)
        history = await root.history(limit=1_000)
        again = await ask(harness, "anew", "r10")
        await verify(world, harness)

    assert outcome.result.status == "stale"
    assert "starts later already" in (outcome.result.reason or "")
    assert heads(history) == []
    assert (settled.status, settled.reason) == ("unanswered", "reset")
    assert again.status == "done"


# --- crashes ------------------------------------------------------------------------------------


async def test_a_death_with_the_summary_received_asks_for_it_again(
    autojump_clock: MockClock,
) -> None:
    """Until it is stored the context is the old one; afterwards it is applied once."""
    world = compacted("fine", settings=BLOCKING)
    died = DieAt(world, "CP6")

    async def program(harness: Harness, _: World) -> Any:
        await fill(harness)
        return await ask(harness, long(9), "r9")

    # C041
    await run_killed(world, died, program)
    asked = len(summary_requests(world))
    async with world.open() as harness:
        root = await harness.root()
        history = await root.history(limit=1_000)
        context = await said(harness)
        settled = await ask(harness, long(9), "r9")
        await harness.wait_for_idle()
        (outcome,) = outcomes(harness)
        after = await root.history(limit=1_000)
        await verify(world, harness)

    assert died.struck
    assert heads(history) == []
    assert len(context) == 19
    assert settled.status == "done"
    assert (asked, len(summary_requests(world))) == (1, 2)
    assert [entry.id for entry in heads(after)] == [outcome.result.entry]


async def test_a_summary_that_a_restart_has_cut_is_charged(autojump_clock: MockClock) -> None:
    """What had come is estimated, and added before the request is made again."""
    slow = Step(text=("The ", "person ", "counts ", "and counts."), delay=2.0)
    world = compacted("fine", summaries=[slow], settings=BLOCKING)

    async with world.open() as harness:
        await fill(harness)
        await (await harness.root()).submit(long(9), request_id="r9")
        await trio.sleep(5)
        before = (await harness.root()).usage()["models"][MODEL]
    async with world.open() as harness:
        settled = await ask(harness, long(9), "r9")
        after = (await harness.root()).usage()["models"][MODEL]
        await verify(world, harness)

    assert settled.status == "done"
    assert len(summary_requests(world)) == 2
    # The request that was cut, the one that was not, and the answer.
    assert after["requests"] == before["requests"] + 3


@pytest.fixture
def sparse(slow_run: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Kill at few of the commits, and with `-m slow` at each; return the fewest kills."""
    if slow_run:
        return 20
    monkeypatch.setattr(agent_world, "KILL_STEP", 17)
    return 3


def large() -> World:
    """A world that is compacted at its fourth input, in two parts, after a failed request."""
    failing = Step(text=GOOD, error=ScriptedError(detail="busy", retry_after=3.0))
    return compacted("fine", summaries=[failing, GOOD, GOOD], settings=BLOCKING, window=4_000)


@pytest.mark.slow
async def test_a_compaction_survives_a_kill_at_every_commit(
    autojump_clock: MockClock, sparse: int
) -> None:
    """Whatever commit the process dies at, each input is answered once and one summary placed."""

    async def program(harness: Harness, _: World) -> Any:
        settled = [await ask(harness, long(number, 900), f"r{number}") for number in range(5)]
        root = await harness.root()
        return settled, await root.history(limit=1_000), outcomes(harness)

    def check(world: World, result: Any) -> None:
        settled, history, ended = result
        assert {each.status for each in settled} == {"done"}
        assert {each.status for each in ended} == {"completed"}
        applied = [each.result.entry for each in ended if each.result.status == "applied"]
        assert [entry.id for entry in heads(history)] == applied
        assert applied

    kills = await crash_everywhere(large, program, check)

    assert kills >= sparse


@pytest.mark.slow
async def test_a_summary_that_is_handed_in_survives_a_kill_at_every_commit(
    autojump_clock: MockClock, sparse: int
) -> None:
    """One that somebody asked for while a run is active is placed once, or asked for again."""

    async def program(harness: Harness, _: World) -> Any:
        root = await harness.root()
        for number in range(3):
            await ask(harness, long(number, 900), f"r{number}")
        submission = await root.submit(long(3, 900), request_id="r3")
        if not outcomes(harness) and not root.live()["compactions"]:
            await root.compact("all of it")
        settled = await submission.wait()
        await harness.wait_for_idle()
        return settled, await root.history(limit=1_000), outcomes(harness)

    def make() -> World:
        return compacted(Step(text="fine", delay=0.2), settings=BLOCKING, window=None)

    def check(world: World, result: Any) -> None:
        settled, history, ended = result
        assert settled.status == "done"
        applied = [each.result.entry for each in ended if each.result.status == "applied"]
        assert [entry.id for entry in heads(history)] == applied
        assert len(applied) == 1

    kills = await crash_everywhere(make, program, check)

    assert kills >= sparse
