"""Submissions as something that tasks can wait for: a sub-agent's answer, without an invocation.

A participant: it tells the runtime which submissions a commit has ended. An open one needs the
generation that its conversation is at, since inputs are placed and answered at its end; so a tool
call that would wait for the answer to a follow-up of its own conversation is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pidurable.agent._documents import LiveDocument, address_of
from pidurable.records._checks import is_id
from pidurable.session._participants import Participant

if TYPE_CHECKING:
    from pidurable.records._submissions import SubmissionRecord
    from pidurable.tasks._runtime import Runtime
    from pidurable.tasks._transaction import TreeTransaction
    from pidurable.tasks._tree import Node

_ENDED = ("done", "unanswered")


class AwaitedSubmissions(Participant):
    """What the tasks layer asks of submissions, and is told of them."""

    kind = "submission"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._session = runtime.session
        runtime.kinds.add(self)
        runtime.session.participants.append(self)

    # --- asked by the tasks layer --------------------------------------------------------

    def is_open(self, id: int, tx: TreeTransaction | None) -> bool | None:
        """Whether a submission is queued or placed; None if there is none of this id."""
        record = self._record(id, tx)
        return None if record is None else record.status not in _ENDED

    def was_settled(self, id: int) -> bool:
        """Whether a stored submission has ended."""
        row = self._session.storage.submission(id) if is_id(id) else None
        return row is not None and row.status in _ENDED

    def needs(self, id: int, tx: TreeTransaction | None) -> Iterable[int]:
        """The generation at whose end the submission may be placed or answered."""
        record = self._record(id, tx)
        if record is None or record.status in _ENDED:
            return ()
        generation = self._generation(record.conversation_id, tx)
        return () if generation is None else (generation,)

    def needed_by(self, task: Node, tx: TreeTransaction | None) -> Iterable[int]:
        """The open submissions of the conversation whose current generation this is."""
        conversation = task.conversation
        if task.kind != "pi.generation" or self._generation(conversation, tx) != task.id:
            return ()
        found = self._session.staged_open_submissions(conversation)
        if tx is not None:
            for record in tx.submissions.values():
                if record.conversation_id == conversation:
                    found[record.id] = record
        return [id for id, record in found.items() if record.status not in _ENDED]

    def asks(self, id: int) -> tuple[str, str] | None:
        """A model answers, and no person."""
        return None

    def _record(self, id: int, tx: TreeTransaction | None) -> SubmissionRecord | None:
        return self._session.staged_submission(id) if tx is None else tx.submission(id)

    def _generation(self, conversation: int, tx: TreeTransaction | None) -> int | None:
        address = address_of(LiveDocument, conversation)
        if tx is not None:
            live = tx.doc_value(address)
        else:
            state = self._session.staged_doc(address)
            live = None if state is None else state.value
        generation: int | None = None if live is None else live["generation"]
        return generation

    # --- participant ---------------------------------------------------------------------

    def committed(self, tx: Any) -> None:
        if tx.submissions:
            ended = [id for id, record in tx.submissions.items() if record.status in _ENDED]
            if ended:
                self._runtime.settled(ended)
