"""Sending batches to the storage: where the call runs, and what follows a refusal.

A flushed batch goes to the one writer thread. A small batch that needs no flush is written in the
loop, because a thread hop costs several times as much as the write. A refusal is certain that
nothing was stored, so the same batch is sent again; any other error is not for this module to
judge.
"""

from __future__ import annotations

from typing import Any

import trio

from pidurable.errors import (
    PidurableError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.records._limits import Settings
from pidurable.session._batch import Draft, OpenBatch
from pidurable.session._seams import Failpoints, Worker
from pidurable.storage import Batch, Op, Storage

_INLINE_WRITES_MAX = 64
"""Rows of a batch that is still small enough to be written in the loop."""

RETRY_SECONDS_MIN = 0.01
RETRY_SECONDS_MAX = 1.0


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
        self.inline_pauses = 0
        """While positive, no batch is written in the loop: a checkpoint has the write lock."""
        self._storage = storage
        self._worker = worker
        self._settings = settings
        self._failpoints = failpoints
        self._epoch = epoch
        self._inline = inline
        self._power = power

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

    async def _apply(self, stored: Batch, batch: OpenBatch) -> None:
        """Send a batch, again and again while the storage refuses it for certain.

        Not cancellable. Ctrl-C while it waits to try again ends the trying, and is left on `batch`.

        Raises:
            StorageRefusedError: It was refused for `storage_retry_seconds`.
        """
        delay = RETRY_SECONDS_MIN
        give_up_at: float | None = None
        small = not stored.flush and len(stored.writes) <= _INLINE_WRITES_MAX
        while True:
            try:
                if self._inline or (small and not self.inline_pauses):
                    self._storage.apply(stored)
                else:
                    await self._worker.run(self._storage.apply, stored)
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
