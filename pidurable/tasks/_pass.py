"""One pass of the scheduler: what one commit derives from earlier ones, and what it reserves.

A pass marks top-down, ends bottom-up, wakes, starts abort handlers and reserves what is ready, in
this order and in one commit of at most `PASS_RECORDS_MAX` records. What does not fit stays queued.

* Everything is decided on the transaction's view, so a mark or an end that an earlier body of the
  batch staged counts already.
* Whatever was taken from a queue goes back if the commit fails; what the pass found on its way goes
  to the queues only when the commit is durable.
* A task below an owner with the intent to cancel is dropped here: its mark is on its way, and takes
  it from there.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from pidurable.records._limits import PASS_RECORDS_MAX
from pidurable.records._tasks import OutcomeRecord
from pidurable.storage import Op
from pidurable.tasks._definition import Task, definition_info
from pidurable.tasks._index import decides
from pidurable.tasks._invocation import Starts
from pidurable.tasks._migration import migrate
from pidurable.tasks._mistakes import report_refusal
from pidurable.tasks._transaction import TreeTransaction
from pidurable.tasks._tree import COMPLETING, PENDING, RUNNING, TERMINAL, WAITING, Node, Scope

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime
    from pidurable.tasks._scheduler import Scheduler

T = TypeVar("T")

_LOOKS_MAX = 10 * PASS_RECORDS_MAX
"""Most tasks that one pass looks at without writing them."""


class Pass:
    """One pass: `fill` is the body of its commit, then either `adopted` or `put_back`."""

    def __init__(self, runtime: Runtime, scheduler: Scheduler) -> None:
        self.starts = Starts()
        self.records = 0
        self._runtime = runtime
        self._scheduler = scheduler
        self._index = runtime.index
        self._taken: list[tuple[deque[Any], Any]] = []
        self._popped: list[tuple[str, int, int]] = []
        self._found: deque[tuple[int, str]] = deque()
        self._expanding: deque[int] = deque()
        self._candidates: deque[int] = deque()
        self._starting: set[int] = set()
        self._trial: int | None = None
        """The suspect that this pass starts."""
        self._tx: TreeTransaction

    @trio.lowlevel.enable_ki_protection
    def fill(self, tx: TreeTransaction) -> None:
        """Write what is due. The body of the commit; awaits nothing and reads no input."""
        self._tx = tx
        tx.reserves = False
        tx.starts = self.starts
        self._unblock()
        self._resume()
        self._keep_restarts()
        self._mark()
        self._finish()
        if self._runtime.closing:
            # Accepted before the close began: what it reserved now would count and never start.
            return
        self._wake()
        self._reserve_aborts()
        if self._runtime.started:
            self._reserve_ready()
            self._reserve_slotless()

    def adopted(self) -> None:
        """The commit is durable: keep what was found and did not fit."""
        self._index.expanded.clear()
        suspects = self._scheduler.suspects
        if self._trial is not None:
            suspects.begin(self._trial)
        elif suspects.tries() is None:
            # What was let go for a trial may have been settled, blocked or held back instead.
            suspects.let_next()
        self._index.to_mark.extend(self._found)
        self._index.marks.extend(self._expanding)

    def put_back(self) -> None:
        """The commit failed: the queues are as before."""
        self._index.expanded.clear()
        for queue, item in reversed(self._taken):
            queue.appendleft(item)
        for kind, top, id in reversed(self._popped):
            self._index.ready.push_front(kind, top, id)

    def _take(self, queue: deque[T]) -> T:
        item = queue.popleft()
        self._taken.append((queue, item))
        return item

    def _room(self) -> bool:
        return self.records < PASS_RECORDS_MAX

    def _unblock(self) -> None:
        """Let tasks whose definition is new be looked at again."""
        while self._index.to_unblock and self._room():
            found = self._tx.view.task(self._take(self._index.to_unblock))
            if found is not None and found.blocked not in (None, "interrupted"):
                self._tx.unblock(self._tx.view.edit_task(found.id))
                self.records += 1

    def _resume(self) -> None:
        """Let everything below a resumed task go on, as far as nothing else holds it back."""
        index, tx = self._index, self._tx
        for _ in range(_LOOKS_MAX):
            if not index.resumed or not self._room():
                return
            found = tx.view.find(self._take(index.resumed))
            if found is None:
                continue
            if isinstance(found, Node) and found.live:
                if found.marked:
                    # Its abort reaches what is below.
                    continue
                if found.blocked == "interrupted":
                    # When that is published, its turn comes again, and what is below follows.
                    tx.unblock(tx.view.edit_task(found.id))
                    self.records += 1
                    continue
                if found.status is PENDING:
                    index.push_ready(found)
                elif found.status is WAITING:
                    index.wake_candidate(found)
            for id in index.children.get(found.id, ()):
                child = tx.view.find(id)
                if child is not None and not child.background:
                    index.resumed.append(id)

    def _keep_restarts(self) -> None:
        """Once tasks run, the next restart interrupts again what was resumed before."""
        if not self._runtime.started or self._runtime.closing:
            return
        while self._index.let_go and self._room():
            found = self._tx.view.task(self._take(self._index.let_go))
            if found is not None and found.live and found.let_go:
                node = self._tx.view.edit_task(found.id)
                node.let_go = False
                self._tx.put_state(node)
                self.records += 1

    # --- marks, top-down -----------------------------------------------------------------

    def _mark(self) -> None:
        index, tx = self._index, self._tx
        # Children that were staged before this body are in no index yet. Their owner is expanded
        # again when it is published.
        alone = not self._runtime.staged.nodes
        while self._room():
            if index.to_mark:
                id, reason = self._take(index.to_mark)
            elif self._found:
                id, reason = self._found.popleft()
            elif self._look():
                continue
            else:
                return
            node = tx.view.task(id)
            if node is None or node.marked:
                # Marked before. A join marks the others again after each opening, and that must
                # not let go what was blocked while it was being aborted, as a second abort does.
                continue
            if reason == "deadline" and self._is_early(node):
                continue
            had_intent = node.intent
            if tx.mark(id, reason):
                self.records += 1
                if alone and not had_intent:
                    index.expanded.add(id)
                    self._expanding.append(id)

    def _is_early(self, node: Node) -> bool:
        """Whether the clock was set back since the deadline was taken; then it comes again."""
        moment = node.deadline_us
        if moment is None or moment <= self._tx.now_us():
            return False
        if node.live and not node.marked:
            self._index.timers.push(moment, node.id)
        return True

    def _look(self) -> bool:
        """Look at one thing that may lead to marks; False if there is none."""
        index = self._index
        if self._expanding:
            self._expand(self._expanding.popleft())
        elif index.marks:
            self._expand(self._take(index.marks))
        elif index.news:
            self._look_at_new(self._take(index.news))
        elif index.joins:
            self._decide(self._take(index.joins))
        else:
            return False
        return True

    def _expand(self, owner: int) -> None:
        """Find what is directly below an owner with the intent, ended tasks being transparent."""
        view = self._tx.view
        found = view.find(owner)
        if found is None or not (found.intent or self._runtime.under_intent(view, found)):
            return
        pending = [owner]
        while pending:
            for child in self._index.children.get(pending.pop(), ()):
                node = view.find(child)
                if node is None or node.background:
                    continue
                if not node.live:
                    pending.append(child)
                elif isinstance(node, Node) and not node.marked:
                    self._found.append((child, "owner"))

    def _look_at_new(self, id: int) -> None:
        node = self._tx.view.task(id)
        if node is None or not node.live or node.marked:
            return
        if self._runtime.under_intent(self._tx.view, node):
            self._found.append((id, "owner"))

    def _decide(self, waiter: int) -> None:
        """Mark the others of a join that is decided. The first that decides is not marked."""
        node = self._tx.view.task(waiter)
        if node is None or node.status is not WAITING or node.marked or node.wait is None:
            return
        decider = self._index.deciders.get(waiter)
        if decider is None:
            decider = self._find_decider(node)
            if decider is None:
                return
            self._index.deciders[waiter] = decider
        self._found.extend((id, "join") for id in node.wait.on or () if id != decider)

    def _find_decider(self, waiter: Node) -> int | None:
        """The task that decided a join before this process looked.

        One that has ended came before one that holds, and one that was not marked by the join
        before one that was.
        """
        assert waiter.wait is not None
        best: tuple[int, int] | None = None
        for id in waiter.wait.on or ():
            node = self._runtime.published.task(id)
            status = node.outcome_status if node is not None else self._runtime.ended_status(id)
            if not decides(waiter.wait.policy, status):
                continue
            if node is None or not node.live:
                return id
            rank = (1 if node.marked else 0, id)
            best = rank if best is None else min(best, rank)
        return None if best is None else best[1]

    # --- ends, bottom-up -----------------------------------------------------------------

    def _finish(self) -> None:
        ends = self._index.ends
        while ends and self._room():
            found = self._tx.view.task(self._take(ends))
            # A commit between that one and this pass may have put new work below.
            if found is None or found.status is not COMPLETING or found.below:
                continue
            node = self._tx.view.edit_task(found.id)
            self._tx.finish(node)
            self.records += 1
            self._climb(node)

    def _climb(self, node: Node) -> None:
        """End the owners above that only waited for this end, and note those to be aborted."""
        while self._room():
            owner = self._owner_released_by(node)
            if owner is None:
                return
            if owner.status is not COMPLETING:
                if owner.marked:
                    self._candidates.append(owner.id)
                return
            node = self._tx.view.edit_task(owner.id)
            self._tx.finish(node)
            self.records += 1

    def _owner_released_by(self, node: Node) -> Node | None:
        """The nearest live owner, if nothing ordinary is live below it any more."""
        for above in self._tx.view.owners(node):
            if above.below:
                return None
            if isinstance(above, Scope) or above.status is TERMINAL:
                continue
            return above
        return None

    # --- wakings -------------------------------------------------------------------------

    def _wake(self) -> None:
        index, tx = self._index, self._tx
        now = tx.now_us()
        while index.wakes and self._room():
            id = self._take(index.wakes)
            found = tx.view.task(id)
            if found is None or found.status is not WAITING or found.marked or found.blocked:
                continue
            if id in index.running:
                # The handler that waited has not returned; it is looked at again when it has.
                index.missed.add(id)
                continue
            reason = index.due(found, now, view=tx.view)
            if reason is None:
                if found.wait is not None and found.wait.deadline_us is not None:
                    # The clock was set back since the timer was taken from the heap.
                    index.timers.push(found.wait.deadline_us, id)
                continue
            if self._runtime.under_intent(tx.view, found) or self._runtime.halted(tx.view, found):
                continue
            node = tx.view.edit_task(id)
            node.status = PENDING
            node.woken_by = reason
            node.wait = None
            node.ready_us = now
            tx.writes.append((Op.WAIT_DELETE, (id,)))
            if (
                self._runtime.started
                and not node.recoveries
                and (node.below or (not index.ready.has(node.kind) and self._free(node.kind)))
            ):
                self._reserve(node)
            else:
                tx.put_state(node)
                self.records += 1

    # --- abort handlers ------------------------------------------------------------------

    def _reserve_aborts(self) -> None:
        index, tx = self._index, self._tx
        while self._room():
            if self._candidates:
                id = self._candidates.popleft()
            elif index.abort_ready:
                id = self._take(index.abort_ready)
            else:
                return
            found = tx.view.task(id)
            if found is None or id in self._starting or not index.may_abort(found):
                continue
            if found.status is PENDING and index.put_off(found):
                # The clock was set back since it was queued.
                continue
            if self._held_back(found):
                continue
            self.records += 1
            self._abort(tx.view.edit_task(id))

    def _abort(self, node: Node) -> None:
        """Start the abort handler of a task, or settle it where there is nothing to run."""
        runtime, tx = self._runtime, self._tx
        definition = runtime.snapshot().definition(node.kind)
        info = None if definition is None else definition_info(definition)
        if node.started_us is None or (info is not None and info.abort == "nothing_to_undo"):
            self._settle(node, OutcomeRecord(status="aborted", reason=node.abort_reason))
            return
        refused = runtime.refuses(definition, node)
        if refused is None:
            assert definition is not None
            refused = migrate(runtime, tx, node, definition)
        if refused is not None:
            self._settle(node, OutcomeRecord(status="orphaned", reason=refused))
            return
        assert definition is not None
        self._start(node, definition, aborting=True)

    def _settle(self, node: Node, outcome: OutcomeRecord) -> None:
        self._tx.settle(node, outcome)
        self._runtime.on_settled_by_scheduler(self._tx, node, outcome.status, None)
        if node.status is TERMINAL:
            self._climb(node)

    # --- reserving -----------------------------------------------------------------------

    def _free(self, kind: str) -> bool:
        """Whether a task of this kind could be started besides what this pass starts."""
        return self._scheduler.has_slot(kind, self.starts)

    def _reserve_slotless(self) -> None:
        """Start those with live work below: what they wait for a slot for may have the slot.

        They come after the others, which take their turns by slots; nothing keeps these waiting.
        """
        index = self._index
        while index.slotless and self._room():
            id = self._take(index.slotless)
            found = self._tx.view.task(id)
            if found is None or found.below:
                self._reserve_next(id)
            elif found.status is PENDING and not found.marked:
                # That work has ended before the turn came: it queues with the others, whose turn
                # this pass has had already.
                index.push_ready(found)
                self._scheduler.kick()

    def _reserve_ready(self) -> None:
        ready, scheduler = self._index.ready, self._scheduler
        while ready and self._room() and scheduler.free_total() > self.starts.taken:
            kind = ready.next_kind()
            if not self._free(kind):
                ready.set_full(kind)
                continue
            top, id = ready.pop(kind)
            self._popped.append((kind, top, id))
            self._reserve_next(id)

    def _reserve_next(self, id: int) -> None:
        tx = self._tx
        found = tx.view.task(id)
        if (
            found is None
            or found.status not in (PENDING, RUNNING)
            or found.blocked is not None
            or found.marked
            or id in self._starting
            or self._scheduler.is_reserved(id)
            or id in self._index.running
            or self._runtime.under_intent(tx.view, found)
            or self._runtime.halted(tx.view, found)
            or self._index.put_off(found)
            or self._held_back(found)
        ):
            return
        self._reserve(tx.view.edit_task(id))

    def _held_back(self, node: Node) -> bool:
        """Whether a suspect has to wait: another one is tried, or starts in this pass."""
        suspects = self._scheduler.suspects
        if not suspects.suspect(node):
            return False
        if self._trial is None and suspects.tries() is None:
            return False
        suspects.wait(node)
        return True

    def _reserve(self, node: Node) -> None:
        definition = self._runtime.snapshot().definition(node.kind)
        self.records += 1
        refused = self._runtime.refuses(definition, node)
        if refused is None:
            assert definition is not None
            refused = migrate(self._runtime, self._tx, node, definition)
        if refused is not None:
            self._block(node, refused)
            report_refusal(self._runtime, definition, node, refused)
            return
        assert definition is not None
        self._start(node, definition, aborting=False)

    def _block(self, node: Node, reason: str) -> None:
        if node.status is WAITING:
            self._tx.writes.append((Op.WAIT_DELETE, (node.id,)))
            node.wait = None
        node.status = PENDING
        node.blocked = reason
        self._tx.put_state(node)

    def _start(self, node: Node, definition: Task[Any, Any, Any], *, aborting: bool) -> None:
        if node.status is WAITING:
            self._tx.writes.append((Op.WAIT_DELETE, (node.id,)))
            node.wait = None
        node.status = RUNNING
        node.blocked = None
        node.invocations += 1
        if node.started_us is None:
            node.started_us = self._tx.now_us()
        self._tx.put_state(node)
        self._starting.add(node.id)
        if self._scheduler.suspects.suspect(node):
            self._trial = node.id
            for waiting in self._scheduler.suspects.let_off(self._tx.view):
                self._tx.put_state(waiting)
        holds = not aborting and not node.below
        self.starts.add(node, definition, aborting=aborting, takes_slot=holds)
