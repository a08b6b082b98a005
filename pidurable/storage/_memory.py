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

import time
import uuid as uuid_module
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, final

import attrs

from pidurable.errors import HolderLostError, SessionClosedError
from pidurable.storage._contract import (
    RECORDS,
    Batch,
    CommandRow,
    ConversationRow,
    DocumentRow,
    EntryRow,
    Head,
    HolderClaim,
    HolderRecord,
    RecordKind,
    RemovalRow,
    RevisionRow,
    SignalRow,
    StartRow,
    StubRow,
    SubmissionRow,
    TaskRow,
    has_lived,
)
from pidurable.storage._holder import LockState, check_free, judge
from pidurable.storage._memory_commands import MemoryCommandBox
from pidurable.storage._memory_tables import LAST_ID, Data, Writer


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
        self._data = Data(
            Head(
                uuid=uuid if uuid is not None else str(uuid_module.uuid4()),
                created_us=created_us if created_us is not None else time.time_ns() // 1_000,
                epoch=0,
                seq=0,
                next_id=1,
                clean=True,
            )
        )
        self._box = MemoryCommandBox(store, self._data.waiting)

    def reopen(self) -> MemoryStorage:
        """Open another handle on the same data, whether this one is open or closed."""
        other = MemoryStorage(self._store, uuid="", created_us=0)
        other._data = self._data
        other._box = MemoryCommandBox(self._store, self._data.waiting)
        return other

    @property
    def store(self) -> str:
        """What messages call this store."""
        return self._store

    @property
    def command_box(self) -> MemoryCommandBox:
        """Commands from outside, shared by all handles on the data."""
        return self._box

    def close(self) -> None:
        """Close the handle; the data stays. Does not release: a crash closes too."""
        with self._data.mutex:
            self._closed = True
            if self._data.living is self:
                self._data.living = None

    def _use(self) -> Data:
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
            # A holder knows nothing of what this handle was given in an earlier life.
            self._box = MemoryCommandBox(self._store, data.waiting)
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
            writer = Writer(data)
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

    def reclaim(self, pages: int) -> int:
        """There are no pages: always 0."""
        return self.checkpoint()

    # --- reading -------------------------------------------------------------------------

    def scan(
        self, kind: RecordKind, *, after: tuple[Any, ...] | None = None, limit: int = 1000
    ) -> list[tuple[Any, ...]]:
        places = [RECORDS[kind].columns.index(name) for name in RECORDS[kind].key]
        with self._data.mutex:
            # Sorted anew for each page: this is for whoever copies a session in memory.
            rows = sorted(
                (tuple(_in_order(row[place]) for place in places), row)
                for row in _rows_of(self._use(), kind)
            )
        first = 0
        if after is not None:
            first = bisect_right(
                rows, tuple(_in_order(part) for part in after), key=lambda each: each[0]
            )
        return [row for _, row in rows[first : first + max(0, limit)]]

    def everything(self) -> tuple[Head, dict[RecordKind, list[tuple[Any, ...]]]]:
        """The head and every record of one moment, by kind and in the order of their keys."""
        with self._data.mutex:
            records = {kind: self.scan(kind, limit=LAST_ID) for kind in RecordKind}
            return self.head(), records

    def command(self, id: str) -> CommandRow | None:
        with self._data.mutex:
            return self._use().commands.get(id)

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
        last = LAST_ID if before is None else before
        with self._data.mutex:
            data = self._use()
            ids = data.entries_by_conversation.of(conversation)
            return [
                data.entries[id] for id in _first(ids.scan(after, last, reverse=reverse), limit)
            ]

    def last_head(self, conversation: int, *, before: int | None = None) -> EntryRow | None:
        with self._data.mutex:
            data = self._use()
            id = data.heads.of(conversation).last(LAST_ID if before is None else before)
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

    def tasks_by_owner(self, owner: int, *, after: int = 0, limit: int = 1000) -> list[TaskRow]:
        with self._data.mutex:
            data = self._use()
            ids = data.tasks_by_owner.of(owner).scan(after)
            return [data.tasks[id] for id in _first(ids, limit)]

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

    def submissions_of(
        self, conversation: int, *, after: int = 0, limit: int = 1000
    ) -> list[SubmissionRow]:
        with self._data.mutex:
            data = self._use()
            ids = data.submissions_by_conversation.of(conversation).scan(after)
            return [data.submissions[id] for id in _first(ids, limit)]

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

    def documents_ever(self, scope: int, scope_id: int) -> list[DocumentRow]:
        with self._data.mutex:
            data = self._use()
            indexes = (data.documents_by_scope, data.retired_documents)
            ids = [id for index in indexes for id in index.of((scope, scope_id)).scan()]
            return [data.documents[id] for id in sorted(ids)]

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
        end = LAST_ID if upto_seq is None else upto_seq + 1
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

    def blob_sizes(self, *, after: str = "", limit: int = 1000) -> list[tuple[str, int]]:
        # Sorted for each page: a store in memory has few of them.
        with self._data.mutex:
            blobs = self._use().blobs
            names = sorted(name for name in blobs if name > after)[: max(0, limit)]
            return [(name, len(blobs[name])) for name in names]

    # --- retention -----------------------------------------------------------------------

    def ended_roots(self, *, before_us: int, after: int, upto: int) -> list[TaskRow]:
        with self._data.mutex:
            data = self._use()
            rows = (data.tasks[id] for id in data.task_ids.of(None).scan(after, upto + 1))
            return [row for row in rows if _is_ended_root(data, row, before_us)]

    def forks_of(self, conversation: int, *, after: int = 0, limit: int = 1000) -> list[int]:
        with self._data.mutex:
            ids = self._use().conversations_by_parent.of(conversation).scan(after)
            return list(_first(ids, limit))

    def stub(self, kind: str, place: int, key: str) -> StubRow | None:
        with self._data.mutex:
            return self._use().stubs.get((kind, place, key))

    def stub_by_id(self, id: int) -> StubRow | None:
        with self._data.mutex:
            return next((row for row in self._use().stubs.values() if row.id == id), None)

    def removals(self) -> list[RemovalRow]:
        with self._data.mutex:
            return [row for _, row in sorted(self._use().removals.items())]


def _is_ended_root(data: Data, row: TaskRow, before_us: int) -> bool:
    if row.owner is not None or row.ended_us is None or row.ended_us >= before_us:
        return False
    home = data.conversations.get(row.conversation)
    return home is not None and home.owner is None


def _in_order(part: Any) -> Any:
    """What sorts as SQLite sorts: texts by their bytes."""
    return part.encode() if isinstance(part, str) else part


def _rows_of(data: Data, kind: RecordKind) -> Iterator[tuple[Any, ...]]:
    """Every record of a kind, in the columns of `RECORDS`, in any order."""
    match kind:
        case RecordKind.CHECKPOINT:
            yield from ((task, *rest) for task, rest in data.checkpoints.items())
        case RecordKind.MEMO:
            for task, memos in data.memos.items():
                yield from ((task, name, value) for name, value in memos.items())
        case RecordKind.SIGNAL:
            yield from ((*row, int(id in data.signals_read)) for id, row in data.signals.items())
        case RecordKind.INPUT | RecordKind.WAIT | RecordKind.OUTCOME | RecordKind.BLOB:
            table: dict[Any, Any] = getattr(data, f"{kind}s")
            yield from table.items()
        case RecordKind.ENTRY:
            yield from (tuple(row) for row in data.entries.values())
        case _:
            rows: dict[Any, tuple[Any, ...]] = getattr(data, f"{kind}s")
            yield from (tuple(row) for row in rows.values())


def _first(items: Iterator[Any], limit: int) -> Iterator[Any]:
    for _ in range(limit):
        for item in items:
            yield item
            break
        else:
            return
