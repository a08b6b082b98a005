"""Trees that are being removed: nothing may be added to what is going.

A tree that is too large for one commit is marked by its root before anything of it goes, and its
records go from the bottom up, the root and its mark last. So whatever still stands has all its
owners, and whether a conversation belongs to a marked tree is found by walking up from it, also
right after a crash, when nothing of the tree is in memory. While nothing is marked, which is nearly
always, none of this costs anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from pidurable.session._documents import Address

if TYPE_CHECKING:
    from pidurable.records._entries import Conversation
    from pidurable.storage import Storage, TaskRow

_ROOTS_KEPT = 10_000


@attrs.define(eq=False)
class Removal:
    """What one commit removes, for all who keep something of it in memory."""

    marked: list[int] = attrs.Factory(list)
    """Roots of trees that begin to go."""
    finished: list[int] = attrs.Factory(list)
    """Roots whose mark goes: nothing is left of their trees but what was to be kept."""
    tasks: list[int] = attrs.Factory(list)
    conversations: list[int] = attrs.Factory(list)
    documents: list[Address] = attrs.Factory(list)
    blobs: list[str] = attrs.Factory(list)


class Removals:
    """The marked trees of a session, as published and as staged."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._published = {row.root for row in storage.removals()}
        self._marked: set[int] = set()
        self._roots: dict[int, int] = {}
        """By conversation, the root task of its tree; 0 where it belongs to none."""

    @property
    def published(self) -> frozenset[int]:
        """The roots of the trees that are being removed, as stored."""
        return frozenset(self._published)

    @property
    def any(self) -> bool:
        """Whether anything is being removed, as published or as staged."""
        return bool(self._published or self._marked)

    def joined(self, removal: Removal) -> None:
        """A body was accepted."""
        self._marked.update(removal.marked)

    def adopted(self, removal: Removal) -> None:
        """A commit is durable."""
        self._published.update(removal.marked)
        self._published.difference_update(removal.finished)

    def settled(self) -> None:
        """The batch has ended, whichever way."""
        self._marked.clear()
        if not self._published:
            self._roots.clear()

    def tree_of(self, conversation: Conversation, *, staged: bool) -> int | None:
        """The root of the marked tree that a conversation belongs to, or None.

        Args:
            conversation: Its record.
            staged: As the bodies of the open batch have it, and not as published.
        """
        if conversation.owner is None or not self.any:
            return None
        root = self._root_above(conversation.id, conversation.owner)
        if root in self._published:
            return root
        return root if staged and root in self._marked else None

    def tree_of_task(self, row: TaskRow) -> int | None:
        """The root of the marked tree that a stored task belongs to, as staged, or None."""
        if not self.any:
            return None
        root = root_of(self._storage, row)
        return root if root in self._published or root in self._marked else None

    def _root_above(self, conversation_id: int, owner: int) -> int:
        found = self._roots.get(conversation_id)
        if found is None:
            row = self._storage.task(owner)
            # One that is not stored yet was created in this batch, and so in no marked tree.
            found = None if row is None else root_of(self._storage, row)
            if found is None:
                return 0
            if len(self._roots) >= _ROOTS_KEPT:
                self._roots.clear()
            self._roots[conversation_id] = found
        return found


def root_of(storage: Storage, row: TaskRow) -> int | None:
    """The root task of the tree that a task belongs to; None if it goes while one looks."""
    while True:
        owner = row.owner
        if owner is None:
            conversation = storage.conversation(row.conversation)
            if conversation is None:
                return None
            owner = conversation.owner
            if owner is None:
                return row.id
        above = storage.task(owner)
        if above is None:
            return None
        row = above


def removed_hint(root: int) -> str:
    """What an error says of something that is going."""
    return (
        f"It belonged to the tree of task {root}, which had ended and was removed to free its "
        "space (`pidurable gc`)."
    )
