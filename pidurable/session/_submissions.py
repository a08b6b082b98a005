"""Submissions as published, kept for a while: whoever is told of a change looks at once.

A commit that ends a submission wakes who waits for it, and the next one asks which are open still.
Both are answered from here, where what was published lately stays, and from the storage else. Rows
are kept and not records: a record is made anew for everybody who asks, as from the storage, since
its content is plain data that its owner may change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pidurable.records._checks import is_id
from pidurable.session._rows import changed_row
from pidurable.storage import Storage, SubmissionRow

if TYPE_CHECKING:
    from pidurable.session._transaction import Transaction

_ROWS_KEPT = 1_000
_CONVERSATIONS_KEPT = 1_000
_OPEN_KEPT = 4
"""Most open submissions of one conversation that are kept: few have more than one."""
_CHARACTERS_KEPT = 4_096
"""Longer contents are not kept, so that all of this takes a few megabytes, and 20 million
characters at most."""

_OPEN = ("queued", "placed")


class Submissions:
    """The submissions of one session, as published."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._rows: OrderedDict[int, SubmissionRow] = OrderedDict()
        self._open: OrderedDict[int, dict[int, SubmissionRow]] = OrderedDict()
        """By conversation, all that are queued or placed."""

    def row(self, submission_id: int) -> SubmissionRow | None:
        """A published submission, or None where there is none."""
        if not is_id(submission_id):
            return None
        found = self._rows.get(submission_id)
        return self._storage.submission(submission_id) if found is None else found

    def open_rows(self, conversation_id: int) -> Iterable[SubmissionRow]:
        """Those of a conversation that are queued or placed, by id."""
        found = self._open.get(conversation_id)
        if found is not None:
            return found.values()
        rows = self._storage.open_submissions(conversation_id)
        self._keep_open(conversation_id, {row.id: row for row in rows})
        return rows

    def publish(self, tx: Transaction) -> None:
        """A commit is durable: keep what it says of submissions."""
        for made in tx.conversations:
            self._keep_open(made.id, {})
        if not tx.submissions:
            return
        kept = self._rows
        for id, record in tx.submissions.items():
            conversation = record.conversation_id
            still_open = self._open.get(conversation)
            row = tx.new_submission(id) or kept.get(id) or (still_open or {}).get(id)
            if row is None or len(row.content) > _CHARACTERS_KEPT:
                kept.pop(id, None)
                self._open.pop(conversation, None)
                continue
            row = kept[id] = changed_row(row, record)
            kept.move_to_end(id)
            if still_open is not None:
                if record.status in _OPEN:
                    still_open[id] = row
                    self._keep_open(conversation, still_open)
                else:
                    still_open.pop(id, None)
        while len(kept) > _ROWS_KEPT:
            kept.popitem(last=False)

    def _keep_open(self, conversation: int, rows: dict[int, SubmissionRow]) -> None:
        if len(rows) > _OPEN_KEPT or any(
            len(row.content) > _CHARACTERS_KEPT for row in rows.values()
        ):
            self._open.pop(conversation, None)
            return
        self._open[conversation] = rows
        self._open.move_to_end(conversation)
        if len(self._open) > _CONVERSATIONS_KEPT:
            self._open.popitem(last=False)

    def forget(self) -> None:
        """Keep nothing: some were removed, or nothing is published any more."""
        self._rows.clear()
        self._open.clear()
