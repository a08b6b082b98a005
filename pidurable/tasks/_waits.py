"""Waits of the host, and of invocations that stay in memory: for the end of a task, and for idle.

Waiting is not owning: whoever leaves a wait changes nothing durable. Who waits is woken once, by
adoption alone, so nobody is told of something that is not durable. Who waits for a task is given
the outcome that the adopted commit has stored, as text: thousands that wait at once need not ask
the storage for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import outcome
import trio

from pidurable.errors import (
    NoResultError,
    NotJsonError,
    SessionClosedError,
    StorageCorruptError,
    UnknownTaskError,
    WaitTimeoutError,
    show,
)
from pidurable.records import _codec, _json
from pidurable.records._checks import check_timeout, is_id
from pidurable.records._tasks import Outcome, OutcomeRecord, Status
from pidurable.session._stubs import unknown_task
from pidurable.tasks._definition import definition_info
from pidurable.tasks._tree import Node

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime

_EVERYTHING = 0
"""The key of those who wait until every ownerless conversation is idle. No id is 0."""


_INVOCATION: ContextVar[tuple[Runtime, int] | None] = ContextVar("pidurable_task", default=None)
"""The task whose code is running, wherever it was called from; the host's code has none."""


def enter_invocation(runtime: Runtime, task_id: int) -> None:
    """Say that the calling trio task, and what it starts, runs the code of a task."""
    _INVOCATION.set((runtime, task_id))


_NOT_ENDED = "wait for its end first, with `ctx.wait(on=[...])` or `wait_for_task`"


class _Waiter:
    """A trio task that waits for the end of a task; called by trio, it leaves.

    One object and no closure: thousands may wait at a time, and the garbage collector walks them.
    """

    __slots__ = ("_awaited", "_table", "trio_task")

    def __init__(self, table: _Waiters, awaited: int) -> None:
        self.trio_task = trio.lowlevel.current_task()
        self._table = table
        self._awaited = awaited

    def __call__(self, _: Any) -> trio.lowlevel.Abort:
        waiting = self._table[self._awaited]
        if waiting is self:
            del self._table[self._awaited]
        else:
            assert isinstance(waiting, dict)
            del waiting[self]
            if not waiting:
                del self._table[self._awaited]
        return trio.lowlevel.Abort.SUCCEEDED


_Waiters = dict[int, _Waiter | dict[_Waiter, None]]
"""By the task that is awaited: nearly always one, or all of them in order."""


def _each(waiting: _Waiter | dict[_Waiter, None]) -> Iterable[_Waiter]:
    return waiting if isinstance(waiting, dict) else (waiting,)


class Waits:
    """Who waits in memory, by task and by conversation."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tasks: _Waiters = {}
        self._idle: dict[int, dict[trio.Event, None]] = {}

    # --- telling -------------------------------------------------------------------------

    def task_ended(self, node: Node, stored: str | None) -> None:
        """A task has ended; `stored` is its outcome where the commit that ended it decided it."""
        waiting = self._tasks.pop(node.id, None)
        if waiting is not None:
            told = None if stored is None else (node.kind, stored)
            for waiter in _each(waiting):
                trio.lowlevel.reschedule(waiter.trio_task, outcome.Value(told))

    def conversation_idle(self, conversation: int) -> None:
        for event in self._idle.pop(conversation, ()):
            event.set()

    def all_idle(self) -> None:
        self.conversation_idle(_EVERYTHING)

    def release(self) -> None:
        """The session serves nothing more: everybody looks why."""
        for waiting in self._tasks.values():
            for waiter in _each(waiting):
                trio.lowlevel.reschedule(waiter.trio_task)
        self._tasks.clear()
        for events in self._idle.values():
            for event in events:
                event.set()
        self._idle.clear()

    def _enter(self, task_id: int) -> _Waiter:
        """Let the calling trio task be woken by the end of a live task.

        It is woken with the kind and the outcome of that task, or None where they are not at hand.
        """
        waiter = _Waiter(self._tasks, task_id)
        others = self._tasks.setdefault(task_id, waiter)
        if isinstance(others, dict):
            others[waiter] = None
        elif others is not waiter:
            self._tasks[task_id] = {others: None, waiter: None}
        return waiter

    @staticmethod
    async def _wait(table: dict[int, dict[trio.Event, None]], key: int) -> None:
        event = trio.Event()
        table.setdefault(key, {})[event] = None
        try:
            await event.wait()
        finally:
            events = table.get(key)
            if events is not None and events.pop(event, event) is None and not events:
                del table[key]

    # --- waiting -------------------------------------------------------------------------

    @contextmanager
    def holding(
        self,
        awaited: int,
        *,
        waiter: int | None = None,
        others: Sequence[int] = (),
        bounded: bool = False,
    ) -> Iterator[None]:
        """Note, for as long as it lasts, that the code of a task waits in memory.

        Args:
            awaited: What it waits for: a task, a conversation, or what upper layers settle.
            waiter: The task; the one whose code calls where None. A host's wait is not noted.
            others: As for `check_cycle`.
            bounded: Whether the wait ends by itself, which makes it no edge.

        Raises:
            WaitCycleError: It could never end.
        """
        runtime = self._runtime
        waiter = self._waiter(waiter)
        if waiter is None or bounded:
            yield
            return
        self._hold(waiter, awaited, others)
        try:
            yield
        finally:
            runtime.cycles.leave(waiter, awaited)

    def _waiter(self, given: int | None) -> int | None:
        """The task whose code waits: the one given, or whose code calls."""
        if given is not None:
            return given
        found = _INVOCATION.get()
        return found[1] if found is not None and found[0] is self._runtime else None

    def _hold(self, waiter: int, awaited: int, others: Sequence[int] = ()) -> None:
        """Note that the code of a task waits in memory, until `Cycles.leave` is told.

        Raises:
            WaitCycleError: It could never end.
        """
        runtime = self._runtime
        runtime.check_cycle(runtime.staged, waiter, (awaited,), others=others)
        runtime.cycles.hold(waiter, awaited)
        runtime.scheduler.suspects.holds(waiter)

    async def for_task(
        self,
        task_id: int,
        *,
        waiter: int | None,
        timeout: float | None,  # noqa: ASYNC109
    ) -> Outcome[Any]:
        """Wait for the end of a task; `waiter` is the task whose invocation waits."""
        runtime = self._runtime
        check_timeout(timeout)
        if not is_id(task_id):
            raise UnknownTaskError(show(task_id))
        node = runtime.published.task(task_id)
        if node is None or not node.live:
            await trio.lowlevel.checkpoint()
            return self.outcome(task_id)
        runtime.check_serving()
        if timeout is not None:
            told = await self._for_end_within(task_id, timeout)
        else:
            waiter = self._waiter(waiter)
            if waiter is not None:
                self._hold(waiter, task_id)
            try:
                told = await trio.lowlevel.wait_task_rescheduled(self._enter(task_id))
            finally:
                if waiter is not None:
                    runtime.cycles.leave(waiter, task_id)
        if told is not None:
            return self._read(task_id, *told)
        node = runtime.published.task(task_id)
        if node is not None and node.live:
            # It was released: the session serves nothing more.
            runtime.check_serving()
        return self.outcome(task_id)

    async def _for_end_within(self, task_id: int, timeout: float) -> tuple[str, str] | None:  # noqa: ASYNC109
        """The same for so many seconds: such a wait is no edge, as it ends by itself."""
        told: tuple[str, str] | None = None
        with trio.move_on_after(check_timeout(timeout)) as scope:
            told = await trio.lowlevel.wait_task_rescheduled(self._enter(task_id))
        node = self._runtime.published.task(task_id)
        if scope.cancelled_caught and node is not None and node.live:
            self._runtime.check_serving()
            raise WaitTimeoutError(f"the end of task {task_id}", timeout)
        return told

    async def for_idle(self, conversation: int | None) -> None:
        """Wait until a conversation (or every ownerless one) has no ordinary live work below."""
        runtime = self._runtime
        if conversation is not None:
            runtime.session.conversation(conversation)
        while True:
            runtime.check_serving()
            if conversation is None:
                busy = runtime.index.busy_roots > 0
            else:
                scope = runtime.published.find(conversation)
                busy = scope is not None and scope.below > 0
            if not busy:
                await trio.lowlevel.checkpoint()
                return
            if conversation is None:
                await self._wait(self._idle, _EVERYTHING)
            else:
                with self.holding(conversation):
                    await self._wait(self._idle, conversation)

    def check_serving(self) -> None:
        """Raise if the session has ended."""
        runtime = self._runtime
        if runtime.session.line.poison is not None:
            raise copy.copy(runtime.session.line.poison)
        if runtime.closing:
            raise SessionClosedError(runtime.session.storage.store)

    # --- outcomes ------------------------------------------------------------------------

    def outcome(self, task_id: int) -> Outcome[Any]:
        """Read the outcome of an ended task."""
        runtime = self._runtime
        if not is_id(task_id):
            raise UnknownTaskError(show(task_id))
        node = runtime.published.task(task_id)
        if isinstance(node, Node) and node.live:
            raise NoResultError(task_id, f"is {node.status.word}", _NOT_ENDED)
        kept = runtime.at_hand.outcome(task_id)
        if kept is not None:
            return self._read(task_id, *kept)
        storage = runtime.session.storage
        # In this order: a tree may go between the two, and with it the row.
        text = storage.task_outcome(task_id)
        row = storage.task(task_id)
        if row is None:
            raise unknown_task(storage, task_id)
        if row.status != Status.TERMINAL or text is None:
            # Stored a moment ago and not published yet: for everybody it has not ended.
            raise NoResultError(task_id, f"is {Status(row.status).word}", _NOT_ENDED)
        return self._read(task_id, row.kind, text)

    def _read(self, task_id: int, kind: str, text: str) -> Outcome[Any]:
        """The outcome of a task, from what is stored of it."""
        runtime = self._runtime
        try:
            record: OutcomeRecord = _codec.decode_outcome(_json.loads_stored(text))
        except NotJsonError as error:
            raise StorageCorruptError(
                runtime.session.storage.store,
                f"the outcome of task {task_id} cannot be read: {error}",
            ) from error
        snapshot = runtime.snapshot()
        definition = snapshot.definition(kind)
        decode: Callable[[Any], Any] | None = None
        if definition is not None:
            info = definition_info(definition)

            def read(value: Any) -> Any:
                return snapshot.codec.decode(value, info.result_type, path=f"$<{info.name} result>")

            decode = read
        return Outcome(task_id=task_id, record=record, decode=decode)
