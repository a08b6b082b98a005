"""Silence: giving up streams whose provider has sent nothing for too long.

A timer for each event of each stream is most of what a thousand streams cost. So a stream only
notes since when it waits for its provider, and one task for all of them looks at the notes: once
when the oldest may be due, and that is about once in the time that a silence may last. Nobody is
given up early or late: who begins to wait after a look is not due before the next one.

That task costs more than a few timers do, and an answer may be over after a few events. So the
first waits of a stream are timed each, and only one that goes on is looked after.
"""

from __future__ import annotations

import math

import attrs
import trio

_TIMED = 8
"""So many waits of a stream have a timer each."""


@attrs.define(eq=False)
class Waiting:
    """One open stream. Its scope is cancelled when it has waited for too long."""

    scope: trio.CancelScope
    seconds: float
    """Most seconds to wait for one event."""
    since: float | None = None
    """When it began to wait for its provider; None while its reader is at work, and while it has a
    timer."""
    _waits: int = attrs.field(default=0, init=False)
    _looked_after: Silences | None = attrs.field(default=None, init=False)

    def begin(self) -> None:
        """It waits for its provider from now on."""
        now = trio.current_time()
        if self._waits < _TIMED:
            self._waits += 1
            self.scope.deadline = now + self.seconds
            return
        if self._looked_after is None:
            self._looked_after = silences()
            self._looked_after.watch(self)
        self.since = now

    def end(self) -> None:
        """It waits no more: its provider has sent something, or has failed."""
        if self.since is None:
            self.scope.deadline = math.inf
        else:
            self.since = None

    def close(self) -> None:
        """The stream is over."""
        if self._looked_after is not None:
            self._looked_after.forget(self)
            self._looked_after = None


class Silences:
    """The long streams of one trio run, and the task that looks after them while there are any."""

    def __init__(self) -> None:
        self._open: dict[Waiting, None] = {}
        self._looking: trio.CancelScope | None = None
        self._sleeping = trio.CancelScope()

    def watch(self, waiting: Waiting) -> None:
        """Look after a stream until it is forgotten."""
        self._open[waiting] = None
        self._sleeping.deadline = min(
            self._sleeping.deadline, trio.current_time() + waiting.seconds
        )
        if self._looking is None:
            self._looking = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._look, self._looking)

    def forget(self, waiting: Waiting) -> None:
        """The stream is over. The task that looks ends with the last one."""
        del self._open[waiting]
        if not self._open and self._looking is not None:
            # Whoever is looked after next starts another one.
            self._looking.cancel()
            self._looking = None

    async def _look(self, looking: trio.CancelScope) -> None:
        with looking:
            while True:
                with trio.CancelScope(deadline=self._give_up()) as self._sleeping:
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
