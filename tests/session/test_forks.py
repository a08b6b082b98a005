"""Forks: the history they share, and the documents they start with, by policy and by value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from session_support import (
    PLACES,
    HeldBlocking,
    Note,
    Place,
    line_held,
    open_place,
    open_test_session,
)
from trio.testing import wait_all_tasks_blocked

from pidurable.errors import (
    DocumentTooLargeError,
    InvalidArgumentError,
    NotFoundError,
    StorageAccessError,
    StorageRefusedError,
)
from pidurable.records import _json
from pidurable.records._limits import DELTAS_MAX, Settings
from pidurable.session._documents import Address, document
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.storage import MemoryStorage
from pidurable.testing import Fault, FaultyStorage


@document("fork.initial")
@attrs.define
class Initial:
    value: str = ""


@document("fork.current", fork="current")
@attrs.define
class Current:
    value: str = ""


@document("fork.past", history="rewindable", fork="as_of")
@attrs.define
class Past:
    value: str = ""


@document("fork.shelf", history="rewindable", fork="as_of", family=True)
@attrs.define
class Shelf:
    value: str = ""


@document("fork.of_session", scope="session", fork="current")
@attrs.define
class OfSession:
    value: str = ""


KINDS = (Initial, Current, Past)


async def set_all(session: Session, conversation: int, value: str) -> int:
    """Write a value into a document of each policy, with an entry; return the entry."""
    async with session.body(session.transaction()) as tx:
        for cls in KINDS:
            (await tx.document(cls, conversation)).value = value
        return tx.append(conversation, Note(value))


def values(session: Session, conversation: int) -> list[str | None]:
    """What the three documents hold; None where there is none."""
    found = [session.snapshot(cls, conversation) for cls in KINDS]
    return [None if each is None else each.value for each in found]


async def texts(session: Session, conversation: int) -> list[str]:
    return [entry.data["text"] for entry in await session.history(conversation)]


@pytest.mark.parametrize("name", PLACES)
async def test_a_fork_shares_the_history_up_to_its_entry(name: str, tmp_path: Path) -> None:
    """Forks of forks share what both count; what comes later anywhere is each one's own."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation(principal="ada"))).id
        ids = [await place.run(lambda tx, n=n: tx.append(top, Note(f"t{n}"))) for n in range(4)]
        child = await place.run(lambda tx: tx.fork(top, ids[2]))
        await place.run(lambda tx: tx.append(top, Note("t later")))
        own = await place.run(lambda tx: tx.append(child, Note("c0")))
        grandchild = await place.run(lambda tx: tx.fork(child, ids[1]))
        newest = await place.run(lambda tx: tx.fork(child))
        await place.run(lambda tx: tx.append(child, Note("c later")))
        for id in (grandchild, newest):
            await place.run(lambda tx, id=id: tx.append(id, Note(f"g{id}"), head=ids[0]))
        session = await place.session()

        assert await texts(session, child) == ["t0", "t1", "t2", "c0", "c later"]
        assert await texts(session, grandchild) == ["t0", "t1", f"g{grandchild}"]
        assert await texts(session, newest) == ["t0", "t1", "t2", "c0", f"g{newest}"]
        record = session.conversation(newest)
        assert (record.parent, record.parent_entry, record.principal) == (child, own, "ada")
        assert record.owner is None
        for wrong in (ids[3], own + 10_000, True, "1", 0, -1):
            with pytest.raises(NotFoundError, match="entry"):
                await session.run(session.transaction(), lambda tx, at=wrong: tx.fork(child, at))
        with pytest.raises(NotFoundError, match="conversation"):
            await session.run(session.transaction(), lambda tx: tx.fork(10_000))


@pytest.mark.parametrize("name", PLACES)
async def test_documents_are_copied_by_policy(name: str, tmp_path: Path) -> None:
    """`initial` ones are left, `current` ones are as now, `as_of` ones as at the fork entry."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        entries = [await set_all(await place.session(), top, value) for value in "abc"]
        forks = [await place.run(lambda tx, at=at: tx.fork(top, at)) for at in (*entries, None)]
        await set_all(await place.session(), top, "later")
        session = await place.session()

        assert [values(session, fork) for fork in forks] == [
            [None, "c", "a"],
            [None, "c", "b"],
            [None, "c", "c"],
            [None, "c", "c"],
        ]
        # What a fork makes of them is its own.
        await set_all(session, forks[0], "own")
        assert values(session, forks[0]) == ["own", "own", "own"]
        assert values(session, top) == ["later", "later", "later"]
        assert values(session, forks[1]) == [None, "c", "b"]


@pytest.mark.parametrize("name", PLACES)
async def test_a_fork_of_a_fork_of_a_fork_takes_the_value_of_the_ancestor(
    name: str, tmp_path: Path
) -> None:
    """An entry that stands in an ancestor gives what the ancestor had then, at any depth."""
    async with open_place(name, tmp_path) as place:
        chain = [(await place.run(lambda tx: tx.add_conversation())).id]
        entries = [await set_all(await place.session(), chain[0], "0a")]
        entries.append(await set_all(await place.session(), chain[0], "0b"))
        for depth in (1, 2, 3):
            chain.append(await place.run(lambda tx: tx.fork(chain[-1])))
            await set_all(await place.session(), chain[-1], f"{depth}a")
            entries.append(await set_all(await place.session(), chain[-1], f"{depth}b"))
        session = await place.session()
        for entry, value in zip(entries, ("0a", "0b", "1b", "2b", "3b"), strict=True):
            fork = await session.run(
                session.transaction(), lambda tx, entry=entry: tx.fork(chain[-1], entry)
            )
            assert values(session, fork) == [None, "3b", value]
            assert await session.snapshot_as_of(Past, fork, entry) == Past(value)
            assert await session.snapshot_as_of(Past, chain[-1], entry) == Past(value)


@pytest.mark.parametrize("name", PLACES)
async def test_a_fork_in_the_commit_of_its_entry_has_what_the_body_staged(
    name: str, tmp_path: Path
) -> None:
    """Drafts count, also when they are changed behind the call; a retired one is not copied."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        await set_all(await place.session(), top, "old")
        session = await place.session()
        async with session.body(session.transaction()) as tx:
            drafts = [await tx.document(cls, top) for cls in KINDS]
            entry = tx.append(top, Note("now"))
            fork = tx.fork(top)
            for draft in drafts:
                draft.value = "new"
            (await tx.document(Shelf, top, key="k")).value = "made here"
        async with session.body(session.transaction()) as tx:
            second, third = tx.fork(top, entry), tx.fork(top)
            tx.retire(Current, top)
            tx.retire(Past, top)
        session = await place.session()

        assert session.conversation(fork).parent_entry == entry
        assert values(session, fork) == [None, "new", "new"]
        assert session.snapshot(Shelf, fork, key="k") == Shelf("made here")
        # `as_of` looks at the entry, where the document still was.
        assert values(session, second) == [None, None, "new"]
        # A fork of now has what there is when the body ends.
        assert values(session, third) == [None, None, None]
        assert values(session, top) == ["new", None, None]


@pytest.mark.parametrize("name", PLACES)
async def test_a_fork_at_an_entry_of_its_batch_sees_the_documents_of_then(
    name: str, tmp_path: Path
) -> None:
    """Between the entry and the fork other bodies of the batch change what is copied."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        await set_all(await place.session(), top, "old")
        session = await place.session()
        made: dict[str, int] = {}

        def put(tx: Transaction, value: str) -> None:
            made[value] = tx.append(top, Note(value))
            for cls in KINDS:
                tx.patch(cls, top, [{"op": "replace", "path": "/value", "value": value}])

        def end(tx: Transaction) -> None:
            tx.retire(Past, top)

        def fork(tx: Transaction) -> None:
            made["fork a"] = tx.fork(top, made["a"])
            made["fork b"] = tx.fork(top, made["b"])
            made["fork of a fork"] = tx.fork(made["fork a"])

        async with trio.open_nursery() as nursery, line_held(session):
            for body in (lambda tx: put(tx, "a"), lambda tx: put(tx, "b"), end, fork):
                nursery.start_soon(session.run, session.transaction(), body)
                await wait_all_tasks_blocked()
        session = await place.session()

        assert values(session, made["fork a"]) == [None, "b", "a"]
        assert values(session, made["fork b"]) == [None, "b", "b"]
        assert values(session, made["fork of a fork"]) == [None, "b", "a"]
        assert await texts(session, made["fork of a fork"]) == ["old", "a"]


async def test_a_body_works_on_the_documents_of_its_own_fork() -> None:
    """The body finds in the fork what it started with, and changes or retires it at once."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        first = await set_all(session, top, "parent")
        async with session.body(session.transaction()) as tx:
            drafted = await tx.document(Current, top)
            drafted.value = "drafted"
            fork = tx.fork(top)
            current = await tx.document(Current, fork)
            assert current.value == "drafted"
            current.value += " and mine"
            drafted.value = "too late for the fork"
            tx.append_text(Past, fork, "/value", " grown")
            assert tx.doc_value(Address("fork.initial", 1, fork, "")) is None
            second, third = tx.fork(fork), tx.fork(top)
            tx.retire(Past, third)
            fourth = tx.fork(fork, first)
            entry = tx.append(fork, Note("mine"))
            assert tx.fork(fork, entry) != tx.fork(fork, entry)
        assert values(session, top) == ["parent", "too late for the fork", "parent"]
        assert values(session, fork) == [None, "drafted and mine", "parent grown"]
        assert values(session, second) == [None, "drafted and mine", "parent grown"]
        # The entry of this one stands in the top: its `as_of` documents are the top's of then.
        assert values(session, fourth) == [None, "drafted and mine", "parent"]
        assert values(session, third) == [None, "too late for the fork", None]
        for address in (Address("fork.current", 1, fork, ""), Address("fork.past", 1, fork, "")):
            row = storage.document(*address)
            assert row is not None
            assert [revision.base for revision in storage.revisions(row.id)] == [1]


@pytest.mark.parametrize("name", PLACES)
async def test_a_conversation_without_entries_is_forked_as_it_is(name: str, tmp_path: Path) -> None:
    """Its fork shares no entry, also none that comes later, and has its documents of now."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        session = await place.session()
        async with session.body(session.transaction()) as tx:
            for cls in KINDS:
                (await tx.document(cls, top)).value = "set"
        fork = await place.run(lambda tx: tx.fork(top))
        again = await place.run(lambda tx: tx.fork(fork))
        later = await place.run(lambda tx: tx.append(top, Note("later")))
        own = await place.run(lambda tx: tx.append(again, Note("own")))
        session = await place.session()

        assert session.conversation(fork).parent == top
        assert session.conversation(fork).parent_entry is None
        assert await texts(session, fork) == []
        assert await texts(session, again) == ["own"]
        assert [entry.id for entry in await session.context_entries(again)] == [own]
        assert values(session, again) == values(session, fork) == [None, "set", "set"]
        with pytest.raises(NotFoundError, match="entry"):
            await session.run(session.transaction(), lambda tx: tx.fork(fork, later))
        with pytest.raises(NotFoundError, match="entry"):
            await session.snapshot_as_of(Past, fork, later)


@pytest.mark.parametrize("name", PLACES)
async def test_a_key_forks_once(name: str, tmp_path: Path) -> None:
    """Asked again, in the same body, batch or later, the first fork is the answer."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        entry = await set_all(await place.session(), top, "a")
        other = (await place.run(lambda tx: tx.add_conversation(key="taken"))).id

        def twice(tx: Transaction) -> tuple[int, int]:
            return tx.fork(top, key="k"), tx.fork(top, entry, key="k")

        first, second = await place.run(twice)
        third = await place.run(lambda tx: tx.fork(top, entry, key="k"))
        session = await place.session()

        assert first == second == third
        for key, parent in (("k", other), ("taken", top)):
            with pytest.raises(InvalidArgumentError, match="no fork of conversation"):
                await session.run(
                    session.transaction(),
                    lambda tx, key=key, parent=parent: tx.fork(parent, key=key),
                )
        with pytest.raises(InvalidArgumentError, match="key"):
            await session.run(session.transaction(), lambda tx: tx.fork(top, key=""))


@document("fork.kept", version=2, fork="current")
@attrs.define
class KeptV2:
    value: str = ""


@document("fork.kept", version=3, fork="initial")
@attrs.define
class KeptV3:
    text: str = ""

    @staticmethod
    def migrate(value: dict[str, Any], from_version: int) -> dict[str, Any]:
        return {"text": f"{value['value']} of {from_version}"}


@pytest.mark.parametrize("name", PLACES)
async def test_the_copy_keeps_the_stored_version_and_policy(name: str, tmp_path: Path) -> None:
    """A fork needs no class: what it stores has the parent's version, and is migrated later."""
    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        session = await place.session()
        async with session.body(session.transaction()) as tx:
            (await tx.document(KeptV2, top)).value = "x"
        fork = await place.run(lambda tx: tx.fork(top))
        again = await place.run(lambda tx: tx.fork(fork))
        session = await place.session()

        assert session.snapshot(KeptV2, again) == KeptV2("x")
        assert session.snapshot(KeptV3, again) == KeptV3("x of 2")
        async with session.body(session.transaction()) as tx:
            fresh = tx.fork(again)
            (await tx.document(KeptV3, fresh)).text += "!"
        assert session.snapshot(KeptV3, fresh) == KeptV3("x of 2!")
        assert session.snapshot(KeptV2, again) == KeptV2("x")


async def test_only_documents_of_the_conversation_are_copied() -> None:
    """Documents of the session are one for all; each key of a family is copied for itself."""
    async with open_test_session(MemoryStorage()) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        async with session.body(session.transaction()) as tx:
            (await tx.document(OfSession)).value = "one"
            for key in ("a", "b", "c"):
                (await tx.document(Shelf, top, key=key)).value = key
        entry = await set_all(session, top, "x")
        async with session.body(session.transaction()) as tx:
            (await tx.document(Shelf, top, key="a")).value = "changed"
            tx.retire(Shelf, top, key="c")
        writes = session.transaction()
        fork = await session.run(writes, lambda tx: tx.fork(top, entry))

        assert [session.snapshot(Shelf, fork, key=key) for key in ("a", "b")] == [
            Shelf("a"),
            Shelf("b"),
        ]
        assert session.snapshot(OfSession) == OfSession("one")
        assert {change.address.scope for change in writes.doc_changes} == {1}


async def test_a_copy_is_one_base_whatever_the_original_took() -> None:
    """A value that was stored as a base and 256 deltas is a first base in the fork."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        entries = [await set_all(session, top, "x" * n) for n in range(DELTAS_MAX // 8)]
        fork = await session.run(session.transaction(), lambda tx: tx.fork(top, entries[-2]))
        row = storage.document("fork.past", 1, fork, "")
        assert row is not None
        (base,) = storage.revisions(row.id)
        assert base.value == _json.dumps({"value": "x" * (DELTAS_MAX // 8 - 2)})
        assert row.created_seq == base.seq == session.line.published_seq


@pytest.mark.parametrize("name", ["memory reopened", "sqlite reopened"])
async def test_a_document_at_the_limit_is_copied_and_one_above_refuses_the_fork(
    name: str, tmp_path: Path
) -> None:
    """The limit of today counts for a copy too; nothing of a refused fork is stored."""

    async def fork_under(limit: int, place: Place, top: int) -> int:
        place.options = {"settings": Settings(document_bytes_max=limit)}
        return await place.run(lambda tx: tx.fork(top))

    async with open_place(name, tmp_path) as place:
        top = (await place.run(lambda tx: tx.add_conversation())).id
        session = await place.session()
        async with session.body(session.transaction()) as tx:
            (await tx.document(Current, top)).value = "é" * 500
        size = len(_json.dumps({"value": "é" * 500}).encode())
        with pytest.raises(DocumentTooLargeError, match=str(size)):
            await fork_under(size - 1, place, top)
        assert len((await place.session()).storage.conversations_by_owner(None)) == 1
        fork = await fork_under(size, place, top)
        assert (await place.session()).snapshot(Current, fork) == Current("é" * 500)


class Noticing(HeldBlocking):
    """Blocking work in the loop, which knows when it is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        self.inside = True
        try:
            return await super().run(fn, *args)
        finally:
            self.inside = False


async def test_what_a_fork_copies_is_read_outside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its body may await: also documents of the past, and those that nobody had read."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        entries = [await set_all(session, top, value) for value in "ab"]
    again = storage.reopen()
    blocking = Noticing()
    outside: list[str] = []

    def noticed(name: str) -> Any:
        read = getattr(again, name)

        def reading(*args: Any, **named: Any) -> Any:
            if not blocking.inside:
                outside.append(name)
            return read(*args, **named)

        return reading

    for name in ("document", "documents", "revisions", "document_as_of", "documents_as_of"):
        monkeypatch.setattr(again, name, noticed(name))
    async with open_test_session(again, blocking=blocking) as session:
        async with session.body(session.transaction()) as tx:
            fork = tx.fork(top, entries[0])
        assert outside == []
        assert values(session, fork) == [None, "b", "a"]
        await session.run(session.transaction(), lambda tx: tx.fork(top, entries[0]))
        assert "documents_as_of" in outside
    again = storage.reopen()
    outside.clear()
    for name in ("document", "revisions", "document_as_of"):
        monkeypatch.setattr(again, name, noticed(name))
    async with (
        open_test_session(again, blocking=blocking) as session,
        session.body(session.transaction()) as tx,
    ):
        # A body that looks at its fork, which is a fork of its fork, may await as well.
        fork = tx.fork(tx.fork(top))
        assert (await tx.document(Current, fork)).value == "b"
        assert (await tx.document(Past, tx.fork(top, entries[0]))).value == "a"
        assert outside == []


@pytest.mark.parametrize("read", ["documents", "revisions", "documents_as_of", "entry", "entries"])
@pytest.mark.parametrize("awaiting", [True, False])
async def test_a_fork_that_could_not_be_read_is_not_made(read: str, awaiting: bool) -> None:
    """The commit is refused with the error of the read, stores nothing, and can be done again."""
    memory = MemoryStorage()
    async with open_test_session(memory) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        entry = await set_all(session, top, "a")
    storage = FaultyStorage(memory.reopen())
    async with open_test_session(storage) as session:
        at = None if read == "entries" else entry

        async def fork() -> int:
            if awaiting:
                async with session.body(session.transaction()) as tx:
                    return tx.fork(top, at)
            return await session.run(session.transaction(), lambda tx: tx.fork(top, at))

        seq = session.line.published_seq
        storage.add(Fault.fail(read))
        with pytest.raises(StorageAccessError):
            await fork()
        assert session.line.published_seq == seq
        assert len(storage.conversations_by_owner(None)) == 1

        made = await fork()
        assert values(session, made) == [None, "a", "a"]


async def test_a_batch_that_fails_takes_its_forks_with_it() -> None:
    """The key is free again, and nobody has seen the fork or its documents."""
    storage = FaultyStorage(MemoryStorage())
    settings = Settings(storage_retry_seconds=0.0)
    async with open_test_session(storage, settings=settings) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        await set_all(session, top, "a")
        storage.add(Fault.refuse("apply", times=50))
        with pytest.raises(StorageRefusedError):
            await session.run(session.transaction(), lambda tx: tx.fork(top, key="k"))
        storage.clear()
        assert len(storage.conversations_by_owner(None)) == 1

        made = await session.run(session.transaction(), lambda tx: tx.fork(top, key="k"))
        assert values(session, made) == [None, "a", "a"]


async def test_a_fork_that_is_cancelled_while_it_reads_is_not_made() -> None:
    """Cancelled behind its body, the commit stores nothing, and the next one goes on."""
    memory = MemoryStorage()
    async with open_test_session(memory) as session:
        top = (await session.run(session.transaction(), lambda tx: tx.add_conversation())).id
        await set_all(session, top, "a")
        with trio.CancelScope() as scope:
            async with session.body(session.transaction()) as tx:
                tx.fork(top)
                scope.cancel()
        assert scope.cancelled_caught
        assert len(session.storage.conversations_by_owner(None)) == 1
        made = await session.run(session.transaction(), lambda tx: tx.fork(top))
        assert values(session, made) == [None, "a", "a"]
