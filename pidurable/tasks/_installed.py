"""What the runtime needs to know of what is installed: definitions by kind, and the codec.

A snapshot never changes. A registry publishes a new one; running work keeps what it started with.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pidurable.records._codec import Codec
from pidurable.tasks._definition import Task, definition_info

if TYPE_CHECKING:
    from pidurable.registry._snapshot import RegistrySnapshot
    from pidurable.tasks._hooks import HookHandler


class Definitions(Protocol):
    """What the runtime needs of a registry snapshot."""

    @property
    def codec(self) -> Codec: ...

    def definition(self, kind: str) -> Task[Any, Any, Any] | None: ...

    def nearest_kind(self, kind: str) -> str | None: ...

    @property
    def registry(self) -> RegistrySnapshot | None: ...

    @property
    def hooked(self) -> Collection[tuple[str, str]]:
        """Kind and name of every hook that anything has."""
        ...

    def hooks(
        self, kind: str, name: str, extensions: Sequence[str] | None
    ) -> Sequence[HookHandler]: ...


class StaticDefinitions:
    """Definitions without a registry: a fixed set, and no hooks."""

    registry = None
    hooked: Collection[tuple[str, str]] = ()

    def __init__(self, definitions: Sequence[Task[Any, Any, Any]], codec: Codec) -> None:
        self.codec = codec
        self._by_kind = {definition_info(each).name: each for each in definitions}

    def definition(self, kind: str) -> Task[Any, Any, Any] | None:
        return self._by_kind.get(kind)

    def nearest_kind(self, kind: str) -> str | None:
        return next(iter(difflib.get_close_matches(kind, self._by_kind, n=1)), None)

    def hooks(
        self, kind: str, name: str, extensions: Sequence[str] | None
    ) -> Sequence[HookHandler]:
        return ()
