"""A log book that outgrows its reader: what is old becomes a summary, and nothing is lost.

Teaches: compaction by itself, as a conversation nears its model's context window; `compact`, for
when somebody wants one; what then is sent, and what the history still holds.

Run it with: python examples/18_compaction.py
"""

from __future__ import annotations

import trio

from pidurable import AgentChange, CompactionResult, Conversation, Settings, open_harness
from pidurable.testing import ScriptedModel, Step, When

# One model does both, answer and summarise. This one has room for some 2,000 tokens.
summary = Step(when=When(system="summary"), text="Ten days west, all calm. The cook is Ada.")
model = ScriptedModel([summary, "Noted."], position="run", context_window=2_000)
settings = Settings(keep_recent_tokens=500, background_tokens=0)  # room is made when it must be


async def sail(root: Conversation, days: int) -> None:
    for day in range(1, days + 1):
        entry = f"Day {day}: wind from the east. " + "The sea is calm, and all are well. " * 20
        await (await root.submit(entry)).wait()
        print(f"day {day}: {len(model.requests[-1].messages)} messages are sent")


def told(result: CompactionResult) -> str:
    return f"{result.status}: about {result.tokens_before} tokens became {result.tokens_after}"


async def main() -> None:
    async with open_harness(":memory:", models=model.models(), settings=settings) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        await sail(root, 10)
        task = await root.compact("Keep the names of the crew.")
        print(told((await harness.wait_for_task(task)).result))
        print("asked for names:", "Keep the names" in str(model.requests[-1].messages))
        context = await root.context()
        print(f"{len(context)} messages are left;", "Ada is known:", "is Ada" in str(context[0]))
        days = [entry for entry in await root.history(limit=1_000) if entry.kind == "pi.user"]
        print("days in the history:", len(days))


if __name__ == "__main__":
    trio.run(main)
