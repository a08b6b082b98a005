"""`pi.tool`: one tool call, as an effect sandwich.

::

    call:     resolve, validate, commit the intent (-> execute), run the tool, commit the outcome
    execute:  reached only by recovery: the effect may or may not have happened

The intent fixes the final arguments and the replay policy. Found there after a crash, a `safe` call
runs again with the stored arguments, a `reconcile` call asks its tool what happened; any other
gives the model an error result that says the outcome is unknown, with what it had put out. The
stricter of the stored and the current policy counts; a tool that is gone counts as `interrupt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from pidurable.agent._call_records import Call, Execute, ToolInput, ToolReceipt
from pidurable.agent._documents import (
    LiveDocument,
    add_usage,
    address_of,
    find_call,
    patch_live,
    read_doc,
)
from pidurable.agent._nested import stored_result
from pidurable.agent._replay import stricter, unknown_text
from pidurable.agent._running_call import RunningCall
from pidurable.agent._services import Agent, AgentServices
from pidurable.agent._tool_arguments import invalid_arguments, validated
from pidurable.agent._tool_result import (
    FinalResult,
    error_result,
    shown_blocks,
    with_committed,
    with_output,
)
from pidurable.agent._tool_run import invoke, reconcile
from pidurable.errors import OutcomeUnknownError
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX
from pidurable.records._messages import Block, ToolResultMessage
from pidurable.registry._tool import Tool, ToolArgumentsError
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, phase
from pidurable.tasks._errors import bounded
from pidurable.tasks._transaction import TaskTransaction

if TYPE_CHECKING:
    from pidurable.session._session import Session

Checkpoint = Call | Execute
ToolContext = TaskContext[ToolInput, Checkpoint, ToolReceipt]
Tx = TaskTransaction[Checkpoint, ToolReceipt]


class ToolTask(Task[ToolInput, Checkpoint, ToolReceipt]):
    """One tool call: of a model, owned by its generation, or of a tool, owned by its call."""

    name = "pi.tool"
    version = 1
    on_fault = "fault"  # whatever the host's setting: its conversation must stay usable

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
            await self._store(ctx, error_result("tool_unavailable", text))
            return
        arguments = ctx.input.arguments
        try:
            kwargs = validated(tool, arguments)
        except ToolArgumentsError as problem:
            await self._store(ctx, invalid_arguments(tool, problem))
            return
        intent = Execute(arguments=arguments, replay=tool.replay)
        await ctx.goto(intent)
        await self._run(ctx, intent, agent, tool, kwargs)

    async def _run(
        self,
        ctx: ToolContext,
        at: Execute,
        agent: Agent,
        tool: Tool[..., Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Perform the effect, whose intent is stored, and commit its outcome."""
        self._services.session.failpoints.hit("CP2")
        call = RunningCall(self._services, ctx, agent, tool)
        try:
            came = await invoke(self._services, tool, kwargs, call)
            if isinstance(came, OutcomeUnknownError):
                final = await self._unknown(ctx, at, came, call)
            else:
                final = came
        finally:
            call.progress.close()
        if final is not None:
            self._services.session.failpoints.hit("CP3")
            await self._store(ctx, final)

    async def _unknown(
        self, ctx: ToolContext, at: Execute, raised: OutcomeUnknownError, call: RunningCall
    ) -> FinalResult | None:
        """The tool cannot tell whether its effect happened: as if found after a crash, once."""
        detail = bounded(str(raised.detail), ERROR_MESSAGE_BYTES_MAX)
        if at.unknown is not None:
            return with_output(error_result("interrupted", unknown_text(detail)), call.progress)
        async with ctx.commit() as tx:
            call.progress.write(tx)
            tx.goto(attrs.evolve(at, unknown=detail))
        return None

    # --- execute: only after a crash, or an outcome that is unknown ------------------------

    @phase
    async def execute(self, at: Execute, ctx: ToolContext) -> None:
        agent = self._services.resolve(ctx.conversation_id)
        tool = agent.tool(ctx.input.name)
        policy: str = "interrupt"
        if tool is not None:
            policy = stricter(at.replay, tool.replay)
        interrupted = error_result("interrupted", unknown_text(at.unknown))
        if tool is None or policy not in ("safe", "reconcile"):
            await self._store(ctx, with_committed(interrupted, _slot(self._services.session, ctx)))
            return
        try:
            kwargs = validated(tool, at.arguments)
        except ToolArgumentsError as problem:
            # The tool has changed since: it can neither be asked nor run again.
            text = f"{unknown_text(at.unknown)} It no longer takes these arguments: {problem}"
            final = error_result("interrupted", text)
            await self._store(ctx, with_committed(final, _slot(self._services.session, ctx)))
            return
        if policy == "reconcile":
            call = RunningCall(self._services, ctx, agent, tool)
            try:
                found = await reconcile(self._services, tool, kwargs, call)
            finally:
                call.progress.close()
            if found is not False:
                found = found or with_committed(interrupted, _slot(self._services.session, ctx))
                await self._store(ctx, found)
                return
        await self._clear_output(ctx)
        await self._run(ctx, at, agent, tool, kwargs)

    async def _clear_output(self, ctx: ToolContext) -> None:
        """The run that follows puts everything out again."""
        fields: dict[str, Any] = {"output_tail": "", "details": None, "diagnostics": []}
        slot = _slot(self._services.session, ctx)
        if slot is None or all(slot[name] == value for name, value in fields.items()):
            return
        async with ctx.commit() as tx:
            place = find_call(read_doc(tx, LiveDocument, ctx.conversation_id), ctx.task_id)
            if place is not None:
                path = f"/calls/{place}"
                ops = [
                    {"op": "replace", "path": f"{path}/{name}", "value": value}
                    for name, value in fields.items()
                ]
                patch_live(tx, ctx.conversation_id, ops)

    # --- outcome -------------------------------------------------------------------------

    async def _store(self, ctx: ToolContext, final: FinalResult) -> None:
        """One commit: the result's entry, and the outcome that names it."""
        async with ctx.commit() as tx:
            receipt = self._close(tx, ctx, final)
            if final.error is not None:
                tx.fail(final.error, result=receipt)
            else:
                tx.complete(receipt)
        self._services.session.failpoints.hit("CP4")

    def _close(self, tx: Tx, ctx: ToolContext, final: FinalResult) -> ToolReceipt:
        """Stage all that the end of a call changes besides its task."""
        conversation = ctx.conversation_id
        blocks = shown_blocks(tx, final.blocks)
        nested = None
        if ctx.input.caller is not None:
            nested = stored_result(blocks, structured=final.structured, details=final.details)
            entry = self._append_place(tx, ctx, final)
        else:
            entry = self._append_result(tx, ctx, final, blocks)
        if final.usage is not None:
            add_usage(tx, conversation, final.usage, tool=ctx.input.name)
        return ToolReceipt(
            entry=entry,
            is_error=final.is_error,
            code=final.code,
            terminate=final.terminate,
            handoff=final.handoff,
            add_tools=final.add_tools,
            nested=nested,
        )

    def _append_result(
        self, tx: Tx, ctx: ToolContext, final: FinalResult, blocks: tuple[Block, ...]
    ) -> int:
        """The result as the model gets it."""
        conversation = ctx.conversation_id
        message = ToolResultMessage(
            call=(ctx.input.assistant, ctx.input.index),
            name=ctx.input.name,
            blocks=blocks,
            is_error=final.is_error,
            at_us=tx.now_us(),
            code=final.code,
        )
        place = find_call(read_doc(tx, LiveDocument, conversation), ctx.task_id)
        if place is not None:
            status = "failed" if final.is_error else "done"
            path = f"/calls/{place}/status"
            patch_live(tx, conversation, [{"op": "replace", "path": path, "value": status}])
        return tx.append(conversation, final.data, kind="pi.tool_result", messages=[message])

    def _append_place(self, tx: Tx, ctx: ToolContext, final: FinalResult) -> int:
        """The place of a nested call in the log; its result is in its outcome."""
        place = {
            "task": int(ctx.task_id),
            "caller": ctx.input.caller,
            "name": ctx.input.name,
            "is_error": final.is_error,
            "code": final.code,
        }
        return tx.append(ctx.conversation_id, place, kind="pi.nested_result")

    async def abort(self, at: Checkpoint, ctx: ToolContext) -> None:
        """An aborted result, with what was put out so far."""
        text = "The call was aborted before it ran."
        if isinstance(at, Execute):
            text = "The call was aborted while it ran; a part of its effect may have happened."
        final = with_committed(error_result("aborted", text), _slot(self._services.session, ctx))
        async with ctx.commit() as tx:
            tx.end_aborted(result=self._close(tx, ctx, final))


def _slot(session: Session, ctx: ToolContext) -> dict[str, Any] | None:
    """What `pi.live` shows of this call, as committed."""
    live = session.doc_value(address_of(LiveDocument, ctx.conversation_id))
    place = None if live is None else find_call(live, ctx.task_id)
    return None if live is None or place is None else live["calls"][place]
