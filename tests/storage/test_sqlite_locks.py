"""Who has SQLite's locks on a store: the answer of the system, and what is said of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import apsw
import pytest

from pidurable.errors import StorageRefusedError
from pidurable.storage import Batch, SqliteStorage, _sqlite_locks as locks
from pidurable.testing._conformance_base import claim, conversation


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "s-shm").touch()
    (tmp_path / "proc").mkdir()
    return tmp_path / "proc"


def table(proc: Path, *lines: str, device: str | None = None) -> None:
    """Write a table of locks; `here` stands for the file of the store."""
    there = os.stat(proc.parent / "s-shm")
    device = device or f"{os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x}"
    text = "\n".join(lines).replace("here", f"{device}:{there.st_ino}")
    (proc / "locks").write_text(text + "\n")


def test_whoever_writes_and_reads_is_told_apart(proc: Path) -> None:
    """The bytes of the shared memory say what a lock is for; only real locks of ours count."""
    store = str(proc.parent / "s")
    table(
        proc,
        "1: POSIX  ADVISORY  WRITE 11 here 120 120",
        "1: -> POSIX  ADVISORY  WRITE 12 here 120 120",
        "2: POSIX  ADVISORY  WRITE 13 here 121 121",
        "3: POSIX  ADVISORY  READ 14 here 124 124",
        "3: POSIX  ADVISORY  READ 15 here 128 128",
        "4: POSIX  ADVISORY  WRITE 16 here 122 122",
        "5: FLOCK  ADVISORY  WRITE 17 here 0 EOF",
        "6: POSIX  ADVISORY  READ 18 00:00:1 124 124",
        "7: POSIX  ADVISORY  READ -1 here 124 124",
        "8: POSIX  ADVISORY  READ 19 here 0 EOF",
        "9: POSIX  ADVISORY  WRITE 20 here 124 124",
        f"9: POSIX  ADVISORY  READ {os.getpid()} here 125 125",
    )

    assert locks.writers(store, proc=str(proc)) == [11, 16]
    assert locks.readers(store, proc=str(proc)) == [14]


def test_a_device_that_is_called_otherwise_is_found_by_its_file(proc: Path) -> None:
    """btrfs and overlays give stat another device than the table has; the inode decides then."""
    table(proc, "1: POSIX  ADVISORY  READ 14 here 124 124", device="ff:ff")

    assert locks.readers(str(proc.parent / "s"), proc=str(proc)) == [14]


def test_where_the_system_does_not_tell_nobody_is_named(proc: Path) -> None:
    """No table, no log: the answer is empty, and no error."""
    assert locks.shared_locks(str(proc.parent / "s"), proc=str(proc)) == []
    table(proc, "")
    os.unlink(proc.parent / "s-shm")
    assert locks.shared_locks(str(proc.parent / "s"), proc=str(proc)) == []


@pytest.mark.parametrize(
    ("stat", "said"),
    [
        ("7 (python3) S 1 2", "process 7 (python3)"),
        ("7 (a) b\x1b[2J) T 1 2", "process 7 (a) b[2J, stopped)"),
        ("7 () t 1", "process 7 (stopped)"),
        ("7 () S 1", "process 7"),
        (None, "process 7"),
    ],
)
def test_a_process_is_named_by_what_can_be_told_of_it(
    proc: Path, stat: str | None, said: str
) -> None:
    """Its id always, its own name without control characters, and whether it is stopped."""
    if stat is not None:
        (proc / "7").mkdir()
        (proc / "7" / "stat").write_text(stat)

    assert locks.describe_process(7, proc=str(proc)) == said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who has a lock")
def test_a_busy_store_names_the_process_that_has_the_write_lock(tmp_path: Path) -> None:
    """A process that was stopped in the middle of a commit keeps others out: they say who it is."""
    # C018, C072
    path = tmp_path / "s"
    storage = SqliteStorage(path)
    storage.acquire(claim(), takeover=False)
    storage._writer.set_busy_timeout(0)
    batch = Batch(epoch=1, seq=1, next_id=9, flush=True, writes=[conversation(1)])
    ready, hold = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        other = apsw.Connection(str(path))
        other.execute("begin immediate")
        os.write(ready[1], b"1")
        os.close(hold[1])
        os.read(hold[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with pytest.raises(StorageRefusedError, match=rf"process {pid} \(.*\) has the write lock"):
            storage.apply(batch)
    finally:
        for end in (*hold, *ready):
            os.close(end)
        os.waitpid(pid, 0)

    storage.apply(batch)
    assert storage.head().seq == 1
    storage.close()
