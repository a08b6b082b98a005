"""What the command line tells of a compaction that a closed process has left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from pidurable import AgentChange, CompactionUpdate, Settings, open_harness
from pidurable.testing import ScriptedModel, Stall, Step, When

SUMMARY = Step(when=When(system="summary"), text="All was well.", stall=Stall(after=-1))


async def leave_a_compaction(store: str) -> None:
    """Talk, ask for a compaction, and leave while its summary is asked for."""
    model = ScriptedModel([SUMMARY, "fine"], position="run", repeat_last=True)
    settings = Settings(keep_recent_tokens=100)
    async with open_harness(store, models=model.models(), settings=settings) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        for number in range(3):
            await (await root.submit(f"{number} " + "w" * 600)).wait()
        async with root.events() as batches:
            await root.compact()
            async for batch in batches:
                if any(isinstance(event, CompactionUpdate) for event in batch):
                    return


def test_a_plan_says_that_a_summary_is_asked_for_again(command: Any, tmp_path: Path) -> None:
    """Nothing was replaced yet, and the tree tells what has set the compaction off."""
    store = str(tmp_path / "s.sqlite")
    trio.run(leave_a_compaction, store)

    plan = command("resume", "--plan", "--store", store)
    tree = command("task", "tree", "--store", store)

    assert "the summary is asked for again; nothing was replaced" in plan.out
    (line,) = [line for line in tree.out.splitlines() if "pi.compaction" in line]
    assert "manual, phase summarize" in line
