"""The other side of examples 01 and 02: a bank that keeps its books in a file of its own.

It stands for any service that takes an idempotency key: a key that was seen before is answered as
before and booked no second time. The file is what an auditor would look at, so that "charged once"
is counted there, and not taken from what our own store says.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from pathlib import Path

import trio


class CardDeclined(Exception):
    """The bank said no, for good."""


class Bank:
    """A bank with one ledger file: a line for each charge and each refund.

    Args:
        ledger: The file; created where it is missing.
        delays: Seconds until the bank answers, by card number. The charge is booked before the
            answer, as in life: who hangs up meanwhile has been charged all the same.
    """

    def __init__(self, ledger: Path, *, delays: Mapping[str, float] | None = None) -> None:
        self.ledger = ledger
        self.delays = dict(delays or {})
        self.charged = trio.Event()
        """Set once this object has booked a charge."""

    async def charge(self, key: str, card: str, cents: int) -> str:
        """Charge a card once per key and return the number of the receipt.

        Raises:
            CardDeclined: Cards that end in 0002 are declined.
        """
        declined = card.endswith("0002")
        if not declined and self.book("charge", key, f"{card} {cents}"):
            print(f"bank: charged {card}", flush=True)
            self.charged.set()
        await self.answer(card)
        if declined:
            raise CardDeclined(f"card {card} was declined")
        return f"R-{card}-{cents}"

    async def refund(self, key: str) -> None:
        """Give back what was charged under a key; nothing where nothing was, and never twice."""
        await trio.lowlevel.checkpoint()
        charges = [line for line in self.lines() if line.startswith(f"charge {key} ")]
        if charges and self.book("refund", key, charges[0].split(" ", 2)[2]):
            print(f"bank: refunded {charges[0].split(' ')[2]}", flush=True)

    async def answer(self, card: str) -> None:
        """Take as long as this bank takes to answer."""
        await trio.sleep(self.delays.get(card, 0.0))

    def lines(self) -> list[str]:
        """The books: `charge KEY CARD CENTS` and `refund KEY CARD CENTS`, oldest first."""
        return self.ledger.read_text().splitlines() if self.ledger.exists() else []

    def book(self, what: str, key: str, rest: str) -> bool:
        """Add a line unless this key has one already; say whether it was added."""
        with self.ledger.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # also against a client that is about to be killed
            if any(line.startswith(f"{what} {key} ") for line in self.lines()):
                return False
            file.write(f"{what} {key} {rest}\n")
        return True
