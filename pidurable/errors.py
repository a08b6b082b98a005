"""Every error of pidurable, in one tree, grouped by what the caller does next.

::

    PidurableError
    ├── fix the call
    │   ├── DefinitionError (TypeError)          a task definition is not well formed
    │   ├── ExtensionError (ValueError)          an extension or tool cannot be installed
    │   ├── NotJsonError (ValueError)            a value cannot be stored; the path says which
    │   ├── InvalidArgumentError (ValueError)    an argument of a call is outside its bounds
    │   ├── NotFoundError (LookupError)          a conversation, entry or document does not exist
    │   │   └── UnknownTaskError                 a task does not exist
    │   ├── UnknownDefinitionError (LookupError) a task kind is not installed
    │   ├── RequestIdConflictError (ValueError)  a request id was used for other content
    │   ├── PathTakenError (FileExistsError)     there is something where a new file was to be
    │   ├── WaitCycleError (ValueError)          a wait could never end
    │   ├── OwnerEndedError, TaskEndedError, InvocationEndedError
    │   ├── NestedCommitError, TransactionClosedError
    │   ├── NoResultError, OwnedTooDeepError
    │   ├── DocumentTooLargeError, MemoTooLargeError, TooManyMemosError
    │   └── MissingExtraError (ImportError)      an optional dependency is not installed
    ├── expected, decide
    │   ├── UnansweredError, OutcomeUnknownError, AbortRequestedError
    │   ├── ConversationBusyError, ConversationFullError, SignalRefusedError
    │   ├── AlreadyDecidedError                  a permission request is not open any more
    │   ├── NothingToContinueError               the last answer is complete
    │   ├── ResultUnreadableError, ModelError
    │   └── CommandFailedError                   a command from outside was refused
    ├── try again, or wait
    │   ├── WaitTimeoutError (trio.TooSlowError)
    │   ├── StorageRefusedError, StorageHeldError
    │   └── CommitBodyTimeoutError
    ├── reopen
    │   └── SessionPoisonedError, HolderLostError, SessionClosedError
    ├── call an operator
    │   ├── StorageCorruptError, StorageTooNewError, NotAStoreError, StorageAccessError
    │   ├── ExportFileError (ValueError)         an export is damaged, or cannot be written
    │   └── DocumentTooNewError, MigrationError
    └── report a bug
        └── InternalError

Facts are fields, so no program has to parse a message. Fields are positional, so that every error
can be pickled and copied.
"""

from __future__ import annotations

import reprlib
from typing import Any

import attrs
import trio

__all__ = [
    "AbortRequestedError",
    "AlreadyDecidedError",
    "CommandFailedError",
    "CommitBodyTimeoutError",
    "ConversationBusyError",
    "ConversationFullError",
    "DefinitionError",
    "DocumentTooLargeError",
    "DocumentTooNewError",
    "ExportFileError",
    "ExtensionError",
    "HolderLostError",
    "InternalError",
    "InvalidArgumentError",
    "InvocationEndedError",
    "MemoTooLargeError",
    "MigrationError",
    "MissingExtraError",
    "ModelError",
    "NestedCommitError",
    "NoResultError",
    "NotAStoreError",
    "NotFoundError",
    "NotJsonError",
    "NothingToContinueError",
    "OutcomeUnknownError",
    "OwnedTooDeepError",
    "OwnerEndedError",
    "PathTakenError",
    "PidurableError",
    "RequestIdConflictError",
    "ResultUnreadableError",
    "SessionClosedError",
    "SessionPoisonedError",
    "SignalRefusedError",
    "StorageAccessError",
    "StorageCorruptError",
    "StorageHeldError",
    "StorageRefusedError",
    "StorageTooNewError",
    "TaskEndedError",
    "TooManyMemosError",
    "TransactionClosedError",
    "UnansweredError",
    "UnknownDefinitionError",
    "UnknownTaskError",
    "WaitCycleError",
    "WaitTimeoutError",
    "check",
]


def show(value: object, *, length: int = 200) -> str:
    """Render a value for a message: its repr, cut at `length` characters, and never an error.

    Of a large value only the beginning is rendered, as its whole repr may not fit into memory.
    """
    try:
        if isinstance(value, str | bytes | bytearray) and len(value) > length:
            text = repr(value[:length]) + "..."
        elif _is_large(value, [_SHOWN_ITEMS]):
            text = _ABRIDGED.repr(value)
        else:
            text = repr(value)
    except Exception as error:  # a repr of foreign code may raise anything
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= length else text[: length - 3] + "..."


_SHOWN_ITEMS = 1_000
_SHOWN_DEPTH = 40
_ABRIDGED = reprlib.Repr()
_ABRIDGED.maxlevel = 4
_ABRIDGED.maxstring = _ABRIDGED.maxother = 200


def _is_large(value: object, budget: list[int], depth: int = 0) -> bool:
    """Whether a container holds more than a message could show, shared parts every time."""
    if isinstance(value, str | bytes | bytearray):
        budget[0] -= len(value) // 200
    elif isinstance(value, dict | list | tuple | set | frozenset):
        budget[0] -= 1 + len(value)
        if budget[0] <= 0 or depth >= _SHOWN_DEPTH:
            return True
        each = value if not isinstance(value, dict) else (*value, *value.values())
        return any(_is_large(item, budget, depth + 1) for item in each)
    return budget[0] <= 0


class PidurableError(Exception):
    """The base of every error that this package raises on purpose."""


# --- fix the call -----------------------------------------------------------------------------


@attrs.define(eq=False)
class DefinitionError(PidurableError, TypeError):
    """A task definition is not well formed. Nothing was installed; fix the class it names."""

    definition: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.definition}: {self.problem}. {self.remedy}"


@attrs.define(eq=False)
class ExtensionError(PidurableError, ValueError):
    """An extension cannot be installed or loaded. The registry is as it was."""

    extension: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        tail = f" {self.remedy}" if self.remedy else ""
        return f"extension {self.extension!r}: {self.problem}.{tail}"


_PATH_CHARACTERS_MAX = 200
_PATH_HEAD = 120
"""Of a path, so much is shown in a message; the field has the whole."""


@attrs.define(eq=False)
class NotJsonError(PidurableError, ValueError):
    """A value is not strict JSON, or too deep or too large. Nothing was stored."""

    path: str
    problem: str
    value: str = ""

    def __str__(self) -> str:
        seen = f", got {self.value}" if self.value else ""
        # A path holds keys of the value; shown, it must neither be endless nor break a terminal.
        path = self.path
        if len(path) > _PATH_CHARACTERS_MAX:
            # Both ends tell most: which value it is, and what stands at the place itself.
            path = f"{path[:_PATH_HEAD]}...{path[_PATH_HEAD - _PATH_CHARACTERS_MAX :]}"
        return f"{path.encode(errors='backslashreplace').decode()}: {self.problem}{seen}"


@attrs.define(eq=False)
class InvalidArgumentError(PidurableError, ValueError):
    """An argument is of the wrong type or outside its bounds. Nothing was done."""

    argument: str
    problem: str
    value: str = ""

    def __str__(self) -> str:
        seen = f", got {self.value}" if self.value else ""
        return f"{self.argument}: {self.problem}{seen}"


@attrs.define(eq=False)
class NotFoundError(PidurableError, LookupError):
    """This session has no such thing (or it belongs to somebody else)."""

    kind: str
    id: int | str
    hint: str = ""
    place: str = "this session"
    """What has none; there may be one elsewhere."""

    def __str__(self) -> str:
        tail = f" {self.hint}" if self.hint else ""
        return f"{self.place} has no {self.kind} {self.id}.{tail}"


@attrs.define(eq=False)
class UnknownTaskError(NotFoundError):
    """This session has no such task."""

    kind: str = attrs.field(default="task", init=False)
    id: int | str
    hint: str = ""
    place: str = attrs.field(default="this session", init=False)


@attrs.define(eq=False)
class UnknownDefinitionError(PidurableError, LookupError):
    """No installed extension has this task kind. Install it, or correct the name."""

    kind: str
    nearest: str | None = None

    def __str__(self) -> str:
        near = f"Did you mean {self.nearest!r}? " if self.nearest else ""
        return (
            f"no installed extension defines the task kind {self.kind!r}. {near}Install one, as "
            "in registry.install(Extension('shop', tasks=[Payment()]))."
        )


@attrs.define(eq=False)
class RequestIdConflictError(PidurableError, ValueError):
    """The request id, or the key of a command, was already used for other content."""

    request_id: str
    submission: int
    """0 where it is the key of a command."""
    named: str = ""
    """What has the key, where that is no submission."""

    def __str__(self) -> str:
        what, named = "request id", f"submission {self.submission}"
        if self.named:
            what, named = "key", self.named
        return (
            f"{what} {self.request_id!r} already names {named} with other "
            f"content. Send new content under a new {what}."
        )


@attrs.define(eq=False)
class PathTakenError(PidurableError, FileExistsError):
    """There is something at a path where a new file was to be made. It was not touched."""

    path: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path} exists already: {self.remedy}"


@attrs.define(eq=False)
class WaitCycleError(PidurableError, ValueError):
    """A wait could never end, because what it waits for waits for it. It was not stored."""

    path: str

    def __str__(self) -> str:
        return (
            f"{self.path}: this wait could never end. "
            "Wait with a deadline or signals, or for something else."
        )


@attrs.define(eq=False)
class OwnerEndedError(PidurableError):
    """Work was to be created below a task that is ending or being aborted. Nothing was stored."""

    owner: int
    state: str

    def __str__(self) -> str:
        return (
            f"task {self.owner} is {self.state}; it can own no new work. Let it wait for that work "
            "before it ends, or create it in a conversation (conversation=)."
        )


@attrs.define(eq=False)
class TaskEndedError(PidurableError):
    """The task has ended; what was to be done to it needs a live one."""

    task: int
    outcome: str

    def __str__(self) -> str:
        return f"task {self.task} has ended ({self.outcome})"


@attrs.define(eq=False)
class InvocationEndedError(PidurableError):
    """A commit came after its task's step was decided. It was not stored."""

    task: int
    why: str

    def __str__(self) -> str:
        return (
            f"task {self.task}: this commit was refused, {self.why}. Nothing can be committed "
            "after an outcome or a wait, or when the phase has returned: return after them."
        )


@attrs.define(eq=False)
class NestedCommitError(PidurableError):
    """A commit was started inside the body of another. Neither hangs; move it behind the first."""

    def __str__(self) -> str:
        return (
            "a commit was started inside the body of another one. "
            "Use the transaction at hand, or commit after the body has ended."
        )


@attrs.define(eq=False)
class TransactionClosedError(PidurableError):
    """A transaction or one of its drafts was used after its body had ended."""

    what: str = "transaction"

    def __str__(self) -> str:
        return f"this {self.what} was used after its commit body ended. Open a new commit."


@attrs.define(eq=False)
class NoResultError(PidurableError):
    """An outcome that is not completed has no result. Look at `.status`, `.error`, `.partial`."""

    task: int
    status: str
    detail: str = ""

    def __str__(self) -> str:
        tail = f": {self.detail}" if self.detail else ""
        return f"task {self.task} {self.status}, so there is no result{tail}"


@attrs.define(eq=False)
class OwnedTooDeepError(PidurableError):
    """Conversations, or nested calls, are owned too deeply below each other."""

    depth_max: int
    what: str = "a conversation"

    def __str__(self) -> str:
        return (
            f"{self.what} may be owned at most {self.depth_max} levels deep "
            "(setting owned_depth_max)"
        )


@attrs.define(eq=False)
class DocumentTooLargeError(PidurableError):
    """A document would exceed its size limit. Nothing was stored; split it or use entries."""

    document: str
    size_bytes: int
    bytes_max: int

    def __str__(self) -> str:
        return (
            f"document {self.document!r} would take {self.size_bytes} bytes, "
            f"at most {self.bytes_max} are allowed"
        )


@attrs.define(eq=False)
class MemoTooLargeError(PidurableError):
    """A memo is too large. Keep large state in the checkpoint or a document."""

    name: str
    size_bytes: int
    bytes_max: int

    def __str__(self) -> str:
        return (
            f"memo {self.name!r} would take {self.size_bytes} bytes, "
            f"at most {self.bytes_max} are allowed"
        )


@attrs.define(eq=False)
class TooManyMemosError(PidurableError):
    """The task has the most memos it may have."""

    task: int
    memos_max: int

    def __str__(self) -> str:
        return f"task {self.task} has {self.memos_max} memos already, the most allowed"


@attrs.define(eq=False)
class MissingExtraError(PidurableError, ImportError):
    """An optional dependency is not installed."""

    extra: str
    needed_for: str

    def __str__(self) -> str:
        return (
            f"{self.needed_for} needs an extra. "
            f"Install it with: pip install 'pidurable[{self.extra}]'"
        )


# --- expected, decide -------------------------------------------------------------------------


@attrs.define(eq=False)
class UnansweredError(PidurableError):
    """A submission ended without an answer. `reason` is one of the stable codes."""

    submission: int
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        tail = f": {self.detail}" if self.detail else ""
        return f"submission {self.submission} was not answered ({self.reason}){tail}"


@attrs.define(eq=False)
class OutcomeUnknownError(PidurableError):
    """Raised by a tool whose other side died in mid-call: its effect may or may not be there."""

    detail: str = "the other side ended in the middle of the call"

    def __str__(self) -> str:
        return self.detail


@attrs.define(eq=False)
class AbortRequestedError(PidurableError):
    """The task is marked for abort; the commit was not stored. Return, and let `abort` run."""

    task: int
    reason: str

    def __str__(self) -> str:
        return f"task {self.task} is to be aborted ({self.reason}); this commit was not stored"


@attrs.define(eq=False)
class AlreadyDecidedError(PidurableError):
    """A permission request is not open any more. Nothing was changed by this decision."""

    request: int
    state: str
    """granted, denied, expired or closed."""
    closed_reason: str | None = None
    """Of a closed one: aborted, superseded or gone."""
    by: str | None = None
    """Who decided, where that was told."""

    def __str__(self) -> str:
        why = f" ({self.closed_reason})" if self.closed_reason else ""
        by = f" by {show(self.by)}" if self.by else ""
        return (
            f"permission request {self.request} is {self.state}{why}{by}, "
            "and this decision changes nothing"
        )


@attrs.define(eq=False)
class ConversationBusyError(PidurableError):
    """A run is active in this conversation. Wait for it, or submit with another `when_busy`."""

    conversation: int
    run: int

    def __str__(self) -> str:
        return f"conversation {self.conversation} is busy with run {self.run}"


@attrs.define(eq=False)
class ConversationFullError(PidurableError):
    """The queue of this conversation is full. Nothing was stored; try again when it is shorter."""

    conversation: int
    queued_max: int
    size_bytes: int | None = None  # of the items together; None where they are too many
    bytes_max: int | None = None

    def __str__(self) -> str:
        text = f"conversation {self.conversation} has {self.queued_max} queued items, the most"
        if self.size_bytes is not None:
            most = f"where at most {self.bytes_max}, and {self.queued_max} items, are"
            text = f"conversation {self.conversation} would queue {self.size_bytes} bytes, {most}"
        return f"{text} allowed; try again when some were placed or withdrawn, or no run is active"


@attrs.define(eq=False)
class NothingToContinueError(PidurableError):
    """No run can be continued: the model would have nothing to answer. Submit an input instead."""

    conversation: int
    code: str = "terminal"
    """One of the stable codes of resuming."""

    def __str__(self) -> str:
        return (
            f"conversation {self.conversation} has nothing to continue ({self.code}): its last "
            "answer is complete, or nothing was asked yet; submit an input"
        )


@attrs.define(eq=False)
class SignalRefusedError(PidurableError):
    """A signal is too large, or too many are unread. It was not stored."""

    task: int
    problem: str

    def __str__(self) -> str:
        return f"task {self.task}: {self.problem}"


@attrs.define(eq=False)
class CommandFailedError(PidurableError):
    """The holder refused a command, for a reason that has no class of its own here."""

    key: str
    error: str
    """The name of its class over there."""
    problem: str

    def __str__(self) -> str:
        return f"command {self.key!r} was refused with {self.error}: {self.problem}"


@attrs.define(eq=False)
class ResultUnreadableError(PidurableError):
    """A stored result cannot be read by today's class. Its JSON is on `.json`."""

    task: int
    problem: str
    json: Any = None

    def __str__(self) -> str:
        return f"the stored result of task {self.task} cannot be read: {self.problem}"


@attrs.define(eq=False)
class ModelError(PidurableError):
    """A model request failed. `kind` is retryable, overflow, auth or other."""

    kind: str
    detail: str
    retry_after: float | None = None  # seconds

    def __str__(self) -> str:
        return self.detail


# --- try again, or wait -----------------------------------------------------------------------


@attrs.define(eq=False)
class WaitTimeoutError(PidurableError, trio.TooSlowError):
    """The time ran out. Nothing durable changed; waiting again is fine."""

    what: str
    timeout: float  # seconds
    hint: str = ""
    key: str = ""
    """Of the command that was not answered: under it one can wait again, or withdraw it."""

    def __str__(self) -> str:
        tail = f". {self.hint}" if self.hint else ""
        return f"{self.what} had not happened after {self.timeout:g} s{tail}"


@attrs.define(eq=False)
class StorageRefusedError(PidurableError):
    """The storage refused the commit for certain (disk full, busy). Nothing of it was stored."""

    store: str
    problem: str

    def __str__(self) -> str:
        return f"{self.store} refused the commit: {self.problem}. Nothing of it was stored."


@attrs.define(eq=False)
class StorageHeldError(PidurableError):
    """Another process holds this store. Nothing was changed; opening again is safe."""

    store: str
    pid: int
    host: str
    heartbeat_age: float  # seconds

    def __str__(self) -> str:
        return (
            f"{self.store} is held by process {self.pid} on {self.host} (last heartbeat "
            f"{self.heartbeat_age:.1f} s ago). Stop it, or open with takeover=True if it hangs."
        )


@attrs.define(eq=False)
class CommitBodyTimeoutError(PidurableError):
    """The body of a commit took too long and was cancelled. It was not stored."""

    seconds: float
    place: str = ""

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return (
            f"a commit body took longer than {self.seconds:g} s{where} and was cancelled. "
            "Do slow work before the commit."
        )


# --- reopen -----------------------------------------------------------------------------------


@attrs.define(eq=False)
class SessionPoisonedError(PidurableError):
    """The session cannot tell what is stored and serves nothing more. Reopen the store."""

    store: str
    cause: str

    def __str__(self) -> str:
        cause = self.cause.rstrip(".")
        return f"the session on {self.store} is unusable: {cause}. Close it and open it again."


@attrs.define(eq=False)
class HolderLostError(SessionPoisonedError):
    """Another process took this store over. Nothing of this one can be stored any more."""

    store: str
    cause: str = attrs.field(init=False)
    epoch: int = 0
    current: int = 0

    def __attrs_post_init__(self) -> None:
        self.cause = (
            f"another process took it over (epoch {self.epoch} was replaced by {self.current})"
        )


@attrs.define(eq=False)
class SessionClosedError(PidurableError):
    """The session is closed or closing. Open the store again."""

    store: str = "the session"

    def __str__(self) -> str:
        return f"{self.store} is closed"


# --- call an operator -------------------------------------------------------------------------


@attrs.define(eq=False)
class StorageCorruptError(PidurableError):
    """The file is damaged. Nothing was changed; restore a copy."""

    store: str
    problem: str

    def __str__(self) -> str:
        return f"{self.store} is damaged: {self.problem}. It was not changed; restore a backup."


@attrs.define(eq=False)
class StorageTooNewError(PidurableError):
    """The store was written by a newer version. Nothing was changed; upgrade this program."""

    store: str
    found: int
    known: int

    def __str__(self) -> str:
        return (
            f"{self.store} has schema {self.found}, this program knows up to {self.known}. "
            "Upgrade pidurable."
        )


@attrs.define(eq=False)
class NotAStoreError(PidurableError):
    """The path does not hold a pidurable store. Nothing was changed."""

    store: str
    problem: str

    def __str__(self) -> str:
        return f"{self.store} is not a pidurable store: {self.problem}"


@attrs.define(eq=False)
class StorageAccessError(PidurableError, OSError):
    """The store cannot be opened, read or written (permissions, missing folder, disk)."""

    store: str
    problem: str

    def __str__(self) -> str:
        return f"{self.store} cannot be used: {self.problem}"


@attrs.define(eq=False)
class ExportFileError(PidurableError, ValueError):
    """An export cannot be written, or is damaged and cannot be imported. Nothing was left of it."""

    file: str
    problem: str
    line: int | None = None
    """From 1; None where it is no matter of one line."""
    path: str = ""
    """The place in the JSON of the line."""
    value: str = ""

    def __str__(self) -> str:
        line = f", line {self.line}" if self.line is not None else ""
        path = f", {self.path}" if self.path else ""
        seen = f", got {self.value}" if self.value else ""
        return f"{self.file}{line}{path}: {self.problem}{seen}. Nothing was left behind."


@attrs.define(eq=False)
class DocumentTooNewError(PidurableError):
    """A document was written by a newer version of its class. It was not changed."""

    document: str
    found: int
    known: int

    def __str__(self) -> str:
        return (
            f"document {self.document!r} has version {self.found}, "
            f"its class here is version {self.known}. Upgrade the extension."
        )


@attrs.define(eq=False)
class MigrationError(PidurableError):
    """Stored data could not be migrated. It was not changed."""

    what: str
    problem: str

    def __str__(self) -> str:
        return f"{self.what} could not be migrated: {self.problem}"


# --- report a bug -----------------------------------------------------------------------------


@attrs.define(eq=False)
class InternalError(PidurableError):
    """An invariant of pidurable does not hold. This is a bug; the session is poisoned."""

    problem: str

    def __str__(self) -> str:
        return f"internal error, please report it: {self.problem}"


def check(condition: object, problem: str) -> None:
    """Guard stored data: raise `InternalError` unless the condition holds, also under -O."""
    if not condition:
        raise InternalError(problem)
