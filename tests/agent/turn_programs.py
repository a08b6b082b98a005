"""Plays random programs of turns and says in one line how that went; or one program again.

    python tests/agent/turn_programs.py [programs] [seed]
    python tests/agent/turn_programs.py --seed 17 --program '{"settings": ...}'

A program is what a host, a model and a machine may do: input of all kinds, aborts, decisions, odd
answers, deaths at any commit. Every program has a seed of its own (the first seed, and one more for
each). A problem is shrunk, and printed with the command that plays it again; then the exit status
is 1. The judge stands outside of the product: see turn_judge.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from typing import Any

import attrs
from turn_player import Player, Program, draw_program, first_problem, replay_command
from turn_rare import RARE, met

STEPS = 30


@attrs.define
class Report:
    """What was played, and what was found."""

    seed: int
    programs: int = 0
    steps: int = 0
    lives: int = 0
    requests: int = 0
    refusals: int = 0
    effects: int = 0
    inputs: int = 0
    differences: list[str] = attrs.Factory(list)
    rare: Counter[str] = attrs.Factory(Counter)
    seconds: float = 0.0

    @property
    def unseen(self) -> list[str]:
        return [name for name in RARE if not self.rare[name]]

    def line(self, *, rare_counts: bool = True) -> str:
        """The last line: figures, and whether that is enough."""
        unseen = self.unseen if rare_counts else []
        passed = not self.differences and not unseen and not self.refusals
        return (
            f"turns: programs={self.programs} steps={self.steps} lives={self.lives} "
            f"inputs={self.inputs} requests={self.requests} effects={self.effects} "
            f"refusals={self.refusals} differences={len(self.differences)} "
            f"rare-unseen={len(unseen)} seed={self.seed} {self.seconds:.1f} s "
            f"{'PASS' if passed else 'FAIL'}"
        )


def run(
    programs: int,
    seed: int,
    *,
    steps: int = STEPS,
    differences_max: int = 1,
    seconds_max: float | None = None,
    tries: int = 150,
) -> Report:
    """Play the programs of consecutive seeds."""
    report = Report(seed)
    started = time.perf_counter()
    for one in range(seed, seed + programs):
        program = draw_program(one, steps)
        found = first_problem(program, one)
        report.programs += 1
        if isinstance(found, str):
            report.refusals += found.startswith("refused: ")
            report.differences.append(_shrunk(program, one, found, tries))
        else:
            _count(report, found)
        report.seconds = time.perf_counter() - started
        if len(report.differences) >= differences_max:
            break
        if seconds_max is not None and report.seconds > seconds_max:
            break
    return report


def _count(report: Report, player: Player) -> None:
    report.steps += len(player.program["ops"])
    report.lives += player.lives
    report.requests += len(player.model.requests)
    report.refusals += len(player.model.failures)
    report.inputs += len(player.book.find("sent"))
    report.effects += len(player.book.find("effect"))
    report.rare.update(met(player))


def _shrunk(program: Program, seed: int, found: str, tries: int) -> str:
    shrunk = shrink(program, seed, tries)
    final = first_problem(shrunk, seed)
    return (
        f"seed {seed}: {found}\n"
        f"shrunk to {len(shrunk['ops'])} of {len(program['ops'])} operations and "
        f"{len(shrunk['answers'])} of {len(program['answers'])} answers: {final}\n"
        f"replay: {replay_command(seed, shrunk)}"
    )


def shrink(program: Program, seed: int, tries: int) -> Program:
    """A shorter program that has a problem too: parts are left out, large ones first."""
    for part in ("ops", "answers", "ops"):
        size = max(1, len(program[part]) // 2)
        while size and tries > 0:
            start, shorter = 0, False
            while start < len(program[part]) and tries > 0:
                items = program[part][:start] + program[part][start + size :]
                candidate = {**program, part: items}
                tries -= 1
                if isinstance(first_problem(candidate, seed), str):
                    program, shorter = candidate, True
                else:
                    start += size
            if not shorter or size > 1:
                size //= 2
    return program


def show_rare(report: Report) -> str:
    """How often each rare situation was met."""
    return "\n".join(f"  {report.rare[name]:6} {name}" for name in RARE)


def quiet_logs() -> None:
    """Failures and deaths are what programs are made of; nobody wants to read of them."""
    logging.getLogger("pidurable").setLevel(logging.CRITICAL + 1)


def _replay(text: str, seed: int) -> int:
    found = first_problem(json.loads(text), seed)
    if isinstance(found, str):
        print(found)
        return 1
    for line in found.book.lines:
        print(json.dumps(line))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", type=int, nargs="?", default=2000)
    parser.add_argument("first", type=int, nargs="?", default=0, metavar="seed")
    parser.add_argument("--seed", type=int, help="the same, by name")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--differences", type=int, default=1, help="stop after so many")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    parser.add_argument("--tries", type=int, default=150, help="most tries to shrink")
    parser.add_argument("--program", help="play this one and print its book")
    given: Any = parser.parse_args()
    seed = given.first if given.seed is None else given.seed
    quiet_logs()
    if given.program is not None:
        return _replay(given.program, seed)
    report = run(
        given.programs,
        seed,
        steps=given.steps,
        differences_max=given.differences,
        seconds_max=given.seconds,
        tries=given.tries,
    )
    print(show_rare(report))
    for each in report.differences:
        print(each)
    print(report.line())
    return int(not report.line().endswith("PASS"))


if __name__ == "__main__":
    sys.exit(main())
