"""Leaving: Ctrl-C once and twice on a real terminal, signals, and a terminal that goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terminals import SECONDS_MAX, python_path, terminal

from pidurable.cli._demo_project import leftover_processes

# With `-m slow` each command is a Python of its own; see `terminals.Warm`.
pytestmark = pytest.mark.slow

WAITS_FOR_GO = (
    # What is waited for stands in the output alone, not in the arguments.
    '- calls: [{name: bash, arguments: {command: "echo st$(echo arted); '
    'while [ ! -e go ]; do sleep 0.02; done; echo finished"}}]\n'
    "- {text: all done}\n"
)
GUARD = '''
from pidurable import Ask, Extension, ToolTask, hook


async def guard(call):
    """A person has to allow the echo."""
    return Ask("high", "it talks") if call.arguments == {"command": "echo hi"} else None


extension = Extension("guard", hooks=[hook(ToolTask, before_tool=guard)])
'''
STREAMS = (
    "log: requests\n"
    "steps:\n"
    '- {text: "This answer is a long one indeed", piece_chars: 4, stall: {after: 5}, times: 1}\n'
)


def test_the_first_ctrl_c_lets_a_running_call_end(command, tmp_path: Path) -> None:
    """After one Ctrl-C the running call gives its result, nothing new begins; resume ends it."""
    (tmp_path / "m.yaml").write_text(WAITS_FOR_GO)
    with terminal(tmp_path, "run", "x", "--script", "m.yaml") as shown:
        shown.until("started")
        live = shown.text()
        shown.press(b"\x03")
        shown.until("stopping: running calls get 10 s")
        (tmp_path / "go").touch()
        code = shown.wait()

        assert code == 130
        assert "run 4, turn 1" in live
        assert "bash done" in shown.text()
        assert "all done" not in shown.text()
        assert "`pidurable resume` goes on" in shown.text()
        assert not shown.screen.cursor.hidden
    resumed = command("resume")

    assert (resumed.code, resumed.out) == (0, "all done\n")
    assert "interrupt " not in resumed.err


def test_ctrl_c_at_a_question_is_told_at_once(command, tmp_path: Path) -> None:
    """Who leaves at a question hears so while a call still runs; it stays open and is not asked."""
    (tmp_path / "m.yaml").write_text(
        WAITS_FOR_GO.replace("}}]", "}}, {name: bash, arguments: {command: echo hi}}]").replace(
            "echo st$(echo arted)", "touch begun"
        )
    )
    (tmp_path / "guard.py").write_text(GUARD)
    with terminal(tmp_path, "run", "x", "--script", "m.yaml", "--extension", "guard.py") as shown:
        shown.until("y: yes, this once")
        shown.read_until((tmp_path / "begun").exists)
        shown.press(b"\x03")
        shown.until("stopping: running calls get 10 s")
        (tmp_path / "go").touch()
        code = shown.wait()
        lines = shown.text().splitlines()

    assert code == 130
    assert [line for line in lines if line.startswith("stopping:")]  # not behind the question
    assert "is stopped in the middle" not in "\n".join(lines)
    assert len(command("approval", "list", "-o", "ids").out.split()) == 1


# C007, C052
def test_the_second_ctrl_c_leaves_at_once_and_ends_the_commands(command, tmp_path: Path) -> None:
    """Twice Ctrl-C is 130 at once; the command is ended, its call closed as interrupted later."""
    (tmp_path / "m.yaml").write_text(WAITS_FOR_GO)
    with terminal(tmp_path, "run", "x", "--script", "m.yaml") as shown:
        shown.until("started")
        shown.press(b"\x03")
        shown.until("stopping:")
        shown.press(b"\x03")

        assert shown.wait() == 130
        assert "left at once; `pidurable resume` goes on" in shown.text()
        assert not shown.screen.cursor.hidden
    deadline = time.monotonic() + SECONDS_MAX
    while leftover_processes(tmp_path) and time.monotonic() < deadline:
        pass
    assert leftover_processes(tmp_path) == []
    plan = command("resume", "--plan")
    resumed = command("resume")

    assert "interrupt task 9: bash" in plan.out
    assert (resumed.code, resumed.out) == (0, "all done\n")
    assert "bash error (interrupted)" in resumed.err


def test_ctrl_c_cuts_the_stream_and_keeps_what_was_said(command, tmp_path: Path) -> None:
    """A streaming answer is cut at once; the part that was shown stays in the transcript."""
    (tmp_path / "m.yaml").write_text(STREAMS)
    with terminal(tmp_path, "run", "x", "--script", "m.yaml") as shown:
        shown.until("This answer is a lon")
        shown.press(b"\x03")

        assert shown.wait() == 130
    resumed = command("resume")
    log = command("conversation", "log")

    assert (resumed.code, resumed.out) == (0, "This answer is a long one indeed\n")
    assert "aborted" in log.out


# C048
def test_a_closed_terminal_ends_the_run_and_leaves_it_resumable(command, tmp_path: Path) -> None:
    """When the terminal goes away the process drains and ends; the store is clean."""
    (tmp_path / "m.yaml").write_text(STREAMS)
    with terminal(tmp_path, "run", "x", "--script", "m.yaml") as shown:
        shown.until("This answer is a lon")
        shown.hang_up()

        assert shown.process.wait(SECONDS_MAX) == 130
    resumed = command("resume")

    assert (resumed.code, resumed.out) == (0, "This answer is a long one indeed\n")


# C007, C048, C052
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_clean_up_that_takes_for_ever_is_left_by_the_second_signal(
    command, tmp_path: Path, number: signal.Signals
) -> None:
    """A tool that swallows its cancellation cannot keep the process; the store opens cleanly."""
    (tmp_path / "deaf.py").write_text(DEAF)
    (tmp_path / "m.yaml").write_text("- calls: [{name: deaf, arguments: {}}]\n- all done\n")
    environ = {**os.environ, "PYTHONPATH": python_path()}
    argv = [sys.executable, "-m", "pidurable.cli", "run", "x", "--script", "m.yaml"]
    with subprocess.Popen(
        [*argv, "-e", "./deaf.py"],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        _until(process.stderr, "task 9: deaf")
        process.send_signal(number)
        _until(process.stderr, "stopping:")
        process.send_signal(number)

        assert process.wait(SECONDS_MAX) == 130
    resumed = command("resume")

    assert (resumed.code, resumed.out) == (0, "all done\n")


def test_a_second_signal_on_the_way_out_leaves_with_130_too(tmp_path: Path) -> None:
    """After the first signal no later one finds Python's own handler, and no traceback shows."""
    (tmp_path / "late.py").write_text(
        "import os, signal, trio\n"
        "from pidurable.cli._signals import catch_interrupts\n"
        "async def main():\n"
        "    with catch_interrupts('pidurable resume') as interrupts:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        await interrupts.wait()\n"
        "trio.run(main)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    found = subprocess.run(
        [sys.executable, "late.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )

    assert (found.returncode, "Traceback" in found.stderr) == (130, False)
    assert "left at once" in found.stderr


DEAF = '''
import time
import trio
from pidurable import Extension, ToolCall, tool

@tool
async def deaf(call: ToolCall) -> str:
    """Listen to nobody."""
    try:
        await call.run_blocking(time.sleep, 30)
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(30)
    return "never"

extension = Extension("deaf", tools=[deaf])
'''


def _until(stream: object, text: str) -> None:
    for line in stream:  # type: ignore[attr-defined]
        if text in line:
            return
    raise AssertionError(f"{text!r} was not said")
