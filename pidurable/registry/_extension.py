"""Extensions: immutable bundles of tools, sections, hooks, wraps, tasks and codecs.

Nothing of an extension is stored; conversations and tasks store names. Creating one checks only
the shape of what it holds, so that its author sees mistakes at the line that made them. Whether it
fits with the others is checked by `Registry.install`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from pidurable.errors import ExtensionError, show
from pidurable.records._messages import JsonValue
from pidurable.registry._hooks import Hook, Section, SectionWrap, ToolWrap
from pidurable.registry._tool import Tool
from pidurable.tasks._definition import Task

__all__ = ["Extension"]

EXTENSION_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")

CodecPair = tuple[Callable[[Any], JsonValue], Callable[[JsonValue], Any]]


def _tuple(value: Iterable[Any]) -> tuple[Any, ...]:
    # What cannot be iterated is kept as it is, and refused with the name of its field.
    return tuple(value) if isinstance(value, Iterable) else value


@attrs.frozen(eq=False)
class Extension:
    """A named bundle of tools, sections, hooks, wraps, tasks and codecs.

    Args:
        name: How conversations select it: lower-case letters, digits, `_`, `-`.
        tools: Made by `@tool`.
        sections: Made by `section`.
        hooks: Made by `hook`.
        wraps: Made by `wrap_tool` and `wrap_section`.
        tasks: Instances of task definitions.
        codecs: By type: (to JSON, from JSON), for types that have no form in JSON of themselves.
        on_unload: Called once, without arguments, when the extension was replaced or removed and
            nothing that runs uses it any more. State that must survive belongs in documents.

    Raises:
        ExtensionError: A part is not what it should be.
    """

    name: str
    tools: tuple[Tool[..., Any], ...] = attrs.field(default=(), kw_only=True, converter=_tuple)
    sections: tuple[Section, ...] = attrs.field(default=(), kw_only=True, converter=_tuple)
    hooks: tuple[Hook, ...] = attrs.field(default=(), kw_only=True, converter=_tuple)
    wraps: tuple[ToolWrap | SectionWrap, ...] = attrs.field(
        default=(), kw_only=True, converter=_tuple
    )
    tasks: tuple[Task[Any, Any, Any], ...] = attrs.field(default=(), kw_only=True, converter=_tuple)
    codecs: Mapping[type, CodecPair] = attrs.field(factory=dict, kw_only=True)
    on_unload: Callable[[], object] | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or EXTENSION_NAME.fullmatch(self.name) is None:
            raise ExtensionError(
                str(self.name),
                f"the name {show(self.name)} is not allowed",
                "Use up to 64 lower-case letters, digits, `_` or `-`, a letter first.",
            )
        self._check_parts("tools", self.tools, Tool, "Decorate the function with @tool.")
        self._check_parts("sections", self.sections, Section, "Write section(key, render).")
        self._check_parts("hooks", self.hooks, Hook, "Write hook(Task, name=handler).")
        self._check_parts(
            "wraps", self.wraps, (ToolWrap, SectionWrap), "Use wrap_tool or wrap_section."
        )
        for task in self.tasks if isinstance(self.tasks, tuple) else ():
            if isinstance(task, type) and issubclass(task, Task):
                raise ExtensionError(
                    self.name,
                    f"tasks holds the class {task.__name__}",
                    f"Give an instance: {task.__name__}(...).",
                )
        self._check_parts("tasks", self.tasks, Task, "Give instances of Task classes.")
        for type_, pair in self.codecs.items():
            if not isinstance(type_, type) or len(pair) != 2 or not all(map(callable, pair)):
                raise ExtensionError(
                    self.name,
                    f"codecs holds {show(type_)}: {show(pair)}",
                    "Map a class to the pair (to JSON, from JSON) of functions.",
                )
        if self.on_unload is not None and not callable(self.on_unload):
            raise ExtensionError(
                self.name, f"on_unload is {show(self.on_unload)}", "Give a function."
            )

    def _check_parts(
        self, field: str, parts: tuple[Any, ...], cls: type | tuple[type, ...], remedy: str
    ) -> None:
        if not isinstance(parts, tuple):
            raise ExtensionError(
                self.name, f"{field} is {show(parts)}, not a list", f"Write {field}=[...]."
            )
        for index, part in enumerate(parts):
            if not isinstance(part, cls):
                raise ExtensionError(self.name, f"{field}[{index}] is {show(part)}", remedy)
