"""Live work as it would be found by the registry of now, without running any code.

`inspect` answers before a harness is started what starting it would do: which tasks would be
blocked and why, which would be migrated, which are suspected of killing the process, which wait for
somebody. Definitions are asked for their version and their phases, and never called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

import attrs

from pidurable.errors import InvalidArgumentError, show
from pidurable.records._tasks import Status, Wait
from pidurable.storage import TaskRow
from pidurable.tasks._definition import definition_info
from pidurable.tasks._explain import wait_of
from pidurable.tasks._suspects import suspect_from

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime

__all__ = ["InspectedTask", "inspect_page"]

LIMIT_MAX = 10_000

Fate = Literal["runs", "migrates", "waits", "completing", "aborting", "blocked"]


@final
@attrs.frozen(kw_only=True)
class InspectedTask:
    """One live task under the registry of now."""

    id: int
    conversation_id: int
    owner: int | None
    kind: str
    version: int
    """The version of the definition that stored it."""
    installed_version: int | None
    """The version that is installed; None where no extension defines the kind."""
    status: Status
    phase: str | None
    fate: Fate
    """What becomes of it: `runs` (now, or in its turn), `migrates` and then runs, `waits`,
    `completing` (its outcome waits for the work below), `aborting`, `blocked`."""
    blocked: str | None
    """Why it is blocked, or would be when its turn comes: one of the reason codes."""
    suspect: bool
    """Whether the process died so often while it ran that it starts alone."""
    interrupted: bool
    """Whether a restart blocked it until `resume_task`."""
    abort_reason: str | None
    """Why it is to be aborted; None if it is not."""
    wait: Wait | None
    wake_us: int | None
    """When the clock moves it: a wait's end, a retry, its deadline."""
    recoveries: int
    tries: int


def inspect_page(
    runtime: Runtime, *, after: int = 0, limit: int = 1_000
) -> tuple[InspectedTask, ...]:
    """The live tasks behind an id, in the order of ids.

    Raises:
        InvalidArgumentError: `limit` is below 1 or above 10,000, or `after` is no id.
    """
    if type(limit) is not int or not 0 < limit <= LIMIT_MAX:
        raise InvalidArgumentError("limit", f"expected 1 to {LIMIT_MAX:,}", show(limit))
    if type(after) is not int or not 0 <= after < 2**63:
        raise InvalidArgumentError("after", "expected an id, or 0", show(after))
    rows = runtime.session.storage.live_tasks(after=after, limit=limit)
    return tuple(_inspect(runtime, row) for row in rows)


def _inspect(runtime: Runtime, row: TaskRow) -> InspectedTask:
    storage = runtime.session.storage
    status = Status(row.status)
    checkpoint = storage.checkpoint_at(row.id)
    phase = None if checkpoint is None else checkpoint[0]
    wait = wait_of(storage, row.id) if status is Status.WAITING else None
    definition = runtime.snapshot().definition(row.kind)
    installed = None if definition is None else definition_info(definition).version
    blocked = row.blocked or _refused(runtime, row, phase)
    moments = [
        None if wait is None else wait.deadline_us,
        row.ready_us if row.tries else None,
        None if row.abort_us is not None else row.deadline_us,
    ]
    return InspectedTask(
        id=row.id,
        conversation_id=row.conversation,
        owner=row.owner,
        kind=row.kind,
        version=row.version,
        installed_version=installed,
        status=status,
        phase=phase,
        fate=_fate(row, blocked, installed),
        blocked=blocked,
        suspect=row.recoveries >= suspect_from(runtime.session.settings.recoveries_max),
        interrupted=row.blocked == "interrupted",
        abort_reason=None if row.abort_us is None else row.abort_reason or "user",
        wait=wait,
        wake_us=min((at for at in moments if at is not None), default=None),
        recoveries=row.recoveries,
        tries=row.tries,
    )


def _refused(runtime: Runtime, row: TaskRow, phase: str | None) -> str | None:
    """The reason for which the registry of now could not run a task, as far as can be told."""
    if row.status == Status.COMPLETING:
        return None
    node = runtime.published.task(row.id)
    if node is None:
        return None
    definition = runtime.snapshot().definition(row.kind)
    refused = runtime.refuses(definition, node)
    if refused is None and definition is not None:
        info = definition_info(definition)
        if info.version == row.version and phase is not None and phase not in info.by_tag:
            return "checkpoint_unreadable"
    return refused


def _fate(row: TaskRow, blocked: str | None, installed: int | None) -> Fate:
    if row.status == Status.COMPLETING:
        return "completing"
    if row.abort_us is not None:
        return "blocked" if row.blocked else "aborting"
    if blocked is not None:
        return "blocked"
    if row.status == Status.WAITING:
        return "waits"
    return "runs" if installed == row.version else "migrates"
