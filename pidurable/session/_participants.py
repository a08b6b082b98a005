"""What takes part in the commits of a session: the scheduler, permissions, whoever waits.

Every commit asks them all, one after the other, and most have something to do in few of the hooks.
So who leaves a hook out of its class is not asked there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

from pidurable.errors import SessionPoisonedError

Hook = Callable[[Any], None]


class Participant:
    """What stands on the session. Define the hooks in which there is something to do."""

    def check_staged(self, tx: Any) -> None:
        """On the line after a body: may refuse the commit (by raising) or add writes to it."""

    def joined(self, tx: Any) -> None:
        """The commit was accepted: later bodies of this batch see it."""

    def committed(self, tx: Any) -> None:
        """The commit is durable and published. Synchronous, must not fail."""

    def reverted(self) -> None:
        """The batch failed: drop what was staged."""

    def poisoned(self, error: SessionPoisonedError) -> None:
        """The session serves nothing more."""

    def refusing(self, refusing: bool) -> None:
        """The storage has begun or stopped to refuse."""


@final
class Participants:
    """The participants of one session, in the order in which they are asked."""

    def __init__(self) -> None:
        self.check_staged: list[Hook] = []
        """The hooks of this name; so are the next two. Each is a new list after a change."""
        self.joined: list[Hook] = []
        self.committed: list[Hook] = []
        self._all: list[Participant] = []

    def __iter__(self) -> Iterator[Participant]:
        return iter(self._all)

    def append(self, participant: Participant) -> None:
        """Have one asked after all others from now on."""
        self._set([*self._all, participant])

    def put_first(self, participant: Participant) -> None:
        """Have one asked before all others from now on."""
        self._set([participant, *self._all])

    def remove(self, participant: Participant) -> None:
        """Ask one no more."""
        self._set([each for each in self._all if each is not participant])

    def _set(self, participants: list[Participant]) -> None:
        self._all = participants
        self.check_staged = _own(participants, "check_staged")
        self.joined = _own(participants, "joined")
        self.committed = _own(participants, "committed")


def _own(participants: list[Participant], name: str) -> list[Hook]:
    """A hook of those who have one of their own."""
    left_out = getattr(Participant, name)
    return [
        getattr(each, name) for each in participants if getattr(type(each), name) is not left_out
    ]
