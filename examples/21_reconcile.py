"""A tool that moves money, killed between its intent and its outcome: it asks what happened.

Teaches: `replay="reconcile"`. The call's key goes to the bank with the charge, so after a crash the
tool's own `reconcile` can ask the bank for it: a result if it happened, False if it did not (then
the call runs), None if nobody can tell (then the model is told that the outcome is unknown).

Run it with: python examples/21_reconcile.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import trio

from pidurable import AgentChange, Extension, Registry, ToolCall, ToolResult, open_harness, tool
from pidurable.testing import ScriptedCall, ScriptedModel, Step

from bank import Bank


def payments(bank: Bank, *, line_is_down: bool = False) -> Extension:
    async def ask_the_bank(arguments: Any, call: ToolCall) -> ToolResult | bool:
        key = call.key("charge")
        booked = any(line.startswith(f"charge {key} ") for line in bank.lines())
        print("asked the bank:", "it was booked" if booked else "it never came")
        return ToolResult(f"paid, card {arguments['card']}") if booked else False

    @tool(replay="reconcile", reconcile=ask_the_bank)
    async def pay(card: str, cents: int, call: ToolCall) -> str:
        """Charge a card."""
        if line_is_down:
            print("the line is down", flush=True)
            await trio.sleep(60)
        await bank.charge(call.key("charge"), card, cents)
        return f"paid, card {card}"

    return Extension("payments", tools=[pay])


async def live(folder: Path, card: str, extension: Extension) -> str:
    """Ask for the payment, or go on with the one that an earlier process has begun."""
    registry = Registry()
    registry.install(extension)
    call = ScriptedCall(name="pay", arguments={"card": card, "cents": 1999})
    models = ScriptedModel([Step(calls=(call,)), "It is paid."], name="clerk").models()
    async with open_harness(folder / f"{card}.sqlite", registry=registry, models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/clerk"))
        return (await (await root.submit("Pay the bill.", request_id="bill")).wait()).text


def main() -> None:
    if len(sys.argv) == 3:  # the process that will be killed: its bank books, and never answers
        folder, card = Path(sys.argv[1]), sys.argv[2]
        slow = payments(Bank(folder / "ledger", delays={card: 60}), line_is_down=card == "4343")
        trio.run(live, folder, card, slow)
        return
    with tempfile.TemporaryDirectory() as name:
        bank = Bank(Path(name) / "ledger")
        for card in ("4242", "4343"):
            command = [sys.executable, __file__, name, card]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                print("child:", child.stdout.readline().rstrip())
                child.kill()  # SIGKILL: nothing of it can clean up
            print("after the kill:", trio.run(live, Path(name), card, payments(bank)))
            charges = sum(f" {card} " in line for line in bank.lines())
            print(f"card {card} was charged {charges} time(s)")


if __name__ == "__main__":
    main()
