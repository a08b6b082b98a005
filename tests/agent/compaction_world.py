"""Worlds whose conversations are compacted: a model that answers, and one script for summaries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import attrs
from agent_world import World, messages, text_of

from pidurable.agent._compaction_records import CompactionResult
from pidurable.agent._compaction_start import last_compaction
from pidurable.agent._models import ModelRequest
from pidurable.agent._script import RequestView, make_step
from pidurable.harness._open import Harness
from pidurable.records._entries import Entry
from pidurable.records._messages import SystemMessage, UserMessage
from pidurable.records._tasks import Outcome

GOOD = "The person counts; so far all was well."


def asks_for_summary(view: RequestView) -> bool:
    """Whether a request is for a summary."""
    return view.system.startswith("You write the summary")


def summary_requests(world: World) -> list[ModelRequest]:
    """The requests for summaries, in order."""
    return [each for each in world.model.requests if each.system.startswith("You write the")]


def other_requests(world: World) -> list[ModelRequest]:
    """The requests of generations, in order."""
    return [each for each in world.model.requests if not each.system.startswith("You write the")]


def compacted(
    *answers: Any, summaries: Sequence[Any] = (GOOD,), window: int | None = 4_000, **options: Any
) -> World:
    """A world with a small window. The nth summary request gets the nth summary, or the last one.

    Args:
        answers: What the model answers, by the number of inputs of the run; the last is repeated.
        summaries: Texts or steps.
        window: The tokens of the model's context; None is unknown.
        options: Of the world.
    """
    made: list[World] = []

    def nth(number: int) -> Any:
        def is_due(view: RequestView) -> bool:
            asked = len(summary_requests(made[0]))
            return asks_for_summary(view) and number == min(asked, len(summaries)) - 1

        return is_due

    steps = [
        attrs.evolve(make_step(step), when=nth(number)) for number, step in enumerate(summaries)
    ]
    options.setdefault("position", "run")
    options.setdefault("repeat_last", True)
    world = World(*steps, *answers, context_window=window, **options)
    made.append(world)
    return world


def long(number: int, tokens: int = 300) -> str:
    """An input with a marker of its own, of so many tokens."""
    marker = f"marker-{number:03}"
    return f"{marker} " + "w" * (4 * tokens - len(marker) - 1)


def markers(text: str) -> set[str]:
    """The markers in a text."""
    return set(re.findall(r"marker-\d+", text))


def request_text(request: ModelRequest) -> str:
    """All text of a request, without its system prompt."""
    return "\n".join(text_of(item.message) for item in request.messages)


def outcomes(harness: Harness) -> list[Outcome[CompactionResult]]:
    """How the compactions of a store ended, in order."""
    found = sorted(
        (task for task in harness.tasks(limit=10_000) if task.kind == "pi.compaction"),
        key=lambda task: task.id,
    )
    return [harness._runtime.outcome(task.id) for task in found if task.outcome is not None]


def heads(entries: Sequence[Entry]) -> list[Entry]:
    """The summaries of a history."""
    return [entry for entry in entries if entry.kind == "pi.compaction"]


async def said(harness: Harness) -> list[Any]:
    """What the model would be given now, without the prompt."""
    root = await harness.root()
    return [
        item.message for item in await root.context() if not isinstance(item.message, SystemMessage)
    ]


async def last(harness: Harness) -> dict[str, Any]:
    """How the last compaction of the root ended."""
    return last_compaction(harness.session, (await harness.root()).id)


def users(entries: Sequence[Entry]) -> list[str]:
    """What was said by persons, summaries apart."""
    return [
        text_of(message)
        for entry in entries
        if entry.kind != "pi.compaction"
        for message in messages([entry], UserMessage)
    ]
