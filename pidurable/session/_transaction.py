"""Transactions: what one commit stages, in memory, before the batch goes to the storage.

A transaction reads what is committed or was staged by the bodies before it in the same batch. Every
write is encoded and checked when it is made, so that bad input is refused at the line of code that
made it. The transaction and its drafts die with the body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    OwnedTooDeepError,
    TransactionClosedError,
)
from pidurable.records import _codec, _json, _patch
from pidurable.records._entries import Conversation, Edit, Entry, entry_kind
from pidurable.records._messages import Message
from pidurable.records._submissions import SubmissionRecord
from pidurable.session import _documents
from pidurable.session._documents import Address, DocChange, DocState, DocumentDefinition
from pidurable.storage import (
    ConversationRow,
    EntryRow,
    Op,
    SubmissionRow,
    SubmissionStateRow,
)

if TYPE_CHECKING:
    from pidurable.session._session import Session

DocT = TypeVar("DocT")


def text_digest(text: str) -> str:
    """SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


@attrs.define(eq=False)
class _DocDraft:
    """A mutable copy of a document that a body works on."""

    definition: DocumentDefinition
    address: Address
    before: Any
    """The staged value in today's shape; None for a new document."""
    value: Any


@attrs.define(eq=False)
class _DocPending:
    """What a body has done to one document so far. Its rows are made when the body ends."""

    definition: DocumentDefinition | None
    state: DocState | None
    """As before this commit; None for a new document."""
    value: Any
    ops: list[Any] = attrs.Factory(list)
    retired: bool = False


class Transaction:
    """One commit in the making. Obtained from `harness.commit()` or `ctx.commit()`."""

    def __init__(self, session: Session, *, by_task: int | None = None, flush: bool = True) -> None:
        self.seq = 0
        self.writes: list[tuple[Op, tuple[Any, ...]]] = []
        self.open = True
        self.flush = flush
        self.entries: list[Entry] = []
        self.doc_changes: list[DocChange] = []
        self.conversations: list[Conversation] = []
        self.submissions: dict[int, SubmissionRecord] = {}
        self.unique: dict[tuple[Any, ...], Any] = {}
        self._session = session
        self._by_task = by_task
        self.docs: dict[Address, DocState | None] = {}
        self._pending: dict[Address, _DocPending] = {}
        self._drafts: list[_DocDraft] = []
        self._broken: BaseException | None = None

    # --- life of the body ----------------------------------------------------------------

    def _check_open(self) -> None:
        if not self.open:
            raise TransactionClosedError

    def seal(self) -> None:
        """Called by the line when the body has returned: compare drafts, ask the participants."""
        if self._broken is not None:
            # The body swallowed a failed read; what it decided stands on nothing.
            raise self._broken
        for draft in self._drafts:
            self._seal_draft(draft)
        for address, pending in self._pending.items():
            self._seal_pending(address, pending)
        for participant in self._session.participants:
            participant.check_staged(self)
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
            if made.id == conversation_id:
                return made
        return self._session.staged_conversation(conversation_id)

    def submission(self, submission_id: int) -> SubmissionRecord | None:
        """A submission as staged so far, or None."""
        found = self.submissions.get(submission_id)
        return found if found is not None else self._session.staged_submission(submission_id)

    def doc_value(self, address: Address) -> Any:
        """The JSON value at an address as staged so far; None where there is no document."""
        pending = self._pending.get(address)
        if pending is not None:
            return None if pending.retired else pending.value
        state = self._doc_state(address)
        return None if state is None else state.value

    def _doc_state(self, address: Address) -> DocState | None:
        try:
            return self._session.staged_doc(address)
        except BaseException as error:
            self._broken = error
            raise

    def claimed(self, key: tuple[Any, ...]) -> Any:
        """What was claimed under a unique key in this batch, or None."""
        found = self.unique.get(key)
        return found if found is not None else self._session.staged_unique.get(key)

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
        kind = kind or entry_kind(value)
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
        edits_text = None
        if edits:
            for edit in edits:
                self._check_entry(edit.target)
            edits_text = _json.dumps(_codec.encode_edits(edits), path="$.edits", bytes_max=limit)
        if head is not None:
            head = head or number
            if head != number:
                self._check_entry(head)
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
            )
        )
        return number

    def _check_entry(self, entry_id: int) -> None:
        if any(entry.id == entry_id for entry in self.entries):
            return
        if self._session.storage.entry(entry_id) is None and not self._session.staged_entry(
            entry_id
        ):
            raise NotFoundError("entry", entry_id)

    def add_conversation(
        self, *, owner: int | None = None, key: str | None = None, principal: str = ""
    ) -> Conversation:
        """Stage a new conversation. Ownership rules are the tasks layer's."""
        self._check_open()
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

    # --- documents -----------------------------------------------------------------------

    def _address(self, cls: type, scope_id: int | None, key: str) -> Address:
        definition = _documents.definition_of(cls)
        if definition.scope == "session":
            scope_id = 0
        elif scope_id is None:
            raise InvalidArgumentError(
                "scope_id", f"document {definition.name!r} belongs to a {definition.scope}"
            )
        if definition.scope == "conversation":
            self.conversation(scope_id)
        if bool(key) != definition.family:
            raise InvalidArgumentError(
                "key",
                "a family needs a key, other documents take none",
                repr(key),
            )
        return Address(definition.name, _documents.SCOPES[definition.scope], scope_id, key)

    async def document(
        self, cls: type[DocT], scope_id: int | None = None, *, key: str = ""
    ) -> DocT:
        """Get or create a mutable draft of a document; the commit stores what changed.

        Comparing costs the size of the document. Streams use `append_text` and `patch`.

        Raises:
            DocumentTooNewError: It was written by a newer version of the class.
            MigrationError: `migrate` could not read what is stored.
        """
        self._check_open()
        address = self._address(cls, scope_id, key)
        for draft in self._drafts:
            if draft.address == address:
                return draft.value
        definition = _documents.definition_of(cls)
        before = self._today(definition, address)
        value = (
            cls()
            if before is None
            else self._session.codec.decode(before, cls, path=f"$<{definition.name}>")
        )
        self._drafts.append(_DocDraft(definition, address, before, value))
        return value

    def _today(self, definition: DocumentDefinition, address: Address) -> Any:
        """The staged JSON at an address in today's shape, or None."""
        pending = self._pending.get(address)
        if pending is not None:
            return None if pending.retired else pending.value
        state = self._doc_state(address)
        return None if state is None else _documents.migrated(definition, state)

    def append_text(
        self, cls: type, scope_id: int | None, path: str, text: str, *, key: str = ""
    ) -> None:
        """Grow the string at `path` (a JSON pointer) of a document. Costs the size of `text`."""
        self.patch(cls, scope_id, [{"op": "append", "path": path, "value": text}], key=key)

    def patch(self, cls: type, scope_id: int | None, ops: Sequence[Any], *, key: str = "") -> None:
        """Apply JSON Patch operations (RFC 6902 and `append`) to a document. O(change).

        Raises:
            NotFoundError: The document does not exist; create it with `document` first.
            NotJsonError: An operation does not fit the value; the path says where.
        """
        address = self._address(cls, scope_id, key)
        if self.doc_value(address) is None:
            raise NotFoundError("document", address.name, "Create it with tx.document first.")
        self.patch_doc(_documents.definition_of(cls), address, ops)

    def retire(self, cls: type, scope_id: int | None = None, *, key: str = "") -> None:
        """End a document. A new one at the same address is a new incarnation."""
        address = self._address(cls, scope_id, key)
        if self.doc_value(address) is None:
            raise NotFoundError("document", address.name)
        self._drafts = [draft for draft in self._drafts if draft.address != address]
        self._retire(address)

    def retire_scope(self, scope: int, scope_id: int) -> None:
        """End every document of a scope (a task that ended)."""
        for address in self._session.staged_docs_of(scope, scope_id):
            if address not in self._pending:
                self._retire(address)

    def _retire(self, address: Address) -> None:
        pending = self._pending.pop(address, None)
        state = pending.state if pending is not None else self._doc_state(address)
        if state is not None:
            self._pending[address] = _DocPending(None, state, None, retired=True)

    def put_doc(self, definition: DocumentDefinition, address: Address, value: Any) -> None:
        """Create a document from JSON."""
        self._check_open()
        earlier = self._pending.get(address)
        if earlier is not None and earlier.retired:
            raise InvalidArgumentError(
                address.name, "was retired in this commit; create it again in the next one"
            )
        self._pending[address] = _DocPending(definition, None, value)

    def patch_doc(
        self, definition: DocumentDefinition, address: Address, ops: Sequence[Any]
    ) -> None:
        """Change a document that exists by operations on its JSON, in today's shape."""
        self._check_open()
        if not ops:
            return
        pending = self._pending.get(address)
        if pending is None:
            state = self._doc_state(address)
            assert state is not None
            pending = _DocPending(definition, state, state.value)
            if state.version != definition.version:
                pending.value = _documents.migrated(definition, state)
                pending.ops = [{"op": "replace", "path": "", "value": pending.value}]
        pending.value = _patch.apply(pending.value, ops)
        if pending.state is not None:
            pending.ops += ops
        self._pending[address] = pending

    def _seal_draft(self, draft: _DocDraft) -> None:
        path = f"$<{draft.definition.name}>"
        value = self._session.codec.encode(draft.value, draft.definition.cls, path=path)
        if draft.before is None:
            self.put_doc(draft.definition, draft.address, value)
            return
        self.patch_doc(draft.definition, draft.address, _patch.diff(draft.before, value))

    def _seal_pending(self, address: Address, pending: _DocPending) -> None:
        """Make the rows of one document: a retirement, a first base, or one revision."""
        state = pending.state
        if pending.retired:
            assert state is not None
            self.docs[address] = None
            self.doc_changes.append(DocChange(address, state.value, None, []))
            self.writes.append((Op.DOCUMENT_RETIRE, (state.id,)))
            return
        assert pending.definition is not None
        if state is None:
            number = self._session.line.draw_id()
            after, rows = _documents.create(
                number, address, pending.definition, pending.value, self.seq
            )
            self.doc_changes.append(DocChange(address, None, after.value, []))
        else:
            after, rows = _documents.change(
                state,
                pending.ops,
                pending.value,
                version=pending.definition.version,
                seq=self.seq,
                settings=self._session.settings,
            )
            self.doc_changes.append(DocChange(address, state.value, after.value, pending.ops))
        self.docs[address] = after
        self.writes += rows

    # --- submissions ---------------------------------------------------------------------

    def put_submission(self, record: SubmissionRecord) -> None:
        """Stage a new submission."""
        self._check_open()
        content = _json.dumps(
            record.content, path="$.content", bytes_max=self._session.settings.value_bytes_max
        )
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
