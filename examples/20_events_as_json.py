"""A conversation as JSON lines: one event a line, for a program on the other side of a pipe.

Teaches: `event_json`, which gives an event its stable form; that a follower may come at any moment,
since its first event is a snapshot of where things stand; and a reader that keeps only what it
needs, ignores the types that it does not know, and starts anew from every snapshot.

Run it with: python examples/20_events_as_json.py
"""

from __future__ import annotations

import json
from typing import Any

import trio

from pidurable import AgentChange, Conversation, Extension, Registry, event_json, open_harness, tool
from pidurable.testing import ScriptedCall, ScriptedModel, Step


@tool(replay="safe")
async def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"Sunny in {city}."


async def follow(conversation: Conversation, ready: trio.Event) -> None:
    """Write every event of a conversation as a line, until its run has ended."""
    reader = Reader()
    async with conversation.events() as batches:
        ready.set()
        async for batch in batches:  # one batch a commit: what is told here is durable
            for event in batch:
                line = json.dumps(event_json(event))
                print(line, flush=True)
                reader.take(line)
            if reader.over:
                break
    print(f"the reader has seen: {reader.text!r}, {reader.tokens} tokens")


class Reader:
    """The other side: it knows nothing but lines."""

    def __init__(self) -> None:
        self.text, self.tokens, self.over = "", 0, False

    def take(self, line: str) -> None:
        event: dict[str, Any] = json.loads(line)
        match event["type"]:
            case "snapshot" | "message_start":
                self.text = ""
            case "message_end":  # whole, whatever was seen of it as it came
                (message,) = event["entry"]["messages"]
                self.text = "".join(b["text"] for b in message["blocks"] if b["type"] == "text")
            case "usage_update":
                self.tokens = sum(m["output_tokens"] for m in event["models"].values())
            case "run_end":
                self.over = True


async def main() -> None:
    registry = Registry()
    registry.install(Extension("weather", tools=[weather]))
    calls = (ScriptedCall(name="weather", arguments={"city": "Graz"}),)
    answer = Step(text=("It is ", "sunny."), delay=0.15)
    models = ScriptedModel([Step(calls=calls), answer]).models()
    async with open_harness(":memory:", registry=registry, models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        async with trio.open_nursery() as nursery:
            ready = trio.Event()
            nursery.start_soon(follow, root, ready)
            await ready.wait()
            await root.submit("How is the weather in Graz?")


if __name__ == "__main__":
    trio.run(main)
