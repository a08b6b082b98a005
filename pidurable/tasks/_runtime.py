"""The runtime: what stands on the session and runs tasks.

It is a participant of the commit line. Rules that refuse read `staged`, the tree with the bodies of
the open batch; starting, waking and deciding read `published`. Invocations run in its nursery.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import trio

from pidurable.errors import (
    InternalError,
    PidurableError,
    SessionPoisonedError,
)
from pidurable.records._codec import Codec
from pidurable.records._limits import STOP_REPORT_SECONDS
from pidurable.records._tasks import ErrorInfo, Outcome
from pidurable.session._seams import logger
from pidurable.session._session import Session
from pidurable.storage import Op
from pidurable.tasks._cycles import Cycles
from pidurable.tasks._definition import Task, definition_info
from pidurable.tasks._index import Index
from pidurable.tasks._run import Invocation, run_invocation
from pidurable.tasks._scheduler import Scheduler
from pidurable.tasks._transaction import TreeTransaction
from pidurable.tasks._tree import (
    PENDING,
    RUNNING,
    TERMINAL,
    AnyNode,
    Node,
    Scope,
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


class Definitions(Protocol):
    """What the runtime needs of a registry snapshot."""

    @property
    def codec(self) -> Codec: ...

    def definition(self, kind: str) -> Task[Any, Any, Any] | None: ...

    def nearest_kind(self, kind: str) -> str | None: ...


Settlement = Callable[[TreeTransaction, Node, str, ErrorInfo | None], None]


class StaticDefinitions:
    """Definitions without a registry: a fixed set."""

    def __init__(self, definitions: Sequence[Task[Any, Any, Any]], codec: Codec) -> None:
        self.codec = codec
        self._by_kind = {definition_info(each).name: each for each in definitions}

    def definition(self, kind: str) -> Task[Any, Any, Any] | None:
        return self._by_kind.get(kind)

    def nearest_kind(self, kind: str) -> str | None:
        return next(iter(difflib.get_close_matches(kind, self._by_kind, n=1)), None)


class Runtime:
    """Tasks of one session."""

    def __init__(self, session: Session, *, snapshot: Callable[[], Definitions]) -> None:
        self.session = session
        self.snapshot = snapshot
        self.published = View(None, self.load)
        self.staged = View(self.published, self.load)
        self.index = Index(
            self.published,
            top_of=self._top_of,
            unread=self.unread,
            now_us=session.clock.now_us,
        )
        self.cycles = Cycles(self.index)
        self.waits = Waits(self)
        self.invocations: dict[int, Invocation] = {}
        self.fresh: dict[int, tuple[str, str, str]] = {}
        self.attachments: dict[int, set[str]] = {}
        """What a task created by this process has: memos, signals, documents. Absent: unknown."""
        self.started = False
        self.closing = False
        self.settlement: list[Settlement] = []
        self.scheduler = Scheduler(self)
        self._signals: dict[int, int] = {}
        self._tops: dict[int, int] = {}
        self._nursery: trio.Nursery | None = None
        self._stopping = trio.Event()
        self._fatal: BaseException | None = None
        self.on_fatal: Callable[[], None] | None = None
        self._looked_at: Definitions = snapshot()
        """The definitions when blocked tasks were last looked at."""
        session.owner_conversation = self._conversation_of_task
        session.participants.insert(0, self)

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

    def encode_checkpoint(self, definition: Task[Any, Any, Any], value: Any) -> tuple[str, str]:
        """The stored tag and text of a checkpoint."""
        info = definition_info(definition)
        phase = info.phase_of(value)
        text = self.snapshot().codec.encode_text(
            value,
            path=f"$<{info.name} {phase.tag}>",
            bytes_max=self.session.settings.value_bytes_max,
        )
        return phase.tag, text

    # --- the tree ------------------------------------------------------------------------

    def load(self, id: int) -> AnyNode | None:
        """An ended task or a conversation that is not in memory (every live task is)."""
        row = self.session.storage.task(id)
        if row is not None:
            return Node(row) if row.status == TERMINAL else None
        found = None
        with contextlib.suppress(LookupError):
            found = self.session.staged_conversation(id)
        return None if found is None else Scope(found.id, found.owner)

    def _conversation_of_task(self, task_id: int) -> int | None:
        node = self.staged.task(task_id)
        if node is not None:
            return node.conversation
        row = self.session.storage.task(task_id)
        return None if row is None else row.conversation

    def _top_of(self, conversation: int) -> int:
        """The ownerless conversation at the top of a conversation's ownership."""
        found = self._tops.get(conversation)
        if found is not None:
            return found
        top = conversation
        while True:
            owner = self.session.staged_conversation(top).owner
            above = None if owner is None else self._conversation_of_task(owner)
            if above is None:
                break
            top = above
        if len(self._tops) > 100_000:
            self._tops.clear()
        self._tops[conversation] = top
        return top

    def ended_status(self, id: int) -> str | None:
        """How a task that is not in memory ended."""
        row = self.session.storage.task(id)
        return None if row is None else row.outcome_status

    def below_intent(self, node: AnyNode) -> bool:
        """Whether a published node is below a live owner with the intent to cancel.

        Owners never change and an intent is never taken back, so a walk that found none holds for
        everything it passed until there is a newer intent.
        """
        if not self.index.intents:
            return False
        version = self.index.intents_version
        if node.clean_at == version:
            return False
        passed = [node]
        for owner in self.published.owners(node):
            if owner.intent:
                return True
            if owner.clean_at == version:
                break
            passed.append(owner)
        for each in passed:
            each.clean_at = version
        return False

    def under_intent(self, view: View, node: AnyNode) -> bool:
        """The same in a view of the line, which may know of newer intents."""
        lower: View | None = view
        while lower is not None and lower is not self.published:
            if lower.intents:
                return any(owner.intent for owner in view.owners(node))
            lower = lower.lower
        published = self.published.find(node.id)
        return self.below_intent(node if published is None else published)

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
        if node.recoveries >= self.session.settings.recoveries_max:
            return "crash_loop"
        return None

    def registry_changed(self, codec: Codec) -> None:
        """A registry has published a snapshot; its subscribers are told synchronously."""
        self.session.codec = codec
        if self._nursery is not None and not self.closing:
            self._nursery.start_soon(self._guard, self.definitions_changed)

    async def definitions_changed(self) -> None:
        """A registry has published: look again at what is blocked, where the definition is new."""
        before, now = self._looked_at, self.snapshot()
        self._looked_at = now
        kinds = [
            kind
            for kind in self.index.blocked
            if (definition := now.definition(kind)) is not None
            and definition is not before.definition(kind)
        ]
        if not kinds:
            self.scheduler.kick()
            return

        def body(tx: TreeTransaction) -> None:
            for kind in kinds:
                for id in sorted(self.index.blocked.get(kind, ())):
                    found = tx.view.task(id)
                    if found is not None and found.blocked not in (None, "interrupted"):
                        tx.unblock(tx.view.edit_task(id))

        await self.commit(body)

    async def retry_task(self, task_id: int) -> None:
        """Let a blocked task run again, with its crashes forgiven. Others are left alone.

        Raises:
            UnknownTaskError: No such task.
        """
        await self.commit(lambda tx: tx.retry_task(task_id))

    # --- participant ---------------------------------------------------------------------

    def check_staged(self, tx: Any) -> None:
        """Nothing to refuse here: transactions check themselves against the staged tree."""

    def joined(self, tx: Any) -> None:
        if isinstance(tx, TreeTransaction) and tx.view.nodes:
            self.staged.nodes.update(tx.view.nodes)
            self.staged.intents = self.staged.intents or tx.view.intents
            self.cycles.stage(tx.view.nodes.values())

    def reverted(self) -> None:
        self.staged.nodes.clear()
        self.staged.intents = False
        self.cycles.unstage()

    def committed(self, tx: Any) -> None:
        if self.staged.nodes:
            self.reverted()
        if not isinstance(tx, TreeTransaction):
            return
        phase = tx.phase
        if phase is not None:
            if tx.next_checkpoint is not None:
                phase.reached = tx.next_checkpoint
            for name, text in tx.memos_made:
                phase.memos[name] = text
        for task_id, change in tx.signalled.items():
            self._signals[task_id] = self._signals.get(task_id, 0) + change
            if not self._signals[task_id]:
                del self._signals[task_id]
            if change > 0:
                self.index.signalled(task_id)
        if tx.fresh and len(self.fresh) < _FRESH_CACHED:
            self.fresh.update(tx.fresh)
            for id in tx.fresh:
                self.attachments.setdefault(id, set())
        if tx.created_by_host:
            self.start()
        if tx.view.nodes:
            self.index.adopt(tx.view.nodes.values())
            self.after_adoption()
        elif self.index.wakes:
            self.scheduler.kick()

    def after_adoption(self) -> None:
        index = self.index
        for id in index.released:
            self.scheduler.account(id)
            node = self.published.task(id)
            if node is not None and node.marked:
                index.abort_candidate(node)
        index.released.clear()
        for id in index.marked_running:
            invocation = self.invocations.get(id)
            if invocation is not None and not invocation.aborting:
                self._stop(invocation)
        index.marked_running.clear()
        for id in index.ended:
            self._signals.pop(id, None)
            self.fresh.pop(id, None)
            self.waits.task_ended(id)
        index.ended.clear()
        for id in index.idle_scopes:
            self.waits.conversation_idle(id)
        index.idle_scopes.clear()
        if not index.busy_roots:
            self.waits.all_idle()
        self.scheduler.timers_changed()
        if self.scheduler.has_work():
            self.scheduler.kick()

    def poisoned(self, error: SessionPoisonedError) -> None:
        self.reverted()
        for invocation in self.invocations.values():
            self._stop(invocation)
        self.waits.release()

    def refusing(self, refusing: bool) -> None:
        self.scheduler.refusing(refusing)

    # --- signals, attachments ------------------------------------------------------------

    def unread(self, task_id: int) -> int:
        return self._signals.get(task_id, 0)

    def set_unread(self, task_id: int, unread: int) -> None:
        self._signals[task_id] = unread

    def attach(self, task_id: int, what: str) -> None:
        has = self.attachments.get(task_id)
        if has is not None:
            has.add(what)

    # --- invocations ---------------------------------------------------------------------

    def start_invocation(self, invocation: Invocation) -> None:
        """Run an invocation whose reservation is durable.

        A mark that became durable while the reservation was in the storage counts: no phase begins.
        """
        assert self._nursery is not None
        task_id = invocation.task_id
        if not self._may_run(invocation):
            self._free_slot(task_id, invocation.kind)
            return
        self.invocations[task_id] = invocation
        self.index.running.add(task_id)
        self._free_slot(task_id, invocation.kind)
        invocation.started_at = trio.current_time()
        self._nursery.start_soon(self._run, invocation, name=f"{invocation.kind} {task_id}")

    def _may_run(self, invocation: Invocation) -> bool:
        node = self.published.task(invocation.task_id)
        if self.closing or node is None or node.status is not RUNNING:
            return False
        return invocation.aborting or not (node.marked or self.below_intent(node))

    def _free_slot(self, task_id: int, kind: str) -> None:
        """Account for the slot; one that was planned and is not held may be of use to others."""
        self.scheduler.account(task_id)
        self.index.ready.set_free(kind)
        self.scheduler.timers_changed()
        if self.scheduler.has_work():
            self.scheduler.kick()

    @trio.lowlevel.enable_ki_protection
    async def _run(self, invocation: Invocation) -> None:
        invocation.trio_task = trio.lowlevel.current_task()
        try:
            if self._may_run(invocation):
                await run_invocation(self, invocation)
        except (KeyboardInterrupt, SystemExit) as fatal:
            self._stop_host(fatal)
        except trio.Cancelled:
            raise
        except Exception as bug:
            logger.exception("the runtime failed on task %d", invocation.task_id)
            self.session.line.set_poison(
                SessionPoisonedError(self.session.storage.store, f"{InternalError(str(bug))}")
            )
        finally:
            self._joined(invocation)

    def _stop(self, invocation: Invocation) -> None:
        """Cancel an invocation's handler, and watch how long it takes to stop."""
        invocation.cancel()
        self._stopping.set()

    def _stop_host(self, fatal: BaseException) -> None:
        """KeyboardInterrupt and SystemExit of a handler close the harness, and fault nothing."""
        if self._fatal is None:
            self._fatal = fatal
        if self.on_fatal is not None:
            self.on_fatal()

    def _joined(self, invocation: Invocation) -> None:
        """The invocation's code has returned: free its slot, let the abort handler follow."""
        task_id = invocation.task_id
        if self.invocations.get(task_id) is invocation:
            del self.invocations[task_id]
            self.index.running.discard(task_id)
        node = self.published.task(task_id)
        if node is not None:
            if node.marked:
                self.index.abort_candidate(node)
            elif node.status is RUNNING and invocation.again:
                # The storage refused: the task stays at its checkpoint, uncharged, and its turn
                # comes again. Nothing can be written about it now.
                self.index.push_ready(node)
        self._free_slot(task_id, invocation.kind)

    def on_settled_by_scheduler(
        self, tx: TreeTransaction, node: Node, status: str, error: ErrorInfo | None
    ) -> None:
        """Outcomes that the scheduler writes itself: the agent layer settles its runs with them."""
        for settle in self.settlement:
            settle(tx, node, status, error)

    def report(self, task_id: int, error: BaseException | str) -> None:
        """Report something of a task that is worth a person's look, and ends nothing."""
        node = self.published.task(task_id)
        kind = node.kind if node is not None else "task"
        logger.warning("task %d (%s): %s", task_id, kind, error)

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

    def check_cycle(self, view: View, waiter: int, on: Sequence[int]) -> None:
        """Refuse a wait that could never end.

        Raises:
            WaitCycleError: With the whole path.
        """
        self.cycles.check(view, waiter, on)

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
        self._nursery = nursery
        nursery.start_soon(self._guard, self.scheduler.serve)
        nursery.start_soon(self._guard, self.scheduler.serve_timers)
        self.scheduler.kick()

    def begin_close(self) -> None:
        """Start nothing more and cancel what runs; joining it is the nursery's part."""
        self.closing = True
        self.session.line.refuse_new()
        for invocation in self.invocations.values():
            self._stop(invocation)

    @property
    def fatal(self) -> BaseException | None:
        """KeyboardInterrupt or SystemExit that left a handler."""
        return self._fatal

    def release_waiters(self) -> None:
        """Nobody is left waiting for a session that has closed."""
        self.waits.release()

    async def _guard(self, serve: Callable[[], Any]) -> None:
        try:
            await serve()
        except Exception as bug:
            logger.exception("the scheduler failed")
            problem = bug if isinstance(bug, PidurableError) else InternalError(repr(bug))
            self.session.line.set_poison(
                SessionPoisonedError(self.session.storage.store, str(problem))
            )

    async def report_stopping(self) -> None:
        """Name every handler that takes long to stop, again and again; it is never left behind."""
        while True:
            await self._stopping.wait()
            self._stopping = trio.Event()
            reports: dict[Invocation, int] = {}
            while stopping := [
                i for i in self.invocations.values() if i.stopping_since is not None
            ]:
                now = trio.current_time()
                due_at = []
                for invocation in stopping:
                    assert invocation.stopping_since is not None
                    count = reports.get(invocation, 0)
                    due = invocation.stopping_since + STOP_REPORT_SECONDS * (count + 1)
                    if now >= due:
                        reports[invocation] = count + 1
                        self._report_stopping(invocation, now - invocation.stopping_since)
                        due += STOP_REPORT_SECONDS
                    due_at.append(due)
                with trio.move_on_at(min(due_at)):
                    # Another one may be told to stop meanwhile.
                    await self._stopping.wait()
                    self._stopping = trio.Event()

    @staticmethod
    def _report_stopping(invocation: Invocation, seconds: float) -> None:
        logger.warning(
            "task %d (%s) has been stopping for %.0f s, at:\n%s",
            invocation.task_id,
            invocation.kind,
            seconds,
            invocation.stack(),
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
