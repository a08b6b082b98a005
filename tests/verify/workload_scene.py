"""Workload W as a scene: a whole life of a harness, its ledger of effects included.

Beside what every storage scene has to keep, a harness may show its host only the errors that it
promises: a refusal, a session that is poisoned, or a store that cannot be opened or read. And it
goes on by itself where that is possible: a life whose storage was only refused now and then, and
for less than the time that the line tries again, ends as if nothing had been.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import attrs
import trio
from hang_guard import limited
from outside_ledger import Ledger
from storage_scenes import Plant
from trio.testing import MockClock
from watched_storage import DAMAGE, Journal, WatchedStorage
from workload import Ack, opened, run_workload
from workload_expected import EFFECTS, EXPECTED
from workload_looks import canonical

from pidurable.errors import (
    PidurableError,
    SessionPoisonedError,
    StorageAccessError,
    StorageRefusedError,
)
from pidurable.storage import SqliteStorage, Storage

HOST_ERRORS = (StorageRefusedError, SessionPoisonedError, StorageAccessError)
"""What the machine's failures may become for a host."""

UNNOTICED = {
    "apply StorageRefusedError",
    "heartbeat StorageRefusedError",
    "heartbeat StorageAccessError",
    "checkpoint StorageRefusedError",
    "checkpoint StorageAccessError",
    "close StorageAccessError",
}
"""What a storage may tell its session without a host hearing of it."""

EXPECTED_END = {"store": EXPECTED, "effects": EFFECTS, "duplicates": []}
"""What `dump_workload` describes where nothing is lost and nothing was done twice."""

PATIENCE_SECONDS = 120.0
"""In virtual time, and more than W takes on a healthy disk."""


@attrs.define
class _Shown:
    """Takes acknowledgements: what somebody may have seen."""

    journal: Journal

    def append(self, ack: Ack) -> None:
        if ack.seq > self.journal.acked:
            self.journal.differences.append(
                f"commit {ack.seq} was shown; {self.journal.acked} is what is acknowledged"
            )
        self.journal.published = max(self.journal.published, ack.seq)


class _Held(WatchedStorage):
    """Notes what the store held when it was taken."""

    def acquire(self, claim: Any, *, takeover: bool) -> Any:
        head = super().acquire(claim, takeover=takeover)
        self.journal.held, self.journal.found = True, head.seq
        return head


Life = Callable[[Storage, Journal], Awaitable[None]]
"""What is done with a store in one life."""


def live_workload(path: str, vfs: str | None, journal: Journal, plant: Plant) -> None:
    """Open a store, run W to its end, and close it; judge what came out of it."""
    live_harness(_life, path, vfs, journal, plant)


def live_harness(life: Life, path: str, vfs: str | None, journal: Journal, plant: Plant) -> None:
    """Open a store for a life of a harness, and judge what came out of it."""
    try:
        with journal.machine("open"):
            made = SqliteStorage(path, vfs=vfs, uuid="scene", created_us=1)
    except BaseException as error:
        journal.met("open", error)
        raise
    storage: Storage = _Held(plant(made), journal)
    try:
        with quiet(), scheduled(f"{journal.schedule}/{journal.life}"):
            trio.run(life, storage, journal, clock=MockClock(autojump_threshold=0))
    except trio.TooSlowError:
        journal.hangs += 1
        journal.differences.append("the workload hangs")
        raise
    except HOST_ERRORS as error:
        once = not journal.lasting and not journal.damaged
        if once and journal.errors and journal.errors.keys() <= UNNOTICED:
            journal.differences.append(f"one failed call became the host's: {error!r}")
        raise
    except PidurableError as error:
        if not (journal.damaged and isinstance(error, DAMAGE)):
            journal.undocumented.append(f"the host met {error!r}")
        raise


async def _life(storage: Storage, journal: Journal) -> None:
    ledger = ledger_of(journal.path)
    async with opened(storage, ledger, life=journal.life, acks=_Shown(journal)) as harness:
        if journal.life:
            # What a person does for a task that is blocked by what looked damaged.
            for row in harness.session.storage.live_tasks():
                if row.blocked == "unknown_record":
                    await harness.retry_task(row.id)
        # Reads that fail are tried again for ever, and damage blocks: a host would look by then.
        patient = not journal.lasting and not journal.damaged
        with trio.move_on_after(math.inf if patient else PATIENCE_SECONDS):
            await run_workload(harness, ledger)


def ledger_of(path: str) -> Ledger:
    """The effects that W had on a store, beside it."""
    return Ledger(Path(path).with_name("ledger"))


def dump_workload(path: str) -> dict[str, Any]:
    """Everything that W left, but what depends on how often it was interrupted."""
    storage = SqliteStorage(path, create=False)
    try:
        store = canonical(storage)
    finally:
        storage.close()
    ledger = ledger_of(path)
    return {"store": store, "effects": ledger.effects(), "duplicates": ledger.duplicates()}


@contextlib.contextmanager
def scheduled(seed: str) -> Iterator[None]:
    """Draw the order in which trio runs its tasks from a seed, so that it can be had again."""
    run: Any = trio._core._run  # type: ignore[attr-defined]
    before = run._ALLOW_DETERMINISTIC_SCHEDULING, run._r.getstate()
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r.seed(seed)
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = before[0]
        run._r.setstate(before[1])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What fails here is meant to."""
    logger = logging.getLogger("pidurable")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


class PlayedRun(Protocol):
    """One run of W under some trouble."""

    problems: list[str]

    def play(self) -> None:
        """Play it, and collect what is wrong in `problems`."""


RunT = TypeVar("RunT", bound=PlayedRun)


def play_in_own_folder(make: Callable[[str], RunT], *, what: str) -> RunT:
    """Play a run on a store in a folder of its own, in memory where there is such a place.

    Args:
        make: Makes the run, given the path of the store.
        what: What the run is called where it hangs.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        one = make(str(Path(folder) / "s.sqlite"))
        try:
            with limited(what=what):
                one.play()
        except Exception as error:
            one.problems.append(f"the run ended with {error!r}")
    return one
