"""A copy of a store, made beside a holder that goes on committing.

SQLite's backup copies some pages at a time and begins again when somebody else has committed in
between; what it ends with is one state. Each part is a short read, so that the holder's log can be
moved into its file meanwhile. Where commits come faster than that, the last try reads everything at
once: the log grows for as long as it takes to write the file, and not for as long as an export.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

import apsw

from pidurable.errors import PidurableError, StorageAccessError, StorageRefusedError, check
from pidurable.storage import _sqlite_open as _open, _sqlite_place as _place
from pidurable.storage._migrate import SCHEMA
from pidurable.storage._sqlite import SqliteStorage

PAGES_AT_ONCE = 4_096
_READING = (apsw.SQLITE_IOERR_READ, apsw.SQLITE_IOERR_SHORT_READ)
"""What no full disk is the reason of."""
TRIES = 3
"""So often it may begin again before everything is read at once."""


def copy_steps(
    store: str, path: str, *, vfs: str | None = None
) -> Generator[tuple[int, int], None, SqliteStorage]:
    """Copy a store into a new file for its owner alone, and open that for reading.

    Nobody holds the copy, and it has no name: whatever happens, nothing is left of it. One of an
    older schema is brought to today's, and its original stays as it is.

    Args:
        store: The path of a store.
        path: Where nothing is.

    Yields:
        (pages done, pages in all)

    Raises:
        StorageRefusedError: The copy does not fit onto the disk.
        StorageAccessError, NotAStoreError, StorageCorruptError: The store cannot be read.
        StorageTooNewError: A newer version wrote it.
    """
    store = os.path.realpath(store)
    _open.check_platform(store)
    _open.is_missing(store, create=False)
    schema = _open.identify(store, vfs)
    if schema == 0:
        raise StorageAccessError(store, "its creation was interrupted, so there is nothing in it")
    writing = False
    try:
        # All of them are closed, whatever the first failure was.
        with contextlib.ExitStack() as stack:
            source, still = _place.connect_reader(store, vfs, power=False)
            stack.callback(source.close)
            writing = True
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            target = apsw.Connection(path)
            stack.callback(target.close)
            # Without shared memory, and not flushed: it is read and thrown away.
            target.execute("pragma locking_mode = exclusive")
            target.execute("pragma synchronous = off")
            yield from _backup_steps(source, target)
            if still is not None and _place.look_still(store) != still:
                raise StorageAccessError(store, "it changed while it was copied; copy it again")
            target.execute("delete from holder; delete from heartbeat")
            _end_log(target)
        if schema < SCHEMA:
            SqliteStorage(path, create=False, durability="process").close()
            with contextlib.closing(apsw.Connection(path)) as target:
                _end_log(target)
        storage = SqliteStorage(path, create=False, read_only=True)
        os.unlink(path)
    except PidurableError:
        raise  # one of them is an OSError too
    except (apsw.Error, OSError) as error:
        raise _mapped(error, store, path, writing=writing) from error
    return storage


def _backup_steps(
    source: apsw.Connection, target: apsw.Connection
) -> Generator[tuple[int, int], None, None]:
    backup = target.backup("main", source, "main")
    # As a context it would raise what is no error of SQLite, where it fails, and without words.
    try:
        before, again = -1, 0
        while not backup.done:
            backup.step(PAGES_AT_ONCE if again < TRIES else -1)
            done = backup.page_count - backup.remaining
            if done <= before:
                again += 1
            before = done
            yield done, backup.page_count
    finally:
        backup.finish()


def _end_log(connection: apsw.Connection) -> None:
    """Make it a store of one file: the header of a copy still says that there is a log."""
    mode = connection.execute("pragma journal_mode = delete").get
    check(mode == "delete", f"a copy has the journal mode {mode}")


def _mapped(error: Exception, store: str, path: str, *, writing: bool) -> Exception:
    full = isinstance(error, apsw.FullError | apsw.IOError | apsw.CantOpenError | OSError)
    if writing and full and getattr(error, "extendedresult", None) not in _READING:
        return StorageRefusedError(path, f"copying {store} failed ({error})")
    return _open.map_error(error, store) or error
