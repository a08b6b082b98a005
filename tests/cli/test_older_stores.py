"""Commands on a store that an older program left: looking refuses it, working migrates it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from pidurable.storage._migrate import SCHEMA
from pidurable.storage._sqlite_open import APPLICATION_ID

SCHEMA_1 = Path(__file__).parents[1] / "golden" / "schema_v1.sql"
"""The script that stores of schema 1 were made with."""


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """A closed store of schema 1 with a root, one entry, and a live task that nobody knows."""
    path = tmp_path / ".pidurable" / "session.sqlite"
    path.parent.mkdir()
    script = SCHEMA_1.read_text("utf-8")
    connection = apsw.Connection(str(path))
    connection.execute("pragma journal_mode = wal")
    connection.execute(script)
    connection.execute(f"pragma application_id = {APPLICATION_ID}")
    connection.execute("pragma user_version = 1")
    connection.execute(
        "insert into session (id, uuid, created_us, epoch, seq, next_id, clean)"
        "\nvalues (1, 'u', 1, 1, 5, 10, 1);"
        "\ninsert into conversations (id, uuid, key, principal, created_us)"
        "\nvalues (1, 'c', 'root', '', 1);"
        "\ninsert into entries (id, conversation, seq, kind, at_us) values (2, 1, 3, 'k', 1);"
        "\ninsert into tasks (id, conversation, kind, version, background, created_us, status,"
        " invocations, recoveries, tries, ready_us)"
        "\nvalues (3, 1, 'old.task', 1, 0, 1, 0, 0, 0, 0, 1);"
        "\ninsert into inputs (task, value) values (3, 'null');"
        "\ninsert into checkpoints (task, phase, value, at_us) values (3, 'p', 'null', 1)"
    )
    connection.close()
    path.chmod(0o600)
    return path


def schema(path: Path) -> int:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    found: int = connection.execute("pragma user_version").get
    connection.close()
    return found


@pytest.mark.parametrize(
    "argv",
    [
        ["task", "list"],
        ["task", "tree"],
        ["conversation", "log"],
        ["resume", "--plan"],
    ],
    ids=" ".join,
)
def test_looking_at_an_older_store_changes_nothing_and_says_what_to_do(
    command: Callable[..., object], old_store: Path, argv: list[str]
) -> None:
    """It names the schema and the command that migrates."""
    before = old_store.read_bytes()

    found = command(*argv)

    assert found.code == 1
    assert "older schema 1; open it for work once, as `pidurable resume` does" in found.err
    assert old_store.read_bytes() == before
    assert [path.name for path in old_store.parent.iterdir()] == [old_store.name]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["conversation", "fork", "1"], 0),
        (["task", "signal", "3", "go"], 0),
        (["task", "retry", "3"], 0),
        (["task", "abort", "3", "--yes"], 0),
        (["resume", "--timeout", "0.01"], 8),
        # Work that is left over is not begun by a prompt, in an older store either.
        (["run", "do it", "--model", "openai/gpt-5"], 2),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_working_on_an_older_store_migrates_it(
    command: Callable[..., object], old_store: Path, argv: list[str], code: int
) -> None:
    """The command does what it does in any store, and a copy of the old one stays."""
    found = command(*argv)

    assert (found.code, found.err if found.code != code else "") == (code, "")
    assert schema(old_store) == SCHEMA
    assert schema(old_store.with_name("session.sqlite.v1.bak")) == 1
    assert command("conversation", "log", "-o", "ids").out == "2\n"


def test_an_older_store_is_exported_and_stays_as_it_is(
    command: Callable[..., object], old_store: Path
) -> None:
    """Its copy is migrated; what only looks changes nothing."""
    before = old_store.read_bytes()

    exported = command("export", "old.jsonl")
    imported = command("import", "old.jsonl", "--as", "move", "-s", "new.sqlite")

    assert (exported.code, imported.code) == (0, 0)
    assert (schema(old_store), schema(Path("new.sqlite"))) == (1, SCHEMA)
    assert old_store.read_bytes() == before
    assert not list(Path().glob("old.jsonl.*"))
