"""Killed after any commit and opened again: the same effects once, the same outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from recount import check_at_rest
from worlds import (
    ROOT,
    Actor,
    Harmless,
    Next,
    Start,
    World,
    child_of,
    done,
    forever,
    parent_of,
)

from pidurable.errors import (
    SessionClosedError,
    SessionPoisonedError,
    StorageAccessError,
    StorageRefusedError,
)
from pidurable.testing import Fault

Setup = Callable[[World], None]
Play = Callable[[World], Awaitable[dict[str, Any]]]


DEATH = (SessionPoisonedError, SessionClosedError, StorageAccessError)
"""What a program may meet in a process whose storage answers no more."""


class Bank:
    """An effect outside of the store: it remembers every call, and deduplicates by key."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.booked: dict[str, int] = {}

    def book(self, key: str, cents: int) -> None:
        self.calls[key] += 1
        self.booked.setdefault(key, cents)


async def reopened_after_every_commit(setup: Setup, play: Play) -> None:
    """Play undisturbed, then killed after commit k and played to the end, for every k.

    `play` must find again what it created before: it uses keys. What it returns, and what `setup`
    put outside of the store, is compared.
    """
    world = World()
    setup(world)
    async with world.open():
        commits = -world.storage.count("apply")
        expected = await play(world)
        commits += world.storage.count("apply")
    assert commits > 0
    for k in range(1, commits + 1):
        world = World()
        setup(world)
        with pytest.raises(DEATH):  # noqa: PT012
            async with world.open():
                world.storage.add(Fault.call(world.storage.freeze, "apply", at=k, after=True))
                await play(world)
                # The last commits may come after the answer; then the closing one is killed.
                raise SessionClosedError("world")
        async with world.open() as rt:
            assert await play(world) == expected, f"killed after commit {k} of {commits}"
            await rt.wait_for_idle()
            await world.quiet()
            check_at_rest(rt)


async def test_a_payment_killed_anywhere_is_booked_once() -> None:
    """Intent before effect before outcome: one booking, one entry, whatever the moment of death."""
    # C019
    bank = Bank()

    async def payment(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.goto(Next(1))
            return
        bank.book(ctx.key("charge"), 100)
        async with ctx.commit() as tx:
            tx.append(ROOT, {"paid": 100}, kind="receipt")
            tx.complete("paid")

    def setup(world: World) -> None:
        world.scripts["pay"] = payment

    async def play(world: World) -> dict[str, Any]:
        task = await world.create("pay", key="pay")
        outcome = await world.end(task)
        entries = world.rt.session.storage.entries(ROOT)
        return {"outcome": outcome.result, "entries": len(entries), "booked": dict(bank.booked)}

    await reopened_after_every_commit(setup, play)
    assert max(bank.calls.values()) >= 2


async def test_a_tree_killed_anywhere_ends_the_same() -> None:
    """Parents, children, joins and a held owner: the same outcomes after any death."""

    def setup(world: World) -> None:
        async def holder(at: Any, ctx: Any) -> None:
            await ctx.create_task(Actor, "leaf", key="leaf")
            await ctx.complete("held")

        world.scripts.update(
            leaf=done, bad=_fails, holder=holder, mid=parent_of("leaf", "bad"), last=done
        )
        world.scripts["top"] = parent_of("mid", "holder", "last")

    async def play(world: World) -> dict[str, Any]:
        outcome = await world.end(await world.create("top", key="top"))
        counts = Counter(row.outcome_status for row in world.rows())
        return {"top": outcome.result, "counts": dict(counts)}

    await reopened_after_every_commit(setup, play)


async def test_an_abort_killed_anywhere_reaches_everything_once() -> None:
    """Whenever the process dies, every handler's entry exists once and nothing stays live."""
    # C045

    def setup(world: World) -> None:
        async def undo(at: Any, ctx: Any) -> None:
            async with ctx.commit() as tx:
                tx.append(ROOT, {"undone": ctx.input}, kind="note")
                tx.end_aborted(ctx.input)

        world.scripts["top"] = parent_of("mid", "leaf 3")
        world.scripts["mid"] = parent_of("leaf 1", "leaf 2")
        for name in ("leaf 1", "leaf 2", "leaf 3"):
            world.scripts[name] = forever
        for name in ("top", "mid", "leaf 1", "leaf 2", "leaf 3"):
            world.aborts[name] = undo

    async def play(world: World) -> dict[str, Any]:
        top = await world.create("top", key="top")
        await world.quiet()
        await world.abort(top)
        outcome = await world.end(top)
        said = [entry.data for entry in world.rt.session.storage.entries(ROOT)]
        return {"status": outcome.status, "said": sorted(str(text) for text in said)}

    await reopened_after_every_commit(setup, play)


@pytest.mark.parametrize("policy", ["fail_fast", "first_success"])
async def test_a_decided_join_killed_anywhere_marks_the_others(policy: str) -> None:
    """The join's marks are derived again after any death."""

    def setup(world: World) -> None:
        world.scripts.update(first=_fails if policy == "fail_fast" else done, slow=forever)
        world.scripts["top"] = parent_of("first", "slow", policy=policy)

    async def play(world: World) -> dict[str, Any]:
        outcome = await world.end(await world.create("top", key="top"))
        return {"result": outcome.result}

    await reopened_after_every_commit(setup, play)


async def test_a_signal_killed_anywhere_is_taken_exactly_once() -> None:
    """Consuming a signal and the state that depends on it are one commit."""
    # C020

    def setup(world: World) -> None:
        async def script(at: Any, ctx: Any) -> None:
            if isinstance(at, Start):
                await ctx.wait(then=Next(1), signals=True)
                return
            async with ctx.commit() as tx:
                for name, payload in tx.receive():
                    tx.append(ROOT, {name: payload}, kind="note")
                tx.complete("")

        world.scripts["a"] = script

    async def play(world: World) -> dict[str, Any]:
        task = await world.create("a", key="a")
        await world.quiet()
        if world.outcome(task) is None and not world.rt.session.storage.entries(ROOT):
            await world.rt.commit(lambda tx: _signal_if_live(tx, task))
        await world.end(task)
        return {"entries": [entry.data for entry in world.rt.session.storage.entries(ROOT)]}

    await reopened_after_every_commit(setup, play)


def _signal_if_live(tx: Any, task: int) -> None:
    if tx.view.task(task) is not None:
        tx.signal(task, "go", 1, key="once")


async def _fails(at: Any, ctx: Any) -> None:
    await ctx.fail("on purpose")


async def test_opening_starts_nothing_until_told() -> None:
    """Survivors are pending, inspected and aborted at will; start lets them run."""
    # C006, C017
    world = World()
    async with world.crashing():
        ids = [await world.create(name, forever) for name in ("a", "b")]
        await world.quiet()
    world.log.clear()
    async with world.open(start=False) as rt:
        await world.quiet()
        assert world.log == []
        assert [world.status(id) for id in ids] == ["pending", "pending"]
        assert [world.row(id).recoveries for id in ids] == [1, 1]
        await world.abort(ids[0])
        await world.quiet()
        assert world.outcome(ids[0]) == "aborted"
        assert world.log == ["a abort"]
        rt.start()
        await world.quiet()
        assert world.log == ["a abort", "b start"]


async def test_creating_and_waiting_start_an_opened_session() -> None:
    """The first created task, or the first wait, lets everything run."""
    world = World()
    async with world.open(start=False) as rt:
        assert not rt.started
        task = await world.create("a", done)
        assert rt.started
        await world.end(task)
    async with world.crashing():
        task = await world.create("b", forever)
        await world.quiet()
    world.scripts["b"] = done
    async with world.open(start=False) as rt:
        await rt.wait_for_idle()
        assert world.outcome(task) == "completed"


async def test_a_clean_close_charges_nobody() -> None:
    """What ran is pending from its checkpoint, and was joined before the store was closed."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.goto(Next(1))
            return
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            world.log.append("joined")

    async with world.open():
        task = await world.create("a", script)
        await world.quiet()
    assert world.log[-1] == "joined"
    assert world.status(task) == "pending"
    assert world.row(task).recoveries == 0
    assert world.base.reopen()._data.checkpoints[task][0] == "next"


async def test_an_opening_that_is_refused_changes_nothing(autojump_clock: Any) -> None:
    """Its close stores nothing of what the opening could not: the next opening finds it all."""
    world = World(storage_retry_seconds=0.05)
    async with world.crashing():
        task = await world.create("a", forever)
        aborted = await world.create("b", forever, on_restart="abort")
        await world.quiet()
    for charges in range(1, 3):
        async with world.crashing():
            await world.quiet()
            assert world.row(task).recoveries == charges
        before = world.rows()
        with pytest.raises(StorageRefusedError):
            async with world.open(faults=[Fault.refuse(times=4)]):
                pytest.fail("it opened")
        assert world.rows() == before
    assert world.outcome(aborted) == "aborted"


async def test_a_host_that_waits_hears_of_the_close() -> None:
    """Nobody is left waiting for a session that has closed or broken."""
    world = World()
    told: list[type[BaseException]] = []

    async def wait(rt: Any, task: int) -> None:
        try:
            await rt.wait_for_task(task)
        except (SessionClosedError, SessionPoisonedError) as error:
            told.append(type(error))

    async with trio.open_nursery() as nursery, world.open() as rt:
        task = await world.create("a", forever)
        nursery.start_soon(wait, rt, task)
        await world.quiet()
    async with trio.open_nursery() as nursery, world.crashing() as rt:
        rt.start()
        nursery.start_soon(wait, rt, task)
        await world.quiet()
    assert told == [SessionClosedError, SessionPoisonedError]


async def test_the_blocks_own_exception_leaves_it_bare() -> None:
    """An error of the host is neither wrapped in a group nor lost, and the close is clean."""
    world = World()
    with pytest.raises(ValueError, match="mine"):  # noqa: PT012
        async with world.open():
            task = await world.create("a", forever)
            await world.quiet()
            raise ValueError("mine")
    assert world.status(task) == "pending"


async def test_old_tasks_cost_an_opening_nothing() -> None:
    """Opening reads the live tasks and the ended owners above them, never the history."""
    world = World()
    world.scripts["leaf"] = forever

    async def ends_over(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            owned = tx.create_conversation(key="own")
            tx.create_task(Actor, "leaf", conversation=owned, background=True, key="leaf")
        await ctx.complete("")

    async with world.open():
        for n in range(50):
            await world.end(await world.create(f"old {n}", done, kind=Harmless))
        over = await world.create("over", ends_over)
        await world.end(over)
    async with world.open() as rt:
        assert world.storage.count("task") <= 5
        assert over not in rt.published.nodes
        assert rt.published.nodes[ROOT].below_all == 1
        assert rt.index.live == 1


async def test_a_reopened_child_is_found_again_by_its_key() -> None:
    """A phase that runs again after a crash gets the child it had created, not a second one."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        child = await ctx.create_task(Actor, "child", key="child")
        await ctx.complete((await ctx.wait_for_task(child)).result)

    world.scripts["child"] = forever
    async with world.crashing():
        task = await world.create("p", script)
        await world.quiet()
        first = child_of(world, task, "child")
    world.scripts["child"] = done
    async with world.open():
        assert (await world.end(task)).result == "child"
    assert child_of(world, task, "child") == first
    assert len(world.seen) == 2
