"""`pidurable run` on a clone of this repository, killed with SIGKILL at CP1 to CP5 and CP7.

`clone_runs.py` does the killing, `clone_model.yaml` is the model: it reads and edits a module,
writes a test, runs it, and puts two notes outside that may not go out twice. What was seen is
judged here, and the judge is tested too.
"""

# C001, C005, C008: killed at each point, every call has one result, and no request is refused.
# C009: resumed once, to the end, with the reason in the plan.

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("clone_runs.py")
POINTS = ("CP1", "CP2", "CP3", "CP4", "CP5", "CP7")
SHORT_POINTS = {"CP3", "CP7"}

Report = dict[str, Any]


def run_sweep(checkout: Path, folder: Path, kind: str) -> list[Report]:
    """What was seen: the undisturbed run first, then one run a kill."""
    if shutil.which("git") is None:
        pytest.skip("there is no git to clone the checkout with")
    if not (checkout / ".git").exists():
        pytest.skip("this is no git checkout; an unpacked archive cannot be cloned")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), kind],
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def figures(reports: list[Report]) -> str:
    """One line about all runs: whether they ended the same, and what must never happen."""
    first, *killed = reports
    same = [
        report
        for report in killed
        if report["result"] == first["result"]
        and sorted(report["ledger"]) == sorted(first["ledger"])
        and not report["problems"]
        and not report["leftover"]
    ]
    notes = max(max(Counter(report["ledger"]).values(), default=0) for report in reports)
    refused = sum(line is not None for report in reports for line in report["requests"])
    kills = sum(report["codes"].count(-9) for report in killed)
    return f"kills={kills} same={len(same)} ledger_max={notes} refused_requests={refused}"


def wanted(reports: list[Report]) -> str:
    kills = sum(1 + report["kill"]["again"] for report in reports[1:])
    return f"kills={kills} same={len(reports) - 1} ledger_max=1 refused_requests=0"


def show(reports: list[Report], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\npidurable run killed: runs={len(reports) - 1} {figures(reports)}")


@pytest.fixture(scope="module")
def reports(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    return run_sweep(checkout, tmp_path_factory.mktemp("killed"), "short")


def test_the_undisturbed_run_edits_tests_and_notes_once(reports: list[Report]) -> None:
    """The run to compare with did real work: another module, a new test, two notes."""
    first = reports[0]

    assert first["codes"] == [0]
    assert first["problems"] == []
    assert first["ledger"] == ["first", "second"]
    assert "tests/records/test_is_id.py" in first["result"]["files"]
    assert first["result"]["answer"][0].startswith("Ids can be told apart, ten tests say so")
    assert all(first["passes"][point] >= 1 for point in POINTS)


def test_a_run_killed_in_the_middle_ends_as_if_nothing_had_happened(
    reports: list[Report], capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before an outcome or in mid-answer, a run has the same files and single notes."""
    show(reports, capsys)

    assert figures(reports) == wanted(reports)
    assert {report["kill"]["point"] for report in reports[1:]} == SHORT_POINTS


@pytest.mark.timeout(600)
def test_a_run_killed_at_any_pass_ends_as_if_nothing_had_happened(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So it is at every pass of every point, and where the resumed process is killed as well."""
    reports = run_sweep(checkout, tmp_path, "full")
    show(reports, capsys)

    assert figures(reports) == wanted(reports)
    # An answer of which a part was committed is kept as cut, and is in no later request.
    assert any(report["cut"] for report in reports)
    for point in POINTS:
        numbers = [
            report["kill"]["nth"]
            for report in reports[1:]
            if report["kill"]["point"] == point and not report["kill"]["again"]
        ]
        assert sorted(numbers) == list(range(1, reports[0]["passes"][point] + 1))


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda report: report["ledger"].append("second"), "same=LESS ledger_max=2"),
        (lambda report: report["ledger"].remove("first"), "same=LESS ledger_max=1"),
        (lambda report: report["requests"].append("refused: blank"), "refused_requests=1"),
        (lambda report: report["problems"].append("two results"), "same=LESS"),
        (lambda report: report["leftover"].append(7), "same=LESS"),
        (lambda report: report["result"]["files"].popitem(), "same=LESS"),
        (lambda report: report["codes"].remove(-9), "kills=LESS"),
    ],
)
def test_the_judge_of_killed_runs_finds_what_is_planted(
    reports: list[Report], plant: Callable[[Report], object], found: str
) -> None:
    """A second note, a lost one, a refused request, another file and a process left all count."""
    seen = copy.deepcopy(reports)
    plant(seen[-1])

    assert found.replace("LESS", str(len(reports) - 2)) in figures(seen)
