"""Task records for people and programs that look: everything that the store holds of one task."""

from __future__ import annotations

from pidurable.records import _codec, _json
from pidurable.records._tasks import Status, TaskRecord
from pidurable.storage import Storage, TaskRow

__all__ = ["read_task_record"]


def read_task_record(storage: Storage, row: TaskRow, *, whole: bool = True) -> TaskRecord:
    """Build the record of a task from its row and, where `whole`, from what is stored beside it.

    Without `whole` only the row is decoded, which is what lists need: input, checkpoint, wait,
    outcome and memos stay empty.
    """
    phase: str | None = None
    checkpoint = wait = outcome = input = None
    memos = {}
    if whole:
        stored = storage.task_checkpoint(row.id)
        if stored is not None:
            phase, checkpoint = stored[0], _json.loads_stored(stored[1])
        input_text = storage.task_input(row.id)
        input = None if input_text is None else _json.loads_stored(input_text)
        wait_text = storage.task_wait(row.id)
        wait = None if wait_text is None else _codec.decode_wait(_json.loads_stored(wait_text))
        text = storage.task_outcome(row.id)
        outcome = None if text is None else _codec.decode_outcome(_json.loads_stored(text))
        memos = {name: _json.loads_stored(value) for name, value in storage.task_memos(row.id)}
    return TaskRecord(
        id=row.id,
        conversation_id=row.conversation,
        kind=row.kind,
        version=row.version,
        status=Status(row.status),
        owner=row.owner,
        key=row.key,
        background=bool(row.background),
        on_restart=row.on_restart,  # type: ignore[arg-type]
        deadline_us=row.deadline_us,
        created_us=row.created_us,
        started_us=row.started_us,
        ended_us=row.ended_us,
        abort_us=row.abort_us,
        abort_reason=row.abort_reason,
        invocations=row.invocations,
        recoveries=row.recoveries,
        tries=row.tries,
        ready_us=row.ready_us,
        woken_by=row.woken_by,
        blocked=row.blocked,
        input=input,
        phase=phase,
        checkpoint=checkpoint,
        wait=wait,
        outcome=outcome,
        memos=memos,
    )
