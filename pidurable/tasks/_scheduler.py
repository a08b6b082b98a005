"""The scheduler: one dirty flag, one drain loop, one commit a pass.

Whatever changes something calls `kick`, which sets the flag; a thousand kicks cost one pass. A pass
first derives what earlier commits imply (marks top-down, wakings, ends bottom-up), then reserves
what is ready, all in one commit of at most `PASS_RECORDS_MAX` records, and repeats while there is
more. Only after that commit is durable are invocations started, so a task marked running belongs to
this holder. What a pass took from the queues goes back if its commit fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from pidurable.errors import (
    MigrationError,
    NotJsonError,
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
    show,
)
from pidurable.records import _json
from pidurable.records._limits import PASS_RECORDS_MAX, PROBE_SECONDS
from pidurable.records._tasks import OutcomeRecord
from pidurable.storage import Op
from pidurable.tasks._definition import Task, definition_info
from pidurable.tasks._index import ReadyQueue
from pidurable.tasks._run import Invocation
from pidurable.tasks._transaction import TreeTransaction
from pidurable.tasks._tree import (
    COMPLETING,
    PENDING,
    RUNNING,
    TERMINAL,
    WAITING,
    Node,
    Scope,
)

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime

# A sleep re-checks the wall clock at least this often: it may be stepped, or the machine suspended.
_CLOCK_POLL_SECONDS = 60.0


class Scheduler:
    """The drain loop of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._index = runtime.index
        self._dirty = trio.Event()
        self._refusing = False
        self._held_slots: dict[int, str] = {}
        self._slots: dict[str, int] = {}
        self._undo: list[Callable[[], None]] = []
        self._starts: list[Invocation] = []
        self._records = 0
        self._timer_wake = trio.Event()
        self._timer_at: int | None = None

    # --- kicking -------------------------------------------------------------------------

    def kick(self) -> None:
        """There may be something to do. Cheap, never blocks, and never lost."""
        self._dirty.set()

    def refusing(self, refusing: bool) -> None:
        self._refusing = refusing
        if not refusing:
            self.kick()

    def has_work(self) -> bool:
        if self._index.derived_work() or self._runtime.resumable:
            return True
        return self._runtime.started and bool(self._index.ring) and self._free_total() > 0

    def timers_changed(self) -> None:
        """Wake the timer if the earliest moment has become earlier."""
        timers = self._index.timers
        if timers and (self._timer_at is None or timers[0][0] < self._timer_at):
            self._timer_wake.set()

    # --- slots ---------------------------------------------------------------------------

    def account(self, task_id: int) -> None:
        """Keep the slots in step: a running phase holds one unless work below it is live."""
        invocation = self._runtime.invocations.get(task_id)
        node = self._runtime.published.task(task_id)
        holds = (
            invocation is not None
            and not invocation.aborting
            and node is not None
            and node.below == 0
        )
        kind = self._held_slots.get(task_id)
        if holds and kind is None:
            assert node is not None
            self._held_slots[task_id] = node.kind
            self._slots[node.kind] = self._slots.get(node.kind, 0) + 1
        elif not holds and kind is not None:
            del self._held_slots[task_id]
            self._slots[kind] -= 1
            if self._index.ready.get(kind):
                self._index.ring[kind] = None

    def _free_total(self) -> int:
        return self._runtime.session.settings.running_max - len(self._held_slots)

    def _free(self, kind: str) -> int:
        limit = self._runtime.session.settings.limits.get(kind)
        return self._free_total() if limit is None else limit - self._slots.get(kind, 0)

    # --- the loop ------------------------------------------------------------------------

    async def serve(self) -> None:
        """Drain until cancelled. A bug in here poisons the session and never cancels the host."""
        while True:
            await self._dirty.wait()
            self._dirty = trio.Event()
            if self._refusing:
                # Nothing is reserved until a probe write succeeds.
                await trio.sleep(PROBE_SECONDS)
                await self._probe()
                continue
            while self.has_work() and not self._runtime.closing:
                if not await self._pass():
                    break

    async def _probe(self) -> None:
        def body(tx: TreeTransaction) -> None:
            # The head row alone: a real write that changes nothing.
            tx.writes.append((Op.BLOB, ("0" * 64, b"")))

        try:
            await self._runtime.commit(body)
        except StorageRefusedError:
            self.kick()
        except (SessionPoisonedError, SessionClosedError):
            return

    async def _pass(self) -> bool:
        """One commit of derived work and reservations; False if nothing can be done now."""
        self._undo = []
        self._starts = []
        self._records = 0
        try:
            with trio.CancelScope(shield=True):
                await self._runtime.commit(self._fill)
        except StorageRefusedError:
            self._put_back()
            self.kick()
            return False
        except (SessionPoisonedError, SessionClosedError):
            self._put_back()
            return False
        for invocation in self._starts:
            self._runtime.start_invocation(invocation)
        return self._records > 0 or bool(self._starts)

    def _restore_kind(self, kind: str, queue: ReadyQueue) -> None:
        self._index.ready.setdefault(kind, queue)
        self._index.ring[kind] = None

    def _put_back(self) -> None:
        for put in reversed(self._undo):
            put()

    def _take(self, queue: deque[Any]) -> Any:
        item = queue.popleft()
        self._undo.append(lambda: queue.appendleft(item))
        return item

    def _room(self) -> bool:
        return self._records < PASS_RECORDS_MAX

    def _fill(self, tx: TreeTransaction) -> None:
        self._records = 0
        self._mark(tx)
        self._finish(tx)
        self._wake(tx)
        self._resume(tx)
        self._reserve_aborts(tx)
        if self._runtime.started:
            self._reserve_ready(tx)

    # --- marks ---------------------------------------------------------------------------

    def _mark(self, tx: TreeTransaction) -> None:
        index = self._index
        while index.join_marks and self._room():
            waiter = tx.view.task(self._take(index.join_marks))
            if waiter is None or waiter.wait is None or waiter.wait.on is None:
                continue
            for id in waiter.wait.on:
                self._append_mark(id, "join")
        while (index.marks or index.to_mark) and self._room():
            if index.to_mark:
                id, reason = self._take(index.to_mark)
                if tx.mark(id, reason):
                    self._records += 1
                continue
            self._expand(tx, self._take(index.marks))

    def _append_mark(self, id: int, reason: str) -> None:
        queue = self._index.to_mark
        queue.append((id, reason))
        self._undo.append(lambda: queue.remove((id, reason)))

    def _expand(self, tx: TreeTransaction, owner: int) -> None:
        """Queue what is directly below an owner with the intent, or below one that has it."""
        found = tx.view.find(owner)
        if found is None:
            return
        if not found.intent and not self._runtime.under_intent(tx.view, found):
            return
        for child in self._index.children.get(owner, ()):
            node = tx.view.find(child)
            if node is None or node.background:
                continue
            if isinstance(node, Node) and node.live:
                self._append_mark(child, "owner")
            else:
                # A conversation, or an ended task: transparent, what is below counts.
                self._index.marks.append(child)

    # --- ends ----------------------------------------------------------------------------

    def _finish(self, tx: TreeTransaction) -> None:
        ends = self._index.ends
        while ends and self._room():
            found = tx.view.task(self._take(ends))
            # A commit between that one and this pass may have put new work below.
            if found is None or found.status is not COMPLETING or found.below:
                continue
            self._end_upwards(tx, found.id)

    def _end_upwards(self, tx: TreeTransaction, id: int) -> None:
        """End a task, and in the same commit every owner above that only waited for it."""
        while True:
            node = tx.view.edit_task(id)
            tx.finish(node)
            self._records += 1
            if not self._room():
                return
            above = node.above
            while above is not None:
                found = tx.view.find(above)
                if found is None or found.below:
                    return
                if isinstance(found, Scope) or found.status is TERMINAL:
                    above = found.above
                    continue
                break
            if above is None:
                return
            owner = tx.view.task(above)
            if owner is None or owner.status is not COMPLETING:
                return
            id = above

    # --- wakings -------------------------------------------------------------------------

    def _wake(self, tx: TreeTransaction) -> None:
        wakes = self._index.wakes
        reasons: dict[int, str] = {}
        order = {"tasks": 0, "signal": 1, "deadline": 2}
        while wakes and self._room() and len(reasons) < PASS_RECORDS_MAX:
            id, reason = self._take(wakes)
            if reason == "task_deadline":
                if tx.mark(id, "deadline"):
                    self._records += 1
                continue
            if id not in reasons or order[reason] < order[reasons[id]]:
                reasons[id] = reason
        for id, reason in reasons.items():
            found = tx.view.task(id)
            if found is None or found.status is not WAITING or found.marked:
                continue
            node = tx.view.edit_task(id)
            node.status = PENDING
            node.woken_by = reason
            node.wait = None
            node.ready_us = tx.now_us()
            tx.writes.append((Op.WAIT_DELETE, (id,)))
            tx.put_state(node)
            self._records += 1
            self._try_reserve_woken(tx, node)

    def _try_reserve_woken(self, tx: TreeTransaction, node: Node) -> None:
        """Reserve a woken task in the same commit, unless others of its kind are before it."""
        queue = self._index.ready.get(node.kind)
        if (queue is None or not queue.size) and self._runtime.started:
            planned = sum(1 for start in self._starts if not start.aborting)
            if self._free_total() > planned and self._free(node.kind) > planned:
                self._reserve(tx, node)

    # --- reserving -----------------------------------------------------------------------

    def _resume(self, tx: TreeTransaction) -> None:
        """Tasks whose invocation ended because the storage refused: again, uncharged."""
        resumable = self._runtime.resumable
        while resumable and self._room():
            id = self._take(resumable)
            found = tx.view.task(id)
            if found is None or found.status is not RUNNING or id in self._index.running:
                continue
            if found.marked:
                self._index.abort_ready.append(id)
                continue
            self._reserve(tx, tx.view.edit_task(id))

    def _reserve_aborts(self, tx: TreeTransaction) -> None:
        queue = self._index.abort_ready
        while queue and self._room():
            id = self._take(queue)
            found = tx.view.task(id)
            if (
                found is None
                or not found.marked
                or found.below
                or found.status in (COMPLETING, TERMINAL)
                or id in self._index.running
                or any(start.task_id == id for start in self._starts)
            ):
                continue
            node = tx.view.edit_task(id)
            self._records += 1
            definition = self._runtime.snapshot().definition(node.kind)
            info = None if definition is None else definition_info(definition)
            if node.started_us is None or (info is not None and info.abort == "nothing_to_undo"):
                tx.settle(node, OutcomeRecord(status="aborted", reason=node.abort_reason))
                self._runtime.on_settled_by_scheduler(tx, node, "aborted", None)
                continue
            if definition is None or not self._runtime.can_take(definition, node):
                reason = "missing_definition" if definition is None else "definition_too_old"
                tx.settle(node, OutcomeRecord(status="orphaned", reason=reason))
                self._runtime.on_settled_by_scheduler(tx, node, "orphaned", None)
                continue
            if node.status is WAITING:
                tx.writes.append((Op.WAIT_DELETE, (id,)))
                node.wait = None
            self._start(tx, node, definition, aborting=True)

    def _reserve_ready(self, tx: TreeTransaction) -> None:
        index = self._index
        for kind in list(index.ring):
            queue = index.ready[kind]
            # A full kind leaves the ring without a scan, and comes back with a free slot.
            del index.ring[kind]
            while queue.size and self._room():
                planned = sum(1 for s in self._starts if not s.aborting)
                planned_kind = sum(1 for s in self._starts if not s.aborting and s.kind == kind)
                if self._free_total() <= planned or self._free(kind) <= planned_kind:
                    break
                top, id = queue.pop()
                self._undo.append(partial(queue.push_front, top, id))
                self._reserve_next(tx, id)
            if not queue.size:
                del index.ready[kind]
                self._undo.append(partial(self._restore_kind, kind, queue))
            elif not self._room():
                index.ring[kind] = None
                return

    def _reserve_next(self, tx: TreeTransaction, id: int) -> None:
        found = tx.view.task(id)
        if found is None or found.status is not PENDING or found.blocked or found.marked:
            return
        if any(start.task_id == id for start in self._starts):
            return
        if self._runtime.under_intent(tx.view, found):
            # The mark is on its way and takes it from here.
            return
        self._reserve(tx, tx.view.edit_task(id))

    def _reserve(self, tx: TreeTransaction, node: Node) -> None:
        definition = self._runtime.snapshot().definition(node.kind)
        self._records += 1
        blocked = self._runtime.refuses(definition, node)
        if blocked is None:
            assert definition is not None
            info = definition_info(definition)
            if info.version != node.version:
                blocked = self._migrate(tx, node, definition)
        if blocked is not None:
            node.status = PENDING
            node.blocked = blocked
            tx.put_state(node)
            return
        assert definition is not None
        self._start(tx, node, definition, aborting=False)

    def _start(
        self, tx: TreeTransaction, node: Node, definition: Task[Any, Any, Any], *, aborting: bool
    ) -> None:
        node.status = RUNNING
        node.blocked = None
        node.invocations += 1
        if node.started_us is None:
            node.started_us = tx.now_us()
        tx.put_state(node)
        self._starts.append(
            Invocation(node.id, node.invocations, definition, aborting, kind=node.kind)
        )

    def _migrate(
        self, tx: TreeTransaction, node: Node, definition: Task[Any, Any, Any]
    ) -> str | None:
        """Bring stored input and checkpoint to today's version; a blocked reason if it fails."""
        storage = self._runtime.session.storage
        info = definition_info(definition)
        stored = storage.task_checkpoint(node.id)
        input_text = storage.task_input(node.id)
        if stored is None or input_text is None:
            return "checkpoint_unreadable"
        tag, text = stored
        migrate: Any = definition
        try:
            before = (
                _json.loads_stored(input_text),
                {"phase": tag, "value": _json.loads_stored(text)},
            )
            input, checkpoint = migrate.migrate(*before, node.version)
            new_input = _json.dumps(input, path="$<migrated input>")
            new_tag = checkpoint["phase"]
            new_text = _json.dumps(checkpoint["value"], path="$<migrated checkpoint>")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            failed = MigrationError(f"task {node.id} ({node.kind})", show(error))
            self._runtime.report(node.id, failed)
            return "migration_failed"
        if new_tag not in info.by_tag:
            self._runtime.report(
                node.id, NotJsonError("$<migrated checkpoint>", f"no phase {show(new_tag)}")
            )
            return "migration_failed"
        node.version = info.version
        tx.writes += (
            (Op.TASK_INPUT, (node.id, new_input)),
            (Op.CHECKPOINT, (node.id, new_tag, new_text, tx.now_us())),
        )
        return None

    # --- timers --------------------------------------------------------------------------

    async def serve_timers(self) -> None:
        """Sleep until the earliest moment; re-check the wall clock, which may be stepped."""
        index = self._index
        while True:
            self._timer_wake = trio.Event()
            now = self._runtime.session.clock.now_us()
            index.due_timers(now)
            if index.wakes:
                self.kick()
            seconds = _CLOCK_POLL_SECONDS
            self._timer_at = None
            if index.timers:
                self._timer_at = index.timers[0][0]
                # One microsecond more: waking early by rounding would sleep again for nothing.
                seconds = min(seconds, (self._timer_at - now) / 1e6 + 1e-6)
                with trio.move_on_after(seconds):
                    await self._timer_wake.wait()
            else:
                await self._timer_wake.wait()
