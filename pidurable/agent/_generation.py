"""`pi.generation`: one model answer, then its tool calls.

::

    prepare --> request --> (answer) completed
                  |  ^--- retry      the run ends, or the next begins
                  v
                tools --> completed  the next generation takes the run over

What a crash costs: in prepare nothing; in request the request is sent again exactly as fixed, the
committed partial text is kept as an aborted entry and its estimated usage is charged; in retry and
tools nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import attrs

from pidurable.agent._documents import (
    AgentDocument,
    LiveDocument,
    add_usage,
    address_of,
    read_doc,
    update_doc,
)
from pidurable.agent._inbox import GenerationInput, end_run, place_steers
from pidurable.agent._models import Done, TextDelta, ThinkingDelta
from pidurable.agent._progress import PartialAnswer
from pidurable.agent._prompt import (
    build_request,
    declare,
    difference,
    estimate_tokens,
    render_sections,
    told_by,
)
from pidurable.agent._services import AgentServices
from pidurable.errors import MissingExtraError, ModelError, NotFoundError
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    TextBlock,
    ThinkingBlock,
    ToolResultMessage,
    Usage,
)
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, backoff, phase
from pidurable.tasks._transaction import TaskTransaction, TreeTransaction

_RETRY_BASE_SECONDS = 1.0
_RETRY_SECONDS_MAX = 60.0


@attrs.frozen
class Prepare:
    """The agent and the prompt are to be fixed. Nothing was sent."""

    tries: int = 0
    """Requests of this turn that failed and may be tried again."""


@attrs.frozen(kw_only=True)
class Request:
    """The request is fixed and may have been sent."""

    model: str
    thinking: str | None
    cutoff: int
    """The newest entry that the request includes."""
    tries: int = 0


@attrs.frozen(kw_only=True)
class Retry:
    """A request failed; the next try is due."""

    tries: int


@attrs.frozen(kw_only=True)
class Tools:
    """The answer of entry `assistant` is stored, its calls are running."""

    assistant: int


@attrs.frozen(kw_only=True)
class GenerationResult:
    """The entry of the answer, and the generation that went on, if one did."""

    assistant: int
    next: int | None = None


Checkpoint = Prepare | Request | Retry | Tools
GenerationContext = TaskContext[GenerationInput, Checkpoint, GenerationResult]
Tx = TaskTransaction[Checkpoint, GenerationResult]


class Generation(Task[GenerationInput, Checkpoint, GenerationResult]):
    """One model answer of a run. Owned by its conversation; its tool calls are owned by it."""

    name = "pi.generation"
    version = 1

    def __init__(self, services: AgentServices) -> None:
        self._services = services

    def initial(self, input: GenerationInput) -> Checkpoint:
        return Prepare()

    # --- prepare -------------------------------------------------------------------------

    @phase
    async def prepare(self, at: Prepare, ctx: GenerationContext) -> None:
        services = self._services
        session = ctx.session
        conversation = ctx.conversation_id
        agent = services.resolve(conversation)
        if ctx.input.turn > agent.turns_max:
            detail = f"the run has taken {agent.turns_max} turns, the most allowed"
            await self._fail(ctx, "turn_limit", detail)
            return
        problem = self._no_model(agent.model)
        if problem is not None:
            await self._fail(ctx, "no_model", problem)
            return
        assert agent.model is not None
        entries = await session.context_entries(conversation)
        told = told_by(entries)
        env = services.env_for(conversation, agent)
        sections = await render_sections(agent, env, session.clock.now_us(), told)
        message = difference(told, sections, declare(agent), session.clock.now_us())
        async with ctx.commit() as tx:
            newest = entries[-1].id if entries else 0
            if message is not None:
                newest = tx.append(conversation, kind="pi.system", messages=[message])
            tx.goto(
                Request(model=agent.model, thinking=agent.thinking, cutoff=newest, tries=at.tries)
            )

    def _no_model(self, name: str | None) -> str | None:
        """Why no model can be asked, or None."""
        models = self._services.models
        if models is None:
            return "the harness was opened without models; pass models="
        if name is None:
            return "no model is chosen for this conversation; configure one (provider/model)"
        try:
            models.resolve(name)
        except NotFoundError as unknown:
            return str(unknown)
        return None

    # --- request -------------------------------------------------------------------------

    @phase
    async def request(self, at: Request, ctx: GenerationContext) -> None:
        await self._keep_leftover(at, ctx)
        services = self._services
        assert services.models is not None
        entries = await ctx.session.context_entries(ctx.conversation_id)
        request = build_request(entries, model=at.model, thinking=at.thinking, cutoff=at.cutoff)
        partial = PartialAnswer(services.progress, ctx.conversation_id, ctx.task_id)
        answer: AssistantMessage | None = None
        try:
            async with services.models.stream(request) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        partial.add("text", event.text)
                        ctx.session.failpoints.hit("CP7")
                    elif isinstance(event, ThinkingDelta):
                        partial.add("thinking", event.text)
                    elif isinstance(event, Done):
                        answer = event.message
        except ModelError as error:
            partial.close()
            await self._failed(at, ctx, error, partial)
            return
        except (MissingExtraError, NotFoundError) as missing:
            partial.close()
            await self._fail(ctx, "no_model", str(missing))
            return
        finally:
            partial.close()
        assert answer is not None
        offered = {tool.name for tool in request.tools}
        async with ctx.commit() as tx:
            self._store_answer(tx, ctx, answer, offered)
        ctx.session.failpoints.hit("CP1")

    def _store_answer(
        self, tx: Tx, ctx: GenerationContext, answer: AssistantMessage, offered: set[str]
    ) -> None:
        """One commit: the answer's entry, its usage, and what follows from it."""
        conversation = ctx.conversation_id
        entry = tx.append(conversation, kind="pi.assistant", messages=[answer])
        add_usage(tx, conversation, answer.usage, model=answer.model)
        run = _run_of(ctx)
        if not answer.tool_calls:
            end_run(ctx.session, tx, conversation, run, answer=entry)
            tx.complete(GenerationResult(assistant=entry))
            return
        calls, ids = self._create_calls(tx, ctx, answer, entry, offered)
        update_doc(tx, LiveDocument, conversation, partial=None, calls=calls, retry=None)
        tx.wait(then=Tools(assistant=entry), on=ids)

    def _create_calls(
        self,
        tx: Tx,
        ctx: GenerationContext,
        answer: AssistantMessage,
        entry: int,
        offered: set[str],
    ) -> tuple[list[Any], list[int]]:
        from pidurable.agent._tool_call import ToolInput, ToolTask

        calls: list[Any] = []
        ids: list[int] = []
        for index, call in enumerate(answer.tool_calls):
            if call.name not in offered:
                text = f"There is no tool {call.name!r} here. Available: {_listed(offered)}."
                _append_result(
                    tx, ctx.conversation_id, (entry, index), call.name, text, "tool_unavailable"
                )
                continue
            task = tx.create_task(
                ToolTask,
                ToolInput(assistant=entry, index=index, name=call.name, arguments=call.arguments),
            )
            ids.append(task)
            calls.append(
                {
                    "index": index,
                    "task": int(task),
                    "name": call.name,
                    "status": "running",
                    "held_by": None,
                    "output_tail": "",
                    "details": None,
                    "diagnostics": [],
                }
            )
        return calls, ids

    async def _keep_leftover(self, at: Request, ctx: GenerationContext) -> None:
        """A request that a crash interrupted: keep what was shown, charge it, send again."""
        live = ctx.session.doc_value(address_of(LiveDocument, ctx.conversation_id))
        if live is None or live["generation"] != ctx.task_id or live["partial"] is None:
            return
        async with ctx.commit() as tx:
            self._append_partial(tx, ctx, at.model, "the process died while this was streamed")
            update_doc(tx, LiveDocument, ctx.conversation_id, partial=None)

    def _append_partial(
        self,
        tx: TreeTransaction,
        ctx: GenerationContext,
        model: str,
        why: str,
    ) -> None:
        live = read_doc(tx, LiveDocument, ctx.conversation_id)
        if live["generation"] != ctx.task_id or live["partial"] is None:
            return
        append_partial(tx, ctx.conversation_id, live["partial"], model=model, why=why)

    # --- failures ------------------------------------------------------------------------

    async def _failed(
        self, at: Request, ctx: GenerationContext, error: ModelError, partial: PartialAnswer
    ) -> None:
        """A request failed: try again later if that may help, else end the run."""
        settings = ctx.settings
        session = ctx.session
        delay = None
        if error.kind == "retryable" and at.tries < settings.request_tries:
            delay = backoff(
                at.tries + 1,
                base=_RETRY_BASE_SECONDS,
                factor=2.0,
                maximum=_RETRY_SECONDS_MAX,
                jitter=0.5,
                seed=ctx.key(f"retry{at.tries}"),
            )
            if error.retry_after is not None:
                delay = max(delay, error.retry_after)
            if delay > settings.retry_after_seconds_max:
                delay = None
        usage = Usage(requests=1, output_tokens=estimate_tokens(partial.characters()))
        blocks = partial.blocks()
        async with ctx.commit() as tx:
            conversation = ctx.conversation_id
            add_usage(tx, conversation, usage, model=at.model)
            tx.append(
                conversation,
                kind="pi.assistant",
                messages=[
                    AssistantMessage(
                        blocks=_plain_blocks(blocks),
                        status="failed",
                        stop_reason="error",
                        model=at.model,
                        usage=usage,
                        at_us=session.clock.now_us(),
                        error=error.detail[:4000],
                    )
                ],
            )
            if delay is None:
                reason = "context_overflow" if error.kind == "overflow" else "model_error"
                end_run(session, tx, conversation, _run_of(ctx), reason=reason, detail=error.detail)
                tx.fail(error, detail={"kind": error.kind})
                return
            until = datetime.fromtimestamp(session.clock.now_us() / 1e6, UTC) + timedelta(
                seconds=delay
            )
            update_doc(
                tx,
                LiveDocument,
                conversation,
                partial=None,
                retry={
                    "try_number": at.tries + 1,
                    "until_us": int(until.timestamp() * 1e6),
                    "error": error.detail[:4000],
                },
            )
            tx.wait(then=Retry(tries=at.tries + 1), deadline=until)

    async def _fail(self, ctx: GenerationContext, reason: str, detail: str) -> None:
        async with ctx.commit() as tx:
            end_run(
                ctx.session, tx, ctx.conversation_id, _run_of(ctx), reason=reason, detail=detail
            )
            tx.fail(detail, detail={"reason": reason})

    @phase
    async def retry_due(self, at: Retry, ctx: GenerationContext) -> None:
        async with ctx.commit() as tx:
            update_doc(tx, LiveDocument, ctx.conversation_id, retry=None)
            tx.goto(Prepare(tries=at.tries))

    # --- tools ---------------------------------------------------------------------------

    @phase
    async def tools(self, at: Tools, ctx: GenerationContext) -> None:
        """Every call is terminal: place what waits, let the next generation take the run over."""
        run = _run_of(ctx)
        conversation = ctx.conversation_id
        async with ctx.commit() as tx:
            place_steers(ctx.session, tx, conversation, run)
            turn = ctx.input.turn + 1
            following = tx.create_task(
                Generation,
                GenerationInput(run=run, turn=turn, continues=int(ctx.task_id)),
                conversation=conversation,
            )
            update_doc(
                tx,
                LiveDocument,
                conversation,
                turn=turn,
                generation=int(following),
                partial=None,
                calls=[],
                retry=None,
            )
            tx.complete(GenerationResult(assistant=at.assistant, next=int(following)))

    # --- abort ---------------------------------------------------------------------------

    async def abort(self, at: Checkpoint, ctx: GenerationContext) -> None:
        """Keep the partial answer, close calls that never started, settle the inputs."""
        conversation = ctx.conversation_id
        missing: list[tuple[int, str]] = []
        if isinstance(at, Tools):
            missing = await _open_calls(ctx, at.assistant)
        async with ctx.commit() as tx:
            if isinstance(at, Request):
                self._append_partial(tx, ctx, at.model, "the run was aborted")
            if isinstance(at, Tools):
                for index, name in missing:
                    text = "The call was aborted before it started."
                    _append_result(tx, conversation, (at.assistant, index), name, text, "aborted")
            end_run(
                ctx.session,
                tx,
                conversation,
                _run_of(ctx),
                reason="aborted",
                detail=ctx.abort_reason,
            )
            tx.end_aborted()


def _run_of(ctx: GenerationContext) -> int:
    return ctx.input.run if ctx.input.run is not None else int(ctx.task_id)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _plain_blocks(blocks: list[dict[str, str]]) -> tuple[Block, ...]:
    return tuple(
        TextBlock(text=block["text"])
        if block["type"] == "text"
        else ThinkingBlock(text=block["text"])
        for block in blocks
    )


def append_partial(
    tx: TreeTransaction, conversation_id: int, partial: Any, *, model: str, why: str
) -> None:
    """Keep a partial answer as an aborted entry, and charge its estimated usage."""
    blocks = _plain_blocks(partial["blocks"])
    characters = sum(len(block["text"]) for block in partial["blocks"])
    usage = Usage(requests=1, output_tokens=estimate_tokens(characters))
    add_usage(tx, conversation_id, usage, model=model)
    tx.append(
        conversation_id,
        kind="pi.assistant",
        messages=[
            AssistantMessage(
                blocks=blocks,
                status="aborted",
                stop_reason="aborted",
                model=model,
                usage=usage,
                at_us=tx.now_us(),
                error=why,
            )
        ],
    )


def _append_result(
    tx: TreeTransaction,
    conversation_id: int,
    call: tuple[int, int],
    name: str,
    text: str,
    code: str,
) -> int:
    return tx.append(
        conversation_id,
        kind="pi.tool_result",
        messages=[
            ToolResultMessage(
                call=call,
                name=name,
                blocks=(TextBlock(text=text),),
                is_error=True,
                at_us=tx.now_us(),
                code=code,
            )
        ],
    )


async def _open_calls(ctx: GenerationContext, assistant: int) -> list[tuple[int, str]]:
    """Calls of an answer that have no result yet, in call order."""
    entries = await ctx.session.context_entries(ctx.conversation_id)
    answered: set[int] = set()
    names: list[str] = []
    for entry in entries:
        for message in entry.messages:
            if entry.id == assistant and isinstance(message, AssistantMessage):
                names = [call.name for call in message.tool_calls]
            elif isinstance(message, ToolResultMessage) and message.call[0] == assistant:
                answered.add(message.call[1])
    return [(index, name) for index, name in enumerate(names) if index not in answered]


def settle_generation(
    tx: TreeTransaction,
    session: Any,
    conversation_id: int,
    task_id: int,
    reason: str,
    detail: str | None,
) -> None:
    """The scheduler ended a generation itself: the conversation is usable afterwards, always."""
    live = read_doc(tx, LiveDocument, conversation_id)
    if live["generation"] != task_id or live["run"] is None:
        return
    if live["partial"] is not None:
        agent = tx.doc_value(address_of(AgentDocument, conversation_id)) or {}
        append_partial(
            tx,
            conversation_id,
            live["partial"],
            model=agent.get("model") or "unknown",
            why=f"the generation {reason}",
        )
    end_run(session, tx, conversation_id, live["run"], reason=reason, detail=detail)
