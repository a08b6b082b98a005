"""Reading a session that has ended: everything says so, also what is still in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest
from session_support import Counter, Note, append_note, new_conversation, open_test_session

from pidurable.errors import SessionClosedError, SessionPoisonedError
from pidurable.session._documents import Address, document
from pidurable.session._session import Session
from pidurable.storage import MemoryStorage
from pidurable.testing import Fault, FaultyStorage


@document("ended.page", history="rewindable")
@attrs.define
class Page:
    text: str = ""


def reads(session: Session, top: int, entry: int, blob: str) -> list[Callable[[], Awaitable[Any]]]:
    """Every look at committed state; all of it is in memory or in the storage."""

    async def snapshot() -> Any:
        return session.snapshot(Counter)

    async def json() -> Any:
        return session.doc_value(Address("test.counter", 0, 0, ""))

    return [
        snapshot,
        json,
        lambda: session.snapshot_as_of(Page, top, entry),
        lambda: session.context(top),
        lambda: session.context_entries(top),
        lambda: session.history(top),
        lambda: session.blob(blob),
    ]


@pytest.mark.parametrize("end", ["poisoned", "closed"])
async def test_a_session_that_has_ended_shows_nothing(end: str) -> None:
    """Cached or stored, what is read after the end raises what has ended it."""
    storage = FaultyStorage(MemoryStorage())
    expected: type[Exception] = SessionClosedError
    async with open_test_session(storage) as session:
        top = await new_conversation(session)
        async with session.body(session.transaction()) as tx:
            (await tx.document(Counter)).count = 1
            (await tx.document(Page, top)).text = "a"
            entry = tx.append(top, Note("a"))
            blob = tx.put_blob(b"a")
        looks = reads(session, top, entry, blob)
        assert all([await look() for look in looks[:-4]]), "before the end all is there"
        assert [len(await look()) for look in looks[-4:]] == [0, 1, 1, 1]
        if end == "poisoned":
            expected = SessionPoisonedError
            storage.add(Fault.lose())
            with pytest.raises(SessionPoisonedError):
                await session.run(session.transaction(), append_note(top, "b"))
            for look in looks:
                with pytest.raises(expected):
                    await look()
    if end == "closed":
        for look in looks:
            with pytest.raises(expected):
                await look()
