"""`before_tool`, `after_tool` and `on_abort` in the loop: asked in time, and never a way around."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from agent_world import (
    DieAt,
    World,
    ask,
    calls,
    odd_tool,
    results,
    run_killed,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable import (
    AfterTool,
    BeforeTool,
    BlockCall,
    OnAbort,
    Rewrite,
    TextBlock,
    ToolResult,
    ToolTask,
)
from pidurable.errors import OutcomeUnknownError
from pidurable.registry import Extension, ToolCall, hook, schema_tool, tool
from pidurable.testing import Step, When


def world_with(*steps: Any, tools: Any = (), **handlers: Any) -> World:
    """A world whose tool hooks are given, each by one extension or by several."""
    world = World(*steps, tools=tools)
    for name, handler in handlers.items():
        several = handler if isinstance(handler, list) else [handler]
        for place, each in enumerate(several):
            hooked = hook(ToolTask, **{name: each})
            world.registry.install(Extension(f"{name}-{place}", hooks=[hooked]))
    return world


async def run(world: World) -> tuple[Any, Any]:
    """One input to its answer; the result of its only call, and how its task ended."""
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        await verify(world, harness)
        (result,) = await results(harness)
        (task,) = [task for task in harness.tasks() if task.kind == "pi.tool"]
    assert outcome.text == "ok"
    return result, task.outcome


# --- before_tool --------------------------------------------------------------------------------


async def test_a_hook_rewrites_what_runs(autojump_clock: MockClock) -> None:
    """Each rewrite is what the next hook sees, and the last is what runs and is stored."""
    seen: list[Any] = []

    def add(letter: str) -> Any:
        async def before(call: BeforeTool) -> Rewrite:
            seen.append((call.name, call.arguments, call.nested, call.grant))
            return Rewrite({"what": call.arguments["what"] + letter})

        return before

    world = world_with(calls("safe", what="a"), "ok", before_tool=[add("b"), add("c")])
    result, _ = await run(world)

    assert text_of(result) == "saw abc"
    assert seen == [("safe", {"what": "a"}, False, None), ("safe", {"what": "ab"}, False, None)]


async def test_a_hook_that_changes_what_it_was_given_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    """What a hook gets is a copy; only its answer counts."""

    async def before(call: BeforeTool) -> None:
        call.arguments["what"] = "changed"

    result, _ = await run(world_with(calls("safe", what="a"), "ok", before_tool=before))

    assert text_of(result) == "saw a"


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (BlockCall("not on a Sunday"), "blocked", "not on a Sunday"),
        (Rewrite({"other": 1}), "invalid_arguments", "an extension has changed its arguments"),
        (Rewrite("text"), "invalid_arguments", "not a JSON object"),
        (Rewrite({"what": {1}}), "blocked", "gave arguments"),
        ("yes", "blocked", "answered 'yes'"),
        (RuntimeError("broken"), "blocked", "RuntimeError: broken"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_call_that_is_not_to_run_does_not(
    autojump_clock: MockClock, answer: Any, code: str, said: str
) -> None:
    """Blocked, rewritten to what does not fit, broken guard: the tool has not run, and it says."""

    async def before(call: BeforeTool) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    world = world_with(calls("once", what="a"), "ok", before_tool=before)
    result, outcome = await run(world)

    assert (result.is_error, result.code) == (True, code)
    assert said in text_of(result)
    assert outcome.status == "completed"
    assert world.ledger == []


async def test_a_hook_is_not_asked_for_what_the_model_got_wrong(
    autojump_clock: MockClock,
) -> None:
    """Arguments are valid before a hook sees them."""
    asked: list[Any] = []

    async def before(call: BeforeTool) -> None:
        asked.append(call.arguments)

    world = world_with(calls("safe", other=1), "ok", before_tool=before)
    result, _ = await run(world)

    assert result.code == "invalid_arguments"
    assert asked == []


@pytest.mark.parametrize(("point", "asked"), [("CP1", 2), ("CP2", 1), ("CP3", 1)])
async def test_what_a_hook_has_decided_is_not_decided_again(
    autojump_clock: MockClock, point: str, asked: int
) -> None:
    """The intent fixes the arguments: a safe call that runs again asks no `before_tool` hook.

    What was asked before the intent is stored is asked again, and the last decision counts.
    """
    decided: list[Any] = []

    async def before(call: BeforeTool) -> Rewrite:
        decided.append(call.task)
        return Rewrite({"what": f"decision {len(decided)}"})

    world = world_with(calls("safe", what="a"), "ok", before_tool=before)
    died = DieAt(world, point)
    await run_killed(world, died, lambda harness, _: ask(harness, "go"))
    result, _ = await run(world)

    assert died.struck
    assert len(decided) == asked
    assert text_of(result) == f"saw decision {asked}"


# --- after_tool ---------------------------------------------------------------------------------


async def test_a_tool_that_changes_its_arguments_changes_nothing_that_is_stored(
    autojump_clock: MockClock,
) -> None:
    """What a tool does to its arguments is in no hook, and in no intent that it runs again by."""
    seen: list[Any] = []

    async def odd(arguments: Any, call: ToolCall) -> str:
        seen.append(dict(arguments))
        arguments["what"] = "changed"
        if len(seen) == 1:
            raise OutcomeUnknownError("it went silent")
        return "done"

    async def after_tool(call: AfterTool) -> None:
        seen.append(call.arguments)

    made = schema_tool("odd", "Do it.", {"type": "object"}, odd, replay="safe")
    await run(world_with(calls("odd", what="x"), "ok", tools=[made], after_tool=after_tool))
    assert seen == [{"what": "x"}] * 3


async def test_results_are_replaced_in_order(autojump_clock: MockClock) -> None:
    """Each hook sees what the one before has made of the result; the last is what is stored."""

    async def shout(call: AfterTool) -> ToolResult:
        assert call.result.content == (TextBlock(text="saw a"),)
        return ToolResult("SAW A", details={"n": 1})

    async def mark(call: AfterTool) -> ToolResult:
        (block,) = call.result.content  # type: ignore[misc]
        return ToolResult(block.text + "!", structured=call.result.details)

    world = world_with(calls("safe", what="a"), "ok", after_tool=[shout, mark])
    result, outcome = await run(world)
    async with world.open() as harness:
        entries = await (await harness.root()).history()
    (entry,) = [entry for entry in entries if entry.kind == "pi.tool_result"]

    assert text_of(result) == "SAW A!"
    assert entry.data == {"details": {"n": 1}, "structured": {"n": 1}}
    assert outcome.result["is_error"] is False


async def test_what_a_hook_leaves_out_stays(autojump_clock: MockClock) -> None:
    """Without content the content stays; error, flags and the rest are what the hook says."""

    async def end(call: AfterTool) -> ToolResult:
        return ToolResult(error=True, terminate=True, handoff="take over", add_tools=["safe"])

    taken_over = Step(text="ok", when=When(text="take over"))
    result, outcome = await run(world_with(taken_over, calls("safe", what="a"), after_tool=end))

    assert (text_of(result), result.is_error, result.code) == ("saw a", True, "tool_error")
    assert outcome.result["terminate"] is True
    assert outcome.result["handoff"] == "take over"
    assert outcome.result["add_tools"] == ["safe"]


@pytest.mark.parametrize(
    "bad",
    [
        RuntimeError("broken"),
        "a text",
        ToolResult(5),  # type: ignore[arg-type]
        ToolResult("x", details=float("nan")),
        ToolResult("x", handoff=" "),
        ToolResult("x", add_tools=["not a name"]),
    ],
    ids=["raises", "text", "number", "nan", "blank note", "bad name"],
)
async def test_a_hook_that_gives_no_result_is_skipped(autojump_clock: MockClock, bad: Any) -> None:
    """What one hook gets wrong does not undo what another one took out."""

    async def redact(call: AfterTool) -> ToolResult:
        return ToolResult("redacted")

    async def breaks(call: AfterTool) -> Any:
        if isinstance(bad, Exception):
            raise bad
        return bad

    world = world_with(calls("safe", what="secret"), "ok", after_tool=[redact, breaks])
    result, outcome = await run(world)

    assert text_of(result) == "redacted"
    assert outcome.status == "completed"


async def test_a_replaced_result_is_bounded(autojump_clock: MockClock) -> None:
    """A hook's text has the limits of the tool."""

    async def flood(call: AfterTool) -> ToolResult:
        return ToolResult("x" * 1000)

    async def body(_: ToolCall) -> str:
        return "short"

    made = odd_tool(body, output_bytes_max=100)
    result, _ = await run(world_with(calls("odd"), "ok", tools=[made], after_tool=flood))

    assert "dropped" in text_of(result)
    assert len(text_of(result)) < 200


async def test_no_result_of_a_call_that_may_have_run_goes_past_the_hooks(
    autojump_clock: MockClock,
) -> None:
    """Raised, timed out, interrupted by a crash, reconciled: what a hook takes out stays out."""

    async def redact(call: AfterTool) -> ToolResult:
        (block,) = call.result.content  # type: ignore[misc]
        return ToolResult(block.text.replace("secret", "***"), error=call.result.error)

    async def raises(call: ToolCall) -> None:
        raise ValueError("secret")

    async def hangs(call: ToolCall) -> None:
        await call.output("secret")
        await trio.sleep(100)

    async def reconcile(arguments: Any, call: ToolCall) -> ToolResult:
        return ToolResult("secret")

    found: list[tuple[str | None, str]] = []
    for body, options, point in (
        (raises, {}, None),
        (hangs, {"timeout": 1.0}, None),
        (hangs, {"timeout": 1.0}, "CP3"),
        (hangs, {"timeout": 1.0, "replay": "reconcile", "reconcile": reconcile}, "CP3"),
    ):
        made = odd_tool(body, **options)
        world = world_with(calls("odd"), "ok", tools=[made], after_tool=redact)
        if point is not None:
            await run_killed(world, DieAt(world, point), lambda harness, _: ask(harness, "go"))
        result, _ = await run(world)
        found.append((result.code, text_of(result)))

    assert [code for code, _ in found] == ["tool_error", "timeout", "interrupted", None]
    assert all("***" in text and "secret" not in text for _, text in found)


# --- on_abort -----------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [True, False])
async def test_an_aborted_result_may_be_replaced(autojump_clock: MockClock, started: bool) -> None:
    """The hook learns whether the tool may have run, and its words are what the model gets."""
    asked: list[tuple[bool, Any]] = []

    async def word(call: OnAbort) -> ToolResult:
        asked.append((call.started, call.arguments))
        return ToolResult("stopped by hand", error=True)

    async def hold(call: BeforeTool) -> None:
        world.reached.set()
        await trio.sleep_forever()

    handlers: dict[str, Any] = {"on_abort": word} | ({} if started else {"before_tool": hold})
    world = world_with(calls("slow"), "never", **handlers)
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        await root.abort()
        await submission.wait()
        await verify(world, harness)
        (result,) = await results(harness)

    assert asked == [(started, {})]
    assert (text_of(result), result.is_error, result.code) == ("stopped by hand", True, "aborted")


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_a_broken_abort_hook_does_not_hold_up_an_abort(
    autojump_clock: MockClock, how: str
) -> None:
    """It is reported and skipped; the call ends aborted with its own words."""

    async def breaks(call: OnAbort) -> ToolResult:
        if how == "hangs":
            await trio.sleep_forever()
        raise RuntimeError("broken")

    world = world_with(calls("slow"), "never", on_abort=breaks)
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        await root.abort()
        with trio.fail_after(1e5):
            await submission.wait()
        await verify(world, harness)
        (result,) = await results(harness)

    assert result.code == "aborted"
    assert text_of(result).startswith("The call was aborted while it ran")


async def test_a_hook_sees_nested_calls_too(autojump_clock: MockClock) -> None:
    """A tool is no way around a guard: what it calls is asked for as what the model calls."""
    seen: list[tuple[str, bool]] = []

    async def guard(call: BeforeTool) -> BlockCall | None:
        seen.append((call.name, call.nested))
        return BlockCall("no") if call.name == "once" else None

    @tool
    async def outer(call: ToolCall) -> str:
        """Call another tool."""
        inner = await call.execute_tool("once", {})
        return f"{inner.code}: {inner.text}"

    world = world_with(calls("outer"), "ok", tools=[outer], before_tool=guard)
    async with world.open() as harness:
        await ask(harness, "go")
        await verify(world, harness)
        (result,) = await results(harness)

    assert text_of(result) == "blocked: no"
    assert seen == [("outer", False), ("once", True)]
    assert world.ledger == []
