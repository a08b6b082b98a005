"""Reach: which ids the code of a tool may use, that is, code that works for one principal.

A conversation of another principal is none for it. Where nobody is named as the principal, the tree
is all that tells one user's work from another's, so it is the bound then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pidurable.records._entries import Conversation


def may_reach(
    own: Conversation,
    other: Conversation,
    *,
    conversation: Callable[[int], Conversation],
    place_of: Callable[[int], int | None],
) -> bool:
    """Whether code that works in one conversation may use the id of another.

    Args:
        own: Where it works.
        other: What it names.
        conversation: Gives any conversation by its id.
        place_of: Gives the conversation of any task by its id; None for a task that is gone.
    """
    if own.principal != other.principal:
        return False
    if own.id == other.id or own.principal:
        return True

    def root_of(found: Conversation) -> int:
        while found.owner is not None:
            above = place_of(found.owner)
            if above is None:
                break
            found = conversation(above)
        return found.id

    return root_of(own) == root_of(other)
