"""The other interfaces: shapes of Anthropic, Google and OpenAI responses, from loopback."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from pidurable.agent._models import (
    Done,
    ModelRequest,
    Models,
    RequestMessage,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallStart,
)
from pidurable.agent._provider_ai import AiProvider, Kind
from pidurable.errors import ModelError
from pidurable.records._messages import (
    AssistantMessage,
    TextBlock,
    ThinkingBlock,
    ToolDeclaration,
    ToolResultMessage,
    UserMessage,
)

if importlib.util.find_spec("pydantic_ai") is None:
    pytest.skip("the llm extra is not installed", allow_module_level=True)

READ = ToolDeclaration(
    name="read",
    description="Read a file.",
    schema={"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
)
HELLO = RequestMessage(message=UserMessage(blocks=(TextBlock(text="hello"),), at_us=0), entry=1)


@attrs.define(eq=False)
class Canned:
    """A server that answers each request with the next of its recorded replies."""

    replies: list[tuple[int, bytes]]
    bodies: list[Any] = attrs.Factory(list)
    paths: list[str] = attrs.Factory(list)
    port: int = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += await stream.receive_some(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next(int(x.split(":")[1]) for x in lines if x.startswith("content-length:"))
        while len(body) < length:
            body += await stream.receive_some(65536)
        self.bodies.append(json.loads(body))
        self.paths.append(lines[0].split(" ")[1])
        status, reply = self.replies.pop(0)
        kind = "text/event-stream" if status == 200 else "application/json"
        headers = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n"
        async with stream:
            await stream.send_all(headers.encode() + reply)


@asynccontextmanager
async def canned(*replies: bytes | tuple[int, bytes]) -> AsyncIterator[Canned]:
    """Serve these replies while the block is open."""
    server = Canned([reply if isinstance(reply, tuple) else (200, reply) for reply in replies])
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        server.port = listeners[0].socket.getsockname()[1]
        await nursery.start(trio.serve_listeners, server.serve, listeners)
        yield server
        nursery.cancel_scope.cancel()


def models_for(server: Canned, kind: Kind) -> Models:
    """Models served by the recorded replies."""
    path = "/v1" if kind.startswith("openai") else ""
    base_url = f"http://127.0.0.1:{server.port}{path}"
    provider = AiProvider("p", kind=kind, base_url=base_url, api_key="k-0123456789")
    return Models([provider], stream_silence_seconds=30)


async def events_of(models: Models, *messages: RequestMessage) -> list[StreamEvent]:
    """All events of a request."""
    request = ModelRequest(
        model="p/m-1", messages=messages or (HELLO,), tools=(READ,), system="Be brief."
    )
    async with models.stream(request) as events:
        return [event async for event in events]


def answer_of(events: Sequence[StreamEvent]) -> AssistantMessage:
    """The message of the last event."""
    done = events[-1]
    assert isinstance(done, Done)
    return done.message


def named(*events: dict[str, Any]) -> bytes:
    """Events that carry their type as the name of the event too."""
    lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
    return "".join(lines).encode()


# --- Anthropic --------------------------------------------------------------------------------


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of one content block."""
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


STARTED = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m-1",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "cache_read_input_tokens": 4, "output_tokens": 1},
    },
}
THOUGHT = block(
    0,
    {"type": "thinking", "thinking": "", "signature": ""},
    {"type": "thinking_delta", "thinking": "hm"},
    {"type": "signature_delta", "signature": "c2lnbmVk"},
)
SAID = block(1, {"type": "text", "text": ""}, {"type": "text_delta", "text": "I look."})
CALLED = block(
    2,
    {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}},
    {"type": "input_json_delta", "partial_json": '{"path": '},
    {"type": "input_json_delta", "partial_json": '"a"}'},
)
ENDED = [
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"output_tokens": 9},
    },
    {"type": "message_stop"},
]


async def test_anthropic_thinking_keeps_its_signature_for_its_own_model() -> None:
    """Thinking, text and a call arrive, and go back with the signature and under our ids."""
    whole = named(STARTED, *THOUGHT, *SAID, *CALLED, *ENDED)

    async with canned(whole, whole) as server:
        models = models_for(server, "anthropic")
        events = await events_of(models)
        answer = answer_of(events)
        outcome = ToolResultMessage(
            call=(7, 0), name="read", blocks=(TextBlock(text="no"),), is_error=True, at_us=0
        )
        history = (
            HELLO,
            RequestMessage(message=answer, entry=7),
            RequestMessage(message=outcome),
        )
        await events_of(models, *history)

    assert events[:3] == [ThinkingDelta("hm"), TextDelta("I look."), ToolCallStart(0, "read")]
    assert answer.tool_calls[0].arguments == {"path": "a"}
    assert answer.stop_reason == "tool_use"
    assert (answer.usage.input_tokens, answer.usage.cache_read_tokens) == (14, 4)
    first, second = server.bodies
    assert "Be brief." in json.dumps(first["system"])
    thinking, text, call = second["messages"][1]["content"]
    assert (thinking["type"], thinking["signature"]) == ("thinking", "c2lnbmVk")
    assert text["text"] == "I look."
    assert (call["id"], call["input"]) == ("c7_0", {"path": "a"})
    result = second["messages"][2]["content"][0]
    assert (result["tool_use_id"], result["is_error"]) == ("c7_0", True)


async def test_anthropic_cut_and_overloaded_streams_are_retryable() -> None:
    """A stream without its end, and an error event within a stream, are to be tried again."""
    # C068
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    replies = (named(STARTED, *SAID), named(STARTED, overloaded), named(STARTED, SAID[0]))

    async with canned(*replies) as server:
        for _ in replies:
            with pytest.raises(ModelError) as caught:
                await events_of(models_for(server, "anthropic"))
            assert caught.value.kind == "retryable"


@pytest.mark.parametrize(
    ("status", "kind", "message", "expected"),
    [
        (400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum", "overflow"),
        (400, "invalid_request_error", "messages: roles must alternate", "other"),
        (401, "authentication_error", "invalid x-api-key", "auth"),
        (529, "overloaded_error", "Overloaded", "retryable"),
    ],
)
async def test_anthropic_errors_are_classified(
    status: int, kind: str, message: str, expected: str
) -> None:
    """An overflow is told by its text only; the rest by their status."""
    body = json.dumps({"type": "error", "error": {"type": kind, "message": message}})

    async with canned((status, body.encode())) as server:
        with pytest.raises(ModelError, match=message.partition(":")[0]) as caught:
            await events_of(models_for(server, "anthropic"))

    assert caught.value.kind == expected


# --- Google -----------------------------------------------------------------------------------


def candidate(*parts: dict[str, Any], finish: str | None = None) -> bytes:
    """One piece of an answer."""
    piece: dict[str, Any] = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
    if finish is not None:
        piece["finishReason"] = finish
    usage = {"promptTokenCount": 12, "candidatesTokenCount": 3, "totalTokenCount": 15}
    value = {"candidates": [piece], "usageMetadata": usage, "modelVersion": "m-1"}
    return f"data: {json.dumps(value)}\r\n\r\n".encode()


async def test_google_answers_and_calls_arrive() -> None:
    """Text and a call with an object of arguments arrive, with usage."""
    call = {"functionCall": {"name": "read", "args": {"path": "a"}}}
    whole = candidate({"text": "I "}) + candidate({"text": "look."}, call, finish="STOP")

    async with canned(whole) as server:
        events = await events_of(models_for(server, "google"))

    answer = answer_of(events)
    assert answer.text == "I look."
    assert answer.tool_calls[0].arguments == {"path": "a"}
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (12, 3)
    assert "streamgeneratecontent" in server.paths[0]


async def test_google_cut_and_refused_requests_are_classified() -> None:
    """A stream without a finish reason was cut; a used-up limit and a bad key have their kinds."""
    # C068
    busy = {"error": {"code": 429, "message": "slow down", "status": "RESOURCE_EXHAUSTED"}}
    denied = {"error": {"code": 403, "message": "no", "status": "PERMISSION_DENIED"}}
    replies = (
        candidate({"text": "half"}),
        (429, json.dumps(busy).encode()),
        (403, json.dumps(denied).encode()),
    )
    kinds = []

    async with canned(*replies) as server:
        for _ in replies:
            with pytest.raises(ModelError) as caught:
                await events_of(models_for(server, "google"))
            kinds.append(caught.value.kind)

    assert kinds == ["retryable", "retryable", "auth"]


# --- OpenAI chat, byte for byte ---------------------------------------------------------------


def chat_stream() -> tuple[bytes, int]:
    """A streamed answer, and how many of its bytes hold the provider's last word."""
    function = {"name": "read", "arguments": '{"path": "gr\u00fcn.txt"}'}
    call = {"index": 0, "id": "call_1", "type": "function", "function": function}
    choices = [
        {"index": 0, "delta": {"role": "assistant", "content": "I l\u00f6\u00f6k."}},
        {"index": 0, "delta": {"tool_calls": [call]}},
        {"index": 0, "delta": {}, "finish_reason": "tool_calls"},
    ]
    stream, word = b"", 0
    for choice in choices:
        chunk = {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m-1",
            "choices": [choice],
        }
        stream += b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"
        word = len(stream)
    return stream + b"data: [DONE]\n\n", word


async def test_a_chat_stream_cut_at_any_byte_is_never_an_answer() -> None:
    """Before the provider's last word every cut is retryable; after it the answer is whole."""
    # C064 C068
    stream, word = chat_stream()
    cuts = [*range(0, word - 1, 17), word - 3, word - 2]

    async with canned(*(stream[:cut] for cut in cuts), stream[:word], stream) as server:
        models = models_for(server, "openai-chat")
        for cut in cuts:
            with pytest.raises(ModelError) as caught:
                await events_of(models)
            assert caught.value.kind == "retryable", cut
        answers = [answer_of(await events_of(models)) for _ in range(2)]

    for answer in answers:
        assert answer.text == "I l\u00f6\u00f6k."
        assert answer.tool_calls[0].arguments == {"path": "gr\u00fcn.txt"}


# --- OpenAI responses -------------------------------------------------------------------------


def response(status: str, output: list[Any]) -> dict[str, Any]:
    """A response object."""
    usage = {
        "input_tokens": 5,
        "output_tokens": 6,
        "total_tokens": 11,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": status,
        "model": "m-1",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage if status == "completed" else None,
    }


def responses_events() -> list[dict[str, Any]]:
    """A text and a call, as they stream."""
    part = {"type": "output_text", "text": "", "annotations": []}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{**part, "text": "I look."}],
    }
    call = {
        "id": "fc_1",
        "type": "function_call",
        "call_id": "call_1",
        "name": "read",
        "arguments": '{"path": "a"}',
        "status": "completed",
    }
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    of_call = {"item_id": "fc_1", "output_index": 1}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response("in_progress", [])},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**message, "content": []},
        },
        {"type": "response.content_part.added", **at, "part": part},
        {"type": "response.output_text.delta", **at, "delta": "I look.", "logprobs": []},
        {"type": "response.output_text.done", **at, "text": "I look.", "logprobs": []},
        {"type": "response.content_part.done", **at, "part": message["content"][0]},
        {"type": "response.output_item.done", "output_index": 0, "item": message},
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {**call, "arguments": ""},
        },
        {"type": "response.function_call_arguments.delta", **of_call, "delta": '{"path": "a"}'},
        {
            "type": "response.function_call_arguments.done",
            **of_call,
            "arguments": '{"path": "a"}',
        },
        {"type": "response.output_item.done", "output_index": 1, "item": call},
        {"type": "response.completed", "response": response("completed", [message, call])},
    ]
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


async def test_openai_responses_answers_and_calls_go_there_and_back() -> None:
    """Text and a call arrive; in the next request the call and its result carry our id."""
    whole = named(*responses_events())

    async with canned(whole, whole) as server:
        models = models_for(server, "openai-responses")
        answer = answer_of(await events_of(models))
        outcome = ToolResultMessage(
            call=(7, 0), name="read", blocks=(TextBlock(text="yes"),), is_error=False, at_us=0
        )
        history = (HELLO, RequestMessage(message=answer, entry=7), RequestMessage(message=outcome))
        await events_of(models, *history)

    assert answer.text == "I look."
    assert answer.tool_calls[0].arguments == {"path": "a"}
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 6)
    sent = {item.get("type"): item for item in server.bodies[1]["input"]}
    assert sent["function_call"]["call_id"] == "c7_0"
    assert sent["function_call_output"]["call_id"] == "c7_0"
    assert sent["function_call_output"]["output"] == "yes"


async def test_openai_responses_without_their_end_are_retryable() -> None:
    """A stream that ends before `response.completed`, wherever, is no answer."""  # C068
    events = responses_events()
    replies = [named(*events[:end]) for end in (1, 4, 7, 9, 11)]

    async with canned(*replies) as server:
        for _ in replies:
            with pytest.raises(ModelError) as caught:
                await events_of(models_for(server, "openai-responses"))
            assert caught.value.kind == "retryable"


async def test_thinking_blocks_of_one_provider_are_no_business_of_another() -> None:
    """An answer made elsewhere goes out as plain text, without its thinking."""
    whole = named(STARTED, *THOUGHT, *SAID, *ENDED)

    async with canned(whole, named(*responses_events())) as server:
        answer = answer_of(await events_of(models_for(server, "anthropic")))
        history = (
            HELLO,
            RequestMessage(message=attrs.evolve(answer, model="q/other"), entry=7),
            HELLO,
        )
        await events_of(models_for(server, "openai-responses"), *history)

    assert isinstance(answer.blocks[0], ThinkingBlock)
    sent = json.dumps(server.bodies[1])
    assert "I look." in sent
    assert "c2lnbmVk" not in sent
    assert "hm" not in sent
