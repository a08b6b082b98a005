"""What a restart does to live work: recover it, keep it for a person, or abort it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from recount import check_at_rest
from worlds import ROOT, Actor, Next, Other, Start, World, child_of, done, forever

from pidurable.errors import InvalidArgumentError
from pidurable.tasks._task_record import task_record


def owner_of(world: World, *children: tuple[str, Any], **options: Any) -> Any:
    """A script that creates children, each with its `on_restart`, and waits for them."""

    async def script(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                ids = [
                    tx.create_task(Actor, name, key=name, on_restart=value)
                    for name, value in children
                ]
                tx.wait(then=Next(1), on=ids)
            return
        await ctx.complete("joined")

    return script


async def test_go_is_the_default_and_recovers_what_ran() -> None:
    """Without a value, and with `go`, a task runs again from its checkpoint."""
    world = World()
    async with world.crashing():
        ids = [await world.create(name, forever, on_restart=v) for name, v in NAMES]
        await world.quiet()
    async with world.open():
        await world.quiet()
        assert [world.status(id) for id in ids] == ["running", "running"]


NAMES = (("a", None), ("b", "go"))


@pytest.mark.parametrize("clean", [False, True])
async def test_wait_blocks_a_task_and_everything_below_until_it_is_resumed(clean: bool) -> None:
    """Running, waiting and pending work below is interrupted; resume_task lets all of it go on."""
    world = World(limits={"test.other": 1})
    world.scripts["c"] = forever
    async with world.open() if clean else world.crashing():
        top = await world.create("p", owner_of(world, ("c", None)), on_restart="wait")
        free = await world.create("free", forever)
        await world.quiet()
        child = child_of(world, top, "c")
        assert world.status(child) == "running"
    world.log.clear()
    async with world.open() as rt:
        await world.quiet()
        assert world.log == ["free start"]
        assert [world.row(id).blocked for id in (top, child, free)] == [
            "interrupted",
            "interrupted",
            None,
        ]
        assert (world.status(top), world.status(child)) == ("waiting", "pending")
        check_at_rest(rt)
        world.scripts["c"] = done
        await rt.resume_task(top)
        assert (await world.end(top)).result == "joined"
        assert not rt.index.interrupted


async def test_what_woke_a_task_while_it_was_interrupted_counts_when_it_is_resumed(
    mock_clock: Any,
) -> None:
    """A deadline that passed and a signal that came are found at once by a resumed wait."""
    world = World()

    async def waits(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            later = ctx.now() + timedelta(seconds=10)
            await ctx.wait(then=Next(1), deadline=later, signals=True)
        else:
            await ctx.complete(ctx.woken_by)

    async with world.open():
        by_time = await world.create("t", waits, on_restart="wait")
        by_signal = await world.create("s", waits, on_restart="wait")
        await world.quiet()
    async with world.open() as rt:
        await world.signal(by_signal)
        mock_clock.jump(11)
        await world.quiet()
        assert world.status(by_time) == "waiting"
        for task in (by_time, by_signal):
            await rt.resume_task(task)
        assert (await world.end(by_time)).result == "deadline"
        assert (await world.end(by_signal)).result == "signal"


async def test_the_nearest_owner_decides() -> None:
    """A child that says `go` runs below an owner that waits; one that says `wait` waits alone."""
    world = World()
    world.scripts.update(c=forever, d=forever)
    async with world.crashing():
        top = await world.create("p", owner_of(world, ("c", "go"), ("d", None)), on_restart="wait")
        other = await world.create("q", owner_of(world, ("d", "wait")))
        await world.quiet()
    async with world.open() as rt:
        await world.quiet()
        assert world.status(child_of(world, top, "c")) == "running"
        assert world.row(child_of(world, top, "d")).blocked == "interrupted"
        assert world.row(other).blocked is None
        alone = child_of(world, other, "d")
        assert world.row(alone).blocked == "interrupted"
        world.scripts["d"] = done
        await rt.resume_task(alone)
        assert (await world.end(other)).result == "joined"
        check_at_rest(rt)


@pytest.mark.parametrize("blocked_before", [False, True])
async def test_code_that_comes_after_a_restart_does_not_resume(blocked_before: bool) -> None:
    """A task whose code was missing when the restart interrupted it goes on by a person alone."""
    world = World(Actor, Other)
    async with world.crashing():
        task = await world.create("a", forever, kind=Other, on_restart="wait")
        await world.quiet()
    world.install(Actor)
    if blocked_before:
        async with world.crashing() as rt:
            await rt.resume_task(task)
            await world.quiet()
            assert world.row(task).blocked == "missing_definition"
    async with world.open() as rt:
        await world.quiet()
        world.install(Actor, Other)
        await rt.definitions_changed()
        await world.quiet()
        assert (world.status(task), world.row(task).blocked) == ("pending", "interrupted")
        await rt.resume_task(task)
        await world.quiet()
        assert world.status(task) == "running"


async def test_resuming_goes_past_whatever_many_tasks_below_need_no_resuming(
    mock_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that looks at as many tasks as it may, and writes none, is followed by another."""
    monkeypatch.setattr("pidurable.tasks._pass._LOOKS_MAX", 10)
    world = World()
    many = 60

    async def top(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                for _ in range(many):
                    tx.create_task(Actor, "sleeper", on_restart="go")
                tx.create_task(Actor, "last", key="last")
                tx.goto(Next(1))
            return
        await forever(at, ctx)

    async def sleeper(at: Any, ctx: Any) -> None:
        await ctx.wait(then=Next(1), deadline=ctx.now() + timedelta(days=1))

    world.scripts.update(sleeper=sleeper, last=forever)
    async with world.crashing():
        owner = await world.create("p", top, on_restart="wait")
        await world.quiet()
        last = child_of(world, owner, "last")
        assert world.status(last) == "running"
    async with world.open() as rt:
        await world.quiet()
        assert world.row(last).blocked == "interrupted"
        await rt.resume_task(owner)
        await world.quiet()
        assert world.status(last) == "running"
        check_at_rest(rt)


async def test_new_work_below_an_interrupted_owner_waits_with_it() -> None:
    """Nothing new starts in a conversation below an interrupted task; it goes on when that does."""
    world = World()

    async def opens(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.create_conversation(key="below")
            tx.goto(Next(1))
        await forever(at, ctx)

    async with world.crashing() as rt:
        top = await world.create("p", opens, on_restart="wait")
        await world.quiet()
        below = rt.session.storage.conversation_by_key(top, "below")
        assert below is not None
    async with world.open() as rt:
        late = await world.create("late", done, conversation=below.id)
        shielded = await world.create("go", done, conversation=below.id, on_restart="go")
        await world.quiet()
        assert (world.status(late), world.row(late).blocked) == ("pending", None)
        assert world.outcome(shielded) == "completed"
        check_at_rest(rt)
        world.scripts["p"] = done
        await rt.resume_task(top)
        assert (await world.end(late)).status == "completed"
        assert (await world.end(top)).status == "completed"


async def test_a_task_below_an_interrupted_one_is_not_resumed_alone() -> None:
    """The error names the task to resume instead, and nothing is changed."""
    world = World()
    world.scripts["c"] = forever
    async with world.crashing():
        top = await world.create("p", owner_of(world, ("c", None)), on_restart="wait")
        await world.quiet()
    child = child_of(world, top, "c")
    async with world.open() as rt:
        for attempt in (rt.resume_task, rt.retry_task):
            with pytest.raises(InvalidArgumentError, match=f"below task {top} .*resume that one"):
                await attempt(child)
        assert world.row(child).blocked == "interrupted"
        await rt.retry_task(top)
        await world.quiet()
        assert world.status(child) == "running"
        await rt.resume_task(child)
        assert world.status(child) == "running"


async def test_an_abort_reaches_what_is_interrupted() -> None:
    """Aborting an interrupted owner runs the handlers of everything below, and then its own."""
    world = World()
    world.scripts["c"] = forever
    async with world.crashing():
        top = await world.create("p", owner_of(world, ("c", None)), on_restart="wait")
        await world.quiet()
    world.log.clear()
    async with world.open():
        await world.abort(top)
        assert (await world.end(top)).status == "aborted"
    assert world.log == ["c abort", "p abort"]


async def test_abort_marks_the_task_with_the_reason_restart() -> None:
    """Opening aborts it before anything else of it runs, with what is below it; once."""
    world = World()
    world.scripts["c"] = forever
    async with world.crashing():
        top = await world.create("p", owner_of(world, ("c", None)), on_restart="abort")
        await world.quiet()
    world.log.clear()
    child = child_of(world, top, "c")
    async with world.open(start=False):
        outcome = await world.rt.waits.for_task(top, waiter=None, timeout=None)
        assert outcome.status == "aborted"
        assert world.row(top).abort_reason == "restart"
        assert world.outcome(child) == "aborted"
    assert world.log == ["c abort", "p abort"]


async def test_every_restart_interrupts_again_what_was_resumed() -> None:
    """The value holds for each restart for as long as the task is live."""
    world = World()
    async with world.crashing():
        task = await world.create("a", forever, on_restart="wait")
        await world.quiet()
    for _ in range(2):
        async with world.crashing() as rt:
            assert world.row(task).blocked == "interrupted"
            await rt.resume_task(task)
            await world.quiet()
            assert world.status(task) == "running"


async def test_what_was_resumed_where_nothing_ran_is_not_interrupted_by_the_opening_that_runs_it(
    mock_clock: Any,
) -> None:
    """Resuming from the command line is one process, going on is another, looking a third."""
    world = World()
    world.scripts.update(c=forever, d=forever, q=forever)
    async with world.crashing():
        top = await world.create(
            "p", owner_of(world, ("c", None), ("d", "wait")), on_restart="wait"
        )
        other = await world.create("q", forever, on_restart="wait")
        await world.quiet()
    below = [child_of(world, top, name) for name in ("c", "d")]
    async with world.open(start=False) as rt:
        await rt.resume_task(top)
    for _ in range(2):
        async with world.open(start=False):
            assert world.row(top).blocked is None
            assert world.row(other).blocked == "interrupted"
    async with world.crashing():
        await world.quiet()
        assert [world.status(id) for id in (top, *below)] == ["waiting", "running", "running"]
        assert world.row(other).blocked == "interrupted"
    async with world.open() as rt:
        await world.quiet()
        assert [world.row(id).blocked for id in (top, *below, other)] == ["interrupted"] * 4
        await rt.retry_task(top)
        await world.quiet()
        assert [world.status(id) for id in below] == ["running", "running"]
        check_at_rest(rt)


async def test_an_abort_of_what_was_resumed_where_nothing_ran_says_its_own_reason() -> None:
    """Nothing of the note that was kept of the resumption is to be seen."""
    world = World()
    async with world.crashing():
        task = await world.create("a", forever, on_restart="wait")
        await world.quiet()
    async with world.open(start=False) as rt:
        await rt.resume_task(task)
        row = world.row(task)
        assert task_record(rt.session.storage, row).abort_reason is None
    async with world.open(start=False):
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
        assert world.row(task).abort_reason == "user"


async def test_a_background_task_is_not_interrupted_from_above() -> None:
    """A background task takes no value from the owner of its conversation."""
    world = World()
    made: list[int] = []

    async def opens(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            below = tx.create_conversation(key="below")
            made.append(tx.create_task(Actor, "bg", conversation=below, background=True))
            tx.goto(Next(1))
        await forever(at, ctx)

    world.scripts["bg"] = forever
    async with world.crashing():
        top = await world.create("p", opens, on_restart="wait")
        await world.quiet()
    async with world.open() as rt:
        await world.quiet()
        assert world.row(top).blocked == "interrupted"
        assert world.status(made[0]) == "running"
        check_at_rest(rt)


async def test_an_unknown_value_is_refused() -> None:
    """on_restart takes go, wait, abort or None; nothing is stored otherwise."""
    world = World()
    async with world.open():
        with pytest.raises(InvalidArgumentError, match=r"on_restart.*expected go, wait, abort"):
            await world.create("a", done, on_restart="later", conversation=ROOT)
        assert world.rows() == []


async def test_a_restart_aborts_what_was_parked() -> None:
    """`abort` lifts a parked fault with its stored error, and the abort handler decides anew."""

    class Parking(Actor):
        name = "test.parking"
        on_fault = "park"

    async def raises(at: Any, ctx: Any) -> None:
        raise ValueError("no")

    world = World(Parking)
    async with world.open():
        task = await world.create("a", raises, kind=Parking, on_restart="abort")
        await world.quiet()
        assert world.row(task).blocked == "faulted"
    async with world.open():
        assert (await world.end(task)).status == "aborted"


async def test_what_runs_beside_an_interrupted_task_leaves_no_trail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many tasks come and go while it stands, few of them are remembered."""
    monkeypatch.setattr("pidurable.tasks._session_tree._FREE_KEPT", 10)
    world = World()
    async with world.crashing():
        stands = await world.create("stands", forever, on_restart="wait")
        await world.quiet()
    async with world.open() as rt:
        for _ in range(40):
            await world.end(await world.create("d", done))
        assert world.row(stands).blocked == "interrupted"
        assert 0 < len(rt._unhalted) <= 13
