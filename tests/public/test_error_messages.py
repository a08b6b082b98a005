"""Errors: what each one says, and that it survives pickling and copying with its facts."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio

from pidurable import errors
from pidurable.errors import PidurableError, check


@attrs.frozen(kw_only=True)
class Given:
    """A record in the place of its id."""

    id: int


CLASSES = [
    value
    for _, value in sorted(vars(errors).items())
    if isinstance(value, type) and issubclass(value, PidurableError)
]

# One instance of each, made as the code makes it. A class without one fails.
EXAMPLES: dict[str, list[PidurableError]] = {
    "PidurableError": [PidurableError("any of these")],
    "AbortRequestedError": [errors.AbortRequestedError(7, "user")],
    "AlreadyDecidedError": [
        errors.AlreadyDecidedError(12, "granted", None, "ann"),
        errors.AlreadyDecidedError(12, "closed", "aborted"),
    ],
    "AnswerGoneError": [errors.AnswerGoneError("k", True), errors.AnswerGoneError("k", False)],
    "CommandFailedError": [errors.CommandFailedError("k", "OSError", "no space left")],
    "CommitBodyTimeoutError": [
        errors.CommitBodyTimeoutError(10.0, "task 7"),
        errors.CommitBodyTimeoutError(0.5),
    ],
    "ConversationBusyError": [errors.ConversationBusyError(1, 7)],
    "NothingToContinueError": [errors.NothingToContinueError(1)],
    "ConversationFullError": [
        errors.ConversationFullError(1, 1000),
        errors.ConversationFullError(1, 1000, 5_000_000, 4_194_304),
    ],
    "DefinitionError": [
        errors.DefinitionError("Payment.charge", "it is not async", "Write: async def charge(...)")
    ],
    "DocumentTooLargeError": [errors.DocumentTooLargeError("shop.stock", 5_000_000, 4_194_304)],
    "DocumentTooNewError": [errors.DocumentTooNewError("shop.stock", 3, 2)],
    "ExportFileError": [
        errors.ExportFileError("shop.jsonl", "it cannot be written (No space left on device)"),
        errors.ExportFileError("shop.jsonl", "there is no task 9 in this file", 41, "$.task"),
        errors.ExportFileError("shop.jsonl", "expected an integer", 41, "$.seq", "'7'"),
    ],
    "ExtensionError": [
        errors.ExtensionError("shop", "the task kind 'shop.payment' is installed already"),
        errors.ExtensionError("shop", "tasks holds the class Payment", "Give an instance."),
    ],
    "HolderLostError": [errors.HolderLostError("shop.sqlite", 1, 2)],
    "InternalError": [errors.InternalError("task 7 has two outcomes")],
    "InvalidArgumentError": [
        errors.InvalidArgumentError("limit", "expected at least 1", "0"),
        errors.InvalidArgumentError("when_busy", "expected follow_up, steer or reject"),
    ],
    "InvocationEndedError": [errors.InvocationEndedError(7, "its outcome was decided")],
    "MemoTooLargeError": [errors.MemoTooLargeError("order", 9000, 8192)],
    "MigrationError": [errors.MigrationError("the store shop.sqlite", "step 2 raised KeyError")],
    "MissingExtraError": [errors.MissingExtraError("llm", "a model over HTTP")],
    "ModelError": [errors.ModelError("auth", "openai/gpt-5 needs a key: set OPENAI_API_KEY")],
    "NestedCommitError": [errors.NestedCommitError()],
    "NoResultError": [
        errors.NoResultError(7, "failed", "card 0002 was declined"),
        errors.NoResultError(7, "aborted"),
    ],
    "NotAStoreError": [errors.NotAStoreError("notes.txt", "it is no SQLite file")],
    "NotFoundError": [
        errors.NotFoundError("conversation", 9),
        errors.NotFoundError("grant", "-9"),
        errors.NotFoundError("permission request", errors.show(Given(id=12))),
        errors.NotFoundError("entry", "'first'"),
        errors.NotFoundError("entry", 9, "See 1.", place="conversation 2"),
    ],
    "NotJsonError": [
        errors.NotJsonError("$.items[3].when", "a datetime is not JSON", "datetime(2026, 1, 1)"),
        errors.NotJsonError("$.total", "a number must be finite", "nan"),
    ],
    "OutcomeUnknownError": [
        errors.OutcomeUnknownError(),
        errors.OutcomeUnknownError("the printer went away"),
    ],
    "OwnedTooDeepError": [errors.OwnedTooDeepError(32)],
    "OwnerEndedError": [errors.OwnerEndedError(7, "being aborted")],
    "PathTakenError": [
        errors.PathTakenError("shop.sqlite", "name another path; a store is never overwritten"),
    ],
    "RequestIdConflictError": [
        errors.RequestIdConflictError("order-1", 7),
        errors.RequestIdConflictError("order-1", 0, "a command of the kind 'signal'"),
    ],
    "ResultUnreadableError": [
        errors.ResultUnreadableError(7, "$.cents: expected int, got '5'", {"cents": "5"})
    ],
    "SessionClosedError": [errors.SessionClosedError("shop.sqlite"), errors.SessionClosedError()],
    "SessionPoisonedError": [errors.SessionPoisonedError("shop.sqlite", "fsync failed: EIO")],
    "SignalRefusedError": [errors.SignalRefusedError(7, "1000 signals are unread, the most")],
    "StorageAccessError": [errors.StorageAccessError("/x/shop.sqlite", "no such folder")],
    "StorageCorruptError": [errors.StorageCorruptError("shop.sqlite", "page 3 is malformed")],
    "StorageHeldError": [errors.StorageHeldError("shop.sqlite", 4711, "host-a", 2.04)],
    "StorageRefusedError": [errors.StorageRefusedError("shop.sqlite", "the disk is full")],
    "StorageTooNewError": [errors.StorageTooNewError("shop.sqlite", 9, 1)],
    "TaskEndedError": [errors.TaskEndedError(7, "completed")],
    "TooManyMemosError": [errors.TooManyMemosError(7, 64)],
    "TransactionClosedError": [
        errors.TransactionClosedError(),
        errors.TransactionClosedError("draft of shop.stock"),
    ],
    "UnansweredError": [
        errors.UnansweredError(3, "model_error", "the server is down"),
        errors.UnansweredError(3, "withdrawn"),
    ],
    "UnknownDefinitionError": [],
    "UnknownTaskError": [],
    "WaitCycleError": [],
    "WaitTimeoutError": [
        errors.WaitTimeoutError("the outcome of task 7", 2.5),
        errors.WaitTimeoutError("the answer to command 'k'", 2.5, "It waits.", "k"),
    ],
}


def sample(name: str, annotation: str) -> Any:
    """A value of a field's type, for the classes whose fields say enough."""
    if "int" in annotation:
        return 7
    if "float" in annotation:
        return 1.5
    return f"some {name}"


def examples(cls: type[PidurableError]) -> list[PidurableError]:
    """The written examples, or one with a value in each field."""
    written = EXAMPLES[cls.__name__]
    if written:
        return written
    fields = [each for each in attrs.fields(cls) if each.init]
    return [cls(*(sample(each.name, str(each.type)) for each in fields))]


ALL = [(cls, error) for cls in CLASSES for error in examples(cls)]
IDS = [f"{cls.__name__}-{number}" for number, (cls, _) in enumerate(ALL)]


def test_every_error_has_an_example_here() -> None:
    """A new error class must show here what it says."""
    assert {cls.__name__ for cls in CLASSES} == set(EXAMPLES)
    assert {cls.__name__ for cls in CLASSES} | {"check"} == set(errors.__all__)


def test_the_messages_are_as_they_were(check_public_snapshot: Callable[[str, str], None]) -> None:
    """Every message stands in a file, read as a person would read it."""
    parts = []
    for cls, error in ALL:
        bases = [base.__name__ for base in cls.__mro__[1:] if base not in (object, BaseException)]
        parts.append(f"## {cls.__name__} ({', '.join(bases)})\n{error}\n")

    check_public_snapshot("errors.txt", "\n".join(parts))


@pytest.mark.parametrize(("cls", "error"), ALL, ids=IDS)
def test_an_error_survives_pickling_and_copying(
    cls: type[PidurableError], error: PidurableError
) -> None:
    """Errors cross processes and are raised again as copies: class, text and facts stay."""
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is cls
        assert str(twin) == str(error)
        if attrs.has(cls):
            assert attrs.asdict(twin) == attrs.asdict(error)


@pytest.mark.parametrize(("cls", "error"), ALL, ids=IDS)
def test_an_error_says_its_facts(cls: type[PidurableError], error: PidurableError) -> None:
    """Messages are texts on one line that name each fact, except what is only for programs."""
    text = str(error)

    assert text
    assert "\n" not in text
    for_programs = {"kind", "retry_after", "json", "epoch", "current", "cause", "answered"}
    for field in attrs.fields(cls) if attrs.has(cls) else ():
        value = getattr(error, field.name)
        if field.name in for_programs or value in (None, "", 0):
            continue
        shown = f"{value:.1f}" if field.name == "heartbeat_age" else str(value)
        assert shown in text or f"{value:g}" in text if isinstance(value, float) else shown in text


def test_the_tree_in_the_documentation_names_every_class() -> None:
    """The drawing at the top of the module is complete."""
    assert errors.__doc__ is not None
    for cls in CLASSES:
        assert cls.__name__ in errors.__doc__


def test_errors_fit_the_builtins_that_callers_catch() -> None:
    """A missing thing is a LookupError, a late one a TooSlowError, a bad value a ValueError."""
    assert issubclass(errors.NotFoundError, LookupError)
    assert issubclass(errors.UnknownTaskError, errors.NotFoundError)
    assert issubclass(errors.WaitTimeoutError, trio.TooSlowError)
    assert issubclass(errors.NotJsonError, ValueError)
    assert issubclass(errors.DefinitionError, TypeError)
    assert issubclass(errors.MissingExtraError, ImportError)
    assert issubclass(errors.HolderLostError, errors.SessionPoisonedError)


def test_values_in_messages_are_cut_and_never_raise() -> None:
    """A value seen is shown in at most 200 characters, whatever its repr does."""

    class Loud:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert errors.show("x" * 1000) == "'" + "x" * 196 + "..."
    assert errors.show(Loud()) == "<Loud whose repr raised RuntimeError>"


def test_check_works_without_assert_statements() -> None:
    """What guards stored data is a call, so `python -O` does not remove it."""
    check(True, "never shown")
    with pytest.raises(errors.InternalError, match="please report it: two outcomes"):
        check(0, "two outcomes")
    assert "assert" not in inspect.getsource(check)
