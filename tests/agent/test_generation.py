"""`pi.generation`: one answer after the other, and every way in which there may be none."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from agent_world import (
    MODEL,
    World,
    ask,
    calls,
    check_transcript,
    messages,
    results,
    status_of,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable.agent._ask import next_try
from pidurable.agent._models import Done, ModelInfo, Models, Prices, TextDelta
from pidurable.agent._script import Cut, ScriptedCall, ScriptedError, Stall, Step
from pidurable.agent._services import AgentChange
from pidurable.agent._tool_call import ToolTask
from pidurable.errors import ModelError, NotFoundError, UnansweredError
from pidurable.harness._open import open_harness
from pidurable.records._entries import Edit
from pidurable.records._limits import Settings
from pidurable.records._messages import (
    AssistantMessage,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    Usage,
    UserMessage,
)
from pidurable.registry import section
from pidurable.session._seams import InlineBlocking, TrioClock
from pidurable.tasks._transaction import TreeTransaction


async def settled(world: World, text: str = "go", **options: Any) -> Any:
    """Ask once, look at the store at rest, and return how it ended."""
    async with world.open(**options) as harness:
        with trio.fail_after(5000):
            outcome = await ask(harness, text)
            await harness.wait_for_idle()
        await verify(world, harness)
    return outcome


async def answers(world: World) -> list[AssistantMessage]:
    """The answers of the root, in order, whatever became of them."""
    async with world.open() as harness:
        root = await harness.root()
        return messages(await root.history(limit=1000), AssistantMessage)


# --- answers ------------------------------------------------------------------------------------


async def test_an_answer_has_the_moment_that_the_clock_of_the_session_says(
    autojump_clock: MockClock,
) -> None:
    """Where the clock of a session is not the machine's, no message tells the machine's time."""
    world = World("hello there")
    world.clock = TrioClock(1_000_000)

    await settled(world)

    (answer,) = await answers(world)
    assert 1_000_000 <= answer.at_us <= world.clock.now_us()


async def test_an_input_gets_its_answer(autojump_clock: MockClock) -> None:
    """The submission is done, names its entries, and its usage is charged to the model."""
    world = World("hello there")

    async with world.open() as harness:
        outcome = await ask(harness, "hi")
        root = await harness.root()
        usage = root.usage()
        total = await harness.usage()
        entries = {entry.id: entry for entry in await root.history()}

    assert (outcome.status, outcome.text) == ("done", "hello there")
    assert entries[outcome.entry].kind == "pi.user"
    assert entries[outcome.answer].kind == "pi.assistant"
    assert usage["models"][MODEL]["requests"] == 1
    assert total[MODEL].requests == 1


async def test_a_round_with_one_tool_call_takes_four_commits(autojump_clock: MockClock) -> None:
    """Answer, intent, result, boundary, which prepares the next turn and reserves who takes it."""
    seqs: list[int] = []
    one, two = World(calls("safe"), "done"), World(calls("safe"), calls("safe"), "done")
    for world in (one, two):
        async with world.open() as harness:
            before = harness.session.line.published_seq
            await ask(harness, "go")
            seqs.append(harness.session.line.published_seq - before)

    assert seqs[1] - seqs[0] == 4
    # The input, the first turn that is prepared, and a last answer.
    assert seqs[0] == 4 + 3


async def test_an_answer_whose_calls_all_fail_goes_on_at_once(autojump_clock: MockClock) -> None:
    """Unknown tools get their results with the answer, and the next turn begins in that commit."""
    world = World(calls("nope", "missing"), "sorry")

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        await verify(world, harness)
        found = await results(harness)
        kinds = [task.kind for task in harness.tasks()]

    assert outcome.text == "sorry"
    assert [each.code for each in found] == ["tool_unavailable"] * 2
    assert "Available: once, safe, slow, subagent" in text_of(found[0])
    assert kinds == ["pi.generation"] * 2


async def test_thinking_is_kept_beside_the_answer(autojump_clock: MockClock) -> None:
    """Thinking blocks are stored in order, and are not part of the answer's text."""
    world = World(Step(thinking="hm, two", text="2"))

    outcome = await settled(world)
    (answer,) = await answers(world)

    assert outcome.text == "2"
    assert answer.blocks == (ThinkingBlock(text="hm, two"), TextBlock(text="2"))


@pytest.mark.parametrize(
    "arguments", ['{"what": "cu', "", "[1]", "null", '{"what": 1e999}', '{"what": "\ud800"}']
)
async def test_arguments_that_are_no_object_never_run(
    autojump_clock: MockClock, arguments: str
) -> None:
    """Cut or odd arguments give the model an error with the schema; an empty text means none."""
    call = ScriptedCall(name="safe", arguments=arguments)
    world = World(Step(calls=(call,), stop="length"), "I see")

    # C064
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        await verify(world, harness)
        (result,) = await results(harness)

    assert outcome.text == "I see"
    if not arguments:
        assert result.code is None
    else:
        assert result.code == "invalid_arguments"
        assert '"properties"' in text_of(result)
        assert world.ledger == []


async def test_names_that_are_no_names_stay_out_of_later_requests(
    autojump_clock: MockClock,
) -> None:
    """An empty, odd or endless tool name is answered, kept as it was, and sent as a valid one."""
    names = ["", "a b\n", "x" * 5000, "safe\0", "nächste"]
    world = World(Step(calls=tuple(ScriptedCall(name=name) for name in names)), "ok")

    # C065
    outcome = await settled(world)
    first, _ = await answers(world)

    assert outcome.text == "ok"
    assert [call.name for call in first.tool_calls][:3] == names[:3]
    sent = [m.message for m in world.model.requests[-1].messages]
    (answer,) = [m for m in sent if isinstance(m, AssistantMessage)]
    assert [c.name for c in answer.tool_calls][:3] == ["unnamed", "a_b_", "x" * 64]


async def test_the_same_call_twice_is_two_calls(autojump_clock: MockClock) -> None:
    """Calls are known by their place: two of one name and arguments have an effect each."""
    world = World(calls("safe", "safe", what="same"), calls("safe", what="same"), "ok")

    # C065
    outcome = await settled(world)

    assert outcome.text == "ok"
    assert len(set(world.ledger)) == len(world.ledger) == 3


async def test_hostile_text_is_stored_and_sent(autojump_clock: MockClock) -> None:
    """NUL and lone surrogates in an answer are marked, and the conversation goes on."""
    # C081, C082
    world = World(Step(text=("a\0b\ud800", "\ud83d", "\ude00"), thinking="\udfff"), "next")

    async with world.open() as harness:
        first = await ask(harness, "one")
        second = await ask(harness, "two", "r2")
        await verify(world, harness)

    assert first.text == "a\u2400b\ufffd\U0001f600"
    assert second.text == "next"


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ScriptedError(kind="auth", detail="Incorrect API key provided"), "model_error"),
        (ScriptedError(kind="other", detail="no such thing"), "model_error"),
        (ScriptedError(kind="overflow", detail="too long"), "context_overflow"),
    ],
)
async def test_an_error_that_no_retry_mends_ends_the_run(
    autojump_clock: MockClock, error: ScriptedError, reason: str
) -> None:
    """One request is made, and the input is unanswered with the reason and the provider's text."""
    world = World(Step(error=error))

    outcome = await settled(world)

    assert (outcome.status, outcome.reason) == ("unanswered", reason)
    assert error.detail in outcome.detail
    assert len(world.model.requests) == 1
    with pytest.raises(UnansweredError, match=error.detail):
        _ = outcome.text


async def test_hostile_error_text_is_stored(autojump_clock: MockClock) -> None:
    """A provider's error of any text and size ends the run, and faults nothing."""
    world = World(Step(error=ScriptedError(kind="other", detail="\0\ud800" + "x" * 100_000)))

    outcome = await settled(world)
    (failed,) = await answers(world)

    assert outcome.reason == "model_error"
    assert len(outcome.detail) <= 4096
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.startswith("\\0")


async def test_a_retryable_error_is_tried_five_times_more(autojump_clock: MockClock) -> None:
    """After six requests the run ends; follow-ups that waited are still there, in order."""
    world = World(Step(error=ScriptedError(detail="overloaded"), times=100, text="never"))

    # C029, C066
    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("one")
        second = await root.submit("two")
        with trio.fail_after(5000):
            outcome = await first.wait()
        queued = await second.status()
        inbox = root.inbox()

    assert outcome.reason == "model_error"
    assert "tried 6 times" in outcome.detail
    assert len(world.model.requests) == 6
    assert queued.status == "queued"
    assert [item["submission"] for item in inbox] == [second.id]


async def test_the_next_input_releases_what_is_queued(autojump_clock: MockClock) -> None:
    """Input queued behind a failed run is placed before the next one, in the same run."""
    key = ScriptedError(kind="auth", detail="key")
    world = World(Step(error=key, when=lambda view: view.user == "one"), "now")

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("one")
        second = await root.submit("two")
        await first.wait()
        third = await root.submit("three")
        outcomes = [await second.wait(), await third.wait()]
        users = [text_of(m) for m in messages(await root.history(), UserMessage)]

    assert [each.text for each in outcomes] == ["now", "now"]
    assert users == ["one", "two", "three"]


async def test_the_provider_s_wait_is_kept(autojump_clock: MockClock) -> None:
    """A request is not sent again before the time that its provider asked for."""
    world = World(Step(error=ScriptedError(retry_after=90.0), text="ok"))

    # C069
    began = trio.current_time()
    outcome = await settled(world)

    assert outcome.text == "ok"
    assert 90 <= trio.current_time() - began < 100


def test_tasks_that_are_told_to_wait_do_not_come_back_at_one_moment() -> None:
    """Each waits at least as long as the provider said, and at most a tenth longer, by its seed."""
    error = ModelError("retryable", "slow down", 30.0)

    # C069
    waits = [next_try(error, tries=0, settings=Settings(), seed=f"{n}")[0] for n in range(20)]

    assert all(wait is not None and 30 <= wait <= 33 for wait in waits)
    assert len(set(waits)) == 20
    assert max(waits) - min(waits) > 1  # type: ignore[type-var, operator]


@pytest.mark.parametrize(("after", "waits"), [(600.0, True), (600.1, False), (float("inf"), False)])
def test_a_wait_is_kept_up_to_the_maximum(after: float, waits: bool) -> None:
    """At the limit the run waits, spread out as ever; one above it ends the run."""
    error = ModelError("retryable", "slow down", after)

    # C069
    delay, _ = next_try(error, tries=0, settings=Settings(), seed="x")

    assert (delay is not None) == waits
    assert delay is None or delay >= 600


@pytest.mark.parametrize("after", [None, -5.0, float("nan"), 0.0])
def test_without_a_sensible_wait_the_delays_are_our_own(after: float | None) -> None:
    """A provider that says nothing, or nonsense, is asked again after growing delays."""
    error = ModelError("retryable", "slow down", after)

    # C069
    delays = [next_try(error, tries=n, settings=Settings(), seed="x")[0] for n in range(5)]

    assert all(delay is not None and 0.5 <= delay <= 60 for delay in delays)
    assert sum(delay or 0 for delay in delays) > 60
    assert delays[4] > delays[0] * 4  # type: ignore[operator]


async def test_an_abort_ends_the_wait(autojump_clock: MockClock) -> None:
    """A run that waits to ask again is aborted at once, and its input is settled."""
    world = World(Step(error=ScriptedError(retry_after=500.0), text="never"))

    # C069
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await trio.sleep(100)
        began = trio.current_time()
        await root.abort()
        outcome = await submission.wait()
        await harness.wait_for_idle()
        await verify(world, harness)

    assert outcome.reason == "aborted"
    assert trio.current_time() - began < 1
    assert len(world.model.requests) == 1


async def test_a_wait_above_the_maximum_ends_the_run(autojump_clock: MockClock) -> None:
    """Asked to wait longer than ten minutes, the run ends and says so."""
    world = World(Step(error=ScriptedError(retry_after=601.0), text="ok"))

    outcome = await settled(world)

    assert outcome.reason == "model_error"
    assert "asked to wait 601 s, more than the 600 s allowed" in outcome.detail
    assert len(world.model.requests) == 1


async def test_the_wait_survives_a_restart(autojump_clock: MockClock) -> None:
    """Closed in the middle of the wait, the next try comes at the moment that was fixed before."""
    world = World(Step(error=ScriptedError(retry_after=100.0), text="ok"))

    # C069, C094
    began = trio.current_time()
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        await trio.sleep(60)
        live = root.live()
        assert (await submission.status()).status == "placed"
    async with world.open() as harness:
        outcome = await ask(harness, "go")

    assert live["retry"]["try_number"] == 1
    assert outcome.text == "ok"
    assert 100 <= trio.current_time() - began < 110


@pytest.mark.parametrize(
    "step",
    [
        Step(text="half of it", cut=Cut(after=1), times=100),
        Step(text="half of it", cut=Cut(after=1, raises=True), times=100),
        Step(text="half of it", stall=Stall(after=1), times=100),
        Step(thinking="only thoughts"),
        Step(text=" \n"),
    ],
    ids=["cut", "broken", "silent", "thinking", "blank"],
)
async def test_what_is_no_answer_is_never_taken_for_one(
    autojump_clock: MockClock, step: Step
) -> None:
    """A cut, silent or empty answer is asked for again, a few times, and then is an error."""
    world = World(step, settings=Settings(request_tries=2))

    # C066, C067, C068
    outcome = await settled(world)

    assert (outcome.status, outcome.reason) == ("unanswered", "model_error")
    assert len(world.model.requests) == 3
    assert all(each.status == "failed" for each in await answers(world))


async def test_what_was_shown_before_a_failure_is_kept_and_charged(
    autojump_clock: MockClock,
) -> None:
    """The text of a cut answer stays, apart from answers, and costs what it is estimated at."""
    world = World(Step(text=("half ", "of it"), cut=Cut(after=2)), "whole")

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        usage = (await harness.root()).usage()["models"][MODEL]
    failed, complete = await answers(world)

    assert outcome.text == "half of it"
    assert (failed.status, failed.text) == ("failed", "half of it")
    assert failed.usage.output_tokens == 3
    assert failed.usage.input_tokens > 0
    assert complete.status == "complete"
    assert usage["requests"] == 2
    assert usage["output_tokens"] == 3 + complete.usage.output_tokens


async def test_an_estimated_attempt_is_priced(autojump_clock: MockClock) -> None:
    """A failed attempt costs money too, at the prices of its model."""
    world = World(Step(text="1234" * 250_000, piece_chars=1000, cut=Cut(after=1000)))
    prices = ModelInfo(prices=Prices(input=0.0, output=2.0))
    models = world.model.models(catalogue={MODEL: prices})

    async with open_harness(
        world.base.reopen(), models=models, clock=world.clock, blocking=InlineBlocking()
    ) as harness:
        root = await harness.root(agent=AgentChange(model=MODEL))
        submission = await root.submit("go")
        with trio.move_on_after(3):
            await submission.wait()
        cost = (await harness.usage())[MODEL].cost

    # Half a dollar for the attempt that was cut, and as much for the answer.
    assert cost == pytest.approx(1.0, abs=1e-4)


async def test_without_a_model_the_input_is_unanswered(autojump_clock: MockClock) -> None:
    """No model chosen, an unknown one, or a host without models: `no_model`, and usable after."""
    world = World("ok")

    async with world.open(agent=AgentChange(instructions="x")) as harness:
        root = await harness.root()
        none = await ask(harness, "a", "r1")
        await root.configure(AgentChange(model="scripted/modle"))
        unknown = await ask(harness, "b", "r2")
        await root.configure(AgentChange(model=MODEL))
        found = await ask(harness, "c", "r3")
    async with open_harness(
        world.base.reopen(), clock=world.clock, blocking=InlineBlocking()
    ) as harness:
        without = await ask(harness, "d", "r4")

    assert [each.reason for each in (none, unknown, without)] == ["no_model"] * 3
    assert "scripted/model" in unknown.detail
    assert found.text == "ok"


async def test_a_host_without_models_ends_what_was_asked(autojump_clock: MockClock) -> None:
    """Killed in mid-stream and reopened without models, the run ends instead of waiting."""
    world = World(Step(text=tuple("abcdef"), delay=1.0))

    async with world.open() as harness:
        root = await harness.root()
        await root.submit("go", request_id="r1")
        await trio.sleep(3.5)
    async with open_harness(
        world.base.reopen(), clock=world.clock, blocking=InlineBlocking()
    ) as harness:
        outcome = await ask(harness, "go")
        live = (await harness.root()).live()

    assert (outcome.status, outcome.reason) == ("unanswered", "no_model")
    assert (live["run"], live["partial"]) == (None, None)
    (kept,) = await answers(world)
    assert kept.status == "aborted"
    assert "abcdef".startswith(kept.text)


async def test_a_run_ends_at_its_most_turns(autojump_clock: MockClock) -> None:
    """A model that never stops calling is stopped after `turns_max` turns."""
    world = World(calls("safe"), repeat_last=True)

    outcome = await settled(world, agent=AgentChange(model=MODEL, turns_max=3))

    assert (outcome.status, outcome.reason) == ("unanswered", "turn_limit")
    assert "3 turns" in outcome.detail
    assert len(world.model.requests) == 3
    assert len(world.ledger) == 3


async def test_an_answer_without_end_is_cut_off(autojump_clock: MockClock) -> None:
    """A model that streams more than a value may hold ends the run, not the process's memory."""
    step = Step(text="x" * 50_000, piece_chars=100)
    world = World(step, settings=Settings(value_bytes_max=20_000))

    outcome = await settled(world)

    assert outcome.reason == "model_error"
    assert "more than 20000 characters" in outcome.detail


async def test_an_answer_that_cannot_be_stored_ends_the_run(autojump_clock: MockClock) -> None:
    """Within the limit of characters, but not of bytes: the model's fault, and not the store's."""
    world = World(Step(text="\x01" * 10_000), settings=Settings(value_bytes_max=20_000))

    outcome = await settled(world)

    assert outcome.reason == "model_error"
    assert "cannot be stored" in outcome.detail


@pytest.mark.parametrize("counted", [True, False])
async def test_an_answer_that_cannot_be_stored_costs_what_the_provider_counted(
    autojump_clock: MockClock, counted: bool
) -> None:
    """The count is there, whatever became of the answer; without one it is estimated."""
    usage = Usage(requests=1, input_tokens=7_001 * counted, output_tokens=902 * counted)
    step = Step(text="\x01" * 10_000, usage=usage)
    world = World(step, settings=Settings(value_bytes_max=20_000))

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        charged = (await harness.usage())[MODEL]
        await verify(world, harness)

    assert outcome.reason == "model_error"
    assert (charged == usage) is counted
    assert charged.requests == 1
    assert charged.output_tokens == 902 if counted else charged.output_tokens > 2_000


async def test_more_calls_than_can_be_shown_are_the_models_fault(autojump_clock: MockClock) -> None:
    """An answer with so many calls that `pi.live` cannot hold them ends the run, and says why."""
    world = World(calls(*["once"] * 100), settings=Settings(document_bytes_max=8_192))

    outcome = await settled(world)

    assert outcome.reason == "model_error"
    assert "pi.live" in outcome.detail
    assert world.ledger == []


async def test_an_aborted_run_does_not_say_that_a_faulted_call_never_started(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that faulted may have had its effect; the model is told so, also after an abort."""
    store = ToolTask._store

    async def faulty(self: ToolTask, ctx: Any, final: Any) -> None:
        if ctx.input.name == "once":
            raise RuntimeError("a bug of ours")
        await store(self, ctx, final)

    monkeypatch.setattr(ToolTask, "_store", faulty)
    world = World(calls("once", "slow"))
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        await trio.sleep(1)
        await root.abort()
        await submission.wait()
        found = {result.name: result for result in await results(harness)}
        await verify(world, harness)

    assert any(line.startswith("once") for line in world.ledger)
    assert found["once"].code == "interrupted"
    assert "Whether its effect happened is unknown" in text_of(found["once"])
    assert found["slow"].code == "aborted"


class Misbehaving:
    """A provider that raises whatever it is given."""

    name = "odd"

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def stream(self, request: Any) -> Any:
        return self

    async def __aenter__(self) -> Any:
        if isinstance(self._error, NotFoundError | ModelError):
            raise self._error
        return self._events()

    async def __aexit__(self, *_: Any) -> None:
        return None

    async def _events(self) -> Any:
        yield TextDelta("so far")
        if self._error is not None:
            raise self._error
        yield Done(
            AssistantMessage(
                blocks=(ToolCallBlock(name="x", arguments={"a": float("nan")}),),
                status="complete",
                stop_reason="stop",
                model="other",
                usage=Usage(input_tokens=-5, cost=float("nan")),
                at_us=0,
            )
        )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("a bug in the provider"), "model_error"),
        (ExceptionGroup("several", [ValueError("one")]), "model_error"),
        (NotFoundError("model", "odd/model"), "no_model"),
        (None, "turn_limit"),
    ],
    ids=["bug", "group", "gone", "nan"],
)
async def test_a_provider_that_misbehaves_ends_its_run_alone(
    autojump_clock: MockClock, error: BaseException | None, reason: str
) -> None:
    """Whatever a provider raises or answers, the input is unanswered and the session goes on."""
    world = World()

    # C084
    async with open_harness(
        world.base,
        models=Models([Misbehaving(error)]),
        clock=world.clock,
        blocking=InlineBlocking(),
    ) as harness:
        root = await harness.root(agent=AgentChange(model="odd/model", turns_max=2))
        outcome = await (await root.submit("go")).wait()
        check_transcript(await root.history())
        usage = await harness.usage()

    assert (outcome.status, outcome.reason) == ("unanswered", reason)
    assert all(each.input_tokens >= 0 for each in usage.values())


# --- ends that the scheduler decides ------------------------------------------------------------


async def test_a_faulted_generation_leaves_the_conversation_usable(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the loop itself ends the input as faulted, with its text; the next is answered."""
    import pidurable.agent._generation as generation

    world = World("fine")
    real = generation.build_request

    def broken(*_: Any, **__: Any) -> Any:
        raise LookupError("a bug\ud800")

    async with world.open() as harness:
        monkeypatch.setattr(generation, "build_request", broken)
        first = await ask(harness, "one", "r1")
        monkeypatch.setattr(generation, "build_request", real)
        second = await ask(harness, "two", "r2")
        await verify(world, harness)

    assert (first.status, first.reason) == ("unanswered", "faulted")
    assert "LookupError: a bug" in first.detail
    assert second.text == "fine"


async def test_an_abort_before_anything_ran_settles_the_input(autojump_clock: MockClock) -> None:
    """A run that is aborted before its generation was ever started is settled all the same."""
    world = World("never")

    async with world.open() as harness:
        root = await harness.root()
        submission = None

        def body(tx: TreeTransaction) -> int:
            from pidurable.agent._inbox import submit

            id = submit(harness.session, tx, root.id, "go", when_busy="follow_up", request_id="r1")
            for node in list(tx.view.staged_children(root.id)):
                tx.mark(node.id, "changed my mind")
            return id

        submission = await harness._runtime.commit(body)
        harness.start()
        await harness.wait_for_idle()
        record = harness.session.submission(submission)
        await verify(world, harness)

    assert record is not None
    assert (record.status, record.reason) == ("unanswered", "aborted")
    assert record.detail == "changed my mind"
    assert world.model.requests == []


async def test_a_reset_in_the_middle_ends_the_run(autojump_clock: MockClock) -> None:
    """A host's entry that takes the input out of the context ends its run, with the reason."""
    world = World(calls("slow"), "never")

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        async with harness.commit() as tx:
            tx.append(root.id, kind="host.reset", head=0)
        (call,) = [task for task in harness.tasks() if task.kind == "pi.tool"]
        await harness.abort_task(call.id)
        outcome = await submission.wait()

    assert (outcome.status, outcome.reason) == ("unanswered", "reset")


async def test_a_request_that_is_resumed_is_the_one_that_was_fixed(
    autojump_clock: MockClock,
) -> None:
    """A head that a host appends before the restart is for the next request, not for this one."""
    world = World("earlier", Step(text=tuple("abcdef"), delay=1.0), "later")

    async with world.open() as harness:
        await ask(harness, "first", "r1")
        root = await harness.root()
        await root.submit("go", request_id="r2")
        await trio.sleep(3.5)
    fixed = world.model.requests[-1]
    async with world.open() as harness:
        root = await harness.root()
        async with harness.commit() as tx:
            tx.append(root.id, kind="host.reset", head=0)
        resumed = await ask(harness, "go", "r2")
        again = world.model.requests[-1]
        await ask(harness, "after", "r3")
        later = world.model.requests[-1]
        await verify(world, harness)

    assert resumed.text == "abcdef"
    assert [text_of(item.message) for item in fixed.messages] == ["first", "earlier", "go"]
    assert again == fixed
    # What the model has been told before the reset it is told again.
    assert later.system == fixed.system
    assert [text_of(item.message) for item in later.messages][-1] == "after"
    assert "go" not in [text_of(item.message) for item in later.messages]


async def test_what_an_edit_has_left_out_of_the_prompt_is_told_again(
    autojump_clock: MockClock,
) -> None:
    """The prompt is what the context says, so that an edited one is made complete."""
    world = World("one", "two")

    async with world.open() as harness:
        root = await harness.root(agent=None)
        await root.configure(AgentChange(instructions="be brief"))
        await ask(harness, "go", "r1")
        (told,) = [e for e in await root.history() if e.kind == "pi.system"]
        async with harness.commit() as tx:
            tx.append(root.id, kind="host.edit", edits=[Edit(target=told.id)])
        await ask(harness, "more", "r2")
        (first, second) = world.model.requests
        await verify(world, harness)

    assert "be brief" in first.system
    assert first.tools == second.tools
    assert "be brief" in second.system + "".join(
        text
        for item in second.messages
        if isinstance(item.message, SystemMessage)
        for text in item.message.sections.values()
        if text
    )


# --- what the model is told ---------------------------------------------------------------------


async def test_a_section_that_raises_keeps_what_was_told(autojump_clock: MockClock) -> None:
    """A broken section is reported; the model keeps its last text, and the run goes on."""
    world = World("one", "two", "three")
    texts: list[Any] = ["first\0", RuntimeError("broken"), "second"]

    def render(_: Any) -> str:
        text = texts.pop(0)
        if isinstance(text, Exception):
            raise text
        return str(text)

    world.install(sections=[section("weather", render)])
    async with world.open() as harness:
        for number in range(3):
            outcome = await ask(harness, "go", f"r{number}")
            assert outcome.status == "done"
        root = await harness.root()
        told = messages(await root.history(), SystemMessage)

    assert [message.sections.get("weather") for message in told] == [
        "<weather>\nfirst\u2400\n</weather>",
        "<weather>\nsecond\n</weather>",
    ]


async def test_a_change_of_tools_is_told_once(autojump_clock: MockClock) -> None:
    """A run sees what is configured at its prepare; what did not change is not said again."""
    world = World("one", "two", "three")

    async with world.open() as harness:
        root = await harness.root()
        await ask(harness, "a", "r1")
        await ask(harness, "b", "r2")
        await root.configure(AgentChange(tools=["safe"]))
        await ask(harness, "c", "r3")
        told = messages(await root.history(), SystemMessage)
        record = await status_of(harness, "r3")

    assert [len(request.tools) for request in world.model.requests] == [4, 4, 1]
    assert [len(message.tools_removed) for message in told] == [0, 3]
    assert record.status == "done"
