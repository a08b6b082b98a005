"""A store whose file was being brought up to its log when the power failed is opened as ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import apsw
import pytest

from pidurable.errors import NotAStoreError
from pidurable.storage import Batch, SqliteStorage
from pidurable.testing._conformance_base import claim, conversation, entry, ids

PAGE = 4_096
ENTRIES = 60


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, bytes]:
    """The file before a checkpoint, its log, and the file after it."""
    path = tmp_path_factory.mktemp("store") / "s.sqlite"
    storage = SqliteStorage(path)
    head = storage.acquire(claim(), takeover=False)
    storage.checkpoint(truncate=True)
    before = path.read_bytes()
    writes = [conversation(1), *(entry(id, messages="m" * 900) for id in range(2, ENTRIES + 2))]
    storage.apply(Batch(epoch=head.epoch, seq=1, next_id=99, flush=True, writes=writes))
    log = Path(f"{path}-wal").read_bytes()
    storage.checkpoint()
    after = path.read_bytes()
    storage.close()
    assert len(after) > len(before)
    return before, log, after


def put(folder: Path, file: bytes, log: bytes) -> Path:
    path = folder / "s.sqlite"
    path.write_bytes(file)
    Path(f"{path}-wal").write_bytes(log)
    return path


@pytest.mark.parametrize("how", ["first pages", "last pages", "page 1 alone", "garbled page 1"])
def test_a_file_that_is_neither_old_nor_new_is_read_with_its_log(
    cut: tuple[bytes, bytes, bytes], tmp_path: Path, how: str
) -> None:
    """Some pages are new and some are old, and the index of the log is gone: nothing is lost."""
    # C075
    before, log, after = cut
    old = before + bytes(len(after) - len(before))
    pages = len(after) // PAGE
    files = {
        "first pages": [after[: n * PAGE] + before[n * PAGE :] for n in range(1, pages)],
        "last pages": [old[: n * PAGE] + after[n * PAGE :] for n in range(1, pages)],
        "page 1 alone": [after[:PAGE] + before[PAGE:]],
        "garbled page 1": [before[:n] + b"?" * 40 + before[n + 40 :] for n in (0, 20, 40, 60, 90)],
    }
    for number, file in enumerate(files[how]):
        folder = tmp_path / str(number)
        folder.mkdir()
        storage = SqliteStorage(put(folder, file, log), create=False)
        found = storage.head().seq, ids(storage.entries(1))
        storage.close()

        assert found == (1, list(range(2, ENTRIES + 2)))


@pytest.mark.parametrize("spoil", [False, True])
def test_nothing_is_made_beside_the_log_of_somebody_else(tmp_path: Path, spoil: bool) -> None:
    """A database of another application with a log, whole or damaged, is left as it was."""
    source = tmp_path / "source"
    connection = apsw.Connection(str(source))
    connection.execute("pragma journal_mode = wal")
    connection.execute("create table theirs (a)")
    connection.execute("insert into theirs values (1)")
    there = tmp_path / "there"
    there.mkdir()
    path = there / "s.sqlite"
    for suffix in ("", "-wal"):
        shutil.copy(f"{source}{suffix}", f"{path}{suffix}")
    connection.close()
    if spoil:
        path.write_bytes(b"?" * 100 + path.read_bytes()[100:])
    before = {each.name: each.read_bytes() for each in there.iterdir()}

    with pytest.raises(NotAStoreError, match="another application"):
        SqliteStorage(path)

    assert {each.name: each.read_bytes() for each in there.iterdir()} == before
