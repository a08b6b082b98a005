"""Grants: what a pattern allows for later calls, and every way in which it does not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_world import MODEL, ask, results, verify
from approval_world import GuardedWorld, acts, begin, rest, the_open
from trio.testing import MockClock

from pidurable import Ask, BlockCall, Deny, Once, Pattern
from pidurable.agent._services import AgentChange
from pidurable.errors import InvalidArgumentError, NotFoundError
from pidurable.records._limits import Settings


async def test_a_pattern_lets_later_calls_by_and_records_each_use(
    autojump_clock: MockClock,
) -> None:
    """The call itself, and later ones that match, run; each use leaves a request of its own."""
    world = GuardedWorld(acts("list a"), acts("list b", "list c"), "done")
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        await harness.decide(request.id, Pattern("list *"), by="ann")
        await submission.wait()
        (grant,) = harness.grants()
        tasks = [task.id for task in harness.tasks(kind="pi.tool")]
        uses = [
            each
            for id in range(request.id + 1, harness.session.line.next_id)
            if (each := await found(harness, id)) is not None
        ]
        await verify(world, harness)

    assert sorted(world.ledger) == ["act list a", "act list b", "act list c"]
    assert (grant.pattern, grant.tool, grant.by, grant.request) == (
        "list *",
        "act",
        "ann",
        request.id,
    )
    assert (grant.uses, grant.risk) == (2, "medium")
    assert sorted(each.task for each in uses) == tasks[1:]
    assert {(each.state, each.grant, each.decision) for each in uses} == {
        ("granted", grant.id, None)
    }


async def found(harness: Any, id: int) -> Any:
    """A request, if the id is one's."""
    try:
        return await harness.permission(id)
    except NotFoundError:
        return None


async def test_a_grant_survives_a_restart_and_ends_when_it_is_revoked(
    autojump_clock: MockClock,
) -> None:
    """What was allowed is durable, and so is its end."""
    world = GuardedWorld(acts("list a"), "one", acts("list b"), "two", acts("list c"), "three")
    async with world.open() as harness:
        await begin(harness)
        await harness.decide(the_open(harness).id, Pattern("list *"))
        await rest()
    async with world.open() as harness:
        await ask(harness, "again", "r2")
        (grant,) = harness.grants()
        revoked = await harness.revoke(grant.id)
        with pytest.raises(NotFoundError, match="grant"):
            await harness.revoke(grant.id)
    async with world.open() as harness:
        assert harness.grants() == []
        await begin(harness, "and again", "r3")
        request = the_open(harness)
        await harness.decide(request.id, Deny())
        await rest()
        await verify(world, harness)

    assert revoked == grant
    assert world.ledger == ["act list a", "act list b"]


async def test_a_grant_ends_at_its_moment(autojump_clock: MockClock) -> None:
    """After its expiry the same call is asked for again, and the grant is not listed."""
    world = GuardedWorld(acts("list a"), acts("list b"), "one", acts("list c"), "two")
    async with world.open() as harness:
        submission = await begin(harness)
        now = datetime.fromtimestamp(harness.session.clock.now_us() / 1e6, UTC)
        request = the_open(harness)
        with pytest.raises(InvalidArgumentError, match="it has passed"):
            await harness.decide(request.id, Pattern("list *", expires=now))
        expires = now + timedelta(seconds=60)
        await harness.decide(request.id, Pattern("list *", expires=expires))
        await submission.wait()
        await rest_until(harness, expires)
        listed = harness.grants()
        await begin(harness, "again", "r2")
        await harness.decide(the_open(harness).id, Deny())
        await rest()
        await verify(world, harness)

    assert listed == []
    assert world.ledger == ["act list a", "act list b"]


async def rest_until(harness: Any, moment: datetime) -> None:
    """Let the virtual clock run to a moment."""
    import trio

    await trio.sleep(moment.timestamp() - harness.session.clock.now_us() / 1e6 + 0.001)


@pytest.mark.parametrize(
    "later", ["list a; drop", "list $(drop)", "list a\ndrop", "drop", "LIST a"]
)
async def test_a_grant_covers_no_chained_or_other_text(
    autojump_clock: MockClock, later: str
) -> None:
    """A text that chains commands, or that the pattern does not match, is asked for."""
    world = GuardedWorld(acts("list a"), acts(later), "done")
    async with world.open() as harness:
        submission = await begin(harness)
        await harness.decide(the_open(harness).id, Pattern("list *"))
        await rest()
        request = the_open(harness)
        await harness.decide(request.id, Deny())
        await submission.wait()
        await verify(world, harness)

    assert request.text == later
    assert world.ledger == ["act list a"]


async def test_a_pattern_must_match_the_call_it_is_given_for(autojump_clock: MockClock) -> None:
    """A pattern that says nothing about what is shown is a slip: refused, and the request stays."""
    world = GuardedWorld(acts("list a; drop"), acts("list a"), "done")
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        with pytest.raises(InvalidArgumentError, match="chains or substitutes"):
            await harness.decide(request.id, Pattern("list *"))
        await harness.decide(request.id, Once())
        await rest()
        request = the_open(harness)
        with pytest.raises(InvalidArgumentError, match="does not match the text of this call"):
            await harness.decide(request.id, Pattern("drop *"))
        assert the_open(harness) == request
        assert harness.grants() == []
        await harness.decide(request.id, Deny())
        await submission.wait()


# C062
async def test_a_tighter_policy_of_today_beats_a_grant(autojump_clock: MockClock) -> None:
    """A grant overrules no block, and no risk above the one it was given for."""
    world = GuardedWorld(
        acts("list a"), "one", acts("list b"), "two", acts("list c"), "three", acts("list d"), "4"
    )
    async with world.open() as harness:
        await begin(harness)
        await harness.decide(the_open(harness).id, Pattern("list *"))
        await rest()
    world.policy = lambda call: BlockCall("nothing is listed today")
    async with world.open() as harness:
        await ask(harness, "blocked", "r2")
        world.policy = lambda call: Ask("high")
        await begin(harness, "riskier", "r3")
        request = the_open(harness)
        await harness.decide(request.id, Deny())
        await rest()
        world.policy = lambda call: Ask("low")
        await ask(harness, "as before", "r4")
        codes = [each.code for each in await results(harness)]
        await verify(world, harness)

    assert codes == [None, "blocked", "denied", None]
    assert request.risk == "high"
    assert world.ledger == ["act list a", "act list d"]


# C062
@pytest.mark.parametrize("what", ["principal", "directory", "version"])
async def test_a_grant_is_for_one_principal_one_place_and_one_tool(
    autojump_clock: MockClock, tmp_path: Path, what: str
) -> None:
    """Another principal, working directory or version of the tool is asked for anew."""
    world = GuardedWorld(acts("list a"), "one", acts("list b"), "two")
    async with world.open() as harness:
        await begin(harness)
        await harness.decide(the_open(harness).id, Pattern("list *"))
        await rest()
        conversation = await harness.root()
        if what == "principal":
            async with harness.commit() as tx:
                id = tx.create_conversation(principal="bob")
            conversation = harness.conversation(id)
            await conversation.configure(AgentChange(model=MODEL))
        elif what == "directory":
            await conversation.configure(AgentChange(cwd=str(tmp_path)))
        else:
            world.install(world.act(version=2))
        await conversation.submit("again", request_id="r2")
        await rest()
        request = the_open(harness)
        await harness.decide(request.id, Deny())
        await rest()

    assert request.principal == ("bob" if what == "principal" else "")
    assert world.ledger == ["act list a"]


async def test_a_text_that_cannot_be_made_is_matched_by_nothing(
    autojump_clock: MockClock,
) -> None:
    """Where `permission_text` raises, the arguments are shown as JSON, and no pattern counts."""
    from pidurable import ToolCall, tool

    @tool(name="act", permission_text=lambda arguments: arguments["nothing"])
    async def act(what: str, call: ToolCall) -> str:
        """Act.

        Args:
            what: Which act.
        """
        return what

    world = GuardedWorld(acts("a"), "done")
    world.install(act)
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        with pytest.raises(InvalidArgumentError, match="no pattern matches"):
            await harness.decide(request.id, Pattern("*"))
        await harness.decide(request.id, Once())
        await submission.wait()

    assert request.text == '{"what":"a"}'


async def test_what_cannot_be_shown_in_full_is_not_asked(autojump_clock: MockClock) -> None:
    """Arguments of more than 1 MiB are an error result; those of 1 MiB are asked for."""
    fits, too_large = 2**20 - len('{"what":""}'), 2**20
    world = GuardedWorld(acts("x" * too_large), acts("x" * fits), "done", settings=Settings())
    async with world.open() as harness:
        submission = await begin(harness)
        request = the_open(harness)
        await harness.decide(request.id, Deny())
        await submission.wait()
        codes = [each.code for each in await results(harness)]

    assert codes == ["invalid_arguments", "denied"]
    assert len(request.text) == fits
