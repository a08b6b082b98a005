"""What the step between two phases makes of what a handler left behind, sentence by sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from recount import check_at_rest
from worlds import ROOT, Actor, Harmless, Next, Start, World, done, forever, parent_of

from pidurable.errors import (
    AbortRequestedError,
    InvocationEndedError,
    TooManyMemosError,
    WaitCycleError,
)
from pidurable.tasks._definition import Retry
from pidurable.testing import Fault


class Again(Actor):
    """Tried three times, at once."""

    name = "test.again"
    retry = Retry(on=(OSError,), tries=3, base=0.0, jitter=0.0)


# --- the record ---------------------------------------------------------------------------------


async def raises(at: Any, ctx: Any) -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("way", ["complete", "fail", "fault", "abort", "nothing to undo", "held"])
async def test_a_receipt_keeps_input_and_outcome_and_nothing_else(way: str) -> None:
    """Checkpoint, memos, signals and the wait go with the end, however it comes about."""
    world = World()
    world.scripts["child"] = forever

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.memo("drawn", 1)
            if way == "held":
                await ctx.create_task(Actor, "child", key="child")
            await ctx.goto(Next(1))
            return
        if way in ("abort", "nothing to undo"):
            await ctx.wait(then=Next(2), signals=True, on=[ctx.task_id - 1])
        elif way == "fail":
            await ctx.fail("enough", result="half")
        elif way == "fault":
            raise ValueError("enough")
        else:
            await go.wait()
            await ctx.complete("done")

    go = trio.Event()
    kind = Harmless if way == "nothing to undo" else Actor
    async with world.open():
        other = await world.create("other", forever)
        task = await world.create("a", script, kind=kind)
        await world.quiet()
        if "abort" in way or way == "nothing to undo":
            await world.abort(task)
        else:
            if way in ("complete", "held"):
                await world.signal(task)
            go.set()
        if way == "held":
            await world.quiet()
            assert world.base.reopen()._data.outcomes[task]
            await world.abort(task)
        await world.end(task)
        assert world.status(other) == "running"
    data = world.base.reopen()._data
    assert data.inputs[task] == '"a"'
    assert json.loads(data.outcomes[task])["status"] == world.outcome(task)
    assert task not in data.checkpoints
    assert task not in data.waits
    assert not data.memos.get(task)
    assert not [row for row in data.signals.values() if row.task == task]


async def test_started_at_is_the_first_reservation_and_is_kept(autojump_clock: Any) -> None:
    """Waits, crashes and handovers begin further invocations, and it stays; each one is counted."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), signals=True)
        elif at.n == 1:
            await ctx.goto(Next(2))
            await trio.sleep(10)
        else:
            await trio.sleep_forever()

    async with world.crashing():
        task = await world.create("a", script)
        await trio.sleep(5)
        first = world.row(task)
        assert first.started_us is not None
        assert first.started_us < world.clock.now_us()
        await world.signal(task)
        await trio.sleep(5)
        world.install(Actor)  # handed over at its next safe point
        await trio.sleep(20)
    async with world.open():
        await trio.sleep(5)
        row = world.row(task)
        assert (row.started_us, row.created_us) == (first.started_us, first.created_us)
        # The first, after the wait, after the handover, after the crash.
        assert row.invocations == 4
        await world.abort(task)
        await world.end(task)
    ended = world.row(task)
    assert ended.started_us == first.started_us
    assert ended.ended_us is not None
    assert ended.ended_us > ended.started_us


async def test_a_wait_counts_as_progress_and_forgives_a_crash() -> None:
    """Deaths before a committed wait are not added to those after it."""
    world = World()
    wait = False

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start) and wait:
            await ctx.wait(then=Next(1), signals=True)
        else:
            await trio.sleep_forever()

    for life in range(3):
        async with world.crashing():
            if not life:
                task = await world.create("a", script)
            await world.quiet()
    assert world.row(task).recoveries == 2
    wait = True
    async with world.crashing():
        await world.quiet()
        assert (world.status(task), world.row(task).recoveries) == ("waiting", 0)
        await world.signal(task)
        await world.quiet()
    async with world.open():
        await world.quiet()
        assert world.row(task).recoveries == 1


# --- what counts as progress --------------------------------------------------------------------


async def test_to_go_somewhere_and_back_is_no_progress() -> None:
    """What counts is where the phase leaves the task, not what it committed on its way."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.goto(Next(1))
            return
        await ctx.goto(Next(2))
        await ctx.goto(Next(1))

    async with world.open():
        outcome = await world.end(await world.create("a", script))
    assert outcome.status == "faulted"
    assert outcome.error is not None
    assert outcome.error.type == "no_progress"
    assert world.log == ["a start", "a next 1"]


@pytest.mark.parametrize("kind", [Actor, Again])
async def test_a_raise_after_a_goto_is_a_raise(kind: type[Actor]) -> None:
    """It comes before the progress in the step; a retry begins at the checkpoint it had reached."""
    world = World(Actor, Again)

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.goto(Next(1))
            raise OSError("after its goto")
        await ctx.complete("went on")

    async with world.open():
        task = await world.create("a", script, kind=kind)
        outcome = await world.end(task)
    if kind is Actor:
        assert (outcome.status, world.log) == ("faulted", ["a start"])
    else:
        assert (outcome.result, world.log) == ("went on", ["a start", "a next 1"])


async def test_the_last_goto_of_a_commit_counts_and_a_wait_or_an_end_comes_over_it() -> None:
    """One commit has one end of it: a goto before a wait leads nowhere else than the wait does."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                tx.goto(Next(1))
                tx.goto(Next(2))
        elif at.n == 2:
            async with ctx.commit() as tx:
                tx.goto(Next(3))
                tx.wait(then=Next(4), on=[])
        else:
            async with ctx.commit() as tx:
                tx.goto(Next(5))
                tx.complete("at the end")

    async with world.open():
        assert (await world.end(await world.create("a", script))).result == "at the end"
    assert world.log == ["a start", "a next 2", "a next 4"]


async def test_a_refusal_that_a_handler_caught_is_no_fault() -> None:
    """Only what leaves the handler is one: it may be told no and decide otherwise."""
    world = World()
    told: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        for refused, call in (
            (WaitCycleError, lambda: ctx.wait(then=Next(1), on=[ctx.task_id])),
            (ValueError, lambda: ctx.complete(object())),
        ):
            try:
                await call()
            except refused as error:
                told.append(type(error).__name__)
        await ctx.complete("otherwise")
        try:
            await ctx.goto(Next(1))
        except InvocationEndedError as error:
            told.append(type(error).__name__)

    async with world.open():
        assert (await world.end(await world.create("a", script))).result == "otherwise"
    assert told == ["WaitCycleError", "NotJsonError", "InvocationEndedError"]


async def test_a_commit_behind_a_mark_is_told_so_once_the_mark_is_durable() -> None:
    """An error that stands on what is in the storage is not told before that is stored."""
    world = World()
    go = trio.Event()
    told: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        with trio.CancelScope(shield=True):
            await go.wait()
            try:
                await ctx.goto(Next(1))
            except AbortRequestedError as error:
                told.append(error.reason)

    async with world.open(), trio.open_nursery() as nursery:
        task = await world.create("a", script)
        await world.quiet()
        world.blocking.hold()
        nursery.start_soon(world.abort, task, "enough")
        await world.quiet()
        go.set()
        await world.quiet()
        assert told == []
        world.blocking.release()
        await world.end(task)
    assert told == ["enough"]


async def test_a_refusal_that_stood_on_a_lost_mark_is_never_told() -> None:
    """The mark died in the storage: so did what was refused for its sake, and the session."""
    world = World()
    go = trio.Event()
    told: list[type[BaseException]] = []

    async def script(at: Any, ctx: Any) -> None:
        with trio.CancelScope(shield=True):
            await go.wait()
            try:
                await ctx.goto(Next(1))
            except Exception as error:
                told.append(type(error))
                raise

    async with world.crashing(), trio.open_nursery() as nursery:
        task = await world.create("a", script)
        await world.quiet()
        world.storage.add(Fault.call(world.storage.freeze))
        world.blocking.hold()

        async def abort() -> None:
            with pytest.raises(Exception, match="frozen"):
                await world.abort(task)

        nursery.start_soon(abort)
        await world.quiet()
        go.set()
        await world.quiet()
        world.blocking.release()
        await world.quiet()
    assert len(told) == 1
    assert not issubclass(told[0], AbortRequestedError)
    world.scripts["a"] = done
    async with world.open():
        assert (await world.end(task)).status == "completed"


# --- nurseries, memos ---------------------------------------------------------------------------


async def test_a_handler_may_commit_from_a_nursery_of_its_own() -> None:
    """Its commits are ordered by the line; a memo and a key have one first writer among them."""
    world = World()
    seen: list[Any] = []
    ids: list[int] = []

    async def script(at: Any, ctx: Any) -> None:
        async def one(n: int) -> None:
            seen.append(await ctx.memo("drawn", n))
            ids.append(await ctx.create_task(Actor, f"child {n}", key="child"))
            async with ctx.commit() as tx:
                tx.append(ROOT, n, kind="note")

        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(one, n)
        await ctx.complete(str(seen[0]))

    world.scripts.update({f"child {n}": done for n in range(20)})
    async with world.open() as rt:
        outcome = await world.end(await world.create("a", script))
        assert len(rt.session.storage.entries(ROOT)) == 20
    assert set(seen) == {int(outcome.result)}
    assert len(set(ids)) == 1
    assert len(world.rows()) == 2


async def test_a_memo_of_a_refused_commit_stands_for_nobody() -> None:
    """It is stored with its commit or not at all; the next candidate is the first one then."""
    world = World()
    seen: list[Any] = []

    async def script(at: Any, ctx: Any) -> None:
        with pytest.raises(ValueError, match="no"):  # noqa: PT012
            async with ctx.commit() as tx:
                seen.append(tx.memo("drawn", "first"))
                raise ValueError("no")
        async with ctx.commit() as tx:
            seen.append(tx.memo("drawn", "second"))
            seen.append(tx.memo("drawn", "third"))
        seen.append(await ctx.memo("drawn", "fourth"))
        await ctx.complete("")

    async with world.open():
        await world.end(await world.create("a", script))
    assert seen == ["first", "second", "second", "second"]


async def test_memos_reach_the_abort_handler_and_its_own_survive_a_crash() -> None:
    """What the phase fixed is there to undo it by; what the handler fixes is fixed as well."""
    world = World()
    seen: list[Any] = []

    async def script(at: Any, ctx: Any) -> None:
        await ctx.memo("key", "of the phase")
        await trio.sleep_forever()

    async def undo(at: Any, ctx: Any) -> None:
        seen.append(await ctx.memo("key", "of the handler"))
        seen.append(await ctx.memo("refund", len(seen)))
        if len(seen) < 4:
            await trio.sleep_forever()
        await ctx.end_aborted(str(seen))

    world.aborts["a"] = undo
    async with world.crashing():
        task = await world.create("a", script)
        await world.quiet()
        await world.abort(task)
        await world.quiet()
    async with world.open():
        await world.end(task)
    assert seen == ["of the phase", 1, "of the phase", 1]


async def test_memos_of_one_batch_are_counted_together() -> None:
    """At 63 of 64, ten commits at once store one more, and the others are refused."""
    world = World()
    results: list[str] = []

    async def script(at: Any, ctx: Any) -> None:
        for n in range(63):
            await ctx.memo(f"m{n}", n)

        async def one(n: int) -> None:
            try:
                await ctx.memo(f"x{n}", n)
                results.append("stored")
            except TooManyMemosError:
                results.append("refused")

        async with trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(one, n)
        await ctx.goto(Next(1))
        await trio.sleep_forever()

    async with world.open() as rt:
        task = await world.create("a", script)
        await world.quiet()
        assert len(rt.session.storage.task_memos(task)) == 64
        assert not rt.staged_memos
    assert sorted(results) == ["refused"] * 9 + ["stored"]


@pytest.mark.parametrize("together", [False, True])
async def test_signals_are_taken_oldest_first_by_whoever_asks_next(together: bool) -> None:
    """Commits of one batch, and calls in one commit, go on where the last one stopped."""
    world = World()
    got: list[list[int]] = []

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), signals=True)
            return

        async def take() -> None:
            async with ctx.commit() as tx:
                got.append([payload for _, payload in tx.receive(limit=2)])

        if together:
            async with ctx.commit() as tx:
                got.extend([payload for _, payload in tx.receive(limit=2)] for _ in range(5))
        else:
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(take)
        await ctx.complete("")

    async with world.open() as rt:
        task = await world.create("a", script)
        await rt.commit(lambda tx: [tx.signal(task, "s", n) for n in range(8)] and None)
        await world.end(task)
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7], []]


# --- what leaves a handler ----------------------------------------------------------------------


class OddError(BaseException):
    """No Exception, and no cancellation either."""


@pytest.mark.parametrize("error", [OddError("odd"), GeneratorExit("odd"), StopIteration("odd")])
async def test_whatever_leaves_a_handler_is_a_fault_with_its_type(error: BaseException) -> None:
    """No kind of exception gets past the step, and none of them breaks the runtime."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        raise error

    async with world.open() as rt:
        outcome = await world.end(await world.create("a", script))
        assert rt.session.line.poison is None
        assert (await world.end(await world.create("b", done))).status == "completed"
    assert outcome.status == "faulted"
    assert outcome.error is not None


@pytest.mark.parametrize("fatal", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["group", "nursery", "abort handler"])
async def test_an_interrupt_closes_the_harness_from_wherever_it_comes(
    fatal: type[BaseException], where: str
) -> None:
    """Inside of a group, out of a nursery, out of an abort handler: bare, and nobody is faulted."""
    # C052
    world = World()

    async def interrupt(at: Any = None, ctx: Any = None) -> None:
        raise fatal

    async def script(at: Any, ctx: Any) -> None:
        if where == "group":
            raise BaseExceptionGroup("both", [ValueError("beside"), fatal()])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            if where == "nursery":
                nursery.start_soon(interrupt)

    world.aborts["a"] = interrupt
    with pytest.raises(fatal):  # noqa: PT012
        async with world.open():
            task = await world.create("a", script)
            if where == "abort handler":
                await world.quiet()
                await world.abort(task)
            await trio.sleep_forever()
    assert (world.status(task), world.outcome(task)) == ("pending", None)
    assert world.row(task).recoveries == 0
    world.scripts["a"] = done
    world.aborts.clear()
    async with world.open():
        expected = "aborted" if where == "abort handler" else "completed"
        assert (await world.end(task)).status == expected


async def test_the_traceback_of_a_large_group_is_bounded_and_says_that_it_was_cut() -> None:
    """Message and traceback have their limits in bytes, whatever is raised."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        raise ExceptionGroup("many", [ValueError("ü" * 100) for _ in range(2_000)])

    async with world.open():
        outcome = await world.end(await world.create("a", script))
    assert outcome.error is not None
    assert outcome.error.traceback is not None
    assert len(outcome.error.message.encode()) <= 4 * 1024
    assert 30 * 1024 < len(outcome.error.traceback.encode()) <= 32 * 1024
    assert outcome.error.message.endswith("[cut]")
    assert outcome.error.traceback.endswith("[cut]")


# --- abort handlers -----------------------------------------------------------------------------


async def test_a_handler_past_its_time_is_faulted_only_when_it_has_stopped(
    autojump_clock: Any,
) -> None:
    """Its owner ends after it, and its time covers all the steps of its invocation together."""

    class Bounded(Actor):
        name = "test.bounded"
        abort_timeout = 30.0

    world = World(Bounded, Actor)

    async def undo(at: Any, ctx: Any) -> None:
        if getattr(at, "n", 0) < 2:
            await trio.sleep(14)
            await ctx.goto(Next(getattr(at, "n", 0) + 1))
            return
        try:
            await trio.sleep(14)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(8)
            world.log.append("stopped")

    world.scripts.update(child=forever, parent=parent_of("child", kind=Bounded))
    world.aborts["child"] = undo
    async with world.open() as rt:
        task = await world.create("parent")
        await trio.sleep(1)
        began = trio.current_time()
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
        assert 37.9 < trio.current_time() - began < 38.1
        check_at_rest(rt)
    assert {row.outcome_status for row in world.rows()} == {"faulted", "aborted"}
    assert world.log[-2:] == ["stopped", "parent abort"]


async def test_an_outcome_that_was_stored_in_time_is_no_timeout(autojump_clock: Any) -> None:
    """What the handler decided stands, however long it goes on after that."""

    class Bounded(Actor):
        name = "test.bounded"
        abort_timeout = 5.0

    world = World(Bounded)

    async def undo(at: Any, ctx: Any) -> None:
        await ctx.end_aborted("in time")
        await trio.sleep(100)

    world.aborts["a"] = undo
    async with world.open() as rt:
        task = await world.create("a", forever, kind=Bounded)
        await trio.sleep(1)
        await world.abort(task)
        assert (await world.end(task)).reason == "in time"
        await trio.sleep(10)
        assert not rt.invocations  # its time is up all the same


async def test_an_abort_handler_is_handed_over_between_its_steps() -> None:
    """Replaced while it undoes, the newer code's handler goes on at the checkpoint, once."""
    world = World()
    step = trio.Event()

    class Newer(Actor):
        async def abort(self, at: Any, ctx: Any) -> None:
            self.world.log.append(f"newer abort at {at}")
            await ctx.end_aborted("by the newer")

    Newer.name = Actor.name

    async def undo(at: Any, ctx: Any) -> None:
        await ctx.goto(Next(7))
        await step.wait()

    world.aborts["a"] = undo
    async with world.open() as rt:
        task = await world.create("a", forever)
        await world.quiet()
        await world.abort(task)
        await world.quiet()
        world.install(Newer)
        step.set()
        assert (await world.end(task)).reason == "by the newer"
        check_at_rest(rt)
    assert world.log == ["a start", "a abort", "newer abort at Next(n=7)"]


async def test_a_handler_returning_without_an_outcome_faults_its_task() -> None:
    """It was to decide; its owners end all the same, since a fault is an outcome."""
    world = World()

    async def undo(at: Any, ctx: Any) -> None:
        await trio.lowlevel.checkpoint()

    world.aborts["child"] = undo
    world.scripts["child"] = forever
    async with world.open():
        task = await world.create("parent", parent_of("child"))
        await world.quiet()
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
    assert sorted(str(row.outcome_status) for row in world.rows()) == ["aborted", "faulted"]


# --- what woke a task ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["crash", "close", "retry", "handover"])
async def test_what_woke_a_task_is_told_until_it_has_made_progress(
    autojump_clock: Any, how: str
) -> None:
    """The phase that was woken runs again after a death, a close and a raise, and knows why."""
    world = World(Again)
    seen: list[tuple[int, str | None]] = []

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), signals=True)
            return
        seen.append((at.n, ctx.woken_by))
        if len(seen) == 1 and how == "retry":
            raise OSError("not now")
        if len(seen) == 1 and how == "handover":
            world.install(Again)
            await ctx.goto(Next(2))
            return
        if len(seen) == 1:
            await trio.sleep_forever()
        async with ctx.commit() as tx:
            tx.complete(str(tx.receive()))

    async with world.crashing() if how == "crash" else world.open():
        task = await world.create("a", script, kind=Again)
        await world.quiet()
        await world.signal(task, "go")
        await trio.sleep(5)
    async with world.open():
        assert (await world.end(task)).result == "[('go', None)]"
    again = (2, None) if how == "handover" else (1, "signal")
    assert seen == [(1, "signal"), again]
