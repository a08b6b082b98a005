"""What share of a core do 1,000 answers take that are streamed at once, and what does one send?

A thousand conversations are busy, each with a generation whose provider paces itself: so many
deltas a second of so many characters, as a model gives them. What is streamed is shown ten times a
second, or as often as the flusher thinks right, and some of the conversations are watched. The
reference is the same thousand streams read by somebody who throws them away: what the provider
alone and the loop take. After that one answer of 100 KB is streamed to one watcher, and the patches
that it is sent are summed up.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import attrs
import trio
from _raw import Stopwatch, Table

from pidurable import AgentChange, Conversation, Harness, Models, Settings, Submission, open_harness
from pidurable.agent._models import Done, ModelRequest, StreamEvent, TextDelta
from pidurable.records import _json
from pidurable.records._messages import AssistantMessage, TextBlock, Usage

ROUNDS = 2
STREAMS = 1_000
SHORT_STREAMS = 100
SECONDS = 8.0
SHORT_SECONDS = 2.0
DELTAS_PER_SECOND = 20
WATCHED_SHARE = 10
"""One conversation in so many is watched."""
DELTA = "The quick brown fox, "
WHOLE_BYTES = 100_000
WHOLE_DELTA = "jumps over the lazy dog. "
_SLOTS = 10
"""Moments of a period at which deltas come."""


class Paced:
    """A provider whose streams go on until they are told to end, each delta in its time.

    One clock wakes all whose delta is due, as one look at many sockets does: a timer for each delta
    would take half a core by itself.
    """

    name = "bench"

    def __init__(self) -> None:
        self.ending = False
        self.given = 0
        """Deltas of all streams."""
        self._begun = 0
        self._slots: list[list[trio.lowlevel.Task]] = [[] for _ in range(_SLOTS)]

    async def tick(self) -> None:
        """The clock."""
        due = trio.current_time()
        while True:
            for slot in self._slots:
                due += 1 / DELTAS_PER_SECOND / _SLOTS
                await trio.sleep_until(due)
                woken = slot.copy()
                slot.clear()
                for task in woken:
                    trio.lowlevel.reschedule(task)

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        paced = request.model == "bench/paced"
        async with aclosing(self._paced() if paced else self._whole()) as events:
            yield events

    async def _paced(self) -> AsyncGenerator[StreamEvent, None]:
        self._begun += 1
        slot = self._slots[self._begun % _SLOTS]
        delta = TextDelta(DELTA)
        count = 0
        while not self.ending:
            await _wait_in(slot)
            self.given += 1
            count += 1
            yield delta
        yield _done(DELTA * count)

    async def _whole(self) -> AsyncGenerator[StreamEvent, None]:
        """100 KB in about two seconds, which the flusher shows in some parts."""
        count = WHOLE_BYTES // len(WHOLE_DELTA)
        for number in range(count):
            if number % 100 == 0:
                await trio.sleep(0.05)
            yield TextDelta(WHOLE_DELTA)
        yield _done(WHOLE_DELTA * count)


async def _wait_in(slot: list[trio.lowlevel.Task]) -> None:
    task = trio.lowlevel.current_task()
    slot.append(task)

    def abort(_: object) -> trio.lowlevel.Abort:
        slot.remove(task)
        return trio.lowlevel.Abort.SUCCEEDED

    await trio.lowlevel.wait_task_rescheduled(abort)


def _done(text: str) -> Done:
    usage = Usage(requests=1, input_tokens=1, output_tokens=len(text) // 4)
    blocks = (TextBlock(text=text),)
    return Done(
        AssistantMessage(
            blocks=blocks,
            status="complete",
            stop_reason="stop",
            model="bench",
            usage=usage,
            at_us=0,
        )
    )


@attrs.define
class Measured:
    """A while of streaming."""

    core: float
    deltas_s: float
    commits_s: float = 0.0
    frames_s: float = 0.0
    """Of one watched conversation."""


async def measured(provider: Paced, seconds: float) -> Measured:
    """Look at this process for a while."""
    given, processor, watch = provider.given, time.process_time(), Stopwatch()
    await trio.sleep(seconds)
    elapsed = watch.seconds()
    return Measured((time.process_time() - processor) / elapsed, (provider.given - given) / elapsed)


async def bare(provider: Paced, models: Models, streams: int, seconds: float) -> Measured:
    """The same streams, thrown away."""
    request = ModelRequest(model="bench/paced", messages=())

    async def read() -> None:
        async with models.stream(request) as events:
            async for _ in events:
                pass

    provider.ending = False
    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(read)
        await trio.sleep(2.0)  # Until all of them are under way.
        found = await measured(provider, seconds)
        provider.ending = True
    return found


async def streamed(
    harness: Harness, provider: Paced, conversations: list[Conversation], seconds: float
) -> Measured:
    """Real generations, shown as they come; some of them watched."""
    provider.ending = False
    given = provider.given
    frames = 0

    async def watch(conversation: Conversation) -> None:
        nonlocal frames
        async with conversation.watch() as watch:
            async for frame in watch:
                frames += bool(frame.patch)

    submissions: list[Submission] = []
    async with trio.open_nursery() as nursery:
        watched = conversations[::WATCHED_SHARE]
        for conversation in watched:
            nursery.start_soon(watch, conversation)
        async with trio.open_nursery() as starting:

            async def submit(conversation: Conversation) -> None:
                submissions.append(await conversation.submit("Go on."))

            for conversation in conversations:
                starting.start_soon(submit, conversation)
        while provider.given - given < 2 * DELTAS_PER_SECOND * len(conversations):  # noqa: ASYNC110
            await trio.sleep(0.1)
        before, frames = harness.session.line.published_seq, 0
        found = await measured(provider, seconds)
        found.commits_s = (harness.session.line.published_seq - before) / seconds
        found.frames_s = frames / len(watched) / seconds
        provider.ending = True
        for submission in submissions:
            await submission.wait()
        nursery.cancel_scope.cancel()
    return found


async def sent_bytes(harness: Harness) -> tuple[int, int]:
    """Bytes of the patches, and how many there were, of one answer of 100 KB."""
    sent = patches = 0
    conversation = await harness.create_conversation(agent=AgentChange(model="bench/whole"))
    ended = False

    async def watch() -> None:
        nonlocal sent, patches
        async with conversation.watch() as watch:
            async for frame in watch:
                sent += len(_json.dumps(frame.patch).encode())
                patches += 1
                if ended:
                    return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        submission = await conversation.submit("Say much.")
        await submission.wait()
        ended = True
        nursery.cancel_scope.cancel()
    return sent, patches


async def measure(folder: Path, streams: int, seconds: float) -> None:
    table = Table()
    provider = Paced()
    models = Models([provider])
    settings = Settings(running_max=2 * streams)
    path = folder / "streams.sqlite"
    async with (
        trio.open_nursery() as nursery,
        open_harness(path, models=models, settings=settings) as harness,
    ):
        nursery.start_soon(provider.tick)
        agent = AgentChange(model="bench/paced")
        conversations = [await harness.create_conversation(agent=agent) for _ in range(streams)]
        for number in range(ROUNDS):
            for product in (True, False) if number % 2 == 0 else (False, True):
                if product:
                    found = await streamed(harness, provider, conversations, seconds)
                    table.add("streams, share of a core", found.core)
                    table.add("streams, deltas/s", found.deltas_s)
                    table.add("streams, commits/s", found.commits_s)
                    table.add("streams, frames/s of a watcher", found.frames_s)
                else:
                    found = await bare(provider, models, streams, seconds)
                    table.add("thrown away, share of a core", found.core)
                    table.add("thrown away, deltas/s", found.deltas_s)
        sent, patches = await sent_bytes(harness)
        nursery.cancel_scope.cancel()
    table.show()
    above = table.difference("streams, share of a core", "thrown away, share of a core")
    print(f"one answer of {WHOLE_BYTES:,} B: {patches} patches, {sent:,} B")
    print(
        f"streams: core={table.median('streams, share of a core'):.2f}"
        f" above_provider={above:.2f}"
        f" frames_s={table.median('streams, frames/s of a watcher'):.1f}"
        f" patch_bytes={sent / WHOLE_BYTES:.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_STREAMS} streams")
    short = parser.parse_args().short
    with tempfile.TemporaryDirectory() as folder:
        trio.run(
            measure,
            Path(folder),
            SHORT_STREAMS if short else STREAMS,
            SHORT_SECONDS if short else SECONDS,
        )
