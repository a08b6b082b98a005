"""Large values: what is over 64 KiB inside a record lies in a blob, and the record refers to it.

A blob is stored once under the SHA-256 of its bytes. A text that is moved there leaves `@` and the
digest in its place; no JSON begins with `@`, so it cannot be mistaken for a value. This is done in
one place, in front of the storage, so that no writer and no reader can forget it:

* a batch that is stored has its large texts moved: messages, data and edits of entries, the content
  of submissions, inputs and outcomes of tasks. Documents, checkpoints, waits, signals and memos
  stay as they are: they change or go away, or have smaller limits of their own;
* inputs, outcomes and submissions are given back whole. Rows of entries keep their references,
  which are followed when somebody looks at the entry: see `followed`.

Bytes are checked against their name whenever they are read. What is missing or damaged is told as
`StorageCorruptError` naming the record, and never taken for something that is not there.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any, cast

from pidurable.errors import StorageCorruptError
from pidurable.records._limits import BLOB_BYTES_MIN
from pidurable.storage import (
    Batch,
    EntryRow,
    Op,
    RevisionRow,
    SignalRow,
    StartRow,
    Storage,
    SubmissionRow,
)

__all__ = [
    "are_short",
    "digest",
    "followed",
    "is_digest",
    "is_reference",
    "moved_blobs",
    "with_blobs",
]

_REFERENCE = re.compile("@([0-9a-f]{64})")

_MOVED: dict[Op, tuple[int, ...]] = {
    Op.ENTRY: tuple(EntryRow._fields.index(name) for name in ("edits", "messages", "data")),
    Op.SUBMISSION: (SubmissionRow._fields.index("content"),),
    Op.TASK_INPUT: (1,),
    Op.OUTCOME: (1,),
}
"""By kind of write, which of its parameters are moved when they are large."""


def _span(columns: tuple[str, ...], first: str, last: str) -> slice:
    return slice(columns.index(first), columns.index(last) + 1)


_NONE = slice(0)
_TEXTS: dict[Op, slice] = {
    Op.CONVERSATION: _NONE,
    Op.ENTRY: _span(EntryRow._fields, "edits", "data"),
    Op.TASK: _NONE,
    Op.TASK_INPUT: slice(1, 2),
    Op.TASK_STATE: _NONE,
    Op.CHECKPOINT: slice(2, 3),
    Op.CHECKPOINT_DELETE: _NONE,
    Op.WAIT: slice(1, 2),
    Op.WAIT_DELETE: _NONE,
    Op.OUTCOME: slice(1, 2),
    Op.MEMO: slice(2, 3),
    Op.SIGNAL: _span(SignalRow._fields, "payload", "payload"),
    Op.SIGNAL_READ: _NONE,
    Op.SUBMISSION: _span(SubmissionRow._fields, "content", "content"),
    Op.SUBMISSION_STATE: _NONE,
    Op.DOCUMENT: _NONE,
    Op.REVISION: _span(RevisionRow._fields, "value", "value"),
}
"""By kind of write, where the parameters stand that may be long, moved or not. Other kinds are of
no ordinary commit."""

SHORT_CHARACTERS = BLOB_BYTES_MIN // 4
"""A text of no more characters than this is short: its bytes need not be counted."""


def are_short(writes: Sequence[tuple[Op, tuple[Any, ...]]]) -> bool:
    """Whether these are the writes of an ordinary commit, without a long text."""
    try:
        texts = [row[_TEXTS[op]] for op, row in writes]
    except KeyError:
        return False
    lengths = map(len, filter(None, itertools.chain.from_iterable(texts)))
    return max(lengths, default=0) <= SHORT_CHARACTERS


def digest(data: bytes) -> str:
    """The name of a blob: SHA-256 of its bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def is_digest(name: object) -> bool:
    """Whether a value can be the name of a blob."""
    return isinstance(name, str) and _REFERENCE.fullmatch(f"@{name}") is not None


def is_reference(text: str | None) -> bool:
    """Whether a stored text stands for one that lies in a blob."""
    return text is not None and text.startswith("@")


def followed(storage: Storage, text: str, record: str) -> str:
    """The text that a reference stands for; a text that is none is given back.

    Args:
        storage: Has the blob.
        text: As it is stored.
        record: What an error names, say `the data of entry 5`.

    Raises:
        StorageCorruptError: The blob is missing or damaged, or the reference is.
    """
    if not text.startswith("@"):
        return text
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise StorageCorruptError(storage.store, f"{record} is neither JSON nor in a blob")
    try:
        data = storage.blob(found[1])
    except StorageCorruptError as damaged:
        raise StorageCorruptError(storage.store, f"{record}: {damaged.problem}") from damaged
    if data is None:
        raise StorageCorruptError(storage.store, f"{record}: blob {found[1]} is missing")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StorageCorruptError(storage.store, f"{record}: blob {found[1]} is no text") from error


class _BlobStorage:
    """A storage that moves what is large, and gives it back."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def apply(self, batch: Batch) -> None:
        if not batch.short:
            large = {
                place: found
                for place, (op, row) in enumerate(batch.writes)
                if op in _MOVED and (found := _large(row, _MOVED[op]))
            }
            if large:
                batch = batch._replace(writes=_with_moved(batch.writes, large))
        self._storage.apply(batch)

    def blob(self, sha256: str) -> bytes | None:
        data = self._storage.blob(sha256)
        if data is not None and digest(data) != sha256:
            raise StorageCorruptError(
                self._storage.store, f"blob {sha256} has other bytes than its name says"
            )
        return data

    # --- what is given back whole --------------------------------------------------------

    def task_input(self, task: int) -> str | None:
        text = self._storage.task_input(task)
        return None if text is None else self._follow(text, f"the input of task {task}")

    def task_outcome(self, task: int) -> str | None:
        text = self._storage.task_outcome(task)
        return None if text is None else self._follow(text, f"the outcome of task {task}")

    def task_starts(self, tasks: Sequence[int]) -> list[StartRow]:
        found: list[StartRow] = []
        for row in self._storage.task_starts(tasks):
            try:
                text = self._follow(row.input, f"the input of task {row.task}")
            except StorageCorruptError:
                # Left out: who reads this one alone is told, and the others are not held up.
                continue
            found.append(row if text is row.input else row._replace(input=text))
        return found

    def submission(self, id: int) -> SubmissionRow | None:
        row = self._storage.submission(id)
        return None if row is None else self._whole(row)

    def submission_by_request(self, conversation: int, request_id: str) -> SubmissionRow | None:
        row = self._storage.submission_by_request(conversation, request_id)
        return None if row is None else self._whole(row)

    def open_submissions(self, conversation: int) -> list[SubmissionRow]:
        return [self._whole(row) for row in self._storage.open_submissions(conversation)]

    def _whole(self, row: SubmissionRow) -> SubmissionRow:
        if not is_reference(row.content):
            return row
        text = self._follow(row.content, f"the content of submission {row.id}")
        return row._replace(content=text)

    def _follow(self, text: str, record: str) -> str:
        return followed(cast("Storage", self), text, record)


_Write = tuple[Op, tuple[Any, ...]]
_Large = dict[int, tuple[str, bytes]]
"""By column, the name and the bytes of what is moved."""


def _large(row: tuple[Any, ...], columns: tuple[int, ...]) -> _Large:
    """What is moved of a row; usually nothing."""
    found: _Large = {}
    for column in columns:
        text = row[column]
        if text is None or len(text) <= SHORT_CHARACTERS:
            continue
        data = text.encode()
        if len(data) > BLOB_BYTES_MIN:
            found[column] = digest(data), data
    return found


def moved_blobs(op: Op, row: tuple[Any, ...]) -> list[str]:
    """The names of the blobs that large values of a write will lie in."""
    columns = _MOVED.get(op)
    return [] if columns is None else [name for name, _ in _large(row, columns).values()]


def _with_moved(writes: Sequence[_Write], large: dict[int, _Large]) -> list[_Write]:
    """The writes, with what is large in blobs before them, by the place of each that has some."""
    moved: list[_Write] = []
    for place, (op, row) in enumerate(writes):
        found = large.get(place)
        if found is not None:
            moved += ((Op.BLOB, blob) for blob in found.values())
            row = _referring(row, found)
        moved.append((op, row))
    return moved


def _referring(row: tuple[Any, ...], large: _Large) -> tuple[Any, ...]:
    return tuple(
        f"@{large[column][0]}" if column in large else value for column, value in enumerate(row)
    )


def with_blobs(storage: Storage) -> Storage:
    """The same storage, with large values in blobs."""
    return cast("Storage", _BlobStorage(storage))
