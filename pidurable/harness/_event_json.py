"""Events as JSON, for programs that read them line by line. Its form is stable.

Every event is an object with a `type`, one of the words below, and the fields of its class by their
names; an entry is as `pidurable conversation log -o json` shows it. Fields may be added to what is
here, and types too: readers ignore what they do not know.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from pidurable.agent._permissions import PermissionRequest, encode_request
from pidurable.harness import _events
from pidurable.harness._events import Event
from pidurable.records._entries import Entry
from pidurable.records._entry_json import entry_json
from pidurable.records._readonly import copied_json

EVENT_TYPES: Final[dict[type, str]] = {
    _events.Snapshot: "snapshot",
    _events.RunStart: "run_start",
    _events.RunEnd: "run_end",
    _events.TurnStart: "turn_start",
    _events.TurnEnd: "turn_end",
    _events.EntryAdded: "entry",
    _events.MessageStart: "message_start",
    _events.MessageUpdate: "message_update",
    _events.MessageEnd: "message_end",
    _events.ToolExecutionStart: "tool_execution_start",
    _events.ToolExecutionUpdate: "tool_execution_update",
    _events.ToolExecutionEnd: "tool_execution_end",
    _events.PermissionAsked: "permission_request",
    _events.PermissionDecided: "permission_decision",
    _events.RetryStart: "retry_start",
    _events.RetryEnd: "retry_end",
    _events.CompactionStart: "compaction_start",
    _events.CompactionUpdate: "compaction_update",
    _events.CompactionEnd: "compaction_end",
    _events.TaskFailed: "task_failed",
    _events.InboxUpdate: "inbox_update",
    _events.SubmissionChanged: "submission",
    _events.UsageUpdate: "usage_update",
    _events.AgentChanged: "agent_changed",
}
"""By class, the `type` of its JSON."""


def event_json(event: Event) -> dict[str, Any]:
    """Return an event as plain JSON: a copy, in structures of its own.

    `type` says what it is: the name of its class in words, as `run_start` or `message_update`; but
    `EntryAdded` is `entry`, `SubmissionChanged` is `submission`, `PermissionAsked` and
    `PermissionDecided` are `permission_request` and `permission_decision`. The other fields are
    those of the class. Readers ignore types and fields that they do not know.

    Args:
        event: Any event of `conversation.events()`.
    """
    fields = {
        each.name: _field_json(getattr(event, each.name)) for each in attrs.fields(type(event))
    }
    return {"type": EVENT_TYPES[type(event)], **fields}


def _field_json(value: Any) -> Any:
    if isinstance(value, Entry):
        return entry_json(value)
    if isinstance(value, PermissionRequest):
        return copied_json(encode_request(value))
    if isinstance(value, tuple):
        return [_field_json(each) for each in value]
    return copied_json(value)
