"""The conversations of a task graph: counted by what holds them in it.

A conversation is held by each shown task that lives in it, by the shown task that owns it, and by
each held conversation whose owner lives in it, which is the way up. Nothing of a conversation ever
changes, so what is known of a held one stays true. Everything that could fail is read before
anything is counted.
"""

from __future__ import annotations

from collections.abc import Callable

from pidurable.tasks._graph import GraphConversation


class Places:
    """Which conversations are in one graph."""

    def __init__(self, *, top: int | None) -> None:
        """Begin with none.

        Args:
            top: Nothing above this conversation is in the graph.
        """
        self.changes: dict[int, GraphConversation | None] = {}
        """What came and went since somebody took this; None for what went."""
        self._top = top
        self._held: dict[int, int] = {}
        self._known: dict[int, GraphConversation] = {}

    def look_up(self, id: int, read: Callable[[int], GraphConversation]) -> None:
        """Know a conversation and those above it, so that it can be held.

        Raises:
            StorageAccessError: One of them could not be read; nothing has changed.
        """
        new: list[GraphConversation] = []
        at: int | None = id
        while at is not None and at not in self._held:
            # What is held has everything above it in the graph as well.
            found = self._known.get(at)
            if found is None:
                found = read(at)
                new.append(found)
            at = self._above(found)
        self._known.update((each.id, each) for each in new)

    def know(self, conversation: GraphConversation) -> None:
        """Be told of a conversation whose owner is shown."""
        self._known[conversation.id] = conversation

    def hold(self, id: int) -> None:
        """Count one thing more that holds a conversation."""
        at: int | None = id
        while at is not None:
            held = self._held.get(at, 0)
            self._held[at] = held + 1
            if held:
                return
            found = self._known[at]
            if at in self.changes:
                # It went and comes again in one commit.
                del self.changes[at]
            else:
                self.changes[at] = found
            at = self._above(found)

    def release(self, id: int) -> None:
        """Count one thing less."""
        at: int | None = id
        while at is not None:
            held = self._held[at] - 1
            if held:
                self._held[at] = held
                return
            del self._held[at]
            found = self._known.pop(at)
            if at in self.changes:
                # It came in the same commit.
                del self.changes[at]
            else:
                self.changes[at] = None
            at = self._above(found)

    def _above(self, conversation: GraphConversation) -> int | None:
        return None if conversation.id == self._top else conversation.owner_conversation_id
