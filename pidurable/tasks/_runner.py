"""Running invocations: started after their reservation is durable, stopped, joined, reported.

An invocation is never left behind: whoever cancels one waits until its code has returned, and one
that takes long is named with its stack. What follows a join (the abort handler, another turn after
the storage refused) is queued here and nowhere else, so nothing runs twice at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from pidurable.errors import InternalError, SessionPoisonedError
from pidurable.records._limits import STOP_REPORT_SECONDS
from pidurable.session._seams import VirtualClock, logger
from pidurable.tasks._run import Invocation, run_invocation
from pidurable.tasks._tree import RUNNING

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime


class Runner:
    """The invocations of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.invocations: dict[int, Invocation] = {}
        self.nursery: trio.Nursery | None = None
        self.on_fatal: Callable[[], None] | None = None
        self.fatal: BaseException | None = None
        """KeyboardInterrupt or SystemExit that left a handler."""
        self._runtime = runtime
        self._index = runtime.index
        self._late: dict[Invocation, None] = {}
        """Those that were told to stop, or that have nothing left to do, and have not returned."""
        self._sleeping = trio.CancelScope()
        """What the reports sleep in, until one of those is worth a report."""
        self._wakes_at = math.inf
        """The deadline of that, which is dearer to ask for, and to set."""
        self._virtual = isinstance(runtime.session.clock, VirtualClock)

    def start(self, invocation: Invocation) -> None:
        """Run an invocation whose reservation is durable.

        A mark that became durable while the reservation was in the storage counts: no phase begins.
        Nor does anything in a session that is poisoned by now: another holder may have it.
        """
        assert self.nursery is not None
        task_id = invocation.task_id
        if not self._may_run(invocation):
            self._runtime.scheduler.suspects.not_started(task_id)
            self._free_slot(task_id, invocation.kind)
            return
        self.invocations[task_id] = invocation
        self._index.running.add(task_id)
        if not self._runtime.scheduler.account(task_id) and invocation.takes_slot:
            self._slot_is_free(invocation.kind)
        invocation.started_at = trio.current_time()
        self.nursery.start_soon(self._run, invocation, name=f"{invocation.kind} {task_id}")

    def _may_run(self, invocation: Invocation) -> bool:
        runtime = self._runtime
        if runtime.closing or runtime.session.line.poison is not None:
            return False
        node = runtime.published.task(invocation.task_id)
        if node is None or node.status is not RUNNING:
            return False
        return invocation.aborting or not (node.marked or runtime.below_intent(node))

    def _free_slot(self, task_id: int, kind: str) -> None:
        """Account for the slot of a task that does not run, or not any more."""
        self._runtime.scheduler.account(task_id)
        self._slot_is_free(kind)

    def _slot_is_free(self, kind: str) -> None:
        """A slot that was held, or planned and is not held, may be of use to others."""
        scheduler = self._runtime.scheduler
        self._index.ready.set_free(kind)
        scheduler.timers_changed()
        if scheduler.has_work():
            scheduler.kick()

    @trio.lowlevel.enable_ki_protection
    async def _run(self, invocation: Invocation) -> None:
        invocation.trio_task = trio.lowlevel.current_task()
        try:
            if self._may_run(invocation):
                await run_invocation(self._runtime, invocation)
        except (KeyboardInterrupt, SystemExit) as fatal:
            self._stop_host(fatal)
        except trio.Cancelled:
            raise
        except Exception as bug:
            logger.exception("the runtime failed on task %d", invocation.task_id)
            self._runtime.session.line.set_poison(
                SessionPoisonedError(
                    self._runtime.session.storage.store, f"{InternalError(str(bug))}"
                )
            )
        finally:
            self._joined(invocation)

    def _stop(self, invocation: Invocation) -> None:
        """Cancel an invocation's handler, and watch how long it takes to stop."""
        invocation.cancel()
        self._watch(invocation, trio.current_time())

    def stop_phase(self, task_id: int) -> None:
        """Cancel the phase of a task; an abort handler is left alone."""
        invocation = self.invocations.get(task_id)
        if invocation is not None and not invocation.aborting:
            self._stop(invocation)

    def decided(self, task_id: int) -> None:
        """The outcome or wait of a running task is stored; its handler has nothing left to do.

        It is not cancelled: closing a connection, say, may still be going on. It is joined before
        anything follows a wait, and reported if it goes on for long.
        """
        invocation = self.invocations.get(task_id)
        if invocation is not None:
            invocation.over_since = now = trio.current_time()
            self._watch(invocation, now)

    def _watch(self, invocation: Invocation, now: float) -> None:
        """See to it that it is reported if it takes long.

        Nearly all of them return at once, so nobody is woken for this.
        """
        self._late[invocation] = None
        due = now + STOP_REPORT_SECONDS
        if due < self._wakes_at:
            self._wake_at(due)

    def _unwatch(self, invocation: Invocation) -> None:
        """It has returned.

        Where nobody is watched any more the reports wake once, in some seconds, and find nothing:
        that is cheaper than to set their time for each task. But a virtual clock would go there.
        """
        if invocation in self._late:
            del self._late[invocation]
            if not self._late and self._virtual:
                self._wake_at(math.inf)

    def _wake_at(self, deadline: float) -> None:
        self._wakes_at = self._sleeping.deadline = deadline

    def stop_all(self) -> None:
        """Cancel everything that runs. Joining it is the nursery's part."""
        for invocation in self.invocations.values():
            self._stop(invocation)

    def _stop_host(self, fatal: BaseException) -> None:
        """KeyboardInterrupt and SystemExit of a handler close the harness, and fault nothing."""
        if self.fatal is None:
            self.fatal = fatal
        if self.on_fatal is not None:
            self.on_fatal()

    def _joined(self, invocation: Invocation) -> None:
        """The invocation's code has returned: free its slot, let the abort handler follow."""
        task_id = invocation.task_id
        self._unwatch(invocation)
        if self.invocations.get(task_id) is invocation:
            del self.invocations[task_id]
            self._index.running.discard(task_id)
        node = self._runtime.published.task(task_id)
        # Another invocation may have its number by now; then this one says nothing of the task.
        if node is not None and task_id not in self._index.running:
            self._index.joined(node, again=invocation.again)
        self._free_slot(task_id, invocation.kind)

    @trio.lowlevel.enable_ki_protection
    async def report_stopping(self) -> None:
        """Name every handler that takes long to stop or to return, again and again.

        It is never left behind.
        """
        reports: dict[tuple[Invocation, float], int] = {}
        while True:
            if not self._late:
                reports.clear()
            self._wakes_at = self._report_due(reports)
            with trio.CancelScope(deadline=self._wakes_at) as self._sleeping:
                await trio.sleep_forever()

    def _report_due(self, reports: dict[tuple[Invocation, float], int]) -> float:
        """Report who is due, and say when to look again; never if nobody is watched any more."""
        now = trio.current_time()
        first = math.inf
        for invocation in self._late:
            stopping = invocation.stopping_since
            since = invocation.over_since if stopping is None else stopping
            assert since is not None
            count = reports.get((invocation, since), 0)
            due = since + STOP_REPORT_SECONDS * (count + 1)
            if now >= due:
                reports[invocation, since] = count + 1
                if stopping is None:
                    self._report_over(invocation, now - since)
                else:
                    self._report_stopping(invocation, now - since)
                due += STOP_REPORT_SECONDS
            first = min(first, due)
        return first

    @staticmethod
    def _report_over(invocation: Invocation, seconds: float) -> None:
        logger.warning(
            "task %d (%s): its handler has not returned %.0f s after its outcome or wait was "
            "stored; nothing that it commits is taken any more. It is at:\n%s",
            invocation.task_id,
            invocation.kind,
            seconds,
            invocation.stack(),
        )

    @staticmethod
    def _report_stopping(invocation: Invocation, seconds: float) -> None:
        logger.warning(
            "task %d (%s) has been stopping for %.0f s, at:\n%s",
            invocation.task_id,
            invocation.kind,
            seconds,
            invocation.stack(),
        )
