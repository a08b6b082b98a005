"""Models: one request to a model, as a stream of events that is safe to act upon.

Providers differ and misbehave; what leaves `Models.stream` does not. Holds for every stream:

* it ends with exactly one `Done`, or raises `ModelError` (retryable, overflow, auth or other); a
  provider that answers later ends it with one `Deferred`;
* a stream that just stops, falls silent, or answers nothing is a retryable error, never an answer;
* what is of a wrong type, in an event of a known kind, is an error like any other;
* every text is storable (no lone surrogates, no NUL), also where a pair was split over two deltas;
* usage is finite and never negative, whatever the provider counted;
* leaving the block, by cancellation too, leaves the provider's block, which closes the connection.

There is no retry here: the one who asked stores each attempt, and decides.
"""

from __future__ import annotations

import difflib
import logging
import math
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
)
from types import TracebackType
from typing import Any, NoReturn, Protocol, cast, final, runtime_checkable

import attrs
import trio

from pidurable.agent._catalogue import Model, ModelInfo, Prices, lookup
from pidurable.agent._silence import Waiting, silences
from pidurable.errors import (
    InvalidArgumentError,
    MissingExtraError,
    ModelError,
    NotFoundError,
    NotJsonError,
    show,
)
from pidurable.records._json import check_json, loads
from pidurable.records._limits import Settings
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    ImageBlock,
    JsonValue,
    Message,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolDeclaration,
    Usage,
)

__all__ = [
    "Deferred",
    "DefersAnswers",
    "Done",
    "ListsModels",
    "Model",
    "ModelInfo",
    "ModelRequest",
    "Models",
    "Prices",
    "Provider",
    "RequestMessage",
    "StreamEvent",
    "TextDelta",
    "ThinkingDelta",
    "ToolCallDelta",
    "ToolCallStart",
    "call_id",
    "clean_text",
    "parse_arguments",
    "render_system_message",
    "sendable_arguments",
]

logger = logging.getLogger("pidurable.models")

_CANCEL_SECONDS_MAX = 10.0
"""Whoever aborts a run waits for this."""

_KNOWN_MAX = 1_000
"""Models of which is kept what was found out; of others it is found out again."""

_COUNT_MAX = 2**53
"""A provider that counts more tokens than this is wrong; the number is dropped."""


# --- requests ---------------------------------------------------------------------------------


def call_id(entry: int, index: int) -> str:
    """Return the id under which a tool call is shown to providers.

    It is ours: providers repeat their own ids, leave them out, or make them too long for others.
    The result is the same for every request, short, and made of characters that all accept.
    """
    return f"c{entry}_{index}"


@attrs.frozen(kw_only=True)
class RequestMessage:
    """One message of a request, and the transcript entry it stands in (None if in none)."""

    message: Message
    entry: int | None = None
    """Needed for an assistant message with tool calls: results name their call by it."""


@attrs.frozen(kw_only=True)
class ModelRequest:
    """Everything that one model request depends on. `messages` are a valid exchange already."""

    model: str
    """As "provider/model"."""
    messages: Sequence[RequestMessage]
    """Immutable, and equal to a tuple of the same. A message is made when it is looked at, so look
    only at what you need of a long conversation."""
    tools: tuple[ToolDeclaration, ...] = ()
    system: str = ""
    thinking: str | None = None
    """off, minimal, low, medium, high, xhigh or max; None leaves it to the provider."""
    output_tokens_max: int | None = None
    options: JsonValue = None
    """An object of provider settings (temperature, ...), or None."""
    images: Mapping[str, bytes] = attrs.field(factory=dict, repr=False)
    """The bytes of image blocks by their SHA-256. An image that is missing is sent as a note."""


def render_system_message(message: SystemMessage) -> str:
    """Render a change of the system prompt in mid-conversation, as text; empty if nothing to say.

    Tools are not mentioned: a request declares those that there are now.
    """
    parts: list[str] = []
    for name, text in message.sections.items():
        if text is None:
            parts.append(f"The section {name!r} of your instructions no longer applies.")
        elif text.strip():
            parts.append(text)
    return "\n\n".join(parts)


# --- events -----------------------------------------------------------------------------------


@attrs.frozen
class TextDelta:
    """More text of the answer."""

    text: str


@attrs.frozen
class ThinkingDelta:
    """More of what the model thinks."""

    text: str


@attrs.frozen
class ToolCallStart:
    """A tool call begins. `index` is its place among the calls of this answer."""

    index: int
    name: str


@attrs.frozen
class ToolCallDelta:
    """More of the arguments of a call, as the model writes them: text, not yet JSON."""

    index: int
    arguments_text: str


@attrs.frozen
class Done:
    """The last event: the complete answer. Only this is an answer; deltas are for showing."""

    message: AssistantMessage


@attrs.frozen
class Deferred:
    """The last event, in the place of `Done`: the provider answers later, and must be asked again.

    Only a provider that is a `DefersAnswers` may send it.
    """

    handle: JsonValue
    """By what the provider finds the request again; stored, and given to `poll` and `cancel`."""
    poll_seconds: float
    """When to ask, in seconds from now."""


StreamEvent = TextDelta | ThinkingDelta | ToolCallStart | ToolCallDelta | Done | Deferred


class Provider(Protocol):
    """Something that serves models: one HTTP interface, one script, one engine in the process.

    `stream` sends the request once, without retries of its own, and yields events; the last is
    `Done`. Leaving its block, by cancellation too, must end the request at once. It raises
    `ModelError`; anything else it raises is classified by `Models`.
    """

    @property
    def name(self) -> str:
        """What stands before the slash of a model's name."""
        ...

    def stream(
        self, request: ModelRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Open the answer to `request`."""
        ...


@runtime_checkable
class ListsModels(Protocol):
    """A provider that knows all its models, so that others can be refused before a request."""

    def known_models(self) -> Collection[str]:
        """Return the names after the slash."""
        ...

    def has_model(self, model_id: str) -> bool:
        """Tell whether this provider serves the model."""
        ...


@runtime_checkable
class DefersAnswers(Provider, Protocol):
    """A provider that may answer later: its stream may end with `Deferred`.

    Both methods are given the request as it was fixed, before hooks changed what was sent of it,
    also by another process than the one that sent it. The handle alone must find it again.
    """

    def poll(
        self, request: ModelRequest, handle: JsonValue
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Open the answer, as `stream` does; its events end with `Deferred` if there is none yet.

        Raises:
            ModelError: There is none, or the provider cannot be asked now (retryable).
        """
        ...

    async def cancel(self, request: ModelRequest, handle: JsonValue) -> None:
        """Tell the provider that nobody waits for the answer any more."""
        ...


def sendable_arguments(arguments: JsonValue) -> dict[str, JsonValue]:
    """Return the arguments of an earlier call as providers take them back: always an object.

    Servers parse them again, and refuse the whole request over one call that was never JSON.
    """
    return arguments if isinstance(arguments, dict) else {"invalid_arguments": arguments}


# --- making answers storable ------------------------------------------------------------------


def clean_text(text: str) -> str:
    """Make any str storable: join surrogate pairs, mark lone ones (U+FFFD) and NUL (U+2400)."""
    if "\0" in text:
        text = text.replace("\0", "\u2400")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def parse_arguments(text: str) -> JsonValue:
    """Return the object that a model wrote as arguments of a call, or the text if it is none.

    Nothing is repaired: arguments that were cut stay a str, so that nobody runs them as `{}`.
    Only no text at all means no arguments.
    """
    if not text.strip():
        return {}
    try:
        value = loads(text)
    except NotJsonError:
        return clean_text(text)
    return value if isinstance(value, dict) else clean_text(text)


@attrs.define(eq=False)
class _DeltaCleaner:
    """Cleans one text that arrives in pieces; half a surrogate pair waits for the other half."""

    _held: str = ""

    def push(self, piece: str) -> str:
        text = self._held + piece
        self._held = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._held, text = text[-1], text[:-1]
        return clean_text(text)


def _storable(value: JsonValue, otherwise: Callable[[], JsonValue]) -> JsonValue:
    try:
        return check_json(value, "$")
    except NotJsonError:
        return otherwise()


_SPOKEN = (TextBlock, ThinkingBlock)


def _clean_block(block: Block) -> Block:
    opaque = block.opaque
    if opaque is not None:
        opaque = _storable(opaque, lambda: None)
    if isinstance(block, ToolCallBlock):
        # Arguments that cannot be stored are kept as text for the model to see its mistake.
        arguments = block.arguments
        if isinstance(arguments, str):
            arguments = clean_text(arguments)
        arguments = _storable(arguments, lambda: clean_text(show(block.arguments)))
        return ToolCallBlock(name=clean_text(block.name), arguments=arguments, opaque=opaque)
    if isinstance(block, ImageBlock):
        # Its bytes are in no store, and no provider takes an image back as a part of an answer.
        return TextBlock(text=clean_text(f"(an image, {block.media_type}, that is not kept)"))
    text = clean_text(block.text)
    if type(block) in _SPOKEN and text is block.text and type(text) is str and opaque is None:
        return block
    return attrs.evolve(block, text=text, opaque=opaque)


def _clean_count(value: object) -> int:
    """Return a count that a provider gave; what is no sensible number counts as 0."""
    if type(value) is int and 0 <= value <= _COUNT_MAX:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    if not math.isfinite(value) or not 0 <= value <= _COUNT_MAX:
        return 0
    return int(value)


def _clean_usage(usage: Usage, model: Model) -> Usage:
    """The counts as they are stored, and what they cost by the catalogue, whatever was said."""
    clean = Usage(
        requests=1,
        input_tokens=_clean_count(usage.input_tokens),
        output_tokens=_clean_count(usage.output_tokens),
        cache_read_tokens=_clean_count(usage.cache_read_tokens),
        cache_write_tokens=_clean_count(usage.cache_write_tokens),
    )
    cost = model.cost(clean)
    return attrs.evolve(clean, cost=cost) if cost else clean


class EmptyAnswerError(ModelError):
    """A model has answered, and said nothing: asked again, it may say something."""


def _checked_answer(message: AssistantMessage, model: Model, *, at_us: int) -> AssistantMessage:
    """Return the answer of a model, storable and priced; refuse one that holds nothing.

    Raises:
        EmptyAnswerError: The answer is empty (retryable).
        ModelError: It was withheld by the provider (other).
    """
    blocks = tuple(_clean_block(block) for block in message.blocks)
    calls = any(isinstance(block, ToolCallBlock) for block in blocks)
    said = any(isinstance(block, TextBlock) and block.text.strip() for block in blocks)
    if not calls and not said:
        if message.stop_reason == "refusal":
            raise ModelError("other", f"{model.name} withheld its answer (content filter)")
        thought = any(isinstance(block, ThinkingBlock) for block in blocks)
        what = "only thinking" if thought else "nothing"
        raise EmptyAnswerError("retryable", f"empty answer: {model.name} returned {what}")
    stop = message.stop_reason
    if calls and stop == "stop":
        stop = "tool_use"
    elif stop == "tool_use" and not calls:
        stop = "stop"
    return AssistantMessage(
        blocks=blocks,
        status="complete",
        stop_reason=stop,
        model=model.name,
        usage=_clean_usage(message.usage, model),
        at_us=at_us,
    )


def _checked_deferred(event: Deferred, provider: Provider, request: ModelRequest) -> Deferred:
    """Return the event, storable, with a moment that makes sense.

    Raises:
        ModelError: Nobody could ever ask for this answer.
    """
    if not isinstance(provider, DefersAnswers):
        detail = f"{request.model} deferred its answer, but its provider cannot be asked for it"
        raise ModelError("other", detail)
    try:
        handle = check_json(event.handle, "$.handle")
    except NotJsonError as error:
        detail = f"{request.model} deferred its answer under a handle that is no JSON: {error}"
        raise ModelError("other", detail) from error
    seconds = event.poll_seconds
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or math.isnan(seconds) or seconds < 0:
        seconds = 0.0
    return Deferred(handle, float(seconds))


# --- models -----------------------------------------------------------------------------------


def _wall_clock_us() -> int:
    return time.time_ns() // 1000


@final
class Models:
    """The models that a host offers, by the names of their providers.

    Args:
        providers: Providers, or a mapping from the name to use to the provider.
        catalogue: What the host knows of models ("provider/model"), before the bundled catalogue.
        stream_silence_seconds: Longest silence within one request before it is given up.
        now_us: The wall clock, in microseconds; for tests and simulations.
    """

    def __init__(
        self,
        providers: Mapping[str, Provider] | Iterable[Provider] = (),
        *,
        catalogue: Mapping[str, ModelInfo] | None = None,
        stream_silence_seconds: float | None = None,
        now_us: Callable[[], int] = _wall_clock_us,
    ) -> None:
        pairs: list[tuple[str, Provider]]
        if isinstance(providers, Mapping):
            # The cast is for one checker that reads the mapping as an iterable of providers.
            pairs = list(cast("Mapping[str, Provider]", providers).items())
        else:
            pairs = [(provider.name, provider) for provider in providers]
        self._providers: dict[str, Provider] = {}
        for name, provider in pairs:
            if not name or "/" in name or name in self._providers:
                problem = "names must be unique, not empty, and without a slash"
                raise InvalidArgumentError("providers", problem, show(name))
            self._providers[name] = provider
        # To look at a whole protocol takes long, and is done with every request otherwise.
        self._listers = {
            name: provider
            for name, provider in self._providers.items()
            if isinstance(provider, ListsModels)
        }
        self._known: dict[str, Model] = {}
        """What was found out about models that were asked for."""
        silence = stream_silence_seconds
        self._silence = Settings().stream_silence_seconds if silence is None else silence
        if not self._silence > 0:
            raise InvalidArgumentError("stream_silence_seconds", "must be above 0", show(silence))
        self._catalogue = dict(catalogue or {})
        self._now_us = now_us

    def __repr__(self) -> str:
        return f"Models({', '.join(self._providers) or 'no providers'})"

    @property
    def providers(self) -> tuple[str, ...]:
        """The names of the providers, in the order given."""
        return tuple(self._providers)

    def resolve(self, name: str) -> Model:
        """Find a model by its full name, without asking its provider anything.

        Args:
            name: "provider/model"; the model's own name may hold slashes.

        Raises:
            NotFoundError: No such provider, or its list has no such model; the hint names the
                nearest one.
        """
        found = self._known.get(name)
        if found is not None and found.provider not in self._listers:
            # A list may have changed since it was asked; what else is known of a model stays.
            return found
        _, model_id = self._find(name)
        prefix = name.partition("/")[0]
        lister = self._listers.get(prefix)
        if lister is not None and not lister.has_model(model_id):
            known = [f"{prefix}/{known}" for known in lister.known_models()]
            raise NotFoundError("model", name, _nearest(name, known))
        if found is None:
            # A provider with a list of its own is not in a catalogue of vendors, which costs 0.2 s.
            found = lookup(prefix, model_id, self._catalogue.get(name), bundled=lister is None)
            if len(self._known) < _KNOWN_MAX:
                self._known[name] = found
        return found

    def _find(self, name: str) -> tuple[Provider, str]:
        prefix, slash, model_id = name.partition("/")
        provider = self._providers.get(prefix)
        if provider is None:
            raise NotFoundError("model", name, _nearest(prefix, list(self._providers), "provider"))
        if not slash or not model_id:
            raise NotFoundError("model", name, 'Models are named "provider/model".')
        return provider, model_id

    def stream(
        self, request: ModelRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Ask a model and read its answer as it comes.

        The events end with `Done`, or with `Deferred` if the provider answers later: see `poll`.
        Leaving the block early, or being cancelled in it, ends the
        request at once and closes its connection. Nothing is retried.

        Raises:
            ModelError: The request failed; `kind` and `retry_after` say what to do. It may be
                raised when the block is entered, while events are read, and, after a silence that
                has cancelled the reading, when the block is left.
            NotFoundError: No such model; nothing was sent.
            MissingExtraError: The provider's library is not installed; nothing was sent.
        """
        return self._open(request, None)

    def poll(
        self, request: ModelRequest, handle: JsonValue
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Ask for an answer that was deferred, and read it as it comes.

        As `stream`: the events end with `Done`, or with `Deferred` if there is no answer yet.

        Args:
            request: As it was fixed, for the name of its model and what it offers.
            handle: What came with the last `Deferred`.

        Raises:
            ModelError: As for `stream`; also if the provider does not defer answers (any more).
            NotFoundError: No such model.
            MissingExtraError: The provider's library is not installed.
        """
        return self._open(request, (handle,))

    async def cancel(self, request: ModelRequest, handle: JsonValue) -> None:
        """Tell a provider that nobody waits for a deferred answer any more.

        Raises:
            ModelError: It could not be told, or took longer than 10 s to listen.
            NotFoundError: No such model.
            MissingExtraError: The provider's library is not installed.
        """
        provider = self._deferring(request)
        seconds = min(self._silence, _CANCEL_SECONDS_MAX)
        with trio.move_on_after(seconds) as scope, _classified(provider):
            await provider.cancel(request, handle)
        if scope.cancelled_caught:
            detail = f"{request.model} did not confirm for {seconds:g} s that it gave up"
            raise ModelError("retryable", detail)

    def _deferring(self, request: ModelRequest) -> DefersAnswers:
        provider, _ = self._find(request.model)
        if not isinstance(provider, DefersAnswers):
            raise ModelError("other", f"the provider of {request.model} does not defer answers")
        return provider

    @asynccontextmanager
    async def _open(
        self, request: ModelRequest, handle: tuple[JsonValue] | None
    ) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        """Open an answer, or with a handle one that was deferred."""
        model = self.resolve(request.model)
        provider = self._providers[model.provider]
        deferring = None if handle is None else self._deferring(request)
        # One scope round the whole block, which is cancelled only while the provider is waited for:
        # it may hold a nursery open in its block, so a scope of its own for the opening would cross
        # that, and one for each event would cost more than all else that is done with it.
        with trio.CancelScope() as scope:
            waiting = Waiting(scope, self._silence)
            looking = silences()
            looking.watch(waiting)
            try:
                waiting.begin()
                try:
                    if deferring is None or handle is None:
                        manager = provider.stream(request)
                    else:
                        manager = deferring.poll(request, handle[0])
                    events = await manager.__aenter__()
                except Exception as error:
                    _raise_classified(error, provider)
                waiting.end()
                opened = _Opened(manager, provider)
                async with opened:
                    # In blocks, and not by context managers: they cost as much as all else here.
                    try:
                        checked = self._events(opened, waiting, model, request, events)
                        try:
                            yield checked
                        finally:
                            await checked.aclose()
                    finally:
                        if isinstance(events, AsyncGenerator):
                            # Most providers give one to read from.
                            await events.aclose()
            finally:
                looking.forget(waiting)
        if scope.cancelled_caught:
            raise self._silent(request)

    def _silent(self, request: ModelRequest) -> ModelError:
        detail = f"{request.model} sent nothing for {self._silence:g} s; the request was given up"
        return ModelError("retryable", detail)

    async def _events(
        self,
        opened: _Opened,
        waiting: Waiting,
        model: Model,
        request: ModelRequest,
        events: AsyncIterator[StreamEvent],
    ) -> AsyncGenerator[StreamEvent, None]:
        text, thinking = _DeltaCleaner(), _DeltaCleaner()
        arguments: dict[int, _DeltaCleaner] = {}
        while True:
            waiting.begin()
            try:
                event = await anext(events, None)
            except Exception as error:
                _raise_classified(error, opened.provider)
            finally:
                waiting.end()
            try:
                match event:
                    case None:
                        detail = (
                            f"the answer of {request.model} was cut: it ended without a last event"
                        )
                        raise ModelError("retryable", detail)
                    case Done(message=message):
                        answer = _checked_answer(message, model, at_us=self._now_us())
                        opened.answered = True
                        yield Done(answer)
                        return
                    case Deferred():
                        deferred = _checked_deferred(event, opened.provider, request)
                        opened.answered = True
                        yield deferred
                        return
                    case TextDelta(text=piece):
                        if cleaned := text.push(piece):
                            yield TextDelta(cleaned)
                    case ThinkingDelta(text=piece):
                        if cleaned := thinking.push(piece):
                            yield ThinkingDelta(cleaned)
                    case ToolCallStart(index=index, name=name):
                        yield ToolCallStart(index, clean_text(name))
                    case ToolCallDelta(index=index, arguments_text=piece):
                        if cleaned := arguments.setdefault(index, _DeltaCleaner()).push(piece):
                            yield ToolCallDelta(index, cleaned)
            except ModelError:
                raise
            except Exception as error:
                # A provider in the same process may send what its types do not allow.
                what = f"{type(error).__name__}: {error}"
                detail = f"{request.model} sent a {type(event).__name__} that is none: {what}"
                raise ModelError("other", detail[:1000]) from error


@attrs.define(eq=False)
class _Opened:
    """The block of a provider that was entered, and must be left whatever happens."""

    manager: AbstractAsyncContextManager[Any]
    provider: Provider
    answered: bool = False
    """Whether the whole answer is there; how the connection ends does not matter then."""

    async def __aenter__(self) -> None:
        return

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            try:
                await self.manager.__aexit__(kind, error, traceback)  # noqa: ASYNC102 - passed on
            except Exception as raised:
                _raise_classified(raised, self.provider)
        except Exception as closing:
            # A connection that fails while it is closed must neither take an answer back, nor
            # hide what the body raised: a cancellation, or a bug.
            if error is None and not self.answered:
                raise
            if closing is not error:
                logger.debug("closing a stream of %s failed", self.provider.name, exc_info=True)


def _nearest(name: str, known: list[str], what: str = "model") -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"Did you mean the {what} {near[0]!r}?"
    return f"Known {what}s: {', '.join(sorted(known)[:10]) or 'none'}."


@contextmanager
def _classified(provider: Provider) -> Iterator[None]:
    """Turn whatever a provider raises into a `ModelError`; cancellation passes."""
    try:
        yield
    except Exception as error:
        _raise_classified(error, provider)


def _raise_classified(error: Exception, provider: Provider) -> NoReturn:
    """Raise what a provider raised as a `ModelError`. Called where it is handled."""
    leaf = _first_leaf(error)
    if leaf is error and isinstance(leaf, ModelError | MissingExtraError | NotFoundError):
        raise error
    if isinstance(leaf, ModelError | MissingExtraError | NotFoundError):
        raise leaf from leaf.__cause__
    broken = (OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError)
    kind = "retryable" if isinstance(leaf, broken) else "other"
    what = f"provider {provider.name!r}: {type(leaf).__name__}: {leaf}"
    raise ModelError(kind, what[:1000]) from error


def _first_leaf(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
