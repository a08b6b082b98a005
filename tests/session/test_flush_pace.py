"""Where a flushed batch is written: in the thread, or in the loop where that holds nobody up."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from session_support import append_note, new_conversation, open_test_session
from trio.testing import wait_all_tasks_blocked

from pidurable.errors import StorageRefusedError
from pidurable.session import _writer
from pidurable.session._seams import InlineBlocking, ThreadBlocking
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.session._writer import QUICK_FLUSHES, QUICK_FLUSHES_MAX, FlushPace
from pidurable.storage import MemoryStorage, Storage
from pidurable.testing import Fault, FaultyStorage
from pidurable.testing._forwarding import ForwardingStorage

MS = 0.001


class Disk:
    """The clock that flushes are timed by: each one takes as long as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.takes = 0.2 * MS
        self.in_loop: list[bool] = []
        """Of each batch, whether it was stored in the thread of the loop."""

    def seconds(self) -> float:
        return self.now


class _OnDisk(ForwardingStorage):
    def __init__(self, inner: Storage, disk: Disk) -> None:
        super().__init__(inner)
        self._disk = disk

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        if name == "apply":
            self._disk.in_loop.append(threading.current_thread() is threading.main_thread())
            self._disk.now += self._disk.takes
        return call()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(_writer, "real_seconds", disk.seconds)
    return disk


@asynccontextmanager
async def opened(disk: Disk, **options: Any) -> AsyncIterator[tuple[Session, FaultyStorage, int]]:
    """A session in threads, whose disk has been quick for long enough; and a conversation."""
    storage = FaultyStorage(_OnDisk(MemoryStorage(), disk))
    options.setdefault("blocking", ThreadBlocking())
    async with open_test_session(storage, **options) as session:
        conversation = await new_conversation(session)
        for _ in range(QUICK_FLUSHES):
            await commit(session, conversation)
        disk.in_loop.clear()
        yield session, storage, conversation


async def commit(session: Session, conversation: int, text: str = "said") -> None:
    await session.run(session.transaction(), append_note(conversation, text))


def test_many_quick_flushes_in_a_row_make_a_quick_disk() -> None:
    """One fewer does not, and a slow one among them asks for all of them again."""
    pace = FlushPace()
    for _ in range(QUICK_FLUSHES - 1):
        pace.took(0.2 * MS)
    before = pace.is_quick
    pace.took(1.5 * MS)
    for _ in range(QUICK_FLUSHES):
        pace.took(0.2 * MS)
    between = pace.is_quick
    for _ in range(QUICK_FLUSHES // 2):
        pace.took(0.2 * MS)

    assert not before
    assert not between
    assert pace.is_quick


@pytest.mark.parametrize(
    ("seconds", "asked_for"),
    [(1.5 * MS, 48), (10 * MS, 320), (0.5, 16_000), (60.0, QUICK_FLUSHES_MAX)],
)
def test_a_slower_flush_asks_for_more_quick_ones(seconds: float, asked_for: int) -> None:
    """In proportion to how long it took, so that waiting for such ones stays a tenth of the loop;
    a quicker one after it takes nothing of that back."""
    pace = FlushPace()
    pace.took(seconds)
    pace.took(1.1 * MS)

    count = 0
    while not pace.is_quick:
        pace.took(0.2 * MS)
        count += 1
    assert count == asked_for


async def test_a_lone_commit_on_a_quick_disk_is_written_in_the_loop(disk: Disk) -> None:
    """Once enough flushes were quick; before that, each goes to the thread."""
    async with opened(disk) as (session, _, conversation):
        await commit(session, conversation)
        fresh = Disk()
        async with open_test_session(
            _OnDisk(MemoryStorage(), fresh), blocking=ThreadBlocking()
        ) as other:
            await new_conversation(other)

    assert disk.in_loop[0] is True
    assert fresh.in_loop[0] is False


async def test_a_slow_flush_sends_the_next_ones_to_the_thread(disk: Disk) -> None:
    """The loop waits for one flush of a disk that turns slow, and for none of those after it."""
    async with opened(disk) as (session, _, conversation):
        disk.takes = 30 * MS
        await commit(session, conversation)
        await commit(session, conversation)
        disk.takes = 0.2 * MS
        await commit(session, conversation)
        found = disk.in_loop[:3]

    assert found == [True, False, False]


async def test_what_several_share_goes_to_the_thread(disk: Disk) -> None:
    """The loop has others to run meanwhile, and how long it takes there says nothing of the disk:
    the thread waits for the loop too."""
    async with opened(disk) as (session, _, conversation):
        disk.takes = 0.5
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(commit, session, conversation)
        disk.takes = 0.2 * MS
        await commit(session, conversation)
        found = disk.in_loop[:2]

    assert found == [False, True]


@pytest.mark.parametrize("what", ["text", "blob", "many"])
async def test_a_commit_with_much_to_write_goes_to_the_thread(disk: Disk, what: str) -> None:
    """A long text, bytes, and many rows: how long they take is not told by other flushes."""

    def body(tx: Transaction) -> None:
        if what == "blob":
            tx.put_blob(b"image")
        for _ in range(80 if what == "many" else 1):
            append_note(conversation, "x" * 20_000 if what == "text" else "said")(tx)

    async with opened(disk) as (session, _, conversation):
        disk.takes = 0.5  # nor do they tell how long others take
        await session.run(session.transaction(), body)
        disk.takes = 0.2 * MS
        await commit(session, conversation)
        found = disk.in_loop[:2]

    assert found == [False, True]


async def test_beside_a_call_that_has_the_write_lock_nothing_is_written_in_the_loop(
    disk: Disk,
) -> None:
    """The batch stands in line behind it in the thread, and the loop goes on."""
    release = threading.Event()
    async with opened(disk) as (session, _, conversation):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.writer.run_locking, release.wait)
            await wait_all_tasks_blocked()
            nursery.start_soon(commit, session, conversation)
            await wait_all_tasks_blocked()
            before = list(disk.in_loop)
            release.set()
        await commit(session, conversation)
        found = disk.in_loop[:2]

    assert before == []
    assert found == [False, True]


async def test_beside_a_checkpoint_nothing_is_flushed_in_the_loop(disk: Disk) -> None:
    """It flushes what it moves, and a flush beside it would wait for that; what needs no flush is
    written in the loop all the same."""
    release = threading.Event()
    async with opened(disk) as (session, _, conversation):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.writer.run_syncing, release.wait)
            await wait_all_tasks_blocked()
            await session.run(session.transaction(flush=False), append_note(conversation, "said"))
            nursery.start_soon(commit, session, conversation)
            await wait_all_tasks_blocked()
            before = list(disk.in_loop)
            release.set()
        await commit(session, conversation)
        found = list(disk.in_loop[:3])

    assert before == [True]
    assert found == [True, False, True]


async def test_a_refusal_in_the_loop_is_tried_again_in_the_thread(disk: Disk) -> None:
    """A lock that somebody else holds keeps the call waiting, which the loop does once."""
    async with opened(disk) as (session, storage, conversation):
        storage.add(Fault.call(lambda: _busy(disk)))
        await commit(session, conversation)
        await commit(session, conversation)
        found = disk.in_loop[:2]

    assert found == [False, False]


def _busy(disk: Disk) -> None:
    assert threading.current_thread() is threading.main_thread()
    disk.now += 0.25
    raise StorageRefusedError("memory", "locked by somebody else")


async def test_without_threads_nothing_is_timed(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation replays a schedule: it may not depend on how long a call took."""
    monkeypatch.setattr(_writer, "real_seconds", None)
    async with opened(disk, blocking=InlineBlocking()) as (session, _, conversation):
        await commit(session, conversation)
        flushed = len(disk.in_loop)

    assert flushed == 1
