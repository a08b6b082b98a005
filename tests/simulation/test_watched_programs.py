"""The task graph over drawn programs: after every commit it is what a recount of the rows makes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from player import first_difference, quiet_logs
from programs import draw_program
from watched_player import WatchedPlayer

from pidurable.session import _watch


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = logging.getLogger("pidurable").level
    quiet_logs()
    yield
    logging.getLogger("pidurable").setLevel(level)


def played(seeds: range, path: Path | None = None) -> str:
    """Play programs with their graphs watched; the figures of all of them.

    Raises:
        AssertionError: A graph is not what a recount makes, or its patches lead elsewhere.
    """
    compared = frames = ended = 0
    for seed in seeds:
        program = draw_program(seed, 70)
        each = None if path is None else path / f"{seed}.sqlite"
        found = first_difference(program, seed, each, kind=WatchedPlayer)
        assert isinstance(found, WatchedPlayer), f"seed {seed}: {found}"
        compared += found.compared
        frames += found.frames
        ended += found.ended_roots
    assert compared > 100 * len(seeds)
    assert frames > 50 * len(seeds)
    assert ended > len(seeds)
    return f"graphs: programs={len(seeds)} compared={compared} frames={frames} ended={ended}"


def test_every_graph_is_what_a_recount_of_the_rows_makes() -> None:
    """Of all and below roots, with several limits, over crashes and reopenings, patch by patch."""
    first = int(os.environ.get("PROGRAMS_SEED", "0"))
    played(range(first, first + 4))


def test_whoever_falls_behind_is_given_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for three frames only, the first value and all frames lead to the last value."""
    monkeypatch.setattr(_watch, "WATCH_FRAMES_MAX", 3)

    found = first_difference(draw_program(3, 70), 3, kind=WatchedPlayer)

    assert isinstance(found, WatchedPlayer), found
    assert found.whole >= 5


def test_graphs_read_from_sqlite_are_the_same(tmp_path: Path) -> None:
    """What comes in from a file is what comes in from memory."""
    played(range(12, 14), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_histories_agree_with_the_recount(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,000 programs; `PROGRAMS` and `PROGRAMS_SEED` say how many, and from which seed on."""
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes minutes; run it with -m slow")
    first = int(os.environ.get("PROGRAMS_SEED", "0"))
    line = played(range(first, first + int(os.environ.get("PROGRAMS", "1000"))))
    with capsys.disabled():
        print(f"\n{line}")
