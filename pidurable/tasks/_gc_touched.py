"""What the commits of the line touch while a collection looks at the store.

A collection reads in a thread and removes in a later commit. In between others may have added to
what it has read. They are noted when they are staged, so that a body of the collection, which comes
after them on the line, knows of them; nothing is noted while nothing is collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trio

from pidurable.records import _codec, _json, _patch
from pidurable.session._blobs import moved_blobs
from pidurable.session._participants import Participant
from pidurable.storage import ConversationRow, EntryRow, Op, SubmissionRow, TaskRow
from pidurable.tasks._gc_blobs import DIGITS, take_out_quickly
from pidurable.tasks._gc_trees import Tree

if TYPE_CHECKING:
    from pidurable.session._documents import DocChange
    from pidurable.session._session import Session


_BUSY_SECONDS = 1.0


class Touched(Participant):
    """A participant of the line, for as long as a collection lasts."""

    def __init__(self, session: Session) -> None:
        self.awaited: set[int] = set()
        """What live tasks wait for; only grows while it is followed."""
        self._session = session
        self._touched: set[int] = set()
        """Tasks and conversations that were added to, by commits that are stored."""
        self._staged: set[int] = set()
        self._others_at = float("-inf")
        """trio time of the last commit of others."""
        self._wanted: dict[str, int] = {}
        """Blobs that are looked for: what a staged text refers to is taken out."""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the line while the block lasts."""
        self._session.participants.append(self)
        try:
            yield
        finally:
            self._session.participants.remove(self)
            self.awaited.clear()
            self._touched.clear()
            self._staged.clear()

    @contextmanager
    def looking_for(self, wanted: dict[str, int]) -> Iterator[None]:
        """Look through every staged text for the names of blobs while the block lasts."""
        self._wanted = wanted
        try:
            yield
        finally:
            self._wanted = {}

    def forget(self) -> None:
        """What was read until now is not used any more. What is staged may be read too early."""
        self._touched.clear()

    def others(self) -> bool:
        """Whether anybody else commits at this time."""
        return trio.current_time() - self._others_at < _BUSY_SECONDS

    def has_any_of(self, tree: Tree) -> bool:
        """On the line: whether something came to a tree."""
        return tree.has_any(self._touched) or tree.has_any(self._staged)

    # --- participant ---------------------------------------------------------------------

    def joined(self, tx: Any) -> None:
        if tx.removal is not None:
            return
        self._others_at = trio.current_time()
        staged = self._staged
        for op, row in tx.writes:
            if op is Op.ENTRY:
                staged.add(EntryRow(*row).conversation)
            elif op is Op.CONVERSATION:
                made = ConversationRow(*row)
                staged.update(id for id in (made.parent, made.owner) if id is not None)
            elif op is Op.TASK:
                task = TaskRow(*row)
                staged.update(id for id in (task.conversation, task.owner) if id is not None)
            elif op is Op.SUBMISSION:
                staged.add(SubmissionRow(*row).conversation)
            elif op is Op.WAIT:
                self._await(row[1])
            if self._wanted:
                self._look_through(op, row)
        if self._wanted:
            for change in tx.doc_changes:
                self._look_at_ends(change)
        staged.update(record.conversation_id for record in tx.submissions.values())
        staged.update(address.scope_id for address in tx.docs)

    def _await(self, text: str) -> None:
        wait = _codec.decode_wait(_json.loads_stored(text))
        for id in wait.on or ():
            self.awaited.add(id)
            self._staged.add(id)
            # A submission needs its conversation.
            record = self._session.staged_submission(id)
            if record is not None:
                self._staged.add(record.conversation_id)

    def _look_through(self, op: Op, row: tuple[Any, ...]) -> None:
        if op is Op.BLOB:
            self._wanted.pop(row[0], None)
            return
        for value in row:
            if type(value) is str and self._wanted:
                take_out_quickly(value, self._wanted)
        for name in moved_blobs(op, row):
            self._wanted.pop(name, None)

    def _look_at_ends(self, change: DocChange) -> None:
        """Look at the texts of a document that grew: a digest may come in parts, each too short.

        What stood in it before is looked through as it is stored, and so is what was added, so only
        what lies across the end of what stood there is left.
        """
        grown: dict[str, int] = {}
        for op in change.ops:
            if op["op"] == "append" and type(op["value"]) is str:
                grown[op["path"]] = grown.get(op["path"], 0) + len(op["value"])
        if not grown or change.held_after is None:
            return
        value = change.after
        if any(op["op"] != "append" for op in change.ops):
            # Where a text stood when it grew is not where it stands now.
            take_out_quickly(_json.dumps(value, path="$"), self._wanted)
            return
        for path, added in grown.items():
            text = _patch.get(value, path)
            assert type(text) is str
            take_out_quickly(text[-(added + DIGITS - 1) :], self._wanted)

    def committed(self, tx: Any) -> None:
        self._touched |= self._staged
        self._staged.clear()

    def reverted(self) -> None:
        self._staged.clear()
