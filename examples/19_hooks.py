"""The rules of an office: what its agent may do, is told, and must think over, kept by hooks.

Teaches: `hook`, which attaches handlers to built-in tasks: they change or block a call, change its
result, shape a request, store what they observe in the deciding commit, or let a run go on.

Run it with: python examples/19_hooks.py
"""

from __future__ import annotations

import trio

import pidurable as pi
from pidurable.testing import Expect, ScriptedCall as Call, ScriptedModel, Step

ringing = trio.Event()


@pi.tool
async def mail(to: str, text: str) -> str:
    """Send a letter."""
    return f"Sent to {to}."


@pi.tool
async def phone() -> None:
    """Wait until somebody answers."""
    ringing.set()
    await trio.sleep_forever()


def may_it(call: pi.BeforeTool) -> pi.Rewrite | pi.BlockCall | None:
    if "price" in call.arguments.get("text", ""):
        return pi.BlockCall("Prices are not told by mail.")
    return pi.Rewrite({**call.arguments, "to": "the boss"}) if call.name == "mail" else None


def stamped(call: pi.AfterTool) -> pi.ToolResult:
    said = [block for block in call.result.content or () if isinstance(block, pi.TextBlock)]
    return pi.ToolResult([*said, pi.TextBlock(text=" By post.")])


def hung_up(call: pi.OnAbort) -> pi.ToolResult:
    return pi.ToolResult("It rang for a minute.", error=True)


def dated(request: pi.BeforeRequest) -> list[pi.RequestMessage]:
    today = pi.UserMessage(blocks=(pi.TextBlock(text="It is Monday."),), at_us=0)
    return [pi.RequestMessage(message=today), *request.messages]  # sent, and never stored


def audit(seen: pi.AfterTools) -> pi.Staged:
    said = ["".join(b.text for b in r.blocks if isinstance(b, pi.TextBlock)) for r in seen.results]
    return lambda tx: tx.append(seen.conversation_id, said, kind="office.audit")


def think_again(answer: pi.OnYield) -> str | None:
    return "Are you sure?" if answer.turn == 2 else None


async def main() -> None:
    letters = [Call(name="mail", arguments={"to": "all", "text": t}) for t in ("hi", "our prices")]
    sure = Step(text="I am.", expect=Expect(user="Are you sure?", text="It is Monday."))
    models = ScriptedModel([Step(calls=(*letters, Call(name="phone"))), "All done.", sure]).models()
    calls = pi.hook(pi.ToolTask, before_tool=may_it, after_tool=stamped, on_abort=hung_up)
    runs = pi.hook(pi.Generation, before_request=dated, after_tools=audit, on_yield=think_again)
    registry = pi.Registry()
    registry.install(pi.Extension("office", tools=[mail, phone], hooks=[calls, runs]))
    async with pi.open_harness(":memory:", registry=registry, models=models) as harness:
        root = await harness.root(agent=pi.AgentChange(model="scripted/model"))
        asked = await root.submit("Do what is to be done.")
        await ringing.wait()
        await harness.abort_task(root.live()["calls"][2]["task"])
        answer, entries = (await asked.wait()).text, await root.history()
        print(answer, *[entry.data for entry in entries if entry.kind == "office.audit"])


if __name__ == "__main__":
    trio.run(main)
