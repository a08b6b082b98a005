"""What follows from a request that gave no answer: another try, room made for it, or the end.

A failed attempt is kept and charged in the commit that decides. Only what may help is tried again,
a few times, at a durable moment; an overflow is met by a compaction, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from pidurable.agent._ask import cancel_deferred, moment_after, next_try
from pidurable.agent._attempts import append_attempt, estimated_usage
from pidurable.agent._boundaries import end_run
from pidurable.agent._checkpoints import GenerationContext, Poll, Request, Retry, run_of
from pidurable.agent._compaction_room import cannot_fit, no_summary_before, wait_for_room
from pidurable.agent._documents import LiveDocument, update_doc
from pidurable.agent._prompt import request_characters
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX
from pidurable.records._messages import Usage
from pidurable.tasks._errors import bounded

if TYPE_CHECKING:
    from pidurable.agent._models import ModelRequest
    from pidurable.agent._progress import PartialAnswer
    from pidurable.agent._services import AgentServices
    from pidurable.errors import ModelError


async def request_failed(
    services: AgentServices,
    ctx: GenerationContext,
    at: Request,
    error: ModelError,
    request: ModelRequest,
    partial: PartialAnswer,
    deferred: Poll | None = None,
    *,
    used: Usage | None = None,
) -> None:
    """A request failed: try again later if that may help, else end the run.

    Args:
        services: The seams.
        ctx: The generation.
        at: The request as it was fixed.
        error: Why it has failed.
        request: What was sent.
        partial: What came.
        deferred: The poll, where it was one. Where nobody asks again, its provider is told.
        used: What it took, by an answer that cannot be stored; else that is estimated.
    """
    session = services.session
    conversation = ctx.conversation_id
    delay, detail = next_try(
        error, tries=at.tries, settings=ctx.settings, seed=ctx.key(f"retry{at.tries}")
    )
    makes_room = error.kind == "overflow" and not at.overflowed
    if makes_room and (useless := no_summary_before(ctx, at, session)):
        makes_room, detail = False, f"{detail}; {useless}"
    if error.kind == "overflow" and not makes_room:
        context = await session.context(conversation, at.cutoff)
        detail = bounded(cannot_fit(detail, context), ERROR_MESSAGE_BYTES_MAX)
    usage = used
    if usage is None:
        usage = estimated_usage(
            services.models,
            at.model,
            sent_characters=request_characters(request),
            received_characters=partial.characters,
        )
    if deferred is not None and delay is not None:
        # Asking again costs nothing: the answer, once it is there, brings what it took.
        usage = Usage()
    if deferred is not None and delay is None:
        await cancel_deferred(services.models, request, deferred.handle, ctx.report)
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
        if makes_room:
            update_doc(tx, LiveDocument, conversation, partial=None)
            wait_for_room(tx, ctx, at, overflow=detail)
            return
        if delay is None:
            reason = "context_overflow" if error.kind == "overflow" else "model_error"
            end_run(session, tx, conversation, run_of(ctx), reason=reason, detail=detail)
            tx.fail(detail, detail={"reason": reason, "kind": error.kind})
            return
        until = moment_after(session.clock.now_us(), delay)
        retry = {
            "try_number": at.tries + 1,
            "until_us": int(until.timestamp() * 1e6),
            "error": detail,
        }
        update_doc(tx, LiveDocument, conversation, partial=None, retry=retry)
        tries = at.tries + 1
        if deferred is None:
            again = Retry(tries=tries, compacted=at.compacted, overflowed=at.overflowed)
            tx.wait(then=again, deadline=until)
        else:
            # What the provider works on is not to be begun again: only the asking failed.
            request_again = attrs.evolve(at, tries=tries)
            tx.wait(then=attrs.evolve(deferred, request=request_again), deadline=until)


async def end_unanswered(
    services: AgentServices, ctx: GenerationContext, reason: str, detail: str
) -> None:
    """End the run without an answer, for a reason that no retry would change."""
    detail = bounded(detail, ERROR_MESSAGE_BYTES_MAX)
    async with ctx.commit() as tx:
        end_run(
            services.session,
            tx,
            ctx.conversation_id,
            run_of(ctx),
            reason=reason,
            detail=detail,
        )
        tx.fail(detail, detail={"reason": reason})
