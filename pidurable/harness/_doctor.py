"""The doctor: what is wrong with a store, what only looks so, and what to type next.

It looks and changes nothing, beside a holder or where nobody is, and it is for stores that are in
trouble: what cannot be looked at is itself a finding, and the rest is looked at all the same. A
finding is what somebody should act on; a note is what is good to know. Every finding has a way out,
with the command where there is one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import attrs

from pidurable.errors import NotAStoreError, PidurableError, StorageAccessError
from pidurable.harness._reader import HolderView, Reader, open_reader
from pidurable.records._codes import BLOCKED
from pidurable.records._limits import WAL_BYTES_WARN
from pidurable.records._moments import duration
from pidurable.records._tasks import Status
from pidurable.session._seams import Blocking, Clock, SystemClock, ThreadBlocking
from pidurable.storage import TaskRow, _sqlite_locks as _locks, _sqlite_place as _place
from pidurable.storage._command_box import folder_path
from pidurable.storage._holder import LockState, ask_lock
from pidurable.storage._migrate import SCHEMA
from pidurable.storage._sqlite_check import StoreCheck, StoreSize, sqlite_version
from pidurable.storage._sqlite_open import (
    NETWORK_FILE_SYSTEMS,
    file_system,
    identify,
    is_missing,
)

__all__ = ["Diagnosis", "Finding", "examine"]

T = TypeVar("T")

BLOCKED_MAX = 20
ERROR_CHARACTERS_MAX = 200
COMMAND_SECONDS = 60.0
"""A command that waits longer beside a live holder is a finding."""
FREE_SHARE = 0.5
FREE_BYTES_MIN = 16 * 1024 * 1024


@attrs.frozen(kw_only=True)
class Finding:
    """Something that somebody should act on."""

    area: str
    """`file`, `holder`, `tasks`, `size`, `commands`, `gc` or `permissions`."""
    text: str
    remedy: str
    command: str | None = None
    """What to type, where there is a command."""
    task_id: int | None = None


@attrs.define(kw_only=True, eq=False)
class Diagnosis:
    """What was found of a store."""

    store: str
    full: bool
    sqlite: str
    file_system: str | None = None
    mode: str = ""
    store_bytes: int = 0
    log_bytes: int = 0
    session_uuid: str | None = None
    schema: int | None = None
    epoch: int | None = None
    seq: int | None = None
    holder: HolderView | None = None
    readers: list[str] = attrs.Factory(list)
    """Other processes that have a read open at this moment, as far as the system tells."""
    writers: list[str] = attrs.Factory(list)
    size: StoreSize | None = None
    live_tasks: dict[str, int] = attrs.Factory(dict)
    """By status."""
    blocked_tasks: list[int] = attrs.Factory(list)
    commands: dict[str, int] = attrs.Factory(dict)
    """Commands from outside, by where they stand: waiting, taken, unreadable."""
    removals: int = 0
    """Trees whose removal was begun and is not finished."""
    findings: list[Finding] = attrs.Factory(list)
    notes: list[str] = attrs.Factory(list)

    @property
    def healthy(self) -> bool:
        """Whether there is nothing to act on."""
        return not self.findings


async def examine(
    store: str | os.PathLike[str],
    *,
    full: bool = False,
    blocking: Blocking | None = None,
    clock: Clock | None = None,
) -> Diagnosis:
    """Look at a store and say what is wrong with it; nothing is changed.

    Args:
        store: The path of a store, sound or not.
        full: Also read every record: indexes, references, stored JSON and blobs. This takes about
            as long as reading the file, and holds nobody up.
        blocking: Where reads run; threads where None.
        clock: Tells how old things are.

    Raises:
        StorageAccessError: There is no file at the path.
    """
    examination = _Examination(
        Diagnosis(store=_existing(store), full=full, sqlite=sqlite_version()),
        blocking or ThreadBlocking(),
        clock or SystemClock(),
    )
    await examination.run()
    return examination.found


def _existing(store: str | os.PathLike[str]) -> str:
    path = os.path.realpath(os.fspath(store))
    if not os.path.exists(path):
        raise StorageAccessError(path, "there is no such file")
    return path


@attrs.define(eq=False)
class _Examination:
    """One look at a store, from part to part."""

    found: Diagnosis
    _blocking: Blocking
    _clock: Clock
    _may_work: bool = attrs.field(default=True, init=False)
    """Whether the place lets anything be written: where it does not, no command that works on the
    store is suggested."""

    async def run(self) -> None:
        # Before anything is opened here: whoever has the write lock now and after all has it long.
        before = _locks.writers(self.found.store)
        self._look_at_files()
        no_store = await self._blocking.run(self._no_store)
        if no_store is not None:
            # What others may do with it is not ours to judge, and a pipe would never end.
            self.found.findings.clear()
            self.find("file", str(no_store), _NO_STORE)
            return
        await self._part("file", self._check)
        if self.found.schema is None or self.found.schema == SCHEMA:
            await self._part("file", self._read)
        else:
            self._judge_schema(self.found.schema)
        self._look_at_locks(before)
        self._look_at_lock_files()
        self._look_at_commands()
        self._judge_size()

    def find(
        self,
        area: str,
        text: str,
        remedy: str,
        *,
        command: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Add a finding."""
        finding = Finding(area=area, text=text, remedy=remedy, command=command, task_id=task_id)
        self.found.findings.append(finding)

    async def _part(self, area: str, look: Callable[[], Awaitable[None]]) -> None:
        """Look at a part; that it cannot be looked at is a finding, said once."""
        try:
            await look()
        except (PidurableError, OSError) as error:
            text = str(error)
            if all(finding.text != text for finding in self.found.findings):
                self.find(area, text, _remedy_of(error))

    @property
    def _live(self) -> bool:
        holder = self.found.holder
        return holder is not None and holder.state == "live"

    def _pidurable(self, *words: str) -> str:
        """A command of ours for this store, as it can be typed."""
        return shlex.join(["pidurable", *words, "--store", self.found.store])

    def _work(self, *words: str) -> str | None:
        """The same for one that works on the store; None where that would be refused."""
        return self._pidurable(*words) if self._may_work else None

    def _no_store(self) -> NotAStoreError | None:
        """What the path holds if it is no store; any other trouble is for the parts to find."""
        store = self.found.store
        try:
            is_missing(store, create=False)
            identify(store, None)
        except NotAStoreError as error:
            return error
        except (PidurableError, OSError):
            return None
        return None

    # --- files ---------------------------------------------------------------------------

    def _look_at_files(self) -> None:
        found = self.found
        found.file_system = file_system(os.path.dirname(found.store))
        if found.file_system in NETWORK_FILE_SYSTEMS:
            self.find(
                "file",
                f"the store lies on a network file system ({found.file_system})",
                "move it to a local disk while nobody holds it",
            )
        there = os.stat(found.store)
        found.mode = f"{stat.S_IMODE(there.st_mode):04o}"
        found.store_bytes = there.st_size
        for name in _beside(found.store):
            self._look_at_mode(name, there.st_uid)
        for path in _copies(found.store):
            size = _mib(os.stat(path).st_size)
            found.notes.append(f"{path} ({size}) is the copy from before a migration")
        folder = os.path.dirname(found.store)
        mode = os.stat(folder).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            self.find(
                "permissions",
                f"everybody may exchange files in the folder {folder} ({stat.S_IMODE(mode):04o})",
                "take that right away, or move the store to a folder of yours",
                command=shlex.join(["chmod", "o-w", folder]),
            )
        if there.st_uid != os.geteuid():
            found.notes.append(f"the store belongs to user {there.st_uid}, not to you")
        else:
            self._judge_place()

    def _judge_place(self) -> None:
        """Whether whoever has the store may work on it where it lies."""
        refused = _place.why_not_writable(self.found.store)
        if refused is not None:
            self._may_work = False
            self.find(
                "permissions",
                f"the store can be looked at here and not worked on: {refused}",
                "export it, or copy it, with its -wal if there is one, into a folder of yours and "
                "go on there",
                command=self._pidurable("export", "FILE"),
            )

    def _look_at_mode(self, path: str, owner: int) -> None:
        try:
            there = os.lstat(path)
        except FileNotFoundError:
            return
        mode = stat.S_IMODE(there.st_mode)
        if path == f"{self.found.store}-wal":
            self.found.log_bytes = there.st_size
        if stat.S_ISLNK(there.st_mode):
            self.find("permissions", f"{path} is a link", "find out who made it, and remove it")
            return
        if mode & 0o077:
            wanted = "700" if stat.S_ISDIR(there.st_mode) else "600"
            self.find(
                "permissions",
                f"other users may open {path} ({mode:04o})",
                "take that right away; it holds all that the session knows",
                command=shlex.join(["chmod", wanted, path]),
            )
        if there.st_uid != owner:
            self.find(
                "permissions",
                f"{path} belongs to user {there.st_uid}, the store to user {owner}",
                "give all its files to one user",
            )

    def _look_at_lock_files(self) -> None:
        found = self.found
        holder = found.holder
        current = None
        if holder is not None and holder.record.lock_file and holder.state != "released":
            current = os.path.basename(holder.record.lock_file)
        # Of a store of another version nobody knows which one counts; what is locked is held.
        known = found.schema is None or found.schema == SCHEMA
        for path in _lock_files(found.store):
            if os.path.basename(path) == current:
                continue
            state, lock = ask_lock(path)
            if lock is not None:
                lock.drop()
            if not known:
                if state is LockState.LOCKED:
                    found.notes.append(f"a process has {path}: another version works on the store")
            elif state is LockState.LOCKED:
                self.find(
                    "holder",
                    f"a process that was replaced still has {path}; it can store nothing more",
                    "end it when it does not end by itself",
                )
            elif state is LockState.FREE:
                found.notes.append(
                    f"{path} was left behind by a dead process, and means nothing; remove it "
                    f"with `{shlex.join(['rm', path])}`"
                )

    # --- what is in the store --------------------------------------------------------------

    async def _check(self) -> None:
        """The soundness of the file, and the sizes."""

        def check() -> list[tuple[str, str]]:
            look = StoreCheck(self.found.store)
            try:
                if look.is_store():
                    self.found.schema = look.schema()
                parts: list[tuple[str, Callable[[], list[str]]]] = [
                    ("the file is damaged", lambda: look.pages(full=self.found.full))
                ]
                if self.found.full:
                    parts += [
                        ("a reference leads nowhere", look.references),
                        ("records do not agree", look.rules),
                        ("a value cannot be read", look.values),
                    ]
                problems: list[tuple[str, str]] = []
                for what, part in parts:
                    # One that cannot be made because of the damage hides no other one.
                    try:
                        problems += [(what, each) for each in part()]
                    except PidurableError as error:
                        problems.append((what, str(error)))
                with contextlib.suppress(PidurableError):
                    self.found.size = look.size(full=self.found.full)
            finally:
                look.close()
            return problems

        for what, problem in await self._blocking.run(check):
            self.find("file", f"{what}: {problem}", _DAMAGED)

    def _judge_schema(self, schema: int) -> None:
        """What to do about a store of another version; nothing else of it is read."""
        if schema < SCHEMA:
            self.find(
                "file",
                f"the store has the older schema {schema}, this version works on {SCHEMA}",
                "open it for work, which migrates it and keeps a copy",
                command=self._work("resume"),
            )
        else:
            self.find(
                "file",
                f"the store has the newer schema {schema}, this version knows {SCHEMA}",
                "upgrade pidurable",
            )

    async def _read(self) -> None:
        """The session, its holder and its work, as every reader sees them."""
        found = self.found
        async with open_reader(found.store, blocking=self._blocking, clock=self._clock) as reader:
            head = await reader.head()
            found.session_uuid, found.epoch, found.seq = head.uuid, head.epoch, head.seq
            found.holder = await reader.holder()
            self._judge_holder()
            self._judge_name()
            found.removals = len(await reader.removals())
            if found.removals and not self._live:
                self.find(
                    "gc",
                    f"the removal of {_count(found.removals, 'tree')} was begun and not finished",
                    "finish it: whoever opens the session does",
                    command=self._work("resume"),
                )
            await self._look_at_tasks(reader)

    def _judge_name(self) -> None:
        """Whether the store was renamed without its log."""
        holder = self.found.holder
        if holder is None:
            return
        held = holder.state in ("live", "silent")
        state = LockState.LOCKED if held else LockState.FREE
        try:
            _place.check_not_renamed(self.found.store, holder.record, state)
        except StorageAccessError as renamed:
            self.find("file", renamed.problem, "do that before anything else")

    def _judge_holder(self) -> None:
        holder = self.found.holder
        if holder is None or holder.state in ("live", "released"):
            return
        who = _locks.describe_process(holder.record.pid)
        where = f"{who} on {holder.record.host}"
        age = duration(holder.heartbeat_age)
        resume = self._work("resume")
        if holder.state == "dead":
            self.find(
                "holder",
                f"process {holder.record.pid}, which held the session, is dead (last sign of life "
                f"{age} ago)",
                "go on with its work",
                command=resume,
            )
        else:
            self.find(
                "holder",
                f"{where} holds the session and has been silent for {age}: it may hang",
                "look at it, end it, or take the session over: it can store nothing then",
                command=resume,
            )

    async def _look_at_tasks(self, reader: Reader) -> None:
        found = self.found
        tasks = await reader.live_rows()
        found.live_tasks = dict(Counter(Status(task.status).word for task in tasks))
        blocked = [task for task in tasks if task.blocked is not None]
        found.blocked_tasks = [task.id for task in blocked]
        for task in blocked[:BLOCKED_MAX]:
            await self._explain(reader, task)
        if len(blocked) > BLOCKED_MAX:
            more = _count(len(blocked) - BLOCKED_MAX, "more task")
            self.find(
                "tasks",
                f"{more} blocked",
                "list them",
                command=self._pidurable("doctor", "-o", "ids"),
            )
        held = found.holder is not None and found.holder.state in ("live", "silent")
        if tasks and not held:
            resume = self._work("resume")
            where = ", which this place does not allow" if resume is None else f": `{resume}`"
            found.notes.append(f"{_count(len(tasks), 'task')} to go on with{where}")

    async def _explain(self, reader: Reader, task: TaskRow) -> None:
        code = str(task.blocked)
        verb = "resume" if code == "interrupted" else "retry"
        text = BLOCKED.get(code, "a reason that this version does not know").rstrip(".")
        record = await reader.task(task.id)
        if code == "faulted" and record.outcome is not None and record.outcome.error is not None:
            error = record.outcome.error
            said = (error.message.splitlines() or [""])[0]
            text += f" {error.type}: {said[:ERROR_CHARACTERS_MAX]}"
        self.find(
            "tasks",
            f"task {task.id} ({task.kind}) is blocked, {code}: {text}",
            _UNBLOCK.get(code, "remove the reason, and let it be tried again"),
            command=self._work("task", verb, str(task.id)),
            task_id=task.id,
        )

    # --- who is in the way -----------------------------------------------------------------

    def _look_at_locks(self, before: list[int]) -> None:
        store = self.found.store
        writers = _locks.writers(store)
        self.found.readers = [_locks.describe_process(pid) for pid in _locks.readers(store)]
        self.found.writers = [_locks.describe_process(pid) for pid in writers]
        for pid in writers:
            who = _locks.describe_process(pid)
            if "stopped" in who or (pid in before and not self._live):
                self.find(
                    "holder",
                    f"{who} has the write lock: nobody can store anything, or take the session "
                    "over, before it goes on or ends",
                    "let it go on, or end it",
                    command=f"kill -CONT {pid}" if "stopped" in who else f"kill {pid}",
                )

    def _judge_size(self) -> None:
        found = self.found
        if found.log_bytes > WAL_BYTES_WARN:
            readers = " and ".join(found.readers) or "an unknown process, or a busy holder"
            self.find(
                "size",
                f"the log takes {_mib(found.log_bytes)}; it is kept from being used again by "
                f"{readers}",
                "end what reads, or close the holder once: the log shrinks by itself then",
            )
        size = found.size
        if size is None or not size.pages:
            return
        free = size.free_pages * size.page_bytes
        if free >= FREE_BYTES_MIN and size.free_pages >= FREE_SHARE * size.pages:
            found.notes.append(
                f"{_mib(free)} of the file are free, and used again by what is stored next"
            )

    def _look_at_commands(self) -> None:
        found = self.found
        folder = folder_path(found.store)
        waiting: list[float] = []
        counts: Counter[str] = Counter()
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            self.find(
                "commands",
                f"the folder of commands {folder} cannot be read ({error.strerror})",
                "make it a folder of the store's owner alone",
            )
            return
        for name in names:
            kind = _COMMAND_KINDS.get(name.rpartition(".")[2])
            if kind is None:
                continue
            counts[kind] += 1
            if kind == "waiting":
                waiting.append(self._age_of(os.path.join(folder, name)))
        found.commands = dict(counts)
        if waiting:
            self._judge_waiting(max(waiting), len(waiting))
        if counts["unreadable"]:
            self.find(
                "commands",
                f"{_count(counts['unreadable'], 'file')} in {folder} cannot be read as a command",
                "look at those that end with .bad, and remove them",
            )

    def _judge_waiting(self, oldest: float, count: int) -> None:
        text = f"{_count(count, 'command')} from outside, the oldest {duration(oldest)} old"
        if not self._live:
            self.find(
                "commands",
                f"{text}, and no process holds the session",
                "open the session, which applies them",
                command=self._work("resume"),
            )
        elif oldest > COMMAND_SECONDS:
            self.find("commands", f"{text}, and the holder has not taken it", "look at the holder")

    def _age_of(self, path: str) -> float:
        try:
            return max(0.0, self._clock.now_us() / 1e6 - os.stat(path).st_mtime)
        except FileNotFoundError:
            return 0.0


_COMMAND_KINDS = {"command": "waiting", "taken": "taken", "bad": "unreadable"}
_DAMAGED = "keep the file with its -wal beside it, and restore a copy, or an export"
_NO_STORE = (
    "name the path of a store; if this was one, its first page is damaged: keep the file with its "
    "-wal beside it, and restore a copy"
)
_UNBLOCK = {
    "missing_definition": "install what defines it, and let it be tried again",
    "definition_too_old": "update what defines it, and let it be tried again",
    "migration_failed": "mend its `migrate`, and let it be tried again",
    "checkpoint_unreadable": "mend its definition, and let it be tried again",
    "crash_loop": "find out what kills the process, and let it be tried again",
    "faulted": "mend its code, and let it be tried again",
    "interrupted": "look what it had begun, and let it go on or abort it",
    "unknown_record": "update the program, and let it be tried again",
}


def _remedy_of(error: BaseException) -> str:
    if isinstance(error, StorageAccessError | OSError):
        return "check the path, its permissions and the disk"
    return _DAMAGED


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _beside(store: str) -> Iterator[str]:
    """The store and every file that belongs to it."""
    yield from (store, f"{store}-wal", f"{store}-shm", folder_path(store))
    yield from _lock_files(store)


def _copies(store: str) -> list[str]:
    """The copies that migrations have kept."""
    folder, name = os.path.split(store)
    pattern = re.compile(rf"{re.escape(name)}\.v[0-9]+\.bak")
    return [os.path.join(folder, each) for each in os.listdir(folder) if pattern.fullmatch(each)]


def _lock_files(store: str) -> list[str]:
    """The lock files of all epochs, the oldest first."""
    folder, name = os.path.split(store)
    pattern = re.compile(rf"{re.escape(name)}\.lock\.([0-9]+)")
    found = [
        (int(match[1]), each) for each in os.listdir(folder) if (match := pattern.fullmatch(each))
    ]
    return [os.path.join(folder, each) for _, each in sorted(found)]
