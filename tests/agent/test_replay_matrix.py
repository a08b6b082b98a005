"""What becomes of a call that a crash interrupts, by policy stored and current: see the matrix."""

from __future__ import annotations

import pytest
from replay_matrix import CURRENT, POINTS, POLICIES, planted, play, play_all, table
from trio.testing import MockClock


@pytest.mark.slow
async def test_the_cells_of_the_replay_matrix_are_as_designed(
    autojump_clock: MockClock, slow_run: bool
) -> None:
    """What the ledger outside has, and what the model is told, is what the table says.

    With `-m slow` all eighty crashes; a sample by default, with all points and policies in it.
    """
    cells = await play_all(every=1 if slow_run else 9)

    assert [cell.problem for cell in cells if cell.problem] == []
    assert {cell.point for cell in cells} == set(POINTS)
    assert {cell.stored for cell in cells} == set(POLICIES)
    assert {cell.current for cell in cells} == set(CURRENT)
    assert len(table(cells).splitlines()) == 17
    assert not slow_run or len(cells) == 80


async def test_the_matrix_sees_a_policy_that_became_laxer(autojump_clock: MockClock) -> None:
    """The control: where the laxer policy counts, an effect that may not repeat is repeated."""
    with planted():
        cell = await play("CP3", "interrupt", "safe")

    assert (cell.seen, cell.effects) == ("again", 2)
    assert cell.problem is not None
