"""How a run ends for whoever asked for it: the answer, or why there is none, and the exit code.

The same whether this process did the work or another one that holds the session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pidurable.agent._permissions import PermissionRequest
from pidurable.cli._errors import Exit
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._render import clean, clean_line
from pidurable.cli._story import reason_text
from pidurable.harness._submission import Settled
from pidurable.records._codec import encode_usage
from pidurable.records._codes import explain_code
from pidurable.records._entries import Entry
from pidurable.records._messages import AssistantMessage, Usage
from pidurable.records._submissions import SubmissionRecord
from pidurable.records._tasks import TaskRecord

__all__ = [
    "report",
    "say_asked",
    "say_stuck",
    "so_far",
    "tell_unended",
    "waits_for_others",
]

BLOCKED_SHOWN_MAX = 20

EntriesOf = Callable[[Settled], Awaitable[list[Entry]]]
"""Reads the entries of a run, from behind its input to its answer."""


def so_far(record: SubmissionRecord) -> Settled:
    """How it stands with input that has not ended: queued, or placed and being answered."""
    return Settled(
        id=record.id,
        status=record.status,
        reason=record.reason,
        detail=record.detail,
        entry=record.entry,
        answer=record.answer,
        run=record.run,
        answer_text="",
    )


def waits_for_others(record: TaskRecord) -> bool:
    """Whether a task can only be moved by others: it waits without a deadline, or has decided."""
    if record.status.word == "completing":
        return True
    wait = record.wait
    return record.status.word == "waiting" and (wait is None or wait.deadline_us is None)


def say_stuck(host: Host, blocked: Sequence[Any]) -> None:
    """Say which tasks are blocked, and what a person can do about them."""
    for row in blocked[:BLOCKED_SHOWN_MAX]:
        code = row.blocked or ""
        host.say(
            f"task {row.id} ({clean_line(row.kind)}) is blocked: {clean_line(code)}. "
            f"{explain_code(code) or ''}",
            "yellow",
        )
    if len(blocked) > BLOCKED_SHOWN_MAX:
        host.say(f"… and {len(blocked) - BLOCKED_SHOWN_MAX} tasks more", "yellow")
    # One way out for each reason, of the first task that is blocked for it.
    for row in {row.blocked: row for row in reversed(blocked)}.values():
        host.say(f"  next: {_way_out(row)}, or give it up with `pidurable task abort {row.id}`")


def say_asked(
    host: Host,
    options: Options,
    requests: Sequence[PermissionRequest],
    *,
    goes_on: str | None = None,
) -> None:
    """Say that nothing moves before a person has decided, and how that is done.

    Args:
        host, options: Of the command.
        requests: What is open.
        goes_on: What happens then; by default the command that goes on.
    """
    if not requests:
        return
    count = len(requests)
    ids = ", ".join(str(request.id) for request in requests[:BLOCKED_SHOWN_MAX])
    host.say(
        f"{count} call{' waits' if count == 1 else 's wait'} for a person, and nothing else is "
        f"left to do: permission {ids}{', …' if count > BLOCKED_SHOWN_MAX else ''}",
        "yellow",
    )
    show = options.command("approval", "show", str(requests[0].id))
    host.say(f"  next: decide (`{clean_line(show)}` says how), then")
    host.say(f"        {goes_on or f'`{clean_line(options.resume_command)}` goes on'}")


def _way_out(row: Any) -> str:
    """What a person does about one blocked task."""
    if row.blocked == "interrupted":
        return f"`pidurable task resume {row.id}` and `pidurable resume`"
    if row.blocked in ("faulted", "crash_loop"):
        return f"mend the cause, `pidurable task retry {row.id}` and `pidurable resume`"
    return "install what is missing (--extension) and `pidurable resume`"


async def report(
    host: Host,
    options: Options,
    settled: Sequence[Settled],
    entries: EntriesOf,
    *,
    single: bool,
) -> int:
    """Write the answers to stdout and say by the exit code how it went."""
    codes = [_code(each) for each in settled]
    if host.events:
        host.out_events([await _result(entries, each) for each in settled])
    elif options.output == "json":
        found = [await _settled_json(entries, each) for each in settled]
        host.out_json(found[0] if single else {"submissions": found})
    elif options.output == "ids":
        host.out(str(each.id) for each in settled)
    else:
        for each in settled:
            if each.status == "done":
                host.out(clean(each.text))
    for each in settled:
        if each.status == "queued":
            host.say(
                f"submission {each.id} stays queued: the run before it had no answer", "yellow"
            )
            host.say("  next: `pidurable run --continue PROMPT` takes it along")
        elif each.status != "done":
            host.say(f"submission {each.id} unanswered{reason_text(each.reason, each.detail)}")
            host.say("  next: `pidurable conversation log` shows how far it came")
    if not settled:
        host.say("done: no task is live any more")
    return next((code for code in codes if code is not Exit.DONE), Exit.DONE)


async def tell_unended(
    host: Host, settled: Sequence[Settled] | None, entries: EntriesOf, *, detail: str = ""
) -> None:
    """Tell a program that reads events how it stands, where nobody waits for the end any more.

    Args:
        host: Of the command.
        settled: All that was handed in, ended or not; None where nothing was, as far as is known.
        entries: Reads what a run has said.
        detail: Why there is no more to tell, where nothing was handed in.
    """
    if not host.events:
        return
    if settled is None:
        nothing = dict.fromkeys(("submission", "run", "status", "text", "reason"))
        results = [{"type": "result", **nothing, "detail": detail, "usage": encode_usage(Usage())}]
    else:
        results = [await _result(entries, each) for each in settled]
    host.out_events(results)


async def _result(entries: EntriesOf, settled: Settled) -> dict[str, Any]:
    """The last event of each submission."""
    return {"type": "result", **await _settled_json(entries, settled)}


def _code(settled: Settled) -> Exit:
    if settled.status == "done":
        return Exit.DONE
    if settled.status == "queued":
        return Exit.PARKED
    return Exit.OUT_OF_BUDGET if settled.reason == "turn_limit" else Exit.FAILED


async def _settled_json(entries: EntriesOf, settled: Settled) -> dict[str, Any]:
    """One settled submission, with the usage of its run (failed and cut answers too)."""
    usage = Usage()
    if settled.entry is not None:
        for entry in await entries(settled):
            for message in entry.messages:
                if isinstance(message, AssistantMessage):
                    usage += message.usage
    return {
        "submission": settled.id,
        "run": settled.run,
        "status": settled.status,
        "text": settled.text if settled.status == "done" else None,
        "reason": settled.reason,
        "detail": settled.detail,
        "usage": encode_usage(usage),
    }
