"""Real failures of other systems, tried on documents, forks, watches and contexts."""

from __future__ import annotations

import gc
import itertools
import json
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from pidurable import (
    Edit,
    Extension,
    Harness,
    Registry,
    Settings,
    TextBlock,
    UserMessage,
    document,
    entry,
    open_harness,
    patch,
)
from pidurable.errors import NotJsonError, StorageCorruptError
from pidurable.records._limits import DELTAS_MAX
from pidurable.testing import InlineBlocking

KIB = 1024


@document("cases.log", history="rewindable", fork="as_of")
@attrs.define
class Log:
    text: str = ""
    steps: list[Any] = attrs.Factory(list)


@document("cases.plan")
@attrs.define
class Plan:
    value: Any = None


@asynccontextmanager
async def opened(store: Path | str, **options: Any) -> AsyncIterator[Harness]:
    async with open_harness(
        store, durability="process", blocking=InlineBlocking(), **options
    ) as harness:
        yield harness


async def put(harness: Harness, conversation: int, value: Any) -> None:
    async with harness.commit() as tx:
        (await tx.document(Plan, conversation)).value = value


def rows(path: Path, sql: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def change(path: Path, sql: str, *values: Any) -> None:
    connection = sqlite3.connect(path)
    try:
        with connection:
            connection.execute("pragma foreign_keys = off")
            assert connection.execute(sql, values).rowcount == 1
    finally:
        connection.close()


# --- the store ------------------------------------------------------------------------------------


async def test_a_damaged_revision_is_an_error_at_each_door_and_is_never_written_over(
    tmp_path: Path,
) -> None:
    """Reading, drafting, patching, watching and forking all name the document; others go on."""
    # C078
    path = tmp_path / "s.sqlite"
    async with opened(path) as harness:
        root = await harness.root()
        async with harness.commit() as tx:
            first = tx.append(root.id, "one", kind="cases.note")
            (await tx.document(Log, root.id)).text = "kept"
            (await tx.document(Plan, root.id)).value = "other"
        async with harness.commit() as tx:
            tx.append(root.id, "two", kind="cases.note")
            tx.append_text(Log, root.id, "/text", " and more")
    ((document_id, good),) = rows(path, "select document, value from revisions where base = 0")
    change(path, "update revisions set value = '[{' where base = 0 and document = ?", document_id)
    before = rows(path, "select * from revisions")

    async with opened(path) as harness:
        root = await harness.root()

        async def read() -> None:
            harness.snapshot(Log, root.id)

        async def draft() -> None:
            async with harness.commit() as tx:
                (await tx.document(Log, root.id)).text = "new"

        async def grow() -> None:
            async with harness.commit() as tx:
                tx.append_text(Log, root.id, "/text", "new")

        async def watch() -> None:
            async with harness.watch(Log, root.id):
                pass

        async def fork() -> None:
            await root.fork()

        for way in (read, draft, grow, watch, fork):
            with pytest.raises(StorageCorruptError, match=r"cases\.log"):
                await way()
        assert (await harness.snapshot_as_of(Log, root.id, first)) == Log("kept")
        await put(harness, root.id, "goes on")
        assert harness.snapshot(Plan, root.id) == Plan("goes on")
    after = rows(path, f"select * from revisions where document = {document_id}")
    assert after == [row for row in before if row[0] == document_id]

    change(
        path, "update revisions set value = ? where base = 0 and document = ?", good, document_id
    )
    async with opened(path) as harness:
        assert harness.snapshot(Log, (await harness.root()).id) == Log("kept and more")


def copy_with_torn_log(path: Path, copy: Path, damage: str) -> None:
    """Copy a store as a crash would leave it, and tear the end of its log.

    Another process copies: this one holds the store, and must not open SQLite's files itself.
    """
    for end in ("", "-wal"):
        subprocess.run(["cp", f"{path}{end}", f"{copy}{end}"], check=True)
    log = Path(f"{copy}-wal")
    whole = log.read_bytes()
    torn = {"cut": whole[:-100], "zeros": whole + b"\0" * 1_000, "garbage": whole + whole[:1_000]}
    log.write_bytes(torn[damage])


@pytest.mark.parametrize("damage", ["cut", "zeros", "garbage"])
async def test_a_torn_end_of_the_log_costs_at_most_the_last_commit(
    damage: str, tmp_path: Path
) -> None:
    """All before it reads, nothing is fused with it, and the next commit is whole."""
    # C075
    path, copy = tmp_path / "s.sqlite", tmp_path / "copy.sqlite"
    async with opened(path) as harness:
        root = await harness.root()
        ids = []
        for number in range(20):
            async with harness.commit() as tx:
                ids.append(tx.append(root.id, {"number": number}, kind="cases.note"))
                (await tx.document(Log, root.id)).text += f"{number} "
        copy_with_torn_log(path, copy, damage)

    async with opened(copy, takeover=True) as harness:
        root = await harness.root()
        kept = len(await root.history())
        assert kept == (19 if damage == "cut" else 20)
        async with harness.commit() as tx:
            tx.append(root.id, {"number": "next"}, kind="cases.note")
            (await tx.document(Log, root.id)).text += "next"
    async with opened(copy) as harness:
        history = await harness.conversation(root.id).history()
        numbers: list[Any] = [*range(kept), "next"]
        assert [entry.data["number"] for entry in history] == numbers
        assert [entry.id for entry in history][:kept] == ids[:kept]
        found = harness.snapshot(Log, root.id)
        assert found is not None
        assert found.text == " ".join(map(str, numbers))


STEPS = 400


async def test_a_store_grows_with_what_is_put_in_and_not_with_what_is_there(tmp_path: Path) -> None:
    """Steps of 1 kB, half an entry and half in a rewindable document: linear in the payload."""
    # C080
    sizes: dict[int, int] = {}
    for steps in (STEPS, 2 * STEPS):
        path = tmp_path / f"{steps}.sqlite"
        async with opened(path) as harness:
            root = await harness.root()
            async with harness.commit() as tx:
                await tx.document(Log, root.id)
            for number in range(steps):
                step = f"{number:04d}" + "x" * 508
                async with harness.commit() as tx:
                    tx.append(root.id, step, kind="cases.note")
                    tx.append_text(Log, root.id, "/text", step[:256])
                    tx.patch(Log, root.id, [{"op": "add", "path": "/steps/-", "value": step[:256]}])
        sizes[steps] = path.stat().st_size
    payload = STEPS * KIB

    # Rewindable: each base repeats what is there, and so doubles at most what the deltas took.
    assert sizes[2 * STEPS] - sizes[STEPS] <= 4 * payload
    assert sizes[2 * STEPS] <= 4 * 2 * payload


class Reads:
    """Counts the rows that a storage gives out."""

    def __init__(self, harness: Harness) -> None:
        self.entries = 0
        self.revisions = 0
        storage: Any = harness.session.storage
        given_entries, given_revisions = storage.entries, storage.revisions

        def entries(*args: Any, **options: Any) -> Any:
            found = given_entries(*args, **options)
            self.entries += len(found)
            return found

        def revisions(*args: Any, **options: Any) -> Any:
            found = given_revisions(*args, **options)
            self.revisions += len(found)
            return found

        storage.entries, storage.revisions = entries, revisions


@pytest.mark.parametrize("length", [50, 1_000])
async def test_opening_and_going_on_read_the_context_and_not_the_age(
    length: int, tmp_path: Path
) -> None:
    """After a head, the context, a fork, a document and a watch read as much of 50 as of 1,000."""
    # C079
    path = tmp_path / "s.sqlite"
    async with opened(path) as harness:
        root = await harness.root()
        for start in range(0, length, 50):
            async with harness.commit() as tx:
                await tx.document(Log, root.id)
                for number in range(start, start + 50):
                    said = UserMessage(blocks=(TextBlock(text=f"said {number}"),), at_us=1)
                    tx.append(root.id, kind="cases.said", messages=[said])
            async with harness.commit() as tx:
                tx.append_text(Log, root.id, "/text", "x" * KIB)
        async with harness.commit() as tx:
            summary = UserMessage(blocks=(TextBlock(text="summary"),), at_us=1)
            tx.append(root.id, kind="cases.summary", messages=[summary], head=0)

    async with opened(path) as harness:
        reads = Reads(harness)
        root = await harness.root()
        context = await root.context()
        assert [each.message for each in context] == [summary]
        fork = await root.fork()
        assert len(await fork.context()) == 1
        assert len(await root.history(limit=20)) == 20
        async with harness.watch(Log, root.id) as watch:
            assert len(watch.value["text"]) == length // 50 * KIB  # type: ignore[index]

        assert reads.entries <= 40
        assert reads.revisions <= 40


# --- odd data -------------------------------------------------------------------------------------

ODD = [
    "\u202euser\u2066gpj.exe",
    "\ufffe\uffff\U0010ffff",
    "a\r\n\u2028\x85\x0b\x7f\x1b[31m",
    "\\u0000 \\ud800",
    "/~0~1~",
    "e\u0301",
]


async def test_odd_text_goes_through_documents_patches_and_frames_unchanged() -> None:
    """As values, as keys, and so in the pointers of patches; frames can be sent as they are."""
    # C081, C082
    async with opened(":memory:") as harness:
        root = await harness.root()
        await put(harness, root.id, {"text": "", "by": {}})
        async with harness.watch(Plan, root.id) as watch:
            remote = watch.json()
            for text in ODD:
                async with harness.commit() as tx:
                    tx.append_text(Plan, root.id, "/value/text", text)
                async with harness.commit() as tx:
                    (await tx.document(Plan, root.id)).value["by"][text] = {text: [text]}
                async with harness.commit() as tx:
                    (await tx.document(Plan, root.id)).value["by"][text][text].append(None)
            for _ in range(3 * len(ODD)):
                frame = await anext(watch)
                sent = json.loads(json.dumps(frame.patch, ensure_ascii=False).encode())
                remote = patch.apply(remote, sent)
                assert remote == frame.json()

        assert harness.snapshot(Plan, root.id) == Plan(
            {"text": "".join(ODD), "by": {text: {text: [text, None]} for text in ODD}}
        )


@pytest.mark.parametrize("bad", ["a\0", "\0", "\ud83d", "a\udcff"])
async def test_half_a_character_and_nul_are_refused_in_documents_and_seen_by_nobody(
    bad: str,
) -> None:
    """Also where the other half would come next: who streams joins the pieces."""
    # C081, C082
    async with opened(":memory:") as harness:
        root = await harness.root()
        await put(harness, root.id, {"text": "so far", "keys": {}})

        async def append() -> None:
            async with harness.commit() as tx:
                tx.append_text(Plan, root.id, "/value/text", bad)

        async def key() -> None:
            async with harness.commit() as tx:
                tx.patch(Plan, root.id, [{"op": "add", "path": f"/value/keys/{bad}", "value": 1}])

        async def draft() -> None:
            await put(harness, root.id, {"text": "so far", "keys": {bad: 1}})

        async with harness.watch(Plan, root.id) as watch:
            for way in (append, key, draft):
                with pytest.raises(NotJsonError, match=r"^\$<cases\.plan>"):
                    await way()
            await put(harness, root.id, "done")

            assert (await anext(watch)).value["value"] == "done"  # type: ignore[index]


async def test_a_document_of_an_extension_that_is_gone_keeps_its_bytes(tmp_path: Path) -> None:
    """Without its codec it does not read as nothing: the error has the place, the bytes stay."""
    # C083
    path = tmp_path / "s.sqlite"
    fraction: dict[type, Any] = {Fraction: (str, Fraction)}

    @entry("cases.share")
    @attrs.frozen
    class Share:
        parts: dict[str, tuple[Fraction, ...]]

    @document("cases.shares")
    @attrs.define
    class Shares:
        parts: dict[str, tuple[Fraction, ...]] = attrs.Factory(dict)

    registry = Registry()
    registry.install(Extension("shares", codecs=fraction))
    async with opened(path, registry=registry) as harness:
        root = await harness.root()
        async with harness.commit() as tx:
            (await tx.document(Shares, root.id)).parts["a"] = (Fraction(1, 3),)
            id = tx.append(root.id, Share({"a": (Fraction(1, 3),)}))
    stored = rows(path, "select * from revisions")
    async with opened(path) as harness:
        root = await harness.root()
        with pytest.raises(NotJsonError, match="values of Fraction cannot be stored"):
            harness.snapshot(Shares, root.id)
        with pytest.raises(NotJsonError, match="values of Fraction cannot be stored"):
            async with harness.commit() as tx:
                await tx.document(Shares, root.id)
        (read,) = [each for each in await root.history() if each.id == id]
        with pytest.raises(NotJsonError, match="Fraction"):
            read.read(Share)
        assert read.data == {"parts": {"a": ["1/3"]}}
        # Who knows no class at all still sees, copies and watches the JSON.
        fork = await root.fork()
        async with harness.watch(Shares, root.id) as watch:
            assert watch.json() == {"parts": {"a": ["1/3"]}}
    assert stored == rows(path, "select * from revisions")
    async with opened(path, registry=registry) as harness:
        assert harness.snapshot(Shares, root.id) == Shares({"a": (Fraction(1, 3),)})
        assert harness.snapshot(Shares, fork.id) is None  # its policy is `initial`


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
async def test_what_is_not_a_number_never_reaches_a_document_or_its_watchers(bad: float) -> None:
    """A draft, a patch and a part that a later operation removes are refused by one rule."""
    # C084
    async with opened(":memory:") as harness:
        root = await harness.root()
        await put(harness, root.id, {"cost": 1.5})
        add = {"op": "add", "path": "/value/x", "value": bad}

        async def patch_with(*ops: Any) -> None:
            async with harness.commit() as tx:
                tx.patch(Plan, root.id, list(ops))

        for op in (add, {**add, "value": [bad]}):
            with pytest.raises(NotJsonError, match="finite"):
                await patch_with(op)
        with pytest.raises(NotJsonError, match="finite"):
            await patch_with(add, {"op": "remove", "path": "/value/x"})
        with pytest.raises(NotJsonError, match="finite"):
            await put(harness, root.id, {"cost": [bad]})
        assert harness.snapshot(Plan, root.id) == Plan({"cost": 1.5})


async def test_a_value_as_deep_as_it_may_be_goes_through_a_watch_and_a_fork() -> None:
    """Its patch and its copies are made without recursion that would end, and can be sent."""
    # C085
    deep: Any = []
    for _ in range(197):
        deep = [deep]
    async with opened(":memory:") as harness:
        root = await harness.root()
        await put(harness, root.id, None)
        async with harness.watch(Plan, root.id) as watch:
            await put(harness, root.id, deep)
            frame = await anext(watch)
            assert json.loads(json.dumps(frame.patch))[0]["value"] == deep
            assert frame.json() == {"value": deep}
        async with harness.commit() as tx:
            tx.patch(
                Plan, root.id, [{"op": "replace", "path": "/value" + "/0" * 197, "value": [1]}]
            )
        found = harness.snapshot(Plan, root.id)
        assert found is not None
        assert str(found.value) == "[" * 198 + "1" + "]" * 198


# --- long life ------------------------------------------------------------------------------------


def alive() -> dict[str, int]:
    """How many objects of ours, and of trio, there are, by their class."""
    gc.collect()
    counts: dict[str, int] = {}
    for each in gc.get_objects():
        cls = type(each)
        # A class made in C may have something else there.
        if str(cls.__module__).startswith(("pidurable", "trio")):
            counts[cls.__qualname__] = counts.get(cls.__qualname__, 0) + 1
    return counts


@pytest.mark.slow
async def test_a_viewer_that_reconnects_thousands_of_times_leaves_nothing_behind(
    slow_run: bool,
) -> None:
    """Left in order, by an error, and cancelled while it waits: objects and hubs are as before."""
    # C100
    async with opened(":memory:") as harness:
        root = await harness.root()
        await put(harness, root.id, 0)
        values = itertools.count(1)

        kinds: list[Callable[[], AbstractAsyncContextManager[Any]]] = [
            lambda: harness.watch(Plan, root.id),
            harness.watch_tasks,
            root.watch,
            root.events,
        ]

        async def look(number: int) -> None:
            async with kinds[number % 4]() as watch:
                if number % 100 == 0:
                    await put(harness, root.id, next(values))
                    assert (await anext(watch)).seq == watch.seq
                if number % 3 == 1:
                    raise ValueError("lost the connection")
                if number % 3 == 2:
                    with trio.CancelScope() as scope:
                        scope.cancel()
                        await anext(watch)

        async def reconnect(times: int) -> None:
            for number in range(times):
                try:
                    await look(number)
                except ValueError:
                    continue

        await reconnect(100)
        before = alive()
        await reconnect(5_000 if slow_run else 2_000)
        after = alive()

        # A document keeps deltas up to its next base, and trio a few scopes whose deadline is over.
        bounded = {"RevisionRow": DELTAS_MAX, "CancelScope": 1_000}
        grown = {name: n - before.get(name, 0) for name, n in after.items()}
        assert {name: n for name, n in grown.items() if n > bounded.get(name, 50)} == {}


async def test_an_edit_and_a_head_do_not_repeat_what_they_replace(tmp_path: Path) -> None:
    """Leaving out and starting anew store a few bytes, whatever is left out."""
    # C080
    path = tmp_path / "s.sqlite"
    async with opened(path, settings=Settings()) as harness:
        root = await harness.root()
        async with harness.commit() as tx:
            said = UserMessage(blocks=(TextBlock(text="x" * 60_000),), at_us=1)
            first = tx.append(root.id, kind="cases.said", messages=[said])
        async with harness.commit() as tx:
            tx.append(root.id, kind="cases.edit", edits=[Edit(target=first)])
        async with harness.commit() as tx:
            tx.append(root.id, kind="cases.head", head=0)
        assert len(await root.context()) == 0
    stored = rows(
        path, "select coalesce(length(messages), 0) + coalesce(length(edits), 0) from entries"
    )

    assert stored[0][0] > 60_000
    assert sum(size for (size,) in stored[1:]) < 100
