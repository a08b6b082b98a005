"""A storage that hands every call to another one, through one place where wrappers step in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pidurable.storage import (
    Batch,
    CommandBox,
    CommandPlace,
    CommandRow,
    ConversationRow,
    DocumentRow,
    EntryRow,
    Head,
    HolderClaim,
    HolderRecord,
    RecordKind,
    RemovalRow,
    RevisionRow,
    SignalRow,
    StartRow,
    Storage,
    StubRow,
    SubmissionRow,
    TakenCommand,
    TaskRow,
)

ResultT = TypeVar("ResultT")


class ForwardingStorage:
    """The base of the wrappers here: `_call` sees the name of each call and what it would do."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner

    def _call(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        raise NotImplementedError(name)

    @property
    def inner(self) -> Storage:
        """The storage that the calls go to."""
        return self._inner

    @property
    def store(self) -> str:
        """What messages call this store: the name that the inner storage has."""
        return self._inner.store

    @property
    def command_box(self) -> CommandBox:
        """Commands from outside; its calls go through the same place, as `command_box.take`."""
        return _ForwardingBox(self)

    def acquire(self, claim: HolderClaim, *, takeover: bool) -> Head:
        return self._call("acquire", lambda: self._inner.acquire(claim, takeover=takeover))

    def heartbeat(self, epoch: int, at_us: int) -> None:
        return self._call("heartbeat", lambda: self._inner.heartbeat(epoch, at_us))

    def holder(self) -> HolderRecord | None:
        return self._call("holder", lambda: self._inner.holder())

    def release(self, epoch: int) -> None:
        return self._call("release", lambda: self._inner.release(epoch))

    def close(self) -> None:
        return self._call("close", lambda: self._inner.close())

    def apply(self, batch: Batch) -> None:
        return self._call("apply", lambda: self._inner.apply(batch))

    def checkpoint(self, *, truncate: bool = False) -> int:
        return self._call("checkpoint", lambda: self._inner.checkpoint(truncate=truncate))

    def reclaim(self, pages: int) -> int:
        return self._call("reclaim", lambda: self._inner.reclaim(pages))

    def scan(
        self, kind: RecordKind, *, after: tuple[Any, ...] | None = None, limit: int = 1000
    ) -> list[tuple[Any, ...]]:
        return self._call("scan", lambda: self._inner.scan(kind, after=after, limit=limit))

    def command(self, id: str) -> CommandRow | None:
        return self._call("command", lambda: self._inner.command(id))

    def head(self) -> Head:
        return self._call("head", lambda: self._inner.head())

    def conversation(self, id: int) -> ConversationRow | None:
        return self._call("conversation", lambda: self._inner.conversation(id))

    def conversation_by_key(self, owner: int | None, key: str) -> ConversationRow | None:
        return self._call(
            "conversation_by_key", lambda: self._inner.conversation_by_key(owner, key)
        )

    def conversations_by_owner(
        self, owner: int | None, *, after: int = 0, limit: int = 1000
    ) -> list[ConversationRow]:
        return self._call(
            "conversations_by_owner",
            lambda: self._inner.conversations_by_owner(owner, after=after, limit=limit),
        )

    def conversation_owners(self, tasks: Sequence[int]) -> list[int]:
        return self._call("conversation_owners", lambda: self._inner.conversation_owners(tasks))

    def entry(self, id: int) -> EntryRow | None:
        return self._call("entry", lambda: self._inner.entry(id))

    def entries(
        self,
        conversation: int,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[EntryRow]:
        return self._call(
            "entries",
            lambda: self._inner.entries(
                conversation, after=after, before=before, limit=limit, reverse=reverse
            ),
        )

    def last_head(self, conversation: int, *, before: int | None = None) -> EntryRow | None:
        return self._call("last_head", lambda: self._inner.last_head(conversation, before=before))

    def task(self, id: int) -> TaskRow | None:
        return self._call("task", lambda: self._inner.task(id))

    def task_by_key(self, owner: int | None, conversation: int, key: str) -> TaskRow | None:
        return self._call("task_by_key", lambda: self._inner.task_by_key(owner, conversation, key))

    def tasks_by_owner(self, owner: int, *, after: int = 0, limit: int = 1000) -> list[TaskRow]:
        return self._call(
            "tasks_by_owner", lambda: self._inner.tasks_by_owner(owner, after=after, limit=limit)
        )

    def keyed_tasks(self, owner: int) -> list[tuple[str, int]]:
        return self._call("keyed_tasks", lambda: self._inner.keyed_tasks(owner))

    def live_tasks(self, *, after: int = 0, limit: int = 10_000) -> list[TaskRow]:
        return self._call("live_tasks", lambda: self._inner.live_tasks(after=after, limit=limit))

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
        return self._call(
            "tasks",
            lambda: self._inner.tasks(
                conversation=conversation,
                kind=kind,
                status=status,
                after=after,
                limit=limit,
                reverse=reverse,
            ),
        )

    def task_input(self, task: int) -> str | None:
        return self._call("task_input", lambda: self._inner.task_input(task))

    def task_checkpoint(self, task: int) -> tuple[str, str] | None:
        return self._call("task_checkpoint", lambda: self._inner.task_checkpoint(task))

    def checkpoint_at(self, task: int) -> tuple[str, int] | None:
        return self._call("checkpoint_at", lambda: self._inner.checkpoint_at(task))

    def task_phases(self, tasks: Sequence[int]) -> list[tuple[int, str]]:
        return self._call("task_phases", lambda: self._inner.task_phases(tasks))

    def task_wait(self, task: int) -> str | None:
        return self._call("task_wait", lambda: self._inner.task_wait(task))

    def waits(self, *, after: int = 0, limit: int = 10_000) -> list[tuple[int, str]]:
        return self._call("waits", lambda: self._inner.waits(after=after, limit=limit))

    def task_outcome(self, task: int) -> str | None:
        return self._call("task_outcome", lambda: self._inner.task_outcome(task))

    def task_memos(self, task: int) -> list[tuple[str, str]]:
        return self._call("task_memos", lambda: self._inner.task_memos(task))

    def task_starts(self, tasks: Sequence[int]) -> list[StartRow]:
        return self._call("task_starts", lambda: self._inner.task_starts(tasks))

    def signals(self, task: int, *, limit: int = 1000) -> list[SignalRow]:
        return self._call("signals", lambda: self._inner.signals(task, limit=limit))

    def live_signals(self) -> list[tuple[int, int]]:
        return self._call("live_signals", lambda: self._inner.live_signals())

    def signal_by_key(self, task: int, key: str) -> int | None:
        return self._call("signal_by_key", lambda: self._inner.signal_by_key(task, key))

    def submission(self, id: int) -> SubmissionRow | None:
        return self._call("submission", lambda: self._inner.submission(id))

    def submission_by_request(self, conversation: int, request_id: str) -> SubmissionRow | None:
        return self._call(
            "submission_by_request",
            lambda: self._inner.submission_by_request(conversation, request_id),
        )

    def open_submissions(self, conversation: int) -> list[SubmissionRow]:
        return self._call("open_submissions", lambda: self._inner.open_submissions(conversation))

    def submissions_of(
        self, conversation: int, *, after: int = 0, limit: int = 1000
    ) -> list[SubmissionRow]:
        return self._call(
            "submissions_of",
            lambda: self._inner.submissions_of(conversation, after=after, limit=limit),
        )

    def document(self, name: str, scope: int, scope_id: int, key: str) -> DocumentRow | None:
        return self._call("document", lambda: self._inner.document(name, scope, scope_id, key))

    def documents(self, scope: int, scope_id: int) -> list[DocumentRow]:
        return self._call("documents", lambda: self._inner.documents(scope, scope_id))

    def documents_ever(self, scope: int, scope_id: int) -> list[DocumentRow]:
        return self._call("documents_ever", lambda: self._inner.documents_ever(scope, scope_id))

    def document_as_of(
        self, conversation: int, name: str, key: str, *, seq: int
    ) -> DocumentRow | None:
        return self._call(
            "document_as_of",
            lambda: self._inner.document_as_of(conversation, name, key, seq=seq),
        )

    def documents_as_of(self, conversation: int, *, seq: int) -> list[DocumentRow]:
        return self._call(
            "documents_as_of", lambda: self._inner.documents_as_of(conversation, seq=seq)
        )

    def revisions(self, document: int, *, upto_seq: int | None = None) -> list[RevisionRow]:
        return self._call("revisions", lambda: self._inner.revisions(document, upto_seq=upto_seq))

    def blob(self, sha256: str) -> bytes | None:
        return self._call("blob", lambda: self._inner.blob(sha256))

    def has_blob(self, sha256: str) -> bool:
        return self._call("has_blob", lambda: self._inner.has_blob(sha256))

    def blob_sizes(self, *, after: str = "", limit: int = 1000) -> list[tuple[str, int]]:
        """Return names and sizes of blobs."""
        return self._call("blob_sizes", lambda: self._inner.blob_sizes(after=after, limit=limit))

    def ended_roots(self, *, before_us: int, after: int, upto: int) -> list[TaskRow]:
        return self._call(
            "ended_roots",
            lambda: self._inner.ended_roots(before_us=before_us, after=after, upto=upto),
        )

    def forks_of(self, conversation: int, *, after: int = 0, limit: int = 1000) -> list[int]:
        return self._call(
            "forks_of", lambda: self._inner.forks_of(conversation, after=after, limit=limit)
        )

    def stub(self, kind: str, place: int, key: str) -> StubRow | None:
        return self._call("stub", lambda: self._inner.stub(kind, place, key))

    def stub_by_id(self, id: int) -> StubRow | None:
        return self._call("stub_by_id", lambda: self._inner.stub_by_id(id))

    def removals(self) -> list[RemovalRow]:
        return self._call("removals", lambda: self._inner.removals())


class _ForwardingBox:
    """The box of the inner storage, whichever that is at the time of a call."""

    def __init__(self, storage: ForwardingStorage) -> None:
        self._storage = storage

    def _call(self, name: str, call: Callable[[CommandBox], ResultT]) -> ResultT:
        storage = self._storage
        return storage._call(f"command_box.{name}", lambda: call(storage.inner.command_box))

    def hand_in(self, id: str, text: str) -> None:
        return self._call("hand_in", lambda box: box.hand_in(id, text))

    def withdraw(self, id: str) -> bool:
        return self._call("withdraw", lambda box: box.withdraw(id))

    def find(self, id: str) -> CommandPlace | None:
        return self._call("find", lambda box: box.find(id))

    def has_news(self) -> bool:
        return self._call("has_news", lambda box: box.has_news())

    def take(self, *, limit: int = 1_000) -> list[TakenCommand]:
        return self._call("take", lambda box: box.take(limit=limit))

    def forget(self, name: str) -> None:
        return self._call("forget", lambda box: box.forget(name))

    def set_aside(self, name: str) -> str:
        return self._call("set_aside", lambda box: box.set_aside(name))


BOX_CALLS = frozenset(
    f"command_box.{name}" for name in vars(_ForwardingBox) if not name.startswith("_")
)
