"""What an open harness adds to the contexts of its tasks: models, environments, handles, agents.

The tasks layer knows nothing of these. A harness gives its host to the runtime before anything
runs; a runtime without one says so to whoever asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pidurable.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pidurable.agent._models import Models
    from pidurable.harness._conversation import Conversation
    from pidurable.harness._submission import Submission
    from pidurable.registry._env import Env


class Host(Protocol):
    """What stands above the runtime, as a task may use it."""

    @property
    def models(self) -> Models | None:
        """The models that the harness was opened with."""
        ...

    def env(self, conversation_id: int) -> Env:
        """Files and processes, as the agent of a conversation sees them."""
        ...

    def extensions(self, conversation_id: int) -> Sequence[str] | None:
        """The extensions that a conversation selects; None for all that are installed."""
        ...

    def conversation(self, conversation_id: int) -> Conversation:
        """A handle of a conversation."""
        ...

    def submission(self, submission_id: int) -> Submission:
        """A handle of a submission."""
        ...


def needs_harness(what: str) -> InvalidArgumentError:
    """The error for a task that asks a runtime without a harness."""
    return InvalidArgumentError(
        what,
        "tasks have this in a harness only, and this session was opened without one; "
        "use open_harness(...)",
    )


def needs_models() -> InvalidArgumentError:
    """The error for a task that asks a harness without models."""
    return InvalidArgumentError(
        "ctx.models", "this harness was opened without models; pass open_harness(models=...)"
    )
