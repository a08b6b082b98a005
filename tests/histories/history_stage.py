"""The store of a history and the process that holds it: opened, faulted, killed, opened again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from pidurable.harness._open import Harness, open_harness
from pidurable.records._limits import Settings
from pidurable.registry import Extension, Registry
from pidurable.session._seams import InlineBlocking, SeededRandomness, TrioClock
from pidurable.storage import MemoryStorage, SqliteStorage, Storage
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase
from pidurable.testing import FaultyStorage, ReopeningStorage

RETRY_SECONDS = 2.0
FOREVER = 1e9
REOPENED_EVERY = 7
"""Every so many seeds the storage in memory is opened again after every batch."""


@attrs.frozen
class Sitting:
    """The task sits at its desk until it is told to end."""


Ctx = TaskContext[str, Sitting, str]
Order = Callable[[Any], Awaitable[bool]]


class Seat:
    """One running phase, and the order that it waits for."""

    def __init__(self, ctx: Ctx) -> None:
        self.ctx = ctx
        self._order: Order | None = None
        self._given = trio.Event()

    def give(self, order: Order) -> None:
        self._order = order
        self._given.set()

    async def obey(self) -> None:
        while True:
            await self._given.wait()
            self._given = trio.Event()
            assert self._order is not None
            if await self._order(self.ctx):
                return


class Sitter(Task[str, Sitting, str]):
    """A task that does what the history says, in commits of its own."""

    name = "histories.sitter"
    abort = nothing_to_undo

    def initial(self, input: str) -> Sitting:
        return Sitting()

    @phase
    async def sitting(self, at: Sitting, ctx: Ctx) -> None:
        seat = SEATS[int(ctx.task_id)] = Seat(ctx)
        try:
            await seat.obey()
        finally:
            if SEATS.get(int(ctx.task_id)) is seat:
                del SEATS[int(ctx.task_id)]


SEATS: dict[int, Seat] = {}
"""The running phases of the one history that is played at a time, by task."""
REGISTRY = Registry()
"""One for all histories, so that what decodes the documents is made once."""
REGISTRY.install(Extension("histories", tasks=[Sitter()]))


class _JitteryWorker:
    """A batch becomes durable some turns of the loop after it came, and is known of some later."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        with trio.CancelScope(shield=True):
            await _turns(self._random.randint(1, 3))
            found = fn(*args)
            await _turns(self._random.randint(0, 3))
        return found

    def close(self) -> None:
        """Nothing to close."""


class JitteryBlocking:
    """Blocking work in the loop, which takes some turns of it, before the call and after it."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def run(self, fn: Callable[..., Any], *args: Any, abandon: bool = False) -> Any:
        await _turns(self._random.randint(1, 3))
        found = fn(*args)
        await _turns(self._random.randint(0, 3))
        return found

    def worker(self, name: str) -> _JitteryWorker:
        return _JitteryWorker(self._random)


async def _turns(many: int) -> None:
    for _ in range(many):
        await trio.lowlevel.checkpoint()


class Witness:
    """The participant that tells the history of each commit that was published or dropped."""

    def __init__(self, published: Callable[[Any], None], reverted: Callable[[], None]) -> None:
        self._published, self._reverted = published, reverted

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None: ...

    def committed(self, tx: Any) -> None:
        self._published(tx)

    def reverted(self) -> None:
        self._reverted()

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...


class Stage:
    """One store, in memory or in a file, and the harness that is open over it."""

    def __init__(self, seed: int, path: Path | None) -> None:
        self.openings = 0
        self.harness: Harness
        self.storage: FaultyStorage
        self._seed = seed
        self._random = Random(f"{seed}/turns")
        self._jittery = seed % 2 == 0
        self._path = path
        self._memory = MemoryStorage(uuid="history", created_us=1)

    @asynccontextmanager
    async def open(
        self, published: Callable[[Any], None], reverted: Callable[[], None]
    ) -> AsyncIterator[Harness]:
        inner: Storage
        if self._path is None:
            inner = self._memory.reopen()
            if self._seed % REOPENED_EVERY == 1:
                inner = ReopeningStorage(inner, lambda _: self._memory.reopen())
        else:
            inner = SqliteStorage(self._path, durability="process")
        self.storage = FaultyStorage(inner)
        SEATS.clear()
        self.openings += 1
        async with open_harness(
            self.storage,
            registry=REGISTRY,
            settings=Settings(
                storage_retry_seconds=RETRY_SECONDS,
                # A task that was there at each of many deaths has no part in them.
                recoveries_max=10_000,
                heartbeat_seconds=FOREVER,
                lease_seconds=FOREVER,
            ),
            clock=TrioClock(shared=True),
            blocking=JitteryBlocking(self._random) if self._jittery else InlineBlocking(),
            randomness=SeededRandomness(self._seed + self.openings),
            takeover=True,
        ) as harness:
            self.harness = harness
            harness.session.participants.append(Witness(published, reverted))
            harness.start()
            yield harness

    async def seat(self, task_id: int) -> Seat:
        """The running phase of a live task, once it runs."""
        for _ in range(60):
            if task_id in SEATS:
                return SEATS[task_id]
            await wait_all_tasks_blocked()
            # Held back after a refusal, until a probe was stored; or suspected of the deaths of the
            # process, and tried alone, one after the other.
            await trio.sleep(10.0)
        raise AssertionError(
            f"task {task_id} does not come to run: {self.harness.explain(task_id)}"
        )
