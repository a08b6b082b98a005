"""The task graph as a value: what is live, above what, and what it waits for.

A graph never changes. One that a commit made shares with the one before it every task that the
commit left alone, so a commit pays for what it changed, and the difference of two of them is found
by what they do not share. Its JSON, for clients elsewhere::

    {
      "root": null,
      "tasks": {
        "12": {
          "id": 12, "conversation_id": 1, "kind": "shop.order", "owner": null,
          "background": false, "status": "waiting", "phase": "packed",
          "waits_on": [15, 16], "waits_on_count": 2, "waits_for_signals": false,
          "wait_until_us": 1700000000000000, "outcome": null, "abort_reason": null,
          "blocked": null
        }
      },
      "conversations": {
        "1": {"id": 1, "owner": null, "owner_conversation_id": null, "key": "root"},
        "13": {"id": 13, "owner": 12, "owner_conversation_id": 1, "key": null}
      },
      "left_out": 0
    }

Keys are ids as strings, every field is always there, and the fields are those of the classes below.
A patch adds and removes whole tasks (`/tasks/15`) and conversations (`/conversations/13`), and
replaces single fields of a task (`/tasks/12/status`), and `/left_out`; it has nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast, final

import attrs

from pidurable.records._messages import JsonValue
from pidurable.records._patch import PatchOp
from pidurable.records._tasks import OutcomeStatus, Status
from pidurable.session._radix import RadixMap
from pidurable.tasks._node import COMPLETING, PENDING, Node

__all__ = ["GraphConversation", "GraphTask", "TaskGraph", "graph_json", "graph_patch", "graph_task"]

WAITS_SHOWN_MAX = 100
"""Ids of one wait that a graph names; a fan-out of 100,000 would be a patch of 700 KB."""


@final
@attrs.frozen(kw_only=True)
class GraphTask:
    """One live task of a task graph, as committed."""

    id: int
    conversation_id: int
    """The conversation that it lives in: its own, not one that it owns."""
    kind: str
    owner: int | None
    """The task that owns it; None where its conversation does. It may have ended, and then be no
    part of the graph: what is below it belongs to the conversation."""
    background: bool
    status: Status
    phase: str | None
    """The phase of its checkpoint: what it runs, or will run next."""
    waits_on: tuple[int, ...] = ()
    """Tasks, conversations and submissions that it waits for, ended ones too; of more than 100 the
    first 100."""
    waits_on_count: int = 0
    """How many it waits for in all."""
    waits_for_signals: bool = False
    """Whether a signal wakes it."""
    wait_until_us: int | None = None
    """When its wait ends at the latest, or when it is to be retried; in UTC microseconds."""
    outcome: OutcomeStatus | None = None
    """Of a completing task: how it will end once the work below it has ended."""
    abort_reason: str | None = None
    """Why it is to be aborted; None while it is not."""
    blocked: str | None = None
    """Why it cannot run until somebody, or new code, lifts it: one of the reason codes."""


@final
@attrs.frozen(kw_only=True)
class GraphConversation:
    """A conversation of a task graph: a shown task lives there or below, or owns it."""

    id: int
    owner: int | None
    """The task that owns it; None for an ownerless one. It may have ended."""
    owner_conversation_id: int | None
    """The conversation that its owner lives in, so that the way up is known where it has ended."""
    key: str | None
    """What it was created under."""


_NO_TASKS: RadixMap[GraphTask] = RadixMap()
_NO_CONVERSATIONS: RadixMap[GraphConversation] = RadixMap()


@final
@attrs.frozen(kw_only=True)
class TaskGraph:
    """Live tasks and the conversations around them, after one commit. Never changes.

    The tasks are those with the lowest ids: as many as the limit of the watch allows. Conversations
    are those that they live in, with the ones above up to the root, and of those that they own at
    least the first 100 of each, idle ones too.
    """

    root: int | None
    """The task or conversation that everything is below of, and which is in it; None for all."""
    tasks: Mapping[int, GraphTask] = _NO_TASKS
    """By id, in the order of ids: owners come before what they own."""
    conversations: Mapping[int, GraphConversation] = _NO_CONVERSATIONS
    """By id, in the order of ids."""
    left_out: int = 0
    """Live tasks beyond the limit. Their places are filled as others end."""

    def json(self) -> JsonValue:
        """Return the graph as plain JSON, a copy of your own. Costs its size."""
        return graph_json(self)


_FIELDS: tuple[tuple[str, Callable[[GraphTask], Any]], ...] = (
    ("id", lambda task: task.id),
    ("conversation_id", lambda task: task.conversation_id),
    ("kind", lambda task: task.kind),
    ("owner", lambda task: task.owner),
    ("background", lambda task: task.background),
    ("status", lambda task: task.status.word),
    ("phase", lambda task: task.phase),
    ("waits_on", lambda task: list(task.waits_on)),
    ("waits_on_count", lambda task: task.waits_on_count),
    ("waits_for_signals", lambda task: task.waits_for_signals),
    ("wait_until_us", lambda task: task.wait_until_us),
    ("outcome", lambda task: task.outcome),
    ("abort_reason", lambda task: task.abort_reason),
    ("blocked", lambda task: task.blocked),
)


def graph_task(node: Node, phase: str | None) -> GraphTask:
    """What a graph shows of a live task.

    Args:
        node: As published; it is read and not kept.
        phase: The tag of its checkpoint, which is not in memory.
    """
    rare, wait = node.rare, node.wait
    until = node.waits_until_us
    if until is None and node.status is PENDING:
        until = node.not_before_us or None
    on = () if wait is None or wait.on is None else wait.on
    return GraphTask(
        id=node.id,
        conversation_id=node.conversation,
        kind=node.kind,
        owner=node.owner,
        background=rare.background,
        status=node.status,
        phase=phase,
        waits_on=on if len(on) <= WAITS_SHOWN_MAX else on[:WAITS_SHOWN_MAX],
        waits_on_count=len(on),
        waits_for_signals=wait is not None and wait.signals,
        wait_until_us=until,
        outcome=cast("OutcomeStatus | None", rare.outcome_status)
        if node.status is COMPLETING
        else None,
        abort_reason=None if rare.abort_us is None else rare.abort_reason or "user",
        blocked=rare.blocked,
    )


def graph_json(graph: TaskGraph) -> JsonValue:
    """The JSON of a graph, a copy of your own. Costs its size."""
    return {
        "root": graph.root,
        "tasks": {str(id): _task_json(task) for id, task in graph.tasks.items()},
        "conversations": {
            str(id): attrs.asdict(conversation) for id, conversation in graph.conversations.items()
        },
        "left_out": graph.left_out,
    }


def _task_json(task: GraphTask) -> dict[str, Any]:
    return {name: get(task) for name, get in _FIELDS}


def graph_patch(before: TaskGraph, after: TaskGraph) -> list[PatchOp]:
    """The operations that lead from the JSON of one graph to that of another of the same root."""
    ops: list[PatchOp] = []
    for id, old, new in _maps(before.tasks, after.tasks):
        path = f"/tasks/{id}"
        if new is None:
            ops.append({"op": "remove", "path": path})
        elif old is None:
            ops.append({"op": "add", "path": path, "value": _task_json(new)})
        else:
            for name, get in _FIELDS:
                value = get(new)
                if value != get(old):
                    ops.append({"op": "replace", "path": f"{path}/{name}", "value": value})
    for id, was, now in _maps(before.conversations, after.conversations):
        path = f"/conversations/{id}"
        if now is None:
            ops.append({"op": "remove", "path": path})
        else:
            ops.append({"op": "add", "path": path, "value": attrs.asdict(now)})
        # Nothing of a conversation ever changes.
        assert was is None or now is None
    if before.left_out != after.left_out:
        ops.append({"op": "replace", "path": "/left_out", "value": after.left_out})
    return ops


def _maps(before: Mapping[int, Any], after: Mapping[int, Any]) -> list[tuple[int, Any, Any]]:
    assert isinstance(before, RadixMap)
    assert isinstance(after, RadixMap)
    return after.diff(before)
