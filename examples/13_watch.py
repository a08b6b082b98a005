"""A live view of an agent in the terminal: it draws what is committed, and nothing else.

Teaches: `conversation.watch()`, which gives a view and then one frame for each commit, so that a
screen is a function of a view; `frame.patch`, which is all that a viewer elsewhere needs to have
the same; and that commits wait for no viewer: one that falls behind gets the newest view instead.

Run it with: python examples/13_watch.py
"""

from __future__ import annotations

import json
import sys

import trio

from pidurable import AgentChange, Conversation, ConversationView, open_harness, patch
from pidurable.testing import ScriptedModel, Step


def screen(view: ConversationView) -> list[str]:
    """What there is to see: what was said, and the answer as far as it has come."""
    shown = view.json()
    lines = [
        f"{message['role']}: {''.join(block['text'] for block in message['blocks'])}"
        for entry in shown["history"]["entries"]
        for message in entry["messages"]
        if message["role"] != "system"
    ]
    live = shown["documents"]["pi.live"]
    if live and live["partial"]:
        lines.append("writing: " + "".join(b["text"] for b in live["partial"]["blocks"]))
    return lines


async def show(conversation: Conversation, ready: trio.Event) -> None:
    """Draw until two runs have ended."""
    drawn, ended, frames, sent = 0, 0, 0, 0
    terminal = sys.stdout.isatty()
    async with conversation.watch() as watch:
        remote = watch.json()  # what a viewer in a browser is sent first
        ready.set()
        async for frame in watch:
            lines = screen(frame.value)
            if terminal:  # draw all of it anew
                print(f"\x1b[{drawn}F\x1b[J" if drawn else "", end="")
                drawn = 0
            else:  # a line when it is complete
                lines = [line for line in lines if not line.startswith("writing")]
            for line in lines[drawn:]:
                print(line, flush=True)
            drawn = len(lines)
            frames, sent = frames + 1, sent + len(json.dumps(frame.patch))
            remote = patch.apply(remote, frame.patch)
            ended += frame.value.documents["pi.live"]["run"] is None
            if ended == 2:
                break
        same = "is the same" if remote == watch.json() else "differs"
    print(f"the view elsewhere {same}, after {frames} frames of {sent // frames} bytes")


async def main() -> None:
    words = ("Of apples ", "there are ", "twelve, ", "and ", "of pears ", "none.")
    answer = Step(text=words, delay=0.06)
    models = ScriptedModel([answer, "You are welcome."]).models()
    async with open_harness(":memory:", models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        async with trio.open_nursery() as nursery:
            ready = trio.Event()
            nursery.start_soon(show, root, ready)
            await ready.wait()
            await (await root.submit("How many apples and pears are there?")).wait()
            await root.submit("Thank you.")


if __name__ == "__main__":
    trio.run(main)
