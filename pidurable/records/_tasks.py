"""Task records: what the store keeps of a task, and how a task ends.

Status moves only along these edges; `terminal` is final and its outcome never changes::

    pending -> running -> pending | waiting | completing | terminal
    waiting -> pending | running
    pending -> terminal            (aborted before anything ran, or orphaned)
    completing -> terminal
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Generic, Literal

import attrs
from typing_extensions import TypeVar

from pidurable.errors import NoResultError, ResultUnreadableError

ResultT = TypeVar("ResultT", default=Any, covariant=True)


class Status(enum.IntEnum):
    """Where a task stands. The number is what is stored."""

    PENDING = 0
    RUNNING = 1
    WAITING = 2
    COMPLETING = 3
    TERMINAL = 4

    @property
    def word(self) -> str:
        """The name as people read it."""
        return self.name.lower()


OutcomeStatus = Literal["completed", "failed", "aborted", "orphaned", "faulted"]
"""How a task ended."""
JoinPolicy = Literal["all_settled", "fail_fast", "first_success"]
"""When a wait on tasks aborts the others: never, at the first failure, at the first success."""
WokenBy = Literal["tasks", "signal", "deadline"]
"""What ended a wait: all that was awaited is there, an unread signal, or the moment."""
OnRestart = Literal["go", "wait", "abort"]
"""What a restart does to a live task and what is below it."""


@attrs.frozen(kw_only=True)
class ErrorInfo:
    """An error as plain data: reading it never runs foreign code."""

    type: str
    message: str
    """At most 4 KiB, cut with a mark."""
    detail: Any = None
    traceback: str | None = None
    """For faults only; at most 32 KiB, with every leaf of an exception group."""


@attrs.frozen(kw_only=True)
class Wait:
    """What a parked task waits for."""

    on: tuple[int, ...] | None = None
    """Tasks, conversations and submissions; ids are session-wide, so their records tell which."""
    conversations: tuple[int, ...] = ()
    """Those of `on` that are conversations, which are waited for until they are idle."""
    others: tuple[int, ...] = ()
    """Those of `on` that are submissions and were open when the wait was stored."""
    policy: JoinPolicy = "all_settled"
    deadline_us: int | None = None
    signals: bool = False


@attrs.frozen(kw_only=True)
class OutcomeRecord:
    """An outcome as it is stored: JSON and plain data only."""

    status: OutcomeStatus
    result: Any = None
    """The completed result, or the partial one of a failed or aborted task, as JSON."""
    has_result: bool = False
    error: ErrorInfo | None = None
    reason: str | None = None


@attrs.frozen(kw_only=True, eq=False)
class Outcome(Generic[ResultT]):
    """How a task ended: completed, failed, aborted, orphaned or faulted."""

    task_id: int
    record: OutcomeRecord
    _decode: Callable[[Any], ResultT] | None = attrs.field(default=None, repr=False, alias="decode")

    @property
    def status(self) -> OutcomeStatus:
        return self.record.status

    @property
    def error(self) -> ErrorInfo | None:
        return self.record.error

    @property
    def reason(self) -> str | None:
        return self.record.reason

    @property
    def result(self) -> ResultT:
        """The result of a completed task.

        Raises:
            NoResultError: The task did not complete; look at `status`, `error` and `partial`.
            ResultUnreadableError: Today's class cannot read what was stored.
        """
        if self.status != "completed":
            error = self.record.error
            detail = error.message if error is not None else (self.record.reason or "")
            raise NoResultError(self.task_id, self.status, detail)
        return self._read()

    @property
    def partial(self) -> ResultT | None:
        """What a failed or aborted task carried besides, or None."""
        if self.status == "completed" or not self.record.has_result:
            return None
        return self._read()

    def _read(self) -> ResultT:
        if self._decode is None:
            return self.record.result  # type: ignore[no-any-return]
        try:
            return self._decode(self.record.result)
        except Exception as error:
            raise ResultUnreadableError(self.task_id, str(error), self.record.result) from error


@attrs.frozen(kw_only=True)
class TaskRecord:
    """Everything that the store holds of a task, for people and programs that look."""

    id: int
    conversation_id: int
    kind: str
    version: int
    status: Status
    owner: int | None
    key: str | None
    background: bool
    on_restart: OnRestart | None
    deadline_us: int | None
    created_us: int
    started_us: int | None
    ended_us: int | None
    abort_us: int | None
    abort_reason: str | None
    invocations: int
    recoveries: int
    tries: int
    ready_us: int
    woken_by: str | None
    blocked: str | None
    input: Any
    phase: str | None = None
    checkpoint: Any = None
    wait: Wait | None = None
    outcome: OutcomeRecord | None = None
    """How it ended, or will end; of a task that is blocked, `faulted`: the fault that is parked."""
    memos: dict[str, Any] = attrs.Factory(dict)
