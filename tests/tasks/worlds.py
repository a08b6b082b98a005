"""What the tests of this folder run on: scripted tasks, held commits, crashes, a recount."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from recount import check_commit, check_history, check_tree
from trio.testing import wait_all_tasks_blocked

from pidurable.errors import SessionPoisonedError
from pidurable.records._codec import Codec
from pidurable.records._limits import Settings
from pidurable.records._tasks import Outcome
from pidurable.session._seams import SeededRandomness, TrioClock
from pidurable.storage import MemoryStorage, TaskRow
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase
from pidurable.tasks._open import open_runtime
from pidurable.tasks._runtime import Runtime, StaticDefinitions
from pidurable.testing import Fault, FaultyStorage

CODEC = Codec()
"""Of every world: what a codec learns of a type takes longer than many a test."""
ROOT = 1
"""The id of the first conversation of every world."""


@attrs.frozen
class Start:
    """Nothing has happened yet."""


@attrs.frozen
class Next:
    """A script has gone on; `n` says how far."""

    n: int = 0


Ctx = TaskContext[str, Start | Next, str]
Script = Callable[[Any, Any], Awaitable[None]]


async def end_aborted(at: Any, ctx: Any) -> None:
    """The abort script of an actor that has no other."""
    await ctx.end_aborted("undone")


class Actor(Task[str, Start | Next, str]):
    """A task whose phases and abort handler are the scripts of its name, given by the test."""

    name = "test.actor"

    def __init__(self, world: World) -> None:
        self.world = world

    def initial(self, input: str) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        self.world.log.append(f"{ctx.input} start")
        await self.world.scripts[ctx.input](at, ctx)

    @phase
    async def next(self, at: Next, ctx: Ctx) -> None:
        self.world.log.append(f"{ctx.input} next {at.n}")
        await self.world.scripts[ctx.input](at, ctx)

    async def abort(self, at: Start | Next, ctx: Ctx) -> None:
        self.world.log.append(f"{ctx.input} abort")
        await self.world.aborts.get(ctx.input, end_aborted)(at, ctx)


class Other(Actor):
    """The same under another kind."""

    name = "test.other"


class Harmless(Actor):
    """The same, with nothing to undo."""

    name = "test.harmless"
    abort = nothing_to_undo  # type: ignore[assignment]


class _HeldWorker:
    def __init__(self, blocking: HeldBlocking) -> None:
        self._blocking = blocking

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.cancel_shielded_checkpoint()
        if getattr(fn, "__name__", "") == "apply":
            with trio.CancelScope(shield=True):
                await self._blocking.gate.wait()
        return fn(*args)

    def close(self) -> None:
        """Nothing to close."""


class HeldBlocking:
    """Blocking work in the loop; the storage can be held with a commit inside it."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.gate.set()

    def hold(self) -> None:
        """From now on commits stay inside the storage."""
        self.gate = trio.Event()

    def release(self) -> None:
        self.gate.set()

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return fn(*args)

    def worker(self, name: str) -> Any:
        return _HeldWorker(self)


class World:
    """One store, what runs on it, and what happened outside of it."""

    def __init__(self, *kinds: type[Actor], **settings: Any) -> None:
        self.base = MemoryStorage(uuid="world", created_us=1)
        self.blocking = HeldBlocking()
        self.clock = TrioClock()
        self.settings = Settings(**settings)
        self.scripts: dict[str, Script] = {}
        self.aborts: dict[str, Script] = {}
        self.log: list[str] = []
        self.seen: dict[int, TaskRow] = {}
        self.install(*(kinds or (Actor, Other, Harmless)))
        self.rt: Runtime
        self.storage: FaultyStorage

    def install(self, *kinds: type[Actor]) -> None:
        """Make these the installed definitions, as new objects."""
        made = [kind(self) if issubclass(kind, Actor) else kind() for kind in kinds]
        self.definitions = StaticDefinitions(made, CODEC)

    @asynccontextmanager
    async def open(
        self, *, start: bool = True, faults: Iterable[Fault] = (), clock: Any = None
    ) -> AsyncIterator[Runtime]:
        """Hold the store and run what is in it."""
        self.storage = FaultyStorage(self.base.reopen())
        self.blocking.release()
        for fault in faults:
            self.storage.add(fault)
        async with open_runtime(
            self.storage,
            snapshot=lambda: self.definitions,
            settings=self.settings,
            clock=clock or self.clock,
            blocking=self.blocking,
            randomness=SeededRandomness(1),
        ) as runtime:
            self.rt = runtime
            runtime.session.participants.append(Watcher(self))
            if self.base.reopen().conversation(ROOT) is None:
                made = await runtime.commit(lambda tx: tx.create_conversation())
                assert made == ROOT
            if start:
                runtime.start()
            yield runtime

    def crash(self) -> None:
        """The process is dead: nothing more comes through, and nobody may notice it kindly."""
        self.storage.freeze()
        self.rt.session.line.set_poison(SessionPoisonedError("world", "killed by the test"))

    @asynccontextmanager
    async def crashing(self, **options: Any) -> AsyncIterator[Runtime]:
        """`open`, whose block ends with the death of the process."""
        try:
            async with self.open(**options) as runtime:
                yield runtime
                self.crash()
        except SessionPoisonedError:
            return

    # --- acting --------------------------------------------------------------------------

    async def create(
        self, name: str, script: Script | None = None, *, kind: type[Actor] = Actor, **options: Any
    ) -> Any:
        """Create an actor in the root conversation."""
        if script is not None:
            self.scripts[name] = script
        options.setdefault("conversation", ROOT)
        return await self.rt.commit(lambda tx: tx.create_task(kind, name, **options))

    async def abort(self, task_id: int, reason: str = "user") -> None:
        await self.rt.commit(lambda tx: tx.abort_task(task_id, reason))

    async def signal(
        self, task_id: int, name: str = "go", payload: Any = None, **more: Any
    ) -> None:
        await self.rt.commit(lambda tx: tx.signal(task_id, name, payload, **more))

    async def end(self, task_id: int) -> Outcome[Any]:
        return await self.rt.wait_for_task(task_id)

    async def quiet(self) -> None:
        """Let everything run until nothing more happens by itself."""
        await wait_all_tasks_blocked()

    # --- looking -------------------------------------------------------------------------

    def row(self, task_id: int) -> TaskRow:
        row = self.base.reopen()._data.tasks.get(task_id)
        assert row is not None
        return row

    def rows(self) -> list[TaskRow]:
        """Every task of the store."""
        return list(self.base.reopen()._data.tasks.values())

    def status(self, task_id: int) -> str:
        return ("pending", "running", "waiting", "completing", "terminal")[self.row(task_id).status]

    def marked(self, *task_ids: int) -> list[bool]:
        return [self.row(id).abort_us is not None for id in task_ids]

    def outcome(self, task_id: int) -> str | None:
        return self.row(task_id).outcome_status


class Watcher:
    """A participant that checks every published commit, and the tree after each batch."""

    def __init__(self, world: World) -> None:
        self.world = world

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None: ...

    def reverted(self) -> None: ...

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...

    def committed(self, tx: Any) -> None:
        check_commit(tx)
        if tx.seq == self.world.rt.session.line.published_seq:
            check_history(self.world.seen, self.world.base)
            check_tree(self.world.rt, self.world.base)


async def forever(at: Any, ctx: Any) -> None:
    await trio.sleep_forever()


async def done(at: Any, ctx: Any) -> None:
    await ctx.complete(ctx.input)


def parent_of(*children: str, policy: Any = "all_settled", kind: type[Actor] = Actor) -> Script:
    """A script that creates children, waits for them, and completes with their outcomes."""

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                ids = [tx.create_task(kind, name, key=name) for name in children]
                tx.wait(then=Next(1), on=ids, policy=policy)
            return
        keyed = ctx.snapshot.keyed_tasks()
        outcomes = await ctx.outcomes([keyed[name] for name in children])
        await ctx.complete(",".join(outcome.status for outcome in outcomes))

    return script


def child_of(world: World, owner: int, key: str) -> int:
    """The task that an owner created under a key."""
    return dict(world.base.reopen()._data.tasks_by_key)[("owner", owner, key)]
