"""Ctrl-C at odd moments: it comes out bare, and the store is closed cleanly all the same."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel
from worlds import ROOT, Actor, World, done

from pidurable.storage import SqliteStorage
from pidurable.tasks._open import open_runtime
from pidurable.tasks._pass import Pass


@trio.lowlevel.enable_ki_protection
def press() -> None:
    """Ctrl-C that reaches the process while it is somewhere inside the kernel."""
    signal.raise_signal(signal.SIGINT)


def _run(world: World, path: Path, *, tasks: int) -> None:
    """Run tasks, one after the other, on a store until Ctrl-C ends it."""

    async def host() -> None:
        async with open_runtime(SqliteStorage(path), snapshot=lambda: world.definitions) as rt:
            await rt.commit(lambda tx: tx.create_conversation())
            for _ in range(tasks):
                task = await rt.commit(lambda tx: tx.create_task(Actor, "a", conversation=ROOT))
                await rt.wait_for_task(task)

    trio.run(host)


def _check_closed_cleanly(path: Path) -> None:
    storage = SqliteStorage(path, create=False)
    assert storage.head().clean
    holder = storage.holder()
    assert holder is not None
    assert holder.released
    assert {row.status for row in storage.live_tasks()} <= {0}
    storage.close()


@pytest.mark.parametrize("step", ["_mark", "_reserve", "adopted"])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_ctrl_c_inside_a_pass_of_the_scheduler_closes_cleanly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str, nth: int
) -> None:
    """The scheduler's own commits are the kernel's: the pass ends, and then the host is told."""
    world = World(Actor)
    passed = 0
    original = getattr(Pass, step)

    def interrupted(self: Pass, *arguments: Any) -> Any:
        nonlocal passed
        passed += 1
        if passed == nth:
            signal.raise_signal(signal.SIGINT)
        return original(self, *arguments)

    monkeypatch.setattr(Pass, step, interrupted)

    world.scripts["a"] = done
    with pytest.raises(KeyboardInterrupt):
        _run(world, tmp_path / "session.sqlite", tasks=20)
    assert passed >= nth
    _check_closed_cleanly(tmp_path / "session.sqlite")


def test_a_second_ctrl_c_while_closing_is_bare_and_leaves_nothing_open(tmp_path: Path) -> None:
    """Ctrl-C while a handler is still being joined does not cut the closing short."""
    world = World(Actor)

    async def stops_slowly(at: Any, ctx: Any) -> None:
        press()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
                press()
                for _ in range(20):
                    await trio.lowlevel.checkpoint()
                world.log.append("returned")

    world.scripts["a"] = stops_slowly
    with pytest.raises(KeyboardInterrupt):  # C052
        _run(world, tmp_path / "session.sqlite", tasks=1)
    assert world.log[-1] == "returned"
    _check_closed_cleanly(tmp_path / "session.sqlite")
