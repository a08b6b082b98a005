"""Hooks of a definition: the questions that its code asks the handlers of extensions.

A definition names a protocol class (`hooks = PaymentHooks`); each public method of it is one
question. The code of a task asks `await ctx.hooks.before_charge(...)`, and the handlers answer that
the extensions of the task's conversation bring, in the order of installation:

* A question that is annotated `-> None` tells: every handler hears it.
* Every other one decides: the first handler that answers anything but None has answered, and
  nobody else is asked. None is what comes when nobody did, so the annotation has to admit it.
* A handler that raises is reported and skipped. What ends the invocation passes: cancellation, an
  abort, a session that ended. So does trouble of the session's own storage, which is nobody's
  fault: the phase begins again, and a decision is never left out for it.

Handlers are resolved once per phase. A definition with another rule takes `ctx.handlers(name)`
and asks them itself.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, final

import attrs
import trio

from pidurable.errors import (
    AbortRequestedError,
    DefinitionError,
    InvalidArgumentError,
    InvocationEndedError,
    show,
)
from pidurable.tasks._errors import error_info, leaves, stops_code, storage_trouble

_PASSES = (AbortRequestedError, InvocationEndedError)
"""What a handler raises because its task's invocation is over, and not by a fault of its own."""

_EXAMPLE = "`async def before_charge(self, cents: int) -> Refusal | None: ...`"


class HookHandler(Protocol):
    """One handler of one question, and the extension that it came from."""

    @property
    def extension(self) -> str: ...

    def __call__(self, *args: Any, **named: Any) -> Any: ...


@attrs.frozen(kw_only=True, eq=False)
class Question:
    """One method of a protocol class of hooks."""

    name: str
    signature: inspect.Signature
    """Without `self`."""
    tells: bool
    """Whether it is annotated `-> None`: every handler is asked, and nobody decides."""

    def accepts(self, handler: Callable[..., Any]) -> bool:
        """Whether a handler can be called as the question is asked."""
        try:
            signature = inspect.signature(handler)
        except (TypeError, ValueError):
            return True  # It does not tell; its first call will.
        positional: list[str] = []
        named: dict[str, str] = {}
        for each in self.signature.parameters.values():
            if each.kind is each.KEYWORD_ONLY:
                named[each.name] = each.name
            else:
                positional.append(each.name)
        try:
            signature.bind(*positional, **named)
        except TypeError:
            return False
        return True

    def __str__(self) -> str:
        """The question as it is written, without its answer."""
        parameters = [each.replace(annotation=each.empty) for each in self._parameters()]
        return f"{self.name}{inspect.Signature(parameters)}"

    def _parameters(self) -> Sequence[inspect.Parameter]:
        return tuple(self.signature.parameters.values())


# --- the checks of a protocol class -----------------------------------------------------------


def questions_of(definition: str, hooks: object) -> Mapping[str, Question]:
    """The questions of a definition's `hooks`, by name.

    Raises:
        DefinitionError: It is no protocol class of async, annotated methods; the message names the
            class, the method and the remedy.
    """
    if hooks is None:
        return types.MappingProxyType({})
    if not isinstance(hooks, type):
        raise DefinitionError(
            definition,
            f"its hooks is {show(hooks)}",
            "Write the protocol class itself, as in hooks = PaymentHooks, or None.",
        )
    if not getattr(hooks, "_is_protocol", False):
        raise DefinitionError(
            definition,
            f"its hooks {hooks.__name__} is not a protocol class",
            f"Derive it from Protocol, as in class {hooks.__name__}(Protocol), and write each "
            f"question as a method without a body: {_EXAMPLE}.",
        )
    questions: dict[str, Question] = {}
    for name, attribute in _public(hooks).items():
        questions[name] = _question(definition, hooks, name, attribute)
    if not questions:
        raise DefinitionError(
            definition,
            f"its hooks {hooks.__name__} asks nothing",
            f"Give it a method for each question, as in {_EXAMPLE}.",
        )
    return types.MappingProxyType(questions)


def _public(hooks: type) -> dict[str, object]:
    """What a protocol class and its bases of the user's define or annotate, in order."""
    found: dict[str, object] = {}
    for cls in reversed(hooks.__mro__):
        if cls is object or cls.__module__ in ("typing", "typing_extensions"):
            continue
        names = dict.fromkeys((*inspect.get_annotations(cls), *vars(cls)))
        found.update({name: vars(cls).get(name) for name in names if not name.startswith("_")})
    return found


def _question(definition: str, hooks: type, name: str, attribute: object) -> Question:
    where = f"`{hooks.__name__}.{name}` of its hooks"
    if not inspect.isfunction(attribute):
        raise DefinitionError(
            definition,
            f"{where} is not a method, so it cannot be asked",
            f"Write it as {_EXAMPLE}, or begin its name with an underscore.",
        )
    if not inspect.iscoroutinefunction(attribute):
        raise DefinitionError(
            definition,
            f"{where} is not async, but handlers are awaited",
            f"Write `async def {name}(...)`.",
        )
    own, *parameters = inspect.signature(attribute).parameters.values() or (None,)
    if own is None or own.kind is not own.POSITIONAL_OR_KEYWORD:
        raise DefinitionError(
            definition, f"{where} takes no `self`", f"Write `async def {name}(self, ...)`."
        )
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise DefinitionError(
                definition,
                f"{where} takes `{stars}{parameter.name}`, which leaves open what a handler takes",
                "Name each of its parameters.",
            )
        if parameter.annotation is parameter.empty:
            raise DefinitionError(
                definition,
                f"{where} does not say what `{parameter.name}` is",
                f"Annotate it, as in {_EXAMPLE}.",
            )
    returns = inspect.signature(attribute).return_annotation
    tells, may_be_none = _answers(attribute, returns)
    if returns is inspect.Signature.empty or not may_be_none:
        empty = returns is inspect.Signature.empty
        problem = "does not say what it answers" if empty else f"answers {_text(returns)}"
        raise DefinitionError(
            definition,
            f"{where} {problem}, but without an extension the answer is None",
            "Write `-> None` for a question that only tells, or `-> Answer | None` for one that "
            "the first answer decides.",
        )
    return Question(name=name, signature=inspect.Signature(parameters), tells=tells)


def _text(annotation: object) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _answers(method: types.FunctionType, annotation: object) -> tuple[bool, bool]:
    """Whether an annotation is None alone, and whether it admits None.

    A text is read, not run: the names in it need not exist at run time.
    """
    if isinstance(annotation, str):
        words = annotation.strip("\"' ")
        resolved = getattr(sys.modules.get(method.__module__), words, None)
        if resolved is not None and not isinstance(resolved, str):
            return _answers(method, resolved)
        return words == "None", re.search(r"\b(None|Optional|Any|object)\b", words) is not None
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    admits = any(each in (None, type(None), Any, object) for each in members)
    return annotation in (None, type(None)), admits


def _is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


# --- asking -----------------------------------------------------------------------------------


@final
class Hooks:
    """The questions of one definition, asked in one phase: `await hooks.before_charge(1999)`."""

    __slots__ = ("_ask", "_questions")

    def __init__(
        self,
        questions: Mapping[str, Question],
        handlers: Callable[[str], Sequence[HookHandler]],
        report: Callable[[str], None],
        passes: Passes,
    ) -> None:
        async def ask(question: Question, args: Any, named: Any) -> Any:
            # The protocol's own signature: what does not fit is the asker's mistake.
            given = question.signature.bind(*args, **named)
            given.apply_defaults()
            return await _ask(question, given, handlers(question.name), report, passes)

        self._questions = questions
        self._ask = ask

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """The question of this name."""
        question = self._questions.get(name)
        if question is None:
            raise AttributeError(unknown_hook(name, self._questions))
        ask = self._ask

        async def asked(*args: Any, **named: Any) -> Any:
            return await ask(question, args, named)

        return asked

    def __dir__(self) -> list[str]:
        return sorted(self._questions)


async def _ask(
    question: Question,
    given: inspect.BoundArguments,
    handlers: Sequence[HookHandler],
    report: Callable[[str], None],
    passes: Passes,
) -> Any:
    await trio.lowlevel.checkpoint()
    for handler in handlers:
        answer = await ask_handler(handler, question.name, given.args, given.kwargs, passes)
        if isinstance(answer, Raised):
            report(f"{answer.place} raised and is skipped: {answer.what}")
            continue
        if answer is None:
            continue
        if not question.tells:
            return answer
        place = hook_place(question.name, handler)
        report(f"{place} answered {show(answer)}, which nobody asks for")
    return None


@attrs.frozen(kw_only=True)
class Raised:
    """What a handler raised, which is its own fault."""

    place: str
    """The hook and its extension."""
    what: str
    """Type and message of the error."""


def hook_place(name: str, handler: HookHandler) -> str:
    """A hook and its extension, for reports."""
    return f"the hook {name} of the extension {handler.extension!r}"


def ends_invocation(error: BaseException, store: str) -> bool:
    """Whether an error is nobody's fault: it ends the invocation, or is trouble of the storage."""
    return any(
        isinstance(leaf, _PASSES) or storage_trouble(leaf, store) is not None
        for leaf in leaves(error)
    )


Passes = Callable[[BaseException], bool]


async def ask_handler(
    handler: HookHandler,
    name: str,
    args: Sequence[Any],
    named: Mapping[str, Any],
    passes: Passes,
) -> Any | Raised:
    """Ask one handler: its answer, or what it raised. What ends the invocation passes."""
    try:
        answer = handler(*args, **named)
        if inspect.isawaitable(answer):
            answer = await answer
    except BaseException as error:  # noqa: ASYNC103 - a cancellation passes
        if stops_code(error) or passes(error):
            raise
        info = error_info(error)
        what = f"{info.type}: {info.message}"
        return Raised(  # noqa: ASYNC104 - a cancellation passes
            place=hook_place(name, handler), what=what
        )
    return answer


def unknown_hook(name: str, known: Mapping[str, Any]) -> str:
    """What to say of a hook that a definition does not have."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    if near:
        return f"there is no hook {name!r}. Did you mean {near[0]!r}?"
    return f"there is no hook {name!r}. There are {', '.join(sorted(known))}."


def no_hooks(definition: str) -> InvalidArgumentError:
    """The error for a task that asks though its definition declares no hooks."""
    return InvalidArgumentError(
        "ctx.hooks",
        f"{definition} declares no hooks; write `hooks = ItsHooks` in the class, with a protocol "
        "class of the questions",
    )


__all__ = [
    "HookHandler",
    "Hooks",
    "Question",
    "Raised",
    "ask_handler",
    "ends_invocation",
    "hook_place",
    "no_hooks",
    "questions_of",
    "unknown_hook",
]
