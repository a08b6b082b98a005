"""Transcripts: the history of a conversation, and the context that a model is given.

History is a conversation's own entries after its parent's history through the fork point. Context
starts at the newest entry with a head: that entry, then the entries from its head on that carry no
head of their own. `exchange` makes a valid exchange of it, whatever happened:

* every tool result directly follows its call, in call order, whatever was interleaved;
* a call without a result gets an error result, a result without a call is dropped; in a fork, a
  call of an ancestor whose result came after the fork point is not known to have one;
* blank text is left out, or becomes "(no output)" where something must stand;
* where an answer would follow an answer, or come first, "(no output)" stands as what was asked;
* assistant messages that were aborted, failed or deferred contribute nothing;
* a system message preceded only by user messages moves to the front.

The record is never edited: what a provider is sent is built from it. `exchange` builds it from
scratch and is the reference; `_context` keeps what it gives, entry by entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from pidurable.records._entries import Entry, kept_edits, kept_messages
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    Message,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultMessage,
    UserMessage,
)

NO_OUTPUT = "(no output)"
INTERRUPTED = (
    "The call was interrupted: no result was recorded. Whether its effect happened is unknown."
)
NOT_KNOWN = (
    "The result of this call is not known in this branch: the conversation was forked before it "
    "was recorded. Whether its effect happened is unknown."
)


@attrs.frozen
class ContextMessage:
    """One message of a context, with the entry that it came from."""

    message: Message
    entry: int


def context_range(entries: Sequence[Entry]) -> list[Entry]:
    """The entries that count, of a history in order: from the newest head on."""
    newest: Entry | None = None
    for entry in reversed(entries):
        if entry.head is not None:
            newest = entry
            break
    if newest is None:
        return list(entries)
    assert newest.head is not None
    return [newest, *(e for e in entries if e.id >= newest.head and e.head is None)]


def extend_range(current: list[Entry], entry: Entry) -> list[Entry] | None:
    """The range after one more entry, in O(that entry) for all but a head.

    Returns:
        The new range, which may be `current` itself, grown; None if the head reaches back before
        what is in the range, so that it must be derived from the history.
    """
    if entry.head is None:
        current.append(entry)
        return current
    if current and current[0].head is not None and entry.head < current[0].head:
        return None
    return [entry, *(e for e in current if e.id >= entry.head and e.head is None)]


def exchange(entries: Iterable[Entry], *, conversation: int | None = None) -> list[ContextMessage]:
    """Make a valid exchange of the entries in range. See the module docstring for the rules.

    Args:
        entries: The range, in order.
        conversation: Whose context it is: calls in entries of another conversation are those of an
            ancestor. None takes all entries for its own.
    """
    ordered = list(entries)
    inherited = {e.id for e in ordered if conversation not in (None, e.conversation_id)}
    flat = _flatten(ordered)
    results: dict[tuple[int, int], ContextMessage] = {}
    for item in flat:
        if isinstance(item.message, ToolResultMessage):
            results.setdefault(item.message.call, item)
    out: list[ContextMessage] = []
    called: set[int] = set()
    for item in flat:
        message = item.message
        if isinstance(message, ToolResultMessage):
            continue
        if isinstance(message, AssistantMessage):
            if message.status != "complete":
                continue
            if item.entry in called:
                # A call is known by its entry, which has one answer; a second one only speaks.
                message = without_calls(message)
            kept = sendable_answer(message)
            if kept is None:
                continue
            if message.tool_calls:
                called.add(item.entry)
            out.append(ContextMessage(kept, item.entry))
            for index, call in enumerate(message.tool_calls):
                found = results.get((item.entry, index))
                if found is None:
                    text = NOT_KNOWN if item.entry in inherited else INTERRUPTED
                    out.append(missing_result(item.entry, index, call, message.at_us, text))
                else:
                    out.append(sendable_result(found, call.name))
        elif isinstance(message, UserMessage):
            said = sendable_user(message)
            if said is not None:
                out.append(ContextMessage(said, item.entry))
        else:
            out.append(item)
    return _alternating(_system_first(out))


def newest_edits(entries: Iterable[Entry]) -> dict[int, tuple[Message, ...]]:
    """What the edits of a range put in the place of their targets' messages; () leaves one out."""
    edits: dict[int, tuple[Message, ...]] = {}
    # The entry with the head comes first in the range, and its edits are the newest all the same.
    for entry in sorted(entries, key=lambda entry: entry.id):
        for edit in kept_edits(entry):
            edits[edit.target] = edit.messages or ()
    return edits


def _flatten(entries: Sequence[Entry]) -> list[ContextMessage]:
    edits = newest_edits(entries)
    flat: list[ContextMessage] = []
    for entry in entries:
        edited = edits.get(entry.id)
        messages = kept_messages(entry) if edited is None else edited
        flat.extend(ContextMessage(message, entry.id) for message in messages)
    return flat


# --- one message, as it may be sent -----------------------------------------------------------


def _blank(block: Block) -> bool:
    return isinstance(block, TextBlock) and not block.text.strip()


def _visible(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Those that are not blank; the same tuple where all are, so that nothing need be copied."""
    if not any(map(_blank, blocks)):
        return blocks
    return tuple(block for block in blocks if not _blank(block))


def sendable_user(message: UserMessage) -> UserMessage | None:
    """The message as it may be sent, or None if nothing would be left of it."""
    blocks = _visible(message.blocks)
    if not blocks:
        return None
    return message if blocks is message.blocks else attrs.evolve(message, blocks=blocks)


def without_calls(message: AssistantMessage) -> AssistantMessage:
    """What the message says, without the calls that it makes."""
    blocks = tuple(block for block in message.blocks if not isinstance(block, ToolCallBlock))
    return attrs.evolve(message, blocks=blocks)


_CONTENT = (TextBlock, ToolCallBlock)


def sendable_answer(message: AssistantMessage) -> AssistantMessage | None:
    """The message as it may be sent, or None if nothing would be left of it."""
    blocks = _visible(message.blocks)
    if not any(isinstance(block, _CONTENT) for block in blocks):
        # Thinking alone is no turn; providers refuse a message without content.
        return None
    if any(map(_says_nothing, blocks)):
        blocks = tuple(block for block in blocks if not _says_nothing(block))
    return message if blocks is message.blocks else attrs.evolve(message, blocks=blocks)


def _says_nothing(block: Block) -> bool:
    return isinstance(block, ThinkingBlock) and not block.text and block.opaque is None


def sendable_result(found: ContextMessage, name: str) -> ContextMessage:
    """A result under the name that was called; one that says nothing says so."""
    message = found.message
    assert isinstance(message, ToolResultMessage)
    blocks = _visible(message.blocks) or (TextBlock(text=NO_OUTPUT),)
    if blocks is message.blocks and name == message.name:
        return found
    return ContextMessage(attrs.evolve(message, blocks=blocks, name=name), found.entry)


def missing_result(
    entry: int, index: int, call: ToolCallBlock, at_us: int, text: str
) -> ContextMessage:
    """What stands where a call has no result."""
    missing = ToolResultMessage(
        call=(entry, index),
        name=call.name,
        blocks=(TextBlock(text=text),),
        is_error=True,
        at_us=at_us,
        code="interrupted",
    )
    return ContextMessage(missing, entry)


def stand_in(message: AssistantMessage, entry: int) -> ContextMessage:
    """What stands before an answer that nothing was asked before."""
    said = UserMessage(blocks=(TextBlock(text=NO_OUTPUT),), at_us=message.at_us)
    return ContextMessage(said, entry)


# --- the whole --------------------------------------------------------------------------------


def _system_first(messages: list[ContextMessage]) -> list[ContextMessage]:
    """Move a system message that only user messages precede to the front."""
    leading = 0
    while leading < len(messages) and isinstance(messages[leading].message, UserMessage):
        leading += 1
    if 0 < leading < len(messages) and isinstance(messages[leading].message, SystemMessage):
        return [messages[leading], *messages[:leading], *messages[leading + 1 :]]
    return messages


def _alternating(messages: list[ContextMessage]) -> list[ContextMessage]:
    """Let something stand before an answer that nothing was asked before."""
    out: list[ContextMessage] = []
    last: Message | None = None
    for item in messages:
        message = item.message
        if isinstance(message, AssistantMessage) and (
            last is None or (isinstance(last, AssistantMessage) and not last.tool_calls)
        ):
            out.append(stand_in(message, item.entry))
        if not isinstance(message, SystemMessage):
            last = message
        out.append(item)
    return out
