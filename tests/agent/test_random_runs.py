"""Random programs of a host against the loop: it is never stuck, and every input ends once."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from agent_world import FreezeAt, World, check_transcript, conversations, verify
from hypothesis import HealthCheck, given, settings, strategies as st
from trio.testing import MockClock

from pidurable.agent._script import Cut, Defer, ScriptedCall, ScriptedError, Step
from pidurable.errors import ConversationBusyError, PidurableError
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.registry import Tool, ToolCall, ToolResult, tool

ANSWERS = st.one_of(
    st.builds(
        Step,
        text=st.sampled_from(["", "fine", " ", "\ud800"]),
        calls=st.lists(
            st.builds(
                ScriptedCall,
                name=st.sampled_from(
                    ["safe", "once", "nope", "", "subagent", "step", "finish", "leave"]
                ),
                arguments=st.sampled_from([{}, {"what": "w"}, {"task": "t"}, "", "{", "[]", "\0"]),
            ),
            max_size=3,
        ).map(tuple),
        delay=st.sampled_from([0.0, 0.04]),
        defer=st.sampled_from(
            [None, None, Defer(polls=2, seconds=2.0), Defer(error=ScriptedError(detail="busy"))]
        ),
    ),
    st.builds(
        Step,
        text=st.just("later"),
        error=st.builds(
            ScriptedError,
            kind=st.sampled_from(["retryable", "auth", "overflow"]),
            retry_after=st.sampled_from([None, 2.0, 1e6]),
        ),
    ),
    st.builds(Step, text=st.just("cut it"), cut=st.builds(Cut, after=st.integers(0, 1))),
)

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(["follow_up", "steer", "reject"])),
        st.tuples(st.just("abort"), st.none()),
        st.tuples(st.just("abort run"), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.005, 0.05, 3.0])),
        st.tuples(
            st.just("crash"), st.tuples(st.sampled_from(["before", "after"]), st.integers(1, 6))
        ),
        st.tuples(st.just("close"), st.none()),
    ),
    min_size=1,
    max_size=8,
)


class Host:
    """A host that performs its actions one after the other, over as many harnesses as it takes."""

    def __init__(self, world: World, actions: list[tuple[str, Any]]) -> None:
        self.world = world
        self.actions = list(enumerate(actions))
        self.point: FreezeAt | None = None

    async def live(self) -> None:
        """One harness: until it closes, crashes, or there is nothing more to do."""
        try:
            async with self.world.open(failpoints=self.point) as harness:
                while self.actions:
                    number, (action, value) = self.actions[0]
                    self.actions.pop(0)
                    if action == "close":
                        return
                    if action == "crash":
                        self.point = FreezeAt(self.world, *value)
                        return
                    await self.act(harness, number, action, value)
        except* PidurableError:
            assert self.point is not None
            assert self.point.struck
        finally:
            if self.point is not None and self.point.struck:
                self.point = None

    async def act(self, harness: Harness, number: int, action: str, value: Any) -> None:
        root = await harness.root()
        if action == "submit":
            try:
                await root.submit(f"input {number}", when_busy=value, request_id=f"r{number}")
            except ConversationBusyError:
                assert value == "reject"
        elif action == "abort":
            await root.abort()
        elif action == "abort run":
            run = root.live()["run"]
            if run is not None:
                await harness.abort_task(run)
        else:
            await trio.sleep(value)


def asking() -> list[Tool[..., Any]]:
    """Tools whose results ask for something, one of them in sequential rounds."""

    @tool(sequential=True, replay="safe")
    async def step(call: ToolCall) -> str:
        """Take a step after the others."""
        await call.sleep(0.01)
        return "stepped"

    @tool(replay="safe")
    async def finish(call: ToolCall) -> ToolResult:
        """End the run."""
        return ToolResult("finished", terminate=True)

    @tool(replay="safe")
    async def leave(call: ToolCall) -> ToolResult:
        """Leave a note, and get more tools."""
        return ToolResult("left", handoff="a note", add_tools=("safe",))

    return [step, finish, leave]


async def play(answers: list[Step], actions: list[tuple[str, Any]]) -> None:
    """Run a program to its end, bring everything to rest, and check what must hold."""
    limits = Settings(turns_max=3, owned_depth_max=2, request_tries=1)
    world = World(*answers, repeat_last=True, settings=limits, tools=asking())
    host = Host(world, actions)
    while host.actions:
        await host.live()
    async with world.open() as harness:
        root = await harness.root()
        with trio.fail_after(100_000):
            harness.start()
            await harness.wait_for_idle()
            # What is queued behind a run that failed is released by the next input, or given back.
            await root.abort()
            await harness.wait_for_idle()
        await verify(world, harness)
        for conversation in conversations(harness):
            assert await conversation.open_submissions() == []
            check_transcript(await conversation.history(limit=10_000))
        live = [task for task in harness.tasks(limit=10_000) if task.outcome is None]
        assert live == []


PROGRAMS = given(
    answers=st.lists(ANSWERS, min_size=1, max_size=4),
    actions=ACTIONS,
    order=st.random_module(),
)
UNHURRIED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@settings(UNHURRIED, max_examples=20)
@PROGRAMS
def test_no_program_of_a_host_leaves_the_loop_stuck(
    answers: list[Step], actions: list[tuple[str, Any]], order: Any
) -> None:
    """Submits of each mode, aborts, crashes and odd answers: no refusal, and all comes to rest."""
    # C001, C003, C065, C066
    trio.run(play, answers, actions, clock=MockClock(autojump_threshold=0))


@pytest.mark.slow
def test_many_programs_of_a_host_leave_the_loop_free(slow_run: bool) -> None:
    """The same of several hundred programs."""
    if not slow_run:
        pytest.skip("takes ten seconds; run it with -m slow")

    @settings(UNHURRIED, max_examples=300)
    @PROGRAMS
    def play_all(answers: list[Step], actions: list[tuple[str, Any]], order: Any) -> None:
        trio.run(play, answers, actions, clock=MockClock(autojump_threshold=0))

    play_all()
