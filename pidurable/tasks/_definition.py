"""Task definitions: the one class that is meant for deriving, and what is checked of a derived one.

Idea: a definition is an ordinary class. Everything that can be wrong with it is found when the
class is created, once, with an error that says what to write instead; at run time the scheduler
reads a frozen `DefinitionInfo` and looks nothing up by name.

* A class with a `name` is a definition and is well formed, or the class statement raised.
* A class without a `name` that leaves parameters open is a base for definitions and is not checked.
* The info belongs to the class and says nothing of an instance; it refers to methods by their
  attribute names, so that it keeps no copy of a class alive.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import attrs

from pidurable.errors import DefinitionError, InvalidArgumentError, show
from pidurable.tasks._hooks import Question as Question, questions_of
from pidurable.tasks._parameters import (
    Parameters,
    check_count,
    check_parameters,
    checkpoint_members,
    checkpoint_tags,
    is_open,
    parameters_of,
)
from pidurable.tasks._phase import (
    PhaseInfo as PhaseInfo,
    bind_phases,
    check_handler,
    describe,
    parameters_text,
    phase as phase,
    phase_method,
)
from pidurable.tasks._retry import Retry as Retry, backoff as backoff
from pidurable.tasks._slips import check_initial_types, refuse_slips

if TYPE_CHECKING:
    from pidurable.tasks._context import TaskContext

__all__ = [
    "DefinitionInfo",
    "PhaseInfo",
    "Retry",
    "Task",
    "backoff",
    "definition_info",
    "nothing_to_undo",
    "phase",
]

InputT = TypeVar("InputT")
CheckpointT = TypeVar("CheckpointT")
ResultT = TypeVar("ResultT")

OnFault = Literal["fault", "park"]

_INFO = "__pidurable_definition__"
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
_RESERVED = {
    "pi": ("pidurable.",),
    "taskrun": ("pidurable.", "extensions.taskrun"),
}
"""First words of names that only these modules may define."""

_OWN_MEANING = frozenset(
    {
        "abort",
        "abort_timeout",
        "hooks",
        "initial",
        "migrate",
        "name",
        "on_fault",
        "retry",
        "version",
    }
)


async def nothing_to_undo(self: Any, at: Any, ctx: Any) -> None:
    """Say `abort = nothing_to_undo` in a definition that leaves nothing behind.

    The scheduler recognises it and settles the task as aborted without running any code. Awaited
    from an abort handler of your own, it ends the task as aborted there.
    """
    await ctx.end_aborted("there was nothing to undo")


# `abort = nothing_to_undo()` gets as far as the class, which says how it is written.
nothing_to_undo.__defaults__ = (None, None, None)


class Task(ABC, Generic[InputT, CheckpointT, ResultT]):
    """A task definition: derive from `Task[Input, First | Second, Result]` and write its phases.

    Each member of the checkpoint union is a frozen class of its own, and has one method marked with
    `@phase`. An instance is installed in a registry and runs many tasks at once, also after a
    restart: keep clients in it, never the state of a task, which belongs into checkpoints. A
    checkpoint may hold lists and dicts; what counts is what was in them when it was committed.

    Raises:
        DefinitionError: The class is not well formed; raised by the class statement itself.
    """

    name: ClassVar[str]
    """The kind under which tasks are stored, as in `shop.payment`. Live tasks keep the old one."""

    version: ClassVar[int] = 1
    """Raise it when stored inputs or checkpoints need `migrate`; older code then leaves them be."""

    retry: ClassVar[Retry | None] = None
    """Errors after which a phase, or the abort handler, runs again by itself."""

    on_fault: ClassVar[OnFault | None] = None
    """What a fault does: end the task, or park it for an operator; None takes the setting."""

    abort_timeout: ClassVar[float | None] = None
    """Most seconds for the abort handler, after which the task is faulted; None is for ever."""

    hooks: ClassVar[type[Any] | None] = None
    """A protocol class whose async methods are the questions that this definition asks extensions.

    Asked as `await ctx.hooks.before_charge(...)`. A question that returns None tells every handler;
    of any other the first answer that is not None counts.
    """

    __pidurable_looks__: ClassVar[bool] = True
    """Whether `initial` looks at the input, which is read for it then; not of built-in tasks."""

    @abstractmethod
    def initial(self, input: InputT, /) -> CheckpointT:
        """Choose the first checkpoint; quick and without I/O, because a commit is waiting."""

    @abstractmethod
    async def abort(
        self, at: CheckpointT, ctx: TaskContext[InputT, CheckpointT, ResultT], /
    ) -> None:
        """Undo what was done at this checkpoint and decide the outcome.

        It starts after everything below has ended, may run again after a crash, and must end with
        `ctx.end_aborted(...)`, `ctx.complete(...)` or `ctx.fail(...)`. If there is nothing to undo,
        write `abort = nothing_to_undo` instead.
        """

    if not TYPE_CHECKING:  # pragma: no branch

        def __class_getitem__(cls, parameters: Any) -> Any:
            """Count the parameters in words that help; typing's own name no remedy."""
            if cls is Task:
                check_count(parameters)
            return super().__class_getitem__(parameters)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        parameters = parameters_of(cls, Task)
        if getattr(cls, "name", None) is None and is_open(parameters):
            return
        setattr(cls, _INFO, _build_info(cls, parameters))


@attrs.frozen(kw_only=True, eq=False)
class DefinitionInfo:
    """What the checks found out about a definition. One object per class, made with the class."""

    name: str
    version: int
    input_type: Any
    """Any type; None for a task without input."""
    checkpoint_types: tuple[type, ...]
    """The members of the union, in the order in which they are written."""
    result_type: Any
    """Any type; None for a task without result."""
    phases: Mapping[type, PhaseInfo]
    by_tag: Mapping[str, type]
    """The checkpoint class for every stored tag, old ones included."""
    abort: Literal["handler", "nothing_to_undo"]
    retry: Retry | None
    on_fault: OnFault | None
    abort_timeout: float | None
    """Seconds."""
    hooks: type[Any] | None
    questions: Mapping[str, Question]
    """The methods of `hooks`, by name."""
    has_migrate: bool

    def phase_of(self, checkpoint: object) -> PhaseInfo:
        """Find the phase that handles this checkpoint.

        Raises:
            InvalidArgumentError: It is an instance of no member of the checkpoint union; a
                subclass of a member is none either, because it would be read back as the member.
        """
        found = self.phases.get(type(checkpoint))
        if found is None:
            members = ", ".join(member.__name__ for member in self.checkpoint_types)
            problem = f"must be an instance of a checkpoint class of {self.name} ({members})"
            if isinstance(checkpoint, type) and checkpoint in self.phases:
                problem = f"must be an instance, as in {checkpoint.__name__}(...), not the class"
            raise InvalidArgumentError("checkpoint", problem, show(checkpoint))
        return found


def definition_info(
    definition: Task[Any, Any, Any] | type[Task[Any, Any, Any]],
) -> DefinitionInfo:
    """Look up what is known about a definition, given its class or an instance.

    Raises:
        DefinitionError: It is no definition: another kind of object, `Task` itself, or a base that
            leaves parameters open.
    """
    cls = definition if isinstance(definition, type) else type(definition)
    # The class's own: a base below a definition must not pass for the definition.
    info: DefinitionInfo | None = cls.__dict__.get(_INFO)
    if info is not None:
        return info
    if not issubclass(cls, Task):
        raise DefinitionError(
            cls.__name__,
            f"{show(definition)} is not a task definition",
            "Derive its class from Task[Input, Checkpoint, Result].",
        )
    raise DefinitionError(
        cls.__name__,
        "it is a base for definitions, not a definition that can run",
        "Derive from it, give every type parameter a type, and give the new class a `name`.",
    )


# --- the checks -------------------------------------------------------------------------------


def _build_info(cls: type[Task[Any, Any, Any]], given: Parameters | None) -> DefinitionInfo:
    definition = cls.__name__
    parameters = check_parameters(definition, given)
    input_type, checkpoint, result_type = parameters
    members = checkpoint_members(definition, checkpoint)
    tags = checkpoint_tags(definition, members)
    attributes, overridden = _collect(cls)
    name = _check_name(definition, cls)
    _check_settings(definition, cls)
    _check_initial(definition, attributes, members, input_type)
    refuse_slips(
        definition,
        attributes,
        has_retry=cls.retry is not None,
        has_on_fault=cls.on_fault is not None,
    )
    phases = bind_phases(
        definition,
        attributes,
        overridden,
        _OWN_MEANING,
        (input_type, members, result_type),
        tags,
    )
    abort = _check_abort(definition, attributes, members)
    return DefinitionInfo(
        name=name,
        version=cls.version,
        input_type=None if input_type is type(None) else input_type,
        checkpoint_types=members,
        result_type=None if result_type is type(None) else result_type,
        phases=MappingProxyType(phases),
        by_tag=MappingProxyType({tag: each for each, names in tags.items() for tag in names}),
        abort=abort,
        retry=cls.retry,
        on_fault=cls.on_fault,
        abort_timeout=cls.abort_timeout,
        hooks=cls.hooks,
        questions=questions_of(definition, cls.hooks),
        has_migrate=_check_migrate(definition, attributes),
    )


def _collect(cls: type) -> tuple[dict[str, object], dict[str, str]]:
    """Gather the attributes as Python would find them, and phases that lost their mark.

    A method that replaces a phase of a base without @phase is no phase; that is the one mistake
    which inheritance adds, so it is remembered for the message.
    """
    attributes: dict[str, object] = {}
    marked_by: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base in (object, ABC, Generic, Task):
            continue
        for name, value in base.__dict__.items():
            attributes[name] = value
            if phase_method(value) is not None:
                marked_by[name] = base.__name__
    overridden = {
        name: base for name, base in marked_by.items() if phase_method(attributes[name]) is None
    }
    return attributes, overridden


def _check_name(definition: str, cls: type) -> str:
    name = getattr(cls, "name", None)
    shape = 'lower-case words (letters, digits, _) joined by dots, as in name = "shop.payment"'
    if name is None:
        raise DefinitionError(
            definition,
            "it has no name",
            f"Say under which kind its tasks are stored: {shape}.",
        )
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DefinitionError(definition, f"its name is {show(name)}", f"Write {shape}.")
    first = name.partition(".")[0]
    modules = _RESERVED.get(first)
    if modules is not None and not f"{cls.__module__}.".startswith(modules):
        raise DefinitionError(
            definition,
            f"its name is {name!r}, but names below `{first}.` are kept for built-in tasks",
            f"Use a first word of your own, as in {'shop' + name[len(first) :]!r}.",
        )
    return name


def _check_settings(definition: str, cls: type[Task[Any, Any, Any]]) -> None:
    """Check the class attributes, whose types only a type checker would otherwise see."""
    version: object = cls.version
    # The storage has 64 bits for it.
    if type(version) is not int or not 0 < version < 2**63:
        raise DefinitionError(
            definition,
            f"its version is {show(version)}",
            "Write a whole number from 1, as in version = 2, and raise it by one with each "
            "incompatible change.",
        )
    retry: object = cls.retry
    if retry is not None and not isinstance(retry, Retry):
        raise DefinitionError(
            definition,
            f"its retry is {show(retry)}",
            "Write None, or a Retry, as in retry = Retry(on=(OSError,), tries=5).",
        )
    on_fault: object = cls.on_fault
    if on_fault not in (None, "fault", "park"):
        raise DefinitionError(
            definition,
            f"its on_fault is {show(on_fault)}",
            'Write "fault" to end the task, "park" to keep it for an operator, or None.',
        )
    timeout: object = cls.abort_timeout
    if timeout is not None and (
        isinstance(timeout, bool)
        or not isinstance(timeout, int | float)
        or not 0 < timeout < math.inf
    ):
        raise DefinitionError(
            definition,
            f"its abort_timeout is {show(timeout)}",
            "Write the most seconds that its abort handler may take, above 0, or None.",
        )


def _function_of(attribute: object) -> object:
    return getattr(attribute, "__func__", attribute)


def _check_initial(
    definition: str,
    attributes: Mapping[str, object],
    members: tuple[type, ...],
    input_type: Any,
) -> None:
    remedy = "Write `def initial(self, input: Input) -> First`, which returns the first checkpoint."
    if "initial" not in attributes:
        raise DefinitionError(
            definition,
            "it has no `initial`, so a new task would not know where to start",
            f"{remedy}{_nearest_method('initial', attributes)}",
        )
    attribute = attributes["initial"]
    function = _function_of(attribute)
    if not inspect.isfunction(function):
        raise DefinitionError(
            definition, f"`initial` is {show(attribute)}, which is not a method", remedy
        )
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise DefinitionError(
            definition,
            "`initial` is async or a generator, but it runs inside of the creating commit",
            f"{remedy} Whatever has to be awaited belongs into the first phase.",
        )
    _check_positional(definition, "initial", attribute, ("input",), remedy)
    if function is attribute:
        check_initial_types(definition, function, members, input_type)


def _check_abort(
    definition: str, attributes: Mapping[str, object], members: tuple[type, ...]
) -> Literal["handler", "nothing_to_undo"]:
    union = " | ".join(describe(member) for member in members)
    both_ways = (
        f"Write `async def abort(self, at: {union}, ctx) -> None`, which undoes what was done and "
        "ends with `await ctx.end_aborted(...)`; or, if there is nothing to undo, write "
        "`abort = nothing_to_undo` (from pidurable import nothing_to_undo)."
    )
    if "abort" not in attributes:
        raise DefinitionError(
            definition,
            "it does not say what an abort has to undo",
            f"{both_ways}{_nearest_method('abort', attributes)}",
        )
    attribute = attributes["abort"]
    if _function_of(attribute) is nothing_to_undo:
        return "nothing_to_undo"
    if inspect.iscoroutine(attribute):
        attribute.close()
        called = "`abort` is what a call returned, and not a method"
        raise DefinitionError(
            definition, called, "Write `abort = nothing_to_undo`, without parentheses."
        )
    if not callable(attribute) and not isinstance(attribute, staticmethod | classmethod):
        raise DefinitionError(
            definition, f"`abort` is {show(attribute)}, which is not a method", both_ways
        )
    check_handler(definition, "the abort handler", "abort", attribute, union)
    return "handler"


def _check_migrate(definition: str, attributes: Mapping[str, object]) -> bool:
    attribute = attributes.get("migrate")
    if attribute is None:
        return False
    remedy = (
        "Write `def migrate(self, input, checkpoint, from_version)`, which gets stored JSON and "
        "returns the pair (input, checkpoint) as today's version stores them."
    )
    function = _function_of(attribute)
    if not inspect.isfunction(function):
        raise DefinitionError(
            definition, f"`migrate` is {show(attribute)}, which is not a method", remedy
        )
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise DefinitionError(
            definition,
            "`migrate` is async or a generator, but it runs inside of a commit",
            f"{remedy} Do not await in it.",
        )
    names = ("input", "checkpoint", "from_version")
    _check_positional(definition, "migrate", attribute, names, remedy)
    return True


def _check_positional(
    definition: str, method_name: str, attribute: object, names: tuple[str, ...], remedy: str
) -> None:
    """Check that a method can be called with these arguments in order; their names are free."""
    signature = inspect.signature(_function_of(attribute))  # type: ignore[arg-type]
    own = () if isinstance(attribute, staticmethod) else ("self",)
    try:
        signature.bind(*own, *names)
    except TypeError as error:
        raise DefinitionError(
            definition,
            f"`{method_name}` takes ({parameters_text(signature.parameters.values())}), so it "
            f"cannot be called with ({', '.join((*own, *names))})",
            remedy,
        ) from error


def _nearest_method(name: str, attributes: Mapping[str, object]) -> str:
    """Point at a method whose name is probably a slip of the one that is missing."""
    methods = [each for each, value in attributes.items() if inspect.isfunction(value)]
    close = difflib.get_close_matches(name, methods, n=1, cutoff=0.6)
    return f" Perhaps the method `{close[0]}` is meant to be it; rename it." if close else ""
