"""What a holder does in a round of R5: commits, work with effects, and where it is stopped.

A life runs in a forked process of its own. It writes all that it sees to its log, and effects to
the ledger, a file beside the store. Stops are of the process itself (SIGSTOP), at a place that the
round has drawn: a line of the storage's code, or a call of the file layer.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import apsw
import attrs
import trio
from commit_history import PARTS, HistoryLog

from pidurable import (
    Extension,
    Harness,
    Registry,
    Settings,
    Task,
    TaskContext,
    entry,
    nothing_to_undo,
    open_harness,
    phase,
)
from pidurable.errors import HolderLostError, PidurableError, StorageHeldError, StorageRefusedError
from pidurable.session import _service
from pidurable.session._session import Session
from pidurable.storage import Batch, SqliteStorage, _sqlite, _sqlite_open, _sqlite_statements as sql

LEASE_SECONDS = 0.4
HEARTBEAT_SECONDS = 0.1
SETTINGS = Settings(
    lease_seconds=LEASE_SECONDS, heartbeat_seconds=HEARTBEAT_SECONDS, storage_retry_seconds=5
)
BUSY_LEASES = 2.5
"""More than one and a half, so that a machine that is busy itself sees the lease end meanwhile."""
PATIENCE_SECONDS = 5.0
"""So long a successor waits for the lease of somebody who was not replaced in time."""
CHAINS = 3
EFFECTS = 4
OPEN_BUSY_MS = 150
CHECKPOINT_PAGES = 30
LIFE_SECONDS_MAX = 30.0
FILE_CALLS = ("wal write", "wal sync", "store write", "store sync")
METHODS = ("apply", "heartbeat", "checkpoint", "release")
CLOSING = "closing"


@attrs.frozen(kw_only=True)
class Life:
    """One process of a round."""

    who: str
    takeover: bool = False
    quiet: bool = False
    """Commits nothing after its beginning: only a heartbeat can tell it that it was replaced."""
    busy: bool = False
    """Keeps its loop busy for longer than a lease, so that it cannot show that it lives."""
    leaves: bool = False
    """Closes after a while by itself; else when it is told to, or has lost the session."""
    stop_in: str | None = None
    """A method of the storage or a call of the file layer; None: whoever started it stops it."""
    stop_at: int = 0
    """Which line of the method, or which call."""
    stop_call: int = 0
    """In which call of the method."""
    plant: str | None = None


@entry("r5.part")
@attrs.frozen
class Part:
    """One of the rows of a commit."""

    who: str
    n: int
    part: int


# --- work with effects --------------------------------------------------------------------------


@attrs.frozen
class Think:
    n: int


@attrs.frozen
class Act:
    """The effect may have happened, by the process whose token this is."""

    n: int
    token: str


class Chain(Task[str, Think | Act, str]):
    """Effects that must not be repeated: only the process that stored an intent acts on it."""

    name = "r5.chain"
    abort = nothing_to_undo

    def __init__(self, ledger: Callable[[str], None], token: str) -> None:
        self.ledger = ledger
        self.token = token

    def initial(self, input: str) -> Think:
        return Think(0)

    @phase
    async def think(self, at: Think, ctx: TaskContext[str, Think | Act, str]) -> None:
        await trio.sleep(0.01)
        await ctx.goto(Act(at.n, self.token))

    @phase
    async def act(self, at: Act, ctx: TaskContext[str, Think | Act, str]) -> None:
        # Of an intent of another process nobody knows what became; it is not done again.
        if at.token == self.token:
            await trio.sleep(0.005)
            self.ledger(f"{ctx.input}-{at.n}")
        if at.n + 1 < EFFECTS:
            await ctx.goto(Think(at.n + 1))
        else:
            await ctx.complete("done")


@attrs.frozen
class Only:
    """Sleeps for ever."""


class Sleeper(Task[None, Only, None]):
    """Shows when an invocation was cancelled, and does nothing that could notice a loss itself."""

    name = "r5.sleeper"
    abort = nothing_to_undo

    def __init__(self, log: HistoryLog) -> None:
        self.log = log

    def initial(self, input: None) -> Only:
        return Only()

    @phase
    async def only(self, at: Only, ctx: TaskContext[None, Only, None]) -> None:
        self.log.note("asleep")
        try:
            await trio.sleep_forever()
        finally:
            self.log.note("cancelled")


# --- stops --------------------------------------------------------------------------------------


class Stopper:
    """Counts what is passed while it is armed, and stops this process once."""

    def __init__(self, log: HistoryLog, at: int) -> None:
        self.log = log
        self.at = at
        self.passed = 0
        self.armed = False
        """Set once the session is held and work begins."""

    def __call__(self, place: str) -> None:
        if not self.armed:
            return
        self.passed += 1
        if self.passed == self.at + 1:
            self.log.note("stops", place=place)
            os.kill(os.getpid(), signal.SIGSTOP)


def stop_at_a_line(life: Life, stop: Stopper) -> None:
    """Stop at the n-th line that a call of a method of the storage runs in the storage's code."""
    files = {_sqlite.__file__, __file__}
    method: Callable[..., Any] = getattr(SqliteStorage, str(life.stop_in))
    calls = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            stop(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return line

    def watched(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += stop.armed
        if not stop.armed or calls != life.stop_call + 1:
            return method(*args, **named)
        sys.settrace(line)
        try:
            return method(*args, **named)
        finally:
            sys.settrace(None)

    setattr(SqliteStorage, str(life.stop_in), watched)


def stop_before_closing(stop: Stopper) -> None:
    """Stop when all work has ended and the closing mark is about to be stored."""
    close = Session._store_closing

    def watched(self: Session, batch: Batch) -> None:
        stop(CLOSING)
        close(self, batch)

    setattr(Session, "_store_closing", watched)  # noqa: B010 - a method of another class


def stop_in_the_file_layer(life: Life, stop: Stopper) -> str:
    """Register a VFS that stops at the n-th call of a kind; SQLite's locks are held there."""

    class File(apsw.VFSFile):
        def __init__(self, inherited: str, name: Any, flags: Any) -> None:
            super().__init__(inherited, name, flags)
            path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
            self.kind = "wal" if path.endswith("-wal") else "store"

        def xWrite(self, data: Any, offset: int) -> None:
            if life.stop_in == f"{self.kind} write":
                stop(f"{self.kind} write")
            super().xWrite(data, offset)

        def xSync(self, flags: int) -> None:
            if life.stop_in == f"{self.kind} sync":
                stop(f"{self.kind} sync")
            super().xSync(flags)

    class Layer(apsw.VFS):
        def __init__(self) -> None:
            super().__init__("r5-stopping", "")

        def xOpen(self, name: Any, flags: Any) -> Any:
            return File("", name, flags)

    _KEPT.append(Layer())
    return "r5-stopping"


_KEPT: list[Any] = []


# --- planted bugs -------------------------------------------------------------------------------


def _epoch_read_outside(self: Any, batch: Batch) -> None:
    """`apply` that compares the epoch before its transaction, and not in it."""
    current = self.head().epoch
    if current != batch.epoch:
        raise HolderLostError(self.store, epoch=batch.epoch, current=current)

    def body(writer: apsw.Connection) -> None:
        head = (batch.seq, batch.next_id, int(batch.clean), current)
        writer.execute(sql.HEAD_UPDATE.replace("epoch = ?", "? > 0"), head)
        self._write(writer, batch.writes)

    with self._write_lock:
        self._transact(body, flush=batch.flush)


def _heartbeat_without_epoch(self: Any, epoch: int, at_us: int) -> None:
    """`heartbeat` that shows a sign of life for whoever holds the session."""

    def body(writer: apsw.Connection) -> None:
        writer.execute("update heartbeat set at_us = ?", (at_us,))

    with self._write_lock:
        self._transact(body, flush=False)


def _release_without_epoch(self: Any, epoch: int) -> None:
    """`release` that gives up the session of whoever holds it."""

    def body(writer: apsw.Connection) -> None:
        writer.execute("update holder set released = 1")

    with self._write_lock:
        self._transact(body, flush=True)
        self._remove_lock(epoch)


PLANTS: dict[str, tuple[str, Callable[..., None]]] = {
    "epoch read outside the transaction": ("apply", _epoch_read_outside),
    "heartbeat without epoch": ("heartbeat", _heartbeat_without_epoch),
    "release without epoch": ("release", _release_without_epoch),
}


# --- a life -------------------------------------------------------------------------------------


def prepare(life: Life, stop: Stopper) -> str | None:
    """Set up this process for one life; return the file layer to use."""
    # Each loss of a session is logged: here that is what is wanted.
    logging.getLogger("pidurable").setLevel(logging.CRITICAL + 1)
    _sqlite_open.OPEN_BUSY_MS = OPEN_BUSY_MS
    _service._CHECKPOINT_PAGES = CHECKPOINT_PAGES
    _service._WAL_PAGES_MAX = CHECKPOINT_PAGES
    if life.plant is not None:
        method, planted = PLANTS[life.plant]
        setattr(SqliteStorage, method, planted)
    if life.stop_in == CLOSING:
        stop_before_closing(stop)
    elif life.stop_in in METHODS:
        stop_at_a_line(life, stop)
    elif life.stop_in is not None:
        return stop_in_the_file_layer(life, stop)
    return None


def registry_of(folder: Path, life: Life, log: HistoryLog) -> Registry:
    ledger = os.open(
        folder / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    registry = Registry()

    def book(key: str) -> None:
        os.write(ledger, f"{key} {life.who}\n".encode())

    token = f"{life.who}-{os.getpid()}"
    registry.install(Extension("r5", tasks=[Chain(book, token), Sleeper(log)]))
    return registry


async def commit(harness: Harness, conversation: int, log: HistoryLog, n: int) -> None:
    """One commit of several rows, with what was asked and answered in the log."""
    log.note("invoke", n=n)
    try:
        async with harness.commit() as tx:
            for part in range(PARTS):
                tx.append(conversation, Part(log.who, n, part))
    except (StorageRefusedError, trio.Cancelled) as error:
        log.note("fail", n=n, error=type(error).__name__)
        raise
    except BaseException as error:
        # Also a loss of the session: it may have been noticed when this was stored already.
        log.note("unknown", n=n, error=type(error).__name__)
        raise
    log.note("ok", n=n)


def parts_of(storage: Any, conversation: int) -> dict[tuple[str, int], list[int]]:
    """By (who, n), the commit numbers of the rows that are stored."""
    found: dict[tuple[str, int], list[int]] = {}
    after = 0
    while rows := storage.entries(conversation, after=after, limit=1_000):
        after = rows[-1].id
        for row in rows:
            if row.kind == "r5.part":
                data = json.loads(row.data)
                found.setdefault((data["who"], data["n"]), []).append(row.seq)
    return found


async def work(harness: Harness, folder: Path, life: Life, log: HistoryLog, stop: Stopper) -> None:
    """Hold the session: commit, run tasks, until told to leave or the session is lost."""
    harness.start()
    root = await harness.root()
    seen = parts_of(harness.session.storage, root.id)
    log.note("held", epoch=harness.session.epoch, conversation=root.id, seen=sorted(seen))
    await commit(harness, root.id, log, 0)
    sleeper = await root.create_task(Sleeper, None, key="sleeper")
    chains = []
    if not life.quiet:
        chains = [await root.create_task(Chain, f"c{n}", key=f"c{n}") for n in range(CHAINS)]
    log.note("working")
    stop.armed = True
    if life.quiet:
        await harness.wait_for_task(sleeper)
    if life.busy:
        log.note("busy")
        time.sleep(BUSY_LEASES * LEASE_SECONDS)  # noqa: ASYNC251 - that is the point
    n = 1
    while not (n > 20 if life.leaves else (folder / "finish").exists()):
        await commit(harness, root.id, log, n)
        n += 1
        await trio.sleep(0.004)
    if not life.leaves:
        for chain in chains:
            await harness.wait_for_task(chain, timeout=10)
        log.note("finished")


async def hold(folder: Path, life: Life, log: HistoryLog, stop: Stopper, vfs: str | None) -> None:
    """Open the session as soon as it can be had, and work; a loss of the session ends it."""
    takeover, began = life.takeover, trio.current_time()
    while True:
        held = False
        try:
            async with open_harness(
                folder / "s",
                registry=registry_of(folder, life, log),
                settings=SETTINGS,
                takeover=takeover,
                vfs=vfs,
            ) as harness:
                held = True
                await work(harness, folder, life, log, stop)
            log.note("left")
            return
        except HolderLostError as lost:
            log.note("lost", epoch=lost.epoch, current=lost.current)
            return
        except (StorageRefusedError, StorageHeldError) as refused:
            if held:
                raise
            log.note("refused", error=type(refused).__name__, message=str(refused))
            # Who has the write lock is let go on by its round, and then alive: it is replaced.
            takeover = takeover or isinstance(refused, StorageRefusedError)
            takeover = takeover or trio.current_time() > began + PATIENCE_SECONDS
            await trio.sleep(0.02)


def try_stale_writes(folder: Path, log: HistoryLog, epoch: int) -> None:
    """Whatever the epoch was replaced by: a commit, a sign of life and a close are refused."""
    storage = SqliteStorage(folder / "s", create=False)
    if storage.head().epoch == epoch:
        # It has closed before anybody took the session over.
        storage.close()
        return
    late = Batch(epoch=epoch, seq=2**40, next_id=2**40, flush=True, writes=[])
    calls: dict[str, Callable[[], None]] = {
        "apply": lambda: storage.apply(late),
        "heartbeat": lambda: storage.heartbeat(epoch, 2**50),
        "release": lambda: storage.release(epoch),
    }
    for name, call in calls.items():
        try:
            call()
        except HolderLostError:
            log.note("refused stale", call=name)
        except PidurableError as error:
            log.note("crashed", error=f"a stale {name} raised {error!r}")
        else:
            log.note("crashed", error=f"a stale {name} was accepted")
    storage.close()


async def _live(folder: Path, life: Life, log: HistoryLog, stop: Stopper, vfs: str | None) -> None:
    with trio.fail_after(LIFE_SECONDS_MAX):
        await hold(folder, life, log, stop, vfs)


def live(folder: Path, life: Life) -> None:
    """Live one life in this process, which is a fork made for it; never returns."""
    log = HistoryLog(folder / f"{life.who}.log", life.who)
    status = 1
    try:
        stop = Stopper(log, life.stop_at)
        vfs = prepare(life, stop)
        trio.run(_live, folder, life, log, stop, vfs)
        if life.who == "first":
            try_stale_writes(folder, log, 1)
        status = 0
    except BaseException:
        log.note("crashed", error=traceback.format_exc())
    finally:
        os._exit(status)


async def both(folder: Path, takeovers: int) -> None:
    """Two harnesses in one process take the session from each other while both commit."""
    logging.getLogger("pidurable").setLevel(logging.CRITICAL + 1)
    names = ("first", "second")
    logs = {name: HistoryLog(folder / f"{name}.log", name) for name in names}
    numbers = dict.fromkeys(names, 0)

    async def one(name: str, log: HistoryLog) -> None:
        for _ in range(takeovers):
            # Each storage of a process has handles of its own: to the other one it is a process.
            try:
                async with open_harness(folder / "s", settings=SETTINGS, takeover=True) as harness:
                    root = await harness.root()
                    while True:
                        numbers[name] += 1
                        await commit(harness, root.id, log, numbers[name])
            except HolderLostError as lost:
                log.note("lost", epoch=lost.epoch, current=lost.current)
                await trio.sleep(0.01)

    with trio.move_on_after(LIFE_SECONDS_MAX):
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(one, name, logs[name])
            while sum(numbers.values()) < 100:  # noqa: ASYNC110 - commits are counted, not told
                await trio.sleep(0.005)
            nursery.cancel_scope.cancel()
