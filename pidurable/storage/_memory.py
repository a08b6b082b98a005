"""The memory backend: the reference for what the contract means.

Rows are tuples of immutable values, so handing one out is a copy. Invariants:

* scans walk sorted ids and visit only what they return;
* a batch that fails half-way is undone, step by step, before the error leaves;
* the data outlives the handle: `reopen()` gives another one on it, as reopening a file would, and
  the holder's lock is the living handle, as `flock` is the living process.

It checks values as strictly as SQLite's STRICT tables do, so that a test on memory proves something
about a file.
"""

from __future__ import annotations

import threading
import time
import uuid as uuid_module
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, final

import attrs

from pidurable.errors import HolderLostError, InternalError, SessionClosedError, check
from pidurable.storage._contract import (
    Batch,
    ConversationRow,
    DocumentRow,
    EntryRow,
    Head,
    HolderClaim,
    HolderRecord,
    Op,
    RevisionRow,
    SignalRow,
    StartRow,
    SubmissionRow,
    SubmissionStateRow,
    TaskRow,
    TaskStateRow,
    has_lived,
)
from pidurable.storage._holder import LockState, check_free, judge
from pidurable.storage._memory_checks import check_row

_LAST_ID = 2**63 - 1
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
        self, after: int = -1, before: int = _LAST_ID, *, reverse: bool = False
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
class _Data:
    """One session's records, shared by all handles on it."""

    head: Head
    holder: HolderRecord | None = None
    living: MemoryStorage | None = None
    """The open handle that holds the session: the counterpart of a lock file."""
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


class _Writer:
    """Applies the writes of one batch to the data, through the undo list."""

    def __init__(self, data: _Data) -> None:
        self.data = data
        self.undo = _Undo()
        self.parents: list[tuple[str, int]] = []
        """Conversations that must exist at the end of the batch, and who says so."""

    def write(self, op: Op, row: tuple[Any, ...]) -> None:
        check_row(op, row)
        _APPLY[op](self, row)

    def finish(self) -> None:
        for who, conversation in self.parents:
            check(
                conversation in self.data.conversations,
                f"{who} refers to conversation {conversation}, which does not exist",
            )

    def conversation(self, values: tuple[Any, ...]) -> None:
        row = ConversationRow(*values)
        self.undo.insert(self.data.conversations, row.id, row, "conversation")
        self.undo.add(self.data.conversations_by_owner, row.owner, row.id)
        if row.key is not None:
            key = (row.owner or 0, row.key)
            self.undo.insert(self.data.conversations_by_key, key, row.id, "conversation key")
        if row.parent is not None:
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
        address = _address(row)
        self.undo.insert(self.data.living_documents, address, row.id, "living document at")
        self.undo.add(self.data.documents_by_scope, (row.scope, row.scope_id), row.id)
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


_APPLY: dict[Op, Callable[[_Writer, tuple[Any, ...]], None]] = {
    op: getattr(_Writer, op.name.lower()) for op in Op
}


def _task_key(row: TaskRow) -> tuple[str, int, str]:
    """Keys are unique among what an owner created, or, without one, within the conversation."""
    key = row.key or ""
    if row.owner is None:
        return ("conversation", row.conversation, key)
    return ("owner", row.owner, key)


def _address(row: DocumentRow) -> tuple[int, int, str, str]:
    return (row.scope, row.scope_id, row.name, row.key)


@final
class MemoryStorage:
    """Keep one session in memory, for tests and for work that need not outlive the process.

    A closed handle refuses everything but `acquire`, which opens it again on the same data.

    Args:
        store: What messages call it.
        uuid: The session's uuid; drawn at random if None.
        created_us: When the session began; now if None.
    """

    def __init__(
        self,
        store: str = ":memory:",
        *,
        uuid: str | None = None,
        created_us: int | None = None,
    ) -> None:
        self._store = store
        self._closed = False
        self._data = _Data(
            Head(
                uuid=uuid if uuid is not None else str(uuid_module.uuid4()),
                created_us=created_us if created_us is not None else time.time_ns() // 1_000,
                epoch=0,
                seq=0,
                next_id=1,
                clean=True,
            )
        )

    def reopen(self) -> MemoryStorage:
        """Open another handle on the same data, whether this one is open or closed."""
        other = MemoryStorage(self._store, uuid="", created_us=0)
        other._data = self._data
        return other

    @property
    def store(self) -> str:
        """What messages call this store."""
        return self._store

    def close(self) -> None:
        """Close the handle; the data stays. Does not release: a crash closes too."""
        with self._data.mutex:
            self._closed = True
            if self._data.living is self:
                self._data.living = None

    def _use(self) -> _Data:
        if self._closed:
            raise SessionClosedError(self._store)
        return self._data

    def _check_epoch(self, epoch: int) -> None:
        current = self._data.head.epoch
        if current != epoch:
            raise HolderLostError(self._store, epoch=epoch, current=current)

    # --- holding -------------------------------------------------------------------------

    def acquire(self, claim: HolderClaim, *, takeover: bool) -> Head:
        data = self._data
        with data.mutex:
            # A closed handle is nobody's: it cannot be the living holder.
            lock = LockState.FREE if data.living is None else LockState.LOCKED
            verdict = judge(data.holder, claim, lock)
            check_free(self._store, data.holder, claim, verdict, takeover)
            head = data.head._replace(epoch=data.head.epoch + 1)
            data.head = head._replace(clean=False)
            data.holder = HolderRecord(
                epoch=head.epoch,
                holder_id=claim.holder_id,
                host=claim.host,
                pid=claim.pid,
                started_us=claim.at_us,
                heartbeat_us=claim.at_us,
                lock_file=None,
                released=False,
            )
            data.living = self
            self._closed = False
            return head

    def heartbeat(self, epoch: int, at_us: int) -> None:
        with self._data.mutex:
            data = self._use()
            self._check_epoch(epoch)
            if data.holder is not None:
                data.holder = attrs.evolve(data.holder, heartbeat_us=at_us)

    def holder(self) -> HolderRecord | None:
        with self._data.mutex:
            return self._use().holder

    def release(self, epoch: int) -> None:
        with self._data.mutex:
            data = self._use()
            self._check_epoch(epoch)
            if data.holder is not None:
                data.holder = attrs.evolve(data.holder, released=True)
            if data.living is self:
                data.living = None

    # --- writing -------------------------------------------------------------------------

    def apply(self, batch: Batch) -> None:
        with self._data.mutex:
            data = self._use()
            self._check_epoch(batch.epoch)
            writer = _Writer(data)
            try:
                for op, row in batch.writes:
                    writer.write(op, row)
                writer.finish()
            except BaseException:
                writer.undo.run()
                raise
            data.head = data.head._replace(seq=batch.seq, next_id=batch.next_id, clean=batch.clean)

    def checkpoint(self, *, truncate: bool = False) -> int:
        """There is no log: always 0."""
        with self._data.mutex:
            self._use()
        return 0

    # --- reading -------------------------------------------------------------------------

    def head(self) -> Head:
        with self._data.mutex:
            return self._use().head

    def conversation(self, id: int) -> ConversationRow | None:
        with self._data.mutex:
            return self._use().conversations.get(id)

    def conversation_by_key(self, owner: int | None, key: str) -> ConversationRow | None:
        with self._data.mutex:
            data = self._use()
            id = data.conversations_by_key.get((owner or 0, key))
            return data.conversations[id] if id is not None else None

    def conversations_by_owner(
        self, owner: int | None, *, after: int = 0, limit: int = 1000
    ) -> list[ConversationRow]:
        with self._data.mutex:
            data = self._use()
            ids = data.conversations_by_owner.of(owner).scan(after)
            return [data.conversations[id] for id in _first(ids, limit)]

    def conversation_owners(self, tasks: Sequence[int]) -> list[int]:
        with self._data.mutex:
            data = self._use()
            owned = data.conversations_by_owner
            wanted = sorted(set(tasks))
            return [task for task in wanted if task in data.tasks and any(owned.of(task).scan(0))]

    def entry(self, id: int) -> EntryRow | None:
        with self._data.mutex:
            return self._use().entries.get(id)

    def entries(
        self,
        conversation: int,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[EntryRow]:
        last = _LAST_ID if before is None else before
        with self._data.mutex:
            data = self._use()
            ids = data.entries_by_conversation.of(conversation)
            return [
                data.entries[id] for id in _first(ids.scan(after, last, reverse=reverse), limit)
            ]

    def last_head(self, conversation: int, *, before: int | None = None) -> EntryRow | None:
        with self._data.mutex:
            data = self._use()
            id = data.heads.of(conversation).last(_LAST_ID if before is None else before)
            return data.entries[id] if id is not None else None

    def task(self, id: int) -> TaskRow | None:
        with self._data.mutex:
            return self._use().tasks.get(id)

    def task_by_key(self, owner: int | None, conversation: int, key: str) -> TaskRow | None:
        address = ("conversation", conversation, key) if owner is None else ("owner", owner, key)
        with self._data.mutex:
            data = self._use()
            id = data.tasks_by_key.get(address)
            return data.tasks[id] if id is not None else None

    def keyed_tasks(self, owner: int) -> list[tuple[str, int]]:
        with self._data.mutex:
            data = self._use()
            rows = (data.tasks[id] for id in data.keys_by_owner.of(owner).scan())
            return sorted((row.key or "", row.id) for row in rows)

    def live_tasks(self, *, after: int = 0, limit: int = 10_000) -> list[TaskRow]:
        with self._data.mutex:
            data = self._use()
            return [data.tasks[id] for id in _first(data.task_ids.of("live").scan(after), limit)]

    def tasks(
        self,
        *,
        conversation: int | None = None,
        kind: str | None = None,
        status: int | None = None,
        after: int = 0,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[TaskRow]:
        key = None if conversation is None else ("conversation", conversation)
        with self._data.mutex:
            data = self._use()
            rows = (data.tasks[id] for id in data.task_ids.of(key).scan(after, reverse=reverse))
            fitting = (
                row
                for row in rows
                if (kind is None or row.kind == kind) and (status is None or row.status == status)
            )
            return list(_first(fitting, limit))

    def task_input(self, task: int) -> str | None:
        with self._data.mutex:
            return self._use().inputs.get(task)

    def task_checkpoint(self, task: int) -> tuple[str, str] | None:
        with self._data.mutex:
            found = self._use().checkpoints.get(task)
            return found[:2] if found is not None else None

    def checkpoint_at(self, task: int) -> tuple[str, int] | None:
        with self._data.mutex:
            found = self._use().checkpoints.get(task)
            return (found[0], found[2]) if found is not None else None

    def task_phases(self, tasks: Sequence[int]) -> list[tuple[int, str]]:
        with self._data.mutex:
            stored = self._use().checkpoints
            return [(task, stored[task][0]) for task in sorted(set(tasks)) if task in stored]

    def task_wait(self, task: int) -> str | None:
        with self._data.mutex:
            return self._use().waits.get(task)

    def waits(self, *, after: int = 0, limit: int = 10_000) -> list[tuple[int, str]]:
        with self._data.mutex:
            rows = sorted(item for item in self._use().waits.items() if item[0] > after)
            return rows[:limit]

    def task_outcome(self, task: int) -> str | None:
        with self._data.mutex:
            return self._use().outcomes.get(task)

    def task_memos(self, task: int) -> list[tuple[str, str]]:
        with self._data.mutex:
            return sorted(self._use().memos.get(task, {}).items())

    def task_starts(self, tasks: Sequence[int]) -> list[StartRow]:
        with self._data.mutex:
            data = self._use()
            return [
                StartRow(
                    task,
                    data.inputs[task],
                    *data.checkpoints[task][:2],
                    tuple(sorted(data.memos.get(task, {}).items())),
                )
                for task in sorted(set(tasks))
                if task in data.inputs and task in data.checkpoints
            ]

    def signals(self, task: int, *, limit: int = 1000) -> list[SignalRow]:
        with self._data.mutex:
            data = self._use()
            return [data.signals[id] for id in _first(data.signals_by_task.of(task).scan(), limit)]

    def live_signals(self) -> list[tuple[int, int]]:
        with self._data.mutex:
            counts = self._use().signals_by_task.counts()
            return sorted((task, count) for task, count in counts if isinstance(task, int))

    def signal_by_key(self, task: int, key: str) -> int | None:
        with self._data.mutex:
            return self._use().signals_by_key.get((task, key))

    def submission(self, id: int) -> SubmissionRow | None:
        with self._data.mutex:
            return self._use().submissions.get(id)

    def submission_by_request(self, conversation: int, request_id: str) -> SubmissionRow | None:
        with self._data.mutex:
            data = self._use()
            id = data.submissions_by_request.get((conversation, request_id))
            return data.submissions[id] if id is not None else None

    def open_submissions(self, conversation: int) -> list[SubmissionRow]:
        with self._data.mutex:
            data = self._use()
            return [data.submissions[id] for id in data.submissions_open.of(conversation).scan()]

    def document(self, name: str, scope: int, scope_id: int, key: str) -> DocumentRow | None:
        with self._data.mutex:
            data = self._use()
            id = data.living_documents.get((scope, scope_id, name, key))
            return data.documents[id] if id is not None else None

    def documents(self, scope: int, scope_id: int) -> list[DocumentRow]:
        with self._data.mutex:
            data = self._use()
            return [
                data.documents[id] for id in data.documents_by_scope.of((scope, scope_id)).scan()
            ]

    def document_as_of(
        self, conversation: int, name: str, key: str, *, seq: int
    ) -> DocumentRow | None:
        with self._data.mutex:
            data = self._use()
            created = data.commits_by_address.of((conversation, name, key)).last(seq + 1)
            if created is None:
                return None
            row = data.documents[data.documents_past[conversation, name, key, created]]
            return row if has_lived(row, seq) else None

    def documents_as_of(self, conversation: int, *, seq: int) -> list[DocumentRow]:
        with self._data.mutex:
            addresses = sorted(self._use().addresses_by_conversation.get(conversation, ()))
            found = (self.document_as_of(conversation, *each, seq=seq) for each in addresses)
            return [row for row in found if row is not None and row.history == "rewindable"]

    def revisions(self, document: int, *, upto_seq: int | None = None) -> list[RevisionRow]:
        end = _LAST_ID if upto_seq is None else upto_seq + 1
        found: list[RevisionRow] = []
        with self._data.mutex:
            data = self._use()
            seqs = data.revisions_by_document.of(document)
            for seq in seqs.scan(before=end, reverse=True):
                row = data.revisions[document, seq]
                found.append(row)
                if row.base == 1:
                    return found[::-1]
        return []

    def blob(self, sha256: str) -> bytes | None:
        with self._data.mutex:
            return self._use().blobs.get(sha256)

    def has_blob(self, sha256: str) -> bool:
        return self.blob(sha256) is not None


def _first(items: Iterator[Any], limit: int) -> Iterator[Any]:
    for _ in range(limit):
        for item in items:
            yield item
            break
        else:
            return
