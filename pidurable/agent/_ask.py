"""Asking a model once: whether one can be asked, its answer, and what a failure leads to."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from pidurable.agent._models import (
    Deferred,
    Done,
    Model,
    ModelRequest,
    Models,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStart,
)
from pidurable.errors import MissingExtraError, ModelError, NotFoundError
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX, Settings
from pidurable.records._messages import AssistantMessage
from pidurable.tasks._definition import backoff
from pidurable.tasks._errors import bounded

if TYPE_CHECKING:
    from pidurable.session._session import Session

NO_MODELS = "the harness was opened without models; pass models="

_RETRY_BASE_SECONDS = 1.0
_RETRY_FACTOR = 3.0
_RETRY_SECONDS_MAX = 60.0
_RETRY_JITTER = 0.3
"""So five more tries take 70 s at least: a provider that is away for a minute loses no run."""

_SPREAD = 0.1
"""The part of a wait that a provider asked for by which it may be longer: who was sent away at one
moment is not to come back at one moment."""

POLL_SECONDS_MIN = 1.0


def find_model(models: Models | None, name: str | None) -> Model | str:
    """The model that can be asked, or why none can be."""
    if models is None:
        return NO_MODELS
    if name is None:
        return "no model is chosen for this conversation; configure one (provider/model)"
    try:
        return models.resolve(name)
    except NotFoundError as unknown:
        return str(unknown)


Opening = AbstractAsyncContextManager[AsyncIterator[StreamEvent]]


class Shown(Protocol):
    """What takes an answer as it comes."""

    def add(self, kind: str, text: str) -> None:
        """More of a text or thinking block."""
        ...


async def stream_answer(
    session: Session, opening: Opening, model: str, partial: Shown
) -> AssistantMessage | Deferred:
    """Read the answer as it comes, show it, and return it whole, or what it is deferred to.

    Args:
        session: Has the settings.
        opening: What `Models.stream` or `Models.poll` gave.
        model: The full name of the model, for errors.
        partial: Shows the answer as it comes.

    Raises:
        ModelError: There is no answer.
        NotFoundError, MissingExtraError: No such model; nothing was sent.
    """
    received = 0
    most = session.settings.value_bytes_max
    async with opening as events:
        async for event in events:
            match event:
                case Done(message=message):
                    return message
                case Deferred():
                    return event
                case TextDelta(text=text):
                    partial.add("text", text)
                case ThinkingDelta(text=text):
                    partial.add("thinking", text)
                case ToolCallStart(name=text) | ToolCallDelta(arguments_text=text):
                    # Calls are shown once they are stored; only their size counts here.
                    pass
            received += len(text)
            if received > most:
                detail = f"{model} sent more than {most} characters, and no end"
                raise ModelError("other", detail)
            session.failpoints.hit("CP7")
    raise ModelError("retryable", f"the answer of {model} had no end")


async def cancel_deferred(
    models: Models | None, request: ModelRequest, handle: Any, report: Callable[[str], None]
) -> None:
    """Tell the provider that nobody waits for a deferred answer any more, as well as may be."""
    try:
        if models is None:
            raise ModelError("other", NO_MODELS)
        await models.cancel(request, handle)
    except (ModelError, NotFoundError, MissingExtraError) as error:
        report(f"the deferred request to {request.model} was not cancelled: {error}")


def next_try(
    error: ModelError, *, tries: int, settings: Settings, seed: str
) -> tuple[float | None, str]:
    """Seconds until the next try, or None if there is none; and what to say of the failure.

    Args:
        error: Why the request failed.
        tries: How many requests of this turn had failed before.
        settings: How many more there may be, and the longest wait.
        seed: Spreads out tasks that failed at one moment.
    """
    detail = bounded(str(error.detail), ERROR_MESSAGE_BYTES_MAX - 256)
    if error.kind != "retryable":
        return None, detail
    if tries >= settings.request_tries:
        return None, f"{detail} (tried {tries + 1} times)"
    delay = backoff(
        tries + 1,
        base=_RETRY_BASE_SECONDS,
        factor=_RETRY_FACTOR,
        maximum=_RETRY_SECONDS_MAX,
        jitter=_RETRY_JITTER,
        seed=seed,
    )
    after = error.retry_after
    if not isinstance(after, int | float) or math.isnan(after) or after < 0:
        after = 0.0
    wanted = max(delay, after)
    most = settings.retry_after_seconds_max
    if wanted > most or math.isinf(wanted):
        return None, f"{detail} (asked to wait {wanted:.0f} s, more than the {most:.0f} s allowed)"
    if after > 0:
        longest = after * (1.0 + _SPREAD)
        jitter = _SPREAD / (1.0 + _SPREAD)
        spread = backoff(1, base=longest, maximum=longest, jitter=jitter, seed=seed)
        wanted = max(wanted, spread)
    return wanted, detail


def poll_at(now_us: int, since_us: int, deferred: Deferred, settings: Settings) -> datetime:
    """When to ask for an answer that was deferred: when its provider says, within reason.

    Args:
        now_us: Now.
        since_us: When it was deferred first. At the end of the time that it may take it is asked
            for once more.
        deferred: What the provider says.
        settings: The bounds.
    """
    seconds = min(deferred.poll_seconds, settings.retry_after_seconds_max)
    left = settings.deferred_seconds_max - (now_us - since_us) / 1e6
    return moment_after(now_us, max(min(seconds, left), POLL_SECONDS_MIN))


def deferred_too_long(now_us: int, since_us: int, settings: Settings) -> ModelError | None:
    """What ends a request whose answer is deferred over and over; None where it may be still.

    Args:
        now_us: Now, when the provider has just deferred it.
        since_us: When it did so first.
        settings: The bound.
    """
    most = settings.deferred_seconds_max
    if (now_us - since_us) / 1e6 < most:
        return None
    detail = f"the provider has deferred its answer for {most:g} s, the most allowed"
    return ModelError("other", detail)


def moment_after(now_us: int, seconds: float) -> datetime:
    """The moment so many seconds from now, by the clock of the session."""
    return datetime.fromtimestamp(now_us / 1e6, UTC) + timedelta(seconds=seconds)
