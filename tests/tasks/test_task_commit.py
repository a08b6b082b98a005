"""The commit block of a task: counted while it is under way, and over whatever ends it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from recount import check_at_rest
from worlds import Next, Start, World

from pidurable.errors import InvocationEndedError
from pidurable.session._documents import document


@document("test.noted")
@attrs.define
class Noted:
    count: int = 0


async def test_a_block_that_was_cancelled_in_the_queue_holds_nothing_up(
    autojump_clock: Any,
) -> None:
    """A commit that waits behind another and is cancelled is over; the phase commits again."""
    world = World()
    started, held = trio.Event(), trio.Event()
    passed: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        started.set()
        await held.wait()
        with trio.move_on_after(1) as scope:
            async with ctx.commit() as tx:
                tx.complete("too early")
        assert scope.cancelled_caught
        passed.append("cancelled")
        async with ctx.commit() as tx:
            tx.complete("in time")

    async with world.open() as rt:
        task = await world.create("a", script)
        await started.wait()
        async with rt.open_commit():  # holds the line for longer than the task waits for it
            held.set()
            await trio.sleep(2)
            assert passed == ["cancelled"]
        assert (await world.end(task)).result == "in time"
        await world.quiet()
        check_at_rest(rt)


async def test_a_block_of_an_earlier_phase_is_refused_before_it_begins() -> None:
    """The context of a phase that has returned opens no block any more, and the rest goes on."""
    world = World()
    kept: list[Any] = []

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            kept.append(ctx)
            await ctx.goto(Next(1))
            return
        with pytest.raises(InvocationEndedError, match="its phase had returned"):
            async with kept[0].commit():
                raise AssertionError("the block was entered")
        await ctx.complete("by its own context")

    async with world.open():
        task = await world.create("a", script)
        assert (await world.end(task)).result == "by its own context"


async def test_a_block_that_raises_stores_nothing_and_leaves_the_phase_free() -> None:
    """What the block raised comes out of it; the next block of the phase is stored."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        with pytest.raises(KeyError):  # noqa: PT012
            async with ctx.commit() as tx:
                tx.goto(Next(7))
                raise KeyError("cents")
        async with ctx.commit() as tx:
            tx.complete("stored")

    async with world.open():
        task = await world.create("a", script)
        assert (await world.end(task)).result == "stored"
    assert world.log == ["a start"]


async def test_a_transaction_keeps_within_the_attributes_that_are_cheap() -> None:
    """A commit of a task, whatever it does, has at most 30: CPython shares no more of them."""
    world = World()
    seen: list[int] = []

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.complete("done")
            return
        async with ctx.commit() as tx:
            tx.append(ctx.conversation_id, kind="k", messages=[])
            tx.memo("name", 1)
            tx.receive()
            tx.create_conversation(key="own")
            tx.put_blob(b"bytes")
            await tx.document(Noted, ctx.conversation_id)
            tx.goto(Next(1))
        seen.append(len(vars(tx)))

    async with world.open():
        task = await world.create("a", script)
        assert (await world.end(task)).result == "done"
    assert 10 < seen[0] <= 30
