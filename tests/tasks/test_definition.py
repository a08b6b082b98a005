"""Definitions: what a class statement accepts, what it refuses, and what is known afterwards."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, Union

import attrs
import definition_real_annotations as real
import pytest
from definition_mistakes import MISTAKES
from typing_extensions import TypeAliasType

from pidurable.errors import DefinitionError, InvalidArgumentError
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import (
    DefinitionInfo,
    PhaseInfo,
    Retry,
    Task,
    definition_info,
    nothing_to_undo,
    phase,
)

if TYPE_CHECKING:
    HiddenContext = TaskContext[str, "Start | Finish", int]

SNAPSHOTS = Path(__file__).parents[1] / "public" / "snapshots" / "definition_errors.txt"

ItemT = TypeVar("ItemT")
InT = TypeVar("InT")
OutT = TypeVar("OutT")


@attrs.frozen
class Start:
    pass


@attrs.frozen
class Finish:
    note: str


@dataclasses.dataclass(frozen=True)
class Pause:
    seconds: float


class Simple(Task[str, Start, int]):
    """A base with everything but phases; its subclasses replace one thing each."""

    name = "test.simple"
    abort = nothing_to_undo

    def initial(self, text: str) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: TaskContext[str, Start, int]) -> None:
        pass


class Open(Task[str, ItemT, int], Generic[ItemT]):
    """A generic base of the user's own."""

    abort = nothing_to_undo

    def initial(self, text: str) -> Any:
        return Start()


# --- messages ---------------------------------------------------------------------------------


def _message_of(make: Callable[[], object]) -> str:
    with pytest.raises(DefinitionError) as caught:
        make()
    return str(caught.value)


@pytest.fixture(scope="module")
def snapshots() -> dict[str, str]:
    """The kept messages by case. PIDURABLE_SNAPSHOTS=write keeps those of today instead."""
    if os.environ.get("PIDURABLE_SNAPSHOTS") == "write":
        kept = {name: _message_of(make) for name, make in MISTAKES.items()}
        SNAPSHOTS.parent.mkdir(exist_ok=True)
        SNAPSHOTS.write_text("".join(f"## {name}\n{text}\n\n" for name, text in kept.items()))
    sections = SNAPSHOTS.read_text().split("## ")[1:]
    return {name: text.strip() for name, _, text in (each.partition("\n") for each in sections)}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_the_message_of_its_snapshot(name: str, snapshots: dict[str, str]) -> None:
    """Each wrong class is refused with the message that is kept for it."""
    assert _message_of(MISTAKES[name]) == snapshots[name]


def test_every_snapshot_belongs_to_a_mistake(snapshots: dict[str, str]) -> None:
    """No message is kept for a case that is not there any more."""
    assert set(snapshots) == set(MISTAKES)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_also_a_type_error_with_facts_as_fields(name: str) -> None:
    """The error names the class, the problem and the remedy as fields, each of them filled."""
    with pytest.raises(TypeError) as caught:
        MISTAKES[name]()

    error = caught.value
    assert isinstance(error, DefinitionError)
    assert error.definition
    assert error.problem
    assert error.problem[-1] != "."
    assert error.remedy.endswith((".", "?"))


# --- good shapes ------------------------------------------------------------------------------


def test_the_info_holds_what_the_class_says() -> None:
    """Types, phases, tags and settings are read off the class."""

    class Hooks(Protocol):
        async def before(self) -> None: ...

    class Full(Task[str, Start | Finish, None]):
        name = "test.full"
        version = 3
        retry = Retry(on=(OSError,), tries=2)
        on_fault = "park"
        abort_timeout = 2.5
        hooks = Hooks

        def initial(self, text: str) -> Start:
            return Start()

        @phase
        async def begin(self, at: Start, ctx: Any) -> None:
            pass

        @phase
        async def end(self, at: Finish, ctx: Any) -> None:
            pass

        async def abort(self, at: Start | Finish, ctx: Any) -> None:
            pass

        @staticmethod
        def migrate(input: Any, checkpoint: Any, from_version: int) -> tuple[Any, Any]:
            return input, checkpoint

    info = definition_info(Full)

    assert (info.name, info.version) == ("test.full", 3)
    assert (info.input_type, info.result_type) == (str, None)
    assert info.checkpoint_types == (Start, Finish)
    assert dict(info.phases) == {
        Start: PhaseInfo(tag="start", names=("start",), method_name="begin"),
        Finish: PhaseInfo(tag="finish", names=("finish",), method_name="end"),
    }
    assert dict(info.by_tag) == {"start": Start, "finish": Finish}
    assert info.abort == "handler"
    assert info.retry == Retry(on=(OSError,), tries=2)
    assert (info.on_fault, info.abort_timeout, info.hooks) == ("park", 2.5, Hooks)
    assert info.has_migrate


def test_the_defaults_are_the_documented_ones() -> None:
    """A definition that sets nothing has version 1, no retry, no bounds and no migration."""
    info = definition_info(Simple)

    assert info.version == 1
    assert info.abort == "nothing_to_undo"
    assert (info.retry, info.on_fault, info.abort_timeout, info.hooks) == (None,) * 4
    assert not info.has_migrate


def test_an_instance_and_its_class_share_one_info() -> None:
    """The info is made once, with the class."""
    assert definition_info(Simple()) is definition_info(Simple)


def test_the_info_cannot_be_changed() -> None:
    """Neither the record nor its mappings accept an assignment."""
    info = definition_info(Simple)

    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        info.name = "test.other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        info.phases[Finish] = info.phases[Start]  # type: ignore[index]


def test_real_annotations_and_typing_union_are_read() -> None:
    """A module without postponed annotations works, quoted and hidden names included."""
    assert definition_info(real.Real).checkpoint_types == (real.Start, real.Finish)
    assert definition_info(real.Real).phases[real.Finish].method_name == "end"
    for definition in (real.Marked, real.Closed, real.ForeignContext):
        assert definition_info(definition).phases[real.Start].method_name == "begin"


def test_classes_of_a_function_are_found_by_the_unions_names() -> None:
    """Neither the checkpoints nor the context alias have to be names of the module."""

    @attrs.frozen
    class Inner:
        pass

    InnerContext = TaskContext[str, Inner, int]

    class Local(Open[Inner]):
        name = "test.local"

        @phase
        async def work(self, at: Inner, ctx: InnerContext) -> None:
            pass

    assert definition_info(Local).phases[Inner].method_name == "work"


def test_a_local_class_hides_one_of_the_module_with_the_same_name() -> None:
    """The members of the union are looked up before the names of the module."""
    other = attrs.make_class("Start", [], frozen=True)

    class Hidden(Open[other]):  # type: ignore[valid-type]
        name = "test.hidden"

        @phase
        async def work(self, at: Start, ctx: Any) -> None:
            pass

    assert definition_info(Hidden).checkpoint_types == (other,)


class HiddenAlias(Task[str, Start | Finish, int]):
    """Its context alias exists for the type checker only."""

    name = "test.hidden_alias"
    abort = nothing_to_undo

    def initial(self, text: str) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: HiddenContext) -> None:
        pass

    @phase
    async def finish(self, at: Finish, ctx: HiddenContext) -> None:
        pass


def test_a_context_alias_need_not_resolve() -> None:
    """An alias below TYPE_CHECKING is left to the type checker."""
    assert definition_info(HiddenAlias).checkpoint_types == (Start, Finish)


def test_aliases_and_repeated_members_count_once() -> None:
    """`type Steps = A | B` is taken apart, also inside of another union."""
    Steps = TypeAliasType("Steps", Union[Start, Finish])  # noqa: UP007

    class Aliased(Open[Union[Steps, Pause, Start]]):  # type: ignore[valid-type]  # noqa: UP007
        name = "test.aliased"

        @phase
        async def start(self, at: Start, ctx: Any) -> None:
            pass

        @phase
        async def finish(self, at: Finish, ctx: Any) -> None:
            pass

        @phase
        async def pause(self, at: Pause, ctx: Any) -> None:
            pass

    assert definition_info(Aliased).checkpoint_types == (Start, Finish, Pause)


def test_frozen_dataclasses_are_checkpoints_too() -> None:
    """attrs is not required for a checkpoint class."""

    class Paused(Open[Pause]):
        name = "test.paused"

        @phase
        async def pause(self, at: Pause, ctx: Any) -> None:
            pass

    assert definition_info(Paused).by_tag == {"pause": Pause}


def test_a_renamed_checkpoint_class_reads_its_old_tags() -> None:
    """`phase_names` gives the tag that is written, and all that are read, for this class only."""

    @attrs.frozen
    class Charge:
        phase_names = ("charge_card", "charge")

    @attrs.frozen
    class Refund(Charge):
        pass

    class Renamed(Open[Charge | Refund]):
        name = "test.renamed"

        @phase
        async def charge(self, at: Charge, ctx: Any) -> None:
            pass

        @phase
        async def refund(self, at: Refund, ctx: Any) -> None:
            pass

    info = definition_info(Renamed)

    assert info.phases[Charge].tag == "charge_card"
    assert info.phases[Refund].names == ("refund",)
    assert dict(info.by_tag) == {"charge_card": Charge, "charge": Charge, "refund": Refund}


def test_a_generic_base_passes_its_parameters_on() -> None:
    """Type variables of a base are replaced in all three parameters, also through two levels."""

    class Polling(Task[InT, Start | ItemT, OutT], Generic[InT, ItemT, OutT]):
        abort = nothing_to_undo

        def initial(self, input: InT) -> Start:
            return Start()

        @phase
        async def start(self, at: Start, ctx: Any) -> None:
            pass

    class Listing(Polling[list[InT], ItemT, dict[str, InT]]):
        pass

    class Orders(Listing[int, Finish]):
        name = "test.orders"

        @phase
        async def finish(self, at: Finish, ctx: Any) -> None:
            pass

    info = definition_info(Orders)

    assert (info.input_type, info.result_type) == (list[int], dict[str, int])
    assert info.checkpoint_types == (Start, Finish)
    assert info.phases[Start].method_name == "start"


def test_a_base_without_a_name_is_not_checked() -> None:
    """A class that leaves parameters open and has no name may be incomplete."""

    class Unfinished(Task[str, ItemT, int], Generic[ItemT]):
        pass

    with pytest.raises(DefinitionError, match="base for definitions"):
        definition_info(Unfinished)


def test_phases_are_inherited_and_can_be_replaced() -> None:
    """A subclass takes name, parameters and phases over, and its own phase wins."""

    class Derived(Simple):
        version = 2

        @phase
        async def start(self, at: Start, ctx: TaskContext[str, Start, int]) -> None:
            pass

    info = definition_info(Derived)

    assert (info.name, info.version) == ("test.simple", 2)
    assert info is not definition_info(Simple)
    assert definition_info(Simple).version == 1
    assert info.phases[Start].method_name == "start"


def test_a_plain_class_can_bring_phases_and_abort() -> None:
    """What a class beside Task defines counts as if it stood in the definition."""

    class Undoes:
        async def abort(self, at: Any, ctx: Any) -> None:
            pass

        @phase
        async def finish(self, at: Finish, ctx: Any) -> None:
            pass

    class Mixed(Undoes, Open[Finish]):
        name = "test.mixed"

    info = definition_info(Mixed)

    assert info.abort == "handler"
    assert info.phases[Finish].method_name == "finish"


def test_a_decorated_phase_keeps_its_annotations() -> None:
    """An async wrapper made with functools.wraps is looked through."""

    def traced(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        async def wrapper(self: Any, at: Any, ctx: Any) -> None:
            await method(self, at, ctx)

        return wrapper

    class Traced(Open[Start | Finish]):
        name = "test.traced"

        @phase
        @traced
        async def start(self, at: Start, ctx: Any) -> None:
            pass

        @traced
        @phase
        async def finish(self, at: Finish, ctx: Any) -> None:
            pass

    assert set(definition_info(Traced).phases) == {Start, Finish}


def test_an_attrs_class_can_be_a_definition() -> None:
    """attrs makes a slotted class a second time; the info is that of the class in use."""

    @attrs.define(eq=False)
    class Slotted(Open[Start]):
        name: ClassVar[str] = "test.slotted"
        bank: str = "a bank"

        @phase
        async def start(self, at: Start, ctx: Any) -> None:
            pass

    assert definition_info(Slotted("another")).name == "test.slotted"


async def test_a_phase_is_still_a_method() -> None:
    """`@phase` returns the method itself, which can be awaited."""
    seen: list[object] = []

    class Recorder(Open[Start]):
        name = "test.recorder"

        @phase
        async def start(self, at: Start, ctx: Any) -> None:
            seen.append((at, ctx))

    await Recorder().start(Start(), "a context")

    assert seen == [(Start(), "a context")]


async def test_nothing_to_undo_ends_the_task_when_awaited() -> None:
    """Called from a handler of the user's own, it ends the task as aborted."""
    reasons: list[object] = []

    class Context:
        async def end_aborted(self, reason: object = None) -> None:
            reasons.append(reason)

    await nothing_to_undo(Simple(), Start(), Context())

    assert len(reasons) == 1


@pytest.mark.parametrize(
    ("module", "name", "allowed"),
    [
        ("pidurable.agent._generation", "pi.generation", True),
        ("pidurable.extensions.taskrun", "taskrun.attempt", True),
        ("extensions.taskrun._attempt", "taskrun.attempt", True),
        ("extensions.coding", "pi.coding", False),
        ("pidurable_shop", "pi.shop", False),
        ("shop", "taskrun.shop", False),
        ("shop", "pie.shop", True),
    ],
)
def test_reserved_names_are_for_the_modules_that_own_them(
    module: str, name: str, allowed: bool
) -> None:
    """`pi.` and `taskrun.` are names of built-in tasks; nobody else may define them."""

    def make() -> type[Task[Any, Any, Any]]:
        return type(Simple)("Named", (Simple,), {"__module__": module, "name": name})

    if allowed:
        assert definition_info(make()).name == name
    else:
        with pytest.raises(DefinitionError, match="kept for built-in tasks"):
            make()


# --- looking up a checkpoint ------------------------------------------------------------------


def test_the_phase_of_a_checkpoint_is_found_by_its_class() -> None:
    """`phase_of` gives the phase for an instance of a member."""
    assert definition_info(Simple).phase_of(Start()).tag == "start"


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (Finish("x"), r"must be an instance of a checkpoint class of test\.simple \(Start\)"),
        (None, "must be an instance of a checkpoint class"),
        (Start, r"must be an instance, as in Start\(\.\.\.\), not the class"),
    ],
)
def test_a_foreign_checkpoint_is_refused(checkpoint: object, message: str) -> None:
    """What is no instance of a member has no phase, and the message says what has."""
    with pytest.raises(InvalidArgumentError, match=message):
        definition_info(Simple).phase_of(checkpoint)


def test_a_reloaded_definition_can_be_forgotten() -> None:
    """Nothing of the checks keeps a definition class alive once its module has dropped it."""

    def make() -> tuple[weakref.ref[type], weakref.ref[DefinitionInfo]]:
        @attrs.frozen
        class Step:
            pass

        class Reloaded(Open[Step]):
            name = "test.reloaded"

            @phase
            async def step(self, at: Step, ctx: Any) -> None:
                pass

        return weakref.ref(Reloaded), weakref.ref(definition_info(Reloaded))

    cls, info = make()
    gc.collect()

    assert cls() is None
    assert info() is None
