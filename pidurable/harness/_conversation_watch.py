"""Who watches which conversation, and what a commit means for them.

A conversation that somebody watches has its view kept, and two hubs: one gives the views and their
patches, the other what the agent's events are made of, which is more (submissions are in no view).
Both are found by what a commit changed, never by going through all that is watched, and both are
forgotten with the last who watches.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, final

from pidurable.agent._documents import address_of
from pidurable.agent._permissions import PermissionDocument
from pidurable.errors import PidurableError
from pidurable.harness._event_making import Happened, events_of
from pidurable.harness._events import Event, TaskFailed
from pidurable.harness._views import (
    SHOWN_DOCUMENTS,
    SHOWN_NAMES,
    ConversationView,
    DocumentStep,
    HeadPlace,
    HistoryPage,
    patch_between,
)
from pidurable.records import _codec, _json
from pidurable.records._entries import Entry
from pidurable.records._limits import VIEW_PAGE_ENTRIES
from pidurable.records._submissions import SubmissionRecord
from pidurable.session._document_watch import at_one_point
from pidurable.session._documents import SCOPES, DocChange, definition_of, migrated
from pidurable.session._grown import plain
from pidurable.session._watch import Hub, Watch
from pidurable.storage import Op
from pidurable.tasks._transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.session._session import Session
    from pidurable.session._transaction import Transaction

V = TypeVar("V")

_PERMISSION = definition_of(PermissionDocument).name
_SCOPE = SCOPES["conversation"]
_LATE_ENTRIES_MAX = 2 * VIEW_PAGE_ENTRIES


class _Changes:
    """What one commit has done to one conversation."""

    __slots__ = ("documents", "entries", "failed", "head", "permissions", "submissions")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.submissions: list[SubmissionRecord] = []
        self.failed: list[TaskFailed] = []
        self.permissions: list[DocChange] = []
        self.documents: dict[str, DocumentStep] = {}
        self.head: HeadPlace | None = None
        """The newest head among the entries."""

    @property
    def any(self) -> bool:
        """Whether there is anything to tell."""
        beside = self.submissions or self.failed or self.permissions
        return bool(self.entries or self.documents or beside)

    def add(self, entry: Entry) -> None:
        """One more entry."""
        self.entries.append(entry)
        if entry.head is not None:
            self.head = HeadPlace(entry.id, entry.head)

    def change(self, change: DocChange) -> None:
        """One more change of a document."""
        name, after = change.address.name, change.held_after
        # Retired and created anew in one commit is a change like any other, told as a whole.
        standing = self.documents.get(name)
        before = change.held_before if standing is None else standing.held_before
        whole = before is None or after is None or standing is not None
        self.documents[name] = DocumentStep(
            held_before=before, held_after=after, ops=None if whole else change.ops
        )


def failures_in(tx: Transaction, watched: Container[int]) -> Iterator[tuple[int, TaskFailed]]:
    """The tasks of watched conversations that a commit has ended in failure."""
    if not isinstance(tx, TreeTransaction):
        return
    for op, values in tx.writes:
        if op is not Op.OUTCOME:
            continue
        id, text = values
        node = tx.view.task(id)
        # A task that is parked by its fault has an error, and no outcome yet.
        if node is None or node.outcome_status in ("completed", "aborted"):
            continue
        if node.conversation in watched:
            outcome = _codec.decode_outcome(_json.loads(text))
            error = outcome.error
            said = outcome.reason if error is None else f"{error.type}: {error.message}"
            yield node.conversation, TaskFailed(id, node.kind, outcome.status, said)


@final
class Told:
    """A view, and what the commit that made it means in events."""

    __slots__ = ("_changes", "_events", "view")

    def __init__(self, view: ConversationView, changes: _Changes) -> None:
        self.view = view
        self._changes = changes
        self._events: tuple[Event, ...] | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """The events, made once for all who follow them."""
        if self._events is None:
            changes = self._changes
            self._events = events_of(
                Happened(
                    history=self.view.history,
                    entries=changes.entries,
                    submissions=changes.submissions,
                    documents={
                        name: (plain(step.held_before), plain(step.held_after))
                        for name, step in changes.documents.items()
                    },
                    failed=changes.failed,
                    permissions=[(each.before, each.after) for each in changes.permissions],
                )
            )
        return self._events


class _Watched:
    """One conversation, for as long as somebody watches it.

    While nobody takes frames, because all have fallen behind, a commit only notes what it did.
    """

    def __init__(self, view: ConversationView, seq: int, forget: Callable[[], None]) -> None:
        def left(_: Hub[Any]) -> None:
            if not self.views.size and not self.told.size:
                forget()

        self._view = view
        self._seq = seq
        self._late: _Changes | None = None
        """What came since the view was made, while nobody took a frame."""
        self.views: Hub[ConversationView] = Hub(
            view, seq=seq, to_json=ConversationView.json, on_empty=left
        )
        self.told: Hub[Told] = Hub(
            Told(view, _Changes()), seq=seq, to_json=_told_json, on_empty=left
        )

    @property
    def active(self) -> bool:
        """Whether anybody takes the next frame."""
        return self.views.active or self.told.active

    def late(self, seq: int) -> _Changes:
        """Where a commit notes what it does, while nobody takes frames."""
        self._seq = seq
        late = self._late
        if late is None:
            late = self._late = _Changes()
            self.views.postpone(self._newest)
            self.told.postpone(self._standing)
        elif len(late.entries) > _LATE_ENTRIES_MAX:
            # Of more than a page only the newest are shown, and whether there are others.
            del late.entries[: -VIEW_PAGE_ENTRIES - 1]
        return late

    def _newest(self) -> tuple[int, ConversationView]:
        if self._late is not None:
            self._view, self._late = _next_view(self._view, self._late), None
        return self._seq, self._view

    def _standing(self) -> tuple[int, Told]:
        """Where it stands, and nothing to tell of it: for who begins to follow, or fell behind."""
        seq, view = self._newest()
        return seq, Told(view, _Changes())

    def publish(self, seq: int, changes: _Changes) -> None:
        """Tell those who take frames."""
        _, before = self._newest()
        after = before
        if changes.entries or changes.documents:
            after = self._view = _next_view(before, changes)
            self._seq = seq
            if self.views.active:
                added, steps = len(changes.entries), changes.documents
                self.views.publish(seq, after, lambda: patch_between(before, after, added, steps))
            elif not self.views.postponed:
                self.views.postpone(self._newest)
        if self.told.active:
            if changes.any:
                self.told.publish(seq, Told(after, changes), None)
        elif not self.told.postponed:
            self.told.postpone(self._standing)

    def end(self, error: PidurableError | None) -> None:
        self.views.end(error)
        self.told.end(error)


def _told_json(told: Told) -> Any:
    return told.view.json()


def _next_view(before: ConversationView, changes: _Changes) -> ConversationView:
    history, head, held = before.history, before.head, before._held
    if not changes.entries and not changes.documents:
        return before
    if changes.entries:
        history = history._grown(changes.entries)
        head = changes.head or head
    if changes.documents:
        changed = {name: step.held_after for name, step in changes.documents.items()}
        held = {**held, **changed}
    return ConversationView(record=before.record, history=history, head=head, held=held)


@final
class ConversationWatches:
    """The watched conversations of a harness."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._watched: dict[int, _Watched] = {}
        session.watch_ends.append(self._end)

    def views(self, conversation_id: int) -> AbstractAsyncContextManager[Watch[ConversationView]]:
        """Watch the view of a conversation; see `Conversation.watch`."""
        return self._open(conversation_id, lambda watched: watched.views)

    def told(self, conversation_id: int) -> AbstractAsyncContextManager[Watch[Told]]:
        """Follow what the events of a conversation are made of."""
        return self._open(conversation_id, lambda watched: watched.told)

    @asynccontextmanager
    async def _open(
        self, conversation_id: int, hub_of: Callable[[_Watched], Hub[V]]
    ) -> AsyncIterator[Watch[V]]:
        session = self._session
        session.conversation(conversation_id)
        loaded: list[ConversationView] = []

        async def load() -> None:
            loaded.append(await self._load(conversation_id))

        def join() -> Watch[V]:
            watched = self._watched.get(conversation_id)
            if watched is None:
                (view,) = loaded
                watched = self._watched[conversation_id] = _Watched(
                    view,
                    session.line.published_seq,
                    lambda: self._forget(conversation_id),
                )
            return hub_of(watched).join(session.line.published_seq)

        watch = await at_one_point(
            session, is_ready=lambda: conversation_id in self._watched, load=load, join=join
        )
        try:
            yield watch
        finally:
            watch._leave()

    def _forget(self, conversation_id: int) -> None:
        # Nothing is watched anew once all watches were ended.
        self._watched.pop(conversation_id, None)

    async def _load(self, conversation_id: int) -> ConversationView:
        """Read where a conversation stands, while nothing can be stored."""
        session = self._session
        addresses = [address_of(cls, conversation_id) for cls in SHOWN_DOCUMENTS]
        await session.load_docs(addresses)
        newest = await session.history(conversation_id, limit=VIEW_PAGE_ENTRIES + 1)
        head = await session.newest_head(conversation_id)
        documents = {}
        for cls, address in zip(SHOWN_DOCUMENTS, addresses, strict=True):
            state = session.doc(address)
            documents[address.name] = (
                None if state is None else migrated(definition_of(cls), state.value, state.version)
            )
        return ConversationView(
            record=session.conversation(conversation_id),
            history=HistoryPage._of(newest),
            head=None if head is None else HeadPlace(*head),
            held=documents,
        )

    def publish(self, tx: Transaction) -> None:
        """Give what a commit has changed to those who watch it. Costs what it has changed."""
        watched = self._watched
        if not watched:
            return
        touched: dict[int, _Changes] = {}
        for entry in tx.entries:
            place = watched.get(entry.conversation_id)
            if place is not None:
                self._changes(tx, place, entry.conversation_id, touched).add(entry)
        for record in tx.submissions.values():
            id = record.conversation_id
            place = watched.get(id)
            # No view shows them, so who comes late needs nothing of them.
            if place is not None and place.active:
                self._changes(tx, place, id, touched).submissions.append(record)
        for id, failure in failures_in(tx, watched):
            place = watched.get(id)
            # As submissions: no view shows them.
            if place is not None and place.active:
                self._changes(tx, place, id, touched).failed.append(failure)
        for change in tx.doc_changes:
            address, id = change.address, change.address.scope_id
            if address.name == _PERMISSION:
                self._ask(tx, change, touched)
                continue
            if address.scope != _SCOPE or address.name not in SHOWN_NAMES:
                continue
            place = watched.get(id)
            if place is not None:
                self._changes(tx, place, id, touched).change(change)
        for id, changes in touched.items():
            watched[id].publish(tx.seq, changes)
        if tx.removal is not None:
            for id in tx.removal.conversations:
                gone = watched.pop(id, None)
                if gone is not None:
                    gone.end(None)

    def _ask(self, tx: Transaction, change: DocChange, touched: dict[int, _Changes]) -> None:
        """A permission request is told in its conversation, and in all above it."""
        value = change.after if change.before is None else change.before
        for kind, id in () if value is None else value["path"]:
            place = self._watched.get(id) if kind == "conversation" else None
            if place is not None and place.active:
                self._changes(tx, place, id, touched).permissions.append(change)

    @staticmethod
    def _changes(
        tx: Transaction, place: _Watched, id: int, touched: dict[int, _Changes]
    ) -> _Changes:
        """Where to note what a commit does to a conversation."""
        if not place.active:
            return place.late(tx.seq)
        found = touched.get(id)
        if found is None:
            found = touched[id] = _Changes()
        return found

    def _end(self, error: PidurableError | None) -> None:
        ended, self._watched = self._watched, {}
        for watched in ended.values():
            watched.end(error)
