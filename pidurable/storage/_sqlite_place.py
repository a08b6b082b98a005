"""Where a store lies, and whether that place lets it be worked on, or at least be looked at.

SQLite keeps a log and shared memory beside the file, and the holder a lock file, so whoever works
on a store has to own it and to be able to write to its folder. Whoever only looks needs the shared
memory too, as long as anybody might write: where it is missing and cannot be made, a file that has
no log is read as it lies, and each read is believed only if the file was still meanwhile.
"""

from __future__ import annotations

import os
import stat

import apsw
import attrs

from pidurable.errors import StorageAccessError
from pidurable.storage import _sqlite_open as _open
from pidurable.storage._contract import HolderRecord
from pidurable.storage._holder import LockState, lock_path


@attrs.frozen
class Still:
    """What a file was like when it was opened to be read as it lies."""

    inode: int
    bytes: int
    changed_ns: int


def check_workable(store: str, *, given: str) -> None:
    """Refuse a place at which nobody can keep a store, before anything is touched.

    Args:
        store: The path with links resolved.
        given: The path as it was given.

    Raises:
        StorageAccessError: The store or a link to it belongs to another user, or this user may not
            write to the file or its folder.
    """
    check_link(store, given=given)
    try:
        there = os.stat(store)
    except OSError:
        return  # Whoever opens it says what is wrong, or creates it.
    if there.st_uid != os.geteuid():
        raise StorageAccessError(
            store,
            f"it belongs to user {there.st_uid}, and this is user {os.geteuid()}; work on it as "
            "its owner",
        )
    refused = why_not_writable(store)
    if refused is not None:
        raise StorageAccessError(store, f"{refused}; `open_reader` only looks")


def why_not_writable(store: str) -> str | None:
    """Say why this user may not write to a store or to its folder; None where it may."""
    folder = os.path.dirname(store)
    for path, what in ((store, "it"), (folder, f"its folder {folder}, where its log goes")):
        if not os.access(path, os.W_OK):
            why = "this user may not write to"
            if os.statvfs(folder).f_flag & os.ST_RDONLY:
                why = "its file system is mounted read-only, so nobody may write to"
            return f"{why} {what}"
    return None


def check_link(store: str, *, given: str) -> None:
    """Refuse a link that another user has put there: it may lead anywhere tomorrow.

    Raises:
        StorageAccessError: It belongs to neither this user nor the system.
    """
    try:
        there = os.lstat(given)
    except OSError:
        return
    if stat.S_ISLNK(there.st_mode) and there.st_uid not in (0, os.geteuid()):
        raise StorageAccessError(
            store, f"the link {given} belongs to user {there.st_uid}; name the store itself"
        )


def check_not_renamed(store: str, record: HolderRecord | None, state: LockState) -> None:
    """Refuse a store that was renamed without its log: commits would be lost, or mixed.

    Raises:
        StorageAccessError: The log lies beside the name that the store had for its last holder.
    """
    if record is None or record.released or record.lock_file is None:
        return
    if record.lock_file == lock_path(store, record.epoch):
        return
    before = record.lock_file.removesuffix(f".lock.{record.epoch}")
    if os.path.exists(before) or not has_log(before):
        return
    if state is LockState.LOCKED:
        raise StorageAccessError(
            store,
            f"it was renamed from {before} while process {record.pid} holds it, whose commits go "
            "to a log beside the old name; give it its name back, or end that process first",
        )
    raise StorageAccessError(
        store,
        f"it was renamed from {before} without its log, which holds its last commits; rename "
        f"{before}-wal to {store}-wal too",
    )


def has_log(store: str) -> bool:
    """Whether there is a log with something in it beside a store."""
    try:
        return os.stat(f"{store}-wal").st_size > 0
    except FileNotFoundError:
        return False


def lies_at(store: str, inode: int) -> bool:
    """Whether a path still leads to the file that was opened; an error that says neither is yes."""
    try:
        return os.stat(store).st_ino == inode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


# --- looking ------------------------------------------------------------------------------------


def connect_reader(
    store: str, vfs: str | None, *, power: bool
) -> tuple[apsw.Connection, Still | None]:
    """Open a connection for reading, as the place allows.

    Returns:
        The connection, and where the file is read as it lies, what it was like: compare it with
        `look_still` after each read.

    Raises:
        StorageAccessError: It cannot be read here; the message says why, and what can be done.
    """
    connection: apsw.Connection | None = None
    try:
        connection = _open.connect(store, vfs, read_only=True, power=power)
        connection.execute("select count(*) from sqlite_schema").fetchall()
    except (apsw.ReadOnlyError, apsw.CantOpenError) as error:
        if connection is not None:
            connection.close()
        refused = why_no_reader(store)
        if refused is not None:
            raise refused from error
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    else:
        return connection, None
    still = look_still(store)
    if still is None:
        raise StorageAccessError(store, "somebody is opening it right now; look again")
    return _open.connect(store, vfs, read_only=True, power=power, immutable=True), still


def why_no_reader(store: str) -> StorageAccessError | None:
    """Say why a store without shared memory cannot be read; None where it can, as it lies."""
    if has_log(store):
        return StorageAccessError(
            store,
            f"its log {store}-wal holds commits that are not in the file yet, and this user "
            f"cannot use or make {store}-shm, without which a log cannot be read; copy the store "
            "and its log into a folder of yours, and look at the copy",
        )
    if os.path.exists(f"{store}-shm"):
        return StorageAccessError(
            store,
            f"somebody has it open, and this user may not use {store}-shm; look at it as its owner",
        )
    return None


def look_still(store: str) -> Still | None:
    """What the file is like now; None where somebody has it open, or where it is gone."""
    try:
        there = os.stat(store)
    except OSError:
        return None
    if has_log(store) or os.path.exists(f"{store}-shm"):
        return None
    return Still(there.st_ino, there.st_size, there.st_mtime_ns)
