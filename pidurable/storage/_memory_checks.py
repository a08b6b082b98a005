"""What a STRICT table would refuse, for the memory backend: types, missing values, ranges."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from pidurable.errors import InternalError
from pidurable.storage._contract import (
    CommandRow,
    ConversationRow,
    DocumentRow,
    EntryRow,
    Op,
    RemovalRow,
    RevisionRow,
    SignalRow,
    StubRow,
    SubmissionRow,
    SubmissionStateRow,
    TaskRow,
    TaskStateRow,
)

_Columns = tuple[tuple[str, tuple[type, ...]], ...]

_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1


def _columns(row: type[Any]) -> _Columns:
    """Name and types of the columns of a row class, None's type among them where it may be NULL."""
    return tuple((name, get_args(kind) or (kind,)) for name, kind in get_type_hints(row).items())


def _plain(**columns: type) -> _Columns:
    return tuple((name, (kind,)) for name, kind in columns.items())


_COLUMNS: dict[Op, _Columns] = {
    Op.CONVERSATION: _columns(ConversationRow),
    Op.ENTRY: _columns(EntryRow),
    Op.TASK: _columns(TaskRow),
    Op.TASK_INPUT: _plain(task=int, value=str),
    Op.TASK_STATE: _columns(TaskStateRow),
    Op.CHECKPOINT: _plain(task=int, phase=str, value=str, at_us=int),
    Op.CHECKPOINT_DELETE: _plain(task=int),
    Op.WAIT: _plain(task=int, value=str),
    Op.WAIT_DELETE: _plain(task=int),
    Op.OUTCOME: _plain(task=int, value=str),
    Op.OUTCOME_DELETE: _plain(task=int),
    Op.MEMO: _plain(task=int, name=str, value=str),
    Op.MEMOS_DELETE: _plain(task=int),
    Op.SIGNAL: _columns(SignalRow),
    Op.SIGNAL_DELETE: _plain(id=int),
    Op.SIGNAL_READ: _plain(id=int),
    Op.SIGNALS_DELETE: _plain(task=int),
    Op.SUBMISSION: _columns(SubmissionRow),
    Op.SUBMISSION_STATE: _columns(SubmissionStateRow),
    Op.DOCUMENT: _columns(DocumentRow),
    Op.DOCUMENT_RETIRE: _plain(document=int, seq=int),
    Op.DOCUMENT_TERMS: _plain(document=int, history=str, fork=str),
    Op.REVISION: _columns(RevisionRow),
    Op.REVISIONS_DELETE: _plain(document=int, seq=int),
    Op.COMMAND: _columns(CommandRow),
    Op.STUB: _columns(StubRow),
    Op.REMOVAL: _columns(RemovalRow),
    Op.REMOVAL_DELETE: _plain(root=int),
    Op.TASK_DELETE: _plain(task=int),
    Op.INPUT_DELETE: _plain(task=int),
    Op.CONVERSATION_DELETE: _plain(conversation=int),
    Op.ENTRY_DELETE: _plain(entry=int),
    Op.SUBMISSION_DELETE: _plain(submission=int),
    Op.DOCUMENT_DELETE: _plain(document=int),
    Op.BLOB_DELETE: _plain(sha256=str),
    Op.COMMAND_DELETE: _plain(id=str),
    Op.BLOB: (("sha256", (str,)), ("bytes", (bytes, bytearray, memoryview))),
}


def check_row(op: Op, row: tuple[Any, ...]) -> None:
    """Refuse a row that SQLite would refuse.

    Raises:
        InternalError: It has another number of values, or one of another type or range.
    """
    columns = _COLUMNS[op]
    if len(row) != len(columns):
        raise InternalError(f"{op.name}: {len(row)} values, expected {len(columns)}")
    for value, (name, kinds) in zip(row, columns, strict=True):
        if not isinstance(value, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise InternalError(f"{op.name}.{name} is a {type(value).__name__}, not {expected}")
        if isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX:
            raise InternalError(f"{op.name}.{name} is {value}, which does not fit into 64 bits")
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InternalError(f"{op.name}.{name} is not valid Unicode ({error})") from error
