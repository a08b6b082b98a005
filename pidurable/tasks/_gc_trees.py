"""Which trees may go: a root task that has ended, with everything below it.

A root is a task that no task owns, in a conversation that no task owns; such a conversation and its
entries stay. A tree may go when every task in it ended before the cutoff and nothing outside needs
it: no live task waits for a task, a conversation or a submission in it, or was woken and has not
gone on since, none of its submissions is open, and no conversation outside was forked from one of
its own. A fork that lies in another tree
that may go is no hindrance: that tree goes before, or with it where each stands on the other. So
the trees are the nodes of a graph (a tree points to those that stand on it), walked depth first
(Tarjan), which gives the groups that go together, those that nothing stands on first.

Everything is read from the storage in small steps, between which the walk may be left for as long
as one likes: a generator yields None after each. It runs in a thread, also beside a holder that is
another process. Ids only grow, so an owner is older than what it owns, and a fork is younger than
its parent: the ids of a group, taken from the greatest down, are an order in which it can go.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Set

import attrs

from pidurable.errors import NotJsonError, StorageCorruptError
from pidurable.records import _codec, _json
from pidurable.records._tasks import Status
from pidurable.session._blobs import is_reference
from pidurable.session._removals import root_of
from pidurable.storage import Storage, TaskRow

PAGE = 200
"""Rows that are read in one step."""
_RANGE_MIN = 256
_RANGE_MAX = 2**20
"""Ids that are looked through for roots in one step."""

LIVE = "live"
RECENT = "recent"
AWAITED = "awaited"
OPEN = "open"
FORKED = "forked"
CHANGED = "changed"

REASONS = {
    LIVE: "work below them is live",
    RECENT: "work below them ended later",
    AWAITED: "a live task waits for something in them",
    OPEN: "a submission in them is not answered yet",
    FORKED: "a conversation was forked from one of theirs, and stays",
    CHANGED: "something was added to them meanwhile",
}
"""Why a tree whose root ended long ago stays."""


@attrs.define(eq=False)
class Tree:
    """A root and what is below it, by id."""

    root: TaskRow
    tasks: array[int] = attrs.Factory(lambda: array("q"))
    """All tasks, the root first; sorted once they are known."""
    conversations: array[int] = attrs.Factory(lambda: array("q"))
    forks: list[int] = attrs.Factory(list)
    """Conversations outside that were forked from one of the tree's own."""

    def has_any(self, ids: Collection[int]) -> bool:
        """Whether any of some ids is a task or a conversation of the tree."""
        return any(_has(self.tasks, id) or _has(self.conversations, id) for id in ids)


def _has(ids: array[int], id: int) -> bool:
    place = bisect_left(ids, id)
    return place < len(ids) and ids[place] == id


@attrs.define(eq=False)
class Group:
    """Trees that go together: nearly always one."""

    trees: list[Tree]
    forks: list[int]
    """Conversations of other trees that were forked from these: they have to be gone before."""


@attrs.define(eq=False)
class _Found:
    """A tree in the walk over those that stand on each other."""

    tree: Tree
    number: int
    low: int
    reason: str | None
    """Why it stays; None as long as nothing speaks for it."""
    counted: bool
    """Whether the walk over all roots has passed it, or will: it is told of once."""
    open: bool = True


class TreeWalk:
    """The walk over all trees of a store whose roots ended before a moment."""

    def __init__(
        self, storage: Storage, *, before_us: int, upto: int, awaited: Set[int], keep: bool
    ) -> None:
        """Begin a walk.

        Args:
            storage: The store; nothing is written to it.
            before_us: What ended before this moment may go.
            upto: No root with a greater id is looked at.
            awaited: What live tasks wait for. May grow meanwhile.
            keep: Roots and their outcomes stay, so one with nothing else is left alone.
        """
        self.kept: dict[str, int] = {}
        """How many trees stay, by reason."""
        self.is_between = True
        """Whether the walk stands between two roots, and knows nothing of any tree but the reasons
        of those that it has passed."""
        self._storage = storage
        self._before_us = before_us
        self._upto = upto
        self._awaited = awaited
        self._keep = keep
        self._at = 0
        """The walk has passed the roots up to here."""
        self._ahead: set[int] = set()
        """Roots beyond it that were told of already, because they stand on others."""

    def groups(self) -> Iterator[Group | None]:
        """Give the groups that may go, each after those that stand on it."""
        width, after = _RANGE_MIN, 0
        while after < self._upto:
            upto = min(after + width, self._upto)
            roots = self._storage.ended_roots(before_us=self._before_us, after=after, upto=upto)
            width = min(width * 4, _RANGE_MAX) if not roots else _RANGE_MIN
            after = upto
            yield None
            owners = set(self._storage.conversation_owners([row.id for row in roots]))
            for row in roots:
                self._at = row.id
                if row.id in self._ahead:
                    self._ahead.discard(row.id)
                else:
                    yield from self._visit(row, owners)
                    self.is_between = True

    # --- trees that stand on each other --------------------------------------------------

    def _visit(self, first: TaskRow, owners: Set[int]) -> Iterator[Group | None]:
        """Walk from one root over all trees that stand on it, and tell of those that are new."""
        self.is_between = False
        known: dict[int, _Found] = {}
        stack: list[_Found] = []
        work: list[tuple[_Found, Iterator[int | None]]] = []

        def enter(row: TaskRow) -> Generator[None, None, None]:
            tree = Tree(row)
            owns = bool(work) or row.id in owners
            reason = yield from self._read(tree, owns_conversations=owns)
            number = len(known)
            counted = row.id >= self._at and row.id not in self._ahead
            found = known[row.id] = _Found(tree, number, number, reason, counted)
            stack.append(found)
            work.append((found, self._successors(found)))

        yield from enter(first)
        while work:
            found, successors = work[-1]
            try:
                root = next(successors)
            except StopIteration:
                work.pop()
                yield from self._leave(found, stack, work[-1][0] if work else None)
                continue
            if root is None:
                # The fork belongs to no tree.
                found.reason = found.reason or FORKED
            elif root not in known:
                row = self._storage.task(root)
                if row is not None:
                    yield from enter(row)
            elif known[root].open:
                found.low = min(found.low, known[root].number)
            elif known[root].reason is not None:
                found.reason = found.reason or FORKED

    def _successors(self, found: _Found) -> Iterator[int | None]:
        """The roots of the trees that stand on one; None for a fork that belongs to no tree."""
        if found.reason is not None:
            return
        for id in found.tree.forks:
            fork = self._storage.conversation(id)
            if fork is None:
                continue
            owner = None if fork.owner is None else self._storage.task(fork.owner)
            yield None if owner is None else root_of(self._storage, owner)

    def _leave(
        self, found: _Found, stack: list[_Found], above: _Found | None
    ) -> Iterator[Group | None]:
        """All that stands on a tree is known."""
        if found.low == found.number:
            members: list[_Found] = []
            while True:
                member = stack.pop()
                member.open = False
                members.append(member)
                if member is found:
                    break
            stays = any(member.reason is not None for member in members)
            for member in members:
                if stays and member.reason is None:
                    member.reason = FORKED
                if member.counted:
                    self._tell(member)
            going = [member.tree for member in members if member.counted and not stays]
            if going:
                inside = {id for tree in going for id in tree.conversations}
                forks = [id for tree in going for id in tree.forks if id not in inside]
                yield Group(going, forks)
        if above is not None:
            above.low = min(above.low, found.low)
            if found.reason is not None and not found.open:
                above.reason = above.reason or FORKED

    def _tell(self, member: _Found) -> None:
        root = member.tree.root
        if root.id > self._at:
            self._ahead.add(root.id)
        # Of others that stand on one nobody has asked.
        is_asked = root.status == Status.TERMINAL and (root.ended_us or 0) < self._before_us
        if member.reason is not None and member.reason != _BARE and is_asked:
            self.kept[member.reason] = self.kept.get(member.reason, 0) + 1

    # --- one tree ------------------------------------------------------------------------

    def _read(self, tree: Tree, *, owns_conversations: bool) -> Generator[None, None, str | None]:
        """Read a tree, or as much of it as says that it stays; return why it does."""
        storage = self._storage
        reason = self._reason(tree.root)
        if reason is not None:
            return reason
        tree.tasks.append(tree.root.id)
        # Tasks whose own tasks, and then conversations, are to be read.
        below_root: list[int] = [tree.root.id]
        owners: list[int] = [tree.root.id] if owns_conversations else []
        while below_root or owners:
            if below_root:
                owner = below_root.pop()
                found = yield from self._tasks_of(tree, storage.tasks_by_owner, owner)
                if isinstance(found, str):
                    return found
                below_root += found
                owners += found
                continue
            some, owners = owners[-PAGE:], owners[:-PAGE]
            for owner in storage.conversation_owners(some):
                found = yield from self._conversations_of(tree, owner)
                if isinstance(found, str):
                    return found
                owners += found
            yield None
        tree.tasks = array("q", sorted(tree.tasks))
        tree.conversations = array("q", sorted(tree.conversations))
        tree.forks = [id for id in tree.forks if not _has(tree.conversations, id)]
        is_alone = len(tree.tasks) == 1 and not tree.conversations
        if self._keep and is_alone and storage.task_input(tree.root.id) is None:
            return _BARE
        return None

    def _reason(self, row: TaskRow) -> str | None:
        if row.status != Status.TERMINAL:
            return LIVE
        if row.ended_us is None or row.ended_us >= self._before_us:
            return RECENT
        return AWAITED if row.id in self._awaited else None

    def _tasks_of(
        self, tree: Tree, read: Callable[..., list[TaskRow]], of: int
    ) -> Generator[None, None, str | list[int]]:
        """Add tasks of an owner, or of a conversation; return their ids, or why the tree stays."""
        ids: list[int] = []
        while True:
            rows = read(of, after=ids[-1] if ids else 0, limit=PAGE)
            for row in rows:
                reason = self._reason(row)
                if reason is not None:
                    return reason
                ids.append(row.id)
            if len(rows) < PAGE:
                tree.tasks.extend(ids)
                return ids
            yield None

    def _conversations_of(self, tree: Tree, owner: int) -> Generator[None, None, str | list[int]]:
        """Add the conversations of a task; return the tasks in them, or why the tree stays."""
        storage = self._storage
        tasks: list[int] = []
        after = 0
        while True:
            rows = storage.conversations_by_owner(owner, after=after, limit=PAGE)
            for row in rows:
                if row.id in self._awaited:
                    return AWAITED
                tree.conversations.append(row.id)
                reason = yield from self._look_into(tree, row.id)
                if reason is not None:
                    return reason
                found = yield from self._tasks_of(
                    tree, lambda id, **page: storage.tasks(conversation=id, **page), row.id
                )
                if isinstance(found, str):
                    return found
                tasks += found
            if len(rows) < PAGE:
                return tasks
            after = rows[-1].id

    def _look_into(self, tree: Tree, conversation: int) -> Generator[None, None, str | None]:
        """Look at the submissions and the forks of a conversation; return why the tree stays."""
        storage = self._storage
        after = 0
        while True:
            rows = storage.submissions_of(conversation, after=after, limit=PAGE)
            for row in rows:
                if row.status in ("queued", "placed"):
                    return OPEN
                if row.id in self._awaited:
                    return AWAITED
            yield None
            if len(rows) < PAGE:
                break
            after = rows[-1].id
        after = 0
        while True:
            forks = storage.forks_of(conversation, after=after, limit=PAGE)
            tree.forks += forks
            if len(forks) < PAGE:
                return None
            yield None
            after = forks[-1]


_BARE = "bare"
"""A root of which nothing but its outcome is left: it neither goes nor counts."""


def read_awaited(storage: Storage) -> Iterator[Iterable[int] | None]:
    """Give what live tasks wait for, and what those that were woken may be about to look at."""
    after = 0
    while True:
        rows = storage.waits(after=after, limit=PAGE)
        for task, text in rows:
            try:
                wait = _codec.decode_wait(_json.loads_stored(text))
            except NotJsonError as error:
                # What it needs is not known, so nothing can be removed.
                raise StorageCorruptError(
                    storage.store, f"what task {task} waits for cannot be read: {error}"
                ) from error
            if wait.on:
                yield wait.on
        yield None
        if len(rows) < PAGE:
            break
        after = rows[-1][0]
    yield from _read_woken(storage)


def _read_woken(storage: Storage) -> Iterator[Iterable[int] | None]:
    """Give what may be the ids of what woken tasks have waited for, until they make progress.

    Their waits are over and nowhere any more; that they were woken for an id they know from what
    they have stored themselves. A number that is none only keeps a tree a while longer.
    """
    after = 0
    while rows := storage.live_tasks(after=after, limit=PAGE):
        for row in rows:
            if row.woken_by is not None:
                checkpoint = storage.task_checkpoint(row.id)
                texts = [storage.task_input(row.id), None if checkpoint is None else checkpoint[1]]
                texts += [text for _, text in storage.task_memos(row.id)]
                for text in texts:
                    yield _numbers_in(storage, row.id, text)
        yield None
        after = rows[-1].id


def _numbers_in(storage: Storage, task: int, text: str | None) -> list[int]:
    if text is not None and is_reference(text):
        data = storage.blob(text[1:])
        text = None if data is None else data.decode(errors="replace")
    if text is None:
        return []
    try:
        rest = [_json.loads_stored(text)]
    except NotJsonError as error:
        problem = f"what task {task} was woken for cannot be read: {error}"
        raise StorageCorruptError(storage.store, problem) from error
    found: list[int] = []
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            found += [int(key) for key in value if key.isdecimal() and len(key) < 20]
            rest += value.values()
        elif isinstance(value, list):
            rest += value
        elif type(value) is int:
            found.append(value)
    return found


def tree_below(storage: Storage, root: TaskRow) -> Iterator[Tree | None]:
    """Read what is left of a tree that is being removed, whatever speaks for it now."""
    walk = TreeWalk(storage, before_us=2**63 - 1, upto=0, awaited=frozenset(), keep=False)
    tree = Tree(root)
    yield from walk._read(tree, owns_conversations=True)
    yield tree
