"""Conversations and entries: the transcript, immutable once stored."""

from __future__ import annotations

from typing import Any, TypeVar

import attrs

from pidurable.records._messages import Message

EntryT = TypeVar("EntryT")


@attrs.frozen(kw_only=True)
class Conversation:
    """A transcript scope; it may be a fork of another, and may be owned by a task."""

    id: int
    uuid: str
    parent: int | None = None
    """The conversation that this one was forked from."""
    parent_entry: int | None = None
    """The last entry of the parent that belongs to this history."""
    owner: int | None = None
    """The task that owns this conversation."""
    key: str | None = None
    principal: str = ""
    created_us: int = 0


@attrs.frozen(kw_only=True)
class Edit:
    """A change to what an earlier entry contributes to the model's context.

    `messages` None leaves the target out; a tuple replaces its messages.
    """

    target: int
    messages: tuple[Message, ...] | None = None


@attrs.frozen(kw_only=True)
class Entry:
    """One immutable transcript record.

    `messages` is what the model sees (may be empty); `data` is typed by `kind`; `head` starts the
    context at that entry from here on; `edits` change what earlier entries contribute.
    """

    id: int
    conversation_id: int
    seq: int
    kind: str
    messages: tuple[Message, ...] = ()
    data: Any = None
    head: int | None = None
    edits: tuple[Edit, ...] = ()
    by_task: int | None = None
    at_us: int = 0
