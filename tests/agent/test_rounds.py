"""Rounds: which calls run when, and what follows when all of them have ended."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio
from agent_world import (
    World,
    ask,
    calls,
    check_transcript,
    crash_everywhere,
    messages,
    odd_tool,
    results,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable.agent._script import Step, When
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.records._messages import (
    AssistantMessage,
    TextBlock,
    ToolResultMessage,
    UserMessage,
)
from pidurable.registry import Tool, ToolCall, section, tool
from pidurable.session._participants import Participant


class Order:
    """A sequential tool that notes when its calls begin and end, and what is shown meanwhile."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.shown: list[list[tuple[int, str, bool]]] = []
        self.harness: Harness | None = None
        self.reached = trio.Event()
        self.hang_at: int | None = None

    def tool(self) -> Tool[..., Any]:
        """The tool."""

        @tool(sequential=True, replay="safe")
        async def step(call: ToolCall) -> str:
            """Take a step."""
            self.log.append(f"begin {call.id}")
            if self.harness is not None:
                live = self.harness.conversation(call.conversation_id).live()
                self.shown.append(
                    [(c["index"], c["status"], c["task"] is None) for c in live["calls"]]
                )
            begun = sum(line.startswith("begin") for line in self.log)
            if begun - 1 == self.hang_at:
                self.reached.set()
                await trio.sleep_forever()
            await call.sleep(0.5)
            self.log.append(f"end {call.id}")
            return "stepped"

        return step

    def overlapped(self) -> bool:
        """Whether a call began before the one before it had ended."""
        return any(line[:3] != ("beg", "end")[at % 2] for at, line in enumerate(self.log))


# --- sequential rounds --------------------------------------------------------------------------


async def test_calls_of_a_sequential_round_run_one_after_the_other(
    autojump_clock: MockClock,
) -> None:
    """One called tool that asks for it is enough; what waits its turn is shown as queued."""
    order = Order()
    world = World(calls("step", "nope", "safe", "step"), "done", tools=[order.tool()])

    async with world.open() as harness:
        order.harness = harness
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        await verify(world, harness)
        found = await results(harness)

    assert outcome.text == "done"
    assert not order.overlapped()
    assert order.shown == [
        [(0, "running", False), (2, "queued", True), (3, "queued", True)],
        [(0, "done", False), (2, "done", False), (3, "running", False)],
    ]
    assert sorted(result.call[1] for result in found) == [0, 1, 2, 3]
    sent = [item.message for item in world.model.requests[-1].messages]
    assert [m.call[1] for m in sent if isinstance(m, ToolResultMessage)] == [0, 1, 2, 3]


async def test_the_next_call_of_a_sequential_round_writes_its_own_slot_alone(
    autojump_clock: MockClock,
) -> None:
    """What the calls before it have put out is not written again with each one after them."""
    world = World(calls("odd", "odd", "odd"), "done", settings=Settings(sequential_tools=True))

    async def speak(call: ToolCall) -> None:
        await call.output("x" * 2_000)
        await call.sleep(1)

    world.install(odd_tool(speak))
    ops: list[dict[str, Any]] = []

    class Written(Participant):
        """Keeps the operations on `pi.live`, in published commits."""

        def committed(self, tx: Any) -> None:
            for change in tx.doc_changes:
                if change.address.name == "pi.live":
                    ops.extend(change.ops)

    async with world.open() as harness:
        harness.session.participants.append(Written())
        outcome = await ask(harness, "go")
        await verify(world, harness)

    assert outcome.text == "done"
    # Begun once with the round, and emptied at its end.
    assert [len(op["value"]) for op in ops if op["path"] == "/calls"] == [3, 0]
    begun = [op for op in ops if op["path"].endswith("/task")]
    assert [op["path"] for op in begun] == ["/calls/1/task", "/calls/2/task"]


async def test_without_a_sequential_tool_the_calls_of_a_round_overlap(
    autojump_clock: MockClock,
) -> None:
    """The control: what the test of sequential rounds looks at differs in a parallel one."""
    order = Order()
    world = World(calls("odd", "odd"), "done")
    inner = order.tool()

    @tool(name="odd", replay="safe")
    async def odd(call: ToolCall) -> Any:
        """Take a step, beside others."""
        return await inner.invoke({}, call)

    world.install(odd)
    async with world.open() as harness:
        await ask(harness, "go")

    assert order.overlapped()


async def test_a_host_may_have_every_round_run_one_call_after_the_other(
    autojump_clock: MockClock,
) -> None:
    """With the setting, tools that would overlap do not."""
    began: list[float] = []

    @tool(name="odd", replay="safe")
    async def odd(call: ToolCall) -> str:
        """Take some time."""
        began.append(trio.current_time())
        await call.sleep(1)
        return "x"

    world = World(calls("odd", "odd", "odd"), "done", settings=Settings(sequential_tools=True))
    world.install(odd)
    async with world.open() as harness:
        await ask(harness, "go")
        await verify(world, harness)

    assert [round(later - earlier) for earlier, later in itertools.pairwise(began)] == [1, 1]


async def test_a_kill_in_a_sequential_round_loses_no_call_and_repeats_none(
    autojump_clock: MockClock,
) -> None:
    """Killed at any commit, each call of the round has one result, and none ran beside another."""
    made: list[int] = []

    def make() -> World:
        @tool(sequential=True)
        async def step(call: ToolCall) -> str:
            """Take a step that must not be taken twice."""
            made.append(call.id)
            world.ledger.append(f"once {call.id}")
            await call.sleep(0.01)
            return "stepped"

        world = World(calls("step", "step", "step"), "done", tools=[step])
        return world

    async def program(harness: Harness, world: World) -> Any:
        outcome = await ask(harness, "go")
        return outcome, await results(harness)

    def check(world: World, result: Any) -> None:
        outcome, found = result
        assert outcome.text == "done"
        assert [each.call[1] for each in found] == [0, 1, 2]
        assert all(each.code in (None, "interrupted") for each in found)

    # C002, C005
    kills = await crash_everywhere(make, program, check)

    assert kills > 10
    assert made


async def test_an_aborted_sequential_round_closes_its_calls_in_call_order(
    autojump_clock: MockClock,
) -> None:
    """The calls that were never begun get an aborted result each, after that of the running one."""
    order = Order()
    order.hang_at = 1
    world = World(calls("step", "step", "safe", "step"), "never", tools=[order.tool()])

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await order.reached.wait()
        await root.abort()
        outcome = await submission.wait()
        await harness.wait_for_idle()
        await verify(world, harness)
        found = await results(harness)

    assert outcome.reason == "aborted"
    assert [each.call[1] for each in found] == [0, 1, 2, 3]
    assert [each.code for each in found] == [None, "aborted", "aborted", "aborted"]
    assert "before it started" in text_of(found[2])
    assert world.ledger == []


async def test_a_sequential_round_goes_on_after_a_call_that_was_aborted_alone(
    autojump_clock: MockClock,
) -> None:
    """Aborting one call ends that call; the next one begins."""
    order = Order()
    order.hang_at = 0
    world = World(calls("step", "step"), "done", tools=[order.tool()])

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await order.reached.wait()
        (call,) = [task for task in harness.tasks() if task.kind == "pi.tool"]
        await harness.abort_task(call.id)
        outcome = await submission.wait()
        found = await results(harness)
        said = messages(await root.history(), AssistantMessage)
        await verify(world, harness)

    assert outcome.text == "done"
    assert [each.code for each in found] == ["aborted", None]
    assert len(said) == 2


async def test_a_fork_within_a_sequential_round_is_free_to_go_on(autojump_clock: MockClock) -> None:
    """Its calls that have no result yet are not known there, none of them runs, and it answers."""
    order = Order()
    order.hang_at = 1
    world = World(
        Step(text="in the fork", when=When(user="instead")),
        calls("step", "step", "step"),
        tools=[order.tool()],
    )

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await order.reached.wait()
        fork = await root.fork()
        live = fork.live()
        answered = await (await fork.submit("instead")).wait()
        await root.abort()
        await submission.wait()
        check_transcript(await root.history())

    world.model.check()
    shown = [item.message for item in world.model.requests[-1].messages]
    results_shown = [text_of(m) for m in shown if isinstance(m, ToolResultMessage)]
    assert (live["run"], live["calls"]) == (None, [])
    assert answered.text == "in the fork"
    assert results_shown[0] == "stepped"
    assert len(results_shown) == 3
    assert all("not known" in text for text in results_shown[1:])
    assert sum(line.startswith("begin") for line in order.log) == 2


# --- the turn that follows ----------------------------------------------------------------------


@pytest.mark.parametrize("comes", ["nothing", "a steer", "an entry"])
async def test_a_turn_is_prepared_with_the_end_of_the_round_unless_something_comes(
    comes: str, autojump_clock: MockClock
) -> None:
    """What comes while the next turn is being prepared is in its request, prepared once more."""
    world = World(calls("safe"), "done")
    opened: list[Harness] = []
    rendered: list[int] = []

    async def render(_: Any) -> str:
        (harness,) = opened
        root = await harness.root()
        rendered.append(root.live()["turn"])
        if len(rendered) == 2 and comes == "a steer":
            await root.submit("look here", when_busy="steer", request_id="r2")
        elif len(rendered) == 2 and comes == "an entry":
            said = UserMessage(blocks=(TextBlock(text="look here"),), at_us=0)
            async with harness.commit() as tx:
                tx.append(root.id, kind="app.note", messages=[said])
        return "sunny"

    world.install(sections=[section("weather", render)])
    async with world.open() as harness:
        opened.append(harness)
        settled = await ask(harness, "go")
        await verify(world, harness)

    assert settled.text == "done"
    # The first turn still stands while the second is prepared, unless that is to be done again.
    assert rendered == ([1, 1] if comes == "nothing" else [1, 1, 2])
    _, second = world.model.requests
    told = [text_of(item.message) for item in second.messages]
    assert told.count("look here") == (comes != "nothing")
