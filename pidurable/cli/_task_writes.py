"""`pidurable task signal`, `retry` and `resume`: one commit each, and no work of their own.

The store is held for the moment of the commit and nothing in it runs meanwhile, not even an abort
that was asked for earlier: whoever lifts a block or sends a message has not asked for that.
`pidurable resume` goes on with it. A live holder is asked to make the commit itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pidurable.cli._errors import Exit, UsageError
from pidurable.cli._host import Host
from pidurable.cli._options import Options, check_text
from pidurable.cli._outside import change
from pidurable.cli._render import CELL_CHARS_MAX, clean_line, outcome_word
from pidurable.cli._sessions import bring_up_to_date
from pidurable.cli._tasks import check_store
from pidurable.errors import NotJsonError
from pidurable.harness._client import Client
from pidurable.harness._open import Harness
from pidurable.harness._reader import open_reader
from pidurable.records import _json
from pidurable.records._tasks import TaskRecord
from pidurable.tasks._transaction import TreeTransaction

__all__ = ["lift_tasks", "say_how_to_go_on", "signal_tasks"]


async def signal_tasks(
    host: Host, options: Options, ids: Sequence[int], *, name: str, payload: str, key: str | None
) -> int:
    """Send one signal to each of some tasks, to all or to none of them."""
    check_text(name, "NAME")
    if key is not None:
        check_text(key, "--key")
    try:
        value = _json.loads(payload, path="PAYLOAD")
    except NotJsonError as error:
        raise UsageError(
            f"PAYLOAD is not JSON: {error}", "A text needs quotes of its own: '\"yes\"'"
        ) from error
    check_store(options.store)
    await bring_up_to_date(options.store)
    async with open_reader(options.store) as reader:
        for id in ids:
            await reader.task(id)

    async def own(harness: Harness) -> bool:
        async with harness.commit() as tx:
            for id in ids:
                tx.signal(id, name, value, key=key)
        return True

    async def ask(client: Client, command: str) -> bool:
        await client.signal_tasks(
            list(ids), name, value, signal_key=key, key=command, timeout=options.timeout
        )
        return False

    stored_here = await change(host, options, own=own, ask=ask)
    if options.output == "json":
        host.out_json([{"task": id, "signal": name} for id in ids])
    elif options.output == "ids":
        host.out(str(id) for id in ids)
    else:
        host.out(f"task {id} has the signal {clean_line(name, chars_max=60)}" for id in ids)
        if stored_here:
            say_how_to_go_on(host, options)
    return Exit.DONE


async def lift_tasks(
    host: Host, options: Options, ids: Sequence[int], *, verb: Literal["retry", "resume"]
) -> int:
    """Lift what blocks tasks: any reason (`retry`), or the interruption by a restart (`resume`)."""
    check_store(options.store)
    await bring_up_to_date(options.store)
    async with open_reader(options.store) as reader:
        tasks = [await reader.task(id) for id in ids]
    fit = [task for task in tasks if _fits(task, verb)]
    for task in tasks:
        if task not in fit:
            host.err(f"task {task.id} is not {_LIFTED[verb]} ({outcome_word(task)}); left alone")
    stored_here = True
    if fit:

        async def own(harness: Harness) -> bool:
            async with harness.commit() as tx:
                for task in fit:
                    _lift(tx, verb)(task.id)
            return True

        async def ask(client: Client, command: str) -> bool:
            call = client.retry_tasks if verb == "retry" else client.resume_tasks
            await call([task.id for task in fit], key=command, timeout=options.timeout)
            return False

        stored_here = await change(host, options, own=own, ask=ask)
    if options.output == "json":
        host.out_json([{"task": task.id, "was": task.blocked} for task in fit])
    elif options.output == "ids":
        host.out(str(task.id) for task in fit)
    elif fit:
        host.out(f"task {task.id} was blocked ({_reason(task)}) and may run again" for task in fit)
        if stored_here:
            say_how_to_go_on(host, options)
    return Exit.DONE


_LIFTED = {"retry": "blocked", "resume": "interrupted"}


def _fits(task: TaskRecord, verb: str) -> bool:
    return task.blocked is not None and (verb == "retry" or task.blocked == "interrupted")


def _lift(tx: TreeTransaction, verb: str) -> Callable[[int], None]:
    return tx.retry_task if verb == "retry" else tx.resume_task


def _reason(task: TaskRecord) -> str:
    return clean_line(task.blocked or "", chars_max=CELL_CHARS_MAX)


def say_how_to_go_on(host: Host, options: Options) -> None:
    """Say that what was stored waits for somebody who runs it."""
    host.err(f"stored; nothing was run. `{clean_line(options.resume_command)}` goes on")
