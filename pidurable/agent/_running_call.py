"""The call's own API: what a tool works with while it runs (the agent's side of `ToolCall`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import trio

from pidurable.agent._progress import CallOutput
from pidurable.agent._services import Agent, AgentServices
from pidurable.records import _json
from pidurable.records._ids import TaskId
from pidurable.records._messages import JsonValue
from pidurable.registry._env import Env
from pidurable.registry._tool import Tool

if TYPE_CHECKING:
    from pidurable.tasks._context import TaskContext

DETAILS_BYTES_MAX = 64 * 1024

T = TypeVar("T")


class RunningCall:
    """One call while its tool runs. Everything that it shows is committed first."""

    def __init__(
        self,
        services: AgentServices,
        ctx: TaskContext[Any, Any, Any],
        agent: Agent,
        tool: Tool[..., Any],
    ) -> None:
        self._services = services
        self._ctx = ctx
        self._agent = agent
        self._name = tool.name
        self.progress = CallOutput(
            services.progress,
            ctx.conversation_id,
            ctx.task_id,
            bytes_max=tool.output_bytes_max,
            lines_max=tool.output_lines_max,
            keep=tool.output_keep,
        )

    @property
    def id(self) -> int:
        """The task of this call."""
        return int(self._ctx.task_id)

    @property
    def name(self) -> str:
        """The name that the model called."""
        return self._name

    @property
    def conversation_id(self) -> int:
        """The conversation that the call was made in."""
        return self._ctx.conversation_id

    @property
    def env(self) -> Env:
        """Files and processes."""
        return self._services.env_for(self._ctx.conversation_id, self._agent)

    def key(self, name: str) -> str:
        """Return this call's stable identity for the outside, the same after every restart."""
        return self._ctx.key(name)

    async def output(self, text: str) -> None:
        """Add to the visible output, which is bounded by the tool's limits."""
        self.progress.add(text)
        await trio.lowlevel.checkpoint()

    async def details(self, value: JsonValue) -> None:
        """Replace what interfaces show besides; at most 64 KiB of JSON.

        Raises:
            NotJsonError: It is larger, or not strict JSON.
        """
        _json.dumps(value, path="$.details", bytes_max=DETAILS_BYTES_MAX)
        self.progress.show(_json.check_json(value, "$.details"))
        await trio.lowlevel.checkpoint()

    async def diagnostic(self, severity: Literal["info", "warning", "error"], text: str) -> None:
        """Add a remark for the model and for interfaces; of more than 16 the rest is counted."""
        self.progress.diagnose(severity, text)
        await trio.lowlevel.checkpoint()

    async def memo(self, name: str, candidate: JsonValue) -> JsonValue:
        """Store a value under a name once and return the stored one: the first writer wins."""
        return await self._ctx.memo(name, candidate)

    def commit(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction; it is committed when the block ends."""
        return self._ctx.commit()

    async def create_task(
        self, definition: Any, input: Any, *, key: str | None = None
    ) -> TaskId[Any]:
        """Create a task that this call owns; with a key, once, and found again later."""
        return await self._ctx.create_task(definition, input, key=key)

    async def child(self, *, key: str = "child", agent: Any = None) -> Any:
        """The conversation that this call owns under the key: created once, found again."""
        conversation = self._services.conversation(self._ctx.conversation_id)
        return await conversation.child_of(self._ctx, key=key, agent=agent)

    async def run_blocking(self, function: Callable[..., T], /, *args: Any) -> T:
        """Run a blocking function in a thread; it is waited for, also on abort."""
        return await self._ctx.run_blocking(function, *args)

    async def sleep(self, seconds: float) -> None:
        """Wait; an abort ends it."""
        await self._ctx.sleep(seconds)

    def report(self, error: BaseException | str) -> None:
        """Report an error that the call goes on without."""
        self._ctx.report(error)
