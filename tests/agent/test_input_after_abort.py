"""What is said while a run is being aborted is a new wish: it is answered when that run is over.

An abort takes back what was queued. Until the run has settled, which takes as long as its calls
take to stop, more may come: that is handed in as if it had come just after the end of the run.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from agent_world import World, ask, calls, crash_everywhere, text_of, verify
from trio.testing import MockClock

from pidurable.agent import _inbox
from pidurable.agent._script import ScriptedError, Step, When
from pidurable.agent._services import AgentChange
from pidurable.errors import ConversationBusyError
from pidurable.harness._conversation import Conversation
from pidurable.harness._open import Harness
from pidurable.harness._submission import Settled, Submission
from pidurable.records._limits import Settings
from pidurable.records._messages import ToolResultMessage, UserMessage
from pidurable.registry import ToolCall, tool

STOPPING_SECONDS = 5


def on(user: str, step: Step) -> Step:
    """An answer to what a user has said last."""
    return attrs.evolve(step, when=When(user=user))


def world_of(*steps: Any, settings: Settings | None = None) -> World:
    """A world with a tool that takes five seconds to stop."""
    world = World(*steps, settings=settings)

    @tool(replay="safe")
    async def stubborn(call: ToolCall) -> str:
        """Go on for ever, and stop slowly."""
        world.reached.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(STOPPING_SECONDS)
        return ""

    world.install(stubborn)
    return world


async def ends(*submissions: Submission) -> list[Settled]:
    """How submissions end; one that nothing answers is found out."""
    with trio.fail_after(600):
        return [await each.wait() for each in submissions]


async def began_or_ended(world: World, submission: Submission) -> None:
    """Wait until the tool runs; a session that dies before it does raises."""
    async with trio.open_nursery() as nursery:

        async def ended() -> None:
            await submission.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(ended)
        await world.reached.wait()
        nursery.cancel_scope.cancel()


async def said(root: Conversation) -> list[str]:
    """The transcript: what users said, and results."""
    found = []
    for entry in await root.history(limit=1_000):
        for message in entry.messages:
            if isinstance(message, UserMessage):
                found.append(text_of(message))
            elif isinstance(message, ToolResultMessage):
                found.append("result")
    return found


@pytest.mark.parametrize("mode", ["follow_up", "steer"])
async def test_an_input_after_an_abort_starts_a_run_when_the_aborted_one_is_over(
    autojump_clock: MockClock, mode: Any
) -> None:
    """It waits while the calls stop, and is then answered without any other input."""
    world = world_of(calls("stubborn"), "fresh")

    # C029
    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        queued = await root.submit("before")
        given_back = await root.abort()
        await trio.sleep(1)
        later = await root.submit("after", when_busy=mode)
        while_stopping = (await later.status()).status
        with pytest.raises(ConversationBusyError):
            await root.submit("now or never", when_busy="reject")
        began = trio.current_time()
        outcomes = await ends(first, queued, later)
        waited = trio.current_time() - began
        await verify(world, harness)
        order = await said(root)

    assert [each.content[0]["text"] for each in given_back] == ["before"]
    assert while_stopping == "queued"
    assert [each.reason for each in outcomes] == ["aborted", "withdrawn", None]
    assert outcomes[2].text == "fresh"
    assert STOPPING_SECONDS - 1 <= waited < STOPPING_SECONDS + 1
    assert order == ["go", "result", "after"]


async def test_of_many_inputs_after_an_abort_the_first_starts_the_run(
    autojump_clock: MockClock,
) -> None:
    """The others are queued for that run: steers join it, follow-ups come after it."""
    world = world_of(calls("stubborn"), calls("safe"), "one", "two", "three")

    async with world.open() as harness:
        root = await harness.root()
        await root.submit("go")
        await world.reached.wait()
        await root.abort()
        texts = ["first", "second", "third"]
        inputs = [await root.submit(text) for text in texts]
        inputs.append(await root.submit("by the way", when_busy="steer"))
        outcomes = await ends(*inputs)
        await verify(world, harness)
        order = await said(root)

    assert [each.text for each in outcomes] == ["one", "two", "three", "one"]
    assert order == ["go", "result", "first", "result", "by the way", "second", "third"]


async def test_what_was_queued_before_an_input_after_an_abort_goes_with_it(
    autojump_clock: MockClock,
) -> None:
    """Aborting the task alone takes nothing back; the next input takes it along, in its order."""
    world = world_of(calls("stubborn"), "fresh")

    async with world.open() as harness:
        root = await harness.root()
        await root.submit("go")
        await world.reached.wait()
        before = await root.submit("before")
        await harness.abort_task(root.live()["run"])
        later = await root.submit("after")
        outcomes = await ends(before, later)
        await verify(world, harness)
        order = await said(root)

    assert [each.text for each in outcomes] == ["fresh", "fresh"]
    assert order == ["go", "result", "before", "after"]


async def test_a_second_abort_takes_back_what_came_after_the_first(
    autojump_clock: MockClock,
) -> None:
    """Who aborts again, while the calls still stop, gets what was said in between."""
    world = world_of(calls("stubborn"), "fresh")

    async with world.open() as harness:
        root = await harness.root()
        await root.submit("go")
        await world.reached.wait()
        await root.abort()
        between = await root.submit("between")
        given_back = await root.abort()
        (outcome,) = await ends(between)
        await root.wait_for_idle()
        await verify(world, harness)
        order = await said(root)

    assert [each.id for each in given_back] == [between.id]
    assert outcome.reason == "withdrawn"
    assert order == ["go", "result"]


async def test_a_run_that_fails_later_does_not_count_inputs_after_an_old_abort(
    autojump_clock: MockClock,
) -> None:
    """What is behind the first new wish is a follow-up of the new run: a failure leaves it."""
    no = Step(error=ScriptedError(kind="auth", detail="no"))
    steps = {"go": calls("stubborn"), "first": no, "third": Step(text="ok")}
    world = world_of(*(on(*each) for each in steps.items()))

    async with world.open() as harness:
        root = await harness.root()
        await root.submit("go")
        await world.reached.wait()
        await root.abort()
        first = await root.submit("first")
        second = await root.submit("second")
        (failed,) = await ends(first)
        await root.wait_for_idle()
        left = (await second.status()).status
        last = await ask(harness, "third", "r3")
        await verify(world, harness)
        order = await said(root)

    assert failed.reason == "model_error"
    assert left == "queued"
    assert last.text == "ok"
    assert order == ["go", "result", "first", "second", "third"]


async def test_an_input_after_an_abort_of_what_never_began_is_answered(
    autojump_clock: MockClock,
) -> None:
    """Also where the run was aborted before any of its code ran, which the scheduler settles."""
    world = world_of("fresh")

    async with world.open(agent=AgentChange(model="scripted/model")) as harness:
        root = await harness.root()

        def both(tx: Any) -> tuple[int, int]:
            first = _inbox.submit(
                harness.session, tx, root.id, "go", when_busy="follow_up", request_id=None
            )
            root._abort_in(tx, "user")
            return first, _inbox.submit(
                harness.session, tx, root.id, "after", when_busy="follow_up", request_id=None
            )

        ids = await harness._runtime.commit(both)
        outcomes = await ends(*map(harness.submission, ids))
        await verify(world, harness)
        order = await said(root)

    assert [each.reason for each in outcomes] == ["aborted", None]
    assert outcomes[1].text == "fresh"
    assert order == ["go", "after"]


async def test_an_input_below_an_abort_starts_nothing(autojump_clock: MockClock) -> None:
    """In a sub-agent whose owner is aborted nothing begins any more: the input is refused."""
    world = world_of(on("go", calls("subagent", task="dig")), on("dig", calls("stubborn")))

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await world.reached.wait()
        child = harness.conversation(int(world.ledger[-1].split()[1]))
        await root.abort()
        below = await child.submit("and this")
        outcomes = await ends(first, below)
        await root.wait_for_idle()
        await verify(world, harness)
        order = await said(child)

    assert [each.reason for each in outcomes] == ["aborted", "aborted"]
    assert order == ["dig", "result"]


async def test_an_input_after_an_abort_is_answered_once_after_any_crash(
    autojump_clock: MockClock,
) -> None:
    """Killed at any commit, between the abort and the end of the run too: it is answered, once."""

    async def program(harness: Harness, world: World) -> Any:
        root = await harness.root()
        first = await root.submit("go", request_id="r1")
        await began_or_ended(world, first)
        if harness.session.storage.submission_by_request(root.id, "r2") is None:
            await root.abort()
        later = [await root.submit(f"after {n}", request_id=f"r{n}") for n in (2, 3)]
        return await ends(first, *later), await said(root)

    def check(world: World, found: Any) -> None:
        (first, *later), order = found
        assert first.reason == "aborted"
        assert [each.text for each in later] == ["fresh", "fresh"]
        assert order == ["go", "result", "after 2", "after 3"]

    # C029, C032
    steps = [on("go", calls("stubborn")), on("after", Step(text="fresh"))]
    kills = await crash_everywhere(lambda: world_of(*steps), program, check, sparse=2)

    assert kills >= 8
