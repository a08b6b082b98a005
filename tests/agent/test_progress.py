"""Progress: what is streamed is shown as it comes, bounded, and never after its end."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
import trio
from agent_world import MODEL, World, ask, calls, results, text_of, verify
from hypothesis import given, strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.agent._documents import LiveDocument, update_doc
from pidurable.agent._output import OutputCollector, bounded_output, clean_output
from pidurable.agent._progress import (
    COMMIT_BUFFERS_MAX,
    PARTIAL_CHARACTERS_MAX,
    PartialAnswer,
    Progress,
)
from pidurable.agent._script import Step
from pidurable.agent._services import AgentChange
from pidurable.records import _json
from pidurable.records._limits import Settings
from pidurable.registry import ToolCall, tool
from pidurable.testing import Fault

# --- streamed answers ---------------------------------------------------------------------------


async def watch_partials(harness: Any, seen: list[Any]) -> None:
    """Keep every value that `pi.live.partial` takes, one a commit."""
    root = await harness.root()
    last: Any = object()
    while True:
        partial = root.live()["partial"]
        if partial != last:
            seen.append(partial)
            last = partial
        await trio.sleep(0.001)


async def test_an_answer_is_shown_while_it_comes(autojump_clock: MockClock) -> None:
    """Text grows in `pi.live` at most every 100 ms, thinking apart, and is gone with the answer."""
    world = World(Step(thinking="hmm", text=tuple("abcdefghij"), delay=0.03))
    seen: list[Any] = []

    async with world.open() as harness, trio.open_nursery() as nursery:
        nursery.start_soon(watch_partials, harness, seen)
        before = harness.session.line.published_seq
        outcome = await ask(harness, "go")
        commits = harness.session.line.published_seq - before
        await trio.sleep(1)
        nursery.cancel_scope.cancel()

    assert outcome.text == "abcdefghij"
    assert seen[0] is None
    assert seen[-1] is None
    texts = [
        "".join(block["text"] for block in partial["blocks"] if block["type"] == "text")
        for partial in seen[1:-1]
    ]
    assert len(texts) >= 2
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] in "abcdefghij"
    assert seen[1]["blocks"][0] == {"type": "thinking", "text": "hmm"}
    # 0.33 s of streaming: no more than a commit each 100 ms, beside the four of the run itself.
    assert commits <= 8


async def test_nothing_is_shown_of_an_answer_after_its_end(autojump_clock: MockClock) -> None:
    """A flush that was on its way when the stream ended does not bring the partial back."""
    world = World(
        Step(text=("a", "b"), delay=0.2, calls=calls("slow").calls), "never", "never either"
    )

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        await trio.sleep(5)
        live = root.live()
        await root.abort()
        await submission.wait()
        await verify(world, harness)

    assert live["partial"] is None
    assert live["calls"][0]["output_tail"] == "it has begun\n"


async def test_a_closed_buffer_writes_nothing_more() -> None:
    """A flush that waits for the line when the stream ends finds the buffer closed."""
    world = World(calls("slow"), "never")

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await world.reached.wait()
        progress = Progress(harness._runtime)
        partial = PartialAnswer(progress, root.id, root.live()["generation"])
        partial.add("text", "too late")
        held = trio.Event()

        async def flush() -> None:
            await held.wait()
            await progress.flush()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush)
            async with harness.commit():
                held.set()
                await wait_all_tasks_blocked()
                partial.close()
        shown = root.live()["partial"]
        await root.abort()
        await submission.wait()

    assert shown is None


async def test_a_flush_that_waited_long_does_not_hold_up_the_next(
    autojump_clock: MockClock,
) -> None:
    """Waiting for the line is not what progress costs: what comes after it is shown at once."""
    world = World(Step(text=tuple("abcdefghij"), delay=1.0), settings=Settings())

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await trio.sleep(0.95)
        async with harness.commit():
            await trio.sleep(3.0)
        await trio.sleep(2.5)
        shown = root.live()["partial"]
        await submission.wait()

    # 6.45 s after the input: the flusher was held up for 3 s, and would have been quiet for 30 s.
    assert shown["blocks"] == [{"type": "text", "text": "abcdef"}]


async def test_many_answers_are_shown_by_a_few_commits() -> None:
    """What a thousand streams show does not keep the loop in one piece."""
    count = 2 * COMMIT_BUFFERS_MAX + 1
    sizes: list[int] = []
    world = World()

    async with world.open() as harness:
        async with harness.commit() as tx:
            conversations = [tx.create_conversation() for _ in range(count)]
            for id in conversations:
                update_doc(tx, LiveDocument, id, run=1, generation=1)
        progress = Progress(harness._runtime)
        for id in conversations:
            PartialAnswer(progress, id, 1).add("text", "word")
        before = harness.session.line.published_seq
        await progress.flush()
        commits = harness.session.line.published_seq - before
        for id in conversations:
            partial = harness.conversation(id).live()["partial"]
            sizes.append(len(partial["blocks"][0]["text"]))

    assert commits == 3
    assert sizes == [4] * count


async def test_a_huge_answer_is_shown_in_part_and_stored_whole(autojump_clock: MockClock) -> None:
    """More than 256 Ki characters are not shown before the answer is complete."""
    piece = "\u20ac" * 1000
    world = World(Step(text=(piece,) * 400, delay=0.01))
    most = 0

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        while (await submission.status()).status != "done":
            partial = root.live()["partial"]
            if partial is not None:
                most = max(most, sum(len(block["text"]) for block in partial["blocks"]))
            await trio.sleep(0.05)
        outcome = await submission.wait()

    assert 250_000 < most <= PARTIAL_CHARACTERS_MAX
    assert len(outcome.text) == 400_000


async def test_lost_progress_loses_nothing_else(autojump_clock: MockClock) -> None:
    """When the store refuses progress, the stream goes on and the answer is stored whole."""
    settings = Settings(storage_retry_seconds=0.0)
    world = World(Step(text=tuple("abcdefgh"), delay=0.08), settings=settings)

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await trio.sleep(0.05)
        world.storage.add(Fault.refuse(times=2))
        outcome = await submission.wait()
        await verify(world, harness)

    assert outcome.text == "abcdefgh"


async def test_a_document_that_is_full_loses_its_progress_alone(autojump_clock: MockClock) -> None:
    """Output that `pi.live` has no room for is dropped from view; the result has it."""

    @tool(replay="safe")
    async def chatty(call: ToolCall) -> None:
        """Say a lot."""
        for _ in range(40):
            await call.output("x" * 1000)
            await call.sleep(0.05)

    world = World(calls("chatty"), "ok", tools=[chatty], settings=Settings(document_bytes_max=8192))

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        await verify(world, harness)
        (result,) = await results(harness)

    assert outcome.text == "ok"
    assert text_of(result) == "x" * 40_000


async def test_a_call_shows_output_details_and_remarks(autojump_clock: MockClock) -> None:
    """What a call puts out is in `pi.live` within a tick, the tail replacing what it dropped."""
    views: list[Any] = []

    async with trio.open_nursery():
        world = World(calls("talks"), "ok")

        @tool(output_keep="tail", output_bytes_max=10)
        async def talks(call: ToolCall) -> None:
            """Talk."""
            await call.output("12345\n")
            await call.details({"step": 1})
            await call.sleep(0.3)
            await call.output("6789\0abc")
            await call.diagnostic("warning", "careful")
            await call.sleep(0.3)

        world.install(talks)
        async with world.open() as harness:
            root = await harness.root()
            submission = await root.submit("go")
            while (await submission.status()).status == "placed":
                views += [attrs.asdict(_View(**call)) for call in root.live()["calls"]]
                await trio.sleep(0.05)
            outcome = await submission.wait()
            (result,) = await results(harness)

    assert outcome.text == "ok"
    shown = [(v["output_tail"], v["details"], len(v["diagnostics"])) for v in views]
    assert ("12345\n", {"step": 1}, 0) in shown
    assert ("45\n6789abc"[-10:], {"step": 1}, 1) in shown
    assert "careful" in text_of(result)
    assert "dropped" in text_of(result)


@pytest.mark.parametrize("said", ["", "in time"])
async def test_nothing_is_shown_of_a_call_after_its_end(
    autojump_clock: MockClock, said: str
) -> None:
    """Code that goes on with a call that has ended puts out what nobody sees, its first word too.

    Args:
        autojump_clock: The time.
        said: What the call had put out before.
    """
    left: list[ToolCall] = []

    @tool
    async def leaves(call: ToolCall) -> str:
        """Leave the call to somebody."""
        if said:
            await call.output(said)
        left.append(call)
        return "left"

    @tool
    async def goes_on(call: ToolCall) -> str:
        """Go on with it when it has ended."""
        await call.sleep(1)
        await left[0].output("too late")
        await left[0].details({"too": "late"})
        await call.output("mine")
        await call.sleep(1)
        return "done"

    world = World(calls("leaves", "goes_on"), "ok", tools=[leaves, goes_on])
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await trio.sleep(1.9)
        first, second = root.live()["calls"]
        settled = await submission.wait()
        found = await results(harness)

    assert (first["status"], second["output_tail"]) == ("done", "mine")
    assert first["output_tail"] in ("", said)
    assert first["details"] is None
    assert settled.text == "ok"
    assert [text_of(each) for each in found] == ["left", "done"]


@attrs.frozen(kw_only=True)
class _View:
    """The documented fields of a call in `pi.live`."""

    index: int
    task: int
    name: str
    status: str
    held_by: Any
    output_tail: str
    details: Any
    diagnostics: list[Any]


# --- bounded text -------------------------------------------------------------------------------


@given(
    pieces=st.lists(st.text(alphabet=st.characters(), max_size=30), max_size=20),
    bytes_max=st.integers(1, 60),
    lines_max=st.integers(1, 8),
    keep=st.sampled_from(["head", "tail"]),
)
def test_kept_output_is_bounded_and_every_byte_is_accounted(
    pieces: list[str], bytes_max: int, lines_max: int, keep: Any
) -> None:
    """However it comes in pieces, the kept part is an end of it, and kept plus dropped is all."""
    collector = OutputCollector(bytes_max=bytes_max, lines_max=lines_max, keep=keep)
    for piece in pieces:
        collector.add(piece)
    whole = "".join(clean_output(piece) for piece in pieces)
    kept = collector.text()

    assert len(kept.encode()) <= bytes_max
    assert kept.count("\n") <= lines_max
    assert whole.startswith(kept) if keep == "head" else whole.endswith(kept)
    assert len(kept.encode()) + collector.dropped_bytes == len(whole.encode())


@given(st.text(alphabet=st.characters()))
def test_cleaned_output_can_be_stored(text: str) -> None:
    """Any str becomes strict JSON text without control characters; clean text is left as it is."""
    cleaned = clean_output(text)

    _json.dumps(cleaned)
    assert clean_output(cleaned) == cleaned
    assert not any(ord(c) < 32 and c not in "\t\n" for c in cleaned)


@pytest.mark.parametrize(
    ("text", "keep", "expected"),
    [
        ("a\nb\nc\n", "head", "a\nb\n[2 bytes of output were dropped]"),
        ("a\nb\nc\n", "tail", "[2 bytes of output were dropped]\nb\nc\n"),
        ("a\nb\n", "head", "a\nb\n"),
        ("a\nb", "tail", "a\nb"),
        ("\U0001f600" * 3, "head", "\U0001f600\U0001f600\n[4 bytes of output were dropped]"),
    ],
)
def test_a_cut_is_marked_where_it_was_made(text: str, keep: Any, expected: str) -> None:
    """Lines and characters stay whole, and the mark counts the bytes that are missing."""
    assert bounded_output(text, bytes_max=10, lines_max=2, keep=keep) == expected


# C087
async def test_what_many_calls_show_fits_their_document(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The more calls run, the less each shows: nothing of their progress is refused."""
    gate = trio.Event()

    @tool(replay="safe")
    async def loud(call: ToolCall) -> None:
        """Put out as much as is kept, with characters that JSON escapes."""
        await call.output('"\\' * 25_000)
        await call.details("d" * 60_000)
        for _ in range(16):
            await call.diagnostic("info", '"' * 1_000)
        await gate.wait()

    world = World(calls(*["loud"] * 100), "fin", tools=[loud])

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        await trio.sleep(1)
        shown = root.live()["calls"]
        gate.set()
        settled = await submission.wait()
        found = await results(harness)

    assert len(_json.dumps(shown)) <= Settings().document_bytes_max
    assert all(call["output_tail"].startswith('"\\"\\') for call in shown)
    assert all(call["output_tail"].endswith("while so many calls run]") for call in shown)
    assert "progress was not stored" not in caplog.text
    assert settled.text == "fin"
    assert all('"\\' * 25_000 in text_of(each) for each in found)


async def test_one_conversation_that_shows_too_much_loses_nothing_of_another(
    autojump_clock: MockClock,
) -> None:
    """A document that grows too large stops the progress of its own conversation alone."""
    settings = Settings(document_bytes_max=8_000, value_bytes_max=1_000_000)
    world = World(
        Step(when=lambda view: "long" in view.user, text=("x" * 9_000, "y"), delay=0.5),
        Step(when=lambda view: "short" in view.user, text=("ab", "cd"), delay=0.5),
        settings=settings,
    )

    async with world.open() as harness:
        root = await harness.root()
        other = await harness.create_conversation(agent=AgentChange(model=MODEL))
        long, short = await root.submit("long"), await other.submit("short")
        await trio.sleep(0.3 + 0.5)
        partial = other.live()["partial"]
        answers = [(await each.wait()).text for each in (long, short)]

    assert partial == {"blocks": [{"type": "text", "text": "ab"}]}
    assert answers == ["x" * 9_000 + "y", "abcd"]
