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

    def __init__(self, storage: Storage, *, now_us: Callable[[], int]) -> None:
        """Read from a storage that shows large values as they are stored, by reference."""
        self._storage = storage
        self._now_us = now_us

    def of_group(self, group: Group, *, kept: Set[int], marked: bool) -> Iterator[Piece]:
        """Everything that goes of some trees.

        Args:
            group: The trees.
            kept: Those of their roots whose rows and outcomes stay.
            marked: Whether they were marked before, so that their marks go with their roots.
        """
        roots = {tree.root.id: tree.root for tree in group.trees}
        parts: list[Iterator[tuple[int, bool]]] = []
        for tree in group.trees:
            parts.append((id, True) for id in reversed(tree.tasks))
            parts.append((id, False) for id in reversed(tree.conversations))
        for id, is_task in heapq.merge(*parts, reverse=True):
            if is_task:
                yield from self._of_task(id, roots.get(id), kept=id in kept, marked=marked)
            else:
                yield from self._of_conversation(id)

    def _of_task(
        self, id: int, root: TaskRow | None, *, kept: bool, marked: bool
    ) -> Iterator[Piece]:
        storage = self._storage
        yield from self._of_documents(_TASK_SCOPE, id)
        writes: list[Write] = [(Op.INPUT_DELETE, (id,))]
        size = stored_size(storage.task_input(id))
        if root is not None and marked:
            writes.append((Op.REMOVAL_DELETE, (id,)))
        if kept:
            yield Piece(writes, "", 0, size, root=id)
            return
        size += stored_size(storage.task_outcome(id))
        writes.append((Op.OUTCOME_DELETE, (id,)))
        writes.append((Op.TASK_DELETE, (id,)))
        if root is not None and root.key is not None:
            status = root.outcome_status or "ended"
            stub = StubRow(TASK, root.conversation, root.key, id, "", status, self._now_us())
            writes.append((Op.STUB, stub))
        yield Piece(writes, "tasks", 1, size, task=id, root=None if root is None else id)

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


def retired_documents(storage: Storage) -> Iterator[DocumentRow | None]:
    """Give the documents that nobody can read any more, whenever they were retired.

    Of a conversation's rewindable ones the past stays readable.
    """
    after: tuple[Any, ...] | None = None
    while rows := storage.scan(RecordKind.DOCUMENT, after=after, limit=PAGE):
        for values in rows:
            row = DocumentRow(*values)
            kept = row.scope == _CONVERSATION_SCOPE and row.history == "rewindable"
            if row.retired_seq is not None and not kept:
                yield row
        yield None
        after = (rows[-1][0],)


def stored_size(text: str | None) -> int:
    """The bytes of a value as it is stored."""
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode())
