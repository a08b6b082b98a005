"""R1: whatever a crash at any write leaves is a whole store that lost nothing it had promised.

    python tests/verify/crash_images.py                        the figures of CI
    python tests/verify/crash_images.py --images 20000         every cut of the workload
    python tests/verify/crash_images.py --control off          a broken storage: must be found
    python tests/verify/crash_images.py --kept FOLDER          one image that was kept, again

The workload is recorded below SQLite, from the creation of its store to the close, with its log
moved now and then. After each operation the power may have failed: of what was not synced yet,
nothing is there, or all, or some writes, or some sectors of them, or all but a part of the last
write, or that one is garbage. The same for openings after such crashes, for migrations from older
schemas, for retention, and for a store that promises to survive its process only.

A disk that spoils what lies beside a write in the same sector is no disk that SQLite is made for.
For one, open the store through a VFS whose files do not claim SQLITE_IOCAP_POWERSAFE_OVERWRITE (as
`psow=0` does): the recording `bad disk` shows that nothing is lost then, and the control
`trust-sectors` that something is lost without.

Environment: `R1_IMAGES`, `R1_SEED`, `R1_PROCESSES` are the defaults of the options.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import trio
from crash_checks import PROBLEMS, Checker, Problem, check_kept, keep, task_for
from crash_recordings import (
    STORE,
    Recording,
    record_gc,
    record_migration,
    record_recovery,
    record_workload,
    scratch_folder,
)
from recording_vfs import Disk

from pidurable.storage import SqliteStorage
from pidurable.storage._migrate import SCHEMA

RECOVERIES = 8
"""Openings after a crash that are recorded themselves."""
LONG = 1_000
"""Operations of a recording of the whole workload."""
CONTROL_IMAGES = 600
IMAGES_PER_CUT = 6.5
OLD_INDEX_SHARE = 0.25
INDEX_BYTES = 32 * 1_024
KEPT_MAX = 5
RARE = (
    "torn last sector",
    "garbled last write",
    "sectors of writes lost",
    "creation cut",
    "commit cut",
    "checkpoint cut",
    "opening cut",
    "close cut",
    "recovery cut",
    "migration cut",
    "retention cut",
    "copy of a migration cut",
    "stored but not acknowledged",
    "progress lost",
    "sectors of a bad disk spoiled",
    "deleted file came back",
    "old index of the log",
    "journal rolled back",
    "log cut short",
    "process durability: suffix lost",
)
"""What must have occurred for the check to have said anything about it."""


def variants(
    disk: Disk, draw: random.Random, *, bad_disk: bool
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The images of one cut that a loss of power may leave, and what a dead process leaves."""
    yield "all", disk.everything()
    yield "none", disk.nothing()
    yield "subset", disk.subset(draw)
    yield "subset again", disk.subset(draw)
    yield "sectors", disk.subset(draw, sectors=True)
    torn, garbled = disk.torn(draw), disk.garbled(draw)
    # Where the last operation was no write there is nothing to tear.
    yield ("torn", torn) if torn is not None else ("third subset", disk.subset(draw))
    if garbled is not None:
        yield "garbled", garbled
    if f"{STORE}-wal" in disk.names and draw.random() < OLD_INDEX_SHARE:
        # A process that dies leaves the index of its log; after a loss of power it may hold
        # anything. Nobody may believe it who comes first.
        index = draw.choice((bytes(INDEX_BYTES), draw.randbytes(INDEX_BYTES)))
        yield "all with an old index", {**disk.everything(), f"{STORE}-shm": index}
    spoiled = disk.garbled_sectors(draw) if bad_disk else None
    if spoiled is not None:
        yield "garbled sectors", spoiled


@attrs.define
class Report:
    """What was checked, and what was found."""

    cuts: int = 0
    counts: Counter[str] = attrs.Factory(Counter)
    problems: Counter[str] = attrs.Factory(Counter)
    rare: Counter[str] = attrs.Factory(Counter)
    told: list[str] = attrs.Factory(list)

    def add(self, other: Report) -> None:
        self.cuts += other.cuts
        self.counts += other.counts
        self.problems += other.problems
        self.rare += other.rare
        self.told += other.told


def check_cuts(recording: Recording, cuts: list[int], seed: int, kept: Path) -> Report:
    """Check every image of some cuts of a recording."""
    report = Report(cuts=len(cuts))
    wanted = set(cuts)
    disk = recording.begin.copied()
    with scratch_folder() as folder:
        checker = Checker(folder)
        for cut in range(len(recording.operations) + 1):
            if cut:
                disk.do(recording.operations[cut - 1])
            if cut not in wanted:
                continue
            draw = random.Random(f"{seed}/{recording.name}/{cut}")
            whole = disk.everything()
            for variant, image in variants(disk, draw, bad_disk=recording.bad_disk):
                task = task_for(recording, cut, variant, process_only=variant.startswith("all"))
                problem, seq = checker.check(image, task)
                _count_rare(report.rare, recording, disk, cut, variant, (whole, image), seq)
                if problem is not None:
                    _tell(report, recording, cut, variant, problem, seed)
                    if len(report.told) <= KEPT_MAX:
                        place = kept / f"{recording.name}-{cut}-{variant.replace(' ', '-')}"
                        keep(image, task, problem, place)
                        command = f"python tests/verify/crash_images.py --kept {place}"
                        report.told.append(f"  kept: {place}\n  replay: {command}")
        report.counts += checker.counts
    return report


def _tell(
    report: Report, recording: Recording, cut: int, variant: str, problem: Problem, seed: int
) -> None:
    report.problems[problem.kind] += 1
    if len(report.told) > 2 * KEPT_MAX:
        return
    after = recording.operations[cut - 1] if cut else "nothing"
    labels = ", ".join(recording.labels_at(cut)) or "between calls"
    report.told.append(
        f"R1 {problem.kind}: seed {seed}, {recording.name}, cut {cut} (after {after}; {labels}), "
        f"{variant}: {problem.told}"
    )


def _count_rare(
    rare: Counter[str],
    recording: Recording,
    disk: Disk,
    cut: int,
    variant: str,
    images: tuple[dict[str, bytes], dict[str, bytes]],
    seq: int,
) -> None:
    whole, image = images
    labels = recording.labels_at(cut)
    name = recording.name
    last = disk.last
    rare["torn last sector"] += variant == "torn"
    rare["garbled last write"] += variant == "garbled"
    rare["sectors of a bad disk spoiled"] += variant == "garbled sectors"
    rare["sectors of writes lost"] += variant == "sectors" and image != whole
    rare["commit cut"] += "apply" in labels
    rare["checkpoint cut"] += "checkpoint" in labels
    rare["close cut"] += "close" in labels
    rare["opening cut"] += "acquire" in labels
    rare["creation cut"] += name == "workload" and "opening" in labels
    rare["recovery cut"] += name.startswith("recovery")
    if name.startswith("migration"):
        copying = last is not None and ".bak" in last.name
        rare["copy of a migration cut" if copying else "migration cut"] += 1
    rare["retention cut"] += name == "gc" and "apply" in labels
    old_index = f"{STORE}-shm" in image
    rare["old index of the log"] += old_index
    rare["deleted file came back"] += not old_index and any(each not in whole for each in image)
    rare["journal rolled back"] += any(each.endswith("-journal") for each in image)
    if seq < 0:
        return
    shown = recording.shown(cut)
    rare["stored but not acknowledged"] += seq > shown
    if seq < shown:
        which = "progress lost" if recording.power else "process durability: suffix lost"
        rare[which] += 1
    rare["log cut short"] += image != whole and any(each.endswith("-wal") for each in image)


# --- the whole of it --------------------------------------------------------------------------


def make_recordings(seed: int, only: str = "") -> list[Recording]:
    """Everything that is cut in pieces, or what has a name that begins so."""
    seed_trio(seed)
    workload = record_workload()
    made = [workload]
    if "process".startswith(only):
        made.append(record_workload("process", durability="process"))
    if "bad disk".startswith(only):
        made.append(record_workload("bad disk", power_safe=False, bad_disk=True))
    draw = random.Random(f"{seed}/recoveries")
    count = len(workload.operations)
    for number in range(RECOVERIES) if "recovery".startswith(only) else ():
        cut = draw.randrange(count * number // RECOVERIES, count * (number + 1) // RECOVERIES)
        process_only = number % 2 == 0
        if process_only:
            # Just before a sync most is still in memory of the system: shown, and not safe yet.
            syncs = (at for at in range(cut, count) if workload.operations[at].kind == "sync")
            cut = next(syncs, cut)
        made.append(record_recovery(workload, cut, process_only=process_only, seed=draw))
    for schema in range(1, SCHEMA) if "migration".startswith(only) else ():
        for closed in (True, False):
            cut = count * 3 // 5
            made.append(record_migration(workload, schema, cut, closed=closed))
    if "gc".startswith(only):
        made.append(record_gc(workload))
    return [each for each in made if each.name.startswith(only)]


def seed_trio(seed: int) -> None:
    """Have trio schedule in an order that the seed decides, so that a run can be had again."""
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[attr-defined]
    trio._core._run._r.seed(seed)


def plan_cuts(recordings: list[Recording], images: int, seed: int) -> list[list[int]]:
    """Which cuts of each are looked at.

    Of the first, the workload, all, or as many as give so many images, by lot; of the others in
    proportion. Some of each kind of call are always among them, and the very end.
    """
    share = min(1.0, images / IMAGES_PER_CUT / (len(recordings[0].operations) + 1))
    draw = random.Random(f"{seed}/cuts")
    plan = []
    for number, recording in enumerate(recordings):
        every = range(len(recording.operations) + 1)
        # The workload again, on another disk or with another promise, has much the same cuts.
        part = share / 4 if number and len(every) > LONG else share
        chosen = {cut for cut in every if draw.random() < part} | {every[-1]}
        for label in sorted({region.label for region in recording.regions}):
            inside = [cut for cut in every if label in recording.labels_at(cut)]
            chosen.update(draw.sample(inside, min(2, len(inside))))
        plan.append(sorted(chosen))
    return plan


def _work(job: tuple[Recording, list[int], int, Path]) -> Report:
    logging.getLogger("pidurable").setLevel(logging.CRITICAL)
    recording, cuts, seed, kept = job
    seed_trio(seed)
    return check_cuts(recording, cuts, seed, kept)


def run(images: int, seed: int, processes: int, kept: Path, only: str = "") -> Report:
    """Record, cut, and check; `only` the recordings whose names begin so."""
    recordings = make_recordings(seed, only)
    plan = plan_cuts(recordings, images, seed)
    jobs = []
    for recording, cuts in zip(recordings, plan, strict=True):
        # Neighbouring cuts come to the same stores, so a process takes a stretch of them.
        size = max(1, len(cuts) // (processes * 2) + 1)
        jobs += [
            (recording, cuts[first : first + size], seed, kept)
            for first in range(0, len(cuts), size)
        ]
    report = Report()
    for recording in recordings:
        if recording.failed:
            report.problems["unequal"] += 1
            report.told.append(f"R1 unequal: {recording.name} did not end: {recording.failed}")
    if processes == 1:
        reports: Any = map(_work, jobs)
    else:
        # Forked: recordings are large, and no connection is open here.
        pool = multiprocessing.get_context("fork").Pool(processes)
        reports = pool.imap_unordered(_work, jobs)
    for each in reports:
        report.add(each)
    if processes > 1:
        pool.close()
        pool.join()
    return report


def show(
    report: Report, seed: int, seconds: float, *, whole: bool, missed: int
) -> tuple[str, bool]:
    """The line of the goal, and whether it is met."""
    unseen = [name for name in RARE if whole and not report.rare[name]]
    found = sum(report.problems.values())
    passed = not found and not unseen and not missed and report.counts["images"] > 0
    figures = " ".join(f"{kind}={report.problems[kind]}" for kind in PROBLEMS)
    line = (
        f"R1 crash-at-write: cuts={report.cuts} images={report.counts['images']} "
        f"different={report.counts['different images']} resumed={report.counts['resumed']} "
        f"{figures} rare-unseen={len(unseen)} controls-missed={missed} seed={seed} {seconds:.1f}s "
        f"{'PASS' if passed else 'FAIL'}"
    )
    return line, passed


# --- controls ---------------------------------------------------------------------------------


def never_sync(storage: SqliteStorage) -> None:
    """Have SQLite wait for nothing: what the disk holds is then anybody's guess."""
    for connection in storage._connections:
        connection.execute("pragma synchronous = off")


CONTROLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "off": ({"durability": "process", "promised": "power", "spoil": never_sync}, ("corrupt",)),
    "normal": ({"durability": "process", "promised": "power"}, ("lost",)),
    "trust-sectors": ({"bad_disk": True}, ("lost",)),
    "forget-deletes": ({"forget": "delete"}, ("lost", "halves", "corrupt", "unopened")),
}
"""Something that is broken on purpose, by name: how, and of what something must be found."""


def run_control(name: str, images: int, seed: int, kept: Path) -> tuple[str, bool]:
    """Check a broken storage; it is good when something is found."""
    options, expected = CONTROLS[name]
    seed_trio(seed)
    options = dict(options)
    forget = options.pop("forget", None)
    recording = record_workload(**options)
    if forget is not None:
        recording = recording.forgetting(forget)
    (cuts,) = plan_cuts([recording], images, seed)
    report = check_cuts(attrs.evolve(recording, going_on="nothing"), cuts, seed, kept)
    bitten = any(report.problems[kind] > 0 for kind in expected)
    figures = " ".join(f"{kind}={number}" for kind, number in report.problems.items())
    images = report.counts["images"]
    return (
        f"R1 control {name}: images={images} {figures} {'caught' if bitten else 'MISSED'}",
        bitten,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    environ = os.environ
    parser.add_argument("--images", type=int, default=int(environ.get("R1_IMAGES", "3000")))
    parser.add_argument("--seed", type=int, default=int(environ.get("R1_SEED", "17")))
    parser.add_argument("--processes", type=int, default=int(environ.get("R1_PROCESSES", "2")))
    parser.add_argument("--keep", type=Path, help="where images are kept that fail")
    parser.add_argument("--kept", type=Path, help="look at one that was kept")
    parser.add_argument("--control", choices=sorted(CONTROLS), help="only this one")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--only", default="", help="recordings whose names begin so")
    given = parser.parse_args()
    logging.getLogger("pidurable").setLevel(logging.CRITICAL)
    if given.kept is not None:
        with scratch_folder() as folder:
            problem = check_kept(given.kept, folder)
        print("nothing is wrong" if problem is None else f"{problem.kind}: {problem.told}")
        return int(problem is not None)
    kept = given.keep or Path(tempfile.gettempdir()) / f"pidurable-r1-{given.seed}"
    shutil.rmtree(kept, ignore_errors=True)
    if given.control is not None:
        line, passed = run_control(given.control, given.images, given.seed, kept)
        print(line)
        return int(not passed)
    started = time.perf_counter()
    missed = 0
    for name in () if given.no_controls or given.only else CONTROLS:
        line, caught = run_control(name, CONTROL_IMAGES, given.seed, kept)
        missed += not caught
        print(line, flush=True)
    report = run(given.images, given.seed, given.processes, kept, given.only)
    for name in RARE:
        print(f"  {report.rare[name]:6} {name}")
    for told in report.told:
        print(told)
    seconds = time.perf_counter() - started
    line, passed = show(report, given.seed, seconds, whole=not given.only, missed=missed)
    print(line)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
