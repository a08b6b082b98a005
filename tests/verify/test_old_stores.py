"""R12 is met, and says so only because it is: a broken migration is seen in its line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parent / "old_stores.py"


def run(**options: str) -> tuple[int, str]:
    """Run the goal in a process of its own, which forks; its code and its last line."""
    done = subprocess.run(
        [sys.executable, str(RUNNER)],
        env={**os.environ, **options},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = done.stdout.splitlines()
    return done.returncode, lines[-1] if lines else done.stderr


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_old_stores_are_brought_here_whole() -> None:
    """The goal is met with a small sample of kills."""
    # C077
    code, line = run()

    assert line.startswith("R12 old stores: stores=")
    assert (code, line.split()[-1]) == (0, "PASS"), line
    assert "differences=0" in line


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize(("planted", "kills"), [("rows", "2"), ("copy", "8"), ("split", "45")])
def test_a_broken_migration_is_seen(planted: str, kills: str) -> None:
    """A lost row, a copy that has its name too early, and half a migration each fail the goal."""
    code, line = run(R12_PLANTED=planted, R12_KILLS=kills, R12_ENDS="0")

    assert (code, line.split()[-1]) == (1, "FAIL"), line
    assert "differences=0" not in line
