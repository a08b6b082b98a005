"""Draining: nothing new begins, streams are cut, running calls may end, and all of it resumes."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from pidurable import Extension, Models, Registry, ToolCall, tool
from pidurable.agent._services import AgentChange
from pidurable.harness._open import open_harness
from pidurable.testing import ScriptedModel


def registry(gate: trio.Event, started: trio.Event) -> Registry:
    @tool
    async def hold(call: ToolCall) -> str:
        """Wait for the gate."""
        started.set()
        await gate.wait()
        return "held"

    made = Registry()
    made.install(Extension("test", tools=[hold]))
    return made


def model(*steps: object) -> Models:
    return ScriptedModel(steps, name="m").models()  # type: ignore[arg-type]


AGENT = AgentChange(model="scripted/m")
CALLS = {"calls": [{"name": "hold", "arguments": {}}]}


async def test_a_running_call_ends_and_its_result_is_kept(tmp_path: Path) -> None:
    """A call that ends in time has its result stored; the next turn waits for the reopening."""
    gate, started = trio.Event(), trio.Event()
    tools = registry(gate, started)
    async with open_harness(tmp_path / "s", registry=tools, models=model(CALLS, "done")) as harness:
        root = await harness.root(agent=AGENT)
        submission = await root.submit("go")
        await started.wait()
        async with trio.open_nursery() as nursery:
            left: list[list[int]] = []

            async def drain() -> None:
                left.append(await harness.drain(seconds=30))

            nursery.start_soon(drain)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        calls = harness.tasks(kind="pi.tool")
        turns = harness.tasks(kind="pi.generation")
    async with open_harness(tmp_path / "s", registry=tools, models=model(CALLS, "done")) as harness:
        again = (await (await harness.root()).open_submissions())[0]
        settled = await again.wait()

    assert left == [[]]
    assert [task.outcome and task.outcome.status for task in calls] == ["completed"]
    assert len(turns) == 1
    assert (again.id, settled.text) == (submission.id, "done")


async def test_a_call_that_does_not_end_is_named(tmp_path: Path) -> None:
    """After the time given, what still runs is named, and becomes an interrupted call."""
    gate, started = trio.Event(), trio.Event()
    tools = registry(gate, started)
    async with open_harness(tmp_path / "s", registry=tools, models=model(CALLS, "done")) as harness:
        root = await harness.root(agent=AGENT)
        await root.submit("go")
        await started.wait()
        left = await harness.drain(seconds=0)
        call = harness.tasks(kind="pi.tool")[0]
    async with open_harness(tmp_path / "s", registry=tools, models=model(CALLS, "done")) as harness:
        root = await harness.root()
        settled = await (await root.open_submissions())[0].wait()
        codes = [
            message.code
            for entry in await root.history()
            for message in entry.messages
            if entry.kind == "pi.tool_result"
        ]

    assert left == [call.id]
    assert settled.text == "done"
    assert codes == ["interrupted"]


async def test_a_stream_is_cut_at_once(tmp_path: Path) -> None:
    """Draining waits for no answer of a model; the request is sent again after the reopening."""
    stalls = {"text": ["a", "b"], "stall": {"after": 1}, "times": 1}
    tools = registry(trio.Event(), trio.Event())
    scripted = model(stalls)
    async with open_harness(tmp_path / "s", registry=tools, models=scripted) as harness:
        root = await harness.root(agent=AGENT)
        await root.submit("go")
        async with root.events() as events:
            async for _ in events:
                if root.live()["partial"] is not None:
                    break
        left = await harness.drain(seconds=30)
    async with open_harness(tmp_path / "s", registry=tools, models=scripted) as harness:
        settled = await (await (await harness.root()).open_submissions())[0].wait()

    assert left == []
    assert settled.text == "ab"
