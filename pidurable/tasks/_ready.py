"""Ready tasks: kinds take turns, within a kind conversations, within those first ready first.

Nothing is scanned: taking the next task of a kind costs the same with 10 or 1,000,000 ready ones.
An id may be in a queue twice, or may no longer be ready; whoever takes it looks at its node.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator


class ReadyQueue:
    """Ready tasks of one kind, by top-level conversation."""

    __slots__ = ("_rings", "size")

    def __init__(self) -> None:
        self._rings: OrderedDict[int, deque[int]] = OrderedDict()
        self.size = 0

    def push(self, top: int, task: int) -> None:
        """Append a task behind the others of its top-level conversation."""
        self._rings.setdefault(top, deque()).append(task)
        self.size += 1

    def push_front(self, top: int, task: int) -> None:
        """Put a task back where `pop` took it."""
        self._rings.setdefault(top, deque()).appendleft(task)
        self._rings.move_to_end(top, last=False)
        self.size += 1

    def pop(self) -> tuple[int, int]:
        """Take the next (top conversation, task); the conversation goes to the end of the ring."""
        top, tasks = next(iter(self._rings.items()))
        task = tasks.popleft()
        self.size -= 1
        if tasks:
            self._rings.move_to_end(top)
        else:
            del self._rings[top]
        return top, task

    def in_order(self) -> Iterator[int]:
        """The tasks in the order in which `pop` would take them, if nothing came meanwhile."""
        rings = [iter(tasks) for tasks in self._rings.values()]
        while rings:
            left = []
            for ring in rings:
                task = next(ring, None)
                if task is not None:
                    left.append(ring)
                    yield task
            rings = left

    def ids(self) -> set[int]:
        """Every task in the queue."""
        return {task for tasks in self._rings.values() for task in tasks}


class Ready:
    """The queues of all kinds, and the ring of those that may have a free slot."""

    __slots__ = ("_queues", "_ring")

    def __init__(self) -> None:
        self._queues: dict[str, ReadyQueue] = {}
        self._ring: OrderedDict[str, None] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether a kind that is not known to be full has a ready task."""
        return bool(self._ring)

    def has(self, kind: str) -> bool:
        """Whether a task of this kind is ready, its kind full or not."""
        return kind in self._queues

    def push(self, kind: str, top: int, task: int) -> None:
        self._queue(kind).push(top, task)

    def push_front(self, kind: str, top: int, task: int) -> None:
        self._queue(kind).push_front(top, task)

    def _queue(self, kind: str) -> ReadyQueue:
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = ReadyQueue()
        self._ring[kind] = None
        return queue

    def next_kind(self) -> str:
        """The kind whose turn it is; it goes to the end of the ring."""
        kind = next(iter(self._ring))
        self._ring.move_to_end(kind)
        return kind

    def pop(self, kind: str) -> tuple[int, int]:
        """Take the next (top conversation, task) of a kind that is in the ring."""
        queue = self._queues[kind]
        taken = queue.pop()
        if not queue.size:
            del self._queues[kind]
            del self._ring[kind]
        return taken

    def set_full(self, kind: str) -> None:
        """A full kind leaves the ring, so that it costs nothing until a slot is free."""
        self._ring.pop(kind, None)

    def set_free(self, kind: str) -> None:
        """A slot of the kind has become free: it is in the ring again if a task waits for it."""
        if kind in self._queues:
            self._ring[kind] = None

    def in_order(self, kind: str) -> Iterator[int]:
        """The tasks of a kind in the order of their turns; nothing may be pushed meanwhile."""
        queue = self._queues.get(kind)
        return iter(()) if queue is None else queue.in_order()

    def ids(self) -> set[int]:
        """Every task in the queues."""
        return {task for queue in self._queues.values() for task in queue.ids()}
