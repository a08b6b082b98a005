"""Errors that are expected: the caller decides what to do about them."""

from __future__ import annotations

from typing import Any

import attrs

from pidurable.errors._root import PidurableError, show


@attrs.define(eq=False)
class UnansweredError(PidurableError):
    """A submission ended without an answer. `reason` is one of the stable codes."""

    submission: int
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        tail = f": {self.detail}" if self.detail else ""
        return f"submission {self.submission} was not answered ({self.reason}){tail}"


@attrs.define(eq=False)
class OutcomeUnknownError(PidurableError):
    """Raised by a tool whose other side died in mid-call: its effect may or may not be there."""

    detail: str = "the other side ended in the middle of the call"

    def __str__(self) -> str:
        return self.detail


@attrs.define(eq=False)
class AbortRequestedError(PidurableError):
    """The task is marked for abort; the commit was not stored. Return, and let `abort` run."""

    task: int
    reason: str

    def __str__(self) -> str:
        return f"task {self.task} is to be aborted ({self.reason}); this commit was not stored"


@attrs.define(eq=False)
class AlreadyDecidedError(PidurableError):
    """A permission request is not open any more. Nothing was changed by this decision."""

    request: int
    state: str
    """granted, denied, expired or closed."""
    closed_reason: str | None = None
    """Of a closed one: aborted, superseded or gone."""
    by: str | None = None
    """Who decided, where that was told."""

    def __str__(self) -> str:
        why = f" ({self.closed_reason})" if self.closed_reason else ""
        by = f" by {show(self.by)}" if self.by else ""
        return (
            f"permission request {self.request} is {self.state}{why}{by}, "
            "and this decision changes nothing"
        )


@attrs.define(eq=False)
class ConversationBusyError(PidurableError):
    """A run is active in this conversation. Wait for it, or submit with another `when_busy`."""

    conversation: int
    run: int

    def __str__(self) -> str:
        return f"conversation {self.conversation} is busy with run {self.run}"


@attrs.define(eq=False)
class ConversationFullError(PidurableError):
    """The queue of this conversation is full. Nothing was stored; try again when it is shorter."""

    conversation: int
    queued_max: int
    size_bytes: int | None = None  # of the items together; None where they are too many
    bytes_max: int | None = None

    def __str__(self) -> str:
        text = f"conversation {self.conversation} has {self.queued_max} queued items, the most"
        if self.size_bytes is not None:
            most = f"where at most {self.bytes_max}, and {self.queued_max} items, are"
            text = f"conversation {self.conversation} would queue {self.size_bytes} bytes, {most}"
        return f"{text} allowed; try again when some were placed or withdrawn, or no run is active"


@attrs.define(eq=False)
class NothingToContinueError(PidurableError):
    """No run can be continued: the model would have nothing to answer. Submit an input instead."""

    conversation: int
    code: str = "terminal"
    """One of the stable codes of resuming."""

    def __str__(self) -> str:
        return (
            f"conversation {self.conversation} has nothing to continue ({self.code}): its last "
            "answer is complete, or nothing was asked yet; submit an input"
        )


@attrs.define(eq=False)
class SignalRefusedError(PidurableError):
    """A signal is too large, or too many are unread. It was not stored."""

    task: int
    problem: str

    def __str__(self) -> str:
        return f"task {self.task}: {self.problem}"


@attrs.define(eq=False)
class AnswerGoneError(PidurableError):
    """The answer to a command is not kept any more. It was not applied again, and will not be.

    Look at what the session has; to ask for the same once more, use another key.
    """

    key: str
    answered: bool
    """Whether it certainly was answered; else its key is older than any that is remembered."""

    def __str__(self) -> str:
        what = (
            "was answered long ago, and its answer is not kept any more"
            if self.answered
            else "is older than any answer that is still kept (or was made by a clock that is far "
            "behind), so nobody knows whether it was done"
        )
        return (
            f"command {self.key!r} {what}; it was not done now. Look at what the session has, and "
            "use another key to ask once more."
        )


@attrs.define(eq=False)
class CommandFailedError(PidurableError):
    """The holder refused a command, for a reason that has no class of its own here."""

    key: str
    error: str
    """The name of its class over there."""
    problem: str

    def __str__(self) -> str:
        return f"command {self.key!r} was refused with {self.error}: {self.problem}"


@attrs.define(eq=False)
class ResultUnreadableError(PidurableError):
    """A stored result cannot be read by today's class. Its JSON is on `.json`."""

    task: int
    problem: str
    json: Any = None

    def __str__(self) -> str:
        return f"the stored result of task {self.task} cannot be read: {self.problem}"


@attrs.define(eq=False)
class ModelError(PidurableError):
    """A model request failed. `kind` is retryable, overflow, auth or other."""

    kind: str
    detail: str
    retry_after: float | None = None  # seconds

    def __str__(self) -> str:
        return self.detail
