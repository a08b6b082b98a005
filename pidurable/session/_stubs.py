"""Stubs: what is known of a record that was removed, for those who come back to it late.

A record with a key leaves a stub when it is removed: who creates it again is given the id that it
had, and who asks for it is told how it ended. Nothing else of it is kept.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pidurable.errors import NotFoundError, UnknownTaskError, show
from pidurable.records._checks import is_id

if TYPE_CHECKING:
    from pidurable.storage import Storage, StubRow

TASK = "task"
SUBMISSION = "submission"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def unknown_task(storage: Storage, task_id: int, hint: str = "") -> UnknownTaskError:
    """The error for an id of no task, which says so if there was one that was removed."""
    stub = storage.stub_by_id(task_id)
    if stub is not None and stub.kind == TASK:
        hint = _ended_hint(stub)
    return UnknownTaskError(task_id, hint)


def unknown_submission(storage: Storage, submission_id: object) -> NotFoundError:
    """The error for what is no submission, which says so if there was one that was removed."""
    stub = storage.stub_by_id(submission_id) if is_id(submission_id) else None  # type: ignore[arg-type]
    is_removed = stub is not None and stub.kind == SUBMISSION
    hint = _ended_hint(stub) if stub is not None and is_removed else ""
    return NotFoundError("submission", show(submission_id), hint)


def _ended_hint(stub: StubRow) -> str:
    removed = _EPOCH + timedelta(microseconds=stub.at_us)
    return (
        f"It ended ({stub.status}), and its tree was removed on {removed:%Y-%m-%d} to free its "
        "space (`pidurable gc`)."
    )
