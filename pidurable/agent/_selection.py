"""Which extensions and tools a conversation has: a list of names, or what differs from the default.

What is stored are names, never code: a list, or an object `{"add": [...], "remove": [...]}`, or
nothing where the host's default counts. It is resolved anew for each request and each phase, so a
name that is not installed is skipped, and counts again as soon as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import attrs

from pidurable.errors import InvalidArgumentError, show
from pidurable.records import _json


@final
@attrs.frozen(kw_only=True)
class Selection:
    """A choice by its difference from the host's default, which may change later.

    In `AgentChange.extensions` the default is `Settings.extensions`; in `AgentChange.tools` it is
    every tool of the selected extensions, so there is nothing to add to it.
    """

    add: Sequence[str] = ()
    """Selected besides the default."""
    remove: Sequence[str] = ()
    """Not selected, though the default has it, or `add`."""


def checked_selection(field: str, value: object) -> Any:
    """A choice as it is stored.

    Raises:
        InvalidArgumentError: It is neither a list of names, nor a `Selection`, nor None.
        NotJsonError: A name cannot be stored.
    """
    if value is None:
        return None
    if isinstance(value, Selection):
        stored = {
            part: _checked_names(f"{field}.{part}", names)
            for part, names in (("add", value.add), ("remove", value.remove))
        }
        if field == "tools" and stored["add"]:
            problem = (
                "every tool of the selected extensions is offered already; select the extension, "
                "or give the whole list of tools"
            )
            raise InvalidArgumentError("tools.add", problem, show(value.add))
        return stored
    if not isinstance(value, list):
        problem = "expected a list of names, a Selection, or None"
        raise InvalidArgumentError(field, problem, show(value))
    return _checked_names(field, value)


def _checked_names(field: str, names: object) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidArgumentError(field, "expected a list of names", show(names))
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(field, "expected a list of names, or None", show(names))
    _json.check_json(list(names), f"$.{field}")
    return list(names)


def selected_extensions(
    stored: Any, default: Sequence[str] | None, installed: Sequence[str]
) -> tuple[str, ...] | None:
    """The names that a stored choice stands for now; None for all that are installed."""
    if isinstance(stored, dict):
        found = [*(installed if default is None else default), *stored["add"]]
        removed = set(stored["remove"])
        return tuple(dict.fromkeys(name for name in found if name not in removed))
    chosen = default if stored is None else stored
    return None if chosen is None else tuple(chosen)


def offers_tool(stored: Any, name: str) -> bool:
    """Whether a stored choice of tools has a tool of the selected extensions."""
    if isinstance(stored, dict):
        return name not in stored["remove"]
    return stored is None or name in stored


def with_tools(stored: Any, names: Sequence[str]) -> Any:
    """The stored choice of tools that has these too.

    A choice by name gets the names, one by difference leaves them out no longer. Without a choice
    all tools of the selected extensions are offered already: a tool brings no extension along.
    """
    if stored is None:
        return None
    if isinstance(stored, dict):
        return {**stored, "remove": [name for name in stored["remove"] if name not in names]}
    return [*stored, *(name for name in dict.fromkeys(names) if name not in stored)]
