"""Phases: how a method of a definition is bound to the checkpoint class that it handles.

Idea: `@phase` only marks the method. Which checkpoint class it handles is read off the annotation
of `at` when the class is created, because only then the members of the checkpoint union are known.
No string names a phase, so a rename in the editor is a rename everywhere.

* Only the annotation of `at` is needed. It is evaluated with the members of the union as names,
  before the module's own: that makes classes of a function and TYPE_CHECKING imports work.
* The annotation of `ctx` is looked at where it resolves, and never required to.
* A member of the union has exactly one phase, and a phase exactly one member.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, TypeVar

import attrs

from pidurable.errors import DefinitionError, show
from pidurable.records._codec import snake_case

__all__ = [
    "PhaseInfo",
    "bind_phases",
    "check_handler",
    "describe",
    "evaluated",
    "nearest",
    "parameters_text",
    "phase_method",
    "phase",
    "union_members",
]

_MARK = "__pidurable_phase__"

PhaseT = TypeVar("PhaseT", bound=Callable[[Any, Any, Any], Coroutine[Any, Any, None]])


@attrs.frozen(kw_only=True)
class PhaseInfo:
    """One phase of a definition: its stored tag and the method that runs it."""

    tag: str
    """What is written for a task in this phase."""

    names: tuple[str, ...]
    """Every tag that is read as this phase; the first is `tag`."""

    method_name: str


def phase(method: PhaseT) -> PhaseT:
    """Mark an async method as the phase for the checkpoint class that annotates its `at`.

    The method stays what it is, with its types. It is checked when its class is created, not here:
    that the checkpoint class is a member of the definition's union, and the only phase for it.

    Args:
        method: `async def name(self, at: Checkpoint, ctx: TaskContext[...]) -> None`.

    Raises:
        DefinitionError: It is applied to something else than a function; write `@phase` directly
            above `async def`, without parentheses.
    """
    _refuse_non_function(method)
    setattr(method, _MARK, True)
    return method


# `@phase()` comes here too, to be told how it is written; for type checkers it has no default.
phase.__defaults__ = (None,)


def _refuse_non_function(method: object) -> None:
    if not inspect.isfunction(method):
        # Descriptors (a property, a staticmethod) say nothing more than their address.
        given = show(method) if isinstance(method, str | type) else f"a {type(method).__name__}"
        raise DefinitionError(
            "@phase",
            "it has parentheses"
            if method is None
            else f"it was applied to {given}, which is not a function",
            "Write @phase without parentheses or arguments, directly above `async def name(self, "
            "at: Checkpoint, ctx)`: the annotation of `at` says which checkpoint class it handles.",
        )


def phase_method(attribute: object) -> types.FunctionType | None:
    """Give the function that `@phase` marked, whatever the attribute wraps it in, or None."""
    method = getattr(attribute, "__func__", attribute)
    if isinstance(method, types.FunctionType) and getattr(method, _MARK, False) is True:
        return method
    return None


# --- words for messages -----------------------------------------------------------------------


def describe(value: object) -> str:
    """Name a type the way a user writes it: `Charge`, `Prepare | Charge`, `list[int]`."""
    if value is None or value is type(None):
        return "None"
    if isinstance(value, TypeVar) or (
        isinstance(value, type) and not isinstance(value, types.GenericAlias)
    ):
        return value.__name__
    if _is_union(value):
        return " | ".join(describe(member) for member in typing.get_args(value))
    return show(value).replace("typing.", "")


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Give ` Did you mean ...?` for the known name closest to this one, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""


def union_members(type_: Any) -> tuple[Any, ...]:
    """Take a union apart, through aliases (`type Steps = A | B`); another type is its only one."""
    if hasattr(type_, "__value__") and type(type_).__name__ == "TypeAliasType":
        return union_members(type_.__value__)
    if not _is_union(type_):
        return (type_,)
    # An alias inside of the union may repeat a member that is there already.
    flat = (member for each in typing.get_args(type_) for member in union_members(each))
    return tuple(dict.fromkeys(flat))


def _is_union(value: object) -> bool:
    return typing.get_origin(value) in (typing.Union, types.UnionType)


def _signature_of(method_name: str, checkpoint: str) -> str:
    return f"`async def {method_name}(self, at: {checkpoint}, ctx) -> None`"


# --- one handler ------------------------------------------------------------------------------


def check_handler(definition: str, what: str, method_name: str, method: object, at: str) -> None:
    """Check that a phase or abort handler is an async method of exactly self, at and ctx.

    Args:
        definition: The name of the class, for the message.
        what: What the method is, for the message: "phase" or "the abort handler".
        method_name: The attribute that holds it.
        method: The attribute as it stands in the class, not bound.
        at: How `at` is annotated in the line that the remedy shows.
    """
    subject = f"{what} `{method_name}`"
    remedy = f"Write it as {_signature_of(method_name, at)}."
    if isinstance(method, staticmethod | classmethod):
        kind = type(method).__name__
        raise DefinitionError(definition, f"{subject} is a {kind}", f"{remedy[:-1]}, without one.")
    if not inspect.isfunction(method):
        raise DefinitionError(
            definition, f"{subject} is {show(method)}, which is not a method", remedy
        )
    if inspect.isasyncgenfunction(method):
        raise DefinitionError(
            definition,
            f"{subject} contains `yield`, which makes it a generator",
            "Await in it; use `ctx.goto(...)` or `ctx.wait(...)` to hand over to another phase.",
        )
    if not inspect.iscoroutinefunction(method):
        raise DefinitionError(
            definition,
            f"{subject} is not async",
            f"{remedy} A decorator around it must be an async function too.",
        )
    parameters = list(inspect.signature(method).parameters.values())
    positional = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if [p.name for p in parameters] != ["self", "at", "ctx"] or not positional:
        seen = parameters_text(parameters)
        raise DefinitionError(
            definition, f"{subject} takes ({seen}), not exactly (self, at, ctx)", remedy
        )


def _annotations_of(method: types.FunctionType) -> Mapping[str, object]:
    """The annotations of the function that the user wrote, below its decorators, unevaluated."""
    written = inspect.unwrap(method)
    if sys.version_info >= (3, 14):  # pragma: no cover
        # From 3.14 on, reading them evaluates all of them, also those that need not resolve.
        import annotationlib

        return annotationlib.get_annotations(written, format=annotationlib.Format.FORWARDREF)
    return typing.cast("Mapping[str, object]", written.__annotations__)


def _evaluate(
    annotation: object, method: types.FunctionType, names: Mapping[str, object]
) -> object:
    """Turn an annotation into the type that it stands for. May raise what its own text raises."""
    scope = inspect.unwrap(method).__globals__
    # A string may hold a string (a quoted name in a module with postponed annotations), but a
    # name may also refer to itself; three levels are more than anybody writes.
    for _ in range(3):
        if isinstance(annotation, typing.ForwardRef):
            annotation = annotation.__forward_arg__
        if not isinstance(annotation, str):
            break
        # This is what typing.get_type_hints does, for one annotation of the user's own source.
        annotation = eval(annotation, scope, dict(names))  # noqa: S307
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


@attrs.frozen
class Evaluated:
    """The type that an annotation stands for, which may be None itself."""

    value: Any


def evaluated(name: str, method: types.FunctionType, members: tuple[type, ...]) -> Evaluated | None:
    """Evaluate one annotation of any method of the user's; None if it is missing or cannot be."""
    annotations = _annotations_of(method)
    if name not in annotations:
        return None
    try:
        return Evaluated(_evaluate(annotations[name], method, _unique_names(members)))
    except Exception:  # The text is the user's own and may raise anything.
        return None


def _refuse_return(
    definition: str, what: str, method: types.FunctionType, members: tuple[type, ...]
) -> None:
    """Refuse a handler that says it returns a checkpoint: as other frameworks go on, not here."""
    found = evaluated("return", method, members)
    if found is None:
        return
    for part in union_members(found.value):
        if part in members:
            raise DefinitionError(
                definition,
                f"{what} is annotated to return {describe(found.value)}, but what a handler "
                "returns counts for nothing",
                f"Commit it: `await ctx.goto({describe(part)}(...))`, and annotate `-> None`.",
            )


def parameters_text(parameters: typing.Iterable[inspect.Parameter]) -> str:
    """The parameters of a signature as they are written, without types and defaults."""
    written: list[str] = []
    stars: dict[object, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    for each in parameters:
        bare = each.kind is inspect.Parameter.KEYWORD_ONLY
        if bare and not any(text.startswith("*") for text in written):
            written.append("*")
        written.append(stars.get(each.kind, "") + each.name)
    return ", ".join(written)


def _unique_names(members: tuple[type, ...]) -> dict[str, object]:
    """The members by class name; two of one name are left to the names of the module."""
    names: dict[str, object] = {}
    for member in members:
        names[member.__name__] = None if member.__name__ in names else member
    return {name: member for name, member in names.items() if member is not None}


def _checkpoint_of(
    definition: str, method_name: str, method: types.FunctionType, members: tuple[type, ...]
) -> type:
    """Find the member of the union that the annotation of `at` names."""
    first = members[0].__name__
    choices = ", ".join(member.__name__ for member in members)
    choose = f"Annotate it with {'one of ' if len(members) > 1 else ''}{choices}"
    subject = f"phase `{method_name}`"
    names = _unique_names(members)
    annotation = _annotations_of(method).get("at")
    if annotation is None:
        raise DefinitionError(
            definition,
            f"{subject} has no annotation on `at`, so nothing says which checkpoint it handles",
            f"{choose}, as in {_signature_of(method_name, first)}.",
        )
    try:
        found = _evaluate(annotation, method, names)
    except Exception as error:  # The text is the user's own and may raise anything.
        written = annotation if isinstance(annotation, str) else show(annotation)
        written = written.strip("'\"")
        raise DefinitionError(
            definition,
            f"the annotation `{written}` on `at` of {subject} cannot be read "
            f"({type(error).__name__}: {error})",
            f"{choose}.{nearest(written, names)}",
        ) from error
    if isinstance(found, type) and found in members:
        return found
    if _is_union(found) or isinstance(found, TypeVar):
        raise DefinitionError(
            definition,
            f"`at` of {subject} is annotated with {describe(found)}, but a phase handles exactly "
            "one checkpoint class",
            f"{choose}, and write one phase for each class.",
        )
    if getattr(found, "__name__", None) in names:
        raise DefinitionError(
            definition,
            f"`at` of {subject} is annotated with a class called {describe(found)}, but not with "
            "the one in the checkpoint union",
            "Two classes have this name (perhaps the module was loaded twice); name the same one "
            "in both places.",
        )
    raise DefinitionError(
        definition,
        f"`at` of {subject} is annotated with {describe(found)}, which is no checkpoint "
        "class of this definition",
        f"{choose}, or add {describe(found)} to the second parameter of "
        "Task[Input, Checkpoint, Result].",
    )


def _check_context(
    definition: str,
    method_name: str,
    method: types.FunctionType,
    names: Mapping[str, object],
    expected: tuple[object, tuple[type, ...], object],
) -> None:
    """Check that `ctx` is a TaskContext with the definition's own parameters, where it resolves.

    Names of an enclosing function cannot be seen from here, and a name of the module that happens
    to be called the same would be the wrong one; both are left to the type checker.
    """
    annotation = _annotations_of(method).get("ctx")
    if isinstance(annotation, str) and "<locals>" in method.__qualname__:
        return
    try:
        found = _evaluate(annotation, method, names)
    except Exception:  # It does not resolve at run time, say an alias below TYPE_CHECKING.
        return
    origin = typing.get_origin(found)
    if _is_ours(origin or found, "Task"):
        raise DefinitionError(
            definition,
            f"`ctx` of `{method_name}` is annotated with a Task, which is the definition",
            "Annotate it with TaskContext and the same three parameters.",
        )
    if not _is_ours(origin, "TaskContext"):
        if isinstance(found, type) and found in names.values():
            raise DefinitionError(
                definition,
                f"`ctx` of `{method_name}` is annotated with {describe(found)}, which is a "
                "checkpoint class",
                "The first parameter after self is `at`, the checkpoint; the second is `ctx`, a "
                "TaskContext.",
            )
        return
    if getattr(found, "__parameters__", ()):
        return  # A generic base that leaves some of its parameters open.
    input_type, checkpoint, result_type = typing.get_args(found)
    same = (
        _plain(input_type) == _plain(expected[0])
        and set(union_members(checkpoint)) == set(expected[1])
        and _plain(result_type) == _plain(expected[2])
    )
    if not same:
        wanted = ", ".join(
            (
                describe(expected[0]),
                " | ".join(describe(member) for member in expected[1]),
                describe(expected[2]),
            )
        )
        seen = ", ".join(describe(each) for each in (input_type, checkpoint, result_type))
        raise DefinitionError(
            definition,
            f"`ctx` of `{method_name}` is annotated with TaskContext[{seen}], but the definition "
            f"is Task[{wanted}]",
            f"Annotate it with TaskContext[{wanted}].",
        )


def _is_ours(origin: object, name: str) -> bool:
    """Recognise Task and TaskContext by name: they are defined above this module."""
    return (
        isinstance(origin, type)
        and origin.__name__ == name
        and origin.__module__.partition(".")[0] == "pidurable"
    )


def _plain(type_: object) -> object:
    """None and its class are one and the same as a type."""
    return None if type_ is type(None) else type_


# --- all of them ------------------------------------------------------------------------------


def bind_phases(
    definition: str,
    attributes: Mapping[str, object],
    overridden: Mapping[str, str],
    reserved: frozenset[str],
    parameters: tuple[object, tuple[type, ...], object],
    tags: Mapping[type, tuple[str, ...]],
) -> dict[type, PhaseInfo]:
    """Match the phases of a class with the members of its checkpoint union, one to one.

    Args:
        definition: The name of the class, for messages.
        attributes: What the class and its bases hold, the most derived of each name, in order.
        overridden: Methods without @phase that replace a phase of a base, with that base's name.
        reserved: Names that mean something else in a definition, so that no phase may have them.
        parameters: The input type, the members of the union, the result type.
        tags: The stored names of each member, the first one being written.

    Raises:
        DefinitionError: They do not match; the message names the class, the method and the remedy.
    """
    members = parameters[1]
    names = _unique_names(members)
    bound: dict[type, str] = {}
    for method_name, attribute in attributes.items():
        method = phase_method(attribute)
        if method is None:
            continue
        if method_name in reserved:
            raise DefinitionError(
                definition,
                f"`{method_name}` is marked with @phase, but that name has its own meaning in a "
                "definition",
                "Remove @phase, or give the phase another name.",
            )
        check_handler(definition, "phase", method_name, attribute, _guess(method, members))
        member = _checkpoint_of(definition, method_name, method, members)
        if member in bound:
            raise DefinitionError(
                definition,
                f"phases `{bound[member]}` and `{method_name}` are both for {member.__name__}",
                "Keep one of them; a checkpoint class has exactly one phase.",
            )
        bound[member] = method_name
        _refuse_return(definition, f"phase `{method_name}`", method, members)
        _check_context(definition, method_name, method, names, parameters)
    missing = [member for member in members if member not in bound]
    if missing:
        _refuse_missing(definition, missing, attributes, overridden, members)
    return {
        member: PhaseInfo(tag=tags[member][0], names=tags[member], method_name=bound[member])
        for member in members
    }


def _guess(method: types.FunctionType, members: tuple[type, ...]) -> str:
    """How `at` is written in a remedy: as it is annotated, else the first member."""
    annotation = _annotations_of(method).get("at")
    if isinstance(annotation, str):
        return annotation
    return members[0].__name__ if annotation is None else describe(annotation)


def _refuse_missing(
    definition: str,
    missing: list[type],
    attributes: Mapping[str, object],
    overridden: Mapping[str, str],
    members: tuple[type, ...],
) -> typing.NoReturn:
    """Say which members have no phase, and point at the method that was probably meant."""
    first = missing[0]
    listed = ", ".join(member.__name__ for member in missing)
    plural = "classes" if len(missing) > 1 else "class"
    have = "have" if len(missing) > 1 else "has"
    problem = f"the checkpoint {plural} {listed} {have} no phase"
    for method_name, method in attributes.items():
        if not inspect.isfunction(method) or method_name == "abort":
            continue
        found = evaluated("at", method, members)
        if found is not None and found.value is first:
            base = overridden.get(method_name)
            why = f" (it replaces the phase of {base})" if base else ""
            raise DefinitionError(
                definition, problem, f"Mark the method `{method_name}`{why} with @phase."
            )
    raise DefinitionError(
        definition,
        problem,
        f"Add @phase above {_signature_of(snake_case(first.__name__), first.__name__)}, or take "
        f"{first.__name__} out of the second parameter of Task[Input, Checkpoint, Result].",
    )
