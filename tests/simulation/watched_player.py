"""A player that watches the task graph, from several roots and with several limits.

After every commit each graph that is watched is compared with one that is made anew from the rows
of all commits until then, by rules of its own. Whoever watches applies every patch to the first
value, at once or when the session is over, and has to end with the last one.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import attrs
import trio
from player import Difference, Player
from programs import Program
from stage import ROOT

from pidurable.errors import CommitBodyTimeoutError, SessionClosedError, SessionPoisonedError
from pidurable.records import _patch
from pidurable.storage import Op, Storage
from pidurable.tasks._graph import TaskGraph, graph_json

LIMITS = (1, 2, 5, 1_000)
STATUSES = ("pending", "running", "waiting", "completing", "terminal")
TERMINAL = 4


@attrs.define(eq=False)
class Rows:
    """What the store holds of the tree, told commit by commit."""

    tasks: dict[int, Any] = attrs.Factory(dict)
    phases: dict[int, str] = attrs.Factory(dict)
    waits: dict[int, Any] = attrs.Factory(dict)
    conversations: dict[int, Any] = attrs.Factory(dict)

    @classmethod
    def of(cls, storage: Storage) -> Rows:
        """Everything that a store holds."""
        made = cls()
        owners: list[int | None] = [None]
        for row in storage.tasks(limit=1_000_000):
            made.tasks[row.id] = row._asdict()
            owners.append(row.id)
            found = storage.task_checkpoint(row.id)
            if found is not None:
                made.phases[row.id] = found[0]
            wait = storage.task_wait(row.id)
            if wait is not None:
                made.waits[row.id] = json.loads(wait)
        for owner in owners:
            for each in storage.conversations_by_owner(owner, limit=1_000_000):
                made.conversations[each.id] = each
        return made

    def apply(self, writes: list[tuple[Op, Any]]) -> None:
        """The rows of one commit."""
        for op, row in writes:
            if op is Op.CONVERSATION:
                self.conversations[row.id] = row
            elif op is Op.TASK:
                self.tasks[row.id] = row._asdict()
            elif op is Op.TASK_STATE:
                self.tasks[row.id].update(row._asdict())
            elif op is Op.CHECKPOINT:
                self.phases[row[0]] = row[1]
            elif op is Op.WAIT:
                self.waits[row[0]] = json.loads(row[1])
            elif op is Op.WAIT_DELETE:
                self.waits.pop(row[0], None)

    # --- the graph, made anew ------------------------------------------------------------

    def graph(self, root: int | None, limit: int) -> Any:
        """The JSON of the graph below a root."""
        live = [id for id, row in sorted(self.tasks.items()) if row["status"] < TERMINAL]
        if root in self.tasks and root not in live:
            live, top = [], None
        else:
            live = [id for id in live if root is None or root in self.above(id)]
            top = self.tasks[root]["conversation"] if root in self.tasks else root
        shown = live[:limit]
        wanted = {id for id in (top,) if id is not None}
        for id in shown:
            mine = [each.id for each in self.conversations.values() if each.owner == id]
            wanted |= set(sorted(mine)[:100])
            at: int | None = self.tasks[id]["conversation"]
            while at is not None:
                wanted.add(at)
                at = None if at == top else self.home(self.conversations[at].owner)
        return {
            "root": root,
            "tasks": {str(id): self._task(id) for id in shown},
            "conversations": {str(id): self._conversation(id) for id in sorted(wanted)},
            "left_out": len(live) - len(shown),
        }

    def above(self, id: int) -> list[int]:
        """A task and everything above it, ended or not."""
        found: list[int] = []
        at: int | None = id
        while at is not None:
            found.append(at)
            if at in self.tasks:
                at = self.tasks[at]["owner"] or self.tasks[at]["conversation"]
            else:
                at = self.conversations[at].owner
        return found

    def home(self, task: int | None) -> int | None:
        return None if task is None else int(self.tasks[task]["conversation"])

    def _conversation(self, id: int) -> Any:
        row = self.conversations[id]
        home = self.home(row.owner)
        return {"id": id, "owner": row.owner, "owner_conversation_id": home, "key": row.key}

    def _task(self, id: int) -> Any:
        row, wait = self.tasks[id], self.waits.get(id) or {}
        on = wait.get("on") or []
        until = wait.get("deadline_us")
        status = STATUSES[row["status"]]
        if status == "pending" and row["tries"]:
            until = row["ready_us"] or None
        return {
            "id": id,
            "conversation_id": row["conversation"],
            "kind": row["kind"],
            "owner": row["owner"],
            "background": bool(row["background"]),
            "status": status,
            "phase": self.phases.get(id),
            "waits_on": on[:100],
            "waits_on_count": len(on),
            "waits_for_signals": bool(wait.get("signals")),
            "wait_until_us": until,
            "outcome": row["outcome_status"] if status == "completing" else None,
            "abort_reason": row["abort_reason"] if row["abort_us"] is not None else None,
            "blocked": row["blocked"],
        }


class Checker:
    """The participant that compares after each commit."""

    def __init__(self, player: WatchedPlayer, rows: Rows) -> None:
        self.player = player
        self.rows = rows

    def committed(self, tx: Any) -> None:
        self.rows.apply(tx.writes)
        runtime = self.player.stage.rt
        last = tx.seq == runtime.session.line.published_seq
        for (root, limit), followed in runtime.graphs.followed.items():
            self.player.compared += 1
            found = graph_json(followed.hub.value)
            expected = self.rows.graph(root, limit if last else len(followed.hub.value.tasks))
            if found != expected:
                difference = f"graph of root {root}, limit {limit}, last {last}, commit {tx.seq}"
                self.player.ledger.wrong(f"{difference}: expected {expected}, found {found}")

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None: ...

    def reverted(self) -> None: ...

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...


class WatchedPlayer(Player):
    """One program, with graphs watched from the beginning of each opening and from later on."""

    def __init__(self, program: Program, *, seed: int = 0, path: Path | None = None) -> None:
        super().__init__(program, seed=seed, path=path)
        self._random = Random(f"{seed}/graphs")
        self._over = trio.Event()
        self._rows = Rows()
        self.compared = 0
        self.frames = 0
        self.whole = 0
        self.ended_roots = 0

    async def _played(self, left: Program) -> bool:
        runtime = self.stage.rt
        self._over = trio.Event()
        self._rows = Rows.of(self.stage.storage)
        runtime.session.participants.append(Checker(self, self._rows))
        self._follow(None, 1_000, stalls=False)
        self._follow(None, 2, stalls=True)
        self._follow(ROOT, self._random.choice(LIMITS), stalls=False)
        return await super()._played(left)

    async def _let_run(self, turns: int) -> None:
        rows = self._rows
        if self._random.random() < 0.2:
            ids = [*rows.tasks, *rows.tasks, *rows.conversations]
            stalls = self._random.random() < 0.3
            self._follow(self._random.choice(ids), self._random.choice(LIMITS), stalls=stalls)
        await super()._let_run(turns)

    async def _all_answered(self) -> None:
        self._over.set()
        await super()._all_answered()

    def _follow(self, root: int | None, limit: int, *, stalls: bool) -> None:
        self._spawn(lambda: self._watch(root, limit, stalls=stalls))

    async def _watch(self, root: int | None, limit: int, *, stalls: bool) -> None:
        graphs = self.stage.rt.graphs
        try:
            async with graphs.watch(root, limit) as watch:
                hub, seq = watch._hub, watch.seq
                value = watch.json()
                if stalls:
                    await self._over.wait()
                async for frame in watch:
                    if frame.seq <= seq:
                        raise Difference(f"frame {frame.seq} after {seq}")
                    seq = frame.seq
                    value = _patch.apply(value, frame.patch)
                    self.frames += 1
                    self.whole += frame.whole
                    self._compare(value, frame.value, f"patches until {seq} of root {root}")
                    # Some are slower than what they watch.
                    for _ in range(self._random.choice((0, 0, 0, 3, 30))):
                        await trio.lowlevel.checkpoint()
                self._compare(value, hub.value, f"the end of root {root}")
                self.ended_roots += not self._over.is_set()
        except SessionPoisonedError:
            if not self.stage.storage.frozen:
                raise
        except CommitBodyTimeoutError:
            # The clock was moved by minutes while its beginning was read.
            pass
        except SessionClosedError:
            if not self.stage.ending:
                raise

    def _compare(self, value: Any, graph: TaskGraph, what: str) -> None:
        if value != graph_json(graph):
            raise Difference(f"{what}: expected {graph_json(graph)}, found {value}")
