"""The world outside of the product in which programs of turns are played: a book, a model, tools.

Nothing here asks the product what happened. Every effect of a tool, everything that the host did
and was told, is a line of the book, in order; every request that the provider got is kept by the
provider. Each input, call and answer carries a marker of its own, so that it is known again
wherever it comes up. All of it works in one process (the book is a list) and over processes that
are killed (the book is a file to which each line is written at once).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import trio

from pidurable.agent._generation import Generation
from pidurable.agent._hooks import (
    AfterTools,
    Ask,
    BeforeRequest,
    BeforeTool,
    BlockCall,
    OnYield,
    Rewrite,
    Stop,
)
from pidurable.agent._script import Cut, Defer, RequestView, ScriptedCall, ScriptedError, Step, Wire
from pidurable.agent._services import AgentChange
from pidurable.agent._tool_call import ToolTask
from pidurable.errors import OutcomeUnknownError, UnansweredError
from pidurable.registry import Extension, Hook, Tool, ToolCall, ToolResult, hook, tool

Line = dict[str, Any]


class Book:
    """What happened outside, in order. With a path it outlives the process that writes it."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.lines: list[Line] = []
        if path is not None and path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, what: str, **facts: Any) -> None:
        """Write a line; it is whole or not there, whenever the process dies."""
        line = {"what": what, **facts}
        self.lines.append(line)
        if self._path is not None:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(file, (json.dumps(line) + "\n").encode())
            finally:
                os.close(file)

    def find(self, what: str, **facts: Any) -> list[Line]:
        """The lines of a kind that have these facts."""
        return [
            line
            for line in self.lines
            if line["what"] == what and all(line.get(k) == v for k, v in facts.items())
        ]


# --- the model ----------------------------------------------------------------------------------

Template = list[Any]
"""One answer of a program, as JSON: a kind, and numbers that its maker reads."""

CALLED = (
    "once", "safe", "look", "slow", "raises", "unsure", "bare", "subagent", "nope",
    "parked", "asked", "nest", "bye", "hand", "flip",
    "asked", "parked", "asked", "look",
)  # fmt: skip
"""Tools that answers call, by number; `nope` and, until it is installed, any other is unknown."""
BROKEN = ("", "{", "[]", '{"what": "%s', "\x00", '{"what": 3, "what": "%s"}', "null")
"""Arguments that are none; %s is the marker, which must then never be in the ledger."""
TEXTS = ("%s", "%s it is", " \n", "\ud800%s", "%s\x00")
ANSWERS_MAX = 150
"""After so many odd answers a program has shown what it has to show."""
SUMMARY = "## Summary\nWhat was said is known."


class DrawnScript:
    """Answers a program's templates in turn, each with markers that nothing else has.

    It stands in the place of a `Script`, behind the scripted model as well as behind the strict
    server. `given` says what each answer was, in the order of the requests.
    """

    log: str | None = None
    context_window: int | None = None

    def __init__(self, templates: list[Template], *, window: int | None = None) -> None:
        self.templates = templates or [["text", 0]]
        self.context_window = window
        self.steps: list[Step] = []
        self.given: list[Line] = []
        self.calm = False
        """Nothing odd any more: every request is answered by a plain text."""

    def choose(self, view: RequestView) -> int:
        """Make the step that answers this request, and return its number."""
        number = len(self.steps)
        template = self.templates[number % len(self.templates)]
        if is_summary(view):
            template = template if template[0] in ("error", "cut", "empty", "text") else ["summary"]
            template = ["summary"] if self.calm else template
        elif self.calm or number > ANSWERS_MAX or (template[0] == "calls" and not view.tools):
            template = ["text", 0]
        step, facts = self._make(template, number, depth="the child" in view.system)
        self.steps.append(step)
        facts["summary"] = is_summary(view)
        self.given.append({"number": number, "kind": template[0], **facts})
        return number

    def _make(self, template: Template, number: int, *, depth: bool) -> tuple[Step, Line]:
        kind, *rest = template
        answer = f"ans-{number}."
        match kind:
            case "summary":
                return Step(text=SUMMARY), {"answer": None}
            case "text":
                text = TEXTS[rest[0] % len(TEXTS)]
                text = text % answer if "%s" in text else text
                return Step(text=text), {"answer": answer if "ans" in text else None}
            case "slow text":
                pieces = (answer, " and", " then", " some")
                return Step(text=pieces, delay=0.08 * (1 + rest[0])), {"answer": answer}
            case "calls":
                return self._calls(rest, number, depth=depth)
            case "deferred":
                defer = Defer(polls=1 + rest[0] % 3)
                return Step(text=answer, defer=defer), {"answer": answer}
            case "error":
                kinds: tuple[Any, ...] = ("retryable", "overflow", "auth", "other")
                after = (None, 2.0, 1e6, 0.0)[rest[1] % 4]
                error = ScriptedError(kind=kinds[rest[0] % 4], detail="scripted", retry_after=after)
                return Step(error=error), {"answer": None}
            case "cut":
                cut = Cut(after=rest[0] % 3, raises=bool(rest[1] % 2))
                return Step(text=(answer, " cut", " short"), cut=cut, times=1), {"answer": None}
        return Step(text=""), {"answer": None}

    def _calls(self, rest: list[Any], number: int, *, depth: bool) -> tuple[Step, Line]:
        calls: list[ScriptedCall] = []
        asked: list[Line] = []
        for place, (which, how) in enumerate(rest[0]):
            name = CALLED[which % len(CALLED)]
            if depth and name in ("subagent", "hand"):
                name = "safe"
            marker = f"c-{number}-{place}."
            arguments: Any = {"what": marker}
            if how < len(BROKEN):
                text = BROKEN[how]
                arguments = text % marker if "%s" in text else text
            calls.append(ScriptedCall(name=name, arguments=arguments))
            asked.append({"marker": marker, "tool": name, "broken": how < len(BROKEN)})
        text = f"ans-{number}." if rest[1] else ""
        # Providers repeat their ids, which only the server can do: within an answer and over many.
        wire = Wire(call_id="same") if rest[2] == 1 else Wire()
        return Step(text=text, calls=tuple(calls), delay=0.02 * rest[2], wire=wire), {
            "answer": text or None,
            "calls": asked,
        }


def is_summary(view: RequestView) -> bool:
    """Whether a request asks for a summary, and is not a turn of a run."""
    return not view.tools and "summar" in view.system.lower()


# --- tools --------------------------------------------------------------------------------------

Policy = Literal["safe", "interrupt", "reconcile", "park"]


class Tools:
    """The tools of a program. An effect is a line of the book, and nothing else is."""

    def __init__(
        self, book: Book, *, dead: Callable[[], bool] = lambda: False, pace: float = 1.0
    ) -> None:
        self.book = book
        self.dead = dead
        self.pace = pace
        """Virtual seconds may be long; real ones are not."""
        self.reloads = 0
        self.calm = False
        """Nothing is stopped or continued any more."""

    def extension(self, **parts: Any) -> Extension:
        """All tools, as they are after so many reloads."""
        flip: Policy = "safe" if self.reloads % 2 else "interrupt"
        makers = (
            self._plain("once", "interrupt", 0.01),
            self._plain("safe", "safe", 0.01),
            self._plain("slow", "safe", 3.0),
            self._plain("flip", flip, 0.05, version=1 + self.reloads),
            self._plain("parked", "park", 0.05),
            self._plain("asked", "interrupt", 0.01, version=1 + self.reloads),
            self._look(),
            self._raises(),
            self._unsure(),
            self._bare(),
            self._subagent(),
            self._ending("bye", terminate=True),
            self._ending("hand", handoff="the note"),
            self._nest(),
        )
        return Extension("turns", tools=makers, hooks=self._hooks(), **parts)

    def _hooks(self) -> tuple[Hook, ...]:
        """What guards, stops and watches the turns. After a reload it may guard more closely."""
        reloads = self.reloads

        async def before_tool(call: BeforeTool) -> Ask | BlockCall | Rewrite | None:
            what = str(call.arguments.get("what"))
            if call.name == "asked":
                # The version is what a yes is about; see the judge.
                risk: Any = "high" if reloads % 3 == 2 else "medium"
                return Ask(risk, f"version {call.tool.version}")
            if call.name == "once" and what.endswith("-3."):
                self.book.add("blocked", marker=what)
                return BlockCall("not the fourth one")
            if call.name == "bare":
                return Rewrite({"what": what + " rewritten"})
            return None

        async def before_request(request: BeforeRequest) -> Stop | None:
            last = markers(str(request.messages[-1].message), "in")
            if not self.calm and last and int(last[-1][3:-1]) % 11 == 7:
                return Stop(f"no more of {last[-1]}")
            return None

        async def on_yield(answer: OnYield) -> str | None:
            found = markers(answer.answer.text, "ans")
            if not self.calm and found and int(found[0][4:-1]) % 9 == 5:
                return f"and after {found[0]}?"
            return None

        async def after_tools(round: AfterTools) -> Any:
            data = {"round": round.assistant}
            return lambda tx: tx.append(round.conversation_id, data, kind="observed")

        generation = {"before_request": before_request, "on_yield": on_yield}
        return (
            hook(ToolTask, before_tool=before_tool),
            hook(Generation, after_tools=after_tools, **generation),
        )

    async def effect(self, call: ToolCall, policy: Policy, what: str, *, version: int = 1) -> None:
        """The one thing that cannot be taken back. What is dead does nothing any more."""
        if self.dead():
            await trio.sleep_forever()
        self.book.add(
            "effect",
            tool=call.name,
            call=call.id,
            key=call.key("effect"),
            marker=what,
            policy=policy,
            version=version,
            reloads=self.reloads,
        )

    def _plain(
        self, name: str, policy: Policy, seconds: float, *, version: int = 1
    ) -> Tool[..., Any]:
        async def run(what: str, call: ToolCall) -> str:
            """Do what it is called for.

            Args:
                what: The marker.
            """
            await call.output(f"{name} begins {what}\n")
            await self.effect(call, policy, what, version=version)
            await call.sleep(seconds * self.pace)
            return f"did {what}"

        return tool(name=name, replay=policy, version=version)(run)

    def _look(self) -> Tool[..., Any]:
        async def reconcile(arguments: Any, call: ToolCall) -> Any:
            await call.sleep(0)
            if self.book.find("effect", key=call.key("effect")):
                return ToolResult(f"did {arguments['what']}, as the book says")
            return False

        @tool(replay="reconcile", reconcile=reconcile)
        async def look(what: str, call: ToolCall) -> str:
            """Do something whose book can be looked at.

            Args:
                what: The marker.
            """
            await self.effect(call, "reconcile", what)
            await call.sleep(0.01)
            return f"did {what}"

        return look

    def _raises(self) -> Tool[..., Any]:
        @tool
        async def raises(what: str, call: ToolCall) -> str:
            """Do something, and fail.

            Args:
                what: The marker.
            """
            await self.effect(call, "interrupt", what)
            raise ValueError(f"failed at {what}")

        return raises

    def _unsure(self) -> Tool[..., Any]:
        @tool
        async def unsure(what: str, call: ToolCall) -> str:
            """Do something, and lose sight of it.

            Args:
                what: The marker.
            """
            await self.effect(call, "interrupt", what)
            raise OutcomeUnknownError("the line went dead")

        return unsure

    def _bare(self) -> Tool[..., Any]:
        @tool(replay="safe")
        async def bare(what: str, call: ToolCall) -> ToolResult:
            """Do something, and say nothing, or an error.

            Args:
                what: The marker.
            """
            await self.effect(call, "safe", what)
            return ToolResult(" ", error="1. " in what, details={"seen": what})

        return bare

    def _subagent(self) -> Tool[..., Any]:
        @tool(replay="safe")
        async def subagent(what: str, call: ToolCall) -> str:
            """Delegate something to a sub-agent and return its answer.

            Args:
                what: The marker.
            """
            child = await call.child(agent=AgentChange(instructions="you are the child"))
            submission = await child.submit(f"child {what}", request_id=call.key("task"))
            try:
                return str((await submission.wait()).text)
            except UnansweredError as none:
                return f"the child has no answer: {none.reason}"

        return subagent

    def _ending(self, name: str, **options: Any) -> Tool[..., Any]:
        async def run(what: str, call: ToolCall) -> ToolResult:
            """End the run, or move it.

            Args:
                what: The marker.
            """
            await self.effect(call, "interrupt", what)
            return ToolResult(f"did {what}", **options)

        return tool(name=name)(run)

    def _nest(self) -> Tool[..., Any]:
        @tool(replay="safe")
        async def nest(what: str, call: ToolCall) -> str:
            """Call two tools one after the other, the second of which somebody may be asked about.

            Args:
                what: The marker.
            """
            self.book.add("nests", marker=what)
            first = await call.execute_tool("once", {"what": f"{what}n1."})
            name = "asked" if what.endswith("1.") else "safe"
            second = await call.execute_tool(name, {"what": f"{what}n2."}, key="second")
            return f"nested {first.is_error} {second.is_error}"

        return nest


MARKER = re.compile(r"(?:in|wr)-\d+\.|c-\d+-\d+\.(?:n\d\.)?|ans-\d+\.")


def markers(text: str, sign: str) -> list[str]:
    """The markers of a kind (`in`, `wr`, `c`, `ans`) in a text, in order."""
    return [found for found in MARKER.findall(text) if found.startswith(f"{sign}-")]
