"""`pi.tool`: one tool call, as an effect sandwich.

::

    call:     resolve, validate, ask `before_tool`, validate again, commit the intent (-> execute),
              run the tool, ask `after_tool`, commit the outcome
    approval: a person was asked, by a hook before the intent or after a crash found one; on a yes
              everything before the intent is done anew
    execute:  reached only by recovery: the effect may or may not have happened

The intent fixes the final arguments and the replay policy, so `before_tool` is not asked again
after it. Found there after a crash, a `safe` call runs again with the stored arguments, a
`reconcile` call asks its tool what happened, a `park` call asks a person; any other gives the model
an error result that says the outcome is unknown, with what it had put out. The stricter of the
stored and the current policy counts; a tool that is gone counts as `interrupt`. What a person had
permitted runs again only if it still is what they were shown; else a person is asked, as by `park`.

Every result of a call that may have run goes through `after_tool`, however it came about, so that
what a hook takes out of results stays out of all of them. Those of aborted calls go through
`on_abort`.
"""

from __future__ import annotations

from typing import Any, Literal, final

import attrs

from pidurable.agent._approval import (
    answered,
    ask as ask_a_person,
    covers,
    denied,
    describe,
    not_shown,
    park,
)
from pidurable.agent._asking import ask_after_tool, ask_before_tool, ask_on_abort
from pidurable.agent._call_output import clear_output, committed_output
from pidurable.agent._call_records import Approval, Call, Execute, ToolInput, ToolReceipt
from pidurable.agent._decisions import Happened, Interrupted, Rerun
from pidurable.agent._documents import (
    LiveDocument,
    add_usage,
    find_call,
    patch_live,
    read_doc,
)
from pidurable.agent._hooks import AfterTool, Ask, BeforeTool, OnAbort, ToolHooks
from pidurable.agent._nested import stored_result
from pidurable.agent._permissions import Asked, PermissionRequest, Subject
from pidurable.agent._replay import policy_of, unknown_text
from pidurable.agent._running_call import RunningCall
from pidurable.agent._services import Agent, AgentServices
from pidurable.agent._tool_arguments import invalid_arguments, validated
from pidurable.agent._tool_result import (
    FinalResult,
    bounds_of,
    error_result,
    replaced,
    shown_blocks,
    with_committed,
    with_output,
)
from pidurable.agent._tool_run import invoke, reconcile
from pidurable.errors import DocumentTooLargeError, NotJsonError, OutcomeUnknownError
from pidurable.records import _json
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX
from pidurable.records._messages import Block, TextBlock, ToolResultMessage
from pidurable.registry._call import ToolResult
from pidurable.registry._tool import Tool, ToolArgumentsError
from pidurable.session._entry_form import plain_entry
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, phase
from pidurable.tasks._errors import bounded
from pidurable.tasks._transaction import TaskTransaction

_NOT_AS_GRANTED = "The tool, or where it works, is not as it was when the call was permitted."


@attrs.frozen(kw_only=True)
class Prepared:
    """A call that may run: its tool, the final arguments, and what to ask a person first."""

    agent: Agent
    tool: Tool[..., Any]
    arguments: Any
    kwargs: dict[str, Any]
    ask: Ask | None = None


Checkpoint = Call | Approval | Execute
ToolContext = TaskContext[ToolInput, Checkpoint, ToolReceipt]
Tx = TaskTransaction[Checkpoint, ToolReceipt]


@final
class ToolTask(Task[ToolInput, Checkpoint, ToolReceipt]):
    """One tool call: of a model, owned by its generation, or of a tool, owned by its call."""

    name = "pi.tool"
    version = 1
    on_fault = "fault"  # whatever the host's setting: its conversation must stay usable
    hooks = ToolHooks
    __pidurable_looks__ = False

    def __init__(self, services: AgentServices) -> None:
        self._services = services

    def initial(self, input: ToolInput) -> Checkpoint:
        return Call()

    # --- call ----------------------------------------------------------------------------

    @phase
    async def call(self, at: Call, ctx: ToolContext) -> None:
        """Validate the call, ask the hooks, commit the intent, run the tool, commit the outcome."""
        prepared = await self._prepare(ctx, ctx.input.arguments)
        if isinstance(prepared, FinalResult):
            await self._store(ctx, prepared)
        else:
            await self._ask_or_go_on(ctx, prepared)

    async def _prepare(
        self, ctx: ToolContext, arguments: Any, *, grant: PermissionRequest | None = None
    ) -> Prepared | FinalResult:
        """Resolve the tool and ask the `before_tool` hooks; a result where it is not to run."""
        agent = self._services.resolve(ctx.conversation_id)
        tool = agent.tool(ctx.input.name)
        if tool is None:
            text = f"The tool {ctx.input.name!r} is not available any more."
            return error_result("tool_unavailable", text)
        try:
            kwargs = validated(tool, arguments)
        except ToolArgumentsError as problem:
            return invalid_arguments(tool, problem)
        if not ctx.handlers("before_tool"):
            return Prepared(agent=agent, tool=tool, arguments=arguments, kwargs=kwargs)
        asked = BeforeTool(
            conversation_id=ctx.conversation_id,
            task=int(ctx.task_id),
            name=tool.name,
            arguments=arguments,
            tool=tool,
            nested=ctx.input.caller is not None,
            grant=grant,
        )
        decision = await ask_before_tool(ctx, asked)
        if decision.block is not None:
            return error_result("blocked", decision.block)
        if decision.rewritten:
            try:
                kwargs = validated(tool, decision.arguments)
            except ToolArgumentsError as problem:
                return invalid_arguments(tool, problem, rewritten=True)
        return Prepared(
            agent=agent,
            tool=tool,
            arguments=decision.arguments,
            kwargs=kwargs,
            ask=decision.ask,
        )

    async def _ask_or_go_on(
        self, ctx: ToolContext, prepared: Prepared, given: PermissionRequest | None = None
    ) -> None:
        """Commit the intent and run the call, unless a person is to be asked what is not given."""
        intent = Execute(arguments=prepared.arguments, replay=prepared.tool.replay)
        ask = prepared.ask
        if ask is None and given is not None:
            # Nobody asks any more; but what was granted is what was shown.
            ask = Ask(given.risk, given.reason)
        if ask is not None:
            asked = self._describe(ctx, "call", prepared, ask)
            if isinstance(asked, FinalResult):
                await self._store(ctx, asked)
                return
            intent = attrs.evolve(intent, granted=asked.digest)
            if given is None or not covers(given, asked):
                try:
                    is_granted = await ask_a_person(ctx, asked, intent=intent, before=given)
                except (NotJsonError, DocumentTooLargeError) as problem:
                    await self._store(ctx, not_shown(f"that cannot be asked ({problem})"))
                    return
                if is_granted:
                    await self._run(ctx, intent, prepared)
                return
        await ctx.goto(intent)
        await self._run(ctx, intent, prepared)

    def _describe(
        self, ctx: ToolContext, subject: Subject, prepared: Prepared, ask: Ask
    ) -> Asked | FinalResult:
        return describe(
            self._services,
            ctx,
            subject=subject,
            agent=prepared.agent,
            tool=prepared.tool,
            arguments=prepared.arguments,
            ask=ask,
        )

    async def _run(self, ctx: ToolContext, at: Execute, prepared: Prepared) -> None:
        """Perform the effect, whose intent is stored, and commit its outcome."""
        self._services.session.failpoints.hit("CP2")
        # What a running call holds is gone by the commit of its outcome: hundreds may wait there.
        final = await self._invoked(ctx, at, prepared)
        if final is not None:
            self._services.session.failpoints.hit("CP3")
            if ctx.handlers("after_tool"):
                final = await self._looked_over(ctx, at, prepared.tool, final)
            await self._store(ctx, final)

    async def _invoked(
        self, ctx: ToolContext, at: Execute, prepared: Prepared
    ) -> FinalResult | None:
        """Run the tool; None where its checkpoint says by now that the outcome is unknown."""
        call = RunningCall(self._services, ctx, prepared.agent, prepared.tool)
        try:
            came = await invoke(self._services, prepared.tool, prepared.kwargs, call)
            if isinstance(came, OutcomeUnknownError):
                return await self._unknown(ctx, at, came, call)
            call.report_unheeded(came)
            return came
        finally:
            call.close()

    async def _unknown(
        self, ctx: ToolContext, at: Execute, raised: OutcomeUnknownError, call: RunningCall
    ) -> FinalResult | None:
        """The tool cannot tell whether its effect happened: as if found after a crash, once."""
        detail = bounded(str(raised.detail), ERROR_MESSAGE_BYTES_MAX)
        if at.unknown is not None:
            return with_output(
                error_result("interrupted", unknown_text(detail), failed=True), call.progress
            )
        async with ctx.commit() as tx:
            call.progress.write(tx)
            tx.goto(attrs.evolve(at, unknown=detail))
        return None

    # --- approval ------------------------------------------------------------------------

    @phase
    async def approval(self, at: Approval, ctx: ToolContext) -> None:
        """Go on as a person has decided, or as nobody has in time."""
        request = await answered(self._services, ctx, at)
        if request is None:
            return
        if at.effect is not None:
            await self._judged(ctx, at.effect, request)
            return
        if request.state != "granted":
            await self._store(ctx, denied(request))
            return
        prepared = await self._prepare(ctx, ctx.input.arguments, grant=request)
        if isinstance(prepared, FinalResult):
            await self._store(ctx, prepared)
        else:
            await self._ask_or_go_on(ctx, prepared, request)

    async def _judged(self, ctx: ToolContext, at: Execute, request: PermissionRequest) -> None:
        """Do with an effect that was found what a person has said of it."""
        tool = self._services.resolve(ctx.conversation_id).tool(ctx.input.name)
        said = request.decision
        if isinstance(said, Rerun):
            await self._run_again(ctx, at, request)
            return
        if isinstance(said, Happened):
            bounds = bounds_of(tool, ctx.settings.value_bytes_max)
            try:
                final = replaced(FinalResult(blocks=()), said.as_result(), bounds)
            except (TypeError, NotJsonError) as problem:
                # The tool has changed since it was decided.
                text = f"A person has given a result that does not fit: {problem}"
                final = self._interrupted(ctx, at, text)
        elif isinstance(said, Interrupted):
            final = self._interrupted(ctx, at)
        else:
            final = self._interrupted(ctx, at, "Nobody decided in time what became of it.")
        await self._finish(ctx, at, tool, final)

    async def _run_again(self, ctx: ToolContext, at: Execute, request: PermissionRequest) -> None:
        """Run an effect again that a person has looked into: as shown, if nobody blocks it now."""
        prepared = await self._prepare(ctx, at.arguments, grant=request)
        if isinstance(prepared, FinalResult):
            why = "".join(each.text for each in prepared.blocks if isinstance(each, TextBlock))
            tool = self._services.resolve(ctx.conversation_id).tool(ctx.input.name)
            await self._finish(ctx, at, tool, self._interrupted(ctx, at, why))
            return
        # Rewriting is over: what is stored with the intent is what runs.
        kwargs = validated(prepared.tool, at.arguments)
        prepared = attrs.evolve(prepared, arguments=at.arguments, kwargs=kwargs)
        asked = self._describe(ctx, "effect", prepared, Ask(request.risk, request.reason))
        if isinstance(asked, FinalResult) or not covers(request, asked):
            await self._park(ctx, at, prepared.agent, prepared.tool, before=request)
            return
        at = attrs.evolve(at, granted=asked.digest)
        await ctx.goto(at)
        await clear_output(self._services.session, ctx)
        await self._run(ctx, at, prepared)

    async def _park(
        self,
        ctx: ToolContext,
        at: Execute,
        agent: Agent,
        tool: Tool[..., Any] | None,
        *,
        before: PermissionRequest | None = None,
        why: str = "",
    ) -> None:
        """Ask a person what became of an effect, and wait."""
        asked = describe(
            self._services,
            ctx,
            subject="effect",
            agent=agent,
            tool=tool,
            arguments=at.arguments,
            ask=Ask("high", f"{unknown_text(at.unknown)} {why}".rstrip()),
        )
        if not isinstance(asked, FinalResult):
            try:
                await park(ctx, asked, effect=at, before=before)
                return
            except (NotJsonError, DocumentTooLargeError) as problem:
                ctx.report(f"nobody can be asked what became of the call: {problem}")
        why = "It is too large to be shown to a person."
        await self._finish(ctx, at, tool, self._interrupted(ctx, at, why))

    # --- execute: only after a crash, or an outcome that is unknown ------------------------

    @phase
    async def execute(self, at: Execute, ctx: ToolContext) -> None:
        """Decide what becomes of a call whose effect may have happened."""
        agent = self._services.resolve(ctx.conversation_id)
        tool = agent.tool(ctx.input.name)
        policy = policy_of(at.replay, tool)
        if policy == "park":
            await self._park(ctx, at, agent, tool)
            return
        if tool is None or policy not in ("safe", "reconcile"):
            await self._finish(ctx, at, tool, self._interrupted(ctx, at))
            return
        try:
            kwargs = validated(tool, at.arguments)
        except ToolArgumentsError as problem:
            # The tool has changed since: it can neither be asked nor run again.
            said = f"It no longer takes these arguments: {problem}"
            await self._finish(ctx, at, tool, self._interrupted(ctx, at, said))
            return
        prepared = Prepared(agent=agent, tool=tool, arguments=at.arguments, kwargs=kwargs)
        if policy == "reconcile":
            found = await self._reconciled(ctx, prepared)
            if found is not False:
                await self._finish(ctx, at, tool, found or self._interrupted(ctx, at))
                return
        if not self._is_as_granted(ctx, at, prepared):
            await self._park(ctx, at, agent, tool, why=_NOT_AS_GRANTED)
            return
        await clear_output(self._services.session, ctx)
        await self._run(ctx, at, prepared)

    def _is_as_granted(self, ctx: ToolContext, at: Execute, prepared: Prepared) -> bool:
        """Whether what would run again is what somebody has let run, if anybody was asked."""
        if at.granted is None:
            return True
        asked = self._describe(ctx, "effect", prepared, Ask("high", ""))
        return not isinstance(asked, FinalResult) and asked.digest == at.granted

    async def _reconciled(
        self, ctx: ToolContext, prepared: Prepared
    ) -> FinalResult | Literal[False] | None:
        call = RunningCall(self._services, ctx, prepared.agent, prepared.tool, reconciling=True)
        # What it puts out comes behind what the call had, and not in its place.
        slot = committed_output(self._services.session, ctx)
        if slot is not None:
            call.progress.resume(slot)
        try:
            return await reconcile(self._services, prepared.tool, prepared.kwargs, call)
        finally:
            call.close()

    def _interrupted(self, ctx: ToolContext, at: Execute, said: str = "") -> FinalResult:
        """The outcome is unknown; what the call had put out is told with it.

        The call ends failed: nobody is left to hear of what it owns, which is to do nothing more.
        """
        text = f"{unknown_text(at.unknown)} {said}".rstrip()
        slot = committed_output(self._services.session, ctx)
        return with_committed(error_result("interrupted", text, failed=True), slot)

    # --- outcome -------------------------------------------------------------------------

    async def _finish(
        self, ctx: ToolContext, at: Execute, tool: Tool[..., Any] | None, final: FinalResult
    ) -> None:
        """Let the `after_tool` hooks replace the result of a call that may have run; store it."""
        if ctx.handlers("after_tool"):
            final = await self._looked_over(ctx, at, tool, final)
        await self._store(ctx, final)

    async def _looked_over(
        self, ctx: ToolContext, at: Execute, tool: Tool[..., Any] | None, final: FinalResult
    ) -> FinalResult:
        """The result as the `after_tool` hooks have left it."""
        bounds = bounds_of(tool, ctx.settings.value_bytes_max)

        def accept(by: ToolResult) -> ToolResult:
            nonlocal final
            final = replaced(final, by, bounds)
            return final.as_given()

        asked = AfterTool(
            conversation_id=ctx.conversation_id,
            task=int(ctx.task_id),
            name=ctx.input.name,
            arguments=at.arguments,
            nested=ctx.input.caller is not None,
            result=final.as_given(),
        )
        await ask_after_tool(ctx, asked, accept)
        return final

    async def _store(self, ctx: ToolContext, final: FinalResult) -> None:
        """One commit: the result's entry, and the outcome that names it."""
        # A body that awaits nothing costs less than a block, and a call has little else.
        await ctx._run(self._end, (ctx, final))
        self._services.session.failpoints.hit("CP4")

    def _end(self, tx: Tx) -> None:
        ctx, final = tx._given
        receipt = self._close(tx, ctx, final)
        if final.error is not None:
            tx.fail(final.error, result=receipt)
        else:
            tx.complete(receipt)
            own = tx.view.task(ctx.task_id)
            if own is not None and own.below:
                self._services.permissions.give_up_below(tx, int(ctx.task_id))

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
        # Its name was read from the store, and all of it is JSON: there is nothing to check.
        text = _json.encode_plain(place)
        return tx.append_encoded(ctx.conversation_id, plain_entry("pi.nested_result", text))

    async def abort(self, at: Checkpoint, ctx: ToolContext) -> None:
        """An aborted result, with what was put out so far."""
        text = "The call was aborted before it ran."
        if _begun(at) is not None:
            text = "The call was aborted while it ran; a part of its effect may have happened."
        final = with_committed(
            error_result("aborted", text), committed_output(self._services.session, ctx)
        )
        if ctx.handlers("on_abort"):
            final = await self._aborted(at, ctx, final)
        async with ctx.commit() as tx:
            tx.end_aborted(result=self._close(tx, ctx, final))

    async def _aborted(self, at: Checkpoint, ctx: ToolContext, final: FinalResult) -> FinalResult:
        """The aborted result, as the `on_abort` hooks have left it."""
        tool = self._services.resolve(ctx.conversation_id).tool(ctx.input.name)
        bounds = bounds_of(tool, ctx.settings.value_bytes_max)
        begun = _begun(at)

        def accept(by: ToolResult) -> ToolResult:
            nonlocal final
            final = replaced(final, by, bounds)
            return final.as_given()

        asked = OnAbort(
            conversation_id=ctx.conversation_id,
            task=int(ctx.task_id),
            name=ctx.input.name,
            arguments=ctx.input.arguments if begun is None else begun.arguments,
            nested=ctx.input.caller is not None,
            started=begun is not None,
            result=final.as_given(),
        )
        await ask_on_abort(ctx, asked, accept)
        return final


def _begun(at: Checkpoint) -> Execute | None:
    """The intent of a call that may have run."""
    if isinstance(at, Approval):
        return at.effect
    return at if isinstance(at, Execute) else None
