"""From the rows of a commit to what the model is told of it: plain data, nothing interpreted.

`Ledger` follows the three places at which a commit can be: staged on the line, durable in the
storage, published to those who look. The model stands at the newest staged commit; a lost batch or
the death of the process takes it back to what was durable.
"""

from __future__ import annotations

import json
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import trio
from oracle import Oracle, Refused
from rare import note

from pidurable.storage import Op

STATUSES = ("pending", "running", "waiting", "completing", "terminal")


def state_of(row: Any) -> dict[str, Any]:
    """The changing columns of a task row, as the model calls them."""
    return {
        "version": row.version,
        "status": STATUSES[row.status],
        "mark": None if row.abort_us is None else row.abort_reason or "",
        "outcome": row.outcome_status,
        "blocked": row.blocked,
        "woken_by": row.woken_by,
        "invocations": row.invocations,
        "recoveries": row.recoveries,
        # Resumed where nothing ran: the store says so in the column of a reason that is not there.
        "let_go": row.abort_us is None and row.abort_reason == "resumed",
        "tries": row.tries,
        # The row says since when a task is ready; only a retry makes that a moment to come.
        "ready_at": row.ready_us if row.tries else 0,
    }


def task_of(row: Any) -> dict[str, Any]:
    """A whole task from its row; its checkpoint and wait are rows of their own."""
    return {
        "conversation": row.conversation,
        "kind": row.kind,
        "owner": row.owner,
        "background": bool(row.background),
        "on_restart": row.on_restart,
        "deadline": row.deadline_us,
        "wait": None,
        "tag": None,
        "digest": None,
        **state_of(row),
    }


def wait_of(text: str | None) -> dict[str, Any] | None:
    """What a task waits for, from its row."""
    if text is None:
        return None
    stored = json.loads(text)
    on = stored.get("on")
    return {
        "on": None if on is None else tuple(on),
        "policy": stored.get("policy") or "all_settled",
        "deadline": stored.get("deadline_us"),
        "signals": bool(stored.get("signals")),
    }


def rows_told(writes: Iterable[tuple[Op, Any]], known: dict[int, Any]) -> dict[str, Any]:
    """What the rows of one commit change, over the tasks that the model knows."""
    tasks: dict[int, dict[str, Any]] = {}
    told: dict[str, Any] = {"tasks": tasks, "conversations": {}, "signals": [], "received": []}

    def task(id: int) -> dict[str, Any]:
        if id not in tasks:
            tasks[id] = dict(known[id])
        return tasks[id]

    for op, row in writes:
        if op is Op.CONVERSATION:
            told["conversations"][row.id] = row.owner
        elif op is Op.TASK:
            tasks[row.id] = task_of(row)
        elif op is Op.TASK_STATE:
            task(row.id).update(state_of(row))
        elif op is Op.CHECKPOINT:
            task(row[0]).update(tag=row[1], digest=row[2])
        elif op is Op.WAIT:
            task(row[0])["wait"] = wait_of(row[1])
        elif op is Op.WAIT_DELETE:
            task(row[0])["wait"] = None
        elif op is Op.SIGNAL:
            told["signals"].append((row.id, row.task, row.key))
        elif op in (Op.SIGNAL_DELETE, Op.SIGNAL_READ):
            told["received"].append(row[0])
    return told


@attrs.define
class Asked:
    """Who committed, and what was asked for in the body."""

    by: Any
    requests: dict[int, str] = attrs.Factory(dict)
    """Aborts, with their reasons."""
    renewed: set[int] = attrs.Factory(set)
    """Tasks that retry_task or resume_task was called for."""
    received: int | None = None
    """How many signals the body was given."""


class Ledger:
    """What the model is told, where each commit stands, and the first thing that was wrong."""

    def __init__(self, model: Oracle, *, now_us: Callable[[], int]) -> None:
        self.model = model
        self.definitions: dict[str, dict[str, Any]] = {}
        self.now_us = now_us
        self.problems: list[str] = []
        self.trace: list[str] = []
        self.commits = 0
        self.opening = False
        self.raised: dict[int, str] = {}
        """By task: what its handler left behind that could fault it."""
        self._staged: deque[tuple[int, Any, list[tuple[int, int]]]] = deque()
        self._durable = model.snapshot()
        self._published = model.snapshot()
        self._published_seq = 0

    def wrong(self, problem: str) -> None:
        self.problems.append(problem)
        self.trace.append(f"WRONG {problem}")

    def tell(self, seq: int, asked: Asked, writes: Iterable[tuple[Op, Any]]) -> bool:
        """A commit was accepted by the line: the model judges it. True if it created tasks."""
        model = self.model
        told = rows_told(writes, model.tasks)
        by = self._own(told) if asked.by == "scheduler" else asked.by
        commit = {
            "seq": seq,
            "now": self.now_us(),
            "alive": int(trio.current_time() * 1e6),
            "by": by,
            "published": self._published_seq,
            "definitions": self.definitions,
            "requests": asked.requests,
            "renewed": asked.renewed,
            "raised": dict(self.raised),
            **told,
        }
        before, books = model.tasks, model.books
        self.commits += 1
        if asked.received not in (None, len(told["received"])):
            self.wrong(f"commit {seq} by {by}: given {asked.received} signals, read {told}")
        self.trace.append(f"{seq} by {by}: {self._shown(told, before)}")
        try:
            model.commit(commit)
        except Refused as refused:
            self.wrong(f"commit {seq} by {by}: {refused}")
        except Exception:
            # Where the model itself cannot follow, the commit makes no sense to it.
            self.wrong(f"commit {seq} by {by}: the model failed: {traceback.format_exc()}")
        else:
            note(model, before, books, commit, self._published_seq)
        reserved = [
            (id, task["invocations"])
            for id, task in told["tasks"].items()
            if task["invocations"] != before.get(id, task)["invocations"]
        ]
        self._staged.append((seq, model.snapshot(), reserved))
        return any(id not in before for id in told["tasks"])

    def _own(self, told: dict[str, Any]) -> Any:
        """A step of an invocation writes through the scheduler's kind of transaction."""
        mine = [
            id
            for id, task in told["tasks"].items()
            if (old := self.model.tasks.get(id)) is not None
            and old["status"] == "running"
            and task["invocations"] == old["invocations"]
            and task["status"] != "running"
            # A phase that was stopped by a mark writes nothing: then it is settled by a pass.
            and not (old["mark"] and self.model.books[id]["invocation"] == "phase")
        ]
        return mine[0] if len(mine) == 1 and len(told["tasks"]) == 1 else "scheduler"

    @staticmethod
    def _shown(told: dict[str, Any], before: dict[int, Any]) -> str:
        parts = []
        for id, task in told["tasks"].items():
            old = before.get(id, {})
            change = {name: v for name, v in task.items() if old.get(name) != v}
            parts.append(f"{id}{'' if old else ' new'} {change}")
        more = {k: v for k, v in told.items() if k != "tasks" and v}
        return f"{'; '.join(parts)} {more or ''}"

    # --- where commits stand -------------------------------------------------------------

    def stored(self, seq: int) -> None:
        """A batch is durable, up to this commit."""
        for each, snapshot, _ in self._staged:
            if each <= seq:
                self._durable = snapshot

    def published(self, seq: int) -> None:
        while self._staged and self._staged[0][0] <= seq:
            _, self._published, reserved = self._staged.popleft()
            for each in reserved:
                self.model.trials[each] = int(trio.current_time() * 1e6)
        self._published_seq = seq

    def lost(self) -> None:
        """A batch failed: what was staged never was."""
        self._staged.clear()
        self.model.restore(self._durable)

    def at_published(self, look: Callable[[], Any]) -> Any:
        """Ask the model something as of what is published."""
        kept = self.model.snapshot()
        self.model.restore(self._published)
        try:
            return look()
        except Refused as refused:
            self.wrong(str(refused))
        finally:
            self.model.restore(kept)

    def closed(self, *, crashed: bool) -> None:
        """The process is gone; everything begins again from what was durable."""
        self.trace.append("crashed" if crashed else "closed")
        self.lost()
        self.model.definitions = self.definitions
        self.model.died()
        self.raised.clear()
        self._durable = self._published = self.model.snapshot()

    def opened(self) -> None:
        try:
            self.model.opened()
        except Refused as refused:
            self.wrong(str(refused))
