"""Every statement of the running system finds its rows through an index."""

from __future__ import annotations

import re
from pathlib import Path

import apsw
import pytest

from pidurable.storage import Op, SqliteStorage, _sqlite_statements as statements


def plan(path: Path, sql: str) -> list[str]:
    connection = apsw.Connection(str(path))
    count = sql.count("?") if "?1" not in sql else max(map(int, re.findall(r"\?(\d)", sql)))
    rows = connection.execute(f"explain query plan {sql}", (None,) * count).fetchall()
    connection.close()
    return [detail for *_, detail in rows]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "s.sqlite"
    SqliteStorage(path).close()
    return path


@pytest.mark.parametrize("name", statements.READS)
def test_no_read_scans_a_table(store: Path, name: str) -> None:
    """A read searches by rowid or index; only counting the unread signals walks one."""
    steps = plan(store, statements.READS[name])

    assert steps
    for step in steps:
        if name == "live_signals":
            assert step == "SCAN signals USING COVERING INDEX signals_task"
        elif name == "removals" or name.startswith("first:"):
            # All of a short list, or the head of a table in the order in which it is stored.
            assert step.startswith("SCAN")
        else:
            assert not step.startswith("SCAN"), step
    # What is sorted afterwards is few: the documents of one scope.
    few = name in ("documents", "documents_retired")
    assert few or not any("TEMP B-TREE" in step for step in steps), steps


@pytest.mark.parametrize("name", ["live_tasks", "live_tasks_of_a_large_store"])
def test_live_tasks_walk_the_partial_index(store: Path, name: str) -> None:
    """Terminal rows cost nothing, however many there are."""
    if "large" in name:
        connection = apsw.Connection(str(store))
        connection.execute("analyze")
        connection.close()

    assert plan(store, statements.READS["live_tasks"]) == [
        "SEARCH tasks USING INDEX tasks_live (id>?)"
    ]


def test_the_past_of_an_address_is_found_at_once(store: Path) -> None:
    """However many stood there, one is visited; a fork asks only for rewindable ones."""
    assert plan(store, statements.READS["document_as_of"]) == [
        "SEARCH documents USING INDEX documents_past"
        " (scope_id=? AND name=? AND key=? AND created_seq<?)"
    ]
    assert plan(store, statements.READS["next_rewindable"]) == [
        "SEARCH documents USING COVERING INDEX documents_rewindable"
        " (scope_id=? AND (name,key)>(?,?))"
    ]


@pytest.mark.parametrize("op", statements.WRITES)
def test_no_write_scans_a_table(store: Path, op: Op) -> None:
    """A change or a deletion searches for its rows."""
    assert not any(step.startswith("SCAN") for step in plan(store, statements.WRITES[op]))


def test_every_op_has_a_statement() -> None:
    """The table of writes is complete."""
    assert set(statements.WRITES) == set(Op)


def test_counting_live_tasks_visits_no_ended_one(store: Path) -> None:
    """The header of a watched tree walks the live tasks, however long the history is."""
    (step,) = plan(store, statements.PEOPLE_READS["live_counts"])

    assert step.startswith("SCAN tasks USING INDEX tasks_live")


@pytest.mark.parametrize(
    "sql",
    [
        statements.HEAD_UPDATE,
        statements.HEARTBEAT,
        statements.EPOCH_UPDATE,
        statements.HOLDER_RELEASE,
    ],
)
def test_what_a_holder_writes_of_itself_is_one_row(store: Path, sql: str) -> None:
    """The fence, the heartbeat and the release go to their row at once."""
    steps = plan(store, sql)

    assert steps
    assert not any(step.startswith("SCAN") for step in steps), steps
