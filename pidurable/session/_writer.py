"""Sending batches to the storage: where the call runs, and what follows a refusal.

A small batch that needs no flush is written in the loop, because the way to the writer thread and
back costs several times as much as the write. A flushed batch goes to the thread, so that the loop
never waits for the disk. The one exception is the commit of somebody who is alone, on a disk that
has been quick for a while: there the way costs more than the flush, and whoever else runs is held
up less by the flush than by most steps of a task. How quick the disk is shows with every such
commit, in the loop and in the thread; a slow one sends the next ones back to the thread, the more
the slower it was, so that waiting for a disk that hesitates takes at most a tenth of the loop. How
long a batch of several takes tells nothing: the thread also waits for the loop, which goes on.

A refusal is certain that nothing was stored, so the same batch is sent again; any other error is
not for this module to judge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, final

import trio

from pidurable.errors import (
    PidurableError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.records._limits import Settings
from pidurable.session._batch import Draft, OpenBatch
from pidurable.session._blobs import are_short
from pidurable.session._seams import Failpoints, ThreadWorker, Worker, real_seconds
from pidurable.storage import Batch, Op, Storage

T = TypeVar("T")

_INLINE_WRITES_MAX = 64
"""Rows of a batch that is still small enough to be written in the loop."""

QUICK_FLUSH_SECONDS = 0.001
"""A flush of a lone commit that takes no longer may be waited for in the loop."""

QUICK_FLUSHES = 32
"""Flushes in a row that have to be quick before the loop waits for one. A slow one asks for as many
again for each millisecond that it took."""

QUICK_FLUSHES_MAX = 100_000

RETRY_SECONDS_MIN = 0.01
RETRY_SECONDS_MAX = 1.0


@final
class FlushPace:
    """Whether the disk has been quick for long enough that the loop may wait for it."""

    __slots__ = ("_needed",)

    def __init__(self) -> None:
        self._needed = QUICK_FLUSHES
        """How many more flushes have to be quick."""

    @property
    def is_quick(self) -> bool:
        return self._needed == 0

    def took(self, seconds: float) -> None:
        """Count the flush of a lone commit, which took this long, wherever it was waited for."""
        if seconds > QUICK_FLUSH_SECONDS:
            needed = int(seconds / QUICK_FLUSH_SECONDS * QUICK_FLUSHES)
            self._needed = min(max(self._needed, needed), QUICK_FLUSHES_MAX)
        elif self._needed:
            self._needed -= 1


class BatchWriter:
    """Sends the batches of one session, one after the other."""

    def __init__(
        self,
        storage: Storage,
        *,
        worker: Worker,
        settings: Settings,
        failpoints: Failpoints,
        epoch: int,
        inline: bool,
        power: bool,
    ) -> None:
        """Write to a storage that is held.

        Args:
            storage: Where batches go.
            worker: The thread that flushed batches are stored in.
            settings: Limits.
            failpoints: Named places for tests.
            epoch: The holder's epoch; every batch is checked against it.
            inline: Store everything in the loop (for a storage in memory).
            power: Commits survive a loss of power; else nothing is ever flushed.
        """
        self._locked = 0
        """Calls in the thread that have the write lock, or wait for their turn there."""
        self._syncing = 0
        """Calls there that flush files of the store: another flush would wait for theirs."""
        self._storage = storage
        self._worker = worker
        self._settings = settings
        self._failpoints = failpoints
        self._epoch = epoch
        self._inline = inline
        self._power = power
        self._pace = FlushPace() if isinstance(worker, ThreadWorker) and not inline else None
        """None where there are no threads: there nothing may depend on how long a call takes."""

    def gather(self, drafts: list[Draft], next_id: int) -> Batch:
        """One write of several commits. A batch with one flushed member is flushed."""
        writes: list[tuple[Op, tuple[Any, ...]]] = []
        flush = False
        for draft in drafts:
            writes += draft.writes
            flush = flush or draft.flush
        return Batch(
            epoch=self._epoch,
            seq=drafts[-1].seq,
            next_id=next_id,
            flush=flush and self._power,
            writes=writes,
            short=are_short(writes),
        )

    async def store(self, stored: Batch, batch: OpenBatch) -> PidurableError | None:
        """Store a batch; tell what went wrong in the words of those who wait for it.

        Returns:
            None if it is durable; a StorageRefusedError if certainly nothing of it is stored; else
            a SessionPoisonedError: another holder has the session, or nobody knows.
        """
        try:
            self._failpoints.hit("commit.before")
            await self._apply(stored, batch)
            self._failpoints.hit("commit.after")
        except (StorageRefusedError, SessionPoisonedError) as certain:
            return certain
        except BaseException as unknown:  # noqa: ASYNC103 - told as a poison
            # It may or may not be stored. Nobody is told anything but that.
            poison = SessionPoisonedError(
                self._storage.store, f"{type(unknown).__name__}: {unknown}"
            )
            poison.__cause__ = unknown
            return poison  # noqa: ASYNC104 - told as a poison
        return None

    async def run_locking(self, fn: Callable[..., T], *args: Any) -> T:
        """Run in the thread what has the write lock for long; not cancellable.

        It stands in line with the batches there, and none is written in the loop meanwhile: that
        would stop the loop, and not just the batch.
        """
        self._locked += 1
        try:
            return await self._worker.run(fn, *args)
        finally:
            self._locked -= 1

    async def run_syncing(self, fn: Callable[..., T], *args: Any) -> T:
        """Run in the thread what flushes much; not cancellable. Nothing else is flushed meanwhile.

        In the loop a flush would wait for the disk beside it, and tell nothing of how quick it is.
        """
        self._syncing += 1
        try:
            return await self._worker.run(fn, *args)
        finally:
            self._syncing -= 1

    async def _apply(self, stored: Batch, batch: OpenBatch) -> None:
        """Send a batch, again and again while the storage refuses it for certain.

        Not cancellable. Ctrl-C while it waits to try again ends the trying, and is left on `batch`.

        Raises:
            StorageRefusedError: It was refused for `storage_retry_seconds`.
        """
        delay = RETRY_SECONDS_MIN
        give_up_at: float | None = None
        small = len(stored.writes) <= _INLINE_WRITES_MAX
        apply = self._storage.apply
        if small and stored.flush:
            small = False
            if self._pace is not None and stored.short and len(batch.members) == 1:
                apply = functools.partial(self._apply_measured, self._pace)
                small = self._pace.is_quick and not self._syncing
        while True:
            try:
                if self._inline or (small and not self._locked):
                    apply(stored)
                else:
                    await self._worker.run(apply, stored)
            except StorageRefusedError as refused:
                # A lock that another process holds keeps the call waiting: the next one waits in
                # the thread, and not in the loop.
                small = False
                now = trio.current_time()
                if give_up_at is None:
                    give_up_at = now + self._settings.storage_retry_seconds
                if now >= give_up_at:
                    raise
                delay = min(delay, give_up_at - now)
                try:
                    with trio.CancelScope(shield=True):
                        await trio.sleep(delay)
                except KeyboardInterrupt as interrupt:
                    # A person does not want to wait for the disk; the refusal stands.
                    batch.interrupt = interrupt
                    raise refused from interrupt
                delay = min(delay * 2, RETRY_SECONDS_MAX)
            else:
                return

    def _apply_measured(self, pace: FlushPace, stored: Batch) -> None:
        """Store a batch, and count how long it took; in the loop or in the thread."""
        began = real_seconds()
        try:
            self._storage.apply(stored)
        finally:
            # One that was refused may have waited for a lock.
            pace.took(real_seconds() - began)
