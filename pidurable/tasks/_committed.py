"""What a task reads of its session: records, entries and documents, as committed.

Every read looks at what is published when it is made; two reads may see different commits. What a
decision depends on is read inside of the commit that makes it (`tx.document`, `tx.conversation`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, final

import trio

from pidurable.errors import InvalidArgumentError, NotFoundError, show
from pidurable.records._checks import is_id
from pidurable.records._ids import TaskId
from pidurable.session import _documents
from pidurable.session._stubs import unknown_submission
from pidurable.tasks._task_record import stored_task

if TYPE_CHECKING:
    from pidurable.records._entries import Conversation, Entry
    from pidurable.records._submissions import SubmissionRecord
    from pidurable.records._tasks import TaskRecord
    from pidurable.session._session import Session

DocT = TypeVar("DocT")


@final
class CommittedState:
    """The committed state of a session, as the code of one task sees it: `ctx.snapshot`."""

    __slots__ = ("_conversation_id", "_session", "_task_id")

    def __init__(self, session: Session, *, task_id: int, conversation_id: int) -> None:
        self._session = session
        self._task_id = task_id
        self._conversation_id = conversation_id

    # --- records -------------------------------------------------------------------------

    def task(self, task_id: int) -> TaskRecord:
        """Everything that is stored of a task.

        Raises:
            UnknownTaskError: This session has no such task.
        """
        return stored_task(self._session.storage, task_id)

    def keyed_tasks(self) -> dict[str, TaskId[Any]]:
        """The tasks that this task created under a key, live and ended, by that key."""
        rows = self._session.storage.keyed_tasks(self._task_id)
        return {key: TaskId(id) for key, id in rows}

    def conversation(self, conversation_id: int | None = None) -> Conversation:
        """The record of a conversation; of the task's own where None.

        Raises:
            NotFoundError: This session has no such conversation.
        """
        return self._session.conversation(self._own(conversation_id))

    def submission(self, submission_id: int) -> SubmissionRecord:
        """The record of a submission: its status, and the entry of its answer.

        Raises:
            NotFoundError: This session has no such submission.
        """
        found = self._session.submission(submission_id)
        if found is None:
            raise unknown_submission(self._session.storage, submission_id)
        return found

    # --- entries -------------------------------------------------------------------------

    def entry(self, entry_id: int) -> Entry:
        """An entry of any conversation.

        Raises:
            NotFoundError: This session has no such entry.
        """
        row = self._session.storage.entry(entry_id) if is_id(entry_id) else None
        if row is None or row.seq > self._session.line.published_seq:
            raise NotFoundError("entry", show(entry_id))
        return self._session.entry_of(row)

    async def history(
        self,
        conversation_id: int | None = None,
        *,
        limit: int = 200,
        before: int | None = None,
        after: int = 0,
    ) -> list[Entry]:
        """The newest entries with after < id < before, oldest first.

        Args:
            conversation_id: The conversation; the task's own where None.
            limit: Most entries to return.
            before: Only entries with a smaller id.
            after: Only entries with a larger id.

        Raises:
            NotFoundError: This session has no such conversation.
        """
        return await self._session.history(
            self._own(conversation_id), after=after, before=before, limit=limit
        )

    async def context(self, conversation_id: int | None = None) -> list[Entry]:
        """The entries that a model is shown of a conversation, in order.

        Raises:
            NotFoundError: This session has no such conversation.
        """
        id = self._own(conversation_id)
        self._session.conversation(id)
        return await self._session.context_entries(id)

    # --- documents -----------------------------------------------------------------------

    def document(
        self, cls: type[DocT], scope_id: int | None = None, *, key: str = ""
    ) -> DocT | None:
        """The value of a document, a copy of your own; None where there is none. Never creates.

        Args:
            cls: A class declared with `@document`.
            scope_id: The conversation or task it belongs to; the task's own, or itself, where
                None. Not needed for the session's.
            key: Which one of a family.

        Raises:
            DocumentTooNewError: It was written by a newer version of the class.
            MigrationError: `migrate` could not read what is stored.
        """
        return self._session.snapshot(cls, self._scope_id(cls, scope_id), key=key)

    async def document_as_of(
        self, cls: type[DocT], entry_id: int, conversation_id: int | None = None, *, key: str = ""
    ) -> DocT | None:
        """The value that a rewindable document had after the commit of an entry.

        Args:
            cls: A class declared with `@document(history="rewindable")`.
            entry_id: An entry of the conversation's history.
            conversation_id: The conversation; the task's own where None.
            key: Which one of a family.

        Raises:
            InvalidArgumentError: The document is not rewindable.
            NotFoundError: The entry is not in that history, or the document was not rewindable
                then, so that its value was not kept.
        """
        await trio.lowlevel.checkpoint()
        return await self._session.snapshot_as_of(
            cls, self._own(conversation_id), entry_id, key=key
        )

    def _own(self, conversation_id: int | None) -> int:
        return self._conversation_id if conversation_id is None else conversation_id

    def _scope_id(self, cls: type, scope_id: int | None) -> int:
        if scope_id is not None:
            if not is_id(scope_id):
                raise InvalidArgumentError("scope_id", "expected an id", show(scope_id))
            return scope_id
        scope = _documents.definition_of(cls).scope
        return {"session": 0, "conversation": self._conversation_id, "task": self._task_id}[scope]
