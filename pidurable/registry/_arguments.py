"""Arguments of tools: the schema that a model is told, and the check of what it sends back.

The only module that names pydantic, griffe and jsonschema_rs; all three are imported when the
first schema is built, because the durable core works without them. A schema comes either from a
typed function (its signature and docstring) or, for tools of other servers, as JSON Schema.
"""

from __future__ import annotations

import difflib
import inspect
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from pidurable.errors import ExtensionError, MissingExtraError, show
from pidurable.records._messages import JsonValue

_PROBLEMS_MAX = 20
"""Most problems named in one error: enough to correct a call, too few to fill a context."""


class ToolArgumentsError(ValueError):
    """The arguments of a call do not fit the tool. The text is written for the model."""


@attrs.frozen(kw_only=True)
class FunctionShape:
    """What of a tool's function can be seen without evaluating its annotations."""

    function: Callable[..., Any]
    where: str
    """`module: tool 'name'` for messages."""
    call_parameter: str | None
    """The parameter that receives the `ToolCall`; not part of the schema."""
    hints: Mapping[str, Any] | None
    """The evaluated annotations, if they could be evaluated where the tool was defined."""


@attrs.frozen(kw_only=True)
class ArgumentSchema:
    """A JSON schema with the check that belongs to it."""

    schema: JsonValue
    description: str
    check: Callable[[JsonValue], dict[str, Any]]
    """Return the arguments for the function, or raise `ToolArgumentsError`."""


def read_hints(function: Callable[..., Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate the annotations of a function's parameters; raise what evaluating one raises.

    Args:
        function: The function.
        names: Names of the place where it was defined, besides its globals: for local classes.
    """
    return typing.get_type_hints(
        _Annotations(function), function.__globals__, dict(names), include_extras=True
    )


class _Annotations:
    """The annotations of the parameters alone: those of the result and the call need not resolve.

    Many import what only the result names under TYPE_CHECKING.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__annotations__ = {
            name: annotation
            for name, annotation in inspect.get_annotations(function).items()
            if name != "return" and not names_call(annotation)
        }


def names_call(annotation: object) -> bool:
    """Return whether an annotation, evaluated or not, is `ToolCall`."""
    if isinstance(annotation, str):
        return annotation.strip("\"' ").rpartition(".")[2] == "ToolCall"
    # By name, because this module is imported by the one that defines it.
    module = getattr(annotation, "__module__", "")
    return getattr(annotation, "__qualname__", "") == "ToolCall" and module.startswith("pidurable")


def function_schema(shape: FunctionShape, extension: str) -> ArgumentSchema:
    """Build the schema and the check of a tool from its function.

    Raises:
        ExtensionError: An annotation cannot be resolved or has no JSON schema, or the docstring
            describes a parameter that does not exist.
        MissingExtraError: pydantic or griffe is not installed.
    """
    pydantic, core = _import_pydantic()
    hints = shape.hints
    if hints is None:
        try:
            hints = read_hints(shape.function, {})
        except Exception as error:
            raise ExtensionError(
                extension,
                f"{shape.where} has an annotation that cannot be resolved: {_first_line(error)}",
                "Import the name at run time, at the top of the module.",
            ) from error
    signature = inspect.signature(shape.function)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in signature.parameters.items()
        if name != shape.call_parameter
    ]

    def collect(**arguments: Any) -> dict[str, Any]:
        return arguments

    # pydantic validates calls of functions; this one takes what the tool takes and gives it back.
    collect.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=inspect.Signature.empty
    )
    collect.__annotations__ = {parameter.name: hints[parameter.name] for parameter in parameters}
    try:
        adapter = pydantic.TypeAdapter(collect)
        with warnings.catch_warnings():
            # A default that JSON cannot hold is a mistake, not a footnote.
            warnings.simplefilter("error")
            schema = _without_titles(adapter.json_schema())
    except Exception as error:
        raise ExtensionError(
            extension,
            f"{shape.where} has a parameter that has no JSON schema: {_first_line(error)}",
            "Use str, int, float, bool, enums, lists, dicts, dataclasses or TypedDicts.",
        ) from error
    description, documented = _read_docstring(shape, extension)
    for name, text in documented.items():
        schema["properties"][name].setdefault("description", text)
    schema.setdefault("properties", {})
    return ArgumentSchema(
        schema=schema,
        description=description,
        check=lambda arguments: _check_call(core, adapter, arguments),
    )


def foreign_schema(schema: JsonValue, description: str, where: str) -> ArgumentSchema:
    """Build the check for a tool whose schema was given as JSON Schema.

    Raises:
        ExtensionError: The schema is not a valid JSON Schema.
        MissingExtraError: jsonschema_rs is not installed.
    """
    validator = schema_validator(schema, where)

    def check(arguments: JsonValue) -> dict[str, Any]:
        problems = validator(arguments)
        if not isinstance(arguments, dict):
            raise ToolArgumentsError(f"the arguments must be a JSON object, got {show(arguments)}")
        if problems:
            raise ToolArgumentsError(_problem_text(problems))
        return arguments

    return ArgumentSchema(schema=schema, description=description, check=check)


def schema_validator(schema: JsonValue, where: str) -> Callable[[JsonValue], list[str]]:
    """Return a function that lists what is wrong with a value by a JSON Schema.

    Raises:
        ExtensionError: The schema is not a valid JSON Schema.
        MissingExtraError: jsonschema_rs is not installed.
    """
    try:
        import jsonschema_rs
    except ImportError as error:
        raise MissingExtraError("agent", "a tool with a JSON schema of its own") from error
    try:
        validator = jsonschema_rs.validator_for(schema)
    except (jsonschema_rs.ValidationError, ValueError, TypeError) as error:
        raise ExtensionError(
            where, f"its JSON schema is not valid: {_first_line(error)}", "Correct the schema."
        ) from error

    def problems(value: JsonValue) -> list[str]:
        try:
            return [
                f"{_path(tuple(error.instance_path))}: {error.message}"
                for error in validator.iter_errors(value)
            ]
        except (ValueError, TypeError) as error:
            # Values that JSON cannot hold, or that are too deep, do not reach the schema at all.
            return [f"$: {_first_line(error)}"]

    return problems


def _import_pydantic() -> tuple[Any, Any]:
    """pydantic, and its core."""
    try:
        import pydantic
        import pydantic_core
    except ImportError as error:
        raise MissingExtraError("agent", "a tool's schema") from error
    return pydantic, pydantic_core


def _check_call(core: Any, adapter: Any, arguments: JsonValue) -> dict[str, Any]:
    if not isinstance(arguments, dict):
        raise ToolArgumentsError(f"the arguments must be a JSON object, got {show(arguments)}")
    try:
        return dict(adapter.validate_python(core.ArgsKwargs((), arguments)))
    except core.ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        known = list(adapter.json_schema().get("properties", {}))
        raise ToolArgumentsError(
            _problem_text([_describe(problem, known) for problem in found])
        ) from error


def _describe(problem: Mapping[str, Any], known: list[str]) -> str:
    path = _path(problem["loc"])
    match problem["type"]:
        case "missing_argument" | "missing_keyword_only_argument" | "missing":
            return f"{path}: is required"
        case "unexpected_keyword_argument" | "extra_forbidden":
            near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            return f"{path}: is not a parameter, {hint}"
        case _:
            return f"{path}: {problem['msg']}, got {show(problem['input'])}"


def _problem_text(problems: list[str]) -> str:
    more = len(problems) - _PROBLEMS_MAX
    lines = problems[:_PROBLEMS_MAX] + ([f"and {more} more"] if more > 0 else [])
    return "\n".join(lines)


def _path(location: tuple[str | int, ...]) -> str:
    path = "$"
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if part.isidentifier() else f"[{show(part)}]"
    return path


def _read_docstring(shape: FunctionShape, extension: str) -> tuple[str, dict[str, str]]:
    """Return the description, and what the docstring says of each parameter."""
    try:
        import griffe
    except ImportError as error:
        raise MissingExtraError("agent", "a tool's schema") from error
    texts, documented = [], {}
    docstring = griffe.Docstring(inspect.getdoc(shape.function) or "")
    for section in griffe.parse_google(docstring, warnings=False):
        if section.kind is griffe.DocstringSectionKind.text:
            texts.append(str(section.value).strip())
        elif section.kind is griffe.DocstringSectionKind.parameters:
            for parameter in section.value:
                documented[parameter.name] = " ".join(parameter.description.split())
    known = list(inspect.signature(shape.function).parameters)
    for name in documented:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ExtensionError(
                extension,
                f"{shape.where} documents {name!r}, which is not one of its parameters",
                f"Did you mean {near[0]!r}?" if near else f"They are {', '.join(known)}.",
            )
    if shape.call_parameter is not None:
        documented.pop(shape.call_parameter, None)
    return "\n\n".join(texts), documented


def _without_titles(schema: Any) -> Any:
    """Drop the titles that pydantic makes from names: they only cost tokens."""
    if not isinstance(schema, dict):
        return schema
    plain = {key: value for key, value in schema.items() if key != "title"}
    for key in ("properties", "$defs", "patternProperties"):
        if isinstance(plain.get(key), dict):
            plain[key] = {name: _without_titles(part) for name, part in plain[key].items()}
    for key in ("items", "additionalProperties", "not"):
        if key in plain:
            plain[key] = _without_titles(plain[key])
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(plain.get(key), list):
            plain[key] = [_without_titles(part) for part in plain[key]]
    return plain


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
