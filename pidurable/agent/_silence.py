"""Silence: giving up streams whose provider has sent nothing for too long.

A timer for each event of each stream is most of what a stream costs besides what it carries. So a
stream only notes since when it waits for its provider, and one task for all of them looks at the
notes: once when the oldest may be due, and that is about once in the time that a silence may last.
Nobody is given up early or late: who begins to wait after a look is not due before the next one.

That task begins with the first stream and stays for as long as trio runs, because an answer may be
over after a few events, and to start it for each would cost more than it saves. While no stream is
open it has no time to wake at.
"""

from __future__ import annotations

import math

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
        self._looks = False
        """Whether that task has been started."""
        self._sleeping = trio.CancelScope()
        """What it sleeps in until one of them may be due."""
        self._wakes_at = math.inf
        """The deadline of that, which is dearer to ask for, and to set."""

    def watch(self, waiting: Waiting) -> None:
        """Look after a stream until it is forgotten."""
        self._open[waiting] = None
        due = trio.current_time() + waiting.seconds
        if due < self._wakes_at:
            self._wake_at(due)
        if not self._looks:
            self._looks = True
            trio.lowlevel.spawn_system_task(self._look)

    def forget(self, waiting: Waiting) -> None:
        """The stream is over; with the last one goes the time to look: a clock may jump to it."""
        del self._open[waiting]
        if not self._open:
            self._wake_at(math.inf)

    def _wake_at(self, deadline: float) -> None:
        self._wakes_at = self._sleeping.deadline = deadline

    async def _look(self) -> None:
        while True:
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
