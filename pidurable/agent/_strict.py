"""The strict checks: what the pickiest provider would refuse, refused here with a precise text.

A request is reduced to turns (who speaks, which calls, which result), whether it comes as our
records or as an OpenAI chat body, and one function judges the turns. The scripted provider runs it
on every request, so that a history no provider would take fails a test, and not a user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs

from pidurable.agent._models import ModelRequest, RequestMessage, call_id, render_system_message
from pidurable.errors import ModelError, NotJsonError, show
from pidurable.records._json import check_json, loads
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    ImageBlock,
    JsonValue,
    SystemMessage,
    TextBlock,
    ToolCallBlock,
    ToolDeclaration,
    ToolResultMessage,
    UserMessage,
)

__all__ = ["StrictRequestError", "check_chat_body", "check_request"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}")

Role = Literal["system", "user", "assistant", "result"]


@attrs.define(eq=False)
class StrictRequestError(ModelError):
    """A strict provider refuses the request: a bug in what built it, not in the model."""


def _refuse(problem: str) -> StrictRequestError:
    return StrictRequestError("other", f"refused request: {problem}")


@attrs.frozen(kw_only=True)
class _Turn:
    """One message, reduced to what the rules are about."""

    where: str
    role: Role
    texts: tuple[str, ...] = ()
    parts: int = 0
    """Text blocks, images and calls that a provider would see."""
    calls: tuple[tuple[str, str], ...] = ()
    """(id, name) of each call."""
    result: tuple[str, str | None] | None = None
    """(id, name) of the call that this is the result of."""


def check_request(request: ModelRequest) -> None:
    """Refuse a request that a strict provider would refuse.

    Raises:
        StrictRequestError: The first problem found, naming the message and the call.
    """
    if request.system and not request.system.strip():
        raise _refuse("the system prompt is blank")
    _check_json(request.system, "system")
    _check_json(request.options, "options")
    _check_tools([(tool.name, tool.schema) for tool in request.tools])
    for tool in request.tools:
        _check_declaration(tool)
    _check_turns([_turn(index, item) for index, item in enumerate(request.messages)])


def check_chat_body(body: object) -> None:
    """Refuse the body of an OpenAI chat completion request, by the same rules.

    Raises:
        StrictRequestError: The first problem found.
    """
    if not isinstance(body, dict):
        raise _refuse(f"the body is not an object but {show(body)}")
    _check_json(body, "body")
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise _refuse("the body has no list of messages")
    if not isinstance(body.get("model"), str):
        raise _refuse("the body names no model")
    _check_tools(list(_chat_tools(body.get("tools", []))))
    _check_turns([_chat_turn(index, message) for index, message in enumerate(messages)])


# --- the rules --------------------------------------------------------------------------------


def _check_turns(turns: Sequence[_Turn]) -> None:
    seen: set[str] = set()
    awaited: list[tuple[str, str]] = []
    last: _Turn | None = None
    for turn in turns:
        _check_content(turn)
        if turn.role == "result":
            _check_result(turn, awaited)
        elif awaited:
            missing, name = awaited[0]
            problem = f"{turn.where} comes before the result of call {missing!r} ({name})"
            raise _refuse(problem)
        elif turn.role == "assistant":
            _check_order(turn, last)
            for identity, name in turn.calls:
                _check_call(turn, identity, name, seen)
            awaited = list(turn.calls)
        if turn.role != "system":
            last = turn
    if awaited:
        missing, name = awaited[0]
        raise _refuse(f"the call {missing!r} ({name}) has no result")
    if last is None:
        raise _refuse("there is no message of a user")
    if last.role == "assistant":
        raise _refuse(f"{last.where}: the last message is the model's own; nobody asks anything")


def _check_order(turn: _Turn, last: _Turn | None) -> None:
    if last is None:
        raise _refuse(f"{turn.where}: the first message must be a user's, this is the assistant's")
    if last.role == "assistant":
        raise _refuse(f"{turn.where}: two messages of the assistant follow each other")


def _check_content(turn: _Turn) -> None:
    for text in turn.texts:
        if not text.strip():
            raise _refuse(f"{turn.where}: a text block is empty or blank ({show(text)})")
    if turn.parts == 0:
        raise _refuse(f"{turn.where}: the message has no content")


def _check_call(turn: _Turn, identity: str, name: str, seen: set[str]) -> None:
    if not _ID.fullmatch(identity):
        raise _refuse(f"{turn.where}: the call id {show(identity)} is not 1 to 40 of a-z 0-9 _ -")
    if identity in seen:
        raise _refuse(f"{turn.where}: the call id {identity!r} is used twice")
    if not name:
        raise _refuse(f"{turn.where}: the call {identity!r} has no name")
    seen.add(identity)


def _check_result(turn: _Turn, awaited: list[tuple[str, str]]) -> None:
    assert turn.result is not None
    identity, name = turn.result
    if not awaited:
        raise _refuse(f"{turn.where}: the result for {identity!r} has no call before it")
    expected, called = awaited[0]
    if identity != expected:
        problem = f"the result for {identity!r} stands where that of call {expected!r} belongs"
        raise _refuse(f"{turn.where}: {problem}")
    if name is not None and name != called:
        raise _refuse(f"{turn.where}: the result is of {name!r}, the call was to {called!r}")
    awaited.pop(0)


def _check_tools(tools: Sequence[tuple[object, object]]) -> None:
    seen: set[str] = set()
    for name, schema in tools:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _refuse(f"the tool name {show(name)} is not 1 to 64 of a-z A-Z 0-9 _ -")
        if name in seen:
            raise _refuse(f"the tool {name!r} is declared twice")
        seen.add(name)
        if not isinstance(schema, dict) or schema.get("type") != "object":
            raise _refuse(f"the schema of tool {name!r} is not that of an object: {show(schema)}")


def _check_declaration(tool: ToolDeclaration) -> None:
    _check_json(tool.schema, f"the schema of tool {tool.name!r}")
    _check_json(tool.description, f"the description of tool {tool.name!r}")


def _check_json(value: object, where: str) -> None:
    try:
        check_json(value, "$")
    except NotJsonError as error:
        raise _refuse(f"{where} is not strict JSON: {error}") from error


# --- our records ------------------------------------------------------------------------------


def _turn(index: int, item: RequestMessage) -> _Turn:
    message = item.message
    where = f"message {index}" if item.entry is None else f"message {index} (entry {item.entry})"
    if isinstance(message, SystemMessage):
        # A change of tools alone says nothing to the model; it is no message to a provider.
        text = render_system_message(message)
        return _Turn(where=where, role="system", texts=(text,) if text else (), parts=1)
    _check_blocks(message.blocks, where)
    texts = tuple(block.text for block in message.blocks if isinstance(block, TextBlock))
    parts = sum(isinstance(b, TextBlock | ImageBlock | ToolCallBlock) for b in message.blocks)
    if isinstance(message, UserMessage):
        return _Turn(where=where, role="user", texts=texts, parts=parts)
    if isinstance(message, ToolResultMessage):
        result = (call_id(*message.call), message.name)
        return _Turn(where=where, role="result", texts=texts, parts=parts, result=result)
    calls = tuple(_calls(item.entry, message, where))
    return _Turn(where=where, role="assistant", texts=texts, parts=parts, calls=calls)


def _calls(entry: int | None, message: AssistantMessage, where: str) -> Iterator[tuple[str, str]]:
    if message.status != "complete":
        raise _refuse(f"{where}: an answer that is {message.status} must not be sent")
    for index, call in enumerate(message.tool_calls):
        if entry is None:
            raise _refuse(f"{where}: an answer with tool calls has no entry to name them by")
        yield call_id(entry, index), call.name


def _check_blocks(blocks: Sequence[Block], where: str) -> None:
    for number, block in enumerate(blocks):
        _check_json(attrs.asdict(block), f"{where}, block {number}")


# --- OpenAI chat bodies -----------------------------------------------------------------------


def _chat_turn(index: int, message: JsonValue) -> _Turn:
    where = f"message {index}"
    if not isinstance(message, dict):
        raise _refuse(f"{where} is not an object but {show(message)}")
    role = message.get("role")
    texts, others = _chat_texts(message.get("content"), where)
    parts = len(texts) + others
    if role in ("system", "developer"):
        return _Turn(where=where, role="system", texts=texts, parts=parts)
    if role == "user":
        return _Turn(where=where, role="user", texts=texts, parts=parts)
    if role == "tool":
        result = (str(message.get("tool_call_id")), None)
        return _Turn(where=where, role="result", texts=texts, parts=parts, result=result)
    if role == "assistant":
        calls = tuple(_chat_calls(message.get("tool_calls") or [], where))
        parts += len(calls)
        return _Turn(where=where, role="assistant", texts=texts, parts=parts, calls=calls)
    raise _refuse(f"{where}: unknown role {show(role)}")


def _chat_texts(content: JsonValue, where: str) -> tuple[tuple[str, ...], int]:
    """Return the texts of a content field, and how many other parts it has."""
    if content is None:
        return (), 0
    if isinstance(content, str):
        return (content,), 0
    if not isinstance(content, list):
        raise _refuse(f"{where}: the content is neither text nor a list but {show(content)}")
    texts: list[str] = []
    others = 0
    for part in content:
        if not isinstance(part, dict):
            raise _refuse(f"{where}: a part of the content is not an object but {show(part)}")
        if part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        else:
            others += 1
    return tuple(texts), others


def _chat_calls(calls: Any, where: str) -> Iterator[tuple[str, str]]:
    if not isinstance(calls, list):
        raise _refuse(f"{where}: tool_calls is not a list but {show(calls)}")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _refuse(f"{where}: a tool call is not of a function: {show(call)}")
        identity, arguments = str(call.get("id")), function.get("arguments")
        _check_chat_arguments(arguments, f"{where}: the arguments of call {identity!r}")
        yield identity, str(function.get("name") or "")


def _check_chat_arguments(arguments: object, where: str) -> None:
    try:
        value = loads(arguments) if isinstance(arguments, str) else None
    except NotJsonError as error:
        raise _refuse(f"{where} are not strict JSON: {error}") from error
    if not isinstance(value, dict):
        raise _refuse(f"{where} are not the text of an object: {show(arguments)}")


def _chat_tools(tools: JsonValue) -> Iterator[tuple[object, object]]:
    if not isinstance(tools, list):
        raise _refuse(f"tools is not a list but {show(tools)}")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise _refuse(f"a tool is not a function: {show(tool)}")
        schema = function.get("parameters", {"type": "object"})
        yield function.get("name"), schema
