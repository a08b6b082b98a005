"""R4: a disk that is really full loses nothing, faults nothing, and work goes on when it has room.

Workload W runs in this process, and at its n-th batch the room ends: either SQLite may take no more
pages (`max_page_count`, which it reports as a full disk) or the system lets no file grow
(RLIMIT_FSIZE, an I/O error to it, and as certain). The room comes back while the line still tries
again, or only after it has given up and the host was told. Then:

* every batch that was acknowledged is stored, and no refused one is;
* the same session goes on;
* W comes to the same end, so no task was faulted by the disk.

    python tests/verify/disk_full.py
    python tests/verify/disk_full.py --place 17 --kind pages --long

The limit of a file's size counts for the whole process: run it as a program of its own.
`--control` plants a bug, and it must then say FAIL.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import attrs
import trio
from trio.testing import MockClock
from watched_storage import Journal, WatchedStorage
from workload import LIFE_SECONDS, _Workload, opened
from workload_scene import EXPECTED_END, dump_workload, ledger_of, play_in_own_folder, quiet

from pidurable.errors import SessionPoisonedError, StorageRefusedError
from pidurable.storage import Batch, SqliteStorage

PLACES = int(os.environ.get("VERIFY_R4_PLACES", "20"))
KINDS = ("pages", "size")
SHORT, LONG = 3, 60
"""After so many refusals there is room again. The line gives up after about 36 of them."""
LIVES_MAX = 4


class FillingStorage(WatchedStorage):
    """A watched storage whose disk is full from one batch on, until it has refused for a while."""

    def __init__(self, inner: SqliteStorage, journal: Journal, one: Run) -> None:
        super().__init__(inner, journal)
        self._sqlite = inner
        self._one = one

    def apply(self, batch: Batch) -> None:
        one = self._one
        one.batches += 1
        if one.batches == one.place:
            self._fill()
        try:
            super().apply(batch)
        except StorageRefusedError:
            one.refusals += 1
            if one.refusals >= one.until:
                self.make_room()
            elif one.planted:
                self.journal.acked = batch.seq
                return
            raise

    def _fill(self) -> None:
        if self._one.kind == "pages":
            pages = self._sqlite._writer.execute("pragma page_count").get
            self._sqlite._writer.execute(f"pragma max_page_count = {pages}")
        else:
            limit_files(os.stat(f"{self.store}-wal").st_size)

    def make_room(self) -> None:
        if self._one.kind == "pages":
            self._sqlite._writer.execute("pragma max_page_count = 1073741823")
        else:
            limit_files(None)


def limit_files(size: int | None) -> None:
    """Let no file of this process grow beyond a size; None takes the limit away."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))


@attrs.define(eq=False)
class Run:
    """One run of W on a disk that fills."""

    path: str
    kind: str
    place: int
    until: int
    planted: bool = False
    batches: int = 0
    refusals: int = 0
    told: int = 0
    """How often the host was told that the storage refuses."""
    poisoned: int = 0
    problems: list[str] = attrs.Factory(list)

    @property
    def met(self) -> bool:
        """Whether the end of the room was met."""
        return bool(self.refusals or self.poisoned)

    def play(self) -> None:
        """Run W, in as many lives as it takes."""
        journal = Journal(self.path)
        for life in range(LIVES_MAX):
            journal.life = life
            try:
                with quiet():
                    trio.run(self._life, journal, clock=MockClock(autojump_threshold=0))
            except SessionPoisonedError:
                self.poisoned += 1
                self.problems.append("the session was poisoned by what is certain")
            else:
                break
            finally:
                limit_files(None)
        else:
            self.problems.append(f"it does not come to an end in {LIVES_MAX} lives")
        self.problems += journal.differences + journal.undocumented
        if (found := dump_workload(self.path)) != EXPECTED_END:
            self.problems.append(f"another end: {found}"[:2_000])

    async def _life(self, journal: Journal) -> None:
        inner = SqliteStorage(self.path, uuid="full", created_us=1)
        storage = FillingStorage(inner, journal, self)
        ledger = ledger_of(self.path)
        async with opened(storage, ledger, life=journal.life) as harness:
            with trio.fail_after(LIFE_SECONDS):
                while True:
                    try:
                        await _Workload(harness, ledger).run()
                    except StorageRefusedError:
                        self.told += 1
                        await trio.sleep(5)
                    else:
                        return


@attrs.define(eq=False)
class Report:
    """What was played, and what was found."""

    seed: int
    places: int = 0
    met: int = 0
    unnoticed: int = 0
    told: int = 0
    restarts: int = 0
    problems: list[str] = attrs.Factory(list)
    seconds: float = 0.0

    def line(self) -> str:
        """The last line: figures, and whether that is enough."""
        passed = self.met and self.unnoticed and self.told and not self.problems
        return (
            f"R4 disk full: places={self.places} met={self.met} unnoticed={self.unnoticed} "
            f"told={self.told} restarts={self.restarts} differences={len(self.problems)} "
            f"seed={self.seed} {self.seconds:.1f}s {'PASS' if passed else 'FAIL'}"
        )


def run(*, places: int, seed: int = 0, planted: bool = False) -> Report:
    """Fill the disk in so many places of W, in turn for a short and for a long time."""
    report = Report(seed)
    started = time.perf_counter()
    healthy = play_at("pages", sys.maxsize, SHORT)
    drawn = random.Random(seed).sample(range(2, healthy.batches), places)
    for number, place in enumerate(sorted(drawn)):
        kind, until = KINDS[number // 2 % 2], (SHORT, LONG)[number % 2]
        one = play_at(kind, place, until, planted=planted)
        report.places += 1
        report.met += one.met
        report.unnoticed += bool(one.met and not one.told and not one.poisoned)
        report.told += one.told > 0
        report.restarts += one.poisoned
        again = f"--kind {kind} --place {place}{' --long' if until == LONG else ''}"
        report.problems += [f"{again}: {problem}" for problem in one.problems]
    report.seconds = time.perf_counter() - started
    return report


def play_at(kind: str, place: int, until: int, *, planted: bool = False) -> Run:
    """Play one run in a folder of its own."""
    return play_in_own_folder(
        lambda store: Run(store, kind, place, until, planted), what=f"{kind} {place}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print what was found and the goal's line; 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, default=PLACES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default="pages")
    parser.add_argument("--place", type=int, help="this batch alone")
    parser.add_argument("--long", action="store_true", help="until the line has given up")
    parser.add_argument("--control", action="store_true", help="acknowledge what was refused")
    given = parser.parse_args(arguments)
    with contextlib.suppress(AttributeError):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if given.place is not None:
        until = LONG if given.long else SHORT
        one: Any = play_at(given.kind, given.place, until, planted=given.control)
        print(f"refusals={one.refusals} told={one.told} poisoned={one.poisoned}", *one.problems)
        return int(bool(one.problems))
    report = run(places=given.places, seed=given.seed, planted=given.control)
    for problem in report.problems[:20]:
        print(problem[:1_000])
    print(report.line())
    return int(not report.line().endswith("PASS"))


if __name__ == "__main__":
    sys.exit(main())
