"""`conversation follow` and `conversation list`: beside a process that works, and without one."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

import pyte
import pytest
import trio

from pidurable import AgentChange, Extension, Models, Registry, ToolCall, open_harness, tool
from pidurable.agent._script import ScriptedCall, Stall, When
from pidurable.cli import _conversation_follow
from pidurable.cli._conversation_follow import follow_conversation
from pidurable.cli._host import Host
from pidurable.cli._options import Sources, resolve_options
from pidurable.harness._events import RunStart
from pidurable.testing import ScriptedModel, Step

Command = Callable[..., Any]
FOLLOW = ("conversation", "follow", "--until-done")


@pytest.fixture
def store(command: Command, tmp_path: Path) -> Path:
    """A store whose root was asked once; the script answers by position, then fails."""
    (tmp_path / "s.yaml").write_text("- text: first answer\n- text: second answer\n")
    assert command("run", "one", "--script", "s.yaml").code == 0
    return tmp_path / ".pidurable" / "session.sqlite"


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when the command has shown where the conversation stands."""
    begun = threading.Event()
    tell = _conversation_follow._Shown.tell

    def told(shown: Any, batch: Any) -> None:
        tell(shown, batch)
        begun.set()

    monkeypatch.setattr(_conversation_follow._Shown, "tell", told)
    yield begun
    begun.set()


async def beside(
    store: Path, followed: threading.Event, *calls: Callable[[], Any], abort: bool = False
) -> list[Any]:
    """Follow a run of this process with commands in a thread; it goes on when it is followed."""

    @tool(replay="safe")
    async def hold(call: ToolCall) -> str:
        """Wait until somebody follows."""
        await trio.to_thread.run_sync(followed.wait, 20, abandon_on_cancel=True)
        if abort:
            await trio.sleep_forever()
        return "held"

    registry = Registry()
    registry.install(Extension("test", tools=[hold]))
    steps = [Step(calls=(ScriptedCall(name="hold"),)), Step(text="the end")]
    models = Models({"scripted": ScriptedModel(steps)})
    found: list[Any] = []

    async def follow() -> None:
        found.extend(await trio.to_thread.run_sync(lambda: [call() for call in calls]))

    async with open_harness(store, registry=registry, models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/m"))
        submission = await root.submit("go \x1b[2Jon")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            if abort:
                await trio.to_thread.run_sync(followed.wait, 20)
                await root.abort()
        await submission.wait()
    return found


class Watched:
    """A terminal of this process, and the screen that a person would see."""

    def __init__(self, terminal: TextIO, ours: FileIO) -> None:
        self.screen = pyte.Screen(60, 30)
        self._stream = pyte.ByteStream(self.screen)
        self.terminal = terminal
        self._ours = ours

    def text(self) -> str:
        return "\n".join(self.screen.display)

    def follow(self, store: Path) -> tuple[Host, Callable[[], Awaitable[int]]]:
        """What follows the root of a store on this terminal, until it is cancelled."""
        host = Host(io.StringIO(), self.terminal, self.terminal, {"TERM": "xterm"})
        options = resolve_options(Sources(environ={}), store=str(store))
        return host, functools.partial(
            *(follow_conversation, host, options, None),
            limit=10,
            full=False,
            until_done=False,
            events=False,
        )

    async def until(self, seen: Callable[[str], bool]) -> None:
        with trio.fail_after(20):
            while not seen(self.text()):
                await trio.lowlevel.wait_readable(self._ours)
                self._stream.feed(self._ours.read(65536))


@pytest.fixture
def watched() -> Iterator[Watched]:
    ours, theirs = os.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal, open(ours, "rb", buffering=0) as other:
        yield Watched(terminal, other)


async def test_words_are_seen_on_a_terminal_while_they_are_written(
    tmp_path: Path, watched: Watched
) -> None:
    """What is streamed stands below the log before the answer is whole, until one leaves."""
    step = Step(text="Words come one by one.", piece_chars=6, stall=Stall(after=3))
    models = Models({"scripted": ScriptedModel([step])})
    path = tmp_path / "s.sqlite"
    host, follow = watched.follow(path)

    async with open_harness(path, models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/m"))
        await root.submit("go on")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await watched.until(lambda text: "go on" in text and "Words come one" in text)
            nursery.cancel_scope.cancel()

    await watched.until(lambda text: "Words" not in text)
    assert "go on" in watched.text()
    assert host.above is None


async def test_what_goes_on_below_a_call_is_seen_on_a_terminal(
    tmp_path: Path, watched: Watched
) -> None:
    """A sub-agent's conversation stands below the call that waits for it, with its own calls."""

    @tool(replay="safe")
    async def delegate(call: ToolCall) -> str:
        """Ask a sub-agent."""
        child = await call.child(agent=AgentChange(model="scripted/scout"))
        return (await (await child.submit("look", request_id=call.key("x"))).wait()).text

    @tool(replay="safe")
    async def dig(call: ToolCall) -> str:
        """Take for ever."""
        await trio.sleep_forever()
        return ""

    registry = Registry()
    registry.install(Extension("test", tools=[delegate, dig]))
    steps = [
        Step(when=When(user="look"), calls=(ScriptedCall(name="dig"),)),
        Step(calls=(ScriptedCall(name="delegate"),)),
    ]
    models = Models({"scripted": ScriptedModel(steps)})
    path = tmp_path / "s.sqlite"
    _, follow = watched.follow(path)

    async with open_harness(path, registry=registry, models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/chief"))
        await root.submit("go on")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await watched.until(lambda text: "dig (task " in text)
            shown = watched.text()
            nursery.cancel_scope.cancel()

    lines = [line.rstrip() for line in shown.splitlines()]
    call = next(place for place, line in enumerate(lines) if line.startswith("└─ delegate"))
    assert re.fullmatch(r" +conversation \d+, run \d+, turn 1", lines[call + 1])
    assert re.fullmatch(r" +dig \(task \d+\)", lines[call + 2])


async def test_nobody_is_shown_at_work_where_nobody_holds_the_store() -> None:
    """The picture of a run whose process died says so, and counts no seconds."""
    host = Host(io.StringIO(), io.StringIO(), io.StringIO(), {})
    options = resolve_options(Sources(environ={}), store="s.sqlite")
    shown = _conversation_follow._Shown(host, options, limit=1, full=False)
    assert shown.picture(60) == []
    shown.tell((RunStart(4),))
    assert shown.picture(60)[0].startswith("run 4, turn 1")

    shown.stands_still = True

    assert shown.picture(60) == ["run 4 stands still: nobody holds this store"]


async def test_a_run_is_followed_to_its_end(
    command: Command, tmp_path: Path, followed: threading.Event
) -> None:
    """Entries go to stdout as in the log, cleaned; what happens besides goes to stderr."""
    where = ("-s", str(tmp_path / "store"))
    found, log = await beside(
        tmp_path / "store",
        followed,
        lambda: command(*FOLLOW, *where),
        lambda: command("conversation", "log", *where),
    )
    lines = found.err.splitlines()

    assert found.code == 0
    assert found.out == log.out
    assert found.out.endswith("    the end\n")
    assert "    go on\n" in found.out
    assert any(line.startswith("held by process") for line in lines)
    assert any(line.endswith("goes on, turn 1") for line in lines)
    assert any(line.startswith("run ") and " done" in line for line in lines)


async def test_events_of_another_process_are_json_lines(
    command: Command, tmp_path: Path, followed: threading.Event
) -> None:
    """A snapshot first, then what happens, each an object with its type; nothing else on stdout."""
    path = tmp_path / "store"
    (found,) = await beside(path, followed, lambda: command(*FOLLOW, "--events", "-s", str(path)))
    events = [json.loads(line) for line in found.out.splitlines()]

    assert found.code == 0
    assert events[0]["type"] == "snapshot"
    assert events[-1]["type"] == "run_end"
    assert {"tool_execution_end", "message_end"} <= {event["type"] for event in events}


async def test_a_run_without_an_answer_says_why(
    command: Command, tmp_path: Path, followed: threading.Event
) -> None:
    """The reason is told with its meaning, and the exit code is 1."""
    path = tmp_path / "store"
    (found,) = await beside(
        path, followed, lambda: command(*FOLLOW, "--limit", "0", "-s", str(path)), abort=True
    )

    assert found.code == 1
    assert "unanswered: aborted. " in found.err


def test_what_is_at_rest_is_shown_and_left(command: Command, store: Path) -> None:
    """The newest entries, as many as are wanted, and then the end: exit code 0."""
    whole, last, none = (command(*FOLLOW, "--limit", n) for n in ("10", "1", "0"))

    assert whole.code == last.code == none.code == 0
    assert "    one\n" in whole.out
    assert last.out.splitlines()[1:] == ["    first answer"]
    assert none.out == ""
    assert "nobody holds this store" in none.err


def test_a_run_that_nobody_works_on_is_not_waited_for(
    command: Command, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no process holds the store the end cannot come: exit code 6, and what goes on."""
    monkeypatch.setattr(_conversation_follow, "HOLDER_SECONDS", 0.01)
    command("conversation", "submit", "two")
    found = command(*FOLLOW)

    assert found.code == 6
    assert "has not ended; `pidurable resume` goes on with it" in found.err


def test_waiting_for_the_end_can_be_bounded(command: Command, store: Path) -> None:
    """--timeout ends the wait with exit code 8; without --until-done it is how long one looks."""
    command("conversation", "submit", "two")
    waited = command(*FOLLOW, "--timeout", "0.3")
    looked = command("conversation", "follow", "--timeout", "0.3")

    assert (waited.code, looked.code) == (8, 0)
    assert "the end of run" in waited.err


def test_ctrl_c_leaves_without_a_word(
    command: Command, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is how one leaves: exit code 130, and nothing that looks like an error."""

    async def interrupted(*_: object, **__: object) -> Awaitable[None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(_conversation_follow, "_show_batches", interrupted)
    found = command("conversation", "follow")

    assert (found.code, found.out) == (130, "")
    assert "error" not in found.err
    assert "interrupt" not in found.err


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("follow", "99"), 4),
        (("follow", "-o", "json"), 2),
        (("follow", "--limit", "-1"), 2),
        (("follow", "-s", "nowhere"), 4),
        (("list", "--limit", "0"), 2),
        (("list", "-s", "nowhere"), 4),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else None,
)
def test_mistakes_are_told(command: Command, store: Path, argv: tuple[str, ...], code: int) -> None:
    """Nothing is shown, and the message says what to do."""
    found = command("conversation", *argv)

    assert (found.code, found.out) == (code, "")
    assert found.err


def test_conversations_are_listed_for_people_and_programs(command: Command, store: Path) -> None:
    """Ids feed the next command, JSON has every field, and --busy leaves out what is idle."""
    command("conversation", "fork", "1", "--key", "hostile\x1b[2J key")
    sheet = command("conversation", "list")
    idle = command("conversation", "list", "--busy")
    command("conversation", "submit", "two")
    busy = json.loads(command("conversation", "list", "--busy", "-o", "json").out)
    ids = command("conversation", "list", "-o", "ids").out.split()
    newest = command("conversation", "list", "--limit", "1")

    assert "root: one" in sheet.out
    assert "hostile key, fork of 1" in sheet.out
    assert (idle.out, idle.err) == ("", "no conversation is busy\n")
    assert [(each["id"], each["state"]) for each in busy] == [(1, "running")]
    assert ids[0] == "1"
    assert len(ids) == 2
    assert "the newest 1; --limit shows more" in newest.err
