"""Mistakes that are found when definitions are bundled and installed: one function each.

What is said of each is kept in `tests/public/snapshots/running_errors.txt`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import attrs

from pidurable import Extension, Registry, Task, nothing_to_undo, phase

INSTALLS: dict[str, Callable[[], object]] = {}

InputT = TypeVar("InputT")
CheckpointT = TypeVar("CheckpointT")
ResultT = TypeVar("ResultT")


def installing(make: Callable[[], object]) -> Callable[[], object]:
    INSTALLS[make.__name__] = make
    return make


@attrs.frozen
class Prepare:
    pass


class Plain:
    """A class that says nothing of what is in it."""


@attrs.frozen
class Locked:
    """A checkpoint that holds what lives in one process only."""

    lock: threading.Event


@attrs.frozen
class ByNumber:
    prices: dict[int, str]


@attrs.frozen
class Unresolved:
    card: Kard  # type: ignore[name-defined]  # noqa: F821


class Base(Task[InputT, CheckpointT, ResultT], Generic[InputT, CheckpointT, ResultT]):
    """What the definitions below have in common."""

    abort = nothing_to_undo

    def initial(self, input: Any) -> Any:
        return Prepare()


class Payment(Base[str, Prepare, None]):
    name = "shop.payment"

    def __repr__(self) -> str:
        return "Payment()"

    @phase
    async def prepare(self, at: Prepare, ctx: Any) -> None:
        await ctx.complete(None)


class Paying(Payment):
    """Another definition that forgot to choose a name of its own."""


def install(*tasks: Task[Any, Any, Any], registry: Registry | None = None) -> None:
    (registry or Registry()).install(Extension("shop", tasks=tasks))


@installing
def the_class_instead_of_an_instance() -> None:
    install(Payment)  # type: ignore[arg-type]


@installing
def one_task_without_a_list() -> None:
    Extension("shop", tasks=Payment())  # type: ignore[arg-type]


@installing
def a_task_without_an_extension() -> None:
    Registry().install(Payment())  # type: ignore[arg-type]


@installing
def something_else_among_the_tasks() -> None:
    Extension("shop", tasks=["shop.payment"])  # type: ignore[list-item]


@installing
def one_task_twice() -> None:
    install(Payment(), Payment())


@installing
def two_tasks_of_one_kind() -> None:
    install(Payment(), Paying())


@installing
def a_kind_of_another_extension() -> None:
    registry = Registry()
    registry.install(Extension("bank", tasks=[Payment()]))
    install(Paying(), registry=registry)


@installing
def two_extensions_of_one_name() -> None:
    Registry().replace(install=[Extension("shop"), Extension("shop")])


@installing
def a_base_instead_of_a_definition() -> None:
    class Unnamed(Base[str, Prepare, ResultT], Generic[ResultT]):
        pass

    install(Unnamed())


@installing
def an_input_that_cannot_be_stored() -> None:
    class Pay(Base[Plain, Prepare, None]):
        name = "shop.pay"

        @phase
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

    install(Pay())


@installing
def a_result_that_cannot_be_stored() -> None:
    class Pay(Base[str, Prepare, Iterator[str]]):
        name = "shop.pay"

        @phase
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

    install(Pay())


@installing
def a_checkpoint_that_cannot_be_stored() -> None:
    class Pay(Base[str, Prepare | Locked, None]):
        name = "shop.pay"

        @phase
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

        @phase
        async def locked(self, at: Locked, ctx: Any) -> None:
            pass

    install(Pay())


@installing
def a_checkpoint_with_numbers_as_keys() -> None:
    class Pay(Base[str, Prepare | ByNumber, None]):
        name = "shop.pay"

        @phase
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

        @phase
        async def by_number(self, at: ByNumber, ctx: Any) -> None:
            pass

    install(Pay())


@installing
def a_checkpoint_whose_annotation_does_not_resolve() -> None:
    class Pay(Base[str, Prepare | Unresolved, None]):
        name = "shop.pay"

        @phase
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

        @phase
        async def unresolved(self, at: Unresolved, ctx: Any) -> None:
            pass

    install(Pay())
