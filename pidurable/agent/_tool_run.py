"""Running a tool: whatever comes out of it, or does not come in time, becomes one result.

What is not the tool's own passes through: an abort, the end of the session, trouble of the store,
Ctrl-C. Those decide about the task, and never become something that a model is told.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import trio

from pidurable.agent._tool_arguments import described
from pidurable.agent._tool_result import FinalResult, error_result, final_result, with_output
from pidurable.errors import (
    AbortRequestedError,
    InvocationEndedError,
    OutcomeUnknownError,
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.registry._tool import Tool, ToolResult
from pidurable.tasks._errors import leaves, storage_trouble

if TYPE_CHECKING:
    from pidurable.agent._running_call import RunningCall
    from pidurable.agent._services import AgentServices

# Raised through a tool by its own call: not its fault, and not its result.
_OURS = (AbortRequestedError, InvocationEndedError)
_OF_A_STORE = (SessionClosedError, SessionPoisonedError, StorageRefusedError)


async def invoke(
    services: AgentServices, tool: Tool[..., Any], kwargs: dict[str, Any], call: RunningCall
) -> FinalResult | OutcomeUnknownError:
    """Run the tool, and make a result of whatever comes out of it."""
    scope: trio.CancelScope | None = None
    most = services.progress.value_bytes_max
    try:
        if tool.timeout is None:
            # Most tools have no limit: nothing would ever cancel a scope of theirs.
            returned = await tool.invoke(kwargs, call)
            return final_result(returned, tool, call.shown, most)
        returned = None
        with trio.move_on_after(tool.timeout) as scope:
            returned = await tool.invoke(kwargs, call)
        if not scope.cancelled_caught:
            return final_result(returned, tool, call.shown, most)
        text, code = _timeout_text(tool), "timeout"
    except BaseException as raised:  # noqa: ASYNC103 - _passes lets it by
        if _passes(raised, services):
            raise
        every = leaves(raised)
        if all(isinstance(leaf, OutcomeUnknownError) for leaf in every):
            unknown = every[0]
            assert isinstance(unknown, OutcomeUnknownError)
            return unknown  # noqa: ASYNC104 - _passes lets it by
        text, code = described(raised), "tool_error"
        call.report(f"tool {tool.name!r} raised {text}")
        if scope is not None and scope.cancel_called:
            text, code = f"{_timeout_text(tool)} Stopping it raised {text}", "timeout"
    return with_output(error_result(code, text, failed=True), call.progress)


async def reconcile(
    services: AgentServices, tool: Tool[..., Any], kwargs: dict[str, Any], call: RunningCall
) -> FinalResult | Literal[False] | None:
    """Ask a tool what became of its call: its result, False (did not happen), None (unknown).

    A `reconcile` that raises, takes longer than the tool may, or answers anything else does not
    know.
    """
    if tool.reconcile is None:
        return None
    try:
        with trio.move_on_after(_seconds(tool)):
            answer = await tool.reconcile(kwargs, call)
            if answer is False:
                return False
            if isinstance(answer, ToolResult):
                return final_result(answer, tool, call.shown, services.progress.value_bytes_max)
    except BaseException as raised:  # noqa: ASYNC103 - _passes lets it by
        if _passes(raised, services):
            raise
        call.report(f"reconcile raised, so the outcome is unknown: {described(raised)}")
    return None


def _passes(raised: BaseException, services: AgentServices) -> bool:
    """Whether an error is not the tool's own: the host is interrupted, or the call is stopped.

    Neither is it where a read of the store failed that the tool needed, as when it asks another
    agent: the task is tried again, as any task is, by what the tool says of its being repeated.
    """
    store = services.session.storage.store
    if storage_trouble(raised, store) is not None:
        return True
    every = leaves(raised)
    if any(isinstance(leaf, KeyboardInterrupt | SystemExit) for leaf in every):
        return True
    if any(isinstance(leaf, _OURS) for leaf in every):
        return True
    # Another store that a tool works with is its own business.
    if any(isinstance(leaf, _OF_A_STORE) and leaf.store == store for leaf in every):
        return True
    # A cancellation that nobody asked for is an error like any other; without this look the call
    # would be taken for one that is being stopped, and never end.
    return trio.current_effective_deadline() == -math.inf


def _seconds(tool: Tool[..., Any]) -> float:
    return math.inf if tool.timeout is None else tool.timeout


def _timeout_text(tool: Tool[..., Any]) -> str:
    return f"The call took longer than {tool.timeout:g} s and was stopped."
