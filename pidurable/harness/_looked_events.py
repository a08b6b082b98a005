"""Events of a conversation for whoever does not hold its session: by looking again and again.

Nothing is read while nothing was committed: the number of the last commit says so. After a commit
the newest state is read and compared with the one before, by the same rules by which a commit is
told to those who watch inside the holder; a batch is what has changed between two looks, so it may
tell of several commits at once. No entry is left out and none comes twice. What began and ended
between two looks is told by its entries alone, and of tasks that failed nothing is told.
"""

from __future__ import annotations

from typing import Any, Final, final

import attrs

from pidurable.agent._documents import (
    AgentDocument,
    InboxDocument,
    LiveDocument,
    UsageDocument,
)
from pidurable.agent._permissions import (
    PermissionRequest,
    encode_request,
    is_below,
    stored_open_requests,
    stored_request,
)
from pidurable.errors import NotFoundError
from pidurable.harness._event_making import Happened, events_of
from pidurable.harness._events import Event, Snapshot
from pidurable.harness._listing import stored_now
from pidurable.records._codec import Codec
from pidurable.records._entries import Entry
from pidurable.records._readonly import copied_json
from pidurable.records._submissions import SubmissionRecord
from pidurable.session._documents import definition_of
from pidurable.session._rows import entry_of, submission_of
from pidurable.storage import Storage

_DOCUMENTS: Final[dict[str, type]] = {
    definition_of(cls).name: cls
    for cls in (AgentDocument, InboxDocument, LiveDocument, UsageDocument)
}
_AGENT, _INBOX, _LIVE, _USAGE = _DOCUMENTS
_PAGE = 1_000
_TRIES = 8
"""More reads of one state that straddled a commit; where all do, the last one counts."""


@attrs.frozen(kw_only=True)
class _State:
    """Where a conversation stood at a look."""

    seq: int
    documents: dict[str, Any]
    open: dict[int, SubmissionRecord]
    """Submissions without an end, by id."""
    permissions: dict[int, PermissionRequest]
    """Open requests of it and of all below it."""
    added: tuple[Entry, ...] = ()
    """Entries behind the last one that was told."""


@final
class LookedEvents:
    """One conversation, looked at again and again. Blocks: for a thread, one call at a time.

    Args:
        storage: A store that is open for looking, or any other.
        conversation_id: The conversation, which must be there.
        newest: The newest entries of its history, oldest first: what is told of them is told in the
            snapshot.
    """

    def __init__(self, storage: Storage, conversation_id: int, newest: list[Entry]) -> None:
        self._storage = storage
        self._id = conversation_id
        self._codec = Codec()
        self._history = newest
        self._last = newest[-1].id if newest else 0
        self._state: _State | None = None

    def look(self) -> tuple[Event, ...]:
        """What has happened since the last look; the first one gives a snapshot.

        Raises:
            NotFoundError: The conversation was removed.
        """
        before = self._state
        if before is not None and self._storage.head().seq == before.seq:
            return ()
        after = self._state = self._read()
        if after.added:
            self._last = after.added[-1].id
            self._history = [*self._history, *after.added][-_PAGE:]
        return (self._snapshot(after),) if before is None else self._events(before, after)

    def _read(self) -> _State:
        state = self._read_once()
        for _ in range(_TRIES):
            if self._storage.head().seq == state.seq:
                break
            state = self._read_once()
        return state

    def _read_once(self) -> _State:
        storage, id = self._storage, self._id
        seq = storage.head().seq
        if storage.conversation(id) is None:
            raise NotFoundError("conversation", id)
        documents = {name: stored_now(storage, cls, id) for name, cls in _DOCUMENTS.items()}
        records = (submission_of(row) for row in storage.open_submissions(id))
        asked = (each for each in stored_open_requests(storage) if is_below(each, id))
        permissions = {each.id: each for each in asked}
        # Last of all, so that what the other parts speak of is among them.
        added: list[Entry] = []
        while page := storage.entries(id, after=added[-1].id if added else self._last, limit=_PAGE):
            added += [entry_of(row, self._codec, storage) for row in page]
        return _State(
            seq=seq,
            documents=documents,
            open={record.id: record for record in records},
            permissions=permissions,
            added=tuple(added),
        )

    def _snapshot(self, state: _State) -> Snapshot:
        documents = state.documents
        return Snapshot(
            entries=tuple(self._history),
            live=copied_json(documents[_LIVE]),
            agent=copied_json(documents[_AGENT]),
            inbox=tuple(copied_json(documents[_INBOX]["items"])),
            usage=copied_json(documents[_USAGE]),
            permissions=tuple(state.permissions.values()),
        )

    def _events(self, before: _State, after: _State) -> tuple[Event, ...]:
        happened = Happened(
            entries=after.added,
            submissions=self._changed(before, after),
            documents={
                name: (before.documents[name], after.documents[name])
                for name in _DOCUMENTS
                if before.documents[name] != after.documents[name]
            },
            history=self._history,
            permissions=self._decided(before, after),
        )
        return events_of(happened)

    def _changed(self, before: _State, after: _State) -> list[SubmissionRecord]:
        """Submissions that have come, moved on, or ended, by id."""
        found = [record for id, record in after.open.items() if before.open.get(id) != record]
        for id in before.open.keys() - after.open.keys():
            row = self._storage.submission(id)
            if row is not None:
                found.append(submission_of(row))
        return sorted(found, key=lambda record: record.id)

    def _decided(self, before: _State, after: _State) -> list[tuple[Any, Any]]:
        """Permission requests before and after: those that have come, and those that are closed."""
        steps: list[tuple[Any, Any]] = [
            (None, encode_request(request))
            for id, request in after.permissions.items()
            if id not in before.permissions
        ]
        for id, request in before.permissions.items():
            if id not in after.permissions:
                closed = stored_request(self._storage, id)
                steps.append(
                    (encode_request(request), None if closed is None else encode_request(closed))
                )
        return steps
