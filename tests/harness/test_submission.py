"""Submissions: handles that wait without owning, and answers that are no failures."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from agent_world import World, ask, calls, status_of
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.agent._script import ScriptedError, Step
from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    SessionClosedError,
    SessionPoisonedError,
    UnansweredError,
    WaitTimeoutError,
)
from pidurable.harness._submission import Submission
from pidurable.testing import Fault


async def test_leaving_a_wait_changes_nothing(autojump_clock: MockClock) -> None:
    """A host that stops waiting, for a submission, a task or idleness, stops nothing else."""
    world = World(calls("safe"), Step(text="answer", delay=5.0))

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        with trio.move_on_after(1) as submission_wait:
            await submission.wait()
        with trio.move_on_after(1) as task_wait:
            await harness.wait_for_task(_live_task(harness))
        with trio.move_on_after(1) as idle_wait:
            await root.wait_for_idle()
        outcome = await submission.wait()

    assert submission_wait.cancelled_caught
    assert task_wait.cancelled_caught
    assert idle_wait.cancelled_caught
    assert outcome.text == "answer"


def _live_task(harness: Any) -> Any:
    (task,) = [task.id for task in harness.tasks() if task.outcome is None]
    return task


async def test_a_timeout_of_zero_only_looks(autojump_clock: MockClock) -> None:
    """It gives the answer if there is one, and says that there is none otherwise."""
    world = World(Step(text="answer", delay=5.0))

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")
        with pytest.raises(WaitTimeoutError):
            await submission.wait(timeout=0)
        with pytest.raises(trio.TooSlowError):
            await submission.wait(timeout=1.0)
        assert (await submission.wait(timeout=100)).text == "answer"
        assert (await submission.wait(timeout=0)).text == "answer"


async def test_many_may_wait_for_one_answer(autojump_clock: MockClock) -> None:
    """Every waiter gets the same answer, also through a handle made from the id alone."""
    world = World(Step(text="answer", delay=1.0))
    outcomes: list[Any] = []

    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go")

        async def wait(handle: Submission) -> None:
            outcomes.append(await handle.wait())

        async with trio.open_nursery() as nursery:
            for handle in (submission, submission, Submission(harness, submission.id)):
                nursery.start_soon(wait, handle)

    assert [each.text for each in outcomes] == ["answer"] * 3


async def test_waiters_learn_that_the_harness_was_closed(autojump_clock: MockClock) -> None:
    """A wait from outside of the block ends when the block ends, and says what to do."""
    world = World(calls("slow"))
    raised: list[BaseException] = []

    async def wait(submission: Submission) -> None:
        try:
            await submission.wait()
        except SessionClosedError as error:
            raised.append(error)

    async with trio.open_nursery() as nursery, world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        nursery.start_soon(wait, submission)
        await world.reached.wait()
        await wait_all_tasks_blocked()
    with pytest.raises(SessionClosedError):
        await submission.wait()

    assert len(raised) == 1


async def test_waiters_learn_that_the_store_has_failed(autojump_clock: MockClock) -> None:
    """A wait ends when the session is poisoned; opened again, the answer can be waited for."""
    world = World(Step(text="answer", delay=1.0))

    async def wait_on_a_dying_store() -> None:
        async with world.open() as harness:
            root = await harness.root()
            submission = await root.submit("go", request_id="r1")
            world.storage.add(Fault.lose())
            await submission.wait()

    with pytest.raises(SessionPoisonedError):
        await wait_on_a_dying_store()
    async with world.open() as harness:
        outcome = await ask(harness, "go")

    assert outcome.text == "answer"


async def test_an_unanswered_submission_has_no_text(autojump_clock: MockClock) -> None:
    """No failure is taken for an answer: reading its text raises, with reason and detail."""
    world = World(Step(error=ScriptedError(kind="auth", detail="bad key")))

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        record = await status_of(harness, "r1")

    assert (outcome.status, outcome.reason, outcome.detail) == (
        "unanswered",
        "model_error",
        "bad key",
    )
    with pytest.raises(UnansweredError) as caught:
        _ = outcome.text
    assert (caught.value.reason, caught.value.detail) == ("model_error", "bad key")
    assert record.ended_us is not None


async def test_a_submission_that_does_not_exist_is_not_waited_for(
    autojump_clock: MockClock,
) -> None:
    """An id of nothing is refused at once, instead of waiting for ever."""
    world = World()

    async with world.open() as harness:
        with pytest.raises(NotFoundError):
            await Submission(harness, 99).wait()
        with pytest.raises(NotFoundError):
            await Submission(harness, 99).status()


@pytest.mark.parametrize("seconds", [-1, -0.5, float("nan"), "1", True], ids=repr)
async def test_a_timeout_that_is_none_is_refused_in_our_words(seconds: Any) -> None:
    """Whoever waits for a submission or a task is told, and nothing was started by it."""
    world = World("never")

    async with world.open() as harness:
        submission = Submission(harness, 1)
        for wait in (submission.wait, lambda timeout: harness.wait_for_task(1, timeout=timeout)):
            with pytest.raises(InvalidArgumentError, match="timeout: expected seconds, at least 0"):
                await wait(timeout=seconds)
        with pytest.raises(InvalidArgumentError, match="seconds: expected seconds, at least 0"):
            await harness.drain(seconds=seconds)


async def test_open_submissions_are_found_after_a_restart(autojump_clock: MockClock) -> None:
    """A host that comes back finds what is placed and queued, and gets the answers."""
    world = World(Step(text="one", delay=5.0), "two")

    async with world.open() as harness:
        root = await harness.root()
        ids = [(await root.submit(text)).id for text in ("first", "second")]
        await trio.sleep(1)
    async with world.open() as harness:
        root = await harness.root()
        found = await root.open_submissions()
        before = len(world.model.requests)
        await trio.sleep(100)
        # Looking starts nothing (C006); waiting does.
        assert len(world.model.requests) == before
        texts = [(await each.wait()).text for each in found]

    assert [each.id for each in found] == ids
    assert texts == ["one", "two"]
