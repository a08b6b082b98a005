"""Random programs of turns, judged from outside: nothing refused, lost, doubled or stuck."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
from turn_judge import judge
from turn_player import draw_program, first_problem, play
from turn_programs import quiet_logs, run, show_rare, shrink

QUICK = 5


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = logging.getLogger("pidurable").level
    quiet_logs()
    yield
    logging.getLogger("pidurable").setLevel(level)


def test_the_programs_of_a_few_seeds_are_right() -> None:
    """Input, aborts, deaths and odd answers of a few programs leave nothing for the judge."""
    report = run(QUICK, int(os.environ.get("TURNS_SEED", "0")))

    assert report.differences == []
    assert report.refusals == 0
    assert report.programs == QUICK


def test_a_seed_plays_the_same_program_twice() -> None:
    """What happened outside, in two plays of one seed, is the same line by line."""
    program = draw_program(7, 12)

    assert play(program, seed=7).book.lines == play(program, seed=7).book.lines


def test_the_judge_sees_what_is_wrong() -> None:
    """A book or a transcript that was tampered with is told from one that is right."""
    program = draw_program(3, 8)
    once = ["calls", [[0, 99], [1, 99]], 0, 0]
    ops = [["send", 0, 0], ["send", 0, 2], ["wait", 4]]
    player = play({**program, "answers": [once, ["text", 0]], "ops": ops}, seed=3)
    assert player.problems() == []

    def problems(**changed: Any) -> list[str]:
        given = {"lines": player.book.lines, "facts": player.facts, **changed}
        requests = [[dict(m) for m in r] for r in player.told_requests()]
        return judge(given["lines"], requests, player.script.given, given["facts"])

    assert problems() == []
    effect = next(each for each in player.book.find("effect") if each["policy"] != "safe")
    assert "happened 2 times" in str(problems(lines=[*player.book.lines, effect]))
    fewer = [line for line in player.book.lines if line is not effect]
    assert "did not happen" in str(problems(lines=fewer))
    acked = player.book.find("acked")[0]
    doubled = {**acked, "submission": player.book.find("acked")[1]["submission"]}
    assert "is the submissions" in str(problems(lines=[*player.book.lines, doubled]))
    told = {**player.facts, "live": ["pi.tool 7"]}
    assert "tasks are live" in str(problems(facts=told))


def test_shrinking_keeps_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thirty operations those two are left without which nothing is wrong."""
    program = draw_program(1, 30)
    wanted = [program["ops"][3], program["ops"][20]]

    def fails(candidate: Any, seed: int) -> Any:
        del seed
        return "wrong" if all(each in candidate["ops"] for each in wanted) else None

    monkeypatch.setattr("turn_programs.first_problem", fails)

    assert shrink(program, 1, 500)["ops"] == wanted


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_programs_are_right(
    slow_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """2,000 programs of turns: no refusal, no difference, and every rare situation was met.

    `TURNS_PROGRAMS` and `TURNS_SEED` in the environment say how many, and from which seed on.
    """
    if not slow_run:
        pytest.skip("takes minutes; run it with -m slow")
    count = int(os.environ.get("TURNS_PROGRAMS", "2000"))
    report = run(count, int(os.environ.get("TURNS_SEED", "0")))
    with capsys.disabled():
        print(f"\n{show_rare(report)}\n{report.line()}")

    assert report.differences == []
    assert report.refusals == 0
    # A sample has not met everything.
    assert report.unseen == [] or count < 2000


def test_an_exception_is_a_problem_too() -> None:
    """A program that cannot be played is told as one that is wrong."""
    found = first_problem({**draw_program(1, 5), "ops": [["nonsense"]]}, 1)

    assert isinstance(found, str)
    assert "_do_nonsense" in found
