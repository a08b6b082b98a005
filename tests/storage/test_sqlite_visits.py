"""What a statement really visits: few rows, however many lie beside those that it is for.

A plan says which index is used, not how many of its rows are passed over. So the instructions are
counted that SQLite runs for each call, in a store with thousands of rows of every kind that are
like those asked for in all but one respect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import apsw
import pytest

from pidurable.storage import Batch, Op, RecordKind, SqliteStorage
from pidurable.testing._conformance_base import (
    Write,
    claim,
    conversation,
    document,
    entry,
    revision,
    signal,
    submission,
    task,
    task_state,
)

DECOYS = 4_000
STEPS_MAX = 3_000
"""Instructions of one statement. A walk over the decoys takes at least three for each."""
FAR = 1_000_000
"""Decoys have ids from here on; what is asked for is below."""

HOME, TASK, DOCUMENT = 1, 2, 3

NUMBERS = (
    "with recursive n (i) as (select ?1 union all select i + 1 from n where i < ?2)\n"
    "insert into {} select {} from n"
)
DECOY_ROWS = {
    "conversations": "i, 'u', 1, 5, null, 'k' || i, '', 1",
    "entries": "i, 1, 9, 'k', null, null, null, null, null, 1",
    "tasks": "i, 1, 'k', 1, 2, 'k' || i, 0, null, null, 1, 4, 1, 1, null, null, 1, 0, 0, 0, null,"
    " null, 'completed'",
    "inputs": "i, '{}'",
    "checkpoints": "i, 'p', '{}', 1",
    "waits": "i, '{}'",
    "outcomes": "i, '{}'",
    "memos": "i, 'm', '1'",
    "signals": "i, 2, 'n', 'k' || i, 'null', 1, 1",
    "submissions": "i, 1, 'input', 'follow_up', 'r' || i, 'd', '', 1, 'answered',"
    " null, null, null, null, null, 1",
    "documents": "i, 'app.past', 1, 1, '', 'latest', 'initial', i, i + 1",
    "revisions": "3, i - 1000000, 1, 1, '{}'",
    "blobs": "'x' || i, x'00'",
    "commands": "'x' || i, 'signal', 'd', 'null', 1, 1",
    "stubs": "'task', 1, 'k' || i, i, '', 'completed', 1",
    "removals": "i, 1",
}
"""Like what is asked for: of the same conversation, task, address or owner, but ended, read,
retired or older."""

SOME: list[Write] = [
    conversation(HOME),
    conversation(5, owner=TASK, key="owned"),
    conversation(6, parent=5, parent_entry=20),
    entry(20, 5, head=20),
    entry(21, 5),
    entry(22, HOME, head=22),
    task(TASK, owner=4, key="k"),
    task(4),
    task(7, key="k"),
    (Op.TASK_INPUT, (TASK, "{}")),
    (Op.CHECKPOINT, (TASK, "p", "{}", 1)),
    (Op.WAIT, (TASK, "{}")),
    (Op.MEMO, (TASK, "m", "1")),
    signal(30, TASK, key="new"),
    submission(40, HOME, request_id="r"),
    submission(41, 5),
    document(DOCUMENT, "app.living"),
    document(50, "app.rewindable", history="rewindable", fork="as_of"),
    revision(DOCUMENT, FAR * 2, base=1),
    (Op.BLOB, ("aa", b"x")),
]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteStorage]:
    """A held store with some rows among many."""
    path = tmp_path_factory.mktemp("crowded") / "s.sqlite"
    storage = SqliteStorage(path, durability="process")
    head = storage.acquire(claim(), takeover=False)
    storage.apply(Batch(epoch=head.epoch, seq=1, next_id=FAR * 3, flush=False, writes=SOME))
    connection = apsw.Connection(str(path))
    connection.execute("pragma synchronous = off")
    connection.execute("begin immediate")
    for table, columns in DECOY_ROWS.items():
        connection.execute(NUMBERS.format(table, columns), (FAR, FAR + DECOYS - 1))
    connection.execute("commit")
    connection.close()
    yield storage
    storage.close()


@contextmanager
def counted(connection: apsw.Connection) -> Iterator[list[tuple[int, str]]]:
    """Every statement that the connection ends meanwhile, with its instructions."""
    found: list[tuple[int, str]] = []

    def ended(event: dict[str, Any]) -> None:
        found.append((event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"], event["sql"]))

    connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, ended, id=ended)
    try:
        yield found
    finally:
        connection.trace_v2(0, None, id=ended)


READS: dict[str, Callable[[SqliteStorage], Any]] = {
    "conversation": lambda s: s.conversation(5),
    "conversation_by_key": lambda s: s.conversation_by_key(TASK, "owned"),
    "conversations_by_owner": lambda s: s.conversations_by_owner(TASK),
    "conversations_by_owner, a page": lambda s: s.conversations_by_owner(None, after=9, limit=2),
    "conversation_owners": lambda s: s.conversation_owners([TASK, 7]),
    "entry": lambda s: s.entry(20),
    "entries": lambda s: s.entries(5),
    "entries, a page": lambda s: s.entries(HOME, after=FAR + 100, limit=2),
    "entries, backwards": lambda s: s.entries(HOME, before=FAR + 100, limit=2, reverse=True),
    "last_head": lambda s: s.last_head(HOME),
    "task": lambda s: s.task(TASK),
    "task_by_key, of an owner": lambda s: s.task_by_key(4, HOME, "k"),
    "task_by_key, of a conversation": lambda s: s.task_by_key(None, HOME, "k"),
    "keyed_tasks": lambda s: s.keyed_tasks(4),
    "live_tasks": lambda s: s.live_tasks(),
    "outline": lambda s: s.outline(limit=10),
    "tasks, a page": lambda s: s.tasks(conversation=HOME, after=FAR + 50, limit=2),
    "tasks, the newest": lambda s: s.tasks(conversation=HOME, limit=2, reverse=True),
    "tasks_by_owner": lambda s: s.tasks_by_owner(4),
    "task_input": lambda s: s.task_input(TASK),
    "task_checkpoint": lambda s: s.task_checkpoint(TASK),
    "checkpoint_at": lambda s: s.checkpoint_at(TASK),
    "task_phases": lambda s: s.task_phases([TASK, 7]),
    "task_wait": lambda s: s.task_wait(TASK),
    "waits, a page": lambda s: s.waits(after=FAR + 10, limit=2),
    "task_outcome": lambda s: s.task_outcome(FAR),
    "task_memos": lambda s: s.task_memos(TASK),
    "task_starts": lambda s: s.task_starts([TASK]),
    "signals": lambda s: s.signals(TASK),
    "signal_by_key": lambda s: s.signal_by_key(TASK, "new"),
    "submission": lambda s: s.submission(40),
    "submission_by_request": lambda s: s.submission_by_request(HOME, "r"),
    "open_submissions": lambda s: s.open_submissions(HOME),
    "submissions_of": lambda s: s.submissions_of(5),
    "document": lambda s: s.document("app.living", 1, 1, ""),
    "documents": lambda s: s.documents(1, 1),
    "document_as_of": lambda s: s.document_as_of(1, "app.past", "", seq=FAR + 500),
    "documents_as_of": lambda s: s.documents_as_of(1, seq=FAR),
    "revisions": lambda s: s.revisions(DOCUMENT),
    "revisions of the past": lambda s: s.revisions(DOCUMENT, upto_seq=300),
    "blob": lambda s: s.blob("aa"),
    "has_blob": lambda s: s.has_blob("aa"),
    "command": lambda s: s.command(f"x{FAR}"),
    "ended_roots": lambda s: s.ended_roots(before_us=9, after=0, upto=100),
    "forks_of": lambda s: s.forks_of(5),
    "stub": lambda s: s.stub("task", 1, f"k{FAR}"),
    "stub_by_id": lambda s: s.stub_by_id(FAR + 7),
    **{f"scan {kind}": lambda s, kind=kind: s.scan(kind, limit=2) for kind in RecordKind},
}


@pytest.mark.parametrize("name", READS)
def test_a_read_passes_over_no_crowd(crowded: SqliteStorage, name: str) -> None:
    """Each read runs as few instructions as its answer needs."""
    with counted(crowded._reader) as found:
        READS[name](crowded)

    assert found
    assert max(found)[0] <= STEPS_MAX, max(found)


@pytest.mark.parametrize("kind", RecordKind)
def test_the_next_page_of_a_scan_passes_over_no_crowd(
    crowded: SqliteStorage, kind: RecordKind
) -> None:
    """A scan goes on behind a key without walking there."""
    rows = crowded.scan(kind, limit=DECOYS - 10)
    width = {RecordKind.MEMO: 2, RecordKind.REVISION: 2, RecordKind.STUB: 3}.get(kind, 1)
    with counted(crowded._reader) as found:
        page = crowded.scan(kind, after=rows[-1][:width], limit=2)

    assert len(page) == 2
    assert max(found)[0] <= STEPS_MAX, max(found)


WRITES: dict[Op, list[tuple[Any, ...]]] = {
    Op.CONVERSATION: [conversation(60, parent=HOME, parent_entry=22)[1]],
    Op.ENTRY: [entry(61, HOME)[1]],
    Op.TASK: [task(62, key="w")[1]],
    Op.TASK_INPUT: [(62, "{}")],
    Op.TASK_STATE: [task_state(62)[1]],
    Op.CHECKPOINT: [(62, "p", "{}", 1)],
    Op.CHECKPOINT_DELETE: [(FAR + 1,)],
    Op.WAIT: [(62, "{}")],
    Op.WAIT_DELETE: [(FAR + 1,)],
    Op.OUTCOME: [(62, "{}")],
    Op.OUTCOME_DELETE: [(FAR + 1,)],
    Op.MEMO: [(62, "m", "1")],
    Op.MEMOS_DELETE: [(FAR + 1,)],
    Op.SIGNAL: [signal(63, TASK, key="w")[1]],
    Op.SIGNAL_READ: [(63,)],
    Op.SIGNAL_DELETE: [(FAR + 1,)],
    Op.SIGNALS_DELETE: [(62,)],
    Op.SUBMISSION: [submission(64, HOME, request_id="w")[1]],
    Op.SUBMISSION_STATE: [("answered", None, None, None, None, None, 1, 64)],
    Op.DOCUMENT: [document(65, "app.past", created_seq=FAR * 2)[1]],
    Op.DOCUMENT_TERMS: [(65, "latest", "initial")],
    Op.DOCUMENT_RETIRE: [(65, FAR * 2 + 1)],
    Op.REVISION: [revision(65, FAR * 2, base=1)[1]],
    Op.REVISIONS_DELETE: [(65, FAR * 3)],
    Op.BLOB: [("bb", b"x")],
    Op.COMMAND: [("w", "signal", "d", "null", 1, 1)],
    Op.STUB: [("task", 1, "w", 66, "", "completed", 1)],
    Op.REMOVAL: [(67, 1)],
    Op.REMOVAL_DELETE: [(FAR + 1,)],
    Op.TASK_DELETE: [(FAR + 1,)],
    Op.INPUT_DELETE: [(FAR + 1,)],
    # A child that refers to it would be looked for: in the forks and in the submissions.
    Op.CONVERSATION_DELETE: [(FAR + 1,)],
    Op.ENTRY_DELETE: [(FAR + 1,)],
    Op.SUBMISSION_DELETE: [(FAR + 1,)],
    Op.DOCUMENT_DELETE: [(FAR + 1,)],
    Op.BLOB_DELETE: [(f"x{FAR + 1}",)],
    Op.COMMAND_DELETE: [("w",)],
}


def test_a_write_passes_over_no_crowd(crowded: SqliteStorage) -> None:
    """Each kind of write, deletions and what they check included, looks at its own rows alone."""
    assert set(WRITES) == set(Op)
    epoch = crowded.head().epoch
    costs: dict[str, int] = {}
    for seq, op in enumerate(WRITES, 2):
        writes = [(op, row) for row in WRITES[op]]
        with counted(crowded._writer) as found:
            crowded.apply(Batch(epoch=epoch, seq=seq, next_id=FAR * 3, flush=False, writes=writes))
        costs[op.name] = max(found)[0]

    assert {name: cost for name, cost in costs.items() if cost > 200} == {}


@pytest.mark.parametrize(
    ("index", "name"),
    [
        ("signals_task", "signals"),
        ("entries_head", "last_head"),
        ("submissions_open", "open_submissions"),
        ("documents_living", "documents"),
        ("stubs_id", "stub_by_id"),
        ("tasks_live", "live_tasks"),
        ("conversations_parent", "forks_of"),
    ],
)
def test_the_count_sees_a_missing_index(crowded: SqliteStorage, index: str, name: str) -> None:
    """Without the index that finds its rows, the same read runs far more instructions."""
    connection = apsw.Connection(crowded.store)
    sql = connection.execute("select sql from sqlite_schema where name = ?", (index,)).get
    connection.execute(f"drop index {index}")
    try:
        with counted(crowded._reader) as found:
            READS[name](crowded)
    finally:
        connection.execute(sql)
        connection.close()

    assert max(found)[0] > STEPS_MAX
