"""One task, three lives: run to the end, aborted, and resumed after a kill.

Teaches: creating a task, waiting for its outcome, aborting it (its `abort` undoes what it did),
and that a killed process is nothing special: open the store again, and the work goes on.

Run it with: python examples/01_payment.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import trio

from pidurable import Outcome

from bank import Bank
from shop import Card, Payment, open_shop


async def pay(folder: Path, bank: Bank, card: Card, **options: Any) -> Outcome[Any]:
    """Pay, or go on with the payment of this card that an earlier process has begun."""
    async with open_shop(folder, bank, **options) as shop:
        root = await shop.root()
        task_id = await root.create_task(Payment, card, key=f"order-{card.number}")
        return await shop.wait_for_task(task_id)


async def leave_in_the_middle(folder: Path, card: Card) -> Outcome[Any]:
    """Abort a payment whose bank takes its time: what was charged is given back."""
    bank = Bank(folder / "ledger", delays={card.number: 60})
    async with open_shop(folder, bank) as shop:
        task_id = await (await shop.root()).create_task(Payment, card)
        await bank.charged.wait()
        await shop.abort_task(task_id)
        return await shop.wait_for_task(task_id)


def kill_in_the_middle(folder: Path, card: Card) -> None:
    """Start this file again as the process that pays, and kill it once the bank has charged."""
    command = [sys.executable, __file__, str(folder), card.number, str(card.cents)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        print("child", child.stdout.readline().rstrip())
        child.kill()  # SIGKILL: nothing of it can clean up


def main() -> None:
    if len(sys.argv) == 4:  # the process that will be killed: its bank is slow
        folder, card = Path(sys.argv[1]), Card(sys.argv[2], int(sys.argv[3]))
        trio.run(pay, folder, Bank(folder / "ledger", delays={card.number: 60}), card)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bank = Bank(folder / "ledger")
        print("paid:", trio.run(pay, folder, bank, Card("4242", 1999)).result)
        print("left:", trio.run(leave_in_the_middle, folder, Card("4343", 500)).status)
        kill_in_the_middle(folder, Card("4444", 2500))
        print("after the kill:", trio.run(pay, folder, bank, Card("4444", 2500)).result.id)
        charged = sum(line.startswith("charge ") and " 4444 " in line for line in bank.lines())
        print(f"card 4444 was charged {charged} time(s)")


if __name__ == "__main__":
    main()
