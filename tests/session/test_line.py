"""The commit line: atomic, invisible until durable, in order, and certain about what is stored.

A batch closes after 20 ms of bodies, which a loaded machine may take at any moment. Where a test
counts on one batch its clock stands still (`mock_clock`).
"""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import trio
from session_support import (
    HeldBlocking,
    Note,
    Recorder,
    append_note,
    commit_note,
    line_held,
    make_session,
    new_conversation,
    open_test_session,
    stored_notes,
)
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.errors import (
    HolderLostError,
    InternalError,
    InvalidArgumentError,
    NestedCommitError,
    SessionClosedError,
    SessionPoisonedError,
    StorageAccessError,
    StorageRefusedError,
    TransactionClosedError,
)
from pidurable.records._limits import BATCH_BODIES_MAX, Settings
from pidurable.session._participants import Participant
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.storage import Batch, MemoryStorage
from pidurable.testing import Fault, FaultyStorage


class Batches(FaultyStorage):
    """Keeps the batches that it was sent."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self.sent: list[Batch] = []

    def apply(self, batch: Batch) -> None:
        self.sent.append(batch)
        super().apply(batch)


async def test_a_commit_is_answered_and_published_only_when_it_is_durable() -> None:
    """A commit is answered, and anybody sees it, only when it is durable."""
    blocking = HeldBlocking()
    storage = MemoryStorage()
    async with open_test_session(storage, blocking=blocking) as session:
        conversation = await new_conversation(session)
        seq = session.line.published_seq
        answers: list[int] = []

        async def commit() -> None:
            answers.append(await commit_note(session, conversation, "a"))

        async with trio.open_nursery() as nursery:
            blocking.hold()
            nursery.start_soon(commit)
            await wait_all_tasks_blocked()

            assert blocking.held == 1
            assert answers == []
            assert session.line.published_seq == seq
            assert await session.history(conversation) == []
            blocking.release()
        assert len(answers) == 1
        assert [e.id for e in await session.history(conversation)] == answers


async def test_who_read_staged_state_is_answered_with_the_batch() -> None:
    """A read-only or failing body that read staged state is answered when that is durable."""
    blocking = HeldBlocking()
    async with open_test_session(MemoryStorage(), blocking=blocking) as session:
        answers: list[str] = []

        async def create(tx: Transaction) -> None:
            await session.run(tx, lambda tx: tx.add_conversation())
            answers.append("created")

        async def look() -> None:
            made = await session.run(
                session.transaction(), lambda tx: session.staged_conversation(last_id())
            )
            answers.append(f"saw {made.id}")

        async def fail() -> None:
            def body(tx: Transaction) -> None:
                raise KeyError(session.staged_conversation(last_id()).id)

            with pytest.raises(KeyError):
                await session.run(session.transaction(), body)
            answers.append("failed")

        def last_id() -> int:
            return session.line.next_id - 1

        async with trio.open_nursery() as nursery:
            blocking.hold()
            async with line_held(session):
                # All of them wait for the line, and so share the next batch, in this order.
                nursery.start_soon(create, session.transaction())
                await wait_all_tasks_blocked()
                nursery.start_soon(look)
                await wait_all_tasks_blocked()
                nursery.start_soon(fail)
                await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()
            assert answers == []
            blocking.release()
        assert sorted(answers) == ["created", "failed", f"saw {last_id()}"]


async def test_a_reader_of_a_batch_that_fails_gets_its_error(mock_clock: MockClock) -> None:
    """A read-only and a failing body get the error of the batch whose state they read."""
    storage = FaultyStorage(MemoryStorage())
    settings = Settings(storage_retry_seconds=0)
    async with open_test_session(storage, settings=settings) as session:
        errors: list[BaseException] = []

        async def run(body: Any) -> None:
            try:
                await session.run(session.transaction(), body)
            except Exception as error:
                errors.append(error)

        def raises(tx: Transaction) -> None:
            raise KeyError("what it read will never be")

        async with trio.open_nursery() as nursery:
            storage.add(Fault.refuse())
            async with line_held(session):
                for body in (lambda tx: tx.add_conversation(), lambda tx: None, raises):
                    nursery.start_soon(run, body)
                    await wait_all_tasks_blocked()
        assert [type(error) for error in errors] == [StorageRefusedError] * 3


async def test_an_exception_rolls_back_and_leaves_as_it_is() -> None:
    """An exception of the body leaves unchanged, and nothing of the commit remains."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        error = ValueError("mine")

        def body(tx: Transaction) -> None:
            tx.append(conversation, Note("gone"))
            raise error

        with pytest.raises(ValueError, match="mine") as caught:
            await session.run(session.transaction(), body)
        assert caught.value is error

        async def block() -> None:
            async with session.body(session.transaction()) as tx:
                body(tx)

        with pytest.raises(ValueError, match="mine") as caught:
            await block()
        assert caught.value is error
        await commit_note(session, conversation, "kept")
        assert stored_notes(storage, conversation) == ["kept"]


async def test_a_failing_body_leaves_its_neighbours_alone(mock_clock: MockClock) -> None:
    """In one batch, a body that raises leaves no trace and the others are stored."""
    storage = Batches(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        storage.sent.clear()

        async def good(text: str) -> None:
            await commit_note(session, conversation, text)

        async def bad() -> None:
            def body(tx: Transaction) -> None:
                tx.append(conversation, Note("bad"))
                raise LookupError

            with pytest.raises(LookupError):
                await session.run(session.transaction(), body)

        async with trio.open_nursery() as nursery, line_held(session):
            for start in (lambda: good("a"), bad, lambda: good("b")):
                nursery.start_soon(start)
                await wait_all_tasks_blocked()
        assert len(storage.sent) == 1
        assert stored_notes(storage, conversation) == ["a", "b"]


async def test_commits_are_stored_in_the_order_in_which_they_arrived(
    mock_clock: MockClock,
) -> None:
    """Waiting commits run in arrival order, each with a number of its own, 256 to a batch."""
    storage = Batches(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        storage.sent.clear()
        count = BATCH_BODIES_MAX + 44
        async with trio.open_nursery() as nursery, line_held(session):
            for number in range(count):
                nursery.start_soon(commit_note, session, conversation, f"{number}")
                await wait_all_tasks_blocked()
        assert stored_notes(storage, conversation) == [str(n) for n in range(count)]
        assert [len(batch.writes) for batch in storage.sent] == [BATCH_BODIES_MAX, 44]
        history = await session.history(conversation, limit=1000)
        assert len({entry.seq for entry in history}) == count
        assert [e.seq for e in history] == sorted(e.seq for e in history)


async def test_a_batch_closes_after_20_ms_of_bodies(mock_clock: MockClock) -> None:
    """Bodies that took 20 ms together close their batch; the next ones wait for another."""
    storage = Batches(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        storage.sent.clear()

        def slow(tx: Transaction) -> None:
            mock_clock.jump(0.011)
            tx.append(conversation, Note("slow"))

        async with trio.open_nursery() as nursery, line_held(session):
            for _ in range(4):
                nursery.start_soon(session.run, session.transaction(), slow)
            await wait_all_tasks_blocked()
        assert [len(batch.writes) for batch in storage.sent] == [2, 2]


async def test_a_body_runs_in_the_context_of_its_caller() -> None:
    """A body sees its own caller's contextvars, whoever runs it, and changes nobody else's."""
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")
    async with open_test_session(MemoryStorage()) as session:
        seen: list[tuple[str, str]] = []

        async def commit(mine: str) -> None:
            name.set(mine)
            got = await session.run(session.transaction(), lambda tx: name.get())
            seen.append((mine, got))

        async with trio.open_nursery() as nursery, line_held(session):
            for number in range(5):
                nursery.start_soon(commit, f"{number}")
            await wait_all_tasks_blocked()
        assert sorted(seen) == [(f"{n}", f"{n}") for n in range(5)]


async def test_whoever_is_runnable_joins_before_the_flush(mock_clock: MockClock) -> None:
    """Commits of tasks that are runnable at the same time share one flush."""
    storage = Batches(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        storage.sent.clear()
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(commit_note, session, conversation, f"{number}")
        assert len(storage.sent) == 1


# --- cancelling -------------------------------------------------------------------------------


async def test_cancelled_while_it_waits_for_the_line_a_commit_is_not_stored() -> None:
    """A commit that is cancelled in the queue raises Cancelled and is not stored."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        scope = trio.CancelScope()

        async def commit() -> None:
            with scope:
                await commit_note(session, conversation, "never")

        async with trio.open_nursery() as nursery, line_held(session):
            nursery.start_soon(commit)
            await wait_all_tasks_blocked()
            scope.cancel()
        assert scope.cancelled_caught
        assert stored_notes(storage, conversation) == []


async def test_cancelled_after_its_body_a_commit_is_stored_and_answered() -> None:
    """Once its body has returned, a cancelled caller waits, and is answered."""
    blocking = HeldBlocking()
    storage = MemoryStorage()
    async with open_test_session(storage, blocking=blocking) as session:
        conversation = await new_conversation(session)
        scope = trio.CancelScope()
        answers: list[int] = []

        async def commit() -> None:
            with scope:
                answers.append(await commit_note(session, conversation, "kept"))

        async with trio.open_nursery() as nursery:
            blocking.hold()
            nursery.start_soon(commit)
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert blocking.held == 1
            blocking.release()
        assert len(answers) == 1
        assert stored_notes(storage, conversation) == ["kept"]


async def test_cancelled_inside_its_body_a_commit_is_not_stored() -> None:
    """Cancellation inside an `async with` body rolls back."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        with trio.CancelScope() as scope:
            async with session.body(session.transaction()) as tx:
                tx.append(conversation, Note("never"))
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        await commit_note(session, conversation, "kept")
        assert stored_notes(storage, conversation) == ["kept"]


async def test_a_commit_is_always_a_checkpoint() -> None:
    """A commit in a cancelled scope raises Cancelled, also where nobody else wants the line."""
    async with open_test_session(MemoryStorage()) as session:
        with trio.CancelScope() as scope:
            scope.cancel()
            await session.run(session.transaction(), lambda tx: tx.add_conversation())
        assert scope.cancelled_caught
        assert session.line.published_seq == 0


# --- mistakes of bodies -----------------------------------------------------------------------


async def test_a_commit_in_a_commit_is_refused() -> None:
    """A commit inside a body is refused, from a nursery and from a thread too."""
    async with open_test_session(MemoryStorage()) as session:

        async def commit() -> None:
            await session.run(session.transaction(), lambda tx: None)

        async def open_body() -> None:
            async with session.body(session.transaction()):
                raise AssertionError("it got the line")

        async with session.body(session.transaction()):
            with pytest.raises(NestedCommitError):
                await commit()
            with pytest.raises(NestedCommitError):
                await open_body()
            with pytest.RaisesGroup(NestedCommitError):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(commit)
            with pytest.raises(NestedCommitError):
                await trio.to_thread.run_sync(lambda: trio.from_thread.run(commit))
        await commit()


async def test_a_task_that_outlives_the_body_may_commit() -> None:
    """A task started in a body may commit once that body has ended."""
    async with open_test_session(MemoryStorage()) as session:
        ended = trio.Event()

        async def later() -> None:
            await ended.wait()
            await new_conversation(session)

        async with trio.open_nursery() as nursery:
            async with session.body(session.transaction()):
                nursery.start_soon(later)
            ended.set()
        assert session.line.published_seq == 1


async def test_an_async_function_is_no_body_for_run() -> None:
    """`run` refuses an async function, stores nothing, and says what to use."""
    async with open_test_session(MemoryStorage()) as session:

        async def body(tx: Transaction) -> None:
            raise AssertionError("it ran")

        with pytest.raises(InvalidArgumentError, match="async with"):
            await session.run(session.transaction(), body)


async def test_a_transaction_dies_with_its_body() -> None:
    """Whatever is done to a transaction after its body raises TransactionClosedError."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        kept: list[Transaction] = []
        await session.run(session.transaction(), kept.append)

        async def block() -> None:
            async with session.body(session.transaction()) as tx:
                kept.append(tx)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await block()
        for tx in kept:
            for use in (
                lambda tx=tx: tx.append(conversation, Note("late")),
                lambda tx=tx: tx.add_conversation(),
                lambda tx=tx: tx.draw_id(),
            ):
                with pytest.raises(TransactionClosedError):
                    use()


async def test_a_body_that_swallowed_a_failed_read_does_not_commit() -> None:
    """A body that caught a failed read gets that error instead of its commit."""
    storage = FaultyStorage(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)

        def body(tx: Transaction) -> None:
            with pytest.raises(StorageAccessError):
                session.storage.entry(1)
            tx.append(conversation, Note("stands on nothing"))

        storage.add(Fault.fail("entry"))
        with pytest.raises(StorageAccessError, match="disk I/O"):
            await session.run(session.transaction(), body)

        storage.add(Fault.fail("entry"))
        with pytest.raises(StorageAccessError, match="disk I/O"):
            async with session.body(session.transaction()) as tx:
                body(tx)
        assert stored_notes(storage, conversation) == []
        await commit_note(session, conversation, "and the session goes on")


async def test_two_bodies_of_a_batch_cannot_claim_one_key(mock_clock: MockClock) -> None:
    """A unique key that an earlier body of the batch has claimed is refused, that body's stays."""
    async with open_test_session(MemoryStorage()) as session:
        outcomes: list[object] = []

        async def claim() -> None:
            try:
                made = await session.run(
                    session.transaction(), lambda tx: tx.add_conversation(owner=7, key="only")
                )
                outcomes.append(made.key)
            except InternalError as error:
                outcomes.append(error)

        async with trio.open_nursery() as nursery, line_held(session):
            nursery.start_soon(claim)
            nursery.start_soon(claim)
            await wait_all_tasks_blocked()
        assert sorted(isinstance(each, InternalError) for each in outcomes) == [False, True]
        await new_conversation(session)


# --- a storage that refuses -------------------------------------------------------------------


async def test_a_refused_batch_is_sent_again_before_any_other_body_runs(
    autojump_clock: MockClock,
) -> None:
    """A batch refused for certain is sent again, the same, before any other body runs."""
    # C072
    storage = Batches(MemoryStorage())
    blocking = HeldBlocking()
    async with open_test_session(storage, blocking=blocking) as session:
        conversation = await new_conversation(session)
        storage.sent.clear()
        storage.add(Fault.refuse(times=3, problem="database is locked"))
        sent_when_it_ran: list[int] = []

        def second(tx: Transaction) -> None:
            sent_when_it_ran.append(len(storage.sent))
            tx.append(conversation, Note("second"))

        async with trio.open_nursery() as nursery:
            blocking.hold()
            nursery.start_soon(commit_note, session, conversation, "first")
            while not blocking.held:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(session.run, session.transaction(), second)
            blocking.release()
        assert sent_when_it_ran == [4]
        assert len(storage.sent) == 5
        assert all(batch is storage.sent[0] for batch in storage.sent[:4])
        assert stored_notes(storage, conversation) == ["first", "second"]


async def test_a_batch_that_stays_refused_fails_whole_and_later_ones_go_on(
    autojump_clock: MockClock,
) -> None:
    """After the retry time the whole batch fails, reservation is told, and later commits go on."""
    storage = FaultyStorage(MemoryStorage())
    settings = Settings(storage_retry_seconds=30.0)
    async with open_test_session(storage, settings=settings) as session:
        recorder = Recorder()
        session.participants.append(recorder)
        conversation = await new_conversation(session)
        storage.add(Fault.refuse(times=1_000_000))
        errors: list[BaseException] = []

        async def commit(text: str) -> None:
            try:
                await commit_note(session, conversation, text)
            except StorageRefusedError as error:
                errors.append(error)

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for text in ("a", "b", "c"):
                nursery.start_soon(commit, text)
        assert trio.current_time() - started == pytest.approx(30.0)
        assert len(errors) == 3
        assert len({id(error) for error in errors}) == 3
        assert recorder.names()[-2:] == ["reverted", "refusing"]
        assert recorder.events[-1] == ("refusing", True)

        storage.clear()
        await commit_note(session, conversation, "d")
        assert ("refusing", False) in recorder.events
        assert stored_notes(storage, conversation) == ["d"]
        assert session.line.poison is None


async def test_a_participant_that_cannot_revert_poisons_and_lets_nobody_wait() -> None:
    """Everybody of the batch, and behind it, is told; so are the participants behind that one."""
    storage = FaultyStorage(MemoryStorage())
    settings = Settings(storage_retry_seconds=0)
    async with open_test_session(storage, settings=settings) as session:
        behind = Recorder()

        class Broken(Recorder):
            def reverted(self) -> None:
                raise LookupError("nothing to revert")

            def poisoned(self, error: SessionPoisonedError) -> None:
                raise LookupError("nothing to poison")

        session.participants.append(Broken())
        session.participants.append(behind)
        conversation = await new_conversation(session)
        storage.add(Fault.refuse(times=1))
        errors: list[SessionPoisonedError] = []

        async def commit(text: str) -> None:
            try:
                await commit_note(session, conversation, text)
            except SessionPoisonedError as error:
                errors.append(error)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for text in ("a", "b", "c"):
                    nursery.start_soon(commit, text)
        assert [str(error).count("reverting a batch") for error in errors] == [1, 1, 1]
        assert isinstance(errors[0].__cause__, LookupError)
        assert behind.names().count("poisoned") == 1
        assert stored_notes(storage, conversation) == []


@pytest.mark.parametrize("fault", [Fault.lose(), Fault.store_then_raise()], ids=["lost", "stored"])
async def test_an_uncertain_error_poisons_the_session(fault: Fault) -> None:
    """After an error that may have stored, nothing is published, sent or served any more."""
    storage = FaultyStorage(MemoryStorage())
    blocking = HeldBlocking()
    async with open_test_session(storage, blocking=blocking) as session:
        recorder = Recorder()
        session.participants.append(recorder)
        conversation = await new_conversation(session)
        seq = session.line.published_seq
        storage.add(fault)
        errors: list[SessionPoisonedError] = []

        async def commit(text: str) -> None:
            try:
                await commit_note(session, conversation, text)
            except SessionPoisonedError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            blocking.hold()
            for text in ("a", "b"):
                nursery.start_soon(commit, text)
            await wait_all_tasks_blocked()
            nursery.start_soon(commit, "waits for the line")
            await wait_all_tasks_blocked()
            blocking.release()
        assert len(errors) == 3
        assert all("disk I/O error" in str(error) for error in errors)
        assert any(isinstance(error.__cause__, StorageAccessError) for error in errors)
        assert session.line.published_seq == seq
        assert recorder.names().count("committed") == 1
        assert recorder.names()[-2:] == ["reverted", "poisoned"]
        sent = storage.count("apply")
        with pytest.raises(SessionPoisonedError):
            await commit_note(session, conversation, "later")
        with pytest.raises(SessionPoisonedError):
            async with session.body(session.transaction()):
                raise AssertionError("it got the line")
        assert storage.count("apply") == sent
    assert storage.count("apply") == sent


async def test_a_failed_read_only_answer_after_poison_is_not_given() -> None:
    """A body that was running when the session was poisoned is not answered."""
    async with open_test_session(MemoryStorage()) as session:
        poison = SessionPoisonedError("s", "because")
        with pytest.raises(SessionPoisonedError, match="because"):
            async with session.body(session.transaction()):
                session.line.set_poison(poison)
        with pytest.raises(SessionPoisonedError, match="because"):
            await new_conversation(session)


async def test_nothing_is_published_after_another_holder_was_seen() -> None:
    """A batch that became durable while the loss of the session was noticed is not published."""
    blocking = HeldBlocking()
    storage = MemoryStorage()
    async with open_test_session(storage, blocking=blocking) as session:
        recorder = Recorder()
        session.participants.append(recorder)
        errors: list[BaseException] = []

        async def commit() -> None:
            try:
                await new_conversation(session)
            except HolderLostError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            blocking.hold()
            nursery.start_soon(commit)
            await wait_all_tasks_blocked()
            session.line.set_poison(HolderLostError("s", 1, 2))
            blocking.release()
        assert len(errors) == 1
        assert "committed" not in recorder.names()
        assert session.line.published_seq == 0


async def test_a_replaced_holder_cannot_commit() -> None:
    """A commit of a holder that was taken over raises HolderLostError and poisons."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        async with open_test_session(
            storage.reopen(), takeover=True, holder_id="other"
        ) as successor:
            with pytest.raises(HolderLostError):
                await commit_note(session, conversation, "stale")
            with pytest.raises(HolderLostError):
                await commit_note(session, conversation, "again")
            await commit_note(successor, conversation, "ours")
            assert stored_notes(storage.reopen(), conversation) == ["ours"]


@pytest.mark.parametrize("where", ["joined", "committed"])
async def test_a_bug_of_a_participant_poisons(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A participant that raises where it must not poisons the session, and hangs nobody."""
    async with open_test_session(MemoryStorage()) as session:
        recorder = Recorder()

        def bug(tx: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(recorder, where, bug)
        session.participants.append(recorder)
        with pytest.raises(SessionPoisonedError, match="a bug"):
            await new_conversation(session)
        with pytest.raises(SessionPoisonedError, match="a bug"):
            await new_conversation(session)


async def test_participants_are_asked_in_order_as_long_as_they_take_part() -> None:
    """Each where it has something to do; who is put first is asked first, who left never again."""
    asked: list[str] = []

    class Named(Participant):
        def __init__(self, name: str) -> None:
            self.name = name

        def committed(self, tx: Any) -> None:
            asked.append(self.name)

    class Refuses(Named):
        def check_staged(self, tx: Any) -> None:
            asked.append(f"{self.name} checks")

    async with open_test_session(MemoryStorage()) as session:
        session.participants.append(Named("second"))
        session.participants.append(leaves := Refuses("leaves"))
        session.participants.put_first(Refuses("first"))
        await new_conversation(session)
        assert asked == ["first checks", "leaves checks", "first", "second", "leaves"]
        asked.clear()
        session.participants.remove(leaves)
        await new_conversation(session)
        assert asked == ["first checks", "first", "second"]


async def test_a_participant_may_refuse_a_commit() -> None:
    """What a participant raises on the line refuses that commit alone."""
    async with open_test_session(MemoryStorage()) as session:
        recorder = Recorder()
        session.participants.append(recorder)

        def refuse(tx: Any) -> None:
            raise PermissionError("not this one")

        recorder.refuse = refuse
        with pytest.raises(PermissionError):
            await new_conversation(session)
        recorder.refuse = lambda tx: None
        await new_conversation(session)
        assert recorder.names() == ["joined", "committed"]


# --- closing, numbers -------------------------------------------------------------------------


async def test_closing_refuses_new_commits_and_finishes_the_accepted() -> None:
    """Close refuses new commits, lets the accepted finish, and leaves its mark."""
    blocking = HeldBlocking()
    storage = MemoryStorage()
    session = make_session(storage, blocking=blocking)
    conversation = await new_conversation(session)
    async with trio.open_nursery() as nursery:
        blocking.hold()
        nursery.start_soon(commit_note, session, conversation, "in the storage")
        await wait_all_tasks_blocked()
        nursery.start_soon(commit_note, session, conversation, "in the queue")
        await wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            nursery.start_soon(session.close, list)
            await wait_all_tasks_blocked()
            with pytest.raises(SessionClosedError):
                await commit_note(session, conversation, "too late")
            scope.cancel()
        blocking.release()
    reopened = storage.reopen()
    assert stored_notes(reopened, conversation) == ["in the storage", "in the queue"]
    assert reopened.head().clean


async def test_closing_is_shielded() -> None:
    """A cancelled close closes all the same, with its mark."""
    storage = MemoryStorage()
    session = make_session(storage)
    await new_conversation(session)
    with trio.CancelScope() as scope:
        scope.cancel()
        await session.close(list)
    assert storage.reopen().head().clean


async def run_once(session: Session) -> tuple[int, int]:
    """The id and the sequence number of one small commit."""
    return await session.run(session.transaction(), lambda tx: (tx.add_conversation().id, tx.seq))


@pytest.mark.parametrize("durability", ["power", "process"])
async def test_numbers_are_never_used_twice(durability: str) -> None:
    """Ids and sequence numbers go up, over rollbacks, failed batches, and unclean ends."""
    storage = FaultyStorage(MemoryStorage())
    settings = Settings(storage_retry_seconds=0)
    seen: list[tuple[int, int]] = []
    async with open_test_session(storage, settings=settings, durability=durability) as session:
        seen.append(await run_once(session))

        def fails(tx: Transaction) -> None:
            seen.append((tx.add_conversation().id, tx.seq))
            raise KeyError

        with pytest.raises(KeyError):
            await session.run(session.transaction(), fails)
        storage.add(Fault.refuse())
        with pytest.raises(StorageRefusedError):
            await run_once(session)
        seen.append(await run_once(session))
    inner = storage.inner
    assert isinstance(inner, MemoryStorage)
    third = inner.reopen()
    async with open_test_session(third, durability=durability) as session:
        clean = await run_once(session)
        assert clean[1] < 100
        seen.append(clean)
        # The process dies: nothing says that it has closed.
        killed = third.reopen()
        head = killed.head()
        async with open_test_session(killed, takeover=True, durability=durability) as after:
            number, seq = await run_once(after)
            assert seq > head.seq + 2**20
            assert (number > head.next_id + 2**20 - 1) == (durability == "process")
            seen.append((number, seq))
    ids = [id for id, _ in seen]
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids)
    stored = [seq for index, (_, seq) in enumerate(seen) if index != 1]
    assert stored == sorted(set(stored))


async def test_a_batch_is_flushed_if_one_of_its_members_is(mock_clock: MockClock) -> None:
    """Progress alone is not flushed; together with one flushed commit it is."""
    storage = Batches(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        storage.sent.clear()
        progress = session.transaction(flush=False)
        await session.run(progress, append_note(conversation, "progress"))
        async with trio.open_nursery() as nursery:
            for flush in (False, True):
                tx = session.transaction(flush=flush)
                nursery.start_soon(session.run, tx, append_note(conversation, "both"))
        assert [batch.flush for batch in storage.sent] == [False, True]


@pytest.fixture(autouse=True)
def virtual_time(mock_clock: MockClock) -> None:
    """Time stands still unless a test moves it."""
