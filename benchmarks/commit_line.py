"""What does a commit cost, alone and among a hundred, over the same rows written by hand?

A commit appends one typed entry (about 300 B) and changes one document (a revision): what a task
that makes progress and says so writes.
"""

from __future__ import annotations

import os
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio
from _raw import RawStore, Rows, Stopwatch, Table, interleave, percentile

from pidurable.records import _json
from pidurable.records._codec import Codec
from pidurable.records._entries import entry
from pidurable.records._limits import Settings
from pidurable.session._documents import document
from pidurable.session._seams import Failpoints, SystemClock, SystemRandomness, ThreadBlocking
from pidurable.session._session import Session, serving
from pidurable.session._transaction import Transaction
from pidurable.storage import (
    ConversationRow,
    DocumentRow,
    EntryRow,
    HolderClaim,
    Op,
    RevisionRow,
    SqliteStorage,
)

ROUNDS = 5
COMMITTERS = 100
SATURATED = 6_000
LONE_FULL = 400
LONE_NORMAL = 1_500
OFFERED_PER_SECOND = 1_000
OFFERED_SECONDS = 4
TEXT = "The quick brown fox jumps over the lazy dog. " * 5


@entry("bench.step")
@attrs.frozen
class Step:
    """Encodes to about 300 B."""

    number: int
    text: str
    done: bool
    share: float


@document("bench.state")
@attrs.define
class State:
    """Encodes to about 600 B."""

    count: int = 0
    notes: list[str] = attrs.Factory(lambda: [TEXT, TEXT])


@asynccontextmanager
async def open_session(path: Path, durability: str) -> AsyncIterator[Session]:
    clock = SystemClock()
    session = Session(
        SqliteStorage(path, durability="power" if durability == "power" else "process"),
        settings=Settings(),
        clock=clock,
        blocking=ThreadBlocking(),
        randomness=SystemRandomness(),
        failpoints=Failpoints(),
        claim=HolderClaim(
            holder_id="bench",
            host=socket.gethostname(),
            pid=os.getpid(),
            at_us=clock.now_us(),
            lease_seconds=15.0,
        ),
        takeover=False,
        durability=durability,
        inline=False,
        codec=Codec(),
    )
    async with serving(session):
        yield session
    await session.close(list)


async def prepare(session: Session, conversations: int) -> list[int]:
    made: list[int] = []
    for _ in range(conversations):
        async with session.body(session.transaction()) as tx:
            made.append(tx.add_conversation().id)
            await tx.document(State, made[-1])
    return made


def commit_body(conversation: int, number: int) -> Callable[[Transaction], int]:
    def body(tx: Transaction) -> int:
        tx.patch(State, conversation, [{"op": "replace", "path": "/count", "value": number}])
        return tx.append(conversation, Step(number, TEXT, number % 2 == 0, number / 7))

    return body


async def saturate(
    session: Session, conversations: list[int], total: int, ticker: list[float] | None = None
) -> float:
    """Commits per second of 100 committers that do nothing else."""
    each = total // COMMITTERS

    async def committer(conversation: int) -> None:
        for number in range(each):
            await session.run(session.transaction(), commit_body(conversation, number))

    async def tick(lags: list[float]) -> None:
        while True:
            watch = Stopwatch()
            await trio.sleep(0.001)
            lags.append((watch.seconds() - 0.001) * 1e3)

    async with trio.open_nursery() as nursery:
        if ticker is not None:
            nursery.start_soon(tick, ticker)
        watch = Stopwatch()
        async with trio.open_nursery() as committers:
            for conversation in conversations:
                committers.start_soon(committer, conversation)
        seconds = watch.seconds()
        nursery.cancel_scope.cancel()
    return each * COMMITTERS / seconds


async def alone(session: Session, conversation: int, total: int) -> float:
    """Median microseconds of a commit with nobody else about."""
    times: list[float] = []
    for number in range(total):
        watch = Stopwatch()
        await session.run(session.transaction(), commit_body(conversation, number))
        times.append(watch.seconds() * 1e6)
    return percentile(times, 0.5)


async def offered(session: Session, conversations: list[int]) -> list[float]:
    """Latencies in ms of commits that arrive at random, 1,000 a second."""
    latencies: list[float] = []
    draw = random.Random(8)

    async def one(conversation: int, number: int, due: float) -> None:
        await session.run(session.transaction(), commit_body(conversation, number))
        latencies.append((trio.current_time() - due) * 1e3)

    due = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(OFFERED_PER_SECOND * OFFERED_SECONDS):
            due += draw.expovariate(OFFERED_PER_SECOND)
            await trio.sleep_until(due)
            nursery.start_soon(one, conversations[number % len(conversations)], number, due)
    return latencies


class RawCommits:
    """The same commits by hand: the same values through the same codec and statements."""

    def __init__(self, path: Path, *, full: bool) -> None:
        self.store = RawStore(path, full=full)
        self._codec = Codec()
        self._next_id = 0
        clock = SystemClock()
        self._now = clock.now_us
        self.documents: list[tuple[int, int]] = []
        for _ in range(COMMITTERS):
            conversation, document_id = self._draw(), self._draw()
            self.documents.append((conversation, document_id))
            base = self._codec.encode_text(State())
            rows: Rows = [
                (
                    Op.CONVERSATION,
                    ConversationRow(
                        conversation, str(conversation), None, None, None, None, "", self._now()
                    ),
                ),
                (
                    Op.DOCUMENT,
                    DocumentRow(
                        document_id,
                        "bench.state",
                        1,
                        conversation,
                        "",
                        "latest",
                        "initial",
                        0,
                        None,
                    ),
                ),
                (Op.REVISION, RevisionRow(document_id, 0, 1, 1, base)),
            ]
            self.store.commit([lambda rows=rows: rows])  # type: ignore[misc]

    def _draw(self) -> int:
        self._next_id += 1
        return self._next_id

    def rows(self, place: int, number: int) -> Rows:
        conversation, document_id = self.documents[place]
        seq = self.store.seq
        ops = _json.dumps([{"op": "replace", "path": "/count", "value": number}])
        data = self._codec.encode_text(Step(number, TEXT, number % 2 == 0, number / 7))
        return [
            (
                Op.ENTRY,
                EntryRow(
                    self._draw(),
                    conversation,
                    seq,
                    "bench.step",
                    None,
                    None,
                    None,
                    None,
                    data,
                    self._now(),
                ),
            ),
            (Op.REVISION, RevisionRow(document_id, seq, 0, 1, ops)),
        ]

    def grouped(self, total: int, group: int) -> float:
        """Commits per second in transactions of `group`."""
        watch = Stopwatch()
        for first in range(0, total, group):
            self.store.commit(
                (lambda n=n: self.rows(n % COMMITTERS, n))  # type: ignore[misc]
                for n in range(first, first + group)
            )
        return total / watch.seconds()

    def alone(self, total: int) -> float:
        times: list[float] = []
        for number in range(total):
            watch = Stopwatch()
            self.store.commit([lambda number=number: self.rows(0, number)])  # type: ignore[misc]
            times.append(watch.seconds() * 1e6)
        return percentile(times, 0.5)


async def measure(folder: Path) -> None:
    table = Table()
    lags: list[float] = []
    raw_full = RawCommits(folder / "raw_full.sqlite", full=True)
    raw_normal = RawCommits(folder / "raw_normal.sqlite", full=False)
    async with (
        open_session(folder / "full.sqlite", "power") as full,
        open_session(folder / "normal.sqlite", "process") as normal,
    ):
        of_full = await prepare(full, COMMITTERS)
        of_normal = await prepare(normal, COMMITTERS)

        async def product(_: int) -> None:
            table.add("full c100, commits/s", await saturate(full, of_full, SATURATED))
            table.add("full c1, us", await alone(full, of_full[0], LONE_FULL))
            table.add("normal c1, us", await alone(normal, of_normal[0], LONE_NORMAL))

        async def reference(_: int) -> None:
            table.add("raw full groups of 32, commits/s", raw_full.grouped(SATURATED, 32))
            table.add("raw full c1, us", raw_full.alone(LONE_FULL))
            table.add("raw normal c1, us", raw_normal.alone(LONE_NORMAL))

        await interleave(ROUNDS, product, reference)
        await saturate(full, of_full, SATURATED, lags)
        latencies = await offered(full, of_full)
    raw_full.store.close()
    raw_normal.store.close()
    table.add("lag p99 at saturation, ms", percentile(lags, 0.99))
    table.add("open loop p50, ms", percentile(latencies, 0.5))
    table.add("open loop p99, ms", percentile(latencies, 0.99))
    table.show()
    ratio_full = table.ratio("full c100, commits/s", "raw full groups of 32, commits/s")
    ratio_normal = 1 / table.ratio("normal c1, us", "raw normal c1, us")
    print(
        f"commit_line: full_c100={ratio_full:.2f}"
        f" full_c1_us={table.difference('full c1, us', 'raw full c1, us'):.0f}"
        f" normal_c1={ratio_normal:.2f}"
        f" lag_p99_ms={percentile(lags, 0.99):.1f}"
        f" p50_ms={percentile(latencies, 0.5):.2f} p99_ms={percentile(latencies, 0.99):.2f}"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, Path(folder))
