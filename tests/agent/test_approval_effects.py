"""Effects that were found after a crash and are a person's to judge: `replay="park"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_world import DieAt, ask, results, run_killed, text_of, verify
from approval_world import GuardedWorld, acts, begin, rest, the_open
from trio.testing import MockClock

from pidurable import (
    AgentChange,
    BeforeTool,
    BlockCall,
    Extension,
    Happened,
    Interrupted,
    Once,
    Rerun,
    Rewrite,
    ToolCall,
    ToolResult,
    ToolTask,
    hook,
    tool,
)
from pidurable.errors import InvalidArgumentError
from pidurable.records._limits import Settings


async def parked(where: str = "CP3", **options: Any) -> GuardedWorld:
    """A world whose only call died in the middle, with the policy `park`."""
    world = GuardedWorld(acts("ship"), "done", policy=lambda call: None, **options)
    world.install(world.act(replay="park"))
    point = DieAt(world, where)
    await run_killed(world, point, begin_it)
    assert point.struck
    return world


async def begin_it(harness: Any, _: Any) -> None:
    await begin(harness)


@pytest.mark.parametrize("where", ["CP2", "CP3"])
async def test_a_person_has_a_parked_effect_run_again(
    autojump_clock: MockClock, where: str
) -> None:
    """Found in the middle, the call waits; run again, it has the same arguments."""
    world = await parked(where)
    once = list(world.ledger)
    async with world.open() as harness:
        harness.start()
        await rest()
        request = the_open(harness)
        waited = list(world.ledger)
        with pytest.raises(InvalidArgumentError, match="an effect found after a crash"):
            await harness.decide(request.id, Once())
        await harness.decide(request.id, Rerun(), by="ann")
        answer = await ask(harness, "go")
        await verify(world, harness)

    assert (request.subject, request.arguments) == ("effect", {"what": "ship"})
    assert "unknown" in request.reason
    assert waited == once
    assert world.ledger == [*once, "act ship"]
    assert answer.text == "done"


@pytest.mark.parametrize("result", ["it was sent", ToolResult("it was sent", details={"n": 1})])
async def test_a_person_says_what_the_result_was(autojump_clock: MockClock, result: Any) -> None:
    """The given result is the call's, and nothing is run again."""
    world = await parked()
    async with world.open() as harness:
        harness.start()
        await rest()
        await harness.decide(the_open(harness).id, Happened(result))
        await ask(harness, "go")
        (found,) = await results(harness)
        await verify(world, harness)

    assert (text_of(found), found.is_error) == ("it was sent", False)
    assert world.ledger == ["act ship"]


async def test_what_a_person_has_said_is_not_changed_afterwards(autojump_clock: MockClock) -> None:
    """JSON in the given result is a copy, and so is that in the request which is handed out."""
    world = await parked()
    given = {"n": [1]}
    async with world.open() as harness:
        harness.start()
        await rest()
        request = the_open(harness)
        said = await harness.decide(request.id, Happened(ToolResult("sent", details=given)))
        given["n"].append(2)
        assert isinstance(said.decision, Happened)
        said.decision.as_result().details["n"].append(3)
        await ask(harness, "go")
        again = await harness.permission(request.id)
        (entry,) = [
            each for each in await (await harness.root()).history() if each.kind == "pi.tool_result"
        ]
        await verify(world, harness)

    assert entry.data["details"] == {"n": [1]}
    assert again.decision == Happened(ToolResult("sent", details={"n": [1]}))


async def test_what_a_person_says_is_checked_like_a_result(autojump_clock: MockClock) -> None:
    """A structured result that does not fit is refused, and the request stays open."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    world = GuardedWorld(acts("ship"), "done", policy=lambda call: None)
    world.install(world.act(replay="park", output_schema=schema))
    await run_killed(world, DieAt(world, "CP3"), begin_it)
    async with world.open() as harness:
        harness.start()
        await rest()
        request = the_open(harness)
        for bad in (ToolResult("x", structured={"n": "one"}), b"x", None, ToolResult(b"x")):  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match="result"):
                await harness.decide(request.id, Happened(bad))  # type: ignore[arg-type]
        assert the_open(harness) == request
        await harness.decide(request.id, Happened(ToolResult("x", structured={"n": 1})))
        await ask(harness, "go")
        (entry,) = [
            each for each in await (await harness.root()).history() if each.kind == "pi.tool_result"
        ]
        await verify(world, harness)

    assert entry.data["structured"] == {"n": 1}
    assert world.ledger == ["act ship"]


async def test_a_person_cannot_tell_either(autojump_clock: MockClock) -> None:
    """Interrupted: the model is told that the outcome is unknown."""
    world = await parked()
    async with world.open() as harness:
        harness.start()
        await rest()
        await harness.decide(the_open(harness).id, Interrupted())
        await ask(harness, "go")
        (found,) = await results(harness)
        await verify(world, harness)

    assert (found.code, world.ledger) == ("interrupted", ["act ship"])


async def test_nobody_judges_an_effect_in_time(autojump_clock: MockClock) -> None:
    """It expires like any request; what is known is that the outcome is unknown."""
    world = await parked(settings=Settings(permission_seconds_max=60))
    async with world.open() as harness:
        answer = await ask(harness, "go")
        (found,) = await results(harness)
        await verify(world, harness)

    assert answer.text == "done"
    assert (found.code, found.is_error) == ("interrupted", True)
    assert "nobody decided" in text_of(found).lower()
    assert world.ledger == ["act ship"]


async def test_an_effect_that_is_run_again_may_be_found_again(autojump_clock: MockClock) -> None:
    """Killed during the second run, a person is asked once more; nothing is repeated by itself."""
    world = await parked()

    async def again(harness: Any, _: Any) -> None:
        harness.start()
        await rest()
        await harness.decide(the_open(harness).id, Rerun())
        await rest()

    point = DieAt(world, "CP3")
    await run_killed(world, point, again)
    async with world.open() as harness:
        harness.start()
        await rest()
        await harness.decide(the_open(harness).id, Interrupted())
        await ask(harness, "go")
        await verify(world, harness)

    assert point.struck
    assert world.ledger == ["act ship", "act ship"]


@pytest.mark.parametrize("change", ["version", "gone", "block", "schema"])
async def test_a_rerun_is_of_what_was_shown_and_by_the_policy_of_today(
    autojump_clock: MockClock, change: str
) -> None:
    """Another tool is asked about anew; one that is gone, or blocked by now, does not run."""
    world = await parked()
    async with world.open() as harness:
        harness.start()
        await rest()
        first = the_open(harness)
        if change == "version":
            world.install(world.act(replay="park", version=2))
        elif change == "gone":
            world.install()
        elif change == "block":
            world.policy = lambda call: BlockCall("not today")
        else:
            world.install(other_act(world))
        await harness.decide(first.id, Rerun())
        await rest()
        again = harness.permissions()
        for request in again:
            await harness.decide(request.id, Interrupted())
        await ask(harness, "go")
        (found,) = await results(harness)
        await verify(world, harness)
        state = await harness.permission(first.id)

    assert bool(again) is (change == "version")
    assert (state.state, state.closed_reason) == (
        ("closed", "superseded") if change == "version" else ("granted", None)
    )
    assert found.code == "interrupted"
    assert world.ledger == ["act ship"]
    if change == "block":
        assert "not today" in text_of(found)


def other_act(world: GuardedWorld) -> Any:
    """A tool of the name that does not take the arguments any more."""

    @tool(replay="park")
    async def act(where: int, call: ToolCall) -> str:
        """Act.

        Args:
            where: Somewhere.
        """
        world.ledger.append("other")
        return "other"

    return act


async def test_an_abort_closes_the_request_of_an_effect(autojump_clock: MockClock) -> None:
    """The result says that a part of the effect may have happened."""
    world = await parked()
    async with world.open() as harness:
        harness.start()
        await rest()
        request = the_open(harness)
        await (await harness.root()).abort()
        await rest()
        closed = await harness.permission(request.id)
        (found,) = await results(harness)

    assert (closed.state, closed.closed_reason) == ("closed", "aborted")
    assert found.code == "aborted"
    assert "may have happened" in text_of(found)


@pytest.mark.parametrize("depth", [194, 196, 197])
async def test_an_effect_that_cannot_be_asked_about_is_interrupted(
    autojump_clock: MockClock, depth: int
) -> None:
    """Arguments too deep for a request: the model is told that the outcome is unknown."""

    @tool(name="act", replay="park")
    async def act(what: Any) -> str:
        """Act.

        Args:
            what: Which act.
        """
        return "acted"

    async def deepen(call: BeforeTool) -> Rewrite:
        deep: Any = "x"
        for _ in range(depth):
            deep = [deep]
        return Rewrite({"what": deep})

    world = GuardedWorld(acts("ship"), "done", policy=lambda call: None)
    world.install(act)
    hooked = hook(ToolTask, before_tool=deepen)
    world.registry.install(Extension("deepen", hooks=[hooked]))
    await run_killed(world, DieAt(world, "CP3"), begin_it)
    async with world.open() as harness:
        harness.start()
        await rest()
        is_asked = bool(harness.permissions())
        for request in harness.permissions():
            await harness.decide(request.id, Interrupted())
        answer = await ask(harness, "go")
        (result,) = await results(harness)
        await verify(world, harness)

    assert (answer.text, result.code) == ("done", "interrupted")
    assert is_asked or depth > 196


# --- what was permitted, and is found in the middle -----------------------------------------------


async def permitted(**options: Any) -> GuardedWorld:
    """A world whose only call was allowed, and died behind its effect; it is safe to repeat."""
    world = GuardedWorld(acts("ship"), "done", **options)
    world.install(world.act(replay="safe"))
    point = DieAt(world, "CP3")

    async def live(harness: Any, _: Any) -> None:
        await begin(harness)
        await harness.decide(the_open(harness).id, Once())
        await rest()

    await run_killed(world, point, live)
    assert point.struck
    return world


async def test_what_was_permitted_runs_again_as_it_was_permitted(
    autojump_clock: MockClock,
) -> None:
    """The yes holds for the repetition too: nobody is asked a second time."""
    world = await permitted()
    async with world.open() as harness:
        answer = await ask(harness, "go")
        await verify(world, harness)

    assert answer.text == "done"
    assert world.ledger == ["act ship"] * 2


@pytest.mark.parametrize("changed", ["tool", "directory"])
async def test_what_is_not_as_it_was_permitted_runs_again_only_if_a_person_says_so(
    autojump_clock: MockClock, changed: str, tmp_path: Path
) -> None:
    """With another version of the tool, or elsewhere, the effect is a person's to judge."""
    world = await permitted()
    if changed == "tool":
        world.install(world.act(replay="safe", version=2))
    async with world.open() as harness:
        if changed == "directory":
            await (await harness.root()).configure(AgentChange(cwd=str(tmp_path)))
        harness.start()
        await rest()
        request = the_open(harness)
        waited = list(world.ledger)
        await harness.decide(request.id, Rerun())
        answer = await ask(harness, "go")
        await verify(world, harness)

    assert request.subject == "effect"
    assert "is not as it was when the call was permitted" in request.reason
    assert waited == ["act ship"]
    assert world.ledger == ["act ship"] * 2
    assert answer.text == "done"
