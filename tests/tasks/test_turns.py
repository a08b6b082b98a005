"""Whose turn it is: first ready first, conversations in turn, aborts first, 500 records a pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio
from histories import Histories
from recount import check_at_rest
from seeded import unwatched
from worlds import ROOT, Actor, Harmless, Next, Other, Start, World, done, forever

from pidurable.records._limits import PASS_RECORDS_MAX
from pidurable.storage import Op
from pidurable.tasks._definition import Retry
from pidurable.tasks._ready import Ready
from pidurable.tasks._tree import RUNNING, TERMINAL


class Later(Actor):
    """Tried again after a minute, under the kind of the others."""

    name = "test.actor"
    retry = Retry(on=(OSError,), tries=3, base=60.0, jitter=0.0)


class Tickets:
    """A script that notes its turn, and ends when it is given a ticket."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.given = trio.Semaphore(0)

    async def __call__(self, at: Any, ctx: Any) -> None:
        self.order.append(ctx.input)
        await self.given.acquire()
        await ctx.complete("")


async def test_in_one_conversation_the_turn_is_of_who_became_ready_first(
    autojump_clock: Any,
) -> None:
    """Created, woken, let go of a block and tried again: each by the moment it became ready."""
    world = World(Later, limits={Later.name: 1})
    tickets = Tickets()
    first_try = True

    async def woken(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            await ctx.wait(then=Next(1), signals=True)
        else:
            await tickets(at, ctx)

    async def retried(at: Any, ctx: Any) -> None:
        nonlocal first_try
        if first_try:
            first_try = False
            raise OSError("later")
        await tickets(at, ctx)

    for name in ("busy", "c1", "c2", "c3"):
        world.scripts[name] = tickets
    async with world.open() as rt:
        sleeper = await world.create("woken", woken)
        await world.create("retried", retried)
        await trio.sleep(1)
        await world.create("busy")
        await trio.sleep(1)
        await world.create("c1")
        await trio.sleep(1)
        await world.signal(sleeper)
        await trio.sleep(1)
        await world.create("c2")
        await trio.sleep(100)  # the retry is due meanwhile
        await world.create("c3")
        for _ in range(6):
            await trio.sleep(1)
            tickets.given.release()
        await rt.wait_for_idle()
        check_at_rest(rt)
    assert tickets.order == ["busy", "c1", "woken", "c2", "retried", "c3"]


async def test_conversations_below_one_take_one_turn_together() -> None:
    """A fan-out over many sub-agents is one neighbour, however many conversations it has made."""
    world = World(limits={Other.name: 1})
    tickets = Tickets()

    async def fans_out(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            for n in range(3):
                own = tx.create_conversation(key=f"own {n}")
                for m in range(2):
                    tx.create_task(Other, f"a{n}{m}", conversation=own)
        await ctx.complete("")

    names = [f"a{n}{m}" for n in range(3) for m in range(2)]
    world.scripts.update(dict.fromkeys([*names, "b0", "b1", "b2", "busy"], tickets))
    async with world.open() as rt:
        other = await rt.commit(lambda tx: tx.create_conversation())
        await world.create("busy", kind=Other, conversation=other)
        await world.quiet()
        await world.create("fan", fans_out)
        await world.quiet()
        for n in range(3):
            await world.create(f"b{n}", kind=Other, conversation=other)
        for _ in range(10):
            await world.quiet()
            tickets.given.release()
        await rt.wait_for_idle()
    order = [name[0] for name in tickets.order[1:]]
    assert order == ["a", "b", "a", "b", "a", "b", "a", "a", "a"]
    assert [name for name in tickets.order if name[0] == "a"] == names


async def test_a_pass_writes_500_records_at_most_and_repeats() -> None:
    """Reservations, marks, wakings and ends are all counted; none of them is left over."""
    world = World(running_max=5_000)
    world.scripts["sleeps"] = waits
    count = 1_100
    async with world.open() as rt:
        unwatched(world)
        histories = Histories.watch(world)

        def make(tx: Any) -> list[int]:
            tx.create_task(Actor, "owner", conversation=ROOT)
            return [tx.create_task(Actor, "sleeps", conversation=ROOT) for _ in range(count)]

        world.scripts["owner"] = forever
        tasks = await rt.commit(make)
        await world.quiet()
        assert {world.status(id) for id in tasks} == {"waiting"}
        await rt.commit(lambda tx: [tx.signal(id, "on") for id in tasks if not id % 2])
        await world.quiet()
        await rt.commit(lambda tx: [tx.abort_task(id) for id in tasks])
        await world.quiet()
        assert {world.outcome(id) for id in tasks} == {"aborted"}
        check_at_rest(rt)
    last: dict[int, str] = {}
    reserved: Counter[int] = Counter()
    sizes: list[int] = []
    for commit in histories.commits:
        began = [id for id, word in commit.items() if "running" in word]
        began = [id for id in began if "running" not in last.get(id, "")]
        last |= commit
        reserved.update(began)
        sizes.append(len(began))
    assert max(sizes) == PASS_RECORDS_MAX
    assert set(reserved) > set(tasks)


async def waits(at: Any, ctx: Any) -> None:
    if isinstance(at, Start):
        await ctx.wait(then=Next(1), signals=True)
    else:
        await trio.sleep_forever()


async def test_marks_of_a_wide_owner_come_500_a_commit() -> None:
    """An owner of 1,200 is marked alone; what is below follows, owners before what they own."""
    world = World(running_max=5_000)
    marked: list[int] = []

    class Marks(Histories):
        def committed(self, tx: Any) -> None:
            found = sum(
                op is Op.TASK_STATE and row.abort_us is not None and row.status != TERMINAL
                for op, row in tx.writes
            )
            if found:
                marked.append(found)

    async def owner(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            for n in range(1_200):
                tx.create_task(Harmless, f"c{n}")
        await trio.sleep_forever()

    world.scripts.update({f"c{n}": waits for n in range(1_200)})
    async with world.open() as rt:
        unwatched(world)
        task = await world.create("owner", owner)
        await world.quiet()
        rt.session.participants.append(Marks(world=world))
        await world.abort(task)
        assert (await world.end(task)).status == "aborted"
        await rt.wait_for_idle()
    assert marked[0] == 1
    assert max(marked) <= PASS_RECORDS_MAX
    assert {row.outcome_status for row in world.rows()} == {"aborted"}


async def test_abort_work_goes_before_what_is_ready() -> None:
    """With more ready than a pass takes, the handlers of aborted tasks are in its first commit."""
    world = World(running_max=5_000)
    count = 1_200
    world.scripts.update(a=forever, crowd=forever)
    async with world.open() as rt:
        unwatched(world)
        aborted = [await world.create("a") for _ in range(10)]
        await world.quiet()
        histories = Histories.watch(world)

        def both(tx: Any) -> None:
            for _ in range(count):
                tx.create_task(Actor, "crowd", conversation=ROOT)
            for id in aborted:
                tx.abort_task(id)

        await rt.commit(both)
        for id in aborted:
            await world.end(id)
        await rt.commit(lambda tx: [tx.abort_task(row.id) for row in world.rows()])
        await rt.wait_for_idle()
    commits = [
        [id for id, word in commit.items() if word == "running+mark"]
        for commit in histories.commits
    ]
    crowds = [sum(word == "running" for word in commit.values()) for commit in histories.commits]
    started = next(n for n, commit in enumerate(commits) if set(commit) & set(aborted))
    # Joining the aborted takes a pass or two of the crowd; after that they wait for nobody.
    assert sum(crowds[:started]) <= 2 * PASS_RECORDS_MAX
    everything = {id for commit in commits for id in commit}
    assert set(aborted) <= everything


async def test_a_full_kind_costs_no_look_at_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands ready behind a full kind, tasks of another one are taken as if alone."""
    world = World(limits={Actor.name: 1})
    taken: Counter[str] = Counter()
    pop = Ready.pop

    def counting(self: Ready, kind: str) -> Any:
        taken[kind] += 1
        return pop(self, kind)

    monkeypatch.setattr(Ready, "pop", counting)
    world.scripts.update(crowd=forever, other=done)
    async with world.open() as rt:
        unwatched(world)
        await rt.commit(
            lambda tx: [tx.create_task(Actor, "crowd", conversation=ROOT) for _ in range(2_000)]
        )
        await world.quiet()
        assert taken == {Actor.name: 1}
        for _ in range(50):
            await world.end(await world.create("other", kind=Other))
        assert taken == {Actor.name: 1, Other.name: 50}


async def test_a_step_writes_only_what_the_phase_committed() -> None:
    """n phases are n commits of theirs: between them nothing is written, and no line is taken."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        n = getattr(at, "n", 0)
        await (ctx.goto(Next(n + 1)) if n < 20 else ctx.complete(""))

    async with world.open() as rt:
        await world.quiet()
        before = rt.session.line.published_seq
        await world.end(await world.create("a", script))
        await world.quiet()
        # Creating, reserving, 20 times going on, completing.
        assert rt.session.line.published_seq - before == 1 + 1 + 20 + 1


async def test_all_that_is_running_is_running_in_this_process() -> None:
    """Only after its reservation is durable does a task run; one that is marked so belongs here."""
    world = World()
    began: list[bool] = []

    async def script(at: Any, ctx: Any) -> None:
        began.append(world.row(ctx.task_id).status == RUNNING)
        await ctx.complete("")

    async with world.open() as rt:
        tasks = [await world.create(f"t{n}", script) for n in range(50)]
        for task in tasks:
            await world.end(task)
        assert not rt.invocations
    assert began == [True] * 50
