"""What goes of a tree, piece by piece, from the bottom up.

A piece is a record with all that hangs on it alone, or a page of what does: entries, submissions
and documents before their conversation, a conversation or a task before the task that owns it, a
fork before its parent, the root last. So a group can be cut between any two pieces, and whatever
stands has all its owners.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

import attrs

from pidurable.session._documents import Address
from pidurable.session._removals import Removal
from pidurable.session._stubs import SUBMISSION, TASK
from pidurable.storage import DocumentRow, Op, RecordKind, Storage, StubRow, TaskRow
from pidurable.tasks._gc_trees import PAGE, Group

_CONVERSATION_SCOPE = 1
_TASK_SCOPE = 2
AHEAD = 64
"""Most rows that are read ahead."""
PIECE = 50
"""Most rows of one piece: what is deleted together at least."""

Write = tuple[Op, tuple[Any, ...]]


@attrs.define(eq=False)
class Tally:
    """What went, or would go."""

    trees: int = 0
    tasks: int = 0
    conversations: int = 0
    entries: int = 0
    submissions: int = 0
    documents: int = 0
    blobs: int = 0
    answers: int = 0
    bytes: int = 0

    def add(self, other: Tally) -> None:
        """Count what another has counted too."""
        for field in attrs.fields(Tally):
            name = field.name
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Piece(NamedTuple):
    """Rows that go in one commit, and what they were."""

    writes: list[Write]
    counted: str
    """The field of a tally that it counts in; empty where it is a part of something."""
    number: int
    bytes: int
    task: int | None = None
    conversation: int | None = None
    document: Address | None = None
    root: int | None = None
    """The root whose tree ends with it."""

    def note(self, tally: Tally, removal: Removal) -> None:
        """Note what goes with this piece."""
        if self.counted:
            setattr(tally, self.counted, getattr(tally, self.counted) + self.number)
        tally.bytes += self.bytes
        if self.task is not None:
            removal.tasks.append(self.task)
        if self.conversation is not None:
            removal.conversations.append(self.conversation)
        if self.document is not None:
            removal.documents.append(self.document)
        if self.root is not None:
            tally.trees += 1


class Rows:
    """Makes the pieces of groups. Reads a page at a time, in a thread."""

    def __init__(
        self,
        storage: Storage,
        *,
        now_us: Callable[[], int],
        is_gone: Callable[[DocumentRow], bool] = lambda _: False,
    ) -> None:
        """Make the pieces of one collection.

        Args:
            storage: Shows large values as they are stored, by reference.
            now_us: The wall clock.
            is_gone: For a dry run: whether a document would have gone before.
        """
        self._storage = storage
        self._now_us = now_us
        self._is_gone = is_gone
        self._inputs = _SizesAhead(storage, RecordKind.INPUT)
        self._outcomes = _SizesAhead(storage, RecordKind.OUTCOME)

    def of_group(
        self, group: Group, *, kept: Set[int], marked: bool, swept: bool
    ) -> Iterator[Piece]:
        """Everything that goes of some trees.

        Args:
            group: The trees.
            kept: Those of their roots whose rows and outcomes stay.
            marked: Whether they were marked before, so that their marks go with their roots.
            swept: Whether retired documents were removed after all of these tasks had ended: with
                a task all of its documents are retired, so none is left.
        """
        low = min(tree.root.id for tree in group.trees)
        self._inputs.look_from(low)
        self._outcomes.look_from(low)
        roots = {tree.root.id: tree.root for tree in group.trees}
        parts: list[Iterator[tuple[int, bool]]] = []
        for tree in group.trees:
            parts.append((id, True) for id in reversed(tree.tasks))
            parts.append((id, False) for id in reversed(tree.conversations))
        for id, is_task in heapq.merge(*parts, reverse=True):
            if is_task:
                if not swept:
                    yield from self._of_documents(_TASK_SCOPE, id)
                yield self._of_task(id, roots.get(id), kept=id in kept, marked=marked)
            else:
                yield from self._of_conversation(id)

    def _of_task(self, id: int, root: TaskRow | None, *, kept: bool, marked: bool) -> Piece:
        writes: list[Write] = [(Op.INPUT_DELETE, (id,))]
        size = self._inputs.of(id)
        if root is not None and marked:
            writes.append((Op.REMOVAL_DELETE, (id,)))
        if kept:
            # One that was marked has lost its input by that.
            size = 0 if marked else size
            return Piece(writes, "", 0, size, root=id)
        size += self._outcomes.of(id)
        writes.append((Op.OUTCOME_DELETE, (id,)))
        writes.append((Op.TASK_DELETE, (id,)))
        if root is not None and root.key is not None:
            status = root.outcome_status or "ended"
            stub = StubRow(TASK, root.conversation, root.key, id, "", status, self._now_us())
            writes.append((Op.STUB, stub))
        return Piece(writes, "tasks", 1, size, task=id, root=None if root is None else id)

    def _of_conversation(self, id: int) -> Iterator[Piece]:
        storage = self._storage
        after = 0
        while rows := storage.entries(id, after=after, limit=PIECE):
            size = sum(
                stored_size(row.edits) + stored_size(row.messages) + stored_size(row.data)
                for row in rows
            )
            deletes: list[Write] = [(Op.ENTRY_DELETE, (row.id,)) for row in rows]
            yield Piece(deletes, "entries", len(rows), size)
            after = rows[-1].id
        after = 0
        while submissions := storage.submissions_of(id, after=after, limit=PIECE):
            writes: list[Write] = []
            for row in submissions:
                writes.append((Op.SUBMISSION_DELETE, (row.id,)))
                if row.request_id is not None:
                    stub = StubRow(
                        *(SUBMISSION, id, row.request_id, row.id),
                        *(row.digest, row.status, self._now_us()),
                    )
                    writes.append((Op.STUB, stub))
            size = sum(stored_size(row.content) for row in submissions)
            yield Piece(writes, "submissions", len(submissions), size)
            after = submissions[-1].id
        yield from self._of_documents(_CONVERSATION_SCOPE, id)
        yield Piece([(Op.CONVERSATION_DELETE, (id,))], "conversations", 1, 0, conversation=id)

    def _of_documents(self, scope: int, scope_id: int) -> Iterator[Piece]:
        for row in self._storage.documents_ever(scope, scope_id):
            if not self._is_gone(row):
                yield from self.of_document(row)

    def of_document(self, row: DocumentRow) -> Iterator[Piece]:
        """A document with its revisions, of which a rewindable one may have many."""
        after = (row.id, 0)
        while True:
            page = self._storage.scan(RecordKind.REVISION, after=after, limit=PIECE)
            mine = [revision for revision in page if revision[0] == row.id]
            if not mine:
                break
            after = (row.id, mine[-1][1])
            size = sum(stored_size(revision[-1]) for revision in mine)
            yield Piece([(Op.REVISIONS_DELETE, (row.id, after[1] + 1))], "", 0, size)
            if len(mine) < len(page) or len(page) < PIECE:
                break
        address = Address(row.name, row.scope, row.scope_id, row.key)
        deletes: list[Write] = [(Op.DOCUMENT_DELETE, (row.id,))]
        yield Piece(deletes, "documents", 1, 0, document=address)


class _SizesAhead:
    """Sizes of what hangs on tasks, read ahead as long as the tasks are asked for in a row.

    Old trees lie beside each other, so most tasks need no read of their own.
    """

    def __init__(self, storage: Storage, kind: RecordKind) -> None:
        self._storage = storage
        self._kind = kind
        self._hint = 0
        self._low = 1
        self._sizes: dict[int, int] = {}
        self._upto = 0
        """Up to this task all are known that are not below `_low`."""
        self._asked = 0
        self._limit = 1

    def look_from(self, low: int) -> None:
        """The next tasks that are asked for are about here."""
        self._hint = low

    def of(self, task: int) -> int:
        """The bytes of one; 0 where there is nothing."""
        if not self._low <= task <= self._upto:
            first = self._hint if self._hint <= task < self._hint + AHEAD else task
            was_used = self._asked >= len(self._sizes) // 2
            self._limit = min(self._limit * 2, AHEAD) if was_used else 1
            rows = self._storage.scan(self._kind, after=(first - 1,), limit=self._limit)
            self._sizes = {row[0]: stored_size(row[1]) for row in rows}
            self._low, self._asked = first, 0
            self._upto = rows[-1][0] if len(rows) == self._limit else 2**63
            if task > self._upto:
                rows = self._storage.scan(self._kind, after=(task - 1,), limit=1)
                return stored_size(rows[0][1]) if rows and rows[0][0] == task else 0
        self._asked += 1
        return self._sizes.get(task, 0)


def retired_documents(storage: Storage) -> Iterator[DocumentRow | None]:
    """Give the documents that nobody can read any more, whenever they were retired.

    Of a conversation's rewindable ones the past stays readable.
    """
    after: tuple[Any, ...] | None = None
    while rows := storage.scan(RecordKind.DOCUMENT, after=after, limit=PAGE):
        for values in rows:
            row = DocumentRow(*values)
            if is_unreadable(row):
                yield row
        yield None
        after = (rows[-1][0],)


def is_unreadable(row: DocumentRow) -> bool:
    """Whether nobody can read a document any more."""
    kept = row.scope == _CONVERSATION_SCOPE and row.history == "rewindable"
    return row.retired_seq is not None and not kept


def stored_size(text: str | None) -> int:
    """The bytes of a value as it is stored."""
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode())
