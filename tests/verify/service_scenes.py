"""Stretches of a store's life that are services: an export of it, and the removal of what is old.

Both find a store in which W has come to its end. An export is there whole or not at all, and where
it is, it has the bytes that it always has; a removal that was stopped is finished by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import apsw
import trio
from storage_scenes import Plant, Scene
from watched_storage import Journal
from workload import opened, play
from workload_scene import ledger_of, live_harness, quiet, scheduled

from pidurable import export_session
from pidurable.session._seams import InlineBlocking
from pidurable.storage import SqliteStorage, Storage

LIFE = 10
"""So many hours after its work began, all of it is old."""
COLUMNS = {
    "session": "uuid, created_us",
    "stubs": "kind, place, key, id, digest, status",
    "removals": "root",
}
"""What is compared of a table where it is not all: moments depend on the life."""
UNCOMPARED = ("holder", "heartbeat")


def _finished(path: Path) -> None:
    """W was here."""
    with quiet(), scheduled("finished"):
        storage = SqliteStorage(path, uuid="scene", created_us=1)
        play(storage, ledger_of(str(path)))


# --- export -----------------------------------------------------------------------------------


def _exported(path: str) -> Path:
    return Path(path).with_name("export.jsonl")


def _live_export(path: str, vfs: str | None, journal: Journal, plant: Plant) -> None:
    """Export a store, unless an earlier life has."""
    file = _exported(path)
    if file.exists():
        return
    try:
        with journal.machine("export"):
            trio.run(_export, path, file)
    except BaseException as error:
        journal.met("export", error)
        if left := _left(file):
            journal.differences.append(f"{left} are left after {error!r}")
        raise


async def _export(path: str, file: Path) -> None:
    await export_session(Path(path), file, blocking=InlineBlocking())


def _left(file: Path) -> list[str]:
    return sorted(name for name in os.listdir(file.parent) if name.startswith(file.name))


def _dump_export(path: str) -> dict[str, Any]:
    file = _exported(path)
    data = file.read_bytes()
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "files": _left(file),
        "store": _dump_rows(path),
    }


# --- retention --------------------------------------------------------------------------------


def _live_removal(path: str, vfs: str | None, journal: Journal, plant: Plant) -> None:
    """Remove all that ended, in a life of a harness."""
    live_harness(_remove, path, vfs, journal, plant)


async def _remove(storage: Storage, journal: Journal) -> None:
    ledger = ledger_of(journal.path)
    async with opened(storage, ledger, life=LIFE + journal.life) as harness:
        await harness.gc(older_than=timedelta(hours=1))


def _dump_rows(path: str) -> dict[str, list[Any]]:
    """Every row of a store, but who held it and how often it was written."""
    with contextlib.closing(apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)) as connection:
        names = connection.execute(
            "select name from sqlite_schema where type = 'table' order by name"
        ).fetchall()
        found: dict[str, list[Any]] = {
            name: sorted(
                connection.execute(f"select {COLUMNS.get(name, '*')} from {name}").fetchall(),
                key=repr,
            )
            for (name,) in names
            if name not in UNCOMPARED
        }
        found["damage"] = connection.execute("pragma integrity_check").fetchall()
        return found


SCENES = (
    Scene(name="export", prepare=_finished, live=_live_export, dump=_dump_export, everywhere=True),
    Scene(
        name="removal",
        prepare=_finished,
        found=None,
        live=_live_removal,
        dump=_dump_rows,
        weight=0.5,
    ),
)
