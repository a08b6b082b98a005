"""What a compaction stores between its phases, and what it ends with."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from pidurable.agent._compaction_start import CompactionInput
from pidurable.agent._compaction_text import Place
from pidurable.tasks._context import TaskContext
from pidurable.tasks._transaction import TaskTransaction


@attrs.frozen
class Select:
    """Nothing is chosen."""


@attrs.frozen(kw_only=True)
class Work:
    """What is to be replaced, by which model, and how far that is."""

    model: str
    cutoff: int
    """The newest entry of the context that was selected from."""
    cut: int
    """The first entry that stays."""
    stop: int
    """The place of its first message in that context."""
    replaced_tokens: int
    kept_tokens: int
    size: int
    """The tokens of a part with the summary so far."""
    at: Place = attrs.Factory(Place)
    """Where the next part begins."""
    so_far: str | None = None
    """The summary of the parts before."""
    rejected: int = 0
    """Answers to this request that were no summary."""
    problem: str | None = None
    """Why the last of them was none."""
    tries: int = 0
    """Requests for this part that failed."""
    is_deferred: bool = False
    """Whether the provider has deferred its answer to this request."""
    handle: Any = None
    """By what it then finds the request again."""
    deferred_us: int | None = None
    """When it deferred its answer to this request first."""


@attrs.frozen
class Summarize:
    """The request for the next part is fixed, and may have been sent."""

    work: Work


@attrs.frozen
class Retry:
    """A request failed, or is answered later; the next try is due."""

    work: Work


@attrs.frozen(kw_only=True)
class Waiting:
    """The summary is handed in, and waits for a boundary of the run."""

    submission: int | None = None
    cut: int
    tokens_before: int
    tokens_after: int
    window: int | None


@attrs.frozen(kw_only=True)
class CompactionResult:
    """How a compaction ended; one that failed has an error instead."""

    status: Literal["applied", "skipped", "stale"]
    reason: str | None = None
    """Why it was not applied."""
    entry: int | None = None
    """The entry of the summary."""
    cut: int | None = None
    """The first entry that stays."""
    tokens_before: int = 0
    tokens_after: int = 0


Checkpoint = Select | Summarize | Retry | Waiting
CompactionContext = TaskContext[CompactionInput, Checkpoint, CompactionResult]
Tx = TaskTransaction[Checkpoint, CompactionResult]
