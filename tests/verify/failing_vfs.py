"""A file layer on which chosen calls fail, as a disk that is full or broken makes them fail.

Every call that SQLite makes of its files is counted by method, in the order in which it is made. A
`Strike` fails the calls of one method from the k-th on, once or until `repair`, with one of the
codes that this method can return. What SQLite does without its file layer (shared memory between
processes, which it maps by itself) is out of reach here.

A short read is played by answering with no bytes: SQLite is told IOERR_SHORT_READ and sees zeros,
which is what a file looks like that was cut. Changed bytes are played by answering with them: a
page of the store's own file (not of its log, nor of the map of its pages) with all of its bits
turned, or its first page without
the name that a file of SQLite begins with. And of memory there is no more, or only a little, in the
k-th call of the storage: that is what `memory` is put round it for.

apsw hands the exception of a call that failed to
whoever runs the statement, also where SQLite itself would go on: stricter than a real disk, never
kinder.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import apsw
import attrs

SHORT_READ = "IOERR_SHORT_READ"
SYSTEM = apsw.vfs_names()[0]
"""The system's own layer, by its name: a disk may stand in for it as the default."""

CODES: dict[str, tuple[str, ...]] = {
    "xOpen": ("CANTOPEN", "IOERR", "READONLY_DIRECTORY"),
    "xRead": ("IOERR_READ", SHORT_READ),
    "xWrite": ("FULL", "IOERR_WRITE", "READONLY"),
    "xTruncate": ("IOERR_TRUNCATE",),
    "xSync": ("IOERR_FSYNC",),
    "xFileSize": ("IOERR_FSTAT",),
    "xLock": ("BUSY", "IOERR_LOCK"),
    "xUnlock": ("IOERR_UNLOCK",),
    "xCheckReservedLock": ("IOERR_CHECKRESERVEDLOCK",),
    "xFileControl": ("IOERR",),
    "xClose": ("IOERR_CLOSE",),
    "xDelete": ("IOERR_DELETE",),
    "xAccess": ("IOERR_ACCESS",),
    "xFullPathname": ("CANTOPEN",),
    "page": ("CORRUPT",),
    "header": ("NOTADB",),
    "memory": ("NOMEM", "NOMEM_SOON"),
}
"""By method, the codes that it can return. The last three are no methods: what is read of pages, or
of the first one, and what is called of a storage."""

DAMAGING = (SHORT_READ, "CORRUPT", "NOTADB")
"""What makes a file look damaged."""
TURNED = bytes(255 - byte for byte in range(256))
NAME_BYTES = 16
"""What a file of SQLite begins with."""
ROOM_BYTES = {"NOMEM": 0, "NOMEM_SOON": 12_000}
"""How much more memory there is in a call."""


@attrs.frozen(kw_only=True)
class Strike:
    """One fault: which call fails, how, and whether it goes on."""

    method: str
    code: str
    at: int
    """The number of the call among those of its method, from 1."""
    lasting: bool
    """Whether every later call of the method fails too."""

    def __str__(self) -> str:
        return f"{self.method}:{self.code}:{self.at}:{'on' if self.lasting else 'once'}"

    @classmethod
    def parse(cls, text: str) -> Strike:
        """The strike that `str` made this text of."""
        method, code, at, how = text.split(":")
        return cls(method=method, code=code, at=int(at), lasting=how == "on")


_numbers = itertools.count(1)


class FailingDisk(apsw.VFS):
    """The system's file system, registered under a name of its own until `unregister`."""

    def __init__(self, *, default: bool = False) -> None:
        self.name = f"failing-{next(_numbers)}"
        # By default: also for whoever names no file layer.
        super().__init__(self.name, SYSTEM, default)
        self.counts: Counter[str] = Counter()
        self.strike: Strike | None = None
        self.struck = 0
        """How many calls the strike has failed."""
        self.open_files = 0
        self.trace: list[str] | None = None
        """What is called, where somebody wants to look at it."""

    def repair(self) -> None:
        """Let every call from now on do its work."""
        self.strike = None

    def meets(self, method: str, what: str = "") -> str | None:
        """Count a call; return the code that it fails with, or None."""
        self.counts[method] += 1
        number = self.counts[method]
        if self.trace is not None:
            self.trace.append(f"{method} {number} {what}")
        strike = self.strike
        if strike is None or strike.method != method:
            return None
        if number == strike.at or (strike.lasting and number > strike.at):
            self.struck += 1
            return strike.code
        return None

    @contextlib.contextmanager
    def memory(self, door: str) -> Iterator[None]:
        """Let a call of the storage have no more memory than there is, where it is struck."""
        code = self.meets("memory", door)
        if code is None:
            yield
            return
        limit = max(1, apsw.memory_used() + ROOM_BYTES[code])
        before = apsw.hard_heap_limit(limit)
        try:
            yield
        finally:
            apsw.hard_heap_limit(before)

    def check(self, method: str, what: str = "") -> None:
        """Count a call, and raise what it fails with, if it does."""
        code = self.meets(method, what)
        if code is not None:
            raise _error(code)

    def xOpen(self, name: Any, flags: list[int]) -> FailingFile:
        self.check("xOpen", _name(name))
        return FailingFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.check("xDelete", filename)
        super().xDelete(filename, syncdir)

    def xAccess(self, pathname: str, flags: int) -> bool:
        self.check("xAccess", pathname)
        return super().xAccess(pathname, flags)

    def xSleep(self, microseconds: int) -> int:
        # Who waits for a lock waits in no time: the busy timeout passes at once.
        return microseconds

    def xFullPathname(self, name: str) -> str:
        self.check("xFullPathname", name)
        return super().xFullPathname(name)


class FailingFile(apsw.VFSFile):
    """One open file of a failing disk."""

    def __init__(self, disk: FailingDisk, name: Any, flags: list[int]) -> None:
        super().__init__(SYSTEM, name, flags)
        self._disk = disk
        self._name = _name(name)[-8:]
        self._is_store = bool(flags[0] & apsw.SQLITE_OPEN_MAIN_DB)
        self._read_only = bool(flags[0] & apsw.SQLITE_OPEN_READONLY)
        disk.open_files += 1

    def xRead(self, amount: int, offset: int) -> bytes:
        code = self._disk.meets("xRead", self._name)
        if code == SHORT_READ:
            return b""
        if code is not None:
            raise _error(code)
        data = super().xRead(amount, offset)
        if (
            self._is_store
            and not _is_map(amount, offset)
            and self._disk.meets("page", f"{self._name} {offset}")
        ):
            data = data.translate(TURNED)
        if self._is_store and offset == 0 and self._disk.meets("header", self._name):
            data = data[:NAME_BYTES].translate(TURNED) + data[NAME_BYTES:]
        return data

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.check("xWrite", self._name)
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        self._disk.check("xTruncate", self._name)
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:
        self._disk.check("xSync", self._name)
        super().xSync(flags)

    def xFileSize(self) -> int:
        self._disk.check("xFileSize", self._name)
        return super().xFileSize()

    def xLock(self, level: int) -> None:
        self._disk.check("xLock", self._name)
        try:
            super().xLock(level)
        except apsw.IOError:
            if not self._read_only:
                raise
            # The last connection to close tries to lock the file for a checkpoint, which the
            # system refuses for a handle that only reads. SQLite takes no notice; apsw would.
            raise apsw.BusyError from None

    def xUnlock(self, level: int) -> None:
        self._disk.check("xUnlock", self._name)
        super().xUnlock(level)

    def xCheckReservedLock(self) -> bool:
        self._disk.check("xCheckReservedLock", self._name)
        return super().xCheckReservedLock()

    def xFileControl(self, op: int, pointer: int) -> bool:
        self._disk.check("xFileControl", f"{self._name} {op}")
        return super().xFileControl(op, pointer)

    def xClose(self) -> None:
        # Closed all the same, as close(2) does: else the file would stay open for ever.
        super().xClose()
        self._disk.open_files -= 1
        self._disk.check("xClose", self._name)


def _is_map(amount: int, offset: int) -> bool:
    """Whether it is read of a page that says what other pages are for.

    SQLite believes what it reads there, and writes it back with what it changes: that is no damage
    which anything could notice.
    """
    return offset > 0 and (offset // amount - 1) % (amount // 5 + 1) == 0


def _name(name: Any) -> str:
    return name.filename() if isinstance(name, apsw.URIFilename) else str(name)


def _error(code: str) -> BaseException:
    return apsw.exception_for(getattr(apsw, f"SQLITE_{code}"))
