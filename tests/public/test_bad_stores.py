"""Bad stores, disks and command lines: the right error and exit code, and nothing half done."""

# C076, C078: newer and damaged stores are refused and left alone. C005: a refused write loses
# nothing that was acknowledged.

from __future__ import annotations

import io
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_payloads import BAD_TEXTS, EMPTY_TEXTS, ODD_TEXTS
from one_application import build_the_application_once

from pidurable.cli import main
from pidurable.storage import SqliteStorage

Command = Callable[..., tuple[int, str, str]]

SCRIPT = """
- calls: [{name: no_such_tool}, {name: read, arguments: "not json"}]
- done
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command line in this process, in an empty folder; no traceback ever shows."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    build_the_application_once(monkeypatch)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    Path("model.yaml").write_text(SCRIPT, encoding="utf-8")

    def run(*argv: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(""))
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = main(list(argv))
        said = err.getvalue()
        said.encode(errors="backslashreplace")
        assert "Traceback" not in said
        assert "internal error" not in said
        return code, out.getvalue(), said

    return run


# --- stores -------------------------------------------------------------------------------------


def a_text(path: Path) -> None:
    path.write_text("this is a text, and was one before\n" * 100)


def a_folder(path: Path) -> None:
    path.mkdir()


def another_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("create table theirs (id)")
    connection.commit()
    connection.close()


def a_newer_store(path: Path) -> None:
    a_store(path)
    connection = sqlite3.connect(path)
    connection.execute("pragma user_version = 999")
    connection.commit()
    connection.close()


def a_cut_store(path: Path) -> None:
    a_store(path)
    os.truncate(path, 5_000)


def a_store_with_a_garbled_page(path: Path) -> None:
    a_store(path)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * 4096 * 3)


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere" / "at" / "all")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_store(path: Path) -> None:
    SqliteStorage(path).close()


BAD_STORES = [
    (a_text, "is not a pidurable store"),
    (a_folder, "folder|directory"),
    (another_database, "is not a pidurable store"),
    (a_newer_store, "999"),
    (a_cut_store, "damaged|corrupt|malformed"),
    (a_store_with_a_garbled_page, "damaged|corrupt|malformed"),
    (a_dangling_link, "cannot be used|no store|no such"),
    (a_fifo, "cannot be used|is not|no regular file"),
]

COMMANDS = [
    ("run", "hello", "--script", "model.yaml"),
    ("resume",),
    ("task", "list"),
    ("task", "tree"),
    ("task", "show", "5"),
    ("task", "abort", "5", "--yes"),
    ("conversation", "log"),
]


def content(path: Path) -> object:
    if path.is_dir():
        return sorted(os.listdir(path))
    return path.read_bytes() if path.is_file() else str(path.lstat().st_ino)


@pytest.mark.parametrize(
    ("make", "words"), BAD_STORES, ids=[make.__name__ for make, _ in BAD_STORES]
)
def test_a_bad_store_is_named_and_left_as_it_is(
    command: Command, tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    """Every command says what is wrong with it, by its path, and changes no byte."""
    store = tmp_path / "store.sqlite"
    make(store)
    before = content(store)

    for argv in COMMANDS:
        code, out, said = command(*argv, "--store", str(store))

        assert code in (1, 4), (argv, said)
        assert out == ""
        assert "store.sqlite" in said or "nowhere" in said
        assert re.search(words, said), (argv, said)
        assert content(store) == before, argv
    assert [n for n in os.listdir(tmp_path) if "lock" in n or n == "nowhere"] == []


HOLD = """
import sys, trio
from pidurable import open_harness

async def main():
    async with open_harness(sys.argv[1]) as harness:
        await harness.root()
        print("held", flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)

trio.run(main)
"""


def test_a_held_store_is_looked_at_and_worked_on_by_its_holder_alone(
    command: Command, tmp_path: Path
) -> None:
    """Looking works, input goes to the holder and ends as its work does, driving it all is 5."""
    store = tmp_path / "held.sqlite"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        code, _, said = command("run", "hello", "--script", "model.yaml", "--store", str(store))
        # The model of the command line is not asked; the holder has none.
        assert (code, f"process {holder.pid}" in said, "no_model" in said) == (1, True, True), said
        code, _, said = command("resume", "--store", str(store))
        assert (code, f"process {holder.pid}" in said) == (5, True), said
        for argv in (("task", "list"), ("task", "tree"), ("conversation", "log")):
            assert command(*argv, "--store", str(store))[0] == 0
    finally:
        holder.stdin.close()
        holder.wait(timeout=60)
        holder.stdout.close()


# --- disks --------------------------------------------------------------------------------------

FILL = """
import json, pathlib, resource, sys, trio
from pidurable import Settings, open_harness
from pidurable.errors import PidurableError

path, limit = sys.argv[1], int(sys.argv[2])

async def main():
    settings = Settings(storage_retry_seconds=0.0)
    acknowledged, errors = [], []
    async with open_harness(path, settings=settings) as harness:
        root = await harness.root()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        for number in range(100):
            try:
                async with harness.commit() as tx:
                    tx.append(root.id, {"number": number, "text": "x" * 20_000}, kind="fill")
                    tx.append(root.id, {"number": number, "second": True}, kind="fill")
                acknowledged.append(number)
            except PidurableError as error:
                errors.append(type(error).__name__)
                break
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        ballast = pathlib.Path(path).with_name("ballast")
        ballast.unlink(missing_ok=True)
        try:
            async with harness.commit() as tx:
                tx.append(root.id, {"number": -1}, kind="fill")
            acknowledged.append(-1)
        except PidurableError as error:
            errors.append(type(error).__name__)
    print(json.dumps([acknowledged, errors]))

trio.run(main)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1.5 MB with 0.5 MB of ballast; only root can mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(disk)],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("this user cannot mount a small disk")
    try:
        (disk / "ballast").write_bytes(b"x" * 500_000)
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_refuses_the_commit_and_work_goes_on_once_there_is_room(
    small_disk: Path,
) -> None:
    """C005: the refused commit is stored in no part, and the next one is, in the same session."""
    assert fill(small_disk / "full.sqlite", 0) == ["StorageRefusedError"]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [300_000, 1_000_000])
def test_a_file_that_may_not_grow_loses_nothing_that_was_acknowledged(
    tmp_path: Path, limit: int, slow_run: bool
) -> None:
    """An error in the middle of a write is uncertain: the session ends, the store is whole."""
    if limit > 300_000 and not slow_run:
        pytest.skip("one limit is enough for every day; run both with -m slow")
    errors = fill(tmp_path / "full.sqlite", limit)

    assert errors[0] in ("StorageRefusedError", "SessionPoisonedError")


def fill(store: Path, limit: int) -> list[str]:
    """Commit until the disk refuses, then make room and commit again; return the errors.

    What is in the store afterwards is exactly what was acknowledged, each commit whole.
    """
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(store), str(limit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    acknowledged, errors = json.loads(done.stdout)
    connection = sqlite3.connect(store)
    try:
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
        rows = connection.execute("select data from entries where kind = 'fill' order by id")
        stored = [json.loads(data) for (data,) in rows]
    finally:
        connection.close()
    first = [each["number"] for each in stored if "second" not in each]
    second = [each["number"] for each in stored if "second" in each]
    assert first == acknowledged
    assert second == [number for number in acknowledged if number >= 0]
    assert acknowledged
    assert len(acknowledged) < 100
    if errors == ["StorageRefusedError"]:
        assert acknowledged[-1] == -1
    return list(errors)


# --- command lines ------------------------------------------------------------------------------

OPTIONS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "prompt": lambda v: ("run", "--script", "model.yaml", "--", v),
    "request-id": lambda v: ("run", "x", "--script", "model.yaml", f"--request-id={v}"),
    "store": lambda v: ("task", "list", f"--store={v}"),
    "model": lambda v: ("run", "x", f"--model={v}"),
    "script": lambda v: ("run", "x", f"--script={v}"),
    "cwd": lambda v: ("run", "x", "--script", "model.yaml", f"--cwd={v}"),
    "extension": lambda v: ("run", "x", "--script", "model.yaml", f"--extension={v}"),
    "output": lambda v: ("run", "x", "--script", "model.yaml", f"--output={v}"),
    "timeout": lambda v: ("run", "x", "--script", "model.yaml", f"--timeout={v}"),
    "reason": lambda v: ("task", "abort", "5", "--yes", f"--reason={v}"),
    "task": lambda v: ("task", "show", v),
    "root": lambda v: ("task", "tree", v),
    "conversation": lambda v: ("conversation", "log", v),
    "kind": lambda v: ("task", "list", f"--kind={v}"),
    "status": lambda v: ("task", "list", f"--status={v}"),
    "limit": lambda v: ("task", "list", f"--limit={v}"),
    "code": lambda v: ("explain", v),
    "command": lambda v: (v,),
}


SHOWN = ("bidi", "line separators", "ansi", "osc 52", "html", "format", "path upwards")
WORDS = [*BAD_TEXTS, *EMPTY_TEXTS, *(each for each in ODD_TEXTS if each.name in SHOWN)]


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_odd_texts_on_the_command_line_end_with_a_message(
    command: Command, option: str, some: Callable[..., list[Any]]
) -> None:
    """Whatever a word of the command line holds, there is an exit code of ours and no crash."""
    assert command("run", "first", "--script", "model.yaml")[0] == 0
    wrong: list[str] = []
    for payload in some(WORDS, of=6):
        try:
            code, _, said = command(*OPTIONS[option](str.__str__(payload.make())))
        except Exception as error:
            wrong.append(f"{payload.name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if code not in (0, 1, 2, 4) or (code and not said.strip()):
            wrong.append(f"{payload.name}: exit {code}, {said[:100]!r}")
        if len(said) > 20_000 or any(c in said for c in "\0\x1b\x9b\u202e"):
            wrong.append(f"{payload.name}: shows {said[:60]!r}, {len(said)} characters")

    assert wrong == []
    assert command("task", "list")[0] == 0


NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "1e999",
    "1e400",
    "9" * 5_000,
    "0x10",
    "1_0",
    " 1 ",
    "\u0663",
]


@pytest.mark.parametrize("option", ["--timeout", "--limit"])
def test_numbers_that_are_none_are_refused_or_counted(command: Command, option: str) -> None:
    """C084: a limit that is not a number is refused with its name, and never taken for none."""
    assert command("run", "first", "--script", "model.yaml")[0] == 0
    words = ("resume", "--plan") if option == "--timeout" else ("task", "list")
    for number in NUMBERS:
        code, _, said = command(*words, f"{option}={number}")

        if number.strip() in ("1", "1_0", "\u0663", "0x10"):
            assert code in (0, 2), number
        else:
            assert code == 2, (number, said)
            assert option.strip("-") in said.lower(), number
