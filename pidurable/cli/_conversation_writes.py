"""The verbs of `pidurable conversation` that change something: each is one commit, and no work.

Where another process holds the session it is asked and goes on with what it was given. Where nobody
does, the store is held for the moment of the commit, nothing in it runs, and `pidurable resume`
goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import attrs

from pidurable.agent._inbox import blocks_of
from pidurable.cli._conversations import root_id, said_text
from pidurable.cli._errors import Exit, UsageError
from pidurable.cli._host import STDIN, Host
from pidurable.cli._options import Options, check_text
from pidurable.cli._outside import change
from pidurable.cli._render import clean, clean_line
from pidurable.cli._sessions import bring_up_to_date
from pidurable.cli._task_writes import say_how_to_go_on
from pidurable.cli._tasks import check_store
from pidurable.harness._client import Client
from pidurable.harness._command_kinds import KINDS
from pidurable.harness._open import Harness
from pidurable.harness._reader import open_reader
from pidurable.records import _codec
from pidurable.records._messages import UserMessage
from pidurable.records._submissions import SubmissionRecord
from pidurable.session._seams import SystemRandomness

__all__ = [
    "abort_conversation",
    "check_when_busy",
    "compact_conversation",
    "continue_conversation",
    "reset_conversation",
    "submit_text",
    "withdraw_submissions",
    "write_text",
]

T = TypeVar("T")

TEXT_CHARS_MAX = 1_000_000
NOTE = "note"
"""The kind of an entry that `write` makes."""


async def submit_text(
    host: Host,
    options: Options,
    text: str,
    *,
    conversation: int | None,
    when_busy: str,
    request_id: str | None,
) -> int:
    """Hand in an input and print its submission, without waiting for the answer."""
    text = await _text(host, text)
    if request_id is not None:
        check_text(request_id, "--request-id")
    id = await _conversation(options, conversation)
    blocks = _codec.encode_messages([UserMessage(blocks=blocks_of(text), at_us=0)])[0]["blocks"]
    fields = {"conversation": id, "blocks": blocks, "when_busy": when_busy}

    async def ask(client: Client, command: str) -> int:
        return await client.submit(
            text,
            conversation=id,
            when_busy=when_busy,  # type: ignore[arg-type]
            request_id=request_id,
            key=command,
            timeout=options.timeout,
        )

    submission, here = await _changed(
        host, options, "submit", {**fields, "request_id": request_id}, ask
    )
    return await _show_submission(host, options, submission, here, what="handed in")


async def write_text(
    host: Host,
    options: Options,
    text: str,
    *,
    conversation: int | None,
    request_id: str | None,
) -> int:
    """Write a note that the model sees with its next request, and that asks it nothing."""
    text = await _text(host, text)
    if request_id is not None:
        check_text(request_id, "--request-id")
    id = await _conversation(options, conversation)
    message = UserMessage(blocks=blocks_of(text), at_us=host.now_us())
    fields = {
        "conversation": id,
        "value": None,
        "kind": NOTE,
        "messages": _codec.encode_messages([message]),
        "head": None,
        "edits": [],
        "request_id": request_id,
    }

    async def ask(client: Client, command: str) -> int:
        return await client.write(
            kind=NOTE,
            messages=[message],
            conversation=id,
            request_id=request_id,
            key=command,
            timeout=options.timeout,
        )

    submission, here = await _changed(host, options, "write", fields, ask)
    return await _show_submission(host, options, submission, here, what="written")


async def reset_conversation(host: Host, options: Options, conversation: int | None) -> int:
    """Let the model's context start anew."""
    id = await _existing(options, conversation)
    fields = {"conversation": id, "kind": "pi.reset", "head": 0, "value": None}

    async def ask(client: Client, command: str) -> int:
        return await client.write(
            kind="pi.reset", head=0, conversation=id, key=command, timeout=options.timeout
        )

    whole = {**fields, "messages": [], "edits": [], "request_id": None}
    submission, here = await _changed(host, options, "write", whole, ask)
    return await _show_submission(host, options, submission, here, what="reset")


async def continue_conversation(host: Host, options: Options, conversation: int | None) -> int:
    """Continue a run that has no answer, and print the submission of that."""
    id = await _existing(options, conversation)
    request_id = SystemRandomness().uuid()

    async def own(harness: Harness) -> tuple[int, bool]:
        return await harness.conversation(id)._continue(request_id, starts=False), True

    async def ask(client: Client, command: str) -> tuple[int, bool]:
        submission = await client.continue_run(id, key=command, timeout=options.timeout)
        return submission, False

    submission, here = await change(host, options, own=own, ask=ask)
    return await _show_submission(host, options, submission, here, what="continues the run")


async def compact_conversation(
    host: Host, options: Options, conversation: int | None, *, instructions: str | None
) -> int:
    """Begin a compaction and print its task."""
    if instructions is not None:
        check_text(instructions, "--instructions")
    id = await _existing(options, conversation)

    async def ask(client: Client, command: str) -> int:
        return await client.compact(id, instructions, key=command, timeout=options.timeout)

    fields = {"conversation": id, "instructions": instructions}
    task, here = await _changed(host, options, "compact", fields, ask)
    if options.output == "json":
        host.out_json({"task": task, "conversation": id})
    elif options.output == "ids":
        host.out(str(task))
    else:
        host.out(f"task {task} compacts conversation {id}")
        if here:
            say_how_to_go_on(host, options)
    return Exit.DONE


async def withdraw_submissions(host: Host, options: Options, ids: Sequence[int]) -> int:
    """Take back what is still queued, and print what was said."""
    check_store(options.store)
    await bring_up_to_date(options.store)
    async with open_reader(options.store) as reader:
        for id in ids:
            await reader.submission(id)
    taken: list[SubmissionRecord] = []
    try:
        for id in ids:

            async def ask(client: Client, command: str, id: int = id) -> Any:
                record = await client.withdraw_submission(id, key=command, timeout=options.timeout)
                return None if record is None else attrs.asdict(record, recurse=False)

            found, _ = await _changed(host, options, "withdraw", {"submission": id}, ask)
            if found is None:
                async with open_reader(options.store) as reader:
                    record = await reader.submission(id)
                host.err(f"submission {id} is {record.status} already: too late to take it back")
            else:
                taken.append(SubmissionRecord(**found))
    except BaseException:
        if taken:
            _show_taken(host, options, taken)  # what was said is to be seen, whatever ends this
        raise
    _show_taken(host, options, taken)
    return Exit.DONE if len(taken) == len(ids) else Exit.FAILED


async def abort_conversation(
    host: Host, options: Options, conversation: int | None, *, reason: str
) -> int:
    """Abort what runs in a conversation, and print what was queued, so that nothing is lost."""
    check_text(reason, "--reason")
    id = await _existing(options, conversation)

    async def ask(client: Client, command: str) -> Any:
        taken = await client.abort_conversation(id, reason, key=command, timeout=options.timeout)
        return [attrs.asdict(record, recurse=False) for record in taken]

    fields = {"conversation": id, "reason": reason}
    found, here = await _changed(host, options, "abort_conversation", fields, ask)
    _show_taken(host, options, [SubmissionRecord(**each) for each in found])
    host.err(f"conversation {id} is to be aborted")
    if here:
        say_how_to_go_on(host, options)
    return Exit.DONE


# --- how --------------------------------------------------------------------------------------


async def _text(host: Host, text: str) -> str:
    if text == STDIN:
        text = host.read_stdin()
    if not text.strip():
        raise UsageError("the text is empty", "Say something; `-` reads it from standard input")
    if len(text) > TEXT_CHARS_MAX:
        raise UsageError(f"the text has {len(text)} characters, at most {TEXT_CHARS_MAX} are taken")
    return check_text(text, "TEXT")


async def _conversation(options: Options, conversation: int | None) -> int | None:
    """Where something goes; None for a root that is made with it."""
    check_store(options.store)
    await bring_up_to_date(options.store)
    async with open_reader(options.store) as reader:
        if conversation is not None:
            await reader.conversation(conversation)
    return conversation


async def _existing(options: Options, conversation: int | None) -> int:
    check_store(options.store)
    await bring_up_to_date(options.store)
    async with open_reader(options.store) as reader:
        if conversation is None:
            return await root_id(reader)
        await reader.conversation(conversation)
    return conversation


async def _changed(
    host: Host,
    options: Options,
    kind: str,
    fields: dict[str, Any],
    ask: Callable[[Client, str], Awaitable[T]],
) -> tuple[T, bool]:
    """Do what a command does, here or by asking the holder; with whether it was done here."""
    apply = KINDS[kind].apply
    assert apply is not None

    async def own(harness: Harness) -> tuple[T, bool]:
        async with harness.commit() as tx:
            found = apply(harness, tx, **fields)
            tx.created_by_host = False  # nobody asked for work here
        return found, True

    async def asking(client: Client, command: str) -> tuple[T, bool]:
        return await ask(client, command), False

    return await change(host, options, own=own, ask=asking)


async def _show_submission(
    host: Host, options: Options, submission: int, here: bool, *, what: str
) -> int:
    async with open_reader(options.store) as reader:
        record = await reader.submission(submission)
    if options.output == "json":
        host.out_json(_submission_json(record))
    elif options.output == "ids":
        host.out(str(record.id))
    else:
        reason = "" if record.reason is None else f" ({clean_line(record.reason)})"
        host.out(
            f"submission {record.id} {what}: {record.status}{reason}, "
            f"conversation {record.conversation_id}"
        )
        if here and record.status in ("queued", "placed"):
            say_how_to_go_on(host, options)
    return Exit.DONE


def _submission_json(record: SubmissionRecord) -> dict[str, Any]:
    fields = ("id", "conversation_id", "kind", "status", "reason", "run", "entry")
    return {name: getattr(record, name) for name in fields}


def _show_taken(host: Host, options: Options, taken: Sequence[SubmissionRecord]) -> None:
    if options.output == "json":
        host.out_json([{"submission": each.id, "content": each.content} for each in taken])
    elif options.output == "ids":
        host.out(str(each.id) for each in taken)
    else:
        for each in taken:
            host.out(f"submission {each.id} taken back")
            host.out(f"    {line}" for line in _said(each).split("\n"))


def _said(record: SubmissionRecord) -> str:
    """What somebody had typed, so that it can be handed in again."""
    return clean(said_text(record.content)) or "(no text)"


def check_when_busy(*, steer: bool, reject: bool) -> str:
    """What is done with input while a run is active, by its options."""
    if steer and reject:
        raise UsageError("--steer and --reject say two things", "Give one of them")
    return "steer" if steer else "reject" if reject else "follow_up"
