"""The golden stores: where they are, what must be found in them, and how to look at a raw store."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import apsw
import trio

from pidurable import export_session
from pidurable.agent._replay import unknown_text

HERE = Path(__file__).parent
SCHEMAS = sorted(
    int(path.stem.split("_")[1].split(".")[0]) for path in HERE.glob("schema_*.tar.xz")
)
"""The schemas that there is a golden store of."""
STORE = "golden.sqlite"
INTERRUPTED = {1: 44, 2: 44}
"""Place of the call that was found between its intent and its outcome, by schema."""


def unpack(schema: int, folder: Path) -> Path:
    """Unpack a golden store into a folder, as its killed holder left it; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(HERE / f"schema_{schema}.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder / STORE


def expected(schema: int) -> dict[str, Any]:
    """What the code of the schema found in the store (`found`), and how it ended it (`end`)."""
    said: dict[str, Any] = json.loads((HERE / f"schema_{schema}.json").read_text("utf-8"))
    return said


def ended(schema: int) -> dict[str, Any]:
    """How today's code ends it: as the code of the schema did, but for an interrupted call.

    It completed then, and fails now, so that what it owned is aborted.
    """
    end: dict[str, Any] = expected(schema)["end"]
    if schema in INTERRUPTED:
        call = end["tasks"][INTERRUPTED[schema]]
        assert call[3:] == ["completed", None, [True, "interrupted"], None]
        call[3], call[6] = "failed", ["error", unknown_text(None)]
    return end


def exported(schema: int) -> bytes:
    """The export of the store, once it was brought to the schema that this project has."""
    return lzma.decompress((HERE / f"schema_{schema}.jsonl.xz").read_bytes())


def export(store: Path) -> bytes:
    """Export a store with today's code."""
    stream = io.BytesIO()
    trio.run(lambda: export_session(store, stream))
    return stream.getvalue()


def differences(expected: Any, found: Any, path: str = "$") -> list[str]:
    """Where something that was expected is missing or other; what is there besides is newer."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            line
            for key, value in expected.items()
            for line in (
                differences(value, found[key], f"{path}.{key}")
                if key in found
                else [f"{path}.{key}: missing"]
            )
        ]
    if isinstance(expected, list) and isinstance(found, list):
        lines = [
            line
            for place, (one, other) in enumerate(zip(expected, found, strict=False))
            for line in differences(one, other, f"{path}[{place}]")
        ]
        if len(expected) != len(found):
            lines.append(f"{path}: {len(expected)} expected, {len(found)} found")
        return lines
    if type(expected) is type(found) and expected == found:
        return []
    return [f"{path}: expected {expected!r:.200}, found {found!r:.200}"]


def raw(store: Path) -> dict[str, Any]:
    """The rows of every table, the schema and whether SQLite finds the file whole.

    What a holder changes by being there (its row, the heartbeat) is left out.
    """
    connection = apsw.Connection(str(store), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        names = [
            name
            for (name,) in connection.execute(
                "select name from sqlite_schema where type = 'table' order by name"
            )
            if name not in ("holder", "heartbeat")
        ]
        return {
            "schema": connection.execute("pragma user_version").get,
            "whole": connection.execute("pragma integrity_check").get,
            "tables": {
                name: connection.execute(f"select * from {name}").fetchall() for name in names
            },
        }
    finally:
        connection.close()
