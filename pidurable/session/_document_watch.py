"""Watches of documents, and the read-only value that they show.

A hub stands for one document as one class reads it: two versions of a definition that look at the
same document are two hubs. What is stored in the shape of the class is shown as it is, and the
operations of a commit are its patch. What an older class has written is migrated in memory when
somebody looks, and the patch is the difference of what is shown.

The value and the registration belong to one point of the line. What is in memory is as published,
so it is taken at once: what is being stored at that moment comes as a frame. What is not is read in
a commit body that writes nothing, while nothing can be stored.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import trio

from pidurable.errors import (
    DocumentTooNewError,
    PidurableError,
    StorageRefusedError,
    UnknownTaskError,
    show,
)
from pidurable.records import _patch
from pidurable.records._patch import PatchOp
from pidurable.records._readonly import JsonObject, copied_json
from pidurable.records._tasks import Status
from pidurable.session import _documents
from pidurable.session._documents import Address, DocChange, DocState, DocumentDefinition
from pidurable.session._watch import Hub, Watch

if TYPE_CHECKING:
    from pidurable.session._removals import Removal
    from pidurable.session._session import Session
    from pidurable.session._transaction import Transaction

DocT = TypeVar("DocT")


@final
class DocumentView(Mapping[str, Any], Generic[DocT]):
    """A committed value of a document: its JSON, read-only, and the class that reads it.

    `view["items"][0]` looks into the JSON without copying it; `read()` gives an instance of the
    class, and `json()` plain JSON, each a copy of your own. A view keeps its value whatever becomes
    of the document. Any look at it raises `MigrationError` where an older class has written it and
    `migrate` cannot read that.
    """

    __slots__ = ("_decode", "_definition", "_shown", "_state")

    def __init__(
        self,
        definition: DocumentDefinition,
        state: DocState,
        decode: Callable[..., Any],
    ) -> None:
        self._definition = definition
        self._state = state
        self._decode = decode
        self._shown: dict[str, Any] | None = None

    @property
    def value(self) -> JsonObject:
        """The JSON in the shape of the class, read-only.

        Raises:
            MigrationError: An older class has written it, and `migrate` could not read it.
        """
        return JsonObject(self._shown_json())

    def _shown_json(self) -> dict[str, Any]:
        """The JSON itself. Not to be changed, and so not to be given away."""
        if self._shown is None:
            self._shown = _documents.migrated(
                self._definition, self._state.value, self._state.version
            )
        assert self._shown is not None
        return self._shown

    @property
    def migrated(self) -> bool:
        """Whether an older version of the class has written it."""
        return self._state.version != self._definition.version

    def __getitem__(self, key: str) -> Any:
        return self.value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DocumentView):
            return bool(self._shown_json() == other._shown_json())
        return bool(self.value == other)

    __hash__ = None  # type: ignore[assignment]  # equal to plain JSON, which has none either

    def __repr__(self) -> str:
        return f"<DocumentView {self._definition.name} {show(self._state.value)}>"

    def __copy__(self) -> DocumentView[DocT]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.json()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return copied_json, (self._shown_json(),)

    def json(self) -> Any:
        """Return the JSON as a plain copy of your own. Costs its size.

        Raises:
            MigrationError: An older class has written it, and `migrate` could not read it.
        """
        return copied_json(self._shown_json())

    def read(self) -> DocT:
        """Decode it into a new instance of the class.

        Raises:
            NotJsonError: What is stored does not fit the class; the path says where.
            MigrationError: An older class has written it, and `migrate` could not read it.
        """
        definition = self._definition
        found: DocT = self._decode(self._shown_json(), definition.cls, path=f"$<{definition.name}>")
        return found


Value = DocumentView[Any] | None


def _json_of(value: Value) -> Any:
    return None if value is None else value.json()


def patch_of(before: Value, after: Value, ops: list[PatchOp]) -> list[PatchOp]:
    """The operations from what was shown to what is shown, copied out of what is stored.

    Args:
        before: The value before the commit.
        after: The value after it.
        ops: What the commit has stored of the step.
    """
    if before is None or after is None:
        return [{"op": "replace", "path": "", "value": _json_of(after)}]
    if after.migrated:
        ops = _patch.diff(before._shown_json(), after._shown_json())
    copied: list[PatchOp] = copied_json(ops)
    return copied


@final
class DocumentWatches:
    """The documents of a session that are watched. Its hubs are looked up by what changed."""

    def __init__(self, session: Session) -> None:
        self.hubs: dict[Address, dict[type, Hub[Any]]] = {}
        """By address, and by the class that reads what is there. Empty where nobody watches."""
        self._of_tasks: dict[int, set[Address]] = {}
        """By task, what is watched of its documents."""
        self._session = session

    @asynccontextmanager
    async def watch(
        self, cls: type[DocT], scope_id: int, key: str
    ) -> AsyncIterator[Watch[DocumentView[DocT] | None]]:
        """Watch one document; see `Session.watch`."""
        session = self._session
        definition = _documents.definition_of(cls)
        address = _documents.readable_address(definition, scope_id, key)
        if definition.scope == "conversation":
            session.conversation(scope_id)
        elif definition.scope == "task" and session.storage.task(scope_id) is None:
            raise UnknownTaskError(scope_id)
        watch: Watch[DocumentView[DocT] | None] = await at_one_point(
            session,
            is_ready=lambda: (
                definition.cls in self.hubs.get(address, ()) or session.has_docs([address])
            ),
            load=lambda: session.load_docs([address]),
            join=lambda: self._join(definition, address),
        )
        try:
            yield watch
        finally:
            watch._leave()

    def _join(
        self, definition: DocumentDefinition, address: Address
    ) -> Watch[DocumentView[Any] | None]:
        """Register with what is published. The document is in memory."""
        session = self._session
        classes = self.hubs.get(address, {})
        hub = classes.get(definition.cls)
        if hub is None:
            value = self._view(definition, session.doc(address))
            if value is not None:
                # What cannot be shown is refused here and not at the first look.
                value._shown_json()
            hub = Hub(
                value,
                seq=session.line.published_seq,
                to_json=_json_of,
                on_empty=lambda hub: self._forget(address, definition.cls, hub),
            )
            self.hubs.setdefault(address, classes)[definition.cls] = hub
            if definition.scope == "task":
                self._of_tasks.setdefault(address.scope_id, set()).add(address)
        watch = hub.join(session.line.published_seq)
        if definition.scope == "task" and watch.value is None:
            task = session.storage.task(address.scope_id)
            if task is None or task.status == Status.TERMINAL:
                # Nothing will ever be there.
                watch._end(None)
        return watch

    def _forget(self, address: Address, cls: type, hub: Hub[Any]) -> None:
        # A hub whose document was retired is not here any more, and another may be.
        classes = self.hubs.get(address)
        if classes is not None and classes.get(cls) is hub:
            del classes[cls]
            if not classes:
                self._drop(address)

    def _drop(self, address: Address) -> dict[type, Hub[Any]]:
        of_task = self._of_tasks.get(address.scope_id)
        if of_task is not None and address in of_task:
            of_task.discard(address)
            if not of_task:
                del self._of_tasks[address.scope_id]
        return self.hubs.pop(address)

    def _view(self, definition: DocumentDefinition, state: DocState | None) -> Value:
        if state is None:
            return None
        return DocumentView(definition, state, self._session.codec.decode)

    def publish(self, tx: Transaction) -> None:
        """Give what a commit has changed to those who watch it. One look for each document."""
        for change in tx.doc_changes:
            classes = self.hubs.get(change.address)
            if classes is None:
                continue
            if change.held_after is None:
                # What is created there later, in this very commit too, is another document.
                for hub in self._drop(change.address).values():
                    hub.publish(tx.seq, None, None)
                    hub.end()
                continue
            state = tx.docs[change.address]
            assert state is not None
            for cls, hub in list(classes.items()):
                self._publish(tx.seq, hub, _documents.definition_of(cls), state, change)

    def _publish(
        self,
        seq: int,
        hub: Hub[Any],
        definition: DocumentDefinition,
        state: DocState,
        change: DocChange,
    ) -> None:
        if state.version > definition.version:
            self._forget(change.address, definition.cls, hub)
            hub.end(DocumentTooNewError(definition.name, state.version, definition.version))
            return
        before, after, ops = hub.value, self._view(definition, state), change.ops
        hub.publish(
            seq,
            after,
            lambda: patch_of(before, after, ops),
            bytes_brought=_brought(None if before is None else before._state, state),
        )

    def removed(self, seq: int, removal: Removal) -> None:
        """End the watches of documents that went with their conversation."""
        gone = set(removal.conversations)
        scope = _documents.SCOPES["conversation"]
        for address in [each for each in self.hubs if each.scope == scope]:
            if address.scope_id in gone:
                for hub in self._drop(address).values():
                    if hub.value is not None:
                        hub.publish(seq, None, None)
                    hub.end()

    def task_ended(self, task_id: int) -> None:
        """End the watches of documents that a task never had: they will not come any more."""
        for address in list(self._of_tasks.get(task_id, ())):
            for hub in self._drop(address).values():
                hub.end()

    def end(self, error: PidurableError | None = None) -> None:
        """End every watch: the session is closed, or serves nothing more."""
        hubs, self.hubs, self._of_tasks = self.hubs, {}, {}
        for classes in hubs.values():
            for hub in classes.values():
                hub.end(error)


V = TypeVar("V")


async def at_one_point(
    session: Session,
    *,
    is_ready: Callable[[], bool],
    load: Callable[[], Awaitable[None]],
    join: Callable[[], Watch[V]],
) -> Watch[V]:
    """Call `join` at a point of the line, with what it needs in memory as published there.

    Args:
        session: Whose line.
        is_ready: Whether all of it is in memory already.
        load: Reads it otherwise. Nothing can be stored meanwhile.
        join: Registers, at once.

    Raises:
        SessionClosedError: The session is closed.
        SessionPoisonedError: It failed; reopen it.
    """
    line = session.line
    line.check_not_nested()
    await trio.lowlevel.checkpoint()
    line.check_usable()
    if is_ready():
        return join()
    watch: Watch[V] | None = None
    try:
        async with session.body(session.transaction(), place="the beginning of a watch"):
            if not is_ready():
                await load()
            watch = join()
    except StorageRefusedError:
        # The body looked at nothing that is only staged: that a batch is refused whose line it
        # shared is no concern of it.
        if watch is None:
            raise
    except BaseException:
        # A session that failed meanwhile raises here too.
        if watch is not None:
            watch._leave()
        raise
    assert watch is not None
    return watch


def _brought(before: DocState | None, after: DocState) -> int:
    """What a commit has brought into a document, about: its change, or all where it is a base."""
    if before is not None and before.id == after.id and after.deltas == before.deltas + 1:
        return after.delta_bytes - before.delta_bytes
    return after.base_bytes
