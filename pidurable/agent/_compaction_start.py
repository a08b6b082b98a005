"""When a compaction begins, and how the last one ended.

Above one threshold the next request waits for a compaction that its generation owns; above a lower
one it begins in the background. Neither begins again before the context has grown since the last
one ended, however that was: what no compaction can lower does not set it off again and again. A
reset, a handoff or a summary since then has begun another context.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from pidurable.agent._compaction_range import (
    budget_of,
    context_tokens,
    message_tokens,
    tool_tokens,
)
from pidurable.agent._documents import (
    CompactionDocument,
    LiveDocument,
    address_of,
    defaults_of,
    read_doc,
    update_doc,
)
from pidurable.agent._hooks import CompactReason
from pidurable.agent._progress import Progress
from pidurable.records._messages import SystemMessage
from pidurable.session._context import ModelContext
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.tasks._transaction import TreeTransaction

EndStatus = Literal["applied", "skipped", "failed", "stale"]


@attrs.frozen(kw_only=True)
class CompactionInput:
    """One compaction of a conversation."""

    why: CompactReason
    """What set it off. The generation of a threshold or an overflow waits for it."""
    instructions: str | None = None
    """What the summary should hold besides, as a person put it."""

    @property
    def blocking(self) -> bool:
        """Whether a generation waits for it, and owns it."""
        return self.why in ("threshold", "overflow")


def due(
    session: Session,
    conversation_id: int,
    context: ModelContext,
    window: int | None,
    addition: SystemMessage | None,
) -> Literal["threshold", "background"] | None:
    """Which compaction the next request of a conversation sets off, if any.

    Args:
        session: Has the settings, and how the last one ended.
        conversation_id: Whose request.
        context: What it holds.
        window: The model's context window, or None if it is not known.
        addition: What is to be told besides.
    """
    if window is None:
        return None
    budget = budget_of(window, session.settings)
    last = last_compaction(session, conversation_id)
    known = last["status"] is not None and last["window"] == window
    # Written without it by versions before.
    known = known and (context.head or 0) <= last.get("newest", 0)
    enough = last["tokens"] + budget.growth if known else 0
    tokens = context_tokens(context, most=max(window, enough))
    if addition is not None:
        tokens += message_tokens(addition) + sum(map(tool_tokens, addition.tools_added))
    assert budget.blocking_above is not None
    assert budget.background_above is not None
    if tokens < enough or tokens <= budget.background_above:
        return None
    if tokens > budget.blocking_above:
        return "threshold"
    live = session.doc_value(address_of(LiveDocument, conversation_id))
    return None if live is not None and live["compactions"] else "background"


def last_compaction(session: Session, conversation_id: int) -> dict[str, Any]:
    """The JSON of how the last compaction of a conversation ended. Do not change it."""
    value = session.doc_value(address_of(CompactionDocument, conversation_id))
    return defaults_of(CompactionDocument) if value is None else value


# --- pi.live ------------------------------------------------------------------------------------


def show_begun(tx: TreeTransaction, conversation_id: int, task_id: int, why: CompactReason) -> None:
    """Show a compaction that was just created."""
    slot = {"task": int(task_id), "status": "selecting", "why": why, "received": 0}
    shown = read_doc(tx, LiveDocument, conversation_id)["compactions"]
    update_doc(tx, LiveDocument, conversation_id, compactions=[*shown, slot])


def show_status(
    tx: Transaction, conversation_id: int, task_id: int, status: str, received: int = 0
) -> None:
    """Show what a compaction does now, and how much of a summary has come."""
    shown = read_doc(tx, LiveDocument, conversation_id)["compactions"]
    news = {"status": status, "received": received}
    changed = [{**slot, **news} if slot["task"] == task_id else slot for slot in shown]
    if changed != shown:
        update_doc(tx, LiveDocument, conversation_id, compactions=changed)


def show_ended(tx: TreeTransaction, conversation_id: int, task_id: int) -> None:
    """Show no more of a compaction; nothing where nothing is shown of it."""
    shown = read_doc(tx, LiveDocument, conversation_id)["compactions"]
    left = [slot for slot in shown if slot["task"] != task_id]
    if len(left) != len(shown):
        update_doc(tx, LiveDocument, conversation_id, compactions=left)


def received_of(session: Session, conversation_id: int, task_id: int) -> int:
    """How many characters of a summary are known to have come before the process died."""
    live = session.doc_value(address_of(LiveDocument, conversation_id))
    for slot in () if live is None else live["compactions"]:
        if slot["task"] == task_id:
            received: int = slot["received"]
            return received
    return 0


class SummaryProgress:
    """Counts what comes of a summary, whose text nobody is shown before it is whole.

    The count is committed now and then: it shows that something goes on, and lets a request that
    was cut by a crash or an abort be charged.
    """

    def __init__(self, progress: Progress, conversation_id: int, task_id: int) -> None:
        self._progress = progress
        self.conversation = conversation_id
        self._task = task_id
        self._closed = False
        self.characters = 0

    def add(self, kind: str, text: str) -> None:
        """More of the summary, or of what the model thinks."""
        self.characters += len(text)
        self._progress.mark(self)

    def write(self, tx: Transaction) -> None:
        """Stage the count."""
        if not self._closed:
            show_status(tx, self.conversation, self._task, "summarizing", self.characters)

    def lost(self) -> None:
        """Nothing to do: each count is the whole of it."""

    def close(self) -> None:
        """Show nothing more: what follows is committed by the compaction itself."""
        self._closed = True
        self._progress.forget(self)
