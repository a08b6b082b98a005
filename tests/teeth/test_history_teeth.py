"""The histories have teeth: bugs planted in documents, watches and contexts are found."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import pytest
from history_teeth import GOALS, TEETH, HistoryTooth, bite
from teeth import CHECKOUT, BluntToothError

QUICK = ("read the past off by one",)


@pytest.mark.parametrize("tooth", TEETH, ids=lambda tooth: tooth.name)
def test_a_history_tooth_can_be_planted(tooth: HistoryTooth, tmp_path: Path) -> None:
    """The texts that a tooth changes are there, exactly once, and what they become is Python."""
    path = tmp_path / tooth.module
    path.parent.mkdir()
    shutil.copy(CHECKOUT / "pidurable" / tooth.module, path)

    tooth.plant(tmp_path)

    compile(path.read_text(), str(path), "exec")
    with pytest.raises(BluntToothError, match="plant it anew"):
        attrs.evolve(tooth, changes=(("never = written", ""),)).plant(tmp_path)


@pytest.mark.parametrize("name", QUICK)
def test_a_bug_planted_in_documents_is_caught(name: str) -> None:
    """The histories of the first seeds fail on a copy with this bug."""
    (tooth,) = [each for each in TEETH if each.name == name]

    assert bite(tooth, histories=20).caught


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_bug_planted_in_the_session_is_caught(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the planted bugs is found, and nothing is found where none is planted."""
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes minutes; run it with -m slow")
    bites = [bite(tooth) for tooth in TEETH]
    clean = [bite(None, goal=goal, histories=100) for goal in GOALS]
    missed = [each.tooth.name for each in bites if each.tooth and not each.caught]
    caught = len(bites) - len(missed)
    with capsys.disabled():
        for each in bites:
            assert each.tooth is not None
            print(f"\n{each.seconds:6.1f} s  {each.tooth.name}: {each.said}", end="")
        verdict = "FAIL" if missed or any(each.caught for each in clean) else "PASS"
        print(f"\nhistory teeth: caught={caught}/{len(bites)} {verdict}")

    assert missed == []
    assert [each.said for each in clean if each.caught] == []
