"""Mistakes in the payment example: each marked line must be one in both checkers."""

from __future__ import annotations

from typing import Protocol

import attrs

from pidurable import Registry, Task, TaskContext, nothing_to_undo, open_harness, phase


@attrs.frozen
class Card:
    number: str
    cents: int


@attrs.frozen
class Prepare:
    pass


@attrs.frozen
class Charge:
    key: str


@attrs.frozen
class Elsewhere:
    pass


@attrs.frozen
class Receipt:
    id: str


PaymentContext = TaskContext[Card, Prepare | Charge, Receipt]


class PaymentHooks(Protocol):
    async def before_charge(self, cents: int) -> str | None: ...


class Payment(Task[Card, Prepare | Charge, Receipt]):
    name = "shop.payment"
    hooks = PaymentHooks
    abort = nothing_to_undo

    def initial(self, card: Card) -> Prepare:
        return Prepare()

    @phase
    async def prepare(self, at: Prepare, ctx: PaymentContext) -> None:
        await ctx.goto(Elsewhere())  # error: not a member of the union
        await ctx.goto(Charge)  # error: the class, not an instance
        await ctx.complete("r1")  # error: not the result type
        print(ctx.input.amount)  # error: the input has no such field
        hooks: PaymentHooks = ctx.hooks
        await hooks.before_charge("1999")  # error: not what the question takes
        await hooks.before_refund(1999)  # error: no such question

    @phase
    async def charge(self, at: Charge, ctx: PaymentContext) -> None:
        async with ctx.commit() as tx:
            tx.goto(Elsewhere())  # error: not a member of the union
            tx.complete(Card("4242", 1))  # error: not the result type

    @phase  # error: a phase is async
    def settle(self, at: Charge, ctx: PaymentContext) -> None:
        pass


class WrongStart(Task[Card, Prepare, Receipt]):
    name = "shop.wrong_start"
    abort = nothing_to_undo
    version = "2"  # error: a version is a number

    def initial(self, card: Card) -> Charge:  # error: not a member of the union
        return Charge(key="k")


class Forgetful(Task[Card, Prepare, Receipt]):
    name = "shop.forgetful"

    def initial(self, card: Card) -> Prepare:
        return Prepare()


async def pay(registry: Registry) -> None:
    Forgetful()  # error: it has no abort
    async with open_harness(":memory:", registry=registry) as harness:
        root = await harness.root()
        await root.create_task(Payment, Prepare())  # error: not the input type
        await root.create_task(Payment, "4242")  # error: not the input type
        task_id = await root.create_task(Payment, Card("4242", 1999))
        outcome = await harness.wait_for_task(task_id)
        card: Card = outcome.result  # error: the result is a receipt
        print(card)


async def call_a_phase_directly(payment: Payment, ctx: PaymentContext) -> None:
    await payment.charge(Prepare(), ctx)  # error: that phase handles Charge
