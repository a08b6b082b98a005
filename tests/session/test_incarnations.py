"""What stands at an address over time: incarnations, and definitions that change with the code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import apsw
import attrs
import pytest
from session_support import PLACES, Note, open_place, open_test_session

from pidurable.errors import (
    DocumentTooNewError,
    InvalidArgumentError,
    MigrationError,
    NotFoundError,
    NotJsonError,
    StorageCorruptError,
)
from pidurable.records._limits import DELTAS_MAX
from pidurable.session._documents import Address, document
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.storage import MemoryStorage


@document("life.page", history="rewindable", fork="as_of")
@attrs.define
class Page:
    text: str = ""


@document("life.shelf", history="rewindable", family=True)
@attrs.define
class Shelf:
    text: str = ""


async def write(session: Session, cls: Any, conversation: int, text: str, key: str = "") -> int:
    """Write a text into a document, with an entry; return the entry."""
    async with session.body(session.transaction()) as tx:
        (await tx.document(cls, conversation, key=key)).text = text
        return tx.append(conversation, Note(text))


async def as_of(session: Session, conversation: int, entry: int, key: str = "") -> str | None:
    cls: Any = Shelf if key else Page
    found = await session.snapshot_as_of(cls, conversation, entry, key=key)
    return None if found is None else found.text


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("key", ["", "k"])
async def test_the_past_shows_the_incarnation_that_lived_then(
    name: str, key: str, tmp_path: Path
) -> None:
    """Before the first, between two, and in the commit that retires one and makes the next."""
    cls: Any = Shelf if key else Page
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        other = "other" if key else ""
        seen: list[tuple[int, str | None]] = []

        async def note(value: str | None) -> None:
            entry = await place.run(lambda tx: tx.append(top, Note(str(value))))
            seen.append((entry, value))

        await note(None)
        for life in ("first", "second"):
            for text in ("a", "b"):
                value = f"{life} {text}"
                seen.append((await write(await place.session(), cls, top, value, key), value))
                await note(value)
            if other:
                await write(await place.session(), cls, top, "beside it", other)
            retired = await place.run(lambda tx: (tx.retire(cls, top, key=key), tx.seq))
            assert retired[1] > 0
            await note(None)
        await write(await place.session(), cls, top, "third", key)
        session = await place.session()
        async with session.body(session.transaction()) as tx:
            tx.retire(cls, top, key=key)
            (await tx.document(cls, top, key=key)).text = "fourth"
            seen.append((tx.append(top, Note("both")), "fourth"))
        await place.run(lambda tx: tx.retire(cls, top, key=key))
        await note(None)
        session = await place.session()

        assert [await as_of(session, top, entry, key) for entry, _ in seen] == [v for _, v in seen]
        # Reading creates nothing.
        assert session.snapshot(cls, top, key=key) is None
        assert session.storage.document(cls.__pidurable_document__.name, 1, top, key) is None


@pytest.mark.parametrize("name", PLACES)
async def test_a_fork_takes_the_incarnation_of_its_entry(name: str, tmp_path: Path) -> None:
    """One that was retired since is copied; one that came later is not; a fork has its own life."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        before = await place.run(lambda tx: tx.append(top, Note("before")))
        first = await write(await place.session(), Page, top, "first")
        await place.run(lambda tx: tx.retire(Page, top))
        between = await place.run(lambda tx: tx.append(top, Note("between")))
        second = await write(await place.session(), Page, top, "second")
        forks = [
            await place.run(lambda tx, at=at: tx.fork(top, at))
            for at in (before, first, between, second)
        ]
        await place.run(lambda tx: tx.retire(Page, forks[1]))
        own = await place.run(lambda tx: tx.append(forks[1], Note("own")))
        session = await place.session()

        found = [session.snapshot(Page, fork) for fork in forks]
        assert found == [None, None, None, Page("second")]
        assert await as_of(session, forks[1], first) == "first"
        assert await as_of(session, forks[1], own) is None
        again = await session.run(session.transaction(), lambda tx: tx.fork(forks[1], first))
        assert session.snapshot(Page, again) == Page("first")


# --- definitions that change with the code -----------------------------------------------------


@document("life.page")
@attrs.define
class PageLatest:
    text: str = ""


@document("life.page", history="rewindable", fork="current")
@attrs.define
class PageCurrent:
    text: str = ""


@pytest.mark.parametrize("name", PLACES)
async def test_a_new_history_counts_from_the_next_change_on(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was not kept before is a clear error, and no reason to fork nothing."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        before = await place.run(lambda tx: tx.append(top, Note("before")))
        lost = await write(await place.session(), PageLatest, top, "x" * 5_000)
        kept = await write(await place.session(), PageLatest, top, "y" * 6_000)
        delta = await write(await place.session(), PageLatest, top, "y" * 6_001)
        seen = [await write(await place.session(), Page, top, f"{n} " * 3_000) for n in range(4)]
        session = await place.session()

        for entry, text in zip(seen, range(4), strict=True):
            assert await as_of(session, top, entry) == f"{text} " * 3_000
        # The newest base of before is still there, so what stands on it can be read too.
        assert await as_of(session, top, kept) == "y" * 6_000
        assert await as_of(session, top, delta) == "y" * 6_001
        assert await as_of(session, top, before) is None
        with pytest.raises(NotFoundError, match=rf"'life\.page' as of entry {lost}.*history="):
            await as_of(session, top, lost)
        caplog.set_level(logging.WARNING)
        fork = await session.run(session.transaction(), lambda tx: tx.fork(top, lost))
        assert session.snapshot(Page, fork) is None
        assert "starts without a document" in caplog.text
        assert await session.snapshot_as_of(Page, top, seen[0]) is not None


@pytest.mark.parametrize("name", PLACES)
async def test_a_document_that_is_latest_again_reclaims_its_past(name: str, tmp_path: Path) -> None:
    """The next base of the new class drops what is before it; the fork policy is the new one."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        first = await write(await place.session(), Page, top, "a" * 5_000)
        await write(await place.session(), Page, top, "b" * 5_000)
        await write(await place.session(), PageLatest, top, "b" * 5_000 + "c")
        session = await place.session()
        row = session.storage.document("life.page", 1, top, "")
        assert row is not None
        assert (row.history, row.fork) == ("latest", "initial")
        assert await as_of(session, top, first) == "a" * 5_000

        await write(session, PageLatest, top, "d" * 6_000)
        session = await place.session()
        assert len(session.storage.revisions(row.id, upto_seq=2**62)) == 1
        with pytest.raises(NotFoundError, match="past value"):
            await as_of(session, top, first)
        fork = await session.run(session.transaction(), lambda tx: tx.fork(top))
        assert session.snapshot(PageLatest, fork) is None


async def test_a_new_fork_policy_counts_from_the_next_change_on() -> None:
    """Until then the fork does what the stored policy says, also in the body that changes it."""
    async with open_test_session(MemoryStorage()) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        entry = await write(session, PageLatest, top, "one")
        unread = await session.run(session.transaction(), lambda tx: tx.fork(top))
        async with session.body(session.transaction()) as tx:
            (await tx.document(PageCurrent, top)).text = "two"
            changing = tx.fork(top, entry)
        later = await session.run(session.transaction(), lambda tx: tx.fork(top, entry))
        await write(session, Page, top, "three")
        past = await session.run(session.transaction(), lambda tx: tx.fork(top, entry))

        found = [session.snapshot(Page, fork) for fork in (unread, changing, later, past)]
        assert found == [None, Page("two"), Page("two"), Page("one")]


@pytest.mark.parametrize("name", ["memory reopened", "sqlite"])
async def test_what_stands_at_an_address_decides_what_a_fork_does_with_it(
    name: str, tmp_path: Path
) -> None:
    """Only where nothing stands, what stood at the entry decides: also in the retiring body."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        first = await write(await place.session(), Page, top, "first")
        await place.run(lambda tx: tx.retire(Page, top))
        second = await write(await place.session(), PageLatest, top, "second")
        beside = await place.run(lambda tx: tx.fork(top, first))

        def retire(tx: Transaction) -> int:
            tx.retire(PageLatest, top)
            return tx.fork(top, first)

        bare = await place.run(retire)
        await write(await place.session(), PageCurrent, top, "third")
        third = await place.run(lambda tx: tx.append(top, Note("third")))
        await place.run(lambda tx: tx.retire(PageCurrent, top))
        session = await place.session()
        async with session.body(session.transaction()) as tx:
            looked_at = tx.fork(top, third)
            (await tx.document(Page, looked_at)).text += "mine"
        left = await session.run(session.transaction(), lambda tx: tx.fork(top, third))
        latest = await session.run(session.transaction(), lambda tx: tx.fork(top, second))

        forks = (beside, bare, looked_at, left, latest)
        found = [session.snapshot(Page, fork) for fork in forks]
        assert found == [None, Page("first"), Page("mine"), None, None]


# --- two definitions of one name ----------------------------------------------------------------


@document("life.two", version=1)
@attrs.define
class TwoV1:
    text: str = ""


@document("life.two", version=2)
@attrs.define
class TwoV2:
    words: list[str] = attrs.Factory(list)

    @staticmethod
    def migrate(value: dict[str, Any], from_version: int) -> dict[str, Any]:
        return {"words": value["text"].split()}


@pytest.mark.parametrize("name", PLACES)
async def test_old_code_may_go_on_until_new_code_writes(name: str, tmp_path: Path) -> None:
    """Both read and write side by side; after the first write of the new one the old is refused."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        await write(await place.session(), TwoV1, top, "a b")
        session = await place.session()
        assert session.snapshot(TwoV2, top) == TwoV2(["a", "b"])
        await write(session, TwoV1, top, "a b c")
        session = await place.session()
        async with session.body(session.transaction()) as tx:
            (await tx.document(TwoV2, top)).words.append("d")
        session = await place.session()

        assert session.snapshot(TwoV2, top) == TwoV2(["a", "b", "c", "d"])
        with pytest.raises(DocumentTooNewError):
            session.snapshot(TwoV1, top)
        for change in (
            lambda tx: tx.append_text(TwoV1, top, "/text", "!"),
            lambda tx: tx.patch(TwoV1, top, [{"op": "replace", "path": "", "value": {}}]),
        ):
            with pytest.raises(DocumentTooNewError):
                await session.run(session.transaction(), change)
        with pytest.raises(DocumentTooNewError):
            await write(session, TwoV1, top, "lost?")
        assert session.snapshot(TwoV2, top) == TwoV2(["a", "b", "c", "d"])


async def test_two_classes_of_one_document_in_one_commit() -> None:
    """A second draft as another class is refused; a patch by the newer class follows the draft."""
    async with open_test_session(MemoryStorage()) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        async with session.body(session.transaction()) as tx:
            draft = await tx.document(TwoV1, top)
            draft.text = "a b"
            with pytest.raises(InvalidArgumentError, match=r"has a draft of document 'life\.two'"):
                await tx.document(TwoV2, top)
            tx.patch(TwoV2, top, [{"op": "add", "path": "/words/-", "value": "c"}])
        assert session.snapshot(TwoV2, top) == TwoV2(["a", "b", "c"])

        async def old_after_new() -> None:
            async with session.body(session.transaction()) as tx:
                tx.patch(TwoV2, top, [{"op": "add", "path": "/words/-", "value": "d"}])
                await tx.document(TwoV1, top)

        with pytest.raises(DocumentTooNewError):
            await old_after_new()
        assert session.snapshot(TwoV2, top) == TwoV2(["a", "b", "c"])


@document("life.same", scope="session")
@attrs.define
class SameOfSession:
    text: str = "session"


@document("life.same", scope="conversation")
@attrs.define
class SameOfConversation:
    text: str = "conversation"


@document("life.same", scope="conversation", family=True)
@attrs.define
class SameFamily:
    text: str = "family"


@document("life.same", scope="task")
@attrs.define
class SameOfTask:
    text: str = "task"


@pytest.mark.parametrize("name", PLACES)
async def test_one_name_in_each_scope_and_as_a_family_is_as_many_documents(
    name: str, tmp_path: Path
) -> None:
    """Equal names in other scopes, and a plain and a family definition, never meet."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        session = await place.session()
        async with session.body(session.transaction()) as tx:
            for cls, scope_id, key in (
                (SameOfSession, None, ""),
                (SameOfConversation, top, ""),
                (SameFamily, top, "k"),
                (SameOfTask, top, ""),
            ):
                (await tx.document(cls, scope_id, key=key)).text += "!"
        session = await place.session()
        await session.run(session.transaction(), lambda tx: tx.retire(SameFamily, top, key="k"))
        session = await place.session()

        assert session.snapshot(SameOfSession) == SameOfSession("session!")
        assert session.snapshot(SameOfConversation, top) == SameOfConversation("conversation!")
        assert session.snapshot(SameFamily, top, key="k") is None
        assert session.snapshot(SameOfTask, top) == SameOfTask("task!")


@document("life.two", version=1)
@attrs.define
class TwoWrong:
    """Another shape under a name and version that are taken."""

    text: int = 0


async def test_what_does_not_fit_its_class_is_named_and_can_be_mended() -> None:
    """Reading and drafting say where; the bytes stay, and can be patched or retired."""
    async with open_test_session(MemoryStorage()) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        await write(session, TwoV1, top, "seven")
        with pytest.raises(NotJsonError, match=r"\$<life\.two>\.text"):
            session.snapshot(TwoWrong, top)
        async with session.body(session.transaction()) as tx:
            with pytest.raises(NotJsonError, match=r"\$<life\.two>\.text"):
                await tx.document(TwoWrong, top)
            tx.append(top, Note("the commit goes on"))
        assert session.snapshot(TwoV1, top) == TwoV1("seven")

        def mend(tx: Transaction) -> None:
            tx.patch(TwoWrong, top, [{"op": "replace", "path": "/text", "value": 7}])

        await session.run(session.transaction(), mend)
        assert session.snapshot(TwoWrong, top) == TwoWrong(7)
        await session.run(session.transaction(), lambda tx: tx.retire(TwoV1, top))
        assert session.snapshot(TwoWrong, top) is None


# --- migrate ------------------------------------------------------------------------------------

KEPT: list[Any] = []


def raising(value: dict[str, Any], from_version: int) -> Any:
    raise KeyError("no such field")


def forgetting(value: dict[str, Any], from_version: int) -> Any:
    value["words"] = [value.pop("text")]


def with_a_set(value: dict[str, Any], from_version: int) -> Any:
    return {"words": {1}}


async def awaiting(value: dict[str, Any], from_version: int) -> Any:
    return value


def mutating(value: dict[str, Any], from_version: int) -> Any:
    value["words"] = [value.pop("text")]
    KEPT.append(value)
    return value


def migrating(function: Any) -> type:
    @document("life.two", version=2)
    @attrs.define
    class Migrating:
        words: list[str] = attrs.Factory(list)
        migrate = staticmethod(function)

    return Migrating


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (raising, r"migrate\(\) of Migrating, from version 1, raised KeyError\('no such field'\)"),
        (forgetting, "returned None; expected the new value, a dict"),
        (awaiting, "returned <coroutine"),
        (with_a_set, r"returned what cannot be stored: \$<life\.two>\.words"),
    ],
)
async def test_a_migrate_that_goes_wrong_is_named_and_changes_nothing(
    function: Any, problem: str
) -> None:
    """The error says which class, from which version, and what it did; the bytes stay."""
    cls = migrating(function)
    async with open_test_session(MemoryStorage()) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        await write(session, TwoV1, top, "old")
        seq = session.line.published_seq
        with pytest.raises(MigrationError, match=problem):
            session.snapshot(cls, top)
        async with session.body(session.transaction()) as tx:
            with pytest.raises(MigrationError, match=problem):
                await tx.document(cls, top)
            with pytest.raises(MigrationError, match=problem):
                tx.patch(cls, top, [{"op": "replace", "path": "/words", "value": []}])
        assert session.line.published_seq == seq
        assert session.snapshot(TwoV1, top) == TwoV1("old")


async def test_a_migrate_that_changes_its_input_changes_nothing_stored() -> None:
    """It works on a copy, and what it returned may be changed afterwards."""
    cls: Any = migrating(mutating)
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        await write(session, TwoV1, top, "old")
        assert session.snapshot(cls, top).words == ["old"]
        assert session.snapshot(TwoV1, top) == TwoV1("old")

        def patch(tx: Transaction) -> None:
            tx.patch(cls, top, [{"op": "add", "path": "/words/-", "value": "new"}])
            KEPT[-1]["words"].clear()

        await session.run(session.transaction(), patch)
        assert session.snapshot(cls, top).words == ["old", "new"]
    async with open_test_session(storage.reopen()) as session:
        assert session.snapshot(cls, top).words == ["old", "new"]


async def test_the_past_of_a_migrated_document_keeps_its_versions() -> None:
    """Each past value is read in its own version, and migrated in memory."""

    @document("life.turns", history="rewindable")
    @attrs.define
    class TurnsV1:
        text: str = ""

    @document("life.turns", version=2, history="rewindable")
    @attrs.define
    class TurnsV2:
        words: list[str] = attrs.Factory(list)
        migrate = staticmethod(TwoV2.migrate)

    async with open_test_session(MemoryStorage()) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        old = [await write(session, TurnsV1, top, f"a {n}") for n in range(DELTAS_MAX + 2)]
        async with session.body(session.transaction()) as tx:
            (await tx.document(TurnsV2, top)).words.append("new")
            new = tx.append(top, Note("new"))
        for place in (0, 5, DELTAS_MAX, DELTAS_MAX + 1):
            found = await session.snapshot_as_of(TurnsV2, top, old[place])
            assert found == TurnsV2(["a", str(place)])
            assert await session.snapshot_as_of(TurnsV1, top, old[place]) == TurnsV1(f"a {place}")
        assert await session.snapshot_as_of(TurnsV2, top, new) == TurnsV2(
            ["a", str(DELTAS_MAX + 1), "new"]
        )
        with pytest.raises(DocumentTooNewError):
            await session.snapshot_as_of(TurnsV1, top, new)


# --- drafts that only look ----------------------------------------------------------------------


@document("life.grown")
@attrs.define
class Grown:
    text: str = ""
    count: int = 1


@document("life.grown")
@attrs.define
class GrownLater:
    """The same version, with a field that it has gained and a number that is a float by now."""

    text: str = ""
    count: float = 1.0
    tags: list[str] = attrs.Factory(list)


@pytest.mark.parametrize("name", ["memory reopened", "sqlite"])
async def test_whoever_only_looks_writes_nothing_whatever_the_class_has_gained(
    name: str, tmp_path: Path
) -> None:
    """A draft that did not change writes nothing; one that did stores what the class adds too."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        await write(await place.session(), Grown, top, "a")
        session = await place.session()
        seq = session.line.published_seq

        async with session.body(session.transaction()) as tx:
            draft = await tx.document(GrownLater, top)
            assert draft.count == 1.0
        assert session.line.published_seq == seq
        async with session.body(session.transaction()) as tx:
            draft = await tx.document(GrownLater, top)
            tx.append_text(GrownLater, top, "/text", "b")
            draft.tags.append("new")
        assert session.line.published_seq == tx.seq
        seq = tx.seq
        expected = {"text": "ab", "count": 1.0, "tags": ["new"]}
        assert session.doc_value(Address("life.grown", 1, top, "")) == expected

        session = await place.session()
        async with session.body(session.transaction()) as tx:
            await tx.document(GrownLater, top)
        assert session.line.published_seq == seq or place.is_reopened
        assert not tx.doc_changes
        with pytest.raises(NotJsonError, match="count"):
            session.snapshot(Grown, top)


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("update revisions set value = '5' where base = 0", "a change is a list of operations"),
        ("update revisions set value = '{}' where base = 0", "a change is a list of operations"),
        ("update revisions set value = '[1]' where base = 0", "an operation is an object"),
        ("update revisions set value = '[{}]' where base = 0", "with op and path"),
        ("update revisions set value = '{' where base = 1", "cannot be read"),
        ("delete from revisions where base = 1", "nothing is stored that its changes could begin"),
        ("delete from revisions", "nothing is stored that its changes could begin"),
    ],
)
async def test_a_damaged_document_is_named_and_the_rest_goes_on(
    damage: str, problem: str, tmp_path: Path
) -> None:
    """Whoever reads, changes or forks it is told which one; other documents are as they were."""
    async with open_place("sqlite", tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        await write(await place.session(), TwoV1, top, "sound")
        await write(await place.session(), PageCurrent, top, "begun")
        entry = await write(await place.session(), PageCurrent, top, "changed")
        session = await place.session()
        row = session.storage.document("life.page", 1, top, "")
        assert row is not None
        await place.close()
        connection = apsw.Connection(str(tmp_path / "place.sqlite"))
        where = "and" if "where" in damage else "where"
        connection.execute(f"{damage} {where} document = {row.id}")
        connection.close()
        session = await place.session()

        async def draft() -> None:
            async with session.body(session.transaction()) as tx:
                await tx.document(PageCurrent, top)

        expected = rf"document {row.id}, 'life\.page' of conversation {top}.*{problem}"
        for attempt in (
            draft,
            lambda: session.snapshot_as_of(PageCurrent, top, entry),
            lambda: session.run(session.transaction(), lambda tx: tx.fork(top)),
        ):
            with pytest.raises(StorageCorruptError, match=expected):
                await attempt()
        with pytest.raises(StorageCorruptError, match=expected):
            session.snapshot(PageCurrent, top)
        await session.run(
            session.transaction(), lambda tx: tx.append_text(TwoV1, top, "/text", " as before")
        )
        assert session.snapshot(TwoV1, top) == TwoV1("sound as before")


@pytest.mark.parametrize("size", [1, 40_000])
@pytest.mark.parametrize(
    "refused",
    [
        [{"op": "replace", "path": "", "value": [1]}],
        [{"op": "append", "path": "/text", "value": "?"}, {"op": "remove", "path": "/no"}],
        [{"op": "add", "path": "/words", "value": []}, {"op": "remove", "path": ""}],
    ],
)
async def test_a_body_that_goes_on_after_a_refused_patch_stores_the_others(
    size: int, refused: list[Any]
) -> None:
    """What was refused has left nothing behind, in memory or in what is stored."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        await write(session, TwoV1, top, "x" * size)

        def body(tx: Transaction) -> None:
            for text in "ab":
                tx.append_text(TwoV1, top, "/text", text)
                with pytest.raises(NotJsonError):
                    tx.patch(TwoV1, top, refused)
            with pytest.raises(NotJsonError):
                tx.patch(TwoV2, top, [{"op": "remove", "path": "/no"}])

        await session.run(session.transaction(), body)
        assert session.snapshot(TwoV1, top) == TwoV1("x" * size + "ab")
    async with open_test_session(storage.reopen()) as session:
        assert session.snapshot(TwoV1, top) == TwoV1("x" * size + "ab")
