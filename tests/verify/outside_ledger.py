"""The world outside of a store: a ledger of effects, which no crash and no reopening takes back.

Whoever has an effect names it with an idempotency key, as a bank would want it. The ledger keeps
every attempt in order; an effect has happened once for each key. Whether something happened twice
that may happen once only is then a question that no look into the store can answer, and this can.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import attrs


@attrs.frozen
class Line:
    """One attempt."""

    key: str
    what: str
    safe: bool
    """Whether it may be tried again: the other side knows its key, or it changes nothing."""


class Ledger:
    """Effects by idempotency key; in memory, or in a file that outlives the process.

    Args:
        path: A file to append to, one JSON line for each attempt, written with one call; None
            keeps them in memory.
        lines: What has happened before, for a ledger in memory.
    """

    def __init__(self, path: Path | None = None, *, lines: tuple[Line, ...] = ()) -> None:
        self.path = path
        self._lines = list(lines)
        self.hung = False
        """Whether the call that never ends has begun in this life; of this process alone."""
        self.on_line = lambda: None
        """Called before a line is kept: for whoever counts what comes before what."""

    @property
    def lines(self) -> tuple[Line, ...]:
        """Every attempt, oldest first."""
        if self.path is None:
            return tuple(self._lines)
        if not self.path.exists():
            return ()
        texts = self.path.read_text("utf-8").splitlines()
        return tuple(Line(*json.loads(text)) for text in texts)

    def book(self, key: str, what: str, *, safe: bool = True) -> None:
        """Have an effect: once for each key, however often it is called."""
        self.on_line()
        if self.path is None:
            self._lines.append(Line(key, what, safe))
            return
        text = json.dumps([key, what, safe]) + "\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)

    def count(self, what: str) -> int:
        """How often something was tried."""
        return sum(line.what == what for line in self.lines)

    def effects(self) -> list[str]:
        """What has happened and may be tried again, each once for each key, sorted."""
        keys = {(line.what, line.key) for line in self.lines if line.safe}
        return sorted(what for what, _ in keys)

    def duplicates(self) -> list[str]:
        """What happened more often than it may: under two keys, or twice without being safe."""
        found = [what for what, number in Counter(self.effects()).items() if number > 1]
        once = Counter(line.what for line in self.lines if not line.safe)
        return sorted([*found, *(what for what, number in once.items() if number > 1)])
