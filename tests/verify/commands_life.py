"""The processes of the proof of commands: a holder that works, and outsiders that ask it for more.

Each writes a log of JSON lines. A process may stop or kill itself at a point that it draws: an
outsider inside of handing in (between the calls of the file system), the holder around the commit
of an answer. The parent stops, continues and kills them from outside besides.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import trio

from pidurable import (
    Extension,
    Pattern,
    Registry,
    Settings,
    Task,
    TaskContext,
    entry,
    nothing_to_undo,
    open_client,
    open_harness,
    phase,
)
from pidurable.agent._permissions import Permissions
from pidurable.errors import (
    AlreadyDecidedError,
    NotFoundError,
    PidurableError,
    StorageHeldError,
    UnknownTaskError,
    WaitTimeoutError,
)
from pidurable.harness._commands import Commands
from pidurable.session._seams import Failpoints

LIFE_SECONDS_MAX = 600.0
AT_ONCE = 8
"""Commands that an outsider has under way at a time."""
OWN_SECONDS = 0.004
"""Between two commits of the holder's own."""
TIMEOUT_SECONDS = (0.0, 0.05, 5.0, 5.0)
STOP_CHANCE, KILL_CHANCE = 0.004, 0.0004
"""Of an outsider, at each call of the file system by which it hands in."""
DIE_CHANCE = 0.02
"""Of the holder, at each point around the commit of an answer."""


@entry("verify.seen")
@attrs.frozen
class Seen:
    """A signal that a task has taken."""

    key: str


@attrs.frozen
class Waits:
    """For more."""


class Counter(Task[str, Waits, str]):
    """Writes down every signal that it takes, in the commit that takes it."""

    name = "verify.counter"
    abort = nothing_to_undo

    def initial(self, input: str) -> Waits:
        return Waits()

    @phase
    async def waits(self, at: Waits, ctx: TaskContext[str, Waits, str]) -> None:
        async with ctx.commit() as tx:
            for _, key in tx.receive():
                tx.append(ctx.conversation_id, Seen(key))
            tx.wait(then=Waits(), signals=True)


class Log:
    """An append-only file of JSON lines, each written at once, so that a kill cuts none."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, **facts: Any) -> None:
        os.write(self._handle, json.dumps(facts).encode() + b"\n")


# --- the holder -------------------------------------------------------------------------------


class DieAt(Failpoints):
    """Kills the process around the commits of answers, if it is drawn."""

    def __init__(self, draw: random.Random, chance: float) -> None:
        self._draw = draw
        self._chance = chance

    def hit(self, name: str) -> None:
        chance = self._chance if name == "command.answered" else self._chance / 20
        if name in ("command.answered", "commit.before", "commit.after"):
            self.die(chance)

    def die(self, chance: float) -> None:
        if self._draw.random() < chance:
            os.kill(os.getpid(), signal.SIGKILL)


def plant_answer_apart(points: DieAt) -> None:
    """The bug: effect and answer are two commits."""
    pending: list[tuple[Any, str]] = []
    answer, run = Commands._answer, Commands._apply_run

    def later(self: Commands, tx: Any, command: Any, text: str) -> None:
        pending.append((command, text))

    async def apart(self: Commands, each: Any, trouble: Any) -> None:
        await run(self, each, trouble)
        points.die(points._chance * 5)
        for command, text in pending:
            await self._harness._runtime.commit(
                lambda tx, command=command, text=text: answer(self, tx, command, text)
            )
        pending.clear()

    Commands._answer = later  # type: ignore[method-assign]
    Commands._apply_run = apart  # type: ignore[method-assign]


def plant_forget_first(points: DieAt) -> None:
    """The bug: the box forgets a command before its answer is durable."""
    apply = Commands._apply_taken

    async def first(self: Commands) -> int:
        for each in self._taken:
            self._harness.session.storage.command_box.forget(each.name)
        points.die(points._chance * 5)
        return await apply(self)

    Commands._apply_taken = first  # type: ignore[method-assign]


def plant_decide_again(points: DieAt) -> None:
    """The bug: whoever decides does not look whether somebody was faster."""
    Permissions._check_open = lambda *_: None  # type: ignore[method-assign,assignment]


PLANTS: dict[str, Callable[[DieAt], None]] = {
    "decide again": plant_decide_again,
    "answer apart": plant_answer_apart,
    "forget first": plant_forget_first,
}


async def hold(store: Path, log: Log, seed: int, dies: bool, plant: str | None) -> None:
    """Hold the store, commit every few milliseconds, and say how long each commit took."""
    points = DieAt(random.Random(seed), DIE_CHANCE if dies else 0.0)
    if plant is not None:
        PLANTS[plant](points)
    registry = Registry()
    registry.install(Extension("verify", tasks=[Counter()]))
    # Who dies in the middle of starting must not be taken for the work that killed it.
    settings = Settings(recoveries_max=10_000)
    with trio.move_on_after(LIFE_SECONDS_MAX):
        while True:
            try:
                async with open_harness(
                    store,
                    registry=registry,
                    failpoints=points,
                    settings=settings,
                    # Processes die here, not the machine; a flush would only time the disk.
                    durability="process",
                ) as harness:
                    harness.start()
                    root = await harness.root()
                    log.note(what="holds", pid=os.getpid())
                    while True:
                        began = time.monotonic()
                        async with harness.commit() as tx:
                            tx.append(root.id, None, kind="verify.own")
                        ended = time.monotonic()
                        log.note(what="own", at=ended, seconds=ended - began)
                        await trio.sleep(OWN_SECONDS)
            except StorageHeldError:
                await trio.sleep(0.02)


# --- an outsider ------------------------------------------------------------------------------


def stop_inside_calls(draw: random.Random) -> None:
    """Stop or kill this process at some of the calls by which commands are handed in."""

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def odd(*args: Any, **named: Any) -> Any:
            for place in range(2):
                drawn = draw.random()
                if drawn < STOP_CHANCE:
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif drawn < STOP_CHANCE + KILL_CHANCE:
                    os.kill(os.getpid(), signal.SIGKILL)
                if place == 0:
                    given = call(*args, **named)
            return given

        return odd

    for name in ("rename", "fsync"):
        setattr(os, name, wrapped(getattr(os, name)))


async def ask(
    store: Path, log: Log, who: int, commands: list[int], seed: int, requests: list[int]
) -> None:
    """Hand in commands, some at a time, and say what was told of each.

    Every outsider decides the same permission requests, in the same order: one of them is first.
    """
    draw = random.Random(seed)
    stop_inside_calls(random.Random(seed + 1))
    waiting = iter(commands)
    async with open_client(store) as client:
        tasks = [task.id for task in await client.reader.tasks(kind=Counter.name, live=True)]
        root = (await client.reader.conversations())[0].id

        async def one(number: int) -> None:
            key = f"{who}.{number}"
            timeout = draw.choice(TIMEOUT_SECONDS)
            kind = ("fork", "bad")[number % 20 // 10] if number % 10 == 0 else "signal"
            request = requests[number // 10 % len(requests)]
            if number % 10 == 5:
                kind = "decide"
            log.note(what="asks", key=key, kind=kind, request=request)
            given: Any = None
            try:
                if kind == "fork":
                    given = await client.fork(root, key=key, timeout=timeout)
                elif kind == "decide":
                    # A pattern gives a grant besides, which could be given twice.
                    decision = Pattern("*")
                    await client.decide(request, decision, by=key, key=key, timeout=timeout)
                elif kind == "bad":
                    await client.abort_task(1, key=key, timeout=timeout)
                else:
                    task = tasks[number % len(tasks)]
                    # Not `signal`: the key of the signal would hide that it was applied twice.
                    await client.signal_tasks([task], "see", key, key=key, timeout=timeout)
            except (UnknownTaskError, AlreadyDecidedError):
                log.note(what="answered", key=key, given="refused")
            except WaitTimeoutError:
                log.note(what="not seen", key=key)
                if draw.random() < 0.3:
                    log.note(what="withdraws", key=key)
                    try:
                        log.note(what="withdrawn", key=key, certain=await client.withdraw(key))
                    except NotFoundError:
                        log.note(what="withdrawn", key=key, certain=None)
            except PidurableError as error:
                log.note(what="failed", key=key, error=f"{type(error).__name__}: {error}")
            else:
                log.note(what="answered", key=key, given=given)

        async def some() -> None:
            for number in waiting:
                await one(number)

        with trio.move_on_after(LIFE_SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                for _ in range(AT_ONCE):
                    nursery.start_soon(some)
            log.note(what="done", who=who)


def main(given: dict[str, Any]) -> None:
    """Be one of the processes, as the parent says in JSON."""
    store, log = Path(given["store"]), Log(Path(given["log"]))
    if given["role"] == "holder":
        trio.run(hold, store, log, given["seed"], given["dies"], given["plant"])
    else:
        numbers = (given["who"], given["commands"], given["seed"])
        trio.run(ask, store, log, *numbers, given["requests"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
