"""The call's own API: what a tool works with while it runs (the agent's side of `ToolCall`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import trio

from pidurable.agent._call_output import CallOutput
from pidurable.agent._nested import NestedCalls
from pidurable.agent._services import Agent, AgentServices
from pidurable.errors import InvalidArgumentError, NotFoundError, show
from pidurable.records import _json
from pidurable.records._ids import TaskId
from pidurable.records._messages import JsonValue
from pidurable.registry._call import CallResult
from pidurable.registry._env import Env
from pidurable.registry._tool import Tool
from pidurable.tasks._host import needs_models

if TYPE_CHECKING:
    from pidurable.agent._call_records import ToolInput
    from pidurable.agent._models import Models
    from pidurable.agent._tool_result import FinalResult
    from pidurable.harness._conversation import Conversation
    from pidurable.tasks._context import TaskContext

DETAILS_BYTES_MAX = 64 * 1024

T = TypeVar("T")


class RunningCall:
    """One call while its tool runs. Everything that it shows is committed first."""

    def __init__(
        self,
        services: AgentServices,
        ctx: TaskContext[ToolInput, Any, Any],
        agent: Agent,
        tool: Tool[..., Any],
        *,
        reconciling: bool = False,
    ) -> None:
        self._services = services
        self._ctx = ctx
        self._agent = agent
        self._tool = tool
        self._reconciling = reconciling
        self._nested: NestedCalls | None = None
        """Made for the first call: most tools make none."""
        self.shown: CallOutput | None = None
        """What it puts out; None as long as it has put nothing out, as most calls do."""
        self._closed = False

    @property
    def progress(self) -> CallOutput:
        """What it puts out, made for the first of it."""
        if self.shown is None:
            ctx, tool = self._ctx, self._tool
            self.shown = CallOutput(
                self._services.progress,
                ctx.conversation_id,
                ctx.task_id,
                nested=ctx.input.caller is not None,
                bytes_max=tool.output_bytes_max,
                lines_max=tool.output_lines_max,
                keep=tool.output_keep,
            )
            if self._closed:
                # Its code goes on with it after the end of the call.
                self.shown.close()
        return self.shown

    def close(self) -> None:
        """Show nothing more."""
        self._closed = True
        if self.shown is not None:
            self.shown.close()

    @property
    def id(self) -> int:
        """The task of this call."""
        return int(self._ctx.task_id)

    @property
    def name(self) -> str:
        """The name that the model called."""
        return self._tool.name

    @property
    def conversation_id(self) -> int:
        """The conversation that the call was made in."""
        return self._ctx.conversation_id

    @property
    def env(self) -> Env:
        """Files and processes."""
        return self._services.env_for(self._ctx.conversation_id, self._agent)

    @property
    def models(self) -> Models:
        """The models that the harness was opened with.

        Raises:
            InvalidArgumentError: It was opened without models.
        """
        if self._services.models is None:
            raise needs_models()
        return self._services.models

    def key(self, name: str) -> str:
        """Return this call's stable identity for the outside, the same after every restart."""
        return self._ctx.key(name)

    async def output(self, text: str | bytes) -> None:
        """Add to the visible output, which is bounded by the tool's limits.

        Args:
            text: Text, or bytes that are read as UTF-8. What is no UTF-8 is replaced; a character
                may come in two parts.

        Raises:
            InvalidArgumentError: It is neither.
        """
        if isinstance(text, bytes | bytearray | memoryview):
            self.progress.add_bytes(bytes(text))
        elif isinstance(text, str):
            self.progress.add(text)
        else:
            raise InvalidArgumentError("text", "expected a str or bytes", show(text))
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

    @asynccontextmanager
    async def commit(self) -> AsyncIterator[Any]:
        """Open a transaction; it is committed when the block ends.

        It reaches the conversations and tasks that `conversation` reaches, and decides nothing
        about the call itself: that is what the tool returns.
        """
        async with self._ctx.commit() as tx:
            tx.lend(f"the tool {self._tool.name!r}")
            yield tx

    async def create_task(
        self, definition: Any, input: Any, *, key: str | None = None
    ) -> TaskId[Any]:
        """Create a task that this call owns; with a key, once, and found again later."""
        return await self._ctx.create_task(definition, input, key=key)

    async def child(self, *, key: str = "child", agent: Any = None) -> Conversation:
        """The conversation that this call owns under the key: created once, found again."""
        conversation: Conversation = self._services.conversation(self._ctx.conversation_id)
        return await conversation.child_of(self._ctx, key=key, agent=agent)

    def conversation(self, conversation_id: int) -> Conversation:
        """A handle of a conversation that this call may reach, to hand something in.

        What is done through it are commits of their own. Give a submission a `request_id` made
        with `key`, so that it is handed in once however often the tool runs.

        Args:
            conversation_id: A conversation of the same principal; where the call's own has none,
                one of the same tree.

        Raises:
            NotFoundError: There is no such conversation, or it is not for this call to reach.
        """
        if not self._services.may_reach(self._ctx.conversation_id, conversation_id):
            raise NotFoundError("conversation", show(conversation_id))
        found: Conversation = self._services.conversation(conversation_id)
        return found

    async def put_blob(self, data: bytes) -> str:
        """Store bytes, an image say, and return the name that an `ImageBlock` refers to them by.

        Raises:
            InvalidArgumentError: They are no bytes, or too many.
        """
        async with self._ctx.commit() as tx:
            return tx.put_blob(data)

    def execute_tool(
        self, name: str, arguments: JsonValue, *, key: str | None = None
    ) -> CoroutineType[Any, Any, CallResult]:
        """Call another tool of this conversation, as the model would, and return its result.

        An error of it is a result too; only an abort of this call raises. Nothing is undone when
        the wait for it is cancelled: it goes on, and this call ends after it. Only where it would
        still have to ask a person when this call has returned is it aborted: nobody hears of it.

        Args:
            name: One of the tools that the conversation offers.
            arguments: A JSON object that fits the tool's schema.
            key: What stands for the call when this tool runs again; by default its place among
                the calls without a key.

        Raises:
            InvalidArgumentError: A second call without a key is made while one is running, the key
                or place stands for another call, or a `reconcile` function asks.
            NotJsonError: The arguments cannot be stored.
            OwnedTooDeepError: Calls are nested too deeply.
        """
        if self._nested is None:
            self._nested = NestedCalls(self._services, self._ctx, reconciling=self._reconciling)
        # Thousands of these may wait at a time: one frame less for each.
        return self._nested.execute(name, arguments, key)  # type: ignore[return-value]

    def report_unheeded(self, final: FinalResult) -> None:
        """Report what nested calls asked of the run, where the call's own result does not.

        Args:
            final: The call's own result.
        """
        if self._nested is None:
            return
        for name, result in self._nested.demanding:
            asked = []
            if result.handoff is not None and final.handoff is None:
                asked.append("handoff")
            if result.terminate and not final.terminate:
                asked.append("terminate")
            if not set(result.add_tools) <= set(final.add_tools):
                asked.append("add_tools")
            if asked:
                self.report(
                    f"the nested call {result.task} of {name!r} asks for {', '.join(asked)}, which "
                    f"counts for nothing: the result of {self._tool.name!r}, its caller, does not"
                )

    async def run_blocking(self, function: Callable[..., T], /, *args: Any) -> T:
        """Run a blocking function in a thread; it is waited for, also on abort."""
        return await self._ctx.run_blocking(function, *args)

    async def sleep(self, seconds: float) -> None:
        """Wait; an abort ends it."""
        await self._ctx.sleep(seconds)

    def report(self, error: BaseException | str) -> None:
        """Report an error that the call goes on without."""
        self._ctx.report(error)
