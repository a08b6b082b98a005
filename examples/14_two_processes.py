"""One process holds a session and its agent; another one asks it questions.

Teaches: `open_client`, which hands commands to whoever holds a session and gives their answers, or
raises their errors; a key, under which a command counts once, however often and to whomever it is
sent; what happens while nobody holds the store, and how a command is taken back for certain.

Run it with: python examples/14_two_processes.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import trio

from pidurable import AgentChange, Models, open_client, open_harness
from pidurable.errors import NotFoundError, WaitTimeoutError
from pidurable.testing import ScriptedModel, Step


async def ask(store: str) -> None:
    """The other process: it holds nothing, and may be stopped or killed at any point."""
    async with open_client(store) as client:
        moon = await client.submit("How far is the moon?", key="moon")
        # Sent again under its key, as after a crash of this process: asked once all the same.
        assert await client.submit("How far is the moon?", key="moon") == moon
        print("answered:", (await client.wait_for_submission(moon)).text)
        try:
            await client.fork(99)
        except NotFoundError as refused:  # by the holder, as an error of its own class
            print("refused:", refused)


async def main(store: Path) -> None:
    answers = ["384,400 km", "150 million km"]
    models = Models({"scripted": ScriptedModel([Step(text=answer) for answer in answers])})
    async with open_harness(store, models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        await trio.run_process([sys.executable, __file__, str(store)])
        asked = [entry for entry in await root.history() if entry.kind == "pi.user"]
        print("questions in the store:", len(asked))
    async with open_client(store) as client:  # from here on nobody holds the store
        for key, question in (("sun", "And the sun?"), ("mars", "And Mars?")):
            try:
                await client.submit(question, key=key, timeout=0.1)
            except WaitTimeoutError as late:
                print("waits:", late.key)
        print("mars taken back:", await client.withdraw("mars"))
        async with open_harness(store, models=models):  # applies what waits, and goes on
            sun = await client.submit("And the sun?", key="sun")
            print("answered:", (await client.wait_for_submission(sun)).text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        trio.run(ask, sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            trio.run(main, Path(folder) / "session")
