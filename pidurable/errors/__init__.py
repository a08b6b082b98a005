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
    │   └── AnswerGoneError, CommandFailedError  a command from outside: too late, refused
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

from pidurable.errors._again import (
    CommitBodyTimeoutError,
    HolderLostError,
    SessionClosedError,
    SessionPoisonedError,
    StorageHeldError,
    StorageRefusedError,
    WaitTimeoutError,
)
from pidurable.errors._call import (
    DefinitionError,
    DocumentTooLargeError,
    ExtensionError,
    InvalidArgumentError,
    InvocationEndedError,
    MemoTooLargeError,
    MissingExtraError,
    NestedCommitError,
    NoResultError,
    NotFoundError,
    NotJsonError,
    OwnedTooDeepError,
    OwnerEndedError,
    PathTakenError,
    RequestIdConflictError,
    TaskEndedError,
    TooManyMemosError,
    TransactionClosedError,
    UnknownDefinitionError,
    UnknownTaskError,
    WaitCycleError,
)
from pidurable.errors._decide import (
    AbortRequestedError,
    AlreadyDecidedError,
    AnswerGoneError,
    CommandFailedError,
    ConversationBusyError,
    ConversationFullError,
    ModelError,
    NothingToContinueError,
    OutcomeUnknownError,
    ResultUnreadableError,
    SignalRefusedError,
    UnansweredError,
)
from pidurable.errors._operator import (
    DocumentTooNewError,
    ExportFileError,
    MigrationError,
    NotAStoreError,
    StorageAccessError,
    StorageCorruptError,
    StorageTooNewError,
)
from pidurable.errors._root import (
    InternalError,
    PidurableError,
    check,
    show as show,
)

__all__ = [
    "AbortRequestedError",
    "AlreadyDecidedError",
    "AnswerGoneError",
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

# Here is where programs find them, stored outcomes name them and pickles look for them, wherever
# in this package they are written down.
for _name in __all__:
    globals()[_name].__module__ = __name__
