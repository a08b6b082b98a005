"""Recovery: what opening makes of the live tasks that a process left behind.

Every surviving `running` task becomes pending from its checkpoint, charged with one recovery (a
clean close has made them pending already, uncharged). Tasks that were blocked for want of code are
looked at again, because the code of this process is new. Waits, held outcomes, marks and joins are
read and evaluated anew: the cascade, the ends and the wakings that a dead process had not written
follow in the scheduler's next commits. It costs O(live work and the ended owners above it), never
O(history), and runs no code of any task.
"""

from __future__ import annotations

from pidurable.errors import NotJsonError
from pidurable.records import _codec, _json
from pidurable.session._transaction import Transaction
from pidurable.storage import Op
from pidurable.tasks._runtime import CODE_BLOCKS, Runtime
from pidurable.tasks._tree import PENDING, RUNNING, WAITING, Node, View

_PAGE = 10_000


async def recover(runtime: Runtime) -> int:
    """Read the live tasks, write what the restart changes, publish the tree.

    Returns:
        How many tasks were interrupted in the middle of a phase.
    """
    session = runtime.session
    nodes = await session.blocking.run(_read, runtime)
    interrupted = 0
    changed: list[Node] = []
    now = session.clock.now_us()
    snapshot = runtime.snapshot()
    for node in nodes:
        if node.status is RUNNING:
            node.status = PENDING
            node.recoveries += 1
            node.ready_us = now
            interrupted += 1
            changed.append(node)
        elif node.blocked in CODE_BLOCKS and snapshot.definition(node.kind) is not None:
            node.blocked = None
            changed.append(node)
        elif node.status is WAITING and (node.wait is None) is (node.blocked is None):
            # Damage takes this one task off every path; what was damaged is as it was, and may
            # be restored.
            node.blocked = "unknown_record" if node.wait is None else None
            changed.append(node)
    if changed:

        def body(tx: Transaction) -> None:
            tx.writes += [(Op.TASK_STATE, node.state_row()) for node in changed]

        await session.run(session.transaction(), body)
    # First ready first, also over a restart.
    nodes.sort(key=lambda node: (node.ready_us, node.id))
    view = View(runtime.published, runtime.load)
    view.nodes.update((node.id, node) for node in nodes)
    for node in nodes:
        view.spread(node, was=False, was_all=False)
    for task_id, unread in session.storage.live_signals():
        runtime.set_unread(task_id, unread)
    runtime.index.adopt(list(view.nodes.values()), opening=True)
    runtime.after_adoption()
    return interrupted


def _read(runtime: Runtime) -> list[Node]:
    """Every live task, with what the waiting ones wait for."""
    storage = runtime.session.storage
    nodes: dict[int, Node] = {}
    after = 0
    while page := storage.live_tasks(after=after, limit=_PAGE):
        nodes.update((row.id, Node(row)) for row in page)
        after = page[-1].id
    after = 0
    while waits := storage.waits(after=after, limit=_PAGE):
        for task_id, text in waits:
            try:
                nodes[task_id].wait = _codec.decode_wait(_json.loads_stored(text))
            except NotJsonError as error:
                runtime.report(task_id, f"unknown_record: what it waits for: {error}")
        after = waits[-1][0]
    return list(nodes.values())


__all__ = ["recover"]
