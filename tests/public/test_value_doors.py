"""The table of value rules holds at every door: refused with its place, or back exactly."""

# C081, C082, C084, C085: NUL, surrogates, not-a-number and depth at every door, reopened.

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import value_doors
from value_doors import (
    BAD,
    KNOCKS,
    PLACES,
    PLAIN,
    exact,
    place_of,
    plain_problems,
    typed_problems,
)

from pidurable import (
    AgentChange,
    Extension,
    Registry,
    TextBlock,
    ToolResult,
    ToolResultMessage,
    open_harness,
    tool,
)
from pidurable.records._value_rules import VALUE_DOORS, VALUE_RULES
from pidurable.testing import InlineBlocking, ScriptedCall, ScriptedModel, Step


def test_every_door_of_the_table_is_knocked_at() -> None:
    """A door without a knock would be a promise that nobody has tried."""
    assert [door.name for door in VALUE_DOORS] == list(KNOCKS)
    for door in VALUE_DOORS:
        assert not any(word in place_of(door) for word in PLACES if PLACES[word] != word), door


async def test_every_door_takes_and_refuses_strict_json_as_the_table_says(tmp_path: Path) -> None:
    """What is refused leaves the store as it was; the rest comes back after a reopening."""
    assert await plain_problems(lambda: tmp_path / "s.sqlite") == []


async def test_every_door_with_a_type_takes_and_refuses_what_the_table_says(
    tmp_path: Path,
) -> None:
    """Each type comes back as itself after a reopening; what does not fit is refused."""
    assert await typed_problems(lambda: tmp_path / "s.sqlite") == []


def test_the_doors_are_the_same_in_memory_and_without_assert_statements() -> None:
    """Under `python -O` the same is taken and refused, and both backends have the same doors."""
    done = subprocess.run(
        [sys.executable, "-O", "-W", "error", value_doors.__file__],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert done.stdout.splitlines() == [f"optimised=True doors={len(KNOCKS)} wrong=0"], done.stderr
    assert done.returncode == 0


def test_each_rule_with_a_type_is_tried_at_a_door_that_knows_it() -> None:
    """Every type of a refused example is that of an accepted one, so that it has a field."""
    accepted = [e.type for rule in VALUE_RULES for e in rule.accepted]

    missing = [e for rule in VALUE_RULES for e in rule.refused if e.type not in accepted]
    assert missing == []


@attrs.define(eq=False)
class Tools:
    """Two tools, one that notes the argument it gets and one that gives back a value by number."""

    seen: list[Any] = attrs.Factory(list)
    given: list[Callable[[], Any]] = attrs.Factory(list)

    async def run(self, calls: list[ScriptedCall]) -> list[tuple[ToolResultMessage, Any]]:
        """Let a model make all calls in one turn; each call's result, and its details."""

        @tool(name="take", replay="safe")
        async def take(*, value: Any = None) -> str:
            """Take a value."""
            self.seen.append(value)
            return "taken"

        @tool(name="give", replay="safe")
        async def give(number: int) -> ToolResult:
            """Give a value.

            Args:
                number: Which one.
            """
            return ToolResult("given", details=self.given[number]())

        registry = Registry()
        registry.install(Extension("values", tools=[take, give]))
        model = ScriptedModel([Step(calls=tuple(calls)), "done"])
        async with open_harness(
            ":memory:", registry=registry, models=model.models(), blocking=InlineBlocking()
        ) as harness:
            root = await harness.root(agent=AgentChange(model="scripted/model"))
            assert (await (await root.submit("go")).wait()).text == "done"
            model.check()
            entries = [e for e in await root.history(limit=1_000) if e.kind == "pi.tool_result"]
        found = {}
        for entry in entries:
            (message,) = entry.messages
            assert isinstance(message, ToolResultMessage)
            found[message.call[1]] = message, (entry.data or {}).get("details")
        return [found[index] for index in range(len(calls))]


def text_of(message: ToolResultMessage) -> str:
    return "".join(block.text for block in message.blocks if isinstance(block, TextBlock))


async def test_the_arguments_of_tools_are_read_by_the_same_rules() -> None:
    """What is strict JSON reaches the tool exactly; hostile text is told to the model, by rule."""
    texts = [e for rule in VALUE_RULES for e in rule.unread if e.type is None and len(e.value) < 99]
    tools = Tools()
    wrong = [ScriptedCall(name="take", arguments=f'{{"value":{each.value}}}') for each in texts]
    right = [ScriptedCall(name="take", arguments={"value": each.comes_back()}) for _, each in PLAIN]

    results = await tools.run([*wrong, *right])

    assert len(texts) >= 10
    for example, (message, _) in zip(texts, results, strict=False):
        assert (message.is_error, message.code) == (True, "invalid_arguments")
        assert example.says.removesuffix("levels deep") in text_of(message)
    # Calls of one round run beside each other.
    seen = sorted(map(repr, map(exact, tools.seen)))
    assert seen == sorted(repr(exact(each.comes_back())) for _, each in PLAIN)


async def test_the_results_of_tools_are_written_by_the_same_rules() -> None:
    """Details come back exactly; what is refused is an error result that says the rule."""
    tools = Tools(given=[bad.make for _, bad in BAD] + [good.make for _, good in PLAIN])
    calls = [ScriptedCall(name="give", arguments={"number": n}) for n in range(len(tools.given))]

    results = await tools.run(calls)

    for (_, example), (message, _) in zip(BAD, results, strict=False):
        assert (message.is_error, message.code) == (True, "tool_error")
        assert example.says in text_of(message)
    for (_, accepted), (message, details) in zip(PLAIN, results[len(BAD) :], strict=True):
        assert not message.is_error
        assert exact(details) == exact(accepted.comes_back())
