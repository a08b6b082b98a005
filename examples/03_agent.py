"""An agent: a model, a tool, and everything that happens as events.

Teaches: `@tool`, submitting an input, watching a run while the answer streams, waiting for the
answer. The model here is scripted, so that the example needs no key; give `Models` a provider of
yours and a name like "openai/gpt-5" instead, and nothing else changes.

Run it with: python examples/03_agent.py
"""

from __future__ import annotations

import trio

from pidurable import (
    AgentChange,
    Conversation,
    Extension,
    MessageUpdate,
    Registry,
    RunEnd,
    ToolExecutionEnd,
    ToolExecutionStart,
    open_harness,
    tool,
)
from pidurable.testing import ScriptedCall, ScriptedModel, Step


@tool(replay="safe")
async def stock(fruit: str) -> str:
    """Tell how many pieces of a fruit are in stock.

    Args:
        fruit: Its name, in the plural.
    """
    return f"12 {fruit}"


async def show_events(conversation: Conversation, ready: trio.Event) -> None:
    """Print what happens, as it is committed: nothing shown here can be lost any more."""
    async with conversation.events() as events:
        ready.set()
        async for batch in events:
            for event in batch:
                match event:
                    case MessageUpdate(kind="text", text=text):
                        print(text, end="", flush=True)
                    case ToolExecutionStart(name=name, arguments=arguments):
                        print(f"\n  -> {name} {arguments}")
                    case ToolExecutionEnd():
                        print("  <- its result is stored")
                    case RunEnd(status=status):
                        print(f"\n  run ended: {status}")
                        return


async def main() -> str:
    registry = Registry()
    registry.install(Extension("shop", tools=[stock]))
    ask = Step(
        text="Let me look. ", calls=(ScriptedCall(name="stock", arguments={"fruit": "apples"}),)
    )
    answer = Step(text=("There are ", "12 apples."), delay=0.15)
    models = ScriptedModel([ask, answer]).models()
    async with open_harness(":memory:", registry=registry, models=models) as harness:
        root = await harness.root(
            agent=AgentChange(model="scripted/model", instructions="Be brief.")
        )
        async with trio.open_nursery() as nursery:
            ready = trio.Event()
            nursery.start_soon(show_events, root, ready)
            await ready.wait()
            submission = await root.submit("How many apples do we have?")
            settled = await submission.wait()
    return settled.text


if __name__ == "__main__":
    print("answer:", trio.run(main))
