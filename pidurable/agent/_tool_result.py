"""Tool results: whatever a tool returns or raises, in the one form in which it is stored.

Holds for every result: its text is storable and bounded (by the tool's limits, plus a few KiB for
what we say ourselves), its blocks are text and images, and all of it can be encoded, so that the
commit which stores it cannot fail over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from pidurable.agent._output import bounded_output, clean_output
from pidurable.agent._progress import CallOutput
from pidurable.errors import NotJsonError, show
from pidurable.records import _json
from pidurable.records._messages import Block, ImageBlock, TextBlock, Usage
from pidurable.registry._tool import Tool, ToolResult
from pidurable.session._transaction import Transaction
from pidurable.tasks._errors import bounded

ERROR_TEXT_BYTES_MAX = 12 * 1024
"""Of the text that says what went wrong, the tool's schema included."""

BLOCKS_MAX = 100

_COUNT_MAX = 2**53


@attrs.frozen(kw_only=True)
class FinalResult:
    """A result in the form in which it is stored."""

    blocks: tuple[Block, ...]
    is_error: bool = False
    code: str | None = None
    error: str | None = None
    """Set when the call ends `failed`: what it owned and still lives is aborted."""
    usage: Usage | None = None
    data: dict[str, Any] | None = None
    """Details and structured output, for interfaces."""


def error_result(code: str, text: str, *, failed: bool = False) -> FinalResult:
    """An error result of our own words."""
    text = bounded(clean_output(text), ERROR_TEXT_BYTES_MAX)
    return FinalResult(
        blocks=(TextBlock(text=text),), is_error=True, code=code, error=text if failed else None
    )


def with_output(final: FinalResult, progress: CallOutput) -> FinalResult:
    """An error result, with the output that the call had collected before it."""
    output = progress.collector.marked()
    return _combined(final, output, progress.diagnostics, progress.details)


def with_committed(final: FinalResult, slot: dict[str, Any] | None) -> FinalResult:
    """An error result, with the output, details and diagnostics that `pi.live` has of the call."""
    if slot is None:
        return final
    return _combined(final, slot["output_tail"], slot["diagnostics"], slot["details"])


def _combined(
    final: FinalResult, output: str, diagnostics: list[dict[str, str]], details: Any
) -> FinalResult:
    parts = [block.text for block in final.blocks if isinstance(block, TextBlock)]
    if output.strip():
        parts.append(f"Output so far:\n{output}")
    parts += _remarks(diagnostics)
    return attrs.evolve(
        final,
        blocks=(TextBlock(text="\n".join(parts)),),
        data=None if details is None else {"details": details},
    )


def _remarks(diagnostics: list[dict[str, str]]) -> list[str]:
    return [f"{each['severity']}: {each['text']}" for each in diagnostics]


def final_result(returned: object, tool: Tool[..., Any], progress: CallOutput) -> FinalResult:
    """Bring what a tool returned into the form in which it is stored.

    Raises:
        TypeError: It is nothing that a tool may return; the model is told so.
        NotJsonError: Details or structured output are not strict JSON, or too large together.
        ToolArgumentsError: The structured output does not fit the declared schema.
    """
    result = returned if isinstance(returned, ToolResult) else ToolResult(_content(returned))
    data: dict[str, Any] = {}
    details = result.details if result.details is not None else progress.details
    if details is not None:
        data["details"] = _json.check_json(details, "$.details")
    if result.structured is not None:
        tool.check_structured(result.structured)
        data["structured"] = _json.check_json(result.structured, "$.structured")
    # Stored as one value, so both together must fit.
    _json.dumps(data, path="$<result>", bytes_max=progress.value_bytes_max)
    blocks = _bounded_blocks(_blocks(result.content, progress), tool)
    if progress.diagnostics:
        blocks = (*blocks, TextBlock(text="\n".join(_remarks(progress.diagnostics))))
    return FinalResult(
        blocks=blocks,
        is_error=bool(result.error),
        code="tool_error" if result.error else None,
        usage=_checked_usage(result.usage),
        data=data or None,
    )


def _content(returned: object) -> str | None:
    if returned is None or isinstance(returned, str):
        return returned
    try:
        return _json.dumps(returned, path="$<result>")
    except NotJsonError as error:
        raise TypeError(f"the tool returned something that is no JSON: {error}") from error


def _blocks(content: object, progress: CallOutput) -> Sequence[Block]:
    if content is None:
        # Already bounded, and its mark counts everything that was dropped.
        return (TextBlock(text=progress.collector.marked()),)
    if isinstance(content, str):
        return (TextBlock(text=content),)
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise TypeError(
            f"the content of a result is text, a list of blocks or None, not {show(content)}"
        )
    for block in content:
        if isinstance(block, TextBlock) and isinstance(block.text, str):
            continue
        if isinstance(block, ImageBlock) and isinstance(block.blob, str):
            continue
        raise TypeError(f"a result holds text and image blocks, not {show(block)}")
    return content


def _bounded_blocks(blocks: Sequence[Block], tool: Tool[..., Any]) -> tuple[Block, ...]:
    """The blocks within the tool's limits, which hold for all of them together."""
    left = tool.output_bytes_max
    head = tool.output_keep == "head"
    kept: list[Block] = []
    dropped = 0
    for block in blocks if head else reversed(blocks):
        if len(kept) >= BLOCKS_MAX or (isinstance(block, TextBlock) and left <= 0):
            dropped += 1
            continue
        if isinstance(block, TextBlock):
            text = bounded_output(
                block.text,
                bytes_max=left,
                lines_max=tool.output_lines_max,
                keep=tool.output_keep,
            )
            left -= len(text.encode())
            kept.append(TextBlock(text=text))
        elif isinstance(block, ImageBlock):
            media_type = clean_output(str(block.media_type))
            kept.append(ImageBlock(blob=clean_output(block.blob), media_type=media_type))
    if not head:
        kept.reverse()
    if dropped:
        kept.append(TextBlock(text=f"[{dropped} blocks of output were dropped]"))
    return tuple(kept)


def shown_blocks(tx: Transaction, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The blocks as they are stored: an image whose bytes are not in the store becomes a note."""
    return tuple(
        TextBlock(text=f"(an image, {block.media_type}, whose bytes were not stored)")
        if isinstance(block, ImageBlock) and not tx.has_blob(block.blob)
        else block
        for block in blocks
    )


def _checked_usage(usage: object) -> Usage | None:
    """Usage as a tool gives it, refused where it would spoil the sums."""
    if usage is None:
        return None
    if not isinstance(usage, Usage):
        raise TypeError(f"the usage of a result is a Usage, not {show(usage)}")
    for name, value in attrs.asdict(usage).items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 <= value <= _COUNT_MAX:
            raise TypeError(f"usage.{name} is {show(value)}, not a count of 0 or more")
        if name != "cost" and not isinstance(value, int):
            raise TypeError(f"usage.{name} is {show(value)}, not a whole number")
    return usage
