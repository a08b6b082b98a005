"""What a running call offers to its tool, and what it keeps from it."""

from __future__ import annotations

import math
import re
from typing import Any

import attrs
import pytest
import trio
from agent_world import MODEL, World, ask, calls, odd_tool, results, text_of, verify
from hypothesis import given, settings, strategies as st
from trio.testing import MockClock

from pidurable.agent._script import Step, When
from pidurable.agent._tool_result import bounds_of, final_result, replaced
from pidurable.errors import InvalidArgumentError, NotFoundError, UnknownTaskError
from pidurable.harness._open import Harness
from pidurable.records import _codec, _json
from pidurable.records._limits import OUTPUT_BYTES_MAX
from pidurable.records._messages import (
    ImageBlock,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
)
from pidurable.registry import Tool, ToolCall, ToolResult, tool
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase


async def run(body: Any, *steps: Any, **options: Any) -> tuple[ToolResultMessage, World]:
    """Let the model call the odd tool once; return the result."""
    world = World(*steps, calls("odd"), "ok", tools=[odd_tool(body, **options)])
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        await verify(world, harness)
        found = await results(harness)
    assert outcome.text == "ok"
    return found[-1], world


@attrs.frozen
class Begin:
    """Nothing happened yet."""


class Note(Task[str, Begin, str]):
    """A task that a tool creates."""

    name = "test.note"
    abort = nothing_to_undo

    def initial(self, input: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[str, Begin, str]) -> None:
        await ctx.complete("noted")


# --- output -------------------------------------------------------------------------------------


async def test_bytes_are_output_as_utf_8(autojump_clock: MockClock) -> None:
    """Characters that come in parts are whole, what is no UTF-8 is replaced, controls are out."""

    async def body(call: ToolCall) -> None:
        for part in ("grün ☃ \U0001f600".encode()[i : i + 1] for i in range(14)):
            await call.output(part)
        await call.output(b" \xff\xfe")
        await call.output(bytearray(b"\x1b[2J\x07done"))
        await call.output(" and text\udcff")

    # C087
    result, _ = await run(body)

    assert text_of(result) == "grün ☃ \U0001f600 ��[2Jdone and text�"


@pytest.mark.parametrize("text", [None, 5, ["a"]])
async def test_output_takes_text_or_bytes(autojump_clock: MockClock, text: Any) -> None:
    """Anything else is refused at the tool's own line."""

    async def body(call: ToolCall) -> str:
        with pytest.raises(InvalidArgumentError, match="expected a str or bytes"):
            await call.output(text)
        return "fine"

    result, _ = await run(body)

    assert text_of(result) == "fine"


# --- blobs, models ------------------------------------------------------------------------------


async def test_an_image_that_a_tool_stores_is_what_the_model_sees(
    autojump_clock: MockClock,
) -> None:
    """`put_blob` stores the bytes before the result refers to them."""

    async def body(call: ToolCall) -> ToolResult:
        name = await call.put_blob(b"\x89PNG")
        with pytest.raises(InvalidArgumentError, match="expected bytes"):
            await call.put_blob("text")  # type: ignore[arg-type]
        return ToolResult([ImageBlock(blob=name, media_type="image/png")])

    result, world = await run(body)

    (block,) = result.blocks
    assert isinstance(block, ImageBlock)
    assert world.model.requests[-1].images == {block.blob: b"\x89PNG"}


async def test_a_tool_asks_the_harness_s_models(autojump_clock: MockClock) -> None:
    """A tool may resolve a model by its name, as the harness knows it."""

    async def body(call: ToolCall) -> str:
        return call.models.resolve(MODEL).name

    result, _ = await run(body)

    assert text_of(result) == MODEL


# --- conversations ------------------------------------------------------------------------------


async def other_conversation(harness: Harness, principal: str = "") -> int:
    """A conversation beside the root."""
    async with harness.commit() as tx:
        id: int = tx.create_conversation(principal=principal)
    return id


async def reach(own: str, other: str) -> str:
    """Let a call in a conversation of one principal ask for one of another; what it was told."""
    world = World(calls("odd"), "ok")
    told: list[str] = []
    ids: list[int] = []

    async def body(call: ToolCall) -> str:
        for id in (ids[0], call.conversation_id, 999_999):
            try:
                told.append(str(call.conversation(id).id == id))
            except NotFoundError as error:
                told.append(type(error).__name__)
        return "looked"

    world.install(odd_tool(body))
    async with world.open() as harness:
        ids.append(await other_conversation(harness, other))
        asked = harness.conversation(await other_conversation(harness, own))
        await asked.configure(_model())
        await (await asked.submit("go")).wait()
    assert told[1:] == ["True", "NotFoundError"]
    return told[0]


def _model() -> Any:
    from pidurable import AgentChange

    return AgentChange(model=MODEL)


@pytest.mark.parametrize(
    ("own", "other", "told"),
    [
        ("ada", "ada", "True"),
        ("ada", "bob", "NotFoundError"),
        ("ada", "", "NotFoundError"),
        ("", "ada", "NotFoundError"),
        # Nobody is named, so the tree is all that tells one user from another.
        ("", "", "NotFoundError"),
    ],
)
async def test_a_call_reaches_the_conversations_of_its_own_principal(
    autojump_clock: MockClock, own: str, other: str, told: str
) -> None:
    """The id of another's conversation is an id of nothing."""
    assert await reach(own, other) == told


@pytest.mark.parametrize(
    ("own", "other", "told"),
    [
        ("ada", "ada", ["stored"] * 5),
        ("ada", "bob", ["NotFoundError"] * 3 + ["UnknownTaskError"] * 2),
        ("", "", ["NotFoundError"] * 3 + ["UnknownTaskError"] * 2),
    ],
)
async def test_a_commit_of_a_call_reaches_no_further_than_the_call(
    autojump_clock: MockClock, own: str, other: str, told: list[str]
) -> None:
    """Entries, forks, tasks, aborts and signals go to what is its own, and nowhere else."""
    world = World(Step(calls=calls("slow").calls, when=When(user="wait")), calls("odd"), "ok")
    found: list[str] = []
    ids: list[int] = []

    async def body(call: ToolCall) -> str:
        conversation, task = ids
        for attempt in (
            lambda tx: tx.append(conversation, {"n": 1}, kind="test.seen"),
            lambda tx: tx.fork(conversation),
            lambda tx: tx.create_task(Note, "x", conversation=conversation),
            lambda tx: tx.signal(task, "hello"),
            lambda tx: tx.abort_task(task),
        ):
            try:
                async with call.commit() as tx:
                    attempt(tx)
                found.append("stored")
            except (NotFoundError, UnknownTaskError) as error:
                found.append(type(error).__name__)
        async with call.commit() as tx:
            tx.append(call.conversation_id, {"n": 2}, kind="test.seen")
            made = tx.create_conversation(key="mine")
            tx.append(made, {"n": 3}, kind="test.seen")
        return "tried"

    world.install(odd_tool(body), tasks=[Note()])
    async with world.open() as harness:
        theirs = harness.conversation(await other_conversation(harness, other))
        asked = harness.conversation(await other_conversation(harness, own))
        for each in (theirs, asked):
            await each.configure(_model())
        await theirs.submit("wait")
        await world.reached.wait()
        ids += [theirs.id, theirs.live()["calls"][0]["task"]]
        assert (await (await asked.submit("go")).wait()).text == "ok"
        await theirs.abort()
        await harness.wait_for_idle()

    assert found == told


async def test_a_tool_cannot_end_its_own_call(autojump_clock: MockClock) -> None:
    """What a call comes to is what its tool returns; its commits do not decide that."""
    refused: list[str] = []

    async def body(call: ToolCall) -> str:
        for decide in (
            lambda tx: tx.complete(None),
            lambda tx: tx.fail("no"),
            lambda tx: tx.goto(None),
            lambda tx: tx.wait(then=None, signals=True),
        ):
            with pytest.raises(InvalidArgumentError, match="decides nothing about its task"):
                async with call.commit() as tx:
                    decide(tx)
            refused.append("refused")
        return "mine"

    result, _ = await run(body)

    assert text_of(result) == "mine"
    assert len(refused) == 4


async def test_a_call_reaches_its_tree(autojump_clock: MockClock) -> None:
    """A sub-agent may hand something to the conversation above it, and that one to its child."""
    world = World(
        Step(text="noted", when=When(user="from below")),
        Step(calls=calls("report").calls, when=When(user="the task", turn=0)),
        Step(text="child done", when=When(user="the task")),
        calls("odd"),
        "parent done",
        "ok",
    )
    parent: list[int] = []

    @tool(replay="safe")
    async def report(call: ToolCall) -> str:
        """Tell the parent."""
        above = call.conversation(parent[0])
        await above.submit("from below", request_id=call.key("up"))
        return "told"

    async def body(call: ToolCall) -> str:
        parent.append(call.conversation_id)
        child = await call.child()
        assert call.conversation(child.id).id == child.id
        submission = await child.submit("the task", request_id=call.key("task"))
        return (await submission.wait()).text

    world.install(odd_tool(body, replay="safe"), report)
    async with world.open() as harness:
        with trio.fail_after(100):
            outcome = await ask(harness, "go")
            await harness.wait_for_idle()
        await verify(world, harness)
        root = await harness.root()
        told = [m for e in await root.history() for m in e.messages if "from below" in str(m)]

    assert outcome.text == "parent done"
    assert len(told) == 1


# --- whatever a tool returns --------------------------------------------------------------------

_TEXT = st.text(
    alphabet=st.one_of(st.characters(), st.sampled_from("\0\x1b\r\n\t\ud800\udfff\u202e")),
    max_size=60,
)
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(_TEXT, st.integers()), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)
_BLOCK = st.one_of(
    st.builds(TextBlock, text=_TEXT),
    st.builds(ImageBlock, blob=_TEXT, media_type=_TEXT),
    st.builds(ToolCallBlock, name=_TEXT, arguments=_JSON),
    st.binary(max_size=4),
)
_NUMBER: Any = st.one_of(st.integers(), st.floats(), st.none(), _TEXT)


def _mostly(usual: Any, odd: Any) -> Any:
    """So that what is odd in one part does not hide what is odd in another."""
    return st.integers(0, 5).flatmap(lambda drawn: odd if drawn == 5 else st.just(usual))


_USAGE = st.builds(Usage, requests=st.integers(0, 9), input_tokens=_NUMBER, cost=st.floats())
_CONTENT = st.one_of(st.none(), _TEXT, st.lists(_BLOCK, max_size=4), _JSON)
_RESULT = st.builds(
    ToolResult,
    _CONTENT,
    details=_mostly(None, _JSON),
    error=st.booleans(),
    structured=_mostly(None, _JSON),
    add_tools=_mostly(["safe"], st.lists(st.one_of(_TEXT, st.integers()), max_size=3)),
    terminate=st.booleans(),
    handoff=_mostly(None, st.one_of(_TEXT, st.integers())),
    usage=_mostly(None, st.one_of(_USAGE, _TEXT)),
)


class _Progress:
    """As much of a call's progress as a result is made of."""

    def __init__(self, output: str, details: Any, diagnostics: list[str]) -> None:
        from pidurable.agent._output import OutputCollector

        self.collector = OutputCollector(bytes_max=OUTPUT_BYTES_MAX, lines_max=2000, keep="head")
        self.collector.add(output)
        self.details = details
        self.diagnostics = [{"severity": "info", "text": text} for text in diagnostics]


def _odd() -> Tool[..., Any]:
    async def body(call: ToolCall) -> None: ...

    return odd_tool(body)


_ODD = _odd()


@settings(max_examples=60)
@given(returned=st.one_of(_RESULT, _JSON, _TEXT), output=_TEXT, by=_RESULT)
def test_whatever_a_tool_returns_can_be_stored_or_is_refused(
    returned: Any, output: str, by: ToolResult
) -> None:
    """A result is refused in a way the model is told of, or every commit with it succeeds."""
    try:
        shown = _Progress(output, None, []) if output else None
        final = final_result(returned, _ODD, shown, 16 * 1024 * 1024)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    _check_storable(final)
    try:
        final = replaced(final, by, bounds_of(_ODD, 16 * 1024 * 1024))
    except (TypeError, ValueError):
        return
    _check_storable(final)


def _check_storable(final: Any) -> None:
    message = ToolResultMessage(
        call=(1, 0), name="odd", blocks=final.blocks, is_error=final.is_error, at_us=0
    )
    encoded = _codec.encode_messages([message])
    assert _codec.decode_messages(_json.loads_stored(_json.dumps(encoded))) == (message,)
    _json.dumps([[[final.data]]])
    for block in final.blocks:
        if isinstance(block, TextBlock):
            block.text.encode()
            assert not any(ord(c) < 32 and c not in "\t\n" for c in block.text)
    assert all(re.fullmatch("[a-zA-Z0-9_-]+", name) for name in final.add_tools)
    if final.usage is not None:
        assert _codec.decode_usage(_codec.encode_usage(final.usage)) == final.usage
        assert 0 <= final.usage.cost < math.inf
    assert final.handoff is None or final.handoff.strip()
