"""Drawn programs on the whole runtime: create, wait, end, abort, close, crash, in any order.

After every commit the tree is counted anew from the rows of the store (`recount.py`); at rest
nothing may stand still without a reason, and an abort of everything leaves nothing live.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import attrs
import trio
from hypothesis import HealthCheck, given, settings, strategies as st
from recount import check_at_rest
from trio.testing import MockClock
from worlds import ROOT, Actor, World

from pidurable.errors import WaitCycleError
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Retry, Task, phase

POLICIES = ("all_settled", "fail_fast", "first_success")
ENDS = ("complete", "fail", "raise", "nothing", "retry", "fail_and_create")


@attrs.frozen
class Program:
    """What one task does, step by step, how it ends, and how its abort handler ends."""

    steps: list[Any]
    end: str = "complete"
    abort: str = "end"


@attrs.frozen
class At:
    step: int = 0


Ctx = TaskContext[Program, At, str]


class Programmed(Task[Program, At, str]):
    """Runs its input."""

    name = "test.programmed"
    retry = Retry(on=(OSError,), tries=3, base=1.0)

    def initial(self, input: Program) -> At:
        return At()

    @phase
    async def step(self, at: At, ctx: Ctx) -> None:
        program = ctx.input
        if at.step >= len(program.steps):
            await self._end(program.end, ctx)
            return
        step = program.steps[at.step]
        await STEPS[step[0]](at, ctx, step)

    async def _end(self, end: str, ctx: Ctx) -> None:
        if end == "complete":
            await ctx.complete("done")
        elif end == "fail":
            await ctx.fail("failed")
        elif end == "raise":
            raise ValueError("raised")
        elif end == "retry":
            raise OSError("again")
        elif end == "fail_and_create":
            async with ctx.commit() as tx:
                tx.create_task(Programmed, Program(steps=[]))
                tx.fail("refused with the whole commit")

    async def abort(self, at: At, ctx: Ctx) -> None:
        if ctx.input.abort == "raise":
            raise ValueError("undo raised")
        if ctx.input.abort == "complete":
            await ctx.complete("just in time")
        elif ctx.input.abort == "goto" and at.step < 100:
            await ctx.goto(At(at.step + 100))
        elif ctx.input.abort == "retry":
            raise OSError("undo again")
        else:
            await ctx.end_aborted("undone")


async def _goto(at: At, ctx: Ctx, step: Any) -> None:
    await ctx.goto(At(at.step + 1))


async def _child(at: At, ctx: Ctx, step: Any) -> None:
    async with ctx.commit() as tx:
        tx.create_task(Programmed, program_of(step[1]), key=f"child {at.step}")
        tx.goto(At(at.step + 1))


async def _conversation(at: At, ctx: Ctx, step: Any) -> None:
    async with ctx.commit() as tx:
        owned = tx.create_conversation(key=f"conversation {at.step}")
        tx.create_task(
            Programmed, program_of(step[1]), conversation=owned, key="first", background=step[2]
        )
        tx.goto(At(at.step + 1))


async def _join(at: At, ctx: Ctx, step: Any) -> None:
    ids = list(ctx.snapshot.keyed_tasks().values())
    await ctx.wait(then=At(at.step + 1), on=ids, policy=step[1])


async def _idle(at: At, ctx: Ctx, step: Any) -> None:
    """Wait until a conversation is idle, one of its own or the one it lives in, and for children.

    In its own conversation a task that is not in the background is refused.
    """
    children = list(ctx.snapshot.keyed_tasks().values()) if step[2] else []
    try:
        async with ctx.commit() as tx:
            key = f"conversation {step[1]}"
            place = ctx.conversation_id if step[1] < 0 else tx.create_conversation(key=key)
            for program in step[3:]:
                tx.create_task(Programmed, program_of(program), conversation=place, key=key)
            tx.wait(then=At(at.step + 1), on=[place, *children])
    except WaitCycleError:
        await ctx.goto(At(at.step + 1))


async def _sleep(at: At, ctx: Ctx, step: Any) -> None:
    await ctx.wait(then=At(at.step + 1), deadline=ctx.now() + timedelta(seconds=step[1]))


async def _signal(at: At, ctx: Ctx, step: Any) -> None:
    await ctx.wait(then=At(at.step + 1), signals=True)


async def _hold(at: At, ctx: Ctx, step: Any) -> None:
    """Wait in memory for the first child, if there is one."""
    for id in list(ctx.snapshot.keyed_tasks().values())[:1]:
        await ctx.wait_for_task(id)
    await ctx.goto(At(at.step + 1))


STEPS: dict[str, Callable[[At, Ctx, Any], Awaitable[None]]] = {
    "goto": _goto,
    "child": _child,
    "conversation": _conversation,
    "join": _join,
    "idle": _idle,
    "sleep": _sleep,
    "signal": _signal,
    "hold": _hold,
}


def program_of(json: Any) -> Program:
    return Program(steps=json["steps"], end=json["end"], abort=json["abort"])


def programs() -> st.SearchStrategy[Any]:
    plain = st.one_of(
        st.just(["goto"]),
        st.tuples(st.just("join"), st.sampled_from(POLICIES)).map(list),
        st.tuples(st.just("idle"), st.integers(-1, 2), st.booleans()).map(list),
        st.tuples(st.just("sleep"), st.sampled_from([0, 5, 60])).map(list),
        st.just(["signal"]),
        st.just(["hold"]),
    )

    def program(step: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries(
            {
                "steps": st.lists(step, max_size=4),
                "end": st.sampled_from(ENDS),
                "abort": st.sampled_from(["end", "end", "raise", "complete", "goto", "retry"]),
            }
        )

    return st.recursive(
        program(plain),
        lambda child: program(
            st.one_of(
                plain,
                st.tuples(st.just("child"), child).map(list),
                st.tuples(st.just("child"), child).map(list),
                st.tuples(st.just("conversation"), child, st.booleans()).map(list),
                st.tuples(st.just("idle"), st.integers(-1, 2), st.booleans(), child).map(list),
            )
        ),
        max_leaves=8,
    )


def acts() -> st.SearchStrategy[Any]:
    number = st.integers(0, 30)
    return st.one_of(
        st.tuples(st.just("create"), programs()),
        st.tuples(st.just("create"), programs()),
        st.tuples(st.just("abort"), number),
        st.tuples(st.just("signal"), number),
        st.tuples(st.just("revive"), number),
        st.tuples(st.just("advance"), st.sampled_from([1, 10, 100])),
        st.just(("settle",)),
        st.just(("close",)),
        st.tuples(st.just("crash"), st.integers(1, 4)),
    )


class Play:
    """One drawn sequence of acts on one store, opened as often as it takes."""

    def __init__(self, world: World, script: list[Any]) -> None:
        self.world = world
        self.script = script

    async def run(self) -> None:
        while await self._one_opening():
            pass

    async def _one_opening(self) -> bool:
        """Play until the session ends; False once everything has been played."""
        world = self.world
        async with world.crashing() if self._ends_in_crash() else world.open():
            while self.script:
                act, *rest = self.script.pop(0)
                if act == "close":
                    return True
                if act == "crash":
                    for _ in range(rest[0]):
                        await trio.lowlevel.checkpoint()
                    return True
                await self._act(act, *rest)
            await self._finish()
        return False

    def _ends_in_crash(self) -> bool:
        ends = [act[0] for act in self.script if act[0] in ("close", "crash")]
        return bool(ends) and ends[0] == "crash"

    async def _act(self, act: str, *rest: Any) -> None:
        world = self.world
        if act == "create":
            await world.rt.commit(
                lambda tx: tx.create_task(Programmed, program_of(rest[0]), conversation=ROOT)
            )
        elif act == "advance":
            await trio.sleep(rest[0])
        elif act == "settle":
            await self._settle()
        elif act == "revive":
            made = sorted(world.base.reopen()._data.conversations)
            conversation = made[rest[0] % len(made)]
            program = Program(steps=[["goto"]])
            await world.rt.commit(
                lambda tx: tx.create_task(Programmed, program, conversation=conversation)
            )
        else:
            live = [row.id for row in world.base.reopen()._data.tasks.values() if row.status < 4]
            if live:
                task = live[rest[0] % len(live)]
                await world.rt.commit(
                    lambda tx: tx.abort_task(task) if act == "abort" else self._try_signal(tx, task)
                )

    @staticmethod
    def _try_signal(tx: Any, task: int) -> None:
        node = tx.view.task(task)
        if node is not None and node.live:
            tx.signal(task, "go")

    async def _settle(self) -> None:
        """Let timers and retries pass until nothing but signals can move anything."""
        await trio.sleep(1_000)
        check_at_rest(self.world.rt)

    async def _finish(self) -> None:
        world = self.world
        await self._settle()
        live = [row.id for row in world.base.reopen()._data.tasks.values() if row.status < 4]

        def abort_all(tx: Any) -> None:
            for id in live:
                tx.abort_task(id)

        await world.rt.commit(abort_all)
        await self._settle()
        assert world.rt.index.live == 0
        assert not world.rt.published.nodes
        assert not world.rt.index.children
        assert not world.rt._signals
        assert not world.rt.invocations
        assert not world.rt.index.active
        assert not world.rt.index.waiters
        assert not world.rt.cycles._held_by
        assert not world.rt.index.deciders


def play(script: list[Any], running_max: int) -> None:
    async def main() -> None:
        world = World(running_max=running_max)
        world.install(Actor, Programmed)  # type: ignore[arg-type]
        await Play(world, list(script)).run()

    trio.run(main, clock=MockClock(autojump_threshold=0))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    script=st.lists(acts(), max_size=12),
    running_max=st.sampled_from([1, 2, 1000]),
    module=st.random_module(),
)
def test_any_program_keeps_the_tree_right_and_comes_to_rest(
    script: list[Any], running_max: int, module: object
) -> None:
    """Whatever is created, aborted, closed or killed, the tree is right and comes to rest."""
    play(script, running_max)
