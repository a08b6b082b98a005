"""The prompt: what a model has been told, what it must be told now, and the request itself.

The system prompt is data in the transcript: entries of kind `pi.system` carry named sections and
tool declarations, added and removed. Only what changed is appended, so that everything before stays
byte for byte what the provider has cached. A head that cuts the context takes what was told with
it; the next request then carries one complete baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import attrs

from pidurable.agent._models import (
    ModelRequest,
    clean_text,
    render_system_message,
)
from pidurable.agent._request_messages import RequestMessages, images_in
from pidurable.agent._services import Agent
from pidurable.records._messages import (
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolDeclaration,
)
from pidurable.records._readonly import copied_json
from pidurable.registry._env import Env
from pidurable.registry._hooks import SectionInput
from pidurable.session._context import ModelContext, of_systems, system_places
from pidurable.tasks._errors import error_info, stops_code

if TYPE_CHECKING:
    from pidurable.session._session import Session

_INSTRUCTIONS = "instructions"


@attrs.define(eq=False)
class Told:
    """What the transcript says the model has been told."""

    sections: dict[str, str] = attrs.Factory(dict)
    tools: dict[str, ToolDeclaration] = attrs.Factory(dict)


def told_by(context: ModelContext) -> Told:
    """Replay the system messages of a context: what an edit has left out was not told.

    It is kept with the context, and not to be changed.
    """
    return of_systems(context, _replayed_of)


def _replayed_of(context: ModelContext) -> Told:
    return replayed(context.systems())


def _system_of(context: ModelContext) -> str:
    """The system prompt: the system message that leads, rendered."""
    leads = system_places(context)[:1] == [0]
    system = render_system_message(next(context.systems())) if leads else ""
    return system if system.strip() else ""


def replayed(messages: Iterable[SystemMessage]) -> Told:
    """What a model knows that was told these messages, in order."""
    told = Told()
    for message in messages:
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


async def render_sections(
    agent: Agent,
    env: Env,
    now_us: int,
    told: Told,
    report: Callable[[BaseException | str], None],
) -> dict[str, str]:
    """The sections as they are now, in the order of installation.

    One that raises is reported, and the model keeps what it was told last.
    """
    sections: dict[str, str] = {}
    if agent.instructions and agent.instructions.strip():
        sections[_INSTRUCTIONS] = agent.instructions
    rendered = agent.snapshot.sections(agent.extensions)
    if not rendered:
        return sections
    given = SectionInput(
        model=agent.model,
        instructions=agent.instructions,
        cwd=agent.cwd,
        extensions=agent.selected,
        tools=agent.tool_names,
        env=env,
        now=datetime.fromtimestamp(now_us / 1e6, UTC),
        shown=dict(told.sections),
    )
    for section in rendered:
        key = section.key
        try:
            text = await section.render(given)
        except BaseException as error:  # noqa: ASYNC103 - a cancellation passes
            # Code of an extension may raise anything.
            if stops_code(error):
                raise
            report(f"section {key!r} was not rendered: {_described(error)}")
            if key in told.sections:
                sections[key] = told.sections[key]
            continue  # noqa: ASYNC104 - a cancellation passes
        if text is not None:
            text = clean_text(text)
            sections[key] = f"<{key}>\n{text}\n</{key}>" if section.tag else text
    return sections


def _described(error: BaseException) -> str:
    info = error_info(error)
    return f"{info.type}: {info.message}"


def difference(
    told: Told, sections: dict[str, str], tools: dict[str, ToolDeclaration], at_us: int
) -> SystemMessage | None:
    """What must be told now, or None."""
    if told.sections == sections and told.tools == tools:
        return None
    patch: dict[str, str | None] = {
        name: text for name, text in sections.items() if told.sections.get(name) != text
    }
    patch.update({name: None for name in told.sections if name not in sections})
    added = tuple(tool for name, tool in tools.items() if told.tools.get(name) != tool)
    removed = tuple(name for name in told.tools if name not in tools)
    return SystemMessage(sections=patch, tools_added=added, tools_removed=removed, at_us=at_us)


def build_request(
    context: ModelContext, *, model: str, thinking: str | None, options: Any = None
) -> ModelRequest:
    """One request from the record: a context, as it is sent."""
    return ModelRequest(
        model=model,
        messages=RequestMessages(context),
        # A provider may rewrite the schemas that it is given; here they are of the record.
        tools=tuple(
            [
                ToolDeclaration(
                    name=tool.name,
                    description=tool.description,
                    schema=copied_json(tool.schema),
                )
                for tool in told_by(context).tools.values()
            ]
        ),
        system=of_systems(context, _system_of),
        thinking=thinking,
        options=options,
    )


async def with_images(session: Session, request: ModelRequest) -> ModelRequest:
    """Add the bytes of the images that a request shows. One that is missing is sent as a note."""
    wanted = images_in(request.messages)
    if not wanted:
        return request

    def read() -> Mapping[str, bytes]:
        found = {sha256: session.storage.blob(sha256) for sha256 in sorted(wanted)}
        return {sha256: data for sha256, data in found.items() if data is not None}

    return attrs.evolve(request, images=await session.blocking.run(read))


def request_characters(request: ModelRequest) -> int:
    """How much text a request sends, for an estimate of its tokens."""
    total = len(request.system)
    total += sum(len(tool.description) + len(str(tool.schema)) for tool in request.tools)
    for item in request.messages:
        if isinstance(item.message, SystemMessage):
            total += len(render_system_message(item.message))
            continue
        for block in item.message.blocks:
            if isinstance(block, TextBlock | ThinkingBlock):
                total += len(block.text)
            elif isinstance(block, ToolCallBlock):
                total += len(block.name) + len(str(block.arguments))
    return total


def estimate_tokens(characters: int) -> int:
    """A rough count, where a provider gave none: four characters are a token."""
    return (characters + 3) // 4
