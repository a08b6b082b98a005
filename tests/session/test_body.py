"""Bodies that take long, and Ctrl-C: reported, cancelled, and never half a commit."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest
import trio
from session_support import (
    Note,
    Recorder,
    append_note,
    commit_note,
    new_conversation,
    open_test_session,
    stored_notes,
)
from trio.testing import MockClock

from pidurable.errors import CommitBodyTimeoutError, StorageRefusedError
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.storage import MemoryStorage
from pidurable.testing import Fault, FaultyStorage


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "commit body" in r.getMessage()]


async def test_a_slow_block_is_reported_once_with_its_place(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A block over 250 ms is reported once, with its place in the code; a quick one never."""
    caplog.set_level(logging.WARNING)
    async with open_test_session(MemoryStorage()) as session:
        async with session.body(session.transaction()):
            await trio.sleep(0.2)
        await trio.sleep(5)
        assert reports(caplog) == []
        async with session.body(session.transaction()):
            await trio.sleep(2)
        await trio.sleep(5)
    (report,) = reports(caplog)
    assert "test_body.py" in report


async def test_a_slow_function_is_reported_once_with_its_place(
    mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A body of `run` over 250 ms is reported once, with its place in the code."""
    caplog.set_level(logging.WARNING)
    async with open_test_session(MemoryStorage()) as session:

        def slow(tx: Transaction) -> None:
            mock_clock.jump(0.3)

        await session.run(session.transaction(), slow)
    (report,) = reports(caplog)
    assert "test_body.py" in report
    assert "slow" in report


async def test_a_block_over_10_s_is_cancelled_and_not_stored(autojump_clock: MockClock) -> None:
    """A block over 10 s is cancelled and not stored, and the line goes on."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)

        async def stuck() -> None:
            async with session.body(session.transaction(), place="the test") as tx:
                tx.append(conversation, Note("never"))
                await trio.sleep_forever()

        started = trio.current_time()
        with pytest.raises(CommitBodyTimeoutError, match="10 s at the test"):
            await stuck()
        assert trio.current_time() - started == pytest.approx(10.0)
        await commit_note(session, conversation, "next")
        assert stored_notes(storage, conversation) == ["next"]


async def test_a_block_that_waits_for_another_commit_ends(autojump_clock: MockClock) -> None:
    """A block that waits for another task's commit is ended by its limit, not hung for ever."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        wanted, answered = trio.Event(), trio.Event()

        async def other() -> None:
            await wanted.wait()
            await commit_note(session, conversation, "other")
            answered.set()

        async def waits() -> None:
            async with session.body(session.transaction()):
                wanted.set()
                await answered.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            with pytest.raises(CommitBodyTimeoutError):
                await waits()
        assert stored_notes(storage, conversation) == ["other"]


async def test_a_block_that_shields_itself_is_reported_every_10_s(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A block that shields itself is reported again every 10 s, and stored when it ends."""
    caplog.set_level(logging.WARNING)
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        async with session.body(session.transaction()) as tx:
            with trio.CancelScope(shield=True):
                await trio.sleep(45)
            tx.append(conversation, Note("kept"))
        assert stored_notes(storage, conversation) == ["kept"]
    assert len(reports(caplog)) == 5


async def test_an_error_beside_the_cancellation_is_kept(autojump_clock: MockClock) -> None:
    """What else a timed out block raised leaves it; the cancellation alone is replaced."""
    async with open_test_session(MemoryStorage()) as session:

        async def fails_late() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError("in the clean-up")

        async def block() -> None:
            async with session.body(session.transaction()), trio.open_nursery() as nursery:
                nursery.start_soon(fails_late)
                nursery.start_soon(trio.sleep_forever)

        with pytest.RaisesGroup(KeyError):
            await block()
        await new_conversation(session)


# --- Ctrl-C -----------------------------------------------------------------------------------


def run_interrupted(main: Callable[[Session, int], Any], storage: Any) -> None:
    """Run `main` in a run of its own, out of which Ctrl-C comes, on a session that is closed."""

    async def run() -> None:
        async with open_test_session(storage) as session:
            conversation = await new_conversation(session)
            await main(session, conversation)
            # What was protected is delivered at the next checkpoint of the main task.
            await trio.sleep_forever()

    with pytest.raises(KeyboardInterrupt):
        trio.run(run, clock=MockClock(autojump_threshold=0))


def test_ctrl_c_while_publishing_leaves_no_half() -> None:
    """Ctrl-C in the middle of publishing comes out after it, and everybody was told."""
    storage = MemoryStorage()
    recorder = Recorder()

    def interrupt(tx: Any) -> None:
        if any(entry.kind == "test.note" for entry in tx.entries):
            signal.raise_signal(signal.SIGINT)

    async def main(session: Session, conversation: int) -> None:
        recorder.on_committed = interrupt
        session.participants.append(recorder)
        session.participants.append(late := Recorder())
        await commit_note(session, conversation, "whole")
        assert recorder.names() == late.names() == ["joined", "committed"]

    run_interrupted(main, storage)
    assert stored_notes(storage.reopen(), 1) == ["whole"]


def test_ctrl_c_ends_a_body_that_loops_for_ever() -> None:
    """Ctrl-C inside a body rolls it back and leaves the line usable."""
    storage = MemoryStorage()

    async def main(session: Session, conversation: int) -> None:
        def body(tx: Transaction) -> None:
            tx.append(conversation, Note("never"))
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it was not interrupted")

        try:
            await session.run(session.transaction(), body)
        finally:
            await commit_note(session, conversation, "after")

    run_interrupted(main, storage)
    assert stored_notes(storage.reopen(), 1) == ["after"]


def test_ctrl_c_ends_the_wait_for_a_full_disk() -> None:
    """Ctrl-C while the storage refuses ends the trying: nothing is stored, nothing is poisoned."""
    storage = FaultyStorage(MemoryStorage())

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        raise StorageRefusedError(storage.store, "disk full")

    async def main(session: Session, conversation: int) -> None:
        storage.add(Fault.call(interrupted))
        storage.add(Fault.refuse(at=2, times=5))
        try:
            await session.run(session.transaction(), append_note(conversation, "never"))
        finally:
            assert session.line.poison is None
            storage.clear()
            await commit_note(session, conversation, "after")

    run_interrupted(main, storage)
    inner = storage.inner
    assert isinstance(inner, MemoryStorage)
    assert stored_notes(inner.reopen(), 1) == ["after"]
