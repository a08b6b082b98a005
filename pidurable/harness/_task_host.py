"""The harness as its tasks see it through their contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from pidurable.agent._models import Models
    from pidurable.agent._services import AgentServices
    from pidurable.harness._conversation import Conversation
    from pidurable.harness._open import Harness
    from pidurable.harness._submission import Submission
    from pidurable.registry._env import Env


@final
class TaskHost:
    """What a harness adds to the contexts of its tasks."""

    def __init__(self, harness: Harness, services: AgentServices) -> None:
        self._harness = harness
        self._services = services

    @property
    def models(self) -> Models | None:
        """The models that the harness was opened with."""
        return self._services.models

    def env(self, conversation_id: int) -> Env:
        """Files and processes, as the conversation's agent sees them."""
        services = self._services
        return services.env_for(conversation_id, services.resolve(conversation_id))

    def extensions(self, conversation_id: int) -> Sequence[str] | None:
        """The extensions that the conversation's agent selects; None for all."""
        return self._services.selected(conversation_id)

    def conversation(self, conversation_id: int) -> Conversation:
        """A handle of a conversation."""
        return self._harness.conversation(conversation_id)

    def submission(self, submission_id: int) -> Submission:
        """A handle of a submission."""
        return self._harness.submission(submission_id)
