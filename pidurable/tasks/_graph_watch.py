"""Watches of the task graph: what a commit changed of the tree becomes one frame.

A graph that is watched is a participant of the line, from its first watcher to its last; one that
nobody watches does not exist. It takes what changed from the rows of the commit and from the nodes
that the commit has published, so a commit costs what it changed, however much is live. Holds after
every commit, but for the last point after every batch, which is the least that is ever durable:

* the tasks shown are those of the lowest ids among the live ones below the root, as many as the
  limit allows, and the others are counted;
* what is below the root never changes: owners do not change, and ids only grow, so a new task goes
  behind all others, and is shown at once only where nothing is left out;
* a place that is free while something is left out is given by the last commit of its batch, when
  the storage holds what is published and nothing else. Only then is anything read: the phases of
  those that come in, and what they own. Where the storage cannot be read they are left out until
  it can.

The beginning is read in a body that holds the line and writes nothing, in a thread: for all tasks
as much as the limit allows, below a root every live task there besides (in memory). Measured on
SQLite: 10 ms at a limit of 1,000, 0.15 s at 10,000; below a root 0.5 us more for each task there. A
commit that changes one task takes 15 us longer, 0.2 ms where it frees a place that is filled.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs

from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    PidurableError,
    show,
)
from pidurable.records._checks import is_id
from pidurable.session._document_watch import at_one_point
from pidurable.session._radix import RadixMap
from pidurable.session._seams import logger
from pidurable.session._watch import Hub, Watch
from pidurable.storage import ConversationRow, Op, TaskStateRow
from pidurable.tasks._graph import (
    GraphConversation,
    GraphTask,
    TaskGraph,
    graph_json,
    graph_patch,
    graph_task,
)
from pidurable.tasks._graph_places import Places
from pidurable.tasks._tree import TERMINAL, AnyNode, Node
from pidurable.tasks._tree_transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.records._entries import Conversation
    from pidurable.tasks._runtime import Runtime

LIMIT_MAX = 10_000
OWNED_SHOWN_MAX = 100
"""Conversations of one task that are shown though nothing shown lives there: the first ones."""
_GAPS_MAX = 1_000
"""So many gaps may be among those that are left out, besides as many as are left."""
_INSIDE_KEPT = 100_000
"""Beyond it what was found to be below the root, or not, is forgotten, and found again."""


@attrs.define(eq=False)
class _Told:
    """What the rows of one commit say."""

    touched: dict[int, None] = attrs.Factory(dict)
    """Live tasks that may have changed."""
    created: dict[int, None] = attrs.Factory(dict)
    ended: list[int] = attrs.Factory(list)
    phases: dict[int, str] = attrs.Factory(dict)

    @classmethod
    def of(cls, tx: TreeTransaction) -> _Told:
        told = cls()
        for op, row in tx.writes:
            if op is Op.TASK_STATE:
                assert isinstance(row, TaskStateRow)
                if row.status == TERMINAL:
                    told.ended.append(row.id)
                else:
                    told.touched[row.id] = None
            elif op is Op.CHECKPOINT:
                told.phases[row[0]] = row[1]
                told.touched[row[0]] = None
            elif op is Op.TASK:
                told.created[row[0]] = None
        return told


class FollowedGraph:
    """The graph below one root with one limit, for as long as somebody watches it."""

    def __init__(self, runtime: Runtime, *, root: int | None, limit: int) -> None:
        self._runtime = runtime
        self._root = root
        self._limit = limit
        self._tasks: RadixMap[GraphTask] = RadixMap()
        self._conversations: RadixMap[GraphConversation] = RadixMap()
        self._upto = 0
        """Of all live tasks, those up to this id are shown."""
        self._left_out = 0
        self._left: dict[int, None] = {}
        """Below a root: the live tasks that are left out, by id. Of all tasks the storage tells."""
        self._gaps = 0
        """How many were taken out of `_left` since it was made: walking it passes over them."""
        self._owned: dict[int, list[int]] = {}
        """By shown task: the first conversations that it owns."""
        self._inside: dict[int, bool] = {}
        """Of some nodes: whether they are below the root."""
        self._changes: dict[int, GraphTask | None] = {}
        """What was changed since the last graph."""
        self._places: Places
        self._refused = False
        """Whether the storage could not be read when it was needed last."""
        self.is_over = False
        """Whether the root is a task that has ended."""
        self.hub: Hub[TaskGraph]

    # --- the beginning -------------------------------------------------------------------

    def read(self) -> TaskGraph:
        """The graph as published. In a body that holds the line; may run in a thread.

        Raises:
            NotFoundError: There is no such task or conversation.
        """
        root, storage = self._root, self._runtime.session.storage
        ids: list[int] = []
        if root is None:
            self._places = Places(top=None)
            ids = [row.id for row in storage.live_tasks(limit=self._limit)]
            self._left_out = self._runtime.index.live - len(ids)
        else:
            task = storage.task(root)
            if task is None and storage.conversation(root) is None:
                raise NotFoundError("task or conversation", root)
            top = root if task is None else task.conversation
            self._places = Places(top=top)
            self.is_over = task is not None and task.status == TERMINAL
            if not self.is_over:
                self._places.look_up(top, self._reader(self._conversation_in_store))
                self._places.hold(top)
                below = self._live_below(root)
                ids = below[: self._limit]
                self._left = dict.fromkeys(below[self._limit :])
                self._left_out = len(self._left)
        self._enter(ids, {}, self._conversation_in_store)
        return self._next_graph(TaskGraph(root=root))

    def _live_below(self, root: int) -> list[int]:
        """Every live task at or below the root, by id. Walks them all."""
        nodes, children = self._runtime.published.nodes, self._runtime.index.children
        found: list[int] = []
        pending: list[Iterable[int]] = [(root,)]
        while pending:
            for id in pending.pop():
                node = nodes.get(id)
                if isinstance(node, Node) and node.live:
                    found.append(id)
                below = children.get(id)
                if below is not None:
                    pending.append(below)
        found.sort()
        return found

    # --- a commit ------------------------------------------------------------------------

    def committed(self, tx: TreeTransaction) -> None:
        """A commit is published, in the tree too: give the frame of what it changed, if any."""
        told = _Told.of(tx)
        before = self.hub.value
        if self._root is not None and self._root in told.ended:
            self.is_over = True
            after = TaskGraph(root=self._root)
        else:
            self._follow(tx, told)
            after = self._next_graph(before)
        if after is not before:
            self.hub.publish(tx.seq, after, lambda: graph_patch(before, after))
        if self.is_over:
            self.hub.end()

    def _follow(self, tx: TreeTransaction, told: _Told) -> None:
        session, published = self._runtime.session, self._runtime.published
        for id in told.ended:
            if id not in told.created:
                self._end(id)
        for id in told.touched:
            shown = self._tasks.get(id)
            if shown is None or id in self._changes:
                continue
            node = published.task(id)
            if node is not None:
                new = graph_task(node, told.phases.get(id, shown.phase))
                if new != shown:
                    self._changes[id] = new
        if told.created:
            self._create(told)
        for made in tx.conversations:
            owner = None if made.owner not in self._owned else published.task(made.owner)
            if owner is not None:
                self._own(owner, made)
        room = self._limit - len(self._owned)
        if self._left_out and room > 0 and tx.seq == session.line.published_seq:
            self._fill(room)

    def _end(self, id: int) -> None:
        """A task has ended: the graph loses it, or one of those that it leaves out."""
        shown = self._tasks.get(id)
        if shown is not None:
            self._changes[id] = None
            self._places.release(shown.conversation_id)
            for conversation in self._owned.pop(id):
                self._places.release(conversation)
        elif self._root is None:
            self._left_out -= 1
        elif id in self._left:
            self._take_out(id)

    def _take_out(self, id: int) -> None:
        """Below a root: a task is left out no more."""
        del self._left[id]
        self._left_out -= 1
        self._gaps += 1
        if self._gaps > len(self._left) + _GAPS_MAX:
            self._left, self._gaps = dict(self._left), 0

    def _create(self, told: _Told) -> None:
        """Show new tasks as far as there is room and nothing older is left out."""
        created = [id for id in told.created if self._is_live(id)]
        if self._root is not None:
            nodes = self._runtime.published.nodes
            created = [id for id in created if self._is_inside(nodes[id])]
        if not self._left_out:
            self._try_to_enter(created[: self._limit - len(self._owned)], told.phases)
        behind = [id for id in created if id > self._upto]
        self._left_out += len(behind)
        if self._root is not None:
            self._left.update(dict.fromkeys(behind))

    def _fill(self, room: int) -> None:
        """Give the free places to the oldest of those that are left out."""
        if self._root is not None:
            ids = list(itertools.islice(self._left, room))
            self._try_to_enter(ids, {})
            for id in ids:
                if id <= self._upto:
                    self._take_out(id)
            return
        try:
            rows = self._runtime.session.storage.live_tasks(after=self._upto, limit=room)
        except PidurableError as error:
            self._report(error)
            return
        ids = [row.id for row in rows]
        self._try_to_enter(ids, {})
        self._left_out -= sum(id <= self._upto for id in ids)

    def _is_live(self, id: int) -> bool:
        node = self._runtime.published.task(id)
        return node is not None and node.live

    def _is_inside(self, node: AnyNode) -> bool:
        """Whether a node is at or below the root; known at once for what is below a known one."""
        if self._root is None:
            return True
        passed: list[int] = []
        at: AnyNode | None = node
        found: bool | None = False
        while at is not None:
            found = True if at.id == self._root else self._inside.get(at.id)
            if found is not None:
                break
            passed.append(at.id)
            at, found = self._runtime.published.find_above(at), False
        if len(self._inside) > _INSIDE_KEPT:
            self._inside.clear()
        self._inside.update((id, bool(found)) for id in passed)
        return bool(found)

    # --- who comes in --------------------------------------------------------------------

    def _try_to_enter(self, ids: Sequence[int], phases: dict[int, str]) -> None:
        """Show some live tasks, the oldest first: all, or those before one that is unreadable."""
        try:
            self._enter(ids, phases, self._runtime.session.conversation)
        except PidurableError as error:
            self._report(error)
        else:
            self._refused = False

    def _report(self, error: PidurableError) -> None:
        if not self._refused:
            self._refused = True
            logger.warning("a watched task graph leaves out what it could not read: %s", error)

    def _enter(
        self,
        ids: Sequence[int],
        phases: dict[int, str],
        conversation: Callable[[int], ConversationRow | Conversation],
    ) -> None:
        """Show some live tasks, the oldest first.

        Args:
            ids: Published tasks.
            phases: Of those that this commit has created: nothing has to be read of them.
            conversation: Gives the record of a conversation.

        Raises:
            StorageAccessError: Those that are not behind `_upto` by now could not be read.
        """
        storage, published = self._runtime.session.storage, self._runtime.published
        owned: dict[int, list[ConversationRow]] = {}
        old = [id for id in ids if id not in phases]
        if old:
            phases = {**phases, **dict(storage.task_phases(old))}
            for id in storage.conversation_owners(old):
                owned[id] = storage.conversations_by_owner(id, limit=OWNED_SHOWN_MAX)
        read = self._reader(conversation)
        for id in ids:
            node = published.task(id)
            assert node is not None
            self._places.look_up(node.conversation, read)
            self._places.hold(node.conversation)
            self._owned[id] = []
            for each in owned.get(id, ()):
                self._own(node, each)
            self._changes[id] = graph_task(node, phases.get(id))
            self._upto = id

    def _own(self, owner: Node, made: ConversationRow | Conversation) -> None:
        """A shown task owns a conversation."""
        mine = self._owned[owner.id]
        if len(mine) < OWNED_SHOWN_MAX:
            mine.append(made.id)
            self._places.know(_shown(made, owner.conversation))
            self._places.hold(made.id)

    def _reader(
        self, conversation: Callable[[int], ConversationRow | Conversation]
    ) -> Callable[[int], GraphConversation]:
        def read(id: int) -> GraphConversation:
            record = conversation(id)
            return _shown(record, self._home_of(record.owner))

        return read

    def _home_of(self, task: int | None) -> int | None:
        """The conversation that a task lives in, also of an ended one."""
        if task is None:
            return None
        node = self._runtime.published.task(task)
        if node is not None:
            return node.conversation
        row = self._runtime.session.storage.task(task)
        return None if row is None else row.conversation

    def _conversation_in_store(self, id: int) -> ConversationRow:
        """For threads, which must leave the session's own records alone."""
        row = self._runtime.session.storage.conversation(id)
        if row is None:
            raise NotFoundError("conversation", id)
        return row

    def _next_graph(self, before: TaskGraph) -> TaskGraph:
        """The graph with everything that has changed; the one before where nothing has."""
        changes, self._changes = self._changes, {}
        moved, self._places.changes = self._places.changes, {}
        if not changes and not moved and self._left_out == before.left_out:
            return before
        self._tasks = self._tasks.changed(changes)
        self._conversations = self._conversations.changed(moved)
        return TaskGraph(
            root=self._root,
            tasks=self._tasks,
            conversations=self._conversations,
            left_out=self._left_out,
        )


def _shown(record: ConversationRow | Conversation, home: int | None) -> GraphConversation:
    return GraphConversation(
        id=record.id, owner=record.owner, owner_conversation_id=home, key=record.key
    )


class TaskGraphs:
    """The graphs of one runtime that are watched."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.followed: dict[tuple[int | None, int], FollowedGraph] = {}
        """By root and limit. Empty where nobody watches."""
        runtime.session.watch_ends.append(self._end)

    @asynccontextmanager
    async def watch(self, root: int | None, limit: int) -> AsyncIterator[Watch[TaskGraph]]:
        """Watch the graph below a root; see `Harness.watch_tasks`."""
        if root is not None and not is_id(root):
            raise NotFoundError("task or conversation", show(root))
        if type(limit) is not int or not 0 < limit <= LIMIT_MAX:
            raise InvalidArgumentError("limit", f"expected 1 to {LIMIT_MAX:,}", show(limit))
        watch = await self._join(root, limit)
        try:
            yield watch
        finally:
            watch._leave()

    async def _join(self, root: int | None, limit: int) -> Watch[TaskGraph]:
        """Register with what is published, at one point of the line."""
        session, key = self._runtime.session, (root, limit)
        made: FollowedGraph | None = None

        async def load() -> None:
            nonlocal made
            made = await self._begin(root, limit)

        def join() -> Watch[TaskGraph]:
            followed = self.followed.get(key) or made
            assert followed is not None
            watch = followed.hub.join(session.line.published_seq)
            if followed.is_over:
                followed.hub.end()
            else:
                self.followed[key] = followed
            return watch

        return await at_one_point(
            session, is_ready=lambda: key in self.followed, load=load, join=join
        )

    async def _begin(self, root: int | None, limit: int) -> FollowedGraph:
        session = self._runtime.session
        followed = FollowedGraph(self._runtime, root=root, limit=limit)
        value = await session.blocking.run(followed.read)
        followed.hub = Hub(
            value,
            seq=session.line.published_seq,
            to_json=graph_json,
            on_empty=lambda _: self._forget((root, limit), followed),
        )
        return followed

    def _forget(self, key: tuple[int | None, int], followed: FollowedGraph) -> None:
        # One whose root has ended is not here any more.
        if self.followed.get(key) is followed:
            del self.followed[key]

    def committed(self, tx: TreeTransaction) -> None:
        """A commit is published, in the tree too."""
        for key, followed in list(self.followed.items()):
            followed.committed(tx)
            if tx.removal is not None and key[0] in tx.removal.conversations:
                # Nothing will ever be below it again.
                followed.hub.end()
                self._forget(key, followed)
            elif followed.is_over:
                self._forget(key, followed)

    def _end(self, error: PidurableError | None) -> None:
        """End every watch: the session is closed, or serves nothing more."""
        ended, self.followed = self.followed, {}
        for followed in ended.values():
            followed.hub.end(error)


__all__ = ["LIMIT_MAX", "FollowedGraph", "TaskGraphs"]
