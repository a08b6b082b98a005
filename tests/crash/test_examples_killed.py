"""The examples, killed with SIGKILL before and after every one of their commits.

`killed_runs.py` does the killing; what it saw is judged here, and the judge is tested too: each
thing that it looks for is planted once, and must be found.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "killed_runs.py"
RUNS = ("01_payment", "leave", "02_checkout")

Report = dict[str, Any]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    """What was seen of each run: the undisturbed one first."""
    seen: dict[str, list[Report]] = {}
    for name in RUNS:
        folder = tmp_path_factory.mktemp(name)
        done = subprocess.run(
            [sys.executable, str(PROGRAM), name, str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        seen[name] = [json.loads(line) for line in done.stdout.splitlines()]
    return seen


def figures(seen: dict[str, list[Report]]) -> str:
    """One line about all runs: what was lost, half done, done twice, and how many ended right."""
    kills = lost = equal = halves = runs = 0
    charges: list[int] = []
    for first, *killed in seen.values():
        wanted = first["undisturbed"]["end"]
        for report in killed:
            runs += 1
            kills += report["kills"]
            before, after = report["killed"], report["resumed"]
            # What was durable is there, and nothing of the batch that the kill came before.
            lost += before["seq"] != before["durable"]
            # The intent is stored before the effect: no charge without its task.
            lost += len(before["strangers"]) + len(after["strangers"])
            halves += len(before["halves"]) + len(after["halves"])
            charges += Counter(after["keys"]).values()
            equal += after["end"] == wanted
    most = max(charges)
    return (
        f"kills={kills} runs={runs} lost={lost} halves={halves} "
        f"charges_per_key_max={most} outcomes_equal={equal}"
    )


@pytest.mark.slow
def test_a_kill_at_any_commit_changes_nothing_about_the_end(
    reports: dict[str, list[Report]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed around each commit and resumed, the examples end as if nothing had happened."""
    line = figures(reports)

    with capsys.disabled():
        print(f"\nexamples killed: {line}")
    runs = sum(len(seen) - 1 for seen in reports.values())
    kills = sum(report["kills"] for seen in reports.values() for report in seen[1:])
    assert line == (
        f"kills={kills} runs={runs} lost=0 halves=0 charges_per_key_max=1 outcomes_equal={runs}"
    )
    assert kills >= 60


@pytest.mark.slow
def test_every_commit_of_the_examples_is_killed_at(reports: dict[str, list[Report]]) -> None:
    """Each number from 1 to the last commit of a run occurs at both points, without a gap."""
    for name, (first, *killed) in reports.items():
        for point in ("commit.before", "commit.after"):
            numbers = [report["number"] for report in killed if report["point"] == point]
            assert numbers == list(range(1, len(numbers) + 1)), name
            # Several commits may share one batch, which is stored as a whole.
            assert len(numbers) >= first["undisturbed"]["seq"] // 2, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda report: report["killed"].update(seq=report["killed"]["seq"] - 1), "lost=1"),
        (lambda report: report["resumed"]["strangers"].append("u:9:charge"), "lost=1"),
        (lambda report: report["killed"]["halves"].append("two refunds of one"), "halves=1"),
        (lambda report: report["resumed"]["keys"].append("k") or _twice(report), "key_max=2"),
        (lambda report: report["resumed"]["end"]["books"].pop(), "outcomes_equal=RUNS-1"),
    ],
)
def test_the_judge_finds_what_is_planted(
    reports: dict[str, list[Report]], plant: Any, found: str
) -> None:
    """A lost commit, a half one, a second charge and another end are each counted."""
    seen = copy.deepcopy(reports)
    runs = sum(len(each) - 1 for each in seen.values())
    plant(seen["02_checkout"][-1])

    assert found.replace("RUNS-1", str(runs - 1)) in figures(seen)


def _twice(report: Report) -> None:
    report["resumed"]["keys"].append("k")
