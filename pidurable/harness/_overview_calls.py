"""The part of a harness that looks over the whole session: its conversations, what they spent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pidurable.harness._listing import ListedConversation, listed_conversations
from pidurable.harness._usage import total_usage
from pidurable.records._messages import Usage

if TYPE_CHECKING:
    from pidurable.session._session import Session


class OverviewCalls:
    """What is asked of all conversations together, or of those below one owner."""

    session: Session

    async def list_conversations(
        self, *, busy: bool = False, limit: int = 1_000
    ) -> list[ListedConversation]:
        """Return where conversations stand; see `Reader.list_conversations`."""
        storage = self.session.storage
        return await self.session.blocking.run(
            lambda: listed_conversations(storage, busy=busy, limit=limit)
        )

    async def usage(self, *, below: int | None = None) -> dict[str, Usage]:
        """Tokens and cost by model, of all conversations; failed and cut attempts count too.

        Args:
            below: Only those of this task or conversation, and of all below it. A conversation's
                own are what it has spent since it was made: a fork starts at zero.

        Raises:
            NotFoundError: This session has no such task or conversation.
        """
        return await total_usage(self.session, "models", below)

    async def tool_usage(self, *, below: int | None = None) -> dict[str, Usage]:
        """What tools say that they have spent, by tool. See `usage`.

        Args:
            below: As for `usage`.

        Raises:
            NotFoundError: As `usage`.
        """
        return await total_usage(self.session, "tools", below)
