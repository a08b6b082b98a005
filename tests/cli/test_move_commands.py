"""`pidurable export` and `import`: what they say, what they refuse, and their exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pidurable.cli import main

Command = Callable[..., Any]


def test_a_session_is_exported_moved_and_exported_again_with_the_same_bytes(
    command: Command, known_store: Path
) -> None:
    """Both say what they did on stdout, and what it means for the original on stderr."""
    exported = command("export", "session.jsonl")
    moved = command("import", "session.jsonl", "--as", "move", "--store", "moved.sqlite")
    again = command("export", "again.jsonl", "-s", "moved.sqlite", "-o", "json")

    assert (exported.code, moved.code, again.code) == (0, 0, 0)
    assert exported.out.startswith("exported session ")
    assert " at commit 9 to " in exported.out
    assert exported.err == ""
    assert moved.out.startswith("imported session ")
    assert "never work on the original again" in moved.err
    assert "`pidurable resume --store moved.sqlite` goes on with 4 tasks" in moved.err
    assert Path("again.jsonl").read_bytes() == Path("session.jsonl").read_bytes()
    report = json.loads(again.out)
    assert report["records"]["conversation"] == 2
    assert report["size_bytes"] == os.path.getsize("again.jsonl")
    assert stat.S_IMODE(os.stat("session.jsonl").st_mode) == 0o600


def test_a_copy_says_that_unfinished_work_is_done_twice(
    command: Command, known_store: Path
) -> None:
    """Its uuid is another one, which `-o ids` prints for the next command."""
    uuid = command("export", "session.jsonl", "-o", "ids").out
    copied = command("import", "session.jsonl", "--as", "copy", "-s", "a.sqlite")
    other = command("import", "session.jsonl", "--as", "copy", "-s", "b.sqlite", "-o", "ids")
    shown = command("import", "session.jsonl", "--as", "copy", "-s", "c.sqlite", "-o", "json")

    assert copied.code == other.code == 0
    assert "its effects have other keys" in copied.err
    assert "4 unfinished tasks are in both: each does them for itself" in copied.err
    assert other.out != uuid
    report = json.loads(shown.out)
    assert (report["origin"] + "\n", report["as_copy"]) == (uuid, True)
    assert "storage" not in report


def test_what_an_import_is_must_be_said(command: Command, known_store: Path) -> None:
    """The words are explained, and nothing is made."""
    command("export", "session.jsonl")
    for words in ([], ["--as", "both"]):
        found = command("import", "session.jsonl", *words, "-s", "new.sqlite")
        assert found.code == 2
        assert "never again where it was" in found.err
    assert not Path("new.sqlite").exists()


def test_nothing_is_overwritten_but_an_export_that_is_told_to_be(
    command: Command, known_store: Path
) -> None:
    """Exit code 2, and what is there stays."""
    Path("session.jsonl").write_text("mine")
    refused = command("export", "session.jsonl")
    assert (refused.code, Path("session.jsonl").read_text()) == (2, "mine")
    assert "exists already" in refused.err

    assert command("export", "session.jsonl", "--overwrite").code == 0
    onto = command("import", "session.jsonl", "--as", "move")

    assert onto.code == 2
    assert "session.sqlite exists already: name another path" in onto.err


def test_no_export_takes_the_place_of_a_store_or_of_what_is_no_file(
    command: Command, known_store: Path
) -> None:
    """Not the store itself by any of its names, not another one, no pipe and no folder."""
    before = known_store.read_bytes()
    other = Path("other.sqlite")
    other.write_bytes(before)
    Path("link").symlink_to(known_store)
    Path("folder").mkdir()
    os.mkfifo("pipe")
    wal = f"{known_store}-wal"
    found = {
        name: command("export", name, "--overwrite")
        for name in (str(known_store), "link", wal, str(other), "folder", "pipe")
    }

    assert [each.code for each in found.values()] == [2] * 6
    assert "is of the store that is exported" in found["link"].err
    assert "is a database" in found["other.sqlite"].err
    assert "is no file" in found["pipe"].err
    assert known_store.read_bytes() == other.read_bytes() == before
    assert Path("link").is_symlink()


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["export", "x"], 4, "there is no store at"),
        (["import", "x", "--as", "move"], 4, "has no export x. Name the file of an export."),
        (["import", "bad", "--as", "move"], 1, "bad, line 1, $: it is not an export: not JSON"),
        (["import", "bad", "--as", "move", "--value-mib", "0"], 2, "expected at least 1, got 0"),
        (["import", "bad", "--as", "move", "-s", "no/x"], 1, "does not exist; create it first"),
        (["export", "x", "-s", "bad"], 1, "is not a pidurable store"),
    ],
    ids=str,
)
def test_errors_have_their_exit_codes(
    command: Command, argv: list[str], code: int, says: str
) -> None:
    """Not found is 4, wrong usage 2, a bad file 1; each says what to do."""
    Path("bad").write_text("hello\n")

    found = command(*argv)

    assert found.code == code
    assert says in found.err
    assert sorted(os.listdir()) in (["bad"], [".pidurable", "bad"])


def test_the_default_store_is_made_in_a_private_folder(command: Command, known_store: Path) -> None:
    """Also where there was no folder yet."""
    command("export", "session.jsonl")
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")

    assert command("import", "../session.jsonl", "--as", "move").code == 0
    assert stat.S_IMODE(os.stat(".pidurable").st_mode) == 0o700
    assert os.listdir(".pidurable") == ["session.sqlite"]


def test_an_export_goes_through_a_pipe_and_stays_whole(
    command: Command, known_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-` is standard output and input; what is said of it is on stderr alone."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        assert main(["export", "-"]) == 0
        data = out.buffer.getvalue()  # type: ignore[attr-defined]
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main(["import", "-", "--as", "move", "-s", "new"]) == 0
        said = out.buffer.getvalue().removeprefix(data)  # type: ignore[attr-defined]
    command("export", "again", "-s", "new")

    assert Path("again").read_bytes() == data
    assert err.getvalue().startswith("exported session ")
    assert said.startswith(b"imported session ")


def test_ctrl_c_leaves_nothing_to_resume(
    command: Command, known_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 130, and nothing of the file."""

    def press(progress: object) -> None:
        raise KeyboardInterrupt

    from pidurable.cli import _move

    monkeypatch.setattr(_move, "_progress", lambda host: contextlib.nullcontext(press))
    monkeypatch.setattr("pidurable.harness._move._PIECE_SECONDS", 0.0)

    found = command("export", "session.jsonl")

    assert (found.code, found.out) == (130, "")
    assert found.err == "pidurable: interrupted; nothing was made\n"
    assert os.listdir() == [".pidurable"]


def test_progress_is_shown_on_a_terminal_and_gone_at_the_end(
    command: Command, known_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere nothing of it is written."""
    from pidurable.cli import _move
    from pidurable.cli._host import Host

    monkeypatch.setattr(_move, "_SHOW_SECONDS", 0.0)
    monkeypatch.setattr(Host, "is_terminal", lambda self, stream: stream is self.stderr)
    monkeypatch.setattr("pidurable.harness._move._PIECE_SECONDS", 0.0)

    found = command("export", "session.jsonl")

    assert "copying" in found.err
    assert "writing" in found.err
    assert found.err.endswith("\r\x1b[K")
