"""Hooks of the built-in tasks: what extensions are asked, and what they may answer.

`hook(Generation, before_request=...)`, `hook(ToolTask, before_tool=...)` and
`hook(Compaction, before_compact=...)` attach handlers. Each is asked in the order of installation,
as the extensions stood when the phase began. How the answers of several come together is the task's
own rule: `_asking` has it. A handler gets a frozen record; what it was given is a copy, so that
only its answer changes anything.

A handler that raises is reported and skipped, but for `before_tool`, where it blocks the call: what
guards must not fail open. A handler may be asked again after a crash; what must not be decided
twice it fixes with the record's `memo`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from pidurable.errors import InvalidArgumentError, show
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    JsonValue,
    Message,
    ToolDeclaration,
    ToolResultMessage,
)

if TYPE_CHECKING:
    from pidurable.agent._models import RequestMessage
    from pidurable.registry._tool import Tool, ToolResult
    from pidurable.tasks._transaction import TaskTransaction

__all__ = [
    "AfterResponse",
    "AfterTool",
    "AfterTools",
    "Ask",
    "BeforeCompact",
    "BeforeRequest",
    "BeforeTool",
    "BlockCall",
    "CompactReason",
    "CompactionHooks",
    "Continue",
    "Decline",
    "GenerationHooks",
    "OnAbort",
    "OnYield",
    "Rewrite",
    "Risk",
    "Staged",
    "Stop",
    "Summary",
    "ToolHooks",
]

Risk = Literal["low", "medium", "high"]
CompactReason = Literal["threshold", "background", "overflow", "manual"]

Staged = Callable[["TaskTransaction[Any, Any]"], object]
"""What an observer may return: run on the transaction of the commit that decides, so that what it
stages is stored with the decision or not at all. It decides nothing about the task itself, and
reaches what a tool of the conversation would. It is a plain function: an async one stages nothing,
which is reported. Where it raises, that is reported and the decision is committed without it."""

Memo = Callable[[str, Any], Awaitable[Any]]


async def _no_memo(name: str, candidate: Any) -> Any:
    """Stand in where a record is made by hand, as in a test of a handler."""
    return candidate


@attrs.frozen(kw_only=True)
class _Asked:
    """What every record has."""

    conversation_id: int
    task: int
    """The task that asks."""
    _memo: Memo = attrs.field(default=_no_memo, alias="memo_by", repr=False, eq=False)

    async def memo(self, name: str, candidate: JsonValue) -> JsonValue:
        """Store a value under a name once and return the stored one: the first writer wins.

        The name is the extension's own: another extension's memo of the name is another one.
        """
        stored: JsonValue = await self._memo(name, candidate)
        return stored


# --- pi.generation ------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class BeforeRequest(_Asked):
    """A request that is about to be sent; its messages are a valid exchange."""

    run: int
    turn: int
    model: str
    thinking: str | None
    system: str
    messages: tuple[RequestMessage, ...]
    """As the hooks before this one have left them."""
    tools: tuple[ToolDeclaration, ...]


@attrs.frozen
class Stop:
    """End the run: its inputs are `unanswered`, `stopped`, with this reason as the detail."""

    reason: str = attrs.field(validator=attrs.validators.instance_of(str))


@attrs.frozen(kw_only=True)
class AfterResponse(_Asked):
    """An answer that is about to be stored."""

    run: int
    turn: int
    answer: AssistantMessage


@attrs.frozen(kw_only=True)
class AfterTools(_Asked):
    """A round whose calls are all terminal."""

    run: int
    turn: int
    assistant: int
    """The entry of the answer that made the calls."""
    results: tuple[ToolResultMessage, ...]
    """In call order."""


@attrs.frozen(kw_only=True)
class OnYield(_Asked):
    """An answer without calls: the run is about to end."""

    run: int
    turn: int
    answer: AssistantMessage


@attrs.frozen
class Continue:
    """Go on with the run: the content becomes a user message, and the next turn answers it."""

    content: str | Sequence[Block]


class GenerationHooks(Protocol):
    """The hooks of `Generation`."""

    async def before_request(
        self, request: BeforeRequest
    ) -> Sequence[RequestMessage] | Stop | None:
        """Replace the messages of this one request, in order of installation; first Stop wins."""
        ...

    async def after_response(self, answer: AfterResponse) -> Staged | None:
        """Observe an answer; what is returned is run in the commit that stores it."""
        ...

    async def after_tools(self, round: AfterTools) -> Staged | None:
        """Observe a round; what is returned is run in the commit that ends it."""
        ...

    async def on_yield(self, answer: OnYield) -> str | Continue | None:
        """Continue a run that would end; the first that continues wins."""
        ...


# --- pi.tool ------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class BeforeTool(_Asked):
    """A call that is about to run."""

    name: str
    arguments: Any
    """Valid for the tool, as the hooks before this one have left them."""
    tool: Tool[..., Any]
    nested: bool = False
    """Whether another call made it, and not the model."""
    grant: Any = None
    """The `PermissionRequest` that a person has granted: the hooks are asked again after that."""


@attrs.frozen
class Rewrite:
    """Run the call with these arguments, which are validated again."""

    arguments: JsonValue


@attrs.frozen
class BlockCall:
    """Do not run the call; the text is what the model is told."""

    text: str = attrs.field(validator=attrs.validators.instance_of(str))


def _check_expiry(_: object, __: object, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value < float("inf")):
        raise InvalidArgumentError("seconds", "expected seconds above 0, or None", show(value))


@attrs.frozen
class Ask:
    """Let a person decide before the call runs. Of several that ask the highest risk counts."""

    risk: Risk = "medium"
    reason: str = attrs.field(default="", validator=attrs.validators.instance_of(str))
    """What the person is told."""
    seconds: float | None = attrs.field(default=None, kw_only=True, validator=_check_expiry)
    """How long the request stays open; `Settings.permission_seconds_max` bounds it. None: that."""

    def __attrs_post_init__(self) -> None:
        if self.risk not in ("low", "medium", "high"):
            raise InvalidArgumentError(
                "risk", "expected 'low', 'medium' or 'high'", show(self.risk)
            )


@attrs.frozen(kw_only=True)
class AfterTool(_Asked):
    """A call that has run, and its result, which is about to be stored."""

    name: str
    arguments: Any
    nested: bool = False
    result: ToolResult
    """As the hooks before this one have left it."""


@attrs.frozen(kw_only=True)
class OnAbort(_Asked):
    """A call that was aborted, and the result that says so."""

    name: str
    arguments: Any
    nested: bool = False
    started: bool
    """Whether the tool may have run."""
    result: ToolResult


class ToolHooks(Protocol):
    """The hooks of `ToolTask`."""

    async def before_tool(self, call: BeforeTool) -> Rewrite | BlockCall | Ask | None:
        """Rewrite, block, or ask: rewrites in order, the first block wins, any Ask asks."""
        ...

    async def after_tool(self, call: AfterTool) -> ToolResult | None:
        """Replace the result, in order of installation."""
        ...

    async def on_abort(self, call: OnAbort) -> ToolResult | None:
        """Replace the result of an aborted call, in order of installation."""
        ...


# --- pi.compaction ------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class BeforeCompact(_Asked):
    """A part of the context that is about to be replaced by a summary."""

    why: CompactReason
    instructions: str | None
    """What a person asked for, in `conversation.compact(instructions)`."""
    messages: tuple[Message, ...]
    """What the summary would stand for, an earlier summary among them."""
    first_kept: int
    """The first entry that stays as it is."""
    tokens: int
    """Of the whole context, as far as they are known."""


@attrs.frozen
class Decline:
    """Do not compact now; the reason is shown."""

    reason: str = attrs.field(validator=attrs.validators.instance_of(str))


@attrs.frozen
class Summary:
    """Use this text; no model is asked. The rules for summaries hold for it too."""

    text: str = attrs.field(validator=attrs.validators.instance_of(str))


class CompactionHooks(Protocol):
    """The hooks of `Compaction`."""

    async def before_compact(self, range: BeforeCompact) -> Decline | Summary | None:
        """Decline, or supply the summary; the first decision wins."""
        ...
