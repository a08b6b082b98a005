"""Tools: typed async functions that a model may call.

`@tool` turns a function into a frozen `Tool`. Its mistakes are found at two moments: what can be
seen at once (not async, no docstring, a parameter without annotation) when the decorator runs, what
needs evaluated annotations (the schema) when the registry installs it. A `Tool` is still callable
like its function, so that a test needs nothing but a stand-in for the call.

What a tool works with, and gives back, is in `_call`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any, Generic, Literal, cast, overload

import attrs
from typing_extensions import ParamSpec, TypeVar

from pidurable.errors import ExtensionError, show
from pidurable.records._limits import OUTPUT_BYTES_MAX, OUTPUT_LINES_MAX
from pidurable.records._messages import JsonValue
from pidurable.registry._arguments import (
    ArgumentSchema,
    FunctionShape,
    ToolArgumentsError,
    foreign_schema,
    function_schema,
    names_call,
    read_hints,
    schema_validator,
)
from pidurable.registry._call import ToolCall, ToolResult

__all__ = [
    "Reach",
    "Replay",
    "Tool",
    "ToolArgumentsError",
    "ToolCall",
    "ToolResult",
    "schema_tool",
    "tool",
]

P = ParamSpec("P")
R = TypeVar("R", covariant=True, default=Any)

Replay = Literal["interrupt", "safe", "reconcile", "park"]
Reach = Literal["private", "untrusted", "outward"]
Invoke = Callable[[Mapping[str, Any], "ToolCall"], Awaitable[object]]
Reconcile = Callable[[Mapping[str, Any], "ToolCall"], Awaitable[object]]
"""Tell what became of an interrupted call: a `ToolResult` (it happened, with this result), False
(it did not happen: run it) or None (unknown)."""

NAME_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_REPLAYS = ("safe", "reconcile", "interrupt", "park")
_REACHES = frozenset({"private", "untrusted", "outward"})


@attrs.frozen(kw_only=True, eq=False)
class Tool(Generic[P, R]):
    """A tool, made by `@tool` or `schema_tool`. Calling it calls its function."""

    name: str
    function: Callable[P, Awaitable[R]]
    replay: Replay = "interrupt"
    reconcile: Reconcile | None = None
    version: int = 1
    sequential: bool = False
    timeout: float | None = None
    output_schema: JsonValue = None
    output_bytes_max: int = OUTPUT_BYTES_MAX
    output_lines_max: int = OUTPUT_LINES_MAX
    output_keep: Literal["head", "tail"] = "head"
    permission_text: Callable[[Mapping[str, Any]], str] | None = None
    reach: frozenset[Reach] = frozenset()
    extension: str = ""
    """The extension that brought it; set by the registry."""
    _shape: FunctionShape | None = attrs.field(alias="shape", repr=False)
    _given: ArgumentSchema | None = attrs.field(default=None, alias="given", repr=False)
    _around: tuple[Around, ...] = attrs.field(default=(), alias="around_", repr=False)
    _anchor: object = attrs.field(default=None, alias="anchor", repr=False)
    """Keeps the installed version of its extension in use while the tool is held."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """Call the function itself, without validation: for tests."""
        return self.function(*args, **kwargs)

    @cached_property
    def _arguments(self) -> ArgumentSchema:
        if self._given is not None:
            return self._given
        assert self._shape is not None
        return function_schema(self._shape, self.extension or self._shape.function.__module__)

    @property
    def description(self) -> str:
        """The docstring without its sections."""
        return self._arguments.description

    @property
    def schema(self) -> JsonValue:
        """The JSON schema of the arguments. Do not change it."""
        return self._arguments.schema

    def build(self) -> None:
        """Build schema and description now.

        Raises:
            ExtensionError: The function's annotations or docstring give no schema.
            MissingExtraError: The extra `agent` is not installed.
        """
        self.schema  # noqa: B018 - built and kept at first use
        self._check_structured  # noqa: B018

    def validate(self, arguments: JsonValue) -> dict[str, Any]:
        """Check what a model sent and return the arguments for `invoke`.

        Scalars are converted where nothing is lost ("3" for an int); unknown names are refused.

        Raises:
            ToolArgumentsError: They do not fit; the text names every problem by its path.
        """
        return self._arguments.check(arguments)

    async def invoke(self, arguments: Mapping[str, Any], call: ToolCall) -> object:
        """Run the tool with validated arguments."""
        invoke: Invoke = self._run
        for around in self._around:
            invoke = _bind(around, invoke)
        return await invoke(arguments, call)

    async def _run(self, arguments: Mapping[str, Any], call: ToolCall) -> object:
        function = cast("Callable[..., Awaitable[object]]", self.function)
        if self._shape is None:
            return await function(arguments, call)
        if self._shape.call_parameter is None:
            return await function(**arguments)
        return await function(**arguments, **{self._shape.call_parameter: call})

    def around(self, handler: Around) -> Tool[P, R]:
        """Return a tool that runs `handler(arguments, call, invoke)` in its place.

        The handler may change the arguments, look at the result, or not call `invoke` at all.
        """
        return attrs.evolve(self, around_=(*self._around, handler))

    @cached_property
    def _check_structured(self) -> Callable[[JsonValue], list[str]] | None:
        if self.output_schema is None:
            return None
        return schema_validator(self.output_schema, self.extension or self.name)

    def check_structured(self, value: JsonValue) -> None:
        """Check a structured result against the declared schema.

        Raises:
            ToolArgumentsError: It does not fit; the text names every problem by its path.
        """
        problems = self._check_structured(value) if self._check_structured is not None else []
        if problems:
            raise ToolArgumentsError("\n".join(problems))

    def permission_for(self, arguments: Mapping[str, Any]) -> str:
        """Return the text that permission patterns match: by default the arguments as JSON."""
        if self.permission_text is not None:
            return self.permission_text(arguments)
        return json.dumps(arguments, sort_keys=True, ensure_ascii=False, default=str)

    def digest(self) -> str:
        """Return a hash of what a permission covers: another digest is another tool."""
        facts = {
            "extension": self.extension,
            "name": self.name,
            "description": self.description,
            "schema": self.schema,
            "output_schema": self.output_schema,
            "replay": self.replay,
            "version": self.version,
        }
        text = json.dumps(facts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


Around = Callable[[Mapping[str, Any], ToolCall, Invoke], Awaitable[object]]


def _bind(around: Around, inner: Invoke) -> Invoke:
    async def invoke(arguments: Mapping[str, Any], call: ToolCall) -> object:
        return await around(arguments, call, inner)

    return invoke


@overload
def tool(function: Callable[P, Awaitable[R]], /) -> Tool[P, R]: ...


@overload
def tool(
    *,
    name: str | None = None,
    replay: Replay = "interrupt",
    reconcile: Reconcile | None = None,
    version: int = 1,
    sequential: bool = False,
    timeout: float | None = None,
    output_schema: JsonValue = None,
    output_bytes_max: int = OUTPUT_BYTES_MAX,
    output_lines_max: int = OUTPUT_LINES_MAX,
    output_keep: Literal["head", "tail"] = "head",
    permission_text: Callable[[Mapping[str, Any]], str] | None = None,
    reach: frozenset[Reach] | set[Reach] = frozenset(),
) -> Callable[[Callable[P, Awaitable[R]]], Tool[P, R]]: ...


def tool(
    function: Callable[..., Awaitable[Any]] | None = None, /, **options: Any
) -> Tool[..., Any] | Callable[[Callable[..., Awaitable[Any]]], Tool[..., Any]]:
    """Make a tool of a typed async function.

    The schema comes from the signature, the description and the arguments' docs from the
    docstring (Google style). The parameter annotated `ToolCall` receives the call's own API and is
    not part of the schema. The schema is built when the tool is installed.

    Args:
        function: The function; `@tool` may be written without brackets.
        name: What the model calls it; by default the function's name.
        replay: What to do when a crash is found between intent and result: `interrupt` tells the
            model that the outcome is unknown, `safe` runs it again, `reconcile` asks the function
            given as `reconcile`, `park` asks a person.
        reconcile: `async (arguments, call)`: a `ToolResult` if it happened, False if it did not,
            None if that cannot be told.
        version: Raise it when the meaning changes: granted permissions do not cover it then.
        sequential: A round with this tool runs its calls one after the other.
        timeout: Most seconds that a call may take; None for no limit.
        output_schema: JSON Schema of the structured result.
        output_bytes_max: Most bytes of output that are kept.
        output_lines_max: Most lines of output that are kept.
        output_keep: Which end of the output is kept, `head` or `tail`.
        permission_text: Makes of the arguments the text that permission patterns match.
        reach: What it brings together: `private` data, `untrusted` text, an `outward` channel.

    Raises:
        ExtensionError: The function cannot be a tool; the text says why and what to change.
    """
    frame = sys._getframe(1)
    # Local classes in annotations can be resolved only here, where their names are still known.
    names = {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)

    def decorate(function: Callable[..., Awaitable[Any]]) -> Tool[..., Any]:
        return _make_tool(function, names, **options)

    return decorate if function is None else decorate(function)


def _make_tool(
    function: Callable[..., Awaitable[Any]],
    names: Mapping[str, Any],
    *,
    name: str | None = None,
    reach: frozenset[Reach] | set[Reach] = frozenset(),
    **options: Any,
) -> Tool[..., Any]:
    if not callable(function) or not hasattr(function, "__name__"):
        raise ExtensionError(
            "tool", f"{show(function)} is not a function", "Decorate an async function."
        )
    where = f"tool {name or function.__name__!r} (function {function.__qualname__})"
    extension = function.__module__
    if not inspect.iscoroutinefunction(function):
        raise ExtensionError(
            extension,
            f"{where} is not async",
            "Write `async def`; call blocking code with `await call.run_blocking(...)`.",
        )
    if not (function.__doc__ or "").strip():
        raise ExtensionError(
            extension,
            f"{where} has no docstring",
            "Say in it what the tool does: it is all that the model learns of it.",
        )
    call_parameter = _check_signature(function, where)
    try:
        hints = read_hints(function, names)
    except Exception:
        # Perhaps a class that is defined further down. What is still wrong when the tool is
        # installed is an error there, with its cause.
        hints = None
    shape = FunctionShape(
        function=function, where=where, call_parameter=call_parameter, hints=hints
    )
    made: Tool[..., Any] = Tool(
        name=name or function.__name__,
        function=function,
        reach=frozenset(reach),
        shape=shape,
        **options,
    )
    _check_options(made, extension, where)
    return made


def schema_tool(
    name: str,
    description: str,
    schema: JsonValue,
    function: Callable[[Mapping[str, Any], ToolCall], Awaitable[Any]],
    **options: Any,
) -> Tool[[Mapping[str, Any], ToolCall], Any]:
    """Make a tool of a JSON Schema and an async function `(arguments, call)`.

    For tools whose schema is not ours, such as those of an MCP server.

    Args:
        name: What the model calls it.
        description: What the model is told.
        schema: JSON Schema of the arguments.
        function: Receives the checked arguments and the call.
        options: Those of `tool`.

    Raises:
        ExtensionError: The schema is not valid, or an option is not.
        MissingExtraError: The extra `agent` is not installed.
    """
    where = f"tool {name!r}"
    made: Tool[[Mapping[str, Any], ToolCall], Any] = Tool(
        name=name,
        function=function,
        shape=None,
        given=foreign_schema(schema, description, where),
        **options,
    )
    _check_options(made, function.__module__, where)
    return made


def _check_signature(function: Callable[..., Any], where: str) -> str | None:
    """Check the parameters; return the one that receives the call."""
    call_parameter = None
    for name, parameter in inspect.signature(function).parameters.items():
        problem, remedy = "", ""
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            problem, remedy = "takes any number of arguments", "Take a list instead."
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            problem, remedy = "takes any names", "Name each parameter, or take a dict."
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            problem, remedy = "is positional-only", "Models name their arguments; drop the `/`."
        elif parameter.annotation is inspect.Parameter.empty:
            problem = "has no annotation"
            remedy = f"Annotate it, as in `{name}: str`; the schema is made of it."
        elif names_call(parameter.annotation):
            if call_parameter is not None:
                problem = f"is a second ToolCall, after {call_parameter!r}"
                remedy = "Keep one of them."
            call_parameter = name
        if problem:
            raise ExtensionError(
                function.__module__, f"{where}: parameter {name!r} {problem}", remedy
            )
    return call_parameter


def _check_options(made: Tool[..., Any], extension: str, where: str) -> None:
    def refuse(problem: str, remedy: str) -> ExtensionError:
        return ExtensionError(extension, f"{where}: {problem}", remedy)

    if NAME_PATTERN.fullmatch(made.name) is None:
        raise refuse(
            f"the name {show(made.name)} is not allowed",
            "Use 1 to 64 letters, digits, `_` or `-`; providers accept nothing else.",
        )
    if made.replay not in _REPLAYS:
        raise refuse(f"replay is {show(made.replay)}", f"Use one of {', '.join(_REPLAYS)}.")
    if (made.replay == "reconcile") != (made.reconcile is not None):
        raise refuse(
            f"replay is {made.replay!r} and reconcile is {show(made.reconcile)}",
            "Give `replay='reconcile'` and the function together, or neither.",
        )
    if made.reconcile is not None and not inspect.iscoroutinefunction(made.reconcile):
        raise refuse("reconcile is not async", "Write `async def reconcile(arguments, call)`.")
    if not made.reach <= _REACHES:
        raise refuse(
            f"reach holds {show(sorted(made.reach - _REACHES))}",
            f"Use some of {', '.join(sorted(_REACHES))}.",
        )
    if made.output_keep not in ("head", "tail"):
        raise refuse(f"output_keep is {show(made.output_keep)}", "Use 'head' or 'tail'.")
    numbers = {
        "version": made.version,
        "output_bytes_max": made.output_bytes_max,
        "output_lines_max": made.output_lines_max,
    }
    for option, number in numbers.items():
        if type(number) is not int or number < 1:
            raise refuse(f"{option} is {show(number)}", "Use an int of at least 1.")
    if made.timeout is not None and not 0 < made.timeout < float("inf"):
        raise refuse(
            f"timeout is {show(made.timeout)}", "Use a number of seconds above 0, or None."
        )
