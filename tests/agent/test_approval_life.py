"""Requests and grants as records: in forks, copies and collections, for readers and clients."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trio
from agent_world import MODEL, calls
from approval_world import GuardedWorld, acts, begin, rest, the_open
from trio.testing import MockClock

from pidurable import (
    AgentChange,
    Deny,
    Happened,
    Once,
    Pattern,
    PermissionDocument,
    export_session,
    import_session,
    open_client,
    open_harness,
    open_reader,
)
from pidurable.agent._script import Step, When
from pidurable.errors import (
    AlreadyDecidedError,
    InvalidArgumentError,
    NotFoundError,
    WaitTimeoutError,
)


async def test_a_fork_has_no_requests_and_no_grants(autojump_clock: MockClock) -> None:
    """The request stays with the call that asked; the fork's own calls ask anew."""
    world = GuardedWorld(acts("ship"), "done", acts("ship"), "done")
    async with world.open() as harness:
        await begin(harness)
        root = await harness.root()
        request = the_open(harness)
        fork = await root.fork()
        assert harness.permissions() == [request]
        assert harness.permissions(below=fork.id) == []
        assert harness.snapshot(PermissionDocument, fork.id, key=str(request.id)) is None
        stored = harness.snapshot(PermissionDocument, root.id, key=str(request.id))
        assert stored is not None
        await harness.decide(request.id, Once())
        await rest()
        assert fork.live()["run"] is None

    assert stored.state == "open"
    assert world.ledger == ["act ship"]


async def test_a_collection_takes_the_requests_of_what_it_removes(
    autojump_clock: MockClock,
) -> None:
    """A sub-agent's requests go with its conversation; the root's stay with what was said there."""
    world = GuardedWorld(
        Step(calls=acts("child").calls, when=When(user="the task", turn=0)),
        Step(text="acted", when=When(user="the task", turn=1)),
        acts("root"),
        calls("subagent", task="the task"),
        "done",
    )
    async with world.open() as harness:
        submission = await begin(harness)
        first = the_open(harness)
        await harness.decide(first.id, Once())
        await rest()
        second = the_open(harness)
        await harness.decide(second.id, Once())
        await submission.wait()
        await harness.wait_for_idle()
        await trio.sleep(1)
        report = await harness.gc(older_than=timedelta(0))
        kept = await harness.permission(first.id)
        with pytest.raises(NotFoundError, match="permission request"):
            await harness.permission(second.id)
        with pytest.raises(NotFoundError, match="permission request"):
            await harness.decide(second.id, Once())

    assert report.conversations == 1
    assert (kept.state, kept.text) == ("granted", "root")


@pytest.fixture
def guarded() -> GuardedWorld:
    """A world whose script acts twice."""
    return GuardedWorld(acts("ship", "list a"), "done")


async def test_readers_and_clients_see_and_decide_what_is_open(
    tmp_path: Path, guarded: GuardedWorld
) -> None:
    """Beside the holder, and when nobody holds the store: the same requests, decided once."""
    store = tmp_path / "store.sqlite"
    async with open_harness(
        store, registry=guarded.registry, models=guarded.model.models()
    ) as harness:
        root = await harness.root(agent=AgentChange(model=MODEL))
        submission = await root.submit("go", request_id="r1")
        with trio.fail_after(60):
            while len(harness.permissions()) < 2:  # noqa: ASYNC110 - two commits of two tasks
                await trio.sleep(0.01)
        open_now = {each.text: each for each in harness.permissions()}
        async with open_client(store) as client:
            seen = await client.reader.permissions()
            assert await client.reader.permissions(below=root.id) == seen
            explained = str(await client.reader.explain(seen[0].task))
            with pytest.raises(InvalidArgumentError, match="expected one of"):
                await client.decide(seen[0].id, "yes")  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match="about a call"):
                await client.decide(seen[0].id, Happened("x"), key="d0", timeout=60)
            for _ in range(2):
                # Handed in twice under its key it counts once, and gives the first answer.
                decided = await client.decide(
                    open_now["list a"].id, Pattern("list *"), by="ann", key="d1", timeout=60
                )
            with pytest.raises(AlreadyDecidedError) as late:
                await client.decide(open_now["list a"].id, Deny(), key="d2", timeout=60)
            (grant,) = await client.reader.grants()
            assert await client.revoke(grant.id, timeout=60) == harness_grant(grant, decided)
            assert await client.reader.grants() == []
    async with open_reader(store) as reader:
        left = await reader.permissions()
        assert await reader.permission(decided.id) == decided
        with pytest.raises(NotFoundError, match="permission request"):
            await reader.permission(root.id)
    async with open_client(store) as client:
        with pytest.raises(WaitTimeoutError):
            await client.decide(open_now["ship"].id, Deny("no"), key="d3", timeout=0)
    async with open_harness(
        store, registry=guarded.registry, models=guarded.model.models()
    ) as harness:
        denied = await harness.permission(open_now["ship"].id)
        settled = await harness.submission(submission.id).wait()

    assert {each.id for each in seen} == {each.id for each in open_now.values()}
    assert f"(permission {seen[0].id}, risk medium)" in explained
    assert (decided.state, decided.decision, decided.decided_by) == (
        "granted",
        Pattern("list *"),
        "ann",
    )
    assert (late.value.state, late.value.by) == ("granted", "ann")
    assert left == [open_now["ship"]]
    assert denied.decision == Deny("no")
    assert settled.text == "done"
    assert guarded.ledger == ["act list a"]


def harness_grant(grant: Any, decided: Any) -> Any:
    """The grant, which names the request that gave it."""
    assert grant.request == decided.id
    return grant


async def test_an_open_request_moves_with_its_session(
    tmp_path: Path, guarded: GuardedWorld
) -> None:
    """Exported and imported, it is the same request, and is decided there."""
    store, file, copy = (tmp_path / name for name in ("a.sqlite", "a.jsonl", "b.sqlite"))
    async with open_harness(
        store, registry=guarded.registry, models=guarded.model.models()
    ) as harness:
        root = await harness.root(agent=AgentChange(model=MODEL))
        await root.submit("go", request_id="r1")
        with trio.fail_after(60):
            while len(harness.permissions()) < 2:  # noqa: ASYNC110 - two commits of two tasks
                await trio.sleep(0.01)
        before = harness.permissions()
    await export_session(store, file)
    await import_session(file, copy, as_copy=False)
    async with open_harness(
        copy, registry=guarded.registry, models=guarded.model.models()
    ) as harness:
        after = harness.permissions()
        for each in after:
            await harness.decide(each.id, Once())
        submission = await (await harness.root()).submit("go", request_id="r1")
        await submission.wait()

    assert after == before
    assert sorted(guarded.ledger) == ["act list a", "act ship"]
