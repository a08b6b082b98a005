"""`pi.compaction`: makes room in a context by a summary of its older part.

::

    select --> summarize --> completed
      |          |  ^  `---> waiting --> completed   its summary waits for a boundary
      v          v  |
    skipped     retry

What is to be replaced, and by which model, is fixed when it is selected; a large range is read in
parts, and each part's summary is stored before the next is asked for. A generation that cannot go
on owns its compaction and waits for it; one in the background, or one that somebody asked for,
belongs to the conversation and hands its summary in as a write. Nothing is deleted: the summary is
an entry whose head is the first entry that stays. Until it is placed the context is as it was, and
whatever a model answers that is no summary leaves it so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

import attrs

from pidurable.agent._ask import (
    NO_MODELS,
    cancel_deferred,
    deferred_too_long,
    find_model,
    moment_after,
    next_try,
    poll_at,
    stream_answer,
)
from pidurable.agent._asking import ask_before_compact
from pidurable.agent._attempts import estimated_usage
from pidurable.agent._compaction_range import (
    Range,
    baseline_before,
    budget_of,
    choose_range,
    context_tokens,
    fixed_tokens,
    message_tokens,
    text_tokens,
)
from pidurable.agent._compaction_records import (
    Checkpoint,
    CompactionContext,
    CompactionResult,
    Retry,
    Select,
    Summarize,
    Tx,
    Waiting,
    Work,
)
from pidurable.agent._compaction_start import (
    CompactionInput,
    EndStatus,
    SummaryProgress,
    received_of,
    show_ended,
    show_status,
)
from pidurable.agent._compaction_text import (
    OVERHEAD_TOKENS,
    Part,
    next_part,
    summary_message,
    summary_problem,
    summary_request,
    text_problem,
)
from pidurable.agent._documents import CompactionDocument, add_usage, update_doc
from pidurable.agent._hooks import BeforeCompact, CompactionHooks, Decline, Summary
from pidurable.agent._inbox import withdraw, write
from pidurable.agent._models import (
    Deferred,
    EmptyAnswerError,
    ModelRequest,
    Models,
    clean_text,
)
from pidurable.agent._prompt import request_characters, told_by
from pidurable.agent._services import AgentServices
from pidurable.errors import MissingExtraError, ModelError, NotFoundError, NotJsonError
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX
from pidurable.records._messages import AssistantMessage, Message, SystemMessage, Usage
from pidurable.session._context import ModelContext
from pidurable.tasks._definition import Task, phase
from pidurable.tasks._errors import bounded

ValueT = TypeVar("ValueT")

SUMMARY_TRIES_MAX = 3
"""How many answers to one request may be no summary before the compaction fails."""

PART_TOKENS_MIN = 32
"""Smaller parts than this are not tried when a summary request overflows."""

REPLACED_TOKENS_MIN = 64
"""Less than this is not worth a summary, which would hardly be shorter."""

_LOOP_MESSAGES_MAX = 2_000
"""More messages than this are looked through in a thread."""


@final
class Compaction(Task[CompactionInput, Checkpoint, CompactionResult]):
    """One summary. Owned by the generation that waits for it, or by its conversation."""

    name = "pi.compaction"
    version = 1
    on_fault = "fault"  # whatever the host's setting: its conversation must stay usable
    hooks = CompactionHooks
    __pidurable_looks__ = False

    def __init__(self, services: AgentServices) -> None:
        self._services = services

    def initial(self, input: CompactionInput) -> Checkpoint:
        return Select()

    # --- select ----------------------------------------------------------------------------

    @phase
    async def select(self, at: Select, ctx: CompactionContext) -> None:
        """Choose what to replace, and let hooks decline, or give the summary themselves."""
        services = self._services
        agent = services.resolve(ctx.conversation_id)
        context = await services.session.context(ctx.conversation_id)
        window = _window(services.models, agent.model)
        chosen = await self._choose(ctx, context, window)
        if chosen is None or chosen.replaced_tokens < REPLACED_TOKENS_MIN:
            reason = "there is nothing worth a summary that is older than what is kept"
            await self._skip(ctx, reason, context_tokens(context), window)
            return
        work = Work(
            model=agent.model or "",
            cutoff=context.cutoff,
            cut=chosen.cut,
            stop=chosen.stop,
            replaced_tokens=chosen.replaced_tokens,
            kept_tokens=chosen.kept_tokens,
            size=_part_size(window, ctx, chosen),
        )
        decision = await self._ask(ctx, work, context)
        if isinstance(decision, Decline):
            reason = bounded(f"a hook declined: {decision.reason}", ERROR_MESSAGE_BYTES_MAX)
            await self._skip(ctx, reason, context_tokens(context), window)
            return
        if isinstance(decision, Summary):
            text = clean_text(decision.text)
            problem = text_problem(text, replaced_tokens=work.replaced_tokens)
            if problem is None:
                await self._place(ctx, work, context, text, None)
            else:
                reason = f"what a hook gave is no summary: {problem}"
                await self._fail(ctx, reason, "no_summary", context_tokens(context), window)
            return
        found = find_model(services.models, agent.model)
        if isinstance(found, str):
            await self._fail(ctx, found, "no_model", context_tokens(context), window)
            return
        async with ctx.commit() as tx:
            show_status(tx, ctx.conversation_id, ctx.task_id, "summarizing")
            tx.goto(Summarize(work))

    async def _ask(
        self, ctx: CompactionContext, work: Work, context: ModelContext
    ) -> Decline | Summary | None:
        if not ctx.handlers("before_compact"):
            return None
        messages = (item.message for item in context[: work.stop])
        return await ask_before_compact(
            ctx,
            BeforeCompact(
                conversation_id=ctx.conversation_id,
                task=ctx.task_id,
                why=ctx.input.why,
                instructions=ctx.input.instructions,
                messages=tuple(each for each in messages if not isinstance(each, SystemMessage)),
                first_kept=work.cut,
                tokens=context_tokens(context),
            ),
        )

    async def _choose(
        self, ctx: CompactionContext, context: ModelContext, window: int | None
    ) -> Range | None:
        fixed = fixed_tokens(told_by(context))
        budget = budget_of(window, ctx.settings, fixed)
        keep = unanswered = budget.keep
        if budget.blocking_above is not None:
            # The rest is for the summary, and for what the estimates are wrong by.
            unanswered = max(keep, (budget.blocking_above - fixed) * 3 // 4)
        counted = context_tokens(context)
        overflow = ctx.input.why == "overflow"

        def choose() -> Range | None:
            estimate = sum(
                message_tokens(item.message)
                for item in context
                if not isinstance(item.message, SystemMessage)
            )
            # Where the provider counts more than the estimate, less of it is kept.
            share = (estimate + fixed, max(counted, estimate + fixed, 1))
            most = [tokens * share[0] // share[1] for tokens in (keep, unanswered)]
            if overflow:
                # It is not known what fits.
                most = [min(tokens, estimate // 2) for tokens in most]
            return choose_range(context, *most)

        return await self._aside(context, choose)

    async def _aside(
        self, context: ModelContext, look: Callable[..., ValueT], *args: Any
    ) -> ValueT:
        """Look at all of a context; at a large one in a thread, so that the loop can go on."""
        if len(context) > _LOOP_MESSAGES_MAX:
            return await self._services.session.blocking.run(look, *args)
        return look(*args)

    # --- summarize -------------------------------------------------------------------------

    @phase
    async def summarize(self, at: Summarize, ctx: CompactionContext) -> None:
        """Ask for the summary of one part, and store it, or what became of the request."""
        session = self._services.session
        work = at.work
        models = self._services.models
        context = await session.context(ctx.conversation_id, work.cutoff)
        if models is None:
            await self._fail(ctx, NO_MODELS, "no_model", context_tokens(context), None)
            return
        window = _window(models, work.model)
        part = next_part(context, work.stop, work.at, _left(work))
        request = self._request(ctx, work, part, window)
        await self._charge_interrupted(ctx, work, request)
        received = SummaryProgress(self._services.progress, ctx.conversation_id, ctx.task_id)
        opening = models.stream(request)
        if work.is_deferred:
            opening = models.poll(request, work.handle)
        try:
            answer = await stream_answer(session, opening, request.model, received)
        except EmptyAnswerError:
            # No failure of the request: a summary that says nothing, like one of headings alone.
            usage = self._estimated(work, request, received)
            problem = text_problem("", replaced_tokens=work.replaced_tokens)
            await self._reject(ctx, _answered(work), (work.model, usage), problem or "", context)
            return
        except ModelError as error:
            await self._failed(ctx, work, part, request, received, error)
            return
        except (MissingExtraError, NotFoundError) as missing:
            await self._fail(ctx, str(missing), "no_model", context_tokens(context), window)
            return
        finally:
            received.close()
        if isinstance(answer, Deferred):
            now_us = session.clock.now_us()
            since_us = now_us if work.deferred_us is None else work.deferred_us
            # It has answered, if only that there is no answer yet: what failed before is forgotten.
            later = attrs.evolve(
                work, is_deferred=True, handle=answer.handle, deferred_us=since_us, tries=0
            )
            late = deferred_too_long(now_us, since_us, ctx.settings) if work.is_deferred else None
            if late is not None:
                await self._failed(ctx, later, part, request, received, late)
                return
            until = poll_at(now_us, since_us, answer, ctx.settings)
            async with ctx.commit() as tx:
                show_status(tx, ctx.conversation_id, ctx.task_id, "summarizing")
                tx.wait(then=Retry(later), deadline=until)
            return
        work = _answered(work)
        if part.next is None:
            problem = summary_problem(answer, replaced_tokens=work.replaced_tokens)
        else:
            read = text_tokens(part.text) + text_tokens(work.so_far or "")
            problem = summary_problem(answer, replaced_tokens=read, most=work.size // 2)
        if problem is not None:
            await self._reject(ctx, work, (answer.model, answer.usage), problem, context)
            return
        session.failpoints.hit("CP6")
        if part.next is not None:
            further = attrs.evolve(
                work, at=part.next, so_far=answer.text, rejected=0, problem=None, tries=0
            )
            async with ctx.commit() as tx:
                add_usage(tx, ctx.conversation_id, answer.usage, model=answer.model)
                show_status(tx, ctx.conversation_id, ctx.task_id, "summarizing")
                tx.goto(Summarize(further))
            return
        await self._place(ctx, work, context, answer.text, answer)

    async def _charge_interrupted(
        self, ctx: CompactionContext, work: Work, request: ModelRequest
    ) -> None:
        """A crash has cut this request: charge it, as far as it is known, before the next."""
        usage = self._interrupted(ctx, work, request)
        if usage is None:
            return
        async with ctx.commit() as tx:
            add_usage(tx, ctx.conversation_id, usage, model=work.model)
            show_status(tx, ctx.conversation_id, ctx.task_id, "summarizing")

    def _interrupted(
        self, ctx: CompactionContext, work: Work, request: ModelRequest
    ) -> Usage | None:
        received = received_of(self._services.session, ctx.conversation_id, ctx.task_id)
        if received == 0:
            return None
        return estimated_usage(
            self._services.models,
            work.model,
            sent_characters=request_characters(request),
            received_characters=received,
        )

    def _request(
        self, ctx: CompactionContext, work: Work, part: Part, window: int | None
    ) -> ModelRequest:
        models = self._services.models
        most = None
        if models is not None and window is not None:
            known = models.resolve(work.model).output_tokens_max
            most = max(1, budget_of(window, ctx.settings).reserve)
            most = most if known is None else min(most, known)
        # The same request whenever it is made, so without a moment of its own.
        return summary_request(
            model=work.model,
            part=part,
            so_far=work.so_far,
            instructions=ctx.input.instructions,
            problem=work.problem,
            output_tokens_max=most,
        )

    async def _failed(
        self,
        ctx: CompactionContext,
        work: Work,
        part: Part,
        request: ModelRequest,
        received: SummaryProgress,
        error: ModelError,
    ) -> None:
        """A request failed: try again later, or with less, if that may help."""
        usage = self._estimated(work, request, received)
        delay, detail = next_try(
            error, tries=work.tries, settings=ctx.settings, seed=ctx.key(f"retry{work.tries}")
        )
        if work.is_deferred and delay is not None:
            # Asking again costs nothing: the answer, once it is there, brings what it took.
            usage = Usage()
        smaller = min(_left(work), text_tokens(part.text)) // 2
        if error.kind == "overflow" and smaller >= PART_TOKENS_MIN:
            size = smaller + text_tokens(work.so_far or "")
            async with ctx.commit() as tx:
                add_usage(tx, ctx.conversation_id, usage, model=work.model)
                show_status(tx, ctx.conversation_id, ctx.task_id, "summarizing")
                tx.goto(Summarize(attrs.evolve(work, size=size)))
            return
        if delay is None:
            if work.is_deferred:
                await cancel_deferred(self._services.models, request, work.handle, ctx.report)
            context = await self._services.session.context(ctx.conversation_id)
            window = _window(self._services.models, work.model)
            await self._fail(
                ctx,
                f"the summary could not be had: {detail}",
                "context_overflow" if error.kind == "overflow" else "model_error",
                context_tokens(context),
                window,
                charge=(work.model, usage),
            )
            return
        until = moment_after(self._services.session.clock.now_us(), delay)
        async with ctx.commit() as tx:
            add_usage(tx, ctx.conversation_id, usage, model=work.model)
            show_status(tx, ctx.conversation_id, ctx.task_id, "retrying")
            tx.wait(then=Retry(attrs.evolve(work, tries=work.tries + 1)), deadline=until)

    def _estimated(self, work: Work, request: ModelRequest, received: SummaryProgress) -> Usage:
        return estimated_usage(
            self._services.models,
            work.model,
            sent_characters=request_characters(request),
            received_characters=received.characters,
        )

    async def _reject(
        self,
        ctx: CompactionContext,
        work: Work,
        charge: tuple[str, Usage],
        problem: str,
        context: ModelContext,
    ) -> None:
        """An answer is no summary: say why and ask again, or fail."""
        rejected = work.rejected + 1
        if rejected >= SUMMARY_TRIES_MAX:
            window = _window(self._services.models, work.model)
            await self._fail(
                ctx,
                f"{work.model} gave no summary in {rejected} answers: {problem}",
                "no_summary",
                context_tokens(context),
                window,
                charge=charge,
            )
            return
        async with ctx.commit() as tx:
            add_usage(tx, ctx.conversation_id, charge[1], model=charge[0])
            show_status(tx, ctx.conversation_id, ctx.task_id, "summarizing")
            tx.goto(Summarize(attrs.evolve(work, rejected=rejected, problem=problem)))

    @phase
    async def retry_due(self, at: Retry, ctx: CompactionContext) -> None:
        """The wait is over: ask again."""
        async with ctx.commit() as tx:
            show_status(tx, ctx.conversation_id, ctx.task_id, "summarizing")
            tx.goto(Summarize(at.work))

    # --- placing ---------------------------------------------------------------------------

    async def _place(
        self,
        ctx: CompactionContext,
        work: Work,
        context: ModelContext,
        text: str,
        answer: AssistantMessage | None,
    ) -> None:
        """Store the summary: at once where a generation waits for it, else as a write."""
        session = self._services.session
        conversation = ctx.conversation_id
        window = _window(self._services.models, work.model)
        now_us = session.clock.now_us()
        said = summary_message(text, now_us)
        baseline = await self._aside(context, baseline_before, context, work.cut, now_us)
        messages: list[Message] = [said] if baseline is None else [baseline, said]
        waiting = Waiting(
            cut=work.cut,
            tokens_before=context_tokens(context),
            tokens_after=(fixed_tokens(told_by(context)) + message_tokens(said) + work.kept_tokens),
            window=window,
        )
        data = {
            "why": ctx.input.why,
            "tokens_before": waiting.tokens_before,
            "tokens_after": waiting.tokens_after,
        }

        def place(tx: Tx) -> None:
            if answer is not None:
                add_usage(tx, conversation, answer.usage, model=answer.model)
            if not ctx.input.blocking:
                submission = write(
                    session,
                    tx,
                    conversation,
                    data,
                    kind="pi.compaction",
                    messages=messages,
                    head=work.cut,
                    crowds=False,
                )
                self._settle(tx, ctx, attrs.evolve(waiting, submission=submission))
                return
            start = tx.context_start(conversation)
            if start is not None and work.cut < start:
                self._stale(tx, ctx, waiting, f"the context starts later already, at entry {start}")
                return
            entry = tx.append(
                conversation, data, kind="pi.compaction", messages=messages, head=work.cut
            )
            self._applied(tx, ctx, waiting, entry)

        try:
            async with ctx.commit() as tx:
                place(tx)
        except NotJsonError as too_much:
            # With the prompt that it repeats it is larger than a value may be.
            reason = f"the summary cannot be stored: {too_much}"
            charge = None if answer is None else (answer.model, answer.usage)
            tokens = context_tokens(context)
            await self._fail(ctx, reason, "no_summary", tokens, window, charge=charge)

    def _settle(self, tx: Tx, ctx: CompactionContext, waiting: Waiting) -> None:
        """Go by what became of the write that holds the summary; wait while it is queued."""
        record = None if waiting.submission is None else tx.submission(waiting.submission)
        if record is not None and record.status == "queued":
            show_status(tx, ctx.conversation_id, ctx.task_id, "waiting")
            tx.wait(then=waiting, on=[record.id])
        elif record is not None and record.status == "done":
            self._applied(tx, ctx, waiting, record.entry)
        else:
            detail = "it was taken back" if record is None else record.detail or record.reason
            self._stale(tx, ctx, waiting, detail or "it was taken back")

    @phase
    async def waiting(self, at: Waiting, ctx: CompactionContext) -> None:
        """The write was placed, or will not be."""
        async with ctx.commit() as tx:
            self._settle(tx, ctx, at)

    def _applied(self, tx: Tx, ctx: CompactionContext, waiting: Waiting, entry: int | None) -> None:
        _end(tx, ctx, "applied", None, waiting.tokens_after, waiting.window)
        tx.complete(
            CompactionResult(
                status="applied",
                entry=entry,
                cut=waiting.cut,
                tokens_before=waiting.tokens_before,
                tokens_after=waiting.tokens_after,
            )
        )

    def _stale(self, tx: Tx, ctx: CompactionContext, waiting: Waiting, reason: str) -> None:
        # What has overtaken it says how large the context is.
        show_ended(tx, ctx.conversation_id, ctx.task_id)
        tx.complete(
            CompactionResult(
                status="stale",
                reason=reason,
                cut=waiting.cut,
                tokens_before=waiting.tokens_before,
            )
        )

    async def _skip(
        self, ctx: CompactionContext, reason: str, tokens: int, window: int | None
    ) -> None:
        async with ctx.commit() as tx:
            _end(tx, ctx, "skipped", reason, tokens, window)
            tx.complete(
                CompactionResult(
                    status="skipped", reason=reason, tokens_before=tokens, tokens_after=tokens
                )
            )

    async def _fail(
        self,
        ctx: CompactionContext,
        detail: str,
        reason: str,
        tokens: int,
        window: int | None,
        *,
        charge: tuple[str, Usage] | None = None,
    ) -> None:
        """End without a summary; the context is as it was."""
        detail = bounded(detail, ERROR_MESSAGE_BYTES_MAX)
        async with ctx.commit() as tx:
            if charge is not None:
                add_usage(tx, ctx.conversation_id, charge[1], model=charge[0])
            _end(tx, ctx, "failed", detail, tokens, window)
            tx.fail(detail, detail={"reason": reason})

    async def abort(self, at: Checkpoint, ctx: CompactionContext) -> None:
        """Take a summary back that still waits, and charge a request that was cut."""
        usage: Usage | None = None
        work = at.work if isinstance(at, Summarize | Retry) else None
        if work is not None:
            context = await self._services.session.context(ctx.conversation_id, work.cutoff)
            part = next_part(context, work.stop, work.at, _left(work))
            window = _window(self._services.models, work.model)
            request = self._request(ctx, work, part, window)
            usage = self._interrupted(ctx, work, request)
            if work.is_deferred:
                await cancel_deferred(self._services.models, request, work.handle, ctx.report)
        async with ctx.commit() as tx:
            if work is not None and usage is not None:
                add_usage(tx, ctx.conversation_id, usage, model=work.model)
            if isinstance(at, Waiting) and at.submission is not None:
                withdraw(tx, at.submission)
            show_ended(tx, ctx.conversation_id, ctx.task_id)
            tx.end_aborted()


def _end(
    tx: Tx,
    ctx: CompactionContext,
    status: EndStatus,
    reason: str | None,
    tokens: int,
    window: int | None,
) -> None:
    """Show no more of it, and keep how it ended for who asks, and for the next to begin by."""
    show_ended(tx, ctx.conversation_id, ctx.task_id)
    update_doc(
        tx,
        CompactionDocument,
        ctx.conversation_id,
        task=int(ctx.task_id),
        why=ctx.input.why,
        status=status,
        reason=reason,
        tokens=tokens,
        window=window,
        newest=tx.newest_entry(ctx.conversation_id) or 0,
    )


def _window(models: Models | None, name: str | None) -> int | None:
    """The context window of a model, or None where it is not known."""
    if models is None or not name:
        return None
    try:
        return models.resolve(name).context_window
    except NotFoundError:
        return None


def _part_size(window: int | None, ctx: CompactionContext, chosen: Range) -> int:
    """How many tokens of the conversation one summary request may hold."""
    if window is None:
        # All of it; where that overflows, less is tried.
        return 2 * chosen.replaced_tokens + PART_TOKENS_MIN
    fixed = OVERHEAD_TOKENS + text_tokens(ctx.input.instructions or "")
    room = window - budget_of(window, ctx.settings).reserve - fixed
    # The estimates may be wrong by some.
    return max(PART_TOKENS_MIN, room * 9 // 10)


def _answered(work: Work) -> Work:
    """The work when its request was answered, also where that was deferred before."""
    return attrs.evolve(work, is_deferred=False, handle=None, deferred_us=None)


def _left(work: Work) -> int:
    """What a part may hold besides the summary so far."""
    return max(PART_TOKENS_MIN, work.size - text_tokens(work.so_far or ""))
