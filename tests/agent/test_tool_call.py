"""`pi.tool`: whatever a tool returns, raises, prints or waits for becomes one bounded result."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest
import trio
from agent_world import (
    DieAt,
    World,
    ask,
    calls,
    crash_everywhere,
    odd_tool,
    results,
    run_killed,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable.agent._script import ScriptedCall, Step, When
from pidurable.errors import (
    OutcomeUnknownError,
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.harness._open import Harness
from pidurable.records._limits import OUTPUT_BYTES_MAX, Settings
from pidurable.records._messages import (
    ImageBlock,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
)
from pidurable.registry import Extension, Tool, ToolCall, ToolResult, tool, wrap_tool
from pidurable.session import _submissions
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase
from pidurable.testing import Fault


async def run_odd(body: Any, **options: Any) -> tuple[ToolResultMessage, World, Any]:
    """Let the model call the odd tool once; return the result, and how its task ended."""
    world = World(calls("odd"), "ok", tools=[odd_tool(body, **options)])
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        await verify(world, harness)
        (result,) = await results(harness)
        (task,) = [task for task in harness.tasks() if task.kind == "pi.tool"]
    assert outcome.text == "ok"
    return result, world, task.outcome


# --- what a tool returns ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (7, "7"),
        ("a\0b\x1b[31m\ud800\r\nc\ud83d\ude00", "ab[31m\ufffd\nc\U0001f600"),
        (ToolResult([TextBlock(text="one"), TextBlock(text="two")]), "onetwo"),
    ],
    ids=["text", "nothing", "json", "number", "hostile", "blocks"],
)
async def test_what_a_tool_returns_is_its_result(
    autojump_clock: MockClock, returned: Any, text: str
) -> None:
    """Text, JSON, nothing and blocks are stored as storable text, and the call completes."""

    async def body(_: ToolCall) -> Any:
        return returned

    # C081, C082
    result, _, outcome = await run_odd(body)

    assert (result.is_error, result.code, text_of(result)) == (False, None, text)
    assert outcome.status == "completed"


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (object(), "no JSON"),
        ({1, 2}, "no JSON"),
        (float("nan"), "no JSON"),
        ({"deep": None}, "no JSON"),
        (ToolResult(b"bytes"), "not b'bytes'"),  # type: ignore[arg-type]
        (ToolResult([ToolCallBlock(name="x", arguments={})]), "text and image blocks"),
        (ToolResult("x", details={"a": float("inf")}), "$.details.a"),
        (ToolResult("x", usage=Usage(cost=float("nan"))), "usage.cost"),
        (ToolResult("x", usage=Usage(input_tokens=-1)), "usage.input_tokens"),
        (
            ToolResult("x", structured={"n": "a"}),
            "TypeError: the structured output does not fit the output_schema of the tool: $.n: ",
        ),
    ],
)
async def test_what_no_tool_may_return_is_a_tool_error(
    autojump_clock: MockClock, returned: Any, said: str
) -> None:
    """Anything that could not be stored or sent is refused where it can still be told."""
    if returned == {"deep": None}:
        for _ in range(100_000):
            returned = {"deep": returned}

    async def body(_: ToolCall) -> Any:
        return returned

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    # C084, C085
    result, _, outcome = await run_odd(body, output_schema=schema)

    assert (result.is_error, result.code) == (True, "tool_error")
    assert said in text_of(result)
    assert outcome.status == "failed"
    # The deep value is taken apart here; the interpreter would recurse into it.
    while isinstance(returned, dict) and "deep" in returned:
        returned = returned["deep"]


async def test_an_error_result_completes_the_call(autojump_clock: MockClock) -> None:
    """A tool that returns an error has not failed itself; usage and details are kept."""

    async def body(_: ToolCall) -> Any:
        return ToolResult("no", error=True, details={"d": 1}, usage=Usage(requests=2, cost=0.5))

    result, world, outcome = await run_odd(body)
    async with world.open() as harness:
        root = await harness.root()
        usage = root.usage()["tools"]
        (entry,) = [entry for entry in await root.history() if entry.kind == "pi.tool_result"]

    assert (result.is_error, result.code) == (True, "tool_error")
    assert outcome.status == "completed"
    assert (usage["odd"]["requests"], usage["odd"]["cost"]) == (2, 0.5)
    assert entry.data == {"details": {"d": 1}}


async def test_blank_output_is_sent_as_a_marker(autojump_clock: MockClock) -> None:
    """A result of blanks is kept as it is, and the provider gets "(no output)"."""

    async def body(_: ToolCall) -> Any:
        return ToolResult([TextBlock(text=" "), TextBlock(text="\n")])

    # C070
    result, world, _ = await run_odd(body)

    assert text_of(result) == " \n"
    assert text_of(world.model.requests[-1].messages[-1].message) == "(no output)"


async def test_a_missing_image_does_not_stop_the_run(autojump_clock: MockClock) -> None:
    """An image whose bytes are nowhere becomes a note, and one that was put is shown."""
    image = ImageBlock(blob="0" * 64, media_type="image/png")

    async def body(_: ToolCall) -> Any:
        return ToolResult([TextBlock(text="look"), image])

    async def putting(call: ToolCall) -> Any:
        async with call.commit() as tx:
            name = tx.put_blob(b"bytes")
        return ToolResult([ImageBlock(blob=name, media_type="image/png")])

    # C071
    result, world, _ = await run_odd(body)
    shown, seeing, _ = await run_odd(putting)

    note = "(an image, image/png, whose bytes were not stored)"
    assert result.blocks == (TextBlock(text="look"), TextBlock(text=note))
    assert world.model.requests[-1].images == {}
    (put,) = shown.blocks
    assert isinstance(put, ImageBlock)
    assert seeing.model.requests[-1].images == {put.blob: b"bytes"}


# --- bounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["head", "tail"])
async def test_every_output_is_bounded(autojump_clock: MockClock, keep: str) -> None:
    """Returned or put out, in one piece or many, the kept part has its limit and says the rest."""

    async def returned(_: ToolCall) -> Any:
        return "first\n" + "x" * 3_000_000 + "\nlast"

    async def put_out(call: ToolCall) -> None:
        await call.output("first\n")
        for _ in range(300):
            await call.output("y" * 10_000)
        await call.output("\nlast")

    async def blocks(_: ToolCall) -> Any:
        return ToolResult([TextBlock(text="z" * 1000) for _ in range(5000)])

    # C087
    for body in (returned, put_out, blocks):
        result, _, _ = await run_odd(body, output_keep=keep)
        text = text_of(result)
        assert len(text) <= OUTPUT_BYTES_MAX + 200
        assert "dropped" in text
        if body is not blocks:
            assert text.startswith("first") is (keep == "head")
            assert text.endswith("last") is (keep == "tail")


async def test_error_texts_and_diagnostics_are_bounded(autojump_clock: MockClock) -> None:
    """A five-megabyte message, a thousand remarks and all output together stay small."""

    async def body(call: ToolCall) -> None:
        for number in range(1000):
            await call.diagnostic("warning", f"{number} " + "d" * 5000)
        await call.output("o" * 1_000_000)
        raise ValueError("m" * 5_000_000)

    # C086, C087
    result, _, outcome = await run_odd(body)
    text = text_of(result)

    assert result.code == "tool_error"
    assert len(text.encode()) < OUTPUT_BYTES_MAX + 32 * 1024
    assert "984 more diagnostics were dropped" in text
    assert len(outcome.error.message.encode()) <= 4096


async def test_details_are_bounded_and_checked(autojump_clock: MockClock) -> None:
    """Details that are too large, or no JSON, are refused at the tool's own line."""
    refused: list[str] = []

    async def body(call: ToolCall) -> str:
        for value in ("x" * 100_000, {"a": float("nan")}, {1: 2}):
            try:
                await call.details(value)
            except ValueError as error:
                refused.append(str(error))
        return "fine"

    result, _, _ = await run_odd(body)

    assert text_of(result) == "fine"
    assert len(refused) == 3


# --- what a tool raises -------------------------------------------------------------------------


class Awkward(Exception):
    """Cannot be built from its arguments again."""

    def __init__(self, *, code: int) -> None:
        super().__init__()
        self.code = code


class Unprintable(Exception):
    """Its text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class OddBase(BaseException):
    """Below BaseException alone."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Awkward(code=3), "Awkward"),
        (Unprintable(), "Unprintable"),
        (ValueError({"not": "a string"}), "not"),
        (ValueError("\0 and \ud800"), "ValueError"),
        (ExceptionGroup("both", [ValueError("one"), KeyError("two")]), "ValueError: one"),
        (BaseExceptionGroup("all", [OddBase("odd")]), "OddBase: odd"),
        (OddBase("bare"), "OddBase: bare"),
        (asyncio.CancelledError(), "CancelledError"),
        (GeneratorExit(), "GeneratorExit"),
        (RecursionError("deep"), "RecursionError"),
        (trio.TooSlowError(), "TooSlowError"),
        # Of a store that the tool has opened itself.
        (SessionClosedError("elsewhere.sqlite"), "elsewhere.sqlite is closed"),
        (SessionPoisonedError("elsewhere.sqlite", "an error"), "elsewhere.sqlite is unusable"),
        (StorageRefusedError("elsewhere.sqlite", "full"), "elsewhere.sqlite"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_whatever_a_tool_raises_is_its_error_result(
    autojump_clock: MockClock, error: BaseException, said: str
) -> None:
    """The model gets type and text, the call ends failed, and the run goes on."""

    async def body(call: ToolCall) -> None:
        await call.output("got this far")
        raise error

    # C049, C086
    result, _, outcome = await run_odd(body)

    assert (result.is_error, result.code) == (True, "tool_error")
    assert said in text_of(result)
    assert "Output so far:\ngot this far" in text_of(result)
    assert outcome.status == "failed"


async def test_a_cancellation_of_its_own_is_an_error_like_any_other(
    autojump_clock: MockClock,
) -> None:
    """A `trio.Cancelled` that nobody asked for does not leave the call running for ever."""

    async def body(_: ToolCall) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled as cancelled:
                kept = cancelled
        raise kept

    # C049
    result, _, outcome = await run_odd(body)

    assert result.code == "tool_error"
    assert "Cancelled" in text_of(result)
    assert outcome.status == "failed"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_of_the_host_closes_it_and_faults_nothing(
    autojump_clock: MockClock, error: type[BaseException]
) -> None:
    """Ctrl-C in a tool leaves the harness; opened again, the call is closed as interrupted."""
    raised: list[int] = []

    async def body(_: ToolCall) -> str:
        raised.append(1)
        raise error

    world = World(calls("odd"), "ok", tools=[odd_tool(body)])

    # C007, C086
    with pytest.raises(error):
        async with world.open() as harness:
            await ask(harness, "go")
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)
        (result,) = await results(harness)

    assert outcome.text == "ok"
    assert result.code == "interrupted"
    assert raised == [1]


async def test_one_failure_leaves_the_siblings_alone(autojump_clock: MockClock) -> None:
    """Done, raising, raising a cancellation, timing out, late: five calls, five own results."""

    async def late(call: ToolCall) -> str:
        await call.sleep(30)
        return "late"

    async def hangs(call: ToolCall) -> None:
        await trio.sleep_forever()

    async def raises(call: ToolCall) -> None:
        raise ValueError("mine")

    async def cancelled(call: ToolCall) -> None:
        raise asyncio.CancelledError

    made = [
        attrs.evolve(odd_tool(body, timeout=timeout), name=name)
        for name, body, timeout in (
            ("late", late, None),
            ("hangs", hangs, 5.0),
            ("raises", raises, None),
            ("cancelled", cancelled, None),
        )
    ]
    world = World(calls("safe", "raises", "cancelled", "hangs", "late"), "ok", tools=made)

    # C049
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)
        found = {each.name: each.code for each in await results(harness)}

    assert outcome.text == "ok"
    assert found == {
        "safe": None,
        "raises": "tool_error",
        "cancelled": "tool_error",
        "hangs": "timeout",
        "late": None,
    }


# --- time, and what is unknown ------------------------------------------------------------------


async def test_a_tool_is_stopped_at_its_timeout(autojump_clock: MockClock) -> None:
    """The result says so, with the output so far; what the call owned is aborted with it."""

    async def body(call: ToolCall) -> None:
        child = await call.child()
        await child.submit("wait for me", request_id=call.key("x"))
        await call.output("waiting")
        await trio.sleep_forever()

    world = World(
        Step(calls=(ScriptedCall(name="slow"),), when=When(user="wait for me")),
        calls("odd"),
        "ok",
        tools=[odd_tool(body, timeout=2.5)],
    )
    # C046
    async with world.open() as harness:
        began = trio.current_time()
        outcome = await ask(harness, "go")
        took = trio.current_time() - began
        await harness.wait_for_idle()
        await verify(world, harness)
        (result,) = await results(harness)
        statuses = sorted(task.outcome.status for task in harness.tasks() if task.outcome)

    assert outcome.text == "ok"
    assert result.code == "timeout"
    assert text_of(result).startswith("The call took longer than 2.5 s and was stopped.")
    assert "waiting" in text_of(result)
    assert 2.5 <= took < 3
    assert statuses == ["aborted", "aborted", "completed", "completed", "failed"]


async def test_a_tool_that_raises_while_it_is_stopped_timed_out(autojump_clock: MockClock) -> None:
    """What its clean-up raises is said too, but the reason is the time."""

    async def body(_: ToolCall) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("in the clean-up")

    result, _, _ = await run_odd(body, timeout=1.0)

    assert result.code == "timeout"
    assert "in the clean-up" in text_of(result)


async def test_an_unknown_outcome_is_told_once(autojump_clock: MockClock) -> None:
    """A tool that cannot know what happened runs again if it is safe, once; else it is told so."""
    ran: list[int] = []

    async def body(call: ToolCall) -> None:
        ran.append(call.id)
        await call.output("sent it")
        raise OutcomeUnknownError("the server hung up.")

    # C098
    interrupted, _, outcome = await run_odd(body)
    assert (interrupted.code, len(ran)) == ("interrupted", 1)
    assert "the server hung up." in text_of(interrupted)
    assert "sent it" in text_of(interrupted)
    assert outcome.status == "failed"

    safe, _, _ = await run_odd(body, replay="safe")
    assert (safe.code, len(ran)) == ("interrupted", 3)


async def reconciled(answer: Any, replay_now: str = "reconcile") -> tuple[Any, list[str]]:
    """Kill a reconciling call after its effect; return its result, and what ran."""
    ran: list[str] = []

    async def reconcile(arguments: Any, call: ToolCall) -> Any:
        ran.append("asked")
        await call.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def body(call: ToolCall) -> str:
        ran.append("ran")
        return "by running"

    made = odd_tool(body, replay="reconcile", reconcile=reconcile)
    world = World(calls("odd"), "ok", tools=[made])
    died = DieAt(world, "CP3")
    await run_killed(world, died, lambda harness, _: ask(harness, "go"))
    if replay_now != "reconcile":
        world.install(odd_tool(body, replay=replay_now))
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)
        (result,) = await results(harness)
    assert died.struck
    assert outcome.text == "ok"
    return result, ran


@pytest.mark.parametrize(
    ("answer", "code", "text", "ran"),
    [
        (ToolResult("it happened"), None, "it happened", ["ran", "asked"]),
        (False, None, "by running", ["ran", "asked", "ran"]),
        (None, "interrupted", "unknown", ["ran", "asked"]),
        (True, "interrupted", "unknown", ["ran", "asked"]),
        (RuntimeError("cannot tell"), "interrupted", "unknown", ["ran", "asked"]),
    ],
)
async def test_a_tool_may_say_what_happened(
    autojump_clock: MockClock, answer: Any, code: str | None, text: str, ran: list[str]
) -> None:
    """After a crash a reconciling tool is asked: its result, run it, or it is unknown."""
    result, seen = await reconciled(answer)

    assert (result.code, seen) == (code, ran)
    assert text in text_of(result)


@pytest.mark.parametrize(("now", "ran"), [("safe", ["ran"]), ("interrupt", ["ran"])])
async def test_the_stricter_policy_counts(
    autojump_clock: MockClock, now: str, ran: list[str]
) -> None:
    """A call stored as reconcile is not run again because its tool says safe today."""
    result, seen = await reconciled(ToolResult("never asked"), replay_now=now)

    assert result.code == "interrupted"
    assert seen == ran


async def test_a_tool_that_is_gone_is_not_run(autojump_clock: MockClock) -> None:
    """Gone before it ran it is unavailable, gone in the middle it is interrupted."""
    # C097
    codes = []
    for point in ("CP1", "CP2"):
        world = World(calls("odd"), "ok", tools=[odd_tool(trio.sleep, replay="safe")])
        await run_killed(world, DieAt(world, point), lambda harness, _: ask(harness, "go"))
        world.install()
        async with world.open() as harness:
            outcome = await ask(harness, "go")
            await verify(world, harness)
            codes.append((outcome.text, *(each.code for each in await results(harness))))

    assert codes == [("ok", "tool_unavailable"), ("ok", "interrupted")]


async def test_a_tool_that_takes_other_arguments_now_is_not_run(
    autojump_clock: MockClock,
) -> None:
    """Changed between a crash and the restart, the outcome is unknown, and it says why."""
    ran: list[str] = []

    @tool(name="odd", replay="safe")
    async def before(call: ToolCall, what: str = "x") -> str:
        """Do it as it was."""
        ran.append(what)
        return what

    @tool(name="odd", replay="safe")
    async def after(call: ToolCall, number: int) -> str:
        """Do it as it is."""
        ran.append(str(number))
        return "done"

    world = World(calls("odd", what="this"), "ok", tools=[before])
    await run_killed(world, DieAt(world, "CP3"), lambda harness, _: ask(harness, "go"))
    world.install(after)
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)
        (result,) = await results(harness)

    assert outcome.text == "ok"
    assert result.code == "interrupted"
    assert "no longer takes these arguments" in text_of(result)
    assert ran == ["this"]


async def test_a_refused_outcome_is_in_the_history_all_the_same(
    autojump_clock: MockClock,
) -> None:
    """When the store refuses the outcome for good, the effect is not repeated and is accounted."""
    world = World(calls("once"), "ok")

    # C005
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        await world.traced.wait()
        world.storage.add(Fault.refuse(times=100))
        await trio.sleep(40)
        world.storage.clear()
        outcome = await submission.wait()
        await verify(world, harness)
        (result,) = await results(harness)

    assert outcome.text == "ok"
    assert result.code in (None, "interrupted")
    assert len(world.ledger) == 1


@attrs.frozen
class Begin:
    """Nothing happened yet."""


class Note(Task[str, Begin, str]):
    """A task that a tool owns."""

    name = "test.note"
    abort = nothing_to_undo

    def initial(self, input: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[str, Begin, str]) -> None:
        await ctx.complete(f"noted {ctx.input}")


@pytest.mark.slow
async def test_a_tool_composes_tasks_memos_and_commits(autojump_clock: MockClock) -> None:
    """What a call fixes, owns or stores beside its result is there once, at every kill."""

    def make() -> World:
        world = World(calls("odd"), "ok")

        async def body(call: ToolCall) -> str:
            stamp = await call.memo("stamp", f"stamp {len(world.ledger)}")
            world.ledger.append("ran")
            task = await call.create_task(Note, str(stamp), key="note")
            async with call.commit() as tx:
                tx.append(call.conversation_id, {"n": 1}, kind="test.seen")
            return f"{stamp} {task > 0}"

        world.install(odd_tool(body, replay="safe"), tasks=[Note()])
        return world

    async def program(harness: Harness, world: World) -> Any:
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        notes = [task for task in harness.tasks() if task.kind == "test.note"]
        (result,) = await results(harness)
        return outcome.text, len(notes), text_of(result)

    def check(world: World, found: Any) -> None:
        text, notes, result = found
        assert (text, notes) == ("ok", 1)
        assert result.startswith("stamp ")
        assert result.endswith(" True")

    kills = await crash_everywhere(make, program, check)

    assert kills > 10


async def test_a_store_that_refuses_is_not_the_tool_s_fault(autojump_clock: MockClock) -> None:
    """A refusal that a tool meets in its own commit leaves the call where it is, to go on later."""
    world = World(calls("odd"), "ok", settings=Settings(storage_retry_seconds=0.0))

    async def body(call: ToolCall) -> str:
        world.ledger.append("ran")
        if len(world.ledger) == 1:
            world.storage.add(Fault.refuse())
        return str(await call.memo("stamp", len(world.ledger)))

    world.install(odd_tool(body, replay="safe"))
    # C005, C050
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)
        (result,) = await results(harness)

    assert outcome.text == "ok"
    assert (result.code, text_of(result)) == (None, "2")
    assert world.ledger == ["ran", "ran"]


async def test_a_poisoned_session_is_not_the_tool_s_fault(autojump_clock: MockClock) -> None:
    """A store that dies under a running call leaves it where it is, for the next holder."""
    world = World(calls("safe"), "ok")

    async def lose_the_store() -> None:
        async with world.open() as harness:
            root = await harness.root()
            submission = await root.submit("go", request_id="r1")
            await world.traced.wait()
            world.storage.add(Fault.lose())
            await submission.wait()

    # C050
    with pytest.raises(SessionPoisonedError):
        await lose_the_store()
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "ok"
    assert len(world.ledger) == 2


async def test_details_and_structured_output_that_fit_only_apart_are_an_error_result() -> None:
    """What cannot be stored as one value is told to the model; the call does not fault."""

    async def body(call: ToolCall) -> ToolResult:
        return ToolResult("x", details="d" * 9_000_000, structured={"s": "s" * 9_000_000})

    result, _, task = await run_odd(body)

    assert result.code == "tool_error"
    assert "$<result>" in text_of(result)
    assert task.status == "failed"


async def test_a_wrapped_tool_runs_inside_its_wrap(autojump_clock: MockClock) -> None:
    """The wrap of another extension sees the call's arguments and result, in the agent loop too."""

    def loud(wrapped: Tool[..., Any]) -> Tool[..., Any]:
        async def around(arguments: Any, call: ToolCall, invoke: Any) -> str:
            return f"{await invoke({**arguments, 'what': 'y'}, call)}!"

        return wrapped.around(around)

    world = World(calls("safe"), "ok")
    world.registry.install(Extension("loud", wraps=[wrap_tool("safe", loud)]))

    async with world.open() as harness:
        await ask(harness, "go")
        (result,) = await results(harness)

    assert text_of(result) == "saw y!"


@pytest.mark.parametrize("point", ["document", "submission"])
async def test_a_read_that_failed_in_a_sub_agent_is_no_fault_of_the_tool(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """A tool that may be repeated is, and the model is told what it says then."""
    # C075
    monkeypatch.setattr(_submissions, "_ROWS_KEPT", 0)
    child_says = Step(text="a child's word", when=When(user="speak"))
    world = World(child_says, calls("delegate"), "ok")

    @tool(replay="safe")
    async def delegate(call: ToolCall) -> str:
        """Ask another agent, while the disk fails once."""
        child = await call.child()
        if not world.ledger:
            world.storage.add(Fault.fail(point))
        world.ledger.append("asked")
        submission = await child.submit("speak", request_id=call.key("task"))
        text: str = (await submission.wait()).text
        return text

    world.install(delegate)
    async with world.open() as harness:
        with trio.fail_after(1000):
            outcome = await ask(harness, "go")
            await harness.wait_for_idle()
        (result,) = await results(harness)

    assert (outcome.text, text_of(result), result.is_error) == ("ok", "a child's word", False)
    assert world.ledger == ["asked", "asked"]
