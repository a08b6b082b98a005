"""The tasks, entries and documents inside the golden stores, and the world that they act on.

A golden store is written by the real code of its schema, in lives that end by SIGKILL, so that it
holds work in every state a crash can leave. This module uses only public names that exist since
schema 1: the same definitions write an old store under old code and end it under today's.

`World.hold` is what makes a life end in the middle: while it is on, work stops at named places and
waits for the kill; while it is off, the same code runs through.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import trio

from pidurable import (
    AgentChange,
    Retry,
    Task,
    TaskContext,
    document,
    entry,
    nothing_to_undo,
    phase,
)

START_US = 1_700_000_000_000_000
HOUR_US = 3_600_000_000
MODEL = "scripted/model"
LARGE = "a long line of a log, all the same\n" * 2_500
"""Over 64 KiB."""
PICTURE = bytes(range(256)) * 8


class World:
    """The outside: a ledger of effects, places to stop at, and which of them were reached."""

    def __init__(self, folder: Path, *, hold: bool, lethal: bool = False) -> None:
        self.path = folder / "ledger"
        self.hold = hold
        self.lethal = lethal
        self.reached: set[str] = set()

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def book(self, key: str, what: str) -> None:
        """Leave a line for an effect; the outside knows its keys."""
        line = f"{key} {what}"
        if line not in self.lines():
            with self.path.open("a") as file:
                file.write(line + "\n")

    async def stop(self, place: str) -> None:
        if self.hold:
            self.reached.add(place)
            await trio.sleep_forever()

    async def until(self, places: Iterable[str]) -> None:
        with trio.fail_after(60):
            while not self.reached.issuperset(places):  # noqa: ASYNC110 - a life is short
                await trio.sleep(0.002)


# --- records ------------------------------------------------------------------------------------


@entry("golden.note")
@attrs.frozen
class Note:
    text: str
    amount: float = 0.5


@document("golden.shared", scope="session")
@attrs.define
class Shared:
    names: dict[str, int] = attrs.Factory(dict)


@document("golden.diary", fork="current")
@attrs.define
class DiaryOne:
    """What a diary was when the store was written."""

    text: str = ""


@document("golden.diary", version=2, fork="current")
@attrs.define
class Diary:
    """What it is for those who read the store."""

    lines: list[str] = attrs.Factory(list)

    @staticmethod
    def migrate(value: Any, from_version: int) -> Any:
        return {"lines": value["text"].splitlines()}


@document("golden.past", history="rewindable", fork="as_of", family=True)
@attrs.define
class Past:
    value: int = 0


@document("golden.scratch")
@attrs.define
class Scratch:
    text: str = ""


@document("golden.own", scope="task")
@attrs.define
class Own:
    done: list[str] = attrs.Factory(list)


# --- tasks --------------------------------------------------------------------------------------


@attrs.frozen
class Start:
    pass


@attrs.frozen
class Second:
    ids: list[int] = attrs.Factory(list)
    note: str = ""


Ctx = TaskContext[str, Start | Second, str]


class Golden(Task[str, Start | Second, str]):
    """Every task here takes a text, has two phases, and knows the world."""

    name = "golden.base"
    retry = Retry(on=(OSError,), tries=9, base=3_600.0, maximum=3_600.0, jitter=0.0)

    def __init__(self, world: World) -> None:
        self.world = world

    def initial(self, input: str) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        raise NotImplementedError

    @phase
    async def second(self, at: Second, ctx: Ctx) -> None:
        await ctx.complete(f"{ctx.input}: second")

    async def abort(self, at: Start | Second, ctx: Ctx) -> None:
        if isinstance(at, Start):
            self.world.book(ctx.key("undo"), f"undo {ctx.input}")
            await ctx.goto(Second(note="undone"))
            return
        await self.world.stop(f"abort {ctx.input}")
        await ctx.end_aborted("undone", result=f"{ctx.input}: partly")


class Payment(Golden):
    """Books an effect under a key; held with the effect done and its outcome not stored."""

    name = "golden.payment"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        async with ctx.commit() as tx:
            price = tx.memo("price", 12.5)
            tx.memo("random", "drawn once")
            own = await tx.document(Own, ctx.task_id)
            own.done.append("priced")
            tx.goto(Second(note=f"{price}"))

    @phase
    async def second(self, at: Second, ctx: Ctx) -> None:
        self.world.book(ctx.key("charge"), f"charge {ctx.input} {at.note}")
        await self.world.stop(ctx.input)
        async with ctx.commit() as tx:
            own = await tx.document(Own, ctx.task_id)
            own.done.append("charged")
            tx.append(ctx.conversation_id, Note(f"paid {ctx.input}", 12.5))
            tx.complete(f"paid {at.note}")


class Queued(Golden):
    """Is begun only where its kind has room."""

    name = "golden.queued"
    abort = nothing_to_undo

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await ctx.complete(f"{ctx.input} ran")


class Listener(Golden):
    """Collects signals until one says that it is the last."""

    name = "golden.listener"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await ctx.goto(Second())

    @phase
    async def second(self, at: Second, ctx: Ctx) -> None:
        async with ctx.commit() as tx:
            heard = [f"{name} {json.dumps(payload)}" for name, payload in tx.receive()]
            note = " ".join([*at.note.split(" | "), *heard]).strip()
            if any(word.startswith("last ") for word in heard):
                tx.complete(note)
            else:
                tx.wait(then=Second(note=note), signals=True)


class Timer(Golden):
    """Waits for a moment that comes after the store was written."""

    name = "golden.timer"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await ctx.wait(then=Second(), deadline=ctx.now() + timedelta(hours=24))

    @phase
    async def second(self, at: Second, ctx: Ctx) -> None:
        await ctx.complete(f"woken by {ctx.woken_by}")


class Parent(Golden):
    """Owns two listeners, one task that ends at once, and waits for all under a policy."""

    name = "golden.parent"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        async with ctx.commit() as tx:
            ids = [
                tx.create_task(Listener, f"{ctx.input} {n}", key=f"{ctx.input} {n}")
                for n in range(2)
            ]
            if ctx.input == "all_settled":
                ids.append(tx.create_task(Failing, ctx.input, key=f"{ctx.input} failing"))
            tx.wait(then=Second(ids=list(ids)), on=ids, policy=ctx.input)

    @phase
    async def second(self, at: Second, ctx: Ctx) -> None:
        outcomes = await ctx.outcomes(at.ids)
        await ctx.complete(", ".join(each.status for each in outcomes))


class Holding(Golden):
    """Has decided its outcome while work below it is live."""

    name = "golden.holding"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await ctx.create_task(Listener, "held", key="held")
        await ctx.complete("decided early")


class Asking(Golden):
    """Owns a conversation with an agent and a fork of its own, and waits for the answer."""

    name = "golden.asking"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        async with ctx.commit() as tx:
            child = tx.create_conversation(key="child")
            tx.fork(ctx.conversation_id, key="own fork")
        conversation = ctx.conversation(child)
        await conversation.configure(AgentChange(model=MODEL, instructions="be a child"))
        submission = await conversation.submit(f"stream {ctx.input}", request_id="question")
        on = [submission.id] if ctx.input == "submission" else [child]
        await ctx.wait(then=Second(ids=[submission.id]), on=on)

    @phase
    async def second(self, at: Second, ctx: Ctx) -> None:
        settled = await ctx.submission(at.ids[0]).wait()
        await ctx.complete(settled.text)


class Retrying(Golden):
    """Is tried again after an hour."""

    name = "golden.retrying"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        if self.world.hold:
            raise OSError("the bank is closed")
        await ctx.complete("the bank was open")


class Parking(Golden):
    """Its fault is parked."""

    name = "golden.parking"
    on_fault = "park"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        if self.world.hold:
            raise ValueError("not as expected")
        await ctx.complete("repaired")


class Faulting(Golden):
    name = "golden.faulting"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        raise ValueError("beyond repair")


class Failing(Golden):
    name = "golden.failing"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await ctx.fail("no stock", detail={"left": 0, "asked": [1, 2.5, None]}, result="a part")


class Lethal(Golden):
    """Kills the process that runs it."""

    name = "golden.lethal"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        if self.world.lethal:
            os.kill(os.getpid(), signal.SIGKILL)
        await ctx.complete("harmless now")


class Gone(Golden):
    """Not installed when the store was written last."""

    name = "golden.gone"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await self.world.stop(ctx.input)
        await ctx.complete("back again")


class Lost(Gone):
    name = "golden.lost"

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await self.world.stop(ctx.input)
        await ctx.complete("never reached")


class Ahead(Gone):
    """Installed in an older version when the store was written last."""

    name = "golden.ahead"
    version = 2

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await self.world.stop(ctx.input)
        await ctx.complete("as new as the store")


class Behind(Gone):
    name = "golden.ahead"
    version = 1


class Moved(Gone):
    """Its version 2 migrates what version 1 stored."""

    name = "golden.moved"
    version = 1


class MovedBadly(Gone):
    name = "golden.moved"
    version = 2

    def migrate(self, input: Any, checkpoint: Any, from_version: int) -> tuple[Any, Any]:
        raise KeyError("no such column")


class MovedWell(Gone):
    name = "golden.moved"
    version = 2

    def migrate(self, input: Any, checkpoint: Any, from_version: int) -> tuple[Any, Any]:
        return f"{input} from {from_version}", checkpoint

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await ctx.complete(ctx.input)


@attrs.frozen
class Odd:
    note: str


@attrs.frozen
class Reshaped:
    phase_names = ("odd",)
    note: int


class Shaped(Task[str, Start | Odd, str]):
    """Its second checkpoint is read by a class that does not fit it, when written last."""

    name = "golden.shaped"
    abort = nothing_to_undo

    def __init__(self, world: World) -> None:
        self.world = world

    def initial(self, input: str) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: TaskContext[str, Start | Odd, str]) -> None:
        await ctx.goto(Odd("a text"))

    @phase
    async def odd(self, at: Odd, ctx: TaskContext[str, Start | Odd, str]) -> None:
        await self.world.stop(ctx.input)
        await ctx.complete(at.note)


class Misshaped(Task[str, Start | Reshaped, str]):
    name = "golden.shaped"
    abort = nothing_to_undo

    def __init__(self, world: World) -> None:
        self.world = world

    def initial(self, input: str) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: TaskContext[str, Start | Reshaped, str]) -> None:
        await ctx.complete("unused")

    @phase
    async def odd(self, at: Reshaped, ctx: TaskContext[str, Start | Reshaped, str]) -> None:
        await ctx.complete("unused")


ALWAYS = (
    *(Payment, Queued, Listener, Timer, Parent, Holding, Asking, Retrying, Parking, Faulting),
    *(Failing, Lethal),
)
RELEASES = {
    "first": (*ALWAYS, Gone, Lost, Ahead, Moved, Shaped),
    "last": (*ALWAYS, Behind, MovedBadly, Misshaped),
    "without": (*ALWAYS, Ahead, MovedWell, Shaped),
    "whole": (*ALWAYS, Gone, Ahead, MovedWell, Shaped),
}
"""What is installed: when the store is begun, when it is written last, when it is ended."""
