"""Rounds: the calls of one answer, from their creation to the turn that follows them.

A round begins in the commit that stores its answer and ends when every call is terminal. Nothing
that the model sees is ever placed in between. In a sequential round the calls are created one after
the other; which of them are still to come is part of the checkpoint, so a crash between two loses
none, and starts none twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from pidurable.agent._attempts import append_result, no_such_tool
from pidurable.agent._boundaries import (
    GenerationInput,
    end_run,
    generation_class,
    move_to_fresh_context,
    place_after_round,
)
from pidurable.agent._call_records import ToolInput, ToolReceipt
from pidurable.agent._checkpoints import GenerationContext, GenerationResult, Tools, Tx, run_of
from pidurable.agent._documents import (
    AgentDocument,
    LiveDocument,
    call_slot,
    patch_live,
    read_doc,
    update_doc,
)
from pidurable.agent._selection import with_tools
from pidurable.agent._tool_call import ToolTask
from pidurable.errors import NoResultError, ResultUnreadableError, UnknownTaskError
from pidurable.records._ids import TaskId
from pidurable.records._limits import HANDOFFS_MAX
from pidurable.records._messages import AssistantMessage, ToolCallBlock, UserMessage

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pidurable.agent._preparing import Prepared
    from pidurable.agent._services import AgentServices
    from pidurable.records._tasks import Outcome
    from pidurable.session._context import ModelContext


def begin_round(
    tx: Tx,
    ctx: GenerationContext,
    calls: Sequence[ToolCallBlock],
    entry: int,
    offered: Collection[str],
    *,
    sequential: bool,
) -> None:
    """Create a task for each call that the request had offered, and wait for them.

    The others get their error result at once.

    Args:
        tx: The commit that stores the answer.
        ctx: The generation.
        calls: Those of the answer, in order.
        entry: The entry of the answer.
        offered: The names of the tools that the request declared.
        sequential: Create only the first one now, and each other one when the last has ended.
    """
    conversation = ctx.conversation_id
    slots: list[Any] = []
    ids: list[int] = []
    queued: list[int] = []
    for index, call in enumerate(calls):
        if call.name not in offered:
            ended = ("tool_unavailable", no_such_tool(call.name, offered))
            append_result(tx, conversation, (entry, index), call.name, ended)
            continue
        task: int | None = None
        if sequential and ids:
            queued.append(index)
        else:
            task = _create_call(tx, entry, index, call)
            ids.append(task)
        slots.append(call_slot(index=index, task_id=task, name=call.name))
    if not ids:
        # The round is over before it began.
        update_doc(tx, LiveDocument, conversation, partial=None, retry=None)
        tx.goto(Tools(assistant=entry))
        return
    update_doc(tx, LiveDocument, conversation, partial=None, calls=slots, retry=None)
    tx.wait(then=Tools(assistant=entry, queued=tuple(queued)), on=ids)


def _create_call(tx: Tx, entry: int, index: int, call: ToolCallBlock) -> int:
    return tx.create_task(
        ToolTask,
        ToolInput(assistant=entry, index=index, name=call.name, arguments=call.arguments),
    )


def start_next_call(tx: Tx, ctx: GenerationContext, at: Tools) -> None:
    """In a sequential round: the last call has ended, so create the next one and wait for it."""
    index, *rest = at.queued
    (answer,) = ctx.snapshot.entry(at.assistant).messages
    assert isinstance(answer, AssistantMessage)
    task = _create_call(tx, at.assistant, index, answer.tool_calls[index])
    slots = read_doc(tx, LiveDocument, ctx.conversation_id)["calls"]
    place = next(place for place, slot in enumerate(slots) if slot["index"] == index)
    news = {"task": int(task), "status": "running"}
    ops = [
        {"op": "replace", "path": f"/calls/{place}/{name}", "value": value}
        for name, value in news.items()
    ]
    patch_live(tx, ctx.conversation_id, ops)
    tx.wait(then=Tools(assistant=at.assistant, queued=tuple(rest)), on=[task])


# --- the end of a round ------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class RoundOutcome:
    """What the results of a round ask for together."""

    terminate: bool = False
    """Whether every call of the round asks for the end of the run."""
    handoff: str | None = None
    """The last note in call order, with which the run is to go on in a fresh context."""
    add_tools: tuple[str, ...] = ()
    """In call order."""


async def outcome_of_round(
    ctx: GenerationContext, assistant: int, slots: Sequence[dict[str, Any]]
) -> RoundOutcome:
    """Read what the results of a round ask for, when every call is terminal.

    Args:
        ctx: The generation.
        assistant: The entry of the answer.
        slots: What `pi.live` shows of the calls.
    """
    ids: list[TaskId[Any]] = [TaskId(slot["task"]) for slot in slots if slot["task"] is not None]
    receipts = [_receipt(ctx, outcome) for outcome in await ctx.outcomes(ids)]
    found = [receipt for receipt in receipts if receipt is not None]
    terminate = bool(found) and all(receipt.terminate for receipt in found)
    if terminate:
        # A call that has no receipt has not asked: one to an unknown tool, or one that faulted.
        (answer,) = ctx.snapshot.entry(assistant).messages
        assert isinstance(answer, AssistantMessage)
        terminate = len(found) == len(answer.tool_calls)
    notes = [receipt.handoff for receipt in found if receipt.handoff is not None]
    names = (name for receipt in found for name in receipt.add_tools)
    return RoundOutcome(
        terminate=terminate,
        handoff=notes[-1] if notes else None,
        add_tools=tuple(dict.fromkeys(names)),
    )


async def unanswered_in(
    ctx: GenerationContext, context: ModelContext
) -> list[tuple[int, UserMessage]]:
    """What users have said since the last run that was answered, with the entries, in order.

    A run ends with an answer that makes no calls, or with calls whose results all ask for its end.
    """
    found: list[tuple[int, UserMessage]] = []
    for item in reversed(context):
        message = item.message
        if isinstance(message, UserMessage) and item.entry != context.head:
            # What began the context is a note or a summary.
            found.append((item.entry, message))
        elif isinstance(message, AssistantMessage) and (
            not message.tool_calls or await _was_answered(ctx, item.entry)
        ):
            break
    return found[::-1]


async def _was_answered(ctx: GenerationContext, entry: int) -> bool:
    """Whether the run of an answer with calls had ended well with it."""
    task = ctx.snapshot.entry(entry).by_task
    if task is None or task == ctx.task_id:
        return False
    try:
        (outcome,) = await ctx.outcomes([TaskId[GenerationResult](task)])
        return outcome.status == "completed" and outcome.result.next is None
    except (UnknownTaskError, NoResultError, ResultUnreadableError):
        # It was removed, or is not for this version to read: long ago in either case.
        return True


def _receipt(ctx: GenerationContext, outcome: Outcome[Any]) -> ToolReceipt | None:
    try:
        receipt = outcome.result if outcome.status == "completed" else outcome.partial
    except ResultUnreadableError as unreadable:
        ctx.report(f"a call of the round counts for nothing but its result: {unreadable}")
        return None
    return receipt if isinstance(receipt, ToolReceipt) else None


def end_round(
    services: AgentServices,
    tx: Tx,
    ctx: GenerationContext,
    assistant: int,
    outcome: RoundOutcome,
    unanswered: Sequence[tuple[int, UserMessage]] = (),
    following: Prepared | None = None,
) -> None:
    """Every call is terminal and has its result: do what the results of the round ask for.

    A handoff counts for more than an end that is asked for beside it: work that somebody wants to
    go on with is not dropped. What the context had asked until then goes along with one.

    Args:
        services: Of the harness.
        tx: The commit.
        ctx: The generation.
        assistant: The entry of the answer.
        outcome: What the results ask for.
        unanswered: What the context had asked, for a handoff.
        following: The request of the next turn, where it could be prepared already.
    """
    conversation = ctx.conversation_id
    offer_tools(tx, conversation, outcome.add_tools)
    if outcome.handoff is not None:
        _hand_off(services, tx, ctx, assistant, outcome.handoff, unanswered)
    elif outcome.terminate:
        end_run(services.session, tx, conversation, run_of(ctx), answer=assistant)
        tx.complete(GenerationResult(assistant=assistant))
    else:
        next_turn(tx, ctx, assistant, prepared=following)


def _hand_off(
    services: AgentServices,
    tx: Tx,
    ctx: GenerationContext,
    assistant: int,
    note: str,
    unanswered: Sequence[tuple[int, UserMessage]],
) -> None:
    """Go on with the inputs of the run in a fresh context, unless that happens over and over."""
    run = run_of(ctx)
    handoffs = ctx.input.handoffs + 1
    if handoffs > HANDOFFS_MAX:
        detail = f"the run was handed off {HANDOFFS_MAX} times in a row, the most allowed"
        conversation = ctx.conversation_id
        end_run(services.session, tx, conversation, run, reason="handoff_limit", detail=detail)
        tx.fail(detail, detail={"reason": "handoff_limit"})
        return
    move_to_fresh_context(tx, ctx.conversation_id, run, note, unanswered)
    # After it, so that what joins the run here is not left behind.
    next_turn(tx, ctx, assistant, handoffs=handoffs)


def offer_tools(tx: Tx, conversation_id: int, names: Sequence[str]) -> None:
    """Let a conversation have more tools from its next request on.

    A choice of tools by name gets the names, one by difference leaves them out no longer. Without a
    choice all tools of the selected extensions are offered already, so there is nothing to add: a
    tool does not bring its extension along.
    """
    if not names:
        return
    chosen = read_doc(tx, AgentDocument, conversation_id)["tools"]
    if chosen is not None:
        update_doc(tx, AgentDocument, conversation_id, tools=with_tools(chosen, names))


def next_turn(
    tx: Tx,
    ctx: GenerationContext,
    assistant: int,
    *,
    handoffs: int = 0,
    prepared: Prepared | None = None,
) -> None:
    """Place what joins the run, and let a sibling of this generation take it over.

    Args:
        tx: The commit.
        ctx: The generation.
        assistant: The entry of its answer.
        handoffs: Rounds in a row, up to this one, that handed off.
        prepared: The request that the sibling begins with, unless something came since that a
            request can tell. None lets it begin by preparing one.
    """
    conversation = ctx.conversation_id
    run = run_of(ctx)
    if not place_after_round(ctx.settings, tx, conversation, run):
        tx.fail("a reset was placed during the run", detail={"reason": "reset"})
        return
    turn = ctx.input.turn + 1
    taken_over = GenerationInput(run=run, turn=turn, continues=int(ctx.task_id), handoffs=handoffs)
    tx.check_phase()
    begins = None
    if prepared is not None and prepared.stands(tx, conversation):
        begins = prepared.fix(tx, conversation)
    following = tx._create(
        generation_class(), taken_over, owner=None, conversation=conversation, begins=begins
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
    tx.complete(GenerationResult(assistant=assistant, next=int(following)))
