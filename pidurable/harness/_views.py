"""The conversation view: where a conversation stands, as one immutable value.

A view is a pure function of what is committed. The one after a commit shares with the one before
it all that did not change: the entries stand in one list that only grows, of which a history is a
window, so that one more entry costs the same in a transcript of ten and of a million. Views are
given out as values and as JSON; patches are operations on the JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, final, overload

import attrs

from pidurable.agent._documents import (
    AgentDocument,
    InboxDocument,
    LiveDocument,
    UsageDocument,
)
from pidurable.records._entries import Conversation as ConversationRecord, Entry
from pidurable.records._entry_json import conversation_json, entry_json
from pidurable.records._limits import VIEW_PAGE_ENTRIES
from pidurable.records._patch import PatchOp, join_pointer
from pidurable.records._readonly import JsonObject, copied_json
from pidurable.session._documents import definition_of
from pidurable.session._grown import plain

SHOWN_DOCUMENTS: Final[tuple[type, ...]] = (
    AgentDocument,
    LiveDocument,
    InboxDocument,
    UsageDocument,
)
SHOWN_NAMES: Final = tuple(definition_of(cls).name for cls in SHOWN_DOCUMENTS)

_KEPT_ENTRIES_MAX = 5 * VIEW_PAGE_ENTRIES
"""Entries of one list; then the window moves to a new one, so that old entries can be forgotten."""


@final
class HistoryPage(Sequence[Entry]):
    """The newest entries of a history, oldest first: at most 200, those of ancestors included.

    Older ones are read with `conversation.history(before=page[0].id)`.
    """

    __slots__ = ("_end", "_entries", "_start", "earlier")
    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none either

    earlier: bool
    """Whether the history has older entries than these."""

    def __init__(self, entries: list[Entry], start: int, end: int, *, earlier: bool) -> None:
        self._entries = entries
        self._start = start
        self._end = end
        self.earlier = earlier

    @classmethod
    def _of(cls, newest: list[Entry]) -> HistoryPage:
        """Return the page of a history, of which so many newest entries are given, or all.

        Args:
            newest: One more than a page has, or the whole history.
        """
        earlier = len(newest) > VIEW_PAGE_ENTRIES
        kept = newest[-VIEW_PAGE_ENTRIES:]
        return cls(kept, 0, len(kept), earlier=earlier)

    def _grown(self, added: Sequence[Entry]) -> HistoryPage:
        """Return the page after some more entries, which share its list. Only for the newest."""
        entries, start = self._entries, self._start
        if self._end + len(added) > _KEPT_ENTRIES_MAX:
            entries, start = entries[start : self._end], 0
        # Older pages end where they ended: what is behind that is not theirs.
        entries += added
        end = len(entries)
        first = max(start, end - VIEW_PAGE_ENTRIES)
        return HistoryPage(entries, first, end, earlier=self.earlier or first > start)

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return self._entries[self._start : self._end][index]
        return self._entries[range(self._start, self._end)[index]]

    def __len__(self) -> int:
        return self._end - self._start

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries[self._start : self._end])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, HistoryPage):
            return self.earlier == other.earlier and list(self) == list(other)
        return NotImplemented

    def __repr__(self) -> str:
        ids = [entry.id for entry in self]
        return f"<HistoryPage {ids}{', and earlier ones' if self.earlier else ''}>"


@final
@attrs.frozen
class HeadPlace:
    """Where the model's context starts."""

    entry: int
    """The newest entry that carries a head; it comes first in the context."""
    start: int
    """The entry that it names: the context goes on from there."""


@final
@attrs.frozen(kw_only=True)
class ConversationView:
    """Where a conversation stands after a commit. As JSON, and for the paths of patches:

    ```json
    {
      "conversation": {"id": 1, "uuid": "...", "parent": null, "parent_entry": null,
                       "owner": null, "key": "root", "principal": "", "created_us": 0},
      "history": {"entries": [{"id": 2, "kind": "pi.input", "messages": [], "...": 0}],
                  "earlier": false},
      "head": {"entry": 9, "start": 5},
      "documents": {"pi.agent": {}, "pi.live": {}, "pi.inbox": null, "pi.usage": null}
    }
    ```

    An entry is as `pidurable conversation log -o json` shows it, with messages that carry a `role`
    and blocks that carry a `type`. A frame of one more entry adds at `/history/entries/-`, and
    removes at `/history/entries/0` what has left the page. Operations on a document are those of
    its commit, below `/documents/pi.live`, say.
    """

    record: ConversationRecord
    """The conversation itself. It never changes."""
    history: HistoryPage
    """The newest entries; a list of at most 200, with whether there are earlier ones."""
    head: HeadPlace | None
    """Where the model's context starts; None: at the first entry."""
    _held: dict[str, Any] = attrs.field(alias="held", repr=False, eq=lambda held: _plain_all(held))
    """What is stored of the documents: a long text that grows is copied when somebody looks."""

    @property
    def documents(self) -> JsonObject:
        """The JSON of `pi.agent`, `pi.live`, `pi.inbox` and `pi.usage`, by name; read-only.

        None where one was never written.
        """
        return JsonObject(_plain_all(self._held))

    def json(self) -> dict[str, Any]:
        """Return the view as plain JSON, a copy of your own. Costs its size."""
        return {
            "conversation": conversation_json(self.record),
            "history": _history_json(self.history),
            "head": _head_json(self.head),
            "documents": self.documents.json(),
        }


@final
@attrs.frozen(kw_only=True)
class DocumentStep:
    """What one commit has done to a document of a view."""

    held_before: Any
    held_after: Any
    ops: list[PatchOp] | None
    """From one to the other; None where only the whole value says it."""


def _plain_all(held: dict[str, Any]) -> dict[str, Any]:
    return {name: plain(each) for name, each in held.items()}


def _history_json(page: HistoryPage) -> dict[str, Any]:
    return {"entries": [entry_json(entry) for entry in page], "earlier": page.earlier}


def _head_json(head: HeadPlace | None) -> dict[str, int] | None:
    return None if head is None else {"entry": head.entry, "start": head.start}


def patch_between(
    before: ConversationView,
    after: ConversationView,
    added: int,
    steps: dict[str, DocumentStep],
) -> list[PatchOp]:
    """The operations that lead from the JSON of one view to that of the next.

    Args:
        before: The view before the commit.
        after: The view after it.
        added: How many entries the commit has added.
        steps: What it has done to documents, by name.
    """
    ops: list[PatchOp] = []
    left = len(before.history) + added - len(after.history)
    if left > len(before.history):
        # More than a page at once: nothing of the page before is left.
        ops.append({"op": "replace", "path": "/history", "value": _history_json(after.history)})
    else:
        ops += ({"op": "remove", "path": "/history/entries/0"} for _ in range(left))
        ops += (
            {"op": "add", "path": "/history/entries/-", "value": entry_json(entry)}
            for entry in after.history[len(after.history) - added :]
        )
        if after.history.earlier != before.history.earlier:
            ops.append({"op": "replace", "path": "/history/earlier", "value": True})
    if after.head != before.head:
        ops.append({"op": "replace", "path": "/head", "value": _head_json(after.head)})
    for name, step in steps.items():
        ops += _document_ops(join_pointer("/documents", name), step)
    return ops


def _document_ops(pointer: str, step: DocumentStep) -> list[PatchOp]:
    if step.ops is None:
        return [{"op": "replace", "path": pointer, "value": copied_json(plain(step.held_after))}]
    below: list[PatchOp] = copied_json(step.ops)
    for op in below:
        for name in ("path", "from"):
            if name in op:
                op[name] = pointer + op[name]
    return below
