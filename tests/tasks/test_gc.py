"""Retention beside work that goes on: what comes meanwhile, late retries, marks, blobs, crashes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from gc_stores import NOW_US, Planted, check_owners
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable import (
    Extension,
    Registry,
    Settings,
    Task,
    TaskContext,
    TaskId,
    document,
    nothing_to_undo,
    phase,
)
from pidurable.agent._inbox import _checked_blocks
from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    RequestIdConflictError,
    SessionPoisonedError,
    StorageRefusedError,
    UnknownTaskError,
)
from pidurable.harness._open import Harness, open_harness
from pidurable.records import _codec
from pidurable.records._commands import Command, encode_command
from pidurable.records._messages import Block, ImageBlock, TextBlock, UserMessage
from pidurable.session._seams import InlineBlocking, TrioClock
from pidurable.storage import MemoryStorage, Op, RecordKind, RemovalRow, SqliteStorage, Storage
from pidurable.tasks import _gc, _gc_blobs, _gc_pace
from pidurable.testing import Fault, FaultyStorage

MONTH = timedelta(days=30)


@document("gc.plan")
@attrs.define
class Plan:
    text: str = ""
    notes: list[str] = attrs.Factory(list)


@attrs.frozen
class At:
    step: str


class BetweenReads:
    """Blocking work in the loop, after which the test may do something."""

    def __init__(self) -> None:
        self.then: Callable[[], Awaitable[None]] | None = None
        self.only_trees = False
        """Wait until trees were found, which then are to be removed."""
        self._inline = InlineBlocking()

    def worker(self, name: str) -> Any:
        return self._inline.worker(name)

    async def run(self, fn: Callable[..., Any], *args: Any, abandon: bool = False) -> Any:
        found = await self._inline.run(fn, *args)
        is_read = fn.__qualname__.startswith("Collector._slice")
        if is_read and self.only_trees:
            is_read = bool(found[0]) and isinstance(found[0][0], tuple)
        if self.then is not None and is_read:
            then, self.then = self.then, None
            await then()
        return found


@asynccontextmanager
async def opened(storage: Storage, **options: Any) -> AsyncIterator[Harness]:
    options.setdefault("blocking", InlineBlocking())
    options.setdefault("settings", Settings(storage_retry_seconds=0))
    async with open_harness(storage, clock=TrioClock(NOW_US), **options) as harness:
        yield harness


def stored(made: Planted) -> MemoryStorage:
    storage = MemoryStorage()
    made.store(storage)
    return storage


def one_tree(entries: int = 3, *, key: str | None = None) -> tuple[Planted, dict[str, int]]:
    """A root with a child, an owned conversation with entries, and a task in it."""
    made = Planted()
    top = made.conversation()
    root = made.task(top, key=key)
    child = made.task(top, owner=root)
    inner = made.conversation(owner=child)
    for _ in range(entries):
        made.entry(inner)
    made.document(1, inner)
    below = made.task(inner)
    ids = {"top": top, "root": root, "child": child, "inner": inner, "below": below}
    return made, ids


# --- what comes meanwhile ---------------------------------------------------------------------


async def append(harness: Harness, ids: dict[str, int]) -> None:
    async with harness.commit() as tx:
        tx.append(ids["inner"], "late", kind="note")


async def fork(harness: Harness, ids: dict[str, int]) -> None:
    async with harness.commit() as tx:
        tx.fork(ids["inner"])


async def write_document(harness: Harness, ids: dict[str, int]) -> None:
    async with harness.commit() as tx:
        (await tx.document(Plan, ids["inner"])).text = "late"


async def submit(harness: Harness, ids: dict[str, int]) -> None:
    await harness.conversation(ids["inner"]).submit("late")


@pytest.mark.parametrize("come", [append, fork, write_document, submit])
async def test_a_tree_that_is_added_to_meanwhile_stays(come: Any) -> None:
    """What is added between the look at a tree and its commit keeps it, whole."""
    made, ids = one_tree()
    storage, blocking = stored(made), BetweenReads()
    async with opened(storage, blocking=blocking) as harness:
        blocking.then, blocking.only_trees = lambda: come(harness, ids), True
        kept = await harness.gc(older_than=MONTH)

        assert (kept.trees, kept.kept) == (0, {"changed": 1})
        assert blocking.then is None
        assert harness.task(ids["root"]).status.word == "terminal"
    check_owners(storage.reopen())


@pytest.mark.parametrize("come", [append, fork, write_document, submit])
async def test_nothing_is_added_to_a_tree_that_is_going(
    come: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree whose removal was cut short refuses what would be added, also after a crash."""
    made, ids = one_tree(entries=20)
    storage = stored(made)
    cut_short(monkeypatch)
    async with opened(FaultyStorage(storage.reopen(), [Fault.refuse(at=3, times=9_999)])) as first:
        with pytest.raises(StorageRefusedError):
            await first.gc(older_than=MONTH)
        with pytest.raises(NotFoundError, match=f"the tree of task {ids['root']}, which had ended"):
            await come(first, ids)
    assert storage.reopen().removals()
    async with opened(FaultyStorage(storage.reopen(), [Fault.refuse(at=1, times=9_999)])) as again:
        with pytest.raises(NotFoundError, match="removed to free its space"):
            await come(again, ids)
        with pytest.raises(NotFoundError, match="removed to free its space"):
            again.conversation(ids["inner"])
    async with opened(storage.reopen()):
        await wait_all_tasks_blocked()
    assert not storage.reopen().removals()
    assert storage.reopen().task(ids["root"]) is None


def cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove record by record."""
    monkeypatch.setattr(_gc, "PASS_RECORDS_MAX", 4)
    monkeypatch.setattr(_gc, "_RECORDS_MIN", 1)
    monkeypatch.setattr(_gc_pace.Pace, "took", lambda *_, **__: 0.0)


async def test_a_removal_that_is_cancelled_goes_on_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelled after any number of commits, the next call removes what is left of it."""
    cut_short(monkeypatch)
    number = 0
    for number in range(1, 30):
        made, ids = one_tree(entries=20)
        storage = stored(made)
        faulty = FaultyStorage(storage.reopen())
        async with opened(faulty) as harness:
            with trio.CancelScope() as scope:
                faulty.add(Fault.call(scope.cancel, at=number, after=True))
                await harness.gc(older_than=MONTH)
            check_owners(storage.reopen())
            await harness.gc(older_than=MONTH)
            assert storage.reopen().task(ids["root"]) is None
            assert harness.session.removals.published == frozenset()
        if not scope.cancelled_caught:
            break
    assert number > 5


async def test_a_mark_of_a_tree_that_is_not_there_is_taken_away() -> None:
    """An imported file may have one. Opening is none the worse for it, and what is marked goes."""
    for alone in (True, False):
        made, ids = one_tree()
        made.writes.append((Op.REMOVAL, RemovalRow(made.id(), NOW_US)))
        if not alone:
            made.writes.append((Op.REMOVAL, RemovalRow(ids["root"], NOW_US)))
        storage = stored(made)
        async with opened(storage) as harness:
            await harness.gc(older_than=40 * MONTH)
            assert harness.session.removals.published == frozenset()
        assert storage.reopen().removals() == []
        assert (storage.reopen().task(ids["root"]) is not None) == alone


@pytest.mark.parametrize("read", ["task", "task_outcome"])
async def test_who_looks_at_a_task_in_the_instant_that_it_goes_is_told_so(
    monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """A commit may become durable between two reads: it is shown whole, or as one that is gone."""
    made, ids = one_tree(key="order 7")
    async with opened(stored(made)) as harness:
        storage = harness.session.storage
        real = getattr(storage, read)
        for look in (harness.task, harness._runtime.waits.outcome):
            with monkeypatch.context() as patch:

                def then_gone(id: int, patch: Any = patch) -> Any:
                    found = real(id)
                    for name in ("task", "task_outcome"):
                        patch.setattr(storage, name, lambda _: None)
                    return found

                patch.setattr(storage, read, then_gone)
                with contextlib.suppress(UnknownTaskError):
                    assert "completed" in str(look(ids["root"]))


# --- late retries -----------------------------------------------------------------------------


class Once(Task[str, At, str]):
    name = "gc.planted"
    abort = nothing_to_undo

    def initial(self, input: str) -> At:
        return At("start")

    @phase
    async def start(self, at: At, ctx: TaskContext[str, At, str]) -> None:
        await ctx.complete("done")


def registry() -> Registry:
    found = Registry()
    found.install(Extension("gc", tasks=[Once()]))
    return found


@pytest.mark.parametrize("keep", [False, True])
async def test_a_late_retry_under_a_key_gives_the_first_task(keep: bool) -> None:
    """No second effect: the id of the removed task, and how it ended for who waits for it."""
    made, ids = one_tree(key="order 7")
    storage = stored(made)
    async with opened(storage, registry=registry()) as harness:
        await harness.gc(older_than=MONTH, keep_outcomes=keep)
        again = await harness.conversation(ids["top"]).create_task(Once, "x", key="order 7")
        other = await harness.conversation(ids["top"]).create_task(Once, "x", key="order 8")
        assert again == ids["root"] != other
        if keep:
            assert (await harness.wait_for_task(again)).status == "completed"
        else:
            ended = r"It ended \(completed\), and its tree was removed on 2023-11-14"
            for ask in (harness.wait_for_task(again), harness.signal(again, "x")):
                with pytest.raises(UnknownTaskError, match=ended):
                    await ask
            with pytest.raises(UnknownTaskError, match=ended):
                harness.task(again)
            with pytest.raises(UnknownTaskError, match=ended):
                harness.explain(again)
        with pytest.raises(UnknownTaskError) as unknown:
            harness.task(ids["child"])
        assert unknown.value.hint == ""


async def test_a_late_retry_under_a_request_id_gives_the_first_submission() -> None:
    """Its conversation and its image are gone; the same content is recognised, another refused."""
    made = Planted()
    top = made.conversation()
    inner = made.conversation(owner=made.task(top))
    picture = made.blob(b"picture")
    content: list[Block] = [
        TextBlock(text="look"),
        ImageBlock(blob=picture, media_type="image/png"),
    ]
    _, text = _checked_blocks(content, 2**20)
    first = made.submission(inner, text=text)
    async with opened(stored(made)) as harness:
        conversation = harness.conversation(inner)
        report = await harness.gc(older_than=MONTH)
        assert (report.submissions, report.blobs) == (1, 1)

        again = await conversation.submit(content, request_id=f"request {first}")
        assert again.id == first
        with pytest.raises(NotFoundError, match=r"It ended \(done\)"):
            await again.wait()
        with pytest.raises(NotFoundError, match=r"It ended \(done\)"):
            harness.submission(first)
        with pytest.raises(RequestIdConflictError):
            await conversation.submit("other", request_id=f"request {first}")
        with pytest.raises(NotFoundError, match=f"no conversation {inner}"):
            await conversation.submit("new", request_id="new")


# --- blobs ------------------------------------------------------------------------------------


async def test_bytes_that_are_shared_go_with_the_last_that_refers_to_them() -> None:
    """A blob of two trees stays with the one that is too young, and goes with it."""
    made = Planted()
    top = made.conversation()
    shared, lone, large = (
        made.blob(b"shared"),
        made.blob(b"lone"),
        made.blob(b'"' + b"x" * 9 + b'"'),
    )
    inside = made.blob(b"inside")
    note = made.blob(json.dumps({"see": inside}).encode())
    made.task(top, text=json.dumps([shared, lone]))
    made.task(top, text=f"@{note}")
    made.task(top, text=json.dumps(f"{shared}{large}"), ended_us=NOW_US - 10**12)
    storage = stored(made)
    async with opened(storage) as harness:
        report = await harness.gc(older_than=MONTH)
        assert report.blobs == 3
        assert [storage.has_blob(each) for each in (shared, large, lone, note, inside)] == (
            [True, True, False, False, False]
        )
        await harness.gc(older_than=timedelta(0))
        assert not storage.blob_sizes()


async def test_a_text_in_a_blob_keeps_what_it_refers_to() -> None:
    """What is too large for its record is looked through where it lies, however often it is met."""
    made = Planted()
    top = made.conversation()
    inside = made.blob(b"inside")
    note = made.blob(json.dumps({"see": inside, "more": "x" * 70_000}).encode())
    for _ in range(2):
        made.entry(top, f"@{note}")
    storage = stored(made)
    async with opened(storage) as harness:
        assert (await harness.gc(older_than=MONTH)).blobs == 0


async def test_a_digest_that_was_streamed_in_parts_is_a_reference() -> None:
    """Of a document in which a text grew, what it says now is looked through."""
    storage = MemoryStorage()
    async with opened(storage) as harness:
        conversation = (await harness.root()).id
        async with harness.commit() as tx:
            name = tx.put_blob(b"streamed")
            await tx.document(Plan, conversation)
        for part in (name[:30], name[30:]):
            async with harness.commit() as tx:
                tx.append_text(Plan, conversation, "/text", part)
    async with opened(storage.reopen()) as harness:
        assert (await harness.gc(older_than=MONTH)).blobs == 0


@pytest.mark.parametrize("long", [0, 20_000], ids=["short", "long"])
async def test_a_digest_that_is_streamed_in_parts_meanwhile_is_not_missed(long: int) -> None:
    """Its last part comes while texts are looked through, wherever that stands: the bytes stay."""
    met = set[str]()
    place = 0
    for place in range(1, 40):
        made = Planted()
        name = made.blob(b"streamed meanwhile")
        storage, blocking = stored(made), BetweenReads()
        async with opened(storage, blocking=blocking) as harness:
            conversation = (await harness.root()).id
            async with harness.commit() as tx:
                await tx.document(Plan, conversation)
                tx.append_text(Plan, conversation, "/text", "." * long + name[:30])
            left = place
            there = False

            async def write(
                harness: Harness = harness,
                blocking: Any = blocking,
                conversation: int = conversation,
                name: str = name,
                mixed: bool = place % 2 == 1,
            ) -> None:
                nonlocal left, there
                left -= 1
                if left:
                    blocking.then = write
                    return
                there = harness.session.storage.has_blob(name)
                for part in (name[30:40], name[40:]):
                    async with harness.commit() as tx:
                        tx.append_text(Plan, conversation, "/text", part)
                        if mixed:
                            note = {"op": "add", "path": "/notes/-", "value": "grows"}
                            tx.patch(Plan, conversation, [note])

            blocking.then = write
            report = await harness.gc(older_than=MONTH)
        met.add("gone" if report.blobs else "kept")
        if left:
            break
        assert report.blobs == int(not there)
        assert storage.reopen().has_blob(name) == there
    assert place > 2
    assert met == {"gone", "kept"}


async def test_what_a_command_names_that_waits_is_not_swept() -> None:
    """Handed in at any moment of a collection: its image is there, or was gone when it came."""
    met = set[str]()
    place = 0
    for place in range(40):
        made = Planted()
        top = made.conversation()
        image = ImageBlock(blob=made.blob(b"\x89PNG"), media_type="image/png")
        storage, blocking = stored(made), BetweenReads()
        left, there, came = place, False, False

        async def hand_in(
            blocking: BetweenReads = blocking,
            storage: Storage = storage,
            image: ImageBlock = image,
            top: int = top,
        ) -> None:
            nonlocal left, there, came
            if left:
                left -= 1
                blocking.then = hand_in
                return
            came = True
            there = storage.has_blob(image.blob)
            message = UserMessage(blocks=(image,), at_us=0)
            asked = {
                "conversation": top,
                "kind": "shown",
                "messages": _codec.encode_messages([message]),
            }
            command = Command(
                id="k", kind="write", content=asked, session=storage.head().uuid, at_us=NOW_US
            )
            storage.command_box.hand_in("k", encode_command(command, bytes_max=10_000))

        async with opened(storage, blocking=blocking) as harness:
            blocking.then = hand_in
            if place == 0:
                await hand_in()
                blocking.then = None
            await harness.gc(older_than=MONTH)
            await harness.apply_commands()
            row = storage.command("k")
            if not came:
                assert row is None
                break
            assert row is not None
            assert ("error" in json.loads(row.answer)) is not there
            assert storage.has_blob(image.blob) is there
            met.add("kept" if there else "gone")
    assert place > 2
    assert met == {"kept", "gone"}


async def test_bytes_that_were_put_are_kept_for_who_is_about_to_refer_to_them() -> None:
    """Put in this session and named nowhere yet: they stay until the next one."""
    made = Planted()
    name = made.blob(b"old")
    storage = stored(made)
    async with opened(storage.reopen()) as harness:
        async with harness.commit() as tx:
            assert tx.put_blob(b"old") == name
        assert (await harness.gc(older_than=MONTH)).blobs == 0
    async with opened(storage.reopen()) as harness:
        assert (await harness.gc(older_than=MONTH)).blobs == 1


@pytest.mark.parametrize("large", [False, True])
async def test_a_reference_that_is_written_meanwhile_is_not_missed(large: bool) -> None:
    """Written while every text is looked through, wherever that stands: the bytes stay."""
    made = Planted()
    top = made.conversation()
    text = json.dumps("x" * 70_000)
    name = made.blob(text.encode() if large else b"named")
    place = 0
    for place in range(1, 40):
        storage, blocking = stored(made), BetweenReads()
        async with opened(storage, blocking=blocking) as harness:
            left = place
            there = False

            async def write(harness: Harness = harness, blocking: Any = blocking) -> None:
                nonlocal left, there
                left -= 1
                if left:
                    blocking.then = write
                    return
                there = harness.session.storage.has_blob(name)
                async with harness.commit() as tx:
                    tx.append(top, json.loads(text) if large else {"see": name}, kind="note")

            blocking.then = write
            report = await harness.gc(older_than=MONTH)
        if left:
            assert report.blobs == 1
            break
        # Written after they went, the large text brought its bytes again.
        assert report.blobs == int(not there)
        assert storage.reopen().has_blob(name) == (there or large)
    assert place > 2


async def test_a_long_run_of_digits_that_is_written_meanwhile_is_not_looked_through_in_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may name anything: what is looked for at this time stays, and goes the next time."""
    run, looked = "0" * (_gc_blobs.RUN_MAX + 1), []
    real = _gc_blobs.digests_in

    def digests_in(text: str) -> Iterator[str]:
        looked.append(text)
        return real(text)

    made = Planted()
    top = made.conversation()
    name = made.blob(b"named by nobody")
    storage, blocking = stored(made), BetweenReads()
    async with opened(storage, blocking=blocking) as harness:

        async def write() -> None:
            if not harness._collector._touched._wanted:
                blocking.then = write
                return
            with monkeypatch.context() as patch:
                patch.setattr(_gc_blobs, "digests_in", digests_in)
                async with harness.commit() as tx:
                    tx.append(top, {"hex": run}, kind="note")

        blocking.then = write
        first = await harness.gc(older_than=MONTH)
        there = storage.reopen().has_blob(name)
        second = await harness.gc(older_than=MONTH)

    assert (first.blobs, there, second.blobs) == (0, True, 1)
    assert not any(run in text for text in looked)


# --- what is kept in memory -------------------------------------------------------------------


async def test_watches_of_what_goes_end() -> None:
    """A watch of an owned conversation, of its document and of its graph says that it is over."""
    made, ids = one_tree()
    async with opened(stored(made)) as harness:
        inner = harness.conversation(ids["inner"])
        async with harness.commit() as tx:
            (await tx.document(Plan, ids["inner"])).text = "here"
        await inner.context()
        async with (
            inner.watch() as view,
            harness.watch(Plan, ids["inner"]) as plan,
            harness.watch_tasks(ids["inner"]) as graph,
        ):
            assert (await harness.gc(older_than=MONTH)).trees == 1
            assert [frame.value for frame in [each async for each in plan]] == [None]
            assert [each async for each in view] == []
            assert [each async for each in graph] == []
        assert harness.snapshot(Plan, ids["inner"]) is None
        for look in (inner.history, inner.context):
            with pytest.raises(NotFoundError):
                await look()


async def test_a_task_cannot_begin_to_wait_for_what_is_going() -> None:
    """A wait that is staged before the commit of the collection keeps the tree."""
    made, ids = one_tree()
    storage, blocking = stored(made), BetweenReads()

    class Waits(Task[int, At, str]):
        name = "gc.waits"
        abort = nothing_to_undo

        def initial(self, input: int) -> At:
            return At("start")

        @phase
        async def start(self, at: At, ctx: TaskContext[int, At, str]) -> None:
            if at.step == "start":
                async with ctx.commit() as tx:
                    tx.wait(on=[TaskId(ctx.input)], signals=True, then=At("woken"))
            else:
                (outcome,) = await ctx.outcomes([TaskId(ctx.input)])
                await ctx.complete(outcome.status)

    found = Registry()
    found.install(Extension("gc", tasks=[Waits()]))
    async with opened(storage, blocking=blocking, registry=found) as harness:
        top = harness.conversation(ids["top"])

        async def wait() -> None:
            ended = await top.create_task(Waits, ids["below"])
            assert (await harness.wait_for_task(ended)).result == "completed"

        blocking.then, blocking.only_trees = wait, True
        assert (await harness.gc(older_than=MONTH)).kept == {"changed": 1}
        assert (await harness.gc(older_than=MONTH)).trees == 1
        late = await top.create_task(Waits, ids["below"])
        assert (await harness.wait_for_task(late)).status == "faulted"


@pytest.mark.parametrize("age", [timedelta(-1), 30, None])
async def test_an_age_has_to_be_one(age: Any) -> None:
    """Anything but a timedelta of at least 0 is refused, with what is meant."""
    async with opened(MemoryStorage()) as harness:
        with pytest.raises(InvalidArgumentError, match="timedelta of at least 0"):
            await harness.gc(older_than=age)


# --- a case -----------------------------------------------------------------------------------


class Collecting(Task[int, At, list[str]]):
    """Makes outputs under the keys of its steps, as far as they are not there."""

    name = "gc.collecting"
    abort = nothing_to_undo

    def initial(self, input: int) -> At:
        return At("start")

    @phase
    async def start(self, at: At, ctx: TaskContext[int, At, list[str]]) -> None:
        async with ctx.commit() as tx:
            inner = tx.create_conversation(key="work")
            for number in range(ctx.input):
                tx.append(inner, {"output": ctx.key(f"step {number}")}, kind="output")
        await ctx.complete([str(inner)])


# C014
async def test_an_interrupted_removal_leaves_no_output_for_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Killed half way through 1,000 outputs: the removal ends on its own, the new run works."""
    monkeypatch.setattr(_gc, "PASS_RECORDS_MAX", 50)
    monkeypatch.setattr(_gc, "_RECORDS_MIN", 50)
    found = Registry()
    found.install(Extension("gc", tasks=[Collecting()]))
    store = tmp_path / "s.sqlite"
    clock = TrioClock(NOW_US)

    def opened_file(storage: Storage) -> Any:
        return open_harness(
            storage, clock=clock, blocking=InlineBlocking(), registry=found, durability="process"
        )

    async with opened_file(SqliteStorage(store)) as harness:
        root = await harness.root()
        first = await root.create_task(Collecting, 1_000)
        (old,) = (await harness.wait_for_task(first)).result
    clock.step_us = 40 * 24 * 60 * 60 * 1_000_000
    faulty = FaultyStorage(SqliteStorage(store))
    async with opened_file(faulty) as harness:
        faulty.add(Fault.call(faulty.freeze, at=10, after=True))
        with pytest.raises(SessionPoisonedError):
            await harness.gc(older_than=MONTH)
    half = SqliteStorage(store)
    assert 0 < len(half.entries(int(old), limit=2_000)) < 1_000
    half.close()

    async with opened_file(SqliteStorage(store)) as harness:
        root = await harness.root()
        second = await root.create_task(Collecting, 10)
        (new,) = (await harness.wait_for_task(second)).result
        storage = harness.session.storage
        # It pauses, as others commit beside it.
        await trio.sleep(100)
        assert storage.removals() == []
        outputs = [json.loads(row.data or "")["output"] for row in storage.entries(int(new))]
        assert len(outputs) == 10
        assert all(f"/{second}/" in each or str(int(second)) in each for each in outputs)
        assert storage.entries(int(old)) == []
        assert storage.conversation(int(old)) is None
        assert storage.task(int(first)) is None
        assert storage.scan(RecordKind.STUB) == []
        check_owners(storage)
