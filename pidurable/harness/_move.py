"""Export and import: a whole session in one file, between any two backends.

An export is read from one state of the session and written whole or not at all; an import is made
whole or not at all. Both work a piece at a time in a thread, and can be cancelled between pieces.

Who imports says which of two things it is:

* a move: the session goes on there, under its own uuid. Effects have the keys that they had, so
  what was done once is not done again; therefore the original must never be worked on again, or
  two sessions do the same work under the same keys;
* a copy: another session with the same past. It has a uuid of its own, and so have its
  conversations; the keys of its effects are others (`ctx.key`), so work that is not finished is
  done by the original and by the copy, each for itself.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Generator
from typing import BinaryIO, TypeVar, cast

import trio

from pidurable.errors import InvalidArgumentError, show
from pidurable.records._limits import Settings
from pidurable.session._seams import (
    Blocking,
    Clock,
    Randomness,
    SystemClock,
    SystemRandomness,
    ThreadBlocking,
)
from pidurable.storage import HolderClaim, Storage
from pidurable.storage._export import ExportReport, MoveProgress, export_steps
from pidurable.storage._import import ImportOptions, ImportReport, MakesStorage, import_steps

__all__ = ["export_session", "import_session"]

_PIECE_SECONDS = 0.05

ReportT = TypeVar("ReportT")
Path = str | os.PathLike[str]


async def export_session(
    store: Path | Storage,
    file: Path | BinaryIO,
    *,
    overwrite: bool = False,
    progress: Callable[[MoveProgress], None] | None = None,
    blocking: Blocking | None = None,
) -> ExportReport:
    """Write every record of a session into a file of JSON lines.

    Works beside a running holder and on a store that nobody holds; holds nothing itself. The same
    session gives the same bytes, on every backend. The file is for its owner alone (0600), holds
    what prompts, answers and tools have said, and is there when it is whole. Of a store of SQLite a
    copy is made first, beside the file, so there must be room for both.

    Args:
        store: The path of a store, or an open storage; one that is not of SQLite or in memory must
            rest meanwhile.
        file: The path of the new file, or a stream of bytes, which stays open.
        overwrite: Replace a file that is there already.
        progress: Called now and then, in the event loop.
        blocking: Where the work is done; threads where None.

    Raises:
        PathTakenError: There is something at the path. Name another one, or pass `overwrite=True`.
        ExportFileError: The file cannot be written; make room, or mend what it says.
        StorageAccessError: There is no such store, or this user may not read it.
        NotAStoreError: The path holds something else.
        StorageCorruptError: It is damaged; restore a copy.
        StorageRefusedError: The copy does not fit onto the disk; make room.
    """
    # A storage may be one that hands its calls on, which no check of its class would know.
    is_storage = hasattr(store, "scan")
    source = cast("Storage", store) if is_storage else _text(store, "store")
    target = _path_or_stream(file, "write")
    steps = export_steps(source, target, overwrite=overwrite, folder=None)
    return await _run(steps, progress, blocking)


async def import_session(
    file: Path | BinaryIO,
    store: Path | MakesStorage,
    *,
    as_copy: bool,
    value_bytes_max: int = Settings().value_bytes_max,
    progress: Callable[[MoveProgress], None] | None = None,
    blocking: Blocking | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
) -> ImportReport:
    """Make a session of an export, whole or not at all.

    The file may come from anywhere: each line is checked, and what is made is read back and
    compared. Afterwards nobody holds the session; its live tasks go on when it is opened.

    Args:
        file: The path of an export, or a stream of bytes.
        store: The path of the new store, where nothing is; or what makes an empty storage, as the
            class `MemoryStorage`, which is then on the report.
        as_copy: True: another session with the same past, with a uuid and so with effect keys of
            its own; what is unfinished is done by both. False: a move. The session goes on here
            with the keys that it had, and the original must never be opened for work again.
        value_bytes_max: Most bytes of one value; as in the `Settings` of the session.
        progress: Called now and then, in the event loop.
        blocking: Where the work is done; threads where None.
        clock, randomness: The seams; the system's own where None.

    Raises:
        PathTakenError: There is something at the path of the store. Name another one.
        ExportFileError: The file is no export, is damaged, or contradicts itself; the message
            names the line. Export again.
        StorageTooNewError: A newer version wrote it; upgrade.
        StorageRefusedError: The disk is full; make room.
        StorageAccessError: The store cannot be made there.
    """
    if not isinstance(as_copy, bool):
        raise InvalidArgumentError("as_copy", "expected True or False", show(as_copy))
    if type(value_bytes_max) is not int or value_bytes_max < 1:
        problem = "expected an int of at least 1"
        raise InvalidArgumentError("value_bytes_max", problem, show(value_bytes_max))
    source = _path_or_stream(file, "read")
    target = store if callable(store) else _real_path(store)
    clock, randomness = clock or SystemClock(), randomness or SystemRandomness()
    options = ImportOptions(
        as_copy=as_copy,
        value_bytes_max=value_bytes_max,
        claim=HolderClaim(
            holder_id=randomness.uuid(),
            host=socket.gethostname(),
            pid=os.getpid(),
            at_us=clock.now_us(),
            lease_seconds=Settings().lease_seconds,
        ),
        new_uuid=randomness.uuid,
    )
    return await _run(import_steps(source, target, options), progress, blocking)


def _path_or_stream(file: object, does: str) -> str | BinaryIO:
    if hasattr(file, does):
        return file  # type: ignore[return-value]
    # The folder with its links resolved, the name as it is: a link there is not followed.
    folder, name = os.path.split(os.path.abspath(_text(file, "file")))
    return os.path.join(os.path.realpath(folder), name)


def _real_path(path: object) -> str:
    return os.path.realpath(_text(path, "store"))


def _text(path: object, argument: str) -> str:
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgumentError(argument, "expected a path", show(path))
    return text


async def _run(
    steps: Generator[MoveProgress, None, ReportT],
    progress: Callable[[MoveProgress], None] | None,
    blocking: Blocking | None,
) -> ReportT:
    """Drive the pieces to their end; a cancellation between two of them takes everything away."""
    blocking = blocking or ThreadBlocking()
    report: list[ReportT] = []

    def piece() -> MoveProgress | None:
        until = time.monotonic() + _PIECE_SECONDS
        try:
            while True:
                found = next(steps)
                if time.monotonic() >= until:
                    return found
        except StopIteration as done:
            report.append(done.value)
            return None

    try:
        while (found := await blocking.run(piece)) is not None:
            if progress is not None:
                progress(found)
            await trio.lowlevel.checkpoint()
    finally:
        with trio.CancelScope(shield=True):
            await blocking.run(steps.close)
    return report[0]
