"""The story of a run: what its events mean for people, as state and as lines that stay.

`Story` takes the events of one conversation. It keeps what happens right now (for a live display)
and returns the lines that are worth keeping: each call and its result, each answer on the way, what
was cut, what is tried again. The final answer is not among them: it is the result, for stdout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import trio

from pidurable.agent._permissions import PermissionRequest
from pidurable.cli._render import clean, clean_line, compact_json, duration, tail
from pidurable.harness._events import (
    Event,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    PermissionAsked,
    PermissionDecided,
    RetryEnd,
    RetryStart,
    RunEnd,
    RunStart,
    Snapshot,
    SubmissionChanged,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnStart,
)
from pidurable.records._codes import explain_code
from pidurable.records._entries import Entry
from pidurable.records._messages import AssistantMessage, TextBlock, ToolResultMessage

__all__ = ["RunningCall", "Story"]

ARGUMENTS_CHARS_MAX = 160
RESULT_LINES_MAX = 4
LINE_CHARS_MAX = 160
TEXT_KEPT_CHARS = 4_000


@attrs.define(eq=False)
class RunningCall:
    """A call as far as it has come."""

    task: int
    index: int
    name: str
    arguments: Any
    since: float | None
    """None: it was found running, so nobody here knows."""
    output: str = ""
    held_by: str | None = None
    """What it waits for, as `permission 12`."""

    def title(self) -> str:
        """Return what is called, with what."""
        name = clean_line(self.name, chars_max=64)
        if self.arguments is None:
            return name
        return f"{name} {compact_json(self.arguments, chars_max=ARGUMENTS_CHARS_MAX)}"


def _asked_line(request: PermissionRequest) -> list[str]:
    return [f"permission {request.id}: task {request.task} waits for a person"]


@attrs.define(eq=False)
class Story:
    """One conversation, followed from a snapshot on."""

    clock: Callable[[], float] = trio.current_time
    run: int | None = None
    turn: int = 0
    run_since: float | None = None
    text: str = ""
    """The end of the answer that is being streamed."""
    kind: str = ""
    """Whether it is `text` or `thinking` right now."""
    retry: RetryStart | None = None
    calls: dict[int, RunningCall] = attrs.Factory(dict)
    """By their index in the round."""
    permissions: dict[int, PermissionRequest] = attrs.Factory(dict)
    """What a person is asked, here and below, by id; the oldest first."""
    asked: Callable[[PermissionRequest], list[str]] = _asked_line
    """What is said where a call begins to wait."""
    settled: dict[int, str] = attrs.Factory(dict)
    """Submissions that ended while this was watched, with their status."""

    def tell(self, events: Iterable[Event]) -> list[str]:
        """Take the events of one commit; return the lines that stay."""
        events = list(events)
        # An answer without calls ends its run, unless a hook goes on with it.
        ends = not any(isinstance(event, TurnStart) for event in events)
        ends = ends or any(isinstance(event, RunEnd) for event in events)
        lines: list[str] = []
        for event in events:
            lines += self._tell(event, ends=ends)
        return lines

    def _tell(self, event: Event, *, ends: bool) -> list[str]:
        match event:
            case Snapshot():
                return self._adopt(event)
            case RunStart():
                self.run, self.run_since, self.turn = event.run, self.clock(), 1
                return [f"run {event.run} began"]
            case TurnStart():
                self.turn, self.calls, self.text = event.turn, {}, ""
            case MessageStart():
                self.text = ""
            case MessageUpdate():
                if event.kind != self.kind:
                    self.text, self.kind = "", event.kind
                self.text = (self.text + event.text)[-TEXT_KEPT_CHARS:]
            case MessageEnd():
                self.text = self.kind = ""
                return _answer_lines(event.entry, ends=ends)
            case ToolExecutionStart():
                call = RunningCall(
                    event.task, event.index, event.name, event.arguments, self.clock()
                )
                self.calls[event.index] = call
                return [f"task {call.task}: {call.title()}"]
            case ToolExecutionUpdate():
                self._output(event)
            case ToolExecutionEnd():
                return self._result_lines(event)
            case PermissionAsked():
                self.permissions[event.request.id] = event.request
                return self.asked(event.request)
            case PermissionDecided():
                return self._decided(event.request)
            case RetryStart():
                self.retry = event
                error = clean_line(event.error, chars_max=LINE_CHARS_MAX)
                return [f"the request failed ({error}); try {event.try_number + 1} follows"]
            case RetryEnd():
                self.retry = None
            case SubmissionChanged():
                if event.status in ("done", "unanswered"):
                    self.settled[event.submission] = event.status
            case RunEnd():
                return self._run_end(event)
            case _:
                pass  # other entries say nothing here; `conversation log` shows them
        return []

    def _adopt(self, snapshot: Snapshot) -> list[str]:
        """Start anew from a state: at the beginning, and after falling behind."""
        live = snapshot.live
        if live.get("run") != self.run:
            self.run, self.run_since = live.get("run"), None
        self.turn = live.get("turn") or 0
        blocks = (live.get("partial") or {}).get("blocks") or []
        self.text = blocks[-1]["text"][-TEXT_KEPT_CHARS:] if blocks else ""
        self.kind = blocks[-1]["type"] if blocks else ""
        self.retry = None
        known = {call.task: call for call in self.calls.values()}
        self.calls = {}
        for call in live.get("calls") or ():
            if call["task"] is None or call["status"] not in ("running", "waiting"):
                continue
            found = known.get(call["task"]) or RunningCall(
                call["task"], call["index"], call["name"], None, None
            )
            found.output = call["output_tail"][-TEXT_KEPT_CHARS:]
            found.held_by = call["held_by"]
            self.calls[call["index"]] = found
        told = self.permissions
        self.permissions = {request.id: request for request in snapshot.permissions}
        new = [each for each in snapshot.permissions if each.id not in told]
        return [line for request in new for line in self.asked(request)]

    def _decided(self, request: PermissionRequest) -> list[str]:
        self.permissions.pop(request.id, None)
        state: str = request.state
        if request.closed_reason:
            state += f" ({request.closed_reason})"
        by = f" by {clean_line(request.decided_by, chars_max=64)}" if request.decided_by else ""
        tool = clean_line(request.tool, chars_max=64)
        return [f"permission {request.id} (task {request.task}, {tool}) {state}{by}"]

    def _output(self, event: ToolExecutionUpdate) -> None:
        call = self.calls.get(event.index)
        if call is not None:
            before = "" if event.replaced else call.output
            call.output = (before + event.text)[-TEXT_KEPT_CHARS:]
            call.held_by = event.held_by

    def _result_lines(self, event: ToolExecutionEnd) -> list[str]:
        call = self.calls.pop(event.call[1], None)
        lines: list[str] = []
        for message in event.entry.messages:
            if not isinstance(message, ToolResultMessage):
                continue
            how = "done"
            if message.is_error:
                how = f"error ({message.code or 'tool_error'})"
            took = ""
            if call is not None and call.since is not None:
                took = f" in {duration(self.clock() - call.since)}"
            task = event.entry.by_task if call is None else call.task
            who = "call" if task is None else f"task {task}"
            lines.append(f"{who}: {clean_line(message.name, chars_max=64)} {how}{took}")
            # A block is a paragraph of its own, as `conversation log` shows it too.
            texts = (b.text.removesuffix("\n") for b in message.blocks if isinstance(b, TextBlock))
            lines += _quoted("\n".join(texts))
        return lines

    def _run_end(self, event: RunEnd) -> list[str]:
        took = ""
        if self.run_since is not None:
            took = f" after {duration(self.clock() - self.run_since)}"
        self.run, self.run_since, self.calls, self.text = None, None, {}, ""
        if event.status == "done":
            return [f"run {event.run} done{took}"]
        return [f"run {event.run} unanswered{took}"]


def reason_text(reason: str | None, detail: str | None) -> str:
    """Return why there is no answer: the code, what it means, and what was seen."""
    text = ""
    if reason:
        text += f": {clean_line(reason, chars_max=60)}"
        meaning = explain_code(reason)
        if meaning:
            text += f". {meaning}"
    if detail:
        text += f" ({clean_line(detail, chars_max=1_000)})"
    return text


def _answer_lines(entry: Entry, *, ends: bool) -> list[str]:
    """What stays of an answer on the way to the last one, or of one that was cut."""
    lines: list[str] = []
    for message in entry.messages:
        if not isinstance(message, AssistantMessage):
            continue
        if message.status == "complete":
            # Without calls it is the final answer, which is the result and not told here.
            if (message.tool_calls or not ends) and message.text.strip():
                lines += clean(message.text).strip().split("\n")
        elif message.status == "deferred":
            lines.append("the provider answers later, and is asked for it again")
        elif message.status == "aborted" or message.text:
            kept = len(message.text)
            why = f" ({clean_line(message.error or '', chars_max=LINE_CHARS_MAX)})"
            lines.append(
                f"the answer was cut, {kept} characters of it are kept"
                f"{why if message.error else ''}"
            )
    return lines


def _quoted(text: str) -> list[str]:
    """The end of a result, indented."""
    if not text.strip():
        return []
    shown = tail(text, lines=RESULT_LINES_MAX, chars_max=LINE_CHARS_MAX)
    more = text.strip("\n").count("\n") + 1 - len(shown)
    lines = [f"    … {more} lines above"] if more > 0 else []
    return lines + [f"    {line}" for line in shown]
