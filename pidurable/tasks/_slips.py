"""Slips that Python lets pass: a class statement is fine, and means something else than was meant.

Idea: an attribute that nothing reads, a return value that nobody takes, an `initial` that says it
returns what no task can start with. Each rule is so narrow that what it refuses cannot be meant.
Annotations are looked at where they resolve, and never required to.
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeGuard

from pidurable.errors import DefinitionError, show
from pidurable.tasks._phase import describe, evaluated, union_members
from pidurable.tasks._retry import Retry

__all__ = ["check_initial_types", "refuse_slips"]

_NUMBERS = (int, float, complex, bool)


def refuse_slips(
    definition: str, attributes: Mapping[str, object], *, has_retry: bool, has_on_fault: bool
) -> None:
    """Refuse attributes that look like settings of a definition and are none.

    Raises:
        DefinitionError: One would be ignored without a word.
    """
    for name, value in attributes.items():
        if isinstance(value, Retry) and not has_retry:
            raise DefinitionError(
                definition,
                f"its `{name}` is a Retry, but only `retry` is looked at, and there is none",
                "Rename it to `retry`.",
            )
        if (
            value in ("fault", "park")
            and not has_on_fault
            and difflib.SequenceMatcher(None, name, "on_fault").ratio() > 0.7
        ):
            raise DefinitionError(
                definition,
                f"its `{name}` is {show(value)}, but only `on_fault` is looked at",
                "Rename it to `on_fault`.",
            )
        if name == "on_restart":
            raise DefinitionError(
                definition,
                "it has `on_restart`, which is chosen for each task and not for a definition",
                "Give it where a task is created: `create_task(..., on_restart=...)`.",
            )
        if (
            inspect.isfunction(value)
            and "migrate" not in attributes
            and "from_version" in inspect.signature(value).parameters
        ):
            raise DefinitionError(
                definition,
                f"its method `{name}` takes `from_version`, but only `migrate` is called",
                "Rename it to `migrate`.",
            )


def check_initial_types(
    definition: str, function: types.FunctionType, members: tuple[type, ...], input_type: Any
) -> None:
    """Check what `initial` says it takes and returns.

    Raises:
        DefinitionError: What it returns is no checkpoint, or it takes another input.
    """
    local = "<locals>" in function.__qualname__
    choices = " | ".join(member.__name__ for member in members)
    returned = evaluated("return", function, members)
    for part in union_members(returned.value) if returned is not None else ():
        foreign = isinstance(part, type) and part is not Any and not local
        if part in (None, type(None)) or (
            foreign and not any(part in member.__mro__ for member in members)
        ):
            raise DefinitionError(
                definition,
                f"`initial` is annotated to return {describe(returned and returned.value)}, but a "
                "task starts at a checkpoint of its definition",
                f"Return a checkpoint, as in `def initial(self, input) -> {choices}`.",
            )
    parameters = list(inspect.signature(function).parameters)
    taken = evaluated(parameters[1], function, members) if len(parameters) > 1 else None
    if taken is None or local or not _is_plain(taken.value) or not _is_plain(input_type):
        return
    if not issubclass(input_type, taken.value):
        raise DefinitionError(
            definition,
            f"`initial` is annotated to take {describe(taken.value)}, but the input of the "
            f"definition is {describe(input_type)}",
            "Make both the same; the input is the first parameter of "
            "Task[Input, Checkpoint, Result].",
        )


def _is_plain(type_: Any) -> TypeGuard[type]:
    """Whether a type says nothing but its own name, so that two of them can be compared."""
    return (
        isinstance(type_, type)
        and type_ is not Any
        and type_ not in _NUMBERS
        and typing.get_origin(type_) is None
        and not getattr(type_, "_is_protocol", False)
    )
