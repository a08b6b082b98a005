"""Bad models and bad tools: whatever they send, the run ends, and the transcript stays valid."""

# C081, C082, C085, C086: NUL, surrogates, depth and strange errors in answers, arguments and
# results. C087: large output.

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from bad_payloads import BAD_TEXTS, LIGHT, OTHERS, TEXTS, VALUE_BYTES_MAX, Shy
from bad_world import InlineBlocking

from pidurable import (
    AgentChange,
    AssistantMessage,
    Conversation,
    Extension,
    Harness,
    Models,
    Registry,
    Settings,
    Settled,
    TextBlock,
    ToolCall,
    ToolResult,
    ToolResultMessage,
    Usage,
    open_harness,
    tool,
)
from pidurable.cli._demo_project import transcript_problem
from pidurable.testing import (
    Cut,
    ScriptedCall,
    ScriptedError,
    ScriptedModel,
    ScriptedProvider,
    Step,
)

Act = Callable[[ToolCall], Any]


@attrs.define(eq=False)
class World:
    """A harness with a tool that does what the test says, and models by name."""

    harness: Harness
    models: dict[str, ScriptedModel]
    act: list[Act]
    seen: list[Any]
    """Arguments that reached the tool."""

    async def run(self, steps: list[Step | str], act: Act | None = None) -> tuple[Any, Settled]:
        """Ask once; then the conversation must take the next input, with a valid history."""
        name = f"m{len(self.models)}"
        self.models[name] = ScriptedModel(steps, name=name, position="run")
        self.act[:] = [act or (lambda call: None)]
        conversation = await self.harness.create_conversation(
            agent=AgentChange(model=f"scripted/{name}")
        )
        settled = await (await conversation.submit("begin")).wait()
        await self.goes_on(conversation)
        self.models[name].check()
        return conversation, settled

    async def goes_on(self, conversation: Conversation) -> None:
        await conversation.configure(AgentChange(model="scripted/plain"))
        after = await (await conversation.submit("and now?")).wait()
        assert (after.status, after.text) == ("done", "fine")
        self.models["plain"].check()
        assert transcript_problem(await conversation.history(limit=1_000)) is None
        assert conversation.live()["run"] is None


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(tmp_path / "s.sqlite") as world:
        yield world


@asynccontextmanager
async def open_world(path: Path) -> AsyncIterator[World]:
    models = {"plain": ScriptedModel(["fine"], name="plain", position="run")}
    act: list[Act] = []
    seen: list[Any] = []

    @tool(name="odd")
    async def odd(call: ToolCall, *, value: Any = None) -> Any:
        """Do what the test says."""
        seen.append(value)
        came = act[0](call)
        return await came if hasattr(came, "__await__") else came

    provider: Any = ScriptedProvider(models)
    registry = Registry()
    registry.install(Extension("odd", tools=[odd]))
    async with open_harness(
        path,
        registry=registry,
        models=Models([provider]),
        settings=Settings(value_bytes_max=VALUE_BYTES_MAX, request_tries=0),
        durability="process",
        blocking=InlineBlocking(),
    ) as harness:
        # The provider copies the mapping; the test adds to it.
        provider._models = models
        yield World(harness, models, act, seen)


CALL = Step(calls=(ScriptedCall(name="odd"),))


async def result_of(conversation: Conversation) -> ToolResultMessage:
    """The one result of the one call."""
    entries = await conversation.history(limit=1_000)
    (found,) = [m for e in entries for m in e.messages if isinstance(m, ToolResultMessage)]
    return found


def text_of(message: ToolResultMessage) -> str:
    return "\n".join(block.text for block in message.blocks if isinstance(block, TextBlock))


# --- tools ------------------------------------------------------------------------------------


def returns(value: Any) -> Act:
    return lambda call: value


def raises(error: Any) -> Act:
    def act(call: ToolCall) -> Any:
        raise error

    return act


def puts_out(value: Any) -> Act:
    return lambda call: call.output(value)


def shows(value: Any) -> Act:
    return lambda call: call.details(value)


def remarks(value: Any) -> Act:
    return lambda call: call.diagnostic("info", value)


def remembers(value: Any) -> Act:
    return lambda call: call.memo("name", value)


def gives(field: str) -> Callable[[Any], Act]:
    def make(value: Any) -> Act:
        return lambda call: ToolResult(**{"content": "text", field: value})

    make.__name__ = f"gives_{field}"
    return make


TOOL_DOORS = [
    returns,
    puts_out,
    shows,
    remarks,
    remembers,
    gives("content"),
    gives("details"),
    gives("structured"),
    gives("error"),
    gives("usage"),
]


@pytest.mark.slow
@pytest.mark.parametrize("door", TOOL_DOORS, ids=lambda door: door.__name__)
async def test_whatever_a_tool_hands_back_is_one_valid_result(
    world: World, door: Callable[[Any], Act], some: Callable[..., list[Any]]
) -> None:
    """What can be stored is; the rest is an error result that the model sees; the run goes on."""
    wrong: list[str] = []
    payloads = LIGHT if door in (returns, shows) else [*BAD_TEXTS, *OTHERS]
    for payload in some(payloads, of=6):
        conversation, settled = await world.run([CALL, "after"], door(payload.make()))
        result = await result_of(conversation)
        said = text_of(result)
        said.encode()
        if (settled.status, settled.answer is None) != ("done", False) or settled.text != "after":
            wrong.append(f"{payload.name}: {settled}")
        if "\0" in said or len(said) > 64 * 1024:
            wrong.append(f"{payload.name}: the result has {len(said)} characters: {said[:80]!r}")
        if result.is_error and result.code not in ("tool_error",):
            wrong.append(f"{payload.name}: {result.code}")

    assert wrong == []


class Strange(Exception):
    """An error whose text raises too."""

    def __init__(self, needed: int, *, also: str) -> None:
        super().__init__(needed)

    def __str__(self) -> str:
        raise ValueError("no text")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "nul": lambda: ValueError("a\0b"),
    "surrogate": lambda: ValueError("a\ud800"),
    "large": lambda: ValueError("x" * 5_000_000),
    "not text": lambda: ValueError({"a": [1, {2}]}),
    "shy": lambda: ValueError(Shy()),
    "strange": lambda: Strange(1, also="x"),
    "group": lambda: ExceptionGroup("many", [ValueError("a\0"), ExceptionGroup("g", [OSError(5)])]),
    "lookalike": lambda: type("Cancelled", (BaseException,), {})("not trio's"),
    "stop": lambda: StopIteration(7),
    "recursion": lambda: RecursionError("deep"),
    "memory": lambda: MemoryError(),
    "generator exit": lambda: GeneratorExit(),
    "unicode": lambda: UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"),
}


async def test_whatever_a_tool_raises_is_an_error_result(world: World) -> None:
    """C086: strange errors are stored as plain text, bounded, and the run goes on."""
    for name, make in ERRORS.items():
        conversation, settled = await world.run([CALL, "after"], raises(make()))

        result = await result_of(conversation)
        assert (settled.status, result.is_error, result.code) == ("done", True, "tool_error"), name
        assert 0 < len(text_of(result)) < 16 * 1024, name


# --- arguments --------------------------------------------------------------------------------

RAW_ARGUMENTS = {
    "nan": '{"value": NaN}',
    "infinity": '{"value": -Infinity}',
    "1e999": '{"value": 1e999}',
    "2**64": '{"value": 18446744073709551616}',
    "5,000 digits": '{"value": ' + "9" * 5_000 + "}",
    "duplicate keys": '{"value": 1, "value": 2}',
    "nul": '{"value": "a\\u0000"}',
    "raw nul": '{"value": "a\0"}',
    "surrogate": '{"value": "\\ud800"}',
    "raw surrogate": '{"value": "\ud800"}',
    "deep": '{"value": ' + "[" * 5_000 + "]" * 5_000 + "}",
    "very deep": "[" * 200_000,
    "large": '{"value": "' + "x" * VALUE_BYTES_MAX + '"}',
    "cut": '{"value": "abc',
    "list": "[1, 2]",
    "text": '"value"',
    "null": "null",
    "not json": "value=1",
    "two objects": "{} {}",
    "trailing comma": '{"value": 1,}',
    "single quotes": "{'value': 1}",
    "unknown argument": '{"valeu": 1}',
    "byte order mark": '\ufeff{"value": 1}',
    "proto": '{"__proto__": {"value": 1}}',
}


async def test_arguments_that_are_no_json_object_never_reach_a_tool(
    world: World,
) -> None:
    """The model is told what is wrong with them; nothing runs, nothing breaks."""
    for name, text in RAW_ARGUMENTS.items():
        step = Step(calls=(ScriptedCall(name="odd", arguments=text),))
        conversation, settled = await world.run([step, "after"])

        assert world.seen == [], name
        if settled.status == "done":
            result = await result_of(conversation)
            assert (result.is_error, result.code) == (True, "invalid_arguments"), name
            assert len(text_of(result)) < 16 * 1024, name
        else:
            # Larger than any value may be, as a whole.
            assert (name, settled.reason) == ("large", "model_error")


@pytest.mark.slow
async def test_arguments_that_are_json_reach_the_tool_as_they_are(
    world: World, some: Callable[..., list[Any]]
) -> None:
    """Odd but valid values come through the model, the store and the check unchanged."""
    for payload in some(LIGHT, of=6):
        value = payload.stored if payload.fate == "stored" else None
        if value is None:
            continue
        world.seen.clear()
        step = Step(calls=(ScriptedCall(name="odd", arguments={"value": value}),))
        _, settled = await world.run([step, "after"])
        assert settled.status == "done", payload.name
        assert [json.dumps(seen) for seen in world.seen] == [json.dumps(value)], payload.name


# --- answers ----------------------------------------------------------------------------------


async def test_any_text_of_a_model_is_stored_or_refused_as_its_fault(world: World) -> None:
    """NUL and lone surrogates are marked, odd text stays, nothing and too much are errors."""
    for payload in TEXTS:
        _, settled = await world.run([Step(text=payload.make(), thinking=payload.make())])

        if settled.status == "done":
            settled.text.encode()
            assert "\0" not in settled.text
            assert payload.fate == "refused" or settled.text == payload.stored, payload.name
        else:
            assert settled.reason == "model_error", payload.name
            assert not payload.make().strip() or "limit" in payload.name


NAMES = [
    "",
    " ",
    "no_such_tool",
    "odd ",
    "ODD",
    "a\0b",
    "\ud800",
    "x" * 10_000,
    "../odd",
    "\x1b[2J",
]


async def test_an_unknown_tool_is_an_error_result(world: World) -> None:
    """A call of something that was not offered is answered, and the run goes on."""
    for name in NAMES:
        world.seen.clear()
        step = Step(calls=(ScriptedCall(name=name), ScriptedCall(name="odd")))
        conversation, settled = await world.run([step, "after"])

        assert (settled.status, len(world.seen)) == ("done", 1), name
        entries = await conversation.history(limit=1_000)
        codes = [m.code for e in entries for m in e.messages if isinstance(m, ToolResultMessage)]
        assert sorted(map(str, codes)) == ["None", "tool_unavailable"], name


FAULTS = {
    "cut": (Step(text=("half", "an", "answer"), cut=Cut(after=2), times=9), "had no end|ended"),
    "broken": (Step(text=("half", "x"), cut=Cut(after=1, raises=True), times=9), "broke"),
    "empty": (Step(text=" \n"), "returned nothing"),
    "only thinking": (Step(thinking="hm"), "only thinking|returned nothing"),
    "wrong key": (Step(error=ScriptedError(kind="auth", detail="no such key")), "no such key"),
    "other": (Step(error=ScriptedError(kind="other", detail="a\0\ud800")), "a"),
    "overflow": (Step(error=ScriptedError(kind="overflow", detail="too long")), "too long"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_model_that_gives_no_answer_is_named_and_nothing_is_half_done(
    world: World, name: str
) -> None:
    """The input is unanswered with the reason; what was said so far is kept as failed."""
    step, detail = FAULTS[name]
    conversation, settled = await world.run([step])

    assert settled.status == "unanswered"
    assert settled.reason in ("model_error", "context_overflow")
    assert settled.detail is not None
    assert re.search(detail, settled.detail)
    entries = await conversation.history(limit=1_000)
    answers = [m for e in entries for m in e.messages if isinstance(m, AssistantMessage)]
    assert [m.status for m in answers if m.status == "complete"] == ["complete"]  # "fine"


async def test_a_hundred_calls_with_the_same_content_are_a_hundred_results(world: World) -> None:
    """Calls are told apart by their place, whatever a provider names them."""
    step = Step(calls=tuple(ScriptedCall(name="odd") for _ in range(100)))
    _, settled = await world.run([step, "after"])

    assert (settled.status, len(world.seen)) == ("done", 100)


@pytest.mark.parametrize("field", ["input_tokens", "cost"])
async def test_odd_counts_of_a_tool_do_not_spoil_the_sums(world: World, field: str) -> None:
    """C084: usage that is not a number, negative or endless is an error result, not a sum."""
    for value in (float("nan"), float("inf"), -1, True, 10**30, "7", None):
        usage = Usage(**{field: value})  # type: ignore[arg-type]
        conversation, settled = await world.run(
            [CALL, "after"], returns(ToolResult("t", usage=usage))
        )
        assert (settled.status, (await result_of(conversation)).is_error) == ("done", True), value
