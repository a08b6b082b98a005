"""Answers to commands from outside: how long they are kept, and what a collection does to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import attrs
import pytest
import trio
from agent_world import MODEL
from command_world import Patient, Store
from trio.testing import MockClock

from pidurable import (
    AgentChange,
    Client,
    Harness,
)
from pidurable.agent._script import Step
from pidurable.errors import (
    AnswerGoneError,
    PidurableError,
    RequestIdConflictError,
    StorageAccessError,
    StorageRefusedError,
    UnknownTaskError,
)
from pidurable.harness._command_kinds import KINDS
from pidurable.records._commands import (
    drawn_key,
)
from pidurable.session._seams import InlineBlocking, ThreadBlocking, TrioClock
from pidurable.storage import RecordKind
from pidurable.testing import Fault


@pytest.fixture
def store() -> Store:
    return Store(Step(text="hello"), Step(text="again"))


async def test_a_collection_is_answered_at_its_end(store: Store, autojump_clock: MockClock) -> None:
    """It takes many commits; other commands are answered meanwhile, and a bad one is refused."""
    async with store.open() as harness:
        root = await harness.root()
        task = await root.create_task(Patient, "x")
        await harness.abort_task(task)
        await harness.wait_for_task(task)
        await trio.sleep(10)
        report = await store.client().gc(older_than=timedelta(seconds=1), key="k", timeout=5)
        again = await store.client().gc(older_than=timedelta(seconds=1), key="k", timeout=5)
        store.hand_in("gc", older_than_us="soon")
        await trio.sleep(1)

    assert (report.trees, report.tasks, report.dry_run) == (1, 1, False)
    assert again == report
    assert "microseconds" in store.answer()["error"]["message"]
    assert store.base.command_box.find("k") is None


WEEK = timedelta(days=7)
US = timedelta(microseconds=1)


@asynccontextmanager
async def _with_old_answers(store: Store) -> AsyncIterator[tuple[Harness, Client, TrioClock, int]]:
    """A holder that gave two answers eight days ago, one under a chosen key, and who asked."""
    async with store.open() as harness:
        clock = harness.session.clock
        assert isinstance(clock, TrioClock)
        client = Client(store.base.reopen(), blocking=InlineBlocking(), clock=clock)
        root = await harness.root(agent=AgentChange(model=MODEL))
        task = await root.create_task(Patient, "x")
        await client.fork(root.id, key="chosen", timeout=5)
        yield harness, client, clock, task


async def test_answers_go_with_a_collection_once_nobody_waits_for_them(
    store: Store, autojump_clock: MockClock
) -> None:
    """After a week, whatever age is given; of a chosen key it is remembered that it was used."""
    async with _with_old_answers(store) as (harness, client, clock, _):
        with pytest.raises(UnknownTaskError):
            await client.signal(10**6, "b", timeout=5)
        rows = len(harness.session.storage.scan(RecordKind.COMMAND))
        clock.step_us += (WEEK - timedelta(minutes=1)) // US
        kept = await harness.gc(older_than=timedelta(0))
        assert len(harness.session.storage.scan(RecordKind.COMMAND)) == rows == 2
        clock.step_us += timedelta(minutes=2) // US
        fresh = await client.fork((await harness.root()).id, key="fresh", timeout=5)
        told = await harness.gc(older_than=timedelta(0), dry_run=True)
        gone = await harness.gc(older_than=timedelta(0))
        again = await harness.gc(older_than=timedelta(0))
        left = [row[0] for row in harness.session.storage.scan(RecordKind.COMMAND)]
        late = await client.fork((await harness.root()).id, key="fresh", timeout=5)

    assert (kept.answers, told.answers, gone.answers, again.answers) == (0, 2, 2, 0)
    assert told.bytes == gone.bytes
    assert left == ["", "chosen", "fresh"]
    assert late == fresh


async def test_a_late_asker_is_told_and_nothing_is_applied_again(
    store: Store, autojump_clock: MockClock
) -> None:
    """Stopped for longer than answers are kept: neither client nor holder does it once more."""
    async with _with_old_answers(store) as (harness, client, clock, _):
        root = (await harness.root()).id
        drawn = client._draw_key()
        await client.fork(root, key=drawn, timeout=5)
        behind = Client(store.base.reopen(), blocking=InlineBlocking(), clock=TrioClock())
        clock.step_us += timedelta(days=8) // US
        await harness.gc(older_than=timedelta(0))

        def forks() -> int:
            return len(harness.session.storage.scan(RecordKind.CONVERSATION))

        before = forks()
        for key, words in (("chosen", "was answered long ago"), (drawn, "older than any answer")):
            with pytest.raises(AnswerGoneError, match=words):
                await client.fork(root, key=key, timeout=5)
            # Handed in all the same, by somebody who has asked before it was gone.
            store.hand_in("fork", id=key, conversation=root)
            await trio.sleep(1)
            assert store.base.command_box.find(key) is None
        with pytest.raises(RequestIdConflictError):
            await client.fork(root, fork_key="other", key="chosen", timeout=5)
        with pytest.raises(AnswerGoneError, match="a clock that is far behind"):
            await behind.fork(root, timeout=5)
        with pytest.raises(AnswerGoneError):
            await client.withdraw(behind._draw_key())
        assert forks() == before
        await client.fork(root, timeout=5)
        assert forks() == before + 1


async def test_a_collection_under_a_clock_far_ahead_refuses_nothing_later(
    store: Store, autojump_clock: MockClock
) -> None:
    """The clock is set right again: what is handed in then is done, what was answered is not."""
    async with _with_old_answers(store) as (harness, client, clock, task):
        root = (await harness.root()).id
        old = client._draw_key()
        await client.fork(root, key=old, timeout=5)
        clock.step_us += timedelta(days=2_000) // US
        gone = await harness.gc(older_than=timedelta(0))
        clock.step_us -= timedelta(days=2_000) // US
        await client.abort_task(task, timeout=5)
        outcome = await harness.wait_for_task(task)
        with pytest.raises(AnswerGoneError):
            await client.fork(root, key=old, timeout=5)

    assert gone.answers == 2
    assert outcome.status == "aborted"


@pytest.mark.parametrize("kind", ["signal", "gc"])
async def test_what_waited_for_longer_than_answers_are_kept_is_applied(
    store: Store, autojump_clock: MockClock, kind: str
) -> None:
    """No holder looked for eight days, and the next one collects first: it is done, once."""
    async with store.world.open() as harness:
        session = harness.session
        assert isinstance(session.clock, TrioClock)
        root = await harness.root(agent=AgentChange(model=MODEL))
        task = await root.create_task(Patient, "x")
        now_us, uuid = session.clock.now_us(), session.randomness.uuid()
        first, waits = drawn_key(now_us, uuid), drawn_key(now_us + 1, uuid)
        store.hand_in("resume", id=first, tasks=[task])
        await harness.apply_commands()
        if kind == "gc":
            store.hand_in("gc", id=waits, older_than_us=30 * 86_400_000_000, dry_run=True)
        else:
            store.hand_in("signal", id=waits, tasks=[task], name="go", payload=5)
        session.clock.step_us += timedelta(days=8) // US
        gone = await harness.gc(older_than=timedelta(0))
        await trio.sleep(1)
        applied = [row[0] for row in session.storage.scan(RecordKind.COMMAND)]

    assert gone.answers == 1
    assert applied == ["", waits]
    assert "value" in store.answer(waits)
    assert store.base.command_box.find(waits) is None


@pytest.mark.parametrize("trouble", ["no reading", "no room"])
async def test_a_collection_begins_nothing_where_commands_cannot_be_looked_at(
    store: Store, autojump_clock: MockClock, trouble: str
) -> None:
    """It fails with every tree in its place; where one has only no room, it makes that room."""
    async with store.world.open() as harness:
        task = await (await harness.root()).create_task(Patient, "x")
        await harness.abort_task(task)
        await harness.wait_for_task(task)
        await trio.sleep(1)
        take_in = harness._collector.take_in

        async def full_until_trees_go() -> object:
            if harness.session.storage.task(task) is not None:
                raise StorageRefusedError(store.base.store, "disk full")
            return await take_in()

        store.hand_in("fork", conversation=(await harness.root()).id)
        if trouble == "no reading":
            store.world.storage.add(Fault.fail("command_box.take"))
            with pytest.raises(StorageAccessError):
                await harness.gc(older_than=timedelta(0))
            assert harness.session.storage.task(task) is not None
        else:
            harness._collector.take_in = full_until_trees_go
        gone = await harness.gc(older_than=timedelta(0))

    assert gone.trees == 1
    assert "value" in store.answer()


async def test_what_cannot_be_removed_until_its_answer_has_gone_is_not_done_again(
    store: Store, autojump_clock: MockClock
) -> None:
    """Handed in twice, and the files stay for longer than answers are kept: done once."""
    async with store.world.open() as harness:
        session, box = harness.session, store.base.command_box
        assert isinstance(session.clock, TrioClock)
        key = drawn_key(session.clock.now_us(), session.randomness.uuid())
        store.world.storage.add(Fault.refuse("command_box.forget", times=10_000))
        for _ in range(2):
            store.hand_in("gc", id=key, older_than_us=30 * 86_400_000_000)
        await harness.apply_commands()
        await trio.sleep(2)
        assert "value" in store.answer(key)
        session.clock.step_us += timedelta(days=8) // US
        gone = await harness.gc(older_than=timedelta(0))
        await trio.sleep(2)
        place = box.find(key)
        store.world.storage.clear()
        await harness.apply_commands()

        assert (gone.answers, place) == (1, "taken")
        assert session.storage.command(key) is None
        assert box.find(key) is None


async def test_what_a_holder_has_in_hand_when_it_dies_is_done_by_the_next(
    store: Store, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that holder has removed answers meanwhile: those of later keys wait for it."""

    async def takes_for_ever(harness: Harness, **fields: Any) -> None:
        await trio.sleep_forever()

    slow = attrs.evolve(KINDS["gc"], work=takes_for_ever)
    async with store.world.open() as harness:
        monkeypatch.setitem(KINDS, "gc", slow)
        session = harness.session
        assert isinstance(session.clock, TrioClock)
        now_us, uuid = session.clock.now_us(), session.randomness.uuid()
        first, waits, later = (drawn_key(now_us + n * 10**7, uuid) for n in range(3))
        for id in (first, later):
            store.hand_in(
                "resume", id=id, tasks=[await (await harness.root()).create_task(Patient, "")]
            )
        await harness.apply_commands()
        # What comes first takes its time, so the other waits its turn.
        for id in ("slow", waits):
            store.hand_in("gc", id=id, older_than_us=30 * 86_400_000_000)
        await harness.apply_commands()
        await trio.sleep(2)
        session.clock.step_us += timedelta(days=8) // US
        told = await harness.gc(older_than=timedelta(0), dry_run=True)
        gone = await harness.gc(older_than=timedelta(0))
        left = [row[0] for row in session.storage.scan(RecordKind.COMMAND)]
        place = store.base.command_box.find(waits)
    monkeypatch.undo()
    async with store.world.open() as harness:
        await trio.sleep(2)
        final = await harness.gc(older_than=timedelta(0))

    assert (told.answers, gone.answers, left) == (1, 1, ["", later])
    assert place == "taken"
    assert "value" in store.answer(waits)
    assert store.base.command_box.find(waits) is None
    assert final.answers == 1


async def test_a_file_that_cannot_be_removed_holds_up_no_later_command(
    store: Store, autojump_clock: MockClock
) -> None:
    """Of those that take many commits too, and no collection; it is removed once it can be."""
    async with store.world.open() as harness:
        box = store.base.command_box
        task = await (await harness.root()).create_task(Patient, "x")
        await harness.abort_task(task)
        store.world.storage.add(Fault.fail("command_box.forget", times=10_000))
        for id in ("first", "second"):
            store.hand_in("gc", id=id, older_than_us=0)
            with suppress(StorageAccessError):  # of the one before
                await harness.apply_commands()
            await trio.sleep(2)
            assert "value" in store.answer(id)
        store.hand_in("abort", id="third", tasks=[task])
        with pytest.raises(StorageAccessError):
            await harness.apply_commands()
        assert (await harness.gc(older_than=timedelta(0))).dry_run is False
        places = {box.find(id) for id in ("first", "second", "third")}
        store.world.storage.clear()
        await harness.apply_commands()

        assert "error" in store.answer("third")  # its task went with the first
        assert places == {"taken"}
        assert {box.find(id) for id in ("first", "second", "third")} == {None}


async def test_a_file_that_could_not_be_removed_while_others_were_is_removed_too(
    store: Store, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are removed in a thread; one that joins them meanwhile is not taken for removed."""

    async def does_nothing(harness: Harness, **fields: Any) -> None:
        return

    box, begun, left_over = store.base.command_box, trio.Event(), trio.Event()
    slow, fails = "1", "2"  # in order of arrival
    forget = type(box).forget

    def forget_as_told(of: Any, name: str) -> None:
        if name == slow and not begun.is_set():
            trio.from_thread.run_sync(begun.set)
            trio.from_thread.run(left_over.wait)
        elif name == fails and not left_over.is_set():
            trio.from_thread.run(begun.wait)
            raise StorageAccessError(":memory:", "on purpose")
        forget(of, name)

    monkeypatch.setitem(KINDS, "gc", attrs.evolve(KINDS["gc"], work=does_nothing))
    monkeypatch.setattr(type(box), "forget", forget_as_told)
    async with store.world.open() as harness:
        monkeypatch.setattr(harness.session, "blocking", ThreadBlocking())
        task = await (await harness.root()).create_task(Patient, "x")
        store.hand_in("abort", id="slow", tasks=[task])
        store.hand_in("gc", id="fails", older_than_us=0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness.apply_commands)
            with trio.fail_after(60):
                while fails not in harness._commands._answered:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.01)
            left_over.set()
        await harness.apply_commands()

        assert (box.find("slow"), box.find("fails")) == (None, None)


async def test_who_is_stopped_while_its_answer_goes_hears_of_it(
    store: Store, autojump_clock: MockClock
) -> None:
    """It handed in, was stopped, and looks when nothing of it is left: not "withdrawn"."""
    async with _with_old_answers(store) as (harness, client, clock, task):
        key = client._draw_key()
        told: list[BaseException] = []

        async def ask() -> None:
            try:
                await client.abort_task(task, key=key, timeout=5)
            except PidurableError as error:
                told.append(error)

        look, client._look = client._look, lambda *_: None  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(1)
            assert harness.session.storage.command(key) is not None
            clock.step_us += timedelta(days=8) // US
            await harness.gc(older_than=timedelta(0))
            assert harness.session.storage.command(key) is None
            client._look = look  # type: ignore[method-assign]
    assert [type(error) for error in told] == [AnswerGoneError]
