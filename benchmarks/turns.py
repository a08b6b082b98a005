"""What does a turn cost, and what does a tool call, when the model answers at once?

A turn is an input, an answer that calls tools, their results, and the answer that ends the run,
waited for by whoever asked, with a flush of the disk for every commit. It is measured alone, in a
conversation that is new and in one of thousands of entries; with one call and with many, whose
difference is what one call takes; and with a second round, which is what one more request takes.
The reference is the same number of commits by hand, one after the other: an entry and a checkpoint
each. Then 8,000 calls that one call makes at once, 1,000 conversations at once, and a transcript of
100,000 entries, in a process of its own that opens it, submits, and sends the first request.

`speed` is that of this machine, against the one on which the targets were set: a turn that takes
10 ms at speed 0.6 would take about 6 there.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from _processes import Process, resident_bytes, serve, tell
from _raw import RawStore, Rows, Stopwatch, Table, interleave
from _speed import speed
from _transcripts import TURN, message_of, messages_text, seed_transcripts

from pidurable import (
    AgentChange,
    AssistantMessage,
    Conversation,
    Done,
    Extension,
    Harness,
    ModelRequest,
    Models,
    Registry,
    Settings,
    StreamEvent,
    TextBlock,
    TextDelta,
    ToolCall,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
    open_harness,
    tool,
)
from pidurable.records._codec import Codec
from pidurable.session._seams import SystemClock
from pidurable.storage import EntryRow, Op

ROUNDS = 5
TURNS = 30
SHORT_TURNS = 8
MANY_CALLS = 33
LONG_ENTRIES = 5_000
CONVERSATIONS = 1_000
SHORT_CONVERSATIONS = 100
NESTED = 8_000
SHORT_NESTED = 500
HISTORY = 100_000
SHORT_HISTORY = 10_000
MODEL = "bench/model"
SPEED = "speed of this machine, see _speed.py"
ANSWER = "That is done, and this is what there is to say about it."
_TOGETHER = 100


class AtOnce:
    """A provider that answers at once, as the last input asks: "rounds calls nested"."""

    name = "bench"

    def __init__(self) -> None:
        self.requests = 0
        self.asked = trio.Event()

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        self.requests += 1
        self.asked.set()
        async with aclosing(self._answer(request)) as events:
            yield events

    async def _answer(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        await trio.lowlevel.checkpoint()
        calls, nested = _calls_due(request)
        if calls == 0:
            yield TextDelta(ANSWER)
        call = ToolCallBlock(name="look", arguments={"path": "a.txt"})
        if nested:
            call = ToolCallBlock(name="spread", arguments={"count": nested})
        yield Done(
            AssistantMessage(
                blocks=(call,) * calls or (TextBlock(text=ANSWER),),
                status="complete",
                stop_reason="tool_use" if calls else "stop",
                model="bench",
                usage=Usage(requests=1, input_tokens=100, output_tokens=20),
                at_us=0,
            )
        )


def _calls_due(request: ModelRequest) -> tuple[int, int]:
    """How many calls the next answer makes, as the last input says, and how many each of those."""
    rounds = 0
    within = False
    for item in reversed(request.messages):
        if isinstance(item.message, UserMessage):
            [block] = item.message.blocks
            assert isinstance(block, TextBlock)
            wanted, calls, nested = map(int, block.text.split())
            return calls if rounds < wanted else 0, nested
        is_result = isinstance(item.message, ToolResultMessage)
        rounds += is_result and not within
        within = is_result
    raise RuntimeError("a request without an input")


@tool
async def look(path: str) -> str:
    """Look at a file.

    Args:
        path: Which.
    """
    return f"{path} is empty"


@tool
async def spread(count: int, call: ToolCall) -> str:
    """Look at many files at once.

    Args:
        count: How many.
    """

    async def one(number: int) -> None:
        result = await call.execute_tool("look", {"path": f"{number}.txt"}, key=str(number))
        if result.is_error:
            raise RuntimeError(result.text)

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)
    return "all are empty"


@asynccontextmanager
async def open_bench(
    path: Path, provider: AtOnce, settings: Settings | None = None
) -> AsyncIterator[Harness]:
    registry = Registry()
    registry.install(Extension("bench", tools=[look, spread]))
    async with open_harness(
        path, models=Models([provider]), registry=registry, settings=settings
    ) as harness:
        yield harness


async def ask(conversation: Conversation, rounds: int, calls: int, nested: int = 0) -> None:
    """One turn, until it is answered."""
    submission = await conversation.submit(f"{rounds} {calls} {nested}")
    if (await submission.wait()).text != ANSWER:
        raise RuntimeError("the answer is another one")


@attrs.define
class Cost:
    """Of one turn."""

    ms: float
    commits: float


async def measured(
    harness: Harness, conversation: Conversation, turns: int, *, rounds: int = 1, calls: int = 1
) -> Cost:
    """The mean of some turns, one after the other."""
    before, watch = harness.session.line.published_seq, Stopwatch()
    for _ in range(turns):
        await ask(conversation, rounds, calls)
    commits = harness.session.line.published_seq - before
    return Cost(watch.seconds() * 1e3 / turns, commits / turns)


class RawTurns:
    """As many commits by hand, one after the other: an entry of about 300 B and a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.store = RawStore(path, full=True)
        self._codec = Codec()
        self._clock = SystemClock()
        self._next_id = 0

    def _rows(self, number: int) -> Rows:
        self._next_id += 1
        text = messages_text([message_of(number % TURN, self._next_id)])
        now = self._clock.now_us()
        entry = EntryRow(self._next_id, 1, number, "bench", None, None, None, text, None, now)
        return [(Op.ENTRY, entry), (Op.CHECKPOINT, (1, "call", '{"arguments": {}}', now))]

    def commits(self, count: int) -> float:
        """Milliseconds of so many."""
        watch = Stopwatch()
        for number in range(count):
            self.store.commit([lambda number=number: self._rows(number)])  # type: ignore[misc]
        return watch.seconds() * 1e3

    def grouped(self, count: int, group: int) -> float:
        """Milliseconds of so many in transactions of `group`."""
        watch = Stopwatch()
        for first in range(0, count, group):
            self.store.commit(
                (lambda number=number: self._rows(number))  # type: ignore[misc]
                for number in range(first, first + group)
            )
        return watch.seconds() * 1e3


async def measure_turns(folder: Path, table: Table, turns: int) -> None:
    """One conversation at a time."""
    path = folder / "turns.sqlite"
    [long] = seed_transcripts(path, [LONG_ENTRIES])
    raw = RawTurns(folder / "raw.sqlite")
    async with open_bench(path, AtOnce()) as harness:
        agent = AgentChange(model=MODEL)
        grown = harness.conversation(long)
        await grown.configure(AgentChange(model=MODEL))
        await measured(harness, grown, 3)
        first = await harness.create_conversation(agent=agent)
        await measured(harness, first, 3)

        async def product(_: int) -> None:
            new = await harness.create_conversation(agent=agent)
            one = await measured(harness, new, turns)
            table.add("turn, ms", one.ms)
            table.add("turn, commits", one.commits)
            many = await measured(harness, new, max(1, turns // 5), calls=MANY_CALLS)
            table.add("call more in a round, ms", (many.ms - one.ms) / (MANY_CALLS - 1))
            table.add(
                "call more in a round, commits", (many.commits - one.commits) / (MANY_CALLS - 1)
            )
            again = await measured(harness, new, turns, rounds=2)
            table.add("round more, ms", again.ms - one.ms)
            table.add("round more, commits", again.commits - one.commits)
            late = await measured(harness, grown, turns)
            table.add("turn at 5,000 entries, ms", late.ms)

        async def reference(_: int) -> None:
            count = round(table.median("turn, commits")) if table.has("turn, commits") else 10
            table.add("raw commits of a turn, ms", raw.commits(count * turns) / turns)

        async def machine(_: int) -> None:
            table.add(SPEED, await speed())

        await interleave(ROUNDS, product, reference, machine)
    raw.store.close()


async def measure_nested(folder: Path, table: Table, calls: int) -> None:
    """One call that makes many at once, over the same number of commits by hand in groups of 32."""
    raw = RawTurns(folder / "raw_nested.sqlite")
    async with open_bench(folder / "nested.sqlite", AtOnce()) as harness:
        conversation = await harness.create_conversation(agent=AgentChange(model=MODEL))
        await ask(conversation, 1, 1, 100)

        async def product(_: int) -> None:
            before, watch = harness.session.line.published_seq, Stopwatch()
            await ask(conversation, 1, 1, calls)
            table.add("nested call, ms", watch.seconds() * 1e3 / calls)
            commits = harness.session.line.published_seq - before
            table.add("nested call, commits", commits / calls)

        async def reference(_: int) -> None:
            count = 3 * calls
            table.add("raw commits of a nested call, ms", raw.grouped(count, 32) / calls)

        async def machine(_: int) -> None:
            table.add(SPEED, await speed())

        await interleave(3, product, reference, machine)
    raw.store.close()


# --- many at once -----------------------------------------------------------------------------


async def hold(path: Path) -> None:
    """The role of a process: let so many conversations have a turn at once."""
    settings = Settings(running_max=3 * CONVERSATIONS)
    async with open_bench(path, AtOnce(), settings) as harness:
        agent = AgentChange(model=MODEL)
        conversations: list[Conversation] = []

        async def answer(request: str) -> dict[str, Any]:
            wanted = int(request)
            while len(conversations) < wanted:
                conversations.append(await harness.create_conversation(agent=agent))
            before, watch = harness.session.line.published_seq, Stopwatch()
            async with trio.open_nursery() as nursery:
                for conversation in conversations[:wanted]:
                    nursery.start_soon(ask, conversation, 1, 1)
            seconds = watch.seconds()
            commits = harness.session.line.published_seq - before
            await harness.wait_for_idle()
            return {"seconds": seconds, "commits": commits, "bytes": resident_bytes()}

        await serve(answer)


def measure_many(folder: Path, table: Table, count: int) -> None:
    for number in range(2):
        with Process(__file__, "--hold", folder / f"many{number}.sqlite") as process:
            # The first hundred bring in what is needed once.
            before = process.ask(str(min(_TOGETHER, count // 2)))
            first = process.ask(str(count))
            again = process.ask(str(count))
            process.finish()
        table.add(f"{count:,} conversations, turns/s", count / again["seconds"])
        new = count - min(_TOGETHER, count // 2)
        held = (first["bytes"] - before["bytes"]) / new / 1024
        table.add("a conversation that had a turn, KiB", held)


# --- a long transcript ------------------------------------------------------------------------


async def first_request(path: Path, conversation: int) -> dict[str, Any]:
    """Seconds to open a store, submit, and send the request; and of its two parts."""
    provider = AtOnce()
    watch = Stopwatch()
    async with open_bench(path, provider) as harness:
        opened = watch.seconds()
        talk = harness.conversation(conversation)
        await talk.configure(AgentChange(model=MODEL))
        submission = await talk.submit("0 0 0")
        submitted = watch.seconds()
        await provider.asked.wait()
        requested = watch.seconds()
        await submission.wait()
        second = Stopwatch()
        await ask(talk, 0, 0)
        return {
            "opened": opened,
            "submitted": submitted,
            "requested": requested,
            "next_ms": second.seconds() * 1e3,
        }


def measure_long(folder: Path, table: Table, entries: int) -> None:
    path = folder / "long.sqlite"
    [conversation] = seed_transcripts(path, [entries])
    for _ in range(3):
        with Process(__file__, "--first", path, conversation) as process:
            found = process.hear()
            process.finish()
        table.add(f"{entries:,} entries, open, s", found["opened"])
        table.add(f"{entries:,} entries, first request, s", found["requested"])
        table.add(f"{entries:,} entries, next turn without calls, ms", found["next_ms"])


def measure(folder: Path, *, short: bool) -> None:
    table = Table()
    trio.run(measure_turns, folder, table, SHORT_TURNS if short else TURNS)
    trio.run(measure_nested, folder, table, SHORT_NESTED if short else NESTED)
    count = SHORT_CONVERSATIONS if short else CONVERSATIONS
    measure_many(folder, table, count)
    entries = SHORT_HISTORY if short else HISTORY
    measure_long(folder, table, entries)
    table.show()
    grown = table.ratio("turn at 5,000 entries, ms", "turn, ms")
    print(
        f"turns: turn_ms={table.median('turn, ms'):.2f}"
        f" turn_commits={table.median('turn, commits'):.1f}"
        f" turn_raw={table.ratio('turn, ms', 'raw commits of a turn, ms'):.2f}"
        f" tool_ms={table.median('call more in a round, ms'):.2f}"
        f" tool_commits={table.median('call more in a round, commits'):.1f}"
        f" round_ms={table.median('round more, ms'):.2f}"
        f" round_commits={table.median('round more, commits'):.1f}"
        f" n_ratio={grown:.2f}"
        f" nested_ms={table.median('nested call, ms'):.2f}"
        f" nested_raw={table.ratio('nested call, ms', 'raw commits of a nested call, ms'):.2f}"
        f" conversations={table.median(f'{count:,} conversations, turns/s'):.0f}"
        f" conversation_kib={table.median('a conversation that had a turn, KiB'):.0f}"
        f" first_request_s={table.median(f'{entries:,} entries, first request, s'):.2f}"
        f" speed={table.median(SPEED):.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="less of everything")
    parser.add_argument("--hold", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    # As the command line has it, in all processes and for the reference too: thousands of live
    # objects are no garbage, and looking for it among them would take a third of the time.
    # (The type checkers take the benchmark beside this one for the module.)
    gc.set_threshold(10_000, 10, 10)  # type: ignore[attr-defined]
    if given.hold is not None:
        trio.run(hold, given.hold)
        sys.exit()
    if given.first is not None:
        tell(trio.run(first_request, Path(given.first[0]), int(given.first[1])))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), short=given.short)
