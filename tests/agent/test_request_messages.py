"""The messages of a request: those of its context, made when they are looked at, and its own."""

from __future__ import annotations

import copy
import pickle

import attrs
import pytest
from hypothesis import given, strategies as st

from pidurable.agent._models import RequestMessage, render_system_message
from pidurable.agent._request_messages import RequestMessages, images_in, sendable_name
from pidurable.records._entries import Entry
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    ImageBlock,
    Message,
    SystemMessage,
    TextBlock,
    ToolCallBlock,
    ToolDeclaration,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from pidurable.session._context import ModelContext, context_of


def entry(id: int, *messages: Message) -> Entry:
    return Entry(id=id, conversation_id=1, seq=id, kind="test", messages=messages)


def user(text: str, *images: str) -> UserMessage:
    shown = [ImageBlock(blob=name, media_type="image/png") for name in images]
    return UserMessage(blocks=(TextBlock(text=text), *shown), at_us=0)


def answer(*names: str) -> AssistantMessage:
    calls: tuple[Block, ...] = tuple(
        ToolCallBlock(name=name, arguments={"of": [name]}) for name in names
    )
    return AssistantMessage(
        blocks=calls or (TextBlock(text="said"),),
        status="complete",
        stop_reason="stop",
        model="m",
        usage=Usage(),
        at_us=0,
    )


def result(entry_id: int, index: int, *images: str) -> ToolResultMessage:
    return ToolResultMessage(
        call=(entry_id, index),
        name="t",
        blocks=user("r", *images).blocks,
        is_error=False,
        at_us=0,
    )


def system(text: str | None) -> SystemMessage:
    """What is told; None changes the tools alone."""
    added = (ToolDeclaration(name="t", description="d", schema={"type": "object"}),)
    if text is None:
        return SystemMessage(sections={}, tools_added=added, at_us=0)
    return SystemMessage(sections={"s": text}, at_us=0)


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(user, st.sampled_from(["x", " "]), st.sampled_from(["p", "q"])),
    st.just(user("plain")),
    st.lists(st.sampled_from(["look", "a.b", ""]), max_size=2).map(lambda names: answer(*names)),
    st.builds(result, st.integers(1, 10), st.integers(0, 1), st.sampled_from(["q", "r"])),
    st.builds(result, st.integers(1, 10), st.integers(0, 1)),
    st.builds(system, st.sampled_from(["one", "two", " ", None])),
)


def in_one_go(context: ModelContext) -> list[RequestMessage]:
    """The same, of every message of the context in turn."""
    made: list[RequestMessage] = []
    for place, item in enumerate(context):
        message, known_by = item.message, item.entry
        if isinstance(message, SystemMessage):
            if place == 0 or not render_system_message(message).strip():
                continue
        elif isinstance(message, ToolResultMessage):
            known_by = message.call[0]
        made.append(RequestMessage(message=as_named(message), entry=known_by))
    return made


def as_named(message: Message) -> Message:
    """With names that may be sent."""
    if isinstance(message, ToolResultMessage):
        return attrs.evolve(message, name=sendable_name(message.name))
    if isinstance(message, AssistantMessage):
        blocks = tuple(
            attrs.evolve(block, name=sendable_name(block.name))
            if isinstance(block, ToolCallBlock)
            else block
            for block in message.blocks
        )
        return attrs.evolve(message, blocks=blocks)
    return message


@given(st.lists(st.lists(MESSAGES, max_size=2), max_size=8), st.data())
def test_looked_at_in_any_order_they_are_those_of_the_context(
    turns: list[list[Message]], data: st.DataObject
) -> None:
    """One by one from anywhere, in slices, or in order: equal to a tuple made in one go."""
    context = context_of([entry(id, *each) for id, each in enumerate(turns, start=1)])
    expected = in_one_go(context)
    made = RequestMessages(context)

    assert images_in(made) == images_in(tuple(expected))
    assert len(made) == len(expected)
    for place in data.draw(st.permutations(range(-len(expected), len(expected)))):
        if data.draw(st.integers(0, 9)) == 0:
            # In the middle of it, all of them at once.
            break
        assert made[place] == expected[place]
        assert made[place] is made[place]
    start, stop, step = data.draw(st.slices(len(expected))).indices(len(expected))
    assert made[start:stop:step] == tuple(expected[start:stop:step])
    assert list(made) == expected
    assert list(reversed(made)) == expected[::-1]
    assert made == tuple(expected)
    assert made == RequestMessages(context)
    assert repr(made) == repr(tuple(expected))
    for wrong in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError, match=f"message {wrong} of a request of {len(expected)}"):
            made[wrong]


def test_a_long_conversation_is_not_looked_at_to_prepare_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To make it, to find its images and to look at its end takes as many messages as are seen."""
    turns: list[Message] = [system("told")]
    for number in range(2, 1_000, 3):
        turns += [user("see", f"image {number}"), answer("look"), result(number + 1, 0)]
    context = context_of([entry(id, each) for id, each in enumerate(turns, start=1)])
    looked: list[int] = []
    original = ModelContext.__getitem__

    def counting(self: ModelContext, index: int) -> object:
        looked.append(index)
        return original(self, index)

    monkeypatch.setattr(ModelContext, "__getitem__", counting)
    monkeypatch.setattr(ModelContext, "__iter__", None)

    made = RequestMessages(context)
    assert len(made) == len(context) - 1
    assert len(made.images()) == 333
    assert isinstance(made[-1].message, ToolResultMessage)
    assert made[0].message == turns[1]
    assert looked == [len(context) - 1, 1]


def test_what_is_done_to_a_message_stays_in_its_request() -> None:
    """The JSON of a call is the request's own, and is found again as it was left."""
    context = context_of([entry(1, user("go")), entry(2, answer("look"))])
    made, other = RequestMessages(context), RequestMessages(context)
    (call,) = [block for block in made[1].message.blocks if isinstance(block, ToolCallBlock)]  # type: ignore[union-attr]
    assert isinstance(call.arguments, dict)

    call.arguments["of"] = "another"

    assert "another" in repr(made)
    assert "another" in repr(list(made))
    assert made != other
    assert "another" not in repr(other)
    assert "another" not in repr(list(context))


def test_a_copy_is_a_tuple_that_needs_no_context() -> None:
    """Copied or pickled, a request carries its messages, and nothing of the conversation."""
    context = context_of([entry(1, user("go", "p")), entry(2, answer("look"))])
    made = RequestMessages(context)

    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(copied) is tuple
        assert copied == made
        assert images_in(copied) == {"p"}
