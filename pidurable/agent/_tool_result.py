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

from pidurable.agent._call_output import CallOutput
from pidurable.agent._output import Keep, bounded_output, clean_output
from pidurable.errors import NotJsonError, show
from pidurable.records import _json
from pidurable.records._limits import OUTPUT_BYTES_MAX, OUTPUT_LINES_MAX
from pidurable.records._messages import Block, ImageBlock, TextBlock, Usage
from pidurable.records._readonly import copied_json
from pidurable.registry._tool import NAME_PATTERN, Tool, ToolArgumentsError, ToolResult
from pidurable.session._transaction import Transaction
from pidurable.tasks._errors import bounded

ERROR_TEXT_BYTES_MAX = 12 * 1024
"""Of the text that says what went wrong, the tool's schema included."""

BLOCKS_MAX = 100
ADD_TOOLS_MAX = 100
MEDIA_TYPE_BYTES_MAX = 256
HANDOFF_BYTES_MAX = 64 * 1024

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
    details: Any = None
    structured: Any = None
    add_tools: tuple[str, ...] = ()
    terminate: bool = False
    handoff: str | None = None

    @property
    def data(self) -> dict[str, Any] | None:
        """Details and structured output, as they are stored beside the message."""
        data: dict[str, Any] = {}
        if self.details is not None:
            data["details"] = self.details
        if self.structured is not None:
            data["structured"] = self.structured
        return data or None

    def as_given(self) -> ToolResult:
        """The result as a tool would give it, for hooks that may replace it."""
        return ToolResult(
            self.blocks,
            details=copied_json(self.details),
            error=self.is_error,
            structured=copied_json(self.structured),
            add_tools=self.add_tools,
            terminate=self.terminate,
            handoff=self.handoff,
            usage=self.usage,
        )


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
        details=details,
    )


def _remarks(diagnostics: Sequence[dict[str, str]]) -> list[str]:
    return [f"{each['severity']}: {each['text']}" for each in diagnostics]


@attrs.frozen(kw_only=True)
class Bounds:
    """What a result may hold at most, and what its structured output must fit."""

    bytes_max: int
    lines_max: int
    keep: Keep
    value_bytes_max: int
    tool: Tool[..., Any] | None


def _text_bytes_max(bytes_max: int, value_bytes_max: int) -> int:
    """Of a tool's bytes, as many as can be stored.

    A text takes up to twice its bytes in JSON, and must fit one value with what is around it.
    """
    return min(bytes_max, value_bytes_max // 8)


def bounds_of(tool: Tool[..., Any] | None, value_bytes_max: int) -> Bounds:
    """The bounds of a tool's results; those of any tool where it is gone."""
    bytes_max = OUTPUT_BYTES_MAX if tool is None else tool.output_bytes_max
    return Bounds(
        bytes_max=_text_bytes_max(bytes_max, value_bytes_max),
        lines_max=OUTPUT_LINES_MAX if tool is None else tool.output_lines_max,
        keep="head" if tool is None else tool.output_keep,
        value_bytes_max=value_bytes_max,
        tool=tool,
    )


def final_result(
    returned: object, tool: Tool[..., Any], shown: CallOutput | None, value_bytes_max: int
) -> FinalResult:
    """Bring what a tool returned into the form in which it is stored.

    Args:
        returned: A `ToolResult`, or the content of one.
        tool: The tool.
        shown: What the call has put out; None where that is nothing.
        value_bytes_max: Most bytes of one stored value.

    Raises:
        TypeError: It is nothing that a tool may return, or its structured output does not fit the
            declared schema; the model is told so.
        NotJsonError: Details or structured output are not strict JSON, or too large together.
    """
    details = None if shown is None else shown.details
    diagnostics = () if shown is None else shown.diagnostics
    if type(returned) is str and details is None and not diagnostics:
        # What nearly every tool returns, in the same form as all the rest.
        text = bounded_output(
            returned,
            bytes_max=_text_bytes_max(tool.output_bytes_max, value_bytes_max),
            lines_max=tool.output_lines_max,
            keep=tool.output_keep,
        )
        return FinalResult(blocks=(TextBlock(text=text),))
    result = returned if isinstance(returned, ToolResult) else ToolResult(_content(returned))
    if result.content is None:
        # Already bounded, and its mark counts everything that was dropped.
        result = attrs.evolve(result, content="" if shown is None else shown.collector.marked())
    if result.details is None and details is not None:
        result = attrs.evolve(result, details=details)
    final = _finished(result, bounds_of(tool, value_bytes_max))
    if diagnostics:
        remarks = TextBlock(text="\n".join(_remarks(diagnostics)))
        final = attrs.evolve(final, blocks=(*final.blocks, remarks))
    return final


def replaced(before: FinalResult, by: ToolResult, bounds: Bounds) -> FinalResult:
    """The result that a hook puts in the place of another, in the form in which it is stored.

    Its content and details stay where the hook gives none. A call that ended `failed` did so.

    Raises:
        TypeError: It holds what no tool may return.
        NotJsonError: As for `final_result`.
    """
    if by.content is None:
        by = attrs.evolve(by, content=before.blocks)
    if by.details is None:
        by = attrs.evolve(by, details=before.details)
    final = _finished(by, bounds)
    code = before.code if before.is_error and final.is_error else final.code
    return attrs.evolve(final, code=code, error=before.error)


def _finished(result: ToolResult, bounds: Bounds) -> FinalResult:
    for name in ("error", "terminate"):
        said = getattr(result, name)
        if type(said) is not bool:
            raise TypeError(f"{name} of a result is True or False, not {show(said)}")
    final = FinalResult(
        blocks=_bounded_blocks(_blocks(result.content), bounds),
        is_error=result.error,
        code="tool_error" if result.error else None,
        usage=_checked_usage(result.usage),
        details=None if result.details is None else _json.owned_json(result.details, "$.details"),
        structured=_checked_structured(result.structured, bounds.tool),
        add_tools=_checked_names(result.add_tools),
        terminate=result.terminate,
        handoff=_checked_note(result.handoff, bounds),
    )
    _check_fits(final.data, bounds.value_bytes_max - bounds.value_bytes_max // 3)
    return final


def _check_fits(data: Any, bytes_max: int) -> None:
    """Refuse details and structured output that no commit could store.

    Both are stored as one value: in the entry of a model's call, and three levels deeper, beside
    its blocks, in the outcome of a nested one.
    """
    if data is None:
        return
    try:
        _json.dumps([[[data]]], path="$<result>", bytes_max=bytes_max)
    except NotJsonError as error:
        path = error.path.replace("$<result>[0][0][0]", "$<result>", 1)
        raise NotJsonError(path, error.problem, error.value) from error


def _checked_structured(structured: object, tool: Tool[..., Any] | None) -> Any:
    if structured is None:
        return None
    if tool is not None:
        try:
            tool.check_structured(structured)
        except ToolArgumentsError as problem:
            text = f"the structured output does not fit the output_schema of the tool: {problem}"
            raise TypeError(text) from problem
    return _json.check_json(structured, "$.structured")


def _checked_names(names: object) -> tuple[str, ...]:
    """Names of tools to add. Those that nobody installed are skipped, as everywhere."""
    assert isinstance(names, tuple)
    for name in names:
        if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None:
            raise TypeError(
                f"add_tools of a result names tools, as in add_tools=['grep'], not {show(name)}"
            )
    if len(names) > ADD_TOOLS_MAX:
        raise TypeError(f"a result adds at most {ADD_TOOLS_MAX} tools, not {len(names)}")
    return tuple(dict.fromkeys(names))


def _checked_note(note: object, bounds: Bounds) -> str | None:
    """The note that a fresh context starts with."""
    if note is None:
        return None
    if not isinstance(note, str) or not clean_output(note).strip():
        raise TypeError(f"the handoff of a result is a text that is not blank, not {show(note)}")
    bytes_max = min(HANDOFF_BYTES_MAX, bounds.bytes_max)
    return bounded_output(note, bytes_max=bytes_max, lines_max=bounds.lines_max, keep=bounds.keep)


def _content(returned: object) -> str | None:
    if returned is None or isinstance(returned, str):
        return returned
    try:
        return _json.dumps(returned, path="$<result>")
    except NotJsonError as error:
        raise TypeError(f"the tool returned something that is no JSON: {error}") from error


def _blocks(content: object) -> Sequence[Block]:
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


def _bounded_blocks(blocks: Sequence[Block], bounds: Bounds) -> tuple[Block, ...]:
    """The blocks within the tool's limits, which hold for all of them together."""
    left = bounds.bytes_max
    head = bounds.keep == "head"
    kept: list[Block] = []
    dropped = 0
    for block in blocks if head else reversed(blocks):
        if len(kept) >= BLOCKS_MAX or (isinstance(block, TextBlock) and left <= 0):
            dropped += 1
            continue
        if isinstance(block, TextBlock):
            part = _bounded_text(block.text, bounds, left)
            left -= len(part.text.encode())
            kept.append(part)
        elif isinstance(block, ImageBlock):
            media_type = bounded(clean_output(str(block.media_type)), MEDIA_TYPE_BYTES_MAX)
            kept.append(ImageBlock(blob=clean_output(block.blob), media_type=media_type))
    if not head:
        kept.reverse()
    if dropped:
        kept.append(TextBlock(text=f"[{dropped} blocks of output were dropped]"))
    return tuple(kept)


def _bounded_text(text: str, bounds: Bounds, bytes_max: int) -> TextBlock:
    """A text within what is left of the tool's limits."""
    return TextBlock(
        text=bounded_output(text, bytes_max=bytes_max, lines_max=bounds.lines_max, keep=bounds.keep)
    )


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
