"""Does a document cost what is changed in it, and reading it what it holds, however old it is?

One document keeps its newest value, another one every value it ever had. Both are changed 100,000
times, a commit each, and then read as a process reads them that has just been opened: from the
storage. That is compared with a document that was changed a thousand times, and with one that was
written once, each at every place that a chain of deltas can have. Then documents of 1 KiB to 1 MiB
grow by a line at a time, beside the same rows written by hand.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import attrs
import trio
from _raw import RawStore, Rows, Stopwatch, Table, percentile
from commit_line import open_session

from pidurable.records import _json
from pidurable.session._documents import Address, document
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.storage import Op, RevisionRow

ROUNDS = 5
CHANGES = 100_000
SHORT_CHANGES = 10_000
FEW = 1_000
"""Changes of a document that is young, and has its longest tail behind it all the same."""
PLACES = 32
BETWEEN = 9
"""Changes between two readings: 32 of them pass through a whole chain of deltas."""
READS = 10
SIZES = (1_024, 100 * 1_024, 1_024 * 1_024)
APPENDS = 200
LINE = "The quick brown fox jumps over the lazy dog, again.\n"
TEXT = "The quick brown fox jumps over the lazy dog. " * 5
_CONVERSATION_SCOPE = 1


@document("bench.latest")
@attrs.define
class Latest:
    """Encodes to about 600 B."""

    count: int = 0
    notes: list[str] = attrs.Factory(lambda: [TEXT, TEXT])


@document("bench.rewindable", history="rewindable")
@attrs.define
class Rewindable:
    """The same, and every value of it is kept."""

    count: int = 0
    notes: list[str] = attrs.Factory(lambda: [TEXT, TEXT])


@document("bench.text")
@attrs.define
class Text:
    """A text that grows."""

    text: str = ""


KINDS: tuple[type[Latest | Rewindable], ...] = (Latest, Rewindable)


def ops_of(number: int) -> list[dict[str, object]]:
    """One change: about 100 B of operations."""
    return [
        {"op": "replace", "path": "/count", "value": number},
        {"op": "replace", "path": "/notes/1", "value": TEXT[: number % 40]},
    ]


class Documents:
    """One conversation of a session, with a document that is changed over and over."""

    def __init__(self, session: Session, cls: type, conversation: int) -> None:
        self.payload = 0
        """Bytes of the operations so far."""
        self.marks: list[int] = []
        """Entries from about the middle of the first changes, over some whole chains of deltas."""
        self._session = session
        self._cls = cls
        self._conversation = conversation
        self._changes = 0

    @classmethod
    async def make(cls, session: Session, kind: type) -> Documents:
        async with session.body(session.transaction()) as tx:
            conversation = tx.add_conversation().id
            await tx.document(kind, conversation)
        return cls(session, kind, conversation)

    async def change(self, count: int) -> None:
        session, middle = self._session, self._changes + count // 2
        for _ in range(count):
            self._changes += 1
            ops = ops_of(self._changes)
            self.payload += len(_json.dumps(ops))
            await session.run(
                session.transaction(),
                lambda tx, ops=ops: tx.patch(self._cls, self._conversation, ops),  # type: ignore[misc]
            )
            due = middle + len(self.marks) * BETWEEN
            if self._changes == due and len(self.marks) < PLACES:
                self.marks.append(await session.run(session.transaction(), self._mark))

    def _mark(self, tx: Transaction) -> int:
        return tx.append(self._conversation, None, kind="bench.mark")

    def read(self) -> float:
        """Microseconds of reading it from the storage."""
        address = Address(
            self._cls.__pidurable_document__.name,  # type: ignore[attr-defined]
            _CONVERSATION_SCOPE,
            self._conversation,
            "",
        )
        watch = Stopwatch()
        for _ in range(READS):
            self._session._docs.clear()
            value = self._session.doc_value(address)
        us = watch.seconds() * 1e6 / READS
        if value["count"] != self._changes:
            raise RuntimeError(f"{value['count']} was read after {self._changes} changes")
        return us

    async def read_as_of(self, mark: int) -> float:
        """Microseconds of reading what it was in the middle."""
        watch = Stopwatch()
        for _ in range(READS):
            await self._session.snapshot_as_of(self._cls, self._conversation, self.marks[mark])
        return watch.seconds() * 1e6 / READS


async def read_all(session: Session, kind: type, changes: int, table: Table) -> Documents:
    """Change one document much, one little and one never, and read them in turns."""
    name = kind.__name__.lower()
    once = await Documents.make(session, kind)
    few = await Documents.make(session, kind)
    many = await Documents.make(session, kind)
    await few.change(FEW)
    await many.change(changes)
    for number in range(PLACES):
        parts = [
            (f"{name}, written once, read us", once),
            (f"{name}, {FEW:,} changes, read us", few),
            (f"{name}, {changes:,} changes, read us", many),
        ]
        for what, read in parts if number % 2 == 0 else reversed(parts):
            table.add(what, read.read())
        if kind is Rewindable:
            table.add(f"as of the middle of {FEW:,}, us", await few.read_as_of(number))
            table.add(f"as of the middle of {changes:,}, us", await many.read_as_of(number))
        await few.change(BETWEEN)
        await many.change(BETWEEN)
    return many


class RawAppends:
    """The rows of the lines by hand: a revision each, and the whole text now and then."""

    def __init__(self, path: Path) -> None:
        self._store = RawStore(path, full=False)

    def append(self) -> list[float]:
        """Microseconds of each."""
        times: list[float] = []
        for _ in range(APPENDS):
            watch = Stopwatch()
            self._store.commit([self._rows])
            times.append(watch.seconds() * 1e6)
        return times

    def _rows(self) -> Rows:
        ops = _json.dumps([{"op": "append", "path": "/text", "value": LINE}])
        return [(Op.REVISION, RevisionRow(1, self._store.seq, 0, 1, ops))]


async def append(session: Session, conversation: int) -> list[float]:
    """Microseconds of each commit that adds a line."""
    times: list[float] = []
    for _ in range(APPENDS):
        watch = Stopwatch()
        await session.run(
            session.transaction(), lambda tx: tx.append_text(Text, conversation, "/text", LINE)
        )
        times.append(watch.seconds() * 1e6)
    return times


async def append_all(session: Session, raw: RawAppends, table: Table) -> None:
    conversations: dict[int, int] = {}
    for size in SIZES:
        async with session.body(session.transaction()) as tx:
            conversations[size] = tx.add_conversation().id
            (await tx.document(Text, conversations[size])).text = "x" * size
    for number in range(ROUNDS):
        for size in SIZES if number % 2 == 0 else reversed(SIZES):
            times = await append(session, conversations[size])
            table.add(f"a line more at {size // 1_024:,} KiB, us", percentile(times, 0.5))
            table.add(f"the same, mean, {size // 1_024:,} KiB", sum(times) / len(times))
        table.add("a line more by hand, us", percentile(raw.append(), 0.5))


async def measure(folder: Path, changes: int) -> None:
    table = Table()
    stored: dict[str, float] = {}
    for kind in KINDS:
        name = kind.__name__.lower()
        path = folder / f"{name}.sqlite"
        async with open_session(path, "process") as session:
            payload = (await read_all(session, kind, changes, table)).payload
        # The log is moved into the file at the close.
        stored[name] = path.stat().st_size / payload
    raw = RawAppends(folder / "raw.sqlite")
    async with open_session(folder / "texts.sqlite", "process") as session:
        await append_all(session, raw, table)
    table.show()
    for name, ratio in stored.items():
        print(f"{name}: the file holds {ratio:.2f} times the bytes of its operations")

    def aged(what: str) -> float:
        # Their chains do not keep step, so what is compared are means over some whole chains.
        return table.mean(what.format(changes)) / table.mean(what.format(FEW))

    lines = [table.median(f"a line more at {size // 1_024:,} KiB, us") for size in SIZES]
    print(
        f"documents: latest_n={aged('latest, {:,} changes, read us'):.2f}"
        f" rewindable_n={aged('rewindable, {:,} changes, read us'):.2f}"
        f" as_of_n={aged('as of the middle of {:,}, us'):.2f}"
        f" read_us={table.median(f'latest, {changes:,} changes, read us'):.0f}"
        f" once_us={table.median('latest, written once, read us'):.0f}"
        f" append_100k={lines[1] / lines[0]:.2f} append_1m={lines[2] / lines[0]:.2f}"
        f" stored_latest={stored['latest']:.2f} stored_rewindable={stored['rewindable']:.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_CHANGES:,} changes")
    short = parser.parse_args().short
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, Path(folder), SHORT_CHANGES if short else CHANGES)
