"""Hooks, sections and wraps: the parts of an extension that attach to something by name.

All are plain frozen records. A hook names its task by kind, not by class: after a reload the class
is another object, the kind is the same.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any

import attrs

from pidurable.errors import ExtensionError, show
from pidurable.registry._env import Env
from pidurable.registry._tool import NAME_PATTERN, Tool
from pidurable.tasks._definition import Task, definition_info

__all__ = [
    "Hook",
    "InstalledHook",
    "Section",
    "SectionInput",
    "SectionWrap",
    "ToolWrap",
    "hook",
    "section",
    "wrap_section",
    "wrap_tool",
]

SECTION_KEY = re.compile(r"[a-z][a-z0-9_-]{0,63}")


@attrs.frozen(kw_only=True)
class SectionInput:
    """What a section is rendered from. Rendering the same input must give the same text.

    A text that changes with every request costs the provider's cache: use `now` sparingly.
    """

    model: str | None
    instructions: str | None
    cwd: str | None
    extensions: tuple[str, ...]
    """Those that the conversation selects, in the order of installation."""
    tools: tuple[str, ...]
    """The names of the tools that are offered."""
    env: Env
    now: datetime
    """The moment of the request, in UTC."""
    shown: Mapping[str, str] = attrs.Factory(dict)
    """What the model has been told last, by section key."""


Render = Callable[[SectionInput], "str | Awaitable[str | None] | None"]


@attrs.frozen(kw_only=True)
class Section:
    """A named part of the system prompt."""

    key: str
    render_input: Render
    tag: bool = True
    """Whether the text is shown between tags that carry the key."""
    extension: str = ""
    """The extension that brought it; set by the registry."""
    _anchor: object = attrs.field(default=None, alias="anchor", repr=False, eq=False)

    async def render(self, input: SectionInput) -> str | None:
        """Return the text for this input, or None for none. Blank text counts as none.

        Raises:
            TypeError: It is neither; and whatever the section's own code raises.
        """
        text: object = self.render_input(input)
        if inspect.isawaitable(text):
            text = await text
        if text is not None and not isinstance(text, str):
            raise TypeError(f"it returned {show(text)}, not a str or None")
        return text if text and text.strip() else None


def section(key: str, render: Render, *, tag: bool = True) -> Section:
    """Make a part of the system prompt.

    Args:
        key: Its name; a later extension's section of the same key takes its place.
        render: Returns the text, or None or nothing but blanks for no section; may be async.
        tag: Show the text between tags that carry the key.

    Raises:
        ExtensionError: The key is not a lower-case name, or `render` cannot be called.
    """
    if not isinstance(key, str) or SECTION_KEY.fullmatch(key) is None:
        raise ExtensionError(
            f"section {key}",
            f"the key {show(key)} is not allowed",
            "Use up to 64 lower-case letters, digits, `_` or `-`, a letter first.",
        )
    if not callable(render):
        raise ExtensionError(
            f"section {key}", f"render is {show(render)}", "Give a function of a SectionInput."
        )
    return Section(key=key, render_input=render, tag=tag)


@attrs.frozen(kw_only=True)
class ToolWrap:
    """A decorator of the tool of a name, whichever extension brings it."""

    name: str
    wrap: Callable[[Tool[..., Any]], Tool[..., Any]]


@attrs.frozen(kw_only=True)
class SectionWrap:
    """A decorator of the section of a key, whichever extension brings it."""

    key: str
    wrap: Callable[[Render], Render]


def wrap_tool(name: str, wrapper: Callable[[Tool[..., Any]], Tool[..., Any]]) -> ToolWrap:
    """Decorate the tool of a name, after overrides; a reload of its extension keeps the wrap.

    Args:
        name: The tool; nothing happens while no selected extension has it.
        wrapper: Takes the tool and returns one of the same name: see `Tool.around`. It must be
            pure; the registry may call it often.

    Raises:
        ExtensionError: The name is no tool's name, or the wrapper cannot be called.
    """
    if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None:
        raise ExtensionError(f"wrap_tool {name}", f"{show(name)} is no tool's name", "Correct it.")
    if not callable(wrapper):
        raise ExtensionError(
            f"wrap_tool {name}", f"the wrapper is {show(wrapper)}", "Give a function of a Tool."
        )
    return ToolWrap(name=name, wrap=wrapper)


def wrap_section(key: str, wrapper: Callable[[Render], Render]) -> SectionWrap:
    """Decorate the section of a key, after overrides; a reload of its extension keeps the wrap.

    Args:
        key: The section; nothing happens while no selected extension has it.
        wrapper: Takes the render function and returns another. It must be pure.

    Raises:
        ExtensionError: The key is no section's key, or the wrapper cannot be called.
    """
    if not isinstance(key, str) or SECTION_KEY.fullmatch(key) is None:
        raise ExtensionError(
            f"wrap_section {key}", f"{show(key)} is no section's key", "Correct it."
        )
    if not callable(wrapper):
        raise ExtensionError(
            f"wrap_section {key}", f"the wrapper is {show(wrapper)}", "Give a function of a render."
        )
    return SectionWrap(key=key, wrap=wrapper)


Handler = Callable[..., Any]


@attrs.frozen(kw_only=True)
class Hook:
    """Handlers for the hooks of one kind of task."""

    kind: str
    handlers: Mapping[str, Handler]


@attrs.frozen(kw_only=True, eq=False)
class InstalledHook:
    """A handler with the extension that it came from, for reports. Calling it calls the handler."""

    extension: str
    name: str
    handler: Handler
    _anchor: object = attrs.field(default=None, alias="anchor", repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the handler."""
        return self.handler(*args, **kwargs)


def hook(task_class: type[Task[Any, Any, Any]], /, **handlers: Handler) -> Hook:
    """Attach handlers to the hooks of a task definition.

    They are asked for tasks of conversations that select the extension, in the order of
    installation. Where a hook decides, the first answer that is not None counts, and who comes
    later is not asked; what a handler raises is reported, and it is skipped.

    ```python
    from typing import Protocol

    import attrs, trio
    from pidurable import Extension, Registry, Task, TaskContext, hook, nothing_to_undo
    from pidurable import open_harness, phase

    class PaymentHooks(Protocol):
        async def before_charge(self, cents: int) -> str | None: ...

    @attrs.frozen
    class Charge:
        pass

    class Payment(Task[int, Charge, str]):
        name = "shop.payment"
        hooks = PaymentHooks
        abort = nothing_to_undo

        def initial(self, cents: int) -> Charge:
            return Charge()

        @phase
        async def charge(self, at: Charge, ctx: TaskContext[int, Charge, str]) -> None:
            hooks: PaymentHooks = ctx.hooks
            await ctx.complete(await hooks.before_charge(ctx.input) or "paid")

    async def limit(cents: int) -> str | None:
        return "too much" if cents > 10_000 else None

    async def main() -> None:
        registry = Registry()
        registry.install(Extension("shop", tasks=[Payment()]))
        registry.install(Extension("limits", hooks=[hook(Payment, before_charge=limit)]))
        async with open_harness(":memory:", registry=registry) as harness:
            root = await harness.root()
            small = await harness.wait_for_task(await root.create_task(Payment, 1_999))
            large = await harness.wait_for_task(await root.create_task(Payment, 99_999))
            assert (small.result, large.result) == ("paid", "too much")

    trio.run(main)
    ```

    Args:
        task_class: The definition; handlers run for its kind, whichever version is installed.
        handlers: By the name of the hook. Each takes what the method of the protocol class takes,
            and may be async or not.

    Raises:
        ExtensionError: The class is no task definition or has no hook of a name, a handler cannot
            be called as it would be, or none is given.
    """
    where = f"hook on {getattr(task_class, '__name__', show(task_class))}"
    if not isinstance(task_class, type) or not issubclass(task_class, Task):
        raise ExtensionError(where, f"{show(task_class)} is not a Task class", "Give the class.")
    if not handlers:
        raise ExtensionError(where, "no handler is given", "Write hook(Task, name=handler).")
    info = definition_info(task_class)
    known = info.questions
    for name, handler in handlers.items():
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            remedy = (
                f"Did you mean {near[0]!r}?"
                if near
                else (f"It has {', '.join(sorted(known))}." if known else "It has no hooks.")
            )
            raise ExtensionError(where, f"it has no hook {name!r}", remedy)
        if not callable(handler):
            raise ExtensionError(where, f"{name} is {show(handler)}", "Give a function.")
        if not known[name].accepts(handler):
            raise ExtensionError(
                where,
                f"the handler {show(handler)} cannot be called as {known[name]}, which is how it "
                "is asked",
                "Let it take these parameters, in this order.",
            )
    return Hook(kind=info.name, handlers=dict(handlers))
