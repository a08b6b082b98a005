"""A read that fails, or one damaged row, costs neither the store nor an outcome (C078)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio
from worlds import ROOT, Actor, Next, Start, World, child_of, done

from pidurable.errors import StorageAccessError, StorageCorruptError
from pidurable.session._seams import InlineBlocking
from pidurable.storage import SqliteStorage
from pidurable.tasks import _at_hand
from pidurable.tasks._open import open_runtime
from pidurable.tasks._runtime import Runtime
from pidurable.testing import Fault

Opened = Callable[[], AbstractAsyncContextManager[Runtime]]


@pytest.mark.parametrize("point", ["task_outcome", "task_checkpoint", "task_input"])
async def test_a_read_that_failed_is_tried_again(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The phase whose read failed runs again, uncharged; nothing is faulted, nothing poisoned."""
    monkeypatch.setattr(_at_hand, "_TASKS_KEPT", 0)
    world = World(Actor)
    world.scripts["kid"] = done

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            kid = await ctx.create_task(Actor, "kid", key="kid")
            world.storage.add(Fault.fail(point))
            await ctx.wait(then=Next(1), on=[kid])
            return
        await ctx.outcomes([child_of(world, ctx.task_id, "kid")])
        await ctx.complete("")

    async with world.open():
        task = await world.create("a", script)
        with trio.fail_after(100):
            outcome = await world.end(task)
        assert world.storage.count(point) > 1
    assert outcome.status == "completed"
    assert world.row(task).recoveries == 0


async def test_trouble_of_another_store_is_the_tasks_own() -> None:
    """An error that names a store which the handler opened by itself faults the task."""
    world = World(Actor)

    async def script(at: Any, ctx: Any) -> None:
        raise StorageAccessError("/somewhere/else", "there is no such file")

    async with world.open():
        assert (await world.end(await world.create("a", script))).status == "faulted"


async def _leave_work(world: World, opened: Opened, gate: trio.Event) -> dict[str, int]:
    """One task that waits, one that runs and one that has ended, as a clean close leaves them."""

    async def waits(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), signals=True)
            return
        await ctx.complete("")

    async def runs(at: Any, ctx: Any) -> None:
        await gate.wait()
        await ctx.complete("")

    world.scripts.update(waits=waits, runs=runs, done=done)
    tasks: dict[str, int] = {}
    async with opened() as rt:
        await rt.commit(lambda tx: tx.create_conversation())
        for name in ("waits", "runs", "done"):
            tasks[name] = await _create(rt, name)
        await rt.wait_for_task(tasks["done"])
        await trio.sleep(1)
    return tasks


async def _create(rt: Runtime, name: str) -> int:
    return int(await rt.commit(lambda tx: tx.create_task(Actor, name, conversation=ROOT)))


def _rows(path: Path, table: str) -> list[Any]:
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(f"select * from {table} order by task").fetchall()
    finally:
        connection.close()


def _set(path: Path, table: str, rows: list[tuple[int, str]]) -> None:
    connection = apsw.Connection(str(path))
    try:
        for task, value in rows:
            statement = f"update {table} set value = ? where task = ?"
            connection.execute(statement, (value, task))
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("table", "blocked"),
    [
        ("checkpoints", {"runs": "checkpoint_unreadable"}),
        ("inputs", {"runs": "checkpoint_unreadable"}),
        ("waits", {"waits": "unknown_record"}),
        ("outcomes", {}),
    ],
)
async def test_damaged_rows_block_what_reads_them_and_nothing_else(
    autojump_clock: Any, tmp_path: Path, table: str, blocked: dict[str, str]
) -> None:
    """The store opens, other tasks run, no retry hides the damage, and once mended all goes on."""
    world = World(Actor)
    path = tmp_path / "session.sqlite"
    gate = trio.Event()

    def opened() -> AbstractAsyncContextManager[Runtime]:
        return open_runtime(
            SqliteStorage(path),
            snapshot=lambda: world.definitions,
            clock=world.clock,
            blocking=InlineBlocking(),
        )

    tasks = await _leave_work(world, opened, gate)
    rows = _rows(path, table)
    column = 2 if table == "checkpoints" else 1
    good = [(row[0], row[column]) for row in rows]
    _set(path, table, [(task, "{broken") for task, _ in good])
    async with opened() as rt:  # C078
        rt.start()
        await trio.sleep(5)
        fresh = await rt.wait_for_task(await _create(rt, "done"))
        assert fresh.status == "completed" or table == "outcomes"
        for name, reason in blocked.items():
            row = rt.session.storage.task(tasks[name])
            assert row is not None
            assert row.blocked == reason
            await rt.retry_task(tasks[name])
        world.install(Actor)
        await rt.definitions_changed()
        await trio.sleep(5)
        for name, reason in blocked.items():
            row = rt.session.storage.task(tasks[name])
            assert row is not None
            assert row.blocked == reason
        if table == "outcomes":
            with pytest.raises(StorageCorruptError, match=f"outcome of task {tasks['done']}"):
                await rt.wait_for_task(tasks["done"])
    assert {row[column] for row in _rows(path, table) if row[0] in dict(good)} == {"{broken"}
    _set(path, table, good)
    gate.set()
    async with opened() as rt:
        rt.start()
        for name in blocked:
            await rt.retry_task(tasks[name])
        await rt.commit(lambda tx: tx.signal(tasks["waits"], "go"))
        for name in tasks:
            assert (await rt.wait_for_task(tasks[name])).status == "completed"


async def test_a_wait_without_a_live_task_holds_up_nobody(
    autojump_clock: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported with the task's id, the store opens, and others go on."""
    # C078
    world = World(Actor)
    path = tmp_path / "session.sqlite"
    gate = trio.Event()
    gate.set()

    def opened() -> AbstractAsyncContextManager[Runtime]:
        return open_runtime(
            SqliteStorage(path),
            snapshot=lambda: world.definitions,
            clock=world.clock,
            blocking=InlineBlocking(),
        )

    tasks = await _leave_work(world, opened, gate)
    connection = apsw.Connection(str(path))
    connection.execute("update tasks set status = 77 where id = ?", (tasks["waits"],))
    connection.close()

    async with opened() as rt:
        rt.start()
        fresh = await rt.wait_for_task(await _create(rt, "done"))

    assert fresh.status == "completed"
    assert f"task {tasks['waits']}" in caplog.text
    assert "stored as waiting, and no live task has its id" in caplog.text
