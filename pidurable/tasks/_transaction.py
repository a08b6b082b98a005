"""Transactions of a task: its own transitions, on top of what every transaction offers.

Every transition is checked when it is called, and written when the body has ended: only then is it
known what the commit created, which decides whether an outcome is held. Nothing can follow an
outcome or a wait, in this commit or a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, final

from typing_extensions import TypeVar

from pidurable.errors import (
    AbortRequestedError,
    InvalidArgumentError,
    InvocationEndedError,
    MemoTooLargeError,
    NotFoundError,
    TooManyMemosError,
    UnknownTaskError,
    show,
)
from pidurable.records import _codec, _json
from pidurable.records._checks import check_name, check_reason
from pidurable.records._entries import Conversation
from pidurable.records._ids import TaskId
from pidurable.records._limits import MEMO_BYTES_MAX, MEMOS_MAX
from pidurable.records._tasks import (
    ErrorInfo,
    JoinPolicy,
    OnRestart,
    OutcomeRecord,
    OutcomeStatus,
    Wait,
)
from pidurable.storage import Op, SignalRow
from pidurable.tasks._awaited import awaited_ids, sort_awaited
from pidurable.tasks._definition import Task
from pidurable.tasks._errors import error_info
from pidurable.tasks._reach import may_reach
from pidurable.tasks._tree import RUNNING, WAITING, Node
from pidurable.tasks._tree_transaction import TreeTransaction as TreeTransaction, to_us

if TYPE_CHECKING:
    from pidurable.tasks._run import Phase
    from pidurable.tasks._runtime import Runtime

CheckpointT = TypeVar("CheckpointT", default=Any)
ResultT = TypeVar("ResultT", default=Any)
ChildInputT = TypeVar("ChildInputT")
ChildResultT = TypeVar("ChildResultT")


@final
class TaskTransaction(TreeTransaction, Generic[CheckpointT, ResultT]):
    """A commit of a task: everything of `TreeTransaction`, and the task's own transitions."""

    _decide: Callable[[], None] | None = None
    _aborts_itself = False
    _checked = False
    _lent_to: str | None = None
    _given: Any = None
    """What the body works with, where it is no closure."""

    def __init__(self, runtime: Runtime, phase: Phase) -> None:
        super().__init__(runtime, by_task=phase.task_id)
        self._phase = phase
        self.phase = phase

    def check_phase(self) -> Node:
        """Refuse a commit that comes too late for its task. In line order, so it is exact."""
        self._check_open()
        phase = self._phase
        node = self.view.task(phase.task_id)
        if node is None or node.status is not RUNNING or phase.number != node.invocations:
            state = "terminal" if node is None else node.status.word
            raise InvocationEndedError(phase.task_id, f"the task is {state}")
        if node.marked and not phase.aborting and not self._aborts_itself:
            raise AbortRequestedError(phase.task_id, node.abort_reason or "user")
        self._checked = True
        return node

    def mark(self, task_id: int, reason: str) -> bool:
        """Store the intent to abort on a live task, which may be this one.

        The rest of the commit is then stored with the mark, and the abort handler comes next.
        """
        marked = super().mark(task_id, reason)
        self._aborts_itself = self._aborts_itself or (marked and task_id == self._phase.task_id)
        return marked

    # --- lent to code that is not the definition's -----------------------------------------

    def lend(self, to: str | None) -> None:
        """Hand this commit to other code than the definition's own: a tool's function, a hook.

        It decides nothing about the task, and the ids of conversations and tasks that it may not
        reach (see `_reach`) are ids of nothing.

        Args:
            to: What it is handed to, for messages. None: it is the definition's own again.
        """
        self._lent_to = to

    def conversation(self, conversation_id: int) -> Conversation:
        """The record of a conversation.

        Raises:
            NotFoundError: This session has no such conversation, or it is out of reach.
        """
        found = super().conversation(conversation_id)
        if self._lent_to is not None and not self._may_reach(found):
            raise NotFoundError("conversation", show(conversation_id))
        return found

    def _may_reach(self, other: Conversation) -> bool:
        own = self._phase.conversation_id
        if other.id == own:
            return True
        any_conversation = super().conversation

        def place_of(task_id: int) -> int | None:
            node = self.view.task(task_id) or self.stored_task(task_id)
            return None if node is None else node.conversation

        return may_reach(
            any_conversation(own), other, conversation=any_conversation, place_of=place_of
        )

    def _live_or_ended(self, task_id: int) -> Node | None:
        found = super()._live_or_ended(task_id)
        if self._lent_to is not None:
            node = found or self.stored_task(task_id)
            if node is None or not self._may_reach(super().conversation(node.conversation)):
                raise UnknownTaskError(show(task_id))
        return found

    # --- transitions ---------------------------------------------------------------------

    def goto(self, checkpoint: CheckpointT) -> None:
        """Continue at the phase of this checkpoint once the handler has returned."""
        node = self._transition_guard()
        phase = self._phase
        tag, text = self._runtime.encode_checkpoint(phase.info, checkpoint)
        self.next_checkpoint = (tag, text)
        progress = (tag, text) != (phase.tag, phase.checkpoint)
        if progress and (node.recoveries or node.tries or node.woken_by):
            # Progress forgives what a crash or a retry had charged, and ends what woke it.
            node = self.view.edit_task(node.id)
            node.recoveries = 0
            node.tries = 0
            node.woken_by = None
            self.put_state(node)
        self.writes.append((Op.CHECKPOINT, (self._phase.task_id, tag, text, self.now_us())))

    def _transition_guard(self) -> Node:
        node = self.check_phase()
        if self._lent_to is not None:
            problem = f"a commit lent to {self._lent_to} decides nothing about its task; return"
            raise InvalidArgumentError("tx", problem)
        if self._decide is not None:
            raise InvocationEndedError(self._phase.task_id, "its outcome or wait is decided")
        return node

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
            on: Ids of what to wait for, duplicates counting once: tasks until they have ended,
                submissions until they are answered or will not be, conversations until they are
                idle, that is, no ordinary live task is below. All of it must be so at one moment:
                a conversation that is busy again counts again. An empty one wakes at the next pass.
            policy: `fail_fast` and `first_success` need ownership of all of `on`, so all of it
                must be tasks.
            deadline: An aware datetime. Wake at this moment at the latest, or at once if it has
                passed; what is awaited goes on.
            signals: Wake at the first unread signal.

        Raises:
            UnknownTaskError: `on` names something that does not exist or cannot be waited for.
            WaitCycleError: What it waits for waits for this task, or is kept busy by it.
            InvalidArgumentError: No condition is given, the policy does not fit, or the deadline
                has no zone.
        """
        self._transition_guard()
        phase = self._phase
        if phase.aborting:
            raise InvalidArgumentError(
                "wait", "an abort handler may not wait: what was below its task has ended"
            )
        if on is None and deadline is None and not signals:
            raise InvalidArgumentError(
                "wait", "give on=, deadline= or signals=; it would never end"
            )
        if policy not in ("all_settled", "fail_fast", "first_success"):
            raise InvalidArgumentError(
                "policy", "expected all_settled, fail_fast or first_success", show(policy)
            )
        ids = None if on is None else awaited_ids(on)
        conversations, others = sort_awaited(
            self, self._runtime.kinds, ids or (), policy=policy, owner=phase.task_id
        )
        tag, text = self._runtime.encode_checkpoint(phase.info, then)
        wait = Wait(
            on=ids,
            conversations=conversations,
            others=others,
            policy=policy,
            deadline_us=None if deadline is None else to_us(deadline, "deadline"),
            signals=signals,
        )
        if ids and deadline is None and not signals:
            self._runtime.check_cycle(self.view, phase.task_id, ids, others=others, tx=self)
        # All of it was looked at: ids of what exists, and a moment.
        wait_text = _json.dumps(_codec.encode_wait(wait), path="$<wait>", checked=True)
        now = self.now_us()

        def decide() -> None:
            node = self.view.edit_task(phase.task_id)
            node.status = WAITING
            node.wait = wait
            # Ready again when it wakes.
            node.ready_us = 0
            node.woken_by = None
            node.recoveries = 0
            node.tries = 0
            self.put_state(node)
            self.parked_at = (tag, text)
            self.writes += (
                (Op.CHECKPOINT, (node.id, tag, text, now)),
                (Op.WAIT, (node.id, wait_text)),
            )

        self._decide = decide

    def complete(self, result: ResultT) -> None:
        """End the task with its result. Nothing can be committed after it."""
        self._transition_guard()
        info = self._phase.info
        text = self._runtime.snapshot().codec.encode_text(
            result,
            info.result_type,
            path=f"$<{info.name} result>",
            bytes_max=self._session.settings.value_bytes_max,
            setting="value_bytes_max",
        )
        self._decide_outcome("completed", _codec.completed_text(text))

    def fail(
        self, error: BaseException | str, *, detail: Any = None, result: ResultT | None = None
    ) -> None:
        """End the task as failed.

        Args:
            error: An exception, or a text; stored as plain data, cut at 4 KiB.
            detail: JSON beside it.
            result: What was reached nevertheless; readable as `outcome.partial`.
        """
        if not isinstance(error, BaseException | str):
            problem = "expected an exception, as in ValueError('...'), or a text"
            raise InvalidArgumentError("error", problem, show(error))
        info = error_info(error, detail=detail)
        self._end("failed", error=info, **self._partial(result))

    def end_aborted(self, reason: str | None = None, *, result: ResultT | None = None) -> None:
        """End the task as aborted; for abort handlers only."""
        if not self._phase.aborting:
            raise InvalidArgumentError(
                "end_aborted", "only an abort handler may end its task as aborted; use fail()"
            )
        node = self.view.task(self._phase.task_id)
        if reason is not None:
            reason = check_reason(reason)
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
        text = _json.dumps(
            _codec.encode_outcome(record),
            path="$<outcome>",
            bytes_max=self._session.settings.value_bytes_max,
            setting="value_bytes_max",
        )
        self._decide_outcome(status, text)

    def _decide_outcome(self, status: OutcomeStatus, text: str) -> None:
        def decide() -> None:
            self.settle_as(self.view.edit_task(self._phase.task_id), status, text)

        self._decide = decide

    def seal(self) -> None:
        # Nobody else's body has run since this one began, so only itself can have changed its task.
        if not self._checked or self._phase.task_id in self.view.nodes:
            self.check_phase()
        # It refers to this transaction: without letting it go, each one and all that it holds would
        # be left to the garbage collector, in pauses that grow with the tree.
        decide, self._decide = self._decide, None
        if decide is not None:
            decide()
        super().seal()

    # --- memos, signals ------------------------------------------------------------------

    def memo(self, name: str, candidate: Any) -> Any:
        """Store a value under a name unless there is one; return the one that stands.

        Raises:
            MemoTooLargeError: More than 8 KiB encoded.
            TooManyMemosError: The task has 64 memos.
        """
        self.check_phase()
        name = check_name(name, "name")
        memos = self._phase.memos
        claim = ("memo", self._phase.task_id, name)
        standing = memos.get(name)
        if standing is None:
            standing = self.claimed(claim)
        if standing is not None:
            return _json.loads_stored(standing)
        text = _json.dumps(candidate, path=f"$<memo {name}>")
        size = len(text.encode())
        if size > MEMO_BYTES_MAX:
            raise MemoTooLargeError(name, size, MEMO_BYTES_MAX)
        staged = self._runtime.staged_memos.get(self._phase.task_id, 0)
        if len(memos) + staged + len(self.memos_made) >= MEMOS_MAX:
            raise TooManyMemosError(self._phase.task_id, MEMOS_MAX)
        self.unique[claim] = text
        self.memos_made = self.memos_made or []
        self.memos_made.append((name, text))
        self._runtime.attach(self._phase.task_id, "memos")
        self.writes.append((Op.MEMO, (self._phase.task_id, name, text)))
        return _json.loads_stored(text)

    def receive(self, *, limit: int = 100) -> list[tuple[str, Any]]:
        """Take the oldest unread signals, as (name, payload): consumed exactly with this commit.

        Args:
            limit: Most of them; the others stay unread, and wake the next wait for signals.

        Raises:
            InvalidArgumentError: `limit` is no int of at least 1.
        """
        self.check_phase()
        if type(limit) is not int or not 0 < limit < 2**63:
            raise InvalidArgumentError("limit", "expected at least 1", show(limit))
        taken: list[tuple[str, Any]] = []
        for row in self._unread(limit):
            self.unique[("received", row.id)] = row.id
            self.signalled = self.signalled or {}
            self.signalled[row.task] = self.signalled.get(row.task, 0) - 1
            # A key stays taken for as long as the task lives: who sends it again is late, not new.
            op = Op.SIGNAL_DELETE if row.key is None else Op.SIGNAL_READ
            self.writes.append((op, (row.id,)))
            taken.append((row.name, _json.loads_stored(row.payload)))
        return taken

    def _unread(self, limit: int) -> list[SignalRow]:
        """The oldest signals that neither this commit nor one before it in its batch has taken."""
        asked = limit
        while True:
            rows = self._session.storage.signals(self._phase.task_id, limit=asked)
            unread = [
                row
                for row in rows
                if ("received", row.id) not in self.unique
                and not self.claimed(("received", row.id))
            ]
            if len(unread) >= limit or len(rows) < asked:
                return unread[:limit]
            # Those that are taken already stand in front of the others.
            asked += limit - len(unread)

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
        on_restart: OnRestart | None = None,
    ) -> TaskId[ChildResultT]:
        """Create a task owned by this task, or by a conversation if one is given.

        As `TreeTransaction.create_task`; `background` needs a conversation as owner. With `key`
        the first writer wins: the same call after a restart gives the same task.
        """
        self.check_phase()
        if self._phase.aborting and conversation is None:
            raise InvalidArgumentError(
                "create_task",
                "an abort handler may not create owned work; what is to follow it can be given to "
                "another conversation, with conversation=",
            )
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
            on_restart=on_restart,
        )

    def create_conversation(self, *, key: str | None = None, principal: str | None = None) -> int:
        """Create a conversation owned by this task and return its id; with `key`, once."""
        self._check_may_own("create_conversation")
        own = self.conversation(self._phase.conversation_id)
        return self._create_conversation(
            owner=self._phase.task_id,
            key=key,
            principal=own.principal if principal is None else principal,
        )

    def fork(self, conversation_id: int, at: int | None = None, *, key: str | None = None) -> int:
        """Fork a conversation, as `TreeTransaction.fork`; this task owns the fork.

        Raises:
            OwnedTooDeepError: The fork would be owned at a greater depth than is allowed.
            InvalidArgumentError: The key names a conversation that is no fork of this one, or an
                abort handler calls, which may not create owned work.
        """
        self._check_may_own("fork")
        return self._fork(conversation_id, at, owner=self._phase.task_id, key=key)

    def _check_may_own(self, call: str) -> None:
        self.check_phase()
        if self._phase.aborting:
            raise InvalidArgumentError(call, "an abort handler may not create owned work")
