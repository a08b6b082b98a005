"""Random programs around compactions: nothing is lost, and every request is one that is taken."""

from __future__ import annotations

import os
import random
from typing import Any

import attrs
import pytest
import trio
from agent_world import FreezeAt, World, check_transcript, conversations, odd_tool, text_of, verify
from compaction_world import (
    GOOD,
    compacted,
    heads,
    long,
    markers,
    outcomes,
    request_text,
    summary_requests,
)
from trio.testing import MockClock

from pidurable.agent import _compaction, _compaction_range
from pidurable.agent._compaction_text import Part, next_part
from pidurable.agent._script import Cut, ScriptedCall, ScriptedError, Step
from pidurable.errors import PidurableError
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.records._messages import ToolResultMessage
from pidurable.registry import ToolCall

SUMMARIES: list[Any] = [
    GOOD,
    Step(text=(GOOD, " And so on."), delay=0.3),
    Step(text="# Summary\n- none"),
    Step(text=""),
    Step(text=GOOD, error=ScriptedError(detail="busy", retry_after=2.0)),
    Step(text=GOOD, error=ScriptedError(kind="overflow", detail="too large"), times=1),
    Step(text=(GOOD, " cut"), cut=Cut(after=1)),
    Step(text="w" * 9_000),
]
ROUNDS = Step(
    when=lambda view: view.turn < 2 and "calls" in view.user,
    text="w" * 300,
    calls=(
        ScriptedCall(name="safe", arguments={"what": "w" * 200}),
        ScriptedCall(name="odd"),
    ),
)


async def late(call: ToolCall) -> str:
    """Take long enough for something to happen meanwhile."""
    await call.sleep(0.4)
    return "w" * 300


ACTIONS = ("submit", "submit", "submit", "compact", "abort", "abort one", "wait", "crash", "close")


class Player:
    """A host that does what it is told by one seed, over as many harnesses as it takes."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.actions = [self.chance.choice(ACTIONS) for _ in range(self.chance.randint(4, 16))]
        settings = Settings(
            keep_recent_tokens=self.chance.choice((50, 400, 1_000)),
            background_tokens=self.chance.choice((0, 600)),
            request_tries=1,
        )
        self.world = compacted(
            ROUNDS,
            Step(text="fine", delay=self.chance.choice((0.0, 0.1))),
            summaries=[self.chance.choice(SUMMARIES) for _ in range(8)],
            settings=settings,
            window=self.chance.choice((2_500, None)),
            tools=[odd_tool(late, replay="safe")],
        )
        self.number = 0
        self.point: FreezeAt | None = None

    async def live(self) -> None:
        """One harness: until it closes, crashes, or there is nothing more to do."""
        try:
            async with self.world.open(failpoints=self.point) as harness:
                while self.actions:
                    action = self.actions.pop(0)
                    if action == "close":
                        return
                    if action == "crash":
                        where = self.chance.choice(("before", "after"))
                        nth = self.chance.randint(1, 12)
                        self.point = FreezeAt(self.world, where, nth)  # type: ignore[arg-type]
                        return
                    await self.act(harness, action)
        except* PidurableError:
            assert self.point is not None
            assert self.point.struck
        finally:
            if self.point is not None and self.point.struck:
                self.point = None

    async def act(self, harness: Harness, action: str) -> None:
        """Do one thing."""
        root = await harness.root()
        if action == "submit":
            self.number += 1
            text = long(self.number, self.chance.choice((20, 300, 700)))
            text += self.chance.choice(("", " and calls"))
            mode: Any = self.chance.choice(("follow_up", "steer"))
            await root.submit(text, when_busy=mode, request_id=f"r{self.number}")
        elif action == "compact":
            await root.compact(self.chance.choice((None, "all of it")))
        elif action == "abort":
            await root.abort()
        elif action == "abort one":
            for slot in root.live()["compactions"]:
                await harness.abort_task(slot["task"])
        else:
            await trio.sleep(self.chance.choice((0.05, 0.3, 3.0)))


async def come_to_rest(harness: Harness) -> None:
    """Until nothing runs, in the background either; what is queued is given back."""
    root = await harness.root()
    with trio.fail_after(100_000):
        for _ in range(2):
            await harness.wait_for_idle()
            for task in harness.tasks(limit=10_000):
                if task.outcome is None:
                    await harness.wait_for_task(task.id)
            await root.abort()


async def play(seed: int) -> Player:
    """Run a program, bring everything to rest, and check what must hold."""
    player = Player(seed)
    while player.actions:
        await player.live()
    world = player.world
    async with world.open() as harness:
        root = await harness.root()
        harness.start()
        await come_to_rest(harness)
        await verify(world, harness)
        for conversation in conversations(harness):
            assert await conversation.open_submissions() == []
        assert root.live()["compactions"] == []
        history = await root.history(limit=10_000)
        check_transcript(history)
        check_memory(world, history, [item.message for item in await root.context()])
        placed = {entry.id for entry in heads(history)}
        applied = {
            each.result.entry
            for each in outcomes(harness)
            if each.status == "completed" and each.result.status == "applied"
        }
        assert applied <= placed
        cuts = [entry.head for entry in heads(history)]
        assert cuts == sorted(cuts, key=lambda cut: cut or 0)
        # Usage of every request that the provider saw whole is charged; cut ones may be missing.
        usage = root.usage()["models"].get("scripted/model", {"requests": 0})["requests"]
        assert usage <= len(world.model.requests)
    return player


def check_memory(world: World, history: Any, context: list[Any]) -> None:
    """What was said is in the context, or was read by who wrote the summary that stands for it."""
    said = markers("".join(text_of(m) for e in history for m in e.messages))
    read = markers("".join(request_text(each) for each in summary_requests(world)))
    left = markers("".join(text_of(message) for message in context))
    assert said <= read | left
    if not heads(history):
        assert said == left
    # No cut stands between a call and its result, whichever came when.
    cuts = [entry.head or 0 for entry in heads(history)]
    parted = [
        (message.call, entry.id, cut)
        for entry in history
        for message in entry.messages
        if isinstance(message, ToolResultMessage)
        for cut in cuts
        if message.call[0] < cut <= entry.id
    ]
    assert parted == []


def play_all(seeds: range) -> int:
    """Play programs; return how many summaries were asked for."""
    asked = 0
    for seed in seeds:
        try:
            player = trio.run(play, seed, clock=MockClock(autojump_threshold=0))
        except BaseException as failure:
            failure.add_note(f"seed {seed}")
            raise
        asked += len(summary_requests(player.world))
    return asked


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_program_loses_anything_to_a_compaction(slow_run: bool) -> None:
    """Inputs, compactions, aborts, crashes and bad summaries, by seed: all comes to rest."""
    # C038, C040, C042
    many = int(os.environ.get("COMPACTION_PROGRAMS", "600"))
    asked = play_all(range(many if slow_run else 8))

    assert asked > 5


def only_the_first(*given: Any) -> Part:
    """A planted bug: what does not fit the first part is never read."""
    return attrs.evolve(next_part(*given), next=None)


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "cut between a call and its result": (
        _compaction_range,
        "_places_to_cut",
        lambda context: list(range(1, len(context))),
    ),
    "read less than is replaced": (_compaction, "next_part", only_the_first),
    "show what has ended": (_compaction, "show_ended", lambda *_: None),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same programs fail where a compaction does what it must not."""
    monkeypatch.setattr(*PLANTED[name])

    with pytest.raises((AssertionError, ExceptionGroup)) as failed:
        play_all(range(40))

    assert any("seed" in note for note in failed.value.__notes__)
