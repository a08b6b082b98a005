"""Deferred answers: a provider that answers later is asked again, at durable moments."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import trio
from agent_world import (
    MODEL,
    World,
    ask,
    calls,
    crash_everywhere,
    messages,
    status_of,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable.agent._models import Deferred, Models
from pidurable.agent._script import Defer, ScriptedCall, ScriptedError, Step
from pidurable.agent._scripted import ScriptedModel
from pidurable.agent._services import AgentChange
from pidurable.errors import ModelError
from pidurable.harness._open import Harness, open_harness
from pidurable.records._limits import Settings
from pidurable.records._messages import AssistantMessage
from pidurable.session._seams import InlineBlocking


async def answers(harness: Harness) -> list[AssistantMessage]:
    """The answers of the root, in order, whatever became of them."""
    root = await harness.root()
    return messages(await root.history(limit=1000), AssistantMessage)


async def test_a_deferred_answer_is_asked_for_until_it_is_there(autojump_clock: MockClock) -> None:
    """One request is sent; its answer is asked for when the provider says, and charged once."""
    world = World(Step(text="at last", defer=Defer(polls=3, seconds=100.0)), "next")

    async with world.open() as harness:
        began = trio.current_time()
        outcome = await ask(harness, "go")
        took = trio.current_time() - began
        later = await ask(harness, "more", "r2")
        found = await answers(harness)
        usage = (await harness.root()).usage()["models"][MODEL]
        await verify(world, harness)

    assert (outcome.text, later.text) == ("at last", "next")
    assert 300 <= took < 310
    assert [each.status for each in found] == ["deferred", "complete", "complete"]
    assert len(world.model.requests) == usage["requests"] == 2
    assert [handle["polls"] for handle in world.model.polls] == [3, 2, 1]
    sent = [text_of(item.message) for item in world.model.requests[-1].messages]
    assert sent == ["go", "at last", "more"]


async def test_calls_of_a_deferred_answer_run(autojump_clock: MockClock) -> None:
    """What is offered is what the request had offered; the run goes on as after any answer."""
    step = Step(calls=(ScriptedCall(name="safe"), ScriptedCall(name="nope")), defer=Defer())
    world = World(step, "done")

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "done"
    assert len(world.ledger) == 1


async def test_a_deferred_answer_survives_a_kill_at_every_commit(autojump_clock: MockClock) -> None:
    """Once the deferral is stored nothing is sent again: the answer is asked for by its handle."""
    kept: list[int] = []

    async def program(harness: Harness, world: World) -> Any:
        return await ask(harness, "go"), await answers(harness)

    def check(world: World, result: Any) -> None:
        settled, found = result
        assert (settled.status, settled.text) == ("done", "at last")
        assert [each.status for each in found] == ["deferred", "complete"]
        # Sent twice only where the process died before it had stored that it is deferred.
        assert len(world.model.requests) <= 2
        kept.append(len(world.model.requests))

    kills = await crash_everywhere(
        lambda: World(Step(text="at last", defer=Defer(polls=2))), program, check
    )

    assert kills >= 5
    assert kept.count(1) >= 3


async def test_the_moment_of_the_next_poll_survives_a_restart(autojump_clock: MockClock) -> None:
    """Closed while it waits, the answer is asked for at the moment that was fixed before."""
    world = World(Step(text="at last", defer=Defer(seconds=100.0)))

    # C094
    began = trio.current_time()
    async with world.open() as harness:
        await (await harness.root()).submit("go", request_id="r1")
        await trio.sleep(60)
        (task,) = harness.tasks()
        assert task.phase == "poll"
    async with world.open() as harness:
        outcome = await ask(harness, "go")

    assert outcome.text == "at last"
    assert 100 <= trio.current_time() - began < 105
    assert len(world.model.requests) == 1


async def test_an_aborted_run_cancels_what_its_provider_works_on(autojump_clock: MockClock) -> None:
    """The provider is told by the handle; the request is charged, and the inputs are settled."""
    world = World(Step(text="never", defer=Defer(seconds=100.0)), "next")

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await trio.sleep(50)
        await root.abort()
        outcome = await submission.wait()
        await harness.wait_for_idle()
        usage = root.usage()["models"][MODEL]
        later = await ask(harness, "more", "r2")
        await verify(world, harness)

    assert (outcome.status, outcome.reason) == ("unanswered", "aborted")
    assert world.model.cancelled == [{"step": 0, "polls": 1}]
    assert usage["requests"] == 1
    assert later.text == "never"


async def test_a_provider_that_cannot_be_told_of_an_abort_is_reported(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Cancelling fails or hangs: the run is aborted all the same, and a report says so."""
    tries = 0

    async def cancel(self: ScriptedModel, request: Any, handle: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError("no route")
        await trio.sleep_forever()

    monkeypatch.setattr(ScriptedModel, "cancel", cancel)
    world = World(Step(text="never", defer=Defer(seconds=100.0)))

    async with world.open() as harness:
        root = await harness.root()
        outcomes = []
        for _ in range(2):
            submission = await root.submit("go")
            await trio.sleep(10)
            await root.abort()
            outcomes.append(await submission.wait())
        await harness.wait_for_idle()
        await verify(world, harness)

    assert [each.reason for each in outcomes] == ["aborted", "aborted"]
    assert tries == 2
    assert caplog.text.count("was not cancelled") == 2


async def test_a_failed_poll_asks_again_and_sends_nothing_again(autojump_clock: MockClock) -> None:
    """Where only the asking failed, the same handle is asked after a wait."""
    error = ScriptedError(detail="gateway", retry_after=20.0)
    world = World(Step(text="at last", defer=Defer(seconds=10.0, error=error)))

    async with world.open() as harness:
        began = trio.current_time()
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        await trio.sleep(15)
        waits = root.live()["retry"]
        outcome = await submission.wait()
        usage = root.usage()["models"][MODEL]
        await verify(world, harness)

    assert outcome.text == "at last"
    assert 30 <= trio.current_time() - began < 35
    assert waits["try_number"] == 1
    assert "gateway" in waits["error"]
    assert usage["requests"] == 1
    assert len(world.model.requests) == 1
    assert world.model.polls == [{"step": 0, "polls": 1}] * 2


async def test_a_provider_that_answers_between_failed_polls_is_asked_on(
    autojump_clock: MockClock,
) -> None:
    """The tries are those in a row: a gateway that fails now and then, for hours, loses nothing."""
    error = ScriptedError(detail="gateway")
    defer = Defer(polls=5, seconds=1_000.0, error=error)
    world = World(Step(text="at last", defer=defer), settings=Settings(request_tries=2))

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "at last"
    assert len(world.model.polls) == 10
    assert len(world.model.requests) == 1
    assert world.model.cancelled == []


@pytest.mark.parametrize("kind", ["other", "retryable"])
async def test_a_poll_that_is_refused_ends_the_run(
    autojump_clock: MockClock, kind: Literal["other", "retryable"]
) -> None:
    """An error that no retry mends, or the last of all tries, leaves the input unanswered, with the
    provider's text; the provider is told that nobody asks any more.
    """
    error = ScriptedError(kind=kind, detail="that request is not known")
    world = World(Step(text="never", defer=Defer(error=error)), settings=Settings(request_tries=0))

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)
        record = await status_of(harness, "r1")
        usage = (await harness.root()).usage()["models"][MODEL]

    assert usage["requests"] == 1
    assert (outcome.reason, record.status) == ("model_error", "unanswered")
    assert "that request is not known" in outcome.detail
    assert world.model.cancelled == [{"step": 0, "polls": 1}]


@pytest.mark.parametrize(
    ("seconds", "least", "most"), [(0.0, 1, 3), (10.0**9, 600, 605), (float("inf"), 600, 605)]
)
async def test_the_wait_between_two_polls_is_bounded(
    autojump_clock: MockClock, seconds: float, least: float, most: float
) -> None:
    """A provider can make nobody ask all the time, and nobody wait for years."""
    world = World(Step(text="at last", defer=Defer(seconds=seconds)))

    async with world.open() as harness:
        began = trio.current_time()
        outcome = await ask(harness, "go")

    assert outcome.text == "at last"
    assert least <= trio.current_time() - began < most


class Defers:
    """A provider that defers everything, and cannot be asked for it."""

    name = "odd"

    @asynccontextmanager
    async def stream(self, request: Any) -> Any:
        """Defer."""
        yield self._events()

    async def _events(self) -> Any:
        yield Deferred("h1", 1.0)


class DefersUnderNothing(Defers):
    """A provider that can be asked, but gave a handle that cannot be stored."""

    async def _events(self) -> Any:
        yield Deferred({1, 2}, float("nan"))

    def poll(self, request: Any, handle: Any) -> Any:
        """Never reached."""
        raise ModelError("other", "nobody should ask")

    async def cancel(self, request: Any, handle: Any) -> None:
        """Never reached."""


@pytest.mark.parametrize(
    ("provider", "said"),
    [(Defers(), "cannot be asked for it"), (DefersUnderNothing(), "no JSON")],
)
async def test_an_answer_that_nobody_can_ask_for_is_an_error(
    autojump_clock: MockClock, provider: Any, said: str
) -> None:
    """A deferral without a way back ends the run at once, and the conversation is usable."""
    world = World()

    async with open_harness(
        world.base, models=Models([provider]), clock=world.clock, blocking=InlineBlocking()
    ) as harness:
        outcome = await (
            await (await harness.root(agent=AgentChange(model="odd/model"))).submit("go")
        ).wait()

    assert outcome.reason == "model_error"
    assert said in outcome.detail


class Plain:
    """A provider that answers at once, or not at all, under the name of the scripted one."""

    name = "scripted"

    def stream(self, request: Any) -> Any:
        """Never reached."""
        raise AssertionError("a deferred request is not sent again")


async def test_a_provider_that_defers_no_more_ends_the_run(autojump_clock: MockClock) -> None:
    """Reopened with one that cannot be asked, the input is unanswered, with a text that says so."""
    world = World(Step(text="never", defer=Defer(seconds=5.0)))

    async with world.open() as harness:
        await (await harness.root()).submit("go", request_id="r1")
        await trio.sleep(2)
    async with open_harness(
        world.base.reopen(), models=Models([Plain()]), clock=world.clock, blocking=InlineBlocking()
    ) as harness:
        outcome = await ask(harness, "go")

    assert outcome.reason == "model_error"
    assert "does not defer answers" in outcome.detail


async def test_a_host_without_models_ends_a_deferred_run(autojump_clock: MockClock) -> None:
    """Reopened without models, what was deferred ends as `no_model` when it is due."""
    world = World(Step(text="never", defer=Defer(seconds=5.0)))

    async with world.open() as harness:
        await (await harness.root()).submit("go", request_id="r1")
        await trio.sleep(2)
    async with open_harness(
        world.base.reopen(), clock=world.clock, blocking=InlineBlocking()
    ) as harness:
        outcome = await ask(harness, "go")

    assert outcome.reason == "no_model"


async def test_a_turn_after_a_deferred_one_is_a_new_request(autojump_clock: MockClock) -> None:
    """The next generation knows nothing of the handle of the one before it."""
    world = World(
        Step(calls=calls("safe").calls, defer=Defer()), Step(text="done", defer=Defer(polls=2))
    )

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "done"
    assert [handle["step"] for handle in world.model.polls] == [0, 1, 1]


@pytest.mark.parametrize("polls", [10, 11])
async def test_a_provider_that_defers_for_ever_ends_the_run(
    autojump_clock: MockClock, polls: int
) -> None:
    """Asked for once more when the time is over, it answers, or is told that nobody waits."""
    step = Step(text="at last", defer=Defer(polls=polls, seconds=100.0))
    world = World(step, settings=Settings(deferred_seconds_max=1_000.0))

    began = trio.current_time()
    async with world.open() as harness:
        await (await harness.root()).submit("go", request_id="r1")
        await trio.sleep(250)
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        took = trio.current_time() - began
        usage = (await harness.root()).usage()["models"][MODEL]
        await verify(world, harness)

    assert 1_000 <= took < 1_005
    assert len(world.model.polls) == 10
    assert usage["requests"] == 1
    if polls == 10:
        assert outcome.text == "at last"
        assert world.model.cancelled == []
        return
    assert outcome.reason == "model_error"
    assert "deferred its answer for 1000 s, the most allowed" in outcome.detail
    assert world.model.cancelled == [{"step": 0, "polls": 1}]
