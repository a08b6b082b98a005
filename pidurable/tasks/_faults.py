"""What follows when the code of a task raised: a retry, a parked fault, or the faulted outcome.

The line decides between a mark, a close and a fault: whoever's body comes first. A retry is durable
and needs no wait: the task is pending from its checkpoint, ready at a later moment, its tries
counted; the mark of an abort stays in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import trio

from pidurable.errors import SessionClosedError, SessionPoisonedError, StorageRefusedError
from pidurable.records._moments import LAST_US
from pidurable.records._tasks import ErrorInfo, OutcomeRecord
from pidurable.tasks._errors import error_info
from pidurable.tasks._mistakes import fault_message, place_of
from pidurable.tasks._tree import PENDING

if TYPE_CHECKING:
    from pidurable.tasks._run import Invocation, Phase
    from pidurable.tasks._runtime import Runtime
    from pidurable.tasks._transaction import TreeTransaction


async def write_fault(
    runtime: Runtime, invocation: Invocation, phase: Phase, error: BaseException | ErrorInfo
) -> None:
    """Write what a raise leads to, unless a mark or the close came first in line."""
    if isinstance(error, ErrorInfo):
        info = error
    else:
        info = error_info(error, with_traceback=True)
        info = attrs.evolve(info, message=fault_message(phase, error, info.message))
    done: list[str] = []

    @trio.lowlevel.enable_ki_protection
    def body(tx: TreeTransaction) -> None:
        found = tx.view.task(phase.task_id)
        if found is None or runtime.closing or not invocation.runs(found):
            return
        if not invocation.aborting and (found.marked or runtime.under_intent(tx.view, found)):
            return
        node = tx.view.edit_task(phase.task_id)
        retry = phase.info.retry
        if (
            retry is not None
            and isinstance(error, BaseException)
            and retry.matches(error)
            and node.tries + 1 < retry.tries
        ):
            node.tries += 1
            seed = f"{runtime.session.uuid}:{node.id}"
            delay = retry.delay(node.tries, seed=seed)
            node.status = PENDING
            # A delay may be any float, and a moment has an end.
            node.ready_us = min(tx.now_us() + int(delay * 1e6), LAST_US)
            tx.put_state(node)
            done.append(f"try {node.tries} of {retry.tries} failed, the next in {delay:.3g} s")
        elif _parks(runtime, phase, info):
            tx.park(node, info)
            done.append("fault parked")
        else:
            tx.settle(node, OutcomeRecord(status="faulted", error=info))
            runtime.on_settled_by_scheduler(tx, node, "faulted", info)
            done.append("faulted")

    if await write(runtime, invocation, body) and done:
        # It has left memory where this was its end.
        kind, place = phase.info.name, place_of(phase)
        text = f"{info.type}: {info.message}"
        where = "" if place in text else f" in {place}"
        runtime.report(phase.task_id, f"{done[0]}{where}: {text}", kind=kind)


def _parks(runtime: Runtime, phase: Phase, error: ErrorInfo) -> bool:
    """Whether a fault blocks its task. Out of time it ends: its owners are waiting to finish."""
    on_fault = phase.info.on_fault or runtime.session.settings.on_fault
    return on_fault == "park" and error.type != "abort_timeout"


async def write(
    runtime: Runtime, invocation: Invocation, body: Callable[[TreeTransaction], None]
) -> bool:
    """Commit for the scheduler itself; False if it was not stored.

    Trouble of the storage leaves the task at its checkpoint.
    """
    try:
        with trio.CancelScope(shield=True):
            await runtime.commit(body)
    except StorageRefusedError:
        invocation.again = True
        return False
    except (SessionPoisonedError, SessionClosedError):
        return False
    return True
