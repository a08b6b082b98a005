"""Planted bugs in the storage, each of which the crashes at every write (R1) must find.

python tests/teeth/disk_teeth.py                   all, and the last line says how many
python tests/teeth/disk_teeth.py "flush"           those whose name contains this

A text that is not there any more fails loudly, as it does in `teeth`. What the file layer itself
might forget is tried by the controls of R1.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import attrs
from history_teeth import HistoryTooth
from teeth import CHECKOUT, Bite, BluntToothError, play_planted, show_all

RUNNER = CHECKOUT / "tests" / "verify" / "crash_images.py"
IMAGES = 1_000
"""No more than CI has of the recordings that a bug is to be found in."""


@attrs.frozen(kw_only=True)
class DiskTooth:
    """One planted bug, and which recordings are to find it."""

    name: str
    only: str
    module: str
    changes: tuple[tuple[str, str], ...]

    def plant(self, package: Path) -> None:
        tooth = HistoryTooth(
            name=self.name, goal="rewind", module=self.module, changes=self.changes
        )
        tooth.plant(package)


TEETH = (
    DiskTooth(
        name="acknowledge a batch before its flush",
        only="workload",
        module="storage/_sqlite.py",
        changes=(("self._set_flushing(flush)", "self._set_flushing(False)"),),
    ),
    DiskTooth(
        name="publish a commit before it is durable",
        only="workload",
        module="session/_line.py",
        changes=(
            (
                "stored = self._writer.gather(drafts, self.next_id)",
                "stored = self._writer.gather(drafts, self.next_id)\n"
                "        self._adopter.adopt(drafts)\n        drafts = []",
            ),
        ),
    ),
    DiskTooth(
        name="write a batch in two transactions",
        only="workload",
        module="storage/_sqlite.py",
        changes=(
            (
                "raise self._lost(writer, batch.epoch) self._write(writer, batch.writes)",
                "raise self._lost(writer, batch.epoch)\n"
                "            writer.execute('commit')\n"
                "            writer.execute('begin immediate')\n"
                "            self._write(writer, batch.writes)",
            ),
        ),
    ),
    DiskTooth(
        name="show what is found before it is safe",
        only="recovery",
        module="storage/_sqlite.py",
        changes=(
            (
                "head = self._transact(body, flush=True)",
                "head = self._transact(body, flush=False)",
            ),
        ),
    ),
    DiskTooth(
        name="move the log into the file without a sync",
        only="workload",
        module="storage/_sqlite_open.py",
        changes=(
            (
                "connection.execute(f\"pragma synchronous = {'full' if power else 'normal'}\")",
                "connection.execute('pragma synchronous = off')",
            ),
        ),
    ),
    DiskTooth(
        name="look at a file without its log",
        only="workload",
        module="storage/_sqlite_open.py",
        changes=(("if not _has_log(store) and not _has_side_files(store):", "if True:"),),
    ),
    DiskTooth(
        name="create a store in two transactions",
        only="workload",
        module="storage/_sqlite_open.py",
        changes=(
            (
                "connection.execute(schema_text()) connection.execute(",
                "connection.execute(schema_text())\n"
                "            connection.execute('commit')\n"
                "            connection.execute('begin immediate')\n"
                "            connection.execute(",
            ),
        ),
    ),
    DiskTooth(
        name="migrate in two transactions",
        only="migration",
        module="storage/_migrate.py",
        changes=(
            (
                "if current < known: connection.execute(",
                "connection.execute('commit')\n"
                "        connection.execute('begin immediate')\n"
                "        if current < known:\n            connection.execute(",
            ),
        ),
    ),
    DiskTooth(
        name="keep no copy under its name for good",
        only="migration",
        module="storage/_migrate.py",
        changes=(("os.fsync(folder)", "pass"),),
    ),
)


def bite(tooth: DiskTooth | None, *, images: int = IMAGES) -> Bite:
    """Cut recordings of a copy of the package; a tooth is planted, or none."""
    started = time.perf_counter()
    command = [sys.executable, str(RUNNER), "--images", str(images), "--no-controls"]
    command += ["--only", tooth.only if tooth is not None else "workload", "--processes", "1"]
    said = play_planted(command, tooth)
    if said is None:
        raise BluntToothError(f"{tooth.name if tooth else 'no tooth'}: it does not come to an end")
    line = re.search(r"R1 crash-at-write: .*", said)
    if line is None:
        # A run that cannot even be recorded has been noticed too, but not by what is tried here.
        raise BluntToothError(f"{tooth.name if tooth else 'no tooth'}: no figures:\n{said[-1500:]}")
    first = next((each for each in said.splitlines() if ", cut " in each), "")
    found = any(
        int(number)
        for number in re.findall(
            r"(?:lost|halves|duplicates|unopened|corrupt|unequal|uncopied)=(\d+)", line.group()
        )
    )
    return Bite(tooth=tooth, caught=found, said=first[:160], seconds=time.perf_counter() - started)


def main(part: str = "") -> int:
    return show_all("disk teeth", [tooth for tooth in TEETH if part in tooth.name], bite)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
