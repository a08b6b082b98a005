"""Attempts: what is kept of requests that gave no answer, and of calls that gave no result.

A partial answer becomes an entry that says so (`aborted` or `failed`), which no later request
sends; what it cost is estimated and charged. A call that has none gets an error result. The
scheduler's own ends of a run are settled here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pidurable.agent._boundaries import end_run
from pidurable.agent._documents import (
    AgentDocument,
    LiveDocument,
    add_usage,
    address_of,
    read_doc,
    update_doc,
)
from pidurable.agent._prompt import estimate_tokens, request_characters
from pidurable.errors import NotFoundError
from pidurable.records import _json
from pidurable.records._entries import kept_messages
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    TextBlock,
    ThinkingBlock,
    ToolResultMessage,
    Usage,
)
from pidurable.tasks._errors import bounded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pidurable.agent._checkpoints import GenerationContext
    from pidurable.agent._models import ModelRequest, Models
    from pidurable.agent._services import AgentServices
    from pidurable.records._entries import Entry
    from pidurable.session._session import Session
    from pidurable.tasks._transaction import TreeTransaction

_OFFERED_SHOWN_MAX = 50

Ended = tuple[str, str]
"""The code and the text of an error result of our own words."""

_ENDED_WITHOUT_RESULT: dict[str, Ended] = {
    "aborted": ("aborted", "The call was aborted before it started."),
    "faulted": (
        "interrupted",
        "The call ended by a fault. Whether its effect happened is unknown: look before you "
        "repeat it.",
    ),
    "orphaned": (
        "interrupted",
        "The call cannot be taken up any more. Whether its effect happened is unknown: look "
        "before you repeat it.",
    ),
}
"""By the status that the settlement has given a call: the code and text of its result."""


def estimated_usage(
    models: Models | None, name: str, *, sent_characters: int, received_characters: int
) -> Usage:
    """What a request without a complete answer has probably used, and what that costs.

    One that was refused before its first token is not charged for what was sent.
    """
    usage = Usage(
        requests=1,
        input_tokens=estimate_tokens(sent_characters) if received_characters else 0,
        output_tokens=estimate_tokens(received_characters),
    )
    if models is None:
        return usage
    try:
        cost = models.resolve(name).cost(usage)
    except NotFoundError:
        # It was known when it was asked; the host has dropped it since.
        return usage
    return usage + Usage(cost=cost)


def append_attempt(
    tx: TreeTransaction,
    conversation_id: int,
    blocks: Sequence[dict[str, str]],
    *,
    status: Literal["aborted", "failed"],
    model: str,
    usage: Usage,
    why: str,
) -> int:
    """Keep what a request gave before it ended without an answer, and charge it."""
    add_usage(tx, conversation_id, usage, model=model)
    return tx.append(
        conversation_id,
        kind="pi.assistant",
        messages=[
            AssistantMessage(
                blocks=_plain_blocks(blocks),
                status=status,
                stop_reason="aborted" if status == "aborted" else "error",
                model=model,
                usage=usage,
                at_us=tx.now_us(),
                error=bounded(why, ERROR_MESSAGE_BYTES_MAX),
            )
        ],
    )


def append_deferred(
    tx: TreeTransaction, conversation_id: int, blocks: Sequence[dict[str, str]], *, model: str
) -> int:
    """Say that a provider has deferred its answer; no request shows it. It is charged later."""
    return tx.append(
        conversation_id,
        kind="pi.assistant",
        messages=[
            AssistantMessage(
                blocks=_plain_blocks(blocks),
                status="deferred",
                stop_reason="stop",
                model=model,
                usage=Usage(),
                at_us=tx.now_us(),
            )
        ],
    )


def keep_partial(
    tx: TreeTransaction,
    services: AgentServices,
    conversation_id: int,
    task_id: int,
    *,
    model: str,
    why: str,
    sent_characters: int = 0,
) -> None:
    """Turn the committed partial answer of a generation, if there is one, into an entry."""
    live = read_doc(tx, LiveDocument, conversation_id)
    if live["generation"] != task_id or live["partial"] is None:
        return
    blocks = live["partial"]["blocks"]
    usage = estimated_usage(
        services.models,
        model,
        sent_characters=sent_characters,
        received_characters=sum(len(block["text"]) for block in blocks),
    )
    append_attempt(tx, conversation_id, blocks, status="aborted", model=model, usage=usage, why=why)
    update_doc(tx, LiveDocument, conversation_id, partial=None)


async def keep_leftover(
    services: AgentServices, ctx: GenerationContext, model: str, request: ModelRequest
) -> None:
    """A crash interrupted a request: keep what was shown and charge it, before the next."""
    live = services.session.doc_value(address_of(LiveDocument, ctx.conversation_id))
    if live is None or live["generation"] != ctx.task_id or live["partial"] is None:
        return
    async with ctx.commit() as tx:
        keep_partial(
            tx,
            services,
            ctx.conversation_id,
            ctx.task_id,
            model=model,
            why="the process died while this was streamed",
            sent_characters=request_characters(request),
        )


def _plain_blocks(blocks: Sequence[dict[str, str]]) -> tuple[Block, ...]:
    return tuple(
        TextBlock(text=block["text"])
        if block["type"] == "text"
        else ThinkingBlock(text=block["text"])
        for block in blocks
    )


def append_result(
    tx: TreeTransaction, conversation_id: int, call: tuple[int, int], name: str, ended: Ended
) -> int:
    """Append the error result of a call that never ran."""
    message = _error_result(call, name, ended, tx.now_us())
    return tx.append(conversation_id, kind="pi.tool_result", messages=[message])


def _error_result(call: tuple[int, int], name: str, ended: Ended, at_us: int) -> ToolResultMessage:
    code, text = ended
    return ToolResultMessage(
        call=call,
        name=name,
        blocks=(TextBlock(text=text),),
        is_error=True,
        at_us=at_us,
        code=code,
    )


def missing_results(
    slots: Iterable[dict[str, Any]],
    assistant: int,
    at_us: int,
    never_started: Iterable[tuple[int, str]] = (),
) -> list[ToolResultMessage]:
    """The error results of the calls of a round that have none, in call order.

    Args:
        slots: What `pi.live` shows of the calls.
        assistant: The entry of the answer.
        at_us: Now.
        never_started: Index and name of the calls without a result, where the round is aborted.
            Without them only those get one whose task ended without a result.
    """
    missing = {index: (name, _ENDED_WITHOUT_RESULT["aborted"]) for index, name in never_started}
    for slot in slots:
        ended = _ENDED_WITHOUT_RESULT.get(slot["status"])
        if ended is not None:
            missing[slot["index"]] = (slot["name"], ended)
    return [
        _error_result((assistant, index), name, ended, at_us)
        for index, (name, ended) in sorted(missing.items())
    ]


def close_round(
    tx: TreeTransaction,
    conversation_id: int,
    assistant: int,
    never_started: Iterable[tuple[int, str]] = (),
) -> None:
    """Give every call of a round that has none its error result: see `missing_results`."""
    slots = read_doc(tx, LiveDocument, conversation_id)["calls"]
    for message in missing_results(slots, assistant, tx.now_us(), never_started):
        tx.append(conversation_id, kind="pi.tool_result", messages=[message])


def ended_without_result(status: str) -> tuple[str, str]:
    """The code and text of the result of a call whose task the scheduler has ended."""
    return _ENDED_WITHOUT_RESULT.get(status, _ENDED_WITHOUT_RESULT["faulted"])


def no_such_tool(name: str, offered: Collection[str]) -> str:
    """What the model is told of a call to a tool that its request had not offered."""
    shown = sorted(offered)[:_OFFERED_SHOWN_MAX]
    more = len(offered) - len(shown)
    listed = (", ".join(shown) or "none") + (f" and {more} more" if more else "")
    return f"There is no tool {name[:200]!r} here. Available: {listed}."


def open_calls(entries: Sequence[Entry], assistant: int) -> list[tuple[int, str]]:
    """Calls of an answer that have no result yet, as (index, name), in call order."""
    answered: set[int] = set()
    names: list[str] = []
    for entry in entries:
        for message in kept_messages(entry):
            if entry.id == assistant and isinstance(message, AssistantMessage):
                names = [call.name for call in message.tool_calls]
            elif isinstance(message, ToolResultMessage) and message.call[0] == assistant:
                answered.add(message.call[1])
    return [(index, name) for index, name in enumerate(names) if index not in answered]


def settle_generation(
    tx: TreeTransaction,
    session: Session,
    services: AgentServices,
    conversation_id: int,
    task_id: int,
    *,
    reason: str,
    detail: str | None,
) -> None:
    """The scheduler ended a generation itself: the conversation is usable afterwards, always."""
    live = read_doc(tx, LiveDocument, conversation_id)
    if live["generation"] != task_id or live["run"] is None:
        return
    if live["partial"] is not None:
        keep_partial(
            tx,
            services,
            conversation_id,
            task_id,
            model=_asked_model(tx, session, conversation_id, task_id),
            why=f"the generation was {reason}",
        )
    end_run(session, tx, conversation_id, live["run"], reason=reason, detail=detail)


def _asked_model(tx: TreeTransaction, session: Session, conversation_id: int, task_id: int) -> str:
    """Who was asked by a generation that cannot tell any more: as its checkpoint says.

    The agent may have got another model since. It is what is left where the checkpoint says
    nothing, as one of a version that nobody here can read.
    """
    stored = session.storage.task_checkpoint(task_id)
    fields = None if stored is None else _json.loads_stored(stored[1])
    if isinstance(fields, dict) and isinstance(fields.get("request"), dict):
        fields = fields["request"]
    if isinstance(fields, dict) and isinstance(fields.get("model"), str):
        return str(fields["model"])
    agent: dict[str, Any] = tx.doc_value(address_of(AgentDocument, conversation_id)) or {}
    return agent.get("model") or "unknown"
