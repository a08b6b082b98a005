"""Storage backends of one session: the contract, memory and SQLite."""

from pidurable.storage._contract import (
    RECORDS as RECORDS,
    Batch as Batch,
    CommandBox as CommandBox,
    CommandPlace as CommandPlace,
    CommandRow as CommandRow,
    ConversationRow as ConversationRow,
    DocumentRow as DocumentRow,
    EntryRow as EntryRow,
    Head as Head,
    HolderClaim as HolderClaim,
    HolderRecord as HolderRecord,
    Op as Op,
    RecordKind as RecordKind,
    RecordShape as RecordShape,
    RemovalRow as RemovalRow,
    RevisionRow as RevisionRow,
    SignalRow as SignalRow,
    StartRow as StartRow,
    Storage as Storage,
    StubRow as StubRow,
    SubmissionRow as SubmissionRow,
    SubmissionStateRow as SubmissionStateRow,
    TakenCommand as TakenCommand,
    TaskRow as TaskRow,
    TaskStateRow as TaskStateRow,
)
from pidurable.storage._import import MakesStorage as MakesStorage
from pidurable.storage._memory import MemoryStorage as MemoryStorage
from pidurable.storage._sqlite import SqliteStorage as SqliteStorage
