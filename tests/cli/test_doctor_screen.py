"""`pidurable doctor`: its screen, its JSON and its exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw


def test_a_healthy_store_exits_with_0_and_says_what_it_is(
    command: Callable[..., Any], known_store: Path
) -> None:
    """A fact a line, and nothing that a terminal would obey."""
    connection = apsw.Connection(str(known_store))
    connection.execute("update tasks set blocked = null")
    connection.close()

    found = command("doctor", "--full")

    assert found.code == 0, found.out
    lines = found.out.splitlines()
    assert lines[0] == str(known_store.resolve())
    assert [line.split()[0] for line in lines[1:9]] == [
        *("file", "checked", "session", "holder", "tasks", "size", "records", "largest")
    ]
    assert "  holder     nobody; the last one closed it" in lines
    assert "healthy: nothing to act on" in lines
    assert "to go on with: `pidurable resume --store " in found.out
    assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", found.out + found.err) is None
    assert found.err == ""


def test_findings_come_with_the_command_and_exit_with_1(
    command: Callable[..., Any], known_store: Path
) -> None:
    """Numbered, each with its way out; a hostile name is shown and not obeyed."""
    connection = apsw.Connection(str(known_store))
    connection.execute(
        "update tasks set blocked = 'interrupted', kind = ? where status < 4", ("x\x1b[2Jy",)
    )
    connection.close()
    known_store.chmod(0o640)

    found = command("doctor")

    assert found.code == 1
    assert "findings" in found.out
    assert "  1. other users may open" in found.out
    assert f"       $ chmod 600 {known_store.resolve()}" in found.out
    assert "is blocked, interrupted" in found.out
    assert "       $ pidurable task resume " in found.out
    assert "\x1b" not in found.out


def test_programs_get_json_and_ids(command: Callable[..., Any], known_store: Path) -> None:
    """The same facts by name; with ids, what is blocked."""
    connection = apsw.Connection(str(known_store))
    connection.execute("update tasks set blocked = 'crash_loop' where status < 4")
    ids = [row[0] for row in connection.execute("select id from tasks where status < 4")]
    connection.close()

    shown, listed = command("doctor", "-o", "json"), command("doctor", "-o", "ids")

    assert (shown.code, listed.code) == (1, 1)
    facts = json.loads(shown.out)
    assert facts["healthy"] is False
    assert facts["blocked_tasks"] == ids
    assert [each["task_id"] for each in facts["findings"]] == ids
    assert facts["size"]["tables"]
    assert [int(line) for line in listed.out.split()] == ids


def test_a_damaged_store_is_told_and_not_raised(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    """What `task list` refuses, the doctor looks at."""
    path = tmp_path / "s"
    path.write_bytes(b"SQLite format 3\x00" + b"\xff" * 8_000)
    path.chmod(0o600)

    found = command("doctor", "--store", str(path))

    assert found.code == 1
    assert "cannot be read" in found.out
    assert "restore a copy" in found.out


def test_a_missing_store_exits_with_4(command: Callable[..., Any]) -> None:
    """There is nothing to examine."""
    found = command("doctor", "--store", "nowhere")

    assert found.code == 4
    assert "there is no store at nowhere" in found.err
