"""Aborts of calls, and the sub-agents that calls own: nothing is left behind, or goes on unseen."""

from __future__ import annotations

import io
from typing import Any

import attrs
import pytest
import trio
from agent_world import (
    MODEL,
    World,
    ask,
    calls,
    conversations,
    odd_tool,
    results,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable import export_session, import_session
from pidurable.agent._script import ScriptedCall, Step, When
from pidurable.agent._services import AgentChange
from pidurable.records._limits import Settings
from pidurable.registry import ToolCall
from pidurable.session._seams import InlineBlocking
from pidurable.storage import MemoryStorage

# --- aborts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("finished", [0, 1, 2])
async def test_an_aborted_round_is_closed_and_continues(
    autojump_clock: MockClock, finished: int
) -> None:
    """Aborted with none, some or all but one result there, the next message is answered."""
    names = ["safe"] * finished + ["slow"] * (3 - finished)
    world = World(calls(*names), Step(text="welcome back"))

    # C001, C004
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        await world.reached.wait()
        await trio.sleep(1)
        await root.abort("the user")
        first = await submission.wait()
        second = await ask(harness, "carry on", "r2")
        await verify(world, harness)
        codes = [each.code for each in await results(harness)]
        texts = [text_of(each) for each in await results(harness)]

    assert (first.reason, first.detail) == ("aborted", "the user")
    assert second.text == "welcome back"
    assert codes == [None] * finished + ["aborted"] * (3 - finished)
    assert "it has begun" in texts[-1]


async def test_calls_that_never_started_get_their_result(autojump_clock: MockClock) -> None:
    """With one slot, an abort gives the calls behind it results in call order."""
    world = World(calls("slow", "safe", "safe"), "back")
    world.settings = attrs.evolve(world.settings, limits={"pi.tool": 1})

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        await root.abort()
        await submission.wait()
        await harness.wait_for_idle()
        found = await results(harness)
        outcome = await ask(harness, "again", "r2")
        await verify(world, harness)

    assert [(each.call[1], each.code) for each in found] == [
        (0, "aborted"),
        (1, "aborted"),
        (2, "aborted"),
    ]
    assert outcome.text == "back"
    assert world.ledger == [world.ledger[0]]


async def test_a_call_that_the_scheduler_ends_has_its_result(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted before it started, or faulted: the round gives it a result, and the run goes on."""

    def broken(*_: Any) -> Any:
        raise LookupError("a bug of ours")

    world = World(calls("slow", "safe", "once"), Step(text="all accounted for"))
    world.settings = attrs.evolve(world.settings, limits={"pi.tool": 1})
    monkeypatch.setattr("pidurable.agent._tool_call.validated", _unless_once(broken))

    # C001
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        await world.reached.wait()
        slow, safe, _ = (call["task"] for call in root.live()["calls"])
        await harness.abort_task(safe)
        await trio.sleep(1)
        statuses = [call["status"] for call in root.live()["calls"]]
        await harness.abort_task(slow)
        outcome = await submission.wait()
        await verify(world, harness)
        found = {each.name: each.code for each in await results(harness)}

    assert statuses == ["running", "aborted", "running"]
    assert outcome.text == "all accounted for"
    assert found == {"slow": "aborted", "safe": "aborted", "once": "interrupted"}
    assert not any(line.startswith(("safe", "once")) for line in world.ledger)


def _unless_once(broken: Any) -> Any:
    """The validation of arguments, broken for one tool."""
    from pidurable.agent._tool_call import validated

    def checked(made: Any, arguments: Any) -> Any:
        return broken() if made.name == "once" else validated(made, arguments)

    return checked


async def test_an_abort_ends_a_tree_of_sub_agents(autojump_clock: MockClock) -> None:
    """Three levels with two children each: all of it ends aborted, and nothing begins after it."""
    two = calls("subagent", "subagent", task="level two")
    world = World(
        Step(calls=(ScriptedCall(name="slow"),), when=When(user="level two")),
        Step(calls=two.calls, when=When(user="level one")),
        calls("subagent", "subagent", task="level one"),
    )

    # C045
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        while sum(line.startswith("slow") for line in world.ledger) < 4:  # noqa: ASYNC110
            await trio.sleep(0.01)
        requests = len(world.model.requests)
        await root.abort()
        outcome = await submission.wait()
        await harness.wait_for_idle()
        await verify(world, harness)
        ends = [task.outcome.status for task in harness.tasks() if task.outcome is not None]
        total = len(harness.tasks())

    assert outcome.reason == "aborted"
    assert ends == ["aborted"] * total
    assert total == 1 + 2 + 2 + 4 + 4 + 4
    assert len(world.model.requests) == requests == 7


async def test_sub_agents_stop_at_the_stated_depth(autojump_clock: MockClock) -> None:
    """A model that always delegates is stopped by a result that it can read."""
    world = World(
        Step(text="bottom", when=When(result="at most 3")),
        Step(text="up", when=When(turn=1)),
        calls("subagent", task="deeper"),
        settings=Settings(owned_depth_max=3),
        repeat_last=True,
    )

    # C053
    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await harness.wait_for_idle()
        await verify(world, harness)
        found = conversations(harness)

    assert outcome.text == "up"
    assert len(found) == 4


@pytest.mark.parametrize("way", ["raises", "returns", "cleans up"])
async def test_a_tool_cannot_swallow_an_abort(autojump_clock: MockClock, way: str) -> None:
    """Whatever it does when it is cancelled, the call ends aborted, after its clean-up."""
    world = World(calls("odd"), "never")

    async def body(_: ToolCall) -> str:
        world.reached.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            if way == "raises":
                raise ValueError("instead") from None
            if way == "cleans up":
                with trio.CancelScope(shield=True):
                    await trio.sleep(8)
                world.ledger.append("cleaned")
                raise
        return "as if nothing had happened"

    world.install(odd_tool(body))
    # C052
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        await root.abort()
        outcome = await submission.wait()
        await verify(world, harness)
        (result,) = await results(harness)

    assert outcome.reason == "aborted"
    assert result.code == "aborted"
    assert world.ledger == (["cleaned"] if way == "cleans up" else [])


async def test_an_abort_above_takes_back_what_is_queued_below(autojump_clock: MockClock) -> None:
    """In the commit that marks the call, the follow-up of its sub-agent is unanswered, aborted."""
    world = World(
        Step(calls=(ScriptedCall(name="slow"),), when=When(user="the task")),
        calls("subagent", task="the task"),
        "on we go",
    )
    seen: list[bool] = []

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        child = harness.conversation(int(world.ledger[0].split()[1]))
        queued = await child.submit("and then this")
        owner = harness.session.conversation(child.id).owner
        assert owner is not None

        class Look:
            def committed(self, tx: Any) -> None:
                marked = harness._runtime.published.task(owner)
                if marked is not None and marked.marked:
                    record = harness.session.storage.submission(queued.id)
                    seen.append(record.status == "unanswered")

            def check_staged(self, tx: Any) -> None: ...

            def joined(self, tx: Any) -> None: ...

            def reverted(self) -> None: ...

            def poisoned(self, error: Any) -> None: ...

            def refusing(self, refusing: bool) -> None: ...

        harness.session.participants.append(Look())
        await root.abort("stop all")
        outcome = await submission.wait()
        settled = await queued.wait()
        await harness.wait_for_idle()
        await verify(world, harness)
        assert (await ask(harness, "again", "r2")).text == "on we go"

    assert (outcome.reason, settled.reason) == ("aborted", "aborted")
    assert seen
    assert all(seen)


async def test_what_is_submitted_below_an_abort_is_answered_at_once(
    autojump_clock: MockClock,
) -> None:
    """Input for a sub-agent that is being aborted is unanswered, and nobody waits for ever."""
    world = World(
        Step(calls=(ScriptedCall(name="slow"),), when=When(user="the task")),
        calls("subagent", task="the task"),
    )

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        child = harness.conversation(int(world.ledger[0].split()[1]))
        async with harness.commit() as tx:
            tx.abort_task(harness.session.conversation(child.id).owner)
            child_is_cancelled = tx.is_cancelled(child.id)
        late = await child.submit("and then this")
        settled = await late.wait()
        outcome = await submission.wait()
        await harness.wait_for_idle()
        await verify(world, harness)

    assert child_is_cancelled
    assert settled.reason == "aborted"
    assert outcome is not None


async def test_aborting_a_child_ends_the_child_alone(autojump_clock: MockClock) -> None:
    """The parent's call learns that its child gave no answer, and the parent goes on."""
    world = World(
        Step(calls=(ScriptedCall(name="slow"),), when=When(user="the task")),
        calls("subagent", task="the task"),
        "without the child",
    )

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        child = harness.conversation(int(world.ledger[0].split()[1]))
        await child.abort("enough")
        outcome = await submission.wait()
        await verify(world, harness)
        (result,) = await results(harness)

    assert outcome.text == "without the child"
    assert result.code == "tool_error"
    assert "UnansweredError" in text_of(result)
    assert "enough" in text_of(result)


async def test_a_child_starts_with_its_parent_s_agent(autojump_clock: MockClock) -> None:
    """The child has a copy of the agent with the changes given, and its usage is summed."""
    world = World(
        Step(text="small answer", when=When(user="the task")),
        calls("subagent", task="the task"),
        "ok",
    )

    async with world.open(agent=AgentChange(model=MODEL, instructions="parent")) as harness:
        outcome = await ask(harness, "go")
        child = harness.conversation(int(world.ledger[0].split()[1]))
        agent = child.agent()
        own = child.usage()["models"][MODEL]["requests"]
        total = (await harness.usage())[MODEL].requests

    assert outcome.text == "ok"
    assert (agent["model"], agent["instructions"]) == (MODEL, "you are the child")
    assert (own, total) == (1, 3)


async def test_a_copy_of_a_session_asks_a_running_sub_agent_once(autojump_clock: MockClock) -> None:
    """Run again in the copy, the caller finds the question that it had asked before the copy."""
    top = attrs.evolve(calls("subagent", task="look closely"), when=When(user="go"))
    world = World(top, attrs.evolve(calls("slow"), when=When(user="look")))
    async with world.open() as harness:
        root = await harness.root()
        await root.submit("go", request_id="r1")
        await world.reached.wait()
        exported = io.BytesIO()
        await export_session(world.base, exported, blocking=InlineBlocking())
    exported.seek(0)
    report = await import_session(
        exported, MemoryStorage, as_copy=True, blocking=InlineBlocking(), clock=world.clock
    )
    assert report.storage is not None
    (child,) = (int(line.split()[1]) for line in world.ledger if line.startswith("child"))
    world.base = report.storage
    world.ledger.clear()
    async with world.open() as harness:
        harness.start()
        await trio.sleep(1)
        ledger = sorted(line.split()[0] for line in world.ledger)
        asked = harness.session.storage.open_submissions(child)

    assert ledger == ["child", "slow"]
    assert len(asked) == 1
