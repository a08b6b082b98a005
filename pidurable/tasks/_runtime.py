"""The runtime: what stands on the session and runs tasks.

It is a participant of the commit line. Rules that refuse read `staged`, the tree with the bodies of
the open batch; starting, waking and deciding read `published`. Invocations run in its nursery.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import trio

from pidurable.errors import (
    InternalError,
    NoResultError,
    PidurableError,
    SessionClosedError,
    SessionPoisonedError,
    UnknownTaskError,
    WaitCycleError,
    WaitTimeoutError,
)
from pidurable.records import _codec, _json
from pidurable.records._codec import Codec
from pidurable.records._ids import TaskId
from pidurable.records._limits import STOP_REPORT_SECONDS
from pidurable.records._tasks import ErrorInfo, Outcome, OutcomeRecord, Status
from pidurable.session._seams import logger
from pidurable.session._session import Session
from pidurable.storage import Op
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

T = TypeVar("T")
R = TypeVar("R")

_FRESH_CACHED = 2_000


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
            ended_status=self._ended_status,
        )
        self.invocations: dict[int, Invocation] = {}
        self.resumable: deque[int] = deque()
        self.fresh: dict[int, tuple[str, str, str]] = {}
        self.attachments: dict[int, set[str]] = {}
        """What a task created by this process has: memos, signals, documents. Absent: unknown."""
        self.started = False
        self.closing = False
        self.settlement: list[Settlement] = []
        self.scheduler = Scheduler(self)
        self._signals: dict[int, int] = {}
        self._tops: dict[int, int] = {}
        self._waiting_hosts: dict[int, list[trio.Event]] = {}
        self._memory_waits: dict[int, dict[int, int]] = {}
        self._idle_events: dict[int, list[trio.Event]] = {}
        self._nursery: trio.Nursery | None = None
        self._fatal: BaseException | None = None
        self.on_fatal: Callable[[], None] | None = None
        self._blocked_codes = {"missing_definition", "definition_too_old", "migration_failed"}
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

    def _ended_status(self, id: int) -> str | None:
        row = self.session.storage.task(id)
        return None if row is None else row.outcome_status

    def below_intent(self, node: Node) -> bool:
        """Whether a published task is below a live owner with the intent to cancel."""
        if not self.index.intents:
            return False
        version = self.index.intents_version
        if node.clean_at == version:
            return False
        if any(owner.intent for owner in self.published.owners(node)):
            return True
        node.clean_at = version
        return False

    def under_intent(self, view: View, node: AnyNode) -> bool:
        """The same in a view of the line, which may know of newer intents."""
        return any(owner.intent for owner in view.owners(node))

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

    async def definitions_changed(self) -> None:
        """A registry has published: look again at what is blocked for want of a definition."""
        snapshot = self.snapshot()
        kinds = [k for k in self.index.blocked if snapshot.definition(k) is not None]
        if not kinds:
            self.scheduler.kick()
            return

        def body(tx: TreeTransaction) -> None:
            for kind in kinds:
                for id in sorted(self.index.blocked.get(kind, ())):
                    found = tx.view.task(id)
                    if found is None or found.blocked not in (
                        *self._blocked_codes,
                        "checkpoint_unreadable",
                    ):
                        continue
                    node = tx.view.edit_task(id)
                    node.blocked = None
                    node.ready_us = tx.now_us()
                    tx.put_state(node)

        await self.commit(body)

    # --- participant ---------------------------------------------------------------------

    def check_staged(self, tx: Any) -> None:
        """Nothing to refuse here: transactions check themselves against the staged tree."""

    def joined(self, tx: Any) -> None:
        if isinstance(tx, TreeTransaction) and tx.view.nodes:
            self.staged.nodes.update(tx.view.nodes)

    def reverted(self) -> None:
        self.staged.nodes.clear()

    def committed(self, tx: Any) -> None:
        if self.staged.nodes:
            self.staged.nodes.clear()
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
                self.attach(task_id, "signals")
                self.index.signalled(task_id)
        if tx.fresh and len(self.fresh) < _FRESH_CACHED:
            self.fresh.update(tx.fresh)
            self.attachments.update((id, set()) for id in tx.fresh)
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
            if node is not None and not node.below and node.marked:
                index.abort_candidate(node)
        index.released.clear()
        for id in index.marked_running:
            invocation = self.invocations.get(id)
            if invocation is not None and not invocation.aborting:
                invocation.cancel()
        index.marked_running.clear()
        for id in index.ended:
            self._signals.pop(id, None)
            self.fresh.pop(id, None)
            for event in self._waiting_hosts.pop(id, ()):
                event.set()
        index.ended.clear()
        for id in index.idle_scopes:
            for event in self._idle_events.pop(id, ()):
                event.set()
        index.idle_scopes.clear()
        if not index.busy_roots:
            for event in self._idle_events.pop(0, ()):
                event.set()
        self.scheduler.timers_changed()
        if self.scheduler.has_work():
            self.scheduler.kick()

    def poisoned(self, error: SessionPoisonedError) -> None:
        self.staged.nodes.clear()
        for invocation in self.invocations.values():
            invocation.cancel()
        for events in (*self._waiting_hosts.values(), *self._idle_events.values()):
            for event in events:
                event.set()

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
        """Run an invocation whose reservation is durable."""
        assert self._nursery is not None
        node = self.published.task(invocation.task_id)
        if self.closing or node is None or node.status is not RUNNING:
            return
        self.invocations[invocation.task_id] = invocation
        self.index.running.add(invocation.task_id)
        self.scheduler.account(invocation.task_id)
        invocation.started_at = trio.current_time()
        if node.marked and not invocation.aborting:
            # The mark became durable while the reservation was in the storage: no phase begins.
            invocation.cancel()
        self._nursery.start_soon(self._run, invocation, name=f"{node.kind} {node.id}")

    @trio.lowlevel.enable_ki_protection
    async def _run(self, invocation: Invocation) -> None:
        try:
            node = self.published.task(invocation.task_id)
            if invocation.aborting or (node is not None and not node.marked):
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
        self.scheduler.account(task_id)
        node = self.published.task(task_id)
        if node is not None:
            self.index.abort_candidate(node)
            if node.status is RUNNING and not node.marked and self.index.intents:
                self.resume_later(task_id)
        if self.scheduler.has_work():
            self.scheduler.kick()

    def resume_later(self, task_id: int) -> None:
        """The task stays at its checkpoint; it runs again once the storage accepts."""
        if task_id not in self.resumable:
            self.resumable.append(task_id)
        self.scheduler.kick()

    def on_settled_by_scheduler(
        self, tx: TreeTransaction, node: Node, status: str, error: ErrorInfo | None
    ) -> None:
        """Outcomes that the scheduler writes itself: the agent layer settles its runs with them."""
        for settle in self.settlement:
            settle(tx, node, status, error)

    def report(self, task_id: int, error: BaseException | str) -> None:
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
        node = self.published.task(task_id)
        if node is not None and node.live:
            if waiter is not None:
                self.check_cycle(self.published, waiter, (task_id,))
                held = self._memory_waits.setdefault(task_id, {})
                held[waiter] = held.get(waiter, 0) + 1
            event = trio.Event()
            self._waiting_hosts.setdefault(task_id, []).append(event)
            try:
                with trio.move_on_after(float("inf") if timeout is None else timeout) as scope:
                    await event.wait()
            finally:
                self._leave_memory_wait(task_id, waiter)
                waiting = self._waiting_hosts.get(task_id)
                if waiting is not None and event in waiting:
                    waiting.remove(event)
                    if not waiting:
                        del self._waiting_hosts[task_id]
            if scope.cancelled_caught and not event.is_set():
                assert timeout is not None
                raise WaitTimeoutError(f"the end of task {task_id}", timeout)
            self.check_serving()
        else:
            await trio.lowlevel.checkpoint()
        return self.outcome(task_id)

    def _leave_memory_wait(self, task_id: int, waiter: int | None) -> None:
        if waiter is None:
            return
        held = self._memory_waits.get(task_id)
        if held is not None:
            held[waiter] -= 1
            if not held[waiter]:
                del held[waiter]
            if not held:
                del self._memory_waits[task_id]

    def check_serving(self) -> None:
        """Raise if the session ended while somebody waited."""
        if self.session.line.poison is not None:
            raise copy.copy(self.session.line.poison)
        if self.closing:
            raise SessionClosedError(self.session.storage.store)

    def outcome(self, task_id: int) -> Outcome[Any]:
        """The outcome of an ended task.

        Raises:
            UnknownTaskError: No such task.
            NoResultError: It has not ended.
        """
        node = self.published.task(task_id)
        if node is not None and node.live:
            raise NoResultError(task_id, f"is {node.status.word}")
        if type(task_id) not in (int, TaskId) or not 0 < task_id < 2**63:
            raise UnknownTaskError(repr(task_id))
        text = self.session.storage.task_outcome(task_id)
        row = self.session.storage.task(task_id)
        if row is None:
            raise UnknownTaskError(task_id)
        if text is None:
            raise NoResultError(task_id, f"is {Status(row.status).word}")
        record: OutcomeRecord = _codec.decode_outcome(_json.loads_stored(text))
        snapshot = self.snapshot()
        definition = snapshot.definition(row.kind)
        decode: Callable[[Any], Any] | None = None
        if definition is not None:
            info = definition_info(definition)

            def read(value: Any) -> Any:
                return snapshot.codec.decode(value, info.result_type, path=f"$<{info.name} result>")

            decode = read
        return Outcome(task_id=task_id, record=record, decode=decode)

    def check_cycle(self, view: View, waiter: int, on: Sequence[int]) -> None:
        """Refuse a wait that could never end, with the path in the message.

        Backwards from the waiter: its owners wait for it, and so does whoever waits on it.
        """
        targets = set(on)
        came_from: dict[int, int] = {}
        pending = deque([waiter])
        seen = {waiter}
        if waiter in targets:
            raise WaitCycleError(self._path(view, [waiter, waiter]))
        while pending:
            current = pending.popleft()
            for depends in self._dependants(view, current):
                if depends in seen:
                    continue
                seen.add(depends)
                came_from[depends] = current
                if depends in targets:
                    path = [waiter, depends]
                    while path[-1] != waiter:
                        path.append(came_from[path[-1]])
                    raise WaitCycleError(self._path(view, path))
                pending.append(depends)

    def _dependants(self, view: View, id: int) -> list[int]:
        """Live tasks that cannot go on before `id` has ended."""
        found: list[int] = []
        node = view.task(id)
        if node is not None:
            for owner in view.owners(node):
                if isinstance(owner, Node) and owner.live:
                    found.append(owner.id)
                    break
        parked = (*self.index.waiters.get(id, ()), *self._memory_waits.get(id, ()))
        for waiter in parked:
            waiting = view.task(waiter)
            if waiting is None or not waiting.live:
                continue
            wait = waiting.wait
            if wait is not None and (wait.deadline_us is not None or wait.signals):
                continue
            found.append(waiter)
        for staged in self.staged.nodes.values():
            if (
                isinstance(staged, Node)
                and staged.wait is not None
                and id in (staged.wait.on or ())
                and staged.wait.deadline_us is None
                and not staged.wait.signals
            ):
                found.append(staged.id)
        return found

    @staticmethod
    def _path(view: View, ids: list[int]) -> str:
        parts: list[str] = []
        for index, id in enumerate(ids):
            node = view.task(id)
            kind = f" {node.kind}" if node is not None and index < len(ids) - 1 else ""
            parts.append(f"{id}{kind}")
        return " -> ".join(parts)

    async def wait_for_idle(self, conversation: int | None = None) -> None:
        """Wait until no ordinary live task is below a conversation (or below any ownerless one)."""
        key = conversation or 0
        while True:
            if conversation is None:
                busy = self.index.busy_roots > 0
            else:
                scope = self.published.find(conversation)
                busy = scope is not None and scope.below > 0
            if not busy:
                await trio.lowlevel.checkpoint()
                return
            event = trio.Event()
            self._idle_events.setdefault(key, []).append(event)
            await event.wait()
            self.check_serving()

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
        for invocation in self.invocations.values():
            invocation.cancel()

    @property
    def fatal(self) -> BaseException | None:
        """KeyboardInterrupt or SystemExit that left a handler."""
        return self._fatal

    def release_waiters(self) -> None:
        for events in (*self._waiting_hosts.values(), *self._idle_events.values()):
            for event in events:
                event.set()

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
        """Name every handler that takes long to stop; it is never left behind."""
        reported: dict[int, float] = {}
        while True:
            await trio.sleep(STOP_REPORT_SECONDS / 2)
            now = trio.current_time()
            for id, invocation in self.invocations.items():
                since = invocation.stopping_since
                if since is None or now - max(since, reported.get(id, 0)) < STOP_REPORT_SECONDS:
                    continue
                reported[id] = now
                logger.warning(
                    "task %d (%s) has been stopping for %.0f s", id, invocation.kind, now - since
                )

    def closing_writes(self) -> list[tuple[Op, tuple[Any, ...]]]:
        """Rows of the closing commit: what ran is pending from its checkpoint, uncharged."""
        writes: list[tuple[Op, tuple[Any, ...]]] = []
        for node in self.published.nodes.values():
            if isinstance(node, Node) and node.live and (node.status is RUNNING or node.recoveries):
                if node.status is RUNNING:
                    node.status = PENDING
                node.recoveries = 0
                writes.append((Op.TASK_STATE, node.state_row()))
        return writes
