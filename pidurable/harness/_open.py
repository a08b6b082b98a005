"""Opening a harness: a session with its scheduler, registry and models."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar, final

import trio

from pidurable.agent._awaited_submissions import AwaitedSubmissions
from pidurable.agent._compaction import Compaction
from pidurable.agent._generation import Generation
from pidurable.agent._models import Models
from pidurable.agent._owned_agents import OwnedAgents
from pidurable.agent._permissions import Permissions
from pidurable.agent._progress import Progress
from pidurable.agent._services import AgentChange, AgentServices, EnvFor, local_env
from pidurable.agent._settlement import settle_by
from pidurable.agent._silence import silences
from pidurable.agent._tool_call import ToolTask
from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    SessionClosedError,
    SessionPoisonedError,
    show,
)
from pidurable.harness._command_kinds import ROOT_KEY
from pidurable.harness._commands import Commands
from pidurable.harness._conversation import Conversation, change_agent, checked_change
from pidurable.harness._conversation_watch import ConversationWatches
from pidurable.harness._definitions import InstalledNow
from pidurable.harness._overview_calls import OverviewCalls
from pidurable.harness._permission_calls import PermissionCalls
from pidurable.harness._submission import Submission
from pidurable.harness._task_calls import TaskCalls
from pidurable.harness._task_host import TaskHost
from pidurable.records._checks import check_seconds
from pidurable.records._limits import Settings
from pidurable.registry import Registry
from pidurable.session._document_watch import DocumentView
from pidurable.session._participants import Participant
from pidurable.session._seams import Blocking, Clock, Failpoints, Randomness, VirtualClock
from pidurable.session._session import Session
from pidurable.session._stubs import unknown_submission
from pidurable.session._watch import Watch
from pidurable.storage import MemoryStorage, SqliteStorage, Storage
from pidurable.tasks._gc import Collector
from pidurable.tasks._gc_report import GcReport
from pidurable.tasks._open import bare, open_runtime, outranks
from pidurable.tasks._runtime import Runtime
from pidurable.tasks._transaction import TreeTransaction

DocT = TypeVar("DocT")
InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")

_DRAIN_LOOK_SECONDS = 0.02


@final
class Harness(TaskCalls, PermissionCalls, OverviewCalls, Participant):
    """An open session with its scheduler. Obtained from `open_harness`."""

    def __init__(
        self, runtime: Runtime, services: AgentServices, registry: Registry, *, starts: bool
    ) -> None:
        super().__init__(runtime, services)
        self.session: Session = runtime.session
        self.registry = registry
        self._watches = ConversationWatches(runtime.session)
        self._waiting: dict[int, set[trio.Event]] = {}
        """By submission, whoever waits for it to change."""
        self._closed = False
        self._collector = Collector(runtime)
        self._commands = Commands(harness=self, starts=starts)
        self._collector.take_in = self._commands.take_in
        self._collector.in_hand = self._commands.in_hand

    # --- conversations -------------------------------------------------------------------

    async def root(self, *, agent: AgentChange | None = None) -> Conversation:
        """The root conversation, created at first use.

        Args:
            agent: Its agent; counts only when this call creates the root.

        Raises:
            InvalidArgumentError: The agent is no `AgentChange`, or a field of it is of the wrong
                type; also where it would not count.
        """
        if agent is not None:
            checked_change(agent)
        row = self.session.storage.conversation_by_key(None, ROOT_KEY)
        if row is not None:
            await trio.lowlevel.checkpoint()
            return Conversation(self, row.id)

        def body(tx: TreeTransaction) -> int:
            id = tx.create_conversation(key=ROOT_KEY)
            if agent is not None and any(made.id == id for made in tx.conversations):
                change_agent(tx, id, agent)
            return id

        return Conversation(self, await self._runtime.commit(body))

    async def create_conversation(self, *, agent: AgentChange | None = None) -> Conversation:
        """Create another ownerless conversation.

        Raises:
            InvalidArgumentError: As for `root`.
        """

        def body(tx: TreeTransaction) -> int:
            id = tx.create_conversation()
            if agent is not None:
                change_agent(tx, id, agent)
            return id

        return Conversation(self, await self._runtime.commit(body))

    def conversation(self, conversation_id: int) -> Conversation:
        """A handle of a conversation.

        Raises:
            NotFoundError: This session has no such conversation.
        """
        if type(conversation_id) is not int:
            raise NotFoundError("conversation", show(conversation_id))
        self.session.conversation(conversation_id)
        return Conversation(self, conversation_id)

    def submission(self, submission_id: int) -> Submission:
        """A handle of a submission, by its id: to wait for it, or to read its answer.

        Raises:
            NotFoundError: This session has no such submission.
        """
        if self.session.submission(submission_id) is None:
            raise unknown_submission(self.session.storage, submission_id)
        return Submission(self, submission_id)

    # --- commits -------------------------------------------------------------------------

    def commit(self) -> AbstractAsyncContextManager[TreeTransaction]:
        """`async with harness.commit() as tx`: one atomic commit of the host.

        An exception in the block stores nothing. `trio.Cancelled` out of it always means that
        nothing was stored.
        """
        return self._runtime.open_commit()

    # --- documents -----------------------------------------------------------------------

    def snapshot(self, cls: type[DocT], scope_id: int = 0, *, key: str = "") -> DocT | None:
        """The committed value of a document, a copy of your own; None where there is none.

        Never creates, and migrates in memory only. The first look at a document that is not in
        memory reads the storage in the loop: its newest base and at most 256 changes.

        Args:
            cls: A class declared with `@document`.
            scope_id: The conversation or task it belongs to; not needed for the session's.
            key: Which one of a family.

        Raises:
            InvalidArgumentError: The scope id is no id, or a key is missing or not wanted.
            DocumentTooNewError: It was written by a newer version of the class.
            MigrationError: `migrate` could not read what is stored.
            NotJsonError: What is stored does not fit the class; the path says where.
        """
        return self.session.snapshot(cls, scope_id, key=key)

    async def snapshot_as_of(
        self, cls: type[DocT], conversation_id: int, entry_id: int, *, key: str = ""
    ) -> DocT | None:
        """The value that a rewindable document had after the commit of an entry.

        None where there was none then; one that was retired since, or made anew, is found as it
        was. An entry that a fork shares with its parent shows the parent's document.

        Args:
            cls: A class declared with `@document(history="rewindable")`.
            conversation_id: The conversation it belongs to.
            entry_id: An entry of that conversation's history.
            key: Which one of a family.

        Raises:
            InvalidArgumentError: The document is not rewindable.
            NotFoundError: No such conversation, the entry is not in its history, or the document
                was not rewindable then, so that its value was not kept.
            DocumentTooNewError: It was written by a newer version of the class.
            MigrationError: `migrate` could not read what is stored.
            NotJsonError: What is stored does not fit the class; the path says where.
        """
        return await self.session.snapshot_as_of(cls, conversation_id, entry_id, key=key)

    def watch(
        self, cls: type[DocT], scope_id: int = 0, *, key: str = ""
    ) -> AbstractAsyncContextManager[Watch[DocumentView[DocT] | None]]:
        """Watch a document: its committed value, then one frame for each commit that changes it.

        `async with harness.watch(Todos, id) as watch`, then `watch.value` and
        `async for frame in watch`. Where there is no document the value is None, and its creation
        is the first frame. Its retirement is the last one, with the value None: what is created at
        the same address later is another document. A watch of a task's document ends with the task,
        whether or not there was one. Watching slows no commit, and starts nothing.

        Args:
            cls: A class declared with `@document`.
            scope_id: The conversation or task it belongs to; not needed for the session's.
            key: Which one of a family.

        Raises:
            NotFoundError: This session has no such conversation, or no such task.
            DocumentTooNewError: A newer version of the class has written it; update this program.
            MigrationError: `migrate` could not read what is stored.
            NestedCommitError: It is called in the body of a commit; watch before or after it.
        """
        return self.session.watch(cls, scope_id, key=key)

    # --- work ----------------------------------------------------------------------------

    async def apply_commands(self) -> int:
        """Apply what other processes have handed in, now and not at the next look.

        A harness looks by itself: when it is opened, and then every `commands_seconds` (a setting).
        Only under a virtual clock that nobody shares it looks at opening alone.

        Returns:
            How many commands have got an answer.

        Raises:
            StorageRefusedError, StorageAccessError: They could not be read, or their answers could
                not be stored. They wait for the next look.
            SessionPoisonedError: The storage failed; what waits is applied when it is reopened.
        """
        return await self._commands.apply_waiting()

    def start(self) -> None:
        """Let tasks run. Submitting, creating tasks and waiting start the harness by themselves;
        aborts and signals do not."""
        self._runtime.start()
        self._commands.host_started()

    async def drain(self, *, seconds: float) -> list[int]:
        """Begin no further phase, cut what models stream, and let running calls end.

        For a host that is about to leave: nothing starts again before the store is reopened.
        A call that waits for work of its own is not waited for, since that work stands still.

        Args:
            seconds: Most seconds to wait.

        Returns:
            Tasks whose code still runs; leaving the harness stops them in the middle.

        Raises:
            InvalidArgumentError: The seconds are negative, or no number.
        """
        runtime, most = self._runtime, check_seconds(seconds, "seconds")
        runtime.closing = True
        for invocation in list(runtime.invocations.values()):
            if invocation.kind in (Generation.name, Compaction.name):
                invocation.cancel()
        with trio.move_on_after(most):
            # An invocation ends, or begins to wait for work of its own: no one event says both.
            while any(not self._stands_still(id) for id in runtime.invocations):  # noqa: ASYNC110
                await trio.sleep(_DRAIN_LOOK_SECONDS)
        return sorted(runtime.invocations)

    def _stands_still(self, task_id: int) -> bool:
        node = self._runtime.published.task(task_id)
        return node is not None and node.below > 0

    async def blob(self, sha256: str) -> bytes:
        """The bytes that a message refers to, or that `tx.put_blob` stored.

        Args:
            sha256: Their name, as in `ImageBlock.blob`: SHA-256 in lower-case hex.

        Raises:
            NotFoundError: Nothing is stored under this name.
            StorageCorruptError: The bytes are not those that the name says. Restore a copy.
        """
        return await self.session.blob(sha256)

    async def gc(
        self, *, older_than: timedelta, keep_outcomes: bool = False, dry_run: bool = False
    ) -> GcReport:
        """Remove ended trees of tasks, and bytes that nothing refers to, to free their space.

        A tree is a task that nothing owns but an ownerless conversation, with everything below it:
        owned tasks, owned conversations with their entries, submissions and documents. It goes
        whole or not at all, and only when all of it ended before the cutoff, nothing outside was
        forked from it, no submission in it is open, and no live task waits for anything in it, or
        was woken for it and has not gone on since.
        Ownerless conversations stay, with all that is said in them. Of a removed root with a key,
        and of removed submissions with a request id, a stub stays: who hands the same in again is
        given the first one's id, and who asks for it is told how it ended.
        Answers to commands of other processes go when they were given before the cutoff, and a week
        ago at least; none of those is applied again, `AnswerGoneError` tells who asks so late.
        What was spent in removed conversations is not in `usage()` any more.

        Work goes on meanwhile: what others need of the store comes first, and this takes at most
        about a tenth of it. It may be cancelled at any time; what it has begun then, or when the
        process dies, goes on with the next call, or when the store is opened again. One runs at
        a time, the next call waits.

        Args:
            older_than: How long ago the last task of a tree must have ended. By the wall clock.
            keep_outcomes: The roots stay with their outcomes, without their inputs.
            dry_run: Only tell what would go, by what is stored now: what other processes have
                handed in, and nobody has applied, is not looked at.

        Raises:
            InvalidArgumentError: `older_than` is negative, or no timedelta.
            StorageRefusedError: The storage took no more. What went until then is gone, and
                nothing is half: call again later.
            StorageAccessError: A read failed. It is as above; call again. If the folder of commands
                from outside cannot be used, nothing is begun: do first what the message says.
            StorageCorruptError: What a task waits for, or a document, cannot be read, so that
                nothing is certain of what it needs. Restore a copy.
            SessionPoisonedError: The storage failed; reopen it and call again.
        """
        return await self._collector.collect(older_than, keep=keep_outcomes, dry_run=dry_run)

    # --- what waits hang on --------------------------------------------------------------

    async def submission_changed(self, submission_id: int) -> None:
        """Wait until the submission changes, or the harness closes."""
        event = trio.Event()
        waiting = self._waiting.setdefault(submission_id, set())
        waiting.add(event)
        try:
            await event.wait()
        finally:
            waiting.discard(event)
            if not waiting and self._waiting.get(submission_id) is waiting:
                del self._waiting[submission_id]

    def check_serving(self) -> None:
        """Raise if the session ended while somebody waited."""
        self._runtime.check_serving()
        if self._closed:
            raise SessionClosedError(self.session.storage.store)

    # --- participant ---------------------------------------------------------------------

    def committed(self, tx: Any) -> None:
        for id in tx.submissions:
            for event in self._waiting.pop(id, ()):
                event.set()
        self._watches.publish(tx)

    def poisoned(self, error: SessionPoisonedError) -> None:
        self.release()

    def release(self) -> None:
        """Wake whoever waits: the session ends."""
        self._closed = True
        for waiting in self._waiting.values():
            for event in waiting:
                event.set()
        self._waiting.clear()


def open_storage(
    store: str | os.PathLike[str] | Storage,
    *,
    create: bool,
    vfs: str | None,
    durability: Literal["power", "process"],
) -> Storage:
    """The storage behind what a host calls a store."""
    if isinstance(store, str | os.PathLike):
        path = os.fspath(store)
        if path == ":memory:":
            return MemoryStorage()
        if path.startswith(("postgresql://", "postgres://")):
            raise InvalidArgumentError(
                "store", "PostgreSQL is not supported yet; pass a path", show(path)
            )
        return SqliteStorage(path, create=create, vfs=vfs, durability=durability)
    if isinstance(store, Storage):
        return store
    raise InvalidArgumentError("store", "expected a path, ':memory:' or a Storage", show(store))


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_harness(
    store: str | os.PathLike[str] | Storage,
    *,
    registry: Registry | None = None,
    models: Models | None = None,
    settings: Settings | None = None,
    durability: Literal["power", "process"] = "power",
    create: bool = True,
    takeover: bool = False,
    vfs: str | None = None,
    clock: Clock | None = None,
    blocking: Blocking | None = None,
    randomness: Randomness | None = None,
    failpoints: Failpoints | None = None,
    env: EnvFor | None = None,
) -> AsyncIterator[Harness]:
    """Hold a store and run what is in it while the block lasts.

    Nothing runs before `start()`, or the first submit, create_task or wait. Leaving cancels
    what runs and waits for it; the work itself goes on at the next opening.

    Args:
        store: A path (SQLite), `":memory:"`, or a `Storage`, which is closed at the end.
        registry: The installed extensions; an empty one where None.
        models: The models that conversations may use; None where no agent is run.
        settings: Limits; the defaults where None.
        durability: `power`: an acknowledged commit survives a loss of power. `process`: it
            survives the death of the process, and a lone commit is several times faster.
        create: Create a missing store.
        takeover: Hold it although a live process does; that one can store nothing more.
        vfs: The name of a SQLite VFS to use.
        clock, blocking, randomness, failpoints: Seams for tests; the system's own where None.
        env: Gives the environment (files and processes) of a conversation's tools; by default
            its agent's working directory on this machine.

    Raises:
        StorageHeldError: Another live process holds it.
        NotAStoreError, StorageCorruptError, StorageTooNewError, StorageAccessError: The path
            cannot be opened as a store. Nothing was changed.
    """
    making = _Making(registry, models, env, starts=True)
    runtime = open_runtime(
        open_storage(store, create=create, vfs=vfs, durability=durability),
        snapshot=making.definitions,
        settings=settings,
        clock=clock,
        blocking=blocking,
        randomness=randomness,
        failpoints=failpoints,
        takeover=takeover,
        durability=durability,
        prepare=making.prepare,
    )
    async with _served(runtime, making) as harness:
        yield harness


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_quiet_harness(
    store: str | os.PathLike[str],
    *,
    create: bool = False,
    registry: Registry | None = None,
    models: Models | None = None,
    failpoints: Failpoints | None = None,
) -> AsyncIterator[Harness]:
    """Hold a store that is not to work before its host says so, if at all.

    Input that other processes have handed in is stored like any command, and waits until the host
    starts the harness, or somebody else does at a later opening.
    """
    making = _Making(registry, models, None, starts=False)
    runtime = open_runtime(
        open_storage(store, create=create, vfs=None, durability="power"),
        snapshot=making.definitions,
        failpoints=failpoints,
        prepare=making.prepare,
    )
    async with _served(runtime, making) as harness:
        yield harness


class _Making:
    """What becomes a harness once the runtime below it has been made, and before it runs."""

    harness: Harness
    services: AgentServices

    def __init__(
        self, registry: Registry | None, models: Models | None, env: EnvFor | None, *, starts: bool
    ) -> None:
        self.registry = registry if registry is not None else Registry()
        self.definitions = InstalledNow(self.registry)
        self._models = models
        self._env = env or local_env()
        self._starts = starts
        """Whether commands from outside may start it."""

    def prepare(self, runtime: Runtime) -> None:
        """Add what runs agents to a runtime, and make its harness."""
        services = self.services = AgentServices(
            runtime=runtime,
            models=self._models,
            registry=lambda: self.registry.snapshot,
            env_for=self._env,
            conversation=lambda id: self.harness.conversation(id),
        )
        services.progress = Progress(runtime)
        services.permissions = Permissions(services)
        self.definitions.add(Generation(services), ToolTask(services), Compaction(services))
        # Of one turn each makes the next one ready.
        runtime.at_once = frozenset({Generation.name, ToolTask.name, Compaction.name})
        settle_by(services)
        AwaitedSubmissions(runtime)
        OwnedAgents(runtime)
        self.harness = Harness(runtime, services, self.registry, starts=self._starts)
        runtime.host = TaskHost(self.harness, services)
        runtime.session.participants.append(self.harness)


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def _served(
    opening: AbstractAsyncContextManager[Runtime], making: _Making
) -> AsyncIterator[Harness]:
    """The harness that is being made, with commands from outside done while the block lasts."""
    error: BaseException | None = None
    async with opening as runtime:
        registry, harness, progress = making.registry, making.harness, making.services.progress
        making.services.permissions.load()
        unsubscribe = registry.subscribe(lambda: runtime.registry_changed(registry.snapshot.codec))
        try:
            with silences().kept(virtual=isinstance(runtime.session.clock, VirtualClock)):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(progress.serve)  # noqa: ASYNC113 - runs as long as the body
                    nursery.start_soon(harness._collector.finish)
                    try:
                        await harness._commands.look()
                        nursery.start_soon(harness._commands.serve)  # noqa: ASYNC113 - as above
                        yield harness
                    except BaseException as caught:  # noqa: ASYNC103 - raised below, bare
                        error = caught
                    nursery.cancel_scope.cancel()
        except BaseException as late:  # noqa: ASYNC103 - raised below, bare
            if error is None or outranks(late, error):
                error = bare(late)
        finally:
            unsubscribe()
            harness.release()
            registry.run_unloads()
        if error is not None:
            raise error
