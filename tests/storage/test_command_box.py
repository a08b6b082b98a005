"""The folder of commands beside a store: who may use it, and what may lie in it."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from pidurable.errors import StorageAccessError, StorageRefusedError
from pidurable.records._limits import (
    COMMAND_BYTES_MAX,
    COMMAND_PART_SECONDS,
    COMMANDS_WAITING_MAX,
)
from pidurable.storage import SqliteStorage
from pidurable.storage._command_box import (
    _LISTED_AT_ONCE,
    SETTLED_SECONDS,
    UNSEEN_LOOKS_MAX,
    FolderCommandBox,
    new_name,
)

AT_NS = 1_700_000_000_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The path of a file that stands for a store; its box never opens it."""
    path = tmp_path / "session.sqlite"
    path.write_bytes(b"store")
    return str(path)


@pytest.fixture
def box(store: str) -> FolderCommandBox:
    return FolderCommandBox(store)


@pytest.fixture
def folder(store: str) -> Path:
    return Path(f"{store}.commands")


def files(folder: Path) -> list[str]:
    return sorted(path.name.rpartition(".")[2] for path in folder.iterdir())


def put(folder: Path, data: bytes, *, name: str | None = None, id: str = "id") -> Path:
    """Lay a file into the folder, as if it had been handed in."""
    folder.mkdir(0o700, exist_ok=True)
    path = folder / (f"{new_name(id, AT_NS)}.command" if name is None else name)
    path.write_bytes(data)
    return path


def test_folder_and_files_are_for_their_owner_alone(box: FolderCommandBox, folder: Path) -> None:
    """0700 and 0600, also under a umask that would take nothing away."""
    before = os.umask(0)
    try:
        box.hand_in("id", "text")
    finally:
        os.umask(before)

    (path,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_store_that_is_only_looked_at_has_a_box_too(tmp_path: Path) -> None:
    """Handing in is the one write without ownership, so a read-only handle can do it."""
    holder = SqliteStorage(tmp_path / "s.sqlite")
    outside = SqliteStorage(tmp_path / "s.sqlite", create=False, read_only=True)
    outside.command_box.hand_in("id", "text")

    assert [each.text for each in holder.command_box.take()] == ["text"]
    holder.close()
    outside.close()


@pytest.mark.parametrize("kind", ["link", "file", "others", "stranger"])
def test_a_folder_that_cannot_be_trusted_is_refused(
    box: FolderCommandBox, folder: Path, tmp_path: Path, kind: str
) -> None:
    """A link, a file, one that others may use, one of another user: outside and by the holder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    if kind == "link":
        folder.symlink_to(elsewhere)
    elif kind == "file":
        folder.write_text("no folder")
    else:
        folder.mkdir(0o700)
        if kind == "others":
            folder.chmod(0o770)
        elif os.geteuid() == 0:
            os.chown(folder, 12_345, -1)
        else:
            pytest.skip("only root can give a folder away")
    wanted = {"link": "link", "file": "no folder", "others": "chmod 700", "stranger": "12345"}

    for call in (lambda: box.hand_in("id", "text"), box.take, lambda: box.withdraw("id")):
        with pytest.raises(StorageAccessError, match=wanted[kind]):
            call()
    assert list(elsewhere.iterdir()) == []


def test_root_hands_in_for_the_owner_of_the_store(
    store: str, box: FolderCommandBox, folder: Path
) -> None:
    """What root leaves belongs to the store's owner, whose holder could not read it otherwise."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.chown(store, 12_345, -1)
    box.hand_in("id", "text")

    (path,) = folder.iterdir()
    assert (folder.stat().st_uid, path.stat().st_uid) == (12_345, 12_345)
    assert [each.text for each in box.take()] == ["text"]


# C075
@pytest.mark.parametrize(
    ("data", "name", "problem"),
    [
        (b"\xff\xfe", None, "not UTF-8"),
        (b"x", "note.txt", "its name"),
        (b"x", "1.command", "its name"),
    ],
)
def test_what_is_no_text_of_a_command_is_named_and_stops_nothing(
    box: FolderCommandBox, folder: Path, data: bytes, name: str | None, problem: str
) -> None:
    """It is given with its problem, can be set aside, and what comes behind it is taken."""
    put(folder, data, name=name)
    box.hand_in("good", "text")
    found = box.take()
    bad = [each for each in found if each.text is None]
    for each in bad:
        assert box.set_aside(each.name).endswith(".bad")

    assert [problem in each.problem for each in bad] == [True]
    assert [each.text for each in found if each.text] == ["text"]
    assert FolderCommandBox(box._store).take()[0].text == "text"
    assert files(folder) == ["bad", "taken"]


def test_a_file_that_is_too_large_is_not_read(box: FolderCommandBox, folder: Path) -> None:
    """One byte above the limit; a sparse file costs nothing."""
    path = put(folder, b"")
    os.truncate(path, COMMAND_BYTES_MAX + 1)
    (found,) = box.take()

    assert (found.text, str(COMMAND_BYTES_MAX) in found.problem) == (None, True)


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_holds_nobody_up(box: FolderCommandBox, folder: Path, kind: str) -> None:
    """A FIFO without a writer, a link to a file elsewhere, a folder: none of them is read."""
    path = put(folder, b"")
    path.unlink()
    secret = folder.parent / "secret"
    secret.write_text("secret")
    {"fifo": os.mkfifo, "link": lambda p: p.symlink_to(secret), "folder": os.mkdir}[kind](path)
    (found,) = box.take()
    box.set_aside(found.name)

    assert found.text is None
    assert box.take() == []
    assert secret.read_text() == "secret"


def test_a_part_is_cleared_away_when_it_is_old(box: FolderCommandBox, folder: Path) -> None:
    """A writer that was killed leaves one; a writer that was stopped keeps it for an hour."""
    old = put(folder, b"ha", name="00000000000000000001-aa.part")
    young = put(folder, b"ha", name="00000000000000000002-aa.part")
    before = young.stat().st_mtime - COMMAND_PART_SECONDS - 1
    os.utime(old, (before, before))

    assert box.take() == []
    assert [path.name for path in folder.iterdir()] == [young.name]


def test_a_writer_whose_part_was_cleared_away_is_told(
    box: FolderCommandBox, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for longer than parts are kept: refused for certain, to be handed in anew."""
    flush = os.fsync

    def cleared(handle: int) -> None:
        flush(handle)
        for path in folder.glob("*.part"):
            path.unlink()

    monkeypatch.setattr(os, "fsync", cleared)
    with pytest.raises(StorageRefusedError, match="handed in"):
        box.hand_in("id", "text")
    monkeypatch.undo()

    assert box.take() == []


def test_a_full_disk_refuses_for_certain(
    box: FolderCommandBox, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left behind, and the same command may be handed in again."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageRefusedError, match="No space left"):
        box.hand_in("id", "text")
    monkeypatch.undo()

    assert list(folder.iterdir()) == []
    box.hand_in("id", "text")
    assert [each.text for each in box.take()] == ["text"]


def test_so_many_commands_may_wait_and_one_more_is_refused(
    box: FolderCommandBox, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """commands_waiting_max counts what no holder has answered; bad files are no commands."""
    monkeypatch.setattr("pidurable.storage._command_box.COMMANDS_WAITING_MAX", 3)
    put(folder, b"", name="x.bad")
    for number in range(3):
        box.hand_in(f"{number}", "text")
    with pytest.raises(StorageRefusedError, match="3 commands wait"):
        box.hand_in("4", "text")
    box.forget(box.take()[0].name)
    box.hand_in("4", "text")

    assert COMMANDS_WAITING_MAX == 10_000


def test_a_command_is_taken_or_withdrawn_and_never_both(store: str, box: FolderCommandBox) -> None:
    """Both want it at the same instant, 200 times: exactly one gets it, and the other knows."""
    outside = FolderCommandBox(store)
    ids = [f"id {number}" for number in range(200)]
    for id in ids:
        outside.hand_in(id, id)
    withdrawn: list[str] = []

    def withdraw() -> None:
        withdrawn.extend(id for id in reversed(ids) if outside.withdraw(id))

    thread = threading.Thread(target=withdraw)
    thread.start()
    taken: list[str | None] = []
    while thread.is_alive():
        taken += [each.text for each in box.take(limit=3)]
    thread.join()
    taken += [each.text for each in box.take()]

    assert sorted([*taken, *withdrawn]) == sorted(ids)


@pytest.mark.parametrize(("call", "code"), [("rename", errno.EIO), ("open", errno.EMFILE)])
def test_trouble_in_the_middle_of_a_look_costs_no_command(
    box: FolderCommandBox,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
) -> None:
    """What was taken before it is given, and the others at a later look, none as a bad one."""
    for number in range(3):
        box.hand_in(f"{number}", f"{number}")
    real, calls = getattr(os, call), []

    def fails_at_the_second(path: str, *rest: Any, **named: Any) -> Any:
        if str(path).endswith((".command", ".taken")):
            calls.append(path)
            if len(calls) >= 2:
                raise OSError(code, os.strerror(code))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, call, fails_at_the_second)
    assert [each.text for each in box.take()] == ["0"]
    with pytest.raises(StorageAccessError, match=os.strerror(code)):
        box.take()
    monkeypatch.undo()

    assert [each.text for each in box.take()] == ["1", "2"]


def test_a_command_that_is_renamed_while_it_is_looked_for_is_found(
    box: FolderCommandBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may show neither the old name nor the new one; that is not taken for its end."""
    box.hand_in("id", "text")
    box.take()
    others = [f"{new_name(f'{n}', AT_NS)}.command" for n in range(_LISTED_AT_ONCE)]
    real, lists = os.listdir, [others, others]
    monkeypatch.setattr(os, "listdir", lambda at: lists.pop() if lists else real(at))

    assert box.find("id") == "taken"
    assert box.find("another") is None


def test_a_quiet_folder_is_not_listed_at_every_look(
    box: FolderCommandBox, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has been quiet for a while a look asks for its moment alone, and then for all."""
    box.hand_in("id", "text")
    box.forget(box.take()[0].name)
    assert box.has_news()
    moment = folder.stat().st_mtime - SETTLED_SECONDS - 1
    os.utime(folder, (moment, moment))
    assert box.take() == []

    looks = [box.has_news() for _ in range(UNSEEN_LOOKS_MAX)]
    assert (any(looks[:-1]), looks[-1]) == (False, True)
    assert box.take() == []
    assert not box.has_news()
    box.hand_in("id", "text")
    assert box.has_news()


def test_what_just_came_is_never_taken_for_quiet(box: FolderCommandBox, folder: Path) -> None:
    """Two changes within one tick of the file system's clock look like one; both are found."""
    box.hand_in("1", "text")
    moment = folder.stat().st_mtime_ns
    for each in box.take():
        box.forget(each.name)
    box.take()
    box.hand_in("2", "text")
    os.utime(folder, ns=(moment, moment))

    assert box.has_news()
    assert [each.text for each in box.take()] == ["text"]
