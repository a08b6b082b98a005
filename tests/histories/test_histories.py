"""Random histories on the product and on the model: the past, the watches, the context."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from history_player import quiet_logs
from history_steps import GOALS, Program, draw_program, shrink
from history_values import difference, patched
from run_histories import run

RUNNER = str(Path(__file__).with_name("run_histories.py"))
SAMPLE = {"rewind": 5, "watches": 4, "context": 4}
"""Histories in the default suite; -m slow plays a thousand of each."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = logging.getLogger("pidurable").level
    quiet_logs()
    yield
    logging.getLogger("pidurable").setLevel(level)


@pytest.mark.parametrize("goal", GOALS)
def test_a_few_histories_agree_with_the_model(goal: str) -> None:
    """A few histories of each goal, one of them on a file, show no difference."""
    report = run(goal, SAMPLE[goal], int(os.environ.get("HISTORIES_SEED", "0")), sqlite_every=4)

    assert report.differences == []
    assert report.histories == SAMPLE[goal]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("goal", GOALS)
def test_a_thousand_histories_agree_with_the_model(
    goal: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,000 histories of each goal show no difference and meet every rare state.

    `HISTORIES` and `HISTORIES_SEED` in the environment say how many, and from which seed on; of
    fewer, as many more are played as it takes to meet every rare state.
    """
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes minutes; run it with -m slow")
    count = int(os.environ.get("HISTORIES", "1000"))
    seed = int(os.environ.get("HISTORIES_SEED", "0"))
    report = run(goal, count, seed, histories_max=1000)
    with capsys.disabled():
        print(f"\n{report.show_rare()}\n{report.line()}")

    assert report.differences == []
    assert report.unseen == []


@pytest.mark.slow
def test_a_seed_plays_the_same_histories_under_any_hash_seed(
    request: pytest.FixtureRequest,
) -> None:
    """Two processes with different hash seeds leave the same trace of the same seeds."""
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes two processes; run it with -m slow")
    traces = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, RUNNER, "--goal", "watches", "--histories", "3", "--seed", "1"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        traces.append([each for each in done.stdout.splitlines() if each.startswith("  trace ")])

    assert len(traces[0]) == 1
    assert traces[0] == traces[1]


@pytest.mark.parametrize("goal", GOALS)
def test_a_seed_draws_one_program(goal: str) -> None:
    """The same seed draws the same program, another one another."""
    assert draw_program(goal, 3, 30) == draw_program(goal, 3, 30)
    assert draw_program(goal, 3, 30) != draw_program(goal, 4, 30)


def test_shrinking_leaves_out_steps_and_actions() -> None:
    """Of thirty steps the two that matter are left, and of a commit the one action."""
    program = draw_program("rewind", 1, 30)
    action = ["retire", 7]
    program.insert(12, ["commit", [["new"], action, ["new"]]])
    last = program[-1]

    def fails(each: Program) -> bool:
        commits = [step[-1] for step in each[:-1] if step[0] == "commit"]
        return any(action in actions for actions in commits) and each[-1] == last

    shrunk = shrink(program, fails)

    assert shrunk[0] == ["commit", [action]]
    assert len(shrunk) == 2


def test_the_patches_of_the_judge_are_those_of_the_rfc() -> None:
    """What applies the patches of frames does what RFC 6902 and the design say."""
    value = {"a": [1, 2], "b": {"c/d": "x", "~": None}}
    ops = [
        {"op": "add", "path": "/a/1", "value": 9},
        {"op": "add", "path": "/a/-", "value": 3},
        {"op": "remove", "path": "/a/0"},
        {"op": "append", "path": "/b/c~1d", "value": "y"},
        {"op": "move", "from": "/b/~0", "path": "/n"},
        {"op": "copy", "from": "/a", "path": "/m"},
        {"op": "test", "path": "/m/0", "value": 9},
        {"op": "replace", "path": "/a", "value": True},
    ]

    assert patched(value, ops) == {"a": True, "b": {"c/d": "xy"}, "n": None, "m": [9, 2, 3]}
    assert patched(value, [{"op": "replace", "path": "", "value": 1}]) == 1
    for bad in (
        {"op": "replace", "path": "/z", "value": 1},
        {"op": "test", "path": "/a", "value": 1},
    ):
        with pytest.raises(AssertionError):
            patched(value, [bad])


@pytest.mark.parametrize(
    ("expected", "found", "told"),
    [
        ({"a": 1}, {"a": 1.0}, "$.a: expected 1, found 1.0"),
        ([1], [True], "$[0]: expected 1, found true"),
        ({"a": [0.0]}, {"a": [-0.0]}, "$.a[0]: expected 0.0, found -0.0"),
        ({"a": None}, {}, "$.a: expected null, found nothing"),
        ([], [1], "$: expected 0 items, found 1"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ""),
    ],
)
def test_a_difference_is_told_as_path_expected_and_found(
    expected: object, found: object, told: str
) -> None:
    """Values are compared type for type, in any order of keys."""
    assert difference(expected, found) == told
