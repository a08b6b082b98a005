"""The programs of turns have teeth: bugs planted in a copy of the agent loop are found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from teeth import CHECKOUT
from turn_teeth import TEETH, TurnTooth, bite


@pytest.mark.parametrize("tooth", TEETH, ids=lambda tooth: tooth.name)
def test_a_turn_tooth_can_be_planted(tooth: TurnTooth, tmp_path: Path) -> None:
    """The text that a tooth changes is there, exactly once, and what it becomes is Python."""
    path = tmp_path / tooth.module
    path.parent.mkdir()
    shutil.copy(CHECKOUT / "pidurable" / tooth.module, path)

    tooth.plant(tmp_path)

    compile(path.read_text(), str(path), "exec")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_bug_planted_in_the_agent_loop_is_caught(
    slow_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the planted bugs is found, and nothing is found where none is planted."""
    if not slow_run:
        pytest.skip("takes minutes; run it with -m slow")
    bites = [bite(tooth) for tooth in TEETH]
    clean = bite(None, programs=100)
    missed = [each.tooth.name for each in bites if not each.caught]
    with capsys.disabled():
        for each in bites:
            print(f"\n{each.seconds:6.1f} s  {each.tooth.name}: {each.said}", end="")
        verdict = "FAIL" if missed or clean.caught else "PASS"
        print(f"\nturn teeth: caught={len(bites) - len(missed)}/{len(bites)} {verdict}")

    assert missed == []
    assert not clean.caught, clean.said
