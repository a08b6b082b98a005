"""Each limit at its value and one above, through what a host can reach.

Limits of batches, documents, ownership, slots and leases are tested beside the code that keeps
them; the rest are here.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio

from pidurable import (
    AgentChange,
    Extension,
    Harness,
    Registry,
    Settings,
    Task,
    TaskContext,
    TextBlock,
    ToolCall,
    UserMessage,
    nothing_to_undo,
    open_harness,
    phase,
    tool,
)
from pidurable.errors import (
    CommitBodyTimeoutError,
    ConversationFullError,
    InvalidArgumentError,
    MemoTooLargeError,
    NotJsonError,
    SignalRefusedError,
    TooManyMemosError,
    UnansweredError,
)
from pidurable.records._limits import (
    ERROR_MESSAGE_BYTES_MAX,
    MEMO_BYTES_MAX,
    MEMOS_MAX,
    OUTPUT_BYTES_MAX,
    OUTPUT_LINES_MAX,
    SIGNAL_BYTES_MAX,
    SIGNALS_UNREAD_MAX,
    TRACEBACK_BYTES_MAX,
    VALUE_DEPTH_MAX,
)
from pidurable.testing import (
    InlineBlocking,
    ScriptedCall,
    ScriptedError,
    ScriptedModel,
    Step,
    TrioClock,
)

Act = Callable[[TaskContext[str, Any, Any]], Any]


@attrs.frozen
class Only:
    """The single step."""


class Probe(Task[str, Only, str]):
    """Does what the test gives it, once."""

    name = "limits.probe"
    abort = nothing_to_undo

    def __init__(self, act: Act) -> None:
        self.act = act

    def initial(self, input: str) -> Only:
        return Only()

    @phase
    async def only(self, at: Only, ctx: TaskContext[str, Only, str]) -> None:
        await ctx.complete(str(await self.act(ctx)))


async def park(ctx: TaskContext[str, Any, Any]) -> None:
    await trio.sleep_forever()


def virtual_time() -> dict[str, Any]:
    """The wall clock follows trio's, and no thread runs while it jumps."""
    return {"clock": TrioClock(), "blocking": InlineBlocking()}


def registry_of(act: Act = park, *tools: Any) -> Registry:
    registry = Registry()
    registry.install(Extension("limits", tasks=[Probe(act)], tools=tools))
    return registry


async def outcome_of(act: Act, **options: Any) -> Any:
    """Run one probe to its end."""
    async with open_harness(":memory:", registry=registry_of(act), **options) as harness:
        root = await harness.root()
        return await harness.wait_for_task(await root.create_task(Probe, ""))


async def append(harness: Harness, value: object) -> None:
    root = await harness.root()
    async with harness.commit() as tx:
        tx.append(root.id, value, kind="limits.value")


async def test_a_value_is_refused_one_byte_above_its_limit() -> None:
    """value_bytes_max counts the encoded bytes: two quotes and the characters as UTF-8."""
    async with open_harness(":memory:", settings=Settings(value_bytes_max=1000)) as harness:
        await append(harness, "é" * 499)
        with pytest.raises(NotJsonError, match="1000"):
            await append(harness, "é" * 499 + "x")
        assert len(await (await harness.root()).history()) == 1


@pytest.mark.parametrize("door", ["entry", "message", "submission", "write", "input", "result"])
async def test_whoever_stores_too_much_is_told_the_setting(door: str) -> None:
    """Wherever a value comes in, the message names value_bytes_max and the way around it."""
    said = r"at most 1000 bytes are allowed \(value_bytes_max; store it in parts or as blobs\)"
    large = "x" * 2000

    async def too_much(ctx: TaskContext[str, Any, Any]) -> str:
        return large

    registry = registry_of(too_much)
    settings = Settings(value_bytes_max=1000)
    async with open_harness(":memory:", registry=registry, settings=settings) as harness:
        root = await harness.root()
        if door == "result":
            outcome = await harness.wait_for_task(await root.create_task(Probe, ""))
            assert outcome.error is not None
            assert re.search(said, outcome.error.message)
            return
        with pytest.raises(NotJsonError, match=said):
            await store(harness, door, large)


async def store(harness: Harness, door: str, text: str) -> None:
    """Store a text the one way or the other."""
    root = await harness.root()
    if door == "entry":
        await append(harness, text)
    elif door == "message":
        message = UserMessage(blocks=(TextBlock(text=text),), at_us=1)
        async with harness.commit() as tx:
            tx.append(root.id, None, kind="limits.value", messages=[message])
    elif door == "submission":
        await root.submit(text)
    elif door == "write":
        await root.write(text, kind="limits.value")
    else:
        await root.create_task(Probe, text)


async def test_a_value_is_refused_one_level_above_the_limit() -> None:
    """VALUE_DEPTH_MAX levels of lists are stored, one more is refused."""
    value: list[Any] = []
    for _ in range(VALUE_DEPTH_MAX - 1):
        value = [value]
    async with open_harness(":memory:") as harness:
        await append(harness, value)
        with pytest.raises(NotJsonError, match="nested more than 200 levels") as refused:
            await append(harness, [value])
    assert refused.value.path == "$<limits.value>" + "[0]" * VALUE_DEPTH_MAX
    assert len(str(refused.value)) < 300


async def test_a_commit_body_is_reported_and_then_cancelled(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A body within its limits is stored; past one it is reported, past the other not stored."""
    settings = Settings(body_report_seconds=0.5, body_seconds_max=3.0)
    async with open_harness(":memory:", settings=settings, **virtual_time()) as harness:
        root = await harness.root()

        async def slow(seconds: float) -> None:
            async with harness.commit() as tx:
                tx.append(root.id, seconds, kind="limits.slow")
                await trio.sleep(seconds)

        with caplog.at_level(logging.WARNING, logger="pidurable"):
            await slow(0.4)
            assert caplog.records == []
            await slow(2.9)
            assert len(caplog.records) == 1
            with pytest.raises(CommitBodyTimeoutError, match="3 s"):
                await slow(3.1)

        assert [entry.data for entry in await root.history()] == [0.4, 2.9]


async def test_a_memo_is_refused_one_byte_above_its_limit() -> None:
    """MEMO_BYTES_MAX counts the encoded bytes, quotes included; the error names the memo."""

    async def act(ctx: TaskContext[str, Any, Any]) -> str:
        await ctx.memo("fits", "x" * (MEMO_BYTES_MAX - 2))
        with pytest.raises(MemoTooLargeError, match="'wide' would take 8193 bytes"):
            await ctx.memo("wide", "x" * (MEMO_BYTES_MAX - 1))
        return "tried"

    assert (await outcome_of(act)).result == "tried"


async def test_a_task_has_at_most_so_many_memos() -> None:
    """MEMOS_MAX memos are stored, one more is refused, and those that stand can be read."""

    async def act(ctx: TaskContext[str, Any, Any]) -> str:
        for number in range(MEMOS_MAX):
            await ctx.memo(f"memo {number}", number)
        with pytest.raises(TooManyMemosError):
            await ctx.memo("one more", 0)
        return str(await ctx.memo(f"memo {MEMOS_MAX - 1}", "another"))

    assert (await outcome_of(act)).result == str(MEMOS_MAX - 1)


async def test_a_signal_is_refused_above_its_size_and_above_its_number() -> None:
    """SIGNAL_BYTES_MAX per signal and SIGNALS_UNREAD_MAX per task; nothing above is stored."""
    async with open_harness(":memory:", registry=registry_of()) as harness:
        root = await harness.root()
        task = await root.create_task(Probe, "")
        await harness.signal(task, "fits", "x" * (SIGNAL_BYTES_MAX - 2))
        with pytest.raises(SignalRefusedError):
            await harness.signal(task, "wide", "x" * (SIGNAL_BYTES_MAX - 1))
        async with harness.commit() as tx:
            for number in range(SIGNALS_UNREAD_MAX - 1):
                tx.signal(task, "one of many", number)
        with pytest.raises(SignalRefusedError):
            await harness.signal(task, "one more", None)


async def test_a_long_error_is_cut_and_marked() -> None:
    """ERROR_MESSAGE_BYTES_MAX of a message and TRACEBACK_BYTES_MAX of a traceback are kept."""

    async def act(ctx: TaskContext[str, Any, Any]) -> str:
        raise ValueError("é" * ERROR_MESSAGE_BYTES_MAX)

    def deep(level: int) -> None:
        if level == 0:
            raise ValueError("x" * TRACEBACK_BYTES_MAX)
        try:
            deep(level - 1)
        except ValueError as error:
            raise ValueError(f"level {level}: {'y' * 2000}") from error

    async def act_deep(ctx: TaskContext[str, Any, Any]) -> str:
        deep(30)
        return ""

    error = (await outcome_of(act)).error
    assert (
        ERROR_MESSAGE_BYTES_MAX - 8 <= len(error.message.encode()) <= ERROR_MESSAGE_BYTES_MAX + 40
    )
    assert error.message != "é" * ERROR_MESSAGE_BYTES_MAX
    traceback = (await outcome_of(act_deep)).error.traceback
    assert TRACEBACK_BYTES_MAX // 2 < len(traceback.encode()) <= TRACEBACK_BYTES_MAX + 40


async def test_a_short_error_is_kept_whole() -> None:
    """A message of exactly the limit is stored as it is."""

    async def act(ctx: TaskContext[str, Any, Any]) -> str:
        raise ValueError("x" * ERROR_MESSAGE_BYTES_MAX)

    assert (await outcome_of(act)).error.message == "x" * ERROR_MESSAGE_BYTES_MAX


async def test_a_full_queue_refuses_the_next_input() -> None:
    """queued_max inputs wait behind a run; the next one is refused and not stored."""
    model = ScriptedModel([Step(text="late", delay=1e6)])
    settings = Settings(queued_max=3)
    async with open_harness(":memory:", models=model.models(), settings=settings) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        await root.submit("runs")
        for number in range(3):
            await root.submit(f"waits {number}")
        with pytest.raises(ConversationFullError, match="3 queued"):
            await root.submit("one more")
        assert len(root.inbox()) == 3


@tool(replay="safe")
async def shout(words: int, call: ToolCall) -> str:
    """Put out many lines.

    Args:
        words: How many.
    """
    return "\n".join("word" for _ in range(words))


@tool(replay="safe")
async def flood(size: int, call: ToolCall) -> str:
    """Put out one long line.

    Args:
        size: Of how many bytes.
    """
    return "x" * size


def calling(name: str, argument: str, value: int) -> Step:
    return Step(calls=(ScriptedCall(name=name, arguments={argument: value}),))


@pytest.mark.parametrize("turns", [2, 3])
async def test_a_run_has_at_most_so_many_turns(turns: int) -> None:
    """turns_max answers are asked for; a run that needs one more ends unanswered."""
    model = ScriptedModel([*[calling("shout", "words", 1)] * 2, "done"])
    options = {"settings": Settings(turns_max=turns), "models": model.models()}
    async with open_harness(":memory:", registry=registry_of(park, shout), **options) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        settled = await (await root.submit("go")).wait()

        assert len(model.requests) == turns
        assert settled.reason == (None if turns == 3 else "turn_limit")


@pytest.mark.parametrize("failures", [2, 3])
async def test_a_request_is_tried_again_so_often(
    failures: int, autojump_clock: trio.testing.MockClock
) -> None:
    """request_tries after the first: so many failures are survived, one more is not."""
    fault = ScriptedError(kind="retryable", detail="busy")
    model = ScriptedModel([Step(text="done", error=fault, times=failures)])
    settings = Settings(request_tries=2)
    options = {"settings": settings, "models": model.models()}
    async with open_harness(":memory:", **virtual_time(), **options) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        settled = await (await root.submit("go")).wait()

        assert len(model.requests) == 3
        assert settled.reason == (None if failures == 2 else "model_error")


@pytest.mark.parametrize("seconds", [600, 601])
async def test_a_longer_pause_than_the_limit_ends_the_run(
    seconds: int, autojump_clock: trio.testing.MockClock
) -> None:
    """retry_after_seconds_max is waited for; a provider that asks for more ends the run."""
    fault = ScriptedError(kind="retryable", detail="busy", retry_after=seconds)
    model = ScriptedModel([Step(text="done", error=fault, times=1)])
    async with open_harness(":memory:", models=model.models(), **virtual_time()) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        submission = await root.submit("go")
        if seconds > Settings().retry_after_seconds_max:
            with pytest.raises(UnansweredError, match="model_error"):
                _ = (await submission.wait()).text
            assert len(model.requests) == 1
            return
        started = trio.current_time()
        assert (await submission.wait()).text == "done"
        assert trio.current_time() - started >= seconds
        assert len(model.requests) == 2


@pytest.mark.parametrize(
    ("step", "kept", "whole"),
    [
        (calling("shout", "words", OUTPUT_LINES_MAX), OUTPUT_LINES_MAX, True),
        (calling("shout", "words", OUTPUT_LINES_MAX + 1), OUTPUT_LINES_MAX, False),
        (calling("flood", "size", OUTPUT_BYTES_MAX), 1, True),
        (calling("flood", "size", OUTPUT_BYTES_MAX + 1), 1, False),
    ],
    ids=["lines at the limit", "a line above", "bytes at the limit", "a byte above"],
)
async def test_tool_output_is_cut_at_its_limits(step: Step, kept: int, whole: bool) -> None:
    """Output at its limits is kept whole; above them it is cut, and the model is told."""
    model = ScriptedModel([step, "done"])
    registry = registry_of(park, shout, flood)
    async with open_harness(":memory:", registry=registry, models=model.models()) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        await (await root.submit("go")).wait()
        (result,) = [each for each in await root.history() if each.kind == "pi.tool_result"]
        (block, *more) = result.messages[0].blocks
        text = "".join(each.text for each in (block, *more))

    lines = text.splitlines()
    output = [line for line in lines if line in ("word", "x" * len(line))]
    assert len(output) == kept
    assert (lines == output) is whole
    assert len(text.encode()) <= OUTPUT_BYTES_MAX + 200


@pytest.mark.parametrize(
    "given",
    [
        {"limits": {"shop.payment": -1}},
        {"limits": {"shop.payment": "8"}},
        {"limits": {"shop.payment": None}},
        {"limits": {"shop.payment": True}},
        {"limits": {8: 8}},
        {"limits": [("shop.payment", 8)]},
        {"limits": None},
        {"running_max": 0},
        {"running_max": "8"},
        {"running_max": 1.5},
        {"running_max": True},
        {"recoveries_max": None},
        {"request_tries": -1},
        {"on_fault": "Park"},
        {"on_fault": ["park"]},
        {"body_seconds_max": 0},
        {"heartbeat_seconds": math.nan},
        {"progress_seconds": "0.1"},
        {"commands_seconds": 0},
        {"storage_retry_seconds": -0.1},
    ],
    ids=str,
)
def test_a_setting_of_the_wrong_type_or_size_is_named_where_it_is_made(
    given: dict[str, Any],
) -> None:
    """It would stop the whole session later, in the first pass of the scheduler."""
    ((name, _),) = given.items()

    with pytest.raises(InvalidArgumentError, match=f"^{name}: .*must be"):
        Settings(**given)
