"""The scratch project of the demo, and the look at what was made of it afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from pidurable.agent._prompt import build_request
from pidurable.agent._strict import check_request
from pidurable.errors import ModelError
from pidurable.records._entries import Entry
from pidurable.records._messages import AssistantMessage, ToolResultMessage
from pidurable.session._context import context_of
from pidurable.session._transcript import context_range

__all__ = [
    "FILES",
    "announcements",
    "leftover_processes",
    "make_project",
    "tests_pass",
    "transcript_problem",
]

FILES = {
    "prices.py": '''"""Prices in cents."""


def discounted(cents: int, percent: int) -> int:
    """Return a price after a discount, rounded half up."""
    return cents - percent
''',
    "test_prices.py": '''"""What prices.py promises."""

import time

import pytest

from prices import discounted


@pytest.fixture
def shop():
    time.sleep(0.7)  # as real tests do, it takes a moment to set up


def test_no_discount_changes_nothing():
    assert discounted(5000, 0) == 5000


def test_ten_per_cent_off(shop):
    assert discounted(5000, 10) == 4500
''',
    "announce.sh": """# Announce a release. Running it twice tells everybody twice.
echo "release $1" >> outbox.log
sleep 2
echo "announced release $1"
""",
    "pyproject.toml": """[tool.pytest.ini_options]
addopts = ""
""",
}
TESTS_SECONDS_MAX = 30.0


def make_project(folder: Path) -> None:
    """Write the project, and the script of its model beside it."""
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    script = resources.files("pidurable.cli").joinpath("_demo_script.yaml")
    (folder / "model.yaml").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")


def tests_pass(folder: Path) -> bool:
    """Run the project's tests, for real and outside of any agent."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    found = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_prices.py"],
        cwd=folder,
        env={**environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TESTS_SECONDS_MAX,
        check=False,
    )
    return found.returncode == 0


def announcements(folder: Path) -> list[str]:
    """Return what the command that must not be repeated has put out, one line an effect."""
    try:
        return (folder / "outbox.log").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def leftover_processes(folder: Path) -> list[int]:
    """Return the processes whose working directory is the project: none may be left behind.

    Where there is no /proc (macOS) nobody can be asked this way, and the list is empty.
    """
    found: list[int] = []
    root = os.path.realpath(folder)
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            cwd = os.readlink(f"/proc/{name}/cwd")
        except OSError:
            continue  # gone meanwhile, a zombie, or of another user
        if cwd == root or cwd.startswith(root + os.sep):
            found.append(int(name))
    return found


def transcript_problem(entries: Sequence[Entry]) -> str | None:
    """Return what is wrong with a finished transcript, or None.

    Every call of a complete answer has exactly one result, every result has its call, and what the
    model would be sent is a request that the strictest provider takes.
    """
    calls: dict[tuple[int, int], int] = {}
    for entry in entries:
        for message in entry.messages:
            if isinstance(message, AssistantMessage) and message.status == "complete":
                calls.update(((entry.id, index), 0) for index in range(len(message.tool_calls)))
            elif isinstance(message, ToolResultMessage):
                if message.call not in calls:
                    return f"entry {entry.id} is the result of a call that is not there"
                calls[message.call] += 1
    for (entry_id, index), results in calls.items():
        if results != 1:
            return f"call {index} of entry {entry_id} has {results} results"
    last = entries[-1].messages if entries else ()
    if not last or not isinstance(last[0], AssistantMessage) or last[0].status != "complete":
        return "it does not end with an answer"
    context = context_of(context_range(entries[:-1]))
    request = build_request(context, model="demo", thinking=None)
    try:
        check_request(request)
    except ModelError as refused:
        return str(refused)
    return None
