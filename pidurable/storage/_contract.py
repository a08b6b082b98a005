"""The storage contract: what a backend keeps for one session, and what it promises.

A backend is synchronous and knows nothing of trio. The session calls `apply` from one place at a
time (a writer thread, or inline), and reads from other threads meanwhile. It promises:

* `apply` stores all writes of a batch, in order, or none. When it returns, the batch survives the
  death of the process, and with `flush=True` also a loss of power.
* A read sees the batches whose `apply` made them durable, each whole, and never part of one.
* `apply` compares the batch's epoch with the stored one in the same transaction; a holder that was
  replaced gets `HolderLostError` and stores nothing.
* It raises `StorageRefusedError` where it is certain that nothing was stored (then the same batch
  may be sent again), any other exception where it is not.
* Scans are backed by an index: no row is visited that is not returned.

JSON travels as text that the session has already encoded and checked; a large one lies in a blob,
and `@` with its SHA-256 stands in its place. Everything is copied on the way in and out.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import attrs


class Op(enum.IntEnum):
    """The kinds of row writes. The comment gives the parameters, in order."""

    CONVERSATION = 1  # ConversationRow
    ENTRY = 2  # EntryRow
    TASK = 3  # TaskRow: insert
    TASK_INPUT = 4  # (task, value json): insert, or replace by a migration
    TASK_STATE = 5  # TaskStateRow: replace the changing columns of an existing task
    CHECKPOINT = 6  # (task, phase tag, value json, at_us): insert or replace
    CHECKPOINT_DELETE = 7  # (task,)
    WAIT = 8  # (task, wait json): insert or replace
    WAIT_DELETE = 9  # (task,)
    OUTCOME = 10  # (task, outcome json): insert once; also the error of a fault that is parked
    MEMO = 11  # (task, name, value json): insert once
    MEMOS_DELETE = 12  # (task,)
    SIGNAL = 13  # SignalRow
    SIGNAL_DELETE = 14  # (signal id,)
    SIGNALS_DELETE = 15  # (task,): all signals of a task that ended
    SUBMISSION = 16  # SubmissionRow: insert
    SUBMISSION_STATE = 17  # SubmissionStateRow: replace the changing columns
    DOCUMENT = 18  # DocumentRow: insert
    DOCUMENT_RETIRE = 19  # (document, seq): it ends with this commit
    REVISION = 20  # RevisionRow: insert
    REVISIONS_DELETE = 21  # (document, seq): delete revisions of the document before this seq
    BLOB = 22  # (sha256 hex, bytes): insert or ignore
    SIGNAL_READ = 23  # (signal id,): no longer unread, but its key stays taken; payload dropped
    OUTCOME_DELETE = 24  # (task,): a task whose fault was parked is let go
    DOCUMENT_TERMS = 25  # (document, history, fork): what its class says now
    COMMAND = 26  # CommandRow: insert once
    # Retention. What is deleted exists, and nothing that stays refers to it after the batch.
    STUB = 27  # StubRow: insert once
    REMOVAL = 28  # RemovalRow: insert once
    REMOVAL_DELETE = 29  # (root,)
    TASK_DELETE = 30  # (task,): the row alone; what hangs on it has deletes of its own
    INPUT_DELETE = 31  # (task,): its input, if there is one
    CONVERSATION_DELETE = 32  # (conversation,): no fork of it and no submission to it is left
    ENTRY_DELETE = 33  # (entry,)
    SUBMISSION_DELETE = 34  # (submission,)
    DOCUMENT_DELETE = 35  # (document,): the row alone; its revisions have a delete of their own
    BLOB_DELETE = 36  # (sha256 hex,): if there is one
    COMMAND_DELETE = 37  # (command id,): if there is one


class ConversationRow(NamedTuple):
    id: int
    uuid: str
    parent: int | None
    parent_entry: int | None
    owner: int | None
    key: str | None
    principal: str
    created_us: int


class EntryRow(NamedTuple):
    id: int
    conversation: int
    seq: int
    kind: str
    by_task: int | None
    head: int | None
    edits: str | None
    messages: str | None
    data: str | None
    at_us: int


class TaskRow(NamedTuple):
    id: int
    conversation: int
    kind: str
    version: int
    owner: int | None
    key: str | None
    background: int
    on_restart: str | None
    deadline_us: int | None
    created_us: int
    # The changing columns, as in TaskStateRow.
    status: int
    started_us: int | None
    ended_us: int | None
    abort_us: int | None
    abort_reason: str | None
    invocations: int
    recoveries: int
    tries: int
    ready_us: int
    woken_by: str | None
    blocked: str | None
    outcome_status: str | None


class TaskStateRow(NamedTuple):
    version: int
    status: int
    started_us: int | None
    ended_us: int | None
    abort_us: int | None
    abort_reason: str | None
    invocations: int
    recoveries: int
    tries: int
    ready_us: int
    woken_by: str | None
    blocked: str | None
    outcome_status: str | None
    id: int


class StartRow(NamedTuple):
    """What the code of a task begins with."""

    task: int
    input: str
    phase: str
    checkpoint: str
    memos: tuple[tuple[str, str], ...]
    """(name, value json), by name."""


class SignalRow(NamedTuple):
    id: int
    task: int
    name: str
    key: str | None
    payload: str
    at_us: int


class SubmissionRow(NamedTuple):
    id: int
    conversation: int
    kind: str
    when_busy: str
    request_id: str | None
    digest: str
    content: str
    created_us: int
    # The changing columns, as in SubmissionStateRow.
    status: str
    entry: int | None
    run: int | None
    answer: int | None
    reason: str | None
    detail: str | None
    ended_us: int | None


class SubmissionStateRow(NamedTuple):
    status: str
    entry: int | None
    run: int | None
    answer: int | None
    reason: str | None
    detail: str | None
    ended_us: int | None
    id: int


class DocumentRow(NamedTuple):
    id: int
    name: str
    scope: int  # 0 session, 1 conversation, 2 task
    scope_id: int  # 0 for the session
    key: str  # "" where the document is not of a family
    history: str  # "latest" | "rewindable"
    fork: str  # "initial" | "current" | "as_of"
    created_seq: int
    retired_seq: int | None
    """The commit that ended it; None while it lives."""


class RevisionRow(NamedTuple):
    document: int
    seq: int
    base: int  # 1: value is the whole document; 0: value is a list of patch operations
    version: int
    value: str


class CommandRow(NamedTuple):
    """The answer to a command from outside: stored in the commit that applied it."""

    id: str
    kind: str
    digest: str
    """Of what was asked for, so that the same id with other content is noticed."""
    answer: str
    """JSON: what it gave, or the error."""
    seq: int
    at_us: int


class StubRow(NamedTuple):
    """What is left of a removed record, so that a late retry under its key is recognised."""

    kind: str  # "task" | "submission" | "conversation"
    place: int  # the conversation in which the key counts
    key: str  # its key, or request id
    id: int  # the id that it had
    digest: str  # of a submission's content; "" for others
    status: str  # how it ended
    at_us: int  # when it was removed


class RemovalRow(NamedTuple):
    """A tree that is being removed: begun, and to be finished also after a crash."""

    root: int
    at_us: int


class RecordKind(enum.StrEnum):
    """The kinds of records that a session consists of, in the order in which they refer back."""

    CONVERSATION = "conversation"
    ENTRY = "entry"
    TASK = "task"
    INPUT = "input"
    CHECKPOINT = "checkpoint"
    WAIT = "wait"
    OUTCOME = "outcome"
    MEMO = "memo"
    SIGNAL = "signal"
    SUBMISSION = "submission"
    DOCUMENT = "document"
    REVISION = "revision"
    BLOB = "blob"
    COMMAND = "command"
    STUB = "stub"
    REMOVAL = "removal"


class RecordShape(NamedTuple):
    """The columns of a kind of record, and those of them that are its key, in order."""

    columns: tuple[str, ...]
    key: tuple[str, ...]


RECORDS: dict[RecordKind, RecordShape] = {
    RecordKind.CONVERSATION: RecordShape(ConversationRow._fields, ("id",)),
    RecordKind.ENTRY: RecordShape(EntryRow._fields, ("id",)),
    RecordKind.TASK: RecordShape(TaskRow._fields, ("id",)),
    RecordKind.INPUT: RecordShape(("task", "value"), ("task",)),
    RecordKind.CHECKPOINT: RecordShape(("task", "phase", "value", "at_us"), ("task",)),
    RecordKind.WAIT: RecordShape(("task", "value"), ("task",)),
    RecordKind.OUTCOME: RecordShape(("task", "value"), ("task",)),
    RecordKind.MEMO: RecordShape(("task", "name", "value"), ("task", "name")),
    # The last column is 1 for one that was read: its payload is gone, its key is still taken.
    RecordKind.SIGNAL: RecordShape((*SignalRow._fields, "read"), ("id",)),
    RecordKind.SUBMISSION: RecordShape(SubmissionRow._fields, ("id",)),
    RecordKind.DOCUMENT: RecordShape(DocumentRow._fields, ("id",)),
    RecordKind.REVISION: RecordShape(RevisionRow._fields, ("document", "seq")),
    RecordKind.BLOB: RecordShape(("sha256", "bytes"), ("sha256",)),
    RecordKind.COMMAND: RecordShape(CommandRow._fields, ("id",)),
    RecordKind.STUB: RecordShape(StubRow._fields, ("kind", "place", "key")),
    RecordKind.REMOVAL: RecordShape(RemovalRow._fields, ("root",)),
}
"""Everything that a session consists of but its head: what `scan` gives, and an export holds."""


class Head(NamedTuple):
    """The one row that every batch updates, and what identifies the store."""

    uuid: str
    created_us: int
    epoch: int
    seq: int
    next_id: int
    clean: bool
    """Whether the last holder closed with a flushed mark."""


class Batch(NamedTuple):
    """One atomic write: the rows of one or more commits, in order."""

    epoch: int
    seq: int
    """Of the last commit in the batch."""
    next_id: int
    flush: bool
    writes: Sequence[tuple[Op, tuple[Any, ...]]]
    clean: bool = False
    """The closing batch: marks the store as cleanly closed."""
    short: bool = False
    """Whether it is known to hold no long text, so that nobody need look for one; else it may."""


@attrs.frozen(kw_only=True)
class HolderClaim:
    """Who wants to hold the session. `holder_id` is drawn at random at each start."""

    holder_id: str
    host: str
    pid: int
    at_us: int
    lease_seconds: float


@attrs.frozen(kw_only=True)
class HolderRecord:
    """Who holds the session: one row, replaced as a whole, never edited."""

    epoch: int
    holder_id: str
    host: str
    pid: int
    started_us: int
    heartbeat_us: int
    lock_file: str | None
    released: bool


CommandPlace = Literal["waiting", "taken", "set_aside"]
"""Where a command stands: no holder has it; one has, and may have applied it; it was no command."""


@attrs.frozen(kw_only=True)
class TakenCommand:
    """What a holder took from the commands that wait."""

    name: str
    """What the box calls it."""
    text: str | None
    """What was handed in; None where it cannot be one."""
    problem: str
    """Why there is no text."""


class CommandBox(Protocol):
    """Commands for a session from processes that do not hold it, until they have an answer.

    The box knows ids and texts and nothing of what they mean. Handing in, asking and withdrawing
    need no ownership and wait for nobody, and no caller can be made to wait by one that was
    stopped in the middle of a call.
    """

    def hand_in(self, id: str, text: str) -> None:
        """Leave a command for the holder. When this returns, it survives a loss of power.

        The same id may be handed in more than once: the holder sees to it that it counts once.

        Raises:
            StorageRefusedError: Certainly not handed in: too large, too many wait, a full disk.
            StorageAccessError: There is no place for commands that could be trusted.
        """
        ...

    def withdraw(self, id: str) -> bool:
        """Take back what no holder has taken; durable when it returns.

        Returns:
            Whether there was any. It says nothing of others with this id that a holder has taken.
        """
        ...

    def find(self, id: str) -> CommandPlace | None:
        """Tell where a command stands; None where it has its answer, or never came.

        Of several with this id, the one that is farthest counts.
        """
        ...

    def has_news(self) -> bool:
        """Tell at little cost whether `take` may find something that came since the last time."""
        ...

    def take(self, *, limit: int = 1_000) -> list[TakenCommand]:
        """Take what waits, in order of arrival; it can be withdrawn no more.

        Gives also what an earlier holder took and never forgot, and nothing twice to one handle.
        """
        ...

    def forget(self, name: str) -> None:
        """Remove a taken command: its answer is stored, durably. Gone already is as good."""
        ...

    def set_aside(self, name: str) -> str:
        """Put away what is no command, for a person to look at; returns what it is called now."""
        ...


@runtime_checkable
class Storage(Protocol):
    """One session's records. See the module docstring for the promises."""

    @property
    def store(self) -> str:
        """What messages call this store: its path, or `:memory:`."""
        ...

    @property
    def command_box(self) -> CommandBox:
        """Commands from outside. May be used beside `apply`, and by a handle that only reads."""
        ...

    # --- holding -------------------------------------------------------------------------

    def acquire(self, claim: HolderClaim, *, takeover: bool) -> Head:
        """Become the holder: the epoch goes up by one. `StorageHeldError` if a live one exists.

        The returned head has the new epoch, and `clean` as the previous holder left it; the stored
        mark becomes unclean in the same transaction.
        """
        ...

    def heartbeat(self, epoch: int, at_us: int) -> None:
        """Store a sign of life. `HolderLostError` if the epoch is no longer ours."""
        ...

    def holder(self) -> HolderRecord | None:
        """Who holds the session, or held it last; None if nobody ever did."""
        ...

    def release(self, epoch: int) -> None:
        """Give the session up after the closing batch; removes the lock file."""
        ...

    def close(self) -> None:
        """Close all handles. Idempotent. Does not release: a crash closes too."""
        ...

    # --- writing -------------------------------------------------------------------------

    def apply(self, batch: Batch) -> None:
        """Store all writes of a batch, in order, with its sequence number and next id, or nothing.

        Raises:
            HolderLostError: The epoch of the batch is not the stored one. Nothing was stored.
            StorageRefusedError: Certainly nothing was stored; the same batch may be sent again.
            InternalError: A row contradicts the store: an id or key that is taken, a row that is to
                be changed or deleted and is not there. Nothing was stored.
        """
        ...

    def checkpoint(self, *, truncate: bool = False) -> int:
        """Move the write-ahead log into the store; returns its size in pages.

        May run beside `apply`.
        """
        ...

    def reclaim(self, pages: int) -> int:
        """Give at most so many free pages back to the file system; return how many are still free.

        A backend that keeps no pages, or cannot give any back, frees none. To be called by the
        holder, between batches; may wait for a batch, and makes the next one wait.

        Raises:
            HolderLostError: Another holder has the session by now. Nothing was changed.
        """
        ...

    # --- reading -------------------------------------------------------------------------

    def head(self) -> Head:
        """The head as the last batch left it."""
        ...

    def scan(
        self, kind: RecordKind, *, after: tuple[Any, ...] | None = None, limit: int = 1000
    ) -> list[tuple[Any, ...]]:
        """Records of one kind with a greater key than `after`, in the order of their keys.

        Each is a tuple of the columns in `RECORDS`, as stored. Numbers are ordered by value and
        texts by the bytes of their UTF-8. For whoever copies a session; pages are not one moment.
        """
        ...

    def command(self, id: str) -> CommandRow | None:
        """The answer to a command, or None if it was not applied."""
        ...

    def conversation(self, id: int) -> ConversationRow | None:
        """A conversation by its id, or None."""
        ...

    def conversation_by_key(self, owner: int | None, key: str) -> ConversationRow | None:
        """The conversation made under this key by its owner (None: among the ownerless ones)."""
        ...

    def conversations_by_owner(
        self, owner: int | None, *, after: int = 0, limit: int = 1000
    ) -> list[ConversationRow]:
        """Conversations of an owner (None: the ownerless ones) with id > after, by id."""
        ...

    def conversation_owners(self, tasks: Sequence[int]) -> list[int]:
        """Those of some tasks that own a conversation, by id."""
        ...

    def entry(self, id: int) -> EntryRow | None:
        """An entry by its id, or None."""
        ...

    def entries(
        self,
        conversation: int,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[EntryRow]:
        """Own entries of a conversation with after < id < before, ascending (or descending)."""
        ...

    def last_head(self, conversation: int, *, before: int | None = None) -> EntryRow | None:
        """The newest own entry with a head and id < before."""
        ...

    def task(self, id: int) -> TaskRow | None:
        """A task by its id, live or ended, or None."""
        ...

    def task_by_key(self, owner: int | None, conversation: int, key: str) -> TaskRow | None:
        """The task created under this key by its owner (None: by its conversation)."""
        ...

    def tasks_by_owner(self, owner: int, *, after: int = 0, limit: int = 1000) -> list[TaskRow]:
        """Tasks that a task owns, ended or not, by id."""
        ...

    def keyed_tasks(self, owner: int) -> list[tuple[str, int]]:
        """(key, task) for every keyed task of an owner."""
        ...

    def live_tasks(self, *, after: int = 0, limit: int = 10_000) -> list[TaskRow]:
        """Tasks that are not terminal, by id."""
        ...

    def tasks(
        self,
        *,
        conversation: int | None = None,
        kind: str | None = None,
        status: int | None = None,
        after: int = 0,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[TaskRow]:
        """Tasks by id.

        `kind` or `status` alone, without a conversation, is for people, not for hot paths.
        """
        ...

    def task_input(self, task: int) -> str | None:
        """The input of a task as JSON; None where there is none."""
        ...

    def task_checkpoint(self, task: int) -> tuple[str, str] | None:
        """(phase tag, value json)"""
        ...

    def checkpoint_at(self, task: int) -> tuple[str, int] | None:
        """(phase tag, when it was stored in UTC microseconds); the value is not read."""
        ...

    def task_phases(self, tasks: Sequence[int]) -> list[tuple[int, str]]:
        """(task, phase tag) of many tasks, by task; the values are not read.

        One without a checkpoint is left out.
        """
        ...

    def task_wait(self, task: int) -> str | None:
        """What a task waits for, as JSON; None where it waits for nothing."""
        ...

    def waits(self, *, after: int = 0, limit: int = 10_000) -> list[tuple[int, str]]:
        """(task, wait json) of the waiting tasks, by task."""
        ...

    def task_outcome(self, task: int) -> str | None:
        """The stored outcome of a task as JSON, or None."""
        ...

    def task_memos(self, task: int) -> list[tuple[str, str]]:
        """(name, value json) of the memos of a task, by name."""
        ...

    def task_starts(self, tasks: Sequence[int]) -> list[StartRow]:
        """Input, checkpoint and memos of many tasks, by task.

        One without an input or a checkpoint is left out.
        """
        ...

    def signals(self, task: int, *, limit: int = 1000) -> list[SignalRow]:
        """Unread signals of a task, oldest first."""
        ...

    def live_signals(self) -> list[tuple[int, int]]:
        """(task, number of unread signals) for every task that has any."""
        ...

    def signal_by_key(self, task: int, key: str) -> int | None:
        """The id of the signal that a task was sent under a key, read or not, or None."""
        ...

    def submission(self, id: int) -> SubmissionRow | None:
        """A submission by its id, open or ended, or None."""
        ...

    def submission_by_request(self, conversation: int, request_id: str) -> SubmissionRow | None:
        """The submission to a conversation that has this request id, or None."""
        ...

    def open_submissions(self, conversation: int) -> list[SubmissionRow]:
        """Submissions that are queued or placed, by id."""
        ...

    def submissions_of(
        self, conversation: int, *, after: int = 0, limit: int = 1000
    ) -> list[SubmissionRow]:
        """Submissions to a conversation, ended or not, by id."""
        ...

    def document(self, name: str, scope: int, scope_id: int, key: str) -> DocumentRow | None:
        """The living document at this address."""
        ...

    def documents(self, scope: int, scope_id: int) -> list[DocumentRow]:
        """All living documents of a scope, by id."""
        ...

    def documents_ever(self, scope: int, scope_id: int) -> list[DocumentRow]:
        """All documents that a scope ever had, living or retired, by id."""
        ...

    def document_as_of(
        self, conversation: int, name: str, key: str, *, seq: int
    ) -> DocumentRow | None:
        """The document of a conversation that lived at this address after a commit.

        That is the newest one created by then, unless it was retired by then.
        """
        ...

    def documents_as_of(self, conversation: int, *, seq: int) -> list[DocumentRow]:
        """The rewindable documents of a conversation that lived after a commit, by name and key.

        Visits each address that ever had a rewindable document once.
        """
        ...

    def revisions(self, document: int, *, upto_seq: int | None = None) -> list[RevisionRow]:
        """The newest base at or before the seq and the deltas after it, in order."""
        ...

    def blob(self, sha256: str) -> bytes | None:
        """The bytes stored under a name, or None. Their digest is for the caller to check."""
        ...

    def has_blob(self, sha256: str) -> bool:
        """Whether there is one, without reading it."""
        ...

    def blob_sizes(self, *, after: str = "", limit: int = 1000) -> list[tuple[str, int]]:
        """(sha256, number of bytes) of blobs with a greater name, by name, without reading them."""
        ...

    # --- retention -----------------------------------------------------------------------

    def ended_roots(self, *, before_us: int, after: int, upto: int) -> list[TaskRow]:
        """Roots that ended before a moment, with after < id <= upto, by id.

        A root is a task that no task owns, in a conversation that no task owns. Visits every task
        with such an id, so a caller asks for a bounded range.
        """
        ...

    def forks_of(self, conversation: int, *, after: int = 0, limit: int = 1000) -> list[int]:
        """The conversations that were forked from one, by id."""
        ...

    def stub(self, kind: str, place: int, key: str) -> StubRow | None:
        """What is left of a removed record that had this key."""
        ...

    def stub_by_id(self, id: int) -> StubRow | None:
        """What is left of a removed record that had a key, by the id that it had."""
        ...

    def removals(self) -> list[RemovalRow]:
        """The trees that are being removed, by root."""
        ...


def has_lived(row: DocumentRow, seq: int) -> bool:
    """Whether a document stood at its address after a commit."""
    return row.created_seq <= seq and (row.retired_seq is None or row.retired_seq > seq)
