"""TaskContext: all that the code of a task can do to its own state, and what it may look at.

A task changes only its own state, only through this object, only by committing. The object belongs
to one phase of one invocation: a commit that comes after that phase was decided is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast, final

import trio

from pidurable.errors import (
    InvalidArgumentError,
    InvocationEndedError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.records import _json
from pidurable.records._checks import check_is_list, check_name
from pidurable.records._ids import TaskId
from pidurable.records._tasks import JoinPolicy, OnRestart, Outcome, WokenBy
from pidurable.tasks._committed import CommittedState
from pidurable.tasks._definition import Task
from pidurable.tasks._hooks import (
    HookHandler,
    Hooks,
    ends_invocation,
    no_hooks,
    unknown_hook,
)
from pidurable.tasks._host import needs_harness, needs_models
from pidurable.tasks._phase import nearest
from pidurable.tasks._task_commit import TaskCommit
from pidurable.tasks._transaction import TaskTransaction

if TYPE_CHECKING:
    from pidurable.agent._models import Models
    from pidurable.harness._conversation import Conversation
    from pidurable.harness._submission import Submission
    from pidurable.records._limits import Settings
    from pidurable.registry._env import Env
    from pidurable.registry._snapshot import RegistrySnapshot
    from pidurable.session._document_watch import DocumentView
    from pidurable.session._watch import Watch
    from pidurable.tasks._host import Host
    from pidurable.tasks._run import Phase
    from pidurable.tasks._runtime import Runtime

InputT = TypeVar("InputT")
CheckpointT = TypeVar("CheckpointT")
DocT = TypeVar("DocT")
ResultT = TypeVar("ResultT")
ChildInputT = TypeVar("ChildInputT")
ChildResultT = TypeVar("ChildResultT")
T = TypeVar("T")


def _goto(tx: TaskTransaction[Any, Any]) -> None:
    tx.goto(tx._given)


@final
class TaskContext(Generic[InputT, CheckpointT, ResultT]):
    """What a phase, or the abort handler, of a task works with."""

    __slots__ = ("_input", "_phase", "_runtime")

    def __init__(self, runtime: Runtime, phase: Phase, input: InputT) -> None:
        self._runtime = runtime
        self._phase = phase
        self._input = input

    # --- what it knows -------------------------------------------------------------------

    @property
    def input(self) -> InputT:
        """The input that the task was created with."""
        return self._input

    @property
    def task_id(self) -> TaskId[ResultT]:
        return TaskId(self._phase.task_id)

    @property
    def conversation_id(self) -> int:
        return self._phase.conversation_id

    @property
    def woken_by(self) -> WokenBy | None:
        """What ended the wait before this phase; None where there was none.

        Of several that were due at once, the first of `tasks`, `signal` and `deadline`.
        """
        return cast("WokenBy | None", self._phase.woken_by)

    @property
    def abort_reason(self) -> str | None:
        """In an abort handler: why."""
        return self._runtime.abort_reason(self._phase.task_id)

    @property
    def settings(self) -> Settings:
        return self._runtime.session.settings

    @property
    def snapshot(self) -> CommittedState:
        """What is committed: records, entries and documents. Never what this commit stages."""
        phase = self._phase
        return CommittedState(
            self._runtime.session, task_id=phase.task_id, conversation_id=phase.conversation_id
        )

    def key(self, name: str) -> str:
        """This task's own stable identity for the outside, the same after every restart.

        Made of the session's uuid, the task's id and `name`, so that no two effects share it, also
        not with a copy of the store.

        Args:
            name: Which effect of this task; 1 to 512 characters.

        Raises:
            InvalidArgumentError: The name is no text, empty, or too long.
            NotJsonError: It holds a NUL or a lone surrogate.
        """
        return f"{self._runtime.session.uuid}:{self._phase.task_id}:{check_name(name, 'name')}"

    def now(self) -> datetime:
        """The wall clock, aware, in UTC. Fix it in a checkpoint before an effect uses it."""
        return datetime.fromtimestamp(self._runtime.session.clock.now_us() / 1e6, UTC)

    # --- what the harness adds -----------------------------------------------------------

    @property
    def registry(self) -> RegistrySnapshot:
        """What was installed when this phase began; it stays so until the next one.

        Raises:
            InvalidArgumentError: The session was opened without a harness.
        """
        registry: RegistrySnapshot | None = self._phase.snapshot.registry
        if registry is None:
            raise needs_harness("ctx.registry")
        return registry

    @property
    def models(self) -> Models:
        """The models that the harness was opened with.

        Raises:
            InvalidArgumentError: It was opened without models.
        """
        models = self._host("ctx.models").models
        if models is None:
            raise needs_models()
        return models

    def env(self) -> Env:
        """Files and processes, as the agent of the task's conversation sees them.

        Raises:
            InvalidArgumentError: The session was opened without a harness.
        """
        return self._host("ctx.env()").env(self._phase.conversation_id)

    def conversation(self, conversation_id: int | None = None) -> Conversation:
        """A handle of a conversation, to hand something in; the task's own where None.

        What is done through it are commits of their own. Give a submission a `request_id` made
        with `key`, so that it is handed in once however often the phase begins.

        Raises:
            InvalidArgumentError: The session was opened without a harness.
            NotFoundError: This session has no such conversation.
        """
        own = self._phase.conversation_id
        host = self._host("ctx.conversation()")
        return host.conversation(own if conversation_id is None else conversation_id)

    def submission(self, submission_id: int) -> Submission:
        """A handle of a submission: after a wait for it, `await handle.wait()` has the answer.

        Raises:
            InvalidArgumentError: The session was opened without a harness.
            NotFoundError: This session has no such submission.
        """
        return self._host("ctx.submission()").submission(submission_id)

    def _host(self, what: str) -> Host:
        host = self._runtime.host
        if host is None:
            raise needs_harness(what)
        return host

    # --- hooks ---------------------------------------------------------------------------

    @property
    def hooks(self) -> Any:
        """The questions of the definition's `hooks`, asked as its methods are called.

        Say `hooks: PaymentHooks = ctx.hooks` to have it typed; `hook` has an example.

        The handlers of the extensions that the task's conversation selects are asked in the order
        of installation, as they were when the phase began. A question that returns None tells
        every handler; of any other the first answer that is not None counts. A handler that raises
        is reported and skipped. Nobody is asked twice for the same answer but you: fix what a
        decision depends on with `memo`.

        Raises:
            InvalidArgumentError: The definition declares no hooks.
        """
        phase = self._phase
        if not phase.info.questions:
            raise no_hooks(phase.info.name)
        return Hooks(phase.info.questions, self.handlers, self.report, self.passes)

    def handlers(self, name: str) -> Sequence[HookHandler]:
        """The handlers of one hook, for a definition that combines their answers by its own rule.

        Args:
            name: The hook.

        Raises:
            InvalidArgumentError: The definition declares no hook of this name.
        """
        phase = self._phase
        if not phase.info.questions:
            raise no_hooks(phase.info.name)
        if name not in phase.info.questions:
            raise InvalidArgumentError("name", unknown_hook(name, phase.info.questions))
        if (phase.info.name, name) not in phase.snapshot.hooked:
            # Whichever are selected, none of them has any.
            return ()
        if phase.extensions is ...:
            host = self._runtime.host
            phase.extensions = None if host is None else host.extensions(phase.conversation_id)
        found: Sequence[HookHandler] = phase.snapshot.hooks(phase.info.name, name, phase.extensions)
        return found

    def passes(self, error: BaseException) -> bool:
        """Whether an error out of a handler, or a tool, is not its own fault and has to pass.

        So it is where the invocation is over (an abort, another invocation took the task), and
        where the session's own storage was in the way: raise it on, the phase begins again. Needed
        only by who calls `handlers` himself.
        """
        return ends_invocation(error, self._runtime.session.storage.store)

    # --- committing ----------------------------------------------------------------------

    def commit(self) -> AbstractAsyncContextManager[TaskTransaction[CheckpointT, ResultT]]:
        """Open one atomic commit: `async with ctx.commit() as tx`.

        The body must not wait for anything outside. An exception in it, cancellation included,
        stores nothing; once the block has ended the commit is awaited under a shield.

        Raises:
            AbortRequestedError: The task is marked for abort: return, `abort` comes next.
            InvocationEndedError: The outcome, a wait, or the end of the phase came first.
            StorageRefusedError: The storage refuses (disk full); the task stays at its checkpoint.
        """
        return TaskCommit(self._runtime, self._phase)

    if not TYPE_CHECKING:  # pragma: no branch

        def __getattr__(self, name: str) -> NoReturn:
            """Point at the transaction for what only a commit can do."""
            if name.startswith("_") or not callable(getattr(TaskTransaction, name, None)):
                hint = nearest(name, [each for each in dir(TaskContext) if each[0] != "_"])
                text = f"TaskContext has no attribute {name!r}.{hint}"
                raise AttributeError(text, name=name, obj=self)
            raise AttributeError(
                f"`{name}` is done in a commit: `async with ctx.commit() as tx:`, and in it "
                f"`tx.{name}(...)`",
                name=name,
            )

    async def _run(
        self, body: Callable[[TaskTransaction[CheckpointT, ResultT]], T], given: Any = None
    ) -> T:
        """Commit a body that awaits nothing.

        Args:
            body: A function; one of a module with `given` costs less than a closure.
            given: What it finds as `tx._given`.
        """
        phase = self._phase
        if phase.sealed:
            raise InvocationEndedError(phase.task_id, "its phase had returned")
        tx: TaskTransaction[CheckpointT, ResultT] = TaskTransaction(self._runtime, phase)
        if given is not None:
            tx._given = given
        phase.in_flight += 1
        try:
            return await self._runtime.session.line.run_sync(tx, body)
        except (StorageRefusedError, SessionPoisonedError):
            phase.storage_refused = True
            raise
        finally:
            phase.landed()

    async def goto(self, checkpoint: CheckpointT) -> None:
        """Commit the next checkpoint; its phase starts when this handler returns."""
        await self._run(_goto, checkpoint)

    async def complete(self, result: ResultT) -> None:
        """Commit the result and end. Return after it: nothing can be committed any more.

        What a handler does besides is not cancelled, but reported if it goes on for 10 s.
        """
        await self._run(lambda tx: tx.complete(result))

    async def fail(
        self, error: BaseException | str, *, detail: Any = None, result: ResultT | None = None
    ) -> None:
        """Commit a failure and end. What is owned and still live is aborted."""
        await self._run(lambda tx: tx.fail(error, detail=detail, result=result))

    async def end_aborted(
        self, reason: str | None = None, *, result: ResultT | None = None
    ) -> None:
        """Commit the aborted outcome; for abort handlers only."""
        await self._run(lambda tx: tx.end_aborted(reason, result=result))

    async def wait(
        self,
        *,
        then: CheckpointT,
        on: Sequence[int] | None = None,
        policy: JoinPolicy = "all_settled",
        deadline: datetime | None = None,
        signals: bool = False,
    ) -> None:
        """Park until what is waited for is there; the task wakes at `then`. Holds no memory.

        `on` takes tasks, submissions (until answered, or not to be) and conversations (until
        idle), by their ids; see `TaskTransaction.wait`.
        """
        await self._run(
            lambda tx: tx.wait(then=then, on=on, policy=policy, deadline=deadline, signals=signals)
        )

    async def memo(self, name: str, candidate: T) -> T:
        """Store `candidate` under `name` unless a value stands there; return the one that stands.

        Fixes what is random, timed or read from changing state before an effect depends on it.
        """
        memos = self._phase.memos
        name = check_name(name, "name")
        if name in memos and not self._phase.sealed:
            return _json.loads_stored(memos[name])  # type: ignore[no-any-return]
        return await self._run(lambda tx: tx.memo(name, candidate))

    async def create_task(
        self,
        definition: type[Task[ChildInputT, Any, ChildResultT]],
        input: ChildInputT,
        *,
        key: str | None = None,
        deadline: datetime | None = None,
        on_restart: OnRestart | None = None,
    ) -> TaskId[ChildResultT]:
        """Create a task owned by this one; with `key` it is created once and found again."""
        return await self._run(
            lambda tx: tx.create_task(
                definition, input, key=key, deadline=deadline, on_restart=on_restart
            )
        )

    # --- waiting and looking -------------------------------------------------------------

    async def wait_for_task(self, task_id: TaskId[ChildResultT]) -> Outcome[ChildResultT]:
        """Wait in memory until a task has ended. Holds this invocation; `wait` does not.

        Cancelling it changes nothing of that task; bound it with `trio.move_on_after`.

        Raises:
            UnknownTaskError: No such task.
            WaitCycleError: That task waits for this one.
            InvalidArgumentError: It is called in an abort handler.
        """
        if self._phase.aborting:
            raise InvalidArgumentError(
                "wait_for_task",
                "an abort handler may not wait: what was below its task has ended, and "
                "ctx.outcomes() reads it",
            )
        waits, waiter = self._runtime.waits, self._phase.task_id
        return await waits.for_task(task_id, waiter=waiter, timeout=None)

    async def outcomes(self, ids: Sequence[TaskId[ChildResultT]]) -> list[Outcome[ChildResultT]]:
        """The outcomes of ended tasks, in the order given.

        Raises:
            UnknownTaskError: No such task.
            NoResultError: One of them has not ended.
        """
        check_is_list(ids, "ids")
        return [self._runtime.outcome(id) for id in ids]

    def watch(
        self, cls: type[DocT], scope_id: int | None = None, *, key: str = ""
    ) -> AbstractAsyncContextManager[Watch[DocumentView[DocT] | None]]:
        """Watch a document in memory, for as long as the phase runs: `Harness.watch`.

        A restart begins the phase again and with it the watch; a task that is to hold no memory
        while it waits uses `wait(signals=True)`.

        Args:
            cls: A class declared with `@document`.
            scope_id: The conversation or task it belongs to; the task's own, or itself, where
                None. Not needed for the session's.
            key: Which one of a family.

        Raises:
            InvalidArgumentError: `cls` is no document class, `scope_id` no id, or the key is wrong.
        """
        own = self.snapshot._scope_id(cls, scope_id)
        return self._runtime.session.watch(cls, own, key=key)

    async def sleep(self, seconds: float) -> None:
        """Sleep in memory; a restart begins the phase again. `wait(deadline=)` is durable."""
        await trio.sleep(seconds)

    async def run_blocking(self, fn: Callable[..., T], *args: Any, abandon: bool = False) -> T:
        """Run a blocking call in a thread and wait for it, also when cancelled.

        A thread that was left behind would go on charging after the refund, so it is joined: an
        abort and a close wait for the call.

        Args:
            fn: The call; it must not use trio.
            args: What it gets.
            abandon: For reads: leave it behind when cancelled. It runs to its end all the same,
                unseen, and what it returns or raises then is dropped.
        """
        if abandon:
            return await self._runtime.blocking.run(fn, *args, abandon=True)
        return await self._runtime.blocking.run(fn, *args)

    def report(self, error: BaseException | str) -> None:
        """Report something that went wrong without ending the task."""
        self._runtime.report(self._phase.task_id, error)


Handler = Callable[[Any, TaskContext[Any, Any, Any]], Awaitable[None]]
