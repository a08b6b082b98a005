"""Waits, owned tasks, timers and limits as the manual writes them: checked without casts."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, Protocol

import attrs

from pidurable import (
    Harness,
    JoinPolicy,
    OnRestart,
    Outcome,
    OutcomeStatus,
    Retry,
    Settings,
    Task,
    TaskContext,
    TaskId,
    backoff,
    nothing_to_undo,
    phase,
)
from pidurable.testing import InlineBlocking, TrioClock


@attrs.frozen
class Begin:
    """Nothing has been created."""


@attrs.frozen
class Collect:
    """All of it has ended."""

    parts: tuple[TaskId[int], ...]
    report: TaskId[str] | None = None


class Count(Task[str, Begin, int]):
    name = "sums.count"
    abort = nothing_to_undo
    retry = Retry(on=(OSError, ConnectionError), tries=3)

    def initial(self, text: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[str, Begin, int]) -> None:
        await ctx.complete(len(ctx.input))


class Report(Task[None, Begin, str]):
    name = "sums.report"
    abort = nothing_to_undo
    on_fault = "park"
    abort_timeout = 30

    def initial(self, input: None) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[None, Begin, str]) -> None:
        await ctx.complete("done")


class SumHooks(Protocol):
    async def before_sum(self, parts: int) -> bool | None: ...


SumContext = TaskContext[list[str], Begin | Collect, int]


class Sum(Task[list[str], Begin | Collect, int]):
    name = "sums.sum"
    hooks = SumHooks

    def initial(self, texts: list[str]) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: SumContext) -> None:
        hooks: SumHooks = ctx.hooks
        policy: JoinPolicy = "fail_fast" if await hooks.before_sum(3) else "all_settled"
        later = ctx.now() + timedelta(seconds=backoff(1, base=60, seed=ctx.task_id))
        async with ctx.commit() as tx:
            parts = tuple(
                tx.create_task(Count, text, key=text, deadline=later, on_restart="go")
                for text in ctx.input
            )
            report = tx.create_task(Report, None, on_restart="wait")
            tx.wait(then=Collect(parts, report), on=parts, policy=policy, deadline=later)

    @phase
    async def collect(self, at: Collect, ctx: SumContext) -> None:
        woken_by: Literal["tasks", "signal", "deadline"] | None = ctx.woken_by
        if woken_by == "deadline":
            await ctx.fail("too slow", detail={"parts": len(at.parts)}, result=0)
            return
        outcomes: list[Outcome[int]] = await ctx.outcomes(at.parts)
        if at.report is not None:
            text: str = (await ctx.wait_for_task(at.report)).result
            print(text)
        partial: int | None = outcomes[0].partial
        await ctx.complete(sum(each.result for each in outcomes) + (partial or 0))

    async def abort(self, at: Begin | Collect, ctx: SumContext) -> None:
        await ctx.end_aborted("nobody needs it", result=0)


async def add_up(harness: Harness, on_restart: OnRestart) -> int:
    root = await harness.root()
    task_id = await root.create_task(Sum, ["a", "bc"], key="sum", on_restart=on_restart)
    async with harness.commit() as tx:
        other: TaskId[str] = tx.create_task(Report, None, conversation=root.id, background=True)
        tx.signal(task_id, "hurry", {"by": 5}, key="hurry-1")
    print((await harness.wait_for_task(other)).result.upper())
    outcome = await harness.wait_for_task(task_id)
    status: OutcomeStatus = outcome.status
    return outcome.result if status == "completed" else 0


SETTINGS = Settings(running_max=10, limits={Count.name: 2})
SEAMS = (TrioClock(), InlineBlocking())
