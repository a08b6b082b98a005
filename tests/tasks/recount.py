"""The tree counted anew from the rows of the store, compared with what the runtime keeps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pidurable.storage import MemoryStorage, Op, TaskRow
from pidurable.tasks._index import Index
from pidurable.tasks._runtime import Runtime
from pidurable.tasks._tree import COMPLETING, PENDING, TERMINAL, WAITING, Node, Scope, View


def check_commit(tx: Any) -> None:
    """A task becomes terminal with an outcome, and with nothing ordinary live below it."""
    for op, row in tx.writes:
        if op is Op.TASK_STATE and row.status == TERMINAL:
            node = tx.view.nodes[row.id]
            assert node.status is TERMINAL
            assert node.below == 0
            assert row.outcome_status is not None


def check_history(seen: dict[int, TaskRow], storage: MemoryStorage) -> None:
    """Marks stay, an outcome that is decided stays, and a receipt never changes."""
    for id, row in storage.reopen()._data.tasks.items():
        old = seen.get(id)
        if old is not None:
            if old.status == TERMINAL:
                assert row == old
            if old.abort_us is not None:
                assert (row.abort_us, row.abort_reason) == (old.abort_us, old.abort_reason)
            if old.outcome_status is not None:
                assert row.outcome_status == old.outcome_status
            assert row.invocations >= old.invocations
        seen[id] = row


def recount(storage: MemoryStorage) -> tuple[dict[int, int], dict[int, int], dict[int, set[int]]]:
    """`below`, `below_all` and the children that count, by id, from the rows alone."""
    data = storage.reopen()._data
    above: dict[int, int | None] = {}
    live: dict[int, bool] = {}
    background: dict[int, bool] = {}
    for id, row in data.tasks.items():
        above[id] = row.owner if row.owner is not None else row.conversation
        live[id] = row.status < TERMINAL
        background[id] = bool(row.background)
    for id, made in data.conversations.items():
        above[id], live[id], background[id] = made.owner, False, False
    ended = {id for id in data.tasks if not live[id] and not background[id]}
    # What is below an ordinary task that ended counts at the next node above.
    for id in sorted(above):
        owner = above[id]
        above[id] = above[owner] if owner in ended else owner
    for id in ended:
        above[id] = None
    below: dict[int, int] = defaultdict(int)
    below_all: dict[int, int] = defaultdict(int)
    children: dict[int, set[int]] = defaultdict(set)
    # An owner is always older than what it owns.
    for id in sorted(above, reverse=True):
        owner = above[id]
        if owner is None:
            continue
        if not background[id] and (live[id] or below[id]):
            below[owner] += 1
        if live[id] or below_all[id]:
            below_all[owner] += 1
            children[owner].add(id)
    return below, below_all, children


def check_tree(rt: Runtime, storage: MemoryStorage) -> None:
    """Every counter and every index equals one made from the rows of the store."""
    data = storage.reopen()._data
    below, below_all, children = recount(storage)
    nodes = rt.published.nodes
    expected = {id for id, row in data.tasks.items() if row.status < TERMINAL}
    expected |= {id for id in below_all if below_all[id]}
    assert set(nodes) == expected
    for id, node in nodes.items():
        assert (node.below, node.below_all) == (below[id], below_all[id]), id
        if isinstance(node, Node) and node.live:
            row = data.tasks[id]
            state = node.state_row()
            assert (state[0], *state[1:13], state[13]) == (row.version, *row[10:22], id)
            assert (node.wait is not None) == (id in data.waits)
    assert {id: set(each) for id, each in rt.index.children.items()} == dict(children)
    check_index(rt)


def check_index(rt: Runtime) -> None:
    """The indexes equal those of an index that adopts all nodes at once, and what has settled."""
    fresh_view = View(None, rt.load)
    index = rt.index
    fresh = Index(fresh_view, top_of=rt._top_of, unread=rt.unread, now_us=lambda: 2**62)
    copies = {node.id: node.copy() for node in rt.published.nodes.values()}
    fresh.open(copies)
    fresh.adopt_opened(node for node in copies.values() if isinstance(node, Node))
    waits = [node.wait for node in rt.published.nodes.values() if isinstance(node, Node)]
    for id in {id for wait in waits if wait is not None for id in wait.others}:
        if rt.kinds.was_settled(id):
            fresh.settled(id)
    for name in ("live", "intents", "interrupted", "busy_roots", "blocked", "active"):
        assert getattr(index, name) == getattr(fresh, name), name
    parked = {
        node.id
        for node in rt.published.nodes.values()
        if isinstance(node, Node) and node.status is WAITING and not node.marked
    }
    assert {id: n for id, n in index.open_joins.items() if id in parked} == fresh.open_joins
    for names in index.waiters.values():
        for name in names:
            waiter = rt.published.task(name)
            assert waiter is not None
            assert waiter.status is WAITING
    waiters = {
        id: {each for each in names if each in parked} for id, names in index.waiters.items()
    }
    assert {id: names for id, names in waiters.items() if names} == {
        id: set(names) for id, names in fresh.waiters.items()
    }


def check_at_rest(rt: Runtime) -> None:
    """Nothing that could go on stands still: no queue is left, every live task has its reason."""
    index = rt.index
    assert not index.derived_work()
    assert not index.ready or rt.scheduler.free_total() <= 0
    assert not index.slotless
    assert not rt.staged.nodes
    now = rt.session.clock.now_us()
    timed = {id for _, id in index.timers}
    for node in rt.published.nodes.values():
        if isinstance(node, Scope) or not node.live:
            continue
        if node.blocked is not None:
            assert node.status is PENDING or node.blocked == "interrupted"
        elif node.status is COMPLETING:
            assert node.below > 0
        elif node.id in index.running:
            assert node.id in rt.invocations
        elif node.status is WAITING:
            assert node.wait is not None
            if node.marked:
                assert node.below > 0
            else:
                assert not rt.below_intent(node)
                assert index.due(node, now) is None or rt.halted(rt.published, node)
                assert node.wait.deadline_us is None or node.id in timed
        elif node.marked:
            assert node.below > 0 or (node.ready_us > now and node.id in timed)
        elif not rt.halted(rt.published, node):
            queued = node.id in index.ready.ids() or node.id in rt.scheduler.suspects.waiting()
            assert queued or (node.ready_us > now and node.id in timed), node.id
        if not node.marked:
            assert not rt.below_intent(node)
