"""The prompt: what a model has been told, what it must be told now, and the request itself.

The system prompt is data in the transcript: entries of kind `pi.system` carry named sections and
tool declarations, added and removed. Only what changed is appended, so that everything before stays
byte for byte what the provider has cached. A head that cuts the context takes what was told with
it; the next request then carries one complete baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import attrs

from pidurable.agent._models import ModelRequest, RequestMessage, render_system_message
from pidurable.agent._services import Agent
from pidurable.records._entries import Entry
from pidurable.records._messages import (
    SystemMessage,
    TextBlock,
    ToolDeclaration,
    ToolResultMessage,
    UserMessage,
)
from pidurable.registry._env import Env
from pidurable.registry._hooks import SectionInput
from pidurable.session._transcript import exchange

_INSTRUCTIONS = "instructions"


@attrs.define(eq=False)
class Told:
    """What the transcript says the model has been told."""

    sections: dict[str, str] = attrs.Factory(dict)
    tools: dict[str, ToolDeclaration] = attrs.Factory(dict)


def told_by(entries: Sequence[Entry]) -> Told:
    """Replay the system messages of a context range."""
    told = Told()
    for entry in entries:
        for message in entry.messages:
            if not isinstance(message, SystemMessage):
                continue
            for name, text in message.sections.items():
                if text is None:
                    told.sections.pop(name, None)
                else:
                    told.sections[name] = text
            for gone in message.tools_removed:
                told.tools.pop(gone, None)
            for tool in message.tools_added:
                told.tools[tool.name] = tool
    return told


async def render_sections(agent: Agent, env: Env, now_us: int, told: Told) -> dict[str, str]:
    """The sections as they are now, in the order of installation."""
    sections: dict[str, str] = {}
    if agent.instructions and agent.instructions.strip():
        sections[_INSTRUCTIONS] = agent.instructions
    extensions = agent.snapshot.extensions
    given = SectionInput(
        model=agent.model,
        instructions=agent.instructions,
        cwd=agent.cwd,
        extensions=tuple(
            name for name in extensions if agent.extensions is None or name in agent.extensions
        ),
        tools=tuple(tool.name for tool in agent.tools),
        env=env,
        now=datetime.fromtimestamp(now_us / 1e6, UTC),
        shown=dict(told.sections),
    )
    for section in agent.snapshot.sections(agent.extensions):
        text = await section.render(given)
        if text is not None:
            key = section.key
            sections[key] = f"<{key}>\n{text}\n</{key}>" if section.tag else text
    return sections


def declare(agent: Agent) -> dict[str, ToolDeclaration]:
    """The declarations of the tools that are offered now."""
    return {
        tool.name: ToolDeclaration(name=tool.name, description=tool.description, schema=tool.schema)
        for tool in agent.tools
    }


def difference(
    told: Told, sections: dict[str, str], tools: dict[str, ToolDeclaration], at_us: int
) -> SystemMessage | None:
    """What must be told now, or None."""
    patch: dict[str, str | None] = {
        name: text for name, text in sections.items() if told.sections.get(name) != text
    }
    patch.update({name: None for name in told.sections if name not in sections})
    added = tuple(tool for name, tool in tools.items() if told.tools.get(name) != tool)
    removed = tuple(name for name in told.tools if name not in tools)
    if not patch and not added and not removed:
        return None
    return SystemMessage(sections=patch, tools_added=added, tools_removed=removed, at_us=at_us)


def build_request(
    entries: Sequence[Entry],
    *,
    model: str,
    thinking: str | None,
    cutoff: int,
    options: Any = None,
) -> ModelRequest:
    """One request from the record: the entries in range up to the cutoff, as a valid exchange."""
    included = [entry for entry in entries if entry.id <= cutoff]
    messages = exchange(included)
    system = ""
    if messages and isinstance(messages[0].message, SystemMessage):
        system = render_system_message(messages[0].message)
        messages = messages[1:]
    request: list[RequestMessage] = []
    for item in messages:
        message = item.message
        entry = item.entry
        if isinstance(message, SystemMessage) and not render_system_message(message).strip():
            # It only changed the tools, which each request declares as they are.
            continue
        if isinstance(message, ToolResultMessage):
            entry = message.call[0]
        request.append(RequestMessage(message=message, entry=entry))
    return ModelRequest(
        model=model,
        messages=tuple(request),
        tools=tuple(told_by(included).tools.values()),
        system=system,
        thinking=thinking,
        options=options,
    )


def estimate_tokens(characters: int) -> int:
    """A rough count, where a provider gave none: four characters are a token."""
    return (characters + 3) // 4


def text_of(message: UserMessage) -> str:
    """The text blocks of a user message."""
    return "".join(block.text for block in message.blocks if isinstance(block, TextBlock))
