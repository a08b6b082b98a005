"""Who holds a session: a lock file that tells a dead holder from a hung one, and the judgement.

Every holder has a lock file of its own beside the store, `<store>.lock.<epoch>`, locked by `flock`
for as long as the process lives, and named in the holder record. The kernel drops the lock when
the process dies, however it dies, so a successor on the same machine knows at once. Invariants:

* the store's own files are never locked or opened here: closing a plain handle on them would drop
  the locks that SQLite holds in this process;
* only the file of the current epoch is asked, and only by a store that is the one in the record
  (same uuid, same inode): a copied store does not believe the original's lock file;
* a lock file is removed by its own holder, or by a successor that locked it and so saw its holder
  dead; nobody else removes one;
* a lock is dropped by closing its handle, never by LOCK_UN, which would take it from a forked
  twin as well.

`flock`, not `lockf`: two holders in one process must conflict like two processes.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os

import attrs

from pidurable.errors import StorageAccessError, StorageHeldError
from pidurable.storage._contract import HolderClaim, HolderRecord

LOCK_MODE = 0o600


class LockState(enum.Enum):
    """What asking a lock file has shown."""

    LOCKED = "locked"
    """Somebody on this machine holds it: the holder, or a child that it forked, is alive."""
    FREE = "free"
    """We have it now, so the process that had it is dead."""
    UNKNOWN = "unknown"
    """There is nothing to ask: another machine, a copied store, no file, no permission."""


class Verdict(enum.Enum):
    """What a claimant may do with the holder it found."""

    NONE = "none"
    """There is no holder, or it gave the session up."""
    DEAD = "dead"
    """The holder is certainly dead; take over at once, and tidy up behind it."""
    HUNG = "hung"
    """The holder may live but was silent for a lease; take over, the epoch fences it."""
    LIVE = "live"
    """The holder lives; leave it alone unless told otherwise."""


@attrs.define(eq=False)
class LockFile:
    """An open, locked lock file. Dropping it is what a crash does; removing it is tidy."""

    path: str
    _handle: int = attrs.field(alias="handle")
    _pid: int = attrs.field(init=False, factory=os.getpid)

    def drop(self) -> None:
        """Close the handle, and with it the lock. Idempotent; the file stays."""
        # A forked child closes nothing: the number may be another file there by now.
        if self._handle >= 0 and os.getpid() == self._pid:
            os.close(self._handle)
        self._handle = -1

    def remove(self) -> None:
        """Remove the file, then drop the lock. Never removes a file that is not the locked one."""
        if self._handle >= 0 and _is_same_file(self.path, self._handle):
            os.unlink(self.path)
        self.drop()


def lock_path(store: str, epoch: int) -> str:
    """Return the name of the lock file of an epoch."""
    return f"{store}.lock.{epoch}"


def _is_same_file(path: str, handle: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def take_lock(store: str, epoch: int) -> LockFile:
    """Create and lock the lock file of a new epoch.

    A file that a claimant left behind when it died before its epoch was stored is used again. To
    be called while the store's write lock is held, so that no two claimants do it for one epoch.

    Raises:
        StorageAccessError: The file cannot be created, or somebody holds it though no record names
            it. Nothing was changed.
    """
    path = lock_path(store, epoch)
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, LOCK_MODE)
        except OSError as error:
            raise StorageAccessError(
                store, f"the lock file {path} cannot be created ({error.strerror})"
            ) from error
        try:
            locked = _try_lock(handle)
        except OSError as error:
            os.close(handle)
            raise StorageAccessError(
                store,
                f"the file system cannot lock {path} ({error.strerror}); use a local file system",
            ) from error
        if not locked:
            os.close(handle)
            raise StorageAccessError(
                store,
                f"somebody holds {path}, though no record of the store names it; find out who "
                "and stop it",
            )
        lock = LockFile(path, handle)
        if _is_same_file(path, handle):
            return lock
        # A claimant that gave up removed the file between our open and our lock.
        lock.drop()


def ask_lock(path: str | None) -> tuple[LockState, LockFile | None]:
    """Ask a recorded lock file whether its holder lives. A FREE one is given back locked."""
    if path is None:
        return LockState.UNKNOWN, None
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        # Missing (removed by hand under a live holder?) or not ours to open: it tells nothing, and
        # the heartbeat has to decide.
        return LockState.UNKNOWN, None
    try:
        locked = _try_lock(handle)
    except OSError:
        os.close(handle)
        return LockState.UNKNOWN, None
    if not locked:
        os.close(handle)
        return LockState.LOCKED, None
    return LockState.FREE, LockFile(path, handle)


def heartbeat_age(record: HolderRecord, claim: HolderClaim) -> float:
    """Return the seconds since the last sign of life; one from the future is taken as just now."""
    return max(0.0, (claim.at_us - record.heartbeat_us) / 1_000_000)


def judge(record: HolderRecord | None, claim: HolderClaim, lock: LockState) -> Verdict:
    """Decide what a claimant may do. Pure: the same for every backend.

    A held lock with an old heartbeat is a hung process, and an unanswerable lock with a young
    heartbeat is taken for a live one: both err towards leaving work alone.
    """
    if record is None or record.released:
        return Verdict.NONE
    if lock is LockState.FREE:
        return Verdict.DEAD
    if heartbeat_age(record, claim) < claim.lease_seconds:
        return Verdict.LIVE
    return Verdict.HUNG


def check_free(
    store: str, record: HolderRecord | None, claim: HolderClaim, verdict: Verdict, takeover: bool
) -> None:
    """Refuse a claim on a session whose holder lives.

    Raises:
        StorageHeldError: There is a live holder, and `takeover` was not asked for.
    """
    if verdict is Verdict.LIVE and not takeover and record is not None:
        raise StorageHeldError(store, record.pid, record.host, heartbeat_age(record, claim))
