"""The payment example of the manual: it must type-check as it stands, without casts."""

from __future__ import annotations

from typing import Protocol

import attrs

from pidurable import (
    Extension,
    Registry,
    Task,
    TaskContext,
    nothing_to_undo,
    open_harness,
    phase,
)


class CardDeclined(Exception):
    """The bank said no."""


@attrs.frozen
class Paid:
    id: str


class Bank(Protocol):
    async def charge(self, key: str, cents: int) -> Paid: ...
    async def refund(self, key: str) -> None: ...


@attrs.frozen
class ReceiptEntry:
    id: str


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


PaymentContext = TaskContext[Card, Prepare | Charge, Receipt]


class PaymentHooks(Protocol):
    async def before_charge(self, cents: int) -> str | None: ...


class Payment(Task[Card, Prepare | Charge, Receipt]):
    name = "shop.payment"
    version = 1
    hooks = PaymentHooks

    def __init__(self, bank: Bank) -> None:
        self.bank = bank

    def initial(self, card: Card) -> Prepare:
        return Prepare()

    @phase
    async def prepare(self, at: Prepare, ctx: PaymentContext) -> None:
        await ctx.goto(Charge(key=ctx.key("charge")))

    @phase
    async def charge(self, at: Charge, ctx: PaymentContext) -> None:
        hooks: PaymentHooks = ctx.hooks
        refusal = await hooks.before_charge(ctx.input.cents)
        if refusal is not None:
            await ctx.fail(refusal)
            return
        try:
            paid = await self.bank.charge(at.key, ctx.input.cents)
        except CardDeclined as declined:
            await ctx.fail(declined)
            return
        async with ctx.commit() as tx:
            tx.append(ctx.conversation_id, ReceiptEntry(paid.id))
            tx.complete(Receipt(paid.id))

    async def abort(self, at: Prepare | Charge, ctx: PaymentContext) -> None:
        if isinstance(at, Charge):
            await self.bank.refund(at.key)
        await ctx.end_aborted("the customer left")


class Ping(Task[None, Prepare, None]):
    """A definition without input, result or anything to undo."""

    name = "shop.ping"
    abort = nothing_to_undo

    def initial(self, input: None) -> Prepare:
        return Prepare()

    @phase
    async def prepare(self, at: Prepare, ctx: TaskContext[None, Prepare, None]) -> None:
        await ctx.complete(None)


async def pay(bank: Bank) -> str:
    registry = Registry()
    registry.install(Extension("shop", tasks=[Payment(bank), Ping()]))
    async with open_harness(":memory:", registry=registry) as harness:
        root = await harness.root()
        task_id = await root.create_task(Payment, Card("4242", 1999))
        outcome = await harness.wait_for_task(task_id)
        receipt: Receipt = outcome.result
        return receipt.id


async def call_a_phase_directly(payment: Payment, ctx: PaymentContext) -> None:
    """A phase is still a method with its own types after `@phase`."""
    await payment.charge(Charge(key="k"), ctx)
