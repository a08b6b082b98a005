"""Opening and using a harness: one root, checked changes, usage over the tree, clean leaving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from agent_world import MODEL, World, ask, calls, verify
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.agent._script import Step, When
from pidurable.agent._scripted import ScriptedModel
from pidurable.agent._services import AgentChange
from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    NotJsonError,
    StorageHeldError,
    UnknownTaskError,
)
from pidurable.harness._open import open_harness
from pidurable.session._seams import Failpoints, InlineBlocking
from pidurable.storage import MemoryStorage
from pidurable.testing import FaultyStorage


async def test_there_is_one_root() -> None:
    """Asked for at once by many, and again after a restart, it is the same conversation."""
    storage = MemoryStorage()
    ids: list[int] = []

    async with open_harness(storage) as harness:

        async def find() -> None:
            ids.append((await harness.root(agent=AgentChange(instructions="first"))).id)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(find)
    async with open_harness(storage.reopen()) as harness:
        root = await harness.root(agent=AgentChange(instructions="second"))
        ids.append(root.id)
        agent = root.agent()

    assert len(set(ids)) == 1
    assert agent["instructions"] == "first"


class CallAtFirstCommit(Failpoints):
    """Does something while the first commit is on its way into the storage."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def hit(self, name: str) -> None:
        """Call back once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


async def test_a_root_that_is_being_created_is_found() -> None:
    """Asked for while another call's root is inside the storage, it is that one."""
    ids: list[int] = []

    async with trio.open_nursery() as nursery:

        async def find() -> None:
            ids.append((await harness.root()).id)

        async with open_harness(
            FaultyStorage(MemoryStorage()),
            blocking=InlineBlocking(),
            failpoints=CallAtFirstCommit(lambda: nursery.start_soon(find)),
        ) as harness:
            await find()
            await wait_all_tasks_blocked()

    assert len(ids) == 2
    assert len(set(ids)) == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (AgentChange(model=7), InvalidArgumentError),  # type: ignore[arg-type]
        (AgentChange(model="a/\ud800"), NotJsonError),
        (AgentChange(instructions="nul \0"), NotJsonError),
        (AgentChange(thinking="much"), InvalidArgumentError),  # type: ignore[arg-type]
        (AgentChange(tools="read"), InvalidArgumentError),  # type: ignore[arg-type]
        (AgentChange(extensions=[1]), InvalidArgumentError),  # type: ignore[list-item]
        (AgentChange(cwd=Path("/"), model="x/y"), (InvalidArgumentError, NotJsonError)),  # type: ignore[arg-type]
    ],
)
async def test_a_change_that_does_not_fit_changes_nothing(
    autojump_clock: MockClock, change: AgentChange, error: Any
) -> None:
    """A field of the wrong type, or one that cannot be stored, is refused by its name."""
    world = World("ok")

    async with world.open() as harness:
        root = await harness.root()
        before = root.agent()
        with pytest.raises(error):
            await root.configure(change)
        assert root.agent() == before
        with pytest.raises(error):
            await harness.create_conversation(agent=change)
        assert len(harness.session.storage.conversations_by_owner(None)) == 1


def test_a_change_of_turns_is_checked_when_it_is_made() -> None:
    """Turns are a whole number of at least one, or None."""
    for value in (0, -1, True, 1.5, "3"):
        with pytest.raises(ValueError, match="turns_max"):
            AgentChange(turns_max=value)  # type: ignore[arg-type]

    assert AgentChange(turns_max=None).given() == {"turns_max": None}
    assert AgentChange().given() == {}


async def test_given_fields_replace_and_none_clears(autojump_clock: MockClock) -> None:
    """Unset fields of a change stay as they were."""
    world = World("ok")

    async with world.open(agent=AgentChange(model=MODEL, thinking="high")) as harness:
        root = await harness.root()
        await root.configure(AgentChange(instructions="be brief"))
        await root.configure(AgentChange(thinking=None))
        agent = root.agent()

    assert agent["model"] == MODEL
    assert agent["thinking"] is None
    assert agent["instructions"] == "be brief"


async def test_usage_is_summed_over_the_whole_tree(autojump_clock: MockClock) -> None:
    """Conversations of the host, and those that calls own at any depth, all count."""
    world = World(
        Step(text="leaf", when=When(user="leaf task")),
        Step(calls=calls("subagent", task="leaf task").calls, when=When(user="middle", turn=0)),
        Step(text="middle", when=When(user="middle", turn=1)),
        calls("subagent", task="middle"),
        "top",
    )

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        other = await harness.create_conversation(agent=AgentChange(model=MODEL))
        await (await other.submit("leaf task")).wait()
        total = await harness.usage()
        await verify(world, harness)

    assert outcome.text == "top"
    assert total[MODEL].requests == len(world.model.requests) == 6


async def test_tasks_are_read_and_aborted_by_their_ids(autojump_clock: MockClock) -> None:
    """Ids of nothing are refused; aborting what has ended tells how it ended."""
    world = World("ok")

    async with world.open() as harness:
        await ask(harness, "go")
        (task,) = harness.tasks()
        assert harness.task(task.id).kind == "pi.generation"
        assert await harness.abort_task(task.id) == "completed"
        for id in (0, -1, 10_000, 2**70, "1", True, None):
            with pytest.raises(UnknownTaskError):
                harness.task(id)  # type: ignore[arg-type]
            with pytest.raises(UnknownTaskError):
                await harness.abort_task(id)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError):
            await harness.abort_task(task.id, "")


async def test_history_is_read_in_pages(autojump_clock: MockClock) -> None:
    """The newest entries come first into a page, oldest first in it; odd limits are refused."""
    world = World("one", "two")

    async with world.open() as harness:
        root = await harness.root()
        await ask(harness, "a", "r1")
        await ask(harness, "b", "r2")
        entries = await root.history()
        newest = await root.history(limit=2)
        before = await root.history(limit=2, before=newest[0].id)
        with pytest.raises(InvalidArgumentError):
            await root.history(limit=0)
        with pytest.raises(NotFoundError):
            harness.conversation(99)

    assert [*before, *newest] == entries[-4:]


async def test_the_body_s_own_error_leaves_bare(autojump_clock: MockClock) -> None:
    """An exception in the block is not wrapped, and what ran goes on at the next opening."""
    world = World(Step(text="answer", delay=1.0))

    async def fail() -> None:
        async with world.open() as harness:
            root = await harness.root()
            await root.submit("go", request_id="r1")
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await fail()
    async with world.open() as harness:
        outcome = await ask(harness, "go")

    assert outcome.text == "answer"


async def test_a_held_store_is_refused(tmp_path: Path) -> None:
    """A second harness on the same file is refused while the first one lives."""
    path = tmp_path / "a.sqlite"

    async with open_harness(path):
        with pytest.raises(StorageHeldError):
            async with open_harness(path):
                pass


@pytest.mark.parametrize("store", ["postgresql://host/db", 7, None])
async def test_a_store_of_another_kind_is_refused(store: Any) -> None:
    """What is no path, no memory and no storage is refused before anything is opened."""
    with pytest.raises(InvalidArgumentError, match="store"):
        async with open_harness(store):
            pass


async def test_a_run_on_sqlite_is_there_after_reopening(tmp_path: Path) -> None:
    """The default storage, with its own threads and clock, keeps the whole run."""
    path = tmp_path / "a.sqlite"
    model = ScriptedModel(["hello"])

    async with open_harness(path, models=model.models()) as harness:
        await harness.root(agent=AgentChange(model=MODEL))
        first = await ask(harness, "go")
    async with open_harness(path, models=model.models()) as harness:
        second = await ask(harness, "go")
        entries = await (await harness.root()).history()

    assert first == second
    assert first.text == "hello"
    assert [entry.kind for entry in entries][-1] == "pi.assistant"
    assert len(model.requests) == 1
