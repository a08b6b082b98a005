"""The doctor: what is wrong with a store, what only looks so, and what to type next.

It looks and changes nothing, beside a holder or where nobody is, and it is for stores that are in
trouble: what cannot be looked at is itself a finding, and the rest is looked at all the same. A
finding is what somebody should act on; a note is what is good to know. Every finding has a way out,
with the command where there is one.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable

import attrs

from pidurable.errors import NotAStoreError, PidurableError, StorageAccessError
from pidurable.harness._diagnosis import DAMAGED, Diagnosis, Finding, count_of
from pidurable.harness._doctor_files import FileExamination
from pidurable.harness._reader import Reader, open_reader
from pidurable.records._codes import BLOCKED
from pidurable.records._moments import duration
from pidurable.records._tasks import Status
from pidurable.session._seams import Blocking, Clock, SystemClock, ThreadBlocking
from pidurable.storage import TaskRow, _sqlite_locks as _locks, _sqlite_place as _place
from pidurable.storage._holder import LockState
from pidurable.storage._migrate import SCHEMA
from pidurable.storage._sqlite_check import StoreCheck, sqlite_version
from pidurable.storage._sqlite_open import (
    identify,
    is_missing,
)

__all__ = ["Diagnosis", "Finding", "examine"]

BLOCKED_MAX = 20
ERROR_CHARACTERS_MAX = 200
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
class _Examination(FileExamination):
    """One look at a store, from part to part."""

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
            self.find("file", f"{what}: {problem}", DAMAGED)

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
                    f"the removal of {count_of(found.removals, 'tree')} was begun and not finished",
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
            more = count_of(len(blocked) - BLOCKED_MAX, "more task")
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
            found.notes.append(f"{count_of(len(tasks), 'task')} to go on with{where}")

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
