"""A tool of one's own: it takes long, asks sub-agents, and goes on where it was after a restart.

Teaches: progress output, which is stored as it comes; `memo`, which fixes what is drawn at random
before anything depends on it; `child`, a sub-agent that belongs to the call, so that it is found
again, aborted and waited for with it. That is why the tool may call itself `replay="safe"`.

Run it with: python examples/04_own_tool.py
"""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path

import trio

from pidurable import (
    AgentChange,
    Extension,
    Models,
    Registry,
    ToolCall,
    ToolExecutionUpdate,
    open_harness,
    tool,
)
from pidurable.testing import ScriptedCall, ScriptedModel, ScriptedProvider, Stall, Step, When

CITIES = ["Bergen", "Dakar", "Quito"]


@tool(replay="safe")
async def survey(cities: list[str], call: ToolCall) -> str:
    """Ask a local clerk about the weather in each city, in an order drawn by lot.

    Args:
        cities: Names of cities.
    """
    order = await call.memo("order", random.sample(cities, len(cities)))  # drawn once, then kept
    assert isinstance(order, list)
    lines: list[str] = []
    for number, city in enumerate(map(str, order), start=1):
        await call.output(f"{number} of {len(order)}: {city}\n")
        clerk = await call.child(key=city, agent=AgentChange(model="scripted/clerk", tools=[]))
        question = await clerk.submit(f"Weather in {city}?", request_id=call.key(city))
        lines.append(f"{city}: {(await question.wait()).text}")
    return "\n".join(lines)


async def live(store: Path, *, stalled: bool) -> str:
    """Run until the answer is there; while the clerks stall, leave in the middle of the survey."""
    registry = Registry()
    registry.install(Extension("weather", tools=[survey]))
    call = ScriptedCall(name="survey", arguments={"cities": CITIES})
    chief = ScriptedModel([Step(calls=(call,)), "Sunny everywhere."], name="chief")
    stall = Stall() if stalled else None
    steps = [Step(when=When(user=city), text="sunny", stall=stall) for city in CITIES[1:]]
    clerk = ScriptedModel([Step(when=When(user=CITIES[0]), text="sunny"), *steps], name="clerk")
    models = Models([ScriptedProvider([chief, clerk])])
    async with open_harness(store, registry=registry, models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/chief"))
        question = await root.submit("How is the weather?", request_id="the-question")
        if stalled:
            async with root.events() as events:
                async for batch in events:
                    for event in batch:
                        if isinstance(event, ToolExecutionUpdate):
                            return f"left while the tool said: {event.text.strip()!r}"
        return (await question.wait()).text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(trio.run(partial(live, Path(folder) / "weather.sqlite", stalled=True)))
        print(trio.run(partial(live, Path(folder) / "weather.sqlite", stalled=False)))
