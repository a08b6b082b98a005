"""`pidurable conversation list`: which conversations there are, and where each one stands."""

from __future__ import annotations

from typing import Any

import attrs

from pidurable.cli._errors import Exit, UsageError
from pidurable.cli._forms import show_list
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._render import clean_line, cut, duration, holder_lines
from pidurable.cli._tasks import check_store
from pidurable.harness._listing import ListedConversation
from pidurable.harness._reader import open_reader

__all__ = ["list_conversations"]

_HEADER = ("ID", "OWNER", "STATE", "QUEUED", "ACTIVE", "TOKENS", "MODEL", "ABOUT")
NAME_CELLS_MAX = 32
ABOUT_CELLS_MAX = 60


async def list_conversations(host: Host, options: Options, *, busy: bool, limit: int) -> int:
    """List conversations, the newest last."""
    if limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}")
    check_store(options.store)
    async with open_reader(options.store) as reader:
        found = await reader.list_conversations(busy=busy, limit=limit)
        holder = await reader.holder()
    now = host.now_us()
    if not show_list(
        *(host, options, found),
        id=lambda each: each.id,
        json=_json,
        header=_HEADER,
        row=lambda each: _row(each, now),
    ):
        return Exit.DONE
    if not found:
        host.err("no conversation is busy" if busy else "there is no conversation yet")
    elif len(found) == limit:
        host.err(f"the newest {limit}; --limit shows more")
    host.say(holder_lines(holder))
    return Exit.DONE


def _json(listed: ListedConversation) -> dict[str, Any]:
    return attrs.asdict(listed)


def _row(listed: ListedConversation, now_us: int) -> tuple[str, ...]:
    tokens = listed.usage["input_tokens"] + listed.usage["output_tokens"]
    return (
        str(listed.id),
        "-" if listed.owner is None else str(listed.owner),
        _state(listed),
        str(listed.queued) if listed.queued else "-",
        f"{duration(max(0, now_us - listed.active_us) / 1e6)} ago",
        f"{tokens:,}" if tokens else "-",
        cut(clean_line(listed.agent["model"] or "-"), NAME_CELLS_MAX),
        cut(_about(listed), ABOUT_CELLS_MAX),
    )


def _state(listed: ListedConversation) -> str:
    """Where it stands, with the id that one would type next."""
    if listed.state == "idle":
        return "idle"
    if listed.state == "asking":
        return f"asks {', '.join(map(str, listed.permissions))}"
    if listed.state == "blocked":
        return f"blocked, task {listed.generation}"
    return f"{listed.state}, turn {listed.turn}"


def _about(listed: ListedConversation) -> str:
    """Its key, where it has one that tells something, and what was said first."""
    parts = []
    if listed.key is not None and (listed.owner is None or not listed.title):
        parts.append(cut(clean_line(listed.key), NAME_CELLS_MAX))
    if listed.parent is not None:
        parts.append(f"fork of {listed.parent}")
    said = clean_line(listed.title)
    prefix = ", ".join(parts)
    return f"{prefix}: {said}" if prefix and said else prefix or said or "-"
