"""What is at hand of tasks: what those that wait go on with, and how those that ended lately did.

The commit that parks a task has the texts that it wakes with, and the commit that ends one has its
outcome, which its owner asks for next. Both are kept here for a while, as they were stored, so that
a short wait costs no read. What is not here is in the storage. Everything is as published, since it
comes by adoption alone; nothing changes it but a migration, which is told, and the next end.
"""

from __future__ import annotations

from collections import OrderedDict

from pidurable.storage import StartRow

_TASKS_KEPT = 1_000
_CHARACTERS_KEPT = 4_096
"""What is longer is not kept, so that all of this takes a few megabytes at most."""


class AtHand:
    """Of the tasks of one session."""

    def __init__(self) -> None:
        self._starts: OrderedDict[int, StartRow] = OrderedDict()
        self._outcomes: OrderedDict[int, tuple[str, str]] = OrderedDict()

    def parked(
        self, task: int, input: str, phase: str, checkpoint: str, memos: dict[str, str]
    ) -> None:
        """A task waits: note what its next invocation begins with."""
        length = len(input) + len(checkpoint) + sum(map(len, memos.values()))
        if length <= _CHARACTERS_KEPT:
            starts = self._starts
            starts[task] = StartRow(task, input, phase, checkpoint, tuple(memos.items()))
            if len(starts) > _TASKS_KEPT:
                starts.popitem(last=False)

    def take_start(self, task: int) -> StartRow | None:
        """What an invocation begins with, if it is at hand: it is read once."""
        return self._starts.pop(task, None)

    def can_start(self, task: int) -> bool:
        return task in self._starts

    def ended(self, task: int, kind: str, outcome: str | None) -> None:
        """A task has ended; `outcome` as text, where the commit that ended it decided it."""
        self._starts.pop(task, None)
        if outcome is not None and len(outcome) <= _CHARACTERS_KEPT:
            outcomes = self._outcomes
            outcomes[task] = kind, outcome
            if len(outcomes) > _TASKS_KEPT:
                outcomes.popitem(last=False)

    def outcome(self, task: int) -> tuple[str, str] | None:
        """The kind and the outcome of a task that ended lately, or None."""
        return self._outcomes.get(task)

    def migrated(self, task: int) -> None:
        """What is stored of a task is of another version than what was kept."""
        self._starts.pop(task, None)

    def forget(self) -> None:
        """Keep nothing: tasks were removed, or nothing is served any more."""
        self._starts.clear()
        self._outcomes.clear()
