"""Whether one image of a disk is what a crash may leave: opened by the product, compared, gone on.

For each image: the product opens it; what it holds is what the run had stored after one of its
commits, whole, and that one is not before the last that was promised; SQLite finds it sound. Then
the workload goes on in it to its end, which is the same as ever. Images that are the same after
their opening, with the same ledger, go on in the same way, so that is done once for them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import apsw
import attrs
from crash_recordings import (
    STORE,
    GoingOn,
    Held,
    Recording,
    collect,
    held_by,
    held_in,
    left_in,
)
from outside_ledger import Ledger, Line
from recording_vfs import digest_of, read_image, write_image
from workload import play
from workload_expected import EFFECTS, EXPECTED
from workload_looks import canonical, first_difference

from pidurable.errors import PidurableError
from pidurable.storage import SqliteStorage
from pidurable.storage._migrate import SCHEMA

PROBLEMS = ("lost", "halves", "duplicates", "unopened", "corrupt", "unequal", "uncopied")


@attrs.frozen(kw_only=True)
class Task:
    """One image and what is true of it: all that is needed to look at it again."""

    recording: str
    cut: int
    variant: str
    promised: int
    states: dict[int, str]
    ledger: tuple[Line, ...]
    going_on: GoingOn
    end: str
    counts_ledger: bool
    copies: dict[str, Held]
    """By the name of a copy, what it has to hold where the store is of a newer schema."""

    def written(self) -> str:
        return json.dumps(attrs.asdict(self))

    @classmethod
    def read(cls, text: str) -> Task:
        fields = json.loads(text)
        fields["states"] = {int(seq): digest for seq, digest in fields["states"].items()}
        fields["ledger"] = tuple(Line(**line) for line in fields["ledger"])
        fields["copies"] = {name: Held(**held) for name, held in fields["copies"].items()}
        return cls(**fields)


@attrs.frozen
class Problem:
    """What is wrong with an image."""

    kind: str
    told: str


class Checker:
    """Checks images in a folder of its own, and counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self._seen: dict[str, tuple[Held, str] | Problem] = {}
        """By image: what it holds once it was opened, and the digest of the store then."""
        self._resumed: dict[str, Problem | None] = {}

    def check(self, image: dict[str, bytes], task: Task) -> tuple[Problem | None, int]:
        """What is wrong with an image, and the last commit that it holds."""
        self.counts["images"] += 1
        name = digest_of(image)
        known = self._seen.get(name)
        if known is None:
            self.counts["different images"] += 1
            known = self._seen[name] = self._look(image, task)
        if isinstance(known, Problem):
            return known, -1
        held, store = known
        if held.seq < task.promised:
            told = f"commit {task.promised} was promised, and the last one is {held.seq}"
            return Problem("lost", told), held.seq
        if task.states.get(held.seq) != held.digest:
            told = f"it is not the store as it was after commit {held.seq}"
            return Problem("halves", told), held.seq
        if task.going_on == "nothing":
            return None, held.seq
        ledger = hashlib.sha256(repr(task.ledger).encode()).hexdigest()
        again = f"{store} {ledger} {task.counts_ledger}"
        if again not in self._resumed:
            self.counts["resumed"] += 1
            self._resumed[again] = self._resume(image, task)
        return self._resumed[again], held.seq

    # --- opening -------------------------------------------------------------------------

    def _look(self, image: dict[str, bytes], task: Task) -> tuple[Held, str] | Problem:
        write_image(image, self.folder)
        path = self.folder / STORE
        try:
            schema = self._schema(path) if task.copies else SCHEMA
            storage = SqliteStorage(path, uuid="w", created_us=1)
            seq = storage.head().seq
            storage.close()
        except (PidurableError, apsw.Error) as error:
            return Problem("unopened", f"{type(error).__name__}: {error}")
        try:
            held, sound = self._sound(path)
        except apsw.Error as error:
            return Problem("corrupt", f"{type(error).__name__}: {error}")
        if sound is not None:
            return Problem("corrupt", sound)
        if held.seq != seq:
            return Problem("corrupt", f"opened, its last commit was {seq}; closed, {held.seq}")
        # A migrated store has its copy, whatever else the crash has taken.
        for name, expected in task.copies.items() if schema == SCHEMA else ():
            copied = self._copied(self.folder / name, expected)
            if copied is not None:
                return copied
        return held, digest_of(read_image(self.folder))

    def _schema(self, path: Path) -> int:
        if not path.exists() or not path.stat().st_size:
            return 0
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            return int(connection.execute("pragma user_version").get)
        finally:
            connection.close()

    def _sound(self, path: Path) -> tuple[Held, str | None]:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            found = connection.execute("pragma integrity_check").fetchall()
            if found != [("ok",)]:
                return Held(-1, ""), f"integrity check: {found[:3]}"
            foreign = connection.execute("pragma foreign_key_check").fetchall()
            if foreign:
                return Held(-1, ""), f"foreign keys: {foreign[:3]}"
            return held_by(connection), None
        finally:
            connection.close()

    def _copied(self, path: Path, expected: Held) -> Problem | None:
        if not path.exists():
            return Problem("uncopied", f"the store is migrated, and there is no {path.name}")
        try:
            held = held_in(path)
        except apsw.Error as error:
            return Problem("uncopied", f"{path.name}: {error}")
        if held != expected:
            return Problem("uncopied", f"{path.name} does not hold what the store held")
        return None

    # --- going on ------------------------------------------------------------------------

    def _resume(self, image: dict[str, bytes], task: Task) -> Problem | None:
        """Run to its end, in an image, what the crash has interrupted."""
        write_image(image, self.folder)
        ledger = Ledger(lines=task.ledger)
        if task.going_on == "gc":
            return self._collect(ledger, task.end)
        try:
            play(self.folder / STORE, ledger, life=2, takeover=True)
            storage = SqliteStorage(self.folder / STORE, create=False)
            told = canonical(storage)
            storage.close()
        except (Exception, BaseExceptionGroup) as error:
            return Problem("unequal", f"it does not go on: {error!r}")
        difference = first_difference(EXPECTED, told)
        if difference is not None:
            return Problem("unequal", difference)
        if not task.counts_ledger:
            return None
        if ledger.duplicates():
            return Problem("duplicates", f"happened more than once: {ledger.duplicates()}")
        difference = first_difference(EFFECTS, ledger.effects())
        return None if difference is None else Problem("unequal", f"effects: {difference}")

    def _collect(self, ledger: Ledger, end: str) -> Problem | None:
        """Go on with retention."""
        try:
            collect(self.folder / STORE, ledger, life=2)
        except (Exception, BaseExceptionGroup) as error:
            return Problem("unequal", f"retention does not go on: {error!r}")
        if left_in(self.folder / STORE) != end:
            return Problem("unequal", "retention leaves something else than without the crash")
        return None


def keep(image: dict[str, bytes], task: Task, problem: Problem, kept: Path) -> None:
    """Keep an image with all that is needed to look at it again."""
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    write_image(image, kept)
    (kept / "task.json").write_text(task.written())
    (kept / "problem.txt").write_text(f"{problem.kind}: {problem.told}\n")


def check_kept(kept: Path, folder: Path) -> Problem | None:
    """Look again at an image that was kept."""
    task = Task.read((kept / "task.json").read_text())
    image = {
        path.name: path.read_bytes()
        for path in kept.iterdir()
        if path.name not in ("task.json", "problem.txt")
    }
    problem, _ = Checker(folder).check(image, task)
    return problem


def task_for(recording: Recording, cut: int, variant: str, *, process_only: bool) -> Task:
    """What is true of the images of a cut."""
    return Task(
        recording=recording.name,
        cut=cut,
        variant=variant,
        promised=recording.promised(cut, process_only=process_only),
        states=recording.states,
        ledger=recording.ledger_at(cut),
        going_on=recording.going_on,
        end=recording.end,
        counts_ledger=recording.counts_ledger,
        copies=recording.copies,
    )
