"""What was found of a store: findings, which somebody should act on, and notes."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable

import attrs

from pidurable.errors import PidurableError, StorageAccessError
from pidurable.harness._reader import HolderView
from pidurable.session._seams import Blocking, Clock
from pidurable.storage._sqlite_check import StoreSize

DAMAGED = "keep the file with its -wal beside it, and restore a copy, or an export"


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


@attrs.define(eq=False)
class Examination:
    """One look at a store: what was found so far, and how a finding is added."""

    found: Diagnosis
    _blocking: Blocking
    _clock: Clock
    _may_work: bool = attrs.field(default=True, init=False)
    """Whether the place lets anything be written: where it does not, no command that works on the
    store is suggested."""

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


def _remedy_of(error: BaseException) -> str:
    if isinstance(error, StorageAccessError | OSError):
        return "check the path, its permissions and the disk"
    return DAMAGED


def count_of(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
