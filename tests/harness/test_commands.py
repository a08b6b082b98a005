"""Commands from outside: each is applied once, whatever dies, and its answer is the holder's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from agent_world import MODEL
from command_world import Patient, Store
from trio.testing import MockClock

from pidurable import (
    AgentChange,
    Settings,
    open_client,
    open_harness,
)
from pidurable.agent._script import Step
from pidurable.errors import (
    CommandFailedError,
    InvalidArgumentError,
    NotFoundError,
    PidurableError,
    RequestIdConflictError,
    SignalRefusedError,
    StorageRefusedError,
    TaskEndedError,
    UnknownTaskError,
    WaitTimeoutError,
)
from pidurable.harness._open import open_quiet_harness
from pidurable.records._commands import (
    Command,
    decode_command,
    encode_command,
    error_answer,
    read_answer,
)
from pidurable.session._seams import InlineBlocking, TrioClock
from pidurable.storage import MemoryStorage, SqliteStorage
from pidurable.testing import Fault, FaultyStorage


@pytest.fixture
def store() -> Store:
    return Store(Step(text="hello"), Step(text="again"))


async def test_every_kind_gives_what_the_harness_gives(
    store: Store, autojump_clock: MockClock
) -> None:
    """Submit, signal, fork, retry, resume and abort, from a process that holds nothing."""
    client = store.client()
    async with store.open() as harness:
        root = await harness.root(agent=AgentChange(model=MODEL))
        task = await root.create_task(Patient, "x")
        submission = await client.submit("hi", timeout=5)
        settled = await client.wait_for_submission(submission, timeout=5)
        fork = await client.fork(root.id, timeout=5)
        lifted = (
            await client.retry_task(task, timeout=5),
            await client.resume_task(task, timeout=5),
        )
        await client.signal(task, "go", {"by": "me"}, timeout=5)
        outcome = await harness.wait_for_task(task)
        ended = await client.abort_task(task, timeout=5)
        other = await root.create_task(Patient, "y")
        live = await client.abort_task(other, "enough", timeout=5)
        aborted = await harness.wait_for_task(other)

    assert (settled.text, settled.status) == ("hello", "done")
    assert (outcome.result, ended) == ({"by": "me"}, "completed")
    assert (live, aborted.status, aborted.reason) == (None, "aborted", "enough")
    assert lifted == (False, False)
    assert store.base.reopen().head().next_id > fork > root.id


async def test_a_key_counts_once_and_gives_the_first_answer(
    store: Store, autojump_clock: MockClock
) -> None:
    """Handed in again, also by another client and to the next holder, nothing more is stored."""
    async with store.open() as harness:
        await harness.root(agent=AgentChange(model=MODEL))
        first = await store.client().submit("hi", key="k", timeout=5)
        again = await store.client().submit("hi", key="k", timeout=5)
        with pytest.raises(RequestIdConflictError, match="'k' already names a command") as other:
            await store.client().submit("something else", key="k", timeout=5)
        with pytest.raises(RequestIdConflictError):
            await store.client().abort_task(1, key="k", timeout=5)
    async with store.open() as harness:
        late = await store.client().submit("hi", key="k", timeout=5)
        submissions = [await store.client().reader.submission(first)]

    assert first == again == late
    assert other.value.submission == 0
    assert len(submissions) == 1
    assert store.world.ends == {first: 1}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda client, ended: client.abort_task(99), UnknownTaskError(99)),
        (lambda client, ended: client.signal(ended, "go"), TaskEndedError),
        (lambda client, ended: client.signal(98, "go", "x" * 300_000), UnknownTaskError),
        (lambda client, ended: client.fork(97), NotFoundError("conversation", 97)),
        (lambda client, ended: client.submit("x", conversation=97), NotFoundError),
        (lambda client, ended: client.retry_task("7"), UnknownTaskError("'7'")),
        (lambda client, ended: client.submit("x", when_busy="never"), InvalidArgumentError),
    ],
)
async def test_a_refusal_is_raised_as_its_own_class(
    store: Store, autojump_clock: MockClock, call: Callable[..., Any], error: Any
) -> None:
    """With its fields, and nothing but the answer is stored; the holder goes on."""
    async with store.open() as harness:
        root = await harness.root()
        ended = await root.create_task(Patient, "x")
        await harness.abort_task(ended)
        await harness.wait_for_task(ended)
        before = store.base.reopen().head().next_id
        kind = error if isinstance(error, type) else type(error)
        with pytest.raises(kind) as raised, trio.fail_after(5):
            await call(store.client(), ended)
        assert await harness.session.blocking.run(lambda: True)

    assert type(raised.value) is kind
    assert isinstance(error, type) or str(raised.value) == str(error)
    assert store.base.reopen().head().next_id == before


@pytest.mark.parametrize(
    ("kind", "content", "said"),
    [
        ("explode", {}, "knows only submit, write"),
        ("abort", {}, "tasks: it is missing"),
        ("abort", {"tasks": [], "reason": "x"}, "list of ids"),
        ("abort", {"tasks": 7}, "list of ids"),
        ("abort", {"tasks": [1], "colour": "red"}, "colour: the holder knows only tasks, reason"),
        ("submit", {"blocks": "text"}, "blocks"),
        ("submit", {"blocks": [{"type": "video"}]}, "video"),
        ("submit", {"blocks": [{"type": "text", "text": "x"}], "conversation": "1"}, "no conv"),
        ("signal", {"tasks": [True], "name": "go"}, "no task True"),
        ("fork", {"conversation": None}, "no conversation None"),
    ],
)
async def test_a_bad_command_gets_an_error_and_stops_nothing(
    store: Store, autojump_clock: MockClock, kind: str, content: dict[str, Any], said: str
) -> None:
    """Written by hand, of another version or plainly wrong: the ones around it are applied."""
    store.hand_in("submit", id="before", blocks=[{"type": "text", "text": "x"}])
    store.hand_in(kind, **content)
    store.hand_in("submit", id="behind", blocks=[{"type": "text", "text": "y"}])
    async with store.open() as harness:
        poison = harness.session.line.poison

    assert said in store.answer()["error"]["message"]
    assert all("value" in store.answer(id) for id in ("before", "behind"))
    assert poison is None


# C075
@pytest.mark.parametrize("text", ["", '{"format": 1, "id": "x"', "\0" * 900, "[1]", "{}", "null"])
async def test_what_is_no_command_is_set_aside_and_told_once(
    store: Store, autojump_clock: MockClock, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut, zeros, no object: what comes behind it is applied, at this opening and the next."""
    store.base.command_box.hand_in("bad", text)
    store.hand_in("submit", blocks=[{"type": "text", "text": "x"}])
    with caplog.at_level(logging.WARNING, logger="pidurable"):
        for _ in range(2):
            async with store.open() as harness:
                assert await harness.apply_commands() == 0

    assert [each.message for each in caplog.records if "set aside" in each.message]
    assert len([each for each in caplog.records if "set aside" in each.message]) == 1
    assert "value" in store.answer()


async def test_a_command_of_another_session_is_not_applied(
    store: Store, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of a store that was deleted may still be there when a new one is created."""
    content = {"blocks": [{"type": "text", "text": "x"}]}
    command = Command(id="old", kind="submit", content=content, session="another", at_us=1)
    store.base.command_box.hand_in("old", encode_command(command, bytes_max=1_000))
    async with store.open():
        pass

    assert store.base.command_box.find("old") == "set_aside"
    assert "another session" in caplog.text


async def test_an_unexpected_error_is_an_answer_too(
    store: Store,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bug in one kind is reported with its place and poisons nothing."""
    from pidurable.harness import _command_kinds

    def broken(*_: Any, **fields: Any) -> None:
        raise ZeroDivisionError("oops")

    bad = attrs.evolve(_command_kinds.KINDS["abort"], apply=broken)
    monkeypatch.setitem(_command_kinds.KINDS, "abort", bad)
    store.hand_in("abort", tasks=[1])
    async with store.open() as harness:
        await harness.root()

    assert store.answer()["error"]["type"] == "InternalError"
    assert "ZeroDivisionError" in caplog.text


async def test_commands_are_applied_in_order_of_arrival(
    store: Store, autojump_clock: MockClock
) -> None:
    """A hundred signals and, between them, forks, which are commits of another form."""
    async with store.open() as harness:
        root = await harness.root()
        task = await root.create_task(Patient, "x")
        await harness.drain(seconds=0)
        for number in range(100):
            if number % 10 == 5:
                store.hand_in("fork", id=f"f{number}", conversation=root.id)
            store.hand_in("signal", id=f"s{number}", tasks=[task], name="n", payload=number)
        await harness.apply_commands()
        rows = harness.session.storage.signals(task)
        places = [harness.session.storage.command(f"f{n}") for n in (5, 15, 95)]

    assert [json.loads(row.payload) for row in rows] == list(range(100))
    seqs = [place.seq for place in places if place is not None]
    assert seqs == sorted(seqs)
    assert len(seqs) == 3


@pytest.mark.parametrize("point", ["command_box.forget", "command_box.take"])
async def test_a_holder_that_dies_with_commands_in_hand_loses_and_repeats_none(
    store: Store, autojump_clock: MockClock, point: str
) -> None:
    """Dead between taking and committing, or between committing and forgetting."""
    async with store.open() as harness:
        task = await (await harness.root()).create_task(Patient, "x")
        await harness.drain(seconds=0)
    for number in range(3):
        store.hand_in("signal", id=f"s{number}", tasks=[task], name="n", payload=number)
    faulty = FaultyStorage(store.base.reopen(), [Fault.store_then_raise(point)])
    async with open_harness(faulty, blocking=InlineBlocking(), clock=TrioClock()):
        faulty.freeze()
    places = {store.base.command_box.find(f"s{number}") for number in range(3)}
    async with store.open() as harness:
        await harness.drain(seconds=0)
        rows = harness.session.storage.signals(task)

    assert "taken" in places
    assert [row.payload for row in rows] == ["0", "1", "2"]
    assert all(store.base.command_box.find(f"s{number}") is None for number in range(3))


async def test_a_look_that_is_cancelled_leaves_nothing_that_the_next_does_not_do(
    autojump_clock: MockClock,
) -> None:
    """Cancelled at its k-th checkpoint, for every k: each counts once, none stays in the box."""
    kinds, caught = ["abort", "retry", "no such kind"], 0
    async with Store().world.open() as harness:
        box = harness.session.storage.command_box
        task = await (await harness.root()).create_task(Patient, "x")
        for number in range(30):
            ids = [f"{number} {kind}" for kind in kinds]
            for id, kind in zip(ids, kinds, strict=True):
                command = Command(
                    id=id, kind=kind, content={"tasks": [task]}, session="world", at_us=1
                )
                box.hand_in(id, encode_command(command, bytes_max=10_000))
            scope = trio.CancelScope()

            async def cancel(scope: trio.CancelScope = scope, number: int = number) -> None:
                for _ in range(number):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel)
                with scope:
                    await harness.apply_commands()
                nursery.cancel_scope.cancel()
            caught += scope.cancelled_caught
            await harness.apply_commands()
            assert [box.find(id) for id in ids] == [None] * 3
            assert None not in [harness.session.storage.command(id) for id in ids]
    assert 5 < caught < 30


async def test_what_cannot_be_removed_from_the_box_is_removed_at_a_later_look(
    store: Store, autojump_clock: MockClock
) -> None:
    """Nor does it keep others from being applied."""
    async with store.world.open() as harness:
        box = store.base.command_box
        task = await (await harness.root()).create_task(Patient, "x")
        store.world.storage.add(Fault.refuse("command_box.forget", times=2))
        for id in ("first", "second"):
            store.hand_in("abort", id=id, tasks=[task])
            with pytest.raises(StorageRefusedError):
                await harness.apply_commands()
            assert harness.session.storage.command(id) is not None
        places = [box.find(id) for id in ("first", "second")]
        await harness.apply_commands()

        assert places == ["taken", "taken"]
        assert [box.find(id) for id in ("first", "second")] == [None, None]


async def test_a_refused_commit_is_tried_again_and_no_answer(
    store: Store, autojump_clock: MockClock
) -> None:
    """A full disk is nobody's answer: the command keeps its place until there is room."""
    async with store.world.open() as harness:
        store.world.storage.add(Fault.refuse("apply", times=10_000))
        store.hand_in("submit", blocks=[{"type": "text", "text": "x"}])
        with pytest.raises(StorageRefusedError, match="disk full"):
            await harness.apply_commands()
        place = store.base.command_box.find("by hand")
        store.world.storage.clear()
        count = await harness.apply_commands()

    assert (place, count) == ("taken", 1)
    assert "value" in store.answer()


async def test_a_command_is_withdrawn_for_certain_or_not_at_all(
    store: Store, autojump_clock: MockClock
) -> None:
    """What waits is gone for good; what is answered stays; what never came is said to be none."""
    client = store.client()
    store.hand_in("submit", id="back", blocks=[{"type": "text", "text": "x"}])
    withdrawn = await client.withdraw("back")
    async with store.open() as harness:
        await harness.root(agent=AgentChange(model=MODEL))
        kept = await client.submit("done", key="kept", timeout=5)
        answered = await client.withdraw("kept")
        with pytest.raises(NotFoundError, match="command 'back'"):
            await client.withdraw("back")
        taken = harness.session.storage.command("back")
        store.hand_in("abort", id="held", tasks=[1])
        store.base.reopen().command_box.take()
        held = await client.withdraw("held")

    assert (withdrawn, answered, held) == (True, False, False)
    assert taken is None
    assert kept


async def test_who_waits_for_a_command_that_somebody_withdraws_is_told(
    store: Store, autojump_clock: MockClock
) -> None:
    """It would wait for ever; that it was certainly not applied is said."""
    client = store.client()
    async with store.world.open(), trio.open_nursery() as nursery:

        async def withdraw() -> None:
            await trio.sleep(1)
            assert await store.client().withdraw("k")

        nursery.start_soon(withdraw)
        with pytest.raises(StorageRefusedError, match="withdrawn"), trio.fail_after(9):
            await client.submit("x", key="k")


async def test_a_timeout_says_who_has_not_seen_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Held by a process that does not look, or by none; the key waits again, and is applied."""
    path = tmp_path / "s.sqlite"
    quick: dict[str, Any] = {"blocking": InlineBlocking(), "clock": TrioClock()}
    async with open_harness(path, **quick) as harness:
        async with open_client(path, **quick) as client:
            with pytest.raises(WaitTimeoutError, match="not seen yet, and waits") as held:
                await client.submit("x", key="k", timeout=2)
        root = await harness.root()
    async with open_client(path, **quick) as client:
        with pytest.raises(WaitTimeoutError, match="No process holds") as free:
            await client.submit("x", key="k", timeout=2)
        async with open_harness(path, **quick):
            again = await client.submit("x", key="k", timeout=2)
            record = await client.reader.submission(again)

    assert "Process " in str(held.value)
    assert "until somebody opens the store" in str(free.value)
    assert (held.value.key, free.value.key) == ("k", "k")
    assert record.conversation_id == root.id


async def test_a_holder_looks_by_itself(tmp_path: Path) -> None:
    """Under the clock of the machine, every 50 ms, without being asked."""
    path = tmp_path / "s.sqlite"
    settings = Settings(commands_seconds=0.001)
    async with open_harness(path, settings=settings), open_client(path) as client:
        with trio.fail_after(60):
            submission = await client.submit("x")

    assert submission > 0


async def test_input_starts_the_harness_and_what_tidies_does_not(
    store: Store, autojump_clock: MockClock
) -> None:
    """As by the calls of the host."""
    async with store.world.open() as harness:
        root = await harness.root(agent=AgentChange(model=MODEL))
        async with harness.commit() as tx:
            tx.create_conversation()
        harness._runtime.started = False
        store.hand_in("abort", id="a", tasks=[1])
        store.hand_in("fork", id="f", conversation=root.id)
        await harness.apply_commands()
        before = harness._runtime.started
        store.hand_in("submit", id="s", blocks=[{"type": "text", "text": "x"}])
        await harness.apply_commands()
        after = harness._runtime.started

    assert (before, after) == (False, True)


async def test_who_opens_to_tidy_stores_input_and_runs_nothing(tmp_path: Path) -> None:
    """It waits for somebody who opens the store for work."""
    path = tmp_path / "s.sqlite"
    async with open_harness(path) as harness:
        await harness.root()
    async with open_client(path) as client:
        with pytest.raises(WaitTimeoutError):
            await client.submit("x", key="k", timeout=0)
        async with open_quiet_harness(path) as harness:
            submission = await client.submit("x", key="k", timeout=60)
            started = harness._runtime.started
            record = await client.reader.submission(submission)
            live = await client.reader.tasks(live=True)

    assert (started, record.status) == (False, "placed")
    assert [task.invocations for task in live] == [0]


async def test_a_draining_holder_still_applies(store: Store, autojump_clock: MockClock) -> None:
    """It begins nothing, but what is handed in is stored and answered."""
    async with store.open() as harness:
        await harness.root(agent=AgentChange(model=MODEL))
        await harness.drain(seconds=0)
        submission = await store.client().submit("x", timeout=5)
        record = await store.client().reader.submission(submission)

    assert record.status == "placed"
    assert store.world.model.requests == []


# C024
async def test_who_comes_second_hands_in_to_the_first(
    store: Store, autojump_clock: MockClock
) -> None:
    """Two processes send to one conversation: both inputs have an answer, no turn interleaves."""
    async with store.open() as harness:
        root = await harness.root(agent=AgentChange(model=MODEL))
        mine = await root.submit("from the holder")
        theirs = await store.client().submit("from outside", timeout=5)
        first = await mine.wait()
        second = await store.client().wait_for_submission(theirs, timeout=5)
        kinds = [entry.kind for entry in await root.history()]

    assert (first.text, second.text) == ("hello", "again")
    assert [kind for kind in kinds if kind in ("pi.user", "pi.assistant")] == [
        "pi.user",
        "pi.assistant",
    ] * 2


def test_a_command_is_read_as_it_was_written() -> None:
    """Every field, and a content of any shape that JSON has."""
    command = Command(id="k", kind="x", content={"é": [1, None]}, session="s", at_us=5)

    assert decode_command(encode_command(command, bytes_max=100)) == command


@pytest.mark.parametrize(
    "error",
    [SignalRefusedError(7, "too many"), NotFoundError("entry", 9, "See 1.", place="here")],
)
def test_an_error_crosses_as_itself(error: PidurableError) -> None:
    """Class, text and facts."""
    with pytest.raises(type(error)) as raised:
        read_answer("k", error_answer(error))

    assert str(raised.value) == str(error)
    assert attrs.asdict(raised.value) == attrs.asdict(error)


@pytest.mark.parametrize("error", [OSError("disk"), InvalidArgumentError("x", "bad", "\ud800")])
def test_an_error_that_cannot_cross_is_told_in_words(error: Exception) -> None:
    """Foreign classes, and fields that are not JSON."""
    with pytest.raises(CommandFailedError, match=type(error).__name__) as raised:
        read_answer("k", error_answer(error))

    assert raised.value.key == "k"


def test_memory_and_file_offer_the_same_box(tmp_path: Path) -> None:
    """What a test shows in memory holds for a file: same calls, same names."""
    file = SqliteStorage(tmp_path / "s.sqlite")
    names = [
        {name for name in dir(each.command_box) if not name.startswith("_")}
        for each in (file, MemoryStorage())
    ]
    file.close()

    assert names[0] == names[1]
