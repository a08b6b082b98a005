"""How the frames of a conversation become events: one pure function over what a commit changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from pidurable.agent._documents import (
    AgentDocument,
    InboxDocument,
    LiveDocument,
    UsageDocument,
    defaults_of,
)
from pidurable.agent._permissions import request_of
from pidurable.harness._events import (
    AgentChanged,
    CompactionEnd,
    CompactionStart,
    CompactionUpdate,
    EntryAdded,
    Event,
    InboxUpdate,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    PermissionAsked,
    PermissionDecided,
    RetryEnd,
    RetryStart,
    RunEnd,
    RunStart,
    SubmissionChanged,
    TaskFailed,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnEnd,
    TurnStart,
    UsageUpdate,
)
from pidurable.records._entries import Entry, kept_messages
from pidurable.records._messages import AssistantMessage, ToolResultMessage
from pidurable.records._readonly import copied_json
from pidurable.records._submissions import SubmissionRecord
from pidurable.session._documents import definition_of

Step = tuple[Any, Any]
"""The JSON of a document before and after a commit; None for one that is not there."""

_AGENT, _INBOX, _LIVE, _USAGE = (
    definition_of(cls).name for cls in (AgentDocument, InboxDocument, LiveDocument, UsageDocument)
)
_EMPTY: Mapping[str, dict[str, Any]] = {
    definition_of(cls).name: defaults_of(cls)
    for cls in (AgentDocument, InboxDocument, LiveDocument, UsageDocument)
}

_ENDED = ("done", "failed")
"""Of a call whose result is stored: what says last that it runs would be wrong."""


@attrs.frozen(kw_only=True)
class Happened:
    """What one commit has done to one conversation."""

    entries: Sequence[Entry] = ()
    submissions: Sequence[SubmissionRecord] = ()
    documents: Mapping[str, Step] = attrs.Factory(dict)
    """By name, those that it has changed."""
    history: Sequence[Entry] = ()
    """The newest entries of the conversation, these included."""
    failed: Sequence[TaskFailed] = ()
    permissions: Sequence[Step] = ()
    """Permission requests of the conversation and of those below it."""


def events_of(happened: Happened) -> tuple[Event, ...]:
    """What one commit means for one conversation, in the order in which it is told."""
    entries, submissions = happened.entries, happened.submissions
    before, after = _step(happened, _LIVE)
    events: list[Event] = [entry_event(entry) for entry in entries]
    events += _agent_events(happened)
    events += _usage_events(happened)
    events += happened.failed
    events += _permission_events(happened)
    events += _compaction_events(before["compactions"], after["compactions"])
    events += _inbox_events(happened)
    events += (SubmissionChanged(each.id, each.status, each.reason) for each in submissions)
    if before["retry"] is not None and before["retry"] != after["retry"]:
        events.append(RetryEnd())
    if before["generation"] is not None and before["generation"] != after["generation"]:
        events.append(TurnEnd(before["run"], before["turn"], before["generation"]))
    ended = before["run"]
    if ended is not None and ended != after["run"]:
        events.append(_run_end(submissions, ended, entries))
    events += _live_events(before, after, happened)
    return tuple(events)


def _step(happened: Happened, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A document before and after; the same twice where it was not changed."""
    before, after = happened.documents.get(name, (None, None))
    empty = _EMPTY[name]
    return before or empty, after or empty


def entry_event(entry: Entry) -> Event:
    """What is told of one more entry."""
    for message in kept_messages(entry):
        if isinstance(message, AssistantMessage):
            return MessageEnd(entry)
        if isinstance(message, ToolResultMessage):
            return ToolExecutionEnd(message.call, entry)
    return EntryAdded(entry)


def _agent_events(happened: Happened) -> list[Event]:
    before, after = _step(happened, _AGENT)
    return [AgentChanged(copied_json(after))] if before != after else []


def _usage_events(happened: Happened) -> list[Event]:
    before, after = _step(happened, _USAGE)
    changed = {
        field: {
            name: copied_json(total)
            for name, total in after[field].items()
            if before[field].get(name) != total
        }
        for field in ("models", "tools")
    }
    if not changed["models"] and not changed["tools"]:
        return []
    return [UsageUpdate(changed["models"], changed["tools"])]


def _permission_events(happened: Happened) -> list[Event]:
    events: list[Event] = []
    for before, after in happened.permissions:
        if after is None:
            continue  # it went with its conversation
        if after["state"] == "open":
            if before is None:
                events.append(PermissionAsked(request_of(after)))
        elif before is None or before["state"] == "open":
            events.append(PermissionDecided(request_of(after)))
    return events


def _inbox_events(happened: Happened) -> list[Event]:
    before, after = _step(happened, _INBOX)
    was, now = before["items"], after["items"]
    known = {item["submission"] for item in was}
    left = {item["submission"] for item in now}
    added = tuple(copied_json(item) for item in now if item["submission"] not in known)
    removed = tuple(item["submission"] for item in was if item["submission"] not in left)
    return [InboxUpdate(added, removed, len(now))] if added or removed else []


def _compaction_events(before: list[Any], after: list[Any]) -> list[Event]:
    known = {each["task"]: each["status"] for each in before}
    left = {each["task"] for each in after}
    events: list[Event] = [CompactionEnd(task) for task in known if task not in left]
    for each in after:
        task, status = each["task"], each["status"]
        if task not in known:
            events.append(CompactionStart(task, status, each.get("why")))
        elif status != known[task]:
            events.append(CompactionUpdate(task, status))
    return events


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


def _live_events(before: dict[str, Any], after: dict[str, Any], happened: Happened) -> list[Event]:
    events: list[Event] = []
    run: int | None = after["run"]
    generation: int | None = after["generation"]
    if run is not None and run != before["run"]:
        events.append(RunStart(run))
    if run is not None and generation is not None and generation != before["generation"]:
        events.append(TurnStart(run, after["turn"], generation))
    # Who looks now and then may have missed the end of one answer and the start of the next.
    anew = generation != before["generation"] or any(
        entry.kind == "pi.assistant" for entry in happened.entries
    )
    events += _partial_events(None if anew else before["partial"], after["partial"], generation)
    retry = after["retry"]
    if retry is not None and retry != before["retry"]:
        events.append(RetryStart(retry["try_number"], retry["until_us"], retry["error"]))
    events += _call_events(before["calls"], after["calls"], happened)
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


def _call_events(before: list[Any], after: list[Any], happened: Happened) -> list[Event]:
    events: list[Event] = []
    known = {call["task"]: call for call in before if call["task"] is not None}
    begun = any(call["task"] is not None and call["task"] not in known for call in after)
    arguments = _arguments_of(happened.history) if begun else {}
    ended = {
        message.call[1]
        for entry in happened.entries
        for message in kept_messages(entry)
        if isinstance(message, ToolResultMessage)
    }
    for call in after:
        old = known.get(call["task"])
        if old is not None:
            update = _call_update(old, call)
            if update is not None and (update.text or call["index"] not in ended):
                events.append(update)
        elif call["task"] is not None and call["status"] not in _ENDED:
            given = copied_json(arguments.get(call["index"]))
            events.append(ToolExecutionStart(call["task"], call["index"], call["name"], given))
    return events


def _arguments_of(history: Sequence[Entry]) -> dict[int, Any]:
    """The arguments of the newest round, by the index of the call: some calls begin later."""
    for entry in reversed(history):
        for message in kept_messages(entry):
            if isinstance(message, AssistantMessage) and message.tool_calls:
                return {i: block.arguments for i, block in enumerate(message.tool_calls)}
    return {}


def _call_update(old: dict[str, Any], call: dict[str, Any]) -> ToolExecutionUpdate | None:
    """What has changed about a call that was there before; None for nothing that is told."""
    shown, text = old["output_tail"], call["output_tail"]
    grew = text.startswith(shown)
    update = ToolExecutionUpdate(
        call["task"],
        call["index"],
        text[len(shown) :] if grew else text,
        replaced=not grew,
        status=call["status"],
        held_by=call["held_by"],
        details=None if call["details"] == old["details"] else copied_json(call["details"]),
        diagnostics=_new_diagnostics(old["diagnostics"], call["diagnostics"]),
    )
    changed = (
        text != shown
        or update.details is not None
        or update.diagnostics
        or (update.status, update.held_by) != (old["status"], old["held_by"])
    )
    return update if changed else None


def _new_diagnostics(before: list[Any], after: list[Any]) -> tuple[Any, ...]:
    """The remarks that have come, also one that was made before; the last of many is a count."""
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    return tuple(copied_json(each) for each in after[same:])
