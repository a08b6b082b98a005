"""Every SQL statement that a running session executes, in two tables: writes by op, reads by name.

A test explains each read and fails on one that scans a table, so a new read belongs here and
nowhere else. Parameters are always bound, in the order of the row's columns.
"""

# ruff: noqa: S608 - only names of tables and columns of ours are put into the text.

from __future__ import annotations

from typing import Any

from pidurable.storage._contract import (
    RECORDS,
    CommandRow,
    ConversationRow,
    DocumentRow,
    EntryRow,
    Op,
    RecordKind,
    RemovalRow,
    RevisionRow,
    SignalRow,
    StubRow,
    SubmissionRow,
    SubmissionStateRow,
    TaskRow,
    TaskStateRow,
)

LAST_ID = 2**63 - 1
STARTS_AT_ONCE = 32
"""Tasks that one statement reads the beginnings of: as many places as it has."""


def _insert(table: str, columns: tuple[str, ...]) -> str:
    names = ", ".join(columns)
    places = ", ".join("?" for _ in columns)
    return f"insert into {table} ({names})\nvalues ({places})"


def _update(table: str, columns: tuple[str, ...]) -> str:
    """Every column but the last is replaced; the last one, the id, says where."""
    assignments = ", ".join(f"{name} = ?" for name in columns[:-1])
    return f"update {table}\nset {assignments}\nwhere {columns[-1]} = ?"


WRITES: dict[Op, str] = {
    Op.CONVERSATION: _insert("conversations", ConversationRow._fields),
    Op.ENTRY: _insert("entries", EntryRow._fields),
    Op.TASK: _insert("tasks", TaskRow._fields),
    Op.TASK_INPUT: "insert or replace into inputs (task, value)\nvalues (?, ?)",
    Op.TASK_STATE: _update("tasks", TaskStateRow._fields),
    Op.CHECKPOINT: (
        "insert or replace into checkpoints (task, phase, value, at_us)\nvalues (?, ?, ?, ?)"
    ),
    Op.CHECKPOINT_DELETE: "delete from checkpoints\nwhere task = ?",
    Op.WAIT: "insert or replace into waits (task, value)\nvalues (?, ?)",
    Op.WAIT_DELETE: "delete from waits\nwhere task = ?",
    Op.OUTCOME: _insert("outcomes", ("task", "value")),
    Op.OUTCOME_DELETE: "delete from outcomes\nwhere task = ?",
    Op.MEMO: _insert("memos", ("task", "name", "value")),
    Op.MEMOS_DELETE: "delete from memos\nwhere task = ?",
    Op.SIGNAL: _insert("signals", SignalRow._fields),
    Op.SIGNAL_DELETE: "delete from signals\nwhere id = ?",
    Op.SIGNALS_DELETE: "delete from signals\nwhere task = ?",
    Op.SUBMISSION: _insert("submissions", SubmissionRow._fields),
    Op.SUBMISSION_STATE: _update("submissions", SubmissionStateRow._fields),
    Op.DOCUMENT: _insert("documents", DocumentRow._fields),
    Op.DOCUMENT_RETIRE: (
        "update documents\nset retired_seq = ?2\nwhere id = ?1 and retired_seq is null"
    ),
    Op.DOCUMENT_TERMS: "update documents\nset history = ?2, fork = ?3\nwhere id = ?1",
    Op.REVISION: _insert("revisions", RevisionRow._fields),
    Op.REVISIONS_DELETE: "delete from revisions\nwhere document = ? and seq < ?",
    Op.SIGNAL_READ: "update signals\nset read = 1, payload = 'null'\nwhere id = ?",
    Op.BLOB: "insert or ignore into blobs (sha256, bytes)\nvalues (?, ?)",
    Op.COMMAND: _insert("commands", CommandRow._fields),
    Op.STUB: _insert("stubs", StubRow._fields),
    Op.REMOVAL: _insert("removals", RemovalRow._fields),
    Op.REMOVAL_DELETE: "delete from removals\nwhere root = ?",
    Op.TASK_DELETE: "delete from tasks\nwhere id = ?",
    Op.INPUT_DELETE: "delete from inputs\nwhere task = ?",
    Op.CONVERSATION_DELETE: "delete from conversations\nwhere id = ?",
    Op.ENTRY_DELETE: "delete from entries\nwhere id = ?",
    Op.SUBMISSION_DELETE: "delete from submissions\nwhere id = ?",
    Op.DOCUMENT_DELETE: "delete from documents\nwhere id = ?",
    Op.BLOB_DELETE: "delete from blobs\nwhere sha256 = ?",
    Op.COMMAND_DELETE: "delete from commands\nwhere id = ?",
}

EXACT = frozenset(
    {
        *(Op.TASK_STATE, Op.SUBMISSION_STATE, Op.DOCUMENT_RETIRE, Op.DOCUMENT_TERMS),
        *(Op.REMOVAL_DELETE, Op.TASK_DELETE, Op.CONVERSATION_DELETE, Op.ENTRY_DELETE),
        *(Op.SUBMISSION_DELETE, Op.DOCUMENT_DELETE),
    }
)
"""Ops whose row must exist: one row changed for each write, or the batch contradicts the store."""

HEAD_UPDATE = "update session\nset seq = ?, next_id = ?, clean = ?\nwhere id = 1 and epoch = ?"
HEARTBEAT = (
    "update heartbeat\nset at_us = ?"
    "\nwhere id = 1 and epoch = ? and epoch = (select epoch from session where id = 1)"
)
EPOCH_UPDATE = "update session\nset epoch = ?, clean = 0\nwhere id = 1"
HOLDER_REPLACE = (
    "insert or replace into holder (id, epoch, holder_id, host, pid, started_us, lock_file,"
    " store_uuid, inode, released)\nvalues (1, ?, ?, ?, ?, ?, ?, ?, ?, 0)"
)
HEARTBEAT_REPLACE = "insert or replace into heartbeat (id, epoch, at_us)\nvalues (1, ?, ?)"
HOLDER_RELEASE = "update holder\nset released = 1\nwhere id = 1 and epoch = ?"

_CONVERSATION = ", ".join(ConversationRow._fields)
_ENTRY = ", ".join(EntryRow._fields)
_TASK = ", ".join(TaskRow._fields)
_OUTLINE = "id, conversation, owner, status, blocked is not null, abort_us is not null"
_SIGNAL = ", ".join(SignalRow._fields)
_SUBMISSION = ", ".join(SubmissionRow._fields)
_DOCUMENT = ", ".join(DocumentRow._fields)
_REVISION = ", ".join(RevisionRow._fields)

_COMMAND = ", ".join(CommandRow._fields)
_STUB = ", ".join(StubRow._fields)

_PLACES = ", ".join("?" * STARTS_AT_ONCE)

READS: dict[str, str] = {
    "head": ("select uuid, created_us, epoch, seq, next_id, clean\nfrom session\nwhere id = 1"),
    "holder": (
        "select holder.epoch, holder_id, host, pid, started_us, heartbeat.at_us, lock_file,"
        " released, store_uuid, inode\nfrom holder\njoin heartbeat on heartbeat.id = holder.id"
        "\nwhere holder.id = 1"
    ),
    "conversation": f"select {_CONVERSATION}\nfrom conversations\nwhere id = ?",
    "conversation_by_key": (
        f"select {_CONVERSATION}\nfrom conversations"
        "\nwhere coalesce(owner, 0) = ? and key = ? and key is not null"
    ),
    "conversations_by_owner": (
        f"select {_CONVERSATION}\nfrom conversations"
        "\nwhere owner is ? and id > ?\norder by id\nlimit ?"
    ),
    "conversation_owners": (
        f"select id\nfrom tasks\nwhere id in ({_PLACES})"
        "\n  and exists (select 1 from conversations where owner = tasks.id)\norder by id"
    ),
    "entry": f"select {_ENTRY}\nfrom entries\nwhere id = ?",
    "entries": (
        f"select {_ENTRY}\nfrom entries"
        "\nwhere conversation = ? and id > ? and id < ?\norder by id\nlimit ?"
    ),
    "entries_reverse": (
        f"select {_ENTRY}\nfrom entries"
        "\nwhere conversation = ? and id > ? and id < ?\norder by id desc\nlimit ?"
    ),
    "last_head": (
        f"select {_ENTRY}\nfrom entries"
        "\nwhere conversation = ? and head is not null and id < ?\norder by id desc\nlimit 1"
    ),
    "task": f"select {_TASK}\nfrom tasks\nwhere id = ?",
    "task_by_owner_key": (
        f"select {_TASK}\nfrom tasks"
        "\nwhere owner = ? and key = ? and key is not null and owner is not null"
    ),
    "task_by_conversation_key": (
        f"select {_TASK}\nfrom tasks"
        "\nwhere conversation = ? and key = ? and key is not null and owner is null"
    ),
    "tasks_by_owner": (
        f"select {_TASK}\nfrom tasks"
        "\nwhere owner = ? and owner is not null and id > ?\norder by id\nlimit ?"
    ),
    "keyed_tasks": (
        "select key, id\nfrom tasks"
        "\nwhere owner = ? and key is not null and owner is not null\norder by key"
    ),
    "live_tasks": f"select {_TASK}\nfrom tasks\nwhere status < 4 and id > ?\norder by id\nlimit ?",
    "outline": (
        f"select {_OUTLINE}\nfrom tasks\nwhere status < 4 and id > ?\norder by id\nlimit ?"
    ),
    "outline_reverse": (
        f"select {_OUTLINE}\nfrom tasks\nwhere status < 4 and id > ?\norder by id desc\nlimit ?"
    ),
    "task_input": "select value\nfrom inputs\nwhere task = ?",
    "task_checkpoint": "select phase, value\nfrom checkpoints\nwhere task = ?",
    "checkpoint_at": "select phase, at_us\nfrom checkpoints\nwhere task = ?",
    "task_phases": (
        f"select task, phase\nfrom checkpoints\nwhere task in ({_PLACES})\norder by task"
    ),
    "waits": "select task, value\nfrom waits\nwhere task > ?\norder by task\nlimit ?",
    "task_wait": "select value\nfrom waits\nwhere task = ?",
    "task_outcome": "select value\nfrom outcomes\nwhere task = ?",
    "task_memos": "select name, value\nfrom memos\nwhere task = ?\norder by name",
    "task_starts": (
        "select inputs.task, inputs.value, phase, checkpoints.value\nfrom inputs"
        "\njoin checkpoints on checkpoints.task = inputs.task"
        f"\nwhere inputs.task in ({_PLACES})\norder by inputs.task"
    ),
    "memos_of_tasks": f"select task, name, value\nfrom memos\nwhere task in ({_PLACES})",
    "signals": f"select {_SIGNAL}\nfrom signals\nwhere task = ? and read = 0\norder by id\nlimit ?",
    "live_signals": (
        "select task, count(*)\nfrom signals\nwhere read = 0\ngroup by task\norder by task"
    ),
    "signal_by_key": "select id\nfrom signals\nwhere task = ? and key = ? and key is not null",
    "submission": f"select {_SUBMISSION}\nfrom submissions\nwhere id = ?",
    "submission_by_request": (
        f"select {_SUBMISSION}\nfrom submissions\nwhere conversation = ? and request_id = ?"
    ),
    "submissions_of": (
        f"select {_SUBMISSION}\nfrom submissions"
        "\nwhere conversation = ? and id > ?\norder by id\nlimit ?"
    ),
    "open_submissions": (
        f"select {_SUBMISSION}\nfrom submissions"
        "\nwhere conversation = ? and status in ('queued', 'placed')\norder by id"
    ),
    "document": (
        f"select {_DOCUMENT}\nfrom documents"
        "\nwhere name = ? and scope = ? and scope_id = ? and key = ? and retired_seq is null"
    ),
    "documents": (
        f"select {_DOCUMENT}\nfrom documents"
        "\nwhere scope = ? and scope_id = ? and retired_seq is null\norder by id"
    ),
    "documents_retired": (
        f"select {_DOCUMENT}\nfrom documents"
        "\nwhere scope = ? and scope_id = ? and retired_seq is not null\norder by id"
    ),
    "document_as_of": (
        f"select {_DOCUMENT}\nfrom documents"
        "\nwhere scope = 1 and scope_id = ? and name = ? and key = ? and created_seq <= ?"
        "\norder by created_seq desc\nlimit 1"
    ),
    "next_rewindable": (
        "select name, key\nfrom documents"
        "\nwhere scope = 1 and history = 'rewindable' and scope_id = ? and (name, key) > (?, ?)"
        "\norder by name, key\nlimit 1"
    ),
    "revisions": (
        f"select {_REVISION}\nfrom revisions\nwhere document = ?1 and seq <= ?2 and seq >= ("
        "\n  select seq\n  from revisions\n  where document = ?1 and seq <= ?2 and base = 1"
        "\n  order by seq desc\n  limit 1\n)\norder by seq"
    ),
    "blob": "select bytes\nfrom blobs\nwhere sha256 = ?",
    "has_blob": "select 1\nfrom blobs\nwhere sha256 = ?",
    "blob_sizes": (
        "select sha256, length(bytes)\nfrom blobs\nwhere sha256 > ?\norder by sha256\nlimit ?"
    ),
    "command": f"select {_COMMAND}\nfrom commands\nwhere id = ?",
    "ended_roots": (
        f"select {_TASK}\nfrom tasks\nwhere id > ? and id <= ? and status = 4 and owner is null"
        "\n  and ended_us < ? and exists ("
        "\n    select 1\n    from conversations"
        "\n    where conversations.id = tasks.conversation and conversations.owner is null"
        "\n  )\norder by id"
    ),
    "forks_of": (
        "select id\nfrom conversations"
        "\nwhere parent = ? and parent is not null and id > ?\norder by id\nlimit ?"
    ),
    "stub": f"select {_STUB}\nfrom stubs\nwhere kind = ? and place = ? and key = ?",
    "stub_by_id": f"select {_STUB}\nfrom stubs\nwhere id = ?",
    "removals": "select root, at_us\nfrom removals\norder by root",
}

PEOPLE_READS: dict[str, str] = {
    "live_counts": (
        "select count(*), coalesce(sum(blocked is not null), 0),"
        "\n  coalesce(sum(blocked is null and abort_us is not null), 0),"
        + ",".join(
            f"\n  coalesce(sum(blocked is null and abort_us is null and status = {status}), 0)"
            for status in range(4)
        )
        + "\nfrom tasks\nwhere status < 4"
    )
}
"""Counting live tasks, and the filters of `tasks` without a conversation: for people, and exempt
from the plan test."""


def _task_scan_name(filters: tuple[str, ...], reverse: bool) -> str:
    return "tasks:" + ",".join(filters) + (":reverse" if reverse else "")


def _add_task_scans() -> None:
    for number in range(8):
        names = ("conversation", "kind", "status")
        filters = tuple(name for bit, name in enumerate(names) if number >> bit & 1)
        terms = " and ".join([*(f"{name} = ?" for name in filters), "id > ?"])
        table = READS if not filters or "conversation" in filters else PEOPLE_READS
        for reverse in (False, True):
            order = "id desc" if reverse else "id"
            table[_task_scan_name(filters, reverse)] = (
                f"select {_TASK}\nfrom tasks\nwhere {terms}\norder by {order}\nlimit ?"
            )


_add_task_scans()


def task_scan(
    *, conversation: int | None, kind: str | None, status: int | None, reverse: bool
) -> tuple[str, list[Any]]:
    """Return the scan of tasks for the filters that are given, and their values in its order."""
    given = {"conversation": conversation, "kind": kind, "status": status}
    filters = tuple(name for name, value in given.items() if value is not None)
    name = _task_scan_name(filters, reverse)
    sql = READS.get(name) or PEOPLE_READS[name]
    return sql, [given[filter_] for filter_ in filters]


_TABLES = {kind: "entries" if kind is RecordKind.ENTRY else f"{kind}s" for kind in RecordKind}


def _add_record_scans() -> None:
    """For each kind the first page and those after a key: (key columns) > (places).

    The first page is the head of a table in the order of its key, which is how it is stored.
    """
    for kind, shape in RECORDS.items():
        key = ", ".join(shape.key)
        begin = f"select {', '.join(shape.columns)}\nfrom {_TABLES[kind]}"
        end = f"order by {key}\nlimit ?"
        places = ", ".join("?" * len(shape.key))
        READS[f"first:{kind}"] = f"{begin}\n{end}"
        READS[f"next:{kind}"] = f"{begin}\nwhere ({key}) > ({places})\n{end}"


_add_record_scans()


def record_scan(kind: RecordKind, after: tuple[Any, ...] | None) -> str:
    """Return the name of the read of one page of a kind of record."""
    return f"first:{kind}" if after is None else f"next:{kind}"
