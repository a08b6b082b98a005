"""The runtime: what stands on the session and runs tasks.

It is a participant of the commit line. Rules that refuse read `staged`, the tree with the bodies of
the open batch; starting, waking and deciding read `published`. Invocations run in its nursery.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio

from pidurable.errors import (
    InternalError,
    PidurableError,
    SessionPoisonedError,
)
from pidurable.records._codec import Codec
from pidurable.records._tasks import ErrorInfo, Outcome
from pidurable.session._participants import Participant
from pidurable.session._seams import Blocking, ThreadBlocking, logger
from pidurable.session._session import Session
from pidurable.storage import Op
from pidurable.tasks._at_hand import AtHand
from pidurable.tasks._awaited import Kinds
from pidurable.tasks._cycles import Cycles
from pidurable.tasks._definition import DefinitionInfo, Task, definition_info
from pidurable.tasks._graph_watch import TaskGraphs
from pidurable.tasks._host import Host
from pidurable.tasks._installed import (
    Definitions as Definitions,
    StaticDefinitions as StaticDefinitions,
)
from pidurable.tasks._run import Invocation
from pidurable.tasks._runner import Runner
from pidurable.tasks._scheduler import Scheduler
from pidurable.tasks._session_tree import SessionTree
from pidurable.tasks._transaction import TreeTransaction
from pidurable.tasks._tree import (
    PENDING,
    RUNNING,
    Node,
    View,
)
from pidurable.tasks._waits import Waits

T = TypeVar("T")
R = TypeVar("R")

_FRESH_CACHED = 2_000

CODE_BLOCKS = frozenset(
    {"missing_definition", "definition_too_old", "migration_failed", "checkpoint_unreadable"}
)
"""Reasons that new code may lift."""


class _Anything:
    """What a task may have of which nothing is known."""

    def __contains__(self, what: object) -> bool:
        return True


_ANYTHING = _Anything()

Settlement = Callable[[TreeTransaction, Node, str, ErrorInfo | None], None]


class Runtime(SessionTree, Participant):
    """Tasks of one session."""

    def __init__(self, session: Session, *, snapshot: Callable[[], Definitions]) -> None:
        super().__init__(session)
        self.snapshot = snapshot
        # The code of tasks may block for as long as it likes; the session's own reads, for which a
        # commit may be holding the line, do not queue behind it.
        own = isinstance(session.blocking, ThreadBlocking)
        self.blocking: Blocking = ThreadBlocking() if own else session.blocking
        self.kinds = Kinds()
        self.cycles = Cycles(self.index, self.kinds)
        self.waits = Waits(self)
        self.graphs = TaskGraphs(self)
        self.runner = Runner(self)
        self.fresh: dict[int, tuple[str, str, str]] = {}
        self.at_hand = AtHand()
        self._attached: dict[int, set[str]] = {}
        """What tasks have: memos, signals, documents, keyed tasks. Ids only grow: whoever was
        created by this process and is not in here has nothing."""
        self._first_id = session.line.next_id
        self.at_once: frozenset[str] = frozenset()
        """Kinds whose tasks are reserved by the commits that make them ready, see `_at_once`."""
        self.started = False
        self.closing = False
        self.settlement: list[Settlement] = []
        self.host: Host | None = None
        """The harness, as tasks see it; set before anything runs."""
        self.on_intent: list[Callable[[TreeTransaction, Node], None]] = []
        """Told in the commit in which a task gets the intent to cancel what is below it."""
        self.scheduler = Scheduler(self)
        self.told: set[tuple[str, str, int, int]] = set()
        """Which tasks it was said of why they are blocked: kind, reason, both versions."""
        self._looked_at: Definitions = snapshot()
        """The definitions when blocked tasks were last looked at."""
        session.participants.put_first(self)

    # --- commits -------------------------------------------------------------------------

    async def commit(self, body: Callable[[TreeTransaction], T], *, flush: bool = True) -> T:
        """Run a body that awaits nothing as one commit of the host or the scheduler."""
        return await self.session.line.run_sync(TreeTransaction(self, flush=flush), body)

    @asynccontextmanager
    async def open_commit(self, *, place: str = "host") -> AsyncIterator[TreeTransaction]:
        """`async with` form of a host's commit."""
        tx = TreeTransaction(self)
        async with self.session.line.body(tx, place=place):
            yield tx

    def encode_checkpoint(self, info: DefinitionInfo, value: Any) -> tuple[str, str]:
        """The stored tag and text of a checkpoint."""
        phase = info.phase_of(value)
        text = self.snapshot().codec.encode_text(
            value,
            path=f"$<{info.name} {phase.tag}>",
            bytes_max=self.session.settings.value_bytes_max,
            setting="value_bytes_max",
        )
        return phase.tag, text

    # --- definitions ---------------------------------------------------------------------

    def can_take(self, definition: Task[Any, Any, Any], node: Node) -> bool:
        """Whether a definition can run a task: same version, or higher with `migrate`."""
        info = definition_info(definition)
        return info.version == node.version or (info.version > node.version and info.has_migrate)

    def refuses(self, definition: Task[Any, Any, Any] | None, node: Node) -> str | None:
        """The blocked reason that keeps this task from running now, or None."""
        if definition is None:
            return "missing_definition"
        info = definition_info(definition)
        if info.version < node.version:
            return "definition_too_old"
        if info.version > node.version and not info.has_migrate:
            return "migration_failed"
        return None

    def registry_changed(self, codec: Codec) -> None:
        """A registry has published a snapshot; its subscribers are told synchronously."""
        self.session.codec = codec
        self._look_again()

    async def definitions_changed(self) -> None:
        """Look again at what is blocked, where the installed definition is a new object."""
        self._look_again()
        await trio.lowlevel.checkpoint()

    def _look_again(self) -> None:
        """Queue the blocked tasks of new definitions; a pass lifts what blocks them."""
        before, now = self._looked_at, self.snapshot()
        self._looked_at = now

        def is_new(kind: str) -> bool:
            definition = now.definition(kind)
            return definition is not None and definition is not before.definition(kind)

        for kind, ids in self.index.blocked.items():
            if is_new(kind):
                self.index.to_unblock.extend(sorted(ids))
        # What the old code blocked in a commit that is on its way comes before the pass, too.
        for node in self.staged.nodes.values():
            if isinstance(node, Node) and node.blocked is not None and is_new(node.kind):
                self.index.to_unblock.append(node.id)
        self.scheduler.kick()

    async def retry_task(self, task_id: int) -> None:
        """Let a blocked task run again, with its crashes forgiven. Others are left alone.

        Raises:
            UnknownTaskError: No such task.
        """
        await self.commit(lambda tx: tx.retry_task(task_id))

    async def resume_task(self, task_id: int) -> None:
        """Let a task go on that a restart interrupted, with everything below it.

        Raises:
            UnknownTaskError: No such task.
            InvalidArgumentError: It is below another interrupted task; resume that one.
        """
        await self.commit(lambda tx: tx.resume_task(task_id))

    # --- participant ---------------------------------------------------------------------

    def joined(self, tx: Any) -> None:
        if not isinstance(tx, TreeTransaction):
            return
        for task_id, change in tx.signalled.items():
            self.staged_signals[task_id] = self.staged_signals.get(task_id, 0) + change
        if tx.memos_made and tx.phase is not None:
            task_id = tx.phase.task_id
            self.staged_memos[task_id] = self.staged_memos.get(task_id, 0) + len(tx.memos_made)
        if tx.starts is not None:
            self.scheduler.joined(tx.starts)
        if tx.view.nodes:
            self.staged.nodes.update(tx.view.nodes)
            self.staged.intents = self.staged.intents or tx.view.intents
            self.cycles.stage(self.staged, tx.view.nodes)

    def reverted(self) -> None:
        self._unstage()
        self.scheduler.reverted()

    def _unstage(self) -> None:
        """The batch was published, or failed: nothing is staged any more."""
        if self.staged.nodes:
            self.staged.nodes.clear()
            self.staged.intents = False
            self.cycles.unstage()
        if self.staged_signals:
            self.staged_signals.clear()
        if self.staged_memos:
            self.staged_memos.clear()

    def committed(self, tx: Any) -> None:
        self._unstage()
        if not isinstance(tx, TreeTransaction):
            return
        phase, changed = tx.phase, tx.view.nodes
        if phase is not None:
            if tx.next_checkpoint is not None:
                phase.reached = tx.next_checkpoint
            if tx.memos_made:
                phase.memos.update(tx.memos_made)
            # A commit that has not changed its task has decided nothing.
            decided = changed.get(phase.task_id)
            if isinstance(decided, Node) and decided.status is not RUNNING:
                if tx.parked_at is not None and phase.input_text is not None:
                    texts = (phase.input_text, *tx.parked_at)
                    self.at_hand.parked(phase.task_id, *texts, phase.memos)
                self.runner.decided(phase.task_id)
        if tx.signalled:
            self._signalled(tx.signalled)
        if tx.removal is not None:
            self.at_hand.forget()
        if tx.fresh and len(self.fresh) < _FRESH_CACHED:
            self.fresh.update(tx.fresh)
        if tx.created_by_host:
            self.start()
        if changed:
            self.index.adopt(changed.values())
            if tx.starts is not None:
                self.scheduler.adopted(tx.starts)
            self.after_adoption(tx.outcomes)
            if tx.starts is not None:
                self.scheduler.published(tx.starts, at_once=tx.reserves)
        elif self.index.wakes:
            self.scheduler.kick()
        if self.graphs.followed:
            self.graphs.committed(tx)

    def _signalled(self, changes: Mapping[int, int]) -> None:
        """So many more signals of these tasks are unread, or so many fewer."""
        for task_id, change in changes.items():
            self._signals[task_id] = self._signals.get(task_id, 0) + change
            if not self._signals[task_id]:
                del self._signals[task_id]
            if change > 0:
                self.index.signalled(task_id)

    def settled(self, ids: Iterable[int]) -> None:
        """What participants keep has settled by the commit that is being published."""
        for id in ids:
            self.index.settled(id)
        if self.index.wakes:
            self.scheduler.kick()

    def after_adoption(self, outcomes: Mapping[int, str]) -> None:
        """Do what follows from what was adopted; `outcomes` were decided by the same commit."""
        index = self.index
        for id in index.released:
            self.scheduler.account(id)
        index.released.clear()
        if index.marked_running:
            for id in index.marked_running:
                self.runner.stop_phase(id)
            index.marked_running.clear()
        if index.ended:
            for node in index.ended:
                self._ended(node, outcomes.get(node.id))
            index.ended.clear()
        if index.idle_scopes:
            for id in index.idle_scopes:
                self.waits.conversation_idle(id)
            index.idle_scopes.clear()
        if not index.busy_roots:
            self.waits.all_idle()
        self.scheduler.timers_changed()
        if self.scheduler.has_work():
            self.scheduler.kick()

    def _ended(self, node: Node, outcome: str | None) -> None:
        """A task has ended: keep nothing of it but its outcome, and tell who waits."""
        id = node.id
        self._signals.pop(id, None)
        self.fresh.pop(id, None)
        self._attached.pop(id, None)
        self.at_hand.ended(id, node.kind, outcome)
        self.waits.task_ended(node, outcome)
        self.session.task_ended(id)

    def poisoned(self, error: SessionPoisonedError) -> None:
        self.reverted()
        self.runner.stop_all()
        self.release_waiters()

    def refusing(self, refusing: bool) -> None:
        self.scheduler.refusing(refusing)

    # --- signals, attachments ------------------------------------------------------------

    def attach(self, task_id: int, what: str) -> None:
        """Note what a task has, or may have if the commit that gives it fails."""
        if task_id >= self._first_id:
            self._attached.setdefault(task_id, set()).add(what)

    def attached(self, task_id: int) -> Container[str]:
        """What a task may have: memos, signals, documents, keyed tasks of its own."""
        return _ANYTHING if task_id < self._first_id else self._attached.get(task_id, ())

    # --- invocations ---------------------------------------------------------------------

    @property
    def invocations(self) -> dict[int, Invocation]:
        """The running invocations, by task."""
        return self.runner.invocations

    def on_settled_by_scheduler(
        self, tx: TreeTransaction, node: Node, status: str, error: ErrorInfo | None
    ) -> None:
        """Outcomes that the scheduler writes itself: the agent layer settles its runs with them."""
        for settle in self.settlement:
            settle(tx, node, status, error)

    def intent_began(self, tx: TreeTransaction, node: Node) -> None:
        """A task of this transaction is marked, or holds an outcome other than completed."""
        for told in self.on_intent:
            told(tx, node)

    def report(self, task_id: int, error: BaseException | str, *, kind: str | None = None) -> None:
        """Report something of a task that is worth a person's look, and ends nothing.

        Args:
            task_id: The task.
            error: What there is to say.
            kind: Its kind, where it may have left memory by now, or is not there yet.
        """
        node = self.published.task(task_id) if kind is None else None
        if node is not None:
            kind = node.kind
        logger.warning("task %d (%s): %s", task_id, kind or "ended", error)

    def abort_reason(self, task_id: int) -> str | None:
        node = self.published.task(task_id)
        return None if node is None else node.abort_reason

    # --- waiting -------------------------------------------------------------------------

    async def wait_for_task(
        self,
        task_id: int,
        *,
        waiter: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Outcome[Any]:
        """Wait until a task has ended. Leaving the wait changes nothing durable."""
        if waiter is None:
            self.start()
        return await self.waits.for_task(task_id, waiter=waiter, timeout=timeout)

    def check_serving(self) -> None:
        """Raise if the session ended while somebody waited."""
        self.waits.check_serving()

    def outcome(self, task_id: int) -> Outcome[Any]:
        """The outcome of an ended task.

        Raises:
            UnknownTaskError: No such task.
            NoResultError: It has not ended.
        """
        return self.waits.outcome(task_id)

    def check_cycle(
        self,
        view: View,
        waiter: int,
        on: Sequence[int],
        *,
        others: Sequence[int] = (),
        tx: TreeTransaction | None = None,
    ) -> None:
        """Refuse a wait that could never end; `tx` is the commit that makes it, if one does.

        Raises:
            WaitCycleError: With the whole path.
        """
        self.cycles.check(view, waiter, on, others=others, tx=tx)

    async def wait_for_idle(self, conversation: int | None = None) -> None:
        """Wait until no ordinary live task is below a conversation (or below any ownerless one)."""
        self.start()
        await self.waits.for_idle(conversation)

    # --- life ----------------------------------------------------------------------------

    def start(self) -> None:
        """Let tasks run. Before this only aborts, signals and decisions take effect."""
        if not self.started:
            self.started = True
            self.scheduler.kick()

    def serve(self, nursery: trio.Nursery) -> None:
        """Start the scheduler in `nursery`; invocations will live in it too."""
        self.runner.nursery = nursery
        nursery.start_soon(self._guard, self.scheduler.serve)
        nursery.start_soon(self._guard, self.scheduler.serve_timers)
        nursery.start_soon(self._guard, self.scheduler.suspects.serve)
        self.scheduler.kick()

    def begin_close(self) -> None:
        """Start nothing more and cancel what runs; joining it is the nursery's part."""
        self.closing = True
        self.session.line.refuse_new()
        self.runner.stop_all()

    def release_waiters(self) -> None:
        """Nobody is left waiting for a session that has closed."""
        self.at_hand.forget()
        self.waits.release()

    @trio.lowlevel.enable_ki_protection
    async def _guard(self, serve: Callable[[], Any]) -> None:
        try:
            await serve()
        except Exception as bug:
            logger.exception("the scheduler failed")
            problem = bug if isinstance(bug, PidurableError) else InternalError(repr(bug))
            self.session.line.set_poison(
                SessionPoisonedError(self.session.storage.store, str(problem))
            )

    def closing_writes(self) -> list[tuple[Op, tuple[Any, ...]]]:
        """Rows of the closing commit: what ran is pending from its checkpoint, uncharged."""
        writes: list[tuple[Op, tuple[Any, ...]]] = []
        for id in sorted(self.index.active):
            node = self.published.edit_task(id)
            if node.status is RUNNING:
                node.status = PENDING
                node.recoveries = 0
            elif node.blocked is None:
                node.recoveries = 0
            writes.append((Op.TASK_STATE, node.state_row()))
        return writes
