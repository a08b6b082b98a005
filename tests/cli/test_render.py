"""Cleaning: whatever a model, a tool or a file wrote, a terminal shows it and does not obey."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pidurable.cli._conversations import entry_lines
from pidurable.cli._render import (
    clean,
    clean_line,
    columns,
    compact_json,
    duration,
    moment,
    tail,
    wrapped,
    wrapped_tail,
)
from pidurable.cli._tasks import wait_text
from pidurable.records._entries import Entry
from pidurable.records._tasks import Wait

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
PIECES = st.sampled_from(
    [
        "\x1b",
        "\x1b[",
        "\x1b]",
        "\x9b",
        "\x9d",
        "\x07",
        "\x1b\\",
        "\r",
        "\n",
        "\t",
        "2J",
        "31m",
        "52;c;",
        "\x00",
        "\u202e",
        "\ud800",
        "\x1bP",
        "a",
        "é",
        "中",
        "👍",
    ]
)


# C063
@given(st.lists(PIECES | st.text(max_size=4), max_size=30).map("".join))
def test_no_text_keeps_anything_that_a_terminal_obeys(text: str) -> None:
    """Cleaned text has no control, bidirectional or unpaired character but line break and tab."""
    assert CONTROLS.search(clean(text)) is None
    assert "\n" not in clean_line(text)


HANGUL_FILLERS = "\u115f\u1160"
"""Letters by category, but nothing can be seen of them."""


@given(
    st.text(
        st.characters(categories=["L", "N", "P", "S", "Zs"], exclude_characters=HANGUL_FILLERS),
        max_size=50,
    )
)
def test_harmless_text_passes_unchanged(text: str) -> None:
    """Letters, digits, signs and blanks of all scripts are shown as they are."""
    assert clean(text) == text


# C063, C081, C082
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("good\x1b[2K\rbad", "good\nbad"),
        ("a\x1b[1Ab", "ab"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]52;c;cm0gLXJm\x1b\\x", "x"),
        ("\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\", "here"),
        ("\x1b]0;never ended\nnext", "\nnext"),
        ("\x9b31mred", "red"),
        ("\x1bPdevice\x1b\\x", "x"),
        ("\x1b\x1b[2J[2Jx", "\u241b[2Jx"),
        ("\x1bcx", "x"),
        ("nul\x00mid", "nul\u2400mid"),
        ("bell\x07", "bell\u2407"),
        ("del\x7f", "del\u2421"),
        ("\u202eexe.gnp", "<U+202E>exe.gnp"),
        ("zero\u200bwidth", "zero<U+200B>width"),
        ("tag\U000e0041", "tag<U+E0041>"),
        ("half \ud83d", "half \ufffd"),
        ("crlf\r\nend", "crlf\nend"),
        ("tab\tstays", "tab\tstays"),
    ],
)
def test_each_kind_of_control_is_removed_or_shown(text: str, shown: str) -> None:
    """Sequences go; single controls become visible; nothing else changes."""
    assert clean(text) == shown


def test_a_cut_line_says_how_much_is_missing() -> None:
    """A line is never cut in silence."""
    assert clean_line("x" * 50, chars_max=10) == "xxxxxxxxx…[41 more]"
    assert clean_line("x" * 10, chars_max=10) == "x" * 10


# C063
def test_a_hundred_kilobytes_of_line_breaks_stay_one_bounded_line() -> None:
    """Arguments full of line breaks take one line, which says what was cut."""
    shown = compact_json({"command": "\n" * 100_000 + "rm"})

    assert "\n" not in shown
    assert len(shown) < 2_100
    assert "more]" in shown


def test_arguments_show_their_control_characters_as_escapes() -> None:
    """In JSON a control character stays visible as what it is."""
    assert compact_json({"a": "\x1b[31m\u202e"}) == '{"a": "\\u001b[31m\\u202e"}'


# C063
def test_arguments_hide_nothing_between_control_characters() -> None:
    """What a terminal would take for a title is text in arguments, and a decision covers it."""
    hidden = "ls \x9d; rm -rf ~\x9c \u2066x\u2069 \u200d \U000e0041 \ud83d\u3164"
    shown = compact_json({"command": hidden})

    assert shown == (
        '{"command": "ls \\u009d; rm -rf ~\\u009c \\u2066x\\u2069 \\u200d '
        '\\U000e0041 \\ud83d\\u3164"}'
    )


def test_the_tail_of_an_output_is_its_last_lines() -> None:
    """Of a long output the end is shown, cleaned."""
    assert tail("one\ntwo\nthree\x1b[2J\n", lines=2) == ["two", "three"]
    assert tail("x" * 1_000_000, lines=1, chars_max=5)[0].startswith("xxxx…")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0s"),
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (3599.4, "59m59s"),
        (3600, "1h00m"),
        (86_399, "23h59m"),
        (90_000, "1d01h"),
    ],
)
def test_a_duration_reads_as_people_say_it(seconds: float, text: str) -> None:
    """Durations carry two units at most and never round to sixty."""
    assert duration(seconds) == text


def test_a_moment_no_calendar_has_is_shown_as_its_number() -> None:
    """A stored moment far outside of the calendar breaks no screen."""
    assert moment(2**62) == f"{2**62} us"
    assert moment(None) == "-"


def test_columns_align_wide_characters() -> None:
    """A wide character counts as two cells, so that the next column stays in line."""
    lines = columns(("A", "B"), [("中", "x"), ("long", "y")])

    def cells(text: str) -> int:
        return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)

    assert cells(lines[1][: lines[1].index("x")]) == lines[2].index("y") == 6


CELLS = ["-", "", "12", "1,234", "pi.generation", "中文" * 9]


@given(
    st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.tuples(*[st.sampled_from(CELLS)] * width),
            min_size=1,
            max_size=4,
        )
    ),
    st.integers(1, 70),
)
def test_no_row_is_wider_than_the_terminal(rows: list[tuple[str, ...]], cells: int) -> None:
    """A table for a terminal takes its width at most, and is whole where it fits."""
    header = ["NAME"] * len(rows[0])
    lines = columns(header, rows, cells=cells)

    whole = columns(header, rows)
    assert len(lines) == len(whole) == len(rows) + 1
    assert max(map(_cells, lines)) <= cells
    if max(map(_cells, whole)) <= cells:
        assert lines == whole


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def test_a_narrow_table_loses_empty_columns_and_ends_of_texts_but_no_number() -> None:
    """Where a terminal is narrow, ids and numbers stay whole, and each cut is marked."""
    header = ("ID", "OWNER", "STATE", "TOKENS", "MODEL", "ABOUT")
    rows = [
        ("123456", "-", "running, turn 3", "1,234,567", "openai/gpt-5-mini", "mend the tests"),
        ("7", "-", "idle", "-", "-", "say what is in this folder, and why"),
    ]

    assert columns(header, rows, cells=60) == [
        "ID      STATE            TOKENS     MODEL            ABOUT",
        "123456  running, turn 3  1,234,567  openai/gpt-5-m…  mend t…",
        "7       idle             -          -                say wh…",
    ]


@given(
    st.lists(st.sampled_from(["word", " ", "  ", "\n", "中文", "a-word-that-is-too-long"])).map(
        "".join
    ),
    st.integers(2, 30),
    st.integers(1, 5),
)
def test_the_end_of_a_text_that_grows_fits_the_terminal(text: str, cells: int, lines: int) -> None:
    """It is broken at the width, and no character but blanks goes missing from its end."""
    shown = wrapped_tail(text, lines=lines, cells=cells)

    assert len(shown) <= lines
    assert all(_cells(line) <= cells for line in shown)
    said = "".join("".join(shown).split())
    assert "".join(text.split()).endswith(said)
    assert said or not text.strip()


def test_a_text_that_grows_is_broken_between_its_words() -> None:
    """A line ends where a word does, unless the word is wider than the terminal."""
    text = "first\n  a paragraph that goes on and on, as models write them"

    assert wrapped_tail(text, lines=3, cells=20) == [
        "  a paragraph that",
        "goes on and on, as",
        "models write them",
    ]


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (Wait(on=(1, 2)), "all_settled of tasks 1, 2"),
        (Wait(on=(), signals=True), "all_settled of tasks none, signals"),
        (
            Wait(on=(1, 2, 3), conversations=(2,), others=(3,)),
            "all_settled of tasks 1, conversations 2, submissions 3",
        ),
        (Wait(on=(3,), others=(3,)), "all_settled of submissions 3"),
        (Wait(), "nothing"),
    ],
)
def test_a_wait_is_shown_by_the_kinds_of_what_it_is_for(wait: Wait, text: str) -> None:
    """Tasks, conversations and submissions are told apart."""
    assert wait_text(wait) == text


def test_a_nested_result_is_a_line_and_no_json() -> None:
    """The log says whose result it is, what went wrong, and which tasks were at it."""

    def shown(**data: Any) -> list[str]:
        return entry_lines(
            Entry(
                id=7,
                conversation_id=1,
                seq=3,
                kind="pi.nested_result",
                data={"task": 12, "caller": 9, "name": "grep", "is_error": False, **data},
            )
        )

    (well,) = shown(code=None)
    (ill,) = shown(is_error=True, code="denied")
    (hostile,) = shown(name="a\x1b[31m\nb")

    assert well.endswith("  result of grep  (nested: task 12, called by task 9)")
    assert ill.endswith("called by task 9)  error: denied")
    assert "\x1b" not in hostile
    assert "\n" not in hostile


@given(st.text(alphabet="ab `.1世", max_size=90), st.integers(min_value=24, max_value=50))
def test_a_broken_line_has_all_of_it_in_its_place(line: str, cells: int) -> None:
    """Only spaces between words go; what is still too wide is one word, or one command."""
    parts = wrapped(line, cells)

    assert "".join("".join(parts).split()) == "".join(line.split())
    for part in parts:
        one = re.sub("`[^`]*`", "", part.strip())
        assert _cells(part) <= cells or " " not in one
    assert all(part.startswith(" ") for part in parts) or not line.startswith(" ")


def test_prose_is_broken_between_words_and_no_command_is() -> None:
    """What follows stands below its beginning; `$` and backticks keep what can be copied whole."""
    command = "`pidurable resume --store 'a folder/session.sqlite'`"

    assert wrapped(f"  next: go on with {command} at once, please", 30) == [
        "  next: go on with",
        f"  {command}",
        "  at once, please",
    ]
    assert wrapped("  1. it is one thing, and then another", 26) == [
        "  1. it is one thing, and",
        "     then another",
    ]
    assert wrapped(f"   $ {command}", 30) == [f"   $ {command}"]
    assert wrapped("a lone ` in a line of 33 columns.", 30) == [
        "a lone ` in a line of 33",
        "columns.",
    ]
