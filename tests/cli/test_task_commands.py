"""Looking after tasks from the command line: explain, signal, retry and resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import apsw

from pidurable.storage import SqliteStorage, TaskRow


def rows(store: Path) -> dict[int, TaskRow]:
    storage = SqliteStorage(store, create=False, read_only=True)
    try:
        return {row.id: row for row in storage.tasks()}
    finally:
        storage.close()


def set_blocked(store: Path, task: int, reason: str) -> None:
    connection = apsw.Connection(str(store))
    connection.execute("update tasks set blocked = ? where id = ?", (reason, task))
    connection.close()


def unread(store: Path, task: int) -> list[tuple[str, str]]:
    storage = SqliteStorage(store, create=False, read_only=True)
    try:
        return [(row.name, row.payload) for row in storage.signals(task)]
    finally:
        storage.close()


def test_explain_names_the_task_that_decides(
    command: Callable[..., object], known_store: Path
) -> None:
    """With `-o ids` it feeds the next command; JSON has the fields and the line."""
    deciding = command("task", "explain", "10", "21", "-o", "ids").out
    shown = json.loads(command("task", "explain", "-", "-o", "json", stdin=deciding).out)
    one = json.loads(command("task", "explain", "10", "-o", "json").out)

    assert deciding == "12\n21\n"
    assert [each["code"] for each in shown] == ["not_started", "missing_definition"]
    assert (one["path"], one["status"]) == ([12], "waiting")
    assert one["line"].startswith("task 10 (pi.generation) waiting: waits for 1 of 2 ")


def test_a_signal_is_stored_once_and_nothing_runs(
    command: Callable[..., object], known_store: Path
) -> None:
    """A key makes it one signal; no task is started by sending it."""
    before = rows(known_store)
    for _ in range(2):
        found = command("task", "signal", "10", "approve", '{"by": "me"}', "--key", "k1")
        assert (found.code, found.out) == (0, "task 10 has the signal approve\n")
        assert "`pidurable resume` goes on" in found.err
    after = rows(known_store)

    assert unread(known_store, 10) == [("approve", '{"by":"me"}')]
    assert {id: row.invocations for id, row in after.items()} == {
        id: row.invocations for id, row in before.items()
    }


def test_signals_to_several_are_stored_for_all_or_for_none(
    command: Callable[..., object], known_store: Path
) -> None:
    """One that has ended among them refuses the whole; ids come from standard input."""
    refused = command("task", "signal", "-", "go", stdin="10\n3\n12\n")
    nothing = unread(known_store, 10)
    sent = command("task", "signal", "-", "go", "-o", "json", stdin="10 12")

    assert (refused.code, nothing) == (1, [])
    assert "task 3 has ended (completed)" in refused.err
    assert json.loads(sent.out) == [{"task": 10, "signal": "go"}, {"task": 12, "signal": "go"}]
    assert unread(known_store, 12) == [("go", "null")]


def test_retry_lifts_any_reason_and_leaves_the_others_alone(
    command: Callable[..., object], known_store: Path
) -> None:
    """What is blocked may run again; what is not is named, and that is no failure."""
    before = rows(known_store)
    found = command("task", "retry", "21", "10", "3")
    after = rows(known_store)
    again = command("task", "retry", "21", "-o", "ids")

    assert (found.code, again.code) == (0, 0)
    assert found.out == "task 21 was blocked (missing_definition) and may run again\n"
    assert "task 10 is not blocked (waiting); left alone" in found.err
    assert "task 3 is not blocked (completed); left alone" in found.err
    assert (before[21].blocked, after[21].blocked) == ("missing_definition", None)
    assert again.out == ""
    assert after[21].invocations == before[21].invocations


def test_resume_lifts_an_interruption_and_no_other_reason(
    command: Callable[..., object], known_store: Path
) -> None:
    """`task resume` is for what a restart interrupted; a crash loop needs a retry."""
    set_blocked(known_store, 10, "interrupted")
    set_blocked(known_store, 21, "crash_loop")

    found = command("task", "resume", "10", "21", "-o", "json")

    assert found.code == 0
    assert json.loads(found.out) == [{"task": 10, "was": "interrupted"}]
    assert "task 21 is not interrupted (blocked (crash_loop)); left alone" in found.err
    assert {id: rows(known_store)[id].blocked for id in (10, 21)} == {10: None, 21: "crash_loop"}


def test_an_abort_that_was_asked_for_earlier_does_not_run(
    command: Callable[..., object], known_store: Path
) -> None:
    """Sending a signal starts no abort handler, and settles nothing that was never started."""
    connection = apsw.Connection(str(known_store))
    connection.execute(
        "update tasks set abort_us = 1, abort_reason = 'user', blocked = null, started_us = null "
        "where id = 21"
    )
    connection.close()

    assert command("task", "signal", "10", "go").code == 0

    assert rows(known_store)[21].outcome_status is None


def test_a_fork_is_made_once_and_nothing_runs(
    command: Callable[..., object], known_store: Path
) -> None:
    """It shares the history up to the entry; the same key gives the same fork; ids feed a log."""
    before = rows(known_store)
    made = command("conversation", "fork", "1", "--at", "6", "--key", "k", "-o", "json")
    again = command("conversation", "fork", "1", "--key", "k", "-o", "ids")
    newest = command("conversation", "fork", "1")
    below = command("conversation", "fork", again.out.strip(), "--at", "4", "-o", "ids")
    empty = command("conversation", "fork", "30")
    found = json.loads(made.out)

    assert found["parent"] == 1
    assert found["entry"] == 6
    assert again.out == f"{found['conversation']}\n"
    assert newest.out.endswith(", fork of 1 at entry 9\n")
    assert empty.out.endswith(", fork of 30\n")
    assert command("conversation", "log", again.out.strip(), "-o", "ids").out.split() == [
        "2",
        "4",
        "6",
    ]
    assert command("conversation", "log", below.out.strip(), "-o", "ids").out.split() == ["2", "4"]
    assert {id: row.invocations for id, row in rows(known_store).items()} == {
        id: row.invocations for id, row in before.items()
    }
