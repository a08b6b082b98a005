"""Bad input at every door: refused with its place before anything is stored, or read back equal."""

# C081, C082, C084, C085: NUL, lone surrogates, not-a-number and depth, at each entry point.

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from bad_payloads import EVERY, LIGHT
from bad_world import (
    Box,
    Door,
    Holding,
    Probe,
    Refused,
    World,
    knock,
    open_world,
)

from pidurable import TextBlock, UserMessage


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(tmp_path / "s.sqlite") as world:
        yield world


def test_the_table_is_large_and_each_payload_is_named_once() -> None:
    """At least sixty payloads go through every door for any JSON."""
    names = [payload.name for payload in EVERY]

    assert len(names) >= 60
    assert len(set(names)) == len(names)


# --- doors for any JSON -----------------------------------------------------------------------


async def entry_data(world: World, value: Any) -> Any:
    async def hand_in() -> Any:
        async with world.harness.commit() as tx:
            return tx.append(world.conversation.id, value, kind="bad.data")

    id = await world.tried(hand_in)
    if isinstance(id, Refused):
        return id
    (entry,) = await world.conversation.history(limit=1)
    assert entry.id == id
    return entry.data


async def opaque_of_a_message(world: World, value: Any) -> Any:
    message = UserMessage(blocks=(TextBlock(text="t", opaque=value),), at_us=1)

    async def hand_in() -> Any:
        async with world.harness.commit() as tx:
            return tx.append(world.conversation.id, kind="bad.data", messages=[message])

    if isinstance(refused := await world.tried(hand_in), Refused):
        return refused
    (entry,) = await world.conversation.history(limit=1)
    return stored_blocks(world, entry.id)[0].get("opaque")


def stored_blocks(world: World, entry: int) -> Any:
    row = world.harness.session.storage.entry(entry)
    assert row is not None
    assert row.messages is not None
    return json.loads(row.messages)[0]["blocks"]


async def task_input(world: World, value: Any) -> Any:
    world.probe.action = lambda ctx: ctx.complete("seen")
    id = await world.tried(lambda: world.conversation.create_task(Probe, value))
    if isinstance(id, Refused):
        return id
    await world.harness.wait_for_task(id)
    return world.harness.task(id).input


async def signal_payload(world: World, value: Any) -> Any:
    async def take(ctx: Any) -> Any:
        async with ctx.commit() as tx:
            tx.signal(ctx.task_id, "own", value)
        async with ctx.commit() as tx:
            ((_, payload),) = tx.receive()
            tx.complete(payload)
        return "sent"

    came, outcome = await world.in_task(take)
    return came if isinstance(came, Refused) else outcome.result


async def checkpoint(world: World, value: Any) -> Any:
    came, outcome = await world.in_task(lambda ctx: ctx.goto(Holding(value)))
    return came if isinstance(came, Refused) else outcome.result


async def checkpoint_of_a_wait(world: World, value: Any) -> Any:
    came, outcome = await world.in_task(lambda ctx: ctx.wait(then=Holding(value), on=[]))
    return came if isinstance(came, Refused) else outcome.result


async def result(world: World, value: Any) -> Any:
    came, outcome = await world.in_task(lambda ctx: ctx.complete(value))
    return came if isinstance(came, Refused) else outcome.result


async def partial_result(world: World, value: Any) -> Any:
    if value is None:
        return None  # there is none
    came, outcome = await world.in_task(lambda ctx: ctx.fail("no", result=value))
    return came if isinstance(came, Refused) else outcome.partial


async def fail_detail(world: World, value: Any) -> Any:
    came, outcome = await world.in_task(lambda ctx: ctx.fail("no", detail=value))
    if isinstance(came, Refused):
        return came
    assert outcome.error is not None
    return outcome.error.detail


async def memo(world: World, value: Any) -> Any:
    async def remember(ctx: Any) -> Any:
        first = await ctx.memo("name", value)
        await ctx.complete(await ctx.memo("name", "another"))
        return first

    came, outcome = await world.in_task(remember)
    return came if isinstance(came, Refused) else outcome.result


async def document_draft(world: World, value: Any) -> Any:
    async def change() -> None:
        async with world.harness.commit() as tx:
            box = await tx.document(Box, world.conversation.id)
            box.value = value

    if isinstance(refused := await world.tried(change), Refused):
        return refused
    box = world.harness.session.snapshot(Box, world.conversation.id)
    assert box is not None
    return box.value


async def document_patch(world: World, value: Any) -> Any:
    async with world.harness.commit() as tx:
        await tx.document(Box, world.conversation.id)
    ops = [{"op": "replace", "path": "/value", "value": value}]

    async def change() -> None:
        async with world.harness.commit() as tx:
            tx.patch(Box, world.conversation.id, ops)

    if isinstance(refused := await world.tried(change), Refused):
        return refused
    box = world.harness.session.snapshot(Box, world.conversation.id)
    assert box is not None
    return box.value


VALUE_DOORS = [
    entry_data,
    opaque_of_a_message,
    task_input,
    signal_payload,
    checkpoint,
    checkpoint_of_a_wait,
    result,
    partial_result,
    fail_detail,
    memo,
    document_draft,
    document_patch,
]


@pytest.mark.slow
@pytest.mark.parametrize("door", VALUE_DOORS, ids=lambda door: door.__name__)
async def test_any_value_is_refused_or_reads_back_equal(
    world: World, door: Door, some: Callable[..., list[Any]]
) -> None:
    """A door for any JSON takes what JSON has, exactly, and refuses the rest with its path."""
    payloads = EVERY if door in (entry_data, signal_payload) else LIGHT

    assert await knock(world, door, some(payloads, of=6)) == []
