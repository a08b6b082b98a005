"""Run the goals of reliability, each with its figures, and print the line of each.

    python tests/verify/goals.py                 all, with the figures of every day
    python tests/verify/goals.py --long          with those from before a release: hours
    python tests/verify/goals.py R1 R5           some of them

A goal is met when its line ends in PASS. The rest of what a goal prints goes to standard error.
Exits with 1 unless every goal that was asked for is met.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

HERE = Path(__file__).parent


@attrs.frozen
class Goal:
    """A goal, the program that checks it, and its figures."""

    name: str
    program: Sequence[str]
    daily: Mapping[str, int | float] = attrs.field(factory=dict)
    long: Mapping[str, int | float] = attrs.field(factory=dict)


def _python(*words: str) -> list[str]:
    return [sys.executable, *words]


GOALS = (
    Goal("conformance", _python("-m", "pidurable.testing.storage_conformance")),
    Goal("R1", _python("crash_images.py"), {"R1_IMAGES": 3_000}, {"R1_IMAGES": 20_000}),
    Goal("R3", _python("kth_call_fails.py"), {"VERIFY_R3_SHARE": 0.036}, {"VERIFY_R3_SHARE": 1.0}),
    Goal("R4", _python("disk_full.py"), {"VERIFY_R4_PLACES": 20}, {"VERIFY_R4_PLACES": 100}),
    Goal(
        "R5",
        _python("two_holders.py"),
        {"PIDURABLE_R5_ROUNDS": 200},
        {"PIDURABLE_R5_ROUNDS": 2_000},
    ),
    Goal("R8", _python("cancel_everywhere.py"), {"VERIFY_R8_SHARE": 1.0}),
    Goal(
        "R10",
        _python("flat_memory.py"),
        {"VERIFY_R10_COMMITS": 100_000},
        {"VERIFY_R10_COMMITS": 1_000_000},
    ),
    Goal("R12", _python("old_stores.py"), {"R12_KILLS": 40, "R12_ENDS": 4}, {"R12_KILLS": 0}),
    Goal(
        "R14",
        _python("move.py"),
        {"MOVE_SESSIONS": 200, "MOVE_KILLS": 12, "MOVE_LIVES": 12},
        {"MOVE_SESSIONS": 5_000, "MOVE_KILLS": 60, "MOVE_LIVES": 60},
    ),
    Goal(
        "commands",
        _python("commands.py"),
        {"PIDURABLE_COMMANDS": 10_000, "PIDURABLE_COMMANDS_OUTSIDERS": 20},
        {"PIDURABLE_COMMANDS": 50_000, "PIDURABLE_COMMANDS_OUTSIDERS": 20},
    ),
)


def run(goal: Goal, *, long: bool) -> bool:
    """Run one goal, print its line, and tell whether it is met."""
    figures = {**goal.daily, **(goal.long if long else {})}
    began = time.monotonic()
    ended = subprocess.run(
        goal.program,
        cwd=HERE,
        env={**os.environ, **{name: str(value) for name, value in figures.items()}},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = ended.stdout.rstrip().splitlines()
    print("\n".join(lines[:-1]), file=sys.stderr, flush=True)
    last = lines[-1] if lines else f"{goal.name}: nothing was printed"
    met = ended.returncode == 0 and last.endswith("PASS")
    suffix = "" if met else f"  (exit status {ended.returncode})"
    print(f"{last}{suffix}  [{time.monotonic() - began:.0f} s]", flush=True)
    return met


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description="Run the goals of reliability.")
    parser.add_argument("names", nargs="*", metavar="GOAL", help=", ".join(g.name for g in GOALS))
    parser.add_argument("--long", action="store_true", help="the figures from before a release")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - {goal.name for goal in GOALS})
    if unknown:
        parser.error(f"no such goal: {', '.join(unknown)}")
    wanted = [goal for goal in GOALS if not given.names or goal.name in given.names]
    met = [run(goal, long=given.long) for goal in wanted]
    print(f"goals: met={sum(met)}/{len(wanted)} {'PASS' if all(met) else 'FAIL'}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
