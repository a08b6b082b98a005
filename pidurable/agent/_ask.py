"""Asking a model once: whether one can be asked, its answer, and what a failure leads to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pidurable.agent._models import (
    Done,
    ModelRequest,
    Models,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStart,
)
from pidurable.agent._progress import PartialAnswer
from pidurable.errors import ModelError, NotFoundError
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX, Settings
from pidurable.records._messages import AssistantMessage
from pidurable.tasks._definition import backoff
from pidurable.tasks._errors import bounded

if TYPE_CHECKING:
    from pidurable.session._session import Session

NO_MODELS = "the harness was opened without models; pass models="

_RETRY_BASE_SECONDS = 1.0
_RETRY_SECONDS_MAX = 60.0
_RETRY_JITTER = 0.5


def no_model(models: Models | None, name: str | None) -> str | None:
    """Why no model can be asked, or None."""
    if models is None:
        return NO_MODELS
    if name is None:
        return "no model is chosen for this conversation; configure one (provider/model)"
    try:
        models.resolve(name)
    except NotFoundError as unknown:
        return str(unknown)
    return None


async def stream_answer(
    session: Session, models: Models, request: ModelRequest, partial: PartialAnswer
) -> AssistantMessage:
    """Read the answer as it comes, show it, and return it whole.

    Raises:
        ModelError: There is no answer.
        NotFoundError, MissingExtraError: No such model; nothing was sent.
    """
    received = 0
    most = session.settings.value_bytes_max
    async with models.stream(request) as events:
        async for event in events:
            match event:
                case Done(message=message):
                    return message
                case TextDelta(text=text):
                    partial.add("text", text)
                case ThinkingDelta(text=text):
                    partial.add("thinking", text)
                case ToolCallStart(name=text) | ToolCallDelta(arguments_text=text):
                    # Calls are shown once they are stored; only their size counts here.
                    pass
            received += len(text)
            if received > most:
                detail = f"{request.model} sent more than {most} characters, and no end"
                raise ModelError("other", detail)
            session.failpoints.hit("CP7")
    raise ModelError("retryable", f"the answer of {request.model} had no end")


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
        factor=2.0,
        maximum=_RETRY_SECONDS_MAX,
        jitter=_RETRY_JITTER,
        seed=seed,
    )
    after = error.retry_after
    if after is not None and not math.isnan(after):
        delay = max(delay, after)
    most = settings.retry_after_seconds_max
    if delay > most:
        return None, f"{detail} (asked to wait {delay:.0f} s, more than the {most:.0f} s allowed)"
    return delay, detail
