"""Creating together: tasks that the code of one phase asks for at the same time share commits.

A tool may ask for thousands of calls at once. A commit for each would be most of what they cost, so
whoever asks first leads: its commit makes what everybody has asked for by the time its body runs,
up to a number, and the next one leads then. Who asks alone has a commit of its own, at once; who
asks while another's is on its way lets the loop have a turn first, in which more may ask. Holds at
all times:

* each one is answered once its own task is durable, and gets the error that its own call raised;
* whoever is cancelled before the body has begun has made nothing, and if it led, another one leads;
* nobody waits for a leader that has gone: one that ends without having taken the others hands on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import outcome
import trio

from pidurable.session._batch import again

if TYPE_CHECKING:
    from pidurable.session._line import CommitLine
    from pidurable.tasks._transaction import TaskTransaction

T = TypeVar("T")

TOGETHER_MAX = 32
"""Most that one commit makes: a body keeps the loop from everybody else."""


class Asked:
    """One who asks, until it is answered; called by trio, it gives up.

    Thousands may wait at a time, and the garbage collector walks all that they hold again and
    again. So each is one object, and its call waits in a frame of its own.
    """

    __slots__ = ("_together", "error", "task", "value")

    def __init__(self, together: Together) -> None:
        self._together = together
        self.task = trio.lowlevel.current_task()
        self.value: Any = None
        self.error: Exception | None = None

    def make(self, tx: TaskTransaction[Any, Any]) -> Any:
        """Create on the transaction. It raises before it has staged anything, or not."""
        raise NotImplementedError

    def run(self, tx: TaskTransaction[Any, Any]) -> None:
        before = len(tx.writes)
        try:
            self.error = None
            self.value = self.make(tx)
        except Exception as error:
            if len(tx.writes) != before:
                # It is in the commit with a part of what it does.
                raise
            self.error = error

    def __call__(self, _: Any) -> trio.lowlevel.Abort:
        return self._together.give_up(self)


class _Made(Asked):
    """Who asks with a function."""

    __slots__ = ("_function",)

    def __init__(self, together: Together, function: Callable[[Any], Any]) -> None:
        super().__init__(together)
        self._function = function

    def make(self, tx: TaskTransaction[Any, Any]) -> Any:
        return self._function(tx)


class Together:
    """The creations of one phase that may share commits."""

    __slots__ = ("_asking", "_in_flight", "_leader", "_line", "_run")

    def __init__(
        self,
        line: CommitLine,
        run: Callable[[Callable[[TaskTransaction[Any, Any]], None]], Awaitable[None]],
    ) -> None:
        """Create by the commits of a phase.

        Args:
            line: The line that they go through.
            run: Runs a body as one of them.
        """
        self._line = line
        self._run = run
        self._asking: dict[Asked, None] = {}
        """Those that no body has taken yet, in order; the leader is the first."""
        self._leader: Asked | None = None
        self._in_flight = 0
        """Commits whose body has begun, or is about to."""

    @trio.lowlevel.enable_ki_protection
    async def create(self, make: Callable[[TaskTransaction[Any, Any]], T]) -> T:
        """Run `make` in a commit, perhaps with others; return its result once it is durable.

        Args:
            make: Creates on the transaction. It raises before it has staged anything, or not.
        """
        asked = _Made(self, make)
        first = self.ask(asked)
        if first or await trio.lowlevel.wait_task_rescheduled(asked):
            await self.lead(asked, first=first)
        if asked.error is not None:
            raise asked.error
        return asked.value  # type: ignore[no-any-return]

    # The parts of `create`, for whoever waits without a coroutine more: Ctrl-C must not come
    # between them.

    def ask(self, asked: Asked) -> bool:
        """Ask; True if it is the first and has to `lead`, else it has to wait.

        Woken with True it has to lead, too; with False it has been answered.
        """
        # Its own body would hold the line that the leader waits for.
        self._line.check_not_nested()
        self._asking[asked] = None
        if self._leader is not None:
            return False
        self._leader = asked
        return True

    def give_up(self, asked: Asked) -> trio.lowlevel.Abort:
        """One who waits is cancelled."""
        if asked not in self._asking:
            # Its body has been run by now.
            return trio.lowlevel.Abort.FAILED
        del self._asking[asked]
        return trio.lowlevel.Abort.SUCCEEDED

    async def lead(self, leader: Asked, *, first: bool) -> None:
        """Commit what is asked for, and answer those who asked.

        Args:
            leader: Who asks.
            first: Whether nobody else was asking, so that more may ask meanwhile.
        """
        taken: list[Asked] = []

        @trio.lowlevel.enable_ki_protection
        def body(tx: TaskTransaction[Any, Any]) -> None:
            for asked in self._asking:
                taken.append(asked)
                if len(taken) == TOGETHER_MAX:
                    break
            for asked in taken:
                del self._asking[asked]
            # What is asked for from now on may join the same batch.
            self._hand_on()
            for asked in taken:
                asked.run(tx)

        waits = first and self._in_flight > 0
        self._in_flight += 1
        try:
            if waits:
                await trio.lowlevel.checkpoint()
            await self._run(body)
        except BaseException as error:
            if not taken:
                # It was cancelled, or refused, before its body began.
                del self._asking[leader]
                self._hand_on()
            elif isinstance(error, Exception):
                for asked in taken[1:]:
                    trio.lowlevel.reschedule(asked.task, outcome.Error(again(error)))
            else:
                # Ctrl-C while the storage refused is the leader's alone: they ask again, behind
                # whoever leads by now, since a leader has to be the first.
                self._asking.update(dict.fromkeys(taken[1:]))
                if self._leader is None:
                    self._hand_on()
            raise
        finally:
            self._in_flight -= 1
        for asked in taken[1:]:
            trio.lowlevel.reschedule(asked.task, outcome.Value(False))

    def _hand_on(self) -> None:
        """Let the first of those who still ask lead the next commit."""
        self._leader = next(iter(self._asking), None)
        if self._leader is not None:
            trio.lowlevel.reschedule(self._leader.task, outcome.Value(True))
