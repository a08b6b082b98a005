"""Documents: drafts, patches, bases and deltas, versions, the past, and their limits."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st
from session_support import (
    Counter,
    HeldBlocking,
    Note,
    Recorder,
    line_held,
    new_conversation,
    open_test_session,
)
from trio.testing import wait_all_tasks_blocked

from pidurable import patch
from pidurable.errors import (
    DocumentTooLargeError,
    DocumentTooNewError,
    InvalidArgumentError,
    MigrationError,
    NotFoundError,
    NotJsonError,
    StorageAccessError,
    TransactionClosedError,
)
from pidurable.records import _json
from pidurable.records._entries import entry
from pidurable.records._limits import DELTA_BYTES_MIN, DELTAS_MAX, Settings
from pidurable.session import _documents
from pidurable.session._documents import Address, DocChange, definition_of, document
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.storage import MemoryStorage, Storage
from pidurable.testing import Fault, FaultyStorage

COUNTER = Address("test.counter", 0, 0, "")


@document("test.page", history="rewindable")
@attrs.define
class Page:
    text: str = ""
    parts: list[str] = attrs.Factory(list)


@document("test.free")
@attrs.define
class Free:
    value: Any = None


@document("test.todos", family=True)
@attrs.define
class Todos:
    items: list[str] = attrs.Factory(list)


def kinds(storage: Storage, address: Address) -> list[int]:
    """1 for each stored base and 0 for each delta of a document, as its reader would get them."""
    row = storage.document(*address)
    assert row is not None
    return [revision.base for revision in storage.revisions(row.id)]


async def change(session: Session, amount: int) -> None:
    async with session.body(session.transaction()) as tx:
        counter = await tx.document(Counter)
        counter.count += amount


async def test_a_draft_is_compared_and_what_changed_is_stored() -> None:
    """The first commit writes a base, the next ones deltas, and readers get the sum."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        assert session.snapshot(Counter) is None
        for amount in (1, 2, 3):
            await change(session, amount)
        assert session.snapshot(Counter) == Counter(count=6)
        assert kinds(storage, COUNTER) == [1, 0, 0]
    async with open_test_session(storage.reopen()) as session:
        assert session.snapshot(Counter) == Counter(count=6)


async def test_a_draft_that_did_not_change_writes_nothing() -> None:
    """A draft that did not change writes and publishes nothing."""
    async with open_test_session(MemoryStorage()) as session:
        await change(session, 1)
        seq = session.line.published_seq
        await change(session, 0)
        assert session.line.published_seq == seq


async def test_a_snapshot_is_committed_state() -> None:
    """A snapshot does not show drafts, nor what is staged but not durable."""
    async with open_test_session(MemoryStorage()) as session:
        await change(session, 1)
        async with session.body(session.transaction()) as tx:
            (await tx.document(Counter)).count = 99
            assert session.snapshot(Counter) == Counter(count=1)


async def test_values_assigned_into_a_draft_are_copied() -> None:
    """What is changed after the commit in a value that was assigned does not reach the document."""
    async with open_test_session(MemoryStorage()) as session:
        log = ["kept"]
        part: list[Any] = [["kept"]]
        conversation = await new_conversation(session)
        async with session.body(session.transaction()) as tx:
            counter = await tx.document(Counter)
            counter.log = log
            (await tx.document(Free, conversation)).value = []
        log.append("late")
        async with session.body(session.transaction()) as tx:
            ops = [{"op": "add", "path": "/value/-", "value": part}]
            tx.patch(Free, conversation, ops)
            part[0].append("late")
            ops.clear()
        part.append("later")
        assert session.snapshot(Counter) == Counter(log=["kept"])
        assert session.snapshot(Free, conversation) == Free([[["kept"]]])


@pytest.mark.parametrize(
    "op",
    [
        {"op": "add", "path": "/value", "value": 2**64},
        {"op": "add", "path": "/value", "value": -(2**63) - 1},
        {"op": "add", "path": "/value", "value": float("nan")},
        {"op": "add", "path": "/value", "value": {"in": float("inf")}},
        {"op": "add", "path": "/value", "value": {1: "a number as key"}},
        {"op": "add", "path": "/value", "value": ["a NUL: \0"]},
        {"op": "add", "path": "/value", "value": {1, 2}},
        {"op": "add", "path": "/value", "value": "a NUL: \0"},
        {"op": "add", "path": "/value", "value": "half of a pair: \ud83d"},
        {"op": "add", "path": "/value", "value": 1, "from": {1, 2}},
        {"op": "remove", "path": "/value", "value": {1, 2}},
    ],
    ids=repr,
)
async def test_a_patch_with_what_is_no_json_is_refused(op: dict[str, Any]) -> None:
    """Whatever a patch holds that cannot be stored, its commit is refused, and changes nothing."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        async with session.body(session.transaction()) as tx:
            (await tx.document(Free, conversation)).value = 1
        with pytest.raises(NotJsonError):
            await session.run(session.transaction(), lambda tx: tx.patch(Free, conversation, [op]))
        assert session.snapshot(Free, conversation) == Free(1)


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), 2**63, -1, 0, 0.5, True, None, [], {}, ""])
async def test_a_scalar_is_patched_in_as_it_is(value: Any) -> None:
    """Every scalar that JSON has is stored by a patch, type for type."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        async with session.body(session.transaction()) as tx:
            (await tx.document(Free, conversation)).value = "before"
        ops = [{"op": "replace", "path": "/value", "value": value}]
        await session.run(session.transaction(), lambda tx: tx.patch(Free, conversation, ops))
        address = _documents.address(definition_of(Free), conversation)
        read = _documents.load(storage, address)

    assert read is not None
    assert read.value == {"value": value}
    assert type(read.value["value"]) is type(value)


async def test_a_draft_taken_twice_is_one() -> None:
    """The same document asked for twice in a commit is one draft."""
    async with open_test_session(MemoryStorage()) as session:
        async with session.body(session.transaction()) as tx:
            first = await tx.document(Counter)
            assert await tx.document(Counter) is first
        with pytest.raises(TransactionClosedError):
            await tx.document(Counter)


async def test_two_tasks_of_a_body_share_one_draft() -> None:
    """Who asks while the document is being read gets the draft that the other one gets."""
    drafts: list[Counter] = []
    async with open_test_session(MemoryStorage()) as session:

        async def ask(tx: Transaction) -> None:
            drafts.append(await tx.document(Counter))
            drafts[-1].count += 1

        async with session.body(session.transaction()) as tx, trio.open_nursery() as nursery:
            nursery.start_soon(ask, tx)
            nursery.start_soon(ask, tx)
        assert drafts[0] is drafts[1]
        assert session.snapshot(Counter) == Counter(2)


@document("test.with_dict", scope="session")
@attrs.define(slots=False)
class WithDict:
    value: int = 0


async def test_a_participant_may_change_documents_as_well() -> None:
    """It sees what the body made of them, drafts too, and what it changes is stored with that."""
    storage = MemoryStorage()
    recorder = Recorder()
    seen: list[int] = []

    def add_one(tx: Transaction) -> None:
        seen.append(tx.doc_value(COUNTER)["count"])
        tx.patch(Counter, None, [{"op": "replace", "path": "/count", "value": seen[-1] + 1}])

    async with open_test_session(storage) as session:
        await change(session, 1)
        session.participants.append(recorder)
        recorder.refuse = add_one
        await change(session, 5)
        await new_conversation(session)
        assert session.snapshot(Counter) == Counter(8)
    async with open_test_session(storage.reopen()) as session:
        assert (seen, session.snapshot(Counter)) == ([6, 7], Counter(8))


@document("test.last", scope="session")
@attrs.define
class Last:
    value: int = 0

    def __init_subclass__(cls) -> None:
        raise ValueError("there is nothing below")


async def test_a_draft_whose_class_takes_no_subclass_lives_on() -> None:
    """The commit is what it would have been, and nothing done to the draft later reaches it."""
    async with open_test_session(MemoryStorage()) as session:
        for value in (1, 2):
            async with session.body(session.transaction()) as tx:
                last = await tx.document(Last)
                last.value = value
            last.value = 7
            assert session.snapshot(Last) == Last(value)


async def test_drafts_die_with_their_body() -> None:
    """Whoever looks at a draft later, or changes it, is told; also of a body that failed."""
    drafts: list[Any] = []
    async with open_test_session(MemoryStorage()) as session:
        for fails in (False, True):
            with contextlib.suppress(ZeroDivisionError):
                async with session.body(session.transaction()) as tx:
                    drafts += [await tx.document(WithDict), await tx.document(Counter)]
                    tx.retire(Counter)
                    assert drafts[-1].count == 0
                    _ = 1 // (not fails)
    assert len(drafts) == 4
    for draft in drafts:
        name, field = (
            ("test.counter", "count") if isinstance(draft, Counter) else ("with_dict", "value")
        )
        with pytest.raises(TransactionClosedError, match=f"draft of .*{name} was used after"):
            setattr(draft, field, 7)
        with pytest.raises(TransactionClosedError):
            getattr(draft, field)
        assert name in repr(draft)
        assert not isinstance(draft, str)


async def test_changes_of_one_document_in_one_commit_add_up_to_one_revision() -> None:
    """Drafts and patches of one document in one commit make one revision with all of them."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        await change(session, 1)
        async with session.body(session.transaction()) as tx:
            counter = await tx.document(Counter)
            counter.log.append("draft")
            tx.append_text(Counter, None, "/log/0", " grown")
            tx.patch(Counter, None, [{"op": "add", "path": "/log/-", "value": "patch"}])
            counter.count = 5
        assert session.snapshot(Counter) == Counter(5, ["draft grown", "patch"])
        assert kinds(storage, COUNTER) == [1, 0]
        (made,) = tx.doc_changes
        assert patch.apply(made.before, made.ops) == made.after


async def test_a_body_sees_what_the_bodies_before_it_staged() -> None:
    """Bodies of one batch each see the documents as the one before left them."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        await change(session, 1)

        def double(tx: Transaction) -> None:
            count = tx.doc_value(COUNTER)["count"]
            tx.patch(Counter, None, [{"op": "replace", "path": "/count", "value": count * 2}])

        async with trio.open_nursery() as nursery, line_held(session):
            for _ in range(5):
                nursery.start_soon(session.run, session.transaction(), double)
            await wait_all_tasks_blocked()
        assert session.snapshot(Counter) == Counter(32)


async def test_a_patch_needs_a_document_and_must_fit() -> None:
    """A patch of a missing document, or one that does not fit, is refused at its line."""
    async with open_test_session(MemoryStorage()) as session:

        def missing(tx: Transaction) -> None:
            tx.append_text(Counter, None, "/log/0", "x")

        with pytest.raises(NotFoundError, match="document"):
            await session.run(session.transaction(), missing)
        await change(session, 1)
        with pytest.raises(NotJsonError, match="/log/0"):
            await session.run(session.transaction(), missing)
        for value in (float("nan"), {1}, "\ud800", [object()]):

            def odd(tx: Transaction, value: Any = value) -> None:
                tx.patch(Counter, None, [{"op": "replace", "path": "/count", "value": value}])

            with pytest.raises(NotJsonError):
                await session.run(session.transaction(), odd)
        assert session.snapshot(Counter) == Counter(1)


@pytest.mark.parametrize("whole", [None, [], "text", 0])
async def test_a_document_stays_an_object_whatever_is_patched(whole: Any) -> None:
    """What would not be an object is refused: null would stand there, and count as nothing."""
    async with open_test_session(MemoryStorage()) as session:
        await change(session, 1)
        for ops in (
            [{"op": "replace", "path": "", "value": whole}],
            [
                {"op": "add", "path": "/spare", "value": whole},
                {"op": "move", "from": "/spare", "path": ""},
            ],
        ):
            with pytest.raises(NotJsonError, match=r"\$<test\.counter>: a document is an object"):
                async with session.body(session.transaction()) as tx:
                    tx.patch(Counter, None, ops)

        def there_and_back(tx: Transaction) -> None:
            ops = [{"op": "replace", "path": "", "value": each} for each in (whole, {"count": 2})]
            tx.patch(Counter, None, ops)

        await session.run(session.transaction(), there_and_back)
        assert session.snapshot(Counter) == Counter(2)


def test_what_is_no_document_class_is_named() -> None:
    """An instance, or a class that is no document, is refused with what it is."""
    for odd, named in ((Counter(7), r"Counter\(count=7"), ("x", "'x'"), (int, "int")):
        with pytest.raises(
            InvalidArgumentError, match=f"is not a document class.*{named}|^{named}"
        ):
            definition_of(odd)  # type: ignore[arg-type]


async def test_retired_and_made_again_a_document_is_a_new_one() -> None:
    """Retiring ends a document; a new one there has a new id, in the same commit or a later one."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        await change(session, 7)
        first = storage.document(*COUNTER)
        async with session.body(session.transaction()) as tx:
            tx.retire(Counter)
            assert tx.doc_value(COUNTER) is None
            with pytest.raises(NotFoundError):
                tx.retire(Counter)
        assert session.snapshot(Counter) is None
        assert storage.document(*COUNTER) is None
        await change(session, 1)
        second = storage.document(*COUNTER)
        async with session.body(session.transaction()) as tx:
            tx.retire(Counter)
            (await tx.document(Counter)).count = 3
        third = storage.document(*COUNTER)
        assert session.snapshot(Counter) == Counter(3)
        assert len({row.id for row in (first, second, third) if row is not None}) == 3
        assert [change.after for change in tx.doc_changes] == [None, {"count": 3, "log": []}]


async def test_a_document_made_and_retired_in_one_commit_was_never_there() -> None:
    """A document that is created and retired in one commit leaves nothing."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        async with session.body(session.transaction()) as tx:
            await tx.document(Counter)
            tx.retire(Counter)
        assert storage.document(*COUNTER) is None
        assert session.line.published_seq == 0


async def test_a_family_has_one_document_per_key() -> None:
    """A family needs a key, other documents refuse one."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        async with session.body(session.transaction()) as tx:
            for key in ("a", "b"):
                (await tx.document(Todos, conversation, key=key)).items.append(key)
            with pytest.raises(InvalidArgumentError, match="key"):
                await tx.document(Todos, conversation)
            with pytest.raises(InvalidArgumentError, match="key"):
                await tx.document(Counter, key="a")
            with pytest.raises(InvalidArgumentError, match="belongs to a conversation"):
                await tx.document(Page)
            with pytest.raises(NotFoundError, match="conversation"):
                await tx.document(Page, 999)
        assert session.snapshot(Todos, conversation, key="b") == Todos(["b"])


async def test_a_cold_read_that_fails_fails_the_commit() -> None:
    """A body that swallowed the failed read of a document does not commit."""
    storage = FaultyStorage(MemoryStorage())
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)

        async def body() -> None:
            async with session.body(session.transaction()) as tx:
                storage.add(Fault.fail("document"))
                with pytest.raises(StorageAccessError):
                    await tx.document(Page, conversation)
                tx.append(conversation, Note("stands on nothing"))

        with pytest.raises(StorageAccessError):
            await body()
        assert await session.history(conversation) == []


# --- bases, deltas, the past ------------------------------------------------------------------


async def test_a_base_is_written_after_256_deltas() -> None:
    """256 deltas stand on a base; the next change is a new base, and what is before it goes."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        async with session.body(session.transaction()) as tx:
            # Large enough that it is the number of deltas that counts, not their bytes.
            (await tx.document(Counter)).log = ["x" * 20_000]
        for _ in range(DELTAS_MAX):
            await change(session, 1)
        assert kinds(storage, COUNTER) == [1] + [0] * DELTAS_MAX
        await change(session, 1)
        row = storage.document(*COUNTER)
        assert row is not None
        assert kinds(storage, COUNTER) == [1]
        assert storage.revisions(row.id, upto_seq=storage.head().seq - 1) == []
        assert session.snapshot(Counter) == Counter(DELTAS_MAX + 1, ["x" * 20_000])


async def test_a_base_is_written_when_the_deltas_outgrow_it() -> None:
    """Deltas of more bytes than the base, or 4 KiB, are replaced by a base."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        await change(session, 1)

        def grow(tx: Transaction, size: int) -> None:
            ops = [{"op": "replace", "path": "/log", "value": ["x" * size]}]
            tx.patch(Counter, None, ops)

        overhead = len(_json.dumps([{"op": "replace", "path": "/log", "value": [""]}]))
        limit = DELTA_BYTES_MIN - overhead
        await session.run(session.transaction(), lambda tx: grow(tx, limit))
        assert kinds(storage, COUNTER) == [1, 0]
        await session.run(session.transaction(), lambda tx: grow(tx, 1))
        assert kinds(storage, COUNTER) == [1]


async def test_a_rewindable_document_shows_every_past_entry() -> None:
    """The value at each past entry stays readable, over bases, forks excluded."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        before = await session.run(
            session.transaction(), lambda tx: tx.append(conversation, Note("before"))
        )
        seen: list[tuple[int, str]] = []
        for number in range(DELTAS_MAX + 20):
            async with session.body(session.transaction()) as tx:
                (await tx.document(Page, conversation)).text = f"version {number}"
                seen.append((tx.append(conversation, Note("e")), f"version {number}"))
        for entry, text in (seen[0], seen[17], seen[DELTAS_MAX + 3], seen[-1]):
            page = await session.snapshot_as_of(Page, conversation, entry)
            assert page == Page(text)
        assert await session.snapshot_as_of(Page, conversation, before) is None
        with pytest.raises(NotFoundError, match="entry"):
            await session.snapshot_as_of(Page, conversation, 10**6)
        other = await new_conversation(session)
        with pytest.raises(NotFoundError, match="entry"):
            await session.snapshot_as_of(Page, other, seen[0][0])
        with pytest.raises(InvalidArgumentError, match="rewindable"):
            await session.snapshot_as_of(Free, conversation, seen[0][0])


# --- versions ---------------------------------------------------------------------------------


@document("test.person", scope="session")
@attrs.define
class PersonV1:
    name: str = ""


@document("test.person", version=3, scope="session")
@attrs.define
class PersonV3:
    first: str = ""
    last: str = ""

    @staticmethod
    def migrate(value: dict[str, Any], from_version: int) -> dict[str, Any]:
        first, _, last = value.pop("name").partition(" ")
        return {"first": first, "last": f"{last}{from_version}"}


@document("test.person", version=4, scope="session")
@attrs.define
class PersonWithout:
    first: str = ""


@document("test.person", version=5, scope="session")
@attrs.define
class PersonFails:
    first: str = ""

    @staticmethod
    def migrate(value: dict[str, Any], from_version: int) -> dict[str, Any]:
        raise KeyError("no such field")


async def test_reading_migrates_in_memory_and_writing_stores_a_base() -> None:
    """An older value is migrated on access; the next write stores today's version as a base."""
    storage = MemoryStorage()
    address = Address("test.person", 0, 0, "")
    async with open_test_session(storage) as session:
        async with session.body(session.transaction()) as tx:
            (await tx.document(PersonV1)).name = "Ada Lovelace"
        seq = session.line.published_seq
        assert session.snapshot(PersonV3) == PersonV3("Ada", "Lovelace1")
        async with session.body(session.transaction()) as tx:
            assert (await tx.document(PersonV3)).first == "Ada"
        assert session.line.published_seq == seq
        assert session.snapshot(PersonV1) == PersonV1("Ada Lovelace")
        async with session.body(session.transaction()) as tx:
            (await tx.document(PersonV3)).last = "King"
        assert session.snapshot(PersonV3) == PersonV3("Ada", "King")
        assert kinds(storage, address) == [1]
        with pytest.raises(DocumentTooNewError):
            session.snapshot(PersonV1)
        async with session.body(session.transaction()) as tx:
            with pytest.raises(DocumentTooNewError):
                await tx.document(PersonV1)


@pytest.mark.parametrize("cls", [PersonWithout, PersonFails])
async def test_what_cannot_be_migrated_is_left_as_it_is(cls: type) -> None:
    """A document that cannot be migrated is reported and keeps its bytes."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        async with session.body(session.transaction()) as tx:
            (await tx.document(PersonV1)).name = "Ada Lovelace"
        with pytest.raises(MigrationError, match=r"test\.person"):
            session.snapshot(cls)
        assert session.snapshot(PersonV1) == PersonV1("Ada Lovelace")


def test_declarations_that_cannot_hold_are_refused() -> None:
    """`@document` and `@entry` refuse what the design does not allow, or no storage can take."""
    with pytest.raises(InvalidArgumentError, match="history"):
        document("x", scope="session", history="rewindable")
    with pytest.raises(InvalidArgumentError, match="fork"):
        document("x", fork="as_of")
    for version in (0, 2**63, True):
        with pytest.raises(InvalidArgumentError, match="version"):
            document("x", version=version)
    for kind in ("\ud800", "a\0b", "x" * 513, "", None):
        with pytest.raises((InvalidArgumentError, NotJsonError), match="kind"):
            entry(kind)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="@document"):
        _documents.definition_of(int)


# --- sizes ------------------------------------------------------------------------------------


async def test_a_document_is_refused_one_byte_over_the_limit() -> None:
    """A document of exactly the limit is stored; one byte more is refused, however it grew."""
    limit = 2_000
    async with open_test_session(
        MemoryStorage(), settings=Settings(document_bytes_max=limit)
    ) as session:
        conversation = await new_conversation(session)
        overhead = len('{"value":""}')

        async def put(size: int) -> None:
            async with session.body(session.transaction()) as tx:
                (await tx.document(Free, conversation)).value = "é" * 2 + "x" * (size - 4)

        with pytest.raises(DocumentTooLargeError):
            await put(limit - overhead + 1)
        await put(limit - overhead)
        with pytest.raises(DocumentTooLargeError, match=str(limit)):
            await put(limit - overhead + 1)
        await put(1_000)

        def double(tx: Transaction) -> None:
            tx.patch(
                Free, conversation, [{"op": "replace", "path": "/value", "value": ["x" * 800]}]
            )
            for _ in range(3):
                tx.patch(
                    Free, conversation, [{"op": "copy", "from": "/value/0", "path": "/value/-"}]
                )

        with pytest.raises(DocumentTooLargeError):
            await session.run(session.transaction(), double)


async def test_a_large_document_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """A document that grows over the threshold is reported once."""
    caplog.set_level(logging.WARNING)
    settings = Settings(document_report_bytes=10_000)
    async with open_test_session(MemoryStorage(), settings=settings) as session:
        for number in range(1, 30):
            async with session.body(session.transaction()) as tx:
                counter = await tx.document(Counter)
                counter.log = [f"{number} " + "x" * 1_000] * number
    assert len([r for r in caplog.records if "has grown" in r.getMessage()]) == 1


# --- a property -------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("kl", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values=st.lists(st.tuples(JSON, st.booleans()), min_size=1, max_size=12))
@hypothesis_settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_was_assigned_is_what_is_read(values: list[tuple[Any, bool]]) -> None:
    """Whatever values a document takes, readers, a reopened store and the frames agree with it."""

    async def run() -> None:
        storage = MemoryStorage()
        conversation = 0
        for first in range(0, len(values), 4):
            async with open_test_session(storage) as session:
                conversation = conversation or await new_conversation(session)
                for value, retire in values[first : first + 4]:
                    before = session.doc_value(Address("test.free", 1, conversation, ""))
                    async with session.body(session.transaction()) as tx:
                        if retire and before is not None:
                            tx.retire(Free, conversation)
                        (await tx.document(Free, conversation)).value = value
                    follow(before, tx.doc_changes, {"value": value})
                    assert same(session.snapshot(Free, conversation), Free(value))
            storage = storage.reopen()

    def follow(value: Any, changes: list[DocChange], expected: Any) -> None:
        for made in changes:
            assert same(made.before, value)
            if made.before is not None and made.after is not None:
                assert same(patch.apply(made.before, made.ops), made.after)
            value = made.after
        assert same(value, expected)

    def same(left: Any, right: Any) -> bool:
        return repr(left) == repr(right) or bool(left == right)

    trio.run(run)


async def test_a_large_draft_is_compared_outside_the_loop() -> None:
    """A draft of more than 256 KiB is compared where blocking work runs, a small one is not."""

    class Counting(HeldBlocking):
        calls = 0

        async def run(self, fn: Any, *args: Any) -> Any:
            self.calls += 1
            return await super().run(fn, *args)

    blocking = Counting()
    async with open_test_session(MemoryStorage(), blocking=blocking) as session:
        await change(session, 1)
        calls = blocking.calls
        await change(session, 1)
        assert blocking.calls == calls
        async with session.body(session.transaction()) as tx:
            (await tx.document(Counter)).log = ["x" * 300_000]
        await change(session, 1)
        assert blocking.calls == calls + 1
        assert session.snapshot(Counter) == Counter(3, ["x" * 300_000])


async def test_what_a_draft_changes_deep_inside_is_stored_and_shared_with_nobody() -> None:
    """Parts without a type are copied: a change in place is found, a snapshot is its reader's."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        async with session.body(session.transaction()) as tx:
            (await tx.document(Free, conversation)).value = {"names": ["ada"]}
        async with session.body(session.transaction()) as tx:
            (await tx.document(Free, conversation)).value["names"].append("bob")
        taken = session.snapshot(Free, conversation)
        assert taken is not None
        taken.value["names"].append("eve")

        async def undone() -> None:
            async with session.body(session.transaction()) as tx:
                (await tx.document(Free, conversation)).value["names"].clear()
                raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            await undone()
        assert session.snapshot(Free, conversation) == Free({"names": ["ada", "bob"]})
    async with open_test_session(storage) as session:
        assert session.snapshot(Free, conversation) == Free({"names": ["ada", "bob"]})


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


# C085: the same answer on every path.
@pytest.mark.parametrize("way", ["draft", "replace", "add", "move", "copy"])
async def test_a_document_is_at_most_200_levels_deep_whichever_way_it_gets_there(way: str) -> None:
    """Level 200 is stored and read back, also as a change; one more is refused, without loss."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        for levels in (200, 201):
            before = {"a": [[]], "b": nested(198)}
            async with session.body(session.transaction()) as tx:
                (await tx.document(Free, conversation)).value = before
            expected: Any = {**before, "a": [[nested(levels - 4)]]}
            ops: list[Any] = {
                "draft": [],
                "replace": [{"op": "replace", "path": "/value/a/0", "value": [nested(levels - 4)]}],
                "add": [{"op": "add", "path": "/value/a/0/-", "value": nested(levels - 4)}],
                "copy": [
                    {
                        "op": "copy",
                        "from": "/value/b/0/0" if levels == 200 else "/value/b/0",
                        "path": "/value/a/0/0",
                    }
                ],
                "move": [
                    {"op": "add", "path": "/value/c", "value": nested(levels - 4)},
                    {"op": "move", "from": "/value/c", "path": "/value/a/0/0"},
                ],
            }[way]

            async def change(ops: Any = ops, expected: Any = expected) -> None:
                async with session.body(session.transaction()) as tx:
                    if way == "draft":
                        (await tx.document(Free, conversation)).value = expected
                    else:
                        tx.patch(Free, conversation, ops)

            if levels == 200:
                await change()
                before = expected
            else:
                with pytest.raises(NotJsonError, match="200 levels"):
                    await change()
            assert session.snapshot(Free, conversation) == Free(before)
    async with open_test_session(storage) as session:
        assert session.snapshot(Free, conversation) == Free(before)
