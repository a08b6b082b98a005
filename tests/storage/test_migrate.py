"""An older store is brought to this schema whole, with a copy kept, or is left as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from pidurable.errors import (
    HolderLostError,
    MigrationError,
    StorageAccessError,
    StorageHeldError,
    StorageTooNewError,
)
from pidurable.storage import Batch, SqliteStorage, _migrate
from pidurable.storage._migrate import Executes
from pidurable.testing._conformance_base import claim, conversation, ids, task

TODAY = _migrate.SCHEMA
NEXT = TODAY + 1


def add_mood(connection: Executes) -> None:
    connection.execute("alter table conversations add column mood text")
    connection.execute("update conversations set mood = 'calm'")


def fail_half_way(connection: Executes) -> None:
    add_mood(connection)
    connection.execute("update conversations set no_such_column = 1")


def stop_half_way(connection: Executes) -> None:
    add_mood(connection)
    raise KeyboardInterrupt


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of the schema of today with something in it."""
    path = tmp_path / "s.sqlite"
    storage = SqliteStorage(path)
    head = storage.acquire(claim(), takeover=False)
    rows = [conversation(1), *(task(id, status=id % 5) for id in range(2, 9))]
    storage.apply(Batch(epoch=head.epoch, seq=1, next_id=9, flush=True, writes=rows))
    storage.release(head.epoch)
    storage.close()
    return path


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch, old: Path) -> dict[int, _migrate.Migration]:
    """This program knows one schema more than the one that made the store."""
    assert old.exists()
    migrations: dict[int, _migrate.Migration] = {TODAY: add_mood}
    monkeypatch.setattr(_migrate, "SCHEMA", NEXT)
    monkeypatch.setattr(_migrate, "MIGRATIONS", migrations)
    return migrations


def value(path: Path, sql: str) -> object:
    connection = apsw.Connection(str(path))
    found = connection.execute(sql).get
    connection.close()
    return found


@pytest.mark.usefixtures("newer")
def test_an_older_store_is_migrated_and_a_copy_kept(old: Path) -> None:
    """The rows are there, the schema and the epoch are new, and the copy is the old store."""
    # C077
    storage = SqliteStorage(old, create=False)

    assert ids(storage.live_tasks()) == [2, 3, 5, 6, 7, 8]
    assert storage.head().epoch == 2
    storage.close()
    assert value(old, "select mood from conversations") == "calm"
    assert value(old, "pragma user_version") == NEXT
    copy = Path(_migrate.copy_path(str(old), TODAY))
    assert copy.name == f"s.sqlite.v{TODAY}.bak"
    assert copy.stat().st_mode & 0o777 == 0o600
    assert value(copy, "pragma user_version") == TODAY
    assert value(copy, "select count(*) from tasks") == 7
    assert sorted(path.name for path in old.parent.iterdir()) == [old.name, copy.name]


@pytest.mark.usefixtures("newer")
def test_a_migrated_store_is_not_migrated_again(old: Path) -> None:
    """Opening it once more changes nothing."""
    SqliteStorage(old).close()
    before = old.read_bytes()

    SqliteStorage(old).close()

    assert old.read_bytes() == before


def test_a_migration_that_fails_changes_nothing(
    old: Path, newer: dict[int, _migrate.Migration]
) -> None:
    """The error names the store, which stays of the old schema; a repaired program opens it."""
    # C077
    newer[TODAY] = fail_half_way

    with pytest.raises(MigrationError, match="no_such_column") as caught:
        SqliteStorage(old)

    assert str(old) in str(caught.value)
    assert value(old, "pragma user_version") == TODAY
    assert value(old, "select epoch from session") == 1
    assert value(old, "select count(*) from pragma_table_info('conversations')") == 8
    newer[TODAY] = add_mood
    SqliteStorage(old).close()
    assert value(old, "pragma user_version") == NEXT


def test_a_migration_that_is_interrupted_changes_nothing(
    old: Path, newer: dict[int, _migrate.Migration]
) -> None:
    """What stops it comes out as it is, and the store is of the old schema."""
    newer[TODAY] = stop_half_way

    with pytest.raises(KeyboardInterrupt):
        SqliteStorage(old)

    assert value(old, "pragma user_version") == TODAY


def test_a_missing_migration_is_an_error(old: Path, newer: dict[int, _migrate.Migration]) -> None:
    """A gap in the table is noticed before anything is copied."""
    newer.clear()

    with pytest.raises(MigrationError, match=f"no migration from schema {TODAY}"):
        SqliteStorage(old)

    assert [path.name for path in old.parent.iterdir()] == [old.name]


def test_a_store_in_use_is_not_migrated(
    old: Path, newer: dict[int, _migrate.Migration], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living holder, hung or not, of the older program is named; nothing is changed."""
    # C076
    with monkeypatch.context() as patch:
        patch.setattr(_migrate, "SCHEMA", TODAY)
        holder = SqliteStorage(old)
        epoch = holder.acquire(claim(), takeover=False).epoch

    with pytest.raises(StorageHeldError):
        SqliteStorage(old)

    holder.apply(Batch(epoch=epoch, seq=2, next_id=9, flush=True, writes=[conversation(9)]))
    holder.release(epoch)
    holder.close()
    SqliteStorage(old).close()
    assert value(old, "pragma user_version") == NEXT


def test_an_older_program_that_still_runs_is_fenced(
    old: Path, newer: dict[int, _migrate.Migration], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for dead and migrated under, it meets HolderLostError at its next commit."""
    # C076
    with monkeypatch.context() as patch:
        patch.setattr(_migrate, "SCHEMA", TODAY)
        holder = SqliteStorage(old)
        epoch = holder.acquire(claim(), takeover=False).epoch
    assert holder._lock is not None
    holder._lock.drop()
    SqliteStorage(old).close()

    with pytest.raises(HolderLostError):
        holder.apply(Batch(epoch=epoch, seq=2, next_id=9, flush=True, writes=[conversation(9)]))
    with pytest.raises(HolderLostError):
        holder.heartbeat(epoch, 5)
    holder.close()


@pytest.mark.parametrize("read_only", [True, False])
def test_a_newer_schema_in_the_log_is_seen(
    old: Path,
    newer: dict[int, _migrate.Migration],
    monkeypatch: pytest.MonkeyPatch,
    read_only: bool,
) -> None:
    """The older program refuses a store that was migrated and not checkpointed since."""
    # C076
    migrated = SqliteStorage(old)
    with monkeypatch.context() as patch:
        patch.setattr(_migrate, "SCHEMA", TODAY)

        with pytest.raises(StorageTooNewError):
            SqliteStorage(old, create=False, read_only=read_only)

    assert migrated.head().epoch == 2
    migrated.close()


@pytest.mark.usefixtures("newer")
def test_a_foreign_holder_of_an_older_store_has_a_lease(old: Path) -> None:
    """Where no lock can be asked, a store is migrated once the heartbeat is old, not before."""
    now_us = time.time_ns() // 1_000
    connection = apsw.Connection(str(old))
    connection.execute("update holder set released = 0, inode = 1")
    connection.execute("update heartbeat set at_us = ?", (now_us,))

    with pytest.raises(StorageHeldError):
        SqliteStorage(old)
    connection.execute("update heartbeat set at_us = ?", (now_us - 60_000_000,))
    SqliteStorage(old).close()

    connection.close()
    assert value(old, "pragma user_version") == NEXT


@pytest.mark.usefixtures("newer")
def test_a_reader_does_not_migrate(old: Path) -> None:
    """Only looking at an older store says what to do, and changes nothing."""
    before = old.read_bytes()

    with pytest.raises(StorageAccessError, match=f"older schema {TODAY}"):
        SqliteStorage(old, read_only=True)

    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == [old.name]


def test_a_copy_that_was_cut_off_is_made_again(
    old: Path, newer: dict[int, _migrate.Migration]
) -> None:
    """A half-written copy never has the name of a whole one, and does not stand in the way."""
    (old.parent / f"s.sqlite.v{TODAY}.bak.part").write_bytes(b"half")

    SqliteStorage(old).close()

    assert not (old.parent / f"s.sqlite.v{TODAY}.bak.part").exists()
    assert value(old.parent / f"s.sqlite.v{TODAY}.bak", "select count(*) from tasks") == 7


@pytest.mark.usefixtures("newer")
def test_of_two_that_migrate_at_once_the_second_leaves_the_copy_alone(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One saw the old schema, and then another one migrated: the copy is still of the old store."""
    real, copies = SqliteStorage._migrate, old.parent / f"s.sqlite.v{TODAY}.bak"

    def after_another(self: SqliteStorage, schema: int) -> None:
        monkeypatch.setattr(SqliteStorage, "_migrate", real)
        SqliteStorage(old).close()
        real(self, schema)

    monkeypatch.setattr(SqliteStorage, "_migrate", after_another)
    storage = SqliteStorage(old)

    assert storage.head().epoch == 2
    storage.close()
    assert value(old, "pragma user_version") == NEXT
    assert value(copies, "pragma user_version") == TODAY


@pytest.mark.usefixtures("newer")
def test_nobody_else_writes_while_the_copy_is_made(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied is what is migrated: the write lock is held from before the one to after."""
    real, refused = _migrate._keep_copy, []

    def keep_copy(store: str, found: int, copy: Callable[[str], None]) -> None:
        other = apsw.Connection(store)
        with pytest.raises(apsw.BusyError):
            other.execute("begin immediate")
        other.close()
        refused.append(found)
        real(store, found, copy)

    monkeypatch.setattr(_migrate, "_keep_copy", keep_copy)
    SqliteStorage(old).close()

    assert refused == [TODAY]


def test_a_newer_schema_is_refused_by_the_machinery_too() -> None:
    """Called with a schema from the future it touches nothing."""
    connection = apsw.Connection(":memory:")

    with pytest.raises(StorageTooNewError):
        _migrate.migrate(connection, store="s", found=3, known=2, copy=lambda path: None)

    connection.close()
