"""The `async with ctx.commit() as tx` block of a task: one commit, counted while it is under way.

The step between two phases waits until no commit of the invocation is queued or in flight, so each
of them is counted from its first moment to its last, whatever ends it. Trouble of the storage is
noted on the phase: it is never the task's fault.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn

import trio
from typing_extensions import TypeVar

from pidurable.errors import (
    DefinitionError,
    InvocationEndedError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.tasks._mistakes import place_of
from pidurable.tasks._transaction import TaskTransaction

if TYPE_CHECKING:
    from pidurable.session._body import AsyncBody
    from pidurable.tasks._run import Phase
    from pidurable.tasks._runtime import Runtime

CheckpointT = TypeVar("CheckpointT", default=Any)
ResultT = TypeVar("ResultT", default=Any)


class TaskCommit(Generic[CheckpointT, ResultT]):
    """One commit of one phase. Made by `TaskContext.commit`; used once, with `async with`."""

    __slots__ = ("_body", "_phase", "_runtime")

    def __init__(self, runtime: Runtime, phase: Phase) -> None:
        self._runtime = runtime
        self._phase = phase
        self._body: AsyncBody[TaskTransaction[CheckpointT, ResultT]] | None = None

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> TaskTransaction[CheckpointT, ResultT]:
        phase = self._phase
        if phase.sealed:
            raise InvocationEndedError(phase.task_id, "its phase had returned")
        tx: TaskTransaction[CheckpointT, ResultT] = TaskTransaction(self._runtime, phase)
        body = self._runtime.session.line.body(tx, place=f"task {phase.task_id}")
        phase.in_flight += 1
        try:
            await body.__aenter__()
        except BaseException as error:
            self._landed(error)
            raise
        self._body = body
        try:
            tx.check_phase()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)  # noqa: ASYNC102
            raise
        return tx

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        assert self._body is not None
        raised = error
        try:
            return await self._body.__aexit__(kind, error, trace)  # noqa: ASYNC102 - shielded there
        except BaseException as caught:
            raised = caught
            raise
        finally:
            self._landed(raised)

    def _landed(self, error: BaseException | None) -> None:
        if isinstance(error, StorageRefusedError | SessionPoisonedError):
            self._phase.storage_refused = True
        self._phase.landed()

    if not TYPE_CHECKING:  # pragma: no branch
        # Type checkers know these mistakes as it is; without them, Python's own words do not help.

        def __await__(self) -> NoReturn:
            self._refuse("was awaited")

        def __enter__(self) -> NoReturn:
            self._refuse("was entered with a plain `with`")

        def __exit__(self, *args: object) -> None:
            """Never reached; Python looks for it before it calls `__enter__`."""

    def _refuse(self, how: str) -> NoReturn:
        raise DefinitionError(
            place_of(self._phase),
            f"`ctx.commit()` {how}, but it opens a block",
            "Write `async with ctx.commit() as tx:`, and in it `tx.goto(...)` and so on, which are "
            "not awaited.",
        )
