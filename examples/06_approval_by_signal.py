"""An expense that a person has to approve: by a signal, in time, and however often they click.

Teaches: a wait that ends at the first unread signal or at a deadline, and `woken_by`, which says
which it was; `tx.receive`, which takes signals in the very commit that acts on them, so that none
is lost or counted twice; a signal with a key, which is stored once.

Run it with: python examples/06_approval_by_signal.py
"""

from __future__ import annotations

from datetime import datetime, timedelta

import attrs
import trio

from pidurable import Extension, Registry, Task, TaskContext, nothing_to_undo, open_harness, phase
from pidurable.errors import TaskEndedError


@attrs.frozen
class Ask:
    """Nobody has been asked."""


@attrs.frozen
class Decide:
    """Somebody has said something, or the time is up."""

    until: datetime
    comments: tuple[str, ...] = ()


class Expense(Task[float, Ask | Decide, str]):  # the input: how many seconds there are to decide
    name = "office.expense"
    abort = nothing_to_undo

    def initial(self, seconds: float) -> Ask:
        return Ask()

    @phase
    async def ask(self, at: Ask, ctx: TaskContext[float, Ask | Decide, str]) -> None:
        until = ctx.now() + timedelta(seconds=ctx.input)
        await ctx.wait(then=Decide(until), signals=True, deadline=until)

    @phase
    async def decide(self, at: Decide, ctx: TaskContext[float, Ask | Decide, str]) -> None:
        comments = at.comments
        async with ctx.commit() as tx:
            for name, payload in tx.receive():
                if name == "decision":
                    tx.complete(f"{payload}, comments: {', '.join(comments) or 'none'}")
                    return
                comments += (payload,)
            if ctx.woken_by == "deadline":
                tx.fail("nobody decided in time")
            else:  # a comment decides nothing: wait on, for the rest of the time
                tx.wait(then=Decide(at.until, comments), signals=True, deadline=at.until)


async def main() -> None:
    registry = Registry()
    registry.install(Extension("office", tasks=[Expense()]))
    async with open_harness(":memory:", registry=registry) as harness:
        root = await harness.root()
        lunch, yacht = await root.create_task(Expense, 60), await root.create_task(Expense, 0.2)
        for _ in range(2):  # a double click: the same key, so one comment
            await harness.signal(lunch, "comment", "was it good?", key="form-1")
        await harness.signal(lunch, "decision", "approved by Ada")
        print("lunch:", (await harness.wait_for_task(lunch)).result)
        print("yacht:", (await harness.wait_for_task(yacht)).status)
        try:
            await harness.signal(yacht, "decision", "approved by Bob")
        except TaskEndedError as late:
            print("too late:", late)


if __name__ == "__main__":
    trio.run(main)
