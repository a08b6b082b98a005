"""The live tree as counts, and the part of it that fits a screen.

Live tasks are known by an outline; conversations and ended owners between them are looked up as far
as they are needed to hang what lives where it belongs. An owner is always older than what it owns,
so ids in falling order visit what is below before what is above, without recursion.

What to show is chosen greedily: the best child of everything that is shown is taken before a second
one, and what is blocked or being aborted before all others. A line more is used where only some
children of an owner are shown, for the count of the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import attrs

from pidurable.records._tasks import Status
from pidurable.storage import ConversationRow, TaskRow

__all__ = ["Chosen", "Counts", "Forest"]

_BLOCKED, _ABORTING, _ENDED = 4, 5, 6
"""States behind the four of live tasks, whose numbers are those of `Status`."""
_NOTHING = (0,) * 7
_TOPS = 0
"""Stands above what has no owner. No id is 0."""
_MIXTURE = (0, 2, 0, 1, 0, 2)
"""Turns of the sorts behind the first one: what runs, is ready, or waits and completes."""
_DULL = 3
"""The sort of what only waits, or completes."""
_DULL_WEIGHT = 4


@final
@attrs.frozen(kw_only=True)
class Counts:
    """How many live tasks are in which state; each is in one."""

    ready: int = 0
    running: int = 0
    waiting: int = 0
    completing: int = 0
    blocked: int = 0
    aborting: int = 0

    @property
    def live(self) -> int:
        """All of them."""
        return sum(attrs.astuple(self))


@final
@attrs.frozen(kw_only=True)
class Chosen:
    """One line: a task or conversation, or what is left out below the one above it."""

    id: int | None
    """None for a line that only counts."""
    depth: int
    hidden: Counts | None = None
    """The live tasks that are left out; on the owner's own line where none of its are shown."""


@final
class Forest:
    """The live tree, planted anew after each change."""

    def __init__(
        self,
        conversation: Callable[[int], ConversationRow | None],
        task: Callable[[int], TaskRow | None],
    ) -> None:
        self._read_conversation = conversation
        self._read_task = task
        self.conversations: dict[int, ConversationRow] = {}
        self.state: dict[int, int] = {}
        """By task."""
        self._ended: dict[int, TaskRow] = {}
        """Ended tasks above live ones: they never change, so they are read once."""
        self._above: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}
        self._totals: dict[int, list[int]] = {}
        """By what has anything below: how many tasks of each state are there, itself included."""

    def plant(self, outline: Iterable[Sequence[int]], extra: Iterable[TaskRow]) -> None:
        """Build the tree.

        Args:
            outline: (id, conversation, owner, status, blocked, marked) of live tasks.
            extra: Other tasks to show.
        """
        conversations, ended = self.conversations, self._ended
        self.conversations, self._ended = {}, {}
        self.state, self._above = {}, {}
        wanted: list[tuple[int, bool]] = []
        for id, conversation, owner, status, blocked, marked in outline:
            self.state[id] = _BLOCKED if blocked else _ABORTING if marked else status
            self._above[id] = owner or conversation
            wanted.append((owner or conversation, not owner))
        for row in extra:
            if row.id not in self.state:
                wanted.append(self._add(row))
        while wanted:
            id, is_conversation = wanted.pop()
            if id in self._above:
                continue
            if is_conversation:
                found = conversations.get(id) or self._read_conversation(id)
                self._above[id] = _TOPS
                if found is not None:
                    self.conversations[id] = found
                    if found.owner is not None:
                        self._above[id] = found.owner
                        wanted.append((found.owner, False))
                continue
            task = ended.get(id) or self._read_task(id)
            if task is None:
                self._above[id] = _TOPS
            else:
                wanted.append(self._add(task))
        self._count()

    def _add(self, row: TaskRow) -> tuple[int, bool]:
        """Add a task that is not in the outline; returns what is above it."""
        if row.status == Status.TERMINAL:
            self.state[row.id] = _ENDED
            self._ended[row.id] = row
        else:
            marked = _ABORTING if row.abort_us is not None else row.status
            self.state[row.id] = _BLOCKED if row.blocked is not None else marked
        above = row.conversation if row.owner is None else row.owner
        self._above[row.id] = above
        return above, row.owner is None

    def _count(self) -> None:
        self._children = {_TOPS: []}
        totals: dict[int, list[int]] = {}
        state = self.state
        for id in sorted(self._above, reverse=True):
            own = totals.get(id)
            mine = state.get(id)
            if own is not None and mine is not None:
                own[mine] += 1
            above = self._above[id]
            self._children.setdefault(above, []).append(id)
            there = totals.get(above)
            if there is None:
                there = totals[above] = [0] * 7
            if own is not None:
                for index in range(7):
                    there[index] += own[index]
            elif mine is not None:
                there[mine] += 1
        self._totals = totals

    def __contains__(self, id: int) -> bool:
        return id in self._above

    def counts(self, id: int = _TOPS) -> Counts:
        """How many live tasks are at or below a task or conversation; of everything by default."""
        return _counts(self._total(id))

    def _total(self, id: int) -> Sequence[int]:
        total = self._totals.get(id)
        if total is not None:
            return total
        mine = self.state.get(id)
        return _NOTHING if mine is None else _ONE[mine]

    # --- choosing ------------------------------------------------------------------------

    def choose(self, *, lines_max: int, depth_max: int, root: int | None = None) -> list[Chosen]:
        """The most telling lines that fit, in the order of the tree.

        Args:
            lines_max: Most lines.
            depth_max: Nothing deeper is shown.
            root: Begin with this task or conversation; with everything that has no owner if None.
        """
        tops = self._best(_TOPS, lines_max) if root is None else [root]
        total = len(self._children[_TOPS]) if root is None else 1
        shown: dict[int, list[int]] = {_TOPS: []}
        sizes = {_TOPS: total}
        best = {_TOPS: tops}
        used = 0
        waiting: list[tuple[int, int, int, int, int]] = []

        def offer(above: int, index: int, depth: int, weight: int) -> None:
            if index < len(best[above]):
                id = best[above][index]
                heapq.heappush(waiting, (weight + self._weight(id), id, depth, above, index))

        offer(_TOPS, 0, 0, 0)
        while waiting:
            weight, id, depth, above, index = heapq.heappop(waiting)
            left = sizes[above] - len(shown[above]) - 1
            # The line that counts the others comes with the first, and goes with the last.
            cost = 1 + (left > 0 and not shown[above]) - (left == 0 and bool(shown[above]))
            if used + cost > lines_max:
                continue
            used += cost
            shown[above].append(id)
            offer(above, index + 1, depth, weight)
            if depth < depth_max and id in self._children:
                best[id] = self._best(id, lines_max)
                sizes[id] = len(self._children[id])
                shown[id] = []
                offer(id, 0, depth + 1, weight)
        return list(self._lines(shown, sizes[_TOPS]))

    def _weight(self, id: int) -> int:
        """How much less telling one is than the one before it: its owner, or its elder sibling."""
        rank = _rank(self._total(id))
        if rank == 0:
            return 0
        return _DULL_WEIGHT if rank == _DULL and id not in self._children else 1

    def _best(self, above: int, most: int) -> list[int]:
        """The children that tell most, best first: what needs a look, then a mixture.

        Of each sort the largest branches come first. What runs gets half of the places, so that a
        wide fan-out hides neither what is beside it nor what waits to run.
        """
        sorts: list[list[int]] = [[], [], [], []]
        for id in self._children[above]:
            sorts[_rank(self._total(id))].append(id)

        def key(id: int) -> tuple[int, int]:
            return -sum(self._total(id)).bit_length(), id

        chosen, *others = (heapq.nsmallest(most, ids, key=key) for ids in sorts)
        queues = [iter(ids) for ids in others]
        while len(chosen) < most:
            turns = (next(queues[number], None) for number in _MIXTURE)
            found = [id for id in turns if id is not None]
            if not found:
                break
            chosen += found
        return chosen

    def _lines(self, shown: dict[int, list[int]], tops: int) -> Iterator[Chosen]:
        """Put what was chosen in order; iterative, however deep."""
        stack: list[Chosen] = self._level(_TOPS, 0, shown, tops)
        while stack:
            line = stack.pop()
            if line.id is None:
                yield line
                continue
            children = self._children.get(line.id, ())
            mine = shown.get(line.id)
            if mine:
                yield line
                stack += self._level(line.id, line.depth + 1, shown, len(children))
            else:
                yield attrs.evolve(line, hidden=self._hidden(line.id, ()) if children else None)

    def _level(
        self, above: int, depth: int, shown: dict[int, list[int]], children: int
    ) -> list[Chosen]:
        """The lines directly below one, the last first."""
        ids = sorted(shown[above], reverse=True)
        lines = [Chosen(id=id, depth=depth) for id in ids]
        if len(ids) < children:
            lines.insert(0, Chosen(id=None, depth=depth, hidden=self._hidden(above, ids)))
        return lines

    def _hidden(self, above: int, shown: Iterable[int]) -> Counts:
        left = list(self._total(above))
        mine = self.state.get(above)
        if mine is not None:
            left[mine] -= 1
        for id in shown:
            for index, number in enumerate(self._total(id)):
                left[index] -= number
        return _counts(left)


_ONE = tuple(tuple(int(index == state) for index in range(7)) for state in range(7))


def _counts(total: Sequence[int]) -> Counts:
    ready, running, waiting, completing, blocked, aborting, _ = total
    return Counts(
        ready=ready,
        running=running,
        waiting=waiting,
        completing=completing,
        blocked=blocked,
        aborting=aborting,
    )


def _rank(total: Sequence[int]) -> int:
    """What is worth a person's look comes first."""
    ready, running, _, _, blocked, aborting, ended = total
    if blocked or aborting:
        return 0
    if running:
        return 1
    return 2 if ready or ended else _DULL
