"""Tasks that meet newer code: in a wait, in a queue, holding an outcome, and when they are read."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from recount import check_at_rest
from worlds import ROOT, Actor, Next, Other, World, child_of, forever

from pidurable.errors import ResultUnreadableError
from pidurable.records._codec import Codec
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, phase
from pidurable.tasks._runtime import StaticDefinitions


class Newer(Actor):
    """The second version, which takes over what the first one stored."""

    name = "test.actor"
    version = 2

    def migrate(self, input: Any, checkpoint: Any, from_version: int) -> Any:
        self.world.log.append(f"migrate {checkpoint['phase']} from {from_version}")
        n = checkpoint["value"].get("n", 0)
        return f"{input} v2", {"phase": "next", "value": {"n": n + 100}}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("how", ["signal", "tasks"])
async def test_the_checkpoint_that_a_wait_leads_to_is_migrated_when_it_wakes(
    restart: bool, how: str
) -> None:
    """While it waits it is left alone; woken, its next phase is one of the newer version."""
    world = World()
    go = trio.Event()

    async def child(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.complete("")

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            on = [tx.create_task(Other, "child", key="child")] if how == "tasks" else None
            tx.wait(then=Next(7), on=on, signals=how == "signal")

    async def woken(at: Any, ctx: Any) -> None:
        await ctx.complete(f"{ctx.input} at {at.n}, woken by {ctx.woken_by}")

    world.scripts.update({"a": script, "a v2": woken, "child": child})

    async def wake(task: int) -> str:
        await world.quiet()
        assert (world.status(task), world.row(task).version) == ("waiting", 1)
        if how == "signal":
            await world.signal(task)
        go.set()
        return (await world.end(task)).result  # type: ignore[no-any-return]

    async with world.open() as rt:
        task = await world.create("a")
        await world.quiet()
        world.install(Newer, Other)
        await rt.definitions_changed()
        if not restart:
            result = await wake(task)
    if restart:
        async with world.open():
            result = await wake(task)
    assert result == f"a v2 at 107, woken by {how}"
    assert [line for line in world.log if "migrate" in line] == ["migrate next from 1"]
    assert world.row(task).version == 2


async def test_a_task_that_was_queued_when_its_code_was_replaced_begins_in_the_newer_one() -> None:
    """What this process remembers of the task that it made is of the old version, and not used."""
    world = World(limits={Actor.name: 1})
    go = trio.Event()

    async def busy(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.complete("")

    async def begins(at: Any, ctx: Any) -> None:
        await ctx.complete(f"{ctx.input} at {at.n}")

    world.scripts.update({"queued v2": begins})
    async with world.open() as rt:
        first = await world.create("busy", busy)
        await world.quiet()
        task = await world.create("queued")
        world.install(Newer)
        await rt.definitions_changed()
        go.set()
        await world.end(first)
        assert (await world.end(task)).result == "queued v2 at 100"
        check_at_rest(rt)


async def test_an_outcome_that_is_held_is_not_migrated() -> None:
    """It was decided by the code of then: the newer version is not asked, whoever waits for it."""
    world = World()
    world.scripts["child"] = forever

    async def owner(at: Any, ctx: Any) -> None:
        await ctx.create_task(Other, "child", key="child")
        await ctx.complete("decided")

    async with world.open():
        task = await world.create("owner", owner)
        await world.quiet()
        assert world.status(task) == "completing"
    world.install(Newer, Other)
    for _ in range(2):
        async with world.open():
            await world.quiet()
            assert (world.status(task), world.row(task).version) == ("completing", 1)
    async with world.open():
        await world.abort(child_of(world, task, "child"))
        assert (await world.end(task)).result == "decided"
    assert world.row(task).version == 1
    assert not [line for line in world.log if "migrate" in line]


@attrs.frozen
class Receipt:
    id: str


@attrs.frozen
class Invoice:
    number: int


@attrs.frozen
class Begin:
    pass


class Pays(Task[str, Begin, Receipt]):
    name = "test.pays"

    def initial(self, input: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[str, Begin, Receipt]) -> None:
        await ctx.complete(Receipt(ctx.input))

    async def abort(self, at: Begin, ctx: TaskContext[str, Begin, Receipt]) -> None:
        await ctx.end_aborted()


class PaysByInvoice(Task[str, Begin, Invoice]):
    name = "test.pays"
    version = 2

    def initial(self, input: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[str, Begin, Invoice]) -> None:
        await ctx.complete(Invoice(1))

    async def abort(self, at: Begin, ctx: TaskContext[str, Begin, Invoice]) -> None:
        await ctx.end_aborted()


async def test_a_receipt_that_newer_code_cannot_read_says_so_with_its_json_on_it() -> None:
    """The outcome is there and is as it was; only its result is not of today's class."""
    world = World()

    async with world.open() as rt:
        world.definitions = StaticDefinitions([Pays()], Codec())
        task = await rt.commit(lambda tx: tx.create_task(Pays, "r-1", conversation=ROOT))
        assert (await rt.wait_for_task(task)).result == Receipt("r-1")
        world.definitions = StaticDefinitions([PaysByInvoice()], Codec())
        outcome = await rt.wait_for_task(task)
        assert outcome.status == "completed"
        with pytest.raises(ResultUnreadableError) as caught:
            outcome.result  # noqa: B018
        assert caught.value.json == {"id": "r-1"}
        world.definitions = StaticDefinitions([], Codec())
        without_code = await rt.wait_for_task(task)
        assert without_code.result == {"id": "r-1"}
