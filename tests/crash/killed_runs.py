"""Run an example, kill it at its k-th commit, look at the store, resume it: for every k.

A program of its own, started by the test as `python killed_runs.py EXAMPLE FOLDER`. It imports once
and forks for each life, since starting an interpreter costs more than all the rest. Each line that
it prints is the JSON of one kill; the first one is the undisturbed run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import trio

from pidurable import open_reader
from pidurable.storage import SqliteStorage
from pidurable.testing import Failpoints, KillAt

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from bank import Bank  # noqa: E402 - found beside the examples
from shop import Card, Payment, ReceiptEntry, open_shop  # noqa: E402

CART = [Card("4242", 1999), Card("4343", 500), Card("5555", 800), Card("4000-0002", 100)]
POINTS = ("commit.before", "commit.after")
KILLS_MAX = 200


def load(name: str) -> ModuleType:
    """Import an example, whose name is no identifier."""
    identifier = name.removesuffix(".py").lstrip("0123456789_")
    spec = importlib.util.spec_from_file_location(identifier, EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where annotations are looked up
    spec.loader.exec_module(module)
    return module


class WatchedBank(Bank):
    """A bank that declines only once the store says what the example wants to show.

    The example lets time decide; here two payments have to be completed and the slow one charged
    before the bank says no, so that each run must have the same end.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "ledger")
        self.store = folder / "shop.sqlite"

    async def answer(self, card: str) -> None:
        if card == "5555":
            await trio.sleep_forever()
        while card == "4000-0002" and not await self._others_are_done():  # noqa: ASYNC110
            await trio.sleep(0.002)

    async def _others_are_done(self) -> bool:
        async with open_reader(self.store) as reader:
            tasks = await reader.tasks(kind="shop.payment")
        completed = [t for t in tasks if t.outcome is not None and t.outcome.status == "completed"]
        return len(completed) == 2 and any(" 5555 " in line for line in self.lines())


async def pay(folder: Path, **options: Any) -> None:
    await load("01_payment.py").pay(folder, Bank(folder / "ledger"), CART[0], **options)


async def check_out(folder: Path, **options: Any) -> None:
    await load("02_checkout.py").check_out(folder, WatchedBank(folder), CART, **options)


async def leave(folder: Path, **options: Any) -> None:
    """A payment is aborted while its bank takes for ever."""
    bank = WatchedBank(folder)
    async with open_shop(folder, bank, **options) as shop:
        task_id = await (await shop.root()).create_task(Payment, CART[2], key="order-5555")
        while not bank.lines():  # noqa: ASYNC110 - another process may have written it
            await trio.sleep(0.002)
        await shop.abort_task(task_id)
        await shop.wait_for_task(task_id)


RUNS: dict[str, Callable[..., Any]] = {"01_payment": pay, "02_checkout": check_out, "leave": leave}


class Watched(Failpoints):
    """Note how far the store is at each commit that is durable, before anything dies there."""

    def __init__(self, folder: Path, kill: KillAt) -> None:
        self.folder = folder
        self.kill = kill

    def hit(self, name: str) -> None:
        if name == "commit.after":
            storage = SqliteStorage(self.folder / "shop.sqlite", create=False, read_only=True)
            with (self.folder / "durable").open("a") as file:
                file.write(f"{storage.head().seq}\n")
            storage.close()
        self.kill.hit(name)


def live(run: Callable[..., Any], folder: Path, *, kill: KillAt | None = None) -> int:
    """Live one life in a fork; returns 0, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with contextlib.redirect_stdout(sys.stderr):
                options = {} if kill is None else {"failpoints": Watched(folder, kill)}
                trio.run(lambda: run(folder, **options))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)  # the fork must not run what is below
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"{folder.name}: exit code {code}"
    return code


async def look(folder: Path) -> dict[str, Any]:
    """What the store and the books say, without ids, keys and times."""
    if not (folder / "shop.sqlite").exists():
        return {"seq": 0, "halves": [], "end": None, "strangers": [], "keys": []}
    async with open_reader(folder / "shop.sqlite") as reader:
        seq = (await reader.head()).seq
        tasks = await reader.tasks()
        entries = [e for c in await reader.conversations() for e in await reader.entries(c.id)]
    receipts = [entry.by_task for entry in entries if entry.kind == "shop.receipt"]
    ended = {task.id: task.outcome.status for task in tasks if task.outcome is not None}
    halves = [
        f"payment {task.id} is {ended.get(task.id)} with {receipts.count(task.id)} receipts"
        for task in tasks
        if task.kind == "shop.payment"
        and receipts.count(task.id) != (ended.get(task.id) == "completed")
    ]
    for checkout in (task for task in tasks if task.kind == "shop.checkout"):
        payments = [task for task in tasks if task.owner == checkout.id]
        refunds = [task for task in tasks if task.kind == "shop.refund"]
        if len(payments) != (0 if checkout.phase == "begin" else len(CART)):
            halves.append(f"the checkout is at {checkout.phase} with {len(payments)} payments")
        paid = [task for task in payments if ended.get(task.id) == "completed"]
        if len(refunds) != (len(paid) if ended.get(checkout.id) == "failed" else 0):
            halves.append(f"{len(refunds)} refunds for a checkout {ended.get(checkout.id)}")
    end = {
        "tasks": sorted(
            [task.kind, task.key or "", str(ended.get(task.id)), str(_said(task.outcome))]
            for task in tasks
        ),
        "receipts": sorted(entry.read(ReceiptEntry).id for entry in entries),
        "books": sorted(_without_key(line) for line in Bank(folder / "ledger").lines()),
    }
    keys = [
        line.split(" ")[1] for line in Bank(folder / "ledger").lines() if line.startswith("charge ")
    ]
    known = {f"{task.id}:charge" for task in tasks}
    strangers = [key for key in keys if key.partition(":")[2] not in known]
    return {"seq": seq, "halves": halves, "end": end, "strangers": strangers, "keys": keys}


def durable(folder: Path) -> int:
    """How far the store had been known to be when the process died."""
    notes = folder / "durable"
    return int(notes.read_text().splitlines()[-1]) if notes.exists() else 0


def _said(outcome: Any) -> str:
    if outcome is None:
        return "live"
    if outcome.error is not None:
        return str(outcome.error.message)
    if isinstance(outcome.result, dict):
        return str(outcome.result.get("id"))
    return str(outcome.reason or outcome.result)


def _without_key(line: str) -> str:
    what, _, rest = line.split(" ", 2)
    return f"{what} {rest}"


def main(example: str, folder: Path) -> None:
    run = RUNS[example]
    undisturbed = folder / "undisturbed"
    undisturbed.mkdir()
    assert live(run, undisturbed) == 0
    print(json.dumps({"undisturbed": trio.run(look, undisturbed)}), flush=True)
    for point in POINTS:
        for number in range(1, KILLS_MAX):
            place = folder / f"{point}-{number}"
            place.mkdir()
            if live(run, place, kill=KillAt(point, nth=number)) == 0:
                break  # this run has fewer commits: every one was killed at
            killed = {**trio.run(look, place), "durable": durable(place)}
            again = live(run, place, kill=KillAt("commit.after", nth=1 + number % 4))
            if again != 0:
                assert live(run, place) == 0
            report = {"point": point, "number": number, "kills": 2 if again else 1}
            resumed = trio.run(look, place)
            print(json.dumps({**report, "killed": killed, "resumed": resumed}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
