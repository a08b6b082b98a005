"""An owned conversation starts with a copy of its owner's agent, in the commit that makes it.

A participant, so that it holds however the conversation is made. What the body of the commit has
chosen for it already stays, and a fork has its parent's agent as of the fork entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pidurable.agent._documents import AgentDocument, address_of, update_doc
from pidurable.session._participants import Participant

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime


class OwnedAgents(Participant):
    """Copies agents in the commits that make owned conversations."""

    def __init__(self, runtime: Runtime) -> None:
        runtime.session.participants.append(self)

    # --- participant ---------------------------------------------------------------------

    def check_staged(self, tx: Any) -> None:
        for made in tx.conversations:
            if made.owner is None or made.parent is not None:
                continue
            if tx.doc_value(address_of(AgentDocument, made.id)) is not None:
                continue
            owner = tx.view.task(made.owner)
            above = tx.doc_value(address_of(AgentDocument, owner.conversation))
            if above is not None:
                update_doc(tx, AgentDocument, made.id, **above)
