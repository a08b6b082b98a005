"""Drawn programs on the product and on the model: every commit allowed, at rest nothing missing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from player import first_difference, quiet_logs, replay_command
from programs import Program, draw_program, programs, shrink
from run_programs import run, show_rare

RUNNER = Path(__file__).with_name("run_programs.py")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = logging.getLogger("pidurable").level
    quiet_logs()
    yield
    logging.getLogger("pidurable").setLevel(level)


def test_the_programs_of_fifteen_seeds_agree_with_the_model() -> None:
    """Fifteen programs of seventy steps show no difference."""
    report = run(15, int(os.environ.get("PROGRAMS_SEED", "0")))

    assert report.differences == []
    assert report.programs == 15


@settings(
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(program=programs(0, 25), seed=st.integers(0, 2**16))
def test_any_short_program_agrees_with_the_model(program: Program, seed: int) -> None:
    """Whatever Hypothesis puts together, under any schedule, shows no difference."""
    found = first_difference(program, seed)

    assert not isinstance(found, str), f"{found}\nreplay: {replay_command(seed, program)}"


@pytest.mark.slow
def test_a_seed_plays_the_same_program_under_any_hash_seed(slow_run: bool) -> None:
    """Two processes with different hash seeds leave the same trace of the same seeds."""
    if not slow_run:
        pytest.skip("takes two processes; run it with -m slow")
    lines = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, str(RUNNER), "--programs", "2", "--seed", "3"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        lines.append([each for each in done.stdout.splitlines() if each.startswith("  trace ")])

    assert len(lines[0]) == 1
    assert lines[0] == lines[1]


def test_new_work_below_a_new_conversation_sees_an_intent_above_both() -> None:
    """A task whose owner's owner has failed, and which makes a conversation with work, starts none.

    Conversation and work were new in the commit, so a look at what is published ended at them.
    """
    program: Program = [
        ["crash", 0, 5, 7],
        ["create", 3, 30, 1, 6, 7, 4, 6],
        ["create", 2, 17, 1, 2, 2, 7, 4],
        ["abort", 39, 3],
        ["child", 50, 1, 0, 1, 1, 6],
        ["end_handler", 0, 0, 2],
        ["end", 6, 2, 4, 13, 4],
        ["conversation", 6, 1, 0, 4],
    ]
    found = first_difference(program, 207)

    assert not isinstance(found, str), found


def test_shrinking_keeps_what_fails_and_little_else() -> None:
    """Of seventy operations the two that matter are left."""
    program = draw_program(1, 70)
    wanted = (program[10], program[50])

    def fails(candidate: Program) -> bool:
        return all(each in candidate for each in wanted)

    assert shrink(program, fails) == list(wanted)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_thousand_programs_agree_with_the_model(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """2,000 programs of at least 60 steps show no difference and meet every rare state.

    `PROGRAMS` and `PROGRAMS_SEED` in the environment say how many, and from which seed on; of
    fewer, as many more are played as it takes to meet every rare state.
    """
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes minutes; run it with -m slow")
    count = int(os.environ.get("PROGRAMS", "2000"))
    seed = int(os.environ.get("PROGRAMS_SEED", "0"))
    report = run(count, seed, programs_max=2000)
    with capsys.disabled():
        print(f"\n{show_rare(report)}\n{report.line()}")

    assert report.differences == []
    assert report.unseen == []
