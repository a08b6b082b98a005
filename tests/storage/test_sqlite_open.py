"""Opening a path: a store, nothing, or something else, which is then left exactly as it was."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from pidurable.errors import (
    InvalidArgumentError,
    NotAStoreError,
    PidurableError,
    StorageAccessError,
    StorageCorruptError,
    StorageRefusedError,
    StorageTooNewError,
)
from pidurable.storage import Batch, HolderClaim, SqliteStorage, _sqlite_open as opening
from pidurable.storage._migrate import SCHEMA
from pidurable.testing._conformance_base import claim, conversation, entry

Opener = Callable[..., SqliteStorage]


def listing(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Name, content, mode and modification of everything in a folder."""
    found = {}
    for path in sorted(folder.iterdir()):
        seen = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
        found[path.name] = (content, seen.st_mode, seen.st_mtime_ns)
    return found


def make_store(path: Path, *, entries: int = 50) -> None:
    storage = SqliteStorage(path)
    head = storage.acquire(claim(), takeover=False)
    writes = [conversation(1), *(entry(id, messages="m" * 500) for id in range(2, entries + 2))]
    storage.apply(Batch(epoch=head.epoch, seq=1, next_id=99, flush=True, writes=writes))
    storage.release(head.epoch)
    storage.close()


def execute(path: Path, *statements: str) -> None:
    connection = apsw.Connection(str(path))
    for statement in statements:
        connection.execute(statement)
    connection.close()


def spoiled(path: Path, kind: str) -> type[PidurableError]:
    """Put something that is no good store at a path; return the error that opening it gives."""
    if kind == "folder":
        path.mkdir()
        return NotAStoreError
    if kind == "fifo":
        os.mkfifo(path)
        return NotAStoreError
    if kind == "text":
        path.write_text("dear diary\n" * 1_000)
        return NotAStoreError
    if kind == "short_text":
        path.write_text("x")
        return NotAStoreError
    if kind == "other_application":
        execute(path, "pragma application_id = 7", "create table t (a)")
        return NotAStoreError
    if kind == "other_application_wal":
        execute(path, "pragma journal_mode = wal", "create table t (a)")
        return NotAStoreError
    if kind == "empty_database":
        execute(path, "pragma journal_mode = wal", "pragma journal_mode = delete")
        return NotAStoreError
    make_store(path)
    if kind == "newer":
        execute(path, "pragma user_version = 9")
        return StorageTooNewError
    if kind == "no_schema":
        execute(path, "pragma user_version = 0")
        return StorageCorruptError
    if kind == "no_session":
        execute(path, "delete from session")
        return StorageCorruptError
    if kind == "no_session_table":
        execute(path, "drop table session")
        return StorageCorruptError
    data = path.read_bytes()
    if kind == "cut_0_with_log":
        path.write_bytes(b"")
        Path(f"{path}-wal").write_bytes(b"commits")
        return StorageCorruptError
    if kind.startswith("cut_"):
        path.write_bytes(data[: int(kind.removeprefix("cut_"))])
    elif kind == "bad_schema_page":
        path.write_bytes(data[:100] + b"\xee" * 3_996 + data[4_096:])
    return StorageCorruptError


SPOILED = [
    "folder",
    "fifo",
    "text",
    "short_text",
    "other_application",
    "other_application_wal",
    "empty_database",
    "newer",
    "no_schema",
    "no_session",
    "no_session_table",
    "cut_0_with_log",
    "cut_100",
    "cut_4096",
    "cut_20480",
    "bad_schema_page",
]


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("kind", SPOILED)
def test_what_is_no_store_is_refused_and_left_alone(
    tmp_path: Path, kind: str, create: bool, read_only: bool
) -> None:
    """Each kind gives its error, and nothing in the folder is changed or created."""  # C078
    path = tmp_path / "s.sqlite"
    expected = spoiled(path, kind)
    before = listing(tmp_path)

    with pytest.raises(expected) as caught:
        SqliteStorage(path, create=create, read_only=read_only)

    assert str(path) in str(caught.value)
    assert listing(tmp_path) == before


def test_a_newer_store_is_refused_with_both_versions(tmp_path: Path) -> None:
    """The error has the found and the known schema as fields."""  # C076
    path = tmp_path / "s.sqlite"
    spoiled(path, "newer")

    with pytest.raises(StorageTooNewError, match="has schema 9, this program knows up to") as it:
        SqliteStorage(path)

    assert (it.value.found, it.value.known) == (9, SCHEMA)


@pytest.mark.parametrize("empty", [True, False])
def test_a_missing_store_is_not_created_unasked(tmp_path: Path, empty: bool) -> None:
    """With create=False a missing or empty file is an error that says how to create one."""  # C077
    path = tmp_path / "s.sqlite"
    if empty:
        path.touch()

    with pytest.raises(StorageAccessError, match="create=True"):
        SqliteStorage(path, create=False)

    assert path.exists() == empty
    assert not empty or path.read_bytes() == b""


@pytest.mark.parametrize("empty", [True, False])
def test_a_new_store_belongs_to_its_owner_alone(tmp_path: Path, empty: bool) -> None:
    """All files are 0600 whatever the umask, also where an empty file was there before."""
    path = tmp_path / "s.sqlite"
    if empty:
        path.touch(0o644)
    before = os.umask(0)
    try:
        storage = SqliteStorage(path)
        head = storage.acquire(claim(), takeover=False)
        storage.apply(Batch(epoch=head.epoch, seq=1, next_id=2, flush=True, writes=[]))
    finally:
        os.umask(before)

    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    storage.close()

    names = ["s.sqlite", "s.sqlite-shm", "s.sqlite-wal", "s.sqlite.lock.1"]
    assert modes == dict.fromkeys(names, 0o600)


def test_only_a_folder_of_the_product_is_created(tmp_path: Path) -> None:
    """A missing parent is an error naming it, but `.pidurable` is created, 0700."""
    with pytest.raises(StorageAccessError, match="nowhere does not exist"):
        SqliteStorage(tmp_path / "nowhere" / "s.sqlite")
    assert list(tmp_path.iterdir()) == []

    SqliteStorage(tmp_path / ".pidurable" / "session.sqlite").close()

    assert stat.S_IMODE((tmp_path / ".pidurable").stat().st_mode) == 0o700


def test_an_interrupted_creation_is_taken_up_again(tmp_path: Path) -> None:
    """A hot journal beside a half-written new file: create=True finishes, create=False refuses."""
    path = tmp_path / "s.sqlite"
    path.touch()
    connection = apsw.Connection(str(path))
    connection.execute("pragma cache_size = 1")
    connection.execute("pragma cache_spill = 1")
    connection.execute("begin exclusive")
    connection.execute("create table filler (a)")
    connection.execute("insert into filler values (zeroblob(1000000))")
    half = {name: (tmp_path / name).read_bytes() for name in ("s.sqlite", "s.sqlite-journal")}
    connection.execute("rollback")
    connection.close()
    assert len(half["s.sqlite"]) > 0
    for name, content in half.items():
        (tmp_path / name).write_bytes(content)

    with pytest.raises(StorageAccessError, match="interrupted"):
        SqliteStorage(path, create=False)
    storage = SqliteStorage(path)

    assert storage.head().epoch == 0
    storage.close()


def test_a_creation_that_died_before_its_commit_is_taken_up_again(tmp_path: Path) -> None:
    """The schema is in the file already, the journal that takes it back lies beside it."""
    path = tmp_path / "s.sqlite"
    other = tmp_path / "other.sqlite"
    connection = apsw.Connection(str(other))
    connection.execute("pragma user_version = 5")
    connection.execute("begin exclusive")
    connection.execute("pragma user_version = 6")
    connection.execute("create table t (a)")
    connection.cache_flush()
    journal = Path(f"{other}-journal").read_bytes()
    connection.execute("rollback")
    connection.close()
    make_store(path)
    Path(f"{path}-journal").write_bytes(journal)

    with pytest.raises(StorageAccessError, match="interrupted"):
        SqliteStorage(path, create=False)


@pytest.mark.parametrize("failing", ["mkdir", "open"])
def test_a_folder_that_may_not_be_written_to_is_an_access_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The system's reason is in the message."""

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, refuse)
        with pytest.raises(StorageAccessError, match=r"cannot be created \(Permission denied\)"):
            opening.create_file(str(tmp_path / ".pidurable" / "s.sqlite"))


def test_a_path_below_a_file_is_an_access_error(tmp_path: Path) -> None:
    """The system's reason is in the message."""
    (tmp_path / "file").touch()

    with pytest.raises(StorageAccessError, match="Not a directory"):
        SqliteStorage(tmp_path / "file" / "s.sqlite")


def test_two_creators_make_one_store(tmp_path: Path, open_store: Opener) -> None:
    """The second to come finds the first one's session, also if it saw no file yet."""
    path = tmp_path / "s.sqlite"
    first = open_store(path)
    opening.create_file(str(path))
    second = opening.connect(str(path), None, read_only=False, power=True)
    opening.create_schema(second, uuid="another", created_us=1)
    second.close()

    assert open_store(path).head() == first.head()


@pytest.mark.parametrize("given", ["", ":memory:", "a\0b"])
def test_a_path_that_names_no_file_is_refused(given: str) -> None:
    """Nothing is created for it."""
    with pytest.raises(InvalidArgumentError, match="path"):
        SqliteStorage(given)


def test_an_unknown_durability_is_refused(tmp_path: Path) -> None:
    """The two levels are named by words."""
    with pytest.raises(InvalidArgumentError, match="durability"):
        SqliteStorage(tmp_path / "s", durability="paper")  # type: ignore[arg-type]


@pytest.mark.parametrize(("missing", "problem"), [(os.R_OK, "read it"), (os.W_OK, "write to it")])
def test_an_unreadable_store_works_again_once_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, problem: str
) -> None:
    """Without permission it is an access error, nothing is changed, and it opens later."""  # C078
    path = tmp_path / "s.sqlite"
    make_store(path)
    before = listing(tmp_path)
    with monkeypatch.context() as patch:
        # Root, who runs the tests in some places, may do everything; so the answer is planted.
        patch.setattr(os, "access", lambda path, mode: mode != missing)
        with pytest.raises(StorageAccessError, match=f"may not {problem}"):
            SqliteStorage(path)
    assert listing(tmp_path) == before

    storage = SqliteStorage(path)

    assert len(storage.entries(1)) == 50
    storage.close()


def test_a_linked_store_is_resolved_once(tmp_path: Path) -> None:
    """The lock and side files lie beside the real file, and messages name it."""
    (tmp_path / "real").mkdir()
    make_store(tmp_path / "real" / "s.sqlite")
    link = tmp_path / "link.sqlite"
    link.symlink_to(tmp_path / "real" / "s.sqlite")

    storage = SqliteStorage(link)
    storage.acquire(claim(), takeover=False)

    assert storage.store == str(tmp_path / "real" / "s.sqlite")
    assert [path.name for path in tmp_path.glob("link*")] == ["link.sqlite"]
    storage.close()


@pytest.mark.parametrize("name", ["a?b#c%20.sqlite", "with space", "ünï", "-dash", "file:x"])
def test_odd_names_are_names(tmp_path: Path, name: str) -> None:
    """What looks like a part of an address is taken literally."""
    make_store(tmp_path / name)

    storage = SqliteStorage(tmp_path / name, create=False)

    assert len(storage.entries(1)) == 50
    storage.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("running", [True, False])
def test_a_reader_needs_no_ownership(tmp_path: Path, running: bool) -> None:
    """It sees committed rows beside a running holder and on a closed store, and writes nothing."""
    path = tmp_path / "s.sqlite"
    make_store(path)
    holder = SqliteStorage(path)
    head = holder.acquire(claim(), takeover=False)
    holder.apply(Batch(epoch=head.epoch, seq=2, next_id=9, flush=True, writes=[entry(99)]))
    if not running:
        holder.close()

    reader = SqliteStorage(path, create=False, read_only=True)

    assert len(reader.entries(1)) == 51
    record = reader.holder()
    assert record is not None
    assert record.epoch == head.epoch
    refused = [
        lambda: reader.acquire(claim(), takeover=True),
        lambda: reader.heartbeat(head.epoch, 1),
        lambda: reader.release(head.epoch),
        lambda: reader.apply(Batch(epoch=head.epoch, seq=3, next_id=9, flush=True, writes=[])),
        lambda: reader.checkpoint(),
    ]
    for call in refused:
        with pytest.raises(StorageRefusedError, match="read-only"):
            call()
    if running:
        holder.apply(Batch(epoch=head.epoch, seq=3, next_id=9, flush=True, writes=[entry(100)]))
        assert reader.entry(100) is not None
    reader.close()
    holder.close()


def test_a_handle_is_refused_in_a_forked_child(tmp_path: Path, open_store: Opener) -> None:
    """A child that was forked can neither use nor close what its parent opened."""
    path = tmp_path / "s.sqlite"
    storage = open_store(path)
    head = storage.acquire(claim(), takeover=False)
    real = os.getpid

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: real() + 1)
        for call in (storage.head, lambda: storage.heartbeat(head.epoch, 1)):
            with pytest.raises(StorageAccessError, match="forked child"):
                call()
        storage.close()

    # The parent's lock and connections are as they were.
    with pytest.raises(PidurableError, match="is held by process"):
        open_store(path).acquire(
            HolderClaim(holder_id="h", host="host-1", pid=1, at_us=claim().at_us, lease_seconds=15),
            takeover=False,
        )


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/vda rw
30 22 0:50 / /mnt/share rw - nfs4 server:/x rw
31 22 0:51 / /mnt/share/local rw - tmpfs tmpfs rw
32 22 0:52 / /mnt/with\\040space rw - fuse.sshfs host: rw
33 22 0:53 / /mnt/c rw - 9p C:\\\\ rw,aname=drvfs;path=C:
34 22 0:54 / /mnt/twice rw - ext4 /dev/b rw
35 34 0:55 / /mnt/twice rw - cifs //server/x rw
not a mount line
"""


@pytest.mark.parametrize(
    ("path", "kind", "refused"),
    [
        ("/home/x", "ext4", False),
        ("/mnt/shared", "ext4", False),
        ("/mnt/share", "nfs4", True),
        ("/mnt/share/deep/er", "nfs4", True),
        ("/mnt/share/local/x", "tmpfs", False),
        ("/mnt/with space/x", "fuse.sshfs", True),
        ("/mnt/c/Users", "drvfs", True),
        ("/mnt/twice/x", "cifs", True),
    ],
)
def test_a_network_file_system_is_refused(path: str, kind: str, refused: bool) -> None:
    """The longest mount point decides, of several on one point the last."""  # C074
    found = opening.file_system_of(path, MOUNTS)

    assert found == kind
    if refused:
        with pytest.raises(StorageAccessError, match="network file system"):
            opening.refuse_network("/s", found)
    else:
        opening.refuse_network("/s", found)


def test_a_store_on_a_network_file_system_is_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes before anything is created."""  # C074
    monkeypatch.setattr(opening, "file_system", lambda path: "nfs")

    with pytest.raises(StorageAccessError, match="network file system"):
        SqliteStorage(tmp_path / "s.sqlite")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", ["3.51.2", "3.7.0"])
def test_an_old_sqlite_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Below 3.51.3 a commit can be lost, so nothing is opened."""
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: version)

    with pytest.raises(StorageAccessError, match=f"SQLite {version}"):
        SqliteStorage(tmp_path / "s.sqlite")


def test_windows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a message that says what to use instead."""
    monkeypatch.setattr("sys.platform", "win32")

    with pytest.raises(StorageAccessError, match="Windows is not supported"):
        SqliteStorage(tmp_path / "s.sqlite")


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    """Application id, schema, WAL and STRICT tables are set, and the identity may be given."""
    path = tmp_path / "s.sqlite"
    storage = SqliteStorage(path, uuid="u-1", created_us=17)
    assert storage.head()[:2] == ("u-1", 17)
    storage.close()

    connection = apsw.Connection(str(path))
    assert connection.execute("pragma application_id").get == opening.APPLICATION_ID
    assert connection.execute("pragma user_version").get == SCHEMA
    assert connection.execute("pragma journal_mode").get == "wal"
    tables = connection.execute("pragma table_list").fetchall()
    assert all(strict for _, name, *_, strict in tables if not name.startswith("sqlite_"))
    connection.close()
