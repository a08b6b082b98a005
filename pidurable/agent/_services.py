"""What the built-in tasks of one harness work with."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import attrs

from pidurable.agent._documents import AgentDocument, address_of
from pidurable.agent._models import Models
from pidurable.agent._selection import Selection, offers_tool, selected_extensions
from pidurable.errors import InvalidArgumentError, show
from pidurable.records._messages import ToolDeclaration
from pidurable.registry._env import Env, LocalEnv
from pidurable.registry._snapshot import RegistrySnapshot
from pidurable.registry._tool import Tool
from pidurable.tasks._reach import may_reach

if TYPE_CHECKING:
    from pidurable.agent._permissions import Permissions
    from pidurable.agent._progress import Progress
    from pidurable.records._limits import Settings
    from pidurable.session._session import Session
    from pidurable.tasks._runtime import Runtime


THINKING_LEVELS = ("off", "minimal", "low", "medium", "high", "xhigh", "max")


class _Unset:
    """The value of a field that a change leaves as it is."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()


def _check_turns(_: object, __: object, value: object) -> None:
    if value is UNSET or value is None:
        return
    if type(value) is not int or value < 1:
        problem = "expected a whole number of at least 1, or None"
        raise InvalidArgumentError("turns_max", problem, show(value))


@attrs.frozen(kw_only=True)
class AgentChange:
    """A change of a conversation's agent: given fields replace, None clears, unset ones stay."""

    model: str | None = UNSET
    """As "provider/model"."""
    thinking: Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"] | None = UNSET
    extensions: list[str] | Selection | None = UNSET
    """Whose tools, sections and hooks apply: by name, or by difference from the host's default.
    Names that are not installed are skipped, and count as soon as they are."""
    tools: list[str] | Selection | None = UNSET
    """Which of their tools are offered: by name, or all but `Selection(remove=[...])`."""
    instructions: str | None = UNSET
    cwd: str | None = UNSET
    turns_max: int | None = attrs.field(default=UNSET, validator=_check_turns)

    def given(self) -> dict[str, Any]:
        """The fields that this change sets."""
        every = attrs.asdict(self, recurse=False)
        return {name: value for name, value in every.items() if value is not UNSET}


@attrs.frozen(kw_only=True)
class Agent:
    """A conversation's agent, resolved: the choices as stored, and what they select now."""

    model: str | None
    thinking: str | None
    extensions: tuple[str, ...] | None
    instructions: str | None
    cwd: str | None
    turns_max: int
    tools: tuple[Tool[..., Any], ...]
    snapshot: RegistrySnapshot

    @cached_property
    def declarations(self) -> dict[str, ToolDeclaration]:
        """The declarations of the tools that are offered, by name. Not to be changed."""
        return {
            tool.name: ToolDeclaration(
                name=tool.name, description=tool.description, schema=tool.schema
            )
            for tool in self.tools
        }

    @cached_property
    def tool_names(self) -> tuple[str, ...]:
        """The names of the tools that are offered."""
        return tuple(tool.name for tool in self.tools)

    @cached_property
    def sequential(self) -> frozenset[str]:
        """The names of the offered tools whose rounds run their calls one after the other."""
        return frozenset(tool.name for tool in self.tools if tool.sequential)

    @cached_property
    def selected(self) -> tuple[str, ...]:
        """The names of the selected extensions, in the order of installation."""
        names = self.snapshot.extensions
        return tuple(name for name in names if self.extensions is None or name in self.extensions)

    def tool(self, name: str) -> Tool[..., Any] | None:
        """The offered tool of this name, or None."""
        for tool in self.tools:
            if tool.name == name:
                return tool
        return None


EnvFor = Callable[[int, Agent], Env]

_RESOLVED_MAX = 1_000
"""Conversations of which is kept what their agents were resolved to."""


@attrs.define(eq=False)
class _Resolved:
    """What was made of one value of `pi.agent`, which is never changed in place."""

    stored: Any
    snapshot: RegistrySnapshot
    settings: Settings
    extensions: tuple[str, ...] | None
    agent: Agent | None = None


@attrs.define(eq=False)
class AgentServices:
    """The seams of the agent layer: one of each harness."""

    runtime: Runtime
    models: Models | None
    registry: Callable[[], RegistrySnapshot]
    env_for: EnvFor
    conversation: Callable[[int], Any]
    """Makes a conversation handle; the harness gives it."""
    _resolved: dict[int, _Resolved] = attrs.field(factory=dict, init=False, repr=False)
    _resolved_by: RegistrySnapshot | None = attrs.field(default=None, init=False, repr=False)
    session: Session = attrs.field(init=False)
    progress: Progress = attrs.field(init=False)
    permissions: Permissions = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.session = self.runtime.session

    def selected(self, conversation_id: int) -> tuple[str, ...] | None:
        """The extensions that a conversation selects; None for all that are installed."""
        return self._looked_up(conversation_id).extensions

    def _looked_up(self, conversation_id: int) -> _Resolved:
        """What the agent of a conversation selects, made again where what it depends on changed."""
        session = self.runtime.session
        stored = session.doc_value(address_of(AgentDocument, conversation_id))
        snapshot, settings = self.registry(), session.settings
        if self._resolved_by is not snapshot:
            # Nothing is to hold on to what an earlier one had installed.
            self._resolved.clear()
            self._resolved_by = snapshot
        found = self._resolved.get(conversation_id)
        if found is None or found.stored is not stored or found.settings is not settings:
            chosen = None if stored is None else stored.get("extensions")
            selected = selected_extensions(chosen, settings.extensions, snapshot.extensions)
            found = _Resolved(stored, snapshot, settings, selected)
            if len(self._resolved) >= _RESOLVED_MAX:
                self._resolved.clear()
            self._resolved[conversation_id] = found
        return found

    def may_reach(self, from_id: int, conversation_id: int) -> bool:
        """Whether the code of a call in one conversation may use the id of another.

        Raises:
            NotFoundError: There is no such conversation.
        """
        session = self.runtime.session

        def place_of(task_id: int) -> int | None:
            row = session.storage.task(task_id)
            return None if row is None else row.conversation

        return may_reach(
            session.conversation(from_id),
            session.conversation(conversation_id),
            conversation=session.conversation,
            place_of=place_of,
        )

    def resolve(self, conversation_id: int) -> Agent:
        """Resolve a conversation's agent: once per request, once per phase."""
        found = self._looked_up(conversation_id)
        if found.agent is None:
            found.agent = self._resolve(found)
        return found.agent

    @staticmethod
    def _resolve(found: _Resolved) -> Agent:
        stored, snapshot, selected = found.stored or {}, found.snapshot, found.extensions
        names = stored.get("tools")
        # Names that are not installed are skipped, and count again once they are.
        tools = tuple(tool for tool in snapshot.tools(selected) if offers_tool(names, tool.name))
        return Agent(
            model=stored.get("model"),
            thinking=stored.get("thinking"),
            extensions=selected,
            instructions=stored.get("instructions"),
            cwd=stored.get("cwd"),
            turns_max=stored.get("turns_max") or found.settings.turns_max,
            tools=tools,
            snapshot=snapshot,
        )


def local_env() -> EnvFor:
    """An environment per working directory on this machine.

    What it gives raises InvalidArgumentError for `cwd` where the directory is gone.
    """
    made: dict[str, LocalEnv] = {}

    def env_for(conversation_id: int, agent: Agent) -> Env:
        root = agent.cwd or "."
        found = made.get(root)
        if found is not None and os.path.isdir(found.root):
            return found
        try:
            made[root] = LocalEnv(root)
        except (InvalidArgumentError, OSError) as error:
            whose = f"conversation {conversation_id}"
            if agent.cwd is None:
                whose = f"the process, which {whose} works in,"
            problem = (
                f"the working directory of {whose} is no folder (any more); make it again, or "
                "choose another one with `conversation.configure(AgentChange(cwd=...))`"
            )
            raise InvalidArgumentError("cwd", problem, show(root)) from error
        return made[root]

    return env_for
