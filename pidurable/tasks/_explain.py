"""Why a task does not move: one line, one stable code, and the way down to what holds it.

A task is looked at alone first (`Look`): does it run, is its turn to come, is it blocked, does it
wait, is it held. What it waits for, or is held by, is then looked at in turn, until a task is
reached that waits for no other. Owner edges and waits form no cycle, and the way is bounded all the
same, so that a damaged store cannot keep anybody busy.

Everything is read from rows by id; nothing here walks the live tasks. What only the holder knows
(its invocations, its queues, its slots) and what only an outsider asks (who holds the session)
comes from `Facts`, of which there is one for each side.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, final

import attrs

from pidurable.errors import NotJsonError, UnknownTaskError, show
from pidurable.records import _codec, _json
from pidurable.records._checks import is_id
from pidurable.records._moments import duration, moment
from pidurable.records._tasks import ErrorInfo, OutcomeRecord, OutcomeStatus, Status, Wait
from pidurable.session._stubs import unknown_task
from pidurable.storage import Storage, TaskRow

if TYPE_CHECKING:
    from pidurable.tasks._tree import Node

__all__ = [
    "LOOKS_MAX",
    "Awaited",
    "Below",
    "Explanation",
    "Facts",
    "Look",
    "brief",
    "explain",
    "find_barrier",
    "look_at",
    "look_up",
    "plain",
    "wait_of",
]

STEPS_MAX = 1_000
"""Tasks that are looked at on the way down; what is deeper is not."""
LOOKS_MAX = 100
"""Tasks that one task waits for, or is held by, of which the most telling is followed."""
AWAITED_MAX = 1_000
"""Awaited ids of one wait that are looked up in the store."""
_SHOWN_FIRST = 3


@final
@attrs.frozen(kw_only=True)
class Explanation:
    """Why a task is where it is, what moves it next, and what it has done. `str()` is one line."""

    task_id: int
    kind: str
    status: Status
    code: str
    """Stable, for programs: a blocked reason, or why the task does not move; `pidurable explain
    CODE` says what it means."""
    text: str
    """The same for people, with the tasks it waits for down to the one that decides."""
    remedy: str | None = None
    """What somebody has to do; None where time and other tasks are enough."""
    path: tuple[int, ...] = ()
    """The tasks it waits for or is held by, the next one first, down to the one that waits for no
    other."""
    place: int | None = None
    """How many of its kind go first; None for a task that is not ready, and where it is unknown."""
    next_wake_us: int | None = None
    """When the clock will move it: the end of a wait or of a retry's delay, or its deadline."""
    phase: str | None = None
    progress_us: int | None = None
    """When its checkpoint was last stored."""
    outcome: OutcomeStatus | None = None
    """Of an ended task, or the one that a completing task holds."""
    invocations: int
    recoveries: int
    tries: int
    unread_signals: int = 0
    at_us: int
    """When this was true."""

    def __str__(self) -> str:
        parts = [f"task {self.task_id} ({plain(self.kind)}) {self.code}: {self.text}"]
        if self.remedy is not None:
            parts.append(self.remedy)
        if self.phase is not None:
            since = ""
            if self.progress_us is not None:
                since = f", last progress {self._ago(self.progress_us)}"
            parts.append(f"phase {plain(self.phase)}{since}")
        if self.next_wake_us is not None:
            parts.append(f"next wake-up {moment(self.next_wake_us)}")
        counters = [_count(self.invocations, "invocation")]
        if self.recoveries:
            counters.append(_count(self.recoveries, "recovery", "recoveries"))
        if self.tries:
            counters.append(_count(self.tries, "try", "tries"))
        if self.unread_signals:
            counters.append(_count(self.unread_signals, "unread signal"))
        parts.append(", ".join(counters))
        return "; ".join(parts)

    def _ago(self, at_us: int) -> str:
        return f"{duration((self.at_us - at_us) / 1e6)} ago"


@attrs.frozen(kw_only=True)
class Look:
    """One task by itself."""

    code: str
    text: str
    """What it does, said after "which" as well as after its name."""
    remedy: str | None = None
    needs: tuple[int, ...] = ()
    """Live tasks that have to end or move first; the way goes on with one of them."""
    place: int | None = None
    until_us: int | None = None


@attrs.frozen
class Below:
    """Live ordinary tasks below a task or conversation, ended ones between being transparent."""

    tasks: tuple[int, ...]
    more: bool
    """Whether there may be others."""

    @property
    def words(self) -> str:
        """How many, for a person."""
        if self.more and not self.tasks:
            return "work below that was not among the live tasks looked at"
        more = "more than " if self.more else ""
        return f"{more}{_count(len(self.tasks), 'live task')} below"


@attrs.frozen
class Awaited:
    """What of a wait is still open."""

    open: int
    more: bool
    """Whether only a part was counted."""
    tasks: tuple[int, ...]
    """Live tasks that decide it."""


class Facts(Protocol):
    """What one side knows: the holder of the session, or somebody who only reads its store."""

    @property
    def storage(self) -> Storage: ...

    @property
    def now_us(self) -> int: ...

    def standstill(self) -> Look | None:
        """What keeps every task of the session from moving, if anything does."""
        ...

    def running(self, row: TaskRow) -> Look:
        """What a task does whose row says running."""
        ...

    def turn(self, row: TaskRow) -> Look:
        """When a pending task runs that nothing of its own holds back."""
        ...

    def below(self, id: int) -> Below:
        """What is live below a task or a conversation."""
        ...

    def awaited(self, row: TaskRow, on: Sequence[int]) -> Awaited:
        """What is open of the ids that a waiting task waits for."""
        ...

    def asks(self, id: int) -> tuple[str, str] | None:
        """Of something that a person decides, and that is open: what it is, and how to decide."""
        ...

    def barrier(self, row: TaskRow) -> Look | None:
        """The owner above that keeps everything below it from running, if there is one."""
        ...

    def blocked_hint(self, row: TaskRow) -> str | None:
        """What the installed definitions say of a blocked task."""
        ...

    def unread(self, id: int) -> int:
        """How many signals a task has not read."""
        ...


# --- the line ---------------------------------------------------------------------------------


def explain(facts: Facts, task_id: int) -> Explanation:
    """Explain one task.

    Raises:
        UnknownTaskError: This session has no such task.
    """
    row = facts.storage.task(task_id) if is_id(task_id) else None
    if row is None:
        if is_id(task_id):
            raise unknown_task(facts.storage, task_id)
        raise UnknownTaskError(show(task_id))
    look = look_at(facts, row)
    path, end = _follow(facts, row, look)
    text = look.text if end is None else f"{look.text}: {_way(facts, path)}, which {end.text}"
    checkpoint = facts.storage.checkpoint_at(row.id)
    live = row.status != Status.TERMINAL
    marked = row.abort_us is not None
    wakes = [at for at in (look.until_us, None if marked else row.deadline_us) if at is not None]
    return Explanation(
        task_id=row.id,
        kind=row.kind,
        status=Status(row.status),
        code=look.code,
        text=text,
        remedy=look.remedy if end is None or look.remedy is not None else end.remedy,
        path=path,
        place=look.place,
        next_wake_us=min(wakes) if wakes and live else None,
        phase=None if checkpoint is None else checkpoint[0],
        progress_us=None if checkpoint is None else checkpoint[1],
        outcome=row.outcome_status,  # type: ignore[arg-type]
        invocations=row.invocations,
        recoveries=row.recoveries,
        tries=row.tries,
        unread_signals=facts.unread(row.id) if live else 0,
        at_us=facts.now_us,
    )


def _follow(facts: Facts, row: TaskRow, look: Look) -> tuple[tuple[int, ...], Look | None]:
    """The way down to the task that decides, and the look at it; None where no other is needed.

    One that runs is looked for first, then one that is blocked, since only those two say more than
    that something waits in turn.
    """
    came_from: dict[int, int | None] = {row.id: None}
    waiting: list[tuple[int, int, int, TaskRow]] = []
    best: tuple[int, int] | None = None
    end: Look | None = None

    def add(look: Look, owner: int, depth: int) -> None:
        for id in look.needs[:LOOKS_MAX]:
            found = None if id in came_from else facts.storage.task(id)
            if found is not None and found.status != Status.TERMINAL:
                came_from[id] = owner
                rank = 0 if found.status == Status.RUNNING else 1 if found.blocked else 2
                heapq.heappush(waiting, (rank, -depth, len(came_from), found))

    add(look, row.id, 1)
    for _ in range(STEPS_MAX):
        if not waiting:
            break
        _, depth, _, at = heapq.heappop(waiting)
        found = look_at(facts, at)
        rank = _END_RANKS.get(found.code, 1 if at.blocked else 3)
        # A task with needs is an end only where the way was cut off.
        rank += 10 if found.needs else 0
        if best is None or rank < best[0] or (rank == best[0] and found.needs):
            best, end = (rank, at.id), found
        if rank == 0:
            break
        add(found, at.id, 1 - depth)
    path: list[int] = []
    id = None if best is None else best[1]
    while id is not None and id != row.id:
        path.append(id)
        id = came_from[id]
    return tuple(reversed(path)), end


_END_RANKS = {"running": 0, "ready": 2, "limit_reached": 2, "storage_refusing": 2, "not_started": 2}


def _way(facts: Facts, path: Sequence[int]) -> str:
    """The tasks of a way, its middle left out where it is long."""
    names = [brief(facts.storage, id) for id in path[:_SHOWN_FIRST]]
    left_out = len(path) - _SHOWN_FIRST - 1
    if left_out > 0:
        names.append(f"{left_out} more")
    names += [brief(facts.storage, id) for id in path[max(_SHOWN_FIRST, len(path) - 1) :]]
    return " -> ".join(names)


# --- one task ---------------------------------------------------------------------------------


def look_at(facts: Facts, row: TaskRow) -> Look:
    """Tell what one task does, or what it needs."""
    status = Status(row.status)
    if status is Status.TERMINAL:
        return _ended(facts, row)
    if row.blocked is not None:
        above = facts.barrier(row) if row.blocked == "interrupted" else None
        return above if above is not None and above.code == row.blocked else _blocked(facts, row)
    if status is Status.COMPLETING:
        below = facts.below(row.id)
        if not below.tasks and not below.more:
            text = f"ends {row.outcome_status}, with nothing left below"
            look = facts.standstill()
            if look is not None:
                return attrs.evolve(look, text=f"{text}, but {look.text}")
            return Look(code="completing", text=f"{text}, in a moment")
        text = f"holds its outcome, {row.outcome_status}, for {below.words}"
        return Look(code="completing", text=text, needs=below.tasks)
    if status is Status.RUNNING:
        return facts.running(row)
    if row.abort_us is not None:
        return _aborting(facts, row)
    barrier = facts.barrier(row)
    if barrier is not None:
        return barrier
    if status is Status.WAITING:
        return _waiting(facts, row)
    if row.tries and row.ready_us > facts.now_us:
        text = f"raised, and runs its phase again in {_left(facts, row.ready_us)}"
        return Look(code="retrying", text=text, until_us=row.ready_us)
    return facts.turn(row)


def _ended(facts: Facts, row: TaskRow) -> Look:
    text = row.outcome_status or "without an outcome"
    if row.ended_us is not None:
        text += f" {duration((facts.now_us - row.ended_us) / 1e6)} ago"
    outcome = _outcome_of(facts.storage, row.id)
    if outcome is not None and outcome.error is not None:
        text += f" ({_error_words(outcome.error)})"
    elif outcome is not None and outcome.reason:
        text += f" (reason {plain(outcome.reason)})"
    return Look(code="ended", text=text)


def _outcome_of(storage: Storage, task_id: int) -> OutcomeRecord | None:
    """The outcome of a task, or the fault that is parked beside it; None if it cannot be read."""
    stored = storage.task_outcome(task_id)
    with contextlib.suppress(NotJsonError):
        # Reading the outcome itself says what is damaged; how the task ended is in its row.
        return None if stored is None else _codec.decode_outcome(_json.loads_stored(stored))
    return None


def _error_words(error: ErrorInfo) -> str:
    return f"{plain(error.type)}: {plain(error.message)}"


_REMEDIES = {
    "missing_definition": "install an extension that defines {kind}, or abort it",
    "definition_too_old": "install version {version} of {kind} or a newer one, or abort it",
    "migration_failed": "mend `migrate` of {kind}, or abort it; new code is tried by itself",
    "checkpoint_unreadable": "give {kind} a version that reads it, or abort it; new code is tried "
    "by itself",
    "crash_loop": "find what kills the process, then retry it (`pidurable task retry {id}`) or "
    "abort it",
    "faulted": "mend the cause, then retry it (`pidurable task retry {id}`) or abort it",
    "interrupted": "resume it (`pidurable task resume {id}`) or abort it",
    "unknown_record": "restore what was damaged, or upgrade, or abort it",
}


def _blocked(facts: Facts, row: TaskRow) -> Look:
    reason = row.blocked or ""
    hint = facts.blocked_hint(row)
    text = f"is blocked ({plain(reason)})"
    if row.abort_us is not None:
        text += f" while being aborted ({plain(row.abort_reason or 'user')})"
    if hint is not None:
        text += f", {hint}"
    if reason == "faulted":
        parked = _outcome_of(facts.storage, row.id)
        if parked is not None and parked.error is not None:
            text += f": {_error_words(parked.error)}"
    remedy = _REMEDIES.get(reason, "abort it").format(
        kind=plain(row.kind), version=row.version, id=row.id
    )
    return Look(code=reason, text=text, remedy=remedy)


def _aborting(facts: Facts, row: TaskRow) -> Look:
    why = f"is to be aborted ({plain(row.abort_reason or 'user')})"
    below = facts.below(row.id)
    if below.tasks or below.more:
        return Look(code="aborting", text=f"{why} after {below.words}", needs=below.tasks)
    look = facts.standstill()
    if look is not None:
        return attrs.evolve(look, text=f"{why}, but {look.text}")
    if row.tries and row.ready_us > facts.now_us:
        text = f"{why}; its handler raised and runs again in {_left(facts, row.ready_us)}"
        return Look(code="retrying", text=text, until_us=row.ready_us)
    return Look(code="aborting", text=f"{why}; its handler is next")


def _waiting(facts: Facts, row: TaskRow) -> Look:
    wait = wait_of(facts.storage, row.id)
    if wait is None:
        return Look(code="waiting", text="waits for something that the store does not name")
    parts: list[str] = []
    needs: tuple[int, ...] = ()
    # Past the deadline nobody can answer any more.
    over = wait.deadline_us is not None and wait.deadline_us <= facts.now_us
    for id in () if over else wait.others[:LOOKS_MAX]:
        asked = facts.asks(id)
        if asked is not None:
            text, remedy = asked
            if wait.deadline_us is not None:
                text += f", until {moment(wait.deadline_us)}"
            until = wait.deadline_us
            return Look(code="waiting", text=f"waits for {text}", remedy=remedy, until_us=until)
    if wait.on is not None:
        awaited = facts.awaited(row, wait.on)
        needs = awaited.tasks
        due = not awaited.open and not awaited.more
        more = " or more" if awaited.more else ""
        parts.append(f"for {awaited.open:,}{more} of {len(wait.on):,} ({wait.policy})")
    else:
        due = False
    if wait.signals:
        due = due or facts.unread(row.id) > 0
        parts.append("for a signal")
    if wait.deadline_us is not None:
        due = due or wait.deadline_us <= facts.now_us
        parts.append(f"until {moment(wait.deadline_us)}")
    if due:
        look = facts.standstill()
        text = "waited, and what it waited for is there"
        if look is not None:
            return attrs.evolve(look, text=f"{text}, but {look.text}")
        turn = facts.turn(row)
        if turn.code == "not_started":
            return attrs.evolve(turn, text=f"{text}; it {turn.text}")
        return Look(code="waiting", text=f"{text}; it wakes in a moment")
    text = f"waits {' or '.join(parts)}" if parts else "waits for nothing that could come"
    # Of several conditions the tasks are the ones that can be looked into: they come last.
    if needs and len(parts) > 1:
        text = f"waits {' or '.join([*parts[1:], parts[0]])}"
    return Look(code="waiting", text=text, needs=needs, until_us=wait.deadline_us)


def look_up(facts: Facts, on: Sequence[int]) -> Awaited:
    """Count what is open of awaited ids, one by one, in the store."""
    found = 0
    tasks: list[int] = []
    for id in on[:AWAITED_MAX]:
        row = facts.storage.task(id)
        if row is not None:
            if row.status != Status.TERMINAL:
                found += 1
                tasks.append(id)
            continue
        # It is no task: an answer that is awaited, or a conversation that is to be idle.
        submission = facts.storage.submission(id)
        if submission is None:
            below = facts.below(id)
            found += bool(below.tasks)
        elif submission.status in ("queued", "placed"):
            below = facts.below(submission.conversation)
            found += 1
        else:
            continue
        tasks += below.tasks
    return Awaited(found, len(on) > AWAITED_MAX, tuple(tasks))


def find_barrier(row: TaskRow, owners: Iterable[TaskRow | Node]) -> Look | None:
    """What keeps a task from running because of an owner above it.

    Args:
        row: The task.
        owners: The tasks above it within its ordinary tree, the nearest first.
    """
    interrupted = None
    # The nearest value counts: below `go` and `abort` nothing is held by what a restart did above.
    shielded = row.on_restart in _SHIELDS
    for owner in owners:
        if owner.status == Status.TERMINAL:
            continue
        name = f"is below task {owner.id} ({plain(owner.kind)}), which"
        if owner.abort_us is not None:
            reason = plain(owner.abort_reason or "user")
            text = f"{name} is to be aborted ({reason}), and is aborted first"
            return Look(code="owner_cancelling", text=text)
        if owner.status == Status.COMPLETING and owner.outcome_status != "completed":
            text = f"{name} ends {owner.outcome_status}, and is aborted first"
            return Look(code="owner_cancelling", text=text)
        if owner.blocked == "interrupted" and not shielded:
            # The topmost one is the one that can be resumed.
            interrupted = Look(
                code="interrupted",
                text=f"{name} was interrupted by a restart",
                remedy=f"resume that one (`pidurable task resume {owner.id}`)",
            )
        shielded = shielded or owner.on_restart in _SHIELDS
    return interrupted


_SHIELDS = ("go", "abort")


# --- words ------------------------------------------------------------------------------------


def wait_of(storage: Storage, task_id: int) -> Wait | None:
    """What a waiting task waits for, as it is stored; None where that is missing or damaged."""
    text = storage.task_wait(task_id)
    try:
        return None if text is None else _codec.decode_wait(_json.loads_stored(text))
    except NotJsonError:
        # Damage is for whoever opens the store to report; looking goes on without it.
        return None


def brief(storage: Storage, task_id: int) -> str:
    """A task as one of many: its id and kind."""
    row = storage.task(task_id)
    return str(task_id) if row is None else f"{task_id} {plain(row.kind)}"


def plain(text: str, *, length: int = 200) -> str:
    """A stored text on one line: as it is, or as a repr where it could do something to a line."""
    if text.isprintable() and len(text) <= length:
        return text
    return show(text, length=length)


def _left(facts: Facts, at_us: int) -> str:
    return duration((at_us - facts.now_us) / 1e6)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
