"""How fast is a session of a million entries exported and imported, and in how much memory?

Each is done by a process of its own, so that its peak of memory is its own. References in the same
rounds: `select *` of every table, encoded as JSON and hashed, which an export must do at least; the
same rows inserted by hand in transactions of a thousand, which an import must; and SQLite's backup.
`flat` is the peak of a session ten times as large in relation to the smaller one's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import tempfile
from pathlib import Path

import apsw
import trio
from _processes import Process, tell
from _raw import Stopwatch, Table

from pidurable import export_session, import_session
from pidurable.records import _json
from pidurable.storage import Batch, EntryRow, HolderClaim, Op, SqliteStorage

ENTRIES = 1_000_000
SHORT_ENTRIES = 50_000
ROUNDS = 2
TEXT = "The quick brown fox jumps over the lazy dog. " * 5
CONVERSATIONS = 100
BATCH = 1_000


def fill(path: Path, count: int) -> None:
    """A session with so many entries, seeded through the contract."""
    storage = SqliteStorage(path)
    claim = HolderClaim(holder_id="b", host="b", pid=1, at_us=0, lease_seconds=15.0)
    epoch = storage.acquire(claim, takeover=False).epoch
    made = [
        (Op.CONVERSATION, (n, f"u{n}", None, None, None, f"k{n}", "", 0))
        for n in range(1, CONVERSATIONS + 1)
    ]
    storage.apply(Batch(epoch, 1, CONVERSATIONS + 1, False, made))
    for first in range(0, count, BATCH):
        rows = [(Op.ENTRY, entry(first + n)) for n in range(min(BATCH, count - first))]
        next_id = CONVERSATIONS + first + BATCH + 1
        storage.apply(Batch(epoch, 2 + first // BATCH, next_id, False, rows))
        if first % (50 * BATCH) == 0:
            storage.checkpoint()
    storage.apply(Batch(epoch, 3 + count // BATCH, CONVERSATIONS + count + BATCH, True, []))
    storage.release(epoch)
    storage.close()


def entry(number: int) -> EntryRow:
    """An entry of about 300 bytes."""
    messages = _json.dumps([{"role": "user", "blocks": [{"type": "text", "text": TEXT}]}])
    id, seq = CONVERSATIONS + 1 + number, 2 + number // BATCH
    conversation = 1 + number % CONVERSATIONS
    return EntryRow(id, conversation, seq, "pi.user", None, None, None, messages, None, 1_000)


# --- what a process does ----------------------------------------------------------------------


def export(store: Path, file: Path) -> None:
    trio.run(lambda: export_session(store, file, overwrite=True))


def import_(store: Path, file: Path) -> None:
    trio.run(lambda: import_session(file, store, as_copy=False))


def select(store: Path, file: Path) -> None:
    """By hand: every row of every table as JSON, hashed and written."""
    connection = apsw.Connection(str(store), flags=apsw.SQLITE_OPEN_READONLY)
    digest = hashlib.sha256()
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    names = connection.execute("select name from sqlite_schema where type = 'table'").fetchall()
    with file.open("wb") as stream:
        for (name,) in names:
            for row in connection.execute(f"select * from {name}"):
                line = f"{encode(row)}\n".encode()
                digest.update(line)
                stream.write(line)


def insert(store: Path, file: Path) -> None:
    """By hand: the lines of an export, decoded once and inserted."""
    SqliteStorage(store).close()
    connection = apsw.Connection(str(store))
    connection.execute("pragma synchronous = normal")
    columns = EntryRow._fields
    places = ", ".join("?" * len(columns))
    statement = f"insert into entries ({', '.join(columns)}) values ({places})"
    rows = []
    with file.open("rb") as stream:
        for line in stream:
            fields = json.loads(line)
            if fields.get("record") == "entry":
                rows.append([fields[name] for name in columns])
            if len(rows) >= BATCH:
                with connection:
                    connection.executemany(statement, rows)
                rows = []
    with connection:
        connection.executemany(statement, rows)
    connection.close()


def backup(store: Path, file: Path) -> None:
    source, target = apsw.Connection(str(store)), apsw.Connection(str(file))
    with target.backup("main", source, "main") as copying:
        while not copying.done:
            copying.step(4_096)
    target.close()


ROLES = {
    "export": export,
    "import": import_,
    "select": select,
    "insert": insert,
    "backup": backup,
}


def play(role: str, store: Path, file: Path) -> None:
    """What a process does: its role, and then it says what that took."""
    watch = Stopwatch()
    ROLES[role](store, file)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tell({"seconds": watch.seconds(), "peak_mib": peak / 1_024})


def timed(table: Table, role: str, count: int, store: Path, file: Path) -> None:
    """Let a process of its own play a role."""
    with Process(__file__, "--play", role, store, file) as process:
        heard = process.hear()
    table.add(f"{role}, {count:,} entries, records/s", (count + CONVERSATIONS) / heard["seconds"])
    table.add(f"{role}, {count:,} entries, peak MiB", heard["peak_mib"])


def measure(folder: Path, count: int) -> None:
    table = Table()
    for size in (count // 10, count):
        store, file = folder / f"{size}.sqlite", folder / f"{size}.jsonl"
        fill(store, size)
        places = {
            "export": (store, file),
            "select": (store, folder / "selected"),
            "backup": (store, folder / "copied"),
            "import": (folder / "imported", file),
            "insert": (folder / "inserted", file),
        }
        for number in range(ROUNDS):
            for roles in (("export", "select", "backup"), ("import", "insert")):
                for role in roles if number % 2 == 0 else reversed(roles):
                    timed(table, role, size, *places[role])
            for left in ("selected", "copied", "imported", "inserted"):
                (folder / left).unlink()
        print(f"{size:,} entries: the store has {store.stat().st_size:,} bytes", end=", ")
        print(f"its export {file.stat().st_size:,}")
    table.show()

    def rate(role: str) -> float:
        return table.median(f"{role}, {count:,} entries, records/s")

    def peak(role: str, size: int = count) -> float:
        return table.median(f"{role}, {size:,} entries, peak MiB")

    print(
        f"export_import: export={rate('export'):.0f} export_ratio="
        f"{rate('export') / rate('select'):.2f} export_mib={peak('export'):.0f}"
        f" export_flat={peak('export') / peak('export', count // 10):.2f}"
        f" import={rate('import'):.0f} import_ratio={rate('import') / rate('insert'):.2f}"
        f" import_mib={peak('import'):.0f}"
        f" import_flat={peak('import') / peak('import', count // 10):.2f}"
        f" backup_ratio={rate('export') / rate('backup'):.3f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_ENTRIES:,} entries")
    parser.add_argument("--play", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play is not None:
        play(given.play[0], Path(given.play[1]), Path(given.play[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), SHORT_ENTRIES if given.short else ENTRIES)
