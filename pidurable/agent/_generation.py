"""`pi.generation`: one model answer, then its tool calls.

::

    prepare --> request --> (answer) completed    the run ends, or the next begins
      ^           | |  ^
      +-- retry --+ |  +--> poll                  the provider answers later
                    v
                  tools --> completed             the next generation takes the run over

One that takes a run over begins at its request, where the commit that ended the round could fix it.
What a crash costs: in prepare nothing; in request the request is sent again exactly as fixed, the
committed partial text is kept as an aborted entry and its estimated usage is charged; in retry,
poll and tools nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import final

import attrs

from pidurable.agent._answered import store_answer, store_deferred
from pidurable.agent._ask import (
    NO_MODELS,
    cancel_deferred,
    deferred_too_long,
    stream_answer,
)
from pidurable.agent._asking import Observed, commit_observed
from pidurable.agent._attempts import (
    close_round,
    keep_leftover,
    keep_partial,
    missing_results,
    open_calls,
)
from pidurable.agent._boundaries import GenerationInput, end_run
from pidurable.agent._checkpoints import (
    Checkpoint,
    GenerationContext,
    GenerationResult,
    Poll,
    Prepare,
    Request,
    Retry,
    Room,
    Tools,
    Tx,
    run_of,
)
from pidurable.agent._compaction_room import (
    begin_compaction,
    cannot_fit,
    no_room,
    wait_for_room,
)
from pidurable.agent._documents import (
    LiveDocument,
    add_usage,
    address_of,
    update_doc,
)
from pidurable.agent._failures import end_unanswered, request_failed
from pidurable.agent._hooks import GenerationHooks, Stop
from pidurable.agent._models import Deferred, ModelRequest
from pidurable.agent._preparing import Prepared, Unanswerable, prepare_next, prepare_request
from pidurable.agent._progress import PartialAnswer
from pidurable.agent._prompt import build_request, request_characters, with_images
from pidurable.agent._refused_images import Asked, answer_without_refused
from pidurable.agent._round import (
    RoundOutcome,
    end_round,
    outcome_of_round,
    start_next_call,
    unanswered_in,
)
from pidurable.agent._services import AgentServices
from pidurable.agent._turn_hooks import (
    continuation,
    observers_of_answer,
    observers_of_round,
    request_by_hooks,
)
from pidurable.errors import (
    DocumentTooLargeError,
    MissingExtraError,
    ModelError,
    NotFoundError,
    NotJsonError,
)
from pidurable.records._entries import Entry
from pidurable.records._messages import AssistantMessage, Block, Usage, UserMessage
from pidurable.session._context import ModelContext
from pidurable.tasks._definition import Task, phase

_NOTHING_ASKED = RoundOutcome()


@final
class Generation(Task[GenerationInput, Checkpoint, GenerationResult]):
    """One model answer of a run. Owned by its conversation; its tool calls are owned by it."""

    name = "pi.generation"
    version = 1
    on_fault = "fault"  # whatever the host's setting: its conversation must stay usable
    hooks = GenerationHooks
    __pidurable_looks__ = False

    def __init__(self, services: AgentServices) -> None:
        self._services = services

    def initial(self, input: GenerationInput) -> Checkpoint:
        return Prepare()

    # --- prepare -------------------------------------------------------------------------

    @phase
    async def prepare(self, at: Prepare, ctx: GenerationContext) -> None:
        """Fix the agent and the prompt, and store what the model has not been told yet."""
        while not await self._prepare(at, ctx):
            # What the model is to be told was told by a context that is no more.
            pass

    async def _prepare(self, at: Prepare, ctx: GenerationContext) -> bool:
        """Prepare a request by the context as it is; False where that has changed meanwhile."""
        conversation = ctx.conversation_id
        found = await prepare_request(self._services, ctx, ctx.input.turn)
        if isinstance(found, Unanswerable):
            await end_unanswered(self._services, ctx, found.reason, found.detail)
            return True
        if found.compaction == "threshold" and not at.compacted:
            async with ctx.commit() as tx:
                wait_for_room(tx, ctx, at)
            return True

        def fix(tx: Tx) -> bool:
            tx.check_phase()
            if not found.stands(tx, conversation):
                return False
            if found.compaction == "background":
                begin_compaction(tx, conversation, "background")
            tx.goto(
                found.fix(
                    tx,
                    conversation,
                    tries=at.tries,
                    compacted=at.compacted,
                    overflowed=at.overflowed,
                )
            )
            return True

        return await ctx._run(fix)

    # --- request -------------------------------------------------------------------------

    @phase
    async def request(self, at: Request, ctx: GenerationContext) -> None:
        """Send the request as it was fixed, store the answer and what follows from it."""
        services = self._services
        models = services.models
        # As it was fixed: what came after the cutoff, a head too, is for the next request.
        context = await services.session.context(ctx.conversation_id, at.cutoff)
        fixed = _fixed_request(at, context)
        await keep_leftover(services, ctx, at.model, fixed)
        if models is None:
            await end_unanswered(self._services, ctx, "no_model", NO_MODELS)
            return
        request = await request_by_hooks(ctx, fixed, again=lambda: _fixed_request(at, context))
        if isinstance(request, Stop):
            await end_unanswered(self._services, ctx, "stopped", request.reason)
            return
        request = await with_images(services.session, request)

        async def ask(partial: PartialAnswer) -> Asked:
            return await answer_without_refused(services.session, models, context, request, partial)

        await self._ask(at, ctx, request, ask)

    @phase
    async def poll(self, at: Poll, ctx: GenerationContext) -> None:
        """Ask for the answer that the provider had deferred."""
        services = self._services
        models = services.models
        request = await self._request_of(at.request, ctx)
        await keep_leftover(services, ctx, at.request.model, request)
        if models is None:
            await end_unanswered(self._services, ctx, "no_model", NO_MODELS)
            return

        async def ask(partial: PartialAnswer) -> Asked:
            opening = models.poll(request, at.handle)
            return await stream_answer(services.session, opening, request.model, partial), None

        await self._ask(at.request, ctx, request, ask, deferred=at)

    async def _request_of(self, at: Request, ctx: GenerationContext) -> ModelRequest:
        context = await self._services.session.context(ctx.conversation_id, at.cutoff)
        return _fixed_request(at, context)

    async def _ask(
        self,
        at: Request,
        ctx: GenerationContext,
        request: ModelRequest,
        ask: Callable[[PartialAnswer], Awaitable[Asked]],
        *,
        deferred: Poll | None = None,
    ) -> None:
        """Ask once, and store in one commit what came of it and what follows.

        Args:
            at: The request as it was fixed.
            ctx: The generation.
            request: What is sent.
            ask: Asks, and shows the answer as it comes.
            deferred: Where the provider had deferred its answer: it is asked for again if it could
                not be told this time.
        """
        services = self._services
        partial = PartialAnswer(services.progress, ctx.conversation_id, ctx.task_id)
        try:
            answer, refusal = await ask(partial)
        except ModelError as error:
            await request_failed(services, ctx, at, error, request, partial, deferred)
            return
        except (MissingExtraError, NotFoundError) as missing:
            await end_unanswered(self._services, ctx, "no_model", str(missing))
            return
        finally:
            partial.close()
        if isinstance(answer, Deferred) and deferred is not None and deferred.since_us is not None:
            now_us = services.session.clock.now_us()
            late = deferred_too_long(now_us, deferred.since_us, ctx.settings)
            if late is not None:
                last = attrs.evolve(deferred, handle=answer.handle)
                await request_failed(services, ctx, at, late, request, partial, last)
                return
        observed: list[Observed] = []
        goes_on: Sequence[Block] | None = None
        if isinstance(answer, AssistantMessage):
            observed = await observers_of_answer(ctx, answer)
            if not answer.tool_calls:
                goes_on = await continuation(ctx, answer)
        offered = {tool.name for tool in request.tools}

        def decide(tx: Tx) -> None:
            if refusal is not None:
                refusal.keep(tx, ctx.conversation_id, at.model)
            if isinstance(answer, Deferred):
                store_deferred(services, tx, ctx, at, answer, partial, before=deferred)
            else:
                store_answer(services, tx, ctx, answer, offered, goes_on)

        try:
            await commit_observed(ctx, observed, decide)
        except (NotJsonError, DocumentTooLargeError) as too_much:
            # Larger than any value may be, or more calls than can be shown: the model's fault,
            # never the store's.
            refused = ModelError("other", f"the answer cannot be stored: {too_much}")
            used = answer.usage if isinstance(answer, AssistantMessage) else None
            if used is not None and not used.input_tokens + used.output_tokens:
                # Counted by nobody.
                used = None
            await request_failed(services, ctx, at, refused, request, partial, used=used)
            return
        services.session.failpoints.hit("CP1")

    # --- before the next try -------------------------------------------------------------

    @phase
    async def retry_due(self, at: Retry, ctx: GenerationContext) -> None:
        """Begin again after a failed request."""
        async with ctx.commit() as tx:
            update_doc(tx, LiveDocument, ctx.conversation_id, retry=None)
            tx.goto(Prepare(tries=at.tries, compacted=at.compacted, overflowed=at.overflowed))

    @phase
    async def room(self, at: Room, ctx: GenerationContext) -> None:
        """The compaction has ended: go on, unless the request cannot fit."""
        problem = await no_room(ctx, at)
        if problem is None:
            await ctx.goto(Prepare(tries=at.tries, compacted=True, overflowed=at.overflowed))
            return
        context = await self._services.session.context(ctx.conversation_id)
        await end_unanswered(self._services, ctx, "context_overflow", cannot_fit(problem, context))

    # --- tools ---------------------------------------------------------------------------

    @phase
    async def tools(self, at: Tools, ctx: GenerationContext) -> None:
        """Every call that was created is terminal: create the next one, or end the round."""
        if at.queued:
            async with ctx.commit() as tx:
                start_next_call(tx, ctx, at)
            return
        session = self._services.session
        live = session.doc_value(address_of(LiveDocument, ctx.conversation_id))
        slots = [] if live is None else live["calls"]
        missing = missing_results(slots, at.assistant, session.clock.now_us())
        observed = await observers_of_round(ctx, at.assistant, missing)
        outcome = await outcome_of_round(ctx, at.assistant, slots)
        self._report_unknown_tools(ctx, outcome)
        unanswered: list[tuple[int, UserMessage]] = []
        if outcome.handoff is not None:
            unanswered = await unanswered_in(ctx, await session.context(ctx.conversation_id))
        following: Prepared | None = None
        if outcome == _NOTHING_ASKED and not missing and not observed:
            following = await prepare_next(self._services, ctx)

        def decide(tx: Tx) -> None:
            if missing:
                close_round(tx, ctx.conversation_id, at.assistant)
            end_round(self._services, tx, ctx, at.assistant, outcome, unanswered, following)

        await commit_observed(ctx, observed, decide)

    def _report_unknown_tools(self, ctx: GenerationContext, outcome: RoundOutcome) -> None:
        """A tool that is added and not installed is offered as soon as it is."""
        if not outcome.add_tools:
            return
        snapshot = self._services.registry()
        selected = self._services.selected(ctx.conversation_id)
        known = {tool.name for tool in snapshot.tools(selected)}
        for name in outcome.add_tools:
            if name not in known:
                ctx.report(f"the tool {name!r} is to be added, but no selected extension has it")

    # --- abort ---------------------------------------------------------------------------

    async def abort(self, at: Checkpoint, ctx: GenerationContext) -> None:
        """Keep the partial answer, close calls that never started, settle the inputs."""
        conversation = ctx.conversation_id
        session = self._services.session
        entries: list[Entry] = []
        sent = 0
        asked = at.request if isinstance(at, Poll) else at
        if isinstance(asked, Request):
            request = await self._request_of(asked, ctx)
            sent = request_characters(request)
            if isinstance(at, Poll):
                await cancel_deferred(self._services.models, request, at.handle, ctx.report)
        elif isinstance(at, Tools):
            entries = await session.context_entries(conversation)
        async with ctx.commit() as tx:
            if isinstance(asked, Request):
                keep_partial(
                    tx,
                    self._services,
                    conversation,
                    ctx.task_id,
                    model=asked.model,
                    why="the run was aborted",
                    sent_characters=sent,
                )
            if isinstance(at, Poll):
                # It may have been worked on all the time; how much it took is not known.
                add_usage(tx, conversation, Usage(requests=1), model=at.request.model)
            if isinstance(at, Tools):
                open = open_calls(entries, at.assistant)
                close_round(tx, conversation, at.assistant, never_started=open)
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
