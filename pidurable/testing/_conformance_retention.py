"""Conformance of a backend: answers to commands, copying a session, and what is removed."""

from __future__ import annotations

from pidurable.errors import InternalError
from pidurable.storage import (
    RECORDS,
    CommandRow,
    Op,
    RecordKind,
    RemovalRow,
    StubRow,
)
from pidurable.testing._conformance_base import (
    NOW_US,
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
    signal,
    submission,
    task,
)

ENDED = {"status": 4, "ended_us": NOW_US, "outcome_status": "completed"}
NAMES = ("", "A", "Z", "a", "z", "é", "日", "\ufb00", "\U0001f600")
"""In the order of their UTF-8, which is not that of UTF-16."""


def command(id: str, answer: str = "null") -> Write:
    return Op.COMMAND, CommandRow(id, "signal", "d", answer, 7, NOW_US)


def stub(key: str, id: int, *, kind: str = "task", place: int = 1) -> Write:
    return Op.STUB, StubRow(kind, place, key, id, "", "completed", NOW_US)


@conformance_case
def scan_gives_every_record_of_a_kind_in_the_columns_of_records(store: Store) -> None:
    """`scan` gives each kind of record, ended, read and retired ones too, as it is stored."""
    storage = store.hold()
    store.write(conversation(1), conversation(2, parent=1, parent_entry=3), entry(3, data="[]"))
    store.write(task(4, **ENDED), (Op.TASK_INPUT, (4, "{}")), (Op.OUTCOME, (4, '"done"')))
    store.write(task(5), (Op.CHECKPOINT, (5, "at", "1", NOW_US)), (Op.WAIT, (5, "{}")))
    store.write((Op.MEMO, (5, "m", "2")), signal(6, 5, key="k", payload="9"), signal(7, 5))
    store.write((Op.SIGNAL_READ, (6,)), submission(8, status="answered"))
    store.write(document(9), revision(9, 5, base=1, value="{}"), (Op.DOCUMENT_RETIRE, (9, 6)))
    store.write((Op.BLOB, ("00", b"\0\xff")), command("c"), stub("k", 11))
    store.write((Op.REMOVAL, RemovalRow(4, NOW_US)))
    found = {kind: storage.scan(kind) for kind in RecordKind}
    counts = {kind: len(rows) for kind, rows in found.items()}
    twice = (RecordKind.CONVERSATION, RecordKind.TASK, RecordKind.SIGNAL)
    equal(counts, {kind: 2 if kind in twice else 1 for kind in RecordKind})
    for kind, rows in found.items():
        equal({len(row) for row in rows}, {len(RECORDS[kind].columns)}, kind)
    # One that was read has its key and no payload.
    equal(found[RecordKind.SIGNAL][0], (6, 5, "go", "k", "null", NOW_US + 6, 1))
    equal(found[RecordKind.SIGNAL][1][-1], 0, "the mark of an unread signal")
    equal(found[RecordKind.DOCUMENT][0][-1], 6, "the commit that retired a document")
    equal(found[RecordKind.CHECKPOINT], [(5, "at", "1", NOW_US)])
    equal(found[RecordKind.BLOB], [("00", b"\0\xff")])


@conformance_case
def scan_goes_on_after_a_key(store: Store) -> None:
    """Pages of `scan` join without a gap or an overlap, also where a key has several columns."""
    storage = store.hold()
    store.write(conversation(1), task(1), task(2))
    store.write(*((Op.MEMO, (task_id, name, "0")) for task_id in (2, 1) for name in NAMES[::-1]))
    store.write(*(command(name) for name in NAMES[::-1]))
    store.write(*(stub(name, place, place=place) for place in (3, 2) for name in NAMES))
    for kind, expected in (
        (RecordKind.MEMO, [(task_id, name) for task_id in (1, 2) for name in NAMES]),
        (RecordKind.COMMAND, [(name,) for name in NAMES]),
        (RecordKind.STUB, [("task", place, name) for place in (2, 3) for name in NAMES]),
    ):
        width = len(RECORDS[kind].key)
        found: list[tuple[object, ...]] = []
        while rows := storage.scan(kind, after=found[-1] if found else None, limit=3):
            found += [row[:width] for row in rows]
        equal(found, expected, kind)
    equal(storage.scan(RecordKind.TASK, after=(2,)), [])


@conformance_case
def a_command_is_answered_once(store: Store) -> None:
    """The answer to a command is found by its id; a second one contradicts the store."""
    storage = store.hold()
    equal(storage.command("a"), None)
    store.write(command("a", '{"value":1}'))
    equal(storage.command("a"), CommandRow("a", "signal", "d", '{"value":1}', 7, NOW_US))
    raises(InternalError, store.write, command("a"))
    equal(storage.command("A"), None)


@conformance_case
def a_tree_is_removed_without_a_trace(store: Store) -> None:
    """Deleting every row of a task and a conversation leaves nothing that any read would find."""
    storage = store.hold()
    store.write(conversation(1), task(2, key="k", **ENDED), (Op.TASK_INPUT, (2, "{}")))
    store.write(conversation(3, owner=2, key="c"), entry(4, 3, head=4), task(5, owner=2, key="o"))
    store.write(submission(6, 3, request_id="r"), document(7, scope_id=3), revision(7, 4, base=1))
    store.write((Op.OUTCOME, (2, "1")), signal(8, 5, key="s"), document(9, scope=2, scope_id=5))
    store.write((Op.DOCUMENT_RETIRE, (9, 5)), (Op.BLOB, ("00", b"x")))
    deletes: list[Write] = [
        *((Op.DOCUMENT_DELETE, (id,)) for id in (7, 9)),
        *((Op.REVISIONS_DELETE, (id, 2**62)) for id in (7, 9)),
        *((op, (task_id,)) for op in (Op.TASK_DELETE, Op.INPUT_DELETE) for task_id in (5, 2)),
        (Op.OUTCOME_DELETE, (2,)),
        (Op.SIGNALS_DELETE, (5,)),
        (Op.ENTRY_DELETE, (4,)),
        (Op.SUBMISSION_DELETE, (6,)),
        (Op.CONVERSATION_DELETE, (3,)),
        (Op.BLOB_DELETE, ("00",)),
    ]
    store.write(*deletes)
    left = {kind: storage.scan(kind) for kind in RecordKind}
    equal({kind: len(rows) for kind, rows in left.items() if rows}, {"conversation": 1})
    equal(storage.task_by_key(None, 1, "k"), None)
    equal(storage.conversation_by_key(2, "c"), None)
    equal((storage.tasks_by_owner(2), storage.keyed_tasks(2)), ([], []))
    equal(storage.conversations_by_owner(2), [])
    equal((storage.tasks(conversation=1), storage.live_tasks()), ([], []))
    equal((storage.entries(3), storage.last_head(3)), ([], None))
    equal((storage.submission_by_request(3, "r"), storage.open_submissions(3)), (None, []))
    equal((storage.documents_ever(1, 3), storage.documents_ever(2, 5)), ([], []))
    equal(storage.document_as_of(3, "app.todos", "", seq=10), None)
    equal(storage.signal_by_key(5, "s"), None)
    # Their keys and addresses are free again.
    store.write(conversation(13, owner=2, key="c"), task(12, key="k"))
    store.write(document(17, scope_id=3), revision(17, 8, base=1))


@conformance_case
def what_is_deleted_must_be_there(store: Store) -> None:
    """Deleting a row that does not exist contradicts the store, and nothing of it is stored."""
    storage = store.hold()
    store.write(conversation(1), entry(2), task(3), submission(4), document(5))
    for op in (
        *(Op.CONVERSATION_DELETE, Op.ENTRY_DELETE, Op.TASK_DELETE, Op.SUBMISSION_DELETE),
        *(Op.DOCUMENT_DELETE, Op.REMOVAL_DELETE),
    ):
        raises(InternalError, store.write, (Op.ENTRY_DELETE, (2,)), (op, (99,)))
    equal(ids(storage.entries(1)), [2])
    # Of these there may be none.
    store.write((Op.INPUT_DELETE, (3,)), (Op.BLOB_DELETE, ("00",)), (Op.COMMAND_DELETE, ("c",)))


@conformance_case
def an_answer_is_replaced_by_deleting_it_first(store: Store) -> None:
    """In one batch, in order; what is deleted is found under no name, and leaves no other out."""
    storage = store.hold()
    store.write(command("a"), command("b"), command(""))
    store.write((Op.COMMAND_DELETE, ("a",)), (Op.COMMAND_DELETE, ("",)), command("a", "7"))
    equal(storage.command(""), None)
    found = [storage.command(id) for id in ("a", "b")]
    equal([row and row.answer for row in found], ["7", "null"])
    equal([row[0] for row in storage.scan(RecordKind.COMMAND)], ["a", "b"])
    raises(InternalError, store.write, (Op.COMMAND_DELETE, ("b",)), command("a"))
    equal(storage.command("b"), found[1])


@conformance_case
def a_conversation_that_is_needed_is_not_deleted(store: Store) -> None:
    """A conversation with a fork, or with a submission, goes with these in one batch or not."""
    storage = store.hold()
    store.write(conversation(1), entry(2), conversation(3, parent=1, parent_entry=2))
    store.write(conversation(4), submission(5, 4))
    raises(InternalError, store.write, (Op.CONVERSATION_DELETE, (1,)))
    raises(InternalError, store.write, (Op.CONVERSATION_DELETE, (4,)))
    equal(ids(storage.conversations_by_owner(None)), [1, 3, 4])
    store.write((Op.CONVERSATION_DELETE, (1,)), (Op.CONVERSATION_DELETE, (3,)))
    store.write((Op.CONVERSATION_DELETE, (4,)), (Op.SUBMISSION_DELETE, (5,)))
    equal(storage.conversations_by_owner(None), [])


@conformance_case
def a_failed_removal_leaves_everything(store: Store) -> None:
    """A batch of deletes that fails half-way leaves every row and every index as it was."""
    storage = store.hold()
    store.write(conversation(1), task(2, key="k"), task(3, owner=2), entry(4, head=4))
    store.write(submission(5, request_id="r"), document(6), (Op.BLOB, ("00", b"x")))
    before = {kind: storage.scan(kind) for kind in RecordKind}
    deletes: list[Write] = [
        *((Op.TASK_DELETE, (id,)) for id in (2, 3)),
        (Op.ENTRY_DELETE, (4,)),
        (Op.SUBMISSION_DELETE, (5,)),
        (Op.DOCUMENT_DELETE, (6,)),
        (Op.BLOB_DELETE, ("00",)),
        (Op.CONVERSATION_DELETE, (99,)),
    ]
    raises(InternalError, store.write, *deletes)
    equal({kind: storage.scan(kind) for kind in RecordKind}, before)
    equal(ids(storage.tasks_by_owner(2)), [3])
    equal(ids(storage.live_tasks()), [2, 3])
    found = storage.submission_by_request(1, "r")
    equal(found is not None and found.id, 5)


@conformance_case
def a_stub_is_found_by_its_key_and_by_its_id(store: Store) -> None:
    """A stub is found under (kind, place, key) and by the id that the record had; once each."""
    storage = store.hold()
    store.write(stub("k", 11), stub("k", 12, place=2), stub("k", 13, kind="submission"))
    expected = StubRow("task", 2, "k", 12, "", "completed", NOW_US)
    equal((storage.stub("task", 2, "k"), storage.stub_by_id(12)), (expected, expected))
    equal((storage.stub("task", 3, "k"), storage.stub_by_id(14)), (None, None))
    raises(InternalError, store.write, stub("k", 15))


@conformance_case
def a_removal_is_listed_until_it_is_done(store: Store) -> None:
    """Trees that are being removed are listed by root until their mark is deleted."""
    storage = store.hold()
    equal(storage.removals(), [])
    store.write((Op.REMOVAL, RemovalRow(9, NOW_US)), (Op.REMOVAL, RemovalRow(3, NOW_US)))
    equal(storage.removals(), [RemovalRow(3, NOW_US), RemovalRow(9, NOW_US)])
    raises(InternalError, store.write, (Op.REMOVAL, RemovalRow(9, NOW_US)))
    store.write((Op.REMOVAL_DELETE, (3,)))
    equal(storage.removals(), [RemovalRow(9, NOW_US)])


@conformance_case
def ended_roots_are_those_that_nothing_owns(store: Store) -> None:
    """`ended_roots` gives ended tasks without an owner in a conversation without one, in range."""
    storage = store.hold()
    store.write(conversation(1), task(2, **ENDED), task(3, owner=2, **ENDED), task(4))
    store.write(conversation(5, owner=2), task(6, conversation=5, **ENDED), task(7, **ENDED))
    store.write(task(8, **{**ENDED, "ended_us": NOW_US + 1}), task(9, **ENDED))

    def found(*, before_us: int = NOW_US + 1, after: int = 0, upto: int = 100) -> list[int]:
        return ids(storage.ended_roots(before_us=before_us, after=after, upto=upto))

    equal(found(), [2, 7, 9])
    equal((found(after=2, upto=7), found(after=7, upto=8)), ([7], []))
    equal(found(before_us=NOW_US), [])
    equal(found(before_us=NOW_US + 2), [2, 7, 8, 9])


@conformance_case
def what_hangs_on_a_record_is_listed_in_pages(store: Store) -> None:
    """Owned tasks, forks and submissions are listed by id, after an id, so many at a time."""
    storage = store.hold()
    store.write(conversation(1), task(2), *(task(id, owner=2) for id in (5, 3, 4)))
    store.write(*(conversation(id, parent=1, parent_entry=2) for id in (6, 7, 8)))
    store.write(*(submission(id, 1, status="answered") for id in (9, 10)), submission(11, 1))
    equal(ids(storage.tasks_by_owner(2)), [3, 4, 5])
    equal(ids(storage.tasks_by_owner(2, after=3, limit=1)), [4])
    equal((storage.forks_of(1), storage.forks_of(1, after=6, limit=1)), ([6, 7, 8], [7]))
    equal(ids(storage.submissions_of(1)), [9, 10, 11])
    equal(ids(storage.submissions_of(1, after=9, limit=1)), [10])
    equal((storage.tasks_by_owner(3), storage.forks_of(6), storage.submissions_of(6)), ([], [], []))


@conformance_case
def documents_ever_are_the_living_and_the_retired(store: Store) -> None:
    """`documents_ever` gives what a scope has and what it had, and nothing of another scope."""
    storage = store.hold()
    store.write(conversation(1), document(2), document(3, key="k"), document(4, scope_id=9))
    store.write((Op.DOCUMENT_RETIRE, (2, 5)), document(6, created_seq=6))
    store.write(document(7, scope=2), document(8, scope=2, name="b"), (Op.DOCUMENT_RETIRE, (7, 6)))
    equal(ids(storage.documents_ever(1, 1)), [2, 3, 6])
    equal(ids(storage.documents_ever(2, 1)), [7, 8])
    equal(storage.documents_ever(0, 0), [])


@conformance_case
def pages_are_given_back_beside_the_work(store: Store) -> None:
    """`reclaim` changes no record, and says how many pages are still free."""
    storage = store.hold()
    store.write(conversation(1), *(entry(id, data='"' + "x" * 5_000 + '"') for id in range(2, 60)))
    store.write(*((Op.ENTRY_DELETE, (id,)) for id in range(2, 59)))
    left = storage.reclaim(1)
    equal(storage.reclaim(10_000) <= left, True)
    equal(ids(storage.entries(1)), [59])
    store.write(entry(60))
