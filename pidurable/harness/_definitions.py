"""What a harness has installed at one moment: its built-in tasks beside a registry snapshot.

An object of this never changes, so that "is this another definition?" can be asked of two of them,
and a phase keeps the hooks and definitions that it began with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from pidurable.registry import Registry
from pidurable.registry._hooks import InstalledHook
from pidurable.registry._snapshot import RegistrySnapshot
from pidurable.tasks._definition import Task, definition_info


@final
class HarnessDefinitions:
    """The definitions, hooks and codec of one registry snapshot, with the built-in tasks."""

    __slots__ = ("_built_in", "codec", "hooked", "registry")

    def __init__(
        self, built_in: Mapping[str, Task[Any, Any, Any]], registry: RegistrySnapshot
    ) -> None:
        self._built_in = built_in
        self.registry = registry
        self.codec = registry.codec
        self.hooked = registry.hooked

    def definition(self, kind: str) -> Task[Any, Any, Any] | None:
        return self._built_in.get(kind) or self.registry.definition(kind)

    def nearest_kind(self, kind: str) -> str | None:
        return self.registry.nearest_kind(kind)

    def hooks(
        self, kind: str, name: str, extensions: Sequence[str] | None
    ) -> Sequence[InstalledHook]:
        return self.registry.hooks(kind, name, extensions)


@final
class InstalledNow:
    """The definitions as of now: a new object with each publication, the same one in between."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._built_in: dict[str, Task[Any, Any, Any]] = {}
        self._now = HarnessDefinitions(self._built_in, registry.snapshot)

    def add(self, *definitions: Task[Any, Any, Any]) -> None:
        """Add built-in tasks, before anything runs."""
        self._built_in.update((definition_info(each).name, each) for each in definitions)

    def __call__(self) -> HarnessDefinitions:
        snapshot = self._registry.snapshot
        if self._now.registry is not snapshot:
            self._now = HarnessDefinitions(self._built_in, snapshot)
        return self._now
