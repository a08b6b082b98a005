"""The demo itself, and that it can fail: its judgement sees what is not as promised."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pidurable.cli import _demo_project as project
from pidurable.records._entries import Entry
from pidurable.records._messages import (
    AssistantMessage,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)


def answer(id: int, *, calls: int = 0, status: str = "complete") -> Entry:
    blocks = (
        TextBlock(text="t"),
        *(ToolCallBlock(name="bash", arguments={}) for _ in range(calls)),
    )
    message = AssistantMessage(
        blocks=blocks,
        status=status,  # type: ignore[arg-type]
        stop_reason="stop",
        model="m",
        usage=Usage(),
        at_us=0,
    )
    return Entry(id=id, conversation_id=1, seq=id, kind="pi.assistant", messages=(message,))


def result(id: int, call: tuple[int, int]) -> Entry:
    message = ToolResultMessage(
        call=call, name="bash", blocks=(TextBlock(text="r"),), is_error=False, at_us=0
    )
    return Entry(id=id, conversation_id=1, seq=id, kind="pi.tool_result", messages=(message,))


def user(id: int) -> Entry:
    message = UserMessage(blocks=(TextBlock(text="u"),), at_us=0)
    return Entry(id=id, conversation_id=1, seq=id, kind="pi.user", messages=(message,))


# C001, C003
@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([user(1), answer(2, calls=1), result(3, (2, 0)), answer(4)], None),
        ([user(1), answer(2, status="aborted"), answer(4)], None),
        ([user(1), answer(2, calls=2), result(3, (2, 0)), answer(4)], "call 1 of entry 2 has 0"),
        (
            [user(1), answer(2, calls=1), result(3, (2, 0)), result(5, (2, 0)), answer(6)],
            "call 0 of entry 2 has 2",
        ),
        ([user(1), result(3, (2, 0)), answer(4)], "entry 3 is the result of a call that is not"),
        ([user(1), answer(2, calls=1), result(3, (2, 0))], "does not end with an answer"),
        ([user(1), answer(2, status="aborted")], "does not end with an answer"),
        ([], "does not end with an answer"),
    ],
)
def test_a_transcript_with_a_gap_is_seen(entries: list[Entry], problem: str | None) -> None:
    """Only a transcript in which every call has one result and an answer ends it is valid."""
    found = project.transcript_problem(entries)

    assert found is None if problem is None else problem in (found or "")


def test_the_scratch_project_fails_until_its_bug_is_fixed(tmp_path: Path) -> None:
    """The test of the project fails with the bug and passes with the script's own correction."""
    project.make_project(tmp_path)
    quick = (tmp_path / "test_prices.py").read_text().replace("time.sleep(0.7)", "pass")
    (tmp_path / "test_prices.py").write_text(quick)

    before = project.tests_pass(tmp_path)
    code = (tmp_path / "prices.py").read_text()
    right = code.replace("cents - percent", "cents - (cents * percent + 50) // 100")
    (tmp_path / "prices.py").write_text(right)
    after = project.tests_pass(tmp_path)

    assert (before, after) == (False, True)


def test_a_process_in_the_project_is_found(tmp_path: Path) -> None:
    """A process that works in the folder counts as left behind, one elsewhere does not."""
    if not Path("/proc").is_dir():
        pytest.skip("there is no /proc here")
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as process:
        found = project.leftover_processes(tmp_path)
        process.kill()

    assert found == [process.pid]
    assert project.leftover_processes(tmp_path) == []


def test_a_demo_whose_worker_fails_says_so_and_exits_with_1(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When something is not as promised the last line says what, and the exit code is 1."""
    good = project.FILES["prices.py"].replace("cents - percent", "cents - cents * percent // 100")
    quick = project.FILES["test_prices.py"].replace("time.sleep(0.7)", "pass")
    monkeypatch.setitem(project.FILES, "prices.py", good)
    monkeypatch.setitem(project.FILES, "test_prices.py", quick)

    found = command("demo", "--dir", "scratch")

    assert found.code == 1
    last = found.out.splitlines()[-1]
    assert last == ("demo: FAILED: the test of the scratch project passes before anything was done")
    assert (tmp_path / "scratch" / "prices.py").exists()


def test_the_demo_leaves_a_folder_that_exists_alone(command, tmp_path: Path) -> None:
    """`--dir` never works in a folder that is there already."""
    (tmp_path / "mine").mkdir()

    found = command("demo", "--dir", "mine")

    assert (found.code, found.out) == (2, "")
    assert "exists already" in found.err


@pytest.mark.slow
def test_the_demo_survives_three_kills(command, tmp_path: Path) -> None:
    """The demo kills its worker three times, finishes, judges itself, and leaves nothing."""
    found = command("demo")

    lines = found.out.splitlines()
    assert lines[-1] == "demo: ok", found.out
    assert found.code == 0
    assert [line for line in lines if "SIGKILL" in line and "kill" in line][2:]
    assert "Whether its effect happened is unknown" in found.out
