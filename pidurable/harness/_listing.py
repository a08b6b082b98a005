"""Where the conversations of a session stand, one record each, by what is stored.

Owned conversations are among them: they belong to a task, which some conversation owns. Each costs
a few reads of its newest state, however long its history is.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Literal

import attrs

from pidurable.agent._documents import (
    AgentDocument,
    InboxDocument,
    LiveDocument,
    UsageDocument,
    address_of,
    defaults_of,
)
from pidurable.agent._permissions import stored_open_requests
from pidurable.errors import InvalidArgumentError, show
from pidurable.harness._usage import summed
from pidurable.records._codec import Codec
from pidurable.records._messages import TextBlock, Usage, UserMessage
from pidurable.session import _documents
from pidurable.session._documents import definition_of, migrated
from pidurable.session._rows import entry_of
from pidurable.storage import ConversationRow, Storage
from pidurable.storage._contract import RecordKind

ConversationState = Literal["idle", "running", "retrying", "asking", "aborting", "blocked"]

TITLE_CHARS_MAX = 200
_TITLE_LOOKED_AT_MAX = 20
_PAGE = 1_000


@attrs.frozen(kw_only=True)
class ListedConversation:
    """One conversation of a list: what it is, and where it stands."""

    id: int
    key: str | None
    owner: int | None
    """The task that owns it; None for one that stands for itself."""
    parent: int | None
    """The conversation that it was forked from."""
    title: str
    """The beginning of what a user has said first in it, at most 200 characters; may be empty."""
    agent: dict[str, Any]
    """The JSON of `pi.agent`: what was chosen for it."""
    state: ConversationState
    """`idle`: nothing runs. `running`, or `retrying`: the pause before a request is made again.
    `asking`: a call waits for a person. `aborting`: its run is to be aborted. `blocked`: its run
    cannot go on; `explain` of its generation says why."""
    run: int | None
    turn: int
    generation: int | None
    """The task that is responsible for what happens now."""
    queued: int
    """How many inputs and writes wait for a boundary."""
    permissions: tuple[int, ...]
    """What a person is asked in it: ids of open requests."""
    created_us: int
    active_us: int
    """When something was last said in it; when it was made, if nothing was."""
    usage: dict[str, Any]
    """What it has spent itself, in all models together: the fields of `Usage`."""


def listed_conversations(storage: Storage, *, busy: bool, limit: int) -> list[ListedConversation]:
    """The newest conversations, oldest first.

    Args:
        storage: Where they are stored.
        busy: Only those with a run.
        limit: How many at most.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise InvalidArgumentError("limit", "expected an int of at least 1", show(limit))
    asked: dict[int, list[int]] = {}
    for request in stored_open_requests(storage):
        asked.setdefault(request.conversation, []).append(request.id)
    newest: deque[int] = deque(maxlen=min(limit, sys.maxsize))
    after: tuple[Any, ...] | None = None
    while rows := storage.scan(RecordKind.CONVERSATION, after=after, limit=_PAGE):
        after = (rows[-1][0],)
        ids = (row[0] for row in rows)
        newest.extend(id for id in ids if not busy or _is_busy(storage, id))
    found = (storage.conversation(id) for id in newest)
    return [_listed(storage, row, asked.get(row.id, [])) for row in found if row is not None]


def stored_now(storage: Storage, cls: type, conversation_id: int) -> dict[str, Any]:
    """The JSON of a document, in the shape of today; its defaults where it was never written."""
    state = _documents.load(storage, address_of(cls, conversation_id))
    if state is None:
        return defaults_of(cls)
    value = migrated(definition_of(cls), state.value, state.version)
    return {**defaults_of(cls), **value}


def _is_busy(storage: Storage, conversation_id: int) -> bool:
    return stored_now(storage, LiveDocument, conversation_id)["run"] is not None


def _listed(storage: Storage, row: ConversationRow, asked: list[int]) -> ListedConversation:
    live = stored_now(storage, LiveDocument, row.id)
    last = storage.entries(row.id, limit=1, reverse=True)
    usage = summed([stored_now(storage, UsageDocument, row.id)], "models").values()
    return ListedConversation(
        id=row.id,
        key=row.key,
        owner=row.owner,
        parent=row.parent,
        title=_title(storage, row.id),
        agent=stored_now(storage, AgentDocument, row.id),
        state=_state(storage, live, asked),
        run=live["run"],
        turn=live["turn"],
        generation=live["generation"],
        queued=len(stored_now(storage, InboxDocument, row.id)["items"]),
        permissions=tuple(asked),
        created_us=row.created_us,
        active_us=last[0].at_us if last else row.created_us,
        usage=attrs.asdict(sum(usage, Usage())),
    )


def _state(storage: Storage, live: dict[str, Any], asked: list[int]) -> ConversationState:
    if live["run"] is None:
        return "idle"
    task = None if live["generation"] is None else storage.task(live["generation"])
    if task is not None and task.blocked is not None:
        return "blocked"
    if task is not None and task.abort_us is not None:
        return "aborting"
    if asked:
        return "asking"
    return "running" if live["retry"] is None else "retrying"


def _title(storage: Storage, conversation_id: int) -> str:
    codec = Codec()
    for row in storage.entries(conversation_id, limit=_TITLE_LOOKED_AT_MAX):
        if row.kind != "pi.user":
            continue
        for message in entry_of(row, codec, storage).messages:
            if isinstance(message, UserMessage):
                texts = (b.text.strip() for b in message.blocks if isinstance(b, TextBlock))
                return " ".join(texts)[:TITLE_CHARS_MAX]
    return ""
