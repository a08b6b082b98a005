"""The context of a conversation, derived anew from the design's rules, over plain tuples.

What is derived is a list of turns: `("user", blocks)`, `("system", sections)`,
`("assistant", blocks)` and `("result", (entry, index), name, blocks, is_error, code)`, where a
block is `("text", text)`, `("thinking", text)`, `("call", name)` or `("image", blob)`. The text of
a made-up result is not fixed by the design: it stands as `("text", ANY)`, and must not be blank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from history_model import Line

from pidurable.records._messages import (
    AssistantMessage,
    ImageBlock,
    Message,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultMessage,
    UserMessage,
)

ANY = "<any text>"
NOTHING = ("text", "(no output)")

Turn = tuple[Any, ...]


def in_range(history: Sequence[Line], cutoff: int | None) -> list[Line]:
    """The lines that count: from the newest head at or before the cutoff on."""
    visible = [line for line in history if cutoff is None or line.id <= cutoff]
    headed = [line for line in visible if line.head is not None]
    if not headed:
        return visible
    newest = headed[-1]
    assert newest.head is not None
    return [newest] + [one for one in visible if one.head is None and one.id >= newest.head]


def derive(history: Sequence[Line], cutoff: int | None = None) -> list[Turn]:
    """The turns that a model is given."""
    lines = in_range(history, cutoff)
    said = _said(lines)
    results: dict[tuple[int, int], ToolResultMessage] = {}
    for _, message in said:
        if isinstance(message, ToolResultMessage):
            results.setdefault(message.call, message)
    turns: list[Turn] = []
    for entry, message in said:
        if isinstance(message, UserMessage):
            blocks = _blocks(message)
            if blocks:
                turns.append(("user", blocks))
        elif isinstance(message, SystemMessage):
            turns.append(("system", dict(message.sections)))
        elif isinstance(message, AssistantMessage) and message.status == "complete":
            turns += _answer(entry, message, results)
    return _asked(_moved(turns))


def _said(lines: Sequence[Line]) -> list[tuple[int, Message]]:
    """Every message, edits done: of the edits of one entry that of the newest entry counts."""
    standing = {line.id for line in lines}
    edits: dict[int, tuple[int, tuple[Message, ...]]] = {}
    for line in lines:
        for target, messages in line.edits:
            if target in standing and line.id >= edits.get(target, (0, ()))[0]:
                edits[target] = (line.id, messages or ())
    found: list[tuple[int, Message]] = []
    for line in lines:
        messages = edits[line.id][1] if line.id in edits else line.messages
        found += [(line.id, message) for message in messages]
    return found


def _answer(
    entry: int, message: AssistantMessage, results: dict[tuple[int, int], ToolResultMessage]
) -> list[Turn]:
    blocks = _blocks(message)
    if not any(kind in ("text", "call") for kind, _ in blocks):
        # Thoughts alone: a message without content, which no provider takes.
        return []
    turns: list[Turn] = [("assistant", blocks)]
    for index, call in enumerate(message.tool_calls):
        place = (entry, index)
        given = results.get(place)
        if given is None:
            missing = (("text", ANY),)
            turns.append(("result", place, call.name, missing, True, "interrupted"))
        else:
            shown = _blocks(given) or (NOTHING,)
            turns.append(("result", place, call.name, shown, given.is_error, given.code))
    return turns


def _blocks(message: Any) -> tuple[tuple[str, Any], ...]:
    found: list[tuple[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            if block.text.strip():
                found.append(("text", block.text))
        elif isinstance(block, ThinkingBlock):
            found.append(("thinking", block.text))
        elif isinstance(block, ImageBlock):
            found.append(("image", block.blob))
        else:
            found.append(("call", block.name))
    return tuple(found)


def _moved(turns: list[Turn]) -> list[Turn]:
    """A system message preceded only by user messages stands in front."""
    for index, turn in enumerate(turns):
        if turn[0] == "system":
            return [turn, *turns[:index], *turns[index + 1 :]]
        if turn[0] != "user":
            break
    return turns


def _asked(turns: list[Turn]) -> list[Turn]:
    """Where nobody would have asked what an answer answers, "(no output)" stands."""
    out: list[Turn] = []
    last = ""
    for turn in turns:
        if turn[0] == "assistant" and last in ("", "assistant"):
            out.append(("user", (NOTHING,)))
        if turn[0] != "system":
            last = turn[0]
        out.append(turn)
    return out


def turns_of(messages: Sequence[Any]) -> list[Turn]:
    """What the product gives, as turns to compare."""
    turns: list[Turn] = []
    for item in messages:
        message = item.message
        if isinstance(message, SystemMessage):
            turns.append(("system", dict(message.sections)))
        elif isinstance(message, ToolResultMessage):
            blocks = _blocks(message)
            turns.append(
                ("result", message.call, message.name, blocks, message.is_error, message.code)
            )
        else:
            role = "user" if isinstance(message, UserMessage) else "assistant"
            turns.append((role, _blocks(message)))
    return turns


def first_difference(expected: Sequence[Turn], found: Sequence[Turn]) -> str:
    """The first turn that is not as expected; "" if all are."""
    for index in range(max(len(expected), len(found))):
        one = expected[index] if index < len(expected) else None
        other = found[index] if index < len(found) else None
        if one != other and not _stands_for(one, other):
            return f"$[{index}]: expected {one}, found {other}"
    return ""


def _stands_for(expected: Turn | None, found: Turn | None) -> bool:
    """Whether the found turn is a made-up result where one is expected, in any words."""
    if expected is None or found is None or expected[0] != "result" or found[0] != "result":
        return False
    said = found[3]
    worded = len(said) == 1 and said[0][0] == "text" and bool(said[0][1].strip())
    made_up = expected[3] == (("text", ANY),)
    return made_up and worded and expected[:3] == found[:3] and expected[4:] == found[4:]
