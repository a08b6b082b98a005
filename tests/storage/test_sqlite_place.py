"""Where a store lies: read-only, somebody else's, linked, renamed or removed while it is held."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pidurable.errors import SessionPoisonedError, StorageAccessError, StorageHeldError
from pidurable.storage import Batch, SqliteStorage, _sqlite_shape
from pidurable.storage._export import export_steps
from pidurable.storage._sqlite_check import StoreCheck
from pidurable.testing._conformance_base import LEASE_SECONDS, NOW_US, claim, conversation

NOBODY = 65534
LATER_US = NOW_US + int(LEASE_SECONDS * 1_000_000)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach, unlike those of the test runner."""
    made = Path(tempfile.mkdtemp(prefix="pidurable-place-"))
    made.chmod(0o755)
    (made / "f").mkdir()
    yield made / "f"
    (made / "f").chmod(0o700)
    shutil.rmtree(made)


def make(folder: Path, *, owner: int | None = None) -> Path:
    """A store with one conversation, of another user where this one may give it away."""
    storage = _written(folder)
    storage.release(1)
    storage.close()
    if owner is not None and os.geteuid() == 0:
        for each in (folder, *folder.iterdir()):
            os.chown(each, owner, owner)
    return folder / "s"


def make_crashed(folder: Path) -> Path:
    """The same, whose process dies with it open: its last commits are in the log alone."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _held = _written(folder)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    return folder / "s"


def _written(folder: Path) -> SqliteStorage:
    storage = SqliteStorage(folder / "s")
    storage.acquire(claim(), takeover=False)
    storage.apply(Batch(epoch=1, seq=1, next_id=9, flush=True, writes=[conversation(1)]))
    return storage


def as_somebody(call: Callable[[], Any]) -> Any:
    """What a call gives, or the text of its error, for a user who is not root."""
    if os.geteuid() != 0:
        return _tried(call)
    _sqlite_shape.schema_text()  # the other user may not read what Python would load for it
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.write(write, json.dumps(_tried(call)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def _tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def look(path: Path) -> list[int]:
    storage = SqliteStorage(path, create=False, read_only=True)
    found = [row.id for row in storage.conversations_by_owner(None)]
    storage.close()
    check = StoreCheck(str(path))
    assert check.pages(full=True) == []
    check.close()
    return found


def export(path: Path) -> dict[str, int]:
    """Export into memory, and give what its last line counts."""
    file = io.BytesIO()
    for _ in export_steps(str(path), file, overwrite=False, folder=None):
        pass
    counted: dict[str, int] = json.loads(file.getvalue().splitlines()[-1])["records"]
    return counted


def work(path: Path) -> str:
    SqliteStorage(path, create=False).close()
    return "opened"


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "said"),
    [
        (0o400, 0o700, "this user may not write to it; `open_reader` only looks"),
        (0o600, 0o500, "this user may not write to its folder"),
        (0o400, 0o500, "this user may not write to it; `open_reader` only looks"),
    ],
)
def test_a_read_only_store_is_looked_at_and_not_worked_on(
    folder: Path, file_mode: int, folder_mode: int, said: str
) -> None:
    """Without write permission: reading and exporting work, opening for work says why not."""
    path = make(folder, owner=NOBODY)
    path.chmod(file_mode)
    folder.chmod(folder_mode)

    assert as_somebody(lambda: look(path)) == [1]
    assert as_somebody(lambda: export(path)) == {"conversation": 1}
    assert said in as_somebody(lambda: work(path))
    if folder_mode == 0o500:
        assert os.listdir(folder) == ["s"]


def test_a_log_that_cannot_be_read_is_said_and_not_left_out(folder: Path) -> None:
    """A crashed store in a read-only folder: its last commits are in the log, and count."""
    path = make_crashed(folder)
    copies = folder.parent / "copies"
    copies.mkdir()
    for name in ("s", "s-wal"):
        shutil.copy(folder / name, copies / name)
        os.chown(copies / name, *([NOBODY] * 2 if os.geteuid() == 0 else [-1, -1]))
    copies.chmod(0o555)

    said = as_somebody(lambda: look(copies / "s"))

    assert "holds commits that are not in the file yet" in said
    assert "copy the store and its log into a folder of yours" in said
    assert path.exists()


def test_a_reader_of_a_still_file_notices_who_begins_to_write(folder: Path) -> None:
    """It reads the file as it lies until somebody opens it, and then as every reader does."""
    path = make(folder, owner=NOBODY)
    folder.chmod(0o555)
    path.chmod(0o644)
    ready, go = os.pipe(), os.pipe()

    def watch() -> list[Any]:
        storage = SqliteStorage(path, create=False, read_only=True)
        assert storage._still is not None or os.geteuid() == 0
        found = [storage.head().seq]
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        found.append(storage.head().seq)
        storage.close()
        return found

    if os.geteuid() != 0:
        pytest.skip("only root can write in a folder that is read-only for others")
    pid = os.fork()
    if pid == 0:
        os.read(ready[0], 1)
        os.chown(path, 0, 0)
        storage = SqliteStorage(path, create=False)
        storage.acquire(claim(), takeover=False)
        storage.apply(Batch(epoch=2, seq=7, next_id=9, flush=True, writes=[conversation(2)]))
        storage.checkpoint(truncate=True)
        for side in ("s-wal", "s-shm"):
            os.chmod(folder / side, 0o644)
        os.write(go[1], b"1")
        signal_end = os.read(ready[0], 1)
        os._exit(0 if signal_end else 1)

    assert as_somebody(watch) == [1, 7]
    os.write(ready[1], b"2")
    os.waitpid(pid, 0)
    for end in (*ready, *go):
        os.close(end)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a store away")
def test_a_store_of_another_user_is_not_worked_on(folder: Path) -> None:
    """S11: whoever owns it may change it under us; looking is allowed where its mode allows it."""
    path = make(folder)
    folder.chmod(0o777)
    path.chmod(0o666)

    assert "it belongs to user 0, and this is user 65534" in as_somebody(lambda: work(path))
    assert as_somebody(lambda: look(path)) == [1]
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(StorageAccessError, match="it belongs to user 65534"):
        work(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_a_link_of_another_user_is_not_followed(folder: Path) -> None:
    """S11: one's own links are resolved once, those that others have put there are refused."""
    path = make(folder)
    link = folder / "link"
    link.symlink_to(path)
    assert work(link) == "opened"
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)

    with pytest.raises(StorageAccessError, match=r"the link .*link belongs to user 65534"):
        work(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_read_only_file_system_is_looked_at(folder: Path) -> None:
    """Nobody can write there, so the file is read, and exported, as it lies; work is refused."""
    path = make(folder)
    place = folder.parent / "mounted"
    place.mkdir()
    mounted = subprocess.run(["mount", "--bind", folder, place], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        remount = ["mount", "-o", "remount,ro,bind", place]
        subprocess.run(remount, check=True, capture_output=True)
        assert look(place / "s") == [1]
        assert export(place / "s") == {"conversation": 1}
        with pytest.raises(StorageAccessError, match="its file system is mounted read-only"):
            work(place / "s")
    finally:
        subprocess.run(["umount", place], check=True)
    assert path.exists()


# --- renamed and removed ------------------------------------------------------------------------


def test_a_store_renamed_under_its_holder_is_refused_under_its_new_name(folder: Path) -> None:
    """The holder's commits go to the log beside the old name: a second log would mix them."""
    ready, hold = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(hold[1])
        held = SqliteStorage(folder / "s")
        held.acquire(claim(), takeover=False)
        held.checkpoint(truncate=True)
        held.apply(Batch(epoch=1, seq=1, next_id=9, flush=True, writes=[conversation(1)]))
        os.write(ready[1], b"1")
        os.read(hold[0], 1)
        os._exit(1)
    os.read(ready[0], 1)
    (folder / "s").rename(folder / "t")
    moved = SqliteStorage(folder / "t", create=False)

    for takeover in (False, True):
        with pytest.raises(StorageAccessError, match=r"renamed from .*/s while process \d+ holds"):
            moved.acquire(claim(at_us=LATER_US), takeover=takeover)
    for end in (*ready, *hold):
        os.close(end)
    os.waitpid(pid, 0)
    with pytest.raises(StorageAccessError, match=r"rename .*/s-wal to"):
        moved.acquire(claim(at_us=LATER_US), takeover=True)
    moved.close()


def test_a_store_renamed_after_a_crash_wants_its_log(folder: Path) -> None:
    """Without the log its last commits would be forgotten; with it they are there."""
    code = """
import os, sys
from pidurable.storage import Batch, SqliteStorage, _sqlite_shape
from pidurable.storage._export import export_steps
from pidurable.testing._conformance_base import claim, conversation
storage = SqliteStorage(sys.argv[1])
storage.acquire(claim(), takeover=False)
storage.checkpoint(truncate=True)
storage.apply(Batch(epoch=1, seq=1, next_id=9, flush=True, writes=[conversation(1)]))
os._exit(1)
"""
    run_python(code, str(folder / "s"))
    (folder / "s").rename(folder / "t")
    storage = SqliteStorage(folder / "t", create=False)
    with pytest.raises(StorageAccessError, match=r"rename .*/s-wal to .*/t-wal too"):
        storage.acquire(claim(), takeover=False)
    storage.close()

    (folder / "s-wal").rename(folder / "t-wal")
    storage = SqliteStorage(folder / "t", create=False)

    assert storage.acquire(claim(), takeover=False).seq == 1
    assert storage.conversation(1) is not None
    storage.close()


def run_python(code: str, *arguments: str) -> None:
    import sys

    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )


@pytest.mark.parametrize("how", ["renamed", "removed", "replaced", "folder renamed"])
def test_a_holder_whose_file_is_gone_stores_nothing_more(folder: Path, how: str) -> None:
    """What it acknowledged would be in a file without a name, or in a log that nobody reads."""
    path = make_crashed(folder)
    storage = SqliteStorage(path)
    storage.acquire(claim(holder_id="second"), takeover=True)
    storage.apply(Batch(epoch=2, seq=2, next_id=9, flush=True, writes=[conversation(2)]))
    {
        "renamed": lambda: path.rename(folder / "t"),
        "removed": path.unlink,
        "replaced": lambda: shutil.copy(path, folder / "c").rename(path),
        "folder renamed": lambda: folder.rename(folder.with_name("g")),
    }[how]()

    late = Batch(epoch=2, seq=3, next_id=9, flush=True, writes=[conversation(3)])
    for call in (lambda: storage.apply(late), lambda: storage.heartbeat(2, LATER_US)):
        with pytest.raises(SessionPoisonedError, match="moved, removed or replaced"):
            call()
    storage.close()
    if how == "folder renamed":
        folder.with_name("g").rename(folder)
        again = SqliteStorage(path)
        assert [row.id for row in again.conversations_by_owner(None)] == [1, 2]
        again.close()


def test_a_forked_child_of_a_dead_holder_delays_its_successor_by_a_lease(folder: Path) -> None:
    """It has the lock too, so nobody can tell at once that the holder is dead; the lease can."""
    done = os.pipe()
    pid = os.fork()
    if pid == 0:
        storage = SqliteStorage(folder / "s")
        storage.acquire(claim(), takeover=False)
        if os.fork() == 0:
            os.close(done[1])
            os.read(done[0], 1)  # until the test has ended
        os._exit(0)
    os.waitpid(pid, 0)
    storage = SqliteStorage(folder / "s")

    with pytest.raises(StorageHeldError):
        storage.acquire(claim(at_us=LATER_US - 1), takeover=False)
    assert storage.acquire(claim(at_us=LATER_US), takeover=False).epoch == 2

    storage.release(2)
    storage.close()
    for end in done:
        os.close(end)
