"""Files that are made beside their final place, and get its name when they are whole.

While something is made for `<path>`, everything of it is called `<path>.<work>-<name>`, and a lock
says that somebody is at it: `<path>.<work>.lock.0`. Invariants:

* the final name is only ever given to something whole, and what is there already is never
  overwritten without being told, whoever made it meanwhile;
* whatever ends the making in this process takes the rest away; after a death of the process the
  next one for the same place does, because the lock of a dead process is free.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import glob
import os
import stat
import sys
from collections.abc import Callable, Iterator

import attrs

from pidurable.errors import PathTakenError, PidurableError, StorageAccessError
from pidurable.storage._holder import lock_path, take_lock

_NAMES = ("part", "copy")
"""What is made for a path: the thing itself, and a copy of what it is made of."""
_SUFFIXES = ("-wal", "-shm", "-journal", ".lock.[0-9]*", ".v[0-9]*.bak", ".v[0-9]*.bak.part")

_DATABASE = b"SQLite format 3\0"

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1  # Linux
_RENAME_EXCL = 4  # macOS


@attrs.define(eq=False)
class Places:
    """The names that something made for a path has until then."""

    path: str
    """Absolute."""
    work: str
    """What is done, in one word of the names."""
    error: Callable[[str, str], PidurableError]
    """Made of the path and the problem, for what cannot be made."""

    @property
    def lock(self) -> str:
        """The file that says that somebody is at it."""
        return lock_path(f"{self.path}.{self.work}", 0)

    def named(self, name: str) -> str:
        """The path of something that is made."""
        return f"{self.path}.{self.work}-{name}"

    @contextlib.contextmanager
    def taken(self) -> Iterator[Places]:
        """Be the only one that makes something here; clear away what another one left.

        What the error is called is the caller's: another process is at it, or the folder is missing
        or full or cannot be written to.
        """
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise self.error(self.path, f"the folder {folder} does not exist; create it first")
        try:
            lock = take_lock(f"{self.path}.{self.work}", 0)
        except StorageAccessError as error:
            problem = error.problem
            if os.path.exists(self.lock):
                problem = f"another process is making it now; where none is, remove {self.lock}"
            raise self.error(self.path, problem) from error
        try:
            self._clear()
            yield self
        except OSError as error:
            if isinstance(error, PidurableError | BrokenPipeError):
                raise
            problem = f"it cannot be written ({error.strerror or error})"
            raise self.error(self.path, problem) from error
        finally:
            try:
                self._clear()
            finally:
                lock.remove()

    def _clear(self) -> None:
        for name in _NAMES:
            made = self.named(name)
            # Besides, what SQLite and the opening of a store make beside it.
            patterns = (f"{glob.escape(made)}{suffix}" for suffix in _SUFFIXES)
            for left in (made, *(left for pattern in patterns for left in glob.glob(pattern))):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(left)

    def put(self, name: str, *, overwrite: bool = False) -> None:
        """Give something that is whole and on the disk its final name, and flush the folder.

        Raises:
            PathTakenError: Something has that name by now, and `overwrite` is False.
        """
        if overwrite:
            os.replace(self.named(name), self.path)
        else:
            _rename_new(self.named(name), self.path)
        folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def make_default_folder(path: str) -> None:
    """Make the folder of the default store, for its owner alone, if it is that one."""
    folder = os.path.dirname(path)
    if os.path.basename(folder) == ".pidurable":
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.mkdir(folder, 0o700)


def refuse_taken(path: str, remedy: str) -> None:
    """Refuse a path where something is, be it a link into nothing.

    Raises:
        PathTakenError: Something is there.
    """
    if os.path.lexists(path):
        raise PathTakenError(path, remedy)


def refuse_irreplaceable(path: str, store: str) -> None:
    """Refuse to replace what is no plain file, any database, and what belongs to a store.

    A slip of the hand must not put the export of a session in the place of the session.

    Raises:
        PathTakenError: Such a thing is there, or the path is of the store's own files.
    """
    real = glob.escape(os.path.realpath(store))
    patterns = [f"{real}{end}" for end in ("", ".commands", *_SUFFIXES)]
    for name in (path, os.path.realpath(path)):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            raise PathTakenError(path, "it is of the store that is exported; name another path")
    try:
        there = os.stat(path)
    except OSError:
        return
    if not stat.S_ISREG(there.st_mode):
        raise PathTakenError(path, "it is no file, and is not replaced; name another path")
    with open(path, "rb") as found:
        if found.read(len(_DATABASE)) == _DATABASE:
            raise PathTakenError(path, "it is a database, and is not replaced; name another path")


def _rename_new(old: str, new: str) -> None:
    """Rename, unless something has the new name.

    The system call that does it in one step is not known to Python, nor to every file system. The
    other way, a second name of which the first is then removed, has two names for an instant.
    """
    try:
        if not _rename_in_one_step(old, new):
            os.link(old, new)
            os.unlink(old)
    except FileExistsError as error:
        raise PathTakenError(new, "it was made meanwhile and is left as it is") from error


_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def _rename_in_one_step(old: str, new: str) -> bool:
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(old), os.fsencode(new)
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        failed = library.renamex_np(*names, _RENAME_EXCL)
    elif sys.platform == "linux" and hasattr(library, "renameat2"):
        failed = library.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE)
    else:
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _UNKNOWN:
        return False
    raise OSError(code, os.strerror(code), new)
