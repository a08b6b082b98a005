"""Tasks that one phase asks for at the same time share commits, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked
from worlds import Actor, Other, Watcher, World, child_of, done, forever

from pidurable.errors import (
    AbortRequestedError,
    InvalidArgumentError,
    NestedCommitError,
    StorageRefusedError,
)
from pidurable.tasks._together import TOGETHER_MAX, Together
from pidurable.testing import Fault


def child(name: str, kind: type[Actor] = Actor) -> Any:
    """What creates a child of this name."""
    return lambda tx: tx.create_task(kind, name, key=name)


def together(world: World, ctx: Any) -> Together:
    return Together(world.rt.session.line, ctx._run)


class Counted(Watcher):
    """A participant that notes how many tasks each commit creates."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.created: list[int] = []

    def committed(self, tx: Any) -> None:
        if tx.fresh:
            self.created.append(len(tx.fresh))


async def test_what_is_asked_for_at_once_takes_a_commit_for_each_group() -> None:
    """The first has one of its own; the others share, and each gets its own task, stored."""
    world = World()
    names = [f"n{number}" for number in range(3 * TOGETHER_MAX + 1)]
    world.scripts.update(dict.fromkeys(names, forever))
    got: dict[str, int] = {}

    async def script(at: Any, ctx: Any) -> None:
        asked = together(world, ctx)

        async def create(name: str) -> None:
            got[name] = await asked.create(child(name))
            assert got[name] == child_of(world, ctx.task_id, name)

        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(create, name)
        await trio.sleep_forever()

    async with world.open() as rt:
        await world.create("p", script)
        counted = Counted(world)
        rt.session.participants.append(counted)
        await world.quiet()
        assert sorted(got) == sorted(names)
        assert len(set(got.values())) == len(names)
        assert counted.created == [1, TOGETHER_MAX, TOGETHER_MAX, TOGETHER_MAX]


async def test_what_one_has_done_wrong_is_told_to_that_one_alone() -> None:
    """The others of its commit get what they asked for."""
    world = World()
    world.scripts.update(a=done, b=done, c=done)
    told: dict[str, str] = {}

    async def script(at: Any, ctx: Any) -> None:
        asked = together(world, ctx)

        async def create(name: str, kind: type[Actor]) -> None:
            try:
                await asked.create(child(name, kind))
                told[f"{name} {kind.name}"] = "made"
            except InvalidArgumentError as error:
                told[f"{name} {kind.name}"] = error.problem

        async with trio.open_nursery() as nursery:
            for name, kind in (("a", Actor), ("b", Actor), ("a", Other), ("c", Other)):
                nursery.start_soon(create, name, kind)
        await ctx.complete("")

    async with world.open():
        assert (await world.end(await world.create("p", script))).status == "completed"
    assert len(told) == 4
    [refused] = [said for said in told.values() if said != "made"]
    assert "names task" in refused
    assert len(world.rows()) == 4


async def test_one_that_is_cancelled_before_its_turn_makes_nothing_and_holds_up_nobody() -> None:
    """Also where it leads: the next one does then. Whose body has begun is not cut short."""
    world = World()
    world.scripts.update(dict.fromkeys("abcd", forever))
    got: list[str] = []
    scopes: dict[str, trio.CancelScope] = {}
    every = trio.Event()

    async def script(at: Any, ctx: Any) -> None:
        asked = together(world, ctx)

        async def create(name: str) -> None:
            with trio.CancelScope() as scopes[name]:
                await asked.create(child(name))
                got.append(name)

        async with trio.open_nursery() as nursery:
            world.blocking.hold()
            for name in "abcd":
                nursery.start_soon(create, name)
                await world.quiet()
            every.set()
        await trio.sleep_forever()

    async with world.open():
        task = await world.create("p", script)
        await every.wait()
        # The first is in the storage, the second leads, and the others have asked it.
        for name in "abd":
            scopes[name].cancel()
        await world.quiet()
        assert got == []
        world.blocking.release()
        await world.quiet()
        assert got == ["a", "c"]
        assert sorted(world.base.reopen().keyed_tasks(task)) == [
            ("a", child_of(world, task, "a")),
            ("c", child_of(world, task, "c")),
        ]


async def test_a_refusal_is_told_to_all_of_the_commit(autojump_clock: Any) -> None:
    """Nothing of it is stored, and the same is created when they ask again."""
    world = World(storage_retry_seconds=1.0)
    world.scripts.update(dict.fromkeys("abc", done))
    refused: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        asked = together(world, ctx)

        async def create(name: str) -> None:
            try:
                await asked.create(child(name))
            except StorageRefusedError:
                refused.append(name)
                assert world.base.reopen().task_by_key(ctx.task_id, 1, name) is None
                await trio.sleep(30)
                await asked.create(child(name))

        world.storage.add(Fault.refuse(times=25))
        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(create, name)
        await ctx.complete("")

    async with world.open():
        assert (await world.end(await world.create("p", script))).status == "completed"
    assert sorted(refused) == ["a", "b", "c"]
    assert len(world.rows()) == 4


async def test_an_abort_is_told_to_all_who_ask() -> None:
    """Nobody is left waiting for a commit that comes too late, and nothing is created."""
    world = World()
    told: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        asked = together(world, ctx)

        async def create(name: str) -> None:
            # As a tool may: what it asks for while it is being stopped is not cut short.
            with trio.CancelScope(shield=True):
                try:
                    await asked.create(child(name))
                except AbortRequestedError:
                    told.append(name)

        world.blocking.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.abort, ctx.task_id)
            await world.quiet()
            for name in "abc":
                nursery.start_soon(create, name)
            await world.quiet()
            world.blocking.release()

    async with world.open():
        assert (await world.end(await world.create("p", script))).status == "aborted"
    assert sorted(told) == ["a", "b", "c"]
    assert len(world.rows()) == 1


async def test_who_asks_inside_of_a_commit_is_refused() -> None:
    """It would wait for a leader that waits for the line, which the commit around it holds."""
    world = World()
    world.scripts.update(a=done)

    async def script(at: Any, ctx: Any) -> None:
        asked = together(world, ctx)
        begin = trio.Event()

        async def lead() -> None:
            await begin.wait()
            await asked.create(child("a"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead)
            async with ctx.commit():
                begin.set()
                await world.quiet()
                with pytest.raises(NestedCommitError):
                    await asked.create(child("b"))
        await ctx.complete("")

    async with world.open():
        with trio.fail_after(5):
            task = await world.create("p", script)
            assert (await world.end(task)).status == "completed"
    assert len(world.rows()) == 2


class Line:
    """A line on which nobody is ever inside of a commit."""

    def check_not_nested(self) -> None:
        pass


class Tx:
    """A transaction that notes what was staged on it."""

    def __init__(self) -> None:
        self.writes: list[str] = []


async def test_ctrl_c_in_a_leader_leaves_the_others_to_ask_again() -> None:
    """What was refused for it was not stored, and they lead a commit of their own."""
    runs: list[list[str]] = []
    go = trio.Event()

    async def run(body: Any) -> None:
        await go.wait()
        tx = Tx()
        body(tx)
        runs.append(tx.writes)
        if len(runs) == 1:
            raise KeyboardInterrupt

    asked = Together(Line(), run)  # type: ignore[arg-type]
    got: list[str] = []

    async def create(name: str) -> None:
        def make(tx: Any) -> str:
            tx.writes.append(name)
            return name

        try:
            got.append(await asked.create(make))
        except KeyboardInterrupt:
            got.append("interrupted")

    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(create, name)
        await wait_all_tasks_blocked()
        go.set()
    [first, second] = runs
    assert sorted(first) == ["a", "b", "c"]
    assert sorted(got) == sorted([*second, "interrupted"])
    assert len(second) == 2


async def test_ctrl_c_in_a_leader_takes_nothing_from_the_one_that_leads_next() -> None:
    """Those who ask again come behind it, and are answered by it."""
    runs: list[list[str]] = []
    go, again = trio.Event(), trio.Event()

    async def run(body: Any) -> None:
        if runs:
            await again.wait()
        tx = Tx()
        body(tx)
        runs.append(tx.writes)
        if len(runs) == 1:
            await go.wait()
            raise KeyboardInterrupt

    asked = Together(Line(), run)  # type: ignore[arg-type]
    got: list[str] = []

    async def create(name: str) -> None:
        def make(tx: Any) -> str:
            tx.writes.append(name)
            if len(runs) == 0 and name == "c":
                tx.writes.pop()
                raise ValueError(name)
            return name

        try:
            got.append(await asked.create(make))
        except KeyboardInterrupt:
            got.append("interrupted")

    async with trio.open_nursery() as nursery:
        # A first one in flight lets those behind it ask together.
        asked._in_flight += 1
        for name in "abc":
            nursery.start_soon(create, name)
        await wait_all_tasks_blocked()
        asked._in_flight -= 1
        [first] = runs
        nursery.start_soon(create, "d")
        await wait_all_tasks_blocked()
        go.set()
        await wait_all_tasks_blocked()
        again.set()
    assert len(first) == 2
    assert len(runs) == 2
    assert runs[1][0] == "d"
    assert len(got) == 4
    assert got.count("interrupted") == 1


async def test_one_that_fails_with_a_part_staged_fails_the_whole_commit() -> None:
    """A part of what one does is not stored with what the others have asked for."""
    done_by: list[Tx] = []
    go = trio.Event()

    async def run(body: Any) -> None:
        await go.wait()
        tx = Tx()
        body(tx)
        done_by.append(tx)

    asked = Together(Line(), run)  # type: ignore[arg-type]
    told: list[str] = []

    async def create(name: str) -> None:
        def make(tx: Any) -> None:
            tx.writes.append(name)
            if name == "b":
                raise ValueError(name)

        try:
            await asked.create(make)
            told.append(f"{name} made")
        except ValueError:
            told.append(f"{name} failed")

    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(create, name)
        await wait_all_tasks_blocked()
        go.set()
    assert sorted(told) == ["a failed", "b failed", "c failed"]
    assert done_by == []
