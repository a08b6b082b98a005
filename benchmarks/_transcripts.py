"""Transcripts for measuring: long ones, put into a store as processes that had them left it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _runtimes import Seed

from pidurable.records import _codec, _json
from pidurable.records._messages import (
    AssistantMessage,
    Message,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from pidurable.storage import ConversationRow, EntryRow, Op

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
TURN = 4
"""Entries of a turn: what is asked, an answer with a call, its result, and an answer."""
_BATCH_ENTRIES = 10_000

KINDS = ("pi.input", "pi.assistant", "pi.tool_result", "pi.assistant")


def message_of(number: int, entry: int) -> Message:
    """The message of an entry, by its number in the transcript; about 300 B."""
    place = number % TURN
    if place == 0:
        return UserMessage(blocks=(TextBlock(text=TEXT),), at_us=1)
    if place == 2:
        blocks = (TextBlock(text=TEXT),)
        return ToolResultMessage(
            call=(entry - 1, 0), name="read", blocks=blocks, is_error=False, at_us=1
        )
    call = (ToolCallBlock(name="read", arguments={"path": "a.txt"}),) if place == 1 else ()
    return AssistantMessage(
        blocks=(TextBlock(text=TEXT), *call),
        status="complete",
        stop_reason="tool_use" if call else "stop",
        model="bench/model",
        usage=Usage(requests=1, input_tokens=100, output_tokens=40),
        at_us=1,
    )


def messages_text(messages: Sequence[Message]) -> str:
    """The stored text of the messages of an entry."""
    return _json.dumps(_codec.encode_messages(messages))


def seed_transcripts(path: Path, sizes: Iterable[int]) -> list[int]:
    """Fill a new store with a conversation of each size; return their ids."""
    seed = Seed(path)
    made: list[int] = []
    # Only results differ, in the entry of their call: its number is put into one text.
    texts = [messages_text([message_of(place, 10**12 + 1)]) for place in range(TURN)]
    for size in sizes:
        conversation = seed.draw_id()
        made.append(conversation)
        uuid = f"bench-{conversation}"
        row = ConversationRow(conversation, uuid, None, None, None, None, "", seed.now_us)
        seed.apply([(Op.CONVERSATION, row)])
        for first in range(0, size, _BATCH_ENTRIES):
            writes: list[tuple[Op, tuple[Any, ...]]] = []
            for number in range(first, min(size, first + _BATCH_ENTRIES)):
                id = seed.draw_id()
                text = texts[number % TURN]
                if number % TURN == 2:
                    text = text.replace(str(10**12), str(id - 1))
                kind = KINDS[number % TURN]
                entry = EntryRow(
                    id, conversation, seed.seq, kind, None, None, None, text, None, seed.now_us
                )
                writes.append((Op.ENTRY, entry))
            seed.apply(writes)
            seed.checkpoint()
    seed.close()
    return made
