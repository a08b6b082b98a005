"""The outline of live tasks: what a picture of the tree is made from."""

from __future__ import annotations

from pathlib import Path

from pidurable.records._tasks import Status
from pidurable.storage import Batch, HolderClaim, Op, SqliteStorage, TaskRow


def test_the_outline_and_the_counts_are_those_of_the_live_rows(tmp_path: Path) -> None:
    """By id from either end, ended tasks left out, each counted once."""
    storage = SqliteStorage(tmp_path / "s.sqlite")
    claim = HolderClaim(holder_id="t", host="h", pid=1, at_us=1, lease_seconds=15)
    epoch = storage.acquire(claim, takeover=False).epoch
    empty = storage.live_counts(), storage.outline()

    def row(
        id: int, status: Status, *, blocked: str | None = None, abort: int | None = None
    ) -> TaskRow:
        return TaskRow(
            id, 1, "k", 1, 3 if id > 3 else None, None, id % 2, None, None, 1, int(status),
            None, None, abort, None, 0, 0, 0, 1, None, blocked, None,
        )  # fmt: skip

    rows = [
        row(2, Status.PENDING),
        row(3, Status.RUNNING),
        row(4, Status.WAITING),
        row(5, Status.COMPLETING),
        row(6, Status.TERMINAL),
        row(7, Status.PENDING, blocked="faulted", abort=5),
        row(8, Status.WAITING, abort=5),
    ]
    writes = [(Op.TASK, each) for each in rows]
    storage.apply(Batch(epoch=epoch, seq=1, next_id=9, flush=True, writes=writes))
    counts, outline = storage.live_counts(), storage.outline()
    newest = storage.outline(reverse=True, limit=2)
    storage.close()

    assert empty == ((0,) * 7, [])
    assert outline == [
        (2, 1, None, 0, 0, 0),
        (3, 1, None, 1, 0, 0),
        (4, 1, 3, 2, 0, 0),
        (5, 1, 3, 3, 0, 0),
        (7, 1, 3, 0, 1, 1),
        (8, 1, 3, 2, 0, 1),
    ]
    assert newest == outline[:-3:-1]
    assert counts == (6, 1, 1, 1, 1, 1, 1)
