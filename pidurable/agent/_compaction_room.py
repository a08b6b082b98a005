"""Where a generation sets compactions off: before a request, and after one that did not fit.

A generation waits for a compaction at most twice in a turn: once because a threshold is passed,
once because the provider has refused the request as too large; not a second time where the model
gave no summary the first time. What does not fit after that ends the run, naming the largest items,
for no further summary would help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pidurable.agent._checkpoints import GenerationContext, Prepare, Request, Room, Tx
from pidurable.agent._compaction import Compaction
from pidurable.agent._compaction_range import largest_items
from pidurable.agent._compaction_records import CompactionResult
from pidurable.agent._compaction_start import CompactionInput, last_compaction, show_begun
from pidurable.errors import InvalidArgumentError, show
from pidurable.records._ids import TaskId
from pidurable.tasks._errors import bounded
from pidurable.tasks._task_record import task_record

if TYPE_CHECKING:
    from pidurable.agent._hooks import CompactReason
    from pidurable.session._context import ModelContext
    from pidurable.session._session import Session
    from pidurable.tasks._transaction import TreeTransaction

_DETAIL_BYTES_MAX = 1_500
"""Of what a provider said, so that the items are named in any case."""


def check_instructions(instructions: object) -> str | None:
    """Return what a summary should hold besides, if it says anything.

    Raises:
        InvalidArgumentError: It is no text, or blank.
    """
    if instructions is None:
        return None
    if not isinstance(instructions, str) or not instructions.strip():
        problem = "expected a text that is not blank, or None"
        raise InvalidArgumentError("instructions", problem, show(instructions))
    return instructions


def begin_compaction(
    tx: TreeTransaction,
    conversation_id: int,
    why: CompactReason,
    instructions: str | None = None,
) -> TaskId[CompactionResult]:
    """Create a compaction that the conversation owns, and show it.

    One that began by itself is in the background: neither an abort nor a wait for idle reaches it.
    """
    input = CompactionInput(why=why, instructions=instructions)
    background = why == "background"
    task = tx.create_task(Compaction, input, conversation=conversation_id, background=background)
    show_begun(tx, conversation_id, task, why)
    return task


def wait_for_room(
    tx: Tx, ctx: GenerationContext, at: Prepare | Request, overflow: str | None = None
) -> None:
    """Let the generation wait for a compaction of its own.

    Args:
        tx: The commit that decides it.
        ctx: The generation.
        at: Where it is.
        overflow: What the provider said of a request that did not fit; None before a request.
    """
    why: CompactReason = "threshold" if overflow is None else "overflow"
    task = tx.create_task(Compaction, CompactionInput(why=why))
    show_begun(tx, ctx.conversation_id, task, why)
    room = Room(
        compaction=int(task),
        tries=at.tries,
        overflowed=at.overflowed or overflow is not None,
        overflow=overflow,
    )
    tx.wait(then=room, on=[task])


async def no_room(ctx: GenerationContext, at: Room) -> str | None:
    """Why the run cannot go on after its compaction; None if it can.

    A request that was never refused is sent whatever became of the compaction: it may fit.
    """
    if at.overflow is None:
        return None
    (outcome,) = await ctx.outcomes([TaskId[CompactionResult](at.compaction)])
    if outcome.status != "completed":
        error = "" if outcome.error is None else f": {outcome.error.message}"
        return f"{at.overflow}; making room ended {outcome.status}{error}"
    result = outcome.result
    if result.status == "skipped":
        return f"{at.overflow}; {result.reason}"
    return None


def no_summary_before(ctx: GenerationContext, at: Request, session: Session) -> str | None:
    """Why a refused request is not to wait for a compaction once more; None if it may help.

    Where the model gave no summary before this request, it would only be asked for it again.
    """
    last = last_compaction(session, ctx.conversation_id)
    if not at.compacted or last["status"] != "failed":
        return None
    row = session.storage.task(last["task"])
    outcome = None if row is None else task_record(session.storage, row).outcome
    error = None if outcome is None else outcome.error
    if error is None or error.detail != {"reason": "no_summary"}:
        return None
    return f"making room failed: {error.message}"


def cannot_fit(detail: str, context: ModelContext) -> str:
    """What to say of a conversation that does not fit, for somebody who has to make room."""
    return f"{bounded(detail, _DETAIL_BYTES_MAX)}. The largest items: {largest_items(context)}"
