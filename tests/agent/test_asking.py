"""How the answers of several hooks of the built-in tasks come together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import attrs
import pytest

from pidurable import (
    AfterResponse,
    AfterTool,
    Ask,
    BeforeCompact,
    BeforeRequest,
    BeforeTool,
    BlockCall,
    Continue,
    Decline,
    OnYield,
    RequestMessage,
    Rewrite,
    Stop,
    Summary,
    ToolResult,
)
from pidurable.agent._asking import (
    ask_after_tool,
    ask_before_compact,
    ask_before_request,
    ask_before_tool,
    ask_observers,
    ask_on_yield,
    commit_observed,
)
from pidurable.errors import AbortRequestedError, InvalidArgumentError
from pidurable.records._messages import (
    AssistantMessage,
    TextBlock,
    Usage,
    UserMessage,
)
from pidurable.registry import tool
from pidurable.registry._hooks import InstalledHook
from pidurable.tasks._hooks import ends_invocation


class Staging(list[str]):
    """As much of a transaction as observers need."""

    def lend(self, to: str | None) -> None:
        """To whom does not matter here."""


class Context:
    """As much of a task's context as asking needs."""

    def __init__(self, *handlers: Callable[..., Any]) -> None:
        self._handlers = [
            InstalledHook(extension=f"e{place}", name="any", handler=handler)
            for place, handler in enumerate(handlers)
        ]
        self.reports: list[str] = []
        self.memos: dict[str, Any] = {}
        self.commits: list[list[str]] = []

    def handlers(self, name: str) -> list[InstalledHook]:
        """All of them, whatever the hook."""
        return self._handlers

    def report(self, error: Any) -> None:
        """Note it."""
        self.reports.append(str(error))

    def passes(self, error: BaseException) -> bool:
        """As a task's context says."""
        return ends_invocation(error, "own")

    async def memo(self, name: str, candidate: Any) -> Any:
        """The first writer wins."""
        return self.memos.setdefault(name, candidate)

    @asynccontextmanager
    async def commit(self) -> Any:
        """Staged is a list; it is kept where the body ends."""
        staged = Staging()
        yield staged
        if "unstorable" in staged:
            raise ValueError("the commit cannot be made")
        self.commits.append(staged)

    async def _run(self, body: Callable[[Any], Any]) -> Any:
        """The same for a body that awaits nothing."""
        async with self.commit() as staged:
            return body(staged)


@tool
async def target(what: str = "x") -> str:
    """Do something."""
    return what


BASE: dict[str, Any] = {"conversation_id": 1, "task": 2}
ANSWER = AssistantMessage(
    blocks=(TextBlock(text="yes"),),
    status="complete",
    stop_reason="stop",
    model="m",
    usage=Usage(),
    at_us=0,
)


def before_tool(arguments: Any) -> BeforeTool:
    return BeforeTool(**BASE, name="target", arguments=arguments, tool=target)


def said(text: str) -> RequestMessage:
    return RequestMessage(message=UserMessage(blocks=(TextBlock(text=text),), at_us=0))


def request(*texts: str) -> BeforeRequest:
    messages = tuple(said(text) for text in texts)
    return BeforeRequest(
        **BASE, run=2, turn=1, model="m", thinking=None, system="", messages=messages, tools=()
    )


async def test_arguments_are_rewritten_in_order() -> None:
    """Each handler sees what the one before it has left."""
    ctx: Any = Context(
        lambda call: Rewrite({"what": call.arguments["what"] + "1"}),
        lambda call: None,
        lambda call: Rewrite({"what": call.arguments["what"] + "2"}),
    )
    decision = await ask_before_tool(ctx, before_tool({"what": "x"}))
    assert (decision.arguments, decision.rewritten) == ({"what": "x12"}, True)
    assert decision.block is None
    assert decision.ask is None


async def test_the_first_block_wins_and_nobody_is_asked_after_it() -> None:
    """A call that one extension blocks is blocked, also where an earlier one would ask."""
    asked: list[str] = []
    ctx: Any = Context(
        lambda call: Ask("low"),
        lambda call: BlockCall("never on Sundays"),
        lambda call: asked.append("later"),
    )
    decision = await ask_before_tool(ctx, before_tool({}))
    assert decision.block == "never on Sundays"
    assert asked == []


async def test_any_ask_asks_and_the_highest_risk_counts() -> None:
    """Asks come together: every reason once, the highest risk, the shortest time."""
    ctx: Any = Context(
        lambda call: Ask("low", "it writes", seconds=60),
        lambda call: Ask("high", "it pays"),
        lambda call: Ask("medium", "it writes", seconds=30),
    )
    decision = await ask_before_tool(ctx, before_tool({}))
    assert decision.ask == Ask("high", "it writes\nit pays", seconds=30)


@pytest.mark.parametrize("answer", [True, "no", 1, {"block": True}, Stop("x")])
async def test_an_answer_that_is_none_of_the_known_ones_blocks(answer: Any) -> None:
    """What guards a call fails closed."""
    ctx: Any = Context(lambda call: answer)
    decision = await ask_before_tool(ctx, before_tool({}))
    assert decision.block is not None
    assert "expected a Rewrite, a BlockCall or an Ask" in decision.block
    assert ctx.reports == [decision.block]


async def test_a_raise_of_before_tool_blocks() -> None:
    """A guard that fails lets nothing through."""

    def guard(call: BeforeTool) -> None:
        raise ValueError("the rules cannot be read")

    ctx: Any = Context(guard)
    decision = await ask_before_tool(ctx, before_tool({}))
    assert decision.block is not None
    assert "ValueError: the rules cannot be read" in decision.block
    assert "the extension 'e0'" in decision.block


async def test_arguments_that_are_no_json_block() -> None:
    """A rewrite that could not be stored blocks the call, and says where it is wrong."""
    ctx: Any = Context(lambda call: Rewrite({"when": float("nan")}))
    decision = await ask_before_tool(ctx, before_tool({}))
    assert decision.block is not None
    assert "$.arguments.when" in decision.block


async def test_a_handler_cannot_change_the_arguments_it_was_given() -> None:
    """Only what it answers counts."""

    def changes(call: BeforeTool) -> None:
        call.arguments["what"] = "other"

    stored = {"what": "x"}
    ctx: Any = Context(changes)
    decision = await ask_before_tool(ctx, before_tool(stored))
    assert decision.arguments == stored == {"what": "x"}


async def test_what_ends_the_invocation_passes() -> None:
    """An abort is no answer of a hook."""

    def aborted(call: BeforeTool) -> None:
        raise AbortRequestedError(2, "user")

    ctx: Any = Context(aborted)
    with pytest.raises(AbortRequestedError):
        await ask_before_tool(ctx, before_tool({}))


async def test_messages_are_replaced_in_order_and_the_first_stop_wins() -> None:
    """What stops a run is not undone by who comes later."""
    ctx: Any = Context(lambda r: [*r.messages, said("b")], lambda r: [*r.messages, said("c")])
    messages = await ask_before_request(ctx, request("a"))
    assert messages == (said("a"), said("b"), said("c"))
    ctx = Context(lambda r: Stop("enough"), lambda r: Stop("later"), lambda r: r.messages)
    assert await ask_before_request(ctx, request("a")) == Stop("enough")
    ctx = Context(lambda r: ["text"], lambda r: "text")
    assert await ask_before_request(ctx, request("a")) == (said("a"),)
    assert len(ctx.reports) == 2


async def test_the_first_continuation_wins() -> None:
    """A text is a continuation; nothing, or anything else, is none."""
    asked = OnYield(**BASE, run=2, turn=1, answer=ANSWER)
    ctx: Any = Context(lambda a: 1, lambda a: None, lambda a: "go on", lambda a: Continue("no"))
    assert await ask_on_yield(ctx, asked) == Continue("go on")
    assert len(ctx.reports) == 1
    assert await ask_on_yield(Context(lambda a: None), asked) is None  # type: ignore[arg-type]


async def test_results_are_replaced_in_order() -> None:
    """Each handler sees the result as the one before it has left it."""
    asked = AfterTool(**BASE, name="target", arguments={}, result=ToolResult("a"))
    ctx: Any = Context(
        lambda call: ToolResult(f"{call.result.content}b"),
        lambda call: None,
        lambda call: ToolResult(f"{call.result.content}c"),
    )
    assert await ask_after_tool(ctx, asked) == ToolResult("abc")
    assert await ask_after_tool(Context(lambda call: None), asked) is None  # type: ignore[arg-type]


async def test_a_raise_of_any_other_hook_is_reported_and_skipped() -> None:
    """An observer, or who would improve a result, cannot end the call."""

    def breaks(_: Any) -> None:
        raise KeyError("x")

    asked = AfterTool(**BASE, name="target", arguments={}, result=ToolResult("a"))
    ctx: Any = Context(breaks, lambda call: ToolResult("b"))
    assert await ask_after_tool(ctx, asked) == ToolResult("b")
    assert "skipped: KeyError" in ctx.reports[0]


async def test_the_first_decision_on_a_compaction_wins() -> None:
    """Decline and Summary are decisions; nothing else is."""
    asked = BeforeCompact(
        **BASE, why="manual", instructions=None, messages=(), first_kept=3, tokens=9
    )
    ctx: Any = Context(lambda r: "text", lambda r: Summary("short"), lambda r: Decline("no"))
    assert await ask_before_compact(ctx, asked) == Summary("short")
    assert len(ctx.reports) == 1


async def test_memos_of_two_extensions_do_not_meet() -> None:
    """The name of a memo is the extension's own."""

    async def remember(call: AfterTool) -> ToolResult:
        return ToolResult(str(await call.memo("n", f"{call.result.content}+")))

    asked = AfterTool(**BASE, name="target", arguments={}, result=ToolResult("a"))
    ctx: Any = Context(remember, remember)
    assert await ask_after_tool(ctx, asked) == ToolResult("a++")
    assert ctx.memos == {"e0:n": "a+", "e1:n": "a++"}
    # Asked again, as after a crash, they decide the same, whatever they would say now.
    again = attrs.evolve(asked, result=ToolResult("other"))
    assert await ask_after_tool(ctx, again) == ToolResult("a++")


def _raises(tx: Any) -> None:
    raise ValueError("no such document")


class Stages:
    """Observers of an answer, by what they stage."""

    every: ClassVar[dict[str, Any]] = {
        "good": lambda tx: tx.append("good"),
        "raises": _raises,
        "unstorable": lambda tx: tx.append("unstorable"),
    }


@pytest.mark.parametrize(
    ("names", "stored", "reports"),
    [
        ((), ["decided"], 0),
        (("good",), ["good", "decided"], 0),
        (("good", "raises"), ["good", "decided"], 1),
        (("raises", "good", "raises"), ["good", "decided"], 2),
        (("good", "unstorable"), ["decided"], 2),
    ],
)
async def test_a_decision_is_never_lost_for_an_observer(
    names: tuple[str, ...], stored: list[str], reports: int
) -> None:
    """What an observer stages is stored with the decision; one that fails is left out."""
    ctx: Any = Context(*(lambda a, stage=Stages.every[name]: stage for name in names))
    asked = AfterResponse(**BASE, run=2, turn=1, answer=ANSWER)
    observed = await ask_observers(ctx, "after_response", asked)
    assert len(observed) == len(names)

    await commit_observed(ctx, observed, lambda tx: tx.append("decided"))  # type: ignore[attr-defined]

    assert ctx.commits == [stored]
    assert len(ctx.reports) == reports


async def test_a_decision_that_cannot_be_made_raises() -> None:
    """Without observers the error is the asker's own."""

    def decide(tx: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await commit_observed(Context(), [], decide)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ask("huge"),  # type: ignore[arg-type]
        lambda: Ask("low", seconds=0),
        lambda: Ask("low", seconds=True),
        lambda: Ask("low", seconds=float("nan")),
    ],
)
def test_an_ask_that_says_nonsense_is_refused(make: Callable[[], Ask]) -> None:
    """Where it is made, so that the hook raises and the call is blocked."""
    with pytest.raises(InvalidArgumentError):
        make()
