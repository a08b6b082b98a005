"""Grants: what a pattern allows for later calls, and every way in which it does not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_world import MODEL, ask, results, verify
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
    Rewrite,
    ToolCall,
    ToolTask,
    hook,
    tool,
)
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


@pytest.mark.parametrize(
    ("what", "limits", "codes"),
    [
        ("x" * (2**20 - len('{"what":""}')), {}, ["denied"]),
        ("x" * (2**20 - len('{"what":""}') + 1), {}, ["invalid_arguments"]),
        ("\x01" * 2**18, {}, ["invalid_arguments"]),
        ("x" * 30_000, {"document_bytes_max": 50_000}, ["invalid_arguments"]),
        ("x" * 30_000, {"document_bytes_max": 90_000}, ["denied"]),
    ],
    ids=["fits", "too large", "escaped", "a small store", "a larger store"],
)
async def test_what_cannot_be_shown_in_full_is_not_asked(
    autojump_clock: MockClock, what: str, limits: dict[str, int], codes: list[str]
) -> None:
    """Arguments that no request can hold are an error result, and the run goes on."""
    world = GuardedWorld(acts(what), "done", settings=Settings(**limits))  # type: ignore[arg-type]
    async with world.open() as harness:
        submission = await begin(harness)
        for request in harness.permissions():
            assert request.arguments == {"what": what}
            await harness.decide(request.id, Deny())
        answer = await submission.wait()
        found = [each.code for each in await results(harness)]
        await verify(world, harness)

    assert (found, answer.text) == (codes, "done")


@pytest.mark.parametrize("depth", [195, 196, 197, 198, 199])
async def test_what_is_as_deep_as_a_value_may_be_is_asked_or_refused(
    autojump_clock: MockClock, depth: int
) -> None:
    """Arguments that a hook makes too deep to be asked about are an error result, no fault."""

    @tool(name="act")
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

    world = GuardedWorld(acts("x"), "done")
    world.install(act)
    hooked = hook(ToolTask, before_tool=deepen)
    world.registry.install(Extension("deepen", hooks=[hooked]))
    async with world.open() as harness:
        submission = await begin(harness)
        is_asked = bool(harness.permissions())
        for request in harness.permissions():
            await harness.decide(request.id, Deny())
        answer = await submission.wait()
        (result,) = await results(harness)
        await verify(world, harness)

    assert answer.text == "done"
    assert result.code == ("denied" if is_asked else "invalid_arguments")
    assert is_asked or depth > 197


class Box:
    """An environment that says what keeps it in."""

    def __init__(self, boundary: str, root: str = "/box") -> None:
        self.boundary = boundary
        self.root = Path(root)


async def test_a_yes_is_for_one_boundary(autojump_clock: MockClock) -> None:
    """What keeps the tool in is part of what is approved: another one is asked for anew."""
    world = GuardedWorld(acts("ship"), "done")
    async with world.open() as harness:
        harness._services.env_for = lambda id, agent: Box("container")  # type: ignore[return-value]
        submission = await begin(harness)
        first = the_open(harness)
        harness._services.env_for = lambda id, agent: Box("none")  # type: ignore[return-value]
        await harness.decide(first.id, Once())
        await rest()
        second = the_open(harness)
        await harness.decide(second.id, Once())
        await submission.wait()

    assert [(each.boundary, each.directory) for each in (first, second)] == [
        ("container", "/box"),
        ("none", "/box"),
    ]
    assert world.ledger == ["act ship"]


async def test_a_directory_without_a_name_is_stored_all_the_same(
    autojump_clock: MockClock,
) -> None:
    """Bytes that are no text are shown escaped; a place that is gone blocks the call."""
    world = GuardedWorld(acts("ship", "sell"), "done", policy=lambda call: Ask(reason="\ud800\0x"))
    async with world.open() as harness:
        harness._services.env_for = lambda id, agent: Box("b", "/x\udcff")  # type: ignore[return-value]
        submission = await begin(harness)

        def gone(id: int, agent: Any) -> Any:
            raise OSError("no such folder")

        harness._services.env_for = gone
        shown = {(each.directory, each.reason) for each in harness.permissions()}
        for request in harness.permissions():
            await harness.decide(request.id, Once())
        await submission.wait()
        codes = [each.code for each in await results(harness)]
        await verify(world, harness)

    assert shown == {("/x\\xff", "\ufffdx")}
    assert codes == ["blocked", "blocked"]
    assert world.ledger == []


async def test_a_text_that_changes_the_arguments_changes_neither_what_is_shown_nor_what_runs(
    autojump_clock: MockClock,
) -> None:
    """`permission_text` makes a text of the arguments; what it does to them is nobody's."""

    def harmless(arguments: Any) -> str:
        arguments["what"] = "nothing at all"
        return "harmless"

    @tool(name="act", permission_text=harmless)
    async def act(what: str) -> str:
        """Act."""
        world.ledger.append(what)
        return what

    world = GuardedWorld(acts("remove"), "ok")
    world.install(act)
    async with world.open() as harness:
        await begin(harness)
        request = the_open(harness)
        await harness.decide(request.id, Once())
        await rest()
    assert (request.arguments, world.ledger) == ({"what": "remove"}, ["remove"])
