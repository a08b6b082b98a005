"""The reader: committed state, beside a holder and after its death, and never a change."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

import apsw
import pytest
import trio

from pidurable.agent._services import AgentChange
from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    StorageAccessError,
    StorageCorruptError,
    StorageRefusedError,
)
from pidurable.harness._open import open_harness
from pidurable.harness._reader import TreeRow, open_reader
from pidurable.records._tasks import Status
from pidurable.registry import Extension, Registry, ToolCall, tool
from pidurable.storage import Batch, ConversationRow, HolderClaim, Op, SqliteStorage, TaskRow
from pidurable.testing import ScriptedModel


def registry(gate: trio.Event | None = None) -> Registry:
    """One tool that asks a sub-agent, and one that waits for a gate."""

    @tool(replay="safe")
    async def ask(call: ToolCall) -> str:
        """Ask a sub-agent."""
        child = await call.child(agent=AgentChange(model="scripted/child"))
        submission = await child.submit("sub-task", request_id=call.key("task"))
        settled = await submission.wait()
        return str(settled.text)

    @tool
    async def hold(call: ToolCall) -> str:
        """Wait for the gate."""
        await call.output("holding\n")
        if gate is not None:
            await gate.wait()
        return "held"

    made = Registry()
    made.install(Extension("test", tools=[ask, hold]))
    return made


def models(*steps: object) -> object:
    """The main model with these steps; the child answers `child says`."""
    from pidurable import Models
    from pidurable.testing import ScriptedProvider

    main = ScriptedModel(steps, name="main")  # type: ignore[arg-type]
    child = ScriptedModel(["child says"], name="child")
    return Models([ScriptedProvider([main, child])])


async def run(store: Path, *steps: object, prompt: str = "go") -> int:
    """Run a prompt to its end and return the root's id."""
    async with open_harness(store, registry=registry(), models=models(*steps)) as harness:  # type: ignore[arg-type]
        root = await harness.root(agent=AgentChange(model="scripted/main"))
        await (await root.submit(prompt)).wait()
        return root.id


def shape(rows: list[TreeRow]) -> list[tuple[int, str]]:
    return [(row.depth, row.task.kind if row.task else "conversation") for row in rows]


ASKS = {"calls": [{"name": "ask", "arguments": {}}]}


async def test_the_tree_shows_conversations_below_the_calls_that_own_them(tmp_path: Path) -> None:
    """A sub-agent's conversation hangs from its call, and its tasks from it; owners come first."""
    root = await run(tmp_path / "s", ASKS, "done")

    async with open_reader(tmp_path / "s") as reader:
        rows = await reader.tree()
        call = next(row for row in rows if row.task and row.task.kind == "pi.tool")
        below = await reader.tree(call.id)
        children = await reader.children(root)
        owned = await reader.children(call.id)

    assert shape(rows) == [
        (0, "conversation"),
        (1, "pi.generation"),
        (2, "pi.tool"),
        (3, "conversation"),
        (4, "pi.generation"),
        (1, "pi.generation"),
    ]
    assert shape(below) == [(0, "pi.tool"), (1, "conversation"), (2, "pi.generation")]
    assert shape(children) == [(0, "pi.generation"), (0, "pi.generation")]
    assert shape(owned) == [(0, "conversation")]


async def test_the_reader_sees_what_a_holder_has_committed_and_who_it_is(tmp_path: Path) -> None:
    """Beside a running holder its live work, partial output and process are seen."""
    gate = trio.Event()
    held = registry(gate)
    scripted = models({"calls": [{"name": "hold", "arguments": {}}]}, "done")
    async with open_harness(tmp_path / "s", registry=held, models=scripted) as harness:  # type: ignore[arg-type]
        root = await harness.root(agent=AgentChange(model="scripted/main"))
        submission = await root.submit("go")
        async with open_reader(tmp_path / "s") as reader:
            live = await reader.live(root.id)
            while not (live["calls"] and live["calls"][0]["output_tail"]):
                live = await reader.live(root.id)
            running = await reader.tasks(live=True, kind="pi.tool")
            holder = await reader.holder()
            waiting = await reader.open_submissions(root.id)
            gate.set()
            await submission.wait()
            ended = await reader.submission(submission.id)

    assert live["calls"][0]["output_tail"] == "holding\n"
    assert [task.phase for task in running] == ["execute"]
    assert holder is not None
    assert holder.state == "live"
    assert holder.heartbeat_age < 15
    assert [each.status for each in waiting] == ["placed"]
    assert ended.status == "done"


async def test_a_released_store_names_no_holder_that_lives(tmp_path: Path) -> None:
    """After a clean close the last holder is known as released; a dead one as dead."""
    await run(tmp_path / "s", "done")
    async with open_reader(tmp_path / "s") as reader:
        released = await reader.holder()
    storage = SqliteStorage(tmp_path / "s")

    claim = HolderClaim(
        holder_id="x", host=socket.gethostname(), pid=os.getpid(), at_us=0, lease_seconds=15
    )
    storage.acquire(claim, takeover=False)
    async with open_reader(tmp_path / "s") as reader:
        hung = await reader.holder()
        storage.close()
        dead = await reader.holder()
        again = await reader.holder()

    assert [view and view.state for view in (released, hung, dead, again)] == [
        "released",
        "silent",
        "dead",
        "dead",
    ]


async def test_a_history_comes_in_pages_and_includes_its_ancestors(tmp_path: Path) -> None:
    """Pages back from the newest give the whole history, a fork's up to its fork point."""
    root = await run(tmp_path / "s", ASKS, "done")
    storage = SqliteStorage(tmp_path / "s")
    own = [row.id for row in storage.entries(root)]
    head = storage.acquire(
        HolderClaim(holder_id="x", host="h", pid=1, at_us=0, lease_seconds=15), takeover=True
    )
    fork = ConversationRow(900_001, "fork", root, own[2], None, None, "", 0)
    storage.apply(
        Batch(
            epoch=head.epoch,
            seq=head.seq + 1,
            next_id=900_002,
            flush=True,
            writes=[(Op.CONVERSATION, fork)],
        )
    )
    storage.release(head.epoch)
    storage.close()
    async with open_reader(tmp_path / "s") as reader:
        whole = [entry.id for entry in await reader.entries(root)]
        pages: list[list[int]] = []
        before: int | None = None
        while page := await reader.entries(root, limit=2, before=before):
            pages.insert(0, [entry.id for entry in page])
            before = page[0].id
        forked = [entry.id for entry in await reader.entries(900_001)]
        newer = [entry.id for entry in await reader.entries(root, after=own[2])]

    assert whole == own
    assert list(itertools.chain(*pages)) == own
    assert forked == own[:3]
    assert newer == own[3:]


async def test_unknown_ids_are_refused_and_never_empty_answers(tmp_path: Path) -> None:
    """What does not exist is an error, so that nothing takes it for `nothing there`."""
    await run(tmp_path / "s", "done")
    async with open_reader(tmp_path / "s") as reader:
        for id in (0, -1, 999_999, 2**70):
            for look in (reader.task, reader.conversation, reader.tree, reader.submission):
                with pytest.raises(NotFoundError):
                    await look(id)
            with pytest.raises(NotFoundError):
                await reader.entries(id)
        with pytest.raises(InvalidArgumentError):
            await reader.tasks(limit=0)
        with pytest.raises(InvalidArgumentError):
            await reader.entries((await reader.conversations())[0].id, limit=0)
        assert await reader.document("none", 1) is None


async def test_tasks_are_the_newest_that_match(tmp_path: Path) -> None:
    """Filters combine, the newest are kept, and the order is by id."""
    root = await run(tmp_path / "s", ASKS, "done")
    async with open_reader(tmp_path / "s") as reader:
        every = [task.id for task in await reader.tasks()]
        two = [task.id for task in await reader.tasks(limit=2)]
        calls = await reader.tasks(conversation=root, kind="pi.tool", status=Status.TERMINAL)
        none = await reader.tasks(status=Status.RUNNING)
        live = await reader.tasks(live=True)

    assert every == sorted(every)
    assert two == every[-2:]
    assert [task.outcome and task.outcome.status for task in calls] == ["completed"]
    assert none == live == []


# C078
async def test_damage_is_named_and_not_taken_for_absence(tmp_path: Path) -> None:
    """An entry, task or document that cannot be decoded is reported with its place."""
    root = await run(tmp_path / "s", ASKS, "done")
    connection = apsw.Connection(str(tmp_path / "s"))
    connection.execute("update entries set messages = '{}' where kind = 'pi.user'")
    connection.execute("update outcomes set value = 'x'")
    connection.execute("update revisions set value = '[' where base = 1")
    connection.close()

    async with open_reader(tmp_path / "s") as reader:
        with pytest.raises(StorageCorruptError, match=r"entry \d+ cannot be decoded"):
            await reader.entries(root)
        with pytest.raises(StorageCorruptError, match="the task list cannot be decoded"):
            await reader.tasks()
        with pytest.raises(StorageCorruptError, match=f"'pi.live' of conversation {root}"):
            await reader.live(root)
        assert [row.id for row in await reader.conversations()] == [root]


async def test_a_reader_creates_nothing_and_can_write_nothing(tmp_path: Path) -> None:
    """A missing store stays missing, and the handle behind a reader refuses writes."""
    with pytest.raises(StorageAccessError):
        async with open_reader(tmp_path / "none"):
            raise AssertionError("opened what does not exist")
    assert not os.listdir(tmp_path)
    await run(tmp_path / "s", "done")
    async with open_reader(tmp_path / "s") as reader:
        with pytest.raises(StorageRefusedError):
            reader._storage.apply(Batch(epoch=1, seq=99, next_id=99, flush=False, writes=[]))


async def test_a_large_tree_keeps_every_live_task_and_the_newest_ended(tmp_path: Path) -> None:
    """Beyond the limit old ended tasks are left out, live ones never, and depth does not matter."""
    storage = SqliteStorage(tmp_path / "s")
    head = storage.acquire(
        HolderClaim(holder_id="x", host="h", pid=1, at_us=0, lease_seconds=15), takeover=False
    )
    writes: list[tuple[Op, tuple[object, ...]]] = [
        (Op.CONVERSATION, ConversationRow(1, "u", None, None, None, None, "", 0))
    ]
    for id in range(2, 3_002):
        owner = id - 1 if id > 2 else None
        status = Status.WAITING if id < 12 else Status.TERMINAL
        row = (id, 1, "k", 1, owner, None, 0, None, None, 0, int(status), 0, 0, None, None)
        writes.append((Op.TASK, TaskRow(*row, 1, 0, 0, 0, None, None, None)))
    storage.apply(
        Batch(epoch=head.epoch, seq=1, next_id=3_002, flush=False, writes=writes)  # type: ignore[arg-type]
    )
    storage.close()
    async with open_reader(tmp_path / "s") as reader:
        rows = await reader.tree(limit=100)
        chain = await reader.tree(2_000, limit=50)

    ids = {row.id for row in rows}
    assert set(range(1, 12)) <= ids
    assert set(range(2_902, 3_002)) <= ids
    assert len(ids) == 111
    assert [row.depth for row in chain] == list(range(50))
