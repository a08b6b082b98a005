"""Decisions, patterns and grants by themselves: what decides nothing, and what matches nothing."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pidurable import (
    Deny,
    Happened,
    Interrupted,
    Once,
    Pattern,
    Rerun,
    TextBlock,
    ToolResult,
)
from pidurable.agent._decisions import (
    check_decision,
    check_fits,
    decode_decision,
    encode_decision,
)
from pidurable.agent._grants import chains, matches
from pidurable.errors import InvalidArgumentError

DECISIONS = [
    Once(),
    Pattern("git *"),
    Pattern("git *", expires=datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)),
    Deny(),
    Deny("use the other file"),
    Rerun(),
    Happened("it was sent"),
    Happened(ToolResult([TextBlock(text="seen")], structured={"n": 1}, error=True, details=[1])),
    Interrupted(),
]


@pytest.mark.parametrize("decision", DECISIONS, ids=repr)
def test_the_json_form_of_a_decision_is_read_back_as_the_same(decision: Any) -> None:
    """What is stored of a decision, or handed in by another process, is that decision."""
    value = encode_decision(decision)

    again = decode_decision(value)

    assert type(again) is type(decision)
    assert encode_decision(again) == value
    if not isinstance(decision, Happened):
        assert again == decision


# C058
@pytest.mark.parametrize(
    "value", [None, "maybe", "once", 1, 0, True, False, {}, [], Once, object()]
)
def test_what_is_no_decision_is_refused(value: object) -> None:
    """Only an instance of one of the six classes decides anything."""
    with pytest.raises(InvalidArgumentError, match="decision: expected one of Once"):
        check_decision(value)


# C058
@pytest.mark.parametrize(
    "value",
    [
        None,
        "once",
        1,
        True,
        [],
        {},
        {"kind": None},
        {"kind": "yes"},
        {"kind": ["once"]},
        {"kind": "once", "text": "no"},
        {"kind": "pattern"},
        {"kind": "pattern", "pattern": ""},
        {"kind": "pattern", "pattern": 1},
        {"kind": "pattern", "pattern": "a\nb"},
        {"kind": "pattern", "pattern": "a", "expires_us": "soon"},
        {"kind": "pattern", "pattern": "a", "expires_us": -1},
        {"kind": "deny", "text": None},
        {"kind": "happened"},
        {"kind": "happened", "result": None},
        {"kind": "happened", "result": {"error": "no"}},
        {"kind": "happened", "result": {"terminate": True}},
        {"kind": "happened", "result": {"content": [{"type": "text"}]}},
    ],
    ids=str,
)
def test_json_that_is_no_decision_is_refused(value: Any) -> None:
    """Nothing that is missing or odd in a command becomes a yes."""
    with pytest.raises(InvalidArgumentError):
        decode_decision(value)


def test_a_decision_about_another_subject_is_refused() -> None:
    """A call is not decided with what is said about an effect, nor the other way round."""
    for decision in DECISIONS:
        about_call = isinstance(decision, Once | Pattern | Deny)
        check_fits(decision, "call" if about_call else "effect")

        with pytest.raises(InvalidArgumentError, match="decide it with one of"):
            check_fits(decision, "effect" if about_call else "call")


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("git *", "git status", True),
        ("git *", "gitx", False),
        ("git *", "git", False),
        ("git*", "git", True),
        ("*", "anything at all", True),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        (r"a\*c", "a*c", True),
        (r"a\*c", "abc", False),
        (r"a\\", "a\\", True),
        ("*a*b", "xxaxxb", True),
        ("*a*b", "xxaxx", False),
        ("Git *", "git status", False),
        ("", "", True),
    ],
)
def test_a_pattern_matches_the_whole_text(pattern: str, text: str, expected: bool) -> None:
    """A star stands for any characters, a question mark for one, and case counts."""
    assert matches(pattern, text) is expected


@pytest.mark.parametrize(
    "tail",
    [
        "; rm -rf .",
        "&& rm -rf .",
        "|| rm -rf .",
        "| sh",
        "& rm -rf .",
        "`rm -rf .`",
        "$(rm -rf .)",
        "${x@P}",
        "> ~/.bashrc",
        ">> ~/.bashrc",
        "2>/dev/null",
        "< secret",
        "<(rm -rf .)",
        "\nrm -rf .",
        "\rrm -rf .",
        "\x1b[2K",
        "\u2028rm",
        "\u202erm",
        "\x00",
    ],
)
def test_a_text_that_chains_or_hides_commands_matches_no_pattern(tail: str) -> None:
    """No pattern, not even one that names the text, lets a second command by."""
    text = f"git status {tail}"

    assert chains(text)
    assert not matches("*", text)
    assert not matches("git *", text)
    assert not matches(text, text)
    assert matches("git *", "git status")


@given(
    pattern=st.text("ab*?\\", max_size=8),
    text=st.text("ab*?\\", max_size=8),
)
def test_patterns_match_as_a_regular_expression_of_theirs_does(pattern: str, text: str) -> None:
    """The matcher agrees with the obvious translation into a regular expression."""
    parts = []
    place = 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\" and place + 1 < len(pattern):
            place += 1
            parts.append(re.escape(pattern[place]))
        elif character == "*":
            parts.append(".*")
        elif character == "?":
            parts.append(".")
        else:
            parts.append(re.escape(character))
        place += 1

    expected = re.fullmatch("".join(parts), text) is not None

    assert matches(pattern, text) is expected


@pytest.mark.parametrize(
    "pattern", ["*" + "a" * 900 + "b", "*" + "a" * 900 + "b*", "*a" * 450 + "b*"]
)
def test_a_long_text_that_almost_matches_is_told_apart_in_one_go(pattern: str) -> None:
    """A model that repeats itself for a megabyte does not hold up the commit that decides."""
    assert not matches(pattern, "a" * 2**20)
    assert matches(pattern, "a" * 2**20 + "b")
