"""Records from the rows that a storage gives back."""

from __future__ import annotations

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
