"""A session, its holder and a client for tests of commands from outside."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from agent_world import World

from pidurable import (
    Client,
    Extension,
    Harness,
    Task,
    TaskContext,
    nothing_to_undo,
    phase,
)
from pidurable.records._commands import (
    Command,
    encode_command,
)
from pidurable.session._seams import InlineBlocking, TrioClock


@attrs.frozen
class Waits:
    """Until a signal comes."""


class Patient(Task[str, Waits, Any]):
    """Ends with the payload of the first signal."""

    name = "test.patient"
    abort = nothing_to_undo

    def initial(self, input: str) -> Waits:
        return Waits()

    @phase
    async def waits(self, at: Waits, ctx: TaskContext[str, Waits, Any]) -> None:
        async with ctx.commit() as tx:
            for _, payload in tx.receive():
                tx.complete(payload)
                return
            tx.wait(then=Waits(), signals=True)


class Store:
    """A session in memory, its holder and a client, under a clock of their own."""

    def __init__(self, *steps: Any) -> None:
        self.world = World(*steps)
        self.world.registry.install(Extension("test", tasks=[Patient()]))
        self.base = self.world.base

    def client(self) -> Client:
        return Client(self.base.reopen(), blocking=InlineBlocking(), clock=TrioClock())

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Harness]:
        """A holder that looks whenever the virtual clock moves."""
        async with self.world.open() as harness, trio.open_nursery() as nursery:

            async def look() -> None:
                while True:
                    await harness.apply_commands()
                    await trio.sleep(0.05)

            nursery.start_soon(look)
            yield harness
            nursery.cancel_scope.cancel()

    def answers(self) -> int:
        return self.base.reopen().head().seq

    def hand_in(self, kind: str, *, id: str = "by hand", **content: Any) -> None:
        """Leave a command as another program might."""
        command = Command(id=id, kind=kind, content=content, session="world", at_us=1)
        self.base.command_box.hand_in(id, encode_command(command, bytes_max=10_000))

    def answer(self, id: str = "by hand") -> Any:
        row = self.base.reopen()
        row._closed = False
        found = row.command(id)
        assert found is not None
        return json.loads(found.answer)
