"""The reads of the SQLite backend: one statement each, read to its end at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pidurable.storage import _sqlite_statements as sql
from pidurable.storage._contract import (
    CommandRow,
    ConversationRow,
    DocumentRow,
    EntryRow,
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


class SqliteReads:
    """What a store can be asked, for the storage below it to run."""

    def _read(self, statement: str, values: Sequence[Any]) -> list[Any]:
        """Run one read to its end. Called from any thread."""
        raise NotImplementedError(statement)

    def _rows(self, name: str, values: Sequence[Any]) -> list[Any]:
        return self._read(sql.READS[name], values)

    def _value(self, name: str, *values: Any) -> Any:
        """The only column of the only row, or None."""
        rows = self._rows(name, values)
        return rows[0][0] if rows else None

    def scan(
        self, kind: RecordKind, *, after: tuple[Any, ...] | None = None, limit: int = 1000
    ) -> list[tuple[Any, ...]]:
        name = sql.record_scan(kind, after)
        return self._rows(name, (*(after or ()), max(0, limit)))

    def command(self, id: str) -> CommandRow | None:
        rows = self._rows("command", (id,))
        return CommandRow(*rows[0]) if rows else None

    def conversation(self, id: int) -> ConversationRow | None:
        rows = self._rows("conversation", (id,))
        return ConversationRow(*rows[0]) if rows else None

    def conversation_by_key(self, owner: int | None, key: str) -> ConversationRow | None:
        rows = self._rows("conversation_by_key", (owner or 0, key))
        return ConversationRow(*rows[0]) if rows else None

    def conversations_by_owner(
        self, owner: int | None, *, after: int = 0, limit: int = 1000
    ) -> list[ConversationRow]:
        rows = self._rows("conversations_by_owner", (owner, after, max(0, limit)))
        return [ConversationRow(*row) for row in rows]

    def conversation_owners(self, tasks: Sequence[int]) -> list[int]:
        found = (self._rows("conversation_owners", places) for places in _places(tasks))
        return [owner for rows in found for (owner,) in rows]

    def entry(self, id: int) -> EntryRow | None:
        rows = self._rows("entry", (id,))
        return EntryRow(*rows[0]) if rows else None

    def entries(
        self,
        conversation: int,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[EntryRow]:
        last = sql.LAST_ID if before is None else before
        name = "entries_reverse" if reverse else "entries"
        rows = self._rows(name, (conversation, after, last, max(0, limit)))
        return [EntryRow(*row) for row in rows]

    def last_head(self, conversation: int, *, before: int | None = None) -> EntryRow | None:
        last = sql.LAST_ID if before is None else before
        rows = self._rows("last_head", (conversation, last))
        return EntryRow(*rows[0]) if rows else None

    def task(self, id: int) -> TaskRow | None:
        rows = self._rows("task", (id,))
        return TaskRow(*rows[0]) if rows else None

    def task_by_key(self, owner: int | None, conversation: int, key: str) -> TaskRow | None:
        if owner is None:
            rows = self._rows("task_by_conversation_key", (conversation, key))
        else:
            rows = self._rows("task_by_owner_key", (owner, key))
        return TaskRow(*rows[0]) if rows else None

    def tasks_by_owner(self, owner: int, *, after: int = 0, limit: int = 1000) -> list[TaskRow]:
        rows = self._rows("tasks_by_owner", (owner, after, max(0, limit)))
        return [TaskRow(*row) for row in rows]

    def keyed_tasks(self, owner: int) -> list[tuple[str, int]]:
        return self._rows("keyed_tasks", (owner,))

    def live_tasks(self, *, after: int = 0, limit: int = 10_000) -> list[TaskRow]:
        return [TaskRow(*row) for row in self._rows("live_tasks", (after, max(0, limit)))]

    def outline(self, *, reverse: bool = False, limit: int = 10_000) -> list[tuple[int, ...]]:
        """The oldest live tasks, or the newest, as (id, conversation, owner, status, blocked,
        marked): what a picture of the tree needs of each, at a fifth of the cost of its row."""
        return self._rows("outline_reverse" if reverse else "outline", (0, limit))

    def live_counts(self) -> tuple[int, ...]:
        """How many tasks are live, blocked, marked and not blocked, and of the rest pending,
        running, waiting and completing. Visits every live task: for people."""
        counts: tuple[int, ...] = self._read(sql.PEOPLE_READS["live_counts"], ())[0]
        return counts

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
        statement, values = sql.task_scan(
            conversation=conversation, kind=kind, status=status, reverse=reverse
        )
        rows = self._read(statement, (*values, after, max(0, limit)))
        return [TaskRow(*row) for row in rows]

    def task_input(self, task: int) -> str | None:
        value: str | None = self._value("task_input", task)
        return value

    def task_checkpoint(self, task: int) -> tuple[str, str] | None:
        rows: list[tuple[str, str]] = self._rows("task_checkpoint", (task,))
        return rows[0] if rows else None

    def checkpoint_at(self, task: int) -> tuple[str, int] | None:
        rows: list[tuple[str, int]] = self._rows("checkpoint_at", (task,))
        return rows[0] if rows else None

    def task_phases(self, tasks: Sequence[int]) -> list[tuple[int, str]]:
        return [row for places in _places(tasks) for row in self._rows("task_phases", places)]

    def task_wait(self, task: int) -> str | None:
        value: str | None = self._value("task_wait", task)
        return value

    def waits(self, *, after: int = 0, limit: int = 10_000) -> list[tuple[int, str]]:
        return self._rows("waits", (after, limit))

    def task_outcome(self, task: int) -> str | None:
        value: str | None = self._value("task_outcome", task)
        return value

    def task_memos(self, task: int) -> list[tuple[str, str]]:
        return self._rows("task_memos", (task,))

    def task_starts(self, tasks: Sequence[int]) -> list[StartRow]:
        found: list[StartRow] = []
        for places in _places(tasks):
            memos: dict[int, list[tuple[str, str]]] = {}
            for task, name, value in self._rows("memos_of_tasks", places):
                memos.setdefault(task, []).append((name, value))
            found += (
                StartRow(task, input, phase, value, tuple(sorted(memos.get(task, ()))))
                for task, input, phase, value in self._rows("task_starts", places)
            )
        return found

    def signals(self, task: int, *, limit: int = 1000) -> list[SignalRow]:
        return [SignalRow(*row) for row in self._rows("signals", (task, max(0, limit)))]

    def live_signals(self) -> list[tuple[int, int]]:
        return self._rows("live_signals", ())

    def signal_by_key(self, task: int, key: str) -> int | None:
        value: int | None = self._value("signal_by_key", task, key)
        return value

    def submission(self, id: int) -> SubmissionRow | None:
        rows = self._rows("submission", (id,))
        return SubmissionRow(*rows[0]) if rows else None

    def submission_by_request(self, conversation: int, request_id: str) -> SubmissionRow | None:
        rows = self._rows("submission_by_request", (conversation, request_id))
        return SubmissionRow(*rows[0]) if rows else None

    def open_submissions(self, conversation: int) -> list[SubmissionRow]:
        return [SubmissionRow(*row) for row in self._rows("open_submissions", (conversation,))]

    def submissions_of(
        self, conversation: int, *, after: int = 0, limit: int = 1000
    ) -> list[SubmissionRow]:
        rows = self._rows("submissions_of", (conversation, after, max(0, limit)))
        return [SubmissionRow(*row) for row in rows]

    def document(self, name: str, scope: int, scope_id: int, key: str) -> DocumentRow | None:
        rows = self._rows("document", (name, scope, scope_id, key))
        return DocumentRow(*rows[0]) if rows else None

    def documents(self, scope: int, scope_id: int) -> list[DocumentRow]:
        return [DocumentRow(*row) for row in self._rows("documents", (scope, scope_id))]

    def documents_ever(self, scope: int, scope_id: int) -> list[DocumentRow]:
        # The living first: one that is retired between the two reads is found by both.
        found = {row.id: row for row in self.documents(scope, scope_id)}
        for row in self._rows("documents_retired", (scope, scope_id)):
            found[row[0]] = DocumentRow(*row)
        return [found[id] for id in sorted(found)]

    def document_as_of(
        self, conversation: int, name: str, key: str, *, seq: int
    ) -> DocumentRow | None:
        rows = self._rows("document_as_of", (conversation, name, key, seq))
        row = DocumentRow(*rows[0]) if rows else None
        return row if row is not None and has_lived(row, seq) else None

    def documents_as_of(self, conversation: int, *, seq: int) -> list[DocumentRow]:
        # From address to address: a scan would visit every document that ever stood at each.
        found: list[DocumentRow] = []
        address = ("", "")
        while rows := self._rows("next_rewindable", (conversation, *address)):
            address = rows[0]
            row = self.document_as_of(conversation, *address, seq=seq)
            if row is not None and row.history == "rewindable":
                found.append(row)
        return found

    def revisions(self, document: int, *, upto_seq: int | None = None) -> list[RevisionRow]:
        last = sql.LAST_ID if upto_seq is None else upto_seq
        return [RevisionRow(*row) for row in self._rows("revisions", (document, last))]

    def blob(self, sha256: str) -> bytes | None:
        value: bytes | None = self._value("blob", sha256)
        return value

    def has_blob(self, sha256: str) -> bool:
        return bool(self._rows("has_blob", (sha256,)))

    def blob_sizes(self, *, after: str = "", limit: int = 1000) -> list[tuple[str, int]]:
        return self._rows("blob_sizes", (after, max(0, limit)))

    # --- retention -----------------------------------------------------------------------

    def ended_roots(self, *, before_us: int, after: int, upto: int) -> list[TaskRow]:
        return [TaskRow(*row) for row in self._rows("ended_roots", (after, upto, before_us))]

    def forks_of(self, conversation: int, *, after: int = 0, limit: int = 1000) -> list[int]:
        rows = self._rows("forks_of", (conversation, after, max(0, limit)))
        return [fork for (fork,) in rows]

    def stub(self, kind: str, place: int, key: str) -> StubRow | None:
        rows = self._rows("stub", (kind, place, key))
        return StubRow(*rows[0]) if rows else None

    def stub_by_id(self, id: int) -> StubRow | None:
        rows = self._rows("stub_by_id", (id,))
        return StubRow(*rows[0]) if rows else None

    def removals(self) -> list[RemovalRow]:
        return [RemovalRow(*row) for row in self._rows("removals", ())]


def _places(tasks: Sequence[int]) -> Iterator[list[int]]:
    """Tasks, each once and by id, in parts that have as many places as the statements."""
    wanted = sorted(set(tasks))
    for first in range(0, len(wanted), sql.STARTS_AT_ONCE):
        some = wanted[first : first + sql.STARTS_AT_ONCE]
        # A place that is left over asks for the last one again.
        yield some + some[-1:] * (sql.STARTS_AT_ONCE - len(some))
