"""The scheduler: one dirty flag, one drain loop, one commit a pass.

Whatever changes something calls `kick`, which sets the flag; a thousand kicks cost one pass. A pass
(`_pass.py`) derives what earlier commits imply and reserves what is ready, and the loop repeats
while there is more. What a commit makes ready it may reserve itself (`_at_once.py`). An invocation
is started here alone, after the commit that reserved it is durable: a task that is marked running
belongs to this holder. The loop does that, but for what a commit has reserved itself: it starts
when it is published, unless a commit has queued meanwhile, which could be an abort of it.

Slots: an invocation of a phase holds one, unless ordinary owned work of its task is live (else a
tree would starve itself); an abort invocation holds none. A task that would hold none needs none to
be reserved either: a parent whose wait ends early is woken beside the child that has the last slot.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections import Counter
from typing import TYPE_CHECKING

import trio

from pidurable.errors import (
    PidurableError,
    SessionClosedError,
    SessionPoisonedError,
    StorageAccessError,
    StorageRefusedError,
)
from pidurable.records._limits import PROBE_SECONDS
from pidurable.session._seams import VirtualClock, logger
from pidurable.storage import Op
from pidurable.tasks._invocation import Invocation, Starts
from pidurable.tasks._pass import Pass
from pidurable.tasks._suspects import Suspects
from pidurable.tasks._transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime

_READ_AHEAD_MIN = 16
"""For fewer a turn in a thread costs more than it saves."""

# A sleep re-checks the wall clock at least this often: it may be stepped, or the machine suspended.
# A virtual clock tells when it is stepped, so it is not polled: a year has half a million minutes.
_CLOCK_POLL_SECONDS = 60.0


class Scheduler:
    """The drain loop of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._index = runtime.index
        self._dirty = trio.Event()
        self._refusing = False
        self._held_slots: dict[int, str] = {}
        self._slots: Counter[str] = Counter()
        self._promised = Starts()
        """The slots of what is reserved and not started yet, durable or not."""
        self._planned: list[Starts] = []
        """Reserved by commits whose batch is not durable yet."""
        self._reserved: list[Invocation] = []
        """Reserved by durable commits, and to be started."""
        self._context: contextvars.Context | None = None
        """What invocations are started in: nothing of whoever publishes a batch is theirs."""
        self._reserved_ids: set[int] = set()
        """What is reserved and not started yet, durable or not."""
        self._timer_wake = trio.Event()
        self._timer_at: int | None = None
        self.suspects = Suspects(runtime)

    # --- kicking -------------------------------------------------------------------------

    def kick(self) -> None:
        """There may be something to do. Cheap, never blocks, and never lost."""
        self._dirty.set()

    def refusing(self, refusing: bool) -> None:
        """The storage has begun or stopped to refuse: nothing is reserved meanwhile."""
        self._refusing = refusing
        self.kick()

    @property
    def is_refusing(self) -> bool:
        """Whether the storage refuses, and nothing is reserved until a probe is accepted."""
        return self._refusing

    def has_work(self) -> bool:
        """Whether a pass would find something."""
        index = self._index
        if index.derived_work():
            return True
        if not self._runtime.started:
            return False
        if index.let_go or index.slotless:
            return True
        return bool(index.ready) and self.free_total() > 0

    # --- slots ---------------------------------------------------------------------------

    def account(self, task_id: int) -> bool:
        """Keep the slot of a task in step with its invocation and with what is below it.

        Returns:
            Whether it holds one.
        """
        if task_id == self.suspects.on_trial:
            self.suspects.look()
        invocation = self._runtime.runner.invocations.get(task_id)
        kind = self._held_slots.get(task_id)
        if invocation is not None and not invocation.aborting:
            node = self._runtime.published.task(task_id)
            if node is not None and not node.below:
                if kind is None:
                    self._held_slots[task_id] = node.kind
                    self._slots[node.kind] += 1
                return True
        if kind is not None:
            del self._held_slots[task_id]
            self._slots[kind] -= 1
            self._index.ready.set_free(kind)
        return False

    def free_total(self) -> int:
        """How many more invocations this process may run."""
        taken = len(self._held_slots) + self._promised.taken
        return self._runtime.session.settings.running_max - taken

    def free(self, kind: str) -> int:
        """How many more invocations of a kind may run, the total left aside."""
        limit = self._runtime.session.settings.limits.get(kind)
        if limit is None:
            return self.free_total()
        return limit - self._slots[kind] - self._promised.slots.get(kind, 0)

    def has_slot(self, kind: str, planned: Starts) -> bool:
        """Whether one more of a kind may run besides those that a commit plans to start."""
        if self.free_total() <= planned.taken:
            return False
        limited = kind in self._runtime.session.settings.limits
        return not limited or self.free(kind) > planned.slots.get(kind, 0)

    # --- what commits reserve ------------------------------------------------------------

    def joined(self, starts: Starts) -> None:
        """A commit that reserves something is staged: the slots are taken until it starts."""
        self._planned.append(starts)
        self._reserved_ids.update([each.task_id for each in starts.invocations])
        for kind, count in starts.slots.items():
            self._promised.take(kind, count)

    def reverted(self) -> None:
        """The batch failed: what it had reserved never starts."""
        planned, self._planned = self._planned, []
        for starts in planned:
            self._reserved_ids.difference_update([each.task_id for each in starts.invocations])
            for kind, count in starts.slots.items():
                self._promised.take(kind, -count)
                self._index.ready.set_free(kind)

    def adopted(self, starts: Starts) -> None:
        """A commit that reserves something is durable."""
        self._planned.remove(starts)
        self._reserved += starts.invocations

    def published(self, starts: Starts, *, at_once: bool) -> None:
        """What such a commit has changed is published: start what it reserved, or have the loop do.

        A commit that comes later in the same batch may still have it aborted: its code, which is
        run in another turn, looks again.

        Args:
            starts: What the commit has reserved.
            at_once: It was no pass, so there is nothing to be done about them before.
        """
        count, context = len(starts.invocations), self._context
        if (
            not at_once
            or context is None
            or count != len(self._reserved)
            or count >= _READ_AHEAD_MIN
            or self._runtime.session.line.has_queue()
        ):
            self.kick()
            return
        self._reserved = []
        for invocation in starts.invocations:
            context.run(self._start, invocation)

    def is_reserved(self, task_id: int) -> bool:
        """Whether a task is reserved and not started yet."""
        return task_id in self._reserved_ids

    async def _start_reserved(self) -> None:
        """Start what durable commits have reserved, unless it is to be aborted by now."""
        starts, self._reserved = self._reserved, []
        if not starts:
            return
        if any(not invocation.aborting for invocation in starts):
            await self._fence()
        await self._read_ahead(starts)
        for invocation in starts:
            self._start(invocation)

    def _start(self, invocation: Invocation) -> None:
        self._reserved_ids.discard(invocation.task_id)
        if invocation.takes_slot:
            self._promised.take(invocation.kind, -1)
        self._runtime.runner.start(invocation)

    # --- the loop ------------------------------------------------------------------------

    async def serve(self) -> None:
        """Drain until cancelled. A bug in here poisons the session and never cancels the host."""
        self._context = contextvars.copy_context()
        while True:
            await self._dirty.wait()
            self._dirty = trio.Event()
            if self._runtime.closing:
                continue
            await self._start_reserved()
            if self._refusing:
                await trio.sleep(PROBE_SECONDS)
                await self._probe()
                continue
            if not self._runtime.session.confirmed():
                # A holder that cannot show a sign of life starts nothing: another may hold it.
                await trio.sleep(PROBE_SECONDS)
                self.kick()
                continue
            while self.has_work() and not self._runtime.closing:
                if not await self._pass():
                    break

    async def _probe(self) -> None:
        """Write something that changes nothing. If it is accepted, the line says so."""

        @trio.lowlevel.enable_ki_protection
        def body(tx: TreeTransaction) -> None:
            tx.writes.append((Op.CHECKPOINT_DELETE, (0,)))

        try:
            await self._runtime.commit(body)
        except StorageRefusedError:
            self.kick()
        except (SessionPoisonedError, SessionClosedError):
            return

    async def _pass(self) -> bool:
        """One commit of derived work and reservations; False if nothing can be done now."""
        one = Pass(self._runtime, self)
        try:
            with trio.CancelScope(shield=True):
                await self._runtime.commit(one.fill)
        except StorageRefusedError:
            one.put_back()
            self.kick()
            return False
        except StorageAccessError as failed:
            # Of the rare rows that a pass reads: what ended above, what is to be migrated.
            one.put_back()
            logger.warning("a read of the scheduler failed and is tried again: %s", failed)
            await trio.sleep(PROBE_SECONDS)
            self.kick()
            return False
        except (SessionPoisonedError, SessionClosedError):
            one.put_back()
            return False
        one.adopted()
        self.timers_changed()
        await self._start_reserved()
        # Going past what a resumed task has below may take a pass that writes nothing.
        return one.records > 0 or bool(self._index.resumed)

    async def _read_ahead(self, starts: list[Invocation]) -> None:
        """Read what many invocations begin with at once, and not in the loop.

        Nobody else changes that of a reserved task. What cannot be read here is read by the
        invocation, which knows what a failure means for its task.
        """
        runtime = self._runtime
        unread = {
            each.task_id: each
            for each in starts
            if each.task_id not in runtime.fresh and not runtime.at_hand.can_start(each.task_id)
        }
        if len(unread) < _READ_AHEAD_MIN:
            return
        session = runtime.session
        with trio.CancelScope(shield=True), contextlib.suppress(PidurableError):
            for row in await session.blocking.run(session.storage.task_starts, [*unread]):
                unread[row.task].ahead = row

    async def _fence(self) -> None:
        """Wait for the commits that queued while a reservation was in the storage.

        One of them may be the abort of a task that was just reserved, and then no phase of it may
        begin. A body that only reads is answered when the batch that it stands on is durable.
        """
        if self._runtime.session.line.is_quiet():
            return
        try:
            with trio.CancelScope(shield=True):
                await self._runtime.commit(lambda tx: None)
        except (StorageRefusedError, SessionPoisonedError, SessionClosedError):
            # What queued was not stored, or nothing will start; both are looked at by the start.
            return

    # --- timers --------------------------------------------------------------------------

    def timers_changed(self) -> None:
        """Wake the timer if the earliest moment has become earlier."""
        first = self._index.timers.first_us
        if first is not None and (self._timer_at is None or first < self._timer_at):
            self._timer_wake.set()

    async def serve_timers(self) -> None:
        """Sleep until the earliest moment, however the wall clock gets there."""
        clock = self._runtime.session.clock
        if not isinstance(clock, VirtualClock):
            await self._serve_timers(_CLOCK_POLL_SECONDS)
            return
        forget = clock.on_step(lambda: self._timer_wake.set())
        try:
            await self._serve_timers(math.inf)
        finally:
            forget()

    async def _serve_timers(self, poll_seconds: float) -> None:
        index = self._index
        while True:
            self._timer_wake = trio.Event()
            now = self._runtime.session.clock.now_us()
            index.due_timers(now)
            if self.has_work():
                self.kick()
            self._timer_at = index.timers.first_us
            if self._timer_at is None:
                await self._timer_wake.wait()
                continue
            # One microsecond more: waking early by rounding would sleep again for nothing.
            seconds = min(poll_seconds, (self._timer_at - now) / 1e6 + 1e-6)
            with trio.move_on_after(seconds):
                await self._timer_wake.wait()
