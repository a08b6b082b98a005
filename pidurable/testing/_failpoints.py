"""Failpoints for tests: count the passes of named places, or kill the process at one of them.

The places are those of `Failpoints`: `commit.before` and `commit.after` around every batch, and CP1
to CP7 of the agent loop. Give an object of these to `open_harness(failpoints=...)`.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import final

from pidurable.errors import InvalidArgumentError, show
from pidurable.session._seams import Failpoints as Failpoints


@final
class CountPoints(Failpoints):
    """Count how often each point is passed."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()

    def hit(self, name: str) -> None:
        """Count one pass."""
        self.passed[name] += 1


@final
class KillAt(Failpoints):
    """Kill this very process, with SIGKILL, at the nth pass of a point.

    Nothing of the process runs after that: no `finally`, no flush, no farewell to anybody. Use it
    in a process of its own.

    Args:
        name: The point, for instance `commit.after`.
        nth: Which pass; 1 is the first.
    """

    def __init__(self, name: str, *, nth: int = 1) -> None:
        if nth < 1:
            raise InvalidArgumentError("nth", "expected at least 1", show(nth))
        self.name = name
        self.nth = nth
        self._passed = 0

    def hit(self, name: str) -> None:
        """Pass the point, unless this is the pass to die at."""
        if name != self.name:
            return
        self._passed += 1
        if self._passed == self.nth:
            os.kill(os.getpid(), signal.SIGKILL)
