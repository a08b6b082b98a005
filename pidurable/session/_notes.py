"""Notes: what stands in the context in the place of an item that a provider refuses for good.

A provider that refuses one image, or one block that it does not know, refuses every later request
that carries it. The record stays as it is: an edit puts a note where the item was, of the same kind
of message, so that the exchange stays valid: a result is still the result of its call, and an
answer still makes the calls that others answer.
"""

from __future__ import annotations

import attrs

from pidurable.records._checks import check_name
from pidurable.records._entries import Edit, Entry
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    Message,
    SystemMessage,
    TextBlock,
    ToolCallBlock,
)

WHY_CHARACTERS_MAX = 2_000


def note_in_place(entry: Entry, why: str) -> Edit:
    """Make the edit that puts a note in the place of what an entry says to the model.

    Append it with `tx.append(conversation_id, kind=..., edits=[note_in_place(entry, why)])`; it
    counts from the next request on, and a later edit of the entry takes it back. What the entry
    tells of the system prompt stays; calls stay, without what only their provider can read.

    Args:
        entry: The entry that holds what is refused.
        why: What the model reads instead, in brackets; 1 to 2,000 characters.

    Raises:
        InvalidArgumentError: `why` is empty or too long.
        NotJsonError: `why` holds a NUL or a lone surrogate.
    """
    text = f"[{check_name(why, 'why', characters_max=WHY_CHARACTERS_MAX)}]"
    return Edit(target=entry.id, messages=tuple(_noted(each, text) for each in entry.messages))


def _noted(message: Message, text: str) -> Message:
    note = TextBlock(text=text)
    if isinstance(message, SystemMessage):
        return message
    kept: tuple[Block, ...] = ()
    if isinstance(message, AssistantMessage):
        kept = tuple(
            attrs.evolve(block, opaque=None)
            for block in message.blocks
            if isinstance(block, ToolCallBlock)
        )
    return attrs.evolve(message, blocks=(note, *kept))
