"""The seams: time, randomness, blocking work and named failpoints, injected when a session opens.

Nothing in the kernel reads a clock, draws a random number or starts a thread but through these, so
that a test can run years in seconds, replay a schedule from its seed, and stop the process exactly
between two lines.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, final, runtime_checkable

import outcome
import trio

from pidurable.errors import check

T = TypeVar("T")

logger = logging.getLogger("pidurable")


class Clock(Protocol):
    """Wall-clock time in UTC microseconds. Sleeping uses trio's monotonic clock."""

    def now_us(self) -> int: ...


@runtime_checkable
class VirtualClock(Clock, Protocol):
    """A wall clock that moves exactly as trio's clock does, and says so when it is stepped.

    Nothing has to poll it, and its seconds are nobody else's: a holder under such a clock never
    falls silent, so it shows no signs of life every few seconds unless the clock is `shared`. That
    is what lets years of timers pass in seconds.
    """

    @property
    def shared(self) -> bool:
        """Whether other holders go by this clock too, so that leases count."""
        ...

    def on_step(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` after each step from now on, until what this returns is called."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now_us(self) -> int:
        return time.time_ns() // 1000


@final
class TrioClock:
    """A wall clock that follows trio's clock, for `trio.testing.MockClock`.

    Give `blocking=InlineBlocking()` beside it: a virtual clock may jump while a thread works.

    Args:
        start_us: What the wall clock says when it is first asked, in UTC microseconds.
        shared: Other holders of the store go by this very clock, say in a test of leases: signs
            of life are stored as under a real clock, which makes long times slow. Else the holder
            counts as alive until its process dies or it is replaced by `takeover`.
    """

    def __init__(self, start_us: int = 1_700_000_000_000_000, *, shared: bool = False) -> None:
        self._start_us = start_us
        self._shared = shared
        self._origin: float | None = None
        self._step_us = 0
        self._told: list[Callable[[], None]] = []

    @property
    def shared(self) -> bool:
        """Whether other holders go by this clock too."""
        return self._shared

    @property
    def step_us(self) -> int:
        """Added to every reading: set it to model a clock that was stepped."""
        return self._step_us

    @step_us.setter
    def step_us(self, step_us: int) -> None:
        self._step_us = step_us
        for told in list(self._told):
            told()

    def on_step(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` after each step from now on, until what this returns is called."""
        self._told.append(told)
        return lambda: self._told.remove(told)

    def now_us(self) -> int:
        """Return the wall-clock time."""
        now = trio.current_time()
        if self._origin is None:
            self._origin = now
        return self._start_us + self._step_us + int((now - self._origin) * 1e6)


class Randomness(Protocol):
    """Where ids for the outside and jitter come from."""

    def uuid(self) -> str: ...

    def random(self) -> float: ...


class SystemRandomness:
    """Drawn from the operating system."""

    def uuid(self) -> str:
        return str(uuid.uuid4())

    def random(self) -> float:
        return random.random()  # noqa: S311 - jitter, not a secret


@final
class SeededRandomness:
    """Drawn from a seed, for tests and simulations."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - replays a schedule, not a secret

    def uuid(self) -> str:
        """Return the next id."""
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def random(self) -> float:
        """Return the next number, at least 0 and below 1."""
        return self._random.random()


class Worker(Protocol):
    """One place where blocking calls run, one after the other."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Run `fn(*args)` there and wait for it; not cancellable, the call is never left behind."""
        ...

    def close(self) -> None: ...


class Blocking(Protocol):
    """Where blocking work goes: threads in a real run, inline in a simulation."""

    async def run(self, fn: Callable[..., T], *args: Any, abandon: bool = False) -> T:
        """Run `fn(*args)` and wait for it; with `abandon` a cancellation leaves it behind."""
        ...

    def worker(self, name: str) -> Worker: ...


real_seconds = time.perf_counter
"""What calls in threads are timed by: they take real time, whatever clock the session goes by."""


class ThreadWorker:
    """A daemon thread with a queue. One hop there and back costs about 100 us."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            fn, args, task, token = item
            result = outcome.capture(fn, *args)
            # The loop may be gone when a run was torn down; then nobody waits for the answer.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(trio.lowlevel.reschedule, task, result)
            del item, fn, args, task, result

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        # Nobody would ever answer it.
        check(not self._closed, f"a call came to the thread {self._name} after it was closed")
        task = trio.lowlevel.current_task()
        token = trio.lowlevel.current_trio_token()
        self._queue.put((fn, args, task, token))
        answer: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return answer

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join()


_THREADS_MAX = 40


class ThreadBlocking:
    """Blocking work in threads. The default.

    Each object counts its own threads: what waits for one of them never waits for the calls of
    somebody else, say of a task that blocks for minutes.
    """

    def __init__(self) -> None:
        self._limiter: trio.CapacityLimiter | None = None

    async def run(self, fn: Callable[..., T], *args: Any, abandon: bool = False) -> T:
        if self._limiter is None:
            self._limiter = trio.CapacityLimiter(_THREADS_MAX)
        return await trio.to_thread.run_sync(
            fn, *args, abandon_on_cancel=abandon, limiter=self._limiter
        )

    def worker(self, name: str) -> Worker:
        return ThreadWorker(f"pidurable-{name}")


class _InlineWorker:
    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        # A checkpoint either way, so that inline and threaded runs have the same schedule points.
        await trio.lowlevel.cancel_shielded_checkpoint()
        return fn(*args)

    def close(self) -> None:
        """Nothing to close."""


@final
class InlineBlocking:
    """Blocking work in the loop itself: a virtual clock cannot jump while a call runs."""

    async def run(self, fn: Callable[..., T], *args: Any, abandon: bool = False) -> T:
        """Run `fn(*args)` here and now; there is nothing to abandon."""
        await trio.lowlevel.checkpoint()
        return fn(*args)

    def worker(self, name: str) -> Worker:
        """Return a worker that runs its calls here and now."""
        return _InlineWorker()


class Failpoints:
    """Named places where a test may stop the process or hold it. Does nothing by default.

    `commit.before` is passed when a batch is about to be stored, `commit.after` when it is durable
    and nobody has been told yet. `command.answered` is passed when commands from outside have their
    answers and the box still has them. CP1 to CP7 are places of the agent loop:

    ====  ===================================================
    CP1   model reply stored, no tool started
    CP2   tool intent stored, effect not begun
    CP3   effect done, outcome not stored
    CP4   outcome stored, next phase not scheduled
    CP5   user message stored, sender not yet told
    CP6   summary received, compaction not committed
    CP7   in the middle of a stream, some tokens received
    ====  ===================================================
    """

    def hit(self, name: str) -> None:
        """Pass the point `name`."""
