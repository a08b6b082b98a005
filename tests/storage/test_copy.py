"""The copy that an export reads: one state, whatever commits come meanwhile, and no trace of it."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from pidurable.errors import StorageAccessError, StorageCorruptError, StorageRefusedError
from pidurable.storage import Batch, HolderClaim, Op, SqliteStorage, _sqlite_copy
from pidurable.storage._contract import RecordKind
from pidurable.storage._export import export_steps


@pytest.fixture
def held(tmp_path: Path) -> Iterator[SqliteStorage]:
    """A store that is held and has some hundred pages."""
    storage = SqliteStorage(tmp_path / "store", durability="process")
    claim = HolderClaim(holder_id="h", host="h", pid=1, at_us=0, lease_seconds=15.0)
    storage.acquire(claim, takeover=False)
    commit(storage, 1, [])
    for seq in range(2, 12):
        commit(storage, seq, [seq * 100 + n for n in range(20)])
    yield storage
    storage.close()


def commit(storage: SqliteStorage, seq: int, ids: list[int]) -> None:
    """One commit with some large entries; the first one makes the conversation."""
    writes: list[Any] = [(Op.CONVERSATION, (1, "u", None, None, None, "root", "", 0))]
    if ids:
        text = '"' + "x" * 1_000 + '"'
        writes = [(Op.ENTRY, (id, 1, seq, "k", None, None, None, None, text, 0)) for id in ids]
    storage.apply(Batch(1, seq, seq * 100 + 100, False, writes))


def ended(steps: Any) -> SqliteStorage:
    """Copy to the end, and give the copy."""
    while True:
        try:
            next(steps)
        except StopIteration as copied:
            copy: SqliteStorage = copied.value
            return copy


def test_a_copy_is_one_state_however_many_commits_come_between_its_parts(
    held: SqliteStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins again some times, then reads everything at once, and so it ends."""
    monkeypatch.setattr(_sqlite_copy, "PAGES_AT_ONCE", 5)
    steps = _sqlite_copy.copy_steps(held.store, str(tmp_path / "copy"))
    seq, parts = 11, 0
    while True:
        try:
            done, total = next(steps)
        except StopIteration as copied:
            copy: SqliteStorage = copied.value
            break
        assert 0 < done <= total
        parts += 1
        seq += 1
        commit(held, seq, [seq * 100, seq * 100 + 1])

    try:
        entries = copy.scan(RecordKind.ENTRY, limit=10_000)
        head = copy.head()
    finally:
        copy.close()
    assert parts == _sqlite_copy.TRIES + 2
    assert head.seq == seq - 1  # the state before the commit that came after the last part
    assert len(entries) == 200 + 2 * (head.seq - 11)


def test_a_copy_has_no_name_and_nobody_holds_it(held: SqliteStorage, tmp_path: Path) -> None:
    """It is gone with its handle, whatever happens to the process."""
    steps = _sqlite_copy.copy_steps(held.store, str(tmp_path / "copy"))
    next(steps)
    assert stat.S_IMODE(os.stat(tmp_path / "copy").st_mode) == 0o600

    copy = ended(steps)

    assert copy.holder() is None
    assert held.holder() is not None
    assert [name for name in os.listdir(tmp_path) if name.startswith("copy")] == []
    copy.close()


def test_a_copy_of_a_file_that_changed_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a store is read as it lies, without its lock, who wrote to it meanwhile is noticed."""
    path = tmp_path / "still"
    SqliteStorage(path).close()
    real = _sqlite_copy._place.connect_reader

    def as_it_lies(store: str, vfs: str | None, *, power: bool) -> Any:
        return real(store, vfs, power=power)[0], _sqlite_copy._place.Still(0, 0, 0)

    monkeypatch.setattr(_sqlite_copy._place, "connect_reader", as_it_lies)

    with pytest.raises(StorageAccessError, match="changed while it was copied"):
        list(export_steps(str(path), str(tmp_path / "f"), overwrite=False, folder=None))

    assert {name.partition("-")[0] for name in os.listdir(tmp_path)} == {"still"}


def test_a_copy_that_does_not_fit_is_told_and_leaves_nothing(
    held: SqliteStorage, tmp_path: Path
) -> None:
    """The store stays as it is, and so does what lies beside the file."""
    before = sorted(os.listdir(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StorageRefusedError, match=r"copying .*store failed \(disk I/O error"):
            list(export_steps(held.store, str(tmp_path / "f"), overwrite=False, folder=None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert sorted(os.listdir(tmp_path)) == before


def test_damage_is_told_of_the_store_and_not_of_its_copy(tmp_path: Path) -> None:
    """Nobody has ever heard of the copy."""
    path = str(tmp_path / "store")
    SqliteStorage(path).close()
    connection = apsw.Connection(path)
    connection.execute("insert into blobs (sha256, bytes) values (?, ?)", ("a" * 64, b"x"))
    connection.close()

    with pytest.raises(StorageCorruptError, match=r"blob 'aaaa.*it has other bytes") as caught:
        list(export_steps(path, str(tmp_path / "f"), overwrite=False, folder=None))

    assert caught.value.store == os.path.realpath(path)


def test_a_store_whose_creation_was_interrupted_has_nothing_to_export(tmp_path: Path) -> None:
    """An empty file is a missing store."""
    (tmp_path / "store").touch()

    with pytest.raises(StorageAccessError, match="it is empty"):
        next(_sqlite_copy.copy_steps(str(tmp_path / "store"), str(tmp_path / "copy")))
