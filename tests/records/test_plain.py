"""The stored shape of messages, edits, outcomes, waits, errors and usage."""

from __future__ import annotations

import math
import sys
from typing import Any, get_args

import attrs
import pytest
from hypothesis import given, strategies as st

from pidurable.errors import NotJsonError
from pidurable.records import _codec as codec
from pidurable.records._entries import Edit
from pidurable.records._json import dumps, loads
from pidurable.records._limits import MIB
from pidurable.records._messages import (
    AssistantMessage,
    AssistantStatus,
    ImageBlock,
    StopReason,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolDeclaration,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from pidurable.records._tasks import ErrorInfo, JoinPolicy, OutcomeRecord, OutcomeStatus, Wait

WORDS = st.text("abü\n", max_size=4)
JSON = st.none() | st.integers(0, 3) | WORDS | st.dictionaries(WORDS, st.booleans(), max_size=2)
COUNTS = st.integers(0, 2**40)
USAGES = st.builds(
    Usage,
    requests=COUNTS,
    input_tokens=COUNTS,
    output_tokens=COUNTS,
    cache_read_tokens=COUNTS,
    cache_write_tokens=COUNTS,
    cost=st.floats(0, 100),
)
BLOCKS = st.lists(
    st.builds(TextBlock, text=WORDS, opaque=JSON)
    | st.builds(ThinkingBlock, text=WORDS, opaque=JSON)
    | st.builds(ImageBlock, blob=WORDS, media_type=WORDS, opaque=JSON)
    | st.builds(ToolCallBlock, name=WORDS, arguments=JSON, opaque=JSON),
    max_size=4,
).map(tuple)
MESSAGES = st.lists(
    st.builds(UserMessage, blocks=BLOCKS, at_us=COUNTS)
    | st.builds(
        AssistantMessage,
        blocks=BLOCKS,
        status=st.sampled_from(get_args(AssistantStatus)),
        stop_reason=st.sampled_from(get_args(StopReason)),
        model=WORDS,
        usage=USAGES,
        at_us=COUNTS,
        error=st.none() | WORDS,
    )
    | st.builds(
        ToolResultMessage,
        call=st.tuples(COUNTS, COUNTS),
        name=WORDS,
        blocks=BLOCKS,
        is_error=st.booleans(),
        at_us=COUNTS,
        code=st.none() | WORDS,
    )
    | st.builds(
        SystemMessage,
        sections=st.dictionaries(WORDS, st.none() | WORDS, max_size=3),
        tools_added=st.lists(
            st.builds(ToolDeclaration, name=WORDS, description=WORDS, schema=JSON), max_size=2
        ).map(tuple),
        tools_removed=st.lists(WORDS, max_size=2).map(tuple),
        at_us=COUNTS,
    ),
    max_size=4,
).map(tuple)
EDITS = st.lists(st.builds(Edit, target=COUNTS, messages=st.none() | MESSAGES), max_size=3).map(
    tuple
)
ERRORS = st.builds(ErrorInfo, type=WORDS, message=WORDS, detail=JSON, traceback=st.none() | WORDS)
OUTCOMES = st.builds(
    OutcomeRecord,
    status=st.sampled_from(get_args(OutcomeStatus)),
    result=JSON,
    has_result=st.just(True),
    error=st.none() | ERRORS,
    reason=st.none() | WORDS,
) | st.builds(OutcomeRecord, status=st.just("orphaned"))
WAITS = st.builds(
    Wait,
    on=st.none() | st.lists(COUNTS).map(tuple),
    conversations=st.lists(COUNTS).map(tuple),
    others=st.lists(COUNTS).map(tuple),
    policy=st.sampled_from(get_args(JoinPolicy)),
    deadline_us=st.none() | COUNTS,
    signals=st.booleans(),
)


@given(
    st.one_of(
        st.tuples(MESSAGES, st.just("messages")),
        st.tuples(EDITS, st.just("edits")),
        st.tuples(OUTCOMES, st.just("outcome")),
        st.tuples(WAITS, st.just("wait")),
        st.tuples(ERRORS, st.just("error")),
        st.tuples(USAGES, st.just("usage")),
    )
)
def test_every_record_comes_back_exactly(pair: tuple[Any, str]) -> None:
    """Each record is read back equal from its text."""
    value, name = pair

    json = loads(dumps(getattr(codec, f"encode_{name}")(value)))

    assert value == getattr(codec, f"decode_{name}")(json)


class Word(str):
    """No str to the letter."""

    __slots__ = ()


def _of_other_types(message: Any) -> list[Any]:
    """The same message with one field each of a type that is read as another, or not at all."""
    odd: list[Any] = [attrs.evolve(message, at_us=at_us) for at_us in (True, 2**64)]
    if isinstance(message, SystemMessage):
        return odd
    odd.append(attrs.evolve(message, blocks=list(message.blocks)))
    odd.append(attrs.evolve(message, blocks=(TextBlock(text=Word("x")),)))
    odd += [
        attrs.evolve(message, blocks=(block,))
        for block in (
            TextBlock(text="x", opaque=Word("x")),
            TextBlock(text="x", opaque=[math.nan]),
            TextBlock(text="x" * (MIB + 1)),
            ToolCallBlock(name=Word("x"), arguments={}),
            ToolCallBlock(name="x", arguments={1: "x"}),
            ToolCallBlock(name="x", arguments=["x" * (MIB + 1)]),
        )
    ]
    if isinstance(message, AssistantMessage):
        odd.append(attrs.evolve(message, usage=attrs.evolve(message.usage, requests=True)))
        odd.append(attrs.evolve(message, usage=attrs.evolve(message.usage, cost=1)))
        odd.append(attrs.evolve(message, usage=attrs.evolve(message.usage, cost=-1.0)))
        odd.append(attrs.evolve(message, usage=attrs.evolve(message.usage, output_tokens=-1)))
        odd.append(attrs.evolve(message, usage=attrs.evolve(message.usage, requests=2**64)))
        odd.append(attrs.evolve(message, status="whole"))
        odd.append(attrs.evolve(message, stop_reason=Word("stop")))
        odd.append(attrs.evolve(message, model=Word("m")))
        odd.append(attrs.evolve(message, error=Word("e")))
    if isinstance(message, ToolResultMessage):
        odd += [attrs.evolve(message, call=call) for call in ((1, True), (1, 2, 3), [1, 2])]
        odd.append(attrs.evolve(message, call=(1, 2**64)))
        odd.append(attrs.evolve(message, is_error=0))
        odd.append(attrs.evolve(message, name=Word("n")))
        odd.append(attrs.evolve(message, code=Word("c")))
    return odd


@given(MESSAGES)
def test_messages_are_taken_for_what_is_read_only_where_they_are_that(messages: Any) -> None:
    """Exact messages of blocks are taken as they are; any odd type has them read again."""
    found = codec.as_read(messages, MIB)

    blocks = [block for message in messages for block in getattr(message, "blocks", ())]
    plain = not any(isinstance(block, ImageBlock) for block in blocks)
    shown = not any(isinstance(message, SystemMessage) for message in messages)
    assert (found is not None) == (plain and shown)
    if found is not None:
        encoded = codec.encode_messages(messages)
        assert dumps(encoded, checked=True) == dumps(encoded)
        read = codec.decode_messages(loads(dumps(encoded)))
        assert found == read
        assert repr(found) == repr(read), "to the last type"
    odd = [odd for each in messages for odd in _of_other_types(each)]
    assert [each for each in odd if codec.as_read([each], MIB) is not None] == []


def test_what_is_kept_of_messages_shares_no_container_with_their_writer() -> None:
    """JSON within a message that is taken as it is can be changed by its writer afterwards."""
    arguments: dict[str, Any] = {"paths": ["a"], "pair": ("b", "c")}
    opaque: dict[str, Any] = {"ids": ["x"]}
    call = ToolCallBlock(name="read", arguments=arguments)
    said = UserMessage(blocks=(TextBlock(text="t", opaque=opaque), call), at_us=1)

    found = codec.as_read((said,), MIB)
    arguments["paths"].append("later")
    opaque["ids"].append("later")

    assert found == (
        UserMessage(
            blocks=(
                TextBlock(text="t", opaque={"ids": ["x"]}),
                ToolCallBlock(name="read", arguments={"paths": ["a"], "pair": ["b", "c"]}),
            ),
            at_us=1,
        ),
    )


@pytest.mark.parametrize("spare", [60, 200, 320])
def test_where_the_call_stack_is_almost_full_messages_are_read_again(spare: int) -> None:
    """With so many levels left, JSON of 150 in a message is not walked or copied, or it is."""
    arguments: Any = 1
    for _ in range(150):
        arguments = [arguments]
    said = (UserMessage(blocks=(ToolCallBlock(name="x", arguments=arguments),), at_us=1),)
    frame, used = sys._getframe(), 0
    while frame.f_back is not None:
        frame, used = frame.f_back, used + 1

    def down(levels: int) -> Any:
        return codec.as_read(said, MIB) if levels == 0 else down(levels - 1)

    assert down(sys.getrecursionlimit() - used - spare) in (None, said)
    assert codec.as_read(said, MIB) == said


@given(st.recursive(st.none() | st.integers(-9, 9) | st.text(), st.lists))
def test_a_completed_outcome_is_the_same_around_a_text(value: Any) -> None:
    """Writing it around an encoded result gives what encoding the whole gives."""
    whole = OutcomeRecord(status="completed", result=value, has_result=True)
    try:
        text = dumps(value)
    except NotJsonError:
        return
    assert codec.completed_text(text) == dumps(codec.encode_outcome(whole))


def test_the_stored_shape_is_fixed() -> None:
    """The shape is public: this test is its definition, and changing it needs a migration."""
    messages = (
        UserMessage(blocks=(TextBlock(text="hi"),), at_us=1),
        AssistantMessage(
            blocks=(
                ThinkingBlock(text="hm", opaque={"sig": "s"}),
                ToolCallBlock(name="read", arguments={"path": "x"}),
            ),
            status="complete",
            stop_reason="tool_use",
            model="m",
            usage=Usage(requests=1, cost=0.5),
            at_us=2,
        ),
        ToolResultMessage(
            call=(7, 0), name="read", blocks=(), is_error=True, at_us=3, code="timeout"
        ),
        SystemMessage(sections={"a": "x", "b": None}, at_us=4),
    )

    assert codec.encode_messages(messages) == [
        {"role": "user", "blocks": [{"type": "text", "text": "hi"}], "at_us": 1},
        {
            "role": "assistant",
            "blocks": [
                {"type": "thinking", "text": "hm", "opaque": {"sig": "s"}},
                {"type": "tool_call", "name": "read", "arguments": {"path": "x"}},
            ],
            "status": "complete",
            "stop_reason": "tool_use",
            "model": "m",
            "usage": {"requests": 1, "cost": 0.5},
            "at_us": 2,
        },
        {
            "role": "tool_result",
            "call": [7, 0],
            "name": "read",
            "blocks": [],
            "is_error": True,
            "code": "timeout",
            "at_us": 3,
        },
        {"role": "system", "sections": {"a": "x", "b": None}, "at_us": 4},
    ]
    assert codec.encode_wait(Wait()) == {}
    assert codec.encode_outcome(OutcomeRecord(status="completed", has_result=True)) == {
        "status": "completed",
        "result": None,
    }
    assert codec.encode_edits([Edit(target=3)]) == [{"target": 3}]


USER = {"role": "user", "blocks": [], "at_us": 1}
CALL = {"role": "tool_result", "call": [1, 0], "name": "n", "blocks": [], "is_error": False}


@pytest.mark.parametrize(
    ("name", "json", "path", "problem"),
    [
        ("messages", {}, "$", "expected a list"),
        ("messages", [3], "$[0]", "expected an object"),
        ("messages", [USER, {"role": "usr"}], "$[1].role", "did you mean 'user'?"),
        ("messages", [{"role": ["user"]}], "$[0].role", "expected one of user"),
        ("messages", [{**USER, "at_us": "1"}], "$[0].at_us", "expected int"),
        ("messages", [{**USER, "at": 1}], "$[0]", "no field 'at' is known here"),
        ("messages", [{"role": "user", "blocks": []}], "$[0]", "'at_us' is missing"),
        ("messages", [{**USER, "blocks": [{"type": "video"}]}], "$[0].blocks[0].type", "text"),
        ("messages", [{**USER, "blocks": [{"type": "text"}]}], "$[0].blocks[0]", "'text' is mis"),
        ("messages", [{**CALL, "call": [1], "at_us": 1}], "$[0].call", "index of the call"),
        ("messages", [{**CALL, "call": [1, True], "at_us": 1}], "$[0].call[1]", "expected int"),
        (
            "messages",
            [{"role": "system", "sections": {"a b": 1}, "at_us": 1}],
            '$[0].sections["a b"]',
            "expected str",
        ),
        ("usage", [], "$", "expected an object"),
        ("usage", {"cost": float("nan")}, "$.cost", "finite"),  # C084
        ("usage", {"cost": -0.5}, "$.cost", "not negative"),
        ("usage", {"requests": -1}, "$.requests", "not negative"),
        ("usage", {"requests": True}, "$.requests", "expected int"),
        ("edits", [{"target": 1, "messages": [{"role": "x"}]}], "$[0].messages[0].role", "user"),
        ("outcome", {"status": "done"}, "$.status", "expected one of completed"),
        ("outcome", {"status": "failed", "error": {}}, "$.error", "'type' is missing"),
        ("wait", {"on": ["1"]}, "$.on[0]", "expected int"),
        ("wait", {"policy": "fail_slow"}, "$.policy", "did you mean 'fail_fast'?"),
        ("error", {"type": "X", "message": None}, "$.message", "expected str"),
    ],
)
def test_unknown_shapes_are_refused_at_their_place(
    name: str, json: Any, path: str, problem: str
) -> None:
    """Nothing is dropped or guessed: an unknown shape is an error that names its path."""  # C083
    with pytest.raises(NotJsonError) as caught:
        getattr(codec, f"decode_{name}")(json)

    assert path == caught.value.path
    assert problem in caught.value.problem


def test_only_messages_and_blocks_are_written() -> None:
    """A foreign object among messages or blocks is refused when it is written."""
    with pytest.raises(NotJsonError, match=r"\$\[0\]: expected a message"):
        codec.encode_messages(["hi"])  # type: ignore[list-item]
    with pytest.raises(NotJsonError, match=r"\$\[0\].blocks\[0\]: expected a block"):
        codec.encode_messages([UserMessage(blocks=("hi",), at_us=1)])  # type: ignore[arg-type]
