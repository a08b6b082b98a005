"""Forks of conversations that an agent works in: what they take along, and what they leave."""

from __future__ import annotations

import pytest
from agent_world import MODEL, World, calls

from pidurable.agent._services import AgentChange
from pidurable.errors import InvalidArgumentError, NotFoundError


async def test_a_fork_in_a_tool_round_is_idle_and_goes_its_own_way() -> None:
    """The parent's run, its calls, its queued input and its marks stay where they are."""
    world = World(calls("slow"), "in the fork")
    async with world.open() as harness:
        parent = await harness.root()
        await parent.submit("begin")
        await world.reached.wait()
        await parent.submit("queued", when_busy="follow_up")
        fork = await parent.fork()

        assert parent.live()["run"] is not None
        assert fork.live()["run"] is None
        assert len(parent.inbox()) == 1
        assert fork.inbox() == []
        assert await fork.open_submissions() == []
        await fork.wait_for_idle()
        assert fork.agent()["model"] == MODEL
        shared = [entry.id for entry in await parent.history()]
        assert [entry.id for entry in await fork.history()] == shared
        # The call that the fork shares has no result here, and never will.
        submission = await fork.submit("and you?")
        assert (await submission.wait()).text == "in the fork"
        assert [entry.id for entry in await parent.history()] == shared
        await parent.abort()
        await parent.wait_for_idle()


async def test_the_agent_of_a_fork_is_that_of_its_entry() -> None:
    """`pi.agent` is copied as of the fork entry, or of now; changing either touches no other."""
    world = World("one", "two")
    async with world.open() as harness:
        parent = await harness.root()
        first = await (await parent.submit("1")).wait()
        await parent.configure(AgentChange(model=MODEL, instructions="be brief"))
        await (await parent.submit("2")).wait()
        early = await parent.fork(first.entry)
        await parent.configure(AgentChange(instructions="be kind"))
        now = await parent.fork()
        await parent.configure(AgentChange(instructions="be brief"))
        late = await parent.fork(key="late")
        await late.configure(AgentChange(instructions="be long"))

        assert early.agent()["instructions"] is None
        assert now.agent()["instructions"] == "be kind"
        assert late.agent()["instructions"] == "be long"
        assert parent.agent()["instructions"] == "be brief"
        assert (await parent.fork(first.entry, key="late")).id == late.id
        with pytest.raises(NotFoundError, match="entry"):
            await early.fork((await parent.history())[-1].id)
        with pytest.raises(InvalidArgumentError, match="no fork"):
            await early.fork(key="late")
