"""Forks by a task are owned by it; forks of a host are owned by nobody."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from worlds import ROOT, Actor, World, done, forever

from pidurable.errors import InvalidArgumentError, OwnedTooDeepError
from pidurable.session._documents import document


@document("owned.task", scope="task")
@attrs.define
class OfTask:
    """A document of a task, which no fork ever gets."""


async def test_a_fork_of_a_task_holds_its_owner() -> None:
    """What runs in the fork is below the task, found again under its key after a restart."""
    world = World()
    world.scripts["child"] = forever

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            entry = tx.append(ROOT, {"said": True}, kind="note")
            made = tx.fork(ROOT, entry, key="branch")
            tx.create_task(Actor, "child", conversation=made, key="child")
            await tx.document(OfTask, ctx.task_id)
        async with ctx.commit() as tx:
            assert tx.fork(ROOT, key="branch") == made
            tx.complete("early")

    async with world.crashing():
        task = await world.create("owner", owner)
        await world.quiet()
        assert world.status(task) == "completing"
    world.scripts["child"] = done
    async with world.open() as rt:
        (fork,) = rt.session.storage.conversations_by_owner(task)
        (child,) = rt.session.storage.tasks(conversation=fork.id)
        assert (await world.end(task)).result == "early"
        assert world.status(child.id) == "terminal"
        history = await rt.session.history(fork.id)

    assert (fork.parent, fork.parent_entry, fork.owner) == (ROOT, history[-1].id, task)
    assert [entry.kind for entry in history] == ["note"]


async def test_an_abort_reaches_what_runs_in_a_fork_and_not_the_parents_tasks() -> None:
    """The fork is a conversation of the task; the parent's tasks are not below it."""
    world = World()
    world.scripts["below"] = world.scripts["beside"] = forever

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.create_task(Actor, "below", conversation=tx.fork(ROOT, key="branch"))
        await forever(at, ctx)

    async with world.open() as rt:
        beside = await world.create("beside", forever)
        task = await world.create("owner", owner)
        await world.quiet()
        (fork,) = rt.session.storage.conversations_by_owner(task)
        (below,) = rt.session.storage.tasks(conversation=fork.id)
        await world.abort(task)
        await world.end(task)

        assert world.outcome(below.id) == "aborted"
        assert world.status(beside) == "running"
        # Nothing of the parent's work came with the fork.
        free = await rt.commit(lambda tx: tx.fork(ROOT))
        await rt.wait_for_idle(free)
        assert rt.session.conversation(free).owner is None
        assert rt.session.storage.tasks(conversation=free) == []


async def test_forks_count_as_levels_of_ownership() -> None:
    """One level more than is allowed is refused, where the level below it is not."""
    world = World(owned_depth_max=2)
    told: list[type[Exception]] = []

    async def deeper(at: Any, ctx: Any) -> None:
        try:
            async with ctx.commit() as tx:
                fork = tx.fork(ctx.conversation_id, key="fork")
                tx.create_task(Actor, "deeper", conversation=fork, key="deeper")
        except OwnedTooDeepError as error:
            told.append(type(error))
        await ctx.complete("as deep as may be")

    world.scripts["deeper"] = deeper
    async with world.open() as rt:
        task = await world.create("deeper", deeper)
        await world.end(task)
        depth = 0
        owner: int | None = task
        while owner is not None:
            forks = rt.session.storage.conversations_by_owner(owner)
            depth += len(forks)
            owner = rt.session.storage.tasks(conversation=forks[0].id)[0].id if forks else None

    assert (depth, told) == (2, [OwnedTooDeepError])


async def test_an_abort_handler_may_not_fork() -> None:
    """A fork would be owned work, and what is below a task has ended before its handler runs."""
    world = World()
    told: list[str] = []

    async def undo(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            with pytest.raises(InvalidArgumentError, match="fork: an abort handler"):
                tx.fork(ROOT)
            told.append("refused")
            tx.end_aborted()

    world.aborts["task"] = undo
    async with world.open():
        task = await world.create("task", forever)
        await world.quiet()
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"

    assert told == ["refused"]
