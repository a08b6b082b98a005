"""Sessions that really lived: moved and copied in the middle of their work, and then gone on with.

Workload W is exported beside its working holder at commits all over it. Each file is imported, as
the holder had never been, and W goes on there, in its next life, with the outside world as it was
at that commit: a move must come to the end that was written down, with no effect twice. A copy
comes to the same end too, and none of its effects has a key that the original used. Golden stores
of older schemas go the same way as far as their bytes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import attrs
import trio
from outside_ledger import Ledger, Line
from trio.testing import MockClock
from workload import Ack, opened, play
from workload_expected import EFFECTS, EXPECTED
from workload_looks import canonical, first_difference

from pidurable import ImportReport
from pidurable.storage import SqliteStorage

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

from golden_stores import SCHEMAS, unpack

Export = Callable[[str, Path], object]
Import = Callable[[Path, Path, bool], ImportReport]
Differ = Callable[[str], None]


@attrs.define(eq=False)
class _Exporting:
    """Exports the store of W at some of its commits, while its holder waits for nothing."""

    store: Path
    ledger: Ledger
    export: Export
    wanted: frozenset[int]
    commits: int = 0
    taken: dict[int, tuple[Path, tuple[Line, ...]]] = attrs.Factory(dict)

    def append(self, ack: Ack) -> None:
        self.commits += 1
        if self.commits in self.wanted:
            file = self.store.with_name(f"w-{self.commits}.jsonl")
            self.export(str(self.store), file)
            self.taken[self.commits] = file, self.ledger.lines


def live_on(folder: Path, lives: int, export: Export, import_: Import, differ: Differ) -> int:
    """Move and copy W at so many of its commits; returns how many lives were gone on with."""
    logging.getLogger("pidurable").setLevel(logging.CRITICAL)  # what fails in W is meant to
    first = _Exporting(folder / "count.sqlite", Ledger(), export, frozenset())
    play(first.store, first.ledger, acks=first)
    step = max(1, first.commits // max(1, lives))
    wanted = frozenset(range(step // 2 + 1, first.commits, step))
    taking = _Exporting(folder / "w.sqlite", Ledger(), export, wanted)
    play(taking.store, taking.ledger, acks=taking)
    if first_difference(EXPECTED, _looked(taking.store)) is not None:
        differ("W came to another end while it was exported")
    for commit, (file, lines) in taking.taken.items():
        moved, ledger = folder / f"moved-{commit}", Ledger(lines=lines)
        import_(file, moved, False)
        play(moved, ledger, life=1)
        difference = first_difference(EXPECTED, _looked(moved))
        if difference is not None:
            differ(f"W moved at commit {commit}: {difference}")
        if ledger.effects() != EFFECTS or ledger.duplicates():
            differ(f"W moved at commit {commit}: effects twice: {ledger.duplicates()}")
        copied, ledger = folder / f"copied-{commit}", Ledger(lines=lines)
        report = import_(file, copied, True)
        play(copied, ledger, life=1)
        # What the host itself has named is the same for both; what tasks name is not.
        # A payment in W has put its key into its checkpoint, and so into the past of both.
        new = [line.key for line in ledger.lines[len(lines) :] if not line.key.endswith(":pay")]
        again = [key for key in new if report.origin in key]
        if again:
            differ(f"W copied at commit {commit}: it used {again[0]} of the original")
    return len(taking.taken)


def _looked(store: Path) -> object:
    storage = SqliteStorage(store, create=False)
    try:
        return canonical(storage)
    finally:
        storage.close()


def trimmed(folder: Path, export: Export, import_: Import, differ: Differ) -> int:
    """Remove what ended in W, and move it as of each commit of the removal; returns how many."""
    taking = _Exporting(folder / "trimmed.sqlite", Ledger(), export, frozenset(range(1, 1_000)))
    play(taking.store, taking.ledger)

    async def remove() -> None:
        async with opened(taking.store, taking.ledger, life=1, acks=taking) as harness:
            await harness.gc(older_than=timedelta(0))

    trio.run(remove, clock=MockClock(autojump_threshold=0))
    for commit, (file, _) in taking.taken.items():
        moved, again = folder / f"trimmed-{commit}", folder / f"trimmed-{commit}.jsonl"
        import_(file, moved, False)
        export(str(moved), again)
        if file.read_bytes() != again.read_bytes():
            differ(f"W moved at commit {commit} of its removal: other bytes")
    last = max(taking.taken, default=0)
    if not last:
        differ("nothing of W was removed")
    elif b'{"record":"stub"' not in taking.taken[last][0].read_bytes():
        differ("the removal of W has left no stub")
    return len(taking.taken)


def golden_files(folder: Path, export: Export, import_: Import, differ: Differ) -> int:
    """Move each golden store, of whatever schema; returns how many there are."""
    for schema in SCHEMAS:
        store = unpack(schema, folder / f"golden-{schema}")
        before = store.read_bytes()
        files = [folder / f"golden-{schema}-{number}.jsonl" for number in range(2)]
        export(str(store), files[0])
        import_(files[0], folder / f"golden-moved-{schema}", False)
        export(str(folder / f"golden-moved-{schema}"), files[1])
        if files[0].read_bytes() != files[1].read_bytes():
            differ(f"golden store {schema}: other bytes")
        if store.read_bytes() != before:
            differ(f"golden store {schema} was changed by its export")
    return len(SCHEMAS)
