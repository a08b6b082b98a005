"""What was spent in a session: tokens and cost by model, of all its conversations."""

from __future__ import annotations

from pidurable.agent._documents import UsageDocument, address_of
from pidurable.records._codec import decode_usage
from pidurable.records._messages import Usage
from pidurable.session._session import Session
from pidurable.storage import Storage


async def total_usage(session: Session) -> dict[str, Usage]:
    """Add up what the conversations say, owned ones included."""
    totals: dict[str, Usage] = {}
    storage = session.storage

    def read() -> list[int]:
        found: list[int] = []
        owners: list[int | None] = [None]
        while owners:
            owner = owners.pop()
            after = 0
            while rows := storage.conversations_by_owner(owner, after=after):
                after = rows[-1].id
                found += [row.id for row in rows]
                for row in rows:
                    owners += _task_ids(storage, row.id)
        return found

    for id in await session.blocking.run(read):
        stored = session.doc_value(address_of(UsageDocument, id))
        for name, value in (stored or {}).get("models", {}).items():
            totals[name] = totals.get(name, Usage()) + decode_usage(value)
    return totals


def _task_ids(storage: Storage, conversation_id: int) -> list[int]:
    """Every task of a conversation: each may own further conversations."""
    found: list[int] = []
    while rows := storage.tasks(
        conversation=conversation_id, after=found[-1] if found else 0, limit=1000
    ):
        found += [row.id for row in rows]
    return found
