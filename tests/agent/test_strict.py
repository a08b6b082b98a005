"""The strict checks refuse each thing that a real provider refused, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest

from pidurable.agent._models import ModelRequest, RequestMessage
from pidurable.agent._strict import StrictRequestError, check_chat_body, check_request
from pidurable.records._messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    TextBlock,
    ToolCallBlock,
    ToolDeclaration,
    ToolResultMessage,
    Usage,
    UserMessage,
)

READ = ToolDeclaration(name="read", description="Read.", schema={"type": "object"})


def user(text: str = "hello") -> RequestMessage:
    """A message of a user."""
    return RequestMessage(message=UserMessage(blocks=(TextBlock(text=text),), at_us=0), entry=1)


def assistant(entry: int | None, *names: str, text: str = "", **fields: Any) -> RequestMessage:
    """An answer with calls to the tools named."""
    blocks = [*([TextBlock(text=text)] if text else [])]
    calls = [ToolCallBlock(name=name, arguments={}) for name in names]
    message = AssistantMessage(
        blocks=(*blocks, *calls),
        status=fields.get("status", "complete"),
        stop_reason="stop",
        model="a/b",
        usage=Usage(),
        at_us=0,
    )
    return RequestMessage(message=message, entry=entry)


def result(entry: int, index: int, name: str = "read", text: str = "ok") -> RequestMessage:
    """The result of a call."""
    message = ToolResultMessage(
        call=(entry, index), name=name, blocks=(TextBlock(text=text),), is_error=False, at_us=0
    )
    return RequestMessage(message=message)


def request(*messages: RequestMessage, **fields: Any) -> ModelRequest:
    """A request with these messages."""
    return ModelRequest(model="a/b", messages=messages, **{"tools": (READ,), **fields})


VALID = (
    user(),
    assistant(2, "read", "write", text="I look."),
    result(2, 0),
    result(2, 1, "write"),
    user("and then?"),
    assistant(3, text="done"),
    user("thanks"),
    user("one more"),
)


def test_a_valid_exchange_passes() -> None:
    """Calls with results in order, two user messages in a row, and a system change pass."""
    change: Message = SystemMessage(sections={"a": "new"}, at_us=0)

    check_request(request(*VALID, system="Be brief."))
    check_request(request(RequestMessage(message=change), *VALID, RequestMessage(message=change)))


def test_every_prefix_that_breaks_a_rule_is_refused() -> None:
    """Cut anywhere, the exchange is refused unless it ends in a user's message or all results."""
    passed = []
    for end in range(len(VALID) + 1):
        try:
            check_request(request(*VALID[:end]))
        except StrictRequestError:
            continue
        passed.append(end)

    assert passed == [1, 4, 5, 7, 8]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ((), "no message of a user"),
        ((assistant(2, text="x"), user()), "first message must be a user's"),
        ((user(), assistant(2, text="x")), "the last message is the model's own"),
        ((user(), assistant(2, text="x"), assistant(3, text="y"), user()), "follow each other"),
        ((user(), assistant(2, "read")), "the call 'c2_0' (read) has no result"),  # C001
        ((user(), assistant(2, "read"), user(), result(2, 0)), "before the result"),  # C030
        ((user(), assistant(2, "read", "read"), result(2, 0), user()), "result of call 'c2_1'"),
        ((user(), assistant(2, "read", "a"), result(2, 1, "a"), result(2, 0)), "where that of"),
        ((user(), result(2, 0)), "the result for 'c2_0' has no call"),  # C003
        ((user(), assistant(2, "read"), result(2, 0), result(2, 0)), "has no call before it"),
        ((user(), assistant(2, "read"), result(2, 0, "write")), "is of 'write', the call was to"),
        (
            (user(), assistant(2, "read"), result(2, 0), assistant(2, "read"), result(2, 0)),
            "'c2_0' is used twice",  # C065
        ),
        ((user(), assistant(None, "read"), result(2, 0)), "has no entry"),
        ((user(" \r\n"),), "empty or blank"),  # C070
        ((user(), assistant(2, "read"), result(2, 0, text="")), "empty or blank"),  # C070
        ((user(), assistant(2), user()), "has no content"),
        ((user(), assistant(2, text="x", status="aborted"), user()), "is aborted must not be sent"),
        ((user("\ud800"),), "not strict JSON"),  # C082
        ((user("a\0"),), "not strict JSON"),  # C081
    ],
)
def test_a_broken_exchange_is_refused(messages: tuple[RequestMessage, ...], problem: str) -> None:
    """Each rule has a request that breaks it alone, and a text that says what is wrong."""
    with pytest.raises(StrictRequestError) as caught:
        check_request(request(*messages))

    assert problem in str(caught.value)
    assert caught.value.kind == "other"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tools": (READ, READ)}, "declared twice"),
        ({"tools": (attrs.evolve(READ, name="a b"),)}, "tool name 'a b'"),
        ({"tools": (attrs.evolve(READ, schema={"type": "string"}),)}, "not that of an object"),
        ({"tools": (attrs.evolve(READ, schema={"type": "object", "x": {1}}),)}, "strict JSON"),
        ({"system": " "}, "system prompt is blank"),
        ({"options": {"temperature": float("nan")}}, "options is not strict JSON"),  # C084
    ],
)
def test_a_broken_setting_is_refused(fields: dict[str, Any], problem: str) -> None:
    """Tools, options and the system prompt are checked too."""
    with pytest.raises(StrictRequestError) as caught:
        check_request(request(user(), **fields))

    assert problem in str(caught.value)


BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c2_0", "type": "function", "function": {"name": "r", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c2_0", "content": "ok"},
    ],
    "tools": [{"type": "function", "function": {"name": "r", "parameters": {"type": "object"}}}],
}


def test_a_valid_chat_body_passes() -> None:
    """The wire form of a valid exchange passes."""
    check_chat_body(BODY)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ((), "x", "not an object"),
        (("model",), None, "names no model"),
        (("messages",), {}, "no list of messages"),
        (("messages", 1, "content"), " ", "empty or blank"),
        (("messages", 1, "content", 0, "text"), "", "empty or blank"),
        (("messages", 1, "role"), "robot", "unknown role"),
        (("messages", 2, "tool_calls", 0, "id"), "", "the call id ''"),
        (("messages", 2, "tool_calls", 0, "id"), "x" * 41, "is not 1 to 40"),
        (("messages", 2, "tool_calls", 0, "function", "arguments"), '{"a', "not strict JSON"),
        (("messages", 2, "tool_calls", 0, "function", "arguments"), {}, "text of an object"),
        (("messages", 2, "tool_calls"), [], "has no content"),
        (("messages", 3, "tool_call_id"), "other", "where that of call"),
        (("messages", 3, "content"), "\n", "empty or blank"),
        (("tools", 0, "function", "name"), "", "tool name ''"),
        (("tools", 0), 7, "not a function"),
    ],
)
def test_a_broken_chat_body_is_refused(path: tuple[Any, ...], value: Any, problem: str) -> None:
    """Each rule holds on the wire too."""
    body: Any = copy.deepcopy(BODY)
    if not path:
        body = value
    else:
        place = body
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    with pytest.raises(StrictRequestError) as caught:
        check_chat_body(body)

    assert problem in str(caught.value)
