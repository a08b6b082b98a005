"""Silence: giving up streams whose provider has sent nothing for too long.

A timer for each event of each stream is most of what a thousand streams cost. So a stream only
notes since when it waits for its provider, and one task for all of them looks at the notes: once
when the oldest may be due, and that is about once in the time that a silence may last. Nobody is
given up early or late: who begins to wait after a look is not due before the next one.
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


class Silences:
    """The open streams of one trio run, and the task that looks after them while there are any."""

    def __init__(self) -> None:
        self._open: dict[Waiting, None] = {}
        self._looking: trio.CancelScope | None = None
        self._sleeping = trio.CancelScope()

    @contextmanager
    def watched(self, waiting: Waiting) -> Iterator[None]:
        """Look after a stream for as long as the block lasts."""
        self._open[waiting] = None
        self._sleeping.deadline = min(
            self._sleeping.deadline, trio.current_time() + waiting.seconds
        )
        if self._looking is None:
            self._looking = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._look, self._looking)
        try:
            yield
        finally:
            del self._open[waiting]
            if not self._open and self._looking is not None:
                # Whoever opens a stream next starts another one.
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
