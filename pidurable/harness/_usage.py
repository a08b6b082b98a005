"""What was spent: tokens and cost by model and by tool, of a whole session or of a part of it.

Each conversation says in `pi.usage` what it has spent itself, a fork from zero on, so that a sum
over conversations counts nothing twice. A part is a task or conversation with all that is below it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pidurable.agent._documents import UsageDocument, address_of
from pidurable.errors import NotFoundError, show
from pidurable.records._checks import is_id
from pidurable.records._codec import decode_usage
from pidurable.records._messages import Usage
from pidurable.session import _documents
from pidurable.session._session import Session
from pidurable.storage import Storage

Table = Literal["models", "tools"]
_PAGE = 1_000


async def total_usage(session: Session, table: Table, below: int | None) -> dict[str, Usage]:
    """Add up what conversations say, owned ones included.

    Raises:
        NotFoundError: This session has no such task or conversation.
    """
    ids = await session.blocking.run(conversations_below, session.storage, below)
    stored = (session.doc_value(address_of(UsageDocument, id)) for id in ids)
    return summed(stored, table)


def stored_usage(storage: Storage, below: int | None) -> dict[str, dict[str, Usage]]:
    """The same by what is stored, without a session."""
    states = [
        _documents.load(storage, address_of(UsageDocument, id))
        for id in conversations_below(storage, below)
    ]
    values = [None if state is None else state.value for state in states]
    return {"models": summed(values, "models"), "tools": summed(values, "tools")}


def summed(documents: Iterable[Any], table: Table) -> dict[str, Usage]:
    """Add up what some `pi.usage` say; None for one that was never written."""
    totals: dict[str, Usage] = {}
    for stored in documents:
        for name, value in (stored or {}).get(table, {}).items():
            totals[name] = totals.get(name, Usage()) + decode_usage(value)
    return totals


def conversations_below(storage: Storage, below: int | None) -> list[int]:
    """The conversations of a session, or those that belong to a task or conversation of it."""
    found: list[int] = []
    owners: list[int | None] = [None]
    if below is not None:
        conversation = storage.conversation(below) if is_id(below) else None
        task = storage.task(below) if is_id(below) and conversation is None else None
        if conversation is not None:
            found, owners = [below], [*_tasks_of(storage, below)]
        elif task is not None:
            owners = [*_tasks_of(storage, task.conversation, below)]
        else:
            raise NotFoundError("task or conversation", show(below))
    while owners:
        owner = owners.pop()
        after = 0
        while rows := storage.conversations_by_owner(owner, after=after, limit=_PAGE):
            after = rows[-1].id
            found += [row.id for row in rows]
            for row in rows:
                owners += _tasks_of(storage, row.id)
    return found


def _tasks_of(storage: Storage, conversation_id: int, root: int | None = None) -> list[int]:
    """Every task of a conversation, or one of them with all below it: each may own further ones."""
    found: dict[int, None] = {} if root is None else {root: None}
    # An owner is always older than what it owns.
    after = 0 if root is None else root
    while rows := storage.tasks(conversation=conversation_id, after=after, limit=_PAGE):
        after = rows[-1].id
        found.update((row.id, None) for row in rows if root is None or row.owner in found)
    return list(found)
