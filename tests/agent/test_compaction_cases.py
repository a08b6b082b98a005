"""What went wrong for others about compaction: messages meanwhile, orphans, signatures, races."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from agent_world import MODEL, World, ask, text_of, verify
from compaction_world import (
    GOOD,
    compacted,
    heads,
    long,
    other_requests,
    outcomes,
    request_text,
    said,
    summary_requests,
    users,
)
from trio.testing import MockClock

from pidurable.agent._catalogue import ModelInfo
from pidurable.agent._compaction import Compaction
from pidurable.agent._decisions import Once
from pidurable.agent._hooks import Ask, BeforeCompact, BeforeTool, Summary
from pidurable.agent._models import Done, ModelRequest, Models, StreamEvent
from pidurable.agent._script import ScriptedCall, Step
from pidurable.agent._scripted import ScriptedModel, ScriptedProvider
from pidurable.agent._services import AgentChange
from pidurable.agent._tool_call import ToolTask
from pidurable.errors import ModelError
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.records._messages import (
    AssistantMessage,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
)
from pidurable.registry import Extension, hook

BLOCKING = Settings(background_tokens=0, keep_recent_tokens=1_000)

Some = Callable[..., list[Any]]


async def fill(harness: Harness, count: int = 9, tokens: int = 300) -> None:
    """Hand in as much as is just below the threshold."""
    for number in range(count):
        settled = await ask(harness, long(number, tokens), f"r{number}")
        assert settled.status == "done"


# --- messages typed meanwhile -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [True, False])
async def test_what_is_typed_during_a_compaction_is_answered_in_order(
    autojump_clock: MockClock, goes_on: bool, some: Some
) -> None:
    """At ten moments, with and without a run that goes on after it: once each, without a nudge."""
    # C028
    for moment in some(range(10), of=4):
        summary = Step(text=("The ", "person ", "counts."), delay=3.0)
        world = compacted("fine", summaries=[summary], settings=BLOCKING)

        async with world.open() as harness:
            root = await harness.root()
            await fill(harness)
            handed = []
            if goes_on:
                handed.append(await root.submit(long(9), request_id="r9"))
            else:
                await root.compact()
            await trio.sleep(0.5 + 1.2 * moment)
            assert len(root.live()["compactions"]) == (moment < 10)
            handed.append(await root.submit("a steer", when_busy="steer", request_id="s"))
            handed.append(await root.submit("a follow-up", request_id="f"))
            settled = [await each.wait() for each in handed]
            await harness.wait_for_idle()
            history = await root.history(limit=1_000)
            (outcome,) = outcomes(harness)
            await verify(world, harness)

        assert {each.status for each in settled} == {"done"}, moment
        assert users(history)[-2:] == ["a steer", "a follow-up"]
        assert len(users(history)) == len(set(users(history))) == 9 + len(handed)
        assert outcome.result.status == "applied"


# --- pairs ------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_five_compactions_in_a_row_leave_no_orphan_wherever_they_cut(
    autojump_clock: MockClock, some: Some
) -> None:
    """Cuts swept over every message of a conversation of rounds, behind a strict provider."""

    # C038
    async def supply(range: BeforeCompact) -> Summary:
        return Summary(f"Up to entry {range.first_kept}.")

    def turns(view: Any) -> bool:
        return bool(view.turn < 2)

    rounds = Step(
        when=turns,
        text="w" * 60,
        calls=(ScriptedCall(name="safe", arguments={"what": "w" * 60}),) * 2,
    )
    cuts: set[int] = set()
    for keep in some(range(1, 400, 16), of=5):
        settings = Settings(keep_recent_tokens=keep)
        world = World(rounds, "fine", position="run", repeat_last=True, settings=settings)
        world.registry.install(Extension("m", hooks=[hook(Compaction, before_compact=supply)]))

        async with world.open() as harness:
            root = await harness.root()
            await ask(harness, "w" * 200, "first")
            for number in range(5):
                task = await root.compact()
                result = (await harness.wait_for_task(task)).result
                cuts.add(result.cut or 0)
                settled = await ask(harness, f"and {number}", f"r{number}")
                assert settled.text == "fine"
            # The strict provider has seen every context; nothing was refused, and none is lost.
            await verify(world, harness)

    assert len(cuts) >= 8


async def test_a_call_that_waits_for_a_person_outlives_a_compaction(
    autojump_clock: MockClock,
) -> None:
    """One call waits for approval, one runs: the summary waits, both results find their calls."""

    # C039
    async def guard(call: BeforeTool) -> Ask | None:
        return Ask("high", "is it wanted?") if call.name == "once" else None

    world = compacted("fine", settings=BLOCKING, window=None)
    both = Step(
        when=lambda view: view.user == "go" and view.turn == 0,
        calls=(ScriptedCall(name="once"), ScriptedCall(name="slow")),
    )
    world.model._script = attrs.evolve(
        world.model._script, steps=(both, *world.model._script.steps)
    )
    world.registry.install(Extension("guard", hooks=[hook(ToolTask, before_tool=guard)]))

    async with world.open() as harness:
        root = await harness.root()
        await fill(harness, 6)
        submission = await root.submit("go", request_id="go")
        await world.reached.wait()
        task = await root.compact()
        await trio.sleep(1)
        (request,) = harness.permissions()
        assert [slot["status"] for slot in root.live()["compactions"]] == ["waiting"]
        await harness.decide(request.id, Once())
        await world.traced.wait()
        await trio.sleep(1)
        slow = next(call for call in root.live()["calls"] if call["name"] == "slow")
        await harness.abort_task(slot_task(slow))
        settled = await submission.wait()
        outcome = await harness.wait_for_task(task)
        await verify(world, harness)

    text = request_text(other_requests(world)[-1])
    assert settled.status == "done"
    assert outcome.result.status == "applied"
    assert "did x" in text
    assert "it has begun" in text
    assert GOOD in text


def slot_task(slot: Any) -> int:
    """The task of a call."""
    task: int = slot["task"]
    return task


# --- several, stale, forks ----------------------------------------------------------------------


async def test_of_several_compactions_the_furthest_cut_stays(autojump_clock: MockClock) -> None:
    """One in the background that a later cut has overtaken ends stale, and costs nothing else."""
    slow = Step(text="The slow one, from before.", delay=20.0)
    settings = Settings(background_tokens=500, keep_recent_tokens=1_000)
    world = compacted(Step(text="fine", delay=1.0), summaries=[slow, GOOD], settings=settings)

    async with world.open() as harness:
        root = await harness.root()
        for number in range(11):
            await ask(harness, long(number), f"r{number}")
        shown = root.live()["compactions"]
        await trio.sleep(60)
        ended = [each.result for each in outcomes(harness)]
        history = await root.history(limit=1_000)
        await ask(harness, "and now?", "last")
        live = root.live()
        await verify(world, harness)

    stale, applied = ended
    assert [slot["why"] for slot in shown] == ["background"]
    assert (stale.status, applied.status) == ("stale", "applied")
    assert "starts later already" in (stale.reason or "")
    assert (stale.cut or 0) < (applied.cut or 0)
    assert [entry.id for entry in heads(history)] == [applied.entry]
    assert live["compactions"] == []
    assert GOOD in request_text(other_requests(world)[-1])
    assert "The slow one" not in request_text(other_requests(world)[-1])


async def test_a_fork_before_a_summary_has_what_it_replaced(autojump_clock: MockClock) -> None:
    """The fork's context is the old one; a fork behind it has the summary."""
    world = compacted("fine", settings=BLOCKING)

    async with world.open() as harness:
        root = await harness.root()
        await fill(harness, 11)
        history = await root.history(limit=1_000)
        (summary,) = heads(history)
        before = await root.fork(history[history.index(summary) - 1].id)
        after = await root.fork(summary.id)
        texts = {
            fork.id: "".join(text_of(item.message) for item in await fork.context())
            for fork in (before, after)
        }
        settled = await (await after.submit("go", request_id="go")).wait()
        await verify(world, harness)

    assert "marker-000" in texts[before.id]
    assert GOOD not in texts[before.id]
    assert "marker-000" not in texts[after.id]
    assert GOOD in texts[after.id]
    assert settled.status == "done"


async def test_a_smaller_model_compacts_what_a_larger_one_took(autojump_clock: MockClock) -> None:
    """The guard against repetition is of one window: another model's is looked at anew."""
    # C043
    world = compacted("fine", settings=BLOCKING, window=40_000)
    small = ScriptedModel(name="small")
    small._script = attrs.evolve(world.model._script, context_window=None)
    small.requests = world.model.requests
    world.model.models = lambda **_: Models(  # type: ignore[method-assign]
        [ScriptedProvider([world.model, small])],
        catalogue={
            MODEL: ModelInfo(context_window=40_000),
            "scripted/small": ModelInfo(context_window=4_000),
        },
    )

    async with world.open() as harness:
        root = await harness.root()
        await fill(harness, 14)
        task = await root.compact()
        skipped = (await harness.wait_for_task(task)).result
        await fill_more(harness, 14, 4)
        assert skipped.status == "applied"
        await root.configure(AgentChange(model="scripted/small"))
        settled = await ask(harness, long(30), "r30")
        ended = [each.result.status for each in outcomes(harness)]
        await verify(world, harness)

    assert settled.status == "done"
    assert ended == ["applied"] * len(ended)


async def fill_more(harness: Harness, first: int, count: int) -> None:
    """More of the same."""
    for number in range(first, first + count):
        await ask(harness, long(number), f"r{number}")


async def test_images_are_noted_for_the_summary_and_sent_where_they_are_kept(
    autojump_clock: MockClock,
) -> None:
    """A summary request shows no image; a kept message keeps its own."""
    world = compacted("fine", settings=Settings(keep_recent_tokens=1_600), window=None)

    async with world.open() as harness:
        root = await harness.root()
        async with harness.commit() as tx:
            blobs = [tx.put_blob(data) for data in (b"old", b"new")]
        old, new = (ImageBlock(blob=blob, media_type="image/png") for blob in blobs)
        await (await root.submit([TextBlock(text=long(0)), old], request_id="r0")).wait()
        await fill_more(harness, 1, 5)
        await (await root.submit([TextBlock(text="see"), new], request_id="new")).wait()
        outcome = await harness.wait_for_task(await root.compact())
        await ask(harness, "and now?", "last")
        await verify(world, harness)

    assert outcome.result.status == "applied"
    (asked,) = summary_requests(world)
    assert "(an image, image/png)" in request_text(asked)
    assert asked.images == {}
    assert list(other_requests(world)[-1].images.values()) == [b"new"]


# --- signed thinking ----------------------------------------------------------------------------


def signature(model: str, text: str) -> str:
    """What the provider signs."""
    return hashlib.sha256(f"{model}\n{text}".encode()).hexdigest()


class Signing:
    """A provider that signs what its models think, and refuses what comes back altered."""

    name = "scripted"

    def __init__(self, world: World) -> None:
        self._inner = world.model
        self.refused: list[str] = []
        self.seen = 0

    def known_models(self) -> Sequence[str]:
        return ["model", "other"]

    def has_model(self, model_id: str) -> bool:
        return model_id in self.known_models()

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        """Check, then answer from the script, signed."""
        for item in request.messages:
            message: Message = item.message
            if isinstance(message, AssistantMessage) and message.model == request.model:
                for block in message.blocks:
                    self._check(block, request.model)
        async with self._inner.stream(request) as events:

            async def signed() -> AsyncIterator[StreamEvent]:
                async for event in events:
                    if isinstance(event, Done):
                        blocks = tuple(
                            attrs.evolve(
                                block, opaque={"signature": signature(request.model, block.text)}
                            )
                            if isinstance(block, ThinkingBlock)
                            else block
                            for block in event.message.blocks
                        )
                        event = Done(attrs.evolve(event.message, blocks=blocks))
                    yield event

            yield signed()

    def _check(self, block: Any, model: str) -> None:
        if not isinstance(block, ThinkingBlock):
            return
        self.seen += 1
        if (block.opaque or {}).get("signature") != signature(model, block.text):
            self.refused.append(json.dumps(attrs.asdict(block)))
            raise ModelError("other", "the signature of a thinking block does not fit")


async def test_signed_thinking_is_sent_as_received_or_not_at_all(
    autojump_clock: MockClock,
) -> None:
    """After compactions, a fork, another model and a restart no signature is refused."""
    # C044
    thinking = Step(text="fine", thinking="I count \u6f22 \U0001f600 and on")
    world = compacted(thinking, settings=BLOCKING)
    signing = Signing(world)
    window = ModelInfo(context_window=4_000)
    world.model.models = lambda **_: Models(  # type: ignore[method-assign]
        [signing], catalogue={MODEL: window, "scripted/other": window}
    )

    async with world.open() as harness:
        root = await harness.root()
        await fill(harness, 12)
        fork = await root.fork()
        forked = await (await fork.submit("and here?", request_id="f")).wait()
        await root.configure(AgentChange(model="scripted/other"))
        await fill_more(harness, 12, 6)
    async with world.open() as harness:
        await (await harness.root()).configure(AgentChange(model=MODEL))
        await fill_more(harness, 18, 2)
        ended = [each.result.status for each in outcomes(harness)]
        await verify(world, harness)
        context = await said(harness)

    assert signing.refused == []
    assert signing.seen > 20
    assert forked.status == "done"
    assert ended.count("applied") >= 2
    assert all("I count" not in request_text(each) for each in summary_requests(world))
    thoughts = [b for m in context for b in m.blocks if isinstance(b, ThinkingBlock)]
    assert thoughts
    assert all(block.opaque for block in thoughts)
