"""Workload W: a program that touches every kind of record, and can be run again after any crash.

    ledger = Ledger()                                   # effects, apart from the store
    play(path, ledger)                                  # open, run to the end, close: one life
    play(path, ledger, life=1)                          # again: finds all done, changes nothing

    async with opened(path, ledger, life=0, acks=acks) as harness:
        await run_workload(harness, ledger)             # the same inside of a trio run of one's own

What it promises to those who crash it:

* Run again on whatever a crash left, with the ledger as it was then, it comes to the same end:
  `canonical(storage) == EXPECTED`, `ledger.effects() == EFFECTS`, `ledger.duplicates() == []`.
  `canonical` takes any `Storage` (open one after the life, `SqliteStorage(path, create=False)`),
  and leaves out ids, moments, and all that depends on how often W was interrupted.
* `EXPECTED` is written by hand, in `workload_expected`, from what the program below says; a test
  compares it with an uninterrupted run.
* `acks` is given one `Ack` for each commit that was published: from then on somebody may have seen
  it. Pass anything with `append`: a list, or what writes to a pipe. A commit whose `flush` is true
  survives a loss of power, and with it all that were acknowledged before it; others (progress
  only) survive the death of the process.
* Everything runs in one thread, in virtual time: `play` brings a `MockClock`, and `opened` needs
  one (`trio.run(..., clock=MockClock(autojump_threshold=0))`). One life takes about half a second.
* Each life begins an hour after the last one, so that no lease of a dead holder still counts. Give
  `takeover=True` where a copy is opened whose holder seems to live.

Steps of the host are commits that carry their own name in a document, so that none is done twice;
everything else is found again by its key or its request id.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import attrs
import trio
from outside_ledger import Ledger
from trio.testing import MockClock
from workload_kinds import (
    Branch,
    Cart,
    Clocked,
    Ghost,
    Grown,
    GrownUp,
    Mood,
    OldCart,
    OldTerms,
    Order,
    Parked,
    Part,
    Plan,
    Receipt,
    Steps,
    Stock,
    Style,
    Terms,
    registry,
    scripted_models,
)

from pidurable import (
    AgentChange,
    Conversation,
    Edit,
    Extension,
    Harness,
    ImageBlock,
    TextBlock,
    UserMessage,
    open_harness,
)
from pidurable.session._seams import InlineBlocking, SeededRandomness, TrioClock
from pidurable.storage import Storage

START_US = 1_700_000_000_000_000
HOUR_US = 3_600_000_000
LIFE_SECONDS = 36_000.0
"""A life that is not over after so many virtual seconds hangs."""
PIXEL = bytes.fromhex("89504e470d0a1a0a") + b"a picture of a shelf"
LONG = "long " * 14_000
"""Over 64 KiB: it is stored as a blob."""


@attrs.frozen
class Ack:
    """One published commit."""

    seq: int
    flush: bool


class Acks(Protocol):
    """Where acknowledgements go."""

    def append(self, ack: Ack, /) -> object:
        """Take one; it is called before anybody else can act on the commit."""
        ...


@attrs.define(eq=False)
class _Acknowledging:
    """A participant that tells each published commit."""

    acks: Acks

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None: ...

    def reverted(self) -> None: ...

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...

    def committed(self, tx: Any) -> None:
        self.acks.append(Ack(tx.seq, tx.flush))


@asynccontextmanager
async def opened(
    store: str | os.PathLike[str] | Storage,
    ledger: Ledger,
    *,
    life: int = 0,
    acks: Acks | None = None,
    **options: Any,
) -> AsyncIterator[Harness]:
    """A harness that W can run in. Further options are those of `open_harness`."""
    defaults: dict[str, Any] = {
        "registry": registry(ledger),
        "models": scripted_models(),
        "clock": TrioClock(START_US + life * HOUR_US),
        "blocking": InlineBlocking(),
        "randomness": SeededRandomness(life),
    }
    async with open_harness(store, **{**defaults, **options}) as harness:
        if acks is not None:
            harness.session.participants.put_first(_Acknowledging(acks))
        yield harness


def play(
    store: str | os.PathLike[str] | Storage,
    ledger: Ledger,
    *,
    life: int = 0,
    acks: Acks | None = None,
    **options: Any,
) -> None:
    """Open a store, run the whole workload in virtual time, and close the store."""

    async def live() -> None:
        async with opened(store, ledger, life=life, acks=acks, **options) as harness:
            await run_workload(harness, ledger)

    trio.run(live, clock=MockClock(autojump_threshold=0))


async def run_workload(harness: Harness, ledger: Ledger) -> None:
    """Do all that is not done yet, and come to rest."""
    ledger.hung = False
    with trio.fail_after(LIFE_SECONDS):
        await _Workload(harness, ledger).run()


class _Workload:
    """One run of the program."""

    def __init__(self, harness: Harness, ledger: Ledger) -> None:
        self.harness = harness
        self.ledger = ledger
        self.storage = harness.session.storage
        self.root: Conversation

    async def run(self) -> None:
        self.harness.start()
        self.root = await self.harness.root()
        await self.documents()
        await self.transcripts()
        await self.orders()
        await self.tree()
        await self.clocks()
        await self.parked()
        await self.versions()
        await self.agents()
        await self.harness.wait_for_idle()
        await self.step("end", lambda tx: None)

    # --- steps ---------------------------------------------------------------------------

    def is_done(self, name: str) -> bool:
        steps = self.harness.snapshot(Steps)
        return steps is not None and name in steps.done

    async def step(self, name: str, body: Callable[[Any], Any]) -> None:
        """One commit of the host, unless an earlier life has made it."""
        if self.is_done(name):
            return
        async with self.harness.commit() as tx:
            made = body(tx)
            if isinstance(made, Awaitable):
                await made
            (await tx.document(Steps)).done.append(name)

    def task(self, key: str) -> Any:
        row = self.storage.task_by_key(None, self.root.id, key)
        assert row is not None, key
        return row

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait for something that no one event announces."""
        with trio.fail_after(600):
            while not holds():
                # Nothing changes any more where the session is poisoned.
                self.harness.check_serving()
                await trio.sleep(0.05)

    def moment(self, seconds: float) -> datetime:
        now = self.harness.session.clock.now_us()
        return datetime.fromtimestamp(now / 1e6, UTC) + timedelta(seconds=seconds)

    # --- documents, entries, forks -------------------------------------------------------

    async def documents(self) -> None:
        root = self.root.id

        async def first(tx: Any) -> None:
            for key in ("apples", "pears"):
                (await tx.document(Stock, key=key)).pieces = 12
            cart = await tx.document(OldCart, root)
            cart.fruit, cart.diary = "apples", "begun"
            (await tx.document(OldTerms, root)).text = "by word"

        async def second(tx: Any) -> None:
            (await tx.document(Cart, root)).items["pears"] = 2
            (await tx.document(Stock, key="pears")).pieces -= 2
            (await tx.document(Terms, root)).text = "in writing"

        await self.step("documents 1", first)
        await self.step("documents 2", second)
        for number in range(6):
            # Its changes soon take more than its base and 4 KiB, so that a new base is written.
            text = f"; {number} " + "." * 1_500
            await self.step(f"diary {number}", lambda tx, t=text: _append(tx, root, t))
        await self.step("retire", lambda tx: tx.retire(Stock, key="apples"))

        async def anew(tx: Any) -> None:
            (await tx.document(Stock, key="apples")).pieces = 3
            ops = [{"op": "add", "path": "/items/plums", "value": 5}]
            tx.patch(Cart, root, ops)

        await self.step("anew", anew)

    async def transcripts(self) -> None:
        root = self.root.id

        async def say(tx: Any, text: str, **options: Any) -> int:
            (await tx.document(Plan, root)).steps.append(text)
            (await tx.document(Mood, root)).smiles += 1
            message = UserMessage(blocks=(TextBlock(text=text),), at_us=0)
            number: int = tx.append(
                root, {"said": text}, kind="w.said", messages=[message], **options
            )
            return number

        async def picture(tx: Any) -> None:
            block = ImageBlock(blob=tx.put_blob(PIXEL), media_type="image/png")
            tx.append(root, kind="w.seen", messages=[UserMessage(blocks=(block,), at_us=0)])
            tx.append(root, Receipt("long", 1), messages=())
            tx.append(root, {"long": LONG}, kind="w.note")
            (await tx.document(Style, root)).tone = "frugal"

        for text in ("a hut", "a tent", "a castle"):
            await self.step(f"say {text}", lambda tx, t=text: say(tx, t))
        await self.step("picture", picture)
        said = [row.id for row in self.storage.entries(root) if row.kind == "w.said"]
        hut, tent = said[:2]
        await self.step("edit", lambda tx: say(tx, "no hut", edits=[Edit(target=hut)]))
        await self.step("fork", lambda tx: tx.fork(root, tent, key="fork"))
        await self.step("head", lambda tx: say(tx, "forget that", head=0))
        row = self.storage.conversation_by_key(None, "fork")
        assert row is not None

        async def camp(tx: Any) -> None:
            (await tx.document(Plan, row.id)).steps.append("a campfire")
            tx.append(row.id, {"said": "a campfire"}, kind="w.said")

        await self.step("camp", camp)
        await self.step("fork of the fork", lambda tx: tx.fork(row.id, key="second fork"))

    # --- tasks ---------------------------------------------------------------------------

    def make(self, kind: type[Any], input: str, key: str, **options: Any) -> Callable[[Any], Any]:
        return lambda tx: tx.create_task(kind, input, conversation=self.root.id, key=key, **options)

    async def orders(self) -> None:
        await self.step("order", self.make(Order, "one", "order"))
        order = self.task("order").id

        def tell(tx: Any) -> None:
            tx.signal(order, "news", {"n": 1}, key="a")
            tx.signal(order, "news", {"n": 1}, key="a")
            tx.signal(order, "news", {"n": 2}, key="b")

        def tell_more(tx: Any) -> None:
            tx.signal(order, "more", [3])
            tx.signal(order, "too late", None)

        await self.step("tell", tell)
        # The first two are read by now, or they are read before these.
        await self.step("tell more", tell_more)
        await self.harness.wait_for_task(order)
        await self.step("background", self.make(Part, "good ground", "ground", background=True))
        await self.harness.wait_for_task(self.task("ground").id)

    async def tree(self) -> None:
        await self.step("tree", self.make(Branch, "b", "tree"))
        top = self.task("tree").id

        def has_grown() -> bool:
            rows = [row for row in self.storage.live_tasks() if row.kind == Branch.name]
            return self.task("tree").ended_us is not None or (
                len(rows) == 7 and all(row.started_us is not None for row in rows)
            )

        if not self.is_done("fell"):
            await self.until("the tree has grown", has_grown)
        await self.step("fell", lambda tx: tx.abort_task(top, "no longer wanted"))
        await self.harness.wait_for_task(top)

    async def clocks(self) -> None:
        await self.step("clock", self.make(Clocked, "timer", "clock"))
        await self.step(
            "deadline",
            lambda tx: self.make(Clocked, "forever", "late", deadline=self.moment(20))(tx),
        )
        for key in ("clock", "late"):
            await self.harness.wait_for_task(self.task(key).id)

    async def parked(self) -> None:
        await self.step("parked", self.make(Parked, "machine", "parked"))
        id = self.task("parked").id
        if not self.is_done("repaired"):
            await self.until(
                "it is parked",
                lambda: self.task("parked").blocked == "faulted" or self.task("parked").status == 4,
            )
            self.ledger.book("the mechanic", "repair")
        await self.step("repaired", lambda tx: tx.retry_task(id))
        await self.harness.wait_for_task(id)

    async def versions(self) -> None:
        """Code that goes away, and code that comes in a newer version."""
        installed = self.harness.registry
        row = self.storage.task_by_key(None, self.root.id, "ghost")
        # One that never began would need no code for its abort.
        if row is None or (row.started_us is None and not self.is_done("exorcise")):
            installed.install(Extension("ghosts", tasks=[Ghost()]))
        await self.step("ghost", self.make(Ghost, "boo", "ghost"))
        if "ghosts" in installed.snapshot.extensions:
            await self.until("it haunts", lambda: self.task("ghost").status >= 2)
            installed.uninstall("ghosts")
        ghost = self.task("ghost").id
        await self.step("exorcise", lambda tx: tx.abort_task(ghost, "begone"))
        await self.harness.wait_for_task(ghost)

        if not self.is_done("grown"):
            installed.install(Extension("growing", tasks=[Grown()]))
        await self.step("grown", self.make(Grown, "child", "grown"))
        if "growing" in installed.snapshot.extensions:
            await self.until("it waits", lambda: self.task("grown").status >= 2)
        installed.install(Extension("growing", tasks=[GrownUp()]))
        grown = self.task("grown").id
        await self.step("grow up", lambda tx: tx.signal(grown, "grow up"))
        await self.harness.wait_for_task(grown)

    # --- agents --------------------------------------------------------------------------

    async def talk(self, key: str, tools: list[str]) -> Conversation:
        await self.step(key, lambda tx: tx.create_conversation(key=key, principal="someone"))
        row = self.storage.conversation_by_key(None, key)
        assert row is not None
        talk = self.harness.conversation(row.id)
        await talk.configure(AgentChange(model="scripted/chief", tools=tools))
        return talk

    async def agents(self) -> None:
        chat = await self.talk("chat", ["look", "charge", "ask"])
        await (await chat.submit("hello", request_id="r1")).wait()
        for text, request in (("work", "r2"), ("more", "r3")):
            # The second is queued behind the first.
            await chat.submit(text, request_id=request)
        for request in ("r2", "r3"):
            row = self.storage.submission_by_request(chat.id, request)
            assert row is not None
            await self.harness.submission(row.id).wait()

        side = await self.talk("side", ["hang"])
        hanging = await side.submit("wait", request_id="r1")
        queued = await side.submit("never mind", request_id="r2")

        def is_settled(id: int) -> bool:
            row = self.storage.submission(id)
            return row is not None and row.status in ("done", "unanswered")

        await self.until("it hangs", lambda: self.ledger.hung or is_settled(hanging.id))
        if not is_settled(hanging.id) or not is_settled(queued.id):
            await side.abort("changed my mind")
        await hanging.wait()
        await queued.wait()
        await side.wait_for_idle()


async def _append(tx: Any, conversation: int, text: str) -> None:
    tx.append_text(Cart, conversation, "/diary", text)
