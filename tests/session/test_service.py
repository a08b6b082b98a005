"""Beside the commits: heartbeats and the lease, checkpoints of the log, storages that fail."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from session_support import (
    HeldBlocking,
    Note,
    Recorder,
    commit_note,
    line_held,
    make_session,
    new_conversation,
    open_test_session,
)
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.errors import (
    HolderLostError,
    SessionPoisonedError,
    StorageHeldError,
    StorageRefusedError,
)
from pidurable.records._limits import Settings
from pidurable.session._seams import ThreadBlocking
from pidurable.session._session import serving
from pidurable.session._transaction import Transaction
from pidurable.storage import MemoryStorage, SqliteStorage
from pidurable.testing import Fault, FaultyStorage, Gate
from pidurable.testing._conformance_base import claim

READ = """
import sys, apsw
sys.stdin.readline()
connection = apsw.Connection(sys.argv[1])
connection.execute("begin")
connection.execute("select count(*) from entries").fetchall()
print("reading", flush=True)
sys.stdin.readline()
"""


async def test_a_session_is_confirmed_while_its_heartbeats_are_stored(
    autojump_clock: MockClock,
) -> None:
    """A heartbeat every 5 s keeps the session confirmed; without one for a lease it is not."""
    storage = FaultyStorage(MemoryStorage())
    async with open_test_session(storage) as session:
        await trio.sleep(61)
        assert storage.count("heartbeat") == 12
        assert session.confirmed()
        storage.add(Fault.refuse("heartbeat", times=1_000))
        await trio.sleep(13)
        assert session.confirmed()
        await trio.sleep(3)
        assert not session.confirmed()
        storage.clear()
        await trio.sleep(5)
        assert session.confirmed()


async def test_a_heartbeat_that_is_answered_late_counts_from_when_it_was_asked(
    autojump_clock: MockClock,
) -> None:
    """A sign of life is as old as the request for it, not as its answer."""
    blocking = HeldBlocking()
    async with open_test_session(MemoryStorage(), blocking=blocking) as session:
        blocking.hold()
        await trio.sleep(19)
        assert not session.confirmed()
        blocking.release()
        await trio.sleep(0.5)
        # Asked for at 5 s, stored at 19 s: another process could have seen nothing younger.
        assert session.confirmed()
        await trio.sleep(1)
        assert not session.confirmed()


async def test_a_heartbeat_that_fails_changes_nothing_else(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A heartbeat that was lost or refused is reported, and commits go on."""
    caplog.set_level(logging.WARNING)
    storage = FaultyStorage(MemoryStorage())
    async with open_test_session(storage) as session:
        storage.add(Fault.lose("heartbeat"))
        storage.add(Fault.refuse("heartbeat", at=2))
        await trio.sleep(11)
        await new_conversation(session)
    assert len([r for r in caplog.records if "heartbeat" in r.getMessage()]) == 2


async def test_a_replaced_holder_learns_it_with_its_next_heartbeat(
    autojump_clock: MockClock,
) -> None:
    """A holder that was taken over is poisoned within a heartbeat; who waits is told."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        recorder = Recorder()
        session.participants.append(recorder)
        errors: list[BaseException] = []

        async def waits() -> None:
            try:
                await new_conversation(session)
            except HolderLostError as error:
                errors.append(error)

        successor = make_session(storage.reopen(), takeover=True, holder_id="other")
        with pytest.RaisesGroup(HolderLostError, flatten_subgroups=True):
            async with trio.open_nursery() as nursery, line_held(session):
                nursery.start_soon(waits)
                await trio.sleep(6)
        assert len(errors) == 1
        assert recorder.names() == ["poisoned"]
        with pytest.raises(HolderLostError):
            await new_conversation(session)
        await successor.close(list)
    # The stale holder's close left the successor's mark alone.
    assert storage.reopen().head().clean


async def test_a_live_holder_is_not_taken_over() -> None:
    """Opening what a live holder has is refused and changes nothing."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        with pytest.raises(StorageHeldError):
            make_session(storage.reopen(), holder_id="other")
        await new_conversation(session)


async def test_a_close_that_fails_leaves_the_store_to_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the closing mark cannot be stored it is reported, and the next opening recovers."""
    caplog.set_level(logging.WARNING)
    inner = MemoryStorage()
    storage = FaultyStorage(inner)
    async with open_test_session(storage) as session:
        await new_conversation(session)
        storage.add(Fault.lose())
    assert "without the closing mark" in caplog.text
    assert not inner.reopen().head().clean


@pytest.mark.parametrize("operation", ["apply", "release"])
async def test_a_closing_mark_that_is_refused_is_tried_again(
    operation: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full for a while leaves the session as cleanly closed as any other."""
    inner = MemoryStorage()
    storage = FaultyStorage(inner)
    async with open_test_session(storage) as session:
        await new_conversation(session)
        storage.add(Fault.refuse(operation, times=5))
    assert caplog.text == ""
    head, holder = inner.reopen().head(), inner.reopen().holder()
    assert head.clean
    assert holder is not None
    assert holder.released


@pytest.mark.parametrize(("given_up", "seconds"), [(False, 30.0), (True, 0.0)])
async def test_a_closing_mark_is_tried_as_long_as_the_line_tries(
    given_up: bool,
    seconds: float,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then the close ends without it; and at once where the line has given up before."""
    inner = MemoryStorage()
    storage = FaultyStorage(inner)
    settings = Settings(storage_retry_seconds=30.0)
    async with open_test_session(storage, settings=settings) as session:
        conversation = await new_conversation(session)
        storage.add(Fault.refuse(times=1_000_000))
        if given_up:
            with pytest.raises(StorageRefusedError):
                await commit_note(session, conversation, "a")
        began = trio.current_time()
    assert trio.current_time() - began == pytest.approx(seconds)
    assert caplog.text.count("without the closing mark") == 1
    assert not inner.reopen().head().clean


async def test_a_long_log_is_moved_into_the_file(tmp_path: Path) -> None:
    """The log of a store is moved while the session works, and begins anew."""
    # C073
    path = tmp_path / "session.sqlite"
    storage = FaultyStorage(SqliteStorage(path))
    async with open_test_session(storage, blocking=ThreadBlocking()) as session:
        conversation = await new_conversation(session)
        log = path.with_name("session.sqlite-wal")
        text = "x" * 2_000

        def many(tx: Transaction) -> None:
            for _ in range(200):
                tx.append(conversation, Note(text))

        sizes: list[int] = []
        for number in range(1, 31):
            await session.run(session.transaction(), many)
            # Five such commits are due for a checkpoint, which is made in two steps.
            while storage.count("checkpoint") < number // 5 * 2:
                await trio.lowlevel.checkpoint()
            sizes.append(log.stat().st_size)
        written = 30 * 200 * len(text)
        assert max(sizes) < written / 2
        assert len(await session.history(conversation, limit=100_000)) == 30 * 200


async def test_a_log_that_stays_large_is_reported_once_with_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """wal_bytes_warn: above it the reader is named, once; at it, it is said to be small again."""
    # C073
    caplog.set_level(logging.WARNING)
    path = tmp_path / "session.sqlite"
    limit = 100 * 4_120
    for name, value in (("WAL_BYTES_WARN", limit), ("_WAL_PAGES_MAX", 50), ("_STUCK_SECONDS", 0.0)):
        monkeypatch.setattr(f"pidurable.session._service.{name}", value)
    storage = SqliteStorage(path)
    reader = subprocess.Popen(  # noqa: ASYNC220 - read with what blocks, beside threads
        [sys.executable, "-c", READ, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    async with open_test_session(storage, blocking=ThreadBlocking()) as session:
        service = session._services
        await service._report_log(limit)
        assert caplog.text == ""
        conversation = await new_conversation(session)
        reader.stdin.write(b"\n")
        reader.stdin.flush()
        reader.stdout.readline()

        def many(tx: Transaction) -> None:
            for _ in range(1_100):
                tx.append(conversation, Note("x" * 400))

        for _ in range(3):
            await session.run(session.transaction(), many)
            while not service._log_large:
                await trio.lowlevel.checkpoint()
        stuck = path.with_name("session.sqlite-wal").stat().st_size
        reader.communicate()
        while "small again" not in caplog.text:
            await trio.lowlevel.checkpoint()
        free = path.with_name("session.sqlite-wal").stat().st_size
    assert stuck > limit >= free
    assert caplog.text.count("has grown to") == 1
    assert caplog.text.count("small again") == 1
    if sys.platform == "linux":
        assert f"because process {reader.pid} (" in caplog.text


async def test_a_checkpoint_that_fails_is_reported_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A checkpoint that fails is reported, hurts no commit, and the next one comes."""
    caplog.set_level(logging.WARNING)
    storage = FaultyStorage(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        storage.add(Fault.refuse("checkpoint"))

        def many(tx: Transaction) -> None:
            for _ in range(1_100):
                tx.append(conversation, Note("x"))

        for _ in range(2):
            await session.run(session.transaction(), many)
            await wait_all_tasks_blocked()
    assert caplog.text.count("a checkpoint failed") == 1
    assert storage.count("checkpoint") >= 3


async def test_a_checkpoint_that_the_close_overtakes_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A store that is closed before its checkpoint begins leaves no warning behind."""
    caplog.set_level(logging.WARNING)
    storage = FaultyStorage(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        storage.add(Fault.refuse("checkpoint"))

        def many(tx: Transaction) -> None:
            for _ in range(1_100):
                tx.append(conversation, Note("x"))

        await session.run(session.transaction(), many)
        session.line.refuse_new()
        await wait_all_tasks_blocked()

    assert storage.count("checkpoint") >= 1
    assert caplog.text == ""


async def test_commits_share_a_flush_in_the_writer_thread(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    """With a real thread and file, whoever comes while a batch is held shares the next one."""
    storage = FaultyStorage(SqliteStorage(tmp_path / "session.sqlite"))
    async with open_test_session(storage, blocking=ThreadBlocking()) as session:
        conversation = await new_conversation(session)
        gate = Gate()
        storage.add(Fault.hold(gate))
        before = storage.count("apply")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit_note, session, conversation, "first")
            await trio.to_thread.run_sync(gate.reached.wait)
            for number in range(40):
                nursery.start_soon(commit_note, session, conversation, f"{number}")
            await wait_all_tasks_blocked()
            gate.release()
        assert storage.count("apply") - before == 2


async def test_a_dead_process_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    """What was answered before the storage froze is there after reopening, nothing else is."""
    path = tmp_path / "session.sqlite"
    inner = SqliteStorage(path)
    storage = FaultyStorage(inner)
    session = make_session(storage, blocking=ThreadBlocking())
    async with serving(session):
        conversation = await new_conversation(session)
        answered = [await commit_note(session, conversation, f"{n}") for n in range(5)]
        storage.freeze()
        with pytest.raises(SessionPoisonedError):
            await commit_note(session, conversation, "lost")
    await session.close(list)
    async with open_test_session(SqliteStorage(path), blocking=ThreadBlocking()) as again:
        assert [e.id for e in await again.history(conversation)] == answered
        later = await commit_note(again, conversation, "later")
        assert later > answered[-1]


async def test_settings_decide_how_often_a_sign_of_life_is_given(
    autojump_clock: MockClock,
) -> None:
    """The heartbeat and the lease follow the settings."""
    storage = FaultyStorage(MemoryStorage())
    settings = Settings(heartbeat_seconds=1, lease_seconds=3)
    async with open_test_session(storage, settings=settings) as session:
        await trio.sleep(10.5)
        assert storage.count("heartbeat") == 10
        storage.add(Fault.refuse("heartbeat", times=100))
        await trio.sleep(3)
        assert not session.confirmed()


def _lock_files(folder: Path) -> list[str]:
    return [each.name for each in folder.glob("*.lock.*")]


async def test_a_replaced_holder_takes_its_lock_file_with_it(tmp_path: Path) -> None:
    """No record names the file any more, so nobody else would ever remove it."""
    path = tmp_path / "session.sqlite"
    first = make_session(SqliteStorage(path))
    second = make_session(SqliteStorage(path, create=False), takeover=True, holder_id="other")
    with pytest.raises(HolderLostError):
        await new_conversation(first)
    await first.close(list)
    assert _lock_files(tmp_path) == ["session.sqlite.lock.2"]
    await second.close(list)
    assert _lock_files(tmp_path) == []


async def test_a_close_that_comes_after_a_takeover_stores_nothing_and_tidies_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A holder that learns only by closing that it was replaced leaves no file behind either."""
    path = tmp_path / "session.sqlite"
    async with open_test_session(SqliteStorage(path)):
        other = SqliteStorage(path)
        other.acquire(claim(), takeover=True)

    assert "closed without the closing mark" in caplog.text
    assert "epoch 1 was replaced by 2" in caplog.text
    assert not other.head().clean
    assert _lock_files(tmp_path) == ["session.sqlite.lock.2"]
    other.release(2)
    other.close()
