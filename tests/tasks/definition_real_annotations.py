"""Good definitions in a module whose annotations are real objects: no `annotations` import."""

from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, Generic, TypeVar, Union

import attrs

from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase

if TYPE_CHECKING:
    from pidurable.tasks._context import TaskContext as HiddenContext


@attrs.frozen
class Start:
    pass


@attrs.frozen
class Finish:
    note: str


ItemT = TypeVar("ItemT")

Context = TaskContext[str, Union[Finish, Start], int]  # noqa: UP007


class Real(Task[str, Union[Start, Finish], int]):  # noqa: UP007
    """The union is written with typing.Union, the annotations are classes and quoted names."""

    name = "test.real"
    abort = nothing_to_undo

    def initial(self, text: str) -> Start:
        return Start()

    @phase
    async def begin(self, at: Start, ctx: Context) -> None:
        pass

    @phase
    async def end(self, at: "Finish", ctx: "HiddenContext[str, Any, int]") -> None:
        pass


class Marked(Task[str, Start, int]):
    """The annotation of `at` carries a remark of the user's own."""

    name = "test.marked"
    abort = nothing_to_undo

    def initial(self, text: str) -> Start:
        return Start()

    @phase
    async def begin(self, at: Annotated[Start, "a remark"], ctx: Any) -> None:
        pass


class OpenBase(Task[ItemT, Start, int], Generic[ItemT]):
    """A base whose context still has a type variable, and whose `at` is a ForwardRef."""

    abort = nothing_to_undo

    def initial(self, item: ItemT) -> Start:
        return Start()

    @phase
    async def begin(self, at: ForwardRef("Start"), ctx: TaskContext[ItemT, Start, int]) -> None:
        pass


class Closed(OpenBase[str]):
    name = "test.closed"


class ForeignContext(Task[str, Start, int]):
    """Its `ctx` is a class of the user's own, which is the type checker's business."""

    name = "test.foreign_context"
    abort = nothing_to_undo

    def initial(self, text: str) -> Start:
        return Start()

    @phase
    async def begin(self, at: Start, ctx: dict[str, int]) -> None:
        pass
