"""Entries as JSON for people's programs: one shape for views, patches and `-o json`.

It has every field, by the names of the record; messages carry their `role` and blocks their
`type`. What is stored leaves out what is default; what is shown does not.
"""

from __future__ import annotations

from typing import Any

import attrs

from pidurable.records._entries import Conversation, Edit, Entry, kept_edits, kept_messages
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    ImageBlock,
    Message,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    UserMessage,
)
from pidurable.records._readonly import copied_json

_BLOCK_WORDS: dict[type[Block], str] = {
    TextBlock: "text",
    ThinkingBlock: "thinking",
    ImageBlock: "image",
    ToolCallBlock: "tool_call",
}


def entry_json(entry: Entry) -> dict[str, Any]:
    """Return an entry as JSON: a copy, in structures of its own."""
    return {
        "id": entry.id,
        "conversation_id": entry.conversation_id,
        "seq": entry.seq,
        "kind": entry.kind,
        "messages": [_message_json(message) for message in kept_messages(entry)],
        "data": entry.data,
        "head": entry.head,
        "edits": [_edit_json(edit) for edit in kept_edits(entry)],
        "by_task": entry.by_task,
        "at_us": entry.at_us,
    }


def conversation_json(record: Conversation) -> dict[str, Any]:
    """Return the record of a conversation as JSON."""
    return attrs.asdict(record)


def role_of(message: Message) -> str:
    """Who speaks in a message: user, assistant, system or tool."""
    if isinstance(message, UserMessage):
        return "user"
    if isinstance(message, AssistantMessage):
        return "assistant"
    if isinstance(message, SystemMessage):
        return "system"
    return "tool"


def _edit_json(edit: Edit) -> dict[str, Any]:
    messages = edit.messages
    shown = None if messages is None else [_message_json(message) for message in messages]
    return {"target": edit.target, "messages": shown}


def _message_json(message: Message) -> dict[str, Any]:
    found = {"role": role_of(message), **attrs.asdict(message)}
    if not isinstance(message, SystemMessage):
        found["blocks"] = [
            {"type": _BLOCK_WORDS[type(block)], **attrs.asdict(block)} for block in message.blocks
        ]
    # A record has tuples where JSON has lists.
    plain: dict[str, Any] = copied_json(found)
    return plain
