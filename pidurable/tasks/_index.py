"""What is published of the tree, and the indexes that make a pass touch only what changed.

`adopt` takes the nodes of one durable commit and keeps every index in step, from the difference of
the old and the new node alone. Nothing here reads the storage or scans live tasks, so a commit
costs the same whether 10 or 1,000,000 tasks are live.

==================  ==================================================================
ready               tasks to reserve, by kind and top-level conversation
slotless            ready tasks with live ordinary work below, which need no slot
abort_ready         marked tasks with nothing live below, whose handler may run
marks               owners with the intent to cancel, whose children are to be marked
to_mark             single tasks to mark, with the reason
news                new tasks while some owner has the intent: are they below one?
to_unblock          blocked tasks of definitions that are new
resumed             interrupted tasks that were resumed, and what is below them
joins               waiters whose join is decided: the others of it are to be marked
ends                completing tasks with nothing live below
wakes               waiting tasks whose condition may be there
timers              moments of tasks, the earliest first; those that no longer count are skipped
waiters             who waits for something: a task, a conversation, or what others settle
active              tasks that are running or charged: what a close has to write
==================  ==================================================================

A queue may hold an id twice, or one that no longer counts. Whoever takes an id looks at the node
and drops what has become void; a void id never hides another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from pidurable.tasks._ready import Ready
from pidurable.tasks._timers import Timers, moment_of
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


class Index:
    """The published tree and its indexes."""

    def __init__(
        self,
        published: View,
        *,
        top_of: Callable[[int], int],
        unread: Callable[[int], int],
        now_us: Callable[[], int],
    ) -> None:
        self.published = published
        self.children: dict[int, dict[int, None]] = {}
        self.ready = Ready()
        self.slotless: deque[int] = deque()
        self.abort_ready: deque[int] = deque()
        self.marks: deque[int] = deque()
        self.to_mark: deque[tuple[int, str]] = deque()
        self.news: deque[int] = deque()
        self.to_unblock: deque[int] = deque()
        self.resumed: deque[int] = deque()
        self.let_go: deque[int] = deque()
        """Tasks that were resumed before anything ran; from the start on a restart counts again."""
        self.joins: deque[int] = deque()
        self.ends: deque[int] = deque()
        self.wakes: deque[int] = deque()
        self._derived = (
            *(self.marks, self.to_mark, self.news, self.to_unblock, self.resumed),
            *(self.joins, self.ends, self.wakes, self.abort_ready),
        )
        """The queues of what earlier commits imply and no pass has written yet."""
        self.timers = Timers(self._timer_counts)
        self.waiters: dict[int, dict[int, None]] = {}
        self.open_joins: dict[int, int] = {}
        self.deciders: dict[int, int] = {}
        """By waiter: the task whose outcome decided its join first."""
        self.blocked: dict[str, set[int]] = {}
        self.active: set[int] = set()
        self.interrupted = 0
        """Live tasks that are blocked, `interrupted`."""
        self.intents = 0
        self.intents_version = 0
        self.running: set[int] = set()
        """Tasks with an invocation in memory."""
        self.missed: set[int] = set()
        """Of these, the waiting ones whose waking came before their handler had returned."""
        self.expanded: set[int] = set()
        """Owners whose children a pass has marked in the commit that marked themselves."""
        self.idle_scopes: list[int] = []
        """Conversations that became idle since the runtime last looked."""
        self.ended: list[Node] = []
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
        self._now_us = now_us

    # --- adoption ------------------------------------------------------------------------

    def open(self, nodes: dict[int, AnyNode]) -> None:
        """Publish everything that is live, by id; the tasks are then to be given to `adopt_opened`.

        Args:
            nodes: Kept as it is, not copied: there may be a million.
        """
        self.published.nodes = nodes
        self.timers.expect(len(nodes))
        for new in nodes.values():
            self._adopt_children(None, new)
            if isinstance(new, Scope):
                self._adopt_scope(None, new)

    def adopt_opened(self, tasks: Iterable[Node]) -> None:
        """Enter some of the tasks that `open` published, in the order of their turns."""
        for new in tasks:
            self._adopt_task(None, new, opening=True)

    def adopt(self, nodes: Iterable[AnyNode]) -> None:
        """Publish the nodes of one commit."""
        changed: list[tuple[AnyNode | None, AnyNode]] = []
        tasks: list[tuple[Node | None, Node]] = []
        not_live: list[AnyNode] = []
        published = self.published.nodes
        for new in nodes:
            old = published.get(new.id)
            if old is new:
                continue
            published[new.id] = new
            changed.append((old, new))
            if isinstance(new, Node):
                assert old is None or isinstance(old, Node)
                tasks.append((old, new))
            if not new.live:
                not_live.append(new)
        for new in not_live:
            if not new.counts:
                self._hand_up(new)
        for old, new in changed:
            self._adopt_children(old, new)
            # Before the tasks: a wait that begins in this commit counts what is published by then.
            if isinstance(new, Scope):
                self._adopt_scope(old, new)
        for before, task in tasks:
            self._adopt_task(before, task)
        for new in not_live:
            if not new.contributes_all() and not new.contributes():
                published.pop(new.id, None)

    def _hand_up(self, ended: AnyNode) -> None:
        """A task ended above live work: its children are those of the next node above."""
        children = self.children.pop(ended.id, None)
        above = None if children is None else self.published.find_above(ended)
        if children is None or above is None:
            return
        others = self.children.setdefault(above.id, children)
        if others is children:
            return
        if len(others) < len(children):
            # The smaller goes into the larger, so that each is moved few times in all.
            self.children[above.id] = children
            others, children = children, others
        others.update(children)

    def _adopt_children(self, old: AnyNode | None, new: AnyNode) -> None:
        now = new.contributes_all()
        if now == (old is not None and old.contributes_all()) or new.above is None:
            return
        above = self.published.find_above(new)
        assert above is not None
        if now:
            self.children.setdefault(above.id, {})[new.id] = None
        else:
            siblings = self.children[above.id]
            del siblings[new.id]
            if not siblings:
                del self.children[above.id]

    def _adopt_scope(self, old: AnyNode | None, new: AnyNode) -> None:
        was = old is not None and old.below > 0
        if was and not new.below:
            self.idle_scopes.append(new.id)
            self._count_down(self.waiters.get(new.id, ()))
        elif new.below and not was:
            for waiter in self.waiters.get(new.id, ()):
                if waiter in self.open_joins:
                    self.open_joins[waiter] += 1
        if new.above is None:
            self.busy_roots += int(new.below > 0) - int(was)

    def _adopt_task(self, old: Node | None, new: Node, *, opening: bool = False) -> None:
        id, status, rare = new.id, new.status, new.rare
        live, marked = status is not TERMINAL, rare.abort_us is not None
        before = None if old is None else old.status
        was_live = before is not None and before is not TERMINAL
        changed = before is not status
        self.live += live - was_live
        if marked or status is COMPLETING or before is COMPLETING:
            self._adopt_intent(old, new)
        if old is not None and before is WAITING and changed:
            self._leave_wait(old)
        if rare.blocked is not None or (old is not None and old.blocked is not None):
            self._adopt_blocked(old, new)
        if status is RUNNING or (live and rare.recoveries):
            self.active.add(id)
        else:
            self.active.discard(id)
        if old is None and live and not marked:
            self._adopt_new(new, opening=opening)
        if status is TERMINAL:
            if was_live:
                self.ended.append(new)
                self._tell_waiters(new)
        elif status is COMPLETING:
            if changed:
                self._tell_waiters(new)
            if marked and id in self.running and (old is None or not old.marked):
                # Its handler goes on after its outcome; an abort does not let it.
                self.marked_running.append(id)
            if not new.below:
                self.ends.append(id)
        elif marked or status is not RUNNING:
            self._adopt_undecided(old, new, changed=changed)
        if opening:
            # Nothing runs yet that could hold a slot.
            return
        if (
            old is None
            or changed
            or old.below != new.below
            or (old.recoveries and not rare.recoveries)
        ):
            self.released.append(id)

    def _adopt_new(self, new: Node, *, opening: bool) -> None:
        """A live task that was not there before, and is not marked."""
        if new.deadline_us is not None:
            self.timers.push(new.deadline_us, new.id)
        if self.intents and not opening:
            # It may have been stored below an owner with the intent to cancel.
            self.news.append(new.id)

    def _adopt_undecided(self, old: Node | None, new: Node, *, changed: bool) -> None:
        if new.marked:
            if new.id in self.running and (old is None or not old.marked):
                self.marked_running.append(new.id)
            self.abort_candidate(new)
        elif new.status is PENDING:
            gained = old is not None and (old.blocked is not None or (new.below and not old.below))
            if changed or gained:
                self.push_ready(new)
        elif new.status is WAITING and changed and new.has_wait:
            self._enter_wait(new)
        elif new.status is WAITING and old is not None and old.blocked != new.blocked:
            # What it waits for may have come while it was blocked.
            self.wake_candidate(new)

    def _adopt_intent(self, old: Node | None, new: Node) -> None:
        was = old is not None and old.intent
        now = new.intent
        self.intents += int(now) - int(was)
        if now and not was:
            self.intents_version += 1
            if new.id in self.expanded:
                self.expanded.discard(new.id)
            else:
                self.marks.append(new.id)

    def _adopt_blocked(self, old: Node | None, new: Node) -> None:
        was = None if old is None else old.blocked
        if was == new.blocked:
            return
        self.interrupted += int(new.blocked == "interrupted") - int(was == "interrupted")
        if was == "interrupted" and new.live:
            # A mark lifts it as well; then what is below is marked from it.
            self.resumed.append(new.id)
        if was is not None:
            tasks = self.blocked[new.kind]
            tasks.discard(new.id)
            if not tasks:
                del self.blocked[new.kind]
        if new.blocked is not None:
            self.blocked.setdefault(new.kind, set()).add(new.id)

    # --- ready and abort -----------------------------------------------------------------

    def push_ready(self, node: Node) -> None:
        """Queue a task that may be reserved; one that retries later, when its moment is there.

        One whose last handler has not returned is not queued: `joined` does it then.
        """
        if node.blocked is not None or node.id in self.running:
            return
        if self.put_off(node):
            return
        if node.below:
            self.slotless.append(node.id)
        if not node.below or node.recoveries:
            # One that may be tried alone keeps its place among the others of its kind, too.
            self.ready.push(node.kind, self._top_of(node.conversation), node.id)

    def put_off(self, node: Node) -> bool:
        """Wait for the moment of a retry, if it is still to come; False if it is not."""
        # One that runs has had its moment; it is queued again because the storage refused.
        if node.status is not PENDING or node.not_before_us <= self._now_us():
            return False
        self.timers.push(node.not_before_us, node.id)
        return True

    def joined(self, node: Node, *, again: bool) -> None:
        """The last handler of a task has returned: queue what was held back until then.

        Args:
            again: The storage refused what the handler did. The task stays at its checkpoint,
                uncharged, and its turn comes again. Nothing can be written about it now.
        """
        if node.marked:
            self.abort_candidate(node)
        elif node.status is PENDING or (node.status is RUNNING and again):
            self.push_ready(node)
        elif node.status is WAITING and node.id in self.missed:
            # Its timer has left the heap; the pass puts it back if the clock was set back since.
            self.wakes.append(node.id)
        self.missed.discard(node.id)

    def abort_candidate(self, node: Node) -> None:
        """Queue a marked task if its abort handler may run now.

        A mark lifts what blocks a task, so one that is marked and blocked was blocked while it was
        being aborted; it stays so until somebody looks at it.
        """
        if not self.may_abort(node):
            return
        if node.status is not PENDING or not self.put_off(node):
            self.abort_ready.append(node.id)

    def may_abort(self, node: Node) -> bool:
        """Whether nothing but its own retry keeps the abort handler of a task from running."""
        return (
            node.marked
            and not node.below
            and node.blocked is None
            and node.id not in self.running
            and node.status is not COMPLETING
            and node.status is not TERMINAL
        )

    # --- waits ---------------------------------------------------------------------------

    def _enter_wait(self, node: Node) -> None:
        entry = node.timer_entry
        if entry is not None:
            self.timers.push_entry(entry)
            self.wake_candidate(node)
            return
        wait = node.wait
        assert wait is not None
        if wait.on is not None:
            still_open = 0
            others, conversations = frozenset(wait.others), frozenset(wait.conversations)
            for id in wait.on:
                awaited = self.published.nodes.get(id)
                if awaited is None:
                    is_open = id in others
                else:
                    is_open = awaited.live or (isinstance(awaited, Scope) and awaited.below > 0)
                still_open += is_open
                # An idle conversation too: it may become busy before the waiter wakes.
                if is_open or id in conversations:
                    self.waiters.setdefault(id, {})[node.id] = None
            self.open_joins[node.id] = still_open
            if still_open and wait.policy != "all_settled":
                # Some may have ended, or hold their outcome, already; the pass reads which.
                self.joins.append(node.id)
        if wait.deadline_us is not None:
            self.timers.push(wait.deadline_us, node.id)
        self.wake_candidate(node)

    def wake_candidate(self, node: Node) -> None:
        """Queue a waiting task if what it waits for is there."""
        if node.blocked is None and self.due(node, self._now_us()) is not None:
            self.wakes.append(node.id)

    def _leave_wait(self, old: Node) -> None:
        self.deciders.pop(old.id, None)
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
        if node.status is TERMINAL:
            del self.waiters[node.id]
            self._count_down(names)
        for waiter in names:
            waiting = self.published.task(waiter)
            if waiting is None or waiting.wait is None or waiter not in self.open_joins:
                continue
            if decides(waiting.wait.policy, node.outcome_status) and waiter not in self.deciders:
                self.deciders[waiter] = node.id
                self.joins.append(waiter)

    def settled(self, id: int) -> None:
        """Something that is no task and no conversation has settled, for good."""
        self._count_down(self.waiters.pop(id, ()))

    def _count_down(self, waiters: Iterable[int]) -> None:
        """One thing less is open for each of these."""
        for waiter in waiters:
            if waiter in self.open_joins:
                self.open_joins[waiter] -= 1
                waiting = self.published.task(waiter)
                # The commit that is being published may have woken it itself.
                if not self.open_joins[waiter] and waiting and waiting.status is WAITING:
                    self.wakes.append(waiter)

    def due(self, node: Node, now_us: int, *, view: View | None = None) -> str | None:
        """What wakes a waiting task now: tasks before signals before the deadline, or None.

        Args:
            view: What is staged besides: a conversation may be busy again by an earlier body.
        """
        if node.status is not WAITING:
            return None
        entry = node.timer_entry
        if entry is not None:
            return "deadline" if moment_of(entry) <= now_us else None
        wait = node.wait
        if wait is None:
            return None
        if wait.on is not None and not self.open_joins.get(node.id):
            scopes = () if view is None else map(view.find, wait.conversations)
            if not any(scope is not None and scope.below > 0 for scope in scopes):
                return "tasks"
        if wait.signals and self._unread(node.id) > 0:
            return "signal"
        if wait.deadline_us is not None and wait.deadline_us <= now_us:
            return "deadline"
        return None

    def due_timers(self, now_us: int) -> None:
        """Move what is due from the heap to the queues."""
        while due := self.timers.take_due(now_us):
            moment, id = due
            node = self.published.task(id)
            if node is None or not node.live:
                continue
            if node.deadline_us is not None and node.deadline_us <= now_us and not node.marked:
                self.to_mark.append((id, "deadline"))
            if node.status is WAITING and not node.marked:
                if node.wait is not None and node.wait.deadline_us == moment:
                    self.wakes.append(id)
            elif node.status is PENDING and node.not_before_us == moment:
                if node.marked:
                    self.abort_candidate(node)
                else:
                    self.push_ready(node)

    def _timer_counts(self, moment_us: int, id: int) -> bool:
        """Whether a task still has something to do at a moment."""
        node = self.published.task(id)
        if node is None or not node.live:
            return False
        if node.deadline_us == moment_us and not node.marked:
            return True
        if node.has_wait:
            return node.waits_until_us == moment_us and not node.marked
        return node.status is PENDING and node.not_before_us == moment_us

    def signalled(self, task: int) -> None:
        """A signal was stored for a task."""
        node = self.published.task(task)
        if node is not None and node.status is WAITING and node.wait and node.wait.signals:
            self.wakes.append(task)

    # --- what a pass has to do -----------------------------------------------------------

    def derived_work(self) -> bool:
        """Whether earlier commits imply something that is not written yet."""
        return any(self._derived)


def decides(policy: str, outcome_status: str | None) -> bool:
    """Whether an outcome, ended or held, decides a join of this policy."""
    if outcome_status is None or policy == "all_settled":
        return False
    return (outcome_status == "completed") == (policy == "first_success")


__all__ = ["Index", "decides"]
