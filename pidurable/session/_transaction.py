"""Transactions: what one commit stages, in memory, before the batch goes to the storage.

A transaction reads what is committed or was staged by the bodies before it in the same batch. Every
write is encoded and checked when it is made, so that bad input is refused at the line of code that
made it. The transaction and its drafts die with the body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    OwnedTooDeepError,
    check,
    show,
)
from pidurable.records import _codec, _json
from pidurable.records._checks import check_name, check_text, is_id
from pidurable.records._entries import Conversation, Edit, Entry, entry_kind
from pidurable.records._messages import Message
from pidurable.records._submissions import SubmissionRecord
from pidurable.session._document_work import NO_DICT, NO_LIST, DocumentWork
from pidurable.storage import (
    ConversationRow,
    EntryRow,
    Op,
    SubmissionRow,
    SubmissionStateRow,
)

if TYPE_CHECKING:
    from pidurable.session._session import Session


PRINCIPAL_CHARACTERS_MAX = 1000


def text_digest(text: str) -> str:
    """SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


class Transaction(DocumentWork):
    """One commit in the making. Obtained from `harness.commit()` or `ctx.commit()`."""

    def __init__(self, session: Session, *, by_task: int | None = None, flush: bool = True) -> None:
        super().__init__(session)
        self.flush = flush
        self.entries: list[Entry] = NO_LIST
        self.conversations: list[Conversation] = NO_LIST
        self.submissions: dict[int, SubmissionRecord] = NO_DICT
        self.unique: dict[tuple[Any, ...], Any] = {}
        """What this commit claims for itself, under keys that nobody else may claim."""
        self._by_task = by_task

    # --- life of the body ----------------------------------------------------------------

    def seal(self) -> None:
        """Called by the line when the body has returned: compare drafts, ask the participants."""
        if self.broken is not None:
            # The body swallowed a failed read; what it decided stands on nothing.
            raise self.broken
        self.seal_documents()
        for participant in self._session.participants:
            participant.check_staged(self)
        if self.broken is not None:
            raise self.broken
        for key, value in self.unique.items():
            standing = self._session.staged_claim(key)
            check(
                standing is None or standing == value,
                f"two commits of one batch claim {key!r}",
            )
        self.open = False

    def discard(self) -> None:
        """Called by the line when the body raised or was refused."""
        self.open = False
        self.writes = []

    # --- reading -------------------------------------------------------------------------

    def conversation(self, conversation_id: int) -> Conversation:
        """The record of a conversation.

        Raises:
            NotFoundError: This session has no such conversation.
        """
        for made in self.conversations:
            if made.id == conversation_id and is_id(conversation_id):
                return made
        return self._session.staged_conversation(conversation_id)

    def submission(self, submission_id: int) -> SubmissionRecord | None:
        """A submission as staged so far, or None."""
        found = self.submissions.get(submission_id)
        return found if found is not None else self._session.staged_submission(submission_id)

    def claimed(self, key: tuple[Any, ...]) -> Any:
        """What was claimed under a unique key in this batch, or None."""
        found = self.unique.get(key)
        return found if found is not None else self._session.staged_claim(key)

    def draw_id(self) -> int:
        """The next id of the session."""
        self._check_open()
        return self._session.line.draw_id()

    def now_us(self) -> int:
        """The wall clock, in UTC microseconds."""
        return self._session.clock.now_us()

    # --- entries and conversations -------------------------------------------------------

    def append(
        self,
        conversation_id: int,
        value: object = None,
        *,
        kind: str | None = None,
        messages: Sequence[Message] = (),
        head: int | None = None,
        edits: Sequence[Edit] = (),
    ) -> int:
        """Append an entry to a conversation and return its id.

        Args:
            conversation_id: The conversation to append to.
            value: An instance of a class declared with `@entry(kind)`, or any JSON if `kind` is
                given. At most `value_bytes_max` encoded (16 MiB).
            kind: Only for values whose class does not say it.
            messages: What the model sees of this entry.
            head: Start the model's context at this entry from here on; 0 means at this one.
            edits: Replace or omit what earlier entries contribute to the context.

        Raises:
            NotJsonError: A value cannot be stored; the path says which.
            NotFoundError: No such conversation, or no such entry in its history.
        """
        self._check_open()
        self.conversation(conversation_id)
        number = self._session.line.draw_id()
        kind = entry_kind(value) if kind is None else check_name(kind, "kind")
        session = self._session
        limit = session.settings.value_bytes_max
        data_text = (
            None
            if value is None
            else session.codec.encode_text(value, path=f"$<{kind}>", bytes_max=limit)
        )
        messages_text = None
        if messages:
            encoded = _codec.encode_messages(messages)
            messages_text = _json.dumps(encoded, path="$.messages", bytes_max=limit)
            # Read as it will be: what could be written but not read again is refused here.
            messages = _codec.decode_messages(_json.loads_stored(messages_text), path="$.messages")
        edits_text = None
        if edits:
            for place, edit in enumerate(edits):
                if not isinstance(edit, Edit):
                    raise InvalidArgumentError(
                        f"edits[{place}]", "expected an Edit, as in Edit(target=id)", show(edit)
                    )
                self._check_entry(conversation_id, edit.target)
            edits_text = _json.dumps(_codec.encode_edits(edits), path="$.edits", bytes_max=limit)
            edits = _codec.decode_edits(_json.loads_stored(edits_text), path="$.edits")
        if head is not None:
            head = head or number
            if head != number:
                self._check_entry(conversation_id, head)
        at_us = session.clock.now_us()
        self.writes.append(
            (
                Op.ENTRY,
                EntryRow(
                    number,
                    conversation_id,
                    self.seq,
                    kind,
                    self._by_task,
                    head,
                    edits_text,
                    messages_text,
                    data_text,
                    at_us,
                ),
            )
        )
        self.entries = self.entries or []
        self.entries.append(
            Entry(
                id=number,
                conversation_id=conversation_id,
                seq=self.seq,
                kind=kind,
                messages=tuple(messages),
                data=None if data_text is None else _json.loads_stored(data_text),
                head=head,
                edits=tuple(edits),
                by_task=self._by_task,
                at_us=at_us,
                decode=session.codec.decode,
            )
        )
        return number

    def _check_entry(self, conversation_id: int, entry_id: int) -> None:
        if not is_id(entry_id):
            raise NotFoundError("entry", show(entry_id))
        if any(
            entry.id == entry_id and entry.conversation_id == conversation_id
            for entry in self.entries
        ):
            return
        self._session.check_in_history(conversation_id, entry_id)

    def add_conversation(
        self, *, owner: int | None = None, key: str | None = None, principal: str = ""
    ) -> Conversation:
        """Stage a new conversation. Ownership rules are the tasks layer's."""
        self._check_open()
        if key is not None:
            key = check_name(key, "key")
        principal = check_text(principal, "principal", characters_max=PRINCIPAL_CHARACTERS_MAX)
        session = self._session
        depth = 0
        above = owner
        while above is not None:
            depth += 1
            if depth > session.settings.owned_depth_max:
                raise OwnedTooDeepError(session.settings.owned_depth_max)
            above = session.owner_of_task_conversation(above)
        made = Conversation(
            id=session.line.draw_id(),
            uuid=session.randomness.uuid(),
            owner=owner,
            key=key,
            principal=principal,
            created_us=session.clock.now_us(),
        )
        self.conversations = self.conversations or []
        self.conversations.append(made)
        if key is not None:
            self.unique[("conversation", owner, key)] = made.id
        self.writes.append(
            (
                Op.CONVERSATION,
                ConversationRow(
                    made.id,
                    made.uuid,
                    None,
                    None,
                    owner,
                    key,
                    principal,
                    made.created_us,
                ),
            )
        )
        return made

    # --- submissions ---------------------------------------------------------------------

    def put_submission(self, record: SubmissionRecord) -> None:
        """Stage a new submission."""
        self._check_open()
        content = _json.dumps(
            record.content, path="$.content", bytes_max=self._session.settings.value_bytes_max
        )
        self.submissions = self.submissions or {}
        self.submissions[record.id] = record
        if record.request_id is not None:
            self.unique[("request", record.conversation_id, record.request_id)] = record.id
        self.writes.append(
            (
                Op.SUBMISSION,
                SubmissionRow(
                    record.id,
                    record.conversation_id,
                    record.kind,
                    record.when_busy,
                    record.request_id,
                    record.digest,
                    content,
                    record.created_us,
                    record.status,
                    record.entry,
                    record.run,
                    record.answer,
                    record.reason,
                    record.detail,
                    record.ended_us,
                ),
            )
        )

    def update_submission(self, record: SubmissionRecord) -> None:
        """Stage the changing columns of a submission."""
        self._check_open()
        self.submissions = self.submissions or {}
        self.submissions[record.id] = record
        self.writes.append(
            (
                Op.SUBMISSION_STATE,
                SubmissionStateRow(
                    record.status,
                    record.entry,
                    record.run,
                    record.answer,
                    record.reason,
                    record.detail,
                    record.ended_us,
                    record.id,
                ),
            )
        )
