"""Providers over HTTP, through the provider layer of `pydantic-ai` (only its `direct` part).

This is the only module that names that library and the clients below it; they are imported when
the first request is made, because that takes seconds. Our records are the truth and are converted
here, in both directions:

* tool calls go out under our own ids (`call_id`), whatever the provider called them;
* what a provider needs back unchanged is kept as `opaque` beside the block, and goes back only to
  the provider and model that made it; thinking goes back to nobody else at all;
* the clients' own retries are off: an attempt that nobody stored must not exist;
* a connection belongs to one request, so that leaving the request closes it at once (answers take
  longer than servers keep an idle connection, so a pool would save little).

A key is never part of a message, an error or a repr.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
)
from typing import TYPE_CHECKING, Any, Literal, final

import attrs
import trio

from pidurable.agent._models import (
    Done,
    ModelRequest,
    RequestMessage,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStart,
    call_id,
    parse_arguments,
    render_system_message,
    sendable_arguments,
)
from pidurable.errors import InvalidArgumentError, MissingExtraError, ModelError, NotJsonError, show
from pidurable.records._json import check_json, dumps
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    ImageBlock,
    JsonValue,
    StopReason,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)

if TYPE_CHECKING:
    import pydantic_ai.messages as theirs
    from pydantic_ai.models import Model as TheirModel, ModelRequestParameters

__all__ = ["AiProvider", "Kind"]

Kind = Literal["openai-chat", "openai-responses", "anthropic", "google"]

_KINDS: dict[Kind, str] = {
    # The environment variable that people know the key by; for messages only.
    "openai-chat": "OPENAI_API_KEY",
    "openai-responses": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "google": "GOOGLE_API_KEY",
}

NO_OUTPUT = "(no output)"


@final
class AiProvider:
    """One HTTP interface that serves models: OpenAI, Anthropic, Google, or a compatible server.

    Nothing is imported or opened before the first request.

    Args:
        name: What stands before the slash of its models' names.
        kind: Which interface it speaks.
        base_url: Where it is; None is the vendor's own address.
        api_key: The key. With a `base_url`, None is right for servers that want none.
    """

    def __init__(
        self,
        name: str,
        *,
        kind: Kind = "openai-chat",
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if kind not in _KINDS:
            raise InvalidArgumentError("kind", f"must be one of {', '.join(_KINDS)}", show(kind))
        self._name = name
        self._kind: Kind = kind
        self._base_url = base_url
        self._api_key = api_key

    def __repr__(self) -> str:
        where = "" if self._base_url is None else f", base_url={_without_secrets(self._base_url)!r}"
        return f"AiProvider({self._name!r}, kind={self._kind!r}{where})"

    @property
    def name(self) -> str:
        """What stands before the slash of a model's name."""
        return self._name

    def stream(
        self, request: ModelRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Send a request once, and open its answer.

        Raises:
            ModelError: The request failed, now or while its events are read.
            MissingExtraError: The provider library is not installed; nothing was sent.
        """
        return self._stream(request)

    @asynccontextmanager
    async def _stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        if self._api_key is None and self._base_url is None:
            variable = _KINDS[self._kind]
            raise ModelError("auth", f"{request.model} needs a key: set {variable}")
        if not _loaded(self._kind):
            # It takes seconds, in which the other work of this process must go on.
            await trio.to_thread.run_sync(_load, self._kind)
        from pydantic_ai import direct

        async with AsyncExitStack() as stack:
            try:
                client = await stack.enter_async_context(_http_client())
                model = self._model(request.model.partition("/")[2], client)
                history = _history(request, self._name, model.system)
                stream = await stack.enter_async_context(
                    direct.model_request_stream(
                        model,
                        history,
                        model_settings=_settings(request, self._kind),
                        model_request_parameters=_parameters(request),
                    )
                )
            except Exception as error:
                # Without the chain: requests, with their headers, hang below these errors.
                raise self._error(error, request.model) from None
            events = self._events(stream, request)
            yield await stack.enter_async_context(aclosing(events))

    async def _events(
        self, stream: Any, request: ModelRequest
    ) -> AsyncGenerator[StreamEvent, None]:
        calls: dict[int, int] = {}
        try:
            async for event in stream:
                for ours in _deltas(event, calls):
                    yield ours
            answer = _answer(stream.get(), self._name, request.model)
        except Exception as error:
            raise self._error(error, request.model) from None
        yield Done(answer)

    def _error(self, error: Exception, model: str) -> ModelError:
        if isinstance(error, ModelError):
            return error
        kind, detail, retry_after = _classify(error)
        detail = f"{model}: {detail}"
        if self._api_key:
            detail = detail.replace(self._api_key, "***")
        return ModelError(kind, _without_secrets(detail)[:1000], retry_after)

    def _model(self, model_id: str, client: Any) -> TheirModel:
        if self._kind == "anthropic":
            return self._anthropic(model_id, client)
        if self._kind == "google":
            return self._google(model_id, client)
        return self._openai(model_id, client)

    def _openai(self, model_id: str, client: Any) -> TheirModel:
        import openai
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider
        from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

        sdk = openai.AsyncOpenAI(
            # The client wants a key even where the server wants none.
            api_key=self._api_key or "none",
            # Given, so that the environment decides nothing here.
            base_url=self._base_url or "https://api.openai.com/v1",
            max_retries=0,
            http_client=client,
        )
        provider: Any
        if self._base_url is None:
            provider = OpenAIProvider(openai_client=sdk)
        else:
            provider = OpenAICompatibleProvider(self._name, openai_client=sdk)
        if self._kind == "openai-responses":
            return OpenAIResponsesModel(model_id, provider=provider)
        return OpenAIChatModel(model_id, provider=provider)

    def _anthropic(self, model_id: str, client: Any) -> TheirModel:
        import anthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        sdk = anthropic.AsyncAnthropic(
            api_key=self._api_key or "none",
            base_url=self._base_url or "https://api.anthropic.com",
            max_retries=0,
            http_client=client,
        )
        return AnthropicModel(model_id, provider=AnthropicProvider(anthropic_client=sdk))

    def _google(self, model_id: str, client: Any) -> TheirModel:
        from pydantic_ai.models.google import GoogleModel
        from pydantic_ai.providers.google import GoogleProvider

        provider = GoogleProvider(
            api_key=self._api_key or "none", base_url=self._base_url, http_client=client
        )
        return GoogleModel(model_id, provider=provider)


_MODULES: dict[Kind, str] = {
    "openai-chat": "pydantic_ai.models.openai",
    "openai-responses": "pydantic_ai.models.openai",
    "anthropic": "pydantic_ai.models.anthropic",
    "google": "pydantic_ai.models.google",
}


def _loaded(kind: Kind) -> bool:
    return all(sys.modules.get(name) for name in (_MODULES[kind], "pydantic_ai.direct"))


def _load(kind: Kind) -> None:
    try:
        import pydantic_ai.direct  # noqa: F401 - only loaded

        importlib.import_module(_MODULES[kind])
    except ImportError as error:
        raise MissingExtraError("llm", "a model over HTTP") from error
    _tls()


@functools.cache
def _tls() -> Any:
    # Reading the certificates takes 20 ms, which every client would spend again.
    import httpx2

    return httpx2.create_ssl_context()


def _http_client() -> Any:
    import httpx2

    return httpx2.AsyncClient(verify=_tls(), timeout=httpx2.Timeout(None, connect=30.0))


# --- our request, for them --------------------------------------------------------------------


def _settings(request: ModelRequest, kind: Kind) -> Any:
    options = {} if request.options is None else request.options
    if not isinstance(options, Mapping):
        raise ModelError("other", f"model options must be an object, got {show(options)}")
    settings: dict[str, Any] = {}
    if kind == "anthropic":
        settings["cache"] = True  # the others cache by themselves
    settings.update(options)
    settings["max_retries"] = 0
    if request.output_tokens_max is not None:
        settings["max_tokens"] = request.output_tokens_max
    if request.thinking is not None:
        settings["thinking"] = {"off": False, "on": True}.get(request.thinking, request.thinking)
    return settings


def _parameters(request: ModelRequest) -> ModelRequestParameters:
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.tools import ToolDefinition

    tools = [
        ToolDefinition(
            name=tool.name,
            description=tool.description,
            parameters_json_schema=tool.schema,
            strict=False,
        )
        for tool in request.tools
    ]
    return ModelRequestParameters(function_tools=tools, allow_text_output=True)


def _history(request: ModelRequest, provider: str, system: str) -> list[theirs.ModelMessage]:
    """Convert the messages: what stands between two answers becomes one request of theirs."""
    from pydantic_ai import messages as theirs

    history: list[theirs.ModelMessage] = []
    parts: list[theirs.ModelRequestPart] = []
    for item in request.messages:
        if isinstance(item.message, AssistantMessage):
            if parts:
                history.append(theirs.ModelRequest(parts=parts))
                parts = []
            history.append(_response(item, request.model, provider, system))
        else:
            parts.extend(_request_parts(item.message, request.images))
    history.append(theirs.ModelRequest(parts=parts, instructions=request.system or None))
    return history


def _request_parts(
    message: UserMessage | ToolResultMessage | SystemMessage, images: Mapping[str, bytes]
) -> list[theirs.ModelRequestPart]:
    from pydantic_ai import messages as theirs

    if isinstance(message, SystemMessage):
        text = render_system_message(message)
        # Not every interface has a system message in the middle; a marked user text is understood
        # by all of them and leaves what came before it in the provider's cache.
        return [theirs.UserPromptPart(f"<system>\n{text}\n</system>")] if text else []
    content = _content(message.blocks, images)
    texts = [part for part in content if isinstance(part, str)]
    # Plain text where it is only text: many compatible servers know no lists.
    sent: Any = content if len(texts) < len(content) else "\n\n".join(texts) or NO_OUTPUT
    if isinstance(message, UserMessage):
        return [theirs.UserPromptPart(sent)]
    return [
        theirs.ToolReturnPart(
            tool_name=message.name,
            content=sent,
            tool_call_id=call_id(*message.call),
            outcome="failed" if message.is_error else "success",
        )
    ]


def _content(blocks: Sequence[Block], images: Mapping[str, bytes]) -> list[theirs.UserContent]:
    from pydantic_ai import messages as theirs

    content: list[theirs.UserContent] = []
    for block in blocks:
        if isinstance(block, TextBlock) and block.text.strip():
            content.append(block.text)
        elif isinstance(block, ImageBlock):
            data = images.get(block.blob)
            if data is None:
                content.append(f"(an image, {block.media_type}, that is not available)")
            else:
                content.append(theirs.BinaryContent(data, media_type=block.media_type))
    return content


def _response(item: RequestMessage, model: str, provider: str, system: str) -> theirs.ModelResponse:
    from pydantic_ai import messages as theirs

    message = item.message
    assert isinstance(message, AssistantMessage)
    parts: list[theirs.ModelResponsePart] = []
    index = 0
    for block in message.blocks:
        # What came from elsewhere is sent as plain content, without anything that only its maker
        # can read; thinking of others is left out altogether.
        kept = _kept(block.opaque, provider, model) if message.model == model else None
        extra = kept or {}
        if isinstance(block, TextBlock) and block.text.strip():
            parts.append(theirs.TextPart(block.text, **extra))
        elif isinstance(block, ThinkingBlock) and kept is not None:
            parts.append(theirs.ThinkingPart(block.text, **extra))
        elif isinstance(block, ToolCallBlock):
            if item.entry is None:
                raise ModelError("other", "an answer with tool calls has no entry to name them by")
            identity = call_id(item.entry, index)
            arguments = sendable_arguments(block.arguments)
            parts.append(theirs.ToolCallPart(block.name, arguments, identity, **extra))
            index += 1
    own = message.model == model
    return theirs.ModelResponse(
        parts=parts,
        model_name=model.partition("/")[2] if own else None,
        provider_name=system if own else None,
        finish_reason="tool_call" if index else "stop",
    )


# --- their answer, for us ---------------------------------------------------------------------


def _kept(opaque: JsonValue, provider: str, model: str) -> dict[str, Any] | None:
    """Return what was kept of a part, if this provider and model made it."""
    if not isinstance(opaque, dict):
        return None
    if opaque.get("provider") != provider or opaque.get("model") != model:
        return None
    part = opaque.get("part")
    if not isinstance(part, dict):
        return None
    return {name: part[name] for name in _KEPT if name in part}


_KEPT = ("id", "signature", "provider_name", "provider_details")


def _opaque(part: Any, provider: str, model: str) -> JsonValue:
    kept: dict[str, Any] = {}
    for name in _KEPT:
        value = getattr(part, name, None)
        if value is None:
            continue
        try:
            kept[name] = check_json(value, f"$.{name}")
        except NotJsonError:
            continue  # details for people (moments, objects); what goes back is always JSON
    if not kept and type(part).__name__ != "ThinkingPart":
        return None
    return {"provider": provider, "model": model, "part": kept}


def _deltas(event: Any, calls: dict[int, int]) -> list[StreamEvent]:
    """Convert an event of theirs. `calls` maps their part numbers to our call numbers."""
    from pydantic_ai import messages as theirs

    if isinstance(event, theirs.PartStartEvent):
        part = event.part
        if isinstance(part, theirs.TextPart):
            return [TextDelta(part.content)] if part.content else []
        if isinstance(part, theirs.ThinkingPart):
            return [ThinkingDelta(part.content)] if part.content else []
        if isinstance(part, theirs.ToolCallPart):
            index = calls.setdefault(event.index, len(calls))
            start = ToolCallStart(index, part.tool_name)
            text = _arguments_text(part.args)
            return [start, ToolCallDelta(index, text)] if text else [start]
    if isinstance(event, theirs.PartDeltaEvent):
        delta = event.delta
        if isinstance(delta, theirs.TextPartDelta) and delta.content_delta:
            return [TextDelta(delta.content_delta)]
        if isinstance(delta, theirs.ThinkingPartDelta) and delta.content_delta:
            return [ThinkingDelta(delta.content_delta)]
        if isinstance(delta, theirs.ToolCallPartDelta) and event.index in calls:
            text = _arguments_text(delta.args_delta)
            return [ToolCallDelta(calls[event.index], text)] if text else []
    return []


def _arguments_text(arguments: str | Mapping[str, Any] | None) -> str:
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    try:
        return dumps(dict(arguments))
    except NotJsonError:
        return json.dumps(arguments, default=str)


_STOPS: dict[str, StopReason] = {
    "stop": "stop",
    "tool_call": "tool_use",
    "length": "length",
    "content_filter": "refusal",
    "error": "error",
}


def _answer(response: theirs.ModelResponse, provider: str, model: str) -> AssistantMessage:
    """Convert a complete answer; refuse one whose end was not seen.

    Raises:
        ModelError: The stream ended without the provider's own word that it was the end.
    """
    details = response.provider_details or {}
    refused = response.finish_reason == "content_filter"
    # The library invents a reason where a server sent none; only the server's own counts.
    if response.state != "complete" or not ("finish_reason" in details or refused):
        raise ModelError("retryable", f"{model}: the answer was cut before its end")
    if response.finish_reason == "error":
        raise ModelError("retryable", f"{model}: the provider reported an error in its answer")
    blocks = [*_blocks(response.parts, provider, model)]
    if refused and isinstance(details.get("refusal"), str):
        blocks.append(TextBlock(text=details["refusal"]))
    return AssistantMessage(
        blocks=tuple(blocks),
        status="complete",
        stop_reason=_STOPS.get(response.finish_reason or "stop", "stop"),
        model=model,
        usage=_usage(response.usage),
        at_us=0,
    )


def _blocks(parts: Sequence[Any], provider: str, model: str) -> list[Block]:
    from pydantic_ai import messages as theirs

    blocks: list[Block] = []
    for part in parts:
        opaque = _opaque(part, provider, model)
        if isinstance(part, theirs.TextPart):
            if part.content:
                blocks.append(TextBlock(text=part.content, opaque=opaque))
        elif isinstance(part, theirs.ThinkingPart):
            blocks.append(ThinkingBlock(text=part.content, opaque=opaque))
        elif isinstance(part, theirs.ToolCallPart):
            arguments = parse_arguments(_arguments_text(part.args))
            blocks.append(ToolCallBlock(name=part.tool_name, arguments=arguments, opaque=opaque))
    return blocks


def _usage(usage: Any) -> Usage:
    # `Models` drops numbers that are none; here they are only carried over.
    return Usage(
        requests=1,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )


# --- errors -----------------------------------------------------------------------------------

_OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|maximum context length|context window"
    r"|prompt is too long|available context size|input token count|too many (input )?tokens",
    re.IGNORECASE,
)
_SECRETS = re.compile(
    r"\b[sprS][kK][-_][\w\-*.]{8,}|\bAIza[\w-]{10,}|\bBearer\s+[^\s'\"]+|//[^/@\s]+@"
)


@attrs.frozen
class _Facts:
    """What an error of theirs says, once the many ways of saying it are taken away."""

    status: int | None
    body: str
    retry_after: float | None


def _classify(error: Exception) -> tuple[str, str, float | None]:
    """Decide what an error means: kind, text, and seconds to wait. The one place for it."""
    from pydantic_ai import exceptions as raised

    facts = _facts(error)
    detail = _detail(error, facts)
    kind = "other"
    if isinstance(error, raised.ModelContextWindowExceededError) or (
        (facts.status is None or 400 <= facts.status < 500)
        and isinstance(error, raised.ModelAPIError)
        and facts.status != 429
        and _OVERFLOW.search(f"{facts.body} {error}")
    ):
        kind = "overflow"
    elif isinstance(error, raised.ModelAuthenticationError) or facts.status in (401, 403):
        kind = "auth"
    elif isinstance(error, raised.ModelQuotaExceededError):
        kind = "other"  # waiting brings no credit
    elif facts.status is not None:
        transient = facts.status in (408, 409, 425, 429) or facts.status >= 500
        kind = "retryable" if transient else "other"
    elif isinstance(
        error,
        raised.ModelRateLimitError
        | raised.ModelUnavailableError
        | raised.ModelServerError
        | raised.ModelConnectionError,
    ) or _is_transport(error):
        kind = "retryable"
    elif isinstance(error, raised.ModelAPIError | raised.UnexpectedModelBehavior):
        # An error within the stream, or bytes that are no events: the request itself was accepted.
        rejected = isinstance(error, raised.ModelRequestRejectedError)
        kind = "other" if rejected else "retryable"
    return kind, detail, facts.retry_after if kind == "retryable" else None


def _is_transport(error: BaseException | None) -> bool:
    """Tell whether the connection failed, here or below; some clients let the bare error out."""
    import httpx2

    while error is not None:
        if isinstance(error, httpx2.TransportError | OSError | EOFError):
            return True
        # Truncated or garbled events: the answer was cut or damaged on its way.
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            return True
        error = error.__cause__
    return False


def _facts(error: Exception) -> _Facts:
    status = getattr(error, "status_code", None)
    body = getattr(error, "body", None)
    headers = getattr(error, "headers", None)
    after = getattr(error, "retry_after", None)
    if after is None and isinstance(headers, Mapping):
        # The library reads whole seconds and dates; fractions are sent too.
        after = _seconds(headers.get("retry-after"))
    if not isinstance(after, int | float) or not math.isfinite(after) or after < 0:
        after = None
    text = "" if body is None else body if isinstance(body, str) else _dump(body)
    return _Facts(status if isinstance(status, int) else None, text, after)


def _seconds(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None


def _dump(body: object) -> str:
    try:
        return json.dumps(body, default=str)
    except (TypeError, ValueError, RecursionError):
        return show(body)


def _detail(error: Exception, facts: _Facts) -> str:
    message = _message_in(facts.body) or str(error) or type(error).__name__
    return f"HTTP {facts.status}: {message}" if facts.status is not None else message


def _message_in(body: str) -> str | None:
    """Return the sentence meant for people in the body of an error, if there is one."""
    try:
        value = json.loads(body) if body else None
    except ValueError:
        return None
    for _ in range(3):
        if not isinstance(value, dict):
            return None
        message = value.get("message")
        if isinstance(message, str) and message:
            kind = value.get("code") or value.get("type")
            return f"{message} ({kind})" if isinstance(kind, str) else message
        value = value.get("error")
    return None


def _without_secrets(text: str) -> str:
    """Mask what looks like a key, and the user part of addresses."""
    return _SECRETS.sub(lambda match: "//***@" if match[0].startswith("//") else "***", text)
