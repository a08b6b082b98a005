"""Making a session of an export: all of it in its place, or nothing.

The file is read once, line by line, and believed in nothing. What it says goes through the contract
in bounded batches into a store under another name; at the end all of that store is read back and
compared with what was written; only then does it get its own name. So a cut at any point, of the
file or of this process, leaves nothing that anybody could take for a session, and the next import
to the same place clears away what is left.

Everything here is a generator that does a bounded piece of work between two yields.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Generator
from typing import Any, BinaryIO, Protocol

import attrs

from pidurable.errors import (
    ExportFileError,
    InternalError,
    PathTakenError,
    StorageAccessError,
    StorageTooNewError,
    check,
    show,
)
from pidurable.storage import _export_form as form
from pidurable.storage._contract import (
    RECORDS,
    Batch,
    Head,
    HolderClaim,
    Op,
    RecordKind,
    Storage,
)
from pidurable.storage._export import Exported, MoveProgress
from pidurable.storage._import_checks import ImportChecks, WrongLineError, parse_line
from pidurable.storage._migrate import SCHEMA
from pidurable.storage._places import Places, make_default_folder, refuse_taken
from pidurable.storage._sqlite import SqliteStorage

BATCH_ROWS = 1_000
BATCH_BYTES = 4 * 1024 * 1024
LOG_BYTES = 32 * 1024 * 1024
"""After so much the log of the new store is moved into its file."""
_LINE_BYTES_ABOVE = 1024 * 1024

Write = tuple[Op, tuple[Any, ...]]


class MakesStorage(Protocol):
    """Makes an empty storage for a session, for example the class `MemoryStorage`."""

    def __call__(self, *, uuid: str, created_us: int) -> Storage: ...


@attrs.frozen(kw_only=True)
class ImportReport:
    """What an import has made."""

    file: str
    """What was read; `-` for a stream."""
    store: str
    uuid: str
    """Of the session that was made."""
    origin: str
    """The uuid of the session that was exported: the same for a move."""
    as_copy: bool
    seq: int
    """The commit that it goes on from."""
    records: dict[str, int]
    """How many, by kind."""
    live_tasks: int
    """Tasks that go on when the store is opened for work."""
    storage: Storage | None
    """The storage, open and held by nobody, where one was made by a function."""


@attrs.frozen(kw_only=True)
class ImportOptions:
    """What an import is told."""

    as_copy: bool
    value_bytes_max: int
    claim: HolderClaim
    new_uuid: Callable[[], str]


# --- the file ---------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Lines:
    """The lines of a file: its first one is the session, its last one counts the others."""

    stream: BinaryIO
    file: str
    line_bytes_max: int
    number: int = 0
    size_bytes: int = 0
    last: bytes = b""
    canonical: bool = False
    """Whether the last line is written as an export writes it, the order of its names apart."""
    _digest: Any = attrs.Factory(hashlib.sha256)
    """Of the lines before the last one."""

    def wrong(self, error: WrongLineError) -> ExportFileError:
        """The error for callers."""
        line = self.number if error.line is None else error.line
        return ExportFileError(self.file, error.problem, line, error.path, error.value)

    def header(self) -> Head:
        """The session that the file is of.

        Raises:
            WrongLineError: It is not the beginning of an export.
            StorageTooNewError: A newer version wrote it.
        """
        try:
            fields = self._next()
        except WrongLineError as error:
            error.problem = f"it is not an export: {error.problem}"
            raise
        if fields is None:
            raise WrongLineError("it is not an export: it is empty", line=1)
        if fields.get("format") != form.FORMAT:
            found = show(fields.get("format"))
            raise WrongLineError(
                f"it is not an export, expected {form.FORMAT!r}", "$.format", found
            )
        for name, known in (("version", form.VERSION), ("schema", SCHEMA)):
            number = fields.get(name)
            if type(number) is int and number > known:
                raise StorageTooNewError(self.file, number, known)
            if number != known:
                raise WrongLineError(f"expected {known}", f"$.{name}", show(number))
        head = form.read_header(fields)
        if not isinstance(head, Head):
            raise WrongLineError(head[1], head[0])
        return head

    def record(self, counts: dict[str, int]) -> dict[str, Any] | None:
        """The fields of the next record; None at the end, which is checked to be one.

        Args:
            counts: How many records of each kind came before.

        Raises:
            WrongLineError: The line is no JSON or too long, or the end is not what it must be.
        """
        fields = self._next()
        if fields is None:
            self.number += 1
            raise WrongLineError("the file was cut: its last line, which counts all, is missing")
        if fields.get("record") != "end":
            return fields
        problem = form.names_problem(fields, frozenset(("record", "records", "sha256")))
        if problem is not None:
            raise WrongLineError(problem[1], problem[0])
        if fields["sha256"] != self._digest.hexdigest():
            what = "the lines before are not those that were written: the file was changed"
            raise WrongLineError(what, "$.sha256", show(fields["sha256"]))
        if fields["records"] != counts:
            raise WrongLineError(f"expected {counts}", "$.records", show(fields["records"]))
        if self.stream.read(1):
            self.number += 1
            raise WrongLineError("expected nothing behind the last line")
        return None

    def _next(self) -> dict[str, Any] | None:
        self._digest.update(self.last)
        most = self.line_bytes_max
        try:
            self.last = self.stream.readline(most + 1)
        except OSError as error:
            problem = f"it cannot be read ({error.strerror})"
            raise ExportFileError(self.file, problem, self.number + 1) from error
        if not self.last:
            return None
        self.number += 1
        if len(self.last) > most:
            raise WrongLineError(f"it has more than {most} bytes (value_bytes_max allows no more)")
        if not self.last.endswith(b"\n"):
            raise WrongLineError("the file was cut within this line")
        self.size_bytes += len(self.last)
        fields, self.canonical = parse_line(self.last)
        return fields


# --- into a storage ---------------------------------------------------------------------------


@attrs.define(eq=False)
class _Load:
    """Sends what was read to the storage, in batches."""

    storage: Storage
    epoch: int
    head: Head
    _lines: list[tuple[int, list[Write]]] = attrs.Factory(list)
    """By line of the file, what it writes."""
    _size: int = 0
    _logged: int = 0

    def add(self, line: int, writes: list[Write], size: int) -> None:
        """Take what one line writes, and send what there is if that is enough."""
        self._lines.append((line, writes))
        self._size += size
        if len(self._lines) >= BATCH_ROWS or self._size >= BATCH_BYTES:
            self.send()

    def send(self, *, last: bool = False) -> None:
        """Send what there is.

        Args:
            last: Everything was added: make it durable, and the store as clean as it was.

        Raises:
            WrongLineError: A line contradicts one before it.
        """
        writes = [write for _, each in self._lines for write in each]
        try:
            self._apply(writes, last=last)
        except InternalError:
            # A key that is unique occurs twice. Nothing was stored: find out where.
            for line, each in self._lines:
                try:
                    self._apply(each)
                except InternalError as error:
                    problem = f"it contradicts a line before it ({error.problem})"
                    raise WrongLineError(problem, line=line) from error
            raise
        self._logged += self._size
        self._lines, self._size = [], 0
        if self._logged >= LOG_BYTES:
            self.storage.checkpoint()
            self._logged = 0

    def _apply(self, writes: list[Write], *, last: bool = False) -> None:
        self.storage.apply(
            Batch(
                epoch=self.epoch,
                seq=self.head.seq,
                next_id=self.head.next_id,
                flush=last,
                writes=writes,
                clean=last and self.head.clean,
            )
        )


def _inserts(kind: RecordKind, row: tuple[Any, ...]) -> list[Write]:
    """What stores a record that is as its row says."""
    if kind is RecordKind.SIGNAL:
        inserted: list[Write] = [(Op.SIGNAL, row[:-1])]
        return [*inserted, (Op.SIGNAL_READ, (row[0],))] if row[-1] else inserted
    if kind is RecordKind.DOCUMENT and row[-1] is not None:
        return [(Op.DOCUMENT, (*row[:-1], None)), (Op.DOCUMENT_RETIRE, (row[0], row[-1]))]
    return [(_INSERT[kind], row)]


_INSERT = {
    RecordKind.CONVERSATION: Op.CONVERSATION,
    RecordKind.ENTRY: Op.ENTRY,
    RecordKind.TASK: Op.TASK,
    RecordKind.INPUT: Op.TASK_INPUT,
    RecordKind.CHECKPOINT: Op.CHECKPOINT,
    RecordKind.WAIT: Op.WAIT,
    RecordKind.OUTCOME: Op.OUTCOME,
    RecordKind.MEMO: Op.MEMO,
    RecordKind.SUBMISSION: Op.SUBMISSION,
    RecordKind.DOCUMENT: Op.DOCUMENT,
    RecordKind.REVISION: Op.REVISION,
    RecordKind.BLOB: Op.BLOB,
    RecordKind.COMMAND: Op.COMMAND,
    RecordKind.STUB: Op.STUB,
    RecordKind.REMOVAL: Op.REMOVAL,
}


_KEYED: dict[RecordKind, int] = {
    kind: RECORDS[kind].columns.index(column)
    for kind, column in (
        (RecordKind.CONVERSATION, "key"),
        (RecordKind.TASK, "key"),
        (RecordKind.SIGNAL, "key"),
        (RecordKind.SUBMISSION, "request_id"),
        (RecordKind.STUB, "key"),
    )
}
"""Where the key stands by which a record, or what is left of it, is found when it is asked for."""


@attrs.define(eq=False)
class _Copying:
    """What a copy has anew: no effect of it may be taken for one of the original.

    Inside of the session it is the other way round: code that runs again in the copy finds what it
    had made under a key that the session gave it (`ctx.key`), so there such a key follows the uuid.
    """

    new_uuid: Callable[[], str] | None
    """None for a move."""
    origin: str
    uuid: str

    def row(self, kind: RecordKind, row: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.new_uuid is None:
            return row
        place = _KEYED.get(kind)
        key = None if place is None else row[place]
        if place is not None and key is not None and key.startswith(f"{self.origin}:"):
            renamed = self.uuid + key.removeprefix(self.origin)
            row = (*row[:place], renamed, *row[place + 1 :])
        if kind is RecordKind.CONVERSATION:
            row = (row[0], self.new_uuid(), *row[2:])
        return row


def _load_steps(
    lines: _Lines, checks: ImportChecks, load: _Load, copying: _Copying
) -> Generator[MoveProgress, None, str]:
    """Read all records and send them; returns the SHA-256 of what an export now has to give."""
    digest = hashlib.sha256(form.header_line(load.head))
    last: RecordKind | None = None
    while (fields := lines.record(checks.counts)) is not None:
        each, row = checks.record(fields, lines.number)
        if last is not each.kind:
            # What refers to blobs asks for them, so they must be there.
            load.send()
        last = kind = each.kind
        _check_blobs(load.storage, each, row)
        copied = copying.row(kind, row)
        same = copied is row and lines.canonical and tuple(fields) == each.written
        # Of the same bytes there are several spellings in base64.
        same = same and kind is not RecordKind.BLOB
        row, line = copied, lines.last if same else form.record_line(each, copied)
        digest.update(line)
        load.add(lines.number, _inserts(kind, row), len(line))
        if lines.number % BATCH_ROWS == 0:
            yield MoveProgress(stage="reading", done=lines.number - 1)
    checks.finish()
    load.send(last=True)
    return digest.hexdigest()


def _check_blobs(storage: Storage, each: form.RecordForm, row: tuple[Any, ...]) -> None:
    for place in each.blob_columns:
        value = row[place]
        if value is not None and value.startswith("@") and not storage.has_blob(value[1:]):
            problem = "there is no such blob in this file"
            raise WrongLineError(problem, f"$.{each.names[place]}", show(value))


def _verify_steps(storage: Storage, digest: str) -> Generator[MoveProgress, None, Exported]:
    """Read everything back, as an export does, and compare."""
    exported = Exported(storage, storage.head())
    for _ in exported.chunks():
        yield MoveProgress(stage="checking", done=exported.records)
    check(exported.sha256 == digest, f"{storage.store} does not hold what was imported")
    return exported


def _fill_steps(
    lines: _Lines, make: MakesStorage, options: ImportOptions, stack: contextlib.ExitStack
) -> Generator[MoveProgress, None, ImportReport]:
    """Make the storage and everything in it; it is open at the end, and nobody holds it."""
    try:
        origin = lines.header()
        uuid = options.new_uuid() if options.as_copy else origin.uuid
        head = origin._replace(uuid=uuid)
        storage = make(uuid=uuid, created_us=head.created_us)
        stack.callback(storage.close)
        epoch = storage.acquire(options.claim, takeover=False).epoch
        load = _Load(storage, epoch, head)
        checks = ImportChecks(head, options.value_bytes_max)
        new_uuid = options.new_uuid if options.as_copy else None
        copying = _Copying(new_uuid, origin.uuid, uuid)
        digest = yield from _load_steps(lines, checks, load, copying)
    except WrongLineError as error:
        raise lines.wrong(error) from error
    exported = yield from _verify_steps(storage, digest)
    storage.release(epoch)
    return ImportReport(
        file=lines.file,
        store=storage.store,
        uuid=uuid,
        origin=origin.uuid,
        as_copy=options.as_copy,
        seq=head.seq,
        records=exported.counts,
        live_tasks=exported.live_tasks,
        storage=storage,
    )


def _refuse_remains(target: str) -> None:
    """Refuse a path beside which the log of another store lies: SQLite would take it for ours.

    Raises:
        PathTakenError: There is one.
    """
    for suffix in ("-wal", "-journal"):
        left = f"{target}{suffix}"
        if os.path.lexists(left) and os.lstat(left).st_size > 0:
            raise PathTakenError(left, "it belongs to a store that was here; put it out of the way")


def import_steps(
    file: str | BinaryIO, target: str | MakesStorage, options: ImportOptions
) -> Generator[MoveProgress, None, ImportReport]:
    """Import a session, a piece at a time.

    Args:
        file: The path of an export, or a stream of bytes.
        target: The path of the new store, absolute, or what makes a storage.
        options: See there.

    Raises:
        PathTakenError: There is something at the path of the store.
        ExportFileError: The file is no export, or was cut or changed. Nothing was made.
        StorageTooNewError: A newer version wrote it.
        StorageRefusedError: The disk is full. Nothing was made.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(file, str):
            try:
                stream: BinaryIO = stack.enter_context(open(file, "rb"))
            except OSError as error:
                raise ExportFileError(file, f"it cannot be read ({error.strerror})") from error
            name = file
        else:
            stream, name = file, "-"
        lines = _Lines(stream, name, 2 * options.value_bytes_max + _LINE_BYTES_ABOVE)
        if not isinstance(target, str):
            with contextlib.ExitStack() as made:
                report = yield from _fill_steps(lines, target, options, made)
                made.pop_all()  # it stays open: the caller has it now
            return report
        refuse_taken(target, "name another path; a store is never overwritten")
        _refuse_remains(target)
        make_default_folder(target)
        places = stack.enter_context(Places(target, "import", StorageAccessError).taken())
        part = places.named("part")
        with contextlib.ExitStack() as made:
            make = functools.partial(SqliteStorage, part, create=True)
            report = yield from _fill_steps(lines, make, options, made)
        # The last handle has moved the log into the file, and flushed it.
        check(not os.path.exists(f"{part}-wal"), f"the log of {part} is still there")
        places.put("part")
        return attrs.evolve(report, store=target, storage=None)
