"""Invocations: the code of one task, running phase after phase in one trio task.

Between two phases a step decides. It waits until no commit of this invocation is queued or in
flight, refuses new ones from then on, looks at the published record and takes the first match:

1. terminal, completing or waiting: the invocation ends;
2. the session is closing: it ends, and the closing commit makes the task pending;
3. the task is marked, or below an owner with the intent to cancel: it ends, an abort invocation
   follows when nothing is live below;
4. the phase raised: faulted, unless the storage was at fault;
5. the checkpoint changed: the next phase, or a handover to a replaced definition;
6. else: faulted, no durable progress.

The line decides between a mark, a fault and an outcome: whoever's body comes first.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import attrs
import trio

from pidurable.errors import (
    NotJsonError,
    StorageAccessError,
    StorageCorruptError,
)
from pidurable.records import _json
from pidurable.records._limits import PROBE_SECONDS
from pidurable.records._tasks import ErrorInfo, OutcomeRecord
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import DefinitionInfo, Task, definition_info
from pidurable.tasks._errors import StorageTrouble, leaves, storage_trouble
from pidurable.tasks._faults import write, write_fault
from pidurable.tasks._invocation import Invocation as Invocation
from pidurable.tasks._mistakes import (
    UNREADABLE_REMEDY,
    no_progress,
    report_late,
    stray_cancellation,
)
from pidurable.tasks._tree import PENDING
from pidurable.tasks._waits import enter_invocation

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime
    from pidurable.tasks._transaction import TreeTransaction


_INPUT_KEPT = 1_000
"""Most characters of an input that is kept as text for as long as its task runs."""


@attrs.define(eq=False)
class Phase:
    """One phase of one invocation. Mutable: the kernel's side of a `TaskContext`."""

    task_id: int
    conversation_id: int
    definition: Task[Any, Any, Any]
    info: DefinitionInfo
    snapshot: Any
    number: int
    """The invocation's number; a commit of an earlier one is refused by it."""
    aborting: bool
    woken_by: str | None
    memos: dict[str, str]
    tag: str
    checkpoint: str
    """The checkpoint that the phase began with, as text."""
    input_text: str | None = None
    """The input as text, where it is short: a wait keeps it at hand."""
    reached: tuple[str, str] | None = None
    """The checkpoint that a published `goto` of this phase leads to."""
    extensions: Any = ...
    """What its conversation selects, once a hook was asked; an ellipsis before."""
    sealed: bool = False
    returned: object = None
    """What its handler returned: nothing, unless its author mistook it for a way to go on."""
    storage_refused: bool = False
    """Whether a commit of this phase met trouble of the storage, which is never its fault."""
    in_flight: int = 0
    _idle: trio.Event | None = None

    def landed(self) -> None:
        """A commit of this phase has ended, one way or the other."""
        self.in_flight -= 1
        if not self.in_flight and self._idle is not None:
            self._idle.set()

    async def quiet(self) -> None:
        """Wait until no commit of a sealed phase is queued or in flight: those still count."""
        with trio.CancelScope(shield=True):
            while self.in_flight:
                self._idle = trio.Event()
                await self._idle.wait()


_Handler = Callable[[Any, Any], Awaitable[object]]


class _Unreadable(Exception):
    """The stored state does not fit the definition; carries what to say."""


@trio.lowlevel.enable_ki_protection
async def run_invocation(runtime: Runtime, invocation: Invocation) -> None:
    """Run the phases of one invocation until the step ends it.

    Every coroutine from here to the handler stays in memory while the handler waits, so there are
    as few as can be.
    """
    enter_invocation(runtime, invocation.task_id)
    with invocation.scope:
        following: Phase | None = None
        input: Any = None
        try:
            following, input = _begin(runtime, invocation)
        except _Unreadable as unreadable:
            await _block(runtime, invocation, str(unreadable))
        except (StorageAccessError, StorageCorruptError) as error:
            await _after_failed_read(runtime, invocation, error)
        while following is not None:
            phase = following
            try:
                at = _decode(phase)
            except (_Unreadable, NotJsonError) as unreadable:
                await _block(runtime, invocation, str(unreadable))
                return
            left = await _call(runtime, invocation, phase, at, input)
            phase.sealed = True
            if phase.in_flight:
                await phase.quiet()
            following = await _step(runtime, invocation, phase, left)
            # It refers to the frames that it left, and from Python 3.13 on these refer to this one.
            left = None


def _begin(runtime: Runtime, invocation: Invocation) -> tuple[Phase, Any]:
    """Read what the definition needs: input, checkpoint and memos, decoded by its own classes."""
    task_id = invocation.task_id
    node = runtime.published.task(task_id)
    assert node is not None
    storage = runtime.session.storage
    info = definition_info(invocation.definition)
    fresh = runtime.fresh.pop(task_id, None)
    ahead = runtime.at_hand.take_start(task_id) or invocation.ahead
    if ahead is not None:
        _, input_text, tag, text, noted = ahead
        memos = dict(noted)
        invocation.ahead = None
    elif fresh is not None:
        input_text, tag, text = fresh
        memos = {}
    else:
        stored = storage.task_checkpoint(task_id)
        input_stored = storage.task_input(task_id)
        if stored is None or input_stored is None:
            raise _Unreadable("its checkpoint or input is missing")
        tag, text = stored
        input_text = input_stored
        memos = dict(storage.task_memos(task_id))
    snapshot = runtime.snapshot()
    phase = Phase(
        task_id=task_id,
        conversation_id=node.conversation,
        definition=invocation.definition,
        info=info,
        snapshot=snapshot,
        number=invocation.number,
        aborting=invocation.aborting,
        woken_by=node.woken_by,
        memos=memos,
        tag=tag,
        checkpoint=text,
        input_text=input_text if len(input_text) <= _INPUT_KEPT else None,
    )
    try:
        input = snapshot.codec.decode(
            _json.loads_stored(input_text), info.input_type, path=f"$<{info.name} input>"
        )
    except NotJsonError as error:
        raise _Unreadable(str(error)) from error
    return phase, input


def _decode(phase: Phase) -> Any:
    """The checkpoint as an instance of the definition's class."""
    cls = phase.info.by_tag.get(phase.tag)
    if cls is None:
        known = ", ".join(phase.info.by_tag)
        raise _Unreadable(f"{phase.info.name} has no phase {phase.tag!r} (it has {known})")
    return phase.snapshot.codec.decode(
        _json.loads_stored(phase.checkpoint), cls, path=f"$<{phase.info.name} {phase.tag}>"
    )


def _call(
    runtime: Runtime, invocation: Invocation, phase: Phase, at: Any, input: Any
) -> Awaitable[BaseException | ErrorInfo | None]:
    """Call one handler; awaited, it gives what left the handler, if anything did.

    Cancellation is given too: the step that follows knows why it came.
    """
    ctx: TaskContext[Any, Any, Any] = TaskContext(runtime, phase, input)
    if not invocation.aborting:
        handler: _Handler = getattr(phase.definition, phase.info.phases[type(at)].method_name)
        return _handle(handler, at, ctx, phase)
    timeout = phase.info.abort_timeout
    if timeout is None:
        return _handle(phase.definition.abort, at, ctx, phase)
    return _abort_within(timeout, invocation, phase, at, ctx)


async def _abort_within(
    seconds: float, invocation: Invocation, phase: Phase, at: Any, ctx: Any
) -> BaseException | ErrorInfo | None:
    """Run an abort handler that is to be over in some time from the start of its invocation."""
    error: BaseException | None = None
    with trio.CancelScope(deadline=invocation.started_at + seconds) as limit:
        error = await _handle(phase.definition.abort, at, ctx, phase)
    if limit.cancel_called:
        # Whatever the handler did about it: it was to be over by now.
        message = f"the abort handler took longer than {seconds:g} s"
        return ErrorInfo(type="abort_timeout", message=message)
    return error


@trio.lowlevel.disable_ki_protection
async def _handle(handler: _Handler, at: Any, ctx: Any, phase: Phase) -> BaseException | None:
    """Await a handler; return what left it. Ctrl-C and SystemExit leave as they are.

    The handler is not the kernel's code: Ctrl-C may end it, and leaves just so where it comes
    between the handler and this.
    """
    try:
        phase.returned = await handler(at, ctx)
    except (KeyboardInterrupt, SystemExit):
        # Not the task's fault: the host is to close.
        raise
    except BaseException as caught:  # noqa: ASYNC103 - judged by the caller
        fatal = [e for e in leaves(caught) if isinstance(e, KeyboardInterrupt | SystemExit)]
        if fatal:
            raise fatal[0] from caught  # noqa: ASYNC104 - judged by the caller
        return caught  # noqa: ASYNC104 - judged by the caller
    return None


async def _step(
    runtime: Runtime, invocation: Invocation, phase: Phase, error: BaseException | ErrorInfo | None
) -> Phase | None:
    """Decide what follows a phase. See the module docstring for the order."""
    node = runtime.published.task(phase.task_id)
    if node is None or not invocation.runs(node):
        report_late(runtime, phase, error, "after its outcome or wait was stored, which stands")
        return None
    if runtime.closing or runtime.session.line.poison is not None:
        return None
    if not invocation.aborting and (node.marked or runtime.below_intent(node)):
        report_late(runtime, phase, error, "when it was aborted, and its abort goes on")
        return None
    if isinstance(error, BaseException):
        trouble = storage_trouble(error, runtime.session.storage.store)
        if trouble is not None:
            await _after_failed_read(runtime, invocation, trouble)
            return None
        if all(isinstance(leaf, trio.Cancelled) for leaf in leaves(error)):
            if trio.current_effective_deadline() == -math.inf:
                # Cancelled and neither marked nor closing: the host is being torn down.
                return None
            error = stray_cancellation(phase)
    committed = phase.reached
    if error is None and committed in (None, (phase.tag, phase.checkpoint)):
        if phase.storage_refused:
            invocation.again = True
            return None
        error = no_progress(phase, phase.returned)
    if error is not None:
        await write_fault(runtime, invocation, phase, error)
        return None
    if not runtime.session.confirmed():
        # A holder that cannot show a sign of life starts nothing; another may hold the session.
        invocation.again = True
        return None
    snapshot = runtime.snapshot()
    replacement = snapshot.definition(phase.info.name)
    if replacement is not None and replacement is not phase.definition:
        if runtime.can_take(replacement, node):
            await _hand_over(runtime, invocation, phase)
            return None
        runtime.report(phase.task_id, f"the new {phase.info.name} cannot take this task over")
    assert committed is not None
    tag, text = committed
    return Phase(
        task_id=phase.task_id,
        conversation_id=phase.conversation_id,
        definition=phase.definition,
        info=phase.info,
        snapshot=snapshot,
        number=phase.number,
        aborting=phase.aborting,
        woken_by=None,
        memos=phase.memos,
        tag=tag,
        checkpoint=text,
        input_text=phase.input_text,
    )


async def _after_failed_read(
    runtime: Runtime, invocation: Invocation, trouble: StorageTrouble
) -> None:
    """Leave the task at its checkpoint, uncharged, with its turn to come; damage blocks it."""
    if isinstance(trouble, StorageCorruptError):
        await _block(runtime, invocation, str(trouble), reason="unknown_record")
        return
    invocation.again = True
    if isinstance(trouble, StorageAccessError):
        # Commits may still go through, so nothing but this keeps it from trying without end.
        runtime.report(invocation.task_id, f"a read failed and is tried again: {trouble}")
        await trio.sleep(PROBE_SECONDS)


async def _block(
    runtime: Runtime, invocation: Invocation, why: str, *, reason: str = "checkpoint_unreadable"
) -> None:
    """Take a task that cannot be read off every path, with the reason stored.

    An abort is over where its definition cannot read the task: no code can take it.
    """

    @trio.lowlevel.enable_ki_protection
    def body(tx: TreeTransaction) -> None:
        if runtime.closing or not invocation.runs(tx.view.task(invocation.task_id)):
            return
        node = tx.view.edit_task(invocation.task_id)
        if invocation.aborting and reason == "checkpoint_unreadable":
            tx.settle(node, OutcomeRecord(status="orphaned", reason=reason))
            runtime.on_settled_by_scheduler(tx, node, "orphaned", None)
            return
        node.status = PENDING
        # A mark that came first lifts the reason: the abort looks for itself.
        node.blocked = reason if invocation.aborting or not node.marked else None
        tx.put_state(node)

    remedy = UNREADABLE_REMEDY if reason == "checkpoint_unreadable" else ""
    runtime.report(invocation.task_id, f"{reason}: {why}{remedy}")
    await write(runtime, invocation, body)


async def _hand_over(runtime: Runtime, invocation: Invocation, phase: Phase) -> None:
    """Back to pending with everything it has; the new code reserves and decodes it."""

    @trio.lowlevel.enable_ki_protection
    def body(tx: TreeTransaction) -> None:
        if runtime.closing or not invocation.runs(tx.view.task(phase.task_id)):
            return
        node = tx.view.edit_task(phase.task_id)
        node.status = PENDING
        node.ready_us = tx.now_us()
        tx.put_state(node)

    await write(runtime, invocation, body)
