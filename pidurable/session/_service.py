"""What a session does beside its commits: signs of life, checkpoints of the log, slow bodies.

The heartbeat is the one thing that keeps others from taking the session over, so it is counted
from when it was asked for, not from when the answer came; and only it counts, since only it is what
another process looks at. Under a virtual clock that nobody shares it is shown once, for good.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import trio

from pidurable.errors import PidurableError, SessionPoisonedError, StorageRefusedError
from pidurable.records._limits import WAL_BYTES_WARN
from pidurable.session._body import watch_bodies
from pidurable.session._seams import VirtualClock, logger

if TYPE_CHECKING:
    from pidurable.session._session import Session

_CHECKPOINT_PAGES = 1_000
_PAGES_PER_BATCH = 3
"""What a batch writes beside its rows: the head, and the inner pages of the tables."""
_WAL_PAGES_MAX = 8_000
_WAL_PAGE_BYTES = 4_096 + 24
_STUCK_SECONDS = 5.0
"""From one try to empty a log that somebody reads to the next: each may hold up a batch."""
_NEVER_SILENT_US = 2**62
"""A sign of life beyond every moment that a clock can tell."""


class Services:
    """Background work of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._now = trio.lowlevel.current_clock().current_time
        self._confirmed_at = self._now()
        clock = session.clock
        self._alone = isinstance(clock, VirtualClock) and not clock.shared
        """Whether nobody else can tell how long this holder has been silent."""
        self._pages = 0
        self._checkpoint_due = trio.Event()
        self._stuck_until = float("-inf")
        """Before this moment nobody tries to empty the log again."""
        self._log_large = False
        """Whether somebody was told that the log stays large."""

    def is_confirmed(self) -> bool:
        """Whether a sign of life was stored within the last lease."""
        if self._alone:
            return True
        return self._now() - self._confirmed_at < self._session.settings.lease_seconds

    def stored(self, rows: int) -> None:
        """Count a batch that went to the log, in pages as well as they can be guessed."""
        self._pages += rows + _PAGES_PER_BATCH
        if self._pages >= _CHECKPOINT_PAGES:
            self._pages = 0
            self._checkpoint_due.set()

    @trio.lowlevel.enable_ki_protection
    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_heartbeat)
            nursery.start_soon(self._serve_checkpoints)
            nursery.start_soon(watch_bodies, self._session.line)
            task_status.started()

    @trio.lowlevel.enable_ki_protection
    async def _serve_heartbeat(self) -> None:
        session = self._session
        if self._alone:
            await self._heartbeat(_NEVER_SILENT_US)
            return
        while session.line.poison is None:
            await trio.sleep(session.settings.heartbeat_seconds)
            if session.closed:
                return
            await self._heartbeat(session.clock.now_us())

    async def _heartbeat(self, at_us: int) -> None:
        session = self._session
        asked_at = trio.current_time()
        try:
            with trio.CancelScope(shield=True):
                await session.worker.run(session.storage.heartbeat, session.epoch, at_us)
        except SessionPoisonedError as lost:
            # Another holder has it, or the store's file is not where it was.
            session.line.set_poison(lost)
        except StorageRefusedError as refused:
            logger.warning("the heartbeat was not stored: %s", refused)
        except PidurableError as unknown:
            # Not confirmed. If the storage is broken, the next commit says so. One that the close
            # has overtaken is no trouble.
            if not session.closed:
                logger.warning("the heartbeat failed: %s", unknown)
        else:
            self._confirmed_at = asked_at

    @trio.lowlevel.enable_ki_protection
    async def _serve_checkpoints(self) -> None:
        session = self._session
        while session.line.poison is None:
            # A log that stays large shrinks once its reader has left, also where nothing is
            # committed any more.
            with trio.move_on_after(_STUCK_SECONDS if self._log_large else float("inf")):
                await self._checkpoint_due.wait()
            self._checkpoint_due = trio.Event()
            try:
                with trio.CancelScope(shield=True):
                    await session.blocking.run(session.storage.checkpoint)
                    if session.closed:
                        return
                    # What came meanwhile, between two batches, which takes a millisecond: only a
                    # log that was moved whole is begun again from its start. One that grows costs
                    # each flush about 0.2 ms more (ext4), for the new size of the file.
                    pages = await session.writer.run_syncing(session.storage.checkpoint)
                    if pages > _WAL_PAGES_MAX and session.line.poison is None:
                        pages = await self._checkpoint_whole(pages)
                    await self._report_log(pages * _WAL_PAGE_BYTES)
            except PidurableError as unknown:
                # The log only grows meanwhile; a commit meets the same trouble and reports it. One
                # that the close has overtaken is no trouble: the log is moved by that.
                if not session.line.closing:
                    logger.warning("a checkpoint failed: %s", unknown)

    async def _checkpoint_whole(self, pages: int) -> int:
        """Empty the log; return its pages. Beside a busy writer a passive one may never catch up.

        Behind a read that stays open it cannot be emptied, and each try keeps the write lock until
        the storage gives up: so a second one is made only after a while.
        """
        if trio.current_time() < self._stuck_until:
            return pages
        session = self._session
        emptied = functools.partial(session.storage.checkpoint, truncate=True)
        pages = await session.writer.run_locking(emptied)
        stuck = pages > _WAL_PAGES_MAX
        self._stuck_until = trio.current_time() + _STUCK_SECONDS if stuck else float("-inf")
        return pages

    async def _report_log(self, log_bytes: int) -> None:
        """Say once that the log stays large, and who reads; and once that it is small again."""
        session = self._session
        size = f"{log_bytes / 2**20:.0f} MiB"
        if not self._log_large and log_bytes > WAL_BYTES_WARN:
            self._log_large = True
            # A hint that only some storages can give; it is no part of the contract.
            ask = getattr(session.storage, "log_readers", None)
            named = [] if ask is None else await session.blocking.run(ask)
            who = " and ".join(named) or "somebody"
            logger.warning(
                "the log of %s has grown to %s, because %s reads and keeps it from being used "
                "again; it shrinks when that ends (`pidurable doctor` shows who reads)",
                session.storage.store,
                size,
                who,
            )
        elif self._log_large and log_bytes <= WAL_BYTES_WARN:
            self._log_large = False
            logger.warning("the log of %s is small again: %s", session.storage.store, size)
