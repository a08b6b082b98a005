"""What the tests of approvals run on: a tool that must be asked for, and a policy that may change.

The ledger is outside: it says what really ran, with which arguments. A policy is one function of
the call; it is asked by a `before_tool` hook, as an extension of a host would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio
from agent_world import World

from pidurable import Ask, BeforeTool, PermissionRequest, ToolTask
from pidurable.agent._script import ScriptedCall, Step
from pidurable.harness._open import Harness
from pidurable.registry import Extension, Tool, ToolCall, hook, tool

Policy = Callable[[BeforeTool], Any]


def ask_for_act(call: BeforeTool) -> Any:
    """Ask for every call of `act`."""
    return Ask("medium", "it acts") if call.name == "act" else None


class GuardedWorld(World):
    """A world with the tool `act`, for which a policy asks."""

    def __init__(
        self,
        *steps: Any,
        policy: Policy = ask_for_act,
        tools: Sequence[Tool[..., Any]] = (),
        **options: Any,
    ) -> None:
        super().__init__(*steps, **options)
        self.policy = policy
        self.asked: list[BeforeTool] = []
        self.install(self.act(), *tools)

        async def guard(call: BeforeTool) -> Any:
            self.asked.append(call)
            return self.policy(call)

        self.registry.install(Extension("guard", hooks=[hook(ToolTask, before_tool=guard)]))

    def act(self, **options: Any) -> Tool[..., Any]:
        """The tool that a person is asked for."""

        @tool(permission_text=lambda arguments: str(arguments["what"]), **options)
        async def act(what: str, call: ToolCall) -> str:
            """Act.

            Args:
                what: Which act.
            """
            self.ledger.append(f"act {what}")
            self.traced.set()
            await call.sleep(0.01)
            return f"acted: {what}"

        return act


def acts(*which: str) -> Step:
    """An answer that acts, once for each."""
    return Step(calls=tuple(ScriptedCall(name="act", arguments={"what": w}) for w in which))


async def begin(harness: Harness, text: str = "go", request_id: str = "r1") -> Any:
    """Hand something in to the root, and let everything come to rest."""
    submission = await (await harness.root()).submit(text, request_id=request_id)
    await rest()
    return submission


async def rest() -> None:
    """Let the virtual clock run until nothing moves any more."""
    await trio.sleep(1)


def the_open(harness: Harness) -> PermissionRequest:
    """The only open request."""
    (request,) = harness.permissions()
    return request
