"""Compactions that a conversation owns: in the background, and when somebody asks for one."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from agent_world import ask, calls, verify
from compaction_world import (
    GOOD,
    compacted,
    heads,
    last,
    long,
    markers,
    other_requests,
    outcomes,
    request_text,
    summary_requests,
)
from trio.testing import MockClock

from pidurable.agent._script import Step
from pidurable.errors import ConversationFullError, InvalidArgumentError
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings

SETTINGS = Settings(keep_recent_tokens=1_000)


async def talk(harness: Harness, count: int, first: int = 0) -> None:
    """Hand in so many long inputs, one after the other."""
    for number in range(first, first + count):
        settled = await ask(harness, long(number), f"r{number}")
        assert settled.status == "done"


async def test_a_compaction_begins_in_the_background_while_work_goes_on(
    autojump_clock: MockClock,
) -> None:
    """The turn that passes the lower threshold is answered before its summary is there."""
    slow = Step(text=GOOD, delay=5.0)
    world = compacted("fine", summaries=[slow], settings=SETTINGS)

    async with world.open() as harness:
        root = await harness.root()
        await talk(harness, 8)
        shown = root.live()["compactions"]
        before = heads(await root.history(limit=1_000))
        await trio.sleep(20)
        after = heads(await root.history(limit=1_000))
        (outcome,) = outcomes(harness)
        doc = await last(harness)
        await talk(harness, 1, first=8)
        await verify(world, harness)

    assert [(slot["status"], slot["why"]) for slot in shown] == [("summarizing", "background")]
    assert before == []
    assert [entry.id for entry in after] == [outcome.result.entry]
    assert outcome.result.status == "applied"
    assert (doc["why"], doc["status"]) == ("background", "applied")
    assert GOOD in request_text(other_requests(world)[-1])
    seen = markers(request_text(summary_requests(world)[0]))
    assert seen | markers(request_text(other_requests(world)[-1])) == {
        f"marker-{number:03}" for number in range(9)
    }


async def test_somebody_asks_for_a_compaction_with_instructions(
    autojump_clock: MockClock,
) -> None:
    """The model is told them, and the summary is placed at once where nothing runs."""
    world = compacted("fine", settings=SETTINGS, window=None)

    async with world.open() as harness:
        root = await harness.root()
        await talk(harness, 6)
        task = await root.compact("keep every number")
        outcome = await harness.wait_for_task(task)
        history = await root.history(limit=1_000)
        again = await harness.wait_for_task(await root.compact())
        with pytest.raises(InvalidArgumentError):
            await root.compact(" ")
        await verify(world, harness)

    assert outcome.result.status == "applied"
    (summary,) = heads(history)
    assert (summary.id, summary.head) == (outcome.result.entry, outcome.result.cut)
    (asked,) = summary_requests(world)
    assert "Besides: keep every number" in request_text(asked)
    assert (again.result.status, again.result.entry) == ("skipped", None)
    assert again.result.reason


async def test_a_summary_that_is_there_while_a_round_is_open_waits_visibly(
    autojump_clock: MockClock,
) -> None:
    """It is in the inbox until the round ends, and what the round is about stays whole."""
    world = compacted("fine", "fine", settings=SETTINGS, window=None)

    # C039
    async with world.open() as harness:
        root = await harness.root()
        await talk(harness, 6)
        world.model._script = _calling(world.model._script)
        submission = await root.submit("go", request_id="go")
        await world.reached.wait()
        task = await root.compact()
        await trio.sleep(1)
        live, inbox = root.live(), root.inbox()
        heads_meanwhile = heads(await root.history(limit=1_000))
        await harness.abort_task(live["calls"][0]["task"])
        settled = await submission.wait()
        outcome = await harness.wait_for_task(task)
        await verify(world, harness)

    assert [slot["status"] for slot in live["compactions"]] == ["waiting"]
    assert [item["mode"] for item in inbox] == ["write"]
    assert heads_meanwhile == []
    assert settled.status == "done"
    assert outcome.result.status == "applied"
    text = request_text(other_requests(world)[-1])
    assert GOOD in text
    assert "it has begun" in text


async def _filled(root: Any, size: int) -> int:
    """Queue inputs of a size until no more fit; how many did."""
    for number in range(1_000):
        try:
            await root.submit("x" * size, request_id=f"{size} {number}")
        except ConversationFullError:
            return number
    raise AssertionError("the queue takes everything")


@pytest.mark.parametrize("full_of", ["items", "bytes"])
async def test_a_summary_is_not_lost_to_a_full_queue(
    autojump_clock: MockClock, full_of: str
) -> None:
    """Nothing else has room in the queue any more: the summary waits there all the same."""
    settings = attrs.evolve(SETTINGS, queued_max=3)
    if full_of == "bytes":
        settings = attrs.evolve(SETTINGS, document_bytes_max=8_000)
    world = compacted("fine", "fine", settings=settings, window=None)

    async with world.open() as harness:
        root = await harness.root()
        await talk(harness, 6)
        world.model._script = _calling(world.model._script)
        submission = await root.submit("go", request_id="go")
        await world.reached.wait()
        queued = 0
        for size in (1_000, 100, 1):
            queued += await _filled(root, size)
        task = await root.compact()
        await trio.sleep(1)
        inbox = root.inbox()
    async with world.open() as harness:
        root = await harness.root()
        (call,) = root.live()["calls"]
        await harness.abort_task(call["task"])
        settled = await (await root.submit("go", request_id="go")).wait()
        outcome = await harness.wait_for_task(task)
        await harness.wait_for_idle()
        await verify(world, harness)
        history = await root.history(limit=1_000)

    assert submission.id == settled.id
    assert len(inbox) == queued + 1 > 3
    assert inbox[-1]["mode"] == "write"
    assert inbox[-1]["entry"] is None
    assert settled.status == "done"
    assert outcome.result.status == "applied"
    assert [entry.id for entry in heads(history)] == [outcome.result.entry]
    assert GOOD in request_text(other_requests(world)[-1])


async def test_a_summary_that_cannot_be_stored_fails_and_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    """Too large for a value with what is around it, it ends its compaction, told and charged."""
    settings = attrs.evolve(SETTINGS, value_bytes_max=4_000)
    world = compacted("fine", summaries=["s" * 3_950], settings=settings, window=None)

    async with world.open() as harness:
        root = await harness.root()
        await talk(harness, 8)
        before = root.usage()["models"]
        outcome = await harness.wait_for_task(await root.compact())
        ended, history = await last(harness), await root.history(limit=1_000)
        after = root.usage()["models"]
        later = await ask(harness, "more", "more")
        await verify(world, harness)

    assert outcome.status == "failed"
    assert "the summary cannot be stored" in ended["reason"]
    assert heads(history) == []
    assert [each["requests"] for each in after.values()] == [
        each["requests"] + 1 for each in before.values()
    ]
    assert later.status == "done"


def _calling(script: Any) -> Any:
    step = attrs.evolve(calls("slow"), when=lambda view: view.user == "go" and view.turn == 0)
    return attrs.evolve(script, steps=(step, *script.steps))
