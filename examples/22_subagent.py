"""A sub-agent is a conversation that the call which started it owns; nothing else is needed.

Teaches: `call.child`, created once and found again; and a submission with a `request_id` made of
the call's key, so that it is handed in once however often the tool runs. Killed at any moment, the
tool finds its child and the child's answer. That is why it may call itself `replay="safe"`.

Run it with: python examples/22_subagent.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import trio

from pidurable import AgentChange, Extension, Models, Registry, ToolCall, open_harness, tool
from pidurable.testing import ScriptedCall, ScriptedModel, ScriptedProvider, Stall, Step


@tool(replay="safe")
async def subagent(task: str, call: ToolCall) -> str:
    """Delegate a self-contained task to a sub-agent and return its answer.

    Args:
        task: What to do, with all that is needed to do it.
    """
    child = await call.child(agent=AgentChange(model="scripted/scout", tools=[]))
    await call.details({"conversation": child.id})  # lets a view attach to it
    print(f"the scout is conversation {child.id}", flush=True)
    settled = await (await child.submit(task, request_id=call.key("task"))).wait()
    return settled.text


async def live(store: Path, *, stalled: bool) -> str:
    """Ask the chief, who asks a scout; one that is stalled never answers."""
    registry = Registry()
    registry.install(Extension("team", tools=[subagent]))
    call = ScriptedCall(name="subagent", arguments={"task": "Count the doors."})
    chief = ScriptedModel([Step(calls=(call,)), "There are three doors."], name="chief")
    step = Step(text="I see 3 doors.", stall=Stall() if stalled else None)
    models = Models([ScriptedProvider([chief, ScriptedModel([step], name="scout")])])
    async with open_harness(store, registry=registry, models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/chief"))
        question = await root.submit("How many doors are there?", request_id="doors")
        answer = (await question.wait()).text
        for task in harness.tasks():
            print(f"  {task.kind} of conversation {task.conversation_id}: {task.status.word}")
        return answer


def main() -> None:
    if len(sys.argv) == 2:  # the process that will be killed: its scout never answers
        trio.run(partial(live, Path(sys.argv[1]), stalled=True))
        return
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "team.sqlite"
        command = [sys.executable, __file__, str(store)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            print("killed:", process.stdout.readline().rstrip())
            process.kill()  # SIGKILL: nothing of it can clean up
        print("answer:", trio.run(partial(live, store, stalled=False)))


if __name__ == "__main__":
    main()
