"""Submissions that were published lately are answered from memory, as the storage would."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
from session_support import new_conversation, open_test_session, queued_input

from pidurable.session import _submissions
from pidurable.session._removals import Removal
from pidurable.session._transaction import Transaction
from pidurable.storage import MemoryStorage, Op
from pidurable.testing import Fault, FaultyStorage

STATES = ("queued", "placed", "done", "unanswered")


def change(submission: int, **changes: Any) -> Any:
    def body(tx: Transaction) -> None:
        record = tx.submission(submission)
        assert record is not None
        tx.update_submission(attrs.evolve(record, **changes))

    return body


def looked_up(storage: FaultyStorage) -> int:
    return storage.count("submission") + storage.count("open_submissions")


@pytest.mark.parametrize("seed", range(3))
async def test_what_is_kept_is_what_is_stored(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """After any commits, where there is too little room for them, and some are too long."""
    monkeypatch.setattr(_submissions, "_ROWS_KEPT", 6)
    monkeypatch.setattr(_submissions, "_CONVERSATIONS_KEPT", 2)
    monkeypatch.setattr(_submissions, "_OPEN_KEPT", 3)
    monkeypatch.setattr(_submissions, "_CHARACTERS_KEPT", 20)
    draw = random.Random(seed)
    stored = MemoryStorage()
    async with open_test_session(stored) as session:
        ids: dict[int, list[int]] = {await new_conversation(session): [] for _ in range(4)}
        for _ in range(60):
            conversation = draw.choice(list(ids))
            known = ids[conversation]
            if known and draw.random() < 0.6:
                status = draw.choice(STATES)
                more = {"answer": 7, "ended_us": 9} if status == "done" else {}
                body = change(draw.choice(known), status=status, entry=5, **more)
                await session.run(session.transaction(), body)
            else:
                body = queued_input(
                    conversation, "x" * draw.choice([3, 30]), status=draw.choice(STATES)
                )
                known.append(await session.run(session.transaction(), body))
            if draw.random() < 0.3:
                session.staged_open_submissions(draw.choice(list(ids)))
        records = {id: session.submission(id) for each in ids.values() for id in each}
        opened = {each: session.staged_open_submissions(each) for each in ids}
        kept = session._submissions._rows
        assert 0 < len(kept) <= 6
        assert all(len(row.content) <= 20 for row in kept.values())
    async with open_test_session(stored.reopen()) as other:
        assert records == {id: other.submission(id) for id in records}
        for conversation, found in opened.items():
            assert found == other.staged_open_submissions(conversation)
        assert len(records) > 15


async def test_what_is_new_and_changes_in_one_commit_is_stored_once() -> None:
    """As it is in the end, whatever was stored beside it; so it is kept, too."""
    storage = MemoryStorage()
    written: list[list[Op]] = []
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)

        def body(tx: Transaction) -> tuple[int, int]:
            changed = queued_input(conversation, ["hi"])(tx)
            other = queued_input(conversation, ["there"])(tx)
            change(changed, status="placed", entry=5, run=6)(tx)
            change(changed, status="done", answer=7, reason="r", detail="d", ended_us=9)(tx)
            written.append([op for op, _ in tx.writes])
            return changed, other

        changed, other = await session.run(session.transaction(), body)
        assert written == [[Op.SUBMISSION, Op.SUBMISSION]]
        record = session.submission(changed)
        assert record is not None
        assert (record.status, record.entry, record.run, record.answer) == ("done", 5, 6, 7)
        assert (record.reason, record.detail, record.ended_us) == ("r", "d", 9)
        assert list(session.staged_open_submissions(conversation)) == [other]
    async with open_test_session(storage.reopen()) as again:
        assert again.submission(changed) == record


async def test_who_is_told_of_a_change_reads_nothing() -> None:
    """Neither a new submission nor its next states are read from the storage."""
    storage = FaultyStorage(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        id = await session.run(session.transaction(), queued_input(conversation, ["hi"]))
        assert list(session.staged_open_submissions(conversation)) == [id]
        await session.run(session.transaction(), change(id, status="done", answer=7))
        assert session.staged_open_submissions(conversation) == {}
        found = session.submission(id)
        assert found is not None
        assert (found.status, found.answer, found.content) == ("done", 7, ["hi"])
        assert looked_up(storage) == 0


async def test_a_record_is_its_readers_own() -> None:
    """What is done to the content of one changes nothing for the next reader."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        content = [{"text": "hi"}]
        id = await session.run(session.transaction(), queued_input(conversation, content))
        content[0]["text"] = "changed by who made it"
        first = session.submission(id)
        assert first is not None
        first.content[0]["text"] = "changed by who read it"
        again = session.submission(id)
        assert again is not None
        assert again.content == [{"text": "hi"}]


async def test_what_was_refused_is_not_kept() -> None:
    """A batch that the storage refuses leaves what was published before."""
    storage = FaultyStorage(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        id = await session.run(session.transaction(), queued_input(conversation, "hi"))

        def raises(tx: Transaction) -> None:
            change(id, status="done")(tx)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await session.run(session.transaction(), raises)
        found = session.submission(id)
        assert found is not None
        assert found.status == "queued"
        assert list(session.staged_open_submissions(conversation)) == [id]


async def test_what_is_removed_is_gone() -> None:
    """A commit that removes anything has all of it read anew."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        id = await session.run(session.transaction(), queued_input(conversation, "hi"))

        def remove(tx: Transaction) -> None:
            tx.writes.append((Op.SUBMISSION_DELETE, (id,)))
            tx.removal = Removal()

        await session.run(session.transaction(), remove)
        assert session.submission(id) is None
        assert session.staged_open_submissions(conversation) == {}


async def test_nothing_is_answered_from_memory_once_the_session_has_closed() -> None:
    """Whoever asks then is told by the storage, as before."""
    storage = FaultyStorage(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        id = await session.run(session.transaction(), queued_input(conversation, "hi"))
    before = looked_up(storage)
    storage.add(Fault.fail("submission"))
    with pytest.raises(Exception, match=r"disk I/O error|closed"):
        session.submission(id)
    assert looked_up(storage) == before + 1
