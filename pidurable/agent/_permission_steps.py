"""The steps of a permission request in a commit: opened, settled, superseded; and what it holds up.

The calls above an open request are shown as held by the oldest one below them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from pidurable.agent._documents import LiveDocument, find_call, patch_live, read_doc
from pidurable.agent._permission_records import (
    PERMISSION,
    Asked,
    ClosedReason,
    PermissionDocument,
    PermissionRequest,
    RequestState,
    address_of_request,
)
from pidurable.records import _json
from pidurable.session._documents import Address, definition_of
from pidurable.tasks._tree_transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.session._transaction import Transaction


def open_request(tx: TreeTransaction, *, task: int, conversation: int, asked: Asked) -> int:
    """Stage an open request of a call and return its id; the caller waits for it."""
    id = _put_request(tx, task=task, conversation=conversation, asked=asked)
    # Ids only grow, so whoever is held already is held by an older request.
    for home, call in _held_by_request(tx, tx.doc_value(address_of_request(conversation, id))):
        _hold_slot(tx, home, call, before=None, after=id)
    return id


def note_use(tx: TreeTransaction, *, task: int, conversation: int, asked: Asked, grant: int) -> int:
    """Stage the record of a call that a grant lets through: granted at once, nobody was asked."""
    return _put_request(
        tx,
        task=task,
        conversation=conversation,
        asked=asked,
        state="granted",
        decided_us=tx.now_us(),
        decided_by=f"grant {grant}",
        grant=grant,
    )


def _put_request(
    tx: TreeTransaction, *, task: int, conversation: int, asked: Asked, **fields: Any
) -> int:
    id = tx.draw_id()
    value = {
        "id": id,
        "task": task,
        "conversation": conversation,
        **attrs.asdict(asked, recurse=False),
        "path": _path(tx, task, conversation),
        "created_us": tx.now_us(),
        "state": "open",
        "closed_reason": None,
        "decision": None,
        "decided_us": None,
        "decided_by": None,
        "grant": None,
        **fields,
    }
    # Copied: the document keeps what it is given.
    whole = _json.check_json(value, f"$<{PERMISSION}>")
    address = address_of_request(conversation, id)
    tx.put_doc(definition_of(PermissionDocument), address, whole, id=id)
    tx.unique["permission", id] = conversation
    if value["state"] == "open":
        tx.unique["permission of", task] = id
    return id


def _path(tx: TreeTransaction, task: int, conversation: int) -> list[list[Any]]:
    """Kind and id of what is above a task, ended tasks too, from the root down."""
    path: list[list[Any]] = []
    at: int | None = task
    while at is not None:
        node = tx.view.task(at)
        found = tx.stored_task(at) if node is None else node
        if found is None:
            break
        if at != task:
            path.append([found.kind, int(at)])
        if found.owner is not None:
            at = found.owner
            continue
        path.append(["conversation", int(found.conversation)])
        at = tx.conversation(found.conversation).owner
    return path[::-1]


def leave_open(
    tx: TreeTransaction,
    address: Address,
    state: RequestState,
    *,
    others: Collection[Address],
    closed_reason: ClosedReason | None = None,
    decision: Any = None,
    by: str | None = None,
) -> None:
    """Stage the one step of a request out of `open`. The caller has looked that it is.

    The calls above it that are held by it are held by the next one below them, if there is one.

    Args:
        tx: The commit.
        address: Where the request is.
        state: What it becomes.
        others: Where requests are that may be open too.
        closed_reason: Why it is closed, if it is.
        decision: What was decided, as JSON.
        by: Who has decided.
    """
    fields = {
        "state": state,
        "closed_reason": closed_reason,
        "decision": decision,
        "decided_us": tx.now_us(),
        "decided_by": by,
    }
    ops = [{"op": "replace", "path": f"/{name}", "value": new} for name, new in fields.items()]
    value = tx.doc_value(address)
    tx.patch_doc(definition_of(PermissionDocument), address, ops)
    for home, call in _held_by_request(tx, value):
        live = read_doc(tx, LiveDocument, home)
        place = find_call(live, call)
        if place is not None and live["calls"][place]["held_by"] == f"permission {value['id']}":
            after = _oldest_open(tx, others, call)
            _hold_slot(tx, home, call, before=value["id"], after=after)


def supersede(tx: TreeTransaction, request: PermissionRequest) -> None:
    """Stage that a yes does not count: what would run now is not what was granted."""
    ops = [
        {"op": "replace", "path": "/state", "value": "closed"},
        {"op": "replace", "path": "/closed_reason", "value": "superseded"},
    ]
    address = address_of_request(request.conversation, request.id)
    tx.patch_doc(definition_of(PermissionDocument), address, ops)


def is_open(tx: Transaction, address: Address) -> bool:
    """Whether a request is open, as staged so far."""
    value = tx.doc_value(address)
    return value is not None and value["state"] == "open"


def _held_by_request(tx: TreeTransaction, value: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Conversation and task of each call that a request holds up: its own, and those above."""
    yield value["conversation"], value["task"]
    for kind, id in reversed(value["path"]):
        node = tx.view.task(id) if kind == "pi.tool" else None
        if node is not None:
            yield int(node.conversation), id


def _oldest_open(tx: TreeTransaction, others: Collection[Address], call: int) -> int | None:
    """The oldest open request of a call or of what is below it."""
    for address in sorted(others, key=lambda each: int(each.key)):
        value = tx.doc_value(address)
        if value is None or value["state"] != "open":
            continue
        if call == value["task"] or ["pi.tool", call] in value["path"]:
            return int(value["id"])
    return None


def _hold_slot(
    tx: Transaction, conversation: int, task: int, *, before: int | None, after: int | None
) -> None:
    """Show in `pi.live` what a call waits for; nested calls and closed rounds have no slot.

    One that is held by another request, or that has ended, stays as it is.
    """
    live = read_doc(tx, LiveDocument, conversation)
    place = find_call(live, task)
    if place is None or live["calls"][place]["held_by"] != _holder(before):
        return
    status = "running" if after is None else "waiting"
    ops = [{"op": "replace", "path": f"/calls/{place}/held_by", "value": _holder(after)}]
    if live["calls"][place]["status"] in ("running", "waiting"):
        ops.append({"op": "replace", "path": f"/calls/{place}/status", "value": status})
    patch_live(tx, conversation, ops)


def _holder(request: int | None) -> str | None:
    return None if request is None else f"permission {request}"
