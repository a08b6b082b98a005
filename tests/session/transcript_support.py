"""Entries and messages for tests of transcripts, drawn and by hand, and requests made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
from hypothesis import strategies as st

from pidurable.agent._models import ModelRequest, RequestMessage
from pidurable.agent._strict import check_request
from pidurable.records._entries import Edit, Entry
from pidurable.records._messages import (
    AssistantMessage,
    AssistantStatus,
    Block,
    ImageBlock,
    Message,
    SystemMessage,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from pidurable.session._transcript import ContextMessage


def user(text: str) -> UserMessage:
    return UserMessage(blocks=(TextBlock(text=text),), at_us=1)


def picture(name: str) -> UserMessage:
    return UserMessage(blocks=(ImageBlock(blob=name, media_type="image/png"),), at_us=1)


def answer(
    text: str = "", calls: Sequence[str] = (), *, status: AssistantStatus = "complete"
) -> AssistantMessage:
    blocks: list[Block] = [TextBlock(text=text)] if text else []
    blocks += [ToolCallBlock(name=name, arguments={}) for name in calls]
    return AssistantMessage(
        blocks=tuple(blocks),
        status=status,
        stop_reason="stop",
        model="m",
        usage=Usage(),
        at_us=1,
    )


def result(entry: int, index: int, text: str = "done") -> ToolResultMessage:
    return ToolResultMessage(
        call=(entry, index), name="t", blocks=(TextBlock(text=text),), is_error=False, at_us=1
    )


def pictured_result(entry: int, index: int, name: str) -> ToolResultMessage:
    shown = ImageBlock(blob=name, media_type="image/png")
    return attrs.evolve(result(entry, index), blocks=(TextBlock(text="see"), shown))


def system(text: str) -> SystemMessage:
    return SystemMessage(sections={"s": text}, at_us=1)


def entry(
    id: int,
    *messages: Message,
    head: int | None = None,
    edits: tuple[Edit, ...] = (),
    conversation: int = 1,
) -> Entry:
    return Entry(
        id=id,
        conversation_id=conversation,
        seq=id,
        kind="k",
        messages=messages,
        head=head,
        edits=edits,
    )


def shown(items: Sequence[ContextMessage]) -> list[str]:
    """Who speaks and what, in short."""
    out: list[str] = []
    for item in items:
        message = item.message
        if isinstance(message, SystemMessage):
            out.append(f"system {message.sections['s']}")
            continue
        text = "".join(b.text for b in message.blocks if isinstance(b, TextBlock))
        if isinstance(message, ToolResultMessage):
            out.append(f"result {message.call} {text}")
        elif isinstance(message, AssistantMessage):
            out.append(f"answer {text}")
        else:
            out.append(f"user {text}")
    return out


MESSAGES = st.one_of(
    st.builds(user, st.sampled_from(["hello", " ", ""])),
    st.builds(
        answer,
        st.sampled_from(["text", " ", ""]),
        st.lists(st.sampled_from(["a", "b"]), max_size=3),
        status=st.sampled_from(["complete", "complete", "aborted", "failed", "deferred"]),
    ),
    st.builds(result, st.integers(1, 14), st.integers(0, 2), st.sampled_from(["ok", " ", ""])),
    st.builds(picture, st.sampled_from(["p", "q"])),
    st.builds(pictured_result, st.integers(1, 14), st.integers(0, 2), st.sampled_from(["q", "r"])),
    st.builds(system, st.sampled_from(["s", "t", ""])),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Entry]:
    """A history of up to three conversations, each a fork of the one before."""
    entries: list[Entry] = []
    conversation = 1
    for id in range(1, draw(st.integers(0, 14)) + 1):
        if conversation < 3 and draw(st.integers(0, 7)) == 7:
            conversation += 1
        edits = draw(
            st.lists(
                st.builds(
                    Edit,
                    target=st.integers(1, id),
                    messages=st.none() | st.lists(MESSAGES, max_size=2).map(tuple),
                ),
                max_size=1,
            )
        )
        entries.append(
            entry(
                id,
                *draw(st.lists(MESSAGES, max_size=2)),
                head=draw(st.one_of(st.none(), st.none(), st.integers(1, id))),
                edits=tuple(edits),
                conversation=conversation,
            )
        )
    return entries


def check_sendable(messages: Iterable[ContextMessage]) -> None:
    """The strictest provider takes the messages, with a question after them."""
    items = [*messages, ContextMessage(user("and now?"), 99)]
    check_request(
        ModelRequest(
            model="m",
            messages=tuple(
                RequestMessage(
                    message=item.message,
                    entry=item.message.call[0]
                    if isinstance(item.message, ToolResultMessage)
                    else item.entry,
                )
                for item in items
            ),
        )
    )
