"""Every hard scenario of the tree has tests that say which one they are."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

SCENARIOS = (
    "mark during reservation",
    "mark against fault",
    "mark racing handover",
    "two commits of an invocation around the deciding step",
    "close while a step decides to continue",
    "close before a fault is written",
    "close while an abort reservation settles",
    "crash around the mark",
    "crash while the abort outcome is in storage",
    "cascade barrier",
    "fail_fast on a held failure",
    "dependency completes in the commit that aborts the waiter's owner",
    "old chain revived",
    "background boundary under ended tasks",
    "held chain and wide hold",
    "end and create in one commit",
    "wait cycles",
    "missing definition over live work",
    "child created in the finishing commit",
)

_MARKER = re.compile(r"# Hard scenario: ([^.,]+)[.,]")


def markers(path: Path) -> list[str]:
    """The scenarios that are named inside of a test of this file, once for each test."""
    text = path.read_text()
    if not _MARKER.search(text):
        return []
    lines = text.splitlines()
    return [
        match[1]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_")
        for line in lines[node.lineno - 1 : node.end_lineno]
        if (match := _MARKER.search(line))
    ]


def test_each_hard_scenario_has_a_test_and_no_marker_names_another() -> None:
    """Nineteen scenarios, each marked in a test; a marker that was misspelt counts for none."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    counts = Counter(name for path in files for name in markers(path))
    assert len(SCENARIOS) == 19
    assert set(counts) == set(SCENARIOS)
    # One told small, one told in full.
    assert {name: n for name, n in counts.items() if n < 2} == {}
