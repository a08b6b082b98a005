"""The programs have teeth: bugs planted in a copy of the scheduler are found."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import pytest
from teeth import CHECKOUT, TEETH, BluntToothError, Tooth, bite

QUICK = ("skip a level in the cascade",)


@pytest.mark.parametrize("tooth", TEETH, ids=lambda tooth: tooth.name)
def test_a_tooth_can_be_planted(tooth: Tooth, tmp_path: Path) -> None:
    """The text that a tooth changes is there, exactly once, and what it becomes is Python."""
    (tmp_path / "tasks").mkdir()
    path = tmp_path / "tasks" / tooth.module
    shutil.copy(CHECKOUT / "pidurable" / "tasks" / tooth.module, path)

    tooth.plant(tmp_path)

    compile(path.read_text(), str(path), "exec")
    with pytest.raises(BluntToothError, match="plant it anew"):
        attrs.evolve(tooth, find="never = written").plant(tmp_path)


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_caught(name: str) -> None:
    """The programs of the first seeds fail on a copy with this bug."""
    (tooth,) = [each for each in TEETH if each.name == name]

    assert bite(tooth, programs=60).caught


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_planted_bug_is_caught(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the planted bugs is found, and nothing is found where none is planted."""
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes minutes; run it with -m slow")
    bites = [bite(tooth) for tooth in TEETH]
    clean = bite(None, programs=300)
    missed = [each.tooth.name for each in bites if each.tooth and not each.caught]
    caught = len(bites) - len(missed)
    with capsys.disabled():
        for each in bites:
            assert each.tooth is not None
            print(f"\n{each.seconds:6.1f} s  {each.tooth.name}: {each.said}", end="")
        verdict = "FAIL" if missed or clean.caught else "PASS"
        print(f"\nteeth: caught={caught}/{len(bites)} {verdict}")

    assert missed == []
    assert not clean.caught, clean.said
