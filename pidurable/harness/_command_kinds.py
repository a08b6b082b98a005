"""What a process that does not hold a session may ask its holder for: one line a kind.

A kind says which fields its content has and what is done with them in the commit that also stores
the answer. The fields are checked here only as far as the call behind them does not check them
itself: whoever may write into the folder of commands is the user who owns the store, so this keeps
mistakes apart and is no wall.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import attrs

from pidurable.agent._compaction_room import begin_compaction, check_instructions
from pidurable.agent._decisions import decode_decision
from pidurable.agent._grants import revoke_grant
from pidurable.agent._inbox import decode_blocks, submit, withdraw, write
from pidurable.agent._permissions import encode_request
from pidurable.errors import InvalidArgumentError, NotFoundError, UnknownTaskError, show
from pidurable.records import _codec
from pidurable.records._checks import check_name, check_reason, is_id
from pidurable.records._tasks import Status
from pidurable.tasks._gc_report import GcReport
from pidurable.tasks._transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.harness._open import Harness

ROOT_KEY = "root"
"""The key under which the root conversation is made."""


@attrs.frozen(kw_only=True)
class CommandKind:
    """One thing that can be asked for."""

    fields: Mapping[str, Any]
    """Name and default of each field of the content; `REQUIRED` where it must be given."""
    apply: Callable[..., Any] | None = None
    """Stages it: `apply(harness, tx, **fields)`; what it returns is the answer, as JSON."""
    work: Callable[..., Awaitable[Any]] | None = None
    """For what takes many commits, `work(harness, **fields)`: the answer is stored at its end. It
    is begun again where the process dies before, so that must do no harm."""
    starts: bool = False
    """It is new work: the harness starts, as by a call of the host."""
    reads: bool = False
    """Its commit reads documents in a thread, so it is one of its own."""


REQUIRED = object()
_OLDEST_US = 10**17
"""About 3,000 years."""


def checked_content(kind: CommandKind, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a content, with defaults.

    Raises:
        InvalidArgumentError: One is missing, or not known here: it might change what is meant.
    """
    for name in content:
        if name not in kind.fields:
            known = ", ".join(kind.fields)
            raise InvalidArgumentError(name, f"the holder knows only {known}", show(content[name]))
    fields = {**kind.fields, **content}
    for name, value in fields.items():
        if value is REQUIRED:
            raise InvalidArgumentError(name, "it is missing from the command")
    return fields


def _submit(
    harness: Harness,
    tx: TreeTransaction,
    *,
    conversation: Any,
    blocks: Any,
    when_busy: Any,
    request_id: Any,
) -> int:
    """Hand in to a conversation, or to the root, made at first use; the answer is its id."""
    return submit(
        harness.session,
        tx,
        _or_root(tx, conversation),
        decode_blocks(blocks),
        when_busy=when_busy,
        request_id=request_id,
    )


def _write(
    harness: Harness,
    tx: TreeTransaction,
    *,
    conversation: Any,
    value: Any,
    kind: Any,
    messages: Any,
    head: Any,
    edits: Any,
    request_id: Any,
) -> int:
    """The answer is the submission of the write."""
    return write(
        harness.session,
        tx,
        _or_root(tx, conversation),
        value,
        kind=kind,
        messages=_codec.decode_messages(messages, path="$.messages"),
        head=head,
        edits=_codec.decode_edits(edits, path="$.edits"),
        request_id=request_id,
    )


def _withdraw(harness: Harness, tx: TreeTransaction, *, submission: Any) -> dict[str, Any] | None:
    """The answer is the record of what was taken back, or None where it was too late."""
    if not is_id(submission):
        raise NotFoundError("submission", show(submission))
    record = withdraw(tx, submission)
    return attrs.asdict(record, recurse=False) if record.reason == "withdrawn" else None


async def _continue(harness: Harness, *, conversation: Any, request_id: Any) -> int:
    """The answer is the submission of the continuation; its request id makes it one."""
    request_id = check_name(request_id, "request_id")
    return await harness.conversation(conversation)._continue(
        request_id, starts=harness._commands.starts
    )


def _compact(harness: Harness, tx: TreeTransaction, *, conversation: Any, instructions: Any) -> int:
    """The answer is the task of the compaction."""
    return int(
        begin_compaction(tx, _or_root(tx, conversation), "manual", check_instructions(instructions))
    )


def _abort_conversation(
    harness: Harness, tx: TreeTransaction, *, conversation: Any, reason: Any
) -> list[dict[str, Any]]:
    """The answer is what was queued and taken back, with its content."""
    taken = harness.conversation(conversation)._abort_in(tx, check_reason(reason))
    return [attrs.asdict(record, recurse=False) for record in taken]


def _or_root(tx: TreeTransaction, conversation: Any) -> Any:
    return tx.create_conversation(key=ROOT_KEY) if conversation is None else conversation


def _signal(
    harness: Harness, tx: TreeTransaction, *, tasks: Any, name: Any, payload: Any, signal_key: Any
) -> None:
    for task in _ids(tasks):
        tx.signal(task, name, payload, key=signal_key)


def _abort(harness: Harness, tx: TreeTransaction, *, tasks: Any, reason: Any) -> list[str | None]:
    """The answer says of each how it had ended already, or None where it was live."""
    found: list[str | None] = []
    for task in _ids(tasks):
        tx.abort_task(task, reason)
        node = tx.view.task(task)
        row = None if node is not None and node.live else tx.stored_task(task)
        ended = row is not None and row.status == Status.TERMINAL
        found.append(row.outcome_status if row is not None and ended else None)
    return found


def _retry(harness: Harness, tx: TreeTransaction, *, tasks: Any) -> list[bool]:
    return [lifted(tx, task, tx.retry_task) for task in _ids(tasks)]


def _resume(harness: Harness, tx: TreeTransaction, *, tasks: Any) -> list[bool]:
    return [lifted(tx, task, tx.resume_task) for task in _ids(tasks)]


def _fork(
    harness: Harness, tx: TreeTransaction, *, conversation: Any, at: Any, fork_key: Any
) -> int:
    return tx.fork(conversation, at, key=fork_key)


def _decide(
    harness: Harness,
    tx: TreeTransaction,
    *,
    permission: Any,
    decision: Any,
    by: Any,
    principal: Any,
) -> dict[str, Any]:
    """The answer is the request as it is decided."""
    decided = harness._services.permissions.decide(
        tx, permission, decode_decision(decision), by=by, principal=principal
    )
    return encode_request(decided)


def _revoke(harness: Harness, tx: TreeTransaction, *, grant: Any) -> dict[str, Any]:
    return attrs.asdict(revoke_grant(tx, harness.session.storage, grant))


async def _gc(harness: Harness, *, older_than_us: Any, keep_outcomes: Any, dry_run: Any) -> Any:
    if type(older_than_us) is not int or not 0 <= older_than_us <= _OLDEST_US:
        problem = f"expected microseconds, 0 to {_OLDEST_US}"
        raise InvalidArgumentError("older_than_us", problem, show(older_than_us))
    report = await harness.gc(
        older_than=timedelta(microseconds=older_than_us),
        keep_outcomes=keep_outcomes is True,
        dry_run=dry_run is True,
    )
    return {
        **attrs.asdict(report, recurse=False),
        "before": report.before.isoformat(),
        "kept": dict(report.kept),
    }


def read_report(answer: Mapping[str, Any]) -> GcReport:
    """The report of a collection, from the answer to its command."""
    return GcReport(**{**answer, "before": datetime.fromisoformat(answer["before"])})


def lifted(tx: TreeTransaction, task_id: int, lift: Callable[[int], None]) -> bool:
    """Lift what blocks a task, and tell whether that was done."""
    if not is_id(task_id):
        raise UnknownTaskError(show(task_id))
    before = tx.view.task(task_id)
    blocked = before is not None and before.live and before.blocked is not None
    lift(task_id)
    after = tx.view.task(task_id)
    return blocked and after is not None and after.blocked is None


def _ids(tasks: Any) -> list[Any]:
    if not isinstance(tasks, list) or not tasks:
        raise InvalidArgumentError("tasks", "expected a list of ids", show(tasks))
    return tasks


KINDS: dict[str, CommandKind] = {
    "submit": CommandKind(
        fields={
            "conversation": None,
            "blocks": REQUIRED,
            "when_busy": "follow_up",
            "request_id": None,
        },
        apply=_submit,
        starts=True,
    ),
    "write": CommandKind(
        fields={
            "conversation": None,
            "value": None,
            "kind": None,
            "messages": [],
            "head": None,
            "edits": [],
            "request_id": None,
        },
        apply=_write,
    ),
    "withdraw": CommandKind(fields={"submission": REQUIRED}, apply=_withdraw),
    "continue": CommandKind(
        fields={"conversation": REQUIRED, "request_id": REQUIRED}, work=_continue, starts=True
    ),
    "compact": CommandKind(
        fields={"conversation": REQUIRED, "instructions": None}, apply=_compact, starts=True
    ),
    "abort_conversation": CommandKind(
        fields={"conversation": REQUIRED, "reason": "user"}, apply=_abort_conversation
    ),
    "signal": CommandKind(
        fields={"tasks": REQUIRED, "name": REQUIRED, "payload": None, "signal_key": None},
        apply=_signal,
    ),
    "abort": CommandKind(fields={"tasks": REQUIRED, "reason": "user"}, apply=_abort),
    "retry": CommandKind(fields={"tasks": REQUIRED}, apply=_retry),
    "resume": CommandKind(fields={"tasks": REQUIRED}, apply=_resume),
    "fork": CommandKind(
        fields={"conversation": REQUIRED, "at": None, "fork_key": None}, apply=_fork, reads=True
    ),
    "decide": CommandKind(
        fields={"permission": REQUIRED, "decision": REQUIRED, "by": None, "principal": None},
        apply=_decide,
    ),
    "revoke": CommandKind(fields={"grant": REQUIRED}, apply=_revoke),
    "gc": CommandKind(
        fields={"older_than_us": REQUIRED, "keep_outcomes": False, "dry_run": False}, work=_gc
    ),
}
