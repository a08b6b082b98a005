"""Transactions: what one commit stages, in memory, before the batch goes to the storage.

A transaction reads what is committed or was staged by the bodies before it in the same batch. Every
write is encoded and checked when it is made, so that bad input is refused at the line of code that
made it. The transaction and its drafts die with the body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    OwnedTooDeepError,
    check,
    show,
)
from pidurable.records import _json
from pidurable.records._checks import check_name, check_text, is_id
from pidurable.records._entries import Conversation, Edit, Entry, UnreadText, is_visible
from pidurable.records._messages import ImageBlock, Message, SystemMessage
from pidurable.records._submissions import SubmissionRecord
from pidurable.session._blobs import digest, is_digest
from pidurable.session._document_work import NO_DICT, NO_LIST
from pidurable.session._entry_form import EncodedEntry, encode_entry
from pidurable.session._fork_work import ForkWork
from pidurable.session._forks import Fork, is_counted, lineage
from pidurable.session._removals import Removal
from pidurable.session._rows import changed_row, submission_row, submission_state
from pidurable.storage import (
    ConversationRow,
    EntryRow,
    Op,
    SubmissionRow,
)

if TYPE_CHECKING:
    from pidurable.session._session import Session

_NO_BLOBS: frozenset[str] = frozenset()
PRINCIPAL_CHARACTERS_MAX = 1000


def text_digest(text: str) -> str:
    """SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


class Transaction(ForkWork):
    """One commit in the making. Obtained from `harness.commit()` or `ctx.commit()`."""

    entries: list[Entry] = NO_LIST
    conversations: list[Conversation] = NO_LIST
    submissions: dict[int, SubmissionRecord] = NO_DICT
    blobs: frozenset[str] = _NO_BLOBS
    """Names of the bytes that this commit stores."""
    removal: Removal | None = None
    """What this commit removes, if it removes anything."""
    _submitted: dict[int, int] = NO_DICT
    """Submissions that are new here, with the places of their rows among the writes."""

    def __init__(self, session: Session, *, by_task: int | None = None, flush: bool = True) -> None:
        super().__init__(session)
        self.flush = flush
        self.unique: dict[tuple[Any, ...], Any] = {}
        """What this commit claims for itself, under keys that nobody else may claim."""
        self._by_task = by_task

    # --- life of the body ----------------------------------------------------------------

    def seal(self) -> None:
        """Called by the line when the body has returned: compare drafts, ask the participants."""
        if self.broken is not None:
            # The body swallowed a failed read; what it decided stands on nothing.
            raise self.broken
        self.compare_drafts()
        for check_staged in self._session.participants.check_staged:
            check_staged(self)
        # Last, as the participants may change documents too.
        self.seal_documents()
        if self.broken is not None:
            raise self.broken
        for key, value in self.unique.items():
            standing = self._session.staged_claim(key)
            check(
                standing is None or standing == value,
                f"two commits of one batch claim {key!r}",
            )
        self.end_drafts()
        self.open = False

    def discard(self) -> None:
        """Called by the line when the body raised or was refused."""
        self.end_drafts()
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

    def open_submissions(self, conversation_id: int) -> list[SubmissionRecord]:
        """Submissions that are queued or placed, as staged so far, in order."""
        found = self._session.staged_open_submissions(conversation_id)
        for record in self.submissions.values():
            if record.conversation_id == conversation_id:
                found[record.id] = record
        return [found[id] for id in sorted(found) if found[id].status in ("queued", "placed")]

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
            NotFoundError: No such conversation, no such entry in its history, or an image whose
                bytes are not stored: `put_blob` them first, in this commit or before.
        """
        self._check_open()
        self.conversation(conversation_id)
        encoded = encode_entry(
            self._session, value, kind=kind, messages=messages, head=head, edits=edits
        )
        self.check_entry(conversation_id, encoded)
        return self.append_encoded(conversation_id, encoded)

    def check_entry(self, conversation_id: int, encoded: EncodedEntry) -> None:
        """Refuse what an entry refers to and the session does not have.

        Raises:
            NotFoundError: No such entry in the history, or no bytes of an image.
        """
        if encoded.edits or encoded.messages:
            for edit in encoded.edits:
                self._check_entry(conversation_id, edit.target)
            self.check_images(encoded.messages)
            for edit in encoded.edits:
                self.check_images(edit.messages or ())
        if encoded.head is not None and encoded.head != 0:
            self._check_entry(conversation_id, encoded.head)

    def append_encoded(self, conversation_id: int, encoded: EncodedEntry) -> int:
        """Append what `check_entry` has checked, in this commit or in one before it."""
        self._check_open()
        session = self._session
        number = session.line.draw_id()
        head = number if encoded.head == 0 else encoded.head
        at_us = session.clock.now_us()
        self.writes.append(
            (
                Op.ENTRY,
                EntryRow(
                    number,
                    conversation_id,
                    self.seq,
                    encoded.kind,
                    self._by_task,
                    head,
                    encoded.edits_text,
                    encoded.messages_text,
                    encoded.data_text,
                    at_us,
                ),
            )
        )
        data_text = encoded.data_text
        self.entries = self.entries or []
        self.entries.append(
            Entry(
                id=number,
                conversation_id=conversation_id,
                seq=self.seq,
                kind=encoded.kind,
                messages=encoded.messages,
                data=None if data_text is None else UnreadText(data_text),
                head=head,
                edits=encoded.edits,
                by_task=self._by_task,
                at_us=at_us,
                decode=session.codec.decoder,
            )
        )
        return number

    def _check_entry(self, conversation_id: int, entry_id: int) -> tuple[int, int]:
        """(conversation, commit) of an entry of a history, as staged so far.

        Raises:
            NotFoundError: It does not exist, or stands elsewhere.
        """
        if not is_id(entry_id):
            raise NotFoundError("entry", show(entry_id))
        for entry in self.entries:
            if entry.id == entry_id:
                place = (entry.conversation_id, self.seq)
                break
        else:
            found = self._session.staged_place(entry_id)
            if found is None:
                raise NotFoundError("entry", entry_id)
            place = found
        if place[0] != conversation_id:
            chain = lineage(conversation_id, self.conversation)
            if not is_counted(chain, entry_id, place[0]):
                raise NotFoundError("entry", entry_id, place=f"conversation {conversation_id}")
        return place

    def newest_entry(self, conversation_id: int) -> int | None:
        """The newest entry of a history, as staged so far; None where it is empty."""
        for member, cut in lineage(conversation_id, self.conversation):
            for entry in reversed(self.entries):
                if entry.conversation_id == member and (cut is None or entry.id < cut):
                    return entry.id
            found = self._session.staged_newest(member, cut)
            if found is not None:
                return found
        return None

    def shows_more(self, conversation_id: int, since: int) -> bool:
        """Whether a request can tell what came to a conversation after an entry, as staged so far.

        What was decided by the context as of that entry then stands on what is no more.
        """
        return any(
            entry.conversation_id == conversation_id and is_visible(entry) for entry in self.entries
        ) or self._session.staged_shows_more(conversation_id, since)

    def context_start(self, conversation_id: int) -> int | None:
        """Where the newest head of a history lets the context start, as staged so far, or None."""
        for member, cut in lineage(conversation_id, self.conversation):
            for entry in reversed(self.entries):
                if (
                    entry.head is not None
                    and entry.conversation_id == member
                    and (cut is None or entry.id < cut)
                ):
                    return entry.head
            found = self._session.staged_head(member, cut)
            if found is not None:
                return found
        return None

    def fork(self, conversation_id: int, at: int | None = None, *, key: str | None = None) -> int:
        """Fork a conversation at an entry of its history and return the new one's id.

        The fork shares the history up to that entry, at no cost, and goes its own way behind it. It
        has the parent's principal and what the documents' fork policies say (`initial`, `current`,
        `as_of`); tasks, their documents and input that is queued stay behind, so it is not busy.
        `current` documents are copied as they are when the body ends, or when the body first looks
        at the fork's own. `as_of` ones are as they were after the commit of the entry that `at`
        names, also where they have changed since without an entry; without `at` they are as now.

        Args:
            conversation_id: The parent.
            at: Any entry of its history, also one that it shares with its own parent, also one that
                this commit made. None: the newest, and documents as they are now. A conversation
                without entries can be forked.
            key: Fork once: a second call with the same key gives the first fork's id, whatever `at`
                it names; 1 to 512 characters.

        Raises:
            NotFoundError: No such conversation, or the entry is not in its history.
            InvalidArgumentError: The key names a conversation that is no fork of this one.
            DocumentTooLargeError: A document to be copied is larger than is allowed today.
        """
        return self._fork(conversation_id, at, owner=None, key=key)

    def _fork(self, parent_id: int, at: int | None, *, owner: int | None, key: str | None) -> int:
        self._check_open()
        parent = self.conversation(parent_id)
        if key is not None:
            key = check_name(key, "key")
            found: int | None = self._keyed_conversation(owner, key)
            if found is not None:
                if self.conversation(found).parent != parent_id:
                    problem = (
                        f"it names conversation {found} already, which is no fork of conversation "
                        f"{parent_id}; choose another key"
                    )
                    raise InvalidArgumentError("key", problem, show(key))
                return found
        if at is None:
            at, home, seq = self.newest_entry(parent_id), parent_id, None
        else:
            home, seq = self._check_entry(parent_id, at)
        made = self.add_conversation(
            owner=owner, key=key, principal=parent.principal, parent=(parent_id, at)
        )
        self._forks = self._forks or {}
        self._forks[made.id] = Fork(made.id, parent_id, home, seq)
        return made.id

    def _keyed_conversation(self, owner: int | None, key: str) -> int | None:
        """The conversation that was made under a key, as staged so far, or None."""
        found: int | None = self.claimed(("conversation", owner, key))
        if found is None:
            row = self._session.storage.conversation_by_key(owner, key)
            found = None if row is None else row.id
        return found

    def add_conversation(
        self,
        *,
        owner: int | None = None,
        key: str | None = None,
        principal: str = "",
        parent: tuple[int | None, int | None] = (None, None),
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
            parent=parent[0],
            parent_entry=parent[1],
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
                    *parent,
                    owner,
                    key,
                    principal,
                    made.created_us,
                ),
            )
        )
        return made

    # --- bytes ---------------------------------------------------------------------------

    def put_blob(self, data: bytes) -> str:
        """Store bytes, an image say, and return the name that messages refer to them by.

        The same bytes are stored once, however often they are put.

        Args:
            data: At most `value_bytes_max` (16 MiB).

        Returns:
            The SHA-256 of the bytes, in hex.

        Raises:
            InvalidArgumentError: They are no bytes, or too many.
        """
        self._check_open()
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidArgumentError("data", "expected bytes", show(data))
        limit = self._session.settings.value_bytes_max
        copied = bytes(data)
        if len(copied) > limit:
            problem = f"expected at most {limit} bytes"
            raise InvalidArgumentError("data", problem, f"{len(copied)} bytes")
        name = digest(copied)
        self._session.note_blob(name)
        if not self.has_blob(name):
            self.blobs |= {name}
            self.writes.append((Op.BLOB, (name, copied)))
        return name

    def has_blob(self, sha256: str) -> bool:
        """Whether bytes are stored under this name, or were put by this commit."""
        return is_digest(sha256) and (sha256 in self.blobs or self._session.staged_blob(sha256))

    def check_images(self, messages: Iterable[Message]) -> None:
        """Refuse images whose bytes are not stored: no request could ever show them.

        Raises:
            NotFoundError: Names the first one.
        """
        for message in messages:
            if isinstance(message, SystemMessage):
                continue
            for block in message.blocks:
                if isinstance(block, ImageBlock) and not self.has_blob(block.blob):
                    hint = "Store its bytes first, in this commit or before: `tx.put_blob(data)`."
                    raise NotFoundError("blob", show(block.blob), hint)

    # --- submissions ---------------------------------------------------------------------

    def put_submission(self, record: SubmissionRecord, content: str | None = None) -> None:
        """Stage a new submission.

        Args:
            record: What is stored of it.
            content: The text of its content, of whoever has encoded and measured it already.
        """
        self._check_open()
        if content is None:
            content = _json.dumps(
                record.content,
                path="$.content",
                bytes_max=self._session.settings.value_bytes_max,
                setting="value_bytes_max",
            )
        self.submissions = self.submissions or {}
        self.submissions[record.id] = record
        if record.request_id is not None:
            self.unique[("request", record.conversation_id, record.request_id)] = record.id
        self._submitted = self._submitted or {}
        self._submitted[record.id] = len(self.writes)
        self.writes.append((Op.SUBMISSION, submission_row(record, content)))

    def update_submission(self, record: SubmissionRecord) -> None:
        """Stage the changing columns of a submission; one that is new here is stored once."""
        self._check_open()
        self.submissions = self.submissions or {}
        self.submissions[record.id] = record
        place = self._submitted.get(record.id)
        if place is None:
            self.writes.append((Op.SUBMISSION_STATE, submission_state(record)))
        else:
            row = self.writes[place][1]
            self.writes[place] = (Op.SUBMISSION, changed_row(row, record))

    def new_submission(self, id: int) -> SubmissionRow | None:
        """The row of a submission that this commit makes; None for any other."""
        place = self._submitted.get(id)
        return None if place is None else cast("SubmissionRow", self.writes[place][1])
