"""Every mistake that a class statement is refused for: one function each, by the name of the case.

Each function makes one class that is wrong in one way. The messages are kept in
`tests/public/snapshots/definition_errors.txt`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypedDict, TypeVar

import attrs

from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Retry, Task, definition_info, nothing_to_undo, phase

MISTAKES: dict[str, Callable[[], object]] = {}

ItemT = TypeVar("ItemT")


def mistake(make: Callable[[], object]) -> Callable[[], object]:
    MISTAKES[make.__name__] = make
    return make


@attrs.frozen
class Card:
    number: str


@attrs.frozen
class Prepare:
    pass


@attrs.frozen
class Charge:
    key: str


@attrs.frozen
class Receipt:
    id: str


SELF = "SELF"
PaymentContext = TaskContext[Card, Prepare | Charge, Receipt]
ShippingContext = TaskContext[Receipt, Prepare | Charge, None]


class Unnamed(Task[Card, ItemT, Receipt], Generic[ItemT]):
    """What the cases below have in common: a correct start and end."""

    abort = nothing_to_undo

    def initial(self, card: Card) -> Any:
        return Prepare()


class OnePhase(Unnamed[Prepare]):
    """A correct definition, of which the cases below get one thing wrong."""

    name = "shop.one_phase"

    @phase
    async def prepare(self, at: Prepare, ctx: Any) -> None:
        pass


# --- the parameters ---------------------------------------------------------------------------


@mistake
def no_parameters() -> object:
    class Payment(Task):  # type: ignore[type-arg]
        name = "shop.payment"

    return Payment


@mistake
def open_parameters_with_a_name() -> object:
    class Payment(Task[Card, ItemT, Receipt], Generic[ItemT]):
        name = "shop.payment"

    return Payment


@mistake
def parameter_as_a_string() -> object:
    class Payment(Task["Card", Prepare, Receipt]):
        name = "shop.payment"

    return Payment


@mistake
def parameters_of_a_base_not_given() -> object:
    class Payment(Unnamed):  # type: ignore[type-arg]
        name = "shop.payment"

    return Payment


@mistake
def no_parameters_through_a_base() -> object:
    class Base(Task):  # type: ignore[type-arg]
        pass

    class Payment(Base):
        name = "shop.payment"

    return Payment


@mistake
def a_base_is_no_definition() -> object:
    return definition_info(Unnamed)


@mistake
def task_itself_is_no_definition() -> object:
    return definition_info(Task)


@mistake
def something_else_is_no_definition() -> object:
    return definition_info(Card)  # type: ignore[arg-type]


# --- the checkpoint union ---------------------------------------------------------------------


@mistake
def member_is_none() -> object:
    class Payment(Unnamed[Prepare | None]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_a_builtin() -> object:
    class Payment(Unnamed[Prepare | str]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_a_literal() -> object:
    class Payment(Unnamed[Literal["prepare", "charge"]]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_a_generic_alias() -> object:
    class Payment(Unnamed[list[int]]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_a_plain_class() -> object:
    class Prepare:
        pass

    class Payment(Unnamed[Prepare]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_an_enum() -> object:
    class Step(enum.Enum):
        PREPARE = 1

    class Payment(Unnamed[Step]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_not_frozen() -> object:
    @attrs.define
    class Prepare:
        key: str

    class Payment(Unnamed[Prepare]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_a_mutable_dataclass() -> object:
    @dataclasses.dataclass
    class Prepare:
        key: str

    class Payment(Unnamed[Prepare]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_an_undecorated_subclass() -> object:
    class PrepareMore(Prepare):
        pass

    class Payment(Unnamed[PrepareMore]):
        name = "shop.payment"

    return Payment


# --- stored tags ------------------------------------------------------------------------------


@mistake
def two_members_with_one_tag() -> object:
    other = attrs.make_class("Prepare", [], frozen=True)

    class Payment(Unnamed[Prepare | other]):  # type: ignore[valid-type]
        name = "shop.payment"

    return Payment


@mistake
def an_old_tag_that_is_in_use() -> object:
    @attrs.frozen
    class Start:
        phase_names = ("start", "prepare")

    class Payment(Unnamed[Prepare | Start]):
        name = "shop.payment"

    return Payment


@mistake
def phase_names_is_a_string() -> object:
    @attrs.frozen
    class Start:
        phase_names = "start"

    class Payment(Unnamed[Start]):
        name = "shop.payment"

    return Payment


@mistake
def phase_names_is_a_field() -> object:
    @attrs.frozen
    class Start:
        phase_names: tuple[str, ...] = ("start",)

    class Payment(Unnamed[Start]):
        name = "shop.payment"

    return Payment


@mistake
def phase_names_has_an_odd_name() -> object:
    @dataclasses.dataclass(frozen=True)
    class Start:
        phase_names: ClassVar[tuple[str, ...]] = ("Start it",)

    class Payment(Unnamed[Start]):
        name = "shop.payment"

    return Payment


# --- members and phases, one to one -----------------------------------------------------------


@mistake
def member_without_phase() -> object:
    class Payment(Unnamed[Prepare | Charge]):
        name = "shop.payment"

        @phase
        async def prepare(self, at: Prepare, ctx: PaymentContext) -> None:
            pass

    return Payment


@mistake
def no_phase_at_all() -> object:
    class Payment(Unnamed[Prepare | Charge]):
        name = "shop.payment"

    return Payment


@mistake
def forgotten_decorator() -> object:
    class Payment(Unnamed[Prepare]):
        name = "shop.payment"

        def other(self, at: Nothing) -> None:  # noqa: F821
            pass

        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

    return Payment


@mistake
def override_without_decorator() -> object:
    class Payment(OnePhase):
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

    return Payment


@mistake
def phase_for_a_class_outside_of_the_union() -> object:
    class Payment(OnePhase):
        @phase
        async def charge(self, at: Charge, ctx: Any) -> None:
            pass

    return Payment


@mistake
def two_phases_for_one_class() -> object:
    class Payment(OnePhase):
        @phase
        async def prepare_again(self, at: Prepare, ctx: Any) -> None:
            pass

    return Payment


@mistake
def phase_without_annotation() -> object:
    class Payment(OnePhase):
        @phase
        async def prepare(self, at, ctx) -> None:  # type: ignore[no-untyped-def]
            pass

    return Payment


@mistake
def annotation_with_a_slip() -> object:
    class Payment(OnePhase):
        @phase
        async def prepare(self, at: Prepair, ctx: Any) -> None:  # noqa: F821
            pass

    return Payment


@mistake
def annotation_that_is_no_expression() -> object:
    class Payment(OnePhase):
        @phase
        async def prepare(self, at: "the first step", ctx: Any) -> None:  # noqa: F722
            pass

    return Payment


@mistake
def annotation_that_means_itself() -> object:
    async def handler(self: Any, at: Any, ctx: Any) -> None:
        pass

    handler.__annotations__["at"] = "SELF"

    class Payment(OnePhase):
        prepare = phase(handler)

    return Payment


@mistake
def annotation_is_a_union() -> object:
    class Payment(Unnamed[Prepare | Charge]):
        name = "shop.payment"

        @phase
        async def work(self, at: Prepare | Charge, ctx: PaymentContext) -> None:
            pass

    return Payment


@mistake
def annotation_is_a_type_variable() -> object:
    class Payment(OnePhase):
        @phase
        async def prepare(self, at: ItemT, ctx: Any) -> None:
            pass

    return Payment


@mistake
def annotation_is_another_class_of_that_name() -> object:
    other = attrs.make_class("Prepare", [], frozen=True)

    async def handler(self: Any, at: Any, ctx: Any) -> None:
        pass

    # An annotation that is no string names exactly this class; a string would mean the member.
    handler.__annotations__["at"] = Prepare

    class Payment(Unnamed[other]):  # type: ignore[valid-type]
        name = "shop.payment"
        prepare = phase(handler)

    return Payment


# --- signatures -------------------------------------------------------------------------------


@mistake
def phase_is_not_async() -> object:
    class Payment(OnePhase):
        @phase  # type: ignore[type-var]
        def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

    return Payment


@mistake
def phase_is_a_generator() -> object:
    class Payment(OnePhase):
        @phase  # type: ignore[type-var]
        async def prepare(self, at: Prepare, ctx: Any) -> Any:
            yield

    return Payment


@mistake
def phase_with_a_parameter_too_many() -> object:
    class Payment(OnePhase):
        @phase  # type: ignore[type-var]
        async def prepare(self, at: Prepare, ctx: Any, bank: str) -> None:
            pass

    return Payment


@mistake
def phase_with_its_parameters_swapped() -> object:
    class Payment(OnePhase):
        @phase
        async def prepare(self, ctx: Any, at: Prepare) -> None:
            pass

    return Payment


@mistake
def phase_with_star_arguments() -> object:
    class Payment(OnePhase):
        @phase
        async def prepare(self, at: Prepare, *ctx: Any) -> None:
            pass

    return Payment


@mistake
def phase_is_a_staticmethod() -> object:
    class Payment(OnePhase):
        @staticmethod
        @phase
        async def prepare(self: Any, at: Prepare, ctx: Any) -> None:
            pass

    return Payment


@mistake
def phase_of_a_staticmethod() -> object:
    @phase  # type: ignore[type-var]
    @property
    def prepare(self: Any) -> None:
        pass

    return prepare


@mistake
def phase_with_an_argument() -> object:
    return phase("charge")  # type: ignore[type-var]


@mistake
def abort_marked_as_a_phase() -> object:
    class Payment(OnePhase):
        @phase
        async def abort(self, at: Prepare, ctx: Any) -> None:
            pass

    return Payment


# --- the annotation of ctx --------------------------------------------------------------------


class _Wrong:
    """Methods of a module, whose annotations resolve."""

    async def prepare(self, at: Prepare, ctx: ShippingContext) -> None:
        pass

    async def prepare_twice(self, at: Prepare, ctx: Prepare) -> None:
        pass

    async def prepare_with_a_task(self, at: Prepare, ctx: Task[Card, Prepare, Receipt]) -> None:
        pass

    def initial_to_none(self, card: Card) -> None:
        pass

    def initial_to_receipt(self, card: Card) -> Receipt:
        return Receipt(card.number)

    def initial_of_receipt(self, receipt: Receipt) -> Prepare:
        return Prepare()


@mistake
def context_of_another_definition() -> object:
    class Payment(OnePhase):
        prepare = phase(_Wrong.prepare)

    return Payment


@mistake
def context_is_a_checkpoint_class() -> object:
    class Payment(OnePhase):
        prepare = phase(_Wrong.prepare_twice)

    return Payment


# --- name and settings ------------------------------------------------------------------------


@mistake
def no_name() -> object:
    class Payment(Unnamed[Prepare]):
        @phase
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

    return Payment


@mistake
def empty_name() -> object:
    class Payment(OnePhase):
        name = ""

    return Payment


@mistake
def name_without_a_dot() -> object:
    class Payment(OnePhase):
        name = "payment"

    return Payment


@mistake
def name_in_upper_case() -> object:
    class Payment(OnePhase):
        name = "shop.Payment"

    return Payment


@mistake
def name_is_no_string() -> object:
    class Payment(OnePhase):
        name = 7  # type: ignore[assignment]

    return Payment


@mistake
def name_of_the_built_in_tasks() -> object:
    class Payment(OnePhase):
        name = "pi.payment"

    return Payment


@mistake
def name_of_the_task_runs() -> object:
    class Payment(OnePhase):
        name = "taskrun.attempt"

    return Payment


@mistake
def version_zero() -> object:
    class Payment(OnePhase):
        version = 0

    return Payment


@mistake
def version_of_more_than_64_bits() -> object:
    class Payment(OnePhase):
        version = 2**63

    return Payment


@mistake
def version_is_a_string() -> object:
    class Payment(OnePhase):
        version = "2"  # type: ignore[assignment]

    return Payment


@mistake
def version_is_a_bool() -> object:
    class Payment(OnePhase):
        version = True

    return Payment


@mistake
def retry_is_a_number() -> object:
    class Payment(OnePhase):
        retry = 5  # type: ignore[assignment]

    return Payment


@mistake
def retry_is_the_class() -> object:
    class Payment(OnePhase):
        retry = Retry  # type: ignore[assignment]

    return Payment


@mistake
def on_fault_is_unknown() -> object:
    class Payment(OnePhase):
        on_fault = "ignore"  # type: ignore[assignment]

    return Payment


@mistake
def abort_timeout_is_zero() -> object:
    class Payment(OnePhase):
        abort_timeout = 0

    return Payment


@mistake
def abort_timeout_is_nan() -> object:
    class Payment(OnePhase):
        abort_timeout = float("nan")

    return Payment


@mistake
def hooks_is_an_instance() -> object:
    class Payment(OnePhase):
        hooks = "before_charge"  # type: ignore[assignment]

    return Payment


def asking(questions: type) -> object:
    """A definition with these hooks, named as a person would."""
    questions.__name__ = "PaymentHooks"

    class Payment(OnePhase):
        hooks = questions

    return Payment


@mistake
def hooks_are_no_protocol() -> object:
    class Questions:
        async def before_charge(self, cents: int) -> None: ...

    return asking(Questions)


@mistake
def hooks_without_a_question() -> object:
    class Questions(Protocol):
        async def _later(self) -> None: ...

    return asking(Questions)


@mistake
def hooks_with_an_attribute() -> object:
    class Questions(Protocol):
        cents_max: int

        async def before_charge(self, cents: int) -> None: ...

    return asking(Questions)


@mistake
def hook_is_not_async() -> object:
    class Questions(Protocol):
        def before_charge(self, cents: int) -> None: ...

    return asking(Questions)


@mistake
def hook_is_static() -> object:
    class Questions(Protocol):
        @staticmethod
        async def before_charge(cents: int) -> None: ...

    return asking(Questions)


@mistake
def hook_without_self() -> object:
    class Questions(Protocol):
        async def before_charge() -> None: ...  # type: ignore[misc]

    return asking(Questions)


@mistake
def hook_takes_anything() -> object:
    class Questions(Protocol):
        async def before_charge(self, *cents: int) -> None: ...

    return asking(Questions)


@mistake
def hook_parameter_not_annotated() -> object:
    class Questions(Protocol):
        async def before_charge(self, cents) -> None: ...  # type: ignore[no-untyped-def]

    return asking(Questions)


@mistake
def hook_answer_not_annotated() -> object:
    class Questions(Protocol):
        async def before_charge(self, cents: int): ...  # type: ignore[no-untyped-def]

    return asking(Questions)


@mistake
def hook_answer_cannot_be_none() -> object:
    class Questions(Protocol):
        async def before_charge(self, cents: int) -> bool: ...

    return asking(Questions)


# --- initial, abort, migrate ------------------------------------------------------------------


class Bare(Task[Card, ItemT, Receipt], Generic[ItemT]):
    """A base without initial and abort."""


@mistake
def no_initial() -> object:
    class Payment(Bare[Prepare]):
        name = "shop.payment"
        abort = nothing_to_undo

    return Payment


@mistake
def initial_with_a_slip() -> object:
    class Payment(Bare[Prepare]):
        name = "shop.payment"
        abort = nothing_to_undo

        def inital(self, card: Card) -> Prepare:
            return Prepare()

    return Payment


@mistake
def initial_is_async() -> object:
    class Payment(OnePhase):
        async def initial(self, card: Card) -> Prepare:  # type: ignore[override]
            return Prepare()

    return Payment


@mistake
def initial_without_input() -> object:
    class Payment(OnePhase):
        def initial(self) -> Prepare:  # type: ignore[override]
            return Prepare()

    return Payment


@mistake
def initial_is_a_checkpoint() -> object:
    class Payment(OnePhase):
        initial = Prepare()  # type: ignore[assignment]

    return Payment


@mistake
def no_abort() -> object:
    class Payment(Bare[Prepare]):
        name = "shop.payment"

        def initial(self, card: Card) -> Prepare:
            return Prepare()

        @phase
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

        async def aborted(self, at: Prepare, ctx: Any) -> None:
            pass

    return Payment


@mistake
def abort_is_none() -> object:
    class Payment(OnePhase):
        abort = None  # type: ignore[assignment]

    return Payment


@mistake
def abort_is_a_class() -> object:
    class Payment(OnePhase):
        abort = Prepare  # type: ignore[assignment]

    return Payment


@mistake
def abort_is_not_async() -> object:
    class Payment(OnePhase):
        def abort(self, at: Prepare, ctx: Any) -> None:  # type: ignore[override]
            pass

    return Payment


@mistake
def abort_without_the_checkpoint() -> object:
    class Payment(OnePhase):
        async def abort(self, ctx: Any) -> None:  # type: ignore[override]
            pass

    return Payment


@mistake
def migrate_is_async() -> object:
    class Payment(OnePhase):
        async def migrate(self, input: Any, checkpoint: Any, from_version: int) -> Any:
            return input, checkpoint

    return Payment


@mistake
def migrate_without_the_version() -> object:
    class Payment(OnePhase):
        def migrate(self, input: Any, checkpoint: Any) -> Any:
            return input, checkpoint

    return Payment


@mistake
def migrate_is_a_table() -> object:
    class Payment(OnePhase):
        migrate: ClassVar[dict[int, Any]] = {1: None}

    return Payment


# --- slips that Python lets pass ----------------------------------------------------------------


@mistake
def two_parameters() -> object:
    return Task[Card, Prepare]  # type: ignore[type-arg]


@mistake
def four_parameters() -> object:
    return Task[Card, Prepare, Charge, Receipt]  # type: ignore[type-arg]


@mistake
def one_parameter() -> object:
    return Task[Prepare]  # type: ignore[type-arg]


@mistake
def checkpoint_classes_in_a_tuple() -> object:
    return Task[Card, (Prepare, Charge), Receipt]  # type: ignore[misc]


@mistake
def member_is_any() -> object:
    class Payment(Unnamed[Any]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_a_named_tuple() -> object:
    class Step(NamedTuple):
        key: str

    class Payment(Unnamed[Step]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_a_typed_dict() -> object:
    class Step(TypedDict):
        key: str

    class Payment(Unnamed[Step]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_a_protocol() -> object:
    class Step(Protocol):
        key: str

    class Payment(Unnamed[Step]):
        name = "shop.payment"

    return Payment


@mistake
def member_is_a_pydantic_model() -> object:
    class Step:
        model_fields: ClassVar[dict[str, Any]] = {}

    class Payment(Unnamed[Step]):
        name = "shop.payment"

    return Payment


@mistake
def phase_with_a_keyword_only_parameter() -> object:
    class Payment(OnePhase):
        @phase  # type: ignore[type-var]
        async def prepare(self, at: Prepare, *, ctx: Any) -> None:
            pass

    return Payment


@mistake
def phase_that_returns_a_checkpoint() -> object:
    class Payment(Unnamed[Prepare | Charge]):
        name = "shop.payment"

        @phase  # type: ignore[type-var]
        async def prepare(self, at: Prepare, ctx: Any) -> Charge:
            return Charge("k")

        @phase
        async def charge(self, at: Charge, ctx: Any) -> None:
            pass

    return Payment


@mistake
def context_is_the_definition() -> object:
    class Payment(OnePhase):
        prepare = phase(_Wrong.prepare_with_a_task)

    return Payment


@mistake
def initial_returns_nothing() -> object:
    class Payment(OnePhase):
        initial = _Wrong.initial_to_none  # type: ignore[assignment]

    return Payment


@mistake
def initial_returns_a_receipt() -> object:
    class Payment(OnePhase):
        initial = _Wrong.initial_to_receipt  # type: ignore[assignment]

    return Payment


@mistake
def initial_takes_another_input() -> object:
    class Payment(OnePhase):
        initial = _Wrong.initial_of_receipt  # type: ignore[assignment]

    return Payment


@mistake
def retries_instead_of_retry() -> object:
    class Payment(OnePhase):
        retries = Retry(on=(OSError,))

    return Payment


@mistake
def onfault_instead_of_on_fault() -> object:
    class Payment(OnePhase):
        onfault = "park"

    return Payment


@mistake
def on_restart_in_a_definition() -> object:
    class Payment(OnePhase):
        on_restart = "wait"

    return Payment


@mistake
def migration_instead_of_migrate() -> object:
    class Payment(OnePhase):
        version = 2

        def migration(self, input: Any, checkpoint: Any, from_version: int) -> Any:
            return input, checkpoint

    return Payment


@mistake
def migrate_with_a_keyword_only_parameter() -> object:
    class Payment(OnePhase):
        def migrate(self, input: Any, checkpoint: Any, *, from_version: int) -> Any:
            return input, checkpoint

    return Payment


@mistake
def name_with_a_dash() -> object:
    class Payment(OnePhase):
        name = "shop.order-payment"

    return Payment


@mistake
def name_in_the_constructor() -> object:
    class Payment(Unnamed[Prepare]):
        def __init__(self) -> None:
            self.name = "shop.payment"  # type: ignore[misc]

        @phase
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

    return Payment


@mistake
def abort_timeout_is_a_text() -> object:
    class Payment(OnePhase):
        abort_timeout = "10 s"  # type: ignore[assignment]

    return Payment


@mistake
def phase_that_is_a_lambda() -> object:
    class Payment(OnePhase):
        prepare = phase(lambda self, at, ctx: None)  # type: ignore[type-var,return-value,arg-type]

    return Payment


@mistake
def phase_with_parentheses() -> object:
    class Payment(OnePhase):
        @phase()  # type: ignore[call-arg]
        async def prepare(self, at: Prepare, ctx: Any) -> None:
            pass

    return Payment


@mistake
def nothing_to_undo_with_parentheses() -> object:
    class Payment(OnePhase):
        abort = nothing_to_undo()  # type: ignore[call-arg,assignment]

    return Payment
