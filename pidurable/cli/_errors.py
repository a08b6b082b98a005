"""Errors at the edge: every one becomes what happened, to which thing, and what to do next.

Here errors end: nothing above sees them, and no traceback is shown unless PIDURABLE_DEBUG is set.
The exit codes are a contract with scripts: 0 done, 1 the work failed, 2 usage, 4 not found, 5 held
by another process, 6 parked for a person, 7 out of budget, 8 timed out waiting, 130 interrupted.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator

import attrs

from pidurable import errors
from pidurable.cli._render import clean, clean_line

__all__ = [
    "Exit",
    "Explained",
    "LeftError",
    "UsageError",
    "explain_error",
    "leaves",
    "missing_store",
]


WHAT_CHARACTERS_MAX = 16_000
"""Of what is said of an error; the traceback of an extension fits."""


class Exit(enum.IntEnum):
    """What the process says when it ends."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 4
    HELD = 5
    PARKED = 6
    OUT_OF_BUDGET = 7
    TIMED_OUT = 8
    INTERRUPTED = 130


@attrs.define(eq=False)
class UsageError(errors.PidurableError, ValueError):
    """The command line, a variable or the project's table asks for the impossible."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}".strip()


@attrs.define(eq=False)
class LeftError(errors.PidurableError):
    """Ctrl-C, while another process was to do what was asked for; says what becomes of it."""

    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}".strip()


@attrs.frozen
class Explained:
    """What the command line says of an error."""

    code: Exit
    what: str
    next: str

    def lines(self) -> list[str]:
        """The two lines for stderr, cleaned, and cut where they repeat an endless word."""
        what = clean(self.what)
        if len(what) > WHAT_CHARACTERS_MAX:
            what = f"{what[:WHAT_CHARACTERS_MAX]} [cut]"
        found = [f"pidurable: {what}"]
        if self.next:
            found.append(f"  next: {clean_line(self.next)}")
        return found


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside of a group, however nested; a single one as itself."""
    stack = [error]
    while stack:
        found = stack.pop()
        if isinstance(found, BaseExceptionGroup):
            stack += reversed(found.exceptions)
        else:
            yield found


def missing_store(store: str) -> errors.NotFoundError:
    """Return the error for a store that does not exist."""
    return errors.NotFoundError("store", store)


_Rule = tuple[type[BaseException] | tuple[type[BaseException], ...], Exit, str]

# The first that fits counts, so a derived class stands before its base.
_RULES: tuple[_Rule, ...] = (
    (errors.MissingExtraError, Exit.USAGE, ""),
    (
        errors.StorageHeldError,
        Exit.HELD,
        "Looking works meanwhile: `pidurable task tree`. To work on it, stop that process or wait "
        "until it ends.",
    ),
    (
        errors.NotFoundError,
        Exit.NOT_FOUND,
        "`pidurable task tree` shows what this session has.",
    ),
    (
        errors.TaskEndedError,
        Exit.FAILED,
        "Nothing was stored. `pidurable task show ID` says how it ended.",
    ),
    (errors.WaitTimeoutError, Exit.TIMED_OUT, "The work goes on with `pidurable resume`."),
    (
        errors.RequestIdConflictError,
        Exit.USAGE,
        "Use a new --request-id for a new prompt.",
    ),
    (
        errors.ConversationBusyError,
        Exit.FAILED,
        "Wait until its run has ended, or go on with it: `pidurable resume`.",
    ),
    (
        errors.PathTakenError,
        Exit.USAGE,
        "What is there was not touched.",
    ),
    (
        errors.ExportFileError,
        Exit.FAILED,
        "Export the session again, or make room; the original is as it was.",
    ),
    (
        errors.StorageTooNewError,
        Exit.FAILED,
        "Upgrade pidurable, or name another store with --store. Nothing was changed.",
    ),
    (
        errors.NotAStoreError,
        Exit.FAILED,
        "Name another path with --store. What is there was not touched.",
    ),
    (
        errors.StorageCorruptError,
        Exit.FAILED,
        "Keep the file and its -wal beside it, and restore a copy of both. Nothing was changed.",
    ),
    (
        errors.StorageAccessError,
        Exit.FAILED,
        "Check the path, its permissions and the disk; nothing was changed.",
    ),
    (
        errors.StorageRefusedError,
        Exit.FAILED,
        "Make room (disk, quota, permissions), then try again; `pidurable resume` goes on.",
    ),
    (
        errors.HolderLostError,
        Exit.HELD,
        "Another process works on this store now; everything that was committed is there.",
    ),
    (
        (errors.SessionPoisonedError, errors.SessionClosedError),
        Exit.FAILED,
        "Everything that was committed is there; go on with `pidurable resume`.",
    ),
    (errors.ExtensionError, Exit.USAGE, "Fix the extension, or leave it out of --extension."),
    (errors.DefinitionError, Exit.USAGE, "Fix the definition in the extension that holds it."),
    (
        errors.InternalError,
        Exit.FAILED,
        "Please report it. What was committed is safe; go on with `pidurable resume`.",
    ),
    ((UsageError,), Exit.USAGE, ""),
    (
        (errors.InvalidArgumentError, errors.NotJsonError),
        Exit.USAGE,
        "`pidurable --help` says what is allowed.",
    ),
)


def explain_error(error: BaseException) -> Explained:
    """Return what to say of an error, and the exit code."""
    found = list(leaves(error))
    # Of a group, the error that says most to a person comes first.
    chosen = next((e for e in found if isinstance(e, errors.PidurableError)), found[0])
    if isinstance(chosen, KeyboardInterrupt):
        return Explained(Exit.INTERRUPTED, "interrupted", "Go on with `pidurable resume`.")
    if isinstance(chosen, errors.NotFoundError) and chosen.kind == "store":
        return Explained(
            Exit.NOT_FOUND,
            f"there is no store at {chosen.id}",
            "`pidurable run PROMPT` creates one; --store PATH (or PIDURABLE_STORE) names another.",
        )
    if isinstance(chosen, errors.NotFoundError) and chosen.kind == "model":
        hint = chosen.hint or "Models are named provider/model, for example openai/gpt-5."
        return Explained(Exit.USAGE, f"there is no model {chosen.id!r}", hint)
    if isinstance(chosen, errors.NotFoundError) and chosen.kind == "reason code":
        return Explained(
            Exit.NOT_FOUND,
            f"there is no reason code and no rule of values {chosen.id!r}",
            chosen.hint,
        )
    if isinstance(chosen, UsageError):
        return Explained(Exit.USAGE, chosen.problem, chosen.remedy)
    if isinstance(chosen, LeftError):
        return Explained(Exit.INTERRUPTED, chosen.what, chosen.remedy)
    if isinstance(chosen, errors.StorageHeldError):
        return Explained(
            Exit.HELD,
            f"{chosen.store} is held by process {chosen.pid} on {chosen.host} "
            f"(last heartbeat {chosen.heartbeat_age:.1f} s ago)",
            _RULES[1][2],
        )
    if isinstance(chosen, errors.WaitTimeoutError) and chosen.hint:
        # Somebody else is to do it, and that was said.
        remedy = "It stays handed in: do not hand it in again." if chosen.key else ""
        return Explained(Exit.TIMED_OUT, str(chosen), remedy)
    for kinds, code, remedy in _RULES:
        if isinstance(chosen, kinds):
            said = isinstance(chosen, errors.NotFoundError) and bool(chosen.hint)
            return Explained(code, str(chosen), "" if said else remedy)
    if isinstance(chosen, errors.PidurableError):
        return Explained(Exit.FAILED, str(chosen), "")
    if isinstance(chosen, OSError):
        where = f"{chosen.filename}: " if chosen.filename else ""
        return Explained(
            Exit.FAILED,
            f"{where}{chosen.strerror or chosen}",
            "Check the path, its permissions and the disk.",
        )
    return Explained(
        Exit.FAILED,
        f"internal error, {type(chosen).__name__}: {chosen}",
        "Please report it; with PIDURABLE_DEBUG=1 the traceback is shown.",
    )


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return bool(os.environ.get("PIDURABLE_DEBUG"))
