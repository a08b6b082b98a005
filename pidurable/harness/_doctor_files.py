"""What the doctor looks at around a store: its files, who has them locked, and the commands.

Nothing here opens the store; what is in it is for `_doctor`.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterator

import attrs

from pidurable.harness._diagnosis import Examination, count_of, mib
from pidurable.records._limits import WAL_BYTES_WARN
from pidurable.records._moments import duration
from pidurable.storage import _sqlite_locks as _locks, _sqlite_place as _place
from pidurable.storage._command_box import folder_path
from pidurable.storage._holder import LockState, ask_lock
from pidurable.storage._migrate import SCHEMA
from pidurable.storage._sqlite_open import NETWORK_FILE_SYSTEMS, file_system

COMMAND_SECONDS = 60.0
"""A command that waits longer beside a live holder is a finding."""
FREE_SHARE = 0.5
FREE_BYTES_MIN = 16 * 1024 * 1024
_COMMAND_KINDS = {"command": "waiting", "taken": "taken", "bad": "unreadable"}


@attrs.define(eq=False)
class FileExamination(Examination):
    """The parts of a look at a store that go by its files."""

    def _look_at_files(self) -> None:
        found = self.found
        found.file_system = file_system(os.path.dirname(found.store))
        if found.file_system in NETWORK_FILE_SYSTEMS:
            self.find(
                "file",
                f"the store lies on a network file system ({found.file_system})",
                "move it to a local disk while nobody holds it",
            )
        there = os.stat(found.store)
        found.mode = f"{stat.S_IMODE(there.st_mode):04o}"
        found.store_bytes = there.st_size
        for name in _beside(found.store):
            self._look_at_mode(name, there.st_uid)
        for path in _copies(found.store):
            size = mib(os.stat(path).st_size)
            found.notes.append(f"{path} ({size}) is the copy from before a migration")
        folder = os.path.dirname(found.store)
        mode = os.stat(folder).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            self.find(
                "permissions",
                f"everybody may exchange files in the folder {folder} ({stat.S_IMODE(mode):04o})",
                "take that right away, or move the store to a folder of yours",
                command=shlex.join(["chmod", "o-w", folder]),
            )
        if there.st_uid != os.geteuid():
            found.notes.append(f"the store belongs to user {there.st_uid}, not to you")
        else:
            self._judge_place()

    def _judge_place(self) -> None:
        """Whether whoever has the store may work on it where it lies."""
        refused = _place.why_not_writable(self.found.store)
        if refused is not None:
            self._may_work = False
            self.find(
                "permissions",
                f"the store can be looked at here and not worked on: {refused}",
                "export it, or copy it, with its -wal if there is one, into a folder of yours and "
                "go on there",
                command=self._pidurable("export", "FILE"),
            )

    def _look_at_mode(self, path: str, owner: int) -> None:
        try:
            there = os.lstat(path)
        except FileNotFoundError:
            return
        mode = stat.S_IMODE(there.st_mode)
        if path == f"{self.found.store}-wal":
            self.found.log_bytes = there.st_size
        if stat.S_ISLNK(there.st_mode):
            self.find("permissions", f"{path} is a link", "find out who made it, and remove it")
            return
        if mode & 0o077:
            wanted = "700" if stat.S_ISDIR(there.st_mode) else "600"
            self.find(
                "permissions",
                f"other users may open {path} ({mode:04o})",
                "take that right away; it holds all that the session knows",
                command=shlex.join(["chmod", wanted, path]),
            )
        if there.st_uid != owner:
            self.find(
                "permissions",
                f"{path} belongs to user {there.st_uid}, the store to user {owner}",
                "give all its files to one user",
            )

    def _look_at_lock_files(self) -> None:
        found = self.found
        holder = found.holder
        current = None
        if holder is not None and holder.record.lock_file and holder.state != "released":
            current = os.path.basename(holder.record.lock_file)
        # Of a store of another version nobody knows which one counts; what is locked is held.
        known = found.schema is None or found.schema == SCHEMA
        for path in _lock_files(found.store):
            if os.path.basename(path) == current:
                continue
            state, lock = ask_lock(path)
            if lock is not None:
                lock.drop()
            if not known:
                if state is LockState.LOCKED:
                    found.notes.append(f"a process has {path}: another version works on the store")
            elif state is LockState.LOCKED:
                self.find(
                    "holder",
                    f"a process that was replaced still has {path}; it can store nothing more",
                    "end it when it does not end by itself",
                )
            elif state is LockState.FREE:
                found.notes.append(
                    f"{path} was left behind by a dead process, and means nothing; remove it "
                    f"with `{shlex.join(['rm', path])}`"
                )

    # --- who is in the way -----------------------------------------------------------------

    def _look_at_locks(self, before: list[int]) -> None:
        store = self.found.store
        writers = _locks.writers(store)
        self.found.readers = [_locks.describe_process(pid) for pid in _locks.readers(store)]
        self.found.writers = [_locks.describe_process(pid) for pid in writers]
        for pid in writers:
            who = _locks.describe_process(pid)
            if "stopped" in who or (pid in before and not self._live):
                self.find(
                    "holder",
                    f"{who} has the write lock: nobody can store anything, or take the session "
                    "over, before it goes on or ends",
                    "let it go on, or end it",
                    command=f"kill -CONT {pid}" if "stopped" in who else f"kill {pid}",
                )

    def _judge_size(self) -> None:
        found = self.found
        if found.log_bytes > WAL_BYTES_WARN:
            readers = " and ".join(found.readers) or "an unknown process, or a busy holder"
            self.find(
                "size",
                f"the log takes {mib(found.log_bytes)}; it is kept from being used again by "
                f"{readers}",
                "end what reads, or close the holder once: the log shrinks by itself then",
            )
        size = found.size
        if size is None or not size.pages:
            return
        free = size.free_pages * size.page_bytes
        if free >= FREE_BYTES_MIN and size.free_pages >= FREE_SHARE * size.pages:
            found.notes.append(
                f"{mib(free)} of the file are free, and used again by what is stored next"
            )

    def _look_at_commands(self) -> None:
        found = self.found
        folder = folder_path(found.store)
        waiting: list[float] = []
        counts: Counter[str] = Counter()
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            self.find(
                "commands",
                f"the folder of commands {folder} cannot be read ({error.strerror})",
                "make it a folder of the store's owner alone",
            )
            return
        for name in names:
            kind = _COMMAND_KINDS.get(name.rpartition(".")[2])
            if kind is None:
                continue
            counts[kind] += 1
            if kind == "waiting":
                waiting.append(self._age_of(os.path.join(folder, name)))
        found.commands = dict(counts)
        if waiting:
            self._judge_waiting(max(waiting), len(waiting))
        if counts["unreadable"]:
            self.find(
                "commands",
                f"{count_of(counts['unreadable'], 'file')} in {folder} cannot be read as a command",
                "look at those that end with .bad, and remove them",
            )

    def _judge_waiting(self, oldest: float, count: int) -> None:
        text = f"{count_of(count, 'command')} from outside, the oldest {duration(oldest)} old"
        if not self._live:
            self.find(
                "commands",
                f"{text}, and no process holds the session",
                "open the session, which applies them",
                command=self._work("resume"),
            )
        elif oldest > COMMAND_SECONDS:
            self.find("commands", f"{text}, and the holder has not taken it", "look at the holder")

    def _age_of(self, path: str) -> float:
        try:
            return max(0.0, self._clock.now_us() / 1e6 - os.stat(path).st_mtime)
        except FileNotFoundError:
            return 0.0


def _beside(store: str) -> Iterator[str]:
    """The store and every file that belongs to it."""
    yield from (store, f"{store}-wal", f"{store}-shm", folder_path(store))
    yield from _lock_files(store)


def _copies(store: str) -> list[str]:
    """The copies that migrations have kept."""
    folder, name = os.path.split(store)
    pattern = re.compile(rf"{re.escape(name)}\.v[0-9]+\.bak")
    return [os.path.join(folder, each) for each in os.listdir(folder) if pattern.fullmatch(each)]


def _lock_files(store: str) -> list[str]:
    """The lock files of all epochs, the oldest first."""
    folder, name = os.path.split(store)
    pattern = re.compile(rf"{re.escape(name)}\.lock\.([0-9]+)")
    found = [
        (int(match[1]), each) for each in os.listdir(folder) if (match := pattern.fullmatch(each))
    ]
    return [os.path.join(folder, each) for _, each in sorted(found)]
