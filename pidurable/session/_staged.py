"""What the accepted bodies of the open batch have staged so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from pidurable.records._entries import Conversation, Entry
from pidurable.records._submissions import SubmissionRecord
from pidurable.session._documents import Address, DocState

if TYPE_CHECKING:
    from pidurable.session._transaction import Transaction


@attrs.define(eq=False)
class Staged:
    """What the accepted bodies of the open batch have made, by id; dropped with the batch."""

    conversations: dict[int, Conversation] = attrs.Factory(dict)
    submissions: dict[int, SubmissionRecord] = attrs.Factory(dict)
    entries: dict[int, Entry] = attrs.Factory(dict)
    unique: dict[tuple[Any, ...], Any] = attrs.Factory(dict)
    docs: dict[Address, DocState | None] = attrs.Factory(dict)
    docs_before: dict[Address, DocState | None] = attrs.Factory(dict)
    """What is published of the documents that the batch changes, which the storage may not show."""
    blobs: set[str] = attrs.Factory(set)
    blobs_removed: set[str] = attrs.Factory(set)
    """What the batch removes: the storage has it until then, and nobody may count on it."""
    doc_commits: list[tuple[int, dict[Address, DocState | None]]] = attrs.Factory(list)
    """What each of the bodies did to documents, by its sequence number, oldest first."""

    def clear(self) -> None:
        """The batch is published: what it had staged is what stands."""
        self.conversations.clear()
        self.submissions.clear()
        self.entries.clear()
        self.unique.clear()
        self.docs.clear()
        self.docs_before.clear()
        self.blobs.clear()
        self.blobs_removed.clear()
        self.doc_commits.clear()

    def add(self, tx: Transaction) -> None:
        if tx.conversations:
            self.conversations.update((made.id, made) for made in tx.conversations)
        if tx.submissions:
            self.submissions.update(tx.submissions)
        for entry in tx.entries:
            self.entries[entry.id] = entry
        if tx.unique:
            self.unique.update(tx.unique)
        if tx.blobs:
            self.blobs.update(tx.blobs)
        if tx.removal is not None:
            self.blobs_removed.update(tx.removal.blobs)
        if tx.docs:
            self.docs.update(tx.docs)
            self.doc_commits.append((tx.seq, tx.docs))
