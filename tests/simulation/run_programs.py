"""Plays many programs and says in one line how that went; or one program again.

    python tests/simulation/run_programs.py --programs 2000 --seed 0
    python tests/simulation/run_programs.py --seed 17 --program '[["create", 0, ...], ...]'

Every program has a seed of its own (the first seed, and one more for each). A difference is shrunk,
and printed with the command that plays it again; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import player
from player import Player, first_difference, play, quiet_logs, replay_command
from programs import Program, draw_program, shrink
from rare import RARE
from watched_player import WatchedPlayer

STEPS = 70
SQLITE_EVERY = 40
"""Every so many programs one is played on SQLite."""
TWICE_EVERY = 20
"""Every so many programs one is played again, and must leave the same trace."""


@attrs.define
class Report:
    """What was played, and what was found."""

    seed: int
    programs: int = 0
    steps: int = 0
    commits: int = 0
    openings: int = 0
    differences: list[str] = attrs.Factory(list)
    rare: Counter[str] = attrs.Factory(Counter)
    digest: Any = attrs.Factory(hashlib.sha256)
    seconds: float = 0.0

    @property
    def unseen(self) -> list[str]:
        return [name for name in RARE if not self.rare[name]]

    def line(self, *, rare_counts: bool = True) -> str:
        """The last line: figures, and whether that is enough."""
        unseen = self.unseen if rare_counts else []
        passed = not self.differences and not unseen
        return (
            f"oracle: programs={self.programs} steps={self.steps} commits={self.commits} "
            f"differences={len(self.differences)} rare-unseen={len(unseen)} seed={self.seed} "
            f"{self.seconds:.1f} s {'PASS' if passed else 'FAIL'}"
        )


def run(
    programs: int,
    seed: int,
    *,
    steps: int = STEPS,
    differences_max: int = 1,
    seconds_max: float | None = None,
    tries: int = 300,
    kind: type[Player] = Player,
    programs_max: int = 0,
) -> Report:
    """Play the programs of consecutive seeds, and more where some rare state was not met.

    Args:
        programs_max: Not more than so many are played for the rare states; 0 plays none for them.
    """
    report = Report(seed)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(max(programs, programs_max)):
            if number >= programs and not report.unseen:
                break
            one = seed + number
            program = draw_program(one, steps)
            path = None
            if number % SQLITE_EVERY == 12:
                path = Path(folder) / f"{one}.sqlite"
            twice = number % TWICE_EVERY == 0
            _one(report, program, one, path, twice=twice, tries=tries, kind=kind)
            report.seconds = time.perf_counter() - started
            if len(report.differences) >= differences_max:
                break
            if seconds_max is not None and report.seconds > seconds_max:
                break
    return report


def _one(
    report: Report,
    program: Program,
    seed: int,
    path: Path | None,
    *,
    twice: bool,
    tries: int,
    kind: type[Player],
) -> None:
    found = first_difference(program, seed=seed, path=path, kind=kind)
    report.programs += 1
    if isinstance(found, Player):
        report.steps += found.steps
        report.commits += found.ledger.commits
        report.openings += found.stage.openings
        report.rare += found.model.rare
        trace = "\n".join(found.ledger.trace)
        report.digest.update(trace.encode())
        if twice and path is None:
            again = play(program, seed=seed, kind=kind)
            if "\n".join(again.ledger.trace) != trace:
                report.differences.append(f"seed {seed}: played twice, two traces")
        return
    where = "" if path is None else " (on SQLite)"

    def fails(candidate: Program) -> bool:
        return isinstance(first_difference(candidate, seed=seed, kind=kind), str)

    shrunk = shrink(program, fails, tries=tries) if path is None else program
    final = first_difference(shrunk, seed=seed, kind=kind) if path is None else found
    report.differences.append(
        f"seed {seed}{where}: {found}\n"
        f"shrunk to {len(shrunk)} of {len(program)} operations: {final}\n"
        f"replay: {replay_command(seed, shrunk)}"
    )


def show_rare(report: Report) -> str:
    return "\n".join(f"  {report.rare[name]:6} {name}" for name in RARE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--differences", type=int, default=1, help="stop after so many")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    parser.add_argument("--tries", type=int, default=300, help="most tries to shrink")
    parser.add_argument("--program", help="play this one and print its trace")
    parser.add_argument("--model-only", action="store_true", help="recount no index of the runtime")
    parser.add_argument("--graphs", action="store_true", help="watch the task graph as well")
    given = parser.parse_args()
    kind = WatchedPlayer if given.graphs else Player
    quiet_logs()
    player.recounts = not given.model_only
    if given.program is not None:
        program = [tuple(each) for each in json.loads(given.program)]
        found = first_difference(program, given.seed, kind=kind)
        print(found if isinstance(found, str) else "\n".join(found.ledger.trace[-40:]))
        return int(isinstance(found, str))
    report = run(
        given.programs,
        given.seed,
        steps=given.steps,
        differences_max=given.differences,
        seconds_max=given.seconds,
        tries=given.tries,
        kind=kind,
    )
    print(show_rare(report))
    print(f"  trace {report.digest.hexdigest()}")
    for each in report.differences:
        print(each)
    print(report.line())
    return int(not report.line().endswith("PASS"))


if __name__ == "__main__":
    sys.exit(main())
