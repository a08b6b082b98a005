"""A strict OpenAI-compatible server on loopback, which answers from a script.

For tests that go over HTTP, and for tests that kill the runtime while its provider lives on. It
stores every request, refuses with 400 what a strict provider would (`agent/_strict`), and can do
what real servers do on bad days: stall, cut, delay, ask to wait, send odd bytes.

As a program it prints its port and serves until it is ended::

    python -m pidurable.testing._strict_server --script file.yaml --log file.jsonl --port 0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from pidurable.agent._script import (
    RequestView,
    Script,
    ScriptedError,
    Step,
    Wire,
    load_script,
    make_step,
)
from pidurable.agent._strict import StrictRequestError, check_chat_body
from pidurable.errors import NotJsonError
from pidurable.records._json import dumps, loads

__all__ = ["Exchange", "StrictServer", "strict_openai_server"]

HEAD_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 64 * 1024 * 1024
KEEPALIVE_SECONDS = 0.05

_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


@attrs.define(eq=False)
class Exchange:
    """One request that the server got, and what became of it."""

    path: str
    headers: Mapping[str, str]
    body: Any
    status: int = 0
    step: int | None = None
    problem: str | None = None
    """Why a strict provider would refuse it."""
    left: trio.Event = attrs.field(factory=trio.Event)
    """Set when the client closed the connection before the answer had ended."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    """Set when the answer has ended, in whatever way."""


class StrictServer:
    """A running server: its address, and every request it got."""

    def __init__(self, script: Script, *, api_key: str | None, log: str | None) -> None:
        self.requests: list[Exchange] = []
        self.port = 0
        self._script = script
        self._api_key = api_key
        self._log = log or script.log
        self._tries: dict[tuple[object, ...], int] = {}
        self._ids = 0
        self._more = trio.Condition()

    @property
    def base_url(self) -> str:
        """The address to give to a client."""
        return f"http://127.0.0.1:{self.port}/v1"

    def check(self) -> None:
        """Raise AssertionError if any request was not what a strict provider takes."""
        problems = [exchange.problem for exchange in self.requests if exchange.problem]
        if problems:
            raise AssertionError("; ".join(problems))

    async def wait_for_request(self, count: int = 1) -> Exchange:
        """Wait until the server has got so many requests, and return the last of them."""
        async with self._more:
            while len(self.requests) < count:
                await self._more.wait()
        return self.requests[count - 1]

    # --- one connection -----------------------------------------------------------------------

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer one request on a connection, and close it."""
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                received = await _receive(stream)
                if received is not None:
                    await self._answer(stream, *received)

    async def _answer(
        self,
        stream: trio.SocketStream,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
    ) -> None:
        exchange = Exchange(path=path, headers=headers, body=_read_json(body))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, stream, exchange, nursery.cancel_scope)
            try:
                await self._respond(stream, method, exchange)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                # The client was killed. It must not leave the nursery, as part of a group.
                exchange.left.set()
            finally:
                exchange.ended.set()
            nursery.cancel_scope.cancel()

    async def _respond(self, stream: trio.SocketStream, method: str, exchange: Exchange) -> None:
        if method == "GET" and exchange.path.endswith("/models"):
            await _send(stream, 200, dumps({"object": "list", "data": []}))
            return
        if method != "POST" or not exchange.path.endswith("/chat/completions"):
            await _send(stream, 404, _error_body("no such path", "not_found"))
            return
        failure, step, faulty = self._judge(exchange)
        self._store(exchange)
        async with self._more:
            self.requests.append(exchange)
            self._more.notify_all()
        if failure is not None:
            await _send(stream, exchange.status, failure[0], failure[1])
        elif step is not None:
            await self._play(stream, exchange, step, faulty)

    def _judge(
        self, exchange: Exchange
    ) -> tuple[tuple[str, dict[str, str]] | None, Step | None, bool]:
        """Decide how to answer: with a failure, or with a step (and whether its fault happens)."""
        if self._api_key is not None:
            given = exchange.headers.get("authorization", "")
            if given != f"Bearer {self._api_key}":
                exchange.status = 401
                body = _error_body(f"Incorrect API key provided: {given}", "invalid_api_key")
                return (body, {}), None, False
        try:
            check_chat_body(exchange.body)
        except StrictRequestError as error:
            exchange.status, exchange.problem = 400, str(error)
            return (_error_body(str(error), "invalid_request_error"), {}), None, False
        view = _view(exchange.body)
        window = self._script.context_window
        if window is not None and view.input_tokens > window:
            return self._fail(exchange, ScriptedError(kind="overflow", detail="too long"))
        number = exchange.step = self._script.choose(view)
        if number is None:
            detail = f"the script has no step for {view.answers} answers"
            return self._fail(exchange, ScriptedError(kind="other", detail=detail))
        step = self._script.steps[number]
        problem = None if step.expect is None else step.expect.problem(view)
        if problem is not None:
            exchange.problem = f"step {number}: {problem}"
            return self._fail(exchange, ScriptedError(kind="other", detail=exchange.problem))
        key = (number, view.answers, view.turn, view.user)
        tries = self._tries.get(key, 0)
        self._tries[key] = tries + 1
        faulty = step.is_fault(tries)
        if faulty and step.wire.status is not None:
            exchange.status = step.wire.status
            return (step.wire.body, dict(step.wire.headers)), None, False
        if faulty and step.error is not None:
            return self._fail(exchange, step.error, step.wire)
        exchange.status = 200
        return None, step, faulty

    def _fail(
        self, exchange: Exchange, error: ScriptedError, wire: Wire | None = None
    ) -> tuple[tuple[str, dict[str, str]], None, bool]:
        headers = {} if wire is None else dict(wire.headers)
        if error.retry_after is not None:
            headers.setdefault("Retry-After", f"{error.retry_after}")
        waits = error.retry_after is not None
        status, code = {
            "retryable": (429, "rate_limit_exceeded") if waits else (503, "server_error"),
            "overflow": (400, "context_length_exceeded"),
            "auth": (401, "invalid_api_key"),
            "other": (400, "invalid_request_error"),
        }[error.kind]
        exchange.status = status
        return (_error_body(error.detail, code), headers), None, False

    def _store(self, exchange: Exchange) -> None:
        if self._log is None:
            return
        line = {
            "path": exchange.path,
            "status": exchange.status,
            "step": exchange.step,
            "problem": exchange.problem,
            "body": exchange.body,
        }
        with Path(self._log).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    # --- the stream of an answer --------------------------------------------------------------

    async def _play(
        self, stream: trio.SocketStream, exchange: Exchange, step: Step, faulty: bool
    ) -> None:
        cut = step.cut if faulty else None
        stall = step.stall if faulty else None
        if stall is not None and stall.after < 0:
            await trio.sleep_forever()
        writer = _ChunkWriter(stream, step.wire.split_bytes)
        await writer.start()
        for raw in step.wire.raw:
            await writer.write(raw.encode("latin-1", "replace"))
        view = _view(exchange.body)
        deltas = [*self._deltas(step)]
        for sent, delta in enumerate(deltas):
            if await _interrupted(writer, sent, cut is not None and sent >= cut.after, stall):
                break
            await trio.sleep(step.delay)
            await writer.event(self._chunk(exchange, {"delta": delta, "finish_reason": None}))
        else:
            ended = cut is not None and len(deltas) >= cut.after
            if not await _interrupted(writer, len(deltas), ended, stall):
                await self._finish(writer, exchange, step, view)
                return
        # A clean cut ends the HTTP message properly, and only the last event is missing.
        if cut is not None and not cut.raises:
            await writer.end()

    async def _finish(
        self, writer: _ChunkWriter, exchange: Exchange, step: Step, view: RequestView
    ) -> None:
        reasons = {"length": "length", "refusal": "content_filter"}
        reason = reasons.get(step.stop or "", "tool_calls" if step.calls else "stop")
        await writer.event(self._chunk(exchange, {"delta": {}, "finish_reason": reason}))
        written = sum(len(piece) for piece in step.text_pieces) + len(step.thinking)
        usage = step.usage
        counted = {
            "prompt_tokens": view.input_tokens if usage is None else usage.input_tokens,
            "completion_tokens": written // 4 + 1 if usage is None else usage.output_tokens,
        }
        counted["total_tokens"] = counted["prompt_tokens"] + counted["completion_tokens"]
        await writer.event({**self._chunk(exchange, None), "usage": counted})
        await writer.write(b"data: [DONE]\n\n")
        await writer.end()

    def _chunk(self, exchange: Exchange, choice: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{len(self.requests)}",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": exchange.body["model"],
            "choices": [] if choice is None else [{"index": 0, **choice}],
        }

    def _deltas(self, step: Step) -> Iterator[dict[str, Any]]:
        for piece in step.split(step.thinking):
            yield {"role": "assistant", "reasoning_content": piece}
        for piece in step.text_pieces:
            yield {"role": "assistant", "content": piece}
        for index, call in enumerate(step.calls):
            self._ids += 1
            identity = step.wire.call_id or f"call_{self._ids}"
            function = {"name": call.name, "arguments": ""}
            first = {"index": index, "id": identity, "type": "function", "function": function}
            yield {"tool_calls": [first]}
            arguments = call.arguments
            text = arguments if isinstance(arguments, str) else dumps(arguments)
            for piece in step.split(text):
                yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


async def _interrupted(writer: _ChunkWriter, sent: int, cut: bool, stall: Any) -> bool:
    """Stall here if it is the place; tell whether the stream is cut here."""
    if stall is not None and sent >= stall.after:
        while stall.keepalive:
            await writer.write(b": keep-alive\n\n")
            await trio.sleep(KEEPALIVE_SECONDS)
        await trio.sleep_forever()
    return cut


@attrs.define(eq=False)
class _ChunkWriter:
    """Writes an event stream as a chunked HTTP message."""

    _stream: trio.SocketStream
    _split_bytes: int | None

    async def start(self) -> None:
        await self._stream.send_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        )

    async def event(self, value: dict[str, Any]) -> None:
        # Plain `json`, and not escaped: scripts may hold what strict JSON does not allow, and
        # characters of several bytes shall be seen on the wire. A lone surrogate has no bytes.
        text = json.dumps(value, ensure_ascii=False)
        try:
            data = text.encode()
        except UnicodeEncodeError:
            data = json.dumps(value).encode()
        await self.write(b"data: " + data + b"\n\n")

    async def write(self, data: bytes) -> None:
        size = self._split_bytes or len(data)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            await self._stream.send_all(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

    async def end(self) -> None:
        await self._stream.send_all(b"0\r\n\r\n")


async def _watch(
    stream: trio.SocketStream, exchange: Exchange, answering: trio.CancelScope
) -> None:
    """See the client leave while it is being answered, and stop answering then."""
    try:
        while await stream.receive_some(4096):
            pass
    except trio.BrokenResourceError:
        pass  # a reset says the same as an end
    exchange.left.set()
    answering.cancel()


async def _receive(
    stream: trio.SocketStream,
) -> tuple[str, str, dict[str, str], bytes] | None:
    data = bytearray()
    while b"\r\n\r\n" not in data:
        more = await stream.receive_some(65536)
        if not more:
            return None
        data += more
        if len(data) > HEAD_BYTES_MAX + BODY_BYTES_MAX:
            return None
    head, _, rest = bytes(data).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or len(head) > HEAD_BYTES_MAX:
        return None
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    length = int(headers.get("content-length", "0") or "0")
    if not 0 <= length <= BODY_BYTES_MAX:
        return None
    body = bytearray(rest)
    while len(body) < length:
        more = await stream.receive_some(65536)
        if not more:
            return None
        body += more
    return words[0], words[1], headers, bytes(body)


async def _send(
    stream: trio.SocketStream, status: int, body: str, headers: Mapping[str, str] | None = None
) -> None:
    data = body.encode()
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}"]
    given = {"content-type": "application/json", **(headers or {})}
    lines += [f"{name}: {value}" for name, value in given.items()]
    lines += [f"content-length: {len(data)}", "connection: close", "", ""]
    await stream.send_all("\r\n".join(lines).encode("latin-1") + data)


def _read_json(body: bytes) -> Any:
    """Return a body as JSON; what is no strict JSON stays text, which the checks refuse."""
    try:
        return loads(body) if body else None
    except NotJsonError as error:
        return f"not strict JSON: {error}"


def _error_body(message: str, code: str) -> str:
    return json.dumps({"error": {"message": message, "type": code, "code": code, "param": None}})


def _view(body: dict[str, Any]) -> RequestView:
    """Reduce a chat body (one that passed the checks) to what a script may look at."""
    answers = turn = 0
    user = system = ""
    results: list[str] = []
    texts: list[str] = []
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        texts.append(content)
        role = message["role"]
        if role == "assistant":
            answers, turn, results = answers + 1, turn + 1, []
            calls = message.get("tool_calls") or []
            texts.extend(str(call["function"].get("arguments")) for call in calls)
        elif role == "tool":
            results.append(content)
        elif role == "user":
            user, turn = content, 0
        else:
            system += content
    return RequestView(
        answers=answers,
        turn=turn,
        user=user,
        results=tuple(results),
        system=system,
        tools=tuple(tool["function"]["name"] for tool in body.get("tools") or []),
        text="\n".join(texts),
    )


@asynccontextmanager
async def strict_openai_server(
    script: Script | Sequence[Step | str | Mapping[str, Any]] | str | Path,
    *,
    port: int = 0,
    api_key: str | None = None,
    log: str | Path | None = None,
) -> AsyncIterator[StrictServer]:
    """Serve a script on loopback while the block is open.

    Args:
        script: Steps, a script, or the path of a YAML file.
        port: 0 takes a free one; see `StrictServer.port`.
        api_key: The key that requests must carry; None takes any.
        log: A file to append every request to, as JSON lines.
    """
    if isinstance(script, str | Path):
        script = load_script(script)
    elif not isinstance(script, Script):
        steps = tuple(make_step(step, f"steps[{at}]") for at, step in enumerate(script))
        script = Script(steps=steps)
    server = StrictServer(script, api_key=api_key, log=None if log is None else str(log))
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
        server.port = listeners[0].socket.getsockname()[1]
        await nursery.start(trio.serve_listeners, server.serve, listeners)
        try:
            yield server
        finally:
            nursery.cancel_scope.cancel()


async def _main(arguments: argparse.Namespace) -> None:
    async with strict_openai_server(
        Path(arguments.script),
        port=arguments.port,
        api_key=arguments.api_key,
        log=arguments.log,
    ) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        await trio.sleep_forever()


def main() -> None:
    """Run the server as a program."""
    parser = argparse.ArgumentParser(description="A strict OpenAI-compatible server on loopback.")
    parser.add_argument("--script", required=True, help="YAML file with the steps")
    parser.add_argument("--log", help="file to append each request to, as JSON lines")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one, and prints it")
    parser.add_argument("--api-key", help="the key that requests must carry")
    trio.run(_main, parser.parse_args())


if __name__ == "__main__":
    main()
