"""A file layer below SQLite that keeps every operation, and rebuilds what a crash may leave of it.

`Recorder` is an SQLite VFS on top of the system's own. What goes through it is done, and written
down: writes, truncations, syncs, creations, deletions; what the storage does to files by itself
(the empty store, copies under another name) is written down by `Recorder.watching`. The `-shm` file
is left out: a crash takes it, and SQLite makes it anew.

What may be on a disk after a loss of power (`Disk`):

* what was written before the last sync of its file is there;
* of what came later, any part: each write, each 512-byte sector of a write, each truncation; the
  last write may have left garbage, within its own bytes (SQLite relies on that much);
* a name is where it was at the last sync of its folder; of later creations, deletions and renames
  any part has happened. SQLite syncs the folder when it first syncs a new journal or log, and when
  it deletes a journal with `syncdir`.

What is there after the death of a process alone is all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import apsw
import attrs

SECTOR = 512
SIDE_SUFFIXES = ("-shm",)
_JOURNALS = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL | apsw.SQLITE_OPEN_WAL

Kind = Literal["write", "truncate", "sync", "create", "delete", "rename", "sync folder", "nothing"]


@attrs.frozen
class Operation:
    """One thing that was done to a file, or to a name of one."""

    kind: Kind
    name: str
    offset: int = 0
    """Of a write; the new size, of a truncation."""
    data: bytes = b""
    to: str = ""
    """The new name, of a rename."""
    folder: bool = False
    """It syncs the folder too: a deletion, or the first sync of a new journal."""

    def __str__(self) -> str:
        size = f" {len(self.data)} bytes at {self.offset}" if self.kind == "write" else ""
        return f"{self.kind} {self.name}{size}{' -> ' + self.to if self.to else ''}"


# --- what is on the disk ----------------------------------------------------------------------


@attrs.define(eq=False)
class _File:
    """One file, whatever it is called: what is safe of it, and what came since its last sync."""

    safe: bytes = b""
    pending: list[Operation] = attrs.Factory(list)

    def copied(self) -> _File:
        return _File(self.safe, list(self.pending))


def _apply(content: bytearray, operation: Operation) -> None:
    if operation.kind == "truncate":
        del content[operation.offset :]
        return
    end = operation.offset + len(operation.data)
    if len(content) < operation.offset:
        content.extend(bytes(operation.offset - len(content)))
    content[operation.offset : end] = operation.data


@attrs.define(eq=False)
class Disk:
    """What is on a disk, with what is not safe yet kept apart."""

    files: dict[int, _File] = attrs.Factory(dict)
    safe_names: dict[str, int] = attrs.Factory(dict)
    names: dict[str, int] = attrs.Factory(dict)
    """Names as a living system sees them."""
    pending_names: list[Operation] = attrs.Factory(list)
    last: Operation | None = None
    _made: dict[int, int] = attrs.Factory(dict)
    """Which file each pending creation made, by its place."""

    @classmethod
    def of(cls, image: dict[str, bytes]) -> Disk:
        """A disk on which all of these files are safe."""
        disk = cls()
        for number, (name, content) in enumerate(sorted(image.items())):
            disk.files[number] = _File(content)
            disk.names[name] = disk.safe_names[name] = number
        return disk

    def copied(self) -> Disk:
        return Disk(
            files={number: file.copied() for number, file in self.files.items()},
            safe_names=dict(self.safe_names),
            names=dict(self.names),
            pending_names=list(self.pending_names),
            last=self.last,
            made=dict(self._made),
        )

    def do(self, operation: Operation) -> None:
        """One more operation has happened."""
        self.last = operation
        name = operation.name
        match operation.kind:
            case "write" | "truncate":
                self.files[self.names[name]].pending.append(operation)
            case "sync":
                file = self.files[self.names[name]]
                content = bytearray(file.safe)
                for each in file.pending:
                    _apply(content, each)
                file.safe, file.pending = bytes(content), []
            case "create":
                number = len(self.files)
                self.files[number] = _File()
                self.names[name] = number
                self._made[len(self.pending_names)] = number
                self.pending_names.append(operation)
            case "delete":
                self.names.pop(name, None)
                self.pending_names.append(operation)
            case "rename":
                self.names[operation.to] = self.names.pop(name)
                self.pending_names.append(operation)
        if operation.kind == "sync folder" or operation.folder:
            self.safe_names, self.pending_names, self._made = dict(self.names), [], {}

    # --- images --------------------------------------------------------------------------

    def everything(self) -> dict[str, bytes]:
        """What a process finds that comes after one that died."""
        return self._image(self.names, lambda operation: [operation])

    def nothing(self) -> dict[str, bytes]:
        """What is left where nothing has reached the disk but what had to."""
        return self._image(self.safe_names, lambda operation: [])

    def subset(self, random: random.Random, *, sectors: bool = False) -> dict[str, bytes]:
        """Any part of what was not safe; by `sectors`, any part of each write too."""

        def some(operation: Operation) -> list[Operation]:
            if sectors and operation.kind == "write":
                return [each for each in _sectors(operation) if random.random() < 0.5]
            return [operation] if random.random() < 0.5 else []

        names = dict(self.safe_names)
        for place, operation in enumerate(self.pending_names):
            if random.random() < 0.5:
                continue
            if operation.kind == "create":
                names[operation.name] = self._made[place]
            elif operation.kind == "delete":
                names.pop(operation.name, None)
            elif operation.name in names:
                names[operation.to] = names.pop(operation.name)
        return self._image(names, some)

    def torn(self, random: random.Random) -> dict[str, bytes] | None:
        """All, but of the last write only some sectors: what lies before one, or behind it."""
        last = self._last_write()
        if last is None:
            return None
        parts = _sectors(last)
        place = random.randrange(len(parts))
        kept = parts[:place] if random.random() < 0.5 else parts[place + 1 :]
        return self._image(self.names, lambda each: kept if each is last else [each])

    def garbled_sectors(self, random: random.Random) -> dict[str, bytes] | None:
        """All, but each sector that the last write touched is garbage, or as it should be.

        Only a bad disk does that: SQLite must be told not to rely on what lies beside a write.
        """
        last = self._last_write()
        if last is None:
            return None
        image = self.everything()
        content = bytearray(image[last.name])
        first = last.offset // SECTOR * SECTOR
        for start in range(first, last.offset + len(last.data), SECTOR):
            end = min(start + SECTOR, len(content))
            if random.random() < 0.5:
                content[start:end] = random.randbytes(end - start)
        return {**image, last.name: bytes(content)}

    def garbled(self, random: random.Random) -> dict[str, bytes] | None:
        """All, but of the last write some bytes are garbage."""
        last = self._last_write()
        if last is None:
            return None
        start, end = sorted(random.choices(range(len(last.data) + 1), k=2))
        data = last.data[:start] + random.randbytes(end - start) + last.data[end:]
        spoiled = attrs.evolve(last, data=data)
        return self._image(self.names, lambda each: [spoiled] if each is last else [each])

    def _last_write(self) -> Operation | None:
        return self.last if self.last is not None and self.last.kind == "write" else None

    def _image(self, names: dict[str, int], kept: Any) -> dict[str, bytes]:
        image: dict[str, bytes] = {}
        for name, number in names.items():
            file = self.files[number]
            if file.pending:
                content = bytearray(file.safe)
                for operation in file.pending:
                    for each in kept(operation):
                        _apply(content, each)
                image[name] = bytes(content)
            else:
                image[name] = file.safe
        return image


def _sectors(write: Operation) -> list[Operation]:
    """A write in pieces that end where sectors do."""
    parts: list[Operation] = []
    start, end = write.offset, write.offset + len(write.data)
    while start < end:
        stop = min(end, (start // SECTOR + 1) * SECTOR)
        piece = write.data[start - write.offset : stop - write.offset]
        parts.append(Operation("write", write.name, start, piece))
        start = stop
    return parts


def digest_of(image: dict[str, bytes]) -> str:
    """A name for an image."""
    found = hashlib.sha256()
    for name in sorted(image):
        found.update(f"{name}\0{len(image[name])}\0".encode())
        found.update(image[name])
    return found.hexdigest()


def write_image(image: dict[str, bytes], folder: Path) -> None:
    """Make a folder hold exactly an image, and what is no file of it away."""
    for found in folder.iterdir():
        if found.is_file() and found.name not in image:
            found.unlink()
    for name, content in image.items():
        path = folder / name
        path.write_bytes(content)
        path.chmod(0o600)


def read_image(folder: Path) -> dict[str, bytes]:
    """The files of a folder as they are, but for those that a crash takes."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and not _is_left_out(path.name)
    }


def _is_left_out(name: str) -> bool:
    # The lock of a lock file goes with its process, and nothing stands in it.
    return name.endswith(SIDE_SUFFIXES) or ".lock." in name


# --- the recorder -----------------------------------------------------------------------------


class Recorder(apsw.VFS):
    """Do what SQLite asks for, and write it down.

    Args:
        name: What the VFS is registered as: give it as `vfs=`. Each needs a name of its own.
        folder: Where the store lies; what is done elsewhere is not written down.
        disk: What is there at the beginning; by default the files of the folder, all safe.
        power_safe: False says to SQLite that a write may spoil what lies beside it in its
            sectors, as `psow=0` in the name of a database does.
    """

    def __init__(
        self, name: str, folder: Path, *, disk: Disk | None = None, power_safe: bool = True
    ) -> None:
        self.name = name
        self.folder = os.path.realpath(folder)
        self.begin = disk.copied() if disk is not None else Disk.of(read_image(folder))
        self.operations: list[Operation] = []
        self.power_safe = power_safe
        self._new_journals: set[str] = set()
        super().__init__(name, "")

    @property
    def position(self) -> int:
        """How many operations there were."""
        return len(self.operations)

    def close(self) -> None:
        """Take the VFS away. What was opened through it must be closed by now."""
        self.unregister()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing down --------------------------------------------------------------------

    def name_of(self, path: str) -> str | None:
        """What a file is called here, or None if it is none of ours."""
        folder, name = os.path.split(path)
        return None if folder != self.folder or _is_left_out(name) else name

    def note(self, operation: Operation) -> None:
        if operation.kind == "sync" and operation.name in self._new_journals:
            self._new_journals.discard(operation.name)
            operation = attrs.evolve(operation, folder=True)
        self.operations.append(operation)

    # --- SQLite's side -------------------------------------------------------------------

    def xOpen(self, name: Any, flags: list[int]) -> Any:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        here = None if path is None else self.name_of(path)
        if here is None:
            return apsw.VFSFile("", name, flags)
        missing = not os.path.exists(path)
        made = _RecordedFile(self, here, name, flags)
        if missing:
            self.note(Operation("create", here))
            if flags[0] & _JOURNALS:
                self._new_journals.add(here)
        return made

    def xDelete(self, path: str, syncdir: bool) -> None:
        super().xDelete(path, syncdir)
        here = self.name_of(path)
        if here is not None:
            self._new_journals.discard(here)
            self.note(Operation("delete", here, folder=bool(syncdir)))

    # --- the storage's own side ----------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Write down what this process does to names in the folder without SQLite."""
        real_open, real_replace, real_unlink = os.open, os.replace, os.unlink
        real_fsync, real_rename = os.fsync, os.rename
        handles: dict[int, str] = {}

        def watched_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
            here = self.name_of(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
            missing = here is not None and not os.path.lexists(path)
            handle = real_open(path, flags, *args, **options)
            handles[handle] = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if here is not None and missing:
                self.note(Operation("create", here))
            return handle

        def watched_fsync(handle: int) -> None:
            real_fsync(handle)
            if handles.get(handle) == self.folder:
                self.note(Operation("sync folder", "."))

        def renaming(real: Any) -> Any:
            def renamed(old: Any, new: Any, **options: Any) -> None:
                real(old, new, **options)
                before, after = self.name_of(os.fspath(old)), self.name_of(os.fspath(new))
                if before is not None and after is not None:
                    self.note(Operation("rename", before, to=after))

            return renamed

        def watched_unlink(path: Any, **options: Any) -> None:
            real_unlink(path, **options)
            here = self.name_of(os.fspath(path))
            if here is not None:
                self.note(Operation("delete", here))

        os.open, os.fsync, os.unlink = watched_open, watched_fsync, watched_unlink  # type: ignore[assignment]
        os.replace, os.rename = renaming(real_replace), renaming(real_rename)
        try:
            yield
        finally:
            os.open, os.fsync, os.unlink = real_open, real_fsync, real_unlink
            os.replace, os.rename = real_replace, real_rename


class _RecordedFile(apsw.VFSFile):
    """One open file; the system's own does the work."""

    def __init__(self, recorder: Recorder, here: str, name: Any, flags: list[int]) -> None:
        self._recorder = recorder
        self._here = here
        super().__init__("", name, flags)

    def xDeviceCharacteristics(self) -> int:
        found = super().xDeviceCharacteristics()
        power_safe = self._recorder.power_safe
        return found if power_safe else found & ~apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE

    def xWrite(self, data: Any, offset: int) -> None:
        super().xWrite(data, offset)
        self._recorder.note(Operation("write", self._here, offset, bytes(data)))

    def xTruncate(self, size: int) -> None:
        super().xTruncate(size)
        self._recorder.note(Operation("truncate", self._here, size))

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._recorder.note(Operation("sync", self._here))
