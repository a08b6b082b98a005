"""Recovery: what opening makes of the live tasks that a process left behind.

Every surviving `running` task becomes pending from its checkpoint, charged with one recovery (a
clean close has made them pending already, uncharged), and is blocked once it has been charged too
often. Tasks that were blocked for want of code are looked at again, because the code of this
process is new. What was created to wait for a person after a restart, or to be aborted by one, is
blocked or marked. Waits, held outcomes, marks and joins are read and evaluated anew: the cascade,
the ends and the wakings that a dead process had not written follow in the scheduler's next commits.
It costs O(live work and the ended owners above it), never O(history), and runs no code of any task.
"""

from __future__ import annotations

from collections.abc import Iterator

import trio

from pidurable.errors import NotJsonError
from pidurable.records import _codec, _json
from pidurable.storage import Op
from pidurable.tasks._runtime import CODE_BLOCKS, Runtime
from pidurable.tasks._suspects import suspect_from
from pidurable.tasks._tree import COMPLETING, PENDING, RUNNING, WAITING, AnyNode, Node, View
from pidurable.tasks._tree_transaction import TreeTransaction

_PAGE = 10_000
_AT_ONCE = 2_000
"""Tasks that are looked at between two turns of the loop."""
_UNTIL_RESUMED = CODE_BLOCKS | {None}
"""What a task may be blocked for that a restart then interrupts: what nobody has to lift."""


async def recover(runtime: Runtime) -> int:
    """Read the live tasks, write what the restart changes, publish the tree.

    The loop has a turn now and then, so that a million tasks do not keep it from the heartbeat.

    Returns:
        How many tasks were interrupted in the middle of a phase.
    """
    session = runtime.session
    view = View(runtime.published)
    tasks, settled = await session.blocking.run(_read, runtime, view.nodes)
    for part in _batched(tasks):
        for node in part:
            view.spread(node, was=False, was_all=False)
        await trio.lowlevel.cancel_shielded_checkpoint()
    changed: dict[int, Node] = {}
    interrupted = _charge(runtime, tasks, changed)
    _look_again(runtime, tasks, changed)
    aborted, forgiven = _apply_on_restart(view, tasks, changed, session.clock.now_us())
    for task_id, unread in session.storage.live_signals():
        runtime.set_unread(task_id, unread)
    runtime.index.open(view.nodes)
    # First ready first, also over a restart.
    turns = [node for node in tasks if node.marked or node.status is PENDING]
    turns.sort(key=lambda node: (node.ready_us, node.id))
    for some in (turns, [node for node in tasks if not (node.marked or node.status is PENDING)]):
        for part in _batched(some):
            runtime.index.adopt_opened(part)
            await trio.lowlevel.cancel_shielded_checkpoint()
    for id in settled:
        runtime.index.settled(id)
    runtime.index.let_go.extend(node.id for node in tasks if node.let_go)
    if changed:

        def body(tx: TreeTransaction) -> None:
            tx.writes += [(Op.TASK_STATE, node.state_row()) for node in changed.values()]
            tx.writes += [(Op.OUTCOME_DELETE, (id,)) for id in forgiven]
            for node in aborted:
                runtime.intent_began(tx, node)

        # The tree is in memory already, so that participants find what is below a mark. Nothing
        # acts on it before this is durable: if it cannot be stored, the session does not open.
        try:
            await runtime.commit(body)
        except BaseException:
            # What was not stored here is not to be stored by the close that follows either.
            runtime.index.active.clear()
            raise
    runtime.after_adoption({})
    return interrupted


def _batched(tasks: list[Node]) -> Iterator[list[Node]]:
    """The tasks in parts that keep the loop for some milliseconds."""
    for first in range(0, len(tasks), _AT_ONCE):
        yield tasks[first : first + _AT_ONCE]


def _charge(runtime: Runtime, nodes: list[Node], changed: dict[int, Node]) -> int:
    """Charge what was running, and block what has killed the process too often.

    Only one that was the only suspect running is blamed: with two of them nobody knows which it
    was, and from now on they are tried one at a time.
    """
    running = [node for node in nodes if node.status is RUNNING]
    recoveries_max = runtime.session.settings.recoveries_max
    least = suspect_from(recoveries_max)
    suspects = sum(node.recoveries >= least for node in running)
    now = runtime.session.clock.now_us()
    for node in running:
        others = suspects - int(node.recoveries >= least)
        node.status = PENDING
        node.recoveries += 1
        # It had its turn before those that were ready later, and keeps it.
        node.ready_us = min(node.ready_us, now)
        if node.recoveries >= recoveries_max and not others:
            node.blocked = "crash_loop"
            runtime.report(
                node.id,
                f"crash_loop: the process died {node.recoveries} times while it was running, and "
                "no other suspect ran; `retry_task` lets it run again",
                kind=node.kind,
            )
        changed[node.id] = node
    return len(running)


def _look_again(runtime: Runtime, nodes: list[Node], changed: dict[int, Node]) -> None:
    """Lift what blocked for want of code, or for damage that is mended; find new damage."""
    snapshot = runtime.snapshot()
    for node in nodes:
        if node.blocked in CODE_BLOCKS:
            if snapshot.definition(node.kind) is not None:
                node.blocked = None
                changed[node.id] = node
        elif node.status is WAITING:
            # Damage takes this one task off every path; what was damaged is as it was, and may
            # be restored.
            if not node.has_wait and node.blocked != "unknown_record":
                node.blocked = "unknown_record"
                changed[node.id] = node
            elif node.has_wait and node.blocked == "unknown_record":
                node.blocked = None
                changed[node.id] = node


def _apply_on_restart(
    view: View, nodes: list[Node], changed: dict[int, Node], now_us: int
) -> tuple[list[Node], list[int]]:
    """Block or mark what was created to wait, or to be aborted, when a restart interrupts it.

    The nearest owner's value counts, the task's own first; a background task takes none from above.

    Returns:
        Tasks that are marked, and those of them that were parked: the error kept of them is void.
    """
    aborted: list[Node] = []
    forgiven: list[int] = []
    if not any(isinstance(each, Node) and each.on_restart for each in view.nodes.values()):
        return aborted, forgiven
    known: dict[int, str | None] = {}
    let_go: dict[int, bool] = dict.fromkeys((node.id for node in nodes if node.let_go), True)
    for node in nodes:
        value = _on_restart(view, node, known)
        if node.marked or value not in ("wait", "abort"):
            continue
        if value == "wait" and let_go and _is_let_go(view, node, let_go):
            if node.blocked == "interrupted":
                node.blocked = None
                changed[node.id] = node
            continue
        if value == "abort":
            aborted.append(node)
            node.abort_us = now_us
            node.abort_reason = "restart"
            node.tries = 0
            node.ready_us = min(node.ready_us or now_us, now_us)
            if node.blocked is not None:
                if node.blocked == "faulted":
                    forgiven.append(node.id)
                node.blocked = None
                node.recoveries = 0
        elif node.status is not COMPLETING and node.blocked in _UNTIL_RESUMED:
            # New code does not let it go on either, until somebody resumes it.
            node.blocked = "interrupted"
        else:
            continue
        changed[node.id] = node
    return aborted, forgiven


def _on_restart(view: View, node: Node, known: dict[int, str | None]) -> str | None:
    """The value that counts for a task; `known` has those of nodes that were asked before."""
    passed: list[int] = []
    value: str | None = None
    current: AnyNode | None = node
    while current is not None:
        if current.id in known:
            value = known[current.id]
            break
        passed.append(current.id)
        if isinstance(current, Node) and current.on_restart is not None:
            value = current.on_restart
            break
        current = None if current.background else view.find_above(current)
    known.update((id, value) for id in passed)
    return value


def _is_let_go(view: View, node: Node, known: dict[int, bool]) -> bool:
    """Whether somebody resumed a task, or one above it, and nothing has run since."""
    passed: list[int] = []
    current: AnyNode | None = node
    while current is not None and current.id not in known:
        passed.append(current.id)
        current = None if current.background else view.find_above(current)
    found = current is not None and known[current.id]
    known.update((id, found) for id in passed)
    return found


def _read(runtime: Runtime, nodes: dict[int, AnyNode]) -> tuple[list[Node], list[int]]:
    """Every live task, with what the waiting ones wait for, and what of that settled meanwhile.

    Args:
        runtime: Whose storage is read.
        nodes: Where the tasks are put, by id.
    """
    storage = runtime.session.storage
    tasks: list[Node] = []
    # Equal ids become one object each: tasks of one conversation, or of one owner, are many.
    shared: dict[int, int] = {}
    after = 0
    while page := storage.live_tasks(after=after, limit=_PAGE):
        for row in page:
            node = Node(row)
            node.conversation = shared.setdefault(node.conversation, node.conversation)
            if node.owner is not None:
                node.owner = shared.setdefault(node.owner, node.owner)
            nodes[node.id] = node
            tasks.append(node)
        after = page[-1].id
    others: set[int] = set()
    after = 0
    while waits := storage.waits(after=after, limit=_PAGE):
        for task_id, text in waits:
            parked = nodes.get(task_id)
            if not isinstance(parked, Node):
                # The work of all others is none the worse for it.
                why = "unknown_record: it is stored as waiting, and no live task has its id"
                runtime.report(task_id, why)
                continue
            try:
                wait = _codec.decode_wait(_json.loads_stored(text))
            except NotJsonError as error:
                why = f"unknown_record: what it waits for: {error}"
                runtime.report(task_id, why, kind=parked.kind)
                continue
            parked.wait = wait
            others.update(wait.others)
        after = waits[-1][0]
    return tasks, [id for id in sorted(others) if runtime.kinds.was_settled(id)]


__all__ = ["recover"]
