"""Which processes have SQLite's locks on a store right now, as Linux tells it.

SQLite keeps the locks of the write-ahead log as byte ranges of the `-shm` file (wal.c and
os_unix.c of 3.54.1), and `/proc/locks` lists such ranges with the process that has them. So whoever
keeps others from writing, or the log from being used again, can be named, without touching a file:
opening the `-shm` file here would drop this process's own locks on it.

What is told is a look at one moment, and a hint for people only: nothing is decided by it. Where
the system does not tell (macOS, a process of another container) the answer is empty.
"""

from __future__ import annotations

import os

import attrs

PROC = "/proc"
_WRITE_BYTE = 120
_CHECKPOINT_BYTE = 121
_RECOVER_BYTE = 122
_READ_BYTES = range(123, 128)
_ALL_BYTES = range(120, 129)


@attrs.frozen(kw_only=True)
class SharedLock:
    """A lock that some process has on the shared memory of a log."""

    pid: int
    first: int
    last: int
    exclusive: bool

    @property
    def writes(self) -> bool:
        """Whether it keeps every other process from writing."""
        return self.exclusive and self.first <= _RECOVER_BYTE and self.first != _CHECKPOINT_BYTE

    @property
    def reads(self) -> bool:
        """Whether a read is open, behind which the log cannot be used again."""
        return not self.exclusive and self.first in _READ_BYTES


def shared_locks(store: str, *, proc: str = PROC) -> list[SharedLock]:
    """Return the locks that processes have on the log of a store, in the order of the kernel."""
    try:
        there = os.stat(f"{store}-shm")
        with open(os.path.join(proc, "locks"), encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return []
    device = f"{os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x}"
    found = [lock for where, lock in _parsed(text) if where == f"{device}:{there.st_ino}"]
    if found:
        return found
    # btrfs and overlays report another device to stat than to the table of locks.
    return [lock for where, lock in _parsed(text) if where.endswith(f":{there.st_ino}")]


def _parsed(text: str) -> list[tuple[str, SharedLock]]:
    """Read `1: POSIX  ADVISORY  WRITE 4711 fe:00:2310276 120 120`, where the bytes are SQLite's."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        # A process that only waits for a lock stands behind an arrow.
        if len(fields) != 8 or fields[1] != "POSIX":
            continue
        _, _, _, kind, pid, where, first, last = fields
        if not (pid.isdigit() and first.isdigit() and last.isdigit()):
            continue
        lock = SharedLock(pid=int(pid), first=int(first), last=int(last), exclusive=kind == "WRITE")
        if lock.pid > 0 and lock.first in _ALL_BYTES and lock.last in _ALL_BYTES:
            found.append((where, lock))
    return found


def writers(store: str, *, proc: str = PROC) -> list[int]:
    """Return the other processes that have the write lock of a store, or none."""
    pids = {lock.pid for lock in shared_locks(store, proc=proc) if lock.writes}
    return sorted(pids - {os.getpid()})


def readers(store: str, *, proc: str = PROC) -> list[int]:
    """Return the other processes that have a read open on a store, or none."""
    pids = {lock.pid for lock in shared_locks(store, proc=proc) if lock.reads}
    return sorted(pids - {os.getpid()})


def describe_process(pid: int, *, proc: str = PROC) -> str:
    """Name a process for a message: its id, and where it can be told its name and that it stands.

    Its name is what it calls itself: characters that are not printable are left out.
    """
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
    except OSError:
        return f"process {pid}"
    name = "".join(char for char in before.partition("(")[2] if char.isprintable())
    words = [name] if name else []
    if after.split()[:1] in (["T"], ["t"]):
        words.append("stopped")
    return f"process {pid} ({', '.join(words)})" if words else f"process {pid}"
