"""A dry run: what a collection would remove, told from a store that is only read.

The same walk and the same pieces as in the real run, counted instead of stored. What would have
gone by then is passed over when blobs are looked for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator
from typing import Any, ClassVar

from pidurable.session._removals import Removal
from pidurable.storage import RECORDS, CommandRow, Op, RecordKind, Storage
from pidurable.tasks._gc_answers import answers_before_us, is_old_answer, old_answers
from pidurable.tasks._gc_blobs import blob_windows, keep_referenced
from pidurable.tasks._gc_rows import Piece, Rows, Tally, is_unreadable, retired_documents
from pidurable.tasks._gc_trees import Group, TreeWalk, read_awaited, tree_below

_CONVERSATION_SCOPE = 1
_TASK_SCOPE = 2


class _Gone:
    """Ids of what would have gone by now. 8 bytes each, however many there are."""

    _NOTED: ClassVar = (
        Op.TASK_DELETE,
        Op.INPUT_DELETE,
        Op.CONVERSATION_DELETE,
        Op.DOCUMENT_DELETE,
    )

    def __init__(self) -> None:
        self._ids: dict[Op, array[int]] = {op: array("q") for op in self._NOTED}

    def add(self, piece: Piece) -> None:
        """Note what a piece deletes."""
        for op, row in piece.writes:
            if op in self._ids:
                self._ids[op].append(row[0])

    def sort(self) -> None:
        """To be called between noting and asking."""
        self._ids = {op: array("q", sorted(ids)) for op, ids in self._ids.items()}

    def has(self, op: Op, id: int) -> bool:
        """Whether something would have been deleted."""
        ids = self._ids[op]
        place = bisect_left(ids, id)
        return place < len(ids) and ids[place] == id

    def is_of(self, kind: RecordKind, row: tuple[Any, ...]) -> bool:
        """Whether a record would have gone, or hung on one that has."""
        of = dict(zip(RECORDS[kind].columns, row, strict=True))
        if kind is RecordKind.INPUT:
            return self.has(Op.INPUT_DELETE, of["task"])
        if kind is RecordKind.TASK:
            return self.has(Op.TASK_DELETE, of["id"])
        if kind is RecordKind.CONVERSATION:
            return self.has(Op.CONVERSATION_DELETE, of["id"])
        if kind is RecordKind.DOCUMENT:
            return self.has(Op.DOCUMENT_DELETE, of["id"])
        if kind is RecordKind.REVISION:
            return self.has(Op.DOCUMENT_DELETE, of["document"])
        if "task" in of:
            return self.has(Op.TASK_DELETE, of["task"])
        return "conversation" in of and self.has(Op.CONVERSATION_DELETE, of["conversation"])


class Survey:
    """One dry run."""

    def __init__(
        self,
        storage: Storage,
        *,
        now_us: int,
        before_us: int,
        keep: bool,
        in_hand: Iterable[str] = (),
    ) -> None:
        """Look at a storage that shows large values as they are stored, by reference.

        Args:
            storage: The store.
            now_us, before_us, keep: As of the collection.
            in_hand: Keys of commands that the holder has taken and not answered.
        """
        self.tally = Tally()
        self.kept: dict[str, int] = {}
        self._storage = storage
        self._before_us = before_us
        self._answers_before_us = answers_before_us(now_us, before_us, in_hand)
        self._keep = keep
        self._swept = False
        """Whether all retired documents were counted."""
        self._rows = Rows(
            storage,
            now_us=lambda: 0,
            is_gone=lambda row: self._swept and is_unreadable(row),
        )
        self._gone = _Gone()

    def steps(self) -> Iterator[None]:
        """Do it, in small steps."""
        storage, tally = self._storage, self.tally
        begun = yield from self._go_on_with_marked()
        self._gone.sort()
        retired: list[Piece] = []
        for document in retired_documents(storage):
            if document is not None and not self._gone.has(Op.DOCUMENT_DELETE, document.id):
                retired += self._rows.of_document(document)
            yield None
        for piece in retired:
            self._note(piece)
        self._gone.sort()
        self._swept = True
        awaited: set[int] = set()
        for some in read_awaited(storage):
            awaited.update(some or ())
            yield None
        walk = TreeWalk(
            storage,
            before_us=self._before_us,
            upto=storage.head().next_id,
            awaited=awaited,
            keep=self._keep,
        )
        self.kept = walk.kept
        for group in walk.groups():
            if group is not None and group.trees[0].root.id not in begun:
                yield from self._count(group, keep=self._keep, swept=True)
            yield None
        self._gone.sort()
        for found in old_answers(storage, before_us=self._answers_before_us):
            if found is not None:
                self._note(found)
            yield None
        for window in blob_windows(storage):
            if window is not None:
                yield from keep_referenced(storage, window, skip=self._would_be_gone)
                tally.blobs += len(window)
                tally.bytes += sum(window.values())
            yield None

    def _would_be_gone(self, kind: RecordKind, row: tuple[Any, ...]) -> bool:
        if kind is RecordKind.COMMAND:
            return is_old_answer(CommandRow(*row), before_us=self._answers_before_us)
        return self._gone.is_of(kind, row)

    def _go_on_with_marked(self) -> Generator[None, None, set[int]]:
        """Count what is left of trees that are being removed."""
        marked = {mark.root for mark in self._storage.removals()}
        for id in marked:
            root = self._storage.task(id)
            for tree in () if root is None else tree_below(self._storage, root):
                if tree is not None:
                    keep = self._storage.task_input(id) is None
                    yield from self._count(Group([tree], []), keep=keep, swept=False)
                yield None
        return marked

    def _count(self, group: Group, *, keep: bool, swept: bool) -> Iterator[None]:
        kept = {tree.root.id for tree in group.trees} if keep else frozenset[int]()
        for piece in self._rows.of_group(group, kept=kept, marked=False, swept=swept):
            self._note(piece)
            yield None

    def _note(self, piece: Piece) -> None:
        piece.note(self.tally, Removal())
        self._gone.add(piece)
