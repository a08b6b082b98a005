"""A session for tests, its seams in the test's hands, and small records to commit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from pidurable.errors import SessionPoisonedError
from pidurable.records._codec import Codec
from pidurable.records._entries import entry
from pidurable.records._limits import Settings
from pidurable.records._submissions import SubmissionRecord
from pidurable.session._documents import document
from pidurable.session._seams import (
    Blocking,
    Failpoints,
    SeededRandomness,
    TrioClock,
    Worker,
)
from pidurable.session._session import Session, serving
from pidurable.session._transaction import Transaction
from pidurable.storage import HolderClaim, MemoryStorage, SqliteStorage, Storage
from pidurable.testing import FaultyStorage

T = TypeVar("T")
CODEC = Codec()
"""Of every session: what a codec learns of a type takes longer than many a test."""


@entry("test.note")
@attrs.frozen
class Note:
    text: str


@document("test.counter", scope="session")
@attrs.define
class Counter:
    count: int = 0
    log: list[str] = attrs.Factory(list)


class HeldBlocking:
    """Blocking work in the loop, whose worker the test can hold in front of each call."""

    def __init__(self) -> None:
        self._open = trio.Event()
        self._open.set()
        self.held = 0
        """How many calls wait at the gate now."""

    def hold(self) -> None:
        self._open = trio.Event()

    def release(self) -> None:
        self._open.set()

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        await trio.lowlevel.checkpoint()
        return fn(*args)

    def worker(self, name: str) -> Worker:
        return _HeldWorker(self)


class _HeldWorker:
    def __init__(self, owner: HeldBlocking) -> None:
        self._owner = owner

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        with trio.CancelScope(shield=True):
            self._owner.held += 1
            await self._owner._open.wait()
            self._owner.held -= 1
            await trio.lowlevel.checkpoint()
        return fn(*args)

    def close(self) -> None:
        """Nothing to close."""


class Recorder:
    """A participant that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.refuse: Callable[[Any], None] = lambda tx: None
        self.on_committed: Callable[[Any], None] = lambda tx: None

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def check_staged(self, tx: Any) -> None:
        self.refuse(tx)

    def joined(self, tx: Any) -> None:
        self.events.append(("joined", tx.seq))

    def committed(self, tx: Any) -> None:
        self.events.append(("committed", tx.seq))
        self.on_committed(tx)

    def reverted(self) -> None:
        self.events.append(("reverted", None))

    def poisoned(self, error: SessionPoisonedError) -> None:
        self.events.append(("poisoned", error))

    def refusing(self, refusing: bool) -> None:
        self.events.append(("refusing", refusing))


def make_session(
    storage: Storage,
    *,
    settings: Settings | None = None,
    blocking: Blocking | None = None,
    failpoints: Failpoints | None = None,
    durability: str = "power",
    inline: bool = False,
    takeover: bool = False,
    holder_id: str = "test",
) -> Session:
    clock = TrioClock(shared=True)
    return Session(
        storage,
        settings=settings or Settings(),
        clock=clock,
        blocking=blocking or HeldBlocking(),
        randomness=SeededRandomness(1),
        failpoints=failpoints or Failpoints(),
        claim=HolderClaim(
            holder_id=holder_id, host="test", pid=1, at_us=clock.now_us(), lease_seconds=15.0
        ),
        takeover=takeover,
        durability=durability,
        inline=inline,
        codec=CODEC,
    )


@asynccontextmanager
async def open_test_session(storage: Storage, **options: Any) -> AsyncIterator[Session]:
    """A session that is served while the block lasts, and closed with its mark after it."""
    session = make_session(storage, **options)
    try:
        async with serving(session):
            yield session
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            # The block's own exception, as an opened harness would let it out.
            raise group.exceptions[0] from None
        raise
    finally:
        if isinstance(session.blocking, HeldBlocking):
            session.blocking.release()
        await session.close(list)


@asynccontextmanager
async def line_held(session: Session) -> AsyncIterator[None]:
    """Somebody else's body holds the line while the block runs, so that commits wait in order."""
    release = trio.Event()

    async def hold(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with session.body(session.transaction()):
            task_status.started()
            await release.wait()

    async with trio.open_nursery() as nursery:
        await nursery.start(hold)
        try:
            yield
        finally:
            release.set()


def append_note(conversation: int, text: str) -> Callable[[Transaction], int]:
    """A body that appends one note."""
    return lambda tx: tx.append(conversation, Note(text))


async def new_conversation(session: Session) -> int:
    made = await session.run(session.transaction(), lambda tx: tx.add_conversation())
    return made.id


async def commit_note(session: Session, conversation: int, text: str) -> int:
    return await session.run(session.transaction(), append_note(conversation, text))


def queued_input(conversation: int, content: Any, **others: Any) -> Callable[[Transaction], int]:
    """A commit that queues an input in a conversation, and gives its id."""

    def body(tx: Transaction) -> int:
        record = SubmissionRecord(
            id=tx.draw_id(),
            conversation_id=conversation,
            kind="input",
            when_busy="follow_up",
            request_id=None,
            digest="d",
            content=content,
            status="queued",
        )
        tx.put_submission(attrs.evolve(record, **others))
        return record.id

    return body


def stored_notes(storage: Storage, conversation: int) -> list[str]:
    """The texts that the storage holds, behind any planned faults."""
    inner = storage.inner if isinstance(storage, FaultyStorage) else storage
    return [
        str(row.data).removeprefix('{"text":"').removesuffix('"}')
        for row in inner.entries(conversation)
    ]


PLACES = ("memory", "sqlite reopened")
"""Where a test of stored state runs: from what a session keeps in memory, and from what a file
gives to a new session each time. There are also "memory reopened" and "sqlite"."""


class Place:
    """A store that a test works on, in one session or, where it says so, in one a step."""

    def __init__(self, name: str, folder: Path, options: dict[str, Any]) -> None:
        self.options = options
        """Of every session that is opened from here on."""
        self._name = name
        self._path = folder / "place.sqlite"
        self._memory = MemoryStorage()
        self._opened = AsyncExitStack()
        self._session: Session | None = None

    @property
    def is_reopened(self) -> bool:
        return self._name.endswith("reopened")

    async def session(self, *, fresh: bool = False) -> Session:
        """The session to work in now; what an earlier call gave is closed where it is another."""
        if self._session is None or self.is_reopened or fresh:
            await self.close()
            storage: Storage = (
                self._memory.reopen()
                if self._name.startswith("memory")
                else SqliteStorage(self._path)
            )
            self._session = await self._opened.enter_async_context(
                open_test_session(storage, **self.options)
            )
        return self._session

    async def run(self, body: Callable[[Transaction], T], *, flush: bool = True) -> T:
        """Commit a body that awaits nothing."""
        session = await self.session()
        return await session.run(session.transaction(flush=flush), body)

    async def close(self) -> None:
        await self._opened.aclose()
        self._session = None


@asynccontextmanager
async def open_place(name: str, folder: Path, **options: Any) -> AsyncIterator[Place]:
    """A place by its name, as in `PLACES`, closed with the block."""
    place = Place(name, folder, options)
    try:
        yield place
    finally:
        await place.close()
