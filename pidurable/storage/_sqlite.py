"""The SQLite backend: one file, one writer, one reader, one connection for checkpoints.

What holds at all times:

* a batch is one `begin immediate` ... `commit`; a rollback is sent only while a transaction is
  open, since SQLite rolls back by itself on a full disk;
* an error is `StorageRefusedError` only where the transaction was rolled back and, for errors of
  the machine other than a lack of room, COMMIT had not been tried; everything else leaves the
  outcome open;
* the writer rests at `synchronous=FULL` where the store keeps to `power`; a batch without a flush
  runs at NORMAL, and the next flushed one makes it durable too, because log frames are chained;
* each read is one statement, read to its end at once, so no reader holds back a checkpoint;
* a handle is used in the process that opened it, never in a forked child.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, final

import apsw

from pidurable.errors import (
    HolderLostError,
    InternalError,
    InvalidArgumentError,
    PidurableError,
    SessionClosedError,
    SessionPoisonedError,
    StorageAccessError,
    StorageHeldError,
    StorageRefusedError,
    check,
)
from pidurable.records._limits import Settings
from pidurable.storage import (
    _migrate,
    _sqlite_locks as _locks,
    _sqlite_open as _open,
    _sqlite_place as _place,
    _sqlite_statements as sql,
)
from pidurable.storage._command_box import FolderCommandBox
from pidurable.storage._contract import (
    Batch,
    Head,
    HolderClaim,
    HolderRecord,
    Op,
)
from pidurable.storage._holder import (
    LockFile,
    LockState,
    Verdict,
    ask_lock,
    check_free,
    heartbeat_age,
    judge,
    lock_path,
    take_lock,
)
from pidurable.storage._sqlite_reads import SqliteReads

Durability = Literal["power", "process"]
ResultT = TypeVar("ResultT")

_PAGE_FRAME_BYTES = 4_096 + 24
_LEAKED: list[Any] = []
"""Handles of a parent process: closing one in a forked child would tamper with the store."""


class _Found(NamedTuple):
    """The holder record as it is stored, and what tells whose lock file it names."""

    record: HolderRecord
    store_uuid: str
    inode: int


@final
class SqliteStorage(SqliteReads):
    """Keep one session in one SQLite file.

    Opening creates nothing where there is something else already, migrates an older store (keeping
    a copy), and takes no ownership; `acquire` does.

    Args:
        path: The file. A symbolic link is resolved once, here.
        create: Create a missing store; its folder must exist, unless it is called `.pidurable`.
        vfs: The name of a registered SQLite VFS; None for the system's own.
        durability: `power`: a flushed batch survives a loss of power. `process`: the death of the
            process.
        read_only: Only look: needs no ownership, works beside a running holder. Writes are refused.
        uuid: The session's uuid, where a store is created; drawn at random if None.
        created_us: When the session began, where a store is created; now if None.

    Raises:
        StorageAccessError: Missing, unreadable, on a network file system, or not supported here.
        NotAStoreError: The path holds something else. It was not touched.
        StorageCorruptError: The file is damaged. It was not touched.
        StorageTooNewError: A newer version wrote it. Upgrade.
        StorageHeldError: It is of an older schema, and a live holder has it. Stop that one first.
        MigrationError: It could not be brought to this schema. It is as it was.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        vfs: str | None = None,
        durability: Durability = "power",
        read_only: bool = False,
        uuid: str | None = None,
        created_us: int | None = None,
    ) -> None:
        given = os.fspath(path)
        if given in ("", ":memory:") or "\0" in given:
            raise InvalidArgumentError("path", "expected the path of a file", repr(given))
        if durability not in ("power", "process"):
            raise InvalidArgumentError(
                "durability", "expected 'power' or 'process'", repr(durability)
            )
        self._given = given
        self._store = os.path.realpath(given)
        self._vfs = vfs
        self._durability: Durability = durability
        self._power = durability == "power"
        self._flushing: bool | None = True
        """Whether the writer's COMMIT waits for the disk; None if setting that failed."""
        self._read_only = read_only
        self._pid = os.getpid()
        self._closed = False
        self._lock: LockFile | None = None
        self._epoch: int | None = None
        """Of this handle, since it took the store."""
        self._still: _place.Still | None = None
        """What the file is like, where it is read as it lies."""
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()
        self._connections: list[apsw.Connection] = []
        self._box = FolderCommandBox(self._store)
        try:
            self._open(create=create and not read_only, uuid=uuid, created_us=created_us)
        except BaseException as error:
            self._close_connections()
            mapped = _open.map_error(error, self._store)
            if mapped is None:
                raise
            raise mapped from error  # noqa: ASYNC104 - nothing is awaited here

    # --- opening and closing -------------------------------------------------------------

    def _open(self, *, create: bool, uuid: str | None, created_us: int | None) -> None:
        store = self._store
        _open.check_platform(store)
        if not self._read_only:
            _place.check_workable(store, given=self._given)
        missing = _open.is_missing(store, create=create)
        _open.refuse_network(store, _open.file_system(os.path.dirname(store)))
        schema = 0 if missing else self._identify()
        if schema == 0 and not create:
            raise StorageAccessError(
                store,
                "its creation was interrupted (a journal lies beside it); open it with create=True "
                "to create it, or to go on with what is there",
            )
        if missing:
            _open.create_file(store)
        if self._read_only:
            if schema < _migrate.SCHEMA:
                raise StorageAccessError(
                    store,
                    f"it has the older schema {schema}; open it for work once, as "
                    "`pidurable resume` does, to migrate it",
                )
            self._reader, self._still = self._connect_reader()
        else:
            self._writer = self._connect(read_only=False)
            if self._writer.readonly("main"):
                raise StorageAccessError(
                    store,
                    "SQLite can only read it: its header asks for a newer SQLite, or its side "
                    "files cannot be written",
                )
            if schema == 0:
                _open.create_schema(self._writer, uuid=uuid, created_us=created_us)
                # Whatever lay beside a finished store was no journal of its creation.
                schema = int(self._writer.execute("pragma user_version").get)
            if schema < _migrate.SCHEMA:
                self._migrate(schema)
            mode = self._writer.execute("pragma journal_mode = wal").get
            if mode != "wal":
                raise StorageAccessError(store, f"its journal mode is {mode}, wal is needed")
            self._checkpointer = self._connect(read_only=False)
            self._reader = self._connect(read_only=True)
            self._writer.set_busy_timeout(_open.COMMIT_BUSY_MS)
            self._checkpointer.set_busy_timeout(_open.COMMIT_BUSY_MS)
        self._inode = os.stat(store).st_ino
        # Read once, so that a file that cannot be used is reported by its opening.
        self._reader.execute(sql.READS["head"]).fetchall()

    def _connect(self, *, read_only: bool) -> apsw.Connection:
        connection = _open.connect(self._store, self._vfs, read_only=read_only, power=self._power)
        self._connections.append(connection)
        return connection

    def _identify(self) -> int:
        try:
            return _open.identify(self._store, self._vfs, known=_migrate.SCHEMA)
        except StorageAccessError as error:
            if isinstance(error.__cause__, apsw.ReadOnlyError | apsw.CantOpenError):
                refused = _place.why_no_reader(self._store)
                if refused is not None:
                    raise refused from error
            raise

    def _connect_reader(self) -> tuple[apsw.Connection, _place.Still | None]:
        connection, still = _place.connect_reader(self._store, self._vfs, power=self._power)
        self._connections.append(connection)
        return connection, still

    def _migrate(self, schema: int) -> None:
        """Migrate, unless a live holder works on the older schema right now."""
        found = self._found(self._writer)
        if found is not None and not found.record.released:
            claim = HolderClaim(
                holder_id="migration",
                host=found.record.host,
                pid=self._pid,
                at_us=time.time_ns() // 1_000,
                lease_seconds=Settings().lease_seconds,
            )
            uuid = self._writer.execute("select uuid from session").get
            state, lock = self._ask(found, claim, uuid)
            if lock is not None:
                lock.drop()
            # A hung holder may wake: one that still has its lock is never migrated under.
            if state is LockState.LOCKED or judge(found.record, claim, state) is Verdict.LIVE:
                record = found.record
                age = heartbeat_age(record, claim)
                raise StorageHeldError(self._store, record.pid, record.host, age)
        _open.migrate_store(
            self._writer,
            self._store,
            schema,
            vfs=self._vfs,
            known=_migrate.SCHEMA,
            migrations=_migrate.MIGRATIONS,
        )

    def reopen(self) -> SqliteStorage:
        """Open another handle on the same store, whether this one is open or closed."""
        return SqliteStorage(
            self._store,
            create=False,
            vfs=self._vfs,
            durability=self._durability,
            read_only=self._read_only,
        )

    @property
    def store(self) -> str:
        """The path, with links resolved."""
        return self._store

    @property
    def command_box(self) -> FolderCommandBox:
        """Commands from outside: they lie beside the store, in a folder."""
        return self._box

    @property
    def vfs(self) -> str | None:
        """The SQLite VFS that it was opened with."""
        return self._vfs

    def close(self) -> None:
        """Close all handles; the last one moves the log into the file. Idempotent."""
        if os.getpid() != self._pid:
            _LEAKED.append((self._connections, self._lock))
            self._closed = True
            return
        with self._write_lock, self._checkpoint_lock, self._read_lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._close_connections()
            finally:
                if self._lock is not None:
                    self._lock.drop()

    def _close_connections(self) -> None:
        """Close the newest first: the writer is the last one, and may checkpoint.

        All of them, whatever the first failure was: one left open would keep the store locked.
        """
        failed: apsw.Error | None = None
        while self._connections:
            connection = self._connections.pop()
            try:
                connection.close()
            except apsw.Error as error:
                failed = failed or error
        if failed is not None:
            raise StorageAccessError(self._store, f"closing failed ({failed})") from failed

    def _check_usable(self, *, writing: bool) -> None:
        if os.getpid() != self._pid:
            raise StorageAccessError(
                self._store,
                f"this handle belongs to process {self._pid} and was used in its forked child "
                f"{os.getpid()}; open the store again there",
            )
        if self._closed:
            raise SessionClosedError(self._store)
        if writing and self._read_only:
            raise StorageRefusedError(self._store, "it was opened read-only")

    # --- transactions --------------------------------------------------------------------

    def _transact(self, body: Callable[[apsw.Connection], ResultT], *, flush: bool) -> ResultT:
        """Run a body in one transaction of the writer. The caller has the write lock."""
        self._check_usable(writing=True)
        writer = self._writer
        certain = True
        try:
            if writer.in_transaction:
                # The last one could not be rolled back.
                writer.execute("rollback")
            if flush is not self._flushing:
                self._set_flushing(flush)
            writer.execute("begin immediate")
            result = body(writer)
            certain = False
            writer.execute("commit")
        except BaseException as error:
            no_room = _open.no_room(error, writer)
            certain = certain or bool(no_room)
            rolled_back = self._roll_back()
            mapped = _open.map_error(
                error, self._store, writing=rolled_back, certain=certain and rolled_back
            )
            if mapped is None:
                raise
            if isinstance(error, apsw.BusyError) and isinstance(mapped, StorageRefusedError):
                mapped.problem += self._who_writes()
            if no_room and isinstance(mapped, StorageRefusedError):
                mapped.problem += f" ({no_room})"
            raise mapped from error  # noqa: ASYNC104 - nothing is awaited here
        finally:
            if self._flushing is not True:
                self._rest()
        return result

    def _set_flushing(self, flush: bool) -> None:
        """Have COMMIT wait for the disk, or not. Only between transactions."""
        if self._power:
            # Unknown, should it fail: then the next transaction sets it, or is refused.
            self._flushing = None
            self._writer.execute(f"pragma synchronous = {'full' if flush else 'normal'}")
            self._flushing = flush

    def _rest(self) -> None:
        """Leave the writer at FULL. What cannot be set now is set by the next transaction.

        That one failed must not be told as the result of a transaction that is over.
        """
        if self._power and not self._writer.in_transaction:
            with contextlib.suppress(apsw.Error, MemoryError):
                self._set_flushing(True)

    def _roll_back(self) -> bool:
        """Roll back if a transaction is open; tell whether certainly none is any more."""
        if self._writer.in_transaction:
            try:
                self._writer.execute("rollback")
            except apsw.Error:
                # The first error is the one to report; that this one came makes it uncertain.
                return False
        return not self._writer.in_transaction

    def _who_writes(self) -> str:
        """Name whoever keeps the write lock from us: a hung process may do so for long."""
        named = [_locks.describe_process(pid) for pid in _locks.writers(self._store)]
        if not named:
            return ""
        return f"; {named[0]} has the write lock: let it go on, or end it"

    def _lost(self, writer: apsw.Connection, epoch: int) -> HolderLostError:
        current = int(writer.execute("select epoch\nfrom session\nwhere id = 1").get)
        return HolderLostError(self._store, epoch=epoch, current=current)

    def apply(self, batch: Batch) -> None:
        """Store a batch, whole or not at all. See `Storage`."""

        if batch.flush:
            # Beside a flush it costs nothing; what is not flushed waits for the heartbeat.
            self._check_place()

        def body(writer: apsw.Connection) -> None:
            head = (batch.seq, batch.next_id, int(batch.clean), batch.epoch)
            writer.execute(sql.HEAD_UPDATE, head)
            if writer.changes() != 1:
                raise self._lost(writer, batch.epoch)
            self._write(writer, batch.writes)

        with self._write_lock:
            self._transact(body, flush=batch.flush)

    def _check_place(self) -> None:
        """Refuse to go on with a file that has no name any more, or another one.

        Raises:
            SessionPoisonedError: What is stored now would be lost, or go past the log.
        """
        if not _place.lies_at(self._store, self._inode):
            raise SessionPoisonedError(
                self._store,
                "its file was moved, removed or replaced while it was held; what had been "
                "committed before is in the file that was moved",
            )

    def _write(self, writer: apsw.Connection, writes: Sequence[tuple[Op, tuple[Any, ...]]]) -> None:
        """Send the writes in order."""
        # One cursor for all of them: the connection's own `execute` makes one for each.
        execute = writer.cursor().execute
        statements, exact = sql.WRITES, sql.EXACT
        for op, row in writes:
            execute(statements[op], row)
            if op in exact and writer.changes() != 1:
                problem = f"a write of {Op(op).name} changed {writer.changes()} rows, not one"
                raise InternalError(f"{self._store}: {problem}")

    def checkpoint(self, *, truncate: bool = False) -> int:
        """Move the log into the file; return how many pages the log holds after it.

        Pages that a reader still needs stay; so does everything if another checkpoint is running.
        """
        mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if truncate else apsw.SQLITE_CHECKPOINT_PASSIVE
        with self._checkpoint_lock:
            self._check_usable(writing=True)
            try:
                pages, _moved = self._checkpointer.wal_checkpoint(mode=mode)
            except apsw.BusyError:
                pages = self._log_pages()
            except apsw.Error as error:
                raise _open.map_error(error, self._store, writing=True) or error from error
        return max(0, pages)

    def log_readers(self) -> list[str]:
        """Name the processes with an open read, which keeps the log from being used again.

        Empty where there is none, and where the system does not tell.
        """
        return [_locks.describe_process(pid) for pid in _locks.readers(self._store)]

    def reclaim(self, pages: int) -> int:
        """Give free pages back to the file system; see `Storage`. One that was created by schema 2
        or older gives none back: its free pages are used again.

        Raises:
            HolderLostError: Another holder has the store by now. Nothing was changed.
        """

        def body(writer: apsw.Connection) -> None:
            head = _head(writer.execute(sql.READS["head"]).fetchall())
            if self._epoch is not None and head.epoch != self._epoch:
                raise self._lost(writer, self._epoch)
            # Each row is a page given back, so the statement is read to its end. Of 0 SQLite makes
            # all of them.
            writer.execute(f"pragma incremental_vacuum({pages:d})").fetchall()

        with self._write_lock:
            if pages > 0:
                self._check_place()
                self._transact(body, flush=False)
            self._check_usable(writing=True)
            try:
                return int(self._writer.execute("pragma freelist_count").get)
            except apsw.Error as error:
                raise _open.map_error(error, self._store, writing=True) or error from error

    def _log_pages(self) -> int:
        try:
            return os.stat(f"{self._store}-wal").st_size // _PAGE_FRAME_BYTES
        except FileNotFoundError:
            return 0

    # --- holding -------------------------------------------------------------------------

    def acquire(self, claim: HolderClaim, *, takeover: bool) -> Head:
        """Become the holder; see `Storage`.

        Of two that try at once exactly one wins: the write transaction decides.

        Raises:
            StorageHeldError: A live holder has it, and `takeover` is False.
            StorageRefusedError: The store stayed busy for 5 seconds. Nothing was changed.
        """
        own: LockFile | None = None
        dead: LockFile | None = None

        def body(writer: apsw.Connection) -> Head:
            nonlocal own, dead
            found = self._found(writer)
            record = found.record if found is not None else None
            state = LockState.UNKNOWN
            if found is not None and not found.record.released:
                uuid = writer.execute("select uuid from session").get
                state, dead = self._ask(found, claim, uuid)
            _place.check_not_renamed(self._store, record, state)
            check_free(self._store, record, claim, judge(record, claim, state), takeover)
            head = _head(writer.execute(sql.READS["head"]).fetchall())
            epoch = head.epoch + 1
            own = take_lock(self._store, epoch)
            try:
                self._store_holder(writer, claim, epoch, own, head.uuid)
            except BaseException:
                # Still inside the write lock, so nobody else can be trying this epoch.
                own.remove()
                raise
            return head._replace(epoch=epoch)

        with self._write_lock:
            self._check_usable(writing=True)
            self._writer.set_busy_timeout(_open.OPEN_BUSY_MS)
            try:
                head = self._transact(body, flush=True)
            except BaseException:
                for lock in (own, dead):
                    if lock is not None:
                        lock.drop()
                raise
            finally:
                self._writer.set_busy_timeout(_open.COMMIT_BUSY_MS)
            for old in (dead, self._lock):
                if old is not None:
                    old.remove()
            self._lock, self._epoch = own, head.epoch
        return head

    def _store_holder(
        self,
        writer: apsw.Connection,
        claim: HolderClaim,
        epoch: int,
        own: LockFile,
        store_uuid: str,
    ) -> None:
        writer.execute(sql.EPOCH_UPDATE, (epoch,))
        row = (
            epoch,
            claim.holder_id,
            claim.host,
            claim.pid,
            claim.at_us,
            os.path.basename(own.path),
            store_uuid,
            os.stat(self._store).st_ino,
        )
        writer.execute(sql.HOLDER_REPLACE, row)
        writer.execute(sql.HEARTBEAT_REPLACE, (epoch, claim.at_us))

    def _ask(
        self, found: _Found, claim: HolderClaim, uuid: str
    ) -> tuple[LockState, LockFile | None]:
        """Ask the lock file of the record, if this store is the one that the record is about."""
        if found.record.host != claim.host:
            return LockState.UNKNOWN, None
        if found.inode != os.stat(self._store).st_ino:
            return LockState.UNKNOWN, None
        if found.store_uuid != uuid:
            return LockState.UNKNOWN, None
        return ask_lock(found.record.lock_file)

    def _found(self, connection: apsw.Connection) -> _Found | None:
        rows = connection.execute(sql.READS["holder"]).fetchall()
        if not rows:
            return None
        return self._holder_record(rows[0])

    def _holder_record(self, row: tuple[Any, ...]) -> _Found:
        epoch, holder_id, host, pid, started_us, heartbeat_us, lock_name, released = row[:8]
        # Only the name is stored, so that a renamed folder still finds its lock file.
        name = os.path.basename(lock_name) if lock_name else None
        folder = os.path.dirname(self._store)
        record = HolderRecord(
            epoch=epoch,
            holder_id=holder_id,
            host=host,
            pid=pid,
            started_us=started_us,
            heartbeat_us=heartbeat_us,
            lock_file=os.path.join(folder, name) if name else None,
            released=bool(released),
        )
        return _Found(record, row[8], row[9])

    def heartbeat(self, epoch: int, at_us: int) -> None:
        """Store a sign of life, in a transaction of its own, without a flush."""

        self._check_place()

        def body(writer: apsw.Connection) -> None:
            writer.execute(sql.HEARTBEAT, (at_us, epoch))
            if writer.changes() != 1:
                raise self._lost(writer, epoch)

        with self._write_lock:
            self._transact(body, flush=False)

    def holder(self) -> HolderRecord | None:
        rows = self._rows("holder", ())
        return self._holder_record(rows[0]).record if rows else None

    def look_at_holder(self, claim: HolderClaim) -> tuple[HolderRecord | None, Verdict]:
        """Return the holder record and what this claimant could do; takes and changes nothing.

        The lock file is tried for an instant, so another claimant may in that instant be refused.
        """
        rows = self._rows("holder", ())
        if not rows:
            return None, Verdict.NONE
        found = self._holder_record(rows[0])
        state = LockState.UNKNOWN
        if not found.record.released:
            state, lock = self._ask(found, claim, self.head().uuid)
            if lock is not None:
                lock.drop()
        return found.record, judge(found.record, claim, state)

    def release(self, epoch: int) -> None:
        """Give the session up and remove the lock file of this handle.

        Raises:
            HolderLostError: It was taken over already. The lock file is removed all the same: no
                record names it any more.
        """

        def body(writer: apsw.Connection) -> None:
            head = _head(writer.execute(sql.READS["head"]).fetchall())
            if head.epoch != epoch:
                raise self._lost(writer, epoch)
            writer.execute(sql.HOLDER_RELEASE, (epoch,))

        with self._write_lock:
            try:
                self._transact(body, flush=True)
            except HolderLostError:
                self._remove_lock(epoch)
                raise
            self._remove_lock(epoch)

    def _remove_lock(self, epoch: int) -> None:
        if self._lock is not None and self._lock.path == lock_path(self._store, epoch):
            self._lock.remove()
            self._lock = None

    # --- reading -------------------------------------------------------------------------

    def _read(self, statement: str, values: Sequence[Any]) -> list[Any]:
        """Run one read to its end. Called from any thread."""
        # Checked before the lock: a child forked while a thread reads would wait for ever.
        self._check_usable(writing=False)
        with self._read_lock:
            self._check_usable(writing=False)
            try:
                rows = self._reader.execute(statement, tuple(values)).fetchall()
                # Somebody opened the store meanwhile: what was read may be of two moments.
                while self._still is not None and _place.look_still(self._store) != self._still:
                    self._reader, self._still = self._connect_reader()
                    rows = self._reader.execute(statement, tuple(values)).fetchall()
                return rows
            except (apsw.Error, TypeError, OverflowError, UnicodeError) as error:
                mapped: PidurableError | None = _open.map_error(error, self._store)
                raise mapped or InternalError(f"{self._store}: {error!r}") from error

    def head(self) -> Head:
        return _head(self._rows("head", ()))


def _head(rows: list[Any]) -> Head:
    check(len(rows) == 1, f"the store has {len(rows)} rows that describe its session")
    uuid, created_us, epoch, seq, next_id, clean = rows[0]
    return Head(uuid, created_us, epoch, seq, next_id, bool(clean))
