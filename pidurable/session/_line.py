"""The commit line: one body at a time, one write to the storage for everyone who waited.

A committer has its body run, and joins the open batch. The first who wrote in a batch leads it: it
passes one scheduler tick, so that whoever is runnable joins, then stores the batch, adopts it and
wakes the others in the order of their commits. Who arrives meanwhile waits, in order; a body that
awaits nothing is then run by whoever frees the line, in the context of its own caller, so that a
hundred waiting commits cost one wake-up each and not one turn of the loop each. Holds at all times:

* at most one batch is inside the storage, and no body runs while it is;
* published_seq never shrinks and is never ahead of what is durable; ids and sequence numbers only
  grow, also over a rollback;
* after the first uncertain storage error nothing more is sent to the storage, and nothing more is
  published;
* whoever joined a batch, or read what it staged, hears of its end before it is answered:
  `trio.Cancelled` out of a commit means that nothing of it was stored.

Everything here is protected against KeyboardInterrupt, but not the bodies: they are host code.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import outcome
import trio

from pidurable.errors import (
    InternalError,
    InvalidArgumentError,
    NestedCommitError,
    PidurableError,
    SessionClosedError,
    SessionPoisonedError,
)
from pidurable.records._limits import Settings
from pidurable.session._batch import (
    Adopter,
    Draft,
    Member,
    OpenBatch,
    again,
    body_of_task,
    place_of,
    unabortable,
)
from pidurable.session._body import AsyncBody
from pidurable.session._seams import logger
from pidurable.session._writer import BatchWriter
from pidurable.storage import Storage

TxT = TypeVar("TxT", bound=Draft)
T = TypeVar("T")

_LEAD = "lead"
"""What a committer is woken with whose body was run for it, and who is to lead the batch."""


@trio.lowlevel.disable_ki_protection
def _call(body: Callable[[Any], Any], draft: Draft) -> Any:
    """Run host code: Ctrl-C may end a body that loops for ever."""
    return body(draft)


class CommitLine:
    """The line of one session. See the module docstring for what holds."""

    def __init__(
        self,
        storage: Storage,
        *,
        writer: BatchWriter,
        adopter: Adopter,
        settings: Settings,
        seq: int,
        next_id: int,
    ) -> None:
        """Begin a line at `seq` and `next_id`.

        Args:
            storage: What messages name.
            writer: Sends batches to it.
            adopter: Who publishes them.
            settings: Limits.
            seq: The last sequence number given.
            next_id: The first id to give.
        """
        self.storage = storage
        self.next_id = next_id
        self.published_seq = seq
        self.settings = settings
        self.poison: SessionPoisonedError | None = None
        """Why the session serves nothing more; set by `set_poison` alone."""
        self.running: Draft | None = None
        """The draft of the body that runs in the loop at this moment and awaits nothing."""
        self.async_body: AsyncBody[Any] | None = None
        """The `async with` body that holds the line, if any."""
        self.on_async_body: Callable[[], None] = lambda: None
        """Called when an `async with` body begins: it may take long and is watched."""
        self._seq = seq
        self._writer = writer
        self._adopter = adopter
        self._batch: OpenBatch | None = None
        self._storing = False
        self._busy = False
        self._waiting: OrderedDict[Member, None] = OrderedDict()
        self._closing = False
        self._drained: trio.lowlevel.Task | None = None
        self._now = trio.lowlevel.current_clock().current_time
        """trio's time, asked for twice in each commit."""

    # --- state ---------------------------------------------------------------------------

    def draw_id(self) -> int:
        """The next id of the session. Never given twice, also if the commit fails."""
        number = self.next_id
        self.next_id = number + 1
        return number

    def draw_seq(self) -> int:
        """A sequence number for the closing batch, above any that was ever given."""
        self._seq += 1
        return self._seq

    @property
    def closing(self) -> bool:
        return self._closing

    def check_usable(self) -> None:
        """Raise if this session serves nothing more."""
        if self.poison is not None:
            raise again(self.poison)
        if self._closing:
            raise SessionClosedError(self.storage.store)

    def set_poison(self, error: SessionPoisonedError) -> None:
        """Serve nothing more: tell everybody who waits, once."""
        if self.poison is not None:
            return
        self.poison = error
        logger.error("session poisoned: %s", error)
        while self._waiting:
            member, _ = self._waiting.popitem(last=False)
            trio.lowlevel.reschedule(member.task, outcome.Error(again(error)))
        self._adopter.poisoned(error)
        if self._drained is not None:
            self._tell_drained(self._drained)

    def current_draft(self) -> Draft | None:
        """The draft of the body that the calling code runs in, or None."""
        return self.running or body_of_task.get()

    # --- committing ----------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def run_sync(self, draft: TxT, body: Callable[[TxT], T]) -> T:
        """Run a body that awaits nothing as one commit; return its result once it is durable.

        The body may run in another task's turn, in the contextvars of this one.
        """
        self.check_not_nested()
        self.check_usable()
        await trio.lowlevel.checkpoint_if_cancelled()
        member = Member(trio.lowlevel.current_task(), draft, body)
        if not self._is_free():
            # As `wait_turn` and `wait_for_batch` do, without a coroutine more for each who waits.
            self._waiting[member] = None
            abort = functools.partial(self._give_up, member)
            if await trio.lowlevel.wait_task_rescheduled(abort) == _LEAD:
                await self.wait_for_batch(member)
        elif self._run_here(member, own=True):
            batch = self._batch
            assert batch is not None
            if batch.leader is member:
                await self._lead(batch)
            else:
                await trio.lowlevel.wait_task_rescheduled(unabortable)
        else:
            self.advance()
            await trio.lowlevel.cancel_shielded_checkpoint()
        if member.error is not None:
            raise member.error
        return member.value  # type: ignore[no-any-return]

    def body(self, draft: TxT, *, place: str = "") -> AsyncBody[TxT]:
        """An async context manager that runs its block as one commit."""
        return AsyncBody(self, draft, place=place)

    def check_not_nested(self) -> None:
        """Refuse a commit from inside an `async with` body."""
        outer = body_of_task.get()
        if outer is not None and outer.open:
            raise NestedCommitError

    def _is_free(self) -> bool:
        if self._storing or self._busy or self._waiting:
            return False
        batch = self._batch
        return batch is None or batch.takes_now()

    async def wait_turn(self, member: Member) -> None:
        """Wait in order. Cancelled here, the commit has not begun."""
        self._waiting[member] = None
        await trio.lowlevel.wait_task_rescheduled(functools.partial(self._give_up, member))

    def _give_up(self, member: Member, _: Any) -> trio.lowlevel.Abort:
        """Somebody who waits is cancelled."""
        if member not in self._waiting:
            # Its body has been run by now, or it has the line.
            return trio.lowlevel.Abort.FAILED
        del self._waiting[member]
        return trio.lowlevel.Abort.SUCCEEDED

    async def take(self, member: Member) -> None:
        """Get the line for an `async with` body."""
        self.check_usable()
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_free():
            self._busy = True
        else:
            await self.wait_turn(member)
        if self.poison is not None:
            self.free()
            raise again(self.poison)
        self.begin(member.draft)

    def begin(self, draft: Draft) -> None:
        """A body begins: it belongs to the open batch from here on."""
        batch = self._batch
        if batch is None:
            batch = self._batch = OpenBatch()
        batch.bodies += 1
        draft.seq = self._seq + 1

    def _run_here(self, member: Member, *, own: bool) -> bool:
        """Run a body that awaits nothing; True if its answer has to wait for the batch."""
        draft, body = member.draft, member.body
        assert body is not None
        self.begin(draft)
        started = self._now()
        self.running = draft
        sealed: Draft | None = None
        try:
            if own:
                member.value = _call(body, draft)
            else:
                member.value = member.task.context.run(_call, body, draft)
            if type(member.value) is types.CoroutineType:
                member.value.close()
                raise InvalidArgumentError(
                    "body", "must not be async; use `async with ... commit() as tx`"
                )
            draft.seal()
            sealed = draft
        except BaseException as error:  # noqa: ASYNC103 - told to its caller
            draft.discard()
            member.error = error
        self.running = None
        seconds = self._now() - started
        if seconds > self.settings.body_report_seconds:
            logger.warning("a commit body took %.2f s (%s)", seconds, place_of(body))
        return self.end(member, sealed, seconds)

    def end(self, member: Member, sealed: Draft | None, seconds: float) -> bool:
        """A body has ended: join the batch if it wrote; True if it has to wait for the batch."""
        batch = self._batch
        assert batch is not None
        batch.seconds += seconds
        batch.slice_seconds += seconds
        if sealed is not None:
            sealed.open = False
            if sealed.writes:
                self._seq = sealed.seq
                batch.drafts.append(sealed)
                try:
                    self._adopter.join(sealed)
                except Exception as bug:
                    self._fail_on_bug("joining a commit", bug)
        if batch.drafts:
            batch.members.append(member)
            if batch.leader is None:
                batch.leader = member
            return True
        # Nothing is staged, so what the body saw is durable already.
        self._batch = None
        if self.poison is not None and member.error is None:
            member.error = again(self.poison)
        return False

    def _fail_on_bug(self, doing: str, bug: BaseException) -> SessionPoisonedError:
        logger.exception("%s failed", doing, exc_info=bug)
        poison = SessionPoisonedError(self.storage.store, f"{doing}: {InternalError(repr(bug))}")
        poison.__cause__ = bug
        self.set_poison(poison)
        return poison

    # --- passing the line on -------------------------------------------------------------

    def free(self) -> None:
        """The holder of the line gives it up."""
        self._busy = False
        self.advance()

    def advance(self) -> None:
        """Let those who wait have their turns, as long as the batch and the loop allow."""
        while self._waiting and not self._storing and not self._busy:
            batch = self._batch
            if batch is not None and not batch.takes_now():
                break
            member, _ = self._waiting.popitem(last=False)
            if member.body is None:
                self._busy = True
                trio.lowlevel.reschedule(member.task)
            elif not self._run_here(member, own=False):
                trio.lowlevel.reschedule(member.task)
            else:
                batch = self._batch
                assert batch is not None
                if batch.leader is member:
                    trio.lowlevel.reschedule(member.task, outcome.Value(_LEAD))
        batch = self._batch
        if not self._busy and batch is not None and batch.parked:
            assert batch.leader is not None
            batch.parked = False
            trio.lowlevel.reschedule(batch.leader.task)
        if self._drained is not None:
            self._tell_drained(self._drained)

    def _tell_drained(self, task: trio.lowlevel.Task) -> None:
        """Wake who waits for the end of all commits, if this is it."""
        if self.is_quiet():
            self._drained = None
            trio.lowlevel.reschedule(task)

    def is_quiet(self) -> bool:
        """Whether no commit is running, queued or being stored."""
        return not (self._busy or self._storing or self._waiting or self._batch is not None)

    def has_queue(self) -> bool:
        """Whether somebody waits for the line, say while a batch is in the storage."""
        return bool(self._waiting)

    async def wait_for_batch(self, member: Member) -> None:
        """Wait, shielded, for the batch that a body joined or saw; lead it if nobody does.

        Raises:
            StorageRefusedError: The batch was refused for certain, and nothing of it was stored.
            SessionPoisonedError: Nobody knows whether it was stored.
        """
        batch = self._batch
        assert batch is not None
        if batch.leader is member:
            await self._lead(batch)
        else:
            await trio.lowlevel.wait_task_rescheduled(unabortable)

    async def _lead(self, batch: OpenBatch) -> None:
        """In the leader: let the runnable join, then store the batch and wake its members."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        while True:
            batch.slice_seconds = 0.0
            if self._waiting:
                self.advance()
            if self._busy:
                batch.parked = True
                await trio.lowlevel.wait_task_rescheduled(unabortable)
            elif self._waiting and not batch.is_full():
                await trio.lowlevel.cancel_shielded_checkpoint()
            else:
                break
        self._batch = None
        self._storing = True
        error = await self._store(batch)
        self._storing = False
        for waiting in batch.members:
            if waiting is not batch.leader:
                trio.lowlevel.reschedule(
                    waiting.task,
                    outcome.Value(None) if error is None else outcome.Error(again(error)),
                )
        if self._waiting or self._drained is not None:
            self.advance()
        if batch.interrupt is not None:
            raise batch.interrupt
        if error is not None:
            raise error

    # --- storing -------------------------------------------------------------------------

    async def _store(self, batch: OpenBatch) -> BaseException | None:
        """Store and adopt a batch; what went wrong otherwise, and then nothing was published."""
        if self.poison is not None:
            return self._reverted(again(self.poison))
        drafts = batch.drafts
        stored = self._writer.gather(drafts, self.next_id)
        error = await self._writer.store(stored, batch)
        if error is not None:
            error = self._reverted(error)
            if isinstance(error, SessionPoisonedError):
                self.set_poison(error)
            return error
        if self.poison is not None:
            # Another holder was seen meanwhile. This batch is stored, but nothing may act on it.
            return self._reverted(again(self.poison))
        self.published_seq = stored.seq
        try:
            self._adopter.refusing(False)
            self._adopter.adopt(drafts)
        except BaseException as bug:  # noqa: ASYNC103 - told to its caller
            return self._fail_on_bug("publishing a commit", bug)  # noqa: ASYNC104 - poisons
        return None

    def _reverted(self, error: PidurableError) -> PidurableError:
        """Drop what a batch has staged that failed; what its members are told.

        Where that fails too, what is staged and what is published cannot be told apart any more.
        """
        try:
            self._adopter.revert()
            if not isinstance(error, SessionPoisonedError):
                self._adopter.refusing(True)
        except BaseException as bug:  # noqa: ASYNC103 - told to whoever waits
            return self._fail_on_bug("reverting a batch", bug)  # noqa: ASYNC104 - poisons
        return error

    # --- closing -------------------------------------------------------------------------

    def refuse_new(self) -> None:
        """Refuse new commits from now on; those that have been accepted finish."""
        self._closing = True

    async def drain(self) -> None:
        """Refuse new commits and wait, shielded, for the accepted ones."""
        self.refuse_new()
        while not self.is_quiet():
            self._drained = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(unabortable)
