"""bash: output, remarks, limits; and the text that output becomes."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, strategies as st

from pidurable.extensions.coding import bash
from pidurable.extensions.coding._text import OutputText, mark_controls


async def test_output_comes_back_with_the_exit_code(call: Any) -> None:
    """Success is the output alone; a failure is an error result that names the code."""
    assert await call.run(bash, command="echo a; echo b >&2") == (False, "a\nb\n")
    assert await call.run(bash, command="printf a; exit 3") == (True, "a\n[exit code 3]\n")
    assert call.shown == {"exit_code": 3, "timed_out": False, "leftover": 0, "survivors": []}


async def test_a_signal_and_the_time_limit_are_named(
    call: Any, mock_clock: trio.testing.MockClock
) -> None:
    """What ended a command is said in words, after the output so far."""
    mock_clock.rate = 1.0
    assert await call.run(bash, command="kill -9 $$") == (True, "[ended by signal 9]\n")
    found = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def run() -> None:
            found.append(await call.run(bash, command="echo a; sleep 300", timeout=600.5))

        while call.text != "a\n":  # noqa: ASYNC110 - call.output sets no event
            await trio.sleep(0.001)
        mock_clock.jump(600.5)
    assert found == [(True, "a\n[ended after its time limit of 600.5 s]\n")]


async def test_a_background_process_is_reported(call: Any) -> None:
    """The call returns with the shell; what it left behind is ended and counted."""  # C047
    assert await call.run(bash, command="sleep 300 & echo done") == (
        False,
        "done\n[1 background process ended]\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": "true", "timeout": 0}, "timeout must be above 0"),
        ({"command": "true", "timeout": 3601}, "at most 3600 seconds, got 3601"),
        ({"command": "true", "timeout": float("nan")}, "got nan"),
        ({"command": "echo \0"}, "could not be started: command: holds a NUL"),
        ({"command": "echo \ud800"}, "could not be started: command: holds a lone surrogate"),
        ({"command": "x" * 200_000}, "could not be started: [Errno 7]"),
    ],
)
async def test_what_cannot_be_started_is_an_answer(
    call: Any, arguments: dict[str, Any], message: str
) -> None:
    """A command that cannot be passed on, or a limit out of bounds, is an error result."""
    error, text = await call.run(bash, **arguments)

    assert error
    assert message in text


async def test_output_is_shown_while_the_command_runs(call: Any) -> None:
    """What a command wrote is there before it ends."""
    seen = trio.Event()

    async def output(text: str) -> None:
        if "first" in text:
            seen.set()

    call.output = output
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bash.invoke, {"command": "echo first; sleep 60"}, call)
        await seen.wait()
        nursery.cancel_scope.cancel()


async def test_a_flood_is_passed_on_in_bounded_memory(call: Any) -> None:
    """One line of 10 MB goes through in pieces; none is held longer than its turn."""  # C087
    tracemalloc.start()
    try:
        error, text = await call.run(bash, command="head -c 10000000 /dev/zero | tr '\\0' x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert not error
    assert call.length == 10_000_000
    assert set(text) == {"x"}
    assert peak < 4_000_000


async def test_permission_patterns_match_the_command() -> None:
    """What a person allows or denies is the text of the command."""
    assert bash.permission_for({"command": "rm -rf /"}) == "rm -rf /"


# --- text -------------------------------------------------------------------------------------


def whole(data: bytes) -> str:
    """Convert in one piece."""
    return OutputText().feed(data, final=True)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\0b", "a\u2400b"),  # C081
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("\U0001f600".encode(), "\U0001f600"),
        (b"\xf0\x9f", "\ufffd"),
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1bPpayload\x1b\\x", "x"),
        (b"\x1b(Bx\x1bcy", "xy"),
        (b"\x1b[", "\u241b["),
        (b"a\r\nb\rc\r\n", "a\nb\rc\n"),
        (b"\x7f\x08", "\u2421\u2408"),
    ],
)
def test_output_becomes_text_that_does_not_act(data: bytes, text: str) -> None:
    """Terminal sequences go, control characters are marked, broken UTF-8 is replaced."""
    assert whole(data) == text


PIECES = st.lists(
    st.sampled_from(
        [
            *(b"a", b"\n", b"\r", b"\r\n", b"\0", b"\xff", "é\U0001f600".encode()),
            *(b"\x1b[1m", b"\x1b]0;t\x07", b"\x1b]8;;u\x1b\\", b"\x1b(B", b"\x1b"),
            *(b"[", b"]", b"\\", b"m"),
        ]
    )
)


@given(PIECES, st.lists(st.integers(0, 40)))
def test_borders_between_chunks_do_not_show(pieces: list[bytes], cuts: list[int]) -> None:
    """However the bytes are cut, the text is the same: characters and sequences are joined."""
    # C082
    data = b"".join(pieces)
    borders = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    text = OutputText()

    parts = [text.feed(data[a:b]) for a, b in itertools.pairwise(borders)]
    parts.append(text.feed(b"", final=True))

    assert "".join(parts) == whole(data)


def test_an_endless_sequence_is_not_held_for_ever() -> None:
    """A sequence that never ends is shown after 4 KiB, instead of hiding all that follows."""
    text = OutputText()
    shown = text.feed(b"\x1b]0;" + b"x" * 3000) + text.feed(b"x" * 3000)

    assert shown == "\u241b]0;" + "x" * 6000


@given(st.text())
def test_marking_leaves_no_control_character(value: str) -> None:
    """Nothing below a blank is left but tab and line ends."""
    marked = mark_controls(value)

    assert not [char for char in marked if ord(char) < 32 and char not in "\t\n\r"]
    assert len(marked) == len(value)
