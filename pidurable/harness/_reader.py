"""The reader: committed state of a store, beside a running holder or after its death.

It needs no ownership and writes nothing, not even a lock. Every call reads what is committed at
that moment: two calls may see two states, and one call that reads many rows (`tree`) may straddle
a commit, so that a child can be missing whose owner is there. Nothing it shows was not durable.

Stored data that cannot be decoded is reported as damage (`StorageCorruptError`) with the thing it
belongs to, and never as absent.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast, final

import attrs
import trio

from pidurable.agent._grants import Grant, grants_addresses, stored_grants
from pidurable.agent._permissions import (
    PermissionRequest,
    is_below,
    stored_open_requests,
    stored_request,
)
from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    StorageCorruptError,
    UnknownTaskError,
    show,
)
from pidurable.harness._events import Event
from pidurable.harness._listing import ListedConversation, listed_conversations
from pidurable.harness._looked_events import LookedEvents
from pidurable.harness._reader_tree import TreeRow, live_rows, read_tree
from pidurable.harness._stored_facts import HolderState, StoredFacts
from pidurable.harness._usage import stored_usage
from pidurable.records._codec import Codec
from pidurable.records._entries import Conversation, Entry
from pidurable.records._limits import VIEW_PAGE_ENTRIES, Settings
from pidurable.records._messages import Usage
from pidurable.records._submissions import SubmissionRecord
from pidurable.records._tasks import Status, TaskRecord
from pidurable.session import _documents
from pidurable.session._blobs import with_blobs
from pidurable.session._documents import Address
from pidurable.session._forks import lineage
from pidurable.session._rows import conversation_of, entry_of, submission_of
from pidurable.session._seams import Blocking, Clock, SystemClock, ThreadBlocking
from pidurable.storage import (
    ConversationRow,
    EntryRow,
    Head,
    HolderClaim,
    HolderRecord,
    SqliteStorage,
    TaskRow,
)
from pidurable.storage._holder import Verdict, heartbeat_age
from pidurable.tasks._explain import Explanation, explain
from pidurable.tasks._gc_report import GcReport, cutoff, make_report, to_us
from pidurable.tasks._gc_survey import Survey
from pidurable.tasks._task_record import task_record

__all__ = ["HolderView", "Reader", "TreeRow", "open_reader"]

T = TypeVar("T")

ID_MAX = 2**63 - 1
ROWS_MAX = 2_000
_GC_STEPS = 1_000
"""Steps of a dry run between two moments at which it can be cancelled."""
_CONVERSATION_SCOPE = 1
LOOK_SHARE = 0.2
"""Of the time, most that following a conversation reads."""


@attrs.frozen(kw_only=True)
class HolderView:
    """Who holds a session, as far as it can be told from here."""

    record: HolderRecord
    state: HolderState
    """`live`: it runs. `silent`: it may hang, or nobody can say. `dead`: its process is gone.
    `released`: it closed the store."""
    heartbeat_age: float
    """Seconds since the last sign of life, by this machine's clock."""


@asynccontextmanager
async def open_reader(
    store: str | os.PathLike[str], *, blocking: Blocking | None = None, clock: Clock | None = None
) -> AsyncIterator[Reader]:
    """Open a store to look at it, without holding it.

    Works beside a running holder and on a store that nobody holds. Nothing is created or changed.

    Args:
        store: The path of the store.
        blocking: Where reads run; threads where None.
        clock: Tells the age of the last heartbeat.

    Raises:
        StorageAccessError: There is no such store, or this user may not read it.
        NotAStoreError: The path holds something else.
        StorageCorruptError: It is damaged.
        StorageTooNewError: A newer version wrote it.
    """
    blocking = blocking or ThreadBlocking()
    async with open_read_only(store, blocking) as storage:
        yield Reader(storage, blocking=blocking, clock=clock or SystemClock())


@asynccontextmanager
async def open_read_only(
    store: str | os.PathLike[str], blocking: Blocking
) -> AsyncIterator[SqliteStorage]:
    """Open a store for looking, in a thread; see `open_reader` for what it raises."""

    def open_storage() -> SqliteStorage:
        return SqliteStorage(store, create=False, read_only=True)

    storage = await blocking.run(open_storage)
    try:
        yield storage
    finally:
        storage.close()


@final
class Reader:
    """A store that is open for looking. Made by `open_reader`."""

    def __init__(self, storage: SqliteStorage, *, blocking: Blocking, clock: Clock) -> None:
        # The same storage in front of which large values are found in their blobs.
        self._storage = cast("SqliteStorage", with_blobs(storage))
        self._raw = storage
        self._blocking = blocking
        self._clock = clock
        self._codec = Codec()

    @property
    def store(self) -> str:
        """The path of the store, with links resolved."""
        return self._storage.store

    async def _read(self, what: str, read: Callable[[], T]) -> T:
        """Run a read in a thread; what cannot be decoded there is damage, and is named."""
        try:
            return await self._blocking.run(read)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, InvalidArgumentError):
                raise
            raise StorageCorruptError(
                self.store, f"{what} cannot be decoded ({type(error).__name__}: {error})"
            ) from error

    # --- the session ---------------------------------------------------------------------

    async def head(self) -> Head:
        """Return the number of the last commit and what identifies the store."""
        return await self._read("the session row", self._storage.head)

    async def holder(self) -> HolderView | None:
        """Tell who holds the session; None if nobody ever did.

        Asking tries the holder's lock for an instant; a process that opens the store in that
        instant may be told that it is held.
        """
        claim = HolderClaim(
            holder_id="reader",
            host=socket.gethostname(),
            pid=os.getpid(),
            at_us=self._clock.now_us(),
            lease_seconds=Settings().lease_seconds,
        )
        record, verdict = await self._read(
            "the holder record", lambda: self._storage.look_at_holder(claim)
        )
        if record is None:
            return None
        states: dict[Verdict, HolderState] = {
            Verdict.NONE: "released",
            Verdict.DEAD: "dead",
            Verdict.HUNG: "silent",
            Verdict.LIVE: "live",
        }
        return HolderView(
            record=record, state=states[verdict], heartbeat_age=heartbeat_age(record, claim)
        )

    async def removals(self) -> list[int]:
        """Return the roots of trees whose removal was begun and is not finished."""
        rows = await self._read("the removals", self._storage.removals)
        return [row.root for row in rows]

    async def gc(self, *, older_than: timedelta, keep_outcomes: bool = False) -> GcReport:
        """Tell what `Harness.gc` would remove now; nothing is removed.

        The same figures, if nothing changes meanwhile. It reads all of the ended work, and looks
        through every text if there are blobs.

        Args:
            older_than: How long ago the last task of a tree must have ended.
            keep_outcomes: The roots would stay with their outcomes.

        Raises:
            InvalidArgumentError: `older_than` is negative, or no timedelta.
            StorageCorruptError: What a task waits for cannot be read.
        """
        now_us = self._clock.now_us()
        before = cutoff(now_us, older_than)
        survey = Survey(self._raw, now_us=now_us, before_us=to_us(before), keep=keep_outcomes)
        steps = survey.steps()

        def walk() -> bool:
            return sum(1 for _ in itertools.islice(steps, _GC_STEPS)) == _GC_STEPS

        while await self._read("the ended work", walk):
            pass
        return make_report(survey.tally, dry_run=True, before=before, kept=survey.kept)

    # --- tasks ---------------------------------------------------------------------------

    async def task(self, task_id: int) -> TaskRecord:
        """Return all that is stored of a task.

        Raises:
            NotFoundError: This session has no such task.
        """

        def read() -> TaskRecord | None:
            row = self._storage.task(task_id) if _is_id(task_id) else None
            return None if row is None else task_record(self._storage, row)

        found = await self._read(f"task {task_id}", read)
        if found is None:
            raise NotFoundError("task", task_id, _LIST_HINT)
        return found

    async def explain(self, task_id: int) -> Explanation:
        """Say in one line why a task is where it is, from what is stored.

        As `Harness.explain`, but nobody outside sees the holder's queues: of a task whose turn is
        to come it says who holds the session (`held_elsewhere`), or that nobody does
        (`not_started`), and of a running one, in which process.

        Raises:
            NotFoundError: This session has no such task.
        """
        holder = await self.holder()

        def read() -> Explanation:
            facts = StoredFacts(
                self._storage,
                self._clock.now_us(),
                None if holder is None else holder.record,
                "released" if holder is None else holder.state,
            )
            return explain(facts, task_id)

        try:
            return await self._read(f"task {task_id}", read)
        except UnknownTaskError as error:
            raise NotFoundError("task", task_id, _LIST_HINT) from error

    async def tasks(
        self,
        *,
        conversation: int | None = None,
        kind: str | None = None,
        status: Status | None = None,
        live: bool = False,
        limit: int = 1_000,
    ) -> list[TaskRecord]:
        """Return the newest tasks that match, oldest first.

        Args:
            conversation: Only those of this conversation.
            kind: Only those of this definition.
            status: Only those with this status.
            live: Only those that have not ended; looks at live work only, however long the history.
            limit: Most tasks to return.

        Raises:
            InvalidArgumentError: `limit` is below 1.
            NotFoundError: This session has no such conversation.
        """
        most = _most(limit)
        if conversation is not None:
            await self.conversation(conversation)

        def read() -> list[TaskRecord]:
            if live:
                rows = [
                    row
                    for row in live_rows(self._storage)
                    if conversation in (None, row.conversation)
                    and kind in (None, row.kind)
                    and status in (None, row.status)
                ][-most:]
            else:
                rows = self._storage.tasks(
                    conversation=conversation,
                    kind=kind,
                    status=None if status is None else int(status),
                    limit=most,
                    reverse=True,
                )[::-1]
            return [task_record(self._storage, row) for row in rows]

        return await self._read("the task list", read)

    async def live_rows(self) -> list[TaskRow]:
        """Return the rows of all live tasks, by id, without what belongs to them."""
        return await self._read("the live tasks", lambda: live_rows(self._storage))

    async def children(self, owner: int) -> list[TreeRow]:
        """Return what a task or a conversation owns directly, live and ended, by id."""
        return [attrs.evolve(row, depth=0) for row in await self.tree(owner) if row.depth == 1]

    async def tree(self, root: int | None = None, *, limit: int = ROWS_MAX) -> list[TreeRow]:
        """Return the tree of tasks and conversations, owners before what they own.

        Args:
            root: A task or conversation; None for everything. Its own row comes first.
            limit: About how many tasks to look at: the newest ones, and every live one. What is
                owned by something that was left out stands at the top.

        Raises:
            NotFoundError: There is no task and no conversation of this id.
        """

        def read() -> list[TreeRow] | None:
            if root is not None and not _is_id(root):
                return None
            return read_tree(self._storage, root, limit=limit)

        found = await self._read("the task tree", read)
        if found is None:
            assert root is not None
            raise NotFoundError("task or conversation", root, _LIST_HINT)
        return found

    # --- conversations -------------------------------------------------------------------

    async def conversations(self) -> list[Conversation]:
        """Return the conversations that no task owns, oldest first; the first one is the root."""

        def read() -> list[ConversationRow]:
            rows: list[ConversationRow] = []
            while True:
                page = self._storage.conversations_by_owner(None, after=rows[-1].id if rows else 0)
                rows += page
                if len(page) < 1_000:
                    return rows

        rows = await self._read("the list of conversations", read)
        return [conversation_of(row) for row in rows]

    async def list_conversations(
        self, *, busy: bool = False, limit: int = 1_000
    ) -> list[ListedConversation]:
        """Return where conversations stand, owned ones too: the newest ones, oldest first.

        Args:
            busy: Only those in which a run goes on, or is held up.
            limit: Most conversations to return.

        Raises:
            InvalidArgumentError: `limit` is below 1.
        """
        return await self._read(
            "the list of conversations",
            lambda: listed_conversations(self._storage, busy=busy, limit=limit),
        )

    @asynccontextmanager
    async def events(
        self, conversation_id: int, *, interval: float = 0.1
    ) -> AsyncIterator[AsyncIterator[tuple[Event, ...]]]:
        """Follow a conversation as events: a snapshot first, then a batch for each look.

        As `Conversation.events`, for whoever does not hold the session: a batch tells of all
        commits between two looks, so what began and ended between them is told by its entries
        alone, and of failed tasks nothing is told. No entry is left out. The iteration goes on when
        the holder ends or changes.

        Args:
            conversation_id: The conversation.
            interval: Seconds between two looks; longer where a look takes long.

        Raises:
            InvalidArgumentError: `interval` is no positive number.
            NotFoundError: This session has no such conversation; out of the iteration, if it was
                removed.
        """
        if isinstance(interval, bool) or not isinstance(interval, int | float) or not interval > 0:
            problem = "expected a number of seconds above 0"
            raise InvalidArgumentError("interval", problem, show(interval))
        newest = await self.entries(conversation_id)
        looked = LookedEvents(self._storage, conversation_id, newest)
        async with aclosing(self._batches(looked, conversation_id, interval)) as batches:
            yield batches

    async def _batches(
        self, looked: LookedEvents, conversation_id: int, interval: float
    ) -> AsyncGenerator[tuple[Event, ...], None]:
        while True:
            began = trio.current_time()
            try:
                batch = await self._read(f"conversation {conversation_id}", looked.look)
            except NotFoundError as error:
                raise NotFoundError(error.kind, error.id, _TREE_HINT) from error
            took = trio.current_time() - began
            if batch:
                yield batch
            await trio.sleep(max(interval, took / LOOK_SHARE))

    async def conversation(self, conversation_id: int) -> Conversation:
        """Return one conversation.

        Raises:
            NotFoundError: This session has no such conversation.
        """

        def read() -> ConversationRow | None:
            known = _is_id(conversation_id)
            return self._storage.conversation(conversation_id) if known else None

        row = await self._read(f"conversation {conversation_id}", read)
        if row is None:
            raise NotFoundError("conversation", conversation_id, _TREE_HINT)
        return conversation_of(row)

    def _stored_conversation(self, conversation_id: int) -> Conversation:
        row = self._storage.conversation(conversation_id)
        if row is None:
            raise NotFoundError("conversation", conversation_id, _TREE_HINT)
        return conversation_of(row)

    async def entries(
        self,
        conversation_id: int,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = VIEW_PAGE_ENTRIES,
    ) -> list[Entry]:
        """Return the newest entries of a history, oldest first, those of its ancestors included.

        Args:
            conversation_id: A conversation, also a fork.
            after: Only entries with a larger id.
            before: Only entries with a smaller id; pass the first id of a page for the page before.
            limit: Most entries to return.

        Raises:
            NotFoundError: This session has no such conversation.
        """
        await self.conversation(conversation_id)
        most = _most(limit)

        def read() -> list[Entry]:
            rows: list[EntryRow] = []
            for member, cut in lineage(conversation_id, self._stored_conversation):
                bound = min((b for b in (cut, before) if b is not None), default=None)
                rows += self._storage.entries(
                    member, after=after, before=bound, limit=most - len(rows), reverse=True
                )
                if len(rows) >= most:
                    break
            return [self._entry(row) for row in reversed(rows)]

        return await self._read(f"the history of conversation {conversation_id}", read)

    def _entry(self, row: EntryRow) -> Entry:
        try:
            return entry_of(row, self._codec, self._storage)
        except (ValueError, TypeError, KeyError) as error:
            raise StorageCorruptError(
                self.store, f"entry {row.id} cannot be decoded ({type(error).__name__}: {error})"
            ) from error

    async def usage(self, *, below: int | None = None) -> dict[str, dict[str, Usage]]:
        """Return what was spent: under `models` by model, under `tools` by tool.

        Args:
            below: Only what this task or conversation has spent, with all below it.

        Raises:
            NotFoundError: This session has no such task or conversation.
        """
        try:
            return await self._read("the usage", lambda: stored_usage(self._storage, below))
        except NotFoundError as error:
            raise NotFoundError(error.kind, error.id, _TREE_HINT) from error

    # --- submissions and documents -------------------------------------------------------

    async def submission(self, submission_id: int) -> SubmissionRecord:
        """Return one submission.

        Raises:
            NotFoundError: This session has no such submission.
        """

        def read() -> SubmissionRecord | None:
            row = self._storage.submission(submission_id) if _is_id(submission_id) else None
            return None if row is None else submission_of(row)

        found = await self._read(f"submission {submission_id}", read)
        if found is None:
            raise NotFoundError("submission", submission_id)
        return found

    async def find_request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        """Return the submission that a conversation has under a request id, or None."""

        def read() -> SubmissionRecord | None:
            row = self._storage.submission_by_request(conversation_id, request_id)
            return None if row is None else submission_of(row)

        return await self._read(f"the request {request_id!r}", read)

    async def open_submissions(self, conversation_id: int) -> list[SubmissionRecord]:
        """Return what a conversation was given and has not answered, by id."""
        return await self._read(
            f"the submissions of conversation {conversation_id}",
            lambda: [submission_of(row) for row in self._storage.open_submissions(conversation_id)],
        )

    async def permissions(self, below: int | None = None) -> list[PermissionRequest]:
        """Return the open permission requests, oldest first.

        Args:
            below: Only those of this task or conversation, and of what is below it.
        """
        found = await self._read(
            "the permission requests", lambda: stored_open_requests(self._storage)
        )
        return [each for each in found if below is None or is_below(each, below)]

    async def permission(self, request_id: int) -> PermissionRequest:
        """Return a permission request, open or not.

        Raises:
            NotFoundError: This session has no such request.
        """
        found = await self._read(
            f"permission request {request_id}",
            lambda: stored_request(self._storage, request_id),
        )
        if found is None:
            raise NotFoundError("permission request", request_id)
        return found

    async def grants(self) -> list[Grant]:
        """Return what was allowed for later calls, of all principals, oldest first."""

        def read() -> list[Grant]:
            states = [
                _documents.load(self._storage, each) for each in grants_addresses(self._storage)
            ]
            values = [None if state is None else state.value for state in states]
            return stored_grants(values, self._clock.now_us())

        return await self._read("the grants", read)

    async def document(self, name: str, conversation_id: int, *, key: str = "") -> Any:
        """Return the JSON of a conversation's document; None where there is none."""
        address = Address(name, _CONVERSATION_SCOPE, conversation_id, key)

        def read() -> Any:
            state = _documents.load(self._storage, address)
            return None if state is None else state.value

        return await self._read(f"document {name!r} of conversation {conversation_id}", read)

    async def live(self, conversation_id: int) -> Any:
        """Return `pi.live` of a conversation as JSON (run, partial answer, calls), or None."""
        return await self.document("pi.live", conversation_id)


_LIST_HINT = "`pidurable task list` shows what there is."
_TREE_HINT = "`pidurable task tree` shows what there is."


def _most(limit: int) -> int:
    """A limit as the storage takes it: more than there can ever be is all there is."""
    if limit < 1:
        raise InvalidArgumentError("limit", "expected at least 1", repr(limit))
    return min(limit, ID_MAX)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and 0 < value <= ID_MAX
