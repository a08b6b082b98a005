"""Events: a snapshot, then one batch per commit, with nothing missing and nothing twice."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
import trio
import trio.lowlevel
from agent_world import MODEL, World, ask, calls, odd_tool
from approval_world import GuardedWorld, acts
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.agent._decisions import Once
from pidurable.agent._documents import LiveDocument, update_doc
from pidurable.agent._script import ScriptedError, Step, When
from pidurable.agent._services import AgentChange
from pidurable.errors import NotFoundError
from pidurable.harness._conversation import Conversation
from pidurable.harness._event_json import EVENT_TYPES, event_json
from pidurable.harness._events import (
    AgentChanged,
    CompactionEnd,
    CompactionStart,
    CompactionUpdate,
    EntryAdded,
    Event,
    InboxUpdate,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    PermissionAsked,
    PermissionDecided,
    RetryEnd,
    RetryStart,
    RunEnd,
    RunStart,
    Snapshot,
    SubmissionChanged,
    TaskFailed,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnEnd,
    TurnStart,
    UsageUpdate,
)
from pidurable.records._limits import WATCH_FRAMES_MAX, Settings


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
        *("MessageEnd", "UsageUpdate", "ToolExecutionStart"),
        "ToolExecutionEnd",
        *("TurnEnd", "TurnStart"),
        *("MessageEnd", "UsageUpdate", "SubmissionChanged", "TurnEnd", "RunEnd"),
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
    ends = [(end.run, end.turn, end.generation) for end in flat(seen, TurnEnd)]
    assert ends == [(start.run, start.turn, start.generation) for start in flat(seen, TurnStart)]


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


async def test_each_remark_of_a_call_is_told_also_one_that_was_made_before(
    autojump_clock: MockClock,
) -> None:
    """Two remarks alike are two; beyond the most that are kept, their number is told."""

    async def body(call: Any) -> str:
        for _ in range(19):
            await call.diagnostic("info", "again")
            await call.sleep(1)
        return "done"

    seen = await watched(World(calls("odd"), "ok", tools=[odd_tool(body)]), "go")
    told = [each["text"] for up in flat(seen, ToolExecutionUpdate) for each in up.diagnostics]
    dropped = [f"{number} more diagnostics were dropped" for number in (1, 2, 3)]
    assert told == ["again"] * 16 + dropped


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


async def test_a_wait_that_an_abort_ends_is_over_before_its_run_is(
    autojump_clock: MockClock,
) -> None:
    """Of one commit the end of the pause comes before the end of the run that made it."""
    world = World(Step(error=ScriptedError(retry_after=7.0)))
    seen: list[Any] = []
    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        await nursery.start(collect, root, seen)
        submission = await root.submit("go")
        await trio.sleep(1)
        await root.abort()
        await submission.wait()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    told = flat(seen, RetryStart, RetryEnd, TurnEnd, RunEnd)
    assert [type(event) for event in told] == [RetryStart, RetryEnd, TurnEnd, RunEnd]


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


async def test_what_is_queued_is_told_as_it_comes_and_goes(autojump_clock: MockClock) -> None:
    """Items are told with their content when they come, and by their submission when they go."""
    world = World(calls("slow"))
    seen: list[Any] = []

    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        await nursery.start(collect, root, seen)
        await root.submit("go")
        await world.reached.wait()
        steer = await root.submit("steer", when_busy="steer")
        later = await root.submit("later")
        await root.abort()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    told = [
        ([(item["submission"], item["mode"]) for item in e.added], e.removed, e.queued)
        for e in flat(seen, InboxUpdate)
    ]
    assert told == [
        ([(steer.id, "steer")], (), 1),
        ([(later.id, "follow_up")], (), 2),
        ([], (steer.id, later.id), 0),
    ]


async def test_what_is_spent_is_told_as_totals(autojump_clock: MockClock) -> None:
    """Each answer tells the totals that it has changed, as they then stand in `pi.usage`."""
    world = World(calls("safe"), "done")
    seen: list[Any] = []

    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        await nursery.start(collect, root, seen)
        await ask(harness, "go")
        await wait_all_tasks_blocked()
        usage = root.usage()
        nursery.cancel_scope.cancel()

    first, second = flat(seen, UsageUpdate)
    assert first.models[MODEL]["requests"] == 1
    assert second.models == usage["models"]
    assert second.tools == {}


async def test_a_change_of_the_agent_is_told(autojump_clock: MockClock) -> None:
    """What was configured is told whole; what changes nothing is not told."""
    world = World()
    seen: list[Any] = []

    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        await nursery.start(collect, root, seen)
        for _ in range(2):
            await root.configure(AgentChange(instructions="be brief"))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    (change,) = flat(seen, AgentChanged)
    assert (change.agent["model"], change.agent["instructions"]) == (MODEL, "be brief")


async def test_what_fails_is_told_once_and_aborts_are_not(autojump_clock: MockClock) -> None:
    """A tool that raises and a run whose model fails are told with their error; an abort is not."""

    async def broken(call: Any) -> None:
        raise LookupError("no such shelf")

    world = World(
        calls("slow"),
        calls("odd"),
        Step(error=ScriptedError(kind="other", detail="the model is gone")),
        tools=[odd_tool(broken)],
    )
    seen: list[Any] = []

    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        await nursery.start(collect, root, seen)
        submission = await root.submit("go")
        await world.reached.wait()
        await root.abort()
        await submission.wait()
        await ask(harness, "again")
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    told = [(each.kind, each.status, each.error) for each in flat(seen, TaskFailed)]
    assert [each[:2] for each in told] == [("pi.tool", "failed"), ("pi.generation", "failed")]
    assert "no such shelf" in told[0][2]
    assert "the model is gone" in told[1][2]


async def test_a_compaction_is_told_from_its_start_to_its_end(autojump_clock: MockClock) -> None:
    """What `pi.live` says of compactions is told when it begins, changes and is over."""
    world = World()
    seen: list[Any] = []

    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        await nursery.start(collect, root, seen)
        for compactions in (
            [{"task": 7, "status": "summarizing"}],
            [{"task": 7, "status": "waiting"}, {"task": 8, "status": "selecting"}],
            [],
        ):
            async with harness.commit() as tx:
                update_doc(tx, LiveDocument, root.id, compactions=compactions)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert flat(seen, CompactionStart, CompactionUpdate, CompactionEnd) == [
        CompactionStart(7, "summarizing"),
        CompactionUpdate(7, "waiting"),
        CompactionStart(8, "selecting"),
        CompactionEnd(7),
        CompactionEnd(8),
    ]


# C060
async def test_what_a_person_is_asked_is_told_in_every_conversation_above(
    autojump_clock: MockClock,
) -> None:
    """A sub-agent's question and its decision come to the root too, and to no bystander."""
    world = GuardedWorld(
        Step(calls=acts("ship").calls, when=When(user="leaf", turn=0)),
        Step(text="leaf done", when=When(user="leaf", turn=1)),
        Step(calls=calls("subagent", task="leaf").calls, when=When(user="go", turn=0)),
        Step(text="top", when=When(user="go", turn=1)),
    )
    seen: dict[str, list[Any]] = {"root": [], "child": [], "other": [], "late": []}

    async with world.open() as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        await nursery.start(collect, root, seen["root"])
        await nursery.start(collect, await harness.create_conversation(), seen["other"])
        submission = await root.submit("go")
        await wait_all_tasks_blocked(0.1)
        (request,) = harness.permissions()
        child = harness.conversation(request.conversation)
        await nursery.start(collect, child, seen["child"])
        await nursery.start(collect, root, seen["late"])
        decided = await harness.decide(request.id, Once())
        await submission.wait()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert flat(seen["root"], PermissionAsked, PermissionDecided) == [
        PermissionAsked(request),
        PermissionDecided(decided),
    ]
    assert flat(seen["child"], PermissionAsked, PermissionDecided) == [PermissionDecided(decided)]
    assert flat(seen["other"], PermissionAsked, PermissionDecided) == []
    assert [each.permissions for each in flat(seen["late"], Snapshot)] == [(request,)]
    held = [(e.status, e.held_by) for e in flat(seen["child"], ToolExecutionUpdate)]
    assert held == [("running", None)]
    told = json.loads(json.dumps([event_json(e) for e in flat(seen["late"], Snapshot)]))
    assert told[0]["permissions"][0]["id"] == request.id


async def test_calls_that_begin_one_after_the_other_are_told_with_their_arguments(
    autojump_clock: MockClock,
) -> None:
    """In a sequential round each call is told when it begins, long after its answer."""
    world = World(
        calls("safe", "safe", what="this"), "done", settings=Settings(sequential_tools=True)
    )
    seen = await watched(world, "go")
    starts = flat(seen, ToolExecutionStart)

    assert [(each.index, each.arguments) for each in starts] == [
        (0, {"what": "this"}),
        (1, {"what": "this"}),
    ]


async def test_every_event_is_json_of_a_known_type(autojump_clock: MockClock) -> None:
    """The JSON of a run's events has all fields, and can be sent anywhere."""
    world = World(calls("safe", text="I look"), Step(text=("do", "ne"), delay=0.2))
    seen = await watched(world, "go")
    told = [event_json(event) for batch in seen for event in batch]

    assert json.loads(json.dumps(told)) == told
    assert [each["type"] for each in told][:3] == ["snapshot", "entry", "submission"]
    assert told[0]["agent"]["model"] == MODEL
    assert (told[0]["entries"], told[0]["inbox"]) == ([], [])
    updates = [each for each in told if each["type"] == "message_update"]
    assert updates[0]["text"] == "do"
    (start,) = (each for each in told if each["type"] == "tool_execution_start")
    assert (start["name"], start["arguments"]) == ("safe", {})
    (end,) = (each for each in told if each["type"] == "run_end")
    assert end["status"] == "done"


def test_every_class_of_events_has_a_type_of_its_own() -> None:
    """No event is without a JSON form, and no two share a word."""
    classes = set(typing.get_args(Event))

    assert set(EVENT_TYPES) == classes
    assert len(set(EVENT_TYPES.values())) == len(classes)


async def test_a_conversation_that_does_not_exist_has_no_events(
    autojump_clock: MockClock,
) -> None:
    """Watching nothing is refused, instead of being silent for ever."""
    world = World()

    async with world.open() as harness:
        with pytest.raises(NotFoundError):
            async with Conversation(harness, 99).events():
                pass
