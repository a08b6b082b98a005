"""One damaged value: whoever reads it is told which, the rest is readable, and nothing is changed.

Each column that holds JSON, and each blob, is spoiled in turn in a store full of records.
"""

# C078

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import attrs
import pytest
import trio

from pidurable import (
    AgentChange,
    Edit,
    Reader,
    TextBlock,
    UserMessage,
    document,
    open_harness,
    open_reader,
)
from pidurable.errors import StorageCorruptError
from pidurable.testing import ScriptedModel


@document("damage.notes")
@attrs.define
class Notes:
    text: str = "written"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A closed store with entries, an input that waits, a document, a task and a blob."""
    path = tmp_path_factory.mktemp("whole") / "s.sqlite"

    async def fill() -> None:
        # Whose answer would take an hour: the task that asks for it is live at the end.
        slow = ScriptedModel([{"text": "late", "delay": 3_600}])
        async with open_harness(path, models=slow.models()) as harness:
            root = await harness.root(agent=AgentChange(model="scripted/model"))
            async with harness.commit() as tx:
                said = UserMessage(blocks=(TextBlock(text="hello"),), at_us=1)
                first = tx.append(root.id, {"n": 1}, kind="note", messages=[said])
                tx.append(root.id, kind="note", edits=[Edit(target=first, messages=(said,))])
                tx.append(root.id, {"large": "x" * 70_000}, kind="note")
                await tx.document(Notes, root.id)
            await root.submit("never answered")

    trio.run(fill)
    return path.read_bytes()


async def read_entries(reader: Reader) -> Any:
    return [each.data for each in await reader.entries(1)]


async def read_messages(reader: Reader) -> Any:
    return [each.messages for each in await reader.entries(1)]


async def read_edits(reader: Reader) -> Any:
    return [each.edits for each in await reader.entries(1)]


async def read_document(reader: Reader) -> Any:
    return await reader.document("damage.notes", 1)


async def read_tasks(reader: Reader) -> Any:
    return await reader.tasks()


TABLE: dict[str, tuple[str, Callable[[Reader], Any], str]] = {
    "data": ("update entries set data = '{'", read_entries, r"entry \d+"),
    "messages": ("update entries set messages = '[{}]'", read_messages, r"entry \d+"),
    "edits": ("update entries set edits = '5' where edits is not null", read_edits, r"entry \d+"),
    "revision": ("update revisions set value = '[1,'", read_document, "'damage.notes'"),
    "input": ("update inputs set value = 'x'", read_tasks, "task"),
    "checkpoint": ("update checkpoints set value = '{'", read_tasks, "task"),
    "status": ("update tasks set status = 77", read_tasks, "77 is not a valid Status"),
    "blob gone": ("delete from blobs", read_entries, r"entry \d+: blob [0-9a-f]{64} is missing"),
    "blob other": (
        "update blobs set bytes = x'00'",
        read_entries,
        r"entry \d+: blob [0-9a-f]{64} has other bytes",
    ),
    "blob cut": (
        "update blobs set bytes = substr(bytes, 1, 100)",
        read_entries,
        r"entry \d+: blob [0-9a-f]{64} has other bytes",
    ),
}


@pytest.mark.parametrize("name", TABLE)
async def test_a_damaged_value_is_named_by_what_reads_it(
    whole: bytes, tmp_path: Path, name: str
) -> None:
    """The error names the store and the record; other records are read; nothing is changed."""
    statement, read, words = TABLE[name]
    path = tmp_path / "s.sqlite"
    path.write_bytes(whole)
    connection = apsw.Connection(str(path))
    connection.execute(statement)
    changed = connection.total_changes()
    connection.close()
    before = path.read_bytes()
    assert changed > 0

    async with open_reader(path) as reader:
        with pytest.raises(StorageCorruptError) as caught:
            await read(reader)
        assert len(await reader.conversations()) == 1
        if read is not read_tasks:
            await reader.tasks()

    said = str(caught.value)
    assert str(path) in said
    assert re.search(words, said), said
    assert "restore a backup" in said
    assert path.read_bytes() == before
