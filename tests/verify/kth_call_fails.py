"""R3: whichever call of its files fails, and however: no commit is lost, halved or shown too early.

A scene is a stretch of a store's life. It is played on a disk whose k-th call of a method fails
with one of the codes that this method can return, once or from then on, for k = 1, 2, ... until a
run meets no fault. So do bytes that changed, and memory that is short in the k-th call of the
storage. After each run:

* whoever was told something was told the truth: an acknowledged batch is in the file, a refused
  one is not, and every error is one that the contract names for that call;
* every file is closed and no lock is left;
* the disk is repaired, the store opens, and the same scene goes on to the same end.

    python tests/verify/kth_call_fails.py                      # every call of every scene
    python tests/verify/kth_call_fails.py --runs 300 --seed 7  # so many of them, drawn
    python tests/verify/kth_call_fails.py --scene create --strike xWrite:FULL:51:once

`--control` plays it with a bug planted in the storage, and must then say FAIL.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio
from failing_vfs import CODES, DAMAGING, FailingDisk, Strike
from hang_guard import HungError, limited
from service_scenes import SCENES as SERVICE_SCENES
from storage_scenes import SCENES as STORAGE_SCENES, Plant, Scene, copied, honest, prepared
from watched_storage import Journal
from workload_scene import dump_workload, live_workload

from pidurable.errors import PidurableError, StorageAccessError, StorageRefusedError
from pidurable.storage import Batch
from pidurable.testing._forwarding import ForwardingStorage

WORKLOAD = Scene(name="workload", prepare=lambda path: None, live=live_workload, dump=dump_workload)
SCENES = (*STORAGE_SCENES, *SERVICE_SCENES, WORKLOAD)
SHARE = float(os.environ.get("VERIFY_R3_SHARE", "0.1"))
"""About 1,600 runs; the whole is 12 times that of the storage scenes, and 50 times that of W."""
CREATION_WRITES = 60
"""The first writes of the first scene: they make the schema."""

RARE = (
    "refused",
    "poisoned",
    "not opened",
    "noticed by nobody",
    "close failed",
    "checkpoint failed",
    "heartbeat failed",
    "read failed",
    "export failed",
)
"""What has to occur in a whole run, or it proves little."""


@attrs.define(eq=False)
class Report:
    """What was played, and what was found."""

    seed: int = 0
    runs: int = 0
    skipped: int = 0
    rare: Counter[str] = attrs.Factory(Counter)
    errors: Counter[str] = attrs.Factory(Counter)
    differences: list[str] = attrs.Factory(list)
    undocumented: list[str] = attrs.Factory(list)
    hangs: int = 0
    seconds: float = 0.0

    @property
    def unseen(self) -> list[str]:
        return [name for name in RARE if not self.rare[name]]

    def add(self, what: str, journal: Journal, *, struck: bool) -> None:
        """Count a run."""
        self.runs += 1
        self.errors += journal.errors
        self.hangs += journal.hangs
        self.differences += [f"{what}: {each}" for each in journal.differences]
        self.undocumented += [f"{what}: {each}" for each in journal.undocumented]
        doors = Counter(each.split()[0] for each in journal.errors)
        self.rare["refused"] += journal.refused > 0
        self.rare["poisoned"] += journal.unknown is not None
        self.rare["not opened"] += doors["open"] > 0
        self.rare["noticed by nobody"] += struck and not journal.errors
        for door in ("close", "checkpoint", "heartbeat", "export"):
            self.rare[f"{door} failed"] += doors.pop(door, 0) > 0
        for door in ("open", "apply", "acquire", "release"):
            doors.pop(door, None)
        self.rare["read failed"] += bool(doors)

    def line(self, *, rare_counts: bool = True) -> str:
        """The last line: figures, and whether that is enough."""
        found = self.differences or self.undocumented or self.hangs
        found = found or (rare_counts and self.unseen)
        drawn = f" drawn-of={self.runs + self.skipped}" if self.skipped else ""
        return (
            f"R3 k-th call fails: runs={self.runs}{drawn} refused={self.rare['refused']} "
            f"poisoned={self.rare['poisoned']} differences={len(self.differences)} "
            f"undocumented={len(self.undocumented)} hangs={self.hangs} "
            f"rare-unseen={len(self.unseen) if rare_counts else 'uncounted'} "
            f"seed={self.seed} {self.seconds:.1f}s "
            f"{'FAIL' if found or not self.runs else 'PASS'}"
        )


# --- planted bugs -----------------------------------------------------------------------------


class SaysRefused(ForwardingStorage):
    """A bug: an uncertain batch is told as refused."""

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        return call()

    def apply(self, batch: Batch) -> None:
        try:
            super().apply(batch)
        except StorageAccessError as unknown:
            raise StorageRefusedError(self.store, f"planted: {unknown.problem}") from unknown


class SaysStored(ForwardingStorage):
    """A bug: a batch whose flush failed is acknowledged."""

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        return call()

    def apply(self, batch: Batch) -> None:
        with contextlib.suppress(StorageAccessError):
            super().apply(batch)


class LeaksErrors(ForwardingStorage):
    """A bug: what the library raises comes out as it is."""

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PidurableError as error:
            raise error.__cause__ or error from None


CONTROLS: dict[str, Plant] = {
    "says-refused": SaysRefused,
    "says-stored": SaysStored,
    "leaks-errors": LeaksErrors,
}
"""By name, storages with a bug that must be caught."""


# --- playing ----------------------------------------------------------------------------------


def play(
    scene: Scene,
    strike: Strike | None,
    made: Path,
    folder: Path,
    *,
    expected: object,
    planted: Plant = honest,
    seed: int = 0,
) -> tuple[Journal, FailingDisk]:
    """Play a scene on a disk that fails; then repair it, open the store and go on."""
    path = str(copied(made, folder))
    schedule = f"{seed}/{strike}"
    journal = Journal(
        path,
        schedule=schedule,
        acked=scene.found or 0,
        takeover=scene.foreign,
        damaged=strike is not None and strike.code in DAMAGING,
        lasting=strike is not None and strike.lasting,
    )
    if scene.found is None:
        journal.acked = journal.stored_seq()
    disk = FailingDisk(default=scene.everywhere)
    disk.strike, journal.machine = strike, disk.memory
    told: Exception | None = None
    try:
        with limited(what=f"{scene.name} {strike}"):
            scene.live(path, disk.name, journal, planted)
    except (PidurableError, trio.TooSlowError) as error:
        told = error
    except BaseException as error:
        journal.hangs += isinstance(error, HungError)
        journal.undocumented.append(f"the scene ended with {error!r}")
    if disk.open_files:
        journal.differences.append(f"{disk.open_files} files are left open after {told!r}")
    disk.repair()
    takeover = scene.foreign and not journal.held
    after = Journal(path, life=1, schedule=schedule, takeover=takeover)
    try:
        with limited(what=f"{scene.name} after {strike}"):
            scene.live(path, disk.name, after, honest)
    except BaseException as error:
        journal.differences.append(f"it does not go on after {told!r}: {error!r}")
    else:
        journal.check_reopened(after.found)
        found = scene.dump(path)
        if found != expected:
            journal.differences.append(f"another end: {first_difference(expected, found)}")
    disk.unregister()
    return journal, disk


def first_difference(expected: Any, found: Any, path: str = "$") -> str:
    """Where two dumps differ first, with what is there."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if differing := sorted(expected.keys() ^ found.keys()):
            lacking = {key: expected[key] for key in differing if key in expected}
            added = {key: found[key] for key in differing if key in found}
            return f"{path}: it lacks {lacking!r:.300}, and has {added!r:.300}"
        for key in expected:
            if expected[key] != found[key]:
                return first_difference(expected[key], found[key], f"{path}.{key}")
    if isinstance(expected, list) and isinstance(found, list):
        for number, (one, other) in enumerate(zip(expected, found, strict=False)):
            if one != other:
                return first_difference(one, other, f"{path}[{number}]")
        return f"{path}: {len(expected)} expected, {len(found)} found"
    return f"{path}: expected {expected!r:.300}, found {found!r:.300}"


def series(methods: Sequence[str] = ()) -> Iterator[tuple[str, str, bool]]:
    """Every way for calls to fail: method, code, whether it lasts."""
    for method in methods or CODES:
        for code in CODES[method]:
            yield method, code, False
            yield method, code, True


def play_scene(
    report: Report,
    scene: Scene,
    folder: Path,
    *,
    share: float,
    draw: random.Random,
    planted: Plant = honest,
    methods: Sequence[str] = (),
    calls_max: int = sys.maxsize,
) -> None:
    """Play a scene with every call failing in turn, or with a share of them drawn."""
    made = prepared(scene, folder)
    expected, counts = undisturbed(scene, made, folder)
    for method, code, lasting in series(methods):
        at = 0
        while at < calls_max:
            at += 1
            # Beyond the calls of a healthy run every one is tried: there the series ends.
            if at <= counts[method] and share < 1 and draw.random() >= share * scene.weight:
                report.skipped += 1
                continue
            strike = Strike(method=method, code=code, at=at, lasting=lasting)
            journal, struck = play(
                scene,
                strike,
                made,
                folder / "run",
                expected=expected,
                planted=planted,
                seed=report.seed,
            )
            report.add(f"{scene.name} {strike}", journal, struck=struck.struck > 0)
            if not struck.struck:
                break


def undisturbed(scene: Scene, made: Path, folder: Path) -> tuple[object, Counter[str]]:
    """What a scene comes to on a healthy disk, and how often it calls each method."""
    path = str(copied(made, folder / "healthy"))
    journal = Journal(path, takeover=scene.foreign)
    disk = FailingDisk(default=scene.everywhere)
    journal.machine = disk.memory
    scene.live(path, disk.name, journal, honest)
    disk.unregister()
    if journal.errors or journal.differences:
        raise AssertionError(f"{scene.name} fails on a healthy disk: {journal}")
    return scene.dump(path), disk.counts


def run(
    *,
    share: float = 1.0,
    seed: int = 0,
    scenes: Sequence[Scene] = SCENES,
    planted: Plant = honest,
    **only: Any,
) -> Report:
    """Play all scenes; `share` of the calls, drawn by the seed, fail.

    `only` are the `methods` and the `calls_max` of each that are played.
    """
    report = Report(seed)
    started = time.perf_counter()
    for scene in scenes:
        with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
            draw = random.Random(f"{seed}/{scene.name}")
            play_scene(report, scene, Path(folder), share=share, draw=draw, planted=planted, **only)
    report.seconds = time.perf_counter() - started
    return report


def fast_folder() -> str | None:
    """A folder in memory where there is one: what a sync costs is of no interest here."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print what was found and the goal's line; 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--share", type=float, default=SHARE, help="of the calls, drawn by the seed; 1 is all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scene", choices=[scene.name for scene in SCENES])
    parser.add_argument("--strike", type=Strike.parse, help="play this one alone")
    parser.add_argument("--control", choices=sorted(CONTROLS), help="plant this bug")
    given = parser.parse_args(arguments)
    scenes = [scene for scene in SCENES if given.scene in (None, scene.name)]
    planted = CONTROLS[given.control] if given.control else honest
    if given.strike is not None:
        return play_one(scenes[0], given.strike, planted, given.seed)
    report = run(share=given.share, seed=given.seed, scenes=scenes, planted=planted)
    for problem in (*report.undocumented, *report.differences)[:20]:
        scene, strike, *_ = problem.split()
        print(problem[:1_000])
        again = f"--scene {scene} --strike {strike.rstrip(':')} --seed {given.seed}"
        print(f"  again: python {sys.argv[0]} {again}")
    for name, count in sorted((report.rare + report.errors).items()):
        print(f"  {count:6} {name}")
    # A scene alone need not show everything.
    whole = given.scene is None
    for name in report.unseen if whole else ():
        print(f"  never: {name}")
    line = report.line(rare_counts=whole)
    print(line)
    return int(not line.endswith("PASS"))


def play_one(scene: Scene, strike: Strike, planted: Plant, seed: int) -> int:
    """Play one strike again, and print what it did."""
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        made = prepared(scene, Path(folder))
        expected, _ = undisturbed(scene, made, Path(folder))
        journal, disk = play(
            scene,
            strike,
            made,
            Path(folder) / "run",
            expected=expected,
            planted=planted,
            seed=seed,
        )
    print(f"struck {disk.struck} calls; told: {dict(journal.errors)}")
    for problem in (*journal.undocumented, *journal.differences):
        print(problem)
    return int(bool(journal.undocumented or journal.differences))


if __name__ == "__main__":
    sys.exit(main())
