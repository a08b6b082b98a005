"""Commands from outside on disk: a folder beside the store, one file for each command.

Whoever is not the holder hands in a command by writing a file under another name, flushing it and
renaming it; the holder takes a command by renaming it again. There is no lock and no shared file,
so an outsider that is stopped or killed at any point blocks nobody, neither the holder nor other
outsiders. The end of a file's name says where it stands:

* `.part`: being written, or left behind by a writer that died; cleared away when it is old;
* `.command`: handed in, durable; whoever handed it in may take it back by removing it;
* `.taken`: a holder has it and may have applied it. The answer in the store tells, so a taken
  command whose holder died is simply taken once more;
* `.bad`: no command at all (cut, zeros, too large, a wrong name); kept for a person to look at.

Of two that rename or remove one file, exactly one succeeds: so a command is either taken or
withdrawn, and whoever asks is told which for certain. A name begins with the moment of handing in,
so the order of names is the order of arrival, and goes on with the digest of the command's id, so
it is found without reading anything.

The folder belongs to the store's owner alone (0700, files 0600). One that is a link, or somebody
else's, is refused, by outsiders and holder alike.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
import uuid as uuid_module
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from pidurable.errors import StorageAccessError, StorageRefusedError
from pidurable.records._limits import (
    COMMAND_BYTES_MAX,
    COMMAND_PART_SECONDS,
    COMMANDS_WAITING_MAX,
    MIB,
)
from pidurable.storage._contract import CommandPlace, TakenCommand

FOLDER_MODE = 0o700
FILE_MODE = 0o600
LOOK_BYTES_MAX = 32 * MIB
"""So many bytes of commands are read at a look, and at least one command."""
SETTLED_SECONDS = 1.0
"""So long after the last change of the folder its moment is not trusted: clocks of file systems
tick slowly, and a second change within a tick leaves the moment as it is."""
UNSEEN_LOOKS_MAX = 100
"""After so many looks at the moment alone the folder is listed anyway."""

_LISTED_AT_ONCE = 200
"""So many names of ours a system lists in one step, between two changes of the folder."""
_OF_THE_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Too many open files, or no memory: trouble of whoever opens a file, and not of the file."""

_NAME = re.compile(r"[0-9]{20}-([0-9a-f]{32})-[0-9a-f]{8}\.(command|taken)")


def folder_path(store: str) -> str:
    """Return the folder in which commands for a store lie."""
    return f"{store}.commands"


def id_digest(id: str) -> str:
    """Return what stands for a command's id in the name of its file."""
    return hashlib.sha256(id.encode()).hexdigest()[:32]


def names_id(name: str, id: str) -> bool:
    """Whether a command's name is one of this id."""
    return id_digest(id) in name


def new_name(id: str, at_ns: int) -> str:
    """Return a name for a command, without its end; names sort by the moment."""
    return f"{at_ns:020d}-{id_digest(id)}-{uuid_module.uuid4().hex[:8]}"


@final
class FolderCommandBox:
    """The commands beside one store. See `CommandBox`.

    Args:
        store: The path of the store, with links resolved.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._folder = folder_path(store)
        self._given: set[str] = set()
        """Names that `take` has given and that have not been forgotten since."""
        self._quiet: tuple[int, int] | None = None
        """The folder's inode and moment when it was last seen without anything to take."""
        self._looks = 0
        self._last_ns = 0

    # --- the folder ----------------------------------------------------------------------

    @contextmanager
    def _opened(self, *, create: bool) -> Iterator[int]:
        """The folder as a handle, for calls relative to it: it cannot be exchanged meanwhile.

        Raises:
            FileNotFoundError: There is none, and it is not to be created.
            StorageAccessError: It is not one of the store's owner alone.
        """
        owner = os.stat(self._store).st_uid
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            if create:
                self._create(owner)
            handle = os.open(self._folder, flags)
        except FileNotFoundError:
            raise
        except OSError as error:
            wrong = error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)
            problem = "it is no folder, or a link" if wrong else error.strerror or str(error)
            raise self._refused(problem) from error
        try:
            found = os.fstat(handle)
            if found.st_uid != owner:
                raise self._refused(
                    f"it belongs to user {found.st_uid}, the store to user {owner}; "
                    "find out who made it"
                )
            if found.st_mode & 0o077:
                raise self._refused(
                    f"others may use it (mode {stat.S_IMODE(found.st_mode):04o}); "
                    f"`chmod 700 {self._folder}` if you trust what is in it"
                )
            yield handle
        finally:
            os.close(handle)

    def _create(self, owner: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, FOLDER_MODE)
            if owner != os.geteuid():
                os.chown(self._folder, owner, -1, follow_symlinks=False)
            above = os.open(os.path.dirname(self._folder), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(above)
            finally:
                os.close(above)

    def _refused(self, problem: str) -> StorageAccessError:
        return StorageAccessError(self._store, f"its folder of commands {self._folder}: {problem}")

    def _mapped(self, error: OSError) -> StorageAccessError:
        if isinstance(error, StorageAccessError):
            return error
        return self._refused(error.strerror or str(error))

    # --- outside -------------------------------------------------------------------------

    def hand_in(self, id: str, text: str) -> None:
        """Leave a command for the holder. See `CommandBox`."""
        data = text.encode()
        size, most = len(data), COMMAND_BYTES_MAX
        if size > most:
            raise StorageRefusedError(
                self._store, f"a command of {size} bytes, at most {most} are taken"
            )
        try:
            with self._opened(create=True) as folder:
                waiting = sum(name.endswith((".command", ".taken")) for name in os.listdir(folder))
                if waiting >= COMMANDS_WAITING_MAX:
                    raise StorageRefusedError(
                        self._store,
                        f"{waiting} commands wait for a holder already, the most allowed",
                    )
                # Later than the last one of this handle, also where the clock was set back.
                self._last_ns = max(time.time_ns(), self._last_ns + 1)
                self._write(folder, new_name(id, self._last_ns), data)
        except FileNotFoundError as error:
            # The store, or the folder in the instant after it was made.
            raise self._refused(error.strerror or str(error)) from error

    def _write(self, folder: int, name: str, data: bytes) -> None:
        part = f"{name}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            handle = os.open(part, flags, FILE_MODE, dir_fd=folder)
            try:
                owner = os.fstat(folder).st_uid
                if owner != os.geteuid():
                    os.fchown(handle, owner, -1)
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(handle, rest) :]
                os.fsync(handle)
            finally:
                os.close(handle)
            os.rename(part, f"{name}.command", src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise StorageRefusedError(
                self._store, f"a command cannot be handed in ({error.strerror or error})"
            ) from error
        try:
            os.fsync(folder)
        except OSError as error:
            # It lies there; whether a loss of power would take it is not known.
            raise self._refused(error.strerror or str(error)) from error

    def withdraw(self, id: str) -> bool:
        """Take a command back. See `CommandBox`."""
        removed = False
        try:
            with self._opened(create=False) as folder:
                for name in self._named(folder, id):
                    if name.endswith(".command"):
                        # A holder that renames it first has it.
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=folder)
                            removed = True
                if removed:
                    os.fsync(folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._mapped(error) from error
        return removed

    def find(self, id: str) -> CommandPlace | None:
        """Tell where a command stands. See `CommandBox`."""
        try:
            with self._opened(create=False) as folder:
                ends: set[str] = set()
                # A long listing may miss a file that is renamed meanwhile, under both of its names.
                # One that was there is renamed twice at most: taken, and set aside.
                for _ in range(3):
                    names = os.listdir(folder)
                    ends = {name.rpartition(".")[2] for name in names if id_digest(id) in name}
                    if ends or len(names) < _LISTED_AT_ONCE:
                        break
        except FileNotFoundError:
            return None
        if "taken" in ends:
            return "taken"
        if "command" in ends:
            return "waiting"
        return "set_aside" if "bad" in ends else None

    def _named(self, folder: int, id: str) -> list[str]:
        digest = id_digest(id)
        return sorted(name for name in os.listdir(folder) if digest in name)

    # --- the holder ----------------------------------------------------------------------

    def has_news(self) -> bool:
        """Tell cheaply whether `take` may find something. See `CommandBox`."""
        try:
            found = os.stat(self._folder, follow_symlinks=False)
        except OSError:
            return False
        self._looks += 1
        return (found.st_ino, found.st_mtime_ns) != self._quiet or self._looks >= UNSEEN_LOOKS_MAX

    def take(self, *, limit: int = 1_000) -> list[TakenCommand]:
        """Take what waits, in order of arrival. See `CommandBox`."""
        taken: list[TakenCommand] = []
        try:
            with self._opened(create=False) as folder:
                seen = os.fstat(folder)
                self._looks = 0
                room = LOOK_BYTES_MAX
                waiting = self._to_take(folder)
                for name in waiting:
                    if len(taken) >= limit or room <= 0:
                        break
                    command = self._taken(folder, name)
                    if command is not None:
                        taken.append(command)
                        room -= len(command.text or "")
                # Trusted only once it is old by the clock that the file system goes by as well.
                old = time.time_ns() - seen.st_mtime_ns > SETTLED_SECONDS * 1e9
                self._quiet = (seen.st_ino, seen.st_mtime_ns) if old and not waiting else None
        except FileNotFoundError:
            return taken
        except OSError as error:
            # What was taken before is in nobody else's hands; the next look meets the trouble.
            if not taken:
                raise self._mapped(error) from error
        return taken

    def _to_take(self, folder: int) -> list[str]:
        """The names to look at, in order; parts that nobody finishes are cleared away."""
        found = []
        for name in sorted(os.listdir(folder)):
            if name.endswith(".part"):
                self._clear(folder, name)
            elif not name.endswith(".bad") and name not in self._given:
                found.append(name)
        return found

    def _clear(self, folder: int, name: str) -> None:
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
            if age > COMMAND_PART_SECONDS:
                os.unlink(name, dir_fd=folder)

    def _taken(self, folder: int, name: str) -> TakenCommand | None:
        """Take one file; None if it was withdrawn, or another holder has dealt with it."""
        if _NAME.fullmatch(name) is None:
            self._given.add(name)
            return TakenCommand(name=name, text=None, problem="its name is none of a command")
        if name.endswith(".command"):
            claimed = name.removesuffix(".command") + ".taken"
            try:
                os.rename(name, claimed, src_dir_fd=folder, dst_dir_fd=folder)
            except FileNotFoundError:
                return None
            name = claimed
        self._given.add(name)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            handle = os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            self._given.discard(name)
            return None
        except OSError as error:
            if error.errno in _OF_THE_PROCESS:
                # It says nothing of the file: another look may go well.
                self._given.discard(name)
                raise
            return TakenCommand(name=name, text=None, problem=f"{error.strerror or error}")
        try:
            return self._read(folder, handle, name)
        finally:
            os.close(handle)

    def _read(self, folder: int, handle: int, name: str) -> TakenCommand:
        found = os.fstat(handle)
        problem = None
        if not stat.S_ISREG(found.st_mode):
            problem = "it is no regular file"
        elif found.st_uid != os.fstat(folder).st_uid:
            problem = f"it belongs to user {found.st_uid}"
        elif found.st_size > COMMAND_BYTES_MAX:
            problem = f"it has {found.st_size} bytes, at most {COMMAND_BYTES_MAX} are taken"
        if problem is not None:
            return TakenCommand(name=name, text=None, problem=problem)
        try:
            parts = []
            while part := os.read(handle, MIB):
                parts.append(part)
            return TakenCommand(name=name, text=b"".join(parts).decode(), problem="")
        except UnicodeDecodeError:
            return TakenCommand(name=name, text=None, problem="it is not UTF-8")
        except OSError as error:
            problem = f"it cannot be read ({error.strerror or error})"
            return TakenCommand(name=name, text=None, problem=problem)

    def forget(self, name: str) -> None:
        """Remove a command that has its answer. See `CommandBox`."""
        try:
            with self._opened(create=False) as folder:
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass  # another holder was faster
        except OSError as error:
            raise self._mapped(error) from error
        self._given.discard(name)

    def set_aside(self, name: str) -> str:
        """Put away what is no command. See `CommandBox`."""
        # The name stays known as given: where it cannot be renamed, it is not given once more.
        bad = f"{name}.bad"
        try:
            with self._opened(create=False) as folder:
                os.rename(name, bad, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                return bad
            raise self._mapped(error) from error
        self._given.discard(name)
        return bad
