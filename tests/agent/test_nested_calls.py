"""Nested calls: a tool calls another as the model would, once, however often it begins again."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import agent_world
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
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.agent._call_output import OutputDocument
from pidurable.agent._script import Step, When
from pidurable.agent._tool_arguments import validated
from pidurable.errors import InvalidArgumentError, NotJsonError, OwnedTooDeepError
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.records._messages import ImageBlock, TextBlock, Usage
from pidurable.registry import CallResult, Tool, ToolCall, ToolResult, tool


async def run(body: Any, *tools: Tool[..., Any], **options: Any) -> tuple[str, World, Any]:
    """Let the model call the odd tool once; the text of its result, and every tool task."""
    world = World(calls("odd"), "ok", tools=[odd_tool(body, replay="safe"), *tools], **options)
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        await verify(world, harness)
        (result,) = await results(harness)
        tasks = [task for task in harness.tasks() if task.kind == "pi.tool"]
    assert outcome.text == "ok"
    return text_of(result), world, tasks


async def test_a_nested_call_gives_its_result_to_its_caller_alone(
    autojump_clock: MockClock,
) -> None:
    """Text, blocks, structured output and details come back; the model sees the caller's result."""
    got: list[CallResult] = []

    @tool(output_schema={"type": "object"})
    async def inner(call: ToolCall) -> ToolResult:
        """Give back everything."""
        name = await call.put_blob(b"bytes")
        image = ImageBlock(blob=name, media_type="image/png")
        return ToolResult(
            [TextBlock(text="one"), image, TextBlock(text="two")],
            structured={"n": 1},
            details={"d": 2},
            usage=Usage(requests=1),
        )

    async def body(call: ToolCall) -> str:
        got.append(await call.execute_tool("inner", {}))
        return "done"

    text, world, tasks = await run(body, inner)
    async with world.open() as harness:
        root = await harness.root()
        (place,) = [each for each in await root.history() if each.kind == "pi.nested_result"]
        usage = root.usage()["tools"]

    (result,) = got
    assert text == "done"
    assert (result.text, result.structured, result.details) == ("onetwo", {"n": 1}, {"d": 2})
    assert (result.is_error, result.code, len(result.blocks)) == (False, None, 3)
    outer, nested = tasks
    assert (nested.owner, nested.id) == (outer.id, result.task)
    assert place.messages == ()
    assert place.data == {
        "task": nested.id,
        "caller": outer.id,
        "name": "inner",
        "is_error": False,
        "code": None,
    }
    assert usage["inner"]["requests"] == 1


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("no_such_tool", {}, "tool_unavailable"),
        ("safe", {"other": 1}, "invalid_arguments"),
        ("safe", [1], "invalid_arguments"),
        ("raises", {}, "tool_error"),
        ("hangs", {}, "timeout"),
    ],
)
async def test_an_error_of_a_nested_call_is_a_result(
    autojump_clock: MockClock, name: str, arguments: Any, code: str
) -> None:
    """Whatever went wrong in it, the caller gets the result that a model would get."""

    async def raises(_: ToolCall) -> None:
        raise ValueError("mine")

    async def hangs(_: ToolCall) -> None:
        await trio.sleep_forever()

    made = [
        attrs.evolve(odd_tool(raises), name="raises"),
        attrs.evolve(odd_tool(hangs, timeout=1.0), name="hangs"),
    ]

    async def body(call: ToolCall) -> str:
        result = await call.execute_tool(name, arguments)
        return f"{result.is_error} {result.code}"

    text, _, _ = await run(body, *made)

    assert text == f"True {code}"


async def test_what_cannot_be_called_is_refused_at_the_caller_s_line(
    autojump_clock: MockClock,
) -> None:
    """Names, keys and arguments that could not be stored raise, and make no task."""
    refused: list[type[Exception]] = []

    async def body(call: ToolCall) -> str:
        for name, arguments, key in (
            ("", {}, None),
            (5, {}, None),
            ("safe", {"what": float("nan")}, None),
            ("safe", {1: 2}, None),
            ("safe", {}, ""),
            ("safe", {}, "\ud800"),
        ):
            with pytest.raises((InvalidArgumentError, NotJsonError)) as caught:
                await call.execute_tool(name, arguments, key=key)  # type: ignore[arg-type]
            refused.append(caught.type)
        return "ok"

    text, _, tasks = await run(body)

    assert text == "ok"
    assert len(refused) == 6
    assert len(tasks) == 1


async def test_concurrent_calls_need_keys(autojump_clock: MockClock) -> None:
    """A second call without a key beside a running one is refused; with keys both run at once."""

    async def body(call: ToolCall) -> str:
        refused: list[str] = []

        async def plain() -> None:
            try:
                await call.execute_tool("safe", {})
            except InvalidArgumentError as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(plain)
            nursery.start_soon(plain)
        got: dict[int, str] = {}

        async def keyed(number: int) -> None:
            result = await call.execute_tool("safe", {"what": str(number)}, key=f"n{number}")
            got[number] = result.text

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(keyed, number)
        assert trio.current_time() - began < 0.02
        assert got == {number: f"saw {number}" for number in range(5)}
        (said,) = refused
        return said

    text, world, _ = await run(body)

    assert "a call of 'safe' without a key is running" in text
    assert "give each a key" in text
    assert len(world.ledger) == 6


@pytest.mark.slow
async def test_calls_are_found_again_after_every_kill(
    autojump_clock: MockClock, slow_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that begins again gets what it had called, by order and by key; no effect twice."""
    if not slow_run:
        monkeypatch.setattr(agent_world, "KILL_STEP", 5)

    def make() -> World:
        world = World(calls("odd"), "ok")

        async def body(call: ToolCall) -> str:
            first = await call.execute_tool("once", {"what": "1"})
            second = await call.execute_tool("once", {"what": "2"}, key="two")
            third = await call.execute_tool("once", {"what": "3"})
            return " ".join(each.code or each.text for each in (first, second, third))

        world.install(odd_tool(body, replay="safe"))
        return world

    async def program(harness: Harness, world: World) -> Any:
        await ask(harness, "go")
        await harness.wait_for_idle()
        (result,) = await results(harness)
        return text_of(result), len([t for t in harness.tasks() if t.kind == "pi.tool"])

    def check(world: World, found: Any) -> None:
        text, tasks = found
        assert tasks == 4
        every = Counter(line.split()[1] for line in world.ledger)
        assert set(every.values()) == {1}
        # A call that was killed in the middle is interrupted; all others have run.
        assert text.count("interrupted") <= 1
        assert text.count("did") + text.count("interrupted") == 3

    kills = await crash_everywhere(make, program, check)

    assert kills >= (20 if slow_run else 5)


async def test_a_running_call_is_found_while_it_runs(autojump_clock: MockClock) -> None:
    """A caller that died beside its nested call joins it, finished or not."""
    world = World(calls("odd"), "ok")

    async def inner(call: ToolCall) -> str:
        world.ledger.append(f"inner {call.id}")
        await call.sleep(30)
        return "at last"

    async def body(call: ToolCall) -> str:
        world.ledger.append("outer")
        return (await call.execute_tool("inner", {})).text

    made = attrs.evolve(odd_tool(inner, replay="safe"), name="inner")
    world.install(odd_tool(body, replay="safe"), made)
    async with world.open() as harness:
        await (await harness.root()).submit("go", request_id="r1")
        await trio.sleep(5)
    async with world.open() as harness:
        await ask(harness, "go")
        await verify(world, harness)
        (result,) = await results(harness)

    assert text_of(result) == "at last"
    assert world.ledger.count("outer") == 2
    assert len({line for line in world.ledger if line.startswith("inner")}) == 1


@pytest.mark.parametrize("change", ["tool", "arguments"])
async def test_another_call_in_its_place_is_refused(autojump_clock: MockClock, change: str) -> None:
    """A caller that calls otherwise when it runs again never gets another call's result."""
    world = World(calls("odd"), "ok")

    async def body(call: ToolCall) -> str:
        again = bool(world.ledger)
        name = "once" if again and change == "tool" else "safe"
        what = "b" if again and change == "arguments" else "a"
        return (await call.execute_tool(name, {"what": what})).text

    world.install(odd_tool(body, replay="safe"))
    # The second intent that is stored is that of the nested call.
    await run_killed(world, DieAt(world, "CP3"), lambda harness, _: ask(harness, "go"))
    async with world.open() as harness:
        await ask(harness, "go")
        await verify(world, harness)
        (result,) = await results(harness)

    assert result.code == "tool_error"
    assert "'call 0' of this call is a call of 'safe' already" in text_of(result)
    assert ("other arguments" in text_of(result)) is (change == "arguments")
    assert not any(line.startswith("once") for line in world.ledger)


async def test_nested_calls_do_not_wait_for_their_callers_slots(autojump_clock: MockClock) -> None:
    """With one slot for all calls, callers lend theirs: five levels of two calls come to an end."""
    world = World(calls("deep", "deep", level=4), "ok")
    world.settings = Settings(limits={"pi.tool": 1})

    @tool(replay="safe")
    async def deep(level: int, call: ToolCall) -> str:
        """Call itself twice.

        Args:
            level: How deep still.
        """
        world.ledger.append("ran")
        if not level:
            return "leaf"
        found = [
            (await call.execute_tool("deep", {"level": level - 1}, key=str(number))).text
            for number in range(2)
        ]
        return " ".join(found)

    world.install(deep)
    async with world.open() as harness:
        with trio.fail_after(1000):
            await ask(harness, "go")
        await verify(world, harness)
        found = await results(harness)

    assert [text_of(each).count("leaf") for each in found] == [16, 16]
    assert len(world.ledger) == 2 * 31


async def test_nested_calls_are_bounded_in_depth(autojump_clock: MockClock) -> None:
    """A tool that calls itself for ever is stopped by a result that says so."""

    async def body(call: ToolCall) -> str:
        return (await call.execute_tool("odd", {})).text

    text, _, tasks = await run(body, settings=Settings(owned_depth_max=3))

    assert "OwnedTooDeepError: a nested call may be owned at most 3 levels deep" in text
    assert len(tasks) == 4
    assert str(OwnedTooDeepError(3)).startswith("a conversation may be owned at most 3 levels")


async def test_an_abort_ends_nested_calls_from_the_bottom_up(autojump_clock: MockClock) -> None:
    """Everything below the aborted call has ended before it, with results that say so."""
    world = World(calls("odd"), "never")
    levels = 4

    async def body(call: ToolCall) -> str:
        if len(world.ledger) == levels:
            world.reached.set()
            await trio.sleep_forever()
        world.ledger.append(f"level {call.id}")
        try:
            return (await call.execute_tool("odd", {})).text
        finally:
            world.ledger.append(f"left {call.id}")

    world.install(odd_tool(body, replay="safe"))
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        await root.abort()
        await submission.wait()
        await harness.wait_for_idle()
        await verify(world, harness)
        tasks = [task for task in harness.tasks() if task.kind == "pi.tool"]
        places = [each for each in await root.history() if each.kind == "pi.nested_result"]
        (result,) = await results(harness)

    assert [task.outcome.status for task in tasks if task.outcome] == ["aborted"] * (levels + 1)
    # In order of depth: who is deeper has ended earlier.
    ended = [task.outcome.result["entry"] for task in tasks if task.outcome]
    assert ended == sorted(ended, reverse=True)
    assert [each.data["code"] for each in places] == ["aborted"] * levels
    assert result.code == "aborted"


async def test_of_calls_under_one_key_at_once_only_the_same_one_is_found_again(
    autojump_clock: MockClock,
) -> None:
    """Also where one commit creates them: another tool, or other arguments, are no such call."""
    given = [("a", "safe"), ("b", "safe"), ("a", "once"), ("a", "safe")]
    got: dict[int, str] = {}

    async def body(call: ToolCall) -> str:
        async def one(place: int, what: str, name: str) -> None:
            try:
                found = await call.execute_tool(name, {"what": what}, key="k")
                got[place] = found.text
            except InvalidArgumentError as error:
                got[place] = error.problem.partition(", ")[2].partition(";")[0]

        async with trio.open_nursery() as nursery:
            # While its commit is on its way, the others gather.
            nursery.start_soon(call.execute_tool, "safe", {"what": "first"})
            await trio.lowlevel.checkpoint()
            for place, (what, name) in enumerate(given):
                nursery.start_soon(one, place, what, name)
        return "done"

    text, world, tasks = await run(body)

    assert text == "done"
    assert len(tasks) == 3
    assert len(world.ledger) == 2
    refused = ("with other arguments", "not of this tool")
    (kept,) = {given[place] for place, said in got.items() if said not in refused}
    for place, said in got.items():
        if given[place] == kept:
            assert said not in refused
        else:
            assert said == refused[given[place][1] != kept[1]]


async def test_a_nested_call_that_a_person_aborts_is_an_aborted_result(
    autojump_clock: MockClock,
) -> None:
    """The caller goes on with a result that says so, before it began as well as while it ran."""
    world = World(calls("odd"), "ok")
    world.settings = Settings(limits={"pi.tool": 1})
    got: dict[str, CallResult] = {}

    async def body(call: ToolCall) -> str:
        async def one(name: str) -> None:
            got[name] = await call.execute_tool(name, {}, key=name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "slow")
            await world.reached.wait()
            nursery.start_soon(one, "safe")
        return "went on"

    world.install(odd_tool(body, replay="safe"))
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        await trio.sleep(1)
        nested = [task for task in harness.tasks() if task.input.get("caller")]
        for task in reversed(nested):
            await harness.abort_task(task.id)
        assert (await submission.wait()).text == "ok"
        await verify(world, harness)
        (result,) = await results(harness)

    assert text_of(result) == "went on"
    assert {name: (each.is_error, each.code) for name, each in got.items()} == {
        "slow": (True, "aborted"),
        "safe": (True, "aborted"),
    }
    assert not any(line.startswith("safe") for line in world.ledger)


async def test_deep_values_come_back_from_nested_calls(autojump_clock: MockClock) -> None:
    """What a model's call may return, a nested one may: the outcome is no place to fail in."""

    def nest(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return value

    got: list[tuple[int, str | None]] = []

    @tool(output_schema={})
    async def inner(depth: int, call: ToolCall) -> ToolResult:
        """Return something deep.

        Args:
            depth: How deep.
        """
        return ToolResult("x", structured=nest(depth))

    async def body(call: ToolCall) -> str:
        for depth in (100, 195, 196, 197, 198, 199, 200):
            result = await call.execute_tool("inner", {"depth": depth})
            assert (result.structured == nest(depth)) is (result.code is None)
            got.append((depth, result.code))
        return "done"

    text, _, tasks = await run(body, inner)

    assert text == "done"
    assert got[0] == (100, None)
    assert got[-1] == (200, "tool_error")
    assert {code for _, code in got} == {None, "tool_error"}
    assert all(task.outcome.status in ("completed", "failed") for task in tasks)


@pytest.mark.parametrize("owned", ["nested", "sub-agent"])
async def test_what_an_interrupted_call_owned_does_nothing_more(
    autojump_clock: MockClock, owned: str
) -> None:
    """A caller that may not begin again hears of nothing any more: what it began is aborted."""
    step = Step(calls=calls("slow").calls, when=When(user="the task"))
    world = World(step, calls("odd"), "ok")

    async def body(call: ToolCall) -> str:
        if owned == "nested":
            return (await call.execute_tool("slow", {})).text
        child = await call.child()
        return (await (await child.submit("the task", request_id=call.key("x"))).wait()).text

    world.install(odd_tool(body))
    async with world.open() as harness:
        await (await harness.root()).submit("go", request_id="r1")
        await world.reached.wait()
    async with world.open() as harness:
        with trio.fail_after(100):
            outcome = await ask(harness, "go")
            await harness.wait_for_idle()
        await verify(world, harness)
        (result,) = await results(harness)
        ended = {task.kind: task.outcome.status for task in harness.tasks() if task.owner}
        slow = [task for task in harness.tasks() if task.input.get("name") == "slow"]

    assert (outcome.text, result.code) == ("ok", "interrupted")
    assert [task.outcome.status for task in slow] == ["aborted"]
    assert ended["pi.tool"] == "aborted"


async def test_a_nested_call_that_faults_is_an_unknown_outcome(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours in it ends it alone; its caller is told, and goes on."""

    def broken(made: Any, arguments: Any) -> Any:
        if made.name == "once":
            raise LookupError("a bug of ours")
        return validated(made, arguments)

    monkeypatch.setattr("pidurable.agent._tool_call.validated", broken)

    async def body(call: ToolCall) -> str:
        result = await call.execute_tool("once", {})
        return f"{result.is_error} {result.code}: {result.text}"

    text, world, tasks = await run(body)

    assert text.startswith("True interrupted: The call ended by a fault.")
    assert [task.outcome.status for task in tasks] == ["completed", "faulted"]
    assert world.ledger == []


async def test_a_reconcile_calls_no_tools(autojump_clock: MockClock) -> None:
    """What it would get is the answer of the first time that it was asked."""
    said: list[str] = []

    async def reconcile(arguments: Any, call: ToolCall) -> Any:
        try:
            await call.execute_tool("safe", {})
        except InvalidArgumentError as error:
            said.append(str(error))
        return ToolResult("it happened")

    async def body(call: ToolCall) -> str:
        return (await call.execute_tool("safe", {})).text

    made = odd_tool(body, replay="reconcile", reconcile=reconcile)
    world = World(calls("odd"), "ok", tools=[made])
    # Passed by the nested call first.
    died = DieAt(world, "CP3", 2)
    await run_killed(world, died, lambda harness, _: ask(harness, "go"))
    async with world.open() as harness:
        await ask(harness, "go")
        await verify(world, harness)
        (result,) = await results(harness)

    assert died.struck
    assert text_of(result) == "it happened"
    assert len(said) == 1
    assert "reconcile cannot call tools" in said[0]


@pytest.mark.parametrize("end", ["killed", "killed, runs again", "aborted"])
async def test_what_a_nested_call_had_put_out_is_kept(autojump_clock: MockClock, end: str) -> None:
    """Cut short, its result has output, details and diagnostics so far; run again, the new ones."""
    world = World(calls("odd"), "ok")
    lives: list[int] = []
    got: list[CallResult] = []

    async def inner(call: ToolCall) -> str | None:
        lives.append(call.id)
        life = len(lives)
        await call.output(f"life {life}\n")
        if life == 1:
            await call.details({"of": life})
            await call.diagnostic("warning", f"said in life {life}")
        if life == 2:
            return None
        await trio.sleep(1)
        world.reached.set()
        await trio.sleep_forever()
        raise AssertionError

    async def body(call: ToolCall) -> str:
        got.append(await call.execute_tool("inner", {}))
        return "went on"

    policy = "safe" if end == "killed, runs again" else "interrupt"
    made = attrs.evolve(odd_tool(inner, replay=policy), name="inner")
    world.install(odd_tool(body, replay="safe"), made)
    async with world.open() as harness:
        submission = await (await harness.root()).submit("go", request_id="r1")
        await world.reached.wait()
        if end == "aborted":
            await harness.abort_task(lives[0])
            assert (await submission.wait()).text == "ok"
    async with world.open() as harness:
        assert (await ask(harness, "go")).text == "ok"
        await harness.wait_for_idle()
        await verify(world, harness)
        left = harness.snapshot(OutputDocument, lives[0])

    (result,) = got
    assert left is None
    assert [row.name for row in world.base.documents_ever(2, lives[0])] == ["pi.output"]
    if end == "killed, runs again":
        assert (result.text, result.details) == ("life 2\n", None)
        return
    assert len(lives) == 1
    assert result.code == {"killed": "interrupted", "aborted": "aborted"}[end]
    assert "Output so far:\nlife 1\n" in result.text
    assert "warning: said in life 1" in result.text
    assert result.details == {"of": 1}


async def test_a_nested_call_that_shows_nothing_has_no_document(autojump_clock: MockClock) -> None:
    """What is over before it would be shown, or says nothing, costs no document of its own."""
    seen: list[Any] = []

    async def body(call: ToolCall) -> str:
        quick = await call.execute_tool("says", {"what": "at once"}, key="quick")
        await trio.sleep(1)
        return quick.text

    @tool
    async def says(what: str, call: ToolCall) -> None:
        """Say something, and end.

        Args:
            what: It.
        """
        await call.output(what)
        await call.output("")
        seen.append(call.id)

    text, world, _ = await run(body, says)

    assert text == "at once"
    rows = world.base.documents_ever(2, seen[0])
    assert rows == []


@pytest.mark.parametrize("passed_on", [False, True])
async def test_what_a_nested_call_asks_of_the_run_is_its_caller_s_to_ask(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, passed_on: bool
) -> None:
    """The caller gets it; its own result counts for the run, and what that drops is reported."""

    async def inner(call: ToolCall) -> ToolResult:
        return ToolResult("x", terminate=True, handoff="a note", add_tools=["slow"])

    async def body(call: ToolCall) -> ToolResult:
        got = await call.execute_tool("inner", {})
        assert (got.terminate, got.handoff, got.add_tools) == (True, "a note", ("slow",))
        if not passed_on:
            return ToolResult("done")
        return ToolResult(
            "done", terminate=got.terminate, handoff=got.handoff, add_tools=got.add_tools
        )

    made = attrs.evolve(odd_tool(inner), name="inner")
    fresh = Step(text="ok", when=lambda view: "a note" in view.text)
    world = World(calls("odd"), fresh if passed_on else "ok")
    world.install(odd_tool(body), made)
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)

    last = [text_of(item.message) for item in world.model.requests[-1].messages]
    assert outcome.text == "ok"
    assert any("a note" in each for each in last) is passed_on
    dropped = "of 'inner' asks for handoff, terminate, add_tools, which counts for nothing"
    assert (dropped in caplog.text) is not passed_on


async def test_a_nested_call_that_waits_for_its_turn_holds_no_more_than_a_wait_for_an_event(
    autojump_clock: MockClock,
) -> None:
    """Thousands of them may wait, and the garbage collector walks all that they hold."""
    held: dict[str, int] = {}
    calls_made = 200

    def note(what: str) -> None:
        gc.collect()
        held[what] = len(gc.get_objects())

    async def body(call: ToolCall) -> str:
        begin = trio.Event()

        async def one(number: int) -> None:
            await begin.wait()
            await call.execute_tool("safe", {}, key=str(number))

        async with trio.open_nursery() as nursery:
            for number in range(calls_made):
                nursery.start_soon(one, number)
            await wait_all_tasks_blocked()
            # Nobody else has the line meanwhile.
            async with call.commit():
                note("events")
                begin.set()
                await wait_all_tasks_blocked()
                note("calls")
        return "done"

    text, _, tasks = await run(body)

    assert text == "done"
    assert len(tasks) == calls_made + 1
    # The first one leads, and is some steps further.
    assert held["calls"] - held["events"] < calls_made / 2
