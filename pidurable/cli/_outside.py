"""Changing a session that another process holds: its holder is asked to do it.

What a command wants is handed in and done by the holder, once, and its answer is the command's. No
extension is loaded here and nothing is run. Where the holder goes away before it has answered, this
process holds the store for the moment that the answer takes: opening it applies what waits. Ctrl-C
takes the command back if nobody has begun it, and says so either way: what was left in the box
would be done later, when nobody expects it any more.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import trio
import trio.lowlevel

from pidurable.cli._errors import LeftError
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._render import clean_line
from pidurable.cli._signals import catch_interrupts
from pidurable.errors import NotFoundError, StorageHeldError
from pidurable.harness._client import Client, open_client
from pidurable.harness._open import Harness, open_quiet_harness
from pidurable.harness._reader import HolderView, Reader, open_reader
from pidurable.records._commands import drawn_key
from pidurable.registry import Registry
from pidurable.session._seams import SystemRandomness
from pidurable.storage._command_box import folder_path

__all__ = [
    "asked",
    "change",
    "holding",
    "live_holder",
    "say_who_is_asked",
    "take_back",
    "unless_interrupted",
    "waiting_commands",
]

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


def waiting_commands(store: str) -> str:
    """So many commands lie beside a store, in words; empty where none does."""
    folder = Path(folder_path(os.path.realpath(store)))
    count = sum(1 for end in ("command", "taken") for _ in folder.glob(f"*.{end}"))
    return f"{count:,} command{'' if count == 1 else 's'}" if count else ""


def say_who_is_asked(host: Host, pid: int, place: str, *, what: str = "asking it") -> None:
    """Say on stderr that another process does it."""
    host.err(f"process {pid} on {clean_line(place)} holds this session: {what}", "dim")


async def change(
    host: Host,
    options: Options,
    *,
    own: Callable[[Harness], Awaitable[T]],
    ask: Callable[[Client, str], Awaitable[T]],
) -> T:
    """Make a change: by holding the store for a moment, or by asking who holds it.

    Args:
        host, options: Of the command.
        own: Makes the change where nobody holds the store.
        ask: Has the holder make it; called with a client and a key for the command, at most once.

    Raises:
        WaitTimeoutError: The holder has not answered within `--timeout`.
        LeftError: Ctrl-C came before the answer.
    """
    await _say_who_is_replaced(host, options)
    try:
        async with holding(host, options) as harness:
            return await own(harness)
    except StorageHeldError as held:
        say_who_is_asked(host, held.pid, held.host)
    return await asked(host, options, ask)


async def _say_who_is_replaced(host: Host, options: Options) -> None:
    """Say that a holder counts as hung: it stores nothing more, also if it wakes."""
    async with open_reader(options.store) as reader:
        holder = await reader.holder()
    if holder is not None and holder.state == "silent":
        place = f"process {holder.record.pid} on {clean_line(holder.record.host)}"
        host.err(
            f"{place} was silent for {holder.heartbeat_age:.0f} s and is replaced: it can store "
            "nothing more",
            "yellow",
        )


async def asked(host: Host, options: Options, ask: Callable[[Client, str], Awaitable[T]]) -> T:
    """Have the holder do something, and stand in for it if it goes away before it has answered."""
    key = drawn_key(host.now_us(), SystemRandomness().uuid())
    async with open_client(options.store) as client:

        async def leave() -> LeftError:
            if await take_back(client, key):
                return LeftError("interrupted; taken back: nothing was done")
            next_step = "What this session has now is shown by `pidurable task tree`."
            return LeftError("interrupted; it was taken up already, and is done", next_step)

        return await unless_interrupted(
            options,
            lambda: ask(client, key),
            leave,
            beside=lambda: _stand_in(host, options, client),
        )


async def unless_interrupted(
    options: Options,
    work: Callable[[], Awaitable[T]],
    leave: Callable[[], Awaitable[LeftError]],
    *,
    beside: Callable[[], Awaitable[None]] = trio.sleep_forever,
) -> T:
    """Do some work, or say what became of it when somebody does not want to wait any longer.

    Args:
        options: Of the command.
        work: What is waited for.
        leave: Tells what becomes of it, after Ctrl-C; called when the work has come to rest, its
            threads too.
        beside: What runs meanwhile.
    """
    given: list[T] = []
    failed: list[Exception] = []
    with catch_interrupts(options.resume_command) as interrupts:
        async with trio.open_nursery() as nursery:

            async def interrupted() -> None:
                await interrupts.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(interrupted)
            nursery.start_soon(beside)
            try:
                given.append(await work())
            except Exception as error:
                # Raised outside of the nursery, as itself and not in a group.
                failed.append(error)
            nursery.cancel_scope.cancel()
        if failed:
            raise failed[0]
        if not given:
            raise await leave()
    return given[0]


async def take_back(client: Client, key: str) -> bool:
    """Withdraw a command that nobody hands in any more; whether it is certainly not done."""
    try:
        return await client.withdraw(key)
    except NotFoundError:
        return True  # interrupted before it was handed in


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
