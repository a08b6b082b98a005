"""What the holder of a session knows of its tasks: invocations, queues, slots, definitions.

The holder's own tree is in memory, so nothing here reads more rows than it shows; the place in the
order of ready tasks is counted up to a bound.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from pidurable.records._moments import duration
from pidurable.storage import Storage, TaskRow
from pidurable.tasks._definition import definition_info
from pidurable.tasks._explain import (
    LOOKS_MAX,
    Awaited,
    Below,
    Look,
    brief,
    find_barrier,
    look_up,
    plain,
)
from pidurable.tasks._runtime import CODE_BLOCKS
from pidurable.tasks._tree import Node

if TYPE_CHECKING:
    from pidurable.tasks._run import Invocation
    from pidurable.tasks._runtime import Runtime

PLACES_MAX = 1_000
"""Ready tasks that are counted before one; beyond it is `more than`."""
_WALK_MAX = 10_000
"""Nodes below an owner that are passed in search of live tasks."""


class LiveFacts:
    """The holder's side."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.now_us = runtime.session.clock.now_us()

    @property
    def storage(self) -> Storage:
        return self._runtime.session.storage

    # --- the session ---------------------------------------------------------------------

    def standstill(self) -> Look | None:
        runtime = self._runtime
        if runtime.closing:
            return Look(code="closing", text="the harness is closing; it goes on when reopened")
        if runtime.scheduler.is_refusing:
            return Look(
                code="storage_refusing",
                text="the storage refuses commits; a probe is written every second",
                remedy="make room on the disk",
            )
        if not runtime.session.confirmed():
            return Look(
                code="holder_unconfirmed",
                text="this process could not store a sign of life for a lease",
                remedy="look at the disk of the store",
            )
        return None

    # --- running and ready ---------------------------------------------------------------

    def running(self, row: TaskRow) -> Look:
        invocation = self._runtime.invocations.get(row.id)
        if invocation is None:
            look = self.standstill()
            return look or Look(code="ready", text="is reserved and starts in a moment")
        if invocation.stopping_since is not None:
            return self._stopping(invocation)
        handler = "its abort handler" if invocation.aborting else "its code"
        since = duration(trio.current_time() - invocation.started_at)
        text = f"runs {handler} for {since} in this process ({os.getpid()})"
        standing = self.standstill()
        if standing is not None:
            text += f"; {standing.text}"
        held = self._runtime.cycles.held_by(row.id)
        if held:
            text += f" and waits there for {self._words(held)}"
            held = look_up(self, held).tasks
        return Look(code="running", text=text, needs=held)

    def _words(self, ids: Sequence[int]) -> str:
        """How many of each kind, for a person."""
        counts = Counter(self._runtime.cycles.word(self._runtime.published, id) for id in ids)
        return ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for word, n in counts.items())

    # C007
    def _stopping(self, invocation: Invocation) -> Look:
        assert invocation.stopping_since is not None
        since = duration(trio.current_time() - invocation.stopping_since)
        frame = invocation.innermost()
        where = "" if frame is None else f", at {plain(frame)}"
        return Look(code="running", text=f"has been told to stop for {since} and still runs{where}")

    def turn(self, row: TaskRow) -> Look:
        runtime, kind = self._runtime, row.kind
        look = self.standstill()
        if look is not None:
            return attrs.evolve(look, text=f"is ready, but {look.text}")
        if not runtime.started:
            return Look(
                code="not_started",
                text="is ready, but this harness has not been started",
                remedy="call `start()`, or submit, create or wait for something",
            )
        if row.id in runtime.index.running:
            return Look(code="ready", text="goes on when its last handler has returned")
        look = self._suspected(row)
        if look is not None:
            return look
        ahead, exact = self._ahead(row)
        place = "is next of its kind" if not ahead else f"{ahead:,} of its kind go first"
        if not exact:
            place = f"more than {ahead:,} of its kind go first"
        scheduler, settings = runtime.scheduler, runtime.session.settings
        limit = settings.limits.get(kind)
        counted = ahead if exact else None
        if limit is not None and scheduler.free(kind) <= 0:
            text = f"waits for a slot: {limit:,} of {limit:,} {plain(kind)} run; {place}"
            return Look(code="limit_reached", text=text, place=counted)
        if scheduler.free_total() <= 0:
            most = settings.running_max
            text = f"waits for a slot: {most:,} of {most:,} invocations run; {place}"
            return Look(code="limit_reached", text=text, place=counted)
        since = duration((self.now_us - row.ready_us) / 1e6)
        return Look(code="ready", text=f"is ready for {since}; {place}", place=counted)

    def _suspected(self, row: TaskRow) -> Look | None:
        """Whether it waits for its turn to be tried alone."""
        suspects, node = self._runtime.scheduler.suspects, self._runtime.published.task(row.id)
        tried = suspects.tries()
        if node is None or tried is None or tried == row.id or not suspects.suspect(node):
            return None
        text = (
            f"was running each of the last {row.recoveries} times that the process died; "
            f"it is tried alone, after {brief(self.storage, tried)}"
        )
        return Look(code="suspect", text=text)

    def _ahead(self, row: TaskRow) -> tuple[int, bool]:
        """How many ready tasks of its kind go first, and whether that is all of them."""
        published = self._runtime.published
        ahead = looked_at = 0
        for id in itertools.islice(self._runtime.index.ready.in_order(row.kind), PLACES_MAX):
            if id == row.id:
                return ahead, True
            looked_at += 1
            node = published.task(id)
            # What has become void in the queue is passed over when its turn comes.
            ahead += node is not None and node.live and node.blocked is None
        if looked_at < PLACES_MAX:
            # Taken from the queue by a pass whose commit is on its way.
            return 0, True
        return ahead, False

    # --- what it needs -------------------------------------------------------------------

    def below(self, id: int) -> Below:
        published, children = self._runtime.published, self._runtime.index.children
        found: list[int] = []
        pending = [iter(children.get(id, ()))]
        for _ in range(_WALK_MAX):
            if not pending:
                return Below(tuple(found), more=False)
            child = next(pending[-1], None)
            if child is None:
                pending.pop()
                continue
            node = published.find(child)
            if node is None or node.background:
                continue
            if not node.live:
                pending.append(iter(children.get(child, ())))
            elif len(found) == LOOKS_MAX:
                break
            else:
                found.append(child)
        return Below(tuple(found), more=True)

    def awaited(self, row: TaskRow, on: Sequence[int]) -> Awaited:
        published = self._runtime.published
        live = (id for id in on if (node := published.task(id)) is not None and node.live)
        tasks = tuple(itertools.islice(live, LOOKS_MAX))
        open_ = self._runtime.index.open_joins.get(row.id)
        if open_ is None or (open_ and not tasks):
            return look_up(self, on)
        return Awaited(open_, False, tasks)

    def asks(self, id: int) -> tuple[str, str] | None:
        return self._runtime.kinds.asks(id)

    def barrier(self, row: TaskRow) -> Look | None:
        runtime = self._runtime
        node = runtime.published.task(row.id)
        # Both remember what they have passed, so that a long way down does not walk up each time.
        if node is None or not (
            runtime.below_intent(node) or runtime.halted(runtime.published, node)
        ):
            return None
        owners = runtime.published.owners(node)
        return find_barrier(row, (owner for owner in owners if isinstance(owner, Node)))

    def blocked_hint(self, row: TaskRow) -> str | None:
        definition = self._runtime.snapshot().definition(row.kind)
        if definition is None:
            return None
        installed = definition_info(definition).version
        if row.blocked in CODE_BLOCKS and installed != row.version:
            return f"which is of version {row.version}; version {installed} is installed"
        return None

    def unread(self, id: int) -> int:
        return self._runtime.unread(id)
