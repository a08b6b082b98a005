"""Mistakes in waits, owned tasks and settings: each marked line must be one in both checkers."""

from __future__ import annotations

from datetime import timedelta

import attrs

from pidurable import Harness, Retry, Task, TaskContext, TaskId, nothing_to_undo, phase


@attrs.frozen
class Begin:
    pass


@attrs.frozen
class Collect:
    parts: tuple[TaskId[int], ...]


@attrs.frozen
class Elsewhere:
    pass


class Count(Task[str, Begin, int]):
    name = "sums.count"
    abort = nothing_to_undo
    retry = Retry(on=OSError)  # error: a tuple of errors
    on_fault = "ignore"  # error: fault, park or None

    def initial(self, text: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[str, Begin, int]) -> None:
        await ctx.complete(len(ctx.input))


SumContext = TaskContext[list[str], Begin | Collect, int]


class Sum(Task[list[str], Begin | Collect, int]):
    name = "sums.sum"
    version = "2"  # error: a number
    abort_timeout = "30 s"  # error: seconds

    def initial(self, texts: list[str]) -> None:  # error: it returns a checkpoint
        pass

    @phase
    async def begin(self, at: Begin, ctx: SumContext) -> None:
        later = ctx.now() + timedelta(hours=1)
        await ctx.wait(then=Elsewhere(), signals=True)  # error: no checkpoint of it
        await ctx.wait(then=Collect, signals=True)  # error: the class
        await ctx.wait(signals=True)  # error: nowhere to wake at
        await ctx.wait(then=Begin(), deadline=60)  # error: a moment, not seconds
        await ctx.wait(then=Begin(), deadline=timedelta(hours=1))  # error: a moment
        await ctx.wait(then=Begin(), on=[], policy="any")  # error: no such policy
        await ctx.wait(then=Begin(), on=["4"])  # error: ids are no texts
        await ctx.fail("no", result="0")  # error: not the result type
        await ctx.fail(404)  # error: an exception or a text
        await ctx.end_aborted(result="0")  # error: not the result type
        await ctx.create_task(Count, 5)  # error: not the input type
        await ctx.create_task(Count)  # error: no input
        await ctx.create_task("sums.count", "a")  # error: the class, not its name
        part = await ctx.create_task(Count, "a")
        text: str = (await ctx.wait_for_task(part)).result  # error: an int
        ctx.receive()  # error: only in a commit
        ctx.go_to(Begin())  # error: no such method
        print(text, later)

    @phase
    async def collect(self, at: Collect, ctx: SumContext) -> None:
        await ctx.commit()  # error: it opens a block
        with ctx.commit():  # error: async with
            pass
        async with ctx.commit() as tx:
            await tx.goto(Begin())  # error: not awaited
            ids: list[TaskId[str]] = [tx.create_task(Count, "a")]  # error: their results are ints
            tx.create_task(Count, "a", on_restart="never")  # error: go, wait or abort
            tx.create_task(Count, "a", deadline=60)  # error: a moment
            tx.complete("0")  # error: not the result type
            tx.wait(then=Elsewhere(), on=ids)  # error: no checkpoint of it
        outcomes = await ctx.outcomes(at.parts)
        print(outcomes[0].result.upper())  # error: an int
        if ctx.woken_by == "deadlin":  # error: no such cause
            pass

    @phase  # error: a phase returns nothing
    async def other(self, at: Begin, ctx: SumContext) -> Collect:
        return Collect(())

    async def abort(self, at: Collect, ctx: SumContext) -> None:  # error: of every checkpoint
        await ctx.end_aborted()


async def add_up(harness: Harness) -> None:
    root = await harness.root()
    await root.create_task(Sum, "a")  # error: not the input type
    await root.create_task(Sum(), ["a"])  # error: the class, not an instance
    task_id = await root.create_task(Sum, ["a"], on_restart="later")  # error: go, wait or abort
    result: str = (await harness.wait_for_task(task_id)).result  # error: an int
    print(result)
