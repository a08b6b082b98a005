"""R14 in small: the runner passes on what is right and fails on each planted bug."""

from __future__ import annotations

import move
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_moved_sessions_are_the_same_on_every_pair_of_backends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bytes and tables are equal, and whatever cuts an import leaves no half store."""
    code = move.main([])

    out = capsys.readouterr().out
    assert code == 0, out
    assert out.startswith("R14 export-import: sessions=")


@pytest.mark.parametrize("control", move.CONTROLS)
def test_a_planted_bug_is_seen(control: str) -> None:
    """A column left out, a mark lost, a half taken for a whole, a uuid kept."""
    score = move.verify(sessions=4, kills=0, lives=0, seed=0, control=control)

    assert score.line().endswith("FAIL")
    assert score.differences or score.half_stores
