"""Asking the hooks of a definition: who is asked, whose answer counts, and what a raise does."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import pytest
import trio
from worlds import Actor, World

from pidurable.errors import (
    AbortRequestedError,
    InvalidArgumentError,
    InvocationEndedError,
    SessionClosedError,
    StorageAccessError,
    StorageCorruptError,
    StorageRefusedError,
)
from pidurable.tasks._hooks import Hooks, Question, ends_invocation, questions_of

Refusal = str | None


class Questions(Protocol):
    """What the tests ask."""

    async def before(self, cents: int, *, currency: str = "EUR") -> str | None: ...

    async def told(self, text: str) -> None: ...

    async def aliased(self) -> Refusal: ...


@attrs.frozen
class Handler:
    """A handler as a registry hands it out."""

    extension: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)


def asking(*functions: Callable[..., Any]) -> tuple[Questions, list[str]]:
    """Hooks with these handlers for every question, and what is reported."""
    reports: list[str] = []
    handlers: Sequence[Handler] = [
        Handler(f"ext{number}", function) for number, function in enumerate(functions)
    ]
    questions = questions_of("Test", Questions)

    def passes(error: BaseException) -> bool:
        return ends_invocation(error, "own")

    hooks: Any = Hooks(questions, lambda name: handlers, reports.append, passes)
    return hooks, reports


async def test_the_first_answer_counts_and_nobody_is_asked_after_it() -> None:
    """Handlers are asked in order, async or not, until one answers anything but None."""
    asked: list[Any] = []

    def silent(cents: int, *, currency: str) -> None:
        asked.append((cents, currency))

    async def answers(amount: int, *, currency: str) -> str:
        asked.append(amount)
        await trio.lowlevel.checkpoint()
        return ""

    def never(cents: int, *, currency: str) -> str:
        raise AssertionError("asked after the answer")

    hooks, reports = asking(silent, answers, never)

    assert await hooks.before(cents=5) == ""
    assert asked == [(5, "EUR"), 5]
    assert reports == []


async def test_without_an_answer_the_answer_is_none() -> None:
    """No handler, or none that answers, gives None; the call is a checkpoint all the same."""
    for hooks, _ in (asking(), asking(lambda cents, currency: None)):
        with trio.CancelScope() as scope:
            scope.cancel()
            await hooks.before(1)
        assert scope.cancelled_caught
        assert await hooks.before(1) is None


async def test_a_question_that_tells_reaches_everybody() -> None:
    """Every handler hears it; one that answers is reported, and changes nothing."""
    heard: list[str] = []
    hooks, reports = asking(lambda text: 7, heard.append, heard.append)

    await hooks.told("it")

    assert heard == ["it", "it"]
    assert reports == ["the hook told of the extension 'ext0' answered 7, which nobody asks for"]


async def test_a_handler_that_raises_is_reported_and_skipped() -> None:
    """Its error does not reach the task, and the next one is asked."""

    async def group(cents: int, *, currency: str) -> None:
        raise ExceptionGroup("several", [ValueError("a"), OSError("b")])

    def broken(cents: int, *, currency: str) -> str:
        raise KeyError("x")

    hooks, reports = asking(broken, group, lambda cents, currency: "no")

    assert await hooks.before(1) == "no"
    assert [each.partition(" raised ")[0] for each in reports] == [
        "the hook before of the extension 'ext0'",
        "the hook before of the extension 'ext1'",
    ]
    assert "KeyError: 'x'" in reports[0]
    assert "ValueError: a; OSError: b" in reports[1]


@pytest.mark.parametrize(
    "error",
    [
        AbortRequestedError(1, "user"),
        ExceptionGroup("two", [ValueError(), InvocationEndedError(1, "over")]),
        KeyboardInterrupt(),
        SessionClosedError("own"),
        StorageRefusedError("own", "disk full"),
        StorageAccessError("own", "disk I/O error"),
        ExceptionGroup("two", [ValueError(), StorageCorruptError("own", "a damaged page")]),
    ],
)
async def test_what_is_nobodys_fault_passes(error: BaseException) -> None:
    """An abort, the end of the phase, Ctrl-C or trouble of the storage leaves no decision out."""

    def raises(cents: int, *, currency: str) -> None:
        raise error

    hooks, reports = asking(raises)

    with pytest.raises(type(error)):
        await hooks.before(1)
    assert reports == []


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError("of another loop"),
        BaseExceptionGroup("two", [ValueError("x"), asyncio.CancelledError()]),
    ],
)
async def test_what_another_library_cancels_is_an_error_of_the_handler(
    error: BaseException,
) -> None:
    """Below BaseException alone, and yet nothing that stops the task: it is reported."""

    def raises(cents: int, *, currency: str) -> None:
        raise error

    hooks, reports = asking(raises, lambda cents, currency: "no")

    assert await hooks.before(1) == "no"
    assert len(reports) == 1
    assert "CancelledError" in reports[0]


@pytest.mark.parametrize(
    "error", [SystemExit(1), BaseExceptionGroup("two", [ValueError(), KeyboardInterrupt()])]
)
async def test_the_end_of_the_process_passes(error: BaseException) -> None:
    """Ctrl-C and SystemExit are for the host, also in a group."""

    def raises(cents: int, *, currency: str) -> None:
        raise error

    hooks, reports = asking(raises)

    with pytest.raises(type(error)):
        await hooks.before(1)
    assert reports == []


async def test_a_cancellation_passes_and_is_no_error_of_the_handler() -> None:
    """Who is cancelled while a handler works leaves it, whatever the handler makes of that."""

    async def waits(cents: int, *, currency: str) -> None:
        await trio.sleep_forever()

    async def renames(cents: int, *, currency: str) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            raise BaseExceptionGroup("mine", [cancelled]) from None

    for handler in (waits, renames):
        hooks, reports = asking(handler)
        with trio.move_on_after(0) as scope:
            await hooks.before(1)
        assert scope.cancelled_caught
        assert reports == []


async def test_trouble_of_another_store_is_the_fault_of_who_opened_it() -> None:
    """Its handler is reported and skipped, as for any other raise."""

    def raises(cents: int, *, currency: str) -> None:
        raise StorageRefusedError("another", "disk full")

    hooks, reports = asking(raises, lambda cents, currency: "no")

    assert await hooks.before(1) == "no"
    assert len(reports) == 1


async def test_a_question_asked_wrongly_is_the_mistake_of_who_asks() -> None:
    """Arguments that the protocol does not take, and a name it has not, are refused at once."""
    hooks, _ = asking()
    any_hooks: Any = hooks

    with pytest.raises(TypeError, match="missing a required argument: 'cents'"):
        await any_hooks.before()
    with pytest.raises(TypeError, match="unexpected keyword argument 'curency'"):
        await any_hooks.before(1, curency="USD")
    with pytest.raises(AttributeError, match=r"no hook 'befor'\. Did you mean 'before'"):
        any_hooks.befor  # noqa: B018
    with pytest.raises(AttributeError, match=r"no hook 'xyz'\. There are aliased, before, told"):
        any_hooks.xyz  # noqa: B018
    assert dir(hooks) == ["aliased", "before", "told"]


def test_questions_are_read_off_the_protocol_and_its_bases() -> None:
    """Each public method is one, private ones are none, and aliases of the module are looked up."""

    class More(Questions, Protocol):
        async def _private(self) -> int: ...

        async def maybe(self, what: Any) -> Any: ...

    questions = questions_of("Test", More)

    assert list(questions) == ["before", "told", "aliased", "maybe"]
    assert {name: each.tells for name, each in questions.items()} == {
        "before": False,
        "told": True,
        "aliased": False,
        "maybe": False,
    }
    assert str(questions["before"]) == "before(cents, *, currency='EUR')"
    assert questions_of("Test", None) == {}


def test_real_annotations_are_read_as_text_is() -> None:
    """Without postponed annotations, unions and None are what they are."""

    async def method(self: Any, cents: Any) -> Any: ...

    def made(returns: Any) -> Question:
        method.__annotations__ = {"cents": int, "return": returns}
        cls = type("Made", (Protocol,), {"method": method})  # type: ignore[arg-type]
        return questions_of("Test", cls)["method"]

    assert made(None).tells
    assert not made(str | None).tells
    assert not made(Any).tells
    with pytest.raises(TypeError, match="answers int, but without an extension"):
        made(int)


@pytest.mark.parametrize(
    ("handler", "fits"),
    [
        (lambda cents, *, currency: None, True),
        (lambda *args, **named: None, True),
        (lambda amount, currency="": None, True),
        (lambda: None, False),
        (lambda cents: None, False),
        (lambda cents, more, *, currency: None, False),
        (dict, True),  # It does not tell what it takes.
    ],
)
def test_a_handler_must_take_what_is_asked(handler: Any, fits: bool) -> None:
    """Whether it does is known when it is installed, where its signature can be read."""
    question = questions_of("Test", Questions)["before"]

    assert question.accepts(handler) is fits
    assert isinstance(question.signature, inspect.Signature)


class Asking(Actor):
    """An actor that has hooks."""

    name = "test.asking"
    hooks = Questions


async def test_without_a_harness_nobody_answers() -> None:
    """A runtime of its own has no extensions; a definition without hooks cannot ask."""
    world = World(Asking, Actor)
    seen: list[Any] = []

    async def asks(at: Any, ctx: Any) -> None:
        hooks: Questions = ctx.hooks
        seen.append((await hooks.before(1), list(ctx.handlers("before"))))
        with pytest.raises(InvalidArgumentError, match=r"name: there is no hook 'bfore'\. Did you"):
            ctx.handlers("bfore")
        await ctx.complete("")

    async def cannot(at: Any, ctx: Any) -> None:
        for ask in (lambda: ctx.hooks, lambda: ctx.handlers("before")):
            with pytest.raises(InvalidArgumentError, match=r"test.actor declares no hooks; write"):
                ask()
        await ctx.complete("")

    async with world.open():
        for name, script, kind in (("a", asks, Asking), ("b", cannot, Actor)):
            task = await world.create(name, script, kind=kind)
            assert (await world.end(task)).status == "completed"
    assert seen == [(None, [])]


async def test_what_only_a_harness_has_says_so() -> None:
    """Models, environments, handles and the registry are refused with the way out."""
    world = World()

    async def script(at: Any, ctx: Any) -> None:
        for ask in (
            lambda: ctx.models,
            lambda: ctx.registry,
            ctx.env,
            ctx.conversation,
            lambda: ctx.submission(1),
        ):
            with pytest.raises(InvalidArgumentError, match=r"^ctx\..*use open_harness"):
                ask()
        await ctx.complete("")

    async with world.open():
        assert (await world.end(await world.create("a", script))).status == "completed"
