"""A picture of the live tree that fits a screen, taken again and again at a bounded cost.

Nothing is read while nothing was committed: the number of the last commit says so. After a commit
an outline of the live tasks is read (six small values each, since no index leads from an owner to
what it owns), and put into a tree with counts. Of that, the most telling part that fits is chosen,
and only its rows are read whole.

* At most `2 * OUTLINE_MAX` live tasks are looked at: the oldest, which own the others, and the
  newest. All are counted.
* Outlines take at most `OUTLINE_SHARE` of the time, however large the session is: a later one
  waits.
* What has ended while it was shown stays for a moment, so that a person sees how it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

import attrs

from pidurable.harness._forest import Chosen, Counts, Forest
from pidurable.harness._reader import HolderView, Reader
from pidurable.records import _json
from pidurable.records._tasks import Status, Wait
from pidurable.storage import ConversationRow, TaskRow
from pidurable.tasks._explain import wait_of

__all__ = ["Picture", "ShownTask", "TreeLine", "TreeWatch"]

OUTLINE_MAX = 10_000
OUTLINE_SHARE = 0.04
HOLDER_SECONDS = 5.0
"""Asking who holds the store tries its lock, so it is not asked at each look."""
LINGER_SECONDS = 3.0
LINGERING_MAX = 20
AWAITED_MAX = 1_000
"""Awaited tasks of one wait that are counted."""


@final
@attrs.frozen(kw_only=True)
class ShownTask:
    """A task of the picture, with what a line says of it."""

    row: TaskRow
    phase: str | None
    progress_us: int | None
    """When its checkpoint was last stored."""
    wait: Wait | None
    still_open: int | None
    """Of a wait for others: how many are live tasks; None if it waits for none, or too many."""
    about: str
    """What the call of a tool, or the turn of a run, is about."""


@final
@attrs.frozen(kw_only=True)
class TreeLine:
    """A line of the picture: a task, a conversation, or a count of what is left out."""

    depth: int
    task: ShownTask | None = None
    conversation: ConversationRow | None = None
    hidden: Counts | None = None
    """What is below and not shown; alone on a line where some of it is shown."""


@final
@attrs.frozen(kw_only=True)
class Picture:
    """What there is to show at one moment."""

    seq: int
    """The number of the last commit that is seen."""
    epoch: int
    """Which holder made it, counted from the first one."""
    changed: bool
    """Whether anything but the time has moved since the last picture."""
    holder: HolderView | None
    counts: Counts
    """Of all live tasks, or of those below the root."""
    partial: bool
    """Whether there are more live tasks than were looked at."""
    lines: tuple[TreeLine, ...]


@final
class TreeWatch:
    """Looks at one store again and again. For one user at a time."""

    def __init__(
        self,
        reader: Reader,
        *,
        root: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._storage = reader._storage
        self._root = root
        self._monotonic = monotonic
        self._forest = Forest(self._storage.conversation, self._storage.task)
        self._seq = self._epoch = -1
        self._size = (0, 0)
        self._holder: HolderView | None = None
        self._holder_again = self._outline_again = 0.0
        self._counts = Counts()
        self._partial = False
        self._lines: tuple[TreeLine, ...] = ()
        self._live: set[int] = set()
        self._lingering: dict[int, float] = {}
        self._abouts: dict[int, str] = {}

    async def look(self, *, lines_max: int, depth_max: int) -> Picture:
        """Take a picture of at most so many lines, and so deep.

        Raises:
            NotFoundError: The root is no task and no conversation of this session.
        """
        if self._root is not None and self._seq < 0:
            # What is unknown is refused before anything is drawn.
            await self._reader.tree(self._root, limit=1)
        now = self._monotonic()
        head = await self._reader.head()
        changed = self._size != (lines_max, depth_max)
        self._size = (lines_max, depth_max)
        if head.epoch != self._epoch or now >= self._holder_again:
            before, self._holder = self._holder, await self._reader.holder()
            self._holder_again = now + HOLDER_SECONDS
            self._epoch = head.epoch
            changed = changed or _state(before) != _state(self._holder)
        over = [id for id, until in self._lingering.items() if until <= now]
        if over or (head.seq != self._seq and now >= self._outline_again):
            for id in over:
                del self._lingering[id]
            await self._reader._read("the task tree", self._plant)
            self._seq = head.seq
            changed = True
        if changed:
            self._lines = await self._reader._read("the task tree", self._choose)
        return Picture(
            seq=self._seq,
            epoch=self._epoch,
            changed=changed,
            holder=self._holder,
            counts=self._counts,
            partial=self._partial,
            lines=self._lines,
        )

    # --- in a thread ---------------------------------------------------------------------

    def _plant(self) -> None:
        begun = self._monotonic()
        outline = self._storage.outline(limit=OUTLINE_MAX)
        if len(outline) == OUTLINE_MAX:
            newest = self._storage.outline(reverse=True, limit=OUTLINE_MAX)
            last = outline[-1][0]
            self._partial = newest[-1][0] > last + 1
            outline += [row for row in newest if row[0] > last]
        else:
            self._partial = False
        self._live = {row[0] for row in outline}
        extra = self._just_ended(begun)
        if self._root is not None and self._root not in self._live:
            root = self._storage.task(self._root)
            extra += [] if root is None else [root]
        self._forest.plant(outline, extra)
        if self._root is not None:
            self._counts = self._forest.counts(self._root)
        elif self._partial:
            _, blocked, aborting, ready, running, waiting, completing = self._storage.live_counts()
            self._counts = Counts(
                ready=ready,
                running=running,
                waiting=waiting,
                completing=completing,
                blocked=blocked,
                aborting=aborting,
            )
        else:
            self._counts = self._forest.counts()
        ended = self._monotonic()
        self._outline_again = ended + (ended - begun) * (1 / OUTLINE_SHARE - 1)

    def _just_ended(self, now: float) -> list[TaskRow]:
        """What was shown alive and has ended, and stays for a moment."""
        for line in self._lines:
            if (
                line.task is not None
                and line.task.row.status != Status.TERMINAL
                and line.task.row.id not in self._live
                and len(self._lingering) < LINGERING_MAX
            ):
                self._lingering.setdefault(line.task.row.id, now + LINGER_SECONDS)
        rows = (self._storage.task(id) for id in self._lingering)
        return [row for row in rows if row is not None and row.status == Status.TERMINAL]

    def _choose(self) -> tuple[TreeLine, ...]:
        lines_max, depth_max = self._size
        if self._root is not None and self._root not in self._forest:
            conversation = self._storage.conversation(self._root)
            return (TreeLine(depth=0, conversation=conversation),)
        chosen = self._forest.choose(lines_max=lines_max, depth_max=depth_max, root=self._root)
        ids = {line.id for line in chosen}
        self._abouts = {id: text for id, text in self._abouts.items() if id in ids}
        return tuple(self._line(line) for line in chosen)

    def _line(self, line: Chosen) -> TreeLine:
        if line.id is None:
            return TreeLine(depth=line.depth, hidden=line.hidden)
        conversation = self._forest.conversations.get(line.id)
        if conversation is not None:
            return TreeLine(depth=line.depth, conversation=conversation, hidden=line.hidden)
        row = self._storage.task(line.id)
        task = None if row is None else self._task(row)
        return TreeLine(depth=line.depth, task=task, hidden=line.hidden)

    def _task(self, row: TaskRow) -> ShownTask:
        checkpoint = self._storage.checkpoint_at(row.id)
        wait = wait_of(self._storage, row.id) if row.status == Status.WAITING else None
        still_open = None
        if wait is not None and wait.on is not None and len(wait.on) <= AWAITED_MAX:
            still_open = sum(id in self._live for id in wait.on)
        return ShownTask(
            row=row,
            phase=None if checkpoint is None else checkpoint[0],
            progress_us=None if checkpoint is None else checkpoint[1],
            wait=wait,
            still_open=still_open,
            about=self._about(row),
        )

    def _about(self, row: TaskRow) -> str:
        """What a built-in task is about, from its input, which is read once."""
        if row.kind not in ("pi.tool", "pi.generation", "pi.compaction"):
            return ""
        known = self._abouts.get(row.id)
        if known is None:
            text = self._storage.task_input(row.id)
            given = None if text is None else _json.loads_stored(text)
            given = given if isinstance(given, dict) else {}
            name, turn = given.get("name"), given.get("turn")
            if row.kind == "pi.compaction":
                name = given.get("why")
            if row.kind != "pi.generation":
                known = name if isinstance(name, str) else ""
            else:
                known = f"turn {turn}" if isinstance(turn, int) else ""
            self._abouts[row.id] = known
        return known


def _state(holder: HolderView | None) -> tuple[object, object]:
    return (None, None) if holder is None else (holder.record.epoch, holder.state)
