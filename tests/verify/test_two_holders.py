"""R5 and R7 in the suite: a few rounds that must pass, and planted bugs that must be found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commit_history import judge_history

HERE = Path(__file__).parent


def run_rounds(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the goal as a program: it forks, which a process with threads must not."""
    return subprocess.run(
        [sys.executable, str(HERE / "two_holders.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        timeout=3_600,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_a_holder_that_was_stopped_and_replaced_stores_nothing_more() -> None:
    """R5: wherever it is stopped, what is stored is the successor's, and each effect is once."""
    # C017, C018, C022, C024
    done = run_rounds()

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("R5 two holders: rounds=")
    assert done.stdout.rstrip().endswith("PASS")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "rounds", "said"),
    [
        # What comes too late is stored as itself, or in the place of what the successor stores.
        (
            "epoch read outside the transaction",
            "24",
            "stale commit: |UNIQUE constraint failed: entries.id",
        ),
        ("heartbeat without epoch", "8", "a stale heartbeat was accepted"),
        ("release without epoch", "8", "a stale release was accepted"),
    ],
)
def test_a_fence_with_a_hole_is_found(plant: str, rounds: str, said: str, tmp_path: Path) -> None:
    """The controls of R5: each planted bug makes rounds fail, and says by what."""
    done = run_rounds("--plant", plant, "--rounds", rounds, TMPDIR=str(tmp_path))

    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(said, done.stdout)
    assert done.stdout.rstrip().endswith("FAIL")


def lines(*events: tuple[str, int, int]) -> list[dict[str, object]]:
    return [{"who": "a", "what": what, "n": n, "at": at} for what, n, at in events]


@pytest.mark.parametrize(
    ("events", "stored", "found"),
    [
        ([("invoke", 1, 0), ("ok", 1, 1)], {1: [5, 5]}, None),
        ([("invoke", 1, 0), ("ok", 1, 1)], {}, "acknowledged and not stored"),
        ([("invoke", 1, 0), ("fail", 1, 1)], {1: [5, 5]}, "said to have failed"),
        ([("invoke", 1, 0), ("unknown", 1, 1)], {1: [5, 5]}, None),
        ([("invoke", 1, 0), ("unknown", 1, 1)], {}, None),
        ([("invoke", 1, 0)], {1: [5]}, "half of it"),
        ([("invoke", 1, 0)], {1: [5, 6]}, "half of it"),
        ([], {1: [5, 5]}, "nobody asked for it"),
        (
            [("invoke", 1, 0), ("ok", 1, 1), ("invoke", 2, 2), ("ok", 2, 3)],
            {1: [6, 6], 2: [5, 5]},
            "commit 5, asked for after",
        ),
        (
            [("invoke", 1, 0), ("invoke", 2, 1), ("ok", 1, 2), ("ok", 2, 3)],
            {1: [6, 6], 2: [5, 5]},
            None,
        ),
        (
            [("invoke", 1, 0), ("ok", 1, 1), ("invoke", 2, 2), ("unknown", 2, 3)],
            {1: [6, 6], 2: [5, 5]},
            "commit 5, asked for after",
        ),
    ],
)
def test_a_history_is_held_against_what_is_stored(
    events: list[tuple[str, int, int]], stored: dict[int, list[int]], found: str | None
) -> None:
    """R7: each way in which answers and rows can disagree is told, and nothing else is."""
    wrong = judge_history([lines(*events)], {("a", n): rows for n, rows in stored.items()})

    assert [found in problem for problem in wrong] == ([] if found is None else [True])
