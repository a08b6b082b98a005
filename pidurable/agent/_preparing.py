"""Preparing a request: what the agent is now, what it must be told, and where the context ends.

All of it is made before the commit that fixes the request, and stands only if nothing that a
request can tell came to the conversation meanwhile. A turn that follows a round is prepared before
the round ends, where nothing speaks against it: then the commit that ends the round fixes the
request too. Nothing is done to the outside in between, so that is one commit less, and no promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from pidurable.agent._ask import find_model
from pidurable.agent._checkpoints import GenerationContext, Request, Tx
from pidurable.agent._compaction_start import due
from pidurable.agent._documents import InboxDocument, address_of
from pidurable.agent._prompt import difference, render_sections, told_by
from pidurable.errors import InvalidArgumentError
from pidurable.records._messages import SystemMessage

if TYPE_CHECKING:
    from pidurable.agent._services import AgentServices


@attrs.frozen(kw_only=True)
class Unanswerable:
    """Why there is nothing to send: the run ends."""

    reason: str
    detail: str


@attrs.frozen(kw_only=True)
class Prepared:
    """All that fixes a request, as long as no request can tell what came after `cutoff`."""

    model: str
    thinking: str | None
    cutoff: int
    """The newest entry of the context that it was made by."""
    message: SystemMessage | None
    """What the model has not been told yet."""
    compaction: Literal["threshold", "background"] | None
    """Which compaction the request sets off."""

    def stands(self, tx: Tx, conversation_id: int) -> bool:
        """Whether the context is still the one that this was made by, as staged so far."""
        return not tx.shows_more(conversation_id, self.cutoff)

    def fix(
        self,
        tx: Tx,
        conversation_id: int,
        *,
        tries: int = 0,
        compacted: bool = False,
        overflowed: bool = False,
    ) -> Request:
        """Stage what is to be told, and return the request as it is fixed with it."""
        cutoff = self.cutoff
        if self.message is not None:
            cutoff = tx.append(conversation_id, kind="pi.system", messages=[self.message])
        return Request(
            model=self.model,
            thinking=self.thinking,
            cutoff=cutoff,
            tries=tries,
            compacted=compacted,
            overflowed=overflowed,
        )


async def prepare_request(
    services: AgentServices, ctx: GenerationContext, turn: int
) -> Prepared | Unanswerable:
    """Resolve the agent, render its prompt, and look at the context as it is now.

    Args:
        services: Of the harness.
        ctx: The generation that asks.
        turn: Whose request it is, as the run counts them.
    """
    session = services.session
    conversation = ctx.conversation_id
    agent = services.resolve(conversation)
    if turn > agent.turns_max:
        detail = f"the run has taken {agent.turns_max} turns, the most allowed"
        return Unanswerable(reason="turn_limit", detail=detail)
    model = find_model(services.models, agent.model)
    if isinstance(model, str):
        return Unanswerable(reason="no_model", detail=model)
    context = await session.context(conversation)
    if not context.asks_something:
        # A head, an edit, or an answer that somebody wrote has taken it away.
        detail = "nothing is left to answer: the context was changed during the run"
        return Unanswerable(reason="reset", detail=detail)
    told = told_by(context)
    try:
        env = services.env_for(conversation, agent)
    except InvalidArgumentError as error:
        if error.argument != "cwd":
            raise
        return Unanswerable(reason="no_folder", detail=str(error))
    now_us = session.clock.now_us()
    sections = await render_sections(agent, env, now_us, told, ctx.report)
    message = difference(told, sections, agent.declarations, now_us)
    return Prepared(
        model=model.name,
        thinking=agent.thinking,
        cutoff=context.cutoff,
        message=message,
        compaction=due(session, conversation, context, model.context_window, message),
    )


async def prepare_next(services: AgentServices, ctx: GenerationContext) -> Prepared | None:
    """Prepare the turn that follows a round, before the round has ended.

    None where its own generation is to prepare it, in a commit of its own: what is queued joins the
    run first, a compaction is due, or there is nothing to send, which it tells.
    """
    session = services.session
    inbox = session.doc_value(address_of(InboxDocument, ctx.conversation_id))
    if inbox is not None and inbox["items"]:
        return None
    found = await prepare_request(services, ctx, ctx.input.turn + 1)
    if isinstance(found, Unanswerable) or found.compaction is not None:
        return None
    return found
