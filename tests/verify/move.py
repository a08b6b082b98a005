"""R14: what is exported and imported is the same session, on every pair of backends, or nothing.

Each generated session is written to memory and to SQLite by the same commits. Then, from each of
the two to each of the two: export, import as a move, export again. The bytes of all exports must be
equal, and the tables of each store are compared whole, read by a plain connection, so that what is
missing on both ways is missed too. As a copy everything but the uuids must be equal.

Then the file is cut at places, or one byte of it is changed, or the importing process is killed
after so many steps, or its disk is full: nothing may be left that could be taken for a session,
and the next import must make it whole.

    python tests/verify/move.py                 MOVE_SESSIONS=200 MOVE_KILLS=12 MOVE_LIVES=12
    python tests/verify/move.py --control read  a planted bug; must print FAIL
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import apsw
import attrs
import moved_lives
from move_sessions import SessionMaker

from pidurable.errors import ExportFileError, PidurableError
from pidurable.storage import (
    HolderClaim,
    MemoryStorage,
    SqliteStorage,
    Storage,
    _export_form as form,
    _import,
)
from pidurable.storage._contract import Op, RecordKind
from pidurable.storage._export import ExportReport, export_steps
from pidurable.storage._import import ImportOptions, ImportReport, import_steps
from pidurable.storage._places import Places

ResultT = TypeVar("ResultT")
CLAIM = HolderClaim(
    holder_id="move", host="here", pid=os.getpid(), at_us=1_760_000_000_000_000, lease_seconds=15.0
)
PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""What is tried here is not what the disk does, so the wait for it is saved."""
CUTS = 6
CHILD_ROWS = 7
"""So many records are a step of an import that is killed."""


def run(steps: Generator[Any, None, ResultT]) -> ResultT:
    """Drive a generator to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: ResultT = done.value
            return found


def export(source: str | Storage, file: Path) -> ExportReport:
    """Export to a new file."""
    return run(export_steps(source, str(file), overwrite=False, folder=None))


def import_(file: Path, target: Any, *, as_copy: bool = False) -> ImportReport:
    """Import into a new place."""
    return run(import_steps(str(file), target, options(as_copy=as_copy)))


def options(*, as_copy: bool = False) -> ImportOptions:
    """What imports here are told."""
    return ImportOptions(
        as_copy=as_copy,
        value_bytes_max=16 * 1024 * 1024,
        claim=CLAIM,
        new_uuid=lambda: str(uuid.uuid4()),
    )


Tables = dict[str, list[tuple[Any, ...]]]


def tables(store: Path) -> Tables:
    """Every row of every table, but for who holds the store."""
    connection = apsw.Connection(str(store))
    try:
        names = connection.execute("select name from sqlite_schema where type = 'table'")
        found: Tables = {}
        for (name,) in names.fetchall():
            if name not in ("holder", "heartbeat"):
                found[name] = sorted(connection.execute(f"select * from {name}"), key=repr)
    finally:
        connection.close()
    row = found["session"][0]
    found["session"] = [row[:3] + row[4:]]  # without the epoch
    return found


def everything(storage: MemoryStorage) -> Any:
    """The same of a storage in memory."""
    head, records = storage.everything()
    return head._replace(epoch=0), records


@attrs.define(eq=False)
class Score:
    """What was tried, and what went wrong."""

    sessions: int = 0
    records: int = 0
    cuts: int = 0
    changes: int = 0
    kills: int = 0
    full: int = 0
    lives: int = 0
    trimmed: int = 0
    golden: int = 0
    kinds: set[str] = attrs.Factory(set)
    differences: list[str] = attrs.Factory(list)
    half_stores: list[str] = attrs.Factory(list)
    began: float = attrs.Factory(time.monotonic)

    def differ(self, seed: int, what: str) -> None:
        """One more difference."""
        self.differences.append(f"seed {seed}: {what}")

    def lives_differ(self, what: str) -> None:
        """One more difference, of a session that was not generated."""
        self.differences.append(what)

    def line(self) -> str:
        """The line of the goal."""
        every_kind = len(self.kinds) == len(RecordKind)
        passed = self.sessions and every_kind and not self.differences and not self.half_stores
        return (
            f"R14 export-import: sessions={self.sessions} pairs=4 kinds={len(self.kinds)}"
            f" records={self.records} cuts={self.cuts} changes={self.changes} kills={self.kills}"
            f" full={self.full} lives={self.lives} trimmed={self.trimmed} golden={self.golden}"
            f" differences={len(self.differences)}"
            f" half_stores={len(self.half_stores)} seconds={time.monotonic() - self.began:.0f}"
            f" {'PASS' if passed else 'FAIL'}"
        )


# --- one session ------------------------------------------------------------------------------


def play(seed: int, folder: Path, score: Score) -> None:
    """Try everything on one session."""
    maker = SessionMaker(seed, size=Random(seed).choice((5, 20, 60)))
    memory = MemoryStorage(uuid=maker.uuid, created_us=maker.created_us)
    maker.fill(memory, CLAIM)
    sqlite = folder / "native"
    storage = SqliteStorage(sqlite, uuid=maker.uuid, created_us=maker.created_us)
    maker.fill(storage, CLAIM)
    storage.close()
    expected = folder / "memory.jsonl"
    report = export(memory, expected)
    export(str(sqlite), folder / "sqlite.jsonl")
    score.sessions += 1
    score.records += sum(report.records.values())
    score.kinds |= report.records.keys()
    if expected.read_bytes() != (folder / "sqlite.jsonl").read_bytes():
        score.differ(seed, "memory and SQLite are exported differently")
    for source in ("memory", "sqlite"):
        file = folder / f"{source}.jsonl"
        made = import_(file, MemoryStorage).storage
        assert isinstance(made, MemoryStorage)
        if everything(made) != everything(memory):
            score.differ(seed, f"{source} to memory: other records")
        store = folder / f"{source}.store"
        import_(file, str(store))
        if tables(store) != tables(sqlite):
            score.differ(seed, f"{source} to SQLite: other rows")
        for name, again in (("memory", made), ("sqlite", str(store))):
            export(again, folder / f"{source}-{name}.jsonl")
            if (folder / f"{source}-{name}.jsonl").read_bytes() != expected.read_bytes():
                score.differ(seed, f"{source} to {name}: other bytes")
    copy(seed, expected, sqlite, folder / "copy.store", score)


def copy(seed: int, file: Path, original: Path, store: Path, score: Score) -> None:
    """Everything but the uuids is as it was, and no uuid is."""
    import_(file, str(store), as_copy=True)
    before, after = tables(original), tables(store)
    kept = set()
    for name, place in (("session", 1), ("conversations", 1)):
        olds, news = (sorted(each[name], key=lambda row: row[0]) for each in (before, after))
        kept |= {row[place] for row in olds} & {row[place] for row in news}
        for each in (before, after):
            each[name] = sorted((row[:place] + row[place + 1 :] for row in each[name]), key=repr)
    if before != after:
        score.differ(seed, "as a copy: other rows")
    if kept:
        score.differ(seed, f"as a copy: {len(kept)} uuids were kept")


# --- files that are cut or changed ------------------------------------------------------------


def spoil(seed: int, file: Path, folder: Path, score: Score) -> None:
    """Cut the file at places and change bytes of it; each time nothing may be made."""
    random = Random(~seed)
    data = file.read_bytes()
    ends = [place for place, byte in enumerate(data, 1) if byte == 10]
    cuts = {0, len(data) - 1, *random.sample(ends[:-1], min(2, len(ends) - 1))}
    cuts |= {random.randrange(len(data)) for _ in range(CUTS - len(cuts))}
    for cut in cuts:
        score.cuts += 1
        refuse(seed, f"cut at {cut}", data[:cut], folder, score)
    for _ in range(CUTS // 2):
        score.changes += 1
        place = random.randrange(len(data))
        changed = bytearray(data)
        changed[place] ^= 1 << random.randrange(8)
        refuse(seed, f"bit at {place}", bytes(changed), folder, score)
    score.changes += 1
    refuse(seed, "zeros behind", data + bytes(1_000), folder, score)  # C075


def refuse(seed: int, what: str, data: bytes, folder: Path, score: Score) -> None:
    """Import what must be refused."""
    file = folder / "spoiled.jsonl"
    file.write_bytes(data)
    before = names(folder)
    try:
        import_(file, str(folder / "spoiled.store"))
    except ExportFileError:
        pass
    else:
        score.half_stores.append(f"seed {seed}: {what} was imported")
        (folder / "spoiled.store").unlink()
    if names(folder) != before:
        left = sorted(names(folder) - before)
        score.half_stores.append(f"seed {seed}: {what} left {left}")


def names(folder: Path) -> set[str]:
    """What lies in a folder."""
    return {each.name for each in folder.iterdir()}


# --- processes that are killed, or have no room -----------------------------------------------


def kill(seed: int, file: Path, folder: Path, at: int, score: Score) -> bool:
    """Kill an import after some steps, and import again; False where it had come to its end."""
    store = folder / f"killed-{at}"
    before = names(folder)
    code = child("--kill-at", str(at), str(file), str(store))
    if code == 0:
        store.unlink()
        return False
    score.kills += 1
    if code != -signal.SIGKILL:
        score.differ(seed, f"the import that was to be killed at {at} ended with {code}")
    whole(seed, f"killed at {at}", file, store, before, score)
    return True


def fill_up(seed: int, file: Path, folder: Path, room: int, score: Score) -> None:
    """Import with too little room for files; then with enough."""
    store = folder / f"full-{room}"
    before = names(folder)
    code = child("--room", str(room), str(file), str(store))
    score.full += 1
    if code == 0:
        score.differ(seed, f"an import into {room} bytes succeeded")
    if names(folder) != before:
        score.half_stores.append(f"room of {room} left {sorted(names(folder) - before)}")
    whole(seed, f"room of {room}", file, store, before, score)


def whole(seed: int, what: str, file: Path, store: Path, before: set[str], score: Score) -> None:
    """Nothing was made; the next import makes it, and clears the rest away."""
    if store.exists():
        score.half_stores.append(f"seed {seed}: {what}: {store.name} is there")
        store.unlink()
    import_(file, str(store))
    again = file.with_suffix(".again")
    export(str(store), again)
    if again.read_bytes() != file.read_bytes():
        score.differ(seed, f"{what}: the next import differs")
    again.unlink()
    left = names(folder := store.parent) - before - {store.name}
    left = {name for name in left if not name.endswith(("-wal", "-shm"))}
    if left:
        score.half_stores.append(f"seed {seed}: {what}: {sorted(left)} are left in {folder.name}")


def child(*arguments: str) -> int:
    """Run this file as the process that imports."""
    command = [sys.executable, __file__, "--child", *arguments]
    return subprocess.run(command, timeout=60, check=False, stderr=subprocess.DEVNULL).returncode


def be_child(kill_at: int | None, room: int | None, file: str, store: str) -> int:
    """Import, and die on the way."""
    _import.BATCH_ROWS = CHILD_ROWS
    if room is not None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    steps = import_steps(file, store, options())
    put = Places.put

    def put_or_die(places: Places, name: str, *, overwrite: bool = False) -> None:
        if kill_at == -1:
            os.kill(os.getpid(), signal.SIGKILL)
        put(places, name, overwrite=overwrite)
        if kill_at == -2:
            raise SystemExit(0)

    Places.put = put_or_die  # type: ignore[method-assign]
    with contextlib.suppress(PidurableError):
        for number, _ in enumerate(steps):
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return 0
    return 1


# --- planted bugs -----------------------------------------------------------------------------


@contextlib.contextmanager
def planted(control: str | None) -> Iterator[None]:
    """Put a bug into the product for as long as the block lasts."""
    if control is None:
        yield
        return
    place, name, bug = CONTROLS[control]
    right = getattr(place, name)
    setattr(place, name, bug(right))
    try:
        yield
    finally:
        setattr(place, name, right)


def _loses_column(right: Callable[..., bytes]) -> Callable[..., bytes]:
    """A column is left out of every line, on both ways."""

    def record_line(each: form.RecordForm, row: tuple[Any, ...]) -> bytes:
        if each.kind is RecordKind.SUBMISSION:
            place = each.names.index("detail")
            row = (*row[:place], None, *row[place + 1 :])
        return right(each, row)

    return record_line


def _loses_read(right: Callable[..., Any]) -> Callable[..., Any]:
    """A signal that was read is unread again."""

    def inserts(kind: RecordKind, row: tuple[Any, ...]) -> list[Any]:
        return [write for write in right(kind, row) if write[0] is not Op.SIGNAL_READ]

    return inserts


def _loses_retired(right: Callable[..., Any]) -> Callable[..., Any]:
    """A document that ended lives again."""

    def inserts(kind: RecordKind, row: tuple[Any, ...]) -> list[Any]:
        return [write for write in right(kind, row) if write[0] is not Op.DOCUMENT_RETIRE]

    return inserts


def _takes_halves(right: Callable[..., Any]) -> Callable[..., Any]:
    """A file that ends without its last line is taken for a whole one."""

    def record(lines: Any, counts: dict[str, int]) -> Any:
        try:
            return right(lines, counts)
        except _import.WrongLineError as error:
            if "was cut" in error.problem:
                return None
            raise

    return record


def _keeps_uuid(right: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a conversation keeps its uuid."""
    return lambda copying, kind, row: row


CONTROLS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "column": (form, "record_line", _loses_column),
    "read": (_import, "_inserts", _loses_read),
    "retired": (_import, "_inserts", _loses_retired),
    "half": (_import._Lines, "record", _takes_halves),
    "uuid": (_import._Copying, "row", _keeps_uuid),
}
"""By name, where a bug is planted and what it makes of what is right."""


# --- the run ----------------------------------------------------------------------------------


def verify(
    *, sessions: int, kills: int, lives: int, seed: int, control: str | None = None
) -> Score:
    """Play so many sessions, kill so many imports, and go on with so many lives."""
    score = Score()
    with planted(control):
        for number in range(seed, seed + sessions):
            with tempfile.TemporaryDirectory(prefix="move-", dir=PLACE) as name:
                folder = Path(name)
                try:
                    play(number, folder, score)
                    spoil(number, folder / "memory.jsonl", folder, score)
                except PidurableError as error:
                    score.differ(number, f"{type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory(prefix="move-", dir=PLACE) as name:
        if kills:
            crash(seed, kills, Path(name), score)
    with tempfile.TemporaryDirectory(prefix="move-", dir=PLACE) as name:
        if lives:
            score.lives = moved_lives.live_on(Path(name), lives, export, _moved, score.lives_differ)
            score.trimmed = moved_lives.trimmed(Path(name), export, _moved, score.lives_differ)
            score.golden = moved_lives.golden_files(Path(name), export, _moved, score.lives_differ)
    return score


def _moved(file: Path, store: Path, as_copy: bool) -> ImportReport:
    return import_(file, str(store), as_copy=as_copy)


def crash(seed: int, kills: int, folder: Path, score: Score) -> None:
    """Kill imports of one session at places all over it."""
    maker = SessionMaker(seed, size=60)
    memory = MemoryStorage(uuid=maker.uuid, created_us=maker.created_us)
    maker.fill(memory, CLAIM)
    file = folder / "session.jsonl"
    records = sum(export(memory, file).records.values())
    steps = records // CHILD_ROWS
    kill(seed, file, folder, -1, score)
    for number in range(kills - 1):
        if not kill(seed, file, folder, number * steps // max(1, kills - 1), score):
            score.differ(seed, f"the import had come to its end at step {number}")
    for room in (4_096, 40_000, file.stat().st_size // 2):
        fill_up(seed, file, folder, room, score)


def main(arguments: list[str] | None = None) -> int:
    """Run it and print the line of the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", choices=CONTROLS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--room", type=int, help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        return be_child(given.kill_at, given.room, *given.paths)
    score = verify(
        sessions=int(os.environ.get("MOVE_SESSIONS", "20")),
        lives=int(os.environ.get("MOVE_LIVES", "3")),
        kills=int(os.environ.get("MOVE_KILLS", "4")),
        seed=int(os.environ.get("MOVE_SEED", "0")),
        control=given.control,
    )
    for problem in [*score.differences, *score.half_stores][:20]:
        print(f"  {problem}")
    print(score.line())
    return 0 if score.line().endswith("PASS") else 1


if __name__ == "__main__":
    sys.exit(main())
