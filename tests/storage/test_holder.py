"""Who holds a store, across processes: dead, hung, copied and racing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from pidurable.errors import HolderLostError, StorageAccessError, StorageHeldError
from pidurable.storage import Batch, HolderClaim, HolderRecord, Op, SqliteStorage
from pidurable.storage._holder import (
    LockState,
    Verdict,
    ask_lock,
    judge,
    lock_path,
    take_lock,
)
from pidurable.testing._conformance_base import LEASE_SECONDS, NOW_US, claim, conversation

Opener = Callable[..., SqliteStorage]
LATER_US = NOW_US + int(LEASE_SECONDS * 1_000_000)

HOLD = """
import sys
from pidurable.errors import PidurableError
from pidurable.storage import Batch, SqliteStorage
from pidurable.testing._conformance_base import claim, conversation

storage = SqliteStorage(sys.argv[1])
head = storage.acquire(claim(holder_id="child"), takeover=False)
print("held", flush=True)
for number, line in enumerate(sys.stdin, 10):
    batch = Batch(
        epoch=head.epoch, seq=number, next_id=99, flush=True, writes=[conversation(number)]
    )
    try:
        storage.apply(batch)
        print("stored", flush=True)
    except PidurableError as error:
        print(type(error).__name__, flush=True)
"""


class Child:
    """Another process that holds the store and applies a batch for each line it is sent."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.answer() == "held"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def apply(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.sqlite"


@pytest.fixture
def child(path: Path) -> Iterator[Child]:
    started = Child(path)
    yield started
    started.end()


def locks(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.glob("*.lock.*"))


def test_a_killed_holder_is_replaced_at_once(path: Path, child: Child, open_store: Opener) -> None:
    """Whatever its heartbeat's age: the kernel says that it is dead. Its file is tidied up."""
    assert child.apply() == "stored"
    storage = open_store(path)
    with pytest.raises(StorageHeldError):
        storage.acquire(claim(), takeover=False)
    child.end()

    head = storage.acquire(claim(), takeover=False)

    assert (head.epoch, head.seq, head.clean) == (2, 10, False)
    assert storage.conversation(10) is not None
    assert locks(path) == ["s.sqlite.lock.2"]


def test_a_stopped_holder_is_fenced(path: Path, child: Child, open_store: Opener) -> None:
    """A hung process loses its session after the lease and stores nothing when it wakes."""
    # C018, C022
    storage = open_store(path)
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(StorageHeldError):
        storage.acquire(claim(at_us=LATER_US - 1), takeover=False)

    head = storage.acquire(claim(at_us=LATER_US), takeover=False)
    os.kill(child.process.pid, signal.SIGCONT)

    assert head.epoch == 2
    assert child.apply() == "HolderLostError"
    assert storage.head().seq == 0
    # Nobody saw the old holder dead, so its file stays.
    assert locks(path) == ["s.sqlite.lock.1", "s.sqlite.lock.2"]


def test_a_lost_holder_tidies_up_behind_itself(path: Path, open_store: Opener) -> None:
    """Releasing after a takeover says so, and removes the lock file of the old epoch only."""
    first, second = open_store(path), open_store(path)
    first.acquire(claim(), takeover=False)
    second.acquire(claim(holder_id="second"), takeover=True)
    assert locks(path) == ["s.sqlite.lock.1", "s.sqlite.lock.2"]

    with pytest.raises(HolderLostError, match="epoch 1 was replaced by 2"):
        first.release(1)

    assert locks(path) == ["s.sqlite.lock.2"]
    second.release(2)
    assert locks(path) == []


def test_a_copy_does_not_believe_the_lock_of_the_original(path: Path, open_store: Opener) -> None:
    """A copied store is free after a lease, and its holder leaves the original alone."""
    original = open_store(path)
    original.acquire(claim(), takeover=False)
    copied = path.parent / "copies" / "s.sqlite"
    copied.parent.mkdir()
    source, target = apsw.Connection(str(path)), apsw.Connection(str(copied))
    with target.backup("main", source, "main") as backup:
        backup.step()
    source.close()
    target.close()
    # In the copy's folder lies a file of the same name that somebody locks.
    lock = take_lock(str(copied), 1)
    copy = open_store(copied)

    with pytest.raises(StorageHeldError):
        copy.acquire(claim(at_us=LATER_US - 1), takeover=False)
    assert copy.acquire(claim(at_us=LATER_US), takeover=False).epoch == 2

    assert locks(path) == ["s.sqlite.lock.1"]
    original.apply(Batch(epoch=1, seq=1, next_id=2, flush=True, writes=[conversation(1)]))
    assert copy.conversation(1) is None
    lock.drop()


def test_another_machine_is_judged_by_its_heartbeat(path: Path, open_store: Opener) -> None:
    """The lock file of a foreign host tells nothing, so a lease has to pass."""
    first = open_store(path)
    first.acquire(claim(host="elsewhere"), takeover=False)
    first.close()
    second = open_store(path)

    with pytest.raises(StorageHeldError, match="on elsewhere"):
        second.acquire(claim(), takeover=False)
    head = second.acquire(claim(at_us=LATER_US), takeover=False)

    assert head.epoch == 2
    # It was not asked, so it was not seen dead.
    assert locks(path) == ["s.sqlite.lock.1", "s.sqlite.lock.2"]


def test_a_missing_lock_file_proves_nothing(path: Path, open_store: Opener) -> None:
    """Where somebody removed the file by hand, the heartbeat decides."""
    first = open_store(path)
    first.acquire(claim(), takeover=False)
    os.unlink(lock_path(str(path), 1))
    second = open_store(path)

    with pytest.raises(StorageHeldError):
        second.acquire(claim(), takeover=False)

    assert second.acquire(claim(at_us=LATER_US), takeover=False).epoch == 2


def test_a_renamed_folder_still_finds_its_lock(tmp_path: Path, open_store: Opener) -> None:
    """The record names the file, not its folder."""
    (tmp_path / "old").mkdir()
    first = open_store(tmp_path / "old" / "s")
    first.acquire(claim(), takeover=False)
    first.close()
    (tmp_path / "old").rename(tmp_path / "new")

    second = open_store(tmp_path / "new" / "s")
    record = second.holder()

    assert record is not None
    assert record.lock_file == str(tmp_path / "new" / "s.lock.1")
    assert second.acquire(claim(), takeover=False).epoch == 2


def test_a_lock_file_left_by_a_dead_claimant_is_used_again(path: Path, open_store: Opener) -> None:
    """It died between locking and storing its epoch; nobody has that epoch."""
    storage = open_store(path)
    take_lock(str(path), 1).drop()

    assert storage.acquire(claim(), takeover=False).epoch == 1


def test_a_lock_that_no_record_names_stops_the_claim(path: Path, open_store: Opener) -> None:
    """Somebody holds the file of the next epoch: an error, and the epoch is as it was."""
    storage = open_store(path)
    foreign = take_lock(str(path), 1)

    with pytest.raises(StorageAccessError, match=r"somebody holds .*\.lock\.1"):
        storage.acquire(claim(), takeover=False)

    assert storage.head().epoch == 0
    assert storage.holder() is None
    foreign.remove()
    assert storage.acquire(claim(), takeover=False).epoch == 1


def test_a_link_in_the_place_of_a_lock_file_is_not_followed(
    path: Path, tmp_path: Path, open_store: Opener
) -> None:
    """A planted link would let somebody else's file be locked, or created."""
    storage = open_store(path)
    os.symlink(tmp_path / "elsewhere", lock_path(str(path), 1))

    with pytest.raises(StorageAccessError, match="cannot be created"):
        storage.acquire(claim(), takeover=False)

    assert not (tmp_path / "elsewhere").exists()


def test_a_failed_claim_leaves_no_lock_file(path: Path, open_store: Opener) -> None:
    """An acquire whose transaction fails removes what it created."""
    storage = open_store(path)
    storage._writer.execute("drop table heartbeat")

    with pytest.raises(Exception, match="heartbeat"):
        storage.acquire(claim(), takeover=False)

    assert locks(path) == []


def test_the_lock_conflicts_within_one_process(path: Path) -> None:
    """Two holders in one process are two: what one has, asking shows as locked."""
    lock = take_lock(str(path), 3)
    assert os.stat(lock.path).st_mode & 0o777 == 0o600

    assert ask_lock(lock.path) == (LockState.LOCKED, None)
    lock.drop()
    lock.drop()
    state, found = ask_lock(lock.path)

    assert state is LockState.FREE
    assert found is not None
    found.remove()
    assert ask_lock(lock.path) == (LockState.UNKNOWN, None)
    assert ask_lock(None) == (LockState.UNKNOWN, None)


def test_a_lock_file_of_somebody_else_is_never_removed(path: Path) -> None:
    """If the name leads to another file by now, only the lock is dropped."""
    lock = take_lock(str(path), 1)
    os.unlink(lock.path)
    Path(lock.path).write_text("not ours")

    lock.remove()

    assert Path(lock.path).read_text() == "not ours"


def test_a_lock_file_removed_while_it_is_taken_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claimant that gave up removes its file; who locked it meanwhile locks the new one."""
    real, calls = fcntl.flock, []

    def flock(handle: int, operation: int) -> None:
        if not calls:
            os.unlink(lock_path(str(path), 1))
        calls.append(handle)
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = take_lock(str(path), 1)

    assert len(calls) == 2
    assert os.path.exists(lock.path)
    lock.remove()


def test_a_file_system_without_locks_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, open_store: Opener
) -> None:
    """Taking a lock is an error that says so, asking one gives no answer."""  # C074
    storage = open_store(path)
    Path(lock_path(str(path), 7)).touch()

    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(StorageAccessError, match=r"cannot lock .* \(No locks available\)"):
        storage.acquire(claim(), takeover=False)
    assert ask_lock(lock_path(str(path), 7)) == (LockState.UNKNOWN, None)
    assert storage.head().epoch == 0


@pytest.mark.parametrize(
    ("lock", "age", "verdict"),
    [
        (LockState.FREE, 0, Verdict.DEAD),
        (LockState.FREE, 99, Verdict.DEAD),
        (LockState.LOCKED, 14.9, Verdict.LIVE),
        (LockState.LOCKED, 15, Verdict.HUNG),
        (LockState.UNKNOWN, 14.9, Verdict.LIVE),
        (LockState.UNKNOWN, 15, Verdict.HUNG),
        (LockState.LOCKED, -1_000, Verdict.LIVE),
    ],
)
def test_the_verdict_follows_lock_and_heartbeat(
    lock: LockState, age: float, verdict: Verdict
) -> None:
    """A free lock is a dead holder; otherwise the lease decides, at its value and just below."""
    record = HolderRecord(
        epoch=1,
        holder_id="h",
        host="host-1",
        pid=1,
        started_us=NOW_US,
        heartbeat_us=NOW_US,
        lock_file=None,
        released=False,
    )
    late = claim(at_us=NOW_US + int(age * 1_000_000))

    assert judge(record, late, lock) is verdict
    assert judge(None, late, lock) is Verdict.NONE


def test_a_reused_host_and_process_number_does_not_cover_the_dead(
    path: Path, open_store: Opener
) -> None:
    """A restart in a container has the same host and pid 1; identity is drawn per start."""
    # C021
    same = {"host": "container", "pid": 1, "lease_seconds": LEASE_SECONDS}
    first = open_store(path)
    first.acquire(HolderClaim(holder_id="a", at_us=time.time_ns() // 1_000, **same), takeover=False)
    first.close()
    second = open_store(path)

    head = second.acquire(
        HolderClaim(holder_id="b", at_us=time.time_ns() // 1_000, **same), takeover=False
    )
    record = second.holder()

    assert head.epoch == 2
    assert record is not None
    assert record.holder_id == "b"


def test_who_lost_the_store_gives_no_pages_back(tmp_path: Path) -> None:
    """The fence holds for what changes no record, too; the free pages are the next one's."""
    path = tmp_path / "store"
    first, second = SqliteStorage(path), SqliteStorage(path)
    epoch = first.acquire(claim(), takeover=False).epoch
    for seq, write in enumerate(
        [(Op.BLOB, ("0" * 64, bytes(10**6))), (Op.BLOB_DELETE, ("0" * 64,))]
    ):
        first.apply(Batch(epoch=epoch, seq=seq, next_id=9, flush=True, writes=[write]))
    left = first.reclaim(1)
    second.acquire(claim(holder_id="second"), takeover=True)

    with pytest.raises(HolderLostError):
        first.reclaim(100)

    assert second.reclaim(0) == left > 100
    assert second.reclaim(1_000) == 0
    first.close()
    second.close()
