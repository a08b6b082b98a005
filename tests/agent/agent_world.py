"""What the tests of the agent run on: a store, a scripted model, tools that leave traces, crashes.

A world outlives its harnesses: opened again after a crash it has what was durable, and nothing
else. The model and the ledger are the outside, so they live on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import attrs
import trio

from pidurable.agent._script import ScriptedCall, Step
from pidurable.agent._scripted import ScriptedModel
from pidurable.agent._services import AgentChange
from pidurable.errors import PidurableError
from pidurable.harness._conversation import Conversation
from pidurable.harness._open import Harness, open_harness
from pidurable.harness._submission import Settled
from pidurable.records._entries import Entry
from pidurable.records._limits import Settings
from pidurable.records._messages import (
    AssistantMessage,
    Message,
    TextBlock,
    ToolResultMessage,
    UserMessage,
)
from pidurable.records._submissions import SubmissionRecord
from pidurable.registry import Extension, Registry, Tool, ToolCall, tool
from pidurable.session._seams import Failpoints, InlineBlocking, SeededRandomness, TrioClock
from pidurable.storage import MemoryStorage
from pidurable.testing import FaultyStorage

MODEL = "scripted/model"


def calls(*names: str, text: str = "", **arguments: Any) -> Step:
    """An answer that calls tools, each with the same arguments."""
    return Step(text=text, calls=tuple(ScriptedCall(name=n, arguments=arguments) for n in names))


def odd_tool(body: Any, **options: Any) -> Tool[..., Any]:
    """A tool called `odd` whose code is given."""

    @tool(name="odd", **options)
    async def odd(call: ToolCall) -> Any:
        """Do something odd."""
        return await body(call)

    return odd


_SCHEMAS: dict[str, Any] = {}


def _kept(made: Tool[..., Any]) -> Tool[..., Any]:
    """A tool of every world, with its schema from the first one: to build it takes a while."""
    if made.name not in _SCHEMAS:
        _SCHEMAS[made.name] = made._arguments
    return attrs.evolve(made, given=_SCHEMAS[made.name])


class _Ends:
    """Counts how often each submission ended, in published commits."""

    def __init__(self, ends: Counter[int]) -> None:
        self._ends = ends

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None: ...

    def reverted(self) -> None: ...

    def committed(self, tx: Any) -> None:
        for record in tx.submissions.values():
            if record.status in ("done", "unanswered"):
                self._ends[record.id] += 1

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...


class World:
    """One store, the model it asks, and what its tools did outside."""

    def __init__(
        self,
        *steps: Any,
        tools: Sequence[Tool[..., Any]] = (),
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        self.base = MemoryStorage(uuid="world", created_us=1)
        self.storage = FaultyStorage(self.base)
        self.model = ScriptedModel(steps, **options)
        self.settings = settings or Settings()
        self.clock = TrioClock()
        self.ledger: list[str] = []
        self.reached = trio.Event()
        """A call of `slow` runs."""
        self.traced = trio.Event()
        """The ledger has a line of `once` or `safe`."""
        self.ends: Counter[int] = Counter()
        self.opened = 0
        self.registry = Registry()
        self.install(*tools)

    def install(self, *tools: Tool[..., Any], **parts: Any) -> None:
        """Install tools, besides the ledger tools that every world has."""
        own = [_kept(each) for each in self._tools()]
        given = {each.name for each in tools}
        kept = [each for each in own if each.name not in given]
        self.registry.install(Extension("world", tools=[*kept, *tools], **parts))

    @asynccontextmanager
    async def open(
        self, *, failpoints: Failpoints | None = None, agent: AgentChange | None = None
    ) -> AsyncIterator[Harness]:
        """Open a harness on what is durable."""
        self.storage = FaultyStorage(self.base.reopen())
        self.opened += 1
        async with open_harness(
            self.storage,
            registry=self.registry,
            models=self.model.models(),
            settings=self.settings,
            clock=self.clock,
            blocking=InlineBlocking(),
            randomness=SeededRandomness(self.opened),
            failpoints=failpoints,
        ) as harness:
            harness.session.participants.append(_Ends(self.ends))
            await harness.root(agent=agent or AgentChange(model=MODEL))
            yield harness

    # --- tools that leave traces -------------------------------------------------------------

    def _tools(self) -> list[Tool[..., Any]]:
        return [self._once(), self._safe(), self._slow(), self._subagent()]

    def _once(self) -> Tool[..., Any]:
        world = self

        @tool
        async def once(call: ToolCall, what: str = "x") -> str:
            """Do something that must not happen twice.

            Args:
                what: Which.
            """
            world.ledger.append(f"once {call.id}")
            world.traced.set()
            await call.sleep(0.01)
            return f"did {what}"

        return once

    def _safe(self) -> Tool[..., Any]:
        world = self

        @tool(replay="safe")
        async def safe(call: ToolCall, what: str = "x") -> str:
            """Do something that may happen twice.

            Args:
                what: Which.
            """
            world.ledger.append(f"safe {call.id}")
            world.traced.set()
            await call.sleep(0.01)
            return f"saw {what}"

        return safe

    def _slow(self) -> Tool[..., Any]:
        world = self

        @tool(replay="safe")
        async def slow(call: ToolCall) -> str:
            """Begin something, and never end it."""
            world.ledger.append(f"slow {call.id}")
            await call.output("it has begun\n")
            world.reached.set()
            await trio.sleep_forever()

        return slow

    def _subagent(self) -> Tool[..., Any]:
        ledger = self.ledger

        @tool(replay="safe")
        async def subagent(task: str, call: ToolCall) -> str:
            """Delegate a task to a sub-agent and return its answer.

            Args:
                task: What to do.
            """
            child = await call.child(agent=AgentChange(instructions="you are the child"))
            ledger.append(f"child {child.id}")
            await call.details({"conversation": child.id})
            submission = await child.submit(task, request_id=call.key("task"))
            text: str = (await submission.wait()).text
            return text

        return subagent


# --- crashes ------------------------------------------------------------------------------------


class FreezeAt(Failpoints):
    """The process dies before its nth commit is stored, or after it, before anybody is told."""

    def __init__(self, world: World, where: Literal["before", "after"], nth: int) -> None:
        self._world = world
        self._name = f"commit.{where}"
        self._nth = nth
        self.struck = False
        self.passed = 0

    def hit(self, name: str) -> None:
        """Count, and die at the chosen pass."""
        if name != self._name:
            return
        self.passed += 1
        if self.passed == self._nth:
            self.struck = True
            self._world.storage.freeze()
            raise OSError(f"died at {name} {self._nth}")


class DieAt(Failpoints):
    """The process dies at the nth pass of a named point of the agent loop."""

    def __init__(self, world: World, name: str, nth: int = 1) -> None:
        self._world = world
        self._name = name
        self._nth = nth
        self.struck = False
        self.passed = 0

    def hit(self, name: str) -> None:
        """Count, and let nothing more be stored from the chosen pass on."""
        if name != self._name:
            return
        self.passed += 1
        if self.passed == self._nth:
            self.struck = True
            self._world.storage.freeze()


Program = Callable[[Harness, World], Awaitable[Any]]


KILL_STEP = 2
"""Commits from one kill to the next; each stored state is met for all that, see below."""


async def crash_everywhere(
    make: Callable[[], World],
    program: Program,
    check: Callable[[World, Any], None] | None = None,
    *,
    sparse: int = 1,
) -> int:
    """Run a program, killed before and after every commit and then resumed; return the kills.

    The program is run again after the kill, as a host would: it names its requests.
    What is stored before one commit is what is stored after the one before it. So where only
    every second commit is killed, before and after it, each state that a kill can leave comes
    once; with `-m slow` (see conftest.py) it comes twice, by both ways. A program of very many
    commits is killed only at each `sparse`-th by default.
    """
    kills = 0
    for where in ("before", "after"):
        nth = 1
        while True:
            world = make()
            point = FreezeAt(world, where, nth)  # type: ignore[arg-type]
            await run_killed(world, point, program)
            if not point.struck:
                break
            kills += 1
            async with world.open() as harness:
                with trio.fail_after(600):
                    result = await program(harness, world)
                    await harness.wait_for_idle()
                await verify(world, harness)
            if check is not None:
                check(world, result)
            nth += KILL_STEP if KILL_STEP == 1 else max(KILL_STEP, sparse)
    return kills


async def run_killed(world: World, point: Any, program: Program) -> None:
    """Run a program in a process that dies at a point."""
    try:
        async with world.open(failpoints=point) as harness:
            with trio.fail_after(600):
                await program(harness, world)
                await harness.wait_for_idle()
    except* PidurableError:
        # The host learns that its session is gone; a killed one learns nothing.
        assert point.struck


async def ask(harness: Harness, text: str, request_id: str = "r1", **options: Any) -> Settled:
    """Submit to the root and wait for the answer."""
    root = await harness.root()
    submission = await root.submit(text, request_id=request_id, **options)
    return await submission.wait()


# --- what must hold at rest ---------------------------------------------------------------------


async def verify(world: World, harness: Harness) -> None:
    """Check that no provider would have refused anything, and that nothing is open or doubled."""
    world.model.check()
    assert all(count == 1 for count in world.ends.values())
    for conversation in conversations(harness):
        live = conversation.live()
        assert live["run"] is None
        assert live["partial"] is None
        assert live["calls"] == []
        for submission in await conversation.open_submissions():
            # Queued behind a run that failed: visible, and the next input releases it.
            assert (await submission.status()).status == "queued"
        check_transcript(await conversation.history(limit=10_000))
    once = Counter(line for line in world.ledger if line.startswith("once"))
    assert all(count == 1 for count in once.values()), once


def conversations(harness: Harness) -> list[Conversation]:
    """Every conversation of a store, owned ones too."""
    found: list[Conversation] = []
    owners: list[int | None] = [None, *(task.id for task in harness.tasks(limit=10_000))]
    for owner in owners:
        for row in harness.session.storage.conversations_by_owner(owner):
            found.append(harness.conversation(row.id))
    return found


def check_transcript(entries: Sequence[Entry]) -> None:
    """Each call has exactly one result, before the next answer; no result is without its call."""
    open_calls: dict[tuple[int, int], str] = {}
    answered: set[tuple[int, int]] = set()
    for entry in entries:
        for message in entry.messages:
            if isinstance(message, AssistantMessage) and message.status == "complete":
                assert not open_calls, f"entry {entry.id} comes before {open_calls}"
                for index, call in enumerate(message.tool_calls):
                    open_calls[entry.id, index] = call.name
            elif isinstance(message, ToolResultMessage):
                assert message.call not in answered, f"two results for {message.call}"
                assert open_calls.pop(message.call) == message.name
                answered.add(message.call)
            elif isinstance(message, UserMessage):
                assert not open_calls, f"entry {entry.id} stands before {open_calls}"
    assert not open_calls


def messages(entries: Sequence[Entry], kind: type[Any]) -> list[Any]:
    """The messages of one class, in order."""
    return [m for entry in entries for m in entry.messages if isinstance(m, kind)]


def text_of(message: Message) -> str:
    """The text of a message."""
    blocks = getattr(message, "blocks", ())
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


async def results(harness: Harness) -> list[ToolResultMessage]:
    """The tool results of the root, in order of the transcript."""
    root = await harness.root()
    return messages(await root.history(limit=10_000), ToolResultMessage)


async def status_of(harness: Harness, request_id: str) -> SubmissionRecord:
    """The record of a submission of the root."""
    root = await harness.root()
    row = harness.session.storage.submission_by_request(root.id, request_id)
    assert row is not None
    record = harness.session.submission(row.id)
    assert record is not None
    return record
