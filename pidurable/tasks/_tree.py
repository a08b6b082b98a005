"""The ownership tree in memory: one compact node per live task, and counters of what is below.

A node is a live task, a conversation that has live work below it, or a background task that ended
above such work. Its owner is the task that owns it, else its conversation (for a task), else
nothing. Ids are session-wide, so one dict holds both.

* `below` counts children that are live, or have ordinary live work below them, and are not
  background tasks; `below_all` counts across background boundaries too. An owner is told only when
  the answer for a child changes, so an addition to a deep live tree costs O(1).
* An ordinary task that ended is transparent and no node: what is below it counts at, holds, and is
  aborted with the next node above. The way there is found through `_skips`, which is compressed at
  each use, so that a chain of 20,000 ended tasks is walked once. An owner never changes and an end
  is never taken back, so what stands there stays true.
* A `View` is an overlay over another: what one commit, or one batch, would make of the tree. A
  commit that is refused drops its overlay, a batch that fails drops the batch's. Nodes of a lower
  view are never changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pidurable.tasks._node import (
    COMPLETING as COMPLETING,
    PENDING as PENDING,
    RUNNING as RUNNING,
    TERMINAL as TERMINAL,
    WAITING as WAITING,
    AnyNode as AnyNode,
    Node as Node,
    Scope as Scope,
)

if TYPE_CHECKING:
    from pidurable.records._entries import Conversation

_SKIPS_KEPT = 100_000
"""Beyond it the ways past ended tasks are forgotten, and read again."""


class View:
    """The tree as it would be: changed nodes over a lower view."""

    __slots__ = ("_load", "_skips", "intents", "lower", "nodes")

    _load: Callable[[int], AnyNode | None]
    _skips: dict[int, int]
    """For tasks that ended and are no nodes: where to go on looking for the next node above."""

    def __init__(
        self, lower: View | None, load: Callable[[int], AnyNode | None] | None = None
    ) -> None:
        """Begin an overlay in which nothing has changed.

        Args:
            lower: What it lies over, if anything.
            load: Reads in what is not in memory; a lower view says how, else it is needed.
        """
        self.lower = lower
        self.nodes: dict[int, AnyNode] = {}
        self.intents = False
        """Whether a node of this overlay (not of a lower view) has a new intent to cancel."""
        if lower is not None:
            self._skips, self._load = lower._skips, lower._load
        else:
            assert load is not None
            self._skips, self._load = {}, load

    def find(self, id: int) -> AnyNode | None:
        """A node that is in memory, or None."""
        view: View | None = self
        while view is not None:
            found = view.nodes.get(id)
            if found is not None:
                return found
            view = view.lower
        return None

    def task(self, id: int) -> Node | None:
        """A task that is in memory (every live one is), or None."""
        # Asked more often than anything else, so it does not call `find`.
        view: View | None = self
        while view is not None:
            found = view.nodes.get(id)
            if found is not None:
                return found if isinstance(found, Node) else None
            view = view.lower
        return None

    def find_above(self, node: AnyNode) -> AnyNode | None:
        """Where a node counts: the next node above, read in if it is not in memory."""
        id = node.above
        if id is None:
            return None
        found = self.find(id)
        if found is not None and found.counts:
            return found
        passed: list[int] = []
        published, ends_staged = self.lower is None, False
        while found is None or not found.counts:
            next_id = self._skips.get(id) if found is None or published else None
            if next_id is None:
                if found is None:
                    found = self._load(id)
                    if found is None or found.counts:
                        break
                elif not published:
                    # Its end may be taken back with the batch.
                    ends_staged = True
                next_id = found.above
            assert next_id is not None
            passed.append(id)
            id = next_id
            found = self.find(id)
        if passed and not ends_staged:
            if len(self._skips) > _SKIPS_KEPT:
                self._skips.clear()
            self._skips.update((each, id) for each in passed)
        return found

    def edit_above(self, node: AnyNode) -> AnyNode | None:
        """This view's own copy of the node where `node` counts."""
        found = self.find_above(node)
        if found is None:
            return None
        own = self.nodes.get(found.id)
        if own is None:
            own = self.nodes[found.id] = found.copy()
        return own

    def edit(self, id: int) -> AnyNode | None:
        """This view's own copy of a node; ended tasks and conversations are read in."""
        own = self.nodes.get(id)
        if own is not None:
            return own
        found = self.find(id)
        if found is not None:
            found = found.copy()
        else:
            found = self._load(id)
            if found is None:
                return None
        self.nodes[id] = found
        return found

    def edit_task(self, id: int) -> Node:
        found = self.edit(id)
        assert isinstance(found, Node)
        return found

    def add(self, node: Node) -> None:
        """A new live task."""
        self.nodes[node.id] = node
        self.spread(node, was=False, was_all=False)

    def add_scope(self, conversation: Conversation) -> None:
        """A new conversation; it holds nothing yet."""
        self.nodes[conversation.id] = Scope(conversation.id, conversation.owner)

    def spread(self, node: AnyNode, *, was: bool, was_all: bool) -> None:
        """`node` of this view changed; tell the owners above, as far as their answer changes."""
        while True:
            change = node.contributes() - was
            change_all = node.contributes_all() - was_all
            if not change and not change_all:
                return
            owner = self.edit_above(node)
            if owner is None:
                return
            is_live = owner.live
            if not is_live:
                was, was_all = owner.contributes(), owner.contributes_all()
            owner.below += change
            owner.below_all += change_all
            if is_live:
                # It holds its own owner whatever is below.
                return
            node = owner

    def end(self, node: Node) -> None:
        """`node` of this view becomes terminal."""
        was, was_all = node.contributes(), node.contributes_all()
        node.status = TERMINAL
        if not node.background and node.below_all:
            # Only background work is left below. It counts further up from now on, where this
            # task itself has counted until now, so nothing else changes there.
            owner = self.edit_above(node)
            if owner is not None:
                owner.below_all += node.below_all
            node.below_all = 0
        self.spread(node, was=was, was_all=was_all)

    def staged_children(self, owner: int) -> Iterator[Node]:
        """Live ordinary tasks directly below an owner that this view or a staged one changed."""
        view: View | None = self
        while view is not None and view.lower is not None:
            for node in view.nodes.values():
                if (
                    isinstance(node, Node)
                    and node.live
                    and not node.background
                    and (above := self.find_above(node)) is not None
                    and above.id == owner
                ):
                    yield node
            view = view.lower

    def owners(self, node: AnyNode) -> Iterator[AnyNode]:
        """The nodes above one within its ordinary tree: a background task is a boundary."""
        while True:
            if node.background:
                return
            found = self.find_above(node)
            if found is None:
                return
            yield found
            node = found
