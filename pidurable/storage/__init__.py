"""Storage backends of one session: the contract, memory and SQLite."""

from pidurable.storage._contract import (
    Batch as Batch,
    ConversationRow as ConversationRow,
    DocumentRow as DocumentRow,
    EntryRow as EntryRow,
    Head as Head,
    HolderClaim as HolderClaim,
    HolderRecord as HolderRecord,
    Op as Op,
    RevisionRow as RevisionRow,
    SignalRow as SignalRow,
    StartRow as StartRow,
    Storage as Storage,
    SubmissionRow as SubmissionRow,
    SubmissionStateRow as SubmissionStateRow,
    TaskRow as TaskRow,
    TaskStateRow as TaskStateRow,
)
from pidurable.storage._memory import MemoryStorage as MemoryStorage
from pidurable.storage._sqlite import SqliteStorage as SqliteStorage
