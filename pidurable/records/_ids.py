"""Ids: plain integers from one session-wide counter, never used twice.

A `TaskId` carries the result type of its task for type checkers; at run time it is an int, is
stored as one, and compares like one.
"""

from __future__ import annotations

from typing import Any, Generic, final

from typing_extensions import TypeVar

ResultT = TypeVar("ResultT", default=Any, covariant=True)


@final
class TaskId(int, Generic[ResultT]):
    """The id of a task whose completed outcome holds a `ResultT`."""

    __slots__ = ()


ConversationId = int
EntryId = int
SubmissionId = int
DocumentId = int
