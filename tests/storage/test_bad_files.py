"""Every way in which the file of a store can be wrong: what is said, and that nothing is changed.

The file is a closed store, spoiled in one respect. Whoever opens it, for work or to look, with or
without leave to create one, is told the path, the problem and, where there is one, the way out.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from pidurable.errors import (
    NotAStoreError,
    PidurableError,
    StorageAccessError,
    StorageCorruptError,
    StorageTooNewError,
)
from pidurable.storage import Batch, Op, SqliteStorage
from pidurable.testing._conformance_base import claim, conversation, entry

PAGE = 4_096
Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a closed store with something on every page."""
    path = tmp_path_factory.mktemp("whole") / "s.sqlite"
    storage = SqliteStorage(path)
    head = storage.acquire(claim(), takeover=False)
    rows = [conversation(1), *(entry(id, messages="m" * 500, head=id) for id in range(2, 60))]
    blob = (Op.BLOB, ("ab" * 32, bytes(range(256)) * 64))
    storage.apply(Batch(epoch=head.epoch, seq=1, next_id=99, flush=True, writes=[*rows, blob]))
    storage.release(head.epoch)
    storage.close()
    return path.read_bytes()


def put(offset: int, data: bytes) -> Spoil:
    """Write some bytes over what is there."""

    def spoil(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return spoil


def cut(size: int) -> Spoil:
    return lambda path: os.truncate(path, size)


def execute(*statements: str) -> Spoil:
    def spoil(path: Path) -> None:
        connection = apsw.Connection(str(path))
        for statement in statements:
            connection.execute(statement)
        connection.close()

    return spoil


def beside(suffix: str, make: Spoil) -> Spoil:
    return lambda path: make(Path(f"{path}{suffix}"))


def instead(make: Spoil) -> Spoil:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


def a_socket(path: Path) -> None:
    # Its name is short enough only from within the folder.
    where = os.open(path.parent, os.O_RDONLY)
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"/proc/self/fd/{where}/{path.name}")
    made.close()
    os.close(where)


def a_log_of_another_store(path: Path) -> None:
    other = path.with_name("other.sqlite")
    storage = SqliteStorage(other)
    head = storage.acquire(claim(), takeover=False)
    writes = [conversation(1), *(entry(id, messages="o" * 900) for id in range(2, 90))]
    storage.apply(Batch(epoch=head.epoch, seq=1, next_id=99, flush=True, writes=writes))
    Path(f"{path}-wal").write_bytes(Path(f"{other}-wal").read_bytes())
    storage.release(head.epoch)
    storage.close()
    other.unlink()


NO_STORE, ACCESS, DAMAGED = NotAStoreError, StorageAccessError, StorageCorruptError
MALFORMED = "malformed"

TABLE: dict[str, tuple[Spoil, type[PidurableError], str]] = {
    # --- no file
    "a folder": (instead(Path.mkdir), NO_STORE, "it is a folder"),
    "a FIFO": (instead(os.mkfifo), NO_STORE, "not a regular file"),
    "a socket": (instead(a_socket), NO_STORE, "not a regular file"),
    "a link to itself": (
        instead(lambda path: path.symlink_to(path)),
        ACCESS,
        "symbolic links",
    ),
    "a link to a device": (
        instead(lambda path: path.symlink_to("/dev/null")),
        NO_STORE,
        "/dev/null is not a pidurable store: it is not a regular file",
    ),
    # --- the header
    "another first byte": (put(0, b"X"), NO_STORE, "not an SQLite database"),
    "pages of no size": (put(16, b"\0\0"), NO_STORE, "not an SQLite database"),
    "pages of an odd size": (put(16, b"\0\3"), NO_STORE, "not an SQLite database"),
    "a reading version of the future": (put(19, b"\x09"), NO_STORE, "not an SQLite database"),
    "no room on pages": (put(21, b"\1\1\1"), NO_STORE, "not an SQLite database"),
    "more pages than there are": (put(28, b"\0\xff\xff\xff"), DAMAGED, MALFORMED),
    "a format of the future": (put(44, b"\0\0\0\x09"), DAMAGED, "unsupported file format"),
    "another encoding": (put(56, b"\0\0\0\2"), DAMAGED, "malformed database schema"),
    "no schema number": (put(60, b"\0\0\0\0"), DAMAGED, "its schema number is 0"),
    "a negative schema number": (put(60, b"\xff" * 4), DAMAGED, "its schema number is -1"),
    "a schema of the future": (
        put(60, b"\0\0\0\x63"),
        StorageTooNewError,
        r"has schema 99, this program knows up to \d+. Upgrade pidurable",
    ),
    "another application": (put(68, b"abcd"), NO_STORE, "another application .id 0x61626364."),
    "no application": (put(68, b"\0\0\0\0"), NO_STORE, "another application .id 0x00000000."),
    # --- pages
    "cut in the header": (cut(50), DAMAGED, MALFORMED),
    "cut to the header": (cut(100), DAMAGED, MALFORMED),
    "garbage behind the header": (put(100, b"\xa5" * (PAGE - 100)), DAMAGED, MALFORMED),
    "a first page of zeros": (put(0, bytes(PAGE)), NO_STORE, "not an SQLite database"),
    # --- parts
    **{
        f"no table {name}": (execute(f"drop table {name}"), DAMAGED, f"the table {name} is missing")
        for name in ("session", "holder", "entries", "tasks", "blobs", "commands", "removals")
    },
    **{
        f"no index {name}": (execute(f"drop index {name}"), DAMAGED, f"the index {name} is missing")
        for name in ("tasks_live", "conversations_key", "submissions_request")
    },
    "no column": (
        execute("alter table tasks drop column woken_by"),
        DAMAGED,
        "the column tasks.woken_by is missing",
    ),
    "no session": (execute("delete from session"), DAMAGED, "it has 0 rows of a session, not 1"),
    "two sessions": (
        execute(
            "pragma ignore_check_constraints = on",
            "insert into session select 2, uuid, created_us, epoch, seq, next_id, clean"
            " from session",
        ),
        DAMAGED,
        "it has 2 rows of a session, not 1",
    ),
    "no heartbeat": (
        execute("delete from heartbeat"),
        DAMAGED,
        "the heartbeat of its holder is missing",
    ),
    # --- what lies beside
    "a log of another store": (
        a_log_of_another_store,
        DAMAGED,
        "its log .*-wal is of another store .*; move the log away",
    ),
    "no bytes, and a log": (
        lambda path: (cut(0)(path), Path(f"{path}-wal").write_bytes(b"log")),
        DAMAGED,
        "cut to 0 bytes, but its log is still there",
    ),
    "a folder for a log": (beside("-wal", Path.mkdir), ACCESS, "-wal, .* is none; move it away"),
    "a FIFO for the shared memory": (
        beside("-shm", os.mkfifo),
        ACCESS,
        "-shm, .* is none; move it away",
    ),
}
"""How to spoil it, the error, and words of its message."""


def listing(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in folder.iterdir():
        seen = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
        found[path.name] = (content, seen.st_mode, seen.st_mtime_ns)
    # What SQLite keeps in memory that processes share says nothing: it is made anew from the log.
    return {name: value for name, value in found.items() if not name.endswith("-shm")}


def refuse(path: Path, error: type[PidurableError], words: str) -> None:
    """Open it in every way, and check what is said and that nothing was changed."""
    before = listing(path.parent)
    for options in ({"create": True}, {"create": False}, {"create": False, "read_only": True}):
        with pytest.raises(PidurableError) as caught:
            SqliteStorage(path, **options).close()

        assert type(caught.value) is error, caught.value
        said = str(caught.value)
        assert path.name in said or "/dev/null" in said
        assert re.search(words, said), said
        assert listing(path.parent) == before


@pytest.mark.parametrize("name", TABLE)
def test_a_file_that_is_wrong_is_told_what_and_left_alone(
    whole: bytes, tmp_path: Path, name: str
) -> None:
    """The error has the path, the problem and the way out; no byte and no time changes."""
    # C074, C078
    spoil, error, words = TABLE[name]
    path = tmp_path / "s.sqlite"
    path.write_bytes(whole)

    spoil(path)

    refuse(path, error, words)


def test_a_store_that_was_cut_at_any_page_is_damaged(whole: bytes, tmp_path: Path) -> None:
    """Wherever a copy stopped at the end of a page, it is not taken for a smaller store."""
    # C075
    path = tmp_path / "s.sqlite"
    pages = len(whole) // PAGE
    assert pages > 30
    for count in range(1, pages):
        path.write_bytes(whole[: count * PAGE])

        refuse(path, StorageCorruptError, "restore a backup")


def test_a_page_of_zeros_is_never_taken_for_something_else(whole: bytes, tmp_path: Path) -> None:
    """A page that was lost is reported by the opening or by what reads it, or nothing needs it."""
    # C075
    path = tmp_path / "s.sqlite"
    silent: list[int] = []
    told: list[str] = []
    for number in range(1, len(whole) // PAGE):
        path.write_bytes(whole)
        put(number * PAGE, bytes(PAGE))(path)
        try:
            storage = SqliteStorage(path, create=False, read_only=True)
            try:
                rows = storage.entries(1)
                blob = storage.blob("ab" * 32)
            finally:
                storage.close()
        except StorageCorruptError as error:
            told.append(str(error))
        else:
            assert len(rows) == 58, number
            assert blob is None or len(blob) == 64 * 256
            silent.append(number)
        for side in tmp_path.glob("s.sqlite-*"):
            side.unlink()

    assert len(told) > 10
    assert silent  # indexes that this look does not need
    assert all("s.sqlite is damaged" in said for said in told)


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
@pytest.mark.parametrize("content", [b"", b"junk" * 5_000], ids=["empty", "junk"])
def test_junk_where_sqlite_keeps_its_files_is_taken_for_nothing(
    whole: bytes, tmp_path: Path, suffix: str, content: bytes
) -> None:
    """A log whose frames are none, and shared memory of nobody, do not stand in the way."""
    path = tmp_path / "s.sqlite"
    path.write_bytes(whole)
    Path(f"{path}{suffix}").write_bytes(content)

    storage = SqliteStorage(path, create=False)

    assert len(storage.entries(1)) == 58
    storage.close()


def test_a_stray_journal_asks_for_a_decision(whole: bytes, tmp_path: Path) -> None:
    """To look at it is refused with the way out, and going on with the store loses nothing."""
    path = tmp_path / "s.sqlite"
    path.write_bytes(whole)
    Path(f"{path}-journal").write_bytes(b"junk" * 100)

    with pytest.raises(StorageAccessError, match=r"a journal lies beside it.*create=True"):
        SqliteStorage(path, create=False)
    storage = SqliteStorage(path, create=True)

    assert len(storage.entries(1)) == 58
    storage.close()


def test_a_file_that_sqlite_may_only_read_is_no_store_for_work(
    whole: bytes, tmp_path: Path
) -> None:
    """Written by an SQLite of the future, it can be looked at; opening it for work says why not."""
    path = tmp_path / "s.sqlite"
    path.write_bytes(whole)
    put(18, b"\x09")(path)

    with pytest.raises(StorageAccessError, match="SQLite can only read it"):
        SqliteStorage(path, create=False)
    reader = SqliteStorage(path, create=False, read_only=True)

    assert len(reader.entries(1)) == 58
    reader.close()
