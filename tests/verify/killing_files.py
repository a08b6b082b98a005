"""A file layer that kills its own process at the k-th change of a file.

It becomes SQLite's default, so that it lies below every connection, also those that the code under
test opens for itself. Writes, syncs, truncations and deletions count. What was written before the
kill stays, since the system has it: this is the death of a process, not of the machine.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import apsw

NAME = "killing"
BELOW = "unix"
"""Named, since the default is this layer itself once it is there."""


class KillingFiles(apsw.VFS):
    """Counts changes; before the k-th one the process dies."""

    def __init__(self, kill_at: int | None) -> None:
        self.changes = 0
        self._kill_at = kill_at
        super().__init__(NAME, BELOW, makedefault=True)

    def change(self) -> None:
        self.changes += 1
        if self.changes == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _KillingFile(self, name, flags)

    def xDelete(self, name: str, sync: bool) -> None:
        self.change()
        super().xDelete(name, sync)


class _KillingFile(apsw.VFSFile):
    def __init__(self, files: KillingFiles, name: Any, flags: list[int]) -> None:
        self._files = files
        super().__init__(BELOW, name, flags)

    def xWrite(self, data: Any, offset: int) -> None:
        self._files.change()
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        self._files.change()
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:
        self._files.change()
        super().xSync(flags)


def in_a_child(run: Callable[[], None], *, kill_at: int | None) -> tuple[int, int]:
    """Run something in a process that dies at its k-th change of a file.

    Returns its exit code (minus the signal that killed it), and how many changes it made if it
    came to its end.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            files = KillingFiles(kill_at)
            run()
            os.write(writing, str(files.changes).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, int(said or 0)
