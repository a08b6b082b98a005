"""Writes: entries that ask the model nothing, placed now or at the next boundary, once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest
import trio
from agent_world import MODEL, DieAt, FreezeAt, World, ask, calls, run_killed, text_of, verify
from trio.testing import MockClock

from pidurable.agent import _generation
from pidurable.agent._script import ScriptedCall, ScriptedError, Step, When
from pidurable.agent._services import AgentChange
from pidurable.errors import (
    ConversationFullError,
    InvalidArgumentError,
    NotFoundError,
    NotJsonError,
    RequestIdConflictError,
)
from pidurable.harness._conversation import Conversation
from pidurable.records._entries import Edit, entry
from pidurable.records._limits import Settings
from pidurable.records._messages import (
    AssistantMessage,
    ImageBlock,
    TextBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from pidurable.registry import Tool, ToolCall, section, tool


@entry("test.receipt")
@attrs.frozen
class Receipt:
    """Data that no model sees."""

    number: int


def said(text: str) -> UserMessage:
    """What a model is told by a write."""
    return UserMessage(blocks=(TextBlock(text=text),), at_us=0)


def failing() -> Step:
    """Requests that fail, and do so again five seconds later, until the last input is asked."""
    refused = ScriptedError(kind="retryable", detail="overloaded", retry_after=5.0)
    return Step(when=lambda view: "last" not in view.text, error=refused)


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


async def order_of(conversation: Conversation) -> list[str]:
    """The kinds and texts of a conversation, in order, without the system prompt."""
    found: list[str] = []
    for each in await conversation.history(limit=1000):
        if each.kind == "pi.system":
            continue
        texts = "+".join(text_of(message) for message in each.messages)
        found.append(f"{each.kind}: {texts}" if each.messages else each.kind)
    return found


# --- at rest ------------------------------------------------------------------------------------


async def test_a_write_at_rest_is_placed_at_once_and_asks_nothing(
    autojump_clock: MockClock,
) -> None:
    """It is done when the call returns, no run starts, and the next request has it."""
    world = World("ok")

    async with world.open() as harness:
        root = await harness.root()
        note = await root.write(kind="test.note", messages=[said("remember this")])
        receipt = await root.write(Receipt(7))
        records = [await each.status() for each in (note, receipt)]
        busy = root.live()["run"]
        asked = len(world.model.requests)
        outcome = await ask(harness, "go")
        settled = await note.wait()
        await verify(world, harness)
        history = await root.history()

    assert [(each.kind, each.status) for each in records] == [("write", "done")] * 2
    assert busy is None
    assert asked == 0
    assert outcome.text == "ok"
    assert settled.text == ""
    assert [each.id for each in history[:2]] == [each.entry for each in records]
    assert history[1].read(Receipt) == Receipt(7)
    assert [text_of(each.message) for each in world.model.requests[0].messages] == [
        "remember this",
        "go",
    ]


async def test_a_write_passes_what_a_failed_run_left_queued(autojump_clock: MockClock) -> None:
    """Follow-ups behind a failed run stay queued; a write that comes then is placed at once."""
    world = World(failing(), "ok", settings=Settings(request_tries=1))

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("first")
        await trio.sleep(1)
        follow = await root.submit("follow")
        outcome = await first.wait()
        note = await root.write(kind="test.note", messages=[said("note")])
        placed = (await note.status()).status
        waiting = (await follow.status()).status
        last = await ask(harness, "last")
        await verify(world, harness)
        order = await order_of(root)

    assert (outcome.reason, placed, waiting, last.text) == ("model_error", "done", "queued", "ok")
    assert order == [
        "pi.user: first",
        "pi.assistant: ",
        "pi.assistant: ",
        "test.note: note",
        "pi.user: follow",
        "pi.user: last",
        "pi.assistant: ok",
    ]


# --- during a run -------------------------------------------------------------------------------


async def test_writes_go_first_at_the_boundary_after_a_round(autojump_clock: MockClock) -> None:
    """What a request can see waits for the end of the round; what none can see does not."""
    world = World(calls("gate", "safe"), "ok")
    made, opened = gate(world)
    world.install(made)

    # C030
    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        steer = await root.submit("steer", when_busy="steer")
        note = await root.write(kind="test.note", messages=[said("note")])
        second = await root.write(kind="test.note", messages=[said("note two")])
        receipt = await root.write(Receipt(1))
        during = [(await each.status()).status for each in (steer, note, second, receipt)]
        modes = [item["mode"] for item in root.inbox()]
        opened.set()
        await first.wait()
        after = [(await each.status()).status for each in (steer, note, second)]
        await verify(world, harness)
        order = await order_of(root)

    assert during == ["queued", "queued", "queued", "done"]
    assert modes == ["steer", "write", "write"]
    assert after == ["done"] * 3
    assert order[-4:] == [
        "test.note: note",
        "test.note: note two",
        "pi.user: steer",
        "pi.assistant: ok",
    ]
    kinds = [each.split(":")[0] for each in order]
    assert "test.receipt" in kinds[: kinds.index("test.note")]


async def test_a_write_waits_for_the_end_of_a_run_without_calls(autojump_clock: MockClock) -> None:
    """It is placed behind the answer and before the follow-up, which starts the next run."""
    world = World(Step(text="one", delay=5.0), "two")

    async with world.open() as harness:
        root = await harness.root()
        await root.submit("first")
        await trio.sleep(1)
        follow = await root.submit("follow")
        note = await root.write(kind="test.note", messages=[said("note")])
        settled = await note.wait()
        outcome = await follow.wait()
        await verify(world, harness)
        order = await order_of(root)

    assert settled.status == "done"
    assert outcome.text == "two"
    assert order == [
        "pi.user: first",
        "pi.assistant: one",
        "test.note: note",
        "pi.user: follow",
        "pi.assistant: two",
    ]


@pytest.mark.parametrize("how", ["fails", "is aborted", "task aborted", "faults"])
async def test_writes_are_placed_at_every_end_of_a_run(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Failed or aborted, a run's end places the writes; an abort takes back users' items alone."""
    first_steps = {"fails": failing(), "faults": Step(text="ok", delay=2.0)}
    world = World(first_steps.get(how, calls("slow")), "ok", settings=Settings(request_tries=1))

    # C029
    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("first")
        await trio.sleep(1)
        note = await root.write(kind="test.note", messages=[said("note")])
        follow = await root.submit("follow")
        taken: list[Any] = []
        if how == "is aborted":
            taken = await root.abort()
        elif how == "task aborted":
            await harness.abort_task(root.live()["run"])
        with monkeypatch.context() as planted:
            if how == "faults":
                planted.setattr(_generation, "store_answer", None)
            ended = await first.wait()
        written = await note.wait()
        left = (await follow.status()).status
        await harness.wait_for_idle()
        order = await order_of(root)
        last = await ask(harness, "last")
        await verify(world, harness)

    assert written.status == "done"
    assert order[-1] == "test.note: note"
    assert (ended.reason == "faulted") == (how == "faults")
    assert left == ("unanswered" if how == "is aborted" else "queued")
    assert [each.id for each in taken] == ([follow.id] if how == "is aborted" else [])
    assert last.text == "ok"


async def test_a_queued_write_survives_a_kill(autojump_clock: MockClock) -> None:
    """Killed while it waits, it is placed by the next process, once."""
    world = World(calls("gate"), "ok")
    made, opened = gate(world)
    world.install(made)

    # C032
    async with world.open() as harness:
        root = await harness.root()
        await root.submit("go", request_id="r1")
        await world.reached.wait()
        await root.write(kind="test.note", messages=[said("note")], request_id="w1")
        world.storage.freeze()
    opened.set()
    async with world.open() as harness:
        root = await harness.root()
        again = await root.write(kind="test.note", messages=[said("note")], request_id="w1")
        outcome = await ask(harness, "go", "r1")
        settled = await again.wait()
        await verify(world, harness)
        order = await order_of(root)

    assert outcome.text == "ok"
    assert settled.status == "done"
    assert order.count("test.note: note") == 1


# --- resets and stale summaries -----------------------------------------------------------------


async def test_a_reset_after_a_round_ends_the_run(autojump_clock: MockClock) -> None:
    """The inputs are unanswered (`reset`), what is queued waits for the next input, all is cut."""
    world = World(Step(when=When(user="next"), text="fresh"), calls("gate"))
    made, opened = gate(world)
    world.install(made)

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        steer = await root.submit("steer", when_busy="steer")
        reset = await root.reset()
        opened.set()
        outcome = await first.wait()
        placed = await reset.wait()
        waiting = (await steer.status()).status
        await harness.wait_for_idle()
        context = [text_of(each.message) for each in await root.context()]
        last = await ask(harness, "next")
        released = await steer.wait()
        await verify(world, harness)

    assert (outcome.status, outcome.reason) == ("unanswered", "reset")
    assert placed.status == "done"
    assert waiting == "queued"
    assert context == []
    assert (last.text, released.text) == ("fresh", "fresh")
    assert [text_of(each.message) for each in world.model.requests[-1].messages] == [
        "steer",
        "next",
    ]
    assert world.model.requests[-1].tools == world.model.requests[0].tools


@pytest.mark.parametrize("how", ["answered", "omitted"])
async def test_a_run_that_nothing_is_left_to_answer_of_ends(
    how: str, autojump_clock: MockClock
) -> None:
    """Where a write leaves an answer as the last of the context, no model is asked: a reset."""
    world = World("first", calls("gate"))
    wait_here, opened = gate(world)
    world.install(wait_here)
    async with world.open() as harness:
        root = await harness.root()
        await ask(harness, "one")
        submission = await root.submit("two")
        await world.reached.wait()
        asked = (await root.history())[-2:]
        if how == "omitted":
            await root.write(kind="test.edit", edits=[Edit(target=each.id) for each in asked])
        else:
            answer = AssistantMessage(
                blocks=(TextBlock(text="by hand"),),
                status="complete",
                stop_reason="stop",
                model="m",
                usage=Usage(),
                at_us=0,
            )
            await root.write(kind="test.answer", messages=[answer])
        opened.set()

        settled = await submission.wait()

        assert (settled.status, settled.reason) == ("unanswered", "reset")
        assert "nothing is left to answer" in (settled.detail or "")
        assert len(world.model.requests) == 2
        await verify(world, harness)


async def test_a_head_while_a_request_is_prepared_leaves_it_its_prompt(
    autojump_clock: MockClock,
) -> None:
    """What was appended while sections were rendered is looked at before the request is fixed."""
    world = World("first", "second")
    begun, opened = trio.Event(), trio.Event()

    async def news(_: object) -> str:
        begun.set()
        await opened.wait()
        return "new"

    async with world.open(agent=AgentChange(model=MODEL, instructions="be brief")) as harness:
        root = await harness.root()
        await ask(harness, "one")
        world.install(sections=[section("news", news)])
        submission = await root.submit("two")
        await begun.wait()
        async with harness.commit() as tx:
            tx.append(root.id, kind="test.cut", head=0, messages=[said("afresh")])
        opened.set()
        await submission.wait()

        request = world.model.requests[-1]
        assert "be brief" in request.system
        assert "new" in request.system
        assert {each.name for each in request.tools} >= {"once", "safe"}
        await verify(world, harness)


async def test_a_reset_at_the_end_of_a_run_only_cuts(autojump_clock: MockClock) -> None:
    """The run was answered; the follow-up is the first that the fresh context has."""
    world = World(Step(when=When(user="first"), text="one", delay=5.0), "two")

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("first")
        await trio.sleep(1)
        await root.reset()
        follow = await root.submit("follow")
        outcomes = [await each.wait() for each in (first, follow)]
        await root.reset()
        idle = list(await root.context())
        await verify(world, harness)

    assert [each.text for each in outcomes] == ["one", "two"]
    assert [text_of(m.message) for m in world.model.requests[-1].messages] == ["follow"]
    assert idle == []


async def test_a_summary_whose_cut_lies_before_the_start_is_stale(
    autojump_clock: MockClock,
) -> None:
    """The furthest cut stays in effect, whichever summary comes later, also across a queue."""
    gates = (ScriptedCall(name="gate"),)
    world = World(Step(when=When(user="go", turn=0), calls=gates), "answer", repeat_last=True)
    made, opened = gate(world)
    world.install(made)

    async with world.open() as harness:
        root = await harness.root()
        for number in range(3):
            await ask(harness, f"question {number}", f"r{number}")
        users = [each.id for each in await root.history() if each.kind == "pi.user"]

        async def summary(text: str, head: int) -> Any:
            return await root.write(kind="pi.compaction", messages=[said(text)], head=head)

        far = await (await summary("far", users[2])).wait()
        near = await (await summary("near", users[1])).wait()
        same = await (await summary("same", users[2])).wait()
        busy = await root.submit("go")
        await world.reached.wait()
        late = await summary("late", users[1])
        reset = await root.reset()
        later = await summary("later", users[2])
        opened.set()
        await busy.wait()
        ends = [await each.wait() for each in (late, reset, later)]
        await verify(world, harness)
        history = await root.history()

    assert far.status == "done"
    assert (near.status, near.reason) == ("unanswered", "stale")
    assert near.detail is not None
    assert str(users[2]) in near.detail
    assert near.entry is None
    assert same.status == "done"
    assert [(each.status, each.reason) for each in ends] == [
        ("unanswered", "stale"),
        ("done", None),
        ("unanswered", "stale"),
    ]
    kept = [text_of(each.messages[0]) for each in history if each.kind == "pi.compaction"]
    assert kept == ["far", "same"]


async def test_a_summary_is_stale_by_the_cuts_of_its_own_history(
    autojump_clock: MockClock,
) -> None:
    """A fork inherits the cuts up to where it left its parent, and none that came later."""
    world = World("ok", repeat_last=True)

    async with world.open() as harness:
        root = await harness.root()
        for number in range(3):
            await ask(harness, f"question {number}", f"r{number}")
        users = [each.id for each in await root.history() if each.kind == "pi.user"]
        early = await root.fork()
        await root.write(kind="pi.compaction", messages=[said("far")], head=users[2])
        late = await root.fork()
        ends = [
            await (await each.write(kind="pi.compaction", messages=[said("x")], head=head)).wait()
            for each in (early, late)
            for head in (users[1], users[0])
        ]
        # In one commit too, where nothing of it is stored yet.
        async with harness.commit() as tx:
            made = tx.fork(root.id)
            tx.append(made, kind="test.cut", head=0)
            beside = harness.conversation(root.id).write_in(tx, kind="test.cut", head=users[2])
        second = await harness.submission(beside).wait()

    assert [each.reason for each in ends] == [None, "stale", "stale", "stale"]
    assert second.status == "done"


# --- request ids, bounds ------------------------------------------------------------------------


async def test_the_same_request_id_is_one_write(autojump_clock: MockClock) -> None:
    """Sent again it is the first one; with another entry, or as an input, it is refused."""
    world = World("ok")

    # C033
    async with world.open() as harness:
        root = await harness.root()
        first = await root.write(Receipt(1), request_id="w1")
        again = await root.write(Receipt(1), request_id="w1")
        others: list[Callable[[], Awaitable[Any]]] = [
            lambda: root.write(Receipt(2), request_id="w1"),
            lambda: root.write(Receipt(1), messages=[said("x")], request_id="w1"),
            lambda: root.write(Receipt(1), head=0, request_id="w1"),
            lambda: root.submit("x", request_id="w1"),
            lambda: root.continue_run(request_id="w1"),
        ]
        for other in others:
            with pytest.raises(RequestIdConflictError):
                await other()
        history = await root.history()

    assert first.id == again.id
    assert len(history) == 1


async def test_a_writer_that_was_not_told_writes_again(autojump_clock: MockClock) -> None:
    """Killed before or after the commit, or before the receipt: the second try is the first."""
    for place in range(3):
        world = World("ok")

        async def program(harness: Any, _: Any) -> Any:
            root = await harness.root()
            return await root.write(Receipt(1), request_id="w1")

        point = (FreezeAt(world, "before", 2), FreezeAt(world, "after", 2), DieAt(world, "CP5"))[
            place
        ]
        # C033
        await run_killed(world, point, program)
        async with world.open() as harness:
            await program(harness, world)
            history = await (await harness.root()).history()
        assert point.struck
        assert len(history) == 1


async def test_a_write_is_checked_where_it_is_handed_in(autojump_clock: MockClock) -> None:
    """At rest and during a run alike, what could not be placed is refused, and stores nothing."""
    world = World(calls("gate"), "ok", settings=Settings(value_bytes_max=100_000, queued_max=1))
    made, opened = gate(world)
    world.install(made)
    deep: Any = 0
    for _ in range(197):
        deep = [deep]
    image = ImageBlock(blob="0" * 64, media_type="image/png")

    # C081
    async with world.open() as harness:
        root = await harness.root()
        other = await harness.create_conversation(agent=AgentChange(model=MODEL))
        foreign = (await (await other.write(Receipt(0))).status()).entry
        assert foreign is not None
        refused: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({}, InvalidArgumentError, "value"),
            ({"kind": ""}, InvalidArgumentError, "kind"),
            ({"kind": "k", "value": object()}, NotJsonError, r"\$<k>"),
            ({"kind": "k", "value": "x" * 100_001}, NotJsonError, r"\$<k>"),
            ({"kind": "k", "value": deep, "head": 0}, NotJsonError, r"\$<k>\[0\]"),
            ({"kind": "k", "value": "x" * 99_990, "head": 0}, NotJsonError, r"\$"),
            ({"kind": "k", "messages": ["text"]}, NotJsonError, r"\$\.messages"),
            ({"kind": "k", "head": 999_999}, NotFoundError, "entry"),
            ({"kind": "k", "head": foreign}, NotFoundError, "entry"),
            ({"kind": "k", "edits": [Edit(target=foreign)]}, NotFoundError, "entry"),
            (
                {"kind": "k", "messages": [UserMessage(blocks=(image,), at_us=0)]},
                NotFoundError,
                "blob",
            ),
            ({"kind": "k", "request_id": ""}, InvalidArgumentError, "request_id"),
        ]

        async def all_are_refused() -> None:
            before = harness.session.line.published_seq
            for arguments, error, message in refused:
                with pytest.raises(error, match=message):
                    await root.write(**arguments)
            assert harness.session.line.published_seq == before

        await all_are_refused()
        first = await root.submit("go")
        await world.reached.wait()
        await all_are_refused()
        await root.write(kind="k", head=0)
        with pytest.raises(ConversationFullError):
            await root.write(kind="k", head=0)
        await root.write(kind="k", value="no one waits for this")
        opened.set()
        await first.wait()
        await verify(world, harness)


async def test_what_waits_is_placed_under_smaller_limits_too(autojump_clock: MockClock) -> None:
    """A store opened again with a smaller limit places what the larger one had let in."""
    world = World(calls("gate"), "ok")
    made, opened = gate(world)
    world.install(made)

    async with world.open() as harness:
        root = await harness.root()
        await root.submit("go", request_id="r1")
        await world.reached.wait()
        await root.write("x" * 5_000, kind="big", head=0, request_id="w1")
    opened.set()
    world.settings = Settings(value_bytes_max=4_000)
    async with world.open() as harness:
        root = await harness.root()
        harness.start()
        await harness.wait_for_idle()
        found = [each for each in await root.history() if each.kind == "big"]
        await verify(world, harness)

    assert [len(each.data) for each in found] == [5_000]


# --- taking back --------------------------------------------------------------------------------


async def test_what_is_queued_can_be_withdrawn_and_nothing_else(autojump_clock: MockClock) -> None:
    """Each item is given back with its content; one that is placed or has ended is left alone."""
    world = World(calls("gate"), "ok", "two")
    made, opened = gate(world)
    world.install(made)

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        steer = await root.submit("steer", when_busy="steer")
        follow = await root.submit("follow")
        kept = await root.submit("kept")
        note = await root.write(kind="test.note", messages=[said("note")])
        too_late = await first.withdraw()
        taken = [await each.withdraw() for each in (steer, follow, note)]
        again = await steer.withdraw()
        opened.set()
        outcomes = [await each.wait() for each in (first, kept)]
        ended = await first.withdraw()
        settled = await steer.wait()
        await verify(world, harness)
        order = await order_of(root)

    assert too_late is None
    assert ended is None
    given_back = [each.content for each in taken if each is not None]
    assert [given_back[0][0]["text"], given_back[1][0]["text"]] == ["steer", "follow"]
    assert given_back[2]["kind"] == "test.note"
    assert [each.reason for each in taken if each is not None] == ["withdrawn"] * 3
    assert again == taken[0]
    assert settled.reason == "withdrawn"
    assert [each.text for each in outcomes] == ["ok", "two"]
    assert order == [
        "pi.user: go",
        "pi.assistant: ",
        "pi.tool_result: through",
        "pi.assistant: ok",
        "pi.user: kept",
        "pi.assistant: two",
    ]


async def test_a_withdrawal_and_a_boundary_are_never_both_right(autojump_clock: MockClock) -> None:
    """At any moment it is either taken back and never seen, or placed and answered."""
    taken = 0
    for moment in range(12):
        world = World(calls("safe"), "ok")
        async with world.open() as harness:
            root = await harness.root()
            first = await root.submit("go")
            steer = await root.submit("steer", when_busy="steer")
            await trio.sleep(moment * 0.002)
            record = await steer.withdraw()
            await first.wait()
            settled = await steer.wait()
            await verify(world, harness)
            seen = "pi.user: steer" in await order_of(root)
        assert seen == (record is None) == (settled.status == "done")
        taken += record is not None

    assert 0 < taken < 12


async def test_results_in_the_record_stand_before_what_waited(autojump_clock: MockClock) -> None:
    """Edits and notes queued in a round of three stand behind all three results."""
    three = tuple(ScriptedCall(name=name) for name in ("safe", "gate", "once"))
    world = World(Step(calls=three), "ok")
    made, opened = gate(world)
    world.install(made)

    # C030
    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        await trio.sleep(1)
        target = next(each.id for each in await root.history() if each.kind == "pi.user")
        edit = Edit(target=target, messages=(said("edited"),))
        await root.write(kind="test.edit", edits=[edit])
        await root.write(kind="test.note", messages=[said("note")])
        opened.set()
        await first.wait()
        await verify(world, harness)
        entries = await root.history()

    results = [
        place
        for place, each in enumerate(entries)
        if any(isinstance(message, ToolResultMessage) for message in each.messages)
    ]
    kinds = [each.kind for each in entries]
    assert len(results) == 3
    assert max(results) < kinds.index("test.edit") < kinds.index("test.note")
    assert text_of(world.model.requests[-1].messages[0].message) == "edited"
