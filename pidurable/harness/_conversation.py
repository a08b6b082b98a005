"""Conversations: handing in, reading, watching, aborting."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, final

import trio

from pidurable.agent._compaction_records import CompactionResult
from pidurable.agent._compaction_room import begin_compaction, check_instructions
from pidurable.agent._documents import (
    AgentDocument,
    InboxDocument,
    LiveDocument,
    UsageDocument,
    address_of,
    defaults_of,
    read_doc,
    update_doc,
)
from pidurable.agent._inbox import (
    Content,
    continue_run,
    submit,
    withdraw_queued,
    write,
)
from pidurable.agent._permissions import is_below
from pidurable.agent._selection import checked_selection
from pidurable.agent._services import THINKING_LEVELS, AgentChange
from pidurable.errors import InvalidArgumentError, show
from pidurable.harness._conversation_watch import Told
from pidurable.harness._events import Event, Snapshot
from pidurable.harness._submission import Submission
from pidurable.harness._views import ConversationView
from pidurable.records import _json
from pidurable.records._checks import check_name, check_reason
from pidurable.records._entries import Conversation as ConversationRecord, Edit, Entry
from pidurable.records._ids import TaskId
from pidurable.records._messages import Message
from pidurable.records._readonly import copied_json
from pidurable.records._submissions import SubmissionRecord, WhenBusy
from pidurable.records._tasks import OnRestart
from pidurable.session._context import ModelContext
from pidurable.session._documents import definition_of
from pidurable.session._watch import Watch
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task
from pidurable.tasks._transaction import TreeTransaction
from pidurable.tasks._tree import Node

if TYPE_CHECKING:
    from pidurable.harness._open import Harness

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")


@final
class Conversation:
    """A handle of one conversation. Cheap; holds no state of its own."""

    __slots__ = ("_harness", "id")

    def __init__(self, harness: Harness, id: int) -> None:
        self._harness = harness
        self.id = id

    def __repr__(self) -> str:
        return f"Conversation({self.id})"

    @property
    def record(self) -> ConversationRecord:
        """The record as committed."""
        return self._harness.session.conversation(self.id)

    # --- agent ---------------------------------------------------------------------------

    async def configure(self, change: AgentChange) -> None:
        """Change this conversation's agent from the next request on.

        Raises:
            NotJsonError: A field has a value of the wrong type.
        """
        await self._harness._runtime.commit(lambda tx: change_agent(tx, self.id, change))

    def agent(self) -> dict[str, Any]:
        """The choices as stored: the JSON of `pi.agent`."""
        return self._doc(AgentDocument)

    def live(self) -> dict[str, Any]:
        """What happens right now: the JSON of `pi.live`."""
        return self._doc(LiveDocument)

    def inbox(self) -> list[Any]:
        """What is queued, in order of arrival."""
        return self._doc(InboxDocument)["items"]  # type: ignore[no-any-return]

    def usage(self) -> dict[str, Any]:
        """What was spent here: the JSON of `pi.usage`."""
        return self._doc(UsageDocument)

    def _doc(self, cls: type) -> dict[str, Any]:
        value = self._harness.session.doc_value(address_of(cls, self.id))
        return defaults_of(cls) if value is None else copied_json(value)

    # --- handing in ----------------------------------------------------------------------

    async def submit(
        self,
        content: Content,
        *,
        when_busy: WhenBusy = "follow_up",
        request_id: str | None = None,
    ) -> Submission:
        """Commit an input and return its submission, which can be waited for.

        Args:
            content: Text, or text and image blocks.
            when_busy: While a run is active: queue it for the end of the run, `steer` it into the
                run after the next tool round, or `reject` it.
            request_id: The sender's own id of this input: sent twice, it is stored once.

        Raises:
            ConversationBusyError: A run is active and `when_busy` is reject.
            ConversationFullError: It would have to wait, and 1,000 inputs, or 4 MiB of them
                (`document_bytes_max`), are queued already.
            RequestIdConflictError: The request id names other content.
            NotFoundError: No such conversation.
        """
        harness = self._harness
        harness.start()
        id = await harness._runtime.commit(
            lambda tx: submit(
                harness.session,
                tx,
                self.id,
                content,
                when_busy=when_busy,
                request_id=request_id,
            )
        )
        harness.session.failpoints.hit("CP5")
        return Submission(harness, id)

    def submit_in(
        self,
        tx: TreeTransaction,
        content: Content,
        *,
        when_busy: WhenBusy = "follow_up",
        request_id: str | None = None,
    ) -> int:
        """Hand an input in with a commit of yours, and return the submission's id.

        So a task that ends tells a conversation of it exactly once, whatever dies: the news and
        the end are one commit. `harness.submission(id)` makes a handle, once that is stored.

        Args:
            tx: Of `async with harness.commit()` or `ctx.commit()`.
            content, when_busy, request_id: As in `submit`, whose errors it raises.
        """
        self._harness.start()
        return submit(
            self._harness.session,
            tx,
            self.id,
            content,
            when_busy=when_busy,
            request_id=request_id,
        )

    async def write(
        self,
        value: object = None,
        *,
        kind: str | None = None,
        messages: Sequence[Message] = (),
        head: int | None = None,
        edits: Sequence[Edit] = (),
        request_id: str | None = None,
    ) -> Submission:
        """Commit an entry that asks the model nothing, and return its submission.

        One that no request can see (no messages, no head, no edits) is stored at once, also in
        the middle of a round. Any other is stored at once while no run is active; during one it
        waits for the next boundary, before what users have queued: after a tool round, or at the
        end of the run, however that ends. An abort of the conversation does not take it back.
        The submission is `done` once the entry stands in the transcript, and `unanswered`
        (`stale`) where its head would by then let the context start earlier than it does.

        Args:
            value: An instance of a class declared with `@entry(kind)`, or any JSON if `kind` is
                given. The whole entry takes at most `value_bytes_max` encoded (16 MiB).
            kind: Only for values whose class does not say it.
            messages: What the model sees of this entry.
            head: Start the model's context at this entry from here on; 0 means at this one, which
                is a reset: placed after a tool round, it ends the run (`unanswered`, `reset`).
            edits: Replace or omit what earlier entries contribute to the context.
            request_id: The sender's own id of this write: sent twice, it is stored once.

        Raises:
            NotJsonError: A value cannot be stored; the path says which.
            NotFoundError: No such conversation, no such entry in its history, or an image whose
                bytes are not stored.
            ConversationFullError: It would have to wait, and 1,000 items, or 4 MiB of them
                (`document_bytes_max`), are queued already.
            RequestIdConflictError: The request id names other content.
        """
        harness = self._harness
        id = await harness._runtime.commit(
            lambda tx: write(
                harness.session,
                tx,
                self.id,
                value,
                kind=kind,
                messages=messages,
                head=head,
                edits=edits,
                request_id=request_id,
            )
        )
        harness.session.failpoints.hit("CP5")
        return Submission(harness, id)

    def write_in(
        self,
        tx: TreeTransaction,
        value: object = None,
        *,
        kind: str | None = None,
        messages: Sequence[Message] = (),
        head: int | None = None,
        edits: Sequence[Edit] = (),
        request_id: str | None = None,
    ) -> int:
        """Write with a commit of yours, and return the submission's id; see `submit_in`.

        Unlike `tx.append` it never puts anything that the model sees between a call and its result.

        Args:
            tx: Of `async with harness.commit()` or `ctx.commit()`.
            value, kind, messages, head, edits, request_id: As in `write`, whose errors it raises.
        """
        return write(
            self._harness.session,
            tx,
            self.id,
            value,
            kind=kind,
            messages=messages,
            head=head,
            edits=edits,
            request_id=request_id,
        )

    async def reset(self, *, request_id: str | None = None) -> Submission:
        """Let the model's context start anew; the history keeps everything.

        A write of an entry `pi.reset` whose head is itself: see `write` for when it is placed.
        During a run it is placed after the round of tools, if there is one, and ends the run.
        """
        return await self.write(kind="pi.reset", head=0, request_id=request_id)

    async def continue_run(self, *, request_id: str | None = None) -> Submission:
        """Continue a run that failed, was aborted or was cut, from its last valid point.

        The model is asked again with what stands in the transcript up to the newest message of a
        user or complete set of results; what an interrupted answer had said is not sent. What is
        queued stays queued, for the boundaries of the continued run.

        Args:
            request_id: The sender's own id: sent twice, the run is continued once.

        Returns:
            A submission without content, answered as an input is.

        Raises:
            ConversationBusyError: A run is active.
            NothingToContinueError: The last answer is complete, or nothing was ever asked.
            RequestIdConflictError: The request id names something else.
            NotFoundError: No such conversation.
        """
        if request_id is not None:
            request_id = check_name(request_id, "request_id")
        self._harness.start()
        id = await self._continue(request_id, starts=True)
        self._harness.session.failpoints.hit("CP5")
        return Submission(self._harness, id)

    async def _continue(self, request_id: str | None, *, starts: bool) -> int:
        """Stage a continuation until it stands on the newest entry; return its submission.

        Args:
            request_id: As of `continue_run`.
            starts: Whether the new run may start the harness.
        """
        session = self._harness.session
        while True:
            context = await session.context(self.id)
            may = context.asks_something

            def body(
                tx: TreeTransaction, may: bool = may, as_of: int = context.cutoff
            ) -> int | None:
                found = continue_run(
                    session, tx, self.id, may=may, as_of=as_of, request_id=request_id
                )
                tx.created_by_host = tx.created_by_host and starts
                return found

            id = await self._harness._runtime.commit(body)
            if id is not None:
                return id

    async def compact(self, instructions: str | None = None) -> TaskId[CompactionResult]:
        """Begin to replace the older part of this conversation by a summary; return the task.

        `await harness.wait_for_task(task)` waits for it: its result says whether the summary was
        `applied`, `skipped` (nothing is older than what is kept, or a hook declined) or has become
        `stale`; one that could not be had has `failed`, with the reason as its error. Until it is
        applied nothing changes, and nothing is ever deleted. While a run is active, the summary is
        placed at the run's next boundary.

        Args:
            instructions: What the summary should hold besides; None for nothing.

        Raises:
            InvalidArgumentError: The instructions are no text, or blank.
            NotFoundError: No such conversation.
        """
        instructions = check_instructions(instructions)
        self._harness.start()
        return await self._harness._runtime.commit(
            lambda tx: begin_compaction(tx, self.id, "manual", instructions)
        )

    async def create_task(
        self,
        definition: type[Task[InputT, Any, ResultT]],
        input: InputT,
        *,
        key: str | None = None,
        background: bool = False,
        deadline: datetime | None = None,
        on_restart: OnRestart | None = None,
    ) -> TaskId[ResultT]:
        """Create a task owned by this conversation, and start the harness.

        Args:
            definition: The class of an installed definition.
            input: Its input; stored with the task, and kept.
            key: Create it once: a second call with the same key gives the first task's id, ended or
                not; 1 to 512 characters.
            background: This conversation's abort and idle waits do not reach it.
            deadline: An aware datetime; passing it aborts the task, with the reason `deadline`. One
                that has passed aborts it at once.
            on_restart: What opening the store again does to it and to what is below, while it is
                live: `go` recovers it, `wait` blocks it (`interrupted`) until
                `harness.resume_task`, `abort` aborts it. None takes the nearest owner's; without
                any it is `go`.

        Raises:
            UnknownDefinitionError: The definition is not installed.
            NotJsonError: The input does not fit its type or cannot be stored.
            InvalidArgumentError: A deadline without a zone, an unknown `on_restart`, a key that is
                empty or too long.
        """
        self._harness.start()
        return await self._harness._runtime.commit(
            lambda tx: tx.create_task(
                definition,
                input,
                conversation=self.id,
                key=key,
                background=background,
                deadline=deadline,
                on_restart=on_restart,
            )
        )

    async def child_of(
        self, ctx: TaskContext[Any, Any, Any], *, key: str, agent: AgentChange | None
    ) -> Conversation:
        """The conversation that a task owns under a key, created with a copy of this agent."""
        chosen = {} if agent is None else checked_change(agent)
        async with ctx.commit() as tx:
            id = tx.create_conversation(key=key)
            if any(made.id == id for made in tx.conversations):
                copied = {**read_doc(tx, AgentDocument, self.id), **chosen}
                update_doc(tx, AgentDocument, id, **copied)
        return Conversation(self._harness, id)

    async def fork(self, at: int | None = None, *, key: str | None = None) -> Conversation:
        """Fork this conversation at an entry of its history; the fork is owned by nobody.

        It shares the history up to that entry, at no cost. Its documents start with what their
        fork policies say; what runs or is queued here stays here.

        Args:
            at: Any entry of the history, also one that it shares with its own parent; None: the
                newest, and the documents and the agent as they are now.
            key: Fork once: a second call with the same key gives the first fork, whatever `at` it
                names; 1 to 512 characters.

        Raises:
            NotFoundError: No such conversation, or the entry is not in its history.
            InvalidArgumentError: The key names a conversation that is no fork of this one.
        """
        # Not a body that awaits nothing: the documents are read in a thread when it has ended.
        async with self._harness.commit() as tx:
            id = tx.fork(self.id, at, key=key)
        return Conversation(self._harness, id)

    # --- reading -------------------------------------------------------------------------

    async def history(
        self, *, limit: int = 200, before: int | None = None, after: int = 0
    ) -> list[Entry]:
        """The newest entries with after < id < before, oldest first."""
        if limit < 1:
            raise InvalidArgumentError("limit", "expected at least 1", show(limit))
        return await self._harness.session.history(self.id, after=after, before=before, limit=limit)

    async def context(self, cutoff: int | None = None) -> ModelContext:
        """What the model is given of this conversation: a valid exchange, whatever happened.

        Every result follows its call, a call without one has a result that says so, and what was
        aborted or has failed is left out. Entries that come later do not change what is returned.

        Args:
            cutoff: The id of an entry, to see what a model was given as of it: the newest head at
                or before it counts, and nothing after it. None for the newest entry.

        Raises:
            NotFoundError: This session has no such conversation.
            InvalidArgumentError: The cutoff cannot be the id of an entry.
        """
        await trio.lowlevel.checkpoint()
        return await self._harness.session.context(self.id, cutoff)

    async def open_submissions(self) -> list[Submission]:
        """Submissions that are queued or placed: after a restart, what is still to be answered."""
        rows = self._harness.session.storage.open_submissions(self.id)
        await trio.lowlevel.checkpoint()
        return [Submission(self._harness, row.id) for row in rows]

    # --- watching ------------------------------------------------------------------------

    def watch(self) -> AbstractAsyncContextManager[Watch[ConversationView]]:
        """Watch where this conversation stands: its view, then one frame for each commit.

        `async with conversation.watch() as watch`, then `watch.value` and
        `async for frame in watch`. A frame has the whole view (which shares with the one before it
        what did not change) and, in `patch`, what a remote client needs. Watching slows no commit
        and starts nothing; what is owned here is not part of it.

        Raises:
            NotFoundError: This session has no such conversation.
            NestedCommitError: It is called in the body of a commit; watch before or after it.
        """
        return self._harness._watches.views(self.id)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[tuple[Event, ...]]]:
        """Watch as events: a snapshot first, then one batch per commit.

        A consumer that lags gets a new snapshot; leaving ends only this watch. The iteration stops
        when the harness closes.

        Raises:
            SessionPoisonedError: Out of the iteration: the storage failed; reopen it.
        """
        # Closed with the watch: who leaves in the middle of a batch leaves no generator behind.
        async with (
            self._harness._watches.told(self.id) as watch,
            aclosing(_batches(watch, self._snapshot_of)) as batches,
        ):
            yield batches

    def _snapshot_of(self, view: ConversationView) -> Snapshot:
        documents = {
            cls: defaults_of(cls) if stored is None else stored.json()
            for cls in (AgentDocument, InboxDocument, LiveDocument, UsageDocument)
            for stored in (view.documents[definition_of(cls).name],)
        }
        return Snapshot(
            entries=tuple(view.history),
            live=documents[LiveDocument],
            agent=documents[AgentDocument],
            inbox=tuple(documents[InboxDocument]["items"]),
            usage=documents[UsageDocument],
            permissions=tuple(
                each for each in self._harness.permissions() if is_below(each, self.id)
            ),
        )

    # --- ending --------------------------------------------------------------------------

    async def abort(self, reason: str = "user") -> list[SubmissionRecord]:
        """Abort what runs here, and take back what users have queued; writes stay.

        Commits marks and returns; `wait_for_idle` waits until everything below has ended.

        Returns:
            The withdrawn submissions, with their content, so that nothing typed is lost.
        """
        reason = check_reason(reason)
        return await self._harness._runtime.commit(lambda tx: self._abort_in(tx, reason))

    def _abort_in(self, tx: TreeTransaction, reason: str) -> list[SubmissionRecord]:
        """Stage the marks of `abort`, and what it takes back."""
        children = self._harness._runtime.index.children
        tx.conversation(self.id)
        pending = [self.id]
        while pending:
            for child in children.get(pending.pop(), ()):
                node = tx.view.find(child)
                if node is None or node.background:
                    continue
                if isinstance(node, Node) and node.live:
                    tx.mark(node.id, reason)
                else:
                    # A conversation of a task that ended: new work may have come to it.
                    pending.append(child)
        for node in list(tx.view.staged_children(self.id)):
            tx.mark(node.id, reason)
        return withdraw_queued(tx, self.id)

    async def wait_for_idle(self) -> None:
        """Wait until no ordinary task is live below this conversation."""
        self._harness.start()
        await self._harness._runtime.wait_for_idle(self.id)


async def _batches(
    watch: Watch[Told], snapshot_of: Callable[[ConversationView], Snapshot]
) -> AsyncGenerator[tuple[Event, ...], None]:
    """The batches of a watch, one for each commit that has something to tell."""
    yield (snapshot_of(watch.value.view),)
    async for frame in watch:
        events = (snapshot_of(frame.value.view),) if frame.whole else frame.value.events
        if events:
            yield events


def change_agent(tx: TreeTransaction, conversation_id: int, change: AgentChange) -> None:
    """Stage a change of an agent; checked against the document's own types."""
    tx.conversation(conversation_id)
    update_doc(tx, AgentDocument, conversation_id, **checked_change(change))


def checked_change(change: AgentChange) -> dict[str, Any]:
    """The given fields of a change, refused where they are of the wrong type."""
    if not isinstance(change, AgentChange):
        problem = "expected an AgentChange, as in AgentChange(model='openai/gpt-5')"
        raise InvalidArgumentError("agent", problem, show(change))
    given = change.given()
    kinds: dict[str, Any] = {
        "model": str,
        "thinking": str,
        "instructions": str,
        "cwd": str,
        "turns_max": int,
    }
    for name, value in given.items():
        if name in ("extensions", "tools"):
            given[name] = checked_selection(name, value)
            continue
        if value is None:
            continue
        _json.check_json(value, f"$.{name}")
        if name == "thinking" and value not in THINKING_LEVELS:
            problem = f"expected one of {', '.join(THINKING_LEVELS)}, or None"
            raise InvalidArgumentError(name, problem, show(value))
        if type(value) is not kinds[name]:
            raise InvalidArgumentError(
                name, f"expected {kinds[name].__name__}, or None", show(value)
            )
    return given
