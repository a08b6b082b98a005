"""Small histories that once showed a difference, by name. Each is played as its seed would be."""

from __future__ import annotations

from typing import Any

import pytest
from history_documents import KINDS
from history_player import Player, first_difference
from history_steps import Program

PAGE = next(n for n, kind in enumerate(KINDS) if kind.name.endswith("page"))
TOTAL = next(n for n, kind in enumerate(KINDS) if kind.name.endswith("total"))
NEW, ENTRY = ["new"], ["append", 0, 0, 0, 1]


def write(kind: int, how: int, seed: int) -> list[Any]:
    """Change a document of the first conversation, or of the session."""
    return ["doc", kind, 0, 0, 0, how, seed]


KEPT: dict[str, Program] = {
    # What was changed below a draft, in a part that its class gives no type, was not stored.
    "a draft that is changed in place": [
        ["commit", [NEW, write(TOTAL, 0, 6)]],
        *(["commit", [write(TOTAL, how, seed)]] for seed in range(6) for how in (0, 1)),
        ["reopen"],
    ],
    # The past was looked for in the document that lives now, or that nobody has any more.
    "a document that was retired and made again": [
        ["commit", [NEW, write(PAGE, 0, 3), ENTRY]],
        ["commit", [["retire", 0], ENTRY]],
        ["commit", [write(PAGE, 0, 4), ENTRY]],
        ["commit", [["renew", 0, 5], ENTRY]],
        ["look", 0, 0, 0],
        ["reopen"],
    ],
    "a fork at an entry at which another document lived": [
        ["commit", [NEW, write(PAGE, 0, 3), ENTRY]],
        ["commit", [["renew", 0, 5], ENTRY]],
        ["commit", [["fork", 0, 1]]],
        ["commit", [["retire", 0]]],
        ["commit", [["fork", 0, 1]]],
        ["reopen"],
    ],
}


@pytest.mark.parametrize("name", KEPT)
def test_what_once_was_different_agrees(name: str) -> None:
    """A history that was found once shows no difference any more."""
    found = first_difference("rewind", KEPT[name], 0)

    assert isinstance(found, Player), found
    assert found.counts["values"] > 10
