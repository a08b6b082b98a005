"""Runtimes for measuring: a store in a file, the definitions of a benchmark, and nothing else."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import trio
from _raw import Rows

from pidurable.records._codec import Codec
from pidurable.records._limits import Settings
from pidurable.session._seams import SystemClock
from pidurable.storage import (
    Batch,
    ConversationRow,
    HolderClaim,
    Op,
    SqliteStorage,
    TaskRow,
)
from pidurable.tasks._definition import Task
from pidurable.tasks._open import open_runtime
from pidurable.tasks._runtime import Runtime, StaticDefinitions

CONVERSATION = 1
"""The id of the one conversation of a store made by `Seed`."""

_BATCH_TASKS = 10_000


@asynccontextmanager
async def open_tasks(
    path: Path,
    *definitions: Task[Any, Any, Any],
    durability: Literal["power", "process"] = "power",
    settings: Settings | None = None,
    storage: SqliteStorage | None = None,
) -> AsyncIterator[Runtime]:
    """A runtime over a store in a file; it is not started."""
    installed = StaticDefinitions(definitions, Codec())
    async with open_runtime(
        storage or SqliteStorage(path, durability=durability),
        snapshot=lambda: installed,
        settings=settings,
        durability=durability,
    ) as runtime:
        yield runtime


class Seed:
    """Fills a new store with tasks through `Storage.apply`, as a process that ran them left it."""

    def __init__(self, path: Path) -> None:
        self.now_us = SystemClock().now_us()
        self.tasks = 0
        self._storage = SqliteStorage(path, durability="process")
        claim = HolderClaim(
            holder_id="seed",
            host=socket.gethostname(),
            pid=os.getpid(),
            at_us=self.now_us,
            lease_seconds=3_600.0,
        )
        head = self._storage.acquire(claim, takeover=False)
        self._epoch, self._seq, self._next_id = head.epoch, head.seq, head.next_id
        assert self.draw_id() == CONVERSATION
        made = ConversationRow(CONVERSATION, "bench", None, None, None, None, "", self.now_us)
        self.apply([(Op.CONVERSATION, made)])

    def draw_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    @property
    def seq(self) -> int:
        """The sequence number of the next batch."""
        return self._seq + 1

    def checkpoint(self) -> None:
        """Move the log into the file."""
        self._storage.checkpoint()

    def apply(self, writes: list[tuple[Op, tuple[Any, ...]]], *, clean: bool = False) -> None:
        self._seq += 1
        self._storage.apply(
            Batch(
                epoch=self._epoch,
                seq=self._seq,
                next_id=self._next_id,
                flush=False,
                writes=writes,
                clean=clean,
            )
        )

    def fill(self, count: int, rows: Callable[[int, int], Rows]) -> None:
        """Add `count` tasks; `rows` is given the number and the id of each."""
        self.tasks += count
        for first in range(0, count, _BATCH_TASKS):
            writes: list[tuple[Op, tuple[Any, ...]]] = []
            for number in range(first, min(count, first + _BATCH_TASKS)):
                writes += rows(number, self.draw_id())
            # Neighbours of one kind share a statement, in the writer as in a commit.
            writes.sort(key=lambda write: write[0])
            self.apply(writes)
            self.checkpoint()

    def close(self) -> None:
        """Leave the store as a clean close does."""
        self.apply([], clean=True)
        self._storage.release(self._epoch)
        self._storage.close()


def task_row(id: int, kind: str, **given: Any) -> TaskRow:
    """A task that a process created, and changed as `given` says."""
    now = SystemClock().now_us()
    row = TaskRow(
        id=id,
        conversation=CONVERSATION,
        kind=kind,
        version=1,
        owner=None,
        key=None,
        background=0,
        on_restart=None,
        deadline_us=None,
        created_us=now,
        status=0,
        started_us=None,
        ended_us=None,
        abort_us=None,
        abort_reason=None,
        invocations=0,
        recoveries=0,
        tries=0,
        ready_us=now,
        woken_by=None,
        blocked=None,
        outcome_status=None,
    )
    return row._replace(**given)


async def until(condition: Callable[[], bool]) -> None:
    """Pass turns of the loop until something is so."""
    while not condition():  # noqa: ASYNC110 - nothing tells when it becomes so
        await trio.sleep(0.001)
