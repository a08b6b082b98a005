"""Snapshots: what was installed at one moment, as immutable data.

Whoever starts something takes one snapshot and keeps it, so that what it sees does not change under
its hands. A snapshot does no I/O. Everything in it that came from an extension holds that
extension's anchor; when the last holder lets go of it, the extension is out of use.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import attrs

from pidurable.errors import ExtensionError, show
from pidurable.records._codec import Codec
from pidurable.registry._extension import Extension
from pidurable.registry._hooks import InstalledHook, Section, SectionWrap, ToolWrap
from pidurable.registry._tool import Tool
from pidurable.tasks._definition import Task, definition_info

__all__ = ["RegistrySnapshot"]

PartT = TypeVar("PartT")


@attrs.define(eq=False)
class Anchor:
    """Alive as long as anything uses one installed version of an extension."""

    extension: str
    __weakref__: Any = attrs.field(init=False, repr=False)


@attrs.frozen(kw_only=True, eq=False)
class Installed:
    """One extension with its parts as they are handed out."""

    extension: Extension
    anchor: Anchor
    tools: tuple[Tool[..., Any], ...]
    sections: tuple[Section, ...]
    hooks: Mapping[tuple[str, str], InstalledHook]
    """By kind of task and name of hook."""


def install_parts(extension: Extension) -> Installed:
    """Tie the parts of an extension to it."""
    anchor = Anchor(extension.name)
    return Installed(
        extension=extension,
        anchor=anchor,
        tools=tuple(
            attrs.evolve(part, extension=extension.name, anchor=anchor) for part in extension.tools
        ),
        sections=tuple(
            attrs.evolve(part, extension=extension.name, anchor=anchor)
            for part in extension.sections
        ),
        hooks={
            (hook.kind, name): InstalledHook(
                extension=extension.name, name=name, handler=handler, anchor=anchor
            )
            for hook in extension.hooks
            for name, handler in hook.handlers.items()
        },
    )


def _hooked_of(snapshot: RegistrySnapshot) -> frozenset[tuple[str, str]]:
    return frozenset(hooked for part in snapshot._installed for hooked in part.hooks)


@attrs.frozen(kw_only=True, eq=False)
class RegistrySnapshot:
    """What was installed when it was published. Made by `Registry`."""

    version: int
    """One more with every publication."""
    codec: Codec
    """Knows the codecs of all installed extensions."""
    definitions: Mapping[str, Task[Any, Any, Any]]
    """By kind."""
    _installed: tuple[Installed, ...] = attrs.field(alias="installed", repr=False)
    _tools: dict[tuple[str, ...] | None, tuple[Tool[..., Any], ...]] = attrs.field(
        factory=dict, init=False, repr=False
    )
    _sections: dict[tuple[str, ...] | None, tuple[Section, ...]] = attrs.field(
        factory=dict, init=False, repr=False
    )
    hooked: frozenset[tuple[str, str]] = attrs.field(
        default=attrs.Factory(_hooked_of, takes_self=True), init=False, repr=False
    )
    """Kind and name of every hook that any extension has."""

    @property
    def extensions(self) -> tuple[str, ...]:
        """The names of the installed extensions, in order."""
        return tuple(part.extension.name for part in self._installed)

    def definition(self, kind: str) -> Task[Any, Any, Any] | None:
        """Return the definition of a kind, or None."""
        return self.definitions.get(kind)

    def nearest_kind(self, kind: str) -> str | None:
        """Return the installed kind that was probably meant, or None."""
        close = difflib.get_close_matches(kind, list(self.definitions), n=1)
        return close[0] if close else None

    def tools(self, extensions: Sequence[str] | None = None) -> tuple[Tool[..., Any], ...]:
        """Return the tools of the given extensions, overridden and wrapped.

        In the order of installation; names that are not installed are skipped.

        Args:
            extensions: Names; None stands for all.

        Raises:
            ExtensionError: A wrapper raised for this selection.
        """
        key = _selection(extensions)
        found = self._tools.get(key)
        if found is None:
            found = self._tools[key] = self._resolve_tools(extensions)
        return found

    def tool(self, name: str, extensions: Sequence[str] | None = None) -> Tool[..., Any] | None:
        """Return the tool of a name among the given extensions, or None."""
        for tool in self.tools(extensions):
            if tool.name == name:
                return tool
        return None

    def _resolve_tools(self, extensions: Sequence[str] | None) -> tuple[Tool[..., Any], ...]:
        selected = list(self._selected(extensions))
        tools = _by_name(
            ((tool.name, tool) for part in selected for tool in part.tools),
        )
        for part in selected:
            for wrap in part.extension.wraps:
                if isinstance(wrap, ToolWrap) and wrap.name in tools:
                    tools[wrap.name] = _wrap_tool(part.extension.name, wrap, tools[wrap.name])
        return tuple(tools.values())

    def sections(self, extensions: Sequence[str] | None = None) -> tuple[Section, ...]:
        """Return the sections of the given extensions, overridden and wrapped, in order.

        Args:
            extensions: Names; None stands for all.

        Raises:
            ExtensionError: A wrapper raised for this selection.
        """
        key = _selection(extensions)
        found = self._sections.get(key)
        if found is None:
            found = self._sections[key] = self._resolve_sections(extensions)
        return found

    def _resolve_sections(self, extensions: Sequence[str] | None) -> tuple[Section, ...]:
        selected = list(self._selected(extensions))
        sections = _by_name(
            ((section.key, section) for part in selected for section in part.sections),
        )
        for part in selected:
            for wrap in part.extension.wraps:
                if isinstance(wrap, SectionWrap) and wrap.key in sections:
                    inner = sections[wrap.key]
                    render = _call_wrapper(
                        part.extension.name, f"section {wrap.key!r}", wrap.wrap, inner.render_input
                    )
                    sections[wrap.key] = attrs.evolve(inner, render_input=render)
        return tuple(sections.values())

    def hooks(
        self,
        task_class: type[Task[Any, Any, Any]] | str,
        name: str,
        extensions: Sequence[str] | None = None,
    ) -> tuple[InstalledHook, ...]:
        """Return the handlers of one hook, in the order of installation.

        Args:
            task_class: The definition, or its kind.
            name: The hook.
            extensions: Names; None stands for all.
        """
        kind = task_class if isinstance(task_class, str) else definition_info(task_class).name
        if (kind, name) not in self.hooked:
            return ()
        return tuple(
            part.hooks[kind, name]
            for part in self._selected(extensions)
            if (kind, name) in part.hooks
        )

    def _selected(self, extensions: Sequence[str] | None) -> Iterable[Installed]:
        if extensions is None:
            return self._installed
        return (part for part in self._installed if part.extension.name in extensions)


def _selection(extensions: Sequence[str] | None) -> tuple[str, ...] | None:
    """The same for every way to name the same extensions."""
    return None if extensions is None else tuple(sorted(set(extensions)))


def freeze(definitions: dict[str, Task[Any, Any, Any]]) -> Mapping[str, Task[Any, Any, Any]]:
    """Return a read-only view."""
    return MappingProxyType(definitions)


def _by_name(parts: Iterable[tuple[str, PartT]]) -> dict[str, PartT]:
    """Let a later part of a name take the place of an earlier one.

    A dict keeps the place of the first and the value of the last, which is exactly the rule.
    """
    return dict(parts)


def _wrap_tool(extension: str, wrap: ToolWrap, tool: Tool[..., Any]) -> Tool[..., Any]:
    wrapped = _call_wrapper(extension, f"tool {wrap.name!r}", wrap.wrap, tool)
    if not isinstance(wrapped, Tool) or wrapped.name != tool.name:
        raise ExtensionError(
            extension,
            f"its wrapper of the tool {wrap.name!r} returned {show(wrapped)}",
            "Return a tool of the same name, as `tool.around(handler)` does.",
        )
    return wrapped


def _call_wrapper(
    extension: str, what: str, wrapper: Callable[[PartT], PartT], part: PartT
) -> PartT:
    try:
        return wrapper(part)
    except Exception as error:
        raise ExtensionError(
            extension,
            f"its wrapper of the {what} raised {type(error).__name__}: {error}",
            "Correct the wrapper.",
        ) from error
