"""Mistakes that show at installation or at run time: class, method and the way out are said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from install_mistakes import INSTALLS
from running_mistakes import (
    ABORTS,
    MIGRATIONS,
    PHASES,
    STARTS,
    Card,
    Migrating,
    Newer,
    Payment,
    Prepare,
    Receipt,
    registry,
)
from trio.testing import wait_all_tasks_blocked

from pidurable import Harness, Registry, Task, open_harness, phase
from pidurable.errors import ExtensionError
from pidurable.storage import MemoryStorage
from pidurable.testing import InlineBlocking

SNAPSHOTS = Path(__file__).parents[1] / "public" / "snapshots" / "running_errors.txt"
WRITING = os.environ.get("PIDURABLE_SNAPSHOTS") == "write"


def kept() -> dict[str, str]:
    """The kept texts by case. PIDURABLE_SNAPSHOTS=write keeps those of today instead."""
    sections = SNAPSHOTS.read_text().split("## ")[1:] if SNAPSHOTS.exists() else []
    parts = (each.partition("\n") for each in sections)
    return {name: text.strip() for name, _, text in parts}


def keep(name: str, text: str) -> None:
    """Compare what was said with what is kept, or keep it."""
    if WRITING:
        texts = {**kept(), name: text}
        SNAPSHOTS.write_text("".join(f"## {key}\n{texts[key]}\n\n" for key in sorted(texts)))
    assert text == kept()[name]


def said(caplog: pytest.LogCaptureFixture, harness: Harness, task_id: int) -> str:
    """What the log says of a task, and how it stands."""
    record = harness.task(task_id)
    state = record.outcome.status if record.outcome else record.blocked or record.status.word
    lines = [each.getMessage() for each in caplog.records if each.name == "pidurable"]
    return "\n".join([*lines, f"({state})"])


def opened(storage: MemoryStorage, tasks: Registry) -> Any:
    return open_harness(storage, registry=tasks, blocking=InlineBlocking())


@pytest.mark.parametrize("name", INSTALLS)
def test_what_cannot_be_installed_is_refused_with_the_way_out(name: str) -> None:
    """What is said of each wrong bundle is as kept, and comes before anything has run."""
    with pytest.raises(ExtensionError) as caught:
        INSTALLS[name]()

    keep(name, str(caught.value))


@pytest.mark.parametrize("name", PHASES)
async def test_a_phase_that_is_wrong_is_told_where_and_what_instead(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is said of each wrong phase is as kept, and names its class, its method and a remedy."""
    async with opened(MemoryStorage(), registry()) as harness:
        task_id = await (await harness.root()).create_task(Payment, Card(name))
        await wait_all_tasks_blocked()
        text = said(caplog, harness, task_id)

    assert " of Payment (shop.payment)" in text
    keep(name, text)


@pytest.mark.parametrize("name", ABORTS)
async def test_an_abort_handler_that_is_wrong_is_told_what_instead(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is said of each wrong abort handler is as kept; the task is faulted by it."""
    async with opened(MemoryStorage(), registry()) as harness:
        task_id = await (await harness.root()).create_task(Payment, Card(name))
        await wait_all_tasks_blocked()
        await harness.abort_task(task_id)
        await wait_all_tasks_blocked()
        text = said(caplog, harness, task_id)

    assert "`abort` of Payment (shop.payment)" in text
    assert text.endswith("(faulted)")
    keep(name, text)


@pytest.mark.parametrize("name", STARTS)
async def test_an_initial_that_is_wrong_creates_no_task(name: str) -> None:
    """Who creates the task is told what `initial` did; nothing is stored."""
    async with opened(MemoryStorage(), registry()) as harness:
        root = await harness.root()
        with pytest.raises(Exception) as caught:
            await root.create_task(Payment, Card(name))
        assert harness.tasks() == []

    text = "\n".join([f"{caught.type.__name__}: {caught.value}", *_notes(caught.value)])
    assert "`initial`" in text
    assert "Payment" in text
    keep(name, text)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


async def _park(storage: MemoryStorage, definition: Task[Any, Any, Any]) -> int:
    """Store a task of a definition, at its wait."""
    async with opened(storage, registry(definition)) as harness:
        task_id = await (await harness.root()).create_task(type(definition), Card("parked"))
        await wait_all_tasks_blocked()
    return int(task_id)


async def _wake(
    storage: MemoryStorage, task_id: int, tasks: Registry, caplog: pytest.LogCaptureFixture
) -> str:
    """Open the store with other definitions, wake the task, and say what became of it."""
    async with opened(storage.reopen(), tasks) as harness:
        await harness.signal(task_id, "go")
        harness.start()
        await wait_all_tasks_blocked()
        return said(caplog, harness, task_id)


@pytest.mark.parametrize("name", MIGRATIONS)
async def test_a_migration_that_is_wrong_blocks_the_task_and_says_why(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The task is blocked as it was stored, and the log says what `migrate` did."""
    storage = MemoryStorage()
    task_id = await _park(storage, Payment())

    text = await _wake(storage, task_id, registry(Migrating(MIGRATIONS[name])), caplog)

    keep(name, text)


async def test_a_missing_migration_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A newer version without `migrate` blocks what an older one stored, and says so."""
    storage = MemoryStorage()
    task_id = await _park(storage, Payment())

    keep("no_migrate", await _wake(storage, task_id, registry(Newer()), caplog))


async def test_a_version_that_went_down_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """An older version leaves what a newer one stored alone, and says so."""
    storage = MemoryStorage()
    task_id = await _park(storage, Newer())

    keep("version_went_down", await _wake(storage, task_id, registry(Payment()), caplog))


async def test_a_definition_that_is_not_installed_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many tasks of a kind are blocked for want of code, one line says so."""
    storage = MemoryStorage()
    task_id = await _park(storage, Payment())
    async with opened(storage.reopen(), registry()) as harness:
        for _ in range(3):
            await (await harness.root()).create_task(Payment, Card("parked"))
        await wait_all_tasks_blocked()
    async with opened(storage.reopen(), Registry()) as harness:
        for task in harness.tasks():
            await harness.signal(task.id, "go")
        harness.start()
        await wait_all_tasks_blocked()
        assert {task.blocked for task in harness.tasks()} == {"missing_definition"}
        text = said(caplog, harness, task_id)

    keep("not_installed", text)


async def test_the_error_of_a_handler_keeps_its_own_text(caplog: pytest.LogCaptureFixture) -> None:
    """What the user's code raises is stored as it is; the log adds where it was."""
    PHASES["raises"] = _raises
    try:
        async with opened(MemoryStorage(), registry()) as harness:
            task_id = await (await harness.root()).create_task(Payment, Card("raises"))
            outcome = await harness.wait_for_task(task_id)
    finally:
        del PHASES["raises"]

    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.message) == ("ValueError", "boom")
    assert "faulted in phase `prepare` of Payment (shop.payment): ValueError: boom" in caplog.text


async def _raises(at: Any, ctx: Any) -> None:
    raise ValueError("boom")


async def test_what_is_in_a_list_counts_when_it_is_committed() -> None:
    """A checkpoint may hold a list: each phase gets what was in it at its commit, and no more."""
    seen: list[list[int]] = []

    class Listing(Payment):
        name = "shop.listing"

        @phase
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            seen.append(list(at.tries))
            tries = [*at.tries, len(at.tries)]
            if len(tries) == 3:
                await ctx.complete(Receipt("1"))
                return
            await ctx.goto(Prepare(tries))
            tries.append(99)
            at.tries.append(98)

    async with opened(MemoryStorage(), registry(Listing())) as harness:
        task_id = await (await harness.root()).create_task(Listing, Card("list"))
        await harness.wait_for_task(task_id)

    assert seen == [[], [0], [0, 1]]


async def test_a_refused_commit_block_stores_nothing_and_lets_the_next_one_work() -> None:
    """After `await ctx.commit()` was refused the phase may still do it right."""
    PHASES["corrects"] = _corrects
    try:
        async with opened(MemoryStorage(), registry()) as harness:
            task_id = await (await harness.root()).create_task(Payment, Card("corrects"))
            outcome = await harness.wait_for_task(task_id)
    finally:
        del PHASES["corrects"]

    assert outcome.result == Receipt("right")


async def _corrects(at: Any, ctx: Any) -> None:
    for wrong in (_awaits, _enters):
        with pytest.raises(TypeError, match="opens a block"):
            await wrong(ctx)
    async with ctx.commit() as tx:
        tx.complete(Receipt("right"))


async def _awaits(ctx: Any) -> None:
    await ctx.commit()


async def _enters(ctx: Any) -> None:
    with ctx.commit():
        pass


def test_every_kept_text_belongs_to_a_mistake() -> None:
    """No text is kept for a case that is not there any more."""
    apart = {"no_migrate", "version_went_down", "not_installed"}
    assert set(kept()) == {*INSTALLS, *PHASES, *ABORTS, *STARTS, *MIGRATIONS, *apart}
