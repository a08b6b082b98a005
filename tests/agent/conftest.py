"""How densely the agent loop is killed: at each second commit, or at each with `-m slow`."""

from __future__ import annotations

import agent_world
import pytest


@pytest.fixture(autouse=True)
def _kill_step(slow_run: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if slow_run:
        monkeypatch.setattr(agent_world, "KILL_STEP", 1)
