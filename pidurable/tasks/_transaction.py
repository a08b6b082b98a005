"""Transactions that also change tasks: creating, marking, and a task's own transitions.

A transaction edits an overlay of the tree, so that everything it decides stands on what the bodies
before it staged, and nothing remains of it when it is refused. Two rules decide where an outcome
leads: creations of a commit count before its ends, and a task whose ordinary owned work is live is
stored as completing, else as terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar

from pidurable.errors import (
    AbortRequestedError,
    InternalError,
    InvalidArgumentError,
    InvocationEndedError,
    MemoTooLargeError,
    OwnerEndedError,
    SignalRefusedError,
    TaskEndedError,
    TooManyMemosError,
    UnknownDefinitionError,
    UnknownTaskError,
    show,
)
from pidurable.records import _codec, _json
from pidurable.records._ids import TaskId
from pidurable.records._limits import (
    MEMO_BYTES_MAX,
    MEMOS_MAX,
    SIGNAL_BYTES_MAX,
    SIGNALS_UNREAD_MAX,
)
from pidurable.records._tasks import (
    ErrorInfo,
    JoinPolicy,
    OutcomeRecord,
    OutcomeStatus,
    Wait,
)
from pidurable.session._transaction import Transaction
from pidurable.storage import Op, SignalRow, TaskRow
from pidurable.tasks._definition import Task, definition_info
from pidurable.tasks._errors import error_info
from pidurable.tasks._tree import (
    COMPLETING,
    PENDING,
    RUNNING,
    WAITING,
    Node,
    View,
)

if TYPE_CHECKING:
    from pidurable.tasks._run import Phase
    from pidurable.tasks._runtime import Runtime

InputT = TypeVar("InputT", default=Any)
CheckpointT = TypeVar("CheckpointT", default=Any)
ResultT = TypeVar("ResultT", default=Any)
ChildInputT = TypeVar("ChildInputT")
ChildResultT = TypeVar("ChildResultT")

_TASK_SCOPE = 2


def to_us(moment: datetime, argument: str) -> int:
    """An aware datetime as UTC microseconds."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise InvalidArgumentError(
            argument, "expected an aware datetime, as from datetime.now(UTC)", show(moment)
        )
    return int(moment.timestamp() * 1_000_000)


class TreeTransaction(Transaction):
    """A commit of a host, or of the scheduler."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        by_task: int | None = None,
        flush: bool = True,
    ) -> None:
        super().__init__(runtime.session, by_task=by_task, flush=flush)
        self._runtime = runtime
        self.view = View(runtime.staged, runtime.load)
        self.phase: Phase | None = None
        self.memos_made: list[tuple[str, str]] = []
        self.fresh: dict[int, tuple[str, str, str]] = {}
        """Of tasks created here: input, phase and checkpoint as text, for the first invocation."""
        self.signalled: dict[int, int] = {}
        self.next_checkpoint: tuple[str, str] | None = None
        self._created: list[Node] = []
        self._owned: list[int] = []
        self._keys: dict[tuple[Any, ...], int] = {}

    # --- creating ------------------------------------------------------------------------

    def create_task(
        self,
        definition: type[Task[ChildInputT, Any, ChildResultT]],
        input: ChildInputT,
        *,
        conversation: int,
        key: str | None = None,
        background: bool = False,
        deadline: datetime | None = None,
    ) -> TaskId[ChildResultT]:
        """Create a task owned by a conversation.

        Args:
            definition: The class of an installed definition.
            input: Its input; stored with the task, and kept.
            conversation: The conversation it belongs to.
            key: Create it once: a second call with the same key gives the first task's id.
            background: Its conversation's abort and idle waits do not reach it.
            deadline: Passing it aborts the task, with the reason `deadline`.

        Raises:
            UnknownDefinitionError: The definition is not installed.
            NotJsonError: The input does not fit its type or cannot be stored.
            NotFoundError: No such conversation.
        """
        return self._create(
            definition,
            input,
            owner=None,
            conversation=conversation,
            key=key,
            background=background,
            deadline=deadline,
        )

    def _create(
        self,
        definition: type[Task[Any, Any, ChildResultT]],
        input: Any,
        *,
        owner: int | None,
        conversation: int,
        key: str | None,
        background: bool,
        deadline: datetime | None,
    ) -> TaskId[ChildResultT]:
        self._check_open()
        self.conversation(conversation)
        info = definition_info(definition)
        snapshot = self._runtime.snapshot()
        installed = snapshot.definition(info.name)
        if installed is None:
            raise UnknownDefinitionError(info.name, snapshot.nearest_kind(info.name))
        if key is not None:
            existing = self._keyed(owner, conversation, key)
            if existing is not None:
                return TaskId(existing)
        info = definition_info(installed)
        codec = snapshot.codec
        limit = self._session.settings.value_bytes_max
        path = f"$<{info.name} input>"
        input_text = codec.encode_text(input, info.input_type, path=path, bytes_max=limit)
        # The definition sees what a restarted process would see: the input as stored.
        stored_input = codec.decode(_json.loads_stored(input_text), info.input_type, path=path)
        tag, text = self._runtime.encode_checkpoint(installed, installed.initial(stored_input))
        now = self.now_us()
        deadline_us = None if deadline is None else to_us(deadline, "deadline")
        row = TaskRow(
            self._session.line.draw_id(),
            conversation,
            info.name,
            info.version,
            owner,
            key,
            int(background),
            None,
            deadline_us,
            now,
            int(PENDING),
            None,
            None,
            None,
            None,
            0,
            0,
            0,
            now,
            None,
            None,
            None,
        )
        node = Node(row)
        self.writes += (
            (Op.TASK, row),
            (Op.TASK_INPUT, (row.id, input_text)),
            (Op.CHECKPOINT, (row.id, tag, text, now)),
        )
        self.view.add(node)
        self._created.append(node)
        self.fresh[row.id] = (input_text, tag, text)
        if key is not None:
            self._keys[("task", owner, conversation if owner is None else 0, key)] = row.id
        return TaskId(row.id)

    def _keyed(self, owner: int | None, conversation: int, key: str) -> int | None:
        if not isinstance(key, str) or not 0 < len(key) <= 512:
            raise InvalidArgumentError("key", "expected 1 to 512 characters", show(key))
        name = ("task", owner, conversation if owner is None else 0, key)
        found = self._keys.get(name) or self.claimed(name)
        if found is not None:
            return found
        row = self._session.storage.task_by_key(owner, conversation, key)
        return None if row is None else row.id

    def create_conversation(self, *, key: str | None = None, principal: str = "") -> int:
        """Create an ownerless conversation and return its id."""
        return self._create_conversation(owner=None, key=key, principal=principal)

    def _create_conversation(self, *, owner: int | None, key: str | None, principal: str) -> int:
        self._check_open()
        if key is not None:
            name = ("conversation", owner, key)
            found: int | None = self.claimed(name)
            if found is not None:
                return found
            if owner is not None:
                row = self._session.storage.conversation_by_key(owner, key)
                if row is not None:
                    return row.id
        made = self.add_conversation(owner=owner, key=key, principal=principal)
        if owner is not None:
            self.view.add_scope(made)
            self._owned.append(owner)
        return made.id

    # --- marks and signals ---------------------------------------------------------------

    def abort_task(self, task_id: int, reason: str = "user") -> None:
        """Mark a task for abort; what is below it is marked from it. Ended tasks are left alone.

        Raises:
            UnknownTaskError: No such task.
        """
        self._check_open()
        node = self._live_or_ended(task_id)
        if node is not None:
            self.mark(node.id, reason)

    def _live_or_ended(self, task_id: int) -> Node | None:
        """A live task, or None for one that has ended."""
        if type(task_id) not in (int, TaskId) or not 0 < task_id < 2**63:
            raise UnknownTaskError(repr(task_id))
        node = self.view.task(task_id)
        if node is None:
            if self._session.storage.task(task_id) is None:
                raise UnknownTaskError(task_id)
            return None
        return node if node.live else None

    def mark(self, task_id: int, reason: str) -> bool:
        """Store the intent to abort on a live task; False if it is marked or has ended."""
        found = self.view.task(task_id)
        if found is None or not found.live or found.marked:
            return False
        node = self.view.edit_task(task_id)
        node.abort_us = self.now_us()
        node.abort_reason = reason
        self.writes.append((Op.TASK_STATE, node.state_row()))
        return True

    def signal(
        self, task_id: int, name: str, payload: Any = None, *, key: str | None = None
    ) -> None:
        """Store a signal for a live task. The same `key` twice stores it once.

        Raises:
            UnknownTaskError: No such task.
            TaskEndedError: It has ended.
            SignalRefusedError: Larger than 256 KiB, or 1,000 are unread.
            NotJsonError: The payload is not strict JSON.
        """
        self._check_open()
        node = self._live_or_ended(task_id)
        if node is None:
            row = self._session.storage.task(task_id)
            raise TaskEndedError(task_id, (row.outcome_status if row else None) or "ended")
        text = _json.dumps(payload, path=f"$<signal {name}>")
        if len(text.encode()) > SIGNAL_BYTES_MAX:
            raise SignalRefusedError(
                task_id, f"signal {name!r} is larger than {SIGNAL_BYTES_MAX} bytes"
            )
        if key is not None:
            claim = ("signal", task_id, key)
            if self.claimed(claim) or self._session.storage.signal_by_key(task_id, key):
                return
        unread = self._runtime.unread(task_id) + self.signalled.get(task_id, 0)
        if unread >= SIGNALS_UNREAD_MAX:
            raise SignalRefusedError(
                task_id, f"{SIGNALS_UNREAD_MAX} signals are unread, the most allowed"
            )
        number = self._session.line.draw_id()
        if key is not None:
            self.unique[("signal", task_id, key)] = number
        self.signalled[task_id] = self.signalled.get(task_id, 0) + 1
        self.writes.append((Op.SIGNAL, SignalRow(number, task_id, name, key, text, self.now_us())))

    # --- what the scheduler writes -------------------------------------------------------

    def put_state(self, node: Node) -> None:
        self.writes.append((Op.TASK_STATE, node.state_row()))

    def settle(self, node: Node, outcome: OutcomeRecord) -> None:
        """Decide the outcome of a task: terminal, or completing while work below is live."""
        node.outcome_status = outcome.status
        self.writes.append(
            (Op.OUTCOME, (node.id, _json.dumps(_codec.encode_outcome(outcome), path="$<outcome>")))
        )
        if node.status is WAITING:
            self.writes.append((Op.WAIT_DELETE, (node.id,)))
            node.wait = None
        node.blocked = None
        if node.below > 0:
            was, was_all = node.contributes(), node.contributes_all()
            node.status = COMPLETING
            self.view.spread(node, was=was, was_all=was_all)
            self.put_state(node)
        else:
            self.finish(node)

    def finish(self, node: Node) -> None:
        """Make a task terminal. Its input and outcome stay; everything else goes."""
        if node.outcome_status is None:
            raise InternalError(f"task {node.id} was to end without an outcome")
        self.view.end(node)
        node.ended_us = self.now_us()
        node.recoveries = 0
        node.blocked = None
        self.put_state(node)
        task = (node.id,)
        self.writes.append((Op.CHECKPOINT_DELETE, task))
        has = self._runtime.attachments.pop(node.id, None)
        if has is None or "memos" in has:
            self.writes.append((Op.MEMOS_DELETE, task))
        if has is None or "signals" in has:
            self.writes.append((Op.SIGNALS_DELETE, task))
        if has is None or "documents" in has:
            self.retire_scope(_TASK_SCOPE, node.id)

    def seal(self) -> None:
        # Owners are checked last: a commit that ends its task may not create work below it.
        for node in self._created:
            if node.owner is not None:
                self._check_owner(node.owner)
        for owner in self._owned:
            self._check_owner(owner)
        self.unique.update(self._keys)
        super().seal()

    def _check_owner(self, owner: int) -> None:
        found = self.view.task(owner)
        if found is None or not found.live:
            raise OwnerEndedError(owner, "terminal")
        if found.status is COMPLETING:
            raise OwnerEndedError(owner, "completing")
        if found.marked:
            raise OwnerEndedError(owner, "being aborted")


class TaskTransaction(TreeTransaction, Generic[CheckpointT, ResultT]):
    """A commit of a task: everything of `TreeTransaction`, and the task's own transitions."""

    def __init__(self, runtime: Runtime, phase: Phase) -> None:
        super().__init__(runtime, by_task=phase.task_id)
        self._phase = phase
        self.phase = phase
        self._decide: Callable[[], None] | None = None

    def check_phase(self) -> Node:
        """Refuse a commit that comes too late for its task. In line order, so it is exact."""
        self._check_open()
        phase = self._phase
        node = self.view.task(phase.task_id)
        if phase.sealed:
            raise InvocationEndedError(phase.task_id, "its phase had returned")
        if node is None or node.status is not RUNNING or phase.number != node.invocations:
            state = "terminal" if node is None else node.status.word
            raise InvocationEndedError(phase.task_id, f"the task is {state}")
        if node.marked and not phase.aborting:
            raise AbortRequestedError(phase.task_id, node.abort_reason or "user")
        return node

    # --- transitions ---------------------------------------------------------------------

    def goto(self, checkpoint: CheckpointT) -> None:
        """Continue at the phase of this checkpoint once the handler has returned."""
        self._transition_guard()
        tag, text = self._runtime.encode_checkpoint(self._phase.definition, checkpoint)
        self.next_checkpoint = (tag, text)
        node = self.view.task(self._phase.task_id)
        assert node is not None
        if node.recoveries or node.tries:
            # Progress forgives what a crash or a retry had charged.
            node = self.view.edit_task(node.id)
            node.recoveries = 0
            node.tries = 0
            self.put_state(node)
        self.writes.append((Op.CHECKPOINT, (self._phase.task_id, tag, text, self.now_us())))

    def _transition_guard(self) -> None:
        self.check_phase()
        if self._decide is not None:
            raise InvocationEndedError(self._phase.task_id, "its outcome or wait is decided")

    def wait(
        self,
        *,
        then: CheckpointT,
        on: Sequence[int] | None = None,
        policy: JoinPolicy = "all_settled",
        deadline: datetime | None = None,
        signals: bool = False,
    ) -> None:
        """Park the task until what it waits for is there; it wakes at `then`.

        Args:
            then: The checkpoint to wake at.
            on: Tasks to wait for; duplicates count once; an empty one wakes at the next pass.
            policy: `fail_fast` and `first_success` need ownership of all of `on`.
            deadline: Wake at this moment at the latest; the awaited tasks go on.
            signals: Wake at the first unread signal.

        Raises:
            UnknownTaskError: `on` names a task that does not exist.
            WaitCycleError: What it waits for waits for this task.
            InvalidArgumentError: No condition is given, or the policy does not fit.
        """
        self._transition_guard()
        phase = self._phase
        if phase.aborting:
            raise InvalidArgumentError("wait", "an abort handler may not wait on tasks or signals")
        if on is None and deadline is None and not signals:
            raise InvalidArgumentError(
                "wait", "give on=, deadline= or signals=; it would never end"
            )
        if policy not in ("all_settled", "fail_fast", "first_success"):
            raise InvalidArgumentError(
                "policy", "expected all_settled, fail_fast or first_success", show(policy)
            )
        ids = None if on is None else tuple(dict.fromkeys(int(id) for id in on))
        if ids:
            self._check_awaited(ids, policy)
        tag, text = self._runtime.encode_checkpoint(phase.definition, then)
        wait = Wait(
            on=ids,
            policy=policy,
            deadline_us=None if deadline is None else to_us(deadline, "deadline"),
            signals=signals,
        )
        if ids and deadline is None and not signals:
            self._runtime.check_cycle(self.view, phase.task_id, ids)
        wait_text = _json.dumps(_codec.encode_wait(wait), path="$<wait>")
        now = self.now_us()

        def decide() -> None:
            node = self.view.edit_task(phase.task_id)
            node.status = WAITING
            node.wait = wait
            node.woken_by = None
            node.recoveries = 0
            self.put_state(node)
            self.writes += (
                (Op.CHECKPOINT, (node.id, tag, text, now)),
                (Op.WAIT, (node.id, wait_text)),
            )

        self._decide = decide

    def _check_awaited(self, ids: tuple[int, ...], policy: JoinPolicy) -> None:
        for id in ids:
            node = self.view.task(id)
            if node is None:
                row = self._session.storage.task(id)
                if row is None:
                    raise UnknownTaskError(id)
                owner = row.owner
            else:
                owner = node.owner
            if policy != "all_settled" and owner != self._phase.task_id:
                raise InvalidArgumentError(
                    "on", f"{policy} needs ownership of all of `on`, task {id} is owned otherwise"
                )

    def complete(self, result: ResultT) -> None:
        """End the task with its result. Nothing can be committed after it."""
        info = self._phase.info
        text = self._runtime.snapshot().codec.encode(
            result, info.result_type, path=f"$<{info.name} result>"
        )
        self._end("completed", result=text, has_result=True)

    def fail(
        self, error: BaseException | str, *, detail: Any = None, result: ResultT | None = None
    ) -> None:
        """End the task as failed.

        Args:
            error: An exception, or a text; stored as plain data, cut at 4 KiB.
            detail: JSON beside it.
            result: What was reached nevertheless; readable as `outcome.partial`.
        """
        info = error_info(error, detail=detail)
        self._end("failed", error=info, **self._partial(result))

    def end_aborted(self, reason: str | None = None, *, result: ResultT | None = None) -> None:
        """End the task as aborted; for abort handlers only."""
        if not self._phase.aborting:
            raise InvalidArgumentError(
                "end_aborted", "only an abort handler may end its task as aborted; use fail()"
            )
        node = self.view.task(self._phase.task_id)
        given = reason if reason is not None else (node.abort_reason if node else None)
        self._end("aborted", reason=given, **self._partial(result))

    def _partial(self, result: ResultT | None) -> dict[str, Any]:
        if result is None:
            return {}
        info = self._phase.info
        value = self._runtime.snapshot().codec.encode(
            result, info.result_type, path=f"$<{info.name} result>"
        )
        return {"result": value, "has_result": True}

    def _end(
        self,
        status: OutcomeStatus,
        *,
        result: Any = None,
        has_result: bool = False,
        error: ErrorInfo | None = None,
        reason: str | None = None,
    ) -> None:
        self._transition_guard()
        record = OutcomeRecord(
            status=status, result=result, has_result=has_result, error=error, reason=reason
        )
        # Size is checked now, at the caller's line; the rows are made when all creations are known.
        _json.dumps(
            _codec.encode_outcome(record),
            path="$<outcome>",
            bytes_max=self._session.settings.value_bytes_max,
        )
        self._decide = lambda: self.settle(self.view.edit_task(self._phase.task_id), record)

    def seal(self) -> None:
        self.check_phase()
        if self._decide is not None:
            self._decide()
        super().seal()

    # --- memos, signals ------------------------------------------------------------------

    def memo(self, name: str, candidate: Any) -> Any:
        """Store a value under a name unless there is one; return the one that stands.

        Raises:
            MemoTooLargeError: More than 8 KiB encoded.
            TooManyMemosError: The task has 64 memos.
        """
        self.check_phase()
        memos = self._phase.memos
        claim = ("memo", self._phase.task_id, name)
        standing = memos.get(name) or self.claimed(claim)
        if standing is not None:
            return _json.loads_stored(standing)
        text = _json.dumps(candidate, path=f"$<memo {name}>")
        size = len(text.encode())
        if size > MEMO_BYTES_MAX:
            raise MemoTooLargeError(name, size, MEMO_BYTES_MAX)
        if len(memos) + len(self.memos_made) >= MEMOS_MAX:
            raise TooManyMemosError(self._phase.task_id, MEMOS_MAX)
        self.unique[claim] = text
        self.memos_made.append((name, text))
        self._runtime.attach(self._phase.task_id, "memos")
        self.writes.append((Op.MEMO, (self._phase.task_id, name, text)))
        return _json.loads_stored(text)

    def receive(self, *, limit: int = 100) -> list[tuple[str, Any]]:
        """Take the oldest unread signals, as (name, payload): consumed exactly with this commit."""
        self.check_phase()
        if limit < 1:
            raise InvalidArgumentError("limit", "expected at least 1", show(limit))
        taken: list[tuple[str, Any]] = []
        for row in self._session.storage.signals(self._phase.task_id, limit=limit):
            if ("received", row.id) in self.unique or self.claimed(("received", row.id)):
                continue
            self.unique[("received", row.id)] = row.id
            self.signalled[row.task] = self.signalled.get(row.task, 0) - 1
            self.writes.append((Op.SIGNAL_DELETE, (row.id,)))
            taken.append((row.name, _json.loads_stored(row.payload)))
        return taken

    # --- creating, owned by this task ----------------------------------------------------

    def create_task(
        self,
        definition: type[Task[ChildInputT, Any, ChildResultT]],
        input: ChildInputT,
        *,
        conversation: int | None = None,
        key: str | None = None,
        background: bool = False,
        deadline: datetime | None = None,
    ) -> TaskId[ChildResultT]:
        """Create a task owned by this task, or by a conversation if one is given.

        As `TreeTransaction.create_task`; `background` needs a conversation as owner. With `key`
        the first writer wins: the same call after a restart gives the same task.
        """
        self.check_phase()
        if self._phase.aborting:
            raise InvalidArgumentError("create_task", "an abort handler may not create owned work")
        if background and conversation is None:
            raise InvalidArgumentError(
                "background", "a background task is owned by a conversation; pass conversation="
            )
        return self._create(
            definition,
            input,
            owner=self._phase.task_id if conversation is None else None,
            conversation=self._phase.conversation_id if conversation is None else conversation,
            key=key,
            background=background,
            deadline=deadline,
        )

    def create_conversation(self, *, key: str | None = None, principal: str | None = None) -> int:
        """Create a conversation owned by this task and return its id; with `key`, once."""
        self.check_phase()
        if self._phase.aborting:
            raise InvalidArgumentError(
                "create_conversation", "an abort handler may not create owned work"
            )
        own = self.conversation(self._phase.conversation_id)
        return self._create_conversation(
            owner=self._phase.task_id,
            key=key,
            principal=own.principal if principal is None else principal,
        )
