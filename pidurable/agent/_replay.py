"""Replay policies: what becomes of a call that was found between its intent and its outcome."""

from __future__ import annotations

from typing import Literal

Replay = Literal["safe", "reconcile", "interrupt", "park"]

_STRICTNESS = {"safe": 0, "reconcile": 1, "interrupt": 2, "park": 3}
_UNKNOWN = (
    "The process died while this call was running. Whether its effect happened is unknown: "
    "look before you repeat it."
)


def stricter(stored: str, current: str) -> str:
    """The replay policy that counts: of the one stored with the intent and today's."""
    return max(
        stored, current, key=lambda policy: _STRICTNESS.get(policy, _STRICTNESS["interrupt"])
    )


def unknown_text(detail: str | None) -> str:
    """What a model is told of a call whose outcome is unknown.

    Args:
        detail: What the tool said when it could not tell; None where the process died.
    """
    if detail is None:
        return _UNKNOWN
    return (
        f"Whether the effect of this call happened is unknown: {detail} Look before you repeat it."
    )
