"""Cases of replay: what was done is not done again, and code that changed wedges nothing.

Nothing is replayed here: a task goes on from its checkpoint. So the cases are about checkpoints.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio
from recount import check_at_rest
from test_recovering import reopened_after_every_commit
from worlds import ROOT, Actor, Harmless, Next, Start, World, child_of, done, forever, parent_of

from pidurable.tasks._definition import Retry
from pidurable.testing import Fault


class Wobbly(Actor):
    """Tried again after an OSError, at once."""

    name = "test.wobbly"
    retry = Retry(on=(OSError,), tries=10, base=0.0, jitter=0.0)


def rounds(world: World, ledger: list[str], count: int) -> Any:
    """A loop of rounds: an effect, then a person's approval, each its own phase.

    `Next(2 n)` performs the effect of round n, `Next(2 n + 1)` takes the approval for it.
    """

    async def script(at: Any, ctx: Any) -> None:
        step = 0 if isinstance(at, Start) else at.n
        number = step // 2
        if step % 2 == 0:
            if number == count:
                await ctx.complete(str(count))
                return
            key = ctx.key(f"round {number}")
            if key not in ledger:  # the other side deduplicates by the key
                ledger.append(key)
            await ctx.wait(then=Next(step + 1), signals=True)
        else:
            async with ctx.commit() as tx:
                taken = tx.receive(limit=1)
                if taken:
                    tx.append(ROOT, f"approved {taken[0][1]}", kind="note")
                    tx.goto(Next(step + 1))
                else:
                    tx.wait(then=Next(step), signals=True)

    return script


async def test_five_approvals_with_a_death_after_each_are_five_effects() -> None:
    """A loop with a pause in it goes on from the pause: nothing before it is done again."""
    # C010
    ledger: list[str] = []
    world = World()
    world.scripts["loop"] = rounds(world, ledger, 5)
    async with world.crashing():
        task = await world.create("loop")
        await world.quiet()
    for number in range(5):
        assert len(ledger) == number + 1
        async with world.crashing():
            await world.quiet()
            await world.signal(task, "approve", number, key=f"decision {number}")
            # The decision is durable, and nothing has come of it yet.
        async with world.crashing():
            await world.quiet()
            # The same decision, sent again by somebody who was not told.
            if world.outcome(task) is None:
                await world.signal(task, "approve", number, key=f"decision {number}")
            await world.quiet()
    async with world.open() as rt:
        assert (await world.end(task)).result == "5"
        notes = [str(entry.data) for entry in rt.session.storage.entries(ROOT)]
    assert notes == [f'"approved {n}"' for n in range(5)]
    assert len(ledger) == len(set(ledger)) == 5


@pytest.mark.parametrize("killed_in", [0, 3, 9])
async def test_a_loop_of_ten_rounds_goes_on_live_after_a_death(killed_in: int) -> None:
    """There is no mode of catching up that could stay on: rounds after the death are as before."""
    # C016
    ledger: list[int] = []
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        number = 0 if isinstance(at, Start) else at.n
        if number == 10:
            await ctx.complete(f"{len(ledger)} rounds")
            return
        if number not in ledger:
            ledger.append(number)
            if number == killed_in:
                world.crash()
        await ctx.goto(Next(number + 1))

    async with world.crashing():
        task = await world.create("loop", script)
        await world.quiet()
    assert ledger == list(range(killed_in + 1))
    async with world.open():
        assert (await world.end(task)).result == "10 rounds"
    assert ledger == list(range(10))
    # One invocation to the death, and one for all the rest.
    assert world.row(task).invocations == 2


async def test_what_one_child_undid_is_not_undone_again_because_another_one_failed() -> None:
    """A failed and its error handling is over; B is tried again, over crashes: one entry of it."""
    # C011
    ledger: Counter[str] = Counter()
    trouble = {"left": 4}

    def setup(world: World) -> None:
        world.install(Actor, Wobbly)
        trouble["left"] = 4

        async def fails(at: Any, ctx: Any) -> None:
            await ctx.fail("no stock")

        async def refund(at: Any, ctx: Any) -> None:
            ledger[ctx.key("refund")] += 1
            async with ctx.commit() as tx:
                tx.append(ROOT, f"refund {ledger[ctx.key('refund')]}", kind="note")
                tx.complete("refunded")

        async def a(at: Any, ctx: Any) -> None:
            """Waits for its part, and sees to what its failure needs."""
            if isinstance(at, Start):
                async with ctx.commit() as tx:
                    part = tx.create_task(Actor, "part", key="part")
                    tx.wait(then=Next(1), on=[part])
            elif at.n == 1:
                async with ctx.commit() as tx:
                    handling = tx.create_task(Actor, "refund", key="refund")
                    tx.wait(then=Next(2), on=[handling])
            else:
                await ctx.fail("no stock, refunded")

        async def b(at: Any, ctx: Any) -> None:
            if trouble["left"]:
                trouble["left"] -= 1
                raise OSError("not now")
            await ctx.complete("b")

        async def top(at: Any, ctx: Any) -> None:
            if isinstance(at, Start):
                async with ctx.commit() as tx:
                    ids = [
                        tx.create_task(Actor, "a", key="a"),
                        tx.create_task(Wobbly, "b", key="b"),
                    ]
                    tx.wait(then=Next(1), on=ids)
                return
            keyed = ctx.snapshot.keyed_tasks()
            one, two = await ctx.outcomes([keyed["a"], keyed["b"]])
            await ctx.complete(f"{one.status}, {two.status}")

        world.scripts.update(part=fails, refund=refund, a=a, b=b, top=top)

    async def play(world: World) -> dict[str, Any]:
        outcome = await world.end(await world.create("top", key="top"))
        notes = [entry.data for entry in world.rt.session.storage.entries(ROOT)]
        return {"outcome": outcome.result, "notes": len(notes)}

    await reopened_after_every_commit(setup, play)
    # Killed between the effect and its outcome it was asked for again, with the same key.
    assert len(ledger) == 1


async def test_an_error_that_was_stored_reads_the_same_ever_after() -> None:
    """Type, message and detail of a failure are what the parent saw before the death, too."""
    # C013
    world = World()
    seen: list[tuple[Any, ...]] = []

    class Declined(Exception):
        def __init__(self, code: int, *, at: object) -> None:
            super().__init__(f"declined with {code}")
            self.code, self.at = code, at

    async def raising(at: Any, ctx: Any) -> None:
        try:
            raise Declined(51, at=object())
        except Declined as declined:
            await ctx.fail(declined, detail={"code": declined.code})

    async def faulted(at: Any, ctx: Any) -> None:
        raise Declined(52, at=object())

    async def parent(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                ids = [tx.create_task(Actor, name, key=name) for name in ("fails", "faults")]
                tx.wait(then=Next(1), on=ids)
            return
        keyed = ctx.snapshot.keyed_tasks()
        for outcome in await ctx.outcomes([keyed["fails"], keyed["faults"]]):
            error = outcome.error
            seen.append((outcome.status, error.type, error.message, error.detail))
            assert (error.traceback is None) is (outcome.status == "failed")
        await trio.sleep_forever()

    world.scripts.update(fails=raising, faults=faulted)
    for life in range(3):
        async with world.crashing():
            if not life:
                task = await world.create("parent", parent)
            await world.quiet()
    assert len(seen) == 6
    assert seen[:2] == seen[2:4] == seen[4:]
    name = f"{Declined.__module__}.{Declined.__qualname__}"
    assert seen[0] == ("failed", name, "declined with 51", {"code": 51})
    assert seen[1] == ("faulted", name, "declined with 52", None)
    async with world.open():
        await world.abort(task)
        await world.end(task)


@pytest.mark.parametrize("way", ["refused", "lost"])
async def test_a_task_that_was_never_stored_leaves_nothing_for_the_next_one(
    autojump_clock: Any, way: str
) -> None:
    """Its key, input, memos and signals are free: the task that gets the key does its own work."""
    # C014
    world = World(storage_retry_seconds=1.0)
    seen: list[Any] = []

    async def script(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            seen.append((ctx.input, tx.memo("drawn", ctx.input), tx.receive()))
            tx.complete(ctx.input)

    world.scripts.update(old=script, new=script)

    def make(tx: Any) -> int:
        id: int = tx.create_task(Actor, "old", conversation=ROOT, key="order")
        tx.signal(id, "hurry")
        return id

    async with world.crashing():
        if way == "refused":
            world.storage.add(Fault.refuse(times=40))
        else:
            world.storage.add(Fault.call(world.storage.freeze))
        with pytest.raises(Exception, match=r"full|frozen"):
            await world.rt.commit(make)
        if way == "refused":
            await trio.sleep(60)
            task = await world.create("new", key="order")
            assert (await world.end(task)).result == "new"
    if way == "lost":
        async with world.open():
            task = await world.create("new", key="order")
            assert (await world.end(task)).result == "new"
    assert seen == [("new", "new", [])]
    assert len(world.rows()) == 1


class Renamed(Actor):
    """A second version whose phases the stored tasks do not know, and that cannot migrate."""

    name = "test.actor"
    version = 2


@pytest.mark.parametrize("state", ["running", "waiting", "over a child"])
async def test_an_upgrade_that_fits_no_stored_task_wedges_nothing(state: str) -> None:
    """Each is parked with its reason, cancels without the code, and lets the others go on."""
    # C015
    world = World(Actor, Harmless)
    world.scripts["child"] = forever

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start) and state == "waiting":
            await ctx.wait(then=Next(1), signals=True)
        elif isinstance(at, Start) and state == "over a child":
            async with ctx.commit() as tx:
                child = tx.create_task(Harmless, "child", key="child")
                tx.wait(then=Next(1), on=[child], signals=True)
        else:
            await trio.sleep_forever()

    async with world.crashing():
        cancelled = await world.create("cancelled", script)
        resumed = await world.create("resumed", script)
        other = await world.create("other", forever, kind=Harmless)
        await world.quiet()
    world.install(Renamed, Harmless)
    world.scripts["other"] = done
    async with world.open() as rt:
        assert (await world.end(other)).status == "completed"
        if state != "running":
            for id in (cancelled, resumed):
                await world.signal(id)
        await world.quiet()
        reasons = {world.row(id).blocked for id in (cancelled, resumed)}
        assert reasons == {"migration_failed"}
        before = world.log.copy()
        await world.abort(cancelled)
        outcome = await world.end(cancelled)
        assert (outcome.status, outcome.reason) == ("orphaned", "migration_failed")
        # Trying to resume the other one parks it again, once and without a loop.
        applied = world.storage.count("apply")
        await rt.retry_task(resumed)
        await world.quiet()
        assert world.row(resumed).blocked == "migration_failed"
        assert world.storage.count("apply") == applied + 2
        assert world.log == before
        await rt.wait_for_task(await world.create("later", done, kind=Harmless))
        # A rollback of the upgrade brings it back, from where it was.
        world.scripts["resumed"] = done
        world.install(Actor, Harmless)
        await rt.definitions_changed()
        await world.quiet()
        if state == "over a child":
            await world.abort(child_of(world, resumed, "child"))
        assert (await world.end(resumed)).status == "completed"
        await rt.wait_for_idle()
        check_at_rest(rt)
    resumed_at = "start" if state == "running" else "next 1"
    assert f"resumed {resumed_at}" in world.log


async def test_a_parent_of_tasks_that_an_upgrade_parked_can_be_cancelled() -> None:
    """A whole tree whose code is gone ends by an abort of its root, bottom-up and without code."""
    # C015
    world = World()
    world.scripts.update({"mid 1": parent_of("leaf 1"), "mid 2": parent_of("leaf 2")})
    world.scripts.update({"leaf 1": forever, "leaf 2": forever})
    async with world.crashing():
        top = await world.create("top", parent_of("mid 1", "mid 2"))
        await world.quiet()
    world.log.clear()
    world.definitions._by_kind.clear()
    async with world.open(start=False):
        await world.abort(top)
        assert (await world.end(top)).status == "orphaned"
    rows = world.rows()
    assert {row.outcome_status for row in rows} == {"orphaned"}
    ends = {row.id: row.ended_us or 0 for row in rows}
    assert all(ends[row.id] <= ends[row.owner] for row in rows if row.owner is not None)
    assert world.log == []


@pytest.mark.parametrize("stored", [False, True])
async def test_a_key_of_another_kind_of_task_answers_nobody(stored: bool) -> None:
    """Whoever changed what it makes under a key is told, in one commit and in a later one."""
    # C012: recorded results are not taken for those of another step.
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Next):
            await ctx.create_task(Harmless, "ship", key="step 1")
        async with ctx.commit() as tx:
            first = tx.create_task(Actor, "pack", key="step 1")
            # The same kind is found again, whatever its input is by now.
            assert tx.create_task(Actor, "pack it well", key="step 1") == first
            if not stored:
                tx.create_task(Harmless, "ship", key="step 1")
            tx.goto(Next(1))

    world.scripts["pack"] = done
    async with world.open() as rt:
        task = await world.create("a", script)
        outcome = await world.end(task)
        await rt.wait_for_idle()
    assert outcome.status == "faulted"
    assert outcome.error is not None
    first = child_of(world, task, "step 1") if stored else task + 1
    name = "next" if stored else "start"
    assert outcome.error.message == (
        f"phase `{name}` of Actor (test.actor): key: it names task {first} of the kind "
        "'test.actor' already, not one of 'test.harmless'; choose another key, got 'step 1'"
    )
    assert len(world.rows()) == (2 if stored else 1)


async def test_a_child_whose_code_is_gone_is_found_again_by_its_key() -> None:
    """Its parent, run again after a death, waits for what it made instead of failing for it."""
    # C015
    world = World()

    class Child(Actor):
        name = "test.child"

    async def parent(at: Any, ctx: Any) -> None:
        child = await ctx.create_task(Child, "child", key="child")
        await ctx.complete((await ctx.wait_for_task(child)).status)

    world.install(Actor, Child)
    world.scripts["child"] = forever
    async with world.crashing():
        task = await world.create("parent", parent)
        await world.quiet()
    world.install(Actor)
    async with world.open():
        await world.quiet()
        child = child_of(world, task, "child")
        assert (world.status(task), world.row(child).blocked) == ("running", "missing_definition")
        await world.abort(child)
        assert (await world.end(task)).result == "orphaned"


async def test_a_refused_result_is_stored_by_the_try_that_follows(autojump_clock: Any) -> None:
    """The outcome could not be saved: the phase is run again and saves it, with the same key."""
    # C050, C011: storing fails, not the effect.
    world = World(storage_retry_seconds=1.0)
    ledger: Counter[str] = Counter()

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.goto(Next(1))
            return
        ledger[ctx.key("charge")] += 1
        if ledger[ctx.key("charge")] == 1:
            world.storage.add(Fault.refuse(times=20))
        await ctx.complete("charged")

    async with world.open():
        task = await world.create("a", script)
        assert (await world.end(task)).result == "charged"
    assert list(ledger.values()) == [2]
    assert world.row(task).recoveries == 0
