"""What somebody knows of tasks who only reads the store: rows, and who holds the session.

Nobody outside sees the holder's queues and slots, so a task whose turn is to come is
`held_elsewhere`, and one that nobody can run is `not_started`. No index leads from an owner to what
it owns (each would make every commit dearer), so a part of the live rows is looked through for what
holds a task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from pidurable.agent._permissions import asked_words, stored_request
from pidurable.records._moments import duration
from pidurable.records._tasks import Status
from pidurable.storage import HolderRecord, Storage, TaskRow
from pidurable.tasks._explain import LOOKS_MAX, Awaited, Below, Look, find_barrier, look_up, plain

__all__ = ["HolderState", "StoredFacts"]

HolderState = Literal["live", "silent", "dead", "released"]
LIVE_ROWS_MAX = 10_000
"""Live tasks that are looked through for what is below one."""


@attrs.define(eq=False)
class StoredFacts:
    """The reader's side."""

    storage: Storage
    now_us: int
    holder: HolderRecord | None
    state: HolderState
    _free: set[int] = attrs.Factory(set)
    """Tasks above which nothing keeps anything from running: they are not walked up again."""

    def _who(self) -> str:
        assert self.holder is not None
        return f"process {self.holder.pid} on {plain(self.holder.host, length=60)}"

    def standstill(self) -> Look | None:
        if self.state == "live":
            return None
        if self.state == "silent":
            assert self.holder is not None
            silent = duration((self.now_us - self.holder.heartbeat_us) / 1e6)
            return Look(
                code="held_elsewhere",
                text=f"{self._who()} holds the session and has been silent for {silent}",
                remedy="look whether that process hangs",
            )
        text = "no process holds the session"
        if self.state == "dead":
            text = f"{self._who()}, which held the session, is dead"
        return Look(code="not_started", text=text, remedy="go on with `pidurable resume`")

    def running(self, row: TaskRow) -> Look:
        look = self.standstill()
        if look is not None and look.code == "not_started":
            return attrs.evolve(look, text=f"was running, but {look.text}")
        handler = "its abort handler" if row.abort_us is not None else "its code"
        text = f"runs {handler} in {self._who()}"
        if look is not None:
            return attrs.evolve(look, text=f"{text}, which is silent")
        return Look(code="running", text=text)

    def turn(self, row: TaskRow) -> Look:
        look = self.standstill()
        if look is None:
            since = duration((self.now_us - row.ready_us) / 1e6)
            text = f"is ready for {since}; {self._who()} decides when its turn comes"
            return Look(code="held_elsewhere", text=text)
        return attrs.evolve(look, text=f"is ready, but {look.text}")

    def blocked_hint(self, row: TaskRow) -> str | None:
        return None

    def unread(self, id: int) -> int:
        return len(self.storage.signals(id))

    # --- the tree ------------------------------------------------------------------------

    def awaited(self, row: TaskRow, on: Sequence[int]) -> Awaited:
        return look_up(self, on)

    def asks(self, id: int) -> tuple[str, str] | None:
        request = stored_request(self.storage, id)
        return None if request is None or request.state != "open" else asked_words(request)

    def barrier(self, row: TaskRow) -> Look | None:
        passed: list[TaskRow] = []

        def owners() -> Iterator[TaskRow]:
            for owner in self._owners(row):
                if owner.id in self._free:
                    return
                passed.append(owner)
                yield owner

        look = find_barrier(row, owners())
        if look is None and not any(owner.blocked == "interrupted" for owner in passed):
            self._free.update(owner.id for owner in passed)
        return look

    def _owners(self, row: TaskRow) -> Iterator[TaskRow]:
        """The tasks above a task, live and ended, up to the boundary of a background task."""
        while not row.background:
            owner = row.owner
            if owner is None:
                conversation = self.storage.conversation(row.conversation)
                owner = None if conversation is None else conversation.owner
            above = None if owner is None else self.storage.task(owner)
            if above is None:
                return
            yield above
            row = above

    def below(self, id: int) -> Below:
        # What is owned is younger than its owner, and has a larger id.
        rows = self.storage.live_tasks(after=id, limit=LIVE_ROWS_MAX)
        climb = _Climb(self.storage, id, {row.id for row in rows})
        found = [row.id for row in rows if climb.reaches(row)]
        more = len(rows) == LIVE_ROWS_MAX or len(found) > LOOKS_MAX
        return Below(tuple(found[:LOOKS_MAX]), more)


class _Climb:
    """The way up from live tasks, over ended ones, as far as one task or conversation."""

    def __init__(self, storage: Storage, top: int, live: set[int]) -> None:
        self._storage = storage
        self._live = live
        self._known: dict[int, bool] = {top: True}
        """By task or conversation: whether a live task that it owns has the top above it, with no
        live task between."""

    def reaches(self, row: TaskRow) -> bool:
        """Whether a live ordinary task is held by the top itself."""
        if row.background:
            return False
        passed: list[int] = []
        at: int | None = row.conversation if row.owner is None else row.owner
        while at is not None and at not in self._known and at not in self._live:
            passed.append(at)
            at = self._above(at)
        found = at is not None and self._known.get(at, False)
        self._known.update((id, found) for id in passed)
        return found

    def _above(self, id: int) -> int | None:
        """The owner of a conversation or an ended task; a background task is a boundary."""
        conversation = self._storage.conversation(id)
        if conversation is not None:
            return conversation.owner
        task = self._storage.task(id)
        if task is None or task.background or task.status != Status.TERMINAL:
            return None
        return task.conversation if task.owner is None else task.owner
