"""Bringing a stored task to the version of the definition that is about to run it.

It happens at reservation, in the reserving commit: either the task is stored at the new version and
reserved, or nothing of the migration is. Outcomes are never migrated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pidurable.errors import InvalidArgumentError, MigrationError, PidurableError, show
from pidurable.records import _json
from pidurable.storage import Op
from pidurable.tasks._definition import Task, definition_info
from pidurable.tasks._transaction import TreeTransaction
from pidurable.tasks._tree import Node

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime


def migrate(
    runtime: Runtime, tx: TreeTransaction, node: Node, definition: Task[Any, Any, Any]
) -> str | None:
    """Migrate a task if it is of an older version. Returns the reason that blocks it, or None.

    The definition's `migrate(input, checkpoint, from_version)` gets and returns stored JSON; a
    checkpoint is `{"phase": tag, "value": json}`.
    """
    info = definition_info(definition)
    if info.version == node.version:
        return None
    storage = runtime.session.storage
    stored = storage.task_checkpoint(node.id)
    input_text = storage.task_input(node.id)
    if stored is None or input_text is None:
        return "checkpoint_unreadable"
    tag, text = stored
    code: Any = definition
    limit = runtime.session.settings.value_bytes_max
    try:
        input, checkpoint = _checked_pair(
            code.migrate(
                _json.loads_stored(input_text),
                {"phase": tag, "value": _json.loads_stored(text)},
                node.version,
            )
        )
        new_input = _json.dumps(
            input, path="$<migrated input>", bytes_max=limit, setting="value_bytes_max"
        )
        new_tag = checkpoint["phase"]
        new_text = _json.dumps(
            checkpoint["value"],
            path="$<migrated checkpoint>",
            bytes_max=limit,
            setting="value_bytes_max",
        )
        if new_tag not in info.by_tag:
            known = ", ".join(info.by_tag)
            raise InvalidArgumentError(
                "the phase that it returned", f"expected one of {known}", show(new_tag)
            )
    except Exception as error:  # the code of a definition may raise anything
        ours = isinstance(error, PidurableError)
        detail = str(error) if ours else f"it raised {show(error)}"
        place = f"`migrate` of {type(definition).__name__}, from version {node.version}"
        problem = MigrationError(f"task {node.id} ({node.kind})", f"{place}: {detail}")
        runtime.report(node.id, problem, kind=node.kind)
        return "migration_failed"
    node.version = info.version
    # What this process remembers of the task is of the old version.
    runtime.fresh.pop(node.id, None)
    runtime.at_hand.migrated(node.id)
    if new_input != input_text:
        tx.writes.append((Op.TASK_INPUT, (node.id, new_input)))
    tx.writes.append((Op.CHECKPOINT, (node.id, new_tag, new_text, tx.now_us())))
    return None


def _checked_pair(returned: Any) -> tuple[Any, Any]:
    """What `migrate` has to return, refused with what it did return."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        input, checkpoint = returned
        if isinstance(checkpoint, dict) and checkpoint.keys() == {"phase", "value"}:
            return input, checkpoint
    raise InvalidArgumentError(
        "what it returned",
        'expected the pair (input, checkpoint), the checkpoint as {"phase": ..., "value": ...}',
        show(returned),
    )
