"""Tools: schemas, argument checks, mistakes found at decoration, options and results."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, strategies as st
from pydantic import Field

from pidurable.errors import ExtensionError
from pidurable.registry import Tool, ToolArgumentsError, ToolCall, ToolResult, schema_tool, tool

SNAPSHOTS = Path(__file__).with_name("snapshots")


def check_snapshot(name: str, text: str) -> None:
    """Compare with a stored text; PIDURABLE_SNAPSHOTS=write stores it."""
    path = SNAPSHOTS / name
    if os.environ.get("PIDURABLE_SNAPSHOTS") == "write":
        path.write_text(text)

    assert text == path.read_text()


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    """A place."""

    x: int
    title: str = "here"


@tool
async def plain(path: str) -> str:
    """Look at a file."""
    return path


@tool(replay="safe", version=3)
async def rich(
    path: str,
    call: ToolCall,
    *,
    count: int = 3,
    mode: Literal["a", "b"] = "a",
    colour: Colour = Colour.RED,
    points: list[Point] | None = None,
    limit: Annotated[float, Field(gt=0, description="Its own words.")] = 1.5,
    options: dict[str, int] = {},  # noqa: B006 - a mutable default must not be shared, see below
) -> str:
    """Do many things.

    A second paragraph.

    Args:
        path: File to read,
            relative to the folder.
        call: The call.
        count: How many.
        limit: Not shown, because the annotation says it.

    Returns:
        Not part of the description.
    """
    return f"{path} {count} {mode} {colour} {points} {limit} {options} {call}"


def test_schemas_are_as_they_were() -> None:
    """Schema and description of a tool are what its signature and docstring say, and stay so."""
    shown = [
        {"name": each.name, "description": each.description, "schema": each.schema}
        for each in (plain, rich)
    ]

    check_snapshot("tool_schemas.json", json.dumps(shown, indent=1) + "\n")


async def test_a_tool_is_callable_like_its_function() -> None:
    """A test may call a tool directly, without validation and without a registry."""
    assert await plain("a.txt") == "a.txt"


async def test_validated_arguments_reach_the_function() -> None:
    """Arguments arrive as the annotated types, the call beside them, defaults filled in."""
    arguments = rich.validate({"path": "p", "count": "7", "points": [{"x": 1}], "colour": "blue"})

    text = await rich.invoke(arguments, "the call")  # type: ignore[arg-type]

    assert text == ("p 7 a Colour.BLUE [Point(x=1, title='here')] 1.5 {} the call")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "$.path: is required"),
        ({"path": 3}, "$.path: Input should be a valid string, got 3"),
        ({"path": "p", "cuont": 1}, "$.cuont: is not a parameter, did you mean 'count'?"),
        ({"path": "p", "call": 1}, "$.call: is not a parameter, "),
        ({"path": "p", "points": [{"x": 1}, {"x": "a"}]}, "$.points[1].x: Input should be"),
        ({"path": "p", "limit": 0}, "$.limit: Input should be greater than 0, got 0"),
        ('{"path": "p"', "the arguments must be a JSON object, got '{"),
        ([], "the arguments must be a JSON object, got []"),
        (None, "the arguments must be a JSON object, got None"),
    ],
)
def test_a_wrong_argument_is_named_by_its_path(arguments: object, message: str) -> None:
    """What does not fit is refused with a text that names path, value and remedy."""
    with pytest.raises(ToolArgumentsError) as caught:
        rich.validate(arguments)

    assert message in str(caught.value)


def test_every_problem_is_told_at_once() -> None:
    """A model gets all problems of a call in one answer, not one after the other."""
    with pytest.raises(ToolArgumentsError) as caught:
        rich.validate({"count": [], "mode": "c", "x": 1})

    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "$.path",
        "$.count",
        "$.mode",
        "$.x",
    ]


def test_a_flood_of_problems_is_cut() -> None:
    """An error text stays short, however many problems the arguments have."""
    with pytest.raises(ToolArgumentsError) as caught:
        rich.validate({"path": "p", "points": [{} for _ in range(500)]})

    assert str(caught.value).splitlines()[-1] == "and 480 more"


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner)))
def test_no_argument_breaks_the_check(value: Any) -> None:
    """Whatever JSON a model sends, the answer is arguments or ToolArgumentsError."""
    try:
        count = rich.validate({"path": "p", "count": value})["count"]
    except ToolArgumentsError as error:
        count = str(error)

    assert "$.count" in count if isinstance(count, str) else count == int(value)


def test_deeply_nested_arguments_are_refused_like_others() -> None:
    """A structure that is nested 100,000 deep is an argument error, not a crash."""  # C085
    value: Any = 0
    for _ in range(100_000):
        value = [value]

    with pytest.raises(ToolArgumentsError, match=r"\$\.count"):
        rich.validate({"path": "p", "count": value})


# --- mistakes at decoration -------------------------------------------------------------------


def not_async(path: str) -> str:
    """Text."""
    return path


async def no_docstring(path: str) -> str:
    return path


async def no_annotation(path, other: int) -> str:  # type: ignore[no-untyped-def]
    """Text."""
    return str(path)


async def star(*paths: str) -> str:
    """Text."""
    return str(paths)


async def star_star(**paths: str) -> str:
    """Text."""
    return str(paths)


async def slash(path: str, /) -> str:
    """Text."""
    return path


async def two_calls(one: ToolCall, two: ToolCall) -> str:
    """Text."""
    return f"{one}{two}"


async def fine(path: str) -> str:
    """Text."""
    return path


async def undefined(path: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Text."""
    return str(path)


async def opaque(path: Callable[[Path], object]) -> str:
    """Text."""
    return str(path)


async def misdocumented(path: str) -> str:
    """Text.

    Args:
        pth: Nothing.
    """
    return path


async def bad_default(path: Any = object()) -> str:  # noqa: B008
    """Text."""
    return str(path)


MISTAKES: dict[str, Callable[[], object]] = {
    "not async": lambda: tool(not_async),  # type: ignore[call-overload]
    "no docstring": lambda: tool(no_docstring),
    "no annotation": lambda: tool(no_annotation),
    "star": lambda: tool(star),
    "star star": lambda: tool(star_star),
    "positional only": lambda: tool(slash),
    "two calls": lambda: tool(two_calls),
    "bad name": lambda: tool(name="shop.read")(fine),
    "long name": lambda: tool(name="x" * 65)(fine),
    "empty name": lambda: tool(name="é")(fine),
    "bad replay": lambda: tool(replay="sometimes")(fine),  # type: ignore[call-overload]
    "reconcile without function": lambda: tool(replay="reconcile")(fine),
    "function without reconcile": lambda: tool(reconcile=fine)(fine),  # type: ignore[arg-type]
    "sync reconcile": lambda: tool(replay="reconcile", reconcile=not_async)(fine),  # type: ignore[call-overload]
    "bad reach": lambda: tool(reach={"everywhere"})(fine),  # type: ignore[arg-type]
    "bad keep": lambda: tool(output_keep="middle")(fine),  # type: ignore[call-overload]
    "version zero": lambda: tool(version=0)(fine),
    "version bool": lambda: tool(version=True)(fine),
    "no output": lambda: tool(output_bytes_max=0)(fine),
    "timeout zero": lambda: tool(timeout=0)(fine),
    "timeout nan": lambda: tool(timeout=float("nan"))(fine),
    "not a function": lambda: tool(3),  # type: ignore[call-overload]
    "undefined name": lambda: tool(undefined).build(),
    "no schema": lambda: tool(opaque).build(),
    "misdocumented": lambda: tool(misdocumented).build(),
    "default that is no JSON": lambda: tool(bad_default).build(),
    "bad output schema": lambda: tool(output_schema={"type": "strin"})(fine).build(),
    "bad foreign schema": lambda: schema_tool("x", "text", {"type": 3}, no_annotation),
}


def test_mistakes_are_explained_as_they_were() -> None:
    """Each mistake gives an ExtensionError that names function, parameter and remedy."""
    lines = []
    for name, make in MISTAKES.items():
        with pytest.raises(ExtensionError) as caught:
            make()
        text = re.sub(r"0x[0-9a-f]+", "0x...", str(caught.value))
        lines.append(f"{name}: {text}\n")

    check_snapshot("tool_mistakes.txt", "".join(lines))


def test_local_classes_can_be_parameters() -> None:
    """A class of the function that defines the tool resolves, although its name is not global."""

    @dataclass
    class Local:
        x: int

    @tool
    async def look(at: Local) -> str:
        """Look."""
        return str(at.x)

    assert look.validate({"at": {"x": 3}})["at"] == Local(3)


def test_a_call_that_is_imported_for_type_checking_only_is_recognised() -> None:
    """The annotations of call and result need not resolve at run time."""

    async def look(at: int, call: missing.ToolCall) -> Missing:  # type: ignore[name-defined]  # noqa: F821
        """Look."""
        return call

    assert list(tool(look).schema["properties"]) == ["at"]


# --- digest, wraps, foreign schemas, results --------------------------------------------------


def test_the_digest_covers_what_a_permission_covers() -> None:
    """Name, schema, description, replay policy and version change the digest; nothing else does."""
    import attrs

    base = tool(fine)
    same = [tool(fine), tool(timeout=3.0)(fine), tool(output_keep="tail")(fine)]
    others = [
        tool(name="other")(fine),
        tool(replay="safe")(fine),
        tool(version=2)(fine),
        tool(output_schema={"type": "string"})(fine),
        attrs.evolve(base, extension="other"),
        rich,
    ]

    assert {each.digest() for each in same} == {base.digest()}
    assert len({each.digest() for each in [base, *others]}) == len(others) + 1


async def test_wraps_nest_from_inside_out() -> None:
    """The last wrap is the outermost, and each sees what the one inside gave."""

    def add(mark: str) -> Any:
        async def handler(arguments: Mapping[str, Any], call: ToolCall, invoke: Any) -> object:
            return f"{mark}({await invoke({'path': arguments['path'] + mark}, call)})"

        return handler

    wrapped = tool(fine).around(add("a")).around(add("b"))

    assert await wrapped.invoke({"path": "x"}, None) == "b(a(xba))"  # type: ignore[arg-type]


async def test_a_foreign_schema_is_checked_and_passed_on() -> None:
    """A tool with a JSON Schema gets the arguments as they came, once they fit it."""

    async def function(arguments: Mapping[str, Any], call: ToolCall) -> str:
        return f"{arguments} {call}"

    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    made = schema_tool("far", "Far away.", schema, function, replay="safe")

    with pytest.raises(ToolArgumentsError, match=r"\$\.x: \"1\" is not of type \"integer\""):
        made.validate({"x": "1"})
    with pytest.raises(ToolArgumentsError, match="must be a JSON object"):
        made.validate(3)
    assert made.description == "Far away."
    assert await made.invoke(made.validate({"x": 1}), "c") == "{'x': 1} c"  # type: ignore[arg-type]


def test_structured_results_are_checked() -> None:
    """A structured result that does not fit the declared schema is named by its path."""
    made = tool(output_schema={"type": "object", "required": ["a"]})(fine)

    made.check_structured({"a": 1})
    with pytest.raises(ToolArgumentsError, match=r"\"a\" is a required property"):
        made.check_structured({})
    tool(fine).check_structured(object())


def test_permission_texts_default_to_the_arguments() -> None:
    """Without permission_text a pattern matches the arguments as JSON in a fixed order."""
    shown: Tool[..., Any] = tool(permission_text=lambda arguments: arguments["path"])(fine)

    assert tool(fine).permission_for({"b": 1, "a": "é"}) == '{"a": "é", "b": 1}'
    assert shown.permission_for({"path": "x"}) == "x"


def test_a_result_says_only_what_it_was_given() -> None:
    """A ToolResult takes its content by position and leaves everything else unset."""
    result = ToolResult("text", error=True)

    assert (result.content, result.error, result.terminate) == ("text", True, False)
    assert (result.add_tools, result.handoff, result.usage) == ((), None, None)
