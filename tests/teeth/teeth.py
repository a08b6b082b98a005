"""Planted bugs: small changes to a copy of the scheduler, each of which the programs must find.

A tooth says which text of which module becomes what. One that no longer applies, because the module
has changed, fails loudly: it is to be planted anew, not forgotten.

    python tests/teeth/teeth.py                 all of them, and the last line says how many
    python tests/teeth/teeth.py "skip a level"  those whose name contains this
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

CHECKOUT = Path(__file__).resolve().parents[2]
RUNNER = CHECKOUT / "tests" / "simulation" / "run_programs.py"
PROGRAMS_MAX = 1200
HANG_SECONDS = 240.0


class BluntToothError(AssertionError):
    """The text that a tooth replaces is not there (exactly once) any more."""


@attrs.frozen(kw_only=True)
class Tooth:
    """One planted bug."""

    name: str
    module: str
    """Below `pidurable/tasks`."""
    find: str
    """Text that occurs exactly once; blanks and line ends count as one blank."""
    become: str
    graphs: bool = False
    """Whether it is to be found by watching the task graph."""

    def plant(self, package: Path) -> None:
        path = package / "tasks" / self.module
        text = path.read_text()
        pattern = r"\s+".join(re.escape(part) for part in self.find.split())
        found = re.findall(pattern, text)
        if len(found) != 1:
            raise BluntToothError(
                f"tooth {self.name!r}: {self.find!r} occurs {len(found)} times in {self.module}; "
                "plant it anew where the code does this now"
            )
        path.write_text(re.sub(pattern, lambda _: self.become, text))


TEETH = (
    Tooth(
        name="skip a level in the cascade",
        module="_pass.py",
        find="index.expanded.add(id) self._expanding.append(id)",
        become="index.expanded.add(id)",
    ),
    Tooth(
        name="let an abort cross into background work",
        module="_pass.py",
        find="if node is None or node.background: continue if not node.live: pending.append(child)",
        become="if node is None:\n                    continue\n"
        "                if not node.live:\n                    pending.append(child)",
    ),
    Tooth(
        name="reserve a new task at once below an intent to cancel",
        module="_at_once.py",
        find="if runtime.under_intent(tx.view, found) or runtime.halted(tx.view, found): return",
        become="if runtime.halted(tx.view, found):\n        return",
    ),
    Tooth(
        name="give the slot of what a batch reserves at once away again",
        module="_runtime.py",
        find="self.scheduler.joined(tx.starts)",
        become="pass",
    ),
    Tooth(
        name="wake a join at once before its last has ended",
        module="_at_once.py",
        find="if staged is not None and staged.live: return False",
        become="if staged is not None and staged.live and len(wait.on) < 2:\n"
        "                return False",
    ),
    Tooth(
        name="start at once what was blocked or marked meanwhile",
        module="_at_once.py",
        find="if found.marked or found.blocked is not None or found.recoveries or found.tries: "
        "return",
        become="pass",
    ),
    Tooth(
        name="count a duplicate in a join twice",
        module="_awaited.py",
        find="return tuple(found)",
        become="return tuple(int(id) for id in on)",
    ),
    Tooth(
        name="resume a wait early",
        module="_index.py",
        find="if wait.on is not None and not self.open_joins.get(node.id):",
        become="if wait.on is not None and self.open_joins.get(node.id, 0) <= 1:",
    ),
    Tooth(
        name="forget to wake for what has ended already",
        module="_index.py",
        find="self.timers.push(wait.deadline_us, node.id) self.wake_candidate(node)",
        become="self.timers.push(wait.deadline_us, node.id)",
    ),
    Tooth(
        name="finish an owner between end and create in one commit",
        module="_pass.py",
        find="if found is None or found.status is not COMPLETING or found.below:",
        become="if found is None or found.status is not COMPLETING:",
    ),
    Tooth(
        name="mark the decider of a join too",
        module="_pass.py",
        find='(id, "join") for id in node.wait.on or () if id != decider',
        become='(id, "join") for id in node.wait.on or ()',
    ),
    Tooth(
        name="drop a hold on reopen",
        module="_recovery.py",
        find="view.spread(node, was=False, was_all=False)",
        become="if node.status is not WAITING:\n"
        "                view.spread(node, was=False, was_all=False)",
    ),
    Tooth(
        name="let a waiting phase resume after the mark",
        module="_pass.py",
        find="found.status is not WAITING or found.marked or found.blocked",
        become="found.status is not WAITING or found.blocked",
    ),
    Tooth(
        name="start a child between intent and cascade",
        module="_pass.py",
        find="or id in self._index.running or self._runtime.under_intent(tx.view, found)",
        become="or id in self._index.running",
    ),
    Tooth(
        name="give the slot back twice",
        module="_scheduler.py",
        find="self._slots[kind] -= 1",
        become="self._slots[kind] -= 2",
    ),
    Tooth(
        name="consume a signal twice",
        module="_transaction.py",
        find="self.writes.append((op, (row.id,)))",
        become="self.writes.append((Op.CHECKPOINT_DELETE, (0,)))",
    ),
    Tooth(
        name="accept the commit of a marked phase",
        module="_transaction.py",
        find="if node.marked and not phase.aborting and",
        become="if False and",
    ),
    Tooth(
        name="charge a task for a clean close",
        module="_runtime.py",
        find="node.status = PENDING node.recoveries = 0",
        become="node.status = PENDING\n                node.recoveries += 1",
    ),
    Tooth(
        name="retry before its moment",
        module="_index.py",
        find="if node.status is not PENDING or node.not_before_us <= self._now_us():",
        become="if True:",
    ),
    Tooth(
        name="blame a neighbour for a death",
        module="_recovery.py",
        find="if node.recoveries >= recoveries_max and not others:",
        become="if node.recoveries >= recoveries_max:",
    ),
    Tooth(
        name="let a replaced definition go on",
        module="_run.py",
        find="if replacement is not None and replacement is not phase.definition:",
        become="if False:",
    ),
    Tooth(
        name="see no wait cycle through ownership",
        module="_cycles.py",
        find="yield from self._kinds.needs(id, tx) return pending = [id]",
        become="yield from self._kinds.needs(id, tx)\n            return\n        pending = []",
    ),
    Tooth(
        name="lose count of what a graph leaves out",
        module="_graph_watch.py",
        find="elif self._root is None: self._left_out -= 1",
        become="elif self._root is None:\n            pass",
        graphs=True,
    ),
    Tooth(
        name="fill the places of a graph in the middle of a batch",
        module="_graph_watch.py",
        find="and room > 0 and tx.seq == session.line.published_seq:",
        become="and room > 0:",
        graphs=True,
    ),
    Tooth(
        name="show a task before older ones that are left out",
        module="_graph_watch.py",
        find="if not self._left_out: self._try_to_enter(",
        become="if True:\n            self._try_to_enter(",
        graphs=True,
    ),
    Tooth(
        name="keep a conversation in a graph when its owner has left",
        module="_graph_watch.py",
        find="for conversation in self._owned.pop(id):",
        become="for conversation in self._owned.pop(id)[:0]:",
        graphs=True,
    ),
    Tooth(
        name="leave the phase of a task in a graph as it was",
        module="_graph_watch.py",
        find="told.phases.get(id, shown.phase)",
        become="shown.phase",
        graphs=True,
    ),
    Tooth(
        name="follow a root that has ended",
        module="_graph_watch.py",
        find="if self._root is not None and self._root in told.ended:",
        become="if False:",
        graphs=True,
    ),
    Tooth(
        name="leave a changed field out of a patch",
        module="_graph.py",
        find='("abort_reason", lambda task: task.abort_reason),',
        become='("abort_reason", lambda task: task.abort_reason and "user"),',
        graphs=True,
    ),
)


@attrs.frozen(kw_only=True)
class Bite:
    """What became of one tooth."""

    tooth: Any
    """None where nothing was planted."""
    caught: bool
    said: str
    seconds: float


def play_planted(command: list[str], tooth: Any) -> str | None:
    """What a command says that runs on a copy of the package with a tooth in it; None: it hangs."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            CHECKOUT / "pidurable",
            Path(folder) / "pidurable",
            symlinks=False,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        if tooth is not None:
            tooth.plant(Path(folder) / "pidurable")
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=HANG_SECONDS,
                env={**os.environ, "PYTHONPATH": folder},
            )
        except subprocess.TimeoutExpired:
            return None
    return done.stdout + done.stderr


def differences_in(said: str, tooth: Any) -> bool:
    """Whether a run, by its own figures, has found something."""
    found = re.search(r"differences=(\d+)", said)
    if found is None:
        raise BluntToothError(f"{tooth.name if tooth else 'no tooth'}: no figures:\n{said[-2000:]}")
    return found.group(1) != "0"


def bite(tooth: Tooth | None, *, programs: int = PROGRAMS_MAX) -> Bite:
    """Play programs against a copy of the package, until one fails; a tooth is planted, or none."""
    started = time.perf_counter()
    command = [sys.executable, str(RUNNER), "--programs", str(programs), "--tries", "0"]
    # What the recount would find is not the merit of the model.
    command.append("--model-only")
    if tooth is not None and tooth.graphs:
        command.append("--graphs")
    said = play_planted(command, tooth)
    if said is None:
        said = "differences=1: it does not come to rest"
    first = next((line for line in said.splitlines() if line.startswith("seed ")), said[-200:])
    return Bite(
        tooth=tooth,
        caught=differences_in(said, tooth),
        said=first[:160],
        seconds=time.perf_counter() - started,
    )


def show_all(title: str, chosen: Sequence[Any], bite: Callable[[Any], Bite]) -> int:
    """Try teeth one after the other; print a line for each, and one for all."""
    caught = 0
    for tooth in chosen:
        try:
            result = bite(tooth)
        except BluntToothError as blunt:
            print(f"BLUNT  {blunt}", flush=True)
            continue
        caught += result.caught
        print(
            f"{'caught' if result.caught else 'MISSED'} {result.seconds:5.1f} s  {tooth.name}: "
            f"{result.said}",
            flush=True,
        )
    verdict = "PASS" if caught == len(chosen) else "FAIL"
    print(f"{title}: caught={caught}/{len(chosen)} {verdict}")
    return int(verdict == "FAIL")


def main(part: str = "") -> int:
    return show_all("teeth", [tooth for tooth in TEETH if part in tooth.name], bite)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
