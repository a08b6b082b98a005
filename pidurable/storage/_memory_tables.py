"""What the memory backend keeps: its tables and indexes, and how a batch changes them.

Every change goes through an undo list, so that a batch that fails half-way leaves no trace.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from pidurable.errors import InternalError, check
from pidurable.storage._contract import (
    CommandRow,
    ConversationRow,
    DocumentRow,
    EntryRow,
    Head,
    HolderRecord,
    Op,
    RemovalRow,
    RevisionRow,
    SignalRow,
    StubRow,
    SubmissionRow,
    SubmissionStateRow,
    TaskRow,
    TaskStateRow,
)
from pidurable.storage._memory_checks import check_row
from pidurable.storage._memory_commands import Waiting

if TYPE_CHECKING:
    from pidurable.storage._memory import MemoryStorage

LAST_ID = 2**63 - 1
_TERMINAL = 4
_OPEN = ("queued", "placed")
_CONVERSATION_SCOPE = 1


class _Ids:
    """Sorted ids. Adding at the end, the usual case, costs nothing to speak of."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, id: int) -> None:
        if not self._ids or id > self._ids[-1]:
            self._ids.append(id)
        else:
            insort(self._ids, id)

    def remove(self, id: int) -> None:
        del self._ids[bisect_left(self._ids, id)]

    def scan(
        self, after: int = -1, before: int = LAST_ID, *, reverse: bool = False
    ) -> Iterator[int]:
        """Walk the ids with after < id < before, without copying the list."""
        first, end = bisect_right(self._ids, after), bisect_left(self._ids, before)
        places = range(end - 1, first - 1, -1) if reverse else range(first, end)
        for place in places:
            yield self._ids[place]

    def last(self, before: int) -> int | None:
        place = bisect_left(self._ids, before)
        return self._ids[place - 1] if place else None


class _Index:
    """Sorted ids by a key, for example the entries of each conversation."""

    __slots__ = ("_by_key",)

    def __init__(self) -> None:
        self._by_key: dict[Hashable, _Ids] = {}

    def of(self, key: Hashable) -> _Ids:
        return self._by_key.get(key) or _NO_IDS

    def counts(self) -> list[tuple[Any, int]]:
        return [(key, len(ids)) for key, ids in self._by_key.items()]

    def add(self, key: Hashable, id: int) -> None:
        self._by_key.setdefault(key, _Ids()).add(id)

    def remove(self, key: Hashable, id: int) -> None:
        ids = self._by_key[key]
        ids.remove(id)
        if not ids:
            del self._by_key[key]


_NO_IDS = _Ids()


class _Undo:
    """What a batch changed, with the way back. Every change of the data goes through here."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def put(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Insert or replace."""
        if key in table:
            self._steps.append((table.__setitem__, (key, table[key])))
        else:
            self._steps.append((table.__delitem__, (key,)))
        table[key] = value

    def insert(self, table: dict[Any, Any], key: Any, value: Any, what: str) -> None:
        """Insert what must not be there yet."""
        check(key not in table, f"{what} {key} exists already")
        self.put(table, key, value)

    def delete(self, table: dict[Any, Any], key: Any) -> Any:
        """Delete and return the old value; None if there was none."""
        if key not in table:
            return None
        value = table.pop(key)
        self._steps.append((table.__setitem__, (key, value)))
        return value

    def add(self, index: _Index, key: Hashable, id: int) -> None:
        index.add(key, id)
        self._steps.append((index.remove, (key, id)))

    def remove(self, index: _Index, key: Hashable, id: int) -> None:
        index.remove(key, id)
        self._steps.append((index.add, (key, id)))

    def run(self) -> None:
        for step, arguments in reversed(self._steps):
            step(*arguments)


@attrs.define(eq=False)
class Data:
    """One session's records, shared by all handles on it."""

    head: Head
    holder: HolderRecord | None = None
    living: MemoryStorage | None = None
    """The open handle that holds the session: the counterpart of a lock file."""
    waiting: Waiting = attrs.Factory(Waiting)
    """Commands from outside: of the session, though not of its records."""
    mutex: threading.RLock = attrs.Factory(threading.RLock)

    conversations: dict[int, ConversationRow] = attrs.Factory(dict)
    conversations_by_owner: _Index = attrs.Factory(_Index)
    conversations_by_key: dict[tuple[int, str], int] = attrs.Factory(dict)
    entries: dict[int, EntryRow] = attrs.Factory(dict)
    entries_by_conversation: _Index = attrs.Factory(_Index)
    heads: _Index = attrs.Factory(_Index)
    tasks: dict[int, TaskRow] = attrs.Factory(dict)
    task_ids: _Index = attrs.Factory(_Index)
    """Under None all tasks, under True the live ones, under a number those of a conversation."""
    tasks_by_key: dict[tuple[str, int, str], int] = attrs.Factory(dict)
    keys_by_owner: _Index = attrs.Factory(_Index)
    inputs: dict[int, str] = attrs.Factory(dict)
    checkpoints: dict[int, tuple[str, str, int]] = attrs.Factory(dict)
    waits: dict[int, str] = attrs.Factory(dict)
    outcomes: dict[int, str] = attrs.Factory(dict)
    memos: dict[int, dict[str, str]] = attrs.Factory(dict)
    signals: dict[int, SignalRow] = attrs.Factory(dict)
    signals_by_task: _Index = attrs.Factory(_Index)
    """Under a task its unread ones, under ("read", task) those whose key is still taken."""
    signals_read: dict[int, bool] = attrs.Factory(dict)
    signals_by_key: dict[tuple[int, str], int] = attrs.Factory(dict)
    submissions: dict[int, SubmissionRow] = attrs.Factory(dict)
    submissions_open: _Index = attrs.Factory(_Index)
    submissions_by_request: dict[tuple[int, str], int] = attrs.Factory(dict)
    documents: dict[int, DocumentRow] = attrs.Factory(dict)
    living_documents: dict[tuple[int, int, str, str], int] = attrs.Factory(dict)
    documents_by_scope: _Index = attrs.Factory(_Index)
    documents_past: dict[tuple[int, str, str, int], int] = attrs.Factory(dict)
    """Of conversations: what was ever created at an address, by the commit that did."""
    commits_by_address: _Index = attrs.Factory(_Index)
    addresses_by_conversation: dict[int, dict[tuple[str, str], None]] = attrs.Factory(dict)
    """(name, key) of whatever was ever there."""
    revisions: dict[tuple[int, int], RevisionRow] = attrs.Factory(dict)
    revisions_by_document: _Index = attrs.Factory(_Index)
    blobs: dict[str, bytes] = attrs.Factory(dict)
    commands: dict[str, CommandRow] = attrs.Factory(dict)
    stubs: dict[tuple[str, int, str], StubRow] = attrs.Factory(dict)
    removals: dict[int, RemovalRow] = attrs.Factory(dict)
    # What only retention asks for.
    conversations_by_parent: _Index = attrs.Factory(_Index)
    tasks_by_owner: _Index = attrs.Factory(_Index)
    submissions_by_conversation: _Index = attrs.Factory(_Index)
    retired_documents: _Index = attrs.Factory(_Index)
    """By (scope, scope id)."""


class Writer:
    """Applies the writes of one batch to the data, through the undo list."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.undo = _Undo()
        self.parents: list[tuple[str, int]] = []
        """Conversations that must exist at the end of the batch, and who says so."""
        self.gone: list[int] = []
        """Conversations to which nothing may refer at the end of the batch."""

    def write(self, op: Op, row: tuple[Any, ...]) -> None:
        check_row(op, row)
        _APPLY[op](self, row)

    def finish(self) -> None:
        for who, conversation in self.parents:
            check(
                conversation in self.data.conversations,
                f"{who} refers to conversation {conversation}, which does not exist",
            )
        for conversation in self.gone:
            for left in (self.data.conversations_by_parent, self.data.submissions_by_conversation):
                found = next(left.of(conversation).scan(), None)
                check(found is None, f"conversation {conversation} is gone, but not {found}")

    def conversation(self, values: tuple[Any, ...]) -> None:
        row = ConversationRow(*values)
        self.undo.insert(self.data.conversations, row.id, row, "conversation")
        self.undo.add(self.data.conversations_by_owner, row.owner, row.id)
        if row.key is not None:
            key = (row.owner or 0, row.key)
            self.undo.insert(self.data.conversations_by_key, key, row.id, "conversation key")
        if row.parent is not None:
            self.undo.add(self.data.conversations_by_parent, row.parent, row.id)
            self.parents.append((f"conversation {row.id}", row.parent))

    def entry(self, values: tuple[Any, ...]) -> None:
        row = EntryRow(*values)
        self.undo.insert(self.data.entries, row.id, row, "entry")
        self.undo.add(self.data.entries_by_conversation, row.conversation, row.id)
        if row.head is not None:
            self.undo.add(self.data.heads, row.conversation, row.id)

    def task(self, values: tuple[Any, ...]) -> None:
        row = TaskRow(*values)
        self.undo.insert(self.data.tasks, row.id, row, "task")
        self.undo.add(self.data.task_ids, None, row.id)
        self.undo.add(self.data.task_ids, ("conversation", row.conversation), row.id)
        if row.status < _TERMINAL:
            self.undo.add(self.data.task_ids, "live", row.id)
        if row.owner is not None:
            self.undo.add(self.data.tasks_by_owner, row.owner, row.id)
        if row.key is not None:
            self.undo.insert(self.data.tasks_by_key, _task_key(row), row.id, "task key")
            if row.owner is not None:
                self.undo.add(self.data.keys_by_owner, row.owner, row.id)

    def task_state(self, values: tuple[Any, ...]) -> None:
        state = TaskStateRow(*values)
        old = self.data.tasks.get(state.id)
        if old is None:
            raise InternalError(f"task {state.id}, whose state is to be stored, does not exist")
        self.undo.put(self.data.tasks, state.id, old._replace(**state._asdict()))
        was, now = old.status < _TERMINAL, state.status < _TERMINAL
        if was and not now:
            self.undo.remove(self.data.task_ids, "live", state.id)
        elif now and not was:
            self.undo.add(self.data.task_ids, "live", state.id)

    def task_input(self, row: tuple[Any, ...]) -> None:
        self.undo.put(self.data.inputs, row[0], row[1])

    def checkpoint(self, row: tuple[Any, ...]) -> None:
        self.undo.put(self.data.checkpoints, row[0], (row[1], row[2], row[3]))

    def checkpoint_delete(self, row: tuple[Any, ...]) -> None:
        self.undo.delete(self.data.checkpoints, row[0])

    def wait(self, row: tuple[Any, ...]) -> None:
        self.undo.put(self.data.waits, row[0], row[1])

    def wait_delete(self, row: tuple[Any, ...]) -> None:
        self.undo.delete(self.data.waits, row[0])

    def outcome(self, row: tuple[Any, ...]) -> None:
        self.undo.insert(self.data.outcomes, row[0], row[1], "outcome of task")

    def outcome_delete(self, row: tuple[Any, ...]) -> None:
        self.undo.delete(self.data.outcomes, row[0])

    def memo(self, row: tuple[Any, ...]) -> None:
        task, name, value = row
        if task not in self.data.memos:
            self.undo.put(self.data.memos, task, {})
        self.undo.insert(self.data.memos[task], name, value, f"memo of task {task}")

    def memos_delete(self, row: tuple[Any, ...]) -> None:
        self.undo.delete(self.data.memos, row[0])

    def signal(self, values: tuple[Any, ...]) -> None:
        row = SignalRow(*values)
        self.undo.insert(self.data.signals, row.id, row, "signal")
        self.undo.add(self.data.signals_by_task, row.task, row.id)
        if row.key is not None:
            key = (row.task, row.key)
            self.undo.insert(self.data.signals_by_key, key, row.id, "signal key")

    def signal_delete(self, values: tuple[Any, ...]) -> None:
        row: SignalRow | None = self.undo.delete(self.data.signals, values[0])
        if row is not None:
            was_read = self.undo.delete(self.data.signals_read, row.id)
            place = ("read", row.task) if was_read else row.task
            self.undo.remove(self.data.signals_by_task, place, row.id)
            if row.key is not None:
                self.undo.delete(self.data.signals_by_key, (row.task, row.key))

    def signal_read(self, values: tuple[Any, ...]) -> None:
        row = self.data.signals.get(values[0])
        if row is not None and row.id not in self.data.signals_read:
            self.undo.put(self.data.signals, row.id, row._replace(payload="null"))
            self.undo.put(self.data.signals_read, row.id, True)
            self.undo.remove(self.data.signals_by_task, row.task, row.id)
            self.undo.add(self.data.signals_by_task, ("read", row.task), row.id)

    def signals_delete(self, row: tuple[Any, ...]) -> None:
        for place in (row[0], ("read", row[0])):
            for signal in list(self.data.signals_by_task.of(place).scan()):
                self.signal_delete((signal,))

    def submission(self, values: tuple[Any, ...]) -> None:
        row = SubmissionRow(*values)
        self.undo.insert(self.data.submissions, row.id, row, "submission")
        self.undo.add(self.data.submissions_by_conversation, row.conversation, row.id)
        if row.request_id is not None:
            key = (row.conversation, row.request_id)
            self.undo.insert(self.data.submissions_by_request, key, row.id, "request id")
        if row.status in _OPEN:
            self.undo.add(self.data.submissions_open, row.conversation, row.id)
        self.parents.append((f"submission {row.id}", row.conversation))

    def submission_state(self, values: tuple[Any, ...]) -> None:
        state = SubmissionStateRow(*values)
        old = self.data.submissions.get(state.id)
        if old is None:
            raise InternalError(f"submission {state.id}, whose state is to be stored, is missing")
        self.undo.put(self.data.submissions, state.id, old._replace(**state._asdict()))
        was, now = old.status in _OPEN, state.status in _OPEN
        if was and not now:
            self.undo.remove(self.data.submissions_open, old.conversation, state.id)
        elif now and not was:
            self.undo.add(self.data.submissions_open, old.conversation, state.id)

    def document(self, values: tuple[Any, ...]) -> None:
        row = DocumentRow(*values)
        self.undo.insert(self.data.documents, row.id, row, "document")
        scope = (row.scope, row.scope_id)
        if row.retired_seq is None:
            address = _address(row)
            self.undo.insert(self.data.living_documents, address, row.id, "living document at")
            self.undo.add(self.data.documents_by_scope, scope, row.id)
        else:
            self.undo.add(self.data.retired_documents, scope, row.id)
        if row.scope == _CONVERSATION_SCOPE:
            past = (row.scope_id, row.name, row.key)
            key = (*past, row.created_seq)
            self.undo.insert(self.data.documents_past, key, row.id, "document at")
            self.undo.add(self.data.commits_by_address, past, row.created_seq)
            addresses = self.data.addresses_by_conversation.get(row.scope_id)
            if addresses is None:
                addresses = {}
                self.undo.put(self.data.addresses_by_conversation, row.scope_id, addresses)
            self.undo.put(addresses, (row.name, row.key), None)

    def document_terms(self, values: tuple[Any, ...]) -> None:
        row = self.data.documents.get(values[0])
        if row is None:
            raise InternalError(f"document {values[0]}, whose terms are to be stored, is missing")
        changed = row._replace(history=values[1], fork=values[2])
        self.undo.put(self.data.documents, row.id, changed)

    def document_retire(self, values: tuple[Any, ...]) -> None:
        row = self.data.documents.get(values[0])
        address = _address(row) if row is not None else None
        if row is None or self.data.living_documents.get(_address(row)) != row.id:
            raise InternalError(f"document {values[0]}, which is to be retired, is not living")
        self.undo.put(self.data.documents, row.id, row._replace(retired_seq=values[1]))
        self.undo.delete(self.data.living_documents, address)
        self.undo.remove(self.data.documents_by_scope, (row.scope, row.scope_id), row.id)
        self.undo.add(self.data.retired_documents, (row.scope, row.scope_id), row.id)

    def revision(self, values: tuple[Any, ...]) -> None:
        row = RevisionRow(*values)
        key = (row.document, row.seq)
        self.undo.insert(self.data.revisions, key, row, "revision (document, seq)")
        self.undo.add(self.data.revisions_by_document, row.document, row.seq)

    def revisions_delete(self, values: tuple[Any, ...]) -> None:
        document, before = values
        for seq in list(self.data.revisions_by_document.of(document).scan(before=before)):
            self.undo.delete(self.data.revisions, (document, seq))
            self.undo.remove(self.data.revisions_by_document, document, seq)

    def blob(self, row: tuple[Any, ...]) -> None:
        if row[0] not in self.data.blobs:
            self.undo.put(self.data.blobs, row[0], bytes(row[1]))

    def command(self, values: tuple[Any, ...]) -> None:
        row = CommandRow(*values)
        self.undo.insert(self.data.commands, row.id, row, "command")

    # --- retention -----------------------------------------------------------------------

    def stub(self, values: tuple[Any, ...]) -> None:
        row = StubRow(*values)
        self.undo.insert(self.data.stubs, (row.kind, row.place, row.key), row, "stub")

    def removal(self, values: tuple[Any, ...]) -> None:
        row = RemovalRow(*values)
        self.undo.insert(self.data.removals, row.root, row, "removal of task")

    def removal_delete(self, values: tuple[Any, ...]) -> None:
        self._gone(self.data.removals, values[0], "removal")

    def task_delete(self, values: tuple[Any, ...]) -> None:
        row: TaskRow = self._gone(self.data.tasks, values[0], "task")
        self.undo.remove(self.data.task_ids, None, row.id)
        self.undo.remove(self.data.task_ids, ("conversation", row.conversation), row.id)
        if row.status < _TERMINAL:
            self.undo.remove(self.data.task_ids, "live", row.id)
        if row.owner is not None:
            self.undo.remove(self.data.tasks_by_owner, row.owner, row.id)
        if row.key is not None:
            self.undo.delete(self.data.tasks_by_key, _task_key(row))
            if row.owner is not None:
                self.undo.remove(self.data.keys_by_owner, row.owner, row.id)

    def input_delete(self, row: tuple[Any, ...]) -> None:
        self.undo.delete(self.data.inputs, row[0])

    def command_delete(self, row: tuple[Any, ...]) -> None:
        self.undo.delete(self.data.commands, row[0])

    def conversation_delete(self, values: tuple[Any, ...]) -> None:
        row: ConversationRow = self._gone(self.data.conversations, values[0], "conversation")
        self.undo.remove(self.data.conversations_by_owner, row.owner, row.id)
        if row.key is not None:
            self.undo.delete(self.data.conversations_by_key, (row.owner or 0, row.key))
        if row.parent is not None:
            self.undo.remove(self.data.conversations_by_parent, row.parent, row.id)
        self.gone.append(row.id)

    def entry_delete(self, values: tuple[Any, ...]) -> None:
        row: EntryRow = self._gone(self.data.entries, values[0], "entry")
        self.undo.remove(self.data.entries_by_conversation, row.conversation, row.id)
        if row.head is not None:
            self.undo.remove(self.data.heads, row.conversation, row.id)

    def submission_delete(self, values: tuple[Any, ...]) -> None:
        row: SubmissionRow = self._gone(self.data.submissions, values[0], "submission")
        self.undo.remove(self.data.submissions_by_conversation, row.conversation, row.id)
        if row.request_id is not None:
            self.undo.delete(self.data.submissions_by_request, (row.conversation, row.request_id))
        if row.status in _OPEN:
            self.undo.remove(self.data.submissions_open, row.conversation, row.id)

    def document_delete(self, values: tuple[Any, ...]) -> None:
        row: DocumentRow = self._gone(self.data.documents, values[0], "document")
        scope = (row.scope, row.scope_id)
        if row.retired_seq is None:
            self.undo.delete(self.data.living_documents, _address(row))
            self.undo.remove(self.data.documents_by_scope, scope, row.id)
        else:
            self.undo.remove(self.data.retired_documents, scope, row.id)
        if row.scope == _CONVERSATION_SCOPE:
            past = (row.scope_id, row.name, row.key)
            self.undo.delete(self.data.documents_past, (*past, row.created_seq))
            self.undo.remove(self.data.commits_by_address, past, row.created_seq)
            if not len(self.data.commits_by_address.of(past)):
                addresses = self.data.addresses_by_conversation[row.scope_id]
                self.undo.delete(addresses, (row.name, row.key))

    def blob_delete(self, row: tuple[Any, ...]) -> None:
        self.undo.delete(self.data.blobs, row[0])

    def _gone(self, table: dict[Any, Any], key: Any, what: str) -> Any:
        if key not in table:
            raise InternalError(f"{what} {key}, which is to be deleted, does not exist")
        return self.undo.delete(table, key)


_APPLY: dict[Op, Callable[[Writer, tuple[Any, ...]], None]] = {
    op: getattr(Writer, op.name.lower()) for op in Op
}


def _task_key(row: TaskRow) -> tuple[str, int, str]:
    """Keys are unique among what an owner created, or, without one, within the conversation."""
    key = row.key or ""
    if row.owner is None:
        return ("conversation", row.conversation, key)
    return ("owner", row.owner, key)


def _address(row: DocumentRow) -> tuple[int, int, str, str]:
    return (row.scope, row.scope_id, row.name, row.key)
