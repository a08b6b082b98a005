"""The commit line: one body at a time, one write to the storage for everyone who waited.

A committer takes the line, runs its body, and joins the open batch. The first of a batch leads
it: it passes one scheduler tick, so that whoever is runnable joins, then stores the batch, adopts
it and wakes the others in the order of their commits. Bodies that arrive meanwhile wait; none ever
runs on top of a batch that may still fail. Holds at all times:

* at most one batch is inside the storage, and no body runs while it is;
* published_seq <= durable_seq, and neither ever shrinks; ids and sequence numbers only grow, also
  over a rollback;
* after the first uncertain storage error nothing more is sent to the storage;
* whoever joined a batch, or read what it staged, hears of its end before it is answered:
  `trio.Cancelled` out of a commit means that nothing of it was stored.
"""

from __future__ import annotations

import contextvars
import copy
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import attrs
import outcome
import trio

from pidurable.errors import (
    CommitBodyTimeoutError,
    HolderLostError,
    NestedCommitError,
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.records._limits import BATCH_BODIES_MAX, BATCH_SECONDS_MAX, Settings
from pidurable.session._seams import Clock, Failpoints, Worker, logger
from pidurable.storage import Batch, Op, Storage

TxT = TypeVar("TxT", bound="Draft")
T = TypeVar("T")

# Set while a body runs in this task (and inherited by tasks and threads started in it), so that a
# commit inside a commit is refused instead of waiting for itself.
_current_body: contextvars.ContextVar[Draft | None] = contextvars.ContextVar(
    "pidurable_commit_body", default=None
)

# Batches of up to this many rows that need no flush are written in the loop: a thread hop costs
# five times as much as the write.
_INLINE_WRITES_MAX = 64


class Draft(Protocol):
    """What the line needs of a transaction."""

    seq: int
    writes: list[tuple[Op, tuple[Any, ...]]]
    open: bool
    flush: bool

    def seal(self) -> None:
        """End of the body: encode and check what is staged, ask the participants."""
        ...

    def discard(self) -> None:
        """The body raised or was refused: nothing of it remains."""
        ...


class Adopter(Protocol):
    """What the line tells of its batches; in this order, synchronously."""

    def join(self, draft: Any) -> None:
        """The draft is sealed; later bodies of the batch see it."""
        ...

    def adopt(self, drafts: list[Any]) -> None:
        """The batch is durable: publish."""
        ...

    def revert(self) -> None:
        """The batch failed: drop what is staged."""
        ...

    def poisoned(self, error: SessionPoisonedError) -> None: ...

    def refusing(self, refusing: bool) -> None:
        """The storage has begun or stopped refusing batches for good."""
        ...


@attrs.define(eq=False)
class _OpenBatch:
    drafts: list[Draft] = attrs.Factory(list)
    followers: list[trio.lowlevel.Task] = attrs.Factory(list)
    bodies: int = 0
    opened_at: float = 0.0
    led: bool = False
    leader: trio.lowlevel.Task | None = None

    def full(self) -> bool:
        return (
            self.bodies >= BATCH_BODIES_MAX
            or trio.current_time() - self.opened_at >= BATCH_SECONDS_MAX
        )


def _unabortable(_: Any) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


class CommitLine:
    """The line of one session. See the module docstring for what holds."""

    def __init__(
        self,
        storage: Storage,
        *,
        writer: Worker,
        adopter: Adopter,
        settings: Settings,
        clock: Clock,
        failpoints: Failpoints,
        epoch: int,
        seq: int,
        next_id: int,
        inline: bool,
    ) -> None:
        self.storage = storage
        self.epoch = epoch
        self.next_id = next_id
        self.published_seq = seq
        self._seq = seq
        self._writer = writer
        self._adopter = adopter
        self._settings = settings
        self._clock = clock
        self._failpoints = failpoints
        self._inline = inline
        self._batch: _OpenBatch | None = None
        self._storing = False
        self._busy = False
        self._body_since: float | None = None
        self._waiting: deque[trio.lowlevel.Task] = deque()
        self._poison: SessionPoisonedError | None = None
        self._closing = False
        self._drained: trio.lowlevel.Task | None = None

    # --- state ---------------------------------------------------------------------------

    def draw_id(self) -> int:
        """The next id of the session. Never given twice, also if the commit fails."""
        number = self.next_id
        self.next_id = number + 1
        return number

    @property
    def poison(self) -> SessionPoisonedError | None:
        return self._poison

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def body_since(self) -> float | None:
        """trio time at which the running body began, or None."""
        return self._body_since

    def check_usable(self) -> None:
        """Raise if this session serves nothing more."""
        if self._poison is not None:
            raise copy.copy(self._poison)
        if self._closing:
            raise SessionClosedError(self.storage.store)

    def set_poison(self, error: SessionPoisonedError) -> None:
        """Serve nothing more: tell everybody who waits, once."""
        if self._poison is not None:
            return
        self._poison = error
        logger.error("session poisoned: %s", error)
        while self._waiting:
            trio.lowlevel.reschedule(self._waiting.popleft(), outcome.Error(copy.copy(error)))
        self._adopter.poisoned(error)

    # --- taking the line -----------------------------------------------------------------

    async def _take(self) -> None:
        self.check_usable()
        batch = self._batch
        if (
            not self._storing
            and not self._busy
            and not self._waiting
            and (batch is None or not batch.full())
        ):
            self._busy = True
            return
        task = trio.lowlevel.current_task()
        self._waiting.append(task)

        def abort(_: Any) -> trio.lowlevel.Abort:
            self._waiting.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if self._poison is not None:
            self._release()
            raise copy.copy(self._poison)

    def _release(self) -> None:
        """Give the line to the next in order, or wake the leader that waits for it to be free."""
        batch = self._batch
        if self._waiting and (batch is None or not batch.full()):
            trio.lowlevel.reschedule(self._waiting.popleft())
            return
        self._busy = False
        if batch is not None and batch.leader is not None:
            leader, batch.leader = batch.leader, None
            trio.lowlevel.reschedule(leader)
        self._tell_drained()

    def _tell_drained(self) -> None:
        if self._drained is not None and self._quiet():
            task, self._drained = self._drained, None
            trio.lowlevel.reschedule(task)

    def _quiet(self) -> bool:
        return not (self._busy or self._storing or self._waiting or self._batch is not None)

    def _begin(self, draft: Draft) -> None:
        if self._batch is None:
            self._batch = _OpenBatch(opened_at=trio.current_time())
        self._batch.bodies += 1
        draft.seq = self._seq + 1

    # --- running bodies ------------------------------------------------------------------

    async def run_sync(self, draft: TxT, body: Callable[[TxT], T]) -> T:
        """Run a body that awaits nothing as one commit; return its result once it is durable."""
        if (outer := _current_body.get()) is not None and outer.open:
            raise NestedCommitError
        await self._take()
        self._begin(draft)
        try:
            result = body(draft)
            draft.seal()
        except BaseException as error:
            draft.discard()
            await self._end(None)
            raise error
        await self._end(draft)
        return result

    def body(self, draft: TxT, *, place: str = "") -> _Body[TxT]:
        """An async context manager that runs its block as one commit."""
        return _Body(self, draft, place)

    async def _end(self, draft: Draft | None) -> None:
        """The body has ended: join the batch (if it wrote), and wait for it (if it saw it)."""
        batch = self._batch
        assert batch is not None
        if draft is not None:
            draft.open = False
            if draft.writes:
                self._seq = draft.seq
                batch.drafts.append(draft)
                self._adopter.join(draft)
        if not batch.drafts:
            # Nothing staged in this batch: what the body saw is durable already.
            self._batch = None
            self._release()
            return
        if not batch.led:
            batch.led = True
            self._release()
            with trio.CancelScope(shield=True):
                await self._lead(batch)
            return
        batch.followers.append(trio.lowlevel.current_task())
        self._release()
        await trio.lowlevel.wait_task_rescheduled(_unabortable)

    async def _lead(self, batch: _OpenBatch) -> None:
        """Let the runnable join, then store the batch and wake its followers in order."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        if self._busy:
            batch.leader = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(_unabortable)
        self._batch = None
        self._storing = True
        error: BaseException | None = None
        try:
            await self._store(batch)
        except BaseException as caught:
            error = caught
        self._storing = False
        for task in batch.followers:
            trio.lowlevel.reschedule(
                task, outcome.Value(None) if error is None else outcome.Error(copy.copy(error))
            )
        if not self._busy and self._waiting:
            self._busy = True
            trio.lowlevel.reschedule(self._waiting.popleft())
        self._tell_drained()
        if error is not None:
            raise error

    # --- storing -------------------------------------------------------------------------

    async def _store(self, batch: _OpenBatch) -> None:
        if self._poison is not None:
            self._adopter.revert()
            raise copy.copy(self._poison)
        drafts = batch.drafts
        writes: list[tuple[Op, tuple[Any, ...]]] = []
        flush = False
        for draft in drafts:
            writes += draft.writes
            flush = flush or draft.flush
        stored = Batch(
            epoch=self.epoch,
            seq=drafts[-1].seq,
            next_id=self.next_id,
            flush=flush,
            writes=writes,
        )
        try:
            self._failpoints.hit("commit.before")
            await self._apply(stored)
            self._failpoints.hit("commit.after")
        except StorageRefusedError as refused:
            self._adopter.revert()
            self._adopter.refusing(True)
            raise refused
        except HolderLostError as lost:
            self._adopter.revert()
            self.set_poison(lost)
            raise
        except BaseException as unknown:
            # It may or may not be stored. Nobody is told anything but that.
            self._adopter.revert()
            poison = SessionPoisonedError(
                self.storage.store, f"{type(unknown).__name__}: {unknown}"
            )
            self.set_poison(poison)
            raise poison from unknown
        self.published_seq = stored.seq
        self._adopter.refusing(False)
        self._adopter.adopt(drafts)

    async def _apply(self, batch: Batch) -> None:
        """Send the batch, again and again while the storage refuses it for certain."""
        delay = 0.01
        give_up_at: float | None = None
        while True:
            try:
                if self._inline or (not batch.flush and len(batch.writes) <= _INLINE_WRITES_MAX):
                    self.storage.apply(batch)
                else:
                    await self._writer.run(self.storage.apply, batch)
            except StorageRefusedError:
                now = trio.current_time()
                if give_up_at is None:
                    give_up_at = now + self._settings.storage_retry_seconds
                if now + delay > give_up_at or self._closing:
                    raise
                await trio.sleep(delay)
                delay = min(delay * 2, 1.0)
            else:
                return

    # --- closing -------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse new commits and wait, shielded, for the accepted ones."""
        self._closing = True
        while not self._quiet():
            self._drained = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(_unabortable)


class _Body(Generic[TxT]):
    """`async with line.body(draft) as tx`: takes the line, runs the block, ends the commit."""

    def __init__(self, line: CommitLine, draft: TxT, place: str) -> None:
        self._line = line
        self._draft = draft
        self._place = place
        self._scope: trio.CancelScope | None = None
        self._token: contextvars.Token[Draft | None] | None = None

    async def __aenter__(self) -> TxT:
        line = self._line
        if (outer := _current_body.get()) is not None and outer.open:
            raise NestedCommitError
        await line._take()
        line._begin(self._draft)
        self._token = _current_body.set(self._draft)
        line._body_since = trio.current_time()
        self._scope = trio.CancelScope(deadline=line._body_since + line._settings.body_seconds_max)
        self._scope.__enter__()
        return self._draft

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        line, draft, scope = self._line, self._draft, self._scope
        assert scope is not None
        assert self._token is not None
        try:
            timed_out = scope.__exit__(kind, error, trace)
        except BaseException as remaining:  # what is left of a group that held the cancellation
            self._leave()
            draft.discard()
            await line._end(None)
            raise remaining
        self._leave()
        if error is None:
            try:
                draft.seal()
            except BaseException:
                draft.discard()
                await line._end(None)
                raise
            await line._end(draft)
            return False
        draft.discard()
        await line._end(None)
        if timed_out:
            raise CommitBodyTimeoutError(line._settings.body_seconds_max, self._place) from None
        return False

    def _leave(self) -> None:
        line = self._line
        assert self._token is not None
        assert line._body_since is not None
        _current_body.reset(self._token)
        elapsed = trio.current_time() - line._body_since
        line._body_since = None
        if elapsed > line._settings.body_report_seconds:
            logger.warning("a commit body took %.2f s (%s)", elapsed, self._place)
