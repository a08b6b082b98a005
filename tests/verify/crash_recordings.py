"""Runs that are recorded below SQLite, with all that a checker of their crashes must know.

A recording says what was done to the disk, what was promised at which moment, what the ledger said
then, and, for each commit, what a store holds in which it is the last one. Whatever a crash leaves
must be one of these stores whole, and not an older one than was promised.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import apsw
import attrs
import trio
from outside_ledger import Ledger, Line
from recording_vfs import Disk, Kind, Operation, Recorder, read_image, write_image
from trio.testing import MockClock
from workload import Ack, opened, play

from pidurable.storage import SqliteStorage, Storage
from pidurable.storage._migrate import SCHEMA, copy_path
from pidurable.storage._sqlite_open import APPLICATION_ID
from pidurable.testing._forwarding import ForwardingStorage

ResultT = TypeVar("ResultT")

STORE = "s.sqlite"
OLD_SCRIPTS = Path(__file__).parents[1] / "golden"
GoingOn = Literal["workload", "gc", "nothing"]
CHECKPOINT_EVERY = 25
"""Batches between two checkpoints of the log: a workload is too short for any by itself."""
_NOT_OF_COMMITS = ("holder", "heartbeat")


def scratch() -> Path:
    """A new folder, in memory where the machine has that: nothing here needs a real disk."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="pidurable-", dir=shared if shared.is_dir() else None))


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A scratch folder for a block."""
    folder = scratch()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# --- what a store holds -----------------------------------------------------------------------


@attrs.frozen
class Held:
    """What a store holds: its last commit, and a digest of every row that commits write."""

    seq: int
    digest: str


def held_in(path: Path) -> Held:
    """Look into a store without the product. SQLite recovers it, as it would for anybody.

    Raises:
        apsw.Error: It is damaged.
    """
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        return held_by(connection)
    finally:
        connection.close()


def held_by(connection: apsw.Connection) -> Held:
    found = hashlib.sha256()
    tables = connection.execute(
        "select name from sqlite_schema where type = 'table' order by name"
    ).fetchall()
    for (name,) in tables:
        if name in _NOT_OF_COMMITS:
            continue
        # Openings and closings change these of the one row, and are no commits.
        columns = "uuid, created_us, seq, next_id" if name == "session" else "*"
        found.update(name.encode())
        for row in connection.execute(f"select {columns} from {name}"):
            found.update(repr(row).encode())
    seq = connection.execute("select seq from session").get
    return Held(int(seq), found.hexdigest())


# --- recordings -------------------------------------------------------------------------------


def left_in(path: Path) -> str:
    """A digest of all records of a store, without when they were made."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    tables = connection.execute("select name from sqlite_schema where type = 'table'").fetchall()
    found = []
    for (name,) in tables:
        if name in (*_NOT_OF_COMMITS, "session"):
            continue
        columns = [row[1] for row in connection.execute(f"pragma table_info({name})")]
        wanted = ", ".join(column for column in columns if (name, column) != ("stubs", "at_us"))
        rows = connection.execute(f"select {wanted} from {name}").fetchall()
        found.append((name, sorted(map(repr, rows))))
    connection.close()
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


@attrs.frozen(kw_only=True)
class Region:
    """What was going on between two cuts."""

    label: str
    first: int
    last: int


@attrs.define(kw_only=True, eq=False)
class Recording:
    """One recorded run, and what is true of it at each cut."""

    name: str
    begin: Disk
    operations: list[Operation]
    acks: list[tuple[int, Ack]] = attrs.Factory(list)
    """With how many operations came before."""
    lines: list[tuple[int, Line]] = attrs.Factory(list)
    regions: list[Region] = attrs.Factory(list)
    states: dict[int, str] = attrs.Factory(dict)
    """By the seq of its last commit, the digest of what a store holds."""
    first_promise: int = 0
    """What was promised before the recording began."""
    going_on: GoingOn = "workload"
    """What is run to its end on what is left: the workload, retention, or nothing."""
    bad_disk: bool = False
    """Whether a write may spoil what lies beside it."""
    failed: str = ""
    """Why the run did not come to its end."""
    end: str = ""
    """What retention leaves: the digest of it."""
    counts_ledger: bool = True
    """Whether effects happen once: not where commits that they stand on may be lost."""
    power: bool = True
    copies: dict[str, Held] = attrs.Factory(dict)
    """By the name of a copy that a migration makes first, what it has to hold."""

    def disk_at(self, cut: int) -> Disk:
        """The disk after so many operations."""
        disk = self.begin.copied()
        for operation in self.operations[:cut]:
            disk.do(operation)
        return disk

    def forgetting(self, kind: Kind) -> Recording:
        """The same, by a layer that did not see one kind of operation. For a control."""
        seen = [
            attrs.evolve(each, kind="nothing", folder=False) if each.kind == kind else each
            for each in self.operations
        ]
        return attrs.evolve(self, operations=seen)

    def promised(self, cut: int, *, process_only: bool) -> int:
        """The last commit that must be there after a crash at a cut.

        Args:
            process_only: The process alone has died, and no power was lost.
        """
        kept = [
            ack.seq
            for position, ack in self.acks
            if position <= cut and (process_only or (ack.flush and self.power))
        ]
        return max([self.first_promise, *kept])

    def shown(self, cut: int) -> int:
        """The last commit that somebody may have seen."""
        return max([self.first_promise, *(ack.seq for at, ack in self.acks if at <= cut)])

    def ledger_at(self, cut: int) -> tuple[Line, ...]:
        end = bisect_right([position for position, _ in self.lines], cut)
        return tuple(line for _, line in self.lines[:end])

    def labels_at(self, cut: int) -> list[str]:
        """What a crash at a cut comes into the middle of."""
        return [region.label for region in self.regions if region.first < cut < region.last]


class _Marking(ForwardingStorage):
    """Notes between which operations each call took place; moves the log now and then."""

    def __init__(self, inner: Storage, recorder: Recorder, regions: list[Region]) -> None:
        super().__init__(inner)
        self._recorder = recorder
        self._regions = regions
        self._batches = 0

    def _call(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        first = self._recorder.position
        result = call()
        last = self._recorder.position
        if last > first:
            self._regions.append(Region(label=name, first=first, last=last))
        if name == "apply":
            self._batches += 1
            if self._batches % CHECKPOINT_EVERY == 0:
                self.checkpoint()
        return result


@attrs.define(eq=False)
class _At:
    """Keeps what it is given with the position of the recorder."""

    recorder: Recorder
    kept: list[Any] = attrs.Factory(list)

    def append(self, ack: Ack) -> None:
        self.kept.append((self.recorder.position, ack))


class _PlacedLedger(Ledger):
    """A ledger in memory that knows when each line was written."""

    def __init__(self, recorder: Recorder, lines: tuple[Line, ...] = ()) -> None:
        super().__init__(lines=lines)
        self.placed: list[tuple[int, Line]] = [(0, line) for line in lines]
        self._recorder = recorder

    def book(self, key: str, what: str, *, safe: bool = True) -> None:
        super().book(key, what, safe=safe)
        self.placed.append((self._recorder.position, Line(key, what, safe)))


def record(
    name: str,
    folder: Path,
    program: Callable[..., None],
    *,
    disk: Disk | None = None,
    lines: tuple[Line, ...] = (),
    durability: Any = "power",
    spoil: Callable[[SqliteStorage], None] | None = None,
    power_safe: bool = True,
    **more: Any,
) -> Recording:
    """Record what a program does to the store in a folder; `program(storage, ledger, acks)`.

    Args:
        disk: What is in the folder, where not all of that is safe.
        lines: What the ledger says already.
        spoil: Breaks the storage once it is open, for a control.
        power_safe: Whether SQLite may rely on writes that spoil nothing beside them.
        more: Further fields of the recording.
    """
    regions: list[Region] = []
    with Recorder(f"recorder-{name}", folder, disk=disk, power_safe=power_safe) as recorder:
        ledger, acks = _PlacedLedger(recorder, lines), _At(recorder)
        with recorder.watching():
            storage = SqliteStorage(
                folder / STORE, vfs=recorder.name, durability=durability, uuid="w", created_us=1
            )
            regions.append(Region(label="opening", first=0, last=recorder.position))
            if spoil is not None:
                spoil(storage)
            try:
                program(_Marking(storage, recorder, regions), ledger, acks)
            except (Exception, BaseExceptionGroup) as error:
                # What was promised until then has to be kept all the same.
                more["failed"] = repr(error)
            finally:
                storage.close()
    recording = Recording(
        name=name,
        begin=recorder.begin,
        operations=recorder.operations,
        acks=acks.kept,
        lines=ledger.placed,
        regions=regions,
        power=durability == "power",
        **more,
    )
    _learn_states(recording)
    return recording


def _learn_states(recording: Recording) -> None:
    """Look at the store after every batch, as a process would find it."""
    ends = {region.last for region in recording.regions if region.label in ("opening", "apply")}
    disk = recording.begin.copied()
    with scratch_folder() as folder:
        for position in range(len(recording.operations) + 1):
            if position:
                disk.do(recording.operations[position - 1])
            if position in ends:
                write_image(disk.everything(), folder)
                held = held_in(folder / STORE)
                recording.states[held.seq] = held.digest


# --- what is recorded -------------------------------------------------------------------------


def record_workload(name: str = "workload", **options: Any) -> Recording:
    """The whole workload on a new store, from its creation to its close."""
    with scratch_folder() as folder:
        durability = options.get("durability", "power")
        # A control keeps less than it promises.
        promised = options.pop("promised", durability)

        def program(storage: Any, ledger: Ledger, acks: Any) -> None:
            play(storage, ledger, acks=acks, durability=promised)

        made = record(name, folder, program, **options)
        made.power = promised == "power"
        made.counts_ledger = made.power
        return made


def record_recovery(before: Recording, cut: int, *, process_only: bool, seed: Any) -> Recording:
    """An opening of what a crash of another recording left: recovery, some work, the close.

    Args:
        process_only: What the first life wrote is still in memory of the system, and is lost if
            the power fails during the second one.
    """
    disk = before.disk_at(cut)
    image = disk.everything() if process_only else disk.subset(seed)
    with scratch_folder() as folder:
        write_image(image, folder)
        name = f"recovery-{before.name}-{cut}-{'process' if process_only else 'power'}"

        async def live(storage: Any, ledger: Ledger, acks: Any) -> None:
            async with opened(
                storage, ledger, life=1, acks=acks, takeover=True, durability="power"
            ) as harness:
                # What is found may be shown from here on.
                acks.append(Ack(storage.head().seq, flush=True))
                harness.start()
                await trio.sleep(2)

        def program(storage: Any, ledger: Ledger, acks: Any) -> None:
            trio.run(live, storage, ledger, acks, clock=MockClock(autojump_threshold=0))

        made = record(
            name,
            folder,
            program,
            disk=disk if process_only else None,
            lines=before.ledger_at(cut),
            first_promise=before.promised(cut, process_only=False),
        )
    # What the second crash leaves may be a store of the first life.
    made.states = {**before.states, **made.states}
    return made


def make_older_store(path: Path, schema: int, source: Path, *, closed: bool) -> None:
    """Write a store of an older schema that holds what a store of today holds.

    Args:
        closed: Whether its holder closed it; else it was killed, and a log lies beside the file.
    """
    script = OLD_SCRIPTS / f"schema_v{schema}.sql"
    connection = apsw.Connection(str(path))
    connection.execute("pragma journal_mode = wal")
    connection.execute(script.read_text("utf-8"))
    connection.execute("attach ? as today", (str(source),))
    tables = connection.execute(
        "select name from main.sqlite_schema where type = 'table' order by name"
    ).fetchall()
    connection.execute("begin")
    for (table,) in tables:
        columns = [row[1] for row in connection.execute(f"pragma main.table_info({table})")]
        taken = [
            "retired_seq is not null" if (table, column) == ("documents", "retired") else column
            for column in columns
        ]
        connection.execute(
            f"insert into main.{table} ({', '.join(columns)})"
            f"\nselect {', '.join(taken)}\nfrom today.{table}"
        )
    connection.execute("update main.holder set released = 1")
    connection.execute(f"pragma main.application_id = {APPLICATION_ID}")
    connection.execute(f"pragma main.user_version = {schema}")
    connection.execute("commit")
    connection.execute("detach today")
    if not closed:
        left = read_image(path.parent)
    connection.close()
    if not closed:
        write_image(left, path.parent)


def record_migration(before: Recording, schema: int, cut: int, *, closed: bool) -> Recording:
    """The first opening of a store of an older schema, in the middle of the workload."""
    with scratch_folder() as folder, scratch_folder() as source:
        write_image(before.disk_at(cut).everything(), source)
        make_older_store(folder / STORE, schema, source / STORE, closed=closed)
        assert schema < SCHEMA
        image = read_image(folder)
        held = held_in(folder / STORE)
        write_image(image, folder)

        def program(storage: Any, ledger: Ledger, acks: Any) -> None:
            acks.append(Ack(held.seq, flush=True))

        return record(
            f"migration-{schema}-{'closed' if closed else 'killed'}",
            folder,
            program,
            lines=before.ledger_at(cut),
            first_promise=held.seq,
            copies={copy_path(STORE, schema): held},
        )


def collect(storage: Any, ledger: Ledger, acks: Any = None, *, life: int) -> None:
    """Remove everything that has ended."""

    async def live() -> None:
        async with opened(storage, ledger, life=life, acks=acks, takeover=True) as harness:
            await harness.gc(older_than=timedelta(0))

    trio.run(live, clock=MockClock(autojump_threshold=0))


def record_gc(before: Recording) -> Recording:
    """Retention over a store in which the workload has come to its end."""
    with scratch_folder() as folder:
        image = before.disk_at(len(before.operations)).everything()
        write_image(image, folder)
        promised = before.promised(len(before.operations), process_only=False)
        made = record(
            "gc",
            folder,
            functools.partial(collect, life=1),
            lines=before.ledger_at(len(before.operations)),
            first_promise=promised,
            going_on="gc",
        )
        made.end = left_in(folder / STORE)
        write_image(image, folder)
        assert left_in(folder / STORE) != made.end
        return made
