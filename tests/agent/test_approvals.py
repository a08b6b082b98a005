"""Approvals: a call waits for a person, over restarts, and what runs is what was approved."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from agent_world import DieAt, ask, messages, results, run_killed, text_of, verify
from approval_world import GuardedWorld, acts, begin, rest, the_open
from trio.testing import MockClock

from pidurable import (
    Ask,
    BeforeTool,
    BlockCall,
    Deny,
    Extension,
    Once,
    Pattern,
    Rerun,
    Rewrite,
    ToolTask,
    UserMessage,
    hook,
)
from pidurable.agent._script import ScriptedCall, Step
from pidurable.agent._services import AgentChange
from pidurable.errors import AlreadyDecidedError, InvalidArgumentError, NotFoundError
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings

# --- yes and no -----------------------------------------------------------------------------------


async def test_a_call_waits_for_a_person_and_runs_on_yes(autojump_clock: MockClock) -> None:
    """The request says what would run; nothing runs before the yes, and once after it."""
    world = GuardedWorld(acts("ship"), "done")
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        (call,) = (await harness.root()).live()["calls"]
        before = list(world.ledger)

        decided = await harness.decide(request.id, Once(), by="ann")
        answer = await submission.wait()
        await verify(world, harness)
        after = await harness.permission(request.id)

    assert (request.state, request.tool, request.arguments) == ("open", "act", {"what": "ship"})
    assert (request.text, request.risk, request.reason) == ("ship", "medium", "it acts")
    assert (call["held_by"], call["status"]) == (f"permission {request.id}", "waiting")
    assert before == []
    assert world.ledger == ["act ship"]
    assert answer.text == "done"
    assert after == decided
    assert (after.state, after.decision, after.decided_by) == ("granted", Once(), "ann")
    assert after.decided_us is not None
    # The hooks were asked again, and told what had been granted.
    assert [each.grant for each in world.asked] == [None, decided]


async def test_a_denial_with_a_text_redirects_the_model(autojump_clock: MockClock) -> None:
    """The call gets an error result with the person's words, and nothing ran."""
    world = GuardedWorld(acts("ship"), "as you like")
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        await harness.decide(request.id, Deny("ask the owner first"))
        answer = await submission.wait()
        (result,) = await results(harness)
        await verify(world, harness)

    assert (result.is_error, result.code) == (True, "denied")
    assert "ask the owner first" in text_of(result)
    assert (answer.text, world.ledger) == ("as you like", [])


# C055
async def test_parallel_requests_are_answered_each_by_its_own_id(
    autojump_clock: MockClock,
) -> None:
    """Three calls of one tool, decided in reverse order over a restart, one of them denied."""
    world = GuardedWorld(acts("a", "b", "c"), "done")
    async with world.open() as harness:
        await begin(harness)
        first = {each.text: each for each in harness.permissions()}
        await harness.decide(first["c"].id, Once())
        await rest()
        middle = {each.text for each in harness.permissions()}
    async with world.open() as harness:
        await harness.decide(first["b"].id, Deny("not b"))
        await rest()
        last = the_open(harness)
        await harness.decide(last.id, Once())
        answer = await ask(harness, "go")
        found = await results(harness)
        await verify(world, harness)

    assert len({each.id for each in first.values()}) == 3
    assert middle == {"a", "b"}
    assert last == first["a"]
    assert world.ledger == ["act c", "act a"]
    assert answer.text == "done"
    assert {each.call[1]: each.code for each in found} == {0: None, 1: "denied", 2: None}


# C058
@pytest.mark.parametrize("decision", [None, "maybe", 1, True, "once", {"kind": "once"}, Once])
async def test_what_is_no_decision_leaves_the_request_open(
    autojump_clock: MockClock, decision: Any
) -> None:
    """Nothing but a decision decides; the call stays parked, over a restart too."""
    world = GuardedWorld(acts("ship"), "done")
    async with world.open() as harness:
        await begin(harness)
        request = the_open(harness)
        with pytest.raises(InvalidArgumentError, match="decision"):
            await harness.decide(request.id, decision)
        await rest()
        assert the_open(harness) == request
    async with world.open() as harness:
        harness.start()
        await rest()
        assert the_open(harness) == request
    assert world.ledger == []


# C058
async def test_unknown_and_finished_requests_cannot_be_decided(autojump_clock: MockClock) -> None:
    """An id of nothing, of another thing, or of a request that is done runs nothing."""
    world = GuardedWorld(acts("ship"), "done")
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        for id in (request.task, request.conversation, 10**9, 0, -1, True, None, "1"):
            with pytest.raises(NotFoundError, match="permission request"):
                await harness.decide(id, Once())  # type: ignore[arg-type]
        for given in (harness.decide(request, Once()), harness.revoke(request)):  # type: ignore[arg-type]
            with pytest.raises(NotFoundError, match="An id is expected: a whole number"):
                await given
        with pytest.raises(InvalidArgumentError, match="the request is about a call"):
            await harness.decide(request.id, Rerun())
        with pytest.raises(NotFoundError, match="permission request"):
            await harness.decide(request.id, Once(), principal="mallory")
        assert the_open(harness) == request
        await harness.decide(request.id, Deny())
        await submission.wait()
        for decision in (Once(), Deny(), Pattern("ship")):
            with pytest.raises(AlreadyDecidedError, match="is denied"):
                await harness.decide(request.id, decision)
        await rest()
    assert world.ledger == []


# --- must show: who comes first -------------------------------------------------------------------


async def try_to_decide(harness: Harness, id: int, decision: Any, told: list[str]) -> None:
    """Decide, and note what a decider who came too late is told."""
    try:
        await harness.decide(id, decision, by=repr(decision))
    except AlreadyDecidedError as error:
        told.append(f"{error.state} {error.closed_reason}")


async def test_of_two_deciders_at_once_the_first_to_commit_wins(
    autojump_clock: MockClock,
) -> None:
    """The other one is told what stands, and the call does what the first one said."""
    for first, second, ledger in ((Once(), Deny("no"), ["act ship"]), (Deny("no"), Once(), [])):
        world = GuardedWorld(acts("ship"), "done")
        told: list[str] = []
        async with world.open() as harness:
            submission = await begin(harness)
            request = the_open(harness)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(try_to_decide, harness, request.id, first, told)
                await trio.lowlevel.checkpoint()
                nursery.start_soon(try_to_decide, harness, request.id, second, told)
            await submission.wait()
            stands = await harness.permission(request.id)
            await verify(world, harness)

        assert stands.decided_by is not None
        assert len(told) == 1
        assert world.ledger == (["act ship"] if stands.decision == Once() else [])
        assert (stands.decision, world.ledger) == (first, ledger)


# C057
async def test_a_request_expires_with_a_code_of_its_own(autojump_clock: MockClock) -> None:
    """Silence is no refusal: the model is told that nobody decided, and a late yes runs nothing."""
    settings = Settings(permission_seconds_max=60)
    world = GuardedWorld(acts("ship"), "done", settings=settings)
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        await trio.sleep(120)
        expired = await harness.permission(request.id)
        (result,) = await results(harness)
        with pytest.raises(AlreadyDecidedError, match="is expired"):
            await harness.decide(request.id, Once())
        answer = await submission.wait()
        await verify(world, harness)

    assert request.expires_us is not None
    assert request.expires_us - request.created_us == 60_000_000
    assert (expired.state, expired.decision, expired.decided_by) == ("expired", None, None)
    assert (result.code, result.is_error) == ("permission_expired", True)
    assert (answer.text, world.ledger) == ("done", [])


@pytest.mark.parametrize("seconds", [1e12, 1e300])
async def test_a_time_beyond_the_calendar_is_none(
    autojump_clock: MockClock, seconds: float
) -> None:
    """A hook that gives more time than there are moments gives all the time there is."""
    world = GuardedWorld(acts("ship"), "done", policy=lambda call: Ask(seconds=seconds))
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        await harness.decide(request.id, Once())
        await submission.wait()

    assert request.expires_us is None
    assert world.ledger == ["act ship"]


# C057
async def test_a_yes_at_the_moment_of_expiry_is_refused(autojump_clock: MockClock) -> None:
    """The expiry is checked in the commit that decides, whether or not the call has woken."""
    policy_ask = Ask("low", seconds=30)
    world = GuardedWorld(acts("ship"), "done", policy=lambda call: policy_ask)
    async with world.open() as harness:
        await begin(harness)
        request = the_open(harness)
        assert request.expires_us is not None
    # Nothing runs here: the call is found parked, and its time has passed meanwhile.
    async with world.open() as harness:
        left = (request.expires_us - harness.session.clock.now_us()) / 1e6
        before = str(harness.explain(request.task))
        await trio.sleep(left)
        after = str(harness.explain(request.task))
        with pytest.raises(AlreadyDecidedError, match="is expired"):
            await harness.decide(request.id, Once())
        harness.start()
        await rest()
        assert (await harness.permission(request.id)).state == "expired"
    assert world.ledger == []
    assert "waits for a person" in before
    # Whom it waited for can do nothing any more.
    assert "waits for a person" not in after
    assert "has not been started" in after


# C057
async def test_a_stored_yes_runs_the_call_after_a_kill(autojump_clock: MockClock) -> None:
    """Killed between the decision and the start of the tool (CP9), it runs once."""
    world = GuardedWorld(acts("ship"), "done")
    async with world.open() as harness:
        await begin(harness)
        request = the_open(harness)

    async def decide(harness: Any, _: Any) -> None:
        await harness.decide(request.id, Once())
        harness.start()
        await rest()

    point = DieAt(world, "CP9")
    await run_killed(world, point, decide)
    before = list(world.ledger)
    async with world.open() as harness:
        with pytest.raises(AlreadyDecidedError, match="is granted"):
            await harness.decide(request.id, Deny())
        answer = await ask(harness, "go")
        await verify(world, harness)

    assert point.struck
    assert before == []
    assert (answer.text, world.ledger) == ("done", ["act ship"])


async def test_an_abort_that_commits_first_beats_a_yes(autojump_clock: MockClock) -> None:
    """From the commit that marks anything above, nobody can say yes; the request is closed."""
    world = GuardedWorld(acts("ship"), "back")
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        generation = harness.task(request.task).owner
        assert generation is not None
        outcomes: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness.abort_task, generation)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(try_to_decide, harness, request.id, Once(), outcomes)
        await submission.wait()
        await rest()
        closed = await harness.permission(request.id)
        listed = harness.permissions()
        await ask(harness, "again", "r2")
        await verify(world, harness)
        codes = [each.code for each in await results(harness)]

    assert outcomes == ["closed aborted"]
    assert (closed.state, closed.closed_reason, closed.decision) == ("closed", "aborted", None)
    assert listed == []
    assert codes == ["aborted"]
    assert world.ledger == []


async def test_an_abort_closes_the_request_in_the_commit_that_marks_the_call(
    autojump_clock: MockClock,
) -> None:
    """Whoever sees the mark sees the request closed; there is no moment in between."""
    world = GuardedWorld(acts("ship"), "back")
    async with world.open() as harness:
        await begin(harness)
        request = the_open(harness)
        async with harness.commit() as tx:
            tx.abort_task(request.task)
        # Nothing has run since that commit.
        state = (await harness.permission(request.id)).state
        held = (await harness.root()).live()["calls"][0]["held_by"]
        await rest()

    assert (state, held) == ("closed", None)


# --- must show: what changed meanwhile ------------------------------------------------------------


async def test_a_yes_counts_for_the_arguments_that_were_shown(autojump_clock: MockClock) -> None:
    """A hook that rewrites otherwise after the yes has the call asked anew, with the new ones."""
    world = GuardedWorld(acts("x"), "done")
    wanted = "harmless"

    def policy(call: BeforeTool) -> Any:
        return Ask() if call.arguments["what"] in ("harmless", "harmful") else None

    async def rewrite(call: BeforeTool) -> Any:
        return Rewrite({"what": wanted})

    world.policy = policy
    world.registry.uninstall("guard")

    async def guard(call: BeforeTool) -> Any:
        return world.policy(call)

    world.registry.install(Extension("rewrite", hooks=[hook(ToolTask, before_tool=rewrite)]))
    world.registry.install(Extension("guard", hooks=[hook(ToolTask, before_tool=guard)]))
    async with world.open() as harness:
        submission = await begin(harness)
        first = the_open(harness)
        wanted = "harmful"
        await harness.decide(first.id, Once())
        await rest()
        second = the_open(harness)
        superseded = await harness.permission(first.id)
        ran = list(world.ledger)
        await harness.decide(second.id, Once())
        await submission.wait()
        await verify(world, harness)

    assert (first.arguments, second.arguments) == ({"what": "harmless"}, {"what": "harmful"})
    assert first.digest != second.digest
    assert (superseded.state, superseded.closed_reason) == ("closed", "superseded")
    assert superseded.decision == Once()
    assert ran == []
    assert world.ledger == ["act harmful"]


async def test_a_policy_that_blocks_by_now_beats_a_yes(autojump_clock: MockClock) -> None:
    """The hooks are asked again on yes, and a block wins."""
    world = GuardedWorld(acts("ship"), "done")
    async with world.open() as harness:
        submission = await begin(harness)
        world.policy = lambda call: BlockCall("not on Fridays")
        await harness.decide(the_open(harness).id, Once())
        await submission.wait()
        (result,) = await results(harness)
        await verify(world, harness)

    assert (result.code, world.ledger) == ("blocked", [])
    assert "not on Fridays" in text_of(result)


async def test_a_risk_that_rose_is_asked_for_again(autojump_clock: MockClock) -> None:
    """A yes to a low risk does not cover a high one; one to a high risk covers a low one."""
    world = GuardedWorld(acts("ship"), "done", policy=lambda call: Ask("low"))
    async with world.open() as harness:
        submission = await begin(harness)
        first = the_open(harness)
        world.policy = lambda call: Ask("high", "the load is explosive")
        await harness.decide(first.id, Once())
        await rest()
        second = the_open(harness)
        world.policy = lambda call: Ask("medium")
        await harness.decide(second.id, Once())
        await submission.wait()
        await verify(world, harness)
        states = [(await harness.permission(each.id)).closed_reason for each in (first, second)]

    why = f"Asked again after permission {first.id}: changed is risk."
    assert (second.risk, second.reason) == ("high", f"the load is explosive\n{why}")
    assert states == ["superseded", None]
    assert world.ledger == ["act ship"]


async def test_another_working_directory_is_asked_for_again(
    autojump_clock: MockClock, tmp_path: Any
) -> None:
    """Restarted with the agent in another folder, a stored yes does not count there."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    world = GuardedWorld(acts("ship"), "done")
    async with world.open() as harness:
        await (await harness.root()).configure(AgentChange(cwd=str(here)))
        await begin(harness)
        first = the_open(harness)
    async with world.open() as harness:
        await (await harness.root()).configure(AgentChange(cwd=str(there)))
        await harness.decide(first.id, Once())
        harness.start()
        await rest()
        second = the_open(harness)
        ran = list(world.ledger)
        await harness.decide(second.id, Once())
        await ask(harness, "go")
        await verify(world, harness)

    assert (first.directory, second.directory) == (str(here), str(there))
    assert second.reason.endswith(f"after permission {first.id}: changed is directory.")
    assert ran == []
    assert world.ledger == ["act ship"]


@pytest.mark.parametrize("change", [{"version": 2}, {"replay": "safe"}, {"timeout": 5.0}])
async def test_a_reloaded_tool_is_asked_for_again_if_it_is_another(
    autojump_clock: MockClock, change: dict[str, Any]
) -> None:
    """Another version or replay policy is another tool; what the digest leaves out is not."""
    world = GuardedWorld(acts("ship"), "done")
    async with world.open() as harness:
        submission = await begin(harness)
        first = the_open(harness)
        world.install(world.act(**change))
        await harness.decide(first.id, Once())
        await rest()
        asked_again = bool(harness.permissions())
        for request in harness.permissions():
            assert request.reason.endswith(f"after permission {first.id}: changed is tool.")
            await harness.decide(request.id, Once())
        await submission.wait()
        await verify(world, harness)

    assert asked_again is ("timeout" not in change)
    assert world.ledger == ["act ship"]


async def test_a_tool_that_is_gone_by_the_yes_is_unavailable(autojump_clock: MockClock) -> None:
    """The model is told that the tool is not there any more."""
    world = GuardedWorld(acts("ship"), "done")
    async with world.open() as harness:
        submission = await begin(harness)
        world.install()
        await harness.decide(the_open(harness).id, Once())
        await submission.wait()
        (result,) = await results(harness)
        await verify(world, harness)

    assert (result.code, world.ledger) == ("tool_unavailable", [])


# --- must show: what comes in meanwhile -----------------------------------------------------------


# C034, C056
async def test_messages_wait_visibly_while_a_request_is_open(autojump_clock: MockClock) -> None:
    """Steers are held, the request stays as it was, and all are answered after the decision."""
    for decision, ledger in ((Once(), ["act ship"]), (Deny("later"), [])):
        world = GuardedWorld(acts("ship"), "done", "and that", "and that", "and that")
        async with world.open() as harness:
            submission = await begin(harness)
            root = await harness.root()
            request = the_open(harness)
            steers = [
                await root.submit(f"what does this do? {n}", when_busy="steer") for n in range(3)
            ]
            await rest()
            queued = [(await each.status()).status for each in steers]
            (call,) = root.live()["calls"]
            still = the_open(harness)
            asked = len(world.model.requests)
            await harness.decide(request.id, decision)
            await submission.wait()
            for each in steers:
                await each.wait()
            await harness.wait_for_idle()
            await verify(world, harness)
            said = [text_of(m) for m in messages(await root.history(), UserMessage)]

        # No turn ran meanwhile, so the model could not wish for it again.
        assert asked == 1
        assert queued == ["queued"] * 3
        assert call["held_by"] == f"permission {request.id}"
        assert still == request
        assert world.ledger == ledger
        assert said[1:] == [f"what does this do? {n}" for n in range(3)]


# C059
@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
async def test_guarded_calls_wait_in_every_order_of_a_batch(
    autojump_clock: MockClock, order: tuple[int, ...]
) -> None:
    """Free calls run, guarded ones wait, and the next request is sent when all are settled."""
    names = [("safe", {}), ("act", {"what": "ship"}), ("act", {"what": "sell"})]
    step = Step(calls=tuple(ScriptedCall(name=names[n][0], arguments=names[n][1]) for n in order))
    world = GuardedWorld(step, "done")
    async with world.open() as harness:
        await begin(harness)
        free = list(world.ledger)
        first = next(r for r in harness.permissions() if r.arguments == {"what": "ship"})
        await harness.decide(first.id, Once())
        await rest()
        requests = len(world.model.requests)
    async with world.open() as harness:
        harness.start()
        await rest()
        last = the_open(harness)
        await harness.decide(last.id, Deny())
        answer = await ask(harness, "go")
        await verify(world, harness)

    assert [line.split()[0] for line in free] == ["safe"]
    assert world.ledger[1:] == ["act ship"]
    assert last.arguments == {"what": "sell"}
    assert requests == 1
    assert answer.text == "done"
