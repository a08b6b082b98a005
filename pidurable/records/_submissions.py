"""Submissions: something handed to a conversation (input or write) that can be waited for."""

from __future__ import annotations

from typing import Any, Literal

import attrs

SubmissionKind = Literal["input", "write", "continue"]
WhenBusy = Literal["follow_up", "steer", "reject"]
SubmissionStatus = Literal["queued", "placed", "done", "unanswered"]


@attrs.frozen(kw_only=True)
class SubmissionRecord:
    """queued -> placed -> done | unanswered; the last two are final."""

    id: int
    conversation_id: int
    kind: SubmissionKind
    when_busy: WhenBusy
    request_id: str | None
    digest: str
    """Of the content, so that a request id used twice can be told from a conflict."""
    content: Any
    status: SubmissionStatus
    entry: int | None = None
    """The entry that holds the input, once placed."""
    run: int | None = None
    """The run that answers it."""
    answer: int | None = None
    """The entry that holds the answer, once done."""
    reason: str | None = None
    detail: str | None = None
    created_us: int = 0
    ended_us: int | None = None
