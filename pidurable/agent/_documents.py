"""The built-in documents of a conversation. Their shapes are public: interfaces apply patches.

`pi.agent` is what someone chose, as names; `pi.live` what happens right now; `pi.inbox` what waits
to be placed; `pi.usage` what was spent. They are changed by patches on their JSON, so that a
streamed word costs a word.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import attrs

from pidurable.records import _codec
from pidurable.records._messages import Usage
from pidurable.records._readonly import copied_json
from pidurable.session._documents import (
    Address,
    DocumentDefinition,
    definition_of,
    document,
)
from pidurable.session._transaction import Transaction


@document("pi.agent", history="rewindable", fork="as_of")
@attrs.define(kw_only=True)
class AgentDocument:
    """What someone chose for a conversation: names, never code. None leaves it to the host."""

    model: str | None = None
    """As "provider/model"."""
    thinking: str | None = None
    extensions: Any = None
    """Those whose tools, sections and hooks apply: a list of names, or {"add": [...],
    "remove": [...]} for the difference from the host's default, which is what None stands for."""
    tools: Any = None
    """Those of their tools that are offered: a list of names, or {"add": [], "remove": [...]};
    None: all."""
    instructions: str | None = None
    cwd: str | None = None
    turns_max: int | None = None


@document("pi.live")
@attrs.define(kw_only=True)
class LiveDocument:
    """What happens in a conversation right now. It is busy while `run` names a run."""

    run: int | None = None
    turn: int = 0
    generation: int | None = None
    partial: Any = None
    """{"blocks": [...]} of the answer that is being streamed, or None."""
    calls: list[Any] = attrs.Factory(list)
    """One object a call of this round: index, task, name, status, held_by, output_tail, details,
    diagnostics. While one is `queued`, behind others of a sequential round, it has no task yet."""
    retry: Any = None
    """{"try_number", "until_us", "error"} while a failed request waits for its next try."""
    compactions: list[Any] = attrs.Factory(list)
    """One object for each that goes on: task, status (selecting, summarizing, retrying, waiting),
    why (threshold, background, overflow, manual), received (characters of the summary)."""


@document("pi.compaction")
@attrs.define(kw_only=True)
class CompactionDocument:
    """How the last compaction ended, and what keeps the next from beginning too soon."""

    task: int | None = None
    why: str | None = None
    """threshold, background, overflow or manual."""
    status: str | None = None
    """applied, skipped, failed or stale."""
    reason: str | None = None
    """Why it was not applied."""
    tokens: int = 0
    """How large the context was afterwards."""
    window: int | None = None
    """The context window that was to be met."""
    newest: int = 0
    """The newest entry then: a context that was begun anew since is another one."""


@document("pi.inbox")
@attrs.define(kw_only=True)
class InboxDocument:
    """Input that is queued, in order of arrival: submission, mode, content or entry.

    The entry is None of a summary that found the queue full; its submission holds it.
    `after` names the run that was being aborted when an input came: it starts the next one.
    """

    items: list[Any] = attrs.Factory(list)


@document("pi.usage")
@attrs.define(kw_only=True)
class UsageDocument:
    """Tokens and cost by model (failed and aborted attempts too) and by tool."""

    models: dict[str, Any] = attrs.Factory(dict)
    tools: dict[str, Any] = attrs.Factory(dict)


_CONVERSATION = 1
_DEFINITIONS: dict[type, DocumentDefinition] = {
    cls: definition_of(cls)
    for cls in (AgentDocument, LiveDocument, CompactionDocument, InboxDocument, UsageDocument)
}
_NAMES: dict[type, str] = {cls: definition.name for cls, definition in _DEFINITIONS.items()}


@lru_cache(maxsize=4_096)
def address_of(cls: type, conversation_id: int) -> Address:
    """Where a built-in document of a conversation lives."""
    return Address(_NAMES[cls], _CONVERSATION, conversation_id, "")


_DEFAULTS: dict[type, dict[str, Any]] = {
    cls: attrs.asdict(cls(), recurse=False) for cls in _DEFINITIONS
}


def defaults_of(cls: type) -> dict[str, Any]:
    """The JSON of a document that was never written; the caller's own."""
    own: dict[str, Any] = copied_json(_DEFAULTS[cls])
    return own


def read_doc(tx: Transaction, cls: type, conversation_id: int) -> dict[str, Any]:
    """The JSON of a built-in document as staged so far. Do not change it."""
    value: dict[str, Any] | None = tx.doc_value(address_of(cls, conversation_id))
    return _DEFAULTS[cls] if value is None else value


def update_doc(tx: Transaction, cls: type, conversation_id: int, **fields: Any) -> None:
    """Set fields of a built-in document; writes only those that differ."""
    address = address_of(cls, conversation_id)
    # What happens is told in numbers, words and lists of the product's own making.
    if not tx.set_fields(_DEFINITIONS[cls], address, fields, checked=cls is LiveDocument):
        tx.put_doc(_DEFINITIONS[cls], address, {**defaults_of(cls), **fields})


def queued_items(tx: Transaction, conversation_id: int) -> Sequence[Any]:
    """What waits in the inbox of a conversation, in order, as staged so far. Do not change it."""
    value = tx.doc_value(address_of(InboxDocument, conversation_id))
    return () if value is None else value["items"]


def queue_item(tx: Transaction, conversation_id: int, item: dict[str, Any]) -> None:
    """Put an item behind what is queued: a patch of that item, however many there are."""
    address = address_of(InboxDocument, conversation_id)
    if tx.doc_value(address) is None:
        update_doc(tx, InboxDocument, conversation_id, items=[item])
        return
    ops = [{"op": "add", "path": "/items/-", "value": item}]
    tx.patch_doc(_DEFINITIONS[InboxDocument], address, ops)


def unqueue(tx: Transaction, conversation_id: int, submissions: Collection[int]) -> None:
    """Take the items of submissions out of the queue; no patch repeats what stays, or most of it.

    Args:
        tx: The commit.
        conversation_id: Whose queue.
        submissions: Ids; those that are not queued change nothing.
    """
    items = queued_items(tx, conversation_id)
    rest = [item for item in items if item["submission"] not in submissions]
    if len(rest) == len(items):
        return
    if len(rest) < len(items) - len(rest):
        update_doc(tx, InboxDocument, conversation_id, items=rest)
        return
    # From the back, so that no place moves before its turn.
    ops = [
        {"op": "remove", "path": f"/items/{place}"}
        for place in range(len(items) - 1, -1, -1)
        if items[place]["submission"] in submissions
    ]
    tx.patch_doc(_DEFINITIONS[InboxDocument], address_of(InboxDocument, conversation_id), ops)


def patch_live(tx: Transaction, conversation_id: int, ops: list[Any]) -> None:
    """Apply operations to a `pi.live` that exists."""
    tx.patch_doc(_DEFINITIONS[LiveDocument], address_of(LiveDocument, conversation_id), ops)


def call_slot(*, index: int, task_id: int | None, name: str) -> dict[str, Any]:
    """The object in `calls` of a call that has just been made; without a task it waits its turn."""
    return {
        "index": index,
        "task": None if task_id is None else int(task_id),
        "name": name,
        "status": "running" if task_id is not None else "queued",
        "held_by": None,
        "output_tail": "",
        "details": None,
        "diagnostics": [],
    }


def find_call(live: dict[str, Any], task_id: int) -> int | None:
    """The place of a tool call in `calls`, by its task."""
    for place, call in enumerate(live["calls"]):
        if call["task"] == task_id:
            return place
    return None


def add_usage(
    tx: Transaction,
    conversation_id: int,
    usage: Usage,
    *,
    model: str | None = None,
    tool: str | None = None,
) -> None:
    """Add what a request, or a tool, has used. Nothing is ever given back."""
    current = read_doc(tx, UsageDocument, conversation_id)
    field, name = ("models", model) if model is not None else ("tools", tool)
    assert name is not None
    table = dict(current[field])
    before = _codec.decode_usage(table[name]) if name in table else Usage()
    table[name] = _codec.encode_usage(before + usage)
    update_doc(tx, UsageDocument, conversation_id, **{field: table})
