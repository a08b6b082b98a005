"""The tests of gc have teeth: bugs planted in a copy of the package are found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gc_teeth import GC_TEETH, bite_gc
from teeth import CHECKOUT, Tooth


@pytest.mark.parametrize("tooth", GC_TEETH, ids=lambda tooth: tooth.name)
def test_a_tooth_of_gc_can_be_planted(tooth: Tooth, tmp_path: Path) -> None:
    """The text that a tooth changes is there, exactly once, and what it becomes is Python."""
    package = tmp_path / "pidurable"
    (package / "tasks").mkdir(parents=True)
    (package / "session").mkdir()
    path = package / "tasks" / tooth.module
    shutil.copy(CHECKOUT / "pidurable" / "tasks" / tooth.module, path)

    tooth.plant(package)

    compile(path.read_text(), str(path), "exec")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_planted_bug_of_gc_is_caught(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the planted bugs is found, and nothing is found where none is planted."""
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes minutes; run it with -m slow")
    bites = [bite_gc(tooth) for tooth in GC_TEETH]
    clean = bite_gc(None)
    missed = [each.tooth.name for each in bites if not each.caught]
    with capsys.disabled():
        for each in bites:
            print(f"\n{each.seconds:6.1f} s  {each.tooth.name}: {each.said}", end="")
        verdict = "FAIL" if missed or clean.caught else "PASS"
        print(f"\ngc teeth: caught={len(bites) - len(missed)}/{len(bites)} {verdict}")

    assert missed == []
    assert not clean.caught, clean.said
