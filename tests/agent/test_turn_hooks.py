"""The hooks of a generation, in real turns: what they change, and what they cannot break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
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
    run_killed,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable.agent._generation import Generation
from pidurable.agent._hooks import (
    AfterResponse,
    AfterTools,
    BeforeRequest,
    Continue,
    OnYield,
    Stop,
)
from pidurable.agent._models import Done, ModelRequest, RequestMessage, StreamEvent
from pidurable.agent._script import Step
from pidurable.agent._services import AgentChange
from pidurable.harness._open import Harness
from pidurable.records._messages import (
    AssistantMessage,
    ImageBlock,
    Message,
    TextBlock,
    ToolResultMessage,
    UserMessage,
)
from pidurable.registry import Extension, hook


def hooked(world: World, **handlers: Any) -> World:
    """The world, with an extension that has these hooks."""
    world.registry.install(Extension("hooked", hooks=[hook(Generation, **handlers)]))
    return world


def said(text: str) -> RequestMessage:
    """A message of a user that stands in no entry."""
    return RequestMessage(message=UserMessage(blocks=(TextBlock(text=text),), at_us=0))


def sent(world: World, number: int = -1) -> list[str]:
    """The texts of the messages of a request."""
    return [text_of(item.message) for item in world.model.requests[number].messages]


async def texts(harness: Harness, kind: type[Message]) -> list[str]:
    """The texts of the root's messages of a class."""
    root = await harness.root()
    return [text_of(message) for message in messages(await root.history(limit=1000), kind)]


# --- before_request -----------------------------------------------------------------------------


async def test_before_request_replaces_the_messages_of_one_request(
    autojump_clock: MockClock,
) -> None:
    """What is sent is what the hook answered; nothing of it is stored, nor sent the next time."""

    async def once(request: BeforeRequest) -> Any:
        if request.turn == 1 and len(request.messages) == 1:
            return [said("be brief"), *request.messages, said("please")]
        return None

    world = hooked(World("one", "two"), before_request=once)
    async with world.open() as harness:
        await ask(harness, "a", "r1")
        await ask(harness, "b", "r2")
        stored = await texts(harness, UserMessage)
        await verify(world, harness)

    assert sent(world, 0) == ["be brief", "a", "please"]
    assert sent(world, 1) == ["a", "one", "b"]
    assert stored == ["a", "b"]


async def test_before_request_sees_the_results_of_a_round_and_may_shorten_them(
    autojump_clock: MockClock,
) -> None:
    """A result may be replaced by another one of the same call, and the exchange stays valid."""

    def shorten(request: BeforeRequest) -> Any:
        return [
            attrs.evolve(
                item, message=attrs.evolve(item.message, blocks=(TextBlock(text="short"),))
            )
            if isinstance(item.message, ToolResultMessage)
            else item
            for item in request.messages
        ]

    world = hooked(World(calls("safe", "once"), "done"), before_request=shorten)
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        stored = await texts(harness, ToolResultMessage)
        await verify(world, harness)

    assert outcome.text == "done"
    assert sent(world)[-2:] == ["short", "short"]
    assert sorted(stored) == ["did x", "saw x"]


async def test_what_a_hook_does_to_its_copy_is_not_sent(autojump_clock: MockClock) -> None:
    """A handler that changes the JSON it was given, and answers nothing, has changed nothing."""

    def spoil(request: BeforeRequest) -> None:
        for item in request.messages:
            if isinstance(item.message, AssistantMessage):
                item.message.tool_calls[0].arguments["what"] = "spoilt"
        for tool in request.tools:
            tool.schema.clear()

    world = hooked(World(calls("safe", what="it"), "done"), before_request=spoil)
    async with world.open() as harness:
        await ask(harness, "go")
        await verify(world, harness)

    (answer,) = [
        item.message
        for item in world.model.requests[-1].messages
        if isinstance(item.message, AssistantMessage)
    ]
    assert answer.tool_calls[0].arguments == {"what": "it"}
    assert all(tool.schema for tool in world.model.requests[-1].tools)


async def test_a_stop_ends_the_run_before_anything_is_sent(autojump_clock: MockClock) -> None:
    """The input is unanswered, `stopped`, with the reason; what is queued stays, and is visible."""

    def stop(request: BeforeRequest) -> Any:
        return Stop("the budget is used up") if request.turn == 2 else None

    world = hooked(World(calls("slow"), "never"), before_request=stop)
    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        second = await root.submit("later")
        (call,) = [task for task in harness.tasks() if task.kind == "pi.tool"]
        await harness.abort_task(call.id)
        outcome = await first.wait()
        queued = await second.status()
        await verify(world, harness)

    assert (outcome.status, outcome.reason) == ("unanswered", "stopped")
    assert outcome.detail == "the budget is used up"
    assert queued.status == "queued"
    assert len(world.model.requests) == 1


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda items: [], "no message of a user"),
        (lambda items: [said(" \n"), *items], "empty or blank"),
        (lambda items: items[:-1], "has no result"),
        (lambda items: [*items, items[-1]], "has no call before it"),
        (lambda items: [RequestMessage(message="hello")], "is RequestMessage"),  # type: ignore[arg-type]
        (
            lambda items: [
                RequestMessage(message=UserMessage(blocks=None, at_us=0))  # type: ignore[arg-type]
            ],
            "cannot be sent",
        ),
    ],
    ids=["nothing", "blank", "unanswered", "doubled", "text", "none"],
)
async def test_a_request_of_hooks_that_no_provider_accepts_is_not_sent(
    autojump_clock: MockClock, spoil: Any, problem: str
) -> None:
    """The run ends as stopped, and says what is wrong; the conversation is usable afterwards."""
    spoilt = True

    def change(request: BeforeRequest) -> Any:
        return spoil(list(request.messages)) if spoilt and request.turn == 2 else None

    world = hooked(World(calls("safe"), "done"), before_request=change)
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        refused = len(world.model.requests)
        spoilt = False
        later = await ask(harness, "again", "r2")
        await verify(world, harness)

    assert (outcome.reason, refused) == ("stopped", 1)
    assert problem in outcome.detail
    assert later.text == "done"


RAISED = pytest.mark.parametrize(
    ("error", "reported"),
    [
        (LookupError("a bug"), "LookupError: a bug"),
        (asyncio.CancelledError("a bug"), "CancelledError: a bug"),
    ],
    ids=["exception", "below BaseException alone"],
)


@RAISED
async def test_a_before_request_hook_that_raises_is_skipped(
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    reported: str,
) -> None:
    """The request goes out without it, and a report names the extension."""

    def broken(request: BeforeRequest) -> Any:
        raise error

    world = hooked(World("fine"), before_request=broken)
    async with world.open() as harness:
        outcome = await ask(harness, "go")

    assert outcome.text == "fine"
    assert "'hooked'" in caplog.text
    assert reported in caplog.text


async def test_a_request_that_is_sent_again_after_a_kill_asks_the_hooks_again(
    autojump_clock: MockClock,
) -> None:
    """Nothing of the first asking is stored: the second one decides what is sent."""
    asked: list[int] = []

    def count(request: BeforeRequest) -> Any:
        asked.append(request.task)
        return [*request.messages, said(f"time {len(asked)}")]

    world = hooked(World(Step(text=("a", "b"), delay=1.0)), before_request=count)
    point = DieAt(world, "CP7")

    async def program(harness: Harness, _: World) -> None:
        await ask(harness, "go")

    await run_killed(world, point, program)
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert point.struck
    assert outcome.text == "ab"
    assert len(set(asked)) == 1
    assert [sent(world, 0)[-1], sent(world, 1)[-1]] == ["time 1", "time 2"]


# --- observers ----------------------------------------------------------------------------------


async def test_a_hook_that_changes_an_answer_by_hand_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    """What a hook gets is a copy: what is stored, and runs, is what the model said."""

    def change(asked: AfterResponse | OnYield) -> None:
        for block in asked.answer.blocks:
            block.opaque["kept"] = False
        for call in asked.answer.tool_calls:
            call.arguments["what"] = "changed"

    world = hooked(World(calls("safe", what="a"), "ok"), after_response=change, on_yield=change)
    stream = world.model.stream

    @asynccontextmanager
    async def with_opaque(request: ModelRequest) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        async def events(given: AsyncIterator[StreamEvent]) -> AsyncIterator[StreamEvent]:
            async for event in given:
                if isinstance(event, Done):
                    said = event.message
                    blocks = [attrs.evolve(each, opaque={"kept": True}) for each in said.blocks]
                    yield Done(attrs.evolve(said, blocks=tuple(blocks)))
                else:
                    yield event

        async with stream(request) as given:
            yield events(given)

    world.model.stream = with_opaque  # type: ignore[method-assign]
    async with world.open() as harness:
        await ask(harness, "go")
        root = await harness.root()
        first, last = messages(await root.history(), AssistantMessage)
        (result,) = messages(await root.history(), ToolResultMessage)
        await verify(world, harness)

    assert first.tool_calls[0].arguments == {"what": "a"}
    assert text_of(result) == "saw a"
    assert [block.opaque for each in (first, last) for block in each.blocks] == [{"kept": True}] * 2


async def test_observers_stage_in_the_commit_that_decides(autojump_clock: MockClock) -> None:
    """What after_response and after_tools return is stored with the answer, and with the round."""
    rounds: list[AfterTools] = []

    def note(answer: AfterResponse) -> Any:
        def stage(tx: Any) -> None:
            tx.append(answer.conversation_id, {"said": answer.answer.text}, kind="host.note")

        return stage

    async def count(round: AfterTools) -> Any:
        rounds.append(round)
        await trio.sleep(1)

        def stage(tx: Any) -> None:
            data = {"codes": [result.code for result in round.results]}
            tx.append(round.conversation_id, data, kind="host.round")

        return stage

    world = hooked(
        World(calls("safe", "nope", "once", text="look"), "done"),
        after_response=note,
        after_tools=count,
    )
    async with world.open() as harness:
        await ask(harness, "go")
        root = await harness.root()
        entries = await root.history()
        await verify(world, harness)

    by_kind = {kind: [e for e in entries if e.kind == kind] for kind in ("host.note", "host.round")}
    assistants = [e for e in entries if e.kind == "pi.assistant"]
    assert [e.data for e in by_kind["host.note"]] == [{"said": "look"}, {"said": "done"}]
    assert [e.seq for e in by_kind["host.note"]] == [e.seq for e in assistants]
    assert [e.data for e in by_kind["host.round"]] == [{"codes": [None, "tool_unavailable", None]}]
    (round,) = rounds
    assert round.assistant == assistants[0].id
    assert text_of(round.results[0]) == "saw x"
    assert (round.turn, round.run) == (1, round.task)


async def test_after_tools_sees_calls_that_ended_without_a_result(
    autojump_clock: MockClock,
) -> None:
    """A call that was aborted before it ran has the result that the model will be shown."""
    rounds: list[AfterTools] = []

    def look(round: AfterTools) -> None:
        rounds.append(round)

    world = hooked(World(calls("slow", "once"), "done"), after_tools=look)
    world.settings = attrs.evolve(world.settings, limits={"pi.tool": 1})
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        for task in [task for task in harness.tasks() if task.kind == "pi.tool"][::-1]:
            await harness.abort_task(task.id)
        await submission.wait()
        stored = messages(await root.history(), ToolResultMessage)
        await verify(world, harness)

    (round,) = rounds
    assert [result.code for result in round.results] == ["aborted", "aborted"]
    assert [text_of(r) for r in round.results] == [
        text_of(r) for r in sorted(stored, key=lambda r: r.call)
    ]


@RAISED
async def test_an_observer_that_fails_takes_no_answer_with_it(
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    reported: str,
) -> None:
    """What it staged is left out, that is reported, and the answer is stored once."""

    def observe(answer: AfterResponse) -> Any:
        def stage(tx: Any) -> None:
            tx.append(answer.conversation_id, {"x": 1}, kind="host.note")
            raise error

        return stage

    world = hooked(World("fine"), after_response=observe)
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        kinds = [e.kind for e in await (await harness.root()).history()]
        await verify(world, harness)

    assert outcome.text == "fine"
    assert kinds.count("pi.assistant") == 1
    assert "host.note" not in kinds
    assert reported in caplog.text


async def test_an_async_function_for_the_commit_is_reported(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It would stage nothing, so its author is told; the answer is stored."""

    def observe(answer: AfterResponse) -> Any:
        async def stage(tx: Any) -> None:
            tx.append(answer.conversation_id, {"x": 1}, kind="host.note")

        return stage

    world = hooked(World("fine"), after_response=observe)
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "fine"
    assert "an async function stages nothing" in caplog.text


# --- on_yield -----------------------------------------------------------------------------------


async def test_on_yield_continues_the_run_with_another_message(autojump_clock: MockClock) -> None:
    """The message is in the transcript, the run stays the same, and its last answer counts."""

    async def once_more(answer: OnYield) -> Any:
        number = await answer.memo("asked", answer.turn)
        return "Are you sure?" if number == 1 else None

    world = hooked(World("no", "yes"), on_yield=once_more)
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        steered = await root.submit("quickly", when_busy="steer")
        outcome, other = await submission.wait(), await steered.wait()
        stored = await texts(harness, UserMessage)
        await verify(world, harness)

    assert (outcome.status, outcome.text) == ("done", "yes")
    assert stored == ["go", "Are you sure?", "quickly"]
    assert other.run == outcome.run
    assert sent(world, 1) == ["go", "no", "Are you sure?", "quickly"]


async def test_a_run_that_is_continued_for_ever_ends_at_its_most_turns(
    autojump_clock: MockClock,
) -> None:
    """A hook that never lets a run end is stopped by `turns_max`."""
    world = hooked(World("more", repeat_last=True), on_yield=lambda answer: Continue("and?"))

    async with world.open(agent=AgentChange(model=MODEL, turns_max=4)) as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.reason == "turn_limit"
    assert len(world.model.requests) == 4


@pytest.mark.parametrize(
    "content",
    ["", " \n", 7, ["text"], "\ud800", "x" * 20_000, [ImageBlock(blob="1", media_type="")]],
)
async def test_a_continuation_that_is_no_input_ends_the_run_as_usual(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, content: Any
) -> None:
    """What nobody could hand in continues nothing: the answer stands, and a report says why."""
    world = hooked(World("fine"), on_yield=lambda answer: Continue(content))
    world.settings = attrs.evolve(world.settings, value_bytes_max=30_000)

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert (outcome.status, outcome.text) == ("done", "fine")
    assert "no input" in caplog.text


async def test_a_continuation_may_show_an_image_that_is_not_stored(
    autojump_clock: MockClock,
) -> None:
    """An image whose bytes nobody stored becomes a note, and the run goes on."""
    image = ImageBlock(blob="0" * 64, media_type="image/png")
    world = hooked(
        World("no", "yes"),
        on_yield=lambda answer: (
            Continue([TextBlock(text="look"), image]) if answer.turn == 1 else None
        ),
    )

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "yes"
    assert "whose bytes were not stored" in sent(world)[-1]


async def test_hooks_of_extensions_that_are_not_selected_are_not_asked(
    autojump_clock: MockClock,
) -> None:
    """A conversation's choice of extensions counts for hooks too."""
    world = hooked(World("fine"), before_request=lambda request: Stop("no"))

    async with world.open(agent=AgentChange(model=MODEL, extensions=["world"])) as harness:
        outcome = await ask(harness, "go")

    assert outcome.text == "fine"


# --- kills --------------------------------------------------------------------------------------


async def test_hooks_decide_once_however_often_the_process_dies(autojump_clock: MockClock) -> None:
    """Killed at any commit, each answer and round is noted once, and the run goes on once."""

    def noted(kind: str) -> Any:
        def observe(seen: Any) -> Any:
            return lambda tx: tx.append(seen.conversation_id, {"turn": seen.turn}, kind=kind)

        return observe

    def make() -> World:
        return hooked(
            World(calls("safe"), "no", "yes"),
            after_response=noted("host.answer"),
            after_tools=noted("host.round"),
            on_yield=lambda answer: "Are you sure?" if answer.turn == 2 else None,
        )

    async def program(harness: Harness, world: World) -> Any:
        outcome = await ask(harness, "go")
        entries = await (await harness.root()).history(limit=1000)
        return outcome, [(e.kind, e.data) for e in entries], await texts(harness, UserMessage)

    def check(world: World, result: Any) -> None:
        outcome, entries, users = result
        assert outcome.text == "yes"
        assert [data for kind, data in entries if kind == "host.answer"] == [
            {"turn": turn} for turn in (1, 2, 3)
        ]
        assert [data for kind, data in entries if kind == "host.round"] == [{"turn": 1}]
        assert users == ["go", "Are you sure?"]

    kills = await crash_everywhere(make, program, check)

    assert kills > 10


@pytest.mark.parametrize("name", ["after_response", "after_tools"])
async def test_an_observer_decides_nothing_about_the_run(
    autojump_clock: MockClock, name: str
) -> None:
    """One that would end the generation in the deciding commit is left out, and the run goes on."""

    async def observe(_: Any) -> Any:
        return lambda tx: tx.fail("I know better")

    world = hooked(World(calls("safe"), "ok"), **{name: observe})
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        await verify(world, harness)
        ends = {task.outcome.status for task in harness.tasks() if task.outcome is not None}
    assert (outcome.text, ends) == ("ok", {"completed"})
