"""What was spent, summed: nothing twice, nothing forgotten, and of a part alone if asked for."""

from __future__ import annotations

import pytest
import trio
from agent_world import MODEL, World, ask, calls
from compaction_world import compacted, long
from trio.testing import MockClock

from pidurable.agent._script import ScriptedError, Step, When
from pidurable.errors import NotFoundError
from pidurable.records._limits import Settings
from pidurable.records._messages import Usage
from pidurable.registry import ToolCall, ToolResult, tool


@tool(name="paid")
async def paid(call: ToolCall) -> ToolResult:
    """Spend something."""
    return ToolResult("done", usage=Usage(requests=2, cost=0.5))


def tree_world() -> World:
    """The root asks a sub-agent, which asks another, whose tool spends something."""
    return World(
        Step(text="fine", when=When(user="carry on")),
        Step(calls=calls("paid", "paid").calls, when=When(user="leaf", turn=0)),
        Step(text="leaf done", when=When(user="leaf", turn=1)),
        Step(calls=calls("subagent", task="leaf").calls, when=When(user="middle", turn=0)),
        Step(text="middle done", when=When(user="middle", turn=1)),
        Step(calls=calls("subagent", task="middle").calls, when=When(user="go", turn=0)),
        Step(text="top", when=When(user="go", turn=1)),
        tools=[paid],
    )


async def test_what_is_below_one_owner_is_summed_alone(autojump_clock: MockClock) -> None:
    """A conversation counts with what its calls own, a task with what is below it, down to all."""
    world = tree_world()

    async with world.open() as harness:
        await ask(harness, "go")
        middle, leaf = (int(line.split()[1]) for line in world.ledger if line.startswith("child"))
        root = await harness.root()
        (call,) = (task for task in harness.tasks(conversation=middle, kind="pi.tool"))
        sums = {
            name: (await harness.usage(below=below))[MODEL].requests
            for name, below in {
                "all": None,
                "root": root.id,
                "middle": middle,
                "call": call.id,
                "generation": call.owner,
                "leaf": leaf,
            }.items()
        }
        tools = await harness.tool_usage(below=leaf)
        every_tool = await harness.tool_usage()

    assert sums == {"all": 6, "root": 6, "middle": 4, "call": 2, "generation": 2, "leaf": 2}
    assert tools == {"paid": Usage(requests=4, cost=1.0)}
    assert every_tool == tools


async def test_a_fork_starts_at_zero_and_counts_what_it_spends(autojump_clock: MockClock) -> None:
    """What was spent before the fork is the parent's alone; the sum counts each request once."""
    world = tree_world()

    async with world.open() as harness:
        await ask(harness, "go")
        fork = await (await harness.root()).fork()
        before = await harness.usage(below=fork.id)
        await (await fork.submit("carry on")).wait()
        after = await harness.usage(below=fork.id)
        total = await harness.usage()

    assert before == {}
    assert after[MODEL].requests == 1
    assert total[MODEL].requests == len(world.model.requests) == 7


async def test_failed_and_aborted_attempts_count(autojump_clock: MockClock) -> None:
    """Each request that was sent is charged to its model, whatever became of it."""
    world = World(
        Step(error=ScriptedError(retry_after=1.0), text="fine", when=When(user="one")),
        Step(text=tuple("abcdefgh"), delay=1.0, when=When(user="two")),
    )

    async with world.open() as harness:
        root = await harness.root()
        await ask(harness, "one", "r1")
        submission = await root.submit("two")
        await trio.sleep(3.5)
        await root.abort()
        await submission.wait()
        total = await harness.usage()

    assert total[MODEL].requests == len(world.model.requests) == 3
    assert total[MODEL].output_tokens > 0


@pytest.mark.parametrize("below", [99, 0, -1, True, "1", 2**70])
async def test_the_usage_of_nothing_is_refused(autojump_clock: MockClock, below: object) -> None:
    """What is no task and no conversation has no sum, not even zero."""
    world = World()

    async with world.open() as harness:
        with pytest.raises(NotFoundError, match="task or conversation"):
            await harness.usage(below=below)  # type: ignore[arg-type]


async def test_what_a_summary_costs_is_the_conversations(autojump_clock: MockClock) -> None:
    """A compaction's requests are charged like any other, and are in every sum above."""
    world = compacted("fine", settings=Settings(keep_recent_tokens=1_000), window=None)

    async with world.open() as harness:
        root = await harness.root()
        for number in range(6):
            await ask(harness, long(number), f"r{number}")
        before = await harness.usage(below=root.id)
        await harness.wait_for_task(await root.compact())
        after = await harness.usage(below=root.id)

    assert after[MODEL].requests == before[MODEL].requests + 1 == len(world.model.requests)
    assert after[MODEL].output_tokens > before[MODEL].output_tokens
