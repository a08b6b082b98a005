"""The part of a harness that is about tasks: waiting for them, steering and looking at them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pidurable.errors import InvalidArgumentError, show
from pidurable.harness._command_kinds import lifted
from pidurable.records._checks import check_name, check_timeout, is_id
from pidurable.records._ids import TaskId
from pidurable.records._tasks import Outcome, OutcomeStatus, TaskRecord
from pidurable.session._watch import Watch
from pidurable.tasks._explain import Explanation, explain
from pidurable.tasks._graph import TaskGraph
from pidurable.tasks._inspect import InspectedTask, inspect_page
from pidurable.tasks._live_facts import LiveFacts
from pidurable.tasks._task_record import stored_task, task_record
from pidurable.tasks._transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.session._session import Session
    from pidurable.tasks._runtime import Runtime

ResultT = TypeVar("ResultT")


class TaskCalls:
    """What is done to tasks from outside, and asked about them."""

    session: Session
    _runtime: Runtime

    if TYPE_CHECKING:

        def start(self) -> None:
            """Let tasks run; of the harness."""

    async def wait_for_task(
        self,
        task_id: TaskId[ResultT],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        start: bool = True,
    ) -> Outcome[ResultT]:
        """Wait until a task has ended and return its outcome.

        Waiting is not owning: when this call is cancelled or times out, the task goes on.

        Args:
            task_id: Any task of this session.
            timeout: Most seconds to wait; None waits for ever, 0 only looks.
            start: Start the harness, so that the task can end. False is for aborts, which go on
                in a harness that has not been started, without letting other work begin.

        Raises:
            UnknownTaskError: This session has no such task.
            WaitTimeoutError: The time ran out; waiting again is fine. (Also a trio.TooSlowError.)
            InvalidArgumentError: The timeout is negative, or no number; nothing was started.
            SessionPoisonedError: The storage failed meanwhile; reopen it and wait again.
        """
        check_timeout(timeout)
        if start:
            self.start()
        return await self._runtime.waits.for_task(task_id, waiter=None, timeout=timeout)

    async def abort_task(self, task_id: int, reason: str = "user") -> OutcomeStatus | None:
        """Store the request to abort a task; what is below it is aborted first.

        Returns:
            The outcome's status if the task has ended already, and nothing was changed.

        Raises:
            UnknownTaskError: This session has no such task.
            InvalidArgumentError: The reason is empty, or longer than 1,000 characters.
        """

        def body(tx: TreeTransaction) -> None:
            tx.abort_task(task_id, reason)

        await self._runtime.commit(body)
        row = self.session.storage.task(task_id)
        status = None if row is None else row.outcome_status
        return cast("OutcomeStatus | None", status)

    async def signal(
        self, task_id: int, name: str, payload: Any = None, *, key: str | None = None
    ) -> None:
        """Store a signal for a live task: a message that it reads in a commit of its own.

        Signals keep their order and survive restarts. A task that waits with `signals=True` wakes
        at the first unread one; for any other it lies there until `tx.receive()`. They are dropped
        when the task ends. The harness need not have been started, and is not started by it.

        Args:
            task_id: A live task of this session.
            name: What kind of message it is; 1 to 512 characters.
            payload: Strict JSON, at most 256 KiB encoded.
            key: Send it once: the same key again, read or not, stores nothing.

        Raises:
            UnknownTaskError: This session has no such task.
            TaskEndedError: It has ended; `status` says how.
            SignalRefusedError: The payload is too large, or 1,000 signals are unread.
            NotJsonError: The payload is not strict JSON.
        """
        await self._runtime.commit(lambda tx: tx.signal(task_id, name, payload, key=key))

    async def retry_task(self, task_id: int) -> bool:
        """Let a blocked task be looked at again, with its crashes forgiven.

        It runs if what blocked it is gone, and is blocked again if not. Like every commit of tasks
        it may be made before the harness is started, and starts nothing by itself.

        Args:
            task_id: Any task of this session.

        Returns:
            Whether it was blocked; one that was not, or has ended, is left alone.

        Raises:
            UnknownTaskError: This session has no such task.
            InvalidArgumentError: A restart interrupted a task above it; resume that one.
        """
        return await self._lift(task_id, lambda tx: tx.retry_task)

    async def resume_task(self, task_id: int) -> bool:
        """Let a task go on that a restart interrupted, with everything below it.

        Interrupted is what was created with `on_restart="wait"`, and what is below it. What is
        below follows in the scheduler's next commits. Like `retry_task` it starts nothing itself;
        in a harness that is never started it counts for the next one that is.

        Args:
            task_id: Any task of this session.

        Returns:
            Whether it was interrupted; one that was not, or has ended, is left alone.

        Raises:
            UnknownTaskError: This session has no such task.
            InvalidArgumentError: It is below another interrupted task; resume that one.
        """
        return await self._lift(task_id, lambda tx: tx.resume_task)

    async def _lift(
        self, task_id: int, lift: Callable[[TreeTransaction], Callable[[int], None]]
    ) -> bool:
        """Run what lifts a block, and tell whether it did."""
        return await self._runtime.commit(lambda tx: lifted(tx, task_id, lift(tx)))

    def explain(self, task_id: int) -> Explanation:
        """Say in one line why a task is where it is, and what moves it next.

        Works for every task, also before `start()` and for ended ones, and changes nothing. What a
        task waits for is followed down to the task that decides. `str()` of the answer is the
        line; its fields are for programs.

        Args:
            task_id: Any task of this session.

        Raises:
            UnknownTaskError: This session has no such task.
            SessionPoisonedError: The session is over; reopen the store and ask again.
        """
        if self.session.line.poison is not None:
            self.session.line.check_usable()
        return explain(LiveFacts(self._runtime), task_id)

    def inspect(self, *, after: int = 0, limit: int = 1_000) -> tuple[InspectedTask, ...]:
        """List live work with its state under the registry of now, without running any code.

        Before `start()` this says what starting would do: what would be blocked and why, what
        would be migrated, what waits for somebody, what is suspected of killing the process.

        Args:
            after: The id of the last task of the page before; 0 for the first page.
            limit: Most tasks to return, 1 to 10,000. A shorter answer is the last page.

        Raises:
            InvalidArgumentError: `limit` or `after` is out of range.
        """
        return inspect_page(self._runtime, after=after, limit=limit)

    def watch_tasks(
        self, root: int | None = None, *, limit: int = 1_000
    ) -> AbstractAsyncContextManager[Watch[TaskGraph]]:
        """Watch the task graph: live tasks as they are, then one frame a commit that changes them.

        `async with harness.watch_tasks() as watch`, then `watch.value` and `async for frame in
        watch`. The graph is as committed and read-only; a frame shares with the one before what did
        not change, and its `patch` fits `watch.json()`. Watching slows no commit, and starts
        nothing. Where more tasks are live than the limit allows, the oldest are shown.

        Args:
            root: Only this task or conversation and what is below it, background tasks and owned
                conversations included. When a root task ends, its last frame is an empty graph, and
                the iteration stops; what lives on belongs to what is above. A conversation has no
                end.
            limit: Most tasks to show, 1 to 10,000; the others are counted, in `left_out`.

        Raises:
            NotFoundError: This session has no such task or conversation.
            InvalidArgumentError: `limit` is out of range.
            NestedCommitError: It is called in the body of a commit; watch before or after it.
            StorageAccessError: The graph could not be read; watching again is fine.
        """
        return self._runtime.graphs.watch(root, limit)

    def task(self, task_id: int) -> TaskRecord:
        """Everything that is stored of a task.

        Raises:
            UnknownTaskError: This session has no such task.
        """
        return stored_task(self.session.storage, task_id)

    def tasks(
        self,
        *,
        conversation: int | None = None,
        kind: str | None = None,
        after: int = 0,
        limit: int = 1000,
    ) -> list[TaskRecord]:
        """Tasks by id, live and ended.

        Args:
            conversation: Only those of one conversation.
            kind: Only those of one definition, by its name.
            after: Only those with a greater id.
            limit: Most of them.

        Raises:
            InvalidArgumentError: An argument cannot be what it is to be.
        """
        for name, id in (("conversation", conversation), ("after", after or None)):
            if id is not None and not is_id(id):
                raise InvalidArgumentError(name, "expected an id", show(id))
        kind = None if kind is None else check_name(kind, "kind")
        if type(limit) is not int or not 0 < limit < 2**63:
            raise InvalidArgumentError("limit", "expected at least 1", show(limit))
        rows = self.session.storage.tasks(
            conversation=conversation, kind=kind, after=after, limit=limit
        )
        return [task_record(self.session.storage, row) for row in rows]

    async def wait_for_idle(self) -> None:
        """Wait until no ordinary task is live anywhere."""
        self.start()
        await self._runtime.wait_for_idle()
