"""Two old releases of the definition of example 08, as they were when tasks were stored by them.

In life there is one file, and these are its history. They are kept here so that the example can
fill a store as old processes did. All three releases define the same kind, `shop.order`.
"""

from __future__ import annotations

from typing import Any

import attrs

from pidurable import Extension, Registry, Task, TaskContext, nothing_to_undo, phase


@attrs.frozen
class Waiting:
    """The money has not come."""


@attrs.frozen
class Paid:
    """It has."""


class Release1(Task[int, Waiting | Paid, str]):
    """The input is cents; in those days everybody paid in euros."""

    name = "shop.order"
    abort = nothing_to_undo

    def initial(self, cents: int) -> Waiting:
        return Waiting()

    @phase
    async def waiting(self, at: Waiting, ctx: TaskContext[int, Waiting | Paid, str]) -> None:
        await ctx.wait(then=Paid(), signals=True)

    @phase
    async def paid(self, at: Paid, ctx: TaskContext[int, Waiting | Paid, str]) -> None:
        await ctx.complete(f"{ctx.input} euro cents")


@attrs.frozen
class Price:
    cents: int
    currency: str


class Release2(Task[Price, Waiting | Paid, str]):
    """The input has a currency, so tasks of the first release need `migrate`."""

    name = "shop.order"
    version = 2
    abort = nothing_to_undo

    def initial(self, price: Price) -> Waiting:
        return Waiting()

    def migrate(self, input: int, checkpoint: object, from_version: int) -> object:
        return {"cents": input, "currency": "EUR"}, checkpoint

    @phase
    async def waiting(self, at: Waiting, ctx: TaskContext[Price, Waiting | Paid, str]) -> None:
        await ctx.wait(then=Paid(), signals=True)

    @phase
    async def paid(self, at: Paid, ctx: TaskContext[Price, Waiting | Paid, str]) -> None:
        await ctx.complete(f"{ctx.input.cents} {ctx.input.currency}")


def registry_with(release: Task[Any, Any, Any]) -> Registry:
    """The registry of a process that runs one of the releases."""
    registry = Registry()
    registry.install(Extension("shop", tasks=[release]))
    return registry
