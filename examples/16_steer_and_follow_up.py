"""What people type while an agent works: steer it, queue behind it, and take things back.

Teaches: a steer joins the run after its round of tools, a follow-up starts the next run, a write
tells the model something and asks nothing; what is still queued can be withdrawn; an abort gives
back what it takes out of the queue; a run that was aborted is continued from what it had. All of
it is stored when the call returns, so a crash loses none of it.

Run it with: python examples/16_steer_and_follow_up.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import trio

from pidurable import AgentChange, Extension, Registry, TextBlock, UserMessage, open_harness, tool
from pidurable.testing import ScriptedCall, ScriptedModel, Step, When

LOOK = (ScriptedCall(name="count"),)
MODEL = ScriptedModel(
    [
        Step(when=When(user="How many fruits", turn=0), text="Counting.", calls=LOOK),
        Step(when=When(user="Only the red ones"), text="12 red apples."),
        Step(when=When(user="And what do they cost?"), text="2 euros each."),
        Step(when=When(user="Count again", turn=0), text="Once more.", calls=LOOK),
        Step(when=When(user="Count again"), text="That was cut; shall I go on?"),
    ]
)
counting = trio.Event()


@tool(replay="safe")
async def count() -> str:
    """Count all fruits, which takes its time."""
    counting.set()
    await trio.sleep(0.2)
    return "30 pieces"


async def main(store: Path) -> None:
    global counting
    registry = Registry()
    registry.install(Extension("shop", tools=[count]))
    async with open_harness(store, registry=registry, models=MODEL.models()) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        first = await root.submit("How many fruits do we have?")
        await counting.wait()  # the model's call runs: now it is busy
        steer = await root.submit("Only the red ones, please.", when_busy="steer")
        follow = await root.submit("And what do they cost?")
        mistake = await root.submit("Burn them all.")
        hint = UserMessage(blocks=(TextBlock(text="Prices are in euros."),), at_us=0)
        note = await root.write(kind="shop.note", messages=[hint])
        print("queued:", [item["mode"] for item in root.inbox()])
        print("withdrawn:", (await mistake.withdraw()) is not None)
        for submission in (first, steer, follow):
            settled = await submission.wait()
            print(f"run {'1' if settled.run == (await first.wait()).run else '2'}: {settled.text}")
        print("note:", (await note.status()).status)

        counting = trio.Event()
        again = await root.submit("Count again.")
        await counting.wait()
        await root.submit("Thank you!")
        taken = await root.abort()
        print("given back:", [record.content[0]["text"] for record in taken])
        print("aborted:", (await again.wait()).reason)
        await harness.wait_for_idle()
        continued = await root.continue_run()
        print("continued:", (await continued.wait()).text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trio.run(main, Path(folder) / "shop.sqlite")
