"""Documents at their limits: deltas on a base, sizes, and what a change and a read cost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from session_support import Note, Place, new_conversation, open_place, open_test_session

from pidurable.errors import DocumentTooLargeError
from pidurable.records import _codec, _json, _patch
from pidurable.records._limits import DELTA_BYTES_MIN, DELTAS_MAX, Settings
from pidurable.session import _document_work, _documents
from pidurable.session._documents import document
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.storage import MemoryStorage, RevisionRow
from pidurable.testing import FaultyStorage

BOTH = pytest.mark.parametrize("name", ["memory reopened", "sqlite"])
LIMIT = 5_000
OVERHEAD = len(_json.dumps({"value": ""}))


@document("limit.box")
@attrs.define
class Box:
    value: Any = ""


@document("limit.box", version=2)
@attrs.define
class BoxV2:
    value: Any = ""

    @staticmethod
    def migrate(value: dict[str, Any], from_version: int) -> dict[str, Any]:
        return {"value": "m" * int(value["value"])}


@document("limit.past", history="rewindable")
@attrs.define
class Past:
    value: Any = ""


def all_revisions(storage: Any, name: str, scope_id: int) -> list[RevisionRow]:
    """Every stored revision of a document, not only those that a reader needs."""
    row = storage.document(name, 1, scope_id, "")
    assert row is not None
    found: list[RevisionRow] = []
    upto = 2**62
    while rows := storage.revisions(row.id, upto_seq=upto):
        found = rows + found
        upto = rows[0].seq - 1
    return found


def set_to(cls: type, conversation: int, value: Any) -> Callable[[Transaction], None]:
    return lambda tx: tx.patch(
        cls, conversation, [{"op": "replace", "path": "/value", "value": value}]
    )


async def create(session: Session, cls: Any, conversation: int, value: Any) -> None:
    async with session.body(session.transaction()) as tx:
        (await tx.document(cls, conversation)).value = value


# --- bases and deltas ---------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("cls", [Box, Past])
async def test_256_deltas_stand_on_a_base_and_the_next_is_a_base(
    name: str, cls: Any, tmp_path: Path
) -> None:
    """`latest` then drops what is before it, `rewindable` keeps every step of both."""
    document_name = cls.__pidurable_document__.name
    async with open_place(name.removesuffix(" reopened"), tmp_path) as place:
        conversation = (await place.run(lambda tx: tx.add_conversation())).id
        # Large enough that the number of deltas counts, and not their bytes.
        await create(await place.session(), cls, conversation, "x" * 30_000)
        for number in range(DELTAS_MAX):
            await place.run(set_to(cls, conversation, number), flush=False)
        session = await place.session(fresh=True)
        stored = all_revisions(session.storage, document_name, conversation)
        assert [row.base for row in stored] == [1] + [0] * DELTAS_MAX
        assert session.snapshot(cls, conversation).value == DELTAS_MAX - 1

        await place.run(set_to(cls, conversation, "more"))
        session = await place.session(fresh=True)
        after = all_revisions(session.storage, document_name, conversation)
        kept = [*stored, after[-1]] if cls is Past else [after[-1]]
        assert after == kept
        assert after[-1].base == 1
        assert session.snapshot(cls, conversation).value == "more"


@BOTH
@pytest.mark.parametrize(
    ("base", "letter"),
    [(100, "x"), (DELTA_BYTES_MIN, '"'), (DELTA_BYTES_MIN + 1, "é"), (9_001, "x")],
)
async def test_deltas_are_at_most_as_large_as_their_base_or_4_kib(
    name: str, base: int, letter: str, tmp_path: Path
) -> None:
    """In UTF-8 bytes, escapes counted: exactly so much is a delta, one byte more is a base."""
    delta = len(_json.dumps([{"op": "replace", "path": "/value", "value": ""}]))
    room = max(base, DELTA_BYTES_MIN)
    width = len(_json.dumps(letter).encode()) - 2

    def text(size: int) -> str:
        return letter * (size // width) + "y" * (size % width)

    async with open_place(name, tmp_path) as place:
        for more in (0, 1):
            conversation = (await place.run(lambda tx: tx.add_conversation())).id
            await create(await place.session(), Box, conversation, text(base - OVERHEAD))
            # Two deltas that fill the room together.
            await place.run(set_to(Box, conversation, text(30)))
            await place.run(set_to(Box, conversation, text(room - 30 - 2 * delta + more)))
            stored = all_revisions((await place.session()).storage, "limit.box", conversation)
            sizes = [len(row.value.encode()) for row in stored]
            if more:
                assert [row.base for row in stored] == [1]
                assert sizes == [room - 30 - 2 * delta + 1 + OVERHEAD]
            else:
                assert [row.base for row in stored] == [1, 0, 0]
                assert (sizes[0], sum(sizes[1:])) == (base, room)


async def test_a_rewindable_document_keeps_all_and_a_latest_one_its_tail() -> None:
    """After thousands of changes of every size a reader visits at most a base and 256 deltas."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        for cls in (Box, Past):
            await create(session, cls, conversation, "")
        for number in range(1_500):

            def change(tx: Transaction, number: int = number) -> None:
                for cls in (Box, Past):
                    tx.append_text(cls, conversation, "/value", f"{number} ")

            await session.run(session.transaction(), change)
        kept = all_revisions(storage, "limit.past", conversation)
        tail = all_revisions(storage, "limit.box", conversation)
        assert len(kept) == 1_501
        assert len(tail) <= DELTAS_MAX + 1
        for upto in (*range(1, kept[-1].seq, 97), kept[-1].seq):
            row = storage.document("limit.past", 1, conversation, "")
            assert row is not None
            assert len(storage.revisions(row.id, upto_seq=upto)) <= DELTAS_MAX + 1


# --- sizes --------------------------------------------------------------------------------------


async def by_creation(place: Place, conversation: int, size: int) -> None:
    await create(await place.session(), Box, conversation, "c" * (size - OVERHEAD))


async def by_draft(place: Place, conversation: int, size: int) -> None:
    await create(await place.session(), Box, conversation, "d" * (size - OVERHEAD))


async def by_patch(place: Place, conversation: int, size: int) -> None:
    await place.run(set_to(Box, conversation, "é" * 10 + "p" * (size - OVERHEAD - 20)))


async def by_append(place: Place, conversation: int, size: int) -> None:
    grown = size - OVERHEAD - len("begun")
    for part in (grown // 2, grown - grown // 2):
        await place.run(lambda tx, n=part: tx.append_text(Box, conversation, "/value", "a" * n))


async def by_copy(place: Place, conversation: int, size: int) -> None:
    """Two copies of one text, whose size is in no operation."""
    rest = size - OVERHEAD - len('["","","",""]') + len('""') - 3 * 1_000

    def copy(tx: Transaction) -> None:
        tx.patch(Box, conversation, [{"op": "copy", "from": "/value/0", "path": "/value/0"}])

    def begin(tx: Transaction) -> None:
        set_to(Box, conversation, ["k" * 1_000, "k" * rest])(tx)
        copy(tx)

    await place.run(begin)
    await place.run(copy)


async def by_migration(place: Place, conversation: int, size: int) -> None:
    await place.run(set_to(Box, conversation, str(size - OVERHEAD - 1)))
    await place.run(lambda tx: tx.append_text(BoxV2, conversation, "/value", "m"))


PATHS = [by_creation, by_draft, by_patch, by_append, by_copy, by_migration]


@BOTH
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
async def test_a_document_of_the_limit_is_stored_and_one_byte_more_is_refused(
    name: str, path: Any, tmp_path: Path
) -> None:
    """Whichever way it grew; the refused commit leaves what was there."""
    for more in (0, 1):
        settings = Settings(document_bytes_max=LIMIT)
        async with open_place(name, tmp_path, settings=settings) as place:
            conversation = (await place.run(lambda tx: tx.add_conversation())).id
            if path is not by_creation:
                await create(await place.session(), Box, conversation, "begun")
            if more:
                with pytest.raises(DocumentTooLargeError) as caught:
                    await path(place, conversation, LIMIT + 1)
                assert (caught.value.size_bytes, caught.value.bytes_max) == (LIMIT + 1, LIMIT)
            else:
                await path(place, conversation, LIMIT)
            cls = BoxV2 if path is by_migration and not more else Box
            found = (await place.session()).snapshot(cls, conversation)
            if found is None:
                assert path is by_creation
                assert more
            else:
                size = len(_json.dumps({"value": found.value}).encode())
                assert (size == LIMIT) is not bool(more)
                assert size <= LIMIT


@BOTH
async def test_what_a_copy_added_counts_in_later_changes(name: str, tmp_path: Path) -> None:
    """A document that earlier deltas doubled by copies is not grown beyond the limit by a text."""
    settings = Settings(document_bytes_max=10_000)
    async with open_place(name, tmp_path, settings=settings) as place:
        conversation = (await place.run(lambda tx: tx.add_conversation())).id
        await create(await place.session(), Box, conversation, ["z" * 3_000])
        for _ in range(2):
            await place.run(
                lambda tx: tx.patch(
                    Box, conversation, [{"op": "copy", "from": "/value/0", "path": "/value/-"}]
                )
            )
        stored = all_revisions((await place.session()).storage, "limit.box", conversation)
        assert [row.base for row in stored] == [1, 0, 0]
        with pytest.raises(DocumentTooLargeError):
            await place.run(lambda tx: tx.append_text(Box, conversation, "/value/0", "t" * 1_000))
        room = 10_000 - len(_json.dumps({"value": ["z" * 3_000] * 3}))
        await place.run(lambda tx: tx.append_text(Box, conversation, "/value/0", "t" * room))
        with pytest.raises(DocumentTooLargeError) as caught:
            await place.run(lambda tx: tx.append_text(Box, conversation, "/value/1", "t"))
        assert caught.value.size_bytes == 10_001


@pytest.mark.parametrize(("size", "reports"), [(3_000, 0), (3_001, 1)])
async def test_a_document_above_the_threshold_is_reported_once(
    size: int, reports: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of exactly the threshold it is not; one byte more is, once, also over changes and a copy."""
    caplog.set_level(logging.WARNING)
    storage = MemoryStorage()
    settings = Settings(document_report_bytes=3_000)
    for _ in range(2):
        async with open_test_session(storage.reopen(), settings=settings) as session:
            row = storage.document("limit.box", 1, 1, "")
            conversation = 1 if row is not None else await new_conversation(session)
            assert conversation == 1
            for letter in "abc":
                await create(session, Box, conversation, letter * (size - OVERHEAD))
    assert sum("has grown to" in record.getMessage() for record in caplog.records) == reports


# --- costs --------------------------------------------------------------------------------------


class Work:
    """Counts what is encoded, decoded, copied and compared of documents."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        self.whole: list[str] = []
        for module, name in (
            (_json, "dumps"),
            (_json, "loads_stored"),
            (_json, "check_json"),
        ):
            monkeypatch.setattr(module, name, self._counting(getattr(module, name)))
        for owner, name in (
            (_patch, "diff"),
            (_patch, "same"),
            (_codec.Codec, "encode"),
            (_codec.Codec, "decode"),
            (_document_work.DocumentWork, "_difference"),
            (_documents, "materialise"),
        ):
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _counting(self, function: Any) -> Any:
        def counted(value: Any, *args: Any, **named: Any) -> Any:
            found = function(value, *args, **named)
            self.bytes += len(found if isinstance(found, str) else str(value))
            return found

        return counted

    def _noting(self, name: str, function: Any) -> Any:
        def noted(*args: Any, **named: Any) -> Any:
            self.whole.append(name)
            return function(*args, **named)

        return noted


@pytest.mark.parametrize("size", [1_000, 1_000_000])
async def test_a_streamed_change_costs_the_change(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No whole value is encoded, decoded, compared or checked: bytes are equal at every size."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        await create(session, Box, conversation, {"text": "x" * size, "items": []})
        work = Work(monkeypatch)
        for number in range(20):

            def change(tx: Transaction, number: int = number) -> None:
                tx.append_text(Box, conversation, "/value/text", "more ")
                item = {"op": "add", "path": "/value/items/-", "value": {"n": number}}
                tx.patch(Box, conversation, [item])

            await session.run(session.transaction(), change)
        assert work.whole == []
        assert work.bytes < 20 * 400
        monkeypatch.undo()
        found = session.snapshot(Box, conversation)
        assert found is not None
        assert len(found.value["text"]) == size + 100
        assert found.value["items"][-1] == {"n": 19}


async def test_opening_a_session_reads_no_document() -> None:
    """What there is of documents is read when it is asked for, and kept after the first look."""
    memory = MemoryStorage()
    async with open_test_session(memory) as session:
        conversation = await new_conversation(session)
        for cls in (Box, Past):
            await create(session, cls, conversation, "stored")
        entry = await session.run(
            session.transaction(), lambda tx: tx.append(conversation, Note("later"))
        )
    storage = FaultyStorage(memory.reopen())
    async with open_test_session(storage) as session:
        for name in ("document", "documents", "revisions", "document_as_of", "documents_as_of"):
            assert storage.count(name) == 0
        for _ in range(3):
            assert session.snapshot(Box, conversation) == Box("stored")
        assert (storage.count("document"), storage.count("revisions")) == (1, 1)
        assert await session.snapshot_as_of(Past, conversation, entry) == Past("stored")
        assert storage.count("documents") == storage.count("documents_as_of") == 0
