"""What people see: help, lists, trees, sheets, transcripts and errors, held as snapshots."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import re
import stat
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
import trio

import pidurable
from pidurable.cli._explanations import explanations
from pidurable.cli._host import Host
from pidurable.harness._open import open_harness
from pidurable.records import _codes

Snapshot = Callable[[str, str], None]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["run"],
        ["resume"],
        ["doctor"],
        ["task"],
        ["task", "list"],
        ["task", "abort"],
        ["task", "explain"],
        ["task", "tree"],
        ["task", "signal"],
        ["task", "retry"],
        ["conversation", "log"],
        ["conversation", "list"],
        ["conversation", "follow"],
        ["conversation", "fork"],
        ["approval"],
        ["approval", "approve"],
        ["approval", "decide"],
        ["usage"],
    ],
    ids=lambda argv: "-".join(argv) or "pidurable",
)
def test_help_says_what_a_command_does(
    command: Callable[..., object], check_snapshot: Snapshot, argv: list[str]
) -> None:
    """Help names every option and goes to stdout."""
    found = command(*argv, "--help")

    assert found.code == 0
    check_snapshot(f"help-{'-'.join(argv) or 'pidurable'}.txt", found.out)


def test_help_is_broken_where_the_terminal_ends_and_nowhere_else(
    command: Callable[..., object],
) -> None:
    """A paragraph of help fills the lines of a terminal, however the source breaks it."""
    for argv in ([], ["run"], ["resume"], ["gc"], ["import"], ["approval", "approve"]):
        before, *_ = command(*argv, "--help").out.split("\n╭", 1)
        for paragraph in before.split("\n\n"):
            lines = paragraph.splitlines()
            for line, following in itertools.pairwise(lines):
                first = following.split(maxsplit=1)[0]

                assert len(line.rstrip()) <= 80 < len(line.rstrip()) + 1 + len(first)


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("task-list", ["task", "list"]),
        ("task-list-live", ["task", "list", "--live", "--kind", "pi.tool"]),
        ("task-tree", ["task", "tree"]),
        ("task-tree-10", ["task", "tree", "10"]),
        ("task-tree-30", ["task", "tree", "30"]),
        ("task-show", ["task", "show", "12", "10", "20", "21", "31"]),
        ("task-explain", ["task", "explain", "3", "5", "10", "12", "13", "20", "21", "31"]),
        ("conversation-list", ["conversation", "list"]),
        ("conversation-log", ["conversation", "log"]),
        ("conversation-log-full", ["conversation", "log", "1", "--full", "--limit", "3"]),
        ("resume-plan", ["resume", "--plan"]),
    ],
)
def test_a_screen_is_as_it_was(
    command: Callable[..., object],
    known_store: Path,
    check_snapshot: Snapshot,
    name: str,
    argv: list[str],
) -> None:
    """Looking at a known store shows the known screen, with nothing a terminal would obey."""
    found = command(*argv)

    assert found.code == 0
    # C063, C081
    assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", found.out + found.err) is None
    check_snapshot(f"{name}.txt", f"{found.out}--- stderr\n{found.err}")


def test_what_is_shown_on_a_narrow_terminal_is_cut_to_it(
    command: Callable[..., object], known_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line of a table or a tree is wider than the terminal; a pipe gets all of it."""
    looks = (["task", "list"], ["task", "tree"], ["conversation", "list"])
    whole = [command(*argv).out.splitlines() for argv in looks]
    monkeypatch.setattr(Host, "width", lambda self, stream: 32)

    for argv, lines in zip(looks, whole, strict=True):
        shown = command(*argv).out.splitlines()

        assert len(shown) == len(lines)
        assert max(map(len, shown)) <= 32 < max(map(len, lines))
        assert "…" in "".join(shown)


def test_prose_on_a_narrow_terminal_is_broken_between_words(
    command: Callable[..., object], known_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors, explanations and findings say the same in more lines; commands stay in one piece."""
    looks = (["explain", "crash_loop"], ["task", "show", "99"], ["doctor"])
    whole = [command(*argv) for argv in looks]
    monkeypatch.setattr(Host, "width", lambda self, stream: 40)

    for argv, before in zip(looks, whole, strict=True):
        found = command(*argv)
        text = found.out + found.err

        assert text.split() == (before.out + before.err).split()
        assert text.count("\n") > (before.out + before.err).count("\n")
        assert re.findall("`pid[^`\n]*`", text) == re.findall("`pid[^`]*`", text)


def test_a_line_on_a_terminal_is_as_wide_as_that() -> None:
    """The host knows the width of a terminal, and that a pipe has none."""
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 61, 0, 0))
    pipe = io.StringIO()
    with open(theirs, "w", encoding="utf-8") as terminal, open(ours, "rb", buffering=0):
        host = Host(pipe, terminal, pipe, {})

        assert host.width(terminal) == 61
        assert host.width(pipe) is None


def test_the_way_out_names_the_store_that_was_looked_at(
    command: Callable[..., object], known_store: Path
) -> None:
    """Where a store was named, the commands that messages name work on that one, as typed."""
    elsewhere = str(known_store.rename(known_store.with_name("my other.sqlite")))
    option = f"--store '{elsewhere}'`"

    unknown = command("task", "show", "99", "--store", elsewhere)
    unfinished = command("run", "more", "--store", elsewhere, "--model", "openai/x")
    blocked = command("task", "explain", "21", "--store", elsewhere)
    usage = command("task", "shwo", "--store", elsewhere)

    assert f"`pidurable task list {option}" in unknown.err
    assert f"`pidurable resume {option}" in unfinished.err
    assert f"`pidurable run --continue PROMPT {option}" in unfinished.err
    assert unfinished.code == 2
    assert "(missing_definition)" in blocked.out
    assert "`pidurable task --help`" in usage.err
    assert "--store" not in command("task", "show", "99").err.replace("--store PATH", "")


def test_json_holds_the_stored_text_as_it_is(
    command: Callable[..., object], known_store: Path
) -> None:
    """For programs nothing is cleaned: JSON carries what is stored."""
    tasks = json.loads(command("task", "list", "-o", "json").out)
    entries = json.loads(command("conversation", "log", "-o", "json").out)
    shown = json.loads(command("task", "show", "12", "-o", "json").out)
    tree = json.loads(command("task", "tree", "-o", "json").out)

    assert [task["id"] for task in tasks] == [3, 5, 10, 12, 13, 20, 21, 31]
    assert shown["input"]["arguments"]["command"] == "echo \x1b]0;t\x07"
    assert shown["status"] == "running"
    call = entries[2]["messages"][0]["blocks"][2]
    assert call == {
        "type": "tool_call",
        "name": "bash",
        "arguments": {"command": "echo \x1b[1A\u202e"},
        "opaque": None,
    }
    assert {row["depth"] for row in tree} == {0, 1, 2, 3, 4}


def test_ids_feed_the_next_command(command: Callable[..., object], known_store: Path) -> None:
    """What `-o ids` prints, `-` reads."""
    ids = command("task", "list", "--status", "terminal", "-o", "ids").out
    shown = command("task", "show", "-", "-o", "ids", stdin=ids)

    assert shown.out == ids == "3\n5\n13\n20\n"
    assert command("conversation", "log", "-o", "ids").out.split() == ["2", "4", "6", "7", "8", "9"]


def test_a_limit_beyond_all_there_can_be_is_no_limit(
    command: Callable[..., object], known_store: Path
) -> None:
    """More than a store could count shows all there is, and no error of ours."""
    for argv in (["task", "list"], ["conversation", "list"], ["conversation", "log"]):
        all_of_it = command(*argv)
        found = command(*argv, "--limit", "9" * 30)

        assert (found.code, found.out) == (0, all_of_it.out)


# C078
def test_looking_changes_nothing(command: Callable[..., object], known_store: Path) -> None:
    """Every looking command leaves the folder byte for byte as it was."""
    before = {path.name: path.read_bytes() for path in known_store.parent.iterdir()}

    for argv in (["task", "tree"], ["task", "list"], ["conversation", "log"], ["resume", "--plan"]):
        assert command(*argv).code == 0

    after = {path.name: path.read_bytes() for path in known_store.parent.iterdir()}
    kept = {name: data for name, data in after.items() if not name.endswith(("-wal", "-shm"))}
    assert kept == {n: d for n, d in before.items() if not n.endswith(("-wal", "-shm"))}


ERRORS = [
    ("unknown-command", ["task", "frobnicate"], 2),
    ("unknown-option", ["run", "x", "--modell", "a/b"], 2),
    ("unknown-id", ["task", "show", "99"], 4),
    ("huge-id", ["task", "show", "9" * 30], 4),
    ("not-an-id", ["task", "show", "seven"], 2),
    ("no-id", ["task", "show"], 2),
    ("unknown-root", ["task", "tree", "99"], 4),
    ("unknown-conversation", ["conversation", "log", "99"], 4),
    ("task-is-no-conversation", ["conversation", "log", "3"], 4),
    ("bad-status", ["task", "list", "--status", "dead"], 2),
    ("bad-kind", ["task", "list", "--kind", "\udcff"], 2),
    ("huge-conversation", ["task", "list", "--conversation", "9" * 30], 4),
    ("prompt-not-text", ["run", "a\udcff", "--model", "openai/gpt-5"], 2),
    ("store-is-a-folder", ["task", "list", "--store", "."], 1),
    ("no-folder", ["run", "x", "--model", "openai/gpt-5", "--store", "no/folder/s"], 1),
    ("bad-reason", ["task", "abort", "10", "--yes", "--reason", "x" * 201], 2),
    ("bad-limit", ["task", "list", "--limit", "0"], 2),
    ("bad-log-limit", ["conversation", "log", "--limit", "-1"], 2),
    ("bad-output", ["task", "list", "-o", "xml"], 2),
    ("abort-needs-yes", ["task", "abort", "10"], 2),
    ("explain-unknown-id", ["task", "explain", "99"], 4),
    ("signal-unknown-id", ["task", "signal", "99", "go"], 4),
    ("signal-ended", ["task", "signal", "3", "go"], 1),
    ("signal-not-json", ["task", "signal", "10", "go", "yes"], 2),
    ("signal-not-strict", ["task", "signal", "10", "go", "[NaN]"], 2),
    ("signal-no-name", ["task", "signal", "10", ""], 2),
    ("retry-no-id", ["task", "retry"], 2),
    ("retry-unknown-id", ["task", "retry", "21", "99"], 4),
    ("fork-unknown-id", ["conversation", "fork", "99"], 4),
    ("fork-unknown-entry", ["conversation", "fork", "1", "--at", "3"], 4),
    ("fork-key-taken", ["conversation", "fork", "1", "--key", "root"], 2),
    ("unknown-code", ["explain", "interupted"], 4),
    ("no-model", ["run", "do it", "--store", "new.sqlite"], 2),
    ("unknown-provider", ["run", "do it", "--model", "opanai/gpt"], 2),
    ("unknown-script-model", ["run", "do it", "--model", "scripted/none"], 2),
    ("empty-prompt", ["run", "  "], 2),
    ("unfinished-work", ["run", "more", "--model", "openai/gpt-5"], 2),
    ("bad-extension", ["resume", "-e", "./nothing.py"], 2),
]


@pytest.mark.parametrize(("name", "argv", "code"), ERRORS, ids=[name for name, _, _ in ERRORS])
def test_a_mistake_is_answered_with_what_to_do(
    command: Callable[..., object],
    known_store: Path,
    check_snapshot: Snapshot,
    name: str,
    argv: list[str],
    code: int,
) -> None:
    """Every mistake says what happened and what to do next, on stderr, with its exit code."""
    found = command(*argv)

    assert (found.code, found.out) == (code, "")
    check_snapshot(f"error-{name}.txt", found.err.replace(str(known_store.parent.parent), "DIR"))


def test_explain_knows_every_meaning_of_a_code(command: Callable[..., object]) -> None:
    """A code that is used in two places is explained for both."""
    found = command("explain", "interrupted")

    assert found.code == 0
    assert "of a blocked task" in found.out
    assert "of a tool call" in found.out


def test_explain_has_a_text_for_every_reason_code() -> None:
    """Each meaning of each code, of whatever table of them, is among what `explain` says."""
    tables = [table for name, table in vars(_codes).items() if name.isupper()]

    assert len(tables) > 5
    for table in tables:
        for code, text in table.items():
            assert any(line.endswith(f": {text}") for line in explanations(code))


def test_explain_says_a_rule_of_values(command: Callable[..., object]) -> None:
    """What a refusal is about can be looked up by the name that the manual gives it."""
    found = command("explain", "integer_range")

    assert found.code == 0
    assert "from -2**63 to 2**64-1" in found.out
    assert "Did you mean integer_range?" in command("explain", "integer_rang").err
    assert "Rules of values are: json_types, " in command("explain", "zzz").err


def test_without_the_extra_the_message_names_it(
    command: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where cyclopts is not installed, the command line says what to install: exit 2."""
    monkeypatch.delitem(sys.modules, "pidurable.cli._app", raising=False)
    monkeypatch.setitem(sys.modules, "cyclopts", None)

    found = command("task", "list")

    assert found.code == 2
    assert "pip install 'pidurable[cli]'" in found.err


def test_ctrl_c_while_the_program_loads_shows_no_traceback(
    command: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted during its imports, a command says so in one line: exit 130."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pidurable.cli._host.Host.of_process", interrupted)

    found = command("task", "list")

    assert (found.code, found.out) == (130, "")
    assert found.err == "pidurable: interrupted before anything began\n"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["task", "list"], ["task", "list", "--help"]])
def test_a_reader_that_goes_away_is_no_error(
    command: Callable[..., object], known_store: Path, words: list[str], slow_run: bool
) -> None:
    """`| head` ends the command quietly, without a traceback; help too."""
    if "--help" in words and not slow_run:
        pytest.skip("one process is enough for every day; run both with -m slow")
    argv = [sys.executable, "-m", "pidurable.cli", *words, "--store", str(known_store)]
    reading, writing = os.pipe()
    os.close(reading)
    environ = {**os.environ, "PYTHONPATH": str(Path(pidurable.__file__).parent.parent)}

    found = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, text=True, env=environ)
    os.close(writing)

    assert (found.returncode, found.stderr) == (1, "")


def test_code_of_an_extension_cannot_choose_the_exit_code(
    command: Callable[..., object], tmp_path: Path
) -> None:
    """An extension that calls sys.exit ends the command with 1 and is named as the reason."""
    (tmp_path / "leave.py").write_text("raise SystemExit(7)\n")

    found = command("run", "x", "--model", "openai/gpt-5", "-e", "./leave.py")

    assert found.code == 1
    assert "sys.exit(7)" in found.err


def test_the_version_is_printed_alone(command: Callable[..., object]) -> None:
    """`--version` prints the version and nothing else."""
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", command("--version").out)


# --- stores that cannot be used ---------------------------------------------------------------


LOOKING = (
    ["task", "list"],
    ["task", "tree"],
    ["task", "explain", "10"],
    ["conversation", "log"],
    ["resume", "--plan"],
)


# C077
@pytest.mark.parametrize("argv", [*LOOKING, ["resume"], ["task", "abort", "1", "--yes"]])
def test_a_missing_store_is_never_created_by_looking(
    command: Callable[..., object], tmp_path: Path, argv: list[str]
) -> None:
    """Where a store is expected and is not there, nothing is made up: exit 4."""
    found = command(*argv)

    assert found.code == 4
    assert "there is no store at .pidurable/session.sqlite" in found.err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_is_a_missing_store(command: Callable[..., object], tmp_path: Path) -> None:
    """What a full disk left of a creation is no store to look at, and no reason to refuse a run."""
    (tmp_path / "s.sqlite").touch()
    (tmp_path / "m.yaml").write_text("- fine\n")

    looked = command("task", "list", "--store", "s.sqlite")
    ran = command("run", "x", "--store", "s.sqlite", "--script", "m.yaml")

    assert looked.code == 4
    assert "there is no store at s.sqlite" in looked.err
    assert (ran.code, ran.out) == (0, "fine\n")


# C076, C078
@pytest.mark.parametrize("argv", LOOKING)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "is not a pidurable store"),
        ("folder", "it is a folder"),
        ("other database", "is not a pidurable store"),
        ("newer", "has schema 999, this program knows up to"),
    ],
)
def test_what_is_no_store_of_ours_is_named_and_left_alone(
    command: Callable[..., object], known_store: Path, argv: list[str], kind: str, message: str
) -> None:
    """A wrong or newer file is refused with the reason, and is byte for byte as it was."""
    path = _spoiled(known_store, kind)
    before = path.read_bytes() if path.is_file() else b""

    found = command(*argv, "--store", str(path))

    assert found.code == 1
    assert message in found.err
    assert "next:" in found.err
    assert (path.read_bytes() if path.is_file() else b"") == before


def _spoiled(store: Path, kind: str) -> Path:
    path = store.parent / "spoiled"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("dear diary\n" * 500)
    elif kind == "other database":
        connection = apsw.Connection(str(path))
        connection.execute("create table t (a)")
        connection.close()
    else:
        path.write_bytes(store.read_bytes())
        connection = apsw.Connection(str(path))
        connection.execute("pragma user_version = 999")
        connection.close()
    return path


# C078
def test_one_damaged_row_is_named_and_hides_nothing_else(
    command: Callable[..., object], known_store: Path
) -> None:
    """A row that cannot be decoded is damage with its place; other rows are still shown."""
    connection = apsw.Connection(str(known_store))
    connection.execute("update entries set messages = '[{\"role\": 3}]' where id = 6")
    connection.execute("update inputs set value = 'not json' where task = 20")
    connection.close()

    log = command("conversation", "log")
    task = command("task", "show", "20")

    assert (log.code, task.code) == (1, 1)
    assert "entry 6 cannot be decoded" in log.err
    assert "task 20 cannot be decoded" in task.err
    assert "restore a copy" in log.err
    assert command("task", "show", "12").code == 0


def test_a_store_without_read_permission_is_no_missing_store(
    command: Callable[..., object], known_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that may not be read is reported as that, and works again once it may."""
    real = os.access
    monkeypatch.setattr(
        "os.access", lambda path, mode: False if str(path) == str(known_store) else real(path, mode)
    )

    refused = command("task", "list")
    monkeypatch.undo()
    monkeypatch.chdir(known_store.parent.parent)

    assert refused.code == 1
    assert "this user may not read it" in refused.err
    assert command("task", "list").code == 0


async def test_looking_works_beside_a_holder_and_says_who_it_is(
    command: Callable[..., object], known_store: Path
) -> None:
    """While a process holds the store, looking works; what must hold it exits 5 and names it."""
    async with open_harness(known_store, create=False):

        def look() -> list[object]:
            return [
                command("task", "tree"),
                command("resume"),
                command("resume", "--plan"),
            ]

        tree, *held = await trio.to_thread.run_sync(look)

    assert tree.code == 0
    assert f"held by process {os.getpid()}" in tree.err
    for found in held:
        assert found.code == 5
        assert f"is held by process {os.getpid()}" in found.err
        assert "next:" in found.err


def test_the_default_store_is_for_its_owner_alone(
    command: Callable[..., object], tmp_path: Path
) -> None:
    """The folder is 0700 and the store 0600, whatever the umask."""
    (tmp_path / "s.yaml").write_text("- hello\n")

    assert command("run", "hi", "--script", "s.yaml").code == 0

    store = tmp_path / ".pidurable" / "session.sqlite"
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
