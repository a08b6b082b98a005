"""Why a task does not move: a code and a line for every state, from the holder's side."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
import trio
from worlds import ROOT, Actor, Next, Other, Start, World, child_of, done, forever, parent_of

from pidurable.errors import UnknownTaskError
from pidurable.records._codes import BLOCKED, NOT_MOVING
from pidurable.records._tasks import Status
from pidurable.tasks import _explain, _live_facts
from pidurable.tasks._explain import Explanation, explain
from pidurable.tasks._live_facts import LiveFacts
from pidurable.testing import Fault


def ask(world: World, task_id: int) -> Explanation:
    """Ask, and check what holds of every answer."""
    found = explain(LiveFacts(world.rt), task_id)
    assert found.task_id == task_id
    assert found.code in {**BLOCKED, **NOT_MOVING}
    assert "\n" not in str(found)
    assert str(found).startswith(f"task {task_id} ({found.kind}) {found.code}: {found.text}")
    return found


async def wait_for_signal(at: Any, ctx: Any) -> None:
    """Park until a signal comes, or for an hour."""
    if isinstance(at, Start):
        deadline = ctx.now() + timedelta(hours=1)
        await ctx.wait(then=Next(1), signals=True, deadline=deadline)
    else:
        await ctx.complete("woken")


async def test_a_running_task_says_where_and_since_when(autojump_clock: Any) -> None:
    """The time counts from the start of this invocation, and the process is named."""
    world = World()
    async with world.open():
        task = await world.create("a", forever)
        await trio.sleep(75)
        found = ask(world, task)

    assert found.code == "running"
    assert found.text.startswith("runs its code for 1m15s in this process (")
    assert (found.invocations, found.phase, found.path) == (1, "start", ())
    assert "last progress 1m15s ago" in str(found)
    assert str(found).endswith("1 invocation")


async def test_an_unknown_task_is_refused() -> None:
    """What is no task has no explanation."""
    world = World()
    async with world.open():
        for id in (99, ROOT, -1, "x", True):
            with pytest.raises(UnknownTaskError):
                explain(LiveFacts(world.rt), id)  # type: ignore[arg-type]


async def test_an_ended_task_says_how_and_why() -> None:
    """The outcome, with its error or reason, on one line whatever the error says."""
    world = World()

    async def fails(at: Any, ctx: Any) -> None:
        await ctx.fail("no\nmoney\x1b[2J")

    async with world.open():
        good, bad = await world.create("a", done), await world.create("b", fails)
        cut = await world.create("c", forever)
        await world.quiet()
        await world.abort(cut, "changed my mind")
        for task in (good, bad, cut):
            await world.end(task)
        texts = [ask(world, task).text for task in (good, bad, cut)]
        codes = {ask(world, task).code for task in (good, bad, cut)}
        outcomes = [ask(world, task).outcome for task in (good, bad, cut)]

    assert codes == {"ended"}
    assert outcomes == ["completed", "failed", "aborted"]
    assert texts[0].startswith("completed ")
    assert "'no\\nmoney\\x1b[2J'" in texts[1]
    assert texts[2].endswith("(reason undone)")


async def test_before_the_start_ready_tasks_say_so() -> None:
    """Nothing runs yet, and what starts it is named."""
    world = World()
    async with world.open(start=False) as rt:
        task = await rt.commit(lambda tx: tx.create_task(Actor, "a", conversation=ROOT))
        rt.started = False
        found = ask(world, task)

    assert found.code == "not_started"
    assert "start()" in (found.remedy or "")


async def test_a_task_that_waits_names_what_until_when_and_what_was_unread(
    autojump_clock: Any,
) -> None:
    """A signal and a deadline are named together, and the deadline is the next wake-up."""
    world = World()
    async with world.open() as rt:
        task = await world.create("a", wait_for_signal)
        await world.quiet()
        found = ask(world, task)
        row = rt.published.task(task)

    assert row is not None
    assert row.wait is not None
    assert found.code == "waiting"
    assert found.text.startswith("waits for a signal or until ")
    assert found.next_wake_us == row.wait.deadline_us
    assert "; next wake-up " in str(found)


async def test_a_join_is_followed_down_to_the_task_that_runs() -> None:
    """Owner, child, grandchild: the one that runs is named, not the one that only waits."""
    world = World()
    world.scripts.update(leaf=forever, idle=wait_for_signal, mid=parent_of("leaf"))
    async with world.open():
        top = await world.create("top", parent_of("idle", "mid"))
        await world.quiet()
        mid = child_of(world, top, "mid")
        leaf = child_of(world, mid, "leaf")
        found = ask(world, top)

    assert (found.code, found.path) == ("waiting", (mid, leaf))
    assert found.text.startswith(
        f"waits for 2 of 2 (all_settled): {mid} test.actor -> {leaf} test.actor, which runs its "
    )


async def test_of_several_the_one_that_runs_is_named_and_then_the_one_that_is_blocked() -> None:
    """While something that is awaited runs, that is what it waits for; else what is blocked is."""
    world = World()
    world.scripts.update(a=forever, b=wait_for_signal)

    async def start(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                ids = [tx.create_task(Other, "b", key="b"), tx.create_task(Actor, "a", key="a")]
                tx.wait(then=Next(1), on=ids)

    async with world.open():
        top = await world.create("top", start)
        await world.quiet()
        a, b = child_of(world, top, "a"), child_of(world, top, "b")
        world.install(Actor)  # `Other` is missing from now on
        await world.signal(b)
        await world.quiet()
        while_running = ask(world, top)
        await world.abort(a)
        await world.end(a)
        at_rest = ask(world, top)

    assert while_running.path == (a,)
    assert "which runs its code" in while_running.text
    assert at_rest.path == (b,)
    assert at_rest.text == (
        f"waits for 1 of 2 (all_settled): {b} test.other, which is blocked (missing_definition)"
    )
    assert at_rest.remedy == "install an extension that defines test.other, or abort it"
    assert str(at_rest).count("\n") == 0


async def test_a_long_way_down_is_shortened_and_its_whole_path_given() -> None:
    """Of a chain of twelve the first three and the last are shown; `path` has all."""
    world = World()
    names = [f"n{n}" for n in range(12)]
    for name, below in itertools.pairwise(names):
        world.scripts[name] = parent_of(below)
    world.scripts[names[-1]] = forever
    async with world.open():
        top = await world.create("n0")
        await world.quiet()
        chain = [top]
        for name in names[1:]:
            chain.append(child_of(world, chain[-1], name))
        found = ask(world, top)

    assert found.path == tuple(chain[1:])
    shown = [f"{id} test.actor" for id in chain[1:4]] + ["7 more", f"{chain[-1]} test.actor"]
    assert " -> ".join(shown) + ", which runs its code" in found.text


async def test_a_task_that_waits_in_memory_is_followed_too() -> None:
    """`ctx.wait_for_task` keeps the invocation, and what it waits for is named."""
    world = World()
    world.scripts["child"] = forever

    async def holds(at: Any, ctx: Any) -> None:
        child = await ctx.create_task(Actor, "child", key="child")
        await ctx.wait_for_task(child)

    async with world.open():
        task = await world.create("a", holds)
        await world.quiet()
        child = child_of(world, task, "child")
        found = ask(world, task)

    assert (found.code, found.path) == ("running", (child,))
    assert "and waits there for 1 task: " in found.text


async def test_a_completing_task_names_what_holds_it() -> None:
    """The outcome is held for the work below, through ended tasks and owned conversations."""
    world = World()

    async def leaves_a_child(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            below = tx.create_conversation(key="own")
        async with ctx.commit() as tx:
            tx.create_task(Actor, "held", conversation=below, key="held")
            tx.complete("done")

    world.scripts["held"] = forever
    async with world.open():
        top = await world.create("top", leaves_a_child)
        await world.quiet()
        found = ask(world, top)
        held = next(row.id for row in world.rows() if row.id not in (top,))

    assert (found.code, found.outcome, found.path) == ("completing", "completed", (held,))
    assert found.text.startswith("holds its outcome, completed, for 1 live task below: ")


async def test_an_abort_waits_for_what_is_below_and_then_for_its_handler() -> None:
    """A marked owner names the task below that is still undoing; the one below says it runs."""
    world = World()
    gate = trio.Event()

    async def slow(at: Any, ctx: Any) -> None:
        await gate.wait()
        await ctx.end_aborted("undone")

    world.scripts["child"] = forever
    world.aborts["child"] = slow
    async with world.open():
        top = await world.create("top", parent_of("child"))
        await world.quiet()
        child = child_of(world, top, "child")
        await world.abort(top, "enough")
        await world.quiet()
        owner, below = ask(world, top), ask(world, child)
        gate.set()
        await world.end(top)

    assert (owner.code, owner.path) == ("aborting", (child,))
    assert owner.text.startswith("is to be aborted (enough) after 1 live task below: ")
    assert below.code == "running"
    assert below.text.startswith("runs its abort handler for ")


async def test_below_a_cancelled_owner_the_owner_is_named() -> None:
    """Before the cascade has marked it, the child already says which owner stops it, and why."""
    world = World(limits={"test.other": 1})
    world.scripts.update(busy=forever, child=forever)

    async def start(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            tx.create_task(Other, "child", key="child")
            tx.wait(then=Next(1), signals=True)

    async with world.open() as rt:
        await world.create("busy", kind=Other)
        top = await world.create("top", start)
        await world.quiet()
        child = child_of(world, top, "child")
        before = ask(world, child)
        # The mark of the owner alone, as a process that dies at once would leave it.
        rt.closing = True
        await world.abort(top, "no more")
        stopped = ask(world, child)
        marked = world.marked(top, child)
        rt.closing = False
        rt.scheduler.kick()
        await world.end(top)

    assert before.code == "limit_reached"
    assert before.text == "waits for a slot: 1 of 1 test.other run; is next of its kind"
    assert marked == [True, False]
    assert stopped.code == "owner_cancelling"
    assert stopped.text == (
        f"is below task {top} (test.actor), which is to be aborted (no more), and is aborted first"
    )


async def test_a_full_kind_says_so_and_counts_who_goes_first() -> None:
    """With two of two running, the third is next and the fifth has two before it."""
    world = World(limits={"test.actor": 2})
    async with world.open():
        ids = [await world.create(f"a{n}", forever) for n in range(5)]
        await world.quiet()
        found = [ask(world, id) for id in ids]

    assert [each.code for each in found] == ["running"] * 2 + ["limit_reached"] * 3
    assert [each.place for each in found] == [None, None, 0, 1, 2]
    assert found[2].text == "waits for a slot: 2 of 2 test.actor run; is next of its kind"
    assert found[4].text == "waits for a slot: 2 of 2 test.actor run; 2 of its kind go first"


async def test_the_total_limit_is_named_as_such() -> None:
    """`running_max` is told apart from the limit of a kind."""
    world = World(running_max=1)
    async with world.open():
        await world.create("a", forever)
        second = await world.create("b", forever)
        await world.quiet()
        found = ask(world, second)

    assert found.code == "limit_reached"
    assert found.text.startswith("waits for a slot: 1 of 1 invocations run")


async def test_conversations_take_turns_in_the_place_too() -> None:
    """A fan-out of another conversation goes before a newcomer once, not ten times."""
    world = World(limits={"test.actor": 1})
    async with world.open() as rt:
        await world.create("busy", forever)
        for n in range(10):
            await world.create(f"a{n}", forever)
        other = await rt.commit(lambda tx: tx.create_conversation())
        late = await world.create("late", forever, conversation=other)
        await world.quiet()
        found = ask(world, late)

    assert found.place == 1


async def test_a_far_place_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the most that is counted the answer is `more than`, at the same cost."""
    monkeypatch.setattr(_live_facts, "PLACES_MAX", 3)
    world = World(limits={"test.actor": 1})
    async with world.open():
        ids = [await world.create(f"a{n}", forever) for n in range(6)]
        await world.quiet()
        near, far = ask(world, ids[3]), ask(world, ids[5])

    assert (near.place, far.place) == (2, None)
    assert "more than 3 of its kind go first" in far.text


async def test_blocked_tasks_name_the_reason_and_the_remedy() -> None:
    """A missing definition, and one that is too old, each say what to install."""
    world = World()
    async with world.open():
        task = await world.create("a", wait_for_signal)
        await world.quiet()
    world.install(Other)
    async with world.open():
        await world.signal(task)
        await world.quiet()
        missing = ask(world, task)

    assert (missing.code, missing.status.word) == ("missing_definition", "pending")
    assert missing.text == "is blocked (missing_definition)"
    assert missing.remedy == "install an extension that defines test.actor, or abort it"
    assert f"; {missing.remedy}; " in str(missing)


async def test_a_parked_fault_names_its_error_and_how_to_go_on() -> None:
    """The error that was kept beside the task stands in the line, before and after a restart."""
    world = World(on_fault="park")

    async def raises(at: Any, ctx: Any) -> None:
        raise ValueError("no such card")

    async with world.open():
        task = await world.create("a", raises)
        await world.quiet()
        before = ask(world, task)
    async with world.open():
        after = ask(world, task)

    assert before.code == after.code == "faulted"
    assert before.text == after.text == "is blocked (faulted): ValueError: no such card"
    assert f"pidurable task retry {task}" in (before.remedy or "")


async def test_below_an_interrupted_owner_that_owner_is_the_one_to_resume() -> None:
    """After a restart the interrupted task names itself, and what is below names it too."""
    world = World(limits={"test.actor": 1})
    world.scripts["new"] = forever

    async def start(at: Any, ctx: Any) -> None:
        if isinstance(at, Start):
            async with ctx.commit() as tx:
                tx.create_task(Other, "new", key="new", on_restart="go")
                tx.create_task(Other, "low", key="low")
                tx.wait(then=Next(1), signals=True)

    world.scripts["low"] = forever
    async with world.crashing():
        top = await world.create("top", start, on_restart="wait")
        await world.quiet()
        low, new = child_of(world, top, "low"), child_of(world, top, "new")
    async with world.open():
        await world.quiet()
        found = {id: ask(world, id) for id in (top, low, new)}

    assert found[top].code == found[low].code == "interrupted"
    assert found[top].remedy == f"resume it (`pidurable task resume {top}`) or abort it"
    assert found[low].remedy == f"resume that one (`pidurable task resume {top}`)"
    assert found[new].code == "running"


async def test_a_suspect_names_the_one_that_is_tried_before_it(mock_clock: Any) -> None:
    """From the third death on, who waits for its trial says so, and after whom."""
    world = World()
    async with world.crashing():
        ids = [await world.create(name, forever) for name in "ab"]
        await world.quiet()
    for _ in range(2):
        async with world.crashing():
            await world.quiet()
    async with world.open():
        await world.quiet()
        tried, waits = (ask(world, id) for id in ids)

    assert (tried.code, waits.code) == ("running", "suspect")
    assert waits.recoveries == 3
    assert waits.text.endswith(f"it is tried alone, after {ids[0]} test.actor")


# C007
async def test_a_handler_that_does_not_stop_is_named_with_its_line(autojump_clock: Any) -> None:
    """Told to stop and still running, it is named with how long, and the line of its own code."""
    world = World()
    gate = trio.Event()

    async def deaf(at: Any, ctx: Any) -> None:
        with trio.CancelScope(shield=True):
            await gate.wait()

    async with world.open():
        task = await world.create("a", deaf)
        await world.quiet()
        await world.abort(task)
        await trio.sleep(12)
        found = ask(world, task)
        gate.set()
        await world.end(task)

    assert found.code == "running"
    assert found.text.startswith("has been told to stop for 12s and still runs, at ")
    assert "test_explain.py:" in found.text
    assert found.text.endswith("deaf")


async def test_a_retry_says_when_it_runs_again(autojump_clock: Any) -> None:
    """Between two tries the moment of the next is known, and the try counted."""
    from pidurable.tasks._definition import Retry

    class Again(Actor):
        name = "test.again"
        retry = Retry(on=(OSError,), tries=5, base=10.0, jitter=0.0)

    async def raises(at: Any, ctx: Any) -> None:
        raise OSError("down")

    world = World(Again)
    async with world.open() as rt:
        task = await world.create("a", raises, kind=Again)
        await trio.sleep(1)
        found = ask(world, task)
        node = rt.published.task(task)

    assert node is not None
    assert (found.code, found.tries, found.next_wake_us) == ("retrying", 1, node.ready_us)
    assert found.text.startswith("raised, and runs its phase again in ")


async def test_a_refusing_storage_is_the_reason_for_every_ready_task(autojump_clock: Any) -> None:
    """While the disk is full, a ready task says so, and what to do."""
    world = World(storage_retry_seconds=0.5)
    async with world.open() as rt:
        task = await world.create("a", forever, kind=Other)
        waits = await world.create("w", wait_for_signal)
        await world.quiet()
        world.storage.add(Fault.refuse(times=1_000))
        with pytest.raises(Exception, match="refused"):
            await rt.commit(lambda tx: tx.signal(waits, "go"))
        await trio.sleep(5)
        running, waiting = ask(world, task), ask(world, waits)
        refusing = LiveFacts(rt).standstill()
        world.storage.clear()
        await trio.sleep(5)

    assert refusing is not None
    assert refusing.code == "storage_refusing"
    assert running.code == "running"
    assert "the storage refuses commits" in running.text
    assert waiting.code == "waiting"


async def test_a_harness_that_closes_says_that_work_goes_on_later() -> None:
    """Drained, a ready task is not lost: it goes on at the next opening."""
    world = World()
    async with world.open(start=False) as rt:
        task = await rt.commit(lambda tx: tx.create_task(Actor, "a", conversation=ROOT))
        rt.closing = True
        found = ask(world, task)

    assert found.code == "closing"


async def test_a_holder_that_cannot_confirm_itself_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is started without a sign of life, and every ready task names that."""
    world = World()
    async with world.open(start=False) as rt:
        task = await rt.commit(lambda tx: tx.create_task(Actor, "a", conversation=ROOT))
        monkeypatch.setattr(rt.session, "confirmed", lambda: False)
        found = ask(world, task)

    assert found.code == "holder_unconfirmed"
    assert found.text.startswith("is ready, but this process could not store a sign of life")


async def test_what_is_reserved_but_not_begun_is_ready() -> None:
    """Between the commit that reserves a task and its first step it starts in a moment."""
    world = World()
    async with world.open() as rt:
        task = await world.create("a", forever)
        await world.quiet()
        row = world.row(task)
        facts = LiveFacts(rt)
        begun, reserved = facts.running(row), facts.running(row._replace(id=999))
        rt.closing = True
        closing = facts.running(row._replace(id=999))
        rt.closing = False

    assert (begun.code, reserved.code, closing.code) == ("running", "ready", "closing")


async def test_below_an_owner_that_failed_the_owner_is_named() -> None:
    """A held outcome other than completed aborts what is below, and the child says so first."""
    world = World(limits={"test.other": 1})
    world.scripts.update(busy=forever, child=forever)

    async def fails(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            own = tx.create_conversation(key="own")
        async with ctx.commit() as tx:
            tx.create_task(Other, "child", conversation=own, key="child")
            tx.fail("no")
        world.rt.closing = True

    async with world.open() as rt:
        await world.create("busy", kind=Other)
        await world.quiet()
        top = await world.create("top", fails)
        await world.quiet()
        child = max(row.id for row in world.rows())
        found = ask(world, child)
        rt.closing = False
        rt.scheduler.kick()
        await world.end(top)

    assert found.code == "owner_cancelling"
    assert (
        found.text == f"is below task {top} (test.actor), which ends failed, and is aborted first"
    )


async def test_an_abort_that_retries_or_is_blocked_says_so(autojump_clock: Any) -> None:
    """A handler whose bank is down waits for its next try; one that is parked is blocked."""
    from pidurable.tasks._definition import Retry

    class Again(Actor):
        name = "test.again"
        retry = Retry(on=(OSError,), tries=5, base=100.0, jitter=0.0)

    class Parks(Actor):
        name = "test.parks"
        on_fault = "park"

    async def down(at: Any, ctx: Any) -> None:
        raise OSError("the bank is down")

    world = World(Again, Parks)
    world.aborts.update(a=down, b=down)
    async with world.open():
        tries = await world.create("a", forever, kind=Again)
        parked = await world.create("b", forever, kind=Parks)
        await world.quiet()
        for task in (tries, parked):
            await world.abort(task, "enough")
        await trio.sleep(1)
        retrying, blocked = ask(world, tries), ask(world, parked)

    assert retrying.code == "retrying"
    assert retrying.text.startswith(
        "is to be aborted (enough); its handler raised and runs again in 59s"
    )
    assert retrying.next_wake_us is not None
    assert blocked.code == "faulted"
    assert blocked.text == (
        "is blocked (faulted) while being aborted (enough): OSError: the bank is down"
    )


async def test_a_wait_for_several_things_names_the_tasks_last() -> None:
    """So that the way down follows what it belongs to."""
    world = World()
    world.scripts["child"] = forever

    async def start(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            on = [tx.create_task(Actor, "child", key="child")]
            deadline = ctx.now() + timedelta(hours=1)
            tx.wait(then=Next(1), on=on, signals=True, deadline=deadline)

    async with world.open():
        top = await world.create("top", start)
        await world.quiet()
        found = ask(world, top)

    assert found.text.startswith("waits for a signal or until ")
    assert " or for 1 of 1 (all_settled): " in found.text


async def test_what_is_there_wakes_the_task_when_the_session_can() -> None:
    """A signal that has come is said to have come, and what keeps it from being taken."""
    world = World()
    async with world.open() as rt:
        task = await world.create("a", wait_for_signal)
        await world.quiet()
        rt.closing = True
        await world.signal(task)
        closing = ask(world, task)
        rt.closing = False
        moving = ask(world, task)

    assert closing.code == "closing"
    assert closing.unread_signals == 1
    assert closing.text.startswith("waited, and what it waited for is there, but the harness is")
    assert moving.text == "waited, and what it waited for is there; it wakes in a moment"


async def test_a_wide_hold_is_counted_up_to_a_bound() -> None:
    """Of a hundred and fifty children a hundred are looked at, and `more than` says so."""
    world = World()
    names = [f"c{n}" for n in range(150)]
    world.scripts.update(dict.fromkeys(names, forever))

    async def hands_over(at: Any, ctx: Any) -> None:
        async with ctx.commit() as tx:
            own = tx.create_conversation(key="own")
        async with ctx.commit() as tx:
            for name in names:
                tx.create_task(Actor, name, conversation=own, key=name)
            tx.complete("")

    async with world.open():
        top = await world.create("top", hands_over)
        await world.quiet()
        wide = ask(world, top)

    assert wide.text.startswith("holds its outcome, completed, for more than 100 live tasks below")


async def test_a_new_version_that_cannot_take_it_names_both_versions() -> None:
    """Blocked for its version, a task says which is stored and which is installed."""

    class Newer(Actor):
        version = 2

    world = World(Newer)
    async with world.open():
        newer = await world.create("a", wait_for_signal, kind=Newer)
        await world.quiet()
    world.install(Actor)
    async with world.open():
        await world.signal(newer)
        await world.quiet()
        old = ask(world, newer)

    assert old.code == "definition_too_old"
    assert old.text == (
        "is blocked (definition_too_old), which is of version 2; version 1 is installed"
    )
    assert old.remedy == "install version 2 of test.actor or a newer one, or abort it"


async def test_damaged_rows_are_looked_past() -> None:
    """A wait or an outcome that cannot be read hides nothing else of its task."""
    world = World()
    async with world.open() as rt:
        waits, fails = await world.create("a", wait_for_signal), await world.create("b", done)
        await world.end(fails)
        await world.quiet()
        storage = rt.session.storage

        class Damaged:
            def __getattr__(self, name: str) -> Any:
                return getattr(storage, name)

            def task_wait(self, task: int) -> str:
                return "{"

            task_outcome = task_wait

        rt.session.storage = Damaged()  # type: ignore[assignment]
        try:
            parked, ended = ask(world, waits), ask(world, fails)
        finally:
            rt.session.storage = storage

    assert parked.text == "waits for something that the store does not name"
    assert ended.text.startswith("completed ")


async def test_a_way_that_is_too_long_ends_at_the_deepest_that_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the bound nothing is looked at, and the last one that was says what it waits for."""
    monkeypatch.setattr(_explain, "STEPS_MAX", 4)
    world = World()
    names = [f"n{n}" for n in range(8)]
    for name, below in itertools.pairwise(names):
        world.scripts[name] = parent_of(below)
    world.scripts[names[-1]] = forever
    async with world.open():
        top = await world.create("n0")
        await world.quiet()
        found = ask(world, top)

    assert len(found.path) == 4
    assert found.text.endswith("which waits for 1 of 1 (all_settled)")


async def test_what_follows_in_the_next_commit_is_said_to_follow() -> None:
    """Between a commit and what the scheduler derives from it, a task is about to go on."""
    world = World()
    async with world.open() as rt:
        task = await world.create("a", wait_for_signal)
        await world.quiet()
        row = world.row(task)
        held = row._replace(status=int(Status.COMPLETING), outcome_status="completed")
        marked = row._replace(status=int(Status.PENDING), abort_us=1, abort_reason=None)
        facts = LiveFacts(rt)
        soon = [_explain.look_at(facts, each) for each in (held, marked)]
        rt.closing = True
        later = [_explain.look_at(facts, each) for each in (held, marked)]
        rt.closing = False

    assert [each.code for each in soon] == ["completing", "aborting"]
    assert soon[0].text == "ends completed, with nothing left below, in a moment"
    assert soon[1].text == "is to be aborted (user); its handler is next"
    assert [each.code for each in later] == ["closing", "closing"]
    for each in later:
        assert each.text.endswith(", but the harness is closing; it goes on when reopened")


async def test_the_line_costs_rows_of_its_own_way_only() -> None:
    """Beside a thousand other live tasks the same reads are made."""
    world = World(limits={"test.actor": 1})

    async def reads_of(task: int) -> int:
        count = 0
        storage = world.rt.session.storage

        class Counting:
            def __getattr__(self, name: str) -> Any:
                nonlocal count
                count += 1
                return getattr(storage, name)

        facts = LiveFacts(world.rt)
        world.rt.session.storage = Counting()  # type: ignore[assignment]
        try:
            explain(facts, task)
        finally:
            world.rt.session.storage = storage
        return count

    async with world.open() as rt:
        top = await world.create("top", parent_of("leaf"), kind=Other)
        world.scripts["leaf"] = forever
        await world.quiet()
        few = await reads_of(top)

        def many(tx: Any) -> None:
            for n in range(1_000):
                tx.create_task(Actor, f"m{n}", conversation=ROOT)

        await rt.commit(many)
        await world.quiet()
        beside_many = await reads_of(top)

    assert beside_many == few < 20
