"""Plays random histories and says in one line per goal how that went; or one history again.

    python tests/histories/run_histories.py --histories 1000 --seed 0
    python tests/histories/run_histories.py --goal watches --seed 17 --program '[["commit", ...]]'

Every history has a seed of its own (the first seed, and one more for each). A difference is shrunk,
and printed with the command that plays it again; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
from history_player import Player, first_difference, quiet_logs
from history_steps import GOALS, Program, draw_program, shrink
from history_watchers import WatchError
from watch_soak import Soak, soak

STEPS = 30
SQLITE_EVERY = 20
"""Every so many histories one is played on a file."""

SOAKED = 500
"""From so many histories on the soak is played whole: 1,000 watchers, 10,000 commits."""

TITLES = {"rewind": "rewind", "watches": "R9 watches", "context": "context"}
FIGURES = {
    "rewind": ("values", "entries", "commits", "openings"),
    "watches": ("frames", "watches", "overflows", "folds", "retirements", "commits"),
    "context": ("contexts", "commits", "openings"),
}
ALWAYS_RARE = (
    "crash",
    "reopened",
    "reopened from a file",
    "body that raises",
    "refused, then stored",
    "batch refused",
    "batch lost",
    "batch stored and raised",
    "commits that share a batch",
    "fork",
    "fork of a fork",
    "fork at an ancestor's entry",
    "fork at an entry of its own commit",
)
RARE = {
    "rewind": (
        *ALWAYS_RARE,
        "copied by a fork: current",
        "entry that is kept in a blob",
        "copied by a fork: as_of",
        "as of, an earlier incarnation",
        "as of, retired since",
        "as of, through a migration",
        "as of, too new",
        "retired and made again in one commit",
        "retired with its task",
        "read through a migration",
        "stored in a newer version",
        "refused as too new",
        "aborted task",
        "past read among commits",
        "cancelled in its body",
        "cancelled as its body ended",
        "stored, then cancelled",
        "refused to head to a stranger",
        "refused to edit a stranger",
        "refused to fork at a stranger",
        "refused to look as of a stranger",
        "more changes than deltas stand on a base",
    ),
    "watches": (
        *ALWAYS_RARE,
        "retired with its task",
        "retired and made again in one commit",
        "retired while folding",
        "frame of a view",
        "a hundred frames",
        "a hundred frames and one more",
        "view of more than a page",
        "more than a page in one commit",
        "watch opened among commits",
        "watch ended: too new",
        "watch refused: too new",
        "waited, cancelled, taken up again",
        "left: fast",
        "left: slow",
        "left: stalled",
    ),
    "context": (
        *ALWAYS_RARE,
        "fork inside a round",
        "head in an ancestor",
        "edit of an ancestor's entry",
        "something said inside a round",
        "context read among commits",
        "image stored with its message",
        "image that was stored before",
    ),
}


@attrs.define
class Report:
    """What was played for a goal, and what was found."""

    goal: str
    seed: int
    histories: int = 0
    counts: Counter[str] = attrs.Factory(Counter)
    rare: Counter[str] = attrs.Factory(Counter)
    differences: list[str] = attrs.Factory(list)
    digest: Any = attrs.Factory(hashlib.sha256)
    """Of what each history was: the same seeds give the same."""
    soak: Soak | None = None
    seconds: float = 0.0

    @property
    def unseen(self) -> list[str]:
        return [name for name in RARE[self.goal] if not self.rare[name]]

    def line(self, *, rare_counts: bool = True) -> str:
        """The last line: figures, and whether that is enough."""
        unseen = self.unseen if rare_counts else []
        passed = self.histories and not self.differences and not unseen
        figures = " ".join(f"{name}={self.counts[name]}" for name in FIGURES[self.goal])
        if self.soak is not None:
            # Beside the histories: very many watchers, and one that takes nothing for very long.
            figures += f" watchers={self.soak.watchers} stalled={self.soak.stalled_commits}"
            figures += f" held={self.soak.held}"
        forks, again = self.rare["fork"], self.rare["crash"] + self.rare["reopened"]
        return (
            f"{TITLES[self.goal]}: histories={self.histories} {figures} forks={forks} "
            f"reopenings={again} differences={len(self.differences)} rare-unseen={len(unseen)} "
            f"seed={self.seed} {self.seconds:.1f}s {'PASS' if passed else 'FAIL'}"
        )

    def show_rare(self) -> str:
        return "\n".join(f"  {self.rare[name]:6} {name}" for name in RARE[self.goal])


def run(
    goal: str,
    histories: int,
    seed: int,
    *,
    steps: int = STEPS,
    differences_max: int = 1,
    tries: int = 300,
    sqlite_every: int = SQLITE_EVERY,
    histories_max: int = 0,
) -> Report:
    """Play the histories of consecutive seeds, and more where some rare state was not met.

    Args:
        histories_max: Not more than so many are played for the rare states; 0 plays none for them.
    """
    report = Report(goal, seed)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(max(histories, histories_max)):
            if number >= histories and not report.unseen:
                break
            one = seed + number
            path = (
                Path(folder) / f"{one}.sqlite"
                if number % sqlite_every == sqlite_every - 1
                else None
            )
            _one(report, draw_program(goal, one, steps), one, path, tries=tries)
            report.seconds = time.perf_counter() - started
            if len(report.differences) >= differences_max:
                break
    if goal == "watches" and not report.differences:
        many = histories >= SOAKED
        try:
            report.soak = soak(
                watchers=1_000 if many else 30,
                commits=100 if many else 5,
                stalled_commits=10_000 if many else 120,
            )
        except WatchError as error:
            report.differences.append(f"soak: {error}")
    report.seconds = time.perf_counter() - started
    return report


def _one(report: Report, program: Program, seed: int, path: Path | None, *, tries: int) -> None:
    goal = report.goal
    found = first_difference(goal, program, seed, path)
    report.histories += 1
    if isinstance(found, Player):
        seen = sorted((found.counts + found.rare).items())
        report.digest.update(f"{seed} {seen} {found.model.published.seq}".encode())
        report.counts += found.counts
        report.rare += found.rare
        return

    def fails(candidate: Program) -> bool:
        return isinstance(first_difference(goal, candidate, seed), str)

    where = "" if path is None else " (on SQLite)"
    shrunk, last = program, found
    if tries and fails(program):
        shrunk = shrink(program, fails, tries=tries)
        last = str(first_difference(goal, shrunk, seed))
    report.differences.append(
        f"{TITLES[goal]}, seed {seed}{where}: {found}\n"
        f"shrunk to {len(shrunk)} of {len(program)} steps: {last}\n"
        f"replay: {replay_command(goal, seed, shrunk)}"
    )


def replay_command(goal: str, seed: int, program: Program) -> str:
    text = shlex.quote(json.dumps(program))
    script = "python tests/histories/run_histories.py"
    return f"{script} --goal {goal} --seed {seed} --program {text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--goal", choices=sorted(GOALS), help="one of them; all without")
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--differences", type=int, default=1, help="stop after so many")
    parser.add_argument("--tries", type=int, default=300, help="most tries to shrink")
    parser.add_argument("--program", help="play this one")
    given = parser.parse_args()
    quiet_logs()
    if given.program is not None:
        found = first_difference(given.goal, json.loads(given.program), given.seed)
        print(found if isinstance(found, str) else f"no difference: {dict(found.counts)}")
        return int(isinstance(found, str))
    reports = [
        run(
            goal,
            given.histories,
            given.seed,
            steps=given.steps,
            differences_max=given.differences,
            tries=given.tries,
        )
        for goal in ([given.goal] if given.goal else GOALS)
    ]
    for report in reports:
        print(f"{report.show_rare()}\n  trace {report.digest.hexdigest()}")
        for each in report.differences:
            print(each)
    for report in reports:
        print(report.line())
    return int(any(not report.line().endswith("PASS") for report in reports))


if __name__ == "__main__":
    sys.exit(main())
