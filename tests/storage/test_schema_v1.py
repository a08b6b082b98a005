"""A store of schema 1, made from its own script, is brought to the schema of today."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from pidurable.storage import DocumentRow, SqliteStorage, _sqlite_open as opening
from pidurable.storage._migrate import SCHEMA, copy_path

SCHEMA_1 = Path(__file__).parents[1] / "golden" / "schema_v1.sql"
"""The script that stores of schema 1 were made with."""

DOCUMENTS = [
    # (id, name, scope, scope id, key, created_seq, retired)
    (10, "app.living", 1, 1, "", 3, 0),
    (11, "app.twice", 1, 1, "", 4, 1),
    (12, "app.twice", 1, 1, "", 9, 1),
    (13, "app.twice", 1, 1, "", 9_000, 0),
    (14, "app.ended", 1, 1, "", 5, 1),
    (15, "app.ended", 1, 1, "k", 6, 0),
    (16, "app.of_task", 2, 7, "", 5, 1),
    (17, "app.of_session", 0, 0, "", 5, 0),
]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A closed store as schema 1 left it, with documents that live and that were retired."""
    path = tmp_path / "s.sqlite"
    script = SCHEMA_1.read_text("utf-8")
    connection = apsw.Connection(str(path))
    connection.execute("pragma journal_mode = wal")
    connection.execute(script)
    connection.execute(f"pragma application_id = {opening.APPLICATION_ID}")
    connection.execute("pragma user_version = 1")
    connection.execute(
        "insert into session (id, uuid, created_us, epoch, seq, next_id, clean)"
        "\nvalues (1, 'u', 1, 4, 9500, 100, 1)"
    )
    connection.execute(
        "insert into conversations (id, uuid, principal, created_us)\nvalues (1, 'c', '', 1)"
    )
    for row in DOCUMENTS:
        connection.execute(
            "insert into documents (id, name, scope, scope_id, key, history, fork, created_seq,"
            " retired)\nvalues (?, ?, ?, ?, ?, 'rewindable', 'as_of', ?, ?)",
            row,
        )
        connection.execute(
            "insert into revisions (document, seq, base, version, value)\nvalues (?, ?, 1, 1, ?)",
            (row[0], row[5], f'{{"made":{row[5]}}}'),
        )
    connection.close()
    path.chmod(0o600)
    return path


def test_documents_keep_their_rows_and_get_a_past(old: Path) -> None:
    """A retired one is taken to have lived until the next at its address, or until now."""
    storage = SqliteStorage(old, create=False)
    try:
        found = {
            seq: [row.id for row in storage.documents_as_of(1, seq=seq)]
            for seq in (2, 3, 5, 8, 9, 8_999, 9_000, 9_499, 9_500)
        }
        living = [row.id for row in storage.documents(1, 1)]
        twice = storage.document_as_of(1, "app.twice", "", seq=5)
        task = storage.documents(2, 7), storage.documents(0, 0)
        texts = [revision.value for revision in storage.revisions(11)]
        epoch = storage.head().epoch
    finally:
        storage.close()

    assert found == {
        2: [],
        3: [10],
        5: [14, 10, 11],
        8: [14, 15, 10, 11],
        9: [14, 15, 10, 12],
        8_999: [14, 15, 10, 12],
        9_000: [14, 15, 10, 13],
        9_499: [14, 15, 10, 13],
        9_500: [15, 10, 13],
    }
    assert living == [10, 13, 15]
    assert twice == DocumentRow(11, "app.twice", 1, 1, "", "rewindable", "as_of", 4, 9)
    assert ([row.id for row in task[0]], [row.id for row in task[1]]) == ([], [17])
    assert texts == ['{"made":4}']
    assert epoch == 5
    assert Path(copy_path(str(old), 1)).exists()


def test_a_migrated_store_has_the_schema_of_a_new_one(old: Path, tmp_path: Path) -> None:
    """Tables, columns, their order and types, and indexes are those of a store made today."""
    new = tmp_path / "new.sqlite"
    SqliteStorage(new).close()
    SqliteStorage(old, create=False).close()

    assert _shape(old) == _shape(new)


def _shape(path: Path) -> list[object]:
    connection = apsw.Connection(str(path))
    rows = connection.execute("select type, name, sql from sqlite_schema order by name").fetchall()
    found: list[object] = [connection.execute("pragma user_version").get]
    for kind, name, sql in rows:
        if kind == "table":
            columns = connection.execute(f"pragma table_info({name})").fetchall()
            found.append((name, columns, sql.rstrip().lower().endswith("strict")))
        else:
            found.append((name, " ".join((sql or "").split())))
    connection.close()
    return found


def test_the_script_of_schema_1_is_what_it_was() -> None:
    """Stores of schema 1 exist, so what they were made with is never edited."""
    script = SCHEMA_1.read_text("utf-8")

    assert "retired integer not null default 0" in script
    assert "retired_seq" not in script
    assert SCHEMA > 1
