"""The session: one line of commits over one storage, with what is published from it.

What readers see (`published`) and what a body sees (`staged`: published plus the bodies before it
in the same batch) are kept apart: a batch that fails drops its overlay and leaves no trace. What
stands on the session takes part as a `Participant` and in no other way.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import trio

from pidurable.errors import (
    HolderLostError,
    NotFoundError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.records import _codec, _json
from pidurable.records._codec import Codec
from pidurable.records._entries import Conversation, Entry
from pidurable.records._limits import Settings
from pidurable.records._submissions import SubmissionRecord
from pidurable.session import _documents, _transcript
from pidurable.session._documents import Address, DocState
from pidurable.session._line import CommitLine
from pidurable.session._seams import (
    Blocking,
    Clock,
    Failpoints,
    Randomness,
    logger,
)
from pidurable.session._transaction import Transaction
from pidurable.storage import (
    Batch,
    ConversationRow,
    EntryRow,
    HolderClaim,
    Op,
    Storage,
    SubmissionRow,
)

T = TypeVar("T")
DocT = TypeVar("DocT")

_CONVERSATIONS_CACHED = 10_000
_DOCUMENTS_CACHED = 4_096
_RANGES_CACHED = 1_000
_UNCLEAN_GAP = 2**20
_CHECKPOINT_ROWS = 2_000
_WAL_PAGES_MAX = 8_000


class Participant(Protocol):
    """What stands on the session: the scheduler, the agent layer's settlement, watches."""

    def check_staged(self, tx: Any) -> None:
        """On the line after a body: may refuse the commit (by raising) or add writes to it."""
        ...

    def joined(self, tx: Any) -> None:
        """The commit was accepted: later bodies of this batch see it."""
        ...

    def committed(self, tx: Any) -> None:
        """The commit is durable and published. Synchronous, must not fail."""
        ...

    def reverted(self) -> None:
        """The batch failed: drop what was staged."""
        ...

    def poisoned(self, error: SessionPoisonedError) -> None:
        """The session serves nothing more."""
        ...

    def refusing(self, refusing: bool) -> None:
        """The storage has begun or stopped to refuse."""
        ...


def conversation_of(row: ConversationRow) -> Conversation:
    return Conversation(
        id=row.id,
        uuid=row.uuid,
        parent=row.parent,
        parent_entry=row.parent_entry,
        owner=row.owner,
        key=row.key,
        principal=row.principal,
        created_us=row.created_us,
    )


def entry_of(row: EntryRow, codec: Codec) -> Entry:
    return Entry(
        id=row.id,
        conversation_id=row.conversation,
        seq=row.seq,
        kind=row.kind,
        messages=(
            () if row.messages is None else _codec.decode_messages(_json.loads_stored(row.messages))
        ),
        data=None if row.data is None else _json.loads_stored(row.data),
        head=row.head,
        edits=() if row.edits is None else _codec.decode_edits(_json.loads_stored(row.edits)),
        by_task=row.by_task,
        at_us=row.at_us,
        decode=codec.decode,
    )


def submission_of(row: SubmissionRow) -> SubmissionRecord:
    return SubmissionRecord(
        id=row.id,
        conversation_id=row.conversation,
        kind=row.kind,  # type: ignore[arg-type]
        when_busy=row.when_busy,  # type: ignore[arg-type]
        request_id=row.request_id,
        digest=row.digest,
        content=_json.loads_stored(row.content),
        created_us=row.created_us,
        status=row.status,  # type: ignore[arg-type]
        entry=row.entry,
        run=row.run,
        answer=row.answer,
        reason=row.reason,
        detail=row.detail,
        ended_us=row.ended_us,
    )


class Session:
    """An open session. Made by `open_session`."""

    def __init__(
        self,
        storage: Storage,
        *,
        settings: Settings,
        clock: Clock,
        blocking: Blocking,
        randomness: Randomness,
        failpoints: Failpoints,
        claim: HolderClaim,
        takeover: bool,
        durability: str,
        inline: bool,
        codec: Codec,
    ) -> None:
        self.storage = storage
        self.settings = settings
        self.clock = clock
        self.blocking = blocking
        self.randomness = randomness
        self.failpoints = failpoints
        self.codec = codec
        self.participants: list[Participant] = []
        head = storage.acquire(claim, takeover=takeover)
        self.uuid = head.uuid
        self.epoch = head.epoch
        self.clean = head.clean
        gap = 0 if head.clean else _UNCLEAN_GAP
        self._writer = blocking.worker("writer")
        self.line = CommitLine(
            storage,
            writer=self._writer,
            adopter=self,
            settings=settings,
            clock=clock,
            failpoints=failpoints,
            epoch=head.epoch,
            seq=head.seq + gap,
            next_id=head.next_id + (gap if durability == "process" else 0),
            inline=inline,
        )
        self._conversations: OrderedDict[int, Conversation] = OrderedDict()
        self._docs: OrderedDict[Address, DocState | None] = OrderedDict()
        self._ranges: OrderedDict[int, list[Entry]] = OrderedDict()
        self._building: dict[int, list[Entry]] = {}
        self._staged: list[Transaction] = []
        self.staged_unique: dict[tuple[Any, ...], Any] = {}
        self._staged_docs: dict[Address, DocState | None] = {}
        self._refusing = False
        self._confirmed_at = trio.current_time()
        self._rows_since_checkpoint = 0
        self._checkpoint_due = trio.Event()
        self.owner_conversation: Callable[[int], int | None] = lambda _: None
        """Set by the tasks layer: the conversation of a task."""

    # --- commits -------------------------------------------------------------------------

    async def run(self, tx: Transaction, body: Callable[[Any], T]) -> T:
        """Run a body that awaits nothing as one commit."""
        return await self.line.run_sync(tx, body)

    def transaction(self, *, flush: bool = True, by_task: int | None = None) -> Transaction:
        return Transaction(self, flush=flush, by_task=by_task)

    # --- what a body sees ----------------------------------------------------------------

    def staged_conversation(self, conversation_id: int) -> Conversation:
        for tx in self._staged:
            for made in tx.conversations:
                if made.id == conversation_id:
                    return made
        return self.conversation(conversation_id)

    def staged_submission(self, submission_id: int) -> SubmissionRecord | None:
        for tx in reversed(self._staged):
            found = tx.submissions.get(submission_id)
            if found is not None:
                return found
        row = self.storage.submission(submission_id)
        return None if row is None else submission_of(row)

    def staged_open_submissions(self, conversation_id: int) -> dict[int, SubmissionRecord]:
        """Submissions of a conversation that are queued or placed, as staged so far, by id."""
        rows = self.storage.open_submissions(conversation_id)
        found = {row.id: submission_of(row) for row in rows}
        for tx in self._staged:
            for record in tx.submissions.values():
                if record.conversation_id == conversation_id:
                    found[record.id] = record
        return found

    def staged_entry(self, entry_id: int) -> Entry | None:
        for tx in self._staged:
            for entry in tx.entries:
                if entry.id == entry_id:
                    return entry
        return None

    def staged_doc(self, address: Address) -> DocState | None:
        if address in self._staged_docs:
            return self._staged_docs[address]
        return self.doc(address)

    def staged_docs_of(self, scope: int, scope_id: int) -> list[Address]:
        """Addresses of the living documents of a scope."""
        found = {
            Address(row.name, row.scope, row.scope_id, row.key)
            for row in self.storage.documents(scope, scope_id)
        }
        for address, state in self._staged_docs.items():
            if address.scope == scope and address.scope_id == scope_id:
                (found.discard if state is None else found.add)(address)
        return sorted(found)

    def owner_of_task_conversation(self, task_id: int) -> int | None:
        """The owner of the conversation that a task lives in: the next level of ownership."""
        conversation_id = self.owner_conversation(task_id)
        return None if conversation_id is None else self.staged_conversation(conversation_id).owner

    # --- what is published ---------------------------------------------------------------

    def conversation(self, conversation_id: int) -> Conversation:
        """A committed conversation.

        Raises:
            NotFoundError: This session has no such conversation.
        """
        found = self._conversations.get(conversation_id)
        if found is None:
            if type(conversation_id) is not int or not 0 < conversation_id < 2**63:
                raise NotFoundError("conversation", repr(conversation_id))
            row = self.storage.conversation(conversation_id)
            if row is None:
                raise NotFoundError("conversation", conversation_id)
            found = conversation_of(row)
            self._keep(self._conversations, conversation_id, found, _CONVERSATIONS_CACHED)
        return found

    def doc(self, address: Address) -> DocState | None:
        """The committed state of a document, or None."""
        if address in self._docs:
            self._docs.move_to_end(address)
            return self._docs[address]
        state = _documents.load(self.storage, address)
        self._keep(self._docs, address, state, _DOCUMENTS_CACHED)
        return state

    def doc_value(self, address: Address) -> Any:
        state = self.doc(address)
        return None if state is None else state.value

    def snapshot(self, cls: type[DocT], scope_id: int = 0, *, key: str = "") -> DocT | None:
        """The committed value of a document, decoded; None where there is none. Never creates."""
        definition = _documents.definition_of(cls)
        address = Address(definition.name, _documents.SCOPES[definition.scope], scope_id, key)
        state = self.doc(address)
        if state is None:
            return None
        value = _documents.migrated(definition, state)
        return self.codec.decode(value, cls, path=f"$<{definition.name}>")  # type: ignore[no-any-return]

    def submission(self, submission_id: int) -> SubmissionRecord | None:
        row = self.storage.submission(submission_id)
        return None if row is None else submission_of(row)

    @staticmethod
    def _keep(cache: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
        cache[key] = value
        cache.move_to_end(key)
        if len(cache) > most:
            cache.popitem(last=False)

    # --- transcripts ---------------------------------------------------------------------

    def entry_of(self, row: EntryRow) -> Entry:
        return entry_of(row, self.codec)

    async def context_entries(self, conversation_id: int) -> list[Entry]:
        """The committed entries in context range, oldest first. Kept for busy conversations."""
        found = self._ranges.get(conversation_id)
        if found is not None:
            self._ranges.move_to_end(conversation_id)
            return list(found)
        arrived = self._building.setdefault(conversation_id, [])
        try:
            rows = await self.blocking.run(self._read_range, conversation_id)
        finally:
            self._building.pop(conversation_id, None)
        # The read may have seen a batch that is not published yet: it arrives by itself.
        entries = {row.id: self.entry_of(row) for row in rows if row.seq <= self.line.published_seq}
        entries.update((entry.id, entry) for entry in arrived)
        current = _transcript.context_range([entries[id] for id in sorted(entries)])
        self._keep(self._ranges, conversation_id, current, _RANGES_CACHED)
        return list(current)

    def _lineage(self, conversation_id: int) -> list[tuple[int, int | None]]:
        """(conversation, first entry id that no longer counts) from the newest up."""
        chain: list[tuple[int, int | None]] = [(conversation_id, None)]
        current = self.conversation(conversation_id)
        while current.parent is not None:
            assert current.parent_entry is not None
            chain.append((current.parent, current.parent_entry + 1))
            current = self.conversation(current.parent)
        return chain

    def _read_range(self, conversation_id: int) -> list[EntryRow]:
        """Rows from the newest head's target on, over all ancestors."""
        chain = self._lineage(conversation_id)
        start = 0
        for member, before in chain:
            newest = self.storage.last_head(member, before=before)
            if newest is not None:
                assert newest.head is not None
                start = newest.head - 1
                break
        rows: list[EntryRow] = []
        for member, before in reversed(chain):
            rows += self._read_all(member, after=start, before=before)
        return rows

    def _read_all(
        self, conversation_id: int, *, after: int = 0, before: int | None = None
    ) -> list[EntryRow]:
        rows: list[EntryRow] = []
        while True:
            page = self.storage.entries(conversation_id, after=after, before=before, limit=1000)
            rows += page
            if len(page) < 1000:
                return rows
            after = page[-1].id

    async def history(
        self, conversation_id: int, *, after: int = 0, before: int | None = None, limit: int = 200
    ) -> list[Entry]:
        """The newest `limit` entries of the history with after < id < before, oldest first."""

        def read() -> list[EntryRow]:
            rows: list[EntryRow] = []
            for member, cut in self._lineage(conversation_id):
                bound = min((b for b in (cut, before) if b is not None), default=None)
                rows += self.storage.entries(
                    member, after=after, before=bound, limit=limit - len(rows), reverse=True
                )
                if len(rows) >= limit:
                    break
            return rows

        published = self.line.published_seq
        rows = await self.blocking.run(read)
        return [self.entry_of(row) for row in reversed(rows) if row.seq <= published]

    # --- the line's adopter --------------------------------------------------------------

    def join(self, draft: Transaction) -> None:
        self._staged.append(draft)
        if draft.unique:
            self.staged_unique.update(draft.unique)
        if draft.docs:
            self._staged_docs.update(draft.docs)
        for participant in self.participants:
            participant.joined(draft)

    def adopt(self, drafts: list[Transaction]) -> None:
        self._staged = []
        self.staged_unique = {}
        self._staged_docs = {}
        for tx in drafts:
            self._rows_since_checkpoint += len(tx.writes)
            for made in tx.conversations:
                self._keep(self._conversations, made.id, made, _CONVERSATIONS_CACHED)
            for address, state in tx.docs.items():
                self._keep(self._docs, address, state, _DOCUMENTS_CACHED)
            for entry in tx.entries:
                self._publish_entry(entry)
            for participant in self.participants:
                participant.committed(tx)
        if self._rows_since_checkpoint >= _CHECKPOINT_ROWS:
            self._rows_since_checkpoint = 0
            self._checkpoint_due.set()

    def _publish_entry(self, entry: Entry) -> None:
        building = self._building.get(entry.conversation_id)
        if building is not None:
            building.append(entry)
        current = self._ranges.get(entry.conversation_id)
        if current is not None:
            longer = _transcript.extend_range(current, entry)
            if longer is None:
                # A head at an earlier entry: what it reaches back to may not be in the range.
                del self._ranges[entry.conversation_id]
            else:
                self._ranges[entry.conversation_id] = longer

    def revert(self) -> None:
        self._staged = []
        self.staged_unique = {}
        self._staged_docs = {}
        for participant in self.participants:
            participant.reverted()

    def poisoned(self, error: SessionPoisonedError) -> None:
        for participant in self.participants:
            participant.poisoned(error)

    def refusing(self, refusing: bool) -> None:
        if refusing != self._refusing:
            self._refusing = refusing
            for participant in self.participants:
                participant.refusing(refusing)

    # --- background ----------------------------------------------------------------------

    def confirmed(self) -> bool:
        """Whether a sign of life was stored within the last lease: else no phase may start."""
        return trio.current_time() - self._confirmed_at < self.settings.lease_seconds

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Heartbeats and checkpoints, for as long as the session is open."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_heartbeat)
            nursery.start_soon(self._serve_checkpoints)
            task_status.started()

    async def _serve_heartbeat(self) -> None:
        reported: float | None = None
        while self.line.poison is None:
            await trio.sleep(self.settings.heartbeat_seconds)
            since = self.line.body_since
            if (
                since is not None
                and since != reported
                and (trio.current_time() - since > self.settings.body_seconds_max)
            ):
                reported = since
                logger.warning(
                    "a commit body holds the line for more than %.0f s",
                    (trio.current_time() - since),
                )
            asked_at = trio.current_time()
            try:
                with trio.CancelScope(shield=True):
                    await self._writer.run(self.storage.heartbeat, self.epoch, self.clock.now_us())
            except HolderLostError as lost:
                self.line.set_poison(lost)
            except StorageRefusedError as refused:
                logger.warning("the heartbeat was not stored: %s", refused)
            except Exception as unknown:
                # Not confirmed. If the storage is broken, the next commit says so.
                logger.warning("the heartbeat failed: %s", unknown)
            else:
                self._confirmed_at = asked_at

    async def _serve_checkpoints(self) -> None:
        while self.line.poison is None:
            await self._checkpoint_due.wait()
            self._checkpoint_due = trio.Event()
            try:
                with trio.CancelScope(shield=True):
                    pages = await self.blocking.run(self.storage.checkpoint)
                    if pages > _WAL_PAGES_MAX and self.line.poison is None:
                        # Beside a busy writer a passive checkpoint may never catch up.
                        await self._writer.run(self._checkpoint_whole)
            except Exception as unknown:
                # The log only grows meanwhile; a commit meets the same trouble and reports it.
                logger.warning("a checkpoint failed: %s", unknown)

    def _checkpoint_whole(self) -> None:
        self.storage.checkpoint(truncate=True)

    async def close(self, closing_writes: Callable[[], list[tuple[Op, tuple[Any, ...]]]]) -> None:
        """Let accepted commits finish, store the closing mark, close the storage. Shielded."""
        with trio.CancelScope(shield=True):
            await self.line.drain()
            try:
                if self.line.poison is None:
                    batch = Batch(
                        epoch=self.epoch,
                        seq=self.line.published_seq + 1,
                        next_id=self.line.next_id,
                        flush=True,
                        writes=closing_writes(),
                        clean=True,
                    )
                    await self._writer.run(self._store_closing, batch)
            finally:
                await self._writer.run(self.storage.close)
                self._writer.close()

    def _store_closing(self, batch: Batch) -> None:
        try:
            self.storage.apply(batch)
            self.storage.release(self.epoch)
        except (StorageRefusedError, HolderLostError) as refused:
            # Everything accepted is durable; without the mark the next opening recovers.
            logger.warning("closed without the closing mark: %s", refused)


@asynccontextmanager
async def serving(session: Session) -> AsyncIterator[Session]:
    """Run a session's background work around a block."""
    async with trio.open_nursery() as nursery:
        await nursery.start(session.serve)
        try:
            yield session
        finally:
            nursery.cancel_scope.cancel()


def poison_copy(error: SessionPoisonedError) -> SessionPoisonedError:
    """A copy to raise: one exception object must not be raised in several tasks."""
    return copy.copy(error)
