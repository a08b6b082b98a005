"""A thousand tasks below one; the first answer of several; all of them or none.

Teaches: creating any number of owned tasks and waiting for them in one commit; the policies of a
join. `all_settled` waits; with `first_success` one that completes aborts the others, with
`fail_fast` one that does not. The parent always goes on when all have ended and are undone.

Run it with: python examples/07_fan_out.py
"""

from __future__ import annotations

from collections import Counter

import attrs
import trio

import pidurable
from pidurable import Extension, Registry, Task, TaskContext, TaskId, open_harness, phase


@attrs.frozen
class Start:
    pass


@attrs.frozen
class Count:
    children: list[TaskId[None]]


@attrs.frozen
class Plan:
    policy: pidurable.JoinPolicy
    seconds: list[float]  # how long each child works; after a negative time it fails


class Child(Task[float, Start, None]):
    name = "fan.child"
    abort = pidurable.nothing_to_undo

    def initial(self, seconds: float) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: TaskContext[float, Start, None]) -> None:
        await trio.sleep(abs(ctx.input))
        await (ctx.complete(None) if ctx.input >= 0 else ctx.fail("it broke"))


class Parent(Task[Plan, Start | Count, dict[str, int]]):
    name = "fan.parent"
    abort = pidurable.nothing_to_undo

    def initial(self, plan: Plan) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: TaskContext[Plan, Start | Count, dict[str, int]]) -> None:
        async with ctx.commit() as tx:  # all of them, and the wait, or nothing
            ids = [tx.create_task(Child, seconds) for seconds in ctx.input.seconds]
            tx.wait(on=ids, policy=ctx.input.policy, then=Count(ids))

    @phase
    async def count(self, at: Count, ctx: TaskContext[Plan, Start | Count, dict[str, int]]) -> None:
        await ctx.complete(Counter(each.status for each in await ctx.outcomes(at.children)))


async def main(*plans: Plan) -> None:
    registry = Registry()
    registry.install(Extension("fan", tasks=[Parent(), Child()]))
    async with open_harness(":memory:", registry=registry) as harness:
        for plan in plans:
            task_id = await (await harness.root()).create_task(Parent, plan)
            print(f"{plan.policy}: {(await harness.wait_for_task(task_id)).result}")


if __name__ == "__main__":
    race, strict = Plan("first_success", [60, -0.01, 0.3]), Plan("fail_fast", [0.001, 60, -0.3])
    trio.run(main, Plan("all_settled", [0.0] * 999 + [-0.001]), race, strict)
