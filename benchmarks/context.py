"""Does the context of a conversation cost one entry after one more entry, however long it is?

Conversations of 10 and of 100,000 entries, all in range, grow an entry at a time: what is asked, an
answer with a call, its result, an answer. After each the context is taken and its last message
looked at. Timed are the commit together with that, since a part of the work is done when the entry
is published, and the taking alone. The reference derives the same context from scratch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import trio
from _raw import Stopwatch, Table, percentile
from _transcripts import KINDS, TURN, message_of, seed_transcripts
from commit_line import open_session

from pidurable.records._messages import Message
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.session._transcript import exchange

ROUNDS = 15
SCRATCH_ROUNDS = 3
FEW, MANY = 10, 100_000
SHORT_MANY = 10_000
EACH = 40
"""Entries of a round: few enough that a short transcript stays short."""


class Growing:
    """A conversation that grows from a round on."""

    def __init__(self, session: Session, conversation: int, size: int) -> None:
        self._session = session
        self._conversation = conversation
        self._size = size

    @classmethod
    async def short(cls, session: Session) -> Growing:
        """A new one of ten entries."""

        def body(tx: Transaction) -> int:
            conversation = tx.add_conversation().id
            entry = 0
            for number in range(FEW):
                message = message_of(number, entry + 1)
                entry = tx.append(conversation, kind=KINDS[number % TURN], messages=[message])
            return conversation

        return cls(session, await session.run(session.transaction(), body), FEW)

    async def grow(self) -> tuple[float, float]:
        """Microseconds of one more entry with its context, and of taking the context alone."""
        session = self._session
        both: list[float] = []
        taking: list[float] = []
        entry = (await session.context(self._conversation)).cutoff
        for _ in range(EACH):
            # The result of a call is the next entry after it.
            number, message = self._size, message_of(self._size, entry + 1)

            def body(tx: Transaction, number: int = number, message: Message = message) -> int:
                return tx.append(self._conversation, kind=KINDS[number % TURN], messages=[message])

            watch = Stopwatch()
            entry = await session.run(session.transaction(), body)
            between = watch.seconds()
            context = await session.context(self._conversation)
            last = context[-1]
            taking.append((watch.seconds() - between) * 1e6)
            both.append(watch.seconds() * 1e6)
            self._size += 1
            if context.cutoff != entry or last.entry != entry:
                raise RuntimeError(f"{last} is the last message after entry {entry}")
        return percentile(both, 0.5), percentile(taking, 0.5)

    async def scratch(self) -> float:
        """Microseconds of deriving it from its entries."""
        entries = await self._session.context_entries(self._conversation)
        watch = Stopwatch()
        made = exchange(entries)
        us = watch.seconds() * 1e6
        if len(made) != self._size:
            raise RuntimeError(f"{len(made)} messages of {self._size} entries")
        return us


async def measure(folder: Path, size: int) -> None:
    table = Table()
    path = folder / "context.sqlite"
    [conversation] = seed_transcripts(path, [size])
    async with open_session(path, "process") as session:
        many = Growing(session, conversation, size)
        await many.grow()
        await (await Growing.short(session)).grow()

        async def add(name: str, growing: Growing) -> None:
            both, taking = await growing.grow()
            table.add(f"{name}, entry and context, us", both)
            table.add(f"{name}, context, us", taking)

        for number in range(ROUNDS):
            few = await Growing.short(session)
            parts = [(f"{FEW} entries", few), (f"{size:,} entries", many)]
            for name, growing in parts if number % 2 == 0 else reversed(parts):
                await add(name, growing)
            if number < SCRATCH_ROUNDS:
                table.add(f"{size:,} entries, from scratch, us", await many.scratch())
    table.show()
    whole = table.ratio(
        f"{size:,} entries, entry and context, us", f"{FEW} entries, entry and context, us"
    )
    alone = table.ratio(f"{size:,} entries, context, us", f"{FEW} entries, context, us")
    scratch = table.median(f"{size:,} entries, from scratch, us")
    scratch /= table.median(f"{size:,} entries, context, us")
    print(f"context: n_ratio={whole:.2f} taking={alone:.2f} scratch={scratch:.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_MANY:,} entries")
    short = parser.parse_args().short
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, Path(folder), SHORT_MANY if short else MANY)
