"""The guard over all tests sees what a strict provider refuses, also in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import strict_guard

PROGRAM = """
import trio
from pidurable.agent._models import ModelRequest
from pidurable.agent._scripted import ScriptedModel

async def main():
    request = ModelRequest(model="scripted/model", system="", tools=(), messages=())
    async with ScriptedModel(["hi"]).stream(request):
        pass

trio.run(main)
"""


@pytest.mark.refuses
def test_a_refusal_in_another_process_is_told() -> None:
    """A process that a test starts tells the test what its provider refused."""
    path = Path(os.environ[strict_guard.VARIABLE])
    before = path.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert "refused request: there is no message of a user" in done.stderr
    told = path.read_bytes()[before:].decode()
    assert told.splitlines() == ["'refused request: there is no message of a user'"]


def test_a_refusal_fails_the_test_that_did_not_plan_it() -> None:
    """Refused and not planned, or planned and not refused, is a failure; else all is well."""
    verdict = strict_guard.verdict

    assert verdict([], planned=False) is None
    assert verdict(["no"], planned=True) is None
    assert verdict(["no", "nor"], planned=False) == "a strict provider refused 2 requests: no"
    assert verdict([], planned=True) == "it plans that a request is refused, and none was"
