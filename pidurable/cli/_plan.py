"""What a resume will do, before anything runs: read from the store and the installed tools.

For each thing that a dead or closed process left in the middle there is one line with a stable
word: `rerun` (safe to run again), `reconcile` (the tool is asked what became of it), `interrupt`
(the effect may have happened: the model is told so and decides), `park` (it may have happened: a
person will be asked), `ask` (a person is asked already), `continue` (nothing is repeated), `resend`
(a model request is sent again; the partial answer is kept), `blocked` (it waits for somebody),
`abort` (an abort goes on), `held` (an input that nothing would place: the run before it had no
answer).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import attrs

from pidurable.agent._decisions import Happened, Rerun
from pidurable.agent._permissions import PermissionRequest
from pidurable.agent._replay import policy_of
from pidurable.cli._options import Options
from pidurable.cli._render import clean_line, compact_json
from pidurable.harness._reader import Reader
from pidurable.records._codes import explain_code
from pidurable.records._tasks import Status, TaskRecord
from pidurable.registry import Registry, Tool

__all__ = ["Plan", "PlanItem", "make_plan"]

Verdict = Literal[
    "rerun", "reconcile", "interrupt", "park", "ask", "continue", "resend", "blocked", "abort"
]
_TASKS_READ_MAX = 10_000
ITEMS_SHOWN_MAX = 40
_MISSING = "missing_definition"
_NO_TOOL = "its tool is not installed now: not run, and the model is told"


@attrs.frozen(kw_only=True)
class PlanItem:
    """What becomes of one task."""

    task: int
    kind: str
    verdict: Verdict
    text: str

    def line(self) -> str:
        """Return the line for people."""
        return f"  {self.verdict:<9} task {self.task}: {self.text}"


@attrs.frozen(kw_only=True)
class Plan:
    """What a resume will do."""

    items: tuple[PlanItem, ...]
    submissions: tuple[int, ...]
    """Inputs that are not answered yet."""
    queued: int
    """Of those, how many were not placed yet."""
    held: tuple[int, ...]
    """Of those that are queued, the ones that only another prompt will place."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to resume."""
        return not self.items and not self.submissions

    def lines(self, options: Options) -> list[str]:
        """Return the plan for people, with commands as they can be typed."""
        found = [item.line() for item in self.items[:ITEMS_SHOWN_MAX]]
        rest = Counter(item.verdict for item in self.items[ITEMS_SHOWN_MAX:])
        if rest:
            counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(rest.items()))
            found.append(f"  … and {rest.total()} tasks more: {counts}")
        if self.submissions:
            words = "input is" if len(self.submissions) == 1 else "inputs are"
            queued = f", {self.queued} of them queued" if self.queued else ""
            found.append(f"  {len(self.submissions)} {words} not answered yet{queued}")
        go_on = clean_line(options.command("run", "--continue", "PROMPT"))
        found += [
            f"  held      input {id}: the run before it had no answer; the next prompt takes it "
            f"along (`{go_on}`)"
            for id in self.held
        ]
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the plan for programs."""
        return {
            "items": [attrs.asdict(item) for item in self.items],
            "submissions": list(self.submissions),
            "held": list(self.held),
        }


async def make_plan(reader: Reader, registry: Registry) -> Plan:
    """Read what was left in the middle, and say what becomes of it. Runs no code of any tool."""
    items: list[PlanItem] = []
    lives: dict[int, Any] = {}
    asked = {request.task: request.id for request in await reader.permissions()}
    for task in await reader.tasks(live=True, limit=_TASKS_READ_MAX):
        conversation = task.conversation_id
        if conversation not in lives:
            lives[conversation] = await reader.live(conversation) or {}
        decided = None if task.id in asked else await _decided(reader, task)
        item = _item(task, lives[conversation], registry, asked.get(task.id), decided)
        if item is not None:
            items.append(item)
    submissions: list[int] = []
    held: list[int] = []
    queued = 0
    for conversation_record in await reader.conversations():
        live = await reader.live(conversation_record.id) or {}
        for submission in await reader.open_submissions(conversation_record.id):
            submissions.append(submission.id)
            if submission.status == "queued":
                queued += 1
                if live.get("run") is None:
                    held.append(submission.id)
    return Plan(items=tuple(items), submissions=tuple(submissions), queued=queued, held=tuple(held))


async def _decided(reader: Reader, task: TaskRecord) -> PermissionRequest | None:
    """What somebody has decided about a call, which goes on with it."""
    checkpoint = task.checkpoint if isinstance(task.checkpoint, dict) else {}
    if task.kind != "pi.tool" or task.phase != "approval":
        return None
    return await reader.permission(checkpoint["request"])


def _item(
    task: TaskRecord,
    live: dict[str, Any],
    registry: Registry,
    asked: int | None,
    decided: PermissionRequest | None,
) -> PlanItem | None:
    """What becomes of one live task; None for one that merely waits for others."""
    verdict: Verdict = "continue"
    if task.abort_us is not None:
        verdict, text = "abort", f"{_named(task)} is being aborted, which goes on"
    elif not _is_installed(task, registry):
        verdict, text = "blocked", f"{_named(task)}: {_MISSING}. {explain_code(_MISSING)}"
    elif task.blocked and task.blocked != _MISSING:
        meaning = explain_code(task.blocked) or ""
        verdict = "blocked"
        text = f"{_named(task)}: {clean_line(task.blocked, chars_max=60)}. {meaning}"
    elif asked is not None:
        verdict, text = "ask", f"{_named(task)} waits for a person: permission {asked}"
    elif decided is not None:
        verdict, text = _as_decided(task, decided, registry)
    elif task.kind == "pi.tool" and task.phase == "execute":
        verdict, text = _effect(task, registry)
    elif task.kind == "pi.tool":
        follows = "and begins" if _tool(task, registry) else f"and {_NO_TOOL}"
        text = f"{_named(task)} had not begun, {follows}"
    elif task.kind == "pi.generation" and task.phase == "request":
        verdict, text = "resend", _request_text(task, live)
    elif task.kind == "pi.compaction" and task.phase == "summarize":
        verdict, text = "resend", "the summary is asked for again; nothing was replaced"
    elif task.status in (Status.WAITING, Status.COMPLETING):
        return None
    else:
        text = f"{_named(task)} goes on from phase {clean_line(task.phase or '?', chars_max=60)}"
    return PlanItem(task=task.id, kind=task.kind, verdict=verdict, text=text)


def _is_installed(task: TaskRecord, registry: Registry) -> bool:
    """Whether there is code for a task; what blocked it when it was last held may be there now."""
    return task.kind.startswith("pi.") or registry.snapshot.definition(task.kind) is not None


def _named(task: TaskRecord) -> str:
    given = task.input if isinstance(task.input, dict) else {}
    if task.kind == "pi.tool":
        name = clean_line(str(given.get("name")), chars_max=64)
        return f"{name} {compact_json(given.get('arguments'), chars_max=100)}"
    return clean_line(task.kind, chars_max=60)


def _tool(task: TaskRecord, registry: Registry) -> Tool[..., Any] | None:
    """The tool of a call, as it is installed now."""
    given = task.input if isinstance(task.input, dict) else {}
    tools = registry.snapshot.tools()
    return next((tool for tool in tools if tool.name == given.get("name")), None)


def _as_decided(
    task: TaskRecord, request: PermissionRequest, registry: Registry
) -> tuple[Verdict, str]:
    """A call that goes on with a decision; what a yes covers is looked at once more then."""
    said = f"{_named(task)}: permission {request.id} is {request.state}"
    gone = f"but {_NO_TOOL}; load the extension {compact_json(request.extension, chars_max=64)}"
    if request.subject == "call":
        if request.state != "granted":
            return "continue", f"{said}: not run, and the model is told"
        if _tool(task, registry) is None:
            return "continue", f"{said}, {gone}"
        return "continue", f"{said}: it begins, if it still is what was shown"
    if isinstance(request.decision, Rerun):
        if _tool(task, registry) is None:
            return "interrupt", f"{said}, {gone}"
        return "rerun", f"{said}: it is run again"
    if isinstance(request.decision, Happened):
        return "continue", f"{said}: the model gets the result that a person has given"
    return "interrupt", f"{_named(task)} may have happened: not repeated, the model is told"


def _effect(task: TaskRecord, registry: Registry) -> tuple[Verdict, str]:
    """An effect that had begun: the stricter of the stored and today's policy counts."""
    checkpoint = task.checkpoint if isinstance(task.checkpoint, dict) else {}
    stored = str(checkpoint.get("replay"))
    tool = _tool(task, registry)
    policy = policy_of(stored, tool)
    if policy == "safe":
        return "rerun", f"{_named(task)} had begun, and is safe to run again"
    if policy == "reconcile":
        return "reconcile", f"{_named(task)} had begun, and its tool is asked what became of it"
    if policy == "park":
        return "park", f"{_named(task)} had begun and may have happened: a person is asked"
    if tool is None:
        return "interrupt", f"{_named(task)} had begun, and its tool is not installed now"
    return (
        "interrupt",
        f"{_named(task)} had begun and may have happened: not repeated, the model is told",
    )


def _request_text(task: TaskRecord, live: dict[str, Any]) -> str:
    partial = live.get("partial") if live.get("generation") == task.id else None
    blocks = partial.get("blocks", []) if isinstance(partial, dict) else []
    kept = sum(len(block.get("text", "")) for block in blocks)
    if not kept:
        return "the model request is sent again"
    return f"the model request is sent again; {kept} characters of the cut answer are kept"
