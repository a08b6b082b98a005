"""Where programs are played: a store, definitions that can be replaced, tasks that do as told.

A handler waits in memory, in a `Box`, until the player hands it an order. Everything that a handler
or the host commits goes through here, so that the model knows who committed and what was asked for,
and judges each refusal: an error that it does not expect, or one that it expects and that does not
come, is a problem like a wrong commit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from oracle import Oracle
from rare import note_death
from telling import Asked, Ledger

from pidurable.errors import PidurableError, SessionPoisonedError, StorageAccessError
from pidurable.records._codec import Codec
from pidurable.records._limits import Settings
from pidurable.session._seams import SeededRandomness, TrioClock
from pidurable.storage import (
    Batch,
    MemoryStorage,
    Op,
    SqliteStorage,
    Storage,
    TaskRow,
    TaskStateRow,
)
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Retry, Task, nothing_to_undo, phase
from pidurable.tasks._open import open_runtime
from pidurable.tasks._runtime import Runtime, StaticDefinitions
from pidurable.tasks._tree import PENDING
from pidurable.testing._forwarding import ForwardingStorage

ROOT = 1
ENDED = frozenset({"SessionClosedError", "SessionPoisonedError"})
"""What everything may raise once the session has ended."""

LIMITS = {"sim.few": 2}
RUNNING_MAX = 12
KINDS = ("sim.plain", "sim.retry", "sim.few", "sim.harmless", "sim.park")
FOREVER = 1e9


@attrs.frozen
class Start:
    """Nothing has happened yet."""


@attrs.frozen
class Next:
    """Some orders were carried out."""

    n: int = 0


Ctx = TaskContext[str, Start | Next, str]


class Played(Task[str, Start | Next, str]):
    """A task that does what the player tells it. Its input says who tells its abort handler."""

    name = "sim.plain"
    stage: Stage
    number: int

    def initial(self, input: str) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await self.stage.perform(self, at, ctx, "phase")

    @phase
    async def next(self, at: Next, ctx: Ctx) -> None:
        await self.stage.perform(self, at, ctx, "phase")

    async def abort(self, at: Start | Next, ctx: Ctx) -> None:
        await self.stage.perform(self, at, ctx, "abort")


_made: dict[tuple[str, int, bool], type[Played]] = {}


def kind_of(name: str, version: int = 1, *, migrates: bool = False) -> type[Played]:
    """The class of a kind, in a version; made once."""
    key = (name, version, migrates)
    if key not in _made:
        body: dict[str, Any] = {"name": name, "version": version, "__module__": __name__}
        if name == "sim.retry":
            body["retry"] = Retry(on=(OSError,), tries=3, base=1.0)
        elif name == "sim.harmless":
            body["abort"] = nothing_to_undo
        elif name == "sim.park":
            body["on_fault"] = "park"
        if migrates:

            def migrate(self: Any, input: Any, checkpoint: Any, from_version: int) -> Any:
                value = {"n": checkpoint["value"].get("n", 0) + 1000}
                return input, {"phase": "next", "value": value}

            body["migrate"] = migrate
        _made[key] = type("Played" + name[4:].title(), (Played,), body)
    return _made[key]


class HeldWorker:
    """The writer's worker: commits can be held inside the storage."""

    def __init__(self, blocking: HoldingBlocking) -> None:
        self._blocking = blocking

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.cancel_shielded_checkpoint()
        if getattr(fn, "__name__", "") == "apply":
            self._blocking.inside = True
            with trio.CancelScope(shield=True):
                await self._blocking.gate.wait()
            self._blocking.inside = False
            self._blocking.passed()
        return fn(*args)

    def close(self) -> None:
        """Nothing to close."""


class HoldingBlocking:
    """Blocking work in the loop itself, with a gate before the storage."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.gate.set()
        self.inside = False
        self._left: int | None = None

    @property
    def held(self) -> bool:
        return not self.gate.is_set()

    def hold(self) -> None:
        if not self.held:
            self.gate = trio.Event()

    def hold_after(self, batches: int) -> None:
        """Hold once so many more batches have passed."""
        self._left = batches

    def passed(self) -> None:
        if self._left is not None:
            self._left -= 1
            if not self._left:
                self._left = None
                self.hold()

    def release(self) -> None:
        self._left = None
        self.gate.set()

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return fn(*args)

    def worker(self, name: str) -> Any:
        return HeldWorker(self)


class RecordingStorage(ForwardingStorage):
    """Tells the ledger what has become durable, and dies when it is told to."""

    def __init__(self, inner: Storage, ledger: Ledger) -> None:
        super().__init__(inner)
        self.ledger = ledger
        self.frozen = False
        self.dies: str | None = None
        """Whether the process dies `before` or `after` the next batch is stored."""

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        if self.frozen and name != "close":
            raise StorageAccessError(self.store, f"frozen: no {name} comes through any more")
        return call()

    def apply(self, batch: Batch) -> None:
        self._call("apply", lambda: None)
        if self.dies == "before":
            self.frozen = True
            raise StorageAccessError(self.store, "the process died before the batch was stored")
        if batch.clean:
            self.ledger.tell(batch.seq, Asked(by="close"), batch.writes)
        self.inner.apply(batch)
        self.ledger.stored(batch.seq)
        if self.dies == "after":
            self.frozen = True
            raise StorageAccessError(self.store, "the process died with the batch stored")


def ids_of(starts: Any) -> set[int]:
    """The tasks that a commit has reserved."""
    return {each.task_id for each in starts.invocations}


def apart(
    writes: list[tuple[Op, Any]], reserved: set[int]
) -> tuple[list[tuple[Op, Any]], list[tuple[Op, Any]]]:
    """What a commit writes of itself, and what reserves tasks: the last state of each of them."""
    left, first, second = set(reserved), list[tuple[Op, Any]](), list[tuple[Op, Any]]()
    waits: set[int] = set()
    for op, row in reversed(writes):
        if op is Op.TASK_STATE and row.id in left:
            left.discard(row.id)
            waits.add(row.id)
            second.append((op, row))
        elif op is Op.WAIT_DELETE and row[0] in waits:
            waits.discard(row[0])
            second.append((op, row))
        elif op is Op.TASK and row.id in left:
            # Reserved by the commit that creates it, which stores it once, as running.
            left.discard(row.id)
            first.append((op, row._replace(status=PENDING, started_us=None, invocations=0)))
            second.append((Op.TASK_STATE, _state_of(row)))
        else:
            first.append((op, row))
    return first[::-1], second[::-1]


def _state_of(row: TaskRow) -> TaskStateRow:
    return TaskStateRow(**{name: getattr(row, name) for name in TaskStateRow._fields})


class Witness:
    """The participant that tells the ledger of every commit."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None:
        self.stage.joined(tx)

    def committed(self, tx: Any) -> None:
        self.stage.ledger.published(tx.seq)

    def reverted(self) -> None:
        self.stage.ledger.lost()

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...


Order = Callable[["Box"], Awaitable[bool]]


class Box:
    """One running handler, and the order that it waits for."""

    def __init__(self, stage: Stage, ctx: Any, at: Any, handler: str) -> None:
        self.stage, self.ctx, self.handler = stage, ctx, handler
        self.task = int(ctx.task_id)
        self.n = getattr(at, "n", 0)
        self.idle = False
        self._order: Order | None = None
        self._given = trio.Event()

    def give(self, order: Order) -> None:
        self.idle = False
        self._order = order
        self._given.set()

    async def obey(self) -> None:
        """Carry out orders until one ends the handler."""
        while True:
            self._given = trio.Event()
            self.idle = True
            await self._given.wait()
            assert self._order is not None
            if await self._order(self):
                return

    async def commit(self, body: Callable[[Any], None], expected: Callable[[], set[str]]) -> str:
        """One commit of this handler; "" if it was done, else the error that refused it."""
        stage, allowed = self.stage, {""}

        def fill(tx: Any) -> None:
            nonlocal allowed
            tx.asked = Asked(by=self.task)
            allowed = expected()
            body(tx)

        try:
            async with self.ctx.commit() as tx:
                fill(tx)
        except PidurableError as error:
            return stage.judge(self, allowed, type(error).__name__, error)
        return stage.judge(self, allowed, "", None)


class Stage:
    """One store and everything that a program can do with it."""

    def __init__(self, *, seed: int = 0, path: Path | None = None) -> None:
        self.model = Oracle(LIMITS, RUNNING_MAX)
        self.clock = TrioClock()
        self.ledger = Ledger(self.model, now_us=lambda: self.clock.now_us())
        self.blocking = HoldingBlocking()
        self.boxes: dict[int, Box] = {}
        self.leaked: list[Box] = []
        self.versions: dict[str, tuple[int, bool]] = dict.fromkeys(KINDS, (1, False))
        self.ending = False
        self.openings = 0
        self._seed = seed
        self._path = path
        self._base = MemoryStorage(uuid="simulated", created_us=1)
        self._objects: dict[str, Played] = {}
        self._counter = 0
        for name in KINDS:
            self._install(name)
        self._publish()
        self.rt: Runtime
        self.storage: RecordingStorage

    # --- definitions ---------------------------------------------------------------------

    def _install(self, name: str) -> None:
        version, migrates = self.versions[name]
        made = kind_of(name, version, migrates=migrates)()
        self._counter += 1
        made.stage, made.number = self, self._counter
        self._objects[name] = made

    def _publish(self) -> None:
        self.definitions = StaticDefinitions(list(self._objects.values()), Codec())
        self.ledger.definitions = {
            name: {
                "object": made.number,
                "version": made.version,
                "migrate": self.versions[name][1],
                "undo": name != "sim.harmless",
                "tries": 3 if name == "sim.retry" else 0,
                "park": name == "sim.park",
            }
            for name, made in self._objects.items()
        }

    async def replace(self, name: str, how: str) -> None:
        """Install another object of a definition: same, newer, newer_cold, older or none."""
        version, _ = self.versions[name]
        if how == "none":
            self._objects.pop(name, None)
        else:
            change = {"same": 0, "newer": 1, "newer_cold": 1, "older": -1}[how]
            self.versions[name] = (max(1, version + change), how != "newer_cold")
            self._install(name)
        self._publish()
        self.ledger.trace.append(f"replace {name} {how} {self.ledger.definitions.get(name)}")
        await self.rt.definitions_changed()

    # --- the process ---------------------------------------------------------------------

    @asynccontextmanager
    async def open(self, *, start: bool) -> AsyncIterator[Runtime]:
        """Hold the store for as long as the block lasts; a process that died leaves it as well."""
        inner: Storage = self._base.reopen() if self._path is None else SqliteStorage(self._path)
        self.storage = RecordingStorage(inner, self.ledger)
        self.ending = False
        self.blocking.release()
        self.openings += 1
        self.ledger.opening = True
        self.ledger.trace.append(f"open {self.openings} start={start}")
        try:
            async with open_runtime(
                self.storage,
                snapshot=lambda: self.definitions,
                settings=Settings(
                    limits=LIMITS,
                    running_max=RUNNING_MAX,
                    lease_seconds=FOREVER,
                    heartbeat_seconds=FOREVER,
                ),
                clock=self.clock,
                blocking=self.blocking,
                randomness=SeededRandomness(self._seed + self.openings),
                takeover=True,
                prepare=self._prepare,
            ) as runtime:
                # Every other seed has them reserved by the commits that make them ready.
                runtime.at_once = frozenset(KINDS if self._seed % 2 else ())
                self.ledger.opening = False
                if ROOT not in self.model.conversations:
                    await self.host(lambda tx: tx.create_conversation())
                self.ledger.opened()
                if start:
                    self.start()
                yield runtime
                self.ending = True
        except SessionPoisonedError:
            if not self.storage.frozen:
                raise
        self.ending = True
        if self.storage.frozen:
            self.note_death()
        self.ledger.closed(crashed=self.storage.frozen)
        self.leaked.clear()

    def memory(self) -> MemoryStorage | None:
        """The store, if it is one in memory."""
        return self._base if self._path is None else None

    def _prepare(self, runtime: Runtime) -> None:
        self.rt = runtime
        runtime.session.participants.append(Witness(self))

    def note_death(self) -> None:
        self.ledger.lost()
        note_death(self.model, self.clock.now_us())

    def start(self) -> None:
        self.model.started = True
        self.rt.start()

    def die(self) -> None:
        """The process is dead: nothing comes through any more, and nobody notices it kindly."""
        self.storage.frozen = True
        self.rt.session.line.set_poison(SessionPoisonedError("simulated", "killed by the player"))

    # --- commits -------------------------------------------------------------------------

    def joined(self, tx: Any) -> None:
        asked = getattr(tx, "asked", None) or Asked(
            by="open" if self.ledger.opening else "scheduler"
        )
        made, host = False, asked.by == "host"
        writes = tx.writes
        reserved = set() if not tx.reserves or tx.starts is None else ids_of(tx.starts)
        if reserved:
            # The model knows reservations of the scheduler alone: to it these are a commit behind
            # the one that they are a part of.
            first, writes = apart(writes, reserved)
            made = self.ledger.tell(tx.seq - 0.5, asked, first)
            asked = Asked(by="scheduler")
        made = self.ledger.tell(tx.seq, asked, writes) or made
        if host and made:
            # What a host creates is to run.
            self.model.started = True

    async def host(
        self,
        body: Callable[[Any], Any],
        expected: Callable[[], set[str]] = lambda: {""},
    ) -> str:
        """One commit of the host; "" if it was done, else the error that refused it."""
        allowed = {""}

        def fill(tx: Any) -> Any:
            nonlocal allowed
            tx.asked = Asked(by="host")
            allowed = expected()
            return body(tx)

        try:
            await self.rt.commit(fill)
        except PidurableError as error:
            return self.judge(None, allowed, type(error).__name__, error)
        return self.judge(None, allowed, "", None)

    def judge(self, box: Box | None, allowed: set[str], got: str, error: Any) -> str:
        """Compare how a commit was answered with what the model expects."""
        who = "host" if box is None else f"task {box.task}"
        if got:
            self.ledger.trace.append(f"{who} refused: {got}: {error}")
        if got in ENDED and (self.ending or self.storage.frozen or self.rt.closing):
            return got
        if got == "StorageAccessError" and self.storage.frozen:
            return got
        if got in ("AbortRequestedError", "InvocationEndedError") and box is not None:
            task = self.model.tasks[box.task]
            late = task["status"] != "running" or task["mark"] is not None or box in self.leaked
            if late:
                self.model.rare["late commit refused"] += 1
                return got
        if got not in allowed:
            self.ledger.wrong(f"{who}: answered {got or 'done'!r}, expected {sorted(allowed)}")
        return got

    # --- handlers ------------------------------------------------------------------------

    async def perform(self, definition: Played, at: Any, ctx: Any, handler: str) -> None:
        """The body of every handler."""
        task, model = int(ctx.task_id), self.model
        tag = "next" if isinstance(at, Next) else "start"
        self.ledger.trace.append(f"enter {task} {handler} {tag}")
        if task in self.boxes:
            self.ledger.wrong(f"task {task}: {handler} began while {self.boxes[task].handler} runs")
        model.definitions = self.ledger.definitions
        self.ledger.at_published(lambda: model.entered(task, handler, tag, definition.number))
        if handler == "abort" and task in self.ledger.raised:
            model.rare["mark against fault"] += 1
        self.ledger.raised.pop(task, None)
        box = Box(self, ctx, at, handler)
        self.boxes[task] = box
        try:
            if handler == "abort" and ctx.input == "auto":
                await box.commit(lambda tx: tx.end_aborted("undone"), lambda: {""})
            else:
                await box.obey()
            self.ledger.raised[task] = "nothing"
        except Exception as error:
            self.ledger.raised[task] = "oserror" if isinstance(error, OSError) else "raise"
            raise
        finally:
            del self.boxes[task]
