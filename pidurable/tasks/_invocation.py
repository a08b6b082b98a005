"""Invocations: what runs a task in memory, from its reservation on.

A commit reserves an invocation by storing the task as running, with the number of the invocation.
It is started once that commit is durable, and dies with the process.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import attrs
import trio

from pidurable.tasks._tree import RUNNING, Node

if TYPE_CHECKING:
    from pidurable.storage import StartRow
    from pidurable.tasks._definition import Task


@attrs.define(eq=False)
class Invocation:
    """One in-memory execution of a task's handlers; it dies with the process."""

    task_id: int
    number: int
    definition: Task[Any, Any, Any]
    aborting: bool
    kind: str = ""
    takes_slot: bool = False
    """Whether it holds one of its kind's slots from its reservation on."""
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    started_at: float = 0.0
    stopping_since: float | None = None
    over_since: float | None = None
    """When its outcome or wait was stored, after which its handler is to return."""
    again: bool = False
    """The storage refused: the task stays at its checkpoint, and its turn comes again."""
    trio_task: trio.lowlevel.Task | None = None
    ahead: StartRow | None = None
    """What the code begins with, where it was read ahead."""

    def stack(self) -> str:
        """Where the handler is, for a report."""
        if self.trio_task is None:
            return "  (not started)"
        frames = traceback.StackSummary.extract(self.trio_task.iter_await_frames())
        return "".join(frames.format()).rstrip()

    def innermost(self) -> str | None:
        """The line of the definition's code that it is at."""
        found = None
        if self.trio_task is not None:
            for frame, line in self.trio_task.iter_await_frames():
                package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
                if found is None or package not in ("trio", "pidurable"):
                    found = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
        return found

    def runs(self, node: Node | None) -> bool:
        """Whether a node, of any view, says that this very invocation is running."""
        return node is not None and node.status is RUNNING and node.invocations == self.number

    def cancel(self) -> None:
        """Cancel the handler; whoever cancels first starts the clock of the reports."""
        if self.stopping_since is None:
            self.stopping_since = trio.current_time()
        self.scope.cancel()


class Starts:
    """The invocations that one commit reserves, and the slots that they take."""

    __slots__ = ("invocations", "slots", "taken")

    def __init__(self) -> None:
        self.invocations: list[Invocation] = []
        self.slots: dict[str, int] = {}
        """How many slots of each kind they take."""
        self.taken = 0
        """How many in all."""

    def take(self, kind: str, count: int = 1) -> None:
        """Count slots that are taken, or given back."""
        self.slots[kind] = self.slots.get(kind, 0) + count
        self.taken += count

    def add(
        self, node: Node, definition: Task[Any, Any, Any], *, aborting: bool, takes_slot: bool
    ) -> None:
        """The next invocation of a task, as the commit stores it."""
        if takes_slot:
            self.take(node.kind)
        self.invocations.append(
            Invocation(
                node.id,
                node.invocations,
                definition,
                aborting,
                kind=node.kind,
                takes_slot=takes_slot,
            )
        )
