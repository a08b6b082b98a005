"""What a reason code means, and a rule of stored values: the answer of `pidurable explain`."""

from __future__ import annotations

import difflib

from pidurable.errors import NotFoundError
from pidurable.records._codes import (
    ABORTS,
    BLOCKED,
    NOT_MOVING,
    PERMISSIONS,
    RESUME,
    TOOL_ERRORS,
    UNANSWERED,
)

_TABLES = {
    "of a blocked task": BLOCKED,
    "why a task does not move": NOT_MOVING,
    "of an unanswered submission": UNANSWERED,
    "of a tool call": TOOL_ERRORS,
    "of a permission request": PERMISSIONS,
    "of an abort": ABORTS,
    "of a resume": RESUME,
}


def explanations(code: str) -> list[str]:
    """Every meaning of a code: some words are used in more than one place."""
    from pidurable.records._value_rules import VALUE_RULES, explain_rule

    found = [f"{code} ({what}): {table[code]}" for what, table in _TABLES.items() if code in table]
    if (rule := explain_rule(code)) is not None:
        found.append(f"{code} (a rule of stored values): {rule}")
    if found:
        return found
    known = sorted({name for table in _TABLES.values() for name in table})
    rules = [rule.name for rule in VALUE_RULES]
    near = difflib.get_close_matches(code, [*known, *rules], n=1)
    hint = (
        f"Did you mean {near[0]}?"
        if near
        else f"Codes are: {', '.join(known)}. Rules of values are: {', '.join(rules)}."
    )
    raise NotFoundError("reason code", code[:100], hint)
