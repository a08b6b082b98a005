"""Reason codes: each has its line of explanation, and the code uses no other."""

from __future__ import annotations

import ast
import re

import pytest
from sources import sources

from pidurable.records import _codes
from pidurable.records._codes import (
    ABORTS,
    BLOCKED,
    NOT_MOVING,
    PERMISSIONS,
    RESUME,
    TOOL_ERRORS,
    UNANSWERED,
)

TABLES = {
    "BLOCKED": BLOCKED,
    "NOT_MOVING": NOT_MOVING,
    "UNANSWERED": UNANSWERED,
    "TOOL_ERRORS": TOOL_ERRORS,
    "PERMISSIONS": PERMISSIONS,
    "ABORTS": ABORTS,
    "RESUME": RESUME,
}

# Codes that are explained and not given yet: what gives them is not there yet.
NOT_YET = {
    "handoff_limit",
    "stopped",
    "reset",
    "stale",
    "restart",
}


def strings_of_the_code() -> set[str]:
    """Every string constant of the package outside of the tables themselves."""
    return {
        node.value
        for source in sources("pidurable")
        if source.path.name != "_codes.py"
        for node in source.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("table", TABLES)
def test_a_code_is_a_stable_word_with_one_line_of_explanation(table: str) -> None:
    """Codes are snake_case; explanations are one sentence for a person."""
    for code, text in TABLES[table].items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code), code
        assert text.endswith("."), code
        assert text[0].isupper(), code
        assert "\n" not in text, code


def test_every_code_is_given_somewhere_or_known_to_be_idle() -> None:
    """A code that nothing gives is a promise that nobody keeps."""
    used = strings_of_the_code()

    idle = {code for table in TABLES.values() for code in table if code not in used}
    assert idle <= NOT_YET


def test_every_blocked_reason_of_the_kernel_is_explained() -> None:
    """What the scheduler stores as a reason stands in the table."""
    found = set()
    for source in sources("pidurable/tasks"):
        for node in source.nodes:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Attribute) and target.attr == "blocked"
                for target in node.targets
            ):
                found |= {
                    each.value
                    for each in ast.walk(node.value)
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                }

    assert found <= set(BLOCKED)


def test_explaining_a_code_gives_its_line() -> None:
    """Programs look a code up by its name; an unknown one gives None."""
    assert _codes.explain_code("crash_loop") == BLOCKED["crash_loop"]
    assert _codes.explain_code("turn_limit") == UNANSWERED["turn_limit"]
    assert _codes.explain_code("no_such_code") is None
