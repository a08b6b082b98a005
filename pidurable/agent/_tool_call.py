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

import math
from typing import TYPE_CHECKING, Any, Literal, final

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
from pidurable.agent._hooks import ToolHooks
from pidurable.agent._running_call import RunningCall
from pidurable.agent._services import Agent, AgentServices
from pidurable.agent._tool_result import (
    FinalResult,
    error_result,
    final_result,
    shown_blocks,
    with_committed,
    with_output,
)
from pidurable.errors import (
    AbortRequestedError,
    InvocationEndedError,
    NotJsonError,
    OutcomeUnknownError,
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.records import _json
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX
from pidurable.records._messages import ToolResultMessage
from pidurable.registry._tool import Tool, ToolArgumentsError, ToolResult
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, phase
from pidurable.tasks._errors import bounded, error_info, leaves, storage_trouble
from pidurable.tasks._transaction import TaskTransaction

if TYPE_CHECKING:
    from pidurable.session._session import Session

Replay = Literal["safe", "reconcile", "interrupt", "park"]

_STRICTNESS = {"safe": 0, "reconcile": 1, "interrupt": 2, "park": 3}
_UNKNOWN = (
    "The process died while this call was running. Whether its effect happened is unknown: "
    "look before you repeat it."
)
_SCHEMA_BYTES_MAX = 6 * 1024

# Raised through a tool by its own call: not its fault, and not its result.
_OURS = (
    AbortRequestedError,
    InvocationEndedError,
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
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
    replay: Replay
    unknown: str | None = None
    """What the tool said when it could not tell whether its effect happened."""


@attrs.frozen(kw_only=True)
class ToolReceipt:
    """How a call ended, and the entry of its result."""

    entry: int
    is_error: bool
    code: str | None = None
    terminate: bool = False
    """The result asks for the end of the run."""
    handoff: str | None = None
    """The note of a fresh context in which the input is to go on."""
    add_tools: tuple[str, ...] = ()
    """Tools that the conversation gets from now on."""


Checkpoint = Call | Execute
ToolContext = TaskContext[ToolInput, Checkpoint, ToolReceipt]
Tx = TaskTransaction[Checkpoint, ToolReceipt]


@final
class ToolTask(Task[ToolInput, Checkpoint, ToolReceipt]):
    """One tool call of a model. Owned by its generation."""

    name = "pi.tool"
    version = 1
    on_fault = "fault"  # whatever the host's setting: its conversation must stay usable
    hooks = ToolHooks

    def __init__(self, services: AgentServices) -> None:
        self._services = services

    def initial(self, input: ToolInput) -> Checkpoint:
        return Call()

    # --- call ----------------------------------------------------------------------------

    @phase
    async def call(self, at: Call, ctx: ToolContext) -> None:
        """Validate the call, commit the intent, run the tool, commit the outcome."""
        agent = self._services.resolve(ctx.conversation_id)
        tool = agent.tool(ctx.input.name)
        if tool is None:
            text = f"The tool {ctx.input.name!r} is not available any more."
            await self._store(ctx, error_result("tool_unavailable", text))
            return
        arguments = ctx.input.arguments
        try:
            kwargs = _validated(tool, arguments)
        except ToolArgumentsError as problem:
            schema = bounded(_json.dumps(tool.schema), _SCHEMA_BYTES_MAX)
            said = bounded(str(problem), ERROR_MESSAGE_BYTES_MAX)
            text = f"The call was not run: {said}\nThe arguments must fit this schema: {schema}"
            await self._store(ctx, error_result("invalid_arguments", text))
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
            came = await _invoke(self._services, ctx, tool, kwargs, call)
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
            return with_output(error_result("interrupted", _unknown_text(detail)), call.progress)
        async with ctx.commit() as tx:
            call.progress.write(tx)
            tx.goto(attrs.evolve(at, unknown=detail))
        return None

    # --- execute: only after a crash, or an outcome that is unknown ------------------------

    @phase
    async def execute(self, at: Execute, ctx: ToolContext) -> None:
        """Decide what becomes of a call whose effect may have happened."""
        agent = self._services.resolve(ctx.conversation_id)
        tool = agent.tool(ctx.input.name)
        policy: str = "interrupt"
        if tool is not None:
            policy = stricter(at.replay, tool.replay)
        interrupted = error_result("interrupted", _unknown_text(at.unknown))
        if tool is None or policy not in ("safe", "reconcile"):
            await self._store(ctx, with_committed(interrupted, _slot(self._services.session, ctx)))
            return
        try:
            kwargs = _validated(tool, at.arguments)
        except ToolArgumentsError as problem:
            # The tool has changed since: it can neither be asked nor run again.
            text = f"{_unknown_text(at.unknown)} It no longer takes these arguments: {problem}"
            final = error_result("interrupted", text)
            await self._store(ctx, with_committed(final, _slot(self._services.session, ctx)))
            return
        if policy == "reconcile":
            found = await self._reconcile(ctx, agent, tool, kwargs)
            if found is not False:
                found = found or with_committed(interrupted, _slot(self._services.session, ctx))
                await self._store(ctx, found)
                return
        await self._clear_output(ctx)
        await self._run(ctx, at, agent, tool, kwargs)

    async def _reconcile(
        self, ctx: ToolContext, agent: Agent, tool: Tool[..., Any], kwargs: dict[str, Any]
    ) -> FinalResult | Literal[False] | None:
        """Ask the tool what became of the call: its result, False (did not happen), or None."""
        if tool.reconcile is None:
            return None
        call = RunningCall(self._services, ctx, agent, tool)
        try:
            with trio.move_on_after(_seconds(tool)):
                answer = await tool.reconcile(kwargs, call)
                if answer is False:
                    return False
                if isinstance(answer, ToolResult):
                    return final_result(answer, tool, call.progress)
        except BaseException as raised:  # noqa: ASYNC103 - _passes lets it by
            if _passes(raised, self._services):
                raise
            ctx.report(f"reconcile raised, so the outcome is unknown: {_described(raised)}")
        finally:
            call.progress.close()
        return None

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
            entry = self._append(tx, ctx, final)
            receipt = ToolReceipt(entry=entry, is_error=final.is_error, code=final.code)
            if final.error is not None:
                tx.fail(final.error, result=receipt)
            else:
                tx.complete(receipt)
        self._services.session.failpoints.hit("CP4")

    def _append(self, tx: Tx, ctx: ToolContext, final: FinalResult) -> int:
        conversation = ctx.conversation_id
        message = ToolResultMessage(
            call=(ctx.input.assistant, ctx.input.index),
            name=ctx.input.name,
            blocks=shown_blocks(tx, final.blocks),
            is_error=final.is_error,
            at_us=tx.now_us(),
            code=final.code,
        )
        entry = tx.append(conversation, final.data, kind="pi.tool_result", messages=[message])
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
        text = "The call was aborted before it ran."
        if isinstance(at, Execute):
            text = "The call was aborted while it ran; a part of its effect may have happened."
        final = with_committed(error_result("aborted", text), _slot(self._services.session, ctx))
        async with ctx.commit() as tx:
            entry = self._append(tx, ctx, final)
            receipt = ToolReceipt(entry=entry, is_error=True, code="aborted")
            tx.end_aborted(result=receipt)


async def _invoke(
    services: AgentServices,
    ctx: ToolContext,
    tool: Tool[..., Any],
    kwargs: dict[str, Any],
    call: RunningCall,
) -> FinalResult | OutcomeUnknownError:
    """Run the tool, and make a result of whatever comes out of it."""
    scope = trio.CancelScope(deadline=trio.current_time() + _seconds(tool))
    returned: object = None
    try:
        with scope:
            returned = await tool.invoke(kwargs, call)
        if not scope.cancelled_caught:
            return final_result(returned, tool, call.progress)
        text, code = _timeout_text(tool), "timeout"
    except BaseException as raised:  # noqa: ASYNC103 - _passes lets it by
        if _passes(raised, services):
            raise
        every = leaves(raised)
        if all(isinstance(leaf, OutcomeUnknownError) for leaf in every):
            unknown = every[0]
            assert isinstance(unknown, OutcomeUnknownError)
            return unknown  # noqa: ASYNC104 - _passes lets it by
        text, code = _described(raised), "tool_error"
        ctx.report(f"tool {tool.name!r} raised {text}")
        if scope.cancel_called:
            text, code = f"{_timeout_text(tool)} Stopping it raised {text}", "timeout"
    return with_output(error_result(code, text, failed=True), call.progress)


def stricter(stored: str, current: str) -> str:
    """The replay policy that counts: of the one stored with the intent and today's."""
    return max(
        stored, current, key=lambda policy: _STRICTNESS.get(policy, _STRICTNESS["interrupt"])
    )


def _passes(raised: BaseException, services: AgentServices) -> bool:
    """Whether an error is not the tool's own: the host is interrupted, or the call is stopped.

    Neither is it where a read of the store failed that the tool needed, as when it asks another
    agent: the task is tried again, as any task is, by what the tool says of its being repeated.
    """
    if storage_trouble(raised, services.session.storage.store) is not None:
        return True
    every = leaves(raised)
    if any(isinstance(leaf, KeyboardInterrupt | SystemExit) for leaf in every):
        return True
    if any(isinstance(leaf, _OURS) for leaf in every):
        return True
    # A cancellation that nobody asked for is an error like any other; without this look the call
    # would be taken for one that is being stopped, and never end.
    return trio.current_effective_deadline() == -math.inf


def _described(raised: BaseException) -> str:
    info = error_info(raised)
    return f"{info.type}: {info.message}"


def _seconds(tool: Tool[..., Any]) -> float:
    return math.inf if tool.timeout is None else tool.timeout


def _timeout_text(tool: Tool[..., Any]) -> str:
    return f"The call took longer than {tool.timeout:g} s and was stopped."


def _unknown_text(detail: str | None) -> str:
    if detail is None:
        return _UNKNOWN
    return (
        f"Whether the effect of this call happened is unknown: {detail} Look before you repeat it."
    )


def _validated(tool: Tool[..., Any], arguments: Any) -> dict[str, Any]:
    """The arguments as the tool takes them.

    Raises:
        ToolArgumentsError: They do not fit.
    """
    if not isinstance(arguments, dict):
        raise ToolArgumentsError(f"the arguments are not a JSON object{_why_not_json(arguments)}")
    try:
        return tool.validate(arguments)
    except ToolArgumentsError:
        raise
    except Exception as raised:  # validators of the tool's own types may raise anything
        raise ToolArgumentsError(_described(raised)) from raised


def _why_not_json(arguments: Any) -> str:
    """What breaks the rules in the text that a model wrote, so that it can mend it."""
    if isinstance(arguments, str):
        try:
            _json.loads(arguments)
        except NotJsonError as problem:
            return f", {problem}"
    return ""  # another value than an object, or only what was cleaned on its way to the store


def _slot(session: Session, ctx: ToolContext) -> dict[str, Any] | None:
    """What `pi.live` shows of this call, as committed."""
    live = session.doc_value(address_of(LiveDocument, ctx.conversation_id))
    place = None if live is None else find_call(live, ctx.task_id)
    return None if live is None or place is None else live["calls"][place]
