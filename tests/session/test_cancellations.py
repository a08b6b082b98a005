"""A commit that raised Cancelled was not stored: a thousand cancellations at random moments."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import trio
from session_support import Note, append_note, new_conversation, open_test_session
from trio.testing import MockClock

from pidurable.errors import StorageRefusedError
from pidurable.records._limits import Settings
from pidurable.session._seams import ThreadBlocking
from pidurable.session._session import Session
from pidurable.storage import MemoryStorage, SqliteStorage, Storage
from pidurable.testing import Fault, FaultyStorage

CANCELLATIONS = 1_000
TOGETHER = 20


class Outcomes:
    """What each commit told its caller, by the text that it would have stored."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    async def commit(self, session: Session, conversation: int, text: str, ticks: int) -> None:
        """One commit, cancelled after a number of turns of the loop."""
        scope = trio.CancelScope()

        async def cancel() -> None:
            for _ in range(ticks):
                await trio.lowlevel.checkpoint()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            with scope:
                try:
                    await self._commit(session, conversation, text)
                except trio.Cancelled:
                    self.told[text] = "cancelled"
                    raise
                except StorageRefusedError:
                    self.told[text] = "refused"

    async def _commit(self, session: Session, conversation: int, text: str) -> None:
        if int(text) % 2:
            await session.run(session.transaction(), append_note(conversation, text))
        else:
            async with session.body(session.transaction()) as tx:
                tx.append(conversation, Note(text))
                for _ in range(int(text) % 5):
                    await trio.lowlevel.checkpoint()
        self.told[text] = "stored"


async def cancel_often(storage: Storage, session: Session, seed: int) -> Counter[str]:
    """Commit and cancel; return how often each answer was given, all of them proved true."""
    draw = random.Random(seed)
    conversation = await new_conversation(session)
    outcomes = Outcomes()
    for first in range(0, CANCELLATIONS, TOGETHER):
        async with trio.open_nursery() as nursery:
            for number in range(first, first + TOGETHER):
                ticks = draw.randrange(30)
                nursery.start_soon(outcomes.commit, session, conversation, str(number), ticks)
    stored: set[str] = set()
    after = 0
    while page := storage.entries(conversation, after=after):
        stored |= {str(row.data).removeprefix('{"text":"').removesuffix('"}') for row in page}
        after = page[-1].id
    assert len(outcomes.told) == CANCELLATIONS, f"seed {seed}"
    for text, told in outcomes.told.items():
        assert (told == "stored") == (text in stored), f"seed {seed}: commit {text} was told {told}"
    return Counter(outcomes.told.values())


@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_is_never_stored_in_memory(seed: int, autojump_clock: MockClock) -> None:
    """Of 1,000 commits cancelled at random, none was both Cancelled and stored."""
    # C051
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        counts = await cancel_often(storage, session, seed)
    print(f"seed={seed} {dict(counts)}")
    assert counts["cancelled"] > 50
    assert counts["stored"] > 50


async def test_cancelled_is_never_stored_beside_refusals(autojump_clock: MockClock) -> None:
    """The same while the storage refuses now and then, for a moment or for good."""
    storage = FaultyStorage(MemoryStorage())
    draw = random.Random(4)
    for _ in range(40):
        storage.add(Fault.refuse(at=draw.randrange(1, 150), times=draw.choice((1, 1, 8))))
    settings = Settings(storage_retry_seconds=0.05)
    async with open_test_session(storage, settings=settings) as session:
        storage_calls = storage.count("apply")
        counts = await _with_retries(storage, session)
        assert storage.count("apply") > storage_calls
    print(f"refusals {dict(counts)}")
    assert counts["cancelled"] > 50
    assert counts["refused"] > 5


async def _with_retries(storage: FaultyStorage, session: Session) -> Counter[str]:
    while True:
        try:
            return await cancel_often(storage, session, seed=5)
        except StorageRefusedError:
            continue  # the conversation itself was refused


async def test_cancelled_is_never_stored_in_a_file(tmp_path: Path) -> None:
    """The same with a writer thread and a real file."""
    storage = SqliteStorage(tmp_path / "session.sqlite", durability="process")
    async with open_test_session(storage, blocking=ThreadBlocking()) as session:
        counts = await cancel_often(storage, session, seed=6)
    print(f"threads {dict(counts)}")
    assert counts["cancelled"] > 50
    assert counts["stored"] > 50
