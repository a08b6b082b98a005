"""The file layer below SQLite rebuilds what a crash may leave, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crash_recordings import STORE, record
from outside_ledger import Ledger
from recording_vfs import Disk, Operation, Recorder, read_image

from pidurable.storage import Batch, SqliteStorage
from pidurable.testing._conformance_base import claim, conversation

A = b"a" * 1_024
B = b"b" * 1_024


def write(offset: int, data: bytes, name: str = "f") -> Operation:
    return Operation("write", name, offset, data)


@pytest.fixture
def disk() -> Disk:
    """A disk with one file, all of which is safe."""
    return Disk.of({"f": A})


def images(disk: Disk, how: str) -> set[bytes]:
    """The contents of the file in many images of one kind."""
    draw = random.Random(1)
    made = {
        "subset": lambda: disk.subset(draw),
        "sectors": lambda: disk.subset(draw, sectors=True),
        "torn": lambda: disk.torn(draw) or {},
        "garbled": lambda: disk.garbled(draw) or {},
    }[how]
    return {made()["f"] for _ in range(200)}


def test_what_was_not_synced_may_be_there_or_not(disk: Disk) -> None:
    """Two writes may be there, both or one or none; a process that comes after sees both."""
    disk.do(write(0, B[:512]))
    disk.do(write(1_024, B[:512]))

    assert disk.everything() == {"f": B[:512] + A[512:] + B[:512]}
    assert disk.nothing() == {"f": A}
    assert images(disk, "subset") == {
        A,
        B[:512] + A[512:],
        A + B[:512],
        B[:512] + A[512:] + B[:512],
    }


def test_a_sync_makes_its_file_safe_and_no_other() -> None:
    """After the sync of one file, every image has what was written to it."""
    disk = Disk.of({"f": A, "g": A})
    disk.do(write(0, B))
    disk.do(write(0, B, "g"))
    disk.do(Operation("sync", "f"))

    assert disk.nothing() == {"f": B, "g": A}
    assert images(disk, "sectors") == {B}


def test_a_write_is_torn_at_sectors(disk: Disk) -> None:
    """Of the last write some sectors are there, each whole, wherever the write began."""
    disk.do(write(256, B[:512]))
    old, new = A[:256], B[:256]

    assert images(disk, "torn") <= {
        old + old + old + old,
        old + new + old + old,
        old + old + new + old,
    }
    assert len(images(disk, "torn")) == 3
    assert old + new + new + old in images(disk, "sectors")


def test_garbage_stays_within_the_last_write(disk: Disk) -> None:
    """What lies before and behind the last write is as it was."""
    disk.do(write(300, B[:100]))
    found = images(disk, "garbled")

    assert len(found) > 50
    assert {content[:300] for content in found} == {A[:300]}
    assert {content[400:] for content in found} == {A[400:]}


def test_a_truncation_may_have_happened_or_not(disk: Disk) -> None:
    """A file that was cut and not synced is whole or cut."""
    disk.do(Operation("truncate", "f", 100))

    assert images(disk, "subset") == {A, A[:100]}


def test_names_are_safe_when_their_folder_is_synced(disk: Disk) -> None:
    """A new file, a new name and a deletion may each be undone until then."""
    disk.do(Operation("create", "g"))
    disk.do(write(0, B, "g"))
    disk.do(Operation("sync", "g"))
    disk.do(Operation("rename", "g", to="h"))
    disk.do(Operation("delete", "f"))
    draw = random.Random(1)

    assert disk.everything() == {"h": B}
    assert disk.nothing() == {"f": A}
    found = {tuple(sorted(disk.subset(draw))) for _ in range(200)}
    assert found == {(), ("f",), ("g",), ("f", "g"), ("h",), ("f", "h")}
    disk.do(Operation("sync folder", "."))
    assert disk.nothing() == {"h": B}


def test_a_store_is_rebuilt_as_it_lies_there(tmp_path: Path) -> None:
    """All that a storage does to its files is written down, from creation to close."""
    with Recorder("rebuilt", tmp_path) as recorder, recorder.watching():
        storage = SqliteStorage(tmp_path / STORE, vfs="rebuilt")
        head = storage.acquire(claim(), takeover=False)
        rows = [conversation(1)]
        storage.apply(Batch(epoch=head.epoch, seq=1, next_id=9, flush=True, writes=rows))
        disk = recorder.begin.copied()
        for operation in recorder.operations:
            disk.do(operation)
        assert disk.everything() == read_image(tmp_path)
        # Everything was promised, so nothing may be missing.
        assert disk.nothing() == disk.everything()
        storage.close()
    disk = recorder.begin.copied()
    for operation in recorder.operations:
        disk.do(operation)

    assert disk.everything() == read_image(tmp_path)
    assert {each.kind for each in recorder.operations} >= {"create", "write", "sync", "delete"}


def test_a_recording_knows_what_each_commit_has_left(tmp_path: Path) -> None:
    """By commit, a digest of the rows: every one differs from the others."""

    def program(storage: SqliteStorage, ledger: Ledger, acks: object) -> None:
        head = storage.acquire(claim(), takeover=False)
        for seq in (1, 2, 3):
            rows = [conversation(seq)]
            batch = Batch(epoch=head.epoch, seq=seq, next_id=9, flush=True, writes=rows)
            storage.apply(batch)

    recording = record("three", tmp_path, program)

    assert sorted(recording.states) == [0, 1, 2, 3]
    assert len(set(recording.states.values())) == 4
    assert {region.label for region in recording.regions} >= {"opening", "acquire", "apply"}
