"""The session: one line of commits over one storage, with what is published from it.

What readers see (`published`) and what a body sees (`staged`: published plus the bodies before it
in the same batch) are kept apart: a batch that fails drops its overlay and leaves no trace. What
stands on the session takes part as a `Participant` and in no other way.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import trio

from pidurable.errors import (
    HolderLostError,
    NotFoundError,
    PidurableError,
    SessionClosedError,
    SessionPoisonedError,
    StorageAccessError,
    StorageRefusedError,
    show,
)
from pidurable.records._checks import is_id
from pidurable.records._codec import Codec
from pidurable.records._entries import Conversation, Entry, is_visible
from pidurable.records._limits import Settings
from pidurable.records._submissions import SubmissionRecord
from pidurable.session import _documents
from pidurable.session._batch import again
from pidurable.session._blobs import is_digest, with_blobs
from pidurable.session._body import AsyncBody
from pidurable.session._context import ModelContext
from pidurable.session._document_watch import DocumentView, DocumentWatches
from pidurable.session._documents import Address, DocState
from pidurable.session._forks import CONVERSATION_SCOPE, policies_of
from pidurable.session._history import Transcripts
from pidurable.session._line import CommitLine
from pidurable.session._participants import Participants
from pidurable.session._reads import guarded_reads
from pidurable.session._removals import Removal, Removals, removed_hint
from pidurable.session._rows import (
    conversation_of,
    stored_entry,
    stored_submission,
)
from pidurable.session._seams import (
    Blocking,
    Clock,
    Failpoints,
    Randomness,
    logger,
)
from pidurable.session._service import Services
from pidurable.session._staged import Staged
from pidurable.session._submissions import Submissions
from pidurable.session._transaction import Transaction
from pidurable.session._watch import Watch
from pidurable.session._writer import RETRY_SECONDS_MAX, RETRY_SECONDS_MIN, BatchWriter
from pidurable.storage import Batch, EntryRow, HolderClaim, Op, Storage, SubmissionRow

T = TypeVar("T")
DocT = TypeVar("DocT")
TxT = TypeVar("TxT", bound=Transaction)

_CONVERSATIONS_CACHED = 10_000
_DOCUMENTS_CACHED = 4_096
_BLOBS_PUT_KEPT = 65_536
_UNCLEAN_GAP = 2**20


class Session:
    """An open session over a storage that it holds."""

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
        """Take the storage and begin the line where its last holder stopped.

        Raises:
            StorageHeldError: A live holder has it, and `takeover` is False.
        """
        self.settings = settings
        self.clock = clock
        self.blocking = blocking
        self.randomness = randomness
        self.failpoints = failpoints
        self.codec = codec
        self.participants = Participants()
        self.raw_storage = storage
        """The storage that shows what is stored as it is, with references instead of what is large.
        """
        storage = with_blobs(storage)
        head = storage.acquire(claim, takeover=takeover)
        self.uuid = head.uuid
        self.epoch = head.epoch
        self.clean = head.clean
        # Commits that were shown but not flushed may be lost: what they used is not used again.
        gap = 0 if head.clean else _UNCLEAN_GAP
        self.worker = blocking.worker("writer")
        self.writer = BatchWriter(
            storage,
            worker=self.worker,
            settings=settings,
            failpoints=failpoints,
            epoch=head.epoch,
            inline=inline,
            power=durability == "power",
        )
        self.line = CommitLine(
            storage,
            writer=self.writer,
            adopter=self,
            settings=settings,
            seq=head.seq + gap,
            next_id=head.next_id + (gap if durability == "process" else 0),
        )
        self.storage = guarded_reads(storage, self.line.current_draft)
        self._conversations: OrderedDict[int, Conversation] = OrderedDict()
        self._docs: OrderedDict[Address, DocState | None] = OrderedDict()
        self._submissions = Submissions(self.storage)
        self._transcripts = Transcripts(self)
        self._watches = DocumentWatches(self)
        self.watch_ends: list[Callable[[PidurableError | None], None]] = [self._watches.end]
        """Called when nothing is published any more: after the last commit, or with the error."""
        self._services = Services(self)
        self._staged = Staged()
        self.removals = Removals(self.storage)
        self.blobs_put: OrderedDict[str, None] = OrderedDict()
        """Names of bytes that were put lately: whoever did so may be about to refer to them."""
        self._refusing = False
        self.closed = False
        """Whether the storage is closed: nothing more may be asked of the writer's thread."""
        self.owner_conversation: Callable[[int], int | None] = lambda _: None
        """Set by the tasks layer: the conversation of a task."""

    # --- commits -------------------------------------------------------------------------

    async def run(self, tx: TxT, body: Callable[[TxT], T]) -> T:
        """Run a body that awaits nothing as one commit."""
        return await self.line.run_sync(tx, body)

    def body(self, tx: TxT, *, place: str = "") -> AsyncBody[TxT]:
        """An async context manager that runs its block as one commit."""
        return AsyncBody(self.line, tx, place=place)

    def transaction(self, *, flush: bool = True, by_task: int | None = None) -> Transaction:
        """A transaction for `run` or `body`. Without `flush` it survives the process only."""
        return Transaction(self, flush=flush, by_task=by_task)

    # --- what a body sees ----------------------------------------------------------------

    def staged_conversation(self, conversation_id: int) -> Conversation:
        staged = self._staged.conversations
        if staged and is_id(conversation_id):
            found = staged.get(conversation_id)
            if found is not None:
                return found
        found = self.conversation(conversation_id)
        if found.owner is not None:
            root = self.removals.tree_of(found, staged=True)
            if root is not None:
                raise NotFoundError("conversation", conversation_id, removed_hint(root))
        return found

    def staged_submission(self, submission_id: int) -> SubmissionRecord | None:
        found = self._staged.submissions.get(submission_id)
        return self.submission(submission_id) if found is None else found

    def staged_open_submissions(self, conversation_id: int) -> dict[int, SubmissionRecord]:
        """Submissions of a conversation that were queued or placed, as staged so far, by id."""
        rows = self._submissions.open_rows(conversation_id)
        found = {row.id: stored_submission(row, self.storage.store) for row in rows}
        for record in self._staged.submissions.values():
            if record.conversation_id == conversation_id:
                found[record.id] = record
        return found

    def staged_blob(self, sha256: str) -> bool:
        """Whether bytes are stored under a name, or will be with this batch."""
        staged = self._staged
        if sha256 in staged.blobs:
            return True
        return sha256 not in staged.blobs_removed and self.storage.has_blob(sha256)

    def note_blob(self, sha256: str) -> None:
        """Somebody put these bytes: they are not taken for garbage while they are new."""
        self._keep(self.blobs_put, sha256, None, _BLOBS_PUT_KEPT)

    def staged_claim(self, key: tuple[Any, ...]) -> Any:
        """What an earlier body of the batch claimed under a unique key, or None."""
        return self._staged.unique.get(key)

    def staged_doc(self, address: Address) -> DocState | None:
        staged = self._staged.docs
        if staged and address in staged:
            return staged[address]
        return self.doc(address)

    def staged_doc_changes(
        self, scope: int, scope_id: int, *, upto_seq: int | None = None
    ) -> Iterator[tuple[Address, DocState | None]]:
        """What the open batch has done to the documents of a scope, oldest change first."""
        for seq, docs in self._staged.doc_commits:
            if upto_seq is None or seq <= upto_seq:
                for address, state in docs.items():
                    if address.scope == scope and address.scope_id == scope_id:
                        yield address, state

    def staged_doc_as_of(self, address: Address, seq: int) -> DocState | None:
        """A document of a conversation as it was after a commit, which may be of this batch."""
        if seq <= self.line.published_seq:
            moment = f"commit {seq}"
            return _documents.load_as_of(self.storage, address, seq, moment=moment)
        state = self.doc(address)
        for each, changed in self.staged_doc_changes(*address[1:3], upto_seq=seq):
            if each == address:
                state = changed
        return state

    def staged_policies_as_of(self, conversation_id: int, seq: int) -> dict[Address, str]:
        """What a fork does with each document that a conversation had after a commit."""
        scope = (CONVERSATION_SCOPE, conversation_id)
        found = policies_of(self.storage.documents_as_of(conversation_id, seq=seq))
        for address, state in self.staged_doc_changes(*scope, upto_seq=seq):
            if state is None:
                found.pop(address, None)
            else:
                found[address] = state.fork
        return found

    async def fetch_doc(self, address: Address) -> None:
        """Have a document in memory, so that `staged_doc` need not read. For `async with` bodies.

        The line is held meanwhile, so what is read cannot be overtaken.
        """
        if address in self._staged.docs or address in self._docs:
            return
        state = await self.blocking.run(_documents.load, self.storage, address)
        self._keep(self._docs, address, state, _DOCUMENTS_CACHED)

    def cached_docs(self) -> Set[Address]:
        """The addresses whose documents need not be read."""
        return frozenset(self._docs)

    def keep_docs(self, found: Mapping[Address, DocState | None]) -> None:
        """Have documents in memory: as they were read while the line was held, or published."""
        docs = self._docs
        for address, state in found.items():
            docs[address] = state
            docs.move_to_end(address)
        while len(docs) > _DOCUMENTS_CACHED:
            docs.popitem(last=False)

    def staged_docs_of(self, scope: int, scope_id: int) -> list[Address]:
        """Addresses of the living documents of a scope."""
        found = {
            Address(row.name, row.scope, row.scope_id, row.key)
            for row in self.storage.documents(scope, scope_id)
        }
        for address, state in self._staged.docs.items():
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
        # What only equals an id, as True does, is none, and would be found here.
        found = self._conversations.get(conversation_id) if type(conversation_id) is int else None
        if found is None:
            found = self._stored_conversation(conversation_id)
        if found.owner is not None:
            root = self.removals.tree_of(found, staged=False)
            if root is not None:
                raise NotFoundError("conversation", conversation_id, removed_hint(root))
        return found

    def _stored_conversation(self, conversation_id: int) -> Conversation:
        if not is_id(conversation_id):
            raise NotFoundError("conversation", show(conversation_id))
        row = self.storage.conversation(conversation_id)
        if row is None:
            raise NotFoundError("conversation", conversation_id)
        found = conversation_of(row)
        self._keep(self._conversations, found.id, found, _CONVERSATIONS_CACHED)
        return found

    def doc(self, address: Address) -> DocState | None:
        """The published state of a document, or None."""
        try:
            return self._docs[address]
        except KeyError:
            pass
        if address in self._staged.docs_before:
            # The storage may have the batch already that is being stored. A watch that begins now
            # is told of it afterwards, and no two looks may show half of a commit.
            return self._staged.docs_before[address]
        state = _documents.load(self.storage, address)
        self._keep(self._docs, address, state, _DOCUMENTS_CACHED)
        return state

    def is_conversation(self, id: int) -> bool:
        """Whether an id is known to be that of a conversation. False where it has to be read."""
        return id in self._conversations or id in self._staged.conversations

    def has_docs(self, addresses: Iterable[Address]) -> bool:
        """Whether all of some documents are in memory, as published."""
        return all(address in self._docs for address in addresses)

    async def load_docs(self, addresses: Iterable[Address]) -> None:
        """Have documents in memory as published. For `async with` bodies, which hold the line."""
        for address in addresses:
            if address not in self._docs:
                state = await self.blocking.run(_documents.load, self.storage, address)
                self._keep(self._docs, address, state, _DOCUMENTS_CACHED)

    def check_readable(self) -> None:
        """Raise where nothing is read any more, also of what is still in memory."""
        if self.line.poison is not None:
            raise again(self.line.poison)
        if self.closed:
            raise SessionClosedError(self.storage.store)

    def doc_value(self, address: Address) -> Any:
        self.check_readable()
        state = self.doc(address)
        return None if state is None else state.value

    def snapshot(self, cls: type[DocT], scope_id: int = 0, *, key: str = "") -> DocT | None:
        """The committed value of a document, decoded; None where there is none. Never creates."""
        self.check_readable()
        definition = _documents.definition_of(cls)
        address = _documents.readable_address(definition, scope_id, key)
        found: DocT | None = self._decoded(definition, self.doc(address))
        return found

    async def snapshot_as_of(
        self, cls: type[DocT], conversation_id: int, entry_id: int, *, key: str = ""
    ) -> DocT | None:
        """The value that a rewindable document had after the commit of an entry.

        An entry that a fork shares with its parent shows the parent's document.

        Raises:
            InvalidArgumentError: The document is not rewindable.
            NotFoundError: The entry is not in the history of the conversation, or the document was
                not rewindable then, so that its value was not kept.
        """
        self.check_readable()
        definition = _documents.definition_of(cls)
        _documents.check_rewindable(definition)
        row = self.storage.entry(entry_id) if is_id(entry_id) else None
        if row is None or row.seq > self.line.published_seq:
            raise NotFoundError("entry", show(entry_id))
        home = self._transcripts.home_of(conversation_id, entry_id, row.conversation)
        address = _documents.address(definition, home, key)
        state = await self.blocking.run(
            functools.partial(_documents.load_as_of, moment=f"entry {entry_id}"),
            self.storage,
            address,
            row.seq,
        )
        found: DocT | None = self._decoded(definition, state)
        return found

    def watch(
        self, cls: type[DocT], scope_id: int = 0, *, key: str = ""
    ) -> AbstractAsyncContextManager[Watch[DocumentView[DocT] | None]]:
        """Watch a document: its committed value, then one frame for each commit that changes it.

        See `Harness.watch` for what it raises.
        """
        return self._watches.watch(cls, scope_id, key)

    def _decoded(self, definition: _documents.DocumentDefinition, state: DocState | None) -> Any:
        if state is None:
            return None
        value = _documents.migrated(definition, state.value, state.version)
        return self.codec.decode(value, definition.cls, path=f"$<{definition.name}>")

    def submission_row(self, submission_id: int) -> SubmissionRow | None:
        """As stored, for who needs nothing of its content."""
        return self._submissions.row(submission_id)

    def submission(self, submission_id: int) -> SubmissionRecord | None:
        row = self._submissions.row(submission_id)
        return None if row is None else stored_submission(row, self.storage.store)

    @staticmethod
    def _keep(cache: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
        # Kept in the order of their last change, not of their last look: looking is frequent.
        if key in cache:
            cache.move_to_end(key)
        cache[key] = value
        if len(cache) > most:
            cache.popitem(last=False)

    # --- transcripts ---------------------------------------------------------------------

    def entry_of(self, row: EntryRow) -> Entry:
        return stored_entry(row, self.codec, self.storage)

    async def context_entries(self, conversation_id: int) -> list[Entry]:
        """The committed entries in context range, in order. Kept for busy conversations."""
        self.check_readable()
        return await self._transcripts.context_entries(conversation_id)

    async def context(self, conversation_id: int, cutoff: int | None = None) -> ModelContext:
        """What a model is given of a conversation: a valid exchange, whatever happened.

        Deriving it after one more entry costs O(that entry). Later entries do not change it.

        Args:
            conversation_id: The conversation.
            cutoff: As of this entry: the newest head at or before it counts, and nothing after it.
                None for the newest entry.

        Raises:
            NotFoundError: This session has no such conversation.
            InvalidArgumentError: The cutoff cannot be the id of an entry.
        """
        self.check_readable()
        return await self._transcripts.context(conversation_id, cutoff)

    def kept_entry(self, conversation_id: int, entry_id: int) -> Entry | None:
        """A committed entry, where it is at hand: one of the last of a busy conversation."""
        return self._transcripts.kept_entry(conversation_id, entry_id)

    async def history(
        self, conversation_id: int, *, after: int = 0, before: int | None = None, limit: int = 200
    ) -> list[Entry]:
        """The newest `limit` entries of the history with after < id < before, oldest first."""
        self.check_readable()
        return await self._transcripts.history(
            conversation_id, after=after, before=before, limit=limit
        )

    def staged_place(self, entry_id: int) -> tuple[int, int] | None:
        """(conversation, commit) of an entry as staged so far, or None."""
        staged = self._staged.entries.get(entry_id)
        if staged is not None:
            return staged.conversation_id, staged.seq
        row = self.storage.entry(entry_id)
        return None if row is None else (row.conversation, row.seq)

    def staged_newest(self, conversation_id: int, before: int | None) -> int | None:
        """The newest own entry of a conversation below a bound, as staged so far, or None."""
        for entry in reversed(self._staged.entries.values()):
            if entry.conversation_id == conversation_id and (before is None or entry.id < before):
                return entry.id
        rows = self.storage.entries(conversation_id, before=before, limit=1, reverse=True)
        return rows[0].id if rows else None

    def staged_shows_more(self, conversation_id: int, since: int) -> bool:
        """Whether a visible own entry came to a conversation after an entry, as staged so far."""
        for entry in self._staged.entries.values():
            if entry.conversation_id == conversation_id and entry.id > since and is_visible(entry):
                return True
        return self._transcripts.shows_more(conversation_id, since)

    def staged_head(self, conversation_id: int, before: int | None) -> int | None:
        """The head of the newest own entry below a bound that has one, as staged so far."""
        for entry in reversed(self._staged.entries.values()):
            if (
                entry.head is not None
                and entry.conversation_id == conversation_id
                and (before is None or entry.id < before)
            ):
                return entry.head
        row = self.storage.last_head(conversation_id, before=before)
        return None if row is None else row.head

    async def newest_head(self, conversation_id: int) -> tuple[int, int] | None:
        """The newest entry of the history that carries a head, and the entry that it names."""
        return await self._transcripts.newest_head(conversation_id)

    async def blob(self, sha256: str) -> bytes:
        """The bytes that are stored under a name.

        Raises:
            NotFoundError: Nothing is.
            StorageCorruptError: They are not those that the name says.
        """
        self.check_readable()
        found = None
        if is_digest(sha256):
            found = await self.blocking.run(self.storage.blob, sha256)
        if found is None:
            raise NotFoundError("blob", show(sha256))
        return found

    # --- the line's adopter --------------------------------------------------------------

    def join(self, draft: Transaction) -> None:
        before = self._staged.docs_before
        for change in draft.doc_changes:
            address = change.address
            if address not in before:
                # Nothing is being stored while bodies run, so what has to be read is as published.
                before[address] = None if change.held_before is None else self.doc(address)
        self._staged.add(draft)
        if draft.removal is not None:
            self.removals.joined(draft.removal)
        for joined in self.participants.joined:
            joined(draft)

    def adopt(self, drafts: list[Transaction]) -> None:
        self._staged.clear()
        rows = 0
        committed = self.participants.committed
        for tx in drafts:
            rows += len(tx.writes)
            if tx.conversations:
                for made in tx.conversations:
                    self._keep(self._conversations, made.id, made, _CONVERSATIONS_CACHED)
            if tx.docs:
                self.keep_docs(tx.docs)
                if self._watches.hubs:
                    self._watches.publish(tx)
            for entry in tx.entries:
                self._transcripts.publish(entry)
            if tx.submissions or tx.conversations:
                self._submissions.publish(tx)
            if tx.removal is not None:
                self._forget(tx.seq, tx.removal)
            for told in committed:
                told(tx)
        self.removals.settled()
        self._services.stored(rows)

    def _forget(self, seq: int, removal: Removal) -> None:
        """Keep nothing in memory of what a commit has removed."""
        self.removals.adopted(removal)
        for address in removal.documents:
            self._docs.pop(address, None)
        for id in removal.conversations:
            self._conversations.pop(id, None)
        self._transcripts.forget(removal.conversations)
        self._submissions.forget()
        if self._watches.hubs:
            self._watches.removed(seq, removal)

    def revert(self) -> None:
        self._staged = Staged()
        self.removals.settled()
        for participant in self.participants:
            participant.reverted()

    def poisoned(self, error: SessionPoisonedError) -> None:
        for participant in self.participants:
            try:
                participant.poisoned(error)
            except Exception:
                # The others wait to be told, and whoever waits on them.
                logger.exception("telling %r of a poisoned session failed", participant)
        self._submissions.forget()
        self._end_watches(error)

    def task_ended(self, task_id: int) -> None:
        """A task has ended by the commit that is being published, and its documents with it."""
        self._watches.task_ended(task_id)

    def _end_watches(self, error: SessionPoisonedError | None) -> None:
        for end in self.watch_ends:
            end(error)

    def refusing(self, refusing: bool) -> None:
        if refusing != self._refusing:
            self._refusing = refusing
            for participant in self.participants:
                participant.refusing(refusing)

    # --- life ----------------------------------------------------------------------------

    def confirmed(self) -> bool:
        """Whether a sign of life was stored within the last lease: else no phase may start."""
        return self._services.is_confirmed()

    @trio.lowlevel.enable_ki_protection
    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Heartbeats, checkpoints and reports, for as long as the session is open."""
        await self._services.serve(task_status=task_status)

    @trio.lowlevel.enable_ki_protection
    async def close(self, closing_writes: Callable[[], list[tuple[Op, tuple[Any, ...]]]]) -> None:
        """Let accepted commits finish, store the closing mark, close the storage. Shielded."""
        with trio.CancelScope(shield=True):
            await self.line.drain()
            self._submissions.forget()
            self._end_watches(None)
            try:
                if self.line.poison is None:
                    batch = Batch(
                        epoch=self.epoch,
                        seq=self.line.draw_seq(),
                        next_id=self.line.next_id,
                        flush=True,
                        writes=closing_writes(),
                        clean=True,
                    )
                    await self._leave_mark(batch)
                elif isinstance(self.line.poison, HolderLostError):
                    await self.worker.run(self._leave_lost)
            finally:
                try:
                    await self.worker.run(self.storage.close)  # noqa: ASYNC102 - shielded above
                except StorageAccessError as failed:
                    # Everything accepted is durable; the next opening moves the log.
                    logger.warning("nothing is lost, but the store closed badly: %s", failed)
                finally:
                    self.closed = True
                    self.worker.close()

    async def _leave_mark(self, batch: Batch) -> None:
        """Store the closing batch and give the session up, again while that is refused for certain.

        As long as the line would try, but not once more where it has given up already. Ctrl-C ends
        the trying, and comes out of the close.
        """
        give_up_at = trio.current_time()
        if not self._refusing:
            give_up_at += self.settings.storage_retry_seconds
        steps: list[Callable[[], None]] = [
            functools.partial(self.storage.apply, batch),
            functools.partial(self.storage.release, self.epoch),
        ]
        delay = RETRY_SECONDS_MIN
        while (refused := await self.worker.run(self._store_closing, steps)) is not None:
            left = give_up_at - trio.current_time()
            if left <= 0:
                self._say_unmarked(refused)
                return
            try:
                await trio.sleep(min(delay, left))
            except KeyboardInterrupt:
                self._say_unmarked(refused)
                raise
            delay = min(delay * 2, RETRY_SECONDS_MAX)

    def _store_closing(self, steps: list[Callable[[], None]]) -> StorageRefusedError | None:
        """Do what is left to do; what refused it for certain, if anything."""
        try:
            while steps:
                steps[0]()
                del steps[0]
        except HolderLostError as lost:
            self._say_unmarked(lost)
            self._leave_lost()
        except StorageRefusedError as refused:
            return refused
        except PidurableError as unknown:
            self._say_unmarked(unknown)
        return None

    def _say_unmarked(self, error: PidurableError) -> None:
        # Everything accepted is durable; without the mark the next opening recovers.
        logger.warning("closed without the closing mark: %s", error)

    def _leave_lost(self) -> None:
        """Tidy up the lock file, which no record names any more, so that nobody else will."""
        with contextlib.suppress(PidurableError):
            self.storage.release(self.epoch)


@asynccontextmanager
async def serving(session: Session) -> AsyncIterator[Session]:
    """Run a session's background work around a block."""
    async with trio.open_nursery() as nursery:
        await nursery.start(session.serve)
        try:
            yield session
        finally:
            nursery.cancel_scope.cancel()
