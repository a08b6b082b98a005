"""Events for whoever does not hold the session, and the list of its conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from agent_world import World, calls
from trio.testing import MockClock

from pidurable import AgentChange, Ask, Extension, Models, Once, Registry, ToolCall, hook, tool
from pidurable.agent._script import ScriptedCall, Step
from pidurable.agent._tool_call import ToolTask
from pidurable.errors import InvalidArgumentError, NotFoundError
from pidurable.harness._event_json import EVENT_TYPES
from pidurable.harness._events import (
    Event,
    MessageUpdate,
    RunEnd,
    Snapshot,
    ToolExecutionEnd,
    ToolExecutionStart,
)
from pidurable.harness._looked_events import LookedEvents
from pidurable.harness._open import Harness, open_harness
from pidurable.harness._reader import open_reader
from pidurable.testing import ScriptedModel, ScriptedProvider

ASKS = {"calls": [{"name": "ask", "arguments": {}}]}
HOLDS = {"calls": [{"name": "hold", "arguments": {}}]}


def registry(gate: trio.Event) -> Registry:
    """One tool that asks a sub-agent, and one that a person must allow and that waits."""

    @tool(replay="safe")
    async def ask(call: ToolCall) -> str:
        """Ask a sub-agent."""
        child = await call.child(agent=AgentChange(model="scripted/child"))
        submission = await child.submit("sub-task", request_id=call.key("task"))
        return str((await submission.wait()).text)

    @tool
    async def hold(call: ToolCall) -> str:
        """Wait for the gate."""
        await call.output("holding\n")
        await gate.wait()
        return "held"

    async def guard(call: Any) -> Ask | None:
        return Ask("high", "no reason") if call.name == "hold" else None

    made = Registry()
    made.install(Extension("test", tools=[ask, hold], hooks=[hook(ToolTask, before_tool=guard)]))
    return made


def models(*steps: object) -> Models:
    """The main model with these steps; the child answers `child says`."""
    main = ScriptedModel(steps, name="main")  # type: ignore[arg-type]
    return Models([ScriptedProvider([main, ScriptedModel(["child says"], name="child")])])


def words(batch: tuple[Event, ...]) -> list[str]:
    """The types of events, as in JSON."""
    return [EVENT_TYPES[type(event)] for event in batch]


async def test_a_reader_follows_a_run_from_its_input_to_its_end(tmp_path: Path) -> None:
    """Between two looks the same is told as inside: entries, calls, a question, and the end."""
    gate = trio.Event()
    async with open_harness(
        tmp_path / "s", registry=registry(gate), models=models(HOLDS, "done")
    ) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/main"))
        async with open_reader(tmp_path / "s") as reader:
            looked = LookedEvents(reader._storage, root.id, [])
            told = [words(looked.look())]
            nothing = looked.look()
            submission = await root.submit("go")
            while not harness.permissions():  # noqa: ASYNC110 - a tool asks
                await trio.sleep(0.01)
            told.append(words(looked.look()))
            (listed,) = await reader.list_conversations()
            await harness.decide(listed.permissions[0], Once())
            while not root.live()["calls"][0]["output_tail"]:  # noqa: ASYNC110 - it is written
                await trio.sleep(0.01)
            told.append(words(looked.look()))
            gate.set()
            await submission.wait()
            last = looked.look()
            entries = await reader.entries(root.id)

    assert told[0] == ["snapshot"]
    assert nothing == ()
    assert told[1][:3] == ["entry", "entry", "message_end"]
    assert {"permission_request", "submission", "run_start", "turn_start"} <= set(told[1])
    assert "tool_execution_start" in told[1]
    assert "permission_decision" in told[2]
    assert "tool_execution_update" in told[2]
    assert words(last)[:2] == ["tool_execution_end", "message_end"]
    assert [event.status for event in last if isinstance(event, RunEnd)] == ["done"]
    assert listed.state == "asking"
    assert [entry.kind for entry in entries] == [
        *("pi.user", "pi.system", "pi.assistant", "pi.tool_result", "pi.assistant")
    ]


async def test_no_entry_is_left_out_or_told_twice(tmp_path: Path) -> None:
    """However many commits lie between two looks, the entries are those of the history."""
    async with open_harness(tmp_path / "s", registry=Registry(), models=models("ok")) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/main"))
        await root.write("before", kind="test.note")
        told: list[int] = []

        async with open_reader(tmp_path / "s") as reader:

            async def follow() -> None:
                async with reader.events(root.id, interval=0.002) as batches:
                    async for batch in batches:
                        for event in batch:
                            if isinstance(event, Snapshot):
                                told.extend(entry.id for entry in event.entries)
                            elif hasattr(event, "entry"):
                                told.append(event.entry.id)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(follow)
                for number in range(40):
                    await root.write(number, kind="test.note")
                await (await root.submit("go")).wait()
                expected = [entry.id for entry in await root.history(limit=1_000)]
                with trio.fail_after(20):
                    while len(told) < len(expected):  # noqa: ASYNC110 - a thread reads
                        await trio.sleep(0.005)
                nursery.cancel_scope.cancel()

    assert told == expected


async def test_what_began_anew_between_two_looks_is_told_from_its_start(
    autojump_clock: MockClock,
) -> None:
    """Of another answer all its text is told, and of a call that has ended only its end."""
    first = Step(text=tuple("abcdef"), delay=0.2, calls=(ScriptedCall(name="safe", arguments={}),))
    world = World(first, Step(text=tuple("abcxyz"), delay=0.2), "never")
    async with world.open() as harness:
        root = await harness.root()
        looked = LookedEvents(world.storage, root.id, [])
        looked.look()
        submission = await root.submit("go")
        await trio.sleep(0.75)
        begun = looked.look()
        while root.live()["turn"] != 2 or root.live()["partial"] is None:  # noqa: ASYNC110
            await trio.sleep(0.01)
        await trio.sleep(0.75)
        shown = root.live()["partial"]["blocks"][0]["text"]
        later = looked.look()
        await submission.wait()

    before, after = ([e for e in batch if isinstance(e, MessageUpdate)] for batch in (begun, later))
    assert "abcdef".startswith("".join(each.text for each in before))
    assert len(shown) >= 4
    assert [each.text for each in after] == [shown]
    assert words(later).count("message_start") == 1
    assert words(later).index("message_end") < words(later).index("message_start")


async def test_a_call_that_began_and_ended_between_two_looks_is_told_by_its_result(
    autojump_clock: MockClock,
) -> None:
    """Nobody is told last of such a call that it runs."""
    world = World(calls("safe", "slow"), "never")
    async with world.open() as harness:
        root = await harness.root()
        looked = LookedEvents(world.storage, root.id, [])
        looked.look()
        await root.submit("go")
        await world.reached.wait()
        await trio.sleep(1)
        events = looked.look()

    ended = [event.call[1] for event in events if isinstance(event, ToolExecutionEnd)]
    running = [event.index for event in events if isinstance(event, ToolExecutionStart)]
    assert (ended, running) == ([0], [1])


async def test_a_fork_is_followed_behind_what_it_shares(tmp_path: Path) -> None:
    """The snapshot has the shared history, and only what comes in the fork comes after it."""
    async with open_harness(tmp_path / "s", registry=Registry(), models=models("ok")) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/main"))
        await root.write("shared", kind="test.note")
        fork = await root.fork()
        await root.write("not shared", kind="test.note")
        async with open_reader(tmp_path / "s") as reader:
            looked = LookedEvents(reader._storage, fork.id, await reader.entries(fork.id))
            first = looked.look()
            await fork.write("own", kind="test.note")
            second = looked.look()

    assert [entry.data for entry in first[0].entries] == ["shared"]  # type: ignore[union-attr]
    assert [getattr(event, "entry").data for event in second] == ["own"]  # noqa: B009


async def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    """An unknown conversation, and an interval that is none."""
    async with open_harness(tmp_path / "s", registry=Registry()) as harness:
        root = await harness.root()
    async with open_reader(tmp_path / "s") as reader:
        with pytest.raises(NotFoundError, match="task tree"):
            async with reader.events(99):
                raise AssertionError
        for interval in (0, -1.0, float("nan"), True, "1"):
            with pytest.raises(InvalidArgumentError, match="interval"):
                async with reader.events(root.id, interval=interval):  # type: ignore[arg-type]
                    raise AssertionError


async def test_conversations_are_listed_with_where_they_stand(tmp_path: Path) -> None:
    """Owned ones and forks too, with title, state, queue and tokens; inside as from outside."""
    store, gate = tmp_path / "s", trio.Event()
    steps = models(ASKS, HOLDS, "done")
    async with open_harness(store, registry=registry(gate), models=steps) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/main"))
        submission = await root.submit("please\nask")
        while not harness.permissions():  # noqa: ASYNC110 - a tool asks
            await trio.sleep(0.01)
        await root.submit("and then")
        await root.fork(key="other")
        listed = await _both(harness, store)
        busy = await _both(harness, store, busy=True)
        newest = await _both(harness, store, limit=1)
        await root.abort()
        await submission.wait()
        (after, *_) = await harness.list_conversations()
        for limit in (0, True, "1"):
            with pytest.raises(InvalidArgumentError, match="limit"):
                await harness.list_conversations(limit=limit)  # type: ignore[arg-type]

        assert await _both(harness, store, limit=10**20) == await _both(harness, store)

    first, child, fork = listed
    assert [each.title for each in listed] == ["please\nask", "sub-task", ""]
    assert [each.state for each in listed] == ["asking", "idle", "idle"]
    assert (first.key, first.owner, first.parent, first.queued) == ("root", None, None, 1)
    assert child.owner is not None
    assert (fork.key, fork.parent) == ("other", root.id)
    assert first.usage["input_tokens"] > 0
    assert fork.usage["input_tokens"] == 0
    assert first.agent["model"] == "scripted/main"
    assert first.active_us > first.created_us
    assert [each.id for each in busy] == [first.id]
    assert [each.id for each in newest] == [fork.id]
    assert (after.state, after.queued) == ("idle", 0)


async def _both(harness: Harness, store: Path, **options: Any) -> list[Any]:
    """The list as the holder and as a reader see it, which is the same."""
    async with open_reader(store) as reader:
        seen = await reader.list_conversations(**options)

    assert seen == await harness.list_conversations(**options)
    return seen
