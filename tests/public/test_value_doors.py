"""The table of value rules holds at every door: refused with its place, or back exactly."""

# C081, C082, C084, C085: NUL, surrogates, not-a-number and depth at every door, reopened.

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import value_doors
from value_doors import KNOCKS, PLACES, place_of, plain_problems, typed_problems

from pidurable.records._value_rules import VALUE_DOORS, VALUE_RULES


def test_every_door_of_the_table_is_knocked_at() -> None:
    """A door without a knock would be a promise that nobody has tried."""
    assert [door.name for door in VALUE_DOORS] == list(KNOCKS)
    for door in VALUE_DOORS:
        assert not any(word in place_of(door) for word in PLACES if PLACES[word] != word), door


@pytest.mark.parametrize("backend", ["memory", "sqlite"])
async def test_every_door_takes_and_refuses_strict_json_as_the_table_says(
    backend: str, tmp_path: Path
) -> None:
    """What is refused leaves the store as it was; the rest comes back after a reopening."""
    path = tmp_path / "s.sqlite"

    wrong = await plain_problems(value_doors.in_memory() if backend == "memory" else lambda: path)

    assert wrong == []


@pytest.mark.parametrize("backend", ["memory", "sqlite"])
async def test_every_door_with_a_type_takes_and_refuses_what_the_table_says(
    backend: str, tmp_path: Path
) -> None:
    """Each type comes back as itself after a reopening; what does not fit is refused."""
    path = tmp_path / "s.sqlite"

    wrong = await typed_problems(value_doors.in_memory() if backend == "memory" else lambda: path)

    assert wrong == []


def test_the_doors_are_the_same_without_assert_statements() -> None:
    """Under `python -O` as much is refused."""
    done = subprocess.run(
        [sys.executable, "-O", "-W", "error", value_doors.__file__],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.stdout.splitlines() == [f"optimised=True doors={len(KNOCKS)} wrong=0"], done.stderr
    assert done.returncode == 0


def test_each_rule_with_a_type_is_tried_at_a_door_that_knows_it() -> None:
    """Every type of a refused example is that of an accepted one, so that it has a field."""
    accepted = [e.type for rule in VALUE_RULES for e in rule.accepted]

    missing = [e for rule in VALUE_RULES for e in rule.refused if e.type not in accepted]
    assert missing == []
