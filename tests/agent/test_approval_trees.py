"""Requests from below: of nested calls and of sub-agents, however deep, and aborted from above."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from agent_world import ask, calls, results, text_of, verify
from approval_world import GuardedWorld, acts, ask_for_act, begin, rest, the_open
from trio.testing import MockClock

from pidurable import Deny, Once, ToolCall, ToolExecutionUpdate, tool
from pidurable.agent._script import Step, When
from pidurable.errors import AlreadyDecidedError, NotFoundError
from pidurable.harness._conversation import Conversation
from pidurable.harness._open import Harness


def deep_world(*after: Any) -> GuardedWorld:
    """A root that asks a child, that asks a grandchild, that acts."""
    return GuardedWorld(
        Step(calls=acts("ship").calls, when=When(user="level 3", turn=0)),
        Step(text="acted", when=When(user="level 3", turn=1)),
        Step(calls=calls("subagent", task="level 3").calls, when=When(user="level 2", turn=0)),
        Step(text="passed on", when=When(user="level 2", turn=1)),
        Step(calls=calls("subagent", task="level 2").calls, when=When(user="go", turn=0)),
        Step(text="all done", when=When(user="go", turn=1)),
        *after,
    )


def kinds(path: tuple[tuple[str, int], ...]) -> list[str]:
    """The kinds on a path."""
    return [kind for kind, _ in path]


# C060
async def test_a_request_at_depth_three_is_listed_at_the_root_and_decided_after_a_restart(
    autojump_clock: MockClock,
) -> None:
    """It has its path, below any node of it too, and its answer goes all the way up."""
    world = deep_world()
    async with world.open() as harness:
        await begin(harness)
        before = the_open(harness)
    async with world.open() as harness:
        root = await harness.root()
        request = the_open(harness)
        for _, id in request.path:
            assert harness.permissions(below=id) == [request]
        assert harness.permissions(below=request.task) == [request]
        async with harness.commit() as tx:
            other = tx.create_conversation()
        assert harness.permissions(below=other) == []
        with pytest.raises(NotFoundError, match="task or conversation"):
            harness.permissions(below=10**9)
        await harness.decide(request.id, Once())
        answer = await ask(harness, "go")
        await verify(world, harness)

    assert request == before
    assert kinds(request.path) == [
        *["conversation", "pi.generation", "pi.tool"] * 2,
        "conversation",
        "pi.generation",
    ]
    assert request.path[0] == ("conversation", root.id)
    assert request.path[-2] == ("conversation", request.conversation)
    assert answer.text == "all done"
    assert world.ledger.count("act ship") == 1


async def _decide(harness: Harness, id: int, told: list[str]) -> None:
    try:
        await harness.decide(id, Once())
        told.append("decided")
    except AlreadyDecidedError as error:
        told.append(f"{error.state} {error.closed_reason}")


@pytest.mark.parametrize("first", ["abort", "decision"])
async def test_a_request_three_deep_is_aborted_above_while_it_is_decided(
    autojump_clock: MockClock, first: str
) -> None:
    """From the commit that marks the root's run, nobody can say yes far below it."""
    world = deep_world()
    told: list[str] = []
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        top = next(id for kind, id in request.path if kind == "pi.generation")
        async with trio.open_nursery() as nursery:
            if first == "abort":
                nursery.start_soon(harness.abort_task, top)
                await trio.lowlevel.checkpoint()
            nursery.start_soon(_decide, harness, request.id, told)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(harness.abort_task, top)
        outcome = await submission.wait()
        await harness.wait_for_idle()
        await verify(world, harness)
        found = await harness.permission(request.id)

    assert outcome.reason == "aborted"
    if first == "abort":
        assert told == ["closed aborted"]
        assert (found.state, found.closed_reason) == ("closed", "aborted")
        assert "act ship" not in world.ledger
    else:
        assert told == ["decided"]
        assert found.state == "granted"
        assert world.ledger.count("act ship") <= 1


def nesting(levels: int) -> Any:
    """A tool that calls itself, and acts at the bottom."""

    @tool(name="nest", replay="safe")
    async def nest(level: int, call: ToolCall) -> str:
        """Go one level down.

        Args:
            level: Which.
        """
        if level < levels:
            result = await call.execute_tool("nest", {"level": level + 1})
        else:
            result = await call.execute_tool("act", {"what": "ship"})
        return f"{level}: {result.text}"

    return nest


@pytest.mark.parametrize("decision", [Once(), Deny("not that")], ids=["yes", "no"])
async def test_a_nested_call_three_deep_waits_for_a_person(
    autojump_clock: MockClock, decision: Any
) -> None:
    """Asked for by the same hooks, decided over a restart; its callers get its result."""
    world = GuardedWorld(calls("nest", level=1), "done", tools=[nesting(3)])
    async with world.open() as harness:
        await begin(harness)
        before = the_open(harness)
    async with world.open() as harness:
        harness.start()
        await rest()
        request = the_open(harness)
        await harness.decide(request.id, decision)
        await ask(harness, "go")
        root = await harness.root()
        shown = [
            entry.messages[0].blocks[0].text  # type: ignore[union-attr]
            for entry in await root.history()
            if entry.kind == "pi.tool_result"
        ]
        await verify(world, harness)

    assert request == before
    assert kinds(request.path) == ["conversation", "pi.generation", *["pi.tool"] * 3]
    assert world.ledger == (["act ship"] if decision == Once() else [])
    expected = "acted: ship" if decision == Once() else "not that"
    assert shown[0].startswith("1: 2: 3: ")
    assert expected in shown[0]


async def test_a_nested_call_is_aborted_above_while_it_is_decided(
    autojump_clock: MockClock,
) -> None:
    """The mark on the outermost call is enough: a yes for the innermost comes too late."""
    world = GuardedWorld(calls("nest", level=1), "back", tools=[nesting(3)])
    told: list[str] = []
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        outermost = next(id for kind, id in request.path if kind == "pi.tool")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness.abort_task, outermost)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(_decide, harness, request.id, told)
        await submission.wait()
        await verify(world, harness)
        found = await harness.permission(request.id)

    assert told == ["closed aborted"]
    assert (found.state, found.closed_reason) == ("closed", "aborted")
    assert world.ledger == []


async def test_a_nested_call_of_a_dead_caller_asks_nobody(autojump_clock: MockClock) -> None:
    """Its caller cannot go on after a restart, so its request is closed, and it never runs."""

    @tool(name="nest")
    async def nest(level: int, call: ToolCall) -> str:
        """Go down.

        Args:
            level: Which.
        """
        return (await call.execute_tool("act", {"what": "ship"})).text

    world = GuardedWorld(calls("nest", level=1), "done", tools=[nest])
    async with world.open() as harness:
        await begin(harness)
        request = the_open(harness)
    async with world.open() as harness:
        answer = await ask(harness, "go")
        found = await harness.permission(request.id)
        (result,) = await results(harness)
        await verify(world, harness)

    assert (answer.text, result.code) == ("done", "interrupted")
    assert (found.state, found.closed_reason) == ("closed", "aborted")
    assert world.ledger == []


def leaving(levels: int, *, asks_late: bool) -> Any:
    """A tool that gives a nested call up after a while, and returns; or before that one asks."""

    @tool(name="nest", replay="safe")
    async def nest(level: int, call: ToolCall) -> str:
        """Go one level down.

        Args:
            level: Which.
        """
        if level == levels:
            if asks_late:
                await call.sleep(10)
            return (await call.execute_tool("act", {"what": "ship"})).text
        with trio.move_on_after(5 if level == 0 else math.inf):
            return (await call.execute_tool("nest", {"level": level + 1})).text
        return "gave it up"

    return nest


@pytest.mark.parametrize("asks_late", [False, True], ids=["asked before", "asks later"])
@pytest.mark.parametrize("levels", [1, 2])
async def test_a_nested_call_that_its_caller_has_given_up_waits_for_nobody(
    autojump_clock: MockClock, levels: int, asks_late: bool
) -> None:
    """Once that has returned, a request far below is closed, nothing runs, and the run goes on."""
    nest = leaving(levels, asks_late=asks_late)
    world = GuardedWorld(calls("nest", level=0), "done", tools=[nest])
    async with world.open() as harness:
        submission = await begin(harness)
        asked = [request.id for request in harness.permissions()]
        with trio.fail_after(60):
            outcome = await submission.wait()
        await harness.wait_for_idle()
        closed = [await harness.permission(id) for id in asked]
        (result,) = await results(harness)
        await verify(world, harness)

    assert (outcome.text, text_of(result)) == ("done", "gave it up")
    assert len(asked) == (0 if asks_late else 1)
    assert {(each.state, each.closed_reason) for each in closed} <= {("closed", "aborted")}
    assert world.ledger == []


async def test_a_call_that_its_caller_has_given_up_runs_to_its_end_where_nobody_is_asked(
    autojump_clock: MockClock,
) -> None:
    """What a grant lets run, or what needs none, holds the caller as ever; nothing is cut."""
    nest = leaving(1, asks_late=True)
    world = GuardedWorld(calls("nest", level=0), "done", tools=[nest], policy=lambda call: None)
    async with world.open() as harness:
        assert (await ask(harness, "go")).text == "done"
        await verify(world, harness)

    assert world.ledger == ["act ship"]


# C061
async def test_a_wait_for_a_person_is_told_from_a_slow_process(autojump_clock: MockClock) -> None:
    """Whoever looks after a sub-agent sees what waits; its cancel is no denial by a person."""
    world = deep_world()
    async with world.open() as harness:
        await begin(harness)
        request = the_open(harness)
        child = harness.conversation(request.conversation)
        for _ in range(5):
            (call,) = child.live()["calls"]
            assert (call["status"], call["held_by"]) == ("waiting", f"permission {request.id}")
            await trio.sleep(30)
        explained = str(harness.explain(request.task))
        await child.abort("the model does not want it any more")
        await harness.wait_for_idle()
        found = await harness.permission(request.id)
        result = [e for e in await child.history() if e.kind == "pi.tool_result"][-1]

    assert "waits for a person" in explained
    assert f"(permission {request.id}, risk medium)" in explained
    assert (found.state, found.closed_reason, found.decided_by) == ("closed", "aborted", None)
    assert result.messages[0].code == "aborted"  # type: ignore[union-attr]
    assert "act ship" not in world.ledger


def held(harness: Harness, conversation: int) -> tuple[str, str | None]:
    """Status and holder of the only call that a conversation shows."""
    (call,) = harness.conversation(conversation).live()["calls"]
    return call["status"], call["held_by"]


async def test_the_calls_above_a_request_are_shown_as_held_by_it(
    autojump_clock: MockClock,
) -> None:
    """Whoever looks at the root sees that a person is waited for, far below, and no more after."""
    world = deep_world()
    async with world.open() as harness:
        await begin(harness)
        request = the_open(harness)
        above = [id for kind, id in request.path if kind == "conversation"]
        before = [held(harness, id) for id in above]
    told: list[Any] = []
    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        await nursery.start(_collect_updates, root, told)
        await harness.decide(request.id, Once())
        after = [held(harness, id) for id in above]
        await ask(harness, "go")
        await verify(world, harness)
        nursery.cancel_scope.cancel()

    assert before == [("waiting", f"permission {request.id}")] * 3
    assert after == [("running", None)] * 3
    assert told[0] == ("running", None)


async def _collect_updates(
    conversation: Conversation,
    told: list[Any],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    async with conversation.events() as batches:
        task_status.started()
        async for batch in batches:
            updates = [event for event in batch if isinstance(event, ToolExecutionUpdate)]
            told += [(event.status, event.held_by) for event in updates]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
async def test_of_several_requests_below_a_call_the_oldest_holds_it(
    autojump_clock: MockClock, order: tuple[int, ...]
) -> None:
    """In whatever order they are decided, also over a restart; the last one lets it go."""

    @tool(name="fan", replay="safe")
    async def fan(call: ToolCall) -> str:
        """Act three times at once."""

        async def act(which: int) -> None:
            await call.execute_tool("act", {"what": str(which)}, key=f"act {which}")

        async with trio.open_nursery() as nursery:
            for which in range(3):
                nursery.start_soon(act, which)
        return "fanned"

    world = GuardedWorld(calls("fan"), "done", tools=[fan])
    shown = []
    async with world.open() as harness:
        await begin(harness)
        ids = [request.id for request in harness.permissions()]
    async with world.open() as harness:
        root = await harness.root()
        left = sorted(ids)
        for place in order:
            shown.append(held(harness, root.id) == ("waiting", f"permission {left[0]}"))
            await harness.decide(ids[place], Once() if place else Deny("no"))
            left.remove(ids[place])
        shown.append(held(harness, root.id) == ("running", None))
        await ask(harness, "go")
        await verify(world, harness)

    assert len(ids) == 3
    assert shown == [True] * 4


async def test_an_abort_below_a_call_lets_go_of_it(autojump_clock: MockClock) -> None:
    """A request that is closed by an abort holds nobody above any longer."""
    world = deep_world()
    async with world.open() as harness:
        root = await harness.root()
        await begin(harness)
        request = the_open(harness)
        await harness.abort_task(request.task)
        shown = held(harness, root.id)
        await harness.wait_for_idle()
        await verify(world, harness)

    assert shown == ("running", None)


# C062
@pytest.mark.parametrize("who", ["nobody", "child", "message"])
async def test_a_tighter_configuration_counts_whoever_wakes_the_session(
    autojump_clock: MockClock, who: str
) -> None:
    """Begun where nothing was asked, gone on where everything is: it asks, whoever resumes it."""
    world = deep_world() if who == "child" else GuardedWorld(acts("ship"), "done")
    world.policy = lambda call: None
    async with world.open() as harness:
        # Closed before anything ran: it was handed in under the permissive configuration.
        await (await harness.root()).submit("go", request_id="r1")
    world.policy = ask_for_act
    async with world.open() as harness:
        if who == "message":
            await (await harness.root()).submit("and this", request_id="r2")
        harness.start()
        await rest()
        request = the_open(harness)

    assert request.state == "open"
    assert "act ship" not in world.ledger
