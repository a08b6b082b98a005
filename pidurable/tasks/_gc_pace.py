"""How much a collection does at once, and how long it then leaves the line to others.

A slice of reading, or a commit, is kept as long as others can wait for, and is followed by a pause
of nine times what it costs. What it costs is told from the quickest of the last ones of its kind:
on a busy machine most of a long one is waiting, for the processor or for a flush that others have
asked for, and a pause for that would stop a collection wherever there is much to do.
"""

from __future__ import annotations

from typing import final

STEP_SECONDS = 0.004
"""What a slice, or a commit, should take while others commit."""
ALONE_SECONDS = 0.03
"""The same while nobody else does."""
PAUSE = 9
_DEARER = 1.1
"""How much dearer than the quickest before it each is thought to be, until it is seen not to be."""


@final
class Pace:
    """The size of one kind of work."""

    def __init__(self, *, least: int, most: int) -> None:
        """Begin with the smallest size."""
        self.size = least
        self._least, self._most = least, most
        self._cost = float("inf")
        """Seconds a unit."""

    def took(self, done: int, seconds: float, *, busy: bool) -> float:
        """Note how long some work took, and fit the size.

        Args:
            done: Units of it.
            seconds: From its beginning to its end.
            busy: Whether others commit at this time.

        Returns:
            How long to leave everything to others.
        """
        done = max(1, done)
        self._cost = min(self._cost * _DEARER, seconds / done)
        target = STEP_SECONDS if busy else ALONE_SECONDS
        fitting = self._most if not self._cost else int(target / self._cost)
        if done * 2 >= self.size or fitting < self.size:
            # Never more than twice as much as was tried.
            self.size = max(self._least, min(fitting, self.size * 2, self._most))
        return self._cost * done * PAUSE if busy else 0.0
