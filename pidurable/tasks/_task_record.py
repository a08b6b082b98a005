"""Task records, assembled from their rows for people and programs that look."""

from __future__ import annotations

from typing import cast

from pidurable.errors import UnknownTaskError, show
from pidurable.records import _codec, _json
from pidurable.records._checks import is_id
from pidurable.records._tasks import OnRestart, Status, TaskRecord
from pidurable.session._stubs import unknown_task
from pidurable.storage import Storage, TaskRow


def stored_task(storage: Storage, task_id: int) -> TaskRecord:
    """Everything that a storage holds of a task, by its id.

    Raises:
        UnknownTaskError: There is no such task, or no longer.
    """
    if not is_id(task_id):
        raise UnknownTaskError(show(task_id))
    row = storage.task(task_id)
    if row is not None:
        record = task_record(storage, row)
        # It may go with its tree between two of these reads.
        if record.outcome is not None or storage.task(task_id) is not None:
            return record
    raise unknown_task(storage, task_id)


def task_record(storage: Storage, row: TaskRow) -> TaskRecord:
    """Everything that a storage holds of one task."""
    input_text = storage.task_input(row.id)
    checkpoint = storage.task_checkpoint(row.id)
    wait = storage.task_wait(row.id)
    outcome = storage.task_outcome(row.id)
    return TaskRecord(
        id=row.id,
        conversation_id=row.conversation,
        kind=row.kind,
        version=row.version,
        status=Status(row.status),
        owner=row.owner,
        key=row.key,
        background=bool(row.background),
        on_restart=cast("OnRestart | None", row.on_restart),
        deadline_us=row.deadline_us,
        created_us=row.created_us,
        started_us=row.started_us,
        ended_us=row.ended_us,
        abort_us=row.abort_us,
        abort_reason=None if row.abort_us is None else row.abort_reason,
        invocations=row.invocations,
        recoveries=row.recoveries,
        tries=row.tries,
        ready_us=row.ready_us,
        woken_by=row.woken_by,
        blocked=row.blocked,
        input=None if input_text is None else _json.loads_stored(input_text),
        phase=None if checkpoint is None else checkpoint[0],
        checkpoint=None if checkpoint is None else _json.loads_stored(checkpoint[1]),
        wait=None if wait is None else _codec.decode_wait(_json.loads_stored(wait)),
        outcome=None if outcome is None else _codec.decode_outcome(_json.loads_stored(outcome)),
        memos={name: _json.loads_stored(value) for name, value in storage.task_memos(row.id)},
    )
