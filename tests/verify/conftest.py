"""Goals with their figures take minutes: the default suite has what is not marked slow of them.

`-m slow` runs them all, as `.ci/run` does; each runner's docstring says which variables size it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip before anything is set up: the processes are started by fixtures."""
    if "slow" in str(config.getoption("-m")):
        return
    skip = pytest.mark.skip(reason="a whole goal; run it with -m slow")
    for item in items:
        if item.path.parent == HERE and item.get_closest_marker("slow") is not None:
            item.add_marker(skip)
