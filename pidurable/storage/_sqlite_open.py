"""Open the file of a store: look at it first, create or migrate it, and map SQLite's errors.

Invariants:

* a path that is not a store of a schema known here is left exactly as it was, with nothing
  created beside it;
* the three files are opened by SQLite alone: a plain handle closed in this process would drop
  the locks that SQLite holds on them;
* `application_id`, `user_version` and the tables are stored in one transaction, before the
  switch to the write-ahead log, so the main file alone tells what it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
import time
import uuid as uuid_module
from collections.abc import Mapping
from typing import Literal
from urllib.parse import quote

import apsw
import attrs

from pidurable.errors import (
    InternalError,
    NotAStoreError,
    PidurableError,
    StorageAccessError,
    StorageCorruptError,
    StorageRefusedError,
    StorageTooNewError,
)
from pidurable.storage._migrate import MIGRATIONS, SCHEMA, Migration, migrate
from pidurable.storage._sqlite_shape import missing_part, schema_text

APPLICATION_ID = 0x70694475  # "piDu"
SQLITE_OLDEST = 3_051_003
"""Older ones can lose a commit when the write-ahead log is reset (sqlite.org/wal.html)."""
OPEN_BUSY_MS = 5_000
COMMIT_BUSY_MS = 250
STATEMENTS_CACHED = 200
WAL_BYTES_KEPT = 64 * 1024 * 1024
"""A log that grew beyond this behind a long read is cut back when it is reset."""

NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("afs", "afpfs", "ceph", "cifs", "coda", "davfs", "glusterfs", "lustre", "ncpfs"),
        *("nfs", "nfs4", "smb2", "smb3", "smbfs", "webdav"),
        *("fuse.ceph", "fuse.davfs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.nfs"),
        *("fuse.rclone", "fuse.s3fs", "fuse.smbnetfs", "fuse.sshfs"),
        # Windows drives under WSL, which mounts them as 9p: no coherent shared memory there.
        "drvfs",
    }
)


# --- errors -----------------------------------------------------------------------------------

_BUSY = (apsw.BusyError, apsw.LockedError, apsw.FullError, apsw.InterruptError)
"""Certain, also when COMMIT itself reports it: nothing of the transaction is stored."""

_ENVIRONMENT = (
    apsw.AbortError,
    apsw.AuthError,
    apsw.CantOpenError,
    apsw.IOError,
    apsw.NoLFSError,
    apsw.NoMemError,
    apsw.PermissionsError,
    apsw.ProtocolError,
    apsw.ReadOnlyError,
    apsw.VFSFileClosedError,
    apsw.VFSNotImplementedError,
)
"""The machine's fault. Certain before COMMIT was tried, uncertain from then on."""

_DAMAGE = (
    apsw.CorruptError,
    apsw.FormatError,
    apsw.NotADBError,
    # Whatever was stored as text was valid.
    UnicodeDecodeError,
)

_BUG = (
    apsw.BindingsError,
    apsw.ConnectionClosedError,
    apsw.ConnectionNotClosedError,
    apsw.ConstraintError,
    apsw.CursorClosedError,
    apsw.EmptyError,
    apsw.ExecTraceAbort,
    apsw.ExecutionCompleteError,
    apsw.ExtensionLoadingError,
    apsw.ForkingViolationError,
    apsw.IncompleteExecutionError,
    apsw.InternalError,
    apsw.InvalidContextError,
    apsw.MismatchError,
    apsw.MisuseError,
    apsw.NoFTS5Error,
    apsw.NotFoundError,
    apsw.RangeError,
    apsw.SchemaChangeError,
    apsw.SQLError,
    apsw.ThreadingViolationError,
    apsw.TooBigError,
    # What binding a value raises that SQLite has no type for.
    TypeError,
    OverflowError,
    UnicodeError,
)

_ROOM_BYTES_MIN = 64 * 1024
"""With less than this there is no room for the index of a log, which is mapped whole."""

MAPPED = (*_BUSY, *_ENVIRONMENT, *_DAMAGE, *_BUG)
"""Every error that `map_error` knows. A test compares it with what apsw exports."""


_NO_ROOM = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})


def no_room(error: BaseException, connection: apsw.Connection) -> str:
    """Why a write had no room, in the system's words; empty where it failed for anything else.

    SQLite has a code for a full disk alone. A quota, or a limit on the size of files, is an I/O
    error to it, but the system has refused those bytes just as well: the log ends before them, and
    what ends without its last frame was never committed: as certain as a full disk. To be asked
    before anything else is executed.
    """
    if not isinstance(error, apsw.IOError):
        return ""
    code = connection.system_errno
    of_write = getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_WRITE
    return os.strerror(code) if of_write and code in _NO_ROOM else ""


def map_error(
    error: BaseException, store: str, *, writing: bool = False, certain: bool = False
) -> PidurableError | None:
    """Return our error for one of SQLite's, or None for what is not SQLite's: let that pass.

    Args:
        writing: A transaction that writes met it, not a read.
        certain: It was rolled back before COMMIT was tried. `_BUSY` errors are certain always.
    """
    problem = f"{type(error).__name__}: {error}"
    if isinstance(error, _BUSY):
        return (
            StorageRefusedError(store, problem) if writing else StorageAccessError(store, problem)
        )
    if isinstance(error, _ENVIRONMENT):
        problem += _no_room(store)
        if writing and certain:
            return StorageRefusedError(store, problem)
        return StorageAccessError(store, problem)
    if isinstance(error, _DAMAGE):
        return StorageCorruptError(store, problem)
    if isinstance(error, (*_BUG, apsw.Error)):
        return InternalError(f"{store}: {problem}")
    return None


def _no_room(store: str) -> str:
    """What to add where the disk is full: SQLite cannot map its index then, and says only `I/O`."""
    try:
        disk = os.statvfs(os.path.dirname(store) or ".")
    except (OSError, ValueError):
        return ""
    return "; its disk is full" if disk.f_bavail * disk.f_frsize < _ROOM_BYTES_MIN else ""


# --- looking at a path ------------------------------------------------------------------------


def check_platform(store: str) -> None:
    """Refuse what cannot keep the promises, before anything is touched.

    Raises:
        StorageAccessError: Windows, or a SQLite older than 3.51.3.
    """
    if sys.platform == "win32":
        raise StorageAccessError(store, "Windows is not supported; use Linux, macOS or WSL")
    if apsw.SQLITE_VERSION_NUMBER < SQLITE_OLDEST or _library_version() < SQLITE_OLDEST:
        raise StorageAccessError(
            store,
            f"SQLite {apsw.sqlite_lib_version()} can lose commits, 3.51.3 or newer is needed; "
            "upgrade apsw",
        )


def _library_version() -> int:
    major, minor, patch = (int(part) for part in apsw.sqlite_lib_version().split(".")[:3])
    return major * 1_000_000 + minor * 1_000 + patch


def file_system(path: str) -> str | None:
    """Return the type of the file system that a path lies on, or None where nobody says."""
    if sys.platform == "darwin":
        return _file_system_darwin(path)
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            return file_system_of(path, mounts.read())
    except OSError:
        return None


def _file_system_darwin(path: str) -> str | None:
    """Ask statfs: its 64-bit structure has the type's name, 16 bytes, at offset 72."""
    buffer = ctypes.create_string_buffer(4096)
    if ctypes.CDLL(None).statfs(os.fsencode(path), buffer) != 0:
        return None
    return buffer.raw[72:88].split(b"\0", 1)[0].decode("ascii", "replace")


def file_system_of(path: str, mountinfo: str) -> str | None:
    """Find the file system of a path in the text of a mountinfo file: the longest mount point."""
    best, found = -1, None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, types = before.split(), after.split()
        if not separator or len(fields) < 5 or not types:
            continue
        point = fields[4].encode().decode("unicode_escape") if "\\" in fields[4] else fields[4]
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # A later line of the same mount point lies above the earlier one.
        if inside and len(point) >= best:
            drvfs = types[0] == "9p" and "aname=drvfs" in after
            best, found = len(point), "drvfs" if drvfs else types[0]
    return found


def refuse_network(store: str, kind: str | None) -> None:
    """Refuse a file system on which the write-ahead log's shared memory does not work.

    Raises:
        StorageAccessError: It is a network file system. Put the store on a local disk.
    """
    if kind in NETWORK_FILE_SYSTEMS:
        raise StorageAccessError(
            store, f"it lies on a network file system ({kind}); put the store on a local disk"
        )


def _has_log(store: str) -> bool:
    try:
        return os.stat(f"{store}-wal").st_size > 0
    except FileNotFoundError:
        return False


def is_missing(store: str, *, create: bool) -> bool:
    """Tell whether there is nothing yet at a path; a file of 0 bytes counts as missing.

    Raises:
        NotAStoreError: It is a folder, or something else that is not a file.
        StorageAccessError: It cannot be looked at, or is missing and is not to be created.
        StorageCorruptError: It is empty, yet a log with commits lies beside it.
    """
    try:
        found = os.stat(store)
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise StorageAccessError(store, error.strerror or str(error)) from error
    if found is not None:
        if stat.S_ISDIR(found.st_mode):
            raise NotAStoreError(store, "it is a folder")
        if not stat.S_ISREG(found.st_mode):
            raise NotAStoreError(store, "it is not a regular file")
        if not os.access(store, os.R_OK):
            raise StorageAccessError(store, "this user may not read it")
        for side in (f"{store}-wal", f"{store}-shm", f"{store}-journal"):
            if os.path.lexists(side) and not os.path.isfile(side):
                raise StorageAccessError(
                    store, f"{side}, where SQLite keeps a file of its own, is none; move it away"
                )
        if found.st_size > 0:
            return False
        if _has_log(store):
            raise StorageCorruptError(store, "it was cut to 0 bytes, but its log is still there")
    if not create:
        what = "there is no such file" if found is None else "it is empty"
        raise StorageAccessError(store, f"{what}; open it with create=True to create a store")
    return True


@attrs.frozen(kw_only=True)
class _Seen:
    application_id: int
    schema: int
    tables: int
    sessions: int
    uuid: str | None = None
    """Of the session; None where it does not have exactly one."""
    missing: str | None = None
    """What a store of today's schema has and this one does not."""


_NO_HEARTBEAT = "select 1\nfrom holder\nwhere not exists (select 1 from heartbeat)"
"""A holder without one would be taken for none at all."""


def _look(store: str, vfs: str | None, how: Literal["file", "shared", "alone"]) -> _Seen:
    """Read what a file says it is.

    Args:
        how: `file`: the main file alone, without locks or side files. `shared`: with its log, as
            any reader does, which creates the shared memory of the log where it is missing.
            `alone`: with its log, and nothing is created or written, but nobody may have it open.
    """
    writing = how == "alone"
    flags = apsw.SQLITE_OPEN_READWRITE if writing else apsw.SQLITE_OPEN_READONLY
    options = {"file": "?immutable=1", "shared": "?mode=ro", "alone": "?mode=rw"}[how]
    name = "file:" + quote(store) + options
    connection = apsw.Connection(name, flags=flags | apsw.SQLITE_OPEN_URI, vfs=vfs)
    try:
        connection.set_busy_timeout(OPEN_BUSY_MS)
        if writing:
            # In this mode the index of the log is kept on the heap. The log stays as it is.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            connection.execute("pragma locking_mode = exclusive")
            connection.execute("pragma query_only = on")
        numbers = [
            int(connection.execute(statement).get)
            for statement in (
                "pragma application_id",
                "pragma user_version",
                "select count(*) from sqlite_schema",
            )
        ]
        missing = None
        if numbers[0] == APPLICATION_ID and numbers[1] == SCHEMA and numbers[2] > 0:
            missing = missing_part(connection)
            if missing is None and connection.execute(_NO_HEARTBEAT).get is not None:
                missing = "the heartbeat of its holder"
        uuids: list[str] = []
        if numbers[0] == APPLICATION_ID and numbers[2] > 0 and missing is None:
            uuids = [uuid for (uuid,) in connection.execute("select uuid from session")]
    finally:
        # Closing the only connection to a log tries to tidy it up, which a file opened for reading
        # refuses. SQLite takes no notice; under a VFS of apsw's it comes out as an error.
        with contextlib.suppress(apsw.IOError, apsw.ReadOnlyError):
            connection.close()
    application_id, schema, tables = numbers
    return _Seen(
        application_id=application_id,
        schema=schema,
        tables=tables,
        sessions=len(uuids),
        uuid=uuids[0] if len(uuids) == 1 else None,
        missing=missing,
    )


def _has_side_files(store: str) -> bool:
    return os.path.exists(f"{store}-wal") and os.path.exists(f"{store}-shm")


def _look_at_both(store: str, vfs: str | None, seen: _Seen | None = None) -> _Seen:
    """Look at a file with its log, and create nothing beside it that is not ours.

    Args:
        seen: What the file alone says, if it says anything.
    """
    ours = seen is not None and seen.application_id == APPLICATION_ID
    if ours or _has_side_files(store):
        return _look(store, vfs, "shared")
    try:
        return _look(store, vfs, "alone")
    except (apsw.BusyError, apsw.CantOpenError, apsw.ReadOnlyError, apsw.IOError):
        # Somebody has it open, and so its side files too; or it may not be written to.
        if seen is not None:
            return seen
        return _look(store, vfs, "shared")


def identify(store: str, vfs: str | None, *, known: int = SCHEMA) -> int:
    """Return the schema of the store at a path; 0 for one whose creation was interrupted.

    Looks without taking locks, so that not even a side file is created. A holder that moves its
    log into the file meanwhile can make such a look fail, and so can one that died while it did:
    then the file alone is neither the old nor the new one, and only with its log it tells what it
    is. So where a log lies beside it, a look at both decides, which creates nothing either.

    Raises:
        NotAStoreError: Not a database, or one of another application.
        StorageCorruptError: It is damaged, or cut short.
        StorageTooNewError: A newer program wrote it.
    """
    journal = os.path.exists(f"{store}-journal")
    try:
        try:
            seen = _look(store, vfs, "file")
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError):
            if journal:
                return 0
            if not _has_log(store) and not _has_side_files(store):
                raise
            seen = _look_at_both(store, vfs)
        else:
            # The log may hold a newer schema than the file, and a better first page.
            if not journal and _has_log(store):
                try:
                    alone, seen = seen, _look_at_both(store, vfs, seen)
                except (apsw.CorruptError, apsw.NotADBError) as error:
                    raise StorageCorruptError(
                        store,
                        f"it can be read without its log {store}-wal, and not with it ({error}); "
                        "where that log came from another store, move it away",
                    ) from error
                # Frames of a log say nothing of the file that they belong to.
                if None not in (alone.uuid, seen.uuid) and alone.uuid != seen.uuid:
                    raise StorageCorruptError(
                        store,
                        f"its log {store}-wal is of another store (the file has the session "
                        f"{alone.uuid}, the log has {seen.uuid}); move the log away",
                    )
    except apsw.NotADBError as error:
        raise NotAStoreError(store, "it is not an SQLite database") from error
    except apsw.SQLError as error:
        raise StorageCorruptError(store, f"it cannot be read ({error})") from error
    except apsw.Error as error:
        raise map_error(error, store) or error from error
    # Stores use a journal while they are created and never again: rolled back, nothing is left.
    if journal and (seen.application_id == APPLICATION_ID or seen.tables == 0):
        return 0
    if seen.application_id != APPLICATION_ID:
        raise NotAStoreError(
            store,
            f"it is an SQLite database of another application (id {seen.application_id:#010x})",
        )
    if seen.schema > known:
        raise StorageTooNewError(store, seen.schema, known)
    if seen.schema < 1:
        raise StorageCorruptError(store, f"its schema number is {seen.schema}")
    if seen.missing is not None:
        raise StorageCorruptError(store, f"{seen.missing} is missing")
    if seen.sessions != 1:
        raise StorageCorruptError(store, f"it has {seen.sessions} rows of a session, not 1")
    return seen.schema


# --- connections ------------------------------------------------------------------------------


def connect(
    store: str, vfs: str | None, *, read_only: bool, power: bool, immutable: bool = False
) -> apsw.Connection:
    """Open one connection with the settings that all of ours have in common.

    Args:
        store: The path.
        vfs: The file layer.
        read_only: It cannot write.
        power: Commits survive a loss of power.
        immutable: Read the file as it lies, without a lock or a log: whoever asks for it has to
            see that it does not change.
    """
    flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
    name = store
    if immutable:
        name, flags = f"file:{quote(store)}?immutable=1", flags | apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(name, flags=flags, vfs=vfs, statementcachesize=STATEMENTS_CACHED)
    try:
        connection.set_busy_timeout(OPEN_BUSY_MS)
        for option, value in (
            (apsw.SQLITE_DBCONFIG_DEFENSIVE, 1),
            (apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0),
            (apsw.SQLITE_DBCONFIG_DQS_DML, 0),
            (apsw.SQLITE_DBCONFIG_DQS_DDL, 0),
        ):
            connection.config(option, value)
        connection.execute("pragma foreign_keys = on")
        connection.execute("pragma temp_store = memory")
        connection.execute(f"pragma synchronous = {'full' if power else 'normal'}")
        # On macOS a plain fsync does not reach the platter; elsewhere these say nothing.
        connection.execute(f"pragma fullfsync = {'on' if power else 'off'}")
        connection.execute(f"pragma checkpoint_fullfsync = {'on' if power else 'off'}")
        connection.execute("pragma wal_autocheckpoint = 0")
        connection.execute(f"pragma journal_size_limit = {WAL_BYTES_KEPT}")
    except BaseException:
        connection.close()
        raise
    return connection


def create_file(store: str) -> None:
    """Create the empty file of a store, for its owner alone, before SQLite opens it.

    Then SQLite gives its side files the same mode. A folder called `.pidurable` is created too.

    Raises:
        StorageAccessError: The folder is missing, or may not be written to.
    """
    folder = os.path.dirname(store)
    try:
        if os.path.basename(folder) == ".pidurable":
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        if not os.path.isdir(folder):
            raise StorageAccessError(store, f"the folder {folder} does not exist; create it first")
        try:
            handle = os.open(store, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            # Empty, or created by somebody else meanwhile; the schema transaction decides. A
            # plain handle on it could drop locks of this process, so it is not opened here.
            os.chmod(store, 0o600)
        else:
            os.close(handle)
        folder_handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder_handle)
        finally:
            os.close(folder_handle)
    except OSError as error:
        if isinstance(error, StorageAccessError):
            raise
        raise StorageAccessError(
            store, f"it cannot be created ({error.strerror or error})"
        ) from error


def create_schema(connection: apsw.Connection, *, uuid: str | None, created_us: int | None) -> None:
    """Store the schema and the first row, in one transaction; leave a finished store as it is."""
    connection.execute("begin")
    try:
        # Counts only before the first page is there: then what retention frees can be given back.
        # It is the first write, and so it takes the lock; alone it would leave an empty database.
        connection.execute("pragma auto_vacuum = incremental")
        if connection.execute("select count(*) from sqlite_schema").get == 0:
            connection.execute(schema_text())
            connection.execute(
                "insert into session (id, uuid, created_us, epoch, seq, next_id, clean)"
                "\nvalues (1, ?, ?, 0, 0, 1, 1)",
                (
                    uuid if uuid is not None else str(uuid_module.uuid4()),
                    created_us if created_us is not None else time.time_ns() // 1_000,
                ),
            )
            connection.execute(f"pragma application_id = {APPLICATION_ID}")
            connection.execute(f"pragma user_version = {SCHEMA}")
        connection.execute("commit")
    except BaseException:
        if connection.in_transaction:
            connection.execute("rollback")
        raise


def copy_database(store: str, path: str, *, vfs: str | None = None) -> None:
    """Copy a store through SQLite's backup, into a new file for its owner alone."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.ExitStack() as stack:
        source = connect(store, vfs, read_only=True, power=False)
        stack.callback(source.close)
        target = apsw.Connection(path, vfs=vfs)
        stack.callback(target.close)
        backup = target.backup("main", source, "main")
        # As a context it would raise what is no error of SQLite, where it fails.
        stack.callback(backup.finish)
        while not backup.done:
            backup.step(1_000)


def migrate_store(
    connection: apsw.Connection,
    store: str,
    found: int,
    *,
    vfs: str | None = None,
    known: int = SCHEMA,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> None:
    """Migrate an older store, keeping a copy. The caller has seen that nobody holds it."""
    migrate(
        connection,
        store=store,
        found=found,
        known=known,
        migrations=migrations,
        copy=lambda path: copy_database(store, path, vfs=vfs),
    )
