"""Sub-agents under one slot for tools, killed and aborted: every answer once, nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("subagent_tree.py")


def grown(*arguments: str) -> str:
    """The last line of a run of the program."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout.splitlines()[-1]


def test_a_small_tree_of_agents_survives_its_kills() -> None:
    """Three agents, killed once, answer once each; aborted at the root, nothing is left."""
    # C045
    line = grown("1", "1", "--widths", "2")

    assert line.startswith("subagents: agents=3 kills=1 answers=3 twice=0 ")
    assert " left=0 " in line


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forty_agents_survive_twenty_kills(
    slow_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree of three levels and forty agents with one slot for tools: every answer once.

    `SUBAGENT_KILLS` in the environment says how many kills.
    """
    if not slow_run:
        pytest.skip("forks dozens of lives; run it with -m slow")
    kills = os.environ.get("SUBAGENT_KILLS", "20")
    line = grown(kills)
    with capsys.disabled():
        print(f"\n{line}")

    assert line.startswith(f"subagents: agents=40 kills={kills} answers=40 twice=0 ")
    assert " left=0 " in line
