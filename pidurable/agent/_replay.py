"""Replay policies: what becomes of a call that was found between its intent and its outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pidurable.registry._tool import Tool

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


def policy_of(stored: str, tool: Tool[..., Any] | None) -> str:
    """What counts for a call whose intent has a policy stored, and whose tool is what it is now.

    A tool that is gone counts as `interrupt`. One that cannot be asked, because it was made
    something else since, leaves the outcome unknown, which is `interrupt` too.
    """
    policy = stricter(stored, "interrupt" if tool is None else tool.replay)
    if policy == "reconcile" and (tool is None or tool.reconcile is None):
        return "interrupt"
    return policy


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
