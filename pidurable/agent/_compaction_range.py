"""What a compaction replaces, and what it keeps: token counts, budgets, and where it may cut.

Tokens are the provider's count where there is one, of the newest answer that nothing has changed
the context after, and an estimate for what came since. Counting stops at a bound, so a request
costs what fits the window and never what the history holds.

A cut is an entry: everything from it on stays verbatim. It never parts a call from its result and
never reaches into an open round, whichever answer the provider's own order put where; so what is
left is always a valid exchange.
"""

from __future__ import annotations

import attrs

from pidurable.agent._models import render_system_message
from pidurable.agent._prompt import Told, estimate_tokens, replayed, told_by
from pidurable.records import _json
from pidurable.records._limits import Settings
from pidurable.records._messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolDeclaration,
    ToolResultMessage,
    UserMessage,
)
from pidurable.session._context import ModelContext

IMAGE_TOKENS = 1_200
"""What an image counts, of which providers charge some hundreds to some thousands."""

_LARGEST_SHOWN = 3


# --- counting ---------------------------------------------------------------------------------


def text_tokens(text: str) -> int:
    """An estimate of the tokens of a text: four bytes are one, so that no script is belittled."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return estimate_tokens(size)


def message_tokens(message: Message) -> int:
    """An estimate of what one message adds to a request; a system message without its tools."""
    if isinstance(message, SystemMessage):
        return text_tokens(render_system_message(message))
    total = 0
    for block in message.blocks:
        if isinstance(block, TextBlock | ThinkingBlock):
            total += text_tokens(block.text)
        elif isinstance(block, ToolCallBlock):
            total += text_tokens(block.name) + text_tokens(_json.dumps(block.arguments))
        else:
            total += IMAGE_TOKENS
    return total


def tool_tokens(tool: ToolDeclaration) -> int:
    """An estimate of what the declaration of a tool adds to a request."""
    return text_tokens(tool.name + tool.description) + text_tokens(_json.dumps(tool.schema))


def fixed_tokens(told: Told) -> int:
    """An estimate of what every request carries, whatever was said: sections and tools."""
    sections = sum(text_tokens(text) for text in told.sections.values())
    return sections + sum(tool_tokens(tool) for tool in told.tools.values())


def context_tokens(context: ModelContext, *, most: int | None = None) -> int:
    """How large a request of this context is, in tokens.

    Args:
        context: The context.
        most: Stop as soon as it is more; the result is then only known to be above it.
    """
    total = 0
    for place in range(len(context) - 1, -1, -1):
        item = context[place]
        message = item.message
        if isinstance(message, AssistantMessage) and item.entry > context.changed:
            usage = message.usage
            if usage.input_tokens > 0:
                return total + usage.input_tokens + usage.output_tokens
        total += message_tokens(message)
        if most is not None and total > most:
            return total
    return total + sum(tool_tokens(tool) for tool in told_by(context).tools.values())


# --- budgets ----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Budget:
    """How much of a context window is for what, in tokens."""

    window: int | None
    """None: unknown, so that only an overflow tells."""
    reserve: int
    """Left for the answer; above the rest of the window a request waits for a compaction."""
    keep: int
    """What stays verbatim."""
    background: int
    """How much before that a compaction begins in the background."""

    @property
    def blocking_above(self) -> int | None:
        """Above so many tokens the next request waits for a compaction; None for never."""
        return None if self.window is None else self.window - self.reserve

    @property
    def background_above(self) -> int | None:
        """Above so many tokens a compaction begins while work goes on; None for never."""
        return None if self.window is None else self.window - self.reserve - self.background

    @property
    def growth(self) -> int:
        """How much a context must grow after a compaction before the next begins by itself."""
        return self.keep // 4 if self.window is None else self.window // 16


def budget_of(window: int | None, settings: Settings, fixed: int = 0) -> Budget:
    """Share out a window.

    Reserve and background shrink to a quarter of a small window, and what is kept to half of it;
    where the prompt and the tools alone leave less room, to half of that.

    Args:
        window: Tokens of the model's context window, or None if it is not known.
        settings: What a large window is shared out by.
        fixed: Tokens that no compaction can remove.
    """
    if window is None:
        return Budget(
            window=None,
            reserve=settings.reserve_tokens,
            keep=settings.keep_recent_tokens,
            background=settings.background_tokens,
        )
    reserve = min(settings.reserve_tokens, window // 4)
    keep = min(settings.keep_recent_tokens, window // 2, max(0, window - reserve - fixed) // 2)
    background = min(settings.background_tokens, window // 4)
    return Budget(window=window, reserve=reserve, keep=keep, background=background)


# --- ranges -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Range:
    """What is to be replaced: the messages of a context before `stop`."""

    cut: int
    """The first entry that is kept."""
    stop: int
    """The place of its first message in the context."""
    replaced_tokens: int
    kept_tokens: int


def choose_range(context: ModelContext, keep: int, unanswered: int = 0) -> Range | None:
    """Choose where to cut, or None where nothing can be replaced.

    As much as fits `keep` is kept; where even the last part that may stand alone is larger, that
    part. What users have said since the last answer is kept as far as it fits `unanswered`: a model
    is to read it as it was said. O(context): not for every request.

    Args:
        context: The context.
        keep: Tokens of what is recent.
        unanswered: Tokens of what nobody has answered yet, where that is more.
    """
    items = list(context)
    tokens = [message_tokens(item.message) for item in items]
    limit = _open_round(context)
    last_answer = _last_answer(context)
    chosen: int | None = None
    kept = 0
    for place in reversed(_places_to_cut(context)):
        if place > limit:
            continue
        size = sum(tokens[place:]) if chosen is None else kept + sum(tokens[place:chosen])
        most = max(keep, unanswered) if place > last_answer else keep
        if chosen is not None and size > most:
            break
        chosen, kept = place, size
        if size > most:
            break
    if chosen is None:
        return None
    replaced = [
        place
        for place, item in enumerate(items[:chosen])
        if not isinstance(item.message, SystemMessage)
    ]
    if all(items[place].entry == context.head for place in replaced):
        # Nothing but the summary that stands there already.
        return None
    return Range(
        cut=items[chosen].entry,
        stop=chosen,
        replaced_tokens=sum(tokens[place] for place in replaced),
        kept_tokens=kept,
    )


def _places_to_cut(context: ModelContext) -> list[int]:
    """The places at which everything before has older entries than everything from there on."""
    items = list(context)
    # A system message may stand elsewhere than its entry, and the head is newer than what it heads.
    bound = [
        None if isinstance(item.message, SystemMessage) or item.entry == context.head else item
        for item in items
    ]
    newest = 0
    before: list[int] = []
    for item in bound:
        before.append(newest)
        newest = newest if item is None else max(newest, item.entry)
    oldest: int | None = None
    places: list[int] = []
    for place in range(len(items) - 1, -1, -1):
        item = bound[place]
        if item is None:
            continue
        oldest = item.entry if oldest is None else min(oldest, item.entry)
        alone = not isinstance(item.message, ToolResultMessage)
        if alone and item.entry == oldest and before[place] < item.entry:
            places.append(place)
    places.reverse()
    return places


def _last_answer(context: ModelContext) -> int:
    """The place of the newest answer, or -1."""
    for place in range(len(context) - 1, -1, -1):
        if isinstance(context[place].message, AssistantMessage):
            return place
    return -1


def _open_round(context: ModelContext) -> int:
    """The place of the newest answer if a call of it has no result yet, or the end."""
    end = len(context)
    is_open = False
    for place in range(end - 1, -1, -1):
        item = context[place]
        if isinstance(item.message, AssistantMessage):
            return place if is_open else end
        if isinstance(item.message, ToolResultMessage):
            # What stands in for a result has the entry of its call; a result has one of its own.
            is_open = is_open or item.entry == item.message.call[0]
    return end


def baseline_before(context: ModelContext, cut: int, at_us: int) -> SystemMessage | None:
    """All that the model had been told before the cut, as one message.

    What it was told since stays where it is and is replayed after it, so that it knows the same.
    """
    told = replayed(
        item.message
        for item in context
        if isinstance(item.message, SystemMessage)
        and (item.entry < cut or item.entry == context.head)
    )
    if not told.sections and not told.tools:
        return None
    return SystemMessage(
        sections=dict(told.sections), tools_added=tuple(told.tools.values()), at_us=at_us
    )


def largest_items(context: ModelContext) -> str:
    """Name what takes most of a context, for somebody who has to make room."""
    told = told_by(context)
    sizes = [
        (text_tokens(text), f"the section {name!r} of the system prompt")
        for name, text in told.sections.items()
    ]
    sizes += [
        (tool_tokens(tool), f"the declaration of the tool {tool.name!r}")
        for tool in told.tools.values()
    ]
    sizes += [
        (message_tokens(item.message), f"{_role(item.message)} of entry {item.entry}")
        for item in context
        if not isinstance(item.message, SystemMessage)
    ]
    # A stable sort: of equal ones the first.
    largest = sorted(sizes, key=lambda each: -each[0])[:_LARGEST_SHOWN]
    return "; ".join(f"{what}, about {tokens} tokens" for tokens, what in largest)


def _role(message: Message) -> str:
    if isinstance(message, UserMessage):
        return "the user message"
    if isinstance(message, ToolResultMessage):
        return f"the result of {message.name!r}"
    return "the answer"
