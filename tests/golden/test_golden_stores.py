"""Stores that released schemas have left are opened, migrated, read and brought to their end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import golden_work as work
import pytest
from golden_stores import SCHEMAS, differences, ended, expected, export, exported, raw, unpack

from pidurable import open_harness, open_reader
from pidurable.errors import StorageAccessError, StorageTooNewError
from pidurable.storage import SqliteStorage
from pidurable.storage._migrate import SCHEMA, copy_path

OLDER = [schema for schema in SCHEMAS if schema < SCHEMA]


def test_there_is_a_golden_store_of_every_schema_before_this_one() -> None:
    """A schema that is released leaves a golden store behind."""
    assert set(range(1, SCHEMA)) <= set(SCHEMAS)
    assert max(SCHEMAS) <= SCHEMA


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_a_golden_store_shows_what_was_written_into_it(schema: int, tmp_path: Path) -> None:
    """Tasks, transcripts, documents and submissions are those that the old code has seen."""
    # C077
    store = unpack(schema, tmp_path)
    SqliteStorage(store, create=False).close()

    found = await work.found_in(tmp_path)

    assert differences(expected(schema)["found"], found) == []
    assert raw(store)["schema"] == SCHEMA
    assert raw(store)["whole"] == "ok"


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_export_of_a_golden_store_has_the_same_bytes_for_ever(
    schema: int, tmp_path: Path
) -> None:
    """It is what was exported when the schema was new, and has every row of the old store."""
    store = unpack(schema, tmp_path)
    rows = raw(unpack(schema, tmp_path / "other"))["tables"]
    SqliteStorage(store, create=False).close()

    found = export(store)

    assert found == exported(schema)
    counts = Counter(json.loads(line).get("record") for line in found.splitlines())
    for record, count in counts.items():
        if record not in (None, "end"):
            table = "entries" if record == "entry" else f"{record}s"
            assert count == len(rows[table]), record
    assert sum(counts.values()) - 2 == sum(map(len, rows.values())) - len(rows["session"])


@pytest.mark.parametrize("schema", OLDER)
def test_the_copy_of_a_golden_store_is_the_whole_old_one(schema: int, tmp_path: Path) -> None:
    """Every row and the schema are those of before, and only its owner may read it."""
    # C077
    store = unpack(schema, tmp_path)
    before = raw(unpack(schema, tmp_path / "other"))

    SqliteStorage(store, create=False).close()

    copy = Path(copy_path(str(store), schema))
    assert raw(copy) == before
    assert before["schema"] == schema
    assert copy.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_what_is_in_a_golden_store_comes_to_the_end_that_the_old_code_brings_it_to(
    schema: int, tmp_path: Path
) -> None:
    """Every task, run, document and effect ends the same; without its code one task is blocked."""
    # C015, C077
    unpack(schema, tmp_path)

    await work.end(tmp_path)

    assert differences(ended(schema), await work.ended_in(tmp_path)) == []


async def test_what_others_asked_for_and_what_was_being_removed_comes_to_its_end(
    tmp_path: Path,
) -> None:
    """Answers and stubs are found as they were; what waits is answered once, a removal finished."""
    store = unpack(3, tmp_path)
    storage = SqliteStorage(store, create=False)
    answers = [storage.command(f"command {number}") for number in (1, 2, 3)]
    assert [each is not None for each in answers] == [True, True, False]
    assert len(storage.removals()) == 1
    removed = storage.stub("task", 1, "removed")
    assert removed is not None
    storage.close()

    await work.end(tmp_path)

    storage = SqliteStorage(store, create=False)
    assert storage.removals() == []
    assert storage.command("command 1") == answers[0]
    assert storage.command("command 3") is not None
    assert storage.conversation_by_key(None, "asked for") is not None
    assert storage.stub("task", 1, "removed") == removed
    assert storage.stub("task", 1, "half removed") is not None
    storage.close()


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_a_golden_store_of_a_newer_schema_is_refused_and_left_untouched(
    schema: int, tmp_path: Path
) -> None:
    """Both schemas are named, whoever opens it; no byte, time or file is changed."""
    # C076
    store = unpack(schema, tmp_path)
    connection = apsw.Connection(str(store))
    connection.execute(f"pragma user_version = {SCHEMA + 1}")
    connection.close()
    before = content(tmp_path)

    with pytest.raises(StorageTooNewError, match=rf"schema {SCHEMA + 1}.*{SCHEMA}"):
        async with open_harness(store):
            pass
    with pytest.raises(StorageTooNewError):
        async with open_reader(store):
            pass

    assert content(tmp_path) == before


@pytest.mark.parametrize("schema", OLDER)
async def test_only_looking_at_an_older_golden_store_changes_nothing(
    schema: int, tmp_path: Path
) -> None:
    """A reader says which schema it met and what to do, and leaves every file as it is."""
    store = unpack(schema, tmp_path)
    before = content(tmp_path)

    with pytest.raises(StorageAccessError, match=f"older schema {schema}"):
        async with open_reader(store):
            pass

    # The holder was killed: whoever looks into the log makes the shared memory anew, or not.
    found = {name: value for name, value in content(tmp_path).items() if "-shm" not in name}
    assert found == before


def content(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_mode, data)
        for path in folder.rglob("*")
        for data in [path.read_bytes() if path.is_file() else b""]
    }
