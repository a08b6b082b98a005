"""Records from the rows that a storage gives back.

Their shape is ours and was checked when it was written. So a row that cannot be read means that the
store is damaged, or was written by another program; `stored_entry` says which row it is.
"""

from __future__ import annotations

from pidurable.errors import NotJsonError, StorageCorruptError
from pidurable.records import _codec, _json
from pidurable.records._codec import Codec
from pidurable.records._entries import Conversation, Entry
from pidurable.records._submissions import SubmissionRecord
from pidurable.storage import ConversationRow, EntryRow, SubmissionRow


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


def entry_of(row: EntryRow, codec: Codec) -> Entry:
    return Entry(
        id=row.id,
        conversation_id=row.conversation,
        seq=row.seq,
        kind=row.kind,
        messages=(
            () if row.messages is None else _codec.decode_messages(_json.loads_stored(row.messages))
        ),
        data=None if row.data is None else _json.loads_stored(row.data),
        head=row.head,
        edits=() if row.edits is None else _codec.decode_edits(_json.loads_stored(row.edits)),
        by_task=row.by_task,
        at_us=row.at_us,
        decode=codec.decode,
    )


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


def stored_entry(row: EntryRow, codec: Codec, store: str) -> Entry:
    """The entry of a row.

    Raises:
        StorageCorruptError: It has a kind of message, or a shape, that is not known here.
    """
    try:
        return entry_of(row, codec)
    except NotJsonError as error:
        raise StorageCorruptError(store, f"entry {row.id} cannot be read: {error}") from error


def stored_submission(row: SubmissionRow, store: str) -> SubmissionRecord:
    """The submission of a row.

    Raises:
        StorageCorruptError: Its content is not JSON.
    """
    try:
        return submission_of(row)
    except NotJsonError as error:
        raise StorageCorruptError(store, f"submission {row.id} cannot be read: {error}") from error
