"""R12: what released schemas have left is opened, migrated, read and ended by today's code.

For each golden store (tests/golden): migrate a copy with the process killed at its k-th change of a
file, look at what is left, migrate again, and compare with what the code of that schema had found
in it and how that code ended it. Prints the goal's line, and exits with 1 unless all is equal.

* a copy `.vN.bak` that has its name is whole, of the old schema, equal row by row, and 0600;
* a copy that was cut off (`.part`) is gone after the next opening;
* its export has the bytes of the one that is kept beside the store, and what is imported from that,
  as a move, comes to the same end;
* the store is of the old schema with all its rows, or of today's with all that was found;
* a newer schema is refused, with no byte and no time changed;
* ended, it is equal; meanwhile one task has no definition, and nothing else is held up by it.

`R12_KILLS` is the number of kills for each store, spread evenly over all changes (0: every one),
`R12_ENDS` how many of them are ended too. `R12_PLANTED` breaks the migration, as a control:
`split` commits in its middle, `copy` gives a copy its name before it is whole, `rows` loses one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import attrs
import trio

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

import golden_work as work
from golden_stores import SCHEMAS, differences, ended, expected, export, exported, raw, unpack
from killing_files import in_a_child

from pidurable import import_session
from pidurable.errors import PidurableError, StorageTooNewError
from pidurable.storage import SqliteStorage, _migrate
from pidurable.storage._migrate import SCHEMA, copy_path

KILLS = int(os.environ.get("R12_KILLS", "8"))
ENDS = int(os.environ.get("R12_ENDS", "1"))
PLANTED = os.environ.get("R12_PLANTED", "")


@attrs.define
class Count:
    """What the line says."""

    stores: int = 0
    kills: int = 0
    cut_copies: int = 0
    exports: int = 0
    ended: int = 0
    wrong: list[str] = attrs.Factory(list)

    def add(self, where: str, lines: list[str]) -> None:
        self.wrong += [f"{where}: {line}" for line in lines]


def migrate(store: Path) -> None:
    """Open for work, as a harness does first: that migrates."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(planted())
        SqliteStorage(store, create=False).close()


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Break the migration, or leave it as it is."""
    was = dict(_migrate.MIGRATIONS)
    keep = _migrate._keep_copy
    oldest = min(_migrate.MIGRATIONS)

    def split(connection: Any) -> None:
        was[oldest](connection)
        connection.execute("commit")
        connection.execute("begin immediate")

    def rows(connection: Any) -> None:
        was[oldest](connection)
        connection.execute("delete from entries where id = (select max(id) from entries)")

    def at_once(store: str, found: int, copy: Callable[[str], None]) -> None:
        copy(copy_path(store, found))

    try:
        if PLANTED in ("split", "rows"):
            _migrate.MIGRATIONS[oldest] = {"split": split, "rows": rows}[PLANTED]
        elif PLANTED == "copy":
            _migrate._keep_copy = at_once
        yield
    finally:
        _migrate.MIGRATIONS.update(was)
        _migrate._keep_copy = keep


def check_store(schema: int, count: Count, folder: Path) -> None:
    """Everything about one golden store."""
    before = raw(unpack(schema, folder / "untouched"))
    changes = whole_run(schema, before, count, folder / "whole")
    step = max(1, changes // KILLS) if KILLS else 1
    numbers = range(1, changes + 1, step)
    ends = set(list(numbers)[:: max(1, len(numbers) // ENDS)][:ENDS]) if ENDS else set()
    for number in numbers:
        place = folder / f"kill-{number}"
        wrong = len(count.wrong)
        killed_run(schema, before, count, place, number=number, end=number in ends)
        if len(count.wrong) == wrong:
            shutil.rmtree(place)
    refuse_newer(schema, count, folder / "newer")
    count.stores += 1


def whole_run(schema: int, before: dict[str, Any], count: Count, folder: Path) -> int:
    """Migrate undisturbed, look, and end; returns how many changes of files the migration made."""
    store = unpack(schema, folder)
    code, changes = in_a_child(lambda: migrate(store), kill_at=None)
    if code != 0:
        count.add(f"schema {schema}", [f"$: migrating it ended with {code}"])
        return 0
    look(schema, before, count, f"schema {schema}", store)
    moved = folder / "moved"
    moved.mkdir()
    shutil.copy(folder / "ledger", moved / "ledger")
    # What waits in the box beside a store is no part of the session: it is moved like a file.
    box = f"{store.name}.commands"
    if (folder / box).exists():
        shutil.copytree(folder / box, moved / box)
    stream = io.BytesIO(exported(schema))
    trio.run(lambda: import_session(stream, moved / store.name, as_copy=False))
    finish(schema, count, f"schema {schema}", folder)
    finish(schema, count, f"schema {schema}, imported", moved)
    return changes


def killed_run(
    schema: int, before: dict[str, Any], count: Count, folder: Path, *, number: int, end: bool
) -> None:
    """Die at the k-th change, look at what is left, and open it again."""
    where = f"schema {schema}, killed at change {number}"
    store = unpack(schema, folder)
    code, _ = in_a_child(lambda: migrate(store), kill_at=number)
    if code != -9:
        count.add(where, [f"$: it ended with {code}, and was to be killed"])
        return
    count.kills += 1
    part = Path(f"{copy_path(str(store), schema)}.part")
    count.cut_copies += part.exists()
    try:
        left = raw(store)
        if left["schema"] not in (schema, SCHEMA):
            count.add(where, [f"$.schema: {left['schema']} is neither old nor new"])
        if left["schema"] == schema and schema < SCHEMA:
            compare_raw(before, left, count, f"{where}, before it was opened again")
        check_copy(schema, before, count, where, store, must_exist=left["schema"] != schema)
        SqliteStorage(store, create=False).close()
    except (PidurableError, apsw.Error) as error:
        count.add(where, [f"$: it cannot be opened: {type(error).__name__}: {error}"])
        return
    if part.exists():
        count.add(where, ["$: a copy that was cut off is still there"])
    look(schema, before, count, where, store)
    if end:
        finish(schema, count, where, folder)


def check_copy(
    schema: int, before: dict[str, Any], count: Count, where: str, store: Path, *, must_exist: bool
) -> None:
    copy = Path(copy_path(str(store), schema))
    if not copy.exists():
        if must_exist and schema < SCHEMA:
            count.add(where, ["$: there is no copy of the old store"])
        return
    if copy.stat().st_mode & 0o777 != 0o600:
        count.add(where, ["$: others may read the copy"])
    try:
        compare_raw(before, raw(copy), count, f"{where}, the copy")
    except apsw.Error as error:
        count.add(where, [f"$: the copy cannot be opened: {error}"])


def compare_raw(before: dict[str, Any], left: dict[str, Any], count: Count, where: str) -> None:
    count.add(
        where,
        [
            f"$.{name}: expected {show(before[name])}, found {show(left[name])}"
            for name in before
            if before[name] != left[name]
        ],
    )


def show(value: Any) -> str:
    return repr(value) if not isinstance(value, dict) else f"{len(value)} tables, {digest(value)}"


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def look(schema: int, before: dict[str, Any], count: Count, where: str, store: Path) -> None:
    """The store is of today's schema, whole, and shows what the old code has seen in it."""
    now = raw(store)
    if (now["schema"], now["whole"]) != (SCHEMA, "ok"):
        count.add(where, [f"$: schema {now['schema']}, {now['whole']}"])
    check_copy(schema, before, count, where, store, must_exist=True)
    count.add(where, differences(expected(schema)["found"], trio.run(work.found_in, store.parent)))
    count.exports += 1
    if export(store) != exported(schema):
        count.add(where, ["$: its export has other bytes than the one that was kept"])


def finish(schema: int, count: Count, where: str, folder: Path) -> None:
    """Everything in it ends as the old code ended it, but for what is decided otherwise now."""
    try:
        trio.run(work.end, folder)
    except Exception as error:
        count.add(where, [f"$: it cannot be ended: {error!r:.300}"])
        return
    count.ended += 1
    found = trio.run(work.ended_in, folder)
    count.add(f"{where}, ended", differences(ended(schema), found))


def refuse_newer(schema: int, count: Count, folder: Path) -> None:
    """A store of the next schema is left as it is, whoever opens it."""
    store = unpack(schema, folder)
    connection = apsw.Connection(str(store))
    connection.execute(f"pragma user_version = {SCHEMA + 1}")
    connection.close()
    before = files(folder)
    for read_only in (False, True):
        try:
            SqliteStorage(store, create=False, read_only=read_only).close()
            count.add(f"schema {schema}", ["$: a newer schema was opened"])
        except StorageTooNewError:
            pass
    if files(folder) != before:
        count.add(f"schema {schema}", ["$: a newer store was changed"])


def files(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_mode, data)
        for path in folder.rglob("*")
        for data in [path.read_bytes() if path.is_file() else b""]
    }


def main() -> int:
    """Run the goal and print its line; 0 where it is met."""
    began = time.monotonic()
    count = Count()
    folder = Path(tempfile.mkdtemp(prefix="r12-"))
    for schema in SCHEMAS:
        check_store(schema, count, folder / f"schema-{schema}")
    met = not count.wrong and count.stores == len(SCHEMAS) > 0 and count.kills > 0
    for line in count.wrong[:20]:
        print(line)
    if met:
        shutil.rmtree(folder)
    else:
        print(f"kept in {folder}; again: R12_KILLS={KILLS} python {__file__}")
    print(
        f"R12 old stores: stores={count.stores} kills={count.kills} cut-copies={count.cut_copies} "
        f"exports={count.exports} ended={count.ended} differences={len(count.wrong)} "
        f"{time.monotonic() - began:.1f}s {'PASS' if met else 'FAIL'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
