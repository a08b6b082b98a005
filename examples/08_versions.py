"""A definition that evolves, while tasks that old releases stored are waiting to be finished.

Teaches: `version` with `migrate`; `phase_names`, for a renamed checkpoint; a default, which needs
neither. A build that meets a task of a newer one leaves it alone: it is blocked, not broken.

Run it with: python examples/08_versions.py
"""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from pidurable import Task, TaskContext, nothing_to_undo, open_harness, phase
from pidurable.testing import InlineBlocking

from releases import Price, Release1, Release2, registry_with


@attrs.frozen
class Unpaid:
    phase_names = ("unpaid", "waiting")  # it was called Waiting; the first name is written
    reminders: int = 0  # new, with a default


@attrs.frozen
class Settled:
    phase_names = ("settled", "paid")


class Order(Task[Price, Unpaid | Settled, str]):
    name = "shop.order"
    version = 3  # because release 2 cannot read these checkpoints
    abort = nothing_to_undo

    def initial(self, price: Price) -> Unpaid:
        return Unpaid()

    def migrate(self, input: Any, checkpoint: Any, from_version: int) -> tuple[Any, Any]:
        if from_version == 1:  # the input was a number of euro cents
            input = {"cents": input, "currency": "EUR"}
        return input, checkpoint  # as in {"phase": "paid", "value": {}}

    @phase
    async def unpaid(self, at: Unpaid, ctx: TaskContext[Price, Unpaid | Settled, str]) -> None:
        await ctx.wait(then=Settled(), signals=True)

    @phase
    async def settled(self, at: Settled, ctx: TaskContext[Price, Unpaid | Settled, str]) -> None:
        await ctx.complete(f"{ctx.input.cents} {ctx.input.currency} to release 3")


async def process(store: str, release: Task[Any, Any, Any], order: Any, *paid: int) -> None:
    logging.getLogger("pidurable").setLevel(logging.ERROR)  # it warns of what is blocked, and why
    inline, registry = InlineBlocking(), registry_with(release)
    async with open_harness(store, registry=registry, blocking=inline) as shop:
        if order is not None:
            await (await shop.root()).create_task(type(release), order)
        for number in paid:
            await shop.signal(shop.tasks()[number - 1].id, "paid")
        shop.start()
        await wait_all_tasks_blocked()  # till nothing moves
        for task in shop.tasks():
            state = task.outcome.result if task.outcome else task.blocked or task.status.word
            print(f"release {release.version}: an order of version {task.version}: {state}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trio.run(process, f"{folder}/shop.sqlite", Release1(), 1999)
        trio.run(process, f"{folder}/shop.sqlite", Release2(), Price(2500, "CHF"))
        trio.run(process, f"{folder}/shop.sqlite", Order(), Price(3000, "NOK"))
        trio.run(process, f"{folder}/shop.sqlite", Release2(), None, 3)  # it was taken back
        trio.run(process, f"{folder}/shop.sqlite", Order(), None, 1, 2)
