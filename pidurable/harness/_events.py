"""Events of a conversation: what its commits say, for consumers that prefer events to state.

Derived from the frames of its watch, once for all who follow them, and never stored. A consumer
that falls behind gets a new snapshot instead of what it missed, as any watcher gets a whole frame;
it never slows a commit. How commits become events is in `_event_making`, and how events become JSON
in `_event_json`.

Of one commit, what was said comes first, then what it cost and what failed, then how things ended,
and last what began. Who keeps a state of its own needs no other order than the one given here.
"""

from __future__ import annotations

from typing import Any, final

import attrs

from pidurable.agent._permissions import PermissionRequest
from pidurable.records._entries import Entry


@final
@attrs.frozen
class Snapshot:
    """Where the conversation stands: its newest entries and what happens right now.

    The first event of all, and again whenever some were missed: what comes next starts from here.
    """

    entries: tuple[Entry, ...]
    """At most 200, oldest first; older ones are read with `conversation.history()`."""
    live: dict[str, Any]
    """The JSON of `pi.live`."""
    agent: dict[str, Any] = attrs.Factory(dict)
    """The JSON of `pi.agent`."""
    inbox: tuple[Any, ...] = ()
    """What is queued: the items of `pi.inbox`, in order of arrival."""
    usage: dict[str, Any] = attrs.Factory(dict)
    """The JSON of `pi.usage`."""
    permissions: tuple[PermissionRequest, ...] = ()
    """What a person is asked: open requests of this conversation and all below it."""


@final
@attrs.frozen
class RunStart:
    """A run has begun: the turns from an input to its answer. `run` is its first generation."""

    run: int


@final
@attrs.frozen
class RunEnd:
    """A run has ended. `status` is done or unanswered; the reason is one of the stable codes."""

    run: int
    status: str
    reason: str | None
    detail: str | None


@final
@attrs.frozen
class TurnStart:
    """A turn has begun: one answer of the model, with its tool calls."""

    run: int
    turn: int
    generation: int


@final
@attrs.frozen
class TurnEnd:
    """A turn is over: its answer and the results of its calls are stored, or it was ended."""

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
    """The first of an answer is there, and more comes in updates.

    An answer that is there whole before any of it was shown has neither, only its `MessageEnd`.
    """

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
    """The answer is stored as this entry; also one that was cut or has failed, which says so."""

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
    """A running call has put something out, or something has changed about it."""

    task: int
    index: int
    text: str
    """More output; the whole of it, if `replaced`. Empty where only the rest has changed."""
    replaced: bool = False
    status: str = "running"
    """`waiting` while a person is asked, `done` or `failed` once its result is stored."""
    held_by: str | None = None
    """For what it waits, as `permission 12`."""
    details: Any = None
    """What the tool shows of itself, where that has changed; a copy."""
    diagnostics: tuple[Any, ...] = ()
    """Remarks that have come: severity and text of each."""


@final
@attrs.frozen
class ToolExecutionEnd:
    """A tool call has its result, stored as this entry."""

    call: tuple[int, int]
    """(assistant entry, index of the call in it)."""
    entry: Entry


@final
@attrs.frozen
class PermissionAsked:
    """A call waits for a person: of this conversation, or of a sub-agent below it, however deep."""

    request: PermissionRequest


@final
@attrs.frozen
class PermissionDecided:
    """A permission request is not open any more; its state says what became of it.

    A call that a grant lets through has no other event: nobody was asked, and `grant` says which.
    """

    request: PermissionRequest


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
    """The pause before a retry is over: the request is made again, or the run has ended."""


@final
@attrs.frozen
class CompactionStart:
    """A compaction has begun: a task that writes a summary of older entries."""

    task: int
    status: str
    why: str | None = None
    """What set it off: threshold, background, overflow or manual."""


@final
@attrs.frozen
class CompactionUpdate:
    """A compaction has come further, as `waiting` says of a summary that waits for its boundary."""

    task: int
    status: str


@final
@attrs.frozen
class CompactionEnd:
    """A compaction is over; whether it made room, its entry or a `TaskFailed` says."""

    task: int


@final
@attrs.frozen
class TaskFailed:
    """A task of the conversation has failed, faulted or was orphaned.

    Not what was aborted. A failed tool call has its error result besides, a failed generation the
    end of its run.
    """

    task: int
    kind: str
    """Its definition, as pi.generation."""
    status: str
    """`failed`, `faulted` or `orphaned`."""
    error: str | None


@final
@attrs.frozen
class InboxUpdate:
    """The queue of the conversation has changed."""

    added: tuple[Any, ...]
    """The new items, copies: submission, mode, content or entry."""
    removed: tuple[int, ...]
    """Submissions that are not queued any more: placed, or withdrawn."""
    queued: int
    """How many there are now."""


@final
@attrs.frozen
class SubmissionChanged:
    """A submission was queued, placed, answered, or will not be answered."""

    submission: int
    status: str
    reason: str | None


@final
@attrs.frozen
class UsageUpdate:
    """Something was charged to the conversation: the totals that have changed."""

    models: dict[str, Any]
    """By model; the totals of the conversation, as in `pi.usage`."""
    tools: dict[str, Any]
    """By tool."""


@final
@attrs.frozen
class AgentChanged:
    """The choices for the conversation have changed; they count from the next request on."""

    agent: dict[str, Any]
    """The JSON of `pi.agent` now."""


Event = (
    Snapshot
    | RunStart
    | RunEnd
    | TurnStart
    | TurnEnd
    | EntryAdded
    | MessageStart
    | MessageUpdate
    | MessageEnd
    | ToolExecutionStart
    | ToolExecutionUpdate
    | ToolExecutionEnd
    | PermissionAsked
    | PermissionDecided
    | RetryStart
    | RetryEnd
    | CompactionStart
    | CompactionUpdate
    | CompactionEnd
    | TaskFailed
    | InboxUpdate
    | SubmissionChanged
    | UsageUpdate
    | AgentChanged
)
