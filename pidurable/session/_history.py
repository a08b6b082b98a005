"""Reading transcripts: histories over all ancestors, and the context ranges of conversations.

A read runs in a thread and may meet a batch that is durable but not published, and entries are
published while it runs. Both are handled the same way everywhere: the read takes what was published
when it began, and what is published meanwhile is collected and joined to it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pidurable.errors import InvalidArgumentError, NotFoundError, show
from pidurable.records._checks import is_id
from pidurable.records._codec import Codec
from pidurable.records._entries import Entry
from pidurable.session import _transcript
from pidurable.session._forks import Lineage, is_counted, lineage
from pidurable.session._rows import stored_entry
from pidurable.storage import EntryRow, Storage

if TYPE_CHECKING:
    from pidurable.session._session import Session

_RANGES_CACHED = 1_000
_PAGE = 1_000


class Transcripts:
    """The transcripts of one session, as published."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ranges: OrderedDict[int, list[Entry]] = OrderedDict()
        self._arriving: dict[int, list[list[Entry]]] = {}
        """For each range that is being read: what was published meanwhile."""

    def lineage(self, conversation_id: int) -> Lineage:
        """The conversations whose entries make up a history, and how far each one counts."""
        return lineage(conversation_id, self._session.staged_conversation)

    async def context_entries(self, conversation_id: int) -> list[Entry]:
        """The committed entries in context range, in order. Kept for busy conversations."""
        found = self._ranges.get(conversation_id)
        while found is None:
            found = await self._derive(conversation_id)
        self._ranges[conversation_id] = found
        self._ranges.move_to_end(conversation_id)
        if len(self._ranges) > _RANGES_CACHED:
            self._ranges.popitem(last=False)
        return list(found)

    async def _derive(self, conversation_id: int) -> list[Entry] | None:
        """Read a range; None if it was overtaken and has to be read again."""
        session = self._session
        chain = self.lineage(conversation_id)
        arrived: list[Entry] = []
        readers = self._arriving.setdefault(conversation_id, [])
        readers.append(arrived)
        try:
            first, entries = await session.blocking.run(
                _read_range, session.storage, session.codec, chain, session.line.published_seq
            )
        finally:
            readers.remove(arrived)
            if not readers:
                del self._arriving[conversation_id]
        found = _transcript.context_range([*entries, *arrived])
        if found and found[0].head is not None and found[0].head < first:
            # A head that arrived meanwhile reaches back before what was read.
            return None
        return found

    def publish(self, entry: Entry) -> None:
        """An entry became durable: keep the range of its conversation, in O(that entry)."""
        for arrived in self._arriving.get(entry.conversation_id, ()):
            arrived.append(entry)
        current = self._ranges.get(entry.conversation_id)
        if current is None:
            return
        longer = _transcript.extend_range(current, entry)
        if longer is None:
            del self._ranges[entry.conversation_id]
        else:
            self._ranges[entry.conversation_id] = longer

    async def history(
        self, conversation_id: int, *, after: int, before: int | None, limit: int
    ) -> list[Entry]:
        """The newest `limit` entries of the history with after < id < before, oldest first."""
        if type(limit) is not int or not 0 < limit < 2**63:
            raise InvalidArgumentError("limit", "expected at least 1", show(limit))
        for name, bound in (("after", after), ("before", before)):
            if bound is not None and not (bound == 0 or is_id(bound)):
                raise InvalidArgumentError(name, "expected the id of an entry", show(bound))
        session = self._session
        chain = self.lineage(conversation_id)
        return await session.blocking.run(
            _read_history,
            session.storage,
            session.codec,
            chain,
            session.line.published_seq,
            after,
            before,
            limit,
        )

    def home_of(self, conversation_id: int, entry_id: int, home: int) -> int:
        """The conversation of the lineage that an entry of the history stands in.

        Raises:
            NotFoundError: The entry is not in the history of the conversation.
        """
        if not is_counted(self.lineage(conversation_id), entry_id, home):
            raise NotFoundError("entry", entry_id, f"It is not in conversation {conversation_id}.")
        return home


def _read_range(
    storage: Storage, codec: Codec, chain: Lineage, published: int
) -> tuple[int, list[Entry]]:
    """The first id that was read from, and the entries from the newest head's target on."""
    first = 1
    for member, bound in chain:
        newest = storage.last_head(member, before=bound)
        while newest is not None and newest.seq > published:
            newest = storage.last_head(member, before=newest.id)
        if newest is not None:
            assert newest.head is not None
            first = newest.head
            break
    entries: list[Entry] = []
    for member, bound in reversed(chain):
        after = first - 1
        while True:
            page = storage.entries(member, after=after, before=bound, limit=_PAGE)
            entries += [
                stored_entry(row, codec, storage.store) for row in page if row.seq <= published
            ]
            if len(page) < _PAGE:
                break
            after = page[-1].id
    return first, entries


def _read_history(
    storage: Storage,
    codec: Codec,
    chain: Lineage,
    published: int,
    after: int,
    before: int | None,
    limit: int,
) -> list[Entry]:
    rows: list[EntryRow] = []
    for member, cut in chain:
        bound = min((b for b in (cut, before) if b is not None), default=None)
        while len(rows) < limit:
            wanted = limit - len(rows)
            page = storage.entries(member, after=after, before=bound, limit=wanted, reverse=True)
            rows += [row for row in page if row.seq <= published]
            if len(page) < wanted:
                break
            bound = page[-1].id
    return [stored_entry(row, codec, storage.store) for row in reversed(rows)]
