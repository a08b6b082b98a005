"""Suspects: tasks that may be what kills the process, started one at a time.

`running` is the charge. A task that was running when the process died is charged with one recovery,
and progress forgives it. From the third charge on it is a suspect, and suspects are tried alone:
the next one starts after the last has made progress or ended, or has been alive for a minute. So
one that kills the process is blamed alone, and its neighbours go on.

What the code of a suspect waits for in memory may be a suspect as well, which could not start as
long as the trial above it lasts. So a trial pauses while its code waits: the next suspect may start
then, and the commit that starts it puts the charge of those that wait back below suspicion. Again
only one suspect runs, so what kills below a waiting caller is blamed, and the caller is not. A
caller keeps its charge as long as nobody is tried in its place, so one that kills beside its own
wait is blamed once no other suspect is left to start.

* At most one task is on trial. What waits for its trial is in no other queue.
* No suspect starts while the code of another one, which has lived for less, runs without waiting.
* A trial ends when the task is no suspect any more, when its code has returned, or by the time. Of
  each kind, the first that waits is let go then; whichever is reserved first is tried next.
* What is on trial is not stored: a process that dies starts over, with the charge stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import trio

from pidurable.errors import StorageAccessError
from pidurable.records._limits import SUSPECT_RECOVERIES, SUSPECT_SECONDS
from pidurable.tasks._tree import RUNNING, Node, View

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
        self._tried: dict[int, None] = {}
        """Whose trial has begun, as long as they run and are suspects."""

    def suspect(self, node: Node) -> bool:
        """Whether a task is to be tried alone."""
        recoveries = node.recoveries
        return recoveries > 0 and recoveries >= self._least

    @property
    def _least(self) -> int:
        return suspect_from(self._runtime.session.settings.recoveries_max)

    def tries(self) -> int | None:
        """The task on trial whose code does not wait: nobody else is tried meanwhile."""
        tried = self.on_trial
        return None if tried is None or self._waits(tried) else tried

    def wait(self, node: Node) -> None:
        """Hold a suspect back until the trial is over; one that waits already keeps its place."""
        self._waiting.setdefault(node.kind, {})[node.id] = None

    def waiting(self) -> list[int]:
        """Every task that waits for its trial; one that no longer counts may be among them."""
        return [id for ids in self._waiting.values() for id in ids]

    def begin(self, task_id: int) -> None:
        """A suspect was reserved: it is on trial."""
        self._tried = {id: None for id in self._tried if self._runs(id)}
        self._tried[task_id] = None
        self.on_trial = task_id
        self._started = False
        self._since = trio.current_time()
        self._begun.set()

    def holds(self, task_id: int) -> None:
        """The code of a task has come to a wait in memory: others may be tried meanwhile."""
        if task_id == self.on_trial:
            self.let_next()
            self._runtime.scheduler.kick()

    def let_off(self, view: View) -> Iterator[Node]:
        """Those that a new trial lets off, for they wait: no suspects any more, in `view`."""
        for id in self._tried:
            node = view.task(id)
            if node is None or node.status is not RUNNING or not self.suspect(node):
                continue
            if self._waits(id):
                node = view.edit_task(id)
                node.recoveries = self._least - 1
                yield node

    def _waits(self, task_id: int) -> bool:
        """Whether the code of a task waits in memory for what has not ended.

        What ends wakes it: from then on it runs, though its code has had no turn yet.
        """
        held = self._runtime.cycles.held_by(task_id)
        return task_id in self._runtime.invocations and any(self._is_open(id) for id in held)

    def _is_open(self, awaited: int) -> bool:
        """Whether what somebody waits for has not ended, as staged."""
        node = self._runtime.staged.find(awaited)
        if isinstance(node, Node):
            return node.live
        if node is not None:
            return node.below > 0
        try:
            found = self._runtime.kinds.look(awaited, None)
        except StorageAccessError:
            # Not known now: the trial goes on as that of one that does not wait.
            return False
        return found is not None and found[1]

    def _runs(self, task_id: int) -> bool:
        """Whether a task runs, and is a suspect yet."""
        node = self._runtime.published.task(task_id)
        return node is not None and node.status is RUNNING and self.suspect(node)

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
