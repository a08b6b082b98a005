"""Moving and copying sessions: beside a holder, with work in flight, and cut short."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from pidurable import (
    Extension,
    MoveProgress,
    Registry,
    Task,
    TaskContext,
    TextBlock,
    UserMessage,
    export_session,
    import_session,
    nothing_to_undo,
    open_harness,
    open_reader,
    phase,
)
from pidurable.errors import (
    ExportFileError,
    InvalidArgumentError,
    PathTakenError,
    StorageAccessError,
)
from pidurable.harness import _move
from pidurable.session._seams import InlineBlocking
from pidurable.storage import Batch, HolderClaim, MemoryStorage, Op, _places
from pidurable.storage._holder import take_lock

SAID = UserMessage(blocks=(TextBlock(text="x" * 500),), at_us=0)


@attrs.frozen
class Ask:
    pass


@attrs.frozen
class Tell:
    pass


class Effect(Task[str, Ask | Tell, str]):
    """Waits for a signal, then says under which key it would do its effect."""

    name = "move.effect"
    abort = nothing_to_undo

    def initial(self, input: str) -> Ask:
        return Ask()

    @phase
    async def ask(self, at: Ask, ctx: TaskContext[str, Ask | Tell, str]) -> None:
        await ctx.wait(then=Tell(), signals=True)

    @phase
    async def tell(self, at: Tell, ctx: TaskContext[str, Ask | Tell, str]) -> None:
        async with ctx.commit() as tx:
            list(tx.receive())
            tx.complete(ctx.key(ctx.input))


def registry() -> Registry:
    found = Registry()
    found.install(Extension("move", tasks=[Effect()]))
    return found


async def start(store: Path) -> int:
    """A session with a task that waits; returns its id."""
    async with open_harness(store, registry=registry(), create=True) as harness:
        root = await harness.root()
        task = await root.create_task(Effect, "charge")
        while harness.explain(task).code != "waiting":  # noqa: ASYNC110
            await trio.sleep(0.001)
    return int(task)


async def finish(store: Path, task: int) -> str:
    """Let the task go on, and return the key that it had."""
    async with open_harness(store, registry=registry()) as harness:
        await harness.signal(task, "go")
        outcome = await harness.wait_for_task(task, timeout=60)
    return str(outcome.result)


@pytest.fixture(autouse=True)
def piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever watches the progress sees every piece: none is joined with the next."""
    monkeypatch.setattr(_move, "_PIECE_SECONDS", 0.0)


async def test_a_move_goes_on_under_the_same_keys_and_a_copy_under_its_own(tmp_path: Path) -> None:
    """No effect of a copy can be taken for one of the original, and each of a move is."""
    task = await start(tmp_path / "old")
    await export_session(tmp_path / "old", tmp_path / "file")
    moved = await import_session(tmp_path / "file", tmp_path / "moved", as_copy=False)
    copied = await import_session(tmp_path / "file", tmp_path / "copied", as_copy=True)

    keys = [await finish(tmp_path / name, task) for name in ("old", "moved", "copied")]

    assert keys[0] == keys[1] == f"{moved.uuid}:{task}:charge"
    assert keys[2] == f"{copied.uuid}:{task}:charge"
    assert copied.uuid != moved.uuid == copied.origin
    assert (moved.live_tasks, copied.live_tasks) == (1, 1)


async def test_an_export_beside_a_working_holder_is_one_of_its_states(tmp_path: Path) -> None:
    """Each commit stores two entries; every export, taken while they come, has both or none."""
    store = tmp_path / "store"
    async with open_harness(store, create=True) as harness, trio.open_nursery() as nursery:
        talk = await harness.root()

        async def work() -> None:
            while True:
                async with harness.commit() as tx:
                    for _ in range(2):
                        tx.append(talk.id, kind="move.said", messages=[SAID])

        nursery.start_soon(work)
        counts = []
        for number in range(4):
            report = await export_session(store, tmp_path / f"{number}.jsonl")
            counts.append(report.records.get("entry", 0))
            await import_session(tmp_path / f"{number}.jsonl", MemoryStorage, as_copy=False)
        nursery.cancel_scope.cancel()

    assert [count % 2 for count in counts] == [0, 0, 0, 0]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]
    assert not [name for name in os.listdir(tmp_path) if ".export" in name]


async def test_a_storage_in_memory_is_exported_as_of_one_moment(tmp_path: Path) -> None:
    """A commit that comes between two pieces of the export is not in it."""
    storage = filled(2_000)
    first = io.BytesIO()
    await export_session(storage, first)
    late = io.BytesIO()

    def commit(progress: MoveProgress) -> None:
        if progress.done == 0:
            add_entries(storage, 1, after=9_000)

    await export_session(storage, late, progress=commit, blocking=InlineBlocking())

    assert late.getvalue() == first.getvalue()
    assert storage.head().seq == 2


async def test_another_storage_that_changes_meanwhile_is_not_exported() -> None:
    """Pages of two states are not one session."""

    class Other:
        def __init__(self, inner: MemoryStorage) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    storage = filled(10)
    other: Any = Other(storage)
    await export_session(other, io.BytesIO())

    with pytest.raises(ExportFileError, match=r"changed while it was read \(commit 1 became 2\)"):
        await export_session(
            other,
            io.BytesIO(),
            progress=lambda progress: storage.head().seq == 1 and add_entries(storage, 1, after=99),
            blocking=InlineBlocking(),
        )


async def test_an_export_is_for_its_owner_and_overwrites_only_when_told(tmp_path: Path) -> None:
    """0600, no part of it under its name, and the older file stays where nobody says otherwise."""
    storage, file = filled(3), tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(PathTakenError):
        await export_session(storage, file)
    assert file.read_text() == "mine"

    report = await export_session(storage, file, overwrite=True)

    assert file.stat().st_size == report.size_bytes
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


async def test_a_store_is_as_it_was_after_its_export_and_an_imported_one_is_private(
    tmp_path: Path,
) -> None:
    """Exporting writes nothing into the store; the new store is 0600, in one file."""
    await start(tmp_path / "old")
    before = (tmp_path / "old").read_bytes()
    await export_session(tmp_path / "old", tmp_path / "file")
    await import_session(tmp_path / "file", tmp_path / "new", as_copy=False)

    assert (tmp_path / "old").read_bytes() == before
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    assert [name for name in os.listdir(tmp_path) if name.startswith("new")] == ["new"]
    async with open_reader(tmp_path / "new") as reader:
        holder = await reader.holder()
    assert holder is not None
    assert holder.state == "released"


@pytest.mark.parametrize("at", [0, 2])
async def test_a_cancelled_move_leaves_nothing(tmp_path: Path, at: int) -> None:
    """Between any two pieces, of an export and of an import."""
    storage = filled(1_200)
    store = tmp_path / "store"
    await export_session(storage, tmp_path / "file")
    await import_session(tmp_path / "file", store, as_copy=False)
    before = sorted(os.listdir(tmp_path))

    for move in (
        lambda **how: export_session(store, tmp_path / "again", **how),
        lambda **how: import_session(tmp_path / "file", tmp_path / "new", as_copy=True, **how),
    ):
        seen: list[MoveProgress] = []
        with trio.CancelScope() as scope:

            def cancel(
                progress: MoveProgress,
                seen: list[MoveProgress] = seen,
                scope: trio.CancelScope = scope,
            ) -> None:
                seen.append(progress)
                if len(seen) > at:
                    scope.cancel()

            await move(progress=cancel, blocking=InlineBlocking())
        assert scope.cancelled_caught
        left = [name for name in os.listdir(tmp_path) if not name.endswith(("-wal", "-shm"))]
        assert sorted(left) == before


async def test_what_a_dead_process_left_is_cleared_and_what_a_living_one_makes_is_not(
    tmp_path: Path,
) -> None:
    """The lock of the import tells; nobody has to remove anything by hand."""
    await export_session(filled(3), tmp_path / "file")
    for name in ("part", "part-wal", "part-shm", "part.lock.1"):
        (tmp_path / f"new.import-{name}").write_text("left")
    for name in ("new.important", "new.import-notes", "new.import-part.txt"):
        (tmp_path / name).write_text("mine")
    lock = take_lock(str(tmp_path / "new.import"), 0)
    with pytest.raises(StorageAccessError, match="another process is making it now"):
        await import_session(tmp_path / "file", tmp_path / "new", as_copy=False)
    assert (tmp_path / "new.import-part").exists()

    lock.drop()  # as a death does
    await import_session(tmp_path / "file", tmp_path / "new", as_copy=False)

    left = ["file", "new", "new.import-notes", "new.import-part.txt", "new.important"]
    assert sorted(os.listdir(tmp_path)) == left


@pytest.mark.parametrize("one_step", [True, False])
async def test_somebody_who_makes_the_store_meanwhile_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_step: bool
) -> None:
    """The last step overwrites nothing either, on whatever file system."""
    if not one_step:
        monkeypatch.setattr(_places, "_rename_in_one_step", lambda old, new: False)
    await export_session(filled(3), tmp_path / "first")
    await import_session(tmp_path / "first", tmp_path / "other", as_copy=False)
    assert sorted(os.listdir(tmp_path)) == ["first", "other"]
    (tmp_path / "first").unlink()
    (tmp_path / "other").unlink()
    await export_session(filled(3), tmp_path / "file")

    def take(progress: MoveProgress) -> None:
        (tmp_path / "new").write_text("mine")

    with pytest.raises(PathTakenError, match="it was made meanwhile"):
        await import_session(
            tmp_path / "file",
            tmp_path / "new",
            as_copy=False,
            progress=take,
            blocking=InlineBlocking(),
        )

    assert (tmp_path / "new").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "new"]


async def test_a_disk_that_is_full_is_told_and_nothing_is_left() -> None:
    """The error of the stream is the error of the export."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ExportFileError, match="No space left on device"):
        await export_session(filled(3), Full())


async def test_wrong_arguments_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    """What an import is must be said, and paths must be paths."""
    bad: Any = "copy"
    with pytest.raises(InvalidArgumentError, match="as_copy: expected True or False"):
        await import_session(tmp_path / "file", tmp_path / "new", as_copy=bad)
    for wrong in ("", "a\0b", 7, None, filled(1)):
        with pytest.raises(InvalidArgumentError, match="store: expected a path"):
            await import_session(tmp_path / "file", wrong, as_copy=True)  # type: ignore[arg-type]
    nothing: Any = object()
    with pytest.raises(InvalidArgumentError, match="store: expected a path"):
        await export_session(nothing, tmp_path / "file")
    with pytest.raises(ExportFileError, match="No such file"):
        await import_session(tmp_path / "file", tmp_path / "new", as_copy=True)
    with pytest.raises(StorageAccessError, match="there is no such file"):
        await export_session(tmp_path / "missing", tmp_path / "file")
    for file in (tmp_path / "no" / "file", tmp_path / "no" / "new"):
        with pytest.raises(ExportFileError, match="does not exist; create it first"):
            await export_session(filled(1), file)
    assert os.listdir(tmp_path) == []


def filled(count: int) -> MemoryStorage:
    """A session in memory with entries."""
    storage = MemoryStorage()
    claim = HolderClaim(holder_id="h", host="h", pid=1, at_us=0, lease_seconds=15.0)
    storage.acquire(claim, takeover=False)
    row = (1, "u", None, None, None, "root", "p", 0)
    storage.apply(Batch(1, 1, 2, True, [(Op.CONVERSATION, row)]))
    add_entries(storage, count, after=1, seq=1)
    return storage


def add_entries(storage: MemoryStorage, count: int, *, after: int, seq: int = 2) -> None:
    """One commit with some entries."""
    rows: Sequence[Any] = [
        (Op.ENTRY, (after + n, 1, 1, "k", None, None, None, None, '"x"', 0))
        for n in range(1, count + 1)
    ]
    storage.apply(Batch(1, seq, after + count + 1, True, rows))
