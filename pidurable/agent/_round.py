"""Rounds: the calls of one answer, from their creation to the turn that follows them.

A round begins in the commit that stores its answer and ends when every call is terminal. Nothing
that the model sees is ever placed in between. In a sequential round the calls are created one after
the other; which of them are still to come is part of the checkpoint, so a crash between two loses
none, and starts none twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pidurable.agent._attempts import append_result, close_round, no_such_tool
from pidurable.agent._boundaries import GenerationInput, place_after_round
from pidurable.agent._call_records import ToolInput
from pidurable.agent._checkpoints import GenerationContext, GenerationResult, Tools, Tx, run_of
from pidurable.agent._documents import LiveDocument, call_slot, read_doc, update_doc
from pidurable.records._messages import AssistantMessage, ToolCallBlock

if TYPE_CHECKING:
    from collections.abc import Collection


def begin_round(
    tx: Tx,
    ctx: GenerationContext,
    answer: AssistantMessage,
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
        answer: Has calls.
        entry: The entry of the answer.
        offered: The names of the tools that the request declared.
        sequential: Create only the first one now, and each other one when the last has ended.
    """
    conversation = ctx.conversation_id
    slots: list[Any] = []
    ids: list[int] = []
    queued: list[int] = []
    for index, call in enumerate(answer.tool_calls):
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
    from pidurable.agent._tool_call import ToolTask

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
    calls = [
        {**slot, "task": int(task), "status": "running"} if slot["index"] == index else slot
        for slot in read_doc(tx, LiveDocument, ctx.conversation_id)["calls"]
    ]
    update_doc(tx, LiveDocument, ctx.conversation_id, calls=calls)
    tx.wait(then=Tools(assistant=at.assistant, queued=tuple(rest)), on=[task])


def end_round(tx: Tx, ctx: GenerationContext, assistant: int) -> None:
    """Every call is terminal: place what waits, let the next generation take the run over."""
    close_round(tx, ctx.conversation_id, assistant)
    next_turn(tx, ctx, assistant)


def next_turn(tx: Tx, ctx: GenerationContext, assistant: int) -> None:
    """Place what joins the run, and let a sibling of this generation take it over."""
    from pidurable.agent._generation import Generation

    conversation = ctx.conversation_id
    run = run_of(ctx)
    if not place_after_round(ctx.settings, tx, conversation, run):
        tx.fail("a reset was placed during the run", detail={"reason": "reset"})
        return
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
    tx.complete(GenerationResult(assistant=assistant, next=int(following)))
