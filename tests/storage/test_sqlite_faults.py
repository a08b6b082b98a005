"""What a batch meets on a bad day, and what the store holds afterwards."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import pytest

from pidurable.errors import (
    InternalError,
    PidurableError,
    StorageAccessError,
    StorageCorruptError,
    StorageRefusedError,
)
from pidurable.storage import Batch, Op, SqliteStorage, _sqlite_open as opening
from pidurable.testing._conformance_base import claim, conversation, entry, ids


class PowerCutError(Exception):
    """What a test's file system raises, and no storage knows."""


class BadDisk(apsw.VFS):
    """The system's file system, with an error planted for one call on the log."""

    def __init__(self) -> None:
        self.name = "bad_disk"
        super().__init__(self.name, "")
        self.bad: dict[str, Callable[[], BaseException]] = {}
        self.seen: list[str] = []

    def xOpen(self, name: Any, flags: list[int]) -> BadFile:
        return BadFile(self, name, flags)

    def strike(self, call: str) -> None:
        self.seen.append(call)
        if call in self.bad:
            raise self.bad[call]()


class BadFile(apsw.VFSFile):
    def __init__(self, disk: BadDisk, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk
        self._log = bool(flags[0] & apsw.SQLITE_OPEN_WAL)

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._log:
            self._disk.strike("write")
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        if self._log:
            self._disk.strike("sync")
        super().xSync(flags)

    def xClose(self) -> None:
        super().xClose()
        if self._log:
            self._disk.strike("close")


@pytest.fixture
def disk() -> Iterator[BadDisk]:
    vfs = BadDisk()
    yield vfs
    vfs.unregister()


def opened(path: Path, **options: Any) -> SqliteStorage:
    storage = SqliteStorage(path, **options)
    storage.acquire(claim(), takeover=True)
    return storage


def batch(storage: SqliteStorage, *writes: Any, flush: bool = True, seq: int = 1) -> Batch:
    return Batch(epoch=storage.head().epoch, seq=seq, next_id=2, flush=flush, writes=writes)


ERRORS = sorted(
    (
        thing
        for name in dir(apsw)
        if isinstance(thing := getattr(apsw, name), type)
        and issubclass(thing, Exception)
        and thing is not apsw.Error
    ),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("writing", [True, False])
@pytest.mark.parametrize("certain", [True, False])
def test_every_error_of_the_library_is_mapped(
    kind: type[Exception], writing: bool, certain: bool
) -> None:
    """Each class has its place, in exactly one group, and a read is never "refused"."""
    groups = (opening._BUSY, opening._ENVIRONMENT, opening._DAMAGE, opening._BUG)
    assert sum(kind in group for group in groups) == 1, f"{kind.__name__} is not mapped"

    mapped = opening.map_error(kind("x"), "/s", writing=writing, certain=certain)

    assert isinstance(mapped, PidurableError)
    assert "x" in str(mapped)
    if isinstance(mapped, StorageRefusedError):
        assert writing
        assert certain or kind in opening._BUSY


def test_an_io_error_on_a_full_disk_says_that_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite names no reason when it finds no room for what it maps; with room nothing is added."""
    store = str(tmp_path / "store.sqlite")
    asked: list[str] = []
    free = 0

    def statvfs(path: str) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_bavail=free, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    full = opening.map_error(apsw.IOError("disk I/O error"), store)
    free = 1_000
    roomy = opening.map_error(apsw.IOError("disk I/O error"), store)

    assert asked == [str(tmp_path)] * 2
    assert str(full) == f"{roomy}; its disk is full"


def test_what_is_not_of_the_library_passes() -> None:
    """A foreign error is not dressed up as one of the storage."""
    assert opening.map_error(KeyboardInterrupt(), "/s") is None
    assert opening.map_error(PowerCutError(), "/s", writing=True) is None


def test_a_full_disk_refuses_the_batch_and_leaves_the_store_usable(tmp_path: Path) -> None:
    """The page limit fails a batch for certain; with room again the same batch is stored."""
    storage = opened(tmp_path / "s")
    storage.apply(batch(storage, conversation(1)))
    pages = storage._writer.execute("pragma page_count").get
    storage._writer.execute(f"pragma max_page_count = {pages}")
    large = batch(storage, entry(2), entry(3, messages="m" * 100_000), seq=2)

    for _ in range(2):
        with pytest.raises(StorageRefusedError, match="FullError"):
            storage.apply(large)
        assert storage.entries(1) == []
        assert storage.head().seq == 1
    storage._writer.execute("pragma max_page_count = 1000000")
    storage.apply(large)

    assert ids(storage.entries(1)) == [2, 3]
    storage.close()


def test_a_full_disk_at_commit_is_certain(tmp_path: Path, disk: BadDisk) -> None:
    """No space for the log: refused, nothing stored, and the next batch goes through."""
    storage = opened(tmp_path / "s", vfs=disk.name)
    disk.bad["write"] = lambda: apsw.FullError("no space")

    with pytest.raises(StorageRefusedError):
        storage.apply(batch(storage, conversation(1)))
    disk.bad.clear()

    assert storage.conversation(1) is None
    storage.apply(batch(storage, conversation(2)))
    storage.close()
    again = SqliteStorage(tmp_path / "s")
    assert ids(again.conversations_by_owner(None)) == [2]
    again.close()


def test_a_limit_on_the_size_of_files_is_as_certain_as_a_full_disk(tmp_path: Path) -> None:
    """Met by COMMIT itself: refused with its reason, nothing stored, and then it goes on."""
    storage = opened(tmp_path / "s")
    storage.apply(batch(storage, conversation(1)))
    large = batch(storage, entry(2), entry(3, messages="m" * 20_000), seq=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for room in (0, 100, 5_000):
            size = os.stat(f"{storage.store}-wal").st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
            with pytest.raises(StorageRefusedError, match=r"disk I/O error \(File too large\)"):
                storage.apply(large)
            assert storage.head().seq == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    storage.reopen().close()
    storage.apply(large)

    assert ids(storage.entries(1)) == [2, 3]
    storage.close()


@pytest.mark.parametrize("call", ["write", "sync"])
def test_an_io_error_at_commit_is_uncertain(tmp_path: Path, disk: BadDisk, call: str) -> None:
    """The storage does not claim to know, and shows nothing of the batch."""
    storage = opened(tmp_path / "s", vfs=disk.name)
    disk.bad[call] = lambda: apsw.IOError("broken")

    with pytest.raises(StorageAccessError):
        storage.apply(batch(storage, conversation(1)))

    assert storage.conversation(1) is None
    disk.bad.clear()
    storage.close()


def test_a_foreign_error_at_commit_passes_as_it_is(tmp_path: Path, disk: BadDisk) -> None:
    """What a test's file system raises comes out unchanged, and no transaction is left open."""
    storage = opened(tmp_path / "s", vfs=disk.name)
    disk.bad["sync"] = PowerCutError

    with pytest.raises(PowerCutError):
        storage.apply(batch(storage, conversation(1)))

    assert not storage._writer.in_transaction
    disk.bad.clear()
    storage.close()


def test_only_flushed_batches_are_synced(tmp_path: Path, disk: BadDisk) -> None:
    """One sync for a flushed batch, none for another, and the writer rests at FULL."""
    storage = opened(tmp_path / "s", vfs=disk.name)

    def syncs(flush: bool, seq: int) -> int:
        disk.seen.clear()
        storage.apply(batch(storage, conversation(seq), flush=flush, seq=seq))
        return disk.seen.count("sync")

    assert [syncs(True, 1), syncs(False, 2), syncs(True, 3), syncs(False, 4)] == [1, 0, 1, 0]
    assert storage._writer.execute("pragma synchronous").get == 2
    disk.seen.clear()
    storage.heartbeat(1, 5)
    assert "sync" not in disk.seen
    storage.close()


def test_the_process_level_never_syncs_a_batch(tmp_path: Path, disk: BadDisk) -> None:
    """With durability="process" a flush means nothing."""
    storage = opened(tmp_path / "s", vfs=disk.name, durability="process")
    disk.seen.clear()

    storage.apply(batch(storage, conversation(1), flush=True))

    assert "sync" not in disk.seen
    assert "write" in disk.seen
    storage.close()


def test_a_failed_unflushed_batch_leaves_the_writer_at_full(tmp_path: Path) -> None:
    """The level goes back to FULL on every way out."""
    storage = opened(tmp_path / "s")

    with pytest.raises(InternalError):
        storage.apply(batch(storage, entry(1), entry(1), flush=False))

    assert storage._writer.execute("pragma synchronous").get == 2
    storage.close()


def test_a_level_that_cannot_be_set_back_spoils_no_result(tmp_path: Path) -> None:
    """A batch is told as it went; the next flushed one sets FULL itself, or is refused."""
    storage = opened(tmp_path / "s")
    failing = ["pragma synchronous = full"]

    def trace(_: Any, statement: str, bindings: Any) -> bool:
        if statement in failing:
            raise apsw.IOError("broken")
        return True

    storage._writer.exec_trace = trace
    storage.apply(batch(storage, conversation(1), flush=False))
    with pytest.raises(StorageRefusedError):
        storage.apply(batch(storage, conversation(2), seq=2))
    failing.clear()
    storage.apply(batch(storage, conversation(2), seq=2))

    assert storage._writer.execute("pragma synchronous").get == 2
    assert ids(storage.conversations_by_owner(None)) == [1, 2]
    storage.close()


def test_a_close_that_fails_closes_every_handle(tmp_path: Path, disk: BadDisk) -> None:
    """The first failure is raised when no handle is left that would keep the store locked."""
    storage = opened(tmp_path / "s", vfs=disk.name)
    storage.apply(batch(storage, conversation(1)))
    handles = list(storage._connections)
    disk.bad["close"] = lambda: apsw.IOError("broken")

    with pytest.raises(StorageAccessError, match="closing failed"):
        storage.close()

    for handle in handles:
        with pytest.raises(apsw.ConnectionClosedError):
            handle.execute("select 1")


def test_a_busy_store_refuses_the_batch(tmp_path: Path) -> None:
    """While somebody else writes, a batch is refused for certain and may be sent again."""  # C072
    storage = opened(tmp_path / "s")
    storage._writer.set_busy_timeout(0)
    intruder = apsw.Connection(str(tmp_path / "s"))
    intruder.execute("begin immediate")

    with pytest.raises(StorageRefusedError, match="BusyError"):
        storage.apply(batch(storage, conversation(1)))
    with pytest.raises(StorageRefusedError, match="BusyError"):
        storage.heartbeat(1, 5)
    intruder.execute("rollback")
    storage.apply(batch(storage, conversation(1)))

    assert storage.conversation(1) is not None
    intruder.close()
    storage.close()


def test_a_damaged_page_is_reported_and_nothing_overwritten(tmp_path: Path) -> None:
    """Reading a spoiled table is an error, not "nothing", and the rest still reads."""  # C078
    path = tmp_path / "s"
    storage = opened(path)
    writes = [conversation(1), *(entry(id, messages="m" * 900) for id in range(2, 300))]
    storage.apply(batch(storage, *writes))
    root = storage._reader.execute("select rootpage from sqlite_schema where name = 'entries'").get
    storage.close()
    data = bytearray(path.read_bytes())
    data[(root - 1) * 4_096 : root * 4_096] = b"\xee" * 4_096
    path.write_bytes(data)

    again = SqliteStorage(path, create=False)

    with pytest.raises(StorageCorruptError, match="is damaged"):
        again.entry(5)
    assert again.conversation(1) is not None
    again.close()
    assert path.read_bytes() == data


def test_the_log_stays_bounded_and_shrinks(tmp_path: Path) -> None:
    """Checkpoints let the log be used again; an open reader holds it back; then it goes."""
    # C073
    path = tmp_path / "s"
    storage = opened(path)

    def grow(first: int) -> None:
        rows = [entry(id, messages="m" * 4_000) for id in range(first, first + 100)]
        storage.apply(batch(storage, *rows, seq=first))

    sizes = []
    for first in range(1, 1_000, 100):
        grow(first)
        storage.checkpoint()
        sizes.append(os.stat(f"{path}-wal").st_size)
    assert sizes[-1] < 2 * sizes[0]

    reader = apsw.Connection(str(path))
    reader.execute("begin")
    reader.execute("select count(*) from entries").fetchall()
    storage._checkpointer.set_busy_timeout(0)
    grow(2_001)
    assert storage.checkpoint(truncate=True) > 100
    reader.close()
    assert storage.checkpoint(truncate=True) == 0
    assert os.stat(f"{path}-wal").st_size == 0
    storage.close()


def test_closing_the_last_handle_leaves_one_file(tmp_path: Path) -> None:
    """The log is moved into the store, and no side file stays but the lock of the crashed."""
    storage = opened(tmp_path / "s")
    storage.apply(batch(storage, conversation(1)))
    other = storage.reopen()
    storage.close()
    assert (tmp_path / "s-wal").exists()

    other.close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "s.lock.1"]


def test_two_thousand_small_steps_take_space_in_proportion(tmp_path: Path) -> None:
    """The store is at most four times its payload: what changed is written, not everything."""
    # C080
    storage = opened(tmp_path / "s")
    payload = 1_000
    for start in range(0, 2_000, 100):
        rows: list[Any] = []
        for id in range(start + 10, start + 110):
            rows.append(entry(id, messages="m" * payload))
            rows.append((Op.CHECKPOINT, (1, "step", "c" * 100, id)))
        storage.apply(batch(storage, *rows, seq=start + 1))
    storage.close()

    assert (tmp_path / "s").stat().st_size < 2 * 2_000 * payload


def test_a_text_that_is_none_any_more_is_damage(tmp_path: Path) -> None:
    """Bytes that changed within a text are the file's fault, and no bug of ours."""
    storage = opened(tmp_path / "s.sqlite")
    storage.apply(batch(storage, conversation(1)))
    storage.close()
    connection = apsw.Connection(str(tmp_path / "s.sqlite"))
    connection.execute("update conversations set key = cast(x'c3ff' as text)")
    connection.close()
    storage = opened(tmp_path / "s.sqlite")

    with pytest.raises(StorageCorruptError, match="can't decode"):
        storage.conversation(1)
    storage.close()
