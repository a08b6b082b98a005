"""Waits that could never end: found when the wait is to be committed, and refused with the path.

Edges lead from who cannot go on to what it needs: "waits on" (parked, or held in memory by an
invocation), "has ordinary owned work" (tasks, and conversations whose idleness is waited for), and
what submissions need. A wait with a deadline or signals is no edge. A cycle
that a new wait would close is looked for from both ends in lockstep, forwards from what is awaited
and backwards from the waiter; the smaller side decides, so deep chains and wide trees cost little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pidurable.errors import WaitCycleError
from pidurable.tasks._tree import WAITING, AnyNode, Node, Scope, View

if TYPE_CHECKING:
    from pidurable.tasks._awaited import Kinds
    from pidurable.tasks._index import Index
    from pidurable.tasks._tree_transaction import TreeTransaction


def is_edge(node: Node | None) -> bool:
    """Whether a task waits for others with no other way to wake."""
    if node is None or node.status is not WAITING or node.wait is None:
        return False
    wait = node.wait
    return wait.on is not None and wait.deadline_us is None and not wait.signals


class Cycles:
    """Who needs whom: the index of what is published, what is staged, and waits held in memory."""

    def __init__(self, index: Index, kinds: Kinds) -> None:
        self._index = index
        self._kinds = kinds
        self._unsorted: list[tuple[View, Mapping[int, AnyNode]]] = []
        """Staged nodes that are in none of the tables below yet: few batches are asked about."""
        self._staged_children: dict[int, list[int]] = {}
        self._staged_waiters: dict[int, list[int]] = {}
        self._staged_waits: set[int] = set()
        self._held_by: dict[int, dict[int, int]] = {}
        """By waiter: the tasks that its invocation waits for in memory, counted."""
        self._held_on: dict[int, dict[int, int]] = {}
        """The same by awaited task."""

    # --- what is staged, what is held ----------------------------------------------------

    def stage(self, view: View, nodes: Mapping[int, AnyNode]) -> None:
        """Add the nodes of a commit that was accepted and is not published yet."""
        self._unsorted.append((view, nodes))

    def _sort(self) -> None:
        for view, nodes in self._unsorted:
            self._sort_nodes(view, nodes.values())
        self._unsorted.clear()

    def _sort_nodes(self, view: View, nodes: Iterable[AnyNode]) -> None:
        for node in nodes:
            if node.contributes_all() and (above := view.find_above(node)) is not None:
                self._staged_children.setdefault(above.id, []).append(node.id)
            if isinstance(node, Node) and is_edge(node) and self._is_new(node):
                assert node.wait is not None
                self._staged_waits.add(node.id)
                for id in node.wait.on or ():
                    self._staged_waiters.setdefault(id, []).append(node.id)

    def _is_new(self, waiting: Node) -> bool:
        """Whether a wait was made in this batch; a published one is in the index.

        An owner that waits for all of its children is part of the commit of each that ends: it
        must not cost all of them each time.
        """
        before = self._index.published.task(waiting.id)
        known = before is not None and before.wait is waiting.wait
        return not known and waiting.id not in self._staged_waits

    def unstage(self) -> None:
        """The batch was published, or failed."""
        self._unsorted.clear()
        self._staged_waits.clear()
        self._staged_children.clear()
        self._staged_waiters.clear()

    def hold(self, waiter: int, awaited: int) -> None:
        """Note a wait in memory, until `leave` ends it."""
        for table, key, value in (
            (self._held_by, waiter, awaited),
            (self._held_on, awaited, waiter),
        ):
            counts = table.setdefault(key, {})
            counts[value] = counts.get(value, 0) + 1

    def leave(self, waiter: int, awaited: int) -> None:
        """A wait in memory that was noted has ended."""
        for table, key, value in (
            (self._held_by, waiter, awaited),
            (self._held_on, awaited, waiter),
        ):
            counts = table[key]
            counts[value] -= 1
            if not counts[value]:
                del counts[value]
                if not counts:
                    del table[key]

    def held_by(self, waiter: int) -> tuple[int, ...]:
        """The tasks that the invocation of a task waits for in memory."""
        return tuple(self._held_by.get(waiter, ()))

    # --- looking -------------------------------------------------------------------------

    def check(
        self,
        view: View,
        waiter: int,
        on: Sequence[int],
        *,
        others: Sequence[int] = (),
        tx: TreeTransaction | None = None,
    ) -> None:
        """Refuse that `waiter` waits for all of `on` if one of them can only end after it.

        Args:
            view: The tree as staged.
            waiter: The task that is to wait.
            on: What it is to wait for.
            others: Those of `on` that are neither tasks nor conversations, and are open.
            tx: The commit of the wait, if it is one.

        Raises:
            WaitCycleError: With the path from the waiter back to itself.
        """
        if waiter in on:
            raise WaitCycleError(self._path(view, [waiter, waiter], tx))
        if len(on) == 1 and self._needs_nothing(view, on[0]):
            return
        self._sort()
        # Tasks created in the body itself are in no index: its own view is looked at as well.
        own: dict[int, list[int]] = {}
        for node in view.nodes.values():
            if node.contributes_all() and (above := view.find_above(node)) is not None:
                own.setdefault(above.id, []).append(node.id)
        # What an id is that is not in memory is looked up only where it may matter.
        known = set(others)
        forwards = _Search(on, lambda id: self._needs(view, own, id, known, tx))
        backwards = _Search((waiter,), lambda id: self._needed_by(view, id, tx))
        targets = set(on)
        while forwards.pending and backwards.pending:
            if forwards.step(lambda id: id == waiter):
                raise WaitCycleError(self._path(view, [waiter, *forwards.path(waiter)], tx))
            if backwards.step(targets.__contains__):
                assert backwards.found is not None
                back = backwards.path(backwards.found)
                raise WaitCycleError(self._path(view, [waiter, *reversed(back)], tx))

    def _needs_nothing(self, view: View, id: int) -> bool:
        """Whether it is a live task that can end by itself, as one that has just been made."""
        node = view.find(id)
        return (
            isinstance(node, Node)
            and node.live
            and not node.below_all
            and id not in self._held_by
            and not is_edge(node)
        )

    def _needs(
        self,
        view: View,
        own: dict[int, list[int]],
        id: int,
        others: set[int],
        tx: TreeTransaction | None,
    ) -> Iterator[int]:
        """What must end before `id` can: what it waits for, and live tasks that are below it."""
        node = view.find(id)
        if isinstance(node, Node):
            if not node.live:
                return
            if is_edge(node):
                assert node.wait is not None
                others.update(node.wait.others)
                yield from node.wait.on or ()
            others.update(self._held_by.get(id, ()))
            yield from self._held_by.get(id, ())
        elif node is None:
            # An ended task, an idle conversation, or something that upper layers settle.
            if id in others:
                yield from self._kinds.needs(id, tx)
            return
        pending = [id]
        while pending:
            current = pending.pop()
            for child in (
                *self._index.children.get(current, ()),
                *self._staged_children.get(current, ()),
                *own.get(current, ()),
            ):
                found = view.find(child)
                if found is None or found.background:
                    continue
                if found.live:
                    yield child
                else:
                    pending.append(child)

    def _needed_by(self, view: View, id: int, tx: TreeTransaction | None) -> Iterator[int]:
        """What cannot end before `id` has: live tasks, busy conversations, submissions."""
        node = view.task(id)
        if node is not None:
            for owner in view.owners(node):
                if isinstance(owner, Scope):
                    yield owner.id
                elif owner.live:
                    yield owner.id
                    break
            yield from self._kinds.needed_by(node, tx)
        for waiter in (*self._index.waiters.get(id, ()), *self._staged_waiters.get(id, ())):
            parked = view.task(waiter)
            if is_edge(parked) and parked is not None and id in (parked.wait.on or ()):  # type: ignore[union-attr]
                yield waiter
        yield from self._held_on.get(id, ())

    def _path(self, view: View, ids: list[int], tx: TreeTransaction | None) -> str:
        parts: list[str] = []
        for index, id in enumerate(ids):
            node = view.task(id)
            kind = node.kind if node is not None else self.word(view, id, tx)
            parts.append(f"{id} {kind}" if index < len(ids) - 1 else f"{id}")
        return " -> ".join(parts)

    def word(self, view: View, id: int, tx: TreeTransaction | None = None) -> str:
        """What an awaited id is: a task, a conversation, or what else can be waited for."""
        node = view.find(id)
        if node is not None:
            return "conversation" if isinstance(node, Scope) else "task"
        found = self._kinds.look(id, tx)
        return "task" if found is None else found[0]


class _Search:
    """A breadth-first search that can stop after any edge, and knows how it came anywhere."""

    def __init__(self, starts: Sequence[int], edges: Callable[[int], Iterator[int]]) -> None:
        self.pending = deque(dict.fromkeys(starts))
        self.found: int | None = None
        self._came_from: dict[int, int | None] = dict.fromkeys(starts)
        self._edges = edges
        self._open: Iterator[int] | None = None
        self._at = 0

    def step(self, is_goal: Callable[[int], bool]) -> bool:
        """Follow one edge; True if it leads to the goal."""
        if self._open is None:
            self._at = self.pending[0]
            self._open = self._edges(self._at)
        id = next(self._open, None)
        if id is None:
            self._open = None
            self.pending.popleft()
            return False
        if id in self._came_from:
            return False
        self._came_from[id] = self._at
        if is_goal(id):
            self.found = id
            return True
        self.pending.append(id)
        return False

    def path(self, id: int) -> list[int]:
        """The way from a start to `id`."""
        way = [id]
        while (before := self._came_from[way[-1]]) is not None:
            way.append(before)
        way.reverse()
        return way
