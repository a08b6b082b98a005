"""What the scripted workload is made of: documents, task definitions, tools, a scripted model.

Nothing here depends on time, chance or how often it was interrupted: a handler finds again by key
what an earlier life has made, and tells the ledger of every effect under a key of its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import attrs
import trio
from outside_ledger import Ledger

from pidurable import (
    AgentChange,
    Extension,
    Models,
    Registry,
    Retry,
    Task,
    TaskContext,
    ToolCall,
    document,
    entry,
    nothing_to_undo,
    phase,
    tool,
)
from pidurable.testing import ScriptedCall, ScriptedModel, ScriptedProvider, Step, When

# --- documents and entries --------------------------------------------------------------------


@document("w.steps", scope="session")
@attrs.define
class Steps:
    """Which steps of the host are done: written in the commit of each."""

    done: list[str] = attrs.Factory(list)


@document("w.stock", scope="session", family=True)
@attrs.define
class Stock:
    pieces: int = 0


@document("w.plan", history="rewindable", fork="as_of")
@attrs.define
class Plan:
    steps: list[str] = attrs.Factory(list)


@document("w.style", fork="current")
@attrs.define
class Style:
    tone: str = "neutral"


@document("w.mood")
@attrs.define
class Mood:
    smiles: int = 0


@document("w.terms")
@attrs.define
class OldTerms:
    text: str = ""


@document("w.terms", history="rewindable", fork="current")
@attrs.define
class Terms:
    """The same document under other terms."""

    text: str = ""


@document("w.cart")
@attrs.define
class OldCart:
    fruit: str = ""
    diary: str = ""


@document("w.cart", version=2)
@attrs.define
class Cart:
    items: dict[str, int] = attrs.Factory(dict)
    diary: str = ""

    @staticmethod
    def migrate(value: dict[str, str], from_version: int) -> dict[str, object]:
        return {"items": {value["fruit"]: 1}, "diary": value["diary"]}


@document("w.notes", scope="task")
@attrs.define
class Notes:
    lines: list[str] = attrs.Factory(list)


@entry("w.receipt")
@attrs.frozen
class Receipt:
    what: str
    cents: int


# --- tasks ------------------------------------------------------------------------------------


@attrs.frozen
class At:
    """The checkpoint of most tasks here."""

    step: int = 0


@attrs.frozen
class Paying:
    """The intent of an effect, fixed before it."""

    key: str
    cents: int


Ctx = TaskContext[str, At, str]
LISTEN = 3
"""The step at which an order begins to listen."""
SIGNALS = 3
"""So many are received, one in a commit; a fourth is never read."""


class Part(Task[str, At | Paying, str]):
    """Ends in the way that its input says: `good`, `bad`, `broken`, `wobbly` or `sleeper`."""

    name = "w.part"
    retry = Retry(on=(OSError,), tries=20, base=0.1, jitter=0.0)

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def initial(self, input: str) -> At:
        return At()

    @phase
    async def begin(self, at: At, ctx: Any) -> None:
        how, _, name = ctx.input.partition(" ")
        if how == "sleeper":
            await trio.sleep_forever()
        if how == "broken":
            raise LookupError(f"{name} is lost")
        if how == "bad":
            await ctx.fail(ValueError(f"no {name}"), detail={"name": name}, result="half")
            return
        if how == "wobbly":
            for tried in (f"try {name} 0", f"try {name} 1"):
                if not self.ledger.count(tried):
                    self.ledger.book(ctx.key(tried), tried)
                    raise OSError("not now")
        await ctx.goto(Paying(key=ctx.key("pay"), cents=len(name)))

    @phase
    async def pay(self, at: Paying, ctx: Any) -> None:
        self.ledger.book(at.key, f"pay {ctx.input}")
        async with ctx.commit() as tx:
            tx.append(ctx.conversation_id, Receipt(ctx.input, at.cents))
            tx.complete(f"paid {at.cents}")

    async def abort(self, at: At | Paying, ctx: Any) -> None:
        self.ledger.book(ctx.key("undo"), f"undo {ctx.input}")
        async with ctx.commit() as tx:
            tx.append(ctx.conversation_id, {"undone": ctx.input}, kind="w.note")
            tx.end_aborted("undone", result="nothing left")


class Order(Task[str, At, str]):
    """Joins of every policy, signals, documents, memos, and conversations of its own."""

    name = "w.order"

    def initial(self, input: str) -> At:
        return At()

    @phase
    async def step(self, at: At, ctx: Ctx) -> None:
        if at.step == 0:
            await self._all(ctx)
        elif at.step == 1:
            await self._fast(ctx)
        elif at.step == 2:
            await self._first(ctx)
        elif at.step < LISTEN + SIGNALS:
            await self._listen(ctx, at.step - LISTEN)
        else:
            await self._end(ctx)

    async def _all(self, ctx: Ctx) -> None:
        number = await ctx.memo("number", 7)
        async with ctx.commit() as tx:
            (await tx.document(Notes, ctx.task_id)).lines.append(f"order {number}")
            talk = tx.create_conversation(key="talk")
            tx.append(talk, {"order": number}, kind="w.note")
            tx.create_task(Part, "good background", conversation=talk, key="by", background=True)
            tx.fork(ctx.conversation_id, key="own fork")
            names = ("good apples", "bad pears", "wobbly plums", "broken figs")
            on = [tx.create_task(Part, name, key=name) for name in names]
            tx.wait(then=At(1), on=on)

    async def _fast(self, ctx: Ctx) -> None:
        keyed = ctx.snapshot.keyed_tasks()
        ended = await ctx.outcomes(sorted(keyed.values()))
        async with ctx.commit() as tx:
            notes = await tx.document(Notes, ctx.task_id)
            notes.lines += [outcome.status for outcome in ended]
            names = ("bad nuts", "sleeper one")
            on = [tx.create_task(Part, name, key=name) for name in names]
            tx.wait(then=At(2), on=on, policy="fail_fast")

    async def _first(self, ctx: Ctx) -> None:
        async with ctx.commit() as tx:
            tx.append_text(Notes, ctx.task_id, "/lines/0", ", told")
            names = ("good bread", "sleeper two")
            on = [tx.create_task(Part, name, key=name) for name in names]
            tx.wait(then=At(LISTEN), on=on, policy="first_success")

    async def _listen(self, ctx: Ctx, heard: int) -> None:
        async with ctx.commit() as tx:
            for name, payload in tx.receive(limit=1):
                tx.append(ctx.conversation_id, {"heard": [name, payload]}, kind="w.note")
                heard += 1
            if heard == SIGNALS:
                tx.memo("heard", heard)
                tx.goto(At(LISTEN + heard))
            else:
                tx.wait(then=At(LISTEN + heard), signals=True)

    async def _end(self, ctx: Ctx) -> None:
        notes = ctx.snapshot.document(Notes)
        async with ctx.commit() as tx:
            tx.append(ctx.conversation_id, {"notes": notes.lines if notes else []}, kind="w.note")
            tx.complete("ordered")

    async def abort(self, at: At, ctx: Ctx) -> None:
        raise AssertionError("nobody aborts it")


class Branch(Task[str, At, str]):
    """A tree of three levels; its leaves stay until they are told to go."""

    name = "w.branch"

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def initial(self, input: str) -> At:
        return At()

    @phase
    async def grow(self, at: At, ctx: Ctx) -> None:
        if len(ctx.input) == 3:
            await trio.sleep_forever()
        async with ctx.commit() as tx:
            room = tx.create_conversation(key="room")
            tx.append(room, {"room": ctx.input}, kind="w.note")
            on = [tx.create_task(Branch, f"{ctx.input}{n}", key=str(n)) for n in range(2)]
            tx.wait(then=At(1), on=on)

    async def abort(self, at: At, ctx: Ctx) -> None:
        self.ledger.book(ctx.key("fell"), f"fell {ctx.input}")
        await ctx.end_aborted("felled")


class Clocked(Task[str, At, str]):
    """Waits for a moment, and has nothing to undo."""

    name = "w.clocked"
    abort = nothing_to_undo  # type: ignore[assignment]

    def initial(self, input: str) -> At:
        return At()

    @phase
    async def wait(self, at: At, ctx: Ctx) -> None:
        if at.step:
            await ctx.complete(f"woken by {ctx.woken_by}")
        elif ctx.input == "forever":
            await ctx.wait(then=At(1), signals=True)
        else:
            await ctx.wait(then=At(1), deadline=ctx.now() + timedelta(seconds=5))


class Parked(Task[str, At, str]):
    """Raises until the machine is repaired, and is kept until somebody says so."""

    name = "w.parked"
    on_fault = "park"
    abort = nothing_to_undo  # type: ignore[assignment]

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def initial(self, input: str) -> At:
        return At()

    @phase
    async def run(self, at: At, ctx: Ctx) -> None:
        if not self.ledger.count("repair"):
            raise RuntimeError("the machine is broken")
        await ctx.complete("repaired")


class Ghost(Task[str, At, str]):
    """Waits; then its code is gone, and so there is nobody to take its abort."""

    name = "w.ghost"

    def initial(self, input: str) -> At:
        return At()

    @phase
    async def haunt(self, at: At, ctx: Ctx) -> None:
        await ctx.wait(then=At(1), signals=True)

    async def abort(self, at: At, ctx: Ctx) -> None:
        raise AssertionError("its code is gone by then")


class Grown(Task[str, At, str]):
    """Waits for a signal in its first version, and ends in its second."""

    name = "w.grown"
    abort = nothing_to_undo  # type: ignore[assignment]

    def initial(self, input: str) -> At:
        return At()

    @phase
    async def wait(self, at: At, ctx: Ctx) -> None:
        await ctx.wait(then=At(1), signals=True)


class GrownUp(Grown):
    """The second version: it stores its input anew, and what it stands at."""

    version = 2

    def migrate(self, input: Any, checkpoint: Any, from_version: int) -> Any:
        step = checkpoint["value"]["step"]
        return f"{input}, grown", {**checkpoint, "value": {"step": step + 10}}

    @phase
    async def wait(self, at: At, ctx: Ctx) -> None:
        if at.step % 10:
            await ctx.complete(ctx.input)
        else:
            await ctx.wait(then=At(at.step + 1), signals=True)


# --- agents -----------------------------------------------------------------------------------


def tools_of(ledger: Ledger) -> list[Any]:
    """A tool that may run again, one that may not, one with a sub-agent, and one that hangs."""

    @tool(replay="safe")
    async def look(call: ToolCall, what: str = "") -> str:
        """Look at something.

        Args:
            what: At what.
        """
        for number in range(3):
            await call.output(f"looking {number}\n")
            await call.sleep(0.3)
        ledger.book(call.key("look"), f"look at {what}")
        return f"saw {what}"

    @tool
    async def charge(call: ToolCall, cents: int = 0) -> str:
        """Charge somebody, which must not happen twice.

        Args:
            cents: How much.
        """
        ledger.book(call.key("charge"), f"charge {cents}", safe=False)
        await call.sleep(0.1)
        return f"charged {cents}"

    @tool(replay="safe")
    async def ask(call: ToolCall, question: str = "") -> str:
        """Ask a sub-agent.

        Args:
            question: What.
        """
        child = await call.child(key="clerk", agent=AgentChange(model="scripted/clerk", tools=[]))
        submission = await child.submit(question, request_id=call.key("question"))
        text: str = (await submission.wait()).text
        return text

    @tool(replay="safe")
    async def hang(call: ToolCall) -> str:
        """Begin, and never end."""
        ledger.hung = True
        await trio.sleep_forever()

    return [look, charge, ask, hang]


def scripted_models() -> Models:
    """The models of the workload; what they answer depends on what they are asked alone."""

    def calls(*made: ScriptedCall) -> tuple[ScriptedCall, ...]:
        return made

    def call(name: str, **arguments: Any) -> ScriptedCall:
        return ScriptedCall(name=name, arguments=arguments)

    chief = ScriptedModel(
        [
            Step(when=When(user="hello"), text="hello to you too", piece_chars=4, delay=0.15),
            Step(
                when=When(user="work", turn=0),
                text="looking",
                calls=calls(call("look", what="shelves"), call("charge", cents=250)),
            ),
            Step(when=When(user="work", turn=1), calls=calls(call("ask", question="enough?"))),
            Step(when=When(user="work", turn=2), text="all done"),
            Step(when=When(user="more", turn=0), calls=calls(call("look", what="cellar"))),
            Step(when=When(user="more", turn=1), text="nothing there"),
            Step(when=When(user="wait"), calls=calls(call("hang"))),
        ],
        name="chief",
    )
    clerk = ScriptedModel([Step(when=When(user="enough?"), text="plenty")], name="clerk")
    return Models([ScriptedProvider([chief, clerk])])


def registry(ledger: Ledger) -> Registry:
    """What the workload runs with; it installs and removes further definitions as it goes."""
    made = Registry()
    tasks = [Part(ledger), Order(), Branch(ledger), Clocked(), Parked(ledger)]
    made.install(Extension("w", tasks=tasks, tools=tools_of(ledger)))
    return made
