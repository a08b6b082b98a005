"""`pi.tool`: one tool call, as an effect sandwich.

::

    call:     resolve, validate, commit the intent (-> execute), run the tool, commit the outcome
    execute:  reached only by recovery: the effect may or may not have happened

The intent fixes the final arguments and the replay policy. Found there after a crash, a `safe` call
runs again with the stored arguments; any other gives the model an error result that says the
outcome is unknown, with what it had put out. The stricter of the stored and the current policy
counts; a tool that is gone counts as `interrupt`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import attrs
import trio

from pidurable.agent._documents import (
    LiveDocument,
    add_usage,
    address_of,
    find_call,
    patch_live,
    read_doc,
)
from pidurable.agent._progress import CallOutput, bounded_output, clean_output
from pidurable.agent._services import Agent, AgentServices
from pidurable.errors import (
    NotJsonError,
    OutcomeUnknownError,
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.records import _json
from pidurable.records._ids import TaskId
from pidurable.records._messages import Block, JsonValue, TextBlock, ToolResultMessage
from pidurable.registry._env import Env
from pidurable.registry._tool import Tool, ToolArgumentsError, ToolResult
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, phase
from pidurable.tasks._errors import bounded, error_info
from pidurable.tasks._transaction import TaskTransaction

_STRICTNESS = {"safe": 0, "reconcile": 1, "interrupt": 2, "park": 3}
_UNKNOWN = (
    "The process died while this call was running. Whether its effect happened is unknown: "
    "look before you repeat it."
)


@attrs.frozen(kw_only=True)
class ToolInput:
    """The call that a model made: its place, the tool's name, the arguments as the model wrote."""

    assistant: int
    index: int
    name: str
    arguments: Any


@attrs.frozen
class Call:
    """Nothing has happened yet."""


@attrs.frozen(kw_only=True)
class Execute:
    """The tool may have run with these arguments."""

    arguments: Any
    replay: Literal["safe", "reconcile", "interrupt", "park"]


@attrs.frozen(kw_only=True)
class ToolReceipt:
    """How a call ended, and the entry of its result."""

    entry: int
    is_error: bool
    code: str | None = None


Checkpoint = Call | Execute
ToolContext = TaskContext[ToolInput, Checkpoint, ToolReceipt]
Tx = TaskTransaction[Checkpoint, ToolReceipt]


@attrs.frozen(kw_only=True)
class _Final:
    """A result in the form in which it is stored."""

    blocks: tuple[Block, ...]
    is_error: bool = False
    code: str | None = None
    error: str | None = None
    """Set when the call ends `failed`: what it owned and still lives is aborted."""
    details: Any = None
    usage: Any = None
    data: Any = None


class ToolTask(Task[ToolInput, Checkpoint, ToolReceipt]):
    """One tool call of a model. Owned by its generation."""

    name = "pi.tool"
    version = 1

    def __init__(self, services: AgentServices) -> None:
        self._services = services

    def initial(self, input: ToolInput) -> Checkpoint:
        return Call()

    # --- call ----------------------------------------------------------------------------

    @phase
    async def call(self, at: Call, ctx: ToolContext) -> None:
        agent = self._services.resolve(ctx.conversation_id)
        tool = agent.tool(ctx.input.name)
        if tool is None:
            text = f"The tool {ctx.input.name!r} is not available any more."
            await self._store(ctx, _error("tool_unavailable", text))
            return
        arguments = ctx.input.arguments
        try:
            if not isinstance(arguments, dict):
                raise ToolArgumentsError("the arguments are not a JSON object")
            kwargs = tool.validate(arguments)
        except ToolArgumentsError as problem:
            schema = _json.dumps(tool.schema)
            text = f"The call was not run: {problem}\nThe arguments must fit this schema: {schema}"
            await self._store(ctx, _error("invalid_arguments", text))
            return
        await ctx.goto(Execute(arguments=arguments, replay=tool.replay))
        ctx.session.failpoints.hit("CP2")
        await self._run(ctx, agent, tool, kwargs)

    async def _run(
        self, ctx: ToolContext, agent: Agent, tool: Tool[..., Any], kwargs: dict[str, Any]
    ) -> None:
        """Perform the effect and commit its outcome."""
        call = RunningCall(self._services, ctx, agent, tool)
        try:
            final = await self._invoke(ctx, tool, kwargs, call)
        finally:
            call.progress.close()
        if final is not None:
            ctx.session.failpoints.hit("CP3")
            await self._store(ctx, final)
            ctx.session.failpoints.hit("CP4")

    async def _invoke(
        self, ctx: ToolContext, tool: Tool[..., Any], kwargs: dict[str, Any], call: RunningCall
    ) -> _Final | None:
        """Run the tool; None if the outcome is unknown and the call goes to `execute`."""
        timeout = float("inf") if tool.timeout is None else tool.timeout
        try:
            with trio.move_on_after(timeout) as scope:
                returned = await tool.invoke(kwargs, call)
            if scope.cancelled_caught:
                text = f"The call took longer than {tool.timeout:g} s and was stopped."
                return _with_output(_error("timeout", text), call)
            return _final(returned, tool, call)
        except OutcomeUnknownError as unknown:
            await call.diagnostic("error", str(unknown))
            return _with_output(_error("interrupted", f"{_UNKNOWN}\n{unknown}"), call)
        except (SessionClosedError, SessionPoisonedError, StorageRefusedError):
            # Never the tool's fault, for instance a child's answer that a close no longer waits
            # for: the call stays where it is, and the next holder takes it up.
            raise
        except Exception as raised:
            info = error_info(raised)
            ctx.report(raised)
            text = f"{info.type}: {info.message}"
            final = _with_output(_error("tool_error", text), call)
            return attrs.evolve(final, error=text)

    # --- execute: only after a crash -----------------------------------------------------

    @phase
    async def execute(self, at: Execute, ctx: ToolContext) -> None:
        agent = self._services.resolve(ctx.conversation_id)
        tool = agent.tool(ctx.input.name)
        policy = "interrupt"
        if tool is not None:
            policy = max(at.replay, tool.replay, key=lambda replay: _STRICTNESS[replay])
        if tool is None or policy != "safe":
            await self._store(ctx, _committed(ctx, _error("interrupted", _UNKNOWN)))
            return
        try:
            kwargs = tool.validate(at.arguments)
        except ToolArgumentsError as problem:
            text = f"After a restart the tool no longer takes these arguments: {problem}"
            await self._store(ctx, _error("invalid_arguments", text))
            return
        await self._clear_output(ctx)
        await self._run(ctx, agent, tool, kwargs)

    async def _clear_output(self, ctx: ToolContext) -> None:
        """The run that follows puts everything out again."""
        async with ctx.commit() as tx:
            place = find_call(read_doc(tx, LiveDocument, ctx.conversation_id), ctx.task_id)
            if place is not None:
                fields: dict[str, Any] = {"output_tail": "", "details": None, "diagnostics": []}
                path = f"/calls/{place}"
                ops = [
                    {"op": "replace", "path": f"{path}/{name}", "value": value}
                    for name, value in fields.items()
                ]
                patch_live(tx, ctx.conversation_id, ops)

    # --- outcome -------------------------------------------------------------------------

    async def _store(self, ctx: ToolContext, final: _Final) -> None:
        """One commit: the result's entry, and the outcome that names it."""
        async with ctx.commit() as tx:
            entry = self._append(tx, ctx, final)
            if final.error is not None:
                receipt = ToolReceipt(entry=entry, is_error=True, code=final.code)
                tx.fail(final.error, result=receipt)
                return
            tx.complete(ToolReceipt(entry=entry, is_error=final.is_error, code=final.code))

    def _append(self, tx: Tx, ctx: ToolContext, final: _Final) -> int:
        conversation = ctx.conversation_id
        entry = tx.append(
            conversation,
            final.data,
            kind="pi.tool_result",
            messages=[
                ToolResultMessage(
                    call=(ctx.input.assistant, ctx.input.index),
                    name=ctx.input.name,
                    blocks=final.blocks,
                    is_error=final.is_error,
                    at_us=tx.now_us(),
                    code=final.code,
                )
            ],
        )
        place = find_call(read_doc(tx, LiveDocument, conversation), ctx.task_id)
        if place is not None:
            status = "failed" if final.is_error else "done"
            path = f"/calls/{place}/status"
            patch_live(tx, conversation, [{"op": "replace", "path": path, "value": status}])
        if final.usage is not None:
            add_usage(tx, conversation, final.usage, tool=ctx.input.name)
        return entry

    async def abort(self, at: Checkpoint, ctx: ToolContext) -> None:
        """An aborted result, with what was put out so far."""
        final = _committed(ctx, _error("aborted", "The call was aborted."))
        async with ctx.commit() as tx:
            entry = self._append(tx, ctx, final)
            receipt = ToolReceipt(entry=entry, is_error=True, code="aborted")
            tx.end_aborted(result=receipt)


# --- results ----------------------------------------------------------------------------------


def _error(code: str, text: str) -> _Final:
    return _Final(blocks=(TextBlock(text=clean_output(text)),), is_error=True, code=code)


def _with_output(final: _Final, call: RunningCall) -> _Final:
    """An error result, with the output that the call had collected before it."""
    output = call.progress.collector.marked()
    return _combine(final, output, call.progress.diagnostics, call.progress.details)


def _committed(ctx: ToolContext, final: _Final) -> _Final:
    """An error result with the output, details and diagnostics that were committed."""
    live = ctx.session.doc_value(address_of(LiveDocument, ctx.conversation_id))
    place = None if live is None else find_call(live, ctx.task_id)
    if live is None or place is None:
        return final
    call = live["calls"][place]
    return _combine(final, call["output_tail"], call["diagnostics"], call["details"])


def _combine(final: _Final, output: str, diagnostics: list[Any], details: Any) -> _Final:
    parts = [block.text for block in final.blocks if isinstance(block, TextBlock)]
    if output.strip():
        parts.append(f"Output so far:\n{output}")
    parts += [f"{each['severity']}: {each['text']}" for each in diagnostics]
    return attrs.evolve(
        final,
        blocks=(TextBlock(text="\n".join(parts)),),
        data=None if details is None else {"details": details},
    )


def _final(returned: object, tool: Tool[..., Any], call: RunningCall) -> _Final:
    """Bring what a tool returned into the form in which it is stored."""
    result = returned if isinstance(returned, ToolResult) else ToolResult(_content(returned))
    if result.structured is not None:
        tool.check_structured(result.structured)
    blocks = _blocks(result.content, tool, call)
    diagnostics = call.progress.diagnostics
    if diagnostics:
        text = "\n".join(f"{each['severity']}: {each['text']}" for each in diagnostics)
        blocks = (*blocks, TextBlock(text=text))
    details = result.details if result.details is not None else call.progress.details
    data: dict[str, Any] = {}
    if details is not None:
        data["details"] = details
    if result.structured is not None:
        data["structured"] = result.structured
    return _Final(
        blocks=blocks,
        is_error=result.error,
        code="tool_error" if result.error else None,
        usage=result.usage,
        data=data or None,
    )


def _content(returned: object) -> str | None:
    if returned is None or isinstance(returned, str):
        return returned
    try:
        return _json.dumps(returned, path="$<result>")
    except NotJsonError as error:
        raise TypeError(f"the tool returned something that is no JSON: {error}") from error


def _blocks(content: str | Any, tool: Tool[..., Any], call: RunningCall) -> tuple[Block, ...]:
    if content is None:
        return (TextBlock(text=call.progress.collector.marked()),)
    if isinstance(content, str):
        return (TextBlock(text=_bounded(content, tool)),)
    return tuple(
        attrs.evolve(block, text=_bounded(block.text, tool))
        if isinstance(block, TextBlock)
        else block
        for block in content
    )


def _bounded(text: str, tool: Tool[..., Any]) -> str:
    return bounded_output(
        text,
        bytes_max=tool.output_bytes_max,
        lines_max=tool.output_lines_max,
        keep=tool.output_keep,
    )


# --- the call's own API -----------------------------------------------------------------------


class RunningCall:
    """What a tool works with while it runs: the agent's side of `ToolCall`."""

    def __init__(
        self, services: AgentServices, ctx: ToolContext, agent: Agent, tool: Tool[..., Any]
    ) -> None:
        self._services = services
        self._ctx = ctx
        self._agent = agent
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
        return int(self._ctx.task_id)

    @property
    def name(self) -> str:
        return self._ctx.input.name

    @property
    def conversation_id(self) -> int:
        return self._ctx.conversation_id

    @property
    def env(self) -> Env:
        return self._services.env_for(self._ctx.conversation_id, self._agent)

    def key(self, name: str) -> str:
        return self._ctx.key(name)

    async def output(self, text: str) -> None:
        self.progress.add(text)
        await trio.lowlevel.checkpoint()

    async def details(self, value: JsonValue) -> None:
        self.progress.details = _json.check_json(value, "$.details")
        self.progress.changed()
        await trio.lowlevel.checkpoint()

    async def diagnostic(self, severity: Literal["info", "warning", "error"], text: str) -> None:
        self.progress.diagnostics.append(
            {"severity": severity, "text": bounded(clean_output(text), 4096)}
        )
        self.progress.changed()
        await trio.lowlevel.checkpoint()

    async def memo(self, name: str, candidate: JsonValue) -> JsonValue:
        return await self._ctx.memo(name, candidate)

    def commit(self) -> AbstractAsyncContextManager[Any]:
        return self._ctx.commit()

    async def create_task(
        self, definition: Any, input: Any, *, key: str | None = None
    ) -> TaskId[Any]:
        return await self._ctx.create_task(definition, input, key=key)

    async def child(self, *, key: str = "child", agent: Any = None) -> Any:
        """The conversation that this call owns under the key: created once, found again."""
        return await self._services.conversation(self._ctx.conversation_id).child_of(
            self._ctx, key=key, agent=agent
        )

    async def run_blocking(self, function: Callable[..., Any], /, *args: Any) -> Any:
        return await self._ctx.run_blocking(function, *args)

    async def sleep(self, seconds: float) -> None:
        await self._ctx.sleep(seconds)

    def report(self, error: BaseException) -> None:
        self._ctx.report(error)
