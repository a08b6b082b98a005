"""A session whose doors the tests of bad input knock at, and the judge of what came of it.

A value that is handed in is refused by an error of ours, with the store exactly as it was, or it is
stored and reads back equal. In both cases the session serves the next commit as before.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio
from bad_payloads import VALUE_BYTES_MAX, Payload

from pidurable import (
    Conversation,
    Extension,
    Harness,
    Outcome,
    Registry,
    Settings,
    Task,
    TaskContext,
    document,
    open_harness,
    phase,
)
from pidurable.errors import InternalError, NotJsonError, PidurableError, SessionPoisonedError
from pidurable.session._seams import Worker

T = TypeVar("T")

Action = Callable[[TaskContext[Any, Any, Any]], Awaitable[Any]]


class InlineBlocking:
    """Blocking work in the loop: nothing happens behind a test's back."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        await trio.lowlevel.checkpoint()
        return fn(*args)

    def worker(self, name: str) -> Worker:
        return _InlineWorker()


class _InlineWorker:
    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        await trio.lowlevel.checkpoint()
        return fn(*args)

    def close(self) -> None:
        """Nothing to close."""


@document("bad.box", scope="conversation")
@attrs.define
class Box:
    value: Any = None
    text: str = ""
    many: list[int] = attrs.Factory(lambda: [1, 2])


@document("bad.boxes", scope="conversation", family=True)
@attrs.define
class Boxes:
    value: int = 0


@attrs.frozen
class Begin:
    """Nothing has happened yet."""


@attrs.frozen
class Holding:
    """A checkpoint that takes any JSON."""

    value: Any


class Probe(Task[Any, Begin | Holding, Any]):
    """A task whose one step, and whose abort, are given by the test."""

    name = "bad.probe"
    version = 1

    def __init__(self) -> None:
        self.action: Action | None = None
        self.aborted: Action | None = None

    def initial(self, input: Any) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[Any, Begin | Holding, Any]) -> None:
        if self.action is not None:
            await self.action(ctx)

    @phase
    async def holding(self, at: Holding, ctx: TaskContext[Any, Begin | Holding, Any]) -> None:
        await ctx.complete(at.value)

    async def abort(self, at: Begin | Holding, ctx: TaskContext[Any, Begin | Holding, Any]) -> None:
        if self.aborted is not None:
            await self.aborted(ctx)
        else:
            await ctx.end_aborted()


@attrs.frozen
class Typed:
    """An input whose types are narrow."""

    name: str
    cents: int
    rate: float = 0.0


class TypedProbe(Task[Typed, Begin, Any]):
    name = "bad.typed"
    version = 1

    def initial(self, input: Typed) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[Typed, Begin, Any]) -> None:
        await ctx.complete(None)

    async def abort(self, at: Begin, ctx: TaskContext[Typed, Begin, Any]) -> None:
        await ctx.end_aborted()


@attrs.define(eq=False)
class Refused:
    """What a door answered instead of storing."""

    error: PidurableError


@attrs.define(eq=False)
class World:
    """An open harness, one conversation, and the probe."""

    harness: Harness
    conversation: Conversation
    probe: Probe
    path: Path

    def stamp(self) -> tuple[Any, ...]:
        """What every commit changes, read from the file behind the session's back."""
        connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
        try:
            counts = [
                connection.execute(f"select count(*), max(rowid) from {table}").fetchone()
                for table in ("conversations", "entries", "tasks", "submissions", "documents")
            ]
            return (*connection.execute("select seq, next_id from session").fetchone(), *counts)
        finally:
            connection.close()

    async def tried(self, knock: Callable[[], Awaitable[T]]) -> T | Refused:
        """Knock; where a door refuses, the store must be as it was."""
        before = self.stamp()
        try:
            return await knock()
        except (InternalError, SessionPoisonedError):
            raise
        except PidurableError as error:
            refused = error
        assert self.stamp() == before, f"refused ({refused}), and stored something"
        said = str(refused)
        assert said, "a refusal says something"
        assert len(said) < 2_000, "a refusal does not repeat the whole value"
        said.encode()  # and can be printed
        return Refused(refused)

    async def in_task(self, action: Action) -> tuple[Any, Outcome[Any]]:
        """Run an action in a task; what it gave back (or its refusal), and the task's outcome."""
        came: list[Any] = []

        async def act(ctx: TaskContext[Any, Any, Any]) -> None:
            answer = await self.tried(lambda: action(ctx))
            came.append(answer)
            if isinstance(answer, Refused):
                await ctx.complete("refused")

        self.probe.action = act
        id = await self.conversation.create_task(Probe, None)
        outcome = await self.harness.wait_for_task(id)
        assert outcome.status != "faulted", outcome.error
        return came[0], outcome

    async def serves(self) -> None:
        """The session takes the next commit."""
        await self.harness.wait_for_idle()
        async with self.harness.commit() as tx:
            entry = tx.append(self.conversation.id, "still here", kind="bad.note")
        (last,) = await self.conversation.history(limit=1)
        assert (last.id, last.data) == (entry, "still here")


@asynccontextmanager
async def open_world(path: Path) -> AsyncIterator[World]:
    probe = Probe()
    registry = Registry()
    registry.install(Extension("bad", tasks=[probe, TypedProbe()]))
    async with open_harness(
        path,
        registry=registry,
        settings=Settings(value_bytes_max=VALUE_BYTES_MAX, document_bytes_max=VALUE_BYTES_MAX),
        durability="process",
        blocking=InlineBlocking(),
    ) as harness:
        root = await harness.root()
        harness.start()
        yield World(harness, root, probe, path)


Door = Callable[[World, Any], Awaitable[Any]]
"""Hands a value in; returns what is stored then, or `Refused`."""


def spelled(value: Any) -> str:
    """A value by its JSON: 1, 1.0 and true, 0.0 and -0.0, are different."""
    return json.dumps(value, sort_keys=False)


async def knock(world: World, door: Door, payloads: Sequence[Payload]) -> list[str]:
    """Hand every payload in at one door; returns what was wrong."""
    wrong: list[str] = []
    for payload in payloads:
        try:
            came = await door(world, payload.make())
            problem = _judged(payload, came)
        except PidurableError as error:
            if isinstance(error, SessionPoisonedError | InternalError):
                raise
            problem = f"{type(error).__name__} came from elsewhere: {error}"
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:200]}"
        if problem is not None:
            wrong.append(f"{payload.name}: {problem}")
    await world.serves()
    return wrong


def _judged(payload: Payload, came: Any) -> str | None:
    if not isinstance(came, Refused):
        if payload.encoded is not None and spelled(came) == spelled(payload.encoded):
            return None
        if payload.fate == "refused":
            return f"was stored, as {str(came)[:100]!r}"
        if spelled(came) != spelled(payload.stored):
            return f"reads back as {spelled(came)[:100]}, not as {spelled(payload.stored)[:100]}"
        return None
    error = came.error
    named = error.path if isinstance(error, NotJsonError) else payload.place
    if payload.fate == "refused" and not named.endswith(payload.place):
        return f"refused at {named}, not at ...{payload.place}"
    return None
