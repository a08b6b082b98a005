"""Kills at every point of a run take minutes together: the default suite has a part of them.

`-m slow` runs them all, as `.ci/run` does. Every day a tree of tasks and the demo, whose agent is
run by the command line, are killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
NOT_EVERY_DAY = ("test_http.py", "test_examples_killed.py", "test_run_killed.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip before anything is set up: the processes are started by fixtures."""
    if "slow" in str(config.getoption("-m")):
        return
    skip = pytest.mark.skip(reason="kills at every point; run it with -m slow")
    for item in items:
        if item.path.parent == HERE and item.path.name in NOT_EVERY_DAY:
            item.add_marker(skip)
