"""The tree of one session: what is published, what is staged over it, and what is asked of both.

Live tasks are always in memory. Conversations and ended background tasks are read when something
below them needs them, and stay in memory for as long as something below them is live; other ended
tasks are read only to find the way past them.
"""

from __future__ import annotations

import contextlib

from pidurable.errors import StorageAccessError
from pidurable.session._session import Session
from pidurable.tasks._index import Index
from pidurable.tasks._tree import TERMINAL, AnyNode, Node, Scope, View

_TOPS_CACHED = 100_000
_FREE_KEPT = 100_000
"""Beyond it those that are below no interrupted task are forgotten, and found again."""


class SessionTree:
    """Views and index of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.published = View(None, self.load)
        self.staged = View(self.published)
        self.index = Index(
            self.published,
            top_of=self._top_of,
            unread=self.unread,
            now_us=session.clock.now_us,
        )
        self._signals: dict[int, int] = {}
        self.staged_signals: dict[int, int] = {}
        """How many more unread signals tasks have by the bodies of the open batch."""
        self.staged_memos: dict[int, int] = {}
        """How many more memos tasks have by the bodies of the open batch."""
        self._tops: dict[int, int] = {}
        self._unhalted: set[int] = set()
        """Nodes that are below no interrupted owner; kept while there is an interrupted task."""
        session.owner_conversation = self._conversation_of_task

    def load(self, id: int) -> AnyNode | None:
        """An ended task or a conversation that is not in memory (every live task is)."""
        if not self.session.is_conversation(id):
            row = self.session.storage.task(id)
            if row is not None:
                return Node(row) if row.status == TERMINAL else None
        found = None
        with contextlib.suppress(LookupError):
            found = self.session.staged_conversation(id)
        return None if found is None else Scope(found.id, found.owner)

    def _conversation_of_task(self, task_id: int) -> int | None:
        node = self.staged.task(task_id)
        if node is not None:
            return node.conversation
        row = self.session.storage.task(task_id)
        return None if row is None else row.conversation

    def _top_of(self, conversation: int) -> int:
        """The ownerless conversation at the top of a conversation's ownership."""
        found = self._tops.get(conversation)
        if found is not None:
            return found
        top = conversation
        try:
            while True:
                owner = self.session.staged_conversation(top).owner
                above = None if owner is None else self._conversation_of_task(owner)
                if above is None:
                    break
                top = above
        except StorageAccessError:
            # It decides about turns alone: this once the task takes them for itself.
            return conversation
        if len(self._tops) > _TOPS_CACHED:
            self._tops.clear()
        self._tops[conversation] = top
        return top

    def ended_status(self, id: int) -> str | None:
        """How a task that is not in memory ended."""
        row = self.session.storage.task(id)
        return None if row is None else row.outcome_status

    def below_intent(self, node: AnyNode) -> bool:
        """Whether a published node is below a live owner with the intent to cancel.

        Owners never change and an intent is never taken back, so a walk that found none holds for
        everything it passed until there is a newer intent.
        """
        if not self.index.intents:
            return False
        version = self.index.intents_version
        if node.clean_at == version:
            return False
        passed = [node]
        for owner in self.published.owners(node):
            if owner.intent:
                return True
            if owner.clean_at == version:
                break
            passed.append(owner)
        for each in passed:
            each.clean_at = version
        return False

    def under_intent(self, view: View, node: AnyNode) -> bool:
        """The same in a view of the line, which may know of newer intents."""
        lower: View | None = view
        while lower is not None and lower is not self.published:
            if lower.intents:
                return any(owner.intent for owner in view.owners(node))
            lower = lower.lower
        if not self.index.intents:
            return False
        published = self.published.find(node.id)
        if published is not None:
            return self.below_intent(published)
        # What is new, and what is new above it, is unknown to the published tree.
        for owner in view.owners(node):
            if owner.intent:
                return True
            known = self.published.find(owner.id)
            if known is not None:
                return self.below_intent(known)
        return False

    def conversations_below(self, view: View, owner: int) -> list[int]:
        """Conversations with live work whose nearest live owner is `owner`, in a view of the line.

        Those of live tasks further down are left out: an abort comes to them on its own.
        """
        found: dict[int, None] = {}
        pending = [owner]
        while pending:
            for id in self.index.children.get(pending.pop(), ()):
                node = view.find(id)
                if node is None or node.background or (isinstance(node, Node) and node.live):
                    continue
                pending.append(id)
                if isinstance(node, Scope):
                    found[id] = None
        staged: View | None = view
        while staged is not None and staged.lower is not None:
            for node in staged.nodes.values():
                if isinstance(node, Scope) and node.below and node.id not in found:
                    live = (each.id for each in view.owners(node) if each.live)
                    if next(live, None) == owner:
                        found[node.id] = None
            staged = staged.lower
        return list(found)

    def halted(self, view: View, node: AnyNode) -> bool:
        """Whether a node is below an owner that a restart interrupted, and so may not start.

        The nearest owner's `on_restart` counts, the node's own first: `go` and `abort` shield what
        is below them. Tasks are interrupted at open only, so what was found free stays free.
        """
        if not self.index.interrupted:
            self._unhalted.clear()
            return False
        passed: list[int] = []
        found = False
        if not _shields(node):
            passed.append(node.id)
            for owner in view.owners(node):
                if isinstance(owner, Node) and owner.blocked == "interrupted":
                    found = True
                    break
                if owner.id in self._unhalted or _shields(owner):
                    break
                passed.append(owner.id)
        if not found:
            if len(self._unhalted) > _FREE_KEPT:
                # Most of them have ended by now: the interrupted task may stand for months.
                self._unhalted.clear()
            self._unhalted.update(passed)
        return found

    # --- signals -------------------------------------------------------------------------

    def unread(self, task_id: int) -> int:
        return self._signals.get(task_id, 0)

    def set_unread(self, task_id: int, unread: int) -> None:
        self._signals[task_id] = unread


def _shields(node: AnyNode) -> bool:
    return isinstance(node, Node) and node.on_restart in ("go", "abort")
