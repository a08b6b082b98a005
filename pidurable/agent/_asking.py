"""How the answers of several hooks come together: the rule of each hook of the built-in tasks.

| hook | rule |
|---|---|
| before_request | messages are replaced in order; the first `Stop` wins |
| after_response, after_tools | everybody observes; what they return is run in the deciding commit |
| on_yield | the first that continues wins |
| before_tool | rewrites in order; the first block wins; any ask asks, at the highest risk |
| after_tool, on_abort | the result is replaced in order |
| before_compact | the first decision wins |

A handler that raises, or answers something else, is reported and skipped; of `before_tool` that
blocks the call. One of `on_abort` that takes more than a minute is skipped too. Cancellation, the
end of the invocation and trouble of the storage pass.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from pidurable.agent._hooks import (
    AfterResponse,
    AfterTool,
    AfterTools,
    Ask,
    BeforeCompact,
    BeforeRequest,
    BeforeTool,
    BlockCall,
    Continue,
    Decline,
    OnAbort,
    OnYield,
    Rewrite,
    Risk,
    Staged,
    Stop,
    Summary,
    _Asked,
)
from pidurable.agent._models import RequestMessage
from pidurable.errors import NotJsonError, show
from pidurable.records import _json
from pidurable.records._readonly import copied_json
from pidurable.registry._tool import ToolResult
from pidurable.tasks._errors import error_info, stops_code
from pidurable.tasks._hooks import HookHandler, Raised, ask_handler, hook_place

if TYPE_CHECKING:
    from pidurable.tasks._context import TaskContext
    from pidurable.tasks._transaction import TaskTransaction

    AnyContext = TaskContext[Any, Any, Any]
    AnyTransaction = TaskTransaction[Any, Any]

ABORT_HOOK_SECONDS_MAX: Final = 60.0
"""Of one `on_abort` handler."""

_RISKS: tuple[Risk, ...] = ("high", "medium", "low")


# --- pi.generation ------------------------------------------------------------------------------


async def ask_before_request(
    ctx: AnyContext, request: BeforeRequest
) -> tuple[RequestMessage, ...] | Stop:
    """The messages to send, as the hooks have left them, or the first Stop."""
    for handler in ctx.handlers("before_request"):
        answer = await _answer(ctx, handler, "before_request", request)
        if isinstance(answer, Stop):
            return answer
        if isinstance(answer, Sequence) and all(isinstance(m, RequestMessage) for m in answer):
            request = attrs.evolve(request, messages=tuple(answer))
        elif answer is not None:
            _unexpected(ctx, handler, "before_request", answer, "RequestMessages or a Stop")
    return request.messages


@attrs.frozen(kw_only=True)
class Observed:
    """What an observer wants to stage in the deciding commit."""

    place: str
    stage: Staged


async def ask_observers(
    ctx: AnyContext, name: str, asked: AfterResponse | AfterTools
) -> list[Observed]:
    """Tell every `after_response` or `after_tools` hook; what they want to stage, in order."""
    staged: list[Observed] = []
    for handler in ctx.handlers(name):
        answer = await _answer(ctx, handler, name, asked)
        if callable(answer):
            staged.append(Observed(place=hook_place(name, handler), stage=answer))
        elif answer is not None:
            _unexpected(ctx, handler, name, answer, "a function of the transaction")
    return staged


async def commit_observed(
    ctx: AnyContext, observed: Sequence[Observed], decide: Callable[[AnyTransaction], None]
) -> None:
    """One commit: what observers stage, then the decision. One that fails is left out, reported.

    A decision is never lost for an observer: where the commit cannot be made with what they
    staged, it is made without. What is decided about the task is not theirs.
    """
    if not observed:
        # A body that awaits nothing costs less than a block, and most commits have no observer.
        await ctx._run(decide)
        return
    rest = list(observed)
    while True:
        failed: list[Observed] = []
        try:
            async with ctx.commit() as tx:
                for each in rest:
                    failed = [each]
                    tx.lend(each.place)
                    _stage(each, tx)
                failed = []
                tx.lend(None)
                decide(tx)
            return
        except BaseException as error:  # noqa: ASYNC103 - a cancellation passes
            if not rest or stops_code(error) or ctx.passes(error):
                raise
            # Only one of them, where that is known; else it was what they staged together.
            left_out = failed or rest
            info = error_info(error)
            for each in left_out:
                ctx.report(f"{each.place}: what it stages is left out: {info.type}: {info.message}")
            rest = [each for each in rest if each not in left_out]


def _stage(each: Observed, tx: AnyTransaction) -> None:
    came = each.stage(tx)
    if inspect.iscoroutine(came):
        came.close()
        problem = "an async function stages nothing; expected a plain one, as with tx.append"
        raise TypeError(problem)


async def ask_on_yield(ctx: AnyContext, answer: OnYield) -> Continue | None:
    """The first continuation, or None: the run ends."""
    for handler in ctx.handlers("on_yield"):
        said = await _answer(ctx, handler, "on_yield", answer)
        if isinstance(said, str):
            said = Continue(said)
        if isinstance(said, Continue):
            return said
        if said is not None:
            _unexpected(ctx, handler, "on_yield", said, "a text or a Continue")
    return None


# --- pi.tool ------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ToolDecision:
    """What the `before_tool` hooks decided together."""

    arguments: Any
    """The final ones, to be validated again if `rewritten`."""
    rewritten: bool = False
    block: str | None = None
    """The text for the model, if the call is not to run."""
    ask: Ask | None = None
    """What to ask a person first: the highest risk, every reason, the shortest time."""


async def ask_before_tool(ctx: AnyContext, call: BeforeTool) -> ToolDecision:
    """Rewrites in order; the first block wins and ends the asking; any ask asks."""
    rewritten = False
    asks: list[Ask] = []
    for handler in ctx.handlers("before_tool"):
        given = attrs.evolve(call, arguments=copied_json(call.arguments))
        answer = await _answer(ctx, handler, "before_tool", given, blocks=True)
        if answer is None:
            continue
        if isinstance(answer, Rewrite):
            try:
                arguments = _json.check_json(answer.arguments, "$.arguments")
            except NotJsonError as error:
                text = f"{hook_place('before_tool', handler)} gave arguments that are {error}"
                answer = BlockCall(text)
            else:
                call = attrs.evolve(call, arguments=arguments)
                rewritten = True
                continue
        if isinstance(answer, Ask):
            asks.append(answer)
            continue
        if not isinstance(answer, BlockCall):
            expected = "a Rewrite, a BlockCall or an Ask"
            answer = BlockCall(_unexpected(ctx, handler, "before_tool", answer, expected))
        return ToolDecision(arguments=call.arguments, rewritten=rewritten, block=answer.text)
    return ToolDecision(arguments=call.arguments, rewritten=rewritten, ask=_together(asks))


def _together(asks: Sequence[Ask]) -> Ask | None:
    if not asks:
        return None
    times = [each.seconds for each in asks if each.seconds is not None]
    return Ask(
        risk=next(risk for risk in _RISKS if any(each.risk == risk for each in asks)),
        reason="\n".join(dict.fromkeys(each.reason for each in asks if each.reason)),
        seconds=min(times, default=None),
    )


Accept = Callable[[ToolResult], ToolResult]
"""Takes a result in the place of the one before, and returns it as the next hook is to see it.

Raises `TypeError` or `ValueError` for one that no call may have."""


async def ask_after_tool(
    ctx: AnyContext, call: AfterTool, accept: Accept | None = None
) -> ToolResult | None:
    """The result that takes the place of the tool's, or None: nobody replaced it."""
    return await _replaced(ctx, "after_tool", call, accept)


async def ask_on_abort(
    ctx: AnyContext, call: OnAbort, accept: Accept | None = None
) -> ToolResult | None:
    """The result that takes the place of the aborted one, or None: nobody replaced it.

    A handler that takes too long is skipped: nobody could abort an abort.
    """
    return await _replaced(ctx, "on_abort", call, accept)


async def _replaced(
    ctx: AnyContext, name: str, call: AfterTool | OnAbort, accept: Accept | None
) -> ToolResult | None:
    result: ToolResult | None = None
    for handler in ctx.handlers(name):
        # What one handler does to its record is not to reach the next.
        given = attrs.evolve(call, arguments=copied_json(call.arguments))
        answer: Any = None
        with trio.move_on_after(
            ABORT_HOOK_SECONDS_MAX if name == "on_abort" else math.inf
        ) as limit:
            answer = await _answer(ctx, handler, name, given)
        if limit.cancelled_caught:
            place = hook_place(name, handler)
            ctx.report(f"{place} took longer than {ABORT_HOOK_SECONDS_MAX:g} s and is skipped")
        elif isinstance(answer, ToolResult):
            try:
                result = answer if accept is None else accept(answer)
            except (TypeError, ValueError) as problem:
                place = hook_place(name, handler)
                ctx.report(f"{place} gave a result that no call may have, skipped: {problem}")
                continue
            call = attrs.evolve(call, result=result)
        elif answer is not None:
            _unexpected(ctx, handler, name, answer, "a ToolResult")
    return result


# --- pi.compaction ------------------------------------------------------------------------------


async def ask_before_compact(ctx: AnyContext, range: BeforeCompact) -> Decline | Summary | None:
    """The first decision, or None: a model is asked for the summary."""
    for handler in ctx.handlers("before_compact"):
        answer = await _answer(ctx, handler, "before_compact", range)
        if isinstance(answer, Decline | Summary):
            return answer
        if answer is not None:
            _unexpected(ctx, handler, "before_compact", answer, "a Decline or a Summary")
    return None


# --- one handler --------------------------------------------------------------------------------


async def _answer(
    ctx: AnyContext, handler: HookHandler, name: str, asked: _Asked, *, blocks: bool = False
) -> Any:
    async def memo(memo_name: str, candidate: Any) -> Any:
        return await ctx.memo(f"{handler.extension}:{memo_name}", candidate)

    given = attrs.evolve(asked, memo_by=memo)
    answer = await ask_handler(handler, name, (given,), {}, ctx.passes)
    if not isinstance(answer, Raised):
        return answer
    if not blocks:
        ctx.report(f"{answer.place} raised and is skipped: {answer.what}")
        return None
    ctx.report(f"{answer.place} raised, so the call is blocked: {answer.what}")
    return BlockCall(f"The call was not run: {answer.place} raised {answer.what}")


def _unexpected(
    ctx: AnyContext, handler: HookHandler, name: str, answer: object, expected: str
) -> str:
    text = f"{hook_place(name, handler)} answered {show(answer)}, expected {expected} or None"
    ctx.report(text)
    return text
