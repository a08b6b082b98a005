"""Watches of documents: no gap and no overlap, exact patches, bounded frames, and their ends."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import trio
from session_support import (
    Counter,
    HeldBlocking,
    line_held,
    new_conversation,
    open_test_session,
)
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable import patch
from pidurable.errors import (
    DocumentTooNewError,
    InvalidArgumentError,
    MigrationError,
    NestedCommitError,
    NotFoundError,
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.records._limits import WATCH_FRAMES_MAX, Settings
from pidurable.session._document_watch import DocumentView
from pidurable.session._documents import document
from pidurable.session._seams import ThreadBlocking, Worker
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.session._watch import Frame, Watch
from pidurable.storage import MemoryStorage, SqliteStorage
from pidurable.testing import Fault, FaultyStorage

T = TypeVar("T")


@document("test.todos", family=True)
@attrs.define
class Todos:
    items: list[str] = attrs.Factory(list)


async def put(session: Session, items: list[str], conversation: int, key: str = "a") -> None:
    """Commit these items, whether or not the document exists."""
    async with session.body(session.transaction()) as tx:
        (await tx.document(Todos, conversation, key=key)).items = items


async def count_up(session: Session, *, flush: bool = True) -> None:
    async with session.body(session.transaction(flush=flush)) as tx:
        (await tx.document(Counter)).count += 1


def append_log(text: str) -> Any:
    """A body that appends to a counter that exists, in O(change)."""

    def body(tx: Transaction) -> None:
        tx.patch(Counter, None, [{"op": "add", "path": "/log/-", "value": text}])

    return body


def set_count(count: int) -> Any:
    """A body that changes a counter that exists, in O(change)."""
    return lambda tx: tx.patch(Counter, None, [{"op": "replace", "path": "/count", "value": count}])


def taken(watch: Watch[Any]) -> list[Frame[Any]]:
    """The frames that wait to be taken, without waiting."""
    frames = []
    while (frame := watch._take_nowait()) is not None:
        frames.append(frame)
    return frames


def patched(first: Any, frames: list[Frame[Any]]) -> Any:
    """The first value, with the patch of each frame applied."""
    for frame in frames:
        first = patch.apply(first, frame.patch)
    return first


async def collect(watch: Watch[Any], into: list[Frame[Any]]) -> None:
    async for frame in watch:
        into.append(frame)


# --- the value and what becomes of it ---------------------------------------------------------


async def test_a_watch_gives_the_value_and_then_each_commit() -> None:
    """The watched value is the committed one, and each commit that changes it is one frame."""
    async with open_test_session(MemoryStorage()) as session:
        await count_up(session)

        async with session.watch(Counter) as watch:
            assert watch.value == {"count": 1, "log": []}
            assert watch.read() == Counter(count=1)
            assert watch.seq == session.line.published_seq
            await count_up(session)
            await session.run(session.transaction(), append_log("x"))
            first = await anext(watch)
            second = await anext(watch)

        assert first.read() == Counter(count=2)
        assert first.patch == [{"op": "replace", "path": "/count", "value": 2}]
        assert second.value == {"count": 2, "log": ["x"]}
        assert second.patch == [{"op": "add", "path": "/log/-", "value": "x"}]
        assert second.seq == session.line.published_seq > first.seq
        assert not first.whole
        assert watch.value is second.value
        assert watch.json() == {"count": 2, "log": ["x"]}


async def test_what_does_not_exist_is_none_and_its_creation_is_a_frame() -> None:
    """Watching a document that does not exist never creates it, and shows it when it comes."""
    async with open_test_session(MemoryStorage()) as session:
        async with session.watch(Counter) as watch:
            assert watch.value is None
            assert watch.read() is None
            assert watch.json() is None
            await count_up(session)
            frame = await anext(watch)

        assert frame.read() == Counter(count=1)
        assert patch.apply(None, frame.patch) == {"count": 1, "log": []}


async def test_instances_of_a_family_are_watched_apart() -> None:
    """A watch of one key of a family, or of one conversation, sees nothing of another."""
    async with open_test_session(MemoryStorage()) as session:
        one, other = await new_conversation(session), await new_conversation(session)

        async with session.watch(Todos, one, key="a") as watch:
            await put(session, ["x"], one, key="b")
            await put(session, ["y"], other, key="a")
            await put(session, ["z"], one, key="a")
            frames = taken(watch)

        assert [frame.json() for frame in frames] == [{"items": ["z"]}]


async def test_a_commit_that_changes_nothing_is_no_frame() -> None:
    """A draft that did not change, a body that raised, and other documents give no frame."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        await count_up(session)

        async with session.watch(Counter) as watch:
            async with session.body(session.transaction()) as tx:
                (await tx.document(Counter)).count = 1
            with pytest.raises(ZeroDivisionError):
                async with session.body(session.transaction()) as tx:
                    (await tx.document(Counter)).count = 1 // 0
            await put(session, ["x"], conversation)
            assert taken(watch) == []


async def test_frames_are_shared_and_a_patch_is_made_once() -> None:
    """All watchers get one frame object, whose patch is made at first use and copied."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)

        async with (
            session.watch(Todos, conversation, key="a") as one,
            session.watch(Todos, conversation, key="a") as two,
        ):
            await put(session, ["x"], conversation)
            first, second = await anext(one), await anext(two)

        assert first is second
        for name in ("seq", "value", "whole"):
            with pytest.raises(AttributeError):
                setattr(first, name, None)
        assert first.patch is second.patch
        first.patch[0]["value"]["items"].append("mine")
        assert first.json() == {"items": ["x"]}
        assert session.snapshot(Todos, conversation, key="a") == Todos(["x"])


async def test_a_patch_copies_what_a_commit_stored() -> None:
    """Whoever changes the patch of a frame does not reach the committed value."""
    async with open_test_session(MemoryStorage()) as session:
        await count_up(session)
        async with session.watch(Counter) as watch:
            ops = [{"op": "replace", "path": "/log", "value": ["x"]}]
            await session.run(session.transaction(), lambda tx: tx.patch(Counter, None, ops))
            frame = await anext(watch)

        frame.patch[0]["value"].append("mine")

        assert session.snapshot(Counter) == Counter(count=1, log=["x"])


async def test_a_document_is_shown_as_its_json() -> None:
    """A view is a mapping that cannot be changed, equal to the JSON, and plain when copied."""
    async with open_test_session(MemoryStorage()) as session:
        await count_up(session)
        await session.run(session.transaction(), append_log("x"))
        async with session.watch(Counter) as watch, session.watch(Counter) as other:
            view = watch.value
            assert view is not None
            assert {**view} == view == {"count": 1, "log": ["x"]}
            assert (list(view), len(view), view.get("log"), "x" in view) == (
                ["count", "log"],
                2,
                ["x"],
                False,
            )
            assert view == other.value
            assert not isinstance(view, MutableMapping)
            assert "test.counter" in repr(view)
            for copied in (view.json(), copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
                assert type(copied) is dict
                copied["log"].append("mine")
            assert copy.copy(view) is view
            assert view.value == {"count": 1, "log": ["x"]}
            with pytest.raises(TypeError, match="cannot be changed"):
                view.value["log"].append("y")


# --- one point of the line --------------------------------------------------------------------


async def test_a_watch_that_begins_while_a_batch_is_stored_sees_it_as_a_frame() -> None:
    """What is staged or being stored when a watch begins comes as a frame, never in its value."""
    blocking = HeldBlocking()
    async with (
        open_test_session(MemoryStorage(), blocking=blocking) as session,
        trio.open_nursery() as nursery,
    ):
        await count_up(session)
        blocking.hold()
        nursery.start_soon(count_up, session)
        await wait_all_tasks_blocked()
        assert session.line._storing

        async with session.watch(Counter) as watch:
            assert watch.read() == Counter(count=1)
            blocking.release()
            frame = await anext(watch)

        assert frame.read() == Counter(count=2)


class LateBlocking:
    """Blocking work whose answers wait at a gate: a call is done, and nobody knows of it yet."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.gate.set()

    def worker(self, name: str) -> Worker:
        return self

    async def run(self, fn: Callable[..., T], *args: Any, abandon: bool = False) -> T:
        await trio.lowlevel.checkpoint()
        result = fn(*args)
        with trio.CancelScope(shield=True):
            await self.gate.wait()
        return result

    def close(self) -> None:
        """Nothing to close."""


async def test_what_is_durable_and_not_published_is_not_taken_for_the_value() -> None:
    """What the storage has ahead of its publication is shown to nobody, whatever is in memory."""
    blocking = LateBlocking()
    async with (
        open_test_session(MemoryStorage(), blocking=blocking) as session,
        trio.open_nursery() as nursery,
    ):
        await count_up(session)
        blocking.gate = trio.Event()
        nursery.start_soon(session.run, session.transaction(), append_log("x"))
        await wait_all_tasks_blocked()
        session._docs.clear()
        assert session.snapshot(Counter) == Counter(count=1)

        async def release() -> None:
            blocking.gate.set()

        nursery.start_soon(release)
        async with session.watch(Counter) as watch:
            first = watch.json()
            await session.run(session.transaction(), append_log("y"))
            frames = taken(watch)

        assert patched(first, frames) == {"count": 1, "log": ["x", "y"]}


async def test_no_two_looks_show_half_of_a_commit() -> None:
    """Of a batch that is being stored neither what it changes nor what it makes is shown yet."""
    blocking = LateBlocking()
    async with (
        open_test_session(MemoryStorage(), blocking=blocking) as session,
        trio.open_nursery() as nursery,
    ):
        conversation = await new_conversation(session)
        await count_up(session)

        async def both() -> None:
            async with session.body(session.transaction()) as tx:
                (await tx.document(Counter)).count = 7
                (await tx.document(Todos, conversation, key="new")).items = ["7"]
                # What is read is read; what is stored from here on is not heard of.
                blocking.gate = trio.Event()

        nursery.start_soon(both)
        await wait_all_tasks_blocked()
        assert session.line._storing
        for _ in range(2):
            assert session.snapshot(Todos, conversation, key="new") is None
            assert session.snapshot(Counter) == Counter(count=1)
            session._docs.clear()
        blocking.gate.set()
        await wait_all_tasks_blocked()

        assert session.snapshot(Todos, conversation, key="new") == Todos(["7"])
        assert session.snapshot(Counter) == Counter(count=7)


async def test_a_watch_joins_between_the_commits_of_a_group() -> None:
    """Whenever a watch begins among concurrent commits, its value and frames have no gap."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        await count_up(session)
    async with open_test_session(storage) as session:
        seen: list[int] = []

        async def watcher(turns: int) -> None:
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            if turns % 3 == 0:
                session._docs.clear()
            async with session.watch(Counter) as watch:
                value, frames = watch.json(), []
                while len(watch.json()["log"]) < 60:
                    frames.append(await anext(watch))
            # Each frame adds one, so a gap or an overlap shows at once.
            lengths = [len(each["log"]) for each in (value, *(f.json() for f in frames))]
            assert lengths == list(range(lengths[0], 61))
            assert [f.seq for f in frames] == sorted({f.seq for f in frames})
            assert patched(value, frames) == watch.json()
            seen.append(lengths[0])

        async with trio.open_nursery() as nursery:
            for turns in range(40):
                nursery.start_soon(watcher, turns)
            async with trio.open_nursery() as committers:
                for number in range(60):
                    committers.start_soon(
                        session.run, session.transaction(), append_log(str(number))
                    )
                    if number % 7 == 0:
                        await trio.lowlevel.checkpoint()
        assert len(set(seen)) > 1


async def test_a_thousand_watchers_see_every_commit_once_and_in_order() -> None:
    """Each of 1,000 tasks that watch one document gets each frame, the same one as the others."""
    async with (
        open_test_session(MemoryStorage(), inline=True) as session,
        trio.open_nursery() as nursery,
    ):
        await count_up(session)
        followed: list[list[Frame[Any]]] = []

        async def follow(*, task_status: trio.TaskStatus[None]) -> None:
            frames: list[Frame[Any]] = []
            followed.append(frames)
            async with session.watch(Counter) as watch:
                task_status.started()
                await collect(watch, frames)

        for _ in range(1_000):
            await nursery.start(follow)
        for number in range(5):
            nursery.start_soon(session.run, session.transaction(), append_log(str(number)))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert [len(frame.value["log"]) for frame in followed[0]] == [1, 2, 3, 4, 5]
    assert all(frames == followed[0] for frames in followed)
    assert len(followed) == 1_000


async def test_watches_begin_anywhere_on_a_store_with_threads(tmp_path: Path) -> None:
    """With SQLite and a thread that writes, a watch that begins at any moment misses nothing."""
    storage = SqliteStorage(str(tmp_path / "s"))
    async with open_test_session(storage, blocking=ThreadBlocking()) as session:
        await count_up(session)

        async def follow() -> None:
            session._docs.clear()
            async with session.watch(Counter) as watch:
                first, frames = watch.json(), []
                while len(watch.json()["log"]) < 40:
                    frames.append(await anext(watch))
                assert patched(first, frames) == watch.json()
                numbers = [len(first["log"]), *(len(frame.value["log"]) for frame in frames)]
                assert numbers == list(range(numbers[0], 41))

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(session.run, session.transaction(), append_log(str(number)))
                nursery.start_soon(follow)
                await trio.lowlevel.checkpoint()


async def test_a_failed_batch_shows_nothing(mock_clock: MockClock) -> None:
    """A batch that is refused gives no frame, neither of its first nor of its last member."""
    storage = FaultyStorage(MemoryStorage(), [Fault.refuse(at=3)])
    settings = Settings(storage_retry_seconds=0.0)
    async with open_test_session(storage, settings=settings) as session:
        await count_up(session)
        async with session.watch(Counter) as watch:
            await count_up(session)
            async with trio.open_nursery() as nursery:
                refused: list[str] = []

                async def commit(text: str) -> None:
                    try:
                        await session.run(session.transaction(), append_log(text))
                    except StorageRefusedError:
                        refused.append(text)

                for text in "abc":
                    nursery.start_soon(commit, text)
            assert sorted(refused) == ["a", "b", "c"]
            await session.run(session.transaction(), append_log("d"))
            frames = taken(watch)

        assert [frame.json() for frame in frames] == [
            {"count": 2, "log": []},
            {"count": 2, "log": ["d"]},
        ]


async def test_a_watch_may_share_the_line_with_a_batch_that_is_refused() -> None:
    """A watch that reads its document in the line of a refused batch is opened all the same."""
    inner = MemoryStorage()
    async with open_test_session(inner) as session:
        await count_up(session)
    storage = FaultyStorage(inner, [Fault.refuse()])
    settings = Settings(storage_retry_seconds=0.0)
    async with open_test_session(storage, settings=settings) as session:
        refused: list[bool] = []
        opened: list[Any] = []

        async def commit() -> None:
            try:
                await session.run(session.transaction(), lambda tx: tx.add_conversation())
            except StorageRefusedError:
                refused.append(True)

        async def watch_it() -> None:
            async with session.watch(Counter) as watch:
                opened.append(watch.json())
                opened.append((await anext(watch)).json())

        async with trio.open_nursery() as nursery:
            async with line_held(session):
                nursery.start_soon(commit)
                await wait_all_tasks_blocked()
                nursery.start_soon(watch_it)
                await wait_all_tasks_blocked()
            while not opened:
                await trio.lowlevel.checkpoint()
            await count_up(session)

        assert refused == [True]
        assert opened == [{"count": 1, "log": []}, {"count": 2, "log": []}]


async def test_nothing_is_shown_before_it_is_durable() -> None:
    """While a batch is in the storage its frame is not there, and it comes when it is stored."""
    blocking = HeldBlocking()
    async with (
        open_test_session(MemoryStorage(), blocking=blocking) as session,
        session.watch(Counter) as watch,
        trio.open_nursery() as nursery,
    ):
        blocking.hold()
        nursery.start_soon(count_up, session)
        await wait_all_tasks_blocked()
        assert taken(watch) == []
        assert watch._hub.value is None

        blocking.release()
        await wait_all_tasks_blocked()
        assert len(taken(watch)) == 1


async def test_a_second_watcher_needs_nothing_that_the_first_has_read() -> None:
    """A document that is watched is known, although it is not kept in memory any more."""
    blocking = HeldBlocking()
    async with (
        open_test_session(MemoryStorage(), blocking=blocking) as session,
        trio.open_nursery() as nursery,
    ):
        await count_up(session)
        async with session.watch(Counter) as first:
            session._docs.clear()
            blocking.hold()
            nursery.start_soon(count_up, session)
            await wait_all_tasks_blocked()
            # The line is taken, and nothing can be read in it.
            async with session.watch(Counter) as second:
                assert second.read() == first.read() == Counter(count=1)
                blocking.release()
                assert await anext(second) is await anext(first)


# --- slow consumers ---------------------------------------------------------------------------


async def log_many(session: Session, count: int) -> None:
    for number in range(count):
        await session.run(session.transaction(), append_log(str(number)))


async def test_a_hundred_frames_are_kept_and_one_more_folds_them_into_one() -> None:
    """At 100 undelivered frames all are delivered; at 101 one whole frame with the value is."""
    async with open_test_session(MemoryStorage()) as session:
        await count_up(session)
        async with session.watch(Counter) as kept, session.watch(Counter) as folded:
            await log_many(session, WATCH_FRAMES_MAX)
            frames = taken(kept)
            assert len(frames) == WATCH_FRAMES_MAX == 100
            assert not any(frame.whole for frame in frames)

            await log_many(session, 1)
            (only,) = taken(folded)

        assert only.whole
        assert only.seq == session.line.published_seq
        assert only.json() == {"count": 1, "log": [*map(str, range(100)), "0"]}
        assert only.patch == [{"op": "replace", "path": "", "value": only.json()}]


async def test_later_commits_fold_into_the_whole_frame_until_it_is_taken() -> None:
    """What is committed before the whole frame is taken is in it; what comes after is a frame."""
    async with open_test_session(MemoryStorage()) as session:
        await count_up(session)
        async with session.watch(Counter) as watch:
            first = watch.json()
            await log_many(session, 250)
            whole = await anext(watch)
            assert whole.whole
            assert len(whole.json()["log"]) == 250
            await log_many(session, 2)
            rest = taken(watch)

            await log_many(session, 101)
            (again,) = taken(watch)

        assert [frame.whole for frame in rest] == [False, False]
        assert again.whole
        assert len(again.json()["log"]) == 353
        assert patched(first, [whole, *rest, again]) == session.doc_value(
            _address_of_counter(session)
        )


def _address_of_counter(session: Session) -> Any:
    return next(address for address in session._docs if address.name == "test.counter")


async def test_those_who_fall_behind_share_one_whole_frame() -> None:
    """A thousand watchers that stalled get one frame object; one that did not gets every frame."""
    async with open_test_session(MemoryStorage()) as session:
        await count_up(session)
        async with session.watch(Counter) as quick:
            hub = quick._hub
            stalled = [hub.join(quick.seq) for _ in range(1_000)]
            frames: list[Frame[Any]] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(collect, quick, frames)
                await log_many(session, 150)
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            assert len(frames) == 150
            assert [frame.whole for frame in frames] == [False] * 150
            # From then on they cost a commit nothing at all.
            assert list(hub._active) == [quick]

            last = {id(frame) for watch in stalled for frame in taken(watch)}
            assert len(last) == 1
            for watch in stalled:
                watch._leave()
            assert hub.size == 1
        assert session._watches.hubs == {}


async def test_large_frames_are_folded_before_there_are_many() -> None:
    """A watcher that stalls keeps 16 MiB of changes at most; small ones are kept as ever."""
    text = "x" * (3 * 1024 * 1024)
    async with open_test_session(MemoryStorage()) as session:
        await count_up(session)
        async with session.watch(Counter) as watch:

            async def write(number: int) -> None:
                async with session.body(session.transaction()) as tx:
                    (await tx.document(Counter)).log = [f"{number}{text}"]

            for number in range(5):
                await write(number)
            assert [frame.whole for frame in taken(watch)] == [False] * 5
            assert watch._bytes == 0
            for number in range(6):
                await write(number)
                assert watch._bytes <= 16 * 1024 * 1024
                assert len(watch._frames) == (0 if number == 5 else number + 1)
            (frame,) = taken(watch)
            assert frame.whole
            assert frame.json()["log"] == [f"5{text}"]
            await log_many(session, 3)
            assert [frame.whole for frame in taken(watch)] == [False] * 3


@pytest.mark.slow
async def test_a_stalled_consumer_holds_no_memory_that_grows(
    request: pytest.FixtureRequest,
) -> None:
    """Over thousands of commits a stalled watcher keeps at most 100 frames, and in the end none."""
    commits = 10_000 if "slow" in str(request.config.getoption("-m")) else 500

    def frames_alive() -> int:
        gc.collect()
        return sum(1 for each in gc.get_objects() if type(each) in (Frame, DocumentView))

    async with open_test_session(MemoryStorage(), inline=True) as session:
        await count_up(session)
        async with session.watch(Counter) as watch:
            before = frames_alive()
            most = 0
            for number in range(commits):
                await session.run(session.transaction(), set_count(number))
                most = max(most, len(watch._frames))
            assert most == WATCH_FRAMES_MAX
            assert frames_alive() - before <= 1
            (only,) = taken(watch)
            assert only.whole
            assert only.value == {"count": commits - 1, "log": []}


# --- versions ---------------------------------------------------------------------------------


@document("test.shape")
@attrs.define
class OldShape:
    text: str = "old"


@document("test.shape", version=2)
@attrs.define
class NewShape:
    lines: list[str] = attrs.Factory(list)

    @staticmethod
    def migrate(value: dict[str, Any], from_version: int) -> dict[str, Any]:
        return {"lines": value["text"].split()}


@document("test.shape", version=3)
@attrs.define
class Unreadable:
    lines: list[str] = attrs.Factory(list)


async def test_an_older_value_is_shown_in_the_shape_of_the_class() -> None:
    """Patches lead from the migrated value on, whether an old or the new class writes."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        async with session.body(session.transaction()) as tx:
            (await tx.document(OldShape, conversation)).text = "a b"

        async with session.watch(NewShape, conversation) as watch:
            first = watch.json()
            assert first == {"lines": ["a", "b"]}
            assert watch.value is not None
            assert watch.value.migrated
            async with session.body(session.transaction()) as tx:
                (await tx.document(OldShape, conversation)).text = "a b c"
            async with session.body(session.transaction()) as tx:
                (await tx.document(NewShape, conversation)).lines.append("d")
            async with session.body(session.transaction()) as tx:
                (await tx.document(NewShape, conversation)).lines.append("e")
            frames = taken(watch)

        assert [frame.json()["lines"][-1] for frame in frames] == ["c", "d", "e"]
        assert frames[0].patch == [{"op": "add", "path": "/lines/2", "value": "c"}]
        assert patched(first, frames) == {"lines": ["a", "b", "c", "d", "e"]}
        assert frames[-1].read() == NewShape(["a", "b", "c", "d", "e"])


async def test_a_newer_value_is_refused_when_the_watch_begins_and_while_it_lasts() -> None:
    """An old class cannot watch what a newer one wrote; one that watches is told when that is."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        async with session.body(session.transaction()) as tx:
            (await tx.document(OldShape, conversation)).text = "a b"
        async with session.watch(OldShape, conversation) as watch:
            async with session.body(session.transaction()) as tx:
                (await tx.document(OldShape, conversation)).text = "c"
            async with session.body(session.transaction()) as tx:
                (await tx.document(NewShape, conversation)).lines.append("d")

            assert (await anext(watch)).read() == OldShape("c")
            with pytest.raises(DocumentTooNewError, match=r"test\.shape"):
                await anext(watch)
        with pytest.raises(DocumentTooNewError):
            async with session.watch(OldShape, conversation):
                pass
        with pytest.raises(MigrationError, match="no migrate"):
            async with session.watch(Unreadable, conversation):
                pass
        assert session._watches.hubs == {}


# --- ends -------------------------------------------------------------------------------------


async def test_retirement_delivers_none_and_ends_the_watch() -> None:
    """After a retirement comes None and then nothing, also when it is created anew at once."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        await put(session, ["x"], conversation)
        async with session.watch(Todos, conversation, key="a") as watch:
            first = watch.json()
            async with session.body(session.transaction()) as tx:
                tx.retire(Todos, conversation, key="a")
                (await tx.document(Todos, conversation, key="a")).items.append("new")
            await put(session, ["newer"], conversation)
            frames: list[Frame[Any]] = []
            await collect(watch, frames)

            assert [frame.value for frame in frames] == [None]
            assert patched(first, frames) is None
            # The next one at the same address is watched by a watch of its own, also meanwhile.
            async with session.watch(Todos, conversation, key="a") as again:
                assert again.read() == Todos(["newer"])
                watch._leave()
                await put(session, ["newest"], conversation)
                assert (await anext(again)).read() == Todos(["newest"])


async def test_who_fell_behind_learns_of_the_retirement_too() -> None:
    """A watcher with a whole frame to come gets None as that frame, and then the end."""
    async with open_test_session(MemoryStorage()) as session:
        await count_up(session)
        async with session.watch(Counter) as watch:
            await log_many(session, 101)
            await session.run(session.transaction(), lambda tx: tx.retire(Counter))
            frames: list[Frame[Any]] = []
            await collect(watch, frames)

        assert [(frame.value, frame.whole) for frame in frames] == [(None, True)]


async def test_closing_ends_every_watch_after_what_was_committed() -> None:
    """When the session closes, iterations stop after the last commit; a later watch is refused."""
    frames: list[Frame[Any]] = []
    async with trio.open_nursery() as nursery, open_test_session(MemoryStorage()) as session:

        async def watch_it(*, task_status: trio.TaskStatus[None]) -> None:
            async with session.watch(Counter) as watch:
                task_status.started()
                await collect(watch, frames)

        await nursery.start(watch_it)
        await count_up(session)
        await count_up(session)
    assert [frame.json()["count"] for frame in frames] == [1, 2]
    with pytest.raises(SessionClosedError):
        async with session.watch(Counter):
            pass


async def test_a_poisoned_session_raises_out_of_the_iteration() -> None:
    """What was committed is delivered; then each watcher gets the error, and a new one at once."""
    storage = FaultyStorage(MemoryStorage(), [Fault.lose(at=2)])
    async with open_test_session(storage) as session:
        async with session.watch(Counter) as one, session.watch(Counter) as two:
            await count_up(session)
            with pytest.raises(SessionPoisonedError) as commit:
                await count_up(session)
            errors = []
            for watch in (one, two):
                assert (await anext(watch)).read() == Counter(count=1)
                with pytest.raises(SessionPoisonedError) as raised:
                    await anext(watch)
                errors.append(raised.value)
        assert errors[0] is not errors[1]
        assert str(errors[0]) == str(commit.value)
        with pytest.raises(SessionPoisonedError):
            async with session.watch(Counter):
                pass


async def test_a_session_poisoned_while_a_watch_reads_refuses_it() -> None:
    """A watch that was waiting for the line when the session failed raises, and does not hang."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        await count_up(session)
    async with open_test_session(storage) as session:
        load_docs = session.load_docs

        async def poison_first(addresses: Any) -> None:
            session.line.set_poison(SessionPoisonedError("memory", "another holder"))
            await load_docs(addresses)

        session.load_docs = poison_first  # type: ignore[method-assign]
        with pytest.raises(SessionPoisonedError):
            async with session.watch(Counter):
                pass
        assert session._watches.hubs == {}


async def test_cancelling_a_consumer_ends_only_its_own_watch() -> None:
    """A cancelled consumer loses no frame of another, and none of its own if it goes on."""
    async with open_test_session(MemoryStorage()) as session:
        async with session.watch(Counter) as other, session.watch(Counter) as watch:
            with trio.move_on_after(0):
                await anext(watch)
            await count_up(session)
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(watch)
            assert (await anext(watch)).read() == Counter(count=1)
            assert (await anext(other)).read() == Counter(count=1)
        assert session._watches.hubs == {}


async def test_leaving_the_loop_early_and_iterating_again_goes_on() -> None:
    """A loop that was left is taken up where it stood."""
    async with open_test_session(MemoryStorage()) as session, session.watch(Counter) as watch:
        await count_up(session)
        await count_up(session)
        async for frame in watch:
            assert frame.read() == Counter(count=1)
            break
        async for frame in watch:
            assert frame.read() == Counter(count=2)
            break
        assert watch.read() == Counter(count=2)


async def test_leaving_the_block_ends_the_iteration() -> None:
    """A task that iterates a watch whose block is left stops, and nothing more comes."""
    async with open_test_session(MemoryStorage()) as session, trio.open_nursery() as nursery:
        frames: list[Frame[Any]] = []
        async with session.watch(Counter) as watch:
            nursery.start_soon(collect, watch, frames)
            await wait_all_tasks_blocked()
        await count_up(session)
        await collect(watch, frames)
        assert frames == []


async def test_two_tasks_cannot_iterate_one_watch_at_once() -> None:
    """The second task is refused, since each would see half of the frames; the first goes on."""
    async with open_test_session(MemoryStorage()) as session, trio.open_nursery() as nursery:
        async with session.watch(Counter) as watch:
            frames: list[Frame[Any]] = []
            nursery.start_soon(collect, watch, frames)
            await wait_all_tasks_blocked()
            with pytest.raises(InvalidArgumentError, match="open a watch for each"):
                await anext(watch)
            await count_up(session)
            await wait_all_tasks_blocked()
        assert len(frames) == 1


async def test_wrong_arguments_of_a_watch_are_refused() -> None:
    """An unknown conversation, no id, a missing key and a commit around it each raise at once."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        with pytest.raises(NotFoundError, match="conversation 99"):
            async with session.watch(Todos, 99, key="a"):
                pass
        with pytest.raises(InvalidArgumentError, match="scope_id"):
            async with session.watch(Todos, True, key="a"):
                pass
        with pytest.raises(InvalidArgumentError, match="key"):
            async with session.watch(Todos, conversation):
                pass
        with pytest.raises(InvalidArgumentError, match="@document"):
            async with session.watch(int):
                pass
        async with session.body(session.transaction()):
            with pytest.raises(NestedCommitError):
                async with session.watch(Counter):
                    pass


async def test_a_watch_begins_again_after_reopening() -> None:
    """A store that is opened again shows the last value, and frames from there on."""
    storage = MemoryStorage()
    last: Any = None
    for number in range(3):
        async with open_test_session(storage) as session, session.watch(Counter) as watch:
            assert watch.json() == last
            await count_up(session)
            frame = await anext(watch)
            last = patched(last, [frame])
            assert last == frame.json() == {"count": number + 1, "log": []}


async def test_without_watchers_a_commit_makes_no_frame() -> None:
    """What was watched and is watched no more has no hub, and nothing is made of a change."""
    async with open_test_session(MemoryStorage()) as session:
        async with session.watch(Counter):
            assert len(session._watches.hubs) == 1
        published: list[Any] = []
        session._watches.publish = published.append  # type: ignore[assignment, method-assign]
        await count_up(session)
        assert published == []
