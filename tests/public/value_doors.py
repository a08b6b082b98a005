"""Every door for values, driven with the table of value rules.

Each door hands a value in, and says how to find again what was stored. What is accepted must come
back exactly after the store was reopened; what is refused must be refused with its words and its
place, and leave the store as it was. Nothing here asserts: what is wrong is returned as text, so
that the same holds under `python -O`, where this file is run as a program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import trio
import trio.lowlevel

from pidurable import (
    Conversation,
    Edit,
    Extension,
    Harness,
    Registry,
    Settings,
    Task,
    TaskContext,
    TaskId,
    TextBlock,
    UserMessage,
    document,
    entry,
    nothing_to_undo,
    open_harness,
    phase,
)
from pidurable.errors import MemoTooLargeError, NotJsonError, PidurableError
from pidurable.records._limits import MEMO_BYTES_MAX
from pidurable.records._tasks import Status
from pidurable.records._value_rules import (
    EXTENSION_CODECS,
    VALUE_DOORS,
    VALUE_RULES,
    Door,
    Refused,
    nested,
)
from pidurable.storage import MemoryStorage, Storage
from pidurable.testing import InlineBlocking

VALUE_BYTES_MAX = 64 * 1024
"""The setting of these tests, so that the largest value is quick to make."""

FAR = datetime(2100, 1, 1, tzinfo=UTC)

PLAIN = [
    (rule.name, example)
    for rule in VALUE_RULES
    for example in rule.accepted
    if example.type is None and rule.name not in ("depth", "size")
]
BAD = [
    (rule.name, example)
    for rule in VALUE_RULES
    for example in rule.refused
    if example.type is None and rule.name != "size" and example.below + rule.name != "depth"
]
"""Without the value of 100,000 levels, which takes long to make."""
TYPED = [
    (rule.name, example)
    for rule in VALUE_RULES
    for example in rule.accepted
    if example.type is not None
]
BAD_TYPED = [
    (rule.name, example)
    for rule in VALUE_RULES
    for example in rule.refused
    if example.type is not None
]


def exact(value: Any) -> Any:
    """Spell out the types too, as 1 == 1.0 == True and 0.0 == -0.0; sets have no order."""
    kind = type(value)
    if attrs.has(kind):
        return kind.__name__, [exact(getattr(value, each.name)) for each in attrs.fields(kind)]
    if isinstance(value, list | tuple):
        return kind.__name__, [exact(each) for each in value]
    if isinstance(value, set | frozenset):
        return kind.__name__, sorted(map(repr, value))
    if isinstance(value, dict):
        return kind.__name__, [(key, exact(each)) for key, each in value.items()]
    return kind.__name__, repr(value)


# --- records, documents and tasks that hold anything, or one of each type -------------------------


@document("values.box")
@attrs.define
class Box:
    value: Any = None


@attrs.frozen
class Begin:
    """Nothing has happened yet."""


@attrs.frozen
class Holding:
    value: Any


Context = TaskContext[Any, Begin | Holding, Any]


class Keeper(Task[Any, Begin | Holding, Any]):
    """Does in its one step what the test says, and holds a checkpoint that it has reached."""

    name = "values.keeper"
    abort = nothing_to_undo

    def __init__(self) -> None:
        self.step: Callable[[Context], Awaitable[None]] | None = None

    def initial(self, input: Any) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: Context) -> None:
        if self.step is None:
            await ctx.wait(then=Holding(None), deadline=FAR)
        else:
            await self.step(ctx)

    @phase
    async def holding(self, at: Holding, ctx: Context) -> None:
        await ctx.wait(then=at, deadline=FAR)


FIELDS = {f"f{number}": example for number, (_, example) in enumerate(TYPED)}
"""One field for each example with a type."""

Everything: Any = entry("values.everything")(
    attrs.make_class(
        "Everything",
        {name: attrs.field(type=example.type) for name, example in FIELDS.items()},
        frozen=True,
        kw_only=True,
    )
)
TypedBox: Any = document("values.typed_box")(
    attrs.make_class(
        "TypedBox",
        {
            name: attrs.field(type=example.type, factory=example.make)
            for name, example in FIELDS.items()
        },
        kw_only=True,
    )
)


@attrs.frozen
class Typed:
    value: Everything


class TypedKeeper(Task[Everything, Typed, Everything]):
    """Brings its input through a checkpoint into its result."""

    name = "values.typed"
    abort = nothing_to_undo

    def initial(self, input: Any) -> Typed:
        return Typed(input)

    @phase
    async def typed(self, at: Typed, ctx: TaskContext[Everything, Typed, Everything]) -> None:
        if exact(at.value) != exact(ctx.input):
            await ctx.fail("the checkpoint is not the input")
        await ctx.complete(at.value)


def field_of(type_: Any) -> str:
    """The field of a type."""
    return next(name for name, example in FIELDS.items() if example.type == type_)


# --- the world ------------------------------------------------------------------------------------


BOXES = ("values.box", "values.typed_box")


@attrs.define(eq=False)
class World:
    """An open store."""

    harness: Harness
    root: Conversation
    keeper: Keeper

    async def in_task(self, step: Callable[[Context], Awaitable[Any]]) -> int:
        """Run a step in a task of its own until that ends or is parked, and return its id.

        A refusal ends the task as failed, and is raised here.
        """
        refused: list[PidurableError] = []

        async def run(ctx: Context) -> None:
            try:
                await step(ctx)
            except (NotJsonError, MemoTooLargeError) as error:
                refused.append(error)
                await ctx.fail("refused")

        self.keeper.step = run
        id = await self.root.create_task(Keeper, None)
        while self.harness.task(id).status not in (Status.WAITING, Status.TERMINAL):
            await trio.lowlevel.checkpoint()
        if refused:
            raise refused[0]
        return id

    def stored(self) -> tuple[list[int], list[int]]:
        """What a refusal must leave as it is: the entries, and the revisions of the documents."""
        storage = self.harness.session.storage
        boxes = [storage.document(name, 1, self.root.id, "") for name in BOXES]
        revisions = [len(storage.revisions(row.id)) for row in boxes if row is not None]
        return [row.id for row in storage.entries(self.root.id)], revisions


@asynccontextmanager
async def open_world(store: Storage | Path) -> AsyncIterator[World]:
    keeper = Keeper()
    registry = Registry()
    registry.install(
        Extension("values", tasks=[keeper, TypedKeeper()], codecs=dict(EXTENSION_CODECS))
    )
    async with open_harness(
        store,
        registry=registry,
        settings=Settings(value_bytes_max=VALUE_BYTES_MAX, document_bytes_max=VALUE_BYTES_MAX),
        durability="process",
        blocking=InlineBlocking(),
    ) as harness:
        root = await harness.root()
        harness.start()
        yield World(harness, root, keeper)


# --- the doors ------------------------------------------------------------------------------------

Find = Callable[[World], Any]
"""Finds what was stored, in another life of the store."""
Knock = Callable[[World, Any], Awaitable[Find]]


def found_entry(world: World, id: int) -> Any:
    row = world.harness.session.storage.entry(id)
    if row is None:
        raise LookupError(f"entry {id} is not stored")
    return row


async def append(world: World, value: Any, **options: Any) -> int:
    async with world.harness.commit() as tx:
        return tx.append(world.root.id, value, **options)


async def knock_entry(world: World, value: Any) -> Find:
    id = await append(world, value, kind="values.any")
    return lambda later: parsed(found_entry(later, id).data)


def parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def said(value: Any) -> UserMessage:
    return UserMessage(blocks=(TextBlock(text="t", opaque=value),), at_us=1)


async def knock_message(world: World, value: Any) -> Find:
    id = await append(world, None, kind="values.any", messages=[said(value)])
    return lambda later: parsed(found_entry(later, id).messages)[0]["blocks"][0].get("opaque")


async def knock_edit(world: World, value: Any) -> Find:
    async with world.harness.commit() as tx:
        target = tx.append(world.root.id, "x", kind="values.any")
        id = tx.append(
            world.root.id,
            "y",
            kind="values.any",
            edits=[Edit(target=target, messages=(said(value),))],
        )
    return lambda later: parsed(found_entry(later, id).edits)[0]["messages"][0]["blocks"][0].get(
        "opaque"
    )


def found_box(world: World) -> Any:
    box = world.harness.session.snapshot(Box, world.root.id)
    return None if box is None else box.value


async def knock_draft(world: World, value: Any) -> Find:
    async with world.harness.commit() as tx:
        (await tx.document(Box, world.root.id)).value = value
    return found_box


async def knock_patch(world: World, value: Any) -> Find:
    async with world.harness.commit() as tx:
        tx.patch(Box, world.root.id, [{"op": "replace", "path": "/value", "value": value}])
    return found_box


async def knock_input(world: World, value: Any) -> Find:
    world.keeper.step = None
    id = await world.root.create_task(Keeper, value)
    return lambda later: later.harness.task(id).input


async def knock_checkpoint(world: World, value: Any) -> Find:
    id = await world.in_task(lambda ctx: ctx.goto(Holding(value)))
    return lambda later: later.harness.task(id).checkpoint["value"]


def found_outcome(world: World, id: int) -> Any:
    outcome = world.harness.task(id).outcome
    if outcome is None:
        raise LookupError(f"task {id} has not ended")
    return outcome


async def knock_result(world: World, value: Any) -> Find:
    id = await world.in_task(lambda ctx: ctx.complete(value))
    return lambda later: found_outcome(later, id).result


async def knock_partial(world: World, value: Any) -> Find:
    id = await world.in_task(lambda ctx: ctx.fail("no", result=value))
    return lambda later: found_outcome(later, id).result


async def knock_detail(world: World, value: Any) -> Find:
    id = await world.in_task(lambda ctx: ctx.fail("no", detail=value))
    return lambda later: found_outcome(later, id).error.detail


async def knock_memo(world: World, value: Any) -> Find:
    async def remember(ctx: Context) -> None:
        await ctx.memo("name", value)
        await ctx.wait(then=Holding(None), deadline=FAR)

    id = await world.in_task(remember)
    return lambda later: later.harness.task(id).memos["name"]


async def knock_signal(world: World, value: Any) -> Find:
    world.keeper.step = None
    id = await world.root.create_task(Keeper, None)
    await world.harness.signal(id, "name", value)
    return lambda later: parsed(later.harness.session.storage.signals(id)[0].payload)


async def knock_submission(world: World, value: Any) -> Find:
    submission = await world.root.submit([TextBlock(text="t", opaque=value)])
    id = submission.id

    def find(later: World) -> Any:
        row = later.harness.session.storage.submission(id)
        return parsed(None if row is None else row.content)[0].get("opaque")

    return find


async def knock_write(world: World, value: Any) -> Find:
    record = await (await world.root.write(value, kind="values.any")).status()
    id = record.entry
    assert id is not None
    return lambda later: parsed(found_entry(later, id).data)


KNOCKS: dict[str, Knock] = {
    "entry": knock_entry,
    "message": knock_message,
    "edit": knock_edit,
    "draft": knock_draft,
    "patch": knock_patch,
    "input": knock_input,
    "checkpoint": knock_checkpoint,
    "result": knock_result,
    "partial": knock_partial,
    "detail": knock_detail,
    "memo": knock_memo,
    "signal": knock_signal,
    "submission": knock_submission,
    "write": knock_write,
}

PLACES = {
    "<kind>": "<values.any>",
    "<name>": "<values.box>",
    "<kind input>": "<values.keeper input>",
    "<kind tag>": "<values.keeper holding>",
    "<kind result>": "<values.keeper result>",
    "<memo name>": "<memo name>",
    "<signal name>": "<signal name>",
}
"""What the words in the path of a door stand for here."""


def place_of(door: Door) -> str:
    place = door.path
    for word, here in PLACES.items():
        place = place.replace(word, here)
    return place


# --- the judge ------------------------------------------------------------------------------------


async def refusal(world: World, knock: Knock, value: Any) -> NotJsonError | str:
    """The refusal of a value, or what came instead."""
    before = world.stored()
    try:
        await knock(world, value)
    except NotJsonError as error:
        return error if world.stored() == before else f"was refused, and changed the store: {error}"
    except PidurableError as error:
        return f"{type(error).__name__}: {error}"
    return "was taken"


def judged(came: NotJsonError | str, example: Refused, place: str) -> str | None:
    """What is wrong with a refusal."""
    if isinstance(came, str):
        return came
    expected = f"{place}{example.below}"
    if example.says not in str(came):
        return f"{example.says!r} is not in {str(came)[:200]!r}"
    if example.says.startswith("nested"):
        # At the first level that is too deep, which is nearer where more is around it.
        return None if came.path.startswith(expected) else f"at {came.path[:100]}, not {expected}"
    return None if came.path == expected else f"at {came.path[:100]}, not at {expected}"


async def refused_wrongly(world: World, door: Door) -> list[str]:
    """Hand in everything that a door must refuse: any value of the table, too deep, too large."""
    knock, place, wrong = KNOCKS[door.name], place_of(door), []
    for rule, example in BAD:
        problem = judged(await refusal(world, knock, example.make()), example, place)
        if problem is not None:
            wrong.append(f"{door.name}, {rule}: {problem}")
    deep = await refusal(world, knock, nested(201 - door.levels))
    if isinstance(deep, str):
        wrong.append(f"{door.name}, depth: {deep}")
    # With room for what is around it; a memo has a limit of its own.
    most = "x" * (MEMO_BYTES_MAX - 2 if door.name == "memo" else VALUE_BYTES_MAX - 200)
    find = await knock(world, most)
    if find(world) != most:
        wrong.append(f"{door.name}, size: {len(most)} characters do not come back")
    large = await refusal(world, knock, "x" * VALUE_BYTES_MAX)
    # Memos and documents have limits of their own, with errors of their own.
    if large == "was taken" or (isinstance(large, str) and "TooLarge" not in large):
        wrong.append(f"{door.name}, size: {large}")
    return wrong


async def taken(world: World, door: Door) -> tuple[Find, Any]:
    """Hand in everything that a door must take, at once, and the deepest value."""
    values = [example.make() for _, example in PLAIN] + [nested(199 - door.levels)]
    expected = [example.comes_back() for _, example in PLAIN] + [nested(199 - door.levels)]
    return await KNOCKS[door.name](world, values), expected


async def plain_problems(open_store: Callable[[], Storage | Path]) -> list[str]:
    """What is wrong with the doors, for strict JSON."""
    wrong: list[str] = []
    finds: dict[str, tuple[Find, Any]] = {}
    async with open_world(open_store()) as world:
        await knock_draft(world, 0)
        for door in VALUE_DOORS:
            wrong += await refused_wrongly(world, door)
            finds[door.name] = await taken(world, door)
    async with open_world(open_store()) as later:
        for name, (find, expected) in finds.items():
            came = find(later)
            pairs = zip(came, expected, strict=True)
            wrong += [
                f"{name}: {each!r} instead of {wanted!r}"
                for each, wanted in pairs
                if exact(each) != exact(wanted)
            ]
    return wrong


# --- doors that know a type -----------------------------------------------------------------------


def everything() -> dict[str, Any]:
    return {name: example.make() for name, example in FIELDS.items()}


async def knock_typed_entry(world: World, fields: dict[str, Any]) -> int:
    return await append(world, Everything(**fields))


async def knock_typed_write(world: World, fields: dict[str, Any]) -> Any:
    return await world.root.write(Everything(**fields))


async def knock_typed_draft(world: World, fields: dict[str, Any]) -> None:
    async with world.harness.commit() as tx:
        box = await tx.document(TypedBox, world.root.id)
        for name, each in fields.items():
            setattr(box, name, each)


async def knock_typed_input(world: World, fields: dict[str, Any]) -> TaskId[Any]:
    return await world.root.create_task(TypedKeeper, Everything(**fields))


async def knock_typed_checkpoint(world: World, fields: dict[str, Any]) -> int:
    return await world.in_task(lambda ctx: ctx.goto(Holding(Everything(**fields))))


async def knock_typed_result(world: World, fields: dict[str, Any]) -> int:
    return await world.in_task(lambda ctx: ctx.complete(Everything(**fields)))


TYPED_KNOCKS: tuple[tuple[str, Callable[[World, dict[str, Any]], Awaitable[Any]]], ...] = (
    ("$<values.everything>", knock_typed_entry),
    ("$<values.everything>", knock_typed_write),
    ("$<values.typed_box>", knock_typed_draft),
    ("$<values.typed input>", knock_typed_input),
    ("$<values.keeper holding>.value", knock_typed_checkpoint),
    ("$<values.keeper result>", knock_typed_result),
)


async def typed_problems(open_store: Callable[[], Storage | Path]) -> list[str]:
    """What is wrong with the doors that know a type."""
    wrong: list[str] = []
    async with open_world(open_store()) as world:
        for place, knock in TYPED_KNOCKS:
            for rule, example in BAD_TYPED:
                name = field_of(example.type)
                fields = everything() | {name: example.make()}
                came = await refusal(world, lambda w, v, k=knock: k(w, v), fields)  # type: ignore[misc]
                problem = judged(came, example, f"{place}.{name}")
                if problem is not None:
                    wrong.append(f"{place}, {rule}: {problem}")
        entry_id = await knock_typed_entry(world, everything())
        await knock_typed_draft(world, everything())
        task_id = await knock_typed_input(world, everything())
        await world.harness.wait_for_task(task_id)
    expected = {name: exact(example.comes_back()) for name, example in FIELDS.items()}
    async with open_world(open_store()) as later:
        entries = await later.root.history(limit=1_000)
        found: dict[str, Any] = {
            "entry": next(each for each in entries if each.id == entry_id).read(Everything),
            "draft": later.harness.session.snapshot(TypedBox, later.root.id),
            "input, checkpoint, result": (await later.harness.wait_for_task(task_id)).result,
        }
        for door, value in found.items():
            wrong += [
                f"{door}: {getattr(value, name)!r} instead of {wanted}"
                for name, wanted in expected.items()
                if exact(getattr(value, name)) != wanted
            ]
    return wrong


async def problems(open_store: Callable[[], Storage | Path]) -> list[str]:
    """Everything that is wrong at any door of a store."""
    return await plain_problems(open_store) + await typed_problems(open_store)


def in_memory() -> Callable[[], Storage]:
    """Open the same store in memory again and again."""
    first = MemoryStorage()
    return first.reopen


if __name__ == "__main__":
    found = trio.run(problems, in_memory())
    print(f"optimised={not __debug__} doors={len(KNOCKS)} wrong={len(found)}", *found, sep="\n")
    sys.exit(bool(found))
