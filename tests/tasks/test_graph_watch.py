"""Watching the task graph: what is live, as committed, and one frame for each commit of it.

Random histories are compared with a recount in `tests/simulation/test_watched_programs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import trio
from seeded import Seed, plant, unwatched
from worlds import ROOT, Actor, Next, World, done, forever, parent_of

from pidurable.errors import (
    InvalidArgumentError,
    NestedCommitError,
    NotFoundError,
    SessionClosedError,
    SessionPoisonedError,
    StorageAccessError,
)
from pidurable.records import _patch
from pidurable.records._limits import WATCH_FRAMES_MAX
from pidurable.records._tasks import Status
from pidurable.session._watch import Frame, Watch
from pidurable.tasks._graph import GraphTask, TaskGraph, graph_json
from pidurable.testing import Fault


async def taken(watch: Watch[TaskGraph]) -> list[Frame[TaskGraph]]:
    """The frames that are there, after everything that happens by itself."""
    await trio.testing.wait_all_tasks_blocked()
    frames: list[Frame[TaskGraph]] = []
    while (frame := watch._take_nowait()) is not None:
        watch.value, watch.seq = frame.value, frame.seq
        frames.append(frame)
    return frames


def ops(frame: Frame[TaskGraph]) -> list[tuple[str, str, Any]]:
    return [(op["op"], op["path"], op.get("value")) for op in frame.patch]


async def parked(world: World, count: int, **options: Any) -> list[int]:
    """So many tasks that wait for a signal, and complete when it comes."""

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("")
        else:
            await ctx.wait(then=Next(), signals=True)

    ids = [await world.create("parked", script, **options) for _ in range(count)]
    await world.quiet()
    return ids


async def test_a_graph_shows_how_each_live_task_stands() -> None:
    """Owner, status, phase, what it waits for, held outcome, mark and the conversations around."""
    world = World()
    inner: list[int] = []

    async def owner(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("held")
            return
        async with ctx.commit() as tx:
            inner.append(tx.create_conversation(key="inside"))
            tx.create_task(Actor, "sleeper", conversation=inner[0], background=True)
            tx.create_task(Actor, "stays", conversation=inner[0])
            tx.goto(Next())

    async def sleeper(at: Any, ctx: Any) -> None:
        await ctx.wait(then=Next(7), on=[stays], deadline=datetime(2040, 1, 1, tzinfo=UTC))

    world.scripts.update(owner=owner, sleeper=sleeper, stays=forever)
    world.aborts["stays"] = forever
    async with world.open() as rt:
        stays = 5
        top = await world.create("owner")
        await world.quiet()
        await world.abort(stays, "enough")
        await world.quiet()
        async with rt.graphs.watch(None, 10) as watch:
            graph = watch.value
        assert {id: conversation.owner for id, conversation in graph.conversations.items()} == {
            ROOT: None,
            inner[0]: top,
        }
        assert graph.conversations[inner[0]].key == "inside"
        assert graph.conversations[inner[0]].owner_conversation_id == ROOT
        common = {"kind": "test.actor", "owner": None, "conversation_id": inner[0]}
        assert list(graph.tasks.values()) == [
            GraphTask(
                id=top,
                kind="test.actor",
                owner=None,
                conversation_id=ROOT,
                background=False,
                status=Status.COMPLETING,
                phase="next",
                outcome="completed",
            ),
            GraphTask(
                id=4,
                background=True,
                status=Status.WAITING,
                phase="next",
                waits_on=(stays,),
                waits_on_count=1,
                wait_until_us=2_208_988_800_000_000,
                **common,
            ),
            GraphTask(
                id=stays,
                background=False,
                status=Status.RUNNING,
                phase="start",
                abort_reason="enough",
                **common,
            ),
        ]


async def test_a_commit_gives_one_frame_whose_patch_names_what_changed() -> None:
    """A task comes whole, changes by field, and goes; the patches fit the first value's JSON."""
    world = World()
    async with world.open() as rt, rt.graphs.watch(None, 10) as watch:
        value = watch.json()
        assert value == {"root": None, "tasks": {}, "conversations": {}, "left_out": 0}
        (one,) = await parked(world, 1)
        await world.signal(one)
        frames = await taken(watch)
        first, *others = frames
        task = f"/tasks/{one}"
        assert [op[:2] for op in ops(first)] == [
            ("add", task),
            ("add", f"/conversations/{ROOT}"),
        ]
        assert [ops(frame) for frame in others] == [
            [("replace", f"{task}/status", "running")],
            [
                ("replace", f"{task}/status", "waiting"),
                ("replace", f"{task}/phase", "next"),
                ("replace", f"{task}/waits_for_signals", True),
            ],
            [
                ("replace", f"{task}/status", "running"),
                ("replace", f"{task}/waits_for_signals", False),
            ],
            [("remove", task, None), ("remove", f"/conversations/{ROOT}", None)],
        ]
        for frame in frames:
            value = _patch.apply(value, frame.patch)
            assert value == frame.json()
        assert [frame.seq for frame in frames] == sorted({frame.seq for frame in frames})


async def test_a_commit_that_changes_nothing_of_a_graph_gives_no_frame() -> None:
    """Entries, signals and conversations of nobody are no part of it."""
    world = World()
    async with world.open() as rt:
        (one,) = await parked(world, 1)
        async with rt.graphs.watch(None, 10) as watch, rt.graphs.watch(one, 10) as below:
            before = watch.value
            await rt.commit(lambda tx: tx.append(ROOT, {"a": 1}, kind="test.note"))
            await rt.commit(lambda tx: tx.create_conversation())
            await rt.commit(lambda tx: None)
            assert await taken(watch) == []
            assert watch.value is before
            # What is beside a root is no part of what is below it.
            await parked(world, 1)
            assert len(await taken(watch)) == 3
            assert await taken(below) == []


async def test_nothing_is_kept_where_nobody_watches() -> None:
    """The last one who leaves takes the graph along, also when others came and went."""
    world = World()
    async with world.open() as rt:
        async with rt.graphs.watch(None, 10), rt.graphs.watch(None, 10), rt.graphs.watch(ROOT, 10):
            assert set(rt.graphs.followed) == {(None, 10), (ROOT, 10)}
        assert rt.graphs.followed == {}
        with pytest.raises(NotFoundError, match="no task or conversation 77"):
            async with rt.graphs.watch(77, 10):
                pass
        assert rt.graphs.followed == {}


async def test_a_hundred_watchers_share_their_frames() -> None:
    """Each gets the very same frame objects; another root or limit is another graph."""
    world = World()
    async with world.open() as rt, trio.open_nursery() as nursery:
        got: list[list[Frame[TaskGraph]]] = []

        async def follow(limit: int) -> None:
            async with rt.graphs.watch(None, limit) as watch:
                mine: list[Frame[TaskGraph]] = []
                got.append(mine)
                async for frame in watch:
                    mine.append(frame)

        for number in range(101):
            nursery.start_soon(follow, 10 if number else 11)
        await world.quiet()
        await parked(world, 2)
        nursery.cancel_scope.cancel()
    by_frames = sorted((list(map(id, mine)) for mine in got), key=repr)
    assert len(by_frames) == 101
    assert len({tuple(each) for each in by_frames}) == 2
    assert all(len(each) >= 4 for each in by_frames)


async def test_the_oldest_are_shown_and_places_are_filled_as_they_end() -> None:
    """With a limit of 2: the two lowest ids, the others counted, the next one in when one ends."""
    world = World()
    async with world.open() as rt:
        ids = await parked(world, 4)
        async with rt.graphs.watch(None, 2) as watch, rt.graphs.watch(ROOT, 2) as below:
            for each in (watch, below):
                assert (list(each.value.tasks), each.value.left_out) == (ids[:2], 2)
            await world.signal(ids[3])  # beyond the limit: only the count says so
            frames = await taken(watch)
            assert [ops(frame) for frame in frames] == [[("replace", "/left_out", 1)]]
            await world.signal(ids[0])
            await taken(watch)
            await taken(below)
            for each in (watch, below):
                assert (list(each.value.tasks), each.value.left_out) == (ids[1:3], 0)
                # It came in as it stands: what it does was read from the store.
                assert each.value.tasks[ids[2]].phase == "next"
            new = await parked(world, 2)
            await world.signal(ids[1])
            await world.signal(ids[2])
            await taken(watch)
            await taken(below)
            for each in (watch, below):
                assert (list(each.value.tasks), each.value.left_out) == (new, 0)


async def test_a_place_stays_empty_while_the_storage_cannot_be_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Publishing a commit does not fail: who cannot be read stays left out until it can."""
    world = World()
    async with world.open() as rt:
        ids = await parked(world, 4)
        async with rt.graphs.watch(None, 2) as watch, rt.graphs.watch(ROOT, 2) as below:
            world.storage.add(Fault.fail("task_phases", times=10))
            world.storage.add(Fault.fail("live_tasks", times=1))
            await world.signal(ids[0])
            await taken(watch)
            await taken(below)
            for each in (watch, below):
                assert (list(each.value.tasks), each.value.left_out) == ([ids[1]], 2)
            assert caplog.text.count("leaves out what it could not read") == 2
            world.storage.clear()
            await world.signal(ids[1])
            await taken(watch)
            await taken(below)
            for each in (watch, below):
                assert (list(each.value.tasks), each.value.left_out) == (ids[2:], 0)


async def test_a_beginning_that_cannot_be_read_leaves_nothing_behind() -> None:
    """It raises what the storage raised; the next one who watches begins anew."""
    world = World()
    async with world.open() as rt:
        ids = await parked(world, 2)
        for read in ("task_phases", "live_tasks", "conversation_owners", "conversation"):
            world.storage.add(Fault.fail(read))
            with pytest.raises(StorageAccessError, match="disk I/O error"):
                await rt.graphs.watch(None, 10).__aenter__()
            assert rt.graphs.followed == {}
        async with rt.graphs.watch(None, 10) as watch:
            assert list(watch.value.tasks) == ids


async def test_a_watch_begins_between_two_batches_and_may_be_given_up_before() -> None:
    """While a commit is inside the storage it waits; cancelled there, it has never been."""
    world = World()
    async with world.open() as rt, trio.open_nursery() as nursery:
        unwatched(world)
        (one,) = await parked(world, 1)
        world.blocking.hold()
        nursery.start_soon(world.signal, one)
        await world.quiet()
        with trio.move_on_after(0) as given_up:
            await rt.graphs.watch(None, 10).__aenter__()
        assert given_up.cancelled_caught
        assert rt.graphs.followed == {}
        world.blocking.release()
        async with rt.graphs.watch(None, 10) as watch:
            value = watch.json()
            assert list(value["tasks"]) == [f"{one}"]
            for frame in await taken(watch):
                value = _patch.apply(value, frame.patch)
            assert value["tasks"] == {}


async def test_below_a_root_is_what_it_owns_however_deep() -> None:
    """The root itself, its children, what lives in conversations of theirs; not what is beside."""
    world = World()

    async def top(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            own = tx.create_conversation()
            tx.create_task(Actor, "child", key="child")
            tx.create_task(Actor, "inside", conversation=own)
            tx.wait(then=Next(), signals=True)

    world.scripts.update(top=top, child=parent_of("grandchild"), inside=forever, grandchild=forever)
    async with world.open() as rt:
        (beside,) = await parked(world, 1)
        root = await world.create("top")
        async with rt.graphs.watch(root, 10) as watch, rt.graphs.watch(ROOT, 10) as whole:
            await taken(watch)
            await taken(whole)
            names = {"top", "child", "inside", "grandchild"}
            stored = {id: rt.session.storage.task_input(id) for id in watch.value.tasks}
            assert set(stored.values()) == {f'"{name}"' for name in names}
            assert set(whole.value.tasks) == {beside, *watch.value.tasks}
            # The root's own conversation says where it is; nothing above it is shown.
            assert set(watch.value.conversations) == {ROOT, root + 1}
            async with rt.graphs.watch(root, 10) as again:
                assert again.value == watch.value
            async with rt.graphs.watch(root + 1, 10) as inner:
                assert [rt.session.storage.task_input(id) for id in inner.value.tasks] == [
                    '"inside"'
                ]


async def test_a_root_that_ends_gives_an_empty_graph_and_ends_the_watch() -> None:
    """What lives on belongs to what is above; the watch of an ended task is over at once."""
    world = World()

    async def top(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("")
            return
        async with ctx.commit() as tx:
            own = tx.create_conversation()
            tx.create_task(Actor, "behind", conversation=own, background=True)
            tx.wait(then=Next(), signals=True)

    world.scripts.update(top=top, behind=forever)
    async with world.open() as rt:
        root = await world.create("top")
        await world.quiet()
        async with rt.graphs.watch(root, 10) as watch:
            assert len(watch.value.tasks) == 2
            value = watch.json()
            await world.signal(root)
            with trio.fail_after(60):
                frames = [frame async for frame in watch]
            for frame in frames:
                value = _patch.apply(value, frame.patch)
        assert value == graph_json(TaskGraph(root=root))
        assert frames[-1].value == TaskGraph(root=root)
        assert rt.graphs.followed == {}
        async with rt.graphs.watch(root, 10) as late:
            assert late.value == TaskGraph(root=root)
            with trio.fail_after(60):
                assert [frame async for frame in late] == []
        assert rt.graphs.followed == {}
        # It lives on below the conversation, whose graph has no end.
        async with rt.graphs.watch(ROOT, 10) as whole:
            assert len(whole.value.tasks) == 1


async def test_who_falls_behind_gets_one_whole_graph() -> None:
    """After more than 100 commits nobody took: one frame, then exact patches again."""
    world = World()
    async with world.open() as rt, rt.graphs.watch(None, 3) as watch:
        unwatched(world)
        (one,) = await parked(world, 1)
        await taken(watch)
        for _ in range(WATCH_FRAMES_MAX + 5):
            await rt.commit(lambda tx: tx.create_task(Actor, "parked", conversation=ROOT))
        await world.quiet()
        (whole,) = await taken(watch)
        assert whole.whole
        assert whole.patch == [{"op": "replace", "path": "", "value": whole.value.json()}]
        assert (len(whole.value.tasks), whole.value.left_out) == (3, WATCH_FRAMES_MAX + 3)
        await world.signal(one)
        value = whole.json()
        for frame in await taken(watch):
            assert not frame.whole
            value = _patch.apply(value, frame.patch)
        assert value == watch.json()


async def test_a_frame_shares_what_its_commit_did_not_change() -> None:
    """The tasks that stayed are the very objects of the graph before."""
    world = World()
    async with world.open() as rt:
        ids = await parked(world, 5)
        async with rt.graphs.watch(None, 10) as watch:
            before = watch.value
            await world.signal(ids[2])
            frames = await taken(watch)
            for id in ids:
                if id != ids[2]:
                    assert all(frame.value.tasks[id] is before.tasks[id] for frame in frames)
            assert all(frame.value.conversations is before.conversations for frame in frames)
            assert list(before.tasks) == ids


async def test_a_fork_of_a_task_is_among_what_it_owns() -> None:
    """It comes in the frame of the commit that forks, and is read again by who looks later."""
    world = World()

    async def forks(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.fork(ROOT, key="copy")
            tx.wait(then=Next(), signals=True)

    async with world.open() as rt, rt.graphs.watch(None, 10) as watch:
        await rt.commit(lambda tx: tx.append(ROOT, {"a": 1}, kind="test.note"))
        top = await world.create("forks", forks)
        *_, last = await taken(watch)
        owned = {each.key: each.owner for each in last.value.conversations.values()}
        assert owned == {None: None, "copy": top}
        async with rt.graphs.watch(None, 9) as anew:
            assert anew.value == watch.value


async def test_wide_waits_and_many_owned_conversations_are_cut() -> None:
    """Of 150 awaited ids the first 100 are named, of 103 owned conversations the first 100."""
    world = World()
    children: list[int] = []

    async def wide(at: Any, ctx: Any) -> None:
        if not isinstance(at, Next):
            async with ctx.commit() as tx:
                for _ in range(101):
                    tx.create_conversation()
                children.extend(tx.create_task(Actor, "child") for _ in range(150))
                tx.goto(Next())
            return
        async with ctx.commit() as tx:
            tx.create_conversation()
            last = tx.create_conversation()
            tx.create_task(Actor, "child", conversation=last)
            tx.wait(then=Next(2), on=children, signals=True)

    world.scripts.update(wide=wide, child=forever)
    async with world.open() as rt, rt.graphs.watch(None, 1_000) as watch:
        unwatched(world)
        top = await world.create("wide")
        await taken(watch)
        shown = watch.value.tasks[top]
        assert (shown.waits_on, shown.waits_on_count) == (tuple(children[:100]), 150)
        owned = [each.id for each in watch.value.conversations.values() if each.owner == top]
        # The last one has a task that is shown.
        assert len(owned) == 101
        async with rt.graphs.watch(ROOT, 1_000) as anew:
            assert anew.value.conversations == watch.value.conversations
            assert anew.value.tasks == watch.value.tasks


@pytest.mark.parametrize("held", [1_200, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_a_chain_that_ends_gives_one_frame_for_each_commit(
    held: int, request: pytest.FixtureRequest
) -> None:
    """500 levels a commit, bottom-up, one frame each, and the patches lead to the empty graph."""
    if held > 2_000 and "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes seconds; run it with -m slow")
    world = World()
    chain = [
        Seed(id=2 + level, name="x", owner=1 + level if level else None, held="completed")
        for level in range(held)
    ]
    plant(world, [*chain, Seed(id=2 + held, name="leaf", owner=1 + held)])
    world.scripts["leaf"] = done
    async with world.open(start=False) as rt:
        unwatched(world)
        async with rt.graphs.watch(None, 1_000) as watch, rt.graphs.watch(2, 10_000) as below:
            assert (len(watch.value.tasks), watch.value.left_out) == (1_000, held - 999)
            value = watch.json()
            reads = world.storage.count("task")
            rt.start()
            await world.end(2)
            await rt.wait_for_idle()
            frames = await taken(watch)
            # Reserved, ended, and then the owners.
            assert len(frames) == 2 + -(-held // 500) - (held > 1_000)
            assert len({frame.seq for frame in frames}) == len(frames)
            for frame in frames:
                value = _patch.apply(value, frame.patch)
            assert value == {"root": None, "tasks": {}, "conversations": {}, "left_out": 0}
            assert [frame.value for frame in await taken(below)][-1] == TaskGraph(root=2)
            assert world.storage.count("task") - reads < 20


@pytest.mark.parametrize("poisons", [False, True])
async def test_the_end_of_the_session_ends_every_watch(poisons: bool) -> None:
    """A close stops the iteration after the last frame; a poisoned session raises."""
    world = World()
    seen: list[Any] = []

    async def follow(started: Callable[[], None]) -> None:
        try:
            async with world.rt.graphs.watch(None, 10) as watch:
                started()
                seen.extend([frame.value.tasks async for frame in watch])
                seen.append("over")
        except SessionPoisonedError:
            seen.append("poisoned")

    async with trio.open_nursery() as nursery:
        opening = world.crashing() if poisons else world.open()
        async with opening as rt:
            ready = trio.Event()
            nursery.start_soon(follow, ready.set)
            await ready.wait()
            if not poisons:
                await parked(world, 1)
    assert seen[-1] == ("poisoned" if poisons else "over")
    assert len(seen) == (1 if poisons else 4)
    with pytest.raises(SessionPoisonedError if poisons else SessionClosedError):
        async with rt.graphs.watch(None, 10):
            pass


async def test_what_cannot_be_watched_is_refused() -> None:
    """A limit out of range, a root that is no id, and a call from inside a commit."""
    world = World()
    async with world.open() as rt:
        for limit in (0, 10_001, True, "5", None):
            with pytest.raises(InvalidArgumentError, match="limit: expected 1 to 10,000"):
                async with rt.graphs.watch(None, limit):  # type: ignore[arg-type]
                    pass
        for root in (0, -1, "x", True, 2**70):
            with pytest.raises(NotFoundError, match="no task or conversation"):
                async with rt.graphs.watch(root, 5):  # type: ignore[arg-type]
                    pass
        async with rt.open_commit():
            with pytest.raises(NestedCommitError):
                await rt.graphs.watch(None, 5).__aenter__()
        async with rt.graphs.watch(None, 10_000), rt.graphs.watch(None, 1):
            pass
