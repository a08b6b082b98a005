"""The proof of commands in the suite: a small run that must pass, and planted bugs found by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_proof(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the proof as a program, as `make verify` does."""
    return subprocess.run(
        [sys.executable, str(HERE / "commands.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        timeout=1_500,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(1_500)
def test_commands_are_applied_once_whoever_is_stopped_or_killed() -> None:
    """Each is applied once or reported as not seen, and the holder waits for nobody."""
    # C018, C024
    done = run_proof()

    assert done.returncode == 0, done.stdout + done.stderr
    assert " twice=0 lost=0 " in done.stdout
    assert done.stdout.rstrip().endswith("PASS")


@pytest.mark.slow
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize(
    ("plant", "unsaid"),
    [
        ("answer apart", " twice=0 "),
        ("forget first", " lost=0 "),
        ("decide again", " twice=0 "),
    ],
)
def test_a_command_that_is_not_one_commit_is_found(plant: str, unsaid: str) -> None:
    """The controls: an answer by itself, a box that forgets too early, a decision of two."""
    done = run_proof("--plant", plant, PIDURABLE_COMMANDS="400", PIDURABLE_COMMANDS_OUTSIDERS="4")

    assert done.returncode == 1, done.stdout + done.stderr
    assert unsaid not in done.stdout
    assert done.stdout.rstrip().endswith("FAIL")
