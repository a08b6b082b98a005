"""Messages: what a model sees. The longest-lived schema of a store, and ours, not a provider's.

A message is a list of blocks. Each block may carry `opaque`, JSON that its provider needs back
unchanged (signatures, ids); nothing here reads it. A tool call is identified by the assistant entry
it stands in and its index among that message's tool calls, never by a provider's id.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

JsonValue = Any
"""None, bool, int, float, str, or a list or str-keyed dict of these."""

AssistantStatus = Literal["complete", "aborted", "failed", "deferred"]
StopReason = Literal["stop", "length", "tool_use", "refusal", "error", "aborted"]


@attrs.frozen(kw_only=True)
class TextBlock:
    """Text of a message."""

    text: str
    opaque: JsonValue = None


@attrs.frozen(kw_only=True)
class ThinkingBlock:
    """What a model thought aloud; shown, and given back to its own provider alone."""

    text: str
    opaque: JsonValue = None


@attrs.frozen(kw_only=True)
class ImageBlock:
    """An image, by the digest of its bytes."""

    blob: str
    """SHA-256 of the bytes, in hex."""
    media_type: str
    opaque: JsonValue = None


@attrs.frozen(kw_only=True)
class ToolCallBlock:
    """One call that a model asks for."""

    name: str
    arguments: JsonValue
    """The parsed arguments; a str where the model's text was not a JSON object."""
    opaque: JsonValue = None


Block = TextBlock | ThinkingBlock | ImageBlock | ToolCallBlock


@attrs.frozen(kw_only=True)
class Usage:
    """Tokens and cost of model requests. Numbers are never negative and always finite."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cost: float = 0.0
    """In US dollars, as estimated from the catalogue; 0.0 where no price is known."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cache_read_tokens=self.cache_read_tokens + other.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            cost=self.cost + other.cost,
        )


@attrs.frozen(kw_only=True)
class UserMessage:
    """What somebody said to the model."""

    blocks: tuple[Block, ...]
    at_us: int


@attrs.frozen(kw_only=True)
class AssistantMessage:
    """What the model answered, whole or as far as it came."""

    blocks: tuple[Block, ...]
    status: AssistantStatus
    stop_reason: StopReason
    model: str
    usage: Usage
    at_us: int
    error: str | None = None

    @property
    def text(self) -> str:
        """The text blocks, joined."""
        return "".join(block.text for block in self.blocks if isinstance(block, TextBlock))

    @property
    def tool_calls(self) -> tuple[ToolCallBlock, ...]:
        """The tool calls, in order; the place in this tuple is the index of the call."""
        return tuple(block for block in self.blocks if isinstance(block, ToolCallBlock))


@attrs.frozen(kw_only=True)
class ToolResultMessage:
    """What a tool call gave. `call` is (assistant entry, index of the call in it)."""

    call: tuple[int, int]
    name: str
    blocks: tuple[Block, ...]
    is_error: bool
    at_us: int
    code: str | None = None


@attrs.frozen(kw_only=True)
class ToolDeclaration:
    """What a model is told of a tool."""

    name: str
    description: str
    schema: JsonValue


@attrs.frozen(kw_only=True)
class SystemMessage:
    """A change of the system prompt: sections (None removes one), tools added and removed."""

    sections: dict[str, str | None]
    tools_added: tuple[ToolDeclaration, ...] = ()
    tools_removed: tuple[str, ...] = ()
    at_us: int


Message = UserMessage | AssistantMessage | ToolResultMessage | SystemMessage
