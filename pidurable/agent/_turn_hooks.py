"""The hooks of a generation: what they are asked in one turn, and what their answers come to.

What a hook makes is held to the rules that hold for everybody: a request that no provider would
accept is not sent, and content that nobody could have handed in continues no run. Nothing is built
for hooks where no extension has any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from pidurable.agent._asking import (
    Observed,
    ask_before_request,
    ask_observers,
    ask_on_yield,
)
from pidurable.agent._checkpoints import GenerationContext, run_of
from pidurable.agent._hooks import AfterResponse, AfterTools, BeforeRequest, OnYield, Stop
from pidurable.agent._inbox import blocks_of
from pidurable.agent._models import RequestMessage
from pidurable.agent._strict import StrictRequestError, check_request
from pidurable.errors import InvalidArgumentError, NotJsonError, show
from pidurable.records import _codec, _json
from pidurable.records._entries import own_message
from pidurable.records._messages import (
    AssistantMessage,
    SystemMessage,
    ToolResultMessage,
    UserMessage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pidurable.agent._models import ModelRequest
    from pidurable.records._messages import Block

_MESSAGES = (AssistantMessage, SystemMessage, ToolResultMessage, UserMessage)


async def request_by_hooks(
    ctx: GenerationContext, request: ModelRequest, *, again: Callable[[], ModelRequest]
) -> ModelRequest | Stop:
    """The request as the `before_request` hooks want it sent, or the first `Stop`.

    Nothing of it is stored: the hooks are asked again where the request is sent again. One that no
    provider would accept ends the run: what a hook wanted to be left out is not sent after all.

    Args:
        ctx: The generation.
        request: As it was fixed.
        again: Makes the same request of records of its own.
    """
    if not ctx.handlers("before_request"):
        return request
    # Their own copy: what a handler does to it by hand changes nothing.
    own = again()
    given = tuple(own.messages)
    messages = await ask_before_request(
        ctx,
        BeforeRequest(
            **_who(ctx),
            model=request.model,
            thinking=request.thinking,
            system=request.system,
            messages=given,
            tools=own.tools,
        ),
    )
    if isinstance(messages, Stop) or messages is given:
        return messages if isinstance(messages, Stop) else request
    made = attrs.evolve(request, messages=messages)
    problem = _refusal(made)
    return made if problem is None else Stop(f"the before_request hooks made a {problem}")


def _refusal(request: ModelRequest) -> str | None:
    """What is wrong with a request that hooks made, or None."""
    for place, item in enumerate(request.messages):
        if not isinstance(item, RequestMessage) or not isinstance(item.message, _MESSAGES):
            return f"request whose message {place} is {show(item)}"
    try:
        check_request(request)
    except StrictRequestError as error:
        return f"request that no provider accepts: {error.detail}"
    except (AttributeError, TypeError, ValueError) as error:
        # A message of the right class, and something else than it should hold.
        return f"request that cannot be sent: {type(error).__name__}: {error}"
    return None


def _own(answer: AssistantMessage) -> AssistantMessage:
    """An answer for hooks: what they do to it by hand must not be what is stored, and run."""
    own = own_message(answer)
    assert isinstance(own, AssistantMessage)
    return own


async def observers_of_answer(ctx: GenerationContext, answer: AssistantMessage) -> list[Observed]:
    """Tell the `after_response` hooks of an answer that is about to be stored."""
    if not ctx.handlers("after_response"):
        return []
    asked = AfterResponse(**_who(ctx), answer=_own(answer))
    return await ask_observers(ctx, "after_response", asked)


async def observers_of_round(
    ctx: GenerationContext, assistant: int, missing: Sequence[ToolResultMessage]
) -> list[Observed]:
    """Tell the `after_tools` hooks of a round whose calls are all terminal.

    Args:
        ctx: The generation.
        assistant: The entry of the answer.
        missing: The results that are stored with the end of the round.
    """
    if not ctx.handlers("after_tools"):
        return []
    found = {each.call[1]: each for each in missing}
    before: int | None = None
    # Everything that came since the answer: results above all, since nothing is placed in a round.
    while entries := await ctx.snapshot.history(after=assistant, before=before, limit=1_000):
        for entry in entries:
            for each in entry.messages:
                if isinstance(each, ToolResultMessage) and each.call[0] == assistant:
                    found[each.call[1]] = each
        before = entries[0].id
    results = tuple(found[index] for index in sorted(found))
    asked = AfterTools(**_who(ctx), assistant=assistant, results=results)
    return await ask_observers(ctx, "after_tools", asked)


async def continuation(ctx: GenerationContext, answer: AssistantMessage) -> Sequence[Block] | None:
    """What the `on_yield` hooks go on with after an answer without calls; None: the run ends."""
    if not ctx.handlers("on_yield"):
        return None
    said = await ask_on_yield(ctx, OnYield(**_who(ctx), answer=_own(answer)))
    if said is None:
        return None
    try:
        blocks = blocks_of(said.content)
        whole = _codec.encode_messages([UserMessage(blocks=blocks, at_us=0)])
        _json.dumps(whole, path="$.content", bytes_max=ctx.settings.value_bytes_max // 2)
        return blocks
    except (InvalidArgumentError, NotJsonError) as problem:
        ctx.report(
            f"the run ends, since what an on_yield hook continues with is no input: {problem}"
        )
        return None


def _who(ctx: GenerationContext) -> dict[str, Any]:
    return {
        "conversation_id": ctx.conversation_id,
        "task": int(ctx.task_id),
        "run": run_of(ctx),
        "turn": ctx.input.turn,
    }
