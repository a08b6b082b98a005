"""Calls as their tools see them: what a running call offers, and what a tool gives back.

`ToolCall` is a protocol here; the agent implements it, and a test may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs
from typing_extensions import TypeVar

from pidurable.errors import InvalidArgumentError, show
from pidurable.records._ids import TaskId
from pidurable.records._messages import Block, JsonValue, TextBlock, Usage
from pidurable.registry._env import Env

if TYPE_CHECKING:
    from pidurable.agent._models import Models
    from pidurable.harness._conversation import Conversation

__all__ = ["CallResult", "Severity", "ToolCall", "ToolResult"]

S = TypeVar("S")

Severity = Literal["info", "warning", "error"]


class ToolCall(Protocol):
    """What a running call offers to its tool.

    Everything that is shown of a call is committed first. After an abort, every method that
    commits raises; return then.
    """

    @property
    def id(self) -> int:
        """The task of this call."""
        ...

    @property
    def name(self) -> str:
        """The name that the model called."""
        ...

    @property
    def conversation_id(self) -> int:
        """The conversation that the call was made in."""
        ...

    @property
    def env(self) -> Env:
        """Files and processes."""
        ...

    @property
    def models(self) -> Models:
        """The models that the harness was opened with."""
        ...

    def key(self, name: str) -> str:
        """Return this call's stable identity for the outside, the same after every restart."""
        ...

    async def output(self, text: str | bytes) -> None:
        """Add to the visible output, which is bounded by the tool's limits.

        Bytes are read as UTF-8, and what is none is replaced; a character may come in two parts.
        """
        ...

    async def details(self, value: JsonValue) -> None:
        """Replace what interfaces show besides; the model does not see it."""
        ...

    async def diagnostic(self, severity: Severity, text: str) -> None:
        """Add a remark for the model and for interfaces."""
        ...

    async def memo(self, name: str, candidate: JsonValue) -> JsonValue:
        """Store a value under a name once and return the stored one: the first writer wins."""
        ...

    def commit(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction; it is committed when the block ends."""
        ...

    async def create_task(
        self, definition: Any, input: Any, *, key: str | None = None
    ) -> TaskId[Any]:
        """Create a task that this call owns; with a key, once, and found again later."""
        ...

    async def child(self, *, key: str = "child", agent: Any = None) -> Conversation:
        """Return the conversation that this call owns under the key, created at first use."""
        ...

    def conversation(self, conversation_id: int) -> Conversation:
        """Return a handle of a conversation that this call may reach, to hand something in.

        Give what is handed in a `request_id` made with `key`, so that it is handed in once.
        """
        ...

    async def put_blob(self, data: bytes) -> str:
        """Store bytes, an image say, and return the name that an `ImageBlock` refers to them by."""
        ...

    async def execute_tool(
        self, name: str, arguments: JsonValue, *, key: str | None = None
    ) -> CallResult:
        """Call another tool of this conversation, as the model would, and return its result.

        The call is a task that this call owns, with the same hooks, approvals and replay policy.
        A `replay="safe"` tool that runs again gets the earlier calls back, finished or running, by
        their order, or by their keys. Concurrent ones need keys.
        """
        ...

    async def run_blocking(self, function: Callable[..., S], /, *args: Any) -> S:
        """Run a blocking function in a thread; it is waited for, also on abort."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; an abort ends it."""
        ...

    def report(self, error: BaseException) -> None:
        """Report an error that the call goes on without."""
        ...


def _names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        problem = f"expected a list of names, as in add_tools=[{names!r}]"
        raise InvalidArgumentError("add_tools", problem, show(names))
    return tuple(names)


@attrs.frozen
class ToolResult:
    """What a tool gives back when a string or plain JSON is not enough.

    What it asks of the run (`add_tools`, `terminate`, `handoff`) counts for calls of the model. A
    nested call's goes to its caller, in the `CallResult`, and counts where the caller asks for the
    same in its own result.
    """

    content: str | Sequence[Block] | None = None
    """What the model sees; None stands for what `output()` collected."""
    details: JsonValue = attrs.field(default=None, kw_only=True)
    """For interfaces; None keeps what `call.details()` stored last."""
    error: bool = attrs.field(default=False, kw_only=True)
    """An error result; the call completes all the same."""
    structured: JsonValue = attrs.field(default=None, kw_only=True)
    """Checked against the tool's `output_schema`, if it declares one."""
    add_tools: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=_names)
    """Names of installed tools that the conversation gets from now on."""
    terminate: bool = attrs.field(default=False, kw_only=True)
    """End the run, if every result of the round says so."""
    handoff: str | None = attrs.field(default=None, kw_only=True)
    """Continue the input in a fresh context that starts with this note."""
    usage: Usage | None = attrs.field(default=None, kw_only=True)
    """What the tool itself used of models."""


@attrs.frozen(kw_only=True)
class CallResult:
    """What a nested call gave: the result of a tool that another tool called."""

    task: int
    """The task of the nested call."""
    blocks: tuple[Block, ...]
    """What a model would see of it: text and images."""
    is_error: bool = False
    code: str | None = None
    """Of an error: one of the stable codes, as `tool_error`, `denied` or `aborted`."""
    structured: JsonValue = None
    details: JsonValue = None
    add_tools: tuple[str, ...] = ()
    """What it asks of the run, as `terminate` and `handoff` do: none of it counts by itself. A
    caller that wants it to puts it into the `ToolResult` of its own."""
    terminate: bool = False
    handoff: str | None = None

    @property
    def text(self) -> str:
        """The text blocks, joined."""
        return "".join(block.text for block in self.blocks if isinstance(block, TextBlock))
