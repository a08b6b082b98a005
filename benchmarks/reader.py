"""What do readers cost a holder: short ones, an export that scans all, one that got stuck?

A session appends an entry and changes a document in each commit, with a flush, while other
processes read the same file: nobody, four that read pages of the history in a loop, one that scans
every entry again and again in reads of a thousand rows (as an export does), and one whose read
transaction stays open, so that the log cannot be used again. The four parts take turns. What is
compared is the time of a commit with readers to that without, in the same round. At the end the
stuck reader leaves, and the log must shrink by itself.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

import apsw
import trio
from _processes import Process, tell
from _raw import Stopwatch, Table, percentile
from commit_line import commit_body, open_session, prepare

from pidurable.session import _service
from pidurable.session._session import Session
from pidurable.storage import SqliteStorage

ROUNDS = 7
COMMITS = 600
ENTRIES = 50_000
SHORT_ENTRIES = 5_000
SHORT_COMMITS = 150
READERS = 4
PARTS = ("none", "short", "scan", "stuck")
LOG_BYTES = 256 * 2**20
"""How large the log is made grow behind the stuck reader."""
SHORT_LOG_BYTES = 48 * 2**20


# --- readers ------------------------------------------------------------------------------------


def read_pages(path: Path, seconds: float) -> int:
    """Read the newest page again and again, as somebody does who looks; returns how often."""
    storage = SqliteStorage(path, create=False, read_only=True)
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        storage.entries(1, limit=100, reverse=True)
        count += 1
        time.sleep(0.002)
    storage.close()
    return count


def scan_all(path: Path, seconds: float) -> int:
    """Read every entry in pages, again and again; returns how many rows."""
    storage = SqliteStorage(path, create=False, read_only=True)
    until, count, after = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        rows = storage.entries(1, after=after, limit=1_000)
        count += len(rows)
        after = rows[-1].id if rows else 0
    storage.close()
    return count


def serve_reads(role: str, path: Path) -> None:
    """Read for as many seconds as each line of the input says."""
    for line in sys.stdin:
        work = {"short": read_pages, "scan": scan_all}[role]
        tell({"ready": True})
        tell({"count": work(path, float(line))})


def get_stuck(path: Path) -> None:
    """Keep a read open from each line of the input to the next one."""
    while sys.stdin.readline():
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        connection.execute("begin")
        connection.execute("select count(*) from session").fetchall()
        tell({"ready": True})
        sys.stdin.readline()
        connection.close()
        tell({"left": True})


# --- the holder ---------------------------------------------------------------------------------


def size_of(log: Path) -> int:
    return log.stat().st_size


async def commits(session: Session, conversation: int, count: int) -> list[float]:
    """Microseconds of each commit, one after the other."""
    taken = []
    for number in range(count):
        watch = Stopwatch()
        await session.run(session.transaction(), commit_body(conversation, number))
        taken.append(watch.seconds() * 1e6)
    return taken


async def fill(session: Session, conversation: int, count: int) -> None:
    for _ in range(0, count, 500):

        def body(tx: object) -> None:
            for number in range(500):
                commit_body(conversation, number)(tx)  # type: ignore[arg-type]

        await session.run(session.transaction(flush=False), body)


async def grow(session: Session, conversation: int, log: Path, size: int) -> None:
    """Write until the log is so large, which it becomes only where somebody keeps it."""
    text = "x" * 60_000

    def body(tx: object) -> None:
        for _ in range(30):
            tx.append(conversation, text, kind="bench.bulk")  # type: ignore[attr-defined]

    written = 0
    while size_of(log) < size and written < 4 * size:
        await session.run(session.transaction(flush=False), body)
        written += 30 * len(text)


async def measure(folder: Path, *, entries: int, count: int, log_bytes: int) -> None:
    path, table = folder / "s", Table()
    _service.WAL_BYTES_WARN = min(_service.WAL_BYTES_WARN, log_bytes // 2)
    log = path.with_name("s-wal")
    async with open_session(path, "power") as session:
        [conversation] = await prepare(session, 1)
        await fill(session, conversation, entries)
        readers = {
            "short": [Process(__file__, "--read", "short", path) for _ in range(READERS)],
            "scan": [Process(__file__, "--read", "scan", path)],
            "stuck": [Process(__file__, "--stuck", path)],
        }
        try:
            await commits(session, conversation, count)
            for number in range(ROUNDS):
                for part in PARTS if number % 2 == 0 else reversed(PARTS):
                    seconds = 3600.0 if part == "stuck" else count * 0.0006 + 0.5
                    for process in readers.get(part, ()):
                        await trio.to_thread.run_sync(process.ask, str(seconds))
                    taken = await commits(session, conversation, count)
                    table.add(f"{part}: commit, us", percentile(taken, 0.5))
                    table.add(f"{part}: p99, us", percentile(taken, 0.99))
                    for process in readers.get(part, ()):
                        if part == "stuck":
                            await trio.to_thread.run_sync(process.ask, "leave")
                        else:
                            await trio.to_thread.run_sync(process.hear)
            stuck = readers["stuck"][0]
            await trio.to_thread.run_sync(stuck.ask, "stay")
            await grow(session, conversation, log, log_bytes)
            table.add("the log behind a stuck reader, MiB", size_of(log) / 2**20)
            taken = await commits(session, conversation, count)
            table.add("behind it: commit, us", percentile(taken, 0.5))
            table.add("behind it: p99, us", percentile(taken, 0.99))
            await trio.to_thread.run_sync(stuck.ask, "leave")
            watch = Stopwatch()
            with trio.move_on_after(30):
                while size_of(log) > _service.WAL_BYTES_WARN:  # noqa: ASYNC110 - nothing tells
                    await trio.sleep(0.05)
            table.add("shrunk after, s", watch.seconds())
            table.add("the log then, MiB", size_of(log) / 2**20)
        finally:
            for process in (each for some in readers.values() for each in some):
                process.kill()
    report(table)


def report(table: Table) -> None:
    table.show()
    ratios = {
        part: table.ratio(f"{part}: commit, us", "none: commit, us")
        for part in PARTS
        if part != "none"
    }
    tails = {
        part: table.ratio(f"{part}: p99, us", "none: p99, us") for part in PARTS if part != "none"
    }
    facts = [f"{part}={ratios[part]:.2f} {part}_p99={tails[part]:.2f}" for part in ratios]
    large = table.median("behind it: commit, us") / table.median("none: commit, us")
    log_mib = table.median("the log behind a stuck reader, MiB")
    left = table.median("the log then, MiB")
    print(
        f"reader: {' '.join(facts)} large_log={large:.2f} log_mib={log_mib:.0f} "
        f"after_mib={left:.0f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help=f"{SHORT_ENTRIES:,} entries")
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--stuck", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read is not None:
        serve_reads(given.read[0], Path(given.read[1]))
        sys.exit()
    if given.stuck is not None:
        get_stuck(given.stuck)
        sys.exit()
    logging.getLogger("pidurable").addHandler(logging.StreamHandler(sys.stdout))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if given.short:
            trio.run(
                lambda: measure(
                    place, entries=SHORT_ENTRIES, count=SHORT_COMMITS, log_bytes=SHORT_LOG_BYTES
                )
            )
        else:
            trio.run(lambda: measure(place, entries=ENTRIES, count=COMMITS, log_bytes=LOG_BYTES))
