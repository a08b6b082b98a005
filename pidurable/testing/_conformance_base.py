"""What the conformance cases share: a case, the store under test, and rows with sensible defaults.

Plain comparisons that raise, no `assert`: the suite must bite under `python -O` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import attrs

from pidurable.errors import PidurableError
from pidurable.storage import (
    Batch,
    ConversationRow,
    DocumentRow,
    EntryRow,
    Head,
    HolderClaim,
    Op,
    RevisionRow,
    SignalRow,
    Storage,
    SubmissionRow,
    SubmissionStateRow,
    TaskRow,
    TaskStateRow,
)

Write = tuple[Op, tuple[Any, ...]]
NOW_US = 1_700_000_000_000_000
LEASE_SECONDS = 15.0


class StorageFactory(Protocol):
    """What an author of a backend gives to the suite."""

    def open(self) -> Storage:
        """Open a handle on a new, empty store that nobody holds."""
        ...

    def reopen(self, storage: Storage) -> Storage:
        """Open another handle on the same store. The given one may be open or closed."""
        ...


@attrs.frozen
class ConformanceCase:
    """One claim about a backend. `run` raises if it does not hold."""

    name: str
    run: Callable[[StorageFactory], None]

    @property
    def claim(self) -> str:
        """The claim, in a sentence."""
        return (self.run.__doc__ or "").strip()


CASES: list[ConformanceCase] = []


def conformance_case(
    function: Callable[[Store], None],
) -> Callable[[Store], None]:
    """Add a function to the suite. Its name is the name of the case, its docstring the claim."""

    def run(factory: StorageFactory) -> None:
        store = Store(factory)
        try:
            function(store)
        finally:
            store.close()

    run.__doc__ = function.__doc__
    CASES.append(ConformanceCase(function.__name__, run))
    return function


def claim(**changes: Any) -> HolderClaim:
    """Return a claim that differs from the usual one in what is given."""
    usual: dict[str, Any] = {
        "holder_id": "holder-1",
        "host": "host-1",
        "pid": 4711,
        "at_us": NOW_US,
        "lease_seconds": LEASE_SECONDS,
    }
    return HolderClaim(**{**usual, **changes})


class Store:
    """The store under test: one handle that holds it, and others besides."""

    def __init__(self, factory: StorageFactory) -> None:
        self.factory = factory
        self.storage = factory.open()
        self._others: list[Storage] = []
        self.head = Head("", 0, 0, 0, 1, True)
        self.seq = 0

    def hold(self) -> Storage:
        """Become the holder, with the usual claim."""
        self.head = self.storage.acquire(claim(), takeover=False)
        return self.storage

    def other(self) -> Storage:
        """Open another handle on the same store."""
        storage = self.factory.reopen(self.storage)
        self._others.append(storage)
        return storage

    def write(self, *writes: Write, flush: bool = True, **changes: Any) -> None:
        """Apply one batch under the held epoch; the sequence goes up by one."""
        seq = self.seq + 1
        usual: dict[str, Any] = {"epoch": self.head.epoch, "seq": seq, "next_id": seq * 1_000}
        self.storage.apply(Batch(**{**usual, "flush": flush, "writes": writes, **changes}))
        self.seq = seq

    def close(self) -> None:
        for storage in (*self._others, self.storage):
            # The case may have broken the handle; what it raised is what counts.
            with suppress(PidurableError):
                storage.close()


def equal(actual: object, expected: object, what: str = "") -> None:
    """Fail unless two values are equal."""
    if actual != expected:
        label = f"{what}: " if what else ""
        raise AssertionError(f"{label}got {actual!r:.2000}, expected {expected!r:.2000}")


def raises(error: type[BaseException], call: Callable[..., object], *arguments: object) -> Any:
    """Fail unless a call raises the error; return it."""
    try:
        call(*arguments)
    except error as raised:
        return raised
    raise AssertionError(f"nothing was raised, expected {error!r}")


def ids(rows: Sequence[Any]) -> list[int]:
    return [row.id for row in rows]


# --- rows ---------------------------------------------------------------------------------------


def conversation(id: int, **changes: Any) -> Write:
    row = ConversationRow(id, f"uuid-{id}", None, None, None, None, "somebody", NOW_US + id)
    return Op.CONVERSATION, row._replace(**changes)


def entry(id: int, conversation: int = 1, **changes: Any) -> Write:
    row = EntryRow(id, conversation, 1, "pi.user", None, None, None, None, None, NOW_US + id)
    return Op.ENTRY, row._replace(**changes)


def task_row(id: int, **changes: Any) -> TaskRow:
    row = TaskRow(
        id=id,
        conversation=1,
        kind="shop.payment",
        version=1,
        owner=None,
        key=None,
        background=0,
        on_restart=None,
        deadline_us=None,
        created_us=NOW_US + id,
        status=0,
        started_us=None,
        ended_us=None,
        abort_us=None,
        abort_reason=None,
        invocations=0,
        recoveries=0,
        tries=0,
        ready_us=0,
        woken_by=None,
        blocked=None,
        outcome_status=None,
    )
    return row._replace(**changes)


def task(id: int, **changes: Any) -> Write:
    return Op.TASK, task_row(id, **changes)


def task_state(id: int, **changes: Any) -> Write:
    row = TaskStateRow(1, 1, None, None, None, None, 0, 0, 0, 0, None, None, None, id)
    return Op.TASK_STATE, row._replace(**changes)


def signal(id: int, task: int = 1, **changes: Any) -> Write:
    return Op.SIGNAL, SignalRow(id, task, "go", None, "null", NOW_US + id)._replace(**changes)


def submission_row(id: int, conversation: int = 1, **changes: Any) -> SubmissionRow:
    row = SubmissionRow(
        id=id,
        conversation=conversation,
        kind="input",
        when_busy="follow_up",
        request_id=None,
        digest="d",
        content='"hello"',
        created_us=NOW_US,
        status="queued",
        entry=None,
        run=None,
        answer=None,
        reason=None,
        detail=None,
        ended_us=None,
    )
    return row._replace(**changes)


def submission(id: int, conversation: int = 1, **changes: Any) -> Write:
    return Op.SUBMISSION, submission_row(id, conversation, **changes)


def submission_state(id: int, status: str, **changes: Any) -> Write:
    row = SubmissionStateRow(status, None, None, None, None, None, None, id)
    return Op.SUBMISSION_STATE, row._replace(**changes)


def document(id: int, name: str = "app.todos", **changes: Any) -> Write:
    return Op.DOCUMENT, DocumentRow(id, name, 1, 1, "", "latest", "initial", 1, None)._replace(
        **changes
    )


def revision(document: int, seq: int, *, base: int = 0, value: str = "[]") -> Write:
    return Op.REVISION, RevisionRow(document, seq, base, 1, value)
