"""R1 has teeth: bugs planted in the storage are found by crashes at its writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import pytest
from disk_teeth import TEETH, DiskTooth, bite
from teeth import CHECKOUT, BluntToothError


@pytest.mark.parametrize("tooth", TEETH, ids=lambda tooth: tooth.name)
def test_a_disk_tooth_can_be_planted(tooth: DiskTooth, tmp_path: Path) -> None:
    """The texts that a tooth changes are there, exactly once, and what they become is Python."""
    path = tmp_path / tooth.module
    path.parent.mkdir()
    shutil.copy(CHECKOUT / "pidurable" / tooth.module, path)

    tooth.plant(tmp_path)

    compile(path.read_text(), str(path), "exec")
    with pytest.raises(BluntToothError, match="plant it anew"):
        attrs.evolve(tooth, changes=(("never = written", ""),)).plant(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_bug_planted_in_the_storage_is_caught(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the planted bugs is found, and nothing is found where none is planted."""
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes minutes; run it with -m slow")
    bites = [bite(tooth) for tooth in TEETH]
    clean = bite(None, images=400)
    missed = [each.tooth.name for each in bites if each.tooth and not each.caught]
    caught = len(bites) - len(missed)
    with capsys.disabled():
        for each in bites:
            assert each.tooth is not None
            print(f"\n{each.seconds:6.1f} s  {each.tooth.name}: {each.said}", end="")
        verdict = "FAIL" if missed or clean.caught else "PASS"
        print(f"\ndisk teeth: caught={caught}/{len(bites)} {verdict}")

    assert missed == []
    assert not clean.caught, clean.said
