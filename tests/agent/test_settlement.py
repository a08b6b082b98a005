"""Whatever ends a built-in task that no code of it decides: its conversation is usable, always.

A fault is a bug of ours, so it is planted everywhere: in place of each commit that a built-in task
makes in a run that passes all of its phases, and behind it. A task is orphaned where its code is
gone, or too old, when it is to be aborted. Nothing here names a phase: what is added to the tasks
is met by the runs as soon as they pass it, and a test says which phases they passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
from agent_world import DieAt, FreezeAt, World, ask, calls, run_killed, status_of, verify
from approval_world import GuardedWorld, acts, begin
from compaction_world import GOOD, compacted, long
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.agent._decisions import Once
from pidurable.agent._script import ScriptedCall, ScriptedError, Step, When
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.tasks._context import TaskContext
from pidurable.tasks._runtime import Runtime
from pidurable.tasks._task_commit import TaskCommit
from pidurable.tasks._transaction import TaskTransaction

BUILT_IN = ("pi.generation", "pi.tool", "pi.compaction")


class Planted(Exception):
    """A bug of ours."""


@attrs.define(eq=False)
class Faults:
    """Raises in place of the nth commit of a phase of a built-in task, or right behind it."""

    where: str
    target: tuple[str, str] | None = None
    """Kind and phase; None raises nowhere, and only counts."""
    nth: int = 1
    on: bool = True
    struck: bool = False
    met: list[tuple[str, str]] = attrs.Factory(list)
    """Kind and phase of each commit."""

    def hit(self, where: str, phase: Any) -> None:
        """Count the commits of built-in tasks, and raise at the chosen one."""
        if not self.on or where != self.where or phase.info.name not in BUILT_IN:
            return
        place = (phase.info.name, "abort" if phase.aborting else phase.tag)
        self.met.append(place)
        if place == self.target and self.met.count(place) == self.nth:
            self.struck = True
            raise Planted(f"{self.where} commit {self.nth}")

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have every commit of a task pass here."""
        made, left, ran = TaskTransaction.__init__, TaskCommit.__aexit__, TaskContext._run

        def making(tx: Any, runtime: Any, phase: Any) -> None:
            self.hit("before", phase)
            made(tx, runtime, phase)

        async def leaving(block: Any, kind: Any, error: Any, trace: Any) -> bool:
            swallowed = await left(block, kind, error, trace)
            if error is None:
                self.hit("after", block._phase)
            return swallowed

        async def running(ctx: Any, body: Callable[[Any], Any], given: Any = None) -> Any:
            came = await ran(ctx, body, given)
            self.hit("after", ctx._phase)
            return came

        monkeypatch.setattr(TaskTransaction, "__init__", making)
        monkeypatch.setattr(TaskCommit, "__aexit__", leaving)
        monkeypatch.setattr(TaskContext, "_run", running)


def make_world() -> World:
    """A run that passes every phase: a retry, a round with a sub-agent, an unknown tool."""
    round_1 = (
        ScriptedCall(name="safe"),
        ScriptedCall(name="subagent", arguments={"task": "look below"}),
        ScriptedCall(name="gone"),
    )
    return World(
        Step(text="welcome back", when=When(user="carry on")),
        Step(calls=calls("slow").calls, when=When(user="wait for ever")),
        Step(text="nothing is below", when=When(user="look below")),
        Step(error=ScriptedError(retry_after=3.0), calls=round_1, when=When(user="go", turn=0)),
        Step(calls=calls("once").calls, when=When(user="go", turn=1)),
        Step(text="all done", when=When(user="go", turn=2)),
    )


async def usable(world: World, harness: Harness) -> None:
    """Everything is at rest, valid, and the next input is answered."""
    with trio.fail_after(600):
        await harness.wait_for_idle()
        settled = await ask(harness, "carry on", "after")
        assert settled.status == "done", settled
        await harness.wait_for_idle()
    await verify(world, harness)


async def runs(harness: Harness, world: World) -> None:
    """A run to its end."""
    await ask(harness, "go")


async def is_aborted(harness: Harness, world: World) -> None:
    """A run that is aborted in the middle of a round."""
    root = await harness.root()
    submission = await root.submit("wait for ever", request_id="r1")
    with trio.move_on_after(60):
        await world.reached.wait()
    await root.abort()
    await submission.wait()


async def recovers(harness: Harness, world: World) -> None:
    """A run whose process died in the middle of an effect (see `first_life`)."""
    await ask(harness, "go")


def make_small_world() -> World:
    """A model with a small window, whose first summary fails at first."""
    first = Step(error=ScriptedError(retry_after=3.0), text=GOOD)
    return compacted("fine", summaries=[first], settings=Settings(keep_recent_tokens=1_000))


async def makes_room(harness: Harness, world: World) -> None:
    """A conversation that outgrows its window, and is compacted once more by hand."""
    root = await harness.root()
    for number in range(9):
        await ask(harness, long(number), f"r{number}")
    await harness.wait_for_task(await root.compact())


def make_guarded_world() -> World:
    """A run whose call a person is asked for."""
    return GuardedWorld(
        Step(text="welcome back", when=When(user="carry on")), acts("ship"), "all done"
    )


async def is_asked(harness: Harness, world: World) -> None:
    """A run whose call waits for a person, and is let through if it ever waits."""
    submission = await begin(harness)
    for request in harness.permissions():
        await harness.decide(request.id, Once())
    await submission.wait()


async def first_life(world: World, program: Any) -> None:
    """What comes before the faults: the death that `recovers` recovers from."""
    if program is recovers:
        await run_killed(world, DieAt(world, "CP3"), program)


async def faulted_run(make: Callable[[], World], program: Any, faults: Faults) -> None:
    """Play a program with a fault, and look that its conversation is usable then."""
    world = make()
    await first_life(world, program)
    with pytest.MonkeyPatch.context() as monkeypatch:
        faults.plant(monkeypatch)
        async with world.open() as harness:
            with trio.fail_after(600):
                await program(harness, world)
            record = await status_of(harness, "r1")
            assert record.status in ("done", "unanswered")
            assert record.reason in (None, "faulted", "aborted")
            faults.on = False
            await usable(world, harness)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(
    ("make", "program", "phases"),
    [
        (
            make_world,
            runs,
            {"pi.generation": {"prepare", "request", "retry", "tools"}, "pi.tool": {"call"}},
        ),
        (make_world, is_aborted, {"pi.generation": {"abort"}, "pi.tool": {"abort"}}),
        (make_world, recovers, {"pi.tool": {"execute"}}),
        (make_guarded_world, is_asked, {"pi.tool": {"call", "approval"}}),
        (
            make_small_world,
            makes_room,
            {"pi.compaction": {"select", "summarize", "retry"}, "pi.generation": {"prepare"}},
        ),
    ],
)
async def test_a_fault_at_any_commit_leaves_the_conversation_usable(
    autojump_clock: MockClock, where: str, make: Any, program: Any, phases: Any, slow_run: bool
) -> None:
    """Wherever a built-in task faults, its input ends with a reason, and the next is answered.

    By default at the first commit of each phase, with `-m slow` at all of them.
    """
    counted = Faults(where)
    await faulted_run(make, program, counted)
    for kind, expected in phases.items():
        assert expected <= {phase for each, phase in counted.met if each == kind}

    for target in sorted(set(counted.met)):
        most = counted.met.count(target) if slow_run else 1
        for nth in range(1, most + 1):
            faults = Faults(where, target, nth)
            await faulted_run(make, program, faults)
            # What runs side by side commits as often as chance has it.
            assert faults.struck or nth > 1


@pytest.mark.parametrize("kind", ["pi.generation", "pi.tool"])
async def test_an_orphaned_task_leaves_the_conversation_usable(
    autojump_clock: MockClock, kind: str, slow_run: bool
) -> None:
    """A task whose code is gone is ended by an abort alone, wherever the process died before."""
    orphaned = 0
    nth = 1
    while True:
        world = make_world()
        point = FreezeAt(world, "after", nth)
        await run_killed(world, point, runs)
        if not point.struck:
            break
        nth += 1 if slow_run else 5
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(Runtime, "refuses", lambda _, __, node: _gone(node, kind))
            async with world.open() as harness:
                root = await harness.root()
                submission = await root.submit("go", request_id="r1")
                await wait_all_tasks_blocked()
                await root.abort()
                with trio.fail_after(600):
                    await submission.wait()
                    await harness.wait_for_idle()
                tasks = harness.tasks()
                ends = [task.outcome.status for task in tasks if task.outcome is not None]
                assert len(ends) == len(tasks)
                orphaned += ends.count("orphaned")
        async with world.open() as harness:
            await usable(world, harness)

    assert orphaned


async def test_a_host_that_parks_faults_parks_none_of_the_agent(autojump_clock: MockClock) -> None:
    """`on_fault="park"` keeps tasks of a host for a look; a run ends with its reason as ever."""
    world = make_world()
    world.settings = Settings(on_fault="park")

    with pytest.MonkeyPatch.context() as monkeypatch:
        Faults("before", ("pi.generation", "prepare")).plant(monkeypatch)
        async with world.open() as harness:
            with trio.fail_after(600):
                settled = await ask(harness, "go")

    assert (settled.status, settled.reason) == ("unanswered", "faulted")


def _gone(node: Any, kind: str) -> str | None:
    return "missing_definition" if node.kind == kind else None
