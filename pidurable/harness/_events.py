"""Events of a conversation: what its commits say, for consumers that prefer events to state.

Derived from the frames of its watch, once for all who follow them, and never stored. A consumer
that falls behind gets a new snapshot instead of what it missed, as any watcher gets a whole frame;
it never slows a commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import attrs

from pidurable.agent._documents import LiveDocument, defaults_of
from pidurable.records._entries import Entry, kept_messages
from pidurable.records._messages import AssistantMessage, ToolResultMessage
from pidurable.records._readonly import copied_json
from pidurable.records._submissions import SubmissionRecord


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
    """A copy, which whoever follows the events shares."""


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


def events_of(
    entries: Sequence[Entry],
    submissions: Sequence[SubmissionRecord],
    live: tuple[Any, Any] | None,
) -> tuple[Event, ...]:
    """What one commit means for one conversation, in the order in which it would be told.

    Args:
        entries: What it has added to the conversation.
        submissions: Those of the conversation that it has changed.
        live: `pi.live` before and after it, where it was changed.
    """
    before, after = _live_values(live)
    events: list[Event] = [_entry_event(entry) for entry in entries]
    events += (SubmissionChanged(each.id, each.status, each.reason) for each in submissions)
    ended = before["run"]
    if live is not None and ended is not None and ended != after["run"]:
        events.append(_run_end(submissions, ended, entries))
    if live is not None:
        events += _live_events(before, after, entries)
    return tuple(events)


def _live_values(live: tuple[Any, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    empty = defaults_of(LiveDocument)
    before, after = live or (None, None)
    return before or empty, after or empty


def _entry_event(entry: Entry) -> Event:
    for message in kept_messages(entry):
        if isinstance(message, AssistantMessage):
            return MessageEnd(entry)
        if isinstance(message, ToolResultMessage):
            return ToolExecutionEnd(message.call, entry)
    return EntryAdded(entry)


def _run_end(submissions: Sequence[SubmissionRecord], run: int, entries: Sequence[Entry]) -> RunEnd:
    for record in submissions:
        if record.run == run and record.status in ("done", "unanswered"):
            return RunEnd(run, record.status, record.reason, record.detail)
    answered = any(
        isinstance(message, AssistantMessage) and message.status == "complete"
        for entry in entries
        for message in kept_messages(entry)
    )
    return RunEnd(run, "done" if answered else "unanswered", None, None)


def _live_events(
    before: dict[str, Any], after: dict[str, Any], entries: Sequence[Entry]
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


def _call_events(before: list[Any], after: list[Any], entries: Sequence[Entry]) -> list[Event]:
    events: list[Event] = []
    known = {call["task"]: call for call in before}
    arguments = {
        (index): block.arguments
        for entry in entries
        for message in kept_messages(entry)
        if isinstance(message, AssistantMessage)
        for index, block in enumerate(message.tool_calls)
    }
    for call in after:
        old = known.get(call["task"])
        if old is None:
            events.append(
                ToolExecutionStart(
                    call["task"],
                    call["index"],
                    call["name"],
                    copied_json(arguments.get(call["index"])),
                )
            )
            continue
        text, shown = call["output_tail"], old["output_tail"]
        if text != shown:
            grew = text.startswith(shown)
            new = text[len(shown) :] if grew else text
            events.append(ToolExecutionUpdate(call["task"], call["index"], new, not grew))
    return events
