"""A task that owns tasks: four payments, one is declined, and nobody pays for half an order.

Teaches: creating owned tasks and waiting for them in one commit; `fail_fast` (the first that does
not complete aborts the others, which refund themselves); a follow-up for each that had completed,
created in the very commit that fails the checkout, so that neither is ever there alone.

Run it with: python examples/02_checkout.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import attrs
import trio

from pidurable import Task, TaskContext, TaskId, TaskRecord, nothing_to_undo, phase

from bank import Bank
from shop import Begin, Card, Payment, Receipt, Refund, open_shop


@attrs.frozen
class Settle:
    """Every payment has ended, one way or the other."""

    payments: list[TaskId[Receipt]]


CheckoutContext = TaskContext[list[Card], Begin | Settle, int]


class Checkout(Task[list[Card], Begin | Settle, int]):
    name = "shop.checkout"
    abort = nothing_to_undo  # its payments undo themselves

    def initial(self, cards: list[Card]) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: CheckoutContext) -> None:
        async with ctx.commit() as tx:
            ids = [tx.create_task(Payment, card, key=card.number) for card in ctx.input]
            tx.wait(on=ids, policy="fail_fast", then=Settle(ids))

    @phase
    async def settle(self, at: Settle, ctx: CheckoutContext) -> None:
        outcomes = await ctx.outcomes(at.payments)
        paid = [each.result for each in outcomes if each.status == "completed"]
        errors = [each.error.message for each in outcomes if each.error is not None]
        async with ctx.commit() as tx:
            if len(paid) == len(outcomes):
                tx.complete(sum(card.cents for card in ctx.input))
                return
            for receipt in paid:
                tx.create_task(Refund, receipt, conversation=ctx.conversation_id, key=receipt.id)
            tx.fail(errors[0] if errors else "a payment was aborted")


async def check_out(folder: Path, bank: Bank, cards: list[Card], **opts: Any) -> list[TaskRecord]:
    """Check out, or go on with what an earlier process began; returns all tasks, ended."""
    async with open_shop(folder, bank, Checkout(), **opts) as shop:
        await (await shop.root()).create_task(Checkout, cards, key="order-1")
        await shop.wait_for_idle()
        return shop.tasks()


if __name__ == "__main__":
    cart = [Card("4242", 1999), Card("4343", 500), Card("5555", 800), Card("4000-0002", 100)]
    with tempfile.TemporaryDirectory() as folder:
        bank = Bank(Path(folder) / "ledger", delays={"5555": 60, "4000-0002": 0.3})
        for task in trio.run(check_out, Path(folder), bank, cart):
            outcome = task.outcome
            assert outcome is not None
            print(f"{task.kind:14} {outcome.status:10}", outcome.reason or "", end="")
            print(outcome.error.message if outcome.error else "")
