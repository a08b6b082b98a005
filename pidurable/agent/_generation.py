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
from typing import final

import attrs

from pidurable.agent._ask import NO_MODELS, next_try, no_model
from pidurable.agent._attempts import (
    append_attempt,
    append_result,
    close_round,
    estimated_usage,
    keep_partial,
    open_calls,
)
from pidurable.agent._checkpoints import (
    Checkpoint,
    GenerationContext,
    GenerationResult,
    Prepare,
    Request,
    Retry,
    Tools,
    Tx,
    run_of,
)
from pidurable.agent._documents import (
    LiveDocument,
    add_usage,
    address_of,
    update_doc,
)
from pidurable.agent._hooks import GenerationHooks
from pidurable.agent._inbox import GenerationInput, end_run
from pidurable.agent._models import ModelRequest
from pidurable.agent._progress import PartialAnswer
from pidurable.agent._prompt import (
    build_request,
    declare,
    difference,
    render_sections,
    request_characters,
    told_by,
    with_images,
)
from pidurable.agent._refused_images import answer_without_refused
from pidurable.agent._round import begin_round, end_round
from pidurable.agent._services import AgentServices
from pidurable.errors import (
    DocumentTooLargeError,
    MissingExtraError,
    ModelError,
    NotFoundError,
    NotJsonError,
)
from pidurable.records._entries import Entry
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX
from pidurable.records._messages import AssistantMessage
from pidurable.session._context import ModelContext
from pidurable.tasks._definition import Task, phase
from pidurable.tasks._errors import bounded


@final
class Generation(Task[GenerationInput, Checkpoint, GenerationResult]):
    """One model answer of a run. Owned by its conversation; its tool calls are owned by it."""

    name = "pi.generation"
    version = 1
    hooks = GenerationHooks

    def __init__(self, services: AgentServices) -> None:
        self._services = services

    def initial(self, input: GenerationInput) -> Checkpoint:
        return Prepare()

    # --- prepare -------------------------------------------------------------------------

    @phase
    async def prepare(self, at: Prepare, ctx: GenerationContext) -> None:
        """Fix the agent and the prompt, and store what the model has not been told yet."""
        services = self._services
        session = self._services.session
        conversation = ctx.conversation_id
        agent = services.resolve(conversation)
        if ctx.input.turn > agent.turns_max:
            detail = f"the run has taken {agent.turns_max} turns, the most allowed"
            await self._end_unanswered(ctx, "turn_limit", detail)
            return
        problem = no_model(services.models, agent.model)
        if problem is not None:
            await self._end_unanswered(ctx, "no_model", problem)
            return
        assert agent.model is not None
        context = await session.context(conversation)
        if not context.asks_something:
            # An entry with a head has taken the input out of the context.
            await self._end_unanswered(ctx, "reset", "the context was reset during the run")
            return
        told = told_by(context)
        env = services.env_for(conversation, agent)
        now_us = session.clock.now_us()
        sections = await render_sections(agent, env, now_us, told, ctx.report)
        message = difference(told, sections, declare(agent), now_us)
        async with ctx.commit() as tx:
            cutoff = context.cutoff
            if message is not None:
                cutoff = tx.append(conversation, kind="pi.system", messages=[message])
            tx.goto(
                Request(model=agent.model, thinking=agent.thinking, cutoff=cutoff, tries=at.tries)
            )

    # --- request -------------------------------------------------------------------------

    @phase
    async def request(self, at: Request, ctx: GenerationContext) -> None:
        """Send the request as it was fixed, store the answer and what follows from it."""
        services = self._services
        models = services.models
        # As it was fixed: what came after the cutoff, a head too, is for the next request.
        context = await self._services.session.context(ctx.conversation_id, at.cutoff)
        request = _fixed_request(at, context)
        await self._keep_leftover(at, ctx, request)
        if models is None:
            await self._end_unanswered(ctx, "no_model", NO_MODELS)
            return
        request = await with_images(self._services.session, request)
        partial = PartialAnswer(services.progress, ctx.conversation_id, ctx.task_id)
        try:
            answer, refusal = await answer_without_refused(
                services.session, models, context, request, partial
            )
        except ModelError as error:
            await self._failed(at, ctx, error, request, partial)
            return
        except (MissingExtraError, NotFoundError) as missing:
            await self._end_unanswered(ctx, "no_model", str(missing))
            return
        finally:
            partial.close()
        offered = {tool.name for tool in request.tools}
        try:
            async with ctx.commit() as tx:
                if refusal is not None:
                    refusal.keep(tx, ctx.conversation_id, at.model)
                self._store_answer(tx, ctx, answer, offered)
        except (NotJsonError, DocumentTooLargeError) as too_much:
            # Larger than any value may be, or more calls than can be shown: the model's fault,
            # never the store's.
            refused = ModelError("other", f"the answer cannot be stored: {too_much}")
            await self._failed(at, ctx, refused, request, partial)
            return
        self._services.session.failpoints.hit("CP1")

    def _store_answer(
        self, tx: Tx, ctx: GenerationContext, answer: AssistantMessage, offered: set[str]
    ) -> None:
        """One commit: the answer's entry, its usage, and what follows from it."""
        conversation = ctx.conversation_id
        # By the clock of the session, as all that is said in it; `Models` has none but its own.
        answer = attrs.evolve(answer, at_us=tx.now_us())
        entry = tx.append(conversation, kind="pi.assistant", messages=[answer])
        add_usage(tx, conversation, answer.usage, model=answer.model)
        if not answer.tool_calls:
            end_run(self._services.session, tx, conversation, run_of(ctx), answer=entry)
            tx.complete(GenerationResult(assistant=entry))
            return
        begin_round(tx, ctx, answer, entry, offered)

    async def _keep_leftover(
        self, at: Request, ctx: GenerationContext, request: ModelRequest
    ) -> None:
        """A crash interrupted the request: keep what was shown and charge it, before the next."""
        live = self._services.session.doc_value(address_of(LiveDocument, ctx.conversation_id))
        if live is None or live["generation"] != ctx.task_id or live["partial"] is None:
            return
        async with ctx.commit() as tx:
            keep_partial(
                tx,
                self._services,
                ctx.conversation_id,
                ctx.task_id,
                model=at.model,
                why="the process died while this was streamed",
                sent_characters=request_characters(request),
            )

    # --- failures ------------------------------------------------------------------------

    async def _failed(
        self,
        at: Request,
        ctx: GenerationContext,
        error: ModelError,
        request: ModelRequest,
        partial: PartialAnswer,
    ) -> None:
        """A request failed: try again later if that may help, else end the run."""
        session = self._services.session
        conversation = ctx.conversation_id
        delay, detail = next_try(
            error, tries=at.tries, settings=ctx.settings, seed=ctx.key(f"retry{at.tries}")
        )
        usage = estimated_usage(
            self._services.models,
            at.model,
            sent_characters=request_characters(request),
            received_characters=partial.characters,
        )
        async with ctx.commit() as tx:
            append_attempt(
                tx,
                conversation,
                partial.blocks(),
                status="failed",
                model=at.model,
                usage=usage,
                why=detail,
            )
            if delay is None:
                reason = "context_overflow" if error.kind == "overflow" else "model_error"
                end_run(session, tx, conversation, run_of(ctx), reason=reason, detail=detail)
                tx.fail(detail, detail={"reason": reason, "kind": error.kind})
                return
            until = datetime.fromtimestamp(session.clock.now_us() / 1e6, UTC) + timedelta(
                seconds=delay
            )
            retry = {
                "try_number": at.tries + 1,
                "until_us": int(until.timestamp() * 1e6),
                "error": detail,
            }
            update_doc(tx, LiveDocument, conversation, partial=None, retry=retry)
            tx.wait(then=Retry(tries=at.tries + 1), deadline=until)

    async def _end_unanswered(self, ctx: GenerationContext, reason: str, detail: str) -> None:
        """End the run without an answer, for a reason that no retry would change."""
        detail = bounded(detail, ERROR_MESSAGE_BYTES_MAX)
        async with ctx.commit() as tx:
            end_run(
                self._services.session,
                tx,
                ctx.conversation_id,
                run_of(ctx),
                reason=reason,
                detail=detail,
            )
            tx.fail(detail, detail={"reason": reason})

    @phase
    async def retry_due(self, at: Retry, ctx: GenerationContext) -> None:
        """Begin again after a failed request."""
        async with ctx.commit() as tx:
            update_doc(tx, LiveDocument, ctx.conversation_id, retry=None)
            tx.goto(Prepare(tries=at.tries))

    # --- tools ---------------------------------------------------------------------------

    @phase
    async def tools(self, at: Tools, ctx: GenerationContext) -> None:
        """Every call is terminal: place what waits, let the next generation take the run over."""
        async with ctx.commit() as tx:
            end_round(tx, ctx, at.assistant)

    # --- abort ---------------------------------------------------------------------------

    async def abort(self, at: Checkpoint, ctx: GenerationContext) -> None:
        """Keep the partial answer, close calls that never started, settle the inputs."""
        conversation = ctx.conversation_id
        session = self._services.session
        entries: list[Entry] = []
        sent = 0
        if isinstance(at, Request):
            context = await session.context(conversation, at.cutoff)
            sent = request_characters(_fixed_request(at, context))
        elif isinstance(at, Tools):
            entries = await session.context_entries(conversation)
        async with ctx.commit() as tx:
            if isinstance(at, Request):
                keep_partial(
                    tx,
                    self._services,
                    conversation,
                    ctx.task_id,
                    model=at.model,
                    why="the run was aborted",
                    sent_characters=sent,
                )
            if isinstance(at, Tools):
                closed = close_round(tx, conversation, at.assistant)
                for index, name in open_calls(entries, at.assistant):
                    if index in closed:
                        continue
                    append_result(
                        tx,
                        conversation,
                        (at.assistant, index),
                        name,
                        code="aborted",
                        text="The call was aborted before it started.",
                    )
            end_run(
                self._services.session,
                tx,
                conversation,
                run_of(ctx),
                reason="aborted",
                detail=ctx.abort_reason,
            )
            tx.end_aborted()


def _fixed_request(at: Request, context: ModelContext) -> ModelRequest:
    return build_request(context, model=at.model, thinking=at.thinking)
