"""Programs of turns whose processes are killed for real: nothing refused, lost or doubled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("turn_kills.py")


def played(*arguments: str) -> str:
    """The last line of a run of the program."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_programs_survive_real_kills(slow_run: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred programs, each killed at drawn points and moments, are judged from outside.

    `TURNS_KILLED` in the environment says how many.
    """
    if not slow_run:
        pytest.skip("forks hundreds of lives; run it with -m slow")
    line = played(os.environ.get("TURNS_KILLED", "100"))
    with capsys.disabled():
        print(f"\n{line}")

    assert " refusals=0 differences=0 " in line
