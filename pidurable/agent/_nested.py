"""Nested calls: a tool calls another one, as the model would.

Each is a `pi.tool` task that the calling one owns, so it has the same hooks and policies, is
aborted with its caller, and keeps it from ending. Its result lives in its outcome; the entry that
marks its place in the log has no messages, since no model has made the call. What a caller has
called is found again by its place among the calls without a key, or by its key.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, final

import trio

from pidurable.agent._attempts import ended_without_result
from pidurable.agent._call_records import ToolInput, ToolReceipt
from pidurable.agent._inbox import decode_blocks
from pidurable.errors import InvalidArgumentError, OwnedTooDeepError, show
from pidurable.records import _codec, _json
from pidurable.records._checks import check_name
from pidurable.records._messages import TextBlock
from pidurable.registry._call import CallResult
from pidurable.tasks._together import Asked, Together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pidurable.agent._services import AgentServices
    from pidurable.agent._tool_call import ToolTask
    from pidurable.records._ids import TaskId
    from pidurable.records._messages import Block
    from pidurable.records._tasks import Outcome
    from pidurable.tasks._context import TaskContext
    from pidurable.tasks._transaction import TaskTransaction

NAME_CHARACTERS_MAX = 256


class NestedCalls:
    """The calls that one running call makes."""

    def __init__(
        self,
        services: AgentServices,
        ctx: TaskContext[ToolInput, Any, Any],
        *,
        reconciling: bool = False,
    ) -> None:
        self._services = services
        self._ctx = ctx
        self._reconciling = reconciling
        self._together = Together(services.session.line, ctx._run)
        self._made = 0
        """How many without a key were made so far: the place of the next."""
        self._open: str | None = None
        """The tool of the one without a key that is running."""
        self.demanding: list[tuple[str, CallResult]] = []
        """The results that ask something of the run, and whose."""

    @trio.lowlevel.enable_ki_protection
    async def execute(self, name: str, arguments: Any, key: str | None) -> CallResult:
        """Make a call, or find it again, and wait for its result.

        Raises:
            InvalidArgumentError: A second call without a key is made while one is running, the key
                or place stands for another call, or a `reconcile` function asks.
            NotJsonError: The arguments cannot be stored.
            OwnedTooDeepError: Calls are nested too deeply.
        """
        ctx = self._ctx
        if self._reconciling:
            problem = (
                "reconcile cannot call tools: asked once more after another crash, it would get "
                "the answer of the first time"
            )
            raise InvalidArgumentError("execute_tool", problem)
        name = check_name(name, "name", characters_max=NAME_CHARACTERS_MAX)
        if ctx.input.depth >= ctx.settings.owned_depth_max:
            raise OwnedTooDeepError(ctx.settings.owned_depth_max, "a nested call")
        arguments = _json.check_json(arguments, "$.arguments")
        if key is not None:
            step = "key " + check_name(key, "key", characters_max=500)
        else:
            step = self._next_place(name)
        together = self._together
        try:
            # As `Together.create` does: thousands of these may wait at a time, in few frames.
            asked = _Creation(together, self, name, arguments, step)
            first = together.ask(asked)
            if first or await trio.lowlevel.wait_task_rescheduled(asked):
                await together.lead(asked, first=first)
            if asked.error is not None:
                raise asked.error
            if not asked.is_new:
                self._check_same(asked)
            task = asked.value
            # Nor does it hold what it asked with, while its task runs.
            del asked
            result = result_of(await ctx.wait_for_task(task))
        finally:
            if key is None:
                self._open = None
        if result.handoff is not None or result.terminate or result.add_tools:
            self.demanding.append((name, result))
        return result

    def input_of(self, name: str, arguments: Any) -> ToolInput:
        """What is stored of a call that this one makes."""
        given = self._ctx.input
        return ToolInput(
            assistant=given.assistant,
            index=given.index,
            name=name,
            arguments=arguments,
            caller=int(self._ctx.task_id),
            depth=given.depth + 1,
        )

    def _next_place(self, name: str) -> str:
        """The place of a call without a key, which is the only one of its kind while it runs."""
        if self._open is not None:
            problem = (
                f"a call of {self._open!r} without a key is running, and the order of concurrent "
                "calls is not the same when the tool runs again; give each a key of its own"
            )
            raise InvalidArgumentError("key", problem, show(None))
        self._open = name
        place = self._made
        self._made += 1
        return f"call {place}"

    def _check_same(self, asked: _Creation) -> None:
        """Refuse an earlier call that is another one: its result would be taken for this one's."""
        task = asked.value
        text = self._services.session.storage.task_input(task)
        stored: dict[str, Any] = {} if text is None else _json.loads_stored(text)
        if stored.get("name") == asked.name and stored.get("arguments") == asked.arguments:
            return
        earlier = show(str(stored.get("name")))
        differs = "with other arguments" if stored.get("name") == asked.name else "not of this tool"
        problem = (
            f"{asked.step!r} of this call is a call of {earlier} already (task {task}), {differs}; "
            "a tool that runs again makes the same calls in the same order, or gives each a key "
            "that stands for it. Fix what it depends on with `memo`"
        )
        raise InvalidArgumentError("execute_tool", problem, show(asked.name))


@functools.cache
def _tool_class() -> type[ToolTask]:
    """The definition of calls, whose module needs this one."""
    from pidurable.agent._tool_call import ToolTask

    return ToolTask


@final
class _Creation(Asked):
    """One call, until its task is created or found again: the value is its id."""

    __slots__ = ("_calls", "arguments", "is_new", "name", "step")

    def __init__(
        self, together: Together, calls: NestedCalls, name: str, arguments: Any, step: str
    ) -> None:
        super().__init__(together)
        self._calls = calls
        self.name = name
        self.arguments = arguments
        self.step = step
        self.is_new = False

    def make(self, tx: TaskTransaction[Any, Any]) -> TaskId[ToolReceipt]:
        given = self._calls.input_of(self.name, self.arguments)
        # Others share the commit, and may have made it under the same key.
        before = len(tx.fresh)
        task = tx.create_task(_tool_class(), given, key=f"pi.tool {self.step}")
        self.is_new = len(tx.fresh) != before
        return task


def stored_result(blocks: Sequence[Block], *, structured: Any, details: Any) -> dict[str, Any]:
    """The result of a nested call, as its outcome keeps it."""
    stored: dict[str, Any] = {"blocks": _codec.encode_blocks(blocks)}
    if structured is not None:
        stored["structured"] = structured
    if details is not None:
        stored["details"] = details
    return stored


def result_of(outcome: Outcome[ToolReceipt]) -> CallResult:
    """What a nested call gave, however its task ended."""
    task = int(outcome.task_id)
    receipt = outcome.result if outcome.status == "completed" else outcome.partial
    if receipt is None:
        # The scheduler has ended it: it has faulted, or was aborted before it ever ran.
        code, text = ended_without_result(outcome.status)
        return CallResult(task=task, blocks=(TextBlock(text=text),), is_error=True, code=code)
    nested: dict[str, Any] = receipt.nested or {}
    return CallResult(
        task=task,
        blocks=decode_blocks(nested.get("blocks", [])),
        is_error=receipt.is_error,
        code=receipt.code,
        structured=nested.get("structured"),
        details=nested.get("details"),
        add_tools=receipt.add_tools,
        terminate=receipt.terminate,
        handoff=receipt.handoff,
    )
