"""What the commit line works with: drafts, their committers, and the batch that they join.

A batch is one write to the storage for everyone who waited. It is open while bodies may still
join, closes when it is full or led away, and ends once for all of its members.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import trio

from pidurable.errors import SessionPoisonedError
from pidurable.records._limits import BATCH_BODIES_MAX, BATCH_SECONDS_MAX
from pidurable.storage import Op

ErrorT = TypeVar("ErrorT", bound=BaseException)

SLICE_SECONDS = 0.001
"""Bodies run this long in one go; then the loop has a turn, so that others are not kept waiting."""


def again(error: ErrorT) -> ErrorT:
    """A copy to raise in another task: one exception object must not be raised twice."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied


def unabortable(_: Any) -> trio.lowlevel.Abort:
    """For waits that end by themselves and must not be cut short."""
    return trio.lowlevel.Abort.FAILED


def place_of(body: Callable[..., Any]) -> str:
    """Where a body stands in the code."""
    code = getattr(body, "__code__", None)
    if code is None:
        return repr(body)
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_qualname}"


class Draft(Protocol):
    """What the line needs of a transaction."""

    seq: int
    writes: list[tuple[Op, tuple[Any, ...]]]
    open: bool
    flush: bool
    broken: BaseException | None
    """A read of the body that failed; what the body decided after it stands on nothing."""

    async def prepare(self) -> None:
        """End of an `async with` body: do the long part of `seal` outside the loop."""
        ...

    def seal(self) -> None:
        """End of the body: encode and check what is staged, ask the participants."""
        ...

    def discard(self) -> None:
        """The body raised or was refused: nothing of it remains."""
        ...


body_of_task: contextvars.ContextVar[Draft | None] = contextvars.ContextVar(
    "pidurable_commit_body", default=None
)
"""Set while an `async with` body runs, and inherited by tasks and threads that are started in it,
so that a commit inside a commit is refused instead of waiting for itself."""


class Adopter(Protocol):
    """What the line tells of its batches; in this order, synchronously."""

    def join(self, draft: Any) -> None:
        """The draft is sealed; later bodies of the batch see it."""
        ...

    def adopt(self, drafts: list[Any]) -> None:
        """The batch is durable: publish."""
        ...

    def revert(self) -> None:
        """The batch failed: drop what is staged."""
        ...

    def poisoned(self, error: SessionPoisonedError) -> None:
        """Nothing is served any more."""
        ...

    def refusing(self, refusing: bool) -> None:
        """The storage has begun or stopped refusing batches for good."""
        ...


class Member:
    """One committer, from its call until it is answered."""

    __slots__ = ("body", "draft", "error", "task", "value")

    def __init__(
        self, task: trio.lowlevel.Task, draft: Draft, body: Callable[[Any], Any] | None
    ) -> None:
        self.task = task
        self.draft = draft
        self.body = body
        """None for a body that runs in its own task, as an `async with` block."""
        self.value: Any = None
        self.error: BaseException | None = None
        """What the body raised, or what its answer turned into."""


class OpenBatch:
    """The bodies that will share one write."""

    __slots__ = (
        *("bodies", "drafts", "interrupt", "leader", "members"),
        *("parked", "seconds", "slice_seconds"),
    )

    def __init__(self) -> None:
        self.drafts: list[Any] = []
        """Sealed drafts that wrote something, in the order of their sequence numbers."""
        self.members: list[Member] = []
        """Who waits for the end of the batch, in the order in which their bodies ended."""
        self.bodies = 0
        self.seconds = 0.0
        """How long its bodies took together."""
        self.slice_seconds = 0.0
        """How long those took that ran since the loop had its last turn."""
        self.leader: Member | None = None
        """The member whose task stores the batch."""
        self.parked = False
        """The leader sleeps until nobody holds the line."""
        self.interrupt: KeyboardInterrupt | None = None
        """Ctrl-C that arrived in the leader while it waited to try again."""

    def is_full(self) -> bool:
        return self.bodies >= BATCH_BODIES_MAX or self.seconds >= BATCH_SECONDS_MAX

    def takes_now(self) -> bool:
        """Whether one more body may run before the loop has had a turn."""
        return self.slice_seconds < SLICE_SECONDS and not self.is_full()
