"""Waits of the host, and of invocations that stay in memory: for the end of a task, and for idle.

Waiting is not owning: whoever leaves a wait changes nothing durable. An event is set once per wait,
by adoption alone, so nobody is told of something that is not durable.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

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
from pidurable.records._checks import is_id
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


class Waits:
    """Who waits in memory, by task and by conversation."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tasks: dict[int, dict[trio.Event, None]] = {}
        self._idle: dict[int, dict[trio.Event, None]] = {}

    # --- telling -------------------------------------------------------------------------

    def task_ended(self, task_id: int) -> None:
        for event in self._tasks.pop(task_id, ()):
            event.set()

    def conversation_idle(self, conversation: int) -> None:
        for event in self._idle.pop(conversation, ()):
            event.set()

    def all_idle(self) -> None:
        self.conversation_idle(_EVERYTHING)

    def release(self) -> None:
        """The session serves nothing more: everybody looks why."""
        for table in (self._tasks, self._idle):
            for events in table.values():
                for event in events:
                    event.set()
            table.clear()

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
        if waiter is None:
            found = _INVOCATION.get()
            waiter = found[1] if found is not None and found[0] is runtime else None
        if waiter is None or bounded:
            yield
            return
        runtime.check_cycle(runtime.staged, waiter, (awaited,), others=others)
        leave = runtime.cycles.hold(waiter, awaited)
        runtime.scheduler.suspects.holds(waiter)
        try:
            yield
        finally:
            leave()

    async def for_task(
        self,
        task_id: int,
        *,
        waiter: int | None,
        timeout: float | None,  # noqa: ASYNC109
    ) -> Outcome[Any]:
        """Wait for the end of a task; `waiter` is the task whose invocation waits."""
        runtime = self._runtime
        if not is_id(task_id):
            raise UnknownTaskError(show(task_id))
        node = runtime.published.task(task_id)
        if node is None or not node.live:
            await trio.lowlevel.checkpoint()
            return self.outcome(task_id)
        runtime.check_serving()
        with self.holding(task_id, waiter=waiter, bounded=timeout is not None):
            with trio.move_on_after(float("inf") if timeout is None else timeout) as scope:
                await self._wait(self._tasks, task_id)
        node = runtime.published.task(task_id)
        if node is not None and node.live:
            runtime.check_serving()
            assert scope.cancelled_caught
            raise WaitTimeoutError(f"the end of task {task_id}", timeout or 0.0)
        return self.outcome(task_id)

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
        storage = runtime.session.storage
        # In this order: a tree may go between the two, and with it the row.
        text = storage.task_outcome(task_id)
        row = storage.task(task_id)
        if row is None:
            raise unknown_task(storage, task_id)
        if row.status != Status.TERMINAL or text is None:
            # Stored a moment ago and not published yet: for everybody it has not ended.
            raise NoResultError(task_id, f"is {Status(row.status).word}", _NOT_ENDED)
        try:
            record: OutcomeRecord = _codec.decode_outcome(_json.loads_stored(text))
        except NotJsonError as error:
            raise StorageCorruptError(
                storage.store, f"the outcome of task {task_id} cannot be read: {error}"
            ) from error
        snapshot = runtime.snapshot()
        definition = snapshot.definition(row.kind)
        decode: Callable[[Any], Any] | None = None
        if definition is not None:
            info = definition_info(definition)

            def read(value: Any) -> Any:
                return snapshot.codec.decode(value, info.result_type, path=f"$<{info.name} result>")

            decode = read
        return Outcome(task_id=task_id, record=record, decode=decode)
