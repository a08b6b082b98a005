"""Input: every submission is placed once, at a boundary, in order, and ends once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import pytest
import trio
from agent_world import (
    MODEL,
    DieAt,
    World,
    _Ends,
    ask,
    calls,
    messages,
    run_killed,
    text_of,
    verify,
)
from trio.testing import MockClock

from pidurable.agent._documents import InboxDocument, address_of
from pidurable.agent._script import ScriptedCall, ScriptedError, Step
from pidurable.agent._services import AgentChange
from pidurable.errors import (
    ConversationBusyError,
    ConversationFullError,
    InvalidArgumentError,
    NotFoundError,
    NotJsonError,
    RequestIdConflictError,
)
from pidurable.harness._open import Harness
from pidurable.records._limits import BLOB_BYTES_MIN, Settings
from pidurable.records._messages import (
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultMessage,
    UserMessage,
)
from pidurable.records._readonly import copied_json
from pidurable.registry import Tool, ToolCall, tool
from pidurable.session._notes import note_in_place


def gate(world: World) -> tuple[Tool[..., Any], trio.Event]:
    """A tool that waits for the test."""
    opened = trio.Event()

    @tool(name="gate", replay="safe")
    async def wait_here(call: ToolCall) -> str:
        """Wait."""
        world.reached.set()
        await opened.wait()
        return "through"

    return wait_here, opened


async def order_of(harness: Harness) -> list[str]:
    """The root's users and results, in the order of the transcript."""
    root = await harness.root()
    found: list[str] = []
    for entry in await root.history(limit=1000):
        for message in entry.messages:
            if isinstance(message, UserMessage):
                found.append(text_of(message))
            elif isinstance(message, ToolResultMessage):
                found.append(f"result {message.call[1]}")
    return found


# --- placing ------------------------------------------------------------------------------------


async def test_steers_join_after_the_whole_round(autojump_clock: MockClock) -> None:
    """Two steers during a round of three calls stand after all results, and the run sees them."""
    world = World(calls("safe", "gate", "safe"), "ok")
    made, opened = gate(world)
    world.install(made)

    # C030, C031
    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        one = await root.submit("steer one", when_busy="steer")
        await trio.sleep(1)
        two = await root.submit("steer two", when_busy="steer")
        held = [(await each.status()).status for each in (one, two)]
        opened.set()
        outcomes = [await each.wait() for each in (first, one, two)]
        await verify(world, harness)
        order = await order_of(harness)

    assert held == ["queued", "queued"]
    assert [each.text for each in outcomes] == ["ok"] * 3
    assert len({each.run for each in outcomes}) == 1
    assert order[0] == "go"
    assert sorted(order[1:4]) == ["result 0", "result 1", "result 2"]
    assert order[4:] == ["steer one", "steer two"]


async def test_what_is_queued_shares_nothing_with_what_was_handed_in(
    autojump_clock: MockClock,
) -> None:
    """JSON in a block that its sender goes on to change is queued and placed as it was."""
    world = World(calls("gate"), "zero", "one", "two", "three")
    made, opened = gate(world)
    world.install(made)
    kept: list[Any] = [{"pair": [1, 2]}, {"pair": [1, 2]}, {"pair": (1, 2)}]

    async with world.open() as harness:
        root = await harness.root()
        runs = [await root.submit("go")]
        await world.reached.wait()
        for opaque in kept:
            runs.append(await root.submit([TextBlock(text="more", opaque=opaque)]))
            opaque["pair"] = "changed"
        queued = copied_json(harness.session.doc_value(address_of(InboxDocument, root.id)))
        opened.set()
        for each in runs:
            await each.wait()
        placed = [
            block.opaque
            for entry in await root.history(limit=1000)
            for message in entry.messages
            if isinstance(message, UserMessage)
            for block in message.blocks
        ]

    as_it_was = {"pair": [1, 2]}
    assert [item["content"][0]["opaque"] for item in queued["items"]] == [as_it_was] * 3
    assert placed == [None, *[as_it_was] * 3]


async def test_follow_ups_start_one_run_each(autojump_clock: MockClock) -> None:
    """Three follow-ups wait for the end of the run, and are answered one after the other."""
    world = World(calls("gate"), "zero", "one", "two", "three")
    made, opened = gate(world)
    world.install(made)

    async with world.open() as harness:
        root = await harness.root()
        submissions = [await root.submit("zero?")]
        await world.reached.wait()
        submissions += [await root.submit(f"{word}?") for word in ("one", "two", "three")]
        opened.set()
        outcomes = [await each.wait() for each in submissions]
        await verify(world, harness)

    assert [each.text for each in outcomes] == ["zero", "one", "two", "three"]
    assert len({each.run for each in outcomes}) == 4


async def test_steers_go_before_follow_ups_at_the_end_of_a_run(autojump_clock: MockClock) -> None:
    """A steer that came too late for a round starts the next run, before older follow-ups."""
    world = World(Step(text="one", delay=5.0), "two", "three")

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("first")
        await trio.sleep(1)
        follow = await root.submit("follow")
        steers = [await root.submit(f"steer {n}", when_busy="steer") for n in (1, 2)]
        outcomes = [await each.wait() for each in (first, *steers, follow)]
        await verify(world, harness)
        order = await order_of(harness)

    assert [each.text for each in outcomes] == ["one", "two", "two", "three"]
    assert order == ["first", "steer 1", "steer 2", "follow"]


async def test_input_that_rejects_a_busy_conversation_stores_nothing(
    autojump_clock: MockClock,
) -> None:
    """`reject` is refused while a run is active, and is an ordinary input when there is none."""
    world = World(Step(text="one", delay=5.0), "two")

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("first", when_busy="reject")
        await trio.sleep(1)
        with pytest.raises(ConversationBusyError):
            await root.submit("second", when_busy="reject", request_id="x")
        await first.wait()
        second = await root.submit("second", when_busy="reject", request_id="x")
        outcome = await second.wait()

    assert outcome.text == "two"


async def test_a_full_queue_refuses_and_keeps_what_it_has(autojump_clock: MockClock) -> None:
    """At the limit the next input is refused, and nothing that waits is lost."""
    world = World(Step(text="slow", delay=5.0), repeat_last=True, settings=Settings(queued_max=3))

    async with world.open() as harness:
        root = await harness.root()
        await root.submit("first")
        kept = [await root.submit(f"n{n}") for n in range(3)]
        with pytest.raises(ConversationFullError):
            await root.submit("too many")
        outcomes = [await each.wait() for each in kept]

    assert [each.status for each in outcomes] == ["done"] * 3


async def test_a_queue_that_takes_too_many_bytes_refuses_too(autojump_clock: MockClock) -> None:
    """Inputs and writes that do not fit beside what waits change nothing, and say why."""
    settings = Settings(queued_max=9, document_bytes_max=4_000)
    world = World(Step(text="slow", delay=5.0), repeat_last=True, settings=settings)

    async with world.open() as harness:
        root = await harness.root()
        await root.submit("first")
        kept = await root.submit("x" * 3_000)
        before = root.inbox(), len(await root.open_submissions())
        for size in (1_000, 5_000):
            with pytest.raises(ConversationFullError, match=r"at most 3500,.*withdrawn"):
                await root.submit("y" * size, request_id="again")
            with pytest.raises(ConversationFullError, match="at most 3500,"):
                await root.write("y" * size, kind="k", head=0)
        after = root.inbox(), len(await root.open_submissions())
        outcomes = [await kept.wait()]
        # Nothing is queued where no run is active, so there it fits; its id was not used up.
        big = await root.submit("y" * 5_000, request_id="again")
        outcomes.append(await big.wait())
        await verify(world, harness)

    assert before[1] == 2
    assert after == before
    assert [each.status for each in outcomes] == ["done"] * 2


class Written(_Ends):
    """Counts the characters of all that is written, in published commits."""

    def __init__(self) -> None:
        super().__init__(Counter())
        self.characters = 0

    def committed(self, tx: Any) -> None:
        self.characters += len(str(tx.writes))


async def test_what_waits_is_written_once_however_much_waits(autojump_clock: MockClock) -> None:
    """Queueing, placing and taking back cost the item alone, not all that is queued beside it."""
    world = World(Step(text="slow", delay=5.0), repeat_last=True)
    written = Written()

    async with world.open() as harness:
        harness.session.participants.append(written)
        root = await harness.root()
        await root.submit("first")
        queued = [await root.submit(f"{n} " + "x" * 1_000) for n in range(60)]
        taken = await queued[30].withdraw()
        await trio.sleep(100)
        waiting = len(root.inbox())

    assert taken is not None
    assert 20 < waiting < 55
    # Submissions, the queue and entries; all that waits at each step would be 2,000,000.
    assert 60 * 2_000 < written.characters < 500_000


# --- request ids --------------------------------------------------------------------------------


async def test_the_same_request_id_is_one_input(autojump_clock: MockClock) -> None:
    """Sent twice, also at once and after the answer, an input is stored and answered once."""
    world = World("one", "two")
    ids: list[int] = []

    # C033
    async with world.open() as harness:
        root = await harness.root()

        async def send() -> None:
            ids.append((await root.submit("hello", request_id="r1")).id)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(send)
        outcome = await ask(harness, "hello", "r1")
        again = await ask(harness, "hello", "r1")
        with pytest.raises(RequestIdConflictError):
            await root.submit("other", request_id="r1")
        other = await harness.create_conversation()
        elsewhere = await other.submit("hello", request_id="r1")

    assert len(set(ids)) == 1
    assert outcome == again
    assert elsewhere.id != ids[0]
    assert len(world.model.requests) >= 1
    assert len(messages_of(world)) == 1


def messages_of(world: World) -> list[str]:
    """The user texts of the first request."""
    first = world.model.requests[0]
    return [text_of(m.message) for m in first.messages if isinstance(m.message, UserMessage)]


async def test_a_sender_that_was_not_told_sends_again(autojump_clock: MockClock) -> None:
    """Killed between the commit of an input and its receipt, the second try is the same input."""
    world = World("one")

    # C033
    died = DieAt(world, "CP5")
    await run_killed(world, died, lambda harness, _: ask(harness, "hello"))
    async with world.open() as harness:
        outcome = await ask(harness, "hello")
        await verify(world, harness)
        users = messages(await (await harness.root()).history(), UserMessage)

    assert died.struck
    assert outcome.text == "one"
    assert len(users) == 1


# --- images --------------------------------------------------------------------------------------


async def test_an_image_is_submitted_with_its_bytes(autojump_clock: MockClock) -> None:
    """Put before the input, the bytes go out with it; an input without them is refused at once."""
    world = World("a red square")

    async with world.open() as harness:
        root = await harness.root()
        async with harness.commit() as tx:
            name = tx.put_blob(b"red")
        image = ImageBlock(blob=name, media_type="image/png")
        with pytest.raises(NotFoundError, match=r"no blob '0{64}'.*put_blob"):
            await root.submit([attrs.evolve(image, blob="0" * 64)])
        submission = await root.submit([TextBlock(text="what is it?"), image])
        settled = await submission.wait()
        kept = await harness.blob(name)
        with pytest.raises(NotFoundError, match="blob"):
            await harness.blob("0" * 64)

    assert settled.text == "a red square"
    assert kept == b"red"
    assert world.model.requests[-1].images == {name: b"red"}


async def test_an_input_whose_bytes_are_damaged_blocks_its_run_until_they_are_back(
    autojump_clock: MockClock,
) -> None:
    """Nothing is sent without it and nothing written over it; whole again, the run goes on."""
    world = World(Step(text=tuple("abcdef"), delay=1.0), "unused")
    large = "l" * (BLOB_BYTES_MIN + 1)

    # C078
    async with world.open() as harness:
        root = await harness.root()
        await root.submit(large, request_id="r1")
        await trio.sleep(3.5)
    blobs = world.base._data.blobs
    kept = dict(blobs)
    for name in kept:
        blobs[name] = b"damaged"
    async with world.open() as harness:
        root = await harness.root()
        harness.start()
        await trio.sleep(60.0)
        (generation,) = [each for each in harness.tasks() if each.kind == "pi.generation"]
        explained = harness.explain(generation.id)
        asked = len(world.model.requests)
        damaged = dict(world.base._data.blobs)
        blobs.update(kept)
    async with world.open() as harness:
        await harness.retry_task(generation.id)
        outcome = await ask(harness, large, "r1")
        await verify(world, harness)

    # The entry's messages, and the content of the submission.
    assert len(kept) == 2
    assert generation.blocked == "unknown_record"
    assert set(damaged.values()) == {b"damaged"}
    assert asked == 1
    assert explained.code == "unknown_record"
    assert outcome.text == "abcdef"


async def test_an_item_that_a_provider_refuses_for_good_becomes_a_note(
    autojump_clock: MockClock,
) -> None:
    """An edit puts a note in its place, the record stays as it was, and the turn goes on."""

    def refuses(_: Any) -> bool:
        return "forbidden" in str(world.model.requests[-1].messages)

    refusal = ScriptedError(kind="other", detail="content policy")
    world = World(Step(when=refuses, error=refusal), "better")

    # C071
    async with world.open() as harness:
        root = await harness.root()
        first = await ask(harness, "forbidden")
        (refused,) = [each for each in await root.history() if each.kind == "pi.user"]
        async with harness.commit() as tx:
            note = note_in_place(refused, "left out: the provider refused it")
            tx.append(root.id, kind="host.note", edits=[note])
        second = await ask(harness, "and now?", "r2")
        (again, *_) = [each for each in await root.history() if each.kind == "pi.user"]

    assert (first.status, first.reason) == ("unanswered", "model_error")
    assert second.text == "better"
    assert again == refused
    assert [text_of(each.message) for each in world.model.requests[-1].messages] == [
        "[left out: the provider refused it]",
        "and now?",
    ]


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", InvalidArgumentError),
        (" \n ", InvalidArgumentError),
        ([], InvalidArgumentError),
        ("nul \0", NotJsonError),
        ("half \ud800", NotJsonError),
        ([ThinkingBlock(text="x")], InvalidArgumentError),
        (["text"], InvalidArgumentError),
        ([TextBlock(text=3)], InvalidArgumentError),  # type: ignore[arg-type]
        ([ImageBlock(blob="../../etc", media_type="image/png")], InvalidArgumentError),
        ("x" * 200_000, NotJsonError),
    ],
)
async def test_input_that_cannot_be_sent_is_refused(
    autojump_clock: MockClock, content: Any, error: type[Exception]
) -> None:
    """Blank, unstorable, oversized or foreign content is refused before anything is stored."""
    world = World("ok", settings=Settings(value_bytes_max=100_000))

    # C081, C082
    async with world.open() as harness:
        root = await harness.root()
        before = harness.session.line.published_seq
        with pytest.raises(error):
            await root.submit(content)
        assert harness.session.line.published_seq == before
        outcome = await ask(harness, "fine")

    assert outcome.text == "ok"


@pytest.mark.parametrize(
    "options",
    [
        {"when_busy": "now"},
        {"request_id": ""},
        {"request_id": "x" * 513},
        {"request_id": 7},
        {"request_id": "\ud800"},
    ],
)
async def test_odd_options_are_refused(autojump_clock: MockClock, options: Any) -> None:
    """Modes that do not exist and request ids that cannot be stored are refused by name."""
    world = World("ok")

    async with world.open() as harness:
        root = await harness.root()
        with pytest.raises(ValueError, match=next(iter(options))):
            await root.submit("x", **options)


async def test_an_unknown_conversation_takes_nothing(autojump_clock: MockClock) -> None:
    """A conversation that does not exist is refused, whatever is asked of it."""
    world = World("ok")

    async with world.open() as harness:
        for id in (99, 0, -1, 2**70, "1", None, True):
            with pytest.raises(NotFoundError):
                harness.conversation(id)  # type: ignore[arg-type]


# --- aborts -------------------------------------------------------------------------------------


async def test_an_abort_gives_the_queue_back(autojump_clock: MockClock) -> None:
    """Follow-ups and steers are withdrawn with their content; nothing surfaces later."""
    world = World(calls("slow"), Step(text="fresh"))

    # C029
    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        queued = [
            await root.submit("follow"),
            await root.submit("steer", when_busy="steer"),
        ]
        given_back = await root.abort()
        outcomes = [await each.wait() for each in (first, *queued)]
        later = await ask(harness, "next", "r9")
        await verify(world, harness)
        order = await order_of(harness)

    assert [each.reason for each in outcomes] == ["aborted", "withdrawn", "withdrawn"]
    assert [each.content[0]["text"] for each in given_back] == ["follow", "steer"]
    assert later.text == "fresh"
    assert order == ["go", "result 0", "next"]


async def test_an_aborted_run_alone_leaves_the_queue(autojump_clock: MockClock) -> None:
    """Aborting the task of a run keeps what is queued, also over a kill right after."""
    world = World(calls("slow"), Step(text="answer"))

    # C029
    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        queued = [await root.submit(f"n{n}", request_id=f"n{n}") for n in range(3)]
        assert root.live()["run"] is not None
        await harness.abort_task(root.live()["run"])
        outcome = await first.wait()
        statuses = [(await each.status()).status for each in queued]
        world.storage.freeze()
    async with world.open() as harness:
        root = await harness.root()
        waiting = [item["content"][0]["text"] for item in root.inbox()]
        last = await ask(harness, "now", "r9")
        outcomes = [await ask(harness, f"n{n}", f"n{n}") for n in range(3)]
        await verify(world, harness)
        order = await order_of(harness)

    assert outcome.reason == "aborted"
    assert statuses == ["queued"] * 3
    assert waiting == ["n0", "n1", "n2"]
    assert [each.text for each in (last, *outcomes)] == ["answer"] * 4
    assert order == ["go", "result 0", "n0", "n1", "n2", "now"]


async def test_aborting_nothing_is_nothing(autojump_clock: MockClock) -> None:
    """An abort of a conversation at rest changes nothing, and the next input is answered."""
    world = World("ok")

    async with world.open() as harness:
        root = await harness.root()
        before = harness.session.line.published_seq
        assert await root.abort() == []
        assert harness.session.line.published_seq == before
        assert (await ask(harness, "go")).text == "ok"
        assert await root.abort() == []
        for reason in ("", "x" * 1001, "\ud800", 3):
            with pytest.raises(ValueError, match="reason"):
                await root.abort(reason)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_every_abort_of_hundreds_stops_within_one_step(
    autojump_clock: MockClock, slow_run: bool
) -> None:
    """A loop of short tools is stopped at any moment: no call begins after the abort.

    Fifty moments are tried, once by default and ten times with `-m slow`.
    """
    stopped = 0
    aborts = 500 if slow_run else 50
    world = World(
        Step(calls=(ScriptedCall(name="tick"),)),
        repeat_last=True,
        settings=Settings(turns_max=10_000),
    )
    began: list[float] = []

    @tool(name="tick", replay="safe")
    async def tick(call: ToolCall) -> str:
        """Take twenty milliseconds."""
        began.append(trio.current_time())
        await call.sleep(0.02)
        return "tick"

    world.install(tick)
    # C051
    async with world.open() as harness:
        for number in range(aborts):
            conversation = await harness.create_conversation(agent=AgentChange(model=MODEL))
            submission = await conversation.submit(f"go {number}")
            # Spread over two steps, and now and then exactly onto the end of one.
            await trio.sleep((number * 7 % 50) / 1000)
            await conversation.abort()
            marked = len(began)
            outcome = await submission.wait()
            await harness.wait_for_idle()
            assert outcome.reason == "aborted"
            stopped += len(began) - marked <= 1
        world.model.check()

    assert stopped == aborts
