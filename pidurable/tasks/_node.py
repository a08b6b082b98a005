"""The nodes of the ownership tree: live tasks, and the conversations above them.

A million tasks may be parked, so a node is small: it has of a record only what decides what happens
to the task, what few tasks have is kept apart (`Rare`), names are interned, and a wait that is only
a deadline is its entry among the timers. A parked task takes about 400 bytes with all of its index
entries.
"""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any

from pidurable.records._tasks import Status, Wait
from pidurable.storage import TaskRow, TaskStateRow
from pidurable.tasks._timers import entry_of, moment_of

if TYPE_CHECKING:
    from typing import Generic, TypeVar

    T = TypeVar("T")

    class _Field(Generic[T]):
        """What type checkers see of a property made by `_rare`."""

        def __get__(self, node: object, cls: type[Any], /) -> T: ...

        def __set__(self, node: object, value: T, /) -> None: ...


PENDING = Status.PENDING
RUNNING = Status.RUNNING
WAITING = Status.WAITING
COMPLETING = Status.COMPLETING
TERMINAL = Status.TERMINAL

_STATUSES = {int(status): status for status in Status}
"""By number: looking one up costs a tenth of asking the class."""


class Rare:
    """What few tasks have, and none for long. Never changed: a task that differs gets another."""

    __slots__ = (
        "abort_reason",
        "abort_us",
        "background",
        "blocked",
        "deadline_us",
        "ended_us",
        "on_restart",
        "outcome_status",
        "recoveries",
        "tries",
        "woken_by",
    )

    def __init__(self) -> None:
        self.background = False
        self.on_restart: str | None = None
        self.deadline_us: int | None = None
        self.ended_us: int | None = None
        self.abort_us: int | None = None
        self.abort_reason: str | None = None
        self.recoveries = 0
        self.tries = 0
        self.woken_by: str | None = None
        self.blocked: str | None = None
        self.outcome_status: str | None = None

    def but(self, **changes: object) -> Rare:
        """The same with some fields that differ."""
        new = Rare.__new__(Rare)
        new.background = self.background
        new.on_restart = self.on_restart
        new.deadline_us = self.deadline_us
        new.ended_us = self.ended_us
        new.abort_us = self.abort_us
        new.abort_reason = self.abort_reason
        new.recoveries = self.recoveries
        new.tries = self.tries
        new.woken_by = self.woken_by
        new.blocked = self.blocked
        new.outcome_status = self.outcome_status
        for name, value in changes.items():
            setattr(new, name, value)
        return new


_USUAL = Rare()
"""Of a task that nothing unusual has happened to."""

_FOR_SIGNALS = Wait(signals=True)
_LET_GO = "resumed"
"""In place of the reason of an abort, where there is none."""


def _only_sleeps(wait: Wait) -> bool:
    """Whether a wait with a deadline has nothing else."""
    others = wait.on is not None or wait.conversations or wait.others or wait.signals
    return not others and wait.policy == "all_settled"


def _rare(name: str) -> Any:
    """A field of `Node` that is kept in its `rare`."""
    get = operator.attrgetter(f"rare.{name}")

    def put(node: Node, value: object) -> None:
        if get(node) != value:
            node.rare = node.rare.but(**{name: value})

    return property(get, put)


_fields = operator.attrgetter(*Rare.__slots__)
_kept: dict[tuple[Any, ...], Rare] = {_fields(_USUAL): _USUAL}
"""Those that were read from rows and may be of many tasks: without moments and reasons."""

_KEPT_MAX = 1_000


def _rare_of(row: TaskRow) -> Rare:
    values = _fields(row)
    kept = _kept.get(values)
    if kept is not None:
        return kept
    texts = (sys.intern(value) if isinstance(value, str) else value for value in values)
    rare = _USUAL.but(**dict(zip(Rare.__slots__, texts, strict=True)))
    rare.background = bool(row.background)
    if rare.deadline_us is rare.abort_us is rare.ended_us is None and len(_kept) < _KEPT_MAX:
        _kept[values] = rare
    return rare


class Node:
    """A task."""

    __slots__ = (
        "_wait",
        "below",
        "below_all",
        "clean_at",
        "conversation",
        "id",
        "invocations",
        "kind",
        "owner",
        "rare",
        "ready_us",
        "started_us",
        "status",
        "version",
    )

    background: _Field[bool] = _rare("background")
    on_restart: _Field[str | None] = _rare("on_restart")
    deadline_us: _Field[int | None] = _rare("deadline_us")
    ended_us: _Field[int | None] = _rare("ended_us")
    abort_us: _Field[int | None] = _rare("abort_us")
    abort_reason: _Field[str | None] = _rare("abort_reason")
    recoveries: _Field[int] = _rare("recoveries")
    tries: _Field[int] = _rare("tries")
    woken_by: _Field[str | None] = _rare("woken_by")
    blocked: _Field[str | None] = _rare("blocked")
    outcome_status: _Field[str | None] = _rare("outcome_status")

    def __init__(self, row: TaskRow) -> None:
        self.id = row.id
        self.conversation = row.conversation
        self.kind = sys.intern(row.kind)
        self.version = row.version
        self.owner = row.owner
        status = _STATUSES.get(row.status)
        self.status = Status(row.status) if status is None else status
        self.started_us = row.started_us
        self.invocations = row.invocations
        self.ready_us = row.ready_us
        self.rare = _rare_of(row)
        self.below = 0
        self.below_all = 0
        self.clean_at = -1
        self._wait: Wait | int | None = None

    def copy(self) -> Node:
        new = Node.__new__(Node)
        new.id = self.id
        new.conversation = self.conversation
        new.kind = self.kind
        new.version = self.version
        new.owner = self.owner
        new.status = self.status
        new.started_us = self.started_us
        new.invocations = self.invocations
        new.ready_us = self.ready_us
        new.rare = self.rare
        new.below = self.below
        new.below_all = self.below_all
        new.clean_at = self.clean_at
        new._wait = self._wait
        return new

    # --- what it is ----------------------------------------------------------------------

    @property
    def live(self) -> bool:
        return self.status is not TERMINAL

    @property
    def marked(self) -> bool:
        return self.rare.abort_us is not None

    @property
    def wait(self) -> Wait | None:
        """What it waits for."""
        kept = self._wait
        return Wait(deadline_us=moment_of(kept)) if isinstance(kept, int) else kept

    @wait.setter
    def wait(self, wait: Wait | None) -> None:
        kept: Wait | int | None = wait
        if wait is not None and wait.on is None:
            if wait == _FOR_SIGNALS:
                kept = _FOR_SIGNALS
            elif wait.deadline_us is not None and _only_sleeps(wait):
                kept = entry_of(wait.deadline_us, self.id)
        self._wait = kept

    @property
    def has_wait(self) -> bool:
        """Whether there is something that it waits for. Cheaper than `wait`."""
        return self._wait is not None

    @property
    def timer_entry(self) -> int | None:
        """The entry among the timers of a task that only sleeps; None for every other."""
        kept = self._wait
        return kept if isinstance(kept, int) else None

    @property
    def waits_until_us(self) -> int | None:
        """The deadline of its wait."""
        kept = self._wait
        if isinstance(kept, int):
            return moment_of(kept)
        return None if kept is None else kept.deadline_us

    @property
    def not_before_us(self) -> int:
        """When a task that retries may run again; 0 for every other.

        Of all the others `ready_us` only says since when they are ready, which a clock that was
        set back must not turn into a wait.
        """
        return self.ready_us if self.rare.tries else 0

    @property
    def intent(self) -> bool:
        """Whether everything below is to be aborted: a mark, or a held outcome but completed."""
        if self.status is TERMINAL:
            return False
        return self.rare.abort_us is not None or (
            self.status is COMPLETING and self.rare.outcome_status != "completed"
        )

    @property
    def above(self) -> int | None:
        return self.owner if self.owner is not None else self.conversation

    @property
    def let_go(self) -> bool:
        """Whether it was resumed where nothing ran yet, so that the next opening does not interrupt
        it again: who resumes from the command line has another process do the work."""
        return self.rare.abort_us is None and self.rare.abort_reason == _LET_GO

    @let_go.setter
    def let_go(self, value: bool) -> None:
        if self.rare.abort_us is None:
            self.abort_reason = _LET_GO if value else None

    @property
    def counts(self) -> bool:
        """Whether what is below is counted here: not at an ordinary task that ended."""
        return self.status is not TERMINAL or self.rare.background

    def contributes(self) -> bool:
        """Whether this holds its owner."""
        return self.status is not TERMINAL and not self.rare.background

    def contributes_all(self) -> bool:
        return self.status is not TERMINAL or (self.rare.background and self.below_all > 0)

    def hold(self, outcome_status: str) -> None:
        """Note an outcome that is decided. Nothing blocks the task any more."""
        self.rare = self.rare.but(outcome_status=outcome_status, blocked=None)

    def end(self, outcome_status: str, ended_us: int) -> None:
        """Note how and when it has ended. Nothing blocks it, or is charged to it, any more."""
        self.rare = self.rare.but(
            outcome_status=outcome_status, ended_us=ended_us, recoveries=0, blocked=None
        )

    def state_row(self) -> TaskStateRow:
        rare = self.rare
        return TaskStateRow(
            self.version,
            int(self.status),
            self.started_us,
            rare.ended_us,
            rare.abort_us,
            rare.abort_reason,
            self.invocations,
            rare.recoveries,
            rare.tries,
            self.ready_us,
            rare.woken_by,
            rare.blocked,
            rare.outcome_status,
            self.id,
        )


class Scope:
    """A conversation that has live work below it."""

    __slots__ = ("below", "below_all", "clean_at", "id", "owner")

    counts = True
    background = False
    live = False
    intent = False

    def __init__(self, id: int, owner: int | None) -> None:
        self.id = id
        self.owner = owner
        self.below = 0
        self.below_all = 0
        self.clean_at = -1

    def copy(self) -> Scope:
        new = Scope(self.id, self.owner)
        new.clean_at = self.clean_at
        new.below = self.below
        new.below_all = self.below_all
        return new

    @property
    def above(self) -> int | None:
        return self.owner

    def contributes(self) -> bool:
        return self.below > 0

    def contributes_all(self) -> bool:
        return self.below_all > 0


AnyNode = Node | Scope
