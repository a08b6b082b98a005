"""Waits of the host, and of invocations that stay in memory: for the end of a task, and for idle.

Waiting is not owning: whoever leaves a wait changes nothing durable. An event is set once per wait,
by adoption alone, so nobody is told of something that is not durable.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from pidurable.tasks._definition import definition_info
from pidurable.tasks._tree import Node

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime

_EVERYTHING = 0
"""The key of those who wait until every ownerless conversation is idle. No id is 0."""


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
        leave: Callable[[], None] | None = None
        if waiter is not None:
            runtime.check_cycle(runtime.staged, waiter, (task_id,))
            leave = runtime.cycles.hold(waiter, task_id)
        try:
            with trio.move_on_after(float("inf") if timeout is None else timeout) as scope:
                await self._wait(self._tasks, task_id)
        finally:
            if leave is not None:
                leave()
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
            await self._wait(self._idle, conversation or _EVERYTHING)

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
            raise NoResultError(task_id, f"is {node.status.word}")
        storage = runtime.session.storage
        row = storage.task(task_id)
        if row is None:
            raise UnknownTaskError(task_id)
        text = storage.task_outcome(task_id)
        if row.status != Status.TERMINAL or text is None:
            # Stored a moment ago and not published yet: for everybody it has not ended.
            raise NoResultError(task_id, f"is {Status(row.status).word}")
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
