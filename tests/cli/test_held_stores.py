"""Commands beside a process that holds the store: it is asked, and does what was asked for."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio

from pidurable import (
    AgentChange,
    Harness,
    Models,
    Registry,
    Settings,
    open_client,
    open_harness,
    open_reader,
)
from pidurable.cli import _outside, _run
from pidurable.cli._signals import Interrupts
from pidurable.errors import WaitTimeoutError
from pidurable.storage import HolderClaim, SqliteStorage
from pidurable.storage._command_box import FolderCommandBox
from pidurable.testing import ScriptedModel, Step

MODEL = "scripted/m"
Command = Callable[..., Any]


@asynccontextmanager
async def held(store: Path, *steps: Step, **settings: Any) -> AsyncIterator[Harness]:
    """A process that works on the store; it looks for commands often."""
    models = Models({"scripted": ScriptedModel(steps)}) if steps else None
    async with open_harness(
        store,
        registry=Registry(),
        models=models,
        settings=Settings(**{"commands_seconds": 0.01, **settings}),
    ) as harness:
        yield harness


async def beside(*calls: Callable[[], Any]) -> list[Any]:
    """Run commands one after the other, in a thread, while the holder works."""
    return await trio.to_thread.run_sync(lambda: [call() for call in calls])


async def leave_with_work(
    store: Path, nursery: trio.Nursery, work: Callable[[], Awaitable[None]]
) -> None:
    """Hold the store and leave it when a command has been handed in that nobody has looked at."""
    async with held(store, commands_seconds=3600) as harness:
        await harness.root()
        await harness.drain(seconds=0)
        nursery.start_soon(work)
        box = harness.session.storage.command_box
        while not box.has_news():  # noqa: ASYNC110 - another thread hands it in
            await trio.sleep(0.01)


async def test_every_verb_that_writes_is_done_by_the_holder(
    command: Command, known_store: Path
) -> None:
    """Signal, retry, resume, fork and abort give what they give without one, and say who did it."""
    async with held(known_store) as harness:
        await harness.drain(seconds=0)
        found = await beside(
            lambda: command("task", "signal", "12", "go", "1", "--key", "k"),
            lambda: command("task", "signal", "12", "go", "1", "--key", "k"),
            lambda: command("task", "retry", "21"),
            lambda: command("task", "resume", "21"),
            lambda: command("conversation", "fork", "1", "-o", "json"),
        )
        signals = harness.session.storage.signals(12)

    assert [each.code for each in found] == [0] * 5
    assert found[0].out == "task 12 has the signal go\n"
    assert [row.name for row in signals] == ["go"]
    assert found[2].out == "task 21 was blocked (missing_definition) and may run again\n"
    assert "left alone" in found[3].err
    assert json.loads(found[4].out)["parent"] == 1
    for each in (found[0], found[2], found[4]):
        assert f"process {os.getpid()} on " in each.err
        assert "holds this session: asking it" in each.err
        assert "nothing was run" not in each.err


async def test_an_abort_waits_until_the_holder_has_ended_it(
    command: Command, known_store: Path
) -> None:
    """As without a holder; what was aborted is printed with how it ended."""
    async with held(known_store):
        (found,) = await beside(lambda: command("task", "abort", "10", "--yes", "-o", "json"))

    assert found.code == 0
    assert json.loads(found.out) == [{"task": 10, "status": "aborted"}]


async def test_what_the_holder_refuses_is_said_as_without_one(
    command: Command, known_store: Path
) -> None:
    """Same text, same exit code, same way out."""
    verbs = (
        ("task", "signal", "3", "go"),
        ("conversation", "fork", "1", "--at", "12"),
        ("task", "abort", "99", "--yes"),
    )
    calls = [functools.partial(command, *verb) for verb in verbs]
    alone = await beside(*calls)
    async with held(known_store):
        asked = await beside(*calls)

    assert [each.code for each in asked] == [each.code for each in alone] == [1, 4, 4]
    for mine, theirs in zip(alone, asked, strict=True):
        shown = [line for line in theirs.err.splitlines() if "holds this session" not in line]
        assert shown == mine.err.splitlines()


async def test_a_holder_that_does_not_look_is_waited_for_so_long(
    command: Command, known_store: Path
) -> None:
    """`--timeout` ends with 8, says that nothing was seen, and the holder does it later."""
    async with held(known_store, commands_seconds=3600) as harness:
        await harness.drain(seconds=0)
        (found,) = await beside(lambda: command("task", "signal", "12", "go", "--timeout", "0.1"))
        before = harness.session.storage.signals(12)
        await harness.apply_commands()
        after = harness.session.storage.signals(12)

    assert found.code == 8
    assert "It was not seen yet, and waits" in found.err
    assert f"Process {os.getpid()} on " in found.err
    assert "do not hand it in again" in found.err
    assert (len(before), len(after)) == (0, 1)


def test_a_hung_holder_is_named_when_it_is_replaced(command: Command, known_store: Path) -> None:
    """Whoever takes the place of a holder that was silent for a lease says so."""
    first = SqliteStorage(known_store, create=False)
    first.acquire(
        HolderClaim(
            holder_id="hung", host=socket.gethostname(), pid=4711, at_us=1, lease_seconds=15
        ),
        takeover=False,
    )
    found = command("task", "signal", "12", "go")
    first.close()

    assert found.code == 0
    assert found.err.startswith("process 4711 on ")
    assert "and is replaced: it can store nothing more" in found.err.splitlines()[0]


async def test_a_holder_that_goes_away_is_stood_in_for(command: Command, known_store: Path) -> None:
    """Nobody looks and then the holder leaves: the command is done all the same, once."""
    got: list[Any] = []

    async def signal() -> None:
        got.extend(await beside(lambda: command("task", "signal", "12", "go")))

    async with trio.open_nursery() as nursery:
        await leave_with_work(known_store, nursery, signal)
    async with open_reader(known_store) as reader:
        task = await reader.task(12)
        signals = reader._storage.signals(12)

    assert got[0].code == 0
    assert [row.name for row in signals] == ["go"]
    assert task.invocations == 3


def waiting(store: Path) -> list[str]:
    """The commands beside a store that nobody has taken."""
    return [each.name for each in Path(f"{store}.commands").glob("*.command")]


class Impatient:
    """Presses Ctrl-C for whoever waits for a holder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caught: list[tuple[Interrupts, trio.lowlevel.TrioToken]] = []
        for module in (_outside, _run):
            monkeypatch.setattr(module, "catch_interrupts", self._catch)

    @contextmanager
    def _catch(self, resume_command: str) -> Iterator[Interrupts]:
        self.caught.append(
            (Interrupts(resume_command=resume_command), trio.lowlevel.current_trio_token())
        )
        yield self.caught[-1][0]

    def press(self) -> None:
        """Once, from any thread."""
        interrupts, token = self.caught[-1]
        interrupts.on_signal(signal.SIGINT, token)


@pytest.mark.parametrize(
    "argv",
    [
        ("task", "signal", "12", "go"),
        ("task", "abort", "10", "--yes"),
        ("gc", "--older-than", "0s", "--yes"),
        ("run", "hi"),
        ("run", "hi", "--events"),
    ],
)
async def test_ctrl_c_takes_back_what_the_holder_has_not_begun(
    command: Command,
    known_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[str, ...],
) -> None:
    """Whoever leaves while the holder does not look is told that nothing was done, and it is so."""
    impatient = Impatient(monkeypatch)
    got: list[Any] = []
    async with held(known_store, commands_seconds=3600) as harness:
        await harness.drain(seconds=0)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                got.extend(await beside(lambda: command(*argv)))

            nursery.start_soon(ask)
            while not waiting(known_store):  # noqa: ASYNC110 - another thread hands it in
                await trio.sleep(0.01)
            impatient.press()
        left = waiting(known_store)

    assert got[0].code == 130, got[0].err
    assert "taken back: nothing was" in got[0].err
    assert left == []
    if "--events" in argv:
        told = json.loads(got[0].out)
        assert (told["type"], told["submission"], told["status"]) == ("result", None, None)
        assert told["detail"] == "taken back: nothing was handed in"


@pytest.mark.parametrize("argv", [("task", "signal", "12", "go"), ("run", "hi")])
async def test_ctrl_c_while_it_is_handed_in_leaves_nothing_behind(
    command: Command,
    known_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[str, ...],
) -> None:
    """What is being written when the signal comes is not there after "taken back" was said."""
    impatient = Impatient(monkeypatch)
    asked_back = threading.Event()
    hand_in, withdraw = FolderCommandBox.hand_in, FolderCommandBox.withdraw

    def slow_hand_in(box: FolderCommandBox, id: str, text: str) -> None:
        impatient.press()
        asked_back.wait(0.1)
        hand_in(box, id, text)

    def told_withdraw(box: FolderCommandBox, id: str) -> bool:
        try:
            return withdraw(box, id)
        finally:
            asked_back.set()

    monkeypatch.setattr(FolderCommandBox, "hand_in", slow_hand_in)
    monkeypatch.setattr(FolderCommandBox, "withdraw", told_withdraw)
    async with held(known_store, commands_seconds=3600) as harness:
        await harness.drain(seconds=0)
        (found,) = await beside(lambda: command(*argv))
        left = waiting(known_store)

    assert found.code == 130, found.err
    assert "taken back: nothing was" in found.err
    assert left == []


async def test_a_prompt_is_answered_by_the_holder(command: Command, tmp_path: Path) -> None:
    """`run` hands it in, shows what comes, and prints the answer, in words and as JSON."""
    store = tmp_path / "s.sqlite"
    async with held(store, Step(text="one"), Step(text="two")) as harness:
        await harness.root(agent=AgentChange(model=MODEL))
        run = ("run", "hi", "--store", str(store))
        first, again, second = await beside(
            lambda: command(*run, "--request-id", "r1"),
            lambda: command(*run, "--request-id", "r1"),
            lambda: command("run", "more", "--store", str(store), "-o", "json"),
        )

    assert (first.code, first.out) == (0, "one\n")
    assert (again.code, again.out) == (0, "one\n")
    told = json.loads(second.out)
    assert (second.code, told["status"], told["text"]) == (0, "done", "two")
    assert told["usage"]["requests"] == 1
    assert "handing in to it; its models and tools do the work" in first.err
    assert re.search(r"#\d+ .* assistant  scripted/m", first.err)


async def test_a_prompt_that_the_holder_cannot_answer_ends_as_without_one(
    command: Command, tmp_path: Path
) -> None:
    """No model: unanswered, exit 1, with the reason."""
    store = tmp_path / "s.sqlite"
    async with held(store) as harness:
        await harness.root()
        (found,) = await beside(lambda: command("run", "hi", "--store", str(store)))

    assert (found.code, found.out) == (1, "")
    assert "no_model" in found.err


async def test_a_prompt_is_finished_here_when_the_holder_goes_away(
    command: Command, tmp_path: Path
) -> None:
    """Handed in and not seen, or seen and not answered: this process goes on, and nothing twice."""
    store = tmp_path / "s.sqlite"
    (tmp_path / "m.yaml").write_text("- text: from here\n")
    got: list[Any] = []
    async with trio.open_nursery() as nursery, held(store, commands_seconds=3600) as harness:
        await harness.root()

        async def run() -> None:
            argv = ("run", "hi", "--store", str(store), "--script", "m.yaml")
            got.extend(await beside(lambda: command(*argv)))

        nursery.start_soon(run)
        box = harness.session.storage.command_box
        while not box.has_news():  # noqa: ASYNC110 - another thread hands it in
            await trio.sleep(0.01)
    async with open_reader(store) as reader:
        entries = await reader.entries((await reader.conversations())[0].id)

    assert (got[0].code, got[0].out) == (0, "from here\n"), got[0].err
    assert "has gone; going on here" in got[0].err
    assert [entry.kind for entry in entries].count("pi.user") == 1


async def test_a_prompt_that_hangs_on_a_blocked_task_ends_with_6(
    command: Command, tmp_path: Path
) -> None:
    """The holder lacks the tool's code after an upgrade: who asked is told what to do."""
    store = tmp_path / "s.sqlite"
    async with held(store, Step(text="x")) as harness:
        root = await harness.root(agent=AgentChange(model=MODEL))
        await harness.drain(seconds=0)
        submission = await root.submit("first")
        (row,) = harness.session.storage.live_tasks()
    connection = apsw.Connection(str(store))
    connection.execute("update tasks set blocked = 'faulted' where id = ?", (row.id,))
    connection.close()
    async with held(store, Step(text="x")):
        (found,) = await beside(lambda: command("run", "hi", "--store", str(store)))

    assert submission.id
    assert found.code == 6
    assert f"task {row.id} (pi.generation) is blocked: faulted" in found.err


async def test_a_collection_is_done_by_the_holder(command: Command, known_store: Path) -> None:
    """`gc` beside a holder removes what it removes without one, and prints the same."""
    async with held(known_store) as harness:
        await harness.drain(seconds=0)
        (found,) = await beside(lambda: command("gc", "--older-than", "0s", "--yes", "-o", "json"))
        left = harness.session.storage.task(20)

    assert found.code == 0
    assert json.loads(found.out)["trees"] >= 1
    assert left is None


def test_resume_sees_to_what_no_task_does(command: Command, tmp_path: Path) -> None:
    """Commands that wait, half a removal and a dead holder: what the doctor says to type helps."""
    store = tmp_path / "s.sqlite"

    async def leave() -> None:
        async with open_harness(store, registry=Registry()) as harness:
            root = await harness.root()
            await (await root.submit("hi")).wait()
        async with open_client(store) as client:
            with pytest.raises(WaitTimeoutError):
                await client.fork(1, key="k", timeout=0)

    trio.run(leave)
    connection = apsw.Connection(str(store))
    connection.execute("update holder set released = 0, pid = 999999")
    connection.execute("insert into removals (root, at_us) values (1000, 0)")
    connection.close()
    Path(f"{store}.lock.1").touch(mode=0o600)  # of nobody: its process is dead
    before = command("doctor", "--store", str(store), "-o", "json")
    plan = command("resume", "--plan", "--store", str(store))
    advised = [each["command"] for each in json.loads(before.out)["findings"]]
    resumed = command(*advised[0].split()[1:])
    after = command("doctor", "--store", str(store))
    again = command("resume", "--store", str(store))

    assert len(advised) == 3
    assert len(set(advised)) == 1
    assert (
        "1 command from other processes and the removal of 1 trees and process 999999" in plan.err
    )
    assert (resumed.code, after.code) == (0, 0), (resumed.err, after.out)
    assert "seen to: 1 command" in resumed.err
    assert again.err == "nothing to resume: every input is answered and no task is live\n"


async def test_whoever_does_not_wait_is_not_promised_that_the_holder_stays(
    command: Command, tmp_path: Path
) -> None:
    """Another `run` holds the session only until it has its own answer; who left is told."""
    store = tmp_path / "s.sqlite"
    async with held(store, Step(text="x", delay=600)) as harness:
        await harness.root(agent=AgentChange(model=MODEL))
        run = ("run", "hi", "--store", str(store), "--timeout", "2", "--events")
        (found,) = await beside(lambda: command(*run))

    assert found.code == 8
    assert f"it goes on in process {os.getpid()} while that runs, then by" in found.err
    told = json.loads(found.out.splitlines()[-1])
    assert (told["type"], told["submission"], told["status"]) == ("result", 3, "placed")
    assert (told["run"], told["text"]) == (4, None)
