"""What is published of the tree, and the indexes that make a pass touch only what changed.

`adopt` takes the nodes of one durable commit and keeps every index in step, from the difference of
the old and the new node alone. Nothing here reads the storage or scans live tasks, so a commit
costs the same whether 10 or 1,000,000 tasks are live.

==================  ==================================================================
ready               by kind, a ring of kinds, in each a ring of top-level conversations
abort_ready         marked tasks with nothing live below, whose handler may run
marks               owners whose children are to be marked; to_mark: those children, one by one
join_marks          waiters whose join is decided: the others of it are to be marked
ends                completing tasks with nothing live below
wakes               waiting tasks whose condition is there
timers              a heap of (moment, task); entries that no longer count are skipped
waiters             who waits for a task to end
==================  ==================================================================
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from pidurable.tasks._tree import (
    COMPLETING,
    PENDING,
    RUNNING,
    TERMINAL,
    WAITING,
    AnyNode,
    Node,
    Scope,
    View,
)


class ReadyQueue:
    """Ready tasks of one kind: conversations take turns, within one first ready first."""

    __slots__ = ("_rings", "size")

    def __init__(self) -> None:
        self._rings: OrderedDict[int, deque[int]] = OrderedDict()
        self.size = 0

    def push(self, top: int, task: int) -> None:
        self._rings.setdefault(top, deque()).append(task)
        self.size += 1

    def push_front(self, top: int, task: int) -> None:
        self._rings.setdefault(top, deque()).appendleft(task)
        self._rings.move_to_end(top, last=False)
        self.size += 1

    def pop(self) -> tuple[int, int]:
        """The next (top conversation, task); the conversation goes to the end of the ring."""
        top, tasks = next(iter(self._rings.items()))
        task = tasks.popleft()
        self.size -= 1
        if tasks:
            self._rings.move_to_end(top)
        else:
            del self._rings[top]
        return top, task


class Index:
    """The published tree and its indexes."""

    def __init__(
        self,
        published: View,
        *,
        top_of: Callable[[int], int],
        unread: Callable[[int], int],
        ended_status: Callable[[int], str | None],
    ) -> None:
        self.published = published
        self.children: dict[int, dict[int, None]] = {}
        self.ready: dict[str, ReadyQueue] = {}
        self.ring: OrderedDict[str, None] = OrderedDict()
        self.abort_ready: deque[int] = deque()
        self.marks: deque[int] = deque()
        self.to_mark: deque[tuple[int, str]] = deque()
        self.join_marks: deque[int] = deque()
        self.ends: deque[int] = deque()
        self.wakes: deque[tuple[int, str]] = deque()
        self.timers: list[tuple[int, int]] = []
        self.waiters: dict[int, dict[int, None]] = {}
        self.open_joins: dict[int, int] = {}
        self.blocked: dict[str, set[int]] = {}
        self.intents = 0
        self.intents_version = 0
        self.running: set[int] = set()
        """Tasks with an invocation in memory."""
        self.idle_scopes: list[int] = []
        """Conversations that became idle since the runtime last looked."""
        self.ended: list[int] = []
        """Tasks that became terminal since the runtime last looked."""
        self.marked_running: list[int] = []
        """Running tasks that were marked since the runtime last looked."""
        self.released: list[int] = []
        """Tasks whose slot accounting may have changed since the runtime last looked."""
        self.live = 0
        self.busy_roots = 0
        """Ownerless conversations with ordinary live work below."""
        self._top_of = top_of
        self._unread = unread
        self._ended_status = ended_status

    # --- adoption ------------------------------------------------------------------------

    def adopt(self, nodes: Iterable[AnyNode]) -> None:
        """Publish the nodes of one commit."""
        changed: list[tuple[AnyNode | None, AnyNode]] = []
        published = self.published.nodes
        for new in nodes:
            old = published.get(new.id)
            if old is new:
                continue
            published[new.id] = new
            changed.append((old, new))
        for old, new in changed:
            self._adopt_children(old, new)
            if isinstance(new, Node):
                assert old is None or isinstance(old, Node)
                self._adopt_task(old, new)
            else:
                self._adopt_scope(old, new)
        for _, new in changed:
            if not new.contributes_all() and not new.live and not new.contributes():
                published.pop(new.id, None)

    def _adopt_children(self, old: AnyNode | None, new: AnyNode) -> None:
        was = old is not None and old.contributes_all()
        now = new.contributes_all()
        if was == now or new.above is None:
            return
        if now:
            self.children.setdefault(new.above, {})[new.id] = None
        else:
            siblings = self.children[new.above]
            del siblings[new.id]
            if not siblings:
                del self.children[new.above]

    def _adopt_scope(self, old: AnyNode | None, new: AnyNode) -> None:
        was = old is not None and old.below > 0
        if was and not new.below:
            self.idle_scopes.append(new.id)
        if new.above is None:
            self.busy_roots += int(new.below > 0) - int(was)

    def _adopt_task(self, old: Node | None, new: Node) -> None:
        was_live = old is not None and old.live
        self.live += int(new.live) - int(was_live)
        self._adopt_intent(old, new)
        status = new.status
        changed = old is None or old.status is not status
        if old is not None and old.status is WAITING and changed:
            self._leave_wait(old)
        if status is TERMINAL:
            if was_live:
                self.ended.append(new.id)
                self._leave_blocked(old)
                self._tell_waiters(new)
        elif status is COMPLETING:
            if changed:
                self._tell_waiters(new)
            if not new.below:
                self.ends.append(new.id)
        else:
            self._adopt_live(old, new, changed)
        if old is None or old.below != new.below or changed:
            self.released.append(new.id)

    def _adopt_live(self, old: Node | None, new: Node, changed: bool) -> None:
        if old is None and new.deadline_us is not None:
            heapq.heappush(self.timers, (new.deadline_us, new.id))
        if old is None or old.blocked != new.blocked:
            self._leave_blocked(old)
            if new.blocked is not None:
                self.blocked.setdefault(new.kind, set()).add(new.id)
        if new.marked:
            self.abort_candidate(new)
            if new.id in self.running and (old is None or not old.marked):
                self.marked_running.append(new.id)
            return
        if self.intents and old is None:
            # Work that was stored below an owner with the intent to cancel: it is marked too.
            self.marks.append(new.above or 0)
        if new.status is PENDING:
            if new.blocked is None and (changed or (old is not None and old.blocked is not None)):
                self.push_ready(new)
        elif new.status is WAITING and changed:
            self._enter_wait(new)

    def _adopt_intent(self, old: Node | None, new: Node) -> None:
        was = old is not None and old.intent
        now = new.intent
        self.intents += int(now) - int(was)
        if now and not was:
            self.intents_version += 1
            self.marks.append(new.id)

    def _leave_blocked(self, old: Node | None) -> None:
        if old is not None and old.blocked is not None:
            tasks = self.blocked.get(old.kind)
            if tasks is not None:
                tasks.discard(old.id)
                if not tasks:
                    del self.blocked[old.kind]

    # --- ready and abort -----------------------------------------------------------------

    def push_ready(self, node: Node) -> None:
        queue = self.ready.get(node.kind)
        if queue is None:
            queue = self.ready[node.kind] = ReadyQueue()
        queue.push(self._top_of(node.conversation), node.id)
        self.ring[node.kind] = None

    def abort_candidate(self, node: Node) -> None:
        """Queue a marked task if its abort handler may run now."""
        if (
            node.marked
            and not node.below
            and node.id not in self.running
            and node.status is not COMPLETING
            and node.status is not TERMINAL
        ):
            self.abort_ready.append(node.id)

    # --- waits ---------------------------------------------------------------------------

    def _enter_wait(self, node: Node) -> None:
        wait = node.wait
        assert wait is not None
        if wait.on is not None:
            still_open = 0
            decided = False
            for id in wait.on:
                awaited = self.published.nodes.get(id)
                if isinstance(awaited, Node) and awaited.live:
                    still_open += 1
                    self.waiters.setdefault(id, {})[node.id] = None
                    held = awaited.outcome_status
                else:
                    held = (
                        awaited.outcome_status
                        if isinstance(awaited, Node)
                        else self._ended_status(id)
                        if wait.policy != "all_settled"
                        else None
                    )
                decided = decided or decides(wait.policy, held)
            self.open_joins[node.id] = still_open
            if not still_open:
                self.wakes.append((node.id, "tasks"))
            elif decided:
                self.join_marks.append(node.id)
        if wait.signals and self._unread(node.id):
            self.wakes.append((node.id, "signal"))
        if wait.deadline_us is not None:
            heapq.heappush(self.timers, (wait.deadline_us, node.id))

    def _leave_wait(self, old: Node) -> None:
        if self.open_joins.pop(old.id, None) is None or old.wait is None:
            return
        for id in old.wait.on or ():
            names = self.waiters.get(id)
            if names is not None:
                names.pop(old.id, None)
                if not names:
                    del self.waiters[id]

    def _tell_waiters(self, node: Node) -> None:
        """A task has ended, or holds its outcome: count it, and look at the policies."""
        names = self.waiters.get(node.id)
        if names is None:
            return
        ended = node.status is TERMINAL
        if ended:
            del self.waiters[node.id]
        for waiter in list(names):
            waiting = self.published.task(waiter)
            if waiting is None or waiting.wait is None or waiter not in self.open_joins:
                continue
            if ended:
                self.open_joins[waiter] -= 1
                if not self.open_joins[waiter]:
                    self.wakes.append((waiter, "tasks"))
            if decides(waiting.wait.policy, node.outcome_status):
                self.join_marks.append(waiter)

    def due_timers(self, now_us: int) -> None:
        """Move what is due from the heap to the queues."""
        while self.timers and self.timers[0][0] <= now_us:
            _, id = heapq.heappop(self.timers)
            node = self.published.task(id)
            if node is None or not node.live:
                continue
            wait = node.wait
            if (
                node.status is WAITING
                and wait is not None
                and wait.deadline_us is not None
                and wait.deadline_us <= now_us
            ):
                self.wakes.append((id, "deadline"))
            if node.deadline_us is not None and node.deadline_us <= now_us and not node.marked:
                self.wakes.append((id, "task_deadline"))

    def signalled(self, task: int) -> None:
        node = self.published.task(task)
        if node is not None and node.status is WAITING and node.wait and node.wait.signals:
            self.wakes.append((task, "signal"))

    # --- what a pass has to do -----------------------------------------------------------

    def derived_work(self) -> bool:
        """Whether earlier commits imply something that is not written yet."""
        return bool(
            self.marks
            or self.to_mark
            or self.join_marks
            or self.ends
            or self.wakes
            or self.abort_ready
        )


def decides(policy: str, outcome_status: str | None) -> bool:
    """Whether an outcome, ended or held, decides a join of this policy."""
    if outcome_status is None or policy == "all_settled":
        return False
    return (outcome_status == "completed") == (policy == "first_success")


__all__ = ["RUNNING", "Index", "ReadyQueue", "Scope", "decides"]
