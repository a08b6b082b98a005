"""Writing an export: one state of a session, page by page, into a file that is whole or not there.

Everything here is a generator that does a bounded piece of work between two yields, so that whoever
runs it in a thread can stop it there; closing it takes away whatever is not finished.

* A store of SQLite is copied first, by SQLite's own backup, and the copy is read: so the export is
  one state however long it takes, and a holder beside it is not held up by a long read.
* Another storage is read as it is; where it changed meanwhile, the export is given up.
* The file is written under another name, and gets its own when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO, Protocol

import attrs

from pidurable.errors import ExportFileError, StorageAccessError, StorageCorruptError, show
from pidurable.storage import _export_form as form
from pidurable.storage._contract import Head, RecordKind, Storage
from pidurable.storage._memory import MemoryStorage
from pidurable.storage._places import Places, refuse_irreplaceable, refuse_taken
from pidurable.storage._sqlite import SqliteStorage
from pidurable.storage._sqlite_copy import copy_steps

PAGE_ROWS_MAX = 256
PAGE_BYTES = 1024 * 1024
"""A page that is larger is followed by a smaller one: values may be large, memory stays small."""


@attrs.frozen(kw_only=True)
class MoveProgress:
    """How far an export or import is."""

    stage: str
    """`copying` (pages of the store), `writing`, `reading` or `checking` (records)."""
    done: int
    total: int | None = None
    """None where nobody knows yet."""


@attrs.frozen(kw_only=True)
class ExportReport:
    """What an export holds."""

    file: str
    """Its path; `-` where it was written into a stream."""
    uuid: str
    """Of the session."""
    seq: int
    """The last commit that it holds."""
    records: dict[str, int]
    """How many, by kind."""
    size_bytes: int
    sha256: str
    """Of every byte but those of the last line, which says it too."""
    live_tasks: int
    """Tasks that have not ended, and would go on where this is imported."""


class Scanned(Protocol):
    """What an export needs of a storage."""

    @property
    def store(self) -> str: ...

    def head(self) -> Head: ...

    def scan(
        self, kind: RecordKind, *, after: tuple[Any, ...] | None = None, limit: int = 1000
    ) -> list[tuple[Any, ...]]: ...


@attrs.define(eq=False)
class Exported:
    """The lines of one session, and afterwards what they came to."""

    storage: Scanned
    head: Head
    counts: dict[str, int] = attrs.Factory(dict)
    size_bytes: int = 0
    live_tasks: int = 0
    _digest: Any = attrs.Factory(hashlib.sha256)

    @property
    def records(self) -> int:
        """So many lines of records were given out so far."""
        return sum(self.counts.values())

    @property
    def sha256(self) -> str:
        """Of all that was given out so far, but for the last line."""
        digest: str = self._digest.hexdigest()
        return digest

    def chunks(self) -> Iterator[bytes]:
        """The lines, some at a time.

        Raises:
            StorageCorruptError: A record holds what no export can.
        """
        yield self._given(form.header_line(self.head))
        for each in form.FORMS:
            pages = Pages(self.storage, each)
            while rows := pages.next():
                self.counts[each.kind.value] = self.counts.get(each.kind, 0) + len(rows)
                if each.kind is RecordKind.TASK:
                    self.live_tasks += sum(row[_STATUS] < _TERMINAL for row in rows)
                chunk = b"".join([self._line(each, row) for row in rows])
                pages.adapt(len(chunk))
                yield self._given(chunk)
        last = form.end_line(self.counts, self.sha256)
        self.size_bytes += len(last)
        yield last

    def _given(self, chunk: bytes) -> bytes:
        self._digest.update(chunk)
        self.size_bytes += len(chunk)
        return chunk

    def _line(self, each: form.RecordForm, row: tuple[Any, ...]) -> bytes:
        """One line; what could not be imported again is told now, and not when it is needed."""
        try:
            line = form.record_line(each, row)
        except UnicodeEncodeError as error:
            raise self._damaged(each, row, f"it is not valid Unicode ({error.reason})") from error
        if each.kind is RecordKind.BLOB:
            if hashlib.sha256(row[1]).hexdigest() != row[0]:
                raise self._damaged(each, row, "it has other bytes than its name says")
        elif b"\\u0000" in line and any(isinstance(v, str) and "\0" in v for v in row):
            raise self._damaged(each, row, "a text of it holds a NUL")
        return line

    def _damaged(
        self, each: form.RecordForm, row: tuple[Any, ...], problem: str
    ) -> StorageCorruptError:
        key = " ".join(show(value, length=80) for value in row[: each.key])
        return StorageCorruptError(self.storage.store, f"{each.kind} {key}: {problem}")


_STATUS = form.BY_NAME["task"].names.index("status")
_TERMINAL = 4


@attrs.define(eq=False)
class _Still:
    """What a session in memory held at one moment; its rows are shared, not copied."""

    store: str
    _head: Head
    _records: dict[RecordKind, list[tuple[Any, ...]]]
    _places: dict[RecordKind, int] = attrs.Factory(dict)

    def head(self) -> Head:
        return self._head

    def scan(
        self, kind: RecordKind, *, after: tuple[Any, ...] | None = None, limit: int = 1000
    ) -> list[tuple[Any, ...]]:
        # Read once, from its beginning to its end.
        first = 0 if after is None else self._places[kind]
        self._places[kind] = first + limit
        return self._records[kind][first : first + limit]


@attrs.define(eq=False)
class Pages:
    """Every record of a kind, by its key, in pages that adapt to how large the records are."""

    storage: Scanned
    form: form.RecordForm
    _limit: int = 1
    _after: tuple[Any, ...] | None = None
    _rows: int = 0
    """Of the last page."""
    _ended: bool = False

    def next(self) -> list[tuple[Any, ...]]:
        """The next page; an empty one at the end."""
        if self._ended:
            return []
        rows = self.storage.scan(self.form.kind, after=self._after, limit=self._limit)
        self._rows, self._ended = len(rows), len(rows) < self._limit
        if rows:
            self._after = tuple(rows[-1][: self.form.key])
        return rows

    def adapt(self, size: int) -> None:
        """Take notice of how many bytes the last page had."""
        fitting = PAGE_BYTES * self._rows // (size + 1)
        self._limit = max(1, min(2 * self._limit, fitting, PAGE_ROWS_MAX))


# --- a file -----------------------------------------------------------------------------------


def export_steps(
    source: str | Storage, file: str | BinaryIO, *, overwrite: bool, folder: str | None
) -> Generator[MoveProgress, None, ExportReport]:
    """Export a session, a piece at a time.

    Args:
        source: The path of a store, or an open storage.
        file: The path of the file, absolute, or a stream of bytes, which stays open.
        overwrite: Replace what is there.
        folder: Where a copy of the store may lie if the file is a stream.

    Raises:
        PathTakenError: There is something at the path already, and `overwrite` is False; or it is
            a store, or no file, which nothing replaces.
        ExportFileError: The file cannot be written. Nothing is left of it.
        StorageCorruptError: The store is damaged.
    """
    named = source if isinstance(source, str) else source.store
    with contextlib.ExitStack() as stack:
        stack.enter_context(_damage_of(os.path.realpath(named)))
        if not isinstance(file, str):
            place = tempfile.TemporaryDirectory(prefix="pidurable-export-", dir=folder)
            copy = os.path.join(stack.enter_context(place), "copy")
            storage = yield from _still_steps(source, copy, stack)
            return (yield from _write_steps(storage, file, "-"))
        if not overwrite:
            refuse_taken(file, "export to another path, or say that this file is to be replaced")
        refuse_irreplaceable(file, named)
        places = stack.enter_context(Places(file, "export", ExportFileError).taken())
        storage = yield from _still_steps(source, places.named("copy"), stack)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(places.named("part"), flags, 0o600), "wb") as stream:
            report = yield from _write_steps(storage, stream, file)
            stream.flush()
            os.fsync(stream.fileno())
        places.put("part", overwrite=overwrite)
        return report


@contextlib.contextmanager
def _damage_of(store: str) -> Iterator[None]:
    """Name the store where damage was found in its copy, which nobody has ever heard of."""
    try:
        yield
    except StorageCorruptError as error:
        error.store = store
        raise


def _still_steps(
    source: str | Storage, copy: str, stack: contextlib.ExitStack
) -> Generator[MoveProgress, None, Scanned]:
    """What can be read for as long as it takes, and does not change."""
    if isinstance(source, MemoryStorage):
        return _Still(source.store, *source.everything())
    if not isinstance(source, str | SqliteStorage):
        return source
    if isinstance(source, SqliteStorage):
        copying = copy_steps(source.store, copy, vfs=source.vfs)
    else:
        copying = copy_steps(source, copy)
    while True:
        try:
            done, total = next(copying)
        except StopIteration as copied:
            storage: SqliteStorage = copied.value
            stack.callback(_let_go, storage)
            return storage
        yield MoveProgress(stage="copying", done=done, total=total)


def _let_go(copy: SqliteStorage) -> None:
    """Close a copy, which is thrown away; nothing of the export depends on how that goes."""
    with contextlib.suppress(StorageAccessError):
        copy.close()


def _write_steps(
    storage: Scanned, stream: BinaryIO, file: str
) -> Generator[MoveProgress, None, ExportReport]:
    exported = Exported(storage, storage.head())
    for chunk in exported.chunks():
        try:
            stream.write(chunk)
        except BrokenPipeError:
            raise  # whoever reads the stream went away, which is for the caller to judge
        except OSError as error:
            raise ExportFileError(file, f"it cannot be written ({error.strerror})") from error
        yield MoveProgress(stage="writing", done=exported.records)
    now = storage.head()
    if (now.seq, now.next_id) != (exported.head.seq, exported.head.next_id):
        problem = (
            f"the session changed while it was read (commit {exported.head.seq} became "
            f"{now.seq}); export it while nothing works on it"
        )
        raise ExportFileError(file, problem)
    return ExportReport(
        file=file,
        uuid=exported.head.uuid,
        seq=exported.head.seq,
        records=exported.counts,
        size_bytes=exported.size_bytes,
        sha256=exported.sha256,
        live_tasks=exported.live_tasks,
    )
