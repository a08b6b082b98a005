"""Applying commands from outside: each once, with its answer in the same commit.

The holder looks into the box of its storage, takes what waits and stages each command in a commit
of its own, in order of arrival, together with the answer under the command's id. A command whose id
has an answer is not applied again, which is decided on the line of commits, so it holds whatever
dies in between and however often a command is handed in. Only then is it forgotten by the box.

A command that is refused has the error for its answer, and nothing else of it is stored. What is no
command at all is set aside and reported once. Trouble of the storage is nobody's answer: what could
not be stored is tried again at a later look. The holder never waits for an outsider: it reads whole
files that were renamed into place, and answers through its own commits.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs
import trio

from pidurable.errors import (
    AnswerGoneError,
    InternalError,
    InvalidArgumentError,
    NotJsonError,
    PidurableError,
    SessionClosedError,
    SessionPoisonedError,
    StorageAccessError,
    StorageRefusedError,
    show,
)
from pidurable.harness._command_kinds import KINDS, CommandKind, checked_content
from pidurable.records._commands import (
    HORIZON,
    Command,
    decode_command,
    drawn_at_us,
    error_answer,
    value_answer,
)
from pidurable.session._seams import VirtualClock, logger
from pidurable.storage import CommandRow, Op, Storage, TakenCommand
from pidurable.tasks._transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.harness._open import Harness

_TAKEN_AT_ONCE = 1_000
_AFTER_TROUBLE_SECONDS = 1.0
_ENDED = (SessionPoisonedError, SessionClosedError)
_UNKNOWN = CommandKind(fields={})
_TROUBLE = (*_ENDED, StorageRefusedError, StorageAccessError)
"""Of the storage: another try may go well, so no command is answered with one of these."""


@attrs.define(eq=False)
class _Taken:
    """A command that this holder has taken from the box."""

    name: str
    command: Command
    is_new: bool
    """When it was taken it had no answer, and could have had none: however long it had waited in
    the box, and whatever is removed until it is applied, nobody has applied it."""
    done: bool = False
    """It has an answer that is durable."""


@attrs.define(eq=False)
class Commands:
    """Applies what other processes hand in to one harness."""

    _harness: Harness = attrs.field(alias="harness")
    _starts: bool = attrs.field(alias="starts")
    """Whether new work that is handed in starts the harness. Where not, it does from when the host
    has started it."""
    _taken: list[_Taken] = attrs.field(init=False, factory=list)
    """In order of arrival; what is left over could not be stored, or not yet."""
    _answered: list[str] = attrs.field(init=False, factory=list)
    """Names of what has its answer and lies in the box: what cannot be removed now, or by whoever
    was cancelled, is removed at a later look, or found answered by the next holder."""
    _unremoved: PidurableError | None = attrs.field(init=False, default=None)
    """Why the last of them could not be removed, if so. It keeps nobody else waiting."""
    _told: set[str] = attrs.field(init=False, factory=set)
    _turn: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _works: deque[_Taken] = attrs.field(init=False, factory=deque)
    """What takes many commits, in order of arrival: done beside everything else, one at a time."""
    _work_came: trio.Event = attrs.field(init=False, factory=trio.Event)

    @trio.lowlevel.enable_ki_protection
    async def serve(self) -> None:
        """Look for commands for as long as the session is open."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_works)
            await self._serve_looks()

    @property
    def starts(self) -> bool:
        """Whether new work that is handed in may start the harness."""
        return self._starts

    def host_started(self) -> None:
        """The host has started the harness: from now on new work is welcome."""
        self._starts = True

    async def _serve_looks(self) -> None:
        session = self._harness.session
        if isinstance(session.clock, VirtualClock) and not session.clock.shared:
            return  # nobody lives by this clock but us, and looking would keep it from jumping
        box, pause = session.storage.command_box, session.settings.commands_seconds
        while session.line.poison is None and not session.closed:
            await trio.sleep(pause)
            pause = session.settings.commands_seconds
            if (self._is_left() or box.has_news()) and not await self.look():
                pause = max(pause, _AFTER_TROUBLE_SECONDS)

    async def look(self) -> bool:
        """Apply what waits; False where the storage is in trouble, which is told once."""
        try:
            await self.apply_waiting()
        except _ENDED:
            return False
        except PidurableError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                logger.warning("commands of other processes wait: %s", error)
            return False
        self._told.clear()
        return True

    def in_hand(self) -> list[str]:
        """Keys of what was taken and has no answer yet."""
        return [each.command.id for each in (*self._taken, *self._works) if not each.done]

    async def apply_waiting(self) -> int:
        """Apply all that waits now, and return how many got an answer.

        Raises:
            StorageRefusedError, StorageAccessError: They could not be taken, or their answers
                could not be stored, or they could not be removed from the box. They wait for the
                next look.
        """
        count, unremoved = await self._apply_all()
        if unremoved is not None:
            raise unremoved
        return count

    async def take_in(self) -> None:
        """Apply all that waits now, like `apply_waiting`; what stays in the box does no harm."""
        await self._apply_all()

    @trio.lowlevel.enable_ki_protection
    async def _apply_all(self) -> tuple[int, PidurableError | None]:
        session, count = self._harness.session, 0
        async with self._turn:
            self._unremoved = None
            while self._is_left() or session.storage.command_box.has_news():
                found = bool(self._taken) or await self._take()
                if not found and (self._unremoved is not None or not self._answered):
                    break
                works = [each for each in self._taken if _kind(each).work is not None]
                if works:
                    self._works += works
                    self._taken = [each for each in self._taken if _kind(each).work is None]
                    self._work_came.set()
                if self._is_left():
                    count += await self._apply_taken()
            return count, self._unremoved

    def _is_left(self) -> bool:
        return bool(self._taken or self._answered)

    async def _take(self) -> bool:
        """Take more from the box; False where there is nothing."""
        session = self._harness.session
        box = session.storage.command_box
        found = await session.blocking.run(lambda: box.take(limit=_TAKEN_AT_ONCE))
        bad = []
        for each in found:
            command = self._read(each)
            if command is None:
                bad.append(each.name)
            else:
                self._taken.append(_Taken(each.name, command, self._is_new(command)))

        def set_aside() -> None:
            for name in bad:
                box.set_aside(name)

        if bad:
            await session.blocking.run(set_aside)
        return bool(found)

    def _read(self, found: TakenCommand) -> Command | None:
        """The command that was handed in; None where it is none of this session, which is told."""
        session = self._harness.session
        try:
            if found.text is None:
                raise NotJsonError("$", found.problem)
            command = decode_command(found.text)
            if command.session != session.uuid:
                raise NotJsonError("$.session", "it is another session's", show(command.session))
        except NotJsonError as error:
            logger.warning(
                "%s: %s is no command for this session and was set aside (%s)",
                session.storage.store,
                show(found.name),
                error,
            )
            return None
        return command

    # --- what takes many commits ---------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def _serve_works(self) -> None:
        while True:
            while self._works:
                await self._do_work(self._works[0])
                self._works.popleft()
            self._work_came = trio.Event()
            await self._work_came.wait()

    @trio.lowlevel.enable_ki_protection
    async def _do_work(self, taken: _Taken) -> None:
        """Do one, again and again while the storage is in trouble, and store its answer."""
        session = self._harness.session
        while session.line.poison is None:
            try:
                if not taken.done:
                    if session.storage.command(taken.command.id) is None:
                        await self._work_and_answer(_kind(taken), taken)
                    self._mark_done(taken.command.id)
                await session.blocking.run(session.storage.command_box.forget, taken.name)
            except _ENDED:
                return
            except PidurableError as error:
                if taken.done:
                    # A later look removes its file; what comes behind it does not wait for that.
                    self._answered.append(taken.name)
                    return
                logger.warning("command %s waits: %s", taken.command.id, error)
                await trio.sleep(_AFTER_TROUBLE_SECONDS)
            else:
                return

    def _mark_done(self, id: str) -> None:
        """Note that an id has its answer, also for other files of it that are in hand.

        One that cannot be removed from the box may lie there until its answer is removed.
        """
        for each in (*self._works, *self._taken):
            if each.command.id == id:
                each.done = True

    async def _work_and_answer(self, kind: CommandKind, taken: _Taken) -> None:
        runtime, command = self._harness._runtime, taken.command
        assert kind.work is not None
        try:
            self._check_remembered(taken)
            fields = checked_content(kind, command.content)
            if kind.starts and self._starts:
                self._harness.start()
            answer = value_answer(await kind.work(self._harness, **fields))
        except _TROUBLE:
            raise
        except Exception as error:
            refused = error
            await runtime.commit(lambda tx: self._refuse(tx, command, refused))
        else:
            await runtime.commit(lambda tx: self._tell(tx, command, answer))

    def _tell(self, tx: TreeTransaction, command: Command, answer: str) -> None:
        if not self._is_answered(tx, command.id):
            self._answer(tx, command, answer)

    # --- applying ------------------------------------------------------------------------

    async def _apply_taken(self) -> int:
        """Apply what was taken, and have the box forget it. Returns how many got an answer."""
        session, taken = self._harness.session, self._taken
        trouble: list[Exception] = []
        place = 0
        while place < len(taken) and not trouble:
            end = place + 1
            if not _kind(taken[place]).reads:
                while end < len(taken) and not _kind(taken[end]).reads:
                    end += 1
            await self._apply_run(taken[place:end], trouble)
            place = end
        session.failpoints.hit("command.answered")
        done = [each for each in taken if each.done]
        self._answered += [each.name for each in done]
        self._taken = [each for each in taken if not each.done]
        await self._remove_answered()
        if trouble:
            raise trouble[0]
        return len(done)

    async def _remove_answered(self) -> None:
        self._unremoved = None
        try:
            if self._answered:
                await self._harness.session.blocking.run(self._forget_answered)
        except (StorageRefusedError, StorageAccessError) as error:
            self._unremoved = error

    def _forget_answered(self) -> None:
        box = self._harness.session.storage.command_box
        while self._answered:
            name = self._answered[0]
            box.forget(name)
            # By its name: this may be in a thread, and more may be added in the loop meanwhile.
            self._answered.remove(name)

    async def _apply_run(self, run: list[_Taken], trouble: list[Exception]) -> None:
        """Apply neighbours. They share a flush where they can, in order of arrival."""
        queue = deque(run)
        async with trio.open_nursery() as nursery:
            for each in run:
                nursery.start_soon(self._apply_next, queue, trouble, _kind(each).reads)

    @trio.lowlevel.enable_ki_protection
    async def _apply_next(
        self, queue: deque[_Taken], trouble: list[Exception], reads: bool
    ) -> None:
        """One commit for the command whose turn it is when the line comes to this commit."""
        runtime = self._harness._runtime
        mine: list[_Taken] = []

        def body(tx: TreeTransaction) -> None:
            mine.append(queue.popleft())
            self._stage(tx, mine[0])

        try:
            try:
                if reads:
                    async with runtime.open_commit(place="a command from outside") as tx:
                        body(tx)
                else:
                    await runtime.commit(body)
            except _TROUBLE:
                raise
            except Exception as error:
                refused = error
                await runtime.commit(lambda tx: self._refuse(tx, mine[0].command, refused))
            mine[0].done = True
        except Exception as error:
            # Whatever it is, the others go on; nothing of this one is stored.
            trouble.append(error)

    def _stage(self, tx: TreeTransaction, taken: _Taken) -> None:
        """Stage a command and its answer, unless it has one.

        Raises:
            PidurableError: The answer to it, which is stored by a commit of its own.
        """
        command = taken.command
        if self._is_answered(tx, command.id):
            return
        self._check_remembered(taken)
        kind = KINDS.get(command.kind)
        if kind is None:
            known = ", ".join(KINDS)
            raise InvalidArgumentError("kind", f"the holder knows only {known}", show(command.kind))
        assert kind.apply is not None
        fields = checked_content(kind, command.content)
        if kind.starts and self._starts:
            self._harness.start()
        given = kind.apply(self._harness, tx, **fields)
        if not self._starts:
            tx.created_by_host = False
        self._answer(tx, command, value_answer(given))

    def _refuse(self, tx: TreeTransaction, command: Command, error: Exception) -> None:
        """Stage the answer to a command that was refused."""
        if self._is_answered(tx, command.id):
            return
        if not isinstance(error, PidurableError):
            logger.error("command %s (%s) failed", command.id, command.kind, exc_info=error)
            error = InternalError(f"{type(error).__name__}: {error}")
        self._answer(tx, command, error_answer(error))

    def _is_new(self, command: Command) -> bool:
        storage = self._harness.session.storage
        return storage.command(command.id) is None and not is_forgotten(storage, command.id)

    def _check_remembered(self, taken: _Taken) -> None:
        """Refuse a command without an answer whose answer may have been removed.

        Raises:
            AnswerGoneError: So it is.
        """
        id = taken.command.id
        if not taken.is_new and is_forgotten(self._harness.session.storage, id):
            raise AnswerGoneError(id, False)

    def _is_answered(self, tx: TreeTransaction, id: str) -> bool:
        claimed = tx.claimed(("command", id)) is not None
        return claimed or self._harness.session.storage.command(id) is not None

    def _answer(self, tx: TreeTransaction, command: Command, answer: str) -> None:
        row = CommandRow(command.id, command.kind, command.digest, answer, tx.seq, tx.now_us())
        tx.unique[("command", command.id)] = command.id
        tx.writes.append((Op.COMMAND, row))


def is_forgotten(storage: Storage, key: str) -> bool:
    """Whether a key that has no answer was drawn so long ago that it may have had one."""
    drawn_us = drawn_at_us(key)
    horizon = None if drawn_us is None else storage.command(HORIZON)
    return drawn_us is not None and horizon is not None and drawn_us < horizon.at_us


def _kind(taken: _Taken) -> CommandKind:
    return KINDS.get(taken.command.kind, _UNKNOWN)
