"""How large everything is that a running session keeps in memory: every container, by its path."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio

_CONTAINERS = (dict, list, set, frozenset, deque)
_LEFT_OUT = ("pidurable.storage", "pidurable.testing", "pidurable.records")
"""The store itself (in memory it grows with what is stored) and records, which are values."""


def sizes(root: Any, name: str) -> dict[str, int]:
    """The number of members of every container reachable from an object of ours, by its path.

    Objects inside of containers are not followed: they are the members that are counted. A chain of
    objects (linked by attributes) is, so that it would show as ever more paths.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    pending = [(name, root)]
    while pending:
        path, value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            found[path] = len(value)
            continue
        module = type(value).__module__
        if not module.startswith("pidurable") or module.startswith(_LEFT_OUT):
            continue
        pending += [(f"{path}.{attribute}", held) for attribute, held in _attributes(value)]
    return found


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                yield slot, getattr(value, slot)


def process() -> dict[str, int]:
    """What the process has: trio tasks, threads, open files."""
    statistics = trio.lowlevel.current_statistics()
    return {
        "trio tasks": statistics.tasks_living,
        "threads": threading.active_count(),
        "files": len(list(Path("/proc/self/fd").iterdir())) if Path("/proc").exists() else 0,
    }


def growth(before: dict[str, int], after: dict[str, int], *, most: int = 0) -> dict[str, int]:
    """What has become larger by more than `most`, with how much larger it is."""
    grown = Counter(after)
    grown.subtract(before)
    return {name: n for name, n in grown.items() if n > most}
