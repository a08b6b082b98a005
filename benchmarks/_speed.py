"""How fast is this machine, in this minute, against the one on which the targets were set?

A figure in milliseconds means little where the processor is shared and its speed changes by the
hour. So a benchmark whose figure is an absolute one measures, in each of its rounds, what trio
takes for three things that do not depend on the product: a checkpoint of a task that is alone, a
nursery for one task, a cancel scope. The targets were set where those take 3.7, 18 and 4.6
microseconds. `speed` is the geometric mean of how much faster they are here: 0.5 is a machine half
as fast. A flush of the disk has a speed of its own, which this does not tell.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

import trio

_TIMES = 1_000
_BATCHES = 5


async def _checkpoints() -> None:
    for _ in range(_TIMES):
        await trio.lowlevel.checkpoint()


async def _nothing() -> None:
    pass


async def _nurseries() -> None:
    for _ in range(_TIMES):
        async with trio.open_nursery() as nursery:  # noqa: ASYNC112 - what it costs by itself
            nursery.start_soon(_nothing)


async def _scopes() -> None:
    for _ in range(_TIMES):
        with trio.CancelScope():  # noqa: ASYNC100 - what it costs by itself
            pass


_REFERENCE_US: dict[Callable[[], Awaitable[None]], float] = {
    _checkpoints: 3.7,
    _nurseries: 18.0,
    _scopes: 4.6,
}


async def speed() -> float:
    """The speed of this machine now, of the one on which the targets were set: 1.0 is as fast."""
    ratios = []
    for work, reference_us in _REFERENCE_US.items():
        taken = []
        for _ in range(_BATCHES):
            started = time.perf_counter()
            await work()
            taken.append(time.perf_counter() - started)
        # The median of some short batches: whoever else runs here disturbs one of them.
        ratios.append(reference_us / (sorted(taken)[_BATCHES // 2] / _TIMES * 1e6))
    return math.prod(ratios) ** (1 / len(ratios))
