"""The task definitions of examples 01 and 02: a payment, and its refund.

A task is a state machine, and every step is one atomic commit. Its checkpoints are plain frozen
classes; `@phase` binds a method to the class in the annotation of `at`. The rule for an effect in
the outside world: commit the intent first (with a key), then act under that key, then commit the
outcome. Whatever line the process dies at, the key makes the second attempt harmless.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import attrs

from pidurable import (
    Extension,
    Harness,
    Registry,
    Task,
    TaskContext,
    entry,
    nothing_to_undo,
    open_harness,
    phase,
)

from bank import Bank, CardDeclined


@attrs.frozen
class Card:
    number: str
    cents: int


@attrs.frozen
class Prepare:
    """Nothing has happened yet."""


@attrs.frozen
class Charge:
    """The charge may have been sent under `key`."""

    key: str


@attrs.frozen
class Receipt:
    id: str
    key: str


@entry("shop.receipt")
@attrs.frozen
class ReceiptEntry:
    """What a person finds in the conversation afterwards."""

    id: str


PaymentContext = TaskContext[Card, Prepare | Charge, Receipt]


class Payment(Task[Card, Prepare | Charge, Receipt]):
    name = "shop.payment"
    version = 1

    def __init__(self, bank: Bank) -> None:
        self.bank = bank

    def initial(self, card: Card) -> Prepare:
        return Prepare()

    @phase
    async def prepare(self, at: Prepare, ctx: PaymentContext) -> None:
        await ctx.goto(Charge(key=ctx.key("charge")))  # the intent, before the effect

    @phase
    async def charge(self, at: Charge, ctx: PaymentContext) -> None:
        try:
            paid = await self.bank.charge(at.key, ctx.input.number, ctx.input.cents)
        except CardDeclined as declined:
            await ctx.fail(declined)
            return
        async with ctx.commit() as tx:  # the outcome, atomic with its entry
            tx.append(ctx.conversation_id, ReceiptEntry(paid))
            tx.complete(Receipt(paid, at.key))

    async def abort(self, at: Prepare | Charge, ctx: PaymentContext) -> None:
        if isinstance(at, Charge):  # it may have been charged, so make sure that it is not
            await self.bank.refund(at.key)
        await ctx.end_aborted("the customer left")


@attrs.frozen
class Begin:
    """The only step has not been made."""


class Refund(Task[Receipt, Begin, None]):
    name = "shop.refund"
    abort = nothing_to_undo

    def __init__(self, bank: Bank) -> None:
        self.bank = bank

    def initial(self, receipt: Receipt) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[Receipt, Begin, None]) -> None:
        await self.bank.refund(ctx.input.key)
        await ctx.complete(None)


def open_shop(
    folder: Path, bank: Bank, *more: Task[Any, Any, Any], **options: Any
) -> AbstractAsyncContextManager[Harness]:
    """Open the shop's store with its definitions installed, as every process that works must."""
    registry = Registry()
    registry.install(Extension("shop", tasks=[Payment(bank), Refund(bank), *more]))
    return open_harness(folder / "shop.sqlite", registry=registry, **options)
