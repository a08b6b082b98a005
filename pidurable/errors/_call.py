"""Errors that say: fix the call. Nothing was changed by it."""

from __future__ import annotations

import attrs

from pidurable.errors._root import PidurableError


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


_FOUND_BY_ID = frozenset(
    {"conversation", "grant", "permission request", "submission", "task", "task or conversation"}
)
_NO_ID = "An id is expected: a whole number, as `.id` of its record is."


@attrs.define(eq=False)
class NotFoundError(PidurableError, LookupError):
    """This session has no such thing (or it belongs to somebody else)."""

    kind: str
    id: int | str
    hint: str = ""
    place: str = "this session"
    """What has none; there may be one elsewhere."""

    def __str__(self) -> str:
        hint = self.hint
        if not hint and self.kind in _FOUND_BY_ID and not str(self.id).lstrip("-").isdecimal():
            # Whoever gave the record itself, which may well be there, learns nothing from "has no".
            hint = _NO_ID
        tail = f" {hint}" if hint else ""
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
