"""Silence: giving up streams whose provider has sent nothing for too long.

A timer for each event of each stream is most of what a stream costs besides what it carries. So a
stream only notes since when it waits for its provider, and one task for all of them looks at the
notes: once when the oldest may be due, and that is about once in the time that a silence may last.
Nobody is given up early or late: who begins to wait after a look is not due before the next one.

An answer may be over after a few events, and to start that task for each would cost more than it
saves. So it stays for as long as somebody says that there will be more streams. Where none is open
any more it wakes once, at the time that it has, and finds nothing: that is cheaper than to set its
time for each stream. Only under a virtual clock, which would go there, it has no time then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio


@attrs.define(eq=False)
class Waiting:
    """One open stream. Its scope is cancelled when it has waited for too long."""

    scope: trio.CancelScope
    seconds: float
    """Most seconds to wait for one event."""
    since: float | None = None
    """When it began to wait for its provider; None while its reader is at work."""

    def begin(self) -> None:
        """It waits for its provider from now on."""
        self.since = trio.current_time()

    def end(self) -> None:
        """It waits no more: its provider has sent something, or has failed."""
        self.since = None


class Silences:
    """The open streams of one trio run, and the task that looks after them."""

    def __init__(self) -> None:
        self._open: dict[Waiting, None] = {}
        self._kept = 0
        """How many want that task to stay."""
        self._virtual = False
        """Whether one of them goes by a virtual clock."""
        self._looking: trio.CancelScope | None = None
        self._sleeping = trio.CancelScope()
        """What it sleeps in until one of them may be due."""
        self._wakes_at = math.inf
        """The deadline of that, which is dearer to ask for, and to set."""

    @contextmanager
    def kept(self, *, virtual: bool) -> Iterator[None]:
        """Have the task stay from one stream to the next, for as long as this lasts.

        Args:
            virtual: Whether time jumps to whatever somebody waits for.
        """
        self._kept += 1
        self._virtual = self._virtual or virtual
        try:
            yield
        finally:
            self._kept -= 1
            self._rest()

    def watch(self, waiting: Waiting) -> None:
        """Look after a stream until it is forgotten."""
        self._open[waiting] = None
        due = trio.current_time() + waiting.seconds
        if due < self._wakes_at:
            self._wake_at(due)
        if self._looking is None:
            self._looking = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._look, self._looking)

    def forget(self, waiting: Waiting) -> None:
        """The stream is over."""
        del self._open[waiting]
        self._rest()

    def _rest(self) -> None:
        """Where no stream is open, end the task, unless it is to stay."""
        if self._open:
            return
        if self._kept:
            if self._virtual:
                self._wake_at(math.inf)
        elif self._looking is not None:
            # Whoever is looked after next starts another one.
            self._looking.cancel()
            self._looking = None
            self._wakes_at = math.inf

    def _wake_at(self, deadline: float) -> None:
        self._wakes_at = self._sleeping.deadline = deadline

    async def _look(self, looking: trio.CancelScope) -> None:
        with looking:
            # One that was told to end before it began must not take the place of the next.
            while not looking.cancel_called:
                self._wakes_at = self._give_up()
                with trio.CancelScope(deadline=self._wakes_at) as self._sleeping:
                    await trio.sleep_forever()

    def _give_up(self) -> float:
        """Cancel who has waited for too long; return when the next one may be due."""
        now = trio.current_time()
        next_due = math.inf
        for waiting in self._open:
            due = (now if waiting.since is None else waiting.since) + waiting.seconds
            if due <= now:
                waiting.scope.cancel()
            else:
                next_due = min(next_due, due)
        return next_due


_SILENCES: trio.lowlevel.RunVar[Silences] = trio.lowlevel.RunVar("pidurable.silences")


def silences() -> Silences:
    """Those of the trio run that the caller is in."""
    try:
        return _SILENCES.get()
    except LookupError:
        found = Silences()
        _SILENCES.set(found)
        return found
