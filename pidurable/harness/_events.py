"""Events of a conversation: what its commits say, for consumers that prefer events to state.

Derived from commits, never stored. A consumer that lags behind by more than `WATCH_FRAMES_MAX`
batches gets a new snapshot instead of what it missed; it never slows a commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, final

import attrs
import trio

from pidurable.agent._documents import LiveDocument, address_of, defaults_of
from pidurable.records._entries import Entry
from pidurable.records._limits import WATCH_FRAMES_MAX
from pidurable.records._messages import AssistantMessage, ToolResultMessage
from pidurable.session._documents import DocChange
from pidurable.session._transaction import Transaction


@final
@attrs.frozen
class Snapshot:
    """Where the conversation stands: its newest entries and what happens right now."""

    entries: tuple[Entry, ...]
    live: dict[str, Any]
    """The JSON of `pi.live`."""


@final
@attrs.frozen
class RunStart:
    """A run has begun: the turns from an input to its answer. `run` is its first generation."""

    run: int


@final
@attrs.frozen
class TurnStart:
    """A turn has begun: one answer of the model, with its tool calls."""

    run: int
    turn: int
    generation: int


@final
@attrs.frozen
class EntryAdded:
    """An entry that is no answer and no tool result: input, system, or of a host's kind."""

    entry: Entry


@final
@attrs.frozen
class MessageStart:
    """The model is asked; its answer comes in updates."""

    generation: int


@final
@attrs.frozen
class MessageUpdate:
    """More of the answer that is being streamed."""

    generation: int
    index: int
    """The block it belongs to."""
    kind: str
    """`text` or `thinking`."""
    text: str


@final
@attrs.frozen
class MessageEnd:
    """The answer is stored as this entry."""

    entry: Entry


@final
@attrs.frozen
class ToolExecutionStart:
    """A tool call of the turn has become a task."""

    task: int
    index: int
    name: str
    arguments: Any


@final
@attrs.frozen
class ToolExecutionUpdate:
    """A running call has put something out."""

    task: int
    index: int
    text: str
    """More output; the whole of it, if `replaced`."""
    replaced: bool = False


@final
@attrs.frozen
class ToolExecutionEnd:
    """A tool call has its result, stored as this entry."""

    call: tuple[int, int]
    """(assistant entry, index of the call in it)."""
    entry: Entry


@final
@attrs.frozen
class RetryStart:
    """The request failed and is made again at `until_us`."""

    try_number: int
    until_us: int
    error: str


@final
@attrs.frozen
class RetryEnd:
    """The pause before a retry is over."""


@final
@attrs.frozen
class SubmissionChanged:
    """A submission was placed, answered, or will not be answered."""

    submission: int
    status: str
    reason: str | None


@final
@attrs.frozen
class RunEnd:
    """A run has ended. `status` is done or unanswered; the reason is one of the stable codes."""

    run: int
    status: str
    reason: str | None
    detail: str | None


Event = (
    Snapshot
    | RunStart
    | TurnStart
    | EntryAdded
    | MessageStart
    | MessageUpdate
    | MessageEnd
    | ToolExecutionStart
    | ToolExecutionUpdate
    | ToolExecutionEnd
    | RetryStart
    | RetryEnd
    | SubmissionChanged
    | RunEnd
)


class EventStream:
    """One consumer of one conversation's events."""

    def __init__(self, conversation_id: int) -> None:
        self.conversation_id = conversation_id
        self.lagged = False
        self.closed = False
        self._first: Snapshot | None = None
        self._batches: deque[tuple[Event, ...]] = deque()
        self._arrived = trio.Event()

    def begin(self, first: Snapshot) -> None:
        """Set the snapshot that everything pushed so far comes after."""
        self._first = first

    def push(self, batch: tuple[Event, ...]) -> None:
        if self.lagged:
            return
        if len(self._batches) >= WATCH_FRAMES_MAX:
            self._batches.clear()
            self.lagged = True
        else:
            self._batches.append(batch)
        self._arrived.set()

    def close(self) -> None:
        self.closed = True
        self._arrived.set()

    async def batches(
        self, snapshot: Callable[[], Awaitable[Snapshot]]
    ) -> AsyncGenerator[tuple[Event, ...], None]:
        """Batches in order, one per commit; ends when the harness closes."""
        while True:
            if self._first is not None and not self.lagged:
                first, self._first = self._first, None
                yield (first,)
            while self._batches:
                yield self._batches.popleft()
            if self.lagged:
                # Listening again before the snapshot is taken, so that it has what was missed
                # and the batches have what comes after it.
                self.lagged = False
                self._first = await snapshot()
                continue
            if self.closed:
                return
            self._arrived = trio.Event()
            await self._arrived.wait()


def events_of(tx: Transaction, conversation_id: int) -> tuple[Event, ...]:
    """What one commit means for one conversation, in the order in which it would be told."""
    events: list[Event] = []
    address = address_of(LiveDocument, conversation_id)
    change = next((c for c in tx.doc_changes if c.address == address), None)
    before, after = _live_values(change)
    if change is not None and before["run"] != after["run"] and before["run"] is not None:
        ended_run: int | None = before["run"]
    else:
        ended_run = None
    new_entries = [e for e in tx.entries if e.conversation_id == conversation_id]
    for entry in new_entries:
        events.append(_entry_event(entry))
    for record in tx.submissions.values():
        if record.conversation_id == conversation_id:
            events.append(SubmissionChanged(record.id, record.status, record.reason))
    if ended_run is not None:
        events.append(_run_end(tx, ended_run, new_entries))
    if change is not None:
        events += _live_events(before, after, new_entries)
    return tuple(events)


def _live_values(change: DocChange | None) -> tuple[dict[str, Any], dict[str, Any]]:
    empty = defaults_of(LiveDocument)
    if change is None:
        return empty, empty
    return change.before or empty, change.after or empty


def _entry_event(entry: Entry) -> Event:
    for message in entry.messages:
        if isinstance(message, AssistantMessage):
            return MessageEnd(entry)
        if isinstance(message, ToolResultMessage):
            return ToolExecutionEnd(message.call, entry)
    return EntryAdded(entry)


def _run_end(tx: Transaction, run: int, entries: list[Entry]) -> RunEnd:
    for record in tx.submissions.values():
        if record.run == run and record.status in ("done", "unanswered"):
            return RunEnd(run, record.status, record.reason, record.detail)
    answered = any(
        isinstance(message, AssistantMessage) and message.status == "complete"
        for entry in entries
        for message in entry.messages
    )
    return RunEnd(run, "done" if answered else "unanswered", None, None)


def _live_events(
    before: dict[str, Any], after: dict[str, Any], entries: list[Entry]
) -> list[Event]:
    events: list[Event] = []
    run: int | None = after["run"]
    generation: int | None = after["generation"]
    if run is not None and run != before["run"]:
        events.append(RunStart(run))
    if run is not None and generation is not None and generation != before["generation"]:
        events.append(TurnStart(run, after["turn"], generation))
    events += _partial_events(before["partial"], after["partial"], generation)
    if after["retry"] != before["retry"]:
        retry = after["retry"]
        if retry is None:
            events.append(RetryEnd())
        else:
            events.append(RetryStart(retry["try_number"], retry["until_us"], retry["error"]))
    events += _call_events(before["calls"], after["calls"], entries)
    return events


def _partial_events(before: Any, after: Any, generation: int | None) -> list[Event]:
    if after is None or generation is None or after == before:
        return []
    events: list[Event] = [] if before is not None else [MessageStart(generation)]
    known = [] if before is None else before["blocks"]
    for index, block in enumerate(after["blocks"]):
        text = block["text"]
        shown = known[index]["text"] if index < len(known) else ""
        if text != shown:
            new = text[len(shown) :] if text.startswith(shown) else text
            events.append(MessageUpdate(generation, index, block["type"], new))
    return events


def _call_events(before: list[Any], after: list[Any], entries: list[Entry]) -> list[Event]:
    events: list[Event] = []
    known = {call["task"]: call for call in before}
    arguments = {
        (index): block.arguments
        for entry in entries
        for message in entry.messages
        if isinstance(message, AssistantMessage)
        for index, block in enumerate(message.tool_calls)
    }
    for call in after:
        old = known.get(call["task"])
        if old is None:
            events.append(
                ToolExecutionStart(
                    call["task"], call["index"], call["name"], arguments.get(call["index"])
                )
            )
            continue
        text, shown = call["output_tail"], old["output_tail"]
        if text != shown:
            grew = text.startswith(shown)
            new = text[len(shown) :] if grew else text
            events.append(ToolExecutionUpdate(call["task"], call["index"], new, not grew))
    return events
