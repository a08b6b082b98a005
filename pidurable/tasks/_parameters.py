"""The parameters of a definition: what stands in `Task[Input, A | B, Result]`.

Idea: the three parameters are ordinary types, read once when the class is created. A definition
may derive from a generic base of the user's own; its type variables are replaced on the way.

* The members of the checkpoint union are plain classes whose instances cannot be changed: a
  checkpoint is compared with the one at the start of its phase to see whether there was progress,
  and what was committed must not change behind the commit.
* Every stored tag belongs to one member, old names included.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import typing
from collections.abc import Mapping
from typing import Any, ForwardRef, TypeVar

import attrs

from pidurable.errors import DefinitionError, show
from pidurable.records._codec import snake_case
from pidurable.tasks._phase import describe, union_members

__all__ = [
    "Parameters",
    "check_count",
    "check_parameters",
    "checkpoint_members",
    "checkpoint_tags",
    "is_open",
    "parameters_of",
]

Parameters = tuple[Any, Any, Any]
"""Input, checkpoint union and result, as they stand in the class statement."""

_TAG = re.compile(r"[a-z][a-z0-9_]*")
_EXAMPLE = "Task[Input, First | Second, Result]"


@attrs.frozen
class _FrozenProbe:
    """Shows how attrs marks a frozen class: all of them share one `__setattr__`."""


# --- the three parameters ---------------------------------------------------------------------


def check_count(parameters: object) -> None:
    """Refuse anything but three parameters, and checkpoint classes that are no union.

    Raises:
        DefinitionError: Shows how `Task[...]` is written.
    """
    given = parameters if isinstance(parameters, tuple) else (parameters,)
    if len(given) != 3:
        raise DefinitionError(
            "Task[...]",
            f"it was given {len(given)} parameter{'s' if len(given) != 1 else ''}, not three",
            f"Write {_EXAMPLE}: the checkpoint classes joined with |, None for what is not needed.",
        )
    if isinstance(given[1], tuple | list):
        raise DefinitionError(
            "Task[...]",
            f"its checkpoint parameter is a {type(given[1]).__name__}",
            f"Join the classes with |, as in {_EXAMPLE}.",
        )


def parameters_of(cls: type, task: type) -> Parameters | None:
    """Find what a class gives for the parameters of `Task`, or None if it gives nothing.

    Args:
        cls: A class below `task`.
        task: The class `Task` itself; given, because it is defined above this module.
    """
    bases = cls.__dict__.get("__orig_bases__", cls.__bases__)
    # A class below `task` has such a base; the first one counts, as it does for methods.
    base = next(each for each in bases if issubclass(typing.get_origin(each) or each, task))
    origin = typing.get_origin(base) or base
    if origin is task:
        return typing.get_args(base) or None
    inherited = parameters_of(origin, task)
    if inherited is None:
        return None
    given = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(base), strict=False))
    return tuple(_substitute(each, given) for each in inherited)


def _substitute(type_: Any, given: Mapping[Any, Any]) -> Any:
    """Replace the type variables of a base by what its subclass gives for them."""
    if isinstance(type_, TypeVar):
        return given.get(type_, type_)
    open_variables = getattr(type_, "__parameters__", ())
    if not open_variables or isinstance(type_, type):
        return type_
    return type_[tuple(given.get(variable, variable) for variable in open_variables)]


def is_open(parameters: Parameters | None) -> bool:
    """Tell whether something is left to be given by a subclass."""
    return parameters is None or any(
        isinstance(each, TypeVar)
        or (not isinstance(each, type) and bool(getattr(each, "__parameters__", ())))
        for each in parameters
    )


def check_parameters(definition: str, parameters: Parameters | None) -> Parameters:
    """Refuse parameters that are missing, open, or written as strings.

    Raises:
        DefinitionError: Says which one, and how the class statement should look.
    """
    if parameters is None:
        raise DefinitionError(
            definition,
            "it does not say what it works on",
            f"Give Task its three parameters, as in class {definition}({_EXAMPLE}); a parameter "
            "that is not needed is None.",
        )
    for what, each in zip(("input", "checkpoint", "result"), parameters, strict=True):
        if isinstance(each, ForwardRef | str):
            text = each.__forward_arg__ if isinstance(each, ForwardRef) else each
            raise DefinitionError(
                definition,
                f"its {what} parameter is the string {text!r}",
                f"Write the class itself, defined above, as in class {definition}({_EXAMPLE}).",
            )
    if is_open(parameters):
        written = ", ".join(describe(each) for each in parameters)
        raise DefinitionError(
            definition,
            f"its parameters Task[{written}] still contain type variables, but it has a name",
            "Give every parameter a type; or remove `name`, if this is a base for definitions.",
        )
    return parameters


# --- the checkpoint union ---------------------------------------------------------------------


def checkpoint_members(definition: str, checkpoint: Any) -> tuple[type, ...]:
    """Take the checkpoint union apart and check each member.

    Raises:
        DefinitionError: A member is no class of its own, or its instances can be changed.
    """
    members = union_members(checkpoint)
    for member in members:
        _check_member(definition, member)
    return members


def _check_member(definition: str, member: Any) -> None:
    name = describe(member)
    if member is None or member is type(None):
        raise DefinitionError(
            definition,
            "its checkpoint union contains None, which cannot have a phase",
            "Make a class for that step, even an empty one: `@attrs.frozen class Start: pass`.",
        )
    if not isinstance(member, type) or typing.get_origin(member) is not None:
        raise DefinitionError(
            definition,
            f"its checkpoint parameter contains {name}, which is not a plain class",
            f"Use one @attrs.frozen class per phase, as in class {definition}({_EXAMPLE}).",
        )
    kind = _kind_of(member)
    if kind is not None:
        raise DefinitionError(
            definition,
            f"its checkpoint parameter contains {name}, which is {kind}",
            f"Write an @attrs.frozen class (or a @dataclass(frozen=True)) for each phase, as in "
            f"class {definition}({_EXAMPLE}).",
        )
    is_attrs = "__attrs_attrs__" in member.__dict__
    is_dataclass = "__dataclass_fields__" in member.__dict__
    if not is_attrs and not is_dataclass:
        base = next(
            (each for each in member.__mro__[1:] if attrs.has(each) or _is_dataclass(each)), None
        )
        if base is not None:
            problem = f"checkpoint class {name} derives from {base.__name__} but is not decorated"
        elif member.__module__ == "builtins":
            problem = f"its checkpoint parameter contains {name}, which is not a class of its own"
        else:
            problem = f"checkpoint class {name} is a plain class, so nothing says what to store"
        decorate = f"Decorate {name} with @attrs.frozen (or @dataclass(frozen=True))."
        if member.__module__ == "builtins":
            decorate = f"Put the {name} into a field of an @attrs.frozen class."
        raise DefinitionError(definition, problem, decorate)
    frozen = (
        _setter_of(member) is _setter_of(_FrozenProbe)
        if is_attrs
        else bool(member.__dict__["__dataclass_params__"].frozen)
    )
    if not frozen:
        way = "@attrs.frozen" if is_attrs else "@dataclass(frozen=True)"
        raise DefinitionError(
            definition,
            f"checkpoint class {name} can be changed after it was created",
            f"Decorate {name} with {way}: a checkpoint is only ever replaced, by `ctx.goto(...)`.",
        )


def _kind_of(member: type) -> str | None:
    """What a class is that looks like a record and cannot be a checkpoint class."""
    if member is Any:
        return "no class at all"
    if issubclass(member, enum.Enum):
        return "an enum"
    if issubclass(member, tuple) and hasattr(member, "_fields"):
        return "a NamedTuple"
    if typing.is_typeddict(member):
        return "a TypedDict"
    if getattr(member, "_is_protocol", False):
        return "a protocol"
    if hasattr(member, "model_fields"):
        return "a pydantic model"
    return None


def _setter_of(cls: type) -> object:
    return cls.__setattr__


def _is_dataclass(cls: type) -> bool:
    return dataclasses.is_dataclass(cls)


# --- stored tags ------------------------------------------------------------------------------


def checkpoint_tags(definition: str, members: tuple[type, ...]) -> dict[type, tuple[str, ...]]:
    """Find the stored names of each member: its class name in snake_case, or its `phase_names`.

    Raises:
        DefinitionError: `phase_names` is not what it should be, or two members share a name.
    """
    tags: dict[type, tuple[str, ...]] = {}
    taken: dict[str, type] = {}
    for member in members:
        names = _names_of(definition, member)
        for name in names:
            other = taken.setdefault(name, member)
            if other is not member:
                raise DefinitionError(
                    definition,
                    f"the checkpoint classes {_full_name(other)} and {_full_name(member)} would "
                    f"both be stored as {name!r}",
                    f"Rename one class, or give one of them its own stored name: "
                    f'phase_names = ("other_{name}",) in its body.',
                )
        tags[member] = names
    return tags


def _names_of(definition: str, member: type) -> tuple[str, ...]:
    # Only the class's own: a base's old names stay the base's.
    own = member.__dict__.get("phase_names")
    fields = {each.name for each in member.__dict__.get("__attrs_attrs__", ())}
    if _is_dataclass(member):
        fields |= {each.name for each in dataclasses.fields(member)}
    default = snake_case(member.__name__)
    example = f'phase_names = ("{default}", "old_{default}")'
    if "phase_names" in fields:
        raise DefinitionError(
            definition,
            f"`phase_names` of checkpoint class {member.__name__} is a field of its instances",
            f"Write it without an annotation, or as a ClassVar: {example}.",
        )
    if own is None:
        return (default,)
    if (
        not isinstance(own, tuple)
        or not own
        or not all(isinstance(name, str) and _TAG.fullmatch(name) for name in own)
        or len(set(own)) != len(own)
    ):
        raise DefinitionError(
            definition,
            f"`phase_names` of checkpoint class {member.__name__} is {show(own)}",
            f"Make it a tuple of different lower-case names, the one to write first: {example}.",
        )
    return own


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".replace("<locals>.", "")
