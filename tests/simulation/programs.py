"""Programs: lists of operations, drawn from one integer seed or by Hypothesis, and shrunk.

An operation is its name and a few small numbers. What a number stands for (which task, which
conversation) is decided when the operation is played, modulo what there is, so that any list is a
program and a shorter list is one as well. The last number says how long the player then lets things
run: not at all, a few turns of the loop, or until nothing moves any more.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import strategies as st

Operation = tuple[Any, ...]
Program = list[Operation]

MANY = 63
"""A number that stands for one of those that there are."""

KINDS_MAX = 4
ON_RESTART = (None, None, None, None, None, "go", "wait", "abort")
DEADLINES = (None, None, None, None, None, 3, 30, 300)
POLICIES = ("all_settled", "fail_fast", "first_success")
ENDS = ("complete", "complete", "fail", "raise", "oserror", "nothing")
BESIDES = ("", "", "", "own", "work", "abort", "signal")
REPLACEMENTS = ("same", "same", "newer", "newer", "newer_cold", "older", "none")
DEATHS = ("now", "now", "before", "after")

OPERATIONS: dict[str, tuple[int, tuple[int, ...]]] = {
    # name: how often, and the largest value of each of its numbers
    "create": (9, (KINDS_MAX, MANY, 1, 7, len(DEADLINES) - 1, len(ON_RESTART) - 1)),
    "goto": (5, (MANY,)),
    "child": (9, (MANY, KINDS_MAX, 1, len(DEADLINES) - 1, len(ON_RESTART) - 1)),
    "conversation": (5, (MANY, KINDS_MAX, 3)),
    "work": (3, (MANY, MANY, KINDS_MAX, 2)),
    "wait": (8, (MANY, 4, MANY, 2, 4, 2, 1)),
    "join": (6, (MANY, 2, 7)),
    "hold_task": (4, (MANY, MANY, 1)),
    "end": (12, (MANY, len(ENDS) - 1, len(BESIDES) - 1, MANY)),
    "end_handler": (5, (MANY, 6)),
    "receive": (2, (MANY, 2)),
    "leak": (1, (MANY,)),
    "late": (2, (MANY,)),
    "abort": (5, (MANY,)),
    "abort_many": (1, (MANY, MANY)),
    "complete_and_abort": (2, (MANY, MANY)),
    "revive": (3, (MANY, MANY)),
    "dependency": (2, (MANY, MANY)),
    "held_decider": (2, (MANY, 1)),
    "busy_again": (2, (MANY,)),
    "all_due": (1, (MANY,)),
    "handover_and_abort": (2, (MANY, 1)),
    "signal": (4, (MANY, 3)),
    "advance": (6, (4,)),
    "step_clock": (1, (4,)),
    "hold": (3, ()),
    "release": (4, ()),
    "crash": (3, (len(DEATHS) - 1, 7)),
    "crash_again": (1, (4, 2)),
    "close": (2, (3, 7)),
    "start": (1, ()),
    "replace": (4, (KINDS_MAX, len(REPLACEMENTS) - 1)),
    "retry_task": (2, (MANY,)),
    "resume_task": (2, (MANY,)),
    "watch": (2, (MANY,)),
    "idle": (1, (MANY,)),
    "settle": (4, ()),
}
SLACK = (0, 0, 1, 2, 5, -1, -1, -1)
"""Turns of the loop after an operation; -1 stands for all that it takes."""


def draw_program(seed: int, length: int) -> Program:
    """The program of a seed."""
    random = Random(f"{seed}/program")
    names = list(OPERATIONS)
    weights = [float(OPERATIONS[name][0]) for name in names]
    if random.random() < 0.5:
        # Half of the programs have a mind of their own: most operations often, some never.
        weights = [weight * random.choice((0, 1, 1, 2, 4)) for weight in weights]
        weights[names.index("create")] += 5
    chosen = ["create", "create", *random.choices(names, weights, k=length - 2)]
    return [_numbers(name, random.randint) for name in chosen]


def _numbers(name: str, draw: Callable[[int, int], int]) -> Operation:
    most = OPERATIONS[name][1]
    return (name, *(draw(0, each) for each in most), draw(0, len(SLACK) - 1))


@st.composite
def programs(draw: Any, min_size: int, max_size: int) -> Program:
    """Programs for Hypothesis."""
    names = [name for name, (weight, _) in OPERATIONS.items() for _ in range(weight)]
    chosen = draw(st.lists(st.sampled_from(names), min_size=min_size, max_size=max_size))
    return [_numbers(name, lambda low, high: draw(st.integers(low, high))) for name in chosen]


def shrink(program: Program, fails: Callable[[Program], bool], *, tries: int = 400) -> Program:
    """A shorter program that still fails: parts are left out, large ones first."""
    size = max(1, len(program) // 2)
    while size and tries:
        start, shorter = 0, False
        while start < len(program) and tries:
            candidate = program[:start] + program[start + size :]
            tries -= 1
            if candidate and fails(candidate):
                program, shorter = candidate, True
            else:
                start += size
        if not shorter or size > 1:
            size //= 2
    return program
