"""Which trees go, and that everything else stays as it was: random stores against a model."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from gc_stores import (
    NOW_US,
    UNSHRUNK,
    Planted,
    check_owners,
    everything,
    expected,
    members_of,
    plant_random,
)
from hypothesis import given, settings, strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.errors import SessionPoisonedError
from pidurable.harness._open import open_harness
from pidurable.harness._reader import open_reader
from pidurable.session._seams import InlineBlocking, TrioClock
from pidurable.storage import RECORDS, MemoryStorage, RecordKind, SqliteStorage, Storage
from pidurable.tasks import _gc
from pidurable.tasks._gc_report import GcReport
from pidurable.testing import Fault, FaultyStorage

MONTH = timedelta(days=30)
BEFORE_US = NOW_US - 30 * 24 * 60 * 60 * 1_000_000


async def collected(storage: Storage, **options: Any) -> GcReport:
    """What one collection says, in a harness of its own."""
    async with open_harness(storage, clock=TrioClock(NOW_US), blocking=InlineBlocking()) as harness:
        return await harness.gc(older_than=options.pop("older_than", MONTH), **options)


def run(fn: Any, *args: Any) -> Any:
    return trio.run(fn, *args, clock=MockClock(autojump_threshold=0))


def planted(made: Planted) -> MemoryStorage:
    storage = MemoryStorage()
    made.store(storage)
    return storage


def check_model(made: Planted, before: Any, storage: Storage, report: GcReport) -> None:
    """Exactly what the model says is gone, and the rest is as it was."""
    model = expected(made, before_us=BEFORE_US)
    after = everything(storage)
    assert {row[0] for row in after[RecordKind.TASK]} == set(made.tasks) - model.tasks
    assert (report.trees, report.tasks) == (len(model.roots), len(model.tasks))
    assert report.conversations == len(model.conversations)
    assert report.documents == len(model.documents)
    for kind, rows in before.items():
        columns = RECORDS[kind].columns
        for row in rows:
            of = dict(zip(columns, row, strict=True))
            gone = (
                of.get("task", of["id"] if kind is RecordKind.TASK else None) in model.tasks
                or of.get("conversation") in model.conversations
                or (kind is RecordKind.CONVERSATION and of["id"] in model.conversations)
                or of.get("document", of.get("id")) in model.documents
            )
            if kind is not RecordKind.BLOB:
                assert (row in after[kind]) == (not gone), (kind, row)
    texts = " ".join(
        str(value)
        for kind, rows in after.items()
        if kind is not RecordKind.BLOB
        for row in rows
        for value in row
    )
    assert {row[0] for row in after[RecordKind.BLOB]} == {
        name for name in made.blobs if name in texts
    }
    assert after[RecordKind.REMOVAL] == []
    keys = {made.tasks[root].key for root in model.roots} - {None}
    requests = {
        row.id for row in made.submissions.values() if row.conversation in model.conversations
    }
    assert {row[2] for row in after[RecordKind.STUB] if row[0] == "task"} == keys
    assert {row[3] for row in after[RecordKind.STUB] if row[0] == "submission"} == requests
    check_owners(storage)


@given(st.integers(0, 2**32), st.sampled_from([1, 4, 500]))
@settings(max_examples=10, phases=UNSHRUNK)
def test_exactly_the_trees_of_the_model_go(seed: int, records_max: int) -> None:
    """Whole trees, as the model of them says, in commits of any size; a dry run says the same."""
    made = plant_random(seed)
    storage = planted(made)
    before = everything(storage.reopen())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gc, "PASS_RECORDS_MAX", records_max)
        told = run(lambda: collected(storage.reopen(), dry_run=True))
        assert everything(storage.reopen()) == before
        report = run(lambda: collected(storage.reopen()))

    check_model(made, before, storage.reopen(), report)
    for name in ("trees", "tasks", "conversations", "entries", "submissions", "documents"):
        assert getattr(told, name) == getattr(report, name), name
    assert (told.blobs, told.bytes, told.kept) == (report.blobs, report.bytes, report.kept)
    again = run(lambda: collected(storage.reopen()))
    assert (again.trees, again.documents, again.blobs, again.bytes) == (0, 0, 0, 0)
    assert again.kept == report.kept


async def opened_until_quiet(storage: Storage) -> None:
    """A holder that does nothing but what an opening does by itself."""
    async with open_harness(storage, clock=TrioClock(NOW_US), blocking=InlineBlocking()):
        await wait_all_tasks_blocked()


def check_whole(made: Planted, storage: Storage) -> None:
    """Of each tree everything is there, or nothing is."""
    members = members_of(made)
    there = {
        row[0]
        for kind in (RecordKind.TASK, RecordKind.CONVERSATION)
        for row in storage.scan(kind, limit=100_000)
    }
    for root, ids in members.items():
        assert ids <= there or not ids & there, root


@given(st.integers(0, 2**32), st.sampled_from([2, 500]))
@settings(max_examples=2, phases=UNSHRUNK)
def test_a_crash_after_any_commit_leaves_no_half_of_a_tree(seed: int, records_max: int) -> None:
    """At each commit every record has its owners; what was begun is finished by the opening."""
    made = plant_random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gc, "PASS_RECORDS_MAX", records_max)
        patch.setattr(_gc, "_RECORDS_MIN", 1)
        for commit in range(1, 200):
            storage = planted(made)
            before = everything(storage.reopen())
            faulty = FaultyStorage(storage.reopen())
            faulty.add(Fault.call(faulty.freeze, at=commit, after=True))
            try:
                report = run(lambda faulty=faulty: collected(faulty))
            except SessionPoisonedError:
                check_owners(storage.reopen())
            else:
                check_model(made, before, storage.reopen(), report)
                break
            run(lambda storage=storage: opened_until_quiet(storage.reopen()))
            assert storage.reopen().removals() == []
            check_whole(made, storage.reopen())
            check_owners(storage.reopen())
            run(lambda storage=storage: collected(storage.reopen()))
            expect = expected(made, before_us=BEFORE_US)
            assert {row[0] for row in storage.reopen().scan(RecordKind.TASK, limit=100_000)} == (
                set(made.tasks) - expect.tasks
            )
            check_owners(storage.reopen())
        else:
            pytest.fail("it never came to an end")


@given(st.integers(0, 2**32), st.sampled_from([2, 500]))
@settings(max_examples=10, phases=UNSHRUNK)
def test_the_outcomes_of_the_roots_can_be_kept(seed: int, records_max: int) -> None:
    """With `keep_outcomes` everything below goes, roots stay with their outcomes, and go later."""
    made = plant_random(seed)
    storage = planted(made)
    before = everything(storage.reopen())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gc, "PASS_RECORDS_MAX", records_max)
        told = run(lambda: collected(storage.reopen(), keep_outcomes=True, dry_run=True))
        report = run(lambda: collected(storage.reopen(), keep_outcomes=True))
        model = expected(made, before_us=BEFORE_US)
        after = everything(storage.reopen())
        gone = model.tasks - model.roots
        assert {row[0] for row in after[RecordKind.TASK]} == set(made.tasks) - gone
        for kind in (RecordKind.TASK, RecordKind.OUTCOME):
            assert after[kind] == [row for row in before[kind] if row[0] not in gone]
        assert {row[0] for row in after[RecordKind.INPUT]} == set(made.tasks) - model.tasks
        assert [row for row in after[RecordKind.STUB] if row[0] == "task"] == []
        assert (report.trees, report.tasks) == (len(model.roots), len(gone))
        assert (told.trees, told.tasks, told.bytes, told.blobs, told.kept) == (
            *(report.trees, report.tasks, report.bytes, report.blobs, report.kept),
        )
        again = run(lambda: collected(storage.reopen(), keep_outcomes=True))
        assert (again.trees, again.tasks, again.bytes) == (0, 0, 0)
        last = run(lambda: collected(storage.reopen()))
        assert last.trees == len(model.roots)
    check_owners(storage.reopen())


@pytest.mark.parametrize("seed", [7, 44, 101])
async def test_a_file_and_a_reader_beside_its_holder_say_the_same(
    seed: int, tmp_path: Path
) -> None:
    """The dry run of a reader, that of the holder, and the removal have the same figures."""
    made = plant_random(seed)
    store = tmp_path / "s.sqlite"
    made.store(SqliteStorage(store, durability="process"))
    options: Any = {"clock": TrioClock(NOW_US), "durability": "process"}
    async with (
        open_harness(store, blocking=InlineBlocking(), **options) as harness,
        open_reader(store, blocking=InlineBlocking(), clock=options["clock"]) as reader,
    ):
        before = everything(harness.session.raw_storage)
        told = await reader.gc(older_than=MONTH)
        again = await harness.gc(older_than=MONTH, dry_run=True)
        done = await harness.gc(older_than=MONTH)
        check_model(made, before, harness.session.raw_storage, done)
        same = {"dry_run", "before", "pages_freed", "pages_left"}
        expect = attrs.asdict(done, filter=lambda field, _: field.name not in same)
        for report in (told, again):
            assert {**attrs.asdict(report), **expect} == attrs.asdict(report)
        assert (await reader.gc(older_than=MONTH)).trees == 0
