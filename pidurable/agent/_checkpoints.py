"""What a generation stores between its phases, and what it ends with."""

from __future__ import annotations

from typing import Any

import attrs

from pidurable.agent._boundaries import GenerationInput
from pidurable.tasks._context import TaskContext
from pidurable.tasks._transaction import TaskTransaction


@attrs.frozen
class Prepare:
    """The agent and the prompt are to be fixed. Nothing was sent."""

    tries: int = 0
    """Requests of this turn that failed and may be tried again."""
    compacted: bool = False
    """Whether this turn has waited for a compaction: it does so once for a threshold."""
    overflowed: bool = False
    """Whether a request of this turn was too large: it is tried again once."""


@attrs.frozen(kw_only=True)
class Request:
    """The request is fixed and may have been sent."""

    model: str
    thinking: str | None
    cutoff: int
    """The newest entry that the request includes."""
    tries: int = 0
    compacted: bool = False
    overflowed: bool = False


@attrs.frozen(kw_only=True)
class Retry:
    """A request failed; the next try is due."""

    tries: int
    compacted: bool = False
    overflowed: bool = False


@attrs.frozen(kw_only=True)
class Room:
    """A compaction makes room, and the generation waits for it."""

    compaction: int
    tries: int
    overflowed: bool
    overflow: str | None
    """What the provider said of the request that did not fit, if one was sent."""


@attrs.frozen(kw_only=True)
class Poll:
    """The provider has deferred its answer to this request, and is to be asked for it."""

    request: Request
    handle: Any
    """By what the provider finds the request again."""
    since_us: int | None = None
    """When it deferred its answer first; None in stores from before that was kept."""


@attrs.frozen(kw_only=True)
class Tools:
    """The answer of entry `assistant` is stored, its calls are running."""

    assistant: int
    queued: tuple[int, ...] = ()
    """In a sequential round: the indexes of the calls that are still to be created."""


@attrs.frozen(kw_only=True)
class GenerationResult:
    """The entry of the answer, and the generation that went on, if one did."""

    assistant: int
    next: int | None = None


Checkpoint = Prepare | Request | Retry | Poll | Room | Tools
GenerationContext = TaskContext[GenerationInput, Checkpoint, GenerationResult]
Tx = TaskTransaction[Checkpoint, GenerationResult]


def run_of(ctx: GenerationContext) -> int:
    """The run that a generation belongs to, by the id of its first one."""
    return ctx.input.run if ctx.input.run is not None else int(ctx.task_id)
