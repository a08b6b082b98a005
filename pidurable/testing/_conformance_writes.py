"""Conformance: batches are whole, fenced and exact, and every kind of write does what it says."""

from __future__ import annotations

from typing import Any

from pidurable.errors import HolderLostError, InternalError
from pidurable.storage import Batch, ConversationRow, Op, SignalRow, StartRow
from pidurable.testing._conformance_base import (
    NOW_US,
    Store,
    claim,
    conformance_case,
    conversation,
    document,
    entry,
    equal,
    ids,
    raises,
    revision,
    signal,
    submission,
    submission_row,
    submission_state,
    task,
    task_row,
    task_state,
)


@conformance_case
def a_batch_updates_the_head(store: Store) -> None:
    """Sequence and next id are those of the last batch; uuid, creation and epoch stay."""
    storage = store.hold()
    store.write(conversation(1), seq=7, next_id=41)
    head = storage.head()
    equal(head._replace(clean=False), store.head._replace(seq=7, next_id=41, clean=False))


@conformance_case
def an_empty_batch_updates_the_head_alone(store: Store) -> None:
    """A batch without rows is how a probe is written."""
    storage = store.hold()
    store.write(seq=5, next_id=6)
    equal((storage.head().seq, storage.head().next_id), (5, 6))


@conformance_case
def a_batch_marks_the_store_unclean_and_the_closing_one_clean(store: Store) -> None:
    """The mark is that of the newest batch."""
    storage = store.hold()
    store.write(conversation(1))
    equal(storage.head().clean, False)
    store.write(clean=True)
    equal(storage.head().clean, True)
    store.write(conversation(2))
    equal(storage.head().clean, False)


@conformance_case
def a_failing_batch_stores_nothing(store: Store) -> None:
    """A duplicate in the last write takes back every write before it, whatever its kind."""
    storage = store.hold()
    store.write(
        conversation(1),
        conversation(9),
        task(2, key="k", owner=1),
        signal(3, task=2, key="s"),
        submission(4, request_id="r"),
        document(5),
        revision(5, 1, base=1),
        (Op.CHECKPOINT, (2, "prepare", "1", NOW_US)),
        (Op.WAIT, (2, "{}")),
        (Op.MEMO, (2, "m", "1")),
    )
    before = _everything(store)
    batch = Batch(
        epoch=store.head.epoch,
        seq=99,
        next_id=99_999,
        flush=True,
        writes=[
            conversation(10, owner=2, key="child"),
            entry(11, head=11),
            task(12, key="other", owner=1),
            task_state(2, status=4),
            (Op.TASK_INPUT, (12, "{}")),
            (Op.CHECKPOINT, (2, "charge", "2", NOW_US)),
            (Op.CHECKPOINT_DELETE, (2,)),
            (Op.WAIT, (2, "[]")),
            (Op.WAIT_DELETE, (2,)),
            (Op.OUTCOME, (2, "{}")),
            (Op.OUTCOME_DELETE, (2,)),
            (Op.MEMO, (2, "n", "1")),
            (Op.MEMOS_DELETE, (2,)),
            (Op.SIGNALS_DELETE, (2,)),
            signal(13, task=2, key="t"),
            submission_state(4, "done", answer=11),
            (Op.DOCUMENT_RETIRE, (5, 99)),
            (Op.DOCUMENT_TERMS, (5, "rewindable", "current")),
            document(14, created_seq=99),
            revision(14, 2, base=1),
            (Op.REVISIONS_DELETE, (5, 10)),
            (Op.BLOB, ("ab" * 32, b"bytes")),
            entry(11),
        ],
    )
    raises(InternalError, lambda: storage.apply(batch))
    equal(_everything(store), before)
    store.write(entry(11))
    equal(ids(storage.entries(1)), [11], "the store can be written to afterwards")


def _everything(store: Store) -> tuple[object, ...]:
    """What the reads show of the numbers that these cases use."""
    storage = store.storage
    numbers = range(1, 20)
    return (
        storage.head(),
        [storage.conversation(id) for id in numbers],
        storage.conversation_by_key(2, "child"),
        storage.conversations_by_owner(None),
        storage.conversations_by_owner(2),
        storage.entries(1),
        storage.last_head(1),
        [storage.task(id) for id in numbers],
        storage.live_tasks(),
        storage.tasks(),
        storage.tasks(conversation=1),
        storage.keyed_tasks(1),
        storage.task_by_key(1, 1, "other"),
        [storage.task_input(id) for id in numbers],
        [storage.task_checkpoint(id) for id in numbers],
        [storage.task_wait(id) for id in numbers],
        [storage.task_outcome(id) for id in numbers],
        [storage.task_memos(id) for id in numbers],
        [storage.signals(id) for id in numbers],
        storage.live_signals(),
        storage.signal_by_key(2, "s"),
        storage.signal_by_key(2, "t"),
        [storage.submission(id) for id in numbers],
        storage.open_submissions(1),
        storage.document("app.todos", 1, 1, ""),
        storage.documents(1, 1),
        [storage.documents_as_of(1, seq=seq) for seq in (0, 1, 98, 99)],
        [storage.revisions(id) for id in numbers],
        storage.blob("ab" * 32),
    )


@conformance_case
def a_replaced_epoch_stores_nothing(store: Store) -> None:
    """A holder that was replaced gets HolderLostError with both epochs, and its batch is lost."""
    store.hold()
    store.write(conversation(1))
    other = store.other()
    successor = other.acquire(claim(holder_id="holder-2"), takeover=True)
    error = raises(HolderLostError, lambda: store.write(entry(2)))
    equal((error.epoch, error.current), (store.head.epoch, successor.epoch))
    equal(other.entries(1), [])
    equal(other.head().seq, 1)


@conformance_case
def an_epoch_that_never_was_stores_nothing(store: Store) -> None:
    """An epoch above the stored one is as wrong as one below."""
    storage = store.hold()
    batch = Batch(epoch=store.head.epoch + 1, seq=1, next_id=2, flush=True, writes=[entry(1)])
    raises(HolderLostError, lambda: storage.apply(batch))
    equal(storage.entry(1), None)


@conformance_case
def writes_of_a_batch_apply_in_order(store: Store) -> None:
    """A later write of a batch sees the earlier ones: insert, change, delete, insert again."""
    storage = store.hold()
    store.write(
        task(1),
        task_state(1, tries=1),
        task_state(1, tries=2),
        (Op.CHECKPOINT, (1, "a", "1", 1)),
        (Op.CHECKPOINT, (1, "b", "2", 2)),
        (Op.WAIT, (1, "[]")),
        (Op.WAIT_DELETE, (1,)),
        signal(5, key="k"),
        (Op.SIGNAL_DELETE, (5,)),
        signal(6, key="k"),
        document(7),
        (Op.DOCUMENT_RETIRE, (7, 2)),
        document(8, created_seq=2),
    )
    equal(storage.task(1), task_row(1, status=1, tries=2))
    equal(storage.task_checkpoint(1), ("b", "2"))
    equal(storage.task_wait(1), None)
    equal(storage.signal_by_key(1, "k"), 6)
    found = storage.document("app.todos", 1, 1, "")
    equal(found and found.id, 8)


@conformance_case
def an_unflushed_batch_is_seen_at_once_and_by_other_handles(store: Store) -> None:
    """Without a flush a batch still survives this handle, and a flushed one may follow."""
    storage = store.hold()
    store.write(conversation(1), flush=False)
    equal(ids(storage.conversations_by_owner(None)), [1])
    equal(ids(store.other().conversations_by_owner(None)), [1])
    store.write(conversation(2), flush=True)
    store.write(conversation(3), flush=False)
    equal(ids(store.other().conversations_by_owner(None)), [1, 2, 3])


@conformance_case
def a_closed_store_keeps_everything(store: Store) -> None:
    """What was applied is there when the store is opened again, without a release."""
    storage = store.hold()
    store.write(conversation(1), entry(2, messages='["hi"]'), (Op.BLOB, ("ff" * 32, b"\x00\xff")))
    storage.close()
    again = store.other()
    equal(again.conversation(1), conversation(1)[1])
    equal(again.entry(2), entry(2, messages='["hi"]')[1])
    equal(again.blob("ff" * 32), b"\x00\xff")


@conformance_case
def every_id_is_inserted_once(store: Store) -> None:
    """A second insert of an id is refused in each table."""
    store.hold()
    rows = [
        conversation(1),
        entry(1),
        task(1),
        signal(1),
        submission(1),
        document(1),
        revision(1, 1),
        (Op.OUTCOME, (1, "1")),
        (Op.MEMO, (1, "m", "1")),
    ]
    store.write(*rows)
    for row in rows:
        raises(InternalError, store.write, row)


@conformance_case
def changing_what_does_not_exist_is_refused(store: Store) -> None:
    """A state for a missing task or submission, or retiring no document, stores nothing."""
    storage = store.hold()
    store.write(conversation(1))
    for write in (
        task_state(1),
        submission_state(1, "done"),
        (Op.DOCUMENT_RETIRE, (1, 1)),
        (Op.DOCUMENT_TERMS, (1, "latest", "initial")),
    ):
        raises(InternalError, store.write, entry(5), write)
        equal(storage.entry(5), None)


@conformance_case
def a_state_among_many_must_fit_its_row(store: Store) -> None:
    """One state without a row among good neighbours fails the batch."""
    storage = store.hold()
    store.write(task(1), task(2))
    states = [task_state(1, tries=5), task_state(2, tries=5), task_state(3, tries=5)]
    raises(InternalError, lambda: store.write(*states))
    equal([row.tries for row in storage.tasks()], [0, 0])


@conformance_case
def deleting_what_does_not_exist_does_nothing(store: Store) -> None:
    """Deletes are idempotent, so that ending a task need not look first."""
    storage = store.hold()
    store.write(
        (Op.CHECKPOINT_DELETE, (1,)),
        (Op.WAIT_DELETE, (1,)),
        (Op.MEMOS_DELETE, (1,)),
        (Op.SIGNAL_DELETE, (1,)),
        (Op.SIGNALS_DELETE, (1,)),
        (Op.REVISIONS_DELETE, (1, 5)),
    )
    equal(storage.head().seq, 1)


@conformance_case
def a_child_conversation_needs_its_parent(store: Store) -> None:
    """A fork of a conversation that does not exist is refused; the order in a batch is free."""
    storage = store.hold()
    raises(InternalError, lambda: store.write(conversation(2, parent=1, parent_entry=9)))
    store.write(conversation(2, parent=1, parent_entry=9), conversation(1))
    equal(storage.conversation(2), conversation(2, parent=1, parent_entry=9)[1])
    raises(InternalError, lambda: store.write(submission(3, conversation=8)))


@conformance_case
def keys_are_unique_where_they_must_be(store: Store) -> None:
    """Keys of conversations, tasks, signals, submissions and living documents exist once."""
    store.hold()
    store.write(
        conversation(1),
        conversation(2, owner=3, key="a"),
        task(3, owner=1, key="a"),
        task(4, owner=None, key="a"),
        signal(5, key="a"),
        submission(6, request_id="a"),
        document(7, key="a"),
        document(8, key="b"),
        (Op.DOCUMENT_RETIRE, (8, 2)),
    )
    for twice in (
        conversation(12, owner=3, key="a"),
        task(13, owner=1, key="a"),
        task(13, owner=1, key="a", conversation=2),
        task(14, owner=None, key="a"),
        signal(15, key="a"),
        submission(16, request_id="a"),
        document(17, key="a", created_seq=2),
        # Of two that one commit created the past could not say which was there.
        document(18, key="b"),
        (Op.DOCUMENT_RETIRE, (8, 3)),
    ):
        raises(InternalError, store.write, twice)


@conformance_case
def equal_keys_elsewhere_do_not_collide(store: Store) -> None:
    """A key is unique below its owner only, and rows without a key never collide."""
    storage = store.hold()
    store.write(
        conversation(1),
        conversation(2, owner=3, key="a"),
        conversation(3, owner=4, key="a"),
        conversation(4, owner=4),
        conversation(5, owner=4),
        task(10, owner=1, key="a"),
        task(11, owner=2, key="a"),
        task(12, owner=None, key="a"),
        task(13, owner=None, key="a", conversation=2),
        task(14, owner=1),
        task(15, owner=1),
        signal(20, task=10, key="a"),
        signal(21, task=11, key="a"),
        signal(22, task=11),
        signal(23, task=11),
        submission(30, request_id="a"),
        submission(31, conversation=2, request_id="a"),
        submission(32),
        submission(33),
        document(40, key="a"),
        document(41, key="b"),
        document(42, key="a", scope_id=2),
        document(43, key="a", scope=2),
        document(44, name="app.other", key="a"),
    )
    equal(len(storage.tasks()), 6)
    equal(len(storage.documents(1, 1)), 3)


@conformance_case
def task_states_replace_the_changing_columns_only(store: Store) -> None:
    """Every changing column takes its new value, None included; the others stay."""
    storage = store.hold()
    store.write(task(1, owner=8, key="k", background=1, on_restart="wait", deadline_us=5))
    changes: dict[str, Any] = {
        "version": 2,
        "status": 3,
        "started_us": 1,
        "ended_us": 2,
        "abort_us": 3,
        "abort_reason": "user",
        "invocations": 4,
        "recoveries": 5,
        "tries": 6,
        "ready_us": 7,
        "woken_by": "signal",
        "blocked": "faulted",
        "outcome_status": "failed",
    }
    store.write(task_state(1, **changes))
    fixed = {"owner": 8, "key": "k", "background": 1, "on_restart": "wait", "deadline_us": 5}
    equal(storage.task(1), task_row(1, **fixed, **changes))
    store.write(task_state(1, status=0))
    equal(storage.task(1), task_row(1, **fixed))


@conformance_case
def submission_states_replace_the_changing_columns_only(store: Store) -> None:
    """Status, places, reason and end change; content and request id stay."""
    storage = store.hold()
    store.write(conversation(1), submission(2, request_id="r"))
    changes: dict[str, Any] = {
        "entry": 3,
        "run": 4,
        "answer": 5,
        "reason": "aborted",
        "detail": "why",
        "ended_us": 6,
    }
    store.write(submission_state(2, "unanswered", **changes))
    equal(
        storage.submission(2),
        submission_row(2, request_id="r", status="unanswered", **changes),
    )


@conformance_case
def what_many_tasks_begin_with_is_read_at_once(store: Store) -> None:
    """By task, each once, whatever the order; one that lacks a part is left out."""
    storage = store.hold()
    store.write(
        *((Op.TASK_INPUT, (id, str(id))) for id in range(1, 101)),
        *((Op.CHECKPOINT, (id, f"p{id}", f"[{id}]", NOW_US)) for id in range(1, 101)),
        (Op.TASK_INPUT, (200, "{}")),
        (Op.CHECKPOINT, (201, "p", "{}", NOW_US)),
        (Op.MEMO, (7, "b", "2")),
        (Op.MEMO, (7, "a", "1")),
        (Op.MEMO, (101, "a", "1")),
    )

    def expected(*ids: int) -> list[StartRow]:
        memos = {7: (("a", "1"), ("b", "2"))}
        return [StartRow(id, str(id), f"p{id}", f"[{id}]", memos.get(id, ())) for id in ids]

    equal(storage.task_starts([9, 7, 9]), expected(7, 9))
    equal(storage.task_starts(range(205, 0, -1)), expected(*range(1, 101)))
    equal(storage.task_starts([101, 200, 201]), [])
    equal(storage.task_phases([9, 201, 7, 9, 200]), [(7, "p7"), (9, "p9"), (201, "p")])
    equal(storage.task_phases(range(100, 0, -1)), [(id, f"p{id}") for id in range(1, 101)])


@conformance_case
def parts_of_a_task_are_stored_apart(store: Store) -> None:
    """Input, checkpoint, wait, outcome and memos come and go on their own."""
    storage = store.hold()
    equal(storage.task_checkpoint(1), None)
    equal(storage.task_memos(1), [])
    store.write(
        task(1),
        (Op.TASK_INPUT, (1, '{"cents": 1}')),
        (Op.CHECKPOINT, (1, "prepare", "{}", NOW_US)),
        (Op.WAIT, (1, '{"on": [2]}')),
        (Op.MEMO, (1, "b", "2")),
        (Op.MEMO, (1, "a", "1")),
        (Op.MEMO, (2, "a", "9")),
    )
    equal(storage.task_input(1), '{"cents": 1}')
    equal(storage.task_checkpoint(1), ("prepare", "{}"))
    equal(storage.checkpoint_at(1), ("prepare", NOW_US))
    equal(storage.task_wait(1), '{"on": [2]}')
    store.write((Op.WAIT, (7, "{}")), (Op.WAIT, (5, "{}")))
    equal(storage.waits(limit=2), [(1, '{"on": [2]}'), (5, "{}")])
    equal(storage.waits(after=5), [(7, "{}")])
    equal(storage.task_memos(1), [("a", "1"), ("b", "2")])
    equal(storage.task_outcome(1), None)
    store.write(
        (Op.CHECKPOINT_DELETE, (1,)),
        (Op.WAIT_DELETE, (1,)),
        (Op.MEMOS_DELETE, (1,)),
        (Op.OUTCOME, (1, '"done"')),
    )
    equal(storage.task_input(1), '{"cents": 1}')
    equal((storage.task_checkpoint(1), storage.task_wait(1)), (None, None))
    equal(storage.checkpoint_at(1), None)
    equal(storage.task_memos(1), [])
    equal(storage.task_memos(2), [("a", "9")])
    equal(storage.task_outcome(1), '"done"')
    store.write((Op.OUTCOME_DELETE, (1,)), (Op.OUTCOME_DELETE, (77,)), (Op.OUTCOME, (1, "2")))
    equal(storage.task_outcome(1), "2")


@conformance_case
def a_blob_is_stored_once(store: Store) -> None:
    """The first bytes under a name stay; storing them again is no error."""
    storage = store.hold()
    name = "0" * 64
    store.write((Op.BLOB, (name, b"one")))
    store.write((Op.BLOB, (name, b"two")), (Op.BLOB, ("1" * 64, b"")))
    equal(storage.blob(name), b"one")
    equal(storage.blob("1" * 64), b"")
    equal(storage.blob("2" * 64), None)
    names = (name, "1" * 64, "2" * 64, "")
    equal([storage.has_blob(each) for each in names], [True, True, False, False])
    sizes = sorted([(name, len(storage.blob(name) or b"")), ("1" * 64, 0)])
    equal(storage.blob_sizes(), sizes)
    equal(
        (storage.blob_sizes(limit=1), storage.blob_sizes(after=sizes[0][0])),
        ([sizes[0]], [sizes[1]]),
    )


@conformance_case
def bytes_are_copied_on_the_way_in(store: Store) -> None:
    """Changing a buffer after the call changes nothing that is stored."""
    storage = store.hold()
    buffer = bytearray(b"before")
    store.write((Op.BLOB, ("a" * 64, buffer)))
    buffer[:] = b"after!"
    equal(storage.blob("a" * 64), b"before")


@conformance_case
def lists_that_were_handed_out_are_copies(store: Store) -> None:
    """Changing an answer changes nothing that is stored."""
    storage = store.hold()
    store.write(conversation(1), entry(2), task(3), (Op.MEMO, (3, "m", "1")), signal(4, task=3))
    for read in (
        lambda: storage.entries(1),
        lambda: storage.tasks(),
        lambda: storage.live_tasks(),
        lambda: storage.task_memos(3),
        lambda: storage.signals(3),
    ):
        answer: list[object] = list(read())
        read().clear()
        equal(read(), answer)


@conformance_case
def values_come_back_exactly(store: Store) -> None:
    """Unicode, empty and large texts, and the ends of the integer range survive."""
    storage = store.hold()
    big = 2**63 - 1
    text = "Grüße \U0001f680 \u202eright\u202c \u0301 \r\n\t'\"\\ \x7f \ufeff"
    large = "x" * 3_000_000 + text
    store.write(
        conversation(1, principal=text, key="", owner=-(2**63)),
        entry(big, kind=text, data="", messages=large, seq=big, at_us=-(2**63)),
        (Op.CHECKPOINT, (big, text, large, big)),
        (Op.BLOB, ("b" * 64, bytes(range(256)) * 4_000)),
    )
    expected = entry(big, kind=text, data="", messages=large, seq=big, at_us=-(2**63))[1]
    equal(storage.entry(big) == expected, True)
    equal(storage.conversation(1), conversation(1, principal=text, key="", owner=-(2**63))[1])
    equal(storage.task_checkpoint(big) == (text, large), True)
    equal(storage.blob("b" * 64) == bytes(range(256)) * 4_000, True)


@conformance_case
def numbers_beyond_64_bits_are_refused(store: Store) -> None:
    """2**63 does not wrap and is not rounded: the batch fails."""
    storage = store.hold()
    raises(InternalError, lambda: store.write(conversation(1), entry(2, at_us=2**63)))
    raises(InternalError, lambda: store.write(conversation(1), entry(2, at_us=-(2**63) - 1)))
    equal(storage.conversation(1), None)


@conformance_case
def values_of_a_wrong_type_are_refused(store: Store) -> None:
    """No text for a number, no None where there must be a value, no lone surrogate."""
    storage = store.hold()
    for bad in (
        entry(2, kind=None),
        entry(2, seq="one"),
        entry(2, kind="\ud800"),
        (Op.CHECKPOINT, (1, "a", None, 1)),
        (Op.CHECKPOINT, (1, "a", "1")),
        (Op.BLOB, ("c" * 64, "text")),
        (Op.CHECKPOINT, (1, "a", {"an": "object"}, 1)),
    ):
        raises(InternalError, store.write, conversation(1), bad)
    equal(storage.conversation(1), None)


@conformance_case
def signals_are_read_in_order_and_deleted(store: Store) -> None:
    """Unread signals of a task come oldest first, one by one or all of them deleted."""
    storage = store.hold()
    store.write(
        signal(3),
        signal(1, payload='{"a": 1}'),
        signal(2, key="k"),
        signal(4, task=9),
        signal(5, task=7),
        signal(6, task=7),
    )
    equal(ids(storage.signals(1)), [1, 2, 3])
    equal(storage.signals(1)[0], SignalRow(1, 1, "go", None, '{"a": 1}', NOW_US + 1))
    equal(ids(storage.signals(1, limit=2)), [1, 2])
    equal(storage.live_signals(), [(1, 3), (7, 2), (9, 1)])
    equal(storage.signal_by_key(1, "k"), 2)
    store.write((Op.SIGNAL_DELETE, (2,)), (Op.SIGNALS_DELETE, (7,)))
    equal(storage.signal_by_key(1, "k"), None)
    equal(storage.live_signals(), [(1, 2), (9, 1)])
    store.write((Op.SIGNALS_DELETE, (1,)), signal(8, key="k"))
    equal(ids(storage.signals(1)), [8])


@conformance_case
def a_signal_that_was_read_keeps_its_key(store: Store) -> None:
    """It is unread no more and its payload is gone; its key is free when its task has ended."""
    storage = store.hold()
    store.write(signal(1, key="k", payload='"long"'), signal(2), signal(3, task=9, key="k"))
    store.write((Op.SIGNAL_READ, (1,)), (Op.SIGNAL_READ, (1,)), (Op.SIGNAL_READ, (77,)))
    equal(ids(storage.signals(1)), [2])
    equal(storage.live_signals(), [(1, 1), (9, 1)])
    equal(storage.signal_by_key(1, "k"), 1)
    raises(InternalError, store.write, signal(4, key="k"))
    store.write((Op.SIGNALS_DELETE, (1,)), signal(5, key="k"))
    equal(ids(storage.signals(1)), [5])
    store.write((Op.SIGNAL_READ, (5,)), (Op.SIGNAL_DELETE, (5,)))
    equal(storage.signal_by_key(1, "k"), None)
    equal(storage.live_signals(), [(9, 1)])
    raises(InternalError, store.write, (Op.SIGNAL_READ, (3,)), task_state(1))
    equal(ids(storage.signals(9)), [3])


@conformance_case
def a_conversation_comes_back_whole(store: Store) -> None:
    """Every column of a conversation is stored."""
    storage = store.hold()
    row = ConversationRow(2, "u", 1, 7, 5, "key", "somebody else", 123)
    store.write(conversation(1), (Op.CONVERSATION, row))
    equal(storage.conversation(2), row)
    equal(storage.conversation_by_key(5, "key"), row)
