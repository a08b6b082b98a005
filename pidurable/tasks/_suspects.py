"""Suspects: tasks that may be what kills the process, started one at a time.

`running` is the charge. A task that was running when the process died is charged with one recovery,
and progress forgives it. From the third charge on it is a suspect, and suspects are tried alone:
the next one starts after the last has made progress or ended, or has been alive for a minute. So
one that kills the process is blamed alone, and its neighbours go on.

* At most one task is on trial. What waits for its trial is in no other queue.
* A trial ends when the task is no suspect any more, when its code has returned, or by the time. Of
  each kind, the first that waits is let go then; whichever is reserved first is tried next.
* What is on trial is not stored: a process that dies starts over, with the charge stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pidurable.records._limits import SUSPECT_RECOVERIES, SUSPECT_SECONDS
from pidurable.tasks._tree import Node

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime


def suspect_from(recoveries_max: int) -> int:
    """From how many charges on a task is a suspect.

    A smaller `recoveries_max` moves it down, so that a task is tried alone before it is blocked.
    """
    return max(1, min(SUSPECT_RECOVERIES, recoveries_max - 1))


class Suspects:
    """Who is on trial, and who waits for it, in one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.on_trial: int | None = None
        self._waiting: dict[str, dict[int, None]] = {}
        self._since: float = 0.0
        self._started = False
        """Whether the code of what is on trial has begun."""
        self._begun = trio.Event()

    def suspect(self, node: Node) -> bool:
        """Whether a task is to be tried alone."""
        recoveries = node.recoveries
        return recoveries > 0 and recoveries >= suspect_from(
            self._runtime.session.settings.recoveries_max
        )

    def wait(self, node: Node) -> None:
        """Hold a suspect back until the trial is over; one that waits already keeps its place."""
        self._waiting.setdefault(node.kind, {})[node.id] = None

    def waiting(self) -> list[int]:
        """Every task that waits for its trial; one that no longer counts may be among them."""
        return [id for ids in self._waiting.values() for id in ids]

    def begin(self, task_id: int) -> None:
        """A suspect was reserved: it is on trial."""
        self.on_trial = task_id
        self._started = False
        self._since = trio.current_time()
        self._begun.set()

    def look(self) -> None:
        """Something was said of the task on trial: is it over?"""
        if self.on_trial is None:
            return
        node = self._runtime.published.task(self.on_trial)
        runs = self.on_trial in self._runtime.invocations
        # Between its reservation and its start something may be said of what is below it.
        self._started = self._started or runs
        returned = self._started and not runs
        if node is None or not node.live or returned or not self.suspect(node):
            self._end()

    def not_started(self, task_id: int) -> None:
        """A mark, or the close, came before a suspect that was reserved could start."""
        if task_id == self.on_trial:
            self._end()

    def _end(self) -> None:
        """The trial is over."""
        self.on_trial = None
        self.let_next()
        self._runtime.scheduler.kick()

    def let_next(self) -> None:
        """Let the first of each kind that may start compete for the next trial.

        Those before it come again by themselves: when what is below them has ended, or when the
        moment of their retry is there.
        """
        index = self._runtime.index
        now = self._runtime.session.clock.now_us()
        for kind in list(self._waiting):
            ids = self._waiting[kind]
            while ids:
                first = next(iter(ids))
                del ids[first]
                node = self._runtime.published.task(first)
                if node is None or not node.live or node.blocked is not None:
                    continue
                index.joined(node, again=False)
                if node.not_before_us <= now and (not node.marked or index.may_abort(node)):
                    break
            if not ids:
                del self._waiting[kind]

    async def serve(self) -> None:
        """End each trial that lasts long: whoever lives for a minute does not kill at its start."""
        while True:
            await self._begun.wait()
            self._begun = trio.Event()
            with trio.move_on_at(self._since + SUSPECT_SECONDS):
                # A newer trial starts the clock anew.
                await self._begun.wait()
                continue
            if self.on_trial is not None and not self._begun.is_set():
                self._end()
