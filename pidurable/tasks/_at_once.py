"""Reserving at once: what a commit makes ready is reserved by that same commit.

A task that a commit creates, or wakes by the end of the last that it waited for, is reserved by the
scheduler's next pass, in a commit and with a flush of its own. For work that goes from one short
task to the next, as the turns of an agent do, that is a third of all commits. So tasks of the kinds
that ask for it (`Runtime.at_once`) are reserved here where the scheduler would start them anyhow
and next; it does start them, once the commit is durable. Holds at all times:

* nobody is overtaken: while anything is queued, new tasks queue behind it;
* what is not plain is left to the pass: suspects, retries, new versions, missing definitions, waits
  for more than tasks, whatever is below an intent to cancel or an interruption;
* a slot is taken when the commit joins its batch, so that the bodies after it do not give it away.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pidurable.storage import Op
from pidurable.tasks._definition import definition_info
from pidurable.tasks._invocation import Starts
from pidurable.tasks._tree import PENDING, RUNNING, TERMINAL, WAITING, Node

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime
    from pidurable.tasks._transaction import TreeTransaction

AT_ONCE_MAX = 64
"""Most tasks that one commit reserves besides what it is for. Passes take the rest, in parts that
leave others their turn."""


def reserve_at_once(
    runtime: Runtime, tx: TreeTransaction, created: Collection[Node]
) -> Starts | None:
    """Reserve what a commit that is about to be sealed makes ready.

    Args:
        runtime: Whose commit it is.
        tx: The commit; its body has ended.
        created: The tasks that it creates, in order.

    Returns:
        What is to be started once the commit is durable, if there is anything.
    """
    scheduler, index = runtime.scheduler, runtime.index
    if not created and not index.open_joins:
        return None
    if not runtime.at_once or not runtime.started or runtime.closing or scheduler.is_refusing:
        return None
    if index.ready or index.slotless or not runtime.session.confirmed():
        return None
    made_ready = _woken(runtime, tx) if index.open_joins else []
    for node in created:
        if node.status is PENDING and node.kind in runtime.at_once:
            made_ready.append(node)
    if not made_ready:
        return None
    starts = Starts()
    for node in made_ready:
        _reserve(runtime, tx, node, starts)
        if len(starts.invocations) >= AT_ONCE_MAX:
            break
    return starts if starts.invocations else None


def _woken(runtime: Runtime, tx: TreeTransaction) -> list[Node]:
    """Tasks that waited for tasks alone, of which this commit ends the last."""
    index, view = runtime.index, tx.view
    woken: dict[int, Node] = {}
    for ended in view.nodes.values():
        if not isinstance(ended, Node) or ended.status is not TERMINAL:
            continue
        for waiter in index.waiters.get(ended.id, ()):
            # The batch has ended at most as many as it knows of, so most need no closer look.
            known = len(view.nodes) + len(runtime.staged.nodes)
            if index.open_joins.get(waiter, known + 1) <= known:
                node = view.task(waiter)
                if node is not None and _is_released(runtime, tx, node):
                    woken[waiter] = node
    return list(woken.values())[:AT_ONCE_MAX]


def _is_released(runtime: Runtime, tx: TreeTransaction, node: Node) -> bool:
    """Whether nothing keeps a task from being woken and started, besides its slot."""
    view, published = tx.view, runtime.published
    if node.kind not in runtime.at_once or node.status is not WAITING:
        return False
    if node.id in runtime.index.running:
        # The handler that waited has not returned.
        return False
    wait = node.wait
    if wait is None or wait.on is None or wait.conversations or wait.others:
        return False
    for id in wait.on:
        awaited = published.task(id)
        if awaited is not None and awaited.live:
            staged = view.task(id)
            if staged is not None and staged.live:
                return False
    return True


def _reserve(runtime: Runtime, tx: TreeTransaction, found: Node, starts: Starts) -> None:
    """Reserve a task, if it is one that the scheduler would start as it is."""
    if found.marked or found.blocked is not None or found.recoveries or found.tries:
        return
    takes_slot = not found.below
    if takes_slot and not runtime.scheduler.has_slot(found.kind, starts):
        return
    definition = runtime.snapshot().definition(found.kind)
    if definition is None or definition_info(definition).version != found.version:
        return
    if runtime.under_intent(tx.view, found) or runtime.halted(tx.view, found):
        return
    now = tx.now_us()
    node = tx.view.edit_task(found.id)
    if node.status is WAITING:
        node.woken_by = "tasks"
        node.wait = None
        node.ready_us = now
        tx.writes.append((Op.WAIT_DELETE, (node.id,)))
    node.status = RUNNING
    node.invocations += 1
    if node.started_us is None:
        node.started_us = now
    tx.put_state(node)
    starts.add(node, definition, aborting=False, takes_slot=takes_slot)
