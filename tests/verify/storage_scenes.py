"""Stretches of a store's life without a session: opening, writing, recovery, migration, closing.

Each scene is played by `live`, which goes on from whatever it finds and behaves as a session does:
a refused batch is sent again a few times, an uncertain one ends the life. A scene differs from
another in what it finds: nothing, a store that was closed, one whose holder was killed with a log
full of commits, one of an older schema.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import attrs
from watched_storage import Journal, WatchedStorage

from pidurable.errors import StorageRefusedError
from pidurable.storage import Batch, Op, SqliteStorage, Storage
from pidurable.storage._sqlite_open import APPLICATION_ID
from pidurable.testing._conformance_base import claim, conversation, entry, signal, task, task_state

SCHEMA_1 = Path(__file__).parents[1] / "golden" / "schema_v1.sql"
"""The script that stores of schema 1 were made with."""

TRIES = 3
"""How often a refused batch is sent; a session does so for 30 seconds."""
BORN_US = 1_700_000_000_000_000


Plant = Callable[[Storage], Storage]
"""Wraps a storage in one with a bug, for a control."""

Live = Callable[[str, str | None, Journal, Plant], None]
"""Lives a scene: at a path, on a file layer, telling a journal, with a bug or none."""


@attrs.frozen(kw_only=True)
class Scene:
    """A stretch of a store's life: what is there when it begins, and what is done then."""

    name: str
    prepare: Callable[[Path], None]
    """Make what is found at a path."""
    live: Live
    dump: Callable[[str], object]
    """Describe what there is at a path in the end."""
    found: int | None = 0
    """How many are stored at its beginning; None where the file, which is at rest, may say so."""
    weight: float = 1.0
    """Its part of the runs, where they are drawn: that of a long scene is small."""
    everywhere: bool = False
    """Whether files fail that the scene opens without naming a file layer, too."""
    foreign: bool = False
    """Whether the record names a holder that nobody can ask."""


def writes_of(seq: int) -> list[tuple[Op, tuple[Any, ...]]]:
    """What the batch of a sequence number holds: the same whenever it is written."""
    first = seq * 10
    made = [
        conversation(first),
        entry(first + 1, first, messages=f'"{"m" * (seq * 700)}"'),
        task(first + 2, conversation=first),
        (Op.CHECKPOINT, (first + 2, "start", f'"{seq}"', first)),
        signal(first + 3, first + 2),
    ]
    if seq > 1:
        before = first - 10
        made += [
            task_state(before + 2, status=4, outcome_status="completed"),
            (Op.CHECKPOINT_DELETE, (before + 2,)),
            (Op.SIGNAL_DELETE, (before + 3,)),
        ]
    return made


def lives(batches: int) -> Live:
    """A life that ends with so many batches stored."""
    return functools.partial(_live, batches=batches)


def honest(storage: Storage) -> Storage:
    """No bug."""
    return storage


def _live(path: str, vfs: str | None, journal: Journal, plant: Plant, *, batches: int) -> None:
    """Open a store, hold it, write what is missing, look at it, and close it."""
    try:
        with journal.machine("open"):
            opened = SqliteStorage(path, vfs=vfs, uuid="scene", created_us=BORN_US)
    except BaseException as error:
        journal.met("open", error)
        raise
    storage = WatchedStorage(plant(opened), journal)
    try:
        head = storage.acquire(claim(), takeover=journal.takeover)
        journal.held = True
        journal.found = head.seq
        for seq in range(head.seq + 1, batches + 1):
            _store(storage, head.epoch, seq)
            _look(storage, seq)
        storage.release(head.epoch)
    finally:
        storage.close()


def _store(storage: Storage, epoch: int, seq: int) -> None:
    batch = Batch(
        epoch=epoch, seq=seq, next_id=seq * 10 + 9, flush=seq % 3 > 0, writes=writes_of(seq)
    )
    for left in reversed(range(TRIES)):
        try:
            storage.apply(batch)
        except StorageRefusedError:
            if not left:
                raise
        else:
            break
    if seq % 4 == 0:
        storage.heartbeat(epoch, BORN_US + seq)
    if seq % 5 == 0:
        storage.checkpoint(truncate=seq % 2 == 0)


def _look(storage: Storage, seq: int) -> None:
    """Read as a session does; what is read was acknowledged, so it is there."""
    found = storage.conversation(seq * 10)
    entries = storage.entries(seq * 10)
    if found is None or len(entries) != 1:
        raise AssertionError(f"batch {seq} was acknowledged and is not found")
    storage.live_tasks()


# --- what is found ----------------------------------------------------------------------------


def _nothing(path: Path) -> None:
    """There is no file yet."""


def _closed(path: Path) -> None:
    _live(str(path), None, Journal(str(path)), honest, batches=4)


def _crashed(path: Path) -> None:
    """A holder was killed: the log holds all that it wrote since its checkpoint."""
    made = path.with_name("dying")
    storage = SqliteStorage(made, uuid="scene", created_us=BORN_US)
    head = storage.acquire(claim(), takeover=False)
    for seq in range(1, 7):
        _store(storage, head.epoch, seq)
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{made}{suffix}", f"{path}{suffix}")
    storage.close()


def _old(path: Path) -> None:
    """A store of schema 1, closed, with four batches in it."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    connection = apsw.Connection(str(path))
    text = SCHEMA_1.read_text("utf-8")
    connection.execute(text)
    connection.execute(
        "insert into session (id, uuid, created_us, epoch, seq, next_id, clean)"
        " values (1, 'scene', ?, 1, 0, 1, 0)",
        (BORN_US,),
    )
    connection.execute(f"pragma application_id = {APPLICATION_ID}")
    connection.execute("pragma user_version = 1")
    connection.execute("pragma journal_mode = wal")
    connection.close()


def dump(path: str) -> dict[str, list[Any]]:
    """Everything that a store holds, but who held it and when."""
    connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    try:
        names = connection.execute(
            "select name from sqlite_schema where type = 'table' order by name"
        ).fetchall()
        found: dict[str, list[Any]] = {
            name: sorted(connection.execute(f"select * from {name}").fetchall(), key=repr)
            for (name,) in names
            if name not in ("holder", "heartbeat", "session")
        }
        found["session"] = connection.execute(
            "select uuid, created_us, seq, next_id from session"
        ).fetchall()
        found["damage"] = connection.execute("pragma integrity_check").fetchall()
        return found
    finally:
        connection.close()


def prepared(scene: Scene, folder: Path) -> Path:
    """Make what a scene finds, once: it is copied for each run."""
    made = folder / f"found-{scene.name}"
    made.mkdir()
    scene.prepare(made / "s.sqlite")
    for left in ("dying", "dying-wal", "dying-shm"):
        (made / left).unlink(missing_ok=True)
    for lock in made.glob("*.lock.*"):
        lock.unlink()
    return made


def copied(made: Path, folder: Path) -> Path:
    """A fresh copy of what a scene finds."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made, folder)
    return folder / "s.sqlite"


SCENES = (
    Scene(name="create", prepare=_nothing, live=lives(10), dump=dump),
    Scene(name="reopen", prepare=_closed, found=4, live=lives(10), dump=dump),
    Scene(name="recover", prepare=_crashed, found=6, foreign=True, live=lives(10), dump=dump),
    Scene(name="migrate", prepare=_old, live=lives(5), dump=dump),
)
