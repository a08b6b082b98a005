"""Changing a session that another process holds: its holder is asked to do it.

What a command wants is handed in and done by the holder, once, and its answer is the command's. No
extension is loaded here and nothing is run. Where the holder goes away before it has answered, this
process holds the store for the moment that the answer takes: opening it applies what waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio
import trio.lowlevel

from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._render import clean_line
from pidurable.errors import StorageHeldError
from pidurable.harness._client import Client, open_client
from pidurable.harness._open import Harness, open_quiet_harness
from pidurable.harness._reader import HolderView, Reader
from pidurable.registry import Registry

__all__ = ["asked", "change", "holding", "live_holder", "say_who_is_asked"]

T = TypeVar("T")

STAND_IN_LOOK_SECONDS = 0.25


@asynccontextmanager
async def holding(host: Host, options: Options) -> AsyncIterator[Harness]:
    """Hold the store without letting anything in it run."""
    # No extension is loaded: no code is needed to commit, and one that is broken must not keep
    # anybody from looking after what it broke.
    async with open_quiet_harness(
        options.store, registry=Registry(), failpoints=host.failpoints
    ) as harness:
        await harness.drain(seconds=0)
        yield harness


async def live_holder(reader: Reader) -> HolderView | None:
    """The process that works on the store right now, if there is one."""
    holder = await reader.holder()
    return holder if holder is not None and holder.state == "live" else None


def say_who_is_asked(host: Host, pid: int, place: str, *, what: str = "asking it") -> None:
    """Say on stderr that another process does it."""
    host.err(f"process {pid} on {clean_line(place)} holds this session: {what}", "dim")


async def change(
    host: Host,
    options: Options,
    *,
    own: Callable[[Harness], Awaitable[T]],
    ask: Callable[[Client], Awaitable[T]],
) -> T:
    """Make a change: by holding the store for a moment, or by asking who holds it.

    Args:
        host, options: Of the command.
        own: Makes the change where nobody holds the store.
        ask: Has the holder make it; called with a client, at most once.

    Raises:
        WaitTimeoutError: The holder has not answered within `--timeout`.
    """
    try:
        async with holding(host, options) as harness:
            return await own(harness)
    except StorageHeldError as held:
        say_who_is_asked(host, held.pid, held.host)
    return await asked(host, options, ask)


async def asked(host: Host, options: Options, ask: Callable[[Client], Awaitable[T]]) -> T:
    """Have the holder do something, and stand in for it if it goes away before it has answered."""
    given: list[T] = []
    failed: list[Exception] = []
    async with open_client(options.store) as client, trio.open_nursery() as nursery:
        nursery.start_soon(_stand_in, host, options, client)
        try:
            given.append(await ask(client))
        except Exception as error:
            # Raised outside of the nursery, as itself and not in a group.
            failed.append(error)
        nursery.cancel_scope.cancel()
    if failed:
        raise failed[0]
    return given[0]


async def _stand_in(host: Host, options: Options, client: Client) -> None:
    """Hold the store whenever nobody does: opening it answers what waits."""
    while True:
        await trio.sleep(STAND_IN_LOOK_SECONDS)
        if await live_holder(client.reader) is None:
            try:
                async with holding(host, options):
                    await trio.sleep_forever()  # until the answer is there
            except StorageHeldError:
                continue  # somebody was faster, and answers
