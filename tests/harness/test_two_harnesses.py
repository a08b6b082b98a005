"""Two harnesses on one store: in one loop, in two threads, racing, and under clocks that step."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import attrs
import pytest
import trio
from agent_world import MODEL, ask

from pidurable import entry, open_reader
from pidurable.agent._scripted import ScriptedModel
from pidurable.agent._services import AgentChange
from pidurable.errors import HolderLostError, StorageHeldError
from pidurable.harness._open import Harness, open_harness
from pidurable.session._seams import Clock, SystemClock

HOUR_US = 3_600_000_000
RACES = int(os.environ.get("PIDURABLE_C024_RACES", "100"))


@entry("two.note")
@attrs.frozen
class Note:
    text: str


async def append(harness: Harness, text: str) -> None:
    root = await harness.root()
    async with harness.commit() as tx:
        tx.append(root.id, Note(text))


async def notes(store: Path) -> list[str]:
    async with open_reader(store) as reader:
        root = (await reader.conversations())[0].id
        found = await reader.entries(root, limit=10_000)
    return [each.data["text"] for each in found if each.kind == "two.note"]


async def test_a_harness_in_another_thread_conflicts_like_another_process(tmp_path: Path) -> None:
    """Refused while the first one lives; by takeover the first one stores nothing more."""
    # C018
    store = tmp_path / "s"
    held, replaced = trio.Event(), threading.Event()
    told: list[str] = []

    def other() -> None:
        trio.run(hold)

    async def hold() -> None:
        try:
            async with open_harness(store) as first:
                await append(first, "first")
                token.run_sync_soon(held.set)
                await trio.to_thread.run_sync(replaced.wait)
                await append(first, "late")
        except HolderLostError as lost:
            told.append(str(lost))

    token = trio.lowlevel.current_trio_token()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, other)
        await held.wait()
        with pytest.raises(StorageHeldError, match=f"held by process {os.getpid()} "):
            async with open_harness(store):
                pass
        async with open_harness(store, takeover=True) as second:
            replaced.set()
            while not told:  # noqa: ASYNC110 - another thread says it
                await trio.sleep(0.002)
            await append(second, "second")
    assert "epoch 1 was replaced by 2" in told[0]
    assert await notes(store) == ["first", "second"]
    assert list_of_locks(tmp_path) == []


def list_of_locks(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if ".lock." in name]


async def race(store: Path, number: int, model: ScriptedModel) -> tuple[int, int]:
    """Two open the store at once and ask; returns how many were answered and refused."""
    answered: list[str] = []
    refused: list[StorageHeldError] = []
    ready = trio.Event()

    async def one(name: str) -> None:
        await ready.wait()
        try:
            async with open_harness(store, models=model.models()) as harness:
                await harness.root(agent=AgentChange(model=MODEL))
                text = f"{name} {number}"
                outcome = await ask(harness, text, request_id=text)
                assert outcome.text is not None
                answered.append(outcome.text)
        except StorageHeldError as held:
            refused.append(held)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, "left")
        nursery.start_soon(one, "right")
        ready.set()
    for held in refused:
        assert held.pid == os.getpid()
        assert held.heartbeat_age < 15
    return len(answered), len(refused)


async def run_races(store: Path, count: int) -> None:
    model = ScriptedModel([f"answer {number}" for number in range(2 * count)])
    answered = 0
    for number in range(count):
        won, refused = await race(store, number, model)
        assert won + refused == 2
        assert won >= 1
        answered += won
        async with open_reader(store) as reader:
            root = (await reader.conversations())[0].id
            kinds = [each.kind for each in await reader.entries(root, limit=10_000)]
        turns = [kind for kind in kinds if kind in ("pi.user", "pi.assistant")]
        assert turns == ["pi.user", "pi.assistant"] * answered
    assert len(model.requests) == answered


async def test_two_that_ask_at_once_never_mix_their_turns(tmp_path: Path) -> None:
    """One holds the store and is answered; the other is told who has it, and changes nothing."""
    # C024
    await run_races(tmp_path / "s", 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_hundred_races_have_one_winner_each(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A hundred times two of them begin at once, and a reader looks after each."""
    # C024
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes half a minute; run it with -m slow")
    await run_races(tmp_path / "s", RACES)


@attrs.define(eq=False)
class SteppedClock:
    """The wall clock of a process, some time off."""

    off_us: int
    _clock: Clock = attrs.Factory(SystemClock)

    def now_us(self) -> int:
        return self._clock.now_us() + self.off_us


@pytest.mark.parametrize("hours", [-24, -1, 1, 24])
async def test_a_clock_that_steps_harms_nobody(tmp_path: Path, hours: int) -> None:
    """Back, nobody takes over; forth, a successor may, and then the first one stores nothing."""
    # R11, C022
    store = tmp_path / "s"
    stepped = SteppedClock(hours * HOUR_US)
    try:
        async with open_harness(store) as first:
            await append(first, "first")
            if hours < 0:
                with pytest.raises(StorageHeldError):
                    async with open_harness(store, clock=stepped):
                        pass
                await append(first, "still")
            else:
                async with open_harness(store, clock=stepped) as second:
                    await append(second, "second")
                await append(first, "late")
    except HolderLostError:
        assert hours > 0
    assert await notes(store) == ["first", "still" if hours < 0 else "second"]
    assert list_of_locks(tmp_path) == []
