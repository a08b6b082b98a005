"""`pidurable gc`: what it says, what it asks, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pidurable.cli._errors import UsageError
from pidurable.cli._gc import parse_age
from pidurable.records import _codec, _json
from pidurable.records._tasks import OutcomeRecord, Status
from pidurable.storage import (
    Batch,
    ConversationRow,
    EntryRow,
    HolderClaim,
    Op,
    SqliteStorage,
    TaskRow,
)

LONG_AGO_US = 1_500_000_000_000_000
OUTCOME = _json.dumps(_codec.encode_outcome(OutcomeRecord(status="completed", result=None)))


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """A tree that ended in 2017, and another in which something is still live."""
    store = tmp_path / ".pidurable" / "session.sqlite"
    store.parent.mkdir(mode=0o700)
    storage = SqliteStorage(store)
    ended, live = int(Status.TERMINAL), int(Status.PENDING)

    def task(id: int, conversation: int, owner: int | None, status: int) -> TaskRow:
        ended_us = LONG_AGO_US if status == ended else None
        outcome = "completed" if status == ended else None
        return TaskRow(
            *(id, conversation, "old.task", 1, owner, None, 0, None, None, LONG_AGO_US),
            *(status, LONG_AGO_US, ended_us, None, None, 1, 0, 0, LONG_AGO_US, None, None, outcome),
        )

    tasks = [task(2, 1, None, ended), task(4, 3, None, ended), task(5, 1, None, ended)]
    tasks.append(task(6, 1, 5, live))
    claim = HolderClaim(holder_id="old", host="h", pid=1, at_us=LONG_AGO_US, lease_seconds=15.0)
    head = storage.acquire(claim, takeover=False)
    entry = EntryRow(7, 3, 1, "note", None, None, None, None, '"said"', LONG_AGO_US)
    writes = [
        (Op.CONVERSATION, ConversationRow(1, "u1", None, None, None, "root", "", LONG_AGO_US)),
        *((Op.TASK, row) for row in tasks),
        *((Op.TASK_INPUT, (row.id, "{}")) for row in tasks),
        *((Op.OUTCOME, (row.id, OUTCOME)) for row in tasks if row.status == ended),
        (Op.CONVERSATION, ConversationRow(3, "u3", None, None, 2, None, "", LONG_AGO_US)),
        (Op.ENTRY, entry),
        (Op.BLOB, ("0" * 64, b"nobody refers to it")),
    ]
    batch = Batch(epoch=head.epoch, seq=1, next_id=8, flush=True, writes=writes, clean=True)
    storage.apply(batch)
    storage.release(head.epoch)
    storage.close()
    return store


def tasks_in(store: Path) -> list[int]:
    storage = SqliteStorage(store, create=False, read_only=True)
    try:
        return [row.id for row in storage.tasks()]
    finally:
        storage.close()


COUNTS = """\
  tasks          2
  conversations  1
  entries        1
  submissions    0
  documents      0
  blobs          1
"""
KEPT = """\
kept 1:
         1  work below them is live
"""


def test_a_dry_run_says_what_would_go_and_removes_nothing(
    command: Callable[..., Any], old_store: Path
) -> None:
    """The same figures as the removal after it, which names the pages too."""
    told = command("gc", "--older-than", "30d", "--dry-run")
    assert (told.code, tasks_in(old_store)) == (0, [2, 4, 5, 6])
    assert told.out.startswith("would remove 1 tree of tasks that ended before 20")
    assert COUNTS in told.out
    assert told.out.endswith(KEPT)

    done = command("gc", "--older-than", "30d", "--yes")
    assert (done.code, tasks_in(old_store)) == (0, [5, 6])
    assert done.out.startswith("removed 1 tree of tasks that ended before 20")
    assert COUNTS in done.out
    assert " given back, " in done.out
    assert done.out.endswith(KEPT)


def test_json_has_every_figure(command: Callable[..., Any], old_store: Path) -> None:
    """With `-o json` one object; nothing else goes to stdout with `-o ids`."""
    told = json.loads(command("gc", "--older-than", "4w", "--dry-run", "-o", "json").out)
    assert (told["trees"], told["tasks"], told["blobs"], told["kept"]) == (1, 2, 1, {"live": 1})
    assert (told["dry_run"], told["pages_freed"]) == (True, None)
    assert command("gc", "--older-than", "4w", "--dry-run", "-o", "ids").out == ""


@pytest.mark.parametrize("answer", ["n\n", "", "yes\n"])
def test_a_person_is_asked(command: Callable[..., Any], old_store: Path, answer: str) -> None:
    """What would go is shown first, and only a yes removes it; nobody there needs --yes."""
    assert command("gc", "--older-than", "30d").code == 2
    found = command("gc", "--older-than", "30d", stdin=answer, terminal=True)

    assert found.code == 0
    assert "would remove 1 tree" in found.err
    assert tasks_in(old_store) == ([5, 6] if answer == "yes\n" else [2, 4, 5, 6])


def test_nobody_is_asked_where_nothing_would_go(
    command: Callable[..., Any], old_store: Path
) -> None:
    """The sheet says that there is nothing, and that is all."""
    assert command("gc", "--older-than", "30d", "--yes").code == 0
    found = command("gc", "--older-than", "30d", stdin="", terminal=True)

    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("would remove 0 trees of tasks")


def test_outcomes_can_be_kept(command: Callable[..., Any], old_store: Path) -> None:
    """The root stays, for `task show`, without what was below it."""
    assert command("gc", "--older-than", "30d", "--keep-outcomes", "-y").code == 0
    assert tasks_in(old_store) == [2, 5, 6]
    assert "completed" in command("task", "show", "2").out


def test_ages_have_a_unit() -> None:
    """A number and a unit; anything else is refused with an example."""
    assert parse_age("30d") == parse_age("720h") == timedelta(days=30)
    assert [parse_age(text).total_seconds() for text in ("5s", "5m", "5w")] == [5, 300, 3_024_000]
    for text in ("30", "d", "-1d", "1.5d", "30 d", "999999999w", "1y", ""):
        with pytest.raises(UsageError, match="expected a number and s, m, h, d or w"):
            parse_age(text)
