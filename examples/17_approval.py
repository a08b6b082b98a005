"""A tool that a person has to allow: left alone over a restart, allowed, denied, and by a pattern.

Teaches: a hook that answers `Ask`; a request that outlives its process; `Deny(text)`, which tells
the model what to do instead; `Pattern`, which allows later calls too, and is listed and taken back.

Run it with: python examples/17_approval.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import trio

from pidurable import (
    AgentChange,
    Ask,
    BeforeTool,
    Decision,
    Deny,
    Extension,
    Once,
    Pattern,
    PermissionAsked,
    Registry,
    ToolTask,
    hook,
    open_harness,
    tool,
)
from pidurable.testing import ScriptedCall, ScriptedModel, Step


@tool(permission_text=lambda arguments: str(arguments["command"]))
async def shell(command: str) -> str:
    """Run a command."""
    print(f"  ran: {command}")
    return "done"


async def guard(call: BeforeTool) -> Ask | None:
    return Ask("high", "commands change things") if call.name == "shell" else None


async def main(store: Path) -> None:
    registry = Registry()
    registry.install(Extension("office", tools=[shell], hooks=[hook(ToolTask, before_tool=guard)]))
    commands = ["rm old.log", "rm -rf /", "git status", "git diff", "git diff; rm -rf /"]
    calls = [ScriptedCall(name="shell", arguments={"command": each}) for each in commands]
    models = ScriptedModel([*[Step(calls=(each,)) for each in calls], "All done."]).models()
    async with open_harness(store, registry=registry, models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        async with root.events() as batches:
            await root.submit("Tidy up.", request_id="tidy")
            async for batch in batches:
                if any(isinstance(event, PermissionAsked) for event in batch):
                    break
    print("the process ended, the request did not")
    answers: list[Decision] = [Once(), Deny("Only here, please."), Pattern("git *"), Deny("No.")]
    async with open_harness(store, registry=registry, models=models) as harness:
        root = await harness.root()
        submission = await root.submit("Tidy up.", request_id="tidy")
        async with root.events() as batches:
            while answers:
                for request in harness.permissions():
                    print(f"asked ({request.risk}): {request.text!r}")
                    decided = await harness.decide(request.id, answers.pop(0), by="Ada")
                    print(f"  {decided.state} by {decided.decided_by}: {decided.decision}")
                await anext(batches)  # one batch a commit, so nothing is missed
        print((await submission.wait()).text)
        (grant,) = harness.grants()
        print(f"granted {grant.pattern!r}, used {grant.uses} time(s) since")
        await harness.revoke(grant.id)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trio.run(main, Path(folder) / "office.sqlite")
