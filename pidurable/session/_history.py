"""Reading transcripts: histories over all ancestors, and the context ranges of conversations.

A read runs in a thread and may meet a batch that is durable but not published, and entries are
published while it runs. Both are handled the same way everywhere: the read takes what was published
when it began, and what is published meanwhile is collected and joined to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pidurable.errors import InvalidArgumentError, NotFoundError, show
from pidurable.records._checks import is_id
from pidurable.records._codec import Codec
from pidurable.records._entries import Entry, is_visible, kept_edits, kept_messages
from pidurable.session import _transcript
from pidurable.session._context import Exchange, KeptRange, ModelContext
from pidurable.session._forks import Lineage, is_counted, lineage
from pidurable.session._rows import stored_entry
from pidurable.storage import EntryRow, Storage

if TYPE_CHECKING:
    from pidurable.session._session import Session

_RANGES_CACHED = 1_000
_PAGE = 1_000
_LAST_ENTRIES = 16
"""An entry that somebody was told of is looked for among so many."""
_LOOP_ENTRIES_MAX = 500
"""Deriving a context of more entries runs in a thread, so that the loop can go on meanwhile."""


class Transcripts:
    """The transcripts of one session, as published."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ranges: OrderedDict[int, KeptRange] = OrderedDict()
        self._arriving: dict[int, list[list[Entry]]] = {}
        """For each range that is being read: what was published meanwhile."""

    def lineage(self, conversation_id: int) -> Lineage:
        """The conversations whose entries make up a history, and how far each one counts."""
        return lineage(conversation_id, self._session.staged_conversation)

    async def context_entries(self, conversation_id: int) -> list[Entry]:
        """The committed entries in context range, in order. Kept for busy conversations."""
        return list((await self._kept(conversation_id)).entries)

    async def context(self, conversation_id: int, cutoff: int | None) -> ModelContext:
        """The context as of the newest entry, or as of an earlier one. Kept like the range.

        Costs O(1) where the last one was asked for since the last head or edit, however many
        entries came since; O(range) otherwise, and a read of the storage for a cutoff that a newer
        head has passed.
        """
        if cutoff is not None and not (cutoff == 0 or is_id(cutoff)):
            raise InvalidArgumentError("cutoff", "expected the id of an entry", show(cutoff))
        while True:
            kept = await self._kept(conversation_id)
            if cutoff is not None and not kept.covers(cutoff):
                return await self._as_of(conversation_id, cutoff)
            exchange = kept.exchange
            if exchange is None:
                base = kept.entries
                count = len(base)
                exchange = await self._exchange(base[:count], conversation_id)
                if not kept.adopt(exchange, base, count):
                    # A head or an edit came meanwhile.
                    continue
            found = exchange.as_of(cutoff)
            if found is not None:
                return found
            # Not as it grew, since an edit came after the cutoff; but all of it is in range.
            earlier = [entry for entry in kept.entries if entry.id <= (cutoff or 0)]
            return self._whole(await self._exchange(earlier, conversation_id))

    async def _exchange(self, entries: list[Entry], conversation_id: int) -> Exchange:
        if len(entries) > _LOOP_ENTRIES_MAX:
            return await self._session.blocking.run(Exchange, entries, conversation_id)
        return Exchange(entries, conversation_id)

    async def _as_of(self, conversation_id: int, cutoff: int) -> ModelContext:
        """The context as of an entry that is older than the newest head, from the storage."""
        session = self._session
        end = cutoff + 1
        chain = [
            (member, end if bound is None else min(bound, end))
            for member, bound in self.lineage(conversation_id)
        ]
        _, entries = await session.blocking.run(
            _read_range, session.storage, session.codec, chain, session.line.published_seq
        )
        in_range = _transcript.context_range(entries)
        return self._whole(await self._exchange(in_range, conversation_id))

    @staticmethod
    def _whole(exchange: Exchange) -> ModelContext:
        context = exchange.as_of()
        assert context is not None
        return context

    async def _kept(self, conversation_id: int) -> KeptRange:
        ranges = self._ranges
        while conversation_id not in ranges:
            entries = await self._derive(conversation_id)
            # Another reader may have been quicker: its range is the one that is published to.
            if entries is not None and conversation_id not in ranges:
                ranges[conversation_id] = KeptRange(entries)
                if len(ranges) > _RANGES_CACHED:
                    ranges.popitem(last=False)
        ranges.move_to_end(conversation_id)
        return ranges[conversation_id]

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
        kept = self._ranges.get(entry.conversation_id)
        if kept is not None and not kept.publish(entry):
            del self._ranges[entry.conversation_id]

    def kept_entry(self, conversation_id: int, entry_id: int) -> Entry | None:
        """One of the last entries of a range that is kept, or None: then it has to be read."""
        kept = self._ranges.get(conversation_id)
        if kept is not None:
            for entry in kept.entries[:-_LAST_ENTRIES:-1]:
                if entry.id == entry_id:
                    return entry
        return None

    def shows_more(self, conversation_id: int, since: int) -> bool:
        """Whether an own entry that a request can see is newer than an entry.

        Costs what came since, in memory where the range is kept.
        """
        kept = self._ranges.get(conversation_id)
        if kept is None:
            rows = self._session.storage.entries(conversation_id, after=since, limit=_PAGE)
            return any(row.messages or row.edits or row.head is not None for row in rows)
        if kept.entries and kept.entries[0].id > since and is_visible(kept.entries[0]):
            return True
        for entry in reversed(kept.entries):
            if entry.id <= since:
                return False
            if is_visible(entry):
                return True
        return False

    def forget(self, conversations: Iterable[int]) -> None:
        """These were removed."""
        for conversation_id in conversations:
            self._ranges.pop(conversation_id, None)

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

    async def newest_head(self, conversation_id: int) -> tuple[int, int] | None:
        """The newest entry of the history that carries a head, and the entry that it names."""
        session = self._session
        chain = self.lineage(conversation_id)
        return await session.blocking.run(
            _newest_head, session.storage, chain, session.line.published_seq
        )

    def home_of(self, conversation_id: int, entry_id: int, home: int) -> int:
        """The conversation of the lineage that an entry of the history stands in.

        Raises:
            NotFoundError: The entry is not in the history of the conversation.
        """
        if not is_counted(self.lineage(conversation_id), entry_id, home):
            raise NotFoundError("entry", entry_id, place=f"conversation {conversation_id}")
        return home


def _read_range(
    storage: Storage, codec: Codec, chain: Lineage, published: int
) -> tuple[int, list[Entry]]:
    """The first id that was read from, and the entries from the newest head's target on."""
    newest = _newest_head(storage, chain, published)
    first = 1 if newest is None else newest[1]
    entries: list[Entry] = []
    for member, bound in reversed(chain):
        after = first - 1
        while True:
            page = storage.entries(member, after=after, before=bound, limit=_PAGE)
            entries += [stored_entry(row, codec, storage) for row in page if row.seq <= published]
            if len(page) < _PAGE:
                break
            after = page[-1].id
    for entry in entries:
        # What is large is read here, in the thread: the context is made of it.
        _ = kept_messages(entry), kept_edits(entry)
    return first, entries


def _newest_head(storage: Storage, chain: Lineage, published: int) -> tuple[int, int] | None:
    """The newest entry of a history that carries a head, and the entry that it names."""
    for member, bound in chain:
        newest = storage.last_head(member, before=bound)
        while newest is not None and newest.seq > published:
            newest = storage.last_head(member, before=newest.id)
        if newest is not None:
            assert newest.head is not None
            return newest.id, newest.head
    return None


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
    return [stored_entry(row, codec, storage) for row in reversed(rows)]
