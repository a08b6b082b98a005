"""What follows from an answer: all that one commit decides when it stores it.

An answer without calls ends the run, or goes on with what a hook has to say; one with calls begins
a round; one that comes later is to be asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from pidurable.agent._ask import poll_at
from pidurable.agent._attempts import append_deferred
from pidurable.agent._boundaries import end_run, say
from pidurable.agent._checkpoints import (
    GenerationContext,
    GenerationResult,
    Poll,
    Request,
    Tx,
    run_of,
)
from pidurable.agent._documents import LiveDocument, add_usage, update_doc
from pidurable.agent._round import begin_round, next_turn
from pidurable.agent._tool_result import shown_blocks
from pidurable.records._messages import AssistantMessage, Block, ToolCallBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pidurable.agent._models import Deferred
    from pidurable.agent._progress import PartialAnswer
    from pidurable.agent._services import AgentServices


def store_deferred(
    services: AgentServices,
    tx: Tx,
    ctx: GenerationContext,
    at: Request,
    deferred: Deferred,
    partial: PartialAnswer,
    *,
    before: Poll | None,
) -> None:
    """The provider answers later: an entry says so, once, and the next poll is due."""
    if before is None:
        append_deferred(tx, ctx.conversation_id, partial.blocks(), model=at.model)
    update_doc(tx, LiveDocument, ctx.conversation_id, partial=None, retry=None)
    now_us = services.session.clock.now_us()
    since_us = now_us if before is None or before.since_us is None else before.since_us
    until = poll_at(now_us, since_us, deferred, ctx.settings)
    # It has answered, if only that there is no answer yet: what failed before counts no more.
    at = attrs.evolve(at, tries=0)
    tx.wait(then=Poll(request=at, handle=deferred.handle, since_us=since_us), deadline=until)


def store_answer(
    services: AgentServices,
    tx: Tx,
    ctx: GenerationContext,
    answer: AssistantMessage,
    offered: set[str],
    goes_on: Sequence[Block] | None,
) -> None:
    """The answer's entry, its usage, and what follows from it."""
    conversation = ctx.conversation_id
    calls = answer.tool_calls
    # By the clock of the session, as all that is said in it; `Models` has none but its own.
    answer = _at(answer, tx.now_us())
    entry = tx.append(conversation, kind="pi.assistant", messages=[answer])
    add_usage(tx, conversation, answer.usage, model=answer.model)
    if calls:
        sequential = _is_sequential(services, ctx, calls)
        begin_round(tx, ctx, calls, entry, offered, sequential=sequential)
    elif goes_on is not None:
        say(tx, conversation, shown_blocks(tx, goes_on))
        next_turn(tx, ctx, entry)
    else:
        end_run(services.session, tx, conversation, run_of(ctx), answer=entry)
        tx.complete(GenerationResult(assistant=entry))


def _at(answer: AssistantMessage, at_us: int) -> AssistantMessage:
    """The answer with another moment: as `attrs.evolve` does, in a third of its time."""
    return AssistantMessage(
        blocks=answer.blocks,
        status=answer.status,
        stop_reason=answer.stop_reason,
        model=answer.model,
        usage=answer.usage,
        at_us=at_us,
        error=answer.error,
    )


def _is_sequential(
    services: AgentServices, ctx: GenerationContext, calls: Sequence[ToolCallBlock]
) -> bool:
    """Whether the calls of an answer run one after the other: the host or a tool asks so."""
    if ctx.settings.sequential_tools:
        return True
    sequential = services.resolve(ctx.conversation_id).sequential
    return bool(sequential) and any(call.name in sequential for call in calls)
