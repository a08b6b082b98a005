"""Approvals killed before and after every commit: asked once more than seen, run as decided."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio
from agent_world import World, crash_everywhere
from approval_world import GuardedWorld, acts, ask_for_act, begin, the_open
from trio.testing import MockClock

from pidurable import Ask, Deny, Once, Pattern, Rerun
from pidurable.agent import _tool_call
from pidurable.errors import AlreadyDecidedError
from pidurable.harness._open import Harness


class Person:
    """Who decides everything that is open, until the input is answered."""

    def __init__(self, decisions: dict[str, Any]) -> None:
        self._decisions = decisions

    async def __call__(self, harness: Harness, world: World) -> str:
        """Hand the input in, and decide."""
        submission = await (await harness.root()).submit("go", request_id="r1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._decide_all, harness)
            text = (await submission.wait()).text
            nursery.cancel_scope.cancel()
        return text

    async def _decide_all(self, harness: Harness) -> None:
        while True:
            for request in harness.permissions():
                said = self._decisions["effect" if request.subject == "effect" else request.text]
                with contextlib.suppress(AlreadyDecidedError):
                    await harness.decide(request.id, said, by="ann")
            await trio.sleep(0.01)


async def test_decided_calls_survive_a_kill_at_every_commit(autojump_clock: MockClock) -> None:
    """One is allowed, one denied, one let by: each at most once, and never the denied one."""
    person = Person({"list a": Pattern("list *"), "drop": Deny("no")})

    def make() -> World:
        return GuardedWorld(acts("list a", "drop"), acts("list b"), "done")

    def check(world: World, result: Any) -> None:
        assert result == "done"
        assert "act drop" not in world.ledger
        assert len(world.ledger) == len(set(world.ledger))

    kills = await crash_everywhere(make, person, check)

    assert kills > 15


async def test_parked_effects_survive_a_kill_at_every_commit(autojump_clock: MockClock) -> None:
    """Nothing is run again that no person has had run again."""
    person = Person({"ship": Once(), "effect": Rerun()})

    def make() -> World:
        world = GuardedWorld(acts("ship"), "done", policy=ask_for_act)
        world.install(world.act(replay="park"))
        return world

    def check(world: World, result: Any) -> None:
        assert result == "done"
        assert 1 <= len(world.ledger) <= 2

    kills = await crash_everywhere(make, person, check)

    assert kills > 8


async def test_a_request_is_closed_also_where_its_call_died_on_the_way_to_its_expiry(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the deadline and the commit that stores the expiry the call is not waiting."""
    reached = trio.Event()

    async def never(*_: Any) -> None:
        reached.set()
        await trio.sleep_forever()

    world = GuardedWorld(acts("ship"), policy=lambda call: Ask("low", seconds=60))
    async with world.open() as harness:
        await begin(harness)
        request = the_open(harness)
        with monkeypatch.context() as patch:
            patch.setattr(_tool_call, "answered", never)
            await reached.wait()
            world.base = world.base.reopen()  # what a kill at this moment leaves
    async with world.open() as harness:
        listed = the_open(harness)
        await (await harness.root()).abort()
        harness.start()
        await harness.wait_for_idle()
        found = await harness.permission(request.id)

    assert listed == request
    assert (found.state, found.closed_reason) == ("closed", "aborted")
