"""Programs of histories: lists of steps, drawn from one integer seed, printed as JSON, and shrunk.

A step is its name and what it is about; a commit is a list of actions. All the rest are small
numbers. What a number stands for (which conversation, which document) is decided when the step is
played, modulo what there is, so that any list is a program, and a shorter one too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

Action = list[Any]
Step = list[Any]
Program = list[Step]

MANY = 2**20
"""A number that stands for one of those that there are, or seeds what is drawn."""

ACTIONS: dict[str, tuple[int, tuple[int, ...]]] = {
    # name: how often, and the largest value of each of its numbers
    "append": (10, (MANY, 12, 9, MANY)),  # conversation, head, shape, seed
    "edit": (2, (MANY, 2, MANY)),  # conversation, how many, seed
    "doc": (14, (MANY, MANY, 1, 7, 7, MANY)),  # kind, owner, key, version back, how, seed
    "retire": (2, (MANY,)),
    "renew": (1, (MANY, MANY)),  # retire and make again in one commit
    "fork": (2, (MANY, MANY)),  # conversation, entry
    "fork_here": (1, (MANY, MANY)),  # at an entry that the same commit appends
    "new": (1, ()),
    "agent": (1, (MANY, MANY)),  # conversation, seed
    "stranger": (1, (MANY, MANY)),  # conversation, seed: names an entry of another history
}

STEPS: dict[str, int] = {
    "commit": 30,
    "group": 4,
    "boom": 2,
    "cancel": 2,
    "retried": 1,
    "refused": 2,
    "lost": 1,
    "stored": 1,
    "crash": 1,
    "reopen": 2,
    "upgrade": 3,
    "task": 2,
    "desk": 4,
    "end": 2,
    "abort": 1,
    "round": 2,
    "watch": 0,
    "take": 0,
    "leave": 0,
    "poke": 0,
    "churn": 0,
    "flood": 0,
    "brim": 0,
    "look": 2,
}
GOALS: dict[str, dict[str, int]] = {
    # How often else, by goal.
    "rewind": {"churn": 1, "look": 4},
    "watches": {
        "commit": 8,
        "watch": 14,
        "take": 8,
        "leave": 2,
        "poke": 24,
        "churn": 5,
        "flood": 2,
        "brim": 1,
        "round": 1,
        "look": 0,
    },
    "context": {"group": 8, "round": 10, "task": 0, "desk": 0, "end": 0, "abort": 0, "upgrade": 0},
}
ACTIONS_OF: dict[str, dict[str, int]] = {
    "context": {"append": 24, "edit": 8, "doc": 1, "retire": 0, "renew": 0, "fork": 3},
}


def draw_program(goal: str, seed: int, length: int) -> Program:
    """The program of a seed."""
    random = Random(f"{seed}/{goal}/program")
    steps = {**STEPS, **GOALS[goal]}
    if random.random() < 0.5:
        # Half of the programs have a mind of their own: most steps often, some never.
        steps = {name: many * random.choice((0, 1, 1, 2, 4)) for name, many in steps.items()}
        steps["commit"] += 10
    weights = {name: ACTIONS[name][0] for name in ACTIONS} | ACTIONS_OF.get(goal, {})
    chosen = random.choices(list(steps), list(steps.values()), k=length)
    return [
        ["commit", [["new"], ["append", 0, 0, 0, 1]]],
        *(_step(name, weights, random) for name in chosen),
    ]


def _step(name: str, weights: dict[str, int], random: Random) -> Step:
    if name in ("commit", "boom", "retried"):
        return [name, _actions(weights, random)]
    if name in ("group", "refused", "lost", "stored"):
        return [name, [_actions(weights, random) for _ in range(random.randint(1, 4))]]
    if name == "cancel":
        return [name, random.randint(0, 3), _actions(weights, random)]
    if name == "desk":
        return [name, random.randint(0, MANY), _actions(weights, random)]
    if name == "churn":
        most = random.choice((40, 40, 40, 130, 130, 270))
        many = most if most > 256 else random.randint(most // 3, most)
        return [name, *(random.randint(0, MANY) for _ in range(3)), many]
    if name == "flood":
        return [
            name,
            random.randint(0, MANY),
            random.choice((3, 60, 215, 420)),
            random.choice((1, 7, 230)),
        ]
    if name in ("reopen", "crash"):
        return [name]
    return [name, *(random.randint(0, MANY) for _ in range(3))]


def _actions(weights: dict[str, int], random: Random) -> list[Action]:
    many = random.choice((1, 1, 1, 2, 3, 5))
    names = random.choices(list(weights), list(weights.values()), k=many)
    return [_action(name, random) for name in names]


def _action(name: str, random: Random) -> Action:
    return [name, *(random.randint(0, most) for most in ACTIONS[name][1])]


def shrink(program: Program, fails: Callable[[Program], bool], *, tries: int = 300) -> Program:
    """A shorter program that still fails: whole steps are left out, then actions of commits."""
    left = tries

    def still(candidate: Any) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and bool(candidate) and fails(candidate)

    program = _without(program, still)
    for index, step in enumerate(program):
        if isinstance(step[-1], list):
            put = partial(_with_part, program, index)
            program = put(_without(step[-1], lambda part, put=put: still(put(part))))
    return program


def _with_part(program: Program, index: int, part: Any) -> Program:
    """The program with another list of actions, or of bodies, in one of its steps."""
    return [*program[:index], [*program[index][:-1], part], *program[index + 1 :]]


def _without(items: list[Any], fails: Callable[[list[Any]], bool]) -> list[Any]:
    size = max(1, len(items) // 2)
    while size:
        start, shorter = 0, False
        while start < len(items):
            candidate = items[:start] + items[start + size :]
            if candidate and fails(candidate):
                items, shorter = candidate, True
            else:
                start += size
        if not shorter or size > 1:
            size //= 2
    return items
