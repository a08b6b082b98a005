"""Transactions that also change tasks: creating, marking, signalling, ending.

A transaction edits an overlay of the tree, so that everything it decides stands on what the bodies
before it staged, and nothing remains of it when it is refused. Two rules decide where an outcome
leads: creations of a commit count before its ends, and a task whose ordinary owned work is live is
stored as completing, else as terminal.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from typing_extensions import TypeVar

from pidurable.errors import (
    InternalError,
    InvalidArgumentError,
    OwnerEndedError,
    SignalRefusedError,
    TaskEndedError,
    UnknownDefinitionError,
    UnknownTaskError,
    show,
)
from pidurable.records import _codec, _json
from pidurable.records._checks import check_name, check_reason, is_id
from pidurable.records._entries import Conversation
from pidurable.records._ids import TaskId
from pidurable.records._limits import (
    SIGNAL_BYTES_MAX,
    SIGNALS_UNREAD_MAX,
)
from pidurable.records._moments import LAST_US
from pidurable.records._tasks import ErrorInfo, OnRestart, OutcomeRecord
from pidurable.session._document_work import NO_DICT, NO_LIST
from pidurable.session._removals import removed_hint
from pidurable.session._stubs import TASK, unknown_task
from pidurable.session._transaction import Transaction
from pidurable.storage import Op, SignalRow, TaskRow
from pidurable.tasks._at_once import reserve_at_once
from pidurable.tasks._definition import Task, definition_info
from pidurable.tasks._mistakes import first_checkpoint
from pidurable.tasks._tree import (
    COMPLETING,
    PENDING,
    WAITING,
    Node,
    View,
)

if TYPE_CHECKING:
    from pidurable.tasks._invocation import Starts
    from pidurable.tasks._run import Phase
    from pidurable.tasks._runtime import Runtime

ChildInputT = TypeVar("ChildInputT")
ChildResultT = TypeVar("ChildResultT")

_TASK_SCOPE = 2
_CHANGING = TaskRow._fields.index("status")
"""From here on the columns of a task's row are those of its state, which has its version before
them and its id behind."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_us(moment: datetime, argument: str) -> int:
    """An aware datetime as UTC microseconds; the last of them where its zone goes beyond."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise InvalidArgumentError(
            argument,
            "expected an aware datetime, as datetime.now(UTC) + timedelta(hours=1) is",
            show(moment),
        )
    # In whole numbers: a float of seconds is not exact to the microsecond in some centuries.
    return min((moment - _EPOCH) // timedelta(microseconds=1), LAST_US)


class TreeTransaction(Transaction):
    """A commit of a host, or of the scheduler."""

    phase: Phase | None = None
    memos_made: list[tuple[str, str]] = NO_LIST
    fresh: dict[int, tuple[str, str, str]] = NO_DICT
    """Of tasks created here: input, phase and checkpoint as text, for the first invocation."""
    outcomes: dict[int, str] = NO_DICT
    """Of tasks whose outcome was decided here, as text."""
    signalled: dict[int, int] = NO_DICT
    next_checkpoint: tuple[str, str] | None = None
    parked_at: tuple[str, str] | None = None
    """The checkpoint that the task of this commit waits at, if it parks it."""
    created_by_host = False
    """Whether a host created a task here: that lets tasks run."""
    starts: Starts | None = None
    """What this commit has reserved, to be started once it is durable."""
    reserves = True
    """Whether it reserves what it makes ready; a pass of the scheduler does so by itself."""
    _created: dict[Node, int] = NO_DICT
    """Tasks created here, in order, with the places of their rows among the writes."""
    _owned: list[int] = NO_LIST

    def __init__(
        self,
        runtime: Runtime,
        *,
        by_task: int | None = None,
        flush: bool = True,
    ) -> None:
        super().__init__(runtime.session, by_task=by_task, flush=flush)
        self._runtime = runtime
        self.view = View(runtime.staged)

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
        on_restart: OnRestart | None = None,
    ) -> TaskId[ChildResultT]:
        """Create a task owned by a conversation.

        Args:
            definition: The class of an installed definition.
            input: Its input; stored with the task, and kept.
            conversation: The conversation it belongs to.
            key: Create it once: a second call with the same key gives the first task's id, also
                where the input differs, where the definition is gone by now, and where the task
                has ended and was removed to free its space.
            background: Its conversation's abort and idle waits do not reach it.
            deadline: Passing it aborts the task, with the reason `deadline`.
            on_restart: What opening the session again does to it and to what is below, while it is
                live: `go` recovers it, `wait` blocks it (`interrupted`) until `resume_task`,
                `abort` aborts it. None takes the nearest owner's; without any it is `go`.

        Raises:
            UnknownDefinitionError: The definition is not installed.
            InvalidArgumentError: The key names a task of another kind.
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
            on_restart=on_restart,
        )

    def _create(
        self,
        definition: type[Task[Any, Any, ChildResultT]],
        input: Any,
        *,
        owner: int | None,
        conversation: int,
        key: str | None = None,
        background: bool = False,
        deadline: datetime | None = None,
        on_restart: OnRestart | None = None,
        begins: Any = None,
    ) -> TaskId[ChildResultT]:
        """Create a task, at the checkpoint that its definition begins with, or at `begins`."""
        self._check_open()
        if not isinstance(background, bool):
            raise InvalidArgumentError("background", "expected True or False", show(background))
        if on_restart not in (None, "go", "wait", "abort"):
            problem = "expected go, wait, abort or None"
            raise InvalidArgumentError("on_restart", problem, show(on_restart))
        self.conversation(conversation)
        info = definition_info(definition)
        if key is not None:
            # Found again also where its code is gone: whoever created it can still wait for it.
            key = check_name(key, "key")
            existing = self._keyed(owner, conversation, key, info.name)
            if existing is not None:
                return TaskId(existing)
        snapshot = self._runtime.snapshot()
        installed = snapshot.definition(info.name)
        if installed is None:
            raise UnknownDefinitionError(info.name, snapshot.nearest_kind(info.name))
        info = definition_info(installed)
        codec = snapshot.codec
        path = f"$<{info.name} input>"
        input_text = self._bounded_text(codec, input, info.input_type, path)
        stored_input = None
        if begins is None and installed.__pidurable_looks__:
            # The definition sees what a restarted process would see: the input as stored.
            stored_input = codec.decode(_json.loads_stored(input_text), info.input_type, path=path)
        tag, text = first_checkpoint(self._runtime, installed, stored_input, begins)
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
            on_restart,
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
        if not self._created:
            self._created, self.fresh = {}, {}
        self._created[node] = len(self.writes)
        self.writes += (
            (Op.TASK, row),
            (Op.TASK_INPUT, (row.id, input_text)),
            (Op.CHECKPOINT, (row.id, tag, text, now)),
        )
        self.view.add(node)
        self.created_by_host = self.created_by_host or self._by_task is None
        self.fresh[row.id] = (input_text, tag, text)
        if key is not None:
            self.unique[("task", owner, conversation if owner is None else 0, key)] = row.id
            if owner is not None:
                self._runtime.attach(owner, _of(key))
        return TaskId(row.id)

    def _bounded_text(self, codec: _codec.Codec, value: Any, type_: Any, path: str) -> str:
        """A value as it is stored, refused where it is too large."""
        limit = self._session.settings.value_bytes_max
        return codec.encode_text(
            value, type_, path=path, bytes_max=limit, setting="value_bytes_max"
        )

    def _keyed(self, owner: int | None, conversation: int, key: str, kind: str) -> int | None:
        """The task that has this key, if there is one; of another kind it is no answer."""
        name = ("task", owner, conversation if owner is None else 0, key)
        found: int | None = self.claimed(name)
        if found is None and owner is not None and _of(key) not in self._runtime.attached(owner):
            # Whoever makes thousands of calls does not ask the store for each.
            return None
        if found is None:
            storage = self._session.storage
            row = storage.task_by_key(owner, conversation, key)
            if row is None:
                # Only the root of a tree may be asked for when its tree is gone.
                stub = storage.stub(TASK, conversation, key) if owner is None else None
                return None if stub is None else stub.id
            found, standing = row.id, row.kind
        else:
            made = self.view.task(found)  # in this batch
            standing = kind if made is None else made.kind
        if standing != kind:
            raise InvalidArgumentError(
                "key",
                f"it names task {found} of the kind {standing!r} already, not one of {kind!r}; "
                "choose another key",
                show(key),
            )
        return found

    def create_conversation(self, *, key: str | None = None, principal: str = "") -> int:
        """Create an ownerless conversation and return its id."""
        return self._create_conversation(owner=None, key=key, principal=principal)

    def _create_conversation(self, *, owner: int | None, key: str | None, principal: str) -> int:
        self._check_open()
        if key is not None:
            key = check_name(key, "key")
            found = self._keyed_conversation(owner, key)
            if found is not None:
                return found
        return self.add_conversation(owner=owner, key=key, principal=principal).id

    def add_conversation(
        self,
        *,
        owner: int | None = None,
        key: str | None = None,
        principal: str = "",
        parent: tuple[int | None, int | None] = (None, None),
    ) -> Conversation:
        """Stage a new conversation, which the tree knows from here on."""
        made = super().add_conversation(owner=owner, key=key, principal=principal, parent=parent)
        self.view.add_scope(made)
        if owner is not None:
            self._owned = self._owned or []
            self._owned.append(owner)
        return made

    def stored_task(self, task_id: int) -> TaskRow | None:
        """The row of a task that is not in memory, that is, of one that has ended."""
        return self._session.storage.task(task_id)

    def unknown_task(self, task_id: int, hint: str) -> UnknownTaskError:
        """The error for an id of no task, which says so if there was one that was removed."""
        return unknown_task(self._session.storage, task_id, hint)

    def refuse_removed(self, id: int) -> None:
        """Refuse a task or submission whose tree is being removed: soon there is nothing of it.

        Raises:
            UnknownTaskError: It is a task of such a tree.
            NotFoundError: It is a submission to a conversation of one.
        """
        removals = self._session.removals
        if not removals.any:
            return
        row = self._session.storage.task(id)
        if row is None:
            record = self.submission(id)
            if record is not None:
                self.conversation(record.conversation_id)
            return
        root = removals.tree_of_task(row)
        if root is not None:
            raise UnknownTaskError(id, removed_hint(root))

    def is_cancelled(self, conversation_id: int) -> bool:
        """Tell whether a conversation is below a live task that is to be aborted with it."""
        scope = self.view.find(conversation_id) or self._runtime.load(conversation_id)
        return scope is not None and self._runtime.under_intent(self.view, scope)

    def check_task(self, task_id: int) -> None:
        """Refuse what is no live task: nothing can be given to it, or would ever go with it.

        Raises:
            UnknownTaskError: No such task.
            TaskEndedError: It has ended.
        """
        if self._live_or_ended(task_id) is None:
            row = self._session.storage.task(task_id)
            raise TaskEndedError(task_id, (row.outcome_status if row else None) or "ended")

    # --- marks and signals ---------------------------------------------------------------

    def abort_task(self, task_id: int, reason: str = "user") -> None:
        """Mark a task for abort; what is below it is marked from it. Ended tasks are left alone.

        Raises:
            UnknownTaskError: No such task.
        """
        self._check_open()
        reason = check_reason(reason)
        node = self._live_or_ended(task_id)
        if node is not None:
            self.mark(node.id, reason)

    def _live_or_ended(self, task_id: int) -> Node | None:
        """A live task, or None for one that has ended."""
        if not is_id(task_id):
            raise UnknownTaskError(show(task_id))
        node = self.view.task(task_id)
        if node is None:
            if self._session.storage.task(task_id) is None:
                raise unknown_task(self._session.storage, task_id)
            return None
        return node if node.live else None

    def mark(self, task_id: int, reason: str) -> bool:
        """Store the intent to abort on a live task; False if it is marked or has ended.

        The mark lifts whatever blocks the task and ends its wait for a retry: its handler decides
        anew. A task that was blocked while it was being aborted is let go again.
        """
        found = self.view.task(task_id)
        if found is None or not found.live:
            return False
        if found.marked:
            if found.blocked is not None:
                self.unblock(self.view.edit_task(task_id))
            return False
        node = self.view.edit_task(task_id)
        now = self.now_us()
        node.abort_us = now
        node.abort_reason = reason
        node.tries = 0
        node.ready_us = min(node.ready_us or now, now)
        if node.blocked is not None:
            self._lift(node)
            node.recoveries = 0
        self.view.intents = True
        self.put_state(node)
        self._runtime.intent_began(self, node)
        return True

    def unblock(self, node: Node) -> None:
        """Let a blocked task (of this view) be looked at again, all that it did forgiven.

        One whose wait cannot be read stays blocked: nothing could ever wake it.
        """
        if node.status is WAITING and not node.has_wait:
            return
        self._lift(node)
        node.recoveries = 0
        node.tries = 0
        node.ready_us = self.now_us()
        self.put_state(node)

    def park(self, node: Node, error: ErrorInfo) -> None:
        """Block a task whose code raised, with the error beside it until it is let go."""
        node.status = PENDING
        node.blocked = "faulted"
        self.put_state(node)
        self.writes.append(_outcome_write(node, OutcomeRecord(status="faulted", error=error)))

    def _lift(self, node: Node) -> None:
        if node.blocked == "faulted":
            self.writes.append((Op.OUTCOME_DELETE, (node.id,)))
        node.blocked = None

    def retry_task(self, task_id: int) -> None:
        """Let a blocked task run again, with its crashes forgiven. Others are left alone.

        One that a restart interrupted is resumed, as by `resume_task`.

        Raises:
            UnknownTaskError: No such task.
            InvalidArgumentError: It is below another interrupted task; resume that one.
        """
        self._check_open()
        node = self._live_or_ended(task_id)
        if node is None or node.blocked is None:
            return
        if node.blocked == "interrupted":
            self._resume(node)
        else:
            self.unblock(self.view.edit_task(node.id))

    def resume_task(self, task_id: int) -> None:
        """Let a task go on that a restart interrupted, with everything below it.

        Tasks that are not interrupted are left alone. What is below goes on in the scheduler's
        next commits. Before `start()` it also counts for the next opening that is started; every
        restart behind that interrupts it again.

        Raises:
            UnknownTaskError: No such task.
            InvalidArgumentError: It is below another interrupted task; resume that one.
        """
        self._check_open()
        node = self._live_or_ended(task_id)
        if node is not None and node.blocked == "interrupted":
            self._resume(node)

    def _resume(self, node: Node) -> None:
        self._check_resumable(node)
        node = self.view.edit_task(node.id)
        if not self._runtime.started:
            node.let_go = True
            self._runtime.index.let_go.append(node.id)
        self.unblock(node)

    def _check_resumable(self, node: Node) -> None:
        """Refuse to resume one task below another that stays interrupted: it could not start."""
        top = None
        for owner in self.view.owners(node):
            if isinstance(owner, Node) and owner.blocked == "interrupted":
                top = owner
        if top is not None and self._runtime.halted(self.view, node):
            raise InvalidArgumentError(
                "task_id",
                f"task {node.id} is below task {top.id} ({top.kind}), which a restart interrupted; "
                "resume that one, and this one goes on with it",
                show(node.id),
            )

    def signal(
        self, task_id: int, name: str, payload: Any = None, *, key: str | None = None
    ) -> None:
        """Store a signal for a live task. The same `key` twice stores it once, read or not.

        Raises:
            UnknownTaskError: No such task.
            TaskEndedError: It has ended.
            SignalRefusedError: Larger than 256 KiB, or 1,000 are unread.
            NotJsonError: The payload is not strict JSON.
        """
        self._check_open()
        self.check_task(task_id)
        name = check_name(name, "name")
        if key is not None:
            key = check_name(key, "key")
        limit = self._session.settings.value_bytes_max
        text = _json.dumps(
            payload, path=f"$<signal {name}>", bytes_max=limit, setting="value_bytes_max"
        )
        if len(text.encode()) > SIGNAL_BYTES_MAX:
            raise SignalRefusedError(
                task_id, f"signal {name!r} is larger than {SIGNAL_BYTES_MAX} bytes"
            )
        if key is not None:
            claim = ("signal", task_id, key)
            if self.claimed(claim) or self._session.storage.signal_by_key(task_id, key):
                return
        unread = self._runtime.unread(task_id) + self.signalled.get(task_id, 0)
        unread += self._runtime.staged_signals.get(task_id, 0)
        if unread >= SIGNALS_UNREAD_MAX:
            raise SignalRefusedError(
                task_id, f"{SIGNALS_UNREAD_MAX} signals are unread, the most allowed"
            )
        number = self._session.line.draw_id()
        if key is not None:
            self.unique[("signal", task_id, key)] = number
        self.signalled = self.signalled or {}
        self.signalled[task_id] = self.signalled.get(task_id, 0) + 1
        # Noted at once: the task may end later in this batch, and takes its signals with it.
        self._runtime.attach(task_id, "signals")
        self.writes.append((Op.SIGNAL, SignalRow(number, task_id, name, key, text, self.now_us())))

    # --- what the scheduler writes -------------------------------------------------------

    def put_state(self, node: Node) -> None:
        """Stage the state columns of a node that this transaction edits.

        A task that is created here is stored once, as it is in the end.
        """
        state = node.state_row()
        place = self._created.get(node)
        if place is None:
            self.writes.append((Op.TASK_STATE, state))
        else:
            row = self.writes[place][1]
            self.writes[place] = (Op.TASK, TaskRow._make((*row[:_CHANGING], *state[1:-1])))

    def settle(self, node: Node, outcome: OutcomeRecord) -> None:
        """Decide the outcome of a task: terminal, or completing while work below is live."""
        text = _json.dumps(_codec.encode_outcome(outcome), path="$<outcome>")
        self.settle_as(node, outcome.status, text)

    def settle_as(self, node: Node, status: str, outcome_text: str) -> None:
        """`settle` with an outcome that is encoded already."""
        self.outcomes = self.outcomes or {}
        self.outcomes[node.id] = outcome_text
        self.writes.append((Op.OUTCOME, (node.id, outcome_text)))
        if node.status is WAITING:
            self.writes.append((Op.WAIT_DELETE, (node.id,)))
            node.wait = None
        if node.below > 0:
            was, was_all = node.contributes(), node.contributes_all()
            node.hold(status)
            node.status = COMPLETING
            self.view.intents = self.view.intents or node.intent
            self.view.spread(node, was=was, was_all=was_all)
            self.put_state(node)
            if node.intent and not node.marked:
                self._runtime.intent_began(self, node)
        else:
            self._finish(node, status)

    def finish(self, node: Node) -> None:
        """Make a task terminal that holds its outcome."""
        if node.outcome_status is None:
            raise InternalError(f"task {node.id} was to end without an outcome")
        self._finish(node, node.outcome_status)

    def _finish(self, node: Node, status: str) -> None:
        """Make a task terminal. Its input and outcome stay; everything else goes."""
        self.view.end(node)
        node.end(status, self.now_us())
        self.put_state(node)
        task = (node.id,)
        self.writes.append((Op.CHECKPOINT_DELETE, task))
        attached = self._runtime.attached(node.id)
        if "memos" in attached:
            self.writes.append((Op.MEMOS_DELETE, task))
        if "signals" in attached:
            self.writes.append((Op.SIGNALS_DELETE, task))
        if "documents" in attached or self.touches(_TASK_SCOPE, node.id):
            self.retire_scope(_TASK_SCOPE, node.id)

    def seal(self) -> None:
        # Owners are checked last: a commit that ends its task may not create work below it.
        for node in self._created:
            if node.owner is not None:
                self._check_owner(node.owner)
        for owner in self._owned:
            self._check_owner(owner)
        if self.reserves and self.view.nodes:
            self.starts = reserve_at_once(self._runtime, self, self._created)
        super().seal()
        for address, state in self.docs.items():
            if address.scope == _TASK_SCOPE and state is not None:
                self._runtime.attach(address.scope_id, "documents")

    def _check_owner(self, owner: int) -> None:
        found = self.view.task(owner)
        if found is None or not found.live:
            raise OwnerEndedError(owner, "terminal")
        if found.status is COMPLETING:
            raise OwnerEndedError(owner, "completing")
        if found.marked:
            raise OwnerEndedError(owner, "being aborted")


def _of(key: str) -> str:
    """What is noted of a task that has created another one under a key."""
    return f"task {key}"


def _outcome_write(node: Node, outcome: OutcomeRecord) -> tuple[Op, tuple[Any, ...]]:
    text = _json.dumps(_codec.encode_outcome(outcome), path="$<outcome>")
    return Op.OUTCOME, (node.id, text)
