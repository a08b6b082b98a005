"""Documents of tasks: they belong to a live task, and end with it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from worlds import World, forever

from pidurable.errors import InvalidArgumentError, TaskEndedError, UnknownTaskError
from pidurable.session._documents import document


@document("kept.by_task", scope="task")
@attrs.define
class Kept:
    text: str = ""


async def test_only_a_live_task_is_given_a_document() -> None:
    """A document of a task that has ended, or of none at all, would never be retired."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            (await tx.document(Kept, ctx.task_id)).text = "mine"
            tx.complete("done")

    async def write(task_id: Any) -> None:
        async with world.rt.open_commit() as tx:
            (await tx.document(Kept, task_id)).text = "late"

    async with world.open() as rt:
        live = await world.create("live", forever)
        ended = await world.create("ended", script)
        await world.end(ended)
        await write(live)
        assert rt.session.snapshot(Kept, live) == Kept("late")
        with pytest.raises(TaskEndedError):
            await write(ended)
        for nothing in (ended + 1_000, live + 0.5, True, "1", None, 0):
            with pytest.raises(InvalidArgumentError if nothing is None else UnknownTaskError):
                await write(nothing)
        assert [row.scope_id for row in rt.session.storage.documents(2, live)] == [live]
        assert rt.session.storage.documents(2, ended) == []
