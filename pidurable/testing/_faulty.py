"""Storages that misbehave on purpose: on a full disk, after a cut cable, behind a dead process.

A fault strikes at a named point: the n-th call of a method (or of any read), counted from when the
fault was planned. What it does is one of the things that a real storage does to its session, and
no other:

* refused: nothing was stored, and the storage is certain of it;
* lost, or stored and then raised: the session cannot know which, and must poison itself;
* dropped: acknowledged and not stored, which no honest storage does. It is there to prove that a
  check notices;
* held: inside the storage, until the test lets go.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar, final

import attrs

from pidurable.errors import InvalidArgumentError, StorageAccessError, StorageRefusedError
from pidurable.storage import Storage
from pidurable.testing._forwarding import BOX_CALLS, ForwardingStorage

ResultT = TypeVar("ResultT")

WRITE_CALLS = frozenset(
    {"acquire", "heartbeat", "release", "apply", "checkpoint", "reclaim", "close"}
)
READ_CALLS = frozenset(
    name
    for name in vars(ForwardingStorage)
    if not name.startswith("_") and name not in WRITE_CALLS | {"inner", "store", "command_box"}
)
GATE_SECONDS = 30.0
"""A held call that nobody releases gives up after this, so that a failing test ends."""

Action = Literal["raise", "lose", "store_then_raise", "drop", "call_before", "call_after"]


@final
class Gate:
    """Hold calls inside the storage: wait until one `reached` it, look around, `release` it.

    For calls made in a thread. Where the session calls its storage inline, on the one thread that
    also runs the test, use `Fault.call` instead.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()

    def release(self) -> None:
        """Let the held call go on, and every later one pass."""
        self._released.set()

    def wait_here(self) -> None:
        """Wait for `release`; called inside the storage.

        Raises:
            TimeoutError: Nobody released the gate within 30 seconds.
        """
        self.reached.set()
        if not self._released.wait(GATE_SECONDS):
            raise TimeoutError(f"nobody released the gate within {GATE_SECONDS:g} s")


@attrs.frozen(kw_only=True)
class Fault:
    """One planned fault. Make it with one of the class methods."""

    point: str
    """The name of a method of `Storage`, `read` for any of the reads, or one of its box of
    commands, as `command_box.take`."""
    action: Action
    at: int = 1
    """Which call at the point is the first to be struck; 1 is the next one."""
    times: int = 1
    """How many calls in a row are struck."""
    error: Callable[[str], BaseException] | None = None
    """Makes the error, from the name of the store."""
    callback: Callable[[], object] | None = None

    def __attrs_post_init__(self) -> None:
        if self.point not in WRITE_CALLS | READ_CALLS | BOX_CALLS | {"read"}:
            raise InvalidArgumentError("point", "no such call of a storage", repr(self.point))
        if self.at < 1 or self.times < 1:
            raise InvalidArgumentError("at, times", "count from 1", f"{self.at}, {self.times}")
        writes = WRITE_CALLS | BOX_CALLS
        if self.action in ("lose", "store_then_raise", "drop") and self.point not in writes:
            raise InvalidArgumentError(
                "point", f"a read cannot {self.action.replace('_', ' ')}", repr(self.point)
            )
        if self.action == "drop" and self.point in ("acquire", "checkpoint"):
            raise InvalidArgumentError("point", "its answer cannot be made up", repr(self.point))

    @classmethod
    def refuse(
        cls, point: str = "apply", *, at: int = 1, times: int = 1, problem: str = "disk full"
    ) -> Fault:
        """Refuse for certain: `StorageRefusedError`, nothing stored."""
        return cls(
            point=point,
            action="raise",
            at=at,
            times=times,
            error=lambda store: StorageRefusedError(store, problem),
        )

    @classmethod
    def fail(
        cls, point: str = "read", *, at: int = 1, times: int = 1, problem: str = "disk I/O error"
    ) -> Fault:
        """Fail before anything happens, with `StorageAccessError`. Meant for reads."""
        return cls(point=point, action="raise", at=at, times=times, error=_uncertain(problem))

    @classmethod
    def lose(
        cls, point: str = "apply", *, at: int = 1, times: int = 1, problem: str = "disk I/O error"
    ) -> Fault:
        """Accept the call, store nothing of it, and raise an error that does not tell so."""
        return cls(point=point, action="lose", at=at, times=times, error=_uncertain(problem))

    @classmethod
    def store_then_raise(
        cls, point: str = "apply", *, at: int = 1, times: int = 1, problem: str = "disk I/O error"
    ) -> Fault:
        """Store the call, then raise an error that does not tell so."""
        return cls(
            point=point, action="store_then_raise", at=at, times=times, error=_uncertain(problem)
        )

    @classmethod
    def drop(cls, point: str = "apply", *, at: int = 1, times: int = 1) -> Fault:
        """Acknowledge and store nothing: a lying disk. Only to prove that a check notices."""
        return cls(point=point, action="drop", at=at, times=times)

    @classmethod
    def hold(
        cls, gate: Gate, point: str = "apply", *, at: int = 1, times: int = 1, after: bool = False
    ) -> Fault:
        """Hold the call at a gate, before it reaches the inner storage (or after)."""
        return cls.call(gate.wait_here, point, at=at, times=times, after=after)

    @classmethod
    def call(
        cls,
        callback: Callable[[], object],
        point: str = "apply",
        *,
        at: int = 1,
        times: int = 1,
        after: bool = False,
    ) -> Fault:
        """Run a callback inside the call, before it reaches the inner storage (or after).

        What it raises comes out of the call, as it is.
        """
        action: Action = "call_after" if after else "call_before"
        return cls(point=point, action=action, at=at, times=times, callback=callback)


def _uncertain(problem: str) -> Callable[[str], BaseException]:
    return lambda store: StorageAccessError(store, problem)


@attrs.define(eq=False)
class _Planned:
    fault: Fault
    first: int
    """The number of the first call at the point that it strikes."""


@final
class FaultyStorage(ForwardingStorage):
    """Any storage, with planned faults. With an empty plan it behaves exactly like the inner one.

    Args:
        inner: The storage that does the work.
        plan: Faults; `at` counts from here. Where several strike one call, the first one counts.
    """

    def __init__(self, inner: Storage, plan: Iterable[Fault] = ()) -> None:
        super().__init__(inner)
        self._mutex = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._planned: list[_Planned] = []
        self._frozen = False
        for fault in plan:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Plan another fault; its `at` counts from now."""
        with self._mutex:
            self._planned.append(_Planned(fault, self._calls[fault.point] + fault.at))

    def clear(self) -> None:
        """Forget all planned faults. A frozen storage stays frozen."""
        with self._mutex:
            self._planned.clear()

    def count(self, point: str) -> int:
        """Return how many calls there have been at a point, those that failed included."""
        with self._mutex:
            return self._calls[point]

    @property
    def frozen(self) -> bool:
        """Whether `freeze` was called."""
        return self._frozen

    def freeze(self) -> None:
        """Model a dead process: from now on every call raises, and nothing more is stored.

        Calls that are held at a gate are dead too. Only `close` still works, as the kernel closes
        the handles of a process that was killed; what it held can then be taken over at once.
        """
        with self._mutex:
            self._frozen = True

    def _check_alive(self, name: str) -> None:
        if self._frozen and name != "close":
            raise StorageAccessError(self.store, f"frozen: no {name} comes through any more")

    def _struck(self, name: str) -> Fault | None:
        """Count the call and find the fault that strikes it."""
        points = (name, "read") if name in READ_CALLS else (name,)
        with self._mutex:
            found = None
            for point in points:
                self._calls[point] += 1
                number = self._calls[point]
                for planned in self._planned:
                    fault = planned.fault
                    end = planned.first + fault.times
                    if fault.point == point and planned.first <= number < end:
                        found = found or fault
            return found

    def _call(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        self._check_alive(name)
        fault = self._struck(name)
        if fault is None:
            return call()
        if fault.action == "call_before" and fault.callback is not None:
            fault.callback()
            self._check_alive(name)
        if fault.action == "drop":
            return None  # type: ignore[return-value]
        if fault.action in ("raise", "lose") and fault.error is not None:
            raise fault.error(self.store)
        result = call()
        if fault.action == "call_after" and fault.callback is not None:
            fault.callback()
            self._check_alive(name)
        if fault.action == "store_then_raise" and fault.error is not None:
            raise fault.error(self.store)
        return result


@final
class ReopeningStorage(ForwardingStorage):
    """Any storage, closed and opened again after every batch: what a test sees, the store holds.

    Ownership is not taken anew, so the epoch stays; the lock of a living holder is gone, as it is
    after a crash.
    """

    def __init__(self, inner: Storage, reopen: Callable[[Storage], Storage]) -> None:
        super().__init__(inner)
        self._reopen = reopen
        # A read in another thread must not meet the handle that is just being closed.
        self._mutex = threading.RLock()

    def _call(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        with self._mutex:
            try:
                return call()
            finally:
                if name == "apply":
                    self._inner.close()
                    self._inner = self._reopen(self._inner)
