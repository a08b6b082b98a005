"""Bad names, texts, keys, ids and numbers: each door that takes only one type of value."""

# C081, C082: NUL and lone surrogates in names, keys and texts. C084: not-a-number in limits.

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio.testing
from bad_payloads import BAD_TEXTS, EMPTY_TEXTS, NUMBERS, ODD_TEXTS, OTHERS, TEXTS
from bad_world import (
    Box,
    Boxes,
    Door,
    Holding,
    Probe,
    Refused,
    Typed,
    TypedProbe,
    World,
    knock,
    open_world,
)

from pidurable import (
    AgentChange,
    Edit,
    Entry,
    ImageBlock,
    TextBlock,
    UserMessage,
    document,
    note_in_place,
)
from pidurable.errors import PidurableError

TEXT_PAYLOADS = [
    *TEXTS,
    *(attrs.evolve(each, fate="refused", encoded=None, place="") for each in OTHERS),
]
"""A door for texts takes texts: everything else is refused there."""

WRONG = [
    attrs.evolve(each, fate="refused", encoded=None, place="")
    for each in (*BAD_TEXTS, *EMPTY_TEXTS, *ODD_TEXTS[-6:], *NUMBERS, *OTHERS)
]
"""A door for ids, choices and moments takes none of these."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(tmp_path / "s.sqlite") as world:
        yield world


async def commit(world: World, body: Callable[[Any], Any]) -> Any:
    async def hand_in() -> Any:
        async with world.harness.commit() as tx:
            return body(tx)

    return await world.tried(hand_in)


async def last_entry(world: World) -> Any:
    (entry,) = await world.conversation.history(limit=1)
    return entry


# --- texts ------------------------------------------------------------------------------------


async def submitted_text(world: World, value: Any) -> Any:
    submission = await world.tried(lambda: world.conversation.submit(value))
    if isinstance(submission, Refused):
        return submission
    settled = await submission.wait()
    assert (settled.status, settled.reason) == ("unanswered", "no_model")
    return (await submission.status()).content[0]["text"]


async def submitted_block(world: World, value: Any) -> Any:
    block = TextBlock(text=value)
    submission = await world.tried(lambda: world.conversation.submit([block]))
    if isinstance(submission, Refused):
        return submission
    await submission.wait()
    return (await submission.status()).content[0]["text"]


async def request_id(world: World, value: Any) -> Any:
    if value is None:
        return Refused(PidurableError("none is given"))
    submission = await world.tried(lambda: world.conversation.submit("hello", request_id=value))
    if isinstance(submission, Refused):
        return submission
    await submission.wait()
    again = await world.conversation.submit("hello", request_id=value)
    assert again.id == submission.id
    return (await submission.status()).request_id


async def message_text(world: World, value: Any) -> Any:
    message = UserMessage(blocks=(TextBlock(text=value),), at_us=1)
    came = await commit(
        world, lambda tx: tx.append(world.conversation.id, kind="k", messages=[message])
    )
    if isinstance(came, Refused):
        return came
    row = world.harness.session.storage.entry(came)
    assert row is not None
    stored = world.harness.session.entry_of(row).messages[0]
    assert isinstance(stored, UserMessage)
    return stored.blocks[0].text  # type: ignore[union-attr]


async def entry_kind(world: World, value: Any) -> Any:
    if value is None:
        return Refused(PidurableError("none is given"))
    came = await commit(world, lambda tx: tx.append(world.conversation.id, 1, kind=value))
    return came if isinstance(came, Refused) else (await last_entry(world)).kind


async def task_key(world: World, value: Any) -> Any:
    if value is None:
        return Refused(PidurableError("none is given"))
    world.probe.action = lambda ctx: ctx.complete(None)
    id = await world.tried(lambda: world.conversation.create_task(Probe, None, key=value))
    if isinstance(id, Refused):
        return id
    await world.harness.wait_for_task(id)
    assert await world.conversation.create_task(Probe, None, key=value) == id
    return world.harness.task(id).key


async def conversation_key(world: World, value: Any) -> Any:
    if value is None:
        return Refused(PidurableError("none is given"))

    async def create(ctx: Any) -> Any:
        async with ctx.commit() as tx:
            made = tx.create_conversation(key=value)
        async with ctx.commit() as tx:
            assert tx.create_conversation(key=value) == made
            tx.complete(made)

    came, outcome = await world.in_task(create)
    if isinstance(came, Refused):
        return came
    return world.harness.conversation(outcome.result).record.key


async def fork_key(world: World, value: Any) -> Any:
    if value is None:
        return Refused(PidurableError("none is given"))

    def twice(tx: Any) -> Any:
        made = tx.fork(world.conversation.id, key=value)
        assert tx.fork(world.conversation.id, key=value) == made
        return made

    came = await commit(world, twice)
    return came if isinstance(came, Refused) else world.harness.conversation(came).record.key


async def principal(world: World, value: Any) -> Any:
    came = await commit(world, lambda tx: tx.create_conversation(principal=value))
    return came if isinstance(came, Refused) else world.harness.conversation(came).record.principal


async def signal_name(world: World, value: Any) -> Any:
    async def send(ctx: Any) -> Any:
        async with ctx.commit() as tx:
            tx.signal(ctx.task_id, value, 1)
        async with ctx.commit() as tx:
            ((name, _),) = tx.receive()
            tx.complete(name)

    came, outcome = await world.in_task(send)
    return came if isinstance(came, Refused) else outcome.result


async def signal_key(world: World, value: Any) -> Any:
    if value is None:
        return Refused(PidurableError("none is given"))

    async def send(ctx: Any) -> Any:
        for _ in range(2):
            async with ctx.commit() as tx:
                tx.signal(ctx.task_id, "n", 1, key=value)
        (row,) = world.harness.session.storage.signals(ctx.task_id, limit=5)
        await ctx.complete(None)
        return row.key

    return (await world.in_task(send))[0]


async def memo_name(world: World, value: Any) -> Any:
    async def remember(ctx: Any) -> Any:
        first = await ctx.memo(value, "first")
        assert await ctx.memo(value, "second") == first
        ((name, _),) = world.harness.session.storage.task_memos(ctx.task_id)
        await ctx.complete(None)
        return name

    return (await world.in_task(remember))[0]


async def abort_reason(world: World, value: Any) -> Any:
    parked = await waiting_task(world)
    came = await world.tried(lambda: world.harness.abort_task(parked, value))
    if isinstance(came, Refused):
        await world.harness.abort_task(parked)
    outcome = await world.harness.wait_for_task(parked)
    return came if isinstance(came, Refused) else outcome.reason


async def abort_reason_in_a_commit(world: World, value: Any) -> Any:
    parked = await waiting_task(world)
    came = await commit(world, lambda tx: tx.abort_task(parked, value))
    if isinstance(came, Refused):
        await world.harness.abort_task(parked)
    outcome = await world.harness.wait_for_task(parked)
    return came if isinstance(came, Refused) else outcome.reason


async def reason_of_a_conversations_abort(world: World, value: Any) -> Any:
    parked = await waiting_task(world)
    came = await world.tried(lambda: world.conversation.abort(value))
    if isinstance(came, Refused):
        await world.harness.abort_task(parked)
    outcome = await world.harness.wait_for_task(parked)
    return came if isinstance(came, Refused) else outcome.reason


async def waiting_task(world: World) -> Any:
    world.probe.action = lambda ctx: ctx.wait(then=Holding(1), signals=True)
    id = await world.conversation.create_task(Probe, None)
    while world.harness.task(id).status.word != "waiting":
        await settle()
    return id


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.001)


async def family_key(world: World, value: Any) -> Any:
    async def create() -> Any:
        async with world.harness.commit() as tx:
            box = await tx.document(Boxes, world.conversation.id, key=value)
            box.value += 1

    came = await world.tried(create)
    if isinstance(came, Refused):
        return came
    rows = world.harness.session.storage.documents(1, world.conversation.id)
    return next(row.key for row in rows if row.key == value)


async def appended_text(world: World, value: Any) -> Any:
    async with world.harness.commit() as tx:
        (await tx.document(Box, world.conversation.id)).text = ""
    came = await commit(
        world, lambda tx: tx.append_text(Box, world.conversation.id, "/text", value)
    )
    if isinstance(came, Refused):
        return came
    box = world.harness.session.snapshot(Box, world.conversation.id)
    assert box is not None
    return box.text


async def typed_field(world: World, value: Any) -> Any:
    given = Typed(name=value, cents=1)
    id = await world.tried(lambda: world.conversation.create_task(TypedProbe, given))
    if isinstance(id, Refused):
        return id
    await world.harness.wait_for_task(id)
    return world.harness.task(id).input["name"]


async def ended_reason(world: World, value: Any) -> Any:
    """Given by an abort handler, which ends its task all the same."""
    if value is None:
        return Refused(PidurableError("none is given"))
    came: list[Any] = []

    async def end(ctx: Any) -> None:
        came.append(await world.tried(lambda: ctx.end_aborted(value)))
        if isinstance(came[0], Refused):
            await ctx.end_aborted("refused")

    world.probe.aborted = end
    try:
        parked = await waiting_task(world)
        await world.harness.abort_task(parked)
        outcome = await world.harness.wait_for_task(parked)
    finally:
        world.probe.aborted = None
    return came[0] if isinstance(came[0], Refused) else outcome.reason


def agent_field(name: str) -> Door:
    async def door(world: World, value: Any) -> Any:
        if value is None:
            return Refused(PidurableError("None clears"))

        async def configure() -> None:
            await world.conversation.configure(AgentChange(**{name: value}))

        came = await world.tried(configure)
        return came if isinstance(came, Refused) else world.conversation.agent()[name]

    door.__name__ = f"agent_{name}"
    return door


TEXT_DOORS = [
    submitted_text,
    submitted_block,
    request_id,
    message_text,
    entry_kind,
    task_key,
    conversation_key,
    fork_key,
    principal,
    signal_name,
    signal_key,
    memo_name,
    abort_reason,
    abort_reason_in_a_commit,
    reason_of_a_conversations_abort,
    ended_reason,
    family_key,
    appended_text,
    typed_field,
    *(agent_field(name) for name in ("model", "instructions", "cwd")),
]


@pytest.mark.slow
@pytest.mark.parametrize("door", TEXT_DOORS, ids=lambda door: door.__name__)
async def test_any_text_is_refused_or_reads_back_equal(
    world: World, door: Door, some: Callable[..., list[Any]]
) -> None:
    """A door for names and texts takes what can be stored, exactly, and no other type."""
    assert await knock(world, door, some(TEXT_PAYLOADS, of=6)) == []


# --- choices and numbers ------------------------------------------------------------------------


def choice(name: str, hand_in: Callable[[World, Any], Awaitable[Any]]) -> Door:
    async def door(world: World, value: Any) -> Any:
        return await world.tried(lambda: hand_in(world, value))

    door.__name__ = name
    return door


def unchecked(function: Any) -> Any:
    """What is handed in is of the wrong type on purpose."""
    return function


async def submit_with(world: World, **options: Any) -> Any:
    submission = await world.conversation.submit("x", **options)
    await submission.wait()
    return "taken"


async def append_with(world: World, **options: Any) -> Any:
    async with world.harness.commit() as tx:
        return tx.append(options.pop("to", world.conversation.id), 1, kind="k", **options)


async def fork_with(world: World, of: Any, at: Any) -> Any:
    async with world.harness.commit() as tx:
        return tx.fork(of, at)


@document("bad.page", history="rewindable")
@attrs.define
class Page:
    text: str = ""


async def patch_with(world: World, ops: Any) -> Any:
    async with world.harness.commit() as tx:
        await tx.document(Box, world.conversation.id)
        tx.patch(Box, world.conversation.id, ops)


async def put_bytes(world: World, data: Any) -> Any:
    async with world.harness.commit() as tx:
        return tx.put_blob("x" if isinstance(data, bytes) else data)


def showing(blob: Any) -> UserMessage:
    return UserMessage(blocks=(ImageBlock(blob=blob, media_type="a/b"),), at_us=1)


async def note_with(world: World, why: Any) -> Any:
    entry = Entry(id=1, conversation_id=world.conversation.id, seq=1, kind="k")
    return note_in_place(entry, why if not isinstance(why, str) else f"\0{why}")


def in_phase(name: str, action: Callable[[Any, Any], Awaitable[Any]]) -> Door:
    """A choice made by a task; what it stores before that is not the choice's."""

    async def door(world: World, value: Any) -> Any:
        async def act(ctx: Any) -> Any:
            await action(ctx, value)
            return "taken"

        came, _ = await world.in_task(act)
        return came

    door.__name__ = name
    return door


async def signal_to(world: World, task: Any) -> None:
    await world.harness.signal(task, "n", 1)


async def look_for(look: Callable[[], Any]) -> Any:
    return look()


NOTHING_FITS = [
    choice("when_busy", lambda w, v: submit_with(w, when_busy=v)),
    choice("image", lambda w, v: w.conversation.submit([ImageBlock(blob=v, media_type="a/b")])),
    choice("block", lambda w, v: w.conversation.submit([v])),
    choice("image_in_message", lambda w, v: append_with(w, messages=[showing(v)])),
    choice("put_blob", put_bytes),
    choice("blob", lambda w, v: w.harness.blob(v)),
    choice("note", note_with),
    choice("message", lambda w, v: append_with(w, messages=[v])),
    choice(
        "thinking", lambda w, v: w.conversation.configure(unchecked(AgentChange)(thinking=v or "x"))
    ),
    choice("append_to", lambda w, v: append_with(w, to=v)),
    choice("edit_target", lambda w, v: append_with(w, edits=[Edit(target=v)])),
    choice("patch_op", lambda w, v: patch_with(w, [v])),
    choice("patch_word", lambda w, v: patch_with(w, [{"op": v, "path": "/text", "value": ""}])),
    choice(
        "patch_path",
        lambda w, v: patch_with(w, [{"op": "remove", "path": v if isinstance(v, str) else 1}]),
    ),
    choice("task", lambda w, v: look_for(lambda: w.harness.task(v))),
    choice("conversation", lambda w, v: look_for(lambda: w.harness.conversation(v))),
    choice("fork_of", lambda w, v: fork_with(w, v, None)),
    choice("fork_at", lambda w, v: fork_with(w, w.conversation.id, v or "x")),
    choice("snapshot_of", lambda w, v: look_for(lambda: w.harness.snapshot(Box, v))),
    choice("past_of", lambda w, v: unchecked(w.harness.snapshot_as_of)(Page, v, 1)),
    choice("past_at", lambda w, v: unchecked(w.harness.snapshot_as_of)(Page, w.conversation.id, v)),
    choice("abort_task", lambda w, v: w.harness.abort_task(v)),
    choice("retry_task", lambda w, v: w.harness.retry_task(v)),
    choice("resume_task", lambda w, v: w.harness.resume_task(v)),
    choice("explain", lambda w, v: look_for(lambda: w.harness.explain(v))),
    choice(
        "background",
        lambda w, v: w.conversation.create_task(
            Probe, None, background="yes" if isinstance(v, bool) else v
        ),
    ),
    choice("wait_for_task", lambda w, v: w.harness.wait_for_task(v, timeout=0)),
    choice("signal_task", signal_to),
    choice(
        "deadline",
        lambda w, v: unchecked(w.conversation.create_task)(Probe, None, deadline=v or "x"),
    ),
    in_phase("wait_on", lambda ctx, v: ctx.wait(then=Holding(1), on=[v])),
    in_phase("wait_until", lambda ctx, v: ctx.wait(then=Holding(1), deadline=v or 0)),
    in_phase("wait_policy", lambda ctx, v: ctx.wait(then=Holding(1), on=[], policy=v)),
    in_phase("key", lambda ctx, v: look_for(lambda: ctx.key("\0" if isinstance(v, str) else v))),
    in_phase("outcomes", lambda ctx, v: ctx.outcomes([v])),
    in_phase("wait_in_memory", lambda ctx, v: ctx.wait_for_task(v)),
]
"""Doors for which no payload is right."""

FITTING = {
    "wait_until": {"aware datetime"},
    "deadline": {"aware datetime"},
    "put_blob": {"bytearray", "memoryview"},
}


@pytest.mark.slow
@pytest.mark.parametrize("door", NOTHING_FITS, ids=lambda door: door.__name__)
async def test_nothing_wrong_is_taken_for_a_choice_an_id_or_a_moment(
    world: World, door: Door, some: Callable[..., list[Any]]
) -> None:
    """Ids that are negative, huge, foreign, bool, text; unknown words; moments without a zone."""
    fitting = FITTING.get(door.__name__, set())
    payloads = [payload for payload in WRONG if payload.name not in fitting]

    assert await knock(world, door, some(payloads, of=6)) == []


@pytest.mark.parametrize(
    "moment",
    [datetime.datetime.max, datetime.datetime.min, datetime.datetime(1, 1, 1)],
)
async def test_moments_at_the_ends_of_time_are_taken_or_refused(
    world: World, moment: datetime.datetime
) -> None:
    """The first and last moments that Python knows do not break the arithmetic."""
    aware = moment.replace(tzinfo=datetime.UTC)

    came = await world.tried(lambda: world.conversation.create_task(Probe, None, deadline=aware))

    if not isinstance(came, Refused):
        await world.harness.abort_task(came)
        await world.harness.wait_for_task(came)
    await world.serves()
