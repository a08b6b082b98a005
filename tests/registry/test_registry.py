"""The registry: what is refused as a whole, what replaces what, what is out of use."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import attrs
import pytest

from pidurable.errors import ExtensionError
from pidurable.registry import (
    Extension,
    LocalEnv,
    Registry,
    SectionInput,
    Tool,
    ToolCall,
    hook,
    section,
    tool,
    wrap_section,
    wrap_tool,
)
from pidurable.tasks._definition import Task, nothing_to_undo, phase


@attrs.frozen
class Start:
    """Nothing has happened yet."""


class Money:
    """A class that has no form in JSON of itself."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


class PayHooks(Protocol):
    """The hooks of a payment."""

    async def before_charge(self, cents: int) -> None: ...


def make_task(kind: str, input_type: Any = int, result_type: Any = str) -> Task[Any, Any, Any]:
    """Make a definition of a kind."""

    class Pay(Task[input_type, Start, result_type]):  # type: ignore[valid-type]
        name = kind
        hooks = PayHooks
        abort = nothing_to_undo

        def initial(self, input: Any) -> Start:
            return Start()

        @phase
        async def start(self, at: Start, ctx: Any) -> None:
            await ctx.complete("done")

    return Pay()


def make_tool(name: str, answer: str) -> Tool[..., Any]:
    """Make a tool that gives an answer."""

    async def function() -> str:
        """Answer."""
        return answer

    return tool(name=name)(function)


async def answers(tools: tuple[Tool[..., Any], ...]) -> dict[str, object]:
    """Call each tool."""
    return {each.name: await each.invoke({}, None) for each in tools}  # type: ignore[arg-type]


@pytest.fixture
def registry() -> Registry:
    """An empty registry."""
    return Registry()


# --- publication ------------------------------------------------------------------------------


async def test_each_publication_is_a_new_snapshot(registry: Registry) -> None:
    """Who took a snapshot keeps what it showed; versions count up; subscribers are told."""
    told: list[int] = []
    unsubscribe = registry.subscribe(lambda: told.append(registry.snapshot.version))
    empty = registry.snapshot

    registry.install(Extension("a", tools=[make_tool("t", "old")]))
    first = registry.snapshot
    registry.install(Extension("a", tools=[make_tool("t", "new")]))
    unsubscribe()
    unsubscribe()
    registry.uninstall("a")

    assert told == [1, 2]
    assert (empty.tools(), registry.snapshot.tools()) == ((), ())
    assert await answers(first.tools()) == {"t": "old"}
    assert registry.snapshot.version == 3


def test_a_replaced_extension_keeps_its_place(registry: Registry) -> None:
    """Installing a name again replaces it where it stands; a new name goes to the end."""
    for name in ("a", "b", "c", "b"):
        registry.install(Extension(name))

    assert registry.snapshot.extensions == ("a", "b", "c")


def test_several_changes_are_one_publication(registry: Registry) -> None:
    """`replace` removes and installs in one step, or does nothing."""
    registry.install(Extension("a", tasks=[make_task("shop.pay")]))
    before = registry.snapshot
    bad = Extension("c", tasks=[make_task("shop.pay"), make_task("shop.pay")])

    with pytest.raises(ExtensionError):
        registry.replace(install=[Extension("b"), bad], remove=["a"])
    assert registry.snapshot is before
    registry.replace(install=[Extension("b", tasks=[make_task("shop.pay")])], remove=["a"])

    assert registry.snapshot.extensions == ("b",)
    assert registry.snapshot.version == before.version + 1


async def test_a_later_tool_replaces_an_earlier_one_in_its_place(registry: Registry) -> None:
    """The order is that of the first, the tool is that of the last, among the selected."""
    registry.install(Extension("a", tools=[make_tool("x", "a"), make_tool("y", "a")]))
    registry.install(Extension("b", tools=[make_tool("z", "b"), make_tool("x", "b")]))
    snapshot = registry.snapshot

    assert await answers(snapshot.tools()) == {"x": "b", "y": "a", "z": "b"}
    assert [each.name for each in snapshot.tools()] == ["x", "y", "z"]
    assert await answers(snapshot.tools(["a", "missing"])) == {"x": "a", "y": "a"}
    assert [each.extension for each in snapshot.tools(["b", "a"])] == ["b", "a", "b"]
    assert snapshot.tool("x", ["a"]) is not snapshot.tool("x")
    assert snapshot.tool("nothing") is None


async def test_a_wrap_survives_the_reload_of_what_it_wraps(registry: Registry) -> None:
    """Wraps are applied by name, after overrides, in the order of installation."""

    def loud(inner: Tool[..., Any]) -> Tool[..., Any]:
        async def handler(arguments: Mapping[str, Any], call: ToolCall, invoke: Any) -> object:
            return f"{await invoke(arguments, call)}!"

        return inner.around(handler)

    registry.install(Extension("wraps", wraps=[wrap_tool("x", loud), wrap_tool("none", loud)]))
    registry.install(Extension("base", tools=[make_tool("x", "old")]))

    registry.install(Extension("base", tools=[make_tool("x", "new")]))

    assert await answers(registry.snapshot.tools()) == {"x": "new!"}
    assert await answers(registry.snapshot.tools(["base"])) == {"x": "new"}


async def test_sections_are_overridden_and_wrapped_by_key(
    registry: Registry, tmp_path: Path
) -> None:
    """A later section takes the place of an earlier one; wraps see its text; blank is nothing."""

    async def later(input: SectionInput) -> str:
        return f"model {input.model}"

    def shout(render: Any) -> Any:
        async def shouted(input: SectionInput) -> str:
            return f"{await render(input)}!"

        return shouted

    registry.install(
        Extension("a", sections=[section("x", lambda _: "a"), section("y", lambda _: " \n")])
    )
    registry.install(
        Extension("b", sections=[section("x", later, tag=False)], wraps=[wrap_section("x", shout)])
    )
    given = SectionInput(
        model="m",
        instructions=None,
        cwd=None,
        extensions=(),
        tools=(),
        env=LocalEnv(tmp_path),
        now=datetime.now(UTC),
    )

    shown = [
        (part.key, part.tag, await part.render(given)) for part in registry.snapshot.sections()
    ]

    assert shown == [("x", False, "model m!"), ("y", True, None)]
    assert [await part.render(given) for part in registry.snapshot.sections(["a"])] == ["a", None]


def test_the_sections_of_a_selection_are_wrapped_once(registry: Registry) -> None:
    """However often a snapshot is asked for them; another publication wraps them anew."""
    wrapped: list[str] = []

    def note(render: Any) -> Any:
        wrapped.append("x")
        return render

    registry.install(Extension("a", sections=[section("x", lambda _: "a")]))
    registry.install(Extension("b", wraps=[wrap_section("x", note)]))
    snapshot = registry.snapshot
    wrapped.clear()

    found = [snapshot.sections(names) for names in (["a", "b"], ["b", "a"], ("a", "b"))]

    assert wrapped == ["x"]
    assert [[each.key for each in sections] for sections in found] == [["x"]] * 3
    assert [each.key for each in snapshot.sections(["a"])] == ["x"]
    assert wrapped == ["x"]

    registry.install(Extension("a", sections=[section("x", lambda _: "again")]))
    wrapped.clear()
    registry.snapshot.sections(["a", "b"])

    assert wrapped == ["x"]


def test_definitions_are_found_by_kind(registry: Registry) -> None:
    """A kind gives its definition; an unknown one gives nothing, and the nearest known name."""
    pay = make_task("shop.pay")
    registry.install(Extension("a", tasks=[pay]))
    snapshot = registry.snapshot

    assert snapshot.definition("shop.pay") is pay
    assert dict(snapshot.definitions) == {"shop.pay": pay}
    assert snapshot.definition("shop.payy") is None
    assert snapshot.nearest_kind("shop.payy") == "shop.pay"
    assert snapshot.nearest_kind("quite.different") is None


def test_hooks_are_found_by_kind_after_a_reload(registry: Registry) -> None:
    """Handlers come in the order of installation, from the selected extensions, by the kind."""
    first, again = make_task("shop.pay"), make_task("shop.pay")
    handlers = [lambda cents: cents + 1, lambda cents: cents + 2]
    for name, handler in zip("ab", handlers, strict=True):
        registry.install(Extension(name, hooks=[hook(type(first), before_charge=handler)]))
    snapshot = registry.snapshot

    found = snapshot.hooks(type(again), "before_charge")

    assert [(each.extension, each.name, each(0)) for each in found] == [
        ("a", "before_charge", 1),
        ("b", "before_charge", 2),
    ]
    assert [each(0) for each in snapshot.hooks("shop.pay", "before_charge", ["b"])] == [2]
    assert snapshot.hooks("shop.other", "before_charge") == ()


def test_codecs_of_extensions_are_in_the_snapshot(registry: Registry) -> None:
    """A type with a codec can be an input, and the snapshot's codec writes it."""
    pair = (lambda money: money.cents, Money)
    registry.install(Extension("a", tasks=[make_task("shop.pay", Money)], codecs={Money: pair}))

    assert registry.snapshot.codec.encode(Money(3), Money) == 3
    assert registry.snapshot.codec.decode(4, Money).cents == 4


# --- refusals ---------------------------------------------------------------------------------


def test_what_does_not_fit_changes_nothing(registry: Registry) -> None:
    """Each refused installation says what and where, and leaves the snapshot as it was."""  # C096
    pair = (lambda money: money.cents, Money)
    registry.install(Extension("base", tasks=[make_task("shop.pay")], codecs={Money: pair}))
    before = registry.snapshot

    async def unresolved(x: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
        """Text."""
        return str(x)

    def broken(inner: Any) -> Any:
        raise RuntimeError("on purpose")

    class Plain:
        pass

    class Alike(type(make_task("shop.a"))):  # type: ignore[misc]
        pass

    class Other(Alike):
        pass

    @attrs.frozen
    class Unresolved:
        field: Hidden  # type: ignore[name-defined]  # noqa: F821

    refused = {
        "the task kind 'shop.pay', as .* of the extension 'base' does": Extension(
            "x", tasks=[make_task("shop.pay")]
        ),
        "it has the task .* twice": Extension(
            "x", tasks=[make_task("shop.a"), make_task("shop.a")]
        ),
        "Plain input.*cannot be|input of the task 'shop.a' cannot": Extension(
            "x", tasks=[make_task("shop.a", Plain)]
        ),
        "Alike and Other both define the task kind 'shop.a'": Extension(
            "x", tasks=[Alike(), Other()]
        ),
        "name 'Hidden' is not defined. Define or import that name at the top": Extension(
            "x", tasks=[make_task("shop.a", Unresolved)]
        ),
        "the result of the task 'shop.a' cannot": Extension(
            "x", tasks=[make_task("shop.a", int, Plain)]
        ),
        "codec for Money, as 'base' has": Extension("x", codecs={Money: pair}),
        "has the tool 't' twice": Extension("x", tools=[make_tool("t", "1"), make_tool("t", "2")]),
        "has the section 's' twice": Extension(
            "x", sections=[section("s", lambda _: ""), section("s", lambda _: "")]
        ),
        "annotation that cannot be resolved": Extension("x", tools=[tool(unresolved)]),
        "wrapper of the tool 'u' raised RuntimeError: on purpose": Extension(
            "x", tools=[make_tool("u", "1")], wraps=[wrap_tool("u", broken)]
        ),
        "wrapper of the tool 'u' returned None": Extension(
            "x",
            tools=[make_tool("u", "1")],
            wraps=[wrap_tool("u", lambda _: None)],  # type: ignore[arg-type,return-value]
        ),
        "wrapper of the section 's' raised": Extension(
            "x", sections=[section("s", lambda _: "")], wraps=[wrap_section("s", broken)]
        ),
        "the name is reserved": Extension("pi"),
    }
    for message, extension in refused.items():
        with pytest.raises(ExtensionError, match=message) as caught:
            registry.install(extension)
        assert caught.value.extension == extension.name
        assert registry.snapshot is before


def test_two_extensions_of_one_name_are_not_installed_at_once(registry: Registry) -> None:
    """Neither would be the one that was meant, so nothing changes."""
    before = registry.snapshot

    with pytest.raises(ExtensionError, match="'twin': it is to be installed twice at once"):
        registry.replace(install=[Extension("twin"), Extension("twin")])

    assert registry.snapshot is before


def test_only_built_ins_use_the_reserved_prefix(registry: Registry) -> None:
    """Kinds that begin with `pi.` come with the extension `pi`, which only a harness installs."""

    @attrs.frozen
    class Info:
        """Stands in for a definition: only built-in modules may define such a class."""

    task = make_task("shop.pay")
    info = attrs.evolve(_info_of(task), name="pi.generation")
    type(task).__pidurable_definition__ = info  # type: ignore[attr-defined]

    with pytest.raises(ExtensionError, match=r"'pi.generation' begins with 'pi.', which is res"):
        registry.install(Extension("mine", tasks=[task]))
    registry.install(Extension("pi", tasks=[task]), _built_in=True)

    assert registry.snapshot.definition("pi.generation") is task
    with pytest.raises(ExtensionError, match="it is not installed"):
        registry.uninstall("pi")


def _info_of(task: Task[Any, Any, Any]) -> Any:
    from pidurable.tasks._definition import definition_info

    return definition_info(task)


def test_removing_what_is_not_there_names_what_is(registry: Registry) -> None:
    """A wrong name is an error that lists the installed ones."""
    registry.install(Extension("coding"))

    with pytest.raises(
        ExtensionError, match=r"'codin': it is not installed. Installed are: coding"
    ):
        registry.uninstall("codin")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Extension("Bad Name"), "the name 'Bad Name' is not allowed"),
        (lambda: Extension("x", tools=[print]), r"tools\[0\] is <built-in.*@tool"),
        (lambda: Extension("x", sections=["s"]), r"sections\[0\] is 's'"),
        (lambda: Extension("x", hooks=[3]), r"hooks\[0\] is 3"),
        (lambda: Extension("x", wraps=[3]), r"wraps\[0\] is 3"),
        (lambda: Extension("x", tasks=[type(make_task("shop.a"))]), r"Give an instance: Pay\("),
        (lambda: Extension("x", tasks=[3]), r"tasks\[0\] is 3"),
        (lambda: Extension("x", tasks=make_task("shop.a")), r"tasks is .*, not a list\. Write tas"),
        (lambda: Extension("x", tools=3), r"tools is 3, not a list\. Write tools=\[\.\.\.\]"),
        (lambda: Extension("x", codecs={Money: (1, 2)}), "Map a class to the pair"),
        (lambda: Extension("x", on_unload=3), "on_unload is 3"),
        (lambda: section("Bad", str), "the key 'Bad' is not allowed"),
        (lambda: section("x", "text"), "render is 'text'"),
        (lambda: wrap_tool("a b", str), "'a b' is no tool's name"),
        (lambda: wrap_tool("a", 3), "the wrapper is 3"),
        (lambda: wrap_section("A", str), "'A' is no section's key"),
        (lambda: wrap_section("a", 3), "the wrapper is 3"),
        (lambda: hook(int, x=print), "is not a Task class"),
        (lambda: hook(type(make_task("shop.a"))), "no handler is given"),
        (
            lambda: hook(type(make_task("shop.a")), before_charg=print),
            "no hook 'before_charg'. Did you mean 'before_charge'",
        ),
        (lambda: hook(type(make_task("shop.a")), before_charge=3), "before_charge is 3"),
        (
            lambda: hook(type(make_task("shop.a")), before_charge=lambda: None),
            r"cannot be called as before_charge\(cents\), which is how it is asked",
        ),
        (lambda: Registry().install("x"), "it is not an Extension"),
    ],
)
def test_a_wrong_part_is_refused_where_it_is_made(make: Any, message: str) -> None:
    """Mistakes in the shape of an extension are found at the line that made them."""
    with pytest.raises(ExtensionError, match=message):
        make()


# --- out of use -------------------------------------------------------------------------------


def test_on_unload_waits_for_the_last_user(registry: Registry) -> None:
    """A replaced version is unloaded once, when no snapshot and no tool of it is held any more."""
    calls: list[str] = []

    def make(name: str) -> Extension:
        return Extension("a", tools=[make_tool("t", name)], on_unload=lambda: calls.append(name))

    registry.install(make("old"))
    held = registry.snapshot.tool("t")
    registry.install(make("new"))
    gc.collect()

    assert registry.run_unloads() == ()
    assert calls == []
    del held
    gc.collect()
    assert calls == []  # Never out of the garbage collector.
    registry.run_unloads()
    registry.run_unloads()

    assert calls == ["old"]


def test_a_failing_on_unload_is_returned_and_stops_no_other(registry: Registry) -> None:
    """What on_unload raises comes back for the report; the others run all the same."""
    calls: list[str] = []

    def fail() -> None:
        raise RuntimeError("on purpose")

    registry.install(Extension("a", on_unload=fail))
    registry.install(Extension("b", on_unload=lambda: calls.append("b")))
    registry.uninstall("a")
    registry.uninstall("b")
    gc.collect()

    errors = registry.run_unloads()

    assert [str(error) for error in errors] == ["on purpose"]
    assert calls == ["b"]


def test_an_untouched_extension_is_not_unloaded(registry: Registry) -> None:
    """Changes to others leave an installed extension in use."""
    calls: list[str] = []
    registry.install(Extension("a", on_unload=lambda: calls.append("a")))
    registry.install(Extension("b"))
    registry.uninstall("b")
    gc.collect()
    registry.run_unloads()

    assert calls == []
