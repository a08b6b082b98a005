"""Blobs: what is large lies apart, is stored once, read when it is looked at, and never guessed."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from session_support import Note, new_conversation, open_test_session, queued_input
from transcript_support import result, user

from pidurable.errors import InvalidArgumentError, NotFoundError, StorageCorruptError
from pidurable.records._entries import Edit, Entry, entry
from pidurable.records._limits import BLOB_BYTES_MIN, Settings
from pidurable.records._messages import ImageBlock, TextBlock, UserMessage
from pidurable.session._blobs import (
    _MOVED,
    SHORT_CHARACTERS,
    are_short,
    followed,
    moved_blobs,
    with_blobs,
)
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.storage import Batch, EntryRow, MemoryStorage, Op

PNG = b"\x89PNG\r\n\x1a\n"


@entry("test.large")
@attrs.frozen
class Large:
    text: str


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Counting(MemoryStorage):
    """A storage that counts reads of blobs."""

    def __init__(self) -> None:
        super().__init__()
        self.blob_reads = 0

    def blob(self, sha256: str) -> bytes | None:
        self.blob_reads += 1
        return super().blob(sha256)


async def append(session: Session, conversation: int, value: object = None, **options: Any) -> int:
    made: int = await session.run(
        session.transaction(), lambda tx: tx.append(conversation, value, **options)
    )
    return made


def raw(storage: MemoryStorage, entry_id: int) -> EntryRow:
    """An entry as it lies in the storage itself."""
    row = storage.reopen().entry(entry_id)
    assert row is not None
    return row


# --- the limit --------------------------------------------------------------------------------


@pytest.mark.parametrize("character", ["x", "ü", "🙂"])
async def test_a_value_of_64_kib_stays_and_one_byte_more_moves(character: str) -> None:
    """What counts are the bytes of its JSON text; it reads the same either way."""
    storage = MemoryStorage()
    room = BLOB_BYTES_MIN - len('{"text":""}')
    text = character * (room // len(character.encode()))
    text += "x" * (room - len(text.encode()))
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        stays = await append(session, conversation, Large(text))
        moves = await append(session, conversation, Large(text + "x"))
        kept = await session.history(conversation)
        assert [each.read(Large).text for each in kept] == [text, text + "x"]
    kept_row, moved_row = raw(storage, stays), raw(storage, moves)
    async with open_test_session(storage.reopen()) as session:
        read = await session.history(conversation)
        assert [each.read(Large).text for each in read] == [text, text + "x"]
        assert read == kept

    assert len(str(kept_row.data).encode()) == BLOB_BYTES_MIN
    moved = f'{{"text":"{text}x"}}'.encode()
    assert moved_row.data == f"@{sha256(moved)}"
    assert storage.reopen().blob(sha256(moved)) == moved


async def test_every_part_of_an_entry_and_a_submission_moves_by_itself() -> None:
    """Messages, data, edits and content each move alone; the rest of the row stays."""
    large = "y" * BLOB_BYTES_MIN
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        first = await append(session, conversation, Note("small"), messages=[user(large)])
        edit = Edit(target=first, messages=(user(large + "z"),))
        second = await append(session, conversation, Large(large), edits=[edit])
        queued = queued_input(conversation, [large], request_id="r")
        submission = await session.run(session.transaction(), queued)
    rows = [raw(storage, first), raw(storage, second)]
    stored = storage.reopen().submission(submission)
    async with open_test_session(storage.reopen()) as session:
        entries = await session.history(conversation)
        found = session.submission(submission)
        by_request = session.storage.submission_by_request(conversation, "r")
        opened = session.staged_open_submissions(conversation)
        assert entries[0].messages == (user(large),)
        assert entries[1].read(Large) == Large(large)
        assert entries[1].edits == (edit,)

    assert [(str(row.messages)[:1], str(row.data)[:1], str(row.edits)[:1]) for row in rows] == [
        ("@", "{", "N"),
        ("N", "@", "@"),
    ]
    assert stored is not None
    assert stored.content.startswith("@")
    assert found is not None
    assert found.content == [large]
    assert opened == {submission: found}
    assert by_request is not None
    assert by_request.content == f'["{large}"]'


async def test_the_same_bytes_are_stored_once() -> None:
    """Two entries with the same large data, and a blob of its own, share one blob."""
    storage = MemoryStorage()
    text = "z" * BLOB_BYTES_MIN
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        ids = [await append(session, conversation, Large(text)) for _ in range(2)]
        name = await session.run(
            session.transaction(), lambda tx: tx.put_blob(f'{{"text":"{text}"}}'.encode())
        )

    assert {raw(storage, id).data for id in ids} == {f"@{name}"}
    assert len(storage._data.blobs) == 1


# --- reading ----------------------------------------------------------------------------------


async def test_what_nobody_looks_at_is_not_read() -> None:
    """A page reads no blob; looking reads one, once; a context reads messages and no data."""
    storage = Counting()
    text = "a" * BLOB_BYTES_MIN
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        for number in range(3):
            said = [user(f"{number}{text}")]
            await append(session, conversation, Large(f"{number}{text}"), messages=said)
        storage.blob_reads = 0

        page = await session.history(conversation)
        assert storage.blob_reads == 0
        assert "messages=<not read>, data=<not read>" in repr(page[1])
        assert storage.blob_reads == 0
        assert page[1].read(Large).text == f"1{text}"
        assert page[1].data == {"text": f"1{text}"}
        assert storage.blob_reads == 1
        assert "data={'text': '1aaa" in repr(page[1])
        assert attrs.evolve(page[0], at_us=0) != page[0]

        storage.blob_reads = 0
        assert len(await session.context(conversation)) == 3
        assert storage.blob_reads == 3


async def test_entries_are_equal_by_value_wherever_the_value_lies() -> None:
    """An entry just published, one read back, and one that was looked at are equal."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        await session.context_entries(conversation)
        made = await append(session, conversation, Large("b" * BLOB_BYTES_MIN))
        (published,) = await session.context_entries(conversation)
        (read,) = await session.history(conversation)
        row = session.storage.entry(made)
        assert row is not None
        again = session.entry_of(row)

        assert published == read == again
        assert read != attrs.evolve(again, data={"text": "c"})


async def test_a_pickled_entry_is_whole_without_its_store() -> None:
    """What lies apart comes along, the session does not, and `read` knows the plain types."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        await append(session, conversation, Large("p" * BLOB_BYTES_MIN), messages=[user("hello")])
        (read,) = await session.history(conversation)
        (looked_at,) = await session.history(conversation)
        assert looked_at.data
        pickled = pickle.dumps(read)

    again = pickle.loads(pickled)
    assert again == looked_at
    assert again.data == {"text": "p" * BLOB_BYTES_MIN}
    assert again.messages == looked_at.messages
    assert again.read(Large) == Large("p" * BLOB_BYTES_MIN)
    assert copy.copy(read) is copy.deepcopy(read) is read


# --- what is damaged --------------------------------------------------------------------------


def spoil(storage: MemoryStorage, change: Callable[[dict[str, bytes]], None]) -> MemoryStorage:
    """The same store, its blobs changed behind its back."""
    copy = storage.reopen()
    change(copy._data.blobs)
    return copy


def flip(blobs: dict[str, bytes]) -> None:
    for name, data in list(blobs.items()):
        blobs[name] = data[:-2] + b"!" + data[-1:]


@pytest.mark.parametrize(
    ("change", "problem"),
    [(dict.clear, "blob .* is missing"), (flip, "blob .* has other bytes than its name says")],
)
async def test_a_missing_or_damaged_blob_names_its_record(
    change: Callable[[dict[str, bytes]], None], problem: str
) -> None:
    """The record is damaged and not empty, nothing is written over it, and others are readable."""
    # C078
    storage = MemoryStorage()
    text = "d" * BLOB_BYTES_MIN
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        bad = await append(session, conversation, Large(text), messages=[user(text)])
        await append(session, conversation, Note("fine"))
    spoiled = spoil(storage, change)
    before = dict(spoiled._data.blobs)
    async with open_test_session(spoiled) as session:
        first, second = await session.history(conversation)
        assert second.read(Note) == Note("fine")
        for look, part in (
            (lambda: first.data, "data"),
            (lambda: first.messages, "messages"),
            (lambda: first.data, "data"),
        ):
            with pytest.raises(StorageCorruptError, match=f"the {part} of entry {bad}: {problem}"):
                look()
        with pytest.raises(StorageCorruptError, match=f"entry {bad}"):
            await session.context(conversation)
        await append(session, conversation, Note("goes on"))
    assert spoiled._data.blobs == before


def test_a_reference_that_is_none_is_damage() -> None:
    """Text that is neither JSON nor a reference is told as damage of the record."""
    storage = with_blobs(MemoryStorage())
    storage.acquire(_claim(), takeover=False)
    name = sha256(b"\xff")
    writes = [(Op.BLOB, (name, b"\xff"))]
    storage.apply(Batch(epoch=1, seq=1, next_id=9, flush=False, writes=writes))

    assert followed(storage, "{}", "it") == "{}"
    for text, problem in ((f"@{name}", "is no text"), ("@", "neither"), (f"@{name}\n", "neither")):
        with pytest.raises(StorageCorruptError, match=f"the data of entry 5.*{problem}"):
            followed(storage, text, "the data of entry 5")


def _claim() -> Any:
    from pidurable.storage import HolderClaim

    return HolderClaim(holder_id="t", host="t", pid=1, at_us=1, lease_seconds=15.0)


async def test_a_moved_part_of_the_wrong_shape_is_damage() -> None:
    """A blob that holds JSON, but no messages, is told like a row that holds none."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)

        def body(tx: Transaction) -> int:
            made = tx.append(conversation, Note("x"), messages=[user("x")])
            op, row = tx.writes.pop()
            wrong = '["' + "x" * BLOB_BYTES_MIN + '"]'
            tx.writes.append((op, row._replace(messages=wrong)))  # type: ignore[attr-defined]
            return made

        made = await session.run(session.transaction(), body)
        (read,) = await session.history(conversation)
        with pytest.raises(StorageCorruptError, match=f"entry {made} cannot be read"):
            _ = read.messages


async def test_a_damaged_input_of_one_task_does_not_hold_up_the_others() -> None:
    """Reading many beginnings at once leaves it out; reading it alone tells."""
    inner = MemoryStorage()
    storage = with_blobs(inner)
    storage.acquire(_claim(), takeover=False)
    large = '"' + "e" * BLOB_BYTES_MIN + '"'
    writes: list[Any] = []
    for task, value in ((1, large), (2, '"small"'), (3, large.replace("e", "f"))):
        writes += [(Op.TASK_INPUT, (task, value)), (Op.CHECKPOINT, (task, "p", "{}", 1))]
    writes.append((Op.OUTCOME, (1, large)))
    storage.apply(Batch(epoch=1, seq=1, next_id=9, flush=False, writes=writes))

    assert {row.task: row.input for row in storage.task_starts([1, 2, 3])} == {
        1: large,
        2: '"small"',
        3: large.replace("e", "f"),
    }
    assert storage.task_outcome(1) == large
    assert storage.task_outcome(2) is None
    raw_input = inner.task_input(3)
    assert raw_input is not None
    del inner._data.blobs[raw_input[1:]]
    assert [row.task for row in storage.task_starts([1, 2, 3])] == [1, 2]
    with pytest.raises(StorageCorruptError, match=r"the input of task 3: blob .* is missing"):
        storage.task_input(3)


@pytest.mark.parametrize("op", _MOVED, ids=lambda op: op.name)
def test_nothing_that_is_moved_is_taken_for_short(op: Op) -> None:
    """Writes are short while none of their texts is long, wherever it would be moved from."""
    row = tuple("s" * SHORT_CHARACTERS for _ in range(20))
    assert are_short([(Op.TASK_STATE, (1,)), (op, row), (op, (None,) * 20)])
    for column in _MOVED[op]:
        long = (*row[:column], "l" * (SHORT_CHARACTERS + 1), *row[column + 1 :])
        assert not are_short([(op, row), (op, long)])
        assert moved_blobs(op, (*row[:column], "l" * (BLOB_BYTES_MIN + 1), *row[column + 1 :]))


def test_writes_of_another_kind_are_not_taken_for_short() -> None:
    """Bytes, say, or what a collection removes: nobody has looked at what those hold."""
    assert are_short([])
    assert not are_short([(Op.WAIT_DELETE, (1,)), (Op.BLOB, ("name", b""))])


# --- bytes of one's own -----------------------------------------------------------------------


async def test_bytes_are_put_and_read_back() -> None:
    """Their name is their SHA-256; putting them again changes nothing; a rollback leaves none."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        name = await session.run(session.transaction(), lambda tx: tx.put_blob(PNG))
        again = await session.run(
            session.transaction(), lambda tx: (tx.put_blob(bytearray(PNG)), len(tx.writes))
        )
        with pytest.raises(ZeroDivisionError):
            await session.run(session.transaction(), lambda tx: tx.put_blob(b"gone") and 1 / 0)
        assert name == sha256(PNG)
        assert again == (name, 0)
        assert await session.blob(name) == PNG
        for missing in (sha256(b"gone"), "x", None, 5, "../x", name.upper()):
            with pytest.raises(NotFoundError, match="blob"):
                await session.blob(missing)  # type: ignore[arg-type]
    async with open_test_session(storage.reopen()) as session:
        assert await session.blob(name) == PNG


async def test_bytes_have_the_limit_of_a_value() -> None:
    """As many as `value_bytes_max` are stored, one more is refused, and so is what is no bytes."""
    settings = Settings(value_bytes_max=1000)
    async with open_test_session(MemoryStorage(), settings=settings) as session:
        await session.run(session.transaction(), lambda tx: tx.put_blob(b"x" * 1000))
        for data, problem in ((b"x" * 1001, "at most 1000 bytes"), ("text", "expected bytes")):
            with pytest.raises(InvalidArgumentError, match=problem):
                await session.run(session.transaction(), lambda tx, data=data: tx.put_blob(data))


async def test_a_message_names_bytes_that_are_there() -> None:
    """An image is put in the same commit, the same batch or before; else the append is refused."""
    image = ImageBlock(blob=sha256(PNG), media_type="image/png")
    shown = UserMessage(blocks=(TextBlock(text="see"), image), at_us=1)
    in_result = attrs.evolve(result(1, 0), blocks=(image,))
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        first = await append(session, conversation, Note("x"))
        for options in (
            {"messages": [shown]},
            {"messages": [user("x"), in_result]},
            {"edits": [Edit(target=first, messages=(shown,))]},
        ):
            with pytest.raises(NotFoundError, match=f"no blob '{image.blob}'. Store its bytes"):
                await append(session, conversation, Note("x"), **options)

        def in_one_commit(tx: Transaction) -> int:
            tx.put_blob(PNG)
            return tx.append(conversation, Note("x"), messages=[shown])

        made = await session.run(session.transaction(), in_one_commit)
        await append(session, conversation, Note("x"), messages=[in_result])
        entries: list[Entry] = await session.history(conversation)
        assert [each.id for each in entries][:2] == [first, made]
        assert len(entries) == 3
