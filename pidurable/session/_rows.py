"""Records from the rows that a storage gives back.

Their shape is ours and was checked when it was written. So a row that cannot be read means that the
store is damaged, or was written by another program; `stored_entry` says which row it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pidurable.errors import NotJsonError, StorageCorruptError
from pidurable.records import _codec, _json
from pidurable.records._codec import Codec
from pidurable.records._entries import Conversation, Entry, Unread
from pidurable.records._submissions import SubmissionRecord
from pidurable.session._blobs import followed, is_reference
from pidurable.storage import (
    ConversationRow,
    EntryRow,
    Storage,
    SubmissionRow,
    SubmissionStateRow,
)

_CHANGING = SubmissionRow._fields.index("status")
"""The columns of a submission from here on are those of its state, in the same order."""


def conversation_of(row: ConversationRow) -> Conversation:
    return Conversation(
        id=row.id,
        uuid=row.uuid,
        parent=row.parent,
        parent_entry=row.parent_entry,
        owner=row.owner,
        key=row.key,
        principal=row.principal,
        created_us=row.created_us,
    )


def entry_of(row: EntryRow, codec: Codec, storage: Storage) -> Entry:
    return Entry(
        id=row.id,
        conversation_id=row.conversation,
        seq=row.seq,
        kind=row.kind,
        messages=_part(storage, row, "messages", row.messages, _codec.decode_messages, ()),
        data=_part(storage, row, "data", row.data, _as_it_is, None),
        head=row.head,
        edits=_part(storage, row, "edits", row.edits, _codec.decode_edits, ()),
        by_task=row.by_task,
        at_us=row.at_us,
        decode=codec.decoder,
    )


def _as_it_is(value: Any) -> Any:
    return value


def _part(
    storage: Storage,
    row: EntryRow,
    name: str,
    text: str | None,
    decode: Callable[[Any], Any],
    absent: Any,
) -> Any:
    """A part of an entry; one that lies in a blob is read when somebody looks at it."""
    if text is None:
        return absent
    if not is_reference(text):
        return decode(_json.loads_stored(text))
    record = f"the {name} of entry {row.id}"

    def read() -> Any:
        try:
            return decode(_json.loads_stored(followed(storage, text, record)))
        except NotJsonError as error:
            raise _unreadable(storage.store, row, error) from error

    return Unread(read)


def submission_of(row: SubmissionRow) -> SubmissionRecord:
    return SubmissionRecord(
        id=row.id,
        conversation_id=row.conversation,
        kind=row.kind,  # type: ignore[arg-type]
        when_busy=row.when_busy,  # type: ignore[arg-type]
        request_id=row.request_id,
        digest=row.digest,
        content=_json.loads_stored(row.content),
        created_us=row.created_us,
        status=row.status,  # type: ignore[arg-type]
        entry=row.entry,
        run=row.run,
        answer=row.answer,
        reason=row.reason,
        detail=row.detail,
        ended_us=row.ended_us,
    )


def submission_row(record: SubmissionRecord, content: str) -> SubmissionRow:
    """The row of a submission, whose content is encoded."""
    return SubmissionRow(
        record.id,
        record.conversation_id,
        record.kind,
        record.when_busy,
        record.request_id,
        record.digest,
        content,
        record.created_us,
        *submission_state(record)[:-1],
    )


def submission_state(record: SubmissionRecord) -> SubmissionStateRow:
    """The columns of a submission that change, and its id."""
    return SubmissionStateRow(
        record.status,
        record.entry,
        record.run,
        record.answer,
        record.reason,
        record.detail,
        record.ended_us,
        record.id,
    )


def changed_row(row: tuple[Any, ...], record: SubmissionRecord) -> SubmissionRow:
    """The row of a submission that has become this record."""
    return SubmissionRow._make((*row[:_CHANGING], *submission_state(record)[:-1]))


def stored_entry(row: EntryRow, codec: Codec, storage: Storage) -> Entry:
    """The entry of a row.

    Raises:
        StorageCorruptError: It has a kind of message, or a shape, that is not known here.
    """
    try:
        return entry_of(row, codec, storage)
    except NotJsonError as error:
        raise _unreadable(storage.store, row, error) from error


def _unreadable(store: str, row: EntryRow, error: NotJsonError) -> StorageCorruptError:
    return StorageCorruptError(store, f"entry {row.id} cannot be read: {error}")


def stored_submission(row: SubmissionRow, store: str) -> SubmissionRecord:
    """The submission of a row.

    Raises:
        StorageCorruptError: Its content is not JSON.
    """
    try:
        return submission_of(row)
    except NotJsonError as error:
        raise StorageCorruptError(store, f"submission {row.id} cannot be read: {error}") from error
