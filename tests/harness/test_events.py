"""Events: a snapshot, then one batch per commit, with nothing missing and nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.lowlevel
from agent_world import World, ask, calls
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.agent._script import ScriptedError, Step
from pidurable.errors import NotFoundError
from pidurable.harness._conversation import Conversation
from pidurable.harness._events import (
    EntryAdded,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    RetryEnd,
    RetryStart,
    RunEnd,
    RunStart,
    Snapshot,
    SubmissionChanged,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnStart,
)
from pidurable.records._limits import WATCH_FRAMES_MAX


async def collect(
    conversation: Conversation,
    seen: list[Any],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep every batch of a conversation's events."""
    async with conversation.events() as batches:
        task_status.started()
        async for batch in batches:
            seen.append(batch)


def flat(seen: list[Any], *kinds: type[Any]) -> list[Any]:
    """The events of these kinds, in order."""
    return [event for batch in seen for event in batch if isinstance(event, kinds)]


async def watched(world: World, *texts: str) -> list[Any]:
    """The batches that a watch sees while these inputs are answered."""
    seen: list[Any] = []
    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        await nursery.start(collect, root, seen)
        for number, text in enumerate(texts):
            await ask(harness, text, f"r{number}")
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return seen


async def test_a_run_is_told_from_its_start_to_its_end(autojump_clock: MockClock) -> None:
    """Snapshot, run, turns, messages, calls and the end of the run come in the order of commits."""
    seen = await watched(World(calls("safe", text="I look"), "done"), "go")
    kinds = [type(event).__name__ for batch in seen for event in batch]

    assert kinds == [
        "Snapshot",
        *("EntryAdded", "SubmissionChanged", "RunStart", "TurnStart"),
        "EntryAdded",
        *("MessageEnd", "ToolExecutionStart"),
        "ToolExecutionEnd",
        "TurnStart",
        *("MessageEnd", "SubmissionChanged", "RunEnd"),
    ]
    (start,) = flat(seen, ToolExecutionStart)
    (end,) = flat(seen, ToolExecutionEnd)
    (run_start,), (run_end,) = flat(seen, RunStart), flat(seen, RunEnd)
    assert (start.name, start.arguments, start.index) == ("safe", {}, 0)
    assert end.call[1] == 0
    start.arguments["mine"] = True  # a copy: what the model is sent again has no such thing
    (answer, _) = flat(seen, MessageEnd)
    assert answer.entry.messages[0].tool_calls[0].arguments == {}
    assert (run_end.run, run_end.status) == (run_start.run, "done")
    assert [turn.turn for turn in flat(seen, TurnStart)] == [1, 2]


async def test_deltas_make_up_the_answer(autojump_clock: MockClock) -> None:
    """The updates of each block, joined, are a beginning of what the message ends with."""
    world = World(Step(thinking="hm", text=tuple("abcdefghijkl"), delay=0.05))
    seen = await watched(world, "go")
    texts = {0: "", 1: ""}
    for update in flat(seen, MessageUpdate):
        texts[update.index] += update.text

    assert len(flat(seen, MessageStart)) == 1
    assert texts[0] == "hm"
    assert len(texts[1]) >= 8
    assert "abcdefghijkl".startswith(texts[1])
    (end,) = flat(seen, MessageEnd)
    assert end.entry.messages[0].text == "abcdefghijkl"


async def test_output_of_calls_is_told_as_it_grows(autojump_clock: MockClock) -> None:
    """A call's output comes as updates between its start and its end."""
    world = World(calls("slow"), "never")
    seen: list[Any] = []

    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        await nursery.start(collect, root, seen)
        submission = await root.submit("go")
        await world.reached.wait()
        await trio.sleep(1)
        await root.abort("enough")
        await submission.wait()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert [each.text for each in flat(seen, ToolExecutionUpdate)] == ["it has begun\n"]
    (end,) = flat(seen, RunEnd)
    assert (end.status, end.reason, end.detail) == ("unanswered", "aborted", "enough")


async def test_a_retry_is_told_with_its_moment(autojump_clock: MockClock) -> None:
    """A failed request, its wait and the end of the wait are three things that are told."""
    step = Step(error=ScriptedError(detail="busy", retry_after=7.0), text="ok")
    seen = await watched(World(step), "go")
    (start,) = flat(seen, RetryStart)

    assert (start.try_number, start.error) == (1, "busy")
    assert len(flat(seen, RetryEnd)) == 1
    assert [each.entry.messages[0].status for each in flat(seen, MessageEnd)] == [
        "failed",
        "complete",
    ]


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.3])
async def test_a_watch_that_begins_in_the_middle_misses_nothing(
    autojump_clock: MockClock, delay: float
) -> None:
    """Whenever a watch begins, its snapshot and its batches together have every entry once."""
    world = World(calls("safe", "safe"), calls("safe"), Step(text=tuple("abcd"), delay=0.1))
    watches: list[list[Any]] = [[] for _ in range(20)]

    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        submission = await root.submit("go")
        await trio.sleep(delay)
        for seen in watches:
            nursery.start_soon(collect, root, seen)
            await trio.lowlevel.checkpoint()
        await submission.wait()
        await wait_all_tasks_blocked()
        history = [entry.id for entry in await root.history()]
        nursery.cancel_scope.cancel()

    for seen in watches:
        (snapshot,) = flat(seen, Snapshot)
        ids = [entry.id for entry in snapshot.entries]
        ids += [e.entry.id for e in flat(seen, EntryAdded, MessageEnd, ToolExecutionEnd)]
        assert ids == history


async def test_a_consumer_that_lags_gets_a_new_snapshot(autojump_clock: MockClock) -> None:
    """More batches than are kept are replaced by where things stand; nothing slows down."""
    world = World("ok")

    async with world.open() as harness:
        root = await harness.root()
        async with root.events() as batches:
            (first,) = await anext(batches)
            for number in range(WATCH_FRAMES_MAX + 50):
                async with harness.commit() as tx:
                    tx.append(root.id, {"n": number}, kind="test.note")
            (second,) = await anext(batches)
            async with harness.commit() as tx:
                tx.append(root.id, {"n": -1}, kind="test.note")
            (third,) = await anext(batches)

    assert isinstance(first, Snapshot)
    assert first.entries == ()
    assert isinstance(second, Snapshot)
    assert len(second.entries) == WATCH_FRAMES_MAX + 50
    assert isinstance(third, EntryAdded)
    assert third.entry.data == {"n": -1}


async def test_a_watch_ends_with_the_harness(autojump_clock: MockClock) -> None:
    """Closing the harness ends every watch after what it had to tell."""
    world = World("ok")
    seen: list[Any] = []

    async with trio.open_nursery() as nursery, world.open() as harness:
        root = await harness.root()
        await nursery.start(collect, root, seen)
        await ask(harness, "go")

    assert flat(seen, RunEnd)[0].status == "done"


async def test_queued_and_withdrawn_inputs_are_told(autojump_clock: MockClock) -> None:
    """Every change of a submission is an event of its conversation, and of no other."""
    world = World(calls("slow"))
    seen: list[Any] = []
    other_seen: list[Any] = []

    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        other = await harness.create_conversation()
        await nursery.start(collect, root, seen)
        await nursery.start(collect, other, other_seen)
        first = await root.submit("go")
        await world.reached.wait()
        second = await root.submit("more")
        await root.abort()
        await first.wait()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    told = [(e.submission, e.status, e.reason) for e in flat(seen, SubmissionChanged)]
    assert told == [
        (first.id, "placed", None),
        (second.id, "queued", None),
        (second.id, "unanswered", "withdrawn"),
        (first.id, "unanswered", "aborted"),
    ]
    assert [type(event) for batch in other_seen for event in batch] == [Snapshot]


async def test_a_conversation_that_does_not_exist_has_no_events(
    autojump_clock: MockClock,
) -> None:
    """Watching nothing is refused, instead of being silent for ever."""
    world = World()

    async with world.open() as harness:
        with pytest.raises(NotFoundError):
            async with Conversation(harness, 99).events():
                pass
