"""Providers over HTTP, against a strict server on loopback."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import struct
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import trio

from pidurable.agent._default_models import default_models
from pidurable.agent._models import (
    Done,
    ModelRequest,
    Models,
    RequestMessage,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStart,
)
from pidurable.agent._provider_ai import AiProvider
from pidurable.agent._script import (
    Cut,
    Expect,
    Script,
    ScriptedCall,
    ScriptedError,
    Stall,
    Step,
    Wire,
)
from pidurable.errors import InvalidArgumentError, MissingExtraError, ModelError
from pidurable.records._messages import (
    AssistantMessage,
    ImageBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolDeclaration,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from pidurable.testing._strict_server import StrictServer, strict_openai_server

if importlib.util.find_spec("pydantic_ai") is None:
    pytest.skip("the llm extra is not installed", allow_module_level=True)

KEY = "sk-canary-0123456789abcdef"
READ = ToolDeclaration(
    name="read",
    description="Read a file.",
    schema={
        "type": "object",
        "properties": {"path": {"type": "string"}, "limit": {"type": "integer", "default": 5}},
        "required": ["path"],
    },
)


def user(text: str = "hello", entry: int = 1) -> RequestMessage:
    """A message of a user."""
    return RequestMessage(message=UserMessage(blocks=(TextBlock(text=text),), at_us=0), entry=entry)


def result(entry: int, index: int, *texts: str, error: bool = False) -> RequestMessage:
    """The result of a call to `read`."""
    blocks = tuple(TextBlock(text=text) for text in texts)
    return RequestMessage(
        message=ToolResultMessage(
            call=(entry, index), name="read", blocks=blocks, is_error=error, at_us=0
        )
    )


def request(*messages: RequestMessage, **fields: Any) -> ModelRequest:
    """A request to the model of the server."""
    return ModelRequest(model="local/m", messages=messages or (user(),), **fields)


def models_for(server: StrictServer, *, key: str | None = KEY, silence: float = 30.0) -> Models:
    """Models of which the server is the only one."""
    provider = AiProvider("local", base_url=server.base_url, api_key=key)
    return Models([provider], stream_silence_seconds=silence)


async def events_of(models: Models, asked: ModelRequest) -> list[StreamEvent]:
    """All events of a request."""
    async with models.stream(asked) as events:
        return [event async for event in events]


async def ask(models: Models, asked: ModelRequest) -> AssistantMessage:
    """The answer to a request."""
    events = await events_of(models, asked)
    assert isinstance(events[-1], Done)
    return events[-1].message


async def refused(step: Step | dict[str, Any], *, silence: float = 30.0) -> ModelError:
    """The error of a request that is answered by this step."""
    async with strict_openai_server([step]) as server:
        with pytest.raises(ModelError) as caught:
            await ask(models_for(server, silence=silence), request())
        assert len(server.requests) == 1, "a client retried by itself"
    return caught.value


# --- answers ----------------------------------------------------------------------------------


async def test_an_answer_streams_as_it_is_written() -> None:
    """Thinking and text arrive as deltas, and the answer holds them with its usage."""
    usage = Usage(input_tokens=11, output_tokens=7)
    step = Step(thinking="hm", text=("Hel", "lo"), usage=usage)

    async with strict_openai_server([step], api_key=KEY) as server:
        events = await events_of(models_for(server), request(system="Be brief."))
        server.check()

    assert events[:-1] == [ThinkingDelta("hm"), TextDelta("Hel"), TextDelta("lo")]
    done = events[-1]
    assert isinstance(done, Done)
    assert (done.message.text, done.message.stop_reason) == ("Hello", "stop")
    assert (done.message.usage.input_tokens, done.message.usage.output_tokens) == (11, 7)
    body = server.requests[0].body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["messages"][1] == {"role": "user", "content": "hello"}


async def test_settings_reach_the_server() -> None:
    """Output limit, options and tools are sent as they were asked for."""
    async with strict_openai_server(["ok"]) as server:
        asked = request(tools=(READ,), output_tokens_max=99, options={"temperature": 0.5})
        await ask(models_for(server), asked)

    body = server.requests[0].body
    assert 99 in (body.get("max_tokens"), body.get("max_completion_tokens"))
    assert body["temperature"] == 0.5
    function = body["tools"][0]["function"]
    assert (function["name"], function["description"]) == ("read", "Read a file.")
    assert function["parameters"] == READ.schema


async def test_a_tool_call_goes_there_and_back_under_our_ids() -> None:
    """Calls arrive in pieces; with their results they go back under our ids, in order."""  # C065
    calls = (
        ScriptedCall(name="read", arguments={"path": "a"}),
        ScriptedCall(name="read", arguments={"path": "b"}),
    )
    script = [
        Step(text="I look.", calls=calls, piece_chars=5, wire=Wire(call_id="x:0")),
        Step(text="done", expect=Expect(results=("one", "two"))),
    ]

    async with strict_openai_server(script) as server:
        models = models_for(server)
        events = await events_of(models, request(tools=(READ,)))
        done = events[-1]
        assert isinstance(done, Done)
        history = (
            user(),
            RequestMessage(message=done.message, entry=12),
            result(12, 0, "one"),
            result(12, 1, "two", "more"),
        )
        answer = await ask(models, request(*history, tools=(READ,)))
        server.check()

    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert starts == [ToolCallStart(0, "read"), ToolCallStart(1, "read")]
    second = "".join(
        event.arguments_text
        for event in events
        if isinstance(event, ToolCallDelta) and event.index == 1
    )
    assert json.loads(second) == {"path": "b"}
    assert [call.arguments for call in done.message.tool_calls] == [{"path": "a"}, {"path": "b"}]
    assert done.message.stop_reason == "tool_use"
    assert answer.text == "done"
    sent = server.requests[1].body["messages"]
    assert [call["id"] for call in sent[1]["tool_calls"]] == ["c12_0", "c12_1"]
    assert [message.get("tool_call_id") for message in sent[2:]] == ["c12_0", "c12_1"]


async def test_an_id_that_a_provider_repeats_is_unique_when_it_is_sent() -> None:
    """Two answers whose calls came under one id go back under two, each with its own result."""
    # C065
    called = ScriptedCall(name="read", arguments={"path": "a"})
    step = Step(calls=(called,), wire=Wire(call_id="functions.read:0"))

    async with strict_openai_server([step, step, "done"]) as server:
        models = models_for(server)
        first = await ask(models, request(tools=(READ,)))
        history = [user(), RequestMessage(message=first, entry=12), result(12, 0, "one")]
        second = await ask(models, request(*history, tools=(READ,)))
        history += [RequestMessage(message=second, entry=15), result(15, 0, "two")]
        await ask(models, request(*history, tools=(READ,)))
        server.check()

    sent = server.requests[2].body["messages"]
    made = [call["id"] for message in sent for call in message.get("tool_calls", ())]
    answered = {m["tool_call_id"]: m["content"] for m in sent if m["role"] == "tool"}
    assert made == ["c12_0", "c15_0"]
    assert answered == {"c12_0": "one", "c15_0": "two"}


@pytest.mark.parametrize(
    ("written", "parsed"),
    [("", {}), ('{"path": "a', '{"path": "a'), ("[1]", "[1]"), ('{"a":1,"a":2}', None)],
)
async def test_malformed_arguments_stay_text_and_go_back_as_an_object(
    written: str, parsed: Any
) -> None:
    """Arguments are never repaired, and a history that holds them is still accepted."""  # C064
    step = Step(text="x", calls=(ScriptedCall(name="read", arguments=written),), stop="length")

    async with strict_openai_server([step, "sorry"]) as server:
        models = models_for(server)
        answer = await ask(models, request(tools=(READ,)))
        entry = RequestMessage(message=answer, entry=2)
        again = await ask(models, request(user(), entry, result(2, 0, "no", error=True)))
        server.check()

    assert answer.tool_calls[0].arguments == (written if parsed is None else parsed)
    assert answer.stop_reason == "length"
    assert again.text == "sorry"


async def test_characters_split_over_chunks_are_joined() -> None:
    """A character whose bytes arrive one by one is whole."""  # C082
    text = "grün \u4f60\u597d \U0001f600"

    async with strict_openai_server([Step(text=text, wire=Wire(split_bytes=1))]) as server:
        answer = await ask(models_for(server), request())

    assert answer.text == text


async def test_half_characters_in_an_answer_are_marked() -> None:
    """A lone surrogate, and NUL, in an answer become marks that a store takes."""  # C081 C082
    step = Step(text=("a\ud83d", "\ude00 b\ud800 c\0"))

    async with strict_openai_server([step]) as server:
        answer = await ask(models_for(server), request())

    assert answer.text.encode()
    assert answer.text.endswith("c\u2400")
    assert "\ud800" not in answer.text


async def test_odd_lines_in_the_stream_are_no_events() -> None:
    """Comments, unknown events and empty choices between the pieces change nothing."""
    raw = (": hello\n\n", "event: ping\ndata: {}\n\n", 'data: {"choices": []}\n\n')

    async with strict_openai_server([Step(text="ok", wire=Wire(raw=raw))]) as server:
        answer = await ask(models_for(server), request())

    assert answer.text == "ok"


async def test_blank_parts_images_and_foreign_thinking_go_out_safely() -> None:
    """Blank text is left out or marked, a missing image is a note, foreign thinking stays here."""
    # C070 C071
    foreign = AssistantMessage(
        blocks=(
            ThinkingBlock(text="theirs", opaque={"provider": "x", "model": "x/y", "part": {}}),
            TextBlock(text=""),
            ToolCallBlock(name="read", arguments={"path": "a"}),
        ),
        status="complete",
        stop_reason="tool_use",
        model="x/y",
        usage=Usage(),
        at_us=0,
    )
    picture = UserMessage(
        blocks=(
            ImageBlock(blob="aa", media_type="image/png"),
            ImageBlock(blob="bb", media_type="image/png"),
            TextBlock(text="look"),
        ),
        at_us=0,
    )
    change = SystemMessage(sections={"mode": "Plan only."}, at_us=0)

    async with strict_openai_server(["ok"]) as server:
        server_models = models_for(server)
        asked = request(
            user(),
            RequestMessage(message=foreign, entry=2),
            result(2, 0, "\r\n"),
            RequestMessage(message=change),
            RequestMessage(message=picture),
            images={"bb": b"\x89PNG"},
        )
        with pytest.raises(ModelError, match="no step"):
            await ask(server_models, asked)
        server.check()

    messages = server.requests[0].body["messages"]
    assert "theirs" not in json.dumps(messages)
    assert messages[2]["content"] == "(no output)"
    sent = json.dumps(messages[3:])
    assert "Plan only." in sent
    assert "not available" in sent
    assert "data:image/png;base64," in sent


async def test_thinking_goes_back_to_the_model_that_made_it() -> None:
    """What a server thought is sent back to the same provider and model, and to no other."""
    async with strict_openai_server([Step(thinking="deep thought", text="ok"), "b"]) as server:
        models = models_for(server)
        answer = await ask(models, request())
        history = (user(), RequestMessage(message=answer, entry=2), user("more", 3))
        await ask(models, request(*history))
        other = ModelRequest(model="local/other", messages=history)
        await ask(models, other)

    thinking = answer.blocks[0]
    assert isinstance(thinking, ThinkingBlock)
    assert thinking.opaque["model"] == "local/m"
    assert "deep thought" in json.dumps(server.requests[1].body)
    assert "deep thought" not in json.dumps(server.requests[2].body)


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "after"),
    [
        (ScriptedError(kind="auth", detail="bad key"), "auth", None),
        (ScriptedError(kind="retryable", detail="busy"), "retryable", None),
        (ScriptedError(kind="retryable", retry_after=7), "retryable", 7.0),
        (ScriptedError(kind="retryable", retry_after=1.5), "retryable", 1.5),
        (ScriptedError(kind="retryable", retry_after=100000), "retryable", 100000.0),
        (ScriptedError(kind="retryable", retry_after="soon"), "retryable", None),
        (ScriptedError(kind="overflow", detail="too long"), "overflow", None),
        (ScriptedError(kind="other", detail="bad field"), "other", None),
    ],
)
async def test_http_errors_are_classified(
    error: ScriptedError, kind: str, after: float | None
) -> None:
    """Each refusal of a server has its kind, and Retry-After is read."""  # C069
    raised = await refused(Step(error=error))

    assert (raised.kind, raised.retry_after) == (kind, after)
    assert error.detail in str(raised)


async def test_retry_after_may_be_a_date() -> None:
    """A moment in HTTP form is turned into the seconds until then."""  # C069
    moment = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)

    raised = await refused(Step(error=ScriptedError(retry_after=moment)))

    assert raised.retry_after is not None
    assert 30 < raised.retry_after <= 100


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        # llama.cpp's own server says an overflow in its own way.
        (
            400,
            '{"error":{"code":400,"message":"the request exceeds the available context size",'
            '"type":"exceed_context_size_error","n_prompt_tokens":9000,"n_ctx":4096}}',
            "overflow",
        ),
        (400, '{"error":{"message":"This model\'s maximum context length is 8192"}}', "overflow"),
        (403, '{"error":{"message":"not for you"}}', "auth"),
        (404, '{"error":{"message":"no such model"}}', "other"),
        (413, "too large", "other"),
        (429, '{"error":{"message":"pay","code":"insufficient_quota"}}', "other"),
        (500, "<html>oops</html>", "retryable"),
        (502, "", "retryable"),
        (529, "{}", "retryable"),
    ],
)
async def test_statuses_and_bodies_of_real_servers_are_classified(
    status: int, body: str, kind: str
) -> None:
    """The status decides, and the body where servers differ; odd bodies do no harm."""
    raised = await refused(Step(wire=Wire(status=status, body=body)))

    assert raised.kind == kind
    assert f"HTTP {status}" in str(raised)


@pytest.mark.parametrize("raises", [False, True], ids=["clean", "broken"])
@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_cut_stream_is_retryable(after: int, raises: bool) -> None:
    """A stream without its last event is no answer, whether the connection broke or not."""  # C068
    step = Step(text=("half ", "a sentence"), cut=Cut(after=after, raises=raises))

    assert (await refused(step)).kind == "retryable"


async def test_cut_arguments_are_no_call() -> None:
    """A stream that breaks off within arguments runs nothing."""  # C064 C068
    call = ScriptedCall(name="read", arguments={"path": "abcdef"})

    raised = await refused(Step(calls=(call,), piece_chars=4, cut=Cut(after=2)))

    assert raised.kind == "retryable"


@pytest.mark.parametrize(
    "raw",
    [
        'data: {"error": {"message": "overloaded", "code": "server_error"}}\n\n',
        "data: {not json\n\n",
        'data: {"choices": [{"index": 0, "delta": {"content": "\xff\xfe"}}]}\n\n',
    ],
    ids=["error event", "no json", "bad utf-8"],
)
async def test_damage_within_the_stream_is_never_an_unclassified_error(raw: str) -> None:
    """An error event, and bytes that are no events, give a retryable error or a clean answer."""
    async with strict_openai_server([Step(text="ok", wire=Wire(raw=(raw,)))]) as server:
        try:
            outcome = (await ask(models_for(server), request())).text[-2:]
        except ModelError as error:
            outcome = error.kind

    assert outcome in ("ok", "retryable")


async def test_an_empty_answer_is_retryable() -> None:
    """A stream that ends properly and says nothing is no answer."""  # C066
    raised = await refused(Step(text=""))

    assert raised.kind == "retryable"
    assert "empty answer" in str(raised)


async def test_nobody_listening_is_retryable() -> None:
    """A connection that is refused may work later."""
    async with strict_openai_server(["x"]) as server:
        models = models_for(server)
    with pytest.raises(ModelError) as caught:
        await ask(models, request())

    assert caught.value.kind == "retryable"


@pytest.mark.parametrize(
    "stall",
    [Stall(after=-1), Stall(after=0), Stall(after=1), Stall(after=1, keepalive=True)],
    ids=["before headers", "after headers", "in text", "comments only"],
)
async def test_silence_is_given_up_and_the_connection_closed(stall: Stall) -> None:
    """A silent server is left, also one that sends comments, and it sees that at once."""  # C067
    async with strict_openai_server([Step(text=("a", "b"), stall=stall)]) as server:
        models = models_for(server)
        await ask_once_to_import(models)
        impatient = models_for(server, silence=0.1)
        with pytest.raises(ModelError, match=r"sent nothing for 0\.1 s") as caught:
            await ask(impatient, request(user("second")))
        await server.requests[-1].left.wait()

    assert caught.value.kind == "retryable"


async def ask_once_to_import(models: Models) -> None:
    """Have the provider library loaded, which must not count as silence of the server."""
    provider = AiProvider("local", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ModelError):
        await ask(Models([provider]), request())


async def test_cancelling_closes_the_connection_at_once() -> None:
    """The server sees a cancelled request leave, and the next one works."""
    stalled = Step(text=("a", "b"), stall=Stall(after=1))

    async with strict_openai_server([stalled]) as server:
        models = models_for(server)
        with trio.CancelScope() as scope:
            async with models.stream(request()) as events:
                async for _ in events:
                    scope.cancel()
        assert scope.cancelled_caught
        await server.requests[0].left.wait()
        answer = await ask(models, request())

    assert answer.text == "ab"


async def test_cancelling_before_the_headers_closes_the_connection() -> None:
    """A request that has no answer yet is left at once too."""
    async with strict_openai_server([Step(text="x", stall=Stall(after=-1))]) as server:
        models = models_for(server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, models, request())
            exchange = await server.wait_for_request()
            nursery.cancel_scope.cancel()
        await exchange.left.wait()

    assert not exchange.status or exchange.status == 200


@pytest.mark.slow
async def test_clients_that_are_killed_in_mid_stream_do_not_end_the_server(slow_run: bool) -> None:
    """A connection that is reset while pieces are written ends that answer, and no other."""
    many = Step(text=tuple("word " for _ in range(3_000)))
    body = json.dumps(
        {"model": "m", "stream": True, "messages": [{"role": "user", "content": "go"}]}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"

    async with strict_openai_server([many]) as server:
        for _ in range(20 if slow_run else 4):
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            await stream.send_all(head % len(body) + body)
            await stream.receive_some(1000)
            # Without lingering a close is a reset, as by a process that was killed.
            linger = struct.pack("ii", 1, 0)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            await stream.aclose()
        for exchange in server.requests:
            await exchange.left.wait()
        answer = await ask(models_for(server), request())

    assert answer.text.startswith("word word")


# --- secrets, environment, the server itself --------------------------------------------------


async def test_a_key_is_in_no_error_and_no_repr(caplog: pytest.LogCaptureFixture) -> None:
    """A server that repeats the key in its refusal does not bring it into our errors."""
    async with strict_openai_server(["x"], api_key="other") as server:
        provider = AiProvider("local", base_url=server.base_url, api_key=KEY)
        with pytest.raises(ModelError) as caught:
            await ask(Models([provider]), request())

    error: BaseException | None = caught.value
    assert isinstance(error, ModelError)
    assert error.kind == "auth"
    assert KEY not in f"{error} {error!r} {provider!r} {caplog.text}"
    assert "***" in str(error)


async def test_a_provider_without_a_key_says_which_to_set() -> None:
    """A request to a vendor without its key fails before it is sent, naming the variable."""
    models = default_models({})
    for name, variable in [
        ("openai/gpt-5", "OPENAI_API_KEY"),
        ("anthropic/claude-x", "ANTHROPIC_API_KEY"),
        ("google/gemini-x", "GOOGLE_API_KEY"),
    ]:
        asked = ModelRequest(model=name, messages=(user(),))
        with pytest.raises(ModelError, match=f"set {variable}") as caught:
            await ask(models, asked)
        assert caught.value.kind == "auth"


async def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the provider library nothing is sent, and the error says what to install."""
    monkeypatch.setitem(sys.modules, "pydantic_ai.models.openai", None)
    provider = AiProvider("local", base_url="http://127.0.0.1:9/v1", api_key=KEY)

    with pytest.raises(MissingExtraError, match=r"pidurable\[llm\]"):
        await ask(Models([provider]), request())


async def test_the_environment_names_a_compatible_server() -> None:
    """With OPENAI_BASE_URL, `openai` is that server, with or without a key."""
    async with strict_openai_server(["hi"]) as server:
        models = default_models({"OPENAI_BASE_URL": server.base_url})
        answer = await ask(models, ModelRequest(model="openai/any/name", messages=(user(),)))

    assert answer.text == "hi"
    assert server.requests[0].body["model"] == "any/name"


@pytest.mark.refuses
async def test_the_server_refuses_what_a_strict_provider_refuses() -> None:
    """A body with a call without its result gets 400 and is remembered."""  # C001
    body = {
        "model": "m",
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "r", "arguments": "{}"}}],
            },
        ],
    }
    async with strict_openai_server(["x"]) as server:
        text = json.dumps(body)
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            head = f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(text)}\r\n\r\n"
            await stream.send_all(head.encode() + text.encode())
            reply = b""
            async for piece in stream:
                reply += piece

    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b"has no result" in reply
    with pytest.raises(AssertionError, match="has no result"):
        server.check()


async def test_the_server_overflows_beyond_its_window_and_logs(tmp_path: Path) -> None:
    """A script with a context window refuses long requests, and every request is a line."""
    script = Script(steps=(Step(text="ok"),), context_window=100)
    log = tmp_path / "log.jsonl"

    async with strict_openai_server(script, log=log) as server:
        with pytest.raises(ModelError) as caught:
            await ask(models_for(server), request(user("x" * 1000)))
        await ask(models_for(server), request())

    assert caught.value.kind == "overflow"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["status"], line["step"]) for line in lines] == [(400, None), (200, 0)]


async def test_the_servers_expectations_are_remembered() -> None:
    """A request that is not what a step expects gets 400, and the check of the server fails."""
    async with strict_openai_server([Step(text="ok", expect=Expect(user="bye"))]) as server:
        with pytest.raises(ModelError, match="expected 'bye'"):
            await ask(models_for(server), request())

    with pytest.raises(AssertionError, match="expected 'bye'"):
        server.check()


async def test_options_must_be_an_object() -> None:
    """Options of another shape are refused before anything is sent."""
    async with strict_openai_server(["x"]) as server:
        with pytest.raises(ModelError, match="must be an object"):
            await ask(models_for(server), request(options=[1]))

    assert server.requests == []


def test_a_repr_shows_no_user_part_of_an_address() -> None:
    """An address with a password in it is shown without."""
    provider = AiProvider("p", base_url="https://me:secret@host/v1")

    assert "secret" not in repr(provider)
    assert "host/v1" in repr(provider)


def test_an_unknown_kind_is_refused() -> None:
    """A kind that does not exist is refused with those that do."""
    with pytest.raises(InvalidArgumentError, match="openai-chat"):
        AiProvider("p", kind="smtp")  # type: ignore[arg-type]


@pytest.mark.slow
async def test_the_server_runs_as_a_program(tmp_path: Path) -> None:
    """Started as a program it prints its port, serves its script, and logs each request."""
    (tmp_path / "script.yaml").write_text("- text: from a file\n")
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "pidurable.testing._strict_server"]
    command += ["--script", str(tmp_path / "script.yaml"), "--log", str(log)]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = int(await process.stdout.receive_some(100))
        provider = AiProvider("local", base_url=f"http://127.0.0.1:{port}/v1")
        answer = await ask(Models([provider]), request())
    finally:
        process.send_signal(signal.SIGKILL)
        with trio.CancelScope(shield=True):
            await process.wait()
        await process.stdout.aclose()

    assert answer.text == "from a file"
    assert json.loads(log.read_text())["step"] == 0
