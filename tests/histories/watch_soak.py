"""A thousand watchers of one document, and one that takes nothing for ten thousand commits."""

from __future__ import annotations

import gc
from typing import Any

import attrs
import trio
from history_documents import KINDS
from history_stage import Stage
from history_watchers import FRAMES_MAX, WatchError
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.session._watch import Frame

FLAG = next(kind for kind in KINDS if kind.name.endswith("flag")).classes[0]


@attrs.frozen(kw_only=True)
class Soak:
    """What the soak has seen."""

    watchers: int
    deliveries: int
    stalled_commits: int
    held: int
    """Most frames that were alive at once while one watcher took nothing."""


async def _commit(harness: Any, conversation: int, number: int) -> int:
    async with harness.commit() as tx:
        (await tx.document(FLAG, conversation)).value = number
    seq: int = tx.seq
    return seq


async def _many(harness: Any, conversation: int, watchers: int, commits: int) -> int:
    """Every watcher is given every frame, in order, and all are given the same objects."""
    taken: list[list[Any]] = [[] for _ in range(watchers)]
    begun: list[int] = []

    async def consume(
        number: int, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with harness.watch(FLAG, conversation) as watch:
            begun.append(watch.seq)
            task_status.started()
            async for frame in watch:
                taken[number].append(frame)
                # Some hurry, some take their time.
                for _ in range(number % 3):
                    await trio.lowlevel.checkpoint()

    seqs = []
    async with trio.open_nursery() as nursery:
        for number in range(watchers):
            await nursery.start(consume, number)
        for number in range(commits):
            seqs.append(await _commit(harness, conversation, number))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    first = taken[0]
    if [frame.seq for frame in first] != seqs:
        raise WatchError(f"a watcher of many was given {len(first)} of {len(seqs)} frames")
    if [frame.json()["value"] for frame in first] != list(range(commits)):
        raise WatchError("the frames of a watcher of many have other values")
    for number, frames in enumerate(taken):
        if len(frames) != commits or any(a is not b for a, b in zip(frames, first, strict=True)):
            raise WatchError(f"watcher {number} of {watchers} was given other frames")
    return watchers * commits


def _frames() -> int:
    """How many frames there are at all."""
    gc.collect()
    return sum(type(each) is Frame for each in gc.get_objects())


async def _stalled(harness: Any, conversation: int, commits: int) -> int:
    """Who takes nothing holds a hundred frames at most, and gets one whole value."""
    held, others = 0, _frames()
    async with harness.watch(FLAG, conversation) as watch:
        for number in range(commits):
            seq = await _commit(harness, conversation, -number)
            if number in (FRAMES_MAX - 1, FRAMES_MAX, commits // 2, commits - 1):
                held = max(held, _frames() - others)
        if held > FRAMES_MAX:
            raise WatchError(f"{held} frames are held for a watcher that takes nothing")
        frame = await watch.__anext__()
        if (frame.seq, frame.whole, frame.json()["value"]) != (seq, True, 1 - commits):
            raise WatchError(f"after {commits} commits the watcher is given {frame}")
        seq = await _commit(harness, conversation, 1)
        frame = await watch.__anext__()
        if (frame.seq, frame.whole) != (seq, False):
            raise WatchError(f"once it has caught up the watcher is given {frame}")
    return held


def soak(*, watchers: int, commits: int, stalled_commits: int) -> Soak:
    """Play both.

    Raises:
        WatchError: A watcher was given something else than it should be.
    """

    async def main() -> Soak:
        stage = Stage(0, None)
        async with stage.open(lambda _: None, lambda: None) as harness:
            conversation = (await harness.create_conversation()).id
            deliveries = await _many(harness, conversation, watchers, commits)
            held = await _stalled(harness, conversation, stalled_commits)
            return Soak(
                watchers=watchers,
                deliveries=deliveries,
                stalled_commits=stalled_commits,
                held=held,
            )

    return trio.run(main, clock=MockClock(autojump_threshold=0))
