"""Trees of tasks on a real file, killed with SIGKILL at every one of their commits.

`killed_trees.py` does the killing; what it saw is judged here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "killed_trees.py"


def reports_of(run: str, folder: Path, step: int) -> list[dict[str, Any]]:
    """What was seen of a run: the undisturbed one first, then one report a kill."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), run, str(folder), str(step)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["approve", "order", "cancel"])
def test_a_kill_at_any_commit_changes_nothing_about_the_end_of_a_tree(
    run: str, tmp_path: Path, slow_run: bool
) -> None:
    """Each effect is there once, each entry once, and every task ends as it does unkilled."""
    if run != "approve" and not slow_run:
        pytest.skip("one tree is enough for every day; run all with -m slow")
    # Every day it is killed at each second commit.
    step = 1 if slow_run else 2
    # C010, C011, C016, C019, C026, C045: loops with approvals, a queue of width one, a cascade.
    first, *killed = reports_of(run, tmp_path, step)
    wanted = first["undisturbed"]
    assert wanted["live"] == []
    assert len(killed) > 10 // step
    for report in killed:
        seen, where = report["resumed"], f"killed after commit {report['number']}"
        for what in ("live", "tasks", "entries"):
            assert seen[what] == wanted[what], where
        # Attempts, which count what failed, are effects of their own; all others are as they were.
        assert set(seen["ledger"]) == set(wanted["ledger"]), where
        assert max(Counter(seen["keys"]).values()) == 1, where
        assert seen["owners first"] == [], where
    assert sum(report["kills"] for report in killed) > len(killed)
