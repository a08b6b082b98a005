"""Conformance: scans give the right rows in the right order, with cursors and limits."""

from __future__ import annotations

import threading
from typing import Any

from pidurable.errors import SessionClosedError
from pidurable.storage import EntryRow, Op, RevisionRow
from pidurable.testing._conformance_base import (
    Store,
    Write,
    conformance_case,
    conversation,
    document,
    entry,
    equal,
    ids,
    raises,
    revision,
    submission,
    submission_state,
    task,
    task_row,
    task_state,
)


@conformance_case
def an_empty_store_answers_with_nothing(store: Store) -> None:
    """Reads of what is not there give None or an empty list, and nothing is created."""
    storage = store.hold()
    nothing = [
        storage.conversation(1),
        storage.conversation_by_key(1, "k"),
        storage.entry(1),
        storage.last_head(1),
        storage.task(1),
        storage.task_by_key(1, 1, "k"),
        storage.task_by_key(None, 1, "k"),
        storage.task_input(1),
        storage.task_checkpoint(1),
        storage.checkpoint_at(1),
        storage.task_wait(1),
        storage.task_outcome(1),
        storage.signal_by_key(1, "k"),
        storage.submission(1),
        storage.submission_by_request(1, "r"),
        storage.document("d", 0, 0, ""),
        storage.document_as_of(1, "d", "", seq=2**62),
        storage.blob("0" * 64),
    ]
    equal(nothing, [None] * len(nothing))
    empty: list[object] = [
        storage.conversations_by_owner(None),
        storage.conversations_by_owner(1),
        storage.entries(1),
        storage.keyed_tasks(1),
        storage.live_tasks(),
        storage.tasks(),
        storage.task_memos(1),
        storage.conversation_owners([1]),
        storage.conversation_owners([]),
        storage.task_phases([1]),
        storage.task_phases([]),
        storage.task_starts([1]),
        storage.task_starts([]),
        storage.signals(1),
        storage.live_signals(),
        storage.open_submissions(1),
        storage.documents(0, 0),
        storage.documents_as_of(1, seq=2**62),
        storage.revisions(1),
    ]
    equal(empty, [[]] * len(empty))


@conformance_case
def conversations_are_listed_by_owner(store: Store) -> None:
    """By id, with a cursor and a limit; None lists the ownerless ones only."""
    storage = store.hold()
    store.write(
        conversation(5),
        conversation(3),
        conversation(1, owner=9),
        conversation(4, owner=9, key="b"),
        conversation(2, owner=8, key="b"),
    )
    equal(ids(storage.conversations_by_owner(None)), [3, 5])
    equal(ids(storage.conversations_by_owner(9)), [1, 4])
    equal(ids(storage.conversations_by_owner(9, after=1)), [4])
    equal(ids(storage.conversations_by_owner(None, limit=1)), [3])
    equal(ids(storage.conversations_by_owner(None, after=3, limit=1)), [5])
    equal(storage.conversations_by_owner(None, after=5), [])
    store.write(*(task(id) for id in range(7, 50)))
    equal(storage.conversation_owners([9, 7, 8, 9, 77]), [8, 9])
    equal(storage.conversation_owners(range(49, 6, -1)), [8, 9])
    store.write(conversation(6, owner=60))
    equal(storage.conversation_owners([60, 9]), [9], "what is no task owns nothing")


@conformance_case
def conversations_are_found_by_key(store: Store) -> None:
    """The key belongs to the owner."""
    storage = store.hold()
    store.write(
        conversation(1, owner=9, key="a"),
        conversation(2, owner=8, key="a"),
        conversation(3, key="a"),
    )
    equal(storage.conversation_by_key(None, "a"), conversation(3, key="a")[1])
    equal(storage.conversation_by_key(None, "b"), None)
    equal(storage.conversation_by_key(9, "a"), conversation(1, owner=9, key="a")[1])
    equal(storage.conversation_by_key(8, "a"), conversation(2, owner=8, key="a")[1])
    equal(storage.conversation_by_key(8, "b"), None)


@conformance_case
def an_entry_comes_back_whole(store: Store) -> None:
    """Every column of an entry is stored."""
    storage = store.hold()
    row = EntryRow(2, 1, 3, "shop.receipt", 4, 5, "[]", '["m"]', '{"a": 1}', 6)
    store.write((Op.ENTRY, row))
    equal(storage.entry(2), row)
    equal(storage.entries(1), [row])


@conformance_case
def entries_are_scanned_both_ways(store: Store) -> None:
    """After and before are exclusive in both directions; other conversations do not show."""
    storage = store.hold()
    store.write(*(entry(id, conversation=1 + id % 2) for id in range(1, 21)))
    even = list(range(2, 21, 2))
    equal(ids(storage.entries(1)), even)
    equal(ids(storage.entries(1, reverse=True)), even[::-1])
    equal(ids(storage.entries(1, after=4, before=10)), [6, 8])
    equal(ids(storage.entries(1, after=4, before=10, reverse=True)), [8, 6])
    equal(ids(storage.entries(1, after=3, before=9)), [4, 6, 8])
    equal(ids(storage.entries(1, limit=3)), [2, 4, 6])
    equal(ids(storage.entries(1, limit=3, reverse=True)), [20, 18, 16])
    equal(ids(storage.entries(1, before=16, limit=2, reverse=True)), [14, 12])
    equal(storage.entries(1, after=20), [])
    equal(storage.entries(1, after=8, before=9), [])
    equal(storage.entries(3), [])


@conformance_case
def a_limit_of_nothing_gives_nothing(store: Store) -> None:
    """A limit of 0 is no error and not "all"."""
    storage = store.hold()
    store.write(conversation(1), entry(2), task(3))
    equal(storage.entries(1, limit=0), [])
    equal(storage.tasks(limit=0), [])
    equal(storage.live_tasks(limit=0), [])
    equal(storage.conversations_by_owner(None, limit=0), [])


@conformance_case
def entries_out_of_order_are_scanned_in_order(store: Store) -> None:
    """The order is that of the ids, not of the writes."""
    storage = store.hold()
    store.write(entry(30), entry(10), entry(20, head=10))
    store.write(entry(5, head=5), entry(25))
    equal(ids(storage.entries(1)), [5, 10, 20, 25, 30])
    newest = storage.last_head(1)
    equal(newest and newest.id, 20)


@conformance_case
def the_newest_head_before_a_place_is_found(store: Store) -> None:
    """Only own entries with a head count, and the bound is exclusive."""
    storage = store.hold()
    store.write(
        entry(1),
        entry(2, head=2),
        entry(3),
        entry(4, head=3),
        entry(5),
        entry(6, conversation=2, head=6),
    )

    def newest(before: int | None) -> int | None:
        found = storage.last_head(1, before=before)
        return found.id if found is not None else None

    equal([newest(before) for before in (None, 100, 5, 4, 3, 2)], [4, 4, 4, 2, 2, None])
    equal(storage.last_head(3), None)


@conformance_case
def ten_thousand_rows_are_walked_with_a_cursor(store: Store) -> None:
    """Pages of a long scan join without a gap or an overlap, in both directions."""
    storage = store.hold()
    count = 10_000
    store.write(*(entry(id) for id in range(1, count + 1)))
    forward: list[int] = []
    while page := storage.entries(1, after=forward[-1] if forward else 0, limit=777):
        forward += ids(page)
    equal(forward == list(range(1, count + 1)), True)
    backward: list[int] = []
    while page := storage.entries(
        1, before=backward[-1] if backward else None, limit=777, reverse=True
    ):
        backward += ids(page)
    equal(backward == forward[::-1], True)


@conformance_case
def live_tasks_are_those_that_are_not_terminal(store: Store) -> None:
    """A task leaves the scan in the batch that ends it, and is still there otherwise."""
    storage = store.hold()
    store.write(*(task(id, status=id % 5) for id in range(1, 11)))
    equal(ids(storage.live_tasks()), [1, 2, 3, 5, 6, 7, 8, 10])
    equal(ids(storage.live_tasks(after=3, limit=3)), [5, 6, 7])
    store.write(task_state(5, status=4), task_state(6, status=3))
    equal(ids(storage.live_tasks()), [1, 2, 3, 6, 7, 8, 10])
    equal(storage.task(5), task_row(5, status=4))
    equal(storage.live_tasks()[3], task_row(6, status=3))


@conformance_case
def thousands_of_live_tasks_are_walked_with_a_cursor(store: Store) -> None:
    """Among as many that ended, the live ones come in order and once."""
    storage = store.hold()
    store.write(*(task(id, status=4 if id % 2 else 0) for id in range(1, 4_001)))
    found: list[int] = []
    while page := storage.live_tasks(after=found[-1] if found else 0, limit=600):
        found += ids(page)
    equal(found == list(range(2, 4_001, 2)), True)


@conformance_case
def tasks_are_filtered(store: Store) -> None:
    """Conversation, kind and status each narrow the scan, alone and together."""
    storage = store.hold()
    store.write(
        task(1),
        task(2, conversation=2),
        task(3, kind="other"),
        task(4, kind="other", status=4),
        task(5, conversation=2, kind="other", status=4),
        task(6, status=2),
    )
    equal(ids(storage.tasks()), [1, 2, 3, 4, 5, 6])
    equal(ids(storage.tasks(conversation=1)), [1, 3, 4, 6])
    equal(ids(storage.tasks(kind="other")), [3, 4, 5])
    equal(ids(storage.tasks(status=4)), [4, 5])
    equal(ids(storage.tasks(status=0)), [1, 2, 3])
    equal(ids(storage.tasks(conversation=1, kind="other")), [3, 4])
    equal(ids(storage.tasks(conversation=1, status=0)), [1, 3])
    equal(ids(storage.tasks(kind="other", status=4)), [4, 5])
    equal(ids(storage.tasks(conversation=2, kind="other", status=4)), [5])
    equal(ids(storage.tasks(reverse=True)), [6, 5, 4, 3, 2, 1])
    equal(ids(storage.tasks(conversation=1, reverse=True, limit=2)), [6, 4])
    equal(ids(storage.tasks(after=2, limit=2)), [3, 4])
    equal(ids(storage.tasks(after=2, reverse=True)), [6, 5, 4, 3])
    equal(ids(storage.tasks(kind="other", limit=1, after=3)), [4])


@conformance_case
def keyed_tasks_are_found_by_their_creator(store: Store) -> None:
    """With an owner by the owner alone; without one by the conversation."""
    storage = store.hold()
    store.write(
        task(1, owner=9, key="b"),
        task(2, owner=9, key="a", conversation=2),
        task(3, owner=9),
        task(4, key="a"),
        task(5, owner=8, key="a"),
    )

    def found(owner: int | None, conversation: int, key: str) -> int | None:
        row = storage.task_by_key(owner, conversation, key)
        return row.id if row is not None else None

    equal(found(9, 1, "a"), 2)
    equal(found(9, 77, "b"), 1)
    equal(found(8, 1, "a"), 5)
    equal(found(None, 1, "a"), 4)
    equal(found(None, 2, "a"), None)
    equal(found(9, 1, "c"), None)
    equal(storage.keyed_tasks(9), [("a", 2), ("b", 1)])
    equal(storage.keyed_tasks(7), [])


@conformance_case
def a_keyed_task_is_found_after_it_ended(store: Store) -> None:
    """A key is used once for ever: ending a task does not free it."""
    storage = store.hold()
    store.write(task(1, owner=9, key="a"))
    store.write(task_state(1, status=4, outcome_status="completed"))
    found = storage.task_by_key(9, 1, "a")
    equal(found, task_row(1, owner=9, key="a", status=4, outcome_status="completed"))
    equal(storage.keyed_tasks(9), [("a", 1)])


@conformance_case
def open_submissions_are_queued_or_placed(store: Store) -> None:
    """By id; those that ended do not show, and are still found by id and request id."""
    storage = store.hold()
    store.write(
        conversation(1),
        conversation(2),
        submission(5, status="placed"),
        submission(3, request_id="r"),
        submission(4, status="done"),
        submission(6, status="unanswered"),
        submission(7, conversation=2),
    )
    equal(ids(storage.open_submissions(1)), [3, 5])
    store.write(submission_state(3, "placed", entry=9), submission_state(5, "done"))
    equal(ids(storage.open_submissions(1)), [3])
    store.write(submission_state(3, "done", answer=10))
    equal(storage.open_submissions(1), [])
    found = storage.submission_by_request(1, "r")
    equal(found and (found.id, found.answer), (3, 10))
    equal(storage.submission_by_request(2, "r"), None)


@conformance_case
def documents_are_found_by_their_address(store: Store) -> None:
    """Name, scope, scope id and key together; a retired one makes room for a new one."""
    storage = store.hold()
    store.write(
        document(3, name="app.b"),
        document(1, name="app.c"),
        document(2, name="app.a", key="k", history="rewindable", fork="as_of"),
        document(4, scope=0, scope_id=0),
        document(5, scope=2, scope_id=1),
    )
    equal(ids(storage.documents(1, 1)), [1, 2, 3])
    equal(ids(storage.documents(0, 0)), [4])
    expected = document(2, name="app.a", key="k", history="rewindable", fork="as_of")[1]
    equal(storage.document("app.a", 1, 1, "k"), expected)
    equal(storage.document("app.a", 1, 1, ""), None)
    store.write((Op.DOCUMENT_RETIRE, (3, 7)))
    equal(storage.document("app.b", 1, 1, ""), None)
    equal(ids(storage.documents(1, 1)), [1, 2])
    store.write(document(9, name="app.b", created_seq=7))
    found = storage.document("app.b", 1, 1, "")
    equal(found and found.id, 9)


@conformance_case
def documents_of_the_past_are_found(store: Store) -> None:
    """As of a commit an address has what lived then: from its creation until it was retired.

    All of them are asked for one by one; together only those that are rewindable.
    """
    storage = store.hold()

    def past(id: int, created_seq: int, **changes: Any) -> Write:
        given = {"name": "app.b", "history": "rewindable", **changes}
        return document(id, created_seq=created_seq, **given)

    store.write(
        past(2, 5),
        (Op.DOCUMENT_RETIRE, (2, 9)),
        past(4, 9),
        past(6, 20, scope_id=2),
        past(8, 6, key="k"),
        past(10, 12, name="app.a"),
        past(11, 6, name="app.c", history="latest"),
        past(13, 6, name="app.c", key="k", history="latest"),
        # Documents of tasks and of the session have no past.
        past(12, 5, scope=2),
        past(14, 5, scope=0, scope_id=0),
    )
    store.write((Op.DOCUMENT_RETIRE, (4, 15)), (Op.DOCUMENT_RETIRE, (10, 12)))
    store.write(past(16, 30))
    store.write((Op.DOCUMENT_TERMS, (13, "rewindable", "as_of")))

    def at(seq: int, key: str = "") -> int | None:
        row = storage.document_as_of(1, "app.b", key, seq=seq)
        return None if row is None else row.id

    found = {seq: at(seq) for seq in (4, 5, 8, 9, 14, 15, 29, 30, 2**62)}
    equal(found, {4: None, 5: 2, 8: 2, 9: 4, 14: 4, 15: None, 29: None, 30: 16, 2**62: 16})
    equal([at(5, "k"), at(6, "k"), at(6, "other")], [None, 8, None])
    row = storage.document_as_of(1, "app.b", "", seq=5)
    equal(row, past(2, 5, retired_seq=9)[1])
    latest = storage.document_as_of(1, "app.c", "", seq=6)
    equal(latest and latest.id, 11, "one that keeps no past is found all the same")
    equal(ids(storage.documents_as_of(1, seq=4)), [])
    equal(ids(storage.documents_as_of(1, seq=6)), [2, 8, 13])
    equal(ids(storage.documents_as_of(1, seq=12)), [4, 8, 13])
    equal(ids(storage.documents_as_of(1, seq=40)), [16, 8, 13])
    equal(ids(storage.documents_as_of(2, seq=40)), [6])
    equal(ids(storage.documents_as_of(3, seq=40)), [])


@conformance_case
def what_a_document_is_stored_with_may_change(store: Store) -> None:
    """History and fork policy are replaced, of a living document and of a retired one."""
    storage = store.hold()
    store.write(document(1, created_seq=2), document(2, name="app.b", created_seq=2))
    store.write((Op.DOCUMENT_TERMS, (1, "rewindable", "as_of")))
    expected = document(1, created_seq=2, history="rewindable", fork="as_of")[1]
    equal(storage.document("app.todos", 1, 1, ""), expected)
    equal(storage.document_as_of(1, "app.todos", "", seq=2), expected)
    equal(ids(storage.documents(1, 1)), [1, 2])
    store.write((Op.DOCUMENT_RETIRE, (1, 3)), (Op.DOCUMENT_TERMS, (1, "latest", "initial")))
    row = storage.document_as_of(1, "app.todos", "", seq=2)
    equal(row and (row.history, row.fork, row.retired_seq), ("latest", "initial", 3))


@conformance_case
def revisions_start_at_the_newest_base(store: Store) -> None:
    """The newest base at or before the seq, and the deltas up to it, in order."""
    storage = store.hold()
    store.write(
        document(1),
        revision(1, 10, base=1, value='{"a": 1}'),
        revision(1, 11),
        revision(1, 15),
        revision(1, 20, base=1),
        revision(1, 21),
        revision(2, 12, base=1),
    )

    def seqs(upto: int | None) -> list[int]:
        return [row.seq for row in storage.revisions(1, upto_seq=upto)]

    equal(seqs(None), [20, 21])
    equal(
        [seqs(upto) for upto in (9, 10, 12, 19, 20, 99)],
        [
            [],
            [10],
            [10, 11],
            [10, 11, 15],
            [20],
            [20, 21],
        ],
    )
    equal(storage.revisions(1, upto_seq=10), [RevisionRow(1, 10, 1, 1, '{"a": 1}')])


@conformance_case
def old_revisions_are_reclaimed(store: Store) -> None:
    """Those before the seq go, those from it on stay, other documents are left alone."""
    storage = store.hold()
    store.write(
        revision(1, 10, base=1),
        revision(1, 11),
        revision(1, 20, base=1),
        revision(2, 10, base=1),
    )
    store.write((Op.REVISIONS_DELETE, (1, 20)))
    equal(storage.revisions(1, upto_seq=15), [])
    equal(len(storage.revisions(1)), 1)
    equal(len(storage.revisions(2)), 1)


@conformance_case
def revisions_without_a_base_are_nothing(store: Store) -> None:
    """Deltas alone make no document."""
    storage = store.hold()
    store.write(revision(1, 10), revision(1, 11))
    equal(storage.revisions(1), [])


@conformance_case
def a_reader_in_another_thread_sees_whole_batches(store: Store) -> None:
    """While one thread applies, another one never sees a part of a batch."""
    storage = store.hold()
    store.write(conversation(1), task(1))
    done = threading.Event()
    torn: list[object] = []

    def read() -> None:
        while not done.is_set():
            # Two entries a batch: an odd number would be half of one.
            count = len(storage.entries(1))
            if count % 2:
                torn.append(count)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(50):
            store.write(entry(2 * number + 10), entry(2 * number + 11))
    finally:
        done.set()
        reader.join()
    equal(torn, [])
    equal(len(storage.entries(1)), 100)


@conformance_case
def a_closed_handle_serves_nothing(store: Store) -> None:
    """Reads and writes after close raise SessionClosedError; closing again is fine."""
    storage = store.hold()
    store.write(conversation(1))
    storage.close()
    storage.close()
    for call in (
        lambda: storage.head(),
        lambda: storage.entries(1),
        lambda: storage.heartbeat(store.head.epoch, 1),
        lambda: storage.checkpoint(),
        lambda: store.write(entry(2)),
    ):
        raises(SessionClosedError, call)
    equal(store.other().entry(2), None)


@conformance_case
def a_checkpoint_changes_nothing_that_is_read(store: Store) -> None:
    """It returns a number of pages, works at any time, and may be asked to empty the log."""
    storage = store.hold()
    store.write(conversation(1), entry(2))
    pages = storage.checkpoint()
    equal(pages >= 0, True)
    store.write(entry(3))
    equal(storage.checkpoint(truncate=True), 0)
    equal(ids(storage.entries(1)), [2, 3])
    equal(storage.head().seq, 2)
